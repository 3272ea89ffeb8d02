"""From settings to noise and its accounts: guards, private updates, and the ledgers of both.

Run by: each party for what it sends itself. Its noise key is a secret of its own.
"""

import hashlib
import math
from pathlib import Path

from apfed_protocols.randomness import derive_key, fresh_key
from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.defences import Surroundings
from secure_apfed.errors import CheckpointError
from secure_apfed.learning.private_gradient import PrivateUpdates
from secure_apfed.methods.method import Keeper, Own, Secrets
from secure_apfed.methods.terms import asked_of
from secure_apfed.models import Shape
from secure_apfed.names import UPDATES, ReleaseFigure, log_file
from secure_apfed.privacy import (
    GradientGuard,
    Mechanism,
    PrivacyLedger,
    RepresentationGuard,
    WholeTraining,
    calibrate_updates,
    make_guard,
)
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.privacy.randomised_response import VoteResponse
from secure_apfed.privacy.release_log import holds_releases
from secure_apfed.settings.run import RunSettings

__all__ = [
    "fresh_secrets",
    "guard_for",
    "ledger_for",
    "open_ledger",
    "private_updates",
    "require_no_releases",
    "surroundings_of",
    "update_ledgers",
    "whole_training",
]


def fresh_secrets(
    config: RunSettings,
    name: str,
    *,
    identity: Identity | None = None,
    keeper: Keeper | None = None,
    logs: Path | None = None,
) -> Secrets:
    """What a party brings that begins: fresh secrets, or what the configuration derives."""
    seed = int.from_bytes(fresh_key()[:8], "big") >> 1
    return Secrets(
        identity=identity or fresh_identity(),
        noise_key=_noise_key(config, name),
        seed=seed if config.party_seeds == "secret" else config.seed,
        keeper=keeper,
        logs=logs,
    )


def _noise_key(config: RunSettings, party: str) -> bytes:
    if config.guard.noise == "secret":
        return fresh_key()
    return hashlib.sha256(f"noise of {party}, seed {config.seed}".encode()).digest()


def guard_for(own: Own) -> RepresentationGuard:
    """The guard of one party that releases representations, for as often as it is asked."""
    config = own.config
    return make_guard(
        config.guard,
        delta=config.delta,
        releases=asked_of(config).releases,
        key=own.secrets.noise_key,
    )


def open_ledger(
    own: Own,
    name: str,
    mechanism: Mechanism | SummedRelease | VoteResponse,
    *,
    delta: float,
    budget: float | None,
    rows: int,
    figure: ReleaseFigure = "epsilon_x",
) -> PrivacyLedger:
    """An account of this session, whose write-ahead log is `ledger-NAME.jsonl`."""
    ledger = PrivacyLedger(
        mechanism,
        delta=delta,
        budget=budget,
        rows=rows,
        log=log_file(own.secrets.logs, "ledger", name, "jsonl") if own.secrets.logs else None,
        seeded=own.config.guard.noise != "secret",
        figure=figure,
    )
    if own.secrets.keeper is not None:
        own.secrets.keeper.opened(name, ledger)
    return ledger


def require_no_releases(own: Own) -> None:
    """Refuse to begin anew over logs: a new alignment puts other people at the places they count.

    Raises:
        CheckpointError: one holds a release.
    """
    if own.secrets.logs is None or own.aligned is not None:
        return
    logs = [
        log_file(own.secrets.logs, "answers", own.name, "jsonl"),
        *(log_file(own.secrets.logs, "ledger", own.name + end, "jsonl") for end in ("", UPDATES)),
    ]
    held = next(filter(holds_releases, logs), None)
    if held is not None:
        raise CheckpointError(
            f"{own.name}: {own.active} begins anew, and {held} counts what {own.name} released in "
            "a run whose rows stood in another order; resume that run, or choose another folder"
        )


def ledger_for(own: Own, guard: RepresentationGuard, *, aligned: int) -> PrivacyLedger:
    """The account of what this party releases."""
    return open_ledger(
        own, own.name, guard.mechanism(),
        delta=own.config.delta, budget=own.config.guard.epsilon, rows=aligned,
    )  # fmt: skip


def private_updates(own: Own, guard: RepresentationGuard) -> PrivateUpdates | None:
    """What makes this party's updates private, one an epoch for each of its rows; None: nothing.

    Args:
        own: whose updates.
        guard: of its representations, whose releases share the budget.

    Raises:
        ConfigError: the guard's releases alone exceed dp_sgd.epsilon.
    """
    config, settings, rows = own.config, own.config.dp_sgd, len(own.data.table.ids)
    if settings is None:
        return None
    epochs, delta = config.train.epochs, config.delta
    noise_multiplier = settings.noise_multiplier
    if noise_multiplier is None:
        assert settings.epsilon is not None
        noise_multiplier = calibrate_updates(
            settings.epsilon,
            delta,
            release=guard.mechanism(),
            releases=guard.planned(epochs) if config.method.representations_from == "active" else 0,
            updates=epochs,
        )
    gradient_guard = GradientGuard(
        clip=settings.clip,
        noise_multiplier=noise_multiplier,
        key=own.secrets.noise_key,
        noise=config.guard.noise,
    )
    mechanism = gradient_guard.mechanism()
    name = _updates_of(own.name)
    ledger = open_ledger(own, name, mechanism, delta=delta, budget=None, rows=rows)
    return PrivateUpdates(gradient_guard, ledger)


def update_ledgers(party: str, private: PrivateUpdates | None) -> dict[str, PrivacyLedger]:
    """The ledger of private updates by name, for checkpoints and reports."""
    return {_updates_of(party): private.ledger} if private else {}


def _updates_of(party: str) -> str:
    return party + UPDATES


def whole_training(
    config: RunSettings, releases: PrivacyLedger, private: PrivateUpdates | None
) -> WholeTraining | None:
    """The joint account of the releases and the updates; None where updates are not private."""
    if config.dp_sgd is None or private is None:
        return None
    return WholeTraining(
        releases=releases,
        updates=private.ledger,
        delta=config.delta,
        budget=config.dp_sgd.epsilon,
        seeded=config.guard.noise != "secret",
    )


def surroundings_of(own: Own, shape: Shape) -> Surroundings:
    """What the defences of one party are built for; `shape` is of one row that they protect."""
    key = derive_key(own.secrets.noise_key, b"secure-apfed defences v1")
    return Surroundings(
        party=own.name,
        seed=own.secrets.seed,
        noise=NoiseSource(key, secret=own.config.guard.noise == "secret"),
        classes=len(own.data.classes),
        size=math.prod(shape),
    )
