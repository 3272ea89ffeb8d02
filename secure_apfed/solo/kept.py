"""Kept fits: whoever asks again with the same rows, labels and seed gets what was fitted before.

Run by: the active, and who plays many runs on the same data. Every solo baseline is fitted without
a part of the labels to choose one of them, for the report of a run as for the prior of its votes; a
fit is a function of its task, so one of them serves all, and no figure changes. Nothing is kept
unless a store is named. What it holds was learnt from the active's labels, so it belongs to whoever
plays the active.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch
from safetensors.torch import load, save
from torch import nn

from secure_apfed.seeds import Draws, seeded
from secure_apfed.solo.interface import FloatArray, SoloTask

__all__ = [
    "FitStore", "fits_kept_by", "fits_kept_meanwhile", "fitted_once", "scored_once"
]  # fmt: skip

FitStore: TypeAlias = Callable[[str, Callable[[], bytes]], bytes]
"""Called with the name of a fit and what makes it; returns what was made for this name first."""

_STORE: ContextVar[FitStore | None] = ContextVar("store of fits", default=None)


@contextmanager
def fits_kept_by(store: FitStore) -> Iterator[None]:
    """Let this store keep and tell fits while the block runs."""
    before = _STORE.set(store)
    try:
        yield
    finally:
        _STORE.reset(before)


@contextmanager
def fits_kept_meanwhile() -> Iterator[None]:
    """The same in memory, where no store is named: for one task and parts of its labels."""
    kept: dict[str, bytes] = {}

    def once(name: str, make: Callable[[], bytes]) -> bytes:
        if name not in kept:
            kept[name] = make()
        return kept[name]

    with fits_kept_by(_STORE.get() or once):
        yield


def fitted_once(
    name: str,
    task: SoloTask,
    fresh: Callable[[], nn.Module],
    fit: Callable[[Draws], nn.Module],
    *,
    labels: bool = True,
) -> nn.Module:
    """Return, to be evaluated, the network that `fit` trains, or trained before for an equal task.

    Of the task the fit reads rows and seed, and labels and classes where it says so, but no
    settings of the run. `fresh` makes a network of the shape that `fit` returns.
    """
    draws, store = seeded(task.seed, "solo", name), _STORE.get()
    if store is None:
        return fit(draws).eval()
    content = store(f"{name}-{_digest(task, labels)}", lambda: save(fit(draws).state_dict()))
    with torch.device("meta"):
        network = fresh()
    network.load_state_dict(load(content), assign=True)
    return network.eval()


def scored_once(name: str, task: SoloTask, score: Callable[[], FloatArray]) -> FloatArray:
    """Return these scores, or those that were kept by this name for an equal task.

    They may depend on the settings of the run's own network, too.
    """
    store = _STORE.get()
    if store is None:
        return score()
    settings = task.model.model_dump_json() + task.train.model_dump_json()
    of_run = hashlib.sha256(settings.encode()).hexdigest()[:16]
    make = lambda: save({"scores": torch.from_numpy(score())})  # noqa: E731
    kept: FloatArray = load(store(f"{name}-{of_run}-{_digest(task, True)}", make))["scores"].numpy()
    return kept


def _digest(task: SoloTask, labels: bool) -> str:
    """SHA-256 (hex) of all that such a fit depends on."""
    read = (task.features, task.labelled, task.labels) if labels else (task.features,)
    about = (task.features.shape, task.seed, task.classes if labels else None)
    content = hashlib.sha256(repr(about).encode())
    for values in read:
        content.update(values.tobytes())
    return content.hexdigest()
