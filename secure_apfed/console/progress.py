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
from functools import partial
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

_TICK_INTERVAL_S = 1.0
_MAX_EVENT_GAP_S = 30.0  # then an event is written although nothing changed
_REDRAWS_PER_S = 4
_MAX_LINE_GAP_S = 60.0  # then a line is printed although nothing changed
_BAR_WIDTH = 24
_CONNECTED_PEER_STATES = ("connected", "awaited", "silent")  # states of a connected peer
_PHASES_WITHOUT_LINKS = ("connecting", "ended", "failed")  # phases without links between parties


@contextmanager
def show_run(
    name: str, *, quiet: bool, console: Console | None = None
) -> Iterator["Callable[[Progress], None]"]:
    """Show the progress of a run in this process during the `with` block.

    Yields the function that the run calls with each `Progress`.

    `name`: name of the run. `quiet`: whether nothing is shown. `console`: where it is shown; None:
    standard error.
    """
    board = Board(name=name)
    # For output as JSON a board is not shown.
    with observing_work(board.update_work), show_board(board, as_json=quiet, console=console):
        yield board.update_progress


@contextmanager
def show_work(
    party: str = "", *, as_json: bool, json_events: bool = False, console: Console | None = None
) -> Iterator[None]:
    """Show the progress of long work that the `with` block reports by `report_work`.

    Args:
        party: party that does the work; "": this process.
        as_json: whether the command prints JSON only; then no text is shown.
        json_events: whether progress is printed as JSON lines on stdout instead of text.
        console: where text is printed; None: standard error.
    """
    board = Board()

    def update_work(work: Work) -> None:
        """Show how much of the work is done."""
        board.update_work(work, party)

    with (
        observing_work(update_work),
        show_board(board, as_json=as_json, json_events=json_events, console=console),
    ):
        yield


@contextmanager
def show_downloads(*, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show the progress of downloads on stderr during the `with` block.

    Yields a function to be called with a file's name, its bytes so far, and its total bytes (None:
    not known).

    `quiet`: whether nothing is shown.
    """
    from rich.progress import DownloadColumn

    task_by_file: dict[str, Any] = {}
    with _make_bars(DownloadColumn(), quiet=quiet) as bars:

        def update_bar(file: str, done: int, total: int | None) -> None:
            """Advance a file's bar; create it at the first call."""
            if file not in task_by_file:
                task_by_file[file] = bars.add_task(file, total=total)
            bars.update(task_by_file[file], completed=done, total=total)

        yield update_bar


@contextmanager
def show_count(
    name: str, *, quiet: bool, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Show how many of some items are done, and the time left, on stderr.

    On a terminal it is a bar, else a line each minute. Yields a function to be called with the
    number of items that are done, and with the number of all.

    `name`: name of what is counted. `quiet`: whether nothing is shown. `clock`: returns the time in
    seconds.
    """
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    time_left = TimeLeft(clock)
    last_print_time = -math.inf

    def format_time_left(done: int, total: int) -> str:
        """Return the estimated time left in words, after this many items of the total."""
        time_left.note_progress(done)
        return describe_time_left(time_left.estimate_seconds(total))

    def print_line(done: int, total: int) -> None:
        """Print the count once a minute, and at the end."""
        nonlocal last_print_time
        text = f"{name}: {done} of {total}  {format_time_left(done, total)}"
        if clock() - last_print_time >= _MAX_LINE_GAP_S or done == total:
            last_print_time = clock()
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
    """Return a display of progress bars on stderr, with these columns after each bar.

    `quiet`: whether nothing is shown.
    """
    # Imported late, since commands without a bar should start quickly.
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=_BAR_WIDTH),
        *columns,
        console=Console(stderr=True),
        disable=quiet,
    )


def describe_figures(progress: "Progress") -> str:
    """Return loss, measure (such as accuracy), epsilon and sent bytes in one line.

    Values that are not known are left out.
    """
    from secure_apfed.measures.table import MEASURES

    measure = MEASURES[progress.measure]
    score = progress.accuracy if progress.score is None else progress.score
    loss_text = "" if progress.loss is None else f"loss {progress.loss:.4f}"
    score_text = "" if score is None else f"  {measure.title} {measure.format_value(score)}"
    epsilon_text = "" if progress.promise is None else f"  {progress.promise_text}"
    sent_text = f"  {progress.wire_bytes / 1e6:.1f} MB sent"
    return f"{loss_text}{score_text}{epsilon_text}{sent_text}".strip()


def _format_progress(progress: "Progress") -> str:
    """Return the training's epoch, and its loss, measure, epsilon and bytes, in one line."""
    return f"epoch {progress.epoch}/{progress.epochs}  {describe_figures(progress)}"


class Board:
    """The facts that a display shows: states of parties, progress of training, and other long work.

    Attributes:
        progress: the progress of the active's training; None before its first step.
    """

    def __init__(
        self,
        get_own_statuses: "Callable[[], Sequence[Status]]" = tuple,
        *,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a board without progress.

        Args:
            get_own_statuses: returns the states of the parties in this process; called for each
                display.
            name: name of the run, shown before its epochs.
            clock: returns the time in seconds.
        """
        self._get_own_statuses = get_own_statuses
        self._run_name = name
        self._clock = clock
        # By party in another process: its last status.
        self._status_by_remote_party: dict[str, Status] = {}
        self.progress: Progress | None = None
        self._training_time = TimeLeft(clock)
        # By party and name of the work: how much is done, and the estimate of the time left.
        self._work_and_time_left_by_key: dict[tuple[str, str], tuple[Work, TimeLeft]] = {}

    @property
    def statuses(self) -> "tuple[Status, ...]":
        """The latest status of every party, in the order of names."""
        own_statuses = {status.party: status for status in self._get_own_statuses() if status.party}
        statuses = {**self._status_by_remote_party, **own_statuses}
        return tuple(statuses[name] for name in sorted(statuses))

    def update_status(self, status: "Status") -> None:
        """Set the status of a party that runs in another process."""
        self._status_by_remote_party = {**self._status_by_remote_party, status.party: status}

    def update_progress(self, progress: "Progress") -> None:
        """Set the training's progress, from which the time left is estimated."""
        if self.progress is None:  # the time before the first step is not part of any step
            self._training_time = TimeLeft(self._clock)
        self._training_time.note_progress(progress.step)
        self.progress = progress

    def update_work(self, work: Work, party: str = "") -> None:
        """Set how much of a party's long work is done; finished work is no longer shown.

        `party`: name of the party; "": this process.
        """
        key = (party, work.name)
        work_and_time_left_by_key = dict(self._work_and_time_left_by_key)
        previous = work_and_time_left_by_key.pop(key, None)
        if not work.is_over:
            if previous is None:
                time_left = TimeLeft(self._clock)
            else:
                _, time_left = previous
            time_left.note_progress(work.done)
            work_and_time_left_by_key[key] = work, time_left
        # Replaced as a whole, since another thread reads it.
        self._work_and_time_left_by_key = work_and_time_left_by_key

    def drop_work(self) -> None:
        """Drop all work in progress, which an ended session has left unfinished."""
        self._work_and_time_left_by_key = {}

    @property
    def works(self) -> "tuple[WorkProgress, ...]":
        """All long work in progress, with the estimated time left."""
        return tuple(
            WorkProgress(
                work=work, party=party, seconds_left=time_left.estimate_seconds(work.total)
            )
            for (party, _), (work, time_left) in self._work_and_time_left_by_key.items()
        )

    @property
    def training_seconds_left(self) -> float | None:
        """The estimated seconds until all epochs are done; None: too early to estimate."""
        if self.progress is None:
            return None
        return self._training_time.estimate_seconds(self.progress.steps)

    @property
    def progress_line(self) -> str:
        """The training's epoch, metrics and time left in one line; "" before training."""
        if self.progress is None:
            return ""
        time_left = describe_time_left(self.training_seconds_left)
        name = f"{self._run_name}: " if self._run_name else ""
        return f"{name}{_format_progress(self.progress)}  {time_left}".rstrip()


@dataclass(frozen=True, kw_only=True)
class WorkProgress:
    """Long work of a party, and the time left.

    Attributes:
        work: name of the work, and how much of it is done.
        party: name of the party; "": this process.
        seconds_left: the estimated time left; None: too early to estimate.
    """

    work: Work
    party: str
    seconds_left: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the work as the content of a JSON event."""
        return {"party": self.party, **asdict(self.work), "seconds_left": self.seconds_left}

    @property
    def line(self) -> str:
        """The work in one line: its name, how much is done, the current part, and the time left."""
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
    """Show the facts of a board during the `with` block, and once more at its end.

    A terminal shows text that is redrawn; a log gets lines when something has changed.

    Args:
        board: the facts.
        as_json: whether the command prints JSON only; then no text is shown.
        json_events: whether facts are printed as JSON lines on stdout instead of text.
        console: where text is printed; None: standard error.
    """
    console = console or Console(stderr=True)
    if json_events:
        events = _EventWriter(board)
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
        lines = _LinePrinter(board, console)
        try:
            with _tick_periodically(lines.tick):
                yield board
        finally:
            lines.print_last()


@contextmanager
def _tick_periodically(tick: Callable[[], None]) -> Iterator[None]:
    """Call `tick` once a second in another thread during the `with` block, and once at its end.

    Errors of output, such as a full disk, are ignored.
    """
    has_ended = threading.Event()

    def tick_until_end() -> None:
        """Call `tick` periodically until the block has ended, and once after that."""
        is_last = False
        while not is_last:
            is_last = has_ended.wait(_TICK_INTERVAL_S)
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
    """Write a file of metrics for Prometheus once a second during the `with` block.

    The textfile collector of Prometheus' node exporter reads such files.

    `path`: path of the file; None: no file is written.

    Raises OSError: the file cannot be written when the block begins. Later errors, such as a full
    disk, do not end the run.
    """
    if path is None:
        yield
        return

    def write_file() -> None:
        """Write the present metrics."""
        write_atomically(path, _format_metrics(board).encode())

    write_file()
    with _tick_periodically(write_file):
        yield


def _format_metrics(board: Board) -> str:
    """Return the facts of a board as metrics in Prometheus' text format.

    Names of parties have no characters that need escaping there.
    """
    lines_by_metric: dict[str, list[str]] = {}
    add_samples = partial(_add_metric_samples, lines_by_metric)
    for status in board.statuses:
        party_label = {"party": status.party}
        add_samples(party_label, session=status.session, step=status.step)
        # The phase is a label, so the metric's value says nothing.
        add_samples({**party_label, "phase": status.phase}, phase=1)
        # The epsilon is None, so that it gets no line, if nothing is sent.
        add_samples({**party_label, "figure": status.figure}, epsilon=status.epsilon)
        for name, peer in status.peers.items():
            add_samples(
                {**party_label, "peer": name},
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


def _add_metric_samples(
    lines_by_metric: dict[str, list[str]], labels: Mapping[str, str], **values: float | None
) -> None:
    """Add one line in Prometheus' text format for each value that is not None.

    Args:
        lines_by_metric: lines by the metric's name; a metric's first line, its type, is added too.
        labels: the labels of all these values, such as the party.
        **values: values by the metric's name.
    """
    label_text = ",".join(f'{key}="{label}"' for key, label in labels.items())
    for name, value in values.items():
        if value is not None:
            metric_type = "counter" if name.endswith("_total") else "gauge"
            value_text = "+Inf" if value == math.inf else f"{value:.15g}"
            type_line = f"# TYPE secure_apfed_{name} {metric_type}\n"
            lines = lines_by_metric.setdefault(name, [type_line])
            lines.append(f"secure_apfed_{name}{{{label_text}}} {value_text}\n")


class _EventWriter:
    """A writer of a board's facts to stdout, as one JSON object in each line.

    The objects are `{"progress": {...}}`, `{"work": {...}}`, and `{"status": {...}}` of each party
    whose state changed.
    """

    def __init__(self, board: Board) -> None:
        """Start with nothing written; `board`: the facts."""
        self._board = board
        self._written_progress: Progress | None = None  # as it was written last
        # By party and name, as written last.
        self._written_work_by_key: dict[tuple[str, str], Work] = {}
        # By party: the facts of its last event, and when it was written, on the monotonic clock.
        self._last_event_by_party: dict[str, tuple[object, float]] = {}

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
        if progress is not None and progress != self._written_progress:
            self._written_progress = progress
            seconds_left = self._board.training_seconds_left
            _write_event({"progress": {**asdict(progress), "seconds_left": seconds_left}})

    def _write_works(self) -> None:
        """Write long work that changed; work that is no longer in progress is written as done."""
        work_progress_by_key = {
            (work_left.party, work_left.work.name): work_left for work_left in self._board.works
        }
        for key, work_left in work_progress_by_key.items():
            if self._written_work_by_key.get(key) != work_left.work:
                _write_event({"work": work_left.as_json()})
        for key in self._written_work_by_key.keys() - work_progress_by_key.keys():
            party, _ = key
            finished_work = replace(
                self._written_work_by_key[key], done=self._written_work_by_key[key].total
            )
            finished = WorkProgress(work=finished_work, party=party, seconds_left=0.0)
            _write_event({"work": finished.as_json()})
        self._written_work_by_key = {
            key: work_left.work for key, work_left in work_progress_by_key.items()
        }

    def _write_status(self, status: "Status") -> None:
        """Write a party's status if it changed, if a peer is silent, or if the last event is old.

        While a peer is silent, every call writes an event, since the silence grows.
        """
        counts = status.sent_bytes, status.received_bytes, status.step
        shown_values = _list_shown_values(status), _list_broken_links(status), *counts
        previous_values, written_at = self._last_event_by_party.get(status.party, (None, 0.0))
        now = time.monotonic()
        is_old = now - written_at >= _MAX_EVENT_GAP_S
        if shown_values != previous_values or is_old or status.list_peers("silent"):
            self._last_event_by_party[status.party] = shown_values, now
            _write_event({"status": {"at": time.time(), **status.model_dump(mode="python")}})


class _LinePrinter:
    """A printer of a board's facts as lines, for a log, where the output is no terminal.

    A party gets a line when its phase or its peers' states change. Each party, the training and
    each long work also get a line every minute.
    """

    def __init__(
        self, board: Board, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with nothing printed.

        `board`: the facts. `console`: where lines are printed. `clock`: returns the time in
        seconds.
        """
        self._board = board
        self._console = console
        self._clock = clock
        # By what a line is about (see `_is_due`): the facts and the time of its last line.
        self._last_line_by_subject: dict[object, tuple[object, float]] = {}
        self._printed_progress: Progress | None = None  # as it was printed last
        # By party and peer: the time when a link broke that is still broken.
        self._break_times_by_party: dict[str, dict[str, float]] = {}

    def tick(self) -> None:
        """Print a line for everything that changed, or whose last line is a minute old.

        Training and long work change all the time, so they get a line each minute only.
        """
        if self._board.progress is not None and self._is_due("epoch", shown_values=None):
            self._print_progress()
        works = self._board.works
        for work_left in works:
            if self._is_due((work_left.party, work_left.work.name), shown_values=None):
                self._print_text(work_left.line)
        self._forget_finished({(work_left.party, work_left.work.name) for work_left in works})
        for status in self._board.statuses:
            self._print_breaks(status)
            if self._is_due(status.party, _list_shown_values(status)):
                self._print_text(_format_status_line(status))

    def print_last(self) -> None:
        """Print the latest progress of the training, unless it was printed before."""
        with contextlib.suppress(OSError, ValueError):
            if self._board.progress != self._printed_progress:
                self._print_progress()

    def _print_breaks(self, status: "Status") -> None:
        """Print a line for each link of a party that broke or was restored since the last call."""
        now = self._clock()
        previous_break_time_by_peer = self._break_times_by_party.get(status.party, {})
        break_time_by_peer = dict[str, float]()
        for name, peer in status.peers.items():
            link_text = f"{status.party}: the link to {name} is"
            was_broken = name in previous_break_time_by_peer
            is_restored = (
                peer.state in _CONNECTED_PEER_STATES and status.phase not in _PHASES_WITHOUT_LINKS
            )
            if peer.broken is not None:
                broke_at = now - peer.broken.since_s  # since_s is an age in seconds
                break_time_by_peer[name] = previous_break_time_by_peer.get(name, broke_at)
                if not was_broken:
                    self._print_text(
                        f"{link_text} {_describe_break(peer.broken)}; nothing to do: it is "
                        f"connected again by itself; waits {peer.broken.patience_s:g} s, then "
                        f"{name} has left"
                    )
            elif was_broken and is_restored:
                self._print_text(
                    f"{link_text} back, after {now - previous_break_time_by_peer[name]:.0f} s"
                )
        self._break_times_by_party[status.party] = break_time_by_peer

    def _is_due(self, subject: object, shown_values: object) -> bool:
        """Return whether a line is due; if so, record it as printed now.

        It is due if its facts have changed, or if its last line is a minute old.

        `subject`: what the line is about: a party, or a party and the name of its work.
        `shown_values`: the facts that the line shows; None: it is due by time alone.
        """
        now = self._clock()
        previous_line = self._last_line_by_subject.get(subject)
        if previous_line is not None:
            previous_values, printed_at = previous_line
            if shown_values == previous_values and now - printed_at < _MAX_LINE_GAP_S:
                return False
        self._last_line_by_subject[subject] = shown_values, now
        return True

    def _forget_finished(self, works: "set[tuple[str, str]]") -> None:
        """Forget the lines of finished work, so that it gets a line at once if it restarts.

        `works`: party and name of all work in progress.
        """
        for key in [*self._last_line_by_subject]:
            if isinstance(key, tuple) and key not in works:
                del self._last_line_by_subject[key]

    def _print_progress(self) -> None:
        """Print a line with the training's progress."""
        self._printed_progress = self._board.progress
        self._print_text(self._board.progress_line)

    def _print_text(self, text: str) -> None:
        """Print a line without wrapping it; control characters are escaped."""
        self._console.print(Text(escape_text(text)), soft_wrap=True)


def _write_event(event: Mapping[str, Any]) -> None:
    """Write one JSON object to stdout as a line."""
    sys.stdout.write(to_json(event) + "\n")


def _list_broken_links(status: "Status") -> tuple[str, ...]:
    """Return the names of the peers to which a party's link is broken."""
    return tuple(name for name, peer in status.peers.items() if peer.broken is not None)


def _describe_break(broken: "LinkBreak") -> str:
    """Return in words for how long a link has been broken, and why."""
    cause = f" ({broken.why})" if broken.why else ""
    return f"broken since {broken.since_s:.0f} s{cause}"


def _list_shown_values(status: "Status") -> tuple[object, ...]:
    """Return the facts about a party after whose change a log gets a line at once.

    They are its phase, the peers that are missing, silent or gone, and the reasons for missing.
    """
    peers = tuple(tuple(status.list_peers(state)) for state in ("expected", "silent", "left"))
    return status.phase, peers, tuple(peer.refusal for peer in status.peers.values())


def _format_status_line(status: "Status") -> str:
    """Return a party's state in one line: phase, troubles, what it waits for, epsilon and bytes."""
    phase = status.phase if status.step is None else f"{status.phase}, step {status.step}"
    parts = [f"{status.party}: {phase}", *_list_troubles(status)]
    if status.meets:
        parts.append(_describe_meeting(status, status.meets))
    if status.waits:
        parts.append(f"waits for {_describe_wait(status.waits)}")
    return "; ".join([*parts, _describe_counts(status)])


def _describe_meeting(status: "Status", meeting: "Meeting") -> str:
    """Return in words how a party waits for its peers to connect before a session.

    It names the missing peers, how long the party has waited and will wait, and how many parties
    are connected.

    `meeting`: these times, in seconds.
    """
    missing_names = " and ".join(status.list_peers("expected"))
    party_count = len(status.peers) + 1
    present_count = party_count - len(status.list_peers("expected"))
    return (
        f"waits for {missing_names} since {meeting.since_s:.0f} s, gives up after "
        f"{meeting.patience_s:g} s; {present_count} of {party_count} parties are here"
    )


def _list_troubles(status: "Status") -> list[str]:
    """Return a party's troubles with its peers, each in words.

    A trouble is a broken link, a peer that is silent, has left or has not connected, or a refusal.
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


def _describe_wait(waiting: "Waiting") -> str:
    """Return in words which message a party waits for, and for how long: so far, and at most."""
    step = "" if waiting.step is None or waiting.step < 0 else f" of step {waiting.step}"
    kinds = " or ".join(waiting.kinds)
    senders = " or ".join(waiting.senders)
    return (
        f"{kinds}{step} from {senders} since {waiting.since_s:.0f} s, gives up after "
        f"{waiting.patience_s:g} s"
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
    """Return one row with the training's bar, epoch, metrics and time left; () before training."""
    progress = board.progress
    if progress is None:
        return ()
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = ProgressBar(total=max(progress.steps, 1), completed=progress.step, width=_BAR_WIDTH)
    row = Table.grid(padding=(0, 1))
    row.add_row(bar, Text(board.progress_line))
    return (row,)
