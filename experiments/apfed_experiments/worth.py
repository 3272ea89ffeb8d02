"""Worth of each passive's help, as people read it: sentences, a table and a picture.

Read by: the report of one run and the study over seeds (`who_helped`), which say the same.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from apfed_experiments import words
from apfed_experiments.summary import Interval
from secure_apfed.measures.table import MEASURES, Measure
from secure_apfed.runs.worth import PassiveWorth, WhoHelped
from secure_apfed.settings import RunSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPENDENCE_NOTE = (
    "A worth is what the model loses where this passive alone is left out, and it depends on who "
    "else takes part: of two passives that tell the same each is worth nothing while the other "
    "stays. Worths do not add up to what all are worth; they are no Shapley values."
)
ZERO_INTERVAL_NOTE = (
    "An interval that holds 0 shows nothing: neither that the passive helped nor that it did not."
)
CAPTION = (
    "What the model loses without each passive, with 95 % intervals; right of the dotted line the "
    "passive helped. Beside it what the run sends more because this passive takes part."
)
WORTH_HEADER = ("left out", "without it", "worth", "which shows", "sent more with it")
# Inches of a passive's row, of what stands around rows, and of both panels.
_ROW_INCHES = 0.33
_MARGIN_INCHES = 1.0
_WORTH_PANEL_INCHES = 2.9
_BYTES_PANEL_INCHES = 1.6


def describe_worth(interval: Interval) -> str:
    """Return in words what the interval of a passive's worth shows; the worth is what the model
    loses without the passive.
    """
    if math.isnan(interval.low):
        return "one figure without an interval, which shows nothing yet"
    if interval.low > 0:
        return "helped"
    if interval.high < 0:
        return "the model is better without it"
    return "nothing shown"


def make_worth_interval(worth: PassiveWorth) -> Interval | None:
    """Return a passive's worth with its 95 % interval over the test rows; None: it is not known."""
    if worth.value is None:
        return None
    low = math.nan if worth.low is None else worth.low
    high = math.nan if worth.high is None else worth.high
    return Interval(worth.value, low, high)


def format_worth(measure: Measure, interval: Interval | None) -> str:
    """Return a passive's worth with its interval and unit as text.

    `interval`: worth in the unit of the measure; None: not known.
    """
    if interval is None:
        return "not known: measured on other test rows"
    if measure.is_share:
        return (
            f"{interval.clip_ends(-1.0, 1.0).format_text(scale=100, number_format='+.1f')} points"
        )
    return interval.format_text(number_format="+.3f")


def list_worth_rows(who_helped: WhoHelped) -> list[tuple[str, str, str, str, str]]:
    """Return the texts under `WORTH_HEADER` for each passive of one run: name, measure without it,
    worth, what its interval shows, and the bytes that the run sends more with it.
    """
    measure = MEASURES[who_helped.measure]
    rows = []
    for worth in who_helped.passives:
        interval = make_worth_interval(worth)
        rows.append(
            (
                worth.passive,
                measure.format_value(math.nan if worth.without is None else worth.without),
                format_worth(measure, interval),
                "" if interval is None else describe_worth(interval),
                format_byte_difference(worth.wire_bytes),
            )
        )
    return rows


def format_byte_difference(difference: float) -> str:
    """Return a difference of bytes with its sign."""
    return f"{'-' if difference < 0 else '+'}{words.format_size(abs(difference))}"


def describe_interval_coverage(who_helped: WhoHelped) -> str:
    """Return sentences on what the intervals in one run's report cover, and what they do not."""
    seeds_text = (
        "All trainings begin with the same initial weights (party_seeds: shared_for_comparison)."
        if who_helped.party_seeds == "shared_for_comparison"
        else "Each training draws initial weights of its own (party_seeds: secret), so a worth "
        "holds what these change, too; party_seeds: shared_for_comparison leaves that out."
    )
    return (
        f"One seed, {who_helped.rows:,} test rows; the intervals are over these rows, paired, and "
        f"hold no spread over seeds: for that, secure-apfed study who-helped CONFIG --seeds 5. "
        f"{seeds_text} {len(who_helped.passives)} further trainings took "
        f"{words.format_duration(who_helped.seconds)}."
    )


def describe_cost(config: RunSettings, passive_count: int) -> str:
    """Return sentences on what it costs, in epsilon and in leakage, to measure each passive's worth
    between organisations.

    There, every training without one passive is a session of its own. `passive_count`: number of
    passives.
    """
    cost_text = (
        f"Between organisations these were {passive_count} further sessions: each passive's "
        "account is "
        f"charged {passive_count} times in all, the active's {passive_count + 1} times, and "
        "epsilons add up."
    )
    method_facts = config.method.exchange_facts
    if not {"contributions are summed", "votes of encrypted labels are summed"} & method_facts:
        return cost_text
    return (
        f"{cost_text} The active would open a sum of all passives and one without each: their "
        "difference is that passive's part, exactly where nothing random is in the others' parts, "
        "as in votes without noise. A secure sum does not hide that."
    )


def draw_worth(
    figure: "Figure",
    passive_names: Sequence[str],
    worth_intervals: Sequence[Interval | None],
    wire_bytes: Sequence[float],
    *,
    measure: Measure,
) -> None:
    """Draw each passive's worth with its interval, and beside it the megabytes that it costs.

    Args:
        figure: figure with matplotlib's constrained layout; its size is set here.
        passive_names: names of the passives.
        worth_intervals: worth of each passive in the unit of the measure; None: not known, and not
            drawn.
        wire_bytes: number of bytes that the run sends more because each passive takes part.
        measure: measure whose loss without a passive is the worth.
    """
    from apfed_experiments.drawing import OTHER_COLOUR, OUR_COLOUR, estimate_text_inches, name_rows

    width = estimate_text_inches(passive_names) + _WORTH_PANEL_INCHES + _BYTES_PANEL_INCHES
    figure.set_size_inches(width, _MARGIN_INCHES + _ROW_INCHES * len(passive_names))
    ratios = (_WORTH_PANEL_INCHES, _BYTES_PANEL_INCHES)
    worth_axes, bytes_axes = figure.subplots(1, 2, sharey=True, width_ratios=ratios)
    scale = 100 if measure.is_share else 1
    heights = [-row for row in range(len(passive_names))]
    for height, worth_interval in zip(heights, worth_intervals, strict=True):
        if worth_interval is None:
            continue
        is_zero_excluded = worth_interval.low > 0 or worth_interval.high < 0  # such dots are filled
        worth_axes.errorbar(
            scale * worth_interval.mean,
            height,
            xerr=worth_interval.compute_error_bars(scale),
            fmt="o",
            color=OUR_COLOUR,
            markerfacecolor=OUR_COLOUR if is_zero_excluded else "white",
            capsize=2.5,
        )
    worth_axes.axvline(0, color=OTHER_COLOUR, linestyle=":", linewidth=1.2)
    unit = f"points of {measure.title}" if measure.is_share else measure.title
    worth_axes.set(title="Lost without it", xlabel=unit)
    bytes_axes.barh(heights, [size / 1e6 for size in wire_bytes], height=0.45, color=OTHER_COLOUR)
    bytes_axes.set(title="Sent more with it", xlabel="MB")
    name_rows(worth_axes, passive_names)
    worth_axes.set_ylim(-len(passive_names) + 0.4, 0.6)
    bytes_axes.tick_params(left=False)
    bytes_axes.grid(visible=False, axis="y")
