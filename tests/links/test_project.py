"""Invitations: organisations in folders of their own, what goes between them, and what may not."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from apfed_protocols.errors import PartyLeftError
from apfed_protocols.seal import fresh_identity
from secure_apfed.base.fingerprints import DOCUMENT_WORDS, IDENTITY_WORDS, format_as_words
from secure_apfed.cli import execute
from secure_apfed.commands.check import Checks
from secure_apfed.config.file import load_config_text
from secure_apfed.config.plain_yaml import format_yaml, parse_yaml
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.certificates import Authority, make_authority
from secure_apfed.organisations import project
from secure_apfed.organisations.engines import EngineName
from secure_apfed.organisations.local import find_free_addresses
from secure_apfed.organisations.party import PartyFile
from secure_apfed.organisations.revocation import RevocationWatch
from secure_apfed.runs.folder import SEALED_PROJECT, PartyFolder
from secure_apfed.settings.alignment import AlignmentSettings
from secure_apfed.settings.data import TableShape
from tests.docs.pages import blocks
from tests.secure_apfed.small_runs import read_stderr, run_as_json
from tests.waiting import LONG_S, wait_until

TUTORIAL = "docs/tutorial.md"
PAGE = "docs/between-organisations.md"
PARTIES = ("bank", "shop", "clinic", "aggregator")
OTHERS = PARTIES[1:]


def tables(folder: Path) -> None:
    """Each organisation's own, of the people that it knows."""
    draw = np.random.default_rng(0)
    wealth, thrift = draw.normal(size=(2, 300))
    late = np.where(wealth + thrift < 0, "yes", "no")
    columns = {
        "bank": {"balance": wealth + draw.normal(0, 0.5, 300), "late": late},
        "shop": {"basket": thrift - wealth, "visits": draw.poisson(np.exp(1 - thrift))},
        "clinic": {
            "bills": thrift + draw.normal(0, 0.5, 300),
            "ward": draw.choice(["a", "b"], 300),
        },
    }
    for name, own in columns.items():
        rows = pd.DataFrame({"customer": [f"{at:05d}" for at in range(300)], **own})
        (folder / name).mkdir(exist_ok=True)
        rows.sample(280, random_state=1).to_csv(folder / name / f"{name}.csv", index=False)


class Organisations:
    """All of them, each in a working directory of its own; mail is a copy."""

    def __init__(self, base: Path, *, addresses: list[str] | None = None) -> None:
        self.base = base
        tables(base)
        (base / "aggregator").mkdir()
        self.addresses = dict(
            zip(("bank", "shop", "aggregator"), addresses or find_free_addresses(3), strict=True)
        )
        text = blocks(PAGE, "yaml")[0].replace("bank.csv", str(base / "bank" / "bank.csv"))
        text += "alignment: {normalisation: [unicode_nfc, strip, whole_numbers]}\n"
        self.config = load_config_text(text.replace("labelled: 400", "labelled: 60"))

    def home(self, name: str) -> Path:
        return self.base / name / name

    def propose(self, **more: Any) -> Path:
        where = {"addresses": self.addresses, "run_by": {"aggregator": "Sums"}} | more
        project.propose_project(self.config, "bank", self.home("bank"), **where)
        return self.home("bank") / project.PROPOSAL_FILE

    def answer(self, name: str, proposal: Path, home: Path | None = None, **how: Any) -> Path:
        home = home or self.home(name)
        table = self.base / name / f"{name}.csv"
        own = {"file": str(table)} if table.exists() else None
        project.answer_proposal(proposal, name, home, table=own, **how)
        return home / project.ANSWER_FILE.format(name)

    def seal(self) -> Path:
        """Let everybody join and seal the project; return the sealed file."""
        proposal = self.propose()
        answers = [
            self.answer(name, proposal, shows_column_names=name == "shop") for name in OTHERS
        ]
        project.seal_project(answers, self.home("bank"))
        sealed = self.home("bank") / SEALED_PROJECT
        for name in OTHERS:
            project.accept_project(sealed, name, self.home(name))
        return sealed


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    made = Organisations(tmp_path_factory.mktemp("joined"))
    made.seal()
    return made


@pytest.fixture
def here(organisations: Organisations, tmp_path: Path) -> Organisations:
    """A copy of those who joined, to be harmed."""
    copy = shutil.copytree(organisations.base, tmp_path / "copy")
    for run in copy.glob(f"*/*/{project.RUN_FILE}"):
        run.write_text(run.read_text().replace(str(organisations.base), str(copy)))
    harmed = Organisations.__new__(Organisations)
    harmed.__dict__ |= organisations.__dict__ | {"base": copy}
    return harmed


def edit_document(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads(path.read_text())
    change(content["document"])
    path.write_text(json.dumps(content))
    return path


def sign_changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change a document and sign it by another key, as anybody can."""
    content = json.loads(path.read_text())["document"]
    identity = fresh_identity()
    content["identity"] = identity.public.hex()
    change(content)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    signature = identity.sign(b"project v1", str(content["kind"]).encode(), canonical)
    path.write_text(json.dumps({"document": content, "signature": signature.hex()}))
    return path


def test_words_are_of_a_key_and_need_no_two_letters_more() -> None:
    words = format_as_words(bytes(32), 255).split()
    assert words[:IDENTITY_WORDS] == format_as_words(bytes(32), IDENTITY_WORDS).split()
    assert words[:IDENTITY_WORDS] != format_as_words(b"\1" * 32, IDENTITY_WORDS).split()
    from secure_apfed.base.fingerprints import _WORDS

    assert len(_WORDS) == len({word[:3] for word in _WORDS}) == 256
    assert 8 * IDENTITY_WORDS >= 64
    assert 8 * DOCUMENT_WORDS / 2 >= 48


def test_everybody_holds_what_a_party_needs(organisations: Organisations) -> None:
    digests = set()
    for name in PARTIES:
        home = organisations.home(name)
        file = PartyFile.from_file(home / "party.yaml")
        assert (file.party, file.active, file.passives) == (name, "bank", ("shop", "clinic"))
        assert file.listen == organisations.addresses.get(name)
        for secret in ("identity.pem", "key.pem"):
            assert (home / secret).stat().st_mode & 0o777 == 0o600
        assert home.stat().st_mode & 0o777 == 0o700
        own = load_config_text(file.config.read_text())
        assert own.collect_terms() == organisations.config.collect_terms()
        assert {key for key, table in (own.data.parties or {}).items() if table.file} <= {name}
        path = home / SEALED_PROJECT
        sealed = project.SignedFile.from_file(path).open_document(project.SealedProject, path)
        digests.add(sealed.project_words)
        for peer, known in file.peers.items():
            identity = PartyFolder(organisations.home(peer)).load_identity().public.hex()
            assert known.identity == identity == sealed.answer_documents[peer].identity
        shapes = {of: given.table for of, given in sealed.answer_documents.items()}
        assert shapes["aggregator"] is None
        assert shapes["shop"] == TableShape(rows=280, features=2, columns=("basket", "visits"))
        assert shapes["bank"] == TableShape(rows=280, features=1, labelled=60, classes=2)
        secrets = [(organisations.home(of) / "key.pem").read_text() for of in PARTIES]
        assert not any(
            secret in file.read_text() for secret in secrets for file in home.glob("*.json")
        )
    assert len(digests) == 1


def test_a_sealed_project_is_renewed_and_keeps_what_a_party_changed(here: Organisations) -> None:
    file = here.home("shop") / "party.yaml"
    before = (here.home("shop") / "certificate.pem").read_bytes()
    file.write_text(file.read_text() + "meet_s: 120.0\n")
    project.seal_project(
        [here.home(name) / project.ANSWER_FILE.format(name) for name in OTHERS], here.home("bank")
    )
    project.accept_project(here.home("bank") / SEALED_PROJECT, "shop", here.home("shop"))
    assert PartyFile.from_file(file).meet_s == 120
    assert (here.home("shop") / "certificate.pem").read_bytes() != before


def test_own_authority_relay_and_a_built_in_set(tmp_path: Path) -> None:
    config = load_config_text(
        "{name: digits, method: apfed_r, data: {dataset: digits, views: 2}, "
        "guard: {mechanism: none}, secure_sum: {allow_single_passive: true}}"
    )
    names = ("active", "passive-1", "aggregator")
    homes = {name: tmp_path / name for name in names}
    project.propose_project(
        config,
        "active",
        homes["active"],
        relay="127.0.0.1:7443",
        relay_by="aggregator",
        run_by={"aggregator": "Sums"},
    )
    proposal = homes["active"] / project.PROPOSAL_FILE
    own = tmp_path / "own"
    own.mkdir()
    issued = make_authority("passive's own").issue_certificate("passive-1")
    for name, pem in (("ca", issued.ca), ("certificate", issued.certificate), ("key", issued.key)):
        (own / f"{name}.pem").write_bytes(pem)
    project.answer_proposal(proposal, "passive-1", homes["passive-1"], certificate_folder=own)
    project.answer_proposal(proposal, "aggregator", homes["aggregator"])
    answers = [homes[name] / project.ANSWER_FILE.format(name) for name in names[1:]]
    project.seal_project(answers, homes["active"])
    for name in names[1:]:
        project.accept_project(homes["active"] / SEALED_PROJECT, name, homes[name])
    file = PartyFile.from_file(homes["passive-1"] / "party.yaml")
    assert (file.relay, file.listen) == ("127.0.0.1:7443", None)
    assert (homes["passive-1"] / "certificate.pem").read_bytes() == issued.certificate
    assert file.table == homes["passive-1"] / "table.safetensors"
    assert (homes["aggregator"] / "relay-certificate.pem").exists()
    assert not (homes["active"] / "relay-certificate.pem").exists()
    with pytest.raises(Exception, match="takes part without a table of its own"):
        project.answer_proposal(proposal, "aggregator", tmp_path / "x", table={"file": "a.csv"})


# What a proposal may not be, before it leaves the organiser.
UNPROPOSED: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"run_by": {"aggregator": by, "shop": "Shops Ltd"}},
            rf"'{by}' would run {party} and aggregator, who together {gets}.*NAME=ORGANISATION",
        )
        for by, party, gets in (
            ("Bank", "bank", "read what one passive alone contributes"),
            ("shops, ltd.", "shop", "could alter the sum"),
        )
    ),
    (
        {"run_by": {"aggregator": "Sums", "shop": "bank"}},
        "bank and shop, who together read what the other passive contributes",
    ),
    ({"run_by": {"aggregator": "Sums"}, "together": [["bank", "hub"]]}, "together: hub is none of"),
    ({"run_by": {}}, "not said who runs the aggregator; .* say --run-by aggregator=ORGANISATION"),
    ({"addresses": dict.fromkeys(OTHERS, "127.0.0.1:7001")}, "shop and clinic have one address"),
    ({"run_by": {"sums": "Sums"}}, "sums is none of bank, shop, clinic, aggregator"),
    ({"addresses": {"bank": "127.0.0.1:7001"}}, "shop and clinic and aggregator have no address"),
    ({"addresses": {"bank": "nowhere"}}, "an address is host:port"),
    ({"relay": "127.0.0.1:7001"}, "a relay has an address and a party that runs it"),
    ({"relay": "127.0.0.1:7001", "relay_by": "bank"}, "and no other has any"),
]


@pytest.mark.parametrize(("where", "why"), UNPROPOSED)
def test_what_cannot_be_proposed_is_told(tmp_path: Path, where: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        Organisations(tmp_path).propose(**where)


# What harms a proposal on its way, with what whoever joins is told.
def _archive(path: Path) -> None:
    shutil.make_archive(str(path), "zip", path.parent, path.name)
    shutil.move(f"{path}.zip", path)


@pytest.mark.slow
def test_what_one_organisation_reads_is_allowed_by_name_at_both_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Organisations(tmp_path)
    proposal = made.propose(run_by={"aggregator": "Bank"}, together=[["bank", "aggregator"]])
    call = (
        "project",
        "join",
        proposal,
        "--as",
        "clinic",
        "--folder",
        tmp_path / "c",
        "--table",
        tmp_path / "clinic" / "clinic.csv",
    )
    message = run_as_json(capsys, *call, code=2)["error"]["message"]
    assert "'Bank' would run bank and aggregator, who together read what one passive" in message
    assert "ask bank for another proposal, or allow it by name" in message
    assert not (tmp_path / "c" / project.PROPOSAL_FILE).exists()
    wrong = run_as_json(capsys, *call, "--allow-together", "bank", code=2)["error"]["message"]
    assert "expected two names or more" in wrong
    said = run_as_json(capsys, *call, "--allow-together", "bank+aggregator")
    assert any("which was allowed by name" in each for each in said["organisations"])


@pytest.mark.slow
def test_a_party_s_own_limits_hold_from_the_first_screen_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], here: Organisations
) -> None:
    greedy = Organisations(tmp_path)
    greedy.config = load_config_text(
        format_yaml(greedy.config.model_dump(mode="json", exclude_unset=True)),
        overrides=["rules.spare_answers=1000000", "alignment.minimum_rows=1"],
    )
    home = tmp_path / "own"
    home.mkdir()
    (home / "party.yaml").write_text("minima: {alignment.minimum_rows: 20}\n")
    call = (
        "project",
        "join",
        greedy.propose(),
        "--as",
        "shop",
        "--folder",
        home,
        "--table",
        tmp_path / "shop" / "shop.csv",
    )
    message = run_as_json(capsys, *call, code=2)["error"]["message"]
    assert "shop: alignment.minimum_rows is 1, and minima.alignment.minimum_rows of" in message
    assert not (home / project.RUN_FILE).exists()
    (home / "party.yaml").write_text("maxima: {rules.spare_answers: 1000000}\n")
    shown = {each["setting"]: each for each in run_as_json(capsys, *call)["departures"]}
    assert shown["rules.spare_answers"]["value"] == "1,000,000"
    assert shown["alignment.minimum_rows"]["default"] == "2"
    # And of whoever sealed and begins: the file that the limits stand in is the party's own.
    file = here.home("shop") / "party.yaml"
    file.write_text(file.read_text() + "maxima: {rules.restarts: 3}\n")
    project.accept_project(here.home("shop") / SEALED_PROJECT, "bank", here.home("bank"))
    for command in ("project check", "party"):
        said = run_as_json(capsys, *command.split(), "--config", file, code=2)
        text = json.dumps(said, ensure_ascii=False)
        assert "shop: rules.restarts is 20, and maxima.rules.restarts of" in text
    with pytest.raises(Exception, match=r"rules.restarts is 20, and maxima"):
        project.accept_project(here.home("shop") / SEALED_PROJECT, "shop", here.home("shop"))


UNSIGNED = "mail.json: its signature does not fit the key that it names"


def _name_code(path: Path, *, key: str) -> None:
    sign_changed(path, lambda said: said["settings"].update({key: "never_loaded:Mine"}))


HARMED: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda path: edit_document(path, lambda said: said["settings"]["train"].update(epochs=90)),
        UNSIGNED,
    ),
    (lambda path: edit_document(path, lambda said: said.update(version="0.0.9")), UNSIGNED),
    (lambda path: edit_document(path, lambda said: said.update(kind="answer")), UNSIGNED),
    (lambda path: edit_document(path, lambda said: said.update(identity="0" * 64)), UNSIGNED),
    (
        lambda path: edit_document(path, lambda said: said.update(identity="../etc")),
        "names no key by whi",
    ),
    (
        lambda path: sign_changed(path, lambda said: said.update(version="0.0.9")),
        "version 0.0.9 of secure-apfed wrote it, and here is",
    ),
    (
        lambda path: sign_changed(path, lambda said: said.update(kind="answer")),
        "expected a file of the kind 'proposal', got 'answer'",
    ),
    (
        lambda path: sign_changed(path, lambda said: said.update(party="../../etc")),
        "is no proposal: party: expected a name",
    ),
    (
        lambda path: sign_changed(path, lambda said: said["settings"].update(method="walk")),
        "'walk' is unknown",
    ),
    *(
        (partial(_name_code, key=key), f"{key}.*names code, and only the party that runs")
        for key in ("method", "task")
    ),
    (
        lambda path: sign_changed(
            path, lambda said: said["settings"].update(model={"network": "never_loaded:encode"})
        ),
        "names code of a party's own",
    ),
    (
        lambda path: sign_changed(
            path, lambda said: said["settings"]["data"].update(folder="/etc")
        ),
        "data.folder is what each party says for itself",
    ),
    (
        lambda path: sign_changed(
            path,
            lambda said: said["settings"]["data"]["parties"].update(shop={"file": "/etc/passwd"}),
        ),
        "data.parties.shop.file",
    ),
    (_archive, "is an archive; unpack it"),
    (lambda path: path.write_text("[" * 100_000), "is not JSON.*; ask who sent it for the file ag"),
    (Path.unlink, "there is no file .*mail.json; correct its path"),
    (lambda path: path.write_bytes(b" " * (2**20 + 1)), "is larger than"),
    (lambda path: path.write_text("{}"), "is not as this version writes it"),
    (lambda path: path.write_bytes(b"\xff"), "is not JSON"),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("harm", "why"), HARMED)
def test_a_harmed_proposal_is_refused(
    tmp_path: Path, harm: Callable[[Path], object], why: str
) -> None:
    made = Organisations(tmp_path)
    proposal = shutil.copy(made.propose(), tmp_path / "mail.json")
    harm(Path(proposal))
    with pytest.raises(Exception, match=why):
        made.answer("shop", Path(proposal))
    assert not made.home("shop").exists()


@pytest.mark.slow
def test_answers_that_do_not_fit_are_refused(here: Organisations, tmp_path: Path) -> None:
    bank = here.home("bank")
    proposal = bank / project.PROPOSAL_FILE
    sealed = bank / SEALED_PROJECT
    answers = {name: here.home(name) / project.ANSWER_FILE.format(name) for name in OTHERS}

    def require_refusal(why: str, *paths: Path) -> None:
        with pytest.raises(Exception, match=why):
            project.seal_project(paths, bank)

    require_refusal("there is no answer of clinic, aggregator; ask for it", answers["shop"])
    another = here.answer("shop", proposal, tmp_path / "thief")
    require_refusal("shop answered twice, as '", *answers.values(), another)
    require_refusal(
        "expected a file of the kind 'answer', got 'proposal'", *answers.values(), proposal
    )
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Organisations(tmp_path / "elsewhere")
    other = elsewhere.answer("shop", elsewhere.propose())
    require_refusal(
        "shop answered another proposal", other, answers["clinic"], answers["aggregator"]
    )
    twin = tmp_path / "twin"
    twin.mkdir(mode=0o700)
    shutil.copy(bank / "identity.pem", twin)
    both = here.answer("aggregator", proposal, twin)
    require_refusal(
        "bank and aggregator answered with one identity", answers["shop"], answers["clinic"], both
    )
    with pytest.raises(
        Exception, match=r"holds answer-shop.json, proposal.json, sealed.json already"
    ):
        here.answer("shop", proposal)
    with pytest.raises(Exception, match="is not of bank, who proposed this"):
        project.seal_project(list(answers.values()), here.home("shop"))
    with pytest.raises(Exception, match="asks for bank, shop, clinic, aggregator, and not for hub"):
        project.answer_proposal(proposal, "hub", tmp_path / "hub")
    # What the organiser sealed is with the thief's answer as shop; or of another proposal.
    project.seal_project([another, answers["clinic"], answers["aggregator"]], bank)
    with pytest.raises(Exception, match="lacks the answer of shop that lies in"):
        project.accept_project(sealed, "shop", here.home("shop"))
    with pytest.raises(Exception, match="is of another proposal than"):
        project.accept_project(sealed, "shop", elsewhere.home("shop"))
    edit_document(sealed, lambda said: said.update(ca=make_authority().certificate.decode()))
    with pytest.raises(Exception, match="its signature does not fit the key that it names"):
        project.accept_project(sealed, "clinic", here.home("clinic"))
    with pytest.raises(Exception, match="has expired at"):
        project.seal_project(list(answers.values()), bank, days=-1)


@pytest.mark.slow
def test_the_commands_show_what_is_asked_and_learnt(
    here: Organisations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bank = here.home("bank")
    shop = tmp_path / "shop"
    words = format_as_words(PartyFolder(bank).load_identity().public, IDENTITY_WORDS)
    assert run_as_json(capsys, "identity", "show", bank)["words"] == words
    assert len(run_as_json(capsys, "identity", "new", "--folder", shop)["identity"]) == 64
    for wrong in (("new", "--folder", shop), ("show", tmp_path)):
        assert "identity" in run_as_json(capsys, "identity", *wrong, code=2)["error"]["message"]
    call = ("project", "join", bank / project.PROPOSAL_FILE, "--as", "shop", "--folder", shop)
    file = here.base / "shop" / "shop.csv"
    table = ("--table", file, "--columns", "--id-column", "client", "--missing", "mean")
    sealed = (
        "project",
        "join",
        here.home("shop") / SEALED_PROJECT,
        "--as",
        "shop",
        "--folder",
        here.home("shop"),
        "--words",
    )
    whole = run_as_json(capsys, *sealed, words)["project_words"]
    run_as_json(capsys, *sealed, whole)
    for begun, count, code, why in (
        (call, 8, 4, f"the organiser has the words {words!r}, not 'acorn"),
        (sealed, 12, 4, f"the whole project has the words {whole!r}, not 'acorn"),
        (call, 3, 2, "3 words were given; say the 8 of the organiser"),
        (sealed, 3, 2, "say the 8 of the organiser or the 12 of the whole project"),
    ):
        spoken = (*begun[:7], "--words", " ".join(["acorn"] * count))
        assert why in run_as_json(capsys, *spoken, code=code)["error"]["message"]
    gaps = pd.read_csv(file, dtype=str).rename(columns={"customer": "client"})
    gaps.loc[3, "visits"] = None
    gaps.to_csv(file, index=False)
    for options, why in ((3, "--id-column NAME"), (5, "fill them; or join with --missing mean")):
        assert why in run_as_json(capsys, *call, *table[:options], code=3)["error"]["message"]
    said = run_as_json(capsys, *call, *table, "--words", words)
    assert "280 rows, 2 features, basket, visits" in said["asked"]["table"]
    assert said["asked"]["columns"].startswith("IDs in client;")
    assert "missing: mean" in (shop / project.RUN_FILE).read_text()
    assert said["asked"]["aggregator (aggregator)"].endswith("run by Sums")
    assert "sends about" in said["asked"]["bytes"]
    assert "bank: alignment" in dict(
        map(tuple, (row[:2] for row in said["learnt"]["What shop learns"]))
    )
    assert said["learnt"]["What others learn about shop"]
    assert execute([*map(str, (*call[:-1], tmp_path / "another", *table, "--words", words))]) == 0
    heads = capsys.readouterr().out.partition("What others learn about shop")[2].splitlines()
    assert heads[1].split()[:2] == ["by", "whom:"]
    learns = next(at for at, line in enumerate(heads) if line == "What shop learns")
    assert heads[learns + 1].startswith("from whom: what")
    sums = run_as_json(capsys, *call[:3], "--as", "aggregator", "--folder", tmp_path / "sums")
    assert sums["asked"]["role"] == "aggregator of votes, summed"
    new = (
        "project",
        "new",
        bank / project.RUN_FILE,
        "--as",
        "bank",
        "--folder",
        tmp_path / "bank",
        *(f"--at={name}={at}" for name, at in here.addresses.items()),
        "--run-by",
        "aggregator=Sums",
    )
    alone = run_as_json(capsys, *new, "--set", "rules={restarts: 3}", code=2)["error"]["message"]
    assert "nobody begins again by itself" in alone
    assert run_as_json(capsys, *new)["words"]
    halved = ("project", "new", shop / "run.yaml", "--as", "bank", "--at", "bank")
    assert "expected NAME=VALUE" in run_as_json(capsys, *halved, code=2)["error"]["message"]


SOME = [at % 17 for at in range(280)]
# Columns of a table that the shop cannot join with, as its people gave it to it.
MESSY: dict[str, dict[str, Any]] = {
    "dates": {"since": [f"{at % 28 + 1:02d}.03.2024" for at in range(280)]},
    "empty cells": {"visits": [None, *SOME[1:]]},
    "a stray text": {"visits": ["many", *SOME[1:]]},
    "many categories": {"street": [f"street {at}" for at in range(280)]},
    "several": {
        "since": [f"{at % 28 + 1:02d}.03.2024" for at in range(280)],
        "visits": [None, "many", *SOME[2:]],
        "no: 'quotes'": ["x", *SOME[1:]],
    },
}


@pytest.mark.filterwarnings("ignore::secure_apfed.errors.SuspectColumnWarning")
@pytest.mark.parametrize("case", MESSY)
def test_who_joins_with_a_messy_table_reads_options_that_mend_it(
    case: str, here: Organisations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here.base / "shop" / "shop.csv"
    pd.read_csv(file, dtype=str).assign(**MESSY[case]).to_csv(file, index=False)
    proposal = here.home("bank") / project.PROPOSAL_FILE
    call = ["project", "join", str(proposal), "--as", "shop", "--folder", str(tmp_path / "shop")]
    call += ["--table", str(file)]
    capsys.readouterr()
    assert execute(call) == 3
    said = capsys.readouterr().err
    assert "Or join with these options, too:" in said
    assert "run's file" not in said
    options = said[said.index("\n--set ") :].replace("\\\n", " ")
    assert execute([*call, *shlex.split(options)]) == 0
    assert "To take part, send " in capsys.readouterr().out
    settings = parse_yaml((tmp_path / "shop" / project.RUN_FILE).read_text(), "run.yaml")[0]
    assert {"file", "missing"} & set(settings["data"]["parties"]["shop"])


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("train.epochs=3", "who joins sets what is of its own table"),
        ("data.parties.bank.missing=mean", "data.parties.shop.numeric"),
        ("data.missing=mean", "ask the organiser for another proposal"),
    ],
)
def test_who_joins_sets_nothing_but_what_is_of_its_table(
    setting: str, why: str, here: Organisations, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        project.answer_proposal(
            here.home("bank") / project.PROPOSAL_FILE, "shop", tmp_path / "shop", settings=[setting]
        )


@pytest.mark.slow
def test_a_party_is_checked_and_plans_alone(
    here: Organisations, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in OTHERS:  # nobody else's file is there
        if name != "shop":
            shutil.rmtree(here.base / name)
    shutil.rmtree(here.base / "bank")
    home = here.home("shop")
    config = home / "party.yaml"

    def list_findings(code: int = 0) -> dict[str, tuple[str, str]]:
        found = run_as_json(capsys, "project", "check", "--config", config, code=code)["findings"]
        return {each["name"]: (each["state"], each["value"]) for each in found}

    found = list_findings()
    assert found.pop("rules.restarts")[1].startswith("20, by default 0; protects the passives")
    assert found.pop("guard.mechanism")[0] == "note"
    assert {name: state for name, (state, _) in found.items()} == {
        **dict.fromkeys(
            (
                "settings",
                "contract",
                "table",
                "features",
                "IDs",
                "folder",
                "revoked",
                "certificate",
            ),
            "ok",
        ),
        **dict.fromkeys(("bank", "clinic", "aggregator", "clock, version"), "note"),
    }
    assert found["table"][1] == "280 rows, no ID twice, 2 features"
    assert "nobody listens there" in found["bank"][1]
    assert "it dials this party" in found["clinic"][1]
    planned = run_as_json(capsys, "plan", "--config", config)
    assert planned["rows"] == {"bank": 280, "shop": 280, "clinic": 280}
    assert planned["labelled_rows"] == 60

    def require_finding(
        path: Path, change: Callable[[str], str], name: str, why: str, code: int
    ) -> None:
        whole = path.read_text()
        path.write_text(change(whole))
        state, value = list_findings(code)[name]
        assert (state, why in value) == ("wrong", True), value
        if "declared" in why:  # whoever trains all the same ends so, too
            begun = run_as_json(capsys, "party", "--config", config, code=code)
            assert begun["error"]["message"] == value
        path.write_text(whole)

    run = home / project.RUN_FILE
    table = here.base / "shop" / "shop.csv"
    require_finding(
        run,
        lambda text: text.replace("epochs: 10", "epochs: 11"),
        "contract",
        "differs from the sealed project in train.epochs",
        2,
    )
    identity = parse_yaml(config.read_text(), "")[0]["peers"]["bank"]["identity"]
    require_finding(
        config,
        lambda text: text.replace(identity, "a" * 64),
        "contract",
        "knows another identity of bank",
        2,
    )
    require_finding(
        table, lambda text: text.replace("visits", "late"), "table", "called like the active's", 3
    )
    require_finding(
        table, lambda text: "\n".join(text.splitlines()[:100]), "table", "declared another table", 3
    )
    require_finding(
        table,
        lambda text: text.replace("visits", "trips"),
        "table",
        "shop declared another table: 280 rows, 2 features, and here are 280 and 2 (missing: "
        "visits; new: trips)",
        3,
    )
    require_finding(
        table, lambda text: text + text.splitlines()[1], "table", "1 IDs occur more than once", 3
    )

    def append_rows(*ids: str) -> Callable[[str], str]:
        return lambda text: text + "".join(f"{one},0.5,1\n" for one in ids)

    # Equal under the agreed rules alone.
    require_finding(table, append_rows("\u00e9", "e\u0301"), "table", "after normalisation", 3)
    require_finding(table, append_rows("0900", "900"), "table", "after normalisation", 3)
    (home / "key.pem").chmod(0o644)
    assert "others may read" in list_findings(3)["folder"][1]
    (home / "key.pem").chmod(0o600)
    authority = make_authority()
    answer = json.loads((home / "answer-shop.json").read_text())["document"]
    signer = Authority(authority.certificate, authority.key)
    (home / "ca.pem").write_bytes(authority.certificate)
    for days, code, how, why in (
        (-1, 2, "wrong", "has expired at"),
        (0.5, 0, "note", "0 days left, until "),
    ):
        made = signer.sign_request(answer["request"].encode(), "shop", days=days)
        (home / "certificate.pem").write_bytes(made)
        state, value = list_findings(code)["certificate"]
        assert (state, why in value, "`secure-apfed certs request`" in value) == (how, True, True)
    (home / "identity.pem").unlink()
    error = run_as_json(capsys, "project", "check", "--config", config, code=2)["error"]["message"]
    assert "holds no identity.pem" in error


# By party, columns with a fault each, and what names the fault.
FAULTY: dict[str, dict[str, tuple[list[Any], str]]] = {
    "bank": {
        "since": ([f"{at % 28 + 1:02d}.03.2024" for at in range(280)], "column 'since'"),
        "grade": (["high", *SOME[1:]], "column 'grade'"),
    },
    "shop": {
        "visits": ([None, *SOME[1:]], "empty cells in visits (1)"),
        "street": ([f"street {at}" for at in range(280)], "column 'street'"),
    },
}


def organisations_with_faulty_tables(base: Path) -> Organisations:
    """Return organisations whose bank holds its own and the shop's table, with two faults each."""
    made = Organisations(base)
    settings = made.config.model_dump(mode="json", exclude_unset=True)
    del settings["data"]["parties"]["bank"]["file"]  # so that no table is declared yet
    made.config = load_config_text(format_yaml(settings))
    made.seal()
    run = made.home("bank") / project.RUN_FILE
    settings = parse_yaml(run.read_text(), "run.yaml")[0]
    for name, columns in FAULTY.items():
        file = base / name / f"{name}.csv"
        faulty = {column: cells for column, (cells, _) in columns.items()}
        pd.read_csv(file, dtype=str).assign(**faulty).to_csv(file, index=False)
        settings["data"]["parties"].setdefault(name, {})["file"] = str(file)
    run.write_text(format_yaml(settings))
    return made


@pytest.mark.filterwarnings("ignore::secure_apfed.errors.SuspectColumnWarning")
def test_one_check_names_all_faults_of_several_tables_and_the_lines_that_mend_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bank = organisations_with_faulty_tables(tmp_path).home("bank")
    found = run_as_json(capsys, "project", "check", "--config", bank / "party.yaml", code=3)
    wrong = [each["value"] for each in found["findings"] if each["state"] == "wrong"]
    signs = [(party, sign) for party, own in FAULTY.items() for _, sign in own.values()]
    assert len(wrong) == len(signs) == 4
    for party, sign in signs:
        assert sum(text.startswith(f"{party}: ") and sign in text for text in wrong) == 1, sign

    assert execute(["project", "check", "--config", str(bank / "party.yaml")]) == 3
    shown = capsys.readouterr().out
    unbroken = "".join(shown.split())  # a long path may be cut by the end of a line
    assert "".join(f"below the same keys of {bank / project.RUN_FILE}".split()) in unbroken
    assert found["settings"] in shown

    settings = parse_yaml((bank / project.RUN_FILE).read_text(), "run.yaml")[0]
    pasted = parse_yaml(found["settings"], "pasted")[0]["data"]["parties"]
    assert set(pasted) == set(FAULTY)
    for party, lines in pasted.items():
        settings["data"]["parties"][party] |= lines
    (bank / project.RUN_FILE).write_text(format_yaml(settings))
    mended = run_as_json(capsys, "project", "check", "--config", bank / "party.yaml")
    assert mended["settings"] == ""
    states = {each["name"]: each["state"] for each in mended["findings"]}
    assert states["table"] == states["table of shop"] == "ok"


def certificate_findings(folder: Path) -> dict[str, tuple[str, str]]:
    """Return what `project check` says of certificates, or why it is wrong."""
    checks = Checks(folder / "party.yaml")
    return {
        one.name: (one.state, one.value)
        for one in checks._try_check("tls", checks._check_certificate)
    }


def test_a_project_reads_its_list_of_what_is_revoked(
    here: Organisations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the guide: nobody edits party.yaml, and `certs revoke` protects."""
    bank = here.home("bank")
    shop = here.home("shop") / "certificate.pem"
    monkeypatch.chdir(here.base)
    listed = bank / "revoked.txt"
    assert PartyFile.from_file(bank / "party.yaml").tls.revoked == listed  # type: ignore[union-attr]
    assert certificate_findings(bank)["revoked"][0] == "ok"
    watch = RevocationWatch(PartyFile.from_file(bank / "party.yaml"))
    envelope: Any = SimpleNamespace(sender="shop", receiver="bank")
    watch.observe_incoming(envelope, b"")
    said = run_as_json(capsys, "certs", "revoke", shop, "--list", listed)
    assert said["read_by"] == [str(bank / "party.yaml")]
    assert said["relays"] == []
    with pytest.raises(PartyLeftError, match="shop is revoked by the list of bank"):
        watch.observe_incoming(envelope, b"")
    state, value = certificate_findings(bank)["revoked"]
    assert (state, "among them shop" in value) == ("optional", True)
    listed.unlink()
    with pytest.raises(ConfigError, match="bank cannot read"):
        watch.observe_incoming(envelope, b"")


def test_whoever_revokes_is_told_of_the_relay_that_reads_another_list(
    here: Organisations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = here.home("bank")
    monkeypatch.chdir(here.base)
    file = bank / "party.yaml"
    kept = parse_yaml(file.read_text(), str(file))[0]
    assert isinstance(kept, dict)
    file.write_text(format_yaml({**kept, "relay": "relay.example:443"}))
    command = ("certs", "revoke", "ab" * 32, "--list", bank / "revoked.txt")
    assert run_as_json(capsys, *command)["relays"] == ["relay.example:443"]
    assert execute([*map(str, command)]) == 0
    said = read_stderr(capsys)
    assert "the relay at relay.example:443 reads the list that it was started with" in said


def test_a_list_that_nobody_reads_is_no_protection(
    here: Organisations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = here.home("bank")
    identity = "ab" * 32
    monkeypatch.chdir(here.base)
    listed = bank / "more-revoked.txt"
    refused = run_as_json(capsys, "certs", "revoke", identity, "--list", listed, code=2)
    assert "no party's file reads it, so it protects nobody" in refused["error"]["message"]
    state, value = certificate_findings(bank)["tls"]
    assert (state, "more-revoked.txt revokes something, and tls.revoked" in value) == (
        "missing",
        True,
    )
    for_others = run_as_json(capsys, "certs", "revoke", identity, "--list", listed, "--for-others")
    assert for_others["read_by"] == []
    file = bank / "party.yaml"
    file.write_text(file.read_text().replace("revoked.txt", "more-revoked.txt"))
    assert run_as_json(capsys, "certs", "revoke", identity, "--list", listed)["read_by"] == [
        str(file)
    ]
    # Joining again, as for a renewed certificate, leaves the list that its owner named.
    project.accept_project(bank / SEALED_PROJECT, "bank", bank)
    assert "more-revoked.txt" in file.read_text()


def test_a_project_that_was_sealed_again_is_joined_again(here: Organisations) -> None:
    shop = here.home("shop")
    assert "sealed certificate" not in certificate_findings(shop)
    answers = [here.home(name) / project.ANSWER_FILE.format(name) for name in OTHERS]
    project.seal_project(answers, here.home("bank"))
    shutil.copy(here.home("bank") / SEALED_PROJECT, shop / SEALED_PROJECT)
    assert "join that file again" in certificate_findings(shop)["sealed certificate"][1]
    project.accept_project(shop / SEALED_PROJECT, "shop", shop)
    assert "sealed certificate" not in certificate_findings(shop)


def test_preparing_reads_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(blocks(PAGE, "yaml")[0])
    call = ("run", tmp_path / "run.yaml", "--transport", "relay", "--prepare")
    prepared = run_as_json(capsys, *call, "--output", tmp_path / "out")
    files = prepared["parties"]
    assert set(files) == set(PARTIES)
    address = PartyFile.from_file(Path(files["bank"])).relay
    assert prepared["relay"][:3] == ["relay", "--listen", address]
    assert all(Path(path).is_file() for path in prepared["relay"][4::2])
    capsys.readouterr()
    assert execute([*map(str, call), "--output", str(tmp_path / "shown")]) == 0
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in printed] == ["relay", *["party"] * len(PARTIES)]
    assert all(PartyFile.from_file(Path(file)).table is None for file in files.values())
    message = run_as_json(capsys, "plan", tmp_path / "run.yaml", code=3)["error"]["message"]
    assert "bank.csv" in message
    table = tmp_path / "bank.csv"
    rows = [f"{at},{at % 7},{'yes' if at % 2 else 'no'}\n" for at in range(20)]
    table.write_text("customer,balance,late\n" + "".join(rows))
    here = ("--set", f"data.parties.bank.file={table}", "--set", "data.labelled=8")
    message = run_as_json(capsys, "plan", tmp_path / "run.yaml", *here, code=2)["error"]["message"]
    assert "data.parties.shop.file is not set here, so only shop can read its table" in message


@pytest.mark.parametrize("over", ["grpc", "flower"])
def test_two_parties_meet_and_compare(
    over: EngineName,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVFlare's parties meet in a job: `test_engines_deployed.py`."""
    text = format_yaml(parse_yaml(blocks(PAGE, "yaml")[0], PAGE)[0])
    for old, new in (
        ("method: votes", "method: {name: votes_randomised, epsilon: 4}"),
        ("400", "60"),
        ("    clinic: {}\n", ""),
        ("bank.csv", str(tmp_path / "bank" / "bank.csv")),
    ):
        assert old in text
        text = text.replace(old, new)
    config = load_config_text(text)
    tables(tmp_path)
    homes = {name: tmp_path / name / name for name in ("bank", "shop")}
    engine: dict[str, Any] = {"server": "superlink.example:9092", "run_by": {"server": "Neutral"}}
    project.propose_project(
        config,
        "bank",
        homes["bank"],
        addresses={"bank": find_free_addresses(1)[0]},
        over=over,
        **(engine if over == "flower" else {}),
    )
    own = {"file": str(tmp_path / "shop" / "shop.csv")}
    project.answer_proposal(homes["bank"] / project.PROPOSAL_FILE, "shop", homes["shop"], table=own)
    project.seal_project([homes["shop"] / "answer-shop.json"], homes["bank"])
    project.accept_project(homes["bank"] / SEALED_PROJECT, "shop", homes["shop"])
    # Both parties' commands run in this process. Typer unsets the variable while it reads a command
    # line, which fails where two threads do; it restores one that was set before.
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "1")
    real = time.time
    ahead = [0.0]
    monkeypatch.setattr(
        time, "time", lambda: real() + ahead[0] * (threading.current_thread().name == "shop")
    )

    def both(code: int) -> str:
        codes: list[int] = []
        call = ["project", "check", "--meet", "60", "--config"]
        shop = threading.Thread(
            name="shop",
            target=lambda: codes.append(execute([*call, str(homes["shop"] / "party.yaml")])),
        )
        capsys.readouterr()
        shop.start()
        assert execute([*call, str(homes["bank"] / "party.yaml")]) == code
        shop.join(LONG_S)
        assert codes == [code]
        return capsys.readouterr().out

    met = both(0)
    assert met.count("met, with the same version, settings, sealed project") == 2
    assert "told to shop: " in met
    assert "told to bank: " in met
    assert "bank writes IDs as " in met
    assert "shop writes IDs as " in met
    ahead[0] = 86_400.0
    assert "the clocks of shop and bank are 86,4" in both(4)


# Patterns of the bank and of the shop, how those of the shop are shown, and what is advised.
MET: dict[str, tuple[dict[str, int], dict[str, int], str, int, str]] = {
    "the same": ({"A-9": 100}, {"A-9": 97, "a9": 2}, "optional", 0, "agree on"),
    "equal": ({"A-9": 100}, {"A-9": 100}, "ok", 0, ""),
    "nobody": ({"A-9": 100}, {"a 9": 100}, "missing", 3, "case_fold, drop_punctuation]; a sealed"),
    "zeros": ({"A-09": 90, "A-9": 10}, {"a 9": 100}, "missing", 3, "no rule adds or drops zeros"),
    "another column": ({"A-9": 100}, {"a@a.a": 100}, "missing", 3, "what the ID columns hold"),
    "not told": ({"#-#": 100}, {"a 9": 100}, "optional", 0, "what the ID columns hold"),
}


@pytest.mark.parametrize("case", MET)
def test_patterns_that_cannot_match_are_no_readiness(case: str) -> None:
    own, theirs, state, code, advice = MET[case]
    checks = Checks.__new__(Checks)
    checks.code = 0
    checks.config = SimpleNamespace(alignment=AlignmentSettings())  # type: ignore[assignment]
    checks.file = SimpleNamespace(party="bank", peers={"shop": None})  # type: ignore[assignment]
    found = list(checks._compare_patterns(own, {"shop": theirs}))
    assert {each.name: each.state for each in found}["IDs of shop"] == state
    assert checks.code == code
    assert advice in found[-1].value
    assert len(found) == 2 + bool(advice)


def start_command(
    words: Sequence[str], folder: Path, request: pytest.FixtureRequest
) -> "subprocess.Popen[bytes]":
    """Start a printed command as in a terminal of its own."""
    command = [sys.executable, "-m", "secure_apfed.cli", *words[1:]]
    process = subprocess.Popen(command, cwd=folder)
    request.addfinalizer(process.wait)
    request.addfinalizer(process.kill)  # first: the last one added is called first
    return process


@pytest.mark.slow
@pytest.mark.timeout(5 * LONG_S)
def test_the_guide_runs_as_printed_between_four_organisations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    tables(tmp_path)
    (tmp_path / "aggregator").mkdir()
    text = blocks(PAGE, "yaml")[0].replace("400", "60").replace("epochs: 10", "epochs: 2")
    text = text.replace("method: votes", "method: {name: votes, prior: labeller}")
    (tmp_path / "bank" / "run.yaml").write_text(text)
    printed = "\n".join(blocks(PAGE, "bash")[:2]).replace("\\\n", " ")
    for address, free in zip(
        ("bank.example:7001", "shop.example:7002", "sums.example:7003"),
        find_free_addresses(3),
        strict=True,
    ):
        printed = printed.replace(address, free)
    waiting: list[subprocess.Popen[bytes]] = []

    def wait_for_processes() -> None:
        assert [process.wait(LONG_S) for process in waiting] == [0] * len(waiting)
        waiting.clear()

    for line in filter(None, printed.splitlines()):
        words = line.split()
        (name,) = {
            name
            for name in PARTIES
            for word in words
            if word == name or word.startswith(f"{name}/")
        } & set(PARTIES)
        home = tmp_path / name
        for sent in tmp_path.glob("*/*/*.json"):  # the mail
            if not (home / sent.name).exists():
                shutil.copy(sent, home / sent.name)
        if len(waiting) == len(PARTIES):
            wait_for_processes()
        if "--meet" in words or words[1] == "party":  # all four at once
            waiting.append(start_command(words, home, request))
            continue
        monkeypatch.chdir(home)
        assert execute(words[1:]) == 0, line
    wait_for_processes()
    result = json.loads((tmp_path / "bank" / "bank" / "result.json").read_text())
    assert result["accuracy"]
    assert (tmp_path / "bank" / "bank" / "report.html").is_file()
    assert all((tmp_path / name / name / "ended.json").is_file() for name in OTHERS)


@pytest.mark.slow
@pytest.mark.timeout(5 * LONG_S)
def test_the_tutorial_runs_as_printed_from_an_invitation_to_joint_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = blocks(TUTORIAL, "python")
    exec(compile(script, TUTORIAL, "exec"), {})
    (settings,) = blocks(TUTORIAL, "yaml")
    Path("run.yaml").write_text(settings)
    printed = "\n".join(blocks(TUTORIAL, "bash")).replace("--seeds 3", "--seeds 2")
    for port, free in zip(("7001", "7002", "7003"), find_free_addresses(3), strict=True):
        printed = printed.replace(f"127.0.0.1:{port}", free)
    waiting: list[subprocess.Popen[bytes]] = []
    for words in filter(None, map(str.split, printed.splitlines())):
        if words[1] == "party":  # all four at once
            waiting.append(start_command(words, tmp_path, request))
            continue
        assert [process.wait(LONG_S) for process in waiting] == [0] * len(waiting)
        waiting.clear()
        if words[1] == "serve":
            start_command(words, tmp_path, request)
        else:
            assert execute(words[1:]) == 0, words
    reached = json.loads(Path("bank/result.json").read_text())["measures"]
    assert reached["split_nn_sum"]["auc"] > reached["split_nn_sum_alone"]["auc"] + 0.1
    by = pd.read_csv("scores.csv")["by"].value_counts()
    assert (by["jointly"], by["alone"]) == (834, 166)
    assert len(pd.read_csv("alone.csv")) == 1000


THREE = ("bank", "shop", "aggregator")
EPOCHS = 12
OVER_GRPC = f"""
name: late-payers
method: apfed_r
data:
  dataset: tables
  active: bank
  id_column: customer
  label_column: late
  parties: {{bank: {{file: bank.csv}}, shop: {{}}}}
model: {{projection: 1}}
guard: {{mechanism: none, noise: reproducible_insecure}}
secure_sum: {{scheme: bfv, clip: 4.0, allow_single_passive: true}}
train: {{epochs: {EPOCHS}, batch_size: 32, device: cpu}}
party_seeds: shared_for_comparison
rules: {{silent_passive: wait, patience_s: 600, restarts: 20}}
"""


@pytest.fixture(scope="module")
def sealed_over_grpc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seal a project of three parties by the guide's commands; return the folder of all."""
    base = tmp_path_factory.mktemp("grpc")
    tables(base)
    (base / "aggregator").mkdir()
    (base / "bank" / "run.yaml").write_text(OVER_GRPC)
    addresses = dict(zip(THREE, find_free_addresses(3), strict=True))
    at = " ".join(f"--at {name}={address}" for name, address in addresses.items())
    commands = [
        ("bank", f"new run.yaml --as bank --over grpc {at} --run-by aggregator=Sums"),
        ("shop", "join proposal.json --as shop --table shop.csv"),
        ("aggregator", "join proposal.json --as aggregator"),
        ("bank", "seal answer-shop.json answer-aggregator.json --folder bank"),
        ("shop", "join sealed.json --as shop"),
        ("aggregator", "join sealed.json --as aggregator"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, command in commands:
            for sent in base.glob("*/*/*.json"):  # the mail
                shutil.copy(sent, base / name / sent.name)
            patch.chdir(base / name)
            assert execute(["project", *command.split()]) == 0, command
    return base


class PartyProcesses:
    """The three parties of a copy of the sealed project, each in a process of its own."""

    def __init__(self, base: Path, request: pytest.FixtureRequest) -> None:
        self.base = base
        self.request = request
        self.processes = {name: self.start(name) for name in THREE}

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        command = f"secure-apfed party --config {name}/party.yaml --no-baselines"
        return start_command(command.split(), self.base / name, self.request)

    def count_epochs(self) -> int:
        metrics = self.base / "bank" / "bank" / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for_digests(self) -> dict[str, str]:
        """Return each party's digest of the parameters with which it ended."""
        codes = {name: process.wait(LONG_S) for name, process in self.processes.items()}
        assert codes == dict.fromkeys(THREE, 0)
        ended = {name: self.base / name / name / "ended.json" for name in THREE}
        return {name: json.loads(file.read_text())["model_sha256"] for name, file in ended.items()}


@pytest.fixture(scope="module")
def undisturbed_digests(
    sealed_over_grpc: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return PartyProcesses(shutil.copytree(sealed_over_grpc, folder), request).wait_for_digests()


@pytest.mark.slow
@pytest.mark.timeout(5 * LONG_S)
@pytest.mark.parametrize("killed", ["shop", "bank"])
def test_a_killed_party_of_a_project_over_grpc_goes_on_by_the_same_command(
    killed: str,
    sealed_over_grpc: Path,
    undisturbed_digests: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    parties = PartyProcesses(shutil.copytree(sealed_over_grpc, tmp_path / "run"), request)
    wait_until(lambda: parties.count_epochs() >= 2, "that two epochs are trained")
    parties.processes[killed].kill()
    assert parties.processes[killed].wait(LONG_S) == -signal.SIGKILL
    assert parties.count_epochs() < EPOCHS, "it was killed in training"
    parties.processes[killed] = parties.start(killed)
    assert parties.wait_for_digests() == undisturbed_digests
    result = json.loads((parties.base / "bank" / "bank" / "result.json").read_text())
    assert result["sessions"] >= 2
