"""Users' own tables in studies: a folder of CSV files, and `splits.yaml` that splits their columns.

`splits.yaml` says of each NAME (NAME.csv or NAME.csv.gz, with columns `id` and `label`) who holds
which columns, the party called `active` and at least one other, and by which measure it is judged:

    vowel: {measure: accuracy, active: [V2, V3, V4], passive-1: [V5, V6, V7]}

Columns that nobody holds are left out. Empty cells take their column's mean, or no category.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from secure_apfed.errors import ConfigError

_SPLITS_FILE = "splits.yaml"
_MEASURE_ALIASES = {"macro_f1": "f1"}


def load_splits(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings `data` and `measure` of the runs on each table of a folder, by table
    name.

    `splits.yaml` in the folder names the tables, and the columns that each party holds.

    Raises ConfigError: `splits.yaml` cannot be read, or a table lacks its file or named columns.
    """
    path = folder / _SPLITS_FILE
    try:
        entry_by_table = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); it cuts the tables there") from error
    if not isinstance(entry_by_table, dict) or not all(
        isinstance(entry, dict) for entry in entry_by_table.values()
    ):
        raise ConfigError(f"{path}: expected of each table its measure and each party's columns")
    return {
        str(name): _make_table_settings(path, str(name), entry)
        for name, entry in entry_by_table.items()
    }


def _make_table_settings(path: Path, name: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings `data` and `measure` of the runs on one table.

    `path`: path of `splits.yaml`. `name`: name of the table. `entry`: the table's entry there, with
    the measure, and each party's columns.

    Raises ConfigError: the table's file or a second party is missing, or the file lacks columns
    that `entry` names.
    """
    columns_by_party = {
        party: [*map(str, columns)] for party, columns in entry.items() if isinstance(columns, list)
    }
    if "active" not in columns_by_party or len(columns_by_party) < 2:
        raise ConfigError(f"{path}: {name} needs columns of the party active and of another")
    existing_files = [
        file for file in (f"{name}.csv", f"{name}.csv.gz") if (path.parent / file).is_file()
    ]
    if not existing_files:
        raise ConfigError(f"{path}: there is no {name}.csv or {name}.csv.gz beside it")
    frame = pd.read_csv(path.parent / existing_files[0], dtype=str)
    if missing_columns := {"id", "label", *chain(*columns_by_party.values())} - set(frame):
        raise ConfigError(
            f"{path}: {existing_files[0]} lacks the columns {', '.join(sorted(missing_columns))}"
        )
    # All parties read the same file, each without the columns of the others.
    settings_by_party = {}
    for party, columns in columns_by_party.items():
        used_columns = {*columns, "id"}
        if party == "active":
            used_columns.add("label")
        settings_by_party[party] = {
            "file": existing_files[0],
            "missing": "mean",
            "ignore": [column for column in frame if column not in used_columns],
        }
    classes = sorted(frame["label"].dropna().unique())
    data = {
        "dataset": "tables",
        "folder": str(path.parent),
        "parties": settings_by_party,
        "classes": classes,
    }
    measure = str(entry.get("measure", "accuracy"))
    return {"data": data, "measure": _MEASURE_ALIASES.get(measure, measure)}
