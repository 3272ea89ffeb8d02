"""What every attack finds on a planted leak, and says where there is nothing to read: tables.

An attack that was never seen to succeed says nothing where it fails: `pytest -m planted`. What
takes more than a figure to show is in the files of labels, features, people and live runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_attacks import ATTACKS
from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.interface import AttackResult
from apfed_attacks.labels.batch_labels import explain_labels
from apfed_attacks.live.runs import play
from apfed_attacks.recorded import truth_of, view_of
from apfed_attacks.view import Knowledge
from secure_apfed.runs.outcome import Recording
from secure_apfed.seeds import seeded
from tests.attacks.conftest import Leak, leak_noised_afresh
from tests.attacks.recordings import (
    TWO_TABLES,
    ask,
    attacked,
    attacked_by,
    ballot_of,
    decomposed,
    drawn_labels,
    live_config,
    normal,
    of_vectors,
    two_classes,
    with_opened,
)  # fmt: skip
from tests.attacks.test_attacks_features import opened_by, skewed, skewed_and_inverted
from tests.attacks.test_attacks_hijack import explained_by_hijack, played_hijack
from tests.attacks.test_attacks_live import UNPROTECTED, isolation_error
from tests.attacks.test_attacks_people import average_by_heart, model_by_heart, stuff

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

Make = Callable[[Any], Any]


def _of(leak: str | Leak, **how: Any) -> Make:
    return lambda make: make(leak, **how)


def _gradients(gradient: str | Leak, **how: Any) -> Make:
    return _of("nothing", method="tvfl", gradient=gradient, **how)


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


def _rare(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    error = torch.where(labels == 1, 0.8, 0.2)[:, None]
    return error * F.normalize(torch.randn(len(labels), 6, generator=draw))


def _vanished(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    return torch.zeros(len(labels), 6)


def _broken(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    return torch.full((len(labels), 6), float("nan"))


def _clustered(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    """Representations that training moved apart along two directions of eight."""
    h = torch.randn(len(labels), 8, generator=draw)
    h[:, 0] += 6.0 * (labels == 1)
    h[:, 1] += 6.0 * (labels == 2)
    return h


def _in_two_classes(made: Make) -> Make:
    return lambda make: two_classes(made(make))


def _of_features(make: Any) -> Any:
    """An invertible function of the active's features is released."""
    features = truth_of(make("nothing")).features["active"]
    mix = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    return _of(lambda *_: torch.tanh(0.2 * features @ mix))(make)


def _through(*layers: Callable[[], nn.Module], released: bool = True) -> Make:
    """passive-1 releases what its encoder makes of its features, or noise."""

    def made(make: Any) -> Any:
        with seeded(3, "encoder"):
            encoder = nn.Sequential(*(layer() for layer in layers))

        def leak(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
            with torch.no_grad():
                return encoder(own) if released else torch.randn(len(own), 6, generator=draw)

        return replace(make(leak, method="tvfl"), encoders={"passive-1": encoder})

    return made


WIDE = (lambda: nn.Linear(4, 12), nn.Tanh, lambda: nn.Linear(12, 6))
NARROW = (lambda: nn.Linear(4, 1), lambda: nn.Linear(1, 6))


def _asked(method: str) -> Make:
    return lambda make: ask(make("nothing", epochs=0), method)


def _summed(make: Any) -> Recording:
    """Linear representations of all passives are summed."""
    empty = make("nothing", epochs=0)
    tables = [table.features[empty.alignment[table.name]] for table in empty.data.passives]
    return ask(empty, "split_nn_sum", opened=[torch.hstack(tables).double() @ normal(6, 8, seed=0)])


def _decomposed(make: Any) -> Recording:
    return decomposed(make("nothing", epochs=0), true=True)


def _voted(make: Any) -> Recording:
    return ballot_of(
        make("nothing", epochs=0), method="votes",
        voting=lambda own, draw: torch.rand(len(own), 3, generator=draw),
    )  # fmt: skip


def _drawn(make: Any) -> Recording:
    return drawn_labels(make("nothing", epochs=0))


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


def _mounted(name: str, make: Make, *by: tuple[str, str], **options: Any) -> Found:
    """Figures of these adversaries, or of all; each knew as much as its options say."""

    def found(make_recording: Any) -> Iterable[Mapping[str, float | None]]:
        attack, recording = ATTACKS[name].model_validate(options), make(make_recording)
        results = [attacked_by(who, recording, name, whom, **options) for who, whom in by]
        for result in results or attacked(recording, name, **options):
            known = attack.labels_per_class * result.knowledge["classes"] + attack.shadow_rows
            assert result.counts["known"] == known
            yield _figures(result)

    return found


def _by_victim(results: Iterable[AttackResult], victim: str = "passive-1") -> Any:
    return [_figures(result) for result in results
            if (result.adversary, result.victim) == ("active", victim)]  # fmt: skip


def _linear_decoder(_: Any) -> Any:
    """Ten features for eleven pairs: every way of reading an answer, as shares of variance."""
    config = live_config("apfed_r", model={"hidden": []}, data=TWO_TABLES)
    attack = DecoderExtraction(people=160, shadow_rows=11)
    (result,) = play(attack, config, victims=["passive-1"], rules=UNPROTECTED)
    return [{way: result.variants[way]["r2"] for way in ("gram", "affine on answers")}]


def _chosen(_: Any) -> Any:
    attack = ChosenRepresentations(people=160, shadow_rows=60)
    return map(_figures, play(attack, live_config("apfed_c", views=2), rules=UNPROTECTED))


def _isolated(way: str) -> Found:
    return lambda _: [{"precision": -isolation_error(UNPROTECTED, way=way)}]


def _stuffed(role: str, protocol: str) -> Found:
    return lambda _: [_figures(stuff(role, protocol=protocol)[0])]


def _opened(make: Any) -> Any:
    recording = make("nothing")
    opened = with_opened(recording, opened_by(recording, ("passive-1",)))
    return _by_victim(attacked(opened, "contrastive_inversion"))


COMPLETED = {"balanced_accuracy": 0.8, "advantage": 0.25}
FOUND = {"balanced_accuracy": 0.9, "advantage": 0.2}
EXACT = {"r2": 0.999, "advantage": 0.2}
SLOW = pytest.mark.slow
# An attack, what it finds of a leak, the least of each figure, and whether that takes long.
PLANTED: list[tuple[str, Found, dict[str, float], Any]] = [
    (name, _mounted(name, make, *by, **options), least, ())
    for name, make, by, options, least in (
        ("model_completion", _of("labels"), (), {"labels_per_class": 1},
         {"balanced_accuracy": 0.65, "advantage": 0.2}),
        ("model_completion", _of("labels"), (), {"labels_per_class": 4}, COMPLETED),
        ("model_completion", _of("labels"), (), {"labels_per_class": 40}, COMPLETED),
        ("model_completion", _of("labels"), (SECOND,), {"labels_per_class": 0}, {"advantage": 0.3}),
        ("model_completion", _of("labels", method="tvfl"), (), {}, {"advantage": 0.25}),
        ("model_completion", _of("labels"), (FIRST,), {"components": 3}, {"advantage": 0.2}),
        ("semi_supervised", _of("labels"), (SECOND,), {"labels_per_class": 2, "iterations": 300},
         {"balanced_accuracy": 0.8, "advantage": 0.2}),
        ("temporal", _of(leak_noised_afresh, epochs=12), (SECOND,), {"labels_per_class": 10},
         {"balanced_accuracy": 0.85}),
        ("label_gradients", _gradients(_cross_entropy), (), {"labels_per_class": 4}, FOUND),
        ("label_gradients", _gradients(_cross_entropy), (), {"labels_per_class": 40}, FOUND),
        ("label_gradients", _gradients(_lengths), (SECOND,), {}, {"advantage": 0.3}),
        ("gradient_direction", _gradients(linear_head), (SECOND,), {"labels_per_class": 1}, FOUND),
        ("batch_labels", _gradients(linear_head), (SECOND,), {"labels_per_class": 0},
         {"balanced_accuracy": 0.8, "advantage": 0.2}),
        ("batch_labels", _gradients(linear_head), (SECOND,), {"labels_per_class": 1},
         {"balanced_accuracy": 0.8, "advantage": 0.2}),
        ("gradient_norm", _in_two_classes(_gradients(_rare)), (SECOND,), {},
         {"auc": 0.99, "advantage": 0.4}),
        ("spectral", _of(_clustered, method="tvfl"), (SECOND,), {},
         {"balanced_accuracy": 0.9, "advantage": 0.3}),
        ("pseudo_labels", _drawn, (), {"labels_per_class": 0},
         {"balanced_accuracy": 0.98, "advantage": 0.2}),
        ("pseudo_labels", _drawn, (), {"labels_per_class": 4},
         {"balanced_accuracy": 0.98, "advantage": 0.2}),
        ("shown_labels", _voted, (), {"labels_per_class": 0}, {"advantage": 0.05}),
        ("shown_labels", _voted, (), {"labels_per_class": 4}, {"advantage": 0.05}),
        ("inverse_network", _of_features, PASSIVES, {"shadow_rows": 60},
         {"r2": 0.9, "advantage": 0.4}),
        ("inverse_network", _of("copy", method="tvfl"), (OF_FIRST,), {},
         {"r2": 0.85, "advantage": 0.5}),
        ("representation_network", _through(*WIDE), (OF_FIRST,), {"iterations": 800},
         {"r2": 0.8, "advantage": 0.4}),
        ("sum_regression", _summed, (), {"shadow_rows": 40, "iterations": 20}, EXACT),
        ("vector_regression", _decomposed, (), {"shadow_rows": 30, "iterations": 50}, EXACT),
        # One of four features, or its sign alone.
        ("vote_regression", _a_feature("votes"), (OF_FIRST,), {"shadow_rows": 60},
         {"advantage": 0.1}),
        ("vote_regression", _a_feature("votes_randomised"), (OF_FIRST,), {"shadow_rows": 60},
         {"advantage": 0.04}),
        ("membership", model_by_heart, (), {"shadow_models": 8, "epochs": 15},
         {"auc": 0.9, "tpr_at_1_percent_fpr": 0.3, "advantage": 0.3}),
    )
]  # fmt: skip
PLANTED += [
    ("contrastive_inversion", _opened, {"r2": 0.5, "advantage": 0.3}, SLOW),
    ("unpaired_inversion", lambda make: [_figures(skewed_and_inverted(skewed(make)))],
     {"r2": 0.5, "advantage": 0.5}, SLOW),
    ("hijack", lambda _: [_figures(played_hijack(1.0))], {"r2": 0.7, "advantage": 0.5}, SLOW),
    ("reversed_hijack", lambda _: [{"r2": explained_by_hijack(1.0, 600)}], {"r2": 0.8}, ()),
    ("chosen_representations", _chosen, {"advantage": 0.1}, ()),
    ("decoder_extraction", _linear_decoder,
     {"gram": 1 - 1e-6, "affine on answers": 1 - 1e-6}, ()),
    *(("isolation", _isolated(way), {"precision": -error}, ()) for way, error in
      (("weight", 1e-6), ("unequal", 1e-5), ("subset", 0.3), ("collusion", 1e-6))),
    ("averaged_membership", lambda _: _by_victim(average_by_heart("passive-1")),
     {"auc": 0.95, "advantage": 0.3}, ()),
    *(("id_stuffing", _stuffed(role, protocol), {"auc": 0.999, "advantage": 0.499}, ())
      for role in ("active", "passive") for protocol in ("ecdh", "circuit")),
]  # fmt: skip


@pytest.mark.planted
@pytest.mark.parametrize(
    ("found", "least"),
    [pytest.param(*case, marks=marks, id=name) for name, *case, marks in PLANTED],
)
def test_a_planted_leak_is_found(
    make_recording: Any, found: Found, least: dict[str, float]
) -> None:
    every = list(found(make_recording))
    assert every
    for figures in every:
        for figure, lowest in least.items():
            assert (figures[figure] or 0) > lowest, figures


def test_every_attack_is_shown_on_a_planted_leak() -> None:
    assert {name for name, *_ in PLANTED} == set(ATTACKS)
    assert [kind.name for kind in ATTACKS.values()] == list(ATTACKS)


@pytest.mark.parametrize("name", ["gradient_direction", "batch_labels", "spectral"])
def test_gradients_of_nothing_are_no_crash(make_recording: Any, name: str) -> None:
    result = attacked_by("passive-2", _gradients(_vanished)(make_recording), name)
    assert result.advantage is None or result.advantage < 0.15


GRADIENTS = ("label_gradients", "gradient_norm", "gradient_direction", "batch_labels")
# Which results of all.
ALL, FIRST_OF, SECOND_OF = slice(None), slice(1), slice(1, 2)
ABOUT_ROWS = tuple(name for name, kind in ATTACKS.items() if kind.target != "membership")
NOISE, LEAK = _of("nothing"), _of("labels")
JOINT, RECONSTRUCTING = _of("nothing", method="tvfl"), _of("nothing", method="apfed_r")
# Attacks, a recording, a part of the reason of every chosen result, which results, options.
REASONS: list[tuple[tuple[str, ...], Make, str, slice, dict[str, Any]]] = [
    (ABOUT_ROWS, _of("nothing", method="single_view"), "single_view: nobody is aligned", ALL, {}),
    (("chosen_representations", "isolation", "reversed_hijack"), NOISE, "in a live run", ALL, {}),
    (("decoder_extraction",), RECONSTRUCTING, "played in a live run", ALL, {}),
    (("decoder_extraction",), NOISE, "another objective", ALL, {}),
    (("hijack",), NOISE, "returns no gradient", ALL, {}),
    (("hijack",), JOINT, "played in a live run", ALL, {}),
    (("id_stuffing",), NOISE, "stuffed IDs are played", ALL, {}),
    (("id_stuffing",), _of("nothing", method="single_view"), "there is no intersection", ALL, {}),
    (("reversed_hijack",), JOINT, "no answer of a passive trains the active's", ALL, {}),
    (("hijack",), _asked("split_nn_sum"), "reads a sum of representations", ALL, {}),
    (("isolation", "chosen_representations", "decoder_extraction"), _asked("mmvfl"),
     "contribute no gradients of objectives", ALL, {}),
    (("contrastive_inversion",), NOISE, "no sum as the active decoded it", ALL, {}),
    (("contrastive_inversion",), RECONSTRUCTING, "gradients of another objective", ALL, {}),
    (("contrastive_inversion",), JOINT, "the active receives no sum of gradients", ALL, {}),
    (("model_completion",), _of("nothing", epochs=0), "set transcript.keep to first", ALL, {}),
    (("model_completion",), LEAK, "lower labels_per_class", ALL, {"labels_per_class": 200}),
    (("model_completion",), _of(_broken), "are not finite; there is nothing to fit", FIRST_OF, {}),
    (GRADIENTS, LEAK, "apfed_c: a passive receives no gradient of the task loss", ALL, {}),
    (("spectral",), LEAK, "apfed_c: no label gradient moves", ALL, {}),
    (("label_gradients",), _gradients(_vanished), "either all rows' are the same", FIRST_OF, {}),
    (("gradient_norm",), _gradients(linear_head), "two classes", FIRST_OF, {}),
    (("gradient_norm",), _in_two_classes(_gradients(linear_head)), "has no threshold", FIRST_OF,
     {"priors": False}),
    (("semi_supervised",), LEAK, "has no network to train further", ALL, {"own_network": True}),
    (("inverse_network", "unpaired_inversion", "representation_network"), NOISE,
     "apfed_c: passive-2 releases no representation to active", slice(-1, None), {}),
    (("inverse_network",), JOINT, "tvfl: active releases no representation to", FIRST_OF, {}),
    (("inverse_network", "unpaired_inversion"), NOISE, "lower shadow_rows", FIRST_OF,
     {"shadow_rows": 1000}),
    (("representation_network",), _through(*WIDE),
     "active is not told the encoder of passive-2: the recording holds none", SECOND_OF, {}),
    (("averaged_membership",), LEAK, "apfed_c: no weights are averaged", ALL, {}),
    (("membership",), NOISE, "no party has a model that an outsider could query", ALL, {}),
    (("pseudo_labels",), LEAK, "apfed_c: no pseudo-labels are sent", ALL, {}),
    (("sum_regression",), LEAK, "no sum of representations or pseudo-labels is opened", ALL, {}),
    (("vector_regression",), LEAK, "no table is decomposed", ALL, {}),
    (("vote_regression", "shown_labels"), LEAK, "nobody votes", ALL, {}),
]  # fmt: skip


@pytest.mark.parametrize(("names", "make", "reason", "of", "options"), REASONS)
def test_what_does_not_apply_says_why(
    make_recording: Any, names: tuple[str, ...], make: Make, reason: str, of: slice,
    options: dict[str, Any],
) -> None:  # fmt: skip
    recording = make(make_recording)
    for name in names:
        results = attacked(recording, name, **{"iterations": 5, **options})[of]
        assert results, name
        for result in results:
            assert not result.applicable, name
            assert result.advantage is None
            assert reason in result.reason, name


@pytest.mark.parametrize(
    ("name", "party", "method"),
    [
        ("pseudo_labels", "passive-1", "mmvfl"), ("sum_regression", "active", "split_nn_sum"),
        ("vector_regression", "active", "vfedtrans"), ("vote_regression", "active", "votes"),
        ("shown_labels", "passive-1", "votes"),
    ],
)  # fmt: skip
def test_a_transcript_that_kept_nothing_says_what_to_set(
    make_recording: Any, name: str, party: str, method: str
) -> None:
    recording = make_recording("nothing", epochs=0)
    if method == "votes":
        recording = replace(recording, config=_voted(make_recording).config)
    else:
        recording = of_vectors(recording) if method == "vfedtrans" else ask(recording, method)
    knowledge = Knowledge(classes=3, victim="passive-1")
    reason = ATTACKS[name]().why_not(view_of(recording, [party], knowledge=knowledge))
    assert "set transcript.keep" in (reason or "")


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("model_completion", _of("labels"), {}),
        ("temporal", _of("labels", epochs=3), {}),
        ("semi_supervised", _of("labels"), {"iterations": 20}),
        ("label_gradients", _gradients(_cross_entropy), {}),
        ("inverse_network", _of_features, {"shadow_rows": 60, "iterations": 20}),
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
        attacked_by(who[0], recording, name, who[1], seed, **options) for seed in (1, 1, 2)
    )
    assert first.applicable
    assert first == again != other


def test_what_the_own_features_tell_is_no_advantage(make_recording: Any) -> None:
    result = attacked(make_recording("nothing"), "inverse_network")[0]
    # passive-1 knows something of the label, and so of the active's features.
    assert max(result.baselines[f"{how} on x"]["r2"] for how in ("ridge", "mlp")) > 0.1
    assert result.baselines[result.baseline]["r2"] > 0.1
    assert abs(result.advantage) < 0.03
    assert result.baselines["mean of the shadow rows"]["r2"] == pytest.approx(0, abs=0.05)


def test_one_epoch_is_enough(make_recording: Any) -> None:
    recording = _gradients(_cross_entropy, epochs=1)(make_recording)
    result = attacked_by("passive-1", recording, "label_gradients")
    assert result.applicable
    assert not any("last epoch" in name for name in result.variants)


def test_the_fit_explains_gradients_of_a_linear_head() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    gradient = linear_head(labels, labels, draw, 0)
    found, left = explain_labels(gradient, 3, rate=0.05, iterations=400, seed=0)
    assert left < 0.05
    assert found.shape == (60, 3)
    torch.testing.assert_close(found.sum(1), torch.ones(60, dtype=torch.float64))
