"""What it costs that every party runs in a process of its own, over loopback.

Case `local/apfed_c/fmnist/3-1/b256`: one step of APFed-C with three parties and an aggregator on
the shapes of Fashion-MNIST 3-1, one thread a process; the peer is the same step with all in one
process. Cases `message/memory` and `message/local`: seconds that one sealed message takes from one
script to another, there and back again and halved, without and with a socket between them.
"""

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from apfed_experiments.bench.exchange import whole_batches
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
from apfed_protocols.seal import Identity, SealedLink, fresh_identity, fresh_run_key
from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.exchange import InMemory, Kind, Links, Sockets, drive
from secure_apfed.exchange.sockets import Address, listen_at, parse_address
from secure_apfed.files import make_private
from secure_apfed.methods import METHODS, Learner, lead, new_session, open_session
from secure_apfed.methods.method import end_all
from secure_apfed.runs.local import prepare_parties
from secure_apfed.runs.party import Joined, PartyFile, joined
from secure_apfed.runs.trial_links import Way, free_addresses, relaying
from secure_apfed.seeds import one_thread

__all__ = ["BENCH", "apart", "local_stepper", "sealed", "stepper"]

_BATCH = 256
_CASE = "local/apfed_c/fmnist/3-1/b256"
_PATIENCE_S = 60.0
_PAYLOAD = bytes(64)


def _groups(quick: bool) -> Sequence[Group]:
    return [
        single(_CASE, partial(_step, 7 if quick else 31)),
        Group(("message/memory", "message/local"), partial(_messages, 200 if quick else 2000)),
    ]


BENCH = Bench(groups=_groups, fields=("peer_seconds", "images"))


@one_thread()
def _step(repetitions: int) -> Row:
    """Seconds of a training step, and the ratio to one process's (target: at most 1.3)."""
    config, data, images = image_run(
        "bench-local", batch=_BATCH, secure_sum={"scheme": "plain", "clip": None}, views=3
    )
    with ExitStack() as stack:
        here, learner = stack.enter_context(apart(config, data))
        memory = stepper(config, data)
        local = local_stepper(here, learner)
        seconds = interleave({"local": local, "memory": memory}, repetitions=repetitions, warm_up=2)
    return Row(
        case=_CASE,
        seconds=statistics.median(seconds["local"]),
        peer="memory",
        ratio=median_ratio(seconds["local"], seconds["memory"]),
        more={"peer_seconds": statistics.median(seconds["memory"]), "images": images},
    )


def stepper(config: Config, data: VerticalData) -> Callable[[], object]:
    """One step after another, all parties in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        session = open_session(config, data)
    batches = enumerate(whole_batches(session.learner.training_rows))
    return lambda: session.step(*next(batches))


def local_stepper(here: Joined, learner: Learner) -> Callable[[], object]:
    """One step after another, the active in this process and the others in theirs."""
    batches = enumerate(whole_batches(learner.training_rows))
    return lambda: drive(
        learner.step(here.links, *next(batches)), here.transport, timeout_s=_PATIENCE_S
    )


@contextmanager
def apart(
    config: Config, data: VerticalData, *, over: Way = "tcp"
) -> Iterator[tuple[Joined, Learner]]:
    """A session that is set up: its active here, each other party in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder)
        make_private(path)
        files = dict(prepare_parties(config, path, data=data, timeout_s=_PATIENCE_S, over=over))
        stack.enter_context(relaying(files.values()))
        active = PartyFile.read(files.pop(data.active.name))
        for file in files.values():
            stack.enter_context(_process(file))
        here = stack.enter_context(joined(active))
        script = lead(here.own, here.links, METHODS[config.method.name], session=new_session())
        entered, learner = drive(script, here.transport, timeout_s=_PATIENCE_S)
        yield here, learner
        end_all(here.links, list(entered.contract.names("passive")), 0)
        end_all(here.links, list(entered.contract.names("aggregator")), 0)
        here.transport.close()


@contextmanager
def _process(file: Path) -> Iterator[None]:
    """One party's process, with one thread as here."""
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


def _messages(count: int, wanted: Collection[str]) -> Iterator[Row]:
    """Half of a round trip of 64 bytes by each driver."""
    with one_thread(), ExitStack() as stack:
        asking: dict[str, Callable[[], None]] = {}
        if "message/memory" in wanted:
            asking["message/memory"] = stack.enter_context(_asking_in_memory(count))
        if "message/local" in wanted:
            asking["message/local"] = stack.enter_context(_asking_a_process(count))
        seconds = interleave(asking, repetitions=5)
    for case, each in seconds.items():
        yield Row(case=case, seconds=statistics.median(each) / (2 * count))


@contextmanager
def _asking_in_memory(count: int) -> Iterator[Callable[[], None]]:
    keys = {name: fresh_run_key() for name in ("here", "there")}
    network = InMemory.sealed(session="bench", contract_hash=bytes(32), run_keys=keys)
    network.begin("there", _echo(network.links["there"]))
    yield lambda: network.complete("here", _ask(network.links["here"], count))
    network.close()


@contextmanager
def _asking_a_process(count: int) -> Iterator[Callable[[], None]]:
    with _echoing() as (transport, links):
        yield lambda: drive(_ask(links, count), transport, timeout_s=_PATIENCE_S)
        links.send("there", Kind.END, 0)


async def _ask(links: Links, count: int) -> None:
    for _ in range(count):
        links.send("there", Kind.REQUEST, 0, _PAYLOAD)
        await links.receive("there", Kind.SUM, step=0)


async def _echo(links: Links) -> None:
    while (asked := await links.receive("here", Kind.REQUEST, Kind.END)).kind is Kind.REQUEST:
        links.send("here", Kind.SUM, 0, asked.payload)


@contextmanager
def _echoing() -> Iterator[tuple[Sockets, Links]]:
    """A sealed link to a process that sends back what it gets."""
    addresses = dict(zip(("here", "there"), map(parse_address, free_addresses(2)), strict=True))
    identities = {name: fresh_identity() for name in addresses}
    known = {name: one.public for name, one in identities.items()}
    secret = identities["there"].secret_bytes()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_there, args=(addresses, known, secret), daemon=True)
    process.start()
    transport, links = _met("here", addresses, identities["here"], known)
    try:
        yield transport, links
    finally:
        transport.close()
        process.join(_PATIENCE_S)


def _there(addresses: Mapping[str, Address], known: Mapping[str, bytes], secret: bytes) -> None:
    transport, links = _met("there", addresses, Identity.restored(secret), known)
    drive(_echo(links), transport, timeout_s=_PATIENCE_S)
    transport.close()


def _met(
    me: str, addresses: Mapping[str, Address], identity: Identity, known: Mapping[str, bytes]
) -> tuple[Sockets, Links]:
    """Connected, and with sealed links."""
    peers = {name: address for name, address in addresses.items() if name != me}
    transport = Sockets.meet(
        me, listen_at(addresses[me]), peers, identity=identity, known=known,
        timeout_s=_PATIENCE_S,
    )  # fmt: skip
    links = Links(me, list(peers), transport.post)
    (peer,) = peers
    drive(sealed(links, peer), transport, timeout_s=_PATIENCE_S)
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
