"""Mounts the chosen attacks on a finished run, each by every adversary that it fits.

Run by: the experimenter, who holds the recording of all parties.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # no annotations

from attacks import ATTACKS
from attacks.interface import Attack, AttackError, AttackResult
from attacks.recorded import class_priors, reveal_features, reveal_labels, truth_of, view_of
from attacks.scoring import not_applicable, score
from attacks.view import AdversaryView, Budget, Knowledge
from secure_apfed.config import AttackChoice
from secure_apfed.config_problems import describe
from secure_apfed.errors import ConfigError
from secure_apfed.runs import Recording

__all__ = ["headlines", "mount", "prepare"]


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
    recording: Recording, choices: Iterable[AttackChoice], *, seed: int
) -> tuple[AttackResult, ...]:
    """Return one result for each chosen attack and adversary, in this order.

    All options are checked before the first attack starts.

    Args:
        recording: of a finished run.
        choices: names and options.
        seed: of the known rows and of the attacks.

    Raises:
        ConfigError: an unknown attack or option, or a value out of range.
    """
    attacks = [prepare(choice) for choice in choices]
    return tuple(
        _attack(attack, recording, trial, seed)
        for attack in attacks
        for trial in _trials(attack, recording)
    )


def headlines(results: Sequence[AttackResult]) -> tuple[AttackResult, ...]:
    """Return the worst result of each attack: that of the adversary with the highest advantage.

    Where an attack applied to nobody, its first result stands for it.
    """
    worst: dict[str, AttackResult] = {}
    for result in results:
        past = worst.get(result.attack)
        if past is None or _rank(result) > _rank(past):
            worst[result.attack] = result
    return tuple(worst.values())


def _rank(result: AttackResult) -> float:
    return float("-inf") if result.advantage is None else result.advantage


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """Who attacks whom: one result."""

    parties: tuple[str, ...]
    victim: str


def _trials(attack: Attack, recording: Recording) -> Iterator[_Trial]:
    """Every adversary of the attack's roles, against every party that has what it is after."""
    active = recording.data.active.name
    passives = tuple(party.name for party in recording.data.passives)
    for role in attack.roles:
        of_role = {"active": (active,), "passive": passives}.get(role, (role,))
        coalitions = [of_role] if attack.coalition == "all" else [(party,) for party in of_role]
        victims = (active,) if attack.target == "labels" else (active, *passives)
        for parties in coalitions:
            for victim in victims:
                # Parties of one role exchange nothing with each other.
                if victim not in of_role:
                    yield _Trial(parties=parties, victim=victim)


def _attack(attack: Attack, recording: Recording, trial: _Trial, seed: int) -> AttackResult:
    nothing = Knowledge(classes=len(recording.data.classes), victim=trial.victim)
    ignorant = _view(attack, recording, trial, nothing)
    try:
        view = _view(attack, recording, trial, _knowledge(attack, recording, trial, seed))
    except AttackError as error:
        why = attack.applicable(ignorant) or str(error)
        return not_applicable(attack, ignorant, why, seed)
    reason = attack.applicable(view)
    if reason is not None:
        return not_applicable(attack, view, reason, seed)
    # Small fits get slower with more threads, and sums differ by the number of threads.
    with threadpool_limits(1):
        guess = attack.run(view, seed)
    return score(attack, view, guess, truth_of(recording), seed)


def _view(
    attack: Attack, recording: Recording, trial: _Trial, knowledge: Knowledge
) -> AdversaryView:
    return view_of(
        recording,
        trial.parties,
        knowledge=knowledge,
        behaviour=attack.behaviour,
        budget=Budget(iterations=attack.iterations),
    )


def _knowledge(attack: Attack, recording: Recording, trial: _Trial, seed: int) -> Knowledge:
    truth = truth_of(recording)
    return Knowledge(
        classes=truth.classes,
        victim=trial.victim,
        labels=reveal_labels(recording, attack.labels_per_class, seed),
        priors=class_priors(truth) if attack.priors else None,
        shadow=reveal_features(recording, trial.victim, attack.shadow_rows, seed),
    )
