"""MMVFL and V-FedMV: each party has a view of common people, and all agree on pseudo-labels.

All forms (FedMV's other two stand in `secure_apfed.methods.averaging`) minimise over W_k, Z_k and Z

    sum over k of |X_k W_k - Z_k|^2 + beta |W_k|_21 + zeta_k |Z_k - Z|^2,   plus eta times
    |Z_1 - Y|^2 (MMVFL, Eq. 4) or |Z - Y|^2 (FedMV, Eq. 1; there once in each summand, while
    its Eq. 10 is the minimiser of it taken once: we take it once).

|W|_21 is the sum of the Euclidean norms of W's rows, one a feature. A step is one iteration of
MMVFL's Algorithm 1 or FedMV's Algorithm 2 in three scripts. `MultiviewActive.train_step`: the
active sends the common pseudo-labels Z, updates its own weights W_1 and pseudo-labels Z_1
meanwhile, and makes Z the mean of all Z_k, weighted by zeta_k. `MultiviewPassive.answer_message`: a
passive updates its own, and contributes zeta_k Z_k. There is no server as in the papers: the
aggregator adds what it cannot read (`secure_apfed.methods.sum_end`), and the active averages. Ours:
under `rules.silent_passive: recover` the mean is of those who answered, where MMVFL's rounds wait
for the slowest (section 5.2).

Under V-FedMV a party's view may be sequences (`model.network: gru`), of which a GRU of its own
makes X_k (FedMV, section 6). There all parties have the labels to train it by, and do so first.
Here the active's learns from labels, a passive's from what the active sends anyway: by the
cross-entropy to Z, negative numbers as 0, which is the paper's where Z is Y (`SequenceView`). So
nothing else goes round. GRUs learn in the steps 1 to `rounds`, since the first Z is random.

The active emits Z, which tends to the labels; a passive its part of a secure sum without noise, and
of test rows, of which nobody learns, its part of what all predict together (FedMV, Eqs. 12 and 13).
The labels, which FedMV gives all parties, stay with the active; a row without one is drawn by its
pseudo-labels alone. Every party can predict by its own X_k W_k afterwards.

Letters: N aligned people, B of them in a step, F features of a view, C classes.
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
from secure_apfed.contract import Contract, RepresentationTerms
from secure_apfed.data import UNLABELLED
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.learning.descent import ActiveNetworks, Compute, add_prefix, remove_prefix
from secure_apfed.learning.recurrent import RecurrentTraining, SequenceViews
from secure_apfed.learning.release import check_norms, check_rows
from secure_apfed.measures.table import Scored, score_model
from secure_apfed.methods.alignment import positions_of
from secure_apfed.methods.method import ActiveRole, HelperRole, SessionTerms
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.sum_end import (
    ActiveSum,
    Admitted,
    PassiveSum,
    SessionSum,
    SumHelper,
    SumLearner,
    SumMethod,
)
from secure_apfed.networks.models import encoder_and_head
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.protection import NOBODY
from secure_apfed.settings.run import RunSettings
from secure_apfed.settings.training import ModelSettings

Floats = NDArray[np.float64]

_Weight: TypeAlias = Literal["beta", "zeta", "eta"]
_MIN_NORM = 1e-10
"""Epsilon of Eq. (7): of the norm of a feature's row, so that its weight stays finite."""
_TOLERANCE = 1e-12
_MAX_ROUNDS = 10_000
_RECURRENT = "recurrent"


class MultiviewSettings(MethodSettings):
    """The weights of the terms of the objective; the defaults are those of the method's paper.

    Attributes:
        beta: the weight of the l2,1 norm of a view's parameters.
        zeta: how strongly a view's pseudo-labels are pulled to the common ones; a passive's
            `weight` multiplies it.
        eta: the weight of the labels on the pseudo-labels that they are tied to.
        tolerance: of the objective, relative, below which updates that repeat until they converge
            end; max_rounds: of them, at most. Neither is a setting.
        networks: the values of `model.network` that views may use.
        draws_own: whether the labels act on the pseudo-labels of the party that has them, or on the
            common ones.
    """

    beta: Annotated[float, NOBODY] = Field(ge=0)
    zeta: Annotated[float, NOBODY] = Field(gt=0)
    eta: Annotated[float, NOBODY] = Field(gt=0)

    predicts_alone = True
    networks: ClassVar[tuple[str, ...]] = ("identity",)
    tolerance: ClassVar[float] = 1e-6
    max_rounds: ClassVar[int] = 100
    draws_own: ClassVar[bool] = False

    def for_party(self, name: str) -> Self:
        """Return the settings with this party's own beta_k, zeta_k and eta (MMVFL, Eq. 4)."""
        return self

    def check_run(self, config: RunSettings) -> None:
        """Refuse a guard, whose noise would not cover pseudo-labels, and networks other than
        `networks`.
        """
        if config.guard.mechanism != "none":
            raise ValueError(
                f"guard.mechanism: method {self.name} sends no representation, and one person "
                f"moves all {self.averages} of a party, so that no noise of a guard covers it; say "
                "none"
            )
        for place, model in self.models_in(config).items():
            if model.network not in self.networks:
                raise ValueError(
                    f"{place}.network: method {self.name} takes {' or '.join(self.networks)}, got "
                    f"{model.network}"
                )

    def models_in(self, config: RunSettings) -> dict[str, ModelSettings]:
        """Return the networks that read the parties' views, by the settings key that configures
        them.
        """
        return {"model": config.model}


class OneViewSettings(MultiviewSettings):
    """Every party has one view; see `MultiviewSettings`.

    Attributes:
        parties: other values of beta, zeta or, for parties with labels, eta, by party (the active
            too). They are above 0. All parties sign them, since Z is weighted by every zeta.
    """

    parties: Annotated[dict[PartyName, dict[_Weight, Annotated[float, Field(gt=0)]]], NOBODY] = {}

    averages = "pseudo-labels"

    def linear_numbers(self, config: RunSettings, classes: int) -> float:
        """Return how many linear combinations of a person's features the active reads in all
        rounds.

        Each round uses other weights; they are about pseudo-labels that the active sent itself.
        """
        return classes * config.train.epochs

    def models_in(self, config: RunSettings) -> dict[str, ModelSettings]:
        """Return the run's network and those of passives, by the settings key that
        configures them.
        """
        passive_models = {
            f"passives.{name}.model": passive.model
            for name, passive in config.passives.items()
            if passive.model is not None
        }
        return super().models_in(config) | passive_models

    def for_party(self, name: str) -> Self:
        """Return a copy with the weights of the objective set for this party."""
        return self.model_copy(
            update={str(key): value for key, value in self.parties.get(name, {}).items()}
        )

    def check_parties(self, config: RunSettings, names: Sequence[str]) -> None:
        """Refuse weights of unknown parties, or that no term of the objective uses.

        Raises ConfigError: names the key.
        """
        for name, overrides in self.parties.items():
            if name not in names:
                raise ConfigError(
                    f"method.parties.{name}: no party has that name; there are {', '.join(names)}"
                )
            if "eta" in overrides and not config.data.holds_labels(name):
                raise ConfigError(
                    f"method.parties.{name}.eta: {name} holds no labels to be drawn to; leave it "
                    "out, or name the party in data.labels_at where the method takes that"
                )


class MmvflSettings(OneViewSettings):
    """The settings of MMVFL: the labels act on the active's own pseudo-labels; see
    `OneViewSettings`.
    """

    name: Literal["mmvfl"]
    beta: Annotated[float, NOBODY] = Field(1.0, ge=0)
    zeta: Annotated[float, NOBODY] = Field(1000.0, gt=0)
    eta: Annotated[float, NOBODY] = Field(1000.0, gt=0)

    title = "MMVFL"
    takes_labels_of_passives = True
    draws_own = True


class FedMvSettings(MultiviewSettings):
    """The settings of FedMV in its three forms: the labels draw the common pseudo-labels."""

    beta: Annotated[float, NOBODY] = Field(4.0, ge=0)
    zeta: Annotated[float, NOBODY] = Field(8.0, gt=0)
    eta: Annotated[float, NOBODY] = Field(8.0, gt=0)


class RecurrentSettings(FedMvSettings):
    """The settings of views that may be sequences, of which GRUs make views (`model.network: gru`).

    Attributes:
        rounds: the number of rounds in which GRUs learn: after the first step (v_fedmv), averaged
            after each (s_fedmv), or before the first step, without exchange (h_fedmv).
        local_epochs: epochs of each party's GRUs in a round.
        learning_rate: the learning rate of GRUs, by RMSProp; FedMV tries 0.001 and 0.005.
        dropout: dropout of the GRUs' last states in training; FedMV tries 0.1 and 0.3.
    """

    rounds: Annotated[int, NOBODY] = Field(20, ge=1)
    local_epochs: Annotated[int, NOBODY] = Field(1, ge=1)
    learning_rate: Annotated[float, NOBODY] = Field(5e-3, gt=0)
    dropout: Annotated[float, NOBODY] = Field(0.1, ge=0, lt=1)

    networks: ClassVar[tuple[str, ...]] = ("identity", "gru")

    def check_run(self, config: RunSettings) -> None:
        """Refuse settings of GRUs where no view is read by a GRU."""
        super().check_run(config)
        if any(model.network == "gru" for model in self.models_in(config).values()):
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
        """Return the settings scaled to a rehearsal: GRUs learn in the same share of its rounds."""
        rounds = max(1, round(steps * self.rounds / epochs))
        return self.model_copy(update={"rounds": rounds})


class VFedMvSettings(RecurrentSettings, OneViewSettings):
    """The settings of V-FedMV; see `OneViewSettings` and `RecurrentSettings`."""

    name: Literal["v_fedmv"]

    title = "V-FedMV"


class ViewsActive(SumLearner):
    """An active that predicts alone by one linear layer over its views; see `ActiveRole`."""

    def __init__(self, party: PartyContext, contract: Contract, sum_end: ActiveSum) -> None:
        """Build the active's encoder and linear layer, which hold the views' weights when it
        predicts.
        """
        super().__init__()
        self.read_from(sum_end)
        self.name = party.name
        self.contract = contract
        self._own = party
        table = party.data.table
        compute = Compute.from_settings(party.config.train)
        with seed_draws(party.secrets.seed, party.name, "networks"):
            parts = encoder_and_head(party.config.model, table.shape, len(party.data.classes))
        self._networks = ActiveNetworks(*parts).to(compute.device, compute.dtype)
        assert table.labels is not None
        self._features_N = compute.move_tensor(table.features)
        self._labels_N = table.labels

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """The weights of the linear layer over its views, (C, F)."""

    def get_solo_networks(self) -> ActiveNetworks:
        """Return the encoder of the views and a linear layer with the weights `head`."""
        assert isinstance(self._networks.head, nn.Linear)
        with torch.no_grad():
            self._networks.head.weight.copy_(self.head)
        return self._networks

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return the local scores of the test rows.

        `next_step`: step numbers from it on are unused. `is_final`: whether training is over.
        """
        networks = self.get_solo_networks().eval()
        features_N = self._features_N
        labels_N = self._labels_N.to(features_N.device)
        scored = score_model(
            lambda rows_B: networks(features_N[rows_B], None)[0], self._own.data.test_rows, labels_N
        )
        return {self._own.config.method.name: scored}


class MultiviewActive(ViewsActive):
    """The active of multi-view learning: has the labels, the common pseudo-labels Z, and its own
    view; see `ActiveRole`. `rows`: rows of its table by alignment position, (N,).
    """

    guarantee = "no guarantee: sums of pseudo-labels are opened without noise"

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        rows: Tensor,
        trainer: "ActiveTrainer",
        sum_end: ActiveSum,
    ) -> None:
        """Make the active's role in multi-view learning; find positions of training and test
        rows.
        """
        super().__init__(party, contract, sum_end)
        self.trainer = trainer
        self._rows = rows
        self.checkpoint_parts = {"": trainer}
        self.smallest_batch = party.config.rules.minimum_batch
        self.training_rows = positions_of(rows, party.data.train_rows)
        self.tested = positions_of(rows, party.data.test_rows)

    async def train_step(self, links: Links, step: int, rows_B: Tensor) -> float:
        """Send Z, update the own view meanwhile, and average the parties' Z_k (Alg. 1; FedMV, Alg.
        2).

        Returns the active's part of the objective. Raises ModelError: a view that cannot be learnt
        from; RemoteProtocolError: the sum answers another request; Z stays unchanged then.
        """
        payload = self.send_request(links, step, rows_B, self.trainer.common_NC[rows_B.numpy()])
        self.trainer.update_view(step, rows_B)
        opened_BC = await self._receive_sum(links, step, rows_B, payload)
        return self.trainer.average_labels(rows_B, opened_BC, self._list_absent())

    def send_request(self, links: Links, step: int, rows_B: Tensor, common_BC: Floats) -> bytes:
        """Send every passive these positions and their Z to learn from; an empty Z requests
        predictions.

        Returns the payload, to which the sum is bound.

        `common_BC`: Z of these rows.
        """
        payload = pack_tensors({"rows": rows_B, "z": torch.from_numpy(common_BC)}, {})
        self.sum.send_request(links, Kind.REQUEST, step, payload)
        return payload

    def _list_absent(self) -> list[int]:
        """Return the indices in `zetas` of passives that the last sum lacks; index
        0 is the active.
        """
        named = enumerate(self.contract.passives, 1)
        present = self.sum.receiver.counted
        return [index for index, name in named if name not in present]

    async def _receive_sum(self, links: Links, step: int, rows_B: Tensor, payload: bytes) -> Floats:
        """Return the decoded sum of the passives' zeta_k Z_k of these rows, (B, C)."""
        classes = self.trainer.common_NC.shape[1]
        return np.asarray(
            (await self.sum.receive_sum(links, step, rows_B, payload, classes)).numpy()
        )

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return the local scores; after training also the joint scores of all parties.

        `next_step`: step numbers from it on are unused. `is_final`: whether training is over.
        """
        scores = await super().evaluate(links, next_step=next_step, is_final=is_final)
        if is_final:
            scores |= {
                f"{name}_together": await self._score_jointly(links, next_step) for name in scores
            }
        return scores

    async def _score_jointly(self, links: Links, step: int) -> Scored:
        """Return the joint scores of the aligned test rows; empty if they are fewer than a batch
        may be.
        """
        rows_B = self.tested
        none_BC = self.trainer.common_NC[:0]
        truth_B = self._labels_N[self._rows[rows_B]]
        if len(rows_B) < self.smallest_batch:
            return Scored.from_network_outputs(truth_B[:0], none_BC)
        opened_BC = await self._receive_sum(
            links, step, rows_B, self.send_request(links, step, rows_B, none_BC)
        )
        joint_BC = self.trainer.predict_jointly(rows_B, opened_BC, self._list_absent())
        return Scored.from_network_outputs(truth_B, joint_BC)

    def get_solo_networks(self) -> ActiveNetworks:
        """Return the active's networks, with the trained GRU as their encoder if the view is a
        sequence.
        """
        if self.trainer.sequence is not None:
            state = self.trainer.sequence.recurrent.encoder.state_dict()
            self._networks.encoder.load_state_dict(state)
        return super().get_solo_networks()

    @property
    def head(self) -> Tensor:
        return torch.from_numpy(self.trainer.view.weights_FC.T)

    def feature_scores(self) -> Tensor | None:
        return self.trainer.feature_scores()


class MultiviewPassive(SumHelper):
    """A passive of multi-view learning: has a view, and possibly labels; see `HelperRole`.
    `sum_end`: its end of the secure sum; clip: the largest norm of a row that it may contribute,
    None: any.
    """

    asks = (Kind.REQUEST,)

    def __init__(self, sum_end: PassiveSum, trainer: "ViewTrainer", *, clip: float | None) -> None:
        super().__init__(sum_end, {"": trainer})
        self.trainer = trainer
        self._clip = clip

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Update the own view towards Z, or predict with it; contribute the result (FedMV, Alg. 2).

        Raises RemoteProtocolError: the request breaks a rule; LocalProtocolError: a row exceeds the
        norm that the sum carries.
        """
        admitted, common_BC = self.admit_positions(message)
        values_BC = self.trainer.compute_share(admitted.step, admitted.rows, common_BC)
        check_clip(values_BC, self._clip, me=self.name)
        await self.sum.send_answer(links, admitted, values_BC)

    def feature_scores(self) -> Tensor | None:
        return self.trainer.feature_scores()

    def admit_positions(self, message: Envelope) -> tuple[Admitted, Floats | None]:
        """Admit a request; return it with Z of its rows (B, C), or None if it asks for a
        prediction.

        Raises RemoteProtocolError: the message is malformed or breaks a rule of the contract.
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
        people = len(self.trainer.view.x_NF)
        minimum = self.contract.minimum_batch
        check_rows(rows_B, aligned=people, minimum=minimum, sender=sender)
        return self.sum.admit_request(message, rows_B), z_BC.numpy() if len(z_BC) else None


def check_clip(values_BC: Floats, clip: float | None, *, me: str) -> None:
    """Refuse rows longer than the clip bound: the average of clipped pseudo-labels would be wrong.

    `values_BC`: pseudo-labels.

    Raises LocalProtocolError: names the norm of the longest row.
    """
    longest = float(np.linalg.norm(values_BC, axis=1).max(initial=0.0))
    if clip is not None and longest > clip:
        raise LocalProtocolError(
            f"{me}: a row of its contribution is {longest:.3g} long, and secure_sum.clip cuts rows "
            f"to {clip:g}; agree on a clip above {longest:.3g} at all parties"
        )


class ViewTrainer:
    """A party's view, and its contribution to the weighted mean of all views. `view`: its own;
    zetas: of all parties, the active's first. `label_term`: the effect of its labels; None: it has
        none.
    `sequence`: the GRU that makes the view; None: the view is the features.
    """

    def __init__(
        self,
        view: "ViewModel",
        zetas: Sequence[float],
        label_term: "Pull | None" = None,
        *,
        sequence: "SequenceView | None" = None,
    ) -> None:
        self.view = view
        self.zetas = zetas
        self.label_term = label_term
        self.sequence = sequence

    def compute_share(self, step: int, rows_B: Tensor, common_BC: Floats | None) -> Floats:
        """Update the view towards Z of these rows and return zeta_k Z_k by the sum of all zetas,
        (B, C).

        Without Z (None): return the view's share of the joint prediction, and learn nothing.

        `common_BC`: Z of these rows; None: a request for a prediction.
        """
        rows = rows_B.numpy()
        zeta = self.view.zeta
        if common_BC is None:
            return joint_share(zeta, self.zetas) * self.view.compute_scores(rows)
        if self.sequence is not None and self.sequence.learns_in(step):
            self.sequence.train_on_rows(step, rows_B, common_BC)
            self.view.replace_features(self.sequence.compute_states())
        pull = self.label_term and self.label_term.pick_rows(rows, own=True)
        return zeta / sum(self.zetas) * self.view.update_model(rows, common_BC, pull)

    def feature_scores(self) -> Tensor | None:
        """Return the importance of each feature, (F,); None if the features are states of a GRU."""
        if self.sequence is not None:
            return None
        return torch.from_numpy(row_norms(self.view.weights_FC))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state; pseudo-labels, whose rows are alignment positions,
        under their own key.
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

    def __init__(
        self,
        view: "ViewModel",
        zetas: Sequence[float],
        label_term: "Pull",
        *,
        common_NC: Floats,
        sequence: "SequenceView | None" = None,
    ) -> None:
        """Make the trainer of the active's view, with the common pseudo-labels Z of all rows,
        `common_NC`.

        `zetas`: zeta_k of all parties.
        """
        super().__init__(view, zetas, label_term, sequence=sequence)
        self.pull: Pull = label_term
        self.common_NC = common_NC

    def update_view(self, step: int, rows_B: Tensor) -> None:
        self.compute_share(step, rows_B, self.common_NC[rows_B.numpy()])

    def average_labels(
        self, rows_B: Tensor, opened_BC: Floats, absent: Sequence[int] = ()
    ) -> float:
        """Set Z of these rows to the mean of all Z_k; return the active's part of the objective.

        `opened_BC`: the decoded sum over the passives of zeta_k Z_k / sum of all zetas. `absent`:
        indices in `zetas` of passives it lacks; Z is then the mean over the others (Eq. 14).
        """
        rows = rows_B.numpy()
        zetas = sum(self.zetas)
        summed_BC = zetas * opened_BC + self.view.zeta * self.view.labels_NC[rows]
        present = sum(zeta for index, zeta in enumerate(self.zetas) if index not in absent)
        common_BC = common_labels(summed_BC, present, self.pull.pick_rows(rows, own=False))
        self.common_NC[rows] = common_BC
        return self.view.compute_loss(rows, common_BC)

    def predict_jointly(
        self, rows_B: Tensor, opened_BC: Floats, absent: Sequence[int] = ()
    ) -> Floats:
        """Return Z of rows outside training: the joint prediction, FedMV's Eqs. (12) and (13).

        It is over the parties that are not absent.

        `opened_BC`: the decrypted sum of the passives' shares.
        """
        missing_share = sum(joint_share(self.zetas[index], self.zetas) for index in absent)
        own_BC = joint_share(self.view.zeta, self.zetas) * self.view.compute_scores(rows_B.numpy())
        return np.asarray((opened_BC + own_BC) / (1 - missing_share))

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"pseudo_labels.common": torch.from_numpy(self.common_NC)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        self.common_NC = tensors["pseudo_labels.common"].numpy().copy()


class SequenceView:
    """A party's view X_k of its sequences, made by a GRU that learns in some of the steps.

    Args:
        recurrent: the GRU; rounds: steps in which it learns, from the second on.
        features_N: all rows of the party's table, flat; rows_N: of these, the aligned people's.
        holds_labels: whether its owner learns from labels of its own, and not from Z.
    """

    def __init__(
        self,
        recurrent: SequenceViews,
        features_N: Tensor,
        rows_N: Tensor,
        *,
        rounds: int,
        holds_labels: bool,
    ) -> None:
        """Make a view of sequences: its GRU and the aligned rows of the table.

        `features_N`: rows of its table. `rounds`: how many rounds of training there are.
        `holds_labels`: whether its owner has the labels.
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
        """Train the GRU on these alignment positions, on its owner's labels or
        otherwise towards Z.

        `common_BC`: Z of these rows.
        """
        if not self._holds_labels:
            # In the table's order: that of the alignment is random.
            order_B = self._rows_N[rows_B].argsort()
            shares_BC = torch.from_numpy(common_BC).clamp(min=0)
            features_B = self._features_N[self._rows_N[rows_B][order_B]]
            self.recurrent.learn_from(features_B, shares_BC[order_B])
        self.recurrent.train(step)

    def compute_states(self) -> Floats:
        """Return X_k of all aligned people, (N, 2 D)."""
        (states_ND,) = self.recurrent.compute_states(self._features_N[self._rows_N])
        return np.asarray(states_ND.double().cpu().numpy())


@dataclass(frozen=True, eq=False)
class Pull:
    """The term that draws pseudo-labels towards the labels.

    Attributes:
        truth_NC: Y, one-hot; zeros where a row has no label to learn from.
        eta_N1: its weight by row; 0 for rows without a label.
        own: whether it acts on the pseudo-labels of the one view with the labels (MMVFL), or on the
            common ones.
    """

    truth_NC: Floats = field(repr=False)  # noqa: N815
    eta_N1: Floats = field(repr=False)  # noqa: N815
    own: bool = False

    def pick_rows(self, rows_B: NDArray[np.int64], *, own: bool) -> "Pull | None":
        """Return the pull of the labels for these rows; None: labels pull the other kind of
        pseudo-labels.

        `own`: whether it is asked for a view's own pseudo-labels Z_k, rather than for the common Z.
        """
        if own is not self.own:
            return None
        return Pull(self.truth_NC[rows_B], self.eta_N1[rows_B], own)


@dataclass(eq=False)
class ViewModel:
    """A party's view of the aligned people: its weights and pseudo-labels, and their updates.

    Attributes:
        x_NF: its features, float64.
        beta, zeta: of the objective.
        weights_FC: W_k; labels_NC: Z_k.
        tolerance, max_rounds: see `weights_of`.
    """

    x_NF: Floats = field(repr=False)  # noqa: N815
    beta: float
    zeta: float
    weights_FC: Floats = field(repr=False)  # noqa: N815
    labels_NC: Floats = field(repr=False)  # noqa: N815
    tolerance: float = _TOLERANCE
    max_rounds: int = _MAX_ROUNDS
    _gram: tuple[bytes, Floats] | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_features(
        cls, x_NF: Floats, classes: int, rng: np.random.Generator, **settings: float
    ) -> "ViewModel":
        """Return a view with random weights and pseudo-labels (Algorithm 1, line 1)."""
        rows, features = x_NF.shape
        weights_FC = rng.standard_normal((features, classes))
        labels_NC = draw_orthonormal(rows, classes, rng)
        return cls(x_NF=x_NF, weights_FC=weights_FC, labels_NC=labels_NC, **settings)  # type: ignore[arg-type]

    def replace_features(self, x_NF: Floats) -> None:
        """Replace the features X_k of the same rows, after the GRU that computes
        them was trained.
        """
        self.x_NF = x_NF
        self._gram = None

    def update_model(
        self, rows_B: NDArray[np.int64], common_BC: Floats, label_term: Pull | None = None
    ) -> Floats:
        """Update W_k, then Z_k of these rows; return the latter (Algorithm 1, lines 4 to 12)."""
        self.fit_weights(rows_B)
        return self.update_labels(rows_B, common_BC, label_term)

    def fit_weights(self, rows_B: NDArray[np.int64]) -> None:
        """Update W_k: Eq. (5) of these rows."""
        x_BF = self.x_NF[rows_B]
        rows = np.sort(rows_B).tobytes()
        if self._gram is None or self._gram[0] != rows:
            self._gram = rows, x_BF.T @ x_BF
        self.weights_FC = weights_of(
            x_BF,
            self.labels_NC[rows_B],
            self.beta,
            self.weights_FC,
            tolerance=self.tolerance,
            max_rounds=self.max_rounds,
            gram_FF=self._gram[1],
        )

    def update_labels(
        self, rows_B: NDArray[np.int64], common_BC: Floats, label_term: Pull | None = None
    ) -> Floats:
        """Update Z_k of these rows, and return it."""
        labels_BC = own_labels(self.compute_scores(rows_B), common_BC, self.zeta, label_term)
        self.labels_NC[rows_B] = labels_BC
        return labels_BC

    def compute_scores(self, rows_B: NDArray[np.int64]) -> Floats:
        return np.asarray(self.x_NF[rows_B] @ self.weights_FC)

    def tensors(self) -> dict[str, Tensor]:
        """Return weights W_k and pseudo-labels Z_k."""
        return {
            "weights": torch.from_numpy(self.weights_FC),
            "labels": torch.from_numpy(self.labels_NC),
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.weights_FC = tensors["weights"].numpy().copy()
        self.labels_NC = tensors["labels"].numpy().copy()

    def compute_loss(self, rows_B: NDArray[np.int64], common_BC: Floats) -> float:
        """Return this view's part of the objective for these rows, a row."""
        labels_BC = self.labels_NC[rows_B]
        own_loss = view_objective(self.x_NF[rows_B], self.weights_FC, labels_BC, self.beta)
        return (own_loss + self.zeta * float(((labels_BC - common_BC) ** 2).sum())) / len(rows_B)


def own_labels(
    scores_NC: Floats, common_NC: Floats, zeta: float, label_term: Pull | None = None
) -> Floats:
    """Return a view's pseudo-labels Z_k, (N, C): MMVFL's Eqs. (11) and (12), FedMV's Eqs. (8) and
    (13).

    `label_term`: of the labels, if they pull this view's pseudo-labels; None: they do not.
    `scores_NC`: X_k W_k. `common_NC`: Z, the common pseudo-labels. `zeta`: zeta_k, the weight of Z.
    """
    return _apply_pull(scores_NC + zeta * common_NC, 1 + zeta, label_term)


def common_labels(summed_NC: Floats, zetas: float, label_term: Pull | None = None) -> Floats:
    """Return the common pseudo-labels Z, (N, C): MMVFL's Eq. (14), FedMV's Eqs. (10) and (12).

    `summed_NC`: sum of zeta_k Z_k over all parties, all that the active reads of them.
    `label_term`: of the labels, if they pull Z; None: they do not.
    """
    return _apply_pull(summed_NC, zetas, label_term)


def _apply_pull(total_NC: Floats, weight: float, label_term: Pull | None) -> Floats:
    """Return the weighted mean of summed pseudo-labels and labels; where no label pulls, of the
    former.

    `total_NC`: their sum over the views.
    """
    if label_term is None:
        return np.asarray(total_NC / weight)
    return np.asarray(
        (total_NC + label_term.eta_N1 * label_term.truth_NC) / (weight + label_term.eta_N1)
    )


def weights_of(
    x_NF: Floats,
    labels_NC: Floats,
    beta: float,
    weights_FC: Floats,
    *,
    tolerance: float = _TOLERANCE,
    max_rounds: int = _MAX_ROUNDS,
    gram_FF: Floats | None = None,
) -> Floats:
    """Minimise Eq. (5) by reweighting, Eqs. (7) and (8), from these weights on.

    Each round minimises a quadratic that lies above the objective and touches it at the last
    weights (|w| <= |w|^2 / 2a + a / 2), so that none raises it. A row that is 0 stays there. Rounds
    end below this relative tolerance of the objective. Raises ModelError: X^T X is singular and
    beta 0, or numbers are not finite.

    `labels_NC`: Z_k. `max_rounds`: reweightings at most. `gram_FF`: X^T X; None: computed here.
    """
    gram_FF = x_NF.T @ x_NF if gram_FF is None else gram_FF
    cross_FC = x_NF.T @ labels_NC
    loss = view_objective(x_NF, weights_FC, labels_NC, beta)
    for _ in range(max_rounds):
        ridge_F = beta / (2 * (row_norms(weights_FC) + _MIN_NORM))
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
        next_loss = view_objective(x_NF, weights_FC, labels_NC, beta)
        if loss - next_loss <= tolerance * max(loss, 1.0):
            break
        loss = next_loss
    return np.asarray(weights_FC)


def view_objective(x_NF: Floats, weights_FC: Floats, labels_NC: Floats, beta: float) -> float:
    """Return Eq. (5): |X W - Z|^2 + beta |W|_21."""
    residual_NC = x_NF @ weights_FC - labels_NC
    return float((residual_NC**2).sum() + beta * row_norms(weights_FC).sum())


def row_norms(weights_FC: Floats) -> Floats:
    """Return the Euclidean norm of each feature's weights: its importance (MMVFL, section 4.2)."""
    return np.asarray(np.linalg.norm(weights_FC, axis=1))


def draw_orthonormal(rows: int, classes: int, rng: np.random.Generator) -> Floats:
    """Return a random matrix with Z^T Z = I, (N, C); with Z Z^T = I for fewer rows than classes."""
    random_NC = rng.standard_normal((rows, classes))
    if rows < classes:
        return np.asarray(np.linalg.qr(random_NC.T)[0].T)
    return np.asarray(np.linalg.qr(random_NC)[0])


def run_iteration(views: Sequence[ViewModel], common_NC: Floats, label_term: Pull) -> Floats:
    """Run one iteration on all views (MMVFL, Algorithm 1; FedMV, Algorithms 1 and 2); return Z.

    `views`: of one table, updated in place; the first party's holds the labels. `common_NC`: Z, the
    common pseudo-labels.
    """
    rows = np.arange(len(common_NC))
    for index, view in enumerate(views):
        view.update_model(rows, common_NC, label_term if label_term.own and index == 0 else None)
    return average_views(views, None if label_term.own else label_term)


def average_views(views: Sequence[ViewModel], label_term: Pull | None) -> Floats:
    summed_NC = np.sum([view.zeta * view.labels_NC for view in views], axis=0)
    return common_labels(summed_NC, sum(view.zeta for view in views), label_term)


def compute_objective(views: Sequence[ViewModel], common_NC: Floats, label_term: Pull) -> float:
    """Return the objective that all views of a table minimise; see the head of this module."""
    rows = np.arange(len(common_NC))
    pulled_NC = views[0].labels_NC if label_term.own else common_NC
    pull_loss = float((label_term.eta_N1 * (pulled_NC - label_term.truth_NC) ** 2).sum())
    return len(rows) * sum(view.compute_loss(rows, common_NC) for view in views) + pull_loss


def joint_share(zeta: float, zetas: Collection[float]) -> float:
    """Return the weight of X_k W_k in the joint prediction: zeta_k / (1 + zeta_k), normalised to
    sum to 1.

    It follows from Eq. (13) put into Eq. (12), solved for Z.
    """
    return zeta / (1 + zeta) / sum(other / (1 + other) for other in zetas)


class Multiview(SumMethod):
    def __init__(self, settings: type[MultiviewSettings]) -> None:
        self.settings = settings

    def offer_terms(self, party: PartyContext) -> RepresentationTerms | None:
        """Return, at the active, the bounds on a row of pseudo-labels; None at a passive."""
        if party.name != party.active:
            return None
        party.require_passives()
        return label_terms(party, len(party.data.classes))

    def derive_terms(
        self, party: PartyContext, offers: Mapping[str, RepresentationTerms], session: str
    ) -> SessionTerms:
        """Return the terms: at all passives the active's bounds, with the zeta weights of each.

        `offers`: each passive's offered terms. `session`: the session's name.
        """
        offered = offers[party.active]
        party.require_terms(party.active, offered, label_terms(party, math.prod(offered.shape)))
        settings = OneViewSettings.from_run_settings(party.config)
        settings.check_parties(party.config, (party.active, *party.passives))
        weights = {name: party.config.settings_of(name).weight for name in party.passives}
        return make_terms(party, session, dict.fromkeys(party.passives, offered), weights)

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role, with random orthonormal common pseudo-labels (Algorithm 1, line
        1).
        """
        classes = len(party.data.classes)
        train = positions_of(rows, party.data.train_rows)
        common_NC = np.zeros((len(rows), classes))
        rng = np.random.default_rng(derive_seed(party.config.seed, "common pseudo-labels"))
        common_NC[train.numpy()] = draw_orthonormal(len(train), classes, rng)
        sequence = _make_sequence_view(party, rows, classes)
        view = _make_view(party, contract, rows, classes, sequence)
        pull = pull_of(party, rows)
        zetas = _list_zetas(party, contract)
        trainer = ActiveTrainer(view, zetas, pull, common_NC=common_NC, sequence=sequence)
        return MultiviewActive(
            party,
            contract,
            rows,
            trainer,
            SessionSum.from_contract(party, contract).make_active_end(),
        )

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role with a view of its own, and the pull of its
        labels if it has any.
        """
        (classes,) = contract.passives[party.name].representation.shape
        pull = None if party.data.table.labels is None else pull_of(party, rows)
        sequence = _make_sequence_view(party, rows, classes)
        view = _make_view(party, contract, rows, classes, sequence)
        zetas = _list_zetas(party, contract)
        agreed = SessionSum.from_contract(party, contract)
        sum_end = agreed.make_passive_end(people=len(rows), extra_answers=1)
        trainer = ViewTrainer(view, zetas, pull, sequence=sequence)
        return MultiviewPassive(sum_end, trainer, clip=agreed.clip)


def _make_sequence_view(party: PartyContext, rows: Tensor, classes: int) -> SequenceView | None:
    """Return the untrained GRU view of one party's sequences; None: its view is its features."""
    config = party.config
    table = party.data.table
    model = config.model if party.name == party.active else _select_passive_model(party)
    if model.network != "gru":
        return None
    settings = VFedMvSettings.from_run_settings(config)
    if len(model.sequences) > 1:
        raise ConfigError(
            f"{_locate_model_setting(party)}.sequences: in method {settings.name} every party has "
            f"one view, got {len(model.sequences)} for {party.name}; name that of {party.name} "
            "alone, and "
            "those of passives in passives.X.model"
        )
    holds_labels = table.labels is not None
    labels_N = own_labels_of(party) if holds_labels else None
    try:
        recurrent = SequenceViews.begin(
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
    """Return a passive's network settings; without its own, those of the sequences in its view."""
    model = party.config.model_of(party.name)
    laid_out = [view.sequence for view in party.data.views.values() if view.sequence is not None]
    if party.config.settings_of(party.name).model is not None or not laid_out:
        return model
    return model.model_copy(update={"sequences": tuple(laid_out)})


def _locate_model_setting(party: PartyContext) -> str:
    """Return the key of a party's network settings, for errors."""
    return "model" if party.name == party.active else f"passives.{party.name}.model"


def own_labels_of(party: PartyContext) -> Tensor:
    """Return the labels of a party's rows, (N,); `UNLABELLED` where training may not use them."""
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

    `sequence`: its GRU; None: a linear view.
    """
    settings = MultiviewSettings.from_run_settings(party.config).for_party(party.name)
    weight = 1.0 if party.name == party.active else contract.passives[party.name].weight
    plain_NF = party.data.table.features[rows].flatten(1).double().numpy()
    view = ViewModel.from_features(
        plain_NF if sequence is None else sequence.compute_states(),
        classes,
        np.random.default_rng(derive_seed(party.secrets.seed, party.name, "view")),
        beta=settings.beta,
        zeta=settings.zeta * weight,
        tolerance=settings.tolerance,
        max_rounds=settings.max_rounds,
    )
    # In the table's order: that of the alignment is random.
    start_NC = view.labels_NC.copy()
    view.labels_NC[rows.argsort().numpy()] = start_NC
    return view


def _list_zetas(party: PartyContext, contract: Contract) -> list[float]:
    """Return zeta_k of every party, the same in its own update (MMVFL, Eq. 12) as
    in the average Z.
    """
    settings = MultiviewSettings.from_run_settings(party.config)
    weights = {party.active: 1.0} | {
        name: passive.weight for name, passive in contract.passives.items()
    }
    return [settings.for_party(name).zeta * weight for name, weight in weights.items()]


def pull_of(party: PartyContext, rows: Tensor) -> Pull:
    """Return the pull of the labels that a party may learn from, for these rows of its table."""
    settings = MultiviewSettings.from_run_settings(party.config)
    labels_N = party.data.table.labels
    settings = settings.for_party(party.name)
    assert labels_N is not None
    labels_B = labels_N[rows]
    is_learnt_B = torch.isin(rows, party.data.labelled_rows) & (labels_B != UNLABELLED)
    is_learnt_B1 = is_learnt_B.double().unsqueeze(1)
    truth_BC = F.one_hot(labels_B.clamp(min=0), len(party.data.classes)).double() * is_learnt_B1
    return Pull(truth_BC.numpy(), (settings.eta * is_learnt_B1).numpy(), settings.draws_own)


def label_terms(party: PartyContext, classes: int) -> RepresentationTerms:
    return party.bound_sent_rows((classes,)).model_copy(update={"dtype": "float64"})


def make_terms(
    party: PartyContext,
    session: str,
    terms: Mapping[str, RepresentationTerms],
    weights: Mapping[str, float],
) -> SessionTerms:
    """Return the contract's terms: bounds and weights by passive, and the
    parameters of their sum.

    `session`: the session's name.
    """
    return SessionTerms.from_rows(
        {name: terms[name] for name in party.passives},
        weights=weights,
        secure_sum=party.describe_sum(session, terms[party.passives[0]].shape),
    )
