"""Output of the command line: results on stdout, errors on stderr, exit codes.

An error that is meant for people becomes one panel and one exit code, or one JSON object;
anything else is a fault of this program and keeps its traceback.
"""

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from apfed_protocols.errors import (
    LocalProtocolError,
    PartyLeftError,
    RemoteProtocolError,
    RunStoppedError,
)
from apfed_protocols.installing import install_extra
from secure_apfed import errors
from secure_apfed.base.faults import TableError
from secure_apfed.base.files import to_json
from secure_apfed.base.peer_text import escape_text

if TYPE_CHECKING:
    from secure_apfed.base.phases import Phases
    from secure_apfed.planning.forecast import Forecast
    from secure_apfed.settings.protection import Departure

INTERRUPTED = 130
RESEARCH_MODULES = ("matplotlib", "jinja2", "adjustText", "joblib", "dp_accounting")
"""Names of modules that reports and research import and runs do not; where one is missing, errors
name the extra `experiments`."""
_WIDEST = 100_000
_BLANKS = str.maketrans("\u202f\u00a0", "  ")
_USAGE = 2
_DATA = 3
_PROTOCOL = 4
_BUDGET = 5


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error as the user gets it: a title for people, a kind for programs, and the exit code."""

    code: int
    title: str
    kind: str
    message: str
    cause: Exception | None = field(default=None, repr=False)


def failure_of(error: Exception) -> Failure:
    """Return exit code, title and message for an error that is meant for users."""
    if isinstance(error, ModuleNotFoundError):
        message = f"{error.name} is not installed; run: {install_extra('experiments')}"
        return Failure(
            code=_USAGE, title="An extra is missing", kind="ConfigError", message=message
        )
    # Imported here, since they take longer to load than help may take.
    from apfed_protocols.psi.interface import IntersectionTooSmallError
    from secure_apfed.privacy.ledger import BudgetExhaustedError

    table: tuple[tuple[type[Exception], int, str], ...] = (
        (errors.ConfigError, _USAGE, "The configuration is wrong"),
        (errors.DataError, _DATA, "The data do not fit"),
        (errors.ModelError, _DATA, "The model does not fit"),
        (errors.CheckpointError, _DATA, "The run folder cannot be used"),
        (IntersectionTooSmallError, _DATA, "The parties share too few rows"),
        (LocalProtocolError, _PROTOCOL, "The protocol was refused"),
        (RunStoppedError, _PROTOCOL, "Another party stopped the run"),
        (PartyLeftError, _PROTOCOL, "Another party left"),
        (RemoteProtocolError, _PROTOCOL, "The protocol was violated"),
        (BudgetExhaustedError, _BUDGET, "The privacy budget is spent"),
        (OSError, _DATA, "A file or folder cannot be used"),
        (Exception, _DATA, "This cannot be done"),
    )
    code, title = next((code, title) for kind, code, title in table if isinstance(error, kind))
    kind = "DataError" if isinstance(error, TableError) else type(error).__name__
    return Failure(code=code, title=title, kind=kind, message=str(error), cause=error)


def show_failure(failure: Failure, *, as_json: bool, debug: bool) -> None:
    """Print one panel on stderr, or one JSON object on stdout; with `debug` the traceback too."""
    if debug and failure.cause is not None:
        sys.stderr.write(_make_printable("".join(traceback.format_exception(failure.cause))))
    faults, settings, remedy = _list_table_faults(failure.cause)
    if as_json:
        error: dict[str, Any] = {
            "kind": failure.kind,
            "exit_code": failure.code,
            "message": failure.message,
        }
        if faults:
            error |= {"faults": faults, "settings": settings}
        print_json({"error": error})
        return
    panel = Panel(
        Text(_make_printable(failure.message)),
        title=failure.title,
        title_align="left",
        border_style="red",
    )
    Console(stderr=True).print(panel)
    if settings:
        show_remedy(*remedy, stderr=True)


def _list_table_faults(error: Exception | None) -> tuple[list[str], str, tuple[str, str]]:
    """Return an error's faults of tables, settings that repair them as YAML, and advice for this
    command.
    """
    if not isinstance(error, TableError):
        return [], "", ("", "")
    return [fault.message for fault in error.faults], error.settings, error.remedy


def show_remedy(what_to_do: str, text: str, *, stderr: bool = False) -> None:
    """Print settings without a border, so that they can be copied."""
    console = _make_console(stderr=stderr)
    console.print(Text(_make_printable(f"\n{what_to_do}"), style="bold"))
    console.print(Text(_make_printable(text)), soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; infinity becomes the text "inf"."""
    sys.stdout.write(to_json(value) + "\n")


def show_note(text: str) -> None:
    _make_console(stderr=True).print(Text(_make_printable(text), style="dim"))


def show_line(text: str) -> None:
    """Print one line on stderr, as long as it is."""
    sys.stderr.write(escape_text(_replace_blanks(text)) + "\n")


def _make_printable(text: str) -> str:
    """Return the text with terminal control characters escaped, since a peer may have chosen it."""
    return escape_text(_replace_blanks(text), keep="\n")


def _replace_blanks(text: str) -> str:
    """Return the text with plain blanks in place of the narrow ones before units."""
    return text.translate(_BLANKS)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as a note, without the place in the code; for `warnings.showwarning`.

    `filename`: and `lineno`, `line`: of the code that warns, unused.
    """
    show_note(f"note: {message}")


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; columns of figures are right-aligned.

    If stdout is not a terminal, lines are not wrapped.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(columns))
    for index, name in enumerate(columns):
        figures = bool(rows) and all(row[index][:1].isdigit() for row in rows if row[index])
        table.add_column(
            Text(_make_printable(name)),
            justify="right" if figures else "left",
            header_style="dim",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(escape_text(_replace_blanks(cell))) for cell in row))
    console = _make_console()
    with console.capture() as captured:
        console.print(Text(_make_printable(title), style="bold"))
        console.print(table)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _make_console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr; without a terminal, lines are not wrapped."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDEST
    return console


def show_forecast(name: str, forecast: "Forecast", *, links: bool = False) -> None:
    """Print a forecast on stdout; `links`: the traffic of each link, not its sum by kind."""
    counted = "baselines" in forecast.seconds
    spared = "run --no-baselines spares them"
    if not counted:
        spared += ", plan --baselines measures them"
    labelled = f"{forecast.labelled_rows:,} of {forecast.teaching_rows:,}"
    rows = [
        ("rows", ", ".join(f"{party} {count:,}" for party, count in forecast.rows.items())),
        ("active trains on", f"{forecast.train_rows:,}, tests on {forecast.test_rows:,}"),
        ("learns from labels of", f"{labelled} rows that it could learn from"),
        ("steps", f"{forecast.steps:,}, each about {_format_duration(forecast.seconds_per_step)}"),
        (
            "time on this machine",
            f"about {_format_duration(sum(forecast.seconds.values()))}: "
            + ", ".join(
                f"{phase} {_format_duration(seconds)}"
                for phase, seconds in forecast.seconds.items()
            )
            + (f" ({spared})" if counted else ""),
        ),
        ("not counted", f"start, {'' if counted else f'baselines ({spared}), '}attacks, report"),
    ]
    if forecast.links:
        rows += [
            ("aligned at all parties", f"{forecast.aligned_rows:,}"),
            ("numbers sent of a row", f"{forecast.numbers_per_row:,}"),
            ("sent in all", f"about {format_size(forecast.wire_bytes)}"),
        ]
    rows += [
        (
            f"table of {table.party}",
            f"on disk: {format_size(table.disk_bytes)}; memory: {format_size(table.memory_bytes)}",
        )
        for table in forecast.tables
    ]
    rows += [(promise.format_title(), promise.sentence) for promise in forecast.promises]
    show_rows(f"Forecast of {name}", ("", ""), rows)
    if forecast.links and links:
        show_rows(
            "\nBy link",
            ("from", "to", "kind", "messages", "bytes"),
            [
                (
                    link.sender,
                    link.receiver,
                    link.kind,
                    f"{link.messages:,}",
                    format_size(link.wire_bytes),
                )
                for link in forecast.links
            ],
        )
    elif forecast.links:
        kinds = dict.fromkeys(link.kind for link in forecast.links)
        links_by_kind = {
            kind: [link for link in forecast.links if link.kind == kind] for kind in kinds
        }
        show_rows(
            "\nBy kind of message (--links tells each link)",
            ("kind", "links", "messages", "bytes"),
            [
                (
                    kind,
                    f"{len(of_kind)}",
                    f"{sum(flow.messages for flow in of_kind):,}",
                    format_size(sum(flow.wire_bytes for flow in of_kind)),
                )
                for kind, of_kind in links_by_kind.items()
            ],
        )
    if forecast.intersections:
        show_rows(
            "Set intersections for these tables; the run takes the marked one",
            ("", "protocol", "bytes", "time in one process", "dealer", "pairwise overlaps"),
            [
                (
                    "*" if cost.chosen else "",
                    cost.protocol,
                    format_size(cost.wire_bytes),
                    _format_duration(cost.seconds),
                    "needed" if cost.takes_dealer else "none",
                    "shown to the active" if cost.pairwise else "hidden",
                )
                for cost in forecast.intersections
            ],
        )


def show_departures(departures: Sequence["Departure"]) -> None:
    """Print the settings that protect less than by default, or that there are none.

    `departures`: one for each such setting.
    """
    title = "\nProtects less than by default"
    if departures:
        columns = ("setting", "is", "default", "protects", "consequence")
        show_rows(title, columns, [departure.row for departure in departures])
    else:
        show_rows(f"{title}: nothing", (), [])


def show_phases(phases: "Phases") -> None:
    """Print the time and memory of each phase of a run, and the total."""
    rows = [
        (
            name,
            _format_duration(phase.seconds),
            _format_duration(phase.processor_seconds),
            format_size(phase.peak_bytes),
        )
        for name, phase in phases.items()
    ]
    seconds = _format_duration(sum(phase.seconds for phase in phases.values()))
    processors = _format_duration(sum(phase.processor_seconds for phase in phases.values()))
    columns = ("phase", "by the clock", "of processors", "peak memory until then")
    show_rows("Phases", columns, [*rows, ("together", seconds, processors, rows[-1][-1])])


def format_size(count: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _format_duration(seconds: float) -> str:
    """Return a duration as text with units."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
    return f"{minutes // 60} h {minutes % 60} min"
