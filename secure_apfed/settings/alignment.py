"""The settings of an intersection: what the parties agree on, and what each chooses for itself."""

from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, field_validator, model_validator

from secure_apfed.settings import EACH_ALONE, Settings, protects

__all__ = ["ID_RULES", "AlignmentSettings", "IdRule"]

_AUTO = "auto"

IdRule: TypeAlias = Literal[
    "unicode_nfc", "strip", "case_fold", "whole_numbers", "drop_punctuation"
]
ID_RULES: tuple[IdRule, ...] = get_args(IdRule)
"""Names of the rules that may normalise IDs; see `apfed_protocols.ids.IdNormalisation`."""


class AlignmentSettings(Settings):
    """The settings of the alignment (private set intersection). All parties must have the same,
    except for those that each decides for itself: `dealer` and `pairwise_overlaps`, if they lead to
    the same protocol, `threads`, `history` and `runs_with_a_peer`.

    Attributes:
        protocol: a key of `apfed_protocols.psi.SET_INTERSECTIONS`, or `auto`, which chooses by the
            next two settings.
        dealer: under `auto`, whether a dealer may take part: a party without IDs that colludes with
            nobody.
        pairwise_overlaps: whether the active may learn its overlap with each single passive. Under
            `auto`, `shown` takes `vole` with a dealer and `ot` without one; `hidden` takes `opprf`
            with a dealer and `opprf_ot` without one, which sends 27 times as many bytes. They are
            hidden from an active that follows the protocol; see `leaks` of these for what a
            deviating one may learn.
        mode: on which people passives help: those that all parties share, or (`pairwise`) those
            that each passive shares with the active. Under `pairwise` the active learns these
            overlaps, and the sum of a row that only one passive knows is that passive's gradient.
        minimum_rows: the smallest intersection that is revealed; at least 1.
        maximum_ids: the largest set accepted from a peer. `max_guesses` says how many IDs a
            deviating peer can test with it.
        normalisation: the rules of `ID_RULES` by which IDs are made comparable, in any order. They
            apply when IDs become bytes.
        date_formats: how dates in IDs are written, such as "%d.%m.%Y": such an ID equals
            2026-01-31.
        threads: the number of threads that this party computes with; null lets the protocol choose.
            Where sets are divided into buckets these are processes; null: one for each core that
            this process may use.
        history: a folder that outlives runs, in which a party records its intersections; null:
            none. The file is `NAME.jsonl` (see `secure_apfed.alignment.records`).
        runs_with_a_peer: how many intersections each peer gets; requires `history`.
    """

    protocol: Annotated[
        str,
        protects(
            "the passives",
            other="the active learns its overlap with each of them",
            order=(
                ("opprf", "opprf_ot", "circuit", "circuit_ot", "circuit_crypten"),
                ("vole", "ot", "ecdh"),
            ),
            read=attrgetter("selected_protocol"),
        ),
    ] = "auto"
    dealer: Annotated[
        bool,
        EACH_ALONE,
        protects(
            "everybody",
            other="the dealer and any one party together can read the others' IDs",
            order=(False, True),
        ),
    ] = False
    pairwise_overlaps: Annotated[
        Literal["shown", "hidden"],
        EACH_ALONE,
        protects(
            "the passives",
            other="the active learns its overlap with each of them",
            order=("hidden", "shown"),
        ),
    ] = "shown"
    mode: Annotated[
        Literal["all", "pairwise"],
        protects(
            "the passives",
            other="the sum of a person whom only one passive knows is that passive's part",
            order=("all", "pairwise"),
        ),
    ] = "all"
    minimum_rows: Annotated[
        int, protects("everybody", lower="a small overlap is revealed, too")
    ] = Field(default=2, ge=1)
    maximum_ids: Annotated[int, protects("everybody", higher="a peer can test more IDs")] = Field(
        default=10_000_000, ge=1, lt=2**32
    )
    normalisation: Annotated[tuple[IdRule, ...], protects("nobody")] = ("unicode_nfc", "strip")
    date_formats: Annotated[tuple[str, ...], protects("nobody")] = ()
    threads: Annotated[int | None, Field(ge=1), EACH_ALONE] = None
    history: Annotated[Path | None, EACH_ALONE] = None
    runs_with_a_peer: Annotated[int | None, Field(ge=1), EACH_ALONE] = None

    @field_validator("normalisation")
    @classmethod
    def _sort_rules(cls, rules: tuple[IdRule, ...]) -> tuple[IdRule, ...]:
        """Return the rules in the order of `ID_RULES`, each once, since the order of writing does
        not matter.
        """
        return tuple(rule for rule in ID_RULES if rule in rules)

    @model_validator(mode="after")
    def _check_combination(self) -> "AlignmentSettings":
        """Refuse contradicting row limits, and only one of history and runs_with_a_peer."""
        if self.minimum_rows > self.maximum_ids:
            raise ValueError(
                f"minimum_rows ({self.minimum_rows}) is above maximum_ids ({self.maximum_ids})"
            )
        if (self.history is None) != (self.runs_with_a_peer is None):
            raise ValueError(
                "history (a folder) and runs_with_a_peer (how many intersections a peer gets) go "
                "together: give both, or neither"
            )
        return self

    @property
    def selected_protocol(self) -> str:
        """The key of `apfed_protocols.psi.SET_INTERSECTIONS` that these settings select."""
        if self.protocol != _AUTO:
            return self.protocol
        if self.pairwise_overlaps == "hidden":
            return "opprf" if self.dealer else "opprf_ot"
        return "vole" if self.dealer else "ot"

    def collect_terms(self) -> dict[str, Any]:
        """Return the settings that all parties sign, with the selected protocol in place of `auto`
        and of the choices that lead to it.
        """
        return super().collect_terms() | {"protocol": self.selected_protocol}

    def for_trial_ids(self) -> "AlignmentSettings":
        """Return the settings for a trial with IDs that need no protection.

        Overlaps may be shown, any number of common rows is enough, and no history counts the run,
        so that every protocol may be tried.
        """
        unprotected_values = {
            "protocol": self.selected_protocol,
            "pairwise_overlaps": "shown",
            "minimum_rows": 1,
            "history": None,
            "runs_with_a_peer": None,
        }
        return self.model_copy(update=unprotected_values)
