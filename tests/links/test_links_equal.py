"""Runs between machines give the models of one process, also where connections break."""

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.exchange import Kind
from secure_apfed.runs import run
from secure_apfed.runs.trial_links import Way
from tests.links.proxies import Proxy
from tests.local.processes import Harm, Parties, model_digests
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")

SHORT = {"epochs": 2, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
FEW = {"data": {"dataset": "breast_cancer", "labelled": 40}}
OPEN = {"guard": {"mechanism": "none", "noise": "reproducible_insecure"}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "masks": ("apfed_c", OPEN),
    "votes": ("votes", {**OPEN, **FEW}),
    "sum of representations": ("split_nn_sum", {}),
    "averaged": ("h_fedmv", {}),
    "ckks": ("apfed_c", {**OPEN, "secure_sum": {"scheme": "ckks", "masks": "none"}}),
}


def same_models(parties: Parties, folder: Path) -> None:
    run(parties.config, folder)
    said = parties.play()
    assert not {name: one for name, one in said.items() if one["kind"]}
    assert model_digests(parties.run.path) == model_digests(folder)


def parties_of(case: str, folder: Path, over: Way) -> Parties:
    method, changes = CASES[case]
    return Parties(small_config(method, **{"train": SHORT, **changes}), folder, over=over)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["grpc", "relay"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_models_in_one_process_and_between_machines(
    case: str, over: Way, tmp_path: Path
) -> None:
    same_models(parties_of(case, tmp_path / over, over), tmp_path / "memory")


class Impatient(Parties):
    """Parties that give up soon on one that is gone."""

    def prepared(self, files: Mapping[str, Path]) -> None:
        for file in files.values():
            file.write_text(file.read_text().replace("reconnect_s: 30.0", "reconnect_s: 3.0"))


@pytest.mark.slow
@pytest.mark.parametrize("over", ["grpc", "relay"])
def test_a_party_that_is_killed_is_named_and_the_run_resumes(over: Way, tmp_path: Path) -> None:
    config = small_config("apfed_c", **OPEN, train={**SHORT, "epochs": 3})
    run(config, tmp_path / "memory")
    parties = Impatient(config, tmp_path / over, over=over, timeout_s=20)
    began = time.monotonic()
    said = parties.play({"passive-1": Harm(Kind.CONTRIBUTION, at=5)}, within_s=40)
    assert time.monotonic() - began < 40
    assert set(said) == {"active", "aggregator", "passive-2"}
    assert all(one["kind"] in ("PartyLeftError", "RunStoppedError") for one in said.values())
    reasons = [one["message"] for one in said.values()]
    assert any("the link to passive-1 was broken for 3 s" in reason for reason in reasons)
    assert all("passive-1" in reason for reason in reasons)
    said = parties.play(resume=True)
    assert not {name: one for name, one in said.items() if one["kind"]}
    assert model_digests(tmp_path / over) == model_digests(tmp_path / "memory")


class Proxied(Parties):
    """Each party that listens is reached through a proxy of its own."""

    proxies: Mapping[str, Proxy] = {}
    cut_after: tuple[int, ...] = ()

    def prepared(self, files: Mapping[str, Path]) -> None:
        texts = {name: file.read_text() for name, file in files.items()}
        ports = {
            name: int(found[1])
            for name, text in texts.items()
            if (found := re.search(r"^listen: .*:(\d+)$", text, re.MULTILINE))
        }
        self.proxies = {name: Proxy(port, cut_after=self.cut_after) for name, port in ports.items()}
        for name, file in files.items():
            text = texts[name]
            for peer, proxy in self.proxies.items():
                if peer != name:
                    text = text.replace(f"127.0.0.1:{ports[peer]}", f"127.0.0.1:{proxy.port}")
            file.write_text(text)


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Proxied]:
    config = small_config("apfed_c", **OPEN, train={**SHORT, "epochs": 4, "batch_size": 64})
    parties = Proxied(config, tmp_path / "cut", over="grpc", timeout_s=30)
    yield parties
    for proxy in parties.proxies.values():
        proxy.close()


def test_connections_that_are_cut_change_nothing(proxied: Proxied, tmp_path: Path) -> None:
    proxied.cut_after = (20_000, 50_000, 80_000, 110_000)
    same_models(proxied, tmp_path / "memory")
    assert max(proxy.cuts for proxy in proxied.proxies.values()) == 4


@pytest.mark.slow
def test_a_partition_of_five_seconds_changes_nothing(proxied: Proxied, tmp_path: Path) -> None:
    run(proxied.config, tmp_path / "memory")
    with proxied.started():
        await_bytes(proxied)
        for proxy in proxied.proxies.values():
            proxy.part(5.0)
        for process in proxied.processes.values():
            process.join(60)
            assert not process.is_alive()
    assert model_digests(proxied.run.path) == model_digests(tmp_path / "memory")


def await_bytes(proxied: Proxied) -> None:
    """Until the training is under way."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if sum(len(proxy.carried) for proxy in proxied.proxies.values()) > 150_000:
            return
        time.sleep(0.02)
    raise AssertionError("nothing was sent")
