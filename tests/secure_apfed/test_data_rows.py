"""Rows that are no columns: arrays of files, images of a folder, and what a party's code makes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from apfed_experiments.baselines import measure_run_baselines
from secure_apfed import Active, ImageFiles, Passive
from secure_apfed.attacks import load_recording
from secure_apfed.config import Config
from secure_apfed.data import compute_files_digest, load_data, load_own_tables, row_sources
from secure_apfed.data.lazy_rows import is_lazy
from secure_apfed.data.records import PartyTable, VerticalData
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.interfaces.training import train
from secure_apfed.learning.own_code import refuse_user_functions, split_user_functions
from secure_apfed.runs.run import run, run_in_memory
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.plugins import import_callable, reading_settings

N = 40
IDS = [f"person-{number}" for number in range(N)]
LABELS = ["yes" if number % 3 else "no" for number in range(N)]
ROWS = torch.randint(0, 256, (N, 1, 4, 5), generator=torch.Generator().manual_seed(0)) / 255

CODE = """
import numpy as np
import torch
from torch import nn

stored = np.load("stored.npy")
names = [f"person-{number}" for number in range(len(stored))]


def rows_of(ids):
    places = {name: place for place, name in enumerate(names)}
    return stored[[places[name] for name in ids]]


def everything():
    return names, torch.from_numpy(stored), ["yes" if k % 3 else "no" for k in range(len(names))]


def ids_and_rows():
    return names, stored


class Rows:
    def __len__(self):
        return len(stored)

    def __getitem__(self, index):
        return stored[index], 0


def nothing():
    return None


def failing(ids):
    return 1 / 0


def encode(features):
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 6))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the same rows in every form, from which a command is started."""
    table = pd.DataFrame({"id": IDS, "label": LABELS})
    table.to_csv(tmp_path / "people.csv", index=False)
    table[["id"]].to_csv(tmp_path / "ids.csv", index=False)
    names = [f"{number:02}.png" for number in range(N)]
    table.assign(image=names).to_csv(tmp_path / "images.csv", index=False)
    (tmp_path / "scans").mkdir()
    for name, row in zip(names, ROWS, strict=True):
        Image.fromarray((row[0] * 255).byte().numpy()).save(tmp_path / "scans" / name)
    np.save(tmp_path / "rows.npy", ROWS.numpy())
    np.save(tmp_path / "stored.npy", ROWS.numpy())
    np.savez(tmp_path / "rows.npz", scans=ROWS.numpy())
    np.savez(tmp_path / "whole.npz", ids=IDS, rows=ROWS.numpy(), labels=LABELS)
    save_file({"scans": ROWS}, tmp_path / "rows.safetensors")
    numbers = {"ids": torch.arange(N), "labels": torch.arange(N) % 2}
    save_file({"rows": ROWS, **numbers}, tmp_path / "whole.safetensors")
    (tmp_path / "my_rows.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


FORMS: Mapping[str, dict[str, Any]] = {
    "npy": {"file": "people.csv", "rows": "rows.npy"},
    "npz": {"file": "people.csv", "rows": "rows.npz"},
    "safetensors": {"file": "people.csv", "rows": "rows.safetensors"},
    "images": {"file": "images.csv", "rows": "scans"},
    "code of IDs": {"file": "people.csv", "rows": "my_rows:rows_of"},
    "a data set of code": {"file": "people.csv", "rows": "my_rows:Rows"},
    "npz with IDs and labels": {"rows": "whole.npz"},
    "safetensors with IDs and labels": {"rows": "whole.safetensors"},
    "code with IDs and labels": {"rows": "my_rows:everything"},
}


def name_tables(**clinic: Any) -> DataSettings:
    said = {"dataset": "tables", "active": "clinic", "parties": {"clinic": clinic}}
    return DataSettings.model_validate(said)


def load_table(**clinic: Any) -> PartyTable:
    return load_own_tables(name_tables(**clinic), "clinic", seed=0).table


@pytest.mark.parametrize("form", FORMS)
def test_each_form_holds_the_same_rows(form: str, here: Path) -> None:
    table = load_table(**FORMS[form])
    assert torch.equal(table.features[torch.arange(N)], ROWS)
    assert table.shape == (1, 4, 5)
    expected = IDS if "safetensors with" not in form else [str(number) for number in range(N)]
    assert list(table.ids) == expected
    assert table.labels is not None
    assert len(set(table.labels.tolist())) == 2


@pytest.mark.parametrize("form", ["npy", "images", "code with IDs and labels"])
def test_a_few_rows_are_chosen_of_each(form: str, here: Path) -> None:
    settings = name_tables(**FORMS[form]).model_copy(update={"limit": 10})
    table = load_own_tables(settings, "clinic", seed=0).table
    assert len(table.ids) == 20  # ten to train, and a quarter of all to test
    places = [IDS.index(name) for name in table.ids]
    assert torch.equal(table.features[torch.arange(20)], ROWS[places])


def test_images_are_read_when_they_are_asked_for(here: Path) -> None:
    table = load_table(**FORMS["images"])
    (here / "scans" / "07.png").unlink()
    assert is_lazy(table.features)
    assert torch.equal(table.features[torch.arange(5)], ROWS[:5])
    with pytest.raises(DataError, match="clinic: item 7 of its data set cannot be read"):
        table.features[torch.arange(5, 10)]


def test_a_large_array_is_read_row_by_row(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sources, "MAX_BYTES_IN_MEMORY", 100)
    features = load_table(**FORMS["npy"]).features
    assert is_lazy(features)
    assert torch.equal(features[torch.tensor([3, 1])], ROWS[[3, 1]])


def test_images_are_handed_in_from_python(here: Path) -> None:
    names = [f"{number:02}.png" for number in range(N)]
    images = ImageFiles("scans", names)
    assert len(images) == N
    assert torch.equal(images[3], ROWS[3])
    assert ImageFiles("scans", names, channels=3, size=(2, 6))[3].shape == (3, 2, 6)


REFUSED: Mapping[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such file": ({"rows": "no.npz"}, DataError, "no.npz cannot be read"),
    "a file of another kind": ({"rows": "rows.xlsx"}, DataError, "is no file of arrays; expected"),
    "an array without IDs": ({"rows": "rows.npz"}, DataError, "has no array ids and labels"),
    "an array beside fewer IDs": (
        {"file": "short.csv", "rows": "rows.npy"},
        DataError,
        "have 3 IDs, 40 rows, 3 labels",
    ),
    "objects": ({"file": "people.csv", "rows": "objects.npy"}, DataError, "holds no plain numbers"),
    "texts": ({"file": "people.csv", "rows": "texts.npy"}, DataError, "expected numbers, as of"),
    "a damaged file": (
        {"file": "people.csv", "rows": "bad.safetensors"},
        DataError,
        "cannot be read",
    ),
    "two arrays": (
        {"file": "people.csv", "rows": "two.npz"},
        DataError,
        "call the one that has the rows 'rows'",
    ),
    "single numbers": (
        {"file": "people.csv", "rows": "flat.npy"},
        DataError,
        r"give one column as rows\[:, None\]",
    ),
    "numbers that are none": ({"file": "people.csv", "rows": "nan.npy"}, DataError, "NaN"),
    "other columns": (
        {"file": "images.csv", "rows": "rows.npy"},
        DataError,
        r"no features: image; say data\.parties\.clinic\.ignore: \[image\]",
    ),
    "no column of images": ({"file": "people.csv", "rows": "scans"}, DataError, "got none: name"),
    "two columns of images": (
        {"file": "two.csv", "rows": "scans"},
        DataError,
        "got image, other: name the table .* and other columns under ignore",
    ),
    "an image out of its folder": (
        {"file": "outside.csv", "rows": "scans"},
        DataError,
        "leads out of the folder",
    ),
    "no image": ({"file": "empty.csv", "rows": "scans"}, DataError, "no image in 1 rows"),
    "images without a table": ({"rows": "scans"}, DataError, "got none: name the table as"),
    "an image of many bits": (
        {"file": "images.csv", "rows": "deep"},
        DataError,
        "00.png has pixels of mode I;16; save it with 8 bits",
    ),
    "lists of columns": (
        {"file": "people.csv", "rows": "rows.npy", "numeric": ["x"]},
        ValueError,
        "numeric is of columns",
    ),
    "a tuple beside a table": (
        {"file": "people.csv", "rows": "my_rows:ids_and_rows"},
        DataError,
        "returns a tuple beside a table",
    ),
    "code without labels": ({"rows": "my_rows:ids_and_rows"}, DataError, "returns a tuple of 2"),
    "code that makes nothing": ({"rows": "my_rows:nothing"}, DataError, "returns a NoneType"),
    "code that fails": (
        {"file": "people.csv", "rows": "my_rows:failing"},
        DataError,
        r"failing fails in line \d+ of my_rows.py: ZeroDivisionError: division by zero",
    ),
    "code that is not there": ({"rows": "my_rows:absent"}, ConfigError, "has no 'absent'"),
    "code that is not named": (
        {"rows": "own"},
        ConfigError,
        r'names it in its own file, as code: \{rows: "my_data:make_rows"\}',
    ),
}


@pytest.fixture
def spoilt(here: Path) -> Path:
    """The folder with files that are refused, too."""
    people = pd.read_csv(here / "images.csv")
    people[["id", "label"]].head(3).to_csv(here / "short.csv", index=False)
    people.assign(image="../x.png").to_csv(here / "outside.csv", index=False)
    people.assign(other=1).to_csv(here / "two.csv", index=False)
    (here / "deep").mkdir()
    Image.fromarray(np.ones((4, 5), dtype=np.uint16)).save(here / "deep" / "00.png")
    people.loc[4, "image"] = None
    people.to_csv(here / "empty.csv", index=False)
    np.save(here / "objects.npy", np.array([{}] * N, dtype=object), allow_pickle=True)
    np.save(here / "texts.npy", np.array([["a"]] * N))
    np.save(here / "flat.npy", np.ones(N))
    np.save(here / "nan.npy", np.full((N, 2), np.nan))
    np.savez(here / "two.npz", one=np.ones((N, 2)), other=np.ones((N, 2)))
    (here / "bad.safetensors").write_bytes(b"no tensors at all")
    return here


@pytest.mark.parametrize("case", REFUSED)
def test_what_holds_no_rows_is_refused(case: str, spoilt: Path) -> None:
    clinic, error, advice = REFUSED[case]
    with pytest.raises(error, match=advice):
        load_config_table(clinic)


def load_config_table(clinic: Mapping[str, Any]) -> None:
    config = Config.model_validate({**make_settings(), "data": name_data(clinic)})
    load_own_tables(config.data, "clinic", seed=0)


def test_the_advice_on_other_columns_works(here: Path) -> None:
    table = load_table(file="images.csv", rows="rows.npy", ignore=["image"])
    assert table.shape == (1, 4, 5)


def name_data(clinic: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: {"file": "ids.csv", "rows": "rows.npy"} for name in ("lab", "registry")}
    parties = {"clinic": clinic, **others}
    return {"dataset": "tables", "active": "clinic", "parties": parties, "classes": ["no", "yes"]}


def make_settings() -> dict[str, Any]:
    return {
        "name": "rows",
        "party_seeds": "shared_for_comparison",
        "method": "apfed_r",
        "data": name_data({"rows": "my_rows:everything"}),
        "train": {"epochs": 1, "batch_size": 10, "evaluate_every": 1},
        "secure_sum": {"scheme": "plain", "masks": "pairwise"},
        "alignment": {"protocol": "ecdh"},
        "guard": {"mechanism": "none"},
        "model": {"network": "my_rows:encode", "projection": 4},
        "passives": {"default": {"model": {"network": "mlp", "projection": 4}}},
    }


def parameters_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_a_run_by_names_equals_one_by_rows_that_are_handed_in(here: Path) -> None:
    named = run_in_memory(Config.model_validate(make_settings()), here / "run")
    assert named.own_networks is not None

    def encode(features: tuple[int, ...]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(20, 6))

    handed = train(
        Active("clinic", IDS, "rows.npy", LABELS, encoder=encode),
        [Passive(name, IDS, here / "rows.npy") for name in ("lab", "registry")],
        method="apfed_r",
        epochs=1,
        batch_size=10,
        secure_sum="masked",
        alignment="ecdh",
        model={"projection": 4},
        party_seeds="shared_for_comparison",
        baselines=False,
    )
    assert torch.equal(
        parameters_of(handed.model),
        torch.cat(
            [parameters_of(named.own_networks.encoder), parameters_of(named.own_networks.head)]
        ),
    )


def test_a_run_of_images_is_finished_without_local_models(here: Path) -> None:
    settings = {**make_settings(), "data": name_data(FORMS["images"])}
    config = Config.model_validate(settings)
    result = run_in_memory(config, here / "run")
    assert measure_run_baselines(config, here / "run", result.trained) is None
    assert load_recording(here / "run", encoder=import_callable("my_rows:encode", setting="")).model


@pytest.mark.parametrize("form", ["npy", "images", "code of IDs"])
def test_other_rows_have_another_digest(form: str, here: Path) -> None:
    settings = name_tables(**FORMS[form])
    before = compute_files_digest(settings)
    assert compute_files_digest(settings) == before
    spoil: Mapping[str, Callable[[], object]] = {
        "npy": lambda: np.save(here / "rows.npy", 1 - ROWS.numpy()),
        "images": lambda: (here / "scans" / "03.png").unlink(),
        "code of IDs": lambda: (here / "people.csv").write_text("id,label\na,yes\nb,no\n"),
    }
    spoil[form]()
    assert compute_files_digest(settings) != before


def test_nobody_names_what_makes_anothers_rows(here: Path) -> None:
    (here / "never_loaded.py").write_text("raise SystemExit('it was imported')")
    settings = {**make_settings(), "data": name_data({"rows": "never_loaded:rows"})}
    config = Config.model_validate(settings)
    with pytest.raises(ConfigError, match=r"data\.parties\.clinic\.rows.*or rows: own"):
        refuse_user_functions(config, source="the proposal")
    shared, named = split_user_functions(config, "clinic", ("lab", "registry"))
    assert shared.data.parties is not None
    assert shared.data.parties["clinic"].rows == "own"
    assert shared.data.parties["lab"].rows == "rows.npy"
    assert named["clinic"].rows == "never_loaded:rows"
    assert named["lab"].rows is None


def test_what_somebody_else_wrote_names_no_code(here: Path) -> None:
    (here / "never_loaded.py").write_text("raise SystemExit('it was imported')")
    with reading_settings(are_own=False):
        settings = name_tables(rows="never_loaded:others_rows")
    with pytest.raises(ConfigError, match="only the party that runs code may name it"):
        load_own_tables(settings, "clinic", seed=0)


@pytest.mark.slow
def test_parties_in_processes_of_their_own_read_the_same_rows(here: Path) -> None:
    config = Config.model_validate(make_settings())
    for transport in ("memory", "local"):
        run(config, here / transport, transport=transport)
    weights = [
        (here / transport / "model.safetensors").read_bytes() for transport in ("memory", "local")
    ]
    assert weights[0] == weights[1]


def test_all_parties_are_loaded_with_their_own(here: Path) -> None:
    data = load_data(Config.model_validate(make_settings()).data, seed=0)
    assert isinstance(data, VerticalData)
    assert [table.shape for table in data.tables] == [(1, 4, 5)] * 3
