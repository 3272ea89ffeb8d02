"""Tests whether a plug-in has the properties on which privacy bounds rely.

For authors of objectives, labellers, guards, defences, tasks, label mechanisms, networks, attacks
and methods: call the function of the kind in a test of your own. The built-in entries are tested
with the same functions (`tests/secure_apfed/test_words.py`; attacks and methods in their contract
tests), and runs test the same properties on their first batch. Each function returns nothing, or
raises `PromiseError` with the class, the property and the measurement.

A test finds many violations and proves no property: a false claim about code that these rows do not
reach stays undetected.

Letters: B rows of a batch, D numbers of a row, U rows to vote on, n labelled ones, K classes.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.randomness import fresh_key
from secure_apfed.errors import PromiseError
from secure_apfed.labellers.kinds import Labeller, LinearLabeller
from secure_apfed.labellers.measured import check_votes, require_short
from secure_apfed.privacy.defences import GradientDefence, Leaving
from secure_apfed.privacy.measured import (
    check_graph,
    check_guard,
    check_loss,
    check_objective,
    check_row_wise,
    keep_random_state,
)
from secure_apfed.privacy.randomised_response import LabelMechanism, VoteResponse

if TYPE_CHECKING:
    from secure_apfed.config import Config
    from secure_apfed.data import VerticalData
    from secure_apfed.runs.outcome import RunResult

__all__ = [
    "check_attack",
    "check_declared",
    "check_defence",
    "check_graph",
    "check_guard",
    "check_label_mechanism",
    "check_labeller",
    "check_loss",
    "check_method",
    "check_objective",
    "check_row_wise",
    "check_sensitivity",
    "check_vote_response",
    "exchange_hidden_labels",
]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_SURE = 6.0  # standard errors
_MAX_WRONG = 1e-7  # how often a class that keeps its word is refused, at most
_PEOPLE = 60
_COLUMNS = 5
_CLASSES = 3
_SEEDS = 2
_QUESTIONS = 80
_ANSWERS = 20_000


def check_sensitivity(
    contribute: Callable[[Floats], Any], rows: Sequence[Any], claimed: float, *, name: str
) -> None:
    """Refuse a claimed sensitivity that two inputs exceed.

    Args:
        contribute: maps one input to the numbers that get noise.
        rows: possible inputs of one person; extreme ones find the most faults.
        claimed: how far two results lie apart at most, L2.
        name: the class that claims it, for the message.

    Raises:
        PromiseError: two results lie further apart.

    Examples:
        >>> rows = [np.array([3.0, 4.0]), np.array([-3.0, -4.0])]
        >>> check_sensitivity(lambda row: row / np.linalg.norm(row), rows, 2.0, name="unit rows")
    """
    results = [np.asarray(contribute(row), dtype=np.float64).ravel() for row in rows]
    pairs = itertools.combinations(results, 2)
    distance = max((float(np.linalg.norm(first - second)) for first, second in pairs), default=0.0)
    if not distance <= claimed * (1 + 1e-9):
        raise PromiseError(
            f"{name} says that one person moves its numbers by {claimed:.6g} at most (L2), and "
            f"two of {len(rows)} inputs lie {distance:.6g} apart; clip what is contributed, or "
            "state the larger number"
        )


def check_labeller(labeller: Labeller) -> None:
    """Refuse a labeller that breaks `inductive`, `signed`, `linear`, `model` or the norm of rows.

    It labels synthetic clusters of people, and votes on them; see `check_votes` for the replaced
    rows. If `model` has a finite mu, the test distinguishes two tables that differ in one labelled
    person by the votes on others, over 80 requests: missing noise is found, slightly weak noise is
    not.

    Raises:
        PromiseError: names the class, the property and the measurement.
    """
    for seed in range(_SEEDS):
        features_UF, labelled_n, labels_n = _draw_people(seed)
        for is_judge in (True, False):
            check_votes(labeller, features_UF, labelled_n, labels_n, _CLASSES, is_judge=is_judge)
        if labeller.linear:
            _check_linear(labeller, features_UF, labelled_n)
    if math.isfinite(labeller.model.mu):
        _check_model(labeller)


def _draw_people(seed: int) -> tuple[Floats, Integers, Integers]:
    """Return features of random people in one cluster a class, and the positions and labels of
    some.
    """
    generator = np.random.default_rng(seed)
    classes_U = generator.permutation(np.arange(_PEOPLE) % _CLASSES)
    centres_KF = 3 * generator.standard_normal((_CLASSES, _COLUMNS))
    features_UF = centres_KF[classes_U] + generator.standard_normal((_PEOPLE, _COLUMNS))
    labelled_n = generator.permutation(_PEOPLE)[:12]
    return features_UF, labelled_n, classes_U[labelled_n]


def _check_linear(labeller: Labeller, features_UF: Floats, labelled_n: Integers) -> None:
    """Raise PromiseError unless votes for a class add up over the labels that name it.

    `features_UF`: rows (U, F).
    """
    name = type(labeller).__name__
    if not isinstance(labeller, LinearLabeller):
        raise PromiseError(f"{name} says linear = True, and is no LinearLabeller with a matrix")
    matrix_Un = labeller.compute_matrix(features_UF, labelled_n)
    require_short(labeller, matrix_Un)
    generator = np.random.default_rng(0)
    for _ in range(3):
        labels_n = generator.integers(0, _CLASSES, len(labelled_n))
        votes_UK = labeller.label_rows(features_UF, labelled_n, labels_n, _CLASSES)
        distance = float(np.abs(votes_UK - matrix_Un @ np.eye(_CLASSES)[labels_n]).max())
        if not distance <= 1e-9:
            raise PromiseError(
                f"{name} says linear = True, but its votes lie {distance:.3g} from its matrix "
                "times the labels"
            )


def _check_model(labeller: Labeller) -> None:
    """Raise PromiseError if votes on others reveal a labelled person's features better than mu
    allows.
    """
    name = type(labeller).__name__
    mu = labeller.model.mu
    features_UF, labelled_n, labels_n = _draw_people(0)
    two_n = np.array([0, int((labels_n != labels_n[0]).argmax())])  # of few, one decides most
    labelled_n = labelled_n[two_n]
    labels_n = labels_n[two_n]
    other_UF = features_UF.copy()
    other_UF[labelled_n[0]] *= -1
    others_U = np.setdiff1d(np.arange(_PEOPLE), labelled_n[:1])

    def collect_votes(rows_UF: Floats) -> Floats:
        """Return votes on the other people, by question.

        `rows_UF`: rows (U, F).
        """
        labellers = (labeller.for_question(b"measured %d" % number) for number in range(_QUESTIONS))
        return np.stack(
            [
                asked_labeller.label_rows(rows_UF, labelled_n, labels_n, _CLASSES)[others_U].ravel()
                for asked_labeller in labellers
            ]
        )

    votes_QV = collect_votes(features_UF)
    other_votes_QV = collect_votes(other_UF)
    if np.ptp(votes_QV, axis=0).max() <= 1e-12:
        raise PromiseError(
            f"{name} says that its model is private ({labeller.model}), but its votes on "
            f"{_QUESTIONS} questions are the same: there is no noise on what it fitted"
        )
    half = _QUESTIONS // 2
    along_V = votes_QV[:half].mean(axis=0) - other_votes_QV[:half].mean(axis=0)
    projected_Q = votes_QV @ along_V
    other_projected_Q = other_votes_QV @ along_V
    cut = (np.median(projected_Q[:half]) + np.median(other_projected_Q[:half])) / 2
    right = int((projected_Q[half:] > cut).sum())
    wrong = int((other_projected_Q[half:] > cut).sum())
    proved = _bound_mu(right, wrong, _QUESTIONS - half)
    if proved > mu:
        raise PromiseError(
            f"{name} says that its model is private ({labeller.model}, mu {mu:.3g}), but votes on "
            f"others tell one labelled person's features as well as mu {proved:.3g} at least"
        )


def _bound_mu(right: int, wrong: int, questions: int) -> float:
    """Return a lower bound of mu (Clopper and Pearson 1934; Dong, Roth and Su 2022, Definition
    2.6).

    `right`: questions answered right, and wrong.
    """
    beta = scipy.stats.beta.ppf
    right_rate = float(beta(_MAX_WRONG, right, questions - right + 1)) if right else 0.0
    wrong_rate = (
        float(beta(1 - _MAX_WRONG, wrong + 1, questions - wrong)) if wrong < questions else 1.0
    )
    normal = scipy.special.ndtri
    return float(normal(right_rate) - normal(wrong_rate)) if right_rate > wrong_rate else 0.0


def check_defence(make: Callable[[], GradientDefence]) -> None:
    """Refuse a defence that `protects` nothing, or whose noise does not come from its party's key.

    The defence must change some gradient; give the same result for the same gradient and step, so
    that a resumed run repeats; keep shape and type; and not modify its input.

    Args:
        make: builds one, always with the same noise source.

    Raises:
        PromiseError: names the class and the measurement.
    """
    defence = make()
    name = type(defence).__name__
    if not defence.protects:
        raise PromiseError(
            f"{name} says in `protects` nothing that it changes, so nobody runs it; say "
            '"contributions", "returned gradients" or both'
        )
    generator = torch.Generator().manual_seed(0)
    gradient_BD = torch.randn(16, 6, generator=generator, device="cpu")
    labels_B = torch.arange(16) % 2
    gradient_BD += 2.0 * labels_B[:, None]
    for released in defence.protects:
        knows = labels_B if released == "returned gradients" else None
        before_BD = gradient_BD.clone()
        outputs = [
            _run_defence(make(), gradient_BD, Leaving(3, "peer", knows), seed) for seed in (0, 1)
        ]
        if not torch.equal(gradient_BD, before_BD):
            raise PromiseError(f"{name} writes to the gradient that it was given; return another")
        if any(
            output.shape != before_BD.shape or output.dtype != before_BD.dtype for output in outputs
        ):
            raise PromiseError(
                f"{name} turns a gradient of {before_BD.dtype} of shape {tuple(before_BD.shape)} "
                f"into {outputs[0].dtype} of shape {tuple(outputs[0].shape)}"
            )
        if not torch.equal(*outputs):
            raise PromiseError(
                f"{name} sends another gradient each time: draw from the `noise` that it is built "
                "with, never from torch or NumPy"
            )
        if torch.equal(outputs[0], before_BD):
            raise PromiseError(
                f"{name} says that it protects {released}, and lets them leave as they came; take "
                "the word out of `protects`, or change them"
            )


def _run_defence(
    defence: GradientDefence, gradient_BD: Tensor, leaving: Leaving, seed: int
) -> Tensor:
    """Run a defence with seeded global generators, which it must not use.

    `gradient_BD`: the batch's gradients.
    """
    with keep_random_state():
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - what a defence must not read
        return defence.protect_gradient(gradient_BD, leaving)


def check_label_mechanism(mechanism: LabelMechanism) -> None:
    """Refuse a label mechanism whose answers reveal more of a label than `epsilon` allows.

    20,000 labels of each class are randomised, without a prior and, if there are stages, with one;
    for any two labels, the probabilities of each answer may differ by the factor e^epsilon. An
    `unsafe` mechanism has no guarantee and is not tested.

    Raises:
        PromiseError: names the class and the measurement.
    """
    if math.isinf(mechanism.epsilon):
        return
    name = type(mechanism).__name__
    classes = mechanism.classes
    if mechanism.unsafe:
        raise PromiseError(
            f"{name} says epsilon {mechanism.epsilon:g}, and unsafe = True; a mechanism that "
            "protects says unsafe = False"
        )
    labels_N = torch.arange(classes).repeat_interleave(_ANSWERS)
    priors: list[Tensor | None] = [None]
    if mechanism.stages > 1:
        weights_K = torch.arange(1, classes + 1, dtype=torch.float64)
        priors.append((weights_K / weights_K.sum()).expand(len(labels_N), classes))
    for prior_NK in priors:
        answers_N = mechanism.randomise_labels(labels_N, key=fresh_key(), prior_NK=prior_NK)
        counts = _count_answers(answers_N.numpy().reshape(classes, _ANSWERS), classes)
        _require_odds(counts, mechanism.epsilon, name)


def check_vote_response(response: VoteResponse) -> None:
    """Refuse randomised answers for votes, or for no vote, that reveal more of a vote than
    `epsilon` allows.
    """
    classes = response.classes
    votes_KK = np.vstack([np.eye(classes), np.zeros((1, classes))])
    votes_UK = np.repeat(votes_KK, _ANSWERS, axis=0)
    answers_U = response.randomise_votes(votes_UK, key=fresh_key(), about=b"measured")
    counts = _count_answers(answers_U.reshape(classes + 1, _ANSWERS), classes)
    _require_odds(counts, response.epsilon, type(response).__name__)


def _count_answers(answers_YA: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """Return how often each class was answered, (true classes, answered classes)."""
    return np.stack([np.bincount(answers_A, minlength=classes) for answers_A in answers_YA])


def _require_odds(counts_YK: NDArray[np.int64], epsilon: float, name: str) -> None:
    """Compare each answer's share under any two inputs, with a margin for chance.

    `counts_YK`: answers by true label.
    """
    shares_YK = counts_YK / counts_YK.sum(axis=1, keepdims=True)
    errors_YK = np.sqrt(shares_YK * (1 - shares_YK) / counts_YK.sum(axis=1, keepdims=True))
    least_K = np.clip(shares_YK - _SURE * errors_YK, 0, None).max(axis=0)
    # Of an answer that never came, as if it had come a few times.
    smallest = _SURE**2 / counts_YK.sum(axis=1).max()
    most_K = np.maximum(shares_YK + _SURE * errors_YK, smallest).min(axis=0)
    with np.errstate(divide="ignore"):
        proved = float(np.log(least_K / most_K).max())
    if proved > epsilon:
        raise PromiseError(
            f"{name} says epsilon {epsilon:g}, but some answer comes e^{proved:.3g} times as often "
            "under one input as under another, at least"
        )


def check_attack(name: str, **how: Any) -> None:
    """Refuse an attack that misses a planted leak, or finds one where nothing leaked.

    Args:
        name: of ours, an installed package's, or package.module:Name.
        how: `options`, `planted` and `quiet`, as `apfed_attacks.testing.check_attack` takes them.

    Raises:
        PromiseError: names the attack, and what it found or missed.
    """
    from apfed_attacks.testing import check_attack as check

    check(name, **how)


def check_method(config: "Config", folder: Path) -> None:
    """Refuse a method that contradicts its settings, or whose runs are not reproducible.

    A short run is executed three times in one process: uninterrupted; with exchanged values of the
    hidden labels; and interrupted half-way and resumed.

    Args:
        config: of a small built-in set, with `party_seeds: shared_for_comparison`; a guard's noise
            is "reproducible_insecure".
        folder: an empty one, for the runs.

    Raises:
        PromiseError: names the method, and what differs.
    """
    from secure_apfed.data import load_data
    from secure_apfed.runs.run import run

    steps = list[int]()
    data_settings = config.data.model_copy(update={"labelled": 20})
    config = config.model_copy(update={"data": data_settings})
    data = load_data(data_settings, seed=config.seed)
    result = run(
        config, folder / "whole", data=data, on_progress=lambda now: steps.append(now.step)
    )
    name = config.method.name
    check_declared(config, result)
    lying = exchange_hidden_labels(data)
    if run(config, None, data=lying).accuracy != result.accuracy:
        raise PromiseError(
            f"{name} learns from labels that nobody was told: with those of other training rows "
            "exchanged its accuracy is another; read data.labelled_rows alone"
        )
    _check_resumed(config, folder, result, at_step=steps[len(steps) // 2])


def check_declared(config: "Config", result: "RunResult") -> None:
    """Refuse a method whose declared facts differ from the messages and results of its run.

    Args:
        result: of a run in memory with these settings, whose recording holds what was sent.

    Raises:
        PromiseError: names the method, the fact, and what was seen.
    """
    from secure_apfed.exchange import Kind
    from secure_apfed.methods import METHODS

    method = config.method
    recording = result.recording
    active = recording.data.active.name
    sent = {(flow.kind, flow.sender == active) for flow in recording.transcript.flows}
    senders = {by_active for kind, by_active in sent if kind is Kind.REPRESENTATIONS}
    sides = {True: "active", False: "passives"}
    is_encoding = method.representations_from == "passives" or method.sums_representations
    facts: dict[str, tuple[Any, Any]] = {
        "representations_from": (
            method.representations_from,
            " and ".join(sides[by_active] for by_active in sorted(senders)) or None,
        ),
        "has_passives": (method.has_passives, bool(sent)),
        "aligns": (method.has_passives and method.aligns, (Kind.ALIGNMENT, True) in sent),
        "aggregates": (method.aggregates, (Kind.CONTRIBUTION, False) in sent),
        "sends_labels": (method.sends_labels, (Kind.LABELS, True) in sent),
        "opens_votes is randomised": (
            method.opens_votes == "randomised",
            (Kind.VOTES, False) in sent,
        ),
        "returns_gradients": (method.returns_gradients, (Kind.GRADIENTS, True) in sent),
        "predicts_alone": (method.predicts_alone, recording.model is not None),
        "passives encode": (is_encoding, bool(recording.encoders)),
    }
    for fact, (declared, seen) in facts.items():
        if declared != seen:
            raise PromiseError(
                f"{method.name} says {fact} = {declared}, and its run shows {seen}; change its "
                "settings class, or what its roles send"
            )
    headline = METHODS[method.name].headline
    if headline not in result.accuracy:
        raise PromiseError(
            f"{method.name} measures {', '.join(result.accuracy)}, and not {headline}, which is "
            "its headline; score it under that name"
        )


def exchange_hidden_labels(data: "VerticalData") -> "VerticalData":
    """Return the data with other labels for the training rows whose labels are hidden from
    training.
    """
    labels = data.active.labels
    if labels is None:
        raise PromiseError("whether hidden labels are read is measured where rows have labels")
    hidden = data.train_rows[~torch.isin(data.train_rows, data.labelled_rows)]
    other = labels.clone()
    other[hidden] = len(data.classes) - 1 - labels[hidden]
    return replace(data, table=replace(data.active, labels=other))


def _check_resumed(
    config: "Config", folder: Path, uninterrupted: "RunResult", *, at_step: int
) -> None:
    """Check that a run interrupted at a step can be resumed, and gives the same result."""
    from secure_apfed.runs.run import run

    def stop(progress: Any) -> None:
        if progress.step == at_step:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        run(config, folder / "broken", on_progress=stop)
    resumed = run(config, folder / "broken", resume=True)
    for fact in ("accuracy", "contributions"):
        expected = getattr(uninterrupted, fact)
        actual = getattr(resumed, fact)
        if expected != actual:
            raise PromiseError(
                f"{config.method.name}: a run that was broken off at step {at_step} and resumed "
                f"has {fact} {actual}, and one in one go {expected}; put all that a step needs "
                "into `tensors` of its roles"
            )
