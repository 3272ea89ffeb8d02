"""The active's student: learns labels that others suggest, and predicts from its own features.

Run by: the active, where labels come from votes or a joint teacher. Random
features under a linear head are fitted in one go; every other network descends. Labelled rows keep
their own labels. Of a regression, classes are ranges of targets (`learning.bins`). Letters: N rows
of the active's table, U rows to learn from, n labelled rows, K classes, T numbers to learn of one.
"""

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_apfed.base.seeds import derive_seed, one_thread, seed_draws, shuffle_rows
from secure_apfed.base.transfers import StepLoss
from secure_apfed.errors import NoHelpWarning
from secure_apfed.exchange import Links
from secure_apfed.labellers import MAX_JUDGES, Labeller, Logistic, PrivateLogistic, make_labeller
from secure_apfed.learning.descent import ActiveNetworks, add_prefix, remove_prefix
from secure_apfed.learning.votes import (
    BLOCK,
    Help,
    Numbers,
    SoftTrainer,
    ValidationRows,
    fit_linear,
    last_layer,
    pool_opinions,
)
from secure_apfed.measures.table import Scored, probabilities_of
from secure_apfed.measures.tasks import LOSSES, Regression, score_rows
from secure_apfed.methods.alignment import rows_among
from secure_apfed.methods.local_models import networks_of, restore_networks
from secure_apfed.methods.method import ActiveRole, StepCounter
from secure_apfed.methods.party import PartyContext
from secure_apfed.networks.models import RandomFeatures, encoder_and_head
from secure_apfed.settings.run import RunSettings
from secure_apfed.solo import (
    BASELINES,
    FOLDS,
    Baseline,
    LocalModel,
    SoloTask,
    choose_baseline,
    find_baseline,
    measure_of_classes,
    score_out_of_fold,
)
from secure_apfed.solo.fitted import (
    FittedModel,
    View,
    blend_models,
    convert_forest,
    join_scores_to_row,
    scores_of_network,
)
from secure_apfed.solo.forests import grow_regressing_trees
from secure_apfed.solo.interface import cache_fits, split_folds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_GROWN = 60
_RIDGE = "ridge"
_LEAVES = {"trees": 5, "fine trees": 1}
"""Least rows of a leaf, by the tree models that compete with ridge regression."""
_AVERAGED_WITH = "mean_of_three"
_COMPARED = 3_000
_LEARNT = 10_000
_PARTS = 3
"""Rows at most, by which trees are compared, and from which they learn."""
BEST_SOLO = "best_solo"
PRIORS = (BEST_SOLO, "labeller", *BASELINES)
"""Names of the active's priors, its predictions before it reads votes; see `find_prior`."""
RANGES = 8
"""K. More ranges describe a target more finely, each with fewer labelled rows."""


# Targets of a regression as classes that can be voted for: ranges of about as many labelled rows.
#
# Run by: the active. Passives are shown the range of a labelled row's target, and never the target;
# they vote for ranges as for classes, so that sums, noise and epsilons are those of any vote. What
# the active learns of a row is the mean target that the ranges stand for, weighed by how likely
# they are (L. Torgo and J. Gama, "Regression using classification algorithms", Intelligent Data
# Analysis 1, 1997).
#
# Letters: n labelled rows, U rows, K ranges.


@dataclass(frozen=True, eq=False)
class Bins:
    """Attributes:
    edges: (K - 1,), rising, between ranges. centres: (K,), the target that each class represents.
    """

    edges: Floats
    centres: Floats

    @classmethod
    def from_targets(cls, targets_n: Floats, *, ranges: int = RANGES) -> Self:
        """Cut targets at their quantiles; each range stands for the mean of its targets.

        With many equal targets ranges may be empty; these stand for their lower edge.
        """
        edges = np.quantile(targets_n, np.linspace(0, 1, ranges + 1)[1:-1])
        place_n = np.searchsorted(edges, targets_n, side="left")
        centres = np.concatenate([edges[:1], edges])
        for place in np.unique(place_n):
            centres[place] = targets_n[place_n == place].mean()
        return cls(edges, centres)

    def classes_of(self, targets_n: Floats) -> Integers:
        return np.searchsorted(self.edges, targets_n, side="left").astype(np.int64)

    def compute_mean_targets(self, likely_UK: Floats) -> Floats:
        """Return the expected target (U, 1) from class probabilities; 0, the mean of all, for a row
        of zeros.

        `likely_UK`: the probabilities.
        """
        total_U1 = likely_UK.sum(axis=1, keepdims=True)
        mean_U1 = (likely_UK @ self.centres)[:, None]
        expected_U1: Floats = np.zeros_like(mean_U1)
        np.divide(mean_U1, total_U1, out=expected_U1, where=total_U1 > 0)
        return expected_U1


class Student:
    """An untrained network with reproducible weights, and the labels of aligned training rows that
    it learns.

    Args:
        party: the active's inputs, with the labels that it may train on.
        aligned: of its table, by position of the alignment.

    Attributes:
        classes: K; rows_U: of its table, that it learns from.
        labelled: (n,), places of labelled rows among `rows_U`; labels: (n,), classes of those.
    """

    def __init__(self, party: PartyContext, aligned: Tensor) -> None:
        """Build the untrained network, and select the aligned rows and the labels that it learns
        from.
        """
        config = party.config
        data = party.data
        seed = party.secrets.seed
        features_N = data.table.features
        rows_U = rows_among(data.train_rows, aligned)
        assert data.table.labels is not None
        with seed_draws(seed, party.name, "student"):
            networks = ActiveNetworks(
                *encoder_and_head(
                    config.model,
                    data.table.shape,
                    party.outputs,
                    family=party.code.find_family(),
                )
            )
        if isinstance(networks.encoder, RandomFeatures):
            networks.encoder.fit(features_N[data.train_rows])
        self._task = party.task
        loss = self._task.error if isinstance(self._task, Regression) else None
        self.trainer = SoftTrainer(
            party.name,
            networks,
            features_N=features_N,
            train=config.train,
            seed=seed,
            loss=LOSSES[loss] if loss else F.cross_entropy,
        )
        self.rows_U = rows_U
        self.classes = count_classes(party)
        self._model = config.model
        self._train = config.train
        self._measure = measure_of_classes(config)
        self._shape = features_N.shape[1:]
        self.features_UF: Floats = features_N[rows_U].flatten(1).double().numpy()
        self.labelled = torch.isin(rows_U, data.labelled_rows).nonzero().flatten().numpy()
        known_n = data.table.labels[rows_U[self.labelled]].numpy()
        self._bins = Bins.from_targets(known_n.astype(np.float64)) if loss else None
        self.labels = known_n if self._bins is None else self._bins.classes_of(known_n)
        self._truth_nT = known_n[:, None] if self._bins else np.eye(self.classes)[known_n]
        self._labels_N = self.trainer.compute.move_tensor(data.table.labels)
        self._seed = seed
        self._baseline_seed = config.seed  # so that fits are shared with the run's local baselines
        self._stored_networks: ActiveNetworks | None = None
        self._stored_name = ""
        self._averaged: ActiveNetworks | None = None
        numbers = self._truth_nT.shape[1]
        self._targets_NT = torch.zeros(len(data.table.ids), numbers, dtype=torch.float64)

    def task_alone(self, seed: int) -> SoloTask:
        """Return the student's rows and labels as a task for the active's local baselines."""
        features = self.features_UF.reshape(len(self.rows_U), *self._shape)
        return SoloTask.from_arrays(
            features,
            self.labelled,
            self.labels,
            classes=self.classes,
            seed=seed,
            model=self._model,
            train=self._train,
            measure=self._measure,
        )

    @property
    def networks(self) -> ActiveNetworks:
        """The networks that predict: an average or a stored baseline if there is
        one, else its own.
        """
        return self._averaged or self._stored_networks or self.trainer.networks

    @property
    def has_direct_fit(self) -> bool:
        """True if the student is fitted by equations or is a stored baseline, without epochs."""
        return bool(self._stored_networks) or isinstance(
            self.trainer.networks.encoder, RandomFeatures
        )

    @property
    def has_classes(self) -> bool:
        """True if it predicts classes, as baselines do; False for numbers."""
        return self._bins is None

    @property
    def can_be_averaged(self) -> bool:
        """True if it learns from rows without a label, so that it adds something to the local
        models.
        """
        return self.has_classes and len(self.labelled) < len(self.rows_U)

    def use_baseline(self, baseline: Baseline) -> None:
        """Predict with this baseline's model from now on: help is disabled, and it is the best
        local model.
        """
        self._stored_name = baseline.name
        all_U = np.ones(len(self.rows_U), dtype=bool)
        self._stored_networks = self._fit_named_model(baseline.name, all_U)

    def average_with_local_models(self) -> None:
        """Predict from now on with the average of the trained model and the best local models.

        These are the three models that the solo baselines average
        (`secure_apfed.solo.COMBINATIONS`).
        """
        all_U = np.ones(len(self.rows_U), dtype=bool)
        self._averaged = self._average_networks(
            self._stored_networks or self.trainer.networks, all_U
        )

    def _average_networks(
        self, student: ActiveNetworks, is_used_U: NDArray[np.bool_]
    ) -> ActiveNetworks:
        """Return the average of these networks and of local models fitted to the
        rows of this mask.

        `is_used_U`: the mask.
        """
        local = self._fit_named_model(_AVERAGED_WITH, is_used_U).encoder
        assert isinstance(local, FittedModel)
        features = self.features_UF.shape[1]
        student = copy.deepcopy(student).cpu().double()
        if isinstance(student.encoder, FittedModel):  # trees fitted to the rows' targets
            return networks_of(blend_models(View.for_whole_row(features), student.encoder, local))
        are_shares = isinstance(student.encoder, RandomFeatures)  # which a regression learnt
        view, scores = scores_of_network(features, self.classes, are_shares=are_shares)
        head = blend_models(view, scores, local).as_head()
        networks = ActiveNetworks(join_scores_to_row(student.encoder, student.head), head)
        return networks.requires_grad_(False).eval()

    def _fit_named_model(self, name: str, is_used_U: NDArray[np.bool_]) -> ActiveNetworks:
        """Return the named model fitted to the rows of this mask: a baseline, or trees on the
        targets.

        `is_used_U`: the mask.
        """
        task = self.task_alone(self._seed if name in _LEAVES else self._baseline_seed)
        with one_thread():
            if name in _LEAVES:
                targets_UK = self._targets_NT[self.rows_U].numpy()
                rows = np.flatnonzero(is_used_U & targets_UK.any(axis=1))
                model: nn.Module = _fit_trees(task, rows, targets_UK, _LEAVES[name])
            else:
                part = np.flatnonzero(~is_used_U[self.labelled])
                task = task.with_few_rows.drop_labels(part)
                model = LocalModel(baseline=find_baseline(name), task=task).build_network()
        return networks_of(model)

    def fit_to_labels(self, likely_UK: Floats) -> Floats | None:
        """Store class probabilities of all rows as targets, and fit the network if it has a closed
        form.

        `likely_UK`: a row of zeros has no target; labelled rows keep their labels. Returns held-out
        predictions of some rows, (U, K), zeros for the others; None if the network is trained by
        gradient descent, or predicts numbers.
        """
        has_target_U = np.asarray(likely_UK.any(axis=1))
        has_target_U[self.labelled] = True
        targets_UT = (
            likely_UK.copy() if self._bins is None else self._bins.compute_mean_targets(likely_UK)
        )
        targets_UT[self.labelled] = self._truth_nT
        self._targets_NT[self.rows_U] = torch.from_numpy(targets_UT)
        if not self.has_direct_fit:
            return None
        networks = self.trainer.networks
        encoded_UD = self.encode_rows(networks)
        self._fit_layer(last_layer(networks), encoded_UD, targets_UT, has_target_U)
        if not self.has_classes or type(networks.encoder) is not RandomFeatures:
            return None
        predictions = self._predict_held_out(encoded_UD, targets_UT, np.flatnonzero(has_target_U))
        errors = {
            name: ((predicted_UK - targets_UT)[predicted_UK.any(axis=1)] ** 2).sum()
            for name, predicted_UK in predictions.items()
        }
        best = min(errors, key=errors.__getitem__)
        if best != _RIDGE:
            self._stored_name, self._stored_networks = (
                best,
                self._fit_named_model(best, has_target_U),
            )
        return predictions[best]

    def _predict_held_out(
        self, encoded_UD: Numbers, targets_UT: Floats, rows_V: Integers
    ) -> Mapping[str, Floats]:
        """Return held-out predictions by ridge regression and by trees, (U, K) each.

        They are fitted to the targets only; no label of the active is read.
        """
        task = self.task_alone(self._seed)
        linear = copy.deepcopy(self.trainer.networks.head)
        draw = np.random.default_rng(derive_seed(self._seed, "ridge or trees"))
        order = draw.permutation(rows_V)[:_COMPARED]
        predictions = {name: np.zeros_like(targets_UT) for name in (_RIDGE, *_LEAVES)}
        if len(order) < _PARTS:
            return predictions
        layer = list(linear.modules())[-1]
        assert isinstance(layer, nn.Linear)
        with one_thread(), torch.no_grad():
            for part in (order[first::_PARTS] for first in range(_PARTS)):
                fitted = np.setdiff1d(order, part)
                is_fitted_U = np.isin(np.arange(len(targets_UT)), fitted)
                self._fit_layer(layer, encoded_UD, targets_UT, is_fitted_U)
                weight_DT = layer.weight.double().cpu().numpy().T
                predictions[_RIDGE][part] = encoded_UD[part].astype(np.float64) @ weight_DT
                rows_VF = torch.from_numpy(task.features[part])
                for name, leaf in _LEAVES.items():
                    trees = _fit_trees(task, fitted, targets_UT, leaf)
                    predictions[name][part] = trees(rows_VF).exp().numpy()
        return predictions

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        """Return its networks fitted without these rows; None: they are trained by gradient
        descent.
        """
        if not self.has_direct_fit:
            return None
        is_used_U = ~torch.isin(self.rows_U, rows).numpy()
        if self._stored_networks is not None:
            networks = self._fit_named_model(self._stored_name, is_used_U)
        else:
            targets_UT = self._targets_NT[self.rows_U].numpy()
            has_target_U = targets_UT.any(axis=1) & is_used_U
            networks = copy.deepcopy(self.trainer.networks)
            self._fit_layer(
                last_layer(networks), self.encode_rows(networks), targets_UT, has_target_U
            )
        return networks if self._averaged is None else self._average_networks(networks, is_used_U)

    def _fit_layer(
        self,
        linear: nn.Linear,
        encoded_UD: Numbers,
        targets_UT: Floats,
        has_target_U: NDArray[np.bool_],
    ) -> None:
        """Fit a linear layer to the targets of the rows of this mask, by ridge regression.

        `has_target_U`: the mask.
        """
        rows_V = np.flatnonzero(has_target_U)
        labelled_n = np.intersect1d(rows_V, self.labelled)
        fit_linear(linear, encoded_UD, targets_UT, taught_V=rows_V, labelled_n=labelled_n)

    @torch.no_grad()
    def encode_rows(self, networks: ActiveNetworks) -> Numbers:
        """Return the inputs of the head's last layer for its rows, (U, D), computed in blocks."""
        linear = last_layer(networks)
        features_N = self.trainer.features_N
        encoded_UD = torch.empty(len(self.rows_U), linear.in_features, dtype=linear.weight.dtype)
        blocks = zip(encoded_UD.split(BLOCK), self.rows_U.split(BLOCK), strict=True)
        for block_BD, rows_B in blocks:
            block_BD.copy_(networks.encoder(features_N[rows_B]))
        return encoded_UD.numpy()

    def train_on_rows(self, step: int, rows_B: Tensor) -> StepLoss:
        """Train one step on the targets of these rows of the table; return the loss."""
        return self.trainer.train_batch(step, rows_B, self._targets_NT[rows_B])

    def score_rows(self, rows: Tensor) -> Scored:
        """Return test scores of these rows by the model that predicts now."""
        predict = self.trainer.predict
        model = self._averaged or self._stored_networks
        if model is not None:
            features_N = self.trainer.features_N
            dtype = next(model.parameters()).dtype

            @torch.no_grad()
            def predict(rows_B: Tensor) -> Tensor:
                """Return scores (B, K) by the averaged or stored model."""
                scores_BK: Tensor = model(features_N[rows_B].cpu().to(dtype), None)[0]
                return scores_BK.to(features_N.device)

        with self.trainer.evaluation_mode():
            return score_rows(self._task, predict, rows, self._labels_N)

    def tensors(self) -> dict[str, Tensor]:
        """Return targets, networks, and the stored and averaged models."""
        stored = {} if self._stored_networks is None else self._stored_networks.state_dict()
        stored_name = torch.tensor(list(self._stored_name.encode()), dtype=torch.uint8)
        averaged = {} if self._averaged is None else self._averaged.state_dict()
        tensors = {
            "targets": self._targets_NT,
            "kept by": stored_name,
            **add_prefix("kept", stored),
        }
        return tensors | add_prefix("averaged", averaged) | self.trainer.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        self.trainer.load_tensors(tensors)
        self._targets_NT = tensors["targets"].clone()
        self._stored_name = bytes(tensors["kept by"].tolist()).decode()
        self._stored_networks = None
        if self._stored_name:
            state = remove_prefix("kept", tensors)
            self._stored_networks = restore_networks(state, self.trainer.networks)
        averaged = remove_prefix("averaged", tensors)
        self._averaged = restore_networks(averaged, self.trainer.networks) if averaged else None


def _fit_trees(task: SoloTask, rows: Integers, targets_UK: Floats, leaf: int) -> FittedModel:
    """Return extra trees fitted to class shares (U, K) on these rows of a task."""
    rows = rows[:: max(1, math.ceil(len(rows) / _LEARNT))]
    trees = grow_regressing_trees(
        task.features[rows],
        targets_UK[rows],
        count=_GROWN,
        leaf=leaf,
        seed=task.derive_random_state("trees of a student"),
    )
    shares = [tree.value[:, :, 0] for tree in trees]
    return FittedModel(convert_forest(trees, shares, task.classes))


@dataclass(frozen=True)
class Belief:
    """The prior of the active: its own prediction for a task's rows before it reads votes.

    Attributes:
        of: scores (U, K) of a task's rows; a row of zeros is no information.
        baseline: the baseline that gives them; None: it gives no model for other rows.
    """

    of: Callable[[SoloTask], Floats]
    baseline: Baseline | None = None


Prior: TypeAlias = Callable[[SoloTask], Belief]
"""Function that returns the active's belief for a task; labels of the task may choose which."""


def make_labeller_prior(labeller: Labeller) -> Prior:
    """Return the prior that labels rows by this labeller, from the active's own features."""
    return lambda _: Belief(
        lambda task: labeller.label_rows(task.features, task.labelled, task.labels, task.classes)
    )


def make_baseline_prior(baseline: Baseline) -> Prior:
    """Return the prior of this baseline's class scores, fitted to the labelled rows."""
    return lambda _: Belief(
        lambda task: baseline.fit(task.with_few_rows).compute_scores(task.features), baseline
    )


def find_prior(name: str, labeller: str) -> Prior:
    """Return the prior of this name, one of `PRIORS`.

    `labeller`: the passives' labeller; the active uses it without noise.
    """
    if name == BEST_SOLO:
        return believe_best_baseline
    if name in BASELINES:
        return make_baseline_prior(BASELINES[name])
    noised = labeller == PrivateLogistic.name
    return make_labeller_prior(Logistic() if noised else make_labeller(labeller))


def believe_best_baseline(task: SoloTask) -> Belief:
    """Return as prior the local baseline that does best on held-out labels."""
    return make_baseline_prior(choose_baseline(task))(task)


def _compute_shares(scores_BK: Floats, frequencies: Floats) -> Floats:
    """Return scores as probabilities (B, K); a row of zeros gets the class frequencies (K,)."""
    says_B1 = scores_BK.any(axis=1, keepdims=True)
    return np.where(says_B1, probabilities_of(scores_BK), frequencies)


def judges_of(belief: Belief, task: SoloTask, frequencies: Floats) -> ValidationRows:
    """Return the validation rows: labelled rows, with the prior's prediction made without their
    label.

    There are none if every row has a label: then no row is left to predict.

    `frequencies`: share of each class, (K,).
    """
    has_unlabelled = len(task.labels) < len(task.features)
    parts = split_folds(task.labels, FOLDS, task.seed) if has_unlabelled else []
    if not parts:
        nobody = np.zeros(0, dtype=np.int64)
        return ValidationRows(places=nobody, labels=nobody, own_JK=np.zeros((0, task.classes)))
    if belief.baseline is None:
        scores = [belief.of(task.drop_labels(part))[task.labelled[part]] for part in parts]
        own_JK = _compute_shares(np.concatenate(scores), frequencies)
    else:
        scored = score_out_of_fold(belief.baseline, task)
        assert scored is not None
        own_JK = scored.scores
    positions = np.concatenate(parts)
    is_used = positions < MAX_JUDGES
    positions = positions[is_used]
    own_JK = own_JK[is_used]
    return ValidationRows(
        places=task.labelled[positions], labels=task.labels[positions], own_JK=own_JK
    )


@dataclass(frozen=True, eq=False)
class WeighedVotes:
    """Attributes:
    likely: the probability of each class for each row, (U, K).
    own: the same by the active's own model; belief: where those come from.
    help: whether votes were used for `likely`; None: there are no votes.
    """

    likely: Floats
    own: Floats
    belief: Belief
    help: Help | None = None


def weigh_votes(
    votes_UK: Floats | None, student: Student, prior: Prior, *, seed: int, always: bool = False
) -> WeighedVotes:
    """Weigh votes against the active's own predictions, by validation on labelled rows.

    `votes_UK`: their sum on the student's rows; None: there are none. `seed`: of the folds that
    measure the prior. `always`: use votes whatever validation says.
    """
    task = student.task_alone(seed)
    with one_thread(), cache_fits():
        belief = prior(task)
        counted_K = np.bincount(task.labels, minlength=task.classes) + 1.0
        frequencies = counted_K / counted_K.sum()
        own_UK = _compute_shares(belief.of(task), frequencies)
        if votes_UK is None:
            return WeighedVotes(own_UK, own_UK, belief)
        judges = judges_of(belief, task, frequencies)
        likely_UK, help_ = pool_opinions(
            votes_UK, own_UK, judges, frequencies, seed=seed, always=always
        )
    return WeighedVotes(likely_UK if help_.is_in_use else own_UK, own_UK, belief, help_)


def learnt_of(predicted_UK: Floats | None, weighed: WeighedVotes, labelled_n: Integers) -> float:
    """Return how much more often a student is right than the active's own model.

    Both are measured against the weighed votes, on unlabelled rows that the student did not train
    on (`predicted_UK`: its predictions of them); 0 if there are none.
    """
    if predicted_UK is None:
        return 0.0
    rows_V = np.setdiff1d(np.flatnonzero(predicted_UK.any(axis=1)), labelled_n)
    student_right, own_right = (
        weighed.likely[rows_V, class_scores_UK[rows_V].argmax(axis=1)].sum()
        for class_scores_UK in (predicted_UK, weighed.own)
    )
    return float(student_right - own_right) / max(1, len(rows_V))


def learn_from_votes(
    student: Student, votes_UK: Floats, prior: Prior, *, seed: int, usage: str
) -> Help:
    """Train the student on labels made from votes; return the validation's result.

    A student with a closed form is fitted at once. If validation rejects the votes, the best local
    model stays, unless `usage` is "always" (train on votes regardless) or "averaged" (average
    student and local models: at once, or after descent). `seed`: of the folds that measure the
    prior.
    """
    averages = usage == "averaged" and student.can_be_averaged
    always = averages or usage == "always"
    with cache_fits():
        weighed = weigh_votes(votes_UK, student, prior, seed=seed, always=always)
        own_baseline = weighed.belief.baseline
        help_ = weighed.help
        assert help_ is not None
        keeps = own_baseline is not None and student.has_classes
        if help_.is_in_use or not keeps:
            predicted_UK = student.fit_to_labels(weighed.likely)
            gain = learnt_of(predicted_UK, weighed, student.labelled) if keeps else 0.0
            help_ = replace(help_, learnt=gain)
        if averages:
            help_ = replace(help_, always=False, averaged=not help_.is_sure)
        if own_baseline is not None and keeps and not help_.is_in_use:
            student.use_baseline(own_baseline)
        if student.has_direct_fit and help_.averaged:
            student.average_with_local_models()
    return help_


def side_by_side(parts: Iterable[Tensor]) -> Floats:
    """Return the parts' rows concatenated, (U, F), each part centred, with root-mean-square norm 1.

    So no single part dominates the distances between rows.
    """
    centred = [part.detach().cpu().flatten(1).double() for part in parts]
    centred = [part_UF - part_UF.mean(0) for part_UF in centred]
    sizes = [part_UF.square().sum(1).mean().sqrt() for part_UF in centred]
    scaled = [
        part_UF / size if size > 0 else part_UF
        for part_UF, size in zip(centred, sizes, strict=True)
    ]
    together: Floats = torch.cat(scaled, dim=1).numpy()
    return together


class StudentModel(Protocol):
    """The model that the active trains on taught labels, and that then predicts alone; see
    `Student`.
    """

    rows_U: Tensor  # noqa: N815

    @property
    def networks(self) -> ActiveNetworks: ...

    @property
    def has_direct_fit(self) -> bool: ...

    def train_on_rows(self, step: int, rows_B: Tensor) -> StepLoss: ...

    def score_rows(self, rows: Tensor) -> Scored: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None: ...


class StudentActive(ActiveRole):
    """The role of an active that sends one request, and then trains alone; see `ActiveRole`.
    `student`: the model that will predict alone; headline: the name of its accuracy.
    """

    def __init__(
        self, party: PartyContext, student: StudentModel, *, headline: str, guarantee: str
    ) -> None:
        """Make the active's role around a student, whose rows are the training rows.

        `headline`: variant of `evaluate` that the run reports first. `guarantee`: what the session
        promises, in words.
        """
        super().__init__()
        self.name = party.name
        self.guarantee = guarantee
        self.student: StudentModel = student
        self.checkpoint_parts = {"student": student}
        self.training_rows = student.rows_U
        self._headline = headline
        self._test_rows = party.data.test_rows
        self._classes = len(party.data.classes)
        self._is_taught = False

    @abstractmethod
    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        """Request the other parties' help, and train the student on it; once a run."""

    async def begin_epoch(self, links: Links, steps: StepCounter) -> bool:
        """Request help before the first epoch; a student with a closed form has no steps after
        that.
        """
        if not self._is_taught:
            await self.teach_student(links, steps)
            self._is_taught = True
        return not self.student.has_direct_fit

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> StepLoss:
        return self.student.train_on_rows(step, rows_B)

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        return {self._headline: self.student.score_rows(self._test_rows)}

    def get_solo_networks(self) -> ActiveNetworks | None:
        return self.student.networks

    def tensors(self) -> dict[str, Tensor]:
        return {"taught": torch.tensor(self._is_taught), **super().tensors()}

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=next_step)
        self._is_taught = bool(tensors["taught"])


def warn_of_no_help(active: str) -> None:
    """Warn that validation disabled help, which was no better than the best local model."""
    warnings.warn(
        f"{active}: help is not used: on labelled rows that are held out it is not better than the "
        "best that its own columns give, by more than chance may do",
        NoHelpWarning,
        stacklevel=3,
    )


def count_classes(party: PartyContext) -> int:
    """Return K, the number of classes, or of ranges of a numeric target, that votes are over."""
    return len(party.data.classes) or RANGES


def train_student(student: Student, config: RunSettings) -> None:
    """Train a student by gradient descent over its rows, for the run's number of epochs."""
    if student.has_direct_fit:
        return
    step = 0
    for epoch in range(config.train.epochs):
        order = shuffle_rows(student.rows_U, config.seed, "student", epoch)
        for rows_B in order.split(config.train.batch_size):
            student.train_on_rows(step, rows_B)
            step += 1
