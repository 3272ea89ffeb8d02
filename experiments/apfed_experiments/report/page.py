"""Self-contained HTML pages of runs and studies: style and pictures inside, nothing outside."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from apfed_attacks.headlines import Headline
from apfed_experiments import words, worth
from apfed_experiments.baselines import OMITTED_FOR_DP_SGD
from apfed_experiments.columns import Table, write_text
from apfed_experiments.drawing import Picture
from apfed_experiments.report import contents
from apfed_experiments.report.own import ReportedParty
from apfed_experiments.report.run import Audited, ReportedRun
from apfed_experiments.run_list import ListedRun, RunState, flatten_settings
from apfed_experiments.verdict import VerdictLine, describe_party, describe_run
from secure_apfed.base.files import write_atomically
from secure_apfed.base.peer_text import escape_text
from secure_apfed.config.file import dump_settings

# Line breaks and blanks of our own texts, which are not escaped.
_UNESCAPED_BLANKS = "\n\t\u00a0\u2009\u202f"


def render_run(
    run: ReportedRun,
    pictures: Sequence[Picture],
    audited: Audited | None,
    prediction_measures: Mapping[str, Any] | None,
) -> str:
    """Return the HTML page of a run.

    `pictures`: pictures of the run. `audited`: result of `audit_guard`, None if no guard released
    anything. `prediction_measures`: result of `measure_predictions`, None if no predictions were
    stored.
    """
    return render_template(
        "report.html.jinja",
        run=run,
        lines=describe_run(run),
        contents=contents,
        worth=worth,
        measured=prediction_measures,
        pictures=pictures,
        left_out=""
        if run.config.dp_sgd is None
        else f"{OMITTED_FOR_DP_SGD[0].upper()}{OMITTED_FOR_DP_SGD[1:]}.",
        audited=audited.list_rows() if audited else (),
        config=dump_settings(run.config),
        repeat=[
            ("command", "secure-apfed run config.yaml"),
            ("SHA-256 of the contract", run.contract_sha256),
            ("seeds", _flatten_values(run.seeds)),
            ("versions", _flatten_values(run.versions)),
        ],
    )


def _make_guarantee_tile(title: str, guarantee_text: str) -> contents.Tile:
    """Return the tile (title, value and note) of one guarantee, for the top of a report.

    `title`: title. `guarantee_text`: text of the guarantee, with the reason after a colon if there
    is none.
    """
    value, _, reason = guarantee_text.partition(": ")
    return contents.Tile(title, value, reason)


def render_party(party: ReportedParty) -> str:
    """Return the HTML page of a passive; what the passive itself learned comes first."""
    learned = contents.list_learned(party)  # by heading, such as "bank (passive)"
    own_side = party.own_side
    role = party.roles[own_side.name]
    title = role.capitalize() if role == own_side.name else own_side.name
    learned_own_first = sorted(learned.items(), key=lambda item: title not in item[0].split(" "))
    return render_template(
        "party.html.jinja",
        party=party,
        own=own_side,
        method=party.config.method.title,
        role=role,
        attacks=party.attacks,
        lines=describe_party(party),
        tiles=[
            *contents.iter_traffic_tiles(party, own_side.name),
            *(_make_guarantee_tile(name, value) for name, value in party.guarantee_rows),
        ],
        learned=dict(learned_own_first),
        alignment_leaks=contents.describe_alignment_leaks(party),
        coalitions=contents.list_coalitions(party),
        spent=[
            *party.guarantee_rows,
            *(
                (f"charges to the ledger of {name}", words.format_count(charges))
                for name, charges in party.charges.items()
            ),
        ],
        limits=contents.list_limits(party),
        config=dump_settings(party.config),
    )


def render_template(template: str, **values: Any) -> str:
    """Return a template of this package rendered with these values."""
    page: str = _make_environment().get_template(template).render(**values)
    return page


@cache
def _make_environment() -> Environment:
    """Return the environment of templates: values are escaped, and a missing one is an error."""
    loader = PackageLoader("apfed_experiments.report", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_escape_unprintable
    )
    environment.filters |= {
        "plain": words.format_key,
        "in_words": words.format_value,
        "count": words.format_count,
        "signed": words.format_difference,
        "attack_title": words.title_attack,
        "unevenness": contents.describe_unevenness,
    }
    return environment


def _escape_unprintable(value: Any) -> Any:
    """Return a text with escapes in place of invisible characters.

    Markup, and values that are no text, are unchanged.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return escape_text(value, keep=_UNESCAPED_BLANKS)


def _flatten_values(values: Mapping[str, Any]) -> str:
    """Return nested values in one line, as "name value; name value"."""
    return "; ".join(
        _flatten_values(value) if isinstance(value, Mapping) else f"{name} {value}"
        for name, value in values.items()
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a study's page, such as the results on one data set.

    Attributes:
        name: stem of the names of the part's files.
        table: table with all columns.
        narrow_table: narrower table for terminals; None: `table`.
        pictures: pictures of the part, in reading order.
        verdict_lines: lines of the verdict (summary in plain words) on protection, gain and
            attacks.
        notes: sentences below the table.
    """

    name: str
    table: Table
    narrow_table: Table | None = None
    pictures: Sequence[Picture] = ()
    verdict_lines: Sequence[VerdictLine] = ()
    notes: Sequence[str] = ()


def write_study_page(
    path: Path,
    *,
    title: str,
    reading_guide: str,
    parts: Sequence[Part],
    reports: Sequence[tuple[str, str]] = (),
    failures: Sequence[str] = (),
) -> None:
    """Write the HTML page of a study.

    Args:
        path: file that the page is written to.
        title: title of the study.
        reading_guide: sentences on how to read the tables.
        parts: tables and pictures, one part for each data set or question.
        reports: links to reports of runs: label, and address relative to the page.
        failures: sentences on what was left out.
    """
    page = render_template(
        "comparison.html.jinja",
        title=title,
        reading=reading_guide,
        parts=parts,
        reports=reports,
        failures=failures,
    )
    write_text(path, page)


def write_runs_page(runs: Sequence[ListedRun], path: Path, *, title: str) -> Path:
    """Write the HTML page of a list of runs, and return its path.

    Its links to reports are relative, so they hold while page and folders stay where they are.
    """
    directions = list(dict.fromkeys(kind for run in runs for kind in run.leak_by_direction))
    page = render_template(
        "runs.html.jinja",
        title=title,
        newest=next((run for run in runs if run.verdict_lines), None),
        states=[(str(state), sum(run.state is state for run in runs)) for state in RunState],
        targets=directions,
        rows=[
            (run, _format_metrics(run, directions), _make_address(run, path.parent)) for run in runs
        ],
        choices={
            "method": sorted({run.config.method.name for run in runs if run.config}),
            "data": sorted({run.config.data.dataset for run in runs if run.config}),
            "state": sorted({str(run.state) for run in runs}),
        },
        settings=[{} if run.config is None else flatten_settings(run.config) for run in runs],
    )
    write_atomically(path, page.encode(), private=True)
    return path


def _format_metrics(
    run: ListedRun, directions: Sequence[str]
) -> dict[str, tuple[str, str, float | None]]:
    """Return the metrics of a run by column, each as text, note, and number to sort by.

    `directions`: leak directions (who reads whose what), which are columns.
    """
    gain = run.gain
    local_models = run.local_models
    note = run.gain_text if local_models is None or gain is None else local_models.best.title
    cells = {
        "reached": _format_metric(run.score, lambda _: run.score_text),
        "gain": _format_metric(gain, lambda _: run.gain_text.replace("-", "\u2212"), note),
        "epsilon": _format_guarantee(run),
    }
    for direction in directions:
        leak = run.leak_by_direction.get(direction)
        cells[direction] = ("", "", None) if leak is None else _format_headline(leak)
    return {**cells, "sent": _format_metric(run.wire_bytes, words.format_size)}


def _format_headline(headline: Headline) -> tuple[str, str, float | None]:
    """Return the best attack's advantage in a leak direction (who reads whose what).

    It is returned as text, note, and number to sort by. If no attack ran, the text says so ("not
    attacked", for example) and the number is None.
    """
    if headline.best_attack is None:
        return headline.state, headline.note, None
    return words.format_difference(headline.advantage), headline.note, headline.advantage


def _format_guarantee(run: ListedRun) -> tuple[str, str, float | None]:
    """Return the epsilon of a run's weakest guarantee as text, note, and number to sort by."""
    if run.guarantee is None:
        return "", "", None
    return run.guarantee.text, run.guarantee.format_title(), run.guarantee.epsilon


def _make_address(run: ListedRun, page_folder: Path) -> str:
    """Return the address of a run's report relative to the page's folder `page_folder`; empty:
    none.

    Names are URL-quoted, so that they cannot name another file.
    """
    address = Path(os.path.relpath(run.path / "report.html", page_folder)).as_posix()
    return quote(os.fsencode(address)) if run.has_report else ""


def _format_metric(value: Any, format_value: Any, note: str = "") -> tuple[str, str, float | None]:
    """Return a value as text, note, and number to sort by; None: it is not known.

    `format_value`: function that returns the text of the value.
    """
    return ("", note, None) if value is None else (format_value(value), note, float(value))
