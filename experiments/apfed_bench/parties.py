"""Cost of parties against one process: a training step with messages, and with separate processes.

`PROTECTION_TITLE`: one step of APFed-C with sealed envelopes and a transcript, on one thread, of
perceptrons on a small table of three parties with ten columns each. Cases `SUM/GUARD/b64` and
`/b256`: each sum with its clip, without a guard (`open`), with a guard of representations, or with
guard and noise in the sum. The peer is a plain torch loop: the same networks, losses and optimisers
in one autograd graph without parties. All cases of a batch size take turns with it. Cases
`release/b64` and `/b256` are of a user's own loop: a `PrivateRelease` of 64 numbers for each row,
beside a clip and torch's noise, without accounting and secret key. Seconds are the processor's.

`EXCHANGE`: the same without any protection: the plain sum of floats, no clip and no guard. Cases
`apfed_c/fmnist/2-1/b256`, convolutions on two strips of images, and `mlp/3-10/b64` and `/b256`,
the perceptrons above.

`TRANSPORT`, cases `local`, `grpc` and `relay` of `/m3/b256`: the same step with three passives and
every party in a process of its own, one thread each, by transport: sockets over loopback, gRPC with
mutual TLS, proofs of identity and end-to-end encryption, or a relay. The peer is the same step with
all parties in one process.

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
    compute_median_ratio,
    make_row,
    make_single_group,
    time_calls_in_turns,
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
from secure_apfed.networks.models import family_for, make_projection, output_shape
from secure_apfed.networks.objectives import Contrastive
from secure_apfed.organisations.local import prepare_parties, run_relay
from secure_apfed.organisations.party import ConnectedParty, PartyFile, join_session
from secure_apfed.privacy.release import PrivateRelease
from secure_apfed.runs.run import LINK_TYPES, LinkType
from secure_apfed.settings import ContrastiveSettings

_TIMEOUT_S = 60.0
_BATCH_SIZE = 256
_REPRESENTATION_SIZE = 64
_PASSIVE_COUNT = 3
_PEER = "plain torch loop"
# Of the cases `release`: rows of the table, epochs that its epsilon covers, clip of a row.
_RELEASE_ROWS = 10_000
_RELEASE_EPOCHS = 50
_RELEASE_CLIP = 1.0


def _make_image_run(
    name: str, *, party_count: int = 2, **secure_sum: Any
) -> tuple[Config, VerticalData]:
    """Return the configuration of APFed-C on strips of images with a plain sum, and its data.

    Fashion-MNIST is used, or MNIST where that is not installed. `name`: name of the run.
    `party_count`: number of parties. `secure_sum`: further settings of the sum.

    Raises DataError: no images are installed.
    """
    settings: dict[str, Any] = {
        "name": name,
        "method": "apfed_c",
        "train": {"batch_size": _BATCH_SIZE, "device": "cpu"},
        "secure_sum": {"scheme": "plain", **secure_sum, "allow_single_passive": True},
        "guard": {"mechanism": "none"},
    }
    data_settings = {"views": party_count, "limit": 4 * _BATCH_SIZE}
    configs = [
        Config.model_validate({**settings, "data": {"dataset": dataset, **data_settings}})
        for dataset in ("fashion_mnist", "mnist")
    ]
    config = next((config for config in configs if not describe_missing_data(config)), configs[-1])
    return config, load_data(config.data, seed=0)


# Noise of about the size that epsilon 8 needs in an ordinary run; it does not change a step's time.
_SUM_NOISE = {"noise": {"sigma": 60.0}}
_NO_GUARD = {"mechanism": "none"}
_GAUSSIAN_GUARD = {"mechanism": "gaussian", "sigma": 10.0}
_SETTINGS_BY_SUM: Mapping[str, Mapping[str, Any]] = {
    "plain": {"scheme": "plain"},
    "masked": {"scheme": "plain", "masks": "pairwise"},
    "bfv+masks": {"scheme": "bfv", "masks": "pairwise"},
    "ckks": {"scheme": "ckks"},
}
# Settings of the guard, and further settings of the sum.
_GUARD_AND_SUM_SETTINGS_BY_GUARD: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "open": (_NO_GUARD, {}),
    "guard": (_GAUSSIAN_GUARD, {}),
    "guard+noise": (_GAUSSIAN_GUARD, _SUM_NOISE),
}


def _make_table_run(
    batch_size: int, secure_sum: Mapping[str, Any], guard: Mapping[str, Any] = _NO_GUARD
) -> tuple[Config, VerticalData]:
    """Return the configuration of APFed-C on a small table of three parties, and its data.

    `batch_size`: number of rows of a step. `secure_sum`, `guard`: settings of these sections.
    """
    settings: dict[str, Any] = {
        "name": "bench-exchange-table",
        "method": "apfed_c",
        "train": {"batch_size": batch_size, "device": "cpu"},
        "data": {"dataset": "breast_cancer"},
        "secure_sum": secure_sum,
        "guard": guard,
    }
    config = Config.model_validate(settings)
    return config, load_data(config.data, seed=0)


def _open_without_warnings(config: Config, data: VerticalData) -> Simulation:
    """Return a simulated session, without the warnings about its unsafe settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        warnings.simplefilter("ignore", NarrowTableWarning)
        session = open_session(config, data)
    session.transcript.begin_epoch(0)  # steps are recorded below an epoch
    return session


def _iter_batches(rows: Tensor, batch_size: int = _BATCH_SIZE) -> Iterator[tuple[int, Tensor]]:
    """Yield step numbers with full batches of `batch_size` rows, in a new random order every epoch,
    without end.
    """
    steps = itertools.count()
    for epoch in itertools.count():
        order = shuffle_rows(rows, 0, "bench", epoch)
        full_batch_count = len(rows) // batch_size
        for rows_B in order[: full_batch_count * batch_size].split(batch_size):
            yield next(steps), rows_B


def _count_repetitions(quick: bool) -> int:
    """Return how often a case of images is measured; faster cases are measured a multiple of it."""
    return 7 if quick else 31


@one_thread()
def _measure_exchange(case: str, repetitions: int, config: Config, data: VerticalData) -> Row:
    """Return the row of a training step with all messages, with its ratio to the plain loop's.

    The plain loop (`_make_plain_step`) has no parties. Targets for the ratio: 1.10 for images, 2.5
    for tables. `case`: name of the case in the table. `config`, `data`: settings and data of both.
    `repetitions`: number of measured steps.
    """
    session = _open_without_warnings(config, data)
    warm_up_steps = 2
    batches = _iter_batches(session.active_role.training_rows, config.train.batch_size)
    bytes_before = session.transcript.wire_bytes
    row = compare_calls(
        case,
        lambda: session.train_step(*next(batches)),
        _make_plain_step(config, data),
        peer=_PEER,
        repetitions=repetitions,
        warm_up_calls=warm_up_steps,
    )
    sent_bytes = session.transcript.wire_bytes - bytes_before
    return {**row, "bytes": sent_bytes // (repetitions + warm_up_steps)}


def _list_protected_cases(batch_size: int) -> Mapping[str, tuple[str, str]]:
    """Return the keys of sum and guard by name of the case.

    The most protected guard (clip and noise of representations) comes first. `batch_size`: number
    of rows of a step.
    """
    most_protected_first = list(_GUARD_AND_SUM_SETTINGS_BY_GUARD)[::-1]
    return {
        f"{sum_name}/{guard}/b{batch_size}": (sum_name, guard)
        for sum_name in _SETTINGS_BY_SUM
        for guard in most_protected_first
    }


def _make_protected_step(batch_size: int, sum_name: str, guard_name: str) -> Callable[[], object]:
    """Return a function that runs the next training step of a session with this sum and guard.

    `batch_size`: number of rows of a step. `sum_name`: key of `_SETTINGS_BY_SUM`. `guard_name`: key
    of `_GUARD_AND_SUM_SETTINGS_BY_GUARD`.
    """
    guard_settings, further_sum_settings = _GUARD_AND_SUM_SETTINGS_BY_GUARD[guard_name]
    config, data = _make_table_run(
        batch_size, {**_SETTINGS_BY_SUM[sum_name], **further_sum_settings}, guard_settings
    )
    session = _open_without_warnings(config, data)
    batches = _iter_batches(session.active_role.training_rows, batch_size)
    return lambda: session.train_step(*next(batches))


@one_thread()
def _measure_protected(
    wanted_cases: Collection[str], batch_size: int, repetitions: int
) -> Iterator[Row]:
    """Yield the rows of training steps under protection, with their ratio to the plain loop's.

    All wanted cases and the plain loop, which has no parties, take turns. Targets for the ratio
    with masks, at a batch of 64: 2.5 with a guard (clip and noise of representations), 4.0 with
    noise in the sum, too; at a batch of 256: 2.2.

    Args:
        wanted_cases: names of cases with this batch size.
        batch_size: number of rows of a step.
        repetitions: how often each case is measured.
    """
    sum_and_guard_by_case = _list_protected_cases(batch_size)
    step_by_case: dict[str, Callable[[], object]] = {
        case: _make_protected_step(batch_size, *sum_and_guard_by_case[case])
        for case in wanted_cases
    }
    step_by_case[_PEER] = _make_plain_step(
        *_make_table_run(batch_size, {"scheme": "plain", "clip": None})
    )
    seconds_by_case = time_calls_in_turns(
        step_by_case, repetitions=repetitions, warm_up_calls=3, clock=time.process_time
    )
    for case in wanted_cases:
        yield make_row(
            case,
            statistics.median(seconds_by_case[case]),
            peer=_PEER,
            ratio=compute_median_ratio(seconds_by_case[case], seconds_by_case[_PEER]),
            peer_seconds=statistics.median(seconds_by_case[_PEER]),
        )


@one_thread()
def _measure_release(case: str, batch_size: int, repetitions: int) -> Row:
    """Return the row of the release of one batch under a guard (clip and noise).

    Its ratio is to a clip and torch's noise without accounting.

    Target for the ratio: 5. `case`: name of the case in the table. `batch_size`: number of rows.
    `repetitions`: number of measured releases.
    """
    guard = PrivateRelease(
        clip=_RELEASE_CLIP, epsilon=8.0, delta=1e-5, epochs=_RELEASE_EPOCHS, rows=_RELEASE_ROWS
    )
    h_BD = torch.randn(batch_size, _REPRESENTATION_SIZE, requires_grad=True)
    batches = _iter_batches(torch.arange(_RELEASE_ROWS), batch_size)

    def clip_and_noise() -> Tensor:
        """Clip each row and add torch's noise, without accounting: the peer."""
        norm_B1 = torch.linalg.vector_norm(h_BD, dim=1, keepdim=True)
        clipped_BD = h_BD * (_RELEASE_CLIP / norm_B1).clamp(max=1.0)
        noisy_BD: Tensor = clipped_BD + guard.sigma * torch.randn_like(clipped_BD)
        return noisy_BD

    return compare_calls(
        case,
        lambda: guard(h_BD, rows=next(batches)[1]),
        clip_and_noise,
        peer="clip and noise",
        repetitions=repetitions,
        warm_up_calls=5,
        clock=time.process_time,
    )


PROTECTED = Bench(
    make_groups=lambda quick: [
        *(
            Group(
                tuple(_list_protected_cases(batch)),
                partial(
                    _measure_protected, batch_size=batch, repetitions=3 * _count_repetitions(quick)
                ),
            )
            for batch in (64, 256)
        ),
        *(
            make_single_group(
                f"release/b{batch}", _measure_release, batch, 30 * _count_repetitions(quick)
            )
            for batch in (64, 256)
        ),
    ],
    further_fields=("peer_seconds",),
)


EXCHANGE = Bench(
    make_groups=lambda quick: [
        make_single_group(
            "apfed_c/fmnist/2-1/b256",
            lambda case: _measure_exchange(
                case, _count_repetitions(quick), *_make_image_run("bench-exchange", clip=None)
            ),
        ),
        *(
            make_single_group(
                f"mlp/3-10/b{batch}",
                lambda case, batch=batch: _measure_exchange(
                    case,
                    10 * _count_repetitions(quick),
                    *_make_table_run(batch, {"scheme": "plain", "clip": None}),
                ),
            )
            for batch in (64, 256)
        ),
    ],
    further_fields=("peer_seconds",),
)


def _make_plain_step(config: Config, data: VerticalData) -> Callable[[], float]:
    """Return a function that runs one training step of APFed-C as one autograd graph, Eq. (8).

    This is the "plain loop" that sessions are compared with: it has their networks, losses and
    optimisers, but no parties and no messages. The function returns the task loss.
    """
    active = data.active
    model = config.model
    shape = tuple(active.features.shape[1:])
    family = family_for(model, shape)
    encoder = family.make_encoder(shape, model)
    encoded_shape = output_shape(encoder, shape)
    head = family.make_head(math.prod(encoded_shape), len(data.classes), model)
    projection = make_projection(_REPRESENTATION_SIZE, encoded_shape)
    networks = ActiveNetworks(encoder, head, projection)
    objectives = [
        Contrastive(
            ContrastiveSettings(),
            representation=(_REPRESENTATION_SIZE,),
            features=passive.shape,
            model=model,
        )
        for passive in data.passives
    ]
    parties = (networks, *objectives)
    descents = [Descent("plain", {"networks": module}, config.train) for module in parties]

    def order_features(passive: PartyTable) -> Tensor:
        """Return a passive's features in the order of the active's rows."""
        row_by_id = {identity: row for row, identity in enumerate(passive.ids)}
        # A person whom the passive does not know gets its first row: only the time counts here.
        return passive.features[[row_by_id.get(identity, 0) for identity in active.ids]]

    objectives_and_features = list(zip(objectives, map(order_features, data.passives), strict=True))
    assert active.labels is not None
    labels_N = active.labels
    batches = _iter_batches(data.train_rows, config.train.batch_size)

    def run_step() -> float:
        """Run one step and return its task loss."""
        _, rows_B = next(batches)
        for descent in descents:
            descent.zero_grad()
        scores_BK, z_BD = networks(active.features[rows_B])
        task_loss = F.cross_entropy(scores_BK, labels_N[rows_B])
        passive_losses = [
            objective(z_BD, features_N[rows_B]) for objective, features_N in objectives_and_features
        ]
        torch.stack([task_loss, *passive_losses]).sum().backward()
        for descent in descents:
            descent.step()
        return task_loss.item()

    return run_step


@one_thread()
def _measure_transport(case: str, link_type: LinkType, repetitions: int) -> Row:
    """Return the row of a training step in which every party has a process of its own.

    Its ratio is to a step with all parties in one process. Targets: 1.3, over gRPC 1.5.

    `case`: name of the case in the table. `link_type`: kind of links between the processes
    (sockets, gRPC or a relay). `repetitions`: number of measured steps.
    """
    config, data = _make_image_run("bench-transport", clip=None, party_count=_PASSIVE_COUNT + 1)
    with _start_parties(config, data, link_type=link_type) as (active_session, learner):
        session = _open_without_warnings(config, data)
        batches = _iter_batches(learner.training_rows)
        peer_batches = _iter_batches(session.active_role.training_rows)
        return compare_calls(
            case,
            lambda: run_script(
                learner.train_step(active_session.links, *next(batches)),
                active_session.transport,
                timeout_s=_TIMEOUT_S,
            ),
            lambda: session.train_step(*next(peer_batches)),
            peer="memory",
            repetitions=repetitions,
            warm_up_calls=2,
        )


TRANSPORT = Bench(
    make_groups=lambda quick: [
        make_single_group(
            f"{name}/m{_PASSIVE_COUNT}/b{_BATCH_SIZE}",
            _measure_transport,
            way,
            _count_repetitions(quick),
        )
        for name, way in LINK_TYPES.items()
    ],
    further_fields=("peer_seconds",),
)


@contextmanager
def _start_parties(
    config: Config, data: VerticalData, *, link_type: LinkType
) -> Iterator[tuple[ConnectedParty, ActiveRole]]:
    """Yield the active of a session in this process; each other party has a process of its own.

    The active is its connection to the others and its learner. When the block ends, the session is
    ended for all. `link_type`: kind of links between the processes (sockets, gRPC or a relay).
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder)
        make_private(path)
        file_by_party = dict(
            prepare_parties(config, path, data=data, timeout_s=_TIMEOUT_S, link_type=link_type)
        )
        stack.enter_context(run_relay(file_by_party.values()))
        active = PartyFile.from_file(file_by_party.pop(data.active.name))
        for file in file_by_party.values():
            stack.enter_context(_start_party(file))
        active_session = stack.enter_context(join_session(active))
        script = start_active(
            active_session.context,
            active_session.links,
            METHODS[config.method.name],
            session=new_session(),
        )
        membership, learner = run_script(script, active_session.transport, timeout_s=_TIMEOUT_S)
        yield active_session, learner
        # Tell every other party that training is over, so that its process ends; 0 is the step.
        end_all(active_session.links, list(membership.contract.list_names("passive")), 0)
        end_all(active_session.links, list(membership.contract.list_names("aggregator")), 0)
        active_session.transport.close()


@contextmanager
def _start_party(file: Path) -> Iterator[None]:
    """Run the party of a settings file in a process of its own; await its end after the block."""
    command = [sys.executable, "-m", "secure_apfed.cli", "party", "--config", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(  # noqa: S603 - this very program
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
            process.wait(_TIMEOUT_S)
        finally:
            process.kill()
