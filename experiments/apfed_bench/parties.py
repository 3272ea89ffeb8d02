"""What parties cost beside one process: steps, carriers, messages, joint prediction, logs.

`EXCHANGE`, case `apfed_c/fmnist/2-1/b256`: one step of APFed-C through sealed envelopes, recorded,
with the plain sum, one thread; the peer is a plain torch loop: the same networks, losses and
optimisers in one autograd graph and no parties.

`LOCAL` and `TRANSPORT`: the same step where every party runs in a process of its own, one thread
each, by how they reach each other: cases `local/apfed_c/fmnist/3-1/b256` over loopback with three
parties and an aggregator; `local`, `grpc` and `relay` of `/m3/b256` with three passives, over gRPC
with mutual TLS, proofs of identity and seals end to end. The peer is the same step with all in one
process. Cases `message/memory` and `message/local`: seconds that one sealed message takes from one
script to another, there and back again and halved, without and with a socket between them.

`NVFLARE`, cases `nvflare/message/b...`: the same for 64 bytes, 128 KiB or 16 MiB from one site to
another in NVFlare's simulator, each site a process of its own; `nvflare/round/b131072`: four of 128
KiB, one after another. Frames go through its server over TCP on loopback, without TLS.

`JOINT`: what a row costs that all parties predict: SplitNN, merged by a sum under each scheme, on
digits in four strips, 16 numbers a representation, the test rows in batches of 64, all parties in
one thread: `seconds` and `bytes` are of one row; the peer is the concatenating SplitNN, which shows
the active every representation.

`LOG`, cases `log/BYTES`: one envelope of so many sealed random bytes, hashed, chained and handed to
the operating system; the peer is SHA-256 of the same bytes alone. Cases `verify` and `resume` are
for a line of a log that exists.

Images are Fashion-MNIST's; where it is not installed, MNIST has the same shapes, and rows say so.
"""

import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from apfed_bench.rows import (
    Bench,
    Group,
    Row,
    compared,
    interleave,
    median_ratio,
    on_images,
    row,
    single,
)
from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.seal import Identity, SealedLink, fresh_identity, fresh_run_key
from secure_apfed.audit_log import AuditLog, verify_log
from secure_apfed.config import Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange import Envelope, InMemory, Kind, Links, Transport, drive
from secure_apfed.exchange.links import Script
from secure_apfed.files import make_private
from secure_apfed.learning.descent import ActiveNetworks, Descent
from secure_apfed.methods import METHODS, Learner, Simulation, lead, new_session, open_session
from secure_apfed.methods.method import end_all
from secure_apfed.models import family_for, output_shape, projection_to
from secure_apfed.names import ReleaseFigure
from secure_apfed.objectives import Contrastive
from secure_apfed.runs.local import WAYS, Way, free_addresses, prepare_parties, relaying
from secure_apfed.runs.party import Joined, PartyFile, Peer, connect, joined
from secure_apfed.seeds import one_thread, shuffled
from secure_apfed.settings.training import ContrastiveSettings

__all__ = [
    "COUNTS", "EXCHANGE", "JOINT", "LOCAL", "LOG", "NVFLARE", "TRANSPORT", "echo", "over",
    "sealed", "seconds_of", "training_step",
]  # fmt: skip

Play: TypeAlias = Callable[[Script[Any]], Any]
"""Plays a script of the party "here" to its end."""

_PATIENCE_S = 60.0
COUNTS = {64: 200, 2**17: 100, 2**24: 5}
"""By size of a payload in bytes, how many messages are measured."""

_BATCH, _SUM_BATCH, _SENT, _PASSIVES = 256, 128, 64, 3
_WARM_UP = 3


def _image_run(
    name: str, *, batch: int = _BATCH, views: int = 2, **secure_sum: Any
) -> tuple[Config, VerticalData, str]:
    """A run of APFed-C on strips of images under the plain sum; see `on_images`."""

    def config(dataset: str) -> Config:
        return Config.model_validate({
            "name": name, "method": "apfed_c",
            "data": {"dataset": dataset, "views": views, "limit": 4 * batch},
            "train": {"batch_size": batch, "device": "cpu"},
            "secure_sum": {"scheme": "plain", **secure_sum, "allow_single_passive": True},
            "guard": {"mechanism": "none"},
        })  # fmt: skip

    return on_images(config)


def _opened(config: Config, data: VerticalData) -> Simulation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        session = open_session(config, data)
    session.transcript.begin_epoch(0)
    return session


def training_step() -> tuple[Callable[[], float], str]:
    """One step of all parties, batches of 128 under the plain sum, and which images."""
    config, data, images = _image_run("bench-secure-sum", batch=_SUM_BATCH)
    session, steps = _opened(config, data), itertools.count()
    rows = session.learner.training_rows[:_SUM_BATCH]
    return lambda: session.step(next(steps), rows), images


def _batches(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Whole batches without end, each with its step."""
    steps = itertools.count()
    for epoch in itertools.count():
        order = shuffled(rows, 0, "bench", epoch)
        for rows_B in order[: len(rows) // _BATCH * _BATCH].split(_BATCH):
            yield next(steps), rows_B


def _turns(quick: bool) -> int:
    return 7 if quick else 31


@one_thread()
def _exchanged(case: str, repetitions: int) -> Row:
    """Seconds of one training step, and the ratio to the plain loop's (target: at most 1.10)."""
    config, data, images = _image_run("bench-exchange", clip=None)
    session, warm_up = _opened(config, data), 2
    batches = _batches(session.learner.training_rows)
    before = session.transcript.wire_bytes
    found = compared(
        case, lambda: session.step(*next(batches)), _plain_step(config, data),
        peer="plain torch loop", repetitions=repetitions, warm_up=warm_up, images=images,
    )  # fmt: skip
    sent = (session.transcript.wire_bytes - before) // (repetitions + warm_up)
    return {**found, "bytes": sent}


EXCHANGE = Bench(
    groups=lambda quick: [single("apfed_c/fmnist/2-1/b256", _exchanged, _turns(quick))],
    fields=("peer_seconds", "images"),
)


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
    batches = _batches(data.train_rows)

    def step() -> float:
        _, rows_B = next(batches)
        for descent in descents:
            descent.begin()
        scores_BK, z_BD = networks(active.features[rows_B])
        task = F.cross_entropy(scores_BK, labels_N[rows_B])
        (task + objective(z_BD, passive.features[partner_N[rows_B]])).backward()
        for descent in descents:
            descent.step()
        return task.item()

    return step


@one_thread()
def _apart_row(case: str, name: str, views: int, way: Way, repetitions: int) -> Row:
    """Seconds of a training step, and the ratio to one process's.

    Targets: over loopback at most 1.3, over gRPC at most 1.5.
    """
    config, data, images = _image_run(name, clip=None, views=views)
    with _apart(config, data, way=way) as (here, learner):
        session = _opened(config, data)
        batches, others = (_batches(end.training_rows) for end in (learner, session.learner))
        return compared(
            case, lambda: over(here.transport)(learner.step(here.links, *next(batches))),
            lambda: session.step(*next(others)), peer="memory", repetitions=repetitions, warm_up=2,
            images=images,
        )  # fmt: skip


LOCAL = Bench(
    groups=lambda quick: [
        single("local/apfed_c/fmnist/3-1/b256", _apart_row, "bench-local", 3, "tcp", _turns(quick)),
        Group(("message/memory", "message/local"), partial(_messages, 200 if quick else 2000)),
    ],
    fields=("peer_seconds", "images"),
)
TRANSPORT = Bench(
    groups=lambda quick: [
        single(f"{name}/m{_PASSIVES}/b{_BATCH}", _apart_row, "bench-transport", _PASSIVES + 1, way,
               _turns(quick))
        for name, way in WAYS.items()
    ],
    fields=("peer_seconds", "images"),
)  # fmt: skip


@contextmanager
def _apart(config: Config, data: VerticalData, *, way: Way) -> Iterator[tuple[Joined, Learner]]:
    """A session that is set up: its active here, each other party in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder)
        make_private(path)
        files = dict(prepare_parties(config, path, data=data, timeout_s=_PATIENCE_S, over=way))
        stack.enter_context(relaying(files.values()))
        active = PartyFile.read(files.pop(data.active.name))
        for file in files.values():
            stack.enter_context(_process(file))
        here = stack.enter_context(joined(active))
        script = lead(here.own, here.links, METHODS[config.method.name], session=new_session())
        entered, learner = over(here.transport)(script)
        yield here, learner
        end_all(here.links, list(entered.contract.names("passive")), 0)
        end_all(here.links, list(entered.contract.names("aggregator")), 0)
        here.transport.close()


@contextmanager
def _process(file: Path) -> Iterator[None]:
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


def over(transport: Transport) -> Play:
    return lambda script: drive(script, transport, timeout_s=_PATIENCE_S)


async def _ask(links: Links, payload: bytes, count: int = 1) -> None:
    """Send to "there" and wait for the same, so many times."""
    for _ in range(count):
        links.send("there", Kind.REQUEST, 0, payload)
        await links.receive("there", Kind.SUM, step=0)


async def echo(links: Links) -> None:
    """Send back to "here" until it ends."""
    while (asked := await links.receive("here", Kind.REQUEST, Kind.END)).kind is Kind.REQUEST:
        links.send("here", Kind.SUM, 0, asked.payload)


def seconds_of(links: Links, play: Play, sizes: Iterable[int]) -> Mapping[int, Sequence[float]]:
    """By size of the payload, a key of `COUNTS`, seconds of each message: half of a round trip."""
    found: dict[int, list[float]] = {}
    for size in sizes:
        payload, found[size] = bytes(size), []
        for repetition in range(-_WARM_UP, COUNTS[size]):
            began = time.perf_counter()
            play(_ask(links, payload))
            if repetition >= 0:
                found[size].append((time.perf_counter() - began) / 2)
    return found


def _messages(count: int, wanted: Collection[str]) -> Iterator[Row]:
    """Half of a round trip of 64 bytes by each driver."""
    pairs = {"message/memory": _in_memory, "message/local": _beside_a_process}
    with one_thread(), ExitStack() as stack:
        ends = {case: stack.enter_context(pairs[case]()) for case in pairs if case in wanted}
        asking = {
            case: lambda links=links, play=play: play(_ask(links, bytes(64), count))
            for case, (links, play) in ends.items()
        }
        seconds = interleave(asking, repetitions=5)
    for case, each in seconds.items():
        yield row(case, statistics.median(each) / (2 * count))


@contextmanager
def _in_memory() -> Iterator[tuple[Links, Play]]:
    """A sealed link to a script in this process that sends back what it gets."""
    keys = {name: fresh_run_key() for name in ("here", "there")}
    network = InMemory.sealed(session="bench", contract_hash=bytes(32), run_keys=keys)
    network.begin("there", echo(network.links["there"]))
    yield network.links["here"], lambda script: network.complete("here", script)
    network.close()


@contextmanager
def _beside_a_process() -> Iterator[tuple[Links, Play]]:
    """The same to a process of its own."""
    names = ("here", "there")
    addresses = dict(zip(names, free_addresses(2), strict=True))
    identities = {name: fresh_identity() for name in names}
    peers = {
        name: Peer(address=addresses[name], identity=identities[name].public.hex())
        for name in names
    }
    files = {
        name: PartyFile(
            party=name, active="here", passives=("there",), config=Path("none"),
            listen=addresses[name], peers={peer: peers[peer] for peer in names if peer != name},
        )
        for name in names
    }  # fmt: skip
    context = multiprocessing.get_context("spawn")
    secret = identities["there"].secret_bytes()
    process = context.Process(target=_there, args=(files["there"], secret), daemon=True)
    process.start()
    transport, links = _met(files["here"], identities["here"])
    try:
        yield links, over(transport)
        links.send("there", Kind.END, 0)
    finally:
        transport.close()
        process.join(_PATIENCE_S)


def _there(file: PartyFile, secret: bytes) -> None:
    transport, links = _met(file, Identity.restored(secret))
    over(transport)(echo(links))
    transport.close()


def _met(file: PartyFile, identity: Identity) -> tuple[Transport, Links]:
    """Connected, and with sealed links."""
    known = {name: bytes.fromhex(peer.identity) for name, peer in file.peers.items()}
    transport = connect(file, identity, known)
    links = Links(file.party, list(file.peers), transport.post)
    (peer,) = file.peers
    over(transport)(sealed(links, peer))
    return transport, links


async def sealed(links: Links, peer: str) -> None:
    """Exchange keys and hellos, without a contract."""
    run_key = fresh_run_key()
    links.send(peer, Kind.GREETING, 0, run_key.public)
    theirs = (await links.receive(peer, Kind.GREETING)).payload
    seal = SealedLink(me=links.me, peer=peer, run_key=run_key, contract_hash=bytes(32))
    links.send(peer, Kind.SIGNATURE, 0, seal.hello)
    seal.agree(theirs, (await links.receive(peer, Kind.SIGNATURE)).payload)
    links.seal("bench", {peer: seal})


# case -> bytes of a payload, and how many messages there are
_NVFLARE_CASES: Mapping[str, tuple[int, int]] = {
    **{f"nvflare/message/b{size}": (size, 1) for size in COUNTS},
    f"nvflare/round/b{2**17}": (2**17, 4),
}
NVFLARE = Bench(
    groups=lambda quick: [Group(tuple(_NVFLARE_CASES), _nvflare_rows)], fields=("peer_seconds",)
)


def _nvflare_rows(wanted: Collection[str]) -> Iterator[Row]:
    if importlib.util.find_spec("nvflare") is None:
        why = "nvflare is missing: pip install 'secure-apfed[nvflare]'"
        yield from (row(case, reason=why) for case in wanted)
        return
    sizes = sorted({_NVFLARE_CASES[case][0] for case in wanted})
    apart = _in_a_job(sizes)
    with _in_memory() as (links, play):
        memory = seconds_of(links, play, sizes)
    for case in wanted:
        size, messages = _NVFLARE_CASES[case]
        here, there = statistics.median(memory[size]), statistics.median(apart[size])
        yield row(
            case, messages * there, peer="memory", ratio=there / here, peer_seconds=messages * here
        )


def _in_a_job(sizes: Iterable[int]) -> Mapping[int, Sequence[float]]:
    """By size of the payload, seconds of each message between two sites."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import sys; from apfed_bench.nvflare_echo import play;"
            "play(sys.argv[1], [int(size) for size in sys.argv[2:]])"
        )
        subprocess.run(  # noqa: S603 - this very program
            [sys.executable, "-c", code, folder, *map(str, sizes)],
            check=True, timeout=240.0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        found = json.loads((Path(folder) / "seconds.json").read_bytes())
    return {int(size): seconds for size, seconds in found.items()}


_CONCATENATED = "concatenated"
_PREDICTIONS = 5
_JOINT_CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    _CONCATENATED: ("split_nn", {"scheme": "plain"}),
    "summed/plain": ("split_nn_sum", {"scheme": "plain", "clip": 4.0}),
    "summed/masked": ("split_nn_sum", {"scheme": "plain", "masks": "pairwise", "clip": 4.0}),
    "summed/bfv-masked": ("split_nn_sum", {"scheme": "bfv", "masks": "pairwise", "clip": 4.0}),
    "summed/ckks": ("split_nn_sum", {"scheme": "ckks", "clip": 4.0}),
}
JOINT = Bench(
    groups=lambda quick: [
        Group(tuple(_JOINT_CASES), partial(_joint_rows, rows=400 if quick else 1600))
    ]
)


def _joint_rows(wanted: Collection[str], *, rows: int) -> Iterator[Row]:
    with one_thread():
        cases = {
            name: _JointPrediction(method, secure_sum, rows=rows)
            for name, (method, secure_sum) in _JOINT_CASES.items()
            if name in {*wanted, _CONCATENATED}
        }
        seconds = interleave(
            {name: case.predict for name, case in cases.items()}, repetitions=_PREDICTIONS
        )
    for name in wanted:
        yield row(
            name, statistics.median(seconds[name]) / cases[name].rows, peer=_CONCATENATED,
            ratio=median_ratio(seconds[name], seconds[_CONCATENATED]),
            sent=round(cases[name].bytes_of_a_row),
        )  # fmt: skip


class _JointPrediction:
    """Parties that predict the test rows, again and again."""

    def __init__(self, method: str, secure_sum: Mapping[str, Any], *, rows: int) -> None:
        config = Config.model_validate({
            "name": "bench", "method": method, "secure_sum": secure_sum,
            "data": {"dataset": "digits", "views": 4, "rows": rows, "test_fraction": 0.5},
            "model": {"network": "mlp", "hidden": [64], "representation": 16},
            "train": {"epochs": _PREDICTIONS + 1, "batch_size": 64, "device": "cpu"},
            "guard": {"mechanism": "none"}, "transcript": {"keep": "none"},
        })  # fmt: skip
        self._session = _opened(config, load_data(config.data, seed=0))
        self.rows = len(self._session.entered.own.data.test_rows)
        self._step, self._before = 0, self._session.transcript.wire_bytes

    def predict(self) -> None:
        self._session.evaluate(next_step=self._step, final=True)
        self._step += self.rows  # as many steps as there may be at most

    @property
    def bytes_of_a_row(self) -> float:
        """On all links, of one prediction."""
        sent = self._session.transcript.wire_bytes - self._before
        return sent / self.rows / (self._step / self.rows)


_SIZES = (128, 2**17, 2**21)


class _NoReleases:
    """Of a party that releases nothing."""

    figure: ReleaseFigure = "epsilon_x"
    charges, epsilon = 0, 0.0


def _log_groups(quick: bool) -> Sequence[Group]:
    most, repetitions = (200, 5) if quick else (2000, 15)
    counts = {size: max(20, most * _SIZES[0] // size) for size in _SIZES}
    return [
        *(single(f"log/{size}", _logged, size, count, repetitions)
          for size, count in counts.items()),
        Group(("verify", "resume"), partial(_read, most, repetitions)),
    ]  # fmt: skip


LOG = Bench(groups=_log_groups, fields=("line_bytes",))


@contextmanager
def _fresh_log() -> Iterator[tuple[Path, Callable[[], AuditLog]]]:
    """Where a log will be, and what opens it or goes on with it."""
    identity, peer = fresh_identity(), fresh_identity()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "audit.log")
        yield path, lambda: AuditLog(path, "here", identity, {"there": peer.public}, _NoReleases())


def _read(lines: int, repetitions: int, wanted: Collection[str]) -> Iterator[Row]:
    """Seconds of a line, of a log with so many."""
    with _fresh_log() as (path, opened):
        with opened() as log:
            _note(log, os.urandom(_SIZES[0]), lines)
        calls: dict[str, Callable[[], object]] = {
            "verify": lambda: verify_log(path),
            "resume": lambda: opened().close(),
        }
        seconds = interleave({case: calls[case] for case in wanted}, repetitions=repetitions)
        for case, each in seconds.items():
            size = path.stat().st_size // lines
            yield row(case, statistics.median(each) / lines, line_bytes=size)


def _note(log: AuditLog, frame: bytes, count: int) -> None:
    envelope = Envelope(
        session="bench", step=0, kind=Kind.REPRESENTATIONS, sender="here", receiver="there",
        sequence=0, payload=b"",
    )  # fmt: skip
    for _ in range(count):
        log.sent(envelope, frame)


def _logged(case: str, size: int, count: int, repetitions: int) -> Row:
    """Seconds of one envelope, over so many."""
    frame = os.urandom(size)

    def hash_alone() -> None:
        for _ in range(count):
            hashlib.sha256(frame).digest()

    with _fresh_log() as (_, opened), opened() as log:
        found = compared(
            case, lambda: _note(log, frame, count), hash_alone, peer="SHA-256 alone",
            repetitions=repetitions, each=count, peer_seconds=False,
        )  # fmt: skip
    return {**found, "bytes": size}
