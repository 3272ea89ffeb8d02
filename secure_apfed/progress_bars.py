"""How far something is, on stderr: bars on a terminal, a line an epoch in a log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from secure_apfed.runs.outcome import Progress

__all__ = ["counting", "downloading", "figures", "watching"]


@contextmanager
def watching(name: str, *, quiet: bool) -> Iterator["Callable[[Progress], None]"]:
    """Show a run's progress on stderr; yields what `run` calls with each `Progress`."""
    if quiet:
        yield lambda progress: None
        return
    console = Console(stderr=True)
    shown = _Lines(console) if not console.is_terminal else _Bar(console, name)
    with shown:
        yield shown.update


class _Lines:
    """One line an epoch, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._past: Progress | None = None

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        if self._past is not None:
            self._tell(self._past)

    def update(self, progress: "Progress") -> None:
        """Keep what is newest; tell it when its epoch is over."""
        if self._past is not None and self._past.epoch != progress.epoch:
            self._tell(self._past)
        self._past = progress

    def _tell(self, progress: "Progress") -> None:
        epoch = f"epoch {progress.epoch}/{progress.epochs}"
        self._console.print(f"{epoch}  {figures(progress)}", highlight=False)


class _Bar:
    """A bar with the newest figures, for terminals."""

    def __init__(self, console: Console, name: str) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            TextColumn("{task.description}"), BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}"), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._task = self._progress.add_task(f"{name}: alignment and setup", total=None, told="")
        self._name = name

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, progress: "Progress") -> None:
        """Show the newest figures."""
        self._progress.update(
            self._task,
            description=f"{self._name}: epoch {progress.epoch}/{progress.epochs}",
            completed=progress.step, total=progress.steps, told=figures(progress),
        )  # fmt: skip


def figures(progress: "Progress") -> str:
    """Loss, accuracy, epsilon and bytes in a line, where each is known."""
    from secure_apfed.measures import MEASURES

    measure = MEASURES[progress.measure]
    told = progress.accuracy if progress.score is None else progress.score
    accuracy = "" if told is None else f"  {measure.title} {measure.text(told)}"
    spent = "" if progress.epsilon is None else f"  {progress.figure} {progress.epsilon:.3g}"
    megabytes = progress.wire_bytes / 1e6
    loss = "" if progress.loss is None else f"loss {progress.loss:.4f}"
    return f"{loss}{accuracy}{spent}  {megabytes:.1f} MB sent".strip()


@contextmanager
def downloading(*, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show downloads on stderr; yields what `fetch` calls with (file, bytes, bytes in all)."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as RichProgress

    shown = RichProgress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(),
        console=Console(stderr=True), disable=quiet,
    )  # fmt: skip
    tasks: dict[str, Any] = {}

    def update(file: str, done: int, total: int | None) -> None:
        if file not in tasks:
            tasks[file] = shown.add_task(file, total=total)
        shown.update(tasks[file], completed=done, total=total)

    with shown:
        yield update


@contextmanager
def counting(name: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a count on stderr; yields what is called with (done, in all)."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    shown = RichProgress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeElapsedColumn(), console=Console(stderr=True), disable=quiet,
    )  # fmt: skip
    task = shown.add_task(name, total=None)
    with shown:
        yield lambda done, total: shown.update(task, completed=done, total=total)
