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
from typing import Annotated, Literal, Self

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from apfed_protocols.randomness import derive_key
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import BEFORE_TRAINING, Kind, Links
from secure_apfed.labellers import LABELLERS, Labeller, PrivateLogistic
from secure_apfed.labellers.guarantee import calibrate_votes
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.methods.accounts import open_ledger
from secure_apfed.methods.method import Helper, Own, Save, keep_or_end
from secure_apfed.parties import Ballot, VotingParty
from secure_apfed.parties.rules import StepGate
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.settings import OF_THE_RUN, THE_ACTIVE, unknown_name
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import NoiseSettings
from secure_apfed.solo import BASELINES

__all__ = [
    "BEST_SOLO",
    "BallotSize",
    "VoteSettings",
    "VoteTerms",
    "VotesAggregator",
    "calibrated",
    "counted",
    "honest_passives",
    "noise_terms",
    "unless_untold",
    "vote_noise",
]

BEST_SOLO = "best_solo"
_DIGEST_BYTES = 32


class VoteSettings(MethodSettings):
    """How parties vote on the labels of the active's rows, and how the active reads that.

    Attributes:
        labeller: a key of `LABELLERS`: how every party labels rows from its own features and the
            labels that there are.
        prior: what the active believes of its rows before it reads votes: "best_solo", what it
            would do alone by the baseline that its held-out labels choose; a key of `BASELINES`,
            by this one; or "labeller", what its own labeller of the passives' kind says.
        epsilon: what the vote on one person may cost one passive, the labeller held fixed; null:
            votes are opened without noise.
        weights_epsilon: what the weights of a labeller that noises them may cost a labelled
            person; for `private_logistic`, which needs it.
    """

    moved = OF_THE_RUN

    labeller: str = "spreading"
    prior: Annotated[str, THE_ACTIVE] = BEST_SOLO
    epsilon: float | None = Field(None, gt=0)
    weights_epsilon: float | None = Field(None, gt=0)

    predicts_alone = True

    @field_validator("prior")
    @classmethod
    def _is_a_prior(cls, name: str) -> str:
        priors = (BEST_SOLO, "labeller", *BASELINES)
        if name not in priors:
            raise ValueError(unknown_name(name, priors))
        return name

    @field_validator("labeller")
    @classmethod
    def _is_a_labeller(cls, name: str) -> str:
        if name not in LABELLERS:
            raise ValueError(unknown_name(name, LABELLERS))
        return name

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if (self.weights_epsilon is None) is (self.labeller == PrivateLogistic.name):
            raise ValueError(
                f"weights_epsilon: it is for {PrivateLogistic.name}, which needs it; got "
                f"{self.weights_epsilon} for {self.labeller}"
            )
        return self

    @property
    def answers(self) -> Literal["soft", "hard"]:
        """What a vote is: "soft" ones are shares of the classes that add up to 1 at most, "hard"
        ones name one class.
        """
        return "soft"

    @property
    def inductive(self) -> bool:
        return LABELLERS[self.labeller].inductive

    def noise(self, config: RunSettings) -> NoiseSettings | None:
        """See `MethodSettings`."""
        if self.epsilon is None:
            return None
        return NoiseSettings(epsilon=self.epsilon)

    def _needs_epsilon(self) -> None:
        if self.epsilon is None:
            raise ValueError(
                f"epsilon: method {self.name} protects each vote by noise; say how much a vote may "
                f"cost, as method: {{name: {self.name}, epsilon: 4}}"
            )


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
    honest = passives - config.colluders
    if VoteSettings.of(config).epsilon is not None and honest < 1:
        raise ConfigError(
            f"colluders: {config.colluders} of {passives} passives leave no honest one whose "
            "noise would count"
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
    """The release whose noise is the least that keeps the settings' epsilon, for one vote."""
    votes = VoteSettings.of(config)
    assert votes.epsilon is not None
    deviation = calibrate_votes(
        labeller, release, epsilon=votes.epsilon, delta=config.delta, whole_table=False
    )
    return release(deviation)


def noise_terms(config: RunSettings, release: SummedRelease | None) -> dict[str, object]:
    """What the contract says about noise on votes."""
    if release is None:
        return {}
    asked = {"epsilon": VoteSettings.of(config).epsilon}
    return {"noise": asked | {"steps": release.deviation, "honest": release.honest}}


def vote_noise(own: Own, release: SummedRelease | None, *, rows: int) -> ContributionNoise | None:
    """A passive's noise and its account; None where there is none."""
    if release is None:
        return None
    votes = VoteSettings.of(own.config)
    return ContributionNoise(
        deviation=release.deviation,
        key=derive_key(own.secrets.noise_key, b"secure-apfed vote noise v1"),
        ledger=open_ledger(
            own,
            own.name,
            release,
            delta=own.config.delta,
            budget=votes.epsilon,
            rows=rows,
            figure=own.config.method.passives_figure,
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
