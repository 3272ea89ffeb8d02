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

from apfed_protocols.sums.interface import StepBinding
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.exchange import Envelope, unpack
from secure_apfed.learning.checks import check_norms, check_rows, check_spread
from secure_apfed.parties.rules import Acceptance, bind_step, representation_specs

__all__ = ["ALL_RULES", "Lenient", "Rule", "unbound"]

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


class Lenient(Acceptance):
    """What a passive accepts that keeps to `rules` only.

    Args:
        honest: what it accepted so far; me: the passive; contract: of the session.
        rules: that are left.
    """

    def __init__(
        self, honest: Acceptance, me: str, contract: Contract, rules: Collection[Rule]
    ) -> None:
        super().__init__(me, contract, honest.allowance, aligned=honest.aligned)
        self._me, self._agreed, self._rules = me, self.weight, frozenset(rules)

    def read(self, envelope: Envelope) -> tuple[Tensor, Tensor]:
        """Return rows (B,) and representations (B, *shape) that keep to the rules that are left."""
        terms, rules, sender = self.terms, self._rules, envelope.sender
        if Rule.NORMS not in rules:
            terms = terms.model_copy(update={"minimum_norm": 0.0, "maximum_norm": _UNBOUNDED})
        rows_B, z_BD, meta = _parse(envelope, terms)
        if Rule.BATCH in rules:
            minimum = self.contract.minimum_batch
            check_rows(rows_B, aligned=self.aligned, minimum=minimum, sender=sender)
        check_norms(z_BD, terms, sender=sender)
        if Rule.SPREAD in rules:
            check_spread(z_BD, terms, sender=sender)
        if Rule.ALLOWANCE in rules:
            self.admit(envelope, rows_B)
        asked = {} if Rule.WEIGHT in rules else meta.get("weights", {})
        self.weight = float(asked.get(self._me, self._agreed))
        return rows_B, z_BD

    def count(self, envelope: Envelope, rows_B: Tensor, digest: bytes) -> None:
        """Count the answer, where the rule is left."""
        if Rule.ALLOWANCE in self._rules:
            super().count(envelope, rows_B, digest)

    def binding(self, envelope: Envelope, rows_B: Tensor) -> StepBinding:
        """What the contribution answers: its step alone, where the rule is gone."""
        if Rule.BINDING in self._rules:
            return super().binding(envelope, rows_B)
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
