"""Advice in errors of the data readers, typed word for word: each setting that a message proposes
makes the reading succeed, and leaves out no other column.
"""

import ast
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from secure_apfed import run_frames
from secure_apfed.base.faults import Advice, SettingLine, TableError, format_settings, format_value
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.data import load_data
from secure_apfed.data.tables import load_own_tables
from secure_apfed.errors import ConfigError, DataError, SuspectColumnWarning

ROWS = 400
SETTING = re.compile(r"(data\.[\w.]+): (\[[^\]]*\]|\{[^}]*\}|\w+)")
PROPOSERS = ("add_to_list", "drop_from_list", "set_value", "SettingLine")


def good() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": [f"p{row}" for row in range(ROWS)],
            "price": draw.normal(size=ROWS).round(3),
            "fuel": draw.choice(["petrol", "diesel"], ROWS),
            "y": draw.choice(["u", "v"], ROWS),
        }
    )


class Case(NamedTuple):
    """A table that is refused or warned of, and the column whose reading is in question."""

    columns: Mapping[str, Any]
    column: str = "odd"
    own: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}
    ending: str = "csv"
    write: Callable[[pd.DataFrame, Path], object] | None = None
    party: str = "bank"


def cells(*first: Any, then: Callable[[int], Any] = lambda row: row) -> list[Any]:
    return [*first, *(then(row) for row in range(len(first), ROWS))]


MANY = [f"c{row}" for row in range(ROWS)]
FEW = ["low", "high"] * (ROWS // 2)
DAYS = [f"{row % 28 + 1:02d}.03.2024" for row in range(ROWS)]
CASES: dict[str, Case] = {
    "a stray text": Case({"odd": cells("rotary", then=lambda row: 4 + row % 3)}),
    "a stray text beside a list": Case(
        {"odd": cells("rotary", then=lambda row: 4 + row % 3)},
        own={"categorical": ["fuel"], "ignore": ["more"]},
    ),
    "a stray text among many numbers": Case({"odd": cells("rotary")}),
    "decimal commas": Case({"odd": [f"{row % 9},5" for row in range(ROWS)]}),
    "many decimal commas": Case({"odd": [f"{row},5" for row in range(ROWS)]}),
    "shares": Case({"odd": [f"{row % 99} %" for row in range(ROWS)]}),
    "amounts": Case({"odd": [f"{row % 99} EUR" for row in range(ROWS)]}),
    "days first": Case({"odd": DAYS}),
    "days or months first": Case({"odd": [f"0{row % 9 + 1}/03/2024" for row in range(ROWS)]}),
    "years first": Case({"odd": [f"2024/03/{row % 28 + 1:02d}" for row in range(ROWS)]}),
    "dates and texts": Case({"odd": cells("never", then=lambda row: f"{row % 28 + 1}.3.2024")}),
    "dates of two digits": Case({"odd": [f"{row % 28 + 1}.3.24" for row in range(ROWS)]}),
    "dates beside a format": Case({"odd": DAYS}, own={"date_formats": ["%m/%d/%Y"]}),
    "dates beside a format of all": Case({"odd": DAYS}, data={"date_formats": ["%m/%d/%Y"]}),
    "empty cells": Case({"odd": cells(None, then=lambda row: row % 7)}),
    "an empty column": Case({"odd": None}),
    "nothing left": Case({"odd": None}, own={"missing": "drop"}),
    "nothing left of rows": Case(
        {"odd": [1.0, None] * (ROWS // 2), "more": [None, 2.0] * (ROWS // 2)},
        own={"missing": "drop"},
    ),
    "many categories": Case({"odd": MANY}),
    "many codes": Case({"odd": [f"{7 * row:05d}" for row in range(ROWS)]}),
    "many listed categories": Case({"odd": MANY}, own={"categorical": ["odd"]}),
    "texts that are listed as numbers": Case({"odd": FEW}, own={"numeric": ["odd", "price"]}),
    "several texts that are listed as numbers": Case(
        {"odd": MANY, "more": FEW}, own={"numeric": ["more", "odd", "price"]}
    ),
    "the label as a feature": Case({}, column="y", own={"categorical": ["fuel", "y"]}),
    "the label at a passive": Case({"y": 1}, column="y", party="shop"),
    "no name": Case({"": FEW}, column="Unnamed: 4"),
    "codes with leading zeros": Case({"odd": [f"{row % 7:05d}" for row in range(ROWS)]}),
    "words that mean empty": Case({"odd": ["None", "low"] * (ROWS // 2)}, own={"missing": "mean"}),
    "row numbers": Case({"odd": range(ROWS)}),
    "an ID": Case({"odd": MANY}, own={"rare_categories": {"most": 9}}),
    "the label in disguise": Case({"odd": good()["y"].map({"u": "bad", "v": "fine"})}),
    "another ID column": Case({"ID": range(ROWS)}, column="", data={"id_column": "Id_"}),
    "another label column": Case({}, column="", data={"label_column": "Y"}),
    "a column that is not there": Case({}, column="", own={"categorical": ["fule"]}),
    "a label in two spellings": Case({"y": cells("U", then=lambda row: "uv"[row % 2])}, "y"),
    "a label that is no class": Case(
        {"y": cells("w", then=lambda row: "uv"[row % 2])}, "y", data={"classes": ["u", "v"]}
    ),
    "a label in two spellings beside classes": Case(
        {"y": cells("U", then=lambda row: "uv"[row % 2])}, "y", data={"classes": ["u", "v"]}
    ),
    "a label that means empty": Case({"y": ["None", "v", "u", "v"] * (ROWS // 4)}, "y"),
    "a column of no view": Case(
        {"odd": FEW},
        data={"view_columns": {"bank": {"columns": ["price", "fuel"]}, "shop": {"columns": ["w"]}}},
    ),
    "a column that an encoding does not know": Case(
        {"odd": FEW}, own={"encoding": "encoding.json"}
    ),
    "a name that YAML reads otherwise": Case(
        {"no: [1]": cells("rotary", then=lambda row: row % 3)}, column="no: [1]"
    ),
    "a name with signs": Case({'a "b", #c': cells("x", then=lambda row: row % 3)}, 'a "b", #c'),
}


def config_of(case: Case, folder: Path) -> Config:
    """Write the tables of a case, and return its settings."""
    frame = good().assign(**case.columns) if case.party == "bank" else good()
    frame = frame.rename(columns={"ID": "ID_old"}) if not case.column else frame
    if "Id_" in case.data.values():
        frame = frame.rename(columns={"id": "Id"})
    frame.to_csv(folder / "bank.csv", index=False)
    shop = pd.DataFrame({"id": good()["id"], "w": np.arange(ROWS) % 17 + 0.5})
    shop.assign(**(case.columns if case.party == "shop" else {})).to_csv(
        folder / "shop.csv", index=False
    )
    if "encoding" in case.own:
        plain = base_settings(folder, {}, {})
        good().to_csv(folder / "bank.csv", index=False)
        fitted = load_own_tables(Config.model_validate(plain).data, "bank", seed=0)
        (folder / "encoding.json").write_text(fitted.table.encoding.model_dump_json())
        frame.to_csv(folder / "bank.csv", index=False)
    own = {name for name in case.own.get("ignore", ()) if name not in frame}
    if own:
        frame.assign(**dict.fromkeys(own, 1.0)).to_csv(folder / "bank.csv", index=False)
    return Config.model_validate(base_settings(folder, case.own, case.data))


def base_settings(folder: Path, own: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    parties = {"bank": {"file": "bank.csv", **own}, "shop": {"file": "shop.csv"}}
    tables = {"dataset": "tables", "active": "bank", "folder": str(folder), "label_column": "y"}
    return {
        "name": "t",
        "method": "single_view",
        "guard": {"mechanism": "none"},
        "data": {**tables, "parties": parties, **data},
    }


def load_features_and_messages(config: Config, party: str) -> tuple[list[str], list[str]]:
    """Return the columns that are features, and the messages of the reader."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = load_own_tables(config.data, party, seed=0)
    messages = [str(one.message) for one in caught if one.category is SuspectColumnWarning]
    encoding = own.table.encoding
    assert encoding.kind == "columns"
    return [column.name for column in encoding.columns], messages


def proposals(config: Config, party: str) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return what a reader proposes, each as lines to type together, and its messages."""
    try:
        _, messages = load_features_and_messages(config, party)
    except TableError as error:
        (fault,) = error.faults
        return [tuple(map(str, remedy)) for remedy in fault.remedies if remedy], [fault.message]
    lines = [match.group() for text in messages for match in SETTING.finditer(text)]
    return [(line,) for line in lines], messages


def type_in(config: Config, lines: tuple[str, ...]) -> Config:
    """Return the configuration with these lines, as `--set` takes them."""
    overrides = [line.replace(": ", "=", 1) for line in lines]
    return load_config_text(config.model_dump_json(), source="run.yaml", overrides=overrides)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("title", CASES)
def test_advice_that_is_typed_mends_the_table_and_keeps_all_other_columns(
    title: str, tmp_path: Path
) -> None:
    case = CASES[title]
    config = config_of(case, tmp_path)
    settings, messages = proposals(config, case.party)
    assert settings, messages
    assert len(messages) == 1
    quoted = {line for lines in settings for line in lines}
    assert all(line in messages[0] for line in quoted)
    others = {"price", "fuel"} if case.party == "bank" else {"w"}
    readings = [
        (lines, *load_features_and_messages(type_in(config, lines), case.party))
        for lines in settings
    ]
    assert not [lines for lines, columns, _ in readings if not others <= set(columns)]
    assert not [lines for lines, _, said in readings if set(said) & set(messages)]
    if case.column not in ("", "y"):
        assert [case.column not in columns for _, columns, _ in readings] == [
            any(".ignore: " in line for line in lines) for lines in settings
        ]


def config_of_rows_in_a_file(folder: Path) -> Config:
    """Write a table whose rows lie in an array beside it; return settings that overlook this."""
    good().to_csv(folder / "bank.csv", index=False)
    np.save(folder / "rows.npy", np.ones((ROWS, 3), dtype=np.float32))
    pd.DataFrame({"id": good()["id"], "w": 0.5}).to_csv(folder / "shop.csv", index=False)
    return Config.model_validate(base_settings(folder, {"rows": "rows.npy"}, {}))


def test_columns_beside_rows_in_a_file_are_ignored_by_what_is_proposed(tmp_path: Path) -> None:
    config = config_of_rows_in_a_file(tmp_path)
    ((line,),), (message,) = proposals(config, "bank")
    assert line in message
    own = load_own_tables(type_in(config, (line,)).data, "bank", seed=0)
    assert tuple(own.table.features.shape) == (ROWS, 3)


def find_callers() -> set[tuple[str, int]]:
    """Return where readers call what proposes settings: file and line."""
    import secure_apfed.data

    found = set()
    for path in Path(secure_apfed.data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in PROPOSERS:
                    found.add((path.name, node.lineno))
    return found


@pytest.mark.slow
def test_the_cases_go_through_every_proposal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[tuple[str, int]]()

    def note() -> None:
        frame = sys._getframe(2)
        while "secure_apfed/data" not in frame.f_code.co_filename and frame.f_back:
            frame = frame.f_back
        seen.add((Path(frame.f_code.co_filename).name, frame.f_lineno))

    for name in PROPOSERS[:3]:
        own = getattr(Advice, name)

        def count_call(*args: Any, own: Any = own, **more: Any) -> Any:
            note()
            return own(*args, **more)

        monkeypatch.setattr(Advice, name, count_call)
    for place, case in enumerate(CASES.values()):
        folder = tmp_path / str(place)
        folder.mkdir()
        proposals(config_of(case, folder), case.party)
    proposals(config_of_rows_in_a_file(tmp_path), "bank")
    classes = {(file, line) for file, line in find_callers() if file == "labels.py"}
    left_out = {
        (file, line)
        for file, line in find_callers() - classes
        if not any(file == other and abs(line - at) <= 2 for other, at in seen)
        and "SettingLine(" not in source_line(file, line)
    }
    assert not left_out


def source_line(file: str, line: int) -> str:
    import secure_apfed.data

    path = Path(secure_apfed.data.__file__).parent / file
    return path.read_text("utf-8").splitlines()[line - 1]


def faulty_tables(folder: Path) -> Config:
    """Write two tables with several faults each, and one without."""
    wrong = good().assign(
        cylinders=cells("rotary", then=lambda row: 4 + row % 3),
        since=DAYS,
        empty=None,
        price=lambda frame: frame["price"].mask(frame.index == 3),
    )
    wrong.to_csv(folder / "bank.csv", index=False)
    shop = pd.DataFrame({"id": good()["id"], "w": np.arange(ROWS) % 17 + 0.5})
    shop.assign(y=1, share=[f"{row % 9} %" for row in range(ROWS)]).to_csv(
        folder / "shop.csv", index=False
    )
    return Config.model_validate(base_settings(folder, {}, {}))


@pytest.mark.filterwarnings("ignore::secure_apfed.errors.SuspectColumnWarning")
def test_all_faults_of_all_tables_are_told_at_once_and_their_lines_mend_all(
    tmp_path: Path,
) -> None:
    config = faulty_tables(tmp_path)
    with pytest.raises(TableError, match=r"^6 faults:") as raised:
        load_data(config.data, seed=0)
    told = str(raised.value)
    parts = ("'cylinders'", "'since'", "'empty'", "price (1)", "'y'", "'share'")
    assert not [part for part in parts if part not in told]
    pasted = raised.value.settings
    assert pasted.splitlines()[:3] == ["data:", "  parties:", "    bank:"]
    import yaml

    given = yaml.safe_load(pasted)["data"]["parties"]
    mended = config.model_dump(mode="json")
    for party, lines in given.items():
        mended["data"]["parties"][party] |= lines
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = load_data(Config.model_validate(mended).data, seed=0)
    encoding = data.active.encoding
    assert encoding.kind == "columns"
    assert {column.name: column.kind for column in encoding.columns} == {
        "price": "numeric",
        "since": "date",
        "fuel": "categorical",
        "cylinders": "categorical",
    }


@pytest.mark.parametrize("party_says", [None, "error", "drop"])
def test_a_partys_own_word_on_empty_cells_wins(party_says: str | None, tmp_path: Path) -> None:
    case = Case({"odd": cells(None, then=lambda row: row % 7)}, own={"missing": party_says})
    config = config_of(case._replace(data={"missing": "mean"}), tmp_path)
    if party_says == "error":
        with pytest.raises(DataError, match="empty cells in odd"):
            load_own_tables(config.data, "bank", seed=0)
    else:
        own = load_own_tables(config.data, "bank", seed=0)
        assert len(own.table.ids) == ROWS - (party_says == "drop")


@pytest.mark.parametrize("at", ["party", "data"])
def test_dates_of_features_are_days(at: str, tmp_path: Path) -> None:
    formats = {"date_formats": ["%d.%m.%Y"]}
    case = Case({"odd": cells("1.1.1970", "2026-01-31", then=lambda row: "02.01.1970")})
    case = case._replace(own=formats) if at == "party" else case._replace(data=formats)
    own = load_own_tables(config_of(case, tmp_path).data, "bank", seed=0)
    encoding = own.table.encoding
    assert encoding.kind == "columns"
    place = [column.name for column in encoding.columns].index("odd")
    column = encoding.columns[place]
    assert column.kind == "date"
    days = own.table.features[:3, place].double() * column.scale + column.mean
    assert days.tolist() == pytest.approx([0, 20484, 1], abs=0.01)
    again = encoding.encode(pd.DataFrame({"price": [0], "fuel": ["diesel"], "odd": ["3.1.1970"]}))
    assert float(again[0, place] * column.scale + column.mean) == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("word", ["None", "NA", "null", "n/a"])
def test_words_that_mean_empty_are_categories_of_a_listed_column(word: str, tmp_path: Path) -> None:
    case = Case({"odd": [word, "low"] * (ROWS // 2)}, own={"categorical": ["odd"]})
    own = load_own_tables(config_of(case, tmp_path).data, "bank", seed=0)
    names = [own.table.encoding.feature_name(at) for at in range(own.table.features.shape[1])]
    assert f"odd={word}" in names


HEADS = {
    "sep=;": ("sep=;\n", ";"),
    "sep= in capitals with a mark": ("\ufeffSEP=|\r\n", "|"),
    "sep= in quotes": ('"sep=;"\n', ";"),
    "a tab by name": ("sep=\\t\n", "\t"),
    "comments": ('# made by "X\n# at night, in haste, a, b, c\n', ","),
    "a comment and sep=": ("# made\nsep=;\n", ";"),
    "a comment and blank lines": ("# made\n\n\n", ","),
}


@pytest.mark.parametrize("title", HEADS)
def test_lines_above_the_names_are_understood(title: str, tmp_path: Path) -> None:
    above, sign = HEADS[title]
    text = good().assign(odd=1.5).to_csv(index=False, sep=sign)
    (tmp_path / "bank.csv").write_bytes((above + text).encode())
    config = Config.model_validate(base_settings(tmp_path, {}, {}))
    assert load_features_and_messages(config, "bank")[0] == ["price", "odd", "fuel"]
    again = good().assign(id=lambda frame: frame["id"].mask(frame.index == 5, "p4"))
    wrong = above + again.to_csv(index=False, sep=sign)
    (tmp_path / "bank.csv").write_bytes(wrong.encode())
    lines = len(above.split("\n")) - 1 - above.count("\n\n\n") * 2
    with pytest.raises(DataError, match=f"in line {6 + lines}, line {7 + lines};"):
        load_own_tables(config.data, "bank", seed=0)


@pytest.mark.parametrize(
    ("above", "message"),
    [
        ("Report of 2026\n", "line 1 of .*bank.csv has one cell, and line 2 has 4; remove"),
        ("Report of 2026,,,\n\n", "line 1 of .*bank.csv has one cell, and line 3 has 4; remove"),
        ("# made\nA title\n", "line 2 of .*bank.csv has one cell, and line 3 has 4; remove"),
        ("sep=\n", "line 1 of .*bank.csv is 'sep=', and one sign between cells is expected"),
        ("sep=ab\n", "line 1 of .*bank.csv is 'sep=ab', and one sign between cells is expected"),
        ("# x\n" * 250, "first 200 lines of .*bank.csv begin with # or are blank; remove them"),
    ],
)
def test_lines_above_the_names_are_named(above: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bank.csv").write_text(above + good().to_csv(index=False))
    config = Config.model_validate(base_settings(tmp_path, {}, {}))
    with pytest.raises(DataError, match=message):
        load_own_tables(config.data, "bank", seed=0)


def test_a_line_that_says_the_separator_mends_a_file_with_another(tmp_path: Path) -> None:
    text = good().to_csv(index=False, sep=";")
    (tmp_path / "bank.csv").write_text(text)
    config = Config.model_validate(base_settings(tmp_path, {}, {}))
    with pytest.raises(DataError, match="a line above it that says sep=;") as raised:
        load_own_tables(config.data, "bank", seed=0)
    (tmp_path / "bank.csv").write_text(f"{str(raised.value).split()[-1]}\n{text}")
    assert load_features_and_messages(config, "bank")[0] == ["price", "fuel"]


STRANGE: dict[str, Any] = {
    "intervals": lambda: pd.arrays.IntervalArray.from_breaks(np.arange(ROWS + 1.0)),
    "periods": lambda: pd.period_range("2020-01", periods=ROWS, freq="D"),
    "complex numbers": lambda: np.arange(ROWS) + 1j,
    "cells of several kinds": lambda: [1, "a"] * (ROWS // 2),
}


@pytest.mark.parametrize("subject", [*STRANGE, "binned intervals"])
def test_errors_of_frames_name_party_and_column(subject: str) -> None:
    odd = STRANGE[subject]() if subject in STRANGE else pd.cut(good()["price"], 3)
    shop = pd.DataFrame({"id": good()["id"], "odd": odd})
    holds = subject.removeprefix("binned ")
    with pytest.raises(DataError, match=f"^shop: column 'odd' holds {holds}.*; "):
        run_frames(good(), {"shop": shop}, label="y", baselines=False)


def test_frames_take_settings_of_columns_and_no_others() -> None:
    odd = cells("rotary", then=lambda row: str(row % 3))
    shop = pd.DataFrame({"id": good()["id"], "u": np.arange(ROWS) % 2, "odd": odd})
    given: dict[str, Any] = {
        "label": "y",
        "method": "single_view",
        "baselines": False,
        "train": {"epochs": 1},
    }
    with pytest.raises(DataError, match=r"^shop: 1 of .*data.parties.shop.categorical: .odd"):
        run_frames(good(), {"shop": shop}, **given)
    named = {"parties": {"shop": {"categorical": ["odd"]}}}
    found = run_frames(good(), {"shop": shop}, data=named, **given)
    assert found.config.data.parties is not None
    assert found.config.data.parties["shop"].categorical == ("odd",)
    with pytest.raises(ConfigError, match=r"data.parties.shop.file: the frames say this"):
        run_frames(good(), {"shop": shop}, data={"parties": {"shop": {"file": "x.csv"}}}, **given)
    with pytest.raises(ConfigError, match="there is no frame of shops"):
        run_frames(good(), {"shop": shop}, data={"parties": {"shops": {}}}, **given)


@pytest.mark.parametrize(
    "value",
    [
        "no",
        "a b",
        "1",
        "",
        "ä",
        "a: b",
        "x,y",
        "\x1b[2J",
        "- a",
        ["y", 2],
        {"most": 64},
        "None",
        1.5,
    ],
)
def test_values_are_yaml_that_reads_back_the_same(value: Any) -> None:
    import yaml

    line = SettingLine(("data", "x y"), value, "a remark")
    assert yaml.safe_load(format_settings([line])) == {"data": {"x y": value}}
    assert yaml.safe_load(f"- {format_value(value)}") == [value]
    assert "\x1b" not in format_settings([line])
