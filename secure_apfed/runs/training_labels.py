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

_UNANSWERED = -1
_SCORED_AT_ONCE = 1000  # rows of a forward pass


class TrainingLabels:
    """The randomised labels that replace the true ones in training, drawn in stages: parts of the
    labelled rows.

    Args:
        config: settings of the run.
        data: the active's data, with its true labels.
        key: the active's noise key, 32 bytes.
        log: file with a keyed digest of each stage's randomised labels; None: none.

    Raises:
        ConfigError: more stages than epochs or labelled rows.
    """

    def __init__(
        self, config: Config, data: OwnData, *, key: bytes, log: Path | None = None
    ) -> None:
        """Divide the labelled rows into stages by the seed, with no label randomised yet."""
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
        self._answers_N = torch.full((rows,), _UNANSWERED, dtype=data.table.labels.dtype)
        self._stage = 0  # the next one to answer

    def is_due(self, epoch: int) -> bool:
        """Return whether the next stage's labels are due after this number of epochs."""
        stages = self.mechanism.stages
        epochs = self._config.train.epochs
        return self._stage < stages and epoch == first_epoch_of(
            self._stage, stages=stages, epochs=epochs
        )

    def answer_stage(self, networks: ActiveNetworks | None) -> None:
        """Randomise the labels of the next stage, with the present model's predictions as prior.

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
        """Log the digest of a stage's randomised labels before anything is trained on them.

        Raises CheckpointError: the log has other randomised labels for this stage.
        """
        digest = derive_key(self._key, b"label answers", answers.numpy().tobytes()).hex()
        logged_digests = load_text(log).split() if log.exists() else []
        if len(logged_digests) <= self._stage:
            with os.fdopen(open_regular(log, create=True), "a", encoding="ascii") as file:
                file.write(digest + "\n")
                file.flush()
                os.fsync(file.fileno())
        elif logged_digests[self._stage] != digest:
            raise CheckpointError(
                f"{log} notes other answers for stage {self._stage + 1} of the labels: an older "
                "checkpoint was put back where the model computes other bits, and answering twice "
                "would spend epsilon_y twice; restore the newest checkpoint, or begin a new run"
            )

    def _predict_prior(self, networks: ActiveNetworks, rows: Tensor) -> Tensor:
        """Return the model's class probabilities (rows, K) for these rows, without dropout."""
        compute = Compute.from_settings(self._config.train)
        modules = (networks.encoder, networks.head)
        for module in modules:
            module.eval()
        with torch.no_grad(), compute.prepare_forward(self._config.seed, "label prior"):
            scores = [
                networks.head(
                    networks.encoder(compute.move_tensor(self.data.table.features[part_rows]))
                )
                for part_rows in rows.split(_SCORED_AT_ONCE)
            ]
        for module in modules:
            module.train()
        return torch.cat(scores).double().softmax(1).cpu()

    def build_data(self) -> OwnData:
        """Return the active's data with randomised labels, and no true training label.

        Rows whose label is not randomised yet are left out.
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
        """Return the randomised labels so far, for the active's checkpoint; -1: not drawn yet."""
        return {} if self.mechanism.unsafe else {"answers": self._answers_N}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the randomised labels that `tensors` returned; no label is randomised again.

        Raises CheckpointError: they are not those of whole stages, from the first on.
        """
        if self.mechanism.unsafe:
            # The mechanism `none` returns the true labels, which no checkpoint stores.
            self.answer_stage(None)
            return
        answers_N = tensors.get("answers", torch.empty(0))
        has_right_form = answers_N.dtype == torch.int64 and answers_N.shape == self._answers_N.shape
        is_answered = answers_N != _UNANSWERED
        stages = 0
        if has_right_form:
            while stages < len(self._parts) and bool(is_answered[self._parts[stages]].all()):
                stages += 1
        rows_of_stages = sum(len(part) for part in self._parts[:stages])
        given = answers_N[is_answered]
        in_range = bool(((given >= 0) & (given < len(self.data.classes))).all())
        if not stages or int(is_answered.sum()) != rows_of_stages or not in_range:
            raise CheckpointError(
                f"the checkpoint does not hold answers for {len(self._answers_N)} training "
                "labels; it was altered or is of another run"
            )
        self._answers_N = answers_N.clone()
        self._stage = stages


def load_training_labels(
    config: Config, data: OwnData, active: PartySecrets
) -> tuple[TrainingLabels, PartyCheckpoint | None]:
    """Return the labels that the active may train on, and its newest checkpoint (None: none).

    The labels are those of the checkpoint, or newly randomised. `active`: its keys, checkpoints and
    folder for logs.
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
    """Return the active's checkpoint of the step from which the session resumes, and restore its
    `labels` as of then.

    It is older than the newest (`state`) if another party lost its own. A later stage of labels is
    then randomised again, with the same results.
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
