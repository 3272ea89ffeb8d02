"""The command `relay`: joins parties that may only dial out, without a key of any of them."""

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secure_apfed import terminal
from secure_apfed.commands import AsJson
from secure_apfed.commands.party import watch_stdin
from secure_apfed.errors import ConfigError

if TYPE_CHECKING:
    from secure_apfed.between.certificates import Credentials
    from secure_apfed.exchange.sockets import Address

__all__ = ["relay"]


def relay(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the parties dial.")],
    ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Authorities of the parties' certificates.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Its own, for the name relay.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="PEM", help="Of its certificate.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="IDENTITY", help="Let these parties in alone; hex, may be repeated."),
    ] = None,
    insecure_plaintext_on_loopback: Annotated[
        bool, typer.Option("--insecure-plaintext-on-loopback", help="No TLS, on this machine.")
    ] = False,
    end_with_stdin: Annotated[
        bool, typer.Option("--end-with-stdin", hidden=True, help="End where stdin ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forward sealed frames between parties that may only dial out, until it is ended."""
    from secure_apfed.between.relay import Relay
    from secure_apfed.exchange.sockets import parse_address, spell_address

    address = parse_address(listen)
    credentials = _credentials(address, (ca, certificate, key), insecure_plaintext_on_loopback)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    if end_with_stdin:
        threading.Thread(target=watch_stdin, daemon=True).start()
    standing = Relay(address, credentials, None if allow is None else _identities(allow))
    told = {"listens": spell_address((address[0], standing.port))}
    if as_json:
        terminal.print_json(told)
    else:
        terminal.show_note(f"the relay listens at {told['listens']}; it ends with Ctrl-C")
    try:
        ended.wait()
    finally:
        standing.close()


def _credentials(
    address: "Address", files: tuple[Path | None, Path | None, Path | None], insecure: bool
) -> "Credentials | None":
    """What TLS needs; None on loopback where that was asked for by name.

    Raises:
        ConfigError: files that are missing or do not fit.
    """
    from secure_apfed.between.certificates import Credentials
    from secure_apfed.between.grpc_link import warn_of_plaintext

    ca, certificate, key = files
    if ca is not None and certificate is not None and key is not None:
        return Credentials.load(ca, certificate, key, name=None)
    if not insecure:
        raise ConfigError("a relay needs --ca, --certificate and --key (see secure-apfed certs)")
    warn_of_plaintext(address[0])
    return None


def _identities(allow: list[str]) -> frozenset[bytes]:
    try:
        return frozenset(bytes.fromhex(one) for one in allow)
    except ValueError as error:
        raise ConfigError("--allow: an identity is 64 letters in hex") from error
