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
import importlib, json, sys
ours, names = json.loads(sys.argv[1])
def own():
    return [name for name in sys.modules if name.partition(".")[0] in ours]
found = {}
for name in names:
    for loaded in own():
        del sys.modules[loaded]
    importlib.import_module(name)
    found[name] = own()
print(json.dumps(found))
"""


def modules_loaded(names: Sequence[str], *, path: Path | None = None) -> dict[str, set[str]]:
    """Return, for each module, those of ours that importing it alone loads, itself among them.

    Args:
        names: of the modules.
        path: a folder that is searched as well.
    """
    searched = [*([str(path)] if path else []), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps([LAYERS, list(names)])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {name: set(own) for name, own in loaded.items()}
