"""A session of a method: the complete scripts of its parties, and a simulation of all of them in
one process.

Every party builds the contract for itself, from the settings and from what all parties offer in
their greetings. If a run resumes, the active states the run and its step; all parties state which
steps they have stored, and the session resumes from the newest step that all have.

`start_active` is the active's script up to the first step, `run_helper` a helper's (a passive's,
the aggregator's or the dealer's) from greeting to end. Both are the same whether one process runs
one party or all. `Simulation` runs all parties, for trials and measurements. Each party is built
there from its own data and keys, too; only the experimenter's record of what they sent covers all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.alignment.overlap import CommonPeople
from secure_apfed.base.phases import begin_phase
from secure_apfed.contract import (
    AGGREGATOR,
    Contract,
    Participant,
    PartyRole,
    RepresentationBounds,
    Resumption,
)
from secure_apfed.data import VerticalData
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.exchange import (
    Greeting,
    InMemoryNetwork,
    Kind,
    Links,
    Script,
    SignedContract,
    Transcript,
    agree_on_contract,
)
from secure_apfed.learning.own_code import UserFunctions, UserFunctionSettings, split_user_functions
from secure_apfed.measures.table import ACCURACY
from secure_apfed.methods.alignment import (
    DEALER,
    align_as_active,
    align_as_passive,
    deal_randomness,
    describe_people,
    needs_dealer,
    raise_heartbeat_limits,
    require_labels,
)
from secure_apfed.methods.contributor_log import (
    RunContributorLog,
    merge_answered_steps,
    warn_of_steps_without,
)
from secure_apfed.methods.method import (
    ActiveRole,
    HelperRole,
    Method,
    SessionTerms,
    StepCounter,
    meet_active,
    meet_all,
)
from secure_apfed.methods.party import (
    PartyCheckpoint,
    PartyContext,
    PartySecrets,
    Role,
    fresh_secrets,
)
from secure_apfed.methods.privacy_reports import (
    ReportedCost,
    SignedReport,
    sign_report,
    summarise_reported_costs,
)
from secure_apfed.methods.terms import ROWS_AT_ONCE, derive_limits, may_lack_passives
from secure_apfed.networks.rank import count_columns, describe_opened_numbers
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.settings import RunSettings, SilentPassive

T = TypeVar("T")
_LONGER_THAN_ANY_RUN = 1_000_000
"""How long a dealer waits for the end of the session, in units of `rules.patience_s`."""
_UNLIMITED_ANSWERS = 2**31
"""The contract's limit of answers about a person in sessions that only predict: there each passive
enforces a limit of its own."""
PartyTensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors of roles, by party name and tensor name."""


def new_session() -> str:
    """Return a random name for a session, 32 hex digits."""
    return token_hex(16)


@dataclass(frozen=True, kw_only=True)
class PartySession:
    """A party in a session, after the parties signed the contract and aligned their rows.

    Attributes:
        party: the party's settings, secrets, data and code.
        contract: the session's contract.
        signatures: the parties' signatures of the contract, by name.
        rows: the row of its table at each alignment position, (N,); empty: it has no table.
        role: the party's role, which has its private state of the session.
        common_people: number of its people that are aligned, with details; None: nothing was
            aligned.
    """

    party: PartyContext
    contract: Contract
    signatures: Mapping[str, bytes]
    rows: Tensor = field(repr=False)
    role: Role
    common_people: CommonPeople | None = None

    def save_checkpoint(self, step: int, *, tensors: Mapping[str, Tensor], **notes: Any) -> None:
        """Save this party's state before `step`; do nothing without a checkpoint store.

        The state is the role's tensors and ledgers, and besides them `tensors` and `notes`.
        """
        if self.party.secrets.checkpoint_store is None:
            return
        role = self.role
        state = PartyCheckpoint(
            run=self.contract.run,
            step=step,
            rows=self.rows,
            tensors={**role.tensors(), **tensors},
            ledgers={name: ledger.state_dict() for name, ledger in role.ledgers.items()},
            notes=notes,
        )
        self.party.secrets.checkpoint_store.save(state)

    def finish_part(self) -> None:
        """Mark this party's share of the run as finished; do nothing without a checkpoint store.

        The store then deletes the secrets that only a resumption would need.
        """
        if self.party.secrets.checkpoint_store is not None:
            self.party.secrets.checkpoint_store.finish_part(self.contract, self.role)


def assign_roles(
    method: Method, config: RunSettings, active: str, passives: Sequence[str]
) -> dict[str, PartyRole]:
    """Return the role of every party by name.

    Passives, aggregator and dealer are listed only if the method needs them.
    """
    roles: dict[str, PartyRole] = {active: "active"}
    if method.settings.has_passives:
        roles |= dict.fromkeys(passives, "passive")
    if method.public_facts.needs_aggregator:
        roles[AGGREGATOR] = "aggregator"
    if method.public_facts.needs_randomness_dealer or (
        method.public_facts.needs_alignment and needs_dealer(config.alignment)
    ):
        roles[DEALER] = "dealer"
    return roles


async def enter_session(
    party: PartyContext, links: Links, method: Method, *, session: str | None = None
) -> SignedContract:
    """Exchange greetings, sign a common contract, and encrypt the links under it.

    It also sets how long `links` wait, and for which peers, and stores the contract if the party
    keeps checkpoints. `session`: name of this session, given at the active, which chooses it; None
    at other parties.
    """
    links.is_prediction = party.trained_run is not None
    agreement = await agree_on_contract(
        links,
        identity=party.secrets.identity,
        known=party.identity_by_party,
        active=party.active,
        session=session,
        make_greeting=lambda run_key: Greeting(
            identity=party.secrets.identity.public,
            run_key=run_key.public,
            offer=method.offer_terms(party) if party.data_or_none is not None else None,
            **_describe_checkpoints(party),
        ),
        make_contract=lambda name, greetings: _build_contract(party, method, name, greetings),
    )
    links.unit_s = agreement.contract.patience_s
    # If one of these peers falls silent, the session ends.
    links.needed_peers = _list_needed_peers(party, agreement.contract)
    if party.secrets.checkpoint_store is not None:
        party.secrets.checkpoint_store.save_contract(agreement.contract, agreement.signatures)
    raise_heartbeat_limits(party, links)
    return agreement


def _list_needed_peers(party: PartyContext, contract: Contract) -> tuple[str, ...]:
    """Return the names of the peers whose silence ends the session.

    The dealer is not among them, since it leaves once it has dealt.
    """
    # A run that recovers continues without a silent passive.
    can_recover = contract.silent_passive == "recover"
    roles = ("active", "aggregator") if can_recover else ("active", "aggregator", "passive")
    needed_names = [name for role in roles for name in contract.list_names(role)]
    return tuple(name for name in needed_names if name != party.name)


def _describe_checkpoints(party: PartyContext) -> dict[str, Any]:
    """Return the fields of this party's greeting that say from which steps it can resume.

    The active adds the step that it wants to resume from. A passive adds the later steps that it
    answered, each with the passives that answered it together. A party without a
    checkpoint store or a table returns no fields.
    """
    store = party.secrets.checkpoint_store
    if store is None or party.data_or_none is None:
        return {}
    if party.name != party.active:
        steps = store.list_steps()
        has_log = bool(steps) and may_lack_passives(party.config)
        log = RunContributorLog.for_party(party) if has_log else None
        return {"holds": steps, "answered": log.list_steps(min(steps)) if log else ()}
    checkpoint = store.load_latest()
    resumption = Resumption(run=checkpoint.run, step=checkpoint.step) if checkpoint else None
    return {"holds": store.list_steps(), "resumes": resumption}


def _build_contract(
    party: PartyContext, method: Method, session: str, greetings: Mapping[str, Greeting]
) -> Contract:
    """Build the contract from public settings and all greetings; every party builds the same.

    `session`: name of this session. `greetings`: mapping from party name to its first message,
    which has its keys, offered terms (bounds on the rows that it sends) and stored checkpoints.
    Raises RemoteProtocolError: a party offers no terms where the method needs them, or the reverse.
    """
    config = party.config
    proposed_terms = _collect_proposed_terms(party, method, greetings)
    agreed_terms = method.derive_terms(party, proposed_terms, session)
    roles = assign_roles(method, config, party.active, party.passives)
    if party.trained_run is not None:  # a session that only predicts, by this run's model
        roles.pop(DEALER, None)  # prediction needs none
        return Contract(
            session=session,
            participants=_list_participants(roles, greetings),
            passives=dict(agreed_terms.passives),
            settings=config.collect_terms(),
            secure_sum=dict(agreed_terms.secure_sum),
            # Passives enforce limits of their own, so the contract sets none.
            minimum_batch=1,
            epochs=_UNLIMITED_ANSWERS,
            batch_size=ROWS_AT_ONCE,
            patience_s=config.rules.patience_s,
            predicts=party.trained_run,
        )
    limits = derive_limits(config)
    silence_rule = _pick_silence_rule(party, agreed_terms)
    return Contract(
        session=session,
        participants=_list_participants(roles, greetings),
        passives=dict(agreed_terms.passives),
        settings=config.collect_terms(),
        secure_sum=dict(agreed_terms.secure_sum),
        minimum_batch=config.rules.minimum_batch,
        epochs=limits.releases,
        batch_size=limits.rows,
        spare_answers=config.rules.spare_answers,
        silent_passive=silence_rule,
        patience_s=config.rules.patience_s,
        restarts=config.rules.restarts,
        resumes=_find_resumption(party, greetings, silence_rule),
    )


def _collect_proposed_terms(
    party: PartyContext, method: Method, greetings: Mapping[str, Greeting]
) -> dict[str, RepresentationBounds]:
    """Return the terms that parties offered in their greetings, by party name.

    Raises RemoteProtocolError: not exactly those parties offered terms from which the method needs
    them.
    """
    proposed_terms = {
        name: greeting.offer for name, greeting in greetings.items() if greeting.offer is not None
    }
    method_facts = method.public_facts
    names_by_role = {"active": (party.active,), "passives": party.passives}
    expected_names = [name for role in method_facts.proposing_roles for name in names_by_role[role]]
    if set(proposed_terms) != set(expected_names):
        raise RemoteProtocolError(
            f"{party.name}: in {method_facts.title} what a row is that parties send is said by "
            f"{', '.join(expected_names) or 'nobody'}; it was said by "
            f"{', '.join(proposed_terms) or 'nobody'}"
        )
    return proposed_terms


def _list_participants(
    roles: Mapping[str, PartyRole], greetings: Mapping[str, Greeting]
) -> tuple[Participant, ...]:
    """Return name, role and public keys of every party, as the contract states them.

    `roles`, `greetings`: role and first message of each party, by name.
    """
    return tuple(
        Participant(
            name=name,
            role=role,
            identity=greetings[name].identity.hex(),
            public_key=greetings[name].run_key.hex(),
        )
        for name, role in roles.items()
    )


def _pick_silence_rule(party: PartyContext, agreed_terms: SessionTerms) -> SilentPassive:
    """Return the rule for a passive that stops answering.

    It is the configured rule, or by default "recover" if sums may lack passives, and "stop"
    otherwise. `agreed_terms`: the method's terms for the contract.

    Raises ConfigError: the settings ask to continue without a silent passive, but the sum or the
    method needs every passive; or they ask to restart a run that stops.
    """
    configured_rule = party.config.rules.silent_passive
    passive_count = len(agreed_terms.passives)
    # The fewest contributions that a sum needs; without recoverable masks it needs all.
    threshold = agreed_terms.secure_sum.get("threshold", passive_count)
    can_recover = may_lack_passives(party.config) and threshold < passive_count
    if configured_rule != "recover" or can_recover:
        rule = configured_rule or ("recover" if can_recover else "stop")
        if rule == "stop" and party.config.rules.restarts:
            raise ConfigError(
                "rules.restarts: where the silence of a passive stops the run, nobody begins again "
                "by itself; leave it at 0, or say rules.silent_passive: wait, or recover"
            )
        return rule
    if not party.config.method.can_continue_without_passive:
        raise ConfigError(
            f"rules.silent_passive: method {party.config.method.name} needs every passive in every "
            "step; say stop or wait"
        )
    raise ConfigError(
        f"rules.silent_passive: the sum needs all {passive_count} passives, so no step goes on "
        "without one; take recoverable masks with a threshold above half of the passives and below "
        "all, as secure_sum: {scheme: plain, masks: recoverable, "
        f"threshold: {passive_count // 2 + 1}}}"
        f"{' with 3 passives or more' if passive_count < 3 else ''}, or say stop or wait"
    )


def _find_resumption(
    party: PartyContext, greetings: Mapping[str, Greeting], silence_rule: SilentPassive
) -> Resumption | None:
    """Return the run and step at which all parties resume; None: the run begins now.

    The step is the newest one that every checkpoint folder has. A run that may continue without a
    passive resumes at the active's newest step instead, and a passive that was absent then returns
    with an older state. Later steps that were already answered keep the passives that
    answered them together, so that no difference of two sums reveals one passive's contribution.

    `greetings`: mapping from party name to its first message, which lists its stored checkpoints.
    `silence_rule`: "stop", "wait" or "recover", the rule for a passive that stops answering.
    """
    newest_at_active = greetings[party.active].resumes
    if newest_at_active is None:
        return None
    if silence_rule == "recover":
        answered_by_passive = {name: greetings[name].answered for name in party.passives}
        answered_steps = merge_answered_steps(
            answered_by_passive, passives=party.passives, since=newest_at_active.step
        )
        # The passives' reports replace any list of answered steps that the active sent.
        return newest_at_active.model_copy(update={"answered": answered_steps})
    parties_with_checkpoints = [
        party.active,
        *(name for name in party.passives if name in greetings),
    ]
    stored_steps = [set(greetings[name].holds) for name in parties_with_checkpoints]
    common_steps = set.intersection(*stored_steps)
    # Without a common step, a party that lacks the active's newest one raises the error.
    step = max(
        (step for step in common_steps if step <= newest_at_active.step),
        default=newest_at_active.step,
    )
    return newest_at_active.model_copy(update={"step": step})


def _load_checkpoint(
    party: PartyContext, contract: Contract
) -> tuple[PartyCheckpoint | None, Tensor | None]:
    """Return the checkpoint that this party resumes from, and its table's row at each position.

    Positions are those of the alignment. The checkpoint is None at the start of a run. The rows are
    None if the tables still have to be aligned.

    Raises CheckpointError: the session resumes a run or step that this party has not stored, or
    starts a run although this party's folder has another one.
    """
    resumption = contract.resumes
    store = party.secrets.checkpoint_store
    checkpoint = (
        store.load_latest(max_step=resumption.step if resumption else None) if store else None
    )
    if resumption is None:
        if checkpoint and checkpoint.step > 0 and party.name != party.active:
            raise CheckpointError(
                f"{party.name}: resume the run that its folder holds, or choose another folder: "
                f"{contract.active} restarts, and the folder of {party.name} holds step "
                f"{checkpoint.step} of a run"
            )
        if party.name != party.active:
            # Logs count releases by alignment position; a new alignment would put other people
            # there.
            party.require_no_releases()
        return None, party.aligned_rows
    if party.data_or_none is None:
        return None, torch.empty(0, dtype=torch.int64)  # it has no checkpoint
    # Where the run continued without a silent passive, that one returns with an older checkpoint.
    if checkpoint is None or (
        checkpoint.step != resumption.step and contract.silent_passive != "recover"
    ):
        newest = f"step {checkpoint.step}" if checkpoint else "no step before it"
        raise CheckpointError(
            f"{party.name}: put its checkpoint back, or begin a new run: {contract.active} goes on "
            f"from step {resumption.step}, and the folder of {party.name} holds {newest}"
        )
    if checkpoint.run != resumption.run:
        raise CheckpointError(
            f"{party.name}: put the checkpoints of one run back at all parties: {contract.active} "
            f"goes on with the run {resumption.run}, and the checkpoint of {party.name} is of "
            f"{checkpoint.run}, whose rows stand in another order"
        )
    return checkpoint, checkpoint.rows


async def start_active(
    party: PartyContext, links: Links, method: Method, *, session: str
) -> tuple[PartySession, ActiveRole]:
    """Run the active's script up to the first step: agree, align, set up, and restore its state.

    `session`: name of this session, the same at all parties. Returns the active in this session,
    and its role.

    Raises:
        ConfigError, DataError, ModelError: settings, table or networks do not fit, or all common
            people have labels of one class.
        CheckpointError: this party's checkpoints do not fit the session, or the active refused more
            sums of this run than it may continue after.
        IntersectionTooSmallError: there are fewer common IDs than agreed.
    """
    begin_phase("agree")
    agreement = await enter_session(party, links, method, session=session)
    contract = agreement.contract
    helpers = [*contract.passives, *contract.list_names("aggregator")]
    checkpoint, rows = _load_checkpoint(party, contract)
    if contract.passives and rows is None:
        rows = torch.arange(len(party.data.table.ids))  # all rows, if the method aligns no tables
        if method.public_facts.needs_alignment:
            begin_phase("align")
            rows = await align_as_active(party, links, contract.session)
            begin_phase("agree")  # measured times count the rest of this function there
    # Wait until all parties have aligned their tables; in a resumed run they are aligned already.
    if contract.passives and contract.resumes is None:
        await meet_all(links, helpers)
    # An active without passives aligns nothing, so there are no positions.
    rows = torch.empty(0, dtype=torch.int64) if rows is None else rows
    common_people = None
    if contract.passives and method.public_facts.needs_alignment:
        common_people = describe_people(party, rows)
    require_labels(method, party.config, party.data, rows)
    warn_of_steps_without(party, contract)
    active_role = method.build_active(party, contract, rows)
    await active_role.set_up(links)
    await meet_all(links, helpers)
    party_session = PartySession(
        party=party,
        contract=contract,
        signatures=agreement.signatures,
        rows=rows,
        role=active_role,
        common_people=common_people,
    )
    _restore_role(active_role, checkpoint)
    return party_session, active_role


async def run_helper(
    party: PartyContext,
    links: Links,
    method: Method,
    role: PartyRole,
    *,
    on_entry: Callable[[PartySession], None] = lambda entered: None,
) -> None:
    """Run the whole script of a passive, aggregator or dealer, until the active ends the session.

    A dealer's script ends earlier, once it has dealt.

    `on_entry`: called with the party's session once its role is set up; not for a dealer. Raises
    ConfigError, DataError, ModelError, CheckpointError, IntersectionTooSmallError: this party's
    settings, table or checkpoint do not fit.
    """
    agreement = await enter_session(party, links, method)
    contract = agreement.contract
    checkpoint, rows = _load_checkpoint(party, contract)
    if role == "dealer":
        if rows is None and needs_dealer(party.config.alignment):
            await deal_randomness(party, links, contract.session)
        await method.run_dealer(party, links, contract)
        # A session that is interrupted before its first checkpoint needs the dealer again, so a
        # dealer of a run with restarts stays until the end.
        if contract.restarts:
            await links.receive(party.active, Kind.END, patience=_LONGER_THAN_ANY_RUN)
        return
    if rows is None:
        rows = await _align_rows(role, party, links, method, contract)
    if contract.resumes is None:
        await meet_active(links, party.active)
    warn_of_steps_without(party, contract)
    if role == "aggregator":
        helper = method.build_aggregator(party, contract)
    else:
        helper = method.build_passive(party, contract, rows)
    common_people = None
    if role == "passive" and method.public_facts.needs_alignment:
        common_people = describe_people(party, rows)
    session = PartySession(
        party=party,
        contract=contract,
        signatures=agreement.signatures,
        rows=rows,
        role=helper,
        common_people=common_people,
    )
    await helper.set_up(links)
    _restore_role(helper, checkpoint)
    # Saved before the active's first checkpoint, which follows once all parties are here.
    session.save_checkpoint(contract.resumes.step if contract.resumes else 0, tensors={})
    await meet_active(links, party.active)
    on_entry(session)

    def save_checkpoint(step: int) -> bytes:
        """Save this party's state before `step`; return its signed privacy costs as bytes."""
        session.save_checkpoint(step, tensors={})
        identity = party.secrets.identity
        ledgers = helper.ledgers.items()
        return sign_report(ledgers, identity, contract.digest, step)

    await helper.run_session(links, save_checkpoint)
    session.finish_part()


async def _align_rows(
    role: PartyRole, party: PartyContext, links: Links, method: Method, contract: Contract
) -> Tensor:
    """Align a helper's table; return its row at each of the N alignment positions, -1 for none.

    If the method aligns no tables, all rows are returned in order. A helper other than a passive
    has no table, so its result is empty.
    """
    if role != "passive":
        return torch.empty(0, dtype=torch.int64)
    if not method.public_facts.needs_alignment:
        return torch.arange(len(party.data.table.ids))
    return await align_as_passive(party, links, contract.session)


def _restore_role(role: Role, checkpoint: PartyCheckpoint | None) -> None:
    """Load a checkpoint's tensors and privacy ledgers into a role that is set up.

    `checkpoint`: the checkpoint; None: the run begins now, and nothing is loaded.
    """
    if checkpoint is None:
        return
    role.load_tensors(checkpoint.tensors, next_step=checkpoint.step)
    for name, ledger in role.ledgers.items():
        ledger.load_state_dict(dict(checkpoint.ledgers[name]))


class TrainingLoop(StepCounter, Protocol):
    """The training loop of a run: epochs and steps, with measurements and checkpoints between."""

    def iterate_epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs that have not run yet."""

    def iterate_batches(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each step of an epoch with its batch of rows.

        The batches depend on seed and epoch only, so that a resumed run repeats them.
        """

    async def note_held_out_loss(self) -> None:
        """Record the loss on the validation rows, by which training may stop early."""

    def is_last(self, epoch: int) -> bool:
        """Return whether this epoch is the last one."""

    async def finish_epoch(self, *, is_last: bool) -> None:
        """Evaluate if it is time to, record the scores, and let all parties save a checkpoint.

        `is_last`: whether training is over.
        """


async def train_epochs(active_role: ActiveRole, links: Links, loop: TrainingLoop) -> None:
    """Run the active's training: every epoch with its steps, then the last exchange and evaluation.

    `active_role`: the active's role. `loop`: numbers epochs and steps, and evaluates between
    them. If it has no steps in an epoch (its model is fitted already), this epoch is the last one.
    """
    for epoch in loop.iterate_epochs():
        has_steps = await active_role.begin_epoch(links, loop)
        batches = loop.iterate_batches(epoch) if has_steps else ()
        for step, rows_B in batches:
            loop.count_step(await active_role.train_step(links, step, rows_B))
        await loop.note_held_out_loss()
        is_last = not has_steps or loop.is_last(epoch)
        if is_last:
            await active_role.finish_training(links, loop)
        await loop.finish_epoch(is_last=is_last)
        if not has_steps:
            return


class Session:
    """A running session in the active's process; in a simulation this process runs all parties.

    Attributes:
        party_session: the active in this session.
        active_role: the active's role.
        links: the active's connections to the other parties.
        transcript: the messages sent by the parties that run in this process.
        headline_variant: the inference variant (key of `evaluate`'s result) that a run reports
            first.
        contract: the session's contract.
        signatures: the parties' signatures of it, by name.
        alignment: mapping from the name of each party of this process with a table to the row of
            that table at each alignment position, (N,), -1 for none; empty if there is no passive.
        common_people: mapping from the name of each party of this process with an aligned table to
            the number of its people that are common.
        helpers: the roles of the other parties in this process, by name.
        reported_costs: mapping from the name of each party in another process to the privacy costs
            that it reported last.
        signed_reports: the same reports as signed, by party name.
    """

    def __init__(
        self,
        party_session: PartySession,
        active_role: ActiveRole,
        links: Links,
        transcript: Transcript,
        *,
        headline_variant: str,
    ) -> None:
        """Make the active's record of a session.

        Args:
            party_session: the active in this session, as `start_active` returned it.
            active_role: the active's role, as `start_active` returned it.
            links: the active's connections to the other parties.
            transcript: records the messages that parties in this process send.
            headline_variant: the inference variant (key of `evaluate`'s result) that a run reports
                first.
        """
        self.party_session = party_session
        self.active_role = active_role
        self.links = links
        self.transcript = transcript
        self.headline_variant = headline_variant
        self.contract = party_session.contract
        self.signatures = party_session.signatures
        self.helpers: dict[str, HelperRole] = {}
        self.reported_costs: dict[str, Sequence[ReportedCost]] = {}
        self.signed_reports: dict[str, SignedReport] = {}
        self.alignment: dict[str, Tensor] = {}
        if party_session.contract.passives:
            self.alignment[active_role.name] = party_session.rows
        self.common_people: dict[str, CommonPeople] = {}
        if party_session.common_people is not None:
            self.common_people[active_role.name] = party_session.common_people

    @property
    def active_name(self) -> str:
        """The active's name."""
        return self.active_role.name

    @property
    def present_helpers(self) -> list[str]:
        """The names of the passives and the aggregator, without those that stopped answering."""
        helpers = (*self.contract.passives, *self.contract.list_names("aggregator"))
        return [name for name in helpers if name not in self.active_role.departure_step_by_passive]

    def record_sum(self, step: int) -> None:
        """Add the sum that the active decoded in this step, if any, to the transcript."""
        if self.active_role.last_sum is not None:
            self.transcript.record_sum(step, self.active_role.last_sum)

    @property
    def ledgers(self) -> dict[str, PrivacyLedger]:
        """The privacy ledgers of all roles in this process, by the ledger's name."""
        return {
            name: ledger for role in self._list_roles() for name, ledger in role.ledgers.items()
        }

    @property
    def contribution_ledgers(self) -> dict[str, PrivacyLedger]:
        """The privacy ledgers of noisy contributions or votes, by passive in this process."""
        ledgers = {role.name: role.contribution_ledger for role in self.helpers.values()}
        return {name: ledger for name, ledger in ledgers.items() if ledger is not None}

    @property
    def passive_costs(self) -> dict[str, dict[str, Any]]:
        """The privacy cost of each passive that adds noise to what it sends, by passive name.

        It comes from the passive's ledger if the ledger is in this process, otherwise from the
        passive's last report.
        """
        passives = self.contract.passives
        cost_by_passive = {
            name: ledger.summarise_cost() for name, ledger in self.contribution_ledgers.items()
        }
        cost_by_passive |= summarise_reported_costs(
            self.reported_costs,
            passives=passives,
            silence_step_by_passive=self.active_role.departure_step_by_passive,
        )
        return {name: cost_by_passive[name] for name in passives if name in cost_by_passive}

    @property
    def cost_reports(self) -> dict[str, dict[str, Any]]:
        """The privacy costs that each passive in another process reported last, by passive name.

        "step" is the step before which it reported; None if it never did. The mapping is empty in a
        simulation, where all parties run in this process.
        """
        if self.helpers:
            return {}
        return {
            name: {
                "step": self.signed_reports[name].step if name in self.signed_reports else None,
                "accounts": [
                    cost.to_cost_summary(name) for cost in self.reported_costs.get(name, ())
                ],
            }
            for name in self.contract.passives
        }

    @property
    def secure_sum(self) -> dict[str, object]:
        """The public parameters of the secure sum, for the run's result; empty without a sum.

        "rounding" is its rounding error; "opened" says in words what it reveals about a person.
        """
        agreed_parameters = dict(self.contract.secure_sum)
        if not agreed_parameters:
            return {}
        description = describe_opened_numbers(
            self.party_session.party.config,
            len(self.party_session.party.data.classes),
            self.list_column_counts(),
            agreed_numbers=agreed_parameters.get("numbers"),
        )
        secure_sum = {**agreed_parameters, "rounding": self.active_role.rounding_error}
        if description is not None:
            secure_sum["opened"] = description
        return secure_sum

    def list_column_counts(self) -> Sequence[int] | None:
        """Return None: the active does not know how many columns the other parties have.

        A simulation, which has all tables, returns the number of distinct columns of each party
        whose columns enter the decoded sum.
        """
        return None

    def describe_attendance(self) -> dict[str, object]:
        """Return which passives stopped answering in this session; empty if there is no sum.

        "left" maps such a passive to the step; "steps_without_all" counts steps that lacked one.
        """
        if not self.contract.secure_sum:
            return {}
        active_role = self.active_role
        return {
            "left": dict(active_role.departure_step_by_passive),
            "steps_without_all": active_role.incomplete_step_count,
        }

    def collect_networks(self) -> dict[str, nn.Module]:
        """Return the networks whose outputs leave passives of this process, by passive name."""
        networks = {name: helper.get_sent_network() for name, helper in self.helpers.items()}
        return {name: network for name, network in networks.items() if network is not None}

    def tensors(self) -> PartyTensors:
        """Return the state of every role in this process except the aggregator's, by party name."""
        return {role.name: role.tensors() for role in self._list_roles() if role.name != AGGREGATOR}

    def load_tensors(self, tensors: PartyTensors, *, next_step: int) -> None:
        """Restore the state of the roles in this process that `tensors` has, by party name.

        `next_step`: the step that runs next.
        """
        for role in self._list_roles():
            if role.name in tensors:
                role.load_tensors(tensors[role.name], next_step=next_step)

    def _list_roles(self) -> tuple[ActiveRole | HelperRole, ...]:
        """Return the roles of all parties in this process, the active's first."""
        return (self.active_role, *self.helpers.values())


@dataclass(frozen=True, kw_only=True)
class SimulationInputs:
    """The inputs of a simulation.

    Attributes:
        config: the run's settings.
        data: the tables of all parties.
        secrets: mapping from party name to its keys, seed and folders; parties that are not named
            get fresh secrets.
        session: name of this session, the same at all parties.
        alignment: mapping from party name to the row of its table at each alignment position, (N,),
            from an earlier session of the run; None: intersect the IDs now.
        code_by_party: mapping from party name to the networks, loss and optimiser that it brings; a
            party that is not named uses those that the settings name.
    """

    config: RunSettings
    data: VerticalData
    secrets: Mapping[str, PartySecrets] = field(default_factory=dict)
    session: str = field(default_factory=new_session)
    alignment: Mapping[str, Tensor] | None = None
    code_by_party: Mapping[str, UserFunctions] = field(default_factory=dict)

    def build_context(
        self, name: str, secrets: PartySecrets, identity_by_party: Mapping[str, bytes]
    ) -> PartyContext:
        """Return the context of the party `name`, which has its own data and nobody else's.

        `secrets`: the party's keys, seed and folders. `identity_by_party`: the public identity of
        every party.
        """
        aligned_rows = None
        if self.alignment is not None:
            aligned_rows = self.alignment.get(name, torch.empty(0, dtype=torch.int64))
        active = self.data.active.name
        passives = tuple(table.name for table in self.data.passives)
        # One process simulates all parties, so the settings may name every party's own code.
        _, code_by_party = split_user_functions(self.config, active, passives)
        named_code = code_by_party.get(name, UserFunctionSettings())
        return PartyContext(
            config=self.config,
            name=name,
            active=active,
            passives=passives,
            secrets=secrets,
            identity_by_party=identity_by_party,
            data_or_none=self.data.select_party(name),
            aligned_rows=aligned_rows,
            own_code=self.code_by_party.get(name) or UserFunctions.from_settings(named_code),
        )


class Simulation(Session):
    """All parties of one session in this process, set up and ready to train.

    Attributes:
        network: runs the parties' scripts, and carries their messages.
    """

    def __init__(self, method: Method, inputs: SimulationInputs) -> None:
        """Build all parties, and run their scripts up to the first step.

        Raises ConfigError, DataError, ModelError, CheckpointError, IntersectionTooSmallError: the
        settings, tables or checkpoints do not fit; see `start_active`.
        """
        data = inputs.data
        config = inputs.config
        self._data = data
        active = data.active.name
        passives = tuple(table.name for table in data.passives)
        roles = assign_roles(method, config, active, passives)
        transcript = Transcript(config.effective_transcript)
        self.network = InMemoryNetwork(roles, transcript.record_envelope)
        secrets = {name: inputs.secrets.get(name) or fresh_secrets(config, name) for name in roles}
        identity_by_party = {name: secret.identity.public for name, secret in secrets.items()}
        helper_sessions: dict[str, PartySession] = {}
        # Helpers' scripts start first, and wait for the active's messages.
        for name, role in roles.items():
            if role != "active":
                party = inputs.build_context(name, secrets[name], identity_by_party)
                links = self.network.links[name]
                record_session = _make_recorder(helper_sessions)
                script = run_helper(party, links, method, role, on_entry=record_session)
                self.network.start_script(name, script)
        party = inputs.build_context(active, secrets[active], identity_by_party)
        links = self.network.links[active]
        active_session, active_role = self.network.run_script(
            active, start_active(party, links, method, session=inputs.session)
        )
        super().__init__(
            active_session, active_role, links, transcript, headline_variant=method.headline
        )
        for name, helper_session in helper_sessions.items():
            assert isinstance(helper_session.role, HelperRole)
            self.helpers[name] = helper_session.role
            if name in passives:
                self.alignment[name] = helper_session.rows
            if helper_session.common_people is not None:
                self.common_people[name] = helper_session.common_people

    def list_column_counts(self) -> Sequence[int]:
        """Return the number of distinct columns of each table whose columns enter the decoded sum.

        In a singular value decomposition these are all tables, otherwise the passives' only.
        """
        method = self.party_session.party.config.method
        tables = self._data.tables if method.has_joint_svd else self._data.passives
        return [count_columns(table.features) for table in tables]

    def run_script(self, script: Script[T]) -> T:
        """Run a script of the active to its end, and return its result.

        The other parties' scripts run meanwhile, as far as the active waits for their messages.
        """
        return self.network.run_script(self.active_name, script)

    def train_step(self, step: int, rows_B: Tensor) -> float:
        """Run one training step of all parties; return the task loss."""
        return float(
            self.run_step_script(step, self.active_role.train_step(self.links, step, rows_B))
        )

    def run_step_script(self, step: int, script: Script[T]) -> T:
        """Run a script of the active as this step, and return its result.

        The sum that the active decodes meanwhile is added to the transcript.
        """
        result = self.run_script(script)
        self.record_sum(step)
        return result

    def evaluate(self, *, next_step: int, is_final: bool) -> dict[str, float]:
        """Return the accuracy on the test rows by inference variant.

        `next_step`: an unused step number, for a joint prediction. `is_final`: whether training is
        over.
        """
        scored_by_variant = self.run_script(
            self.active_role.evaluate(self.links, next_step=next_step, is_final=is_final)
        )
        return {name: ACCURACY.compute_value(scored) for name, scored in scored_by_variant.items()}


def _make_recorder(sessions: dict[str, PartySession]) -> Callable[[PartySession], None]:
    """Return a callback for `run_helper` that stores a helper's session in `sessions`, by name."""

    def record_session(entered: PartySession) -> None:
        """Store this helper's session."""
        sessions[entered.party.name] = entered

    return record_session
