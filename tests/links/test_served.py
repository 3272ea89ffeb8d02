"""Joint prediction as a service: as good as in training, within limits, and alone after them."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from cryptography import x509

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError, RunStoppedError
from apfed_protocols.psi.interface import IntersectionTooSmallError
from apfed_protocols.psi.lookup import Asker, Holder
from secure_apfed.base.files import load_json, make_private
from secure_apfed.cli import execute
from secure_apfed.config.file import load_config
from secure_apfed.data import load_blocks, load_own_tables
from secure_apfed.errors import CheckpointError, ConfigError, ModelError
from secure_apfed.exchange import Links
from secure_apfed.exchange.certificates import Authority, hash_certificate, make_authority
from secure_apfed.exchange.resumable_link import LinkTransport, Refusal
from secure_apfed.methods.joint_sum import SummedPassive
from secure_apfed.methods.serving import JointPredictor, LimitReachedError
from secure_apfed.organisations import served
from secure_apfed.organisations.local import find_free_addresses, prepare_parties
from secure_apfed.organisations.party import PartyFile, ServeSettings, run_party
from secure_apfed.organisations.revocation import FilesReplacedError, SessionFiles
from secure_apfed.organisations.served import AnswerLog, predict_jointly, serve_party
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.folder import PROJECT_ENDED
from tests.links.trained_parties import (
    MANY,
    NEW,
    ROWS,
    make_config,
    run_together,
    train_parties,
    write_tables,
)
from tests.refusals import list_unrefused
from tests.waiting import wait_until

SESSION = bytes(32)


def test_nobody_begins_again_where_a_party_stopped_for_its_data(tmp_path: Path) -> None:
    strangers = write_tables(tmp_path)["shop"].assign(id=lambda frame: "9" + frame["id"])
    strangers.to_csv(tmp_path / "shop.csv", index=False)
    make_private(tmp_path / "run")
    rules = {"silent_passive": "wait", "patience_s": 600.0, "restarts": 2}
    config = make_config(tmp_path, "split_nn_sum", rules=rules)
    again = list[str]()
    files = prepare_parties(config, tmp_path / "run")
    ended = run_together(
        *(partial(run_party, one, on_restart=again.append) for one in files.values())
    )
    assert {*map(type, ended)} <= {IntersectionTooSmallError, RunStoppedError}
    assert again == []


@pytest.fixture(scope="module", params=["split_nn_sum", "tvfl", "joint_teacher_sum"])
def files_by_party(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Path]:
    return train_parties(tmp_path_factory.mktemp("trained"), request.param)


def predict_once(
    files_by_party: Mapping[str, Path], data: Path, output: Path
) -> tuple[Any, pd.DataFrame]:
    """Predict the people of a file while the others serve one session."""
    helpers = [name for name in files_by_party if name in ("shop", "clinic", "aggregator")]
    calls = [lambda name=name: serve_party(files_by_party[name], sessions=1) for name in helpers]
    said, *served = run_together(
        lambda: predict_jointly(files_by_party["bank"], data, output), *calls
    )
    assert [one for one in (said, *served) if isinstance(one, Exception)] == []
    return said, pd.read_csv(output, dtype={"id": str})


def allowing(
    trained: Mapping[str, Path],
    party: str,
    folder: Path,
    changes: Mapping[str, float] = {},
    /,
    **limits: Any,
) -> dict[str, Path]:
    """The same files, one of which says other limits and patience, and has answered nothing."""
    own = trained[party].parent
    copied = shutil.copytree(trained["new"].parent / "trained" / party, folder / party)
    content = yaml.safe_load((copied / "party.yaml").read_text())
    content |= {
        "config": str((own / content["config"]).resolve()),
        "serve": MANY | limits,
        **changes,
    }
    (copied / "party.yaml").write_text(yaml.safe_dump(content))
    return {**trained, party: copied / "party.yaml"}


@pytest.mark.sampled(every=2)
def test_what_it_says_is_what_the_training_measured(
    files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    said, rows = predict_once(files_by_party, files_by_party["bank.csv"], tmp_path / "out.csv")
    assert (said.jointly, said.alone, said.why) == (ROWS, 0, "")
    file = PartyFile.from_file(files_by_party["bank"])
    config = load_config(file.config)
    result = load_json(file.folder / "result.json", dict[str, Any])
    held = load_own_tables(config.data, "bank", seed=config.seed)
    truth = pd.read_csv(files_by_party["bank.csv"])["y"]
    right = (rows["class"] == truth)[held.test_rows.numpy()].mean()
    name = config.method.name
    together = f"{name}_together" if config.method.can_predict_locally else name
    assert right == pytest.approx(result["accuracy"][together])
    assert (rows["p(no)"] + rows["p(yes)"]).to_numpy() == pytest.approx(1)


def test_whom_a_passive_lacks_the_active_predicts_alone(
    files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    said, rows = predict_once(files_by_party, files_by_party["new"], tmp_path / "out.csv")
    assert (said.jointly, said.alone, said.is_failure) == (NEW - 5, 5, False)
    assert [*rows["by"]] == ["jointly"] * (NEW - 5) + ["alone"] * 5
    alone = load_model(files_by_party["bank"].parent).predict_frame(
        pd.read_csv(files_by_party["new"])
    )
    assert rows["p(yes)"][-5:].to_numpy() == pytest.approx(alone[-5:, 1].numpy())


OWN = """
from torch import nn


def encode(features):
    return nn.Sequential(nn.Linear(features[0], 8), nn.ReLU(), nn.Linear(8, 4))


def score(features, classes):
    return nn.Linear(features[0], classes)
"""


@pytest.mark.parametrize("method", ["split_nn_sum", "joint_teacher_sum"])
def test_networks_of_ones_own_predict_jointly_and_alone(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"nets_of_{method}.py").write_text(OWN)
    names = {"network": f"nets_of_{method}:encode", "head_network": f"nets_of_{method}:score"}
    files = train_parties(tmp_path, method, model={**names, "representation": 4})
    assert names["network"] in files["shop"].read_text()
    said, rows = predict_once(files, files["new"], tmp_path / "out.csv")
    assert (said.jointly, said.alone, said.why) == (NEW - 5, 5, "")
    assert rows["p(yes)"].between(0, 1).all()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
@pytest.mark.parametrize(
    ("limits", "jointly"),
    [({"a_day": NEW}, NEW - 5), ({"in_all": NEW - 6}, 0), ({"lookups_a_day": NEW + 1}, NEW - 5)],
)
def test_a_limit_ends_it_by_name_and_the_active_goes_on_alone(
    limits: dict[str, int], jointly: int, files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    files = allowing(files_by_party, "shop", tmp_path, **limits)
    one, _ = predict_once(files, files_by_party["new"], tmp_path / "one.csv")
    other, rows = predict_once(files, files_by_party["new"], tmp_path / "other.csv")
    assert one.jointly + other.jointly == jointly
    assert len(rows) == NEW
    assert other.is_failure
    (limit,) = limits
    assert f"shop answers no more: the limit serve.{limit}" in (one.why + other.why)


@pytest.mark.sampled(every=3)
def test_who_was_asked_about_as_often_as_allowed_is_left_out_and_nobody_else(
    files_by_party: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = allowing(files_by_party, "shop", tmp_path, a_person=1)
    new = tmp_path / "new.csv"
    rows = pd.read_csv(files_by_party["new"], dtype=str)
    pd.concat([rows[:20], rows[:3], rows[20:]]).to_csv(new, index=False)
    monkeypatch.setattr(
        "secure_apfed.organisations.served.load_blocks", partial(load_blocks, block_row_count=20)
    )
    said, told = predict_once(files, new, tmp_path / "one.csv")
    assert [*told["by"]] == ["jointly"] * 20 + ["alone"] * 3 + ["jointly"] * 15 + ["alone"] * 5
    assert (said.jointly, said.refused, said.alone, said.is_failure) == (NEW - 5, 3, 8, False)
    again, _ = predict_once(files, files_by_party["new"], tmp_path / "other.csv")
    assert (again.refused, again.alone, again.why, again.is_failure) == (NEW - 5, NEW, "", True)


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_answers_that_came_before_a_limit_are_kept(
    files_by_party: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secure_apfed.methods.session.ROWS_AT_ONCE", 64)
    files = allowing(files_by_party, "shop", tmp_path, a_day=150)
    said, rows = predict_once(files, files_by_party["bank.csv"], tmp_path / "out.csv")
    assert (said.jointly, said.alone) == (128, ROWS - 128)
    assert "serve.a_day of its file is 150" in said.why
    whole = predict_once(files_by_party, files_by_party["bank.csv"], tmp_path / "whole.csv")[1]
    jointly = rows["by"] == "jointly"
    assert rows[jointly]["p(yes)"].to_numpy() == pytest.approx(whole[jointly]["p(yes)"].to_numpy())


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_a_passive_that_is_not_there_is_named_and_the_rows_are_predicted_alone(
    files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    def nobody(*_: Any) -> Any:
        raise PartyLeftError("shop did not come")

    said = predict_jointly(
        files_by_party["bank"], files_by_party["new"], tmp_path / "out.csv", connect=nobody
    )
    assert (said.jointly, said.alone, said.why) == (0, NEW, "shop did not come")
    bank = allowing(files_by_party, "bank", tmp_path, {"meet_s": 1})["bank"]
    output = tmp_path / "alone.csv"
    asking = ["--model", bank.parent, "--data", files_by_party["new"], "--jointly", bank]
    assert execute(["predict", *map(str, [*asking, "--output", output])]) == 4
    assert len(pd.read_csv(output)) == NEW
    with pytest.raises(ConfigError, match="shop is not the active"):
        predict_jointly(files_by_party["shop"], files_by_party["new"], tmp_path / "out.csv")
    with pytest.raises(ConfigError, match="bank is the active, which asks"):
        serve_party(files_by_party["bank"], sessions=1)


@pytest.mark.slow
@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_a_passive_that_begins_anew_while_nobody_asks_is_met_again(
    files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    files, told = allowing(files_by_party, "clinic", tmp_path, {"meet_s": 2}), Queue[str]()

    def predict() -> Any:
        assert "clinic has no link to bank" in told.get(timeout=30)
        return predict_jointly(files["bank"], files["new"], tmp_path / "out.csv")

    serving = [
        lambda name=name: serve_party(files[name], sessions=1) for name in ("shop", "aggregator")
    ]
    clinic = partial(serve_party, files["clinic"], sessions=2, on_session=told.put)
    said, *_ = run_together(predict, clinic, *serving)
    assert (said.jointly, said.why) == (NEW - 5, "")


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_a_folder_without_a_kept_model_or_another_ones_is_refused(
    files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    files = allowing(files_by_party, "clinic", tmp_path)
    kept = files["clinic"].parent / "joint.safetensors"
    content = kept.read_bytes()
    assert kept.stat().st_mode & 0o077 == 0
    for bad, said in (
        (b"", "holds no kept model"),
        (content[:-3], "holds no kept model"),
        (content.replace(b"clinic", b"shop12"), "is of shop12, this party is clinic"),
    ):
        kept.write_bytes(bad)
        with pytest.raises(ModelError, match=said):
            serve_party(files["clinic"], sessions=1)
    kept.unlink()
    with pytest.raises(ModelError, match="has finished no training"):
        serve_party(files["clinic"], sessions=1)


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_a_server_that_is_told_to_end_has_ended_well(
    files_by_party: Mapping[str, Path],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request.addfinalizer(partial(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM)))
    monkeypatch.setattr(
        LinkTransport, "meet_peers", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert execute(["serve", "--config", str(files_by_party["shop"])]) == 0
    told = capsys.readouterr().err
    assert "shop: ended; " in told
    assert "bank is expected" in told


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_who_falls_silent_while_it_is_asked_is_told_in_words_of_predictions(
    files_by_party: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = SummedPassive.predict

    async def predict(self: SummedPassive, links: Links, *asked: Any) -> None:
        if links.me != "shop":
            await answers(self, links, *asked)

    monkeypatch.setattr(SummedPassive, "predict", predict)
    files = allowing(files_by_party, "aggregator", tmp_path, {"timeout_s": 1.0})
    said, _ = predict_once(files, files_by_party["new"], tmp_path / "out.csv")
    assert said.why == (
        "prediction: aggregator stopped the run: 'prediction: aggregator expected contribution of "
        "step 0 from shop; nothing came for 1 s'"
    )


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
@pytest.mark.parametrize("name", ["answered.sqlite", "audit.log", "counters.json"])
def test_a_passive_that_lost_its_book_serves_nobody(
    name: str, files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    files = allowing(files_by_party, "shop", tmp_path, a_person=1)
    said, _ = predict_once(files, files_by_party["new"], tmp_path / "one.csv")
    assert said.jointly == NEW - 5
    (files["shop"].parent / name).unlink()
    with pytest.raises(CheckpointError, match="secure-apfed audit-log restart-counter"):
        serve_party(files["shop"], sessions=1)
    assert not (files["shop"].parent / name).exists()


@pytest.mark.parametrize(
    ("people", "a_day", "in_all"),
    [(1, 100, 100), (999, 100, 999), (11_000, 1_100, 11_000), (2_000_000, 200_000, 2_000_000)],
)
def test_limits_that_nobody_set_follow_from_the_table(people: int, a_day: int, in_all: int) -> None:
    limits = ServeSettings().limits_for(people)
    assert (limits.a_day, limits.lookups_a_day, limits.in_all) == (a_day, a_day, in_all)
    assert ServeSettings(a_day=3, in_all=4, lookups_a_day=5).limits_for(people) == ServeSettings(
        a_day=3, in_all=4, lookups_a_day=5
    )


@pytest.mark.parametrize("limit", ["lookups_a_day", "a_day", "in_all"])
def test_a_book_without_limits_refuses_the_whole_table_in_a_day(limit: str, tmp_path: Path) -> None:
    book = AnswerLog(tmp_path / "book", "shop", ServeSettings(), person_count=5_000)
    people = [f"{number}".encode() for number in range(501)]
    if limit == "lookups_a_day":
        book.count_lookups(500)
        with pytest.raises(LimitReachedError, match=r"serve\.lookups_a_day of its file is 500"):
            book.count_lookups(1)
        return
    if limit == "a_day":
        with pytest.raises(LimitReachedError, match=r"serve\.a_day of its file is 500"):
            book.count_answers(people, None)
        return
    book = AnswerLog(tmp_path / "all", "shop", ServeSettings(a_day=9_999), person_count=300)
    with pytest.raises(LimitReachedError, match=r"serve\.in_all of its file is 300"):
        book.count_answers(people, None)


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
@pytest.mark.parametrize("party", ["shop", "bank"])
def test_where_overlaps_are_hidden_nobody_serves_or_asks(
    party: str, files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    """A lookup tells the active which of its people a passive knows."""
    file = allowing(files_by_party, party, tmp_path)[party]
    config = yaml.safe_load(Path(yaml.safe_load(file.read_text())["config"]).read_text())
    config["alignment"] = {"dealer": True, "pairwise_overlaps": "hidden"}
    (tmp_path / "hidden.yaml").write_text(yaml.safe_dump(config))
    settings = yaml.safe_load(file.read_text()) | {"config": str(tmp_path / "hidden.yaml")}
    file.write_text(yaml.safe_dump(settings))
    asks = partial(predict_jointly, file, files_by_party["new"], tmp_path / "out.csv")
    begin = partial(serve_party, file, sessions=1) if party == "shop" else asks
    with pytest.raises(ConfigError, match="pairwise_overlaps is hidden, and joint prediction"):
        begin()


def test_a_book_counts_over_sessions_by_day_and_takes_back_what_is_refused(tmp_path: Path) -> None:
    day = ["2026-01-01"]

    def book(**limits: Any) -> AnswerLog:
        return AnswerLog(
            tmp_path / "book",
            "shop",
            ServeSettings(**limits),
            person_count=1000,
            epsilon_budget=2.0,
            get_today=lambda: day[0],
        )

    book(a_day=3).count_answers([b"ann", b"bob"], None)
    with pytest.raises(LimitReachedError, match=r"serve\.a_day of its file is 3, and .* be 4"):
        book(a_day=3).count_answers([b"ann", b"bob"], None)
    book(a_day=3).count_answers([b"ann"], None)
    day[0] = "2026-01-02"
    with pytest.raises(LimitReachedError, match=r"serve\.a_person of its file is 2"):
        book(a_day=3, a_person=2).count_answers([b"eve", b"ann"], None)
    with pytest.raises(LimitReachedError, match=r"serve\.epsilon of its file is 2"):
        book().count_answers([b"bob", b"ann"], float)
    book().count_answers([b"bob"], float)
    assert (tmp_path / "book").stat().st_mode & 0o077 == 0
    assert b"ann" not in (tmp_path / "book").read_bytes()
    (tmp_path / "book").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="is no book of answers"):
        book()
    (tmp_path / "link").symlink_to(tmp_path / "book")
    with pytest.raises(CheckpointError, match="link"):
        AnswerLog(tmp_path / "link", "shop", ServeSettings(), person_count=9)


def test_a_lookup_tells_who_is_there_and_refuses_what_is_no_list_of_ids() -> None:
    ids = [b"ann", b"bob", b"eve"]
    holder = Holder(ids, session=SESSION)
    asker = Asker(holder.blinded_ids, holder="shop", session=SESSION, max_ids=3)
    question = asker.ask([b"eve", b"zoe", b"ann"])
    places = asker.parse_answer(holder.answer(question, sender="bank", max_ids=3), 3)
    assert [ids[holder.published_rows[place]] if place >= 0 else None for place in places] == [
        b"eve",
        None,
        b"ann",
    ]
    with pytest.raises(RemoteProtocolError, match="at most 2 are answered"):
        holder.answer(question, sender="bank", max_ids=2)
    with pytest.raises(RemoteProtocolError, match="blinded ID"):
        holder.answer(question[:32] * 2, sender="bank", max_ids=3)
    with pytest.raises(RemoteProtocolError, match="more than the 2 agreed"):
        Asker(holder.blinded_ids, holder="shop", session=SESSION, max_ids=2)
    said = "different tags for 3 blinded IDs"
    cases = [(said, tags, 3) for tags in (b"", bytes(48), bytes(47))]
    assert list_unrefused(RemoteProtocolError, asker.parse_answer, cases) == []


NOISES = {
    "tvfl": {"guard": {"mechanism": "gaussian", "epsilon": 8.0}},
    "split_nn_sum": {
        "secure_sum": {
            "scheme": "plain",
            "masks": "pairwise",
            "clip": 4.0,
            "noise": {"epsilon": 8.0},
        },
    },
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", NOISES)
def test_under_noise_one_persons_answers_stay_within_the_runs_epsilon(
    method: str, tmp_path: Path
) -> None:
    trained = train_parties(tmp_path, method, **NOISES[method])
    said = [predict_once(trained, trained["new"], tmp_path / f"{turn}.csv")[0] for turn in range(6)]
    answered = [one.jointly for one in said]
    assert set(answered) == {NEW - 5, 0}
    assert answered == sorted(answered, reverse=True)
    assert [one.refused for one in said] == [0 if one.jointly else NEW - 5 for one in said]
    assert {one.why for one in said} == {""}


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_a_sum_of_one_person_here_and_another_there_opens_to_nobody(
    files_by_party: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = JointPredictor._request_positions

    async def shift_positions(self: JointPredictor, ids: Any) -> Any:
        places = await looked_up(self, ids)
        return np.stack([places[0], np.roll(places[1], 1)])

    monkeypatch.setattr(JointPredictor, "_request_positions", shift_positions)
    said, rows = predict_once(files_by_party, files_by_party["bank.csv"], tmp_path / "out.csv")
    assert (said.jointly, said.alone) == (0, ROWS)
    assert "aggregator" in said.why
    assert set(rows["by"]) == {"alone"}


def show_certificate(folder: Path, authority: Authority) -> str:
    """Put a new certificate into a party's folder; return by what a list names it."""
    made = authority.issue_certificate(folder.name)
    for kind, content in (
        ("ca", made.ca),
        ("certificate", made.certificate),
        ("key", made.key),
    ):
        # As `certs accept` does: nobody reads half a file.
        (folder / f"new-{kind}").write_bytes(content)
        (folder / f"new-{kind}").replace(folder / f"{kind}.pem")
    return hash_certificate(x509.load_pem_x509_certificate(made.certificate))


class OverTls:
    """Copies of those who trained, who serve over gRPC with certificates of one authority.

    Attributes:
        marks: by party what a list names its first certificate.
        told: by party what it said between sessions.
    """

    def __init__(self, files_by_party: Mapping[str, Path], folder: Path) -> None:
        self.authority = make_authority()
        self.folder = folder
        names = [name for name in files_by_party if "." not in name and name != "new"]
        self.helpers = [name for name in names if name != "bank"]
        addresses = dict(zip(names, find_free_addresses(len(names)), strict=True))
        self.marks: dict[str, str] = {}
        self.told: dict[str, Queue[str]] = {name: Queue() for name in names}
        self.over = Event()
        for name in names:
            file = allowing(files_by_party, name, folder)[name]
            content = yaml.safe_load(file.read_text())
            for peer, how in content["peers"].items():
                how["address"] = addresses[peer]
            tls = {kind: f"{kind}.pem" for kind in ("ca", "certificate", "key")}
            content |= {
                "link": "grpc",
                "listen": addresses[name],
                "tls": tls | {"revoked": "revoked.txt"},
            }
            file.write_text(yaml.safe_dump(content))
            (file.parent / "revoked.txt").write_text("")
            self.marks[name] = show_certificate(file.parent, self.authority)

    def serve(self, name: str) -> None:
        """Serve until the test is over."""

        def say(how: str) -> None:
            self.told[name].put(how)
            if self.over.is_set():
                raise InterruptedError

        serve_party(self.folder / name / "party.yaml", on_session=say)

    def revoke(self, name: str) -> None:
        """Let the lists of all others name the first certificate of a party."""
        for other in self.told.keys() - {name}:
            listed = self.folder / other / "new-revoked"
            listed.write_text(f"{self.marks[name]}\n")
            listed.replace(self.folder / other / "revoked.txt")

    def wait_for(self, name: str, said: str) -> None:
        """Wait until a party says this between sessions."""
        told = self.told[name].queue
        wait_until(lambda: any(each.startswith(said) for each in [*told]), f"{name}: {said}")

    def end(self) -> None:
        self.over.set()
        for name in self.helpers:
            (self.folder / name / "revoked.txt").write_text("# over\n")


@pytest.mark.slow
@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_who_shows_a_revoked_certificate_is_named_and_serves_again_once_it_has_another(
    files_by_party: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prediction is lost to a certificate that was replaced while its party serves."""
    monkeypatch.setattr(served, "_MAX_REFUSAL_S", 0.5)
    here = OverTls(files_by_party, tmp_path)
    output = tmp_path / "out.csv"

    def ask() -> list[Any]:
        try:
            bank = here.folder / "bank" / "party.yaml"
            lost = predict_jointly(bank, files_by_party["new"], output)
            here.revoke("shop")
            unable = predict_jointly(bank, files_by_party["new"], output)
            show_certificate(here.folder / "shop", here.authority)
            here.wait_for("shop", "nothing to do: shop begins its session anew")
            return [lost, unable, predict_jointly(bank, files_by_party["new"], output)]
        finally:
            here.end()

    (first, unable, again), *ended = run_together(
        ask, *(partial(here.serve, name) for name in here.helpers)
    )
    assert {*map(type, ended)} == {InterruptedError}
    assert (first.jointly, first.why) == (NEW - 5, "")
    assert (unable.jointly, unable.alone) == (0, NEW)
    assert unable.why.startswith("prediction: bank has no link to shop: ")
    assert "the certificate of shop is revoked; shop has another one made" in unable.why
    assert (again.jointly, again.why) == (NEW - 5, "")
    said = {name: [*told.queue] for name, told in here.told.items()}
    anew = "nothing to do: {} begins its session anew, for {} was replaced"
    # A session that ended just then reads the new list when the next one begins.
    assert {anew.format("clinic", "revoked.txt"), "a session ended"} & {*said["clinic"]}
    assert any(each.startswith("nothing to do: shop begins its session") for each in said["shop"])


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_who_serves_asks_while_it_waits_whether_its_files_are_the_same(
    files_by_party: Mapping[str, Path], tmp_path: Path
) -> None:
    path = allowing(files_by_party, "shop", tmp_path)["shop"]
    sessions, said = list[str](), list[str]()

    def meet(file: PartyFile, identity: Any, known: Any, told: Any) -> Any:
        sessions.append(file.party)
        if len(sessions) < 3:
            told({"bank": ""})
            content = yaml.safe_load(path.read_text()) | {"serve": MANY, "meet_s": len(sessions)}
            path.write_text(yaml.safe_dump(content))
            told({"bank": ""})
            raise AssertionError("it went on")
        raise PartyLeftError("bank did not come")

    serve_party(path, sessions=1, connect=meet, on_session=said.append)
    anew = "nothing to do: shop begins its session anew, for party.yaml was replaced"
    assert said == [anew, anew, "a session broke off: bank did not come"]


@pytest.mark.parametrize("files_by_party", ["split_nn_sum"], indirect=True)
def test_who_predicts_is_told_at_once_of_a_refusal(
    files_by_party: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "_MAX_REFUSAL_S", 0.0)

    def meet(file: PartyFile, identity: Any, known: Any, told: Any) -> Any:
        told({"shop": "the relay is not reached", "clinic": ""})
        told({"shop": Refusal("the certificate of shop is revoked"), "clinic": ""})
        raise AssertionError("it waits")

    said = predict_jointly(
        files_by_party["bank"], files_by_party["new"], tmp_path / "out.csv", connect=meet
    )
    why = "prediction: bank has no link to shop: the certificate of shop is revoked; ask again"
    assert (said.jointly, said.alone, said.is_failure) == (0, NEW, True)
    assert said.why.startswith(why)


class Waiting:
    """What a session was begun with, in a folder where everything is of one moment."""

    def __init__(self, folder: Path) -> None:
        self.home = folder
        self.said: list[str] = []
        self.authority = make_authority()
        show_certificate(folder, self.authority)
        for name in ("revoked.txt", "sealed.json", "run.yaml"):
            (folder / name).write_text("")
        kinds = {kind: str(folder / f"{kind}.pem") for kind in ("ca", "certificate", "key")}
        content = {
            "party": folder.name,
            "active": "bank",
            "passives": ["shop", "clinic"],
            "config": "run.yaml",
            "peers": {"bank": {"identity": "ab" * 32}, "clinic": {"identity": "cd" * 32}},
            "tls": kinds | {"revoked": str(folder / "revoked.txt")},
        }
        path = folder / "party.yaml"
        for written in (path, folder / "whole.yaml"):
            written.write_text(yaml.safe_dump(content))
        file = PartyFile.from_file(path)
        ended = folder / PROJECT_ENDED
        self.begun_with = SessionFiles(path, file, ended, show_line=self.said.append)


@pytest.fixture
def waiting(tmp_path: Path) -> Waiting:
    (tmp_path / "shop").mkdir()
    return Waiting(tmp_path / "shop")


REPLACED: dict[str, Callable[[Waiting], object]] = {
    "ca.pem, certificate.pem, key.pem": lambda here: show_certificate(here.home, here.authority),
    "revoked.txt": lambda here: (here.home / "revoked.txt").write_text("ab" * 32),
    "renewed-clinic.json": lambda here: (here.home / "renewed-clinic.json").write_text("{}"),
    "sealed.json": lambda here: (here.home / "sealed.json").write_text("{}"),
    "project-ended.json": lambda here: (here.home / PROJECT_ENDED).write_text("{}"),
    "party.yaml": lambda here: (here.home / "party.yaml").write_text(
        (here.home / "whole.yaml").read_text() + "reconnect_s: 9\n"
    ),
}


def show_of_another_authority(here: Waiting) -> None:
    show_certificate(here.home, make_authority())
    (here.home / "ca.pem").write_bytes(here.authority.certificate)


UNUSABLE: dict[str, tuple[Callable[[Waiting], object], str]] = {
    "a certificate without its key": (
        lambda here: (here.home / "key.pem").write_bytes(make_authority().key),
        "key.pem was replaced and cannot be used: tls.key: .* is not the key of",
    ),
    "another authority's": (
        show_of_another_authority,
        "cannot be used: tls.certificate: .* is of another authority",
    ),
    "no certificate": (
        lambda here: (here.home / "certificate.pem").unlink(),
        "certificate.pem was replaced and cannot be used: .*certificate",
    ),
    "its own list names it": (
        lambda here: (here.home / "revoked.txt").write_text(mark_of(here.home)),
        "revoked.txt was replaced and cannot be used: .* is revoked; have another one made",
    ),
    "a list that is none": (
        lambda here: (here.home / "revoked.txt").write_text("not hex"),
        "revoked.txt, line 1: expected",
    ),
    "half a file": (
        lambda here: (here.home / "party.yaml").write_text("party: shop\n"),
        "party.yaml was replaced and cannot be used",
    ),
}


def mark_of(folder: Path) -> str:
    pem = (folder / "certificate.pem").read_bytes()
    return hash_certificate(x509.load_pem_x509_certificate(pem))


@pytest.mark.parametrize("names", REPLACED)
def test_a_session_that_waits_begins_anew_where_a_file_of_it_is_replaced(
    names: str, waiting: Waiting
) -> None:
    waiting.begun_with.require_same({})
    REPLACED[names](waiting)
    with pytest.raises(FilesReplacedError, match="nothing to do: shop begins its session anew"):
        waiting.begun_with.require_same({})
    with pytest.raises(FilesReplacedError, match=f"for {re.escape(names)} was replaced$"):
        waiting.begun_with.require_same({})
    assert waiting.said == []


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_session_that_waits_goes_on_where_what_replaced_a_file_cannot_be_used(
    case: str, waiting: Waiting
) -> None:
    harm, said = UNUSABLE[case]
    harm(waiting)
    for _ in range(3):
        waiting.begun_with.require_same({})
    assert len(waiting.said) == 1, "told once"
    assert waiting.said[0].startswith("shop goes on with what it began with, for ")
    assert re.search(said, waiting.said[0])
    (waiting.home / "revoked.txt").write_text("")
    show_certificate(waiting.home, waiting.authority)
    (waiting.home / "party.yaml").write_text((waiting.home / "whole.yaml").read_text())
    with pytest.raises(FilesReplacedError):
        waiting.begun_with.require_same({})


def test_a_prediction_waits_for_who_is_silent_and_not_for_who_is_refused() -> None:
    now = [100.0]
    refusals = served._Refusals("bank", lambda: now[0])
    why = Refusal("the certificate of shop is revoked")
    for missing in ({"shop": "the relay is not reached"}, {"shop": "", "clinic": ""}):
        refusals.require_brief(missing)
        now[0] += 60
        refusals.require_brief(missing)
    refusals.require_brief({"shop": why, "clinic": ""})
    now[0] += served._MAX_REFUSAL_S / 2
    refusals.require_brief({"clinic": ""})  # it came with another one
    now[0] += served._MAX_REFUSAL_S
    refusals.require_brief({"shop": why})
    now[0] += served._MAX_REFUSAL_S
    with pytest.raises(PartyLeftError, match=f"no link to shop: {why}; ask again once") as told:
        refusals.require_brief({"shop": why, "clinic": ""})
    assert told.value.missing_parties == ("shop",)
