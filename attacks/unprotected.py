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

from protocols.errors import RemoteProtocolError
from protocols.sums.interface import StepBinding
from secure_apfed.contract import AGGREGATOR, RepresentationTerms
from secure_apfed.exchange import Envelope, Kind, TensorSpec, unpack
from secure_apfed.parties import PassiveParty
from secure_apfed.parties.rules import bind_step, read_representations

__all__ = ["ALL_RULES", "Rule", "UnprotectedPassive", "unbound"]

_UNBOUNDED = 1e30


class Rule(StrEnum):
    """What a passive, or the sum, holds a malicious active to.

    NORMS: a row of z has a norm between two bounds. BATCH: rows are distinct, not too few, and
    their representations not too much alike. ALLOWANCE: a step is answered once, a row once an
    epoch, a batch is no larger than agreed. WEIGHT: lambda_p is the contract's. BINDING: a
    contribution adds up only with answers to the same representations. PARTICIPANTS: a sum holds
    one contribution of every passive.
    """

    NORMS = "norms"
    BATCH = "batch"
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

    def contribute(self, envelope: Envelope) -> Envelope:
        """Answer as an honest passive does, without the checks that are left out."""
        rows_B, z_BD, asked = self._read(envelope)
        if Rule.ALLOWANCE in self._rules:
            self.gate.enter(envelope)
            self._allowance.take(rows_B, sender=envelope.sender)
        scale = 1.0 if self.terms.weight == 0 else asked / self.terms.weight
        gradient_BD = self._gradient(envelope.step, rows_B, z_BD) * scale
        if Rule.BINDING in self._rules:
            binding = bind_step(self.contract.session, envelope.step, rows_B, envelope.payload)
        else:
            binding = unbound(self.contract.session, envelope.step)
        body = self.contributor.contribute(gradient_BD.flatten(1).cpu().numpy(), binding)
        return self.outbox.write(Kind.CONTRIBUTION, envelope.step, AGGREGATOR, body)

    def _read(self, envelope: Envelope) -> tuple[Tensor, Tensor, float]:
        """Return rows (B,), z (B, D) and the weight to use."""
        terms = self.terms.representation
        if Rule.NORMS not in self._rules:
            terms = terms.model_copy(update={"minimum_norm": 0.0, "maximum_norm": _UNBOUNDED})
        rows_B, z_BD, meta = _parse(envelope, terms)
        if Rule.BATCH in self._rules:
            read_representations(
                envelope,
                terms,
                aligned=len(self._features_N),
                minimum=self.contract.minimum_batch,
            )
        elif Rule.NORMS in self._rules:
            _check_norms(z_BD, terms, sender=envelope.sender)
        if Rule.WEIGHT in self._rules:
            return rows_B, z_BD, self.terms.weight
        return rows_B, z_BD, float(meta.get("weights", {}).get(self.name, self.terms.weight))


def unbound(session: str, step: int) -> StepBinding:
    """What a contribution answers that is bound to its step only."""
    return bind_step(session, step, torch.empty(0, dtype=torch.int64), b"")


def _parse(
    envelope: Envelope, terms: RepresentationTerms
) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
    """Read rows (B,), z (B, D) and metadata, whatever they are."""
    dtype = torch.float64 if terms.dtype == "float64" else torch.float32
    expected = {
        "rows": TensorSpec(torch.int64, (None,)),
        "z": TensorSpec(dtype, (None, *terms.shape)),
    }
    tensors, meta = unpack(envelope.payload, expected, sender=envelope.sender)
    return tensors["rows"], tensors["z"], meta


def _check_norms(z_BD: Tensor, terms: RepresentationTerms, *, sender: str) -> None:
    """Refuse rows whose norm is not within the agreed bounds.

    Raises:
        RemoteProtocolError: one is not.
    """
    norm_B = z_BD.flatten(1).double().norm(dim=1)
    if not terms.minimum_norm <= float(norm_B.min()) <= float(norm_B.max()) <= terms.maximum_norm:
        raise RemoteProtocolError(f"{sender} sent representations beyond the agreed norms")
