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

from apfed_protocols.ids import JOINT, IdNormalisation

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
_SAMPLE = 20_000
_RULES = ("case_fold", "drop_punctuation", "whole_numbers")
_RUN = re.compile(r"[^\W_]+")
# A number with zeros before it, behind a name or behind nothing.
_PADDED = re.compile(r"(?P<name>[^\W\d_]*)(?P<between>[\W_]*)0\d+")
_WHOLE_NUMBER = re.compile(r"[+-]?0?9(\.0?9)?")
# Fewer IDs of a pattern say nothing of its share among the common people.
_MIN_IDS = 30
_MUCH_RARER = 0.25
# Per cent of the people whose patterns have to be known before others count for nothing.
_NEARLY_ALL = 90


@lru_cache(maxsize=2**15)
def make_pattern(text: str) -> str:
    """Return the pattern of one ID: its punctuation, with each run of letters and digits replaced
    by marks (see `LEGEND`), as "A-9" of "DE-1234567".
    """
    return " & ".join(_make_part_pattern(part) for part in text.split(JOINT))


def count_patterns(texts: Sequence[str]) -> dict[str, int]:
    """Return how many IDs have each pattern, the most frequent first. A pattern shows kinds of
    characters, such as "A-9" for "DE-1234567".

    At most 20,000 IDs, spread evenly over all, are counted. If there are more than `MAX_PATTERNS`
    patterns, letters and digits are not told apart: each run of them counts as "#".

    `texts`: the IDs as they stand in the party's table.
    """
    sample = _sample_texts(texts)
    counts = Counter(map(make_pattern, sample))
    if len(counts) > MAX_PATTERNS:
        counts = Counter(
            _escape_invisible(_RUN.sub("#", text.replace(JOINT, " & "))) for text in sample
        )
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return dict(ordered)


def describe_patterns(counts: Mapping[str, int]) -> str:
    """Return the patterns with their shares in words, as "A-9 56 %, a-9 24 %, A9 20 %".

    `counts`: number of IDs by pattern, from `count_patterns`.
    """
    total = sum(counts.values())
    first_items = list(counts.items())[:MAX_PATTERNS]
    shares = [f"{pattern} {_format_percent(count, total)}" for pattern, count in first_items]
    others = len(counts) - len(shares)
    return ", ".join(shares) + (f" and {others} more" if others else "")


def suggest_rules(texts: Sequence[str], rules: IdNormalisation) -> tuple[str, ...]:
    """Return the names of the normalisation rules under which these IDs have the fewest patterns
    (ways of writing); empty if no rule reduces them.

    Rules that would make one ID of two different IDs are not suggested.

    Args:
        texts: IDs as they stand in the party's table.
        rules: the normalisation that the parties agreed on already.
    """
    sample = _sample_texts(texts)
    best: tuple[str, ...] = ()
    # If all numbers have one length, zeros pad them consistently and need no rule.
    is_padded = len({len(text) for text in sample if text.isdecimal()}) <= 1
    normalised = [rules.normalise_text(text) for text in sample]
    fewest_patterns = len(count_patterns(normalised))
    distinct_ids = len(set(normalised))
    for rule_names in _list_rule_sets(rules):
        if is_padded and "whole_numbers" in rule_names:
            continue
        added: dict[str, Any] = dict.fromkeys(rule_names, True)
        more_rules = replace(rules, **added)
        united = [more_rules.normalise_text(text) for text in sample]
        if len(set(united)) < distinct_ids:
            continue  # two different IDs would become one
        patterns = len(count_patterns(united))
        if patterns < fewest_patterns:
            best = rule_names
            fewest_patterns = patterns
    return best


def suggest_rules_for_patterns(
    own: Iterable[str], theirs: Iterable[str], rules: IdNormalisation
) -> tuple[str, ...]:
    """Return the names of the fewest normalisation rules under which the ID patterns of two parties
    become the same; empty if no rules do that.

    Args:
        own, theirs: the frequent patterns of either party, such as "A-9".
        rules: the normalisation that the parties agreed on already.
    """
    own_patterns = set(own)
    their_patterns = set(theirs)
    for rule_names in _list_rule_sets(rules):
        if _apply_rules(own_patterns, rule_names) == _apply_rules(their_patterns, rule_names):
            return rule_names
    return ()


def differ_by_zeros(own: Iterable[str], theirs: Iterable[str], rules: IdNormalisation) -> bool:
    """Return whether leading zeros are what keeps the ID patterns of two parties apart: they
    differ, and no normalisation rules make them the same; without leading zeros they would be the
    same, or some rules would make them so.

    Args:
        own, theirs: the frequent patterns of either party; "09" stands for a number with leading
            zeros.
        rules: the normalisation that the parties agreed on already.
    """
    own_patterns = set(own)
    their_patterns = set(theirs)
    if own_patterns == their_patterns:
        return False
    if suggest_rules_for_patterns(own_patterns, their_patterns, rules):
        return False
    own_without_zeros = {pattern.replace("09", "9") for pattern in own_patterns}
    their_without_zeros = {pattern.replace("09", "9") for pattern in their_patterns}
    if own_without_zeros == their_without_zeros:
        return True
    return bool(suggest_rules_for_patterns(own_without_zeros, their_without_zeros, rules))


def share_no_id(own: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Return whether almost no ID can be common to two parties, since their IDs have different
    patterns: an ID has the same pattern at both parties.

    Args:
        own, theirs: share of the party's IDs that have a pattern, in whole per cent, by pattern;
            rare patterns may be missing.
    """
    if any("#" in pattern for pattern in (*own, *theirs)):
        return False  # "#" does not tell letters from digits
    known_percent = min(sum(own.values()), sum(theirs.values()))
    return known_percent >= _NEARLY_ALL and own.keys().isdisjoint(theirs.keys())


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
    all_counts = Counter(patterns)
    if len(all_counts) > MAX_PATTERNS:
        return {}
    common_counts = Counter(
        pattern for pattern, is_match in zip(patterns, is_common, strict=True) if is_match
    )
    frequent = sorted(pattern for pattern, count in all_counts.items() if count >= _MIN_IDS)
    shares = [common_counts[pattern] / all_counts[pattern] for pattern in frequent]
    largest_share = max(shares, default=0.0)
    return {
        pattern: (common_counts[pattern], all_counts[pattern])
        for pattern in frequent
        if common_counts[pattern] < _MUCH_RARER * largest_share * all_counts[pattern]
    }


def _make_part_pattern(part: str) -> str:
    """Return the pattern of one column of an ID; a number with leading zeros becomes 09."""
    padded = _PADDED.fullmatch(part)
    if padded:
        prefix = _RUN.sub(_mark_run, padded["name"] + padded["between"])
        return f"{_escape_invisible(prefix)}09"
    return _escape_invisible(_RUN.sub(_mark_run, part))


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
    """Return at most `_SAMPLE` texts, spread evenly."""
    step = -(-len(texts) // _SAMPLE) or 1
    return texts[::step]


def _format_percent(count: int, total: int) -> str:
    """Return a share in whole per cent."""
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 1 else "< 1 %"


def _list_rule_sets(rules: IdNormalisation) -> list[tuple[str, ...]]:
    """Return all sets of normalisation rules that are not applied yet, the smallest first."""
    names = {field.name for field in fields(rules)}
    unused = [rule for rule in _RULES if rule in names and not getattr(rules, rule)]
    return [chosen for size in range(1, len(unused) + 1) for chosen in combinations(unused, size)]


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
            marks = "".join(_RUN.findall(pattern))
            pattern = "".join(mark for mark in ("A", "a", "0", "9", "#") if mark in marks)
        normalised_patterns.add(pattern)
    return normalised_patterns
