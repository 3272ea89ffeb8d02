"""How a session opens its method: with the run's noise keys and the labels it may train on.

Run by: the session, at its start and wherever it goes on as a resumed run would.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import ConfigError
from secure_apfed.learning.descent import without_prefix
from secure_apfed.methods import METHODS, Session, Start, noise_keys
from secure_apfed.names import log_file
from secure_apfed.runs.checkpoint import Checkpoint, table_digests
from secure_apfed.runs.training_labels import TrainingLabels

__all__ = ["Opening"]


class Opening:
    """What outlives a session: noise keys, and answers to labels, new or from a checkpoint.

    Args:
        config, data: of the run.
        checkpoint: to go on from, or None.
        logs: folder of the ledgers' logs, or None.

    Raises:
        CheckpointError: a checkpoint of other tables or labels.
    """

    def __init__(
        self, config: Config, data: VerticalData, checkpoint: Checkpoint | None, *,
        logs: Path | None,
    ) -> None:  # fmt: skip
        if checkpoint:
            checkpoint.check_tables(data)
        self.config, self._data, self._logs = config, data, logs
        self.tables = table_digests(data)
        self.noise_keys: Mapping[str, bytes] = (
            checkpoint.noise_keys if checkpoint else noise_keys(config, data)
        )
        active = data.active.name
        self.labels = TrainingLabels(
            config, data, key=self.noise_keys[active],
            log=log_file(logs, "labels", active, "log") if logs else None,
        )  # fmt: skip
        if checkpoint:
            self.labels.load_tensors(without_prefix("labels", checkpoint.parties[active]))
        else:
            self.labels.answer(None)

    def open(self, alignment: Mapping[str, Tensor] | None) -> Session:
        """Open a session on the labels answered so far.

        Raises:
            ConfigError: what does not fit together, or too few rows to train on.
        """
        start = Start(
            config=self.config, data=self.labels.data(), noise_keys=self.noise_keys,
            alignment=alignment, logs=self._logs,
        )  # fmt: skip
        session = Session(METHODS[self.config.method], start)
        learner = session.learner
        if len(learner.training_rows) < learner.smallest_batch:
            raise ConfigError(
                f"there are {len(learner.training_rows)} rows to train on, fewer than the smallest "
                f"batch of {learner.smallest_batch}; the intersection holds too few training rows"
            )
        return session
