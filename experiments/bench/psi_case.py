"""One intersection, run as a script in an interpreter of its own by `experiments.bench.psi`.

Takes a case and a size, and prints one JSON object: `seconds` from the IDs to the result,
`bytes` and `rounds` where they can be seen, `peak_memory` in bytes, `common` (IDs found); for
`ecdh` also `floor_seconds`, what its library's multiplications alone take.
Each case imports only what it measures, so that a peer can live in an environment without
this project, and memory is that of the protocol.
"""

import json
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["CASES", "main"]

Measured = dict[str, Any]

_THREADS = 2
_SAMPLE = 20_000
_PATIENCE_S = 1500


def _peak_memory() -> int:
    """Peak resident bytes of this process; ru_maxrss would count what its parent held."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _ids(size: int) -> tuple[list[str], list[str]]:
    """Two sets that share one half."""
    names = [f"person {k}" for k in range(size // 2 + size)]
    return names[:size], names[size // 2 :]


def _carry(roles: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes, and the longest chain of messages that waited for one another."""
    depth = dict.fromkeys(roles, 0)
    queue = deque((name, 1, out) for name, role in roles.items() for out in role.start())
    sent = rounds = 0
    while queue:
        sender, round_of, out = queue.popleft()
        sent, rounds = sent + len(out.body), max(rounds, round_of)
        depth[out.receiver] = max(depth[out.receiver], round_of)
        answers = roles[out.receiver].receive(sender, out.body)
        queue.extend((out.receiver, depth[out.receiver] + 1, answer) for answer in answers)
    return sent, rounds


def _floor_seconds(size: int) -> float:
    """What X25519 alone takes in so many threads: two sets, each multiplied by both parties.

    Measured on a sample, in all threads at once.
    """
    from nacl.bindings import crypto_scalarmult

    scalar, points = os.urandom(32), [bytes([k + 9]) + bytes(31) for k in range(100)]
    calls = 4 * size // _THREADS
    sample = min(calls, _SAMPLE)

    def multiply(_thread: int) -> None:
        for call in range(sample):
            crypto_scalarmult(scalar, points[call % len(points)])

    began = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(multiply, range(_THREADS)))
    return (time.perf_counter() - began) * calls / sample


def _ours(protocol: str, size: int) -> Measured:
    """All parties in one process, `ecdh` with two threads."""
    from protocols.psi import SET_INTERSECTIONS
    from protocols.psi.interface import IntersectionAgreement

    hub_ids, member_ids = ([name.encode() for name in names] for names in _ids(size))
    began = time.perf_counter()
    agreement = IntersectionAgreement(session="bench", dealer="dealer")
    backend = SET_INTERSECTIONS[protocol](agreement, threads=_THREADS)
    hub = backend.hub("hub", ["member"], hub_ids)
    roles: dict[str, Any] = {"hub": hub, "member": backend.member("member", "hub", member_ids)}
    if backend.needs_dealer:
        roles["dealer"] = backend.dealer("hub", ["member"])
    sent, rounds = _carry(roles)
    seconds = time.perf_counter() - began
    found = {
        "seconds": seconds,
        "bytes": sent,
        "rounds": rounds,
        "peak_memory": _peak_memory(),
        "common": len(hub.rows),
    }
    floor = {"floor_seconds": _floor_seconds(size)} if protocol == "ecdh" else {}
    return found | floor


def _ours_on_crypten(protocol: str, size: int) -> Measured:
    """The same with CrypTen, whose import takes longer than a small intersection."""
    from protocols.crypten.shim import load_crypten

    load_crypten()
    return _ours(protocol, size)


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
        "seconds": time.perf_counter() - began,
        "bytes": len(setup_sent) + len(request_sent) + len(response_sent),
        "rounds": 2,
        "peak_memory": _peak_memory(),
        "common": len(common),
    }


def _spu_party(rank: int, folder: str, protocol: str, addresses: list[str]) -> Measured:
    """One party of spu, which reads and writes CSV files."""
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
    report = psi.psi_execute(config, link)
    seconds = time.perf_counter() - began
    link.stop_link()
    common = report.intersection_count
    return {"seconds": seconds, "peak_memory": _peak_memory(), "common": common}


def _spu(protocol: str, size: int) -> Measured:
    """Two processes on the loopback; spu tells neither bytes nor rounds."""
    addresses = []
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for each in sockets:
        addresses.append(f"127.0.0.1:{each.getsockname()[1]}")
        each.close()
    with tempfile.TemporaryDirectory() as folder:
        for rank, names in enumerate(_ids(size)):
            (Path(folder) / f"in{rank}.csv").write_text("\n".join(["id", *names, ""]))
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            jobs = [(rank, folder, protocol, addresses) for rank in range(2)]
            receiver, sender = pool.starmap_async(_spu_party, jobs, 1).get(_PATIENCE_S)
    return {
        "seconds": max(receiver["seconds"], sender["seconds"]),
        "bytes": None,
        "rounds": None,
        "peak_memory": receiver["peak_memory"] + sender["peak_memory"],
        "common": receiver["common"],
    }


CASES: Mapping[str, tuple[Callable[[str, int], Measured], str]] = {
    "circuit": (_ours, "circuit"),
    "circuit-crypten": (_ours_on_crypten, "circuit_crypten"),
    "ecdh": (_ours, "ecdh"),
    "openmined": (_openmined, ""),
    "spu-rr22": (_spu, "RR22"),
    "spu-kkrt": (_spu, "KKRT"),
    "spu-ecdh": (_spu, "ECDH"),
}


def main(case: str, size: int) -> None:
    """Run one case and print what it took."""
    run, protocol = CASES[case]
    print(json.dumps(run(protocol, size)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
