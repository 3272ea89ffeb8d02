"""Benchmark of one private set intersection: a script that `apfed_bench.apart` runs as a process.

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
# Of two parties with IDs the hub is the one that learns which rows are common; a dealer, where a
# protocol has one, provides correlated randomness.
_PARTIES = ("hub", "member", "dealer")
# How the measurements of several parties are merged.
_MERGE_BY_FIELD: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    **dict.fromkeys(("bytes", "peak_memory", "dealt_bytes"), sum),
    **dict.fromkeys(("seconds", "processor_seconds", "common", "floor_seconds"), max),
}
_PROTOCOLS_WITHOUT_DEALER = ("circuit_ot", "ecdh", "opprf_ot", "ot")
_MAX_TIMED_CALLS = 20_000
_TIMEOUT_S = 1500
_ROWS_PER_WRITE = 2**16
_FALSE_POSITIVE_RATE = 1e-9


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes.

    It is read from /proc where possible, since the system call (ru_maxrss) includes memory of the
    parent process.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # A line such as "VmHWM:   123456 kB"; 0 if the system has none.
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _make_ids(party: str, size: int) -> list[bytes]:
    """Return the IDs of a party, `size` of them; `party`: "hub", "member" or "dealer".

    The hub learns the result, the member is its peer, and half of their IDs are common. A dealer of
    correlated randomness has no IDs.
    """
    if party not in ("hub", "member"):
        return []
    first_number = 0 if party == "hub" else size // 2
    return [b"person %d" % number for number in range(first_number, first_number + size)]


def _estimate_floor_seconds(size: int) -> float:
    """Estimate the least seconds of one party: of its X25519 multiplications, one for each ID of
    both sets.

    `size`: number of IDs of a set. A sample of the multiplications is timed.
    """
    from nacl.bindings import crypto_scalarmult

    scalar = os.urandom(32)
    # A hundred points of 32 bytes; 9 is X25519's base point.
    points = [bytes([k + 9]) + bytes(31) for k in range(100)]
    needed_calls = 2 * size
    timed_calls = min(needed_calls, _MAX_TIMED_CALLS)
    began = time.perf_counter()
    for call in range(timed_calls):
        crypto_scalarmult(scalar, points[call % len(points)])
    return (time.perf_counter() - began) * needed_calls / timed_calls


def _run_parties(
    run_party: Callable[..., None], arguments_by_party: Mapping[str, tuple[Any, ...]]
) -> Measured:
    """Run each party in a process of its own, and return their measurements, merged into one.

    Bytes and memory are summed, seconds are those of the slowest party.

    Args:
        run_party: function that runs one party and sends its measurements through its last
            argument, a connection.
        arguments_by_party: other arguments of `run_party` by name of the party.

    Raises RuntimeError: a party ended without sending measurements.
    """
    context = multiprocessing.get_context("spawn")
    name_by_connection = {}
    results = list[Measured]()
    for name, party_arguments in arguments_by_party.items():
        receiving_end, sending_end = context.Pipe(duplex=False)
        context.Process(target=run_party, args=(*party_arguments, sending_end), daemon=True).start()
        sending_end.close()  # the process has its own copy; else its end would not be noticed
        name_by_connection[receiving_end] = name
    # Whichever party ends is read next; one that fails closes its connection without a result.
    while name_by_connection:
        for receiving_end in cast(list[Connection], wait(list(name_by_connection))):
            name = name_by_connection.pop(receiving_end)
            try:
                results.append(receiving_end.recv())
            except EOFError:
                raise RuntimeError(f"{name} ended without a result") from None
    return {
        field: merge(result[field] for result in results)
        for field, merge in _MERGE_BY_FIELD.items()
        if field in results[0]
    }


def _await_parties(
    connection_by_peer: Mapping[str, Connection],
) -> Callable[[float], tuple[str, bytes]]:
    """Wait until all parties have started; return a function that receives the next message.

    `connection_by_peer`: connection to each other party.
    """
    for connection in connection_by_peer.values():
        connection.send_bytes(b"up")
    for connection in connection_by_peer.values():
        connection.recv_bytes()
    peer_by_connection = {end: name for name, end in connection_by_peer.items()}

    def receive_next(timeout_s: float) -> tuple[str, bytes]:
        """Return the sender and the body of the next message of any party.

        Raises TimeoutError: no message came within this number of seconds.
        """
        ready = cast(list[Connection], wait(list(peer_by_connection), timeout_s))
        if not ready:
            raise TimeoutError("the other parties sent nothing")
        return peer_by_connection[ready[0]], ready[0].recv_bytes()

    return receive_next


def _run_pipe_party(
    party: str,
    protocol: str,
    folder: str,
    size: int,
    connection_by_peer: Mapping[str, Connection],
    result_connection: Connection,
) -> None:
    """Run one party from its CSV file to its result, once all parties have started.

    Args:
        party: name of the party, which is also its role.
        protocol: key of `SET_INTERSECTIONS`.
        folder: path of the folder that holds the CSV files of IDs.
        size: number of IDs of a set.
        connection_by_peer: connection to each other party.
        result_connection: connection through which the measurements are sent.
    """
    from pyarrow import csv

    from apfed_protocols.conversation import take_part
    from apfed_protocols.ids import IdNormalisation, encode_ids
    from apfed_protocols.psi import SET_INTERSECTIONS
    from apfed_protocols.psi.interface import IntersectionAgreement

    if protocol == "circuit_crypten":
        # CrypTen is loaded before the clock starts: that takes longer than a small intersection.
        from apfed_protocols.crypten import load_crypten

        load_crypten()
    agreement = IntersectionAgreement(session="bench", dealer="dealer")
    intersection: Any = SET_INTERSECTIONS[protocol](agreement, threads=1)
    receive_next = _await_parties(connection_by_peer)
    began = time.perf_counter()
    processor_began = time.process_time()
    sent_sizes = list[int]()  # of each message
    path = Path(folder) / f"{party}.csv"
    table = csv.read_csv(path) if path.exists() else None
    ids = [] if table is None else encode_ids(party, table.column("id"), IdNormalisation())

    def send_body(peer: str, body: bytes) -> None:
        """Send a message to a party, and count its bytes."""
        sent_sizes.append(len(body))
        connection_by_peer[peer].send_bytes(body)

    role = {
        "hub": lambda: intersection.make_hub("hub", ["member"], ids),
        "member": lambda: intersection.make_member("member", "hub", ids),
        "dealer": lambda: intersection.make_dealer("hub", ["member"]),
    }[party]()
    take_part(role, send=send_body, receive=receive_next, patience_s=_TIMEOUT_S)
    result = {
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - processor_began,
        "bytes": sum(sent_sizes),
    }
    # The dealer's correlated randomness depends on no ID, so it could be sent beforehand: it is
    # counted separately.
    if protocol in ("vole", "opprf"):
        dealt_bytes = result["bytes"] if party == "dealer" else 0
        result |= {"bytes": result["bytes"] - dealt_bytes, "dealt_bytes": dealt_bytes}
    result |= {"peak_memory": peak_memory(), "common": len(role.rows) if party == "hub" else 0}
    if protocol == "ecdh":
        result["floor_seconds"] = _estimate_floor_seconds(size)
    result_connection.send(result)


def _run_over_pipes(protocol: str, size: int) -> Measured:
    """Run one of our intersections, each party as a process with one thread, over pipes.

    Returns the merged measurements. `protocol`: key of `SET_INTERSECTIONS`. `size`: number of IDs
    of a set.
    """
    parties = _PARTIES[
        : 2 if protocol in _PROTOCOLS_WITHOUT_DEALER else 3
    ]  # the dealer is the last
    connections_by_party: dict[str, dict[str, Connection]] = {name: {} for name in parties}
    for party, other in itertools.combinations(parties, 2):
        connections_by_party[party][other], connections_by_party[other][party] = (
            multiprocessing.Pipe()
        )
    with tempfile.TemporaryDirectory() as folder:
        for name in _PARTIES[:2]:
            _write_csv(Path(folder) / f"{name}.csv", name, size)
        return _run_parties(
            _run_pipe_party,
            {name: (name, protocol, folder, size, connections_by_party[name]) for name in parties},
        )


def _write_csv(path: Path, party: str, size: int) -> None:
    """Write one party's IDs, `size` of them, as a CSV file."""
    path.write_bytes(b"\n".join((b"id", *_make_ids(party, size), b"")))


def _write_parquet(path: Path, first_number: int, size: int) -> None:
    """Write a Parquet file of consecutive IDs, and of a column that the intersection does not read.

    `first_number`: number of the first ID. `size`: number of IDs.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = pa.schema([("id", pa.string()), ("amount", pa.float64())])
    with ParquetWriter(path, schema) as file:  # in pieces, which fit into memory
        for start in range(first_number, first_number + size, _ROWS_PER_WRITE):
            end = min(start + _ROWS_PER_WRITE, first_number + size)
            ids = [f"person {k}" for k in range(start, end)]
            amounts = np.random.default_rng(start).random(end - start)
            file.write_table(pa.table({"id": ids, "amount": amounts}, schema))


def _encrypt_link(me: str, peer: str, key_exchange: Connection, links: Any) -> None:
    """Agree on keys with the peer and encrypt the link from now on, as a session does.

    `me`, `peer`: names of this party and of the other. `key_exchange`: connection for the messages
    of the key agreement. `links`: links of this party.
    """
    from apfed_protocols.seal import SealedLink, fresh_run_key

    own_key = fresh_run_key()
    sealed_link = SealedLink(me=me, peer=peer, run_key=own_key, contract_hash=bytes(32))
    key_exchange.send_bytes(own_key.public)
    key_exchange.send_bytes(sealed_link.hello)
    peer_public_key = key_exchange.recv_bytes()
    sealed_link.agree(peer_public_key, key_exchange.recv_bytes())
    links.seal("bench", {peer: sealed_link})


def _run_bucket_party(
    me: str,
    protocol: str,
    folder: str,
    size: int,
    own_socket: socket.socket,
    key_exchange: Connection,
    result_connection: Connection,
) -> None:
    """Run one party of an intersection in buckets of IDs, as in a session, and report measurements.

    Args:
        me: name of the party, which is also its role.
        protocol: name of the intersection, as in the settings.
        folder: path of the folder that holds the Parquet files of IDs.
        size: number of IDs of a set.
        own_socket: socket to the peer.
        key_exchange: connection for the key agreement.
        result_connection: connection through which the measurements are sent.
    """
    from secure_apfed.alignment import IdFile
    from secure_apfed.alignment.over_links import (
        align_hub,
        align_member,
        count_alignment_heartbeats,
    )
    from secure_apfed.exchange import Links, run_script
    from secure_apfed.exchange.resumable_link import LinkTransport
    from secure_apfed.exchange.sockets import SocketConnection
    from secure_apfed.settings.alignment import AlignmentSettings

    peer = "member" if me == "hub" else "hub"
    connection = SocketConnection(own_socket)
    sent_sizes = list[int]()  # of each message
    connection.trust_peer()  # both processes are of this bench: no certificate is checked
    transport = LinkTransport(me, {peer: lambda: connection}, patience_s=60, meet_s=60)
    links = Links(
        me, [peer], transport.send_frame, lambda _, wire_bytes: sent_sizes.append(wire_bytes)
    )
    _encrypt_link(me, peer, key_exchange, links)
    # The peer may send as many heartbeats as an alignment of `size` IDs with one peer needs.
    links.heartbeats.set_limits({peer: count_alignment_heartbeats(size, 1)})
    settings = AlignmentSettings(protocol=protocol, threads=1, maximum_ids=size)
    store_folder = Path(folder) / me
    began = time.perf_counter()
    processor_began = time.process_time()
    ids = IdFile(me, Path(folder) / f"{me}.parquet", "id")
    shared_arguments: dict[str, Any] = {"session": "bench", "folder": store_folder}
    if me == "hub":
        script = align_hub(links, [peer], ids, settings, **shared_arguments)
    else:
        script = align_member(links, peer, ids, settings, members=[me], **shared_arguments)
    rows = run_script(script, transport, timeout_s=60)
    seconds = time.perf_counter() - began
    processor_seconds = time.process_time() - processor_began
    transport.close()
    result = {"seconds": seconds, "processor_seconds": processor_seconds, "bytes": sum(sent_sizes)}
    result_connection.send(result | {"peak_memory": peak_memory(), "common": len(rows)})


def _run_buckets(protocol: str, size: int) -> Measured:
    """Run an intersection in buckets of IDs between two processes over encrypted sockets.

    Returns the merged measurements. The run ends after a minute without a message. `protocol`: name
    of the intersection, as in the settings. `size`: number of IDs of a set.
    """
    parties = ("hub", "member")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = (socket.create_connection(listener.getsockname()), listener.accept()[0])
    key_exchanges = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        for party, first_number in zip(parties, (0, size // 2), strict=True):
            _write_parquet(Path(folder) / f"{party}.parquet", first_number, size)
        arguments_by_party = {
            party: (party, protocol, folder, size, own_socket, key_exchange)
            for party, own_socket, key_exchange in zip(parties, sockets, key_exchanges, strict=True)
        }
        return _run_parties(_run_bucket_party, arguments_by_party)


def _run_spu_party(
    rank: int, folder: str, protocol: str, addresses: list[str], result_connection: Connection
) -> None:
    """Run one party of spu's intersection and report measurements.

    Args:
        rank: index of the party, 0 or 1; party 0 receives the result.
        folder: path of the folder that holds the CSV files of IDs.
        protocol: spu's name of the intersection.
        addresses: host:port of both parties, by rank.
        result_connection: connection through which the measurements are sent.
    """
    from spu import libspu, psi

    description = libspu.link.Desc()
    for party, address in enumerate(addresses):
        description.add_party(f"party {party}", address)
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
    common_count = psi.psi_execute(config, link).intersection_count
    seconds = time.perf_counter() - began
    processor_seconds = time.process_time() - processor_began
    link.stop_link()
    result = {"seconds": seconds, "processor_seconds": processor_seconds, "common": common_count}
    result_connection.send(result | {"peak_memory": peak_memory()})


def _run_spu(protocol: str, size: int) -> Measured:
    """Run spu's intersection between two processes over loopback; it does not report bytes.

    `protocol`: spu's name of the intersection. `size`: number of IDs of a set.
    """
    # Two free ports, which spu opens itself.
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]
    for free in sockets:
        free.close()
    with tempfile.TemporaryDirectory() as folder:
        for rank, party in enumerate(("hub", "member")):
            _write_csv(Path(folder) / f"in{rank}.csv", party, size)
        arguments_by_party = {
            f"party {rank}": (rank, folder, protocol, addresses) for rank in range(2)
        }
        return _run_parties(_run_spu_party, arguments_by_party)


def _run_openmined_psi(_protocol: str, size: int) -> Measured:
    """Run openmined-psi's client and server in turns in this process, as its example does.

    Returns the measurements. `size`: number of IDs of a set. The first argument is not used: the
    library has one protocol.
    """
    from private_set_intersection import python as psi

    hub_ids, member_ids = (
        [name.decode() for name in _make_ids(party, size)] for party in ("hub", "member")
    )
    began = time.perf_counter()
    # True: the client learns the common IDs, not only their number.
    client = psi.client.CreateWithNewKey(True)
    server = psi.server.CreateWithNewKey(True)
    setup = server.CreateSetupMessage(_FALSE_POSITIVE_RATE, size, member_ids, psi.DataStructure.GCS)
    request = client.CreateRequest(hub_ids)
    response = server.ProcessRequest(request)
    common_count = len(client.GetIntersection(setup, response))
    seconds = time.perf_counter() - began
    sent_bytes = sum(len(message.SerializeToString()) for message in (setup, request, response))
    return {
        "seconds": seconds,
        "bytes": sent_bytes,
        "peak_memory": peak_memory(),
        "common": common_count,
    }


CASES: Mapping[str, tuple[Callable[..., Measured], str]] = {
    "circuit": (_run_over_pipes, "circuit"),
    "circuit-crypten": (_run_over_pipes, "circuit_crypten"),
    "circuit-ot": (_run_over_pipes, "circuit_ot"),
    "ecdh": (_run_over_pipes, "ecdh"),
    "ecdh-buckets": (_run_buckets, "ecdh"),
    "ot": (_run_over_pipes, "ot"),
    "ot-buckets": (_run_buckets, "ot"),
    "vole": (_run_over_pipes, "vole"),
    "opprf": (_run_over_pipes, "opprf"),
    "opprf-ot": (_run_over_pipes, "opprf_ot"),
    "spu-rr22": (_run_spu, "RR22"),
    "openmined": (_run_openmined_psi, "ECDH"),
}


def main(case: str, size: int) -> None:
    """Run one case with `size` IDs on each side and print its measurements as JSON."""
    run_case, protocol = CASES[case]
    print(json.dumps(run_case(protocol, size)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
