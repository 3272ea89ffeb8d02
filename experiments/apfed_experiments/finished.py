"""A finished run, read from its folder, and the attacks that follow it.

Read by: everything that reports or compares runs. A folder may have been sent by somebody else, so
only plain files of limited size and of the types named here are read (`secure_apfed.base.files`),
and files whose digests the run stored must match them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from apfed_attacks.headlines import Headline, make_headlines
from apfed_attacks.interface import AttackResult
from apfed_experiments.baselines import BaselinesRecord, RunGain, load_baselines, measure_gain
from secure_apfed.base.files import load_json, make_private
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import CheckpointError
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import (
    Outcome,
    Recording,
    compute_guarantees,
    load_outcome,
    load_recording,
)
from secure_apfed.runs.worth import WhoHelped
from secure_apfed.settings.promises import Promise, find_worst_guarantee


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A finished run with its results.

    Attributes:
        config, outcome: settings, and stored metrics and guarantees of the run.
        attacks: results of the mounted attacks; None: no attack was mounted.
        local_models: local models of the active; None: not measured.
        influence: influence of each test row on the measure of the method's own inference; empty:
            not stored.
        gain: gain over the best local model, on the same test rows; None: not known.
        who_helped: loss of the model without each passive; None: not measured.
    """

    config: Config
    outcome: Outcome
    attacks: tuple[AttackResult, ...] | None
    local_models: BaselinesRecord | None = None
    influence: tuple[float, ...] = ()
    gain: RunGain | None = None
    who_helped: WhoHelped | None = None

    @property
    def epsilon_name(self) -> str:
        """The name of the method's main epsilon, such as "epsilon_x": a key of
        `promises.MEANING_BY_EPSILON`.
        """
        return self.config.method.epsilon_name

    @property
    def headlines(self) -> tuple[Headline, ...]:
        """The best attack of each leak direction (who reads whose what), or that none ran."""
        return make_headlines(self.attacks or (), self.config)

    @property
    def guarantees(self) -> tuple[Promise, ...]:
        """The guarantees on all kinds of messages, of each party."""
        return compute_guarantees(self.config, self.outcome)

    @property
    def weakest_guarantee(self) -> Promise:
        """The weakest guarantee of the kind `epsilon_name` on what leaves a party."""
        return find_worst_guarantee(self.guarantees, self.epsilon_name)

    @property
    def epsilon(self) -> float:
        """The epsilon of the weakest guarantee; inf: no guarantee, 0: nothing is sent."""
        return self.weakest_guarantee.epsilon or 0.0


def load_finished_run(path: Path) -> FinishedRun:
    """Return the results of the finished run in a folder.

    Raises CheckpointError: the run has not finished, or a file is missing, changed or of another
    version.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such run folder")
    folder = RunFolder(path)
    if not folder.result.is_file():
        unfinished = "the run has not finished; continue it with --resume"
        reason = unfinished if folder.config.is_file() else "it is no run folder"
        raise CheckpointError(f"{path}: has no result.json: {reason}")
    folder.check_digests(folder.config, folder.result)
    attacks_path = path / "attacks.json"
    outcome = load_outcome(folder)  # a newer version's is refused before its settings are read
    config = folder.load_config()
    local_models = (
        load_baselines(config, folder.local_models) if folder.local_models.is_file() else None
    )
    gain = None
    if local_models is not None:
        gain = local_models.gain or measure_gain(
            folder, config, local_models
        )  # older files store no gain
    return FinishedRun(
        config=config,
        outcome=outcome,
        attacks=load_json(attacks_path, tuple[AttackResult, ...])
        if attacks_path.is_file()
        else None,
        local_models=local_models,
        gain=gain,
        who_helped=(
            load_json(folder.who_helped, WhoHelped) if folder.who_helped.is_file() else None
        ),
    )


def mount_attacks(
    folder: Path,
    choices: Iterable[AttackChoice] | None = None,
    *,
    seed: int | None = None,
    device: torch.device | None = None,
    data: VerticalData | None = None,
    recording: Recording | None = None,
) -> tuple[AttackResult, ...]:
    """Mount attacks on a finished run, merge the results into attacks.json, and return all.

    Stored results of attacks that are not mounted now are kept.

    Args:
        folder: the run's folder.
        choices: attacks with options; None: those of the run's settings.
        seed: seed of the attacks; None: the run's.
        device: device that computes the attacks; None: the run's.
        data: tables of the run, if loaded already.
        recording: transcript and model of the run, if loaded already.

    Raises ConfigError: an attack or option is unknown. Raises CheckpointError: the folder is no
    finished run, or attacks.json holds something else.
    """
    recording = recording or load_recording(folder, data=data)
    make_private(folder)  # attacks.json holds what attacks read: only the owner may enter
    config = recording.config
    chosen_attacks = tuple(config.attacks if choices is None else choices)
    results: tuple[AttackResult, ...] = ()
    if chosen_attacks:  # the import is slow, and not needed without attacks
        from apfed_attacks.run import run_attacks
        from apfed_attacks.table import expand_choices

        chosen_attacks = expand_choices(chosen_attacks)
        seed = config.seed if seed is None else seed
        results = run_attacks(recording, chosen_attacks, seed=seed, device=device)
    path = folder / "attacks.json"
    mounted_names = {choice.name for choice in chosen_attacks}
    try:
        stored_results = load_json(path, tuple[AttackResult, ...]) if path.is_file() else ()
    except CheckpointError as error:
        raise CheckpointError(f"{error}; or remove it and attack again") from None
    kept_results = (result for result in stored_results if result.attack not in mounted_names)
    all_results = (*kept_results, *results)
    RunFolder(folder).write_json(path, [result.as_json() for result in all_results])
    return all_results
