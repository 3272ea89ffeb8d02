"""Titles of the modes in which a run predicts, and the number of test rows behind each metric.

Run by: reports, tables and the terminal. A run measures its model under one key of `accuracy` for
each mode of inference: the method's own name, and names that say who takes part.
"""

from collections.abc import Mapping

from secure_apfed.config import Config
from secure_apfed.runs.outcome import Outcome, count_measured_rows
from secure_apfed.settings import MethodSettings

__all__ = ["describe_tested_rows", "title_inference"]

_TITLE_BY_SUFFIX: Mapping[str, str] = {
    "0": "{name}-0, zeros for the others",
    "a": "{name}-A, own average for the others",
    "r": "{name}-R, random values for the others",
    "alone": "{name}, the active left alone",
    "together": "{name}, all parties present",
}
"""Titles of modes of inference, by the suffix after the method's name in a key of `accuracy`."""


def title_inference(method: MethodSettings, inference: str) -> str:
    """Return the title of a mode of inference, such as jointly with all parties.

    `inference`: key of `Outcome.accuracy`; an unknown one is returned unchanged.

    Examples:
        >>> from secure_apfed.methods import METHODS
        >>> title_inference(METHODS["tvfl"].public_facts, "tvfl_alone")
        'TVFL, the active left alone'
    """
    if inference == method.name:
        return method.title
    title = _TITLE_BY_SUFFIX.get(inference.removeprefix(f"{method.name}_"))
    return inference if title is None else title.format(name=method.title.partition(",")[0])


def describe_tested_rows(config: Config, outcome: Outcome, inference: str) -> str:
    """Return the number of test rows on which a mode of inference was measured, in words.

    If these are fewer than all test rows of the active, both numbers are given. `inference`: key of
    the mode in `Outcome.accuracy`.
    """
    row_count = count_measured_rows(config, outcome, inference)
    all_row_count = outcome.test_rows
    if row_count is None:
        return (
            "rows not known" if all_row_count is None else f"of some of {all_row_count:,} test rows"
        )
    if all_row_count is None or row_count == all_row_count:
        return f"of {row_count:,} test rows"
    # Joint inference predicts only the rows of people whom all parties know.
    if not row_count:
        return f"of none of {all_row_count:,} test rows"
    return f"of {row_count:,} of {all_row_count:,} test rows, whom all parties know"
