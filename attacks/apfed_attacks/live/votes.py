"""Live ballots in which a party deviates: the real passives, links, sums, ledgers and counts.

Run by: the experimenter, who drives all parties. An active asks about rows and labels of its
choice, as often as it is answered; a passive votes with a labeller of its own making. Both keep to
the form of every message.

Letters: U rows asked about, n of them labelled, K classes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from apfed_attacks.live.runs import LiveSession
from apfed_attacks.recorded import exchange_of
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.labellers import Labeller
from secure_apfed.learning.votes import Votes
from secure_apfed.methods.votes import Ballot, VotesActive, VotesPassive

__all__ = ["VotesRun"]


class VotesRun(LiveSession[VotesActive]):
    """A session of votes; see `LiveSession`."""

    def __init__(
        self,
        config: Config,
        data: VerticalData | None = None,
        *,
        alignment: Mapping[str, Tensor] | None = None,
        logs: Path | None = None,
    ) -> None:
        # Any opening of votes will do, and only their base is common to all.
        role: type[VotesActive] = VotesActive  # type: ignore[type-abstract]  # never constructed
        super().__init__(config, data, role, alignment=alignment, logs=logs)
        self.session.transcript.begin_epoch(0)

    @property
    def ballot(self) -> Ballot:
        """What an honest active asks."""
        return self.learner.ballot

    @property
    def voters(self) -> tuple[str, ...]:
        """Names of the passives."""
        return tuple(self.session.contract.passives)

    def ask(
        self, rows_U: Tensor | None = None, labels: Mapping[int, int] | None = None
    ) -> tuple[Ballot, Votes]:
        """Ask for votes; return what was asked, and what was opened.

        Args:
            rows_U: alignment positions; None: the honest ones.
            labels: of which of these, by alignment position; None: the honest ones.

        Raises:
            RemoteProtocolError: a party refused; the run is over then.
        """
        honest = self.ballot
        if labels is not None:
            rows_U = honest.rows if rows_U is None else rows_U
            place = {position: at for at, position in enumerate(rows_U.tolist())}
            ballot = Ballot.of(
                rows_U, Tensor([place[position] for position in labels]).long(),
                Tensor(list(labels.values())).long(),
                size=honest.size, shown=exchange_of(self.config).labels == "shown",
            )  # fmt: skip
            self.learner.ballot = ballot
        step = self._next_step()
        links = cast(Links, _AtStep(self.session.links, step))  # sends and awaits as they do
        try:
            votes = self.session.play(self.learner.gather(links))
        finally:
            asked, self.learner.ballot = self.ballot, honest
        return asked, votes

    def vote_by(self, passive: str, labeller: Labeller) -> None:
        """Let this passive vote with another labeller from now on."""
        self.voter(passive).labeller = labeller

    def voter(self, passive: str) -> VotesPassive:
        """The honest role of a passive, which the experimenter asks for the truth."""
        role = self.session.helpers[passive]
        assert isinstance(role, VotesPassive)
        return role

    def learn(self) -> None:
        """Ask honestly, and teach the student."""
        _, votes = self.ask()
        self.learner.take(votes)


class _AtStep:
    """Links of an active that gives its question another number, so that it looks like a new one.

    An honest active asks once a session.
    """

    def __init__(self, links: Links, step: int) -> None:
        self._links, self._step = links, step

    def send(self, receiver: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        step = self._step if kind is Kind.LABELS else step
        self._links.send(receiver, kind, step, payload)

    async def receive(self, senders: Any, *kinds: Kind, **others: Any) -> Envelope:
        if Kind.VOTES in kinds:
            others["step"] = self._step
        return await self._links.receive(senders, *kinds, **others)
