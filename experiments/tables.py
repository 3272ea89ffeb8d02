"""Tables as Markdown text."""

from collections.abc import Iterable, Sequence

__all__ = ["markdown"]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of these texts, each row as long as the header; it ends with a line break."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
