"""The commands `audit-log verify` and `audit-log compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secure_apfed import terminal
from secure_apfed.commands import AsJson
from secure_apfed.privacy_rows import figure_title

if TYPE_CHECKING:
    from secure_apfed.audit_log import Direction, Summary

__all__ = ["app", "compare", "verify"]

_PARTED = 4
app = typer.Typer(
    no_args_is_help=True, help="Verify a party's audit log, or compare those of two parties."
)
_Log = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A party's folder, or its audit.log alone.")
]


@app.command()
def verify(
    folder: _Log,
    identity: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="The party's public identity, as you know it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify that a log is whole, and say what adds up in it."""
    from secure_apfed.audit_log import verify_log

    summary = verify_log(folder, identity=identity)
    if as_json:
        terminal.print_json(summary.as_json())
    else:
        _show(summary)


@app.command()
def compare(one: _Log, other: _Log, as_json: AsJson = False) -> None:
    """Compare what two parties logged of the link between them; exit code 4 where they part."""
    from secure_apfed.audit_log import compare_logs

    found = compare_logs(one, other)
    if as_json:
        terminal.print_json(found.as_json())
    else:
        for summary in found.logs:
            if not summary.signed:
                terminal.show_note(f"note: {_ending(summary)}")
        rows = [
            (one.sender, one.receiver, f"{one.equal:,}", f"{one.equal_size:,}",
             f"{one.unreceived:,}", "no" if one.parting is None else "yes")
            for one in found.directions
        ]  # fmt: skip
        columns = ("from", "to", "equal", "bytes", "sent, never received", "part")
        terminal.show_rows("Two logs of one link", columns, rows)
        for direction in found.directions:
            _show_parting(direction)
    if not found.agree:
        raise typer.Exit(_PARTED)


def _show(summary: "Summary") -> None:
    last = f"{figure_title(summary.figure)}, last", f"{summary.epsilon:.4g}"
    if not summary.epsilon:
        last = "epsilon, last", "none: it let out nothing that it counts"
    rows = [
        ("party", summary.party), ("identity", summary.identity), ("last chain", summary.head),
        ("lines", f"{summary.lines:,}, all chained"), ("its end", _ending(summary)),
        ("opened", f"{summary.opened:,} times, {summary.agreed:,} sessions agreed"),
        ("cut after a kill", f"{summary.cut:,} bytes"),
        last,
    ]  # fmt: skip
    terminal.show_rows("Audit log", ("", ""), rows)
    flows = [
        (one.peer, one.event, one.kind or "-", f"{one.envelopes:,}", f"{one.size:,}")
        for one in summary.flows
    ]
    terminal.show_rows("\nEnvelopes", ("peer", "", "kind", "envelopes", "bytes"), flows)


def _ending(summary: "Summary") -> str:
    if summary.signed:
        return "signed by the identity"
    torn = f" and {summary.torn:,} bytes of a torn line" if summary.torn else ""
    return (
        f"{summary.unsigned:,} lines{torn} after the last signature of {summary.party}: there it "
        "may have been shortened or written anew"
    )


def _show_parting(direction: "Direction") -> None:
    at = direction.parting
    if at is not None:
        where = "its end" if at.sent_line is None else f"line {at.sent_line}"
        terminal.show_note(
            f"{direction.sender} to {direction.receiver}: {direction.sender} logged at {where}: "
            f"{at.sent}; {direction.receiver} logged at line {at.received_line}: {at.received}"
        )
