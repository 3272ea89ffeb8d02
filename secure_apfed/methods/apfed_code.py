"""APFed at a public code: passives help once, and the active tells nothing but whom it asks about.

In APFed-R (Eq. 12) a passive answers each row's representation z with the gradient of the squared
error of its decoder, which is 2 W^T (W z + b - x_p) / F for a linear one. What helps the active in
it is W^T x_p, the passive's features (docs/tell-nothing.md); z only adds what z itself determines.
So z may be a code that everybody knows. The simplest is 0 for every row, and then a decoder has
nothing to learn from it: it stays as it was drawn, one answer holds all that any number of steps
would, and the gradient is a random projection of the passive's features (Johnson and Lindenstrauss
1984). The contrast of APFed-C (Eq. 14) at a code pulls z to a projection, too, less the mean of the
others'.

Each passive adds its projections to the secure sum (`CodePassive`), once a row, with noise under
the sum if the run says so. The active learns to foretell the sum from its own features over all
common training rows, labelled or not (`CrossView`), and has its best solo learner learn the labels
from features and forecast together, unless its labelled rows say that it does better without.

The active emits a request that is the same whatever it holds; a passive its contribution.

Letters: N positions of the alignment, U of them to learn from, F features, D numbers of a
projection.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import Contract, PassiveTerms, RepresentationTerms
from secure_apfed.errors import NoHelpWarning
from secure_apfed.exchange import Envelope, Kind, Links, pack
from secure_apfed.learning.votes import fit_linear
from secure_apfed.measures import ACCURACY, MEASURES, Measure
from secure_apfed.methods.accounts import agreed_sum
from secure_apfed.methods.alignment import positions_in
from secure_apfed.methods.method import Agreed, Helper, Learner, Own, Steps
from secure_apfed.methods.student import Student, StudentActive, by_best_baseline, with_prior
from secure_apfed.methods.sum_end import SessionSum, SumHelper, SumMethod
from secure_apfed.methods.terms import check_passives, clip_of
from secure_apfed.models import CrossView
from secure_apfed.privacy.noise import clip_rows
from secure_apfed.seeds import one_thread, seeded
from secure_apfed.settings.method import MethodSettings, Side
from secure_apfed.settings.run import RunSettings
from secure_apfed.solo import SoloTask, chosen, validation_of
from secure_apfed.solo.interface import fits_kept_meanwhile

ASK = 0
"""The step in which the active asks."""

_REQUEST = pack({})
_UNBOUNDED = 1e9
Floats = NDArray[np.float64]


class ApfedCodeSettings(MethodSettings):
    """APFed at a public code; D is `model.representation`. See `MethodSettings`."""

    name: Literal["apfed_code"]

    title = "APFed by code"
    predicts_alone = True
    sums_representations = True

    def check(self, config: RunSettings) -> None:
        if config.model.network != "cross_view":
            raise ValueError(
                "model.network: what passives tell is foretold by a network of its own; say "
                f"cross_view with method {self.name}, got {config.model.network}"
            )

    @property
    def offers(self) -> tuple[Side, ...]:
        """See `MethodSettings`: the settings say all that there is."""
        return ()

    @property
    def asks_once(self) -> bool:
        return True

    @property
    def predicts_throughout(self) -> bool:
        return False


class CodeStudent(Student):
    """The active's model: a forecast of what passives tell, and what it learns from that.

    Attributes:
        helped: whether it learns from the forecast, too; None before it was asked.
    """

    helped: bool | None = None

    @property
    def encoder(self) -> CrossView:
        encoder = self.networks.encoder
        assert isinstance(encoder, CrossView)
        return encoder

    def foretell(self, sum_UD: Floats) -> None:
        """Fit the forecast of the passives' sum, each number about its mean and of deviation 1.

        Of every fourth row the sum is held out to choose the strength of the ridge.
        """
        rows_UF = self.trainer.features_N[self.rows_U]
        deviation_D = sum_UD.std(axis=0)
        told_UD = (sum_UD - sum_UD.mean(axis=0)) / np.where(deviation_D > 0, deviation_D, 1.0)
        self.encoder.own.fit(rows_UF)
        with torch.no_grad():
            phi_UD = self.encoder.own(rows_UF).double().cpu().numpy()
        held_out = np.arange(0, len(phi_UD), 4)
        fit_linear(self.encoder.foretold, phi_UD, told_UD, labelled_n=held_out)

    def decide(self, measure: Measure, *, seed: int) -> None:
        """Learn from the forecast where the labelled rows, each held out, are better told so."""
        found = []
        for helped in (False, True):
            self.helped = helped
            task = self.task_alone(seed)
            reached = validation_of(chosen(task, measure=measure), task, measure)
            found.append(measure.rank(reached))
        self.helped = found[1] > found[0]
        self.encoder.read(self.trainer.features_N[self.rows_U], told=self.helped)

    def task_alone(self, seed: int) -> SoloTask:
        """Its own columns, and beside them the forecast where it is helped."""
        if not self.helped:
            return super().task_alone(seed)
        rows_UF = self.trainer.features_N[self.rows_U]
        self.encoder.read(rows_UF, told=True)
        with torch.no_grad():
            beside_UF = self.encoder.standardised(rows_UF).double().cpu().numpy()
        return SoloTask.of(
            beside_UF, self.labelled, self.labels,
            classes=self.classes, seed=seed, model=self._model, train=self._train,
        )  # fmt: skip


class CodeActive(StudentActive):
    """The active: asks once, reads the sum, and learns alone; see `StudentActive`."""

    student: CodeStudent

    def __init__(self, own: Own, contract: Contract, rows: Tensor, summed: SessionSum) -> None:
        student, config = CodeStudent(own, rows), own.config
        guarantee = "nothing of the active's features or labels is told to anybody"
        super().__init__(own, student, headline=config.method.name, guarantee=guarantee)
        self.contract, self.sum = contract, summed.active()
        self.left, self.rounding = self.sum.left, self.sum.rounding
        self._positions_U, self._people = positions_in(rows, student.rows_U), len(rows)
        measure = MEASURES[config.measure]
        self._measure = measure if "classification" in measure.tasks else ACCURACY
        self._seed = config.seed

    @property
    def opened(self) -> Tensor | None:
        return self.sum.opened

    async def set_up(self, links: Links) -> None:
        await self.sum.set_up(links)

    async def teach(self, links: Links, steps: Steps) -> None:
        self.sum.ask(links, Kind.REQUEST, ASK, _REQUEST)
        numbers = math.prod(next(iter(self.contract.passives.values())).representation.shape)
        sums = [
            await self.sum.read(links, step, rows_B, _REQUEST, numbers)
            for step, rows_B in enumerate(_blocks(self._people, self.contract))
        ]
        self.take(torch.cat(sums).double().numpy())
        steps.stepped(0.0)

    def take(self, sum_ND: Floats) -> None:
        """Learn from what all passives told, (N, D)."""
        student = self.student
        student.foretell(sum_ND[self._positions_U.numpy()])
        with one_thread(), fits_kept_meanwhile():
            student.decide(self._measure, seed=self._seed)
            likely_UK = with_prior(None, student, by_best_baseline(self._measure), seed=self._seed)
        if not student.helped:
            warnings.warn(
                f"{self.name}: help is not used: on labelled rows that are held out, its own "
                "columns tell as much as with what the passives told",
                NoHelpWarning,
                stacklevel=2,
            )
        student.teach(likely_UK)


class CodePassive(SumHelper):
    """A passive: adds its projections of all common people, once a session; see `Helper`."""

    asks = (Kind.REQUEST,)

    def __init__(self, own: Own, contract: Contract, rows: Tensor, summed: SessionSum) -> None:
        super().__init__(summed.passive(people=len(rows), repeatable=True))
        (numbers,) = summed.shape
        with seeded(own.secrets.seed, own.name, "projection"):
            self._told_ND = projections(own.data.table.features[rows], numbers)
        clip = clip_of(own.config)
        if clip is not None:
            self._told_ND = clip_rows(self._told_ND, clip)
        self._asked = False

    async def answer(self, links: Links, message: Envelope) -> None:
        if message.payload != _REQUEST or self._asked:
            raise RemoteProtocolError(
                f"{message.sender} asks {self.name} for something else than everybody's "
                "projections, once in a session"
            )
        self._asked = True
        for step, rows_B in enumerate(_blocks(len(self._told_ND), self.contract)):
            admitted = self.sum.admit(message, rows_B, step=step)
            await self.sum.send(links, admitted, self._told_ND[rows_B].numpy())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=0)  # its steps are the blocks of a session


class ApfedCode(SumMethod):
    """APFed at a public code; see `Method`."""

    settings = ApfedCodeSettings

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        check_passives(own.config, own.passives)
        shape = (own.config.model.representation,)
        told = RepresentationTerms(
            shape=shape, dtype="float64", minimum_norm=0.0,
            maximum_norm=clip_of(own.config) or _UNBOUNDED,
        )  # fmt: skip
        terms = PassiveTerms(objective=None, weight=1.0, representation=told)
        return Agreed(
            passives=dict.fromkeys(own.passives, terms), secure_sum=agreed_sum(own, session, shape)
        )

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        return CodeActive(own, contract, rows, SessionSum.of(own, contract))

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        return CodePassive(own, contract, rows, SessionSum.of(own, contract))


def projections(features_NF: Tensor, numbers: int) -> Tensor:
    """Return random projections (N, D) of a party's own columns, float64, rows about 1 long.

    Columns are standardised by these rows; directions come from torch's generator.
    """
    rows_NF = features_NF.flatten(1).double()
    deviation_F = rows_NF.std(0, correction=0)
    scaled_NF = (rows_NF - rows_NF.mean(0)) / torch.where(deviation_F > 0, deviation_F, math.inf)
    directions_FD = torch.randn(rows_NF.shape[1], numbers, dtype=torch.float64)
    return scaled_NF @ directions_FD / math.sqrt(directions_FD.numel())


def _blocks(people: int, contract: Contract) -> tuple[Tensor, ...]:
    return torch.arange(people).split(contract.batch_size)
