"""Mounts the chosen attacks on a finished run, each by every adversary that can mount it.

Run by: the experimenter, who holds the recording of all parties.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from traceback import extract_tb
from typing import Any

import torch

from apfed_attacks import recorded
from apfed_attacks.decoys import compute_guesses
from apfed_attacks.interface import Attack, AttackResult, Guess
from apfed_attacks.live.strategy import AnsweringAttack
from apfed_attacks.people.membership import AveragedMembership
from apfed_attacks.scoring import Truth, check_guess, make_inapplicable_result, score_guess
from apfed_attacks.table import expand_choices, prepare_attack
from apfed_attacks.view import AdversaryView, AttackError, GuessError, Knowledge, PlayedAttack
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.base.working import report_work
from secure_apfed.config import AttackChoice
from secure_apfed.errors import ApfedError, ModelError
from secure_apfed.learning.descent import find_device
from secure_apfed.measures.tasks import TASKS
from secure_apfed.networks.models import limit_threads_for
from secure_apfed.runs.outcome import Recording

__all__ = ["Trial", "name_failures", "run_attacks"]


@isolate_torch_modes()
def run_attacks(
    recording: Recording,
    choices: Iterable[AttackChoice],
    *,
    seed: int,
    device: torch.device | None = None,
    on_score: Callable[[AttackResult, Guess], None] | None = None,
) -> tuple[AttackResult, ...]:
    """Return one result for each chosen attack, adversary and victim, in order.

    All options are checked, as by `prepare_attack`, before the first attack starts.

    `choices`: attacks with options; "all": every attack with every set of its usual options.
    `seed`: seed of the attacks. `device`: where attacks compute; None: where the run did.
    `on_score`: function that is called with each result that applies, and its guess; None: not
    called.
    """
    attacks = [prepare_attack(choice) for choice in expand_choices(choices)]
    settings: Any = {"seed": seed, "device": device, "on_score": on_score}
    shapes = [table.shape for table in recording.data.tables]
    batch = recording.config.train.batch_size
    with limit_threads_for(recording.config.model, batch, shapes):
        trials = [
            Trial(attack, recording, parties, victim, **settings)
            for attack in attacks
            for parties, victim in _iter_pairs(attack, recording)
        ]
        return tuple(_iter_results(trials))


def _iter_results(trials: Sequence["Trial"]) -> Iterator[AttackResult]:
    """Yield each trial's result, and report how many are done."""
    for number, trial in enumerate(trials):
        report_work("attacks", number, len(trials), trial.attack.name)
        yield trial.compute_result()
    report_work("attacks", len(trials), len(trials))


def _iter_pairs(attack: Attack, recording: Recording) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every adversary (coalition) of the attack's roles, with every party that it could
    attack.
    """
    active = recording.data.active.name
    passives = tuple(party.name for party in recording.data.passives)
    for role in attack.roles:
        role_parties = {"active": (active,), "passive": passives}.get(role, (role,))
        if attack.coalition == "all":
            coalitions = [role_parties]
        else:
            coalitions = [(party,) for party in role_parties]
        if role == "aggregator":
            victims = passives  # whose contributions it adds
        elif role == "active" or attack.target == "features":
            victims = (active, *passives)
        else:
            victims = (active,)
        for parties in coalitions:
            for victim in victims:
                # Parties of one role exchange nothing with each other.
                if victim not in role_parties:
                    yield parties, victim


@dataclass(frozen=True)
class Trial:
    """An attack by one adversary on one victim.

    Attributes:
        attack: the attack with its options.
        recording: record of the run that is attacked.
        parties: the adversary, and those that collude with it.
        victim: the party whose data the attack guesses.
        seed: seed of the choice of known rows and of the attack.
        device: where the attack computes; None: where the run did.
        on_score: function that is called with a result that applies, and its guess; None: not
            called.
        deviation: what a malicious adversary did during the run; None: nothing.
    """

    attack: Attack
    recording: Recording
    parties: tuple[str, ...]
    victim: str
    _: KW_ONLY
    seed: int
    device: torch.device | None = None
    on_score: Callable[[AttackResult, Guess], None] | None = None
    deviation: PlayedAttack | None = None

    def compute_result(self) -> AttackResult:
        """Reveal the adversary's knowledge, run the attack beside its decoys, and score it.

        A decoy is the attack on releases of other rows, a baseline. An AttackError becomes a result
        that does not apply, with its text as the reason.

        Raises GuessError: the guess cannot be scored. Raises ModelError: an attack from outside
        this package failed; the message names it and the line.
        """
        attack = self.attack
        view = self.build_view(self.make_empty_knowledge())
        task = self.recording.config.task
        if (other_task := TASKS[task].not_attacked.get(attack.target)) is not None:
            return make_inapplicable_result(
                attack, view, f"task is {task}: {other_task}", self.seed
            )
        try:
            knowledge, truth = self.reveal_knowledge()
            view = self.build_view(knowledge)
            if (reason := attack.explain_inapplicability(view)) is not None:
                return make_inapplicable_result(attack, view, reason, self.seed)
            with name_failures(attack):
                (guess,) = compute_guesses(
                    attack,
                    view,
                    self.seed,
                    check=partial(check_guess, attack, view, truth=truth),
                )
            result = score_guess(attack, view, guess, truth, self.seed)
        except GuessError as error:
            kind = type(attack)
            raise GuessError(f"attacks: {kind.__module__}:{kind.__name__}: {error}") from error
        except AttackError as error:
            return make_inapplicable_result(
                attack, view, attack.explain_inapplicability(view) or str(error), self.seed
            )
        if self.on_score is not None:
            self.on_score(result, guess)
        return result

    def build_view(self, knowledge: Knowledge) -> AdversaryView:
        """Return what the parties saw, with this knowledge, as the attack may read it."""
        return recorded.make_view(
            self.recording,
            self.parties,
            knowledge=knowledge,
            behaviour=self.attack.behaviour,
            deviation=self.deviation,
            iterations=self.attack.iterations,
            device=self._device,
        )

    @property
    def _device(self) -> torch.device:
        """Return the device where the attack computes."""
        return self.device or find_device(self.recording.config.train.device)

    def make_empty_knowledge(self) -> Knowledge:
        """Return the knowledge of an adversary that knows only the classes and its victim."""
        return Knowledge(classes=len(self.recording.data.classes), victim=self.victim)

    def reveal_knowledge(self) -> tuple[Knowledge, Truth]:
        """Return the knowledge that the attack's options give, and the truth to score its guess by.

        Raises AttackError: the run does not have what the attack is about.
        """
        if self.attack.target == "membership":
            fields, truth = self._reveal_candidates()
        else:
            fields, truth = self._reveal_known_rows()
        return replace(self.make_empty_knowledge(), **fields).to(self._device), truth

    def _reveal_candidates(self) -> tuple[dict[str, Any], Truth]:
        """Return the fields of `Knowledge` for an attack on membership, and who trained."""
        attack = self.attack
        recording = self.recording
        seed = self.seed
        fields: dict[str, Any]
        if isinstance(attack, AveragedMembership):
            if recorded.describe_exchange(recording.config).opens != "weights":
                raise AttackError("the parties average no weights")
            candidates, members = recorded.reveal_people(
                recording, self.parties[0], self.victim, attack.candidates, seed, attack.strangers
            )
            fields = {"alike": recorded.build_local_training(recording, seed)}
        else:
            candidates, members = recorded.reveal_candidates(recording, attack.candidates, seed)
            fields = {"architecture": recorded.reveal_architecture(recording)}
        truth = Truth.for_members(members, classes=len(recording.data.classes))
        return {**fields, "candidates": candidates}, truth

    def _reveal_known_rows(self) -> tuple[dict[str, Any], Truth]:
        """Return the fields of `Knowledge` for an attack on labels or features, and their truth."""
        attack = self.attack
        recording = self.recording
        victim = self.victim
        seed = self.seed
        truth = recorded.reveal_truth(recording, victim)
        fields: dict[str, Any] = {
            "labels": recorded.reveal_labels(recording, attack.labels_per_class, seed),
            "priors": truth.compute_class_priors() if attack.priors else None,
            "shadow": recorded.reveal_features(recording, victim, attack.shadow_rows, seed),
            "encoder": recorded.reveal_encoder(recording, victim) if attack.white_box else None,
            "order": recorded.reveal_order(recording) if attack.told_order else {},
        }
        if isinstance(attack, AnsweringAttack):
            names = *self.parties, victim
            fields["public"] = recorded.reveal_public(recording, names, attack.people, seed)
        return fields, truth


@contextmanager
def name_failures(attack: Attack) -> Iterator[None]:
    """Name the user's own attack, and the line of its code, in any error that it raises in this
    block.

    Raises ModelError in place of that error. Errors meant for people, and those of this package's
    own attacks, are passed on unchanged.
    """
    kind = type(attack)
    try:
        yield
    except ApfedError:
        raise
    except Exception as error:
        if kind.__module__.split(".")[0] == __name__.split(".")[0]:
            raise
        module = sys.modules.get(kind.__module__)
        source = getattr(module, "__file__", None)
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename == source]
        place = f" in line {frames[-1].lineno} of {source}" if frames else ""
        raise ModelError(
            f"attacks: {kind.__module__}:{kind.__name__} failed{place}: "
            f"{type(error).__name__}: {error}"
        ) from error
