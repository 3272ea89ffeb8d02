"""Parties apart and memory give the same models, for every method and every secure sum."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.config import Config
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.run import LinkType, run
from tests.links.pair import Proxy
from tests.local import processes
from tests.secure_apfed.small_runs import Said, small_config
from tests.with_crypten import pair_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
]

SHORT = {"epochs": 2, "batch_size": 128, "learning_rate": 0.05, "device": "cpu"}
OPEN = {"mechanism": "none", "noise": "reproducible_insecure"}
FEW = {"data": {"dataset": "breast_cancer", "labelled": 40}}
SEQUENCES: dict[str, Any] = {
    "data": {"dataset": "synthetic_keystrokes", "rows": 40},
    "model": {"network": "gru", "sequences": [[100, 4]], "representation": 3},
}
NOISED: dict[str, Any] = {"epsilon": 4.0, "prior": "ridge"}
DEALT = {"alignment": {"protocol": "circuit"}}
NOISE = {"scheme": "plain", "masks": "pairwise", "clip": 0.5, "noise": {"sigma": 0.1}}
CASES: dict[str, tuple[Said, dict[str, Any]]] = {
    **{name: ("apfed_c", {"secure_sum": pair_of(name)}) for name in SECURE_SUMS},
    "apfed_r": ("apfed_r", {}),
    "mixed": ("apfed", {}),
    "tvfl": ("tvfl", {}),
    "alone": ("single_view", {}),
    "dealt": ("apfed_c", DEALT),
    "pair by pair": (
        "apfed_c",
        {
            "alignment": {"mode": "pairwise"},
            "secure_sum": {"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
        },
    ),
    "guarded": ("apfed_c", {"guard": small_config().guard.model_dump()}),
    "noise under the sum": ("apfed_c", {"secure_sum": NOISE}),
    "private training": ("apfed_c", {"dp_sgd": {"clip": 0.5, "noise_multiplier": 2.0}}),
    "votes": ("votes", FEW),
    "votes, noised": (NOISED | {"name": "votes"}, FEW),
    "votes, randomised": (NOISED | {"name": "votes_randomised"}, FEW),
    "votes, encrypted": (NOISED | {"name": "votes_encrypted", "candidates": 3}, FEW),
    "votes, encrypted, dealt": ({"name": "votes_encrypted", "prior": "ridge"}, FEW | DEALT),
    "decomposed": ("vfedtrans", {}),
    "decomposed, dealt": ("vfedtrans", DEALT),
    "sequences": ({"name": "v_fedmv", "rounds": 1}, SEQUENCES),
    "label stages": ("apfed_c", {"labels": {"mechanism": "lp_mst", "epsilon": 1.0}}),
}


def same_models(parties: processes.Parties, memory: Path) -> None:
    run(parties.config, memory)
    processes.require_no_failure(parties.play())
    assert processes.model_digests(parties.run.path) == processes.model_digests(memory)


FAST = ("bfv", "mixed", "pair by pair", "votes, noised", "votes, encrypted, dealt", "decomposed")
PLAYED = [
    *(
        pytest.param(case, "tcp", marks=[] if case in FAST else pytest.mark.slow, id=case)
        for case in CASES
    ),
    *(
        pytest.param(case, over, marks=pytest.mark.slow, id=f"{case} over {over}")
        for case in ("tvfl", "votes, encrypted", "decomposed", "ckks")
        for over in ("grpc", "relay")
    ),
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("case", "way"), PLAYED)
def test_the_same_models_in_one_process_and_in_many(
    case: str, way: LinkType, tmp_path: Path
) -> None:
    method, changes = CASES[case]
    config = small_config(method, **{"train": SHORT, "guard": OPEN, **changes})
    same_models(processes.Parties(config, tmp_path / "apart", way=way), tmp_path / "memory")
    whole = json.loads((tmp_path / "memory" / "result.json").read_bytes())
    active = tmp_path / "apart" / "parties" / config.data.active_name
    result = json.loads((active / "result.json").read_bytes())
    assert result["accuracy"] == whole["accuracy"]
    # Apart nobody is told how many columns another has, and so of how many the opened numbers are.
    for told in (result["sum"], whole["sum"]):
        told.pop("opened", None)
    assert result["sum"] == whole["sum"]
    if config.method.can_predict_locally:
        assert load_model(active).classes == load_model(tmp_path / "memory").classes


@pytest.mark.slow
def test_secret_seeds_give_other_models_each_time(tmp_path: Path) -> None:
    config = small_config(party_seeds="secret")
    digests = []
    for name in ("one", "other"):
        run(config, tmp_path / name)
        digests.append(processes.model_digests(tmp_path / name))
    assert not set(digests[0].values()) & (set(digests[1].values()) - {digests[1]["aggregator"]})


AT_ONCE = ("split_nn_sum", "h_fedmv", "mmvfl")
HELPED = [name for name, method in METHODS.items() if method.settings.has_passives]


def config_for(method: str) -> Config:
    if METHODS[method].settings.vote_protocol:
        few = {"dataset": "breast_cancer", "labelled": 40}
        config = small_config({"name": method, "prior": "labeller"}, data=few)
    else:
        config = small_config(method)
    train = config.train.model_copy(update={"epochs": 2, "batch_size": 128})
    return config.model_copy(update={"train": train})


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in AT_ONCE else pytest.mark.slow) for m in HELPED]
)
@pytest.mark.parametrize("harmed", ["active", "passive-1"])
@pytest.mark.sampled(every=8)
def test_who_is_killed_at_a_checkpoint_resumes_the_same(
    harmed: str, method: str, tmp_path: Path
) -> None:
    config = config_for(method)
    run(config, tmp_path / "memory")
    parties = processes.Parties(config, tmp_path / "run")
    # The active dies where some have saved that step, a passive where it alone has.
    kind, at = (Kind.CHECKPOINT, 1) if harmed == "active" else (Kind.SAVED, 0)
    processes.the_others_say_who_and_when(parties.play({harmed: processes.Harm(kind, at)}), harmed)
    said = parties.play(resume=True)
    processes.require_no_failure(said)
    assert processes.model_digests(parties.run.path) == processes.model_digests(tmp_path / "memory")


class Proxied(processes.Parties):
    """Each party that listens is reached through a proxy of its own."""

    gone_after_s = 30.0
    proxies: Mapping[str, Proxy] = {}
    cut_after: tuple[int, ...] = ()

    def prepare_files(self, files: Mapping[str, Path]) -> None:
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
    config = small_config("apfed_c", guard=OPEN, train={**SHORT, "epochs": 4, "batch_size": 64})
    parties = Proxied(config, tmp_path / "cut", way=request.param, timeout_s=30)
    yield parties
    for proxy in parties.proxies.values():
        proxy.close()


@pytest.mark.sampled(every=2)
def test_connections_that_are_cut_change_nothing(proxied: Proxied, tmp_path: Path) -> None:
    proxied.cut_after = (20_000, 50_000, 80_000, 110_000)
    same_models(proxied, tmp_path / "memory")
    assert max(proxy.cuts for proxy in proxied.proxies.values()) == 4
