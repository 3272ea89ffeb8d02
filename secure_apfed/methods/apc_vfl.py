"""APC-VFL: parties learn codes of their rows alone; passives release theirs once; the active's own
code is drawn to the joint one, and it classifies by its own.

One round trip before training: the active asks for its aligned training rows, and every passive
answers with its autoencoder's code of each, behind its guard, once for each person. Everything else
the active does alone (`secure_apfed.learning.distilling`). No label leaves the active, and no
gradient either way. At the end the aligned test rows are asked for, once each, to tell what the
parties would predict together: the paper's variant for rows that are all aligned (Figure 4).

Source: APC-VFL, section 4 and Figures 3 and 4. A passive's autoencoder is fitted to all of its
aligned rows, without noise: a person's features move everybody's codes a little, so that a guard's
epsilon, of one row's release with the encoder held fixed, is none for the passive's whole table.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.defences import representation_chain
from secure_apfed.exchange import Kind, Links, pack
from secure_apfed.learning.autoencoder import Autoencoder, fit_autoencoder, new_autoencoder
from secure_apfed.learning.distilling import Distilled
from secure_apfed.measures import Scored
from secure_apfed.methods.accounts import answers_log, guard_for, ledger_for, surroundings_of
from secure_apfed.methods.alignment import positions_in, positions_of
from secure_apfed.methods.method import Agreed, Helper, Learner, Method, Own, Steps
from secure_apfed.methods.students import Pupil, StudentLearner
from secure_apfed.methods.terms import (
    agree_with_senders,
    check_passives,
    sent_terms,
    settings_of,
)
from secure_apfed.methods.tvfl import TvflHelper
from secure_apfed.models import Shape, family_for, output_shape
from secure_apfed.parties import Compute, TvflPassive
from secure_apfed.parties.rules import read_representations
from secure_apfed.privacy.guard import joint_releases_statement
from secure_apfed.seeds import seeded
from secure_apfed.settings import THE_ACTIVE
from secure_apfed.settings.distillation import DistillationSettings
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.model import ModelSettings
from secure_apfed.settings.run import RunSettings

__all__ = ["AnsweringHelper", "ApcVfl", "ApcVflLearner", "ApcVflSettings", "ReleaseLearner"]

Floats = NDArray[np.float64]


class ApcVflSettings(MethodSettings, DistillationSettings):
    """Autoencoders of all parties, and what the student learns from them.

    Attributes:
        own: g1 of the active; passive: g1 of passives that have no `model` of their own.
        joint: hidden widths of g2, whose code is as wide as the student's (the run's `model`).
    """

    name: Literal["apc_vfl"]
    own: Annotated[ModelSettings, THE_ACTIVE] = ModelSettings(
        network="selu", hidden=(64,), representation=128
    )
    passive: ModelSettings = ModelSettings(network="selu", hidden=(128,), representation=256)
    joint: Annotated[tuple[int, ...], THE_ACTIVE] = (256,)

    title = "APC-VFL"
    predicts_alone = True
    representations_from = "passives"
    teacher = "joint representations"

    def check(self, config: RunSettings) -> None:
        """See `MethodSettings`."""
        linear = ("selu", "linear")
        if config.model.network not in linear:
            raise ValueError(
                f"model.network: method {self.name} classifies the student's code by logistic "
                f"regression, and {config.model.network} has another head; use "
                f"{' or '.join(linear)}"
            )
        if config.model.head:
            raise ValueError(
                f"model.head: method {self.name} fits one linear layer on the student's code; "
                "leave it out"
            )


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

    async def gather(self, links: Links, steps: Steps) -> list[Floats]:
        """What each passive releases of the training rows, in the order of the contract."""
        released = []
        for rows_B in self.parts_of(positions_in(self._aligned, self.training_rows)):
            released.append(await self.ask(links, steps.next_step, rows_B))
            steps.stepped(None)
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


class ApcVflLearner(ReleaseLearner):
    """The active's role; see `ReleaseLearner`."""

    student: Distilled

    async def teach(self, links: Links, steps: Steps) -> None:
        released = await self.gather(links, steps)
        self.student.teach(torch.cat([torch.from_numpy(one) for one in released], dim=1))

    async def evaluate(self, links: Links, *, next_step: int, final: bool) -> dict[str, Scored]:
        """What is said alone; at the end also with all parties, of the aligned test rows."""
        said = await super().evaluate(links, next_step=next_step, final=final)
        if final:
            together = await self._together(links, next_step)
            said |= {f"{self._headline}_together": together} if len(together.truth) else {}
        return said

    async def _together(self, links: Links, next_step: int) -> Scored:
        """Releases of test rows, which the ledgers count."""
        labels_N = self.student.labels_N.cpu()
        truth, scores = [labels_N[:0]], [torch.empty(0, self._classes)]
        for index, rows_B in enumerate(self.parts_of(positions_of(self._aligned, self._test_rows))):
            released = await self.ask(links, next_step + index, rows_B)
            beside_BD = torch.cat([torch.from_numpy(one) for one in released], dim=1)
            scores.append(self.student.together(self._aligned[rows_B], beside_BD).double().cpu())
            truth.append(labels_N[self._aligned[rows_B]])
        return Scored.of_network(torch.cat(truth), torch.cat(scores))


class AnsweringHelper(TvflHelper):
    """A passive's role: it answers for each row once, and learns nothing; see `Helper`."""

    asks = (Kind.REQUEST,)


class ApcVfl(Method):
    """The method; see `Method`."""

    settings = ApcVflSettings

    def sent_network(self, config: RunSettings, passive: str, features: Shape) -> nn.Module:
        model = settings_of(config, passive).model or ApcVflSettings.of(config).passive
        return family_for(model, features).encoder(features, model)

    def offer(self, own: Own) -> RepresentationTerms | None:
        """See `Method`: every passive sends its code."""
        check_passives(own.config, own.passives)
        if own.name == own.active:
            return None
        network = self.sent_network(own.config, own.name, own.data.table.shape)
        return sent_terms(own.config, output_shape(network, own.data.table.shape), guard_for(own))

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        shapes = {name: offered.shape for name, offered in offers.items()}
        return agree_with_senders(own, offers, shapes, guard_for(own))

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        return ApcVflLearner(
            contract,
            own,
            rows,
            student=_student(own, contract, rows),
            headline=self.headline,
            guarantee=joint_releases_statement(guard_for(own).statement(), len(contract.passives)),
        )

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        config, guard, compute = own.config, guard_for(own), Compute.of(own.config.train)
        shape = contract.passives[own.name].representation.shape
        model = settings_of(config, own.name).model or ApcVflSettings.of(config).passive
        local = _autoencoder(own, model, own.data.table.shape, "g1", compute)
        # In the table's order: that of the alignment is random.
        own_UF = compute.place(own.data.table.features[rows.sort().values])
        fit_autoencoder(
            local, own_UF, ApcVflSettings.of(config), owner=own.name, seed=own.secrets.seed
        )
        return AnsweringHelper(
            TvflPassive(
                own.name,
                contract,
                features_N=own.data.table.features[rows],
                encoder=local.encoder,
                guard=guard,
                ledger=ledger_for(own, guard, aligned=len(rows)),
                train=config.train,
                compute=compute,
                seed=own.secrets.seed,
                answers=answers_log(own),
                defences=representation_chain(config.defences, surroundings_of(own, shape)),
            )
        )


def _autoencoder(
    own: Own, model: ModelSettings, features: Shape, name: str, compute: Compute
) -> Autoencoder:
    return new_autoencoder(own.name, name, model, features, seed=own.secrets.seed, compute=compute)


def _student(own: Own, contract: Contract, rows: Tensor) -> Distilled:
    """The active's networks at their start."""
    config, compute = own.config, Compute.of(own.config.train)
    model, distilled, classes = config.model, ApcVflSettings.of(config), len(own.data.classes)
    student = _autoencoder(own, model, own.data.table.shape, "g3", compute)
    size = math.prod(output_shape(student.encoder, own.data.table.shape))
    local = _autoencoder(own, distilled.own, own.data.table.shape, "g1", compute)
    sent = (terms.representation.shape for terms in contract.passives.values())
    told = sum(map(math.prod, (output_shape(local.encoder, own.data.table.shape), *sent)))
    joint_model = ModelSettings(network="selu", hidden=distilled.joint, representation=size)
    family = family_for(model, own.data.table.shape)
    with seeded(own.secrets.seed, own.name, "heads"):
        heads = [family.head(size, classes, model) for _ in range(2)]
    return Distilled(
        own.name,
        data=own.data,
        rows_U=own.data.train_rows[torch.isin(own.data.train_rows, rows)],
        own=local,
        joint=_autoencoder(own, joint_model, (told,), "g2", compute),
        student=student,
        head=heads[0],
        together=heads[1],
        settings=distilled,
        compute=compute,
        seed=own.secrets.seed,
    )
