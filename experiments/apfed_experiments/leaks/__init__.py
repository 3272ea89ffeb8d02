"""`secure-apfed study leaks`: seventeen tables, nearly all of live runs of all parties.

`inversion`: contrastive inversion by an honest active, against the number of passives (APFed-C).
`chosen`: representations that the active chose (APFed-C). `decoder`: chosen representations against
passives that decode (APFed-R). `noise`: both against noise under the sum. `isolation`: one
passive's part of the sum, rule by rule. `labels`: what passives read out of representations, at
once and over time. `joint_inversion` and `hijacking`: what a curious and a malicious active of TVFL
rebuild; `reversed_hijacking`: a malicious passive of APFed-C. `stuffing`: guessed IDs in
intersections.

Of votes (a passive's class scores for people without a label): `few_labels`: what is read of votes,
APFed-C and joint training with few labels. `chosen_labels`: an active that chooses the labels that
it shows. `repeated_votes`: new runs on the same people. `vote_membership`: whether the votes of two
runs reveal who is in a passive's table. `poisoned_votes`: a passive that spoils the student.

`integrity`: a passive that spoils or steers the model by gradients, representations or votes.

`papers`: what is read in the methods of the papers beside APFed.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from apfed_experiments.columns import export_value, make_plain_table, write_text
from apfed_experiments.leaks.integrity import list_integrity_rows
from apfed_experiments.leaks.live import (
    MeasuredRow,
    list_chosen_rows,
    list_decoder_rows,
    list_hijacking_rows,
    list_inversion_rows,
    list_isolation_rows,
    list_joint_inversion_rows,
    list_noise_rows,
    list_reversed_hijacking_rows,
    list_stuffing_rows,
)
from apfed_experiments.leaks.recorded import list_few_label_rows, list_label_rows, list_paper_rows
from apfed_experiments.leaks.votes import (
    list_chosen_label_rows,
    list_poisoned_vote_rows,
    list_repeated_vote_rows,
    list_vote_membership_rows,
)
from apfed_experiments.report.page import Part
from apfed_experiments.runner import Study
from apfed_experiments.study import OnDone, StudyValues
from apfed_experiments.summary import Row
from secure_apfed.base.files import to_json
from secure_apfed.base.seeds import one_thread
from secure_apfed.errors import ConfigError

__all__ = ["LIST_ROWS_BY_PART", "declare_study"]

PartRows: TypeAlias = StudyValues[dict[str, list[Row]]]
"""The rows of every part that was measured."""

LIST_ROWS_BY_PART: Mapping[str, Callable[[], Iterator[MeasuredRow]]] = {
    "inversion": list_inversion_rows,
    "chosen": list_chosen_rows,
    "decoder": list_decoder_rows,
    "noise": list_noise_rows,
    "isolation": list_isolation_rows,
    "labels": list_label_rows,
    "joint_inversion": list_joint_inversion_rows,
    "hijacking": list_hijacking_rows,
    "reversed_hijacking": list_reversed_hijacking_rows,
    "stuffing": list_stuffing_rows,
    "few_labels": list_few_label_rows,
    "chosen_labels": list_chosen_label_rows,
    "repeated_votes": list_repeated_vote_rows,
    "vote_membership": list_vote_membership_rows,
    "poisoned_votes": list_poisoned_vote_rows,
    "integrity": list_integrity_rows,
    "papers": list_paper_rows,
}


def declare_study(part_names: Sequence[str], store_path: Path | None = None) -> Study[PartRows]:
    """Return the study of some parts, which are tables of attacks.

    `part_names`: keys of `LIST_ROWS_BY_PART`. `store_path`: JSON file in which each part, when it
    ends, replaces its rows; None: rows are not stored.

    The study's `measure` raises ConfigError, before anything is run, if `store_path` holds
    something else.
    """
    return Study(
        title="What an active or a passive reads",
        reading_guide="",
        folder=None,
        measure=partial(_measure_parts, part_names, store_path),
        compare=lambda measured: [
            Part(name=name, table=make_plain_table(rows, name))
            for name, rows in measured.values.items()
        ],
        unit_name="parts",
    )


def _measure_parts(
    part_names: Sequence[str], store_path: Path | None, *, jobs: int, on_done: OnDone
) -> PartRows:
    """Measure parts (tables) one after another on one thread, and store each when it ends.

    They do not run in parallel, whatever `jobs` is, since each holds all parties in memory.

    `part_names`: keys of `LIST_ROWS_BY_PART`. `store_path`: JSON file of the rows; None: they are
    not stored. `on_done`: function that is called after each part.
    """
    stored_rows_by_part = _load_rows(store_path) if store_path else {}
    rows_by_part: dict[str, list[Row]] = {}
    for done_count, name in enumerate(part_names, start=1):
        with one_thread():
            rows_by_part[name] = [row.measure_row() for row in LIST_ROWS_BY_PART[name]()]
        if store_path:
            stored_rows_by_part[name] = [export_value(row) for row in rows_by_part[name]]
            ordered_rows_by_part = {
                part: stored_rows_by_part[part]
                for part in LIST_ROWS_BY_PART
                if part in stored_rows_by_part
            }
            write_text(store_path, to_json(ordered_rows_by_part, indent=1) + "\n")
        on_done(done_count, len(part_names))
    return StudyValues(rows_by_part)


def _load_rows(path: Path) -> dict[str, Any]:
    """Return the stored rows by part; empty if there is no such file.

    Raises ConfigError: the folder is missing, or the file holds something else.
    """
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent}") from None
        return {}
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(stored, dict) or not set(stored) <= set(LIST_ROWS_BY_PART):
        raise ConfigError(f"{path} does not hold the parts of this command by name")
    return stored
