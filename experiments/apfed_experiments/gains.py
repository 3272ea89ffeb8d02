"""Gains of each method over the best local model, paired by seed.

`secure-apfed study gains` runs what is missing. A case (a row of the table) names method, data,
labelled rows and epsilon. The best local model of a case is chosen by held-out labels of the
active, never by test rows. Two more gains stand beside the gain over it: over the local model that
is best on the test rows (an oracle, not available in practice), and over the ablation without help:
the student trained from its prior, or APFed's own network and training at lambda 0.
"""

import fnmatch
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from apfed_experiments.baselines import round_influences, train_without_votes
from apfed_experiments.columns import (
    EPSILON,
    P_HOLM,
    Column,
    Table,
    add_gain_p_values,
    make_formatter,
)
from apfed_experiments.drawing import COLOURS, OTHER_COLOUR, Picture, draw_intervals, open_figure
from apfed_experiments.own_tables import load_splits
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.shown import LABELS_AFTER, NETWORK
from apfed_experiments.study import (
    MASKED_SUM,
    VOTE_STUDENT,
    Point,
    StudyMetrics,
    TrialOutcome,
    describe_missing_data,
    load_seed_tables,
    measure_outcome,
    run_points,
    select_table_rows,
    shuffle_passives_rows,
)
from apfed_experiments.summary import Gain, Row, Summary, select_accuracies
from secure_apfed.base.seeds import derive_seed
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import ConfigError
from secure_apfed.measures.table import MEASURES
from secure_apfed.runs.outcome import Privacy

READING = (
    "In hundredths of the measure, such as points of accuracy. Gain: over the best local model "
    "on the same seeds; mean and 95 % interval over the re-splits of one table, with the "
    "covariance by the people who test several seeds (of test rows that a set brings along: "
    "Student's). p: adjusted for the number of "
    "cases (Holm). The baseline is chosen by cross-validation over the active's labelled rows, so "
    "test rows only measure. Oracle: the local model that is best on the test rows. Ablation: the "
    "student of votes taught by its prior only, or APFed's own network and training at lambda 0, "
    "with its score. Epsilon: of one person's vote "
    "at one passive, with the labeller held fixed, at delta 1e-5 (randomised answers: 0). "
    "known-K: each passive knows K % of the active's people, drawn for itself."
)
SEED_COUNT = 10
QUICK_SEED_COUNT = 3
_EPSILONS = (0.25, 1.0, 2.0, 4.0, 8.0)
_DEFAULT_VOTES = "votes"
_NO_HELP = "no-help"
_LAMBDA_0 = "lambda-0"
_LAMBDA_0_CLIPPED = "lambda-0-bounded"
_RANDOMISED_VOTES = "votes-randomised"
_ALWAYS_USED_VARIANT = {
    _DEFAULT_VOTES: "votes-always",
    _RANDOMISED_VOTES: "votes-randomised-always",
}
"""By vote method: the same with help enabled whatever validation says."""
_VALIDATED_VARIANT = {_DEFAULT_VOTES: "votes-judged", _RANDOMISED_VOTES: "votes-randomised-judged"}
"""By vote method: help only where validation enables it, else the best local model."""
_VALIDATED_AND_ALWAYS = tuple(
    (_VALIDATED_VARIANT[method], _ALWAYS_USED_VARIANT[method]) for method in _VALIDATED_VARIANT
)
"""Pairs of methods that differ only in validation, for the count of its decisions."""
QUICK_CASES = ("votes/digits/n50", "votes-randomised/digits/n50/eps4", "votes/wine/n9")


@dataclass(frozen=True, kw_only=True)
class _DataSet:
    """A data set, and the settings of the runs on it.

    Attributes:
        data_settings: settings under `data_settings`.
        run_settings: top-level settings of all its runs.
        vote_settings: settings under `method`, where passives vote.
        network_settings: settings `model` and `train` of the methods that train a network, APFed
            and TVFL.
        projection_size: number of values of a row that are sent where APFed's exchange uses no
            label.
        known_share: the share of the active's training people that each passive knows, sampled
            independently; None: each knows all.
    """

    data_settings: Mapping[str, Any]
    run_settings: Mapping[str, Any] = field(default_factory=dict)
    vote_settings: Mapping[str, Any] = field(default_factory=dict)
    network_settings: Mapping[str, Any] = field(default_factory=lambda: NETWORK)
    projection_size: int = 16
    known_share: float | None = None


_DIABETES = _DataSet(
    data_settings={"dataset": "diabetes"},
    run_settings={"task": "regression"},
    vote_settings={"prior": "labeller", "labeller": "ridge"},
    network_settings={
        "model": {"hidden": [32], "representation": 16, "dropout": 0.0},
        "train": {
            "epochs": 30,
            "batch_size": 32,
            "learning_rate": 0.01,
            "loss": "huber",
            "evaluate_every": 30,
        },
    },
)
_CREDIT_CARD = _DataSet(
    data_settings={"dataset": "credit_card"},
    run_settings={"measure": "auc"},
    network_settings={
        "model": {"hidden": [64], "representation": 32, "projection": 64, "dropout": 0.0},
        "train": {"epochs": 10, "batch_size": 128, "learning_rate": 0.02, "evaluate_every": 10},
    },
)
_DIGITS = {"dataset": "digits", "views": 4}
_BREAST_CANCER_ERRORS = {"dataset": "breast_cancer", "active_view": 2}
_PAIRWISE_ALIGNMENT: Mapping[str, Any] = {
    "alignment": {"protocol": "circuit", "mode": "pairwise"},
    "secure_sum": {"scheme": "plain", "allow_single_passive": True},
}
_PARTLY_KNOWN_SETS = {
    f"{name}-known-{known}": _DataSet(
        data_settings=data, run_settings=_PAIRWISE_ALIGNMENT, known_share=known / 100
    )
    for name, data in (
        ("digits", {**_DIGITS, "limit": 800}),
        ("breast-cancer-errors", _BREAST_CANCER_ERRORS),
    )
    for known in (20, 50, 80)
}
_DATA_SETS: Mapping[str, _DataSet] = {
    "digits": _DataSet(data_settings=_DIGITS),
    "breast-cancer-errors": _DataSet(data_settings=_BREAST_CANCER_ERRORS),
    "wine": _DataSet(data_settings={"dataset": "wine"}),
    # The same with half as many values sent of a row as the narrowest passive has columns.
    "digits-narrow": _DataSet(data_settings=_DIGITS, projection_size=7),
    "breast-cancer-errors-narrow": _DataSet(data_settings=_BREAST_CANCER_ERRORS, projection_size=4),
    "wine-narrow": _DataSet(data_settings={"dataset": "wine"}, projection_size=2),
    **{
        f"handwritten-{name}": _DataSet(
            data_settings={"dataset": "handwritten", "active_view": view}
        )
        for name, view in (("fou", 1), ("kar", 3), ("zer", 5))
    },
    "handwritten-mor": _DataSet(data_settings={"dataset": "handwritten_six", "active_view": 6}),
    "mnist-3-1": _DataSet(data_settings={"dataset": "mnist", "views": 3, "limit": 3000}),
    "fashion-mnist-3-1": _DataSet(
        data_settings={"dataset": "fashion_mnist", "views": 3, "limit": 3000}
    ),
    "credit-card": _CREDIT_CARD,
    "diabetes": _DIABETES,
    **_PARTLY_KNOWN_SETS,
}
_JOINT_TRAINING = {"epochs": 60, "batch_size": 128, "learning_rate": 0.1, "evaluate_every": 60}
_NETWORK_METHODS = ("apfed_c", "apfed_r", "tvfl")
_LABEL_GUARDS = {"apfed_r-frozen": "frozen_gaussian", "apfed_r-fresh": "gaussian"}
"""Mechanism of the guard (clip and noise of representations), by name of APFed-R whose exchange
uses labels, under local differential privacy."""
_LABELS_AFTER: Mapping[str, str] = {"apfed_r-after": "apfed_r", "apfed_c-after": "apfed_c"}
"""APFed whose exchange uses no label, by its method; local models learn the labels afterwards."""
_LABELS_AFTER_SHUFFLED: Mapping[str, str] = {f"{name}-mixed-rows": name for name in _LABELS_AFTER}
"""Their ablation: the passives' rows are shuffled, so that they carry no information."""
_LABELS_AFTER_NOISE = "apfed_r-after-noise"
"""APFed-R without labels in its exchange, with epsilon 1 for representations and noise in the
secure sum; the case's epsilon bounds what the sums reveal of a passive's row."""
_LABELS_AFTER_NOISE_SHUFFLED = f"{_LABELS_AFTER_NOISE}-mixed-rows"
_ONE_EPOCH: Mapping[str, Any] = {
    **LABELS_AFTER,
    "train": {**LABELS_AFTER["train"], "epochs": 1, "evaluate_every": 1},
}
"""Settings of `_LABELS_AFTER_NOISE`: one epoch, so each row is released once, with least noise."""
_MECHANISM_BY_METHOD: Mapping[str, str] = {
    **_LABEL_GUARDS,
    **dict.fromkeys((*_LABELS_AFTER, *_LABELS_AFTER_SHUFFLED), "frozen_gaussian"),
}
"""Mechanism of the guard, by method whose epsilon bounds the guard's releases."""
_CODE = "apfed_code"
_CODE_SHUFFLED = "mixed-rows"
_TEACHER_SUM = "joint_teacher_sum"
_CODE_64 = f"{_CODE}-64"
_CODE_64_SHUFFLED = f"{_CODE_SHUFFLED}-64"
_TUNING_SETS = ("digits", "handwritten-zer", "handwritten-fou")
_LABELLED_BY_SET: Mapping[str, int] = {
    "digits": 50,
    **{f"handwritten-{view}": 50 for view in ("zer", "fou", "mor", "kar")},
    "breast-cancer-errors": 20,
    "wine": 9,
}
"""Number of labelled rows, by data set on which the use of votes was tuned."""
_ABLATION_BY_METHOD = {
    _CODE: _CODE_SHUFFLED,
    _CODE_64: _CODE_64_SHUFFLED,
    "apfed_c": _LAMBDA_0,
    "apfed_r": _LAMBDA_0,
    **dict.fromkeys(_LABEL_GUARDS, _LAMBDA_0_CLIPPED),
    **{name: mixed for mixed, name in _LABELS_AFTER_SHUFFLED.items()},
    _LABELS_AFTER_NOISE: _LABELS_AFTER_NOISE_SHUFFLED,
}
"""Control of each method, the same run without help; of other methods it is `_NO_HELP`."""
_CODE_MODEL = {"network": "cross_view", "random_features": 1000}
_CODE_SIZES = (4, 16, 64)
"""Sizes of a person's code that are tried whatever passives allow; `_CODE` and `_CODE_SHUFFLED`
take what they allow."""
_ALLOW_READING_ALL: Mapping[str, Any] = {"default": {"allow_reading_all": True}}
_LOGISTIC_LABELLER = {"labeller": "logistic"}
"""Settings of a labeller (a passive's semi-supervised rule) under which a person without a label
changes no vote but its own."""
_VOTE_SETTINGS_BY_METHOD: Mapping[str, dict[str, Any]] = {
    "votes": {"name": "votes"},
    _RANDOMISED_VOTES: {"name": "votes_randomised"},
    "votes-encrypted": {"name": "votes_encrypted"},
    "votes-randomised-logistic": {"name": "votes_randomised", **_LOGISTIC_LABELLER},
    _ALWAYS_USED_VARIANT[_DEFAULT_VOTES]: {"name": "votes", "help": "always"},
    _ALWAYS_USED_VARIANT[_RANDOMISED_VOTES]: {"name": "votes_randomised", "help": "always"},
    _VALIDATED_VARIANT[_DEFAULT_VOTES]: {"name": "votes", "help": "judged"},
    _VALIDATED_VARIANT[_RANDOMISED_VOTES]: {"name": "votes_randomised", "help": "judged"},
    _NO_HELP: {"name": "votes"},
}
_SETTINGS_BY_METHOD: Mapping[str, dict[str, Any]] = {
    **{
        name: {"method": method, **VOTE_STUDENT}
        for name, method in _VOTE_SETTINGS_BY_METHOD.items()
    },
    _TEACHER_SUM: {
        "method": {"name": _TEACHER_SUM, "labels": "spreading"},
        **VOTE_STUDENT,
        "train": _JOINT_TRAINING,
    },
    **{
        f"{name}{suffix}": {
            "method": {"name": name, **classified},
            "model": {"network": network, "hidden": [256], "representation": size},
        }
        for name, size, as_published in (("apc_vfl", 256, "selu"), ("vfedtrans", 16, "enriched"))
        for suffix, classified, network in (
            ("", {}, as_published),
            ("-strongest", {"classifier": "strongest"}, "enriched"),
        )
    },
    **{name: {"method": {"name": name}} for name in _NETWORK_METHODS},
    **{name: {"method": {"name": "apfed_r"}} for name in _LABEL_GUARDS},
    **{name: {"method": {"name": method}} for name, method in _LABELS_AFTER.items()},
    **{
        name: {"method": {"name": _LABELS_AFTER[of]}} for name, of in _LABELS_AFTER_SHUFFLED.items()
    },
    **{
        name: {"method": {"name": "apfed_r"}}
        for name in (_LABELS_AFTER_NOISE, _LABELS_AFTER_NOISE_SHUFFLED)
    },
    **{name: {"method": {"name": "apfed_c"}} for name in (_LAMBDA_0, _LAMBDA_0_CLIPPED)},
    **{
        name: {"method": {"name": _CODE}, "model": _CODE_MODEL, "train": {"epochs": 1}}
        for name in (_CODE, _CODE_SHUFFLED)
    },
    **{
        name: {
            "method": {"name": _CODE},
            "model": {**_CODE_MODEL, "representation": numbers},
            "train": {"epochs": 1},
            "passives": _ALLOW_READING_ALL,
        }
        for numbers in _CODE_SIZES
        for name in (f"{_CODE}-{numbers}", f"{_CODE_SHUFFLED}-{numbers}")
    },
}


def _load_case_tables(case: "GainCase", seed: int) -> VerticalData:
    """Return the tables of a case (a row of the study's table) for one seed.

    Passives know fewer people where the data set says so. In an ablation their rows are shuffled,
    so that they carry no information.
    """
    data = load_seed_tables(case.config.data, seed)
    known_share = case.data_set.known_share
    if known_share is not None:
        data = sample_people(data, known_share, seed=seed)
    return shuffle_passives_rows(data, seed=seed) if case.is_shuffled else data


def sample_people(data: VerticalData, known_share: float, *, seed: int) -> VerticalData:
    """Return the data where each passive knows only some of the active's training people.

    `known_share`: the share of them that each passive knows, sampled independently, 0 to 1. Test
    people all stay.
    """
    train_people = [data.active.ids[row] for row in data.train_rows.tolist()]
    known_count = round(known_share * len(train_people))
    passives = []
    for table in data.passives:
        # Each passive has its own generator, so that the passives' choices are independent.
        rng = np.random.default_rng(derive_seed(seed, "overlap", table.name))
        unknown_people = set(rng.permutation(train_people)[known_count:].tolist())
        rows = [row for row, person in enumerate(table.ids) if person not in unknown_people]
        passives.append(select_table_rows(table, rows))
    return replace(data, passives=tuple(passives))


def _measure_no_help(config: Config, data: VerticalData) -> TrialOutcome:
    """Measure the ablation of votes: the student (the active's model) trained without any vote.

    Its targets are the active's own predictions (its prior). No message is sent.
    """
    began = time.monotonic()
    predictions = train_without_votes(config, data).score_rows(data.test_rows)
    measure = MEASURES[config.measure]
    score_by_measure = {measure.name: measure.compute_value(predictions)}
    return TrialOutcome(
        influence=round_influences(config.data, predictions, measure),
        method=config.method.name,
        accuracy={_NO_HELP: score_by_measure[measure.name]},
        measure=measure.name,
        measures={_NO_HELP: score_by_measure},
        wire_bytes=0,
        seconds=time.monotonic() - began,
        # Nothing is sent; the model has no guarantee.
        privacy=Privacy(epsilon_x=0.0, epsilon_y=0.0, epsilon_model=math.inf),
    )


@dataclass(frozen=True, kw_only=True)
class GainCase:
    """A case of the study, which is one row of its table.

    Attributes:
        method: key of `_SETTINGS_BY_METHOD`.
        data_name: key of `_DATA_SETS`, or the name of a table of the user's own.
        labelled_count: number of labelled rows; None: all.
        epsilon: privacy of a person's vote or projection at one passive; None: no noise.
        own_data_set: data set that `data_name` names where it is the user's own; None: `_DATA_SETS`
            has it.
    """

    method: str
    data_name: str
    labelled_count: int | None
    epsilon: float | None = None
    own_data_set: _DataSet | None = None

    @property
    def data_set(self) -> _DataSet:
        """Return the data set that `data_name` names."""
        return self.own_data_set or _DATA_SETS[self.data_name]

    @property
    def name(self) -> str:
        """Return the case's name, such as "votes-randomised/digits/n50/eps4"."""
        rows = "all" if self.labelled_count is None else f"n{self.labelled_count}"
        noise = [] if self.epsilon is None else [f"eps{self.epsilon:g}"]
        return "/".join([self.method, self.data_name, rows, *noise])

    @property
    def baseline_config(self) -> Config:
        """Return the settings that measure the local models.

        They are the same for all methods on a data set with equally many labelled rows, so that the
        local models are measured once.
        """
        return replace(self, method=_DEFAULT_VOTES, epsilon=None).config

    @property
    def ablation(self) -> "GainCase":
        """Return the ablation: the case of the same run without the passives' help.

        It has the same noise where passives still send messages (of shuffled rows), else none.
        """
        method = _ABLATION_BY_METHOD.get(self.method, _NO_HELP)
        has_noise = method in (
            _CODE_SHUFFLED,
            _LABELS_AFTER_NOISE_SHUFFLED,
            *_LABELS_AFTER_SHUFFLED,
        )
        return replace(self, method=method, epsilon=self.epsilon if has_noise else None)

    @property
    def is_shuffled(self) -> bool:
        """Return whether the passives' rows are shuffled, so that they carry no information."""
        return self.method in (
            _CODE_SHUFFLED,
            _CODE_64_SHUFFLED,
            _LABELS_AFTER_NOISE_SHUFFLED,
            *_LABELS_AFTER_SHUFFLED,
        )

    def make_point(self, folder: Path) -> Point:
        """Return this case as a point of a study: settings to run once for each seed.

        Runs store their metrics only, in the study's folder `folder`, and have no run folders. The
        ablation of votes trains the student (the active's model) alone; every other case runs the
        whole method.
        """
        return Point(
            config=self.config,
            folder=folder,
            has_metrics_only=True,
            baseline_config=self.baseline_config,
            make_tables=partial(_load_case_tables, self),
            measure=_measure_no_help if self.method == _NO_HELP else measure_outcome,
        )

    @property
    def _network_settings(self) -> Mapping[str, Any]:
        """Return the settings that describe and train the parties' networks, by key of a run file.

        Empty for methods that train no network in the exchange, such as votes and public codes.
        """
        if self.method in (*_LABELS_AFTER, *_LABELS_AFTER_SHUFFLED):
            model = {**LABELS_AFTER["model"], "projection": self.data_set.projection_size}
            return {**LABELS_AFTER, "model": model}
        if self._has_sum_noise:
            return _ONE_EPOCH
        if self.method in (*_NETWORK_METHODS, *_LABEL_GUARDS, _LAMBDA_0, _LAMBDA_0_CLIPPED):
            return self.data_set.network_settings
        return {}

    @property
    def _has_sum_noise(self) -> bool:
        """Return whether this is APFed with noise in the secure sum, without labels in its
        exchange; or its ablation.
        """
        return self.method in (_LABELS_AFTER_NOISE, _LABELS_AFTER_NOISE_SHUFFLED)

    @property
    def config(self) -> Config:
        """Return the settings of this case's runs; the study sets their seeds."""
        shared_settings: dict[str, Any] = {  # of all cases
            "name": self.name.replace("/", "-"),
            **MASKED_SUM,
            "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
            "transcript": {"keep": "none"},
        }
        data_set = self.data_set
        settings = {**shared_settings, **_SETTINGS_BY_METHOD[self.method]}
        settings |= {
            **data_set.run_settings,
            "data": {**data_set.data_settings, "labelled": self.labelled_count},
        }
        if self.method in _VOTE_SETTINGS_BY_METHOD:
            settings["method"] = {**settings["method"], **data_set.vote_settings}
        settings |= self._network_settings
        if self.method in (_LAMBDA_0, _LAMBDA_0_CLIPPED):
            settings["passives"] = {"default": {"weight": 0.0}}
        if self.method in (*_LABEL_GUARDS, _LAMBDA_0_CLIPPED):
            # Without this limit decoders diverge that learn from representations with fresh noise.
            settings["train"] = {**settings["train"], "max_gradient_norm": 1.0}
        if self.method == _TEACHER_SUM:
            # Representations of linear networks have norms above 1, the usual clip.
            settings["secure_sum"] = {**settings["secure_sum"], "clip": 8.0}
        if self._has_sum_noise:
            guard = shared_settings["guard"]
            settings["guard"] = {**guard, "mechanism": "frozen_gaussian", "epsilon": 1.0}
        if self.epsilon is not None:
            section, epsilon_settings = self._find_epsilon_settings(self.epsilon)
            settings[section] = {**settings[section], **epsilon_settings}
        return Config.model_validate(settings)

    def _find_epsilon_settings(self, epsilon: float) -> tuple[str, Mapping[str, Any]]:
        """Return where this method's epsilon stands in a run file: the section, and its keys there.

        Noise is added to the secure sum ("secure_sum"), to representations ("guard"), or to votes
        ("method").
        """
        if self._has_sum_noise or self.method in (_CODE, _CODE_SHUFFLED):
            return "secure_sum", {"noise": {"epsilon": epsilon}}
        if self.method in _MECHANISM_BY_METHOD:
            mechanism = _MECHANISM_BY_METHOD[self.method]
            return "guard", {"mechanism": mechanism, "epsilon": epsilon}
        return "method", {"epsilon": epsilon}


_CaseKeys: TypeAlias = Iterator[tuple[str, str, int | None, float | None]]
"""Cases as (method, data set, labelled rows or None for all, epsilon or None for no noise)."""
_TWO_SETS = ("digits", "handwritten-zer")
_NO_EPSILON = (None,)
"""The one choice of an epsilon where no noise is added."""


def _list_vote_cases() -> _CaseKeys:
    """Yield the cases of votes (passives send class scores).

    Their help is used as by default, always, or only where validation enables it.
    """
    yield from product(("votes",), _TWO_SETS, (20, 50, 200, None), _NO_EPSILON)
    names = (_ALWAYS_USED_VARIANT[_DEFAULT_VOTES], _VALIDATED_VARIANT[_DEFAULT_VOTES])
    yield from product(names, _TWO_SETS, (20, 50, 200), _NO_EPSILON)
    for name, (data, labelled) in product(names, _LABELLED_BY_SET.items()):
        if data not in _TWO_SETS:
            yield name, data, labelled, None
    randomised_methods = (
        _RANDOMISED_VOTES,
        _ALWAYS_USED_VARIANT[_RANDOMISED_VOTES],
        _VALIDATED_VARIANT[_RANDOMISED_VOTES],
    )
    for name, (data, labelled) in product(randomised_methods, _LABELLED_BY_SET.items()):
        yield name, data, labelled, 4.0
    views = ("handwritten-mor", "handwritten-fou", "handwritten-kar")
    yield from product(("votes",), views, (50,), _NO_EPSILON)
    yield "votes", "handwritten-mor", None, None
    yield from product(("votes",), ("mnist-3-1", "fashion-mnist-3-1"), (50,), _NO_EPSILON)
    yield "votes", "breast-cancer-errors", 20, None
    yield "votes", "wine", 9, None
    yield from product((_RANDOMISED_VOTES,), ("handwritten-zer", "digits"), (20,), _EPSILONS)
    yield "votes-encrypted", "digits", 50, None
    yield "votes-randomised-logistic", "digits", 50, 4.0


def _list_joint_cases() -> _CaseKeys:
    """Yield the cases of methods whose active learns from what all parties computed jointly: a
    teacher network, or a joint representation.
    """
    yield from product((_TEACHER_SUM, "apc_vfl"), _TWO_SETS, (20, 50), _NO_EPSILON)
    for data, method, suffix in product(
        (*_TWO_SETS, "handwritten-fou"), ("apc_vfl", "vfedtrans"), ("", "-strongest")
    ):
        yield f"{method}{suffix}", data, 50, None


def _list_apfed_cases() -> _CaseKeys:
    """Yield the cases of APFed whose exchange uses labels, then those whose exchange does not."""
    yield from product(("apfed_c", "apfed_r"), ("handwritten-zer",), (50, None), _NO_EPSILON)
    yield "apfed_r", "handwritten-fou", 50, None
    guarded_views = ("handwritten-fou", "handwritten-zer")
    yield from product(_LABEL_GUARDS, guarded_views, (50,), (0.1, 1.0, 8.0))
    wide_sets = (*_TUNING_SETS, "handwritten-mor", "handwritten-kar")
    for method, labelled, data in product(_LABELS_AFTER, (20, 50, 200), wide_sets):
        yield method, data, labelled, 1.0
    yield from product(_LABELS_AFTER, ("breast-cancer-errors",), (20, 50), (1.0,))
    yield from product(_LABELS_AFTER, ("wine",), (9,), (1.0,))
    narrow_sets = (("digits", 50), ("breast-cancer-errors", 50), ("wine", 9))
    for method, (data, labelled) in product(_LABELS_AFTER, narrow_sets):
        yield method, f"{data}-narrow", labelled, 1.0
    yield from product(_LABELS_AFTER, _TUNING_SETS, (50,), (0.1, 8.0, None))
    yield from product((_LABELS_AFTER_NOISE,), _TUNING_SETS, (50,), _NO_EPSILON)
    yield from product((_LABELS_AFTER_NOISE,), _TUNING_SETS, (50,), (4.0, 8.0, 16.0, 32.0))


def _list_code_cases() -> _CaseKeys:
    """Yield the cases of public codes (passives send noised projections that replace
    representations).
    """
    three_sets = (*_TWO_SETS, "handwritten-fou")
    yield from product((_CODE,), _TWO_SETS, (20, 50, 200), _NO_EPSILON)
    views = ("handwritten-fou", "handwritten-kar", "handwritten-mor")
    yield from product((_CODE,), views, (50,), _NO_EPSILON)
    sized_codes = [f"{_CODE}-{size}" for size in _CODE_SIZES]
    yield from product(sized_codes, three_sets, (50,), _NO_EPSILON)
    yield from product((_CODE,), ("mnist-3-1", "fashion-mnist-3-1"), (50,), _NO_EPSILON)
    yield _CODE, "breast-cancer-errors", 20, None
    yield _CODE, "wine", 9, None
    noised_sets = (*three_sets, "handwritten-kar")
    yield from product((_CODE,), noised_sets, (50,), (1.0, 2.0, 4.0, 8.0))


def _list_other_task_cases() -> _CaseKeys:
    """Yield the cases judged by AUC, those of regression, and those of passives that know few
    people.
    """
    credit_methods = ("votes", "apfed_r", "apfed_c", "tvfl")
    yield from product(credit_methods, ("credit-card",), (200, None), _NO_EPSILON)
    yield from product(("votes",), ("credit-card",), (200, None), (4.0,))
    yield from product(("votes", "apfed_r"), ("diabetes",), (60, None), _NO_EPSILON)
    for name in _PARTLY_KNOWN_SETS:
        yield "votes", name, 50 if "digits" in name else 20, None


def _make_cases() -> dict[str, GainCase]:
    """Return all cases of the study by name."""
    keys_by_family = (
        _list_vote_cases(),
        _list_joint_cases(),
        _list_apfed_cases(),
        _list_code_cases(),
        _list_other_task_cases(),
    )
    cases = [
        GainCase(method=method, data_name=data, labelled_count=labelled, epsilon=epsilon)
        for method, data, labelled, epsilon in chain.from_iterable(keys_by_family)
    ]
    return {case.name: case for case in cases}


CASES: Mapping[str, GainCase] = _make_cases()


_OWN_METHODS_AND_EPSILONS: tuple[tuple[str, float | None], ...] = (
    ("votes", None),
    ("votes-encrypted", None),
    (_ALWAYS_USED_VARIANT[_DEFAULT_VOTES], None),
    (_CODE, None),
    (_VALIDATED_VARIANT[_DEFAULT_VOTES], None),
    *product(
        (
            _RANDOMISED_VOTES,
            _ALWAYS_USED_VARIANT[_RANDOMISED_VOTES],
            _VALIDATED_VARIANT[_RANDOMISED_VOTES],
            "votes",
        ),
        (1.0, 2.0, 4.0, 8.0),
    ),
    *((method, 1.0) for method in _LABELS_AFTER),
)
"""Methods on the user's own tables, each with the epsilon of its noise; None: no noise."""
_OWN_LABELLED_COUNTS = (20, 50, 200, None)
"""Numbers of labelled rows of the user's own tables; None: all."""


def list_own_cases(folder: Path) -> Mapping[str, GainCase]:
    """Return the cases on the user's own tables in a folder that holds `splits.yaml`, by name.

    They are votes, public codes, and APFed without labels in its exchange, each with 20, 50, 200
    and all labels.
    """
    cases = [
        GainCase(
            method=method,
            data_name=name,
            labelled_count=labelled,
            epsilon=epsilon,
            own_data_set=_DataSet(
                data_settings=table["data"], run_settings={"measure": table["measure"]}
            ),
        )
        for name, table in load_splits(folder).items()
        for labelled, (method, epsilon) in product(_OWN_LABELLED_COUNTS, _OWN_METHODS_AND_EPSILONS)
    ]
    return {case.name: case for case in cases}


def select_cases(patterns: Sequence[str], cases: Mapping[str, GainCase] = CASES) -> list[GainCase]:
    """Return the cases whose names match at least one of these globs, such as "votes/*".

    Raises ConfigError: a glob matches no case.
    """
    chosen_cases: dict[str, GainCase] = {}
    for pattern in patterns:
        names = fnmatch.filter(cases, pattern)
        if not names:
            raise ConfigError(f"no case is like {pattern!r}; there are {', '.join(cases)}")
        chosen_cases |= {name: cases[name] for name in names}
    return list(chosen_cases.values())


_format_points = make_formatter("+.1f", scale=100)
COLUMNS = (
    Column(name="case", title="case"),
    Column(name="seeds"),
    Column(
        name="solo",
        title="best local model",
        export_scale=100,
        format_value=make_formatter(".1f", scale=100),
        make_note=lambda row: row["baseline"],
    ),
    Column(name="measure", title="measure"),
    Column(
        name="reached",
        title="reached",
        format_value=make_formatter(".1f", scale=100),
        export_scale=100,
        export_keys=("accuracy",),
    ),
    Column(
        name="gain",
        title="gain",
        format_value=_format_points,
        export_scale=100,
        export_keys=("gain", "low", "high"),
    ),
    P_HOLM,
    Column(name="baseline"),
    Column(name="hindsight"),
    Column(
        name="gain_hindsight",
        title="over the oracle",
        format_value=_format_points,
        make_note=lambda row: row["hindsight"],
        export_scale=100,
        export_keys=("gain_hindsight", "low_hindsight", "high_hindsight"),
    ),
    Column(name="control"),
    Column(name="no_help", export_scale=100),
    Column(
        name="gain_no_help",
        title="over the ablation",
        format_value=_format_points,
        export_scale=100,
        make_note=lambda row: f"{100 * row['no_help']:.1f}",
        export_keys=("gain_no_help", "low_no_help", "high_no_help"),
    ),
    Column(
        name="gain_mean",
        title="over the mean of the local models",
        format_value=_format_points,
        export_scale=100,
        make_note=lambda row: "" if row.get("mean") is None else f"{100 * row['mean']:.1f}",
        export_keys=("gain_mean", "low_mean", "high_mean"),
    ),
    Column(name="mean", export_scale=100),
    replace(EPSILON, title="epsilon of a vote"),
    Column(name="help_used", title="help used in"),
    Column(name="wire_bytes"),
    Column(name="missing"),
    Column(name="paid", title="", export_keys=()),
)


def _make_row(
    case: GainCase, seed_count: int, runs: pd.DataFrame, ablation_runs: pd.DataFrame
) -> Row:
    """Return the table's row of one case.

    Gains are over the best local model, over the oracle (the local model that is best on test rows)
    and over the ablation (the same run without help).

    Args:
        case: the case.
        seed_count: number of seeds that were run.
        runs: metrics of the case's runs, with those of the local models on the same seeds.
        ablation_runs: metrics of the runs of the case's ablation.
    """
    summary = Summary.from_rows(runs)
    gain = Gain.from_rows(runs, ablation_runs)
    assert gain is not None  # the study measures baselines
    mean_columns: Row = {}
    if gain.mean_model_score is not None:
        mean_columns = {"mean": gain.mean_model_score, "gain_mean": gain.gain_over_mean_model}
    return mean_columns | {
        "case": case.name,
        "seeds": seed_count,
        "solo": gain.local_score,
        "measure": gain.measure,
        "reached": gain.model_score,
        "gain": gain.gain_over_chosen,
        "epsilon": summary.epsilon_passives,
        "baseline": gain.baseline,
        "hindsight": gain.oracle,
        "gain_hindsight": gain.gain_over_oracle,
        "control": case.ablation.name,
        "no_help": gain.ablation_score,
        "gain_no_help": gain.gain_over_ablation,
        "help_used": _describe_help_use(runs),
        "wire_bytes": summary.wire_bytes,
        "paid": gain.sentence.partition(":")[0],
        "shared": gain.seed_correlation,
        "gain_case": case,
    }


def _describe_help_use(runs: pd.DataFrame) -> str | None:
    """Return in how many runs the model learnt from the passives' votes, such as "7 of 10, averaged
    in 2".

    The second number counts runs whose model was averaged with the local model. None: the method
    has no votes.
    """
    seed_runs = runs.drop_duplicates("seed")
    help_used = seed_runs["help_used"].dropna()
    if not len(help_used):
        return None
    averaged_count = int(seed_runs["help_averaged"].fillna(value=False).sum())
    return f"{int(help_used.sum())} of {len(help_used)}" + (
        f", averaged in {averaged_count}" if averaged_count else ""
    )


def compare_validation(
    validated_runs: pd.DataFrame, always_used_runs: pd.DataFrame
) -> pd.DataFrame:
    """Compare validation's decision with what help would have brought, for each seed.

    Args:
        validated_runs: metrics of runs that enable help by validation, and of their local models.
        always_used_runs: metrics of the same runs with help always enabled.

    Returns:
        A frame by seed: `is_help_used`, whether validation enabled help; `gain`, the gain of
        `always_used_runs` over the best local model on the test rows.
    """
    local_model_rows = validated_runs[validated_runs["target"] == "solo"]
    measure = MEASURES[str(local_model_rows["metric"].iloc[0])]
    sign = 1.0 if measure.higher_is_better else -1.0
    # The best local model of each seed is chosen by its measure on held-out labels.
    held_out = (sign * local_model_rows["baseline"]).fillna(-math.inf)
    best_by_seed = held_out.groupby(local_model_rows["seed"]).idxmax()
    best_rows = local_model_rows.loc[best_by_seed]
    best_local_score = best_rows.set_index("seed")["score"]
    is_help_used = (
        validated_runs.drop_duplicates("seed").set_index("seed")["help_used"].astype(bool)
    )
    return pd.DataFrame(
        {
            "used": is_help_used,
            "gain": sign * (select_accuracies(always_used_runs) - best_local_score),
        }
    )


def count_decisions(decisions: pd.DataFrame) -> Table:
    """Count runs by the decision of validation and by the sign of the gain on the test rows.

    `decisions`: the frame that `compare_validation` returns. A cell is the number of runs and, for
    gains other than 0, their mean in hundredths of the measure.
    """
    rows: list[Row] = []
    for is_used, decision_title in ((True, "used"), (False, "not used")):
        gains = decisions["gain"][decisions["used"] == is_used]
        row: Row = {"help": decision_title}
        for name, sign in (("helps", 1), ("harms", -1), ("changes nothing", 0)):
            gains_of_sign = gains[np.sign(gains) == sign]
            row[name] = (
                f"{len(gains_of_sign)} ({100 * gains_of_sign.mean():+.1f})"
                if sign and len(gains_of_sign)
                else f"{len(gains_of_sign)}"
            )
        rows.append(row)
    columns = [Column(name=name, title=name) for name in rows[0]]
    return Table(
        columns, rows, "Runs by what labelled rows said of help, and test rows in hindsight"
    )


def _group_rows_by_line(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows with a gain and an epsilon by their line of the picture, named as in its
    legend.

    A line is of one method, data set and number of labels; lines with a single row are left out.
    """
    rows_by_line: dict[str, list[Row]] = {}
    for row in rows:
        if "gain" in row and row["gain_case"].epsilon is not None:
            case = row["gain_case"]
            line = f"{case.method}, {case.data}, n {case.labelled}"
            rows_by_line.setdefault(line, []).append(row)
    return {line: line_rows for line, line_rows in rows_by_line.items() if len(line_rows) > 1}


def declare_study(
    folder: Path, cases: Sequence[GainCase], *, seed_count: int
) -> Study[StudyMetrics]:
    """Return the study of these cases; a case whose data are missing gets a row with the reason.

    For cases that are run with and without validation, a second table counts how often validation
    decided well whether to use help.

    `folder`: folder of the stored metrics and the report. `seed_count`: number of seeds.
    """
    missing_reason_by_case = {case.name: describe_missing_data(case.config) for case in cases}
    available_cases = [case for case in cases if not missing_reason_by_case[case.name]]
    all_cases = [*available_cases, *(case.ablation for case in available_cases)]
    point_by_case = {case.name: case.make_point(folder) for case in all_cases}

    def compare(results: StudyMetrics) -> list[Part]:
        """Return the table of gains and, for cases with and without validation, the table of its
        decisions.
        """
        runs_by_case = {name: results.select_rows(point) for name, point in point_by_case.items()}
        rows = [
            _make_missing_row(case, missing_reason_by_case[case.name])
            if missing_reason_by_case[case.name]
            else _make_row(
                case, seed_count, runs_by_case[case.name], runs_by_case[case.ablation.name]
            )
            for case in cases
        ]
        add_gain_p_values([row for row in rows if "gain" in row], seed_count)
        table = Table(COLUMNS, rows, "What help is worth")
        pictures = _draw_gains(folder / "gains.png", rows)
        parts = [Part(name="gains", table=table, pictures=pictures)]
        decisions = [
            compare_validation(runs_by_case[validated.name], runs_by_case[always.name])
            for validated, always in _pair_validated_cases(available_cases)
        ]
        if decisions:
            parts.append(Part(name="validation", table=count_decisions(pd.concat(decisions))))
        return parts

    return Study(
        title="What help is worth",
        reading_guide=READING,
        folder=folder,
        measure=partial(
            run_points,
            list(point_by_case.values()),
            range(seed_count),
            should_measure_baselines=True,
        ),
        compare=compare,
    )


def _make_missing_row(case: GainCase, reason: str) -> Row:
    """Return the row of a case whose data are missing, with the reason in place of values."""
    return {"case": case.name, "seeds": 0, "missing": reason, "paid": reason}


def _pair_validated_cases(cases: Sequence[GainCase]) -> Iterator[tuple[GainCase, GainCase]]:
    """Yield the pairs of cases that differ only in whether validation may disable help.

    The first of a pair validates help, the second always uses it.
    """
    for validated, always in product(cases, repeat=2):
        if (validated.method, always.method) in _VALIDATED_AND_ALWAYS and validated == replace(
            always, method=validated.method
        ):
            yield validated, always


def _draw_gains(path: Path, rows: Sequence[Row]) -> list[Picture]:
    """Draw gain by epsilon, a line for each method, data set and number of labels; write the
    picture.

    Returns no picture where no line has two epsilons.
    """
    rows_by_line = _group_rows_by_line(rows)
    if not rows_by_line:
        return []
    with open_figure(path, (7.5, 4.2)) as figure:
        axes = figure.subplots()
        for colour, (name, line_rows) in zip(COLOURS, rows_by_line.items(), strict=False):
            draw_intervals(
                axes,
                [row["gain_case"].epsilon for row in line_rows],
                [row["gain"] for row in line_rows],
                scale=100,
                marker_and_line="o-",
                color=colour,
                label=name,
            )
        axes.axhline(0, color=OTHER_COLOUR, linestyle=":", linewidth=1.2)
        axes.set(
            xscale="log",
            xlabel="epsilon of a person's vote at one passive, or of a row's releases",
            ylabel="hundredths over the best local model",
        )
        ticks = sorted(
            {row["gain_case"].epsilon for line_rows in rows_by_line.values() for row in line_rows}
        )
        axes.set_xticks(ticks, [f"{epsilon:g}" for epsilon in ticks])
        axes.minorticks_off()
        axes.legend(fontsize=8)
    return [
        Picture(
            path=path,
            title="Gain by epsilon",
            caption="Over the best local model: means with 95 % intervals.",
        )
    ]
