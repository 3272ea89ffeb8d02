"""How far a run is, and where its parties stand: bars, panels, plain lines, or JSON for programs.

On a terminal a bar or a panel that is drawn anew; in a log a line an epoch, and one when something
changed that a person would want to know; with `--json-events` one JSON object a line on stdout. Of
a party nothing comes more often than once a second. A name or number that a peer chose is checked
before it gets here, and no other text of a peer is shown, but why it refuses this party.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from secure_apfed.files import to_json, write_atomically

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn

    from secure_apfed.exchange import Status, Waiting
    from secure_apfed.runs.outcome import Progress

_PERIOD_S = 1.0
_AGAIN_S = 30.0  # a line although nothing changed
_DRAWN_PER_S = 4
_LINE_S = 60.0


@contextmanager
def watching(name: str, *, quiet: bool) -> Iterator["Callable[[Progress], None]"]:
    """Show a run's progress on stderr; yields what `run` calls with each `Progress`."""
    console = Console(stderr=True)
    if quiet:
        yield lambda progress: None
    elif console.is_terminal:
        from rich.progress import TextColumn, TimeRemainingColumn

        with _bars(TextColumn("{task.fields[told]}"), TimeRemainingColumn()) as bars:
            task = bars.add_task(f"{name}: alignment and setup", total=None, told="")
            yield lambda progress: bars.update(
                task, description=f"{name}: epoch {progress.epoch}/{progress.epochs}",
                completed=progress.step, total=progress.steps, told=figures(progress),
            )  # fmt: skip
    else:
        newest: list[Progress] = []

        def update(progress: "Progress") -> None:
            """Keep what is newest; tell it when its epoch is over."""
            if newest and newest[0].epoch != progress.epoch:
                console.print(_progress_of(newest[0]), highlight=False)
            newest[:] = [progress]

        try:
            yield update
        finally:
            if newest:
                console.print(_progress_of(newest[0]), highlight=False)


@contextmanager
def downloading(*, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show downloads on stderr; yields what `fetch` calls with (file, bytes, bytes in all)."""
    from rich.progress import DownloadColumn

    tasks: dict[str, Any] = {}
    with _bars(DownloadColumn(), quiet=quiet) as bars:

        def update(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)

        yield update


@contextmanager
def counting(name: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a count on stderr, and how long the rest takes if it goes on as the later half did (the
    first may have been there before): a bar, or lines; yields what is called with (done, in all).
    """
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn

    console, times, told = Console(stderr=True), [time.monotonic()], 0.0

    def left(done: int, total: int) -> str:
        times.append(time.monotonic())
        half = (len(times) - 1) // 2
        each = (times[-1] - times[half]) / (len(times) - 1 - half)
        return f"about {math.ceil(each * (total - done) / 60)} min left" if 0 < done < total else ""

    def line(done: int, total: int) -> None:
        nonlocal told
        said = f"{name}: {done} of {total}  {left(done, total)}"
        if times[-1] - told >= _LINE_S or done == total:
            told = times[-1]
            console.print(said.strip(), highlight=False)

    if not quiet and not console.is_terminal:
        yield line
        return
    columns = MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}")
    with _bars(*columns, quiet=quiet) as bars:
        task = bars.add_task(name, total=None, left="")
        yield lambda done, total: bars.update(
            task, completed=done, total=total, left=left(done, total)
        )


def _bars(*columns: "ProgressColumn", quiet: bool = False) -> "Bars":
    """Bars on stderr, with these columns behind; their module is loaded where one is shown."""
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), *columns,
        console=Console(stderr=True), disable=quiet,
    )  # fmt: skip


def figures(progress: "Progress") -> str:
    """Loss, accuracy, epsilon and bytes in a line, where each is known."""
    from secure_apfed.measures import MEASURES

    measure = MEASURES[progress.measure]
    score = progress.accuracy if progress.score is None else progress.score
    accuracy = "" if score is None else f"  {measure.title} {measure.text(score)}"
    spent = "" if progress.promise is None else f"  {progress.promised}"
    loss = "" if progress.loss is None else f"loss {progress.loss:.4f}"
    return f"{loss}{accuracy}{spent}  {progress.wire_bytes / 1e6:.1f} MB sent".strip()


def _progress_of(progress: "Progress") -> str:
    return f"epoch {progress.epoch}/{progress.epochs}  {figures(progress)}"


class Board:
    """What is shown: the parties' states, and how far the active's training is.

    Args:
        source: states of the parties that are played here, read at each drawing.
    """

    def __init__(self, source: "Callable[[], Sequence[Status]]" = tuple) -> None:
        self._source = source
        self._told: dict[str, Status] = {}
        self.progress: Progress | None = None

    @property
    def statuses(self) -> "tuple[Status, ...]":
        own = {status.party: status for status in self._source() if status.party}
        every = {**self._told, **own}
        return tuple(every[name] for name in sorted(every))

    def tell(self, status: "Status") -> None:
        self._told = {**self._told, status.party: status}

    def tell_progress(self, progress: "Progress") -> None:
        self.progress = progress


@contextmanager
def showing(
    board: Board, *, as_json: bool = False, json_events: bool = False,
    console: Console | None = None,
) -> Iterator[Board]:  # fmt: skip
    """Show the board while the block runs, and once more when it ends: not at all with `as_json`,
    as events with `json_events`, else to people.
    """
    console = console or Console(stderr=True)
    if json_events:
        with _ticking(_Events(board).tick):
            yield board
    elif as_json:
        yield board
    elif console.is_terminal:
        drawn = Live(
            console=console, get_renderable=lambda: _panel(board), refresh_per_second=_DRAWN_PER_S
        )
        with drawn:
            yield board
    else:
        with _ticking(_PartyLines(board, console).tick):
            yield board


@contextmanager
def _ticking(tick: Callable[[], None]) -> Iterator[None]:
    """Call `tick` each period from a thread of its own, and once at the end."""
    done = threading.Event()

    def go_on() -> None:
        over = False
        while not over:
            over = done.wait(_PERIOD_S)
            # Whoever read may be gone, or the disk full; the run goes on all the same.
            with contextlib.suppress(OSError, ValueError):
                tick()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def metering(board: Board, path: Path | None) -> Iterator[None]:
    """Keep a file for Prometheus while the block runs, which the node exporter's textfile collector
    reads; none of None. A disk that is full later ends no run.

    Raises:
        OSError: it cannot be written when the block begins.
    """
    if path is None:
        yield
        return

    def tick() -> None:
        write_atomically(path, _exposition(board).encode())

    tick()
    with _ticking(tick):
        yield


def _exposition(board: Board) -> str:
    """The text format of Prometheus, in which no character of a name has to be escaped."""
    lines: dict[str, list[str]] = {}

    def tell(labels: Mapping[str, str], **values: float | None) -> None:
        shown = ",".join(f'{key}="{label}"' for key, label in labels.items())
        for name, value in values.items():
            if value is not None:
                kind = "counter" if name.endswith("_total") else "gauge"
                said = "+Inf" if value == math.inf else f"{value:.15g}"
                first = lines.setdefault(name, [f"# TYPE secure_apfed_{name} {kind}\n"])
                first.append(f"secure_apfed_{name}{{{shown}}} {said}\n")

    for own in board.statuses:
        party = {"party": own.party}
        tell(party, session=own.session, step=own.step)
        tell({**party, "phase": own.phase}, phase=1)
        tell({**party, "figure": own.figure}, epsilon=own.epsilon)  # none where nothing is sent
        for name, peer in own.peers.items():
            tell(
                {**party, "peer": name}, sent_bytes_total=peer.sent_bytes,
                received_bytes_total=peer.received_bytes, peer_last_sign_seconds=peer.sign_s,
            )  # fmt: skip
    if (far := board.progress) is not None:
        tell({}, epochs_done=far.epoch, epochs=far.epochs, steps_done=far.step, steps=far.steps)
    return "".join(line for metric in lines.values() for line in metric)


class _Events:
    """One JSON object a line: `{"progress": {...}}`, and `{"status": {...}}` of each party that
    changed.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._progress: Progress | None = None
        self._last: dict[str, tuple[object, float]] = {}

    def tick(self) -> None:
        progress = self._board.progress
        if progress is not None and progress != self._progress:
            self._progress = progress
            _write({"progress": asdict(progress)})
        for status in self._board.statuses:
            facts = _facts(status), status.sent_bytes, status.received_bytes, status.step
            past, at = self._last.get(status.party, (None, 0.0))
            now = time.monotonic()
            if facts != past or now - at >= _AGAIN_S or status.names("silent"):
                self._last[status.party] = facts, now
                _write({"status": {"at": time.time(), **status.model_dump(mode="python")}})
        sys.stdout.flush()


class _PartyLines:
    """A line of a party whose phase, epoch or peers changed; see `_Events`."""

    def __init__(self, board: Board, console: Console) -> None:
        self._board, self._console = board, console
        self._last: dict[str, tuple[object, float]] = {}
        self._epoch = 0

    def tick(self) -> None:
        progress = self._board.progress
        if progress is not None and progress.epoch != self._epoch:
            self._epoch = progress.epoch
            self._print(_progress_of(progress))
        for status in self._board.statuses:
            past, at = self._last.get(status.party, (None, 0.0))
            now = time.monotonic()
            if _facts(status) != past or now - at >= _AGAIN_S:
                self._last[status.party] = _facts(status), now
                self._print(_line_of(status))

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def _write(event: Mapping[str, Any]) -> None:
    sys.stdout.write(to_json(event) + "\n")


def _facts(status: "Status") -> tuple[object, ...]:
    peers = tuple(tuple(status.names(state)) for state in ("expected", "silent", "left"))
    return status.phase, peers, tuple(peer.refusal for peer in status.peers.values())


def _line_of(status: "Status") -> str:
    at = status.phase if status.step is None else f"{status.phase}, step {status.step}"
    parts = [f"{status.party}: {at}", *_troubles(status)]
    if status.waits:
        parts.append(f"waits for {_waited(status.waits)}")
    return "; ".join([*parts, _counted(status)])


def _troubles(status: "Status") -> list[str]:
    told = []
    for name, peer in status.peers.items():
        if peer.state == "silent" and peer.silent_s is not None:
            told.append(f"{name} silent for {peer.silent_s:.0f} s")
        elif peer.state == "left":
            told.append(f"{name} left")
        elif peer.state == "expected":
            told.append(f"{name} is expected" + (f": {peer.refusal}" if peer.refusal else ""))
        elif status.phase == "connecting":
            told.append(f"{name} is here")
    return told


def _waited(waits: "Waiting") -> str:
    step = "" if waits.step is None or waits.step < 0 else f" of step {waits.step}"
    kinds, senders = " or ".join(waits.kinds), " or ".join(waits.senders)
    return f"{kinds}{step} from {senders}, {waits.since_s:.0f} s of {waits.patience_s:g} s"


def _counted(status: "Status") -> str:
    sent, received = status.sent_bytes / 1e6, status.received_bytes / 1e6
    return f"{status.promised}  {sent:.1f} MB sent  {received:.1f} MB received"


def _panel(board: Board) -> Group:
    """How far the training is, and each party's line, which is drawn anew."""
    progress = [] if board.progress is None else [_progress_of(board.progress)]
    return Group(*map(Text, [*progress, *map(_line_of, board.statuses)]))
