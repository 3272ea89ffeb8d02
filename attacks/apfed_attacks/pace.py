"""Duration of `evaluate`: a forecast before it starts, the time left, and a budget of seconds.

Run by: whoever calls `evaluate`. Nothing here changes what an attack computes. One *pass* is one
run of one attack: on what was sent, or on one exchange of releases between rows.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from apfed_attacks.interface import Attack

__all__ = ["EvaluationProgress", "OnProgress", "OutOfTime", "Pace", "watch_in_terminal"]

_SECONDS_PER_ITERATION: Mapping[str, float] = {
    "semi_supervised": 0.023,
    "unpaired_inversion": 0.029,
}
"""Seconds of an iteration, by attack that trains networks: one core, 400 rows of 4 numbers."""
_SECONDS_PER_PASS = 0.2
"""Seconds of a pass of every other attack, likewise; measured times replace both estimates."""
_START_OF_LINE = "\r\x1b[K"  # moves the cursor to the start of the line, and clears it


@dataclass(frozen=True, kw_only=True)
class EvaluationProgress:
    """The progress of `evaluate`.

    Attributes:
        attack: the attack that runs now, with its options; empty: all are done.
        done, total: attacks, where each set of options counts by itself.
        seconds: since the first attack started.
        seconds_left: predicted by how long passes took so far; 0 at the end.
    """

    attack: str
    done: int
    total: int
    seconds: float
    seconds_left: float

    def __str__(self) -> str:
        """Return the progress as a line for the terminal."""
        remainder = f"about {_format_seconds(self.seconds_left)} left"
        return f"evaluate: {self.done} of {self.total} attacks done, {self.attack}, {remainder}"


OnProgress: TypeAlias = Callable[[EvaluationProgress], None]


def _format_seconds(seconds: float) -> str:
    """Return seconds or minutes, rounded."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class OutOfTime(Exception):  # noqa: N818  # nothing is wrong: the caller's budget is spent
    """An attack that does not fit into the rest of the caller's budget of seconds; its text says
    why.
    """


class Pace:
    """A clock of one evaluation, which measures attacks and predicts how long the rest takes.

    Attacks are named by their number in `planned`. A pass is one run of an attack: on the releases
    as they were, or exchanged between rows (a decoy).

    Args:
        planned: the attacks with their names, in any order.
        exchanges: number of decoys, each of which is one more pass.
        budget: seconds for all attacks together; None: no limit.
        on_progress: called before each attack, after each pass, and once at the end.
    """

    def __init__(
        self,
        planned: Sequence[tuple[str, Attack]],
        *,
        exchanges: int,
        budget: float | None,
        on_progress: OnProgress,
    ) -> None:
        """Estimate the attacks' times, and start the clock."""
        self._names = [name for name, _ in planned]
        self._expected_seconds = [_estimate_seconds(attack) for _, attack in planned]
        self._pass_counts = [1 + exchanges * attack.is_exchangeable for _, attack in planned]
        self._measured_seconds: dict[int, float] = {}  # seconds of a pass, by attack
        self._finished_attacks: set[int] = set()
        self._budget_seconds = budget
        self._on_progress = on_progress
        self._start_time = time.monotonic()

    @property
    def run_order(self) -> list[int]:
        """Return the numbers of the planned attacks in the order of running.

        They run as given or, under a budget, the shortest first, so that most of them fit.
        """
        attacks = list(range(len(self._names)))
        return (
            attacks if self._budget_seconds is None else sorted(attacks, key=self._predict_seconds)
        )

    @contextmanager
    def time_attack(self, attack: int) -> Iterator[Callable[[], None]]:
        """Time one attack in this block; yield the function to call after each of its passes.

        A pass is one run of the attack: on the releases as they were, or exchanged between rows.

        Raises:
            OutOfTime: the attack does not fit into the rest of the budget, or after a pass no
                longer does.
        """
        try:
            self._require_time(self._predict_least_seconds(attack), "it would take about")
            self._report_progress(attack, passes=0)
            begin = time.monotonic()
            passes = 0

            def note_pass() -> None:
                """Measure one more pass.

                Raises OutOfTime: the remaining passes no longer fit into the budget.
                """
                nonlocal passes
                passes += 1
                per_pass = (time.monotonic() - begin) / passes
                self._measured_seconds[attack] = per_pass
                planned_passes = self._pass_counts[attack]
                if passes < planned_passes:
                    self._require_time(
                        (planned_passes - passes) * per_pass,
                        f"after {passes} of {planned_passes} passes the rest needs about",
                    )
                self._report_progress(attack, passes=passes)

            yield note_pass
        finally:
            self._finished_attacks.add(attack)

    def report_end(self) -> None:
        """Report that all attacks are done."""
        total = len(self._names)
        self._on_progress(
            EvaluationProgress(
                attack="", done=total, total=total, seconds=self._seconds_spent(), seconds_left=0.0
            )
        )

    def _seconds_spent(self) -> float:
        """Return the seconds since this call started."""
        return time.monotonic() - self._start_time

    def _predict_seconds(self, attack: int, *, passes_done: int = 0) -> float:
        """Predict the seconds of an attack's remaining passes.

        A pass takes as long as this attack's measured ones or, before the first, as expected times
        the slowdown of other attacks.
        """
        per_pass = self._measured_seconds.get(
            attack, self._compute_slowdown() * self._expected_seconds[attack]
        )
        remaining_passes = max(0, self._pass_counts[attack] - passes_done)
        return remaining_passes * per_pass

    def _predict_least_seconds(self, attack: int) -> float:
        """Predict the fewest seconds that an attack may take, so that no attack is refused that
        would fit.

        It is the larger of two times: one pass at the mean slowdown of passes so far, and all
        passes at the smallest slowdown. The mean alone would let one slow attack make all later
        ones look slow.
        """
        slowdowns = [
            seconds / self._expected_seconds[other]
            for other, seconds in self._measured_seconds.items()
        ]
        smallest = min([1.0, *slowdowns])
        all_passes = self._pass_counts[attack] * self._expected_seconds[attack] * smallest
        return max(self._compute_slowdown() * self._expected_seconds[attack], all_passes)

    def _compute_slowdown(self) -> float:
        """Return how many times as long passes took as expected; 1 before the first."""
        expected = sum(self._expected_seconds[attack] for attack in self._measured_seconds)
        return sum(self._measured_seconds.values()) / expected if expected else 1.0

    def _require_time(self, needed: float, subject: str) -> None:
        """Raise OutOfTime if fewer than `needed` seconds of the budget are left.

        `subject`: the start of the message, such as "it would take about".
        """
        if self._budget_seconds is None:
            return
        seconds_left = max(0.0, self._budget_seconds - self._seconds_spent())
        if needed > seconds_left:
            raise OutOfTime(
                f"{subject} {needed:.3g} s, and of seconds={self._budget_seconds:g} "
                f"{seconds_left:.3g} s are left"
            )

    def _report_progress(self, attack: int, *, passes: int) -> None:
        """Call the progress callback while this attack runs, after this number of its passes."""
        waiting = set(range(len(self._names))) - self._finished_attacks - {attack}
        seconds_left = self._predict_seconds(attack, passes_done=passes)
        seconds_left += sum(map(self._predict_seconds, waiting))
        if self._budget_seconds is not None:
            seconds_left = min(seconds_left, max(0.0, self._budget_seconds - self._seconds_spent()))
        self._on_progress(
            EvaluationProgress(
                attack=self._names[attack],
                done=len(self._finished_attacks),
                total=len(self._names),
                seconds=self._seconds_spent(),
                seconds_left=seconds_left,
            )
        )


def _estimate_seconds(attack: Attack) -> float:
    """Return the expected seconds of one pass (run of the attack), before any was measured."""
    if attack.name in _SECONDS_PER_ITERATION:
        return attack.iterations * _SECONDS_PER_ITERATION[attack.name]
    return _SECONDS_PER_PASS


@contextmanager
def watch_in_terminal(on_progress: OnProgress | None) -> Iterator[OnProgress]:
    """Yield the caller's `on_progress`, or one that keeps a line of standard error up to date.

    That line is written only where standard error is a terminal, and cleared at the end.
    """
    stream = sys.stderr
    if on_progress is not None:
        yield on_progress
    elif stream is None or not stream.isatty():
        yield lambda progress: None
    else:

        def write_line(progress: EvaluationProgress) -> None:
            """Write the progress over the last line; nothing at the end."""
            stream.write(f"{_START_OF_LINE}{progress if progress.attack else ''}")
            stream.flush()

        try:
            yield write_line
        finally:
            stream.write(_START_OF_LINE)
            stream.flush()
