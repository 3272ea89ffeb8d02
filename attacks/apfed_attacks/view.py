"""What one adversary saw and knows: the only input that an attack ever gets.

Run by: the experimenter, after a run, who cuts a recording into views. A view holds the
envelopes that the coalition itself sent or received and its members' own features; nothing
of the other parties, so no attack can touch a victim's state by accident. Views are cut in
`apfed_attacks.recorded`; code that is not ours can build one from its own messages.

Helpers that read one are in `apfed_attacks.view`. Letters: A aligned rows, B batch, D numbers of
a representation, F features, K classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor, nn

from secure_apfed.exchange import Envelope, Flow, Kind
from secure_apfed.settings import unknown_name

if TYPE_CHECKING:
    from secure_apfed.settings.training import ModelSettings, ObjectiveSettings, TrainSettings

__all__ = [
    "AdversaryView",
    "Agreed",
    "Behaviour",
    "Budget",
    "Candidates",
    "Exchange",
    "Knowledge",
    "KnownRows",
    "Opened",
    "Played",
    "Role",
    "Sent",
    "Side",
]

Role: TypeAlias = Literal["passive", "active", "aggregator", "eavesdropper", "outsider"]
Behaviour: TypeAlias = Literal["curious", "malicious"]
Side: TypeAlias = Literal["active", "passives"]
Sent: TypeAlias = Literal["shown", "encrypted"]
Opened: TypeAlias = Literal[
    "gradients", "representations", "pseudo-labels", "weights", "sum of votes", "moment of votes",
    "singular vectors",
]  # fmt: skip

_CPU = torch.device("cpu")


def _placed(values: Tensor, device: torch.device) -> Tensor:
    """Numbers on the device; positions, labels and masks, which are bookkeeping, stay."""
    return values.to(device) if values.is_floating_point() else values


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class KnownRows:
    """Rows of which the adversary knows something that it did not observe.

    Attributes:
        positions: (n,) int64 alignment positions, each once.
        values: (n, ...) the labels (n,), or a victim's features (n, F).
    """

    positions: Tensor = field(default_factory=_no_rows)
    values: Tensor = field(default_factory=_no_rows)

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False, repr=False)
class Candidates:
    """Rows that may have trained the model, in an order that says nothing about it.

    Attributes:
        features: (n, ...) as the active encodes them; labels: (n,).
        train: how the active trains, as far as the adversary knows.
    """

    features: Tensor
    labels: Tensor
    train: "TrainSettings"

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False, kw_only=True)
class Knowledge:
    """What is declared that the adversary knows beyond what it saw.

    Attributes:
        classes: K.
        victim: the party whose labels or features are attacked.
        labels: known labels by alignment position.
        priors: the share of each class among the training rows; None: unknown to it.
        shadow: rows of which it knows the victim's features, for paired inversion.
        architecture: the victim's networks; None: unknown to it.
        encoder: the victim's network itself, rows of features -> representations, as in a
            white-box attack; None: unknown to it.
        candidates: people of whom it wants to know whether they trained the model.
        alike: how a party of the run trains on its own rows (n, ...) and labels (n,) alone: to a
            function rows -> scores (N, K); None: not told.
        public: party -> (P, ...) features of P people outside the training, whom the adversary
            knows wholly; row k is the same person in each.
    """

    classes: int
    victim: str | None = None
    labels: KnownRows = field(default_factory=KnownRows)
    priors: tuple[float, ...] | None = None
    shadow: KnownRows = field(default_factory=KnownRows)
    architecture: "ModelSettings | None" = None
    encoder: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    candidates: Candidates | None = None
    alike: Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]] | None = field(
        default=None, repr=False
    )
    public: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Self:
        """The same with all numbers on the device."""
        asked = self.candidates
        return replace(
            self,
            shadow=replace(self.shadow, values=_placed(self.shadow.values, device)),
            candidates=asked and replace(asked, features=_placed(asked.features, device)),
            public={name: _placed(rows, device) for name, rows in self.public.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much the adversary computes.

    Attributes:
        iterations: of any optimiser that the attack runs. Not seconds: a result must not
            depend on the machine.
        device: where it computes.
    """

    iterations: int = 300
    device: torch.device = _CPU


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What the contract says that one passive does; every party knows it.

    Attributes:
        objective: what it optimises; weight: lambda_p.
        clip: L2 bound of one row of its contribution; None: it does not clip.
    """

    objective: "ObjectiveSettings"
    weight: float
    clip: float | None


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the parties exchange while they train, as far as an attack must know it.

    Whatever is not stated does not happen. For split learning, say, it is
    `Exchange(name="split learning", released_by="passives", returns_gradients=True)`.

    Attributes:
        name: of the method or protocol, for results and reasons.
        released_by: who releases representations of its own features, row by row; the active
            sends the same to every passive.
        returns_gradients: the active returns to each passive the gradient of the task loss on
            what that passive made of its features, row by row.
        opens: what the active reads of all passives together, and of none alone: a sum of the
            "gradients" of their objectives, or of their "representations"; an average of
            "pseudo-labels", which the active sends and each answers by its own, or of "weights";
            the "sum of votes", or a noised "moment of votes", which is of no row; the left
            "singular vectors" of all parties' tables. `AdversaryView.opened` holds it.
        labels: how the active's labels go to the passives with a request for votes: "shown", or
            "encrypted".
        aligned: a position is the same person's at all parties that have a row there. False where
            parties have other people, or the active trains alone.

    Raises:
        ValueError: a word that is none of these.
    """

    name: str
    released_by: Side | None = None
    returns_gradients: bool = False
    opens: Opened | None = None
    labels: Sent | None = None
    aligned: bool = True

    def __post_init__(self) -> None:
        """Refuse words that no attack would look for."""
        for name, kind in (("released_by", Side), ("opens", Opened), ("labels", Sent)):
            if (word := getattr(self, name)) not in (None, *get_args(kind)):
                raise ValueError(f"Exchange: {name}: {unknown_name(word, get_args(kind))}")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Played:
    """A malicious attack's part in a live run.

    Attributes:
        attack: its name.
        notes: what the adversary kept for itself.
    """

    attack: str
    notes: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> Self:
        """The same with all numbers on the device."""
        return replace(self, notes={name: _placed(one, device) for name, one in self.notes.items()})


@dataclass(frozen=True, eq=False, kw_only=True)
class AdversaryView:
    """Everything that an attack may use.

    Numbers (features, representations, sums, networks) lie on `device`, and so does what
    `apfed_attacks.view` and `apfed_attacks.view` read: whatever torch makes of them is
    computed there. Positions, labels and masks lie on the CPU, and may index them.

    Attributes:
        role: of the first party.
        parties: the adversary and, after it, those that collude with it.
        behaviour: "curious" follows the protocol; "malicious" chose what it sent.
        description: how the parties trained.
        envelopes: epoch -> what the coalition sent and received, in that order.
        flows: message counts and sizes of the coalition's links (an eavesdropper's: all).
        opened: step -> (B, D) what the active decoded (`Exchange.opens`), its rows in the order of
            that step's representations or request; of gradients the sum of lambda_p B dL_p/dz. No
            message holds it: where sums are encrypted only the active's own record does.
        agreed: passive -> what it does by contract; empty where it contributes to no sum.
        played: what the adversary played in place of its part; None: it kept to the protocol
            while the run was recorded.
        stands_for: position -> the position that its releases are attributed to, in a decoy
            (`apfed_attacks.run`); None: each is attributed to its own.
        features: member -> (A, ...) its own features; row k is alignment position k, NaN where
            it does not hold that person. Read them by `apfed_attacks.columns.own_columns`.
        labels: member that trains on labels -> (A,) its own, int64, negative where a row has none.
        held: party -> (A,) bool: of whom it has a row, as far as the coalition knows. A party
            that is not here holds everybody, as all do unless alignment is pairwise.
        networks: member -> its own network, as training left it, where it sends what that makes of
            its features, or adds it to a sum; an attack trains copies. Where parties average
            weights, their average, rows -> scores (N, K).
        answers: the finished model as an outsider may query it: rows of the active's features
            -> log-probabilities of the classes, (n, K); None: nobody answers.
        knowledge, budget: what is declared.
    """

    role: Role
    parties: tuple[str, ...]
    behaviour: Behaviour
    description: Exchange
    envelopes: Mapping[int, tuple[Envelope, ...]] = field(repr=False)
    flows: tuple[Flow, ...] = field(default=(), repr=False)
    opened: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    agreed: Mapping[str, Agreed] = field(default_factory=dict)
    played: Played | None = None
    stands_for: Tensor | None = field(default=None, repr=False)
    features: Mapping[str, Tensor] = field(repr=False)
    labels: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    held: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    networks: Mapping[str, nn.Module] = field(default_factory=dict, repr=False)
    answers: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    knowledge: Knowledge
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        """Place all numbers; networks are moved as they are."""
        if self.is_decoy:  # made of a view, which has done so
            return
        device = self.device
        placed = {
            "features": {name: _placed(rows, device) for name, rows in self.features.items()},
            "opened": {step: _placed(sums, device) for step, sums in self.opened.items()},
            "networks": {name: network.to(device) for name, network in self.networks.items()},
            "knowledge": self.knowledge.to(device),
            "played": self.played and self.played.to(device),
        }
        for name, value in placed.items():
            object.__setattr__(self, name, value)  # the view is frozen once it is made

    @property
    def device(self) -> torch.device:
        """Where the attack computes."""
        return self.budget.device

    @property
    def name(self) -> str:
        """The coalition in words."""
        return " + ".join(self.parties)

    @property
    def is_decoy(self) -> bool:
        """Whether releases are attributed to other rows; baselines read none, and need no fit."""
        return self.stands_for is not None

    def attributed(self, positions: Tensor) -> Tensor:
        """Whose releases those of `positions` are taken for: their own, but for decoys."""
        return positions if self.stands_for is None else self.stands_for[positions]

    def holds(self, party: str | None, positions: Tensor) -> Tensor:
        """Whether the party has a row of each of `positions` (N,), bool."""
        held_A = None if party is None else self.held.get(party)
        everybody_N = torch.ones(len(positions), dtype=torch.bool)
        return everybody_N if held_A is None else held_A[positions]

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epochs in which the coalition saw representations, ascending."""
        return tuple(sorted(epoch for epoch in self.envelopes if self.senders(epoch)))

    def senders(self, epoch: int) -> frozenset[str]:
        """Who released representations in this epoch, as far as the coalition saw."""
        return frozenset(
            envelope.sender
            for envelope in self.envelopes[epoch]
            if envelope.kind is Kind.REPRESENTATIONS
        )
