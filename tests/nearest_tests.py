"""Names the files of tests nearest to what changed: `make quick` runs these, in seconds.

A file of tests is near to a module that it imports, less near to what that module imports. Of each
changed module the nearest files are taken, and of changed tests the tests themselves. What only a
whole run shows, `make test` shows.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

_HOMES = ("", "protocols", "attacks", "experiments")
"""Folders from which our packages and tests are imported."""
_PACKAGES = ("protocols", "secure_apfed", "attacks", "experiments", "tests")
_PAGES = "tests/docs/test_docs.py"
"""What checks every page."""
_MAX_FILES = 6
"""Of one changed module; a module that everything imports is near to everything."""


def name_module(file: Path, root: Path) -> str:
    """Return the dotted name under which this file is imported."""
    parts = file.relative_to(root).with_suffix("").parts
    if parts[0] in _HOMES:
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(source: str) -> set[str]:
    """Return the dotted names that a source imports: modules, and what it takes out of them."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


class ImportGraph:
    """Who imports whom among the modules and tests below a folder."""

    def __init__(self, root: Path) -> None:
        files = [file for home in _PACKAGES for file in (root / home).rglob("*.py")]
        self.files = {name_module(file, root): file for file in sorted(files)}
        self._sources = {name: file.read_text("utf-8") for name, file in self.files.items()}
        self._importers: dict[str, set[str]] = {name: set() for name in self.files}
        self._resolve = cache(self._resolve_name)
        self._imports = {name: find_imports(source) for name, source in self._sources.items()}
        for name, imports in self._imports.items():
            for imported in imports:
                module = self._resolve(imported)
                if module is not None and module != name:
                    self._importers[module].add(name)

    def _resolve_name(self, name: str) -> str | None:
        """Return the module that defines this name, through packages that only pass it on."""
        if name in self.files:
            return name
        module, _, attribute = name.rpartition(".")
        if module not in self.files:
            return self._resolve(module) if module else None
        if self.files[module].name == "__init__.py":
            for passed_on in self._imports[module]:
                if passed_on.endswith(f".{attribute}") and passed_on != name:
                    return self._resolve(passed_on)
        return module

    def find_nearest_tests(self, name: str) -> list[str]:
        """Return the modules of tests fewest imports away from this module, itself if it is one."""
        seen = {name}
        ring = {name}
        while ring:
            tests = [each for each in ring if each.rpartition(".")[2].startswith("test_")]
            if tests:
                return self._rank(name, tests)
            ring = {user for each in ring for user in self._importers[each]} - seen
            seen |= ring
        return []

    def _rank(self, name: str, tests: Iterable[str]) -> list[str]:
        """Order tests by how many words of the module's name stand in theirs, short ones first."""
        parts = set(name.replace("_", ".").split("."))

        def rank(test: str) -> tuple[int, int, str]:
            shared = parts & set(test.replace("_", ".").split("."))
            return -len(shared), len(self._sources[test]), test

        return sorted(tests, key=rank)[:_MAX_FILES]


def select_tests(changed: Sequence[Path], root: Path) -> list[str]:
    """Return the files of tests to run after these files changed, as paths below `root`."""
    pages = {_PAGES for file in changed if file.suffix == ".md"}
    modules = [file for file in changed if file.suffix == ".py" and file.is_file()]
    if not modules:
        return sorted(pages)
    graph = ImportGraph(root)
    names: Mapping[Path, str] = {file: name for name, file in graph.files.items()}
    selected = set(pages)
    for file in modules:
        if file in names:
            tests = graph.find_nearest_tests(names[file])
            selected |= {graph.files[test].relative_to(root).as_posix() for test in tests}
    return sorted(selected)


def find_changed_files(root: Path) -> list[Path]:
    """Return the files that differ from the last commit, or are new to git."""
    command = ["git", "status", "--porcelain", "--no-renames", "--untracked-files=all", "-z"]
    lines = subprocess.check_output(command, cwd=root, text=True).split("\0")
    return [path for line in lines if (path := root / line[3:]).is_file()]


def main(arguments: Sequence[str]) -> int:
    """Print the nearest tests of the files named, or of those that git says have changed."""
    root = Path(__file__).resolve().parent.parent
    changed = [Path(each).resolve() for each in arguments] or find_changed_files(root)
    selected = select_tests(changed, root)
    if not selected:
        sys.stderr.write("No test is near to what changed; `make test` runs all.\n")
        return 1
    sys.stdout.write("\n".join(selected) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
