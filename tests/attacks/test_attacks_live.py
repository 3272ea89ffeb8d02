"""Live runs: what an adversary may ask, what the protocol refuses, and who may be played."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from apfed_attacks import ATTACKS
from apfed_attacks.features.chosen_representations import ChosenRepresentations
from apfed_attacks.features.decoder_extraction import DecoderExtraction
from apfed_attacks.features.isolation import Isolation
from apfed_attacks.live.runs import ALL_RULES, LiveRun, Poison, PoisonedVotes, Rule, VotesRun
from apfed_attacks.live.strategy import ActiveAttack
from apfed_attacks.recorded import make_view, reveal_features
from apfed_attacks.view import AttackError, Knowledge, PlayedAttack
from apfed_experiments.leaks.live import RecordingRun
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.ledger import BudgetExhaustedError
from tests.attacks.recordings import TWO_TABLES, live_config, normal, play
from tests.secure_apfed.small_runs import Said, small_config
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
UNPROTECTED: frozenset[Rule] = frozenset()
MASKED = {"scheme": "plain", "masks": "pairwise", "clip": 1.0}
SPREAD = normal(8, 64, seed=0).float()


def _run(method: str, views: int = 2, rules: Collection[Rule] = ALL_RULES, **more: Any) -> LiveRun:
    return LiveRun(live_config(method, views=views, **more), rules=rules)


@pytest.mark.parametrize("method", ["tvfl", "single_view"])
def test_only_apfed_has_an_active_that_receives_sums(method: str) -> None:
    with pytest.raises(AttackError, match=f"not in {method}"):
        LiveRun(live_config(method))


def test_a_question_within_the_rules_is_answered_and_recorded() -> None:
    run = _run("apfed_r", views=4)
    answer = run.request_sum(torch.arange(8), SPREAD)
    parts = [run.get_contribution(name) for name in run.passives]
    assert torch.allclose(answer, torch.stack(parts).sum(dim=0).float(), atol=1e-6)
    assert torch.equal(run.recording.transcript.sums_by_step[0], answer)
    people: list[int] = []  # honest training goes on
    run.train_epochs(
        1, before_step=lambda step, rows_B: people.append(len(run.find_sent_positions(rows_B)))
    )
    assert sum(people) == len(run.active_role.training_rows)
    with pytest.raises(AttackError, match="holds no contrasted representations"):
        run.encode_people("passive-1", torch.arange(3))


def test_leaving_rules_out_changes_nothing_in_an_honest_run() -> None:
    states = []
    for rules in (UNPROTECTED, ALL_RULES):
        live = _run("apfed_c", rules=rules, train={"precision": "float64"})
        live.train_epochs(2)
        states.append(live.session.tensors())
    changed = [
        (party, name)
        for party, tensors in states[0].items()
        for name, value in tensors.items()
        # An unprotected passive does not count its allowance.
        if not name.startswith("allowance") and not torch.equal(value, states[1][party][name])
    ]
    assert changed == []


# What the protocol refuses to each attack.

NEAR = "active sent a near-constant batch"
REFUSED: list[tuple[ActiveAttack, int, Any, str]] = [
    (ChosenRepresentations(people=64), 2, {}, NEAR),
    (DecoderExtraction(people=60), 4, {}, NEAR),
    *(
        (
            Isolation.model_validate({"way": way}),
            4,
            {"secure_sum": {**pair_of(protocol), "clip": 1.0}},
            refusal,
        )
        for protocol in ("plain", "ckks", "plain + pairwise masks")
        for way, refusal in (
            ("unequal", "active sent representations whose norm is not within"),
            ("subset", "nothing came"),
        )
    ),
]


@pytest.mark.sampled(every=4)
@pytest.mark.refused
@pytest.mark.parametrize(("attack", "views", "sums", "refusal"), REFUSED)
def test_the_protocol_refuses(attack: ActiveAttack, views: int, sums: Any, refusal: str) -> None:
    method = "apfed_r" if attack.name == "decoder_extraction" else "apfed_c"
    result = play(attack, live_config(method, views=views, **sums))
    assert not result.applicable
    assert result.reason is not None
    assert result.reason.startswith("the protocol refused: ")
    assert refusal in result.reason


def test_every_active_that_deviates_is_refused() -> None:
    kinds = {name for name, kind in ATTACKS.items() if issubclass(kind, ActiveAttack)}
    assert {attack.name for attack, *_ in REFUSED} == kinds


def test_where_the_sum_is_one_passives_nothing_is_isolated() -> None:
    result = play(Isolation(way="weight"), live_config("apfed_c", views=2), rules=UNPROTECTED)
    assert result.reason == "with one passive the sum is its gradient; there is nothing to isolate"


# Chosen representations.


def _recover_representations(run: LiveRun, **options: Any) -> tuple[Any, Any]:
    """Play, and return what was recovered beside the truth before the question."""
    run.train_epochs(2)
    attack = ChosenRepresentations(**options)
    everybody = torch.arange(len(run.alignment["active"]))
    truth = [run.encode_people(name, everybody) for name in run.passives]
    shadow = reveal_features(run.recording, "passive-1", 10, 0)
    knowledge = Knowledge(classes=10, victim="passive-1", shadow=shadow)
    played = PlayedAttack(attack.name, attack.run_live(run, knowledge, 0))
    view = make_view(run.recording, ["active"], knowledge=knowledge, deviation=played)
    people, found = attack.recover_representations(view)
    return found, torch.stack([z[people] for z in truth])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("views", "people"), [(2, 128), (4, 64)])
def test_of_one_passive_all_and_of_several_the_centred_sum_is_read_exactly(
    views: int, people: int
) -> None:
    found, truth = _recover_representations(_run("apfed_c", views, UNPROTECTED), people=people)
    total = truth.sum(dim=0)
    expected = total if views == 2 else total - total.mean(dim=0)
    assert float((found - expected).norm(dim=1).max()) < 5e-6


@pytest.mark.parametrize("evasion", [{"spread": 0.2}, {"decoys": 0.55}])
def test_what_spreads_a_little_more_is_answered_and_tells(evasion: dict[str, Any]) -> None:
    found, (truth,) = _recover_representations(_run("apfed_c"), people=28, **evasion)
    # An honest limit of the rule: centred, well above what a guess at the mean gives (0).
    middle = [z - z.mean(dim=0) for z in (found, truth)]
    assert float(torch.nn.functional.cosine_similarity(*middle).mean()) > 0.5


# Decoder extraction.


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("hidden", "pairs", "data", "figure", "minimum", "maximum"),
    [
        ([], 5, TWO_TABLES, "mse", 1e-2, 1e9),  # fewer pairs than numbers do not fix the answer
        ([32], 90, None, "r2", 0.95, 1),  # a sum of three is affine in all their features
    ],
)
def test_answers_are_affine_in_the_features(
    hidden: list[int], pairs: int, data: Any, figure: str, minimum: float, maximum: float
) -> None:
    config = live_config("apfed_r", model={"hidden": hidden}, **({"data": data} if data else {}))
    result = play(DecoderExtraction(people=160, shadow_rows=pairs), config, rules=UNPROTECTED)
    assert minimum < (result.variants["affine on answers"][figure] or 0) < maximum


@pytest.mark.slow
def test_one_point_among_decoys_is_answered_and_tells() -> None:
    # An honest limit of the rule: less than half of a batch may still be at one point.
    config = live_config("apfed_r", data=TWO_TABLES, secure_sum={"scheme": "ckks", "clip": 1.0})
    result = play(DecoderExtraction(people=28, shadow_rows=14, decoys=0.55), config, epochs=3)
    assert (result.score["r2"] or 0) > 0.7
    assert (result.advantage or 0) > 0.3


# Isolation.


def isolation_error(rules: Collection[Rule], *, sums: Any = None, **way: Any) -> float:
    """Relative error of what was isolated from the victim's real contribution."""
    run = RecordingRun(live_config("apfed_c", secure_sum=sums or {}), rules=rules)
    run.train_epochs(1)
    shadow = reveal_features(run.recording, "passive-1", 30, 0)
    knowledge = Knowledge(classes=10, victim="passive-1", shadow=shadow)
    found = Isolation(**way).run_live(run, knowledge, 0)["isolated"]
    assert run.true_contribution is not None
    return float((found - run.true_contribution).norm() / run.true_contribution.norm())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("rules", "sums", "way", "minimum", "maximum"),
    [
        # A weight that the active asks for changes nothing.
        (ALL_RULES, None, {"way": "weight"}, 0.9, 1e9),
        # Norms alone do not help where their bound is wide.
        ({Rule.NORMS}, None, {"way": "unequal", "far": 9e3}, 0, 1e-2),
        # Collusion of all others is conceded, and of fewer is not enough.
        (ALL_RULES, MASKED, {"way": "collusion"}, 0, 1e-2),
        (ALL_RULES, MASKED, {"way": "collusion", "colluding": 1}, 0.5, 1e9),
    ],
)
def test_what_a_rule_is_good_for(
    rules: Collection[Rule], sums: Any, way: dict[str, Any], minimum: float, maximum: float
) -> None:
    assert minimum < isolation_error(rules, sums=sums, **way) < maximum


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("rules", "way", "error", "says"),
    [
        (
            {Rule.BINDING},
            "unequal",
            RemoteProtocolError,
            "answered another message|beyond the range",
        ),
        (UNPROTECTED, "subset", LocalProtocolError, "only a plain sum"),
    ],
)
def test_secure_sums_offer_no_sum_over_fewer_or_of_answers_to_unequal_questions(
    rules: Collection[Rule], way: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        isolation_error(rules, sums=MASKED, way=way)


@pytest.mark.slow
def test_what_was_isolated_is_read_like_a_gradient() -> None:
    attack = Isolation(way="collusion", shadow_rows=40)
    assert (play(attack, live_config("apfed_r")).advantage or 0) > 0.1


def test_no_contract_gives_weight_to_one_passive_alone() -> None:
    safe: Any = {"method": "apfed_c", "secure_sum": {"allow_single_passive": False}}
    silent: Any = {"default": {"weight": 0.0}}
    with pytest.raises(ConfigError, match="a sum of one passive hides nothing"):
        LiveRun(live_config(**safe, passives={"passive-1": {}, **silent}))
    assert len(LiveRun(live_config(**safe, passives=silent)).passives) == 3


# How an active asks about many people among decoys, on a seat that answers what it was sent.


class Echo:
    """Answers each row with what it was sent and noise of deviation 1; keeps the questions."""

    batch_size = 20

    def __init__(self, rows: int) -> None:
        self.training_positions = torch.arange(rows)
        self.asked: list[Tensor] = []
        self.draw = torch.Generator().manual_seed(1)

    def request_sum(self, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        assert len(rows_B) == len(z_BD) <= self.batch_size
        assert len(rows_B.unique()) == len(rows_B)
        self.asked.append(rows_B)
        return z_BD + torch.randn(z_BD.shape, generator=self.draw, dtype=z_BD.dtype)


def _ask(active: Any, **options: Any) -> float:
    """The root mean square of what the answers, in their order, lack."""
    z = torch.arange(30.0, dtype=torch.float64)[:, None].expand(30, 8).clone()
    draw = torch.Generator().manual_seed(0)
    attack = DecoderExtraction(**options)
    found = attack.ask_among_decoys(active, torch.arange(30), z, draw)
    return float((found - z).square().mean().sqrt())


def test_repeats_average_noise_and_decoys_are_others_that_take_turns() -> None:
    assert _ask(Echo(200)) == pytest.approx(1, abs=0.2)
    seat = Echo(200)
    assert _ask(seat, decoys=0.5, repeats=16) == pytest.approx(1 / 4, abs=0.05)
    assert len(seat.asked) == 16 * 3
    counts = torch.cat(seat.asked).bincount(minlength=200)
    assert counts[:30].tolist() == [16] * 30
    assert counts[30:].sum() == 16 * 30
    assert counts[30:].max() <= 16


def test_a_batch_is_as_large_as_was_agreed() -> None:
    alone: Any = Echo(30)  # without enough others the people themselves are decoys
    _ask(alone, decoys=0.5)
    assert [len(rows) for rows in alone.asked] == [20, 20, 20]
    _ask(Echo(200), decoys=0.99)


# Live ballots: what a party that deviates reaches, and what stops it.

DIGITS = {"dataset": "digits", "views": 4, "overlap": 1.0, "labelled": 50, "limit": 400}
ASKED: Mapping[str, Said] = {
    "sum": "votes",
    "sum, noise": {"name": "votes", "epsilon": 4.0},
    "each": "votes_randomised",
}


config_of = partial(
    small_config,
    data={"dataset": "breast_cancer", "overlap": 1.0, "labelled": 20},
    model={"network": "random_features"},
    train={"epochs": 1, "device": "cpu"},
    guard={"mechanism": "none"},
    secure_sum={"scheme": "plain", "allow_single_passive": True},
)


@pytest.fixture(scope="module")
def shared_alignment() -> dict[str, Any]:
    """Data and alignment, which all sessions here share."""
    run = VotesRun(config_of("votes", data=DIGITS))
    return {"data": run.data, "alignment": run.alignment}


def open_run(aligned: dict[str, Any], opening: str, **others: Any) -> VotesRun:
    return VotesRun(config_of(ASKED[opening], data=DIGITS), **aligned, **others)


def one_against_all(run: VotesRun, person: int) -> dict[int, int]:
    return dict.fromkeys(run.ballot.rows.tolist(), 1) | {person: 0}


def test_one_label_against_all_reads_a_column_of_the_passives_matrices(
    shared_alignment: dict[str, Any],
) -> None:
    run = open_run(shared_alignment, "sum")
    ballot, votes = run.request_votes(labels=one_against_all(run, int(run.ballot.rows[7])))
    columns_U = np.zeros(len(ballot.rows))
    for name in run.voters:
        columns_U += run.get_voter(name).cast_votes(ballot)[:, 0]
    # To the rounding of the sum.
    assert np.abs(votes[:, 0] - columns_U).max() < 1e-3
    assert (columns_U > 0.01).sum() < 100  # of 300: it names neighbours


@pytest.mark.parametrize("opening", ASKED)
def test_a_second_question_in_a_session_is_refused(
    shared_alignment: dict[str, Any], opening: str
) -> None:
    run = open_run(shared_alignment, opening)
    run.request_votes()
    with pytest.raises(RemoteProtocolError, match="votes once more in one session"):
        run.request_votes(labels=one_against_all(run, int(run.ballot.rows[0])))


@pytest.mark.parametrize("opening", ["sum, noise", "each"])
def test_a_resumed_run_charges_again_and_stops_at_its_budget(
    shared_alignment: dict[str, Any], opening: str, tmp_path: Path
) -> None:
    open_run(shared_alignment, opening, logs=tmp_path).request_votes()
    with pytest.raises(BudgetExhaustedError, match="release 2 of one row would cost epsilon"):
        open_run(shared_alignment, opening, logs=tmp_path).request_votes()


def test_without_noise_a_run_answers_as_often_as_agreed_over_all_its_sessions(
    shared_alignment: dict[str, Any], tmp_path: Path
) -> None:
    agreed = 3  # one, and rules.spare_answers
    for person in range(agreed):
        run = open_run(shared_alignment, "sum", logs=tmp_path)
        run.request_votes(labels=one_against_all(run, int(run.ballot.rows[person])))
    run = open_run(shared_alignment, "sum", logs=tmp_path)
    with pytest.raises(RemoteProtocolError, match="more than 3 times"):
        run.request_votes(labels=one_against_all(run, int(run.ballot.rows[agreed])))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("opening", "way"), [("each", "rotate"), ("sum", "flip")])
def test_poisoned_votes_are_not_refused_and_show_where_answers_are_single(
    shared_alignment: dict[str, Any], opening: str, way: Poison
) -> None:
    honest = open_run(shared_alignment, opening)
    spoilt = open_run(shared_alignment, opening)
    passive = spoilt.voters[0]
    role = spoilt.get_voter(passive)
    role.voter.labeller = PoisonedVotes(honest=role.voter.labeller, way=way)
    honest.learn_from_votes()
    spoilt.learn_from_votes()
    before = honest.active_role.agreement_by_party
    after = spoilt.active_role.agreement_by_party
    assert bool(after) is (opening == "each")  # sums show no single passive
    if after:
        assert after[passive].labels < before[passive].labels - 3 * after[passive].labels_noise
        assert (after[passive].others or 0) < (before[passive].others or 0)
