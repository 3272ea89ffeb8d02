"""A malicious attack: one that deviates in a live run first and reads its recording afterwards.

Run by: an adversary that takes a party's place among the real ones. `run` is an attack like every
other, on the view of that run; what the adversary kept for itself comes back in `view.played`.

Letters: A aligned rows, B batch, D numbers of a representation, F features.
"""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from pydantic import Field
from torch import Tensor

from apfed_attacks.interface import Attack
from apfed_attacks.view import AdversaryView, AttackError, Knowledge
from secure_apfed.base.seeds import derive_seed

if TYPE_CHECKING:
    from secure_apfed.contract import RepresentationBounds


class LiveActive(Protocol):
    """The active of a running training, as an attack plays it.

    Attributes:
        training_positions: (T,) alignment positions of the training rows, shuffled by the seed.
        terms: what the contract says about representations: shape and bounds of a row.
        batch_size: the largest agreed batch.
        passives: names of all passives.
        enforces_rules: whether the passives enforce the protocol's rules.
    """

    training_positions: Tensor
    terms: "RepresentationBounds"
    batch_size: int
    passives: tuple[str, ...]
    enforces_rules: bool

    def has_rows(self, passive: str, positions: Tensor) -> Tensor:
        """Return whether a passive has a row of each of these positions (N,), bool."""
        ...

    def request_sum(
        self,
        rows_B: Tensor,
        z_BD: Tensor,
        *,
        instead: Mapping[str, Tensor] | None = None,
        weights: Mapping[str, float] | None = None,
        participants: Collection[str] | None = None,
    ) -> Tensor:
        """Play one step with chosen representations; return the decrypted sum of gradients (B, D).

        Args:
            rows_B: alignment positions of the rows.
            z_BD: representations to send for them, flattened.
            instead: representations for single passives in place of `z_BD`, by name.
            weights: weight lambda_p that single passives are told to use, by name.
            participants: names of the passives whose contributions are added; None: all.

        Raises:
            RemoteProtocolError: a party refused; the run is over then.
        """
        ...

    def get_contribution(self, passive: str) -> Tensor:
        """Return a colluding passive's contribution to the last sum (B, D), clipped, as it reports
        it.
        """
        ...


class ActiveAttack(Attack):
    """Base of the attacks by a malicious active on a passive's features.

    The active asks: it sends representations that it chose, and reads the sum of gradients.

    Attributes:
        people: number of people that it asks about, known ones among them.
        spread: distance between the rows of one batch, relative to their norm; rules refuse batches
            of equal rows.
        decoys: share of a batch that has random directions, so that the other rows may be alike.
        repeats: how often it asks the same, to average out noise; only if rules are enforced.
        hidden, components: sizes of the regressions from what was read to features.
    """

    target = "features"
    roles = ("active",)
    behaviour = "malicious"

    people: int = Field(128, ge=4)
    spread: float = Field(0.0, ge=0)
    decoys: float = Field(0.0, ge=0, lt=1)
    repeats: int = Field(1, ge=1)
    shadow_rows: int = Field(50, ge=2)
    hidden: int = Field(128, ge=1)
    components: int = Field(256, ge=2)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why this view is not of a live run of the attack; None: it is."""
        return explain_missing_play(self, view)

    @abstractmethod
    def run_live(self, active: LiveActive, knowledge: Knowledge, seed: int) -> Mapping[str, Tensor]:
        """Play steps as the active of a live session; return what the adversary notes for `run`.

        `run` reads the recording of the session and these notes afterwards.
        """

    def prepare_request(
        self, active: LiveActive, knowledge: Knowledge, seed: int, *, length: float, maximum: int
    ) -> tuple[Tensor, torch.Generator, int, float]:
        """Return what a subclass needs to choose representations.

        These are the positions of people to ask about (N,), known ones first; a seeded generator;
        the size D of a row; and the norm of rows.

        `length`: the wanted norm, which the agreed bounds may change. `maximum`: largest number of
        people.
        """
        draw = torch.Generator().manual_seed(derive_seed(seed, self.name))
        length = min(max(length, active.terms.minimum_norm), active.terms.maximum_norm)
        people_N = people_to_ask(active, knowledge, maximum)
        return people_N, draw, math.prod(active.terms.shape), length

    def rows_at_once(self, active: LiveActive) -> int:
        """Return how many rows of a batch of the agreed size are about people, and no decoys."""
        return max(1, int(active.batch_size * (1 - self.decoys)))

    def ask_among_decoys(
        self, active: LiveActive, people_N: Tensor, z_ND: Tensor, draw: torch.Generator
    ) -> Tensor:
        """Request sums for people (N,), a batch at a time; return their rows (N, D).

        The rows are averaged over the repeats. Each batch is filled up to the attack's share of
        decoys: C rows of other people with random vectors, so that the batch passes the rules.

        `z_ND`: what is sent for the people. `draw`: the random number generator.
        """
        people_at_once = self.rows_at_once(active)
        outsiders = active.training_positions[~torch.isin(active.training_positions, people_N)]
        answers = []
        # Passives train with each request. All batches are sent before any is repeated, so that on
        # average passives have trained equally long for all people.
        for _ in range(self.repeats):
            for rows_B, z_BD in zip(
                people_N.split(people_at_once), z_ND.split(people_at_once), strict=True
            ):
                # Different decoys each time: a passive contributes once an epoch for a person.
                shuffled = outsiders[torch.randperm(len(outsiders), generator=draw)]
                # Where outsiders do not suffice, people of other batches serve as decoys.
                decoys = torch.cat([shuffled, people_N[~torch.isin(people_N, rows_B)]])
                wanted_decoys = round(len(rows_B) * self.decoys / (1 - self.decoys))
                decoys = decoys[: min(wanted_decoys, active.batch_size - len(rows_B))]
                if len(decoys):
                    noise_CD = torch.randn(
                        len(decoys), z_BD.shape[1], generator=draw, dtype=z_BD.dtype
                    )
                    # Decoys have the same mean norm as the other rows.
                    scale = z_BD.norm(dim=1).mean() / noise_CD.norm(dim=1).mean()
                    z_BD = torch.cat([z_BD, noise_CD * scale])
                answers_BD = active.request_sum(torch.cat([rows_B, decoys]), z_BD)
                answers.append(answers_BD[: len(rows_B)])
        return torch.cat(answers).double().reshape(self.repeats, len(people_N), -1).mean(dim=0)


class Answering(Protocol):
    """A malicious party's source of gradients, which replace those of its objective."""

    def forge_gradient(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        """Return the forged gradient of each row, (B, D); the secure sum still clips its rows.

        `step`: number of the step. `rows_B`: alignment positions. `z_BD`: the representations that
        the gradient is for.
        """
        ...

    def collect_notes(self) -> Mapping[str, Tensor]:
        """Return what the adversary notes, for `view.deviation`."""
        ...


class AnsweringAttack(Attack):
    """Base of the attacks on features by forged gradients, of a passive of APFed or TVFL's active.

    Attributes:
        people: outsiders (people outside the training) all of whose features it knows, at most.
        hidden: width of its networks.
    """

    target = "features"
    behaviour = "malicious"

    people: int = Field(2_000, ge=4)
    hidden: int = Field(256, ge=1)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why this view is not of a live run of the attack; None: it is."""
        return explain_missing_play(self, view)

    @abstractmethod
    def start_answering(
        self, terms: "RepresentationBounds", knowledge: Knowledge, own_AF: Tensor, seed: int
    ) -> Answering:
        """Return the object that forges the party's gradients from now on.

        `terms`: what the contract says about representations. `own_AF`: the adversary's own
        columns, one row (F values) for each of the A alignment positions.
        """


def people_to_ask(active: LiveActive, knowledge: Knowledge, maximum: int) -> Tensor:
    """Return the positions (N,) of people to ask about: whom the victim has, known ones first.

    `maximum`: largest number of people.
    """
    known = knowledge.shadow.positions
    victim = knowledge.victim
    others = active.training_positions[~torch.isin(active.training_positions, known)]
    if victim is not None:
        others = others[active.has_rows(victim, others)]
    return torch.cat([known, others])[:maximum]


def read_notes(attack: Attack, view: AdversaryView) -> Mapping[str, Tensor]:
    """Return the tensors that the adversary noted during its live run, by name.

    "people" are the positions that it asked about; in a decoy (releases exchanged between rows)
    they are exchanged, too.

    Raises AttackError: the view is not of such a run.
    """
    if view.deviation is None or view.deviation.attack != attack.name:
        raise AttackError(f"{attack.name} was not played in this run")
    notes = dict(view.deviation.notes)
    if "people" in notes:
        notes["people"] = view.attribute_positions(notes["people"])
    return notes


def explain_missing_play(attack: Attack, view: AdversaryView) -> str | None:
    """Return why this view is not of a live run of `attack`; None: it is."""
    if view.deviation is not None and view.deviation.attack == attack.name:
        missing = [name for name in attack.keeps if name not in view.deviation.notes]
        return f"what {attack.name} kept lacks {', '.join(missing)}" if missing else None
    if isinstance(attack, ActiveAttack) and view.description.opens != "gradients":
        return f"{view.description}: passives contribute no gradients of objectives of their own"
    return (
        "this run was recorded while every party kept to the protocol; a malicious attack is "
        "played in a live run (apfed_attacks.live.runs)"
    )
