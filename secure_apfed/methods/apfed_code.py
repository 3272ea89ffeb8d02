"""APFed at a public code: passives help once, and the active reveals nothing of its data.

In APFed-R (Eq. 12) a passive answers each row's representation z with the gradient of the squared
error of its decoder, which is 2 W^T (W z + b - x_p) / F for a linear one. What helps the active in
it is W^T x_p, the passive's features (docs/public-codes.md); z only adds what z itself determines.
So z may be a code that everybody knows. The simplest is 0 for every row, and then a decoder has
nothing to learn from it: it stays as it was drawn, one answer contains all that any number of steps
would, and the gradient is a random projection of the passive's features (Johnson and Lindenstrauss
1984). The contrastive objective of APFed-C (Eq. 14) at a code also moves z towards such a
projection, less the mean of the other rows' projections.

Each passive adds its projections to the secure sum (`CodePassive`), once a row, with noise if the
run says so. The active fits a forecast of the sum from its own features to all common training
rows, labelled or not (`CrossView`). A teacher model, chosen by validation, reads the sum or its
forecast beside the active's features, and labels all rows. The student learns these labels from
features and forecast, unless a local model is better on validation rows (`CodeStudent`).

The active sends a request that does not depend on its data; a passive its contribution.

Letters: N positions of the alignment, U of them to learn from, V some of these, n labelled rows, B
rows of a block, F features, D numbers of a projection or of a row that the student's last layer
reads.
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
from secure_apfed.baselines import FOLDS, BaselineTask, LocalModel, rank_scores
from secure_apfed.baselines.interface import cache_fits, split_folds
from secure_apfed.contract import Contract, RepresentationBounds
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange import Envelope, Kind, Links, pack_tensors
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.votes import fit_linear
from secure_apfed.measures.table import Scored, normalise_scores
from secure_apfed.methods.local_models import choose_reader, is_surely_better
from secure_apfed.methods.method import ActiveRole, HelperRole, SessionTerms, StepCounter
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import SessionSum, SumHelper, SumLearner, SumMethod
from secure_apfed.methods.student import Student, StudentActive, standardise_parts, warn_of_no_help
from secure_apfed.methods.sum_students import label_rows
from secure_apfed.methods.terms import find_clip
from secure_apfed.networks.models import CrossView, Projection, Shape
from secure_apfed.networks.rank import compute_number_limit, count_columns
from secure_apfed.privacy.noise import clip_rows
from secure_apfed.settings import MethodSettings, RunSettings

REQUEST_STEP = 0
"""The step number of the active's request."""

_REQUEST = pack_tensors({})
"""The active's request: always the same bytes, so it reveals nothing of the active's data."""
_UNBOUNDED_NORM = 1e9
"""The contract's norm bound of a projection if no clip is configured."""
Floats = NDArray[np.float64]
_FORECAST_FOLDS = 5
"""Number of folds of the rows; the forecast for each fold is fitted to the other folds."""


class ApfedCodeSettings(MethodSettings):
    """The settings of APFed at a public code; see `MethodSettings`.

    A passive sends D random linear combinations of a person's features (a projection). D is
    `model.representation`, or the smaller number that the passives' columns allow.
    """

    name: Literal["apfed_code"]

    title = "APFed by code"
    can_predict_locally = True
    has_representation_sum = True

    def check_run(self, config: RunSettings) -> None:
        """Refuse networks other than `cross_view`, which forecasts the passives' sum."""
        if config.model.network != "cross_view":
            raise ValueError(
                "model.network: what passives tell is predicted by a network of its own; say "
                f"cross_view with method {self.name}, got {config.model.network}"
            )

    def bound_linear_combinations(self, config: RunSettings, classes: int) -> float:
        """Return D, the number of linear combinations of a person's features that a run reveals.

        They are revealed once, as the sum over the passives.
        """
        return config.model.representation_size

    @property
    def exchange_facts(self) -> frozenset[str]:
        """The method's public facts: projections are summed, not representations."""
        return super().exchange_facts - {"representations are summed"} | {"projections are summed"}

    @property
    def has_single_exchange(self) -> bool:
        """True: the active sends one request in the whole run."""
        return True

    @property
    def has_local_model_from_start(self) -> bool:
        """False: before the exchange ends there is no model that predicts."""
        return False


class CodeStudent(Student):
    """The active's model, which reads its own features and a forecast of the passives' sum.

    The sum is that of all passives' projections of a person. The student learns labels that a
    teacher gives all training rows. The teacher is a model that reads the sum, or its forecast,
    beside the active's features; validation on labelled rows chooses it.

    Attributes:
        sum_source: what the chosen teacher reads: the received sum itself ("told") or its forecast
            ("predicted"); None: validation rejected both, and the student is the best local model.
    """

    sum_source: str | None = None

    def __init__(self, party: PartyContext, aligned: Tensor) -> None:
        """Build the untrained student.

        `aligned`: the row of the active's table at each of the N alignment positions.
        """
        super().__init__(party, aligned)
        self._forecast_UD = torch.zeros(len(self.rows_U), self.encoder.predictor.out_features)

    @property
    def encoder(self) -> CrossView:
        """The encoder, which concatenates the own features with the forecast of the sum."""
        return _require_cross_view(self.networks)

    def learn_from(self, sum_UD: Floats, *, seed: int) -> None:
        """Train with the passives' sum, or on own columns only; labelled rows decide.

        A student taught with the sum must beat the best local model by more than the standard
        deviation of the difference over resamples of the validation rows. Neither label nor sum of
        a validation row is used to predict it: new people have no sum, either.

        `sum_UD`: the sum of all passives' projections, D numbers for each of U rows. `seed`: random
        seed of folds and models.
        """
        # On one thread fits do not depend on the number of cores; some are needed repeatedly.
        with one_thread(), cache_fits():
            # The model that a student taught with the sum must beat.
            local = LocalModel.choose_best(self.make_local_task(seed))
            self._forecast_sums(sum_UD)
            source, task, teacher, held_out = self._choose_teacher(sum_UD, seed)
            if is_surely_better(held_out, local):
                self.sum_source = source
                likely_UK = label_rows(teacher.fit(), task)
                self.fit_to_labels(likely_UK)
            else:
                self.use_baseline(local.baseline)

    def _choose_teacher(
        self, sum_UD: Floats, seed: int
    ) -> tuple[str, BaselineTask, LocalModel, Scored | None]:
        """Choose what the teacher reads beside own features, by validation of its student.

        The choices are the received sum ("told") and its forecast ("predicted"). `sum_UD`: the sum
        of all passives' projections. `seed`: random seed of folds and models.

        Returns the choice, the teacher's inputs for all rows, the best teacher that reads them, and
        its student's scores of validation rows; None: no rows can be held out.
        """
        sums_by_source = {"told": torch.from_numpy(sum_UD), "predicted": self._forecast_UD}
        scored_by_source = {}
        teacher_by_source = {}
        for source, source_UD in sums_by_source.items():
            task = self._make_task_with_sums(source_UD, seed)
            teacher = choose_reader(task)
            scored_by_source[source] = self._score_held_out(task, teacher, seed)
            teacher_by_source[source] = task, teacher
        best_source = max(
            scored_by_source,
            key=lambda source: rank_scores(scored_by_source[source], self._measure),
        )
        task, teacher = teacher_by_source[best_source]
        return best_source, task, teacher, scored_by_source[best_source]

    @property
    def _rows(self) -> Tensor:
        """The features of the student's rows, (U, F)."""
        return self.trainer.features_N[self.rows_U]

    def _make_task_with_sums(self, sums_UD: Tensor, seed: int) -> BaselineTask:
        """Return the task of a teacher, which reads own features and sums, both standardised.

        `sums_UD`: the passives' sum for each of the student's U rows, or its forecast. `seed`:
        random seed of the teacher.
        """
        with torch.no_grad():
            own_UF = self.encoder.own.standardise_rows(self._rows)
        return BaselineTask.from_arrays(
            standardise_parts([own_UF, sums_UD]),
            self.labelled_n,
            self.labels_n,
            classes=self.classes,
            seed=seed,
            measure=self._measure,
        )

    def _score_held_out(self, task: BaselineTask, teacher: LocalModel, seed: int) -> Scored | None:
        """Return scores of validation rows by students whose teachers did not see their labels.

        For each fold of the labelled rows, a teacher is fitted without the fold's labels, and
        predicts class probabilities of all rows. A linear layer on the encoder's output, which
        stands for the student, learns them without the fold, and scores the fold.

        `task`: the inputs of the teacher for all rows. `teacher`: the kind of teacher, with its
        labelled rows. `seed`: random seed of the folds. Returns None if no rows can be held out.
        """
        folds = split_folds(self.labels_n, FOLDS, seed)
        if not folds:
            return None
        encoded_UD = self.encode_rows(self.networks)
        scores = []
        tasks = [teacher.task.drop_labels(fold) for fold in folds]
        fitted = teacher.baseline.fit_together(tasks)
        for fold, predictor in zip(folds, fitted, strict=True):
            rows_in_fold = self.labelled_n[fold]
            targets_UK = label_rows(predictor, task)
            # Labelled rows keep their true labels, except those of the fold, which get no target.
            targets_UK[self.labelled_n] = self._truth_nT
            targets_UK[rows_in_fold] = 0
            layer = nn.Linear(encoded_UD.shape[1], self.classes, bias=False, dtype=torch.float64)
            self._fit_layer(layer, encoded_UD, targets_UK, np.asarray(targets_UK.any(axis=1)))
            scores.append(encoded_UD[rows_in_fold] @ layer.weight.detach().numpy().T)
        truth_n = self.labels_n[np.concatenate(folds)]
        return Scored(truth=truth_n, scores=normalise_scores(np.concatenate(scores)))

    def _forecast_sums(self, sum_UD: Floats) -> None:
        """Fit the encoder's forecast of the standardised sum, and store each row's forecast.

        The stored forecast of a row is computed without its own sum (cross-fitting): otherwise it
        would be more accurate than for new people. The final forecast is fitted to all rows.

        `sum_UD`: the sum of the passives' projections, D numbers for each of U rows.
        """
        encoder = self.encoder
        # A constant column stays 0 instead of being divided by 0.
        deviation_D = sum_UD.std(axis=0)
        sum_UD = (sum_UD - sum_UD.mean(axis=0)) / np.where(deviation_D > 0, deviation_D, 1.0)
        with torch.no_grad():
            own_UD = encoder.own(self._rows).double().cpu().numpy()
        rows_U = np.arange(len(sum_UD))
        folds = [rows_U[first::_FORECAST_FOLDS] for first in range(_FORECAST_FOLDS)]
        for fold in folds:
            rows_V = np.setdiff1d(rows_U, fold)
            _fit_forecast(encoder, own_UD[rows_V], sum_UD[rows_V])
            with torch.no_grad():
                self._forecast_UD[fold] = encoder.predict_representation(self._rows[fold]).cpu()
        _fit_forecast(encoder, own_UD, sum_UD)
        encoder.fit_pairs(self._rows, self._forecast_UD)

    def encode_rows(self, networks: ActiveNetworks) -> Floats:
        """Return the encoder's output for the student's U rows, the input of its last layer.

        The encoder reads own features and the stored forecast of the passives' sum.
        """
        with torch.no_grad():
            encoded_UD: Tensor = _require_cross_view(networks)(self._rows, self._forecast_UD)
        return encoded_UD.double().cpu().numpy()

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        """Return None: its teacher saw the labels of these rows, too."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        """Return the student's state, with the stored forecast of each row."""
        return {"forecast": self._forecast_UD, **super().tensors()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        super().load_tensors(tensors)
        self._forecast_UD = tensors["forecast"].clone()


def _require_cross_view(networks: ActiveNetworks) -> CrossView:
    """Return the networks' encoder, which must be a CrossView."""
    encoder = networks.encoder
    assert isinstance(encoder, CrossView)
    return encoder


def _fit_forecast(encoder: CrossView, own_VD: Floats, sum_VD: Floats) -> None:
    """Fit the encoder's linear forecast of the passives' sum in place, by ridge regression.

    `own_VD`: its inputs, computed from own features, for V rows. `sum_VD`: its targets, the sums.
    """
    rows_V = np.arange(len(own_VD))
    # `fit_linear` chooses its penalty by the rows that are passed as labelled: every fourth one.
    validation_rows = rows_V[::4]
    fit_linear(
        encoder.predictor,
        own_VD,
        sum_VD,
        rows_with_target_V=rows_V,
        labelled_rows_n=validation_rows,
    )


class CodeActive(StudentActive, SumLearner):
    """The active's role in APFed at a public code; see `StudentActive`.

    It requests the sum of the passives' projections once, and then trains alone.
    """

    student: CodeStudent

    def __init__(
        self, party: PartyContext, contract: Contract, rows: Tensor, session_sum: SessionSum
    ) -> None:
        """Make the active's role, with an untrained student.

        `rows`: the row of its table at each of the N alignment positions. `session_sum`: the secure
        sum of the projections, with their agreed size D.
        """
        # The agreed D replaces the configured one, which may be larger or "auto".
        model = party.config.model.model_copy(update={"representation": session_sum.shape[0]})
        party = replace(party, config=party.config.model_copy(update={"model": model}))
        student = CodeStudent(party, rows)
        config = party.config
        self.model = model
        guarantee = "nothing of the active's features or labels is told to anybody"
        super().__init__(party, student, headline_variant=config.method.name, guarantee=guarantee)
        self.contract = contract
        self.use_active_sum(session_sum.make_active_sum())
        self._positions_U = student.positions_U
        self._people = len(rows)
        self._seed = config.seed
        self._sum_ND: Tensor | None = None

    @property
    def last_sum(self) -> Tensor | None:
        """The sum of all passives' projections, (N, D); None before it is received."""
        return self._sum_ND

    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        """Request the sum of all passives' projections, and train the student on it.

        The sum arrives in blocks of rows. All of this counts as one step in `steps`.
        """
        self.active_sum.send_request(links, Kind.REQUEST, REQUEST_STEP, _REQUEST)
        any_passive = next(iter(self.contract.passives.values()))  # all have one shape
        row_size = math.prod(any_passive.representation.shape)
        sums = [
            await self.active_sum.receive_sum(links, step, rows_B, _REQUEST, row_size)
            for step, rows_B in enumerate(_split_into_blocks(self._people, self.contract))
        ]
        self._sum_ND = torch.cat(sums)
        self.learn_from_sum(self._sum_ND.double().numpy())
        steps.count_step(0.0)

    def learn_from_sum(self, sum_ND: Floats) -> None:
        """Train the student on the sum of all passives' projections.

        `sum_ND`: D numbers for each of N alignment positions. Warns NoHelpWarning: validation
        rejected the sum, and the student is the best local model.
        """
        student = self.student
        student.learn_from(sum_ND[self._positions_U.numpy()], seed=self._seed)
        if student.sum_source is None:
            warn_of_no_help(self.name)


class CodePassive(SumHelper):
    """A passive's role in APFed at a public code; see `HelperRole`.

    It adds random projections of all common people's features to the secure sum, once a session.
    """

    request_kinds = (Kind.REQUEST,)

    def __init__(
        self, party: PartyContext, contract: Contract, rows: Tensor, session_sum: SessionSum
    ) -> None:
        """Draw the random projection, and project and clip the features of all common people.

        `rows`: the row of its table at each of the N alignment positions. `session_sum`: the secure
        sum of the projections, with their agreed size D. Raises ConfigError: D is more than half of
        the columns that differ among these people, so that the projections would reveal columns.
        """
        super().__init__(
            session_sum.make_passive_sum(person_count=len(rows), counts_repeats_once=True)
        )
        rows_NF = party.data.table.features[rows]
        with party.draw("projection"):
            self._projection = Projection(
                math.prod(rows_NF.shape[1:]),
                *session_sum.shape,
                allow_reading_all=_allows_reconstruction(party),
            )
        try:
            self._projection.fit(rows_NF)
        except ModelError:
            columns = count_columns(rows_NF)
            raise _too_many_numbers_error(
                party.name, session_sum.shape[0], columns, "common people"
            ) from None
        self._projection_ND = self._projection(rows_NF)
        if session_sum.clip is not None:
            self._projection_ND = clip_rows(self._projection_ND, session_sum.clip)
        self._was_asked = False

    def get_sent_network(self) -> nn.Module:
        """Return the projection whose outputs leave this passive."""
        return self._projection

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Add the projections of all common people to the secure sum, block by block.

        Raises RemoteProtocolError: the request differs from the fixed one, or is the second one in
        this session.
        """
        if message.payload != _REQUEST or self._was_asked:
            raise RemoteProtocolError(
                f"{message.sender} asks {self.name} for something else than everybody's "
                "projections, once in a session"
            )
        self._was_asked = True
        for step, rows_B in enumerate(_split_into_blocks(len(self._projection_ND), self.contract)):
            admitted = self.passive_sum.admit_request(message, rows_B, step=step)
            await self.passive_sum.send_answer(links, admitted, self._projection_ND[rows_B].numpy())

    def load_tensors(self, tensors: Mapping[str, Tensor], *, next_step: int) -> None:
        """Restore the state; in each session steps count from 0, since they are its blocks."""
        super().load_tensors(tensors, next_step=0)  # its steps are the blocks of a session


class ApfedCode(SumMethod):
    """The method APFed at a public code; see `Method`."""

    settings = ApfedCodeSettings

    def offer_terms(self, party: PartyContext) -> RepresentationBounds | None:
        """Return the bounds on a passive's projection, with the size D that it offers.

        None at the active. D is at most the configured size. Unless the passive sets
        `allow_reading_all`, D is also at most half of its distinct columns. Raises ConfigError: the
        settings demand more.
        """
        if party.name == party.active:
            return None
        projection_size = party.config.model.representation_size
        if not _allows_reconstruction(party):
            projection_size = _limit_numbers(
                party.config, party.name, count_columns(party.data.table.features)
            )
        return _bound_projection(party.config, projection_size)

    def resolve_settings(
        self, config: RunSettings, column_count_by_passive: Mapping[str, int]
    ) -> RunSettings:
        """Return the settings with the size D of projections that every passive's columns allow.

        `column_count_by_passive`: mapping from passive name to the number of its distinct columns.
        Raises ConfigError: the settings demand a larger D.
        """
        projection_size = config.model.representation_size
        for name, count in column_count_by_passive.items():
            if not config.find_passive_settings(name).allow_reading_all:
                projection_size = min(projection_size, _limit_numbers(config, name, count))
        # The columns are counted here. `allow_reading_all` keeps the passives from counting again.
        passives = {
            name: config.find_passive_settings(name).model_copy(update={"allow_reading_all": True})
            for name in (*config.passives, *column_count_by_passive)
        }
        model = config.model.model_copy(update={"representation": projection_size})
        return config.model_copy(update={"model": model, "passives": passives})

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the contract's terms: the size D of projections, and the parameters of the sum.

        D is the smallest size that a passive offers. If the settings fix D, each passive must offer
        it.

        `proposed_terms`: mapping from passive name to the bounds that its `offer_terms` returned.
        `session`: name of this session, the same at all parties.
        """
        config = party.config
        party.require_passives()
        requested_size = config.model.representation_size
        size_by_passive = {
            name: math.prod(proposed_bounds.shape)
            for name, proposed_bounds in proposed_terms.items()
        }
        is_fixed = config.model.representation != "auto"
        for name, proposed_bounds in proposed_terms.items():
            # Under "auto" a passive may offer fewer numbers than requested, never more.
            expected_size = (
                requested_size if is_fixed else min(size_by_passive[name], requested_size)
            )
            party.require_terms(name, proposed_bounds, _bound_projection(config, expected_size))
        representation = _bound_projection(config, min(size_by_passive.values()))
        readable = [
            name for name in party.passives if config.find_passive_settings(name).allow_reading_all
        ]
        return SessionTerms.from_bounds(
            dict.fromkeys(party.passives, representation),
            secure_sum={
                **party.describe_sum(session, representation.shape),
                "numbers": representation.shape[0],
                "all_can_be_read_of": readable,
            },
        )

    def build_sent_network(self, config: RunSettings, passive: str, features: Shape) -> nn.Module:
        """Return an untrained projection, as a passive with rows of this shape uses it."""
        return Projection(math.prod(features), config.model.representation_size)

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role; `rows`: the row of its table at each alignment position."""
        return CodeActive(party, contract, rows, SessionSum.from_contract(party, contract))

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role; `rows`: the row of its table at each alignment position."""
        return CodePassive(party, contract, rows, SessionSum.from_contract(party, contract))


def _split_into_blocks(person_count: int, contract: Contract) -> tuple[Tensor, ...]:
    """Return the alignment positions 0 to `person_count` - 1 in blocks of the contract's batch
    size.
    """
    blocks: tuple[Tensor, ...] = torch.arange(person_count).split(contract.batch_size)
    return blocks


def _bound_projection(config: RunSettings, projection_size: int) -> RepresentationBounds:
    """Return the contract's bounds on one person's projection, which has `projection_size` "
    "numbers.
    """
    return RepresentationBounds(
        shape=(projection_size,),
        dtype="float64",
        minimum_norm=0.0,
        maximum_norm=find_clip(config) or _UNBOUNDED_NORM,
    )


def _allows_reconstruction(party: PartyContext) -> bool:
    """Return whether this passive accepts projections of any size.

    Large ones let whoever reads the sum reconstruct its columns. Raises ConfigError: the run's
    settings accept this, and the passive's own file does not.
    """
    is_allowed = party.config.find_passive_settings(party.name).allow_reading_all
    if is_allowed and not party.allow_reading_all:
        raise ConfigError(
            f"{party.name}: the settings say passives.{party.name}.allow_reading_all (or "
            "passives.default), which lets whoever reads the sums read all of its columns, and its "
            "own file does not agree; write allow_reading_all: true in the file of "
            f"{party.name} (party.yaml), or take it out of the settings of all parties"
        )
    return is_allowed


def _limit_numbers(config: RunSettings, party_name: str, column_count: int) -> int:
    """Return the size D of one person's projection that the passive `party_name` agrees to send.

    D is at most the configured size, and at most half of its distinct columns. `column_count`:
    number of its distinct columns. Raises ConfigError: the settings demand a larger D.
    """
    requested_size = config.model.representation_size
    max_size = compute_number_limit(column_count)
    is_fixed = config.model.representation != "auto"
    if not max_size or (is_fixed and requested_size > max_size):
        # With fewer than two distinct columns even one number is too many.
        raise _too_many_numbers_error(
            party_name, requested_size if max_size else 1, column_count, "rows"
        )
    return min(requested_size, max_size)


def _too_many_numbers_error(
    party_name: str, projection_size: int, column_count: int, compared_rows: str
) -> ConfigError:
    """Return the error that a projection has too many numbers, with remedies.

    More than half of the passive's distinct columns are too many.

    `party_name`: the passive's name. `projection_size`: the size of the projection that the
    settings demand. `column_count`: number of distinct columns. `compared_rows`: the rows in which
    columns were compared, in words.
    """
    max_size = compute_number_limit(column_count)
    remedy = (
        f"say model.representation: {max_size} or less in the settings of all parties, or auto"
        if max_size
        else "give it more columns, or take another method"
    )
    return ConfigError(
        f"model.representation: {projection_size} number{'' if projection_size == 1 else 's'} of "
        "each person would "
        f"be summed, and {party_name} allows {max_size}, half of the {column_count} columns that "
        "differ "
        f"in its {compared_rows}: from more, whoever reads the sum and knows some people reads the "
        "others' "
        f"columns; {remedy}. To let everything be read all the same: passives: {{{party_name}: "
        "{allow_reading_all: true}}, and where parties run apart allow_reading_all: true in its "
        "own file"
    )
