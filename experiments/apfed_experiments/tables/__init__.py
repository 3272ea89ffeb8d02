"""The papers' tables and figures, each by one command; one file a paper."""

from collections.abc import Mapping

from apfed_experiments.tables import apc_vfl, apfed, apfed_trained, fedmv, mmvfl
from apfed_experiments.tables.table import PaperTable
from secure_apfed.errors import ConfigError
from secure_apfed.settings import describe_unknown_name

__all__ = ["TABLES", "find_table"]

_PAPERS = (apfed, apfed_trained, apc_vfl, mmvfl, fedmv)
TABLES: Mapping[str, PaperTable] = {
    table.name: table for paper in _PAPERS for table in paper.TABLES
}


def find_table(name: str) -> PaperTable:
    """Return the table of this name.

    Raises ConfigError: no table has this name; the message names the nearest.
    """
    if name not in TABLES:
        raise ConfigError(f"table: {describe_unknown_name(name, TABLES)}")
    return TABLES[name]
