"""The active of APFed and of SingleVL, as its settings and the contract describe it."""

import math

from torch import Tensor

from apfed_protocols.sums import SecureSum
from secure_apfed.contract import Contract
from secure_apfed.defences import representation_chain
from secure_apfed.methods.accounts import ledger_for, refused_sums, surroundings_of
from secure_apfed.methods.method import Own
from secure_apfed.methods.terms import outputs_of, projection_size, task_of
from secure_apfed.models import Shape, family_for, output_shape, projection_to
from secure_apfed.parties import ActiveNetworks, ActiveParty, Compute, PrivateUpdates
from secure_apfed.privacy import RepresentationGuard
from secure_apfed.seeds import seeded

__all__ = ["active_networks", "active_party"]


def active_networks(own: Own, projection: int | None) -> tuple[ActiveNetworks, Shape]:
    """The active's networks at their reproducible start, and the shape of one row of z."""
    model, seed = own.config.model, own.secrets.seed
    family = family_for(model, own.data.table.shape)
    with seeded(seed, own.name, "encoder"):
        encoder = family.encoder(own.data.table.shape, model)
    shape = output_shape(encoder, own.data.table.shape)
    with seeded(seed, own.name, "head"):
        head = family.head(math.prod(shape), outputs_of(own), model)
    if projection is None:
        return ActiveNetworks(encoder, head), shape
    with seeded(seed, own.name, "projection"):
        return ActiveNetworks(encoder, head, projection_to(projection, shape)), (projection,)


def active_party(
    own: Own,
    contract: Contract,
    guard: RepresentationGuard,
    updates: PrivateUpdates | None,
    rows: Tensor,
    secure_sum: SecureSum | None,
) -> ActiveParty:
    """The active's party; without a sum it trains alone."""
    config = own.config
    projection = projection_size(config, own.passives) if secure_sum else None
    networks, shape = active_networks(own, projection)
    return ActiveParty(
        own.name,
        contract,
        table=own.data.table,
        alignment=rows,
        networks=networks,
        guard=guard,
        ledger=ledger_for(own, guard, aligned=len(rows)),
        receiver=secure_sum.receiver() if secure_sum else None,
        refused=refused_sums(own),
        train=config.train,
        compute=Compute.of(config.train),
        seed=own.secrets.seed,
        private=updates,
        defences=representation_chain(config.defences, surroundings_of(own, shape)),
        task=task_of(own),
    )
