"""Passives without rules: what a malicious active meets where a protocol checks nothing.

Run by: the experimenter, in live runs that show what each rule of the protocol is good for. Not
a setting of any real run: the networks, gradients, links and sums are the real ones, only the
named checks are left out. Protects from nobody.

Letters: B batch, D numbers of a representation.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from protocols.sums.interface import StepBinding
from secure_apfed.contract import RepresentationTerms
from secure_apfed.exchange import Envelope, unpack
from secure_apfed.learning.checks import check_norms, check_rows, check_spread
from secure_apfed.parties import PassiveParty
from secure_apfed.parties.rules import bind_step, representation_specs

__all__ = ["ALL_RULES", "Rule", "UnprotectedPassive", "unbound"]

_UNBOUNDED = 1e30


class Rule(StrEnum):
    """What a passive, or the sum, holds a malicious active to.

    NORMS: a row of z has a norm between two bounds. BATCH: rows are distinct and not too few.
    SPREAD: their representations differ in direction. ALLOWANCE: a step is answered once, a row
    no more often than agreed, in batches no larger. WEIGHT: lambda_p is the contract's. BINDING: a
    contribution adds up only with answers to the same representations. PARTICIPANTS: a sum holds
    one contribution of every passive.
    """

    NORMS = "norms"
    BATCH = "batch"
    SPREAD = "spread"
    ALLOWANCE = "allowance"
    WEIGHT = "weight"
    BINDING = "binding"
    PARTICIPANTS = "participants"


ALL_RULES = frozenset(Rule)


class UnprotectedPassive(PassiveParty):
    """A passive that keeps to `rules` only.

    Args:
        honest: whose place, data and networks it takes over.
    """

    def __init__(self, honest: PassiveParty, rules: Collection[Rule]) -> None:
        # Everything that the honest party holds is this party's.
        vars(self).update(vars(honest))
        self._rules = frozenset(rules)
        self._asked = self.terms.weight

    def _accept(self, envelope: Envelope) -> tuple[Tensor, Tensor]:
        terms, rules = self.terms.representation, self._rules
        if Rule.NORMS not in rules:
            terms = terms.model_copy(update={"minimum_norm": 0.0, "maximum_norm": _UNBOUNDED})
        rows_B, z_BD, meta = _parse(envelope, terms)
        if Rule.BATCH in rules:
            aligned, minimum = len(self._held_N), self.contract.minimum_batch
            check_rows(rows_B, aligned=aligned, minimum=minimum, sender=envelope.sender)
        check_norms(z_BD, terms, sender=envelope.sender)
        if Rule.SPREAD in rules:
            check_spread(z_BD, terms, sender=envelope.sender)
        if Rule.ALLOWANCE in rules:
            self._allowance.check(envelope.step, rows_B, sender=envelope.sender)
            self.gate.enter(envelope)
        asked = {} if Rule.WEIGHT in rules else meta.get("weights", {})
        self._asked = float(asked.get(self.name, self.terms.weight))
        return rows_B, z_BD

    def _count(self, envelope: Envelope, rows_B: Tensor, digest: bytes) -> None:
        if Rule.ALLOWANCE in self._rules:
            super()._count(envelope, rows_B, digest)

    def _gradient(self, step: int, rows_B: Tensor, sent_BD: Tensor) -> Tensor:
        scale = self._asked / self.terms.weight if self.terms.weight else 1.0
        return super()._gradient(step, rows_B, sent_BD) * scale

    def _binding(self, envelope: Envelope, rows_B: Tensor) -> StepBinding:
        if Rule.BINDING in self._rules:
            return super()._binding(envelope, rows_B)
        return unbound(self.contract.session, envelope.step)


def unbound(session: str, step: int) -> StepBinding:
    """What a contribution answers that is bound to its step only."""
    return bind_step(session, step, torch.empty(0, dtype=torch.int64), b"")


def _parse(
    envelope: Envelope, terms: RepresentationTerms
) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
    """Read rows (B,), z (B, D) and metadata, whatever they are."""
    tensors, meta = unpack(envelope.payload, representation_specs(terms), sender=envelope.sender)
    return tensors["rows"], tensors["z"], meta
