"""The commands of certificates and of a relay; and two pages that show a party's file."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.between.certificates import Credentials, read_revoked
from secure_apfed.cli import execute
from secure_apfed.config.file import load_settings_text
from secure_apfed.errors import ConfigError
from secure_apfed.runs.party import PartyFile
from tests.docs.pages import ROOT, text_of


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert execute([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def certs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "certs"
    said(capsys, "certs", "ca", "--folder", str(folder))
    said(capsys, "certs", "party", "bank", "Shop_1.a", "--folder", str(folder), "--days", "30")
    return folder


def test_certificates_of_a_trial_fit_together(certs: Path) -> None:
    for name in ("bank", "Shop_1.a"):
        own = certs / name
        Credentials.load(own / "ca.pem", own / "certificate.pem", own / "key.pem", name=name)
        assert stat.S_IMODE((own / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((certs / "ca-key.pem").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="is not the key of"):
        Credentials.load(
            certs / "ca.pem", certs / "bank/certificate.pem", certs / "Shop_1.a/key.pem", name=None
        )


def test_nothing_is_overwritten(certs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in certs.parent.rglob("*.pem")}
    for command, says in (
        (["ca"], "would be overwritten"),
        (["party", "new", "bank"], "would be overwritten"),
        (["party", "../bank"], "expected a name of 1 to 64 letters"),
    ):
        told = said(capsys, "certs", *command, "--folder", str(certs), code=2)
        assert says in told["error"]["message"]
    assert {path: path.read_bytes() for path in certs.parent.rglob("*.pem")} == before


def test_what_is_revoked_is_listed_as_it_is_shown(
    certs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, listed = certs / "bank", tmp_path / "revoked.txt"
    shown = said(capsys, "certs", "show", str(own / "certificate.pem"))["certificates"][0]
    assert shown["names"] == "bank"
    assert 28 <= shown["days_left"] <= 30
    for what in (str(own / "certificate.pem"), shown["serial"].upper(), "AB:" * 31 + "AB"):
        said(capsys, "certs", "revoke", what, "--list", str(listed), "--note", "stolen\nlaptop")
    assert read_revoked(listed) == {shown["sha256"], shown["serial"], "ab" * 32}
    for entry in (shown["sha256"], shown["serial"]):
        with pytest.raises(ConfigError, match="is revoked; have another one made"):
            Credentials.load(
                own / "ca.pem", own / "certificate.pem", own / "key.pem", name="bank",
                revoked=frozenset({entry}),
            )  # fmt: skip
    told = said(capsys, "certs", "revoke", "no such", "--list", str(listed), code=2)
    assert "name files of certificates that are there, or hex" in told["error"]["message"]


def test_a_relay_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    for listen, more, reads, code in (
        ("127.0.0.1:7001", [], "needs --ca, --certificate and --key", 2),
        ("0.0.0.0:7001", ["--insecure-plaintext-on-loopback"], "for loopback alone", 2),
        ("7001", [], "an address is host:port", 4),
    ):
        assert reads in json.dumps(said(capsys, "relay", "--listen", listen, *more, code=code))


@pytest.mark.parametrize(
    ("page", "link"), [("between-organisations", "grpc"), ("nvflare", "nvflare")]
)
def test_the_file_of_the_page_is_a_partys(page: str, link: str) -> None:
    (shown,) = re.findall(r"```yaml\n(party:.*?)```", text_of(f"docs/{page}.md"), re.DOTALL)
    for name, digit in (("9f...", "9"), ("3a...", "3"), ("77...", "7")):
        shown = shown.replace(name, f'"{digit * 64}"')
    told = load_settings_text(PartyFile, shown, source="page")
    assert told.link == link
    if link == "grpc":
        assert told.peers["aggregator"].behind_proxy
        assert told.peers["clinic"].address is None


def test_what_the_page_says_people_read_is_what_the_source_says() -> None:
    page = text_of("docs/between-organisations.md")
    folders = ("protocols/apfed_protocols", "secure_apfed/exchange", "secure_apfed/between")
    files = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    for words in (
        "nobody listens there", "its certificate has expired", "it ended the connection; where",
        "that is not in tls.ca", "its certificate has another name",
        "does not fit the key by which it is known",
        "has not yet ended a session before this one",
        "began anew: its process ended and was started again", "was altered, lost or repeated on",
    ):  # fmt: skip
        assert words in page
        assert words in source
