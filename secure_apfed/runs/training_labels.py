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
from secure_apfed.privacy.randomised_response import find_first_epoch, make_label_mechanism

_NOT_RANDOMISED = -1
_ROWS_AT_ONCE = 1000  # rows of a forward pass


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
        is_labelled_N = data.table.labels != UNLABELLED
        task.check_labels(data.table.labels[is_labelled_N], party=data.table.name)
        self.mechanism = make_label_mechanism(config.labels, classes=len(data.classes))
        self._config = config
        self.data = data
        self._key = key
        self._log = log
        stage_count = self.mechanism.stages
        row_count = len(data.labelled_rows)
        if stage_count > 1 and stage_count > min(config.train.epochs, row_count):
            raise ConfigError(
                f"labels.mechanism: {stage_count} stages need as many epochs and labelled rows, "
                f"got {config.train.epochs} epochs and {row_count} rows; use randomised_response"
            )
        # Which row is in which stage depends only on the seed, and never on labels.
        shuffled_positions = shuffle_rows(torch.arange(row_count), config.seed, "label stages")
        # For each stage, positions of its rows among the labelled rows.
        self._rows_by_stage = shuffled_positions.tensor_split(stage_count)
        # The answer for each labelled row.
        self._randomised_labels = torch.full(
            (row_count,), _NOT_RANDOMISED, dtype=data.table.labels.dtype
        )
        self._next_stage = 0  # number of the next stage to answer

    def is_due(self, epoch: int) -> bool:
        """Return whether the next stage's labels are due after this number of epochs."""
        stages = self.mechanism.stages
        epochs = self._config.train.epochs
        return self._next_stage < stages and epoch == find_first_epoch(
            self._next_stage, stages=stages, epochs=epochs
        )

    def randomise_stage(self, networks: ActiveNetworks | None) -> None:
        """Randomise the labels of the next stage, and store the answers.

        The digest of the answers is logged first, if there is a log.

        `networks`: the present model, whose predictions are the mechanism's prior; None: no prior,
        as in the first stage.

        Raises CheckpointError: the log has other answers for this stage.
        """
        positions = self._rows_by_stage[self._next_stage]
        rows = self.data.labelled_rows[positions]
        prior_NK = None if networks is None else self._predict_prior(networks, rows)
        key = derive_key(self._key, b"labels", self._next_stage.to_bytes(4, "big"))
        assert self.data.table.labels is not None
        true_labels_N = self.data.table.labels[rows]
        randomised_N = self.mechanism.randomise_labels(true_labels_N, key=key, prior_NK=prior_NK)
        if self._log and not self.mechanism.unsafe:
            self._log_stage_digest(self._log, randomised_N)
        self._randomised_labels[positions] = randomised_N
        self._next_stage += 1

    def _log_stage_digest(self, log: Path, randomised_N: Tensor) -> None:
        """Log the keyed digest of the next stage's randomised labels, before training uses them.

        If the stage is logged already, its digest must be the same: labels that are randomised
        twice would cost privacy twice.

        Raises CheckpointError: the log has other answers for this stage.
        """
        digest = derive_key(self._key, b"label answers", randomised_N.numpy().tobytes()).hex()
        logged_digests = load_text(log).split() if log.exists() else []
        if len(logged_digests) <= self._next_stage:
            with os.fdopen(open_regular(log, create=True), "a", encoding="ascii") as file:
                file.write(digest + "\n")
                file.flush()
                os.fsync(file.fileno())
        elif logged_digests[self._next_stage] != digest:
            raise CheckpointError(
                f"{log} notes other answers for stage {self._next_stage + 1} of the labels: an "
                "older checkpoint was put back where the model computes other bits, and answering "
                "twice would spend epsilon_y twice; restore the newest checkpoint, or begin a new "
                "run"
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
                    networks.encoder(compute.move_tensor(self.data.table.features[block_rows]))
                )
                for block_rows in rows.split(_ROWS_AT_ONCE)
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
        labelled_rows = data.labelled_rows
        is_randomised = torch.zeros(len(labelled_rows), dtype=torch.bool)
        for positions in self._rows_by_stage[: self._next_stage]:
            is_randomised[positions] = True
        labels = torch.full_like(table.labels, UNLABELLED)
        labels[data.test_rows] = table.labels[data.test_rows]
        labels[labelled_rows[is_randomised]] = self._randomised_labels[is_randomised]
        is_unrandomised = torch.isin(train_rows, labelled_rows[~is_randomised])
        return replace(
            data,
            table=replace(table, labels=labels),
            train_rows=train_rows[~is_unrandomised],
            labelled=labelled_rows[is_randomised],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the answers (randomised labels) so far, for the active's checkpoint; -1: none yet.

        The mechanism `none` has nothing to store: its answers are the true labels.
        """
        return {} if self.mechanism.unsafe else {"answers": self._randomised_labels}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the answers (randomised labels) that `tensors` returned, from a checkpoint.

        No label is randomised again.

        Raises CheckpointError: the answers do not fill the first stage or the first few stages, or
            are no classes.
        """
        if self.mechanism.unsafe:
            # The mechanism `none` returns the true labels, which no checkpoint stores.
            self.randomise_stage(None)
            return
        randomised_labels = tensors.get("answers", torch.empty(0))
        has_right_form = (
            randomised_labels.dtype == torch.int64
            and randomised_labels.shape == self._randomised_labels.shape
        )
        is_randomised = randomised_labels != _NOT_RANDOMISED
        complete_stages = self._count_complete_stages(is_randomised) if has_right_form else 0
        expected_count = sum(len(positions) for positions in self._rows_by_stage[:complete_stages])
        has_labels_of_other_stages = int(is_randomised.sum()) != expected_count
        classes = randomised_labels[is_randomised]
        are_valid_classes = bool(((classes >= 0) & (classes < len(self.data.classes))).all())
        if not complete_stages or has_labels_of_other_stages or not are_valid_classes:
            raise CheckpointError(
                f"the checkpoint does not hold answers for {len(self._randomised_labels)} training "
                "labels; it was altered or is of another run"
            )
        self._randomised_labels = randomised_labels.clone()
        self._next_stage = complete_stages

    def _count_complete_stages(self, is_randomised: Tensor) -> int:
        """Return how many stages, from the first one on, have a randomised label on all their rows.

        `is_randomised`: for each training label whether it was randomised.
        """
        for stage, positions in enumerate(self._rows_by_stage):
            if not bool(is_randomised[positions].all()):
                return stage
        return len(self._rows_by_stage)


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
        log=log_file(active.log_folder, "labels", name, "log") if active.log_folder else None,
    )
    state = active.checkpoint_store.load_latest() if active.checkpoint_store else None
    if state:
        labels.load_tensors(remove_prefix("labels", state.tensors))
    else:
        labels.randomise_stage(None)
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
    resume_point = session.contract.resumes
    store = session.party_session.party.secrets.checkpoint_store
    if state is None or resume_point is None or state.step == resume_point.step:
        return state
    assert store is not None
    older_state = store.load_latest(max_step=resume_point.step)
    assert older_state is not None  # it reported that it has this step
    if not labels.mechanism.unsafe:
        labels.load_tensors(remove_prefix("labels", older_state.tensors))
        if labels.mechanism.stages > 1:
            data = labels.build_data()
            assert data.table.labels is not None
            session.active_role.relabel(data.table.labels, data.train_rows)
    return older_state
