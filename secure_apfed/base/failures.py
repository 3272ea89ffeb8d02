"""Where code that a user brought has failed, for the error that names it.

Run by: the party that imports or calls code of its own.
"""

import traceback
from pathlib import Path


def find_failed_line(error: BaseException) -> str:
    """Return where an error was raised, as "line 3 of my_nets.py"; "" within the import system.

    For code that is not Python, the line that cannot be read.
    """
    if isinstance(error, SyntaxError):
        path = error.filename
        line = error.lineno
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        path = frame.filename
        line = frame.lineno
    if not path or "importlib" in path:
        return ""
    return f"line {line} of {Path(path).name}"
