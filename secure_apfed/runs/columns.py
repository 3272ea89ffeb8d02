"""Which columns count, where a method scores features, and the settings of a run on fewer of them.

Run by: each party for itself. As its part ends it writes the scores of its own columns into its own
folder, for its eyes alone: they follow from the labels that it learnt from. Whoever holds the
folders of several parties, as of a run in one process, reads all.

A feature's score is the norm of its row of W_k (MMVFL, section 4.2). Ours: a column of several
features, one a category, has the norm of all their rows together.
"""

from collections.abc import Mapping
from pathlib import Path

from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding, OwnData
from secure_apfed.data.catalogue import check_data, party_names
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.files import load_json, to_json, write_atomically
from secure_apfed.methods import Role
from secure_apfed.runs.folder import PartyFolder
from secure_apfed.runs.outcome import Written
from secure_apfed.settings.data import TABLES

Scores = Mapping[str, Mapping[str, float]]
"""Party -> column -> score, no unit; features are standardised, so that a view's are comparable."""


class _Scored(Written):
    party: str
    scores: dict[str, float]


def save_column_scores(folder: PartyFolder, name: str, data: OwnData, role: Role) -> None:
    """Write what this party's columns count, if its method says so."""
    scores_F = role.feature_scores()
    encoding = data.table.encoding
    if scores_F is None:
        return
    if isinstance(encoding, ColumnEncoding):
        places = zip(encoding.columns, encoding.places, strict=True)
        scores = {column.name: float(scores_F[place].norm()) for column, place in places}
    else:
        scores = {encoding.feature_name(at): score for at, score in enumerate(scores_F.tolist())}
    content = to_json(_Scored(party=name, scores=scores).model_dump(), indent=2) + "\n"
    write_atomically(folder.scores, content.encode(), private=True)


def load_column_scores(path: Path) -> Scores:
    """Read the column scores of a finished run, or of one party's own folder, the highest first.

    Raises ModelError: no party whose folder lies here has any.
    """
    folders = [PartyFolder(at) for at in (path, *sorted((path / "parties").glob("*")))]
    found = [load_json(one.scores, _Scored) for one in folders if one.scores.is_file()]
    if not found:
        raise ModelError(
            f"{path}: expected {folders[0].scores.name} of a party in it or below parties/, found "
            "none; methods mmvfl and v_fedmv score columns (method.name) that no GRU reads, once a "
            "run has ended"
        )
    ranked = {one.party: sorted(one.scores.items(), key=lambda item: -item[1]) for one in found}
    return {party: dict(scores) for party, scores in ranked.items()}


def pick_columns(scores: Scores, keep: float) -> dict[str, list[str]]:
    """Return the first columns of each party: `keep` of them or, below 1, this share, at least one.

    Raises ConfigError: `keep` is neither.
    """
    if not (0 < keep < 1 or (keep >= 1 and keep % 1 == 0)):
        raise ConfigError(
            f"--keep {keep:g}: expected a number of columns, or below 1 a share of each party's"
        )
    return {
        party: list(own)[: int(keep) if keep >= 1 else max(1, round(keep * len(own)))]
        for party, own in scores.items()
    }


def restrict_columns(config: Config, scores: Scores, kept: Mapping[str, list[str]]) -> Config:
    """Return the same run on these columns of the parties that have scores.

    Raises ConfigError: the data cannot be cut so; it says what to write by hand.
    """
    told = config.model_dump(mode="json")
    if config.data.dataset != TABLES:
        if lacking := [name for name in party_names(config.data) if name not in kept]:
            raise ConfigError(
                f"data.columns names the columns of every party, and there are no scores of "
                f"{', '.join(lacking)} here; name the folder of the whole run"
            )
        told["data"] |= {"columns": kept, "views": None, "active_view": 1}
    for name, columns in kept.items() if config.data.dataset == TABLES else ():
        own = told["data"]["parties"][name]
        if own["encoding"] or config.data.view_columns:
            where = f"parties.{name}.encoding" if own["encoding"] else "view_columns"
            raise ConfigError(
                f"data.{where} lists the columns of {name}; cut it there to {', '.join(columns)}"
            )
        if own["numeric"] is None and own["categorical"] is None:
            own["ignore"] += [column for column in scores[name] if column not in columns]
        for kind in ("numeric", "categorical"):
            own[kind] = own[kind] and [column for column in own[kind] if column in columns]
    found = Config.model_validate(told)
    check_data(found.data)
    return found
