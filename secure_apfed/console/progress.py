"""The display of a run's progress and its parties' states: bars, panels, plain lines, or JSON for
programs.

A terminal shows a line or a panel that is redrawn. A log gets a line a minute for training and
other long work, and a line of a party when something changed that a person would want to know.
`--json-events` prints one JSON object a line on stdout. Nothing about a party is printed more often
than once a second. Each line says how long the rest takes (`secure_apfed.base.working.TimeLeft`). A
name or number that a peer chose is checked before it gets here. No other text of a peer is shown,
except why it refuses this party.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from secure_apfed.base.files import to_json, write_atomically
from secure_apfed.base.peer_text import escape_text
from secure_apfed.base.working import TimeLeft, Work, describe_time_left, observing_work

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn

    from secure_apfed.exchange import Status, Waiting
    from secure_apfed.exchange.status import LinkBreak, Meeting
    from secure_apfed.runs.outcome import Progress

_TICK_S = 1.0
_MAX_EVENT_GAP_S = 30.0  # then an event is written although nothing changed
_REDRAWS_PER_S = 4
_MAX_LINE_GAP_S = 60.0  # then a line is printed although nothing changed
_BAR_WIDTH = 24
_PRESENT_STATES = ("connected", "awaited", "silent")  # states of a connected peer
_UNLINKED_PHASES = ("connecting", "ended", "failed")  # phases without links between parties


@contextmanager
def show_run(
    name: str, *, quiet: bool, console: Console | None = None
) -> Iterator["Callable[[Progress], None]"]:
    """Show the progress of a run in this process while the block runs.

    `name`: name of the run. `quiet`: show nothing. `console`: None: standard error.

    Yields the function that `run` calls with each `Progress`.
    """
    board = Board(name=name)
    with observing_work(board.update_work), show_board(board, as_json=quiet, console=console):
        yield board.update_progress


@contextmanager
def show_work(
    party: str = "", *, as_json: bool, json_events: bool = False, console: Console | None = None
) -> Iterator[None]:
    """Show the progress of long work that the block reports by `report_work`.

    `party`: party that does the work; empty: this process. `as_json`: the command
    prints JSON only, so nothing is shown unless `json_events`, which prints JSON lines. `console`:
    where text is printed; None: standard error.
    """
    board = Board()

    def update_work(work: Work) -> None:
        board.update_work(work, party)

    with (
        observing_work(update_work),
        show_board(board, as_json=as_json, json_events=json_events, console=console),
    ):
        yield


@contextmanager
def show_downloads(*, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show the progress of downloads on stderr while the block runs.

    `quiet`: show nothing. Yields the function that `fetch_dataset` calls with a file's name, the
    bytes so far, and all bytes or None.
    """
    from rich.progress import DownloadColumn

    tasks: dict[str, Any] = {}
    with _make_bars(DownloadColumn(), quiet=quiet) as bars:

        def update_bar(file: str, done: int, total: int | None) -> None:
            """Advance a file's bar; create it at the first call."""
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)

        yield update_bar


@contextmanager
def show_count(
    name: str, *, quiet: bool, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Show a count with the time left on stderr: a bar on a terminal, else a line each minute.

    `name`: name of what is counted. `quiet`: show nothing. `clock`: returns seconds.

    Yields a function that takes how many are done, and how many there are.
    """
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    time_left = TimeLeft(clock)
    printed_at = -math.inf

    def format_time_left(done: int, total: int) -> str:
        time_left.note_progress(done)
        return describe_time_left(time_left.estimate_seconds(total))

    def print_line(done: int, total: int) -> None:
        """Print the count once a minute, and at the end."""
        nonlocal printed_at
        text = f"{name}: {done} of {total}  {format_time_left(done, total)}"
        if clock() - printed_at >= _MAX_LINE_GAP_S or done == total:
            printed_at = clock()
            console.print(text.strip(), highlight=False)

    if not quiet and not console.is_terminal:
        yield print_line
        return
    columns = MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}")
    with _make_bars(*columns, quiet=quiet) as bars:
        task = bars.add_task(name, total=None, left="")
        yield lambda done, total: bars.update(
            task, completed=done, total=total, left=format_time_left(done, total)
        )


def _make_bars(*columns: "ProgressColumn", quiet: bool = False) -> "Bars":
    """Return a display of bars on stderr, with these columns after each; rich is imported here.

    `quiet`: show nothing.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=_BAR_WIDTH),
        *columns,
        console=Console(stderr=True),
        disable=quiet,
    )


def describe_figures(progress: "Progress") -> str:
    """Return loss, accuracy, epsilon and bytes in one line, as far as they are known."""
    from secure_apfed.measures.table import MEASURES

    measure = MEASURES[progress.measure]
    score = progress.accuracy if progress.score is None else progress.score
    loss_text = "" if progress.loss is None else f"loss {progress.loss:.4f}"
    score_text = "" if score is None else f"  {measure.title} {measure.format_value(score)}"
    epsilon_text = "" if progress.promise is None else f"  {progress.promise_text}"
    sent_text = f"  {progress.wire_bytes / 1e6:.1f} MB sent"
    return f"{loss_text}{score_text}{epsilon_text}{sent_text}".strip()


def _format_progress(progress: "Progress") -> str:
    return f"epoch {progress.epoch}/{progress.epochs}  {describe_figures(progress)}"


class Board:
    """The displayed facts: the parties' states, the progress of the active's training, and other
    long work.
    """

    def __init__(
        self,
        source: "Callable[[], Sequence[Status]]" = tuple,
        *,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a board without progress.

        Args:
            source: returns the states of this process's parties; it is called for each display.
            name: name of the run, shown before its epochs.
            clock: returns seconds.
        """
        self._source = source
        self._name = name
        self._clock = clock
        self._reported: dict[str, Status] = {}
        self.progress: Progress | None = None
        self._training = TimeLeft(clock)
        self._work: dict[tuple[str, str], tuple[Work, TimeLeft]] = {}

    @property
    def statuses(self) -> "tuple[Status, ...]":
        """The latest status of every party, in the order of names."""
        own_statuses = {status.party: status for status in self._source() if status.party}
        statuses = {**self._reported, **own_statuses}
        return tuple(statuses[name] for name in sorted(statuses))

    def update_status(self, status: "Status") -> None:
        """Set the status of a party of another process."""
        self._reported = {**self._reported, status.party: status}

    def update_progress(self, progress: "Progress") -> None:
        """Set the training's progress, from which the time left is estimated."""
        if self.progress is None:  # the time before the first step is not part of any step
            self._training = TimeLeft(self._clock)
        self._training.note_progress(progress.step)
        self.progress = progress

    def update_work(self, work: Work, party: str = "") -> None:
        """Set how much of a party's long work is done; finished work is no longer shown.

        `party`: empty: this process.
        """
        key = (party, work.name)
        works = dict(self._work)
        previous = works.pop(key, None)
        if not work.is_over:
            time_left = TimeLeft(self._clock) if previous is None else previous[1]
            time_left.note_progress(work.done)
            works[key] = work, time_left
        self._work = works  # replaced as a whole, since another thread reads it

    def drop_work(self) -> None:
        """Drop work that an ended session left unfinished."""
        self._work = {}

    @property
    def works(self) -> "tuple[WorkLeft, ...]":
        """All long work in progress, with the estimated time left."""
        return tuple(
            WorkLeft(work=work, party=party, seconds_left=time_left.estimate_seconds(work.total))
            for (party, _), (work, time_left) in self._work.items()
        )

    @property
    def training_seconds_left(self) -> float | None:
        """The estimated seconds until all epochs are done; None: too early to estimate."""
        return (
            None if self.progress is None else self._training.estimate_seconds(self.progress.steps)
        )

    @property
    def progress_line(self) -> str:
        """Epoch, metrics and time left, in one line; "" before training."""
        if self.progress is None:
            return ""
        time_left = describe_time_left(self.training_seconds_left)
        name = f"{self._name}: " if self._name else ""
        return f"{name}{_format_progress(self.progress)}  {time_left}".rstrip()


@dataclass(frozen=True, kw_only=True)
class WorkLeft:
    """The long work of a party, with the time left.

    Attributes:
        party: empty: this process.
        seconds_left: estimated; None: too early to estimate.
    """

    work: Work
    party: str
    seconds_left: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the work as a JSON event."""
        return {"party": self.party, **asdict(self.work), "seconds_left": self.seconds_left}

    @property
    def line(self) -> str:
        """The work as a line of text."""
        work = self.work
        count = "" if work.total == 1 else f"{work.done:,} of {work.total:,}"
        current = f"now {work.part}" if work.part and count else work.part
        facts = ", ".join(filter(None, (count, current, describe_time_left(self.seconds_left))))
        name = f"{self.party}: {work.name}" if self.party else work.name
        return f"{name}: {facts}" if facts else name


@contextmanager
def show_board(
    board: Board,
    *,
    as_json: bool = False,
    json_events: bool = False,
    console: Console | None = None,
) -> Iterator[Board]:
    """Show a board while the block runs, and once more when it ends.

    Args:
        board: what is shown.
        as_json: the command prints JSON only, so nothing is shown unless `json_events`.
        json_events: print JSON lines on stdout instead of text.
        console: where text is printed; None: standard error.
    """
    console = console or Console(stderr=True)
    if json_events:
        events = _Events(board)
        with _tick_periodically(events.tick):
            yield board
    elif as_json:
        yield board
    elif console.is_terminal:
        live = Live(
            console=console,
            get_renderable=lambda: _render_board(board),
            refresh_per_second=_REDRAWS_PER_S,
        )
        with live:
            yield board
    else:
        lines = _Lines(board, console)
        try:
            with _tick_periodically(lines.tick):
                yield board
        finally:
            lines.print_last()


@contextmanager
def _tick_periodically(tick: Callable[[], None]) -> Iterator[None]:
    """Call `tick` every `_TICK_S` seconds from another thread while the block runs, and once more
    when it ends.
    """
    has_ended = threading.Event()

    def tick_until_end() -> None:
        """Call `tick` periodically until the block has ended; ignore errors of the output."""
        is_last = False
        while not is_last:
            is_last = has_ended.wait(_TICK_S)
            # The reader may be gone, or the disk full; the run continues anyway.
            with contextlib.suppress(OSError, ValueError):
                tick()

    thread = threading.Thread(target=tick_until_end, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@contextmanager
def write_metrics(board: Board, path: Path | None) -> Iterator[None]:
    """Write a metrics file for Prometheus while the block runs, for the node exporter's textfile
    collector.

    `path`: path of the file; None: none is written.

    Raises OSError: the file cannot be written when the block begins. Later errors, such as a full
    disk, do not end the run.
    """
    if path is None:
        yield
        return

    def write_file() -> None:
        write_atomically(path, _format_metrics(board).encode())

    write_file()
    with _tick_periodically(write_file):
        yield


def _format_metrics(board: Board) -> str:
    """Return the board's metrics in Prometheus' text format, where names of parties need no
    escaping.
    """
    lines_by_metric: dict[str, list[str]] = {}

    def add_samples(labels: Mapping[str, str], **values: float | None) -> None:
        """Add one line for each value, by name of the metric, with these labels; None: no line."""
        label_text = ",".join(f'{key}="{label}"' for key, label in labels.items())
        for name, value in values.items():
            if value is not None:
                kind = "counter" if name.endswith("_total") else "gauge"
                value_text = "+Inf" if value == math.inf else f"{value:.15g}"
                lines = lines_by_metric.setdefault(name, [f"# TYPE secure_apfed_{name} {kind}\n"])
                lines.append(f"secure_apfed_{name}{{{label_text}}} {value_text}\n")

    for status in board.statuses:
        party = {"party": status.party}
        add_samples(party, session=status.session, step=status.step)
        add_samples({**party, "phase": status.phase}, phase=1)
        # The epsilon is None if nothing is sent.
        add_samples({**party, "figure": status.figure}, epsilon=status.epsilon)
        for name, peer in status.peers.items():
            add_samples(
                {**party, "peer": name},
                sent_bytes_total=peer.sent_bytes,
                received_bytes_total=peer.received_bytes,
                peer_last_sign_seconds=peer.sign_s,
            )
    progress = board.progress
    if progress is not None:
        add_samples(
            {},
            epochs_done=progress.epoch,
            epochs=progress.epochs,
            steps_done=progress.step,
            steps=progress.steps,
        )
    return "".join(line for lines in lines_by_metric.values() for line in lines)


class _Events:
    """A writer of events to stdout, one JSON object a line.

    These are `{"progress": {...}}`, `{"work": {...}}`, and `{"status": {...}}` of each party whose
    state changed.
    """

    def __init__(self, board: Board) -> None:
        """Start with nothing written."""
        self._board = board
        self._progress: Progress | None = None
        self._works: dict[tuple[str, str], Work] = {}
        self._last: dict[str, tuple[object, float]] = {}

    def tick(self) -> None:
        """Write an event for everything that changed since the last call."""
        self._write_progress()
        self._write_works()
        for status in self._board.statuses:
            self._write_status(status)
        sys.stdout.flush()

    def _write_progress(self) -> None:
        """Write the training's progress if it changed."""
        progress = self._board.progress
        if progress is not None and progress != self._progress:
            self._progress = progress
            seconds_left = self._board.training_seconds_left
            _write_event({"progress": {**asdict(progress), "seconds_left": seconds_left}})

    def _write_works(self) -> None:
        """Write long work that changed, and work that ended as done."""
        works = {(work.party, work.work.name): work for work in self._board.works}
        for key, work_left in works.items():
            if self._works.get(key) != work_left.work:
                _write_event({"work": work_left.as_json()})
        for key in self._works.keys() - works.keys():
            party, _ = key
            ended = replace(self._works[key], done=self._works[key].total)
            _write_event({"work": WorkLeft(work=ended, party=party, seconds_left=0.0).as_json()})
        self._works = {key: work_left.work for key, work_left in works.items()}

    def _write_status(self, status: "Status") -> None:
        """Write a party's status if it changed, a peer is silent, or the last event is old."""
        counts = status.sent_bytes, status.received_bytes, status.step
        facts = _list_visible_facts(status), _list_broken_links(status), *counts
        previous_facts, written_at = self._last.get(status.party, (None, 0.0))
        now = time.monotonic()
        is_old = now - written_at >= _MAX_EVENT_GAP_S
        if facts != previous_facts or is_old or status.list_peers("silent"):
            self._last[status.party] = facts, now
            _write_event({"status": {"at": time.time(), **status.model_dump(mode="python")}})


class _Lines:
    """A printer of lines for a log, where output is no terminal.

    A party gets a line when its phase or its peers' states change. Each party, the training and
    each long work also get a line every minute.
    """

    def __init__(
        self, board: Board, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with nothing printed; `clock` returns seconds."""
        self._board = board
        self._console = console
        self._clock = clock
        self._last: dict[object, tuple[object, float]] = {}  # facts and time of each key's line
        self._progress: Progress | None = None
        # By party and peer: the time when a link broke that is still broken.
        self._break_times: dict[str, dict[str, float]] = {}

    def tick(self) -> None:
        """Print a line for everything that changed, or whose last line is a minute old."""
        if self._board.progress is not None and self._is_due("epoch", None):
            self._print_progress()
        works = self._board.works
        for work_left in works:
            if self._is_due((work_left.party, work_left.work.name), None):
                self._print_text(work_left.line)
        self._forget_finished({(work_left.party, work_left.work.name) for work_left in works})
        for status in self._board.statuses:
            self._print_breaks(status)
            if self._is_due(status.party, _list_visible_facts(status)):
                self._print_text(_format_status_line(status))

    def print_last(self) -> None:
        """Print the latest progress, unless a line showed it."""
        with contextlib.suppress(OSError, ValueError):
            if self._board.progress != self._progress:
                self._print_progress()

    def _print_breaks(self, status: "Status") -> None:
        """Print a line for each link of a party that broke since the last call, or was restored."""
        now = self._clock()
        previous_break_times = self._break_times.get(status.party, {})
        break_times = dict[str, float]()
        for name, peer in status.peers.items():
            link = f"{status.party}: the link to {name} is"
            was_broken = name in previous_break_times
            is_restored = peer.state in _PRESENT_STATES and status.phase not in _UNLINKED_PHASES
            if peer.broken is not None:
                broke_at = now - peer.broken.since_s  # since_s is an age in seconds
                break_times[name] = previous_break_times.get(name, broke_at)
                if not was_broken:
                    self._print_text(
                        f"{link} {_describe_break(peer.broken)}; nothing to do: it is connected "
                        f"again by itself; waits {peer.broken.patience_s:g} s, then {name} has left"
                    )
            elif was_broken and is_restored:
                self._print_text(f"{link} back, after {now - previous_break_times[name]:.0f} s")
        self._break_times[status.party] = break_times

    def _is_due(self, key: object, facts: object) -> bool:
        """Return whether a line is due, and note it as printed: its facts changed, or a minute has
        passed since the last one.

        `key`: what identifies the line: a party, or party and name of a work. `facts`: what it
        shows.
        """
        now = self._clock()
        previous = self._last.get(key)
        if previous is not None:
            previous_facts, printed_at = previous
            if facts == previous_facts and now - printed_at < _MAX_LINE_GAP_S:
                return False
        self._last[key] = facts, now
        return True

    def _forget_finished(self, works: "set[tuple[str, str]]") -> None:
        """Forget lines of finished work, so that it gets a line at once if it restarts.

        `works`: party and name of all work in progress.
        """
        for key in [*self._last]:
            if isinstance(key, tuple) and key not in works:
                del self._last[key]

    def _print_progress(self) -> None:
        self._progress = self._board.progress
        self._print_text(self._board.progress_line)

    def _print_text(self, text: str) -> None:
        self._console.print(Text(escape_text(text)), soft_wrap=True)


def _write_event(event: Mapping[str, Any]) -> None:
    sys.stdout.write(to_json(event) + "\n")


def _list_broken_links(status: "Status") -> tuple[str, ...]:
    """Return the peers to which a party's link is broken."""
    return tuple(name for name, peer in status.peers.items() if peer.broken is not None)


def _describe_break(broken: "LinkBreak") -> str:
    """Return in words for how long a link has been broken, and why."""
    cause = f" ({broken.why})" if broken.why else ""
    return f"broken since {broken.since_s:.0f} s{cause}"


def _list_visible_facts(status: "Status") -> tuple[object, ...]:
    """Return the facts about a party whose change gets a line: phase, missing peers, refusals."""
    peers = tuple(tuple(status.list_peers(state)) for state in ("expected", "silent", "left"))
    return status.phase, peers, tuple(peer.refusal for peer in status.peers.values())


def _format_status_line(status: "Status") -> str:
    """Return one line on a party: phase, troubles of peers, what it waits for, epsilon, bytes."""
    phase = status.phase if status.step is None else f"{status.phase}, step {status.step}"
    parts = [f"{status.party}: {phase}", *_list_troubles(status)]
    if status.meets:
        parts.append(_describe_meeting(status, status.meets))
    if status.waits:
        parts.append(f"waits for {_describe_wait(status.waits)}")
    return "; ".join([*parts, _describe_counts(status)])


def _describe_meeting(status: "Status", meets: "Meeting") -> str:
    """Return in words which peers a party waits for before a session, for how long already, and how
    many parties are connected.

    `meets`: times of the waiting, in seconds.
    """
    missing = " and ".join(status.list_peers("expected"))
    parties = len(status.peers) + 1
    present = parties - len(status.list_peers("expected"))
    return (
        f"waits for {missing} since {meets.since_s:.0f} s, gives up after {meets.patience_s:g} s; "
        f"{present} of {parties} parties are here"
    )


def _list_troubles(status: "Status") -> list[str]:
    """Return in words each trouble with a peer: a broken link, silence, leaving, absence or a
    refusal.
    """
    troubles = []
    names_by_refusal = dict[str, list[str]]()
    for name, peer in status.peers.items():
        if peer.broken is not None:
            troubles.append(f"the link to {name} is {_describe_break(peer.broken)}")
        if peer.state == "silent" and peer.silent_s is not None:
            troubles.append(f"{name} silent for {peer.silent_s:.0f} s")
        elif peer.state == "left":
            troubles.append(f"{name} left")
        elif peer.state == "expected":
            if peer.refusal:
                names_by_refusal.setdefault(peer.refusal, []).append(name)
            elif status.meets is None:
                troubles.append(f"{name} is expected")
    for refusal, names in names_by_refusal.items():
        verb = "is" if len(names) == 1 else "are"
        troubles.append(f"{' and '.join(names)} {verb} expected: {refusal}")
    return troubles


def _describe_wait(waits: "Waiting") -> str:
    """Return in words which message a party waits for, for how long already, and for how long at
    most.
    """
    step = "" if waits.step is None or waits.step < 0 else f" of step {waits.step}"
    kinds = " or ".join(waits.kinds)
    senders = " or ".join(waits.senders)
    return (
        f"{kinds}{step} from {senders} since {waits.since_s:.0f} s, gives up after "
        f"{waits.patience_s:g} s"
    )


def _describe_counts(status: "Status") -> str:
    """Return the epsilon of what a party sent, and its bytes, in words."""
    sent = status.sent_bytes / 1e6
    received = status.received_bytes / 1e6
    return f"{status.promise_text}  {sent:.1f} MB sent  {received:.1f} MB received"


def _render_board(board: Board) -> Group:
    """Return what a terminal shows: the training's bar, other work, and a line for each party."""
    return Group(
        *_render_training(board),
        *(Text(escape_text(work_left.line)) for work_left in board.works),
        *(Text(escape_text(_format_status_line(status))) for status in board.statuses),
    )


def _render_training(board: Board) -> "Sequence[RenderableType]":
    """Return a row with a bar of all steps, epoch, metrics and time left; empty before training."""
    progress = board.progress
    if progress is None:
        return ()
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = ProgressBar(total=max(progress.steps, 1), completed=progress.step, width=_BAR_WIDTH)
    row = Table.grid(padding=(0, 1))
    row.add_row(bar, Text(board.progress_line))
    return (row,)
