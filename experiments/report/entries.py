"""The forms of the who-learns-what tables: situations, conditions and what entries say."""

from dataclasses import dataclass
from enum import StrEnum

from secure_apfed.exchange.envelope import Kind

__all__ = ["Coalition", "Condition", "Limit", "Role", "Rule", "Situation"]


class Role(StrEnum):
    """What a party is in a run."""

    ACTIVE = "active"
    PASSIVE = "passive"
    AGGREGATOR = "aggregator"
    DEALER = "dealer"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What of a run decides who can read what.

    Attributes:
        method: apfed, tvfl or single_view; apfed stands for all its forms.
        secure_sum: key of the sum's backend.
        guarded: whether representations carry noise before they leave the active.
        passives: M.
        pairwise: whether each passive helps on its own overlap with the active.
        label_dp: whether training labels went through a mechanism.
        private: whether the active trained by DP-SGD.
        noisy: whether every passive adds noise under the sum.
        defended: whether defences without a guarantee were on.
    """

    method: str
    secure_sum: str
    guarded: bool
    passives: int
    pairwise: bool = False
    label_dp: bool = False
    private: bool = False
    noisy: bool = False
    defended: bool = False


@dataclass(frozen=True, kw_only=True)
class Condition:
    """When an entry holds; what is left out holds always."""

    methods: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    guarded: bool | None = None
    passives: tuple[int, int] = (0, 1 << 30)
    pairwise: bool | None = None
    label_dp: bool | None = None
    private: bool | None = None
    noisy: bool | None = None
    defended: bool | None = None

    def holds(self, situation: Situation) -> bool:
        """Whether the situation is one of those that the entry speaks of."""
        least, most = self.passives
        return (
            (not self.methods or situation.method in self.methods)
            and (not self.sums or situation.secure_sum in self.sums)
            and self.guarded in (None, situation.guarded)
            and least <= situation.passives <= most
            and self.pairwise in (None, situation.pairwise)
            and self.label_dp in (None, situation.label_dp)
            and self.private in (None, situation.private)
            and self.noisy in (None, situation.noisy)
            and self.defended in (None, situation.defended)
        )

    def words(self) -> str:
        """Say the condition in words for a table."""
        least, most = self.passives
        told = [", ".join(self.methods), *([f"sum {' or '.join(self.sums)}"] if self.sums else [])]
        if self.guarded is not None:
            told.append("guard on" if self.guarded else "no guard")
        if least == most:
            told.append(f"M = {least}")
        elif least:
            told.append(f"M >= {least}")
        if self.pairwise is not None:
            told.append("alignment pairwise" if self.pairwise else "alignment of all")
        if self.label_dp is not None:
            told.append("label DP" if self.label_dp else "no label DP")
        if self.private is not None:
            told.append("DP-SGD" if self.private else "no DP-SGD")
        if self.noisy is not None:
            told.append("noise under the sum" if self.noisy else "no noise under the sum")
        if self.defended is not None:
            told.append("defences on" if self.defended else "no defences")
        return "; ".join(filter(None, told)) or "always"


@dataclass(frozen=True, kw_only=True)
class Rule(Condition):
    """What one role learns of one kind of message.

    Attributes:
        kind, receiver: of the message.
        reads: what the receiver can read.
        protects: what stands between the receiver and more.
        remains: what is not protected.
    """

    kind: Kind
    receiver: Role
    reads: str
    protects: str
    remains: str


@dataclass(frozen=True, kw_only=True)
class Coalition(Condition):
    """What parties learn if they put together what each of them has."""

    who: str
    learns: str


@dataclass(frozen=True, kw_only=True)
class Limit(Condition):
    """Something that a run does not guarantee."""

    sentence: str
