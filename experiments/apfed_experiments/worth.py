"""Worth of each passive's help, as people read it: sentences, a table and a picture.

Read by: the report of one run and the study over seeds (`who_helped`), which say the same.
"""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from apfed_experiments import words
from apfed_experiments.drawing import OTHER, OURS, inches_of, name_rows
from apfed_experiments.summary import Interval
from secure_apfed.measures.table import MEASURES, Measure
from secure_apfed.runs.worth import PassiveWorth, WhoHelped
from secure_apfed.settings.run import RunSettings

DEPENDS = (
    "A worth is what the model loses where this passive alone is left out, and it depends on who "
    "else takes part: of two passives that tell the same each is worth nothing while the other "
    "stays. Worths do not add up to what all are worth; they are no Shapley values."
)
AROUND_ZERO = (
    "An interval that holds 0 shows nothing: neither that the passive helped nor that it did not."
)
CAPTION = (
    "What the model loses without each passive, with 95 % intervals; right of the dotted line the "
    "passive helped. Beside it what the run sends more because this passive takes part."
)
HEADER = ("left out", "without it", "worth", "which shows", "sent more with it")
# Inches of a passive's row, of what stands around rows, and of both panels.
_ROW = 0.33
_AROUND = 1.0
_WORTH_WIDTH = 2.9
_BYTES_WIDTH = 1.6


def describe_worth(interval: Interval) -> str:
    """Say in words what an interval of a worth shows."""
    if math.isnan(interval.low):
        return "one figure without an interval, which shows nothing yet"
    if interval.low > 0:
        return "helped"
    if interval.high < 0:
        return "the model is better without it"
    return "nothing shown"


def interval_of(worth: PassiveWorth) -> Interval | None:
    """Return the worth with its interval over the test rows; None: it is not known."""
    if worth.value is None:
        return None
    low = math.nan if worth.low is None else worth.low
    high = math.nan if worth.high is None else worth.high
    return Interval(worth.value, low, high)


def worth_text(measure: Measure, interval: Interval | None) -> str:
    """Return a worth with its interval and unit."""
    if interval is None:
        return "not known: measured on other test rows"
    if measure.share:
        return f"{interval.clip_ends(-1.0, 1.0).format_text(scale=100, form='+.1f')} points"
    return interval.format_text(form="+.3f")


def rows_of_worth(who_helped: WhoHelped) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each passive of one run: name, measure without it, worth, what that shows,
    and what the run sends more with it.
    """
    measure = MEASURES[who_helped.measure]
    rows = []
    for worth in who_helped.passives:
        interval = interval_of(worth)
        rows.append(
            (
                worth.passive,
                measure.format_value(math.nan if worth.without is None else worth.without),
                worth_text(measure, interval),
                "" if interval is None else describe_worth(interval),
                bytes_text(worth.wire_bytes),
            )
        )
    return rows


def bytes_text(difference: float) -> str:
    """Return a difference of bytes with its sign."""
    return f"{'-' if difference < 0 else '+'}{words.format_size(abs(difference))}"


def describe_interval(who_helped: WhoHelped) -> str:
    """Say what the intervals of one run hold, and what they do not."""
    seeds = (
        "All trainings begin with the same initial weights (party_seeds: shared_for_comparison)."
        if who_helped.party_seeds == "shared_for_comparison"
        else "Each training draws initial weights of its own (party_seeds: secret), so a worth "
        "holds what these change, too; party_seeds: shared_for_comparison leaves that out."
    )
    return (
        f"One seed, {who_helped.rows:,} test rows; the intervals are over these rows, paired, and "
        f"hold no spread over seeds: for that, secure-apfed study who-helped CONFIG --seeds 5. "
        f"{seeds} {len(who_helped.passives)} further trainings took "
        f"{words.format_duration(who_helped.seconds)}."
    )


def describe_cost(config: RunSettings, passives: int) -> str:
    """Say what leave-one-out would cost and reveal, were the trainings real sessions."""
    charged = (
        f"Between organisations these were {passives} further sessions: each passive's account is "
        f"charged {passives} times in all, the active's {passives + 1} times, and epsilons add up."
    )
    method_facts = config.method.facts
    if not {"contributions are summed", "votes of encrypted labels are summed"} & method_facts:
        return charged
    return (
        f"{charged} The active would open a sum of all passives and one without each: their "
        "difference is that passive's part, exactly where nothing random is in the others' parts, "
        "as in votes without noise. A secure sum does not hide that."
    )


def draw_worth(
    figure: Figure,
    names: Sequence[str],
    worths: Sequence[Interval | None],
    wire_bytes: Sequence[float],
    *,
    measure: Measure,
) -> None:
    """Draw each passive's worth with its interval, and beside it the megabytes that it costs.

    Args:
        names: of the passives.
        wire_bytes: of each passive.
        figure: with matplotlib's constrained layout; its size is set here.
        worths: in the unit of the measure; None: not known, and left out.
    """
    width = inches_of(names) + _WORTH_WIDTH + _BYTES_WIDTH
    figure.set_size_inches(width, _AROUND + _ROW * len(names))
    ratios = (_WORTH_WIDTH, _BYTES_WIDTH)
    gain, sent = figure.subplots(1, 2, sharey=True, width_ratios=ratios)
    scale = 100 if measure.share else 1
    places = [-height for height in range(len(names))]
    for place, worth in zip(places, worths, strict=True):
        if worth is None:
            continue
        excludes_zero = worth.low > 0 or worth.high < 0
        gain.errorbar(
            scale * worth.mean,
            place,
            xerr=worth.compute_error_bars(scale),
            fmt="o",
            color=OURS,
            markerfacecolor=OURS if excludes_zero else "white",
            capsize=2.5,
        )
    gain.axvline(0, color=OTHER, linestyle=":", linewidth=1.2)
    unit = f"points of {measure.title}" if measure.share else measure.title
    gain.set(title="Lost without it", xlabel=unit)
    sent.barh(places, [size / 1e6 for size in wire_bytes], height=0.45, color=OTHER)
    sent.set(title="Sent more with it", xlabel="MB")
    name_rows(gain, names)
    gain.set_ylim(-len(names) + 0.4, 0.6)
    sent.tick_params(left=False)
    sent.grid(visible=False, axis="y")
