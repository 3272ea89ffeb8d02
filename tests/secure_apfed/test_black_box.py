"""Passives that nobody sees inside: summed as others, and checked for what can be seen of them."""

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from secure_apfed import Passive, Reconstruction, train
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.learning.black_box import BlackBox
from secure_apfed.learning.own_code import (
    UserFunctions,
    UserFunctionSettings,
    refuse_user_functions,
    split_user_functions,
)
from secure_apfed.methods.noise_plans import make_sum_release, sum_and_noise
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.run import run, run_in_memory
from tests.docs.pages import DOCS, load_module, program_of
from tests.secure_apfed.small_runs import small_config
from tests.secure_apfed.test_training import IDS, QUICK, ROWS, make_active, make_passive

D = 2
Floats = NDArray[np.floating]
SHARED = {**QUICK, "party_seeds": "shared_for_comparison"}


def pull(z: Floats, x: Floats) -> Floats:
    """Return the gradient of each row's squared distance to its first numbers, (B, D)."""
    return 2 * (z - x[:, :D])


class Registry:
    """A registry that computes in numpy alone, and remembers what it was asked."""

    def __init__(self) -> None:
        self.rows = ROWS[:, 4:].numpy()
        self.ids: tuple[str, ...] = ()
        self.asked: list[tuple[int, NDArray[np.int64], type[Any]]] = []

    def prepare(self, ids: tuple[str, ...]) -> None:
        self.ids = ids

    def __call__(self, step: int, rows: NDArray[np.int64], z: Floats) -> Floats:
        self.asked.append((step, rows, type(z)))
        return pull(z, self.rows[rows])


def black_box(gradient: Any, name: str = "registry", **changes: Any) -> Passive:
    return Passive(name, IDS, gradient=gradient, **changes)


def weights_of(result: Any) -> Tensor:
    return torch.cat([part.detach().flatten() for part in result.model.parameters()])


def own_loss(z: Tensor, x: Tensor) -> Tensor:
    """The mean over rows of what `pull` is the gradient of."""
    return F.mse_loss(z, x[:, :D], reduction="sum") / len(z)


@pytest.mark.parametrize("secure_sum", ["plain", "masked", "ckks"])
def test_it_trains_the_active_as_a_loss_with_that_gradient(secure_sum: str) -> None:
    results = []
    for passive in (black_box(Registry()), make_passive("registry", loss=own_loss)):
        torch.manual_seed(0)
        settings = {**SHARED, "secure_sum": secure_sum}
        results.append(train(make_active(), [passive, make_passive()], **settings))
    torch.testing.assert_close(*map(weights_of, results), rtol=1e-3, atol=1e-4)


def test_rows_are_positions_in_its_own_list_and_arrive_as_arrays_of_numpy() -> None:
    registry = Registry()
    others = [f"person-{number}" for number in range(119, -1, -1)]
    train(make_active(ids=others), [black_box(registry), make_passive()], **QUICK)
    assert registry.ids == tuple(IDS)
    steps = [step for step, _, _ in registry.asked]
    assert steps == sorted(set(steps))
    for _, rows, kind in registry.asked:
        assert kind is np.ndarray
        assert rows.dtype == np.int64
        assert len(rows) >= 2
        assert len(set(rows.tolist())) == len(rows)
    every = np.concatenate([rows for _, rows, _ in registry.asked])
    assert set(every.tolist()) <= set(range(len(IDS)))


def test_rows_of_the_alignment_are_translated() -> None:
    registry = Registry()
    rows_N = torch.tensor([5, -1, 3])
    made = BlackBox("registry", registry, rows_N=rows_N, ids=IDS)
    z_BD = torch.ones(2, D)
    gradient_BD = made.train_on_rows(7, torch.tensor([2, 0]), z_BD, weight=0.5)
    (step, rows, _) = registry.asked[0]
    assert (step, rows.tolist()) == (7, [3, 5])
    expected_BD = 0.5 * torch.from_numpy(pull(z_BD.numpy(), registry.rows[[3, 5]]))
    torch.testing.assert_close(gradient_BD, expected_BD)


@pytest.mark.parametrize(
    "answer",
    [
        lambda z: torch.from_numpy(z) * 2,
        lambda z: z.astype(np.float64),
        lambda z: z.astype(np.float16),
        lambda z: torch.from_numpy(z).double().requires_grad_(),
        lambda z: np.asfortranarray(z),
        lambda z: z[::-1],
    ],
    ids=["tensor", "float64", "float16", "in a graph", "by columns", "reversed"],
)
def test_arrays_and_tensors_of_real_numbers_are_taken(answer: Callable[[Floats], Any]) -> None:
    made = BlackBox(
        "registry", lambda step, rows, z: answer(z), rows_N=torch.arange(9), ids=IDS[:9]
    )
    gradient_BD = made.train_on_rows(0, torch.arange(3), torch.ones(3, D), weight=1.0)
    assert gradient_BD.dtype is torch.float32
    assert not gradient_BD.requires_grad


def answer_in_place(step: int, rows: Any, z: Floats) -> Floats:
    z *= 2
    return z.copy()


def answer_by_tensor_in_place(step: int, rows: Any, z: Floats) -> Tensor:
    return torch.from_numpy(z).mul_(2)


def fail(step: int, rows: Any, z: Floats) -> Floats:
    raise OSError("the registry is closed")


def change_one_cell(z: Floats, value: float) -> Floats:
    changed = z.copy()
    changed[1, 0] = value
    return changed


MISUSES: Mapping[str, tuple[Any, str]] = {
    "returns None": (lambda step, rows, z: None, "got NoneType; end it with return"),
    "returns a list": (
        lambda step, rows, z: z.tolist(),
        r"got list; wrap it in np.array\(...\)",
    ),
    "returns a number": (lambda step, rows, z: 1.0, "got float"),
    "returns a loss": (lambda step, rows, z: np.square(z).mean(), "got float"),
    "fewer rows": (lambda step, rows, z: z[1:], r"one row for each row of z.*got \(\d+, 2\)"),
    "more rows": (lambda step, rows, z: np.vstack([z, z]), r"got \(\d+, 2\)"),
    "one row": (lambda step, rows, z: z.sum(0), r"got \(2,\)"),
    "other columns": (lambda step, rows, z: np.hstack([z, z]), r"got \(\d+, 4\)"),
    "turned": (lambda step, rows, z: z.T, r"got \(2, \d+\)"),
    "NaN": (lambda step, rows, z: change_one_cell(z, np.nan), r"1 of \d+ rows are NaN or infinite"),
    "infinite": (
        lambda step, rows, z: change_one_cell(z, np.inf),
        r"1 of \d+ rows are NaN or infinite",
    ),
    "too large for float32": (
        lambda step, rows, z: z.astype(np.float64) * 1e300,
        "rows are NaN or infinite",
    ),
    "complex": (lambda step, rows, z: z + 1j, r"real floating-point numbers; got complex"),
    "complex tensor": (
        lambda step, rows, z: torch.from_numpy(z) + 1j,
        r"real floating-point numbers; got torch.complex",
    ),
    "whole numbers": (lambda step, rows, z: z.astype(np.int64), "got int64; convert it"),
    "truth values": (lambda step, rows, z: z > 0, "got bool"),
    "objects": (lambda step, rows, z: z.astype(object), "got object"),
    "changes z": (answer_in_place, r"changes z in place; take z.copy\(\)"),
    "changes z by a tensor": (answer_by_tensor_in_place, "changes z in place"),
    "fails": (fail, r"failed at step 0, for \d+ rows .* OSError: the registry is closed"),
    "takes other arguments": (lambda z: z, "TypeError: .* takes 1 positional argument"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_an_answer_that_is_no_gradient_is_refused_by_name(misuse: str) -> None:
    gradient, advice = MISUSES[misuse]
    with pytest.raises(ModelError, match=f"^registry: its gradient .*{advice}"):
        train(make_active(), [black_box(gradient), make_passive()], **QUICK)


HANDED_IN: Mapping[str, tuple[Callable[[], Passive], str, str]] = {
    "beside a loss": (
        lambda: black_box(Registry(), loss=own_loss),
        "apfed",
        "registry: gradient is given beside loss",
    ),
    "beside a decoder": (
        lambda: black_box(Registry(), loss=Reconstruction(decoder=torch.nn.Flatten())),
        "apfed",
        "beside loss",
    ),
    "beside an encoder": (
        lambda: black_box(Registry(), encoder=torch.nn.Flatten()),
        "apfed",
        "beside encoder",
    ),
    "beside an optimizer": (
        lambda: black_box(Registry(), optimizer=torch.optim.AdamW),
        "apfed",
        "beside optimizer",
    ),
    "a text": (
        lambda: black_box("my_registry:gradient"),
        "apfed",
        r"registry: gradient: .*a function \(step, rows, z\) -> gradient, got str",
    ),
    "no rows": (
        lambda: Passive("registry", IDS),
        "apfed",
        "registry: it has neither rows nor a gradient",
    ),
    "a method without gradients": (
        lambda: black_box(Registry()),
        "tvfl",
        "registry: it brings a gradient, and this method sums none",
    ),
    "a method with a loss of its own": (
        lambda: black_box(Registry()),
        "apfed_r",
        "is reconstruction for every passive, got black_box; use method apfed to mix",
    ),
}


@pytest.mark.parametrize("misuse", HANDED_IN)
def test_what_does_not_go_with_it_is_refused_by_name(misuse: str) -> None:
    make, method, advice = HANDED_IN[misuse]
    with pytest.raises(ConfigError, match=advice):
        train(make_active(), [make(), make_passive("b")], **{**QUICK, "method": method})


def test_rows_are_clipped_as_those_of_others() -> None:
    seen = {}
    for size in (10.0, 1000.0):
        torch.manual_seed(0)
        box = black_box(lambda step, rows, z, size=size: np.full_like(z, size))
        settings = {**SHARED, "secure_sum": {"scheme": "plain", "masks": "pairwise", "clip": 1.0}}
        seen[size] = weights_of(train(make_active(), [box, make_passive()], **settings))
    assert torch.equal(seen[10.0], seen[1000.0])


NOISE = {"scheme": "plain", "masks": "pairwise", "clip": 1.0, "noise": {"epsilon": 8.0}}


def sensitivity_of(objective: Mapping[str, Any]) -> float:
    config = small_config("apfed", passives={"default": {"objective": objective}}, secure_sum=NOISE)
    _, plan = sum_and_noise(config, "s", "active", ("passive-1", "passive-2"), (4,))
    assert plan is not None
    return make_sum_release(config, "passive-1", (4,), plan).sensitivity


def test_a_person_is_charged_for_a_whole_batch() -> None:
    honest = sensitivity_of({"name": "own", "row_wise": True})
    assert sensitivity_of({"name": "black_box"}) == pytest.approx(honest * np.sqrt(64))


def test_the_report_and_the_guarantee_say_what_is_not_known() -> None:
    result = train(
        make_active(), [black_box(Registry()), make_passive()], **{**QUICK, "secure_sum": NOISE}
    )
    (said,) = [line for line in result.report.splitlines() if "registry is a black box" in line]
    assert "is not known, so noise is charged for a whole batch" in said
    assert result.run.contributions["registry"]["epsilon"] <= 8.0


CODE = """
import numpy as np


def gradient(step, rows, z):
    return 2 * z


class Counted:
    def __init__(self):
        self.ids = ()

    def prepare(self, ids):
        self.ids = ids

    def __call__(self, step, rows, z):
        assert len(self.ids) > max(rows)
        return 2 * z


def refuse(step, rows, z):
    raise SystemExit("it was asked about people who do not exist")
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a registry's code, from which a command is started."""
    (tmp_path / "my_registry.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_config(code: str, **changes: Any) -> Any:
    objective = {"name": "black_box", "code": code}
    return small_config("apfed", passives={"default": {"objective": objective}}, **changes)


@pytest.mark.parametrize("name", ["gradient", "Counted"])
def test_a_run_takes_one_by_name(beside: Path, name: str) -> None:
    result = run_in_memory(make_config(f"my_registry:{name}"), beside / "run")
    assert "passive-1 is a black box" in RunFolder(beside / "run").model_card.read_text()
    assert result.accuracy


@pytest.mark.slow
def test_one_behind_a_link_trains_the_same_model(beside: Path) -> None:
    config = make_config(
        "my_registry:Counted", train={"epochs": 1, "batch_size": 64, "device": "cpu"}
    )
    for transport in ("memory", "local"):
        run(config, beside / transport, transport=transport)
    weights = [
        (beside / transport / "model.safetensors").read_bytes() for transport in ("memory", "local")
    ]
    assert weights[0] == weights[1]
    assert "my_registry" not in (beside / "local" / "shared.yaml").read_text()


def test_a_plan_names_it_and_does_not_ask_it(beside: Path) -> None:
    planned = forecast(make_config("my_registry:refuse"))
    assert any(
        warning.startswith("passive-1 is a black box") and warning.endswith("is not rehearsed")
        for warning in planned.warnings
    )


def test_nobody_names_it_for_another(beside: Path) -> None:
    config = make_config("never_loaded:gradient")
    with pytest.raises(ConfigError, match=r"code of a party's own \(passives.default.objective"):
        refuse_user_functions(config, source="the proposal")
    shared, code = split_user_functions(config, "active", ("passive-1",))
    refuse_user_functions(shared, source="the proposal")
    assert code["passive-1"].gradient == "never_loaded:gradient"
    assert "never_loaded" not in shared.model_dump_json()


def test_a_partys_own_file_names_it(beside: Path) -> None:
    code = UserFunctions.from_settings(
        UserFunctionSettings(gradient="my_registry:Counted"), code_folder=beside
    )
    made = code.make_black_box(owner="registry", rows_N=torch.arange(3), ids=IDS[:3])
    assert tuple(made.train_on_rows(0, torch.arange(2), torch.ones(2, D), weight=1.0).shape) == (
        2,
        D,
    )


def test_who_brings_none_is_told_where_to_name_it() -> None:
    with pytest.raises(ConfigError, match=r"code: \{gradient: .my_registry:gradient"):
        UserFunctions().make_black_box(owner="registry", rows_N=torch.arange(3), ids=IDS[:3])


@pytest.fixture
def numpy_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's example, in a folder with a registry's file whose rows stand in another order."""
    lines = [
        ",".join([person, *map(str, row[4:].tolist())])
        for person, row in zip(IDS, ROWS, strict=True)
    ]
    lines.reverse()
    (tmp_path / "registry.csv").write_text("\n".join(["id,a,b,c,d", *lines, ""]))
    monkeypatch.chdir(tmp_path)
    return load_module(DOCS / "examples" / "numpy_registry.py")


def test_the_example_in_numpy_learns_and_is_the_same_in_a_process_of_its_own(
    numpy_registry: ModuleType,
) -> None:
    z = np.random.default_rng(0).normal(size=(len(IDS), D))
    rows = np.arange(len(IDS))
    with closing(numpy_registry.Piped()) as piped:
        registry = numpy_registry.Registry()
        errors = []
        for source in (registry, piped):
            source.prepare(tuple(IDS))
        for step in range(20):
            gradient = registry(step, rows, z)
            np.testing.assert_array_equal(piped(step, rows, z), gradient)
            errors.append(np.square(z @ registry.weights - registry.table).mean())
    assert errors[-1] < errors[0]
    np.testing.assert_allclose(
        registry.table[0], standardise_columns(ROWS[:, 4:].numpy())[0], rtol=1e-5
    )


def standardise_columns(table: Floats) -> Floats:
    standardised: Floats = (table - table.mean(axis=0)) / table.std(axis=0)
    return standardised


def test_the_example_takes_the_slope_of_its_loss(numpy_registry: ModuleType) -> None:
    registry = numpy_registry.Registry()
    registry.prepare(tuple(IDS))
    rows = np.array([3, 1, 8])
    z = np.random.default_rng(0).normal(size=(3, D))
    registry(0, rows, z)
    weights = torch.from_numpy(registry.weights.copy())
    z_BD = torch.from_numpy(z).requires_grad_()
    own_BF = torch.from_numpy(registry.table[rows])
    (z_BD @ weights - own_BF).square().mean(1).sum().backward()  # of each row its own loss
    assert z_BD.grad is not None
    np.testing.assert_allclose(registry(1, rows, z), z_BD.grad.numpy())


def test_the_example_trains_the_active(numpy_registry: ModuleType) -> None:
    result = train(make_active(), [black_box(numpy_registry.Registry()), make_passive()], **QUICK)
    assert "registry is a black box" in result.report


def test_the_program_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program_of("docs/black-box-passives.md", tmp_path)
    assert "registry is a black box" in capsys.readouterr().out
