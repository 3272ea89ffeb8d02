"""How parties of a trial on this machine reach each other: addresses, certificates, a relay.

Run by: the experimenter who prepares all parties' folders. The authority's key is used and thrown
away, so that nobody else gets a certificate of it.
"""

import contextlib
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from secure_apfed.errors import ConfigError
from secure_apfed.exchange.sockets import parse_address
from secure_apfed.files import make_private, own_subfolder
from secure_apfed.runs.folder import write_atomically
from secure_apfed.runs.party_file import PartyFile, Tls

__all__ = ["RELAY", "Way", "free_addresses", "relaying", "trial_ways"]

Way: TypeAlias = Literal["tcp", "grpc", "relay", "nvflare"]
"""How the parties of a trial reach each other."""

RELAY = "relay"  # the name in its certificate, and of its folder beside the parties'
_LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)
_CA, _CERTIFICATE, _KEY = Path("ca.pem"), Path("certificate.pem"), Path("key.pem")
_GONE_S = 3.0  # a process of this machine that cannot be reached for so long has ended
_START_S, _LOOK_S = 60.0, 0.05


def free_addresses(count: int) -> list[str]:
    """Addresses of loopback where nobody listens now.

    Their ports lie below those from which systems take the near end of a connection: one of these
    could be taken before its party listens there.
    """
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = secrets.choice(_PORTS)
            with contextlib.suppress(OSError):  # somebody listens there
                stack.enter_context(socket.create_server((_LOOPBACK, port)))
                found.append(f"{_LOOPBACK}:{port}")
    return found


def trial_ways(over: Way, folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """What the parties' files say of their links, by party; makes the certificates.

    Args:
        over: how they reach each other.
        folders: of the parties, by name.
    """
    if over == "tcp":
        return {name: {"link": over, "reconnect_s": _GONE_S} for name in folders}
    if over == "nvflare":
        return {name: {"link": over} for name in folders}
    from secure_apfed.between.certificates import make_authority

    authority = make_authority()
    told: dict[str, Any] = {
        "link": "grpc", "tls": Tls(ca=_CA, certificate=_CERTIFICATE, key=_KEY),
    }  # fmt: skip
    certified = dict(folders)
    if over == "relay":
        parties = next(iter(folders.values())).parent
        certified[RELAY] = own_subfolder(parties.parent / RELAY)
        make_private(certified[RELAY])
        (told["relay"],) = free_addresses(1)
    for name, folder in certified.items():
        made = authority.issue(name)
        write_atomically(folder / _CA, made.ca)
        write_atomically(folder / _CERTIFICATE, made.certificate)
        write_atomically(folder / _KEY, made.key, private=True)
    return dict.fromkeys(folders, told)


@contextmanager
def relaying(files: Iterable[Path]) -> Iterator[None]:
    """The relay that these parties' files name, in a process of its own; none where none is named.

    Raises:
        ConfigError: it did not start.
    """
    file = next(iter(files))
    address = PartyFile.read(file).relay
    if address is None:
        yield
        return
    folder = file.parent.parent.parent / RELAY
    command = [sys.executable, "-m", "secure_apfed.cli", "relay", "--listen", address]
    command += ["--ca", str(folder / _CA), "--certificate", str(folder / _CERTIFICATE)]
    command += ["--key", str(folder / _KEY), "--end-with-stdin", "--json"]
    with subprocess.Popen(  # noqa: S603 - this very program
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        try:
            _await_relay(address, process)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()


def _await_relay(address: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(parse_address(address), 1.0):
            return
        time.sleep(_LOOK_S)
    raise ConfigError(f"the relay did not start at {address}; its messages are above")
