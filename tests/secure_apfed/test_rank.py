"""What opened numbers tell of columns: counted, refused, said, and measured over all methods."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_attacks import recorded
from apfed_attacks.features.regression import LeastSquares
from apfed_attacks.run import run_attacks
from apfed_attacks.scoring import compute_r2
from apfed_attacks.view import Knowledge, collect_opened_sums, list_opened_epochs
from secure_apfed.base.seeds import seed_draws
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.data.encoding import View
from secure_apfed.errors import ConfigError, ModelError, NarrowTableWarning
from secure_apfed.labellers import LABELLERS
from secure_apfed.methods import METHODS, open_session
from secure_apfed.methods.apfed_code import ApfedCode
from secure_apfed.networks.models import Projection
from secure_apfed.networks.rank import (
    compute_number_limit,
    count_columns,
    describe_rank,
    warn_if_narrow,
)
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run_in_memory
from secure_apfed.settings.data import TableShape
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings(
    "ignore::apfed_protocols.errors.UnsafeChoiceWarning",
    "ignore::secure_apfed.errors.NoHelpWarning",
    "ignore::secure_apfed.errors.FewRowsWarning",
)
ROWS = 160
KNOWN = 30
READ = 0.9
"""R2 above which columns count as read."""
ALL_READ = {"passives": {"default": {"allow_reading_all": True}}}


def columns_of(kind: str) -> Tensor:
    """Four columns, of which some differ in name alone."""
    with seed_draws(0, kind):
        x_NF = torch.randn(50, 4)
    if kind == "copied":
        x_NF[:, 1] = x_NF[:, 0]
    elif kind == "scaled copy":
        x_NF[:, 1] = 5 - 3 * x_NF[:, 0]
    elif kind == "nearly copied":
        x_NF[:, 1] = x_NF[:, 0] + 1e-3 * x_NF[:, 2]
    elif kind == "constant":
        x_NF[:, 1] = 7.0
    elif kind == "sum of others":
        x_NF[:, 1] = x_NF[:, 0] + x_NF[:, 2]
    elif kind == "categories":  # one of each row, so that they add up to 1
        x_NF = torch.eye(4)[torch.arange(50) % 4]
    elif kind == "few rows":
        x_NF = x_NF[:4]
    elif kind == "one row":
        x_NF = x_NF[:1]
    elif kind == "image":
        x_NF = x_NF.reshape(50, 1, 2, 2)
    return x_NF


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("independent", 4),
        ("copied", 3),
        ("scaled copy", 3),
        ("nearly copied", 3),
        ("constant", 3),
        ("sum of others", 3),
        ("categories", 3),
        ("few rows", 3),
        ("one row", 0),
        ("image", 4),
    ],
)
def test_columns_count_that_differ(kind: str, count: int) -> None:
    assert count_columns(columns_of(kind)) == count


@pytest.mark.parametrize(("columns", "maximum"), [(0, 0), (1, 0), (2, 1), (3, 1), (12, 6)])
def test_a_projection_takes_half_of_its_columns_and_no_more(columns: int, maximum: int) -> None:
    assert compute_number_limit(columns) == maximum
    rows_NF = torch.randn(40, max(1, columns)) * (columns > 0)
    if maximum:
        Projection(columns, maximum).fit(rows_NF)
    with pytest.raises(ModelError, match=f"{maximum + 1} numbers of {columns} columns"):
        Projection(max(1, columns), maximum + 1).fit(rows_NF)
    Projection(max(1, columns), maximum + 1, allow_reading_all=True).fit(rows_NF)


@pytest.mark.parametrize(
    ("numbers", "columns", "said"),
    [
        (12, 12, "12 numbers of 12 columns: everything can be read"),
        (32, 6, "32 numbers of 6 columns: everything can be read"),
        (1, 4, "1 number of 4 columns: at most 25% of what unrelated columns hold can be read"),
        (3, None, "3 numbers of columns that each party alone has counted"),
    ],
)
def test_the_rank_is_said(numbers: float, columns: int | None, said: str) -> None:
    assert describe_rank(numbers, columns) == said


def tables(*columns: int, classes: int = 4) -> VerticalData:
    """Independent normal columns of passives, two alike if one is named; labels that depend on all
    of them.
    """
    columns = columns * 2 if len(columns) == 1 else columns
    ids = tuple(map(str, range(ROWS)))
    with seed_draws(0, "tables", *columns, classes):
        every_NF = torch.randn(ROWS, 3 + sum(columns))
        labels_N = (every_NF @ torch.randn(every_NF.shape[1], classes)).argmax(1)

    def table(name: str, rows_NF: Tensor, labels: Tensor | None = None) -> PartyTable:
        width = rows_NF.shape[1]
        encoding = ColumnEncoding.for_numeric_columns([str(at) for at in range(width)])
        return PartyTable(name, ids, rows_NF, labels, encoding, {name: View(0, width)})

    own_NF, *others = every_NF.split([3, *columns], dim=1)
    return VerticalData(
        table=table("active", own_NF, labels_N),
        passives=tuple(table(f"passive-{at}", of) for at, of in enumerate(others, start=1)),
        classes=tuple(map(str, range(classes))),
        train_rows=torch.arange(ROWS - 20),
        test_rows=torch.arange(ROWS - 20, ROWS),
        labelled=torch.arange(60),
    )


def code_config(numbers: int | str, **changes: Any) -> Config:
    model = {"network": "cross_view", "representation": numbers, "random_features": 20}
    return small_config("apfed_code", **{"model": model, "train": {"epochs": 1}, **changes})


@pytest.mark.parametrize(("columns", "agreed"), [((4, 12), 2), ((12, 12), 6), ((80, 90), 32)])
def test_passives_settle_on_what_all_of_them_allow(columns: tuple[int, int], agreed: int) -> None:
    session = open_session(code_config("auto"), tables(*columns))
    shapes = {terms.representation.shape for terms in session.contract.passives.values()}
    assert shapes == {(agreed,)}
    assert session.contract.secure_sum["numbers"] == agreed
    assert session.contract.secure_sum["all_can_be_read_of"] == []
    said = f"{agreed} numbers of {sum(columns)} columns"
    assert said in str(session.secure_sum["opened"])
    assert session.active_role.model is not None
    assert session.active_role.model.representation == agreed


@pytest.mark.parametrize("numbers", [3, 4, 32])
def test_a_passive_refuses_more_than_half_of_its_columns(numbers: int) -> None:
    with pytest.raises(ConfigError) as refused:
        open_session(code_config(numbers), tables(4))
    words = (f"{numbers} numbers", "passive-1 allows 2", "4 columns", "model.representation")
    assert not [word for word in words if word not in str(refused.value)]


def test_copies_and_constants_allow_no_more_numbers() -> None:
    data = tables(4)
    rows_NF = data.passives[1].features.clone()
    rows_NF[:, 1] = rows_NF[:, 0] * 2
    rows_NF[:, 2] = 3.0
    other = replace(data.passives[1], features=rows_NF)
    with pytest.raises(ConfigError, match="passive-2 allows 1, half of the 2 columns"):
        open_session(code_config(2), replace(data, passives=(data.passives[0], other)))


def test_common_people_may_allow_fewer_numbers_than_the_table() -> None:
    data = tables(4)
    rows_NF = data.passives[1].features.clone()
    rows_NF[: ROWS // 2, 1:3] = 1.0  # these columns differ among people whom nobody else has
    strangers = tuple(f"s{at}" for at in range(ROWS // 2, ROWS))
    other = replace(
        data.passives[1], features=rows_NF, ids=(*data.passives[1].ids[: ROWS // 2], *strangers)
    )
    with pytest.raises(ConfigError, match=r"passive-2 allows 1, half of the 2 columns.*common"):
        open_session(code_config("auto"), replace(data, passives=(data.passives[0], other)))


def test_one_column_allows_no_number() -> None:
    with pytest.raises(ConfigError, match=r"allows 0, half of the 1 columns.*give it more columns"):
        open_session(code_config("auto"), tables(1))


def test_who_lets_everything_be_read_says_so_by_name() -> None:
    session = open_session(code_config(12, **ALL_READ), tables(4))
    assert session.contract.secure_sum["all_can_be_read_of"] == ["passive-1", "passive-2"]
    assert session.secure_sum["opened"] == "12 numbers of 8 columns: everything can be read"


def test_its_own_file_has_to_agree() -> None:
    session = open_session(code_config(12, **ALL_READ), tables(4))
    own = replace(session.party_session.party, name="passive-1", allow_reading_all=False)
    with pytest.raises(ConfigError, match=r"passive-1.*its own file does not agree"):
        ApfedCode().offer_terms(own)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("method", "columns", "said"),
    [
        ("apfed_code", 12, "6 numbers of 24 columns: at most 25%"),
        ("split_nn_sum", 12, "16 numbers of 24 columns: at most 67%"),
        ("split_nn_sum", 8, "16 numbers of 16 columns: everything can be read"),
    ],
)
def test_plan_says_the_rank(
    method: str, columns: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tables(columns)
    monkeypatch.setattr("secure_apfed.planning.forecast.load_data", lambda *_, **__: data)
    changes = {} if method != "apfed_code" else {"model": code_config("auto").model}
    planned = forecast(small_config(method, **changes))
    assert any(said in warning for warning in planned.warnings)


def test_plan_refuses_what_passives_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tables(4)
    monkeypatch.setattr("secure_apfed.planning.forecast.load_data", lambda *_, **__: data)
    with pytest.raises(ConfigError, match="passive-1 allows 2"):
        forecast(code_config(3))


@pytest.mark.slow
def test_plan_by_declared_tables_counts_all_their_columns() -> None:
    parties = {name: {"file": f"{name}.csv"} for name in ("lab", "shop", "bank")}
    data = {"dataset": "tables", "parties": parties, "active": "lab", "classes": ["0", "1"]}
    shapes = {name: TableShape(rows=80, features=10) for name in parties}
    shapes["lab"] = TableShape(rows=80, features=3, classes=2)
    planned = forecast(code_config("auto", data=data), shapes)
    assert any("5 numbers of 20 columns" in warning for warning in planned.warnings)


@dataclass(frozen=True)
class Played:
    config: Config
    data: VerticalData
    recording: Recording


@cache
def play_run(
    method: str, columns: int, classes: int, changes: tuple[tuple[str, Any], ...]
) -> Played:
    said: dict[str, Any] = {"name": method}
    other = dict(changes)
    if METHODS[method].public_facts.vote_protocol is not None:
        said |= {"prior": "labeller", "help": "always"}
        said |= {"labeller": other.pop("labeller")} if "labeller" in other else {}
    train = {"epochs": 6, "batch_size": 40, "learning_rate": 0.05, "device": "cpu"}
    usual: dict[str, Any] = {"train": train, "transcript": {"keep": "all"}}
    if network := other.pop("network", None):
        usual["model"] = {"network": network, "hidden": [8], "representation": 4}
    if numbers := other.pop("numbers", None):
        usual["model"] = {
            "network": "cross_view" if method == "apfed_code" else "enriched",
            "hidden": [8],
            "representation": numbers,
            "random_features": 20,
        }
    config = small_config(said, **usual, **other)
    data = tables(columns, classes=classes)
    result = run_in_memory(config, None, data=data)
    return Played(config, data, result.recording)


def collect_sums(run: Played) -> tuple[Tensor, NDArray[np.float64]] | None:
    """Return positions (N,) and all sums that the active opened of them in the run, (N, C)."""
    knowledge = Knowledge(classes=len(run.data.classes), victim="passive-1")
    view = recorded.make_view(
        run.recording, ("active",), knowledge=knowledge, behaviour="curious", iterations=1
    )
    seen = [collect_opened_sums(view, epoch) for epoch in list_opened_epochs(view)]
    if not seen:
        return None
    positions = seen[0].positions
    for one in seen:
        positions = positions[torch.isin(positions, one.positions)]
    return positions, torch.cat(
        [one.select_positions(positions) for one in seen], dim=1
    ).double().numpy()


def most_read(run: Played) -> float:
    """R2 of the passive whose columns least squares from 30 known people read best; 0: nothing."""
    found = collect_sums(run)
    if found is None:
        return 0.0
    positions, opened_NC = found
    with seed_draws(0, "known"):
        order = torch.randperm(len(positions)).numpy()
    known = order[:KNOWN]
    others = order[KNOWN:]
    read = [0.0]
    for table in run.data.passives:
        x_NF = table.features[run.recording.alignment[table.name][positions]].double().numpy()
        guess_UF = LeastSquares().fit(opened_NC[known], x_NF[known]).predict(opened_NC[others])
        read.append(compute_r2(guess_UF, x_NF[others]) or 0.0)
    return max(read)


def is_below_rank(run: Played) -> bool:
    """Tell whether the method declares fewer numbers than there are columns."""
    numbers = run.config.method.bound_linear_combinations(run.config, len(run.data.classes))
    tables = run.data.tables if run.config.method.has_joint_svd else run.data.passives
    return numbers < sum(count_columns(table.features) for table in tables)


# What can be read, is: where numbers reach the rank, least squares read everything.
EVERYTHING = [
    ("apfed_code", 3, 4, (("numbers", 8), ("passives", "all"), ("secure_sum", "unclipped"))),
    ("vfedtrans", 3, 4, (("numbers", 9),)),
]


WORDS: dict[Any, Any] = {
    "all": ALL_READ["passives"],
    "unclipped": {"scheme": "plain", "clip": None},  # a clipped row is not linear any more
}


def replace_words(changes: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, WORDS.get(value, value)) for key, value in changes)


def test_summed_linear_representations_tell_most_of_narrow_tables() -> None:
    run = play_run("split_nn_sum", 2, 4, (("network", "linear"),))
    assert not is_below_rank(run)
    assert most_read(run) > 0.8  # weights move from batch to batch, and rows are clipped


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("method", "columns", "classes", "changes"), EVERYTHING, ids=[case[0] for case in EVERYTHING]
)
def test_numbers_that_reach_the_rank_tell_everything(
    method: str, columns: int, classes: int, changes: tuple[tuple[str, Any], ...]
) -> None:
    run = play_run.__wrapped__(method, columns, classes, replace_words(changes))
    assert not is_below_rank(run)
    assert most_read(run) > 0.999


@pytest.mark.slow
def test_the_products_own_attack_reads_everything_then_and_its_score_says_so() -> None:
    run = play_run.__wrapped__("apfed_code", 3, 4, replace_words(EVERYTHING[0][3]))
    choice = AttackChoice(name="sum_regression", options={"shadow_rows": 30, "iterations": 20})
    for result in run_attacks(run.recording, [choice], seed=0):
        assert result.applicable
        assert result.score["r2"] is not None
        assert result.score["r2"] > 0.999
        assert result.advantage is not None
        assert result.advantage > 0.9


# Each method, where it may have many classes and few columns.
CASES = [
    *(
        (method, 3, 8, ())
        for method in METHODS
        if METHODS[method].public_facts.needs_alignment
        and method != "apfed_code"
        and METHODS[method].public_facts.vote_protocol is None
    ),
    ("apfed_code", 8, 4, ()),
    *(
        (method, 3, 8, (("labeller", labeller),))
        for method in ("votes",)
        for labeller in LABELLERS
        if labeller != "private_logistic"
    ),
    ("vfedtrans", 8, 4, (("numbers", 6),)),
    ("joint_teacher_sum", 8, 4, ()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "columns", "classes", "changes"), CASES)
def test_what_is_declared_below_rank_is_not_read(
    method: str, columns: int, classes: int, changes: tuple[tuple[str, Any], ...]
) -> None:
    run = play_run(method, columns, classes, changes)
    numbers = run.config.method.bound_linear_combinations(run.config, classes)
    read = most_read(run)
    assert read <= READ or not is_below_rank(run), (method, numbers, read)
    assert collect_sums(run) is None or numbers > 0 or read <= READ


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("columns", [8, 12])
def test_a_code_within_the_bound_is_not_read(columns: int) -> None:
    run = play_run("apfed_code", columns, 4, ())
    assert is_below_rank(run)
    assert most_read(run) < 0.5


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_how_many_numbers_it_opens(method: str) -> None:
    config = small_config(method)
    numbers = config.method.bound_linear_combinations(config, 4)
    opens = config.method.has_representation_sum or config.method.has_joint_svd
    opens = opens or config.method.averaged_quantity == "pseudo-labels"
    assert 0 < numbers < math.inf if opens else numbers in (0, math.inf)


@pytest.mark.parametrize(
    ("columns", "numbers", "advice"),
    [
        (10, 16, "model.projection of 5 or less"),
        (10, 6, "model.projection of 5 or less"),
        (2, 2, "model.projection of 1 or less"),
        (1, 1, "1 column that differ: .*secure_sum.noise, or take no part"),
        (0, 4, "0 columns that differ: .*secure_sum.noise, or take no part"),
    ],
)
def test_a_passive_with_few_columns_is_warned(columns: int, numbers: int, advice: str) -> None:
    with pytest.warns(NarrowTableWarning, match=f"shop: .*{advice}"):
        warn_if_narrow("shop", columns, numbers)


@pytest.mark.parametrize(("columns", "numbers"), [(10, 5), (11, 5), (2, 1), (784, 64)])
def test_a_passive_with_many_columns_is_not_warned(columns: int, numbers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_narrow("shop", columns, numbers)


PROTECTED: Mapping[str, dict[str, Any]] = {
    "noise under the sum": {
        "secure_sum": {
            "scheme": "plain",
            "masks": "pairwise",
            "clip": 1.0,
            "noise": {"epsilon": 8.0},
        }
    },
    "few numbers": {"model": {"hidden": [8], "representation": 4, "projection": 2}},
}


@pytest.mark.parametrize("method", ["apfed_r", "apfed_c", "apfed"])
def test_a_run_warns_passives_whose_gradients_are_as_wide_as_their_tables(
    method: str, tmp_path: Path
) -> None:
    wide = {"hidden": [8], "representation": 64, "projection": 16}
    config = small_config(method, model=wide, train={"epochs": 1, "batch_size": 64})
    with pytest.warns(NarrowTableWarning, match="passive-1: its gradients have 16 numbers"):
        run_in_memory(config, tmp_path)


@pytest.mark.parametrize("kind", PROTECTED)
def test_a_run_that_protects_them_does_not(kind: str, tmp_path: Path) -> None:
    train = {"epochs": 1, "batch_size": 64}
    config = small_config("apfed_r", **{"train": train, **PROTECTED[kind]})
    with warnings.catch_warnings():
        warnings.simplefilter("error", NarrowTableWarning)
        run_in_memory(config, tmp_path)
