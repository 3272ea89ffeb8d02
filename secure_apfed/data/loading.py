"""`load_data`: from settings and a seed to every party's own table.

Run by: whoever simulates all parties in one process. Each built-in set becomes tables with
their own rows in their own order, so that alignment is never assumed.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from secure_apfed.data.catalogue import check_data, find_dataset, labels_are_numbers, party_names
from secure_apfed.data.encoding import ColumnEncoding, FeatureEncoding, ImageEncoding
from secure_apfed.data.labels import UNLABELLED, TargetScale
from secure_apfed.data.partition import (
    Rows,
    choose_labelled,
    cut_columns,
    deal_clients,
    deal_people,
    draw_people,
    generator,
    passive_labels,
    person_ids,
    split_rows,
)
from secure_apfed.data.readers import DataSet, ImagePool, Pool, TablePool
from secure_apfed.data.records import PartyTable, VerticalData
from secure_apfed.data.tables import load_tables
from secure_apfed.data.views import View, fit_views, locate_views
from secure_apfed.seeds import undisturbed
from secure_apfed.settings.data import TABLES, DataSettings, ViewColumns

__all__ = ["cut_strips", "load_data"]


@undisturbed()
def load_data(settings: DataSettings, *, seed: int) -> VerticalData:
    """Return all parties' tables for one run; the same settings and seed give the same tables.

    Parties of built-in sets are called "active", "passive-1", ...; own tables keep the
    names of the settings. Under a horizontal partition all parties use the encoding that is fitted
    to the active's training rows, so that their features mean the same.

    Raises:
        ConfigError: no such set, or a view or column that it does not have.
        DataError: a file is missing or damaged, or the tables do not fit; says what to do.
    """
    check_data(settings)
    if settings.dataset == TABLES:
        return load_tables(settings, seed=seed)
    dataset = find_dataset(settings.dataset)
    pool = dataset.read(dataset, settings.folder)
    drawn = draw_people(
        _classes_of(pool), rows=settings.rows, rows_per_class=settings.rows_per_class, seed=seed
    )
    pool = pool if drawn is None else pool.at(drawn)
    ids, classes_N = person_ids(len(pool.labels), seed=seed), _classes_of(pool)
    if settings.anomaly is not None:
        classes_N = (classes_N == dataset.classes.index(settings.anomaly)).astype(np.int64)
    people = _People(pool, classes_N, settings, seed)
    targets = people.scale_of(pool.labels) if labels_are_numbers(settings) else None
    views = (
        _ImageViews(pool, settings)
        if isinstance(pool, ImagePool)
        else _TableViews(pool, dataset, settings)
    )
    tables: list[PartyTable] = []
    encoding: FeatureEncoding | None = None
    for name in party_names(settings):
        rows = people.rows(name)
        if encoding is None or not settings.horizontal:
            encoding = views.fit(name, people.train[name] if not tables else rows)
        features, located = views.encode(name, rows, encoding)
        labels = None
        if settings.holds_labels(name):
            labels = torch.from_numpy(people.labels(name, rows))
            labels = labels if targets is None else targets.encode(pool.labels[rows], party=name)
        tables.append(
            PartyTable(name, tuple(ids[rows].tolist()), features, labels, encoding, located)
        )
    train_rows, test_rows, labelled = people.active_split()
    return VerticalData(
        active=tables[0], passives=tuple(tables[1:]), targets=targets,
        classes=settings.class_names(dataset.classes), one_class=settings.anomaly is not None,
        train_rows=train_rows, test_rows=test_rows, labelled=labelled,
        labels_at=settings.labels_at, horizontal=settings.horizontal,
    )  # fmt: skip


def _classes_of(pool: Pool) -> Rows:
    """The classes by which rows are drawn; where labels are numbers, all are of one."""
    numbers = np.issubdtype(pool.labels.dtype, np.floating)
    return np.zeros(len(pool.labels), np.int64) if numbers else pool.labels


class _People:
    """Which rows of the pool each party holds, in its own order, and whose labels it knows.

    Attributes:
        train: by party, its training rows, in no order; of the active's no anomaly is one.
    """

    def __init__(self, pool: Pool, labels_N: Rows, settings: DataSettings, seed: int) -> None:
        self._labels_N, self._settings, self._seed = labels_N, settings, seed
        if pool.official_train is None:
            train, self._test = split_rows(
                labels_N, settings.test_fraction, seed=seed, split=settings.split
            )
        else:
            train, self._test = np.split(np.arange(len(labels_N)), [pool.official_train])
        train = train if settings.anomaly is None else train[labels_N[train] == 0]
        active, *passives = names = party_names(settings)
        if settings.horizontal:
            dealt = deal_clients(
                labels_N, train, clients=len(names), limit=settings.limit, seed=seed
            )
            self.train = dict(zip(names, dealt, strict=True))
        else:
            held = deal_people(
                train, overlap=settings.overlap, limit=settings.limit, seed=seed,
                aligned=settings.aligned,
            )  # fmt: skip
            self.train = dict.fromkeys(passives, np.concatenate([held.shared, held.strangers]))
            self.train[active] = np.concatenate([held.shared, held.active_only])

    def rows(self, party: str) -> Rows:
        """All that the party holds, in its order; test rows are the active's under horizontal."""
        own = self.train[party]
        if self._is_active(party) or not self._settings.horizontal:
            own = np.concatenate([own, self._test])
        return generator(self._seed, f"order of {party}").permutation(own)

    def labels(self, party: str, rows: Rows) -> Rows:
        """Of these rows, as far as the party knows them: a passive, none of test rows."""
        labels_N = self._labels_N[rows]
        if self._is_active(party):
            return labels_N
        labels_N = np.where(np.isin(rows, self._test), UNLABELLED, labels_N)
        labelled, choice = self._settings.labelled, self._settings.split
        return passive_labels(labels_N, labelled, seed=self._seed, choice=choice, party=party)

    def active_split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of the active's table the training rows, the test rows, and those with a label."""
        settings, rows = self._settings, self.rows(self._settings.active_name)
        is_test = np.isin(rows, self._test)
        train, test = np.flatnonzero(~is_test), torch.from_numpy(np.flatnonzero(is_test))
        labelled = choose_labelled(
            self._labels_N[rows[train]], settings.labelled, seed=self._seed, choice=settings.split
        )
        known = None if labelled is None else torch.from_numpy(train[labelled])
        return torch.from_numpy(train), test, known

    def scale_of(self, numbers_N: NDArray[Any]) -> TargetScale:
        """Of the pool's labels, which are numbers, those of the active's labelled training rows."""
        active = self._settings.active_name
        train, _, labelled = self.active_split()
        known = (train if labelled is None else labelled).numpy()
        return TargetScale.of(numbers_N[self.rows(active)][known], party=active)

    def _is_active(self, party: str) -> bool:
        return party == self._settings.active_name


def cut_strips(
    image: tuple[int, int, int], maximum: int, *, views: int, active_view: int
) -> list[ImageEncoding]:
    """Return the encodings of partition m-i: strips of floor(height / m) rows, view i first.

    Remaining rows at the bottom are dropped, as in APFed's experiments.

    Args:
        image: channels, height and width.
        maximum: of a pixel.
        views: m.
        active_view: i, from 1.
    """
    channels, height, width = image
    strip = height // views
    order = [active_view, *(view for view in range(1, views + 1) if view != active_view)]
    return [
        ImageEncoding(
            channels=channels, height=height, width=width, maximum=maximum,
            first_row=(view - 1) * strip, end_row=view * strip,
        )
        for view in order
    ]  # fmt: skip


class _ImageViews:
    """Strips of the pool's images, one for each party; or whole images for all of them."""

    def __init__(self, pool: ImagePool, settings: DataSettings) -> None:
        _, channels, height, width = pool.pixels.shape
        names, whole = party_names(settings), settings.horizontal
        strips = cut_strips(
            (channels, height, width), pool.maximum,
            views=1 if whole else len(names), active_view=settings.active_view,
        )  # fmt: skip
        self._pixels_NCHW = pool.pixels
        self._strips = dict(zip(names, strips * len(names) if whole else strips, strict=True))

    def fit(self, party: str, rows: Rows) -> ImageEncoding:
        """Return the party's strip; nothing is fitted to images."""
        return self._strips[party]

    def encode(
        self, party: str, rows: Rows, encoding: FeatureEncoding
    ) -> tuple[torch.Tensor, dict[str, View]]:
        """Return a party's features of these rows of the pool, which are one image each."""
        strip = self._strips[party]
        cut_NCSW = self._pixels_NCHW[rows, :, strip.first_row : strip.end_row]
        return encoding.encode(cut_NCSW, source=party), {}


class _TableViews:
    """Columns of the pool's table, some for each party; or all for all of them."""

    def __init__(self, pool: TablePool, dataset: DataSet, settings: DataSettings) -> None:
        self._pool, names = pool, party_names(settings)
        natural = {
            name: ViewColumns(
                columns=dataset.natural_views[name], sequence=dataset.sequences.get(name)
            )
            for name in settings.named_views or dataset.natural_views
        }
        if settings.columns is not None:
            cut = cut_columns(list(pool.frame.columns), settings.columns)
            self._views = {name: {name: ViewColumns(columns=cut[name])} for name in cut}
        elif settings.horizontal:
            self._views = dict.fromkeys(names, natural)
        else:
            order = list(natural)
            order.insert(0, order.pop(settings.active_view - 1))
            self._views = {
                name: {view: natural[view]} for name, view in zip(names, order, strict=True)
            }

    def fit(self, party: str, rows: Rows) -> ColumnEncoding:
        """Return the encoding of the party's columns, with statistics of these rows."""
        return fit_views(
            self._pool.frame.iloc[rows], self._views[party], categorical=self._pool.categorical,
            source=party,
        )  # fmt: skip

    def encode(
        self, party: str, rows: Rows, encoding: FeatureEncoding
    ) -> tuple[torch.Tensor, dict[str, View]]:
        """Return a party's features of these rows, and where its views are among them."""
        assert isinstance(encoding, ColumnEncoding)
        features = encoding.encode(self._pool.frame.iloc[rows], source=party)
        return features, locate_views(encoding, self._views[party], source=party)
