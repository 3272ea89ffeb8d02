"""Patterns of IDs: what they show, and the rules that unite ways of writing one kind of ID."""

import uuid

import pytest

from apfed_protocols.errors import DataError, LocalProtocolError
from apfed_protocols.id_patterns import (
    _apply_rules,
    count_patterns,
    describe_patterns,
    differ_by_zeros,
    find_unmatched_patterns,
    make_pattern,
    share_no_id,
    suggest_rules,
    suggest_rules_for_patterns,
)
from apfed_protocols.ids import IdNormalisation, encode_ids

PLAIN = IdNormalisation()


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("DE-1234567", "A-9"),
        ("de-0234567", "a-09"),
        ("KD004819", "A09"),
        ("kd 0481", "a 09"),
        ("-07", "-09"),
        ("kd-0", "a-9"),
        ("2026-01-31", "9-9-9"),
        ("a0-0b1", "a9-a9"),
        ("DE1234567", "A9"),
        ("Ann", "Aa"),
        ("0123", "09"),
        ("0", "9"),
        ("7", "9"),
        ("7.0", "9.9"),
        ("DE\x1f7", "A & 9"),
        ("DE\u00a07", "AU+00A09"),
        ("中文12", "A9"),
        ("", ""),
    ],
)
def test_a_pattern_shows_kinds_of_characters(text: str, pattern: str) -> None:
    assert make_pattern(text) == pattern


def test_patterns_of_random_texts_are_few() -> None:
    uuids = [str(uuid.UUID(int=7**k % 2**128)) for k in range(1, 300)]
    assert [*count_patterns(uuids)] == ["#-#-#-#-#"]


def test_shares_are_said_in_whole_percent() -> None:
    counts = count_patterns(["A-1"] * 56 + ["a-1"] * 24 + ["A1"] * 20)
    assert describe_patterns(counts) == "A-9 56 %, a-9 24 %, A9 20 %"
    assert describe_patterns({"A": 999, "a": 1}) == "A 100 %, a < 1 %"


def spelt(*forms: str) -> list[str]:
    return [forms[row % len(forms)].format(1000 + row) for row in range(120)]


@pytest.mark.parametrize(
    ("texts", "rules"),
    [
        (spelt("DE-{}"), ()),
        (spelt("DE-{}", "de-{}"), ("case_fold",)),
        (spelt("DE-{}", "DE{}", "DE {}", "DE.{}"), ("drop_punctuation",)),
        (spelt("DE-{}", "de-{}", "DE{}"), ("case_fold", "drop_punctuation")),
        (spelt("00{}", "{}"), ("whole_numbers",)),
        ([f"{row:04d}" for row in range(120)], ()),
        ([f"{row}-{row}" for row in range(1, 60)] + [f"{row}{row}" for row in range(1, 60)], ()),
        ([], ()),
    ],
    ids=["one", "case", "punctuation", "both", "zeros", "padded", "would merge people", "none"],
)
def test_rules_that_unite_patterns_are_suggested(texts: list[str], rules: tuple[str, ...]) -> None:
    assert suggest_rules(texts, PLAIN) == rules


@pytest.mark.parametrize(
    ("own", "theirs", "rules"),
    [
        (["A-9"], ["a-9"], ("case_fold",)),
        (["A-9"], ["A9"], ("drop_punctuation",)),
        (["A-9"], ["a9"], ("case_fold", "drop_punctuation")),
        (["9"], ["09", "9"], ("whole_numbers",)),
        (["9"], ["a-9"], ()),
    ],
)
def test_rules_that_unite_two_parties_are_suggested(
    own: list[str], theirs: list[str], rules: tuple[str, ...]
) -> None:
    assert suggest_rules_for_patterns(own, theirs, PLAIN) == rules


# Patterns of two parties, and whether zeros before numbers alone keep them apart.
PADDED = [
    (["A-09"], ["a 9"], True),
    (["A-09", "A-9"], ["a9"], True),
    (["A-09", "A-9"], ["a9", "a09"], False),
    (["A-09"], ["A-09"], False),
    (["09", "9"], ["9"], False),
    (["A-09"], ["9"], False),
]


@pytest.mark.parametrize(("own", "theirs", "expected"), PADDED)
def test_zeros_that_no_rule_drops_are_found(
    own: list[str], theirs: list[str], expected: bool
) -> None:
    assert differ_by_zeros(own, theirs, PLAIN) == expected
    assert differ_by_zeros(theirs, own, PLAIN) == expected


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        ({"A-9": 100}, {"a9": 100}, True),
        ({"A-9": 95}, {"a9": 60, "A9": 31}, True),
        ({"A-9": 95}, {"a9": 60, "A9": 20}, False),
        ({"A-9": 95, "a9": 1}, {"a9": 100}, False),
        ({"#-#": 100}, {"a9": 100}, False),
        ({}, {"a9": 100}, False),
    ],
)
def test_patterns_tell_whether_anybody_can_be_common(
    own: dict[str, int], theirs: dict[str, int], expected: bool
) -> None:
    assert share_no_id(own, theirs) == expected
    assert share_no_id(theirs, own) == expected


@pytest.mark.parametrize("rules", [("case_fold",), ("drop_punctuation",), ("whole_numbers",)])
@pytest.mark.parametrize("text", ["KD-004", "kd 04", "KD04", "007", "Kd/0", "4a"])
def test_patterns_under_rules_are_those_of_texts_under_rules(
    text: str, rules: tuple[str, ...]
) -> None:
    united = _apply_rules({make_pattern(text)}, rules)
    changed = make_pattern(IdNormalisation(**dict.fromkeys(rules, True)).normalise_text(text))  # type: ignore[arg-type]
    assert united == {changed}


def test_a_pattern_that_nobody_else_has_is_found() -> None:
    texts = spelt("DE-{}", "DE{}")
    common = [text.startswith("DE-") and row % 4 == 0 for row, text in enumerate(texts)]
    assert find_unmatched_patterns(texts, common) == {"A9": (0, 60)}
    assert find_unmatched_patterns(texts, [True] * 120) == {}
    assert find_unmatched_patterns(texts, [False] * 120) == {}
    assert find_unmatched_patterns(texts[:20], common[:20]) == {}


def test_letters_and_digits_alone_count() -> None:
    rules = IdNormalisation(case_fold=True, drop_punctuation=True)
    ways = ["DE-1 2.3", "de123", "D/E_123", "\u2013DE\u00a0123\u2014"]
    assert len({encode_ids("bank", [way], rules)[0] for way in ways}) == 1
    assert rules.normalise_text("क्षि-1") == "क्षि1"  # marks of letters stay
    assert rules.normalise_text("a-\x1f-b") == "a\x1fb"


def test_people_whom_the_rule_makes_one_are_refused() -> None:
    with pytest.raises(DataError, match=r"bank has 1 repeated .* drop_punctuation=True"):
        encode_ids("bank", ["1-23", "12-3"], IdNormalisation(drop_punctuation=True))


def test_an_id_of_punctuation_alone_is_refused() -> None:
    with pytest.raises(DataError, match=r"bank has 1 ID\(s\) without a letter .* row\(s\) 1,"):
        encode_ids("bank", ["a-1", "-/-"], IdNormalisation(drop_punctuation=True))


def test_parties_agree_on_the_rule() -> None:
    assert "drop_punctuation" not in PLAIN.encoding
    assert IdNormalisation(drop_punctuation=True).encoding != PLAIN.encoding
    with pytest.raises(LocalProtocolError, match="drop_punctuation: expected True or False"):
        IdNormalisation(drop_punctuation=1)  # type: ignore[arg-type]
