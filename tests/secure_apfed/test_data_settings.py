"""Settings of data: what does not fit is refused before anything is read."""

import pytest
from pydantic import ValidationError

from secure_apfed.data import DATASETS, describe, find_dataset, load_data
from secure_apfed.data.catalogue import view_count
from secure_apfed.errors import ConfigError
from secure_apfed.settings.data import DataSettings

TWO = {"active": {"file": "a.csv"}, "shop": {"file": "b.csv"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "digitz"}, "'digitz' is unknown; did you mean 'digits'"),
        ({"dataset": "zzzz"}, "'zzzz' is unknown; Known are digits"),
        ({"views": 1}, "greater than or equal to 2"),
        ({"views": 9}, "an image of digits has 8 rows, fewer than 9 views"),
        ({"active_view": 5}, "active_view: must be 1 to 4, the number of views, got 5"),
        ({"active_view": 0}, "greater than or equal to 1"),
        ({"overlap": 0}, "greater than 0"),
        ({"overlap": 1.1}, "less than or equal to 1"),
        ({"test_fraction": 1}, "less than 1"),
        ({"limit": 0}, "greater than or equal to 1"),
        ({"dataset": "breast_cancer", "views": 4}, "is a table of 3 natural views, got 4"),
        ({"columns": {"active": [1], "p": [2]}}, "digits holds images, which views cut"),
        ({"dataset": "breast_cancer", "columns": {"p": [2]}}, "columns needs an entry for active"),
        (
            {"dataset": "breast_cancer", "views": 3, "columns": {"active": [1], "p": [2]}},
            "columns or views, not both",
        ),
        ({"parties": TWO}, "parties belong to dataset: tables"),
        ({"dataset": "tables"}, "needs at least two entries in parties"),
        ({"dataset": "tables", "parties": TWO, "active": "bank"}, "'bank' is not one of parties"),
        ({"dataset": "tables", "parties": TWO, "views": 2}, "takes its views from parties"),
        ({"datset": "digits"}, "Extra inputs are not permitted"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValidationError, ConfigError), match=message):
        load_data(DataSettings.model_validate(settings), seed=0)


def test_the_number_of_views() -> None:
    assert view_count(DataSettings()) == 4
    assert view_count(DataSettings(dataset="mnist", views=3)) == 3
    assert view_count(DataSettings(dataset="breast_cancer")) == 3
    own = {"dataset": "tables", "parties": TWO}
    assert view_count(DataSettings.model_validate(own)) == 2
    cut = {"dataset": "breast_cancer", "columns": {"active": [0], "p": [1]}}
    assert view_count(DataSettings.model_validate(cut)) == 2


def test_settings_survive_json() -> None:
    settings = DataSettings.model_validate(
        {"dataset": "tables", "parties": TWO, "classes": ["n", "y"]}
    )
    assert DataSettings.model_validate_json(settings.model_dump_json()) == settings


def test_an_unknown_set_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fashion_mnist'"):
        find_dataset("fashion-mnist")


@pytest.mark.parametrize("name", DATASETS)
def test_every_entry_is_complete(name: str) -> None:
    entry = DATASETS[name]
    assert entry.name == name
    assert all(describe(entry).values())
    assert len(set(entry.classes)) == len(entry.classes)
    assert len(entry.classes) >= 2 or (entry.numeric_labels and not entry.classes)
    assert (entry.height is None) == bool(entry.natural_views)
    assert not entry.natural_views or len(entry.natural_views) == entry.views
    for file in entry.files:
        assert len(file.sha256) == 64 or file.size
    for download in entry.downloads:
        assert len(download.file.sha256) == 64
        assert all(address.startswith("http") for address in download.addresses)
