"""The command `party`: one party of a run, by its own file, in this process.

Part of the composition root: the active's results are measured and reported here.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from secure_apfed.commands import AsJson, JsonEvents, finished
from secure_apfed.errors import ApfedError

__all__ = ["Terminated", "party", "watch_stdin"]

_LAST_WORDS_S = 10.0


def party(
    config: Annotated[Path, typer.Option(metavar="PARTY.yaml", help="The party's own file.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in its folder.")
    ] = False,
    baselines: Annotated[
        bool, typer.Option(help="At the active: measure what it does alone, once the run is over.")
    ] = True,
    end_with_stdin: Annotated[
        bool, typer.Option("--end-with-stdin", hidden=True, help="End where stdin ends.")
    ] = False,
    as_json: AsJson = False,
    json_events: JsonEvents = False,
) -> None:
    """Play one party of a run; the others run elsewhere, each by its own file.

    The active's process then measures, makes the report and tells the result, as `run` does.
    """
    from secure_apfed import progress as live_view
    from secure_apfed.exchange import StatusKeeper
    from secure_apfed.runs.folder import RunFolder
    from secure_apfed.runs.party import play_party

    signal.signal(signal.SIGTERM, _interrupt)
    if end_with_stdin:
        threading.Thread(target=watch_stdin, daemon=True).start()
    status = StatusKeeper()
    board = live_view.Board(lambda: (status.status(),))
    with live_view.showing(board, live_view.shown_as(as_json=as_json, json_events=json_events)):
        result = play_party(
            config, resume=resume, on_progress=board.tell_progress, on_restart=_tell, status=status
        )
    if result is None or result.folder is None:
        return  # it helped
    settings, quiet = RunFolder(result.folder).load_config(), as_json or json_events
    if not end_with_stdin:
        finished.tell(settings, result, baselines=baselines, quiet=quiet)
    elif baselines:  # whoever started it reports
        finished.alone(settings, result, quiet=quiet)


class Terminated(ApfedError):  # noqa: N818 - it is no error
    """Whoever runs the machine ended this process."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End as an error does: the others are told, and what was written is whole."""
    raise Terminated("ended by SIGTERM")


def _tell(why: str) -> None:
    """Say on stderr, where logs are, why another session begins."""
    typer.echo(why, err=True)


def watch_stdin() -> None:
    """End this process once whoever started it is gone: it would be nobody's."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_WORDS_S)
    os._exit(1)
