"""Find measured figures in prose: what a reader takes for a result, and who must say its source.

A figure is measured by its looks: a mean with its interval, a signed decimal, a percentage, points,
a time, a size, or a decimal in a sentence that names a measure. What looks so and is not (settings,
limits, sizes of examples) stands in `CONSTANTS`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

EVERYWHERE = (
    "95 % bootstrap",
    "95 % interval",
    "95 % intervals",
    "95 % Student",
    "together at 95 %",
    "(95 %, paired)",
    "(95 %, paired",
    "52 % decoys",
    "52 % of the batch",
)
"""Words that mean no measurement on any page."""
CONSTANTS: Mapping[str, tuple[str, ...]] = {
    "README.md": ("Start with [five minutes",),
    "docs/examples.md": ("in a minute at most",),
    "docs/index.md": ("a run in five minutes",),
    "docs/start.md": ("Start in five minutes",),
    "docs/tutorial.md": ("After a minute the bank reads",),
    "docs/when-a-party-dies.md": ("one a minute of training",),
    "docs/between-organisations.md": (
        "of at least 1 %",
        "for 15 s",
        "After 15 s",
        "last 256 MB",
        "rows (95 %",
    ),
    "docs/data.md": ("knows 80 %", "above 256 MiB"),
    "docs/leaks.md": (
        "Sigma 0.01",
        "(10 % is a guess)",
        "clip of 0.1",
    ),
    "docs/results.md": (
        "80 % overlap",
        "At 20 % votes",
        "0.1 % FPR",
    ),
    "docs/papers.md": (
        "prints +1.42",
        "-2.39 of fou, +6.48 of zer",
        "all below 1.1 points",
    ),
    "docs/secure-sum.md": (
        "more than 1 %",
        "than 1 %",
    ),
    "docs/tasks-and-measures.md": (
        "a class of 5 %",
        "2 of 50 where 3 %",
        "at 3 %, votes",
        "class of 5 %",
    ),
    "docs/public-codes.md": ("less than 1 % of",),
    "docs/votes.md": ("each at 99.5 %",),
    "docs/which-method.md": (
        "at 20 % overlap",
        "at 80 %",
    ),
}
"""By page, words around a setting, a limit, a size of an example, or a figure of somebody else."""

_NUMBER = r"(?<![\w.,/-])[+-]?(?:\d[\d,]*)?\.?\d+(?![\w/]|[.,-]\d)"
_INTERVAL = r"(?:(?: points| %)?[ \n]+\[[-+.\d, \n]+\])"
_UNIT = r"(?:%|points?\b|s\b|ms\b|us\b|ns\b|seconds?\b|minutes?\b|min\b|hours?\b|[kMG]B\b)"
_AND = r"(?:,|,? and|,? or| to)[ \n]"
_LIST = rf"{_NUMBER}{_INTERVAL}?(?:{_AND}{_NUMBER}{_INTERVAL}?)*"
_FORMS = (
    re.compile(rf"{_LIST}[ \n]{_UNIT}"),
    re.compile(rf"{_NUMBER}{_INTERVAL}"),
    re.compile(r"(?<![\w.])[+-]\d*\.\d+(?![\w.])"),
)
_SPELT = re.compile(
    r"\b(?:an?|half an?|one|two|three|four|five|ten)[ \n](?:minute|hour)s?"
    r"(?:[ \n]and[ \n]a[ \n]half)?\b"
)
_MEASURES = re.compile(
    r"\b(R2|R²|R\^2|AUC|accuracy|accuracies|gains?|gained|advantage|lift|reads?|reaches|agree\w*)\b"
)
_DECIMAL = re.compile(r"(?<![\w.,/-])\d*\.\d+(?![\w/]|\.\d)")
_HIDDEN = (
    re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE),
    re.compile(r"<!-- (?:table|keys|sentences|bench|diff): \S+ -->\n.*?<!-- end -->", re.DOTALL),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\]\([^)\n]*\)"),
    re.compile(r"https?://\S+"),
)
SOURCED = re.compile(r"<!-- =(\S+) -->")
_SOURCED_FIGURE = re.compile(rf"{_NUMBER}{_INTERVAL}?<!-- =\S+ -->")


def figures_without_source(text: str, constants: tuple[str, ...] = ()) -> list[str]:
    """Return each measured figure of a page that names no source, with the words around it."""
    shown = _blank(text, _HIDDEN)
    shown = _SOURCED_FIGURE.sub(lambda match: "\0" * len(match[0]), shown)
    for constant in (*EVERYWHERE, *constants):
        shown = re.sub(
            r"\s+".join(map(re.escape, constant.split())), lambda m: "\0" * len(m[0]), shown
        )
    return [_around(shown, *place) for place in longest(places_of_figures(shown))]


def longest(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the places in order, without those that lie within another."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(places, key=lambda place: (place[0], -place[1])):
        if not found or begin >= found[-1][1]:
            found.append((begin, end))
    return found


def places_of_figures(shown: str) -> Iterator[tuple[int, int]]:
    """Yield where each single number of a measured figure begins and ends."""
    number = re.compile(rf"{_NUMBER}{_INTERVAL}?")
    for form in _FORMS:
        for match in form.finditer(shown):
            for one in number.finditer(shown, match.start(), match.end()):
                yield one.span()
    for spelt in _SPELT.finditer(shown):
        yield spelt.span()
    for sentence in re.finditer(r"[^\n|]*(?:\n(?![\n|])[^\n|]+)*", shown):
        for part in re.finditer(r"(?:[^.;:]|[.;:](?=\S))+", sentence[0]):
            if _MEASURES.search(part[0]):
                begin = sentence.start() + part.start()
                for one in _DECIMAL.finditer(shown, begin, begin + len(part[0])):
                    yield one.span()


def hide(text: str) -> str:
    return _blank(text, _HIDDEN)


def _blank(text: str, patterns: tuple[re.Pattern[str], ...]) -> str:
    for pattern in patterns:
        text = pattern.sub(lambda match: re.sub(r"[^\n]", "\0", match[0]), text)
    return text


def _around(shown: str, begin: int, end: int) -> str:
    before = shown[max(0, begin - 40) : begin].replace("\n", " ").replace("\0", "")
    after = shown[end : end + 25].replace("\n", " ").replace("\0", "")
    return f"{before}>>{shown[begin:end]}<<{after}"
