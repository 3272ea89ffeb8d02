"""One statement does one thing, in the formatter's layout: what no rule of ruff's holds."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for top in ("protocols", "secure_apfed", "attacks", "experiments", "tests")
    for path in (ROOT / top).rglob("*.py")
    if ".venv" not in path.parts
)
_KEPT_FROM_FORMATTER = re.compile(r"#\s*fmt:\s*(skip|off)")


def find_kept_layouts(source: str) -> list[int]:
    """Return the lines that are kept from the formatter."""
    return [
        number
        for number, line in enumerate(source.splitlines(), start=1)
        if _KEPT_FROM_FORMATTER.search(line)
    ]


def find_packed_assignments(source: str) -> list[int]:
    """Return the lines of `a, b = x, y` that could be two statements.

    They must stay one where a later value may read what an earlier target changes, as in a swap.
    """
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
        and _is_packed(node.targets[0], node.value)
    ]


def _is_packed(targets: ast.Tuple, values: ast.Tuple) -> bool:
    plain = not any(
        isinstance(part, ast.Starred | ast.Tuple) for part in (*targets.elts, *values.elts)
    )
    if not plain or len(targets.elts) != len(values.elts):
        return False
    pairs = (
        (target, value)
        for number, target in enumerate(targets.elts)
        for value in values.elts[number + 1 :]
    )
    return not any(_may_read(value, target) for target, value in pairs)


def _may_read(value: ast.expr, target: ast.expr) -> bool:
    if isinstance(target, ast.Name):
        return target.id in _names(value) or _calls(value)
    return bool(_names(target) & _names(value)) or _calls(value)


def _names(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _calls(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Call | ast.Await) for part in ast.walk(node))


def all_lines() -> Iterator[tuple[str, str]]:
    for path in SOURCES:
        if path != "tests/test_layout.py":
            yield path, (ROOT / path).read_text(encoding="utf-8")


def test_the_formatter_lays_out_every_line() -> None:
    kept = [f"{path}:{line}" for path, text in all_lines() for line in find_kept_layouts(text)]
    assert kept == []


def test_one_assignment_a_statement() -> None:
    packed = [
        f"{path}:{line}" for path, text in all_lines() for line in find_packed_assignments(text)
    ]
    assert packed == []


PACKED = {
    "constants": ("a, b = 1, 2", True),
    "attributes": ("self.a, self.b = x, y", True),
    "swap": ("a, b = b, a", False),
    "step": ("low, high = high, low + high", False),
    "call that may read": ("self.a, self.b = None, self.make()", False),
    "one call": ("a, b = f(x)", False),
    "rest": ("a, *b = x, y, z", False),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_assignments_are_found(case: str) -> None:
    source, found = PACKED[case]
    assert bool(find_packed_assignments(source)) == found


def test_kept_layouts_are_found() -> None:
    kept = "x = 1\ny = [1]  # fmt{colon} skip\n# fmt{colon} off\n".format(colon=":")
    assert find_kept_layouts(kept) == [2, 3]
