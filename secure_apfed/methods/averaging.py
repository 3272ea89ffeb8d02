"""H-FedMV and S-FedMV: parties with the same views of other people average their weights.

Nothing is aligned: every party has labels and all views of people of its own. A step is one round
of FedMV's Algorithm 3, or 4, in three scripts. `AveragingActive.train_step`: the active sends the
average, trains from it meanwhile, and takes the sum of all parties' weights, each by its share of
rows, for the next. `AveragingPassive.answer_message`: a passive trains from the average, and
contributes its weights by its share. There is no server as in the paper: the aggregator adds what
it cannot read (`secure_apfed.methods.session_sum`), and the active, which is one of the parties,
averages. Views may be sequences (`model.network: gru`), whose last states under GRUs are the views.
S-FedMV averages these GRUs first, `rounds` rounds long. Under H-FedMV each party trains its own
before the first average: FedMV's baseline "Local Sequential H-FedMV" (Table 3), whose parties
average weights of features that mean something else at each of them.

The active sends the average of each round; a passive contributes to a secure sum without noise.

Letters: R rows of the weights' matrix, W numbers in each; N training rows of a party, F features of
all its views, K or C classes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.seeds import derive_seed
from secure_apfed.contract import Contract, RepresentationBounds
from secure_apfed.data.catalogue import view_names
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.learning.descent import ActiveNetworks, Compute, add_prefix, remove_prefix
from secure_apfed.learning.recurrent import SequenceViews
from secure_apfed.learning.release import check_norms
from secure_apfed.methods.method import ActiveRole, HelperRole, SessionTerms
from secure_apfed.methods.multiview import (
    Floats,
    LabelTerm,
    MultiviewSettings,
    RecurrentSettings,
    ViewModel,
    ViewsActive,
    average_views,
    bound_label_rows,
    check_clip,
    compute_joint_weight,
    compute_objective,
    make_label_term,
    make_terms,
    select_learnt_labels,
)
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import (
    ActiveSum,
    AdmittedRequest,
    PassiveSum,
    SessionSum,
    SumHelper,
    SumMethod,
)
from secure_apfed.settings import RunSettings, protects

_COUNTED_POSITION = torch.zeros(1, dtype=torch.int64)
"""The one position (1,) that every answer is counted for: the parties have no rows in common."""

_Weight: TypeAlias = Literal["beta", "zeta"]


class AveragingSettings(RecurrentSettings):
    """The settings of parties that average the weights of their views; see `RecurrentSettings`.

    Attributes:
        views: other values of beta or zeta, by view (FedMV, Eqs. 15 and 16; section 8.6). They are
            above 0.
    """

    views: Annotated[
        dict[str, dict[_Weight, Annotated[float, Field(gt=0)]]], protects("nobody")
    ] = {}

    averaged_quantity = "weights"

    def for_view(self, name: str) -> Self:
        """Return a copy with the weights beta_k and zeta_k that `views` sets for view `name`."""
        own_weights = self.views.get(name, {})
        return self.model_copy(update={str(key): value for key, value in own_weights.items()})

    def for_views(self, names: Sequence[str], count: int) -> list[Self]:
        """Return the settings of each of `count` views, in the order of their names.

        A rehearsal (a short run on random numbers) has fewer names than views. A view without a
        name gets the common settings.
        """
        padded_names = [*names, *[""] * count]  # no view is called ""
        return [self.for_view(name) for name in padded_names[:count]]

    def check_views(self, names: Sequence[str]) -> None:
        """Refuse `views` that set weights for a view not in `names`.

        Raises ConfigError: its text names the settings key.
        """
        for name in self.views:
            if name not in names:
                raise ConfigError(
                    f"method.views.{name}: no view has that name; there are {', '.join(names)}"
                )

    def bound_linear_combinations(self, config: RunSettings, classes: int) -> float:
        """Return how many linear combinations of one person's features are revealed.

        It is 0: parties send weights, and no number about one person.
        """
        return 0

    def check_run(self, config: RunSettings) -> None:
        """Refuse weights of passives: an average weights each party by its training rows."""
        super().check_run(config)
        weighted = [name for name, passive in config.passives.items() if passive.weight != 1.0]
        if weighted:
            raise ValueError(
                f"passives.{weighted[0]}.weight: in method {self.name} a party counts by the rows "
                "that it trains on; leave weight out"
            )


class HFedMvSettings(AveragingSettings):
    """The settings of H-FedMV; see `AveragingSettings`."""

    name: Literal["h_fedmv"]

    title = "H-FedMV"


class SFedMvSettings(AveragingSettings):
    """The settings of S-FedMV: GRUs first make views of sequences; see `AveragingSettings`."""

    name: Literal["s_fedmv"]

    title = "S-FedMV"
    networks = ("gru",)
    has_sequence_views = True


class AveragingActive(ViewsActive):
    """The active's role in averaging; see `ActiveRole`.

    It trains on its own people like all parties, averages all parties' weights, and sends the
    average.
    """

    guarantee = "no guarantee: sums of weights are opened without noise"
    min_batch_rows = 1

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        stages: "TrainingStages",
        active_sum: ActiveSum,
    ) -> None:
        """Make the active's role in averaging.

        `stages`: the active's copy of the averaged model. `active_sum`: the active's side of the
        secure sum, which sends requests and decodes sums.
        """
        super().__init__(party, contract, active_sum)
        self.stages = stages
        self.training_rows = party.data.train_rows
        self.checkpoint_parts = {"": stages}
        # The active's share of all parties' training rows; the contract states those of passives.
        self._share = 1.0 - sum(terms.weight for terms in contract.passives.values())

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """Run one round: send the average weights, train from them, and average anew.

        The passives train at the same time (FedMV, Algs. 3 and 4). `rows_B` is not used, since
        every party trains on all of its training rows. Returns the active's loss.

        Raises ModelError: a view cannot be learnt from; RemoteProtocolError: the sum answers
        another request.
        """
        model = self.stages.pick_model(step)
        finished_model = self.stages.find_finished_model(step)
        weights_RW = model.weights
        tensors = {"weights": torch.from_numpy(weights_RW)}
        # After the last round of the GRUs, the passives still need their final average.
        if finished_model is not None:
            tensors["ended"] = torch.from_numpy(finished_model.weights)
        payload = pack_tensors(tensors, {})
        self.active_sum.send_request(links, Kind.REQUEST, step, payload)
        loss = model.train(step)
        rows_R = torch.arange(len(weights_RW))
        column_count = weights_RW.shape[1]
        # Every party's weights are multiplied by its share of the training rows, so that the sum is
        # the average.
        passives_sum_RW = await self.active_sum.receive_sum(
            links, step, rows_R, payload, column_count
        )
        model.load(passives_sum_RW.numpy() + self._share * model.weights)
        return loss

    def get_active_networks(self) -> ActiveNetworks:
        """Return the active's networks with the averaged GRU and linear layer."""
        if self.stages.recurrent is not None:
            state = self.stages.recurrent.encoder.state_dict()
            self._networks.encoder.load_state_dict(state)
        return super().get_active_networks()

    @property
    def head(self) -> Tensor:
        """The weights of one linear layer over all views, (K, F): FedMV's Eqs. (18) and (19)."""
        return self.stages.current_model.head


class AveragingPassive(SumHelper):
    """A passive's role in averaging; see `HelperRole`.

    It trains on its own people and labels, and contributes its weights to the average.
    """

    request_kinds = (Kind.REQUEST,)

    def __init__(
        self, passive_sum: PassiveSum, stages: "TrainingStages", *, clip: float | None
    ) -> None:
        """Make a passive's role in averaging; the contract states its share of all training rows.

        `passive_sum`: the passive's side of the secure sum, which checks requests and masks
        contributions. `stages`: the passive's copy of the averaged model. `clip`: the largest L2
        norm of a row that it may contribute; None: any.
        """
        super().__init__(passive_sum, {"model": stages})
        self.stages = stages
        self._clip = clip
        self._share = self.contract.passives[self.name].weight

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Train from the received average, and contribute the trained weights to the next average.

        They are multiplied by the party's share of all training rows (FedMV, Algs. 3 and 4, client
        part).

        Raises RemoteProtocolError: the request breaks a rule; LocalProtocolError: a row of weights
        is longer than the clip bound of the sum.
        """
        admitted_request, model = self.admit_average(message)
        model.train(admitted_request.step)
        values_RW = self._share * model.weights
        # The sum would silently shorten longer rows, which would make the average wrong.
        check_clip(values_RW, self._clip, party_name=self.name)
        await self.passive_sum.send_answer(links, admitted_request, values_RW)

    def admit_average(self, message: Envelope) -> tuple[AdmittedRequest, "AveragedModel"]:
        """Check the received average, and load it into the model that this step trains.

        Returns the admitted request, which may be answered once, and the model. Raises
        RemoteProtocolError: the weights have another shape, or exceed the contract's bounds.
        """
        terms = self.contract.passives[self.name].representation
        sender = message.sender
        finished_model = self.stages.find_finished_model(message.step)
        expected = {"weights": TensorSpec(torch.float64, (None, None))}
        if finished_model is not None:
            expected["ended"] = TensorSpec(torch.float64, finished_model.weights.shape)
        received, _ = unpack_tensors(message.payload, expected, sender=sender)
        for tensor in received.values():
            check_norms(tensor, terms, sender=sender)
        weights_RW = received["weights"].numpy()
        rows_R = torch.arange(len(weights_RW))
        # Rows of weights are not people, so the whole answer counts as one.
        admitted_request = self.passive_sum.admit_request(
            message, rows_R, counted_rows=_COUNTED_POSITION
        )
        if finished_model is not None:
            finished_model.load(received["ended"].numpy())
        model = self.stages.pick_model(admitted_request.step)
        if weights_RW.shape != model.weights.shape:
            raise RemoteProtocolError(
                f"{sender} sent weights of shape {weights_RW.shape}, the model of "
                f"{self.name} has {model.weights.shape}; all parties need the same views, and the "
                "same method.rounds"
            )
        model.load(weights_RW)
        return admitted_request, model


class LinearViews:
    """A client of H-FedMV: one party's linear models of all its views, trained on its own rows."""

    def __init__(
        self, views: Sequence[ViewModel], label_term: LabelTerm, *, tolerance: float, rounds: int
    ) -> None:
        """Make a party's linear models of its views, with the rules by which their updates stop.

        Args:
            views: one linear model for each view, with initial weights W_k for its features.
            label_term: how the party's labels act on the pseudo-labels that its views share.
            tolerance: relative decrease of the objective below which alternating updates stop.
            rounds: largest number of such updates.
        """
        self.views = views
        self._label_term = label_term
        self._tolerance = tolerance
        self._max_rounds = rounds

    @classmethod
    def from_views(
        cls,
        settings: Sequence[MultiviewSettings],
        views: Sequence[Tensor],
        label_term: LabelTerm,
        *,
        owner: str,
        seed: int,
    ) -> Self:
        """Return one party's untrained models of its views.

        Args:
            settings: settings of each view.
            views: features of each view, (N, F): F features of N training rows.
            label_term: how the party's labels act on the pseudo-labels that its views share.
            owner: the party's name; it enters the seed of the random start.
            seed: the party's own random seed.
        """
        models = [
            ViewModel.from_features(
                np.asarray(view_NF.double().cpu().numpy()),
                label_term.truth_NC.shape[1],
                np.random.default_rng(derive_seed(seed, owner, "view", index)),
                beta=view_settings.beta,
                zeta=view_settings.zeta,
                tolerance=view_settings.tolerance,
                max_rounds=view_settings.max_rounds,
            )
            for index, (view_settings, view_NF) in enumerate(zip(settings, views, strict=True))
        ]
        first = settings[0]
        return cls(models, label_term, tolerance=first.tolerance, rounds=first.max_rounds)

    @property
    def weights(self) -> Floats:
        """The weights W_k of all views, one below the other: F features, K classes, (F, K)."""
        return np.concatenate([view.weights_FC for view in self.views])

    @property
    def head(self) -> Tensor:
        """The weights of one linear layer on all F features, (K, F), for K classes.

        The layer gives the mean of the views' predictions, with the weights of a joint prediction.
        """
        zetas = [view.zeta for view in self.views]
        weighted = [compute_joint_weight(view.zeta, zetas) * view.weights_FC for view in self.views]
        return torch.from_numpy(np.concatenate(weighted).T)

    def load(self, weights_RW: Floats) -> None:
        """Copy weights of all views, one below the other, into the views' models.

        `weights_RW`: one row for each feature of all views, one column for each class.
        """
        view_sizes = [view.x_NF.shape[1] for view in self.views]
        weights_by_view = np.split(weights_RW, np.cumsum(view_sizes)[:-1])
        for view, weights_FC in zip(self.views, weights_by_view, strict=True):
            view.weights_FC = weights_FC.copy()

    def train(self, step: int) -> float:
        """Update pseudo-labels and weights by turns until they converge (FedMV, Algorithm 3).

        `step` is not used, since no random number is drawn; `SequenceViews.train` needs it. Returns
        the objective, divided by the number of training rows.
        """
        rows = np.arange(len(self._label_term.truth_NC))
        common_NC = average_views(self.views, self._label_term)
        loss = np.inf
        for _ in range(self._max_rounds):
            previous_loss = loss
            for view in self.views:
                view.update_labels(rows, common_NC)
            common_NC = average_views(self.views, self._label_term)
            for view in self.views:
                view.fit_weights(rows)
            loss = compute_objective(self.views, common_NC, self._label_term)
            if previous_loss - loss <= self._tolerance * max(loss, 1.0):
                break
        return loss / len(rows)

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and pseudo-labels of every view; names begin with the view's index."""
        tensors: dict[str, Tensor] = {}
        for index, view in enumerate(self.views):
            tensors |= add_prefix(str(index), view.tensors())
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore weights and pseudo-labels of every view, as `tensors` returned them."""
        for index, view in enumerate(self.views):
            view.load_tensors(remove_prefix(str(index), tensors))


AveragedModel: TypeAlias = LinearViews | SequenceViews
"""A party's copy of the averaged model, whose weights are one matrix, float64."""


class TrainingStages:
    """A party's models in the order of their training.

    If its views are sequences, GRUs that make features of them come first. Linear models of the
    views' features follow.
    """

    def __init__(
        self,
        make_views: Callable[[], LinearViews],
        *,
        recurrent: SequenceViews | None = None,
        averaged_steps: int = 0,
    ) -> None:
        """Make a party's stages of training.

        Args:
            make_views: builds the linear models. They read the states of the GRUs, if there are
                any, so it is called once these are trained.
            recurrent: the GRUs; None: all views are linear.
            averaged_steps: number of steps in which the parties average the GRUs; 0: each party
                trains its own GRUs before its first step.
        """
        self.recurrent = recurrent
        self._make_views = make_views
        self._averaged_steps = averaged_steps
        self.views: LinearViews | None = None if recurrent else make_views()

    def pick_model(self, step: int) -> AveragedModel:
        """Return the model that parties average in this step: GRUs first, then linear views."""
        if self.recurrent is not None and step < self._averaged_steps:
            return self.recurrent
        return self._get_views()

    def find_finished_model(self, step: int) -> AveragedModel | None:
        """Return the GRUs in the first step after their averaging; None in all other steps.

        In that step the active sends their last average, which all parties still need.
        """
        was_averaged = self._averaged_steps > 0
        is_first_step_after = was_averaged and step == self._averaged_steps
        return self.recurrent if is_first_step_after else None

    @property
    def current_model(self) -> AveragedModel:
        """The model of the current step: the GRUs while they learn, then the linear models."""
        return self.recurrent if self.recurrent and not self.views else self._get_views()

    def _get_views(self) -> LinearViews:
        """Return the linear models of the views; the first call builds them.

        GRUs that the parties do not average are trained before, since the models read their states.
        """
        if self.views is None:
            if self.recurrent is not None and self._averaged_steps == 0:
                # This single call trains all rounds; 0 is the step that seeds it.
                self.recurrent.train(0)
            self.views = self._make_views()
        return self.views

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the GRUs, and of the linear models once these are built."""
        tensors: dict[str, Tensor] = {}
        if self.recurrent is not None:
            tensors |= add_prefix("recurrent", self.recurrent.tensors())
        if self.views is not None:
            tensors |= add_prefix("views", self.views.tensors())
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the GRUs, and the linear models if the state has them."""
        if self.recurrent is not None:
            self.recurrent.load_tensors(remove_prefix("recurrent", tensors))
        if view_tensors := remove_prefix("views", tensors):
            self.views = self.views or self._make_views()
            self.views.load_tensors(view_tensors)


class Averaging(SumMethod):
    """The methods H-FedMV and S-FedMV, which differ in their settings; see `Method`."""

    def __init__(self, settings: type[AveragingSettings]) -> None:
        """Take the method's settings class, which distinguishes H-FedMV and S-FedMV."""
        self.settings = settings

    def offer_terms(self, party: PartyContext) -> RepresentationBounds | None:
        """Return this party's number of classes, number of training rows, and its columns' layout.

        Raises ConfigError: the settings give weights to a view that does not exist.
        """
        party.require_passives()
        AveragingSettings.from_run_settings(party.config).check_views(view_names(party.config.data))
        terms = bound_label_rows(party, len(party.data.classes))
        facts = {"rows": len(party.data.train_rows), "features": party.data.table.layout}
        return terms.model_copy(update=facts)

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the contract's terms; the weight of a passive is its share of all training rows.

        All parties must have equal features, since their weights are averaged.

        `proposed_terms`: mapping from party name to the terms that its `offer_terms` returned.
        `session`: name of this session, the same at all parties.

        Raises RemoteProtocolError: a party has other features, or does not state its rows.
        """
        classes = math.prod(proposed_terms[party.active].shape)
        features = proposed_terms[party.active].features
        for name, offered in proposed_terms.items():
            if offered.features != features:
                raise RemoteProtocolError(
                    f"{name} has other features than {party.active}, or in another order: weights "
                    "of different columns, kinds or categories would be averaged. Give both the "
                    "same columns in the same order and one encoding (data.parties.X.encoding)"
                )
            facts = {"rows": offered.rows, "features": features}
            expected = bound_label_rows(party, classes).model_copy(update=facts)
            party.require_terms(name, offered, expected)
            if offered.rows is None:
                raise RemoteProtocolError(f"{name} says not on how many rows it trains")
        rows = {name: offered.rows or 0 for name, offered in proposed_terms.items()}
        shares = {name: rows[name] / sum(rows.values()) for name in party.passives}
        return make_terms(party, session, proposed_terms, shares)

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role; `rows` is not used, since nothing is aligned."""
        active_sum = SessionSum.from_contract(party, contract).make_active_sum()
        return AveragingActive(party, contract, _make_stages(party), active_sum)

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role; `rows` is not used, since nothing is aligned.

        Raises ConfigError: its labels have another number of classes than the active's.
        """
        (classes,) = contract.passives[party.name].representation.shape
        if classes != len(party.data.classes):
            raise ConfigError(
                f"{party.name} has labels of {len(party.data.classes)} classes, {contract.active} "
                f"of {classes}; name the same classes at all parties"
            )
        session_sum = SessionSum.from_contract(party, contract)
        passive_sum = session_sum.make_passive_sum(person_count=len(_COUNTED_POSITION))
        return AveragingPassive(passive_sum, _make_stages(party), clip=session_sum.clip)


def _make_stages(party: PartyContext) -> TrainingStages:
    """Return one party's untrained models; at a passive, the active's average replaces them.

    Raises ConfigError: the party's columns have no views.
    """
    if not party.data.views:
        raise ConfigError(
            f"{party.name}: method {party.config.method.name} learns from several views, and this "
            "party's columns have none; name them in data.view_columns"
        )
    features_NF = party.data.table.features[party.data.train_rows]
    if party.config.model.network != "gru":
        views = [features_NF[:, view.columns] for view in party.data.views.values()]
        return TrainingStages(lambda: _make_linear_views(party, views))
    settings = AveragingSettings.from_run_settings(party.config)
    averaged_steps = settings.rounds if settings.has_sequence_views else 0
    # If the GRUs are not averaged, one call of their `train` runs the epochs of all rounds.
    epochs = settings.local_epochs * (1 if averaged_steps else settings.rounds)
    recurrent = _make_sequence_views(party, epochs)
    return TrainingStages(
        lambda: _make_linear_views(party, recurrent.compute_states(features_NF)),
        recurrent=recurrent,
        averaged_steps=averaged_steps,
    )


def _make_linear_views(party: PartyContext, views: Sequence[Tensor]) -> LinearViews:
    """Return untrained linear models of these views, with this party's labels.

    `views`: features of each view, (N, F): F features of N training rows.
    """
    settings = AveragingSettings.from_run_settings(party.config)
    view_settings = settings.for_views([*party.data.views], len(views))
    label_term = make_label_term(party, party.data.train_rows)
    return LinearViews.from_views(
        view_settings, views, label_term, owner=party.name, seed=party.secrets.seed
    )


def _make_sequence_views(party: PartyContext, epochs: int) -> SequenceViews:
    """Return untrained GRUs for this party's sequences.

    `epochs`: number of epochs that one call of their `train` runs.
    """
    config = party.config
    settings = AveragingSettings.from_run_settings(config)
    _require_own_sequences(party)
    return SequenceViews.make_untrained(
        party.name,
        config.model,
        features_N=party.data.table.features,
        labels_N=select_learnt_labels(party),
        classes=len(party.data.classes),
        training=settings.make_training(epochs),
        compute=Compute.from_settings(config.train),
        seed=party.secrets.seed,
    )


def _require_own_sequences(party: PartyContext) -> None:
    """Refuse settings whose sequences have other shapes than the views of the party's table.

    Views without a declared shape are not checked. Raises ConfigError: its text names both.
    """
    table_shapes = [view.sequence for view in party.data.views.values()]
    configured = party.config.model.sequences
    if all(table_shapes) and tuple(table_shapes) != configured:
        raise ConfigError(
            f"model.sequences: the views {', '.join(party.data.views)} of {party.name} are "
            f"sequences of {', '.join(str([*shape]) for shape in table_shapes if shape)}, in this "
            "order, got "
            f"{', '.join(str([*shape]) for shape in configured) or 'none'}; say the same there"
        )
