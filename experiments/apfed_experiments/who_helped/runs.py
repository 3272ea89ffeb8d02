"""What one coalition is worth: the active's model after training with it, on labels held back.

Each is a run of its own with new networks, from the same rows and the same seed; test rows of the
configuration take no part. A run that can be simulated is, where its bytes need not be counted.
Figures of each run are kept in a file, so that a stopped study goes on.
"""

import hashlib
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_experiments.solo import fits_beside, taught_alone
from apfed_experiments.who_helped import Coalition
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.data.partition import choose_labelled
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.files import read_json, to_json, write_atomically
from secure_apfed.learning.descent import predictor_of
from secure_apfed.methods import ALONE
from secure_apfed.runs.outcome import Epsilon, Written
from secure_apfed.runs.run import run
from secure_apfed.seeds import derive_seed
from secure_apfed.settings.privacy import GuardSettings, LabelSettings
from secure_apfed.simulation import begin, finish, train, why_not
from secure_apfed.solo.kept import fits_kept_by

__all__ = ["CoalitionRun", "Measured", "held_back", "measure", "with_noise"]


class Measured(Written):
    """The file of one coalition's run.

    Attributes:
        settings: digest of all that the figures depend on.
        loss: mean cross-entropy on the labels held back, nats; accuracy: on the same rows.
        wire_bytes: of all links; None: simulated, nothing was sent.
        epsilon_x, epsilon_y: what the active spent on its features and labels.
        passives: what a person cost each passive of the coalition; inf without noise.
        delta: of these epsilons.
    """

    settings: str
    loss: float
    accuracy: float
    wire_bytes: int | None = None
    epsilon_x: Epsilon = 0.0
    epsilon_y: Epsilon = 0.0
    passives: Mapping[str, Epsilon] = {}
    delta: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CoalitionRun:
    """One coalition under one seed.

    Attributes:
        config: of all runs; folder: of their figures.
        coalition: passives that take part.
        seed: of rows, weights and what is held back.
        share: of the active's labelled rows that is held back.
        data: digest of own tables, see `files_digest`.
        noise: passives whose features are replaced by noise; a check of the measure.
        simulated: whether a run that can be simulated is.
    """

    config: Config
    folder: Path
    coalition: Coalition
    seed: int
    share: float
    data: str
    noise: tuple[str, ...] = ()
    simulated: bool = True

    @property
    def settings(self) -> str:
        """SHA-256 of all that the figures depend on; the code is not in it."""
        own = self.config.model_dump_json(exclude={"name", "seed", "party_seeds", "attacks"})
        files = (self.data,) if self.data else ()
        coalition = sorted(self.coalition)
        parts = (own, *files, coalition, self.seed, self.share, self.noise, self.simulated)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def path(self) -> Path:
        return self.folder / f"coalition-{self.settings[:16]}.json"


def measure(one: CoalitionRun) -> Measured:
    """Train with this coalition on one thread, unless its figures are kept, and measure.

    Raises:
        CheckpointError: its place holds something else.
        ApfedError: as `secure_apfed.run`.
    """
    torch.set_num_threads(1)
    if one.path.is_file():
        kept = read_json(one.path, Measured)
        if kept.settings != one.settings:
            raise CheckpointError(f"{one.path} is of another run; remove it and run again")
        return kept
    began = time.monotonic()
    config = _config_of(one)
    data = held_back(load_data(config.data, seed=one.seed), one.share, seed=one.seed)
    data = with_noise(data, one.noise, seed=one.seed)
    passives = tuple(table for table in data.passives if table.name in one.coalition)
    data = replace(data, passives=passives)
    with warnings.catch_warnings(), fits_kept_by(fits_beside(one.folder)):
        # Plain sums are unsafe by name, and the page says so.
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        spent, model = _trained(config, data, one)
    rows = data.test_rows
    assert data.active.labels is not None
    loss, accuracy = _figures(model, data.active.features[rows], data.active.labels[rows])
    if not math.isfinite(loss):
        raise ConfigError(
            f"training with {', '.join(sorted(one.coalition)) or 'nobody'} under seed {one.seed} "
            "diverged, so that nobody can be told apart; lower train.learning_rate"
        )
    found = spent.model_copy(
        update={"loss": loss, "accuracy": accuracy, "seconds": time.monotonic() - began}
    )
    one.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(one.path, to_json(found.model_dump()).encode())
    return found


def held_back(data: VerticalData, share: float, *, seed: int) -> VerticalData:
    """Put labelled training rows, drawn by class, in the place of the test rows.

    Raises:
        ConfigError: too few labels to hold any back.
    """
    assert data.active.labels is not None
    labelled = data.labelled_rows
    labels_n = data.active.labels[labelled].numpy()
    if data.targets is not None:  # numbers are drawn alike
        labels_n = np.zeros(len(labels_n), np.int64)
    learnt, classes = round((1 - share) * len(labelled)), len(np.unique(labels_n))
    if not classes <= learnt < len(labelled):
        raise ConfigError(
            f"{data.active.name} has {len(labelled)} labelled rows of {classes} classes; with "
            f"{share:g} of them held back {learnt} are left to learn from, and each class needs "
            "one there and at least one row is to be held back; label more, or hold back another "
            "share"
        )
    draw = derive_seed(seed, "held back for contributions")
    kept = choose_labelled(labels_n, float(learnt), seed=draw)
    chosen = torch.zeros(len(labelled), dtype=torch.bool)
    chosen[torch.from_numpy(kept)] = True
    back = labelled[~chosen]
    return replace(
        data,
        train_rows=data.train_rows[~torch.isin(data.train_rows, back)],
        test_rows=back,
        labelled=labelled[chosen],
    )


def with_noise(data: VerticalData, names: tuple[str, ...], *, seed: int) -> VerticalData:
    """Replace these passives' features by normal noise of their own means and deviations.

    Raises:
        ConfigError: there is no such passive.
    """
    known = [table.name for table in data.passives]
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"no passive is called {unknown[0]}; there are {', '.join(known)}")

    def noisy(features_N: Tensor, name: str) -> Tensor:
        draw = torch.Generator().manual_seed(derive_seed(seed, "noise in place of", name))
        noise_N = torch.randn(features_N.shape, generator=draw)
        return features_N.mean(0) + features_N.std(0) * noise_N

    passives = tuple(
        replace(table, features=noisy(table.features, table.name)) if table.name in names else table
        for table in data.passives
    )
    return replace(data, passives=passives)


def _config_of(one: CoalitionRun) -> Config:
    """With settings of the coalition's passives alone."""
    config = one.config
    named = {
        name: each for name, each in config.passives.items()
        if name in one.coalition or name == "default"
    }  # fmt: skip
    own: dict[str, Any] = {
        "seed": one.seed, "party_seeds": "shared_for_comparison", "passives": named
    }  # fmt: skip
    if config.secure_sum.threshold is not None:  # of all: each coalition asks as many as it has
        threshold = min(config.secure_sum.threshold, max(1, len(one.coalition)))
        own["secure_sum"] = config.secure_sum.model_copy(update={"threshold": threshold})
    return config.model_copy(update=own)


def _trained(config: Config, data: VerticalData, one: CoalitionRun) -> tuple[Measured, nn.Module]:
    """What was spent, and the active's model."""
    nothing = Measured(settings=one.settings, loss=math.nan, accuracy=math.nan)
    if not data.passives:
        return nothing.model_copy(update={"wire_bytes": 0}), _alone(config, data)
    if one.simulated and not why_not(config):
        unprotected = dict.fromkeys(one.coalition, math.inf)
        told = {"epsilon_x": math.inf, "epsilon_y": math.inf, "passives": unprotected}
        return nothing.model_copy(update=told), _simulated(config, data)
    result = run(config, None, data=data)
    accounts = result.contributions
    privacy = result.privacy
    told = {
        "wire_bytes": result.wire_bytes,
        "epsilon_x": privacy.epsilon_x,
        "epsilon_y": privacy.epsilon_y,
        "passives": {
            name: accounts[name]["epsilon"] if name in accounts else math.inf
            for name in sorted(one.coalition)
        },
        "delta": max([privacy.delta, *(each["delta"] for each in accounts.values())]),
    }
    model = result.recording.model
    assert model is not None
    return nothing.model_copy(update=told), model


def _alone(config: Config, data: VerticalData) -> nn.Module:
    """The active without anybody: nothing leaves it, so nothing is protected.

    Where passives vote, the student of votes that say nothing: it learns what the active believes.
    """
    if "passives vote" not in config.method.happens:
        without = {
            "method": ALONE, "guard": GuardSettings(mechanism="none"), "defences": (),
            "labels": LabelSettings(), "dp_sgd": None,
        }  # fmt: skip
        own_config = config.model_copy(update=without)
        return _played(own_config, data) if why_not(own_config) else _simulated(own_config, data)
    student = taught_alone(config, data)
    model = predictor_of(student.networks)
    assert model is not None
    return model


def _played(config: Config, data: VerticalData) -> nn.Module:
    model = run(config, None, data=data).recording.model
    assert model is not None
    return model


def _simulated(config: Config, data: VerticalData) -> nn.Module:
    began, session = time.monotonic(), begin(config, data)
    finish(session, config, step=train(session, config), began=began)
    model = predictor_of(session.learner.solo())
    assert model is not None
    return model


@torch.no_grad()
def _figures(model: nn.Module, features_V: Tensor, labels_V: Tensor) -> tuple[float, float]:
    """Mean cross-entropy in nats, and accuracy."""
    scores_VK = model(features_V.to(next(model.parameters()).dtype)).double()
    right_V = scores_VK.argmax(1) == labels_V
    return float(F.cross_entropy(scores_VK, labels_V)), float(right_V.double().mean())
