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
from apfed_experiments.baselines import DIFFERENT_TEST_ROWS, OMITTED_FOR_DP_SGD
from apfed_experiments.summary import Interval
from apfed_experiments.variants import describe_tested_rows
from secure_apfed.data.catalogue import view_count
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.runs.outcome import count_measured_rows
from secure_apfed.settings import RunSettings
from secure_apfed.settings.promises import (
    MEANING_BY_EPSILON,
    Promise,
    format_epsilon_title,
    spell_epsilon,
)

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

PROTECTION_TITLE = "protected, at what cost"
HELP_TITLE = "what help was worth"
ATTACKS_TITLE = "what attacks still read"
NOT_ATTACKED = "not attacked"
_MEMBERSHIP_TITLE = "outsider reads who trained"
_MAX_NAMES = 3
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
        VerdictLine(PROTECTION_TITLE, _describe_protection(run)),
        VerdictLine(HELP_TITLE, _describe_help(run)),
        VerdictLine(ATTACKS_TITLE, _describe_attacks(run.headlines)),
        VerdictLine(NOT_ATTACKED, _describe_unattacked(run.headlines)),
    )


def _describe_protection(run: "FinishedRun") -> str:
    """Return the guarantees, whether the sum hides contributions, and what protection cost."""
    config = run.config
    outcome = run.outcome
    size_text = words.format_size(outcome.wire_bytes)
    cost = f"Cost: {size_text} sent, {words.format_duration(outcome.seconds)}."
    return f"{_describe_guarantees(config, run.guarantees)} {_describe_sum(config)}{cost}"


def _describe_guarantees(config: RunSettings, guarantees: Sequence[Promise]) -> str:
    """Return sentences on finite epsilons, on those without a guarantee, and on what is not sent.

    `guarantees`: guarantees of all parties, for each kind of message.
    """
    bounded_texts = [
        f"{_name_protection(config, promise)}: {promise.figure} {promise.text}"
        for promise in guarantees
        if promise.state == "bounded"
    ]
    unbounded_texts = [
        f"{_name_protection(config, promise)} ({promise.why or 'no bound'})"
        for promise in guarantees
        if promise.state == "no guarantee"
    ]
    unsent_texts = [
        f"{MEANING_BY_EPSILON[promise.figure][0]} ({promise.why or 'nothing of that kind leaves'})"
        for promise in guarantees
        if promise.state == "nothing is sent"
    ]
    sentences = [
        f"Bounded: {'; '.join(bounded_texts)}." if bounded_texts else "No epsilon bounds anything."
    ]
    if unbounded_texts:
        sentences.append(f"No guarantee for {'; '.join(unbounded_texts)}.")
    if unsent_texts:
        sentences.append(f"Nothing is sent of {'; '.join(unsent_texts)}.")
    return " ".join(sentences)


def _name_protection(config: RunSettings, guarantee: Promise) -> str:
    """Return what the epsilon of a guarantee bounds, whose data that is, and who is kept from
    reading it.
    """
    passive_owner = guarantee.party or "each passive"
    owner_and_reader_by_epsilon = {
        "epsilon_x": ("the active", "the passives"),
        "epsilon_v": (passive_owner, "the active"),
        "epsilon_c": (passive_owner, "whoever reads the sum"),
        "epsilon_y": ("the active", "the passives"),
        "epsilon_model": ("the active", "whoever has the model"),
    }
    owner, reader = owner_and_reader_by_epsilon[guarantee.figure]
    if guarantee.figure == "epsilon_x" and config.method.representation_sender == "passives":
        owner = "each passive"
        reader = "the active"
    return f"{MEANING_BY_EPSILON[guarantee.figure][0]} of {owner}, from {reader}"


def _describe_sum(config: RunSettings) -> str:
    """Return a sentence on whether the sum hides single contributions; empty: nothing is summed."""
    if "contributions are summed" not in config.method.exchange_facts:
        return ""
    sum_class = find_sum_class(config.secure_sum)
    if sum_class.unsafe:
        return f"The sum ({sum_class.name}) hides nothing from the aggregator. "
    if not config.data.is_horizontal and view_count(config.data) == 2:
        return "There is one passive, so its sum is its own contribution. "
    return f"The secure sum ({sum_class.name}) hides single contributions. "


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
    rows_text = describe_tested_rows(run.config, outcome, own_inference)
    if run.gain is not None and count_measured_rows(run.config, outcome, own_inference) is None:
        # An older run does not store the number; the gain, from stored predictions, has it.
        rows_text = f"of {run.gain.rows:,} test rows"
    measure_text = f"{title} {value} {rows_text}: {_describe_gain(run)}"
    if "passives take part" not in run.config.method.exchange_facts:
        return f"No party helped, the active trained alone. {measure_text}"
    if outcome.help is not None and not outcome.help.is_in_use:
        return (
            f"Help was disabled, labelled rows did not let it in ({outcome.help}). {measure_text}"
        )
    if outcome.help is not None and outcome.help.is_averaged:
        return f"Labelled rows leave help in doubt ({outcome.help}). {measure_text}"
    return measure_text


def _describe_gain(run: "FinishedRun") -> str:
    """Return the gain over the best local model and what its interval shows, or why it is not
    known.

    With DP-SGD no local model is measured: without its noise it would reveal training rows.
    """
    if run.config.dp_sgd is not None:
        return f"the gain is not known; {OMITTED_FOR_DP_SGD}."
    if run.local_models is None:
        return "the gain is not known, since nobody measured what the active would do alone."
    if run.local_models.measure != run.outcome.measure:
        measure_title = run.local_models.headline_measure.title
        return f"the gain is not known, since the active alone was measured by {measure_title}."
    gain = run.gain
    if gain is None:
        return f"the gain over {run.local_models.best.title} is not known; {DIFFERENT_TEST_ROWS}."
    comparison_text = (
        f"over {gain.baseline}, the best of the active alone, on the same {gain.rows:,} rows"
    )
    if gain.low is None or gain.high is None:
        return f"{gain.value_text} {comparison_text}, without an interval, which shows nothing yet."
    gain_text = f"{gain.value_text} {comparison_text} (95 % over these rows: {gain.interval_text})"
    if gain.low > 0:
        conclusion = "better with help in this run; other seeds may differ"
    elif gain.high < 0:
        conclusion = "worse than alone in this run"
    else:
        conclusion = "no gain shown"
    return f"{gain_text}; {conclusion}."


def _describe_attacks(headlines: Iterable[Headline]) -> str:
    """Return a sentence on the advantage of the best attack in each leak direction (who reads whose
    what), or that none ran.

    `headlines`: best attack, or the reason why none ran, one for each direction.
    """
    attacked_headlines = [headline for headline in headlines if headline.best_attack is not None]
    if not attacked_headlines:
        return "Not known: no attack ran."
    attack_texts = "; ".join(
        f"{headline.direction.title} {words.format_difference(headline.advantage)}, "
        f"{_name_attack(headline)}"
        for headline in attacked_headlines
    )
    if all(headline.state == "nothing found" for headline in attacked_headlines):
        return f"The attacks that ran found nothing, which proves no privacy: {attack_texts}."
    return f"Over what the same adversary guesses without the run: {attack_texts}."


def _name_attack(headline: Headline) -> str:
    """Return metric, name and variant of the best attack in a leak direction (who reads whose
    what).

    `headline` must be of a direction in which an attack ran.
    """
    best_attack = headline.best_attack
    assert best_attack is not None
    metric = words.format_key(str(best_attack.metric))
    return f"{metric} by {words.format_key(best_attack.attack)} ({best_attack.variant})"


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
            _MEMBERSHIP_TITLE
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
    name = party.own_side.name
    role = str(party.roles[name])
    guarantees = party.own_side.list_guarantees(party.config, role)
    guarantees_text = "; ".join(
        f"{promise.format_title(names_fixed_part=True)}: {promise.sentence}"
        for promise in guarantees
    )
    sent_bytes = sum(flow.wire_bytes for flow in party.flows if flow.sender == name)
    headlines = make_headlines(party.attacks or ())
    unattacked_headlines = [headline for headline in headlines if headline.best_attack is None]
    if not headlines:
        unattacked_text = f"No attack was mounted on what {name} let out."
    elif unattacked_headlines:
        unattacked_text = _list_notes(unattacked_headlines)
    else:
        unattacked_text = f"Nothing that this run chose to attack at {name} was left out."
    return (
        VerdictLine(
            PROTECTION_TITLE, f"{guarantees_text}. Cost: {words.format_size(sent_bytes)} sent."
        ),
        VerdictLine(
            HELP_TITLE, f"Told in the report of {party.contract.active}; not seen from here."
        ),
        VerdictLine(ATTACKS_TITLE, _describe_attacks(headlines)),
        VerdictLine(NOT_ATTACKED, unattacked_text),
    )


def _list_notes(headlines: Iterable[Headline]) -> str:
    """Return each leak direction (who reads whose what) with the note on why no attack ran."""
    return "; ".join(f"{headline.direction.title}: {headline.note}" for headline in headlines) + "."


def describe_seeds(results: "SeveralSeeds") -> tuple[VerdictLine, ...]:
    """Return the four lines of the verdict (summary in plain words) on a run under several seeds.

    They are on protection and its cost, on the gain of help by passives, on what attacks read, and
    on what was not attacked.
    """
    config = results.config
    summary = results.summary
    epsilon_name = config.method.epsilon_name
    largest_epsilon_text = spell_epsilon(summary.find_epsilon(config.method) or None)
    if summary.gain is not None:
        gain_text = summary.gain.sentence
    elif config.dp_sgd is not None:
        gain_text = f"Not known; {OMITTED_FOR_DP_SGD}."
    else:
        gain_text = "Not known: what the active would do alone was not measured on the same rows."
    leak_texts = [
        f"{kind} {leak.clipped_advantage.format_text(number_format='+.3f')}, "
        f"{words.format_key(leak.metric)} by {leak.name}"
        for kind, leak in summary.leakage_by_direction.items()
    ]
    unattacked_texts = [f"{kind}: {reason}" for kind, reason in results.missing_attacks.items()]
    return (
        VerdictLine(
            PROTECTION_TITLE,
            f"{format_epsilon_title(epsilon_name)}: {largest_epsilon_text}, the largest of "
            f"{summary.seed_count} seeds. "
            f"{_describe_sum(config)}Cost: {words.format_size(summary.wire_bytes)} sent a run.",
        ),
        VerdictLine(HELP_TITLE, gain_text),
        VerdictLine(
            ATTACKS_TITLE,
            f"{'; '.join(leak_texts)}." if leak_texts else "Not known: no attack ran.",
        ),
        VerdictLine(
            NOT_ATTACKED,
            f"{'; '.join(unattacked_texts)}."
            if unattacked_texts
            else "Every direction of this run was attacked.",
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
        leak_by_direction: advantage of the best attack, by leak direction (who reads whose what).
        reason_by_direction: reason why no attack ran, by leak direction.
    """

    name: str
    epsilon: float
    wire_bytes: float
    gain: Interval | None
    leak_by_direction: Mapping[str, Interval]
    reason_by_direction: Mapping[str, str] = field(default_factory=dict)
    p_holm: float = math.nan


def describe_comparison(rows: Sequence[ComparedRow]) -> tuple[VerdictLine, ...]:
    """Return the four lines of the verdict (summary in plain words) on the rows of a study's table.

    They are on protection and its cost, on the gain of help by passives, on what attacks read, and
    on what was not attacked.
    """
    return (
        VerdictLine(PROTECTION_TITLE, _describe_epsilons(rows)),
        VerdictLine(HELP_TITLE, _describe_gains(rows)),
        VerdictLine(ATTACKS_TITLE, _describe_leaks(rows)),
        VerdictLine(NOT_ATTACKED, _describe_unattacked_rows(rows)),
    )


def _describe_epsilons(rows: Sequence[ComparedRow]) -> str:
    """Return sentences on the epsilons of a table's rows, and on the cost in bytes.

    They say how many rows have a finite epsilon, which send nothing, and which have no guarantee.
    """
    bounded_rows = sorted(
        (row for row in rows if 0 < row.epsilon < math.inf), key=lambda row: row.epsilon
    )
    unsent_names = [row.name for row in rows if row.epsilon == 0]
    unbounded_names = [row.name for row in rows if math.isinf(row.epsilon)]
    names = ", ".join(f"{row.name} {row.epsilon:.3g}" for row in bounded_rows[:_MAX_NAMES])
    more_mark = ", ..." if len(bounded_rows) > _MAX_NAMES else ""
    names_note = f" ({names}{more_mark})" if names else ""
    parts = [f"With a finite epsilon: {_format_count(len(bounded_rows), len(rows))}{names_note}."]
    if unsent_names:
        parts.append(f"Nothing is sent by {_join_names(unsent_names)}.")
    if unbounded_names:
        parts.append(f"No guarantee: {_join_names(unbounded_names)}.")
    wire_bytes = [row.wire_bytes for row in rows]
    if wire_bytes:
        parts.append(
            f"Cost: {words.format_size(min(wire_bytes))} to {words.format_size(max(wire_bytes))} "
            "sent a run."
        )
    return " ".join(parts)


def _describe_gains(rows: Sequence[ComparedRow]) -> str:
    """Return sentences on the rows of a table in which the passives' help raised or lowered the
    measure.

    A row counts if the 95 % interval of its gain excludes 0.
    """
    names_and_gains = [(row.name, row.gain) for row in rows if row.gain is not None]
    if not names_and_gains:
        return "Not known: no line has a gain over what the active does alone."
    comparison_text = "over the best of the active alone, on the same rows"
    if all(math.isnan(gain.low) for _, gain in names_and_gains):
        return f"One seed, which shows nothing yet: the gains {comparison_text} have no interval."
    gains_above_zero = [(name, gain) for name, gain in names_and_gains if gain.low > 0]
    names_below_zero = [name for name, gain in names_and_gains if gain.high < 0]
    positive_count = _format_count(len(gains_above_zero), len(names_and_gains))
    parts = [f"Help paid {comparison_text} in {positive_count}"]
    if gains_above_zero:
        name, gain = max(gains_above_zero, key=lambda item: item[1].mean)
        # Gains are differences of shares, so they lie in -1 to 1; the text is in points.
        gain_text = gain.clip_ends(-1.0, 1.0).format_text(scale=100, number_format="+.1f")
        parts[0] += f", most in {name}: {gain_text} points{_describe_correction(rows)}"
    parts[0] += "."
    if names_below_zero:
        parts.append(f"It cost in {_join_names(names_below_zero)}.")
    if len(gains_above_zero) + len(names_below_zero) < len(names_and_gains):
        parts.append("The others show no gain.")
    return " ".join(parts)


def _describe_correction(rows: Sequence[ComparedRow]) -> str:
    """Return in how many rows of a table help paid after the correction for all comparisons (Holm).

    The text is empty if some p-value is not known.
    """
    gains_and_p_values = [(row.gain, row.p_holm) for row in rows if row.gain is not None]
    if any(math.isnan(p) for _, p in gains_and_p_values):
        return ""
    significant_count = sum(
        gain.mean > 0 and p < _SIGNIFICANCE_LEVEL for gain, p in gains_and_p_values
    )
    return (
        f"; after correction for all {len(gains_and_p_values)} (Holm) in "
        f"{significant_count or 'none'}"
    )


def _describe_leaks(rows: Sequence[ComparedRow]) -> str:
    """Return a sentence for each leak direction (who reads whose what) in which attacks ran.

    It names the row of the table with the highest advantage of an attack, and the number of rows in
    which the 95 % interval of the advantage is above 0.
    """
    parts = []
    for direction in dict.fromkeys(kind for row in rows for kind in row.leak_by_direction):
        names_and_advantages = [
            (row.name, row.leak_by_direction[direction])
            for row in rows
            if direction in row.leak_by_direction
        ]
        name, highest_advantage = max(names_and_advantages, key=lambda item: item[1].mean)
        above_zero_count = sum(interval.low > 0 for _, interval in names_and_advantages)
        count_note = (
            ""
            if math.isnan(highest_advantage.low)
            else f", above 0 in {_format_count(above_zero_count, len(names_and_advantages))}"
        )
        parts.append(
            f"{direction}: at most {highest_advantage.format_text(number_format='+.3f')} "
            f"({name}){count_note}"
        )
    return f"{'; '.join(parts)}." if parts else "Not known: no attack ran."


def _describe_unattacked_rows(rows: Sequence[ComparedRow]) -> str:
    """Return a sentence on the leak directions (who reads whose what) that were not attacked.

    Each direction has its reason, and the rows of the table that it holds for.
    """
    names_by_direction_and_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for direction, reason in row.reason_by_direction.items():
            names_by_direction_and_reason.setdefault((direction, reason), []).append(row.name)
    if not names_by_direction_and_reason:
        return "Every direction was attacked in every line."
    return (
        "; ".join(
            f"{kind}, {reason}: {_join_names(names)}"
            for (kind, reason), names in names_by_direction_and_reason.items()
        )
        + "."
    )


def _format_count(count: int, total: int) -> str:
    """Return a text such as "3 of 7 lines"."""
    return f"{count} of {total} lines"


def _join_names(names: Sequence[str]) -> str:
    """Return the first few distinct names, and how many more there are."""
    distinct_names = list(dict.fromkeys(names))
    remaining_count = len(distinct_names) - _MAX_NAMES
    return ", ".join(distinct_names[:_MAX_NAMES]) + (
        f" and {remaining_count} more" if remaining_count > 0 else ""
    )
