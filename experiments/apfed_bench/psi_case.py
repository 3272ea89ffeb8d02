"""Benchmark of one intersection: a script that `apfed_bench.apart` runs in its own interpreter.

Takes a case and a size, and prints one JSON object: `seconds` from a CSV file of IDs to the rows
that both have, reading, encoding and the dealer's part included, as the peer's are;
`processor_seconds` of the busiest party; `bytes` where they can be seen, `peak_memory` in bytes,
`common` (IDs found); for `ecdh` also `floor_seconds`, what its library's multiplications alone
take, for `vole` and `opprf` `dealt_bytes`, what the dealer sends beside `bytes`. Peak memory is the
sum over the parties' processes.

`ecdh-buckets` and `ot-buckets` are what a session runs: sealed links over sockets of this machine,
IDs streamed from a Parquet file, a folder that keeps what is needed to go on. On sets larger than
others can take:
`PYTHONPATH=. python experiments/apfed_bench/psi_case.py ecdh-buckets 2500000`.
Each case imports only what it measures, so that the peer can live in an environment without
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
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

Measured = dict[str, Any]
_PARTIES = ("hub", "member", "dealer")
# how the figures of several parties become one
_GATHER: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    **dict.fromkeys(("bytes", "peak_memory", "dealt_bytes"), sum),
    **dict.fromkeys(("seconds", "processor_seconds", "common", "floor_seconds"), max),
}
_WITHOUT_DEALER = ("circuit_ot", "ecdh", "opprf_ot", "ot")
_SAMPLE = 20_000
_PATIENCE_S = 1500
_PIECE = 2**16
_FALSE_POSITIVES = 1e-9


def peak_memory() -> int:
    """Return the peak resident bytes of this process.

    The figure ru_maxrss would count what its parent held.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _make_ids(me: str, size: int) -> list[bytes]:
    """Return the set of one party, which shares one half with the other's; nobody holds both."""
    first = {"hub": 0, "member": size // 2}
    return [b"person %d" % k for k in range(first[me], first[me] + size)] if me in first else []


def _estimate_floor_seconds(size: int) -> float:
    """Estimate from a sample how long X25519's multiplications take a party, for both sets."""
    from nacl.bindings import crypto_scalarmult

    scalar = os.urandom(32)
    points = [bytes([k + 9]) + bytes(31) for k in range(100)]
    calls = 2 * size
    sample = min(calls, _SAMPLE)
    began = time.perf_counter()
    for call in range(sample):
        crypto_scalarmult(scalar, points[call % len(points)])
    return (time.perf_counter() - began) * calls / sample


def _run_parties(play: Callable[..., None], parties: Mapping[str, tuple[Any, ...]]) -> Measured:
    """Play each party in a process of its own; gather what they send to their last argument.

    `parties`: arguments of each party's function.
    """
    context = multiprocessing.get_context("spawn")
    name_by_end = {}
    results = list[Measured]()
    for name, args in parties.items():
        inbox, report = context.Pipe(duplex=False)
        context.Process(target=play, args=(*args, report), daemon=True).start()
        report.close()
        name_by_end[inbox] = name
    while name_by_end:
        for inbox in cast(list[Connection], wait(list(name_by_end))):
            name = name_by_end.pop(inbox)
            try:
                results.append(inbox.recv())
            except EOFError:
                raise RuntimeError(f"{name} ended without a result") from None
    return {
        field: gather(result[field] for result in results)
        for field, gather in _GATHER.items()
        if field in results[0]
    }


def _meet_parties(ends: Mapping[str, Connection]) -> Callable[[float], tuple[str, bytes]]:
    """Wait until all parties are up; return what waits for the next message of any.

    `ends`: connection to each party.
    """
    for end in ends.values():
        end.send_bytes(b"up")
    for end in ends.values():
        end.recv_bytes()
    name_by_end = {end: name for name, end in ends.items()}

    def receive_next(patience_s: float) -> tuple[str, bytes]:
        """Return the name of the next party that sends, and its message. Raises TimeoutError: none
        did.

        `patience_s`: seconds.
        """
        ready = cast(list[Connection], wait(list(name_by_end), patience_s))
        if not ready:
            raise TimeoutError("the other parties sent nothing")
        return name_by_end[ready[0]], ready[0].recv_bytes()

    return receive_next


def _run_party(
    me: str,
    protocol: str,
    folder: str,
    size: int,
    ends: Mapping[str, Connection],
    report: Connection,
) -> None:
    """Play one party from its file to its result, once all are up, and report what it took and
    sent.

    `protocol`: name of the intersection. `ends`: connection to each party.
    """
    from pyarrow import csv

    from apfed_protocols.conversation import take_part
    from apfed_protocols.ids import IdNormalisation, encode_ids
    from apfed_protocols.psi import SET_INTERSECTIONS
    from apfed_protocols.psi.interface import IntersectionAgreement

    if protocol == "circuit_crypten":
        # its import takes longer than a small intersection
        from apfed_protocols.crypten import load_crypten

        load_crypten()
    agreement = IntersectionAgreement(session="bench", dealer="dealer")
    backend: Any = SET_INTERSECTIONS[protocol](agreement, threads=1)
    receive = _meet_parties(ends)
    began = time.perf_counter()
    processor_began = time.process_time()
    sent = list[int]()
    path = Path(folder) / f"{me}.csv"
    table = csv.read_csv(path) if path.exists() else None
    ids = [] if table is None else encode_ids(me, table.column("id"), IdNormalisation())

    def send_body(peer: str, body: bytes) -> None:
        sent.append(len(body))
        ends[peer].send_bytes(body)

    role = {
        "hub": lambda: backend.make_hub("hub", ["member"], ids),
        "member": lambda: backend.make_member("member", "hub", ids),
        "dealer": lambda: backend.make_dealer("hub", ["member"]),
    }[me]()
    take_part(role, send=send_body, receive=receive, patience_s=_PATIENCE_S)
    result = {
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - processor_began,
        "bytes": sum(sent),
    }
    if protocol in ("vole", "opprf"):  # correlations know no ID, and are counted apart
        dealt_bytes = result["bytes"] if me == "dealer" else 0
        result |= {"bytes": result["bytes"] - dealt_bytes, "dealt_bytes": dealt_bytes}
    result |= {"peak_memory": peak_memory(), "common": len(role.rows) if me == "hub" else 0}
    if protocol == "ecdh":
        result["floor_seconds"] = _estimate_floor_seconds(size)
    report.send(result)


def _run_ours(protocol: str, size: int) -> Measured:
    """Run each party as a process of its own with one thread, over sockets of this machine.

    `protocol`: name of the intersection.
    """
    parties = _PARTIES[: 2 if protocol in _WITHOUT_DEALER else 3]
    ends: dict[str, dict[str, Connection]] = {name: {} for name in parties}
    for first, second in itertools.combinations(parties, 2):
        ends[first][second], ends[second][first] = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        for name in _PARTIES[:2]:
            _write_csv(Path(folder) / f"{name}.csv", name, size)
        return _run_parties(
            _run_party, {name: (name, protocol, folder, size, ends[name]) for name in parties}
        )


def _write_csv(path: Path, party: str, size: int) -> None:
    """Write one party's IDs as a CSV file."""
    path.write_bytes(b"\n".join((b"id", *_make_ids(party, size), b"")))


def _write_ids(path: Path, first: int, size: int) -> None:
    """Write IDs beside a column that nobody reads, in no order of theirs; a piece at a time.

    `first`: number of the first ID.
    """
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


def _seal_link(me: str, peer: str, meeting: Connection, links: Any) -> None:
    """Agree on keys of the link, as a session does after its contract."""
    from apfed_protocols.seal import SealedLink, fresh_run_key

    key = fresh_run_key()
    seal = SealedLink(me=me, peer=peer, run_key=key, contract_hash=bytes(32))
    meeting.send_bytes(key.public)
    meeting.send_bytes(seal.hello)
    public = meeting.recv_bytes()
    seal.agree(public, meeting.recv_bytes())
    links.seal("bench", {peer: seal})


def _run_bucket_party(
    me: str,
    protocol: str,
    folder: str,
    size: int,
    own_socket: socket.socket,
    meeting: Connection,
    report: Connection,
) -> None:
    """Play one party in buckets, from its file to its rows, and report it.

    `protocol`: name of the intersection.
    """
    from secure_apfed.alignment import IdFile
    from secure_apfed.alignment.over_links import align_hub, align_member, signs_of_alignment
    from secure_apfed.exchange import Links, run_script
    from secure_apfed.exchange.resumable_link import LinkTransport
    from secure_apfed.exchange.sockets import SocketConnection
    from secure_apfed.settings.alignment import AlignmentSettings

    peer = "member" if me == "hub" else "hub"
    connection = SocketConnection(own_socket)
    sent = list[int]()
    connection.trust_peer()
    transport = LinkTransport(me, {peer: lambda: connection}, patience_s=60, meet_s=60)
    links = Links(me, [peer], transport.send_frame, lambda _, wire_bytes: sent.append(wire_bytes))
    _seal_link(me, peer, meeting, links)
    links.signs.set_limits({peer: signs_of_alignment(size, 1)})
    settings = AlignmentSettings(protocol=protocol, threads=1, maximum_ids=size)
    store = Path(folder) / me
    began = time.perf_counter()
    processor_began = time.process_time()
    ids = IdFile(me, Path(folder) / f"{me}.parquet", "id")
    options: dict[str, Any] = {"session": "bench", "folder": store}
    if me == "hub":
        script = align_hub(links, [peer], ids, settings, **options)
    else:
        script = align_member(links, peer, ids, settings, members=[me], **options)
    rows = run_script(script, transport, timeout_s=60)
    seconds = time.perf_counter() - began
    processor_seconds = time.process_time() - processor_began
    transport.close()
    result = {"seconds": seconds, "processor_seconds": processor_seconds, "bytes": sum(sent)}
    report.send(result | {"peak_memory": peak_memory(), "common": len(rows)})


def _run_buckets(protocol: str, size: int) -> Measured:
    """Run two processes on sealed links; a minute of silence ends it.

    `protocol`: name of the intersection.
    """
    parties = ("hub", "member")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = (socket.create_connection(listener.getsockname()), listener.accept()[0])
    meetings = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        for party, first in zip(parties, (0, size // 2), strict=True):
            _write_ids(Path(folder) / f"{party}.parquet", first, size)
        jobs = {
            party: (party, protocol, folder, size, near, meeting)
            for party, near, meeting in zip(parties, sockets, meetings, strict=True)
        }
        return _run_parties(_run_bucket_party, jobs)


def _run_spu_party(
    rank: int, folder: str, protocol: str, addresses: list[str], report: Connection
) -> None:
    """Run one party of spu's intersection and report seconds, common IDs and memory.

    `rank`: 0 or 1. `protocol`: name of the intersection.
    """
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
    began = time.perf_counter()
    processor_began = time.process_time()
    common = psi.psi_execute(config, link).intersection_count
    seconds = time.perf_counter() - began
    processor_seconds = time.process_time() - processor_began
    link.stop_link()
    result = {"seconds": seconds, "processor_seconds": processor_seconds, "common": common}
    report.send(result | {"peak_memory": peak_memory()})


def _run_spu(protocol: str, size: int) -> Measured:
    """Run two processes over the loopback; spu does not report bytes.

    `protocol`: name of the intersection.
    """
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]
    for free in sockets:
        free.close()
    with tempfile.TemporaryDirectory() as folder:
        for rank, party in enumerate(("hub", "member")):
            _write_csv(Path(folder) / f"in{rank}.csv", party, size)
        jobs = {f"party {rank}": (rank, folder, protocol, addresses) for rank in range(2)}
        return _run_parties(_run_spu_party, jobs)


def _run_openmined_psi(_protocol: str, size: int) -> Measured:
    """Run client and server in turn in this process, as the library's example does."""
    from private_set_intersection import python as psi

    hub, member = ([name.decode() for name in _make_ids(me, size)] for me in ("hub", "member"))
    began = time.perf_counter()
    client = psi.client.CreateWithNewKey(True)
    server = psi.server.CreateWithNewKey(True)
    setup = server.CreateSetupMessage(_FALSE_POSITIVES, size, member, psi.DataStructure.GCS)
    request = client.CreateRequest(hub)
    response = server.ProcessRequest(request)
    common = len(client.GetIntersection(setup, response))
    seconds = time.perf_counter() - began
    sent = sum(len(message.SerializeToString()) for message in (setup, request, response))
    return {"seconds": seconds, "bytes": sent, "peak_memory": peak_memory(), "common": common}


CASES: Mapping[str, tuple[Callable[..., Measured], str]] = {
    "circuit": (_run_ours, "circuit"),
    "circuit-crypten": (_run_ours, "circuit_crypten"),
    "circuit-ot": (_run_ours, "circuit_ot"),
    "ecdh": (_run_ours, "ecdh"),
    "ecdh-buckets": (_run_buckets, "ecdh"),
    "ot": (_run_ours, "ot"),
    "ot-buckets": (_run_buckets, "ot"),
    "vole": (_run_ours, "vole"),
    "opprf": (_run_ours, "opprf"),
    "opprf-ot": (_run_ours, "opprf_ot"),
    "spu-rr22": (_run_spu, "RR22"),
    "openmined": (_run_openmined_psi, "ECDH"),
}


def main(case: str, size: int) -> None:
    """Run one case and print what it took."""
    run, protocol = CASES[case]
    print(json.dumps(run(protocol, size)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
