"""A training step to compare costs with: APFed-C on Fashion-MNIST, batches of 128, plain sum."""

import itertools
import warnings
from collections.abc import Callable

from apfed_experiments.bench.images import image_run
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.methods import open_session

__all__ = ["training_step"]

_BATCH = 128


def training_step() -> tuple[Callable[[], float], str]:
    """One step of all parties, and which images: MNIST where Fashion-MNIST is not installed."""
    config, data, images = image_run(
        "bench-secure-sum", batch=_BATCH, secure_sum={"scheme": "plain"}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        session = open_session(config, data)
    rows = session.learner.training_rows[:_BATCH]
    steps = itertools.count()
    session.transcript.begin_epoch(0)
    return lambda: session.step(next(steps), rows), images
