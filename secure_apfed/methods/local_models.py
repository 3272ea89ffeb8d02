"""Local models after the exchange: on the active's features, on a representation of them, and on
both.

Run by: the active, alone, after an exchange that gave it a representation h of its features x, or
numbers from others. Nothing is sent: the labels are used with the representation here for the first
time. The local models are those that a run is compared with (`secure_apfed.baselines`), and models
of x alone are the very fits of the baselines. A model that has collapsed is left out.

There are two ways. `FinalFit` (APFed with `train.labels: after`) fits local models to the inputs
that `train.local_models` lists: the features x, the representation h, both beside each other; and
sum students, models of x that learn from the received sums (`secure_apfed.methods.sum_students`).
It combines the models that use the exchange, by h or as sum students (`train.combine`). Models of x
alone replace them if validation says that these are significantly better. No label was used in the
exchange, so validation rows are as good as new ones. `fit_best_if_better` (APC-VFL and VFedTrans
with `classifier: strongest`) uses the best model of h only if validation says that it is
significantly better than the best of x (`is_surely_better`). A public code chooses its teacher in
the same way (`choose_reader`).

Letters: N positions of the alignment, U training rows, n of them with labels, B rows, F features,
D numbers of h, K classes.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_apfed.base.seeds import one_thread
from secure_apfed.base.working import working_on
from secure_apfed.baselines import (
    MAX_SHARE_DISTANCE,
    TEACHERS,
    BaselineTask,
    LocalModel,
    Predictor,
    average_held_out,
    convert_predictor,
    find_baseline,
    is_significantly_better,
    list_local_models,
    measure_collapse,
    pick_models,
)
from secure_apfed.baselines.fitted import ColumnView, FittedModel, average_models, rebuild_modules
from secure_apfed.baselines.interface import FloatArray, cache_fits, sample_rows
from secure_apfed.data import PartyTable
from secure_apfed.errors import ModelError
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.votes import ROWS_PER_BLOCK
from secure_apfed.measures.table import Scored, score_model
from secure_apfed.methods.alignment import intersect_rows
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.sum_students import SumStudent, fit_sum_students
from secure_apfed.networks.models import WithFeatures
from secure_apfed.settings.training import LAST_INPUTS, LastInput

Combine: TypeAlias = Literal["mean", "mean_of_three", "best"]
_NOT_USED = -1
"""The row index at alignment positions from which no local model learns."""
_MAX_MODELS: Mapping[Combine, int | None] = MappingProxyType(
    {"mean": None, "mean_of_three": 3, "best": 1}
)
"""How many models each combination averages, the best on held-out labels first; None: all."""
Input: TypeAlias = Literal["x", "h", "x and h"]
"""What a local model reads: the features, the representation of them, or both."""


@dataclass(frozen=True, kw_only=True)
class LocalModels:
    """The model that was made of local models after the exchange.

    Attributes:
        networks: the model; it maps the active's features to K log-probabilities a row, in float64.
        used_names: the names of the averaged models, or of the single chosen one, such as "mixmatch
            of x and h".
        left_out_names: the names of models that collapsed or could not be fitted.
        is_helped: whether the model uses the exchange; False: models of x alone were chosen.
    """

    networks: ActiveNetworks = field(repr=False)
    used_names: tuple[str, ...]
    left_out_names: tuple[str, ...] = ()
    is_helped: bool = True

    def make_scorer(self, table: PartyTable) -> Callable[[Tensor], Tensor]:
        """Return a function from row numbers of this table, (B,), to log-probabilities (B, K)."""

        @torch.no_grad()
        def score_rows(rows_B: Tensor) -> Tensor:
            """Return log-probabilities of these rows."""
            scores_BK: Tensor = self.networks(table.features[rows_B].double(), None)[0]
            return scores_BK

        return score_rows

    def as_json(self) -> dict[str, list[str]]:
        """Return the names of used and left-out models as plain lists."""
        return {"used": list(self.used_names), "left_out": list(self.left_out_names)}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate(LocalModel):
    """A candidate local model, fitted to its task when it is needed.

    Attributes:
        view: the columns of a row (x beside h) that it reads, and their scale.
        input: these columns in words: "x", "h" or "x and h".
    """

    view: ColumnView
    input: Input

    @property
    def name(self) -> str:
        """The name for reports, such as "mixmatch of x and h"."""
        return f"{self.baseline.name} of {self.input}"

    def build_network(self) -> FittedModel:
        """Fit the model, and return it as a network, which can be stored in a file.

        Raises ModelError: the model cannot be stored as a network.
        """
        return convert_predictor(self.fit())

    def has_collapsed(self) -> bool:
        """Return whether the model predicts nearly the same for all rows."""
        # It raises ModelError for a model that cannot be stored, so that such a model is left out
        # before any are averaged.
        self.build_network()
        return super().has_collapsed()


@dataclass(frozen=True, kw_only=True, eq=False)
class _SumStudentCandidate(_Candidate):
    """A sum student as a candidate: a ridge regression on x that learnt a teacher's labels."""

    sum_student: SumStudent

    @property
    def name(self) -> str:
        """The name for reports, which names the student's teacher."""
        return f"pupil of x taught by {self.sum_student.teacher_name}"

    def fit(self) -> Predictor:
        """Return the student, which is fitted already."""
        return self.sum_student.predictor

    def has_collapsed(self) -> bool:
        """Return whether the student predicts nearly the same for all rows."""
        return measure_collapse(self.fit(), self.task) > MAX_SHARE_DISTANCE

    def score_held_out(self) -> Scored | None:
        """Return the scores of validation rows; None: there are none."""
        return self.sum_student.held_out_scores


class ReceivedSums:
    """The passives' sums that the active received, added up over all steps, by row.

    They are stored only for the U rows that local models learn from.
    """

    def __init__(self, positions_U: Tensor, *, person_count: int) -> None:
        """Prepare empty sums, and the row of each alignment position.

        Args:
            positions_U: the alignment position of each of the U rows that local models learn from;
                -1: the row is not aligned.
            person_count: N, number of alignment positions.
        """
        row_count = len(positions_U)
        is_aligned_U = positions_U >= 0
        self._sum_UD = torch.zeros((row_count, 0), dtype=torch.float64)
        self._count_U = torch.zeros(row_count, dtype=torch.int64)
        self._row_by_position_N = torch.full((person_count,), _NOT_USED, dtype=torch.int64)
        self._row_by_position_N[positions_U[is_aligned_U]] = is_aligned_U.nonzero().flatten()

    def add_sums(self, positions_A: Tensor, sum_AD: Tensor) -> None:
        """Add the sums received in one step: D numbers for each of A distinct positions."""
        if not self._sum_UD.shape[1]:  # the first sums show how many numbers they have
            self._sum_UD = self._sum_UD.new_zeros((len(self._sum_UD), sum_AD.shape[1]))
        rows_A = self._row_by_position_N[positions_A]
        is_used_A = rows_A != _NOT_USED
        rows = rows_A[is_used_A]
        self._sum_UD[rows] += sum_AD.detach().double().cpu()[is_used_A]
        self._count_U[rows] += 1

    def average_sums(self) -> NDArray[np.float64]:
        """Return the mean of the sums received for each row, (U, D); NaN where there was none."""
        count_U1 = self._count_U[:, None]
        average_UD = torch.where(count_U1 > 0, self._sum_UD / count_U1, torch.nan)
        return average_UD.numpy()

    def tensors(self) -> dict[str, Tensor]:
        """Return the added sums and their counts, for a checkpoint."""
        return {"sum": self._sum_UD, "count": self._count_U}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        self._sum_UD = tensors["sum"].clone()
        self._count_U = tensors["count"].clone()


class FinalFit:
    """The end of a run whose exchange used no labels: local models learn the labels now.

    Run by: the active. It stores the sums that it receives during the exchange, and fits local
    models after it (`train.labels: after`).

    Attributes:
        received_sums: the sums that the active has received so far.
        fitted_models: the fitted local models; None before training ends.
    """

    def __init__(self, party: PartyContext, aligned_rows: Tensor) -> None:
        """Choose the rows that local models learn from, and prepare to collect their sums.

        `party`: the active. `aligned_rows`: the row of its table at each of the N alignment
        positions.
        """
        self.fitted_models: LocalModels | None = None
        self._party = party
        # Copies of the party's own networks, taken before the exchange trains them.
        self._family = party.fresh_networks
        self._rows_U = _sample_training_rows(party, aligned_rows)
        position_by_row = torch.full((len(party.data.table.ids),), -1, dtype=torch.int64)
        position_by_row[aligned_rows] = torch.arange(len(aligned_rows))
        self.received_sums = ReceivedSums(
            position_by_row[self._rows_U], person_count=len(aligned_rows)
        )

    @property
    def networks(self) -> ActiveNetworks | None:
        """The networks of the fitted local models; None before they are fitted."""
        return None if self.fitted_models is None else self.fitted_models.networks

    def make_task(self, labels_N: Tensor) -> BaselineTask:
        """Return the training rows and labels as a task for local models.

        `labels_N`: the labels of all rows of the active's table.
        """
        party = self._party
        task = BaselineTask.from_run(
            party.config, party.data, self._rows_U, labels_N=labels_N.cpu()
        )
        return replace(task, family=self._family)

    def fit_models(self, encoder: nn.Module, labels_N: Tensor) -> LocalModels:
        """Fit local models to the labels, with the configured inputs and combination; store them.

        `encoder`: the active's encoder after the exchange, which computes the representation h.
        `labels_N`: the labels of all N rows of the active's table.
        """
        with working_on("local models", "learning the labels"):
            self.fitted_models = self._fit(encoder, self.make_task(labels_N))
        return self.fitted_models

    def refit_excluding(
        self, rows: Tensor, encoder: nn.Module, labels_N: Tensor
    ) -> ActiveNetworks | None:
        """Return networks fitted without the labels of these rows; None: nothing is fitted yet.

        The encoder is not trained again, since no label was used to train it.

        `rows`: row numbers of the active's table. `encoder`: computes the representation h.
        `labels_N`: the labels of all N rows of the table.
        """
        if self.fitted_models is None:
            return None
        task = self.make_task(labels_N)
        labelled_n = self._rows_U[torch.from_numpy(task.labelled_indices)]
        excluded = torch.isin(labelled_n, rows).nonzero().flatten()
        return self._fit(encoder, task.drop_labels(excluded.numpy())).networks

    def _fit(self, encoder: nn.Module, task: BaselineTask) -> LocalModels:
        """Fit local models to this task and to the received sums, as the settings combine them."""
        train = self._party.config.train
        return fit_local_models(
            encoder,
            task,
            combination=train.combine,
            inputs=train.local_models,
            received_UD=self.received_sums.average_sums(),
        )

    def score_rows(self, rows: Tensor, labels_N: Tensor) -> Scored:
        """Return the fitted model's scores of these rows of the active's table, with their labels.

        `labels_N`: the labels of all N rows of the table.
        """
        assert self.fitted_models is not None
        return score_model(
            self.fitted_models.make_scorer(self._party.data.table), rows, labels_N.cpu()
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the fitted models' state; empty before they are fitted."""
        return {} if self.fitted_models is None else self.fitted_models.networks.state_dict()

    def restore(self, state: Mapping[str, Tensor], template: ActiveNetworks) -> None:
        """Restore the state that `tensors` returned; an empty state restores nothing.

        `template`: the run's networks, which show the architecture.
        """
        if state:
            self.fitted_models = LocalModels(
                networks=restore_networks(state, template), used_names=()
            )


def _sample_training_rows(party: PartyContext, aligned_rows: Tensor) -> Tensor:
    """Return the training rows that local models learn from.

    Very many rows are sampled, to save time; all labelled rows remain. `aligned_rows`: the row of
    the active's table at each of the N alignment positions.
    """
    config = party.config
    data = party.data
    # With `use_unaligned` rows that no other party knows are used, too.
    rows_U = intersect_rows(data.train_rows, None if config.train.use_unaligned else aligned_rows)
    labelled = torch.isin(rows_U, data.labelled_rows).nonzero().flatten()
    sample = sample_rows(len(rows_U), labelled.numpy(), seed=config.seed)
    return rows_U[torch.from_numpy(sample)]


def fit_local_models(
    encoder: nn.Module,
    task: BaselineTask,
    *,
    combination: Combine,
    inputs: Collection[LastInput] = LAST_INPUTS,
    received_UD: FloatArray | None = None,
) -> LocalModels:
    """Fit local models and sum students after an exchange, and combine them to one model.

    A sum student is a model of the features x that learns from a model which also reads received
    sums.

    Args:
        encoder: maps features (B, *shape) to the representation h (B, *any shape); it is copied,
            and not trained.
        task: the active's training rows and labels.
        combination: "mean" of the probabilities of all models, "mean_of_three" of the best three on
            validation rows, or the "best" one.
        inputs: what local models read ("x", "h", "x_and_h"), and "pupils" to fit sum students, too.
            Without "x" no model of x alone can replace the models that use the exchange.
        received_UD: the mean received sum, D numbers for each of the task's U rows; NaN for a row
            without a sum. None: no row has one.

    Raises ModelError: no local model can be fitted to these rows.
    """
    encoder = _copy_encoder(encoder)
    sampled_rows = task.subsample_indices
    task = task.subsampled
    max_models = _MAX_MODELS[combination]
    with one_thread(), cache_fits():
        # `helped` use what the exchange gave; `local` read the active's features x alone.
        helped_inputs = [name for name in inputs if name != "x"]
        helped_candidates = _list_candidates(encoder, task, helped_inputs)
        if received_UD is not None and "pupils" in inputs:
            helped_candidates += _list_sum_students(task, received_UD[sampled_rows])
        # Some model must be fitted, even where nothing came from the exchange.
        local_inputs: list[LastInput] = ["x"] if "x" in inputs or not helped_candidates else []
        local_candidates = _list_candidates(encoder, task, local_inputs)
        used_candidates, left_out_names, is_helped = _pick_helped_or_alone(
            helped_candidates, local_candidates, max_models=max_models
        )
        views_and_networks = [
            (candidate.view, candidate.build_network()) for candidate in used_candidates
        ]
    average = average_models(views_and_networks)
    is_encoder_needed = any(candidate.input != "x" for candidate in used_candidates)
    # A model of x alone is stored without the encoder.
    networks = (
        ActiveNetworks(WithFeatures(encoder), average.as_head())
        if is_encoder_needed
        else wrap_as_networks(average)
    )
    return LocalModels(
        networks=networks.requires_grad_(False).eval(),
        used_names=tuple(candidate.name for candidate in used_candidates),
        left_out_names=tuple(left_out_names),
        is_helped=is_helped,
    )


def _pick_helped_or_alone(
    helped_candidates: Sequence[_Candidate],
    local_candidates: Sequence[_Candidate],
    *,
    max_models: int | None,
) -> tuple[list[_Candidate], list[str], bool]:
    """Pick the models that use the exchange, unless others are significantly better.

    The others read the active's features x alone; validation rows decide.

    `helped_candidates`: candidates that use the exchange. `local_candidates`: candidates of x
    alone. `max_models`: how many models are averaged at most; None: all.

    Returns the models to average, the names of models that collapsed or cannot be fitted, and
    whether the models to average use the exchange.
    """
    if not helped_candidates:
        return (*pick_models(local_candidates, max_models=max_models), False)
    used_candidates, left_out_names = pick_models(helped_candidates, max_models=max_models)
    if not local_candidates:
        return used_candidates, left_out_names, True
    local_used, local_left_out = pick_models(local_candidates, max_models=max_models)
    left_out_names += local_left_out
    helped_scores = average_held_out(used_candidates)
    task = local_candidates[0].task
    without_help = average_held_out(local_used)
    if is_significantly_better(without_help, helped_scores, task.measure, seed=task.seed):
        return local_used, left_out_names, False
    return used_candidates, left_out_names, True


def fit_best_if_better(
    encoder: nn.Module, task: BaselineTask, *, encoder_output: Input
) -> LocalModels:
    """Fit the best local model of h if validation finds it significantly better, otherwise of x.

    x are the active's features, h is their representation after the exchange.

    Args:
        encoder: maps x (B, *shape) to h (B, *any shape); it is copied, and not trained.
        task: the active's training rows and labels.
        encoder_output: the encoder's output in words, for the name of the model: "h", or "x and h".
    """
    encoder = _copy_encoder(encoder)
    with one_thread(), cache_fits():
        local_model = LocalModel.choose_best(task)
        h_UD = compute_representations(encoder, task)
        model_of_h = choose_reader(replace(task, features=h_UD, shape=h_UD.shape[1:]))
        is_helped = is_surely_better(model_of_h.score_held_out(), local_model)
        if is_helped:
            networks = ActiveNetworks(encoder, convert_predictor(model_of_h.fit()).as_head())
        else:
            networks = wrap_as_networks(local_model.build_network())
    return LocalModels(
        networks=networks.requires_grad_(False).eval(),
        used_names=(
            f"{model_of_h.name} of {encoder_output}" if is_helped else f"{local_model.name} of x",
        ),
        is_helped=is_helped,
    )


def choose_reader(task: BaselineTask) -> LocalModel:
    """Return the local model that validates best, for rows that are not the active's features.

    The rows are a representation, or contain other parties' numbers. The run's own network is not a
    candidate, since its settings are chosen for the features.
    """
    return LocalModel.choose_best(task, candidates=TEACHERS)


def is_surely_better(helped_scores: Scored | None, local_model: LocalModel) -> bool:
    """Return whether a model that uses the exchange is significantly better than the local model.

    Args:
        helped_scores: validation scores of the model that uses the exchange; None: there are none.
        local_model: the best model of the active's own features; its task's measure decides.
    """
    task = local_model.task
    return is_significantly_better(
        helped_scores, local_model.score_held_out(), task.measure, seed=task.seed
    )


def wrap_as_networks(model: nn.Module) -> ActiveNetworks:
    """Return a fitted local model as an encoder with a head, frozen.

    A neural network already has the two as its children. Any other fitted model becomes the
    encoder, with a head that is the identity until calibration changes it.
    """
    encoder: nn.Module = model
    if isinstance(model, FittedModel):
        head: nn.Module = model.make_identity_head()
    else:
        encoder, head = model.cpu().children()
    return ActiveNetworks(encoder, head).requires_grad_(False).eval()


def restore_networks(state: Mapping[str, Tensor], template: ActiveNetworks) -> ActiveNetworks:
    """Return networks with this state, on the CPU, frozen.

    `template`: networks with the architecture of the state. It is not used if the state belongs to
    a fitted local model, which the state itself describes.
    """
    first_tensor = next(iter(state.values()))
    networks = copy.deepcopy(template).cpu().to(first_tensor.dtype)
    encoder, head = rebuild_modules(state, lambda _: (networks.encoder, networks.head))
    restored = ActiveNetworks(encoder, head)
    restored.load_state_dict(state)
    return restored.requires_grad_(False).eval()


def _copy_encoder(encoder: nn.Module) -> nn.Module:
    """Return a frozen float64 copy of an encoder on the CPU."""
    return copy.deepcopy(encoder).cpu().double().requires_grad_(False).eval()


def _list_sum_students(task: BaselineTask, received_UD: FloatArray) -> list[_Candidate]:
    """Fit sum students, and return them as candidates (`secure_apfed.methods.sum_students`).

    A sum student is a model of the features x; its teacher reads the received sums, too.
    `received_UD`: the mean received sum, D numbers for each of the task's U rows; NaN where there
    is none.
    """
    view = ColumnView.for_whole_row(task.features.shape[1])
    ridge = find_baseline("ridge")
    return [
        _SumStudentCandidate(
            baseline=ridge, task=task, view=view, input="x", sum_student=sum_student
        )
        for sum_student in fit_sum_students(task, received_UD)
    ]


def _list_candidates(
    encoder: nn.Module, task: BaselineTask, inputs: Collection[LastInput]
) -> list[_Candidate]:
    """Return every kind of local model for each of these inputs, not yet fitted.

    `encoder`: computes the representation h of a row's features x. `inputs`: any of "x", "h" and
    "x_and_h"; "pupils" is ignored, since `_list_sum_students` lists them.
    """
    views: list[tuple[Input, ColumnView, BaselineTask]] = []
    if "x" in inputs:
        views.append(("x", ColumnView.for_whole_row(task.features.shape[1]), task))
    if "h" in inputs or "x_and_h" in inputs:
        h_UD = compute_representations(encoder, task)
        rows_UC = np.concatenate([task.features, h_UD], axis=1)
        width = rows_UC.shape[1]
        h_view = ColumnView.from_rows(
            rows_UC, first_column=task.features.shape[1], end_column=width
        )
        whole_view = ColumnView.from_rows(rows_UC, first_column=0, end_column=width)
        if "h" in inputs:
            views.append(("h", h_view, _apply_view(h_view, rows_UC, task)))
        if "x_and_h" in inputs:
            views.append(("x and h", whole_view, _apply_view(whole_view, rows_UC, task)))
    return [
        _Candidate(baseline=baseline, task=view_task, view=view, input=name)
        for name, view, view_task in views
        for baseline in list_local_models()
    ]


def compute_representations(encoder: nn.Module, task: BaselineTask) -> FloatArray:
    """Return the encoder's output h for a task's U rows, flattened, (U, D), float64.

    Blocks of rows are encoded one after another, to save memory. Raises ModelError: h is not
    finite.
    """
    rows_U = torch.from_numpy(task.features).reshape(len(task.features), *task.shape)
    with torch.no_grad():
        blocks: list[Tensor] = [
            encoder(rows_B).flatten(1).double() for rows_B in rows_U.split(ROWS_PER_BLOCK)
        ]
    h_UD = torch.cat(blocks).numpy()
    if not np.isfinite(h_UD).all():
        raise ModelError(
            "the representations that the exchange left are not finite: the training diverged; "
            "lower train.learning_rate, or set train.max_gradient_norm"
        )
    return np.asarray(h_UD, dtype=np.float64)


def _apply_view(view: ColumnView, rows_UC: FloatArray, task: BaselineTask) -> BaselineTask:
    """Return the task with other features: the columns of `rows_UC` that a view reads.

    They are standardised. `rows_UC`: the features x beside the representation h.
    """
    features_UF = view.standardise_columns(rows_UC)
    return replace(task, features=features_UF, shape=features_UF.shape[1:])
