"""Commands: parts of the command line, put together by `secure_apfed.cli`; what they share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

__all__ = [
    "AsJson",
    "ConfigFile",
    "Finding",
    "Jobs",
    "JsonEvents",
    "MetricsFile",
    "Overrides",
    "RunFolder",
    "State",
]

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting, for example train.epochs=3."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; infinity is the text inf.")
]
Jobs = Annotated[int, typer.Option(min=1, help="Number of parallel processes, one thread each.")]
JsonEvents = Annotated[
    bool,
    typer.Option(
        "--json-events",
        help="Print progress as JSON lines on stdout, then the result as with --json.",
    ),
]
MetricsFile = Annotated[
    Path | None,
    typer.Option(
        "--metrics-file",
        metavar="FILE.prom",
        help="Write metrics for Prometheus to this file, once a second.",
    ),
]
State: TypeAlias = Literal["ok", "optional", "missing"]


@dataclass(frozen=True)
class Finding:
    """The result of one check of `doctor` or `check`; a run works without a missing "optional"
    part.
    """

    group: str
    name: str
    state: State
    value: str
    remedy: str = ""
