"""Titles of the modes in which a run predicts, and the number of test rows behind each metric.

Run by: reports, tables and the terminal. A run measures its model under one key of `accuracy` for
each mode of inference: the method's own name, and names that say who takes part.
"""

from collections.abc import Mapping

from secure_apfed.config import Config
from secure_apfed.runs.outcome import Outcome, count_measured_rows
from secure_apfed.settings.method import MethodSettings

__all__ = ["describe_tested_rows", "title_variant"]

_TITLES_BY_SUFFIX: Mapping[str, str] = {
    "0": "{name}-0, zeros for the others",
    "a": "{name}-A, own average for the others",
    "r": "{name}-R, random values for the others",
    "alone": "{name}, the active left alone",
    "together": "{name}, all parties present",
}
"""Titles of modes of inference, by the suffix after the method's name in a key of `accuracy`."""


def title_variant(method: MethodSettings, variant: str) -> str:
    """Return the title of a mode of inference, such as jointly with all parties.

    `variant`: key of `Outcome.accuracy`; an unknown one is returned unchanged.

    Examples:
        >>> from secure_apfed.methods import METHODS
        >>> title_variant(METHODS["tvfl"].public_facts, "tvfl_alone")
        'TVFL, the active left alone'
    """
    if variant == method.name:
        return method.title
    title = _TITLES_BY_SUFFIX.get(variant.removeprefix(f"{method.name}_"))
    return variant if title is None else title.format(name=method.title.partition(",")[0])


def describe_tested_rows(config: Config, outcome: Outcome, variant: str) -> str:
    """Return the number of test rows on which a mode of inference was measured, in words.

    If these are fewer than all test rows of the active, both numbers are given. `variant`: key of
    the mode in `Outcome.accuracy`.
    """
    rows = count_measured_rows(config, outcome, variant)
    all_rows = outcome.test_rows
    if rows is None:
        return "rows not known" if all_rows is None else f"of some of {all_rows:,} test rows"
    if all_rows is None or rows == all_rows:
        return f"of {rows:,} test rows"
    # Joint inference predicts only the rows of people whom all parties know.
    if not rows:
        return f"of none of {all_rows:,} test rows"
    return f"of {rows:,} of {all_rows:,} test rows, whom all parties know"
