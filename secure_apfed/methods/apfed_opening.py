"""Sets up the parties of APFed and of SingleVL, as the configuration says.

Run by: whoever begins a session. What the parties then do is `secure_apfed.methods.apfed`.
"""

import math

import torch

from protocols.sums import SecureSum
from secure_apfed.contract import AGGREGATOR
from secure_apfed.defences import gradient_chain, representation_chain
from secure_apfed.exchange import Kind
from secure_apfed.methods import noising
from secure_apfed.methods.accounts import (
    answers_log,
    guard_for,
    ledger_for,
    private_updates,
    refused_sums,
    update_ledgers,
    whole_training,
)
from secure_apfed.methods.ahead import waiting_of, worker_for
from secure_apfed.methods.aligning import training_rows
from secure_apfed.methods.apfed import Apfed
from secure_apfed.methods.defending import surroundings_of
from secure_apfed.methods.method import Start
from secure_apfed.methods.stage import Stage, set_stage
from secure_apfed.methods.terms import (
    check_passives,
    model_of,
    passive_terms,
    projection_size,
    representation_terms,
)
from secure_apfed.models import Shape, family_for, output_shape, projection_to
from secure_apfed.objectives import make_objective
from secure_apfed.parties import (
    ActiveNetworks,
    ActiveParty,
    AggregatorParty,
    Compute,
    PassiveParty,
    PrivateUpdates,
)
from secure_apfed.privacy import RepresentationGuard
from secure_apfed.privacy.guarantee import NOTHING_RELEASED
from secure_apfed.seeds import seeded

__all__ = ["open_apfed", "open_single_view"]


def open_apfed(start: Start) -> Apfed:
    """Set up APFed between all parties of the data.

    Raises:
        ConfigError, DataError, ModelError: settings, tables or networks that do not fit.
        CheckpointError: the active refused more sums of this run than it may go on after.
        IntersectionTooSmallError: fewer common IDs than agreed.
    """
    config, active = start.config, start.data.active
    names = tuple(table.name for table in start.data.passives)
    check_passives(config, names)
    projection = projection_size(config, names)
    networks, shape = _active_networks(start, projection)
    guard = guard_for(start, active.name)
    representation = representation_terms(config, shape, guard, projected=projection is not None)
    terms = {name: passive_terms(config, name, representation) for name in names}
    secure_sum, noise = noising.sum_and_noise(start, names, shape)
    agreed = noising.parameters_of(config, secure_sum, noise)
    stage = set_stage(start, terms=terms, secure_sum=agreed)
    private = private_updates(start, active.name, guard, rows=len(active.ids))
    party = _active_party(start, stage, networks, guard, secure_sum, shape, private)
    passives = _passive_parties(start, stage, secure_sum, noise)
    aggregator = AggregatorParty(stage.seat(AGGREGATOR), combiner=secure_sum.combiner())
    assert party.receiver is not None
    contributors = {passive.name: passive.contributor for passive in passives}
    stage.hold(
        Kind.SUM_SETUP,
        {party.name: party.receiver, **contributors, AGGREGATOR: aggregator.combiner},
    )
    accounts = noising.accounts_of(passives)
    return Apfed(
        headline=config.method,
        contract=stage.contract,
        transcript=stage.transcript,
        alignment=stage.alignment,
        active=party,
        passives=passives,
        aggregator=aggregator,
        ledgers={party.name: party.ledger, **update_ledgers(party.name, private), **accounts},
        contributions=accounts,
        training=(training := whole_training(config, party.ledger, private)),
        guarantee=training.statement(guard) if training else guard.statement(),
        secure_sum={**agreed, "rounding": secure_sum.rounding()},
        rounds=secure_sum.rounds,
        training_rows=training_rows(start.data, stage.alignment[active.name], config.train),
        test_rows=start.data.test_rows,
    )


def open_single_view(start: Start) -> Apfed:
    """Set up SingleVL (Section 5.1): the active alone; nothing is aligned, nothing is sent."""
    networks, shape = _active_networks(start, None)
    table = start.data.active
    guard = guard_for(start, table.name)
    stage = set_stage(start, terms={}, secure_sum={})
    private = private_updates(start, table.name, guard, rows=len(table.ids))
    party = _active_party(start, stage, networks, guard, None, shape, private)
    training = whole_training(start.config, party.ledger, private)
    return Apfed(
        headline=start.config.method,
        contract=stage.contract,
        transcript=stage.transcript,
        alignment=stage.alignment,
        active=party,
        passives=[],
        aggregator=None,
        ledgers=update_ledgers(table.name, private),
        training=training,
        guarantee=training.statement(None) if training else NOTHING_RELEASED,
        secure_sum={},
        training_rows=start.data.train_rows,
        test_rows=start.data.test_rows,
    )


def _active_networks(start: Start, projection: int | None) -> tuple[ActiveNetworks, Shape]:
    """The active's networks at their reproducible start, and the shape of one row of z."""
    config, active = start.config, start.data.active
    features: Shape = tuple(active.features.shape[1:])
    family = family_for(config.model, features)
    with seeded(config.seed, active.name, "encoder"):
        encoder = family.encoder(features, config.model)
    shape = output_shape(encoder, features)
    with seeded(config.seed, active.name, "head"):
        head = family.head(math.prod(shape), len(start.data.classes), config.model)
    if projection is None:
        return ActiveNetworks(encoder, head), shape
    with seeded(config.seed, active.name, "projection"):
        return ActiveNetworks(encoder, head, projection_to(projection, shape)), (projection,)


def _active_party(
    start: Start,
    stage: Stage,
    networks: ActiveNetworks,
    guard: RepresentationGuard,
    secure_sum: SecureSum | None,
    shape: Shape,
    private: PrivateUpdates | None,
) -> ActiveParty:
    config, table = start.config, start.data.active
    alignment = stage.alignment.get(table.name, torch.empty(0, dtype=torch.int64))
    return ActiveParty(
        stage.seat(table.name),
        table=table,
        alignment=alignment,
        networks=networks,
        guard=guard,
        ledger=ledger_for(start, table.name, guard, aligned=len(alignment)),
        receiver=secure_sum.receiver() if secure_sum else None,
        refused=refused_sums(start, table.name),
        train=config.train,
        compute=Compute.of(config.train),
        seed=config.seed,
        private=private,
        defences=representation_chain(config.defences, surroundings_of(start, table.name, shape)),
    )


def _passive_parties(
    start: Start, stage: Stage, secure_sum: SecureSum, noise: noising.NoisePlan | None
) -> list[PassiveParty]:
    config, settings = start.config, start.config.secure_sum
    worker, parties = worker_for(settings), []
    for table in start.data.passives:
        terms = stage.contract.passives[table.name]
        contributor = secure_sum.contributor(table.name)
        shape = terms.representation.shape
        batch = (config.train.batch_size, math.prod(shape))
        rows = stage.alignment[table.name]
        assert terms.objective is not None
        with seeded(config.seed, table.name, "objective"):
            objective = make_objective(
                terms.objective,
                representation=shape,
                features=tuple(table.features.shape[1:]),
                model=model_of(config, table.name),
            )
        parties.append(
            PassiveParty(
                stage.seat(table.name),
                features_N=table.features[rows.clamp(min=0)],
                objective=objective,
                contributor=contributor,
                train=config.train,
                compute=Compute.of(config.train),
                seed=config.seed,
                answers=answers_log(start, table.name),
                held_N=rows >= 0,
                noise=noising.contribution_noise(
                    start, table.name, shape, plan=noise, aligned=len(rows)
                ),
                waiting=waiting_of(settings, contributor, batch, worker),
                defences=gradient_chain(
                    config.defences, surroundings_of(start, table.name, shape), "contributions"
                ),
            )
        )
    return parties
