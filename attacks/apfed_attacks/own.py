"""Attacks on what one party sent, scored against its own data.

Run by: a party of a run whose parties run apart, after the run, on its own machine. It takes the
place of whoever received its representations, contributions or gradients, and knows no more of
itself than the attack says; so only it learns how well its rows are guessed. A contribution to a
sum is measured as it is before the sum protects it: what the active would read if all other
passives told it theirs.

Letters: N aligned rows, B rows of a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from apfed_attacks.foreign import evaluate
from apfed_attacks.interface import AttackResult
from apfed_attacks.table import ALL, ATTACKS, expand_choices, find_attack
from apfed_attacks.view import AttackError, Role
from secure_apfed.config import AttackChoice
from secure_apfed.data import UNLABELLED
from secure_apfed.exchange import Kind
from secure_apfed.organisations.own_record import OwnRecord, SentBatch

_EXCHANGES = 3  # decoys of each attack


def measure_own(
    record: OwnRecord, choices: Iterable[AttackChoice], *, seed: int
) -> tuple[AttackResult, ...]:
    """Mount attacks on what one party itself sent, scored against its own data.

    There is one result for each attack, set of options and receiver. An attack that finds nothing
    to read has a result with the reason.

    `record`: what the party sent, with its data. `choices`: attacks with options.

    Raises ConfigError: an attack or option is unknown.
    """
    choices = tuple(choices)
    chosen = None if any(choice.name == ALL for choice in choices) else expand_choices(choices)
    results = list[AttackResult]()
    if record.data is not None and record.config.method.needs_alignment:
        for (kind, receiver), batches in record.batches_by_receiver.items():
            results += _attack_batches(record, kind, receiver, batches, chosen, seed)
    applicable = [result for result in results if result.applicable]
    mounted = {result.attack for result in applicable}
    # An attack that applied to no receiver has one result, with the reason.
    unmounted = dict[str, AttackResult]()
    for result in results:
        if result.attack not in mounted:
            unmounted.setdefault(result.attack, result)
    wanted_names = list(ATTACKS) if chosen is None else [choice.name for choice in chosen]
    for name in wanted_names:
        has_result = name in mounted or name in unmounted
        if not has_result and _may_concern(record, name):
            reason = f"{record.me} let out nothing row by row of which it knows the truth"
            unmounted[name] = _make_inapplicable_result(record, name, "nobody", reason, seed)
    return (*applicable, *unmounted.values())


def _attack_batches(
    record: OwnRecord,
    kind: Kind,
    receiver: str,
    batches: Sequence[SentBatch],
    chosen: Sequence[AttackChoice] | None,
    seed: int,
) -> Iterator[AttackResult]:
    """Yield the results of attacks on what one receiver got in messages of one kind.

    They are scored by the party's own labels and features.

    `record`: what the party sent and received, with its data. `batches`: what the receiver got, in
    order. `chosen`: attacks with options; None: all that apply.
    """
    adversary = receiver
    if kind is Kind.CONTRIBUTION:
        adversary = f"{receiver}, told what the others contributed"
    reasons = dict[str, str]()
    for target, truth_N, is_known_N in _iter_truths(record, kind):
        h = list(_select_batches(batches, is_known_N))
        arguments: dict[str, Any] = {"h": h, target: truth_N[is_known_N], "seed": seed}
        if kind is Kind.GRADIENTS:
            arguments["gradients"] = h
        try:
            evaluation = evaluate(attacks=chosen, exchanges=_EXCHANGES, **arguments)
        except AttackError as error:
            reasons |= {name: str(error) for name in ATTACKS if ATTACKS[name].target == target}
            continue
        reasons |= {
            name: reason
            for name, reason in evaluation.lacking.items()
            if find_attack(name).target in (target, "membership")
        }
        for finding in evaluation.findings:
            yield replace(
                finding.result,
                adversary=adversary,
                victim=record.me,
                method=record.config.method.name,
            )
    chosen_names = None if chosen is None else {choice.name for choice in chosen}
    for name, reason in reasons.items():
        if chosen_names is None or name in chosen_names:
            yield _make_inapplicable_result(record, name, adversary, reason, seed)


def _iter_truths(record: OwnRecord, kind: Kind) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each truth that an attack on what the party sent can be scored against.

    A truth is its target ("labels" or "features"), the values (N, ...) of the aligned rows, and a
    mask (N,) of the rows whose value the party knows; other values mean nothing. Labels serve if
    they are classes, features unless gradients were sent.

    `record`: what the party sent and received, with its data.
    """
    assert record.data is not None
    rows_N = record.table_row_by_person  # -1 where the party has no row
    table = record.data.table
    is_own_N = rows_N >= 0
    is_classification = record.data.targets is None
    if table.labels is not None and is_classification:
        labels_N = table.labels[rows_N]
        yield "labels", labels_N, is_own_N & (labels_N != UNLABELLED)
    if kind is not Kind.GRADIENTS:
        yield "features", table.features[rows_N].flatten(1), is_own_N


def _select_batches(
    batches: Sequence[SentBatch], is_known_N: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield of each batch the b rows whose truth is known: (indices (b,), values (b, D)).

    An index counts the known rows alone. Batches without a known row are left out.

    `batches`: what the receiver got. `is_known_N`: mask of the N aligned rows whose truth is known.
    """
    index_N = torch.where(is_known_N, is_known_N.cumsum(0) - 1, -1)
    for batch in batches:
        index_B = index_N[batch.row_positions]
        is_known_B = index_B >= 0
        if is_known_B.any():
            yield index_B[is_known_B], batch.values[is_known_B].flatten(1)


def _may_concern(record: OwnRecord, name: str) -> bool:
    """Return whether this attack guesses data that the party has, and a role other than its own
    mounts it.
    """
    kind = find_attack(name)
    if kind.target == "labels":
        return record.data is not None and record.data.table.labels is not None
    return bool(_list_readers(record, name))


def _list_readers(record: OwnRecord, name: str) -> list[Role]:
    """Return the roles that can mount this attack on the party.

    The active is left out where it is the party itself.
    """
    is_active = record.me == record.active
    return [role for role in find_attack(name).roles if role != "active" or not is_active]


def _make_inapplicable_result(
    record: OwnRecord, name: str, adversary: str, reason: str, seed: int
) -> AttackResult:
    """Return the result of an attack that finds nothing to read, with the reason.

    `adversary`: the receiver of what was attacked.
    """
    kind = find_attack(name)
    readers = _list_readers(record, name) or list(kind.roles)
    return AttackResult(
        attack=name,
        target=kind.target,
        victim=record.me,
        adversary=adversary,
        role=readers[0],
        behaviour=kind.behaviour,
        method=record.config.method.name,
        applicable=False,
        reason=reason,
        seed=seed,
    )
