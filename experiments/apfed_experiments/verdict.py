"""The verdict: a summary of a run in four lines of plain words, from its folder only.

Run by: reports, lists of runs, pages of studies and the terminal, which show it before anything
else. The lines say, in this order: what was protected from whom, and what that cost; what help by
passives was worth, over which local model; what attacks still read; what was not attacked, and why.
Each says so where that is "nothing" or "not known".
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from apfed_attacks.headlines import Headline, make_headlines
from apfed_experiments import words
from apfed_experiments.baselines import LEFT_OUT, OTHER_ROWS
from apfed_experiments.summary import Interval
from apfed_experiments.variants import describe_tested_rows
from secure_apfed.data.catalogue import view_count
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.runs.outcome import count_measured_rows
from secure_apfed.settings.promises import FIGURES, Promise, epsilon_words, figure_title
from secure_apfed.settings.run import RunSettings

if TYPE_CHECKING:
    from apfed_experiments.finished import FinishedRun
    from apfed_experiments.report.own import ReportedParty
    from apfed_experiments.several import SeveralSeeds

__all__ = [
    "ComparedRow",
    "VerdictLine",
    "describe_comparison",
    "describe_party",
    "describe_run",
    "describe_seeds",
]

PROTECTED = "protected, at what cost"
HELP = "what help was worth"
READ = "what attacks still read"
NOT_ATTACKED = "not attacked"
_MEMBERSHIP = "outsider reads who trained"
_NAMES_SHOWN = 3
_SIGNIFICANCE_LEVEL = 0.05


class VerdictLine(NamedTuple):
    """A line of a verdict, the summary of a run in plain words: a title, and the text on it."""

    title: str
    text: str


def describe_run(run: "FinishedRun") -> tuple[VerdictLine, ...]:
    """Return the four lines of the verdict (summary in plain words) on one finished run.

    They are on protection and its cost, on the gain of help by passives, on what attacks read, and
    on what was not attacked.
    """
    return (
        VerdictLine(PROTECTED, _describe_protection(run)),
        VerdictLine(HELP, _describe_help(run)),
        VerdictLine(READ, _describe_attacks(run.headlines)),
        VerdictLine(NOT_ATTACKED, _describe_unattacked(run.headlines)),
    )


def _describe_protection(run: "FinishedRun") -> str:
    """Return the guarantees, whether the sum hides contributions, and what protection cost."""
    config = run.config
    outcome = run.outcome
    sent = words.format_size(outcome.wire_bytes)
    cost = f"Cost: {sent} sent, {words.format_duration(outcome.seconds)}."
    return f"{_describe_promises(config, run.promises)} {_describe_sum(config)}{cost}"


def _describe_promises(config: RunSettings, promises: Sequence[Promise]) -> str:
    """Return sentences on finite epsilons, on those without a guarantee, and on what is not sent.

    `promises`: guarantees of all parties, for each kind of message.
    """
    bounded = [
        f"{_name_protection(config, promise)}: {promise.figure} {promise.text}"
        for promise in promises
        if promise.state == "bounded"
    ]
    unbounded = [
        f"{_name_protection(config, promise)} ({promise.why or 'no bound'})"
        for promise in promises
        if promise.state == "no guarantee"
    ]
    unsent = [
        f"{FIGURES[promise.figure][0]} ({promise.why or 'nothing of that kind leaves'})"
        for promise in promises
        if promise.state == "nothing is sent"
    ]
    sentences = [f"Bounded: {'; '.join(bounded)}." if bounded else "No epsilon bounds anything."]
    if unbounded:
        sentences.append(f"No guarantee for {'; '.join(unbounded)}.")
    if unsent:
        sentences.append(f"Nothing is sent of {'; '.join(unsent)}.")
    return " ".join(sentences)


def _name_protection(config: RunSettings, promise: Promise) -> str:
    """Return what the epsilon of a guarantee bounds, whose data that is, and who is kept from
    reading it.
    """
    passives = promise.party or "each passive"
    owner, reader = {
        "epsilon_x": ("the active", "the passives"),
        "epsilon_v": (passives, "the active"),
        "epsilon_c": (passives, "whoever reads the sum"),
        "epsilon_y": ("the active", "the passives"),
        "epsilon_model": ("the active", "whoever has the model"),
    }[promise.figure]
    if promise.figure == "epsilon_x" and config.method.representation_sender == "passives":
        owner = "each passive"
        reader = "the active"
    return f"{FIGURES[promise.figure][0]} of {owner}, from {reader}"


def _describe_sum(config: RunSettings) -> str:
    """Return a sentence on whether the sum hides single contributions; empty: nothing is summed."""
    if "contributions are summed" not in config.method.exchange_facts:
        return ""
    kind = find_sum_class(config.secure_sum)
    if kind.unsafe:
        return f"The sum ({kind.name}) hides nothing from the aggregator. "
    if not config.data.horizontal and view_count(config.data) == 2:
        return "There is one passive, so its sum is its own contribution. "
    return f"The secure sum ({kind.name}) hides single contributions. "


def _describe_help(run: "FinishedRun") -> str:
    """Return sentences on the measure reached, on the gain over the best local model, and on
    whether validation enabled help.

    Help is what the passives' messages add to the active's model. Where a method validates it on
    labelled rows, it may be disabled, or averaged with the local model.
    """
    outcome = run.outcome
    own_inference = next(iter(outcome.accuracy))  # the method's own mode of inference comes first
    measure = outcome.headline_measure
    value = measure.format_value(outcome.scores[own_inference])
    title = f"{measure.title[0].upper()}{measure.title[1:]}"
    rows = describe_tested_rows(run.config, outcome, own_inference)
    if run.gain is not None and count_measured_rows(run.config, outcome, own_inference) is None:
        # An older run does not store the number; the gain, from stored predictions, has it.
        rows = f"of {run.gain.rows:,} test rows"
    reached = f"{title} {value} {rows}: {_describe_gain(run)}"
    if "passives take part" not in run.config.method.exchange_facts:
        return f"No party helped, the active trained alone. {reached}"
    if outcome.help is not None and not outcome.help.is_in_use:
        return f"Help was disabled, labelled rows did not let it in ({outcome.help}). {reached}"
    if outcome.help is not None and outcome.help.is_averaged:
        return f"Labelled rows leave help in doubt ({outcome.help}). {reached}"
    return reached


def _describe_gain(run: "FinishedRun") -> str:
    """Return the gain over the best local model and what its interval shows, or why it is not
    known.

    With DP-SGD no local model is measured: without its noise it would reveal training rows.
    """
    if run.config.dp_sgd is not None:
        return f"the gain is not known; {LEFT_OUT}."
    if run.local_models is None:
        return "the gain is not known, since nobody measured what the active would do alone."
    if run.local_models.measure != run.outcome.measure:
        measure_title = run.local_models.headline_measure.title
        return f"the gain is not known, since the active alone was measured by {measure_title}."
    gain = run.gain
    if gain is None:
        return f"the gain over {run.local_models.best.title} is not known; {OTHER_ROWS}."
    comparison = (
        f"over {gain.baseline}, the best of the active alone, on the same {gain.rows:,} rows"
    )
    if gain.low is None or gain.high is None:
        return f"{gain.points} {comparison}, without an interval, which shows nothing yet."
    gain_text = f"{gain.points} {comparison} (95 % over these rows: {gain.interval})"
    if gain.low > 0:
        verdict = "better with help in this run; other seeds may differ"
    elif gain.high < 0:
        verdict = "worse than alone in this run"
    else:
        verdict = "no gain shown"
    return f"{gain_text}; {verdict}."


def _describe_attacks(headlines: Iterable[Headline]) -> str:
    """Return a sentence on the advantage of the best attack in each leak direction (who reads whose
    what), or that none ran.

    `headlines`: best attack, or the reason why none ran, one for each direction.
    """
    ran = [headline for headline in headlines if headline.best_attack is not None]
    if not ran:
        return "Not known: no attack ran."
    parts = "; ".join(
        f"{headline.direction.title} {words.format_difference(headline.advantage)}, "
        f"{_name_attack(headline)}"
        for headline in ran
    )
    if all(headline.state == "nothing found" for headline in ran):
        return f"The attacks that ran found nothing, which proves no privacy: {parts}."
    return f"Over what the same adversary guesses without the run: {parts}."


def _name_attack(headline: Headline) -> str:
    """Return metric, name and variant of the best attack in a leak direction (who reads whose
    what).

    `headline` must be of a direction in which an attack ran.
    """
    worst = headline.best_attack
    assert worst is not None
    metric = words.format_key(str(worst.metric))
    return f"{metric} by {words.format_key(worst.attack)} ({worst.variant})"


def _describe_unattacked(headlines: Sequence[Headline]) -> str:
    """Return a sentence on the leak directions (who reads whose what) in which no attack ran, with
    reasons.

    `headlines`: best attack, or the reason why none ran, one for each direction.
    """
    titles_by_reason: dict[str, list[str]] = {}
    for headline in headlines:
        if headline.best_attack is None:
            titles_by_reason.setdefault(headline.note, []).append(headline.direction.title)
    # Attacks on membership have a headline only if the run chose one; it is missing otherwise.
    if all(headline.direction.target != "membership" for headline in headlines):
        titles_by_reason.setdefault("no attack of this direction was chosen", []).append(
            _MEMBERSHIP
        )
    if not titles_by_reason:
        return "Every direction of this run was attacked; attacks that nobody wrote stay unknown."
    return (
        "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in titles_by_reason.items())
        + "."
    )


def describe_party(party: "ReportedParty") -> tuple[VerdictLine, ...]:
    """Return the verdict (summary in plain words) of a passive on its own part of a session.

    It is read from the passive's folder alone, so the gain of help, which the active measures, is
    not known.
    """
    name = party.own.name
    role = str(party.roles[name])
    promises = party.own.list_promises(party.config, role)
    promise_text = "; ".join(
        f"{promise.format_title(fixed=True)}: {promise.sentence}" for promise in promises
    )
    sent = sum(flow.wire_bytes for flow in party.flows if flow.sender == name)
    headlines = make_headlines(party.attacks or ())
    missing = [headline for headline in headlines if headline.best_attack is None]
    if not headlines:
        not_attacked = f"No attack was mounted on what {name} let out."
    elif missing:
        not_attacked = _list_notes(missing)
    else:
        not_attacked = f"Nothing that this run chose to attack at {name} was left out."
    return (
        VerdictLine(PROTECTED, f"{promise_text}. Cost: {words.format_size(sent)} sent."),
        VerdictLine(HELP, f"Told in the report of {party.contract.active}; not seen from here."),
        VerdictLine(READ, _describe_attacks(headlines)),
        VerdictLine(NOT_ATTACKED, not_attacked),
    )


def _list_notes(headlines: Iterable[Headline]) -> str:
    """Return each leak direction (who reads whose what) with the note on why no attack ran."""
    return "; ".join(f"{headline.direction.title}: {headline.note}" for headline in headlines) + "."


def describe_seeds(several: "SeveralSeeds") -> tuple[VerdictLine, ...]:
    """Return the four lines of the verdict (summary in plain words) on a run under several seeds.

    They are on protection and its cost, on the gain of help by passives, on what attacks read, and
    on what was not attacked.
    """
    config = several.config
    summary = several.summary
    figure = config.method.epsilon_name
    largest = epsilon_words(summary.epsilon_of(config.method) or None)
    if summary.gain is not None:
        gain_text = summary.gain.sentence
    elif config.dp_sgd is not None:
        gain_text = f"Not known; {LEFT_OUT}."
    else:
        gain_text = "Not known: what the active would do alone was not measured on the same rows."
    read = [
        f"{kind} {leak.clipped_advantage.format_text(form='+.3f')}, "
        f"{words.format_key(leak.metric)} by {leak.name}"
        for kind, leak in summary.leakage.items()
    ]
    missing = [f"{kind}: {reason}" for kind, reason in several.missing_attacks.items()]
    return (
        VerdictLine(
            PROTECTED,
            f"{figure_title(figure)}: {largest}, the largest of {summary.seeds} seeds. "
            f"{_describe_sum(config)}Cost: {words.format_size(summary.wire_bytes)} sent a run.",
        ),
        VerdictLine(HELP, gain_text),
        VerdictLine(READ, f"{'; '.join(read)}." if read else "Not known: no attack ran."),
        VerdictLine(
            NOT_ATTACKED,
            f"{'; '.join(missing)}." if missing else "Every direction of this run was attacked.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """A row of a study's table, as far as its verdict needs it.

    Attributes:
        name: name of the row, for people.
        epsilon: privacy of what leaves a party; infinite: no guarantee, 0: nothing is sent.
        wire_bytes: number of bytes sent on all links in a run.
        gain: gain over the best local model on the same test rows; None: not reported.
        p_holm: p-value of the gain, adjusted for all comparisons (Holm); NaN: not adjusted.
        leaks: advantage of the best attack, by leak direction (who reads whose what).
        missing: reason why no attack ran, by leak direction.
    """

    name: str
    epsilon: float
    wire_bytes: float
    gain: Interval | None
    leaks: Mapping[str, Interval]
    missing: Mapping[str, str] = field(default_factory=dict)
    p_holm: float = math.nan


def describe_comparison(rows: Sequence[ComparedRow]) -> tuple[VerdictLine, ...]:
    """Return the four lines of the verdict (summary in plain words) on the rows of a study's table.

    They are on protection and its cost, on the gain of help by passives, on what attacks read, and
    on what was not attacked.
    """
    return (
        VerdictLine(PROTECTED, _describe_epsilons(rows)),
        VerdictLine(HELP, _describe_gains(rows)),
        VerdictLine(READ, _describe_leaks(rows)),
        VerdictLine(NOT_ATTACKED, _describe_unattacked_rows(rows)),
    )


def _describe_epsilons(rows: Sequence[ComparedRow]) -> str:
    """Return sentences on the epsilons of a table's rows, and on the cost in bytes.

    They say how many rows have a finite epsilon, which send nothing, and which have no guarantee.
    """
    bounded = sorted(
        (row for row in rows if 0 < row.epsilon < math.inf), key=lambda row: row.epsilon
    )
    unsent = [row.name for row in rows if row.epsilon == 0]
    unbounded = [row.name for row in rows if math.isinf(row.epsilon)]
    names = ", ".join(f"{row.name} {row.epsilon:.3g}" for row in bounded[:_NAMES_SHOWN])
    more_mark = ", ..." if len(bounded) > _NAMES_SHOWN else ""
    names_note = f" ({names}{more_mark})" if names else ""
    parts = [f"With a finite epsilon: {_format_count(len(bounded), len(rows))}{names_note}."]
    if unsent:
        parts.append(f"Nothing is sent by {_join_names(unsent)}.")
    if unbounded:
        parts.append(f"No guarantee: {_join_names(unbounded)}.")
    sent = [row.wire_bytes for row in rows]
    if sent:
        parts.append(
            f"Cost: {words.format_size(min(sent))} to {words.format_size(max(sent))} sent a run."
        )
    return " ".join(parts)


def _describe_gains(rows: Sequence[ComparedRow]) -> str:
    """Return sentences on the rows of a table in which the passives' help raised or lowered the
    measure.

    A row counts if the 95 % interval of its gain excludes 0.
    """
    gains = [(row.name, row.gain) for row in rows if row.gain is not None]
    if not gains:
        return "Not known: no line has a gain over what the active does alone."
    comparison = "over the best of the active alone, on the same rows"
    if all(math.isnan(gain.low) for _, gain in gains):
        return f"One seed, which shows nothing yet: the gains {comparison} have no interval."
    paid = [(name, gain) for name, gain in gains if gain.low > 0]
    cost = [name for name, gain in gains if gain.high < 0]
    parts = [f"Help paid {comparison} in {_format_count(len(paid), len(gains))}"]
    if paid:
        name, gain = max(paid, key=lambda item: item[1].mean)
        # Gains are differences of shares, so they lie in -1 to 1; the text is in points.
        gain_text = gain.clip_ends(-1.0, 1.0).format_text(scale=100, form="+.1f")
        parts[0] += f", most in {name}: {gain_text} points{_describe_correction(rows)}"
    parts[0] += "."
    if cost:
        parts.append(f"It cost in {_join_names(cost)}.")
    if len(paid) + len(cost) < len(gains):
        parts.append("The others show no gain.")
    return " ".join(parts)


def _describe_correction(rows: Sequence[ComparedRow]) -> str:
    """Return in how many rows of a table help paid after the correction for all comparisons (Holm).

    The text is empty if some p-value is not known.
    """
    gains = [(row.gain, row.p_holm) for row in rows if row.gain is not None]
    if any(math.isnan(p) for _, p in gains):
        return ""
    significant = sum(gain.mean > 0 and p < _SIGNIFICANCE_LEVEL for gain, p in gains)
    return f"; after correction for all {len(gains)} (Holm) in {significant or 'none'}"


def _describe_leaks(rows: Sequence[ComparedRow]) -> str:
    """Return a sentence for each leak direction (who reads whose what) in which attacks ran.

    It names the row of the table with the highest advantage of an attack, and the number of rows in
    which the 95 % interval of the advantage is above 0.
    """
    parts = []
    for kind in dict.fromkeys(kind for row in rows for kind in row.leaks):
        leaks = [(row.name, row.leaks[kind]) for row in rows if kind in row.leaks]
        name, highest = max(leaks, key=lambda item: item[1].mean)
        above = sum(interval.low > 0 for _, interval in leaks)
        count_note = (
            "" if math.isnan(highest.low) else f", above 0 in {_format_count(above, len(leaks))}"
        )
        parts.append(f"{kind}: at most {highest.format_text(form='+.3f')} ({name}){count_note}")
    return f"{'; '.join(parts)}." if parts else "Not known: no attack ran."


def _describe_unattacked_rows(rows: Sequence[ComparedRow]) -> str:
    """Return a sentence on the leak directions (who reads whose what) that were not attacked.

    Each direction has its reason, and the rows of the table that it holds for.
    """
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for kind, reason in row.missing.items():
            names_by_reason.setdefault((kind, reason), []).append(row.name)
    if not names_by_reason:
        return "Every direction was attacked in every line."
    return (
        "; ".join(
            f"{kind}, {reason}: {_join_names(names)}"
            for (kind, reason), names in names_by_reason.items()
        )
        + "."
    )


def _format_count(some: int, total: int) -> str:
    """Return a text such as "3 of 7 lines"."""
    return f"{some} of {total} lines"


def _join_names(names: Sequence[str]) -> str:
    """Return the first few distinct names, and how many more there are."""
    unique = list(dict.fromkeys(names))
    more = len(unique) - _NAMES_SHOWN
    return ", ".join(unique[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
