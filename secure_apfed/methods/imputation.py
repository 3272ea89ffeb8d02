"""Imputation: passives release one fixed projection of each row; the active learns to predict it.

One round trip before training: the active asks for its aligned training rows, and every passive
answers with a projection of its own features, behind its guard, once for each person. The active
predicts these numbers from its own features, spreads its labels over what it predicts beside its
own, and fits a student that needs nobody. No label leaves the active, and no gradient either way.
`guard.mechanism: frozen_gaussian` fits: one release a person for the whole run. Under `projection:
random` a person's features move nobody else's row; principal components are fitted to all rows of
the passive, without noise. Letters: U aligned training rows, D numbers of a projection.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.defences import representation_chain
from secure_apfed.exchange import Kind, Links, pack
from secure_apfed.labellers import labeller_for_oneself, make_labeller
from secure_apfed.learning.imputation import fixed_projection, linear_projection, predicted
from secure_apfed.learning.student import Student, side_by_side
from secure_apfed.methods.accounts import answers_log, guard_for, ledger_for, surroundings_of
from secure_apfed.methods.alignment import positions_in
from secure_apfed.methods.method import Agreed, Course, Helper, Learner, Method, Own
from secure_apfed.methods.students import Pupil, StudentLearner, student_of
from secure_apfed.methods.terms import agree_with_senders, check_passives, sent_terms
from secure_apfed.methods.tvfl import TvflHelper
from secure_apfed.models import Shape
from secure_apfed.parties import Compute, TvflPassive
from secure_apfed.parties.rules import read_representations
from secure_apfed.privacy.guard import joint_releases_statement
from secure_apfed.settings import THE_ACTIVE
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.run import RunSettings

__all__ = [
    "Imputation", "ImputationHelper", "ImputationLearner", "ImputationSettings", "ReleaseLearner",
]  # fmt: skip

Floats = NDArray[np.float64]


class ImputationSettings(MethodSettings):
    """What passives release once, and how the active labels its rows by it.

    Attributes:
        projection: of a passive's features. "principal_components" are fitted to its own aligned
            rows, without noise; "random" is drawn from the run's seed and moves with nobody's
            features.
        numbers: of one row of the projection, at most.
        labels: a key of `LABELLERS`.
        labels_from: "predicted" reads what the active predicts of the passives' rows; "released"
            the rows as they came, noise and all.
    """

    name: Literal["imputation"]
    projection: Literal["principal_components", "random"] = "principal_components"
    numbers: int = Field(16, ge=1, le=4096)
    labels: Annotated[str, THE_ACTIVE] = "spreading"
    labels_from: Annotated[Literal["predicted", "released"], THE_ACTIVE] = "predicted"

    title = "imputation"
    predicts_alone = True
    representations_from = "passives"
    teacher = "imputed representations"

    @field_validator("labels")
    @classmethod
    def _is_a_labeller(cls, name: str) -> str:
        return labeller_for_oneself(name)


class ReleaseLearner(StudentLearner):
    """The active's role where passives release each row once; see `StudentLearner`.

    Args:
        contract: of the session.
        aligned: the active's row at each position of the alignment.
    """

    def __init__(
        self, contract: Contract, own: Own, aligned: Tensor, *, student: Pupil, headline: str,
        guarantee: str,
    ) -> None:  # fmt: skip
        super().__init__(own, student, headline=headline, guarantee=guarantee)
        self.smallest_batch = contract.minimum_batch
        self._contract, self._aligned = contract, aligned

    async def gather(self, links: Links, course: Course) -> list[Floats]:
        """What each passive releases of the training rows, in the order of the contract."""
        released = []
        for rows_B in self.parts_of(positions_in(self._aligned, self.training_rows)):
            released.append(await self.ask(links, course.next_step, rows_B))
            course.stepped(None)
        return [np.concatenate(of_passive) for of_passive in zip(*released, strict=True)]

    def parts_of(self, positions: Tensor) -> tuple[Tensor, ...]:
        """These positions in equal parts that passives answer."""
        return positions.tensor_split(max(1, -(-len(positions) // self._contract.batch_size)))

    async def ask(self, links: Links, step: int, rows_B: Tensor) -> list[Floats]:
        """What each passive releases of these positions, in the order of the contract."""
        passives = self._contract.passives
        for name in passives:
            links.send(name, Kind.REQUEST, step, pack({"rows": rows_B}))
        return [await self._read(links, name, step, rows_B) for name in passives]

    async def _read(self, links: Links, name: str, step: int, rows_B: Tensor) -> Floats:
        message = await links.receive(name, Kind.REPRESENTATIONS, step=step, patience=4)
        terms = self._contract.passives[name].representation
        got_B, z_BD = read_representations(
            message, terms, aligned=len(self._aligned), minimum=self._contract.minimum_batch
        )
        if not torch.equal(got_B, rows_B):
            raise RemoteProtocolError(f"{name} answered for other rows than asked")
        z: Floats = z_BD.double().numpy()
        return z


class ImputationLearner(ReleaseLearner):
    """The active's role; see `ReleaseLearner`."""

    student: Student

    def __init__(
        self, contract: Contract, own: Own, aligned: Tensor, *, student: Student, headline: str,
        guarantee: str,
    ) -> None:  # fmt: skip
        super().__init__(
            contract, own, aligned, student=student, headline=headline, guarantee=guarantee
        )
        self._settings, self._seed = ImputationSettings.of(own.config), own.seed
        self._features_N = own.rows.features

    async def teach(self, links: Links, course: Course) -> None:
        self.student.teach(self._labels(await self.gather(links, course)))

    def _labels(self, released: list[Floats]) -> Floats:
        """Labels of the rows, by what the passives released of them."""
        own_UF, settings = self._features_N[self.training_rows], self._settings
        told_UD = np.hstack(released)
        if settings.labels_from == "predicted":
            told_UD = predicted(own_UF, told_UD, seed=self._seed)
        ends = np.cumsum([part_UD.shape[1] for part_UD in released])[:-1]
        parts = [torch.from_numpy(part_UD) for part_UD in np.split(told_UD, ends, axis=1)]
        student = self.student
        return make_labeller(settings.labels).label(
            side_by_side([own_UF, *parts]), student.labelled, student.labels, student.classes
        )


class ImputationHelper(TvflHelper):
    """A passive's role: it answers for each row once, and learns nothing; see `Helper`."""

    asks = (Kind.REQUEST,)


class Imputation(Method):
    """The method; see `Method`."""

    settings = ImputationSettings

    def sent_network(self, config: RunSettings, passive: str, features: Shape) -> nn.Module:
        size = math.prod(features)
        return linear_projection(size, _numbers(config, size))

    def offer(self, own: Own) -> RepresentationTerms | None:
        """See `Method`: every passive sends its projection."""
        check_passives(own.config, own.passives)
        if own.name == own.active:
            return None
        numbers = _numbers(own.config, math.prod(own.features))
        return sent_terms(own.config, (numbers,), guard_for(own))

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        shapes = {
            name: (_numbers(own.config, math.prod(offered.shape)),)
            for name, offered in offers.items()
        }
        return agree_with_senders(own, offers, shapes, guard_for(own))

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        return ImputationLearner(
            contract,
            own,
            rows,
            student=student_of(own, rows),
            headline=self.headline,
            guarantee=joint_releases_statement(guard_for(own).statement(), len(contract.passives)),
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        config, guard = own.config, guard_for(own)
        (numbers,) = shape = contract.passives[own.name].representation.shape
        features_NF = own.rows.features[rows]
        return ImputationHelper(
            TvflPassive(
                own.name,
                contract,
                features_N=features_NF,
                encoder=fixed_projection(
                    # In the table's order: that of the alignment is random, and rounds otherwise.
                    own.rows.features[rows.sort().values],
                    numbers,
                    seed=config.seed,
                    party=own.name,
                    principal=ImputationSettings.of(config).projection == "principal_components",
                ),
                guard=guard,
                ledger=ledger_for(own, guard, aligned=len(rows)),
                train=config.train,
                compute=Compute.of(config.train),
                seed=own.seed,
                answers=answers_log(own),
                beyond=0,
                defences=representation_chain(config.defences, surroundings_of(own, shape)),
            )
        )  # fmt: skip


def _numbers(config: RunSettings, features: int) -> int:
    return min(ImputationSettings.of(config).numbers, features)
