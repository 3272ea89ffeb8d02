"""One attack by one adversary on one victim: what it is told, its guess, and its score.

Run by: the experimenter, who holds the recording of all parties.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache

import torch
from sklearn import config_context
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # no annotations
from torch import Tensor

from apfed_attacks.interface import Attack, AttackResult, Guess
from apfed_attacks.live.strategy import AnsweringAttack
from apfed_attacks.people.averaged_membership import AveragedMembership
from apfed_attacks.recorded import (
    class_priors,
    exchange_of,
    reveal_candidates,
    reveal_encoder,
    reveal_features,
    reveal_labels,
    reveal_people,
    reveal_public,
    trained_alike,
    truth_of,
    view_of,
)
from apfed_attacks.run import NoDecoyError, exchanged, with_decoys
from apfed_attacks.scoring import Truth, not_applicable, score
from apfed_attacks.view import AdversaryView, AttackError, Budget, Knowledge, Played
from secure_apfed.learning.descent import find_device
from secure_apfed.runs.outcome import Recording
from secure_apfed.tasks import TASKS

__all__ = ["Trial"]


@cache
def _libraries() -> ThreadpoolController:
    """What computes in threads; looked up once, since it reads the list of all loaded libraries."""
    return ThreadpoolController()


@dataclass(frozen=True)
class Trial:
    """One attack by one adversary on one victim.

    Attributes:
        attack, recording: what is mounted on what.
        parties: the adversary, and those that collude with it; victim: who holds what it is after.
        seed: of the known rows and of the attack.
        opened: step -> (B, D) sums as the active decoded them, instead of those recorded.
        device: where the attack computes; by default where the run did.
        on_score: told of a result that applies, with the guess that it scores.
        played: what the adversary played in place of its part.
    """

    attack: Attack
    recording: Recording
    parties: tuple[str, ...]
    victim: str
    _: KW_ONLY
    seed: int
    opened: Mapping[int, Tensor] | None = None
    device: torch.device | None = None
    on_score: Callable[[AttackResult, Guess], None] | None = None
    played: Played | None = None

    def result(self) -> AttackResult:
        """Attack and score, or say why not."""
        attack = self.attack
        view = self.view(self.ignorance())
        other_task = TASKS[self.recording.config.task].not_attacked.get(attack.target)
        if other_task is not None:
            reason = f"task is {self.recording.config.task}: {other_task}"
            return not_applicable(attack, view, reason, self.seed)
        outcome: str | tuple[AttackResult, Guess]
        try:
            knowledge, truth = self.known()
            view = self.view(knowledge)
            outcome = attack.why_not(view) or self._scored(view, truth)
        except AttackError as error:
            outcome = attack.why_not(view) or str(error)
        if isinstance(outcome, str):
            return not_applicable(attack, view, outcome, self.seed)
        result, guess = outcome
        if self.on_score is not None:
            self.on_score(result, guess)
        return result

    def _scored(self, view: AdversaryView, truth: Truth) -> tuple[AttackResult, Guess]:
        guess = self._guess(view)
        return score(self.attack, view, guess, truth, self.seed), guess

    def _guess(self, view: AdversaryView) -> Guess:
        # Small fits get slower with more threads, and their sums would differ.
        with _libraries().limit(limits=1), config_context(skip_parameter_validation=True):
            guess = self.attack.run(view, self.seed)
            decoy = exchanged(view, self.seed) if self.attack.exchangeable else None
            if decoy is None:
                return guess
            try:
                return with_decoys(guess, self.attack.run(decoy, self.seed))
            except NoDecoyError:
                raise
            except AttackError:
                return guess  # what the attack found is told, whatever becomes of its decoy

    def view(self, knowledge: Knowledge) -> AdversaryView:
        """What these parties saw, and what they know besides."""
        return view_of(
            self.recording,
            self.parties,
            knowledge=knowledge,
            behaviour=self.attack.behaviour,
            budget=Budget(iterations=self.attack.iterations, device=self._device),
            opened=self.opened,
            played=self.played,
        )

    @property
    def _device(self) -> torch.device:
        return self.device or find_device(self.recording.config.train.device)

    def ignorance(self) -> Knowledge:
        """What the adversary knows where it is told nothing."""
        return Knowledge(classes=len(self.recording.data.classes), victim=self.victim)

    def known(self) -> tuple[Knowledge, Truth]:
        """What the adversary is told, and what its guess will be compared with."""
        knowledge, truth = self._known()
        return knowledge.to(self._device), truth

    def _known(self) -> tuple[Knowledge, Truth]:
        attack, recording = self.attack, self.recording
        if isinstance(attack, AveragedMembership):
            return self._of_average(attack)
        if attack.target == "membership":
            candidates, members = reveal_candidates(recording, attack.candidates, self.seed)
            knowledge = Knowledge(
                classes=len(recording.data.classes),
                victim=self.victim,
                candidates=candidates,
                architecture=recording.config.model,
            )
            return knowledge, Truth.of_members(members, classes=knowledge.classes)
        truth = truth_of(recording, self.victim)
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

    def _of_average(self, attack: AveragedMembership) -> tuple[Knowledge, Truth]:
        recording, victim, seed = self.recording, self.victim, self.seed
        if exchange_of(recording.config).opens != "weights":
            raise AttackError("the parties average no weights")
        candidates, members = reveal_people(
            recording, self.parties[0], victim, attack.candidates, seed, attack.strangers
        )
        knowledge = Knowledge(
            classes=len(recording.data.classes), victim=victim, candidates=candidates,
            alike=trained_alike(recording, seed),
        )  # fmt: skip
        return knowledge, Truth.of_members(members, classes=knowledge.classes)

    def _public(self) -> Mapping[str, Tensor]:
        """Outsiders whom the adversary knows wholly, where its attack needs some."""
        if not isinstance(self.attack, AnsweringAttack):
            return {}
        names = (*self.parties, self.victim)
        return reveal_public(self.recording, names, self.attack.people, self.seed)
