"""Label privacy in a run: every method trains on the answers, and none is ever drawn again."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import create_autospec

import msgpack
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load
from scipy import stats
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.contract import Contract
from secure_apfed.data import UNLABELLED, OwnData, load_data
from secure_apfed.errors import CheckpointError, ConfigError, ModelError
from secure_apfed.methods import METHODS, ActiveRole, Method, PartyContext
from secure_apfed.privacy.randomised_response import (
    LabelResponse,
    MultiStageResponse,
    find_first_epoch,
)
from secure_apfed.runs.folder import load_with_checksum, save_tensors, write_with_checksum
from secure_apfed.runs.run import run
from secure_apfed.runs.training_labels import TrainingLabels
from tests.secure_apfed.small_runs import interrupt_run, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

KEY = bytes(range(32))
RESPONSE = {"mechanism": "randomised_response", "epsilon": 1.0}
STAGES = {"mechanism": "lp_mst", "epsilon": 1.0}


def load_active_data(config: Config) -> OwnData:
    held = load_data(config.data, seed=0).select_party("active")
    assert held is not None
    return held


def config_of(method: str = "apfed_c", **changes: Any) -> Config:
    return small_config(method, **{"labels": RESPONSE, **changes})


class Given(NamedTuple):
    """Labels of the whole table, and the rows of it that are trained on from then on."""

    labels: Tensor
    rows: Tensor


def noting(method: Method, seen: list[Given]) -> Callable[..., ActiveRole]:
    def note(labels: Tensor | None, rows: Tensor) -> None:
        assert labels is not None
        seen.append(Given(labels, rows))

    def learner(party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        note(party.data.table.labels, party.data.train_rows)
        made = genuine(party, contract, rows)
        relabelled = made.relabel

        def relabel(labels_N: Tensor, train_rows: Tensor) -> None:
            note(labels_N, train_rows)
            relabelled(labels_N, train_rows)

        vars(made)["relabel"] = relabel
        return made

    genuine = method.build_active
    return learner


@pytest.fixture(name="seen")
def _seen(monkeypatch: pytest.MonkeyPatch) -> list[Given]:
    seen: list[Given] = []
    for method in METHODS.values():
        monkeypatch.setattr(method, "build_active", noting(method, seen))
    return seen


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("method", ["single_view", "apfed_c", "tvfl"])
def test_methods_train_on_answers_and_test_on_true_labels(method: str, seen: list[Given]) -> None:
    config = config_of(method)
    true = load_data(config.data, seed=0)
    run(config, None, data=true)
    (given,) = seen
    assert true.active.labels is not None
    train = true.train_rows
    test = true.test_rows
    kept = float((given.labels[train] == true.active.labels[train]).double().mean())
    deviation = math.sqrt(0.731 * 0.269 / len(train))
    assert abs(kept - math.e / (math.e + 1)) < 4 * deviation
    assert torch.equal(given.labels[test], true.active.labels[test])
    assert torch.equal(given.rows, train)


@pytest.mark.slow
def test_without_a_mechanism_nothing_is_touched(seen: list[Given]) -> None:
    config = config_of("single_view", labels={"mechanism": "none"})
    data = load_data(config.data, seed=0)
    run(config, None, data=data)
    assert seen[0].labels is data.active.labels
    assert seen[0].rows is data.train_rows


@pytest.mark.slow
def test_the_account_is_told_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    spent = run(config_of(), folder).privacy
    assert spent.epsilon_x == pytest.approx(8.0)
    assert (spent.epsilon_y, spent.epsilon_model, spent.releases) == (1.0, math.inf, 4)
    assert spent.trace[-1] == "labels: randomised_response, each answered once: epsilon_y 1"
    result = json.loads((folder / "result.json").read_bytes())
    card = json.loads((folder / "model.json").read_bytes())
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["privacy"]["epsilon_y"] == card["epsilon"]["labels"] == last["epsilon_y"] == 1.0
    assert result["privacy"]["epsilon_model"] == card["epsilon"]["model"] == "inf"
    assert card["epsilon"]["releases"] == last["releases"] == result["privacy"]["releases"] == 4
    assert last["delta"] == card["epsilon"]["delta"] == 1e-5
    told = (result["guarantee"], card["guarantee"])
    start = "row-release guarantee, encoder held fixed; "
    assert [text.startswith(start) for text in told] == [True, True]
    assert ["label DP, epsilon_y 1, delta 0" in text for text in told] == [True, True]
    assert ["no label DP" in text for text in told] == [False, False]
    assert ["not covered are test labels" in text for text in told] == [True, True]
    end = "the answers are derived from it"  # reproducible_insecure
    assert [text.endswith(end) for text in told] == [True, True]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("kind", "labels", "parts"), [(LabelResponse, RESPONSE, 1), (MultiStageResponse, STAGES, 2)]
)
def test_labels_are_answered_once_and_saved_before_they_train(
    kind: type[LabelResponse],
    labels: dict[str, Any],
    parts: int,
    seen: list[Given],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The noise is secret, so drawing again from fresh randomness would show and cost epsilon."""
    config = config_of(labels=labels, guard={"mechanism": "none"})
    answer = create_autospec(kind.randomise_labels, side_effect=kind.randomise_labels)
    monkeypatch.setattr(kind, "randomise_labels", answer)
    # Two epochs of four steps, then a step with all labels.
    interrupt_run(config, tmp_path / "run", at_step=9)
    rows = len(load_data(config.data, seed=0).train_rows)
    answered = [len(labels_N) for (_, labels_N), _ in answer.call_args_list]
    assert answered == [len(part) for part in torch.arange(rows).tensor_split(parts)]
    path = max((tmp_path / "run" / "parties" / "active").glob("checkpoint-*.bin"))
    tensors = load(msgpack.unpackb(load_with_checksum(path))["tensors"])
    assert bool((tensors["labels.answers"] >= 0).all())
    before = seen[-1]
    run(config, tmp_path / "run", resume=True)
    assert answer.call_count == parts
    assert torch.equal(before.labels, seen[-1].labels)


@pytest.mark.slow
def test_stages_use_disjoint_rows_and_hide_labels_that_wait(seen: list[Given]) -> None:
    """Other true labels in the second part leave the first stage as it was, bit for bit."""
    config = config_of(labels=STAGES)
    data = load_data(config.data, seed=0)
    result = run(config, None, data=data)
    rows = len(data.train_rows)
    assert [len(one.rows) for one in seen] == [rows - rows // 2, rows]
    for earlier, later in pairwise(seen):
        assert bool(torch.isin(earlier.rows, later.rows).all())
        # What was answered stays as it was; what waits is a constant, whatever its label.
        kept = earlier.rows
        assert torch.equal(earlier.labels[kept], later.labels[kept])
        waiting = data.train_rows[~torch.isin(data.train_rows, kept)]
        assert set(earlier.labels[waiting].tolist()) <= {UNLABELLED}
    assert result.privacy.epsilon_y == 1.0
    assert result.privacy.releases == config.train.epochs
    assert data.active.labels is not None
    waiting = data.train_rows[~torch.isin(data.train_rows, seen[0].rows)]
    data.active.labels[waiting] = 1 - data.active.labels[waiting]
    run(config, None, data=data)
    assert torch.equal(seen[0].labels, seen[2].labels)


def test_stages_begin_at_even_spans_where_epochs_and_a_model_allow_them() -> None:
    with pytest.raises(ConfigError, match="2 stages need as many epochs"):
        run(config_of(labels=STAGES, train={"epochs": 1, "device": "cpu"}), None)
    with pytest.raises(ValidationError, match=r"tvfl has none that predicts alone.*response"):
        config_of("tvfl", labels=STAGES)


@pytest.mark.parametrize(("stages", "first"), [(2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])])
def test_stages_begin_at_even_spans(stages: int, first: list[int]) -> None:
    starts = [find_first_epoch(stage, stages=stages, epochs=4) for stage in range(stages)]
    assert starts == first


def test_a_model_that_diverged_gives_no_prior() -> None:
    config = config_of("single_view", labels=STAGES)
    labels = TrainingLabels(config, load_active_data(config), key=KEY)
    labels.randomise_stage(None)
    broken = torch.nn.Linear(10, 2)
    torch.nn.init.constant_(broken.weight, float("nan"))
    networks = type("Networks", (), {"encoder": torch.nn.Identity(), "head": broken})()
    with pytest.raises(ModelError, match="gives no probabilities"):
        labels.randomise_stage(networks)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("altered", [False, True])
def test_an_older_checkpoint_draws_the_same_answers_or_none(altered: bool, tmp_path: Path) -> None:
    """Put back from before the second stage: the same bits go on, other bits are refused."""
    config = config_of(labels=STAGES, guard={"mechanism": "none"})
    interrupt_run(config, tmp_path, at_step=10)
    active = tmp_path / "parties" / "active"
    log = active / "labels-active.log"
    assert len(log.read_text().split()) == 2
    older, newest = sorted(active.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime_ns)
    newest.unlink()
    if not altered:
        run(config, tmp_path, resume=True)
        assert len(log.read_text().split()) == 2
        return
    content = msgpack.unpackb(load_with_checksum(older))
    tensors = load(content["tensors"])
    for name, value in tensors.items():
        if name.startswith("head."):
            value.mul_(-3.0)
    write_with_checksum(older, msgpack.packb({**content, "tensors": save_tensors(tensors)}))
    with pytest.raises(CheckpointError, match=r"other answers for stage 2 .* epsilon_y twice"):
        run(config, tmp_path, resume=True)


def test_answers_that_are_not_of_this_run_are_refused() -> None:
    config = config_of(labels=STAGES)
    labels = TrainingLabels(config, load_active_data(config), key=KEY)
    labels.randomise_stage(None)
    good = labels.tensors()["answers"].clone()
    of_no_class = good.where(good < 0, 2)
    torn = good.clone()
    torn[(good >= 0).nonzero()[0]] = -1
    for bad in (good[1:], good.float(), of_no_class, torn, None):
        with pytest.raises(CheckpointError, match="does not hold answers for 300 training labels"):
            labels.load_tensors({} if bad is None else {"answers": bad})
    labels.load_tensors({"answers": good})


@pytest.mark.parametrize(("factor", "caught"), [(1.0, False), (1.5, True)])
def test_a_fast_audit_of_the_labels_that_reach_a_method(factor: float, caught: bool) -> None:
    config = config_of("single_view", labels={**RESPONSE, "epsilon": factor})
    data = load_data(config.data, seed=0)
    assert data.active.labels is not None
    true = data.active.labels[data.train_rows]
    said = torch.zeros(2, 2)
    held = load_active_data(config)
    for at in range(100):
        labels = TrainingLabels(config, held, key=at.to_bytes(32, "big"))
        labels.randomise_stage(None)
        given = labels.build_data().table.labels
        assert given is not None
        for label in (0, 1):
            said[label] += torch.bincount(given[data.train_rows][true == label], minlength=2)
    kept = int(said[0, 0])
    total = int(said[0].sum())
    moved = int(said[1, 0])
    others = int(said[1].sum())
    low = stats.beta.ppf(0.001, kept, total - kept + 1)
    high = stats.beta.ppf(0.999, moved + 1, others - moved)
    assert (math.log(low / high) > 1.0) is caught
