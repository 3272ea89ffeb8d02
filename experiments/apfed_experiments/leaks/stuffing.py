"""A10: how many of its guesses a party tries and learns in intersections, by limit."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

from apfed_attacks.live.stuffing import Tables, play_stuffing
from apfed_attacks.people.id_stuffing import IdStuffing
from apfed_experiments.leaks.live import Setting
from apfed_experiments.summary import Row
from secure_apfed.alignment.records import AlignmentHistory
from secure_apfed.settings.alignment import AlignmentSettings

__all__ = ["stuffing"]

Role: TypeAlias = Literal["active", "passive"]

_CASES = (
    # limits, agreed size, minimum, intersections, runs with a peer, overstuffed
    ("none", 10_000, 2, 1, None, False),
    ("size", 550, 2, 1, None, False),
    ("size, exceeded", 550, 2, 1, None, True),
    ("size, repeated", 550, 2, 20, None, False),
    ("size and 2 runs", 550, 2, 20, 2, False),
    ("minimum above the overlap", 10_000, 550, 1, None, False),
)
_ENDS: tuple[tuple[Role, str], ...] = (
    ("passive", "ecdh"), ("active", "ecdh"), ("active", "circuit"),
)  # fmt: skip


def stuffing() -> Iterator[Setting]:
    """500 customers each, 300 in common; 400 guesses, half of which the victim has."""
    for (role, protocol), (limits, size, minimum, intersections, runs, over) in product(
        _ENDS, _CASES
    ):
        attack = IdStuffing(candidates=400, intersections=intersections, overstuff=over)
        settings = AlignmentSettings(protocol=protocol, maximum_ids=size, minimum_rows=minimum)
        yield Setting(
            columns={"adversary": role, "protocol": protocol, "limits": limits},
            measure=partial(_stuffed, attack, settings, role, runs),
        )


def _stuffed(
    attack: IdStuffing, settings: AlignmentSettings, role: Role, runs: int | None, seed: int
) -> Row:
    people = [f"person {number}" for number in range(2_000)]
    tables = Tables(own=people[:500], victim=people[200:700], outsiders=people[700:])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "alignments.jsonl"
        history = AlignmentHistory(path, runs_with_a_peer=runs) if runs else None
        result, stuffed = play_stuffing(
            attack, tables, settings, role=role, history=history, seed=seed
        )
    return {
        "guesses tried": len(stuffed.tried),
        "learned to be the peer's": len(stuffed.found),
        "auc": result.score.get("auc"),
        "refused": "yes" if stuffed.refusal else "no",
    }
