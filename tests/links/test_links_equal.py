"""Runs between machines give the models of one process, also where connections break."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from secure_apfed.config import Config
from secure_apfed.methods import METHODS
from secure_apfed.runs.local import Way
from secure_apfed.runs.run import run
from tests.links.proxies import Proxy
from tests.local.processes import Parties, model_digests, nobody_failed
from tests.local.test_local_equal import SUMS
from tests.local.test_local_methods import config_of as config_of_method
from tests.secure_apfed.small_runs import small_config
from tests.waiting import LONG_S, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    pytest.mark.filterwarnings("ignore::secure_apfed.errors.NoHelpWarning"),
]

SHORT = {"epochs": 2, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
OPEN = {"guard": {"mechanism": "none", "noise": "reproducible_insecure"}}


def config_of(case: str) -> Config:
    """Of a method, or of a secure sum of the table."""
    if case in METHODS:
        return config_of_method(case)
    return small_config("apfed_c", train=SHORT, **OPEN, **SUMS[case])


# Of all methods and sums `tests/local` says so over the same links between processes.
CASES = ("split_nn_sum", "votes_encrypted", "vfedtrans", "ckks")


def same_models(parties: Parties, folder: Path) -> None:
    run(parties.config, folder)
    nobody_failed(parties.play())
    assert model_digests(parties.run.path) == model_digests(folder)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["grpc", "relay"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_models_in_one_process_and_between_machines(
    case: str, over: Way, tmp_path: Path
) -> None:
    same_models(Parties(config_of(case), tmp_path / over, over=over), tmp_path / "memory")


class Proxied(Parties):
    """Each party that listens is reached through a proxy of its own."""

    gone_after_s = 30.0
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


@pytest.fixture(params=["grpc", "tcp"])
def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxied]:
    config = small_config("apfed_c", **OPEN, train={**SHORT, "epochs": 4, "batch_size": 64})
    parties = Proxied(config, tmp_path / "cut", over=request.param, timeout_s=30)
    yield parties
    for proxy in parties.proxies.values():
        proxy.close()


def test_connections_that_are_cut_change_nothing(proxied: Proxied, tmp_path: Path) -> None:
    proxied.cut_after = (20_000, 50_000, 80_000, 110_000)
    same_models(proxied, tmp_path / "memory")
    assert max(proxy.cuts for proxy in proxied.proxies.values()) == 4


@pytest.mark.slow
def test_a_partition_of_six_seconds_changes_nothing(proxied: Proxied, tmp_path: Path) -> None:
    run(proxied.config, tmp_path / "memory")
    with proxied.started():
        await_bytes(proxied)
        for proxy in proxied.proxies.values():
            proxy.part(6.0)
        for process in proxied.processes.values():
            process.join(LONG_S)
            assert not process.is_alive()
    assert model_digests(proxied.run.path) == model_digests(tmp_path / "memory")


def await_bytes(proxied: Proxied) -> None:
    """Until the training is under way."""
    wait_until(
        lambda: sum(len(proxy.carried) for proxy in proxied.proxies.values()) > 150_000,
        "that something was sent",
    )
