"""The documents of the repository, and the blocks and lines of them that claim to work."""

import importlib.util
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = tuple(
    sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")))
)

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_SHELLS = ("sh", "bash", "console")
_INLINE = re.compile(r"`(secure-apfed [^`|]+)`")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, *languages: str) -> list[str]:
    """The contents of its fenced blocks in these languages, those of lists and methods dedented."""
    found = _BLOCK.findall(text_of(document))
    return [textwrap.dedent(content) for _, language, content in found if language in languages]


def built_site(folder: Path) -> Path:
    """The documents as a site in this folder, built without a warning."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def load_module(path: Path) -> ModuleType:
    """Return a file in Python as a module of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where classes of settings look their annotations up
    spec.loader.exec_module(module)
    return module


HOOK = load_module(DOCS / "site_pages.py")
"""What makes the generated parts of the pages."""


def program_of(document: str, folder: Path, *, at: int = 0) -> ModuleType:
    """A fenced block in Python as a file in this folder, and as a module of its own."""
    path = folder / f"{Path(document).stem.replace('-', '_')}_{at}.py"
    path.write_text(blocks(document, "python")[at], encoding="utf-8")
    return load_module(path)


def command_lines(document: str, program: str) -> Iterator[tuple[list[str], bool]]:
    """Yield each call's arguments, optional ones as given, and whether it stands in a block."""
    for block in blocks(document, *_SHELLS):
        for line in block.replace("\\\n", " ").splitlines():
            call = line.strip().removeprefix("$ ")
            if call.startswith(f"{program} "):
                yield _arguments(call, program), True
    for call in _INLINE.findall(text_of(document)):
        if call.startswith(f"{program} "):
            yield _arguments(call, program), False


def _arguments(call: str, program: str) -> list[str]:
    optional = re.sub(r"\[(--[^\]]+)\]", r"\1", call.removeprefix(program))
    return shlex.split(optional, comments=True)
