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
    "pattern_of",
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
def pattern_of(text: str) -> str:
    """Return the pattern of one ID: its punctuation, and a mark for each run of other letters."""
    return " & ".join(_pattern_of_part(part) for part in text.split(JOINT))


def count_patterns(texts: Sequence[str]) -> dict[str, int]:
    """Return how many IDs have each pattern, the most frequent first.

    At most 20,000 IDs are read, spread evenly over all.

    `texts`: the IDs as they stand in the party's table.
    """
    sample = _sample_texts(texts)
    counts = Counter(map(pattern_of, sample))
    if len(counts) > MAX_PATTERNS:
        counts = Counter(
            _escape_invisible(_RUN.sub("#", text.replace(JOINT, " & "))) for text in sample
        )
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return dict(ordered)


def describe_patterns(counts: Mapping[str, int]) -> str:
    """Say the patterns with their shares, such as "A-9 56 %, a-9 24 %, A9 20 %".

    `counts`: number of IDs by pattern.
    """
    total = sum(counts.values())
    parts = [
        f"{pattern} {_format_percent(count, total)}"
        for pattern, count in [*counts.items()][:MAX_PATTERNS]
    ]
    others = len(counts) - len(parts)
    return ", ".join(parts) + (f" and {others} more" if others else "")


def suggest_rules(texts: Sequence[str], rules: IdNormalisation) -> tuple[str, ...]:
    """Return the rules that would unite most patterns of these IDs; empty if no rule helps.

    Rules that would make one ID of two are not suggested.

    Args:
        texts: IDs as they stand in the party's table.
        rules: that the parties agreed on already.
    """
    sample = _sample_texts(texts)
    best: tuple[str, ...] = ()
    # Numbers of one length are padded everywhere, and no number stands there without its zeros.
    is_padded = len({len(text) for text in sample if text.isdecimal()}) <= 1
    fewest = len(count_patterns([*map(rules.normalise_text, sample)]))
    distinct = len({*map(rules.normalise_text, sample)})
    for chosen in _list_rule_sets(rules):
        if is_padded and "whole_numbers" in chosen:
            continue
        added: dict[str, Any] = dict.fromkeys(chosen, True)
        united = [*map(replace(rules, **added).normalise_text, sample)]
        if len({*united}) < distinct:
            continue
        count = len(count_patterns(united))
        if count < fewest:
            best = chosen
            fewest = count
    return best


def suggest_rules_for_patterns(
    own: Iterable[str], theirs: Iterable[str], rules: IdNormalisation
) -> tuple[str, ...]:
    """Return the fewest rules under which the patterns of two parties are the same; none if none.

    Args:
        own, theirs: patterns that are frequent at each of them.
        rules: that the parties agreed on already.
    """
    own_set = {*own}
    their_set = {*theirs}
    for chosen in _list_rule_sets(rules):
        if _apply_rules(own_set, chosen) == _apply_rules(their_set, chosen):
            return chosen
    return ()


def differ_by_zeros(own: Iterable[str], theirs: Iterable[str], rules: IdNormalisation) -> bool:
    """Return whether no rule unites the patterns of two parties, but numbers without zeros would.

    Args:
        own, theirs: patterns that are frequent at each of them.
        rules: that the parties agreed on already.
    """
    own_set = {*own}
    their_set = {*theirs}
    if own_set == their_set or suggest_rules_for_patterns(own_set, their_set, rules):
        return False
    own_plain = {pattern.replace("09", "9") for pattern in own_set}
    their_plain = {pattern.replace("09", "9") for pattern in their_set}
    return own_plain == their_plain or bool(
        suggest_rules_for_patterns(own_plain, their_plain, rules)
    )


def share_no_id(own: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Return whether hardly an ID of one party can be one of the other's, by their patterns.

    One ID has one pattern wherever it stands, so IDs of different patterns differ.

    Args:
        own, theirs: by pattern, its share in whole per cent; rarer ones may be left out.
    """
    if any("#" in pattern for pattern in (*own, *theirs)):
        return False  # of which letters and digits are not known
    is_known = min(sum(own.values()), sum(theirs.values())) >= _NEARLY_ALL
    return is_known and not own.keys() & theirs.keys()


def find_unmatched_patterns(
    texts: Sequence[str], is_common: Sequence[bool]
) -> dict[str, tuple[int, int]]:
    """Return the patterns that are far rarer among the common people than another pattern.

    Args:
        texts: a party's IDs; is_common: whether each was found at the other parties.

    Returns:
        By pattern (common, all) of its IDs, where at least 30 have it and its share of common
        people is below a quarter of the share of the most common pattern.
    """
    patterns = [pattern_of(text) for text in texts]
    total = Counter(patterns)
    if len(total) > MAX_PATTERNS:
        return {}
    common = Counter(
        pattern for pattern, is_match in zip(patterns, is_common, strict=True) if is_match
    )
    frequent = {pattern for pattern, count in total.items() if count >= _MIN_IDS}
    best = max((common[pattern] / total[pattern] for pattern in frequent), default=0.0)
    return {
        pattern: (common[pattern], total[pattern])
        for pattern in sorted(frequent)
        if common[pattern] < _MUCH_RARER * best * total[pattern]
    }


def _pattern_of_part(part: str) -> str:
    """Return the pattern of one column of an ID; a number with leading zeros is written 09."""
    padded = _PADDED.fullmatch(part)
    if padded:
        before = _RUN.sub(_mark_run, padded["name"] + padded["between"])
        return f"{_escape_invisible(before)}09"
    return _escape_invisible(_RUN.sub(_mark_run, part))


def _mark_run(run: re.Match[str]) -> str:
    """Return the mark of one run of letters and digits: some of A, a and 9."""
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
    """Return the text with characters that do not print as their code points."""
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
    """Return sets of rules that do not hold yet, the smallest first."""
    names = {field.name for field in fields(rules)}
    unused = [rule for rule in _RULES if rule in names and not getattr(rules, rule)]
    return [chosen for size in range(1, len(unused) + 1) for chosen in combinations(unused, size)]


def _apply_rules(patterns: set[str], chosen: tuple[str, ...]) -> set[str]:
    """Return the patterns after these rules, as far as the patterns themselves determine them.

    `chosen`: names of normalisation rules.
    """
    united = set[str]()
    for pattern in patterns:
        text = pattern
        if "whole_numbers" in chosen and _WHOLE_NUMBER.fullmatch(text):
            text = "9"
        if "case_fold" in chosen:
            text = text.replace("Aa", "a").replace("A", "a")
        if "drop_punctuation" in chosen:
            marks = "".join(_RUN.findall(text))
            text = "".join(mark for mark in ("A", "a", "0", "9", "#") if mark in marks)
        united.add(text)
    return united
