"""Patterns of IDs: in how many ways a party writes them, and the rules that unite these ways.

Run by: each party on its own IDs, before and after a set intersection. A pattern shows kinds of
characters and no character that tells people apart: `DE-1234567` and `FR-7654321` are both `A-9`.
Parties that write one person in two ways have no common person there, and nothing else says so.

Examples:
    >>> count_patterns(["DE-1234567", "de-1234568", "DE1234569"])
    {'A-9': 1, 'A9': 1, 'a-9': 1}
    >>> suggest_rules(["DE-1234567", "de-1234568", "DE1234569"], IdNormalisation())
    ('case_fold', 'drop_punctuation')
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

from apfed_protocols.ids import COLUMN_SEPARATOR, IdNormalisation

__all__ = [
    "LEGEND",
    "MAX_PATTERNS",
    "count_patterns",
    "describe_patterns",
    "differ_by_zeros",
    "find_unmatched_patterns",
    "make_pattern",
    "share_no_id",
    "suggest_rules",
    "suggest_rules_for_patterns",
]

LEGEND = "A: capitals, a: small letters, 9: digits, 09: leading zeros, #: letters or digits"
MAX_PATTERNS = 12
"""With more patterns than these, letters and digits are not told apart."""
_MAX_SAMPLE_IDS = 20_000
_RULE_NAMES = ("case_fold", "drop_punctuation", "whole_numbers")
_ALPHANUMERIC_RUN = re.compile(r"[^\W_]+")
# A number with zeros before it, behind a name or behind nothing.
_ZERO_PADDED_NUMBER = re.compile(r"(?P<name>[^\W\d_]*)(?P<between>[\W_]*)0\d+")
_WHOLE_NUMBER = re.compile(r"[+-]?0?9(\.0?9)?")
# Fewer IDs of a pattern say nothing of its share among the common people.
_MIN_IDS_OF_PATTERN = 30
_RARE_SHARE_RATIO = 0.25
# Per cent of the people whose patterns have to be known before others count for nothing.
_MIN_KNOWN_PERCENT = 90


@lru_cache(maxsize=2**15)
def make_pattern(text: str) -> str:
    """Return the pattern of one ID: its punctuation, with each run of letters and digits replaced
    by marks (see `LEGEND`), as "A-9" of "DE-1234567".
    """
    return " & ".join(
        _make_column_pattern(column_text) for column_text in text.split(COLUMN_SEPARATOR)
    )


def count_patterns(texts: Sequence[str]) -> dict[str, int]:
    """Return how many IDs have each pattern, the most frequent first. A pattern shows kinds of
    characters, such as "A-9" for "DE-1234567".

    At most 20,000 IDs, spread evenly over all, are counted. If there are more than `MAX_PATTERNS`
    patterns, letters and digits are not told apart: each run of them counts as "#".

    `texts`: the IDs as they stand in the party's table.
    """
    sample = _sample_texts(texts)
    count_by_pattern = Counter(map(make_pattern, sample))
    if len(count_by_pattern) > MAX_PATTERNS:
        count_by_pattern = Counter(
            _escape_invisible(_ALPHANUMERIC_RUN.sub("#", text.replace(COLUMN_SEPARATOR, " & ")))
            for text in sample
        )
    ordered_items = sorted(count_by_pattern.items(), key=lambda item: (-item[1], item[0]))
    return dict(ordered_items)


def describe_patterns(count_by_pattern: Mapping[str, int]) -> str:
    """Return the patterns with their shares in words, as "A-9 56 %, a-9 24 %, A9 20 %".

    `count_by_pattern`: number of IDs by pattern, from `count_patterns`.
    """
    total = sum(count_by_pattern.values())
    first_items = list(count_by_pattern.items())[:MAX_PATTERNS]
    shares = [f"{pattern} {_format_percent(count, total)}" for pattern, count in first_items]
    other_count = len(count_by_pattern) - len(shares)
    return ", ".join(shares) + (f" and {other_count} more" if other_count else "")


def suggest_rules(texts: Sequence[str], agreed_rules: IdNormalisation) -> tuple[str, ...]:
    """Return the names of the normalisation rules under which these IDs have the fewest patterns
    (ways of writing); empty if no rule reduces them.

    Rules that would make one ID of two different IDs are not suggested.

    Args:
        texts: IDs as they stand in the party's table.
        agreed_rules: the normalisation that the parties agreed on already.
    """
    sample = _sample_texts(texts)
    best_rules: tuple[str, ...] = ()
    # If all numbers have one length, zeros pad them consistently and need no rule.
    have_equal_length = len({len(text) for text in sample if text.isdecimal()}) <= 1
    normalised_ids = [agreed_rules.normalise_text(text) for text in sample]
    fewest_pattern_count = len(count_patterns(normalised_ids))
    distinct_count = len(set(normalised_ids))
    for rule_names in _list_rule_sets(agreed_rules):
        if have_equal_length and "whole_numbers" in rule_names:
            continue
        added_rules: dict[str, Any] = dict.fromkeys(rule_names, True)
        extended_rules = replace(agreed_rules, **added_rules)
        rewritten_ids = [extended_rules.normalise_text(text) for text in sample]
        if len(set(rewritten_ids)) < distinct_count:
            continue  # two different IDs would become one
        pattern_count = len(count_patterns(rewritten_ids))
        if pattern_count < fewest_pattern_count:
            best_rules = rule_names
            fewest_pattern_count = pattern_count
    return best_rules


def suggest_rules_for_patterns(
    own_frequent_patterns: Iterable[str],
    their_frequent_patterns: Iterable[str],
    agreed_rules: IdNormalisation,
) -> tuple[str, ...]:
    """Return the names of the fewest normalisation rules under which the ID patterns of two parties
    become the same; empty if no rules do that.

    Args:
        own_frequent_patterns, their_frequent_patterns: the frequent patterns of either party, such
            as "A-9".
        agreed_rules: the normalisation that the parties agreed on already.
    """
    own_patterns = set(own_frequent_patterns)
    their_patterns = set(their_frequent_patterns)
    for rule_names in _list_rule_sets(agreed_rules):
        if _apply_rules(own_patterns, rule_names) == _apply_rules(their_patterns, rule_names):
            return rule_names
    return ()


def differ_by_zeros(
    own_frequent_patterns: Iterable[str],
    their_frequent_patterns: Iterable[str],
    agreed_rules: IdNormalisation,
) -> bool:
    """Return whether leading zeros are what keeps the ID patterns of two parties apart: they
    differ, and no normalisation rules make them the same; without leading zeros they would be the
    same, or some rules would make them so.

    Args:
        own_frequent_patterns, their_frequent_patterns: the frequent patterns of either party; "09"
            stands for a number with leading zeros.
        agreed_rules: the normalisation that the parties agreed on already.
    """
    own_patterns = set(own_frequent_patterns)
    their_patterns = set(their_frequent_patterns)
    if own_patterns == their_patterns:
        return False
    if suggest_rules_for_patterns(own_patterns, their_patterns, agreed_rules):
        return False
    own_without_zeros = {pattern.replace("09", "9") for pattern in own_patterns}
    their_without_zeros = {pattern.replace("09", "9") for pattern in their_patterns}
    if own_without_zeros == their_without_zeros:
        return True
    return bool(suggest_rules_for_patterns(own_without_zeros, their_without_zeros, agreed_rules))


def share_no_id(
    own_percent_by_pattern: Mapping[str, int], their_percent_by_pattern: Mapping[str, int]
) -> bool:
    """Return whether almost no ID can be common to two parties, since their IDs have different
    patterns: an ID has the same pattern at both parties.

    Args:
        own_percent_by_pattern, their_percent_by_pattern: share of the party's IDs that have a
            pattern, in whole per cent, by pattern; rare patterns may be missing.
    """
    if any("#" in pattern for pattern in (*own_percent_by_pattern, *their_percent_by_pattern)):
        return False  # "#" does not tell letters from digits
    known_percent = min(
        sum(own_percent_by_pattern.values()), sum(their_percent_by_pattern.values())
    )
    return known_percent >= _MIN_KNOWN_PERCENT and own_percent_by_pattern.keys().isdisjoint(
        their_percent_by_pattern.keys()
    )


def find_unmatched_patterns(
    texts: Sequence[str], is_common: Sequence[bool]
) -> dict[str, tuple[int, int]]:
    """Return the patterns whose IDs are found at the other parties far more rarely than IDs of
    another pattern: a sign that the others write them in another way.

    Args:
        texts: the party's IDs.
        is_common: whether each ID was found at the other parties.

    Returns:
        (common IDs, all IDs) by pattern. At least 30 IDs have such a pattern, and the share of
        common IDs among them is below a quarter of the largest share of any pattern. Empty if there
        are more than `MAX_PATTERNS` patterns.
    """
    patterns = [make_pattern(text) for text in texts]
    id_count_by_pattern = Counter(patterns)
    if len(id_count_by_pattern) > MAX_PATTERNS:
        return {}
    common_count_by_pattern = Counter(
        pattern for pattern, is_match in zip(patterns, is_common, strict=True) if is_match
    )
    frequent_patterns = sorted(
        pattern for pattern, count in id_count_by_pattern.items() if count >= _MIN_IDS_OF_PATTERN
    )
    common_shares = [
        common_count_by_pattern[pattern] / id_count_by_pattern[pattern]
        for pattern in frequent_patterns
    ]
    largest_share = max(common_shares, default=0.0)
    counts_by_rare_pattern = {}
    for pattern in frequent_patterns:
        common_count = common_count_by_pattern[pattern]
        id_count = id_count_by_pattern[pattern]
        if common_count < _RARE_SHARE_RATIO * largest_share * id_count:
            counts_by_rare_pattern[pattern] = (common_count, id_count)
    return counts_by_rare_pattern


def _make_column_pattern(column_text: str) -> str:
    """Return the pattern of one column of an ID; a number with leading zeros becomes 09."""
    padded_number = _ZERO_PADDED_NUMBER.fullmatch(column_text)
    if padded_number:
        prefix = _ALPHANUMERIC_RUN.sub(_mark_run, padded_number["name"] + padded_number["between"])
        return f"{_escape_invisible(prefix)}09"
    return _escape_invisible(_ALPHANUMERIC_RUN.sub(_mark_run, column_text))


def _mark_run(run: re.Match[str]) -> str:
    """Return the marks for one run of letters and digits: A if it has capitals, a if it has small
    letters, 9 if it has digits.
    """
    text = run.group()
    marks = ""
    if any(letter.isalpha() and not letter.islower() for letter in text):
        marks += "A"
    if any(letter.islower() for letter in text):
        marks += "a"
    if any(not letter.isalpha() for letter in text):
        marks += "9"
    return marks


def _escape_invisible(text: str) -> str:
    """Return the text with non-printable characters replaced by their code points, as U+0009."""
    return "".join(letter if letter.isprintable() else f"U+{ord(letter):04X}" for letter in text)


def _sample_texts(texts: Sequence[str]) -> Sequence[str]:
    """Return at most `_MAX_SAMPLE_IDS` texts, spread evenly."""
    step = -(-len(texts) // _MAX_SAMPLE_IDS) or 1
    return texts[::step]


def _format_percent(count: int, total: int) -> str:
    """Return a share in whole per cent."""
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 1 else "< 1 %"


def _list_rule_sets(agreed_rules: IdNormalisation) -> list[tuple[str, ...]]:
    """Return all sets of normalisation rules that are not applied yet, the smallest first."""
    rule_fields = {field.name for field in fields(agreed_rules)}
    unused_rules = [
        rule for rule in _RULE_NAMES if rule in rule_fields and not getattr(agreed_rules, rule)
    ]
    return [
        rule_set
        for size in range(1, len(unused_rules) + 1)
        for rule_set in combinations(unused_rules, size)
    ]


def _apply_rules(patterns: set[str], rule_names: tuple[str, ...]) -> set[str]:
    """Return the patterns that IDs with these patterns have after normalisation, as far as patterns
    determine that.

    `rule_names`: names of normalisation rules: "whole_numbers", "case_fold", "drop_punctuation".
    """
    normalised_patterns = set[str]()
    for pattern in patterns:
        # Marks: A capitals, a small letters, 9 digits, 09 leading zeros (`LEGEND`).
        if "whole_numbers" in rule_names and _WHOLE_NUMBER.fullmatch(pattern):
            pattern = "9"
        if "case_fold" in rule_names:
            pattern = pattern.replace("Aa", "a").replace("A", "a")
        if "drop_punctuation" in rule_names:
            # One run remains, with each mark once, in the order in which `_mark_run` writes them.
            marks = "".join(_ALPHANUMERIC_RUN.findall(pattern))
            pattern = "".join(mark for mark in ("A", "a", "0", "9", "#") if mark in marks)
        normalised_patterns.add(pattern)
    return normalised_patterns
