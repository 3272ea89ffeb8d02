"""The settings file of one party that runs apart from the others.

Written by: each party for itself, or by `prepare_parties` for a trial on one machine.
"""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.config.file import load_settings_text
from secure_apfed.config.plain_yaml import read_text
from secure_apfed.exchange.sockets import parse_address
from secure_apfed.names import Name, PartyName
from secure_apfed.settings import Settings

__all__ = ["PartyFile", "Peer", "Tls"]


def _place(text: str) -> str:
    try:
        parse_address(text)
    except LocalProtocolError as error:
        raise ValueError(str(error)) from None
    return text


Place: TypeAlias = Annotated[str, AfterValidator(_place)]
"""Host and port, as `parse_address` reads them."""


class Peer(Settings):
    """Another party: where it listens, and by which key it is known.

    Attributes:
        address: "host:port", "[::1]:port" for IPv6; null: it dials, or comes through a relay.
        identity: its Ed25519 public key, hex.
        behind_proxy: a proxy ends TLS before it, so that a certificate there is not the party's;
            its identity proves who it is.
    """

    address: Place | None = None
    identity: str = Field(pattern="^[0-9a-f]{64}$")
    behind_proxy: bool = False


class Tls(Settings):
    """Files in PEM for TLS at both ends; see docs/across-organisations.md.

    Attributes:
        ca: authorities that this party believes; certificate, key: its own.
        revoked: list of certificates and identities that it refuses (see `secure-apfed certs`).
    """

    ca: Path
    certificate: Path
    key: Path
    revoked: Path | None = None

    def below(self, folder: Path) -> "Tls":
        """The same with its paths resolved."""
        given = {name: path for name, path in self if path is not None}
        return self.model_copy(update={name: folder / path for name, path in given.items()})


class PartyFile(Settings):
    """All that one party needs to take part, in one YAML file of its own.

    Paths that are relative start at the file's folder.

    Attributes:
        party: its name; active, passives: who is who.
        config: YAML of the run; what the parties agree on must be the same in everybody's.
        folder: its own, for keys, checkpoints and logs.
        listen: "host:port" where the others reach it; null: it dials out only.
        peers: the others, by name.
        link: how it reaches them: "tcp", between processes of one machine; "grpc", across machines;
            "nvflare", inside a job of NVFlare's, which needs no addresses.
        tls: for "grpc"; insecure_plaintext_on_loopback: without it, on this machine alone.
        relay: "host:port" that all dial, where some cannot be reached.
        relay_name: the name in the relay's certificate; null: the host's own.
        proxy: "http://host:port" of a proxy that is asked to CONNECT; null: the environment's.
        reconnect_s: how long a peer may give no sign of life, with "grpc" and "nvflare".
        table: its rows as prepared for a trial; null reads its own file of `data.parties`.
        timeout_s: one unit of patience: how long a peer may be silent whose turn it is. Who
            waits for somebody's answer to others is patient for up to eight of them.
        meet_s: how long to wait until all others are connected.
    """

    party: Name
    active: PartyName
    passives: tuple[PartyName, ...]
    config: Path
    folder: Path = Path()
    listen: Place | None = None
    peers: dict[Name, Peer]
    link: Literal["tcp", "grpc", "nvflare"] = "tcp"
    tls: Tls | None = None
    insecure_plaintext_on_loopback: bool = False
    relay: Place | None = None
    relay_name: str | None = "relay"
    proxy: str | None = None
    reconnect_s: float = Field(30.0, ge=1, le=86_400)
    table: Path | None = None
    timeout_s: float = Field(60.0, gt=0, le=86_400)
    meet_s: float = Field(60.0, gt=0, le=86_400)

    @classmethod
    def read(cls, path: Path) -> "PartyFile":
        """Read one, with its paths resolved.

        Raises:
            ConfigError: no such file, or settings that do not hold.
        """
        told = load_settings_text(cls, read_text(path), source=str(path))
        below = path.parent
        table = None if told.table is None else below / told.table
        paths = {"config": below / told.config, "folder": below / told.folder, "table": table}
        return told.model_copy(update={**paths, "tls": told.tls and told.tls.below(below)})
