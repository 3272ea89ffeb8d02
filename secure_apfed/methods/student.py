"""The active's student: learns labels that others suggest, and predicts from its own features.

Run by: the active, where labels come from votes or a joint teacher. Random features under a linear
head are fitted in closed form; every other network is trained by gradient descent. Labelled rows
keep their own labels. In a regression, classes are ranges of targets (`TargetRanges`). Letters: N
rows of the active's table, U rows to learn from, V some of these, n labelled rows, B rows of a
batch, F features, D numbers of an encoded row, K classes, T numbers of a row's target (K, or 1 in a
regression).
"""

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Protocol, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import AfterValidator
from torch import Tensor, nn

from secure_apfed.alignment.positions import find_positions
from secure_apfed.base.seeds import derive_seed, one_thread, seed_draws, shuffle_rows
from secure_apfed.base.transfers import StepLoss
from secure_apfed.baselines import (
    BASELINES,
    FOLDS,
    Baseline,
    BaselineTask,
    LocalModel,
    choose_baseline,
    choose_class_measure,
    find_baseline,
    score_out_of_fold,
)
from secure_apfed.baselines.fitted import (
    ColumnView,
    FittedModel,
    blend_models,
    convert_forest,
    join_scores_to_row,
    make_score_reader,
)
from secure_apfed.baselines.forests import grow_regressing_trees
from secure_apfed.baselines.interface import cache_fits, split_folds
from secure_apfed.errors import NoHelpWarning
from secure_apfed.exchange import Links
from secure_apfed.labellers import (
    MAX_VALIDATION_ROWS,
    Labeller,
    Logistic,
    PrivateLogistic,
    make_labeller,
)
from secure_apfed.learning.descent import ActiveNetworks, add_prefix, remove_prefix
from secure_apfed.learning.trainers import ActiveTrainer
from secure_apfed.learning.votes import (
    ROWS_PER_BLOCK,
    MeasuredHelp,
    Numbers,
    SoftTrainer,
    ValidationRows,
    find_last_layer,
    fit_linear,
    pool_opinions,
)
from secure_apfed.measures.table import Scored, normalise_scores
from secure_apfed.measures.tasks import LOSSES, Regression, score_rows
from secure_apfed.methods.alignment import intersect_rows
from secure_apfed.methods.local_models import restore_networks, wrap_as_networks
from secure_apfed.methods.method import ActiveRole, StepCounter
from secure_apfed.methods.party import PartyContext
from secure_apfed.networks.models import RandomFeatures, make_encoder_and_head
from secure_apfed.settings import THE_ACTIVE, describe_unknown_name, protects

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_TREE_COUNT = 60
_RIDGE = "ridge"
"""The name of the student's own linear layer, fitted by ridge regression."""
_MIN_LEAF_ROWS = {"trees": 5, "fine trees": 1}
"""Least rows of a leaf, by name of the tree models that compete with ridge regression."""
_AVERAGED_WITH = "mean_of_three"
"""The combination of local models that a student is averaged with."""
_MAX_COMPARED_ROWS = 3_000
"""Rows at most on which ridge regression and trees are compared."""
_MAX_TREE_ROWS = 10_000
"""Rows at most to which trees are fitted."""
_FOLDS_COMPARED = 3
"""Folds of that comparison."""
_BEST_LOCAL = "best_solo"
_PRIORS = (_BEST_LOCAL, "labeller", *BASELINES)
"""Names of the active's priors: the models that predict a row's class before votes are read; see
`find_prior`."""
RANGES = 8
"""Number of ranges into which a numeric target is cut, K. More ranges describe a target more
finely, each with fewer labelled rows."""


def _require_prior(name: str) -> str:
    """Return the name of a prior. Raises ValueError: no prior has this name."""
    if name not in _PRIORS:
        raise ValueError(describe_unknown_name(name, _PRIORS))
    return name


PriorName: TypeAlias = Annotated[
    str, AfterValidator(_require_prior), THE_ACTIVE, protects("nobody")
]
"""The type of a settings key that names the active's prior, one of `_PRIORS`; the active decides
it."""


# Targets of a regression as classes that can be voted for: ranges with about equally many labelled
# rows.
#
# Run by: the active. Passives are shown the range of a labelled row's target, and never the target;
# they vote for ranges as for classes, so that sums, noise and epsilons are those of any vote. The
# active learns for a row the mean of the ranges' mean targets, weighted by their probabilities
# (L. Torgo and J. Gama, "Regression using classification algorithms", Intelligent Data Analysis 1,
# 1997).
#
# Letters: n labelled rows, U rows, K ranges.


@dataclass(frozen=True, eq=False)
class TargetRanges:
    """The ranges of targets that serve as classes.

    Attributes:
        edges: the boundaries between ranges, (K - 1,), rising.
        mean_targets: the target that each range stands for, (K,).
    """

    edges: Floats
    mean_targets: Floats

    @classmethod
    def from_targets(cls, targets_n: Floats, *, range_count: int = RANGES) -> Self:
        """Cut targets (n,) at their quantiles; each range stands for the mean of its targets.

        If many targets are equal, a range may be empty; it stands for its lower edge then.
        """
        inner_quantiles = np.linspace(0, 1, range_count + 1)[1:-1]
        edges = np.quantile(targets_n, inner_quantiles)
        range_n = np.searchsorted(edges, targets_n, side="left")
        # Every range starts as its lower edge; the lowest range has none, and takes its upper edge.
        centres = np.concatenate([edges[:1], edges])
        for index in np.unique(range_n):
            centres[index] = targets_n[range_n == index].mean()
        return cls(edges, centres)

    def encode_targets(self, targets_n: Floats) -> Integers:
        """Return the index of the range that each target is in, (n,)."""
        return np.searchsorted(self.edges, targets_n, side="left").astype(np.int64)

    def compute_mean_targets(self, likely_UK: Floats) -> Floats:
        """Return the expected target of each row, (U, 1), from the probabilities of the ranges.

        `likely_UK`: probabilities of K ranges for U rows, not necessarily normalised. A row of
        zeros gets 0: targets are standardised, so 0 is their mean.
        """
        total_U1 = likely_UK.sum(axis=1, keepdims=True)
        mean_U1 = (likely_UK @ self.mean_targets)[:, None]
        expected_U1: Floats = np.zeros_like(mean_U1)
        np.divide(mean_U1, total_U1, out=expected_U1, where=total_U1 > 0)
        return expected_U1


class Student:
    """The model that the active trains on aligned training rows, to predict alone afterwards.

    It learns class probabilities that others suggest for rows without a label (votes, or a joint
    teacher), and the true labels of the others.

    Attributes:
        classes: K, number of classes, or of ranges of a numeric target.
        rows_U: the rows of the active's table that it learns from.
        positions_U: the alignment positions of these rows.
        features_UF: the features of these rows, flattened, float64.
        labelled_n: indices into `rows_U` of the labelled rows, (n,).
        labels_n: the classes of the labelled rows, (n,).
        trainer: the student's network and the optimiser.
    """

    def __init__(self, party: PartyContext, aligned: Tensor) -> None:
        """Build the untrained network, and select the rows and labels that it learns from.

        `party`: the active, with its settings and data. `aligned`: the row of its table at each of
        the N alignment positions.
        """
        config = party.config
        data = party.data
        seed = party.secrets.seed
        features_N = data.table.features
        rows_U = intersect_rows(data.train_rows, aligned)
        assert data.table.labels is not None
        self._task = party.task
        task = self._task
        is_regression = isinstance(task, Regression)
        self.trainer = SoftTrainer(
            party.name,
            self._make_networks(party),
            features_N=features_N,
            train=config.train,
            seed=seed,
            loss=LOSSES[task.error] if isinstance(task, Regression) else F.cross_entropy,
        )
        self.rows_U = rows_U
        self.positions_U = find_positions(aligned, rows_U)
        self.classes = self.count_classes(party)
        self._owner = party.name
        self._model = config.model
        self._train = config.train
        self._measure = choose_class_measure(config)
        self._shape = features_N.shape[1:]
        self.features_UF: Floats = features_N[rows_U].flatten(1).double().numpy()
        self.labelled_n = torch.isin(rows_U, data.labelled_rows).nonzero().flatten().numpy()
        known_n = data.table.labels[rows_U[self.labelled_n]].numpy()
        # A regression learns by votes for ranges of the target; None: the task has classes.
        self._bins = (
            TargetRanges.from_targets(known_n.astype(np.float64)) if is_regression else None
        )
        self.labels_n = known_n if self._bins is None else self._bins.encode_targets(known_n)
        # Targets of the labelled rows: one-hot classes, or the number itself.
        self._truth_nT = known_n[:, None] if is_regression else np.eye(self.classes)[known_n]
        self._labels_N = self.trainer.compute.move_tensor(data.table.labels)
        self._seed = seed
        self._run_seed = config.seed  # so that fits are shared with the run's local baselines
        # A fitted model that predicts instead of the student's network: trees, or a baseline.
        self._stored_networks: ActiveNetworks | None = None
        self._stored_name = ""
        # The average of the student and local models; None: it is not averaged.
        self._averaged: ActiveNetworks | None = None
        target_size = self._truth_nT.shape[1]
        self._targets_NT = torch.zeros(len(data.table.ids), target_size, dtype=torch.float64)

    @staticmethod
    def _make_networks(party: PartyContext) -> ActiveNetworks:
        """Return the student's untrained networks.

        Random features, which are not trained, are scaled by the training rows.
        """
        with seed_draws(party.secrets.seed, party.name, "student"):
            encoder, head = make_encoder_and_head(
                party.config.model,
                party.data.table.shape,
                party.output_count,
                family=party.own_code.find_family(),
            )
        if isinstance(encoder, RandomFeatures):
            encoder.fit(party.data.table.features[party.data.train_rows])
        return ActiveNetworks(encoder, head)

    @staticmethod
    def count_classes(party: PartyContext) -> int:
        """Return K, the number of classes, or of the ranges into which a numeric target is cut."""
        return len(party.data.classes) or RANGES

    def make_local_task(self, seed: int) -> BaselineTask:
        """Return the student's rows and labels as a task for the active's local baselines.

        `seed`: random seed of the baselines.
        """
        features = self.features_UF.reshape(len(self.rows_U), *self._shape)
        return BaselineTask.from_arrays(
            features,
            self.labelled_n,
            self.labels_n,
            classes=self.classes,
            seed=seed,
            model=self._model,
            train=self._train,
            measure=self._measure,
        )

    @property
    def networks(self) -> ActiveNetworks:
        """The networks that predict.

        They are the average with local models or a fitted model, if there is one, otherwise the
        student's own network.
        """
        return self._averaged or self._stored_networks or self.trainer.networks

    @property
    def has_direct_fit(self) -> bool:
        """True if no epochs of gradient descent follow.

        The student is fitted in closed form then, or a fitted model predicts in its place.
        """
        return bool(self._stored_networks) or isinstance(
            self.trainer.networks.encoder, RandomFeatures
        )

    @property
    def has_classes(self) -> bool:
        """True if the student predicts classes; False if it predicts a number (regression)."""
        return self._bins is None

    @property
    def can_be_averaged(self) -> bool:
        """True if averaging the student with local models is possible and useful.

        It is possible for classes, and useful if the student also learns from unlabelled rows.
        """
        return self.has_classes and len(self.labelled_n) < len(self.rows_U)

    def use_baseline(self, baseline: Baseline) -> None:
        """Fit this baseline to all rows, and predict with it from now on instead of the network.

        It is called where validation rejects the votes.
        """
        self._stored_name = baseline.name
        all_U = np.ones(len(self.rows_U), dtype=bool)
        self._stored_networks = self._fit_named_model(baseline.name, all_U)

    def average_with_local_models(self) -> None:
        """Predict from now on with the average of the trained model and the best local models.

        These are the three models that the local models average
        (`secure_apfed.baselines.COMBINATIONS`).
        """
        all_U = np.ones(len(self.rows_U), dtype=bool)
        self._averaged = self._average_networks(
            self._stored_networks or self.trainer.networks, all_U
        )

    def _average_networks(
        self, student: ActiveNetworks, is_used_U: NDArray[np.bool_]
    ) -> ActiveNetworks:
        """Return the average of a trained student and of the three best local models.

        `is_used_U`: whether local models are fitted to a row, (U,).
        """
        local_models = self._fit_named_model(_AVERAGED_WITH, is_used_U).encoder
        assert isinstance(local_models, FittedModel)
        feature_count = self.features_UF.shape[1]
        student = copy.deepcopy(student).cpu().double()
        if isinstance(student.encoder, FittedModel):  # trees fitted to the rows' targets
            return wrap_as_networks(
                blend_models(ColumnView.for_whole_row(feature_count), student.encoder, local_models)
            )
        # Ridge regression on random features predicts probabilities; other networks give logits.
        are_shares = isinstance(student.encoder, RandomFeatures)
        view, scores = make_score_reader(feature_count, self.classes, are_shares=are_shares)
        head = blend_models(view, scores, local_models).as_head()
        networks = ActiveNetworks(join_scores_to_row(student.encoder, student.head), head)
        return networks.requires_grad_(False).eval()

    def _fit_named_model(self, name: str, is_used_U: NDArray[np.bool_]) -> ActiveNetworks:
        """Fit the model of this name, and return it as networks.

        Trees are fitted to the student's targets, a baseline to the labels. `name`: a key of
        `_MIN_LEAF_ROWS` (trees), or the name of a baseline. `is_used_U`: whether it is fitted to a
        row, (U,).
        """
        fits_trees = name in _MIN_LEAF_ROWS
        task = self.make_local_task(self._seed if fits_trees else self._run_seed)
        with one_thread():
            if fits_trees:
                targets_UK = self._targets_NT[self.rows_U].numpy()
                rows_V = np.flatnonzero(is_used_U & targets_UK.any(axis=1))
                model: nn.Module = _fit_trees(task, rows_V, targets_UK, _MIN_LEAF_ROWS[name])
            else:
                unused_labels = np.flatnonzero(~is_used_U[self.labelled_n])
                task = task.subsampled.drop_labels(unused_labels)
                model = LocalModel(baseline=find_baseline(name), task=task).build_network()
        return wrap_as_networks(model)

    def fit_to_labels(self, likely_UK: Floats) -> Floats | None:
        """Store class probabilities as targets of all rows, and fit the network in closed form.

        A network that is trained by gradient descent is not fitted here: its training follows. A
        student of random features is replaced by trees if trees fit held-out targets better.

        `likely_UK`: probabilities of K classes for U rows; a row of zeros has no target. Labelled
        rows keep their labels as targets.

        Returns held-out predictions, (U, K), with zeros for rows that were not held out; None if
        the network is trained by gradient descent, predicts numbers, or reads no random features.
        """
        has_target_U = np.asarray(likely_UK.any(axis=1))
        has_target_U[self.labelled_n] = True
        if self._bins is None:
            targets_UT = likely_UK.copy()
        else:
            targets_UT = self._bins.compute_mean_targets(likely_UK)
        targets_UT[self.labelled_n] = self._truth_nT
        self._targets_NT[self.rows_U] = torch.from_numpy(targets_UT)
        if not self.has_direct_fit:
            return None
        networks = self.trainer.networks
        encoded_UD = self.encode_rows(networks)
        self._fit_layer(find_last_layer(networks), encoded_UD, targets_UT, has_target_U)
        if not self.has_classes or type(networks.encoder) is not RandomFeatures:
            return None
        predictions = self._predict_held_out(encoded_UD, targets_UT, np.flatnonzero(has_target_U))
        errors = {}
        for name, predicted_UK in predictions.items():
            is_predicted_U = predicted_UK.any(axis=1)
            # The squared error on held-out targets decides between ridge regression and trees.
            errors[name] = ((predicted_UK - targets_UT)[is_predicted_U] ** 2).sum()
        best_name = min(errors, key=errors.__getitem__)
        if best_name != _RIDGE:
            self._stored_name = best_name
            self._stored_networks = self._fit_named_model(best_name, has_target_U)
        return predictions[best_name]

    def _predict_held_out(
        self, encoded_UD: Numbers, targets_UT: Floats, rows_V: Integers
    ) -> Mapping[str, Floats]:
        """Return held-out predictions by ridge regression and by trees, (U, K) each, by name.

        They are cross-validated on at most `_MAX_COMPARED_ROWS` rows, to save time. Other rows are
        zeros. All models learn the targets, so that their errors can be compared.

        `encoded_UD`: the inputs of the linear layer, D numbers for each of U rows. `targets_UT`:
        class probabilities to learn. `rows_V`: indices of the rows that have a target.
        """
        task = self.make_local_task(self._seed)
        head = copy.deepcopy(self.trainer.networks.head)
        rng = np.random.default_rng(derive_seed(self._seed, "ridge or trees"))
        compared_rows = rng.permutation(rows_V)[:_MAX_COMPARED_ROWS]
        predictions = {name: np.zeros_like(targets_UT) for name in (_RIDGE, *_MIN_LEAF_ROWS)}
        if len(compared_rows) < _FOLDS_COMPARED:
            return predictions
        # The copy's last layer is refitted in each fold, so that the student's own layer stays.
        layer = list(head.modules())[-1]
        assert isinstance(layer, nn.Linear)
        folds = [compared_rows[first::_FOLDS_COMPARED] for first in range(_FOLDS_COMPARED)]
        with one_thread(), torch.no_grad():
            for held_out_rows in folds:
                fitted_rows = np.setdiff1d(compared_rows, held_out_rows)
                is_fitted_U = np.isin(np.arange(len(targets_UT)), fitted_rows)
                self._fit_layer(layer, encoded_UD, targets_UT, is_fitted_U)
                weight_DT = layer.weight.double().cpu().numpy().T
                encoded_VD = encoded_UD[held_out_rows].astype(np.float64)
                predictions[_RIDGE][held_out_rows] = encoded_VD @ weight_DT
                features_VF = torch.from_numpy(task.features[held_out_rows])
                for name, min_leaf_rows in _MIN_LEAF_ROWS.items():
                    trees = _fit_trees(task, fitted_rows, targets_UT, min_leaf_rows)
                    # Fitted models return log-probabilities.
                    predictions[name][held_out_rows] = trees(features_VF).exp().numpy()
        return predictions

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        """Return the networks that predict, fitted again without these rows of the table.

        They serve to score these rows as new ones. None: the student is trained by gradient
        descent, and another training would take too long.
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
            encoded_UD = self.encode_rows(networks)
            self._fit_layer(find_last_layer(networks), encoded_UD, targets_UT, has_target_U)
        return networks if self._averaged is None else self._average_networks(networks, is_used_U)

    def _fit_layer(
        self,
        linear: nn.Linear,
        encoded_UD: Numbers,
        targets_UT: Floats,
        has_target_U: NDArray[np.bool_],
    ) -> None:
        """Fit a linear layer in place to the targets of some rows, by ridge regression.

        `encoded_UD`: the layer's inputs, D numbers for each of U rows. `targets_UT`: class
        probabilities or numbers to learn. `has_target_U`: whether it is fitted to a row.
        """
        rows_V = np.flatnonzero(has_target_U)
        labelled_n = np.intersect1d(rows_V, self.labelled_n)
        fit_linear(
            linear, encoded_UD, targets_UT, rows_with_target_V=rows_V, labelled_rows_n=labelled_n
        )

    @torch.no_grad()
    def encode_rows(self, networks: ActiveNetworks) -> Numbers:
        """Return the encoder's output for the student's rows, (U, D), computed in blocks.

        It is the input of the head's last linear layer. Blocks save memory.
        """
        linear = find_last_layer(networks)
        features_N = self.trainer.features_N
        encoded_UD = torch.empty(len(self.rows_U), linear.in_features, dtype=linear.weight.dtype)
        blocks = zip(
            encoded_UD.split(ROWS_PER_BLOCK), self.rows_U.split(ROWS_PER_BLOCK), strict=True
        )
        for block_BD, rows_B in blocks:
            block_BD.copy_(networks.encoder(features_N[rows_B]))
        return encoded_UD.numpy()

    def train_on_rows(self, step: int, rows_B: Tensor) -> StepLoss:
        """Run one step of gradient descent on the targets of these table rows; return the loss."""
        return self.trainer.train_batch(step, rows_B, self._targets_NT[rows_B])

    def weigh_votes(
        self, votes_UK: Floats | None, prior: "Prior", *, seed: int, uses_votes_always: bool = False
    ) -> "WeighedVotes":
        """Combine votes with the active's own predictions; labelled rows decide the votes' weight.

        Args:
            votes_UK: the sum of the passives' votes (scores of K classes) on its U rows; None:
                there are no votes.
            prior: function that returns the active's prediction rule before it reads votes.
            seed: random seed of the folds that validate the prior.
            uses_votes_always: whether votes are used even if they do not help on labelled rows.
        """
        task = self.make_local_task(seed)
        with one_thread(), cache_fits():
            prior_rule = prior(task)
            # Adding 1 keeps the frequency of a class without labelled rows above 0.
            smoothed_counts_K = np.bincount(task.labels, minlength=task.classes) + 1.0
            frequencies = smoothed_counts_K / smoothed_counts_K.sum()
            own_UK = _compute_shares(prior_rule.predict_scores(task), frequencies)
            if votes_UK is None:
                return WeighedVotes(own_UK, own_UK, prior_rule)
            validation_rows = collect_validation_rows(prior_rule, task, frequencies)
            likely_UK, help_ = pool_opinions(
                votes_UK,
                own_UK,
                validation_rows,
                frequencies,
                seed=seed,
                is_always_used=uses_votes_always,
            )
        return WeighedVotes(likely_UK if help_.is_in_use else own_UK, own_UK, prior_rule, help_)

    def learn_from_votes(
        self, votes_UK: Floats, prior: "Prior", *, seed: int, usage: str
    ) -> MeasuredHelp:
        """Make labels from votes, take them as targets, and return the validation.

        A student with a closed form is fitted at once; for another, gradient descent follows. If
        validation rejects the votes, the student becomes the best local model, unless `usage` says
        otherwise.

        Args:
            votes_UK: the sum of the passives' votes (scores of K classes) on its U rows.
            prior: function that returns the active's prediction rule without votes.
            seed: random seed of the folds that validate the prior.
            usage: "judged": use votes only if validation accepts them; "always": train on votes
                whatever validation says; "averaged": if validation rejects them, average student
                and local models, at once or after gradient descent.

        Warns NoHelpWarning: validation rejected the votes, and they are not used.
        """
        may_average = usage == "averaged" and self.can_be_averaged
        uses_votes_always = may_average or usage == "always"
        with cache_fits():
            weighed_votes = self.weigh_votes(
                votes_UK, prior, seed=seed, uses_votes_always=uses_votes_always
            )
            own_baseline = weighed_votes.prior_rule.baseline
            help_ = weighed_votes.help
            assert help_ is not None
            can_use_baseline = own_baseline is not None and self.has_classes
            # Without a baseline to fall back on, the student learns from whatever was weighed.
            if help_.is_in_use or not can_use_baseline:
                predicted_UK = self.fit_to_labels(weighed_votes.likely_UK)
                learnt_gain = 0.0
                if can_use_baseline:
                    learnt_gain = compute_learnt_gain(predicted_UK, weighed_votes, self.labelled_n)
                help_ = replace(help_, learnt_gain=learnt_gain)
            if may_average:
                # Average only where validation is not sure that votes help.
                help_ = replace(help_, is_always_used=False, is_averaged=not help_.is_validated)
            if own_baseline is not None and can_use_baseline and not help_.is_in_use:
                self.use_baseline(own_baseline)
            if self.has_direct_fit and help_.is_averaged:
                self.average_with_local_models()
        if not help_.is_in_use:
            warnings.warn(f"{self._owner}: {help_}", NoHelpWarning, stacklevel=3)
        return help_

    def train_by_descent(self) -> None:
        """Train by gradient descent over its rows, for the run's number of epochs.

        A student that is already fitted in closed form stays as it is.
        """
        if self.has_direct_fit:
            return
        step = 0
        for epoch in range(self._train.epochs):
            order = shuffle_rows(self.rows_U, self._run_seed, "student", epoch)
            for rows_B in order.split(self._train.batch_size):
                self.train_on_rows(step, rows_B)
                step += 1

    def score_rows(self, rows: Tensor) -> Scored:
        """Return scores of these table rows by the model that predicts now, with true labels."""
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
        """Return targets, networks, and the stored and averaged models, for a checkpoint.

        The tensor "kept by" is the stored model's name in UTF-8; tensors "kept." are its weights.
        """
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


def _fit_trees(
    task: BaselineTask, rows_V: Integers, targets_UK: Floats, min_leaf_rows: int
) -> FittedModel:
    """Return extremely randomised trees fitted to class probabilities of some of a task's rows.

    `rows_V`: indices of the rows to fit to; at most about `_MAX_TREE_ROWS` of them are used, evenly
    spaced, to save time. `targets_UK`: probabilities of K classes for each of the task's U rows.
    `min_leaf_rows`: smallest number of rows in a leaf.
    """
    stride = max(1, math.ceil(len(rows_V) / _MAX_TREE_ROWS))
    rows_V = rows_V[::stride]
    trees = grow_regressing_trees(
        task.features[rows_V],
        targets_UK[rows_V],
        tree_count=_TREE_COUNT,
        min_leaf_rows=min_leaf_rows,
        seed=task.derive_random_state("trees of a student"),
    )
    shares = [tree.value[:, :, 0] for tree in trees]
    return FittedModel(convert_forest(trees, shares, task.classes))


@dataclass(frozen=True)
class PriorRule:
    """The rule by which the active predicts its rows before it reads votes.

    Attributes:
        predict_scores: fits a model to a task's labels, and returns its scores (U, K) of the task's
            rows; a row of zeros means no prediction.
        baseline: the baseline that is fitted; None: the scores come from a labeller, which cannot
            predict new rows.
    """

    predict_scores: Callable[[BaselineTask], Floats]
    baseline: Baseline | None = None


Prior: TypeAlias = Callable[[BaselineTask], PriorRule]
"""Function from a task to the active's own prediction rule; it may choose the model by the task's
labels."""


def make_labeller_prior(labeller: Labeller) -> Prior:
    """Return the prior that predicts the active's rows by this labeller, from its own features.

    A prior is a function from a task to the active's prediction rule (`PriorRule`).
    """
    return lambda _: PriorRule(
        lambda task: labeller.label_rows(
            task.features, task.labelled_indices, task.labels, task.classes
        )
    )


def make_baseline_prior(baseline: Baseline) -> Prior:
    """Return the prior that predicts by this baseline, fitted to the labelled rows.

    A prior is a function from a task to the active's prediction rule (`PriorRule`).
    """
    return lambda _: PriorRule(
        lambda task: baseline.fit(task.subsampled).compute_scores(task.features), baseline
    )


def find_prior(name: str, labeller: str) -> Prior:
    """Return the prior of this name (`PriorName`).

    `labeller`: name of the passives' labeller, which the prior "labeller" uses, too.
    """
    if name == _BEST_LOCAL:
        return choose_best_prior
    if name in BASELINES:
        return make_baseline_prior(BASELINES[name])
    # The active's own prediction leaves nothing to protect, so it is fitted without noise.
    adds_noise = labeller == PrivateLogistic.name
    return make_labeller_prior(Logistic() if adds_noise else make_labeller(labeller))


def choose_best_prior(task: BaselineTask) -> PriorRule:
    """Return the active's prediction rule by the local baseline that validates best."""
    return make_baseline_prior(choose_baseline(task))(task)


def _compute_shares(scores_BK: Floats, frequencies: Floats) -> Floats:
    """Return scores (B, K) as probabilities; a row of zeros gets the class frequencies (K,).

    A row of zeros means that the model made no prediction for it.
    """
    is_scored_B1 = scores_BK.any(axis=1, keepdims=True)
    return np.where(is_scored_B1, normalise_scores(scores_BK), frequencies)


def collect_validation_rows(
    prior_rule: PriorRule, task: BaselineTask, frequencies: Floats
) -> ValidationRows:
    """Return labelled rows for validation, each with the active's own prediction without its label.

    At most `MAX_VALIDATION_ROWS` rows are returned, since passives vote on no more labelled rows.
    If every row has a label, none is returned: votes are not needed then.

    `prior_rule`: the active's prediction rule. `frequencies`: the frequency of each class, (K,),
    which replaces missing predictions.
    """
    has_unlabelled = len(task.labels) < len(task.features)
    folds = split_folds(task.labels, FOLDS, task.seed) if has_unlabelled else []
    if not folds:
        empty = np.zeros(0, dtype=np.int64)
        return ValidationRows(
            row_positions=empty, labels_J=empty, local_probabilities_JK=np.zeros((0, task.classes))
        )
    # A labeller is fitted anew without each fold; a baseline cross-validates by itself, in the same
    # folds.
    if prior_rule.baseline is None:
        fold_scores = []
        for fold in folds:
            scores_UK = prior_rule.predict_scores(task.drop_labels(fold))
            fold_scores.append(scores_UK[task.labelled_indices[fold]])
        own_JK = _compute_shares(np.concatenate(fold_scores), frequencies)
    else:
        scored = score_out_of_fold(prior_rule.baseline, task)
        assert scored is not None
        own_JK = scored.scores
    # Only the first labelled rows have votes.
    positions = np.concatenate(folds)
    is_used = positions < MAX_VALIDATION_ROWS
    positions = positions[is_used]
    own_JK = own_JK[is_used]
    return ValidationRows(
        row_positions=task.labelled_indices[positions],
        labels_J=task.labels[positions],
        local_probabilities_JK=own_JK,
    )


@dataclass(frozen=True, eq=False)
class WeighedVotes:
    """Class probabilities of the student's rows, from votes and the active's own prediction.

    Attributes:
        likely_UK: the probability of each class for each row, (U, K), by votes and own prediction.
        own_UK: the probabilities by the active's own prediction only, (U, K).
        prior_rule: the active's prediction rule, which gave `own_UK`.
        help: whether votes were used for `likely_UK`, and the measurements that decided it; None:
            there are no votes.
    """

    likely_UK: Floats  # noqa: N815
    own_UK: Floats  # noqa: N815
    prior_rule: PriorRule
    help: MeasuredHelp | None = None


def compute_learnt_gain(
    predicted_UK: Floats | None, weighed_votes: WeighedVotes, labelled_n: Integers
) -> float:
    """Return the student's accuracy minus the accuracy of the active's own model, in [-1, 1].

    True labels are not known, so both are expected accuracies under the probabilities
    `weighed_votes.likely_UK`. They are measured on unlabelled rows that the student was not fitted
    to; the result is 0 if there are none.

    `predicted_UK`: the student's predictions of held-out rows, zeros elsewhere; None: none were
    made. `labelled_n`: indices of the labelled rows.
    """
    if predicted_UK is None:
        return 0.0
    rows_V = np.setdiff1d(np.flatnonzero(predicted_UK.any(axis=1)), labelled_n)
    likely_VK = weighed_votes.likely_UK[rows_V]
    student_right = _count_expected_right(predicted_UK[rows_V], likely_VK)
    local_right = _count_expected_right(weighed_votes.own_UK[rows_V], likely_VK)
    return (student_right - local_right) / max(1, len(rows_V))


def _count_expected_right(scores_VK: Floats, likely_VK: Floats) -> float:
    """Return the expected number of rows whose class with the best score is right.

    `likely_VK`: each class's probability to be the true one.
    """
    best_class_V = scores_VK.argmax(axis=1)
    return float(likely_VK[np.arange(len(best_class_V)), best_class_V].sum())


def standardise_parts(features_of_parties: Iterable[Tensor]) -> Floats:
    """Return several parties' features of the same rows side by side, (U, F), each standardised.

    The features of each party are centred, and scaled until their rows have the root-mean-square
    norm 1. So no party dominates the distances between rows.

    `features_of_parties`: one tensor (U, ...) for each party.
    """
    scaled = []
    for features in features_of_parties:
        flat_UF = features.detach().cpu().flatten(1).double()
        centred_UF = flat_UF - flat_UF.mean(0)
        rms_norm = centred_UF.square().sum(1).mean().sqrt()
        scaled.append(centred_UF / rms_norm if rms_norm > 0 else centred_UF)
    joined_UF: Floats = torch.cat(scaled, dim=1).numpy()
    return joined_UF


class StudentModel(Protocol):
    """A model that the active trains on labels suggested by others, and that predicts alone then.

    `Student` is one; its docstrings describe the members.
    """

    rows_U: Tensor  # noqa: N815

    @property
    def networks(self) -> ActiveNetworks:
        """The networks that predict."""

    @property
    def has_direct_fit(self) -> bool:
        """True if the model is fitted without epochs of gradient descent."""

    def train_on_rows(self, step: int, rows_B: Tensor) -> StepLoss:
        """Run one step of gradient descent on these table rows; return the loss."""

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        """Return the model fitted without these table rows; None: it cannot be."""

    def score_rows(self, rows: Tensor) -> Scored:
        """Return scores of these table rows, with true labels."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""


class LocalTraining:
    """The training of a model on the active's own features and labels.

    It predicts when the passives are gone.
    """

    def __init__(self, party: PartyContext) -> None:
        """Prepare the training.

        The active's own networks, if it brings some, are copied now, while they are untrained.
        """
        self._party = replace(party, own_code=party.own_code.copy_encoder())

    def train_model(self) -> tuple[ActiveNetworks, Scored]:
        """Train the model, and return it with its scores of the test rows."""
        party = self._party
        data = party.data
        # Without passives there is nothing to learn from rows without a label.
        own_data = replace(data, train_rows=data.labelled_rows, labelled=None)
        party = replace(party, data_or_none=own_data)
        is_regression = data.targets is not None
        if is_regression:
            return _train_on_numbers(party)
        student = Student(party, torch.arange(len(data.table.ids)))
        # Rows of zeros suggest nothing: labelled rows keep their own labels.
        student.fit_to_labels(np.zeros((len(student.rows_U), student.classes)))
        student.train_by_descent()
        return student.networks, student.score_rows(data.test_rows)


def _train_on_numbers(party: PartyContext) -> tuple[ActiveNetworks, Scored]:
    """Train networks on a party's own features and numeric labels.

    Returns them with their scores of the test rows.
    """
    config = party.config
    table = party.data.table
    seed = party.secrets.seed
    networks, _ = party.build_networks(sends_representations=False)
    assert table.labels is not None
    trainer = ActiveTrainer(
        party.name,
        networks,
        features_N=table.features,
        labels_N=table.labels,
        train=config.train,
        seed=seed,
        task=party.task,
    )
    step = 0
    for epoch in range(config.train.epochs):
        rows = shuffle_rows(party.data.train_rows, seed, "local numbers", epoch)
        for rows_B in rows.split(config.train.batch_size):
            trainer.train_on_batch(trainer.forward(step, rows_B, None))
            step += 1
    return networks, trainer.score_rows(party.data.test_rows)


class TaughtActive(ActiveRole):
    """The role of an active whose final model is a student; see `ActiveRole`.

    Attributes:
        student: the model that will predict alone.
    """

    student: StudentModel

    def get_active_networks(self) -> ActiveNetworks | None:
        return self.student.networks

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        return self.student.refit_excluding(rows)


class StudentActive(TaughtActive):
    """The role of an active that receives the other parties' answers once, and then trains alone.

    Answers are votes, codes, projections or singular vectors. See `TaughtActive`.
    """

    def __init__(
        self, party: PartyContext, student: StudentModel, *, headline_variant: str, guarantee: str
    ) -> None:
        """Make the active's role; the student's rows are the training rows.

        `headline_variant`: the key of its score in the result of `evaluate`, which the run reports
        first. `guarantee`: the privacy guarantee, in a sentence for the report.
        """
        super().__init__()
        self.name = party.name
        self.guarantee = guarantee
        self.student = student
        self.checkpoint_parts = {"student": student}
        self.training_rows = student.rows_U
        self._headline = headline_variant
        self._test_rows = party.data.test_rows
        self._classes = len(party.data.classes)
        self._is_taught = False

    @abstractmethod
    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        """Request the other parties' answers, and give the student its targets; called once a run.

        A student that is fitted in closed form is fitted here, as one step that `steps` counts.
        """

    async def begin_epoch(self, links: Links, steps: StepCounter) -> bool:
        """Request the other parties' answers before the first epoch; later do nothing.

        Returns whether steps of gradient descent follow: False if the student is already fitted.
        """
        if not self._is_taught:
            await self.teach_student(links, steps)
            self._is_taught = True
        return not self.student.has_direct_fit

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> StepLoss:
        """Run one step of the student on these table rows; sends nothing."""
        return self.student.train_on_rows(step, rows_B)

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return the student's scores of the test rows; sends nothing."""
        return {self._headline: self.student.score_rows(self._test_rows)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, with the measured gain from votes as "help"."""
        tensors = {"taught": torch.tensor(self._is_taught), **super().tensors()}
        return tensors if self.help is None else {**tensors, "help": self.help.to_tensor()}

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the student, the measured gain from votes, and whether answers have arrived."""
        super().load_tensors(tensors, next_step=next_step)
        self._is_taught = bool(tensors["taught"])
        if "help" in tensors:
            self.help = MeasuredHelp.from_tensor(tensors["help"])


def warn_of_no_help(active: str) -> None:
    """Warn (NoHelpWarning) that the other parties' answers are not used.

    On validation rows they were no better than the best local model of the party `active`.
    """
    warnings.warn(
        f"{active}: help is not used: on labelled rows that are held out it is not better than the "
        "best that its own columns give, by more than chance may do",
        NoHelpWarning,
        stacklevel=3,
    )
