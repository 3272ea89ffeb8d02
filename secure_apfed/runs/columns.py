"""The scores of columns, if a method scores features, and the settings of a run on fewer columns.

Run by: each party for itself. At the end of a run it writes the scores of its own columns into its
own folder, and shows them to nobody: they depend on the labels that it learnt from. Whoever holds
the folders of several parties, as after a run in one process, can read the scores of all.

A feature's score is the norm of its row of W_k (MMVFL, section 4.2), the weights of party k. Ours:
a column with several features, one for each category, has the norm of all their rows together.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from secure_apfed.base.files import load_json, to_json, write_atomically
from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding, OwnData
from secure_apfed.data.catalogue import check_data, party_names
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.methods import Role
from secure_apfed.runs.folder import PartyFolder
from secure_apfed.runs.outcome import StoredResult
from secure_apfed.settings.data import OWN_TABLES

Scores = Mapping[str, Mapping[str, float]]
"""Party -> column -> score. Scores have no unit; features are standardised, so that the scores of
one party's columns are comparable."""


class _PartyScores(StoredResult):
    """The scores of one party's columns, as stored in a file."""

    party: str
    scores: dict[str, float]


def save_column_scores(folder: PartyFolder, name: str, data: OwnData, role: Role) -> None:
    """Write the scores of this party's columns into its folder, if the method scores features.

    `name`: the party. `data`: its data. `role`: its trained role in the method.
    """
    scores_F = role.feature_scores()
    encoding = data.table.encoding
    if scores_F is None:
        return
    if isinstance(encoding, ColumnEncoding):
        positioned_columns = zip(encoding.columns, encoding.feature_ranges, strict=True)
        scores = {
            column.name: float(scores_F[position].norm()) for column, position in positioned_columns
        }
    else:
        scores = {
            encoding.feature_name(position): score
            for position, score in enumerate(scores_F.tolist())
        }
    content = to_json(_PartyScores(party=name, scores=scores).model_dump(), indent=2) + "\n"
    write_atomically(folder.column_scores, content.encode(), private=True)


def load_column_scores(path: Path) -> Scores:
    """Return the column scores of a finished run, or of one party, the highest first.

    `path`: folder of a run, or of a party.

    Raises ModelError: no party's folder there has scores.
    """
    folders = [PartyFolder(folder) for folder in (path, *sorted((path / "parties").glob("*")))]
    stored = [
        load_json(party_folder.column_scores, _PartyScores)
        for party_folder in folders
        if party_folder.column_scores.is_file()
    ]
    if not stored:
        raise ModelError(
            f"{path}: expected {folders[0].column_scores.name} of a party in it or below parties/, "
            "found none; methods mmvfl and v_fedmv score columns (method.name) that no GRU reads, "
            "once a run has ended"
        )
    ranked = {
        party_folder.party: sorted(party_folder.scores.items(), key=lambda item: -item[1])
        for party_folder in stored
    }
    return {party: dict(scores) for party, scores in ranked.items()}


def pick_columns(scores: Scores, kept_columns: float) -> dict[str, list[str]]:
    """Return the columns with the highest scores, by party.

    `scores`: scores by party and column, the highest first. `kept_columns`: number of columns that
    each party keeps; below 1 it is the share of its columns, and at least one column is kept.

    Raises ConfigError: `kept_columns` is neither a number nor a share.
    """
    is_share = 0 < kept_columns < 1
    if not is_share and not (kept_columns >= 1 and kept_columns % 1 == 0):
        raise ConfigError(
            f"--keep {kept_columns:g}: expected a number of columns, or below 1 a share of each "
            "party's"
        )
    columns_by_party = {}
    for party, column_scores in scores.items():
        count = max(1, round(kept_columns * len(column_scores))) if is_share else int(kept_columns)
        columns_by_party[party] = list(column_scores)[:count]
    return columns_by_party


def restrict_columns(
    config: Config, scores: Scores, columns_by_party: Mapping[str, list[str]]
) -> Config:
    """Return the settings of the same run on fewer columns.

    Columns without a score, such as IDs, stay in the parties' tables.

    Args:
        config: settings of the run.
        scores: scores by party and column.
        columns_by_party: columns to keep, by party.

    Raises ConfigError: the columns cannot be restricted automatically; the error names the settings
        to write by hand.
    """
    settings = config.model_dump(mode="json")
    data_settings = settings["data"]
    if config.data.dataset != OWN_TABLES:
        if missing := [name for name in party_names(config.data) if name not in columns_by_party]:
            raise ConfigError(
                f"data.columns names the columns of every party, and there are no scores of "
                f"{', '.join(missing)} here; name the folder of the whole run"
            )
        data_settings["columns"] = columns_by_party
        # `columns` says which columns each party has, so the settings that said it before get
        # their defaults.
        data_settings["views"] = None
        data_settings["active_view"] = 1
    else:
        for name, columns in columns_by_party.items():
            table_settings = data_settings["parties"][name]
            _require_no_column_lists(config, name, table_settings, columns)
            _restrict_table(table_settings, columns, scored_columns=scores[name])
    restricted = Config.model_validate(settings)
    check_data(restricted.data)
    return restricted


def _require_no_column_lists(
    config: Config, party: str, table_settings: Mapping[str, Any], columns: list[str]
) -> None:
    """Raise ConfigError if the settings list a party's columns where only the user can cut them.

    `table_settings`: settings of the party's table. `columns`: columns to keep, for the error.
    """
    if table_settings["encoding"]:
        key = f"parties.{party}.encoding"
    elif config.data.view_columns:
        key = "view_columns"
    else:
        return
    raise ConfigError(
        f"data.{key} lists the columns of {party}; cut it there to {', '.join(columns)}"
    )


def _restrict_table(
    table_settings: dict[str, Any], columns: Collection[str], *, scored_columns: Iterable[str]
) -> None:
    """Change the settings of a party's table in place, so that they use only some columns.

    If the settings list no columns, all scored columns but these are added to the ignored ones.

    `columns`: columns to keep. `scored_columns`: all columns that have a score.
    """
    if table_settings["numeric"] is None and table_settings["categorical"] is None:
        table_settings["ignore"] += [column for column in scored_columns if column not in columns]
    for column_type in ("numeric", "categorical"):
        listed_columns = table_settings[column_type]
        if listed_columns:
            table_settings[column_type] = [column for column in listed_columns if column in columns]
