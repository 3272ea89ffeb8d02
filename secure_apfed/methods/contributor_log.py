"""The contributors of each step: the passives that answered it together, the same in all sessions.

Run by: each passive under recoverable masks whose sums may lack somebody, before its answer leaves;
by all parties when a run is resumed. Protects from: an active that gets a step answered by
two sets of passives, by interrupting a session and resuming it from an earlier checkpoint. The
difference of the two sums would be the contribution of the passives that are in only one set.

The rule. A passive records every step that it answers, with the step's contributors and the digests
of request and answer, in `circles-NAME.jsonl`. It answers this step, or the same request at any
step, with no other contributors, fewer or more, in any session of the run.

How an honest run resumes. Greetings list the answered steps with their contributors, and the
contract of the resumed session repeats this list, from the step at which it resumes:

- Where all answered, all must answer again. If one falls silent meanwhile, the session ends for
  all, as under `wait`, and goes on once that one is back.
- Where one was left out and is here again, the active trains alone in these steps. Where the method
  cannot do that, whoever was left out is so again from the same step on, and comes back at a
  checkpoint, as whoever falls silent does.

So no passive gets a request that it would refuse, and a repeated request to the same contributors
is equal bit for bit. Does not protect from a related request at a step that no passive answered:
with a threshold below M, the active can always send one (`apfed_protocols.sums.readers`).
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.sums.interface import FloatArray, StepBinding
from apfed_protocols.sums.recoverable import ContributorLog
from secure_apfed.base.files import add_line, open_plain
from secure_apfed.base.names import log_file
from secure_apfed.contract import AnsweredSteps, Contract
from secure_apfed.errors import CheckpointError, LeftOutWarning
from secure_apfed.methods.party import PartyContext

__all__ = ["RunContributorLog", "merge_answered_steps", "warn_of_steps_without"]

_STEP_PREFIX = "step "
"""Beginning of the text by which a step is recognised, as in "step 17"."""


class RunContributorLog(ContributorLog):
    """A passive's record of the steps that it answered, in all sessions of a run.

    It has each step's contributors: the passives that answered the step together. No step may be
    answered by two sets of passives, since the difference of two sums reveals one passive's
    contribution.
    """

    def __init__(self, path: Path, *, is_durable: bool = True) -> None:
        """Read the steps that this passive answered in earlier sessions of the run.

        `path`: the log's file. `is_durable`: whether a line must be on the disk, not only
        in the operating system's buffers, before an answer leaves. Raises CheckpointError: a line
        of the file is malformed.
        """
        super().__init__()
        self._path = path
        self._is_durable = is_durable
        self._contributors_by_step: dict[int, tuple[str, ...]] = {}
        for step, contributors, digests in _parse_lines(path):
            self._record_step(step, contributors, digests)

    @classmethod
    def for_party(cls, party: PartyContext) -> "RunContributorLog | None":
        """Return the log in this party's folder of logs; None: the party keeps no logs."""
        folder = party.secrets.log_folder
        if folder is None:
            return None
        path = log_file(folder, "circles", party.name, "jsonl")
        # In a simulation no answer leaves this process, so buffered lines are enough.
        return cls(path, is_durable=party.secrets.needs_durable_logs)

    def compute_digests(self, values_BD: FloatArray, binding: StepBinding) -> tuple[str, ...]:
        """Return the texts by which a repeated step, request or answer is recognised.

        They are the step's number ("step 17"), the digest of the request and that of the answer.

        `values_BD`: the answer, this passive's contribution to a sum: D numbers for each of B rows.
        `binding`: the step and request that it answers.
        """
        return f"{_STEP_PREFIX}{binding.step}", *super().compute_digests(values_BD, binding)

    def suggest_remedy(
        self, earlier_contributors: Sequence[str], contributors: Sequence[str]
    ) -> str:
        """Return advice for the error that a step would be answered by other passives than before.

        `earlier_contributors`: names of the passives that answered the step together at first.
        `contributors`: names of the passives that take part now.
        """
        missing = [name for name in earlier_contributors if name not in contributors]
        if missing:
            return (
                f"Resume the run once {' and '.join(missing)} takes part again, or begin a new "
                "run without it"
            )
        return (
            "Resume the run at all parties (--resume), so that their contract says who was left "
            "out of which steps"
        )

    def record_answer(self, request_digests: Iterable[str], contributors: Sequence[str]) -> None:
        """Record who answers a step together, in memory and in the log file; afterwards the answer
        may leave.

        `request_digests`: what `compute_digests` returned for the step. `contributors`: names of
        the passives that answer it together.
        """
        step_text, *digests = request_digests
        step = int(step_text.removeprefix(_STEP_PREFIX))
        fields = {"step": step, "circle": list(contributors), "marks": digests}
        add_line(self._path, fields, is_durable=self._is_durable)
        self._record_step(step, contributors, digests)

    def _record_step(self, step: int, contributors: Sequence[str], digests: Sequence[str]) -> None:
        """Store in memory who answered a step together; who answered it first stays.

        `contributors`: names of these passives. `digests`: of request and answer.
        """
        self._contributors_by_step.setdefault(step, tuple(contributors))
        super().record_answer((f"{_STEP_PREFIX}{step}", *digests), contributors)

    def list_steps(self, since: int) -> tuple[AnsweredSteps, ...]:
        """Return the answered steps from `since` on, as ranges in ascending order.

        A range has consecutive steps that the same passives answered together.
        """
        ranges: list[AnsweredSteps] = []
        for step, contributors in sorted(self._contributors_by_step.items()):
            if step < since:
                continue
            first = step
            previous = ranges[-1] if ranges else None
            if previous and previous.last == step - 1 and previous.passives == contributors:
                first = previous.first
                ranges.pop()
            ranges.append(AnsweredSteps(first=first, last=step, passives=contributors))
        return tuple(ranges)


def _parse_lines(path: Path) -> Iterator[tuple[int, tuple[str, ...], Sequence[str]]]:
    """Yield each log line's step, its passives, and the digests of request and answer.

    The passives are those that answered the step together. A line without its closing brace is
    skipped: a crash cut it off before the answer left. Raises CheckpointError: a line is malformed.
    """
    if not path.exists():
        return
    with open_plain(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or b"}" not in line:
                continue
            try:
                fields = json.loads(line)
                digests = [str(digest) for digest in fields["marks"]]
                yield int(fields["step"]), tuple(map(str, fields["circle"])), digests
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"put the newest copy of {path} back, or begin a new run: its line {number} "
                    f"does not say among whom a step was answered ({error})"
                ) from error


def merge_answered_steps(
    steps_by_reporter: Mapping[str, Sequence[AnsweredSteps]], *, passives: Sequence[str], since: int
) -> tuple[AnsweredSteps, ...]:
    """Merge the answered steps that passives reported into ascending, disjoint ranges.

    All steps of a range were answered by the same passives. Neighbouring ranges with the same
    passives become one range, even if steps lie between them: nobody answered these.

    Args:
        steps_by_reporter: the ranges of steps that a passive reports to have answered, by its name.
        passives: names of the contract's passives, in its order.
        since: the first step of the result; earlier steps are left out.

    Raises RemoteProtocolError: a range names somebody who is no passive, or lacks the passive that
    reported it, or two passives report different contributors for one step.
    """
    reports = [
        (reporter, steps) for reporter, ranges in steps_by_reporter.items() for steps in ranges
    ]
    # In rising order, so that ranges that overlap are neighbours.
    reports.sort(key=lambda report: (report[1].first, report[1].last, report[0]))
    merged: list[AnsweredSteps] = []
    last_reporter = ""
    for reporter, steps in reports:
        contributors = steps.passives
        expected_order = tuple(name for name in passives if name in contributors)
        if reporter not in contributors or contributors != expected_order:
            raise RemoteProtocolError(
                f"{reporter} says that it answered step {steps.first} among "
                f"{', '.join(contributors)}; "
                f"expected itself and others of {', '.join(passives)}, in this order"
            )
        previous = merged[-1] if merged else None
        if previous and steps.first <= previous.last and contributors != previous.passives:
            raise RemoteProtocolError(
                f"{reporter} answered step {steps.first} among {', '.join(contributors)}, and "
                f"{last_reporter} among {', '.join(previous.passives)}: the aggregator told them "
                "different contributors, and nobody may be asked again. Begin a new run, and look "
                "at the audit logs of both"
            )
        # Earlier steps are checked like the others, and left out.
        if steps.last < since:
            continue
        first = max(steps.first, since)
        last = steps.last
        if previous and contributors == previous.passives:
            first = previous.first
            last = max(last, previous.last)
            merged.pop()
        merged.append(AnsweredSteps(first=first, last=last, passives=contributors))
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
