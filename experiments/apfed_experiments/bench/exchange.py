"""What parties, transport and transcript cost above a plain torch loop of the same arithmetic.

Case `apfed_c/fmnist/2-1/b256`: APFed-C on the shapes of Fashion-MNIST 2-1 in batches of
256, one thread. Ours: one step through sealed envelopes, recorded, with the plain sum.
Peer: the same networks, losses and optimisers in one autograd graph and no parties. The
row names the images: where Fashion-MNIST is not installed, MNIST has the same shapes.
"""

import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_experiments.bench.images import image_run
from apfed_experiments.bench.rows import (
    Bench,
    Group,
    Row,
    interleave,
    median_ratio,
    single,
)
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.learning.descent import Descent
from secure_apfed.learning.networks import ActiveNetworks
from secure_apfed.methods import Session, open_session
from secure_apfed.models import family_for, output_shape, projection_to
from secure_apfed.objectives import Contrastive
from secure_apfed.seeds import one_thread, shuffled
from secure_apfed.settings.training import ContrastiveSettings

__all__ = ["BENCH", "whole_batches"]

_BATCH, _SENT = 256, 64
_CASE = "apfed_c/fmnist/2-1/b256"


def _groups(quick: bool) -> Sequence[Group]:
    return [single(_CASE, partial(_row, 7 if quick else 31))]


BENCH = Bench(groups=_groups, fields=("peer_seconds", "images"))


@one_thread()
def _row(repetitions: int) -> Row:
    """Seconds of one training step, and the ratio to the plain loop's (target: at most 1.10)."""
    config, data, images = image_run(
        "bench-exchange", batch=_BATCH, secure_sum={"scheme": "plain", "clip": None}
    )
    ours, session = _our_step(config, data)
    theirs = _plain_step(config, data)
    before = session.transcript.wire_bytes
    seconds = interleave({"ours": ours, "plain": theirs}, repetitions=repetitions, warm_up=2)
    steps = repetitions + 2
    return Row(
        case=_CASE,
        seconds=statistics.median(seconds["ours"]),
        peer="plain torch loop",
        ratio=median_ratio(seconds["ours"], seconds["plain"]),
        bytes=(session.transcript.wire_bytes - before) // steps,
        more={"peer_seconds": statistics.median(seconds["plain"]), "images": images},
    )


def _our_step(config: Config, data: VerticalData) -> tuple[Callable[[], float], Session]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        session = open_session(config, data)
    batches = whole_batches(session.learner.training_rows)
    steps = itertools.count()
    session.transcript.begin_epoch(0)
    return lambda: session.step(next(steps), next(batches)), session


def _plain_step(config: Config, data: VerticalData) -> Callable[[], float]:
    """The same arithmetic as one graph, Eq. (8): no parties, no messages."""
    active, passive, model = data.active, data.passives[0], config.model
    shape = tuple(active.features.shape[1:])
    family = family_for(model, shape)
    encoder = family.encoder(shape, model)
    encoded = output_shape(encoder, shape)
    head = family.head(math.prod(encoded), len(data.classes), model)
    networks = ActiveNetworks(encoder, head, projection_to(_SENT, encoded))
    objective = Contrastive(
        ContrastiveSettings(), representation=(_SENT,), features=shape, model=model
    )
    parties = (networks, objective)
    descents = [Descent("plain", {"networks": module}, config.train) for module in parties]
    row_of = {identity: row for row, identity in enumerate(passive.ids)}
    partner_N = torch.tensor([row_of.get(identity, 0) for identity in active.ids])
    assert active.labels is not None
    labels_N = active.labels
    batches = whole_batches(data.train_rows)

    def step() -> float:
        rows_B = next(batches)
        for descent in descents:
            descent.begin()
        scores_BK, z_BD = networks(active.features[rows_B])
        task = F.cross_entropy(scores_BK, labels_N[rows_B])
        (task + objective(z_BD, passive.features[partner_N[rows_B]])).backward()
        for descent in descents:
            descent.step()
        return task.item()

    return step


def whole_batches(rows: Tensor) -> Iterator[Tensor]:
    """Whole batches without end."""
    for epoch in itertools.count():
        order = shuffled(rows, 0, "bench", epoch)
        yield from order[: len(rows) // _BATCH * _BATCH].split(_BATCH)
