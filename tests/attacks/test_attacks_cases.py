"""What attacks find on planted leaks, find on none, and say where there is nothing to read: tables.

What takes more than a recording and a figure to show is in the files of single attacks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_attacks import ATTACKS
from apfed_attacks.labels.batch_labels import explain_labels
from apfed_attacks.recorded import truth_of, view_of
from apfed_attacks.view import Knowledge
from secure_apfed.runs.outcome import Recording
from secure_apfed.seeds import seeded
from tests.attacks.conftest import Leak
from tests.attacks.recordings import (
    ask,
    attacked,
    ballot_of,
    decomposed,
    normal,
    of_vectors,
    two_classes,
)  # fmt: skip

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


def _summed(make: Any) -> Recording:
    """Linear representations of all passives are summed."""
    empty = make("nothing", epochs=0)
    tables = [one.features[empty.alignment[one.name]] for one in empty.data.passives]
    return ask(empty, "split_nn_sum", opened=[torch.hstack(tables).double() @ normal(6, 8, seed=0)])


def _decomposed(make: Any) -> Recording:
    return decomposed(make("nothing", epochs=0), true=True)


def _voted(make: Any) -> Recording:
    return ballot_of(
        make("nothing", epochs=0), method="votes",
        voting=lambda own, draw: torch.rand(len(own), 3, generator=draw),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An attack on a recording, and what some of its results are to reach.

    Attributes:
        least: of every chosen result's score or "advantage".
        of: which results; None: all.
    """

    name: str
    make: Make
    least: Mapping[str, float]
    of: slice = field(default_factory=lambda: slice(None))
    options: Mapping[str, Any] = field(default_factory=dict)


# passive-2's own features say nothing of the label.
SECOND, ACTIVE = slice(1, 2), slice(2)
PLANTED = [
    *(
        Case("model_completion", _of("labels"), least, options={"labels_per_class": known})
        for known, least in (
            (1, {"balanced_accuracy": 0.65, "advantage": 0.2}),
            (4, {"balanced_accuracy": 0.8, "advantage": 0.25}),
            (40, {"balanced_accuracy": 0.8, "advantage": 0.25}),
        )
    ),
    Case("model_completion", _of("labels"), {"advantage": 0.3}, SECOND, {"labels_per_class": 0}),
    Case("model_completion", _of("labels", method="tvfl"), {"advantage": 0.25}),
    Case("model_completion", _of("labels"), {"advantage": 0.2}, slice(1), {"components": 3}),
    Case("semi_supervised", _of("labels"), {"balanced_accuracy": 0.8, "advantage": 0.2}, SECOND,
         {"labels_per_class": 2, "iterations": 300}),
    *(
        Case("label_gradients", _gradients(_cross_entropy),
             {"balanced_accuracy": 0.9, "advantage": 0.2}, options={"labels_per_class": known})
        for known in (4, 40)
    ),
    Case("label_gradients", _gradients(_lengths), {"advantage": 0.3}, SECOND),
    Case("gradient_direction", _gradients(linear_head),
         {"balanced_accuracy": 0.9, "advantage": 0.2}, SECOND, {"labels_per_class": 1}),
    *(
        Case("batch_labels", _gradients(linear_head),
             {"balanced_accuracy": 0.8, "advantage": 0.2}, SECOND, {"labels_per_class": known})
        for known in (0, 1)
    ),
    Case("gradient_norm", _in_two_classes(_gradients(_rare)), {"auc": 0.99, "advantage": 0.4},
         SECOND),
    Case("spectral", _of(_clustered, method="tvfl"), {"balanced_accuracy": 0.9, "advantage": 0.3},
         SECOND),
    Case("inverse_network", _of_features, {"r2": 0.9, "advantage": 0.4}, ACTIVE,
         {"shadow_rows": 60}),
    Case("inverse_network", _of("copy", method="tvfl"), {"r2": 0.85, "advantage": 0.5},
         slice(2, 3)),
    Case("representation_network", _through(*WIDE), {"r2": 0.8, "advantage": 0.4}, slice(1),
         {"iterations": 800}),
    Case("sum_regression", _summed, {"r2": 0.999, "advantage": 0.2},
         options={"shadow_rows": 40, "iterations": 20}),
    Case("vector_regression", _decomposed, {"r2": 0.999, "advantage": 0.2},
         options={"shadow_rows": 30, "iterations": 50}),
]  # fmt: skip


def _id(case: Case) -> str:
    return f"{case.name} {dict(case.options)}"


@pytest.mark.planted(*{case.name for case in PLANTED})
@pytest.mark.parametrize("case", PLANTED, ids=_id)
def test_a_planted_leak_is_found(make_recording: Any, case: Case) -> None:
    attack = ATTACKS[case.name].model_validate(case.options)
    for result in attacked(case.make(make_recording), case.name, **case.options)[case.of]:
        assert result.applicable, result.reason
        for figure, least in case.least.items():
            found = result.advantage if figure == "advantage" else result.score[figure]
            assert found > least, (figure, found)
        known = attack.labels_per_class * result.knowledge["classes"] + attack.shadow_rows
        assert result.counts["known"] == known


# No advantage above `least`: leaks of nothing, or of what the adversary has anyway.
QUIET = [
    *(
        Case("model_completion", _of(leak), {"advantage": 0.06}, slice(1),
             {"labels_per_class": known})
        for leak, known in (("copy", 0), ("echo", 4), ("nothing", 40), ("echo", 40))
    ),
    Case("label_gradients", _gradients("echo"), {"advantage": 0.06}, slice(1),
         {"labels_per_class": 10}),
    Case("temporal", _of("nothing", epochs=6), {"advantage": 0.1}, SECOND,
         {"labels_per_class": 10}),
    *(Case(name, _gradients("nothing"), {"advantage": 0.1}, SECOND)
      for name in ("gradient_direction", "batch_labels", "spectral")),
    Case("gradient_norm", _in_two_classes(_gradients("nothing")), {"advantage": 0.1}, SECOND),
    *(Case("inverse_network", _of(leak), {"advantage": 0.03}, slice(1))
      for leak in ("nothing", "echo")),
    Case("inverse_network", _of("copy", method="tvfl"), {"advantage": 0.03}, slice(3, 4)),
    Case("representation_network", _through(*WIDE, released=False), {"advantage": 0.05}, slice(1),
         {"iterations": 800}),
    Case("representation_network", _through(*NARROW), {"r2": 0.6}, slice(1), {"iterations": 800}),
]  # fmt: skip


@pytest.mark.parametrize("case", QUIET, ids=_id)
def test_without_a_leak_there_is_next_to_no_advantage(make_recording: Any, case: Case) -> None:
    recording = case.make(make_recording)
    results = [attacked(recording, case.name, seed, **case.options)[case.of] for seed in range(2)]
    for figure, most in case.least.items():
        found = [one.advantage if figure == "advantage" else one.score[figure]
                 for part in results for one in part]  # fmt: skip
        assert sum(found) / len(found) < most, found


@pytest.mark.parametrize("name", ["gradient_direction", "batch_labels", "spectral"])
def test_gradients_of_nothing_are_no_crash(make_recording: Any, name: str) -> None:
    result = attacked(_gradients(_vanished)(make_recording), name)[1]
    assert result.advantage is None or result.advantage < 0.15


ALL, FIRST = slice(None), slice(1)
GRADIENTS = ("label_gradients", "gradient_norm", "gradient_direction", "batch_labels")
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
    (("contrastive_inversion",), NOISE, "no sum as the active decoded it", ALL, {}),
    (("contrastive_inversion",), RECONSTRUCTING, "gradients of another objective", ALL, {}),
    (("contrastive_inversion",), JOINT, "the active receives no sum of gradients", ALL, {}),
    (("model_completion",), _of("nothing", epochs=0), "set transcript.keep to first", ALL, {}),
    (("model_completion",), LEAK, "lower labels_per_class", ALL, {"labels_per_class": 200}),
    (("model_completion",), _of(_broken), "are not finite; there is nothing to fit", FIRST, {}),
    (GRADIENTS, LEAK, "apfed_c: a passive receives no gradient of the task loss", ALL, {}),
    (("spectral",), LEAK, "apfed_c: no label gradient moves", ALL, {}),
    (("label_gradients",), _gradients(_vanished), "either all rows' are the same", FIRST, {}),
    (("gradient_norm",), _gradients(linear_head), "two classes", FIRST, {}),
    (("gradient_norm",), _in_two_classes(_gradients(linear_head)), "has no threshold", FIRST,
     {"priors": False}),
    (("semi_supervised",), LEAK, "has no network to train further", ALL, {"own_network": True}),
    (("inverse_network", "unpaired_inversion", "representation_network"), NOISE,
     "apfed_c: passive-2 releases no representation to active", slice(-1, None), {}),
    (("inverse_network",), JOINT, "tvfl: active releases no representation to", FIRST, {}),
    (("inverse_network", "unpaired_inversion"), NOISE, "lower shadow_rows", FIRST,
     {"shadow_rows": 1000}),
    (("representation_network",), _through(*WIDE),
     "active is not told the encoder of passive-2: the recording holds none", SECOND, {}),
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
    first = attacked(recording, name, 1, **options)[:1]
    assert first[0].applicable
    assert attacked(recording, name, 1, **options)[:1] == first
    assert attacked(recording, name, 2, **options)[:1] != first


def test_what_the_own_features_tell_is_no_advantage(make_recording: Any) -> None:
    result = attacked(make_recording("nothing"), "inverse_network")[0]
    # passive-1 knows something of the label, and so of the active's features.
    assert max(result.baselines[f"{how} on x"]["r2"] for how in ("ridge", "mlp")) > 0.1
    assert result.baselines[result.baseline]["r2"] > 0.1
    assert abs(result.advantage) < 0.03
    assert result.baselines["mean of the shadow rows"]["r2"] == pytest.approx(0, abs=0.05)


def test_one_epoch_is_enough(make_recording: Any) -> None:
    recording = _gradients(_cross_entropy, epochs=1)(make_recording)
    result = attacked(recording, "label_gradients")[0]
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
