"""The circle of each step: the passives that answered it together, the same in all sessions.

Run by: each passive under recoverable masks whose sums may lack somebody, before its answer leaves;
by all parties when a run is resumed. Protects from: an active that gets a step answered in two
circles, by interrupting a session and resuming it from an earlier checkpoint. The difference of the
two sums would be the contribution of the passives that are in only one of the circles.

The rule. A passive records every step that it answers, with its circle and the digests of request
and answer, in `circles-NAME.jsonl`. It answers this step, or the same request at any step, in no
other circle, smaller or larger, in any session of the run.

How an honest run resumes. Greetings list the answered steps with their circles, and the contract of
the resumed session repeats this list, from the step at which it resumes:

- Where all answered, all must answer again. If one falls silent meanwhile, the session ends for
  all, as under `wait`, and goes on once that one is back.
- Where one was left out and is here again, the active trains alone in these steps. Where the method
  cannot do that, whoever was left out is so again from the same step on, and comes back at a
  checkpoint, as whoever falls silent does.

So no passive gets a request that it would refuse, and a repeated request in the same circle is
equal bit for bit. Does not protect from a related request at a step that no passive answered: with
a threshold below M, the active can always send one (`apfed_protocols.sums.readers`).
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums.interface import FloatArray, StepBinding
from apfed_protocols.sums.recoverable import AnsweredCircles
from secure_apfed.base.files import add_line, open_plain
from secure_apfed.base.names import log_file
from secure_apfed.contract import AnsweredSteps, Contract
from secure_apfed.errors import CheckpointError, LeftOutWarning
from secure_apfed.methods.party import PartyContext

__all__ = ["RunCircles", "merge_answered_steps", "warn_of_steps_without"]

_STEP = "step "
"""Prefix of the mark that is a step's number, as in "step 17"."""


class RunCircles(AnsweredCircles):
    """A passive's record of the steps that it answered, in all sessions of a run.

    It has each step's circle: the passives that answered the step together. No step may be answered
    in two circles, since the difference of two sums reveals one passive's contribution.
    """

    def __init__(self, log: Path, *, is_durable: bool = True) -> None:
        """Read the steps that this passive answered in earlier sessions of the run.

        `log`: path of the record's file. `is_durable`: whether a line must be on the disk, not only
        in the operating system's buffers, before an answer leaves. Raises CheckpointError: a line
        of the file is malformed.
        """
        super().__init__()
        self._log = log
        self._is_durable = is_durable
        self._circle_of_step: dict[int, tuple[str, ...]] = {}
        for step, circle, marks in _parse_lines(log):
            self._record_step(step, circle, marks)

    @classmethod
    def from_own(cls, party: PartyContext) -> "RunCircles | None":
        """Return the record in this party's log folder; None: the party keeps no logs."""
        logs = party.secrets.logs
        if logs is None:
            return None
        log = log_file(logs, "circles", party.name, "jsonl")
        # In a simulation no answer leaves this process, so buffered lines are enough.
        return cls(log, is_durable=party.secrets.sends_out)

    def make_marks(self, values_BD: FloatArray, binding: StepBinding) -> tuple[str, ...]:
        """Return the marks that identify an answered step.

        They are its number, the digest of the request and the digest of the answer.

        `values_BD`: the answer, this passive's contribution to a sum: D numbers for each of B rows.
        `binding`: the step and request that it answers.
        """
        return f"{_STEP}{binding.step}", *super().make_marks(values_BD, binding)

    def suggest_remedy(self, earlier: Sequence[str], circle: Sequence[str]) -> str:
        """Return advice for the error that a step would be answered by other passives than before.

        `earlier`: names of the passives that answered the step together at first. `circle`: names
        of the passives that take part now.
        """
        missing = [name for name in earlier if name not in circle]
        if missing:
            return (
                f"Resume the run once {' and '.join(missing)} takes part again, or begin a new "
                "run without it"
            )
        return (
            "Resume the run at all parties (--resume), so that their contract says who was left "
            "out of which steps"
        )

    def add_marks(self, marks: Iterable[str], circle: Sequence[str]) -> None:
        """Record a step's circle, in memory and in the log file; afterwards the answer may leave.

        `marks`: what `make_marks` returned for the step. `circle`: names of the passives that
        answer it together.
        """
        step_mark, *other_marks = marks
        step = int(step_mark.removeprefix(_STEP))
        fields = {"step": step, "circle": list(circle), "marks": other_marks}
        add_line(self._log, fields, is_durable=self._is_durable)
        self._record_step(step, circle, other_marks)

    def _record_step(self, step: int, circle: Sequence[str], marks: Sequence[str]) -> None:
        """Store in memory who answered a step together; the first circle of a step stays.

        `circle`: names of these passives. `marks`: the digests of request and answer.
        """
        self._circle_of_step.setdefault(step, tuple(circle))
        super().add_marks((f"{_STEP}{step}", *marks), circle)

    def list_steps(self, since: int) -> tuple[AnsweredSteps, ...]:
        """Return the answered steps from `since` on, as ranges in ascending order.

        A range has consecutive steps that the same passives answered together.
        """
        ranges: list[AnsweredSteps] = []
        for step, circle in sorted(self._circle_of_step.items()):
            if step < since:
                continue
            first = step
            previous = ranges[-1] if ranges else None
            if previous and previous.last == step - 1 and previous.passives == circle:
                first = previous.first
                ranges.pop()
            ranges.append(AnsweredSteps(first=first, last=step, passives=circle))
        return tuple(ranges)


def _parse_lines(log: Path) -> Iterator[tuple[int, tuple[str, ...], Sequence[str]]]:
    """Yield each log line's step, its passives, and the digests (marks) of request and answer.

    The passives are those that answered the step together. A line without its closing brace is
    skipped: a crash cut it off before the answer left. Raises CheckpointError: a line is malformed.
    """
    if not log.exists():
        return
    with open_plain(log) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or b"}" not in line:
                continue
            try:
                fields = json.loads(line)
                marks = [str(mark) for mark in fields["marks"]]
                yield int(fields["step"]), tuple(map(str, fields["circle"])), marks
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"put the newest copy of {log} back, or begin a new run: its line {number} "
                    f"does not say among whom a step was answered ({error})"
                ) from error


def merge_answered_steps(
    answers: Mapping[str, Sequence[AnsweredSteps]], *, passives: Sequence[str], since: int
) -> tuple[AnsweredSteps, ...]:
    """Merge the answered steps that passives reported into ascending, disjoint ranges.

    All steps of a range have one circle (the passives that answered them together). Neighbouring
    ranges of one circle become one range, even if steps lie between them: nobody answered these.

    Args:
        answers: mapping from passive name to the ranges of steps that it reports to have answered.
        passives: names of the contract's passives, in its order.
        since: the first step of the result; earlier steps are left out.

    Raises RemoteProtocolError: a circle has a name that is no passive's, or lacks the passive that
    reported it, or two passives report different circles for one step.
    """
    reports = [(reporter, steps) for reporter in answers for steps in answers[reporter]]
    # In rising order, so that ranges that overlap are neighbours.
    reports.sort(key=lambda report: (report[1].first, report[1].last, report[0]))
    merged: list[AnsweredSteps] = []
    last_reporter = ""
    for reporter, steps in reports:
        circle = steps.passives
        expected_order = tuple(name for name in passives if name in circle)
        if reporter not in circle or circle != expected_order:
            raise RemoteProtocolError(
                f"{reporter} says that it answered step {steps.first} among {', '.join(circle)}; "
                f"expected itself and others of {', '.join(passives)}, in this order"
            )
        previous = merged[-1] if merged else None
        if previous and steps.first <= previous.last and circle != previous.passives:
            raise RemoteProtocolError(
                f"{reporter} answered step {steps.first} among {', '.join(circle)}, and "
                f"{last_reporter} among {', '.join(previous.passives)}: the aggregator told them "
                "different circles, and no circle may be asked again. Begin a new run, and look at "
                "the audit logs of both"
            )
        # Earlier steps are checked like the others, and left out.
        if steps.last < since:
            continue
        first = max(steps.first, since)
        last = steps.last
        if previous and circle == previous.passives:
            first = previous.first
            last = max(last, previous.last)
            merged.pop()
        merged.append(AnsweredSteps(first=first, last=last, passives=circle))
        last_reporter = reporter
    return tuple(merged)


def warn_of_steps_without(party: PartyContext, contract: Contract) -> None:
    """Warn (LeftOutWarning) of steps that an earlier session ran without some passive.

    The resumed session repeats them without this passive, too: with it, the two sums would differ
    by its contribution. If the method lets the active train alone in these steps, the active is
    warned, otherwise the passive that was left out.
    """
    answered = contract.resumes.answered if contract.resumes else ()
    first_step_without: dict[str, int] = {}
    for steps in answered:  # ascending, so the first range without a passive has its first step
        for name in contract.passives:
            if name not in steps.passives:
                first_step_without.setdefault(name, steps.first)
    active_repeats_alone = party.config.method.can_simulate_steps
    if active_repeats_alone and first_step_without and party.name == contract.active:
        first = min(first_step_without.values())
        warnings.warn(
            f"nothing to do: before this session, steps from {first} on were answered without "
            f"{' and '.join(sorted(first_step_without))}; {party.name} plays them alone now, so "
            "that no two sums tell what one passive adds",
            LeftOutWarning,
            stacklevel=2,
        )
    elif not active_repeats_alone and party.name in first_step_without:
        exception = "" if contract.restarts else ", where rules.restarts allows a new session"
        warnings.warn(
            f"nothing to do: {party.name} is left out from step "
            f"{first_step_without[party.name]} on, which others answered without it before this "
            f"session; it comes back at a checkpoint{exception}",
            LeftOutWarning,
            stacklevel=2,
        )
