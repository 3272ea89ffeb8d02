"""Waiting times of users: whole runs by phase, the start of commands, and the encoding of IDs.

`USER`, cases `METHOD/FORMAT/ROWS`: `secure-apfed run` of three parties with 20 columns each, all
protection but the sum's cipher, baselines and report included, in a process of its own that may use
every core. `seconds` are by the clock; `peak_memory` in bytes; `growth` is the largest exponent by
which a phase of a second or more grew from the case of a tenth of the rows; `forecast` is what
`plan` says of the phases that it forecasts, by what they took; `floor_seconds` what pandas takes to
read the same files. One run each.

`STARTUP`, cases `help`, `doctor`, `plan`, `predict` (of four rows) and `run` (APFed-C, without
baselines) on 178 rows of three CSV files, and `evaluate`, which only imports that function:
processor seconds of the whole process; the peer is one that only imports torch.

`IDS`, cases `encode/ROWS`: texts as bytes that are checked to differ; the peer checks nothing.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apfed_bench.rows import (
    Bench,
    Group,
    Row,
    compare_calls,
    compute_median_ratio,
    make_row,
    make_single_group,
    time_calls_in_turns,
)
from apfed_protocols.ids import IdNormalisation, encode_ids
from secure_apfed.base.phases import PhaseName
from secure_apfed.config.plain_yaml import format_yaml

_SIZES = (10_000, 100_000, 1_000_000)
_QUICK_SIZES = (1_000,)
_FORMATS = ("csv", "parquet")
_PARTIES = ("active", "bank", "shop")
_COLUMNS_PER_PARTY = 20
_TIMEOUT_S = 3600
_SHORTEST_PHASE_S = 1.0
_STARTUP_CASES = ("help", "doctor", "evaluate", "plan", "predict", "run")
_STARTUP_ROWS = 178
_IMPORT_EVALUATE = "from apfed_attacks import evaluate"
_PHASES: tuple[PhaseName, ...] = ("start", "read", "align", "train", "baselines", "report")
_UNENCRYPTED: Mapping[str, Any] = {
    "secure_sum": {"scheme": "plain", "masks": "pairwise"},
    "guard": {"mechanism": "none"},
}
# Further settings of a run of each method, and of its data.
_RUN_AND_DATA_SETTINGS_BY_METHOD: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "apfed_c": ({}, {}),
    "votes": ({"model": {"network": "random_features"}}, {"labelled": 200}),
}


def _write_tables(folder: Path, row_count: int, file_format: str) -> float:
    """Write the tables of all parties, each in a random order of its own.

    `file_format`: file format of the tables, csv or parquet. Returns the seconds that pandas takes
    to read them all.
    """
    rng = np.random.default_rng(0)
    read_seconds = 0.0
    # Four hidden factors of a person, which all parties' columns and the label depend on.
    hidden_factors = rng.normal(size=(row_count, 4))
    label_scores = (
        hidden_factors[:, 0]
        + 0.5 * hidden_factors[:, 1] * hidden_factors[:, 2]
        + rng.normal(size=row_count)
    )
    labels = (label_scores > 0).astype(int)
    ids = np.array([f"person-{row:07d}" for row in range(row_count)])
    for party in _PARTIES:
        values = hidden_factors @ rng.normal(size=(4, _COLUMNS_PER_PARTY)) + rng.normal(
            size=(row_count, _COLUMNS_PER_PARTY)
        )
        names = [f"{party}_{column}" for column in range(_COLUMNS_PER_PARTY)]
        frame = pd.DataFrame(values.round(4), columns=names)
        frame.insert(0, "id", ids)
        if party == _PARTIES[0]:
            frame["label"] = labels
        shuffled = frame.iloc[rng.permutation(row_count)]
        path = folder / f"{party}.{file_format}"
        write = shuffled.to_csv if file_format == "csv" else shuffled.to_parquet
        read = pd.read_csv if file_format == "csv" else pd.read_parquet
        write(path, index=False)
        began = time.perf_counter()
        read(path)
        read_seconds += time.perf_counter() - began
    return read_seconds


def _write_run(folder: Path, method: str, file_format: str) -> None:
    """Write `run.yaml` of one epoch of a method, on the tables in the same folder.

    `file_format`: file format of the tables, csv or parquet.
    """
    method_settings, data_settings = _RUN_AND_DATA_SETTINGS_BY_METHOD[method]
    run_settings = {
        "name": "own",
        "method": method,
        **_UNENCRYPTED,
        **method_settings,
        "train": {"epochs": 1},
        "data": {
            "dataset": "tables",
            "folder": str(folder),
            "classes": ["0", "1"],
            **data_settings,
            "parties": {party: {"file": f"{party}.{file_format}"} for party in _PARTIES},
        },
    }
    (folder / "run.yaml").write_text(format_yaml(run_settings))


def _measure_run(method: str, file_format: str, row_count: int) -> Row:
    """Return the row of one run of a method, with the seconds of each phase.

    `floor_seconds` are those that pandas takes to read the same files. `forecast` is the ratio of
    the seconds that `secure-apfed plan` predicts to the measured ones. `file_format`: file format
    of the tables, csv or parquet.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pandas_seconds = _write_tables(folder, row_count, file_format)
        _write_run(folder, method, file_format)
        plan_output = _run_command("plan", "run.yaml", "--baselines", "--json", folder=folder)
        run_output = _run_command(
            "run", "run.yaml", "--profile", "--json", "--output", "out", folder=folder
        )
    planned_seconds_by_phase = json.loads(plan_output)["seconds"]
    measured_phases = json.loads(run_output)["phases"]
    return make_row(
        f"{method}/{file_format}/{row_count}",
        sum(phase["seconds"] for phase in measured_phases.values()),
        processor_seconds=sum(phase["processor_seconds"] for phase in measured_phases.values()),
        peak_memory=max(phase["peak_bytes"] for phase in measured_phases.values()),
        floor_seconds=pandas_seconds,
        forecast=sum(planned_seconds_by_phase.values())
        / sum(measured_phases[name]["seconds"] for name in planned_seconds_by_phase),
        **{f"{name}_seconds": measured_phases[name]["seconds"] for name in _PHASES},
    )


def _measure_runs(
    method: str, file_format: str, sizes: tuple[int, ...], wanted_cases: Collection[str]
) -> Iterator[Row]:
    """Yield the rows of the wanted cases of a method, in ascending order of sizes.

    If the previous size, a tenth of the rows, is also wanted, `growth` is the largest exponent by
    which a phase of a second or more grew: 1 is linear. `file_format`: file format of the tables,
    csv or parquet. `sizes`: numbers of rows.
    """
    previous_row: Row | None = None
    for row_count in sizes:
        if f"{method}/{file_format}/{row_count}" not in wanted_cases:
            previous_row = None
            continue
        row = _measure_run(method, file_format, row_count)
        if previous_row is not None:
            row["growth"] = max(
                math.log10(row[field] / previous_row[field])
                for field in (f"{name}_seconds" for name in _PHASES)
                if row[field] >= _SHORTEST_PHASE_S
            )
        yield row
        previous_row = row


USER = Bench(
    make_groups=lambda quick: [
        Group(
            [f"{method}/{form}/{rows}" for rows in (_QUICK_SIZES if quick else _SIZES)],
            partial(_measure_runs, method, form, _QUICK_SIZES if quick else _SIZES),
        )
        for method in _RUN_AND_DATA_SETTINGS_BY_METHOD
        for form in _FORMATS
    ],
    further_fields=(
        "processor_seconds",
        "peak_memory",
        "growth",
        "forecast",
        "read_seconds",
        "floor_seconds",
        "align_seconds",
        "train_seconds",
        "baselines_seconds",
    ),
)


def _run_command(*arguments: str, folder: Path) -> str:
    """Run `secure-apfed` with these arguments in a folder and return its output."""
    return _run_python("-m", "secure_apfed.cli", *arguments, folder=folder)


def _run_python(*arguments: str, folder: Path) -> str:
    """Return the output of Python in a process of its own.

    `arguments`: arguments of the interpreter. `folder`: working directory.

    Raises RuntimeError: the process failed; the message ends with its error output.
    """
    process = subprocess.run(  # noqa: S603 - this very interpreter
        [sys.executable, "-W", "ignore", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {process.stderr[-2000:]}")
    return process.stdout


def _read_children_clock() -> float:
    """Return the processor seconds of all processes that this one started and that ended."""
    times = os.times()
    return times.children_user + times.children_system


def _measure_starts(repetitions: int, wanted_cases: Collection[str]) -> Iterator[Row]:
    """Yield the row of each wanted case: processor seconds of its process.

    They are compared with a process that only imports torch. `repetitions`: how often each case is
    measured.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_tables(folder, _STARTUP_ROWS, "csv")
        _write_run(folder, "apfed_c", "csv")
        _run_command("run", "run.yaml", "--no-baselines", "--output", "model", folder=folder)
        pd.read_csv(folder / "active.csv").head(4).to_csv(folder / "four.csv", index=False)
        arguments_by_command: dict[str, tuple[str, ...]] = {
            "help": ("--help",),
            "doctor": ("doctor",),
            "plan": ("plan", "run.yaml"),
            "predict": ("predict", "--model", "model", "--data", "four.csv"),
            "run": ("run", "run.yaml", "--no-baselines", "--output"),
        }

        def run_case(case: str) -> str:
            """Run one command; `run` writes to a new folder each time."""
            new_folder = (f"out-{time.monotonic_ns()}",) if case == "run" else ()
            return _run_command(*arguments_by_command[case], *new_folder, folder=folder)

        call_by_case = {case: partial(run_case, case) for case in arguments_by_command}
        call_by_case["evaluate"] = partial(_run_python, "-c", _IMPORT_EVALUATE, folder=folder)
        wanted_call_by_case = {
            case: call_by_case[case] for case in _STARTUP_CASES if case in wanted_cases
        }
        peer_call = {"import torch": partial(_run_python, "-c", "import torch", folder=folder)}
        seconds_by_case = time_calls_in_turns(
            peer_call | wanted_call_by_case, repetitions=repetitions, clock=_read_children_clock
        )
        import_seconds = seconds_by_case["import torch"]
        for case in wanted_call_by_case:
            yield make_row(
                case,
                statistics.median(seconds_by_case[case]),
                peer="import torch",
                ratio=compute_median_ratio(seconds_by_case[case], import_seconds),
                peer_seconds=statistics.median(import_seconds),
            )


STARTUP = Bench(
    make_groups=lambda quick: [Group(_STARTUP_CASES, partial(_measure_starts, 1 if quick else 5))],
    further_fields=("peer_seconds",),
)


def _measure_encoding(case: str, id_count: int, repetitions: int) -> Row:
    """Return the row of the encoding of texts as IDs, against `str.encode`, which checks nothing.

    `case`: name of the case in the table. `id_count`: number of IDs. `repetitions`: number of
    measured calls of each.
    """
    texts = [f"person-{row:07d}" for row in range(id_count)]
    rules = IdNormalisation()
    row = compare_calls(
        case,
        lambda: encode_ids("active", texts, rules),
        lambda: [text.encode() for text in texts],
        peer="str.encode",
        repetitions=repetitions,
    )
    return {**row, "per_id_seconds": row["seconds"] / id_count}


IDS = Bench(
    make_groups=lambda quick: [
        make_single_group(f"encode/{rows}", _measure_encoding, rows, 3 if quick else 11)
        for rows in ((100_000,) if quick else (100_000, 1_000_000))
    ],
    further_fields=("peer_seconds", "per_id_seconds"),
)
