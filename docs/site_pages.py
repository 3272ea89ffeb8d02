"""What of the pages is generated: `python docs/site_pages.py` renews it, and MkDocs does, too.

Between `<!-- KIND: WHAT -->` and `<!-- end -->` a page holds what one of `BLOCKS` makes:

- `table: results.gains`: figures of `docs/data/results.json`, under "gains". A table has columns
  and rows; one "of" another takes some of its columns and rows under names of its own.
- `keys: run`: the keys of a settings file, from its classes and their docstrings.
- `sentences: together`: a table of what the report says of a run, by its first column.
- `diff: apfed_plain/apfed_secure`: what one of docs/examples changes in another.
- `bench: psi/*/10000`: what docs/performance/psi.json holds of cases that are like `*/10000`.

A single figure of a sentence has its source behind it, which a reader does not see:

- `+11.8<!-- =results.gains:votes-digits-n20:gain -->` is a cell of `docs/data/results.json`, found
  by the beginnings of its row and of its column, in small letters with hyphens;
- `3.4<!-- =performance.make-run:main:minutes -->` is a case of `docs/performance/make-run.json`.

A sentence may round and leave signs and leading zeros out; what it says otherwise is renewed.

Files at the top of the repository, and the report's tables, are pages of the site, too.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["BLOCKS", "on_files", "on_page_markdown", "renewed"]

DOCS = Path(__file__).resolve().parent
TOP = DOCS.parent
SENTENCES = "experiments/apfed_experiments/report/who_learns.md"
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "who-learns-what.md": SENTENCES,
}
_BLOCK = re.compile(r"<!-- (?P<kind>\w+): (?P<what>\S+) -->\n.*?<!-- end -->", re.DOTALL)
_FIGURE = re.compile(
    r"(?<![\w.,/])(?P<shown>[+-]?(?:\d[\d,]*)?\.?\d+(?:(?: points| %)?[ \n]+\[[-+.\d, \n]+\])?)"
    r"<!-- =(?P<source>\S+) -->"
)
_SOURCE = re.compile(r"<!-- =(\S+) -->")
_SINGLE = re.compile(r"[+-]?(?:\d[\d,]*)?\.?\d+(?:e[+-]?\d+)?")
_EVIDENT = ("number", "text", "true, false", "list")
_TAGS = ("kind", "name")
_TOLD_AT_ONCE = ("attacks", "own", "passive")  # what their keys are stands elsewhere
_ENTRY = re.compile(r"^ {8}((?:\w+, )*\w+): ", re.MULTILINE)


def renewed(text: str) -> str:
    """Return the text of a page with what is generated in its places."""

    def fill(match: re.Match[str]) -> str:
        kind, what = match["kind"], match["what"]
        return f"<!-- {kind}: {what} -->\n{BLOCKS[kind](what)}\n<!-- end -->"

    def quote(match: re.Match[str]) -> str:
        source = match["source"]
        return f"{quote_figure(match['shown'], read_source(source), source)}<!-- ={source} -->"

    if len(_FIGURE.findall(text)) != len(_SOURCE.findall(text)):
        behind = {match.end() for match in _FIGURE.finditer(text)}
        alone = [match[1] for match in _SOURCE.finditer(text) if match.end() not in behind]
        raise ValueError(f"sources that stand behind no figure: {', '.join(alone)}")
    return _FIGURE.sub(quote, _BLOCK.sub(fill, text))


def quote_figure(shown: str, stored: str, source: str) -> str:
    """Return the stored figure as the sentence writes its own: decimals, signs, leading zeros.

    ValueError: the sentence has more numbers than the source.
    """
    written, known = _SINGLE.findall(shown), _SINGLE.findall(stored)
    if len(written) > len(known):
        raise ValueError(f"{source} holds {stored!r}, and a page says {shown!r}")
    signs = [_all_signed(written[:1])] + [_all_signed(written[1:])] * len(written[1:])
    values = iter(zip(written, known, signs, strict=False))
    return _SINGLE.sub(lambda match: _as_written(*next(values)), shown)


def _all_signed(numbers: list[str]) -> bool:
    return all(one.startswith(("+", "-")) for one in numbers)


def _as_written(written: str, known: str, signed: bool) -> str:
    decimals = min(len(one.partition(".")[2]) for one in (written, known))
    if "e" in known:
        return known
    value = float(known.replace(",", ""))
    sign = "+" if signed else ""
    comma = "," if "," in written or "," in known else ""
    text = f"{value:{sign}{comma}.{decimals}f}"
    without_zero = written.lstrip("+-").startswith(".")
    return re.sub(r"^([+-]?)0\.", r"\1.", text) if without_zero else text


def read_source(source: str) -> str:
    """Return the figure that a source names, as it is stored.

    ValueError: it names no figure, or several.
    """
    place, *keys = source.split(":")
    folder, _, name = place.partition(".")
    if len(keys) != 2 or not name:
        raise ValueError(f"{source}: expected FILE.TABLE:ROW:COLUMN")
    if folder == "performance":
        return _measured_case(source, name, *keys)
    tables = json.loads((DOCS / f"data/{folder}.json").read_bytes())
    if "rows" not in tables.get(name, {}) or "of" in tables[name]:
        raise ValueError(f"{source}: docs/data/{folder}.json has no table {name} of its own")
    table = tables[name]
    row = _only_one(source, keys[0], row_slugs(table["rows"]))
    column = _only_one(source, keys[1], [[slug(column)] for column in table["columns"]])
    return str(table["rows"][row][column])


def _measured_case(source: str, name: str, case: str, field: str) -> str:
    rows = json.loads((DOCS / f"performance/{name}.json").read_bytes())["rows"]
    row = rows[_only_one(source, case, [[slug(row["case"])] for row in rows])]
    value = row["seconds"] / 60 if field == "minutes" else row[field]
    return f"{value:.4f}"


def slug(text: str) -> str:
    """Return a text in small letters, with hyphens for all that is neither letter nor digit."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def row_slugs(rows: list[list[str]]) -> list[list[str]]:
    """Return each row's names: its first cell, its first two, and so on to the fourth.

    An empty cell stands for the one above it.
    """
    names, above = [], [""] * 4
    for row in rows:
        first = [cell or before for cell, before in zip(row[:4], above, strict=False)]
        names.append([slug(" ".join(first[:count])) for count in range(1, len(first) + 1)])
        above = first
    return names


def _only_one(source: str, key: str, names: list[list[str]]) -> int:
    """Return the place of the only one that has this name, or else whose name begins so."""
    found = [place for place, every in enumerate(names) if key in every]
    if not found:
        begins = f"{key}-"
        found = [at for at, every in enumerate(names) if f"{every[-1]}-".startswith(begins)]
    if len(found) != 1:
        known = ", ".join(every[0] for every in names)
        raise ValueError(f"{source}: {key!r} names {len(found)} of {known}")
    return found[0]


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    head, *lines = (f"| {' | '.join(line)} |" for line in (columns, *rows))
    return "\n".join([head, f"|{'---|' * len(columns)}", *lines])


def figures(subject: str) -> str:
    """Return a table of a JSON file below docs/data."""
    file, name = subject.split(".")
    tables = json.loads((DOCS / f"data/{file}.json").read_bytes())
    table = tables[name]
    if "of" not in table:
        return _markdown(table["columns"], table["rows"])
    source = tables[table["of"]]
    places = [source["columns"].index(column) for column in table["columns"].values()]
    by_label = {row[0]: row for row in source["rows"]}
    rows = [[said, *(by_label[of][at] for at in places)] for of, said in table["rows"].items()]
    return _markdown([table["label"], *table["columns"]], rows)


def sentences(subject: str) -> str:
    """Return a table of the report's, whose first column is called so."""
    (table,) = [
        table
        for table in (TOP / SENTENCES).read_text("utf-8").strip().split("\n\n")
        if table.startswith(f"| {subject} |")
    ]
    return table


def keys(subject: str) -> str:
    """Every key of `run` or `party`, by its path; what is kept by name has NAME in it."""
    from secure_apfed.organisations.party import PartyFile
    from secure_apfed.settings import RunSettings

    rows = [list(row) for row in _rows({"run": RunSettings, "party": PartyFile}[subject], "")]
    return _markdown(["key", "takes: default", "what it says"], rows)


def _rows(settings: Any, path: str) -> Iterator[tuple[str, str, str]]:
    from secure_apfed.methods import METHODS

    told = _told(settings)
    for key, field in settings.model_fields.items():
        if key == "options":  # of plug-ins; a file has them beside the name
            continue
        takes, default = _type(field.annotation), None if field.is_required() else _plain(field)
        evident = takes in _EVIDENT and default
        said = [default] if evident else [takes.removesuffix(" or null"), default]
        if default == "`null`":
            said = [f"{said[0]}?"]
        if told[key]:
            yield f"`{path}{key}`", ": ".join(filter(None, said)), told[key]
        inner = [one.settings for one in METHODS.values()] if key == "method" else []
        inner = inner or [one for one in _sections(field.annotation) if not path or key != "model"]
        below: dict[tuple[str, str, str], list[str]] = {}
        for one in inner if key not in _TOLD_AT_ONCE else ():
            fields = one.model_fields
            tags = [_type(fields[tag].annotation) for tag in _TAGS if tag in fields]
            for row in _rows(one, f"{path}{key}.{'NAME.' if takes.startswith('by name') else ''}"):
                if len(inner) == 1 or not row[0].endswith((".kind`", ".name`")):
                    below.setdefault(row, []).append("".join(tags))
        for (place, takes, about), of in below.items():
            yield place, takes, f"{', '.join(of)}: {about}" if len(inner) > 1 else about


def _sections(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [found for one in get_args(annotation) for found in _sections(one)]


def _type(annotation: Any) -> str:
    """In the words of a file."""
    if hasattr(annotation, "model_fields"):
        return "section"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(one) for one in inner))
    if origin is tuple:
        return "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "by name"
    if inner:
        return _type(inner[0])
    named = {"int": "number", "float": "number", "bool": "true, false", "NoneType": "null"}
    return named.get(getattr(annotation, "__name__", ""), "text")


def _plain(field: Any) -> str | None:
    """Its default; a section has those of its keys."""
    value = field.get_default(call_default_factory=True)
    if hasattr(value, "model_dump") or isinstance(value, dict) or value == ():
        return None
    return f"`{json.dumps(value, default=str)}`".replace('"', "")


def _told(settings: Any) -> dict[str, str]:
    """Return the first sentence on each key, in docstrings of the class and its bases."""
    told: dict[str, str] = {}
    known = "|".join(settings.model_fields)
    inner = re.compile(rf"[;.] (?=(?:(?:{known}), )*(?:{known}): )")
    for owner in reversed([base for base in settings.__mro__ if "secure_apfed" in base.__module__]):
        entries = _ENTRY.split((owner.__doc__ or "").partition("Attributes:\n")[2])[1:]
        for names, about in zip(entries[::2], entries[1::2], strict=True):
            for part in inner.split(f"{names}: {' '.join(about.split())}"):
                heads, _, said = part.replace("|", "\\|").partition(": ")
                sentence = re.split(r"(?<=[a-z)`\d])\. (?=[A-Z])", said)[0].rstrip(".:")
                told |= dict.fromkeys(heads.split(", "), f"{sentence}.")
    for key, field in settings.model_fields.items():
        if key not in told:
            beside = next((one for one, said in told.items() if key in said.split()), "")
            told[key] = "" if _sections(field.annotation) else f"See `{beside}`."
    return told


def bench(subject: str) -> str:
    """Return a table of a bench, of the cases that are like a glob, if there is one."""
    from apfed_bench.table import format_bench, load_bench_results

    name, _, only = subject.partition("/")
    return format_bench(load_bench_results(DOCS / f"performance/{name}.json"), only or "*")


def difference(subject: str) -> str:
    """Return what changes from one example to another, as `diff -u` has it."""
    names = [f"{name}.py" for name in subject.split("/")]
    texts = [(DOCS / "examples" / name).read_text("utf-8").splitlines() for name in names]
    lines = difflib.unified_diff(*texts, *names, n=1, lineterm="")
    return "\n".join(["```diff", *(line.rstrip() for line in lines), "```"])


BLOCKS = {
    "table": figures,
    "keys": keys,
    "sentences": sentences,
    "bench": bench,
    "diff": difference,
}


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that lie elsewhere."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        text = (TOP / source).read_text("utf-8")
        head = "# Who learns what, message by message\n\n" if source == SENTENCES else ""
        files.append(File.generated(config, page, content=head + text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links of these pages, which start at the repository's top, and links to them."""
    added = page.file.src_uri in PAGES
    for name, source in PAGES.items():
        markdown = markdown.replace(f"../{source})", f"{name})")
        if added:
            markdown = markdown.replace(f"]({source})", f"]({name})")
    return markdown.replace("](docs/", "](") if added else renewed(markdown)


if __name__ == "__main__":
    for path in (TOP / "README.md", *DOCS.rglob("*.md")):
        text = path.read_text("utf-8")
        if (new := renewed(text)) != text:
            path.write_text(new, "utf-8")
