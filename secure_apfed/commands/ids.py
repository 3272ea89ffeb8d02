"""The command `secure-apfed check-ids`: what normalisation does to the own IDs; nothing is sent.

Part of the composition root: `secure_apfed.cli` registers it, nothing else imports this.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secure_apfed import terminal
from secure_apfed.commands import AsJson, Overrides

if TYPE_CHECKING:
    from secure_apfed.alignment.ids import IdCheck
    from secure_apfed.config import Config

__all__ = ["check_ids"]

_HEADER = ("rule", "agreed", "IDs it changes")


def check_ids(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    party: Annotated[
        list[str] | None,
        typer.Option(help="Whose IDs; all whose file is here, unless given."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Count the IDs of own tables that `alignment.normalisation` changes or makes equal."""
    from secure_apfed.config.file import load_config

    config = load_config(config_file, overrides=overrides or ())
    found = list(_checks(config, party))
    if as_json:
        terminal.print_json({"parties": [asdict(one) for one in found]})
        return
    for one in found:
        rows = [
            (name, "yes" if name in one.agreed else "no", str(count))
            for name, count in one.by_rule.items()
        ]
        terminal.show_rows(f"{one.party}: {one.rows} IDs", _HEADER, rows)
        typer.echo(_told(one))


def _checks(config: "Config", wanted: list[str] | None) -> "Iterator[IdCheck]":
    from secure_apfed.alignment.ids import IdFile, check_normalisation, id_rules
    from secure_apfed.data.tables import party_path
    from secure_apfed.errors import ConfigError

    parties = config.data.parties or {}
    unknown = [name for name in wanted or () if name not in parties]
    if unknown or not parties:
        there = ", ".join(parties) or "no party with a file of its own (dataset: tables)"
        raise ConfigError(
            f"check-ids: {', '.join(unknown) or 'nobody'} has IDs to check; data.parties names "
            f"{there}"
        )
    here = [name for name, one in parties.items() if party_path(config.data, one.file).exists()]
    for name in wanted or here or parties:
        own = parties[name]
        ids = IdFile(
            name, party_path(config.data, own.file), own.id_column or config.data.id_column
        )
        yield check_normalisation(name, ids, id_rules(config.alignment))


def _told(one: "IdCheck") -> str:
    rows = f", first in rows {', '.join(map(str, one.first))} (from 0)" if one.first else ""
    changed = f"The agreed rules change {one.changed} of them{rows}."
    if not one.repeated:
        return f"{changed} No two are equal then."
    pairs = ", ".join(f"{row} (as {earlier})" for row, earlier in one.pairs)
    return (
        f"{changed} {one.repeated} are equal to an earlier one then ({one.repeated_as_written} as "
        f"they are written), in rows {pairs}: keep one row for each ID, or agree on fewer rules."
    )
