"""Live intersections in which one party stuffs its set: the real roles of `apfed_protocols.psi`.

Run by: the experimenter, who plays both parties and knows who has which ID. Both ends are the real
ones, with size limit, minimum and the victim's own history of runs; to exceed the agreed size, the
adversary takes a larger limit for itself and claims the agreed one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_attacks.interface import AttackResult
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_attacks.scoring import Truth, make_inapplicable_result, score_guess
from apfed_attacks.view import AdversaryView, AttackError, Exchange, Knowledge, PlayedAttack
from apfed_protocols.conversation import converse
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.psi.ecdh import EcdhHub
from apfed_protocols.psi.interface import (
    IntersectionAgreement,
    IntersectionTooSmallError,
    SetIntersection,
)
from apfed_protocols.randomness import fresh_key
from secure_apfed.alignment import canonical_ids, make_intersection
from secure_apfed.alignment.records import AlignmentHistory
from secure_apfed.base.seeds import shuffle_rows
from secure_apfed.errors import DataError
from secure_apfed.settings.alignment import AlignmentSettings

_MAX_IDS = 2**24
"""Largest number of IDs that the adversary allows itself: above all candidates, within memory."""
_DEALER = "dealer (in memory)"


@dataclass(frozen=True, kw_only=True)
class _UnlimitedAgreement(IntersectionAgreement):
    """The adversary's copy of an agreement: it has another size limit, but shows the agreed digest.

    The peer compares digests, so it does not notice.
    """

    shown_agreement: IntersectionAgreement

    @property
    def digest(self) -> bytes:
        """The digest that the adversary shows its peer."""
        return self.shown_agreement.digest


@dataclass
class StuffingOutcome:
    """The result of an attempt to find IDs of the peer by adding guesses to one's own set.

    Attributes:
        tried_candidates, found_candidates: numbers of the candidates (guesses) that were tried, and
            of those in the intersection.
        refusal: why the attempt ended early; None: it did not.
    """

    tried_candidates: set[int] = field(default_factory=set)
    found_candidates: set[int] = field(default_factory=set)
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class IdTables:
    """The IDs of the adversary, of the victim (its peer), and of people whom neither knows."""

    own_ids: Sequence[str]
    victim_ids: Sequence[str]
    outsider_ids: Sequence[str]

    def draw_candidates(self, count: int, seed: int) -> list[str]:
        """Return `count` candidate IDs (guesses), shuffled.

        Half are the victim's and not the adversary's, half belong to neither.

        Raises AttackError: there are too few IDs of one of the two kinds.
        """
        victims = sorted(set(self.victim_ids) - set(self.own_ids))
        neithers = sorted(set(self.outsider_ids) - set(self.own_ids) - set(self.victim_ids))
        half = count // 2
        if half > min(len(victims), len(neithers)):
            raise AttackError(
                f"{count} candidates were asked for; the victim has {len(victims)} IDs that the "
                f"adversary lacks, and {len(neithers)} belong to nobody; lower candidates"
            )
        chosen_victims = _shuffle_ids(victims, seed, "secret")[:half]
        chosen_neithers = _shuffle_ids(neithers, seed, "nobody")[:half]
        return _shuffle_ids(chosen_victims + chosen_neithers, seed, "order")


def _shuffle_ids(ids: list[str], seed: int, purpose: str) -> list[str]:
    """Return the IDs in an order that follows from the seed and the purpose of the shuffle."""
    order = shuffle_rows(torch.arange(len(ids)), seed, "stuffing", purpose)
    return [ids[position] for position in order]


def play_stuffing(
    attack: IdStuffing,
    tables: IdTables,
    settings: AlignmentSettings,
    *,
    role: Literal["active", "passive"] = "passive",
    history: AlignmentHistory | None = None,
    seed: int = 0,
) -> tuple[AttackResult, StuffingOutcome]:
    """Let the adversary add candidates (guessed IDs) to its set, in one intersection after another.

    It ends when all are tried, or the victim refuses. If the victim refused before anything was
    learned, the attack does not apply, for that reason.

    Args:
        attack: the attack with its options.
        tables: the IDs of both parties, and others.
        settings: settings of the intersection.
        role: the adversary's role; the active is the hub, the party that all others align with.
        history: the victim's record of intersections, which may limit them; None: none.
        seed: seed of the choice of candidates.
    """
    candidates = tables.draw_candidates(attack.candidates, seed)
    stuffed = _try_candidates(attack, candidates, tables, settings, role, history)
    every_number = range(len(candidates))
    notes = {
        "tried": torch.tensor([number in stuffed.tried_candidates for number in every_number]),
        "found": torch.tensor([number in stuffed.found_candidates for number in every_number]),
    }
    victim = "passive" if role == "active" else "active"
    view = AdversaryView(
        role=role,
        parties=(role,),
        behaviour=attack.behaviour,
        description=Exchange(name=settings.selected_protocol),
        envelopes={},
        features={},
        knowledge=Knowledge(classes=2, victim=victim),
        deviation=PlayedAttack(attack.name, notes),
    )
    if not stuffed.tried_candidates:
        reason = f"the protocol refused: {stuffed.refusal}"
        return make_inapplicable_result(attack, view, reason, seed), stuffed
    victim_ids = set(tables.victim_ids)
    members = torch.tensor([[name in victim_ids, False] for name in candidates])
    truth = Truth.for_members(members, classes=2)
    return score_guess(attack, view, attack.run(view, seed), truth, seed), stuffed


def _try_candidates(
    attack: IdStuffing,
    candidates: Sequence[str],
    tables: IdTables,
    settings: AlignmentSettings,
    role: Literal["active", "passive"],
    history: AlignmentHistory | None,
) -> StuffingOutcome:
    """Try candidates (guessed IDs) in one intersection after another, as many as its size allows.

    `role`: the adversary's role. `history`: the victim's record of intersections; None: none.
    """
    own_size = len(tables.own_ids)
    stuffed = StuffingOutcome()
    room = len(candidates) if attack.overstuff else settings.maximum_ids - own_size
    for _ in range(attack.intersections):
        untried = [
            number for number in range(len(candidates)) if number not in stuffed.tried_candidates
        ]
        numbers = untried[: max(room, 0)]
        if not numbers:
            if not stuffed.tried_candidates:
                stuffed.refusal = "the agreed size leaves no room for a guess"
            break
        session = f"in memory {fresh_key().hex()}"
        # The adversary's own IDs stay in the set, so that the intersection is of the usual size.
        ids = [*tables.own_ids, *(candidates[number] for number in numbers)]
        try:
            if history is not None:
                history.record_run(session=session, peers=[role])
            rows = _intersect(attack, ids, tables.victim_ids, settings, session, role)
        except (DataError, RemoteProtocolError, IntersectionTooSmallError) as refusal:
            stuffed.refusal = str(refusal)
            break
        stuffed.tried_candidates.update(numbers)
        # Rows after the adversary's own are guesses.
        stuffed.found_candidates.update(
            numbers[row - own_size] for row in rows.tolist() if row >= own_size
        )
    return stuffed


def _intersect(
    attack: IdStuffing,
    stuffed: Sequence[str],
    victim: Sequence[str],
    settings: AlignmentSettings,
    session: str,
    role: Literal["active", "passive"],
) -> NDArray[np.int64]:
    """Run one intersection of both parties; return the rows of the adversary's set that it learned
    to be common.

    `stuffed`: the adversary's IDs, guesses included. `victim`: the victim's IDs. `session`: name of
    the session. `role`: the adversary's role.
    """
    honest = make_intersection(settings, session=session, dealer=_DEALER)
    malicious: SetIntersection = honest
    if attack.overstuff:
        agreed = vars(honest.agreement) | {"maximum_ids": _MAX_IDS}
        boundless = _UnlimitedAgreement(**agreed, shown_agreement=honest.agreement)
        malicious = SET_INTERSECTIONS[settings.selected_protocol](boundless)
    # The adversary's own check of its size must not stop it.
    unbounded = settings.model_copy(update={"maximum_ids": _MAX_IDS})
    stuffed_ids = canonical_ids(role, list(stuffed), unbounded)
    victim_ids = canonical_ids("victim", list(victim), settings)
    # The active is the hub, the party that the other one (a member) aligns with.
    adversary_is_hub = role == "active"
    if adversary_is_hub:
        hub = malicious.make_hub("active", ["passive"], stuffed_ids)
        member = honest.make_member("passive", "active", victim_ids)
    else:
        hub = honest.make_hub("active", ["passive"], victim_ids)
        member = malicious.make_member("passive", "active", stuffed_ids)
    parties = {"active": hub, "passive": member}
    dealers = {_DEALER: honest.make_dealer("active", ["passive"])} if honest.needs_dealer else {}
    converse({role: parties[role], **parties, **dealers})  # the adversary begins
    # With ECDH the hub learns more than the agreed result: its overlap with each member.
    if adversary_is_hub and isinstance(hub, EcdhHub):
        return hub.overlaps["passive"]
    return hub.rows if adversary_is_hub else member.rows
