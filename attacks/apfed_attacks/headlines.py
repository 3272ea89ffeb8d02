"""Headlines of attack results by direction: which reader learns which data of which victim.

Run by: everything that shows results of attacks. A headline speaks of one direction alone, since an
attack of another direction is no evidence about it. Where no attack of a direction ran, it says
"not attacked" and why, and never that nothing was found. "Not applicable" is said only where
nothing leaves in that direction, with that reason.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from apfed_attacks.interface import NOT_ATTACKED, AttackResult, Target
from secure_apfed.exchange.secure_sums import explain_unreadable, find_sum_class
from secure_apfed.settings import RunSettings

__all__ = [
    "Direction",
    "Headline",
    "list_directions",
    "make_headlines",
    "select_best_by_kind",
]

State: TypeAlias = Literal["found", "nothing found", "not attacked", "not applicable"]

_REASONS_SHOWN = 3
_VICTIM_BY_READER = {"active": "passives", "passive": "active"}
"""Victims as titles name them, by the role of the reader; any other role reads `others`."""


@dataclass(frozen=True, kw_only=True)
class Direction:
    """A direction: who reads whose what.

    Attributes:
        reader: role of the adversary.
        target: labels, features or membership.
        victim: name of the party that is read; empty: any of those that the reader may read.
    """

    reader: str
    target: Target
    victim: str = ""

    @classmethod
    def from_result(cls, result: AttackResult) -> "Direction":
        """Return the direction (who reads whose what) of one result.

        Labels always belong to the active, so their direction names no victim.
        """
        victim = "" if result.target == "labels" else result.victim or ""
        return cls(reader=result.role, target=result.target, victim=victim)

    @property
    def kind(self) -> str:
        """Return who reads whose what, by roles without names, for tables over several runs."""
        victim = _VICTIM_BY_READER.get(self.reader, "others")
        return _format_title(self.reader, self.target, victim)

    @property
    def title(self) -> str:
        """Return the direction in words, with the victim's name if it has one."""
        return _format_title(self.reader, self.target, self.victim) if self.victim else self.kind


def _format_title(reader: str, target: Target, victim: str) -> str:
    """Return "<reader> reads <target>" in words."""
    if target == "labels":
        return f"{reader} reads labels"
    if target == "membership":
        return f"{reader} reads who trained"
    return f"{reader} reads features of {victim}"


_FACTS_THAT_SEND: Mapping[Direction, frozenset[str]] = {
    Direction(reader="active", target="features"): frozenset(
        {
            "passives send representations",
            "contributions are summed",
            "passives vote",
            "tables are decomposed",
        }
    ),
    Direction(reader="passive", target="features"): frozenset(
        {
            "the active sends representations",
            "pseudo-labels are averaged",
            "weights are averaged",
        }
    ),
    Direction(reader="passive", target="labels"): frozenset(
        {
            "the active sends representations",
            "labels are shown",
            "votes of encrypted labels are summed",
            "gradients are returned",
            "pseudo-labels are averaged",
            "weights are averaged",
        }
    ),
}
"""By direction, the facts of a method under any of which something is sent in that direction."""


def list_directions(config: RunSettings) -> dict[Direction, str]:
    """Return the directions (who reads whose what) that a run's headlines are about, with reasons.

    A reason says why nothing is sent in that direction; it is "" where something is sent.
    """
    method_facts = config.method.exchange_facts
    reasons = {}
    for direction, facts in _FACTS_THAT_SEND.items():
        private_columns = "labels" if direction.target == "labels" else "features"
        sender = "passives'" if direction.reader == "active" else "active's"
        reasons[direction] = ""
        if not facts & method_facts:
            reasons[direction] = f"nothing that depends on the {sender} {private_columns} is sent"
    through_aggregator = Direction(reader="aggregator", target="features")
    if config.method.has_secure_sum:
        reasons[through_aggregator] = explain_unreadable(find_sum_class(config.secure_sum))
    elif "tables are decomposed" in method_facts:
        reasons[through_aggregator] = ""
    return reasons


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A headline of what the attacks of one direction (whose data which party reads) found.

    Attributes:
        best_attack: the result of the highest advantage; None: no attack of this direction ran.
        ran: number of attacks that ran.
        count_by_reason: number of attacks that found nothing to read, by the reason.
        reason_nothing_sent: why nothing is sent in this direction; empty: something is.
    """

    direction: Direction
    best_attack: AttackResult | None
    attack_count: int
    count_by_reason: Mapping[str, int]
    reason_nothing_sent: str = ""

    @property
    def state(self) -> State:
        """Whether something or nothing was found, or why no attack ran.

        "Not applicable" means that nothing is sent in this direction, "not attacked" that no attack
        was mounted or applied.
        """
        if self.best_attack is not None:
            return "found" if self.advantage > 0 else "nothing found"
        return "not applicable" if self.reason_nothing_sent else NOT_ATTACKED

    @property
    def advantage(self) -> float:
        """The advantage of the best attack, which must exist."""
        assert self.best_attack is not None
        assert self.best_attack.advantage is not None
        return self.best_attack.advantage

    @property
    def short_text(self) -> str:
        """Return only the advantage, or the state."""
        return self.state if self.best_attack is None else f"{self.advantage:+.3f}"

    @property
    def note(self) -> str:
        """Return metric and name of the best attack, or why none ran.

        The number of attacks that declined (found nothing to read) follows.
        """
        declined = self._describe_declined()
        if self.best_attack is None:
            return self.reason_nothing_sent or declined or "no attack of this direction was chosen"
        metric = str(self.best_attack.metric).replace("_", " ")
        note = f"{metric} over baseline, {self.best_attack.attack} by {self.best_attack.adversary}"
        if self.state == "nothing found":
            note = f"nothing found, {note}"
        return f"{note}; {declined}" if declined else note

    @property
    def text(self) -> str:
        """Return the advantage or the state, with its note."""
        separator = ", " if self.best_attack is not None else ": "
        return f"{self.short_text}{separator}{self.note}"

    def _describe_declined(self) -> str:
        """Return how many attacks declined (found nothing to read), with the commonest reasons; "":
        none.
        """
        count = sum(self.count_by_reason.values())
        if not count:
            return ""
        commonest = Counter(self.count_by_reason).most_common(_REASONS_SHOWN)
        reasons = "; ".join(f"{reason} ({times})" for reason, times in commonest)
        others = len(self.count_by_reason) - len(commonest)
        rest = f"; and {others} other reasons" if others else ""
        return f"{count} of {count + self.attack_count} attacks declined: {reasons}{rest}"

    def as_json(self) -> dict[str, Any]:
        """Return the headline as plain values, for reports."""
        best = self.best_attack
        return {
            "direction": self.direction.title,
            "kind": self.direction.kind,
            **asdict(self.direction),
            "state": self.state,
            "advantage": None if best is None else best.advantage,
            "metric": None if best is None else best.metric,
            "attack": None if best is None else best.setting,
            "ran": self.attack_count,
            "declined": dict(self.count_by_reason),
            "note": self.note,
        }


def make_headlines(
    results: Sequence[AttackResult], config: RunSettings | None = None
) -> tuple[Headline, ...]:
    """Return one headline for each direction (who reads whose what) of these results.

    Directions of the run without results have headlines, too.

    Args:
        results: results of attacks on one run.
        config: settings of the run; None: directions without results are left out.
    """
    expected = {} if config is None else list_directions(config)
    # Expected directions name roles only, so they are compared by kind with those of results.
    reason_nothing_sent = {direction.kind: reason for direction, reason in expected.items()}
    results_by_direction: dict[Direction, list[AttackResult]] = {}
    for result in results:
        results_by_direction.setdefault(Direction.from_result(result), []).append(result)
    kinds_with_results = {direction.kind for direction in results_by_direction}
    results_by_direction |= {
        direction: [] for direction in expected if direction.kind not in kinds_with_results
    }
    return tuple(
        _make_headline(direction, direction_results, reason_nothing_sent.get(direction.kind, ""))
        for direction, direction_results in results_by_direction.items()
    )


def _make_headline(
    direction: Direction, results: Sequence[AttackResult], reason_nothing_sent: str
) -> Headline:
    """Return the headline of one direction (who reads whose what) from its results.

    `reason_nothing_sent`: why nothing is sent in this direction; "" where something is.
    """
    ran = [result for result in results if result.advantage is not None]
    declined = Counter(_find_reason(result) for result in results if result.advantage is None)
    return Headline(
        direction=direction,
        best_attack=max(ran, key=lambda result: result.advantage or 0.0, default=None),
        attack_count=len(ran),
        count_by_reason=dict(declined),
        reason_nothing_sent=reason_nothing_sent,
    )


def _find_reason(result: AttackResult) -> str:
    """Return why an attack declined.

    The method's name at the start, which all reasons of a run share, is left out.
    """
    reason = result.reason or "it gave no reason"
    return reason.removeprefix(f"{result.method}: ")


def select_best_by_kind(headlines: Iterable[Headline]) -> dict[str, Headline]:
    """Return the headline with the highest advantage for each kind of direction.

    A kind is which role reads whose what, such as "passive reads labels". If no headline of a kind
    has an advantage, its first is returned.
    """
    best_by_kind: dict[str, Headline] = {}
    for headline in headlines:
        best = best_by_kind.setdefault(headline.direction.kind, headline)
        if headline.best_attack is None:
            continue
        if best.best_attack is None or headline.advantage > best.advantage:
            best_by_kind[headline.direction.kind] = headline
    return best_by_kind
