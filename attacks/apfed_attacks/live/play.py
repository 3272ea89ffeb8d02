"""Plays malicious attacks in live runs and scores them like any other.

Run by: the experimenter, who plays all parties (see `apfed_attacks.live.runs`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from apfed_attacks.columns import own_columns
from apfed_attacks.interface import AttackResult
from apfed_attacks.live.runs import ALL_RULES, JointRun, LiveRun, Rule
from apfed_attacks.live.strategy import ActiveAttack, AnsweringAttack
from apfed_attacks.run import Trial
from apfed_attacks.scoring import not_applicable
from apfed_attacks.view import Played
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.contract import RepresentationTerms
from secure_apfed.data import VerticalData, load_data

__all__ = ["play", "play_active", "play_from", "play_passive"]


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

    A run that a party refused gives a result that does not apply (see `play_from`).

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
        alignment = run.alignment
        run.train(honest_epochs)
        results.append(play_from(run, attack, victim, seed=seed))
    return tuple(results)


def play_from(run: LiveRun, attack: ActiveAttack, victim: str, *, seed: int) -> AttackResult:
    """Play the attack from the active's seat in a run that goes on; score it like any other.

    A refusal is a result that does not apply, for that reason.
    """
    trial = Trial(attack, run.recording, (run.data.active.name,), victim, seed=seed)
    try:
        knowledge, _ = trial.known()
        notes = attack.play(run, knowledge, seed)
    except RemoteProtocolError as refusal:
        reason = f"the protocol refused: {refusal}"
        return not_applicable(attack, trial.view(trial.ignorance()), reason, seed)
    return replace(trial, played=Played(attack.name, notes)).result()


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
    trial = Trial(attack, run.recording, (adversary,), victim, seed=seed)
    knowledge, truth = trial.known()
    own_AF = own_columns(trial.view(knowledge), torch.arange(len(truth.labels)))
    strategy = attack.begin(terms, knowledge, own_AF, seed)
    run.hand_over(passive, strategy)
    run.train(run.config.train.epochs)
    return replace(trial, played=Played(attack.name, strategy.notes())).result()
