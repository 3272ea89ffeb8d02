"""Where code that a user brought has failed, for the error that names it.

Run by: the party that imports or calls code of its own.
"""

import traceback
from pathlib import Path


def find_failed_line(error: BaseException) -> str:
    """Return where a user's code failed, as "line 3 of my_nets.py".

    For a SyntaxError that is the line that Python cannot parse, else the line that raised. Returns
    "" if Python's import system raised the error, as for a module that does not exist.
    """
    if isinstance(error, SyntaxError):
        path = error.filename
        line = error.lineno
    else:
        innermost_call = traceback.extract_tb(error.__traceback__)[-1]
        path = innermost_call.filename
        line = innermost_call.lineno
    if not path or "importlib" in path:
        return ""
    return f"line {line} of {Path(path).name}"
