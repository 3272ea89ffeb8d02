"""Both ends of steps in which the active asks every passive, and reads the sum of their answers.

A step takes 2M + 1 envelopes of M passives, 4M + 1 where the sum has two rounds; the aggregator in
between is `secure_apfed.methods.apfed.SumAggregator`.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from apfed_protocols.sums import SumContributor, SumReceiver
from secure_apfed.contract import AGGREGATOR, Contract
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.methods.method import Helper, Save, keep_or_end
from secure_apfed.parties import ContributionNoise, RefusedSums
from secure_apfed.parties.rules import bind_step, read_sum

__all__ = ["OpenedSums", "SummingHelper", "SummingParty"]


class OpenedSums:
    """The active's end.

    Args:
        contract: of the session; receiver: its end of the sum.
        refused: where it notes a sum that it refuses.

    Attributes:
        opened: what it decoded last, (B, D); None before.
    """

    def __init__(self, contract: Contract, receiver: SumReceiver, refused: RefusedSums) -> None:
        self._contract, self._receiver, self._refused = contract, receiver, refused
        self.opened: Tensor | None = None

    async def set_up(self, links: Links) -> None:
        """Agree on keys with the others."""
        peers = (*self._contract.passives, AGGREGATOR)
        await links.converse(Kind.SUM_SETUP, self._receiver, peers)

    async def open(
        self, links: Links, step: int, rows_B: Tensor, request: bytes, *, numbers: int
    ) -> Tensor:
        """Ask all passives, and return the sum of what they answer, (B, `numbers`), float64.

        Args:
            links: of the active.
            step: of the run; each is asked once.
            rows_B: which the request is about.
            request: the same for all.
            numbers: of a row of an answer.

        Raises:
            RemoteProtocolError: a sum of others, of something else, or one that was altered.
        """
        contract, asked = self._contract, list(self._contract.passives)
        for name in asked:
            links.send(name, Kind.REQUEST, step, request)
        message = await links.receive(AGGREGATOR, Kind.SUM, step=step, patience=4)
        _, combined = read_sum(message, asked, contract)
        binding = bind_step(contract.session, step, rows_B, request)
        with self._refused.noting(step=step, contract=contract.digest.hex()):
            values = self._receiver.decode(combined, (len(rows_B), numbers), binding)
        self.opened = torch.from_numpy(values)
        return self.opened


class SummingParty(Protocol):
    """A passive that answers requests under a sum."""

    name: str
    contract: Contract
    contributor: SumContributor

    def contribute(self, envelope: Envelope) -> bytes: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def load_tensors(self, tensors: Mapping[str, Tensor], *, last_step: int) -> None: ...


class SummingHelper(Helper):
    """A passive's role: it adds to the sum what it is asked for; see `Helper`.

    Args:
        party: the passive.
        rounds: between the passives and the aggregator, 1 or 2.
        noise: that it adds, with the account of what it added; None: none.
        learn: what it does with gradients that come back; None: none may come.
        network: whose output it adds; None: it adds something else.
    """

    def __init__(
        self, party: SummingParty, *, rounds: int, noise: ContributionNoise | None = None,
        learn: Callable[[Envelope], None] | None = None, network: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.name, self.party, self._rounds = party.name, party, rounds
        self._learn, self._network = learn, network
        if noise is not None:
            self.contributions = noise.ledger
            self.ledgers = {party.name: noise.ledger}

    def sent_network(self) -> nn.Module | None:
        """The network whose output it adds to the sum."""
        return self._network

    async def set_up(self, links: Links) -> None:
        """Its end of the sum."""
        contract = self.party.contract
        peers = [contract.active, AGGREGATOR, *contract.passives]
        peers.remove(self.name)
        await links.converse(Kind.SUM_SETUP, self.party.contributor, peers)

    async def help(self, links: Links, save: Save) -> None:
        """Add what is asked for, and learn from what comes back, if anything does."""
        active, party = self.party.contract.active, self.party
        returned = () if self._learn is None else (Kind.GRADIENTS,)
        while True:
            message = await links.receive(
                active, Kind.REQUEST, *returned, Kind.CHECKPOINT, Kind.END, patience=8
            )
            step = message.step
            if message.kind is Kind.REQUEST:
                links.send(AGGREGATOR, Kind.CONTRIBUTION, step, party.contribute(message))
                if self._rounds == 2:
                    asked = await links.receive(AGGREGATOR, Kind.SUM_REQUEST, step=step, patience=2)
                    answer = party.contributor.answer(asked.payload)
                    links.send(AGGREGATOR, Kind.SUM_ANSWER, step, answer)
            elif self._learn is not None and message.kind is Kind.GRADIENTS:
                self._learn(message)
            elif not keep_or_end(message.kind, step, links, active, save):
                return

    def tensors(self) -> dict[str, Tensor]:
        return self.party.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        self.party.load_tensors(tensors, last_step=next_step - 1)
