"""What every attack finds: on a planted leak (`pytest -m planted`), where nothing leaked (`null`:
the mean advantage over several recordings lies within a narrow interval of 0), under each method.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import t
from torch import Tensor, nn

from apfed_attacks import ATTACKS
from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.features.isolation import Isolation
from apfed_attacks.headlines import Direction, make_headlines, select_best_by_kind
from apfed_attacks.interface import AttackResult
from apfed_attacks.labels.completion import PROBES
from apfed_attacks.live import stuffing
from apfed_attacks.live.runs import LiveRun, mount_live_attack
from apfed_attacks.live.strategy import ActiveAttack, AnsweringAttack
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.recorded import reveal_truth
from apfed_attacks.run import Trial, run_attacks
from apfed_attacks.view import PlayedAttack, iter_batches
from secure_apfed.base.seeds import seed_draws
from secure_apfed.config import AttackChoice
from secure_apfed.contract import RepresentationBounds
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from secure_apfed.settings.alignment import AlignmentSettings
from tests.attacks import test_attacks_features as on_features
from tests.attacks import test_attacks_people as on_people
from tests.attacks.conftest import Leak, leak_noised_afresh
from tests.attacks.recordings import (
    TWO_TABLES,
    add_contributions,
    ask,
    ballot_of,
    fill_with_drawn_labels,
    fill_with_vectors,
    live_config,
    make_vector_recording,
    normal,
    play,
    replace_opened_sums,
    replace_sums_by_contrasts,
    replace_sums_by_noise,
    replace_sums_by_projections,
    run_attack,
    run_attack_by,
)
from tests.attacks.test_attacks_live import UNPROTECTED, isolation_error
from tests.secure_apfed.small_runs import small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
]

Make = Callable[[Any], Any]


def _make_leak(leak: str | Leak, **how: Any) -> Make:
    return lambda make: make(leak, **how)


def _gradients(gradient: str | Leak, **how: Any) -> Make:
    return _make_leak("nothing", method="tvfl", gradient=gradient, **how)


def _cross_entropy(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    """J^T (p - y) of an untrained head, whose Jacobian differs a little from row to row."""
    error = 1 / 3 - F.one_hot(labels, 3).float()
    mask = (torch.rand(len(labels), 6, generator=draw) > 0.3).float()
    return 1e-3 * mask * (error @ torch.linspace(-1, 1, 18).sin().reshape(3, 6))


def linear_head(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    """(p - y) J of a linear head that has learnt little."""
    logits = 0.1 * torch.randn(len(labels), 3, generator=draw)
    error = logits.softmax(1) - F.one_hot(labels, 3).float()
    return 1e-3 * error @ torch.linspace(-1, 1, 18).sin().reshape(3, 6)


def _lengths(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    direction = torch.randn(len(labels), 6, generator=draw)
    return F.normalize(direction) * 10.0 ** -labels[:, None].float()


def _fill_with(value: float) -> Leak:
    return lambda labels, own, draw, epoch: torch.full((len(labels), 6), float(value))


def _release_features(make: Any) -> Any:
    """An invertible function of the active's features is released."""
    features = reveal_truth(make("nothing")).features["active"]
    mix = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    return _make_leak(lambda *_: torch.tanh(0.2 * features @ mix))(make)


def _through(*layers: Callable[[], nn.Module], released: bool = True) -> Make:
    """passive-1 releases what its encoder makes of its features, or noise."""

    def record_layers(make: Any) -> Any:
        with seed_draws(3, "encoder"):
            encoder = nn.Sequential(*(layer() for layer in layers))

        def leak(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
            with torch.no_grad():
                return encoder(own) if released else torch.randn(len(own), 6, generator=draw)

        return replace(make(leak, method="tvfl"), encoders={"passive-1": encoder})

    return record_layers


WIDE = (lambda: nn.Linear(4, 12), nn.Tanh, lambda: nn.Linear(12, 6))


def _make_requests(method: str) -> Make:
    return lambda make: ask(make("nothing", epochs=0), method)


def _sum_representations(make: Any) -> Recording:
    """Linear representations of all passives are summed."""
    empty = make("nothing", epochs=0)
    tables = [table.features[empty.alignment[table.name]] for table in empty.data.passives]
    return ask(empty, "split_nn_sum", opened=[torch.hstack(tables).double() @ normal(6, 8, seed=0)])


def _forgotten(make: Any) -> Recording:
    recording: Recording = make("labels", epochs=4)
    del recording.transcript._epochs[1]
    return recording


def _a_feature(method: str) -> Make:
    """Votes that are a feature of passive-1: its size, and its sign as the class."""

    def voting(own: Tensor, draw: torch.Generator) -> Tensor:
        return torch.stack([own[:, 1], -own[:, 1], torch.zeros(len(own))], dim=1)

    return lambda make: ballot_of(make("nothing", epochs=0), method=method, voting=voting)


Found = Callable[[Any], Iterable[Mapping[str, float | None]]]
# Adversaries and their victims. passive-2's own features say nothing of the label.
PASSIVES = FIRST, SECOND = (("passive-1", "active"), ("passive-2", "active"))
OF_FIRST = ("active", "passive-1")


def _figures(result: AttackResult) -> dict[str, float | None]:
    assert result.applicable, result.reason
    return {**result.score, "advantage": result.advantage}


def _mount_attack(name: str, make: Make, *by: tuple[str, str], **options: Any) -> Found:
    """Figures of these adversaries, or of all; each knew as much as its options say."""

    def collect_figures(make_recording: Any) -> Iterable[Mapping[str, float | None]]:
        attack = ATTACKS[name].model_validate(options)
        recording = make(make_recording)
        results = [run_attack_by(who, recording, name, whom, **options) for who, whom in by]
        for result in results or run_attack(recording, name, **options):
            known = attack.labels_per_class * result.knowledge["classes"] + attack.shadow_rows
            assert result.counts["known"] == known
            yield _figures(result)

    return collect_figures


def _select_victim(results: Iterable[AttackResult], victim: str = "passive-1") -> Any:
    return [
        _figures(result)
        for result in results
        if (result.adversary, result.victim) == ("active", victim)
    ]


def _linear_decoder(_: Any) -> Any:
    """Ten features for eleven pairs: every way of reading an answer, as shares of variance."""
    config = live_config("apfed_r", model={"hidden": []}, data=TWO_TABLES)
    attack = DecoderExtraction(people=160, shadow_rows=11)
    result = play(attack, config, rules=UNPROTECTED)
    return [{way: result.variants[way]["r2"] for way in ("gram", "affine on answers")}]


def _isolate_part(way: str) -> Found:
    return lambda _: [{"precision": -isolation_error(UNPROTECTED, way=way)}]


def _stuff_ids(role: str, protocol: str) -> Found:
    return lambda _: [_figures(on_people.stuff(role, protocol=protocol)[0])]


def invert_opened_sums(make: Any) -> Any:
    recording = make("nothing")
    opened = replace_opened_sums(
        recording, on_features.compute_opened_sums(recording, ("passive-1",))
    )
    return _select_victim(run_attack(opened, "contrastive_inversion"))


def _open_projections(make: Any) -> Any:
    """Sums that are a projection of the first passive's features, under noise in every step."""
    recording = make("nothing")
    return _select_victim(
        run_attack(replace_sums_by_projections(recording), "gradient_regression", shadow_rows=60)
    )


def _along_what_was_sent(make: Any) -> Any:
    """Sums in which what was sent drowns the projection, as under a linear decoder."""
    recording = replace_sums_by_projections(make("nothing", method="apfed_r"), along=10.0)
    return _select_victim(run_attack(recording, "gradient_projection", shadow_rows=60))


def _open_contrasts(make: Any) -> Any:
    """Sums that lack the part along what was sent, and are shorter where that is longer."""
    recording = replace_sums_by_contrasts(make(_draw_many_lengths))
    return _select_victim(run_attack(recording, "gradient_projection", shadow_rows=60))


def _draw_many_lengths(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    lengths = torch.exp(1.5 * torch.randn(len(labels), 1, generator=draw))
    return lengths * F.normalize(torch.randn(len(labels), 12, generator=draw), dim=1)


def _make_contributions(make: Any) -> Any:
    """Contributions in the clear that are a projection of the first passive's features."""
    recording = add_contributions(make("nothing"), planted=True)
    return [
        _figures(
            run_attack_by(
                "aggregator", recording, "contribution_regression", "passive-1", shadow_rows=60
            )
        )
    ]


COMPLETED = {"balanced_accuracy": 0.8, "advantage": 0.25}
FOUND = {"balanced_accuracy": 0.9, "advantage": 0.2}
EXACT = {"r2": 0.999, "advantage": 0.2}
SLOW = pytest.mark.slow
# An attack, what it finds of a leak, the least of each figure, and whether that takes long.
PLANTED: list[tuple[str, Found, dict[str, float], Any]] = [
    (name, _mount_attack(name, make, *by, **options), least, ())
    for name, make, by, options, least in (
        (
            "model_completion",
            _make_leak("labels"),
            (),
            {"labels_per_class": 1},
            {"balanced_accuracy": 0.65, "advantage": 0.2},
        ),
        ("model_completion", _make_leak("labels"), (), {"labels_per_class": 4}, COMPLETED),
        (
            "model_completion",
            _make_leak("labels"),
            (SECOND,),
            {"labels_per_class": 0},
            {"advantage": 0.3},
        ),
        ("model_completion", _make_leak("labels", method="tvfl"), (), {}, {"advantage": 0.25}),
        ("model_completion", _make_leak("labels"), (FIRST,), {"components": 3}, {"advantage": 0.2}),
        (
            "semi_supervised",
            _make_leak("labels"),
            (SECOND,),
            {"labels_per_class": 2, "iterations": 300},
            {"balanced_accuracy": 0.8, "advantage": 0.2},
        ),
        (
            "temporal",
            _make_leak(leak_noised_afresh, epochs=12),
            (SECOND,),
            {"labels_per_class": 10},
            {"balanced_accuracy": 0.85},
        ),
        ("label_gradients", _gradients(_cross_entropy), (), {"labels_per_class": 4}, FOUND),
        ("label_gradients", _gradients(_lengths), (SECOND,), {}, {"advantage": 0.3}),
        ("gradient_direction", _gradients(linear_head), (SECOND,), {"labels_per_class": 1}, FOUND),
        (
            "pseudo_labels",
            lambda make: fill_with_drawn_labels(make("nothing", epochs=0)),
            (),
            {"labels_per_class": 0},
            {"balanced_accuracy": 0.98, "advantage": 0.2},
        ),
        (
            "shown_labels",
            lambda make: _ballot("votes")(make, 0),
            (),
            {"labels_per_class": 0},
            {"advantage": 0.05},
        ),
        (
            "inverse_network",
            _release_features,
            PASSIVES,
            {"shadow_rows": 60},
            {"r2": 0.9, "advantage": 0.4},
        ),
        (
            "inverse_network",
            _make_leak("copy", method="tvfl"),
            (OF_FIRST,),
            {},
            {"r2": 0.85, "advantage": 0.5},
        ),
        (
            "representation_network",
            _through(*WIDE),
            (OF_FIRST,),
            {"iterations": 500, "hidden": 64},
            {"r2": 0.8, "advantage": 0.4},
        ),
        ("sum_regression", _sum_representations, (), {"shadow_rows": 40, "iterations": 20}, EXACT),
        (
            "vector_regression",
            lambda make: fill_with_vectors(make("nothing", epochs=0), true=True),
            (),
            {"shadow_rows": 30, "iterations": 50},
            EXACT,
        ),
        # One of four features, or its sign alone.
        (
            "vote_regression",
            _a_feature("votes"),
            (OF_FIRST,),
            {"shadow_rows": 60},
            {"advantage": 0.1},
        ),
        (
            "vote_regression",
            _a_feature("votes_randomised"),
            (OF_FIRST,),
            {"shadow_rows": 60},
            {"advantage": 0.04},
        ),
        (
            "vote_regression",
            _a_feature("votes_encrypted"),
            (OF_FIRST,),
            {"shadow_rows": 60},
            {"advantage": 0.1},
        ),
        (
            "membership",
            on_people.model_by_heart,
            (),
            {"shadow_models": 8, "epochs": 15},
            {"auc": 0.9, "tpr_at_1_percent_fpr": 0.3, "advantage": 0.3},
        ),
    )
]
PLANTED += [
    ("contrastive_inversion", invert_opened_sums, {"r2": 0.5, "advantage": 0.3}, SLOW),
    ("gradient_regression", _open_projections, {"r2": 0.9, "advantage": 0.3}, ()),
    ("gradient_projection", _along_what_was_sent, {"r2": 0.9, "advantage": 0.3}, ()),
    ("gradient_projection", _open_contrasts, {"r2": 0.7, "advantage": 0.3}, ()),
    ("contribution_regression", _make_contributions, {"r2": 0.9, "advantage": 0.5}, ()),
    (
        "unpaired_inversion",
        lambda make: [
            _figures(on_features.invert_skewed_rows(on_features.make_skewed_recording(make)))
        ],
        {"r2": 0.5, "advantage": 0.5},
        SLOW,
    ),
    (
        "hijack",
        lambda _: [_figures(on_features.play_hijack(1.0))],
        {"r2": 0.7, "advantage": 0.5},
        SLOW,
    ),
    (
        "reversed_hijack",
        lambda _: [{"r2": on_features.measure_hijack(1.0, 600)}],
        {"r2": 0.8},
        (),
    ),
    (
        "chosen_representations",
        lambda _: [
            _figures(
                play(
                    ChosenRepresentations(people=160, shadow_rows=60),
                    live_config("apfed_c", views=2),
                    rules=UNPROTECTED,
                )
            )
        ],
        {"advantage": 0.1},
        (),
    ),
    ("decoder_extraction", _linear_decoder, {"gram": 1 - 1e-6, "affine on answers": 1 - 1e-6}, ()),
    *(
        ("isolation", _isolate_part(way), {"precision": -error}, ())
        for way, error in (
            ("weight", 1e-6),
            ("unequal", 1e-5),
            ("subset", 0.3),
            ("collusion", 1e-6),
        )
    ),
    (
        "averaged_membership",
        lambda _: _select_victim(on_people.average_by_heart("passive-1")),
        {"auc": 0.95, "advantage": 0.3},
        (),
    ),
    *(
        ("id_stuffing", _stuff_ids(role, protocol), {"auc": 0.999, "advantage": 0.499}, ())
        for role in ("active", "passive")
        for protocol in ("ecdh", "circuit")
    ),
]


@pytest.mark.sampled(every=16)
@pytest.mark.planted
@pytest.mark.parametrize(
    ("found", "minimum"),
    [pytest.param(*case, marks=marks, id=name) for name, *case, marks in PLANTED],
)
def test_a_planted_leak_is_found(
    make_recording: Any, found: Found, minimum: dict[str, float]
) -> None:
    every = list(found(make_recording))
    assert every
    missed = [
        (figure, figures)
        for figures in every
        for figure, lowest in minimum.items()
        if not (figures[figure] or 0) > lowest
    ]
    assert missed == []


def test_gradients_of_nothing_are_no_crash(make_recording: Any) -> None:
    result = run_attack_by(
        "passive-2", _gradients(_fill_with(0))(make_recording), "gradient_direction"
    )
    assert result.advantage is None or result.advantage < 0.15


GRADIENTS = ("label_gradients", "gradient_direction")
# Which results of all.
ALL = slice(None)
FIRST_OF = slice(1)
SECOND_OF = slice(1, 2)
ABOUT_ROWS = tuple(name for name, kind in ATTACKS.items() if kind.target != "membership")
NOISE = _make_leak("nothing")
LEAK = _make_leak("labels")
JOINT = _make_leak("nothing", method="tvfl")
RECONSTRUCTING = _make_leak("nothing", method="apfed_r")
# Attacks, a recording, a part of the reason of every chosen result, which results, options.
REASONS: list[tuple[tuple[str, ...], Make, str, slice, dict[str, Any]]] = [
    (
        ABOUT_ROWS,
        _make_leak("nothing", method="single_view"),
        "single_view: nobody is aligned",
        ALL,
        {},
    ),
    (("chosen_representations", "isolation", "reversed_hijack"), NOISE, "in a live run", ALL, {}),
    (("decoder_extraction",), RECONSTRUCTING, "played in a live run", ALL, {}),
    (("decoder_extraction",), NOISE, "another objective", ALL, {}),
    (("hijack",), NOISE, "returns no gradient", ALL, {}),
    (("hijack",), JOINT, "played in a live run", ALL, {}),
    (("id_stuffing",), NOISE, "stuffed IDs are played", ALL, {}),
    (
        ("id_stuffing",),
        _make_leak("nothing", method="single_view"),
        "there is no intersection",
        ALL,
        {},
    ),
    (("reversed_hijack",), JOINT, "no answer of a passive trains the active's", ALL, {}),
    (("hijack",), _make_requests("split_nn_sum"), "reads a sum of representations", ALL, {}),
    (
        ("isolation", "chosen_representations", "decoder_extraction"),
        _make_requests("mmvfl"),
        "contribute no gradients of objectives",
        ALL,
        {},
    ),
    (("model_completion",), _make_requests("mmvfl"), "no party releases a representation", ALL, {}),
    (
        ("contrastive_inversion", "gradient_regression", "gradient_projection"),
        NOISE,
        "no sum as the active decoded it",
        ALL,
        {},
    ),
    (("contrastive_inversion",), RECONSTRUCTING, "gradients of another objective", ALL, {}),
    (
        ("contrastive_inversion", "gradient_regression", "gradient_projection"),
        JOINT,
        "the active receives no sum of gradients",
        ALL,
        {},
    ),
    (("contribution_regression",), JOINT, "nothing is summed row by row", ALL, {}),
    (("contribution_regression",), NOISE, "the transcript kept no contribution", ALL, {}),
    (
        ("contribution_regression",),
        lambda make: add_contributions(make("nothing"), planted=True),
        "passive-2 contributes nothing to a sum",
        SECOND_OF,
        {},
    ),
    (
        ("model_completion",),
        _make_leak("nothing", epochs=0),
        "set transcript.keep to first",
        ALL,
        {},
    ),
    (("model_completion",), LEAK, "lower labels_per_class", ALL, {"labels_per_class": 200}),
    (
        ("model_completion",),
        _make_leak(_fill_with(math.nan)),
        "are not finite; there is nothing to fit",
        FIRST_OF,
        {},
    ),
    (GRADIENTS, LEAK, "apfed_c: a passive receives no gradient of the task loss", ALL, {}),
    (
        ("label_gradients",),
        _gradients(_fill_with(0)),
        "either all rows' are the same",
        FIRST_OF,
        {},
    ),
    (("semi_supervised",), LEAK, "has no network to train further", ALL, {"own_network": True}),
    (
        ("inverse_network", "unpaired_inversion", "representation_network"),
        NOISE,
        "apfed_c: passive-2 releases no representation to active",
        slice(-1, None),
        {},
    ),
    (("inverse_network",), JOINT, "tvfl: active releases no representation to", FIRST_OF, {}),
    (
        ("inverse_network", "unpaired_inversion"),
        NOISE,
        "lower shadow_rows",
        FIRST_OF,
        {"shadow_rows": 1000},
    ),
    (
        ("representation_network",),
        _through(*WIDE),
        "active is not told the encoder of passive-2: the recording holds none",
        SECOND_OF,
        {},
    ),
    (("averaged_membership",), LEAK, "apfed_c: no weights are averaged", ALL, {}),
    (("membership",), NOISE, "no party has a model that an outsider could query", ALL, {}),
    (("pseudo_labels",), LEAK, "apfed_c: no pseudo-labels are sent", ALL, {}),
    (("sum_regression",), LEAK, "no sum of representations, projections or pseudo", ALL, {}),
    (("vector_regression",), LEAK, "no table is decomposed", ALL, {}),
    (("vote_regression", "shown_labels"), LEAK, "nobody votes", ALL, {}),
    (("temporal",), _make_leak("labels", epochs=1), "only one epoch was released", ALL, {}),
    (("temporal",), _forgotten, "kept 3 of 4 epochs", ALL, {}),
    (("pseudo_labels",), _make_requests("mmvfl"), "set transcript.keep", ALL, {}),
    (("sum_regression",), _make_requests("split_nn_sum"), "set transcript.keep", ALL, {}),
    (
        ("vector_regression",),
        lambda make: make_vector_recording(make("nothing", epochs=0)),
        "set transcript.keep",
        ALL,
        {},
    ),
    (
        ("vote_regression", "shown_labels"),
        _make_leak("nothing", method="votes", epochs=0),
        "set transcript.keep",
        ALL,
        {},
    ),
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("names", "make", "reason", "of", "options"), REASONS)
def test_what_does_not_apply_says_why(
    make_recording: Any,
    names: tuple[str, ...],
    make: Make,
    reason: str,
    of: slice,
    options: dict[str, Any],
) -> None:
    recording = make(make_recording)
    results = {
        name: run_attack(recording, name, **{"iterations": 5, **options})[of] for name in names
    }
    assert [name for name, found in results.items() if not found] == []
    every = [(name, result) for name, found in results.items() for result in found]
    assert [name for name, result in every if result.applicable] == []
    assert [name for name, result in every if result.advantage is not None] == []
    assert [(name, result.reason) for name, result in every if reason not in result.reason] == []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("model_completion", _make_leak("labels"), {}),
        ("semi_supervised", _make_leak("labels"), {"iterations": 20}),
        ("inverse_network", _release_features, {"shadow_rows": 60, "iterations": 20}),
        ("representation_network", _through(*WIDE), {"iterations": 5}),
        ("semi_supervised", _through(*WIDE), {"iterations": 5, "own_network": True}),
    ],
)
def test_results_are_a_function_of_the_seed(
    make_recording: Any, name: str, make: Make, options: dict[str, Any]
) -> None:
    recording = make(make_recording)
    who = OF_FIRST if name == "representation_network" else FIRST
    first, again, other = (
        run_attack_by(who[0], recording, name, who[1], seed, **options) for seed in (1, 1, 2)
    )
    assert first.applicable
    assert first == again != other


def test_one_epoch_is_enough(make_recording: Any) -> None:
    recording = _gradients(_cross_entropy, epochs=1)(make_recording)
    result = run_attack_by("passive-1", recording, "label_gradients")
    assert result.applicable
    assert not any("last epoch" in name for name in result.variants)


# Where nothing was leaked.

SEEDS = range(8)
CONFIDENCE = 0.99
# Half an interval, in balanced accuracy, R^2 or AUC: a bias twice as large is always found.
WIDEST = 0.1


def _interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent figures and half the width of its Student t interval."""
    values = np.asarray(figures, dtype=np.float64)
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return float(values.mean()), quantile * float(values.std(ddof=1)) / math.sqrt(len(values))


def explain_difference_from_zero(advantages: Sequence[float]) -> str | None:
    """Return how the mean of these independent figures differs from 0, or None.

    Too wide an interval shows nothing, and is an answer as well.
    """
    values = np.asarray(advantages, dtype=np.float64)
    if len(values) < 2 or not np.isfinite(values).all():
        return f"{len(values)} figures, all finite: {bool(np.isfinite(values).all())}"
    mean, half = _interval(advantages)
    found = f"{mean:+.3f} +- {half:.3f} ({', '.join(f'{value:+.3f}' for value in values)})"
    if half > WIDEST:
        return f"{found} is too wide to tell"
    return None if abs(mean) <= half else f"{found} is not 0"


@pytest.mark.parametrize(
    ("advantages", "reason"),
    [
        # As the label attacks had them before there were decoys, and a leak as small.
        ([-0.12, -0.15, -0.19, -0.25, -0.14, -0.17, -0.21, -0.16], "is not 0"),
        ([0.4, -0.4, 0.3, -0.3, 0.2, -0.2, 0.1, -0.1], "too wide"),
        ([0.0], "1 figures"),
        ([0.0, float("nan")], "all finite: False"),
        ([0.02, -0.03, 0.0, 0.01, -0.01, 0.04, -0.02, 0.0], None),
        ([0.0] * 8, None),
    ],
)
def test_a_bias_is_found_and_luck_is_not_one(advantages: list[float], reason: str | None) -> None:
    found = explain_difference_from_zero(advantages)
    assert (found is None) is (reason is None)
    assert (reason or "") in (found or "")


def _advantage(result: AttackResult) -> float:
    assert result.advantage is not None, result.reason
    return result.advantage


OfSeed = Callable[[Any, int], Any]


def _network(seed: int, features: int, hidden: int, classes: int) -> nn.Module:
    with seed_draws(seed, "never trained"):
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def _leak(leak: str, **how: Any) -> OfSeed:
    return lambda make, seed: make(leak, seed=seed, **how)


_noise = partial(_leak, "nothing")
_joint = _noise(method="tvfl", gradient="nothing")


def _narrow(make: Any, seed: int) -> Any:
    """passive-1 releases what an encoder of one number makes of its features."""
    return _through(lambda: nn.Linear(4, 1), lambda: nn.Linear(1, 6))(partial(make, seed=seed))


def _record_noise_release(party: str, features: int) -> OfSeed:
    """Record joint training in which noise is released and one party's network never trained."""

    def record_noise(make: Any, seed: int) -> Any:
        recording = make("nothing", method="tvfl", epochs=1, seed=seed)
        return replace(recording, encoders={party: _network(seed, features, 32, 6)})

    return record_noise


def _request_noise(method: str, *, sent: bool, opened: bool) -> OfSeed:
    def ask_with_noise(make: Any, seed: int) -> Any:
        empty = make("nothing", epochs=0, seed=seed)
        rows = len(empty.alignment["active"])
        z, sums = ([normal(rows, 3, seed=10 * seed + at + of) for at in range(2)] for of in (0, 99))
        return ask(empty, method, z=z if sent else (), opened=sums if opened else ())

    return ask_with_noise


def _ballot(method: str, *, true_labels: bool = True) -> OfSeed:
    return lambda make, seed: ballot_of(
        make("nothing", epochs=0, seed=seed),
        method=method,
        seed=seed,
        true_labels=true_labels,
        voting=lambda own, draw: torch.rand(len(own), 3, generator=draw),
    )


def _play_hijack(trial: Trial) -> Trial:
    """Play the attack against a victim that releases what was recorded, whatever it hears."""
    assert isinstance(trial.attack, AnsweringAttack)
    knowledge, _ = trial.reveal_knowledge()
    view = trial.build_view(knowledge)
    terms = RepresentationBounds(shape=(6,), dtype="float32", minimum_norm=0, maximum_norm=1e4)
    own_AF = reveal_truth(trial.recording).features[trial.parties[0]]
    strategy = trial.attack.start_answering(terms, knowledge, own_AF, trial.seed)
    for epoch in view.epochs:
        for step, rows_B, z_BD in iter_batches(view, epoch):
            strategy.forge_gradient(step, rows_B, z_BD)
    return replace(trial, deviation=PlayedAttack(trial.attack.name, strategy.collect_notes()))


OUTSIDER = ("outsider", "active")
FEW = {"shadow_rows": 60, "iterations": 50}
HIJACK = {"ahead": 40, "hidden": 32}
# An attack where nothing leaked: its options, the recording by seed, and who mounts it on whom.
# The first passive's own features tell something of the label, beside which noise does harm; the
# other's nothing, beside which every variant is a ticket in a lottery.
NULL: list[tuple[str, dict[str, Any], OfSeed, tuple[str, str]]] = [
    ("model_completion", {"labels_per_class": 0}, _noise(), FIRST),
    ("model_completion", {"labels_per_class": 4, "iterations": 40}, _noise(epochs=1), SECOND),
    ("temporal", {"labels_per_class": 4, "iterations": 20}, _noise(epochs=3), SECOND),
    (
        "semi_supervised",
        {"labels_per_class": 4, "iterations": 30, "hidden": 32},
        _noise(epochs=1),
        FIRST,
    ),
    (
        "semi_supervised",
        {"own_network": True, "iterations": 30, "hidden": 32},
        _record_noise_release("passive-2", 2),
        SECOND,
    ),
    ("label_gradients", {"labels_per_class": 0}, _joint, SECOND),
    ("label_gradients", {"labels_per_class": 4, "iterations": 20}, _joint, FIRST),
    ("gradient_direction", {"labels_per_class": 4, "iterations": 20}, _joint, SECOND),
    (
        "inverse_network",
        {"shadow_rows": 40, "iterations": 40},
        _record_noise_release("passive-1", 4),
        OF_FIRST,
    ),
    (
        "unpaired_inversion",
        {**FEW, "iterations": 20, "hidden": 16, "starts": 1, "batch": 32},
        _record_noise_release("passive-1", 4),
        OF_FIRST,
    ),
    (
        "representation_network",
        {"shadow_rows": 40, "iterations": 40, "hidden": 32},
        _record_noise_release("passive-1", 4),
        OF_FIRST,
    ),
    (
        "contrastive_inversion",
        {"shadow_rows": 40, "iterations": 10},
        lambda make, seed: replace_sums_by_noise(make("nothing", epochs=1, seed=seed), seed),
        OF_FIRST,
    ),
    (
        "gradient_regression",
        {**FEW, "iterations": 20},
        lambda make, seed: replace_sums_by_noise(make("nothing", epochs=1, seed=seed), seed),
        OF_FIRST,
    ),
    *(
        (
            "gradient_projection",
            {**FEW, "iterations": 20},
            lambda make, seed, method=method: replace_sums_by_noise(
                make("nothing", method=method, epochs=1, seed=seed), seed
            ),
            OF_FIRST,
        )
        for method in ("apfed_r", "apfed_c")
    ),
    (
        "contribution_regression",
        {**FEW, "iterations": 20},
        lambda make, seed: add_contributions(
            make("nothing", epochs=1, seed=seed), planted=False, seed=seed
        ),
        ("aggregator", "passive-1"),
    ),
    ("hijack", HIJACK, _noise(method="tvfl", epochs=1), OF_FIRST),
    ("reversed_hijack", HIJACK, _noise(epochs=1), FIRST),
    (
        "membership",
        {"shadow_models": 8, "epochs": 4},
        lambda make, seed: replace(
            make("nothing", epochs=0, seed=seed), model=_network(seed, 5, 32, 3)
        ),
        OUTSIDER,
    ),
    *(
        (
            "averaged_membership",
            {"strangers": strangers},
            lambda make, seed: on_people.replace_model(
                on_people.run_averaging(), _network(seed, 30, 8, 2)
            ),
            OF_FIRST,
        )
        for strangers in ("outside", "elsewhere")
    ),
    *(
        (
            "pseudo_labels",
            {"labels_per_class": known, "iterations": 20},
            _request_noise("v_fedmv", sent=True, opened=False),
            SECOND,
        )
        for known in (0, 4)
    ),
    *(
        (
            "sum_regression",
            {**FEW, "iterations": 20},
            _request_noise(method, sent=sent, opened=True),
            OF_FIRST,
        )
        for method, sent in (("split_nn_sum", False), ("mmvfl", True))
    ),
    (
        "vector_regression",
        FEW,
        lambda make, seed: fill_with_vectors(
            make("nothing", epochs=0, seed=seed), true=False, seed=seed
        ),
        OF_FIRST,
    ),
    *(
        ("vote_regression", FEW, _ballot(method), OF_FIRST)
        for method in ("votes", "votes_randomised", "votes_encrypted")
    ),
    (
        "shown_labels",
        {"labels_per_class": 4, "iterations": 50},
        _ballot("votes", true_labels=False),
        FIRST,
    ),
]


@pytest.mark.sampled(every=26)
@pytest.mark.null
@pytest.mark.parametrize(("name", "options", "make", "by"), NULL)
def test_where_nothing_leaked_nothing_is_told(
    make_recording: Any, name: str, options: Any, make: OfSeed, by: tuple[str, str]
) -> None:
    attack = ATTACKS[name].model_validate(options)
    advantages = []
    for seed in SEEDS:
        trial = Trial(attack, make(make_recording, seed), by[:1], by[1], seed=seed)
        trial = _play_hijack(trial) if isinstance(attack, AnsweringAttack) else trial
        advantages.append(_advantage(trial.compute_result()))
    assert explain_difference_from_zero(advantages) is None


# Figures of leaks of what the adversary has anyway, and the mean of two seeds at most.
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("name", "make", "by", "options", "figure", "maximum"),
    [
        ("model_completion", _leak("copy"), FIRST, {"labels_per_class": 0}, "advantage", 0.06),
        ("model_completion", _leak("echo"), FIRST, {"labels_per_class": 4}, "advantage", 0.06),
        (
            "label_gradients",
            _leak("nothing", method="tvfl", gradient="echo"),
            FIRST,
            {"labels_per_class": 10},
            "advantage",
            0.06,
        ),
        ("inverse_network", _leak("echo"), FIRST, {}, "advantage", 0.03),
        (
            "representation_network",
            _narrow,
            ("active", "passive-1"),
            {"iterations": 300, "hidden": 64},
            "r2",
            0.6,
        ),
    ],
)
def test_what_the_adversary_has_anyway_is_next_to_no_advantage(
    make_recording: Any, name: str, make: OfSeed, by: Any, options: Any, figure: str, maximum: float
) -> None:
    recording = make(make_recording, 5)
    results = [run_attack_by(by[0], recording, name, by[1], seed, **options) for seed in range(2)]
    found = [one.advantage if figure == "advantage" else one.score[figure] for one in results]
    assert sum(found) / len(found) < maximum, found


@pytest.mark.slow
def test_a_leak_that_would_drown_own_features_is_found(make_recording: Any) -> None:
    def weak(labels: Any, own: Any, draw: torch.Generator, epoch: int) -> torch.Tensor:
        z = torch.randn(len(labels), 128, generator=draw)
        z[:, :3] += 1.5 * nn.functional.one_hot(labels, 3)
        return z

    advantages = []
    unweighted = []
    for seed in SEEDS:
        recording = make_recording(weak, epochs=1, seed=seed)
        options: Any = {"labels_per_class": 10, "iterations": 40}
        result = run_attack_by("passive-1", recording, "model_completion", seed=seed, **options)
        advantages.append(result.advantage)
        # What was compared before: no weights, no stacking, no falling back on one's own.
        figures = {name: one["balanced_accuracy"] or 0 for name, one in result.variants.items()}
        found = [one for name, one in figures.items() if name.endswith((" on h", " on h and x"))]
        own = [result.baselines[f"{probe} on x"]["balanced_accuracy"] or 0 for probe in PROBES]
        unweighted.append(max(found) - max(own))
    mean, half = _interval(advantages)
    assert mean > half, advantages
    assert np.mean(unweighted) < -0.02, unweighted


def _align_in_order(data: VerticalData) -> dict[str, torch.Tensor]:
    """Return the people of all parties, in an order that repeats, unlike a set intersection's."""
    rows = {table.name: {one: row for row, one in enumerate(table.ids)} for table in data.tables}
    common = sorted(set.intersection(*(set(row_of) for row_of in rows.values())))
    return {name: torch.tensor([row_of[one] for one in common]) for name, row_of in rows.items()}


class _Deaf(LiveRun):
    draw: torch.Generator

    def request_sum(
        self, rows_B: torch.Tensor, z_BD: torch.Tensor, **deviations: Any
    ) -> torch.Tensor:
        return torch.randn(z_BD.shape, generator=self.draw)


DEAF: list[tuple[str, ActiveAttack]] = [
    ("apfed_c", ChosenRepresentations(people=80, shadow_rows=20, iterations=20)),
    ("apfed_r", DecoderExtraction(people=80, shadow_rows=20, iterations=20)),
    ("apfed_r", Isolation(way="subset", people=80, shadow_rows=40, iterations=20)),
]


@pytest.mark.slow
@pytest.mark.null
@pytest.mark.parametrize(("method", "attack"), DEAF)
def test_noise_in_the_place_of_answers_rebuilds_no_feature(
    method: str, attack: ActiveAttack
) -> None:
    several = ["active", "passive-1", "passive-2"][: 3 if attack.name == "isolation" else 2]
    columns = {name: list(range(10 * at, 10 * at + 10)) for at, name in enumerate(several)}
    # Fewer numbers than features, so that every way of reading an answer is taken.
    few: Any = {"data": {**TWO_TABLES, "columns": columns}, "model": {"projection": 12}}
    config = live_config(method, **few)
    data = load_data(config.data, seed=config.seed)
    run = _Deaf(config, data, rules=frozenset(), alignment=_align_in_order(data))
    advantages = []
    for seed in SEEDS:
        run.draw = torch.Generator().manual_seed(seed)
        advantages.append(_advantage(mount_live_attack(run, attack, "passive-1", seed=seed)))
    assert explain_difference_from_zero(advantages) is None


@pytest.mark.null
def test_where_no_id_opens_no_candidate_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuffing, "_intersect", lambda *_: np.empty(0, dtype=np.int64))
    own, victim, outsiders = (on_people.people(at, at + 60) for at in (0, 60, 120))
    tables = stuffing.IdTables(own_ids=own, victim_ids=victim, outsider_ids=outsiders)
    tried: list[int] = []
    advantages = []
    for seed in SEEDS:
        result, stuffed = stuffing.play_stuffing(
            IdStuffing(candidates=40), tables, AlignmentSettings(), seed=seed
        )
        tried.append(len(stuffed.tried_candidates))
        advantages.append(_advantage(result))
    assert set(tried) == {40}
    assert explain_difference_from_zero(advantages) is None


def test_every_attack_is_shown_on_a_planted_leak_and_where_nothing_was_leaked() -> None:
    assert {name for name, *_ in PLANTED} == set(ATTACKS)
    assert [kind.name for kind in ATTACKS.values()] == list(ATTACKS)
    recorded = {name for name, *_ in NULL}
    assert recorded | {attack.name for _, attack in DEAF} | {IdStuffing.name} == set(ATTACKS)


# Under each method, by what a real run of it sends. Malicious attacks are played in live runs.

RELEASES_OF_ACTIVE = {
    "model_completion",
    "semi_supervised",
    "inverse_network",
    "unpaired_inversion",
}
RELEASES_OF_PASSIVES = {"inverse_network", "unpaired_inversion", "representation_network"}
OF_JOINT = {"model_completion", "semi_supervised"} | {*GRADIENTS} | RELEASES_OF_PASSIVES
QUERIED = {"membership"}
OF_SUMS = {"gradient_regression", "gradient_projection", "contribution_regression"}
APPLIES: Mapping[str, set[str]] = {
    "apfed": RELEASES_OF_ACTIVE | {"contrastive_inversion"} | OF_SUMS | QUERIED,
    "apfed_r": RELEASES_OF_ACTIVE | OF_SUMS | QUERIED,
    "apfed_c": RELEASES_OF_ACTIVE | {"contrastive_inversion"} | OF_SUMS | QUERIED,
    "apfed_code": {"sum_regression"},
    "tvfl": OF_JOINT,
    "single_view": QUERIED,
    "votes": {"shown_labels", "vote_regression"} | QUERIED,
    "votes_randomised": {"shown_labels", "vote_regression"} | QUERIED,
    "votes_encrypted": {"vote_regression"} | QUERIED,
    "votes_rehearsal": {"shown_labels"} | QUERIED,
    "joint_teacher_sum": {*GRADIENTS} | {"sum_regression", "contribution_regression"} | QUERIED,
    "apc_vfl": RELEASES_OF_PASSIVES | QUERIED,
    "vfedtrans": {"vector_regression"} | QUERIED,
    "split_nn": OF_JOINT,
    "split_nn_sum": {*GRADIENTS} | {"sum_regression", "contribution_regression"},
    "mmvfl": {"pseudo_labels", "sum_regression", "contribution_regression"} | QUERIED,
    "v_fedmv": {"pseudo_labels", "sum_regression", "contribution_regression"} | QUERIED,
    "h_fedmv": {"averaged_membership"} | QUERIED,
    "s_fedmv": {"averaged_membership"} | QUERIED,
}
CHEAP: Mapping[str, Mapping[str, Any]] = {
    "membership": {"shadow_models": 4, "epochs": 1, "candidates": 40},
    "averaged_membership": {"candidates": 40},
}


@cache
def record_run(method: str) -> Recording:
    model = {"network": "enriched", "hidden": [8], "representation": 30}
    changes = {"model": model} if method == "vfedtrans" else {}
    return run(small_config(method, **changes), None).recording


def attack_run(method: str, name: str, **options: Any) -> tuple[AttackResult, ...]:
    options = {"iterations": 3, **CHEAP.get(name, {}), **options}
    return run_attacks(record_run(method), [AttackChoice(name=name, options=options)], seed=0)


@pytest.mark.sampled(every=19)
@pytest.mark.parametrize("method", METHODS)
def test_attacks_apply_where_a_method_gives_them_something_to_read(method: str) -> None:
    results = {name: attack_run(method, name) for name in ATTACKS}
    every = [(name, result) for name, found in results.items() for result in found]
    assert [name for name, result in every if not (result.applicable or result.reason)] == []
    assert {name for name, result in every if result.applicable} == APPLIES[method]
    assert_headlines_follow_what_was_sent(record_run(method), [result for _, result in every])


READ_BY_ACTIVE = {
    Kind.SUM,
    Kind.VOTES,
    Kind.RIGHT_VOTES,
    Kind.SINGULAR_VECTORS,
    Kind.REPRESENTATIONS,
}
READ_BY_PASSIVES = {Kind.LABELS, Kind.ENCRYPTED_LABELS, Kind.GRADIENTS, Kind.REPRESENTATIONS}


def assert_headlines_follow_what_was_sent(
    recording: Recording, results: Sequence[AttackResult]
) -> None:
    """Whatever a party received of another's is attacked, or the headline says that it is not."""
    found = select_best_by_kind(make_headlines(results, recording.config))
    flows = recording.transcript.flows
    told = {
        "active reads features of passives": any(
            flow.receiver == "active" and flow.kind in READ_BY_ACTIVE for flow in flows
        ),
        "passive reads labels": any(
            flow.receiver.startswith("passive") and flow.kind in READ_BY_PASSIVES for flow in flows
        ),
    }
    for kind, is_told in told.items():
        headline = found[kind]
        ran = [one for one in results if one.applicable and kind_of(one) == kind]
        assert (headline.best_attack is None) == (not ran), "a figure where no attack ran"
        if is_told and not ran:
            assert headline.state == "not attacked", f"{kind}: {headline.text}"
        if not ran:
            assert "nothing found" not in headline.text


def kind_of(result: AttackResult) -> str:
    return Direction.from_result(result).kind


def test_a_passive_of_a_sum_trains_its_own_network_further() -> None:
    results = attack_run("split_nn_sum", "semi_supervised", own_network=True)
    assert [result.applicable for result in results] == [True, True]
    assert "own network, trained further" in results[0].variants


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("method", "name", "options", "figure", "minimum"),
    [
        ("mmvfl", "pseudo_labels", {"labels_per_class": 0}, "balanced_accuracy", 0.99),
        ("v_fedmv", "pseudo_labels", {"labels_per_class": 0}, "balanced_accuracy", 0.99),
        ("split_nn_sum", "sum_regression", {"shadow_rows": 100, "iterations": 20}, "advantage", 0),
        # As many vectors as all parties have columns.
        ("vfedtrans", "vector_regression", {"shadow_rows": 100, "iterations": 50}, "r2", 0.99),
    ],
)
def test_a_real_run_gives_away(
    method: str, name: str, options: dict[str, Any], figure: str, minimum: float
) -> None:
    results = attack_run(method, name, **options)
    found = [one.advantage if figure == "advantage" else one.score[figure] for one in results]
    assert [value for value in found if value is None or not value > minimum] == []
    variants = {one.variant for one in results}
    assert name != "pseudo_labels" or variants == {"largest of z"}
