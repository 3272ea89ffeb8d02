"""The one table of data sets: source, licence, classes, and files with digests and addresses.

Adding a set is an entry in `image_sets` or `table_sets` and, for a new format, a reader. A user's
own files are `dataset: tables`. What a run's settings choose is looked up here, and refused where
the set cannot be cut so.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from secure_apfed.data.catalogue import IMAGE_SETS, TABLE_SETS
from secure_apfed.data.readers import DataSet
from secure_apfed.errors import ConfigError
from secure_apfed.settings import unknown_name
from secure_apfed.settings.data import ANOMALY_CLASSES, BUILT_IN_ACTIVE, TABLES, DataSettings

__all__ = [
    "DATASETS",
    "check_data",
    "describe",
    "find_dataset",
    "labels_are_numbers",
    "party_names",
    "view_count",
]
_CLIENTS = 4
_OF_BUILT_IN = (
    "views", "columns", "clients", "rows", "rows_per_class", "aligned",
)  # fmt: skip

DATASETS: Mapping[str, DataSet] = MappingProxyType(
    {entry.name: entry for entry in (*IMAGE_SETS, *TABLE_SETS)}
)


def find_dataset(name: str) -> DataSet:
    """Return the entry called `name`.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in DATASETS:
        raise ConfigError(f"dataset: {unknown_name(name, (*DATASETS, TABLES))}")
    return DATASETS[name]


def describe(dataset: DataSet) -> dict[str, str]:
    """Return what `secure-apfed data list` shows of a set."""
    return {
        "name": dataset.name,
        "title": dataset.title,
        "shape": dataset.shape,
        "classes": "numbers" if dataset.numeric_labels else str(len(dataset.classes)),
        "views": str(dataset.views),
        "split": "official" if dataset.split else "seeded",
        "licence": dataset.licence,
        "source": dataset.source,
        "citation": dataset.citation,
        "how": dataset.how,
    }


def labels_are_numbers(settings: DataSettings) -> bool:
    """Whether there are no classes, but numbers to predict."""
    if settings.dataset == TABLES:
        return settings.classes == "numbers"
    return find_dataset(settings.dataset).numeric_labels


def view_count(settings: DataSettings) -> int:
    """The number of parties with features: m."""
    if settings.dataset == TABLES:
        return len(settings.parties or ())
    if settings.horizontal:
        return settings.clients or _CLIENTS
    if settings.columns is not None:
        return len(settings.columns)
    if isinstance(settings.views, int):
        return settings.views
    return len(settings.named_views) or find_dataset(settings.dataset).views


def party_names(settings: DataSettings) -> tuple[str, ...]:
    """Of all parties with features, the active first."""
    if settings.dataset == TABLES:
        names: Iterable[str] = settings.parties or {}
    elif settings.columns is not None:
        names = settings.columns
    else:
        names = (f"passive-{at}" for at in range(1, view_count(settings)))
    active = settings.active_name
    return (active, *(name for name in names if name != active))


def check_data(settings: DataSettings) -> None:
    """Refuse a set that there is not, and one that cannot be cut so.

    Raises:
        ConfigError: names the key, and what to write instead.
    """
    if settings.dataset == TABLES:
        _check_own_tables(settings)
    else:
        _check_built_in(settings)
    passives = party_names(settings)[1:]
    unknown = [name for name in settings.labels_at if name not in passives]
    if unknown:
        raise ConfigError(
            f"labels_at: {', '.join(unknown)} is no passive; there are {', '.join(passives)}"
        )
    if labels_are_numbers(settings):
        _check_numbers(settings)
    if settings.anomaly is not None:
        _check_anomaly(settings)


def _check_own_tables(settings: DataSettings) -> None:
    given = [key for key in _OF_BUILT_IN if getattr(settings, key) is not None]
    if given:
        raise ConfigError(
            f"dataset: {TABLES} takes its views from parties and view_columns, and people as "
            f"they are; leave {' and '.join(given)} out"
        )
    if not settings.parties or len(settings.parties) < 2:
        raise ConfigError(f"dataset: {TABLES} needs at least two entries in parties")
    if settings.active not in settings.parties:
        raise ConfigError(
            f"active: {settings.active!r} is not one of parties: {', '.join(settings.parties)}"
        )
    if (settings.horizontal or settings.labels_at) and settings.classes is None:
        raise ConfigError(
            "classes: several parties hold labels, and must number them alike; list the "
            "classes, as classes: ['no', 'yes']"
        )


def _check_built_in(settings: DataSettings) -> None:
    dataset = find_dataset(settings.dataset)
    given = [key for key in ("parties", "classes", "view_columns")
             if getattr(settings, key) is not None]  # fmt: skip
    if given:
        raise ConfigError(
            f"{' and '.join(given)} belong to dataset: {TABLES}, not to {settings.dataset}"
        )
    known, named = dataset.natural_views, settings.named_views
    if set(named) - set(known) or len(set(named)) != len(named):
        raise ConfigError(
            f"views: expected different ones of {', '.join(known) or 'none'}, which "
            f"{settings.dataset} has; got {', '.join(named)}"
        )
    if settings.horizontal:
        _check_horizontal(settings)
    elif settings.columns is not None:
        _check_columns(settings, dataset)
    else:
        _check_views(settings, dataset)


def _check_horizontal(settings: DataSettings) -> None:
    """What cuts features or people apart belongs to the vertical partition."""
    plain = DataSettings.model_fields
    given = [key for key in ("views", "active_view", "columns", "overlap", "aligned")
             if getattr(settings, key) != plain[key].default
             and not (key == "views" and settings.named_views)]  # fmt: skip
    if given:
        raise ConfigError(
            f"partition: horizontal gives every party all features of people of its own; leave "
            f"{' and '.join(given)} out, or take partition: vertical"
        )


def _check_columns(settings: DataSettings, dataset: DataSet) -> None:
    if dataset.height is not None:
        raise ConfigError(
            f"{settings.dataset} holds images, which views cut; columns are for tables"
        )
    if BUILT_IN_ACTIVE not in (settings.columns or {}) or view_count(settings) < 2:
        raise ConfigError(
            "columns needs an entry for active and one for each passive, such as passive-1"
        )
    if settings.views is not None:
        raise ConfigError("give columns or views, not both")


def _check_views(settings: DataSettings, dataset: DataSet) -> None:
    natural = len(dataset.natural_views)
    if dataset.height is None and isinstance(settings.views, int) and settings.views != natural:
        raise ConfigError(
            f"views: {settings.dataset} is a table of {natural} natural views, got "
            f"{settings.views}; leave views out or cut it with columns"
        )
    if dataset.height is not None and view_count(settings) > dataset.height:
        raise ConfigError(
            f"views: an image of {settings.dataset} has {dataset.height} rows, fewer than "
            f"{settings.views} views"
        )
    if view_count(settings) < 2:
        raise ConfigError(
            "views: a vertical partition is of two at least; name another, or take partition: "
            "horizontal"
        )
    if settings.active_view > view_count(settings):
        raise ConfigError(
            f"active_view: must be 1 to {view_count(settings)}, the number of views, got "
            f"{settings.active_view}"
        )


def _check_numbers(settings: DataSettings) -> None:
    """What is cut by classes, or known to several parties, needs classes."""
    if settings.rows_per_class is not None:
        raise ConfigError(
            f"rows_per_class: the labels of {settings.dataset} are numbers and no classes; say rows"
        )
    if settings.horizontal or settings.labels_at:
        raise ConfigError(
            f"{'partition' if settings.horizontal else 'labels_at'}: labels that are numbers are "
            "the active's alone; take partition: vertical without labels_at"
        )


def _check_anomaly(settings: DataSettings) -> None:
    """Nothing is learnt from labels, and the classes are two."""
    given = [key for key in ("classes", "labelled") if getattr(settings, key) is not None]
    if given or labels_are_numbers(settings):
        remedy = f"leave {' and '.join(given)} out" if given else "take another set"
        raise ConfigError(
            f"anomaly: the classes are {' and '.join(ANOMALY_CLASSES)}, and no label is learnt "
            f"from; {remedy}"
        )
    if settings.horizontal or settings.labels_at:
        raise ConfigError(
            f"anomaly: the active alone knows it; leave "
            f"{'partition' if settings.horizontal else 'labels_at'} out"
        )
    known = () if settings.dataset == TABLES else find_dataset(settings.dataset).classes
    if known and settings.anomaly not in known:
        raise ConfigError(f"anomaly: {settings.dataset} has the classes {', '.join(known)}")
