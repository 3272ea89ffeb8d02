"""One intersection, run as a script in an interpreter of its own by `apfed_bench.psi`.

Takes a case and a size, and prints one JSON object: `seconds` from the IDs to the result,
`bytes` and `rounds` where they can be seen, `peak_memory` in bytes, `common` (IDs found); for
`ecdh` also `floor_seconds`, what its library's multiplications alone take. Peak memory is the
sum over the parties' processes, `peak_party` that of the larger one; `cpu_seconds` is the processor
time of the busier party.

`ecdh-buckets` is what a session runs: sealed links over sockets of this machine, IDs streamed from
a Parquet file, a folder that keeps what is needed to go on. On sets larger than others can take:
`PYTHONPATH=. python experiments/apfed_bench/psi_case.py ecdh-buckets 2500000`.
Two more numbers are threads a party and percent of IDs shared: `ecdh-buckets 10000000 1 20`.
Each case imports only what it measures, so that a peer can live in an environment without
this project, and memory is that of the protocol.
"""

import itertools
import json
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

__all__ = ["CASES", "main", "peak_memory"]

Measured = dict[str, Any]
_PARTIES = ("hub", "member", "dealer")
_ROUND_BYTES = 4
# how the figures of several parties become one
_GATHER: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    **dict.fromkeys(("bytes", "peak_memory", "dealt_bytes"), sum),
    **dict.fromkeys(("seconds", "rounds", "peak_party", "cpu_seconds", "dealt_seconds", "common",
                     "floor_seconds"), max),
}  # fmt: skip
_SAMPLE = 20_000
_PATIENCE_S = 1500
_PIECE = 2**16


def peak_memory() -> int:
    """Peak resident bytes of this process; ru_maxrss would count what its parent held."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _cpu_seconds() -> float:
    """Processor time of this process and of those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _ids(size: int) -> tuple[list[str], list[str]]:
    """Two sets that share one half."""
    names = [f"person {k}" for k in range(size // 2 + size)]
    return names[:size], names[size // 2 :]


def _own_ids(me: str, size: int) -> list[bytes]:
    """The set of one party, the same as in `_ids`: nobody holds that of another."""
    first = {"hub": 0, "member": size // 2}
    return [b"person %d" % k for k in range(first[me], first[me] + size)] if me in first else []


class _Counted:
    """A role whose messages are counted, each sent with the round that it belongs to."""

    def __init__(self, role: Any) -> None:
        self.role, self.bytes, self.round = role, 0, 0
        self._came: dict[str, deque[bytes]] = defaultdict(deque)

    @property
    def finished(self) -> bool:
        return bool(self.role.finished)

    def start(self) -> Iterator[Any]:
        return self._count(self.role.start())

    def receive(self, sender: str, body: bytes) -> Iterator[Any]:
        """Hand on what the role waits for: what came too early did not keep others waiting."""
        self._came[sender].append(body)
        while not self.finished:
            awaited = getattr(self.role, "awaited", [sender])
            if not all(self._came[peer] for peer in awaited):
                break
            for peer in awaited:
                body = self._came[peer].popleft()
                self.round = max(self.round, int.from_bytes(body[:_ROUND_BYTES], "big"))
                yield from self._count(self.role.receive(peer, body[_ROUND_BYTES:]))

    def _count(self, messages: Iterable[Any]) -> Iterator[Any]:
        """Note their bytes, and that they waited for all that came so far."""
        head = (self.round + 1).to_bytes(_ROUND_BYTES, "big")
        for message in messages:
            self.bytes += len(message.body)
            yield replace(message, body=head + message.body)


def _floor_seconds(size: int) -> float:
    """What X25519 alone takes a party, for its own set and the other's; from a sample."""
    from nacl.bindings import crypto_scalarmult

    scalar, points = os.urandom(32), [bytes([k + 9]) + bytes(31) for k in range(100)]
    calls = 2 * size
    sample = min(calls, _SAMPLE)
    began = time.perf_counter()
    for call in range(sample):
        crypto_scalarmult(scalar, points[call % len(points)])
    return (time.perf_counter() - began) * calls / sample


def _play(
    play: Callable[..., None], parties: Mapping[str, tuple[Any, ...]], *, daemon: bool = True
) -> Measured:
    """Play each party in a process of its own; gather what they send to their last argument.

    Daemons end with this process, but may start no others; RuntimeError: one ended without result.
    """
    new = multiprocessing.get_context("spawn")
    name_of, found = {}, list[Measured]()
    for name, args in parties.items():
        inbox, report = new.Pipe(duplex=False)
        new.Process(target=play, args=(*args, report), daemon=daemon).start()
        report.close()
        name_of[inbox] = name
    while name_of:
        for inbox in cast(list[Connection], wait(list(name_of))):
            name = name_of.pop(inbox)
            try:
                found.append(inbox.recv())
            except EOFError:
                raise RuntimeError(f"{name} ended without a result") from None
    fields = _GATHER.keys() & found[0].keys()
    return {field: _GATHER[field](each[field] for each in found) for field in fields}


def _made(me: str, backend: Any, *ids: Any, **supply: Any) -> Any:
    """One party's role."""
    if me == "hub":
        return backend.hub("hub", ["member"], *ids, **supply)
    if me == "member":
        return backend.member("member", "hub", *ids, **supply)
    return backend.dealer("hub", ["member"])


def _meet(ends: Mapping[str, Connection]) -> Callable[[float], tuple[str, bytes]]:
    """Wait until all parties are up; return what waits for the next message of any."""
    for end in ends.values():
        end.send_bytes(b"up")
    for end in ends.values():
        end.recv_bytes()
    name_of = {end: name for name, end in ends.items()}

    def receive(patience_s: float) -> tuple[str, bytes]:
        ready = cast(list[Connection], wait(list(name_of), patience_s))
        if not ready:
            raise TimeoutError("the other parties sent nothing")
        return name_of[ready[0]], ready[0].recv_bytes()

    return receive


def _played(make: Callable[[], Any], ends: Mapping[str, Connection]) -> tuple[_Counted, Measured]:
    """Make and play a role once all parties are up; also the seconds that it took."""
    from apfed_protocols.conversation import take_part

    receive, began, cpu = _meet(ends), time.perf_counter(), _cpu_seconds()
    counted = _Counted(make())
    take_part(
        counted, send=lambda peer, body: ends[peer].send_bytes(body), receive=receive,
        patience_s=_PATIENCE_S,
    )  # fmt: skip
    return counted, _took(began, cpu)


def _took(began: float, cpu: float) -> Measured:
    return {"seconds": time.perf_counter() - began, "cpu_seconds": _cpu_seconds() - cpu}


def _found(me: str, counted: _Counted, took: Measured) -> Measured:
    common = len(counted.role.rows) if me == "hub" else 0
    return took | _peaks(common) | {"bytes": counted.bytes, "rounds": counted.round}


def _peaks(common: int) -> Measured:
    peak = peak_memory()
    return {"peak_memory": peak, "peak_party": peak, "common": common}


def _party(
    me: str, protocol: str, size: int, ends: Mapping[str, Connection], report: Connection
) -> None:
    """Play one party from its IDs to its result, and report it."""
    if protocol == "circuit_crypten":
        # its import takes longer than a small intersection
        from apfed_protocols.crypten import load_crypten

        load_crypten()
    from apfed_protocols.psi import SET_INTERSECTIONS
    from apfed_protocols.psi.interface import IntersectionAgreement

    agreement = IntersectionAgreement(session="bench", dealer="dealer")
    backend = SET_INTERSECTIONS[protocol](agreement, threads=1)
    role = partial(_made, me, backend, _own_ids(me, size))
    found = _found(me, *_played(role, ends))
    report.send(found | ({"floor_seconds": _floor_seconds(size)} if protocol == "ecdh" else {}))


def _ours(protocol: str, size: int, party: Callable[..., None] = _party) -> Measured:
    """Each party a process of its own with one thread; sockets of this machine between them."""
    parties = _PARTIES[: 2 if protocol == "ecdh" else 3]
    ends: dict[str, dict[str, Connection]] = {name: {} for name in parties}
    for first, second in itertools.combinations(parties, 2):
        ends[first][second], ends[second][first] = multiprocessing.Pipe()
    return _play(party, {name: (name, protocol, size, ends[name]) for name in parties})


def _ahead_party(
    me: str, protocol: str, size: int, ends: Mapping[str, Connection], report: Connection
) -> None:
    """The same with a dealer that deals before, and has no part in what is measured."""
    from apfed_protocols.psi.circuit import OpprfIntersection
    from apfed_protocols.psi.interface import IntersectionAgreement
    from apfed_protocols.psi.vole import VoleIntersection

    agreement = IntersectionAgreement(
        session="bench", dealer="dealer", ahead=True, sizes={"hub": size, "member": size}
    )
    kind: Any = VoleIntersection if protocol == "vole" else OpprfIntersection
    backend = kind(agreement, threads=1)
    stock = {
        "hub": lambda: backend.stock_hub("hub", ["member"]),
        "member": lambda: backend.stock_member("member", "hub"),
        "dealer": lambda: backend.stock_dealer("hub", ["member"]),
    }[me]
    # who has its part already waits for the others, who read no word of it yet
    dealing = ends if me == "dealer" else {"dealer": ends["dealer"]}
    dealt, dealing_took = _played(stock, dealing)
    supply = getattr(dealt.role, "supply", None)
    role = partial(_made, me, backend, _own_ids(me, size), supply=supply)
    ahead = {"dealt_seconds": dealing_took["seconds"], "dealt_bytes": dealt.bytes}
    report.send(ahead | _found(me, *_played(role, ends)))


def _write_ids(path: Path, first: int, size: int) -> None:
    """IDs beside a column that nobody reads, in no order of theirs; a piece at a time."""
    import numpy as np
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = pa.schema([("id", pa.string()), ("amount", pa.float64())])
    with ParquetWriter(path, schema) as file:
        for start in range(first, first + size, _PIECE):
            end = min(start + _PIECE, first + size)
            names = [f"person {k}" for k in range(start, end)]
            amounts = np.random.default_rng(start).random(end - start)
            file.write_table(pa.table({"id": names, "amount": amounts}, schema))


def _sealed(me: str, peer: str, meeting: Connection, links: Any) -> None:
    """Agree on keys of the link, as a session does after its contract."""
    from apfed_protocols.seal import SealedLink, fresh_run_key

    key = fresh_run_key()
    seal = SealedLink(me=me, peer=peer, run_key=key, contract_hash=bytes(32))
    meeting.send_bytes(key.public)
    meeting.send_bytes(seal.hello)
    public = meeting.recv_bytes()
    seal.agree(public, meeting.recv_bytes())
    links.seal("bench", {peer: seal})


def _bucket_party(
    me: str, folder: str, size: int, threads: int, near: socket.socket, meeting: Connection,
    report: Connection,
) -> None:  # fmt: skip
    """Play one party in buckets, from its file to its rows, and report it."""
    from secure_apfed.alignment import IdFile
    from secure_apfed.alignment.over_links import align_hub, align_member, signs_of_alignment
    from secure_apfed.exchange import Links, drive
    from secure_apfed.exchange.resumable_link import Linked
    from secure_apfed.exchange.sockets import SocketConnection
    from secure_apfed.settings.alignment import AlignmentSettings

    peer = "member" if me == "hub" else "hub"
    connection, sent = SocketConnection(near), list[int]()
    connection.trust()
    transport = Linked(me, {peer: lambda: connection}, patience_s=60, meet_s=60)
    links = Links(me, [peer], transport.post, lambda _, wire_bytes: sent.append(wire_bytes))
    _sealed(me, peer, meeting, links)
    links.signs.allow({peer: signs_of_alignment(size, 1)})
    settings = AlignmentSettings(threads=threads, maximum_ids=size)
    kept = Path(folder) / me
    began, cpu = time.perf_counter(), _cpu_seconds()
    ids = IdFile(me, Path(folder) / f"{me}.parquet", "id")
    asked: dict[str, Any] = {"session": "bench", "folder": kept}
    if me == "hub":
        script = align_hub(links, [peer], ids, settings, **asked)
    else:
        script = align_member(links, peer, ids, settings, members=[me], **asked)
    rows = drive(script, transport, timeout_s=60)
    took = _took(began, cpu)
    transport.close()
    report.send(took | {"bytes": sum(sent)} | _peaks(len(rows)))


def _in_buckets(_protocol: str, size: int, threads: int = 1, shared: int = 50) -> Measured:
    """Two processes on sealed links, `shared` percent in common; a minute of silence ends it."""
    parties = ("hub", "member")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = (socket.create_connection(listener.getsockname()), listener.accept()[0])
    meetings = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        for party, first in zip(parties, (0, size - size * shared // 100), strict=True):
            _write_ids(Path(folder) / f"{party}.parquet", first, size)
        jobs = {
            party: (party, folder, size, threads, near, meeting)
            for party, near, meeting in zip(parties, sockets, meetings, strict=True)
        }
        return {"rounds": None} | _play(_bucket_party, jobs, daemon=threads == 1)


def _openmined(_protocol: str, size: int) -> Measured:
    """openmined-psi (ECDH on P-256), client and server in one thread.

    The server's set is Golomb-compressed, its smallest form; false positives at 2^-40.
    """
    import private_set_intersection.python as psi

    client_ids, server_ids = _ids(size)
    began = time.perf_counter()
    client, server = psi.client.CreateWithNewKey(True), psi.server.CreateWithNewKey(True)
    setup_sent = server.CreateSetupMessage(
        2**-40, size, server_ids, psi.DataStructure.GCS
    ).SerializeToString()
    request_sent = client.CreateRequest(client_ids).SerializeToString()
    request, setup, response = psi.Request(), psi.ServerSetup(), psi.Response()
    request.ParseFromString(request_sent)
    response_sent = server.ProcessRequest(request).SerializeToString()
    setup.ParseFromString(setup_sent)
    response.ParseFromString(response_sent)
    common = client.GetIntersection(setup, response)
    return {
        "seconds": time.perf_counter() - began, "rounds": 2, "peak_memory": peak_memory(),
        "bytes": len(setup_sent) + len(request_sent) + len(response_sent), "common": len(common),
    }  # fmt: skip


def _spu_party(
    rank: int, folder: str, protocol: str, addresses: list[str], report: Connection
) -> None:
    from spu import libspu, psi

    description = libspu.link.Desc()
    for place, address in enumerate(addresses):
        description.add_party(f"party {place}", address)
    link = libspu.link.create_brpc(description, rank)
    config = psi.PsiExecuteConfig(
        protocol_conf=psi.PsiProtocolConfig(
            protocol=psi.parse_protocol(f"PROTOCOL_{protocol}"),
            receiver_rank=0,
            ecdh_params=psi.EcdhParams(curve=psi.EllipticCurveType.CURVE_25519),
        ),
        input_params=psi.InputParams(
            path=f"{folder}/in{rank}.csv", selected_keys=["id"], keys_unique=True
        ),
        output_params=psi.OutputParams(path=f"{folder}/out{rank}.csv", disable_alignment=True),
    )
    began, cpu = time.perf_counter(), _cpu_seconds()
    common = psi.psi_execute(config, link).intersection_count
    took = _took(began, cpu)
    link.stop_link()
    report.send(took | _peaks(common))


def _spu(protocol: str, size: int) -> Measured:
    """Two processes on the loopback; spu tells neither bytes nor rounds."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]
    for free in sockets:
        free.close()
    with tempfile.TemporaryDirectory() as folder:
        for rank, names in enumerate(_ids(size)):
            (Path(folder) / f"in{rank}.csv").write_text("\n".join(["id", *names, ""]))
        jobs = {f"party {rank}": (rank, folder, protocol, addresses) for rank in range(2)}
        return {"bytes": None, "rounds": None} | _play(_spu_party, jobs)


CASES: Mapping[str, tuple[Callable[..., Measured], str]] = {
    "circuit": (_ours, "circuit"),
    "circuit-crypten": (_ours, "circuit_crypten"),
    "ecdh": (_ours, "ecdh"),
    "ecdh-buckets": (_in_buckets, "ecdh"),
    "vole": (partial(_ours, party=_ahead_party), "vole"),
    "opprf": (partial(_ours, party=_ahead_party), "opprf"),
    "openmined": (_openmined, ""),
    "spu-rr22": (_spu, "RR22"),
    "spu-kkrt": (_spu, "KKRT"),
    "spu-ecdh": (_spu, "ECDH"),
}


def main(case: str, size: int, *more: int) -> None:
    """Run one case and print what it took; `ecdh-buckets` takes threads and percent shared, too."""
    run, protocol = CASES[case]
    print(json.dumps(run(protocol, size, *more)))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
