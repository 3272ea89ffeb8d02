"""The who-learns-what tables as Markdown, for the documents."""

from collections.abc import Iterator

from experiments.report.coalitions import COALITIONS, LIMITS
from experiments.report.rules import RULES

__all__ = ["markdown"]


def markdown() -> str:
    """Return the tables as Markdown; docs/threat-model.md holds them word for word."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| message | received by | when | can read | what protects | what remains open |"
    yield "|---|---|---|---|---|---|"
    for rule in RULES:
        yield _row(rule.kind, rule.receiver, rule.words(), rule.reads, rule.protects, rule.remains)
    yield ""
    yield "| together | when | learn |"
    yield "|---|---|---|"
    for coalition in COALITIONS:
        yield _row(coalition.who, coalition.words(), coalition.learns)
    yield ""
    yield "| when | not guaranteed |"
    yield "|---|---|"
    for sentence in dict.fromkeys(limit.sentence for limit in LIMITS):
        words = (limit.words() for limit in LIMITS if limit.sentence == sentence)
        yield _row(" *or* ".join(words), sentence)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
