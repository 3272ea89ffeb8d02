"""Mounts the chosen attacks on a finished run, each by every adversary that can mount it.

Run by: the experimenter, who holds the recording of all parties.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, partial
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from sklearn import config_context
from threadpoolctl import ThreadpoolController
from torch import Tensor

from apfed_attacks import ATTACKS, recorded
from apfed_attacks.interface import Attack, AttackResult, Guess, Prediction
from apfed_attacks.live.strategy import AnsweringAttack
from apfed_attacks.people.membership import AveragedMembership
from apfed_attacks.scoring import Truth, check_guess, make_inapplicable_result, score_guess
from apfed_attacks.table import find_attack
from apfed_attacks.view import (
    AdversaryView,
    AttackError,
    GuessError,
    Knowledge,
    PlayedAttack,
    list_seen_positions,
)
from secure_apfed.base.seeds import derive_seed, isolate_torch_modes, shuffle_rows
from secure_apfed.base.working import report_work
from secure_apfed.config import AttackChoice
from secure_apfed.config.file import describe_errors
from secure_apfed.errors import ApfedError, ConfigError, ModelError
from secure_apfed.learning.descent import find_device
from secure_apfed.measures.tasks import TASKS
from secure_apfed.networks.models import limit_threads_for
from secure_apfed.runs.outcome import Recording

__all__ = [
    "ALL",
    "Trial",
    "add_decoys",
    "compute_guesses",
    "exchange_releases",
    "expand_choices",
    "full_suite",
    "name_failures",
    "prepare_attack",
    "run_attacks",
]

ALL = "all"
"""The name that stands for every attack, as in `attacks: all`."""


def full_suite(names: Iterable[str] = tuple(ATTACKS)) -> tuple[AttackChoice, ...]:
    """Return the named attacks, each with every set of options that its class proposes."""
    return tuple(
        AttackChoice(name=name, options=dict(options))
        for name in names
        for options in type(prepare_attack(AttackChoice(name=name))).suite
    )


def expand_choices(choices: Iterable[AttackChoice]) -> tuple[AttackChoice, ...]:
    """Return the choices, checked as by `prepare_attack`, with the full suite in place of "all"."""
    expanded: list[AttackChoice] = []
    for choice in choices:
        if choice.name == ALL and choice.options:
            raise ConfigError(
                f"attacks: {ALL} mounts each attack with its usual options and takes none, got "
                f"{', '.join(choice.options)}; name the attack that they are of beside it"
            )
        expanded += full_suite() if choice.name == ALL else [choice]
    for choice in expanded:
        prepare_attack(choice)
    return tuple(expanded)


def prepare_attack(choice: AttackChoice) -> Attack:
    """Return the attack of a config's entry. ConfigError: an option is unknown or out of range."""
    kind = find_attack(choice.name)
    try:
        return kind.model_validate(choice.options)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, path))} {problem}"
            for path, problem in describe_errors(kind, error, choice.options)
        )
        raise ConfigError(f"attacks: {choice.name}: options: {problems}") from error


@isolate_torch_modes()
def run_attacks(
    recording: Recording,
    choices: Iterable[AttackChoice],
    *,
    seed: int,
    device: torch.device | None = None,
    on_score: Callable[[AttackResult, Guess], None] | None = None,
) -> tuple[AttackResult, ...]:
    """Return one result for each chosen attack ("all": the full suite) and adversary, in order.

    All options are checked, as by `prepare_attack`, before the first attack starts; see `Trial`.

    `choices`: attacks with options. `on_score`: called with each result that applies, and its
    guess; None: not called.
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
    """Yield every adversary of the attack's roles, with every party that it could attack."""
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


# Libraries with threads of their own. Looked up once, since that reads the list of all loaded ones.
_find_libraries = cache(ThreadpoolController)


@dataclass(frozen=True)
class Trial:
    """An attack by one adversary on one victim.

    Attributes:
        recording: record of the run that is attacked.
        parties: the adversary, and those that collude with it.
        victim: the party whose data the attack guesses.
        seed: seed of the choice of known rows and of the attack.
        device: where the attack computes; None: where the run did.
        on_score: called with a result that applies, and the guess that it scores; None: not called.
        played: what a malicious adversary did during the run; None: nothing.
    """

    attack: Attack
    recording: Recording
    parties: tuple[str, ...]
    victim: str
    _: KW_ONLY
    seed: int
    device: torch.device | None = None
    on_score: Callable[[AttackResult, Guess], None] | None = None
    played: PlayedAttack | None = None

    def compute_result(self) -> AttackResult:
        """Reveal the adversary's knowledge, run the attack beside its decoys, and score it.

        An AttackError becomes a result that does not apply, with its text as the reason. Raises
        ModelError: an attack from outside this package failed; names it and the line.
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
        """Return what the parties saw, with this knowledge."""
        return recorded.view_of(
            self.recording,
            self.parties,
            knowledge=knowledge,
            behaviour=self.attack.behaviour,
            played=self.played,
            iterations=self.attack.iterations,
            device=self._device,
        )

    @property
    def _device(self) -> torch.device:
        """Return the device where the attack computes."""
        return self.device or find_device(self.recording.config.train.device)

    def make_empty_knowledge(self) -> Knowledge:
        """Return the knowledge of an adversary that knows classes and victim alone."""
        return Knowledge(classes=len(self.recording.data.classes), victim=self.victim)

    def reveal_knowledge(self) -> tuple[Knowledge, Truth]:
        """Return the knowledge that the attack's options give, and the truth to score its guess by.

        Raises AttackError: the run does not have what the attack is about.
        """
        if self.attack.target == "membership":
            facts, truth = self._reveal_candidates()
        else:
            facts, truth = self._reveal_known_rows()
        return replace(self.make_empty_knowledge(), **facts).to(self._device), truth

    def _reveal_candidates(self) -> tuple[dict[str, Any], Truth]:
        """Return the `Knowledge` of an attack on membership, and which candidates trained."""
        attack = self.attack
        recording = self.recording
        seed = self.seed
        facts: dict[str, Any]
        if isinstance(attack, AveragedMembership):
            if recorded.exchange_of(recording.config).opens != "weights":
                raise AttackError("the parties average no weights")
            candidates, members = recorded.reveal_people(
                recording, self.parties[0], self.victim, attack.candidates, seed, attack.strangers
            )
            facts = {"alike": recorded.build_local_training(recording, seed)}
        else:
            candidates, members = recorded.reveal_candidates(recording, attack.candidates, seed)
            facts = {"architecture": recorded.reveal_architecture(recording)}
        truth = Truth.for_members(members, classes=len(recording.data.classes))
        return {**facts, "candidates": candidates}, truth

    def _reveal_known_rows(self) -> tuple[dict[str, Any], Truth]:
        """Return the fields of `Knowledge` for an attack on labels or features, and their truth."""
        attack = self.attack
        recording = self.recording
        victim = self.victim
        seed = self.seed
        truth = recorded.truth_of(recording, victim)
        facts: dict[str, Any] = {
            "labels": recorded.reveal_labels(recording, attack.labels_per_class, seed),
            "priors": recorded.class_priors(truth) if attack.priors else None,
            "shadow": recorded.reveal_features(recording, victim, attack.shadow_rows, seed),
            "encoder": recorded.reveal_encoder(recording, victim) if attack.white_box else None,
            "order": recorded.reveal_order(recording) if attack.told_order else {},
        }
        if isinstance(attack, AnsweringAttack):
            names = *self.parties, victim
            facts["public"] = recorded.reveal_public(recording, names, attack.people, seed)
        return facts, truth


@contextmanager
def name_failures(attack: Attack) -> Iterator[None]:
    """Name a user's own attack, and the line of it, in any error that it raises in this block.

    Raises ModelError in place of that error. Errors meant for people, and those of this package's
    attacks, are not changed.
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


def compute_guesses(
    attack: Attack,
    view: AdversaryView,
    seed: int,
    exchanges: int = 1,
    on_pass: Callable[[], None] = lambda: None,
    check: Callable[[Guess], None] = lambda guess: None,
) -> list[Guess]:
    """Return what the attack guesses, once with the decoys of each exchange of releases.

    `exchanges`: number of exchanges, and so of guesses. `on_pass`: called after each run of the
    attack; an error that it raises ends them. `check`: called with the first guess; it raises an
    error for one that cannot be scored.
    """
    # Small fits get slower with more threads, and their sums would differ.
    with _find_libraries().limit(limits=1), config_context(skip_parameter_validation=True):
        guesses = [attack.run(view, seed)] * exchanges
        check(guesses[0])
        on_pass()
        if not attack.is_exchangeable:
            return guesses
        for number, guess in enumerate(guesses):
            exchange_seed = derive_seed(seed, "exchange", number) if number else seed
            decoy_view = exchange_releases(view, exchange_seed)
            if decoy_view is None:
                continue
            try:
                decoy = attack.run(decoy_view, seed)
            except AttackError:
                continue  # the guess is kept without decoys
            guesses[number] = add_decoys(guess, decoy)
            on_pass()
        return guesses


def exchange_releases(view: AdversaryView, seed: int) -> AdversaryView | None:
    """Return `view` with every release attributed to another row; None if it shows no two rows.

    Columns of noise beside the own features make a probe better or worse by chance, and of many
    such variants the best looks good. A decoy has the same luck and knows nothing of any row. Where
    releases are independent of all that the adversary has, an attack and its decoys are
    exchangeable, so the expected advantage is exactly 0, whatever the attack (a permutation test;
    Good, 2005, Permutation, Parametric, and Bootstrap Tests of Hypotheses, Section 1.2). Baselines
    that compute functions of what the adversary has are left to the attack.

    The order is the same in all epochs. Rows are exchanged within a group of which equally much was
    seen: people whom a malicious adversary asked about; rows that trained, which got gradients or
    pseudo-labels, or of which a sum was revealed; and the others, which are test rows. Within each,
    people whom the victim holds and those whom it does not are groups of their own. So a decoy
    guesses the same rows.

    `seed`: seed of the random exchange.
    """
    observed, answered = list_seen_positions(view)
    asked = observed[:0]
    if view.deviation is not None:
        asked = view.deviation.notes.get("people", asked)
    groups = {
        "asked": asked.unique(),
        "answered": answered[~torch.isin(answered, asked)],
        "others": observed[~torch.isin(observed, torch.cat([asked, answered]))],
    }
    all_positions = torch.cat(list(groups.values()))
    if len(all_positions) < 2:
        return None
    stands_for = torch.arange(int(all_positions.max()) + 1)
    for name, group in groups.items():
        is_held_N = view.has_rows(view.knowledge.victim, group)
        for part, rows in ((name, group[is_held_N]), (f"{name}, not held", group[~is_held_N])):
            order = shuffle_rows(rows, seed, "attacks", "decoy", part)
            stands_for[order] = order.roll(1)  # of two rows or more, none keeps its own release
    return replace(view, stands_for=stands_for)


def add_decoys(guess: Guess, decoy: Guess) -> Guess:
    """Return `guess` with what the attack guessed from exchanged releases as its decoys.

    Those rows are kept that both guess; epochs may lack some.

    `decoy`: the guess of the same attack from a view whose releases were exchanged.

    Raises:
        AttackError: exchanging the releases changed nothing, so that the decoys would hide all that
            the attack found.
    """
    has_same_rows = torch.equal(guess.positions, decoy.positions)
    if has_same_rows and all(
        np.array_equal(prediction.values, decoy.attacks[name].values, equal_nan=True)
        for name, prediction in guess.attacks.items()
        if name in decoy.attacks
    ):
        raise AttackError(
            "exchanging releases between rows changes nothing: either all rows' are the same, or "
            "the attack reads them other than by apfed_attacks.view"
        )
    if has_same_rows:
        return replace(guess, decoys=decoy.attacks)
    is_common_N = torch.isin(guess.positions, decoy.positions)
    positions = guess.positions[is_common_N]
    order = decoy.positions.argsort()
    decoy_order = order[torch.searchsorted(decoy.positions[order], positions)]
    return Guess(
        positions=positions,
        attacks=_select_rows(guess.attacks, is_common_N),
        baselines=_select_rows(guess.baselines, is_common_N),
        references=_select_rows(guess.references, is_common_N),
        decoys=_select_rows(decoy.attacks, decoy_order),
    )


def _select_rows(predictions: Mapping[str, Prediction], rows: Tensor) -> dict[str, Prediction]:
    """Return the predictions for `rows`: indices, or true for each row that stays."""
    return {name: prediction.select_rows(rows.numpy()) for name, prediction in predictions.items()}
