"""Hostile YAML: what would hang, exhaust memory or end in a raw error is refused before."""

from pathlib import Path
from typing import Any

import pytest

from secure_apfed.config.file import load_config, load_config_text
from secure_apfed.config.plain_yaml import MOST_BYTES
from secure_apfed.errors import ConfigError
from secure_apfed.settings import did_you_mean
from tests.secure_apfed.test_config_file import GOOD

LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 7)
)


def refusal_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, source="run.yaml", overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (LAUGHS, "run.yaml:2"),
        (GOOD + "defences: &d [*d]\n", "run.yaml:10"),
        (GOOD + "base: &b {x: 1}\nmore: {<<: *b}\n", "run.yaml:11"),
    ],
)
def test_aliases_are_refused_before_they_are_followed(text: str, place: str) -> None:
    assert refusal_of(text).startswith(f"{place}: aliases")
    with pytest.raises(ConfigError, match="aliases"):
        load_config_text(GOOD, overrides=["data=[&a [x], *a]"])


@pytest.mark.parametrize(
    "key",
    [
        "2024-01-01",
        "!!binary aGk=",
        "1",
        "1.5",
        "yes",
        "null",
        "~",
        "<<",
        "? [a, b]\n",
        "? {a: b}\n",
    ],
)
def test_keys_are_texts(key: str) -> None:
    told = refusal_of(GOOD + f"{key}: {{}}\n")
    assert told.startswith("run.yaml:10: ")
    assert "keys are texts" in told
    assert "quotes" in told


def test_a_key_in_quotes_is_a_text() -> None:
    assert "run.yaml:10: 2024-01-01: is an unknown key" in refusal_of(GOOD + "'2024-01-01': 1\n")


@pytest.mark.parametrize("number", ["9" * 200_000, "0x" + "f" * 200_000, "1" + ":1" * 100_000,
                                    "1" + ":1" * 100_000 + ".5", "1" + "_1" * 100_000])  # fmt: skip
def test_endless_numbers_are_refused(number: str) -> None:
    assert "run.yaml:2: a number of" in refusal_of(f"name: x\nseed: {number}\n")


def test_values_of_other_kinds_are_named() -> None:
    assert "seed" in refusal_of(GOOD + "seed: 2024-01-01\n")
    assert refusal_of(GOOD + "seed: .nan\n").startswith("run.yaml:10: seed: ")
    for tag in ("!!binary aGk=", "!!set {a, b}", "!!omap [a: b]", "!mine x", "!!python/name:os.x"):
        assert "run.yaml:10: the tag " in refusal_of(GOOD + f"seed: {tag}\n")


def test_many_problems_are_told_in_time() -> None:
    assert "run.yaml:10: x0: is an unknown key" in refusal_of(
        GOOD + "".join(f"x{n}: 1\n" for n in range(5000))
    )


@pytest.mark.parametrize("text", ["[" * 20_000, "a: " * 20_000, "- " * 20_000, "{a: " * 20_000])
def test_deep_nesting_is_refused(text: str) -> None:
    assert "is not YAML" in refusal_of(text)


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "#" * MOST_BYTES)
    with pytest.raises(ConfigError, match=r"run\.yaml: is larger than .* bytes; expected"):
        load_config(path)
    endless = Path("/dev/zero")
    with pytest.raises(ConfigError, match="larger than"):
        load_config(endless)


def test_a_file_of_unknown_keys_is_refused_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sentence looks for the nearest known key; a hundred are enough to mend."""
    text = "\n".join(f"k{number}: 1" for number in range(MOST_BYTES // 12))
    looked_for = list[str]()

    def counted(given: str, *known: Any, **how: Any) -> str:
        looked_for.append(given)
        return did_you_mean(given, *known, **how)

    monkeypatch.setattr("secure_apfed.config.file.did_you_mean", counted)
    lines = refusal_of(text).splitlines()
    assert len(looked_for) <= 100
    assert len(lines) == 101
    assert "k0: is an unknown key" in "".join(lines)
    assert lines[-1] == "run.yaml: has more problems than these 100; mend them first"
