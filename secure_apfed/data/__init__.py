"""Data: built-in sets, the parties' own tables, and the vertical partition between parties."""

from secure_apfed.data.catalogue import DATASETS, describe_dataset, fetch_dataset, find_dataset
from secure_apfed.data.encoding import ColumnEncoding, FeatureEncoding, ImageEncoding
from secure_apfed.data.inputs import load_blocks
from secure_apfed.data.labels import UNLABELLED, TargetScale
from secure_apfed.data.loading import load_data
from secure_apfed.data.records import OwnData, PartyTable, VerticalData, load_own, pack_own
from secure_apfed.data.tables import files_digest, load_own_tables

__all__ = [
    "DATASETS",
    "UNLABELLED",
    "ColumnEncoding",
    "FeatureEncoding",
    "ImageEncoding",
    "OwnData",
    "PartyTable",
    "TargetScale",
    "VerticalData",
    "describe_dataset",
    "fetch_dataset",
    "files_digest",
    "find_dataset",
    "load_blocks",
    "load_data",
    "load_own",
    "load_own_tables",
    "pack_own",
]
