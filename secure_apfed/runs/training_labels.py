"""The labels that a run trains on: the answers of the active's label mechanism, and nothing else.

Run by: the active, for all methods alike. An answer is a label after the label mechanism: drawn
once, at random, in place of the true label. Every role is built on `build_data()`, in which answers
replace the training labels. Test labels, which only measure, stay. So no true training label
reaches a method's code. Rows that the settings leave without a label have only features there.

Each label is answered once. Answers are saved in the active's own checkpoint before anything is
trained on them, so that a resumed run finds them there and draws no others. If an older checkpoint
is put back, a later stage is answered again. It uses the same key, and so gives the same answers if
the model computes the same bits; the log in the run's folder refuses any others.

Letters: N labelled rows of a stage, K classes.
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
    """The randomised labels (answers) that replace the true labels in training.

    They are drawn in stages: each stage is a part of the labelled rows, and is randomised at the
    beginning of another epoch. A later stage can use the model that earlier stages trained.

    Args:
        config: settings of the run.
        data: the active's data, with its true labels.
        key: the active's noise key, 32 bytes.
        log: file with a keyed digest of each stage's answers, so that no stage is answered twice;
            None: no such file.

    Raises:
        ConfigError: more stages than epochs or labelled rows.
    """

    def __init__(
        self, config: Config, data: OwnData, *, key: bytes, log: Path | None = None
    ) -> None:
        """Divide the labelled rows into stages by the seed; no label is randomised yet."""
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
        # Which row is in which stage depends only on the seed, and never on labels.
        order = shuffle_rows(torch.arange(rows), config.seed, "label stages")
        # For each stage, positions of its rows among the labelled rows.
        self._rows_by_stage = order.tensor_split(stages)
        # The answer for each labelled row.
        self._answers = torch.full((rows,), _UNANSWERED, dtype=data.table.labels.dtype)
        self._stage = 0  # number of the next stage to answer

    def is_due(self, epoch: int) -> bool:
        """Return whether the next stage's labels are due after this number of epochs."""
        stages = self.mechanism.stages
        epochs = self._config.train.epochs
        return self._stage < stages and epoch == first_epoch_of(
            self._stage, stages=stages, epochs=epochs
        )

    def answer_stage(self, networks: ActiveNetworks | None) -> None:
        """Randomise the labels of the next stage, and store the answers.

        The digest of the answers is logged first, if there is a log.

        `networks`: the present model, whose predictions are the mechanism's prior; None: no prior,
        as in the first stage.

        Raises CheckpointError: the log has other answers for this stage.
        """
        stage_rows = self._rows_by_stage[self._stage]
        rows = self.data.labelled_rows[stage_rows]
        prior_NK = None if networks is None else self._predict_prior(networks, rows)
        key = derive_key(self._key, b"labels", self._stage.to_bytes(4, "big"))
        assert self.data.table.labels is not None
        true_N = self.data.table.labels[rows]
        answers = self.mechanism.randomise_labels(true_N, key=key, prior_NK=prior_NK)
        if self._log and not self.mechanism.unsafe:
            self._write_ahead(self._log, answers)
        self._answers[stage_rows] = answers
        self._stage += 1

    def _write_ahead(self, log: Path, answers: Tensor) -> None:
        """Log the keyed digest of the next stage's randomised labels, before training uses them.

        If the stage is logged already, its digest must be the same: labels that are randomised
        twice would cost privacy twice.

        Raises CheckpointError: the log has other answers for this stage.
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
        """Return the model's class probabilities (N, K) for N rows, without dropout.

        `rows`: positions in the active's table. The networks are in training mode afterwards.
        """
        compute = Compute.from_settings(self._config.train)
        modules = (networks.encoder, networks.head)
        for module in modules:
            module.eval()
        with torch.no_grad(), compute.prepare_forward(self._config.seed, "label prior"):
            scores = [
                networks.head(
                    networks.encoder(compute.move_tensor(self.data.table.features[some_rows]))
                )
                for some_rows in rows.split(_SCORED_AT_ONCE)
            ]
        for module in modules:
            module.train()
        return torch.cat(scores).double().softmax(1).cpu()

    def build_data(self) -> OwnData:
        """Return the active's data with randomised labels in place of the true training labels.

        Rows whose labels are not randomised yet (rows of later stages) are no training rows.
        """
        data = self.data
        table = self.data.table
        if self.mechanism.unsafe and data.labelled is None:
            return data  # the mechanism `none`, and all training rows have a label
        assert table.labels is not None
        train_rows = data.train_rows
        labelled = data.labelled_rows
        is_answered = torch.zeros(len(labelled), dtype=torch.bool)
        for stage_rows in self._rows_by_stage[: self._stage]:
            is_answered[stage_rows] = True
        labels = torch.full_like(table.labels, UNLABELLED)
        labels[data.test_rows] = table.labels[data.test_rows]
        labels[labelled[is_answered]] = self._answers[is_answered]
        is_unanswered_row = torch.isin(train_rows, labelled[~is_answered])
        return replace(
            data,
            table=replace(table, labels=labels),
            train_rows=train_rows[~is_unanswered_row],
            labelled=labelled[is_answered],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the answers (randomised labels) so far, for the active's checkpoint; -1: none yet.

        The mechanism `none` has nothing to store: its answers are the true labels.
        """
        return {} if self.mechanism.unsafe else {"answers": self._answers}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the answers (randomised labels) that `tensors` returned, from a checkpoint.

        No label is randomised again.

        Raises CheckpointError: the answers do not fill the first stage or the first few stages, or
            are no classes.
        """
        if self.mechanism.unsafe:
            # The mechanism `none` returns the true labels, which no checkpoint stores.
            self.answer_stage(None)
            return
        answers = tensors.get("answers", torch.empty(0))
        has_right_form = answers.dtype == torch.int64 and answers.shape == self._answers.shape
        is_answered = answers != _UNANSWERED
        stages = 0  # number of stages that are answered
        if has_right_form:
            for stage_rows in self._rows_by_stage:
                if not bool(is_answered[stage_rows].all()):
                    break
                stages += 1
        rows_of_stages = sum(len(stage_rows) for stage_rows in self._rows_by_stage[:stages])
        classes = answers[is_answered]
        are_classes = bool(((classes >= 0) & (classes < len(self.data.classes))).all())
        if not stages or int(is_answered.sum()) != rows_of_stages or not are_classes:
            raise CheckpointError(
                f"the checkpoint does not hold answers for {len(self._answers)} training "
                "labels; it was altered or is of another run"
            )
        self._answers = answers.clone()
        self._stage = stages


def load_training_labels(
    config: Config, data: OwnData, active: PartySecrets
) -> tuple[TrainingLabels, PartyCheckpoint | None]:
    """Return the labels that the active may train on, and its newest checkpoint.

    The labels are restored from the checkpoint. Without a checkpoint (None) the labels of the first
    stage are randomised.

    `data`: the active's data, with its true labels. `active`: its keys, checkpoints and folder for
    logs.
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
    """Return the active's checkpoint of the step from which the session resumes.

    All parties resume from the same step. It is older than the active's newest checkpoint if
    another party has lost its newest one. Then the labels are restored as of the older checkpoint,
    too; later stages will be randomised again, with the same results.

    Args:
        state: the active's newest checkpoint; None: a new run, and None is returned.
        labels: the labels to train on; may be changed.
        session: the session, whose learner gets restored labels.
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
