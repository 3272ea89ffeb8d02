"""What openings of votes share whose protocol is made for one ballot: size, noise, aggregator.

Such a protocol knows before it is set up how many people are voted on. So the active tells
everybody; what it tells names the ballot by its digest, and with it the protocol's agreement, so
that votes on other people or other labels never add up. All passives must vote.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Self

import msgpack
import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from apfed_protocols.randomness import derive_key
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import BEFORE_TRAINING, Kind, Links
from secure_apfed.labellers import Labeller
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.methods.accounts import open_ledger
from secure_apfed.methods.method import Helper, Own, Save, keep_or_end
from secure_apfed.parties import Ballot, VotingParty
from secure_apfed.parties.rules import StepGate
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.votes import calibrate_votes
from secure_apfed.settings.run import RunSettings

__all__ = [
    "BallotSize",
    "VoteTerms",
    "VotesAggregator",
    "calibrated",
    "counted",
    "honest_passives",
    "noise_terms",
    "unless_untold",
    "vote_noise",
]

_DIGEST_BYTES = 32


@contextmanager
def unless_untold(active: str) -> Iterator[None]:
    """Name the active, too, where others fall silent that it may have asked nothing."""
    try:
        yield
    except PartyLeftError as silence:
        if silence.gone:
            raise
        raise PartyLeftError(
            f"{silence}; or {active}, who asks them, asked others and not them",
            left=(*silence.left, active),
        ) from silence


@dataclass(frozen=True, kw_only=True)
class BallotSize:
    """What all parties are told of a ballot before it is cast.

    Attributes:
        people, labelled: U and n.
        ballot: SHA-256 of the message to passives, which says rows and labels.
    """

    people: int
    labelled: int
    ballot: bytes

    @classmethod
    def of(cls, ballot: Ballot) -> "BallotSize":
        digest = hashlib.sha256(ballot.payload).digest()
        return cls(people=len(ballot.rows), labelled=len(ballot.labelled), ballot=digest)

    def tell(self, links: Links, names: Iterable[str]) -> None:
        """Tell these parties; run by the active."""
        for name in names:
            links.send(name, Kind.BALLOT_SIZE, BEFORE_TRAINING, msgpack.packb(asdict(self)))

    @classmethod
    async def heard(cls, links: Links, contract: Contract, *, most: int) -> "BallotSize":
        """What the active tells; run by all others.

        Args:
            links: of this party.
            contract: of the session.
            most: people whom this party knows of, or whom the settings allow.

        Raises:
            RemoteProtocolError: no size, or one beyond what may be asked.
        """
        active = contract.active
        message = await links.receive(active, Kind.BALLOT_SIZE, step=BEFORE_TRAINING, patience=8)
        try:
            told = msgpack.unpackb(message.payload)
            size = cls(**told)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(
                f"{active} sent something else than a ballot's size"
            ) from error
        if [type(one) for one in asdict(size).values()] != [int, int, bytes] or not (
            contract.minimum_batch <= size.people <= most
            and 1 <= size.labelled <= size.people
            and len(size.ballot) == _DIGEST_BYTES
        ):
            raise RemoteProtocolError(
                f"{active} asks about {size.people!r:.20} people, {size.labelled!r:.20} of them "
                f"labelled; expected {contract.minimum_batch} to {most}, and at least one label"
            )
        return size

    def require(self, ballot: Ballot, *, sender: str) -> None:
        """Raise RemoteProtocolError on another ballot than was told."""
        if BallotSize.of(ballot) != self:
            raise RemoteProtocolError(
                f"{sender} asks for votes on another ballot than it told all parties of"
            )

    def bind(self, contract: Contract) -> bytes:
        """32 bytes that stand for this ballot in this session, the same at all parties."""
        return hashlib.sha256(contract.digest + self.ballot).digest()


@dataclass(frozen=True)
class VoteTerms(ABC):
    """What the settings say of a protocol, before there is a ballot.

    Attributes:
        own: of any party; contributors: the passives; classes: K.
    """

    own: Own
    contributors: tuple[str, ...]
    classes: int

    @classmethod
    def of(cls, own: Own, contract: Contract) -> Self:
        (classes,) = contract.passives[own.passives[0]].representation.shape
        return cls(own, tuple(contract.passives), classes)

    @property
    def config(self) -> RunSettings:
        """Public settings."""
        return self.own.config

    @property
    @abstractmethod
    def release(self) -> SummedRelease | None:
        """What the noise of all passives gives; None: there is none."""


def honest_passives(config: RunSettings, passives: int) -> int:
    """Passives whose noise is counted.

    Raises:
        ConfigError: there is none, or a single passive's votes would be opened unasked.
    """
    honest = passives - config.votes.colluders
    if config.votes.epsilon is not None and honest < 1:
        raise ConfigError(
            f"votes.colluders: {config.votes.colluders} of {passives} passives leave no honest one "
            "whose noise would count"
        )
    if passives == 1 and not config.secure_sum.allow_single_passive:
        raise ConfigError(
            "secure_sum.allow_single_passive: a sum of one passive's votes hides nothing; take "
            "more passives, or say true and accept that"
        )
    return honest


def calibrated(
    config: RunSettings, labeller: Labeller, release: Callable[[int], SummedRelease]
) -> SummedRelease:
    """The release whose noise is the least that keeps votes.epsilon, for one vote."""
    votes = config.votes
    assert votes.epsilon is not None
    deviation = calibrate_votes(
        labeller, release, epsilon=votes.epsilon, delta=votes.delta, whole_table=False
    )
    return release(deviation)


def noise_terms(config: RunSettings, release: SummedRelease | None) -> dict[str, object]:
    """What the contract says about noise on votes."""
    if release is None:
        return {}
    votes = config.votes
    asked = {"epsilon": votes.epsilon, "delta": votes.delta, "colluders": votes.colluders}
    return {"noise": asked | {"steps": release.deviation, "honest": release.honest}}


def vote_noise(own: Own, release: SummedRelease | None, *, rows: int) -> ContributionNoise | None:
    """A passive's noise and its account; None where there is none."""
    if release is None:
        return None
    votes = own.config.votes
    return ContributionNoise(
        deviation=release.deviation,
        key=derive_key(own.noise_key, b"secure-apfed vote noise v1"),
        ledger=open_ledger(
            own,
            own.name,
            release,
            delta=votes.delta,
            budget=votes.epsilon,
            rows=rows,
            figure=own.config.facts.passives_figure,
        ),
        secret=own.config.guard.noise == "secret",
    )


def counted(party: VotingParty, ballot: Ballot, values_U: NDArray[np.float64]) -> bytes:
    """Count an answer for every row of the ballot, in the log; return a digest of all.

    Every session counts anew: its request, or its noise, is another one.
    """
    content = hashlib.sha256()
    for step, block in enumerate(ballot.blocks):
        values = values_U[block].tobytes()
        content.update(party.count(ballot, block, step, new=True, values=values))
    return content.digest()


class VotesAggregator(Helper):
    """The aggregator's role: it combines what all passives send, and can read none of it."""

    name = AGGREGATOR

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self._gate = StepGate(AGGREGATOR)

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Contributions that each passive sends; they are numbered from 0."""

    @abstractmethod
    def combine(self, step: int, bodies: Mapping[str, bytes]) -> bytes:
        """What the active gets for one contribution of each passive."""

    async def help(self, links: Links, save: Save) -> None:
        """Combine block after block, until the session ends."""
        contract, active = self.contract, self.contract.active
        everybody = (active, *contract.passives)
        while True:
            message = await links.receive(
                everybody, Kind.CONTRIBUTION, Kind.CHECKPOINT, Kind.END,
                least=len(everybody), patience=8,
            )  # fmt: skip
            contributed = message.kind is Kind.CONTRIBUTION
            if contributed is (message.sender == active):
                raise RemoteProtocolError(f"{message.sender} may send no {message.kind}")
            if not contributed:
                if not keep_or_end(message.kind, message.step, links, active, save):
                    return
                continue
            self._gate.enter(message)
            if message.step >= self.blocks:
                raise RemoteProtocolError(
                    f"{message.sender} sent block {message.step} of votes; this session takes "
                    f"{self.blocks}"
                )
            bodies = {message.sender: message.payload}
            while missing := [name for name in contract.passives if name not in bodies]:
                with unless_untold(active):
                    other = await links.receive(
                        missing, Kind.CONTRIBUTION, step=message.step, least=len(missing)
                    )
                bodies[other.sender] = other.payload
            combined = self.combine(
                message.step, {name: bodies[name] for name in contract.passives}
            )
            links.send(active, Kind.SUM, message.step, combined)
