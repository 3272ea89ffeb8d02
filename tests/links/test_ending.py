"""The end of a project in a party's folder, and certificates that are renewed before it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from apfed_protocols.seal import fresh_identity
from secure_apfed.cli import execute
from secure_apfed.exchange.certificates import Credentials, hash_certificate
from secure_apfed.organisations import ending, project, renewal
from secure_apfed.organisations.counters import ANSWER_LOG, CounterFiles, NothingReleased
from secure_apfed.organisations.party import PartyFile, ServeSettings
from secure_apfed.organisations.revocation import RevocationWatch, find_revoked_names
from secure_apfed.organisations.served import AnswerLog, serve_party
from secure_apfed.runs.audit_log import AUDIT_LOG_NAME, AuditLog, verify_log
from secure_apfed.runs.folder import (
    PROJECT_ENDED,
    SEALED_PROJECT,
    PartyFolder,
    load_project_end,
    require_open_project,
)
from tests.links.test_project import OTHERS, PARTIES, Organisations, certificate_findings
from tests.secure_apfed.small_runs import run_as_json

SECRETS = (
    "joint.safetensors",
    "checkpoint-12.bin",
    "recording-12.bin",
    "transcript.msgpack",
    "transcript-1.bin",
    "alignment.safetensors",
    "encoders.safetensors",
    "table.safetensors",
    "next-key.pem",
    "key.pem",
    "relay-key.pem",
    "authority-key.pem",
)
STAYS = (
    "contract.json",
    "statements.json",
    "model.safetensors",
    "model.json",
    "result.json",
    "ended.json",
    "ledger-shop.jsonl",
    "run.yaml",
    "report.html",
)


@pytest.fixture(scope="module")
def sealed_project(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    made = Organisations(
        tmp_path_factory.mktemp("sealed"), addresses=[f"127.0.0.1:{port}" for port in (7, 8, 9)]
    )
    made.seal()
    return made


@pytest.fixture
def here(sealed_project: Organisations, tmp_path: Path) -> Organisations:
    """A copy of those who joined, to be harmed."""
    copy = shutil.copytree(sealed_project.base, tmp_path / "copy")
    for run in copy.glob(f"*/*/{project.RUN_FILE}"):
        run.write_text(run.read_text().replace(str(sealed_project.base), str(copy)))
    harmed = Organisations.__new__(Organisations)
    harmed.__dict__ |= sealed_project.__dict__ | {"base": copy}
    return harmed


@pytest.fixture
def shop(here: Organisations) -> Path:
    """A passive's folder after a training, with a book of answers that its audit log notes."""
    home = here.home("shop")
    for name in (*SECRETS, *STAYS):
        if not (home / name).exists():
            (home / name).write_bytes(b"")
    (home / "alignment").mkdir()
    (home / "alignment" / "secret.bin").write_bytes(b"secret")
    book = AnswerLog(home / ANSWER_LOG, "shop", ServeSettings(), person_count=200, run="r")
    book.count_answers([b"somebody"], None)
    book.close()
    peers = {name: fresh_identity().public for name in PARTIES if name != "shop"}
    log = AuditLog(
        home / AUDIT_LOG_NAME,
        "shop",
        PartyFolder(home).load_identity(),
        peers,
        NothingReleased(),
        counters=CounterFiles(home, "shop"),
    )
    log.close()
    return home


def config_of(folder: Path) -> str:
    return str(folder / "party.yaml")


def test_an_end_shows_first_what_it_would_delete(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in shop.iterdir() if path.is_file()}
    said = run_as_json(capsys, "project", "end", "--config", config_of(shop))
    assert said["is_ended"] is False
    named = [each["file"] for each in said["deletes"]]
    assert named[:2] == ["joint.safetensors", ANSWER_LOG]
    assert set(named) == {*SECRETS, "alignment", ANSWER_LOG}
    assert {"contract.json", AUDIT_LOG_NAME, "statements.json", "model.json"} <= set(said["keeps"])
    assert execute(["project", "end", str(shop)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Nothing was deleted. To end the project here, say the same with --yes." in out
    assert out.startswith("To be deleted at shop"), "nothing is deleted yet"
    assert {path: path.read_bytes() for path in shop.iterdir() if path.is_file()} == before


def test_an_end_deletes_signs_and_is_done_once(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = PartyFolder(shop).load_identity().public.hex()
    assert run_as_json(capsys, "project", "end", shop, "--yes")["is_ended"]
    assert not [name for name in (*SECRETS, "alignment", ANSWER_LOG) if (shop / name).exists()]
    assert not [
        name for name in (*STAYS, "identity.pem", "party.yaml") if not (shop / name).exists()
    ]
    summary = verify_log(shop, identity=identity)
    assert summary.ended is not None
    assert set(summary.ended.deleted) == {*SECRETS, "alignment", ANSWER_LOG}
    assert {"contract.json", "model.json", "sealed.json"} <= set(summary.ended.kept)
    assert "identity.pem" not in summary.ended.kept, "a log is for others to read"
    shown = run_as_json(capsys, "audit-log", "verify", shop)
    assert shown["ended"]["deleted"][0] == "joint.safetensors"
    assert execute(["audit-log", "verify", str(shop)]) == 0
    assert "project ended" in capsys.readouterr().out
    log = (shop / AUDIT_LOG_NAME).read_bytes()
    again = run_as_json(capsys, "project", "end", shop, "--yes")
    assert (again["deletes"], again["ended_at"]) == ([], summary.ended.at)
    assert execute(["project", "end", str(shop), "--yes"]) == 0
    assert "there is nothing to do" in " ".join(capsys.readouterr().err.split())
    assert (shop / AUDIT_LOG_NAME).read_bytes() == log
    (shop / "joint.safetensors").write_bytes(b"put back from a copy")
    assert (
        run_as_json(capsys, "project", "end", shop, "--yes")["deletes"][0]["file"]
        == "joint.safetensors"
    )
    assert not (shop / "joint.safetensors").exists()


# What begins in a party's folder.
BEGINS = ("party", "serve", "project check", "certs request")


@pytest.mark.parametrize("command", BEGINS)
def test_nothing_begins_where_the_project_was_ended(
    command: str, shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending.end_project(ending.find_owner(shop, None), now=0.0)
    capsys.readouterr()
    silent = "--json-events" if command == "serve" else "--json"
    assert execute([*command.split(), "--config", config_of(shop), silent]) == 3
    said = capsys.readouterr().out
    assert "on 1970-01-01 (project-ended.json says so), so nothing begins there any more" in said
    assert "have secure-apfed project make it" not in said, "no key is made again"


def test_nobody_predicts_jointly_or_joins_again_where_it_was_ended(
    here: Organisations, capsys: pytest.CaptureFixture[str]
) -> None:
    bank = here.home("bank")
    ending.end_project(ending.find_owner(bank, None), now=0.0)
    rows = here.base / "bank" / "bank.csv"
    call = ("predict", "--model", bank, "--data", rows, "--jointly", config_of(bank))
    assert "was ended in" in run_as_json(capsys, *call, code=3)["error"]["message"]
    join = ("project", "join", bank / SEALED_PROJECT, "--as", "bank", "--folder", bank)
    assert "was ended in" in run_as_json(capsys, *join, code=3)["error"]["message"]


def test_an_end_that_was_killed_is_finished_by_the_same_call(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = ending.find_owner(shop, None)
    whole = ending._delete_path
    left = iter(range(3))

    def delete(path: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        whole(path)

    monkeypatch.setattr(ending, "_delete_path", delete)
    with pytest.raises(KeyboardInterrupt):
        ending.end_project(owner, now=5.0)
    with pytest.raises(Exception, match="was ended in"):
        require_open_project(shop)
    monkeypatch.setattr(ending, "_delete_path", whole)
    assert ending.plan_end(owner).ended_at is None
    ending.end_project(owner, now=6.0)
    summary = verify_log(shop, identity=PartyFolder(shop).load_identity().public.hex())
    assert summary.ended is not None
    assert set(summary.ended.deleted) == {*SECRETS, "alignment", ANSWER_LOG}
    assert summary.ended.counters_are_as_noted
    assert ending.plan_end(owner).is_done


@pytest.mark.parametrize("is_trained", [False, True], ids=["training", "serving"])
def test_who_runs_is_told_how_to_stop_and_nothing_is_deleted(is_trained: bool, shop: Path) -> None:
    owner = ending.find_owner(shop, None)
    if not is_trained:
        (shop / "ended.json").unlink()
    with PartyFolder(shop).lock_exclusively(), pytest.raises(Exception, match=r"Ctrl-C, SIGTERM"):
        ending.end_project(owner, now=1.0)
    assert all((shop / name).exists() for name in SECRETS)
    assert (load_project_end(shop) is not None) is is_trained
    ending.end_project(owner, now=2.0)
    assert ending.plan_end(owner).is_done


def test_a_server_ends_before_its_next_session(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from secure_apfed.organisations import served

    settings = PartyFile.from_file(shop / "party.yaml")
    fields = {"settings_file": settings, "folder": PartyFolder(shop), "network_card": None}
    stub: Any = type("Stub", (), fields)()
    monkeypatch.setattr(served._JointParty, "from_file", lambda path: stub)
    ending._write_marker(ending.find_owner(shop, None), (), 1.0, is_complete=False)
    said: list[str] = []
    serve_party(shop / "party.yaml", on_session=said.append)
    assert said == ["the project of shop was ended in its folder: it serves no more"]


def alter_audit_log(folder: Path) -> None:
    path = folder / AUDIT_LOG_NAME
    path.write_bytes(path.read_bytes().replace(b"opened", b"0pened", 1))


# What keeps an end from beginning, with what is told.
UNENDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "log altered": (alter_audit_log, "line 1"),
    "no identity": (lambda home: (home / "identity.pem").unlink(), "holds no identity.pem"),
    "marker cut off": (lambda home: (home / PROJECT_ENDED).write_text("{"), "is not JSON"),
}


@pytest.mark.parametrize("harm", UNENDED)
def test_an_end_that_cannot_be_signed_deletes_nothing(harm: str, shop: Path) -> None:
    change, why = UNENDED[harm]
    owner = ending.find_owner(shop, None)
    change(shop)
    with pytest.raises(Exception, match=why):
        ending.end_project(owner, now=1.0)
    assert all((shop / name).exists() for name in (*SECRETS, ANSWER_LOG))


def test_links_are_deleted_and_nothing_behind_them(shop: Path, tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "mine").write_bytes(b"mine")
    shutil.rmtree(shop / "alignment")
    (shop / "alignment").symlink_to(behind)
    (shop / "joint.safetensors").unlink()
    (shop / "joint.safetensors").symlink_to(behind / "mine")
    ending.end_project(ending.find_owner(shop, None), now=1.0)
    assert (behind / "mine").read_bytes() == b"mine"
    assert not (shop / "alignment").is_symlink()
    assert not (shop / "joint.safetensors").is_symlink()


def test_a_folder_says_whose_it_is_by_its_log_where_its_file_is_gone(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shop / "party.yaml").unlink()
    assert ending.find_owner(shop, None).party == "shop"
    for call in (
        [],
        [str(shop), "--config", config_of(shop)],
        [str(tmp_path)],
        [str(tmp_path / "x")],
    ):
        message = run_as_json(capsys, "project", "end", *call, code=2)["error"]["message"]
        assert "--config" in message or "is no folder" in message


def issuer_and_subject(pem: bytes) -> str:
    made = x509.load_pem_x509_certificate(pem)
    return f"{made.issuer.rfc4514_string()} {made.subject.rfc4514_string()}"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("new_key", [False, True], ids=["same key", "new key"])
@pytest.mark.parametrize("holder", ["shop", "bank"])
def test_a_certificate_is_renewed_and_nobody_compares_words(
    holder: str, new_key: bool, here: Organisations, capsys: pytest.CaptureFixture[str]
) -> None:
    home = here.home(holder)
    bank = here.home("bank")
    files = {name: (home / f"{name}.pem").read_bytes() for name in ("ca", "certificate", "key")}
    sealed = (home / SEALED_PROJECT).read_bytes()
    asked = run_as_json(
        capsys, "certs", "request", "--config", config_of(home), *(["--new-key"] * new_key)
    )["request"]
    made = run_as_json(capsys, "certs", "renew", asked, "--folder", bank, "--days", "500")[
        "renewed"
    ]
    for _ in range(2):  # the second time changes nothing more
        assert run_as_json(capsys, "certs", "accept", made, "--config", config_of(home)) == {
            "holder": holder
        }
    after = {name: (home / f"{name}.pem").read_bytes() for name in files}
    assert (home / SEALED_PROJECT).read_bytes() == sealed, "the words are of this file"
    assert after["ca"] == files["ca"]
    assert after["certificate"] != files["certificate"]
    assert (after["key"] != files["key"]) is new_key
    assert not list(home.glob("next-*"))
    assert (home / "key.pem").stat().st_mode & 0o777 == 0o600
    paths = [home / f"{name}.pem" for name in files]
    Credentials.from_files(*paths, name=holder)
    assert "trial" not in issuer_and_subject(after["certificate"])
    assert "trial" not in issuer_and_subject(files["certificate"])
    days = run_as_json(capsys, "certs", "show", home / "certificate.pem")["certificates"][0][
        "days_left"
    ]
    assert days >= 499
    found = certificate_findings(home)
    assert found["certificate"][0] == "ok"
    assert "sealed certificate" not in found, "the renewed one is the one to show"
    project.accept_project(bank / SEALED_PROJECT, holder, home)  # the same project, joined again
    assert (home / "certificate.pem").read_bytes() == after["certificate"]


def test_others_may_note_a_renewed_certificate_and_revoke_the_old_one(here: Organisations) -> None:
    shop = here.home("shop")
    clinic = here.home("clinic")
    old = hash_certificate(x509.load_pem_x509_certificate((shop / "certificate.pem").read_bytes()))
    made = renewal.renew_certificate(
        renewal.request_certificate(shop / "party.yaml", new_key=True), here.home("bank")
    )
    new = hash_certificate(
        x509.load_pem_x509_certificate(
            json.loads(made.read_text())["document"]["certificate"].encode()
        )
    )
    file = PartyFile.from_file(clinic / "party.yaml")
    assert find_revoked_names(file, frozenset({old})) == ["shop"]
    renewal.accept_certificate(made, clinic / "party.yaml")
    assert find_revoked_names(file, frozenset({old})) == []
    assert find_revoked_names(file, frozenset({new})) == ["shop"]
    assert RevocationWatch(file)._entries_by_peer["shop"] >= {new}
    # A project that is sealed anew has other certificates.
    project.seal_project(
        [here.home(name) / project.ANSWER_FILE.format(name) for name in OTHERS], here.home("bank")
    )
    project.accept_project(here.home("bank") / SEALED_PROJECT, "clinic", clinic)
    assert not list(clinic.glob("renewed-*"))


def sign_as_another(path: Path) -> None:
    content = json.loads(path.read_text())["document"]
    identity = fresh_identity()
    content["identity"] = identity.public.hex()
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    signature = identity.sign(b"project v1", str(content["kind"]).encode(), canonical)
    path.write_text(json.dumps({"document": content, "signature": signature.hex()}))


def alter_project_name(path: Path) -> None:
    path.write_text(path.read_text().replace('"project": "', '"project": "0', 1))


FORGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "altered": (alter_project_name, "its signature does not fit"),
    "of another key": (sign_as_another, "knows (shop|bank) by another identity"),
    "of another kind": (
        lambda path: shutil.copyfile(path.parent / "sealed.json", path),
        "expected a file of the kind",
    ),
    "cut off": (lambda path: path.write_text(path.read_text()[:50]), "is not JSON"),
}


@pytest.mark.parametrize("harm", FORGED)
@pytest.mark.parametrize("which", ["request", "renewed"])
def test_what_somebody_else_asks_or_renews_is_refused(
    which: str, harm: str, here: Organisations
) -> None:
    change, why = FORGED[harm]
    shop = here.home("shop")
    bank = here.home("bank")
    before = (shop / "certificate.pem").read_bytes(), (shop / "key.pem").read_bytes()
    asked = renewal.request_certificate(shop / "party.yaml", new_key=True)
    if which == "request":
        change(asked)
        with pytest.raises(Exception, match=why):
            renewal.renew_certificate(asked, bank)
        assert not list(bank.glob("renewed-*"))
        return
    made = renewal.renew_certificate(asked, bank)
    change(made)
    with pytest.raises(Exception, match=why):
        renewal.accept_certificate(made, shop / "party.yaml")
    assert ((shop / "certificate.pem").read_bytes(), (shop / "key.pem").read_bytes()) == before


def exchange_folder(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


# Who cannot renew, and why.
UNRENEWED: dict[str, tuple[Callable[[Organisations], object], str]] = {
    "not the organiser": (
        lambda here: exchange_folder(here.home("bank"), here.home("clinic")),
        "is not of bank, who sealed",
    ),
    "no key": (
        lambda here: (here.home("bank") / "authority-key.pem").unlink(),
        "is missing, which",
    ),
    "another key": (
        lambda here: shutil.copyfile(
            here.home("shop") / "key.pem", here.home("bank") / "authority-key.pem"
        ),
        "is not the key of the authority",
    ),
}


@pytest.mark.parametrize("harm", UNRENEWED)
def test_only_the_organiser_renews_and_by_the_same_authority(
    harm: str, here: Organisations
) -> None:
    change, why = UNRENEWED[harm]
    asked = renewal.request_certificate(here.home("shop") / "party.yaml")
    change(here)
    with pytest.raises(Exception, match=why):
        renewal.renew_certificate(asked, here.home("bank"))


def test_a_certificate_of_one_party_is_no_other_ones(here: Organisations) -> None:
    shop = here.home("shop")
    bank = here.home("bank")
    asked = renewal.request_certificate(shop / "party.yaml", new_key=True)
    made = renewal.renew_certificate(asked, bank)
    (shop / "next-key.pem").unlink()
    with pytest.raises(Exception, match="is not the key of"):
        renewal.accept_certificate(made, shop / "party.yaml")
    before = (here.home("clinic") / "certificate.pem").read_bytes()
    renewal.accept_certificate(made, here.home("clinic") / "party.yaml")
    assert (here.home("clinic") / "certificate.pem").read_bytes() == before
