"""The labels that a run trains on: the answers of the active's label mechanism, and nothing else.

Run by: the active, for all methods alike. Every role is built on `build_data()`, in which the
training labels are replaced and the test labels, which only measure, are not: no true training
label reaches a method's code, and of an unlabelled row (`data.labelled`) only the features do.

Each label is answered once. The answers lie in the active's own checkpoint, saved before
anything is trained on them, so a resumed run finds them there and draws no others. If an older
checkpoint is put back, a later stage is drawn again: from the same key, so with the same answers if
the model computes the same bits, and the run folder's log refuses any others.

Letters: N training rows with a label, K classes.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from apfed_protocols.randomness import derive_key
from secure_apfed.base.files import load_text, open_regular
from secure_apfed.base.names import log_file
from secure_apfed.base.seeds import shuffle_rows
from secure_apfed.config import Config
from secure_apfed.data import UNLABELLED, OwnData
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.learning.descent import ActiveNetworks, Compute, remove_prefix
from secure_apfed.measures.tasks import TASKS
from secure_apfed.methods import PartyCheckpoint, PartySecrets, Session
from secure_apfed.privacy.randomised_response import first_epoch_of, make_label_mechanism

_OPEN = -1
_BATCH = 1000


class TrainingLabels:
    """The randomised labels that replace the true ones in training, randomised stage by stage with
    the active's noise key.

    A log keeps a keyed digest of each stage.
    """

    def __init__(
        self, config: Config, data: OwnData, *, key: bytes, log: Path | None = None
    ) -> None:
        """Divide the labelled rows into stages by the seed, with no label answered yet."""
        task = TASKS[config.task].from_targets(data.targets, loss=config.train.loss)
        assert data.table.labels is not None
        known_N = data.table.labels != UNLABELLED
        task.check_labels(data.table.labels[known_N], party=data.table.name)
        self.mechanism = make_label_mechanism(config.labels, classes=len(data.classes))
        self._config = config
        self.data = data
        self._key = key
        self._log = log
        stages = self.mechanism.stages
        rows = len(data.labelled_rows)
        if stages > 1 and stages > min(config.train.epochs, rows):
            raise ConfigError(
                f"labels.mechanism: {stages} stages need as many epochs and labelled rows, got "
                f"{config.train.epochs} epochs and {rows} rows; use randomised_response"
            )
        # The parts depend only on the seed, and never on labels.
        order = shuffle_rows(torch.arange(rows), config.seed, "label stages")
        self._parts = order.tensor_split(stages)
        self._answers_N = torch.full((rows,), _OPEN, dtype=data.table.labels.dtype)
        self._stage = 0

    def is_due(self, epoch: int) -> bool:
        """Return whether the next stage of labels is to be answered after this number of epochs."""
        stages = self.mechanism.stages
        epochs = self._config.train.epochs
        return self._stage < stages and epoch == first_epoch_of(
            self._stage, stages=stages, epochs=epochs
        )

    def answer_stage(self, networks: ActiveNetworks | None) -> None:
        """Answer the labels of the next stage, with the present model's predictions as prior.

        `networks`: the present model; None: the first stage.
        """
        part = self._parts[self._stage]
        rows = self.data.labelled_rows[part]
        prior_NK = None if networks is None else self._predict_prior(networks, rows)
        key = derive_key(self._key, b"labels", self._stage.to_bytes(4, "big"))
        assert self.data.table.labels is not None
        true_N = self.data.table.labels[rows]
        answers = self.mechanism.randomise_labels(true_N, key=key, prior_NK=prior_NK)
        if self._log and not self.mechanism.unsafe:
            self._write_ahead(self._log, answers)
        self._answers_N[part] = answers
        self._stage += 1

    def _write_ahead(self, log: Path, answers: Tensor) -> None:
        """Log these answers before anything is trained on them; refuse other answers for this
        stage.
        """
        digest = derive_key(self._key, b"label answers", answers.numpy().tobytes()).hex()
        noted = load_text(log).split() if log.exists() else []
        if len(noted) <= self._stage:
            with os.fdopen(open_regular(log, create=True), "a", encoding="ascii") as lines:
                lines.write(digest + "\n")
                lines.flush()
                os.fsync(lines.fileno())
        elif noted[self._stage] != digest:
            raise CheckpointError(
                f"{log} notes other answers for stage {self._stage + 1} of the labels: an older "
                "checkpoint was put back where the model computes other bits, and answering twice "
                "would spend epsilon_y twice; restore the newest checkpoint, or begin a new run"
            )

    def _predict_prior(self, networks: ActiveNetworks, rows: Tensor) -> Tensor:
        """Return the model's class probabilities for rows with unanswered labels,
        without dropout.
        """
        compute = Compute.from_settings(self._config.train)
        modules = (networks.encoder, networks.head)
        for module in modules:
            module.eval()
        with torch.no_grad(), compute.prepare_forward(self._config.seed, "label prior"):
            scores = [
                networks.head(
                    networks.encoder(compute.move_tensor(self.data.table.features[part_rows]))
                )
                for part_rows in rows.split(_BATCH)
            ]
        for module in modules:
            module.train()
        return torch.cat(scores).double().softmax(1).cpu()

    def build_data(self) -> OwnData:
        """Return the active's data with the answers as labels, and no true training label.

        Rows whose label is not answered yet are left out.
        """
        data = self.data
        table = self.data.table
        if self.mechanism.unsafe and data.labelled is None:
            return data
        assert table.labels is not None
        train_rows = data.train_rows
        labelled = data.labelled_rows
        answered = torch.zeros(len(labelled), dtype=torch.bool)
        for part in self._parts[: self._stage]:
            answered[part] = True
        labels = torch.full_like(table.labels, UNLABELLED)
        labels[data.test_rows] = table.labels[data.test_rows]
        labels[labelled[answered]] = self._answers_N[answered]
        return replace(
            data,
            table=replace(table, labels=labels),
            train_rows=train_rows[~torch.isin(train_rows, labelled[~answered])],
            labelled=labelled[answered],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the answers so far, for the active's checkpoint; -1 where there is none."""
        return {} if self.mechanism.unsafe else {"answers": self._answers_N}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the answers; nothing is answered again.

        `tensors`: from `tensors`.
        """
        if self.mechanism.unsafe:
            self.answer_stage(None)
            return
        answers_N = tensors.get("answers", torch.empty(0))
        sound = answers_N.dtype == torch.int64 and answers_N.shape == self._answers_N.shape
        answered = answers_N != _OPEN
        stage = 0
        while sound and stage < len(self._parts) and bool(answered[self._parts[stage]].all()):
            stage += 1
        answered_count = sum(len(part) for part in self._parts[:stage])
        inside = (answers_N[answered] >= 0) & (answers_N[answered] < len(self.data.classes))
        if (
            not sound
            or not stage
            or int(answered.sum()) != answered_count
            or not bool(inside.all())
        ):
            raise CheckpointError(
                f"the checkpoint does not hold answers for {len(self._answers_N)} training "
                "labels; it was altered or is of another run"
            )
        self._answers_N = answers_N.clone()
        self._stage = stage


def load_training_labels(
    config: Config, data: OwnData, active: PartySecrets
) -> tuple[TrainingLabels, PartyCheckpoint | None]:
    """Return the labels that the active may train on, and its checkpoint if there is one.

    The labels are newly answered, or those of the checkpoint.
    """
    name = data.table.name
    labels = TrainingLabels(
        config,
        data,
        key=active.noise_key,
        log=log_file(active.logs, "labels", name, "log") if active.logs else None,
    )
    state = active.checkpoints.load_latest() if active.checkpoints else None
    if state:
        labels.load_tensors(remove_prefix("labels", state.tensors))
    else:
        labels.answer_stage(None)
    return labels, state


def restore_older_state(
    state: PartyCheckpoint | None, labels: TrainingLabels, session: Session
) -> PartyCheckpoint | None:
    """Return the active's state where the session resumes, with its labels as of then.

    It may be older than its newest, if another party lost its own. A later stage of labels is
    answered again, with the same answers.
    """
    resumes = session.contract.resumes
    store = session.party_session.party.secrets.checkpoints
    if state is None or resumes is None or state.step == resumes.step:
        return state
    assert store is not None
    older = store.load_latest(until=resumes.step)
    assert older is not None  # it reported that it has this step
    if not labels.mechanism.unsafe:
        labels.load_tensors(remove_prefix("labels", older.tensors))
        if labels.mechanism.stages > 1:
            data = labels.build_data()
            assert data.table.labels is not None
            session.learner.relabel(data.table.labels, data.train_rows)
    return older
