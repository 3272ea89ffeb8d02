"""Mounts the chosen attacks on a finished run, each by every adversary that it fits.

Run by: the experimenter, who holds the recording of all parties.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from pydantic import ValidationError
from torch import Tensor

from apfed_attacks import ATTACKS
from apfed_attacks.interface import Attack, AttackResult, Guess
from apfed_attacks.run import Trial
from secure_apfed.config import AttackChoice
from secure_apfed.config.file import describe
from secure_apfed.errors import ConfigError
from secure_apfed.runs.outcome import Recording
from secure_apfed.seeds import undisturbed
from secure_apfed.settings import unknown_name

__all__ = ["ALL", "expand", "full_suite", "headlines", "mount", "prepare"]

ALL = "all"
"""The name that stands for every attack, as in `attacks: all`."""


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


def expand(choices: Iterable[AttackChoice]) -> tuple[AttackChoice, ...]:
    """Return the same choices, checked, with the full suite in the place of "all".

    Raises:
        ConfigError: an unknown attack or option, or a value out of range.
    """
    found: list[AttackChoice] = []
    for choice in choices:
        if choice.name == ALL and choice.options:
            raise ConfigError(
                f"attacks: {ALL} mounts each attack with its usual options and takes none, got "
                f"{', '.join(choice.options)}; name the attack that they are of beside it"
            )
        found += full_suite() if choice.name == ALL else [choice]
    for choice in found:
        prepare(choice)
    return tuple(found)


def prepare(choice: AttackChoice) -> Attack:
    """Return the attack of a config's entry, its options checked.

    Raises:
        ConfigError: an unknown attack or option, or a value out of range.
    """
    if choice.name not in ATTACKS:
        raise ConfigError(f"attacks: {unknown_name(choice.name, ATTACKS)}")
    kind = ATTACKS[choice.name]
    try:
        return kind.model_validate(choice.options)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, path))} {problem}"
            for path, problem in describe(kind, error, choice.options)
        )
        raise ConfigError(f"attacks: {choice.name}: options: {problems}") from error


@undisturbed()
def mount(
    recording: Recording,
    choices: Iterable[AttackChoice],
    *,
    seed: int,
    opened: Mapping[int, Tensor] | None = None,
    device: torch.device | None = None,
    on_score: Callable[[AttackResult, Guess], None] | None = None,
) -> tuple[AttackResult, ...]:
    """Return one result for each chosen attack and adversary, in this order.

    All options are checked before the first attack starts.

    Args:
        recording: of a finished run.
        choices: names and options; "all" is the full suite.
        seed: of the known rows and of the attacks.
        opened: step -> (B, D) sums as the active decoded them, instead of those recorded.
        device: where attacks compute; by default where the run did.
        on_score: told of every result that applies, with the guess that it scores.

    Raises:
        ConfigError: an unknown attack or option, or a value out of range.
    """
    attacks = [prepare(choice) for choice in expand(choices)]
    return tuple(
        Trial(
            attack, recording, parties, victim, seed=seed,
            opened=opened, device=device, on_score=on_score,
        ).result()
        for attack in attacks
        for parties, victim in _pairs(attack, recording)
    )  # fmt: skip


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
