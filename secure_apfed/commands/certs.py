"""The commands `certs`: an authority and certificates for a trial, and the list of revoked ones."""

import datetime as dt
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secure_apfed import terminal
from secure_apfed.commands import AsJson
from secure_apfed.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["certs_app", "make_ca", "make_party", "revoke", "show"]

certs_app = typer.Typer(
    no_args_is_help=True,
    help="Make certificates for a trial, look at them, and revoke them; an organisation's own "
    "authority does as well.",
)

_CA, _CA_KEY = "ca.pem", "ca-key.pem"
_CERTIFICATE, _KEY = "certificate.pem", "key.pem"
_Folder = Annotated[Path, typer.Option("--folder", help="Where the authority's files lie.")]
_Days = Annotated[float, typer.Option(min=0.01, max=36_500, help="How long it is valid.")]


@certs_app.command("ca")
def make_ca(
    folder: _Folder = Path("certs"),
    name: Annotated[str, typer.Option(help="Its name, for people.")] = "secure-apfed trial",
    days: _Days = 3650,
    as_json: AsJson = False,
) -> None:
    """Make an authority: its certificate, for everybody, and its key, which stays where it is."""
    from secure_apfed.between.certificates import make_authority

    made = make_authority(name, days=days)
    _write_new(
        {folder / _CA: (made.certificate, False), folder / _CA_KEY: (made.key, True)}, as_json
    )


@certs_app.command("party")
def make_party(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Of parties, or relay.")],
    folder: _Folder = Path("certs"),
    host: Annotated[
        list[str] | None, typer.Option(help="Another DNS name of its server; may be repeated.")
    ] = None,
    days: _Days = 365,
    as_json: AsJson = False,
) -> None:
    """Make a key and a certificate for each of these parties, in a folder of its own."""
    from secure_apfed.between.certificates import Authority
    from secure_apfed.names import check_name

    authority = Authority(_read(folder / _CA), _read(folder / _CA_KEY))
    files: dict[Path, tuple[bytes, bool]] = {}
    for name in names:
        try:
            check_name(name)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        made = authority.issue(name, hosts=tuple(host or ()), days=days)
        files |= {
            folder / name / _CA: (made.ca, False),
            folder / name / _CERTIFICATE: (made.certificate, False),
            folder / name / _KEY: (made.key, True),
        }
    _write_new(files, as_json)


@certs_app.command("show")
def show(
    files: Annotated[list[Path], typer.Argument(metavar="PEM...", help="Certificates.")],
    as_json: AsJson = False,
) -> None:
    """Say whose certificates these are, until when, and how a list of revoked ones names them."""
    described = [_describe(file, _load(file)) for file in files]
    if as_json:
        terminal.print_json({"certificates": described})
        return
    columns = ("file", "names", "valid_until", "days_left", "issuer", "serial", "sha256")
    rows = [tuple(str(one[column]) for column in columns) for one in described]
    terminal.show_rows("Certificates", columns, rows)


@certs_app.command("revoke")
def revoke(
    what: Annotated[
        list[str],
        typer.Argument(metavar="PEM|HEX...", help="A certificate's file, or its SHA-256 or serial "
                       "number, or a party's public identity, in hex."),
    ],
    revoked: Annotated[Path, typer.Option("--list", help="List that the parties' files name.")],
    note: Annotated[str, typer.Option(help="Why, for people.")] = "",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write these into a list of what is revoked; it holds from the next connection on."""
    from secure_apfed.between.certificates import fingerprint, read_revoked

    entries = [
        fingerprint(_load(Path(one))) if Path(one).is_file() else one.lower().replace(":", "")
        for one in what
    ]
    if not all(one and set(one) <= set("0123456789abcdef") for one in entries):
        raise ConfigError("certs revoke: name files of certificates that are there, or hex")
    before = revoked.read_text(encoding="utf-8") if revoked.exists() else ""
    remark = f"  # {dt.datetime.now(dt.UTC):%Y-%m-%d} {' '.join(note.split())}".rstrip()
    lines = "".join(f"{one}{remark}\n" for one in entries)
    if before and not before.endswith("\n"):
        before += "\n"
    revoked.write_text(before + lines, encoding="utf-8")
    told = sorted(read_revoked(revoked))
    if as_json:
        terminal.print_json({"list": str(revoked), "revoked": told})
    else:
        terminal.show_note(f"{revoked} names {len(told)}: give it to all parties")


def _describe(file: Path, one: "x509.Certificate") -> dict[str, Any]:
    from secure_apfed.between.certificates import certificate_names, fingerprint

    left = one.not_valid_after_utc - dt.datetime.now(dt.UTC)
    return {
        "file": str(file), "names": ", ".join(certificate_names(one)),
        "valid_until": f"{one.not_valid_after_utc:%Y-%m-%d}", "days_left": left.days,
        "issuer": one.issuer.rfc4514_string(), "serial": f"{one.serial_number:x}",
        "sha256": fingerprint(one),
    }  # fmt: skip


def _load(file: Path) -> "x509.Certificate":
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(_read(file))
    except ValueError as error:
        raise ConfigError(f"{file} is no certificate in PEM ({error})") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); `certs ca` makes an authority, `certs "
            "party` a party's files"
        ) from error


def _write_new(files: dict[Path, tuple[bytes, bool]], as_json: bool) -> None:
    """Write all of these, secret ones for their owner alone, and none over another.

    Raises:
        ConfigError: one is there already; then nothing is written.
    """
    if there := [str(path) for path in files if path.exists() or path.is_symlink()]:
        raise ConfigError(
            f"{', '.join(there)} would be overwritten; name another folder, or move it away (who "
            "believes an old certificate needs it until it is replaced)"
        )
    for path, (content, secret) in files.items():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600 if secret else 0o644), "wb") as file:
            file.write(content)
    if as_json:
        terminal.print_json({"files": [str(path) for path in files]})
        return
    for path in files:
        typer.echo(path)
