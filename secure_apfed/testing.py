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

_MARGIN_STANDARD_ERRORS = 6.0  # standard errors that are allowed for chance
_MAX_FALSE_REFUSAL = 1e-7  # largest probability that a class with a true claim is refused
# The synthetic people that labellers vote on.
_N_PEOPLE = 60
_N_COLUMNS = 5
_N_CLASSES = 3
_N_SEEDS = 2
_N_REQUESTS = 80  # requests of votes, each with fresh noise
_ANSWERS_PER_LABEL = 20_000  # randomised answers for each true label


def check_sensitivity(
    contribute: Callable[[Floats], Any], rows: Sequence[Any], claimed: float, *, name: str
) -> None:
    """Refuse a claimed sensitivity that two inputs exceed.

    Args:
        contribute: maps one input to the numbers to which noise is added afterwards.
        rows: possible inputs of one person; extreme ones find the most faults.
        claimed: the largest L2 distance between the numbers of two inputs.
        name: the class that claims it, for the error.

    Raises:
        PromiseError: two results lie further apart.

    Examples:
        >>> rows = [np.array([3.0, 4.0]), np.array([-3.0, -4.0])]
        >>> check_sensitivity(lambda row: row / np.linalg.norm(row), rows, 2.0, name="unit rows")
    """
    number_vectors = [np.asarray(contribute(row), dtype=np.float64).ravel() for row in rows]
    vector_pairs = itertools.combinations(number_vectors, 2)
    largest_distance = max(
        (float(np.linalg.norm(first - second)) for first, second in vector_pairs), default=0.0
    )
    if not largest_distance <= claimed * (1 + 1e-9):
        raise PromiseError(
            f"{name} says that one person moves its numbers by {claimed:.6g} at most (L2), and "
            f"two of {len(rows)} inputs lie {largest_distance:.6g} apart; clip what is "
            "contributed, or state the larger number"
        )


def check_labeller(labeller: Labeller) -> None:
    """Refuse a labeller that breaks `inductive`, `signed`, `linear`, `model` or the norm of rows.

    The labeller (the rule by which a passive votes on rows) is fitted to synthetic people in one
    cluster for each class, and votes on them. `check_votes` tests the first properties by replacing
    rows. If `model` has a finite mu (of Gaussian differential privacy), the test tries to tell two
    tables that differ in one labelled person apart, by the votes on others over 80 requests. It
    finds missing noise, but not slightly weak noise.

    Raises:
        PromiseError: names the class, the property and the measurement.
    """
    for seed in range(_N_SEEDS):
        features_UF, labelled_n, labels_n = _draw_people(seed)
        # With and without votes on labelled rows that do not use these rows' own labels.
        for is_judge in (True, False):
            check_votes(
                labeller,
                features_UF,
                labelled_n,
                labels_n,
                _N_CLASSES,
                is_without_own_label=is_judge,
            )
        if labeller.linear:
            _check_linear(labeller, features_UF, labelled_n)
    if math.isfinite(labeller.model.mu):
        _check_model_privacy(labeller)


def _draw_people(seed: int) -> tuple[Floats, Integers, Integers]:
    """Draw random people, one cluster for each class.

    Returns the features of U people, (U, F), and the positions and labels, (n,), of the n people
    that have a label.
    """
    generator = np.random.default_rng(seed)
    classes_U = generator.permutation(np.arange(_N_PEOPLE) % _N_CLASSES)
    centres_KF = 3 * generator.standard_normal((_N_CLASSES, _N_COLUMNS))
    features_UF = centres_KF[classes_U] + generator.standard_normal((_N_PEOPLE, _N_COLUMNS))
    labelled_n = generator.permutation(_N_PEOPLE)[:12]
    return features_UF, labelled_n, classes_U[labelled_n]


def _check_linear(labeller: Labeller, features_UF: Floats, labelled_n: Integers) -> None:
    """Raise PromiseError unless the votes are linear in the labels: its matrix (U, n) times the
    one-hot labels (n, K).

    `features_UF`: features of U people, (U, F). `labelled_n`: positions of the n labelled ones.
    """
    name = type(labeller).__name__
    if not isinstance(labeller, LinearLabeller):
        raise PromiseError(f"{name} says linear = True, and is no LinearLabeller with a matrix")
    matrix_Un = labeller.compute_matrix(features_UF, labelled_n)
    require_short(labeller, matrix_Un)  # the norm of its rows, on which a bound relies
    generator = np.random.default_rng(0)
    for _ in range(3):
        labels_n = generator.integers(0, _N_CLASSES, len(labelled_n))
        votes_UK = labeller.label_rows(features_UF, labelled_n, labels_n, _N_CLASSES)
        largest_difference = float(
            np.abs(votes_UK - matrix_Un @ np.eye(_N_CLASSES)[labels_n]).max()
        )
        if not largest_difference <= 1e-9:
            raise PromiseError(
                f"{name} says linear = True, but its votes lie {largest_difference:.3g} from its "
                "matrix times the labels"
            )


def _check_model_privacy(labeller: Labeller) -> None:
    """Raise PromiseError if votes on others reveal a labelled person's features better than mu
    allows.

    Two tables differ in one labelled person, whose features change their signs in the second. The
    labeller votes on everybody else, once for each of Q requests with fresh noise. A classifier
    tells the tables apart by these votes: half of the requests fit it, the others score it.
    """
    name = type(labeller).__name__
    mu = labeller.model.mu
    features_UF, labelled_n, labels_n = _draw_people(0)
    # Only two labelled people, of different classes: one of few influences the model most.
    first_of_two_classes_n = np.array([0, int((labels_n != labels_n[0]).argmax())])
    labelled_n = labelled_n[first_of_two_classes_n]
    labels_n = labels_n[first_of_two_classes_n]
    changed_UF = features_UF.copy()
    changed_UF[labelled_n[0]] *= -1
    unchanged_positions = np.setdiff1d(np.arange(_N_PEOPLE), labelled_n[:1])

    def collect_votes(rows_UF: Floats) -> Floats:
        """Return the votes on all people but the changed one, for each request, (Q, V): V class
        scores.

        `rows_UF`: features of all people, (U, F).
        """
        votes = []
        for request_number in range(_N_REQUESTS):
            labeller_of_request = labeller.for_request(b"measured %d" % request_number)
            votes_UK = labeller_of_request.label_rows(rows_UF, labelled_n, labels_n, _N_CLASSES)
            votes.append(votes_UK[unchanged_positions].ravel())
        return np.stack(votes)

    votes_QV = collect_votes(features_UF)
    changed_votes_QV = collect_votes(changed_UF)
    largest_spread = np.ptp(votes_QV, axis=0).max()  # of one score over the requests
    if largest_spread <= 1e-12:
        raise PromiseError(
            f"{name} says that its model is private ({labeller.model}), but its votes on "
            f"{_N_REQUESTS} questions are the same: there is no noise on what it fitted"
        )
    n_fitting_requests = _N_REQUESTS // 2
    # Votes are projected on the difference of the two tables' means, and cut half-way.
    direction_V = votes_QV[:n_fitting_requests].mean(axis=0) - changed_votes_QV[
        :n_fitting_requests
    ].mean(axis=0)
    projected_Q = votes_QV @ direction_V
    changed_projected_Q = changed_votes_QV @ direction_V
    threshold = (
        np.median(projected_Q[:n_fitting_requests])
        + np.median(changed_projected_Q[:n_fitting_requests])
    ) / 2
    true_positives = int((projected_Q[n_fitting_requests:] > threshold).sum())
    false_positives = int((changed_projected_Q[n_fitting_requests:] > threshold).sum())
    measured_mu = _bound_mu(true_positives, false_positives, _N_REQUESTS - n_fitting_requests)
    if measured_mu > mu:
        raise PromiseError(
            f"{name} says that its model is private ({labeller.model}, mu {mu:.3g}), but votes on "
            f"others tell one labelled person's features as well as mu {measured_mu:.3g} at least"
        )


def _bound_mu(true_positives: int, false_positives: int, trials_per_table: int) -> float:
    """Return a lower bound of mu-Gaussian differential privacy from a test's hits and false alarms.

    It is the normal quantile of the true positive rate minus that of the false positive rate (Dong,
    Roth and Su 2022, Definition 2.6). Both rates are replaced by their confidence limits (Clopper
    and Pearson 1934), so that chance rarely makes the bound too high. 0: nothing is proved.

    `trials_per_table`: number of trials with each of the two tables.
    """
    beta_quantile = scipy.stats.beta.ppf
    lowest_true_rate = 0.0
    if true_positives:
        lowest_true_rate = float(
            beta_quantile(_MAX_FALSE_REFUSAL, true_positives, trials_per_table - true_positives + 1)
        )
    highest_false_rate = 1.0
    if false_positives < trials_per_table:
        highest_false_rate = float(
            beta_quantile(
                1 - _MAX_FALSE_REFUSAL, false_positives + 1, trials_per_table - false_positives
            )
        )
    if lowest_true_rate <= highest_false_rate:
        return 0.0
    normal_quantile = scipy.special.ndtri
    return float(normal_quantile(lowest_true_rate) - normal_quantile(highest_false_rate))


def check_defence(make: Callable[[], GradientDefence]) -> None:
    """Refuse a defence that `protects` nothing, or whose noise does not come from its party's key.

    The defence must change some gradient; give the same result for the same gradient and step, so
    that a resumed run repeats; keep shape and type; and not modify its input.

    Args:
        make: builds the defence, always with the same noise source.

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
    gradient_BD += 2.0 * labels_B[:, None]  # the gradients differ by class, as real ones do
    for protected_kind in defence.protects:
        # Only the active, which returns gradients, knows the labels.
        known_labels = labels_B if protected_kind == "returned gradients" else None
        circumstances = Leaving(step=3, receiver="peer", labels=known_labels)
        before_BD = gradient_BD.clone()
        # Only the global generators differ; a defence that draws from them changes its output.
        outputs_under_two_seeds = [
            _run_defence(make(), gradient_BD, circumstances, seed) for seed in (0, 1)
        ]
        if not torch.equal(gradient_BD, before_BD):
            raise PromiseError(f"{name} writes to the gradient that it was given; return another")
        if any(
            output.shape != before_BD.shape or output.dtype != before_BD.dtype
            for output in outputs_under_two_seeds
        ):
            raise PromiseError(
                f"{name} turns a gradient of {before_BD.dtype} of shape {tuple(before_BD.shape)} "
                f"into {outputs_under_two_seeds[0].dtype} of shape "
                f"{tuple(outputs_under_two_seeds[0].shape)}"
            )
        if not torch.equal(*outputs_under_two_seeds):
            raise PromiseError(
                f"{name} sends another gradient each time: draw from the `noise` that it is built "
                "with, never from torch or NumPy"
            )
        if torch.equal(outputs_under_two_seeds[0], before_BD):
            raise PromiseError(
                f"{name} says that it protects {protected_kind}, and lets them leave as they came; "
                "take the word out of `protects`, or change them"
            )


def _run_defence(
    defence: GradientDefence, gradient_BD: Tensor, leaving: Leaving, seed: int
) -> Tensor:
    """Return what a defence makes of a gradient, while torch's and NumPy's global generators, which
    it must not use, have this seed.

    `gradient_BD`: gradients of B rows, D numbers each. `leaving`: step and receiver of the
    gradient, with labels if the party knows them.
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
    labels_N = torch.arange(classes).repeat_interleave(_ANSWERS_PER_LABEL)
    priors: list[Tensor | None] = [None]
    if mechanism.stages > 1:
        weights_K = torch.arange(1, classes + 1, dtype=torch.float64)
        priors.append((weights_K / weights_K.sum()).expand(len(labels_N), classes))
    for prior_NK in priors:
        answers_N = mechanism.randomise_labels(labels_N, key=fresh_key(), prior_NK=prior_NK)
        answers_KA = answers_N.numpy().reshape(classes, _ANSWERS_PER_LABEL)
        _require_bounded_odds(_count_answers(answers_KA, classes), mechanism.epsilon, name)


def check_vote_response(response: VoteResponse) -> None:
    """Refuse a randomised response for votes whose answers reveal more of a vote than `epsilon`
    allows.

    A vote for each class, and no vote (all scores 0), are randomised 20,000 times each.

    Raises:
        PromiseError: names the class and the measurement.
    """
    classes = response.classes
    no_vote = np.zeros((1, classes))
    inputs_YK = np.vstack([np.eye(classes), no_vote])
    votes_UK = np.repeat(inputs_YK, _ANSWERS_PER_LABEL, axis=0)
    answers_U = response.randomise_votes(votes_UK, key=fresh_key(), about=b"measured")
    answers_YA = answers_U.reshape(classes + 1, _ANSWERS_PER_LABEL)
    _require_bounded_odds(
        _count_answers(answers_YA, classes), response.epsilon, type(response).__name__
    )


def _count_answers(answers_YA: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """Return how often each input got each class as its answer, (Y, K).

    `answers_YA`: A answered classes for each of Y inputs. `classes`: K.
    """
    return np.stack([np.bincount(answers_A, minlength=classes) for answers_A in answers_YA])


def _require_bounded_odds(counts_YK: NDArray[np.int64], epsilon: float, name: str) -> None:
    """Raise PromiseError if some answer is more than e^epsilon times as probable under one input as
    under another.

    Probabilities are estimated with a margin of 6 standard errors, so that chance refuses no true
    claim.

    `counts_YK`: how often each of Y inputs got each of K answers. `name`: the class that claims
    epsilon, for the error.
    """
    totals_Y1 = counts_YK.sum(axis=1, keepdims=True)
    shares_YK = counts_YK / totals_Y1
    errors_YK = np.sqrt(shares_YK * (1 - shares_YK) / totals_Y1)
    # For each answer: the highest share that some input surely has, and the lowest possible one.
    highest_K = np.clip(shares_YK - _MARGIN_STANDARD_ERRORS * errors_YK, 0, None).max(axis=0)
    # An answer that never came has a standard error of 0, and may still have a small probability.
    smallest_share = _MARGIN_STANDARD_ERRORS**2 / totals_Y1.max()
    lowest_K = np.maximum(shares_YK + _MARGIN_STANDARD_ERRORS * errors_YK, smallest_share).min(
        axis=0
    )
    with np.errstate(divide="ignore"):
        measured_epsilon = float(np.log(highest_K / lowest_K).max())
    if measured_epsilon > epsilon:
        raise PromiseError(
            f"{name} says epsilon {epsilon:g}, but some answer comes e^{measured_epsilon:.3g} "
            "times as often under one input as under another, at least"
        )


def check_attack(name: str, **how: Any) -> None:
    """Refuse an attack that misses a planted leak, or finds one where nothing leaked.

    Args:
        name: name of the attack: a built-in one, an installed package's, or package.module:Name.
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
        config: settings of a run on a small built-in data set. They must have
            `party_seeds: shared_for_comparison` and, with a guard, reproducible noise
            (`guard.noise: reproducible_insecure`), since runs are compared.
        folder: an empty folder, for the runs.

    Raises:
        PromiseError: names the method, and what differs.
    """
    from secure_apfed.data import load_data
    from secure_apfed.runs.run import run

    completed_steps = list[int]()
    data_settings = config.data.model_copy(update={"labelled": 20})
    config = config.model_copy(update={"data": data_settings})
    data = load_data(data_settings, seed=config.seed)
    result = run(
        config,
        folder / "whole",
        data=data,
        on_progress=lambda now: completed_steps.append(now.step),
    )
    name = config.method.name
    check_declared(config, result)
    # A method that reads no hidden labels gives the same result with others.
    data_with_exchanged_labels = exchange_hidden_labels(data)
    if run(config, None, data=data_with_exchanged_labels).accuracy != result.accuracy:
        raise PromiseError(
            f"{name} learns from labels that nobody was told: with those of other training rows "
            "exchanged its accuracy is another; read data.labelled_rows alone"
        )
    _check_resumed(
        config, folder, result, interruption_step=completed_steps[len(completed_steps) // 2]
    )


def check_declared(config: "Config", result: "RunResult") -> None:
    """Refuse a method whose declared facts differ from the messages and results of its run.

    Args:
        config: settings of the run, with the method.
        result: result of a run in memory with these settings, whose recording holds what was sent.

    Raises:
        PromiseError: names the method, the fact, and what was seen.
    """
    from secure_apfed.exchange import Kind
    from secure_apfed.methods import METHODS

    method = config.method
    recording = result.recording
    active = recording.data.active.name
    # Kinds of messages that were sent, each with whether the active sent it.
    sent_kinds = {(flow.kind, flow.sender == active) for flow in recording.transcript.flows}
    representation_senders = {
        by_active for kind, by_active in sent_kinds if kind is Kind.REPRESENTATIONS
    }
    side_titles = {True: "active", False: "passives"}
    is_encoding = method.representation_sender == "passives" or method.has_representation_sum
    # fact -> what the method declares, and what its run shows
    declared_and_seen_by_fact: dict[str, tuple[Any, Any]] = {
        "representation_sender": (
            method.representation_sender,
            " and ".join(side_titles[by_active] for by_active in sorted(representation_senders))
            or None,
        ),
        "has_passives": (method.has_passives, bool(sent_kinds)),
        "needs_alignment": (
            method.has_passives and method.needs_alignment,
            (Kind.ALIGNMENT, True) in sent_kinds,
        ),
        "needs_aggregator": (method.needs_aggregator, (Kind.CONTRIBUTION, False) in sent_kinds),
        "has_revealed_labels": (method.has_revealed_labels, (Kind.LABELS, True) in sent_kinds),
        "vote_protocol is randomised": (
            method.vote_protocol == "randomised",
            (Kind.VOTES, False) in sent_kinds,
        ),
        "has_returned_gradients": (
            method.has_returned_gradients,
            (Kind.GRADIENTS, True) in sent_kinds,
        ),
        "can_predict_locally": (method.can_predict_locally, recording.model is not None),
        "passives encode": (is_encoding, bool(recording.encoders)),
    }
    for fact, (declared, seen) in declared_and_seen_by_fact.items():
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
    training, to test whether a method reads them.

    Class k of K becomes class K - 1 - k. Raises PromiseError: the rows have no labels.
    """
    labels = data.active.labels
    if labels is None:
        raise PromiseError("whether hidden labels are read is measured where rows have labels")
    hidden_rows = data.train_rows[~torch.isin(data.train_rows, data.labelled_rows)]
    exchanged_labels = labels.clone()
    exchanged_labels[hidden_rows] = len(data.classes) - 1 - labels[hidden_rows]
    return replace(data, table=replace(data.active, labels=exchanged_labels))


def _check_resumed(
    config: "Config", folder: Path, uninterrupted: "RunResult", *, interruption_step: int
) -> None:
    """Interrupt a run at a step, resume it, and compare it with the same run without interruption.

    `folder`: the interrupted run is stored below it. Raises PromiseError: accuracy or privacy costs
    differ.
    """
    from secure_apfed.runs.run import run

    def stop(progress: Any) -> None:
        """Interrupt the run as Ctrl-C does."""
        if progress.step == interruption_step:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        run(config, folder / "broken", on_progress=stop)
    resumed = run(config, folder / "broken", resume=True)
    for fact in ("accuracy", "contributions"):
        expected = getattr(uninterrupted, fact)
        actual = getattr(resumed, fact)
        if expected != actual:
            raise PromiseError(
                f"{config.method.name}: a run that was broken off at step {interruption_step} and "
                f"resumed has {fact} {actual}, and one in one go {expected}; put all that a step "
                "needs into `tensors` of its roles"
            )
