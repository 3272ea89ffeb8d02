"""Cost of parties against one process: a training step with messages, and with parties apart.

`PROTECTED`: one step of APFed-C through sealed envelopes, recorded, one thread, of perceptrons on a
small table of three parties with ten columns each. Cases `SUM/GUARD/b64` and `/b256`: each sum with
its clip, under no guard (`open`), a guard of representations, or guard and noise under the sum. The
peer is a plain torch loop: the same networks, losses and optimisers in one autograd graph and no
parties. All cases of a batch take turns with it. Cases `release/b64` and `/b256` are of a loop of
one's own: a `PrivateRelease` of 64 numbers a row, beside a clip and torch's noise, which nobody
counts and no key makes. Seconds are the processor's.

`EXCHANGE`: the same without any protection: the plain sum of floats, no clip and no guard. Cases
`apfed_c/fmnist/2-1/b256`, convolutions on two strips of images, and `mlp/3-10/b64` and `/b256`,
the perceptrons above.

`TRANSPORT`, cases `local`, `grpc` and `relay` of `/m3/b256`: the same step with three passives and
every party in a process of its own, one thread each, by how they reach each other: over loopback,
over gRPC with mutual TLS, proofs of identity and seals end to end, or through a relay. The peer is
the same step with all in one process.

Images are Fashion-MNIST's, or of the same shapes MNIST's where it is not installed.
"""

import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_bench.rows import (
    Bench,
    Group,
    Row,
    compare_calls,
    interleave,
    make_row,
    make_single_group,
    median_ratio,
)
from apfed_experiments.study import describe_missing_data
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.base.files import make_private
from secure_apfed.base.seeds import one_thread, shuffle_rows
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.errors import NarrowTableWarning
from secure_apfed.exchange import run_script
from secure_apfed.learning.descent import ActiveNetworks, Descent
from secure_apfed.methods import (
    METHODS,
    ActiveRole,
    Simulation,
    new_session,
    open_session,
    start_active,
)
from secure_apfed.methods.method import end_all
from secure_apfed.networks.models import family_for, output_shape, projection_to
from secure_apfed.networks.objectives import Contrastive
from secure_apfed.organisations.local import prepare_parties, run_relay
from secure_apfed.organisations.party import ConnectedParty, PartyFile, join_session
from secure_apfed.privacy.release import PrivateRelease
from secure_apfed.runs.run import WAYS, Way
from secure_apfed.settings.training import ContrastiveSettings

_PATIENCE_S = 60.0
_BATCH = 256
_SENT = 64
_PASSIVES = 3
_PEER = "plain torch loop"
# Of a table whose rows are released in a loop of one's own.
_ROWS = 10_000
_EPOCHS = 50
_CLIP = 1.0


def _make_image_run(name: str, *, views: int = 2, **secure_sum: Any) -> tuple[Config, VerticalData]:
    """Return a run of APFed-C on strips of images under the plain sum, and its data.

    `views`: how many parties.

    Raises DataError: no images are installed.
    """
    settings: dict[str, Any] = {
        "name": name,
        "method": "apfed_c",
        "train": {"batch_size": _BATCH, "device": "cpu"},
        "secure_sum": {"scheme": "plain", **secure_sum, "allow_single_passive": True},
        "guard": {"mechanism": "none"},
    }
    shape = {"views": views, "limit": 4 * _BATCH}
    configs = [
        Config.model_validate({**settings, "data": {"dataset": dataset, **shape}})
        for dataset in ("fashion_mnist", "mnist")
    ]
    config = next((config for config in configs if not describe_missing_data(config)), configs[-1])
    return config, load_data(config.data, seed=0)


# Noise as wide as epsilon 8 over an ordinary run asks for; a step's time does not depend on it.
_SUM_NOISE = {"noise": {"sigma": 60.0}}
_OPEN = {"mechanism": "none"}
_GUARD = {"mechanism": "gaussian", "sigma": 10.0}
_SUMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"scheme": "plain"},
    "masked": {"scheme": "plain", "masks": "pairwise"},
    "bfv+masks": {"scheme": "bfv", "masks": "pairwise"},
    "ckks": {"scheme": "ckks"},
}
# settings of the guard, and what they add to those of the sum
_GUARDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "open": (_OPEN, {}),
    "guard": (_GUARD, {}),
    "guard+noise": (_GUARD, _SUM_NOISE),
}


def _make_table_run(
    batch: int, secure_sum: Mapping[str, Any], guard: Mapping[str, Any] = _OPEN
) -> tuple[Config, VerticalData]:
    """Return a run of APFed-C on a small table of three parties, and its data.

    `batch`: rows of a step. `secure_sum`: settings of the sum, and of the guard.
    """
    settings: dict[str, Any] = {
        "name": "bench-exchange-table",
        "method": "apfed_c",
        "train": {"batch_size": batch, "device": "cpu"},
        "data": {"dataset": "breast_cancer"},
        "secure_sum": secure_sum,
        "guard": guard,
    }
    config = Config.model_validate(settings)
    return config, load_data(config.data, seed=0)


def _open_quietly(config: Config, data: VerticalData) -> Simulation:
    """Open a session without the warnings that its unsafe settings call for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        warnings.simplefilter("ignore", NarrowTableWarning)
        session = open_session(config, data)
    session.transcript.begin_epoch(0)
    return session


def _iter_batches(rows: Tensor, size: int = _BATCH) -> Iterator[tuple[int, Tensor]]:
    """Yield whole batches without end, each with its step."""
    steps = itertools.count()
    for epoch in itertools.count():
        order = shuffle_rows(rows, 0, "bench", epoch)
        for rows_B in order[: len(rows) // size * size].split(size):
            yield next(steps), rows_B


def _count_turns(quick: bool) -> int:
    """Return the repetitions of a case."""
    return 7 if quick else 31


@one_thread()
def _measure_exchange(case: str, repetitions: int, config: Config, data: VerticalData) -> Row:
    """Measure a training step, and its ratio to the plain loop's (targets: 1.10; tables 2.5).

    `case`: its name in the table. `repetitions`: how often each case is measured.
    """
    session = _open_quietly(config, data)
    warm_up = 2
    batches = _iter_batches(session.learner.training_rows, config.train.batch_size)
    before = session.transcript.wire_bytes
    row = compare_calls(
        case,
        lambda: session.train_step(*next(batches)),
        _make_plain_step(config, data),
        peer=_PEER,
        repetitions=repetitions,
        warm_up=warm_up,
    )
    sent = (session.transcript.wire_bytes - before) // (repetitions + warm_up)
    return {**row, "bytes": sent}


def _name_protected_cases(batch: int) -> Mapping[str, tuple[str, str]]:
    """Return the sum and the guard of each case, those first that protect most."""
    guards = sorted(_GUARDS, reverse=True, key=list(_GUARDS).index)
    return {f"{kind}/{guard}/b{batch}": (kind, guard) for kind in _SUMS for guard in guards}


def _open_protected(batch: int, kind: str, guard: str) -> Callable[[], object]:
    """Return one step after the other of a session under this sum and guard."""
    guard_settings, sum_settings = _GUARDS[guard]
    config, data = _make_table_run(batch, {**_SUMS[kind], **sum_settings}, guard_settings)
    session = _open_quietly(config, data)
    batches = _iter_batches(session.learner.training_rows, batch)
    return lambda: session.train_step(*next(batches))


@one_thread()
def _measure_protected(wanted: Collection[str], batch: int, repetitions: int) -> Iterator[Row]:
    """Measure steps in turns (targets under masks: with a guard 2.5 at a batch of 64, with noise
    4.0, and 2.2 at 256).

    `wanted`: names of cases. `repetitions`: how often each case is measured.
    """
    cases = _name_protected_cases(batch)
    steps: dict[str, Callable[[], object]] = {
        case: _open_protected(batch, *cases[case]) for case in wanted
    }
    plain = _make_plain_step(*_make_table_run(batch, {"scheme": "plain", "clip": None}))
    seconds = interleave(
        {**steps, _PEER: plain}, repetitions=repetitions, warm_up=3, clock=time.process_time
    )
    for case in wanted:
        yield make_row(
            case,
            statistics.median(seconds[case]),
            peer=_PEER,
            ratio=median_ratio(seconds[case], seconds[_PEER]),
            peer_seconds=statistics.median(seconds[_PEER]),
        )


@one_thread()
def _measure_release(case: str, batch: int, repetitions: int) -> Row:
    """Measure the release of one batch, and its ratio to a clip and torch's noise (target: 5).

    `case`: its name in the table. `repetitions`: how often each case is measured.
    """
    guard = PrivateRelease(clip=_CLIP, epsilon=8.0, delta=1e-5, epochs=_EPOCHS, rows=_ROWS)
    h_BD = torch.randn(batch, _SENT, requires_grad=True)
    batches = _iter_batches(torch.arange(_ROWS), batch)

    def clip_and_noise() -> Tensor:
        """Clip each row and add torch's noise, without an account: the peer."""
        norm_B1 = torch.linalg.vector_norm(h_BD, dim=1, keepdim=True)
        clipped_BD = h_BD * (_CLIP / norm_B1).clamp(max=1.0)
        noisy_BD: Tensor = clipped_BD + guard.sigma * torch.randn_like(clipped_BD)
        return noisy_BD

    return compare_calls(
        case,
        lambda: guard(h_BD, rows=next(batches)[1]),
        clip_and_noise,
        peer="clip and noise",
        repetitions=repetitions,
        warm_up=5,
        clock=time.process_time,
    )


PROTECTED = Bench(
    groups=lambda quick: [
        *(
            Group(
                tuple(_name_protected_cases(batch)),
                partial(_measure_protected, batch=batch, repetitions=3 * _count_turns(quick)),
            )
            for batch in (64, 256)
        ),
        *(
            make_single_group(
                f"release/b{batch}", _measure_release, batch, 30 * _count_turns(quick)
            )
            for batch in (64, 256)
        ),
    ],
    fields=("peer_seconds",),
)


EXCHANGE = Bench(
    groups=lambda quick: [
        make_single_group(
            "apfed_c/fmnist/2-1/b256",
            lambda case: _measure_exchange(
                case, _count_turns(quick), *_make_image_run("bench-exchange", clip=None)
            ),
        ),
        *(
            make_single_group(
                f"mlp/3-10/b{batch}",
                lambda case, batch=batch: _measure_exchange(
                    case,
                    10 * _count_turns(quick),
                    *_make_table_run(batch, {"scheme": "plain", "clip": None}),
                ),
            )
            for batch in (64, 256)
        ),
    ],
    fields=("peer_seconds",),
)


def _make_plain_step(config: Config, data: VerticalData) -> Callable[[], float]:
    """Return a step with the same arithmetic as one graph, Eq. (8): no parties, no messages."""
    active = data.active
    model = config.model
    shape = tuple(active.features.shape[1:])
    family = family_for(model, shape)
    encoder = family.make_encoder(shape, model)
    encoded = output_shape(encoder, shape)
    head = family.make_head(math.prod(encoded), len(data.classes), model)
    networks = ActiveNetworks(encoder, head, projection_to(_SENT, encoded))
    objectives = [
        Contrastive(
            ContrastiveSettings(), representation=(_SENT,), features=passive.shape, model=model
        )
        for passive in data.passives
    ]
    parties = (networks, *objectives)
    descents = [Descent("plain", {"networks": module}, config.train) for module in parties]

    def order_features(passive: PartyTable) -> Tensor:
        """Return a passive's features in the order of the active's rows."""
        row_by_id = {identity: row for row, identity in enumerate(passive.ids)}
        return passive.features[[row_by_id.get(identity, 0) for identity in active.ids]]

    passive_pairs = list(zip(objectives, map(order_features, data.passives), strict=True))
    assert active.labels is not None
    labels_N = active.labels
    batches = _iter_batches(data.train_rows, config.train.batch_size)

    def run_step() -> float:
        """Run one step and return its task loss."""
        _, rows_B = next(batches)
        for descent in descents:
            descent.zero_grad()
        scores_BK, z_BD = networks(active.features[rows_B])
        task = F.cross_entropy(scores_BK, labels_N[rows_B])
        helped = [objective(z_BD, features_N[rows_B]) for objective, features_N in passive_pairs]
        torch.stack([task, *helped]).sum().backward()
        for descent in descents:
            descent.step()
        return task.item()

    return run_step


@one_thread()
def _measure_apart(case: str, way: Way, repetitions: int) -> Row:
    """Measure a training step with parties apart, and its ratio to one process's (targets: 1.3,
    over gRPC 1.5).

    `case`: its name in the table. `repetitions`: how often each case is measured.
    """
    config, data = _make_image_run("bench-transport", clip=None, views=_PASSIVES + 1)
    with _start_parties(config, data, way=way) as (active_session, learner):
        session = _open_quietly(config, data)
        batches, others = (_iter_batches(end.training_rows) for end in (learner, session.learner))
        return compare_calls(
            case,
            lambda: run_script(
                learner.train_step(active_session.links, *next(batches)),
                active_session.transport,
                timeout_s=_PATIENCE_S,
            ),
            lambda: session.train_step(*next(others)),
            peer="memory",
            repetitions=repetitions,
            warm_up=2,
        )


TRANSPORT = Bench(
    groups=lambda quick: [
        make_single_group(
            f"{name}/m{_PASSIVES}/b{_BATCH}", _measure_apart, way, _count_turns(quick)
        )
        for name, way in WAYS.items()
    ],
    fields=("peer_seconds",),
)


@contextmanager
def _start_parties(
    config: Config, data: VerticalData, *, way: Way
) -> Iterator[tuple[ConnectedParty, ActiveRole]]:
    """Yield a session that is set up: its active here, each other party in its own process."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder)
        make_private(path)
        files = dict(prepare_parties(config, path, data=data, timeout_s=_PATIENCE_S, way=way))
        stack.enter_context(run_relay(files.values()))
        active = PartyFile.from_file(files.pop(data.active.name))
        for file in files.values():
            stack.enter_context(_start_party(file))
        active_session = stack.enter_context(join_session(active))
        script = start_active(
            active_session.own,
            active_session.links,
            METHODS[config.method.name],
            session=new_session(),
        )
        entered, learner = run_script(script, active_session.transport, timeout_s=_PATIENCE_S)
        yield active_session, learner
        end_all(active_session.links, list(entered.contract.list_names("passive")), 0)
        end_all(active_session.links, list(entered.contract.list_names("aggregator")), 0)
        active_session.transport.close()


@contextmanager
def _start_party(file: Path) -> Iterator[None]:
    """Run a party in a process of its own while the block runs."""
    command = [sys.executable, "-m", "secure_apfed.cli", "party", "--config", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(  # noqa: S603 - this very program
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
            process.wait(_PATIENCE_S)
        finally:
            process.kill()
