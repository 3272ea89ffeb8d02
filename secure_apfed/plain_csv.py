"""CSV for people who open it in a spreadsheet, which takes some texts for formulas.

IDs and class names come from tables that somebody else may have written. As OWASP recommends
(CSV Injection), a text that begins as a formula does gets an apostrophe before it, and so does
what stands behind a semicolon, a tab or a new line in it: where a comma is the decimal mark, a
spreadsheet takes semicolons for separators, and quotes within such a cell end no other. Numbers,
negative ones too, stay as they are.
"""

import re

import pandas as pd

__all__ = ["cell", "to_csv"]

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
# A run of what may separate or be skipped, taken whole, and the sign of a formula behind it; the
# last signs are as wide as Chinese characters.
_FORMULA = re.compile(r'(^[\s";]*|[\s";]+)([=+\-@\uff1d\uff0b\uff0d\uff20])?')
_NO_SEPARATORS = ' "'


def cell(value: object) -> object:
    """The value, or a text that no spreadsheet takes for a formula."""
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return _FORMULA.sub(_with_apostrophe, value)
    return value


def _with_apostrophe(found: re.Match[str]) -> str:
    run, sign = found.groups(default="")
    begins = found.start() == 0 or run.strip(_NO_SEPARATORS)
    return f"{run}'{sign}" if sign and begins else f"{run}{sign}"


def to_csv(frame: pd.DataFrame, *, header: bool = True) -> str:
    """The frame without its index, every cell and name of a column as `cell` gives it."""
    text: str = frame.map(cell).rename(columns=cell).to_csv(index=False, header=header)
    return text
