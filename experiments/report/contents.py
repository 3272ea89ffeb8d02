"""What a report says, as plain values; `page` gives them their form."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from experiments.report import words
from experiments.report.coalitions import coalitions_in, limits_in
from experiments.report.entries import Coalition, Role
from experiments.report.folder import Outcome, RunFolder
from experiments.report.names import method_name, plain, value_told
from experiments.report.rules import rule_for
from protocols.psi import SET_INTERSECTIONS
from secure_apfed.config.training import TrainSettings
from secure_apfed.data import find_dataset
from secure_apfed.defences import DEFENCES, who_applies
from secure_apfed.exchange import Kind

__all__ = [
    "Learned", "Tile", "accounting_of", "alignment_leaks_of",
    "coalitions_of", "cross_checks_of", "learned_by", "limits_of", "settings_of", "tiles_of",
    "warnings_of",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure of the summary."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What one party received of one kind, and what it can read of it."""

    kind: str
    senders: str
    messages: str
    size: str
    steps: str
    reads: str
    protects: str
    remains: str


def learned_by(run: RunFolder) -> Mapping[str, tuple[Learned, ...]]:
    """Return what each party received, filled from the transcript.

    Parties of one role that received the same, apart from the sender's name, share an entry.
    """
    alike: dict[tuple[Role, tuple[Learned, ...]], list[str]] = {}
    for name, role in run.roles.items():
        alike.setdefault((role, tuple(_received(run, name, role))), []).append(name)
    return {_heading(names, role): received for (role, received), names in alike.items()}


def _heading(names: list[str], role: Role) -> str:
    if names == [role]:
        return role.capitalize()
    each = ", each of them" if len(names) > 1 else ""
    return f"{', '.join(names)} ({role}{each})"


def _received(run: RunFolder, name: str, role: Role) -> Iterator[Learned]:
    kinds = list(Kind)
    flows = sorted(
        (flow for flow in run.flows if flow.receiver == name),
        key=lambda flow: kinds.index(flow.kind),
    )
    for kind, of_kind in groupby(flows, key=lambda flow: flow.kind):
        group = list(of_kind)
        rule = rule_for(kind, role, run.situation)
        first, last = min(f.first_step for f in group), max(f.last_step for f in group)
        yield Learned(
            kind=plain(kind),
            senders=", ".join(flow.sender for flow in group),
            messages=words.count(sum(flow.messages for flow in group)),
            size=words.size(sum(flow.payload_bytes for flow in group)),
            steps="before training" if last < 0 else f"steps {max(first, 0)} to {last}",
            reads=rule.reads,
            protects=rule.protects,
            remains=rule.remains,
        )


def alignment_leaks_of(run: RunFolder) -> tuple[str, ...]:
    """Return what the set intersection reveals beyond its result, as it says itself."""
    if not any(flow.kind == Kind.ALIGNMENT for flow in run.flows):
        return ()
    return SET_INTERSECTIONS[run.config.alignment.protocol].leaks


def coalitions_of(run: RunFolder) -> tuple[Coalition, ...]:
    """Return what parties of this run would learn together."""
    return coalitions_in(run.situation)


def cross_checks_of(run: RunFolder) -> tuple[str, ...]:
    """Return what each accountant says of epsilon_x, or why it says nothing."""
    return tuple(
        f"cross-check, {name} accountant: "
        + (value if isinstance(value, str) else f"epsilon_x {value:.4g}")
        for name, value in run.outcome.privacy.accountants.items()
    )


def limits_of(run: RunFolder) -> tuple[str, ...]:
    """Return what this run does not guarantee."""
    return limits_in(run.situation)


def tiles_of(run: RunFolder, reference: RunFolder | None) -> tuple[Tile, ...]:
    """Return the figures of the summary."""
    outcome = run.outcome
    messages = words.count(sum(flow.messages for flow in run.flows))
    return (
        *_accuracy_tiles(run, reference),
        _epsilon_tile(run),
        *_attack_tiles(run),
        Tile(name="sent", value=words.size(outcome.wire_bytes), note=f"{messages} messages"),
        Tile(name="duration", value=words.duration(outcome.seconds), note=_device(run)),
    )


def _accuracy_tiles(run: RunFolder, reference: RunFolder | None) -> Iterator[Tile]:
    outcome = run.outcome
    tested = f"of {words.count(outcome.test_rows)} test rows" if outcome.test_rows else "of tests"
    for variant, value in outcome.accuracy.items():
        yield Tile(name=f"{method_name(variant)} accuracy", value=words.percent(value), note=tested)
    if reference is not None and run.config.method != "single_view":
        alone = next(iter(reference.outcome.accuracy.values()))
        yield Tile(name="SingleVL accuracy", value=words.percent(alone), note="the active alone")


def _epsilon_tile(run: RunFolder) -> Tile:
    privacy = run.outcome.privacy
    delta = f"at delta {words.number(privacy.delta)}, " if privacy.delta else ""
    counted = "" if privacy.releases is None else f"T {words.count(privacy.releases)}, "
    return Tile(
        name="epsilon, released rows",
        value=words.epsilon(privacy.epsilon_x),
        note=f"{delta}{counted}labels {words.epsilon(privacy.epsilon_y)}, "
        f"model {words.model_epsilon(privacy.epsilon_model)}",
    )


def _attack_tiles(run: RunFolder) -> Iterator[Tile]:
    """One tile for each metric: advantages in different metrics do not compare."""
    worst: dict[str, float] = {}
    for attack in run.attacks or ():
        if attack.advantage is not None:
            metric = str(attack.metric)
            worst[metric] = max(worst.get(metric, attack.advantage), attack.advantage)
    for metric, advantage in worst.items():
        yield Tile(
            name="worst attack", value=f"{advantage:+.3f}", note=f"{plain(metric)} over baseline"
        )


def _device(run: RunFolder) -> str:
    device = run.versions.get("device")
    return f"on {device}" if isinstance(device, str) else ""


def warnings_of(run: RunFolder) -> tuple[str, ...]:
    """Return what a reader must know before any figure: unsafe choices and made-up data."""
    told, config = [], run.config
    if "synthetic" in config.data.dataset:
        told.append("The data are synthetic: no figure here says anything about real people.")
    if run.situation.method == "single_view":
        return tuple(told)
    if run.situation.method == "apfed":
        if config.secure_sum.kind.unsafe:
            name = config.secure_sum.name
            told.append(f"The sum is {name}: the aggregator reads every passive's gradient.")
        if run.situation.passives == 1:
            told.append("There is one passive: the active reads its gradient, whatever the sum.")
        if all(flow.kind is not Kind.REPRESENTATIONS for flow in run.flows):
            told.append("No batch was ever sent to the passives: the active trained alone.")
        if not run.situation.guarded:
            told.append("There is no guard: passives receive the representations as they are.")
        attendance = run.outcome.attendance
        for name, step in attendance.left.items():
            told.append(
                f"{name} fell silent in step {step}: of the steps from then on "
                f"{attendance.steps_without_all} went on without all passives."
            )
    else:
        told.append("TVFL is a baseline: passives receive gradients that give labels away.")
        if not run.situation.guarded:
            told.append("There is no guard: the active receives representations as they are.")
    return tuple(told)


def accounting_of(run: RunFolder) -> tuple[tuple[str, str], ...]:
    """Return the privacy accounting as (name, value) rows."""
    privacy = run.outcome.privacy
    rows = [
        ("epsilon_x, one row's releases, encoder held fixed", words.epsilon(privacy.epsilon_x)),
        ("epsilon_y, one training label", words.epsilon(privacy.epsilon_y)),
        ("epsilon_model, the finished model", words.model_epsilon(privacy.epsilon_model)),
    ]
    if privacy.delta is not None:
        rows.append(("delta", words.number(privacy.delta)))
    if privacy.releases is not None:
        rows.append(("T, most releases of one row", words.count(privacy.releases)))
    rows += [
        (plain(name), value_told(value)) for name, value in (privacy.model_extra or {}).items()
    ]
    rows += [
        (f"epsilon of {passive}, {account.releases} contributions of one person, networks fixed",
         f"{words.epsilon(account.epsilon)} at delta {words.number(account.delta)}")
        for passive, account in run.outcome.contributions.items()
    ]  # fmt: skip
    rows += [
        (f"charges to the ledger of {party}", words.count(charges))
        for party, charges in run.charges.items()
    ]
    return tuple(rows)


def settings_of(run: RunFolder) -> tuple[tuple[str, str], ...]:
    """Return the settings that a reader asks for first; the whole config stands below them."""
    config, outcome = run.config, run.outcome
    data = config.data
    title = (
        find_dataset(data.dataset).title if data.dataset != "tables" else "the parties' own tables"
    )
    rows = [
        ("method", method_name(config.method)),
        ("data", f"{title}, {data.view_count} views"),
        ("parties", ", ".join(run.roles)),
        ("rows", _rows_told(outcome)),
        ("training", _training_told(config.train)),
        ("alignment", f"{config.alignment.protocol}, overlap asked {words.percent(data.overlap)}"),
    ]  # fmt: skip
    if outcome.sum:
        rows.append(("secure sum", value_told(outcome.sum)))
    guard = {
        key: value
        for key, value in config.guard.model_dump(mode="json").items()
        if value is not None
    }
    rows.append(
        ("guard", ", ".join(f"{name} {value_told(value)}" for name, value in guard.items()))
    )
    if config.defences:
        told = "; ".join(
            f"{one.kind} ({who_applies(one.kind, config.method)}): {DEFENCES[one.kind].gives}"
            for one in config.defences
        )
        rows.append(("defences without a guarantee", told))
    if config.labels.epsilon is not None:
        told = f"{plain(config.labels.mechanism)}, epsilon {config.labels.epsilon:g}"
        stages = f", {config.labels.stages} stages" if config.labels.mechanism == "lp_mst" else ""
        rows.append(("training labels", told + stages))
    return tuple(rows)


def _training_told(train: TrainSettings) -> str:
    return (
        f"{train.epochs} epochs, batches of {train.batch_size}, learning rate "
        f"{train.learning_rate:g}"
    )


def _rows_told(outcome: Outcome) -> str:
    told = (
        ("trained", outcome.train_rows),
        ("tested", outcome.test_rows),
        ("aligned", outcome.aligned_rows),
    )
    return ", ".join(f"{words.count(value)} {name}" for name, value in told if value is not None)
