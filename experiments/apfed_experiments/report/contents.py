"""Contents of a run's report as plain values, which the page and privacy.json show.

Sentences depend on facts of the run, never on its method's name.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from apfed_attacks.interface import AttackResult
from apfed_experiments import words
from apfed_experiments.baselines import DIFFERENT_TEST_ROWS, BaselinesRecord
from apfed_experiments.report.own import ReportedParty
from apfed_experiments.report.run import Audited, ReportedRun
from apfed_experiments.report.who_learns import COALITIONS, LIMITS, Role, find_rule
from apfed_experiments.verdict import describe_run
from apfed_protocols.psi import SET_INTERSECTIONS
from secure_apfed.alignment import max_guesses
from secure_apfed.alignment.overlap import CommonPeople
from secure_apfed.config import Config
from secure_apfed.data import find_dataset
from secure_apfed.data.catalogue import view_count
from secure_apfed.exchange import Kind
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.learning.calibration import RARE_SHARE
from secure_apfed.measures.intervals import MIN_POSITIVES
from secure_apfed.measures.table import ACCURACY
from secure_apfed.measures.tasks import TASKS, Classification
from secure_apfed.privacy.defences import DEFENCES, describe_runners
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import (
    Outcome,
    Ranking,
    describe_unpredicted_classes,
    load_common_people,
)
from secure_apfed.runs.weakened_settings import (
    describe_shared_organisations,
    describe_weakened_settings,
)
from secure_apfed.settings import Settings
from secure_apfed.settings.data import OWN_TABLES
from secure_apfed.settings.promises import find_worst_guarantee

_CLASS_RECALL_PREFIX = "recall of class "
_SHORT_TITLE_BY_EPSILON = {
    "epsilon_x": "representations",
    "epsilon_c": "sums",
    "epsilon_v": "votes",
    "epsilon_y": "labels",
    "epsilon_model": "model",
}
_VOTE_REQUESTS = frozenset({Kind.LABELS, Kind.ENCRYPTED_LABELS})


Reported: TypeAlias = ReportedRun | ReportedParty


class Tile(NamedTuple):
    """A value at the top of a report: its title, its value as text, and a note below it."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A kind of message that one party received, and what it can read of it.

    Attributes:
        kind: name of the kind.
        senders: names of the parties that sent it.
        messages: number of messages, as text.
        size: total of their payloads, with its unit.
        steps: training steps from the first message to the last, as text.
        reads: what the receiver learns by following the protocol.
        protects: what protects the senders.
        remains: what is not protected.
    """

    kind: str
    senders: str
    messages: str
    size: str
    steps: str
    reads: str
    protects: str
    remains: str


def describe_training(run: ReportedRun) -> str:
    """Return a sentence on who trained together, and whether the active predicts alone."""
    method = run.config.method
    passive_count = run.facts.passive_count
    if not run.has_passives:
        return f"{method.title}: the active trained alone; nothing was sent."
    partners = "one passive party" if passive_count == 1 else f"{passive_count} passive parties"
    prediction_text = (
        "the active predicts alone"
        if "the active predicts alone" in method.exchange_facts
        else "prediction needs the passives, or a stand-in for what they would send"
    )
    return f"{method.title}: one active party trained with {partners}; {prediction_text}."


def list_warnings(run: ReportedRun) -> tuple[str, ...]:
    """Return sentences that readers must see first.

    They are on common people, missing protection, synthetic data, few test rows of a class, classes
    that are never predicted, and parties that stopped responding.
    """
    unpredicted_text = describe_unpredicted_classes(run.config, run.outcome.never_predicted)
    unpredicted_warnings = (
        () if unpredicted_text is None else (f"Of the test rows: {unpredicted_text}.",)
    )
    attendance = run.outcome.attendance
    silence_warnings = (
        f"{name} fell silent in step {step}: of the steps from then on "
        f"{attendance.steps_without_all} went on without all passives."
        for name, step in attendance.left.items()
    )
    people_warnings = describe_people(load_common_people(RunFolder(run.path)))
    return (*people_warnings, *_iter_fact_warnings(run), *unpredicted_warnings, *silence_warnings)


def _iter_fact_warnings(run: ReportedRun) -> Iterator[str]:
    """Yield the warnings that depend on what the run's method and settings protect.

    `run.facts.words` are those facts in words, such as "passives vote".
    """
    facts = run.facts
    phrases = run.facts.phrases
    has_sum = "contributions are summed" in phrases
    is_sum_unsafe = has_sum and find_sum_class(run.config.secure_sum).unsafe
    has_votes = "passives vote" in phrases
    has_sending_active = "the active sends representations" in phrases
    rare_row_count = _count_rare_class_rows(run.outcome.ranking)
    has_sent_representations = any(flow.kind is Kind.REPRESENTATIONS for flow in run.flows)
    # Each sentence stands beside the fact of the run under which it is shown.
    conditions_and_sentences = (
        (
            "synthetic" in run.config.data.dataset,
            "The data are synthetic: no figure here says anything about real people.",
        ),
        (
            is_sum_unsafe,
            f"The sum is {facts.secure_sum}: the aggregator reads every passive's contribution.",
        ),
        (
            has_sum and facts.passive_count == 1,
            "There is one passive: the active reads what it contributes, whatever the sum.",
        ),
        (
            "labels are shown" in phrases and not facts.has_label_dp,
            "Every passive is shown the labels that the active trains on.",
        ),
        (
            "no noise on votes" in phrases,
            "There is no noise on votes: the active reads their sum as it is.",
        ),
        (
            {"noise on votes", "votes move each other"} <= phrases,
            "The epsilon on votes is of one vote, not of a person's record.",
        ),
        (
            has_votes and not any(flow.kind in _VOTE_REQUESTS for flow in run.flows),
            "Nobody was ever asked for votes: the active trained alone.",
        ),
        (
            "tables are decomposed" in phrases,
            (
                "There is no noise: the active reads singular vectors of all parties' rows "
                "as they are."
            ),
        ),
        ("gradients are returned" in phrases, "Passives receive gradients that give labels away."),
        (
            run.config.are_labels_private and bool(run.attacks),
            "Attacks compare guesses with the true training rows: no epsilon covers their scores.",
        ),
        (
            has_sending_active and not has_sent_representations,
            "No batch was ever sent to the passives: the active trained alone.",
        ),
        (
            has_sending_active and not facts.has_guard,
            "There is no guard: passives receive the representations as they are.",
        ),
        (
            "passives send representations" in phrases and not facts.has_guard,
            "There is no guard: the active receives representations as they are.",
        ),
        (
            rare_row_count is not None,
            (
                f"{rare_row_count} test rows are of the rarer class: measures may be chance; "
                "read their intervals."
            ),
        ),
    )
    for is_true, sentence in conditions_and_sentences:
        if is_true:
            yield sentence


def describe_people(people_by_party: Sequence[CommonPeople]) -> Iterator[str]:
    """Yield sentences on how many of each party's people are common to all.

    A warning follows for a party whose IDs hardly ever matched.
    """
    for party_people in people_by_party:
        yield f"{party_people.party}: {party_people.sentence}."
        if party_people.warning:
            yield f"{party_people.warning}."


def _count_rare_class_rows(ranking: Ranking | None) -> int | None:
    """Return the number of test rows of the rarer of two classes if they are few.

    None: they are not few, or the task does not have two classes. `ranking`: counts of the test
    rows of two classes.
    """
    if ranking is None:
        return None
    rarer_count = min(ranking.positives, ranking.rows - ranking.positives)
    return rarer_count if rarer_count < min(MIN_POSITIVES, RARE_SHARE * ranking.rows) else None


def iter_tiles(run: ReportedRun) -> Iterator[Tile]:
    """Yield the values at the top of a report.

    They are measures, best local model, gain, weakest guarantee, attacks by leak direction (who
    reads whose what), bytes and duration.
    """
    outcome = run.outcome
    yield from _iter_measure_tiles(run)
    if run.local_models is not None:
        yield from _iter_local_model_tiles(run, run.local_models)
    yield _make_weakest_guarantee_tile(run)
    for headline in run.headlines:
        yield Tile(headline.direction.title, headline.short_text, headline.note)
    if run.own_side is not None:
        # The folder of the active of a real session holds its own messages only.
        yield from iter_traffic_tiles(run, run.own_side.name)
    else:
        messages = words.format_count(sum(flow.messages for flow in run.flows))
        sessions_note = f" in {outcome.sessions} sessions" if outcome.sessions > 1 else ""
        note = f"{messages} messages{sessions_note}"
        yield Tile("sent", words.format_size(outcome.wire_bytes), note)
    device = run.versions.get("device")
    device_note = f"on {device}" if isinstance(device, str) else ""
    if outcome.sessions > 1:
        device_note = f"{device_note}, training in {outcome.sessions} sessions".removeprefix(", ")
    yield Tile("duration", words.format_duration(outcome.seconds), device_note)


def _iter_measure_tiles(run: ReportedRun) -> Iterator[Tile]:
    """Yield the run's measure and, in classification, the accuracy, for each mode of inference.

    The note has the number of test rows, or why the value is not defined.
    """
    outcome = run.outcome
    measure = outcome.headline_measure
    if measure is not ACCURACY:
        for inference, value in outcome.scores.items():
            rows_text = run.describe_tested_rows(inference)
            reason = outcome.undefined.get(inference, {}).get(measure.name, rows_text)
            title = f"{run.title_inference(inference)} {measure.title}"
            yield Tile(
                title, measure.format_value(value), reason if math.isnan(value) else rows_text
            )
    is_classification = TASKS[run.config.task].tells == Classification.tells
    accuracies = outcome.accuracy if is_classification else {}
    # `variant` is a mode of inference, such as of the active alone or jointly with the passives.
    for inference, share in accuracies.items():
        rows_text = run.describe_tested_rows(inference)
        reason = outcome.undefined.get(inference, {}).get(ACCURACY.name, rows_text)
        title = f"{run.title_inference(inference)} accuracy"
        yield Tile(
            title,
            ACCURACY.format_value(share) if math.isnan(share) else words.format_percent(share),
            reason if math.isnan(share) else rows_text,
        )


def _iter_local_model_tiles(run: ReportedRun, local_models: BaselinesRecord) -> Iterator[Tile]:
    """Yield the best local model, and the gain over it on the same test rows, or why there is no
    gain.
    """
    gain = run.gain
    value = local_models.best.test if gain is None else gain.alone
    row_count = local_models.rows if gain is None else gain.rows
    rows_note = "" if row_count is None else f", of {row_count:,} test rows"
    note = f"{local_models.best.title}, {local_models.choice_text}{rows_note}"
    yield Tile("best local model", local_models.headline_measure.format_value(value), note)
    if gain is None:
        yield Tile("gain", "not reported", DIFFERENT_TEST_ROWS)
        return
    interval_note = f", 95 %: {gain.interval_text}" if gain.interval_text else ""
    yield Tile(
        "gain", gain.value_text, f"over it, on the same {gain.rows:,} test rows{interval_note}"
    )


def _make_weakest_guarantee_tile(run: ReportedRun) -> Tile:
    """Return the tile of the weakest guarantee on the method's main kind of message.

    `run.epsilon_name` names the epsilon of that kind, such as "epsilon_x" for representations. The
    note has the weakest guarantee on every other kind.
    """
    weakest_guarantee = find_worst_guarantee(run.guarantees, run.epsilon_name)
    other_epsilon_names = {promise.figure for promise in run.guarantees} - {
        weakest_guarantee.figure
    }
    notes = [weakest_guarantee.why] if weakest_guarantee.why else []
    notes += [
        f"{title} {find_worst_guarantee(run.guarantees, figure).text}"
        for figure, title in _SHORT_TITLE_BY_EPSILON.items()
        if figure in other_epsilon_names
    ]
    title = weakest_guarantee.format_title(names_fixed_part=weakest_guarantee.state == "bounded")
    return Tile(title, weakest_guarantee.text, ", ".join(notes))


def list_learned(run: Reported) -> Mapping[str, tuple[Learned, ...]]:
    """Return what each party received, and what it can read of that, by heading.

    Numbers are from the transcript. Parties of one role that received the same share a heading. A
    party's own report has, for other parties, what they received from it, and what they read of
    sums.
    """
    names_by_received: dict[tuple[Role, tuple[Learned, ...]], list[str]] = {}
    for name, role in run.roles.items():
        role_and_received = role, tuple(_describe_flows(run, name, role))
        names_by_received.setdefault(role_and_received, []).append(name)
    received_by_heading = {}
    for (role, messages), names in names_by_received.items():
        each_note = ", each of them" if len(names) > 1 else ""
        heading = (
            f"{', '.join(names)} ({role}{each_note})" if names != [role] else role.capitalize()
        )
        received_by_heading[heading] = messages
    return received_by_heading


def _describe_flows(run: Reported, name: str, role: Role) -> Iterator[Learned]:
    """Yield, for each kind of message that a party received, counts, bytes and what can be read.

    A flow counts the messages of one kind from one sender to one receiver. `name`: name of the
    receiving party. `role`: role of that party.
    """
    kinds = list(Kind)
    flows = sorted(
        (flow for flow in run.flows if flow.receiver == name),
        key=lambda flow: kinds.index(flow.kind),
    )
    for kind, kind_flows in groupby(flows, key=lambda flow: flow.kind):
        flows_of_kind = list(kind_flows)
        rule = find_rule(kind, role, run.facts)
        first_step = min(flow.first_step for flow in flows_of_kind)
        last_step = max(flow.last_step for flow in flows_of_kind)
        yield Learned(
            kind=words.format_key(kind),
            senders=", ".join(flow.sender for flow in flows_of_kind),
            messages=words.format_count(sum(flow.messages for flow in flows_of_kind)),
            size=words.format_size(sum(flow.payload_bytes for flow in flows_of_kind)),
            # Messages before training, such as those of the alignment, have negative steps.
            steps="before training"
            if last_step < 0
            else f"steps {max(first_step, 0)} to {last_step}",
            reads=rule.reads,
            protects=rule.protects,
            remains=rule.remains,
        )
    if run.own_side is not None and name != run.own_side.name:
        yield from _describe_unseen(run, role, {flow.kind for flow in flows})


def _describe_unseen(run: Reported, role: Role, kinds_seen: Set[Kind]) -> Iterator[Learned]:
    """Yield what another party can read of contributions, if its messages are not in this folder.

    A party's own folder holds only the messages that it sent or received. `role`: role of the other
    party. `kinds_seen`: kinds of messages to it that are in this folder.
    """
    # Without an aggregator no contribution passes between other parties.
    if Role.AGGREGATOR not in run.roles.values():
        return
    kind = None
    if role is Role.AGGREGATOR:
        kind = Kind.CONTRIBUTION
    elif role is Role.ACTIVE:
        is_decomposition = "tables are decomposed" in run.facts.phrases
        kind = Kind.SINGULAR_VECTORS if is_decomposition else Kind.SUM
    if kind is not None and kind not in kinds_seen:
        rule = find_rule(kind, role, run.facts)
        yield Learned(
            kind=words.format_key(kind),
            senders="others",
            messages="-",
            size="-",
            steps="not seen from here",
            reads=rule.reads,
            protects=rule.protects,
            remains=rule.remains,
        )


def iter_traffic_tiles(run: Reported, party: str) -> Iterator[Tile]:
    """Yield the bytes and messages that a party sent, and those that it received.

    `party`: name of the party.
    """
    for title, flows in (
        ("sent", [flow for flow in run.flows if flow.sender == party]),
        ("received", [flow for flow in run.flows if flow.receiver == party]),
    ):
        messages = words.format_count(sum(flow.messages for flow in flows))
        size = words.format_size(sum(flow.wire_bytes for flow in flows))
        yield Tile(title, size, f"{messages} messages")


def describe_alignment_leaks(run: Reported) -> tuple[str, ...]:
    """Return sentences on what the set intersection revealed; empty if none ran."""
    if not any(flow.kind == Kind.ALIGNMENT for flow in run.flows):
        return ()
    settings = run.config.alignment
    guesses = max_guesses(settings)  # of the active (hub) and of a passive (member)
    guesses_sentence = (
        f"With maximum_ids {settings.maximum_ids:,}, an active that deviates tries out up to "
        f"{guesses.hub:,} guessed IDs at each passive in one intersection, others at another; a "
        f"passive up to {guesses.member:,}."
    )
    return (*SET_INTERSECTIONS[settings.selected_protocol].leaks, guesses_sentence)


def list_coalitions(run: Reported) -> tuple[tuple[str, str], ...]:
    """Return the possible coalitions in this run, each with what its parties learn together."""
    return tuple(
        (coalition.colluding_parties, coalition.joint_knowledge)
        for coalition in COALITIONS
        if coalition.holds_for(run.facts)
    )


def list_limits(run: Reported) -> tuple[str, ...]:
    """Return sentences on what this run does not protect, weaker settings first."""
    limits = tuple(limit.sentence for limit in LIMITS if limit.holds_for(run.facts))
    # How many linear values of each person the sums revealed, as the run counted them.
    # A party's own folder does not know it.
    revealed_count = run.outcome.sum.get("opened") if isinstance(run, ReportedRun) else None
    if revealed_count is not None:
        sentence = f"Of each person the active opens, linear in others' columns, {revealed_count}."
        limits = (sentence, *limits)
    return (*list_weakened_settings(run), *limits)


def list_weakened_settings(run: Reported) -> tuple[str, ...]:
    """Return up to two sentences: on settings that protect less than their defaults, and on
    organisations that run several parties.

    Both are read from the run's settings and folder, whatever its result claims.
    """
    folder = run.path if isinstance(run, ReportedRun) else run.own_side.path
    weakened_settings = describe_weakened_settings(run.config)
    organisations = describe_shared_organisations(folder)
    sentences = list[str]()
    if weakened_settings:
        sentences.append(
            f"Settings that protect less than by default: {'; '.join(weakened_settings)}."
        )
    if organisations:
        sentences.append(f"Run by one organisation: {'; '.join(organisations)}.")
    return tuple(sentences)


def list_privacy_rows(run: ReportedRun) -> tuple[tuple[str, str], ...]:
    """Return title and text of what the run spent of privacy.

    These are epsilons, delta, releases, further values, signed statements of passives on what they
    spent, and the number of privacy costs recorded in each party's ledger.
    """
    privacy = run.outcome.privacy
    rows = [
        (promise.format_title(names_fixed_part=True), promise.sentence)
        for promise in run.guarantees
    ]
    if privacy.delta is not None:
        rows.append(("delta", words.format_number(privacy.delta)))
    if privacy.releases is not None and run.epsilon_name == "epsilon_x":
        rows.append(("T, most releases of one row", words.format_count(privacy.releases)))
    rows += [
        (words.format_key(name), words.format_value(value))
        for name, value in (privacy.model_extra or {}).items()
    ]
    rows += run.signed_report_rows
    rows += [
        (f"charges to the ledger of {party}", words.format_count(charges))
        for party, charges in run.charges.items()
    ]
    return tuple(rows)


def list_agreement_rows(run: ReportedRun) -> tuple[tuple[str, str], ...]:
    """Return each passive with a sentence on how often its votes agree with labels and with other
    passives' votes.
    """
    rows = []
    for passive, agreement in run.outcome.agreement.items():
        sentence = (
            f"as labelled on {agreement.labels:.2f} of the labelled ones, "
            f"+- {agreement.labels_noise:.2f}"
        )
        if agreement.others is not None:
            others = (
                f"as another passive on {agreement.others:.2f} of the rows, "
                f"+- {agreement.others_noise:.2f}"
            )
            sentence = f"{others}; {sentence}"
        rows.append((passive, sentence))
    return tuple(rows)


def list_trace(run: ReportedRun) -> tuple[str, ...]:
    """Return the steps of the accountant's computation of epsilon_x (privacy of representations).

    The results of other accountants follow, unless they are 0.
    """
    privacy = run.outcome.privacy
    lines = [*privacy.trace]
    for name, value in privacy.accountants.items():
        if isinstance(value, str):  # why the accountant computed no epsilon
            lines.append(f"cross-check, {name} accountant: {value}")
        elif value > 0:
            lines.append(f"cross-check, {name} accountant: epsilon_x {value:.4g}")
    return tuple(lines)


def describe_unevenness(result: AttackResult) -> str:
    """Return in words how unevenly an attack hits people.

    The text has its metrics on extreme deciles of the people, and the lowest and highest recall of
    a class.
    """
    recall_by_class = {
        name.removeprefix(_CLASS_RECALL_PREFIX): recall
        for name, recall in result.risk.items()
        if name.startswith(_CLASS_RECALL_PREFIX)
    }
    parts = [
        f"{name} {value:.2f}"
        for name, value in result.risk.items()
        if _CLASS_RECALL_PREFIX not in name
    ]
    if recall_by_class:
        lowest_class = min(recall_by_class, key=recall_by_class.__getitem__)
        highest_class = max(recall_by_class, key=recall_by_class.__getitem__)
        parts.append(
            f"recall from {recall_by_class[lowest_class]:.2f} (class {lowest_class}) to "
            f"{recall_by_class[highest_class]:.2f} (class {highest_class})"
        )
    return "; ".join(parts)


def iter_setting_rows(run: ReportedRun) -> Iterator[tuple[str, str]]:
    """Yield title and text of the run's settings: method, data, parties, training, protection."""
    config = run.config
    yield "method", config.method.title
    yield "task", TASKS[config.task].title
    yield "data", _describe_data(config)
    yield "parties", ", ".join(run.roles)
    yield "rows", _describe_row_counts(run.outcome)
    train = config.train
    rate = f"learning rate {train.learning_rate:g}"
    yield "training", f"{train.epochs} epochs, batches of {train.batch_size}, {rate}"
    if not config.data.is_horizontal:
        yield "alignment", _describe_alignment(config)
    yield from _iter_protection_rows(run)


def _describe_data(config: Config) -> str:
    """Return the title of the data set, with the number of views or of horizontal parties."""
    data = config.data
    is_own_tables = data.dataset == OWN_TABLES
    title = "the parties' own tables" if is_own_tables else find_dataset(data.dataset).title
    parties = "parties with people of their own" if data.is_horizontal else "views"
    return f"{title}, {view_count(data)} {parties}"


def _describe_row_counts(outcome: Outcome) -> str:
    """Return how many rows were trained, labelled, tested and aligned; unknown counts are left
    out.
    """
    row_counts = {
        "trained": outcome.train_rows,
        "of these with a label": outcome.labelled_rows,
        "tested": outcome.test_rows,
        "aligned": outcome.aligned_rows,
    }
    return ", ".join(
        f"{words.format_count(count)} {name}"
        for name, count in row_counts.items()
        if count is not None
    )


def _describe_alignment(config: Config) -> str:
    """Return the protocol of the alignment and, of built-in data, how many common people were
    asked for.
    """
    data = config.data
    if data.dataset == OWN_TABLES:
        return config.alignment.selected_protocol
    if data.aligned:
        request = f"people {data.aligned}"
    else:
        request = f"overlap {words.format_percent(data.overlap)}"
    return f"{config.alignment.selected_protocol}, {request} asked"


def _iter_protection_rows(run: ReportedRun) -> Iterator[tuple[str, str]]:
    """Yield title and text of the settings that protect data: sum, votes, guard, labels."""
    config = run.config
    if run.outcome.sum:
        yield "secure sum", words.format_value(run.outcome.sum)
    if "passives vote" in run.facts.phrases:
        yield "how passives vote", _describe_settings(config.method, excluded_name="name")
    yield "guard", _describe_settings(config.guard)
    if config.defences:
        kinds = [defence.kind for defence in config.defences]
        descriptions = (
            f"{kind} ({describe_runners(kind, config.method)}): {DEFENCES[kind].gives}"
            for kind in kinds
        )
        yield "defences without a guarantee", "; ".join(descriptions)
    labels = config.labels
    if labels.epsilon is not None:
        yield (
            "training labels",
            f"{words.format_key(labels.mechanism)}, epsilon {labels.epsilon:g}",
        )


def _describe_settings(settings: Settings, *, excluded_name: str = "") -> str:
    """Return settings other than None in words, without the one named `excluded_name`."""
    values = settings.model_dump(mode="json", exclude_none=True, exclude={excluded_name})
    return ", ".join(f"{name} {words.format_value(value)}" for name, value in values.items())


def build_privacy_document(run: ReportedRun, audited: Audited | None = None) -> dict[str, Any]:
    """Return the content of privacy.json as plain values: everything on privacy in the report.

    "inventory" holds the numbers of messages that each party received, and "who_learns_what" what
    it can read of them. "directions" holds the results of attacks by who reads whose what.
    `audited`: audit of the guard, which clips and perturbs representations; None: it released
    nothing.
    """
    privacy = run.outcome.privacy
    return {
        "schema_version": 1,
        "run": run.config.name,
        "method": run.config.method.name,
        "contract_sha256": run.contract_sha256,
        "verdict": dict(describe_run(run)),
        "warnings": list_warnings(run),
        "threat_model": {
            "parties": dict(run.roles),
            "who_learns_what": {
                party: [asdict(row) for row in rows] for party, rows in list_learned(run).items()
            },
            "alignment": list(describe_alignment_leaks(run)),
            "coalitions": dict(list_coalitions(run)),
        },
        "inventory": [
            {
                "receiver": flow.receiver,
                "sender": flow.sender,
                "kind": str(flow.kind),
                "messages": flow.messages,
                "payload_bytes": flow.payload_bytes,
                "steps": [flow.first_step, flow.last_step],
            }
            for flow in run.flows
        ],
        "accounting": {
            "guarantee": run.outcome.guarantee,
            "figures": privacy.model_dump(exclude={"trace"}),
            "promises": [promise.as_json() for promise in run.guarantees],
            "trace": list(privacy.trace),
            "charges": dict(run.charges),
            "audit": asdict(audited) | {"contradicted": audited.has_contradiction}
            if audited
            else None,
            "contributions": {
                name: account.model_dump() for name, account in run.outcome.contributions.items()
            },
            "stated": dict(run.signed_report_rows),
        },
        "solo": None if run.local_models is None else run.local_models.model_dump(mode="json"),
        "gain": None if run.gain is None else run.gain.comparison_text,
        "gain_figures": None if run.gain is None else run.gain.model_dump(mode="json"),
        "directions": [headline.as_json() for headline in run.headlines],
        "attacks": [result.as_json() for result in run.attacks or ()],
        "agreement_of_votes": run.outcome.model_dump()["agreement"],
        "not_guaranteed": list(list_limits(run)),
    }
