"""The circle of each step: the passives that answered it together. It stays the same in all
sessions.

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
- Where one was left out and is here again, the active plays these steps alone. Where the method
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
from typing import Any

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


class RunCircles(AnsweredCircles):
    """A passive's record of its answered steps and of the circle of each: the passives that
    answered together. It covers all sessions of a run.

    Args:
        log: its file; is_durable: whether a line must be on the disk, not only in the operating
            system's buffers, before an answer leaves.

    Raises CheckpointError: the file is no such record.
    """

    def __init__(self, log: Path, *, is_durable: bool = True) -> None:
        """Open this passive's record of answered steps; those of earlier sessions stay binding.

        `is_durable`: whether a line must be on the disk before an answer leaves.
        """
        super().__init__()
        self._log = log
        self._is_durable = is_durable
        self._circle_of_step: dict[int, tuple[str, ...]] = {}
        for step, circle, marks in _parse_lines(log):
            self._record_step(step, circle, marks)

    @classmethod
    def from_own(cls, party: PartyContext) -> "RunCircles | None":
        """Return the party's record of circles, the passives that answered each step together.

        None: the party keeps no logs.
        """
        logs = party.secrets.logs
        if logs is None:
            return None
        return cls(
            log_file(logs, "circles", party.name, "jsonl"), is_durable=party.secrets.sends_out
        )

    def make_marks(self, values_BD: FloatArray, binding: StepBinding) -> tuple[str, ...]:
        """Return the identifiers of a step: its number, the digest of the question, that of the
        answer.
        """
        return f"{_STEP}{binding.step}", *super().make_marks(values_BD, binding)

    def suggest_remedy(self, earlier: Sequence[str], circle: Sequence[str]) -> str:
        """Return advice for an error: other passives take part in a step than when it was first
        answered.

        A circle is the set of passives that answered a step together.

        `earlier`: the circle of the first answer.
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
        """Record a step's circle; when this returns, the log line is written and the answer may
        leave.

        `marks`: from `make_marks`.
        """
        first, *other_marks = marks
        step = int(first.removeprefix(_STEP))
        fields = {"step": step, "circle": list(circle), "marks": other_marks}
        add_line(self._log, fields, is_durable=self._is_durable)
        self._record_step(step, circle, other_marks)

    def _record_step(self, step: int, circle: Sequence[str], marks: Sequence[str]) -> None:
        """Store the circle of an answered step (who answered it together), and the `marks` by which
        its request and answer are recognised.
        """
        self._circle_of_step.setdefault(step, tuple(circle))
        super().add_marks((f"{_STEP}{step}", *marks), circle)

    def list_steps(self, since: int) -> tuple[AnsweredSteps, ...]:
        """Return the answered steps from `since` on, merged into as few ranges as possible."""
        ranges: list[list[Any]] = []
        for step, circle in sorted(self._circle_of_step.items()):
            if step < since:
                continue
            if ranges and ranges[-1][1:] == [step - 1, circle]:
                ranges[-1][1] = step
            else:
                ranges.append([step, step, circle])
        return tuple(
            AnsweredSteps(first=first, last=last, passives=circle) for first, last, circle in ranges
        )


def _parse_lines(log: Path) -> Iterator[tuple[int, tuple[str, ...], Sequence[str]]]:
    """Yield from each log line its step, the passives that answered it together (circle), and the
    digests of request and answer (marks); skip a last line cut off by a crash.

    An answer leaves only after its line is complete, so a cut line stands for no answer.
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
    """Return the steps from `since` on that any passive answered, ascending and without repeats.

    Args:
        answers: by passive, the steps it answered with the circle of each.
        passives: of the contract, in its order.

    Raises RemoteProtocolError: a circle names others than the passives, or not its sender, or two
    passives name different circles for one step.
    """
    ranges = sorted(
        (
            (steps.first, steps.last, speaker, steps.passives)
            for speaker in answers
            for steps in answers[speaker]
        ),
        key=lambda stretch: stretch[:3],
    )
    merged: list[AnsweredSteps] = []
    speakers: list[str] = []
    for first, last, speaker, circle in ranges:
        if speaker not in circle or circle != tuple(name for name in passives if name in circle):
            raise RemoteProtocolError(
                f"{speaker} says that it answered step {first} among {', '.join(circle)}; expected "
                f"itself and others of {', '.join(passives)}, in this order"
            )
        if merged and first <= merged[-1].last and circle != merged[-1].passives:
            raise RemoteProtocolError(
                f"{speaker} answered step {first} among {', '.join(circle)}, and {speakers[-1]} "
                f"among {', '.join(merged[-1].passives)}: the aggregator told them different "
                "circles, and no circle may be asked again. Begin a new run, and look at the "
                "audit logs of both"
            )
        if last < since:
            continue
        steps = AnsweredSteps(first=max(first, since), last=last, passives=circle)
        if merged and circle == merged[-1].passives:  # the steps between were not requested
            steps = steps.model_copy(
                update={"first": merged[-1].first, "last": max(last, merged[-1].last)}
            )
            merged.pop()
            speakers.pop()
        merged.append(steps)
        speakers.append(speaker)
    return tuple(merged)


def warn_of_steps_without(party: PartyContext, contract: Contract) -> None:
    """Warn (LeftOutWarning) of steps that run again without a passive that answered them before.

    The active is warned where it repeats them alone, else the passive that was left out.
    """
    answered = contract.resumes.answered if contract.resumes else ()
    absent = {
        name: steps
        for steps in reversed(answered)
        for name in contract.passives
        if name not in steps.passives
    }
    plays_alone = party.config.method.plays_steps_alone
    if plays_alone and absent and party.name == contract.active:
        first = min(steps.first for steps in absent.values())
        warnings.warn(
            f"nothing to do: before this session, steps from {first} on were answered without "
            f"{' and '.join(sorted(absent))}; {party.name} plays them alone now, so that no two "
            "sums tell what one passive adds",
            LeftOutWarning,
            stacklevel=2,
        )
    elif not plays_alone and party.name in absent:
        exception = "" if contract.restarts else ", where rules.restarts allows a new session"
        warnings.warn(
            f"nothing to do: {party.name} is left out from step {absent[party.name].first} on, "
            "which others answered without it before this session; it comes back at a "
            f"checkpoint{exception}",
            LeftOutWarning,
            stacklevel=2,
        )
