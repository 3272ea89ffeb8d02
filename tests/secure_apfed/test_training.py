"""Networks, losses and data of one's own: trained as they are, refused where they do not fit."""

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secure_apfed import (
    Active,
    Contrastive,
    FrozenGaussian,
    Passive,
    Reconstruction,
    load_model,
    secure_sum,
)
from secure_apfed.config import Config
from secure_apfed.data.lazy_rows import LazyRows
from secure_apfed.data.records import VerticalData
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.interfaces.training import train
from secure_apfed.interfaces.training_data import make_data
from secure_apfed.interfaces.training_settings import SUM_SECTION_BY_NAME, DataChoice
from secure_apfed.learning.own_code import (
    UserFunctions,
    UserFunctionSettings,
    refuse_user_functions,
    split_user_functions,
)
from secure_apfed.runs.run import run, run_in_memory
from secure_apfed.settings import OwnLossSettings, SumSettings
from secure_apfed.settings.plugins import import_callable
from tests.secure_apfed.small_runs import small_config

N = 120
IDS = [f"person-{number}" for number in range(N)]
QUICK: Mapping[str, Any] = {
    "epochs": 1,
    "batch_size": 40,
    "secure_sum": "masked",
    "alignment": "ecdh",
    "baselines": False,
    "model": {"projection": 2},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROWS = draw(N, 8)
LABELS = (ROWS[:, 0] + ROWS[:, 4] > 0).long()


class Rows:
    """A map-style data set that counts what is read of it."""

    def __init__(self, rows: Tensor, *, labelled: bool = False) -> None:
        self.rows = rows
        self.labelled = labelled
        self.reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return (self.rows[index], 0) if self.labelled else self.rows[index]


def make_active(**changes: Any) -> Any:
    usual: dict[str, Any] = {
        "name": "clinic",
        "ids": IDS,
        "rows": ROWS[:, :4],
        "labels": LABELS,
        "encoder": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)),
        "head": nn.Linear(6, 2),
    }
    return Active(**{**usual, **changes})


def make_passive(name: str = "lab", **changes: Any) -> Passive:
    usual: dict[str, Any] = {"ids": IDS, "rows": ROWS[:, 4:], "loss": Reconstruction()}
    return Passive(name, **{**usual, **changes})


def agree(z: Tensor, x: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(z, x[:, : z.shape[1]]).mean()


def parameters_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


PARTIES: Mapping[str, Callable[[], tuple[Active, list[Passive]]]] = {
    "tables": lambda: (
        make_active(),
        [
            make_passive(),
            make_passive("registry", rows=pd.DataFrame(ROWS.numpy()).add_prefix("x"), loss=agree),
        ],
    ),
    "images": lambda: (
        make_active(
            rows=draw(N, 1, 8, 8),
            encoder=nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 6)),
        ),
        [
            make_passive(rows=draw(N, 3, 6, 6), loss=Contrastive(encoder=nn.Flatten())),
            make_passive("registry", loss=Contrastive(encoder=nn.Linear(4, 5), temperature=0.5)),
        ],
    ),
    "sequences": lambda: (
        make_active(rows=draw(N, 5, 3), encoder=nn.Sequential(nn.Flatten(), nn.Linear(15, 6))),
        [
            make_passive(rows=draw(N, 7, 2), loss=Contrastive(encoder=LastState())),
            make_passive("b"),
        ],
    ),
}


class LastState(nn.Module):
    """The last state of a GRU over sequences (B, T, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 4, batch_first=True)

    def forward(self, steps_BTC: Tensor) -> Tensor:
        _, last_1BD = self.gru(steps_BTC)
        state_BD: Tensor = last_1BD[0]
        return state_BD


@pytest.mark.parametrize("kind", PARTIES)
def test_own_modules_are_trained_and_returned(kind: str) -> None:
    parties: Any = PARTIES[kind]()
    active, passives = parties
    before = parameters_of(active.encoder), parameters_of(active.head)
    result = train(active, passives, guard=FrozenGaussian(epsilon=8), **QUICK)
    assert result.model[0] is active.encoder
    assert result.model[1] is active.head
    assert not torch.equal(before[0], parameters_of(active.encoder))
    assert not torch.equal(before[1], parameters_of(active.head))
    assert result.classes == (0, 1)
    assert tuple(result.model(active.rows[:3]).shape) == (3, 2)
    assert any("epsilon 8" in line for line in result.report.splitlines())
    assert 0 <= result.score <= 1


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize("name", SUM_SECTION_BY_NAME)
def test_a_sum_has_one_meaning_by_its_name(name: Any) -> None:
    """`train(secure_sum=name)` adds as the function `secure_sum(name)` does."""
    settings = SumSettings.model_validate(SUM_SECTION_BY_NAME[name])
    channel = secure_sum(name, ["a", "b"], to="clinic", by="notary", clip=1)
    assert type(channel.secure_sum) is find_sum_class(settings)


@pytest.mark.parametrize("secure_sum", ["plain", "masked", "ckks", "bfv", "masked bfv"])
def test_every_sum_takes_them(secure_sum: str) -> None:
    result = train(
        make_active(), [make_passive(), make_passive("b")], **{**QUICK, "secure_sum": secure_sum}
    )
    assert result.run.wire_bytes > 0


@pytest.mark.parametrize(
    ("method", "head"),
    [("tvfl", 18), ("split_nn", 18), ("split_nn_sum", 6), ("joint_teacher_sum", 6)],
)
def test_other_methods_that_train_networks_take_them(method: str, head: int) -> None:
    passives = [make_passive(encoder=nn.Linear(4, 6)), make_passive("b", encoder=nn.Linear(4, 6))]
    result = train(
        make_active(head=nn.Linear(head, 2)),
        passives,
        **{**QUICK, "method": method, "model": {"projection": "none", "representation": 6}},
    )
    assert 0 <= result.score <= 1


# By method: its settings, the own head's inputs, and what `result.model` is.
PREDICT_ALONE: Mapping[str, tuple[Any, dict[str, Any], str]] = {
    "apfed": ("apfed", {}, "your own network"),
    "apfed_r": ("apfed_r", {}, "your own network"),
    "single_view": ("single_view", {}, "your own network"),
    "joint_teacher_sum": ("joint_teacher_sum", {}, "your own network"),
    "votes that help": ("votes", {}, "your own network"),
    "votes of noise": ("votes", {}, "the average of your own network (a copy) and the best local"),
    "votes that are judged": ({"name": "votes", "help": "judged"}, {}, ""),
    "votes, always": ({"name": "votes", "help": "always"}, {}, "your own network"),
    "votes_randomised": ({"name": "votes_randomised", "epsilon": 4}, {}, ""),
    "votes_encrypted": ("votes_encrypted", {}, ""),
    "labels after": ("apfed", {"train": {"labels": "after"}}, "local models"),
}


@pytest.mark.filterwarnings("ignore::secure_apfed.errors.NoHelpWarning")
@pytest.mark.parametrize("case", PREDICT_ALONE)
def test_the_model_predicts_what_the_run_reports(case: str) -> None:
    method, changes, model_is = PREDICT_ALONE[case]
    sends = method == "joint_teacher_sum"
    rows = draw(N, 4, seed=5) if "noise" in case else ROWS[:, 4:]
    passives = [
        make_passive(name, rows=rows, encoder=nn.Linear(4, 6) if sends else None)
        for name in ("lab", "b")
    ]
    model = {"projection": 2} if "apfed" in str(method) else {"representation": 6}
    settings = {**QUICK, "method": method, "labelled": 40, "model": model, **changes}
    active = make_active()
    result = train(active, [] if method == "single_view" else passives, **settings)
    said = next(iter(result.run.test_scores.values()))
    with torch.no_grad():
        scores = result.model(active.rows[result.test_rows])
    assert scores.double().softmax(1).numpy() == pytest.approx(said.scores, abs=1e-6)
    assert result.model_is.startswith(model_is)
    assert f"the model is {result.model_is}" in result.report
    assert (result.model[0] is active.encoder) == (result.model_is == "your own network")


def test_where_all_parties_predict_no_model_is_left() -> None:
    passives = [make_passive(encoder=nn.Linear(4, 6)), make_passive("b", encoder=nn.Linear(4, 6))]
    changes = {"method": "split_nn", "model": {"projection": "none"}}
    result = train(make_active(head=nn.Linear(18, 2)), passives, **{**QUICK, **changes})
    with pytest.raises(ModelError, match="needs every party to predict"):
        result.model  # noqa: B018 - it is asked for


def test_a_head_alone_stands_on_networks_of_ours() -> None:
    active = make_active(encoder=None, head=nn.Linear(8, 2))
    passives = [make_passive(), make_passive("b")]
    changes = {"model": {"hidden": [8], "representation": 8, "projection": 2}}
    result = train(active, passives, **{**QUICK, **changes})
    assert result.model[1] is active.head


def test_the_active_may_train_alone() -> None:
    active = make_active()
    assert train(active, [], **QUICK).model[0] is active.encoder


def test_what_the_active_reaches_alone_is_measured_with_the_same_start() -> None:
    active = make_active()
    twin = make_active(encoder=copy.deepcopy(active.encoder), head=copy.deepcopy(active.head))
    result = train(active, [make_passive(), make_passive("b")], **{**QUICK, "baselines": True})
    alone = train(twin, [], **QUICK)
    assert result.alone == alone.score
    assert result.best_local is not None
    assert result.gain == pytest.approx(result.score - max(result.alone, result.best_local))


def test_what_was_not_tried_is_said() -> None:
    active = make_active(
        rows=draw(N, 2, 2, 2), encoder=nn.Sequential(nn.Flatten(), nn.Linear(8, 6))
    )
    result = train(active, [make_passive(), make_passive("b")], **{**QUICK, "baselines": True})
    assert "not tried: the local models" in result.report
    assert result.best_local is None


def test_labels_may_be_words_and_some_unknown() -> None:
    words: list[Any] = ["ill" if label else "well" for label in LABELS.tolist()]
    words[::5] = [None] * len(words[::5])
    result = train(make_active(labels=words), [make_passive(), make_passive("b")], **QUICK)
    assert result.classes == ("ill", "well")
    assert not set(result.test_rows.tolist()) & set(range(0, N, 5))


def test_an_optimizer_of_ones_own_trains_alone_what_it_groups() -> None:
    active = make_active()

    def make_grouped_sgd(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": rest}], lr=0.1)

    before = [parameter.detach().clone() for parameter in active.encoder.parameters()]
    train(active, [make_passive(), make_passive("b")], **{**QUICK, "optimizer": make_grouped_sgd})
    after = list(active.encoder.parameters())
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[2], after[2])


def test_frozen_parts_stay() -> None:
    active = make_active()
    active.encoder[0].requires_grad_(False)
    before = active.encoder[0].weight.detach().clone()
    train(active, [make_passive(), make_passive("b")], **QUICK)
    assert torch.equal(before, active.encoder[0].weight)


def test_rows_of_a_data_set_train_as_those_in_memory() -> None:
    results = []
    for lazily in (False, True):
        torch.manual_seed(0)
        active = make_active()
        own = Rows(active.rows, labelled=True) if lazily else active.rows
        lab = Rows(ROWS[:, 4:]) if lazily else ROWS[:, 4:]
        passives = [make_passive(rows=lab), make_passive("b")]
        settings = {**QUICK, "party_seeds": "shared_for_comparison"}
        train(make_active(encoder=active.encoder, head=active.head, rows=own), passives, **settings)
        results.append(parameters_of(active.encoder))
    assert torch.equal(*results)


def test_a_data_set_is_read_batch_by_batch() -> None:
    data_set = Rows(draw(50, 3))
    rows = LazyRows(data_set, party="lab", workers=2)
    half = rows.select(torch.arange(0, 50, 2))
    before = data_set.reads
    assert tuple(half.shape) == (25, 3)
    assert data_set.reads == before
    assert torch.equal(half[torch.tensor([1, 4])], data_set.rows[[2, 8]])
    assert data_set.reads == before + 2
    assert half.to(torch.device("cpu"), torch.float64)[:1].dtype is torch.float64


CODE = """
import torch
from torch import nn

LOADED = True
NUMBER = 3


def encode(features):
    return nn.Sequential(nn.Linear(features[0], 8), nn.ReLU(), nn.Linear(8, 6))


def score(features, classes):
    return nn.Linear(features[0], classes)


def agree(z, x):
    return 1 - nn.functional.cosine_similarity(z, x[:, : z.shape[1]]).mean()
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code of one's own, from which a command is started."""
    (tmp_path / "my_own_nets.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_by_names_equals_one_by_functions(beside: Path) -> None:
    found = import_callable("my_own_nets:encode", setting="network")
    loss = import_callable("my_own_nets:agree", setting="objective")
    score = import_callable("my_own_nets:score", setting="head_network")
    active = make_active(encoder=found, head=score)
    passives = [make_passive(loss=loss), make_passive("registry", loss=loss)]
    shared = {**QUICK, "party_seeds": "shared_for_comparison"}
    called = train(active, passives, **shared)
    data, _, _ = make_data(
        active, passives, DataChoice(), labelled=None, test_fraction=0.25, seed=0
    )
    named = run_in_memory(Config.model_validate(settings_by_name()), None, data=data)
    assert named.own_networks is not None
    assert torch.equal(
        parameters_of(called.model),
        torch.cat(
            [parameters_of(named.own_networks.encoder), parameters_of(named.own_networks.head)]
        ),
    )


def settings_by_name() -> dict[str, Any]:
    loss = {"objective": "my_own_nets:agree", "model": {"network": "auto", "projection": 2}}
    return {
        "name": "training",
        "party_seeds": "shared_for_comparison",
        "method": {"name": "apfed"},
        "data": {
            "dataset": "tables",
            "active": "clinic",
            "parties": {"clinic": {}, "lab": {}, "registry": {}},
            "classes": ["0", "1"],
        },
        "train": {"epochs": 1, "batch_size": 40, "evaluate_every": 1, "optimizer": "sgd"},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "alignment": {"protocol": "ecdh"},
        "guard": {"mechanism": "none"},
        "model": {
            "network": "my_own_nets:encode",
            "head_network": "my_own_nets:score",
            "projection": 2,
        },
        "passives": {"lab": loss, "registry": loss},
        "transcript": {"keep": "none"},
    }


def test_a_stored_model_takes_its_code_from_the_caller(beside: Path) -> None:
    changes = {"network": "my_own_nets:encode", "head_network": "my_own_nets:score"}
    config = small_config("apfed_r", model={**changes, "projection": 4})
    run_in_memory(config, beside / "run")
    with pytest.raises(ModelError, match=r"load_model\(folder, encoder=...\)"):
        load_model(beside / "run")
    encode, score = (
        import_callable(f"my_own_nets:{name}", setting="") for name in ("encode", "score")
    )
    with pytest.raises(ModelError, match=r"its head is code of one's own, too"):
        load_model(beside / "run", encoder=encode)
    loaded = load_model(beside / "run", encoder=encode, head=score)
    assert loaded.classes == ("malignant", "benign")


@pytest.mark.slow
def test_parties_in_processes_of_their_own_train_the_same_code(beside: Path) -> None:
    loss = {"objective": "my_own_nets:agree", "model": {"network": "auto", "projection": 4}}
    config = small_config(
        "apfed",
        model={"network": "my_own_nets:encode", "projection": 4},
        passives={"default": loss},
        train={"epochs": 1, "batch_size": 64, "device": "cpu"},
    )
    for transport in ("memory", "local"):
        run(config, beside / transport, transport=transport)
    weights = [
        (beside / transport / "model.safetensors").read_bytes() for transport in ("memory", "local")
    ]
    assert weights[0] == weights[1]
    party = (beside / "local" / "parties" / "active" / "party.yaml").read_text()
    assert "my_own_nets:encode" in party
    assert "my_own_nets" not in (beside / "local" / "shared.yaml").read_text()


def test_nobody_names_code_for_another(beside: Path) -> None:
    (beside / "never_loaded.py").write_text("raise SystemExit('it was imported')")
    said = {"network": "never_loaded:encode", "head_network": "never_loaded:head"}
    passives = {"default": {"objective": "never_loaded:loss"}}
    config = small_config("apfed", model=said, passives=passives)
    with pytest.raises(ConfigError, match=r"code of a party's own \(model.head_network, model.net"):
        refuse_user_functions(config, source="the proposal")
    shared, named = split_user_functions(config, "active", ("passive-1",))
    refuse_user_functions(shared, source="the proposal")
    assert shared.model.network == "own"
    assert named["passive-1"].objective == "never_loaded:loss"
    assert named["active"].network == "never_loaded:encode"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("nowhere:encode", "no module 'nowhere'; put nowhere.py into"),
        ("my_own_nets:absent", "my_own_nets has no 'absent'; it has .*encode"),
        ("my_own_nets:encoed", "my_own_nets has no 'encoed'; did you mean 'encode'?"),
        ("my_own_nets.py:encode", "write my_own_nets:NAME, not my_own_nets.py:NAME"),
        ("my_own_nets:NUMBER", "is of type int; expected a class, a function or a module"),
        ("my_own_nets", "expected code as package.module:Name"),
        ("os; rm:x", "expected code as package.module:Name"),
        ("../x:y", "expected code as package.module:Name"),
    ],
)
def test_a_name_that_names_no_code_is_refused(beside: Path, name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"network: .*{advice}"):
        import_callable(name, setting="network")


BROKEN = {
    "it needs a library": ("import no_such_library_at_all", "No module named 'no_such_library"),
    "it is not Python": ("x = 1\ndef encode(:\n", r"SyntaxError: .*\(line 2 of broken_nets"),
    "it fails": ("1 / 0", r"ZeroDivisionError: division by zero \(line 1 of broken_nets"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_import_that_fails_inside_says_its_own_error(case: str, beside: Path) -> None:
    text, expected = BROKEN[case]
    module = f"broken_nets_{list(BROKEN).index(case)}"
    (beside / f"{module}.py").write_text(text)
    with pytest.raises(ConfigError, match=f"network: {module} cannot be imported: .*{expected}"):
        import_callable(f"{module}:encode", setting="network")


def test_a_named_module_is_not_trained_in_place(beside: Path) -> None:
    (beside / "shared_nets.py").write_text(
        "from torch import nn\nencoder = nn.Linear(3, 3)\n"
        "head = nn.Linear(3, 2)\nhead.encoder = encoder\n"
    )
    settings = UserFunctionSettings(network="shared_nets:encoder", head_network="shared_nets:head")
    first, second = (UserFunctions.from_settings(settings, code_folder=beside) for _ in range(2))
    assert isinstance(first.encoder, nn.Linear)
    assert isinstance(first.head, nn.Linear)
    assert isinstance(second.encoder, nn.Linear)
    assert first.head.encoder is first.encoder, "weights that they share stay shared"
    with torch.no_grad():
        first.encoder.weight += 1
    assert not torch.equal(first.encoder.weight, second.encoder.weight)


def test_a_partys_own_file_names_its_code(beside: Path) -> None:
    code = UserFunctions.from_settings(
        UserFunctionSettings(network="my_own_nets:encode", objective="my_own_nets:agree"),
        code_folder=beside,
    )
    assert code.encoder is not None
    assert code.objective is not None
    assert code.head is None


def test_rows_arrive_as_they_are() -> None:
    table = np.asarray(ROWS.numpy(), dtype=np.float64) * 100
    active = make_active(rows=table[:, :4])
    data, _, _ = make_data(
        active, [make_passive()], DataChoice(), labelled=None, test_fraction=0.25, seed=0
    )
    assert isinstance(data, VerticalData)
    torch.testing.assert_close(data.active.features, torch.from_numpy(table[:, :4]).float())


def test_a_yaml_file_takes_a_loss_by_name() -> None:
    config = small_config("apfed", passives={"default": {"objective": "my_losses:cosine"}})
    objective = config.passives["default"].objective
    assert objective is not None
    assert objective == OwnLossSettings(code="my_losses:cosine")


def test_a_stranger_types_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs from a data set of dictionaries, a triplet loss and an attack, as printed."""
    blocks = list_python_blocks("own-networks.md")
    start, _ = blocks[0].split("active = Active(")
    typed = [block for block in blocks if "class Packed" in block or "def triplet" in block]
    assert len(typed) == 2
    (tmp_path / "my_attacks.py").write_text(list_python_blocks("add-an-attack.md")[0])
    monkeypatch.chdir(tmp_path)
    shorter = "train = functools.partial(train, baselines=False, secure_sum='masked')\n"
    script = "\n".join(["import functools", start, shorter, *typed])
    attack = 'result = train(active, passives, attacks=["my_attacks:NearestMean"], epochs=1, '
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script + attack + 'model={"projection": 2})', "own-networks.md", "exec"), names)
    result = names["result"]
    assert result.model(names["active"].rows[0][None]).shape == (1, 2)
    assert "passive reads labels: " in result.report
    assert {found.attack for found in result.attacks} == {"nearest_mean"}


def list_python_blocks(page: str) -> list[str]:
    """Return the Python code of a page of the documentation, block by block."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
