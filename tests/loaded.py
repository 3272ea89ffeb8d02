"""Which of our modules an import loads: the budget of what a reader of one part must know."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.architecture_rules import LAYERS

__all__ = ["modules_loaded"]

# Of ours nothing is loaded when an import begins; what others wrote is loaded once, for speed.
_SCRIPT = """
import json, sys
ours, statements = json.loads(sys.argv[1])
def own():
    return [name for name in sys.modules if name.partition(".")[0] in ours]
found = {}
for statement in statements:
    for loaded in own():
        del sys.modules[loaded]
    exec(statement, {})
    found[statement] = own()
print(json.dumps(found))
"""


def modules_loaded(statements: Sequence[str], *, path: Path | None = None) -> dict[str, set[str]]:
    """Return, for each import statement, the modules of ours that it alone loads.

    Args:
        statements: as "import apfed_attacks".
        path: a folder that is searched as well.
    """
    searched = [*([str(path)] if path else []), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps([LAYERS, list(statements)])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {statement: set(own) for statement, own in loaded.items()}
