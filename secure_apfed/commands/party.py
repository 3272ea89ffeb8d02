"""The command `party`: one party of a run, by its own file, in this process."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from secure_apfed import progress_bars
from secure_apfed.commands import AsJson
from secure_apfed.errors import ApfedError

__all__ = ["Terminated", "party"]

_LAST_WORDS_S = 10.0


def party(
    config: Annotated[Path, typer.Option(metavar="PARTY.yaml", help="The party's own file.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in its folder.")
    ] = False,
    end_with_stdin: Annotated[
        bool, typer.Option("--end-with-stdin", hidden=True, help="End where stdin ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Play one party of a run; the others run elsewhere, each by its own file."""
    from secure_apfed.runs.party import play_party

    signal.signal(signal.SIGTERM, _interrupt)
    if end_with_stdin:
        threading.Thread(target=_watch, daemon=True).start()
    with progress_bars.watching(config.stem, quiet=as_json) as on_progress:
        play_party(config, resume=resume, on_progress=on_progress, on_restart=_tell)


class Terminated(ApfedError):  # noqa: N818 - it is no error
    """Whoever runs the machine ended this process."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End as an error does: the others are told, and what was written is whole."""
    raise Terminated("ended by SIGTERM")


def _tell(why: str) -> None:
    """Say on stderr, where logs are, why another session begins."""
    typer.echo(why, err=True)


def _watch() -> None:
    """End this process once whoever started it is gone: it would be nobody's."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_WORDS_S)
    os._exit(1)
