"""APFed at a public code: passives help once, and the active reveals nothing of its data.

In APFed-R (Eq. 12) a passive answers each row's representation z with the gradient of the squared
error of its decoder, which is 2 W^T (W z + b - x_p) / F for a linear one. What helps the active in
it is W^T x_p, the passive's features (docs/public-codes.md); z only adds what z itself determines.
So z may be a code that everybody knows. The simplest is 0 for every row, and then a decoder has
nothing to learn from it: it stays as it was drawn, one answer holds all that any number of steps
would, and the gradient is a random projection of the passive's features (Johnson and Lindenstrauss
1984). The contrast of APFed-C (Eq. 14) at a code pulls z to a projection, too, less the mean of the
others'.

Each passive adds its projections to the secure sum (`CodePassive`), once a row, with noise under
the sum if the run says so. The active learns to predict the sum from its own features over all
common training rows, labelled or not (`CrossView`); lets the learner that its labelled rows choose
label all rows by the sum, or its forecast, beside its features; and learns these labels from
features and forecast, unless its labelled rows say that it does better alone (`CodeStudent`).

The active emits a request that is the same whatever it holds; a passive its contribution.

Letters: N positions of the alignment, U of them to learn from, F features, D numbers of a
projection.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.seeds import one_thread
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange import Envelope, Kind, Links, pack_tensors
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.votes import fit_linear
from secure_apfed.measures.table import Scored, probabilities_of
from secure_apfed.methods.alignment import find_positions
from secure_apfed.methods.local_models import choose_reader, is_surely_better
from secure_apfed.methods.method import ActiveRole, HelperRole, SessionTerms, StepCounter
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.pupils import label_rows
from secure_apfed.methods.student import Student, StudentActive, standardise_parts, warn_of_no_help
from secure_apfed.methods.sum_end import SessionSum, SumHelper, SumLearner, SumMethod
from secure_apfed.methods.terms import find_clip
from secure_apfed.networks.models import CrossView, Projection, Shape
from secure_apfed.networks.rank import count_columns, max_numbers
from secure_apfed.privacy.noise import clip_rows
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.run import RunSettings
from secure_apfed.solo import FOLDS, LocalModel, SoloTask, rank_of
from secure_apfed.solo.interface import cache_fits, split_folds

ASK = 0
"""The step in which the active asks."""

_REQUEST = pack_tensors({})
_UNBOUNDED = 1e9
Floats = NDArray[np.float64]
_PARTS = 5
"""Number of parts of the rows; the forecast for each part is fitted to the other parts."""


class ApfedCodeSettings(MethodSettings):
    """The settings of APFed at a public code. See `MethodSettings`.

    D is `model.representation`, or what the passives allow of it.
    """

    name: Literal["apfed_code"]

    title = "APFed by code"
    predicts_alone = True
    sums_representations = True

    def check_run(self, config: RunSettings) -> None:
        """Refuse networks other than `cross_view`, which predicts the passives' sum from own
        features.
        """
        if config.model.network != "cross_view":
            raise ValueError(
                "model.network: what passives tell is predicted by a network of its own; say "
                f"cross_view with method {self.name}, got {config.model.network}"
            )

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        return config.model.representation_size

    @property
    def facts(self) -> frozenset[str]:
        return super().facts - {"representations are summed"} | {"projections are summed"}

    @property
    def asks_once(self) -> bool:
        return True

    @property
    def predicts_throughout(self) -> bool:
        return False


class CodeStudent(Student):
    """The active's model, which reads its own features and a forecast of the passives' sum, trained
    on the labels that the best teacher, by validation on labelled rows, gives all training rows.

    Attributes:
        helped: what the teacher reads in addition to its own features: the sum itself ("told") or
            its forecast ("predicted"); None: help is disabled, and the model is a local one.
    """

    helped: str | None = None

    def __init__(self, party: PartyContext, aligned: Tensor) -> None:
        super().__init__(party, aligned)
        self._forecast_UD = torch.zeros(len(self.rows_U), self.encoder.predictor.out_features)

    @property
    def encoder(self) -> CrossView:
        return _require_cross_view(self.networks)

    def learn_from(self, sum_UD: Floats, *, seed: int) -> None:
        """Train on the passives' sum (U, D), or on own columns only, as validation on labelled rows
        decides.

        For validation rows neither label nor sum is used, as for new people: with known sums the
        score would be too optimistic. Help must beat the best local model by more than the standard
        deviation of the difference over resamples of these rows.
        """
        with one_thread(), cache_fits():
            local = LocalModel.choose_best(self.make_local_task(seed))
            self._forecast_sums(sum_UD)
            sums_by_source = {"told": torch.from_numpy(sum_UD), "predicted": self._forecast_UD}
            scores_by_source = {}
            teachers = {}
            for source, of_others_UD in sums_by_source.items():
                task = self._make_task_with_sums(of_others_UD, seed)
                teacher = choose_reader(task)
                scores_by_source[source] = self._score_held_out(task, teacher, seed)
                teachers[source] = task, teacher
            best = max(
                scores_by_source,
                key=lambda source: rank_of(scores_by_source[source], self._measure),
            )
            if is_surely_better(scores_by_source[best], local):
                self.helped = best
                task, teacher = teachers[best]
                self.fit_to_labels(label_rows(teacher.fit(), task))
            else:
                self.use_baseline(local.baseline)

    @property
    def _rows(self) -> Tensor:
        """The features of the student's rows, (U, F)."""
        return self.trainer.features_N[self.rows_U]

    def _make_task_with_sums(self, of_others_UD: Tensor, seed: int) -> SoloTask:
        """Return its rows and labels as a task, with these numbers as further
        columns of each row.

        `of_others_UD`: the passives' sums (U, D).
        """
        with torch.no_grad():
            own_UF = self.encoder.own.standardise_rows(self._rows)
        return SoloTask.from_arrays(
            standardise_parts([own_UF, of_others_UD]),
            self.labelled,
            self.labels,
            classes=self.classes,
            seed=seed,
            measure=self._measure,
        )

    def _score_held_out(self, task: SoloTask, teacher: LocalModel, seed: int) -> Scored | None:
        """Return scores of validation rows by a student whose teacher did not train on them.

        For each fold, the teacher without its labels predicts class probabilities (`likely_UK`) of
        all rows, and a linear layer is fitted to them on the encoder's output (`phi_UD`); it scores
        the fold. None if no rows can be held out.
        """
        parts = split_folds(self.labels, FOLDS, seed)
        if not parts:
            return None
        phi_UD = self.encode_rows(self.networks)
        scores = []
        tasks = [teacher.task.drop_labels(part) for part in parts]
        fitted = teacher.baseline.fit_together(tasks)
        for part, predictor in zip(parts, fitted, strict=True):
            likely_UK = label_rows(predictor, task)
            likely_UK[self.labelled] = self._truth_nT
            likely_UK[self.labelled[part]] = 0
            linear = nn.Linear(phi_UD.shape[1], self.classes, bias=False, dtype=torch.float64)
            self._fit_layer(linear, phi_UD, likely_UK, np.asarray(likely_UK.any(axis=1)))
            scores.append(phi_UD[self.labelled[part]] @ linear.weight.detach().numpy().T)
        truth_n = self.labels[np.concatenate(parts)]
        return Scored(truth=truth_n, scores=probabilities_of(np.concatenate(scores)))

    def _forecast_sums(self, sum_UD: Floats) -> None:
        """Fit the forecast of the sum to all rows, each of its numbers standardised.

        The forecast of a row is computed without its own sum (cross-fitting): otherwise it would be
        more accurate than for new people.
        """
        encoder = self.encoder
        deviation_D = sum_UD.std(axis=0)
        sum_UD = (sum_UD - sum_UD.mean(axis=0)) / np.where(deviation_D > 0, deviation_D, 1.0)
        with torch.no_grad():
            phi_UD = encoder.own(self._rows).double().cpu().numpy()
        rows_U = np.arange(len(sum_UD))
        for part in (rows_U[first::_PARTS] for first in range(_PARTS)):
            rows_V = np.setdiff1d(rows_U, part)
            _fit_forecast(encoder, phi_UD[rows_V], sum_UD[rows_V])
            with torch.no_grad():
                self._forecast_UD[part] = encoder.predict_representation(self._rows[part]).cpu()
        _fit_forecast(encoder, phi_UD, sum_UD)
        encoder.fit_pairs(self._rows, self._forecast_UD)

    def encode_rows(self, networks: ActiveNetworks) -> Floats:
        """Return phi for its rows, (U, D): own features concatenated with the
        forecast of the sum.
        """
        with torch.no_grad():
            phi_UD: Tensor = _require_cross_view(networks)(self._rows, self._forecast_UD)
        return phi_UD.double().cpu().numpy()

    def tensors(self) -> dict[str, Tensor]:
        return {"forecast": self._forecast_UD, **super().tensors()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        self._forecast_UD = tensors["forecast"].clone()


def _require_cross_view(networks: ActiveNetworks) -> CrossView:
    """Return the networks' encoder, which must be a CrossView."""
    encoder = networks.encoder
    assert isinstance(encoder, CrossView)
    return encoder


def _fit_forecast(encoder: CrossView, phi_VD: Floats, sum_VD: Floats) -> None:
    """Fit the linear forecast of sums by ridge regression; every fourth row
    validates its strength.
    """
    rows_V = np.arange(len(phi_VD))
    fit_linear(encoder.predictor, phi_VD, sum_VD, taught_V=rows_V, labelled_n=rows_V[::4])


class CodeActive(StudentActive, SumLearner):
    """The active of APFed at a public code: requests the sum of the passives' codes once, and then
    trains alone; see `StudentActive`.
    """

    student: CodeStudent

    def __init__(
        self, party: PartyContext, contract: Contract, rows: Tensor, summed: SessionSum
    ) -> None:
        """Build the student with D, the agreed size of a projection, as its representation."""
        model = party.config.model.model_copy(update={"representation": summed.shape[0]})
        party = replace(party, config=party.config.model_copy(update={"model": model}))
        student = CodeStudent(party, rows)
        config = party.config
        self.model = model
        guarantee = "nothing of the active's features or labels is told to anybody"
        super().__init__(party, student, headline=config.method.name, guarantee=guarantee)
        self.contract = contract
        self.read_from(summed.make_active_end())
        self._positions_U = find_positions(rows, student.rows_U)
        self._people = len(rows)
        self._seed = config.seed
        self._sum_ND: Tensor | None = None

    @property
    def last_sum(self) -> Tensor | None:
        return self._sum_ND

    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        """Request all passives' projections once, block by block; train the student
        on their sum.
        """
        self.sum.send_request(links, Kind.REQUEST, ASK, _REQUEST)
        numbers = math.prod(next(iter(self.contract.passives.values())).representation.shape)
        sums = [
            await self.sum.receive_sum(links, step, rows_B, _REQUEST, numbers)
            for step, rows_B in enumerate(_split_into_blocks(self._people, self.contract))
        ]
        self._sum_ND = torch.cat(sums)
        self.learn_from_sum(self._sum_ND.double().numpy())
        steps.count_step(0.0)

    def learn_from_sum(self, sum_ND: Floats) -> None:
        """Train the student on the sum of all passives' projections, (N, D)."""
        student = self.student
        student.learn_from(sum_ND[self._positions_U.numpy()], seed=self._seed)
        if student.helped is None:
            warn_of_no_help(self.name)


class CodePassive(SumHelper):
    """A passive: adds its projections of all common people, once a session; see `HelperRole`."""

    asks = (Kind.REQUEST,)

    def __init__(
        self, party: PartyContext, contract: Contract, rows: Tensor, summed: SessionSum
    ) -> None:
        """Draw and fit the random projection, and project and clip the features of all common
        people.

        Raises ConfigError: more numbers than half of the columns that differ among these people.
        """
        super().__init__(summed.make_passive_end(people=len(rows), counts_repeats_once=True))
        rows_NF = party.data.table.features[rows]
        with party.draw("projection"):
            self._projection = Projection(
                math.prod(rows_NF.shape[1:]),
                *summed.shape,
                allow_reading_all=_allows_reconstruction(party),
            )
        try:
            self._projection.fit(rows_NF)
        except ModelError:
            columns = count_columns(rows_NF)
            raise _too_many_numbers_error(
                party.name, summed.shape[0], columns, "common people"
            ) from None
        self._projection_ND = self._projection(rows_NF)
        if summed.clip is not None:
            self._projection_ND = clip_rows(self._projection_ND, summed.clip)
        self._was_asked = False

    def get_sent_network(self) -> nn.Module:
        return self._projection

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Contribute the projections of all common people, block by block, once a session."""
        if message.payload != _REQUEST or self._was_asked:
            raise RemoteProtocolError(
                f"{message.sender} asks {self.name} for something else than everybody's "
                "projections, once in a session"
            )
        self._was_asked = True
        for step, rows_B in enumerate(_split_into_blocks(len(self._projection_ND), self.contract)):
            admitted = self.sum.admit_request(message, rows_B, step=step)
            await self.sum.send_answer(links, admitted, self._projection_ND[rows_B].numpy())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        super().load_tensors(tensors, next_step=0)  # its steps are the blocks of a session


class ApfedCode(SumMethod):
    """The method APFed at a public code; see `Method`."""

    settings = ApfedCodeSettings

    def offer_terms(self, party: PartyContext) -> RepresentationTerms | None:
        """Return, at a passive, how many numbers of a person it lets be summed, at most the
        configured D.

        Raises ConfigError: the settings demand more than half of its distinct columns, which only
        it can count.
        """
        if party.name == party.active:
            return None
        numbers = party.config.model.representation_size
        if not _allows_reconstruction(party):
            numbers = _limit_numbers(
                party.config, party.name, count_columns(party.data.table.features)
            )
        return _bound_projection(party.config, numbers)

    def resolve_settings(self, config: RunSettings, columns: Mapping[str, int]) -> RunSettings:
        """Return the settings with D reduced to what every passive's columns allow."""
        numbers = config.model.representation_size
        for name, count in columns.items():
            if not config.settings_of(name).allow_reading_all:
                numbers = min(numbers, _limit_numbers(config, name, count))
        passives = {
            name: config.settings_of(name).model_copy(update={"allow_reading_all": True})
            for name in (*config.passives, *columns)
        }  # they have agreed, and need not count again
        model = config.model.model_copy(update={"representation": numbers})
        return config.model_copy(update={"model": model, "passives": passives})

    def derive_terms(
        self, party: PartyContext, offers: Mapping[str, RepresentationTerms], session: str
    ) -> SessionTerms:
        """Agree on D, the smallest number that a passive offers; a fixed D must be
        offered by each.

        `session`: the session's name.
        """
        config = party.config
        party.require_passives()
        requested = config.model.representation_size
        numbers = {name: math.prod(offered.shape) for name, offered in offers.items()}
        for name, offered in offers.items():
            offered_numbers = numbers[name] if config.model.representation == "auto" else requested
            party.require_terms(
                name, offered, _bound_projection(config, min(offered_numbers, requested))
            )
        representation = _bound_projection(config, min(numbers.values()))
        readable = [name for name in party.passives if config.settings_of(name).allow_reading_all]
        return SessionTerms.from_rows(
            dict.fromkeys(party.passives, representation),
            secure_sum={
                **party.describe_sum(session, representation.shape),
                "numbers": representation.shape[0],
                "all_can_be_read_of": readable,
            },
        )

    def build_sent_network(self, config: RunSettings, passive: str, features: Shape) -> nn.Module:
        return Projection(math.prod(features), config.model.representation_size)

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        return CodeActive(party, contract, rows, SessionSum.from_contract(party, contract))

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        return CodePassive(party, contract, rows, SessionSum.from_contract(party, contract))


def _split_into_blocks(people: int, contract: Contract) -> tuple[Tensor, ...]:
    """Return the alignment positions in blocks of the contract's batch size."""
    blocks: tuple[Tensor, ...] = torch.arange(people).split(contract.batch_size)
    return blocks


def _bound_projection(config: RunSettings, numbers: int) -> RepresentationTerms:
    """Return the bounds on one projection of this number of numbers."""
    return RepresentationTerms(
        shape=(numbers,),
        dtype="float64",
        minimum_norm=0.0,
        maximum_norm=find_clip(config) or _UNBOUNDED,
    )


def _allows_reconstruction(party: PartyContext) -> bool:
    """Return whether this passive accepts any D, so that its columns could be reconstructed.

    Raises ConfigError: the run's settings accept it, and the passive's own file does not.
    """
    is_allowed = party.config.settings_of(party.name).allow_reading_all
    if is_allowed and not party.allow_reading_all:
        raise ConfigError(
            f"{party.name}: the settings say passives.{party.name}.allow_reading_all (or "
            "passives.default), which lets whoever reads the sums read all of its columns, and its "
            "own file does not agree; write allow_reading_all: true in the file of "
            f"{party.name} (party.yaml), or take it out of the settings of all parties"
        )
    return is_allowed


def _limit_numbers(config: RunSettings, me: str, columns: int) -> int:
    """Return how many numbers of a person a passive lets be summed.

    Raises ConfigError: the settings demand more.
    """
    requested = config.model.representation_size
    allowed = max_numbers(columns)
    if not allowed or (config.model.representation != "auto" and requested > allowed):
        raise _too_many_numbers_error(me, requested if allowed else 1, columns, "rows")
    return min(requested, allowed)


def _too_many_numbers_error(me: str, numbers: int, columns: int, rows: str) -> ConfigError:
    """Return the error for more numbers than half of a passive's distinct columns,
    with remedies.
    """
    allowed_numbers = max_numbers(columns)
    remedy = (
        f"say model.representation: {allowed_numbers} or less in the settings of all parties, or "
        "auto"
        if allowed_numbers
        else "give it more columns, or take another method"
    )
    return ConfigError(
        f"model.representation: {numbers} number{'' if numbers == 1 else 's'} of each person would "
        f"be summed, and {me} allows {allowed_numbers}, half of the {columns} columns that differ "
        f"in its {rows}: from more, whoever reads the sum and knows some people reads the others' "
        f"columns; {remedy}. To let everything be read all the same: passives: {{{me}: "
        "{allow_reading_all: true}}, and where parties run apart allow_reading_all: true in its "
        "own file"
    )
