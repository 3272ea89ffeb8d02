"""MMVFL and V-FedMV: each party has a view of common people, and all agree on pseudo-labels.

Pseudo-labels are rows of C real numbers that stand for labels while views learn. All forms (FedMV's
other two stand in `secure_apfed.methods.averaging`) minimise over W_k, Z_k and Z

    sum over k of |X_k W_k - Z_k|^2 + beta |W_k|_21 + zeta_k |Z_k - Z|^2,   plus eta times
    |Z_1 - Y|^2 (MMVFL, Eq. 4) or |Z - Y|^2 (FedMV, Eq. 1; there once in each summand, while
    its Eq. 10 is the minimiser of it taken once: we take it once).

|W|_21 is the sum of the Euclidean norms of W's rows, one a feature. A step is one iteration of
MMVFL's Algorithm 1 or FedMV's Algorithm 2 in three scripts. `MultiviewActive.train_step`: the
active sends the common pseudo-labels Z, updates its own weights W_1 and pseudo-labels Z_1
meanwhile, and makes Z the mean of all Z_k, weighted by zeta_k. `MultiviewPassive.answer_message`: a
passive updates its own, and contributes zeta_k Z_k. There is no server as in the papers: the
aggregator adds what it cannot read (`secure_apfed.methods.session_sum`), and the active averages.
Ours: under `rules.silent_passive: recover` the mean is of those who answered, where MMVFL's rounds
wait for the slowest (section 5.2).

Under V-FedMV a party's view may be sequences (`model.network: gru`), of which a GRU of its own
makes X_k (FedMV, section 6). There all parties have the labels to train it by, and do so first.
Here the active's learns from labels, a passive's from what the active sends anyway: by the
cross-entropy to Z, negative numbers as 0, which is the paper's where Z is Y (`SequenceView`). So
nothing else goes round. GRUs learn in the steps 1 to `rounds`, since the first Z is random.

The active sends Z, which tends to the labels. A passive contributes to a secure sum without noise,
and for test rows, on which nobody trains, its part of the joint prediction (FedMV, Eqs. 12 and 13).
The labels, which FedMV gives all parties, stay with the active; a row without a label has no label
term in the objective. Every party can predict by its own X_k W_k afterwards.

Letters: N aligned people, B of them in a step, F features of a view, C classes, D numbers of a
GRU's state.
"""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.base.names import PartyName
from secure_apfed.base.seeds import derive_seed, seed_draws
from secure_apfed.contract import Contract, RepresentationBounds
from secure_apfed.data import UNLABELLED
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.learning.descent import ActiveNetworks, Compute, add_prefix, remove_prefix
from secure_apfed.learning.recurrent import RecurrentTraining, SequenceViews
from secure_apfed.learning.release import check_norms, check_rows
from secure_apfed.measures.table import Scored, score_model
from secure_apfed.methods.method import ActiveRole, HelperRole, SessionTerms
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import (
    ActiveSum,
    AdmittedRequest,
    PassiveSum,
    SessionSum,
    SumHelper,
    SumLearner,
    SumMethod,
)
from secure_apfed.networks.models import make_encoder_and_head
from secure_apfed.settings import MethodSettings, ModelSettings, RunSettings, protects

Floats = NDArray[np.float64]

_Weight: TypeAlias = Literal["beta", "zeta", "eta"]
_MIN_NORM = 1e-10
"""Epsilon of Eq. (7), added to the norm of a feature's weights so that the division stays finite.
"""
_TOLERANCE = 1e-12
"""Relative decrease of Eq. (5) below which reweighting stops."""
_MAX_ROUNDS = 10_000
"""Reweightings at most."""
_RECURRENT = "recurrent"
"""Prefix of the GRU's tensors in a checkpoint."""


class MultiviewSettings(MethodSettings):
    """The weights of the terms of the objective; the defaults are those of the method's paper.

    Attributes:
        beta: the weight of the l2,1 norm of a view's parameters.
        zeta: how strongly a view's pseudo-labels are pulled to the common ones; a passive's
            `weight` multiplies it.
        eta: the weight of the labels on the pseudo-labels that they are tied to.
        tolerance: relative decrease of the objective below which repeated updates stop; no setting.
        max_rounds: how often they are repeated at most; no setting.
        networks: the values of `model.network` that views may use.
        has_labels_on_own_view: whether the labels act on the pseudo-labels of the party that has
            them; False: on the common ones.
    """

    beta: Annotated[float, protects("nobody")] = Field(ge=0)
    zeta: Annotated[float, protects("nobody")] = Field(gt=0)
    eta: Annotated[float, protects("nobody")] = Field(gt=0)

    can_predict_locally = True
    networks: ClassVar[tuple[str, ...]] = ("identity",)
    tolerance: ClassVar[float] = 1e-6
    max_rounds: ClassVar[int] = 100
    has_labels_on_own_view: ClassVar[bool] = False

    def for_party(self, name: str) -> Self:
        """Return the settings with this party's own beta_k, zeta_k and eta (MMVFL, Eq. 4).

        Here they are the same for every party; `OneViewSettings` sets them by party `name`.
        """
        return self

    def check_run(self, config: RunSettings) -> None:
        """Refuse a guard, whose noise would not cover pseudo-labels, and networks other than
        `networks`.
        """
        if config.guard.mechanism != "none":
            raise ValueError(
                f"guard.mechanism: method {self.name} sends no representation, and one person "
                f"moves all {self.averaged_quantity} of a party, so that no noise of a guard "
                "covers it; say none"
            )
        for settings_key, model in self.list_models_by_key(config).items():
            if model.network not in self.networks:
                raise ValueError(
                    f"{settings_key}.network: method {self.name} takes "
                    f"{' or '.join(self.networks)}, got {model.network}"
                )

    def list_models_by_key(self, config: RunSettings) -> dict[str, ModelSettings]:
        """Return the settings of the networks that read the parties' views, by settings key."""
        return {"model": config.model}


class OneViewSettings(MultiviewSettings):
    """Every party has one view; see `MultiviewSettings`.

    Attributes:
        parties: other values of beta, zeta or, for parties with labels, eta, by party (the active
            too). They are above 0. All parties sign them, since Z is weighted by every zeta.
    """

    parties: Annotated[
        dict[PartyName, dict[_Weight, Annotated[float, Field(gt=0)]]], protects("nobody")
    ] = {}

    averaged_quantity = "pseudo-labels"

    def bound_linear_combinations(self, config: RunSettings, classes: int) -> float:
        """Return how many linear combinations of a person's features a run reveals to the active.

        An epoch reveals one for each of the C = `classes` classes, with weights of its own. The
        active influences these weights, since passives fit them to pseudo-labels that it sent.
        """
        return classes * config.train.epochs

    def list_models_by_key(self, config: RunSettings) -> dict[str, ModelSettings]:
        """Return the settings of the run's network and of passives' own networks, by settings key.

        A passive is listed only where `passives.NAME.model` configures it apart from the run.
        """
        passive_models = {
            f"passives.{name}.model": passive.model
            for name, passive in config.passives.items()
            if passive.model is not None
        }
        return super().list_models_by_key(config) | passive_models

    def for_party(self, name: str) -> Self:
        """Return a copy with the weights of the objective that `parties` sets for party `name`."""
        own_weights = self.parties.get(name, {})
        return self.model_copy(update={str(key): value for key, value in own_weights.items()})

    def check_parties(self, config: RunSettings, names: Sequence[str]) -> None:
        """Refuse `parties` that give weights to an unknown party, or an eta to one without labels.

        `names`: names of the active and the passives. Raises ConfigError: its text names the key.
        """
        for name, overrides in self.parties.items():
            if name not in names:
                raise ConfigError(
                    f"method.parties.{name}: no party has that name; there are {', '.join(names)}"
                )
            if "eta" in overrides and not config.data.has_labels(name):
                raise ConfigError(
                    f"method.parties.{name}.eta: {name} holds no labels to be drawn to; leave it "
                    "out, or name the party in data.labels_at where the method takes that"
                )


class MmvflSettings(OneViewSettings):
    """The settings of MMVFL: the labels act on the active's own pseudo-labels; see
    `OneViewSettings`.
    """

    name: Literal["mmvfl"]
    beta: Annotated[float, protects("nobody")] = Field(1.0, ge=0)
    zeta: Annotated[float, protects("nobody")] = Field(1000.0, gt=0)
    eta: Annotated[float, protects("nobody")] = Field(1000.0, gt=0)

    title = "MMVFL"
    can_use_passive_labels = True
    has_labels_on_own_view = True


class FedMvSettings(MultiviewSettings):
    """The settings of FedMV in its three forms: the labels act on the common pseudo-labels."""

    beta: Annotated[float, protects("nobody")] = Field(4.0, ge=0)
    zeta: Annotated[float, protects("nobody")] = Field(8.0, gt=0)
    eta: Annotated[float, protects("nobody")] = Field(8.0, gt=0)


class RecurrentSettings(FedMvSettings):
    """The settings of views that may be sequences, of which GRUs make views (`model.network: gru`).

    Attributes:
        rounds: the number of rounds in which GRUs learn: after the first step (v_fedmv), averaged
            after each (s_fedmv), or before the first step, without exchange (h_fedmv).
        local_epochs: epochs of each party's GRUs in a round.
        learning_rate: the learning rate of GRUs, by RMSProp; FedMV tries 0.001 and 0.005.
        dropout: dropout of the GRUs' last states in training; FedMV tries 0.1 and 0.3.
    """

    rounds: Annotated[int, protects("nobody")] = Field(20, ge=1)
    local_epochs: Annotated[int, protects("nobody")] = Field(1, ge=1)
    learning_rate: Annotated[float, protects("nobody")] = Field(5e-3, gt=0)
    dropout: Annotated[float, protects("nobody")] = Field(0.1, ge=0, lt=1)

    networks: ClassVar[tuple[str, ...]] = ("identity", "gru")

    def check_run(self, config: RunSettings) -> None:
        """Refuse settings of GRUs where no party's view is read by a GRU.

        Raises ValueError: such a setting differs from its default, so it would have no effect.
        """
        super().check_run(config)
        uses_gru = any(model.network == "gru" for model in self.list_models_by_key(config).values())
        if uses_gru:
            return
        for key in ("rounds", "local_epochs", "learning_rate", "dropout"):
            if getattr(self, key) != RecurrentSettings.model_fields[key].default:
                raise ValueError(
                    f"method.{key}: it is of GRUs, and no view is read by one; say model.network: "
                    f"gru, with model.sequences, or leave {key} out"
                )

    def make_training(self, epochs: int) -> RecurrentTraining:
        """Return the GRUs' training settings for this number of epochs."""
        return RecurrentTraining(
            epochs=epochs, learning_rate=self.learning_rate, dropout=self.dropout
        )

    def for_rehearsal(self, steps: int, epochs: int) -> Self:
        """Return the settings for a rehearsal of `steps` steps, for a run of `epochs` epochs.

        A rehearsal is a short run on random numbers, from which `plan` estimates time and bytes.
        GRUs learn in the same share of its steps as in the real run, in at least one.
        """
        rounds = max(1, round(steps * self.rounds / epochs))
        return self.model_copy(update={"rounds": rounds})


class VFedMvSettings(RecurrentSettings, OneViewSettings):
    """The settings of V-FedMV; see `OneViewSettings` and `RecurrentSettings`."""

    name: Literal["v_fedmv"]

    title = "V-FedMV"


class ViewsActive(SumLearner):
    """The role of an active that predicts alone, by one linear layer over its views.

    See `ActiveRole` for the methods that a training loop calls.
    """

    def __init__(self, party: PartyContext, contract: Contract, active_sum: ActiveSum) -> None:
        """Build the active's encoder and linear layer; `get_active_networks` sets their weights.

        `active_sum`: the active's side of the secure sum, which sends requests and decodes sums.
        """
        super().__init__()
        self.use_active_sum(active_sum)
        self.name = party.name
        self.contract = contract
        self._party = party
        table = party.data.table
        compute = Compute.from_settings(party.config.train)
        with seed_draws(party.secrets.seed, party.name, "networks"):
            classes = len(party.data.classes)
            encoder, head = make_encoder_and_head(party.config.model, table.shape, classes)
        self._networks = ActiveNetworks(encoder, head).to(compute.device, compute.dtype)
        assert table.labels is not None
        self._features_N = compute.move_tensor(table.features)
        self._labels_N = table.labels

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """The weights of the linear layer over its views, (C, F): C classes, F features."""

    def get_active_networks(self) -> ActiveNetworks:
        """Return the encoder of the views and a linear layer with the weights `head`."""
        assert isinstance(self._networks.head, nn.Linear)
        with torch.no_grad():
            self._networks.head.weight.copy_(self.head)
        return self._networks

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return the active's scores of its test rows without other parties, by the method's name.

        It sends nothing, so that `links`, `next_step` and `is_final` have no effect here.
        """
        networks = self.get_active_networks().eval()
        features_N = self._features_N
        labels_N = self._labels_N.to(features_N.device)
        scored = score_model(
            lambda rows_B: networks(features_N[rows_B], None)[0],
            self._party.data.test_rows,
            labels_N,
        )
        return {self._party.config.method.name: scored}


class MultiviewActive(ViewsActive):
    """The active's role in multi-view learning; see `ActiveRole`.

    The active has the labels, the common pseudo-labels Z (rows of C real numbers that stand for
    labels), and a view of its own: features X_1, weights W_1 and pseudo-labels Z_1.

    Attributes:
        test_positions: the alignment positions of its test rows.
    """

    guarantee = "no guarantee: sums of pseudo-labels are opened without noise"

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        rows: Tensor,
        trainer: "ActiveTrainer",
        active_sum: ActiveSum,
    ) -> None:
        """Make the active's role, and find the alignment positions of training and test rows.

        `rows`: the row of its table at each of the N alignment positions. `trainer`: the active's
        view and the common pseudo-labels Z. `active_sum`: the active's side of the secure sum,
        which sends requests and decodes sums.
        """
        super().__init__(party, contract, active_sum)
        self.trainer = trainer
        self._rows = rows
        self.checkpoint_parts = {"": trainer}  # an empty prefix: its tensors keep their names
        self.min_batch_rows = party.config.rules.minimum_batch
        self.training_rows = party.find_positions(rows, party.data.train_rows)
        self.test_positions = party.find_positions(rows, party.data.test_rows)

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """Run one iteration: send the common pseudo-labels Z, and set Z to the mean of all Z_k.

        While the passives compute their Z_k, the active updates its own view (MMVFL, Alg. 1; FedMV,
        Alg. 2). `rows_B`: alignment positions (indices into the common list of people), (B,).
        Returns the active's part of the objective.

        Raises ModelError: a view cannot be learnt from; RemoteProtocolError: the sum answers
        another request, and Z stays unchanged.
        """
        common_BC = self.trainer.common_NC[rows_B.numpy()]
        payload = self.send_request(links, step, rows_B, common_BC)
        self.trainer.update_view(step, rows_B)
        decoded_BC = await self._receive_sum(links, step, rows_B, payload)
        return self.trainer.average_labels(rows_B, decoded_BC, self._list_absent())

    def send_request(self, links: Links, step: int, rows_B: Tensor, common_BC: Floats) -> bytes:
        """Send every passive these alignment positions, with the pseudo-labels Z to learn from.

        `common_BC`: Z of these positions; an empty (0, C) array requests predictions instead.
        Returns the request's bytes: the decoded sum must be bound to them.
        """
        payload = pack_tensors({"rows": rows_B, "z": torch.from_numpy(common_BC)}, {})
        self.active_sum.send_request(links, Kind.REQUEST, step, payload)
        return payload

    def _list_absent(self) -> list[int]:
        """Return the indices in `trainer.zetas` of the passives that the last decoded sum lacks."""
        indexed_passives = enumerate(self.contract.passives, start=1)  # index 0 is the active
        present = self.active_sum.receiver.counted
        return [index for index, name in indexed_passives if name not in present]

    async def _receive_sum(self, links: Links, step: int, rows_B: Tensor, payload: bytes) -> Floats:
        """Return the decoded sum of the passives' answers about these positions, (B, C).

        A passive answers with zeta_k Z_k divided by the sum of all zetas, or, if a prediction was
        requested, with its weighted part of it. `payload`: the request's bytes.
        """
        classes = self.trainer.common_NC.shape[1]
        sum_BC = await self.active_sum.receive_sum(links, step, rows_B, payload, classes)
        return np.asarray(sum_BC.numpy())

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return the active's own scores, and after training also the joint scores of all parties.

        `next_step`: an unused step number, for the request of the joint prediction. `is_final`:
        whether training is over. Joint scores have keys that end in "_together".
        """
        scores = await super().evaluate(links, next_step=next_step, is_final=is_final)
        if is_final:
            scores |= {
                f"{name}_together": await self._score_jointly(links, next_step) for name in scores
            }
        return scores

    async def _score_jointly(self, links: Links, step: int) -> Scored:
        """Return the joint scores of the aligned test rows.

        They are empty if there are fewer test rows than the agreed smallest batch, which passives
        would refuse. `step`: an unused step number.
        """
        rows_B = self.test_positions
        empty_BC = self.trainer.common_NC[:0]
        truth_B = self._labels_N[self._rows[rows_B]]
        if len(rows_B) < self.min_batch_rows:
            return Scored.from_network_outputs(truth_B[:0], empty_BC)
        payload = self.send_request(links, step, rows_B, empty_BC)
        decoded_BC = await self._receive_sum(links, step, rows_B, payload)
        joint_BC = self.trainer.predict_jointly(rows_B, decoded_BC, self._list_absent())
        return Scored.from_network_outputs(truth_B, joint_BC)

    def get_active_networks(self) -> ActiveNetworks:
        """Return the active's networks, with the trained GRU as their encoder if the view is a
        sequence.
        """
        if self.trainer.sequence is not None:
            state = self.trainer.sequence.recurrent.encoder.state_dict()
            self._networks.encoder.load_state_dict(state)
        return super().get_active_networks()

    @property
    def head(self) -> Tensor:
        """The weights of the active's own view, as a linear layer, (C, F)."""
        return torch.from_numpy(self.trainer.view.weights_FC.T)

    def feature_scores(self) -> Tensor | None:
        """Return the importance of each feature; None if a GRU makes the features."""
        return self.trainer.feature_scores()


class MultiviewPassive(SumHelper):
    """A passive's role in multi-view learning; see `HelperRole`.

    The passive has a view of its own (features X_k, weights W_k, pseudo-labels Z_k), and possibly
    labels.
    """

    request_kinds = (Kind.REQUEST,)

    def __init__(
        self, passive_sum: PassiveSum, trainer: "ViewTrainer", *, clip: float | None
    ) -> None:
        """Make a passive's role in multi-view learning.

        `passive_sum`: the passive's side of the secure sum, which checks requests and masks
        contributions. `trainer`: the passive's view and its updates. `clip`: the largest L2 norm of
        a row that it may contribute; None: any.
        """
        super().__init__(passive_sum, {"": trainer})
        self.trainer = trainer
        self._clip = clip

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Answer a request: contribute updated pseudo-labels, or predictions, to the secure sum.

        A request with common pseudo-labels Z first updates this passive's view towards them (FedMV,
        Alg. 2). Raises RemoteProtocolError: the request breaks a rule; LocalProtocolError: a row is
        longer than the clip bound of the sum.
        """
        admitted_request, common_BC = self.admit_message(message)
        values_BC = self.trainer.compute_share(
            admitted_request.step, admitted_request.rows, common_BC
        )
        # The sum would silently shorten longer rows, which would make the average wrong.
        check_clip(values_BC, self._clip, party_name=self.name)
        await self.passive_sum.send_answer(links, admitted_request, values_BC)

    def feature_scores(self) -> Tensor | None:
        """Return the importance of each feature; None if a GRU makes the features."""
        return self.trainer.feature_scores()

    def admit_message(self, message: Envelope) -> tuple[AdmittedRequest, Floats | None]:
        """Check the active's request against the contract, and count it against its limits.

        Returns the admitted request, and the common pseudo-labels Z of its positions, (B, C); None
        instead of Z if it requests a prediction. Raises RemoteProtocolError: the message is
        malformed or breaks a rule of the contract.
        """
        terms = self.contract.passives[self.name].representation
        sender = message.sender
        expected = {
            "rows": TensorSpec(torch.int64, (None,)),
            "z": TensorSpec(torch.float64, (None, *terms.shape)),
        }
        tensors, _ = unpack_tensors(message.payload, expected, sender=sender)
        rows_B = tensors["rows"]
        z_BC = tensors["z"]
        if len(z_BC):
            if len(z_BC) != len(rows_B):
                raise RemoteProtocolError(
                    f"{sender} sent {len(rows_B)} row positions for {len(z_BC)} rows of z"
                )
            check_norms(z_BC, terms, sender=sender)
        person_count = len(self.trainer.view.x_NF)
        minimum = self.contract.minimum_batch
        check_rows(rows_B, alignment_size=person_count, min_rows=minimum, sender=sender)
        admitted_request = self.passive_sum.admit_request(message, rows_B)
        return admitted_request, z_BC.numpy() if len(z_BC) else None


def check_clip(values_BC: Floats, clip: float | None, *, party_name: str) -> None:
    """Refuse a contribution with rows longer than the clip bound, whose average would be wrong.

    `values_BC`: the contribution of the party `party_name`: pseudo-labels (B, C), or weights of a
    model. `clip`: the largest L2 norm of a row; None: any. Raises LocalProtocolError: names the
    norm of the longest row.
    """
    longest = float(np.linalg.norm(values_BC, axis=1).max(initial=0.0))
    if clip is not None and longest > clip:
        raise LocalProtocolError(
            f"{party_name}: a row of its contribution is {longest:.3g} long, and secure_sum.clip "
            f"cuts rows to {clip:g}; agree on a clip above {longest:.3g} at all parties"
        )


class ViewTrainer:
    """A party's view, and its contribution to the weighted mean of all parties' pseudo-labels."""

    def __init__(
        self,
        view: "ViewModel",
        zetas: Sequence[float],
        label_term: "LabelTerm | None" = None,
        *,
        sequence: "SequenceView | None" = None,
    ) -> None:
        """Make the trainer of one party's view.

        Args:
            view: the party's features, weights and pseudo-labels.
            zetas: zeta_k of all parties, the active's first: the weight of party k in the mean.
            label_term: the term of its labels in the objective; None: it has no labels.
            sequence: the GRU that computes the view's features; None: they are the party's columns.
        """
        self.view = view
        self.zetas = zetas
        self.label_term = label_term
        self.sequence = sequence

    def compute_share(self, step: int, rows_B: Tensor, common_BC: Floats | None) -> Floats:
        """Update the view, and return this party's summand of the mean pseudo-labels, (B, C).

        The summand is zeta_k Z_k divided by the sum of all zetas. Without `common_BC` the view
        stays unchanged, and this party's summand of the joint prediction is returned, (B, C).

        Args:
            step: number of the step; a GRU learns in some steps only.
            rows_B: alignment positions (indices into the common list of people), (B,).
            common_BC: the common pseudo-labels Z of these rows; None: a prediction is requested.
        """
        rows = rows_B.numpy()
        zeta = self.view.zeta
        if common_BC is None:
            return compute_joint_weight(zeta, self.zetas) * self.view.compute_scores(rows)
        if self.sequence is not None and self.sequence.learns_in(step):
            self.sequence.train_on_rows(step, rows_B, common_BC)
            self.view.replace_features(self.sequence.compute_states())
        own_label_term = None
        if self.label_term is not None:
            own_label_term = self.label_term.pick_rows(rows, updates_own_labels=True)
        own_labels_BC = self.view.update_model(rows, common_BC, own_label_term)
        return zeta / sum(self.zetas) * own_labels_BC

    def feature_scores(self) -> Tensor | None:
        """Return the importance of each feature, (F,); None if the features are states of a GRU."""
        if self.sequence is not None:
            return None
        return torch.from_numpy(compute_row_norms(self.view.weights_FC))

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, pseudo-labels and the GRU's state if there is one, for a checkpoint.

        In a tensor whose name begins with `pseudo_labels.`, rows are alignment positions.
        """
        view_tensors = self.view.tensors()
        tensors = {
            "weights": view_tensors["weights"],
            "pseudo_labels.own": view_tensors["labels"],
        }
        if self.sequence is None:
            return tensors
        return tensors | add_prefix(_RECURRENT, self.sequence.recurrent.tensors())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned; recompute the view's features with its GRU."""
        self.view.load_tensors({**tensors, "labels": tensors["pseudo_labels.own"]})
        if self.sequence is not None:
            self.sequence.recurrent.load_tensors(remove_prefix(_RECURRENT, tensors))
            self.view.replace_features(self.sequence.compute_states())


class ActiveTrainer(ViewTrainer):
    """The active's view, and the common pseudo-labels Z that it computes from all views."""

    label_term: "LabelTerm"

    def __init__(
        self,
        view: "ViewModel",
        zetas: Sequence[float],
        label_term: "LabelTerm",
        *,
        common_NC: Floats,
        sequence: "SequenceView | None" = None,
    ) -> None:
        """Make the trainer of the active's view.

        Args:
            view: the active's features, weights and pseudo-labels.
            zetas: zeta_k of all parties, the active's first: the weight of party k in the mean.
            label_term: the term of its labels in the objective.
            common_NC: the common pseudo-labels Z of all N positions at the start, C classes.
            sequence: the GRU that computes the view's features; None: they are its columns.
        """
        super().__init__(view, zetas, label_term, sequence=sequence)
        self.common_NC = common_NC

    def update_view(self, step: int, rows_B: Tensor) -> None:
        """Update the active's view towards the common pseudo-labels of these positions, (B,)."""
        self.compute_share(step, rows_B, self.common_NC[rows_B.numpy()])

    def average_labels(
        self, rows_B: Tensor, decoded_BC: Floats, absent_indices: Sequence[int] = ()
    ) -> float:
        """Set Z of these rows to the mean of all Z_k; return the active's part of the objective.

        The mean is weighted by zeta_k (MMVFL, Eq. 14).

        Args:
            rows_B: alignment positions (indices into the common list of people), (B,).
            decoded_BC: the passives' decoded sum: zeta_k Z_k divided by the sum of all zetas.
            absent_indices: indices in `zetas` of passives that the sum lacks, which the mean leaves
                out.
        """
        rows = rows_B.numpy()
        zeta_sum = sum(self.zetas)
        summed_BC = zeta_sum * decoded_BC + self.view.zeta * self.view.labels_NC[rows]
        present_zeta_sum = sum(
            zeta for index, zeta in enumerate(self.zetas) if index not in absent_indices
        )
        common_term = self.label_term.pick_rows(rows, updates_own_labels=False)
        common_BC = compute_common_labels(summed_BC, present_zeta_sum, common_term)
        self.common_NC[rows] = common_BC
        return self.view.compute_loss(rows, common_BC)

    def predict_jointly(
        self, rows_B: Tensor, decoded_BC: Floats, absent_indices: Sequence[int] = ()
    ) -> Floats:
        """Return the joint prediction for rows outside training, (B, C): FedMV, Eqs. (12) and (13).

        It is the weighted mean of the predictions of all parties that are not absent.

        Args:
            rows_B: alignment positions (indices into the common list of people), (B,).
            decoded_BC: the decoded sum of the passives' weighted predictions.
            absent_indices: indices in `zetas` of passives that the sum lacks.
        """
        absent_weight = sum(
            compute_joint_weight(self.zetas[index], self.zetas) for index in absent_indices
        )
        own_weight = compute_joint_weight(self.view.zeta, self.zetas)
        own_BC = own_weight * self.view.compute_scores(rows_B.numpy())
        # All weights sum to 1; the division rescales the weights of the parties that answered.
        return np.asarray((decoded_BC + own_BC) / (1 - absent_weight))

    def tensors(self) -> dict[str, Tensor]:
        """Return the view's state and the common pseudo-labels, for a checkpoint."""
        return super().tensors() | {"pseudo_labels.common": torch.from_numpy(self.common_NC)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        super().load_tensors(tensors)
        self.common_NC = tensors["pseudo_labels.common"].numpy().copy()


class SequenceView:
    """A party's view X_k of its sequences, computed by a GRU that learns in some of the steps."""

    def __init__(
        self,
        recurrent: SequenceViews,
        features_N: Tensor,
        rows_N: Tensor,
        *,
        rounds: int,
        holds_labels: bool,
    ) -> None:
        """Make a view of sequences from its GRU and the party's table.

        Args:
            recurrent: the GRU, with its optimiser.
            features_N: the party's table, one row for each person; a row is a flattened sequence.
            rows_N: the row of the table at each of the N alignment positions.
            rounds: number of steps in which the GRU learns, from the second step on.
            holds_labels: whether it learns from labels of its owner; False: from Z.
        """
        self.recurrent = recurrent
        self._features_N = features_N
        self._rows_N = rows_N
        self._rounds = rounds
        self._holds_labels = holds_labels

    def learns_in(self, step: int) -> bool:
        """Return whether the GRU trains in this step: not in the first one, where Z is random."""
        return 0 < step <= self._rounds

    def train_on_rows(self, step: int, rows_B: Tensor, common_BC: Floats) -> None:
        """Train the GRU on its owner's labels; an owner without labels trains it towards Z.

        `rows_B`: alignment positions, (B,). `common_BC`: their common pseudo-labels Z, used as soft
        labels, with negative numbers as 0.
        """
        if not self._holds_labels:
            # Rows stand in the table's order, since the alignment's order is random.
            order_B = self._rows_N[rows_B].argsort()
            shares_BC = torch.from_numpy(common_BC).clamp(min=0)
            features_B = self._features_N[self._rows_N[rows_B][order_B]]
            self.recurrent.set_training_rows(features_B, shares_BC[order_B])
        self.recurrent.train(step)

    def compute_states(self) -> Floats:
        """Return the view's features X_k, the GRU's states: (N, 2 D) for N aligned people.

        A state has D numbers in each of the two directions.
        """
        (states_ND,) = self.recurrent.compute_states(self._features_N[self._rows_N])
        return np.asarray(states_ND.double().cpu().numpy())


@dataclass(frozen=True, eq=False)
class LabelTerm:
    """The term of the objective that ties pseudo-labels to the labels: eta |Z - Y|^2.

    Attributes:
        truth_NC: Y, one-hot; zeros where a row has no label to learn from.
        eta_N1: the weight eta of each row's term, (N, 1); 0 for rows without a label.
        is_on_own_labels: whether the labels act on the pseudo-labels Z_k of their owner's view
            (MMVFL); False: on the common pseudo-labels Z.
    """

    truth_NC: Floats = field(repr=False)  # noqa: N815
    eta_N1: Floats = field(repr=False)  # noqa: N815
    is_on_own_labels: bool = False

    def pick_rows(
        self, rows_B: NDArray[np.int64], *, updates_own_labels: bool
    ) -> "LabelTerm | None":
        """Return the term for these rows; None if it does not act on the pseudo-labels to update.

        `updates_own_labels`: whether a view's own pseudo-labels Z_k are updated; False: the common
        Z is.
        """
        if updates_own_labels is not self.is_on_own_labels:
            return None
        return LabelTerm(self.truth_NC[rows_B], self.eta_N1[rows_B], self.is_on_own_labels)


@dataclass(eq=False)
class ViewModel:
    """A party's view of the aligned people: its weights and pseudo-labels, and their updates.

    Attributes:
        x_NF: X_k, its features, float64.
        beta, zeta: the weights beta_k and zeta_k of the objective's terms.
        weights_FC: W_k, the weights of the linear model.
        labels_NC: Z_k, the view's own pseudo-labels.
        tolerance, max_rounds: when the reweighting in `solve_weights` stops.
    """

    x_NF: Floats = field(repr=False)  # noqa: N815
    beta: float
    zeta: float
    weights_FC: Floats = field(repr=False)  # noqa: N815
    labels_NC: Floats = field(repr=False)  # noqa: N815
    tolerance: float = _TOLERANCE
    max_rounds: int = _MAX_ROUNDS
    _gram: tuple[bytes, Floats] | None = field(default=None, init=False, repr=False)
    """Sorted rows of the last update, as bytes, and X^T X of these rows."""

    @classmethod
    def from_features(
        cls, x_NF: Floats, classes: int, rng: np.random.Generator, **settings: float
    ) -> "ViewModel":
        """Return a view with random weights and pseudo-labels (MMVFL, Algorithm 1, line 1).

        `x_NF`: the view's F features of N people. `classes`: C, columns of the pseudo-labels.
        `rng`: generator of the random start. `settings`: beta, zeta, tolerance and max_rounds.
        """
        rows, features = x_NF.shape
        weights_FC = rng.standard_normal((features, classes))
        labels_NC = draw_orthonormal(rows, classes, rng)
        return cls(x_NF=x_NF, weights_FC=weights_FC, labels_NC=labels_NC, **settings)  # type: ignore[arg-type]

    def replace_features(self, x_NF: Floats) -> None:
        """Replace the features X_k of the same rows, after their GRU was trained."""
        self.x_NF = x_NF
        self._gram = None  # X^T X of the old features is stale

    def update_model(
        self, rows_B: NDArray[np.int64], common_BC: Floats, label_term: LabelTerm | None = None
    ) -> Floats:
        """Update the weights W_k, then the pseudo-labels Z_k of these rows; return Z_k, (B, C).

        Source: MMVFL, Algorithm 1, lines 4 to 12. `common_BC`: the common pseudo-labels Z of these
        rows. `label_term`: the labels and their weights, if they act on Z_k; None: they do not.
        """
        self.fit_weights(rows_B)
        return self.update_labels(rows_B, common_BC, label_term)

    def fit_weights(self, rows_B: NDArray[np.int64]) -> None:
        """Set the weights W_k to the minimiser of |X W - Z_k|^2 + beta |W|_21 over these rows.

        That is MMVFL's Eq. (5). X^T X is reused while the rows stay the same.
        """
        x_BF = self.x_NF[rows_B]
        rows_key = np.sort(rows_B).tobytes()
        if self._gram is None or self._gram[0] != rows_key:
            self._gram = rows_key, x_BF.T @ x_BF
        self.weights_FC = solve_weights(
            x_BF,
            self.labels_NC[rows_B],
            self.beta,
            self.weights_FC,
            tolerance=self.tolerance,
            max_rounds=self.max_rounds,
            gram_FF=self._gram[1],
        )

    def update_labels(
        self, rows_B: NDArray[np.int64], common_BC: Floats, label_term: LabelTerm | None = None
    ) -> Floats:
        """Update the pseudo-labels Z_k of these rows, and return them, (B, C).

        `common_BC`: the common pseudo-labels Z of these rows. `label_term`: the labels and their
        weights, if they act on Z_k; None: they do not.
        """
        labels_BC = compute_own_labels(
            self.compute_scores(rows_B), common_BC, self.zeta, label_term
        )
        self.labels_NC[rows_B] = labels_BC
        return labels_BC

    def compute_scores(self, rows_B: NDArray[np.int64]) -> Floats:
        """Return the view's prediction X_k W_k for these rows, (B, C)."""
        return np.asarray(self.x_NF[rows_B] @ self.weights_FC)

    def tensors(self) -> dict[str, Tensor]:
        """Return weights W_k and pseudo-labels Z_k."""
        return {
            "weights": torch.from_numpy(self.weights_FC),
            "labels": torch.from_numpy(self.labels_NC),
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the weights and pseudo-labels that `tensors` returned."""
        self.weights_FC = tensors["weights"].numpy().copy()
        self.labels_NC = tensors["labels"].numpy().copy()

    def compute_loss(self, rows_B: NDArray[np.int64], common_BC: Floats) -> float:
        """Return this view's part of the objective for these rows, divided by their number.

        The part is |X W - Z_k|^2 + beta |W|_21 + zeta_k |Z_k - Z|^2. `common_BC`: the common
        pseudo-labels Z of these rows, (B, C).
        """
        labels_BC = self.labels_NC[rows_B]
        own_loss = compute_view_loss(self.x_NF[rows_B], self.weights_FC, labels_BC, self.beta)
        return (own_loss + self.zeta * float(((labels_BC - common_BC) ** 2).sum())) / len(rows_B)


def compute_own_labels(
    scores_NC: Floats, common_NC: Floats, zeta: float, label_term: LabelTerm | None = None
) -> Floats:
    """Return a view's pseudo-labels Z_k, (N, C): the mean of its prediction and of Z.

    Source: MMVFL, Eqs. (11) and (12); FedMV, Eqs. (8) and (13).

    Args:
        scores_NC: X_k W_k, the view's prediction, with weight 1.
        common_NC: Z, the common pseudo-labels.
        zeta: zeta_k, the weight of Z.
        label_term: the labels and their weights, if they act on Z_k; None: they do not.
    """
    return _average_with_labels(scores_NC + zeta * common_NC, 1 + zeta, label_term)


def compute_common_labels(
    summed_NC: Floats, zeta_sum: float, label_term: LabelTerm | None = None
) -> Floats:
    """Return the common pseudo-labels Z, (N, C): the mean of all parties' Z_k, weighted by zeta_k.

    Source: MMVFL, Eq. (14); FedMV, Eqs. (10) and (12).

    Args:
        summed_NC: the sum of zeta_k Z_k over all parties; the active reads only this sum.
        zetas: the sum of the zeta_k of these parties.
        label_term: the labels and their weights, if they act on Z; None: they do not.
    """
    return _average_with_labels(summed_NC, zeta_sum, label_term)


def _average_with_labels(
    weighted_sum_NC: Floats, weight_sum: float, label_term: LabelTerm | None
) -> Floats:
    """Return the weighted mean of pseudo-labels and labels, (N, C).

    `weighted_sum_NC`: the weighted sum of pseudo-labels. `weight_sum`: the sum of their weights.
    `label_term`: the labels and their weights; None: the labels do not act here.
    """
    if label_term is None:
        return np.asarray(weighted_sum_NC / weight_sum)
    return np.asarray(
        (weighted_sum_NC + label_term.eta_N1 * label_term.truth_NC)
        / (weight_sum + label_term.eta_N1)
    )


def solve_weights(
    x_NF: Floats,
    labels_NC: Floats,
    beta: float,
    weights_FC: Floats,
    *,
    tolerance: float = _TOLERANCE,
    max_rounds: int = _MAX_ROUNDS,
    gram_FF: Floats | None = None,
) -> Floats:
    """Return the weights W_k that minimise |X W - Z|^2 + beta |W|_21 (MMVFL, Eq. 5).

    They are found by iterative reweighting (MMVFL, Eqs. 7 and 8). A round minimises a quadratic
    that lies above the objective and touches it at the last weights (|w| <= |w|^2 / 2a + a / 2), so
    that no round raises the objective. If all weights of a feature are 0, they stay 0.

    Args:
        x_NF: X_k, F features of N people.
        labels_NC: Z_k, their pseudo-labels, C classes.
        beta: the weight of |W|_21, the sum of the Euclidean norms of the features' weights.
        weights_FC: the weights to start from.
        tolerance: relative decrease of the objective below which reweighting stops.
        max_rounds: the largest number of reweightings.
        gram_FF: X^T X; None: it is computed here.

    Raises ModelError: X^T X is singular and beta is 0, or numbers are not finite.
    """
    gram_FF = x_NF.T @ x_NF if gram_FF is None else gram_FF
    cross_FC = x_NF.T @ labels_NC
    loss = compute_view_loss(x_NF, weights_FC, labels_NC, beta)
    for _ in range(max_rounds):
        # Eq. (7): the weight of each feature's squared norm in this round.
        ridge_F = beta / (2 * (compute_row_norms(weights_FC) + _MIN_NORM))
        try:
            weights_FC = scipy.linalg.solve(gram_FF + np.diag(ridge_F), cross_FC, assume_a="pos")
        except np.linalg.LinAlgError as error:
            raise ModelError(
                "a view's columns are linearly dependent; take a beta above 0, or fewer columns"
            ) from error
        except ValueError as error:
            raise ModelError(
                "a view's numbers are too large to learn from; rescale its columns, or take a "
                "smaller method.beta"
            ) from error
        next_loss = compute_view_loss(x_NF, weights_FC, labels_NC, beta)
        # Converged; for a loss below 1 the tolerance is absolute.
        if loss - next_loss <= tolerance * max(loss, 1.0):
            break
        loss = next_loss
    return np.asarray(weights_FC)


def compute_view_loss(x_NF: Floats, weights_FC: Floats, labels_NC: Floats, beta: float) -> float:
    """Return a view's loss, |X W - Z|^2 + beta |W|_21 (MMVFL, Eq. 5).

    X: F features of N people. W: weights. Z: pseudo-labels of C classes. |W|_21: the sum of the
    Euclidean norms of the features' weights.
    """
    residual_NC = x_NF @ weights_FC - labels_NC
    return float((residual_NC**2).sum() + beta * compute_row_norms(weights_FC).sum())


def compute_row_norms(weights_FC: Floats) -> Floats:
    """Return the Euclidean norm of each feature's weights: its importance (MMVFL, section 4.2)."""
    return np.asarray(np.linalg.norm(weights_FC, axis=1))


def draw_orthonormal(rows: int, classes: int, rng: np.random.Generator) -> Floats:
    """Return a random matrix Z with orthonormal columns, (rows, classes).

    With fewer rows than classes its rows are orthonormal instead.
    """
    random_NC = rng.standard_normal((rows, classes))
    # Z^T Z = I needs at least as many rows as columns.
    if rows < classes:
        return np.asarray(np.linalg.qr(random_NC.T)[0].T)
    return np.asarray(np.linalg.qr(random_NC)[0])


def run_iteration(views: Sequence[ViewModel], common_NC: Floats, label_term: LabelTerm) -> Floats:
    """Update all views in place, and return the new common pseudo-labels Z, (N, C).

    This is one iteration of all parties in one process (MMVFL, Algorithm 1; FedMV, Algorithms 1
    and 2), without messages, for experiments.

    Args:
        views: one for each party, with rows of the same N people; the first party has the labels.
        common_NC: Z before the iteration.
        label_term: the labels and their weights; its `acts_on_own` says whether they act on the
            first view's pseudo-labels or on Z.
    """
    rows = np.arange(len(common_NC))
    first_view_term = label_term if label_term.is_on_own_labels else None
    common_term = None if label_term.is_on_own_labels else label_term
    for index, view in enumerate(views):
        view.update_model(rows, common_NC, first_view_term if index == 0 else None)
    return average_views(views, common_term)


def average_views(views: Sequence[ViewModel], label_term: LabelTerm | None) -> Floats:
    """Return the common pseudo-labels Z, (N, C): the mean of the views' Z_k, weighted by zeta_k.

    `label_term`: the labels and their weights, if they enter the mean, too; None: they do not.
    """
    summed_NC = np.sum([view.zeta * view.labels_NC for view in views], axis=0)
    return compute_common_labels(summed_NC, sum(view.zeta for view in views), label_term)


def compute_objective(
    views: Sequence[ViewModel], common_NC: Floats, label_term: LabelTerm
) -> float:
    """Return the objective that all views minimise together; see the head of this module.

    `views`: one for each party; the first party has the labels. `common_NC`: the common
    pseudo-labels Z. `label_term`: the labels and their weights.
    """
    rows = np.arange(len(common_NC))
    tied_NC = views[0].labels_NC if label_term.is_on_own_labels else common_NC
    label_loss = float((label_term.eta_N1 * (tied_NC - label_term.truth_NC) ** 2).sum())
    mean_view_loss = sum(view.compute_loss(rows, common_NC) for view in views)
    return len(rows) * mean_view_loss + label_loss


def compute_joint_weight(zeta: float, zetas: Collection[float]) -> float:
    """Return the weight of one party's prediction X_k W_k in the joint prediction.

    The weight is zeta_k / (1 + zeta_k), normalised to sum to 1 over all parties. It follows from
    FedMV's Eq. (13) put into Eq. (12), solved for Z.

    `zeta`: zeta_k of this party. `zetas`: the zeta of every party, this one included.
    """
    own_weight = zeta / (1 + zeta)
    return own_weight / sum(other / (1 + other) for other in zetas)


class Multiview(SumMethod):
    """The methods MMVFL and V-FedMV, which differ in their settings; see `Method`."""

    def __init__(self, settings: type[MultiviewSettings]) -> None:
        """Take the method's settings class, which distinguishes MMVFL and V-FedMV."""
        self.settings = settings

    def offer_terms(self, party: PartyContext) -> RepresentationBounds | None:
        """Return, at the active, the bounds on a row of pseudo-labels; None at a passive."""
        if party.name != party.active:
            return None
        party.require_passives()
        return bound_label_rows(party, len(party.data.classes))

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the terms: the active's bounds for all passives, and the weight of each.

        `proposed_terms`: mapping from party name to the bounds that its `offer_terms` returned;
        only the active offers any. `session`: name of this session, the same at all parties. Raises
        ConfigError: settings for a party that does not exist or has no labels.
        """
        offered = proposed_terms[party.active]
        party.require_terms(
            party.active, offered, bound_label_rows(party, math.prod(offered.shape))
        )
        settings = OneViewSettings.from_run_settings(party.config)
        settings.check_parties(party.config, (party.active, *party.passives))
        weights = {name: party.config.find_passive_settings(name).weight for name in party.passives}
        return make_terms(party, session, dict.fromkeys(party.passives, offered), weights)

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role, with random orthonormal common pseudo-labels Z.

        Source: MMVFL, Algorithm 1, line 1. `rows`: the row of its table at each of the N alignment
        positions.
        """
        classes = len(party.data.classes)
        train = party.find_positions(rows, party.data.train_rows)
        common_NC = np.zeros((len(rows), classes))
        rng = np.random.default_rng(derive_seed(party.config.seed, "common pseudo-labels"))
        # Only training rows have pseudo-labels; those of other rows stay 0.
        common_NC[train.numpy()] = draw_orthonormal(len(train), classes, rng)
        sequence = _make_sequence_view(party, rows, classes)
        view = _make_view(party, contract, rows, classes, sequence)
        label_term = make_label_term(party, rows)
        zetas = _list_zetas(party, contract)
        trainer = ActiveTrainer(view, zetas, label_term, common_NC=common_NC, sequence=sequence)
        return MultiviewActive(
            party,
            contract,
            rows,
            trainer,
            SessionSum.from_contract(party, contract).make_active_sum(),
        )

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role with a view of its own, and its labels if it has any.

        `rows`: the row of its table at each of the N alignment positions.
        """
        (classes,) = contract.passives[party.name].representation.shape
        has_labels = party.data.table.labels is not None
        label_term = make_label_term(party, rows) if has_labels else None
        sequence = _make_sequence_view(party, rows, classes)
        view = _make_view(party, contract, rows, classes, sequence)
        zetas = _list_zetas(party, contract)
        session_sum = SessionSum.from_contract(party, contract)
        # The joint prediction after training needs one answer beyond those of the epochs.
        passive_sum = session_sum.make_passive_sum(person_count=len(rows), extra_answers=1)
        trainer = ViewTrainer(view, zetas, label_term, sequence=sequence)
        return MultiviewPassive(passive_sum, trainer, clip=session_sum.clip)


def _make_sequence_view(party: PartyContext, rows: Tensor, classes: int) -> SequenceView | None:
    """Return the untrained GRU view of one party's sequences; None: its view is its columns.

    `rows`: the row of its table at each of the N alignment positions. `classes`: number of classes.
    Raises ConfigError: the party has more than one sequence; ModelError: the GRU does not fit its
    table.
    """
    config = party.config
    table = party.data.table
    model = config.model if party.name == party.active else _select_passive_model(party)
    if model.network != "gru":
        return None
    settings = VFedMvSettings.from_run_settings(config)
    if len(model.sequences) > 1:
        raise ConfigError(
            f"{_locate_model_setting(party)}.sequences: in method {settings.name} every party has "
            f"one view, got {len(model.sequences)} for {party.name}; name only the sequence of "
            f"{party.name} here, and those of passives in passives.X.model"
        )
    holds_labels = table.labels is not None
    labels_N = select_learnt_labels(party) if holds_labels else None
    try:
        recurrent = SequenceViews.make_untrained(
            party.name,
            model,
            features_N=table.features,
            labels_N=labels_N,
            classes=classes,
            training=settings.make_training(settings.local_epochs),
            compute=Compute.from_settings(config.train),
            seed=party.secrets.seed,
        )
    except ModelError as error:
        raise ModelError(f"{party.name}, by {_locate_model_setting(party)}: {error}") from error
    return SequenceView(
        recurrent, table.features, rows, rounds=settings.rounds, holds_labels=holds_labels
    )


def _select_passive_model(party: PartyContext) -> ModelSettings:
    """Return a passive's network settings.

    Without settings of its own, they are the run's; its table then says which sequences it has.
    """
    model = party.config.find_model_settings(party.name)
    views = party.data.views.values()
    table_sequences = [view.sequence for view in views if view.sequence is not None]
    has_own_settings = party.config.find_passive_settings(party.name).model is not None
    if has_own_settings or not table_sequences:
        return model
    return model.model_copy(update={"sequences": tuple(table_sequences)})


def _locate_model_setting(party: PartyContext) -> str:
    """Return the key of a party's network settings, for errors."""
    return "model" if party.name == party.active else f"passives.{party.name}.model"


def select_learnt_labels(party: PartyContext) -> Tensor:
    """Return a label for each row of a party's table; `UNLABELLED` where training may not use it.

    Training may use the labels of `party.data.labelled_rows` only.
    """
    labels_N = party.data.table.labels
    assert labels_N is not None
    known_N = torch.full_like(labels_N, UNLABELLED)
    known_N[party.data.labelled_rows] = labels_N[party.data.labelled_rows]
    return known_N


def _make_view(
    party: PartyContext,
    contract: Contract,
    rows: Tensor,
    classes: int,
    sequence: SequenceView | None,
) -> ViewModel:
    """Return one party's untrained view of the aligned people, with the agreed zeta_k.

    `rows`: the row of its table at each of the N alignment positions. `classes`: number of classes.
    `sequence`: the GRU that computes the view's features; None: they are the party's columns.
    """
    settings = MultiviewSettings.from_run_settings(party.config).for_party(party.name)
    weight = 1.0 if party.name == party.active else contract.passives[party.name].weight
    columns_NF = party.data.table.features[rows].flatten(1).double().numpy()
    view = ViewModel.from_features(
        columns_NF if sequence is None else sequence.compute_states(),
        classes,
        np.random.default_rng(derive_seed(party.secrets.seed, party.name, "view")),
        beta=settings.beta,
        zeta=settings.zeta * weight,
        tolerance=settings.tolerance,
        max_rounds=settings.max_rounds,
    )
    # The alignment's order is random, and the start must not depend on it. So the random start is
    # assigned in the order of the table's rows.
    start_NC = view.labels_NC.copy()
    view.labels_NC[rows.argsort().numpy()] = start_NC
    return view


def _list_zetas(party: PartyContext, contract: Contract) -> list[float]:
    """Return zeta_k of every party, the active's first.

    zeta_k is the setting `zeta` times the party's weight in the contract (1 for the active). The
    same zeta_k enters a party's own update (MMVFL, Eq. 12) and the average Z.
    """
    settings = MultiviewSettings.from_run_settings(party.config)
    weights = {party.active: 1.0} | {
        name: passive.weight for name, passive in contract.passives.items()
    }
    return [settings.for_party(name).zeta * weight for name, weight in weights.items()]


def make_label_term(party: PartyContext, rows: Tensor) -> LabelTerm:
    """Return the term of the objective for the labels that a party may learn from.

    `rows`: rows of its table, (B,), one for each row of the term. A row whose label training may
    not use gets the weight eta = 0.
    """
    settings = MultiviewSettings.from_run_settings(party.config).for_party(party.name)
    labels_N = party.data.table.labels
    assert labels_N is not None
    labels_B = labels_N[rows]
    is_learnt_B = torch.isin(rows, party.data.labelled_rows) & (labels_B != UNLABELLED)
    is_learnt_B1 = is_learnt_B.double().unsqueeze(1)
    truth_BC = F.one_hot(labels_B.clamp(min=0), len(party.data.classes)).double() * is_learnt_B1
    eta_B1 = settings.eta * is_learnt_B1
    return LabelTerm(truth_BC.numpy(), eta_B1.numpy(), settings.has_labels_on_own_view)


def bound_label_rows(party: PartyContext, classes: int) -> RepresentationBounds:
    """Return the contract's bounds on a sent row of `classes` pseudo-labels, as float64."""
    return party.bound_sent_rows((classes,)).model_copy(update={"dtype": "float64"})


def make_terms(
    party: PartyContext,
    session: str,
    bounds_by_passive: Mapping[str, RepresentationBounds],
    weight_by_passive: Mapping[str, float],
) -> SessionTerms:
    """Return the contract's terms: bounds and weight of each passive, and the parameters of their
    sum.

    `session`: name of this session, the same at all parties. `bounds_by_passive`: mapping from
    passive name to the bounds on a row that it receives or sends. `weight_by_passive`: mapping from
    passive name to the factor of its contribution.
    """
    return SessionTerms.from_bounds(
        {name: bounds_by_passive[name] for name in party.passives},
        weight_by_passive=weight_by_passive,
        secure_sum=party.describe_sum(session, bounds_by_passive[party.passives[0]].shape),
    )
