"""All features in one table: what nobody holds, and what vertical learning is compared with."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from secure_apfed.data import PartyTable, VerticalData
from secure_apfed.data.encoding import ColumnEncoding, ImageEncoding
from secure_apfed.errors import DataError

__all__ = ["centralise"]


def centralise(data: VerticalData) -> VerticalData:
    """Give the active everybody's features of its own people; no passive is left.

    Raises:
        DataError: a passive does not know all people of the active, or views do not fit.
    """
    tables = [data.active, *(_in_order(table, data.active.ids) for table in data.passives)]
    encodings = [table.encoding for table in tables]
    if all(isinstance(one, ImageEncoding) for one in encodings):
        active = _stacked(tables)
    elif all(isinstance(one, ColumnEncoding) for one in encodings):
        active = _joined(tables)
    else:
        raise DataError("images and tables of columns do not make one table")
    return replace(data, active=replace(active, labels=data.active.labels), passives=())


def _in_order(table: PartyTable, ids: Sequence[str]) -> PartyTable:
    """The table's rows of these people, in this order."""
    place = {person: row for row, person in enumerate(table.ids)}
    if missing := [person for person in ids if person not in place]:
        raise DataError(
            f"{table.name} does not know {len(missing)} of the active's people; a centralised "
            "table needs data.overlap: 1.0"
        )
    rows = [place[person] for person in ids]
    return PartyTable(table.name, tuple(ids), table.features[rows], None, table.encoding)


def _stacked(tables: Sequence[PartyTable]) -> PartyTable:
    """Strips from the top of the image to its bottom."""
    strips = [(one.encoding, one) for one in tables if isinstance(one.encoding, ImageEncoding)]
    strips.sort(key=lambda strip: strip[0].first_row)
    for (above, _), (below, _) in pairwise(strips):
        if above.end_row != below.first_row:
            raise DataError("the strips leave out rows of the image or overlap")
    top, bottom = strips[0][0], strips[-1][0]
    features = torch.cat([table.features for _, table in strips], dim=2)
    encoding = top.model_copy(update={"end_row": bottom.end_row})
    return PartyTable(tables[0].name, tables[0].ids, features, None, encoding)


def _joined(tables: Sequence[PartyTable]) -> PartyTable:
    """Columns side by side."""
    columns = [
        column
        for table in tables
        if isinstance(table.encoding, ColumnEncoding)
        for column in table.encoding.columns
    ]
    encoding = ColumnEncoding(columns=tuple(columns))
    features = torch.cat([table.features for table in tables], dim=1)
    return PartyTable(tables[0].name, tables[0].ids, features, None, encoding)
