"""APC-VFL and VFedTrans: one exchange with the others improves an autoencoder of the active.

The active receives numbers about its aligned training rows that were computed from all parties'
tables, and fits an autoencoder to all of its rows whose code resembles these. It classifies by this
code, and predicts alone. No label leaves it, and no gradient is sent.

APC-VFL (section 4, Figures 3 and 4). Every passive fits an autoencoder g1 to its aligned rows, and
releases each row's code after its guard, once for each person. The active's autoencoder g2 reads
the codes of all parties, and its g3 is trained towards the code of g2 (`ApcVflActive`,
`ApcVflPassive`). At the end the codes of aligned test rows are requested, once each, to measure the
joint prediction: the paper's variant for rows that are all aligned (Figure 4). Fitting g1 adds no
noise: a person's features change everybody's codes a little, so that a guard's epsilon, of one
row's release with the encoder held fixed, does not cover the passive's whole table.

VFedTrans (Huang et al. 2023, with FedSVD of Chai et al. 2022, as APC-VFL compares with it, Appendix
E.3). The dealer hands out orthogonal masks; every party sends the aggregator its masked table; the
aggregator decomposes their sum; the active removes the mask from the left singular vectors, as many
as `model.representation`, towards which its code is trained (`VFedTransActive`, `VFedTransPassive`,
`VFedTransAggregator`). Nothing of this has noise: what masks and vectors reveal stands in
docs/papers.md. Ours: the vectors times the square root of the number of rows, so that their numbers
are about as large as the features', whatever that number; and the classifier reads the own features
beside the code itself, where the release puts the decoder's output.

Letters: N rows of a table or positions of the alignment, T training rows, U those of them that are
aligned, n labelled rows, B rows of one request, F features, D numbers of a code, K classes.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.svd import (
    MAX_FEATURES,
    MAX_MASK_ROWS,
    SvdAgreement,
    SvdDealer,
    SvdOwner,
    SvdReceiver,
    SvdServer,
)
from secure_apfed.alignment.positions import find_positions, find_positions_in_table_order
from secure_apfed.base.seeds import seed_draws
from secure_apfed.baselines import BaselineTask
from secure_apfed.contract import AGGREGATOR, Contract, RepresentationBounds
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import (
    BEFORE_TRAINING,
    Envelope,
    Kind,
    Links,
    TensorSpec,
    pack_tensors,
    unpack_tensors,
)
from secure_apfed.labellers.kinds import append_constant, minimise_loss
from secure_apfed.learning.autoencoder import (
    Autoencoder,
    DistillationSettings,
    TargetCodes,
    fit_autoencoder,
    new_autoencoder,
)
from secure_apfed.learning.descent import ActiveNetworks, Compute, add_prefix, remove_prefix
from secure_apfed.learning.release import check_rows, parse_representations
from secure_apfed.learning.trainers import EncoderTrainer
from secure_apfed.learning.votes import find_last_layer
from secure_apfed.measures.table import Scored, score_model
from secure_apfed.methods.alignment import DEALER, receive_dealt
from secure_apfed.methods.joint import Tvfl, TvflPassive
from secure_apfed.methods.local_models import (
    Input,
    LocalModels,
    fit_best_if_better,
    restore_networks,
)
from secure_apfed.methods.method import (
    FOR_AN_ANSWER,
    FOR_THE_ACTIVE,
    ActiveRole,
    HelperRole,
    Method,
    Save,
    SessionTerms,
    StepCounter,
    save_or_end,
)
from secure_apfed.methods.party import PartyContext
from secure_apfed.methods.session_sum import AnswerLimits, blame_active_too
from secure_apfed.methods.student import StudentActive, warn_of_no_help
from secure_apfed.networks.models import Enriched, Shape, family_for, output_shape
from secure_apfed.settings import THE_ACTIVE, MethodSettings, ModelSettings, RunSettings, protects
from secure_apfed.settings.training import MAX_PARAMETERS, Width

_MAX_NUMBER = 1e100
"""The largest magnitude that `apfed_protocols.svd` takes."""
_TOLERANCE = 1e-6
"""Norm of the gradient at which logistic regression stops."""
_GRID = 2.0**-16
"""Singular vectors are rounded to multiples of this, far above their rounding errors under fresh
masks, so that runs repeat."""


def _count_autoencoder(widths: Sequence[int]) -> int:
    """Return the number of weights of an autoencoder whose encoder has layers of these widths.

    The decoder mirrors the encoder, so it has as many weights.
    """
    return 2 * sum(inputs * outputs for inputs, outputs in pairwise(widths))


class ApcVflSettings(MethodSettings, DistillationSettings):
    """The settings of APC-VFL: all parties' autoencoders, and how the active's student learns.

    A passive's autoencoder g1 encodes its rows. The active's g2 encodes the codes of all parties,
    and its student g3 learns to resemble g2's codes from own features.

    Attributes:
        own: the autoencoder g1 of the active.
        passive: the autoencoder g1 of passives that have no `model` of their own.
        joint: hidden widths of g2. Its code is as wide as the student's, which the run's `model`
            configures.
    """

    name: Literal["apc_vfl"]
    own: Annotated[ModelSettings, THE_ACTIVE] = ModelSettings(
        network="selu", hidden=(64,), representation=128
    )
    passive: ModelSettings = ModelSettings(network="selu", hidden=(128,), representation=256)
    joint: Annotated[tuple[Width, ...], Field(max_length=64), THE_ACTIVE, protects("nobody")] = (
        256,
    )

    @field_validator("joint")
    @classmethod
    def _is_bounded(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Refuse layer widths that mean too many parameters, before a network is built."""
        parameters = _count_autoencoder(widths)
        if parameters > MAX_PARAMETERS:
            raise ValueError(
                f"these layers have {parameters:,} parameters, expected {MAX_PARAMETERS:,} at "
                "most; take fewer or narrower ones"
            )
        return widths

    title = "APC-VFL"
    can_predict_locally = True

    def count_further_parameters(self, passives: int) -> int:
        """Return the number of weights of g2, which reads the codes of all parties."""
        joined_size = self.own.representation_size + passives * self.passive.representation_size
        return _count_autoencoder((joined_size, *self.joint))

    representation_sender = "passives"
    teacher = "joint representations"

    def check_run(self, config: RunSettings) -> None:
        """Refuse student networks other than an encoder with one linear layer on its code."""
        fitting = ("selu", "linear", "enriched")
        if config.model.network not in fitting:
            raise ValueError(
                f"model.network: method {self.name} classifies the student's code, or the own "
                f"features beside it (enriched), and {config.model.network} has another head; use "
                f"one of {', '.join(fitting)}"
            )
        if config.model.head:
            raise ValueError(
                f"model.head: method {self.name} fits one linear layer on the student's code; "
                "leave it out"
            )


class VFedTransSettings(MethodSettings, DistillationSettings):
    """The settings of VFedTrans: the decomposition of all parties' tables, and the student.

    The student is the active's autoencoder, whose code learns to resemble the singular vectors.

    Attributes:
        mask_rows: the largest number of rows in one block of the orthogonal mask. One block for all
            rows hides most, and takes the cube of their number in time. `model.representation` of
            the run says how many vectors there are; VFedTrans takes as many as the parties have
            features together.
    """

    name: Literal["vfedtrans"]
    mask_rows: Annotated[
        int, protects("everybody", lower="smaller blocks of rows are hidden apart from each other")
    ] = Field(1024, ge=2, le=MAX_MASK_ROWS)

    title = "VFedTrans"
    can_predict_locally = True
    teacher = "shared singular vectors"

    def bound_linear_combinations(self, config: RunSettings, classes: int) -> float:
        """Return how many linear combinations of all parties' columns the active reads of a person.

        A person's row of the singular vectors has one number for each vector.
        """
        return config.model.representation_size

    def check_run(self, config: RunSettings) -> None:
        """Refuse networks other than `enriched` without hidden head layers."""
        if config.model.network != "enriched" or config.model.head:
            raise ValueError(
                f"model.network: method {self.name} classifies the active's own features beside "
                f"the student's code by logistic regression, and {config.model.network} has "
                "another head; use enriched, without model.head"
            )


class ApcVflActive(StudentActive):
    """The active's role in APC-VFL: it requests the passives' codes once; see `StudentActive`."""

    student: "ApcVflTrainer"

    def __init__(
        self, party: PartyContext, contract: Contract, rows: Tensor, trainer: "ApcVflTrainer"
    ) -> None:
        """Make the active's role; its stated guarantee covers the codes of all passives together.

        `rows`: the row of its table at each of the N alignment positions. `trainer`: the active's
        autoencoders and classifiers.
        """
        guarantee = party.describe_joint_releases()
        super().__init__(
            party, trainer, headline_variant=party.config.method.name, guarantee=guarantee
        )
        self.min_batch_rows = contract.minimum_batch
        self._contract = contract
        self._rows = rows

    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        """Request the passives' codes of the aligned training rows, and fit all networks to them.

        Every request counts as a step in `steps`.
        """
        codes_by_request = []
        positions = find_positions(self._rows, self.training_rows)
        for rows_B in self._split_positions(positions):
            codes_by_request.append(await self._request_codes(links, steps.next_step, rows_B))
            steps.count_step(None)
        self.student.fit_to_codes(torch.cat(codes_by_request))
        self.local_models = self.student.describe_local_models()

    async def evaluate(self, links: Links, *, next_step: int, is_final: bool) -> dict[str, Scored]:
        """Return the scores of test rows without other parties; at the end also joint scores.

        Joint scores cover the aligned test rows, if these are enough for a request. `next_step`:
        the first unused step number. `is_final`: whether training is over.
        """
        scores = await super().evaluate(links, next_step=next_step, is_final=is_final)
        positions = find_positions_in_table_order(self._rows, self._test_rows)
        if is_final and len(positions) >= self.min_batch_rows:
            together = await self._score_jointly(links, next_step, positions)
            scores[f"{self._headline}_together"] = together
        return scores

    async def _score_jointly(self, links: Links, next_step: int, positions: Tensor) -> Scored:
        """Request codes at these alignment positions, and return the joint scores of all parties.

        The passives' ledgers count these releases, too. `next_step`: the first unused step number.
        """
        scores = []
        for step, rows_B in enumerate(self._split_positions(positions), start=next_step):
            released_BD = await self._request_codes(links, step, rows_B)
            scores_BK = self.student.score_jointly(self._rows[rows_B], released_BD)
            scores.append(scores_BK.double().cpu())
        truth = self.student.labels_N.cpu()[self._rows[positions]]
        return Scored.from_network_outputs(truth, torch.cat(scores))

    def _split_positions(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Split positions into equal requests of at most the contract's batch size."""
        return positions.tensor_split(math.ceil(len(positions) / self._contract.batch_size))

    async def _request_codes(self, links: Links, step: int, rows_B: Tensor) -> Tensor:
        """Request the codes of these B alignment positions from every passive.

        Returns the passives' codes side by side, float64: one row for each position.
        """
        passives = self._contract.passives
        for name in passives:
            links.send(name, Kind.REQUEST, step, pack_tensors({"rows": rows_B}))
        return torch.cat(
            [await self._receive_codes(links, name, step, rows_B) for name in passives], dim=1
        )

    async def _receive_codes(self, links: Links, name: str, step: int, rows_B: Tensor) -> Tensor:
        """Receive one passive's codes of the requested alignment positions, (B, D), float64.

        Raises RemoteProtocolError: the codes exceed the agreed bounds, or belong to other rows than
        requested.
        """
        message = await links.receive(name, Kind.REPRESENTATIONS, step=step, patience=FOR_AN_ANSWER)
        terms = self._contract.passives[name].representation
        answered_B, z_BD = parse_representations(
            message, terms, alignment_size=len(self._rows), min_rows=self._contract.minimum_batch
        )
        if not torch.equal(answered_B, rows_B):
            raise RemoteProtocolError(f"{name} answered for other rows than asked")
        return z_BD.double()


class ApcVflPassive(TvflPassive):
    """A passive's role in APC-VFL: it sends the code of each requested row; see `TvflPassive`.

    Its encoder is fitted before, so that it receives no gradients.
    """

    request_kinds = (Kind.REQUEST,)


class VFedTransActive(StudentActive):
    """The active's role in VFedTrans: it requests one masked decomposition; see `StudentActive`.

    All parties' tables of the aligned training rows are decomposed under orthogonal masks. The
    student learns from the left singular vectors.
    """

    student: "VFedTransTrainer"

    def __init__(
        self,
        party: PartyContext,
        contract: Contract,
        rows: Tensor,
        trainer: "VFedTransTrainer",
        receiver: SvdReceiver,
    ) -> None:
        """Make the active's role in VFedTrans.

        `rows`: the row of its table at each of the N alignment positions. `trainer`: the active's
        autoencoder and classifier. `receiver`: the protocol's object for the active's side of the
        masked decomposition.
        """
        guarantee = (
            "no guarantee: the active reads singular vectors of all parties' rows, and the "
            "aggregator their tables under orthogonal masks, without noise"
        )
        super().__init__(
            party, trainer, headline_variant=party.config.method.name, guarantee=guarantee
        )
        self.min_batch_rows = max(contract.minimum_batch, receiver.agreement.vectors)
        self._contract = contract
        self._rows = rows
        self._receiver = receiver
        self._features_N = party.data.table.features
        self._shared_vectors: Tensor | None = None

    @property
    def last_sum(self) -> Tensor | None:
        """The singular vectors of the U requested rows, (U, D); None before they are received."""
        return self._shared_vectors

    async def set_up(self, links: Links) -> None:
        """Receive the masks from the dealer; in a resumed session do nothing.

        A resumed session follows the decomposition, which needed the masks.
        """
        if self._contract.is_at_start:
            self._receiver.take_masks((await receive_dealt(links)).payload)

    async def teach_student(self, links: Links, steps: StepCounter) -> None:
        """Request the decomposition of the aligned training rows, and fit the student to it.

        The active sends the passives the positions of these rows, and the aggregator its own masked
        table of them. This counts as one step in `steps`.
        """
        step = steps.next_step
        receiver = self._receiver
        request = pack_tensors({"rows": find_positions(self._rows, self.training_rows)})
        for name in self._contract.passives:
            links.send(name, Kind.REQUEST, step, request)
        own_UF = self._features_N[self.training_rows].flatten(1).double().numpy()
        people = _hash_people(self._contract, request)
        links.send(AGGREGATOR, Kind.CONTRIBUTION, step, receiver.mask_table(own_UF, people))
        message = await links.receive(
            AGGREGATOR, Kind.SINGULAR_VECTORS, step=step, patience=FOR_AN_ANSWER
        )
        # Removing the mask yields the left singular vectors of all parties' joined tables.
        vectors_UD = receiver.open_vectors(message.payload, people, row_count=len(own_UF))
        self._shared_vectors = torch.from_numpy(vectors_UD)
        self.student.fit_to_vectors(self._shared_vectors)
        self.local_models = self.student.describe_local_models()
        steps.count_step(0.0)


class VFedTransPassive(HelperRole):
    """A passive's role in VFedTrans: it sends its masked rows once; see `HelperRole`."""

    request_kinds = (Kind.REQUEST,)

    def __init__(
        self, party: PartyContext, contract: Contract, rows: Tensor, owner: SvdOwner | None
    ) -> None:
        """Make a passive's role in VFedTrans.

        `rows`: the row of its table at each of the N alignment positions. `owner`: the protocol's
        object for the passive's side of the masked decomposition; None: the decomposition was done
        in an earlier session.
        """
        self.name = party.name
        self.contract = contract
        self._owner = owner
        self._features_NF = party.data.table.features[rows].flatten(1).double().numpy()
        self._answer_limits = AnswerLimits.from_contract(party, contract, position_count=len(rows))
        self.checkpoint_parts = {"allowance": self._answer_limits}

    async def set_up(self, links: Links) -> None:
        """Receive the masks from the dealer; in a resumed session do nothing."""
        if self._owner is not None:
            self._owner.take_masks((await receive_dealt(links)).payload)

    async def answer_message(self, links: Links, message: Envelope) -> None:
        """Check and count the request, and send the masked rows to the aggregator; once a session.

        Raises RemoteProtocolError: the request breaks a rule of the contract; nothing is sent.
        """
        owner = self._owner
        # Removed before the checks, so that no second request is answered, even after an error.
        self._owner = None
        if owner is None:
            raise RemoteProtocolError(
                f"{message.sender} asks {self.name} for rows to decompose once more, or after the "
                "step in which that was due; vectors of other rows would tell these apart"
            )
        expected = {"rows": TensorSpec(torch.int64, (None,))}
        tensors, _ = unpack_tensors(message.payload, expected, sender=message.sender)
        rows_U = tensors["rows"]
        min_rows = max(owner.agreement.vectors, self.contract.minimum_batch)
        check_rows(
            rows_U, alignment_size=len(self._features_NF), min_rows=min_rows, sender=message.sender
        )
        table_UF = self._features_NF[rows_U.numpy()]
        self._count_answers(rows_U, table_UF.tobytes(), message)
        masked = owner.mask_table(table_UF, _hash_people(self.contract, message.payload))
        links.send(AGGREGATOR, Kind.CONTRIBUTION, message.step, masked)

    def _count_answers(self, rows_U: Tensor, values: bytes, request: Envelope) -> None:
        """Record in the log that one answer about each row leaves, before it leaves.

        The same rows in another session are not counted again: they have fresh masks and reveal
        nothing new.

        `rows_U`: alignment positions (indices into the common list of people), (U,). `values`: the
        bytes of their features. `request`: the active's message.
        """
        digest = hashlib.blake2b(request.payload + values).digest()
        blocks = rows_U.split(self.contract.batch_size)
        # All blocks are checked before any is counted.
        for step, rows_B in enumerate(blocks):
            self._answer_limits.check_batch(step, rows_B, sender=request.sender)
        for step, rows_B in enumerate(blocks):
            self._answer_limits.count_answers(step, rows_B, digest, sender=request.sender)


class VFedTransAggregator(HelperRole):
    """The aggregator's role in VFedTrans; see `HelperRole`.

    It decomposes the sum of all parties' masked tables, once in a run.
    """

    name = AGGREGATOR

    def __init__(self, contract: Contract, server: SvdServer) -> None:
        """Make the aggregator's role.

        `server`: the protocol's object for the side that decomposes the sum of masked tables.
        """
        self.contract = contract
        self._server = server
        # Whether the decomposition is still to come: a resumed session follows it.
        self._is_due = contract.is_at_start

    async def run_session(self, links: Links, save: Save) -> None:
        """Decompose all owners' masked tables, and save checkpoints, until the session ends.

        Owners are the parties with a table. `save`: writes this party's checkpoint, whenever the
        active requests one. Raises RemoteProtocolError: a party sends what it may not.
        """
        active = self.contract.active
        owners = self._server.agreement.owners
        while True:
            message = await links.receive(
                owners,
                Kind.CONTRIBUTION,
                Kind.CHECKPOINT,
                Kind.END,
                min_senders=len(owners),
                patience=FOR_THE_ACTIVE,
            )
            if message.kind is Kind.CONTRIBUTION:
                await self._decompose_tables(links, message)
            elif message.sender != active:
                raise RemoteProtocolError(f"{message.sender} may send no {message.kind}")
            elif not save_or_end(message.kind, message.step, links, active, save):
                return

    async def _decompose_tables(self, links: Links, first_message: Envelope) -> None:
        """Collect the masked tables of all owners, decompose their sum, and send the active the
        result.

        `first_message`: the message with the first table. Raises RemoteProtocolError: this run's
        decomposition is already done.
        """
        active = self.contract.active
        step = first_message.step
        if not self._is_due:
            raise RemoteProtocolError(
                f"{first_message.sender} sent a table twice, or after the step in which it was "
                "due; a run decomposes once"
            )
        self._is_due = False
        table_by_owner = {first_message.sender: first_message.payload}
        while missing := [
            name for name in self._server.agreement.owners if name not in table_by_owner
        ]:
            # A table can also be missing because the active did not request it.
            with blame_active_too(active):
                message = await links.receive(
                    missing, Kind.CONTRIBUTION, step=step, min_senders=len(missing)
                )
            table_by_owner[message.sender] = message.payload
        links.send(active, Kind.SINGULAR_VECTORS, step, self._server.factor_tables(table_by_owner))


class DistilledTrainer:
    """The active's networks: autoencoders, and classifiers on their codes; each is fitted once.

    A classifier is a logistic regression that reads codes (APC-VFL, section 4.4). Two things are
    ours: each number of a code is standardised before, which is folded into the layer's weights,
    and the regression is regularised as with scikit-learn's C = 1. If the setting `classifier` is
    "strongest", the best local model classifies instead. See `methods.student.StudentModel`.

    Attributes:
        autoencoders: the autoencoders by name; the code of "student" learns to resemble target
            codes.
        classifiers: the classifiers by name, each with the encoder whose code it reads; "alone"
            predicts without the other parties.
        rows_U: the rows of the active's table for which others' codes or vectors arrive.
        labelled_n: the labelled rows of its table.
        strongest_model: the local model that predicts instead of logistic regression; None: none
            does.
    """

    has_direct_fit = True
    strongest_model: LocalModels | None = None

    def __init__(
        self,
        party: PartyContext,
        rows: Tensor,
        autoencoders: Mapping[str, Autoencoder],
        classifiers: Mapping[str, ActiveNetworks],
    ) -> None:
        """Move the untrained networks to the compute device, and select aligned and labelled rows.

        `rows`: the row of the active's table at each of the N alignment positions. `autoencoders`,
        `classifiers`: autoencoders and classifiers by name; see the class for the names.
        """
        data = party.data
        table = party.data.table
        compute = Compute.from_settings(party.config.train)
        assert table.labels is not None
        self.autoencoders = autoencoders
        self.classifiers = classifiers
        for module in (*autoencoders.values(), *classifiers.values()):
            module.to(compute.device, compute.dtype)
        self.features_N = compute.move_tensor(table.features)
        self.labels_N = compute.move_tensor(table.labels)
        self.rows_U = data.train_rows[torch.isin(data.train_rows, rows)]
        self.labelled_n = data.labelled_rows
        self.compute = compute
        self._rows_T = data.train_rows
        self._owner = party.name
        self._seed = party.secrets.seed
        self._settings = DistillationSettings.from_settings(party.config.method)
        self._config = party.config
        self._data = party.data

    @property
    def networks(self) -> ActiveNetworks:
        """The networks that predict without the other parties."""
        return (
            self.classifiers["alone"]
            if self.strongest_model is None
            else self.strongest_model.networks
        )

    def refit_excluding(self, rows: Tensor) -> ActiveNetworks | None:
        """Return None: its autoencoders would have to be trained again."""
        return None

    def fit_named_autoencoder(
        self, name: str, rows_NF: Tensor, target_codes: TargetCodes | None = None
    ) -> None:
        """Fit one autoencoder to reconstruct these rows.

        `name`: a key of `autoencoders`. `rows_NF`: the autoencoder's inputs. `target_codes`: target
        codes of some rows, which its own code learns to resemble, too; None: it only reconstructs.
        """
        fit_autoencoder(
            self.autoencoders[name],
            rows_NF,
            self._settings,
            owner=f"{self._owner} {name}",
            seed=self._seed,
            target_codes=target_codes,
        )

    def fit_student(self, codes_UD: Tensor) -> None:
        """Fit the student's autoencoder to all training rows.

        `codes_UD`: target codes of the U aligned rows.
        """
        # The index of each aligned row among the training rows, which are sorted.
        index_U = torch.searchsorted(self._rows_T, self.rows_U)
        self.fit_named_autoencoder(
            "student", self.features_N[self._rows_T], TargetCodes(index_U, codes_UD)
        )

    def fit_named_classifier(self, name: str, codes_nD: Tensor, rows_n: Tensor) -> None:
        """Fit one classifier to the codes of labelled rows.

        With labels of a single class it stays as initialised. `name`: a key of `classifiers`.
        `codes_nD`: the classifier's inputs. `rows_n`: the table's row of each input.
        """
        labels_n = self.labels_N[rows_n].cpu()
        if len(labels_n.unique()) > 1:
            fit_classifier(self.classifiers[name], codes_nD, labels_n)

    def fit_local_classifier(self) -> None:
        """Fit the classifier that predicts without the other parties to the labelled rows.

        It is a logistic regression. If the settings say so, the best local model is fitted, too,
        and predicts instead. Warns NoHelpWarning: this model does not use the student's code, since
        validation rejected it.
        """
        encoder = self.networks.encoder
        labelled_n = self.labelled_n
        with torch.no_grad():
            encoded_nD = encoder(self.features_N[labelled_n])
        self.fit_named_classifier("alone", encoded_nD, labelled_n)
        if self._settings.classifier == "strongest":
            task = BaselineTask.from_run(self._config, self._data, self._rows_T)
            encoder_output: Input = "x and h" if isinstance(encoder, Enriched) else "h"
            self.strongest_model = fit_best_if_better(encoder, task, encoder_output=encoder_output)
            if not self.strongest_model.is_helped:
                warn_of_no_help(self._owner)

    def describe_local_models(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the local models that predict, and of models left out.

        It is empty if logistic regression predicts.
        """
        return {} if self.strongest_model is None else self.strongest_model.as_json()

    def train_on_rows(self, step: int, rows_B: Tensor) -> float:
        """Raise AssertionError: this student is fitted at once, so no training step may be run."""
        raise AssertionError(f"{self._owner}: step {step} of a student that is fitted in one go")

    def score_rows(self, rows: Tensor) -> Scored:
        """Return scores of these rows of the active's table, with their labels.

        The networks that predict without the other parties give them.
        """
        networks = self.networks
        # Any tensor shows the networks' device and dtype; a fitted model has buffers only.
        example_tensor = next(chain(networks.parameters(), networks.buffers()))

        @torch.no_grad()
        def score_batch(rows_B: Tensor) -> Tensor:
            """Return scores (B, K) of these rows."""
            features_B = self.features_N[rows_B].to(example_tensor)
            scores_BK: Tensor = networks(features_B, None)[0]
            return scores_BK.to(self.labels_N.device)

        return score_model(score_batch, rows, self.labels_N)

    def _list_modules(self) -> dict[str, nn.Module]:
        """Return the autoencoders and classifiers by name."""
        return {
            **self.autoencoders,
            **{name: networks.head for name, networks in self.classifiers.items()},
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of all autoencoders, classifiers and the strongest local model.

        Names of tensors begin with the name of their network.
        """
        modules = self._list_modules()
        if self.strongest_model is not None:
            modules["strongest"] = self.strongest_model.networks
        tensors: dict[str, Tensor] = {}
        for name, module in modules.items():
            tensors |= add_prefix(name, module.state_dict())
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned, and rebuild the strongest local model if
        there is one.
        """
        for name, module in self._list_modules().items():
            module.load_state_dict(remove_prefix(name, tensors))
        state = remove_prefix("strongest", tensors)
        self.strongest_model = None
        if state:
            networks = restore_networks(state, self.classifiers["alone"])
            self.strongest_model = LocalModels(networks=networks, used_names=())


class ApcVflTrainer(DistilledTrainer):
    """The active's networks in APC-VFL (sections 4.2 to 4.4, Figure 3); see `DistilledTrainer`.

    There are three autoencoders. g1 ("own") is fitted to the active's aligned rows. g2 ("joint") is
    fitted to all parties' codes of these rows. g3 ("student") is fitted to all training rows, with
    g2's codes as targets of the aligned rows. The classifier "alone" reads g3's codes. The
    classifier "together" reads g2's codes, and predicts with all parties.
    """

    def __init__(self, party: PartyContext, contract: Contract, rows: Tensor) -> None:
        """Build the autoencoders g1, g2 and g3, and both classifiers.

        `rows`: the row of the active's table at each of the N alignment positions.
        """
        settings = ApcVflSettings.from_run_settings(party.config)
        model = party.config.model
        features = party.data.table.shape
        student_autoencoder = _make_autoencoder(party, "g3", model, features)
        own_autoencoder = _make_autoencoder(party, "g1", settings.own, features)
        encoder = student_autoencoder.encoder
        if model.network == "enriched":
            encoder = Enriched(encoder)  # the classifier reads the own features beside the code
        student_size = math.prod(output_shape(student_autoencoder.encoder, features))
        # g2 reads the codes of all parties side by side.
        code_shapes = [output_shape(own_autoencoder.encoder, features)]
        code_shapes += [terms.representation.shape for terms in contract.passives.values()]
        joint_model = ModelSettings(
            network="selu", hidden=settings.joint, representation=student_size
        )
        joined_size = sum(map(math.prod, code_shapes))
        joint_autoencoder = _make_autoencoder(party, "g2", joint_model, (joined_size,))
        family = family_for(model, features)
        classes = len(party.data.classes)
        own_size = math.prod(output_shape(encoder, features))
        joint_size = math.prod(output_shape(joint_autoencoder.encoder, (joined_size,)))
        with seed_draws(party.secrets.seed, party.name, "heads"):
            own_head = family.make_head(own_size, classes, model)
            joint_head = family.make_head(joint_size, classes, model)
        super().__init__(
            party,
            rows,
            autoencoders={
                "own": own_autoencoder,
                "joint": joint_autoencoder,
                "student": student_autoencoder,
            },
            classifiers={
                "alone": ActiveNetworks(encoder, own_head),
                "together": ActiveNetworks(joint_autoencoder.encoder, joint_head),
            },
        )

    def fit_to_codes(self, released_UD: Tensor) -> None:
        """Fit all autoencoders and classifiers, one after the other.

        `released_UD`: the passives' codes of the U rows `rows_U`, side by side.
        """
        joint_autoencoder = self.autoencoders["joint"]
        labelled_n = self.labelled_n
        self.fit_named_autoencoder("own", self.features_N[self.rows_U])
        codes_UD = self._join_codes(self.rows_U, released_UD)
        self.fit_named_autoencoder("joint", codes_UD)
        joint_UD = joint_autoencoder.encode_rows(codes_UD)
        self.fit_student(joint_UD)
        self.fit_local_classifier()
        has_label_U = torch.isin(self.rows_U, labelled_n)
        self.fit_named_classifier("together", joint_UD[has_label_U], self.rows_U[has_label_U])

    def score_jointly(self, rows_B: Tensor, released_BD: Tensor) -> Tensor:
        """Return scores of K classes, (B, K), from the codes of all parties.

        `rows_B`: rows of the active's table. `released_BD`: the passives' codes of these rows, side
        by side.
        """
        codes_BD = self.autoencoders["joint"].encode_rows(self._join_codes(rows_B, released_BD))
        with torch.no_grad():
            scores_BK: Tensor = self.classifiers["together"].head(codes_BD)
        return scores_BK

    def _join_codes(self, rows_B: Tensor, released_BD: Tensor) -> Tensor:
        """Return the active's codes of these table rows, concatenated with the passives' codes."""
        own_BD = self.autoencoders["own"].encode_rows(self.features_N[rows_B])
        return torch.cat([own_BD, self.compute.move_tensor(released_BD)], dim=1)


class VFedTransTrainer(DistilledTrainer):
    """The active's autoencoder and classifier in VFedTrans; see `DistilledTrainer`."""

    def __init__(self, party: PartyContext, rows: Tensor) -> None:
        """Build the student's autoencoder, and a classifier of own features beside its code.

        `rows`: the row of the active's table at each of the N alignment positions.
        """
        model = party.config.model
        features = party.data.table.shape
        family = family_for(model, features)
        vectors = model.representation_size
        with seed_draws(party.secrets.seed, party.name, "student"):
            enriched = family.make_encoder(features, model)
            assert isinstance(enriched, Enriched)
            decoder = family.make_decoder((vectors,), features, model)
            head = family.make_head(math.prod(features) + vectors, len(party.data.classes), model)
        super().__init__(
            party,
            rows,
            autoencoders={"student": Autoencoder(enriched.code, decoder)},
            classifiers={"alone": ActiveNetworks(enriched, head)},
        )

    def fit_to_vectors(self, vectors_UD: Tensor) -> None:
        """Fit the student with singular vectors as target codes, then the classifier.

        `vectors_UD`: D left singular vectors, one row for each of the U rows `rows_U`.
        """
        # A singular vector has norm 1: scaled by sqrt(U), its entries are about as large as
        # standardised features.
        scaled_UD = vectors_UD * math.sqrt(len(vectors_UD))
        # Fresh masks change the rounding errors of each run; on the grid they vanish.
        rounded_UD = (scaled_UD / _GRID).round() * _GRID
        self.fit_student(rounded_UD)
        self.fit_local_classifier()


def fit_classifier(networks: ActiveNetworks, codes_nD: Tensor, labels_n: Tensor) -> None:
    """Fit the last linear layer of the networks' head in place, by logistic regression.

    `codes_nD`: D numbers for each of n rows; they are standardised for the fit, while the fitted
    layer takes them as they are. `labels_n`: the rows' labels.
    """
    layer = find_last_layer(networks)
    codes = codes_nD.double().cpu().numpy()
    mean_D = codes.mean(axis=0)
    deviation_D = codes.std(axis=0)
    deviation_D[deviation_D == 0] = 1.0
    theta_DK = minimise_loss(
        append_constant((codes - mean_D) / deviation_D, 1.0),
        labels_n.numpy(),
        layer.out_features,
        penalty=1 / len(codes),
        tolerance=_TOLERANCE,
    )
    # Fold the standardisation into the layer; the last row of theta is the constant's.
    weight_DK = theta_DK[:-1] / deviation_D[:, None]
    bias_K = np.asarray(theta_DK[-1] - mean_D @ weight_DK)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight_DK.T))
        layer.bias.copy_(torch.from_numpy(bias_K))


class ApcVfl(Tvfl):
    """The method APC-VFL; see `Method`."""

    settings = ApcVflSettings
    make_simulated_step = Method.make_simulated_step  # codes are requested once

    def find_sent_model(self, config: RunSettings, passive: str) -> ModelSettings:
        """Return the settings of the network whose codes a passive sends."""
        return (
            config.find_passive_settings(passive).model
            or ApcVflSettings.from_run_settings(config).passive
        )

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role.

        `rows`: the row of its table at each of the N alignment positions.
        """
        return ApcVflActive(party, contract, rows, ApcVflTrainer(party, contract, rows))

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Fit this passive's autoencoder to its aligned rows; return the role that sends its codes.

        `rows`: the row of its table at each of the N alignment positions.
        """
        config = party.config
        model = self.find_sent_model(config, party.name)
        own_autoencoder = _make_autoencoder(party, "g1", model, party.data.table.shape)
        # The alignment's order is random, and the fit must not depend on it. So the rows are sorted
        # in the table's order.
        aligned_rows_UF = party.data.table.features[rows.sort().values]
        own_UF = Compute.from_settings(config.train).move_tensor(aligned_rows_UF)
        fit_autoencoder(
            own_autoencoder,
            own_UF,
            ApcVflSettings.from_run_settings(config),
            owner=party.name,
            seed=party.secrets.seed,
        )
        trainer = EncoderTrainer(
            party.name,
            own_autoencoder.encoder,
            features_N=party.data.table.features[rows],
            train=config.train,
            seed=party.secrets.seed,
        )
        return ApcVflPassive(party, contract, trainer, party.open_releases(len(rows)))


def _make_autoencoder(
    party: PartyContext, name: str, model: ModelSettings, features: Shape
) -> Autoencoder:
    """Return an untrained autoencoder of this party on its compute device.

    `name`: name of the autoencoder, such as "g1", from which the seed of its weights is derived.
    `features`: the shape of a row.
    """
    compute = Compute.from_settings(party.config.train)
    return new_autoencoder(
        party.name, name, model, features, seed=party.secrets.seed, compute=compute
    )


class VFedTrans(Method):
    """The method VFedTrans; see `Method`."""

    settings = VFedTransSettings

    def learns_unaligned_labels(self, config: RunSettings) -> bool:
        """Return True: the classifier reads the student's code, which any row of the active has."""
        return True

    def offer_terms(self, party: PartyContext) -> RepresentationBounds | None:
        """Return this party's number of features, stated as the shape of a row."""
        party.require_passives()
        return _bound_table_rows(math.prod(party.data.table.shape))

    def derive_terms(
        self, party: PartyContext, proposed_terms: Mapping[str, RepresentationBounds], session: str
    ) -> SessionTerms:
        """Return the contract's terms for the decomposition of all parties' masked tables.

        They are the parties' numbers of features, the number of singular vectors, and the number of
        rows in a block of the orthogonal mask.

        `proposed_terms`: mapping from party name to the terms that its `offer_terms` returned.
        `session`: name of this session, the same at all parties.

        Raises ConfigError: there are too many features in total, or more vectors than features.
        """
        feature_count_by_party = {
            name: math.prod(offered.shape) for name, offered in proposed_terms.items()
        }
        for name, count in feature_count_by_party.items():
            party.require_terms(name, proposed_terms[name], _bound_table_rows(count))
        total_features = sum(feature_count_by_party.values())
        vector_count = party.config.model.representation_size
        if total_features > MAX_FEATURES:
            raise ConfigError(
                f"data: the parties have {total_features} features together, and no more than "
                f"{MAX_FEATURES} are decomposed; leave columns out"
            )
        if vector_count > total_features:
            raise ConfigError(
                f"model.representation: {vector_count} singular vectors of {total_features} "
                f"features, those of all parties together; say {total_features} or less"
            )
        return SessionTerms.from_bounds(
            dict.fromkeys(party.passives, _bound_table_rows(total_features)),
            secure_sum={
                "scheme": "svd",
                "masks": "orthogonal",
                "features": feature_count_by_party,
                "vectors": vector_count,
                "mask_rows": VFedTransSettings.from_run_settings(party.config).mask_rows,
            },
        )

    def build_active(self, party: PartyContext, contract: Contract, rows: Tensor) -> ActiveRole:
        """Return the active's role.

        `rows`: the row of its table at each of the N alignment positions.
        """
        receiver = SvdReceiver(_make_agreement(party, contract))
        return VFedTransActive(party, contract, rows, VFedTransTrainer(party, rows), receiver)

    def build_passive(self, party: PartyContext, contract: Contract, rows: Tensor) -> HelperRole:
        """Return a passive's role.

        `rows`: the row of its table at each of the N alignment positions.
        """
        owner = None
        if contract.is_at_start:  # a resumed session follows the decomposition
            owner = SvdOwner(_make_agreement(party, contract), party.name)
        return VFedTransPassive(party, contract, rows, owner)

    def build_aggregator(self, party: PartyContext, contract: Contract) -> HelperRole:
        """Return the aggregator's role, which decomposes the sum of masked tables."""
        return VFedTransAggregator(contract, SvdServer(_make_agreement(party, contract)))

    async def run_dealer(self, party: PartyContext, links: Links, contract: Contract) -> None:
        """Send every party with a table its masks; in a resumed session send nothing."""
        if contract.is_at_start:
            for message in SvdDealer(_make_agreement(party, contract)).deal_masks():
                links.send(message.receiver, Kind.DEALT, BEFORE_TRAINING, message.body)


def _bound_table_rows(column_count: int) -> RepresentationBounds:
    """Return the contract's bounds on a row of `column_count` float64 numbers; any usual norm
    passes.
    """
    return RepresentationBounds(
        shape=(column_count,), dtype="float64", minimum_norm=0.0, maximum_norm=_MAX_NUMBER
    )


def _hash_people(contract: Contract, request: bytes) -> bytes:
    """Return 32 bytes that identify the requested rows in this session, for masked tables.

    All parties compute the same bytes, so that only tables of the same people are added.
    `request`: the active's request as bytes.
    """
    return hashlib.sha256(contract.digest + request).digest()


def _make_agreement(party: PartyContext, contract: Contract) -> SvdAgreement:
    """Return the public parameters of the masked decomposition, taken from the contract."""
    sum_parameters = contract.secure_sum
    owners = (contract.active, *contract.passives)
    return SvdAgreement(
        session=contract.digest.hex(),
        server=AGGREGATOR,
        dealer=DEALER,
        owners=owners,
        features=tuple(sum_parameters["features"][name] for name in owners),
        receiver=contract.active,
        vectors=sum_parameters["vectors"],
        mask_rows=sum_parameters["mask_rows"],
        max_rows=party.config.alignment.maximum_ids,
    )
