"""A party's report on its aligned people: how many there are, and ID patterns that rarely match.

Run by: each party on its own IDs, once its rows are aligned. It learns nothing beyond the
alignment, and sends nothing.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from apfed_protocols.id_patterns import find_unmatched_patterns, make_pattern, suggest_rules
from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.settings.alignment import ID_RULES, AlignmentSettings

_MAX_COMPARED_IDS = 200_000  # IDs whose patterns are compared, evenly spread


class CommonPeople(BaseModel):
    """A party's report on how many of its own people are common after an alignment.

    Attributes:
        party: the party whose people they are.
        own: number of rows of its table.
        common: number of these rows whose people are common.
        known_to: in words, the parties that know the common people, too.
        warning: a sentence on ID patterns that are far rarer among the common people than in the
            table, which may have a wrong spelling; empty: there are none.
    """

    model_config = ConfigDict(frozen=True)

    party: str = Field(max_length=100)
    own: int = Field(ge=0)
    common: int = Field(ge=0)
    known_to: str = Field(max_length=100)
    warning: str = Field("", max_length=4000)

    @property
    def sentence(self) -> str:
        """The numbers as a sentence for the party's user."""
        return f"{self.common:,} of your {self.own:,} people are known to {self.known_to}"


def describe_common(
    party: str,
    ids: Sequence[str],
    rows: NDArray[np.int64],
    settings: AlignmentSettings,
    *,
    active: str,
) -> CommonPeople:
    """Return a party's report on how many of its own people are common after an alignment.

    Args:
        party: name of the party.
        ids: IDs of its table, in the table's order.
        rows: for each of the U aligned people, in their common order, the row of the party's table,
            (U,); -1: the party does not have the person.
        settings: the agreed settings.
        active: the active's name; under `mode: pairwise` a passive shares people with it only.
    """
    is_common = np.zeros(len(ids), dtype=bool)
    is_common[rows[rows >= 0]] = True
    known_to = "all"
    if settings.mode == "pairwise":
        known_to = "at least one passive" if party == active else active
    return CommonPeople(
        party=party,
        own=len(ids),
        common=int(is_common.sum()),
        known_to=known_to,
        warning=_describe_mismatches(party, ids, is_common, settings),
    )


def _describe_mismatches(
    party: str, ids: Sequence[str], is_common: NDArray[np.bool_], settings: AlignmentSettings
) -> str:
    """Return a warning on ID patterns that rarely match other parties' IDs, with a remedy.

    A pattern is the shape of an ID, such as letters before digits. Other parties may write such IDs
    in another way, so that equal people do not match. Returns "" if there are no such patterns.

    `is_common`: whether the person of each of the N own rows is common, (N,).
    """
    # In a large table only every `step`-th row is compared, to bound the time.
    step = max(1, math.ceil(len(ids) / _MAX_COMPARED_IDS))
    rules = make_id_rules(settings)
    texts = [rules.normalise_text(text) for text in ids[::step]]
    are_common = is_common[::step].tolist()
    counts_by_unmatched_pattern = find_unmatched_patterns(texts, are_common)
    if not counts_by_unmatched_pattern:
        return ""
    rare_patterns = ", ".join(
        f"{pattern} ({common:,} of {total:,})"
        for pattern, (common, total) in counts_by_unmatched_pattern.items()
    )
    # For each ID of any other pattern: whether it is common.
    other_ids_are_common = [
        is_matched
        for text, is_matched in zip(texts, are_common, strict=True)
        if make_pattern(text) not in counts_by_unmatched_pattern
    ]
    rules_advice = propose_rules(suggest_rules(ids, rules), settings)
    command = "secure-apfed project check --meet 60"
    # If no rule would make the IDs match, the parties compare spellings with each other.
    remedy = rules_advice or f"compare how the parties write them, with `{command}`"
    return (
        f"{party}: IDs written as {rare_patterns} are far rarer among the common people than its "
        f"others ({sum(other_ids_are_common):,} of {len(other_ids_are_common):,}); if these are "
        f"spellings of one kind of ID, {remedy}"
    )


def propose_rules(rules: Sequence[str], settings: AlignmentSettings) -> str:
    """Return advice to agree on the present normalisation rules and on some further ones.

    `rules`: names of the further rules; if there are none, the advice is "".
    """
    if not rules:
        return ""
    all_rules = [rule for rule in ID_RULES if rule in (*settings.normalisation, *rules)]
    return f"agree on alignment.normalisation: [{', '.join(all_rules)}]"
