"""CSV for people who open it in a spreadsheet, which takes some texts for formulas.

IDs and class names come from tables that somebody else may have written. As OWASP recommends
(CSV Injection), a text that begins as a formula does gets an apostrophe before it. Numbers,
negative ones too, stay as they are.
"""

import re

import pandas as pd

__all__ = ["cell", "to_csv"]

_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # the last are as wide as Chinese characters
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def cell(value: object) -> object:
    """The value, or a text that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value.startswith(_FORMULA) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def to_csv(frame: pd.DataFrame) -> str:
    """The frame without its index, every cell and name of a column as `cell` gives it."""
    text: str = frame.map(cell).rename(columns=cell).to_csv(index=False)
    return text
