"""`load_data` makes every party's own table from settings and a seed.

Run by: whoever simulates all parties in one process. Each built-in set becomes tables with
their own rows in their own order, so that alignment is never assumed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.data.catalogue import check_data, find_dataset, labels_are_numbers, party_names
from secure_apfed.data.encoding import (
    ColumnEncoding,
    FeatureEncoding,
    ImageEncoding,
    View,
    find_view_ranges,
    fit_views,
)
from secure_apfed.data.files import DataSet, ImagePool, Pool, TablePool
from secure_apfed.data.labels import UNLABELLED, TargetScale, move_positive_last
from secure_apfed.data.partition import (
    Rows,
    choose_labelled_rows,
    cut_columns,
    deal_clients,
    deal_people,
    draw_people,
    draw_person_ids,
    hide_passive_labels,
    make_generator,
    split_rows,
)
from secure_apfed.data.records import PartyTable, VerticalData
from secure_apfed.data.tables import load_tables
from secure_apfed.settings.data import OWN_TABLES, DataSettings, ViewColumns


@isolate_torch_modes()
def load_data(settings: DataSettings, *, seed: int) -> VerticalData:
    """Return all parties' tables for one run; the same settings and seed give the same tables.

    A built-in set is cut into tables of the parties "active", "passive-1", and so on. Tables of the
    user's own keep the parties' names in the settings. In a horizontal partition all parties use
    the encoding fitted to the active's training rows, so that their features have the same meaning.
    """
    check_data(settings)
    if settings.dataset == OWN_TABLES:
        return load_tables(settings, seed=seed)
    return _cut_built_in_set(settings, seed=seed)


def _cut_built_in_set(settings: DataSettings, *, seed: int) -> VerticalData:
    """Read a built-in data set, and return the parties' tables cut from it."""
    dataset = find_dataset(settings.dataset)
    pool = dataset.read(dataset, settings.folder)
    chosen_rows = draw_people(
        _group_for_sampling(pool),
        people_count=settings.rows,
        people_per_class=settings.rows_per_class,
        seed=seed,
    )
    pool = pool if chosen_rows is None else pool.select_rows(chosen_rows)
    ids = draw_person_ids(len(pool.labels), seed=seed)
    people = _PeopleDivision(pool, _group_for_sampling(pool), settings, seed)
    target_scale = people.fit_target_scale(pool.labels) if labels_are_numbers(settings) else None
    tables: list[PartyTable] = []
    for name, rows, features, encoding, views in _encode_parties(pool, dataset, settings, people):
        labels = None
        if settings.has_labels(name):
            if target_scale is None:
                labels = torch.from_numpy(people.list_labels(name, rows))
            else:
                labels = target_scale.encode(pool.labels[rows], party=name)
        own_ids = tuple(ids[rows].tolist())
        tables.append(PartyTable(name, own_ids, features, labels, encoding, views))
    train_rows, test_rows, labelled = people.split_active_rows()
    classes = dataset.classes
    if settings.positive is not None:
        tables, classes = _renumber_classes(tables, dataset, positive=settings.positive)
    return VerticalData(
        table=tables[0],
        passives=tuple(tables[1:]),
        targets=target_scale,
        classes=classes,
        train_rows=train_rows,
        test_rows=test_rows,
        labelled=labelled,
        labels_at=settings.labels_at,
        is_horizontal=settings.is_horizontal,
    )


def _renumber_classes(
    tables: Sequence[PartyTable], dataset: DataSet, *, positive: str
) -> tuple[list[PartyTable], tuple[str, ...]]:
    """Return tables whose class numbers have the positive class last, and the classes so ordered.

    `tables`: the parties' tables; those without labels are returned as they are. `positive`: name
    of the positive class.
    """
    classes = dataset.classes
    renumbered_tables: list[PartyTable] = []
    for table in tables:
        if table.labels is not None:
            labels_N, classes = move_positive_last(
                table.labels.numpy(),
                dataset.classes,
                positive,
                where=f"data.positive of {dataset.name}",
            )
            table = replace(table, labels=torch.from_numpy(labels_N))
        renumbered_tables.append(table)
    return renumbered_tables, classes


def _group_for_sampling(pool: Pool) -> Rows:
    """Return the class of each row, (N,), by which rows are sampled.

    Labels that are numbers to predict have no classes: all rows then count as one class.
    """
    are_numbers = np.issubdtype(pool.labels.dtype, np.floating)
    return np.zeros(len(pool.labels), np.int64) if are_numbers else pool.labels


class _PeopleDivision:
    """The division of a pool's people between parties: each party's rows, and the labels it knows.

    The pool is the whole data set; rows are positions in it.

    Attributes:
        train_rows_by_party: party -> its training rows in the pool.
    """

    def __init__(self, pool: Pool, labels_N: Rows, settings: DataSettings, seed: int) -> None:
        """Split the pool into test rows and each party's training rows, as configured.

        `labels_N`: the class of each row of the pool, by which rows are sampled.
        """
        self._sampling_classes_N = labels_N
        self._settings = settings
        self._seed = seed
        if not isinstance(pool, ImagePool) or pool.official_train is None:
            train_rows, self._test_rows = split_rows(
                labels_N, settings.test_fraction, seed=seed, split=settings.split
            )
        else:
            train_rows, self._test_rows = np.split(np.arange(len(labels_N)), [pool.official_train])
        self._active_name, *passives = names = party_names(settings)
        if settings.is_horizontal:
            rows_by_client = deal_clients(
                labels_N,
                train_rows,
                client_count=len(names),
                max_client_rows=settings.limit,
                seed=seed,
            )
            self.train_rows_by_party = dict(zip(names, rows_by_client, strict=True))
        else:
            split = deal_people(
                train_rows,
                overlap=settings.overlap,
                max_active_rows=settings.limit,
                seed=seed,
                aligned_row_count=settings.aligned,
            )
            self.train_rows_by_party = dict.fromkeys(
                passives, np.concatenate([split.shared_rows, split.passive_only_rows])
            )
            self.train_rows_by_party[self._active_name] = np.concatenate(
                [split.shared_rows, split.active_only_rows]
            )

    def list_rows(self, party: str) -> Rows:
        """Return the rows of the pool that a party has, in the order of the party's table.

        All parties have the test rows; in a horizontal partition only the active has them.
        """
        rows = self.train_rows_by_party[party]
        if party == self._active_name or not self._settings.is_horizontal:
            rows = np.concatenate([rows, self._test_rows])
        return make_generator(self._seed, f"order of {party}").permutation(rows)

    def list_labels(self, party: str, rows: Rows) -> Rows:
        """Return the labels of these N rows as the party knows them, (N,).

        A label that the party does not know is `UNLABELLED`. The active knows all labels. A passive
        knows no labels of test rows, and only as many others as the settings give it.
        """
        labels_N = self._sampling_classes_N[rows]
        if party == self._active_name:
            return labels_N
        labels_N = np.where(np.isin(rows, self._test_rows), UNLABELLED, labels_N)
        labelled = self._settings.labelled
        choice = self._settings.split
        return hide_passive_labels(labels_N, labelled, seed=self._seed, choice=choice, party=party)

    def split_active_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the training rows, the test rows and the labelled rows of the active's table.

        Rows are positions in the active's table, ascending. The labelled rows are None if all
        training rows have a label.
        """
        settings = self._settings
        rows = self.list_rows(self._active_name)
        is_test = np.isin(rows, self._test_rows)
        train_positions = np.flatnonzero(~is_test)
        test_positions = torch.from_numpy(np.flatnonzero(is_test))
        chosen_positions = choose_labelled_rows(
            self._sampling_classes_N[rows[train_positions]],
            settings.labelled,
            seed=self._seed,
            choice=settings.split,
        )
        labelled_positions = (
            None
            if chosen_positions is None
            else torch.from_numpy(train_positions[chosen_positions])
        )
        return torch.from_numpy(train_positions), test_positions, labelled_positions

    def fit_target_scale(self, numbers_N: NDArray[Any]) -> TargetScale:
        """Return the mean and scale of the labels of the active's labelled training rows.

        `numbers_N`: the labels of all rows of the pool.
        """
        train, _, labelled = self.split_active_rows()
        labelled_positions = (train if labelled is None else labelled).numpy()
        return TargetScale.from_targets(
            numbers_N[self.list_rows(self._active_name)][labelled_positions],
            party=self._active_name,
        )


def cut_strips(
    image_shape: tuple[int, int, int],
    max_pixel_value: int,
    *,
    strip_count: int,
    active_strip_number: int,
) -> list[ImageEncoding]:
    """Return the encodings of m horizontal strips of images, the active's strip first.

    This is partition m-i of APFed's experiments: each party gets one strip, which is floor(height /
    m) rows of pixels. Remaining rows at the bottom are dropped.

    Args:
        image_shape: channels, height, width.
        max_pixel_value: the largest value of a pixel.
        strip_count: m.
        active_strip_number: i, the active's strip, counted from 1 at the top.
    """
    channels, height, width = image_shape
    strip_height = height // strip_count
    strip_numbers = [
        active_strip_number,
        *(view for view in range(1, strip_count + 1) if view != active_strip_number),
    ]
    return [
        ImageEncoding(
            channels=channels,
            height=height,
            width=width,
            maximum=max_pixel_value,
            first_row=(view - 1) * strip_height,
            end_row=view * strip_height,
        )
        for view in strip_numbers
    ]


def _encode_parties(
    pool: Pool, dataset: DataSet, settings: DataSettings, people: _PeopleDivision
) -> Iterator[tuple[str, Rows, torch.Tensor, FeatureEncoding, dict[str, View]]]:
    """Yield each party's name, rows of the pool, features, encoding, and positions of its views.

    Images are cut into horizontal strips, one for each party; tables are cut by columns.

    Args:
        pool: all people and features.
        dataset: catalogue entry of the pool's data.
        settings: settings of the data, with the partition.
        people: the division of the pool's rows between parties.
    """
    names = party_names(settings)
    if isinstance(pool, ImagePool):
        channels, height, width = pool.pixels.shape[1:]
        strips = cut_strips(
            (channels, height, width),
            pool.maximum,
            strip_count=1 if settings.is_horizontal else len(names),
            active_strip_number=settings.active_view,
        )
        if settings.is_horizontal:  # all parties have the only strip, which is the whole image
            strips *= len(names)
        for name, strip in zip(names, strips, strict=True):
            rows = people.list_rows(name)
            # Images of N rows: C channels, S pixel rows of the strip, width W.
            pixels_NCSW = pool.pixels[rows, :, strip.first_row : strip.end_row]
            yield name, rows, strip.encode(pixels_NCSW, source=name), strip, {}
        return
    columns_by_party_and_view = _split_columns(pool, dataset, settings)
    encoding: ColumnEncoding | None = None
    for name in names:
        rows = people.list_rows(name)
        if encoding is None or not settings.is_horizontal:
            is_active = name == names[0]
            fitted_rows = people.train_rows_by_party[name] if is_active else rows
            encoding = fit_views(
                pool.frame.iloc[fitted_rows],
                columns_by_party_and_view[name],
                categorical=pool.categorical,
                source=name,
            )
        features = encoding.encode(pool.frame.iloc[rows], source=name)
        yield (
            name,
            rows,
            features,
            encoding,
            find_view_ranges(encoding, columns_by_party_and_view[name], source=name),
        )


def _split_columns(
    pool: TablePool, dataset: DataSet, settings: DataSettings
) -> dict[str, dict[str, ViewColumns]]:
    """Return by party the columns of its views.

    If the settings list columns, each party has one view of its name with its columns. Otherwise
    each party has one of the data set's natural views, the active the view number `active_view`. In
    a horizontal partition every party has all views.

    `pool`: the table whose columns are split. `dataset`: its catalogue entry.
    """
    if settings.columns is not None:
        columns_by_party = cut_columns(list(pool.frame.columns), settings.columns)
        return {
            name: {name: ViewColumns(columns=columns)} for name, columns in columns_by_party.items()
        }
    natural_columns_by_view = {
        name: ViewColumns(columns=dataset.natural_views[name], sequence=dataset.sequences.get(name))
        for name in settings.explicit_views or dataset.natural_views
    }
    names = party_names(settings)
    if settings.is_horizontal:
        return dict.fromkeys(names, natural_columns_by_view)
    views_active_first = list(natural_columns_by_view)
    views_active_first.insert(
        0, views_active_first.pop(settings.active_view - 1)
    )  # the active's view goes first
    return {
        name: {view: natural_columns_by_view[view]}
        for name, view in zip(names, views_active_first, strict=True)
    }
