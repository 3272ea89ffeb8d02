"""`load_data`: from settings and a seed to every party's own table.

Run by: whoever simulates all parties in one process. Each built-in set becomes tables with
their own rows in their own order, so that alignment is never assumed.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from secure_apfed.data.catalogue import TABLES, find_dataset
from secure_apfed.data.column_encoding import fit_columns
from secure_apfed.data.encoding import FeatureEncoding
from secure_apfed.data.partition import (
    Holdings,
    choose_labelled,
    cut_columns,
    cut_strips,
    deal_people,
    generator,
    party_names,
    person_ids,
    split_rows,
)
from secure_apfed.data.readers import ImagePool, Pool, TablePool
from secure_apfed.data.records import PartyTable, VerticalData
from secure_apfed.data.settings import DataSettings
from secure_apfed.data.tables import load_tables

__all__ = ["load_data"]

Rows = NDArray[np.int64]


def load_data(settings: DataSettings, *, seed: int) -> VerticalData:
    """Return all parties' tables for one run; the same settings and seed give the same tables.

    Parties of built-in sets are called "active", "passive-1", ...; own tables keep the
    names of the settings.

    Raises:
        ConfigError: a view or column that the set does not have.
        DataError: a file is missing or damaged, or the tables do not fit; says what to do.
    """
    if settings.dataset == TABLES:
        return load_tables(settings, seed=seed)
    dataset = find_dataset(settings.dataset)
    pool = dataset.read(dataset, settings.folder)
    people = _people(pool, settings, seed)
    ids = person_ids(len(pool.labels), seed=seed)
    views = (
        _ImageViews(pool, settings) if isinstance(pool, ImagePool) else _TableViews(pool, settings)
    )
    tables: list[PartyTable] = []
    active_rows = np.empty(0, np.int64)
    for place, name in enumerate(views.parties):
        active = place == 0
        rows = generator(seed, f"order of {name}").permutation(people.of(active=active))
        features, encoding = views.take(name, rows, fit_rows=people.train if active else rows)
        labels = torch.from_numpy(pool.labels[rows]) if active else None
        tables.append(PartyTable(name, tuple(ids[rows].tolist()), features, labels, encoding))
        active_rows = rows if active else active_rows
    is_test = np.isin(active_rows, people.test)
    train_rows = np.flatnonzero(~is_test)
    labelled = choose_labelled(
        pool.labels[active_rows[train_rows]], settings.labelled, seed=seed,
        choice=settings.labelled_choice,
    )  # fmt: skip
    return VerticalData(
        active=tables[0],
        passives=tuple(tables[1:]),
        classes=dataset.classes,
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(np.flatnonzero(is_test)),
        labelled=None if labelled is None else torch.from_numpy(train_rows[labelled]),
    )


def _people(pool: Pool, settings: DataSettings, seed: int) -> Holdings:
    rows = np.arange(len(pool.labels), dtype=np.int64)
    if pool.official_train is None:
        train, test = split_rows(
            pool.labels, settings.test_fraction, seed=seed, split=settings.split
        )
    else:
        train, test = rows[: pool.official_train], rows[pool.official_train :]
    return deal_people(train, test, overlap=settings.overlap, limit=settings.limit, seed=seed)


class _ImageViews:
    """Strips of the pool's images, one for each party."""

    def __init__(self, pool: ImagePool, settings: DataSettings) -> None:
        _, channels, height, width = pool.pixels.shape
        strips = cut_strips(
            channels=channels, height=height, width=width, maximum=pool.maximum,
            views=settings.view_count, active_view=settings.active_view,
        )  # fmt: skip
        self._pixels_NCHW = pool.pixels
        self._strips = dict(zip(party_names(len(strips)), strips, strict=True))
        self.parties = tuple(self._strips)

    def take(
        self, party: str, rows: Rows, *, fit_rows: Rows
    ) -> tuple[torch.Tensor, FeatureEncoding]:
        """Return a party's features of these rows of the pool; nothing is fitted to images."""
        strip = self._strips[party]
        cut_NCSW = self._pixels_NCHW[rows, :, strip.first_row : strip.end_row]
        return strip.encode(cut_NCSW, source=party), strip


class _TableViews:
    """Columns of the pool's table, some for each party."""

    def __init__(self, pool: TablePool, settings: DataSettings) -> None:
        self._frame, self._categorical = pool.frame, pool.categorical
        self._columns = cut_columns(
            list(pool.frame.columns),
            find_dataset(settings.dataset).natural_views,
            settings.columns,
            active_view=settings.active_view,
        )
        self.parties = tuple(self._columns)

    def take(
        self, party: str, rows: Rows, *, fit_rows: Rows
    ) -> tuple[torch.Tensor, FeatureEncoding]:
        """Return a party's features of these rows, standardised by its `fit_rows`."""
        own = self._frame[list(self._columns[party])]
        encoding = fit_columns(own.iloc[fit_rows], categorical=self._categorical, source=party)
        return encoding.encode(own.iloc[rows], source=party), encoding
