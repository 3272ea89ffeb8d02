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

_MOST = 2**24
"""Largest number of IDs that the adversary allows itself: above all candidates, within memory."""
_DEALER = "dealer (in memory)"


@dataclass(frozen=True, kw_only=True)
class _Boundless(IntersectionAgreement):
    """The adversary's own copy of an agreement, whose size limit does not bind it."""

    claimed: IntersectionAgreement

    @property
    def digest(self) -> bytes:
        return self.claimed.digest


@dataclass
class Stuffed:
    """The candidates by number that were tried and found, and what ended the attempt."""

    tried: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The IDs of the adversary, of the victim, which is its peer, and of neither of them."""

    own: Sequence[str]
    victim: Sequence[str]
    outsiders: Sequence[str]

    def draw_candidates(self, count: int, seed: int) -> list[str]:
        """Return candidates, mixed: half the victim's and not the adversary's, half nobody's.

        `count`: how many.

        Raises AttackError: there are too few of one kind.
        """
        secret = sorted(set(self.victim) - set(self.own))
        nobody = sorted(set(self.outsiders) - set(self.own) - set(self.victim))
        half = count // 2
        if half > min(len(secret), len(nobody)):
            raise AttackError(
                f"{count} candidates were asked for; the victim has {len(secret)} IDs that the "
                f"adversary lacks, and {len(nobody)} belong to nobody; lower candidates"
            )

        def shuffle_names(names: list[str], which: str) -> list[str]:
            """Return the names in an order that follows from the seed and `which`."""
            return [
                names[position]
                for position in shuffle_rows(torch.arange(len(names)), seed, "stuffing", which)
            ]

        return shuffle_names(
            shuffle_names(secret, "secret")[:half] + shuffle_names(nobody, "nobody")[:half], "order"
        )


def play_stuffing(
    attack: IdStuffing,
    tables: Tables,
    settings: AlignmentSettings,
    *,
    role: Literal["active", "passive"] = "passive",
    history: AlignmentHistory | None = None,
    seed: int = 0,
) -> tuple[AttackResult, Stuffed]:
    """Let the adversary stuff its set until the candidates, or the victim's patience, are used up.

    Where the victim refused before anything was learned, the result does not apply, for that
    reason. `role` is the adversary's, of which the active is the hub, `history` the victim's own.
    """
    candidates = tables.draw_candidates(attack.candidates, seed)
    own_size = len(tables.own)
    stuffed = Stuffed()
    room = len(candidates) if attack.overstuff else settings.maximum_ids - own_size
    for _ in range(attack.intersections):
        numbers = [n for n in range(len(candidates)) if n not in stuffed.tried][: max(room, 0)]
        if not numbers:
            if not stuffed.tried:
                stuffed.refusal = "the agreed size leaves no room for a guess"
            break
        session = f"in memory {fresh_key().hex()}"
        # With all its customers in the set the run looks as usual.
        ids = [*tables.own, *(candidates[number] for number in numbers)]
        try:
            if history is not None:
                history.record_run(session=session, peers=[role])
            rows = _intersect(attack, ids, tables.victim, settings, session, role)
        except (DataError, RemoteProtocolError, IntersectionTooSmallError) as refusal:
            stuffed.refusal = str(refusal)
            break
        stuffed.tried.update(numbers)
        stuffed.found.update(numbers[row - own_size] for row in rows.tolist() if row >= own_size)
    notes = {
        name: torch.tensor([number in chosen for number in range(len(candidates))])
        for name, chosen in (("tried", stuffed.tried), ("found", stuffed.found))
    }
    victim = "passive" if role == "active" else "active"
    view = AdversaryView(
        role=role,
        parties=(role,),
        behaviour=attack.behaviour,
        description=Exchange(name=settings.backend),
        envelopes={},
        features={},
        knowledge=Knowledge(classes=2, victim=victim),
        deviation=PlayedAttack(attack.name, notes),
    )
    if not stuffed.tried:
        reason = f"the protocol refused: {stuffed.refusal}"
        return make_inapplicable_result(attack, view, reason, seed), stuffed
    has = set(tables.victim)
    members = torch.tensor([[name in has, False] for name in candidates])
    truth = Truth.for_members(members, classes=2)
    return score_guess(attack, view, attack.run(view, seed), truth, seed), stuffed


def _intersect(
    attack: IdStuffing,
    stuffed: Sequence[str],
    victim: Sequence[str],
    settings: AlignmentSettings,
    session: str,
    role: Literal["active", "passive"],
) -> NDArray[np.int64]:
    """Play one intersection of both parties; return the rows of its own set that the adversary
    learned.

    `stuffed`: the adversary's IDs, guesses included. `session`: its name.
    """
    honest = make_intersection(settings, session=session, dealer=_DEALER)
    stuffing: SetIntersection = honest
    if attack.overstuff:
        agreed = vars(honest.agreement) | {"maximum_ids": _MOST}
        boundless = _Boundless(**agreed, claimed=honest.agreement)
        stuffing = SET_INTERSECTIONS[settings.backend](boundless)
    unbounded = settings.model_copy(update={"maximum_ids": _MOST})
    stuffed_ids = canonical_ids(role, list(stuffed), unbounded)
    other = canonical_ids("victim", list(victim), settings)
    is_hub = role == "active"
    hub = (stuffing if is_hub else honest).make_hub(
        "active", ["passive"], stuffed_ids if is_hub else other
    )
    member = (honest if is_hub else stuffing).make_member(
        "passive", "active", other if is_hub else stuffed_ids
    )
    helpers = {_DEALER: honest.make_dealer("active", ["passive"])} if honest.needs_dealer else {}
    ends = {"active": hub, "passive": member}
    converse({role: ends[role], **ends, **helpers})  # the adversary begins
    if is_hub and isinstance(hub, EcdhHub):
        return hub.overlaps["passive"]
    return hub.rows if is_hub else member.rows
