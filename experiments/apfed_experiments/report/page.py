"""Self-contained HTML pages of runs and studies: style and pictures inside, nothing outside."""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from apfed_experiments import words
from apfed_experiments.columns import Table, write_text
from apfed_experiments.drawing import Picture
from apfed_experiments.report import contents
from apfed_experiments.report.own import ReportedParty
from apfed_experiments.report.run import Audited, ReportedRun
from apfed_experiments.run_list import TARGETS, ListedRun, State, settings_in
from apfed_experiments.solo import LEFT_OUT
from secure_apfed.config.file import dump_settings
from secure_apfed.files import write_atomically

__all__ = [
    "Part",
    "fill",
    "inside",
    "render",
    "render_party",
    "write_comparison",
    "write_page",
    "write_runs_page",
]


def render(
    run: ReportedRun, pictures: Sequence[Picture], audited: Audited | None,
    measured: Mapping[str, Any] | None,
) -> str:  # fmt: skip
    """The page; see `audit_of` and `measured_of`."""
    return fill(
        "report.html.jinja",
        run=run,
        headline=contents.headline_of(run),
        reached=next(iter(run.outcome.scores.values())),
        measure=run.outcome.judged_by,
        measured=measured,
        warnings=contents.warnings_of(run),
        tiles=contents.tiles_of(run),
        pictures=[inside(picture) for picture in pictures],
        left_out="" if run.config.dp_sgd is None else f"{LEFT_OUT[0].upper()}{LEFT_OUT[1:]}.",
        learned=contents.learned_by(run),
        alignment_leaks=contents.alignment_leaks_of(run),
        agreement=contents.agreement_of(run),
        coalitions=[(each.who, each.learns) for each in contents.coalitions_of(run)],
        accounting=(*contents.accounting_of(run), *(audited.rows() if audited else ())),
        trace=contents.trace_of(run),
        limits=contents.limits_of(run),
        settings=contents.settings_of(run),
        config=dump_settings(run.config),
        repeat=[
            ("command", "secure-apfed run config.yaml"),
            ("SHA-256 of the contract", run.contract_sha256),
            ("seeds", _flat(run.seeds)),
            ("versions", _flat(run.versions)),
        ],
    )


def render_party(party: ReportedParty) -> str:
    """The page of a party that helped."""
    learned, own = contents.learned_by(party), party.own
    role = party.roles[own.name]
    mine = role.capitalize() if role == own.name else own.name
    return fill(
        "party.html.jinja",
        party=party, own=own, method=party.config.method.title, role=role,
        attacks=party.attacks,
        tiles=[
            *contents.traffic_of(party, own.name),
            *(contents.Tile(name, value, "") for name, value in own.spent_rows()),
        ],
        learned=dict(sorted(learned.items(), key=lambda item: mine not in item[0].split(" "))),
        alignment_leaks=contents.alignment_leaks_of(party),
        coalitions=[(each.who, each.learns) for each in contents.coalitions_of(party)],
        spent=[
            *own.spent_rows(),
            *((f"charges to the ledger of {name}", words.count(charges))
              for name, charges in party.charges.items()),
        ],
        limits=contents.limits_of(party), config=dump_settings(party.config),
    )  # fmt: skip


def fill(template: str, **values: Any) -> str:
    """The page that a template of this package makes of `values`, with the style of all."""
    page: str = _environment().get_template(template).render(**values)
    return page


@cache
def _environment() -> Environment:
    loader = PackageLoader("apfed_experiments.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "plain": words.plain, "in_words": words.in_words, "count": words.count,
        "signed": words.signed, "attack_title": words.attack_title,
        "unevenness": contents.unevenness,
    }  # fmt: skip
    return environment


def inside(picture: Picture) -> dict[str, str]:
    encoded = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    said = {"key": picture.path.stem, "title": picture.title, "caption": picture.caption}
    return {**said, "base64": encoded}


def _flat(values: Mapping[str, Any]) -> str:
    return "; ".join(
        _flat(value) if isinstance(value, Mapping) else f"{name} {value}"
        for name, value in values.items()
    )


def write_page(folder: Path, template: str, *, pictures: Sequence[Picture], **values: Any) -> None:
    page = fill(template, pictures=[inside(picture) for picture in pictures], **values)
    write_text(folder / "index.html", page)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One data set of a comparison; label and address, relative to the page, of reports of runs."""

    table: Table
    picture: Picture
    reports: Sequence[tuple[str, str]] = ()


def write_comparison(folder: Path, *, title: str, reading: str, parts: Sequence[Part]) -> None:
    """Write index.html: how to read it, a picture and a table for each data set, links to runs."""
    header = parts[0].table.header if parts else ()
    shown = [
        {"title": part.table.title, "picture": inside(part.picture), "rows": part.table.cells,
         "reports": part.reports}
        for part in parts
    ]  # fmt: skip
    write_page(
        folder, "comparison.html.jinja", pictures=(), title=title, reading=reading, header=header,
        parts=shown,
    )  # fmt: skip


def write_runs_page(runs: Sequence[ListedRun], path: Path, *, title: str) -> Path:
    """Write the page; its links to reports hold while it and the folders stay where they are."""
    leaked = [target for target in TARGETS if any(target in run.leaks for run in runs)]
    page = fill(
        "runs.html.jinja",
        title=title,
        states=[(str(state), sum(run.state is state for run in runs)) for state in State],
        targets=leaked,
        rows=[_row(run, leaked, path.parent) for run in runs],
        choices={
            "method": sorted({run.config.method.name for run in runs if run.config}),
            "data": sorted({run.config.data.dataset for run in runs if run.config}),
            "state": sorted({str(run.state) for run in runs}),
        },
        settings=[{} if run.config is None else settings_in(run.config) for run in runs],
    )
    write_atomically(path, page.encode(), private=True)
    return path


def _row(run: ListedRun, targets: Sequence[str], start: Path) -> dict[str, Any]:
    """What the template shows of a run; each figure is (text, note, number to sort by)."""
    config, gain, alone = run.config, run.gain, run.alone
    beside = run.gained if alone is None or gain is None else alone.best.title
    figures: dict[str, tuple[str, str, float | None]] = {
        "reached": _figure(run.value, lambda _: run.reached),
        "gain": _figure(gain, lambda _: run.gained.replace("-", "\u2212"), beside),
        "epsilon": _figure(run.epsilon, words.epsilon),
    }
    for target in targets:
        leak = run.leaks.get(target)
        note = "" if leak is None else f"{words.plain(leak.metric)}, {words.plain(leak.attack)}"
        advantage = None if leak is None else leak.advantage
        figures[f"attack on {target}"] = _figure(advantage, words.signed, note)
    figures["sent"] = _figure(run.wire_bytes, words.size)
    # From where the page lies; names are quoted, so that they name no other.
    address = Path(os.path.relpath(run.path / "report.html", start)).as_posix()
    return {
        "name": run.name, "report": quote(os.fsencode(address)) if run.report else None,
        "method": "" if config is None else config.method.name,
        "title": "" if config is None else config.method.title,
        "dataset": "" if config is None else config.data.dataset, "data": run.data,
        "figures": figures, "date": run.date.strftime("%Y-%m-%d %H:%M"), "state": str(run.state),
        "reason": run.reason,
    }  # fmt: skip


def _figure(value: Any, form: Any, note: str = "") -> tuple[str, str, float | None]:
    return ("", note, None) if value is None else (form(value), note, float(value))
