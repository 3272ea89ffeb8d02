"""Mounts the chosen attacks on a finished run, each by every adversary that it fits.

Run by: the experimenter, who holds the recording of all parties.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # no annotations
from torch import Tensor

from attacks import ATTACKS
from attacks.interface import Attack, AttackError, AttackResult, Guess
from attacks.live.strategy import ActiveAttack, ActiveSeat, AnsweringAttack
from attacks.recorded import (
    Truth,
    class_priors,
    reveal_encoder,
    reveal_features,
    reveal_labels,
    reveal_public,
    truth_of,
    view_of,
)
from attacks.recorded_members import reveal_candidates
from attacks.scoring import not_applicable, score
from attacks.view import AdversaryView, Budget, Knowledge, Played
from protocols.errors import RemoteProtocolError
from secure_apfed.config import AttackChoice
from secure_apfed.config.problems import describe
from secure_apfed.errors import ConfigError
from secure_apfed.runs import Recording

__all__ = [
    "full_suite",
    "headlines",
    "knowledge_of",
    "mount",
    "prepare",
    "result_of",
    "result_of_answers",
]


def full_suite(names: Iterable[str] = tuple(ATTACKS)) -> tuple[AttackChoice, ...]:
    """Return the named attacks, each with every set of options that its class proposes.

    Raises:
        ConfigError: an unknown attack.
    """
    return tuple(
        AttackChoice(name=name, options=dict(options))
        for name in names
        for options in type(prepare(AttackChoice(name=name))).suite
    )


def prepare(choice: AttackChoice) -> Attack:
    """Return the attack of a config's entry, its options checked.

    Raises:
        ConfigError: an unknown attack or option, or a value out of range.
    """
    if choice.name not in ATTACKS:
        near = difflib.get_close_matches(choice.name, ATTACKS, n=1, cutoff=0.5)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"attacks: {choice.name!r} is unknown; {guess}Known are {', '.join(ATTACKS)}"
        )
    kind = ATTACKS[choice.name]
    try:
        return kind.model_validate(choice.options)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, path))} {problem}"
            for path, problem in describe(kind, error, choice.options)
        )
        raise ConfigError(f"attacks: {choice.name}: options: {problems}") from error


def mount(
    recording: Recording,
    choices: Iterable[AttackChoice],
    *,
    seed: int,
    opened: Mapping[int, Tensor] | None = None,
    device: str = "cpu",
    on_score: Callable[[AttackResult, Guess], None] | None = None,
) -> tuple[AttackResult, ...]:
    """Return one result for each chosen attack and adversary, in this order.

    All options are checked before the first attack starts.

    Args:
        recording: of a finished run.
        choices: names and options.
        seed: of the known rows and of the attacks.
        opened: step -> (B, D) sums as the active decoded them, instead of those recorded.
        device: where attacks compute that have networks, "cpu" or "cuda".
        on_score: told of every result that applies, with the guess that it scores.

    Raises:
        ConfigError: an unknown attack or option, or a value out of range.
    """
    attacks = [prepare(choice) for choice in choices]
    return tuple(
        _Trial(attack, recording, parties, victim, opened, seed, device, on_score).result()
        for attack in attacks
        for parties, victim in _pairs(attack, recording)
    )


def result_of(
    attack: ActiveAttack,
    recording: Recording,
    parties: Sequence[str],
    victim: str,
    *,
    seed: int,
    seat: ActiveSeat,
) -> AttackResult:
    """Return the result of a malicious attack that is played from `seat` now.

    A refusal is a result that does not apply, for that reason.
    """
    trial = _Trial(attack, recording, tuple(parties), victim, None, seed, "cpu", None)
    try:
        knowledge, _ = trial.known()
        notes = attack.play(seat, knowledge, seed)
    except RemoteProtocolError as refusal:
        ignorant = Knowledge(classes=len(recording.data.classes), victim=victim)
        view = trial.view(ignorant)
        return not_applicable(attack, view, f"the protocol refused: {refusal}", seed)
    return replace(trial, played=Played(attack.name, notes)).result()


def knowledge_of(
    attack: AnsweringAttack, recording: Recording, party: str, victim: str, *, seed: int
) -> Knowledge:
    """Return what a malicious party that answers is declared to know when it begins."""
    return _Trial(attack, recording, (party,), victim, None, seed, "cpu", None).known()[0]


def result_of_answers(
    attack: AnsweringAttack,
    recording: Recording,
    party: str,
    victim: str,
    *,
    seed: int,
    notes: Mapping[str, Tensor],
) -> AttackResult:
    """Return the result of a malicious party that answered in this run."""
    played = Played(attack.name, notes)
    return _Trial(attack, recording, (party,), victim, None, seed, "cpu", None, played).result()


def headlines(results: Sequence[AttackResult]) -> tuple[AttackResult, ...]:
    """Return the worst result of each attack: the highest advantage of any adversary and options.

    Advantages of different attacks compare only where their `metric` is the same. Where an
    attack applied to nobody, its first result stands for it.
    """
    worst: dict[str, AttackResult] = {}
    for result in results:
        past = worst.get(result.attack)
        if past is None or _rank(result) > _rank(past):
            worst[result.attack] = result
    return tuple(worst.values())


def _rank(result: AttackResult) -> float:
    return float("-inf") if result.advantage is None else result.advantage


def _pairs(attack: Attack, recording: Recording) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every adversary of the attack's roles, with every party that has what it is after."""
    active = recording.data.active.name
    passives = tuple(party.name for party in recording.data.passives)
    for role in attack.roles:
        of_role = {"active": (active,), "passive": passives}.get(role, (role,))
        coalitions = [of_role] if attack.coalition == "all" else [(party,) for party in of_role]
        passives_too = attack.target == "features" or role == "active"
        victims = (active, *passives) if passives_too else (active,)
        for parties in coalitions:
            for victim in victims:
                # Parties of one role exchange nothing with each other.
                if victim not in of_role:
                    yield parties, victim


@dataclass(frozen=True)
class _Trial:
    """One attack by one adversary on one victim."""

    attack: Attack
    recording: Recording
    parties: tuple[str, ...]
    victim: str
    opened: Mapping[int, Tensor] | None
    seed: int
    device: str
    on_score: Callable[[AttackResult, Guess], None] | None
    played: Played | None = None

    def result(self) -> AttackResult:
        """Attack and score, or say why not."""
        attack = self.attack
        view = self.view(Knowledge(classes=len(self.recording.data.classes), victim=self.victim))
        outcome: str | tuple[Guess, Truth]
        try:
            knowledge, truth = self.known()
            view = self.view(knowledge)
            outcome = attack.applicable(view) or (self._guess(view), truth)
        except AttackError as error:
            outcome = attack.applicable(view) or str(error)
        if isinstance(outcome, str):
            return not_applicable(attack, view, outcome, self.seed)
        guess, truth = outcome
        result = score(attack, view, guess, truth, self.seed)
        if self.on_score is not None:
            self.on_score(result, guess)
        return result

    def _guess(self, view: AdversaryView) -> Guess:
        # Small fits get slower with more threads, and their sums would differ.
        with threadpool_limits(1):
            return self.attack.run(view, self.seed)

    def view(self, knowledge: Knowledge) -> AdversaryView:
        """What these parties saw, and what they know besides."""
        return view_of(
            self.recording,
            self.parties,
            knowledge=knowledge,
            behaviour=self.attack.behaviour,
            budget=Budget(iterations=self.attack.iterations, device=self.device),
            opened=self.opened,
            played=self.played,
        )

    def known(self) -> tuple[Knowledge, Truth]:
        """What the adversary is told, and what its guess will be compared with."""
        attack, recording = self.attack, self.recording
        if attack.target == "membership":
            candidates, members = reveal_candidates(recording, attack.candidates, self.seed)
            knowledge = Knowledge(
                classes=len(recording.data.classes),
                victim=self.victim,
                candidates=candidates,
                architecture=recording.config.model,
            )
            return knowledge, Truth.of_members(members, classes=knowledge.classes)
        truth = truth_of(recording)
        knowledge = Knowledge(
            classes=truth.classes,
            victim=self.victim,
            labels=reveal_labels(recording, attack.labels_per_class, self.seed),
            priors=class_priors(truth) if attack.priors else None,
            shadow=reveal_features(recording, self.victim, attack.shadow_rows, self.seed),
            encoder=reveal_encoder(recording, self.victim) if attack.white_box else None,
            public=self._public(),
        )
        return knowledge, truth

    def _public(self) -> Mapping[str, Tensor]:
        """Outsiders whom the adversary knows wholly, where its attack needs some."""
        if not isinstance(self.attack, AnsweringAttack):
            return {}
        names = (*self.parties, self.victim)
        return reveal_public(self.recording, names, self.attack.people, self.seed)
