"""Plays malicious attacks in live runs and scores them like any other.

Run by: the experimenter, who plays all parties (see `attacks.live.apfed`).
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from attacks.interface import AttackResult
from attacks.live.apfed import LiveRun
from attacks.live.joint import JointRun
from attacks.live.strategy import ActiveAttack, AnsweringAttack
from attacks.live.unprotected import ALL_RULES, Rule
from attacks.recorded import truth_of
from attacks.run import knowledge_of, result_of, result_of_answers
from secure_apfed.config import Config
from secure_apfed.contract import RepresentationTerms
from secure_apfed.data import VerticalData, load_data

__all__ = ["play", "play_active", "play_passive"]


def play(
    attack: ActiveAttack,
    config: Config,
    *,
    victims: Sequence[str] | None = None,
    rules: Collection[Rule] = ALL_RULES,
    honest_epochs: int = 1,
    data: VerticalData | None = None,
    seed: int = 0,
) -> tuple[AttackResult, ...]:
    """Play the attack against each victim, in a session of its own; score it like any other.

    A run that a party refused gives a result that does not apply, whose reason starts with
    "the protocol refused".

    Args:
        attack: by the active.
        config: of the runs.
        victims: passives; None: each of them.
        rules: what the protocol holds the active to.
        honest_epochs: of training before the active deviates.
        data: of the runs, where it is loaded already.
        seed: of the known rows and of the attack.
    """
    data = data or load_data(config.data, seed=config.seed)
    alignment: Mapping[str, Tensor] | None = None
    results = []
    for victim in victims or [table.name for table in data.passives]:
        run = LiveRun(config, data, rules=rules, alignment=alignment)
        alignment = run.method.alignment
        run.train(honest_epochs)
        results.append(
            result_of(attack, run.recording, (data.active.name,), victim, seed=seed, seat=run)
        )
    return tuple(results)


def play_passive(
    attack: AnsweringAttack,
    config: Config,
    passive: str,
    *,
    data: VerticalData | None = None,
    seed: int = 0,
) -> AttackResult:
    """Train all of the config's epochs with an adversary in this passive's place; score it."""
    run = LiveRun(config, data)
    active = run.data.active.name
    return _play_answers(attack, run, passive, active, passive, run.terms, seed)


def play_active(
    attack: AnsweringAttack,
    config: Config,
    victim: str,
    *,
    data: VerticalData | None = None,
    seed: int = 0,
) -> AttackResult:
    """Train a config of TVFL with an adversary in the active's place; score it on one passive."""
    run = JointRun(config, data)
    active = run.data.active.name
    return _play_answers(attack, run, active, victim, victim, run.terms(victim), seed)


def _play_answers(
    attack: AnsweringAttack,
    run: LiveRun | JointRun,
    adversary: str,
    victim: str,
    passive: str,
    terms: RepresentationTerms,
    seed: int,
) -> AttackResult:
    """Let `adversary` answer what goes over the link of `passive` in all epochs; score it."""
    before = run.recording
    knowledge = knowledge_of(attack, before, adversary, victim, seed=seed)
    strategy = attack.begin(terms, knowledge, truth_of(before).features[adversary], seed)
    run.hand_over(passive, strategy)
    run.train(run.config.train.epochs)
    return result_of_answers(
        attack, run.recording, adversary, victim, seed=seed, notes=strategy.notes()
    )
