"""Attacks in live runs of APFed and joint training, and in intersections, against each rule.

Rules are checks of the protocol that the passives enforce. A4 to A10 number the attacks.

Letters: N people, M passives, D dimensions of a representation, x features, z representations.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.features.contrastive_inversion import SummedStep, recover_representations
from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.features.hijack import FeatureSpaceHijack, ReversedHijack
from apfed_attacks.features.isolation import Isolation
from apfed_attacks.interface import AttackResult
from apfed_attacks.live.runs import (
    ALL_RULES,
    LiveRun,
    Rule,
    mount_answering_attack,
    mount_live_attack,
)
from apfed_attacks.live.stuffing import IdTables, play_stuffing
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.recorded import make_view, reveal_features
from apfed_attacks.run import run_attacks
from apfed_attacks.scoring import compute_r2
from apfed_attacks.view import Knowledge, PlayedAttack, iter_batches
from apfed_experiments.finished import load_finished_run
from apfed_experiments.summary import Interval, Row
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.alignment.records import AlignmentHistory
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.runs.run import run
from secure_apfed.settings import ReconstructionSettings
from secure_apfed.settings.alignment import AlignmentSettings

# A seed of Fashion-MNIST takes longer than all of digits.
_INVERSION_SEEDS_BY_DATA = {"digits-in-6": range(3), "fashion_mnist-in-6": range(1)}
_INVERTED_STEPS = 3
_ITERATIONS = 300
_NOISE_SEEDS = range(5)  # under noise
_NOISE_PASSIVE_COUNT = 3
_HONEST_ROW_SHARE = 0.52
_NOISE_SETTINGS: tuple[Mapping[str, float] | None, ...] = (
    None,
    {"sigma": 0.01},
    {"sigma": 0.1},
    {"epsilon": 8.0},
)
Role: TypeAlias = Literal["active", "passive"]
_STUFFING_CASES = (
    # limits, agreed size, minimum, intersections, runs with a peer, overstuffed
    ("none", 10_000, 2, 1, None, False),
    ("size", 550, 2, 1, None, False),
    ("size, exceeded", 550, 2, 1, None, True),
    ("size, repeated", 550, 2, 20, None, False),
    ("size and 2 runs", 550, 2, 20, 2, False),
    ("minimum above the overlap", 10_000, 550, 1, None, False),
)
_STUFFING_ROLES_AND_PROTOCOLS: tuple[tuple[Role, str], ...] = (
    ("passive", "ecdh"),
    ("active", "ecdh"),
    ("active", "circuit"),
)


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A row of a table, measured for each seed.

    Attributes:
        fixed_values: fixed values of the row.
        measure: function that returns the measured values of a seed.
        seeds: seeds of the measurements.
        names_with_extremes: names of values whose minimum and maximum over the seeds are also in
            the row.
    """

    fixed_values: Row
    measure: Callable[[int], Row]
    seeds: Sequence[int] = (0,)
    names_with_extremes: Collection[str] = ()

    def measure_row(self) -> Row:
        """Return the row: means of numbers over the seeds with intervals, and lists of texts.

        A seed that lacks a number, since the attack was refused, is left out of its mean. With one
        seed, values are returned as they are.
        """
        rows = [self._measure_seed(seed) for seed in self.seeds]
        if len(rows) == 1:
            return {**self.fixed_values, **rows[0]}
        summary = dict(self.fixed_values)
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row[name] for row in rows if row.get(name) is not None]
            if any(isinstance(value, str) for value in values):
                summary[name] = " / ".join(dict.fromkeys(map(str, values)))
            elif values:
                summary[name] = Interval.from_values([float(value) for value in values])
            # Its minimum and maximum are wanted, too.
            if name in self.names_with_extremes:
                summary |= {f"least {name}": min(values), f"greatest {name}": max(values)}
        return summary

    def _measure_seed(self, seed: int) -> Row:
        """Return the values of one seed, or a party's refusal as the value `refused`."""
        try:
            return self.measure(seed)
        except RemoteProtocolError as refusal:
            return {"refused": str(refusal)}


VICTIM = "passive-1"
NO_RULES: frozenset[Rule] = frozenset()
_HONEST_EPOCHS = 3
_DATA_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"dataset": "digits", "views": 4, "overlap": 1.0},
    "digits-in-6": {"dataset": "digits", "views": 6, "active_view": 3, "overlap": 1.0},
    "fashion_mnist-in-6": {
        "dataset": "fashion_mnist",
        "views": 6,
        "active_view": 3,
        "overlap": 1.0,
        "limit": 2000,
    },
    "mnist-in-2": {"dataset": "mnist", "views": 2, "overlap": 1.0, "limit": 2000},
    "breast_cancer": {"dataset": "breast_cancer", "overlap": 1.0},
}


def make_live_config(
    data: str,
    method: str,
    *,
    masks: str = "pairwise",
    scheme: str = "plain",
    clip: float | None = 1.0,
    seed: int = 0,
    noise: Mapping[str, float] | None = None,
    **model: Any,
) -> Config:
    """Return the configuration of a run of 20 epochs with perceptrons.

    Args:
        data: key of `_DATA_SETTINGS`.
        method: name of the method.
        masks, scheme, clip: settings of the secure sum; `clip` None: no clip.
        seed: seed of the run.
        noise: settings of the passives' noise in the sum; None: no noise.
        model: further settings of the networks.
    """
    return Config.model_validate(
        {
            "name": f"leaks-{data}",
            "transcript": {"keep": "first_and_last"},
            "seed": seed,
            "party_seeds": "shared_for_comparison",
            "method": method,
            "data": _DATA_SETTINGS[data],
            "model": {
                "network": "mlp",
                "hidden": [64],
                "representation": 32,
                "projection": 64,
                "dropout": 0.2,
                **model,
            },
            "train": {
                "epochs": 20,
                "batch_size": 64,
                "learning_rate": 0.1,
                "max_gradient_norm": 1.0,
                "device": "cpu",
            },
            "alignment": {"protocol": "ecdh"},
            "secure_sum": {
                "scheme": scheme,
                "masks": masks,
                "clip": clip,
                "allow_single_passive": True,
                "noise": noise,
            },
            "guard": {"mechanism": "none"},
        }
    )


@cache
def _load_data(name: str, passive_count: int, seed: int) -> VerticalData:
    """Return the data set with the first `passive_count` of its passives."""
    data = load_data(make_live_config(name, "apfed_c").data, seed=seed)
    return replace(data, passives=data.passives[:passive_count])


_ALIGNMENT_BY_DATA: dict[tuple[str, int, int], Mapping[str, Tensor]] = {}


def open_run(
    config: Config,
    passive_count: int,
    rules: Collection[Rule] = ALL_RULES,
    *,
    session_class: type[LiveRun] = LiveRun,
) -> LiveRun:
    """Return a live session (all parties in this process) after a few honest epochs.

    Sessions on the same data and seed share one alignment.

    `passive_count`: number of passives. `rules`: rules of the protocol that the passives enforce.
    `session_class`: class of the session.
    """
    key = (
        config.name.removeprefix("leaks-"),
        passive_count,
        config.seed,
    )  # arguments of `_load_data`
    past_alignment = _ALIGNMENT_BY_DATA.get(key)
    session = session_class(config, _load_data(*key), rules=rules, alignment=past_alignment)
    _ALIGNMENT_BY_DATA[key] = session.alignment
    session.train_epochs(_HONEST_EPOCHS)
    return session


def make_sum_config(
    data: str, method: str, passive_count: int, rules: frozenset[Rule], **changes: Any
) -> Config:
    """Return the configuration of a run, with the sum that these rules allow.

    Under all rules the sum is masked or encrypted, and clipped; else it is in the clear, without
    clip.

    `passive_count`: number of passives. `rules`: rules of the protocol that the passives enforce.
    `changes`: further arguments of `make_live_config`.
    """
    if rules != ALL_RULES:
        return make_live_config(data, method, masks="none", clip=None, **changes)
    return make_live_config(data, method, **pick_protection(passive_count), **changes)


def open_sum_run(
    data: str, method: str, passive_count: int, rules: frozenset[Rule], **changes: Any
) -> LiveRun:
    """Return a live session after a few honest epochs, with the sum of `make_sum_config`.

    `data`, `method`, `passive_count`, `rules` and `changes` are as there.
    """
    return open_run(
        make_sum_config(data, method, passive_count, rules, **changes), passive_count, rules
    )


def pick_protection(passive_count: int) -> dict[str, Any]:
    """Return arguments of `make_live_config` for a protected sum.

    Masks need two passives; for one passive the sum is encrypted.
    """
    return {} if passive_count > 1 else {"scheme": "ckks", "masks": "none"}


def compute_centred_cosine(guess_ND: Tensor, truth_ND: Tensor) -> float:
    """Return the mean cosine similarity of corresponding rows after centring the columns.

    `guess_ND`, `truth_ND`: N rows of D numbers each.
    """
    guess_ND = guess_ND - guess_ND.mean(dim=0)
    truth_ND = truth_ND - truth_ND.mean(dim=0)
    return float(F.cosine_similarity(guess_ND, truth_ND).mean())


def list_feature_figures(result: AttackResult) -> Row:
    """Return the table's values of an attack on features, or why the attack was refused.

    They are its best variant, R2 and MSE, and the name and R2 of its baseline.
    """
    if not result.applicable or result.baseline is None:
        return {"refused": result.reason}
    return {
        "best": result.variant,
        "r2 of x": result.score["r2"],
        "mse of x": result.score["mse"],
        "baseline": result.baseline,
        "its r2": result.baselines[result.baseline]["r2"],
    }


# A5 in live runs: an honest active inverts the sums of APFed-C, by the number of passives.


def list_inversion_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of attack A5, by an honest active, on APFed-C.

    It infers a passive's representations z from the sums of honest steps, then the passive's
    features x from these.
    """
    for (name, seeds), passive_count in product(_INVERSION_SEEDS_BY_DATA.items(), (1, 2, 5)):
        columns = {"data": name.removesuffix("-in-6"), "M": passive_count}
        yield MeasuredRow(
            fixed_values=columns,
            measure=partial(_measure_inversion, name, passive_count),
            seeds=seeds,
        )


def _measure_inversion(name: str, passive_count: int, seed: int) -> Row:
    """Return how well representations z and the victim's features are recovered from honest sums.

    `name`: key of `_DATA_SETTINGS`. `passive_count`: number of passives.
    """
    session = open_run(
        make_live_config(name, "apfed_c", seed=seed, **pick_protection(passive_count)),
        passive_count,
    )
    guesses, truth = _invert_steps(session)
    choice = AttackChoice(name="contrastive_inversion", options={"iterations": 100})
    results = run_attacks(session.recording, [choice], seed=seed)
    # Which passive a guess is of is not known: it is compared with each.
    truth_by_passive = truth.unbind(dim=1)
    r2_by_passive = [
        compute_r2(guesses.numpy(), passive_truth.numpy()) or 0.0
        for passive_truth in truth_by_passive
    ]
    cosine_by_passive = [
        compute_centred_cosine(guesses, passive_truth) or 0.0 for passive_truth in truth_by_passive
    ]
    return {
        "r2 of z": sum(r2_by_passive) / len(r2_by_passive),
        "cosine, centred": sum(cosine_by_passive) / len(cosine_by_passive),
        **list_feature_figures(next(result for result in results if result.victim == VICTIM)),
    }


def _invert_steps(session: LiveRun) -> tuple[Tensor, Tensor]:
    """Train honestly for an epoch, and recover the passives' representations from its first sums.

    Returns the recovered representations of N people, (N, D), and the true ones of all M passives,
    (N, M, D).
    """
    truth_by_step: dict[int, Tensor] = {}

    def note_truth(step: int, rows_B: Tensor) -> None:
        """Keep the true representations of the people in the first steps."""
        if len(truth_by_step) < _INVERTED_STEPS:
            people = session.find_sent_positions(rows_B)
            truth_by_step[step] = torch.stack(
                [session.encode_people(name, people) for name in session.passives], dim=1
            )

    session.train_epochs(1, before_step=note_truth)
    # What the active received; it knows that digits have ten classes.
    view = make_view(session.recording, [session.data.active.name], knowledge=Knowledge(classes=10))
    contributors = list(view.terms_by_passive.values())
    guesses = []
    true_parts = []
    for step, _, batch in iter_batches(view, view.epochs[-1]):
        if step in truth_by_step:
            # The representations are found by which the passives would have returned this sum.
            question = SummedStep.from_batch(batch, view.revealed[step])
            guesses.append(recover_representations([question], contributors, _ITERATIONS))
            true_parts.append(truth_by_step[step])
    return torch.cat(guesses), torch.cat(true_parts)


# A6 and A7 in live runs: an active that chooses what it sends, with rules, without, and with noise.
#
# With noise all rules hold; three passives of digits add discrete Gaussian noise to their
# contributions. The active avoids the rule against near-constant batches with decoys. It asks about
# everybody once, or as often as the contract's epochs allow, and then averages the sums.


def list_chosen_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of attack A6: the active chooses representations that reveal the sum
    of the passives' representations z, up to its mean.

    Rules refuse batches of equal rows. The active therefore sends rows at a distance `spread` of
    each other, relative to their norm, or honest rows among them, a share `decoys` of all.
    """
    variants: tuple[tuple[str, frozenset[Rule], int, Row], ...] = (
        # title of the rules, rules, people whose z is read, how sent rows differ
        ("no rules", NO_RULES, 128, {}),
        ("all rules", ALL_RULES, 30, {}),
        ("all rules", ALL_RULES, 30, {"spread": 0.02}),
        ("all rules", ALL_RULES, 30, {"spread": 0.06}),
        ("all rules", ALL_RULES, 30, {"spread": 0.3}),
        ("all rules", ALL_RULES, 30, {"decoys": 0.52}),
    )
    for data, passive_count in product(("digits-in-6", "fashion_mnist-in-6"), (1, 2, 5)):
        for title, rules, people_count, options in variants:
            columns = {"data": data.removesuffix("-in-6"), "M": passive_count, "rules": title}
            start_run = partial(open_sum_run, data, "apfed_c", passive_count, rules)
            attack = ChosenRepresentations(people=people_count, **options)
            measure = partial(_measure_sum_attack, start_run, attack)
            yield MeasuredRow(fixed_values={**columns, **options}, measure=measure)


def _measure_sum_attack(
    start_run: Callable[..., LiveRun], attack: ChosenRepresentations, seed: int
) -> Row:
    """Return how well the attack recovers the sum of the passives' representations z, up to its
    mean.

    The row holds the largest error of a person, and R^2.

    `start_run`: function that opens a session with this seed.
    """
    session = start_run(seed=seed)
    active = session.data.active.name
    all_people = torch.arange(len(session.alignment[active]))
    true_representations = torch.stack(
        [session.encode_people(name, all_people) for name in session.passives]
    )
    # Two people whose features the adversary knows, chosen with seed 0.
    known_features = reveal_features(session.recording, VICTIM, 2, 0)
    knowledge = Knowledge(classes=10, victim=VICTIM, shadow=known_features)
    played_attack = PlayedAttack(attack.name, attack.run_live(session, knowledge, 0))
    view = make_view(
        session.recording, [active], knowledge=knowledge, deviation=played_attack, iterations=500
    )
    people, guess_ND = attack.recover_representations(view)  # N people, D numbers each
    true_sum_ND = true_representations[:, people].sum(dim=0)
    # The attack cannot recover the mean, so both are centred.
    guess_ND = guess_ND - guess_ND.mean(dim=0)
    true_sum_ND = true_sum_ND - true_sum_ND.mean(dim=0)
    return {
        "largest error": float((guess_ND - true_sum_ND).norm(dim=1).max()),
        "r2": compute_r2(guess_ND.numpy(), true_sum_ND.numpy()),
    }


_READ_PEOPLE_COUNT = 68
"""Number of people whose features attack A7 reads, beside those whose features it knows."""


class _DecoderCase(NamedTuple):
    """A setting in which attack A7 is measured with several protections.

    Attributes:
        data: key of `_DATA_SETTINGS`.
        known_count: number of people whose features the adversary knows.
        protections: for each protection the title of its rules, the rules, and how rows that the
            active sends differ.
        passive_count: number of passives.
        representation_size: number of dimensions of a representation.
    """

    data: str
    known_count: int
    protections: Sequence[tuple[str, frozenset[Rule], Row]]
    passive_count: int = 1
    representation_size: int = 64


def list_decoder_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of attack A7: the active reads the passives' decoders (APFed-R).

    It sends one representation for all people. Decoders are linear, or have a hidden layer. Sent
    rows differ by noise of the size `spread`, or the share `decoys` of them is honest.
    """
    protections: tuple[tuple[str, frozenset[Rule], Row], ...] = (
        ("no rules", NO_RULES, {}),
        ("all rules", ALL_RULES, {}),
        ("all rules", ALL_RULES, {"spread": 0.02}),
        ("all rules", ALL_RULES, {"spread": 0.06}),
        ("all rules", ALL_RULES, {"decoys": 0.52}),
    )
    with_spread = protections[2:]
    without_rules = protections[:1]
    cases = (
        _DecoderCase("breast_cancer", known_count=11, protections=protections),
        _DecoderCase("breast_cancer", known_count=60, protections=with_spread),
        _DecoderCase("digits", known_count=60, protections=protections),
        _DecoderCase("digits", known_count=480, protections=without_rules),
        _DecoderCase("digits", known_count=60, protections=protections, passive_count=3),
        _DecoderCase(
            "digits",
            known_count=60,
            protections=protections,
            passive_count=3,
            representation_size=16,
        ),
    )
    for case in cases:
        for hidden, (title, rules, options) in product(([], [64]), case.protections):
            start_run = partial(
                open_sum_run,
                case.data,
                "apfed_r",
                case.passive_count,
                rules,
                hidden=hidden,
                projection=case.representation_size,
            )
            attack = DecoderExtraction(
                people=case.known_count + _READ_PEOPLE_COUNT,
                shadow_rows=case.known_count,
                **options,
            )
            columns = {
                "data": case.data,
                "M": case.passive_count,
                "D": case.representation_size,
                "decoder": "one hidden layer" if hidden else "linear",
                "pairs": case.known_count,
                "rules": title,
            }
            measure = partial(_measure_decoder_attack, start_run, attack)
            yield MeasuredRow(fixed_values={**columns, **options}, measure=measure)


def _measure_decoder_attack(
    start_run: Callable[..., LiveRun], attack: DecoderExtraction, seed: int
) -> Row:
    """Return the metrics of the attack on a fresh session, in the form of `list_feature_figures`.

    `start_run`: function that opens a session with this seed.
    """
    return list_feature_figures(mount_live_attack(start_run(seed=seed), attack, VICTIM, seed=seed))


def list_noise_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows with noise in the sum: what an active reads that chooses
    representations.

    It sends them once, or repeats them and averages the sums. Epsilon and accuracy are those of 20
    epochs. The noise is fresh in every run, so seeds differ in it, too; it makes some trainings
    fail, as the minimum and maximum of the accuracy show.
    """
    for method, noise in product(("apfed_r", "apfed_c"), _NOISE_SETTINGS):
        settings: Row = {
            "method": method,
            "passive_count": _NOISE_PASSIVE_COUNT,
            "rules": ALL_RULES,
            "noise": noise,
        }
        objective = make_sum_config("digits", **settings).method.fixed_objective
        # Passives of APFed-R decode features.
        is_decoding = isinstance(objective, ReconstructionSettings)
        noise_text = "none"
        if noise:
            noise_text = " ".join(f"{name} {value:g}" for name, value in noise.items())
        target = "x of one passive" if is_decoding else "sum of z"
        measure = _measure_repeated_decoder if is_decoding else _measure_repeated_sum
        columns = {"method": method, "noise": noise_text, "reads": target}
        measure_noisy = partial(_measure_noise, measure, settings)
        yield MeasuredRow(
            fixed_values=columns,
            measure=measure_noisy,
            seeds=_NOISE_SEEDS,
            names_with_extremes=("accuracy",),
        )


def _measure_noise(
    measure_attack: Callable[[Callable[..., LiveRun], int], Row],
    settings: Mapping[str, Any],
    seed: int,
) -> Row:
    """Return the metrics of an attack, then accuracy and largest epsilon of a passive in an honest
    run.

    `measure_attack`: function that attacks sessions; it takes a function that opens them, and a
    seed. `settings`: arguments of `make_sum_config` except the data set and the seed.
    """
    row = measure_attack(partial(open_sum_run, **settings), seed)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run(make_sum_config("digits", seed=seed, **settings), path)
        outcome = load_finished_run(path).outcome
    epsilon = max((account.epsilon for account in outcome.contributions.values()), default=None)
    return {**row, "epsilon": epsilon, "accuracy": outcome.accuracy[outcome.method]}


def _measure_repeated_decoder(start_run: Callable[..., LiveRun], seed: int) -> Row:
    """Return how well decoder extraction reads features from requests sent once, and sent 16 times.

    Responses to repeated requests are averaged, against the noise.

    `start_run`: function that opens a session on given data with a seed.
    """
    row: Row = {}
    for repeats in (1, 16):
        attack = DecoderExtraction(
            people=128, shadow_rows=60, decoys=_HONEST_ROW_SHARE, repeats=repeats
        )
        features_row = _measure_decoder_attack(
            partial(start_run, "digits", hidden=[]), attack, seed
        )
        row[f"r2, asked {repeats} times"] = features_row["r2 of x"]
        row[f"mse, asked {repeats} times"] = features_row["mse of x"]
        row["baseline r2"] = features_row["its r2"]
    return row


def _measure_repeated_sum(start_run: Callable[..., LiveRun], seed: int) -> Row:
    """Return how well chosen representations read the sum from two requests, and from 16.

    Responses to repeated requests are averaged, against the noise.

    `start_run`: function that opens a session on given data with a seed.
    """
    row: Row = {}
    for repeats in (1, 8):  # the attack sends two requests each time
        attack = ChosenRepresentations(people=30, decoys=_HONEST_ROW_SHARE, repeats=repeats)
        sum_row = _measure_sum_attack(partial(start_run, "digits-in-6"), attack, seed)
        row[f"r2, asked {2 * repeats} times"] = sum_row["r2"]
    return row


# A8 in live runs: isolation of one passive's contribution, against each rule of the protocol.


def list_isolation_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of attack A8, which isolates one passive's contribution to the sum.

    Each technique is tried against no rule of the protocol, the rule that prevents it, all other
    rules, and all rules.
    """
    rule_by_technique = {
        "weight": Rule.WEIGHT,
        "unequal": Rule.BINDING,
        "subset": Rule.PARTICIPANTS,
    }
    for method in ("apfed_c", "apfed_r"):
        for technique, rule in rule_by_technique.items():
            yield _make_isolation_row(method, "no rules", NO_RULES, way=technique)
            yield _make_isolation_row(method, f"only {rule}", frozenset({rule}), way=technique)
            if technique == "unequal":
                yield _make_isolation_row(
                    method, "only norms", frozenset({Rule.NORMS}), way=technique
                )
                yield _make_isolation_row(
                    method, "only norms", frozenset({Rule.NORMS}), way=technique, far=9e3
                )
            yield _make_isolation_row(method, f"all but {rule}", ALL_RULES - {rule}, way=technique)
            yield _make_isolation_row(method, "all rules", ALL_RULES, way=technique)
        for colluding_count in (0, 1, 2):
            yield _make_isolation_row(
                method, "all rules", ALL_RULES, way="collusion", colluding=colluding_count
            )


class RecordingRun(LiveRun):
    """A live session that records the victim's true contribution to the first sum.

    Attributes:
        true_contribution: the contribution; None: no sum was requested yet.
    """

    true_contribution: Tensor | None = None

    def request_sum(self, *args: Any, **options: Any) -> Tensor:
        """Request a sum and record the victim's contribution to the first one."""
        total = super().request_sum(*args, **options)
        if self.true_contribution is None:
            self.true_contribution = self.get_contribution(VICTIM).double()
        return total


def _make_isolation_row(
    method: str, title: str, rules: frozenset[Rule], **options: Any
) -> MeasuredRow:
    """Return the table's row of one technique of isolation under these rules of the protocol.

    `title`: name of the set of rules. `options`: options of the attack; `way` names the technique.
    """
    # Masks enforce both rules, so without either rule the sum is in the clear.
    is_masked = Rule.PARTICIPANTS in rules and Rule.BINDING in rules
    config = make_live_config("digits", method, masks="pairwise" if is_masked else "none")
    columns = {"method": method, "way": options["way"], "rules": title}
    return MeasuredRow(
        fixed_values={**columns, "sum": find_sum_class(config.secure_sum).name, **options},
        measure=partial(_measure_isolation, config, rules, Isolation(**options)),
    )


def _measure_isolation(config: Config, rules: frozenset[Rule], attack: Isolation, seed: int) -> Row:
    """Return how close the contribution that the attack isolates is to the victim's true one.

    `rules`: rules of the protocol that the three passives enforce.
    """
    session = open_run(config, 3, rules, session_class=RecordingRun)
    assert isinstance(session, RecordingRun)
    known_features = reveal_features(session.recording, VICTIM, attack.shadow_rows, seed)
    knowledge = Knowledge(classes=10, victim=VICTIM, shadow=known_features)
    isolated_BD = attack.run_live(session, knowledge, seed)["isolated"]
    truth_BD = session.true_contribution
    assert truth_BD is not None
    return {
        "relative error": float((isolated_BD - truth_BD).norm() / truth_BD.norm()),
        "cosine, centred": compute_centred_cosine(isolated_BD, truth_BD),
    }


# A10: how many of its guesses a party tries and learns in intersections, by limit.


def list_stuffing_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of ID stuffing: the adversary adds guessed IDs to its own list.

    Both parties have 500 people, 300 in common. The adversary tries 400 further IDs, half of which
    the victim has.
    """
    for (role, protocol), case in product(_STUFFING_ROLES_AND_PROTOCOLS, _STUFFING_CASES):
        limits, agreed_size, minimum, intersection_count, max_runs, is_overstuffed = case
        attack = IdStuffing(
            candidates=400, intersections=intersection_count, overstuff=is_overstuffed
        )
        settings = AlignmentSettings(
            protocol=protocol, maximum_ids=agreed_size, minimum_rows=minimum
        )
        columns = {"adversary": role, "protocol": protocol, "limits": limits}
        yield MeasuredRow(
            fixed_values=columns,
            measure=partial(_measure_stuffing, attack, settings, role, max_runs),
        )


def _measure_stuffing(
    attack: IdStuffing, settings: AlignmentSettings, role: Role, max_runs: int | None, seed: int
) -> Row:
    """Return how many guessed IDs the adversary tries, and how many it learns to be the victim's.

    `attack`: number of guesses and of intersections. `settings`: agreed limits of the intersection.
    `role`: role of the adversary. `max_runs`: largest number of runs that the victim takes part in
    with one peer; None: no limit.
    """
    # Lists of 500 IDs, which overlap in 300; the other 1,300 people are in neither list.
    people = [f"person {number}" for number in range(2_000)]
    tables = IdTables(own_ids=people[:500], victim_ids=people[200:700], outsider_ids=people[700:])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "alignments.jsonl"
        history = AlignmentHistory(path, runs_with_a_peer=max_runs) if max_runs else None
        result, outcome = play_stuffing(
            attack, tables, settings, role=role, history=history, seed=seed
        )
    return {
        "guesses tried": len(outcome.tried_candidates),
        "learned to be the peer's": len(outcome.found_candidates),
        "auc": result.score.get("auc"),
        "refused": "yes" if outcome.refusal else "no",
    }


# Joint training: features that a curious active reconstructs, and hijacking by a malicious party.
#
# Digits in strips of two rows, MNIST in halves, pixels between 0 and 1; one passive.

_HIJACK_EPOCHS = 300
_HIJACK_LEARNING_RATE = 0.03
_HIJACK_HIDDEN = 128
_HIJACK_SEEDS = range(5)
_FEWER_SEEDS = range(3)  # of MNIST and of APFed-C, where a run takes several times as long


def list_joint_inversion_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of a curious active of TVFL that rebuilds a passive's features.

    It knows pairs of a representation and its features, public rows without pairs, or the encoder.
    """
    for name in ("inverse_network", "representation_network", "unpaired_inversion"):
        measure = partial(_measure_joint_inversion, name)
        yield MeasuredRow(fixed_values={"attack": name}, measure=measure, seeds=_HIJACK_SEEDS)


def _measure_joint_inversion(name: str, seed: int) -> Row:
    """Return the metrics of the attack `name` by the active on a run of TVFL with one passive."""
    config, data = _load_one_passive(make_live_config("digits", "tvfl", seed=seed))
    results = run_attacks(
        run(config, None, data=data).recording, [AttackChoice(name=name)], seed=seed
    )
    return _pick_figures(next(result for result in results if result.victim == VICTIM))


def list_hijacking_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of feature-space hijacking (FSHA): a malicious active rebuilds
    features.

    It sends the passive gradients that pull its encoder into a space that the adversary can invert.
    The adversary's generator gets the active's own features of the same people, or not.
    """
    cases = (
        # data, whether the generator gets the active's features, epochs, seeds
        ("digits", True, _HIJACK_EPOCHS, _HIJACK_SEEDS),
        ("digits", False, _HIJACK_EPOCHS, _HIJACK_SEEDS),
        ("mnist-in-2", True, 100, _FEWER_SEEDS),
        ("mnist-in-2", True, _HIJACK_EPOCHS, _FEWER_SEEDS),
    )
    for name, has_active_features, epoch_count, seeds in cases:
        columns = {
            "data": name,
            "told x": "yes" if has_active_features else "no",
            "epochs": epoch_count,
        }
        attack = FeatureSpaceHijack(hidden=_HIJACK_HIDDEN, conditioned=has_active_features)
        measure = partial(
            _measure_hijack, attack, partial(make_live_config, name, "tvfl"), epoch_count
        )
        yield MeasuredRow(
            fixed_values={**columns, "attack": "hijack"}, measure=measure, seeds=seeds
        )


def list_reversed_hijacking_rows() -> Iterator[MeasuredRow]:
    """Yield the table's rows of attack A4 on digits: the only passive hijacks the active's encoder.

    Its gradients pull the encoder into a space that it can invert. They compete with the active's
    own loss, and are limited by clip and guard (clip and noise of representations).
    """
    # strength of the gradients, clip of the sum, noise of the guard (0: none)
    for strength, clip, sigma in (
        (1.0, 1.0, 0.0),
        (5.0, 1.0, 0.0),
        (5.0, 0.1, 0.0),
        (5.0, 1.0, 0.1),
    ):
        columns = {
            "kappa": strength,
            "clip": clip,
            "sigma": sigma or "none",
            "epochs": _HIJACK_EPOCHS,
            "attack": "reversed_hijack",
        }
        attack = ReversedHijack(hidden=_HIJACK_HIDDEN, strength=strength)
        measure = partial(
            _measure_hijack, attack, partial(_make_guarded_config, clip, sigma), _HIJACK_EPOCHS
        )
        yield MeasuredRow(fixed_values=columns, measure=measure, seeds=_FEWER_SEEDS)


def _measure_hijack(
    attack: FeatureSpaceHijack | ReversedHijack,
    make_config: Callable[..., Config],
    epoch_count: int,
    seed: int,
) -> Row:
    """Return the metrics of a hijacking attack over a run of this number of epochs.

    `make_config`: function that returns the run's configuration for a seed. The learning rate is
    one at which the attack is stable.
    """
    config = make_config(seed=seed)
    train = config.train.model_copy(
        update={"epochs": epoch_count, "learning_rate": _HIJACK_LEARNING_RATE}
    )
    config, data = _load_one_passive(config.model_copy(update={"train": train}))
    return _pick_figures(mount_answering_attack(attack, config, VICTIM, data=data, seed=seed))


def _make_guarded_config(clip: float, sigma: float, *, seed: int) -> Config:
    """Return the configuration of APFed-C, whose clip also bounds the adversary's rows.

    `clip`: L2 bound of a row in the sum. `sigma`: standard deviation of the noise on the active's
    representations; 0: they are sent as they are.
    """
    config = make_live_config("digits", "apfed_c", masks="none", clip=clip, seed=seed)
    if not sigma:
        return config
    guard = {"mechanism": "gaussian", "clip": 1.0, "sigma": sigma}
    return Config.model_validate({**config.model_dump(), "guard": guard})


def _load_one_passive(config: Config) -> tuple[Config, VerticalData]:
    """Return the configuration, and its data with the first passive only."""
    data = load_data(config.data, seed=config.seed)
    return config, replace(data, passives=data.passives[:1])


def _pick_figures(result: AttackResult) -> Row:
    """Return the columns of an attack's result: best variant, its metrics, baseline, advantage."""
    best_baseline = result.baselines[result.baseline or ""]
    return {
        "variant": result.variant,
        **{key: result.score.get(key) for key in ("r2", "mse", "psnr", "ssim")},
        "baseline": result.baseline,
        "baseline r2": best_baseline["r2"],
        "advantage": result.advantage,
    }
