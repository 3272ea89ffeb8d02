"""What the others really receive: the noise that the account claims, as often as it counts.

Guards, ledgers and accountants have tests of their own. These read the recorded messages of
whole runs, so that a party that forgets to ask its guard or its ledger is found out.
"""

import math
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.exchange import Kind, TensorSpec, unpack
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

EPOCHS, D, CLIP, SIGMA = 3, 4, 1e-3, 1.0
each_run = pytest.mark.parametrize(
    ("method", "mechanism"), list(product(("apfed_c", "tvfl"), ("gaussian", "frozen_gaussian")))
)


def config_of(method: str, mechanism: str) -> Config:
    settings: dict[str, Any] = {
        "name": "test",
        "method": method,
        "data": {"dataset": "breast_cancer", "overlap": 0.8, "limit": 200},
        "model": {"hidden": [8], "representation": D, "projection": D},
        "train": {
            "epochs": EPOCHS, "batch_size": 64, "learning_rate": 1e-4, "max_gradient_norm": 1.0,
            "device": "cpu",
        },
        "secure_sum": {"scheme": "plain"},
        "guard": {"mechanism": mechanism, "clip": CLIP, "sigma": SIGMA},
        "transcript": {"keep": "all"},
    }  # fmt: skip
    return Config.model_validate(settings)


@cache
def played(method: str, mechanism: str, run_number: int = 0) -> RunResult:
    """A run whose clip is so small beside its noise that noise is all that can be seen."""
    del run_number  # names one of several runs that are alike
    return run(config_of(method, mechanism), None)


def received(result: RunResult) -> dict[tuple[str, str], list[tuple[int, Tensor, Tensor]]]:
    """By sender and receiver: step, rows and representations of every message, in order."""
    expected = {
        "rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float32, (None, D)),
    }  # fmt: skip
    found: dict[tuple[str, str], list[tuple[int, Tensor, Tensor]]] = {}
    for envelopes in result.recording.transcript.kept.values():
        for one in envelopes:
            if one.kind is Kind.REPRESENTATIONS:
                tensors, _ = unpack(one.payload, expected, sender=one.sender)
                message = (one.step, tensors["rows"], tensors["z"])
                found.setdefault((one.sender, one.receiver), []).append(message)
    return found


def scale_fits(noise: Tensor, sigma: float) -> bool:
    """Whether the squares add up to what `sigma` would give, within five deviations."""
    values = noise.double().flatten()
    chi = float((values**2).sum()) / sigma**2
    return abs(chi - len(values)) < 5 * math.sqrt(2 * len(values))


@each_run
def test_every_message_carries_the_noise_that_is_charged(method: str, mechanism: str) -> None:
    result = played(method, mechanism)
    links = received(result)
    assert len(links) == 2
    for messages in links.values():
        first: dict[int, Tensor] = {}
        for _, rows_B, z_BD in messages:
            for row, z_D in zip(rows_B.tolist(), z_BD, strict=True):
                first.setdefault(row, z_D)
        noises = [torch.stack([*first.values()])]
        if mechanism == "gaussian":
            noises += [z_BD for _, _, z_BD in messages]
        for noise_BD in noises:
            assert scale_fits(noise_BD, SIGMA)
        every = torch.cat(noises)
        assert not scale_fits(every, SIGMA * 2 / 3)
        assert not scale_fits(every, SIGMA * 3 / 2)


@each_run
def test_the_account_counts_what_was_received(method: str, mechanism: str) -> None:
    """T is read off the messages: the different releases of the row that was sent most often."""
    result = played(method, mechanism)
    for messages in received(result).values():
        different: dict[int, set[bytes]] = {}
        sent: Counter[int] = Counter()
        for _, rows_B, z_BD in messages:
            for row, z_D in zip(rows_B.tolist(), z_BD, strict=True):
                different.setdefault(row, set()).add(z_D.numpy().tobytes())
                sent[row] += 1
        most = max(len(releases) for releases in different.values())
        assert result.privacy.releases == most == (EPOCHS if mechanism == "gaussian" else 1)
        assert max(sent.values()) == EPOCHS
        # Joint inference on test rows is a release, too.
        tested = method == "tvfl"
        assert (min(sent.values()) == 1) is tested


def test_all_passives_of_apfed_receive_the_same_bytes() -> None:
    """Two noises for one release would be two releases, of which one is counted."""
    one, other = received(played("apfed_c", "gaussian")).values()
    for (step, rows_B, z_BD), (_, other_B, other_BD) in zip(one, other, strict=True):
        assert torch.equal(rows_B, other_B), step
        assert torch.equal(z_BD, other_BD), step


def test_two_runs_alike_share_no_noise() -> None:
    """Secret noise has a fresh key in every run, also where the seed is the same."""
    first, second = (
        torch.cat([z_BD for _, _, z_BD in next(iter(received(result).values()))])
        for result in (played("apfed_c", "gaussian"), played("apfed_c", "gaussian", 1))
    )
    together = torch.stack([first.flatten(), second.flatten()])
    assert abs(float(torch.corrcoef(together)[0, 1])) < 5 / math.sqrt(together.shape[1])


@pytest.mark.parametrize("at_step", [2, 6])  # in the first epoch, whose rows are not kept yet
def test_a_resumed_run_goes_on_with_its_frozen_rows(at_step: int, tmp_path: Path) -> None:
    """Rows that were noised anew would be second releases, and the budget is one."""
    config = config_of("apfed_c", "frozen_gaussian")
    guard = {"mechanism": "frozen_gaussian", "epsilon": 2.0}
    config = Config.model_validate(config.model_dump() | {"guard": guard})

    def stop(progress: Any) -> None:
        if progress.step == at_step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", on_progress=stop)
    result = run(config, tmp_path / "run", resume=True)
    assert result.privacy.releases == 1
    (messages, _) = received(result).values()
    frozen: dict[int, bytes] = {}
    for _, rows_B, z_BD in messages:
        for row, z_D in zip(rows_B.tolist(), z_BD, strict=True):
            assert frozen.setdefault(row, z_D.numpy().tobytes()) == z_D.numpy().tobytes()
