"""The interface of local baselines: their task, their predictor, and the store of fitted models.

Run by: the active, and by measurements of the gain by the passives' help: it is compared with the
best local baseline, which may use unlabelled rows.

Fits with the same rows, labels and seed are reused: every baseline is fitted without a part of the
labels to choose one of them, both for the report of a run and for the prior of its votes. Nothing
is stored unless a store is set. Its content was learnt from the active's labels, so it belongs to
the active.

Letters: N training rows, n of them with labels, B rows to predict, F features of a row, K classes.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors.torch import load, save
from torch import Tensor, nn

from secure_apfed.base.seeds import Draws, derive_seed, seed_draws
from secure_apfed.data import OwnData
from secure_apfed.errors import DataError
from secure_apfed.learning.votes import ROWS_PER_BLOCK
from secure_apfed.measures.table import ACCURACY, MEASURES, Measure
from secure_apfed.networks.models import NetworkFamily, Shape
from secure_apfed.settings import ModelSettings, RunSettings, TrainSettings

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
MAX_ROWS = 20_000
"""Number of training rows above which baselines leave out rows without a label, to save time."""
MIN_CLASSES = 2
"""Smallest number of classes among the labelled rows of a task."""
ENOUGH_LABELS = 400
"""Smallest number of labels for which validation on one part replaces cross-validation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BaselineTask:
    """The active's own training rows, and the labels of some of them, for local baselines.

    Attributes:
        features: all N training rows, each flattened to F features.
        shape: the shape of a row before it was flattened.
        labelled_indices: indices of the n rows that have a label, each once.
        labels: the classes of these rows, 0 to K - 1.
        classes: K; classes without a label are never predicted.
        seed: the seed of all random numbers of a baseline.
        model, train: the run's settings, for the baseline that trains the run's own network.
        family: builds that network, if it is user-defined; None: it follows from `model`.
        measure: the measure that ranks models on held-out labels.
    """

    features: FloatArray = field(repr=False)
    shape: Shape
    labelled_indices: IntArray = field(repr=False)
    labels: IntArray = field(repr=False)
    classes: int
    seed: int = 0
    model: ModelSettings = field(default_factory=ModelSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    measure: Measure = ACCURACY
    family: NetworkFamily | None = field(default=None, repr=False)

    @classmethod
    def from_run(
        cls,
        config: RunSettings,
        data: OwnData,
        rows_U: Tensor,
        *,
        labels_N: Tensor | None = None,
    ) -> Self:
        """Return the task of some of a run's training rows, with the labels that some of them have.

        Args:
            config: the run's settings.
            data: the active's data, with the labels that the run may learn from.
            rows_U: the training rows, as ascending rows of its table, (U,).
            labels_N: labels of all N rows of its table, on the CPU; None: the table's labels.
        """
        labels_N = data.table.labels if labels_N is None else labels_N
        assert labels_N is not None
        labelled_indices = torch.isin(rows_U, data.labelled_rows).nonzero().flatten()
        return cls.from_arrays(
            data.table.features[rows_U],
            labelled_indices,
            labels_N[rows_U[labelled_indices]],
            classes=len(data.classes),
            seed=config.seed,
            model=config.model,
            train=config.train,
            measure=choose_class_measure(config),
        )

    @classmethod
    def from_arrays(
        cls,
        features: ArrayLike,
        labelled_indices: ArrayLike,
        labels: ArrayLike,
        *,
        classes: int,
        seed: int = 0,
        model: ModelSettings | None = None,
        train: TrainSettings | None = None,
        measure: Measure = ACCURACY,
    ) -> Self:
        """Return a task from arrays, or tensors on the CPU.

        Args:
            features: N rows of any shape, (N, *shape).
            labelled_indices: indices of the n labelled rows.
            labels: the classes of these rows, (n,).
            classes: number of classes.
            seed: the seed of all random numbers of a baseline.
            model, train: settings for the baseline that trains the run's own network; None: the
                defaults.
            measure: the measure that ranks models on held-out labels.

        Raises DataError: the features have a single axis.
        """
        features_array = np.asarray(features, dtype=np.float64)
        if features_array.ndim < 2:
            raise DataError(
                f"local models: features are a table or images, got shape {features_array.shape}"
            )
        return cls(
            features=features_array.reshape(
                len(features_array), math.prod(features_array.shape[1:])
            ),
            shape=tuple(features_array.shape[1:]),
            labelled_indices=np.asarray(labelled_indices, dtype=np.int64),
            labels=np.asarray(labels, dtype=np.int64),
            classes=classes,
            seed=seed,
            model=model or ModelSettings(),
            train=train or TrainSettings(),
            measure=measure,
        )

    def __post_init__(self) -> None:
        """Check that rows, labelled positions and labels fit together.

        Raises DataError: they do not, or fewer than two classes have a label.
        """
        check_flat_rows(self.features, self.shape)
        row_count = len(self.features)
        indices = self.labelled_indices
        if indices.ndim != 1 or indices.shape != self.labels.shape:
            raise DataError(
                "local models: each labelled row needs one label, got positions of shape "
                f"{indices.shape} and labels of shape {self.labels.shape}"
            )
        if len(indices) and not 0 <= indices.min() <= indices.max() < row_count:
            raise DataError(
                f"local models: labelled rows lie in 0 to {row_count - 1}, got {indices.min()} to "
                f"{indices.max()}"
            )
        if len(np.unique(indices)) != len(indices):
            raise DataError("local models: a labelled row is listed twice")
        seen_classes = np.unique(self.labels)
        if len(seen_classes) < MIN_CLASSES:
            raise DataError(
                f"local models: the {len(self.labels)} labelled rows are of {len(seen_classes)} "
                "class(es), and at least two are needed; label rows of another class"
            )
        if seen_classes[0] < 0 or seen_classes[-1] >= self.classes:
            raise DataError(
                f"local models: labels lie in 0 to {self.classes - 1}, got {seen_classes[0]} to "
                f"{seen_classes[-1]}"
            )

    @property
    def labelled_features(self) -> FloatArray:
        """The features of the labelled rows, (n, F)."""
        return self.features[self.labelled_indices]

    @property
    def one_hot_labels(self) -> FloatArray:
        """The labels as one-hot rows, (n, K)."""
        return np.asarray(np.eye(self.classes)[self.labels], dtype=np.float64)

    @property
    def subsampled(self) -> Self:
        """The task with at most `MAX_ROWS` rows: all labelled ones, and a sample of the others.

        All labelled rows remain, even if there are more than `MAX_ROWS`.
        """
        rows = self.subsample_indices
        if len(rows) == len(self.features):
            return self
        return replace(
            self, features=self.features[rows], labelled_indices=np.arange(len(self.labels))
        )

    @property
    def subsample_indices(self) -> IntArray:
        """The indices of the rows that `subsampled` keeps, in its order."""
        return sample_rows(len(self.features), self.labelled_indices, seed=self.seed)

    def select_rows(self, rows: IntArray) -> Self:
        """Return the task of these rows, distinct and ascending, with their labels."""
        is_selected_n = np.isin(self.labelled_indices, rows)
        return replace(
            self,
            features=self.features[rows],
            labelled_indices=np.searchsorted(rows, self.labelled_indices[is_selected_n]),
            labels=self.labels[is_selected_n],
        )

    def drop_labels(self, dropped: IntArray) -> Self:
        """Return the task without some labels, whose rows stay as unlabelled ones.

        `dropped`: the labels to drop, as indices into `labels`.
        """
        remaining = np.setdiff1d(np.arange(len(self.labels)), dropped)
        return replace(
            self, labelled_indices=self.labelled_indices[remaining], labels=self.labels[remaining]
        )

    def derive_random_state(self, *purpose: str | int) -> int:
        """Return a 32-bit seed for scikit-learn, another one for every purpose."""
        return _derive_random_state(self.seed, *purpose)


def _derive_random_state(seed: int, *purpose: str | int) -> int:
    """Return a 32-bit seed, the largest that scikit-learn takes, for one purpose."""
    return derive_seed(seed, "solo", *purpose) % 2**32


def sample_rows(row_count: int, labelled_indices: IntArray, *, seed: int) -> IntArray:
    """Return the indices of about `MAX_ROWS` rows: all labelled ones, then some of the others.

    If there are no more rows than that, or each has a label, all rows are returned in order.

    Args:
        row_count: number of rows.
        labelled_indices: indices of the n labelled rows.
        seed: seed of the run; equal arguments give an equal sample.
    """
    if row_count <= MAX_ROWS or len(labelled_indices) == row_count:
        return np.arange(row_count)
    unlabelled = np.setdiff1d(np.arange(row_count), labelled_indices)
    generator = np.random.default_rng(_derive_random_state(seed, "few rows"))
    sampled = generator.permutation(unlabelled)[: max(0, MAX_ROWS - len(labelled_indices))]
    return np.concatenate([labelled_indices, np.sort(sampled)])


def choose_class_measure(config: RunSettings) -> Measure:
    """Return the measure by which local classifiers are ranked.

    It is the run's measure. In a regression, classes are ranges of the target, and accuracy serves.
    """
    measure = MEASURES[config.measure]
    return measure if "classification" in measure.tasks else ACCURACY


@dataclass(frozen=True)
class Predictor:
    """A fitted model that predicts from the active's own features alone.

    Attributes:
        score_block: maps rows (B, F) to scores (B, K), which are probabilities except for ridge
            regressions.
        make_network: builds an equivalent network for storage, whose softmax gives these
            probabilities; None: the model cannot be stored.
    """

    score_block: Callable[[FloatArray], FloatArray] = field(repr=False)
    make_network: Callable[[], nn.Module] | None = field(default=None, repr=False)

    def compute_scores(self, features_BF: FloatArray) -> FloatArray:
        """Return scores of K classes for B rows, (B, K), computed in blocks to limit memory."""
        ends = range(ROWS_PER_BLOCK, len(features_BF), ROWS_PER_BLOCK)
        return np.concatenate([self.score_block(part) for part in np.split(features_BF, ends)])


class Baseline(ABC):
    """A local baseline, which learns without other parties.

    Attributes:
        name: the baseline's key in the table.
        title: the baseline's name for people.
        is_run_network: whether it is the run's own network with the run's settings.
        needs_measure: whether its fit depends on the task's `measure`.
    """

    name: str
    title: str
    is_run_network: ClassVar[bool] = False
    needs_measure: bool = False

    @abstractmethod
    def fit(self, task: BaselineTask) -> Predictor:
        """Fit a model to the labelled rows and, depending on the baseline, to unlabelled ones."""

    def fit_together(self, tasks: Sequence[BaselineTask]) -> Iterable[Predictor]:
        """Return the predictor of each task; it is fitted when the predictor is read.

        The tasks differ only in which rows have a label. A subclass may share work among them, but
        each result equals a fit of this task alone.
        """
        return map(self.fit, tasks)


def check_flat_rows(features_BF: FloatArray, shape: Shape) -> FloatArray:
    """Return the rows unchanged, (B, F), after checking them.

    Raises DataError: they are not finite, or not flattened rows of this shape.
    """
    width = math.prod(shape)
    if features_BF.ndim != 2 or features_BF.shape[1] != width or not len(features_BF):
        raise DataError(
            f"local models: rows of shape {shape} are {width} numbers each, got features of shape "
            f"{features_BF.shape}"
        )
    if not np.isfinite(features_BF).all():
        bad_row_count = int((~np.isfinite(features_BF)).any(axis=1).sum())
        raise DataError(
            f"local models: {bad_row_count} rows have features that are NaN or infinite; mend or "
            "leave them out"
        )
    return features_BF


def split_folds(labels_n: IntArray, max_folds: int, seed: int) -> list[IntArray]:
    """Return disjoint folds of the labelled rows, as indices into `labels_n`.

    Each class is spread over the folds as evenly as possible. The only label of a class is never
    held out, so that every class stays known.

    There are at most `max_folds` folds, and no more than the rarest other class has labels, so that
    the remaining labels have about the same class shares. (With two labels a class and five folds,
    the held-out class would be the rarest in training, and ridge regression was right about none of
    them.) From `ENOUGH_LABELS` labels on, only the first fold is returned, to save time. The list
    is empty if every class has one label.
    """
    generator = np.random.default_rng(derive_seed(seed, "solo", "folds"))
    rows_by_class = [np.flatnonzero(labels_n == label) for label in np.unique(labels_n)]
    shuffled_by_class = [
        generator.permutation(shuffled_rows)
        for shuffled_rows in rows_by_class
        if len(shuffled_rows) > 1
    ]
    if not shuffled_by_class:
        return []
    shuffled_rows = np.concatenate(shuffled_by_class)
    if len(labels_n) >= ENOUGH_LABELS:
        return [np.sort(shuffled_rows[::max_folds])]
    max_folds = min(max_folds, *map(len, shuffled_by_class))
    return [np.sort(shuffled_rows[fold::max_folds]) for fold in range(max_folds)]


FitStore: TypeAlias = Callable[[str, Callable[[], bytes]], bytes]
"""Function of a fit's name and of a function that computes the fit as bytes. It returns the bytes
stored under this name; the first call computes them."""

_STORE: ContextVar[FitStore | None] = ContextVar("store of fits", default=None)
"""The store in use; None: fits are not stored."""
_PREDICTORS: ContextVar[dict[str, Predictor] | None] = ContextVar("predictors", default=None)
"""Predictors that `cache_fits` shares, by name of the fit; None outside its block."""


@contextmanager
def use_fit_store(store: FitStore) -> Iterator[None]:
    """Store and reuse fits in this store while the block runs."""
    token = _STORE.set(store)
    try:
        yield
    finally:
        _STORE.reset(token)


@contextmanager
def cache_fits() -> Iterator[None]:
    """Reuse equal fits while the block runs; they are stored in memory unless a store is in use.

    It pays where one task is fitted repeatedly, with all labels or some of them.
    """
    content_by_name: dict[str, bytes] = {}

    def make_once(name: str, make_content: Callable[[], bytes]) -> bytes:
        """Return the bytes stored under this name, which are made first if there are none."""
        if name not in content_by_name:
            content_by_name[name] = make_content()
        return content_by_name[name]

    # A block inside another one shares its cache.
    token = _PREDICTORS.set({} if _PREDICTORS.get() is None else _PREDICTORS.get())
    try:
        with use_fit_store(_STORE.get() or make_once):
            yield
    finally:
        _PREDICTORS.reset(token)


def name_fit(baseline: Baseline, task: BaselineTask) -> str:
    """Return the part of a stored fit's name that names the baseline.

    A baseline that depends on the task's measure gets the measure's name, too.
    """
    if not baseline.needs_measure or task.measure.name == ACCURACY.name:
        return baseline.name
    return f"{baseline.name}-by-{task.measure.name}"


def fit_once(baseline: Baseline, task: BaselineTask) -> Predictor:
    """Return the baseline fitted to this task.

    Within `cache_fits`, equal calls return the same object.
    """
    predictor_by_name = _PREDICTORS.get()
    if predictor_by_name is None:
        return baseline.fit(task)
    fit_name = f"{name_fit(baseline, task)}-{_hash_run_settings(task, baseline.is_run_network)}"
    fit_name += f"-{_digest_task(task, has_labels=True)}"
    if fit_name not in predictor_by_name:
        predictor_by_name[fit_name] = baseline.fit(task)
    return predictor_by_name[fit_name]


def fit_network_once(
    name: str,
    task: BaselineTask,
    make_untrained: Callable[[], nn.Module],
    fit: Callable[[Draws], nn.Module],
    *,
    needs_labels: bool = True,
) -> nn.Module:
    """Return the network that `fit` trains, in evaluation mode; an equal fit is loaded if stored.

    Args:
        name: name of the fit in the store.
        task: the task, on whose rows and seed the fit depends; no settings of the run enter it.
        make_untrained: makes an untrained network of the same architecture, into which a stored one
            is loaded.
        fit: trains and returns the network, with the random numbers that it is given.
        needs_labels: whether the fit also depends on labels and classes.
    """
    draws = seed_draws(task.seed, "solo", name)
    store = _STORE.get()
    if store is None:
        return fit(draws).eval()
    stored_weights = store(
        f"{name}-{_digest_task(task, needs_labels)}", lambda: save(fit(draws).state_dict())
    )
    # On the meta device no weights are drawn, since the stored ones replace them.
    with torch.device("meta"):
        network = make_untrained()
    network.load_state_dict(load(stored_weights), assign=True)
    return network.eval()


def score_once(
    name: str,
    task: BaselineTask,
    compute_scores: Callable[[], FloatArray],
    *,
    needs_labels: bool = True,
    is_run_network: bool = False,
) -> FloatArray:
    """Return the scores that `compute_scores` computes; equal ones are loaded if they are stored.

    Args:
        name: name of the scores in the store.
        task: the task, on whose rows and seed the scores depend.
        compute_scores: computes the scores.
        needs_labels: whether the scores also depend on the labels.
        is_run_network: whether the scores also depend on the settings of the run's own network.
    """
    store = _STORE.get()
    if store is None:
        return compute_scores()

    def make_content() -> bytes:
        """Compute the scores, and encode them for the store."""
        return save({"scores": torch.from_numpy(compute_scores())})

    key = f"{name}-{_hash_run_settings(task, is_run_network)}-{_digest_task(task, needs_labels)}"
    return np.asarray(load(store(key, make_content))["scores"].numpy())


def _hash_run_settings(task: BaselineTask, is_run_network: bool) -> str:
    """Return a digest of the settings of the run's own network, for names of stored fits.

    `is_run_network`: whether the fit depends on them; False: the digest is that of an empty text.
    """
    settings = task.model.model_dump_json() + task.train.model_dump_json() if is_run_network else ""
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def _digest_task(task: BaselineTask, has_labels: bool) -> str:
    """Return the SHA-256 (hex) of a task's rows and seed, for names of stored fits.

    `has_labels`: whether labels and number of classes enter it, too.
    """
    arrays = (task.features, task.labelled_indices, task.labels) if has_labels else (task.features,)
    properties = (task.features.shape, task.seed, task.classes if has_labels else None)
    digest = hashlib.sha256(repr(properties).encode())
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
