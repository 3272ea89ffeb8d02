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
from secure_apfed.contract import RepresentationTerms
from secure_apfed.exchange import Envelope, unpack
from secure_apfed.learning.release import (
    check_norms,
    check_rows,
    check_spread,
    representation_specs,
)
from secure_apfed.methods.apfed import ApfedPassive
from secure_apfed.methods.sum_end import Admitted, PassiveSum, bind_step

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


class Lenient:
    """What a passive accepts that keeps to `rules` only; takes the place of its `read`.

    Args:
        passive: honest so far.
        rules: that are left.
    """

    def __init__(self, passive: ApfedPassive, rules: Collection[Rule]) -> None:
        self._passive, self._agreed, self._rules = passive, passive.weight, frozenset(rules)
        passive.sum = _LenientSum(passive.sum, self._rules)
        passive.read = self.read  # type: ignore[method-assign]

    def read(self, message: Envelope) -> tuple[Admitted, Tensor]:
        """Admit rows (B,) and representations (B, *shape) that keep to the rules that are left."""
        passive, rules, sender = self._passive, self._rules, message.sender
        terms = passive.terms
        if Rule.NORMS not in rules:
            terms = terms.model_copy(update={"minimum_norm": 0.0, "maximum_norm": _UNBOUNDED})
        rows_B, z_BD, meta = _parse(message, terms)
        if Rule.BATCH in rules:
            aligned, minimum = len(passive.trainer.features_N), passive.contract.minimum_batch
            check_rows(rows_B, aligned=aligned, minimum=minimum, sender=sender)
        check_norms(z_BD, terms, sender=sender)
        if Rule.SPREAD in rules:
            check_spread(z_BD, terms, sender=sender)
        asked = {} if Rule.WEIGHT in rules else meta.get("weights", {})
        passive.weight = float(asked.get(passive.name, self._agreed))
        return passive.sum.admit(message, rows_B), z_BD


class _LenientSum(PassiveSum):
    """A passive's end of the sum that keeps to `rules` only; `honest` is that of before."""

    def __init__(self, honest: PassiveSum, rules: Collection[Rule]) -> None:
        vars(self).update(vars(honest))
        self._rules = rules

    def admit(
        self, asked: Envelope, rows_B: Tensor, *, step: int | None = None,
        counted: Tensor | None = None,
    ) -> Admitted:  # fmt: skip
        """Let a question through, checked where the rule is left."""
        if Rule.ALLOWANCE in self._rules:
            return super().admit(asked, rows_B, step=step, counted=counted)
        self._admitted = Admitted(asked.step, rows_B, rows_B, asked.payload, asked.sender)
        return self._admitted

    def count(self, admitted: Admitted, digest: bytes) -> None:
        """Count the answer, where the rule is left."""
        if Rule.ALLOWANCE in self._rules:
            super().count(admitted, digest)

    def binding(self, admitted: Admitted) -> StepBinding:
        """What the contribution answers: its step alone, where the rule is gone."""
        if Rule.BINDING in self._rules:
            return super().binding(admitted)
        return unbound(self.contract.session, admitted.step)


def unbound(session: str, step: int) -> StepBinding:
    """What a contribution answers that is bound to its step only."""
    return bind_step(session, step, torch.empty(0, dtype=torch.int64), b"")


def _parse(
    envelope: Envelope, terms: RepresentationTerms
) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
    """Read rows (B,), z (B, D) and metadata, whatever they are."""
    tensors, meta = unpack(envelope.payload, representation_specs(terms), sender=envelope.sender)
    return tensors["rows"], tensors["z"], meta
