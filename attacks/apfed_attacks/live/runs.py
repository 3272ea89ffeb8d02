"""Live runs: the real parties, links and sums, where an adversary may play a party's script.

Run by: the experimenter, who drives all parties and scores what the adversary reads. Epochs,
batches and steps are those of any run (`secure_apfed.runs.run`); a refusal ends the session, as
it ends a real one. `Rule` takes single rules of the protocol away, to show what each is good for:
not a setting of any real run, and a protection from nobody.

Letters: B batch, D numbers of a representation, U rows asked about by votes, n of them labelled,
F features, K classes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from apfed_attacks.columns import select_own_columns
from apfed_attacks.interface import AttackResult
from apfed_attacks.live.strategy import ActiveAttack, Answering, AnsweringAttack
from apfed_attacks.recorded import describe_exchange
from apfed_attacks.run import Trial
from apfed_attacks.scoring import make_inapplicable_result
from apfed_attacks.view import AttackError, PlayedAttack
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.lazy_names import make_former_name
from apfed_protocols.sums import PlainSum
from apfed_protocols.sums.fixed_point import clip_rows
from apfed_protocols.sums.interface import USUAL_BITS, FloatArray, StepBinding, SumAgreement
from secure_apfed.alignment.positions import find_positions, find_positions_in_table_order
from secure_apfed.base.seeds import derive_seed, shuffle_rows
from secure_apfed.base.transfers import StepLoss
from secure_apfed.config import Config
from secure_apfed.contract import AGGREGATOR
from secure_apfed.data import VerticalData, load_data
from secure_apfed.exchange import Envelope, Kind, Links, pack_tensors, unpack_tensors
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.labellers import Labeller, harden_votes
from secure_apfed.labellers.kinds import Features, Floats, Integers
from secure_apfed.learning.release import (
    check_norms,
    check_rows,
    check_spread,
    make_representation_specs,
)
from secure_apfed.methods import ActiveRole, Simulation, open_session
from secure_apfed.methods.alignment import intersect_rows
from secure_apfed.methods.apfed import ApfedActive, ApfedPassive
from secure_apfed.methods.ballots import Ballot
from secure_apfed.methods.joint import TvflActive
from secure_apfed.methods.joint_sum import SummedPassive, SummedSplitNnActive
from secure_apfed.methods.method import split_batches
from secure_apfed.methods.session_sum import (
    ActiveSum,
    AdmittedRequest,
    ContributionAggregator,
    PassiveSum,
    make_step_binding,
)
from secure_apfed.methods.votes import VotesActive, VotesPassive
from secure_apfed.networks.objectives import Contrastive
from secure_apfed.runs.outcome import Recording
from secure_apfed.settings import TranscriptSettings

OfMethod = TypeVar("OfMethod", bound=ActiveRole)
_UNBOUNDED = 1e30  # a norm that no row exceeds
_TRANSCRIPT = TranscriptSettings(keep="first_and_last")
Poison = Literal["random", "constant", "flip", "rotate", "backdoor"]
_BACKDOORED_SHARE = 0.1  # of the people, for a backdoor


class LiveSession(Generic[OfMethod]):
    """A session of all parties in this process, which an attack can take part in.

    Args:
        config: settings of the run.
        data: the tables of all parties; None: loaded as the settings say.
        alignment: rows by party of an earlier session with the same data; None: intersect now.
        logs: folder in which parties count what they release and contribute, over all sessions of
            one run; None: in memory.

    Attributes:
        role_type: class of the active's role, which a subclass attacks.
        active_role: the active's role in this session.

    Raises:
        AttackError: the method has no passives of the kind that this class attacks.
    """

    role_type: type[OfMethod]

    def __init__(
        self,
        config: Config,
        data: VerticalData | None = None,
        *,
        alignment: Mapping[str, Tensor] | None = None,
        logs: Path | None = None,
    ) -> None:
        """Set up all parties, ready to train."""
        self.config = config
        self.data = data or load_data(config.data, seed=config.seed)
        if config.transcript.keep == "auto":
            # It would store nothing, since the settings name no attacks.
            config = config.model_copy(update={"transcript": _TRANSCRIPT})
        self.session: Simulation = open_session(config, self.data, alignment=alignment, logs=logs)
        if (
            not isinstance(self.session.active_role, self.role_type)
            or not self.session.contract.passives
        ):
            raise AttackError(
                f"passives that help {self.role_type.__name__} are attacked here, not in "
                f"{config.method.name}"
            )
        self.active_role: OfMethod = self.session.active_role
        self.alignment: Mapping[str, Tensor] = self.session.alignment
        self._epoch = self._step = 0  # the next epoch and step
        self._in_attack_epoch = False  # whether the current epoch has an attack's steps

    @property
    def recording(self) -> Recording:
        """Return what has been recorded so far, for the attack's view."""
        config = self.config
        data = self.data
        sent = self.session.transcript
        return Recording(config=config, data=data, alignment=self.alignment, transcript=sent)

    def train_epochs(
        self, epochs: int, *, before_step: Callable[[int, Tensor], None] = lambda step, rows_B: None
    ) -> None:
        """Train for this number of epochs more, honestly.

        `before_step`: function that is called with each step and the rows (B,) of its batch.
        """
        for _ in range(epochs):
            for rows_B in self._begin_epoch():
                step = self._next_step()
                before_step(step, rows_B)
                self.session.run_step_script(
                    step, self.active_role.train_step(self.session.links, step, rows_B)
                )

    def _begin_epoch(self) -> list[Tensor]:
        """Start the next epoch in the transcript and return its batches, (B,) each."""
        self._epoch = self._epoch + 1
        self._in_attack_epoch = False
        self.session.transcript.begin_epoch(self._epoch - 1)
        return split_batches(self.active_role, self.config, self._epoch - 1)

    def _next_step(self) -> int:
        """Return the number of the next step, and count it."""
        self._step += 1
        return self._step - 1


class Rule(StrEnum):
    """A rule that a passive, or the sum, holds a malicious active to."""

    NORMS = "norms"  # a row of z has a norm between two bounds
    BATCH = "batch"  # rows are distinct and not too few
    SPREAD = "spread"  # their representations differ in direction
    # A passive contributes once to a step, to a row no more often than agreed, in small batches.
    ALLOWANCE = "allowance"
    WEIGHT = "weight"  # lambda_p is the contract's
    BINDING = "binding"  # contributions add up only with answers to the same representations
    PARTICIPANTS = "participants"  # a sum holds one contribution of every passive


ALL_RULES = frozenset(Rule)


def _relax_rules(passive: ApfedPassive, rules: frozenset[Rule]) -> None:
    """Let an honest passive of APFed check requests by these rules of the protocol only."""
    agreed_weight = passive.weight

    def parse_request(message: Envelope) -> tuple[AdmittedRequest, Tensor]:
        """Parse a request for gradients, check it, and return it with its representations.

        Returns the admitted request (with the rows that the passive answers), and z (B, ...).

        Raises RemoteProtocolError: a rule is broken.
        """
        terms = passive.terms
        sender = message.sender
        if Rule.NORMS not in rules:
            terms = terms.model_copy(update={"minimum_norm": 0.0, "maximum_norm": _UNBOUNDED})
        tensors, meta = unpack_tensors(
            message.payload, make_representation_specs(terms), sender=sender
        )
        rows_B = tensors["rows"]
        z_BD = tensors["z"]
        if Rule.BATCH in rules:
            aligned = len(passive.trainer.features_N)
            minimum = passive.contract.minimum_batch
            check_rows(rows_B, alignment_size=aligned, min_rows=minimum, sender=sender)
        check_norms(z_BD, terms, sender=sender)
        if Rule.SPREAD in rules:
            check_spread(z_BD, terms, sender=sender)
        weights = {} if Rule.WEIGHT in rules else meta.get("weights", {})
        passive.weight = float(weights.get(passive.name, agreed_weight))
        return passive.passive_sum.admit_request(message, rows_B), z_BD

    passive.admit_batch = parse_request  # type: ignore[method-assign]


class _WatchedSum(PassiveSum):
    """A passive's part in the secure sum that enforces only some rules, and records its
    contribution.

    Attributes:
        enforced_rules: the enforced rules of the protocol.
        last_contribution: its last contribution, (B, D), before it is protected; None: none yet.
    """

    def __init__(self, honest: PassiveSum, rules: Collection[Rule]) -> None:
        """Take over the state (keys, counts) of an honest passive's part, to replace it."""
        vars(self).update(vars(honest))
        self.enforced_rules = rules
        self.last_contribution: NDArray[np.floating] | None = None

    def admit_request(self, request: Envelope, rows_B: Tensor, **options: Any) -> AdmittedRequest:
        """Return the request with the rows that the passive answers.

        Without the rule ALLOWANCE, which limits requests, any request is admitted with all its
        rows.

        `options`: keyword arguments of `PassiveSum.admit_request`.
        """
        if Rule.ALLOWANCE in self.enforced_rules:
            return super().admit_request(request, rows_B, **options)
        self._admitted_request = AdmittedRequest(
            request.step, rows_B, rows_B, request.payload, request.sender
        )
        return self._admitted_request

    def protect_answer(self, admitted: AdmittedRequest, values_BD: NDArray[np.floating]) -> bytes:
        """Record the values that the passive adds to the sum, then protect them."""
        self.last_contribution = np.ascontiguousarray(values_BD)
        return super().protect_answer(admitted, values_BD)

    def count_answer(self, admitted: AdmittedRequest, digest: bytes) -> None:
        """Count the contribution against the limits on contributions, if the rule ALLOWANCE
        holds.
        """
        if Rule.ALLOWANCE in self.enforced_rules:
            super().count_answer(admitted, digest)

    def make_associated_data(self, admitted: AdmittedRequest) -> StepBinding:
        """Return what authenticates the contribution: contributions add up only if it is equal.

        It is the digest of the request or, without the rule BINDING, of the step alone.
        """
        if Rule.BINDING in self.enforced_rules:
            return super().make_associated_data(admitted)
        return _bind_to_step(self.contract.session, admitted.step)


def _bind_to_step(session: str, step: int) -> StepBinding:
    """Return the binding of a contribution to its session and step only, and not to any rows.

    Contributions to different requests then add up.
    """
    return make_step_binding(session, step, torch.empty(0, dtype=torch.int64), b"")


class LiveRun(LiveSession[ApfedActive]):
    """A session of APFed whose active an attack can play (as a `LiveActive`), or whose passives it
    can.

    Passives enforce only the given rules of the protocol.
    """

    role_type = ApfedActive
    trained = make_former_name("trained", "training_positions")
    protected = make_former_name("protected", "enforces_rules")

    def __init__(
        self,
        config: Config,
        data: VerticalData | None = None,
        *,
        rules: Collection[Rule] = ALL_RULES,
        alignment: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Set up all parties, with passives that enforce only these `rules`."""
        super().__init__(config, data, alignment=alignment)
        contract = self.session.contract
        aligned = self.alignment[self.data.active.name]
        self.rules = frozenset(rules)
        self.enforces_rules = self.rules == ALL_RULES
        self.passives = tuple(table.name for table in self.data.passives)
        self.terms = next(iter(contract.passives.values())).representation
        self.batch_size = contract.batch_size
        trained = find_positions_in_table_order(aligned, self.data.train_rows)
        self.training_positions = shuffle_rows(trained, self.config.seed, "attacks", "live")
        for passive in self._passive_roles.values():
            passive.passive_sum = _WatchedSum(passive.passive_sum, self.rules)
            if not self.enforces_rules:
                _relax_rules(passive, self.rules)
        # The active must authenticate sums as the passives do.
        if Rule.BINDING not in self.rules:
            active_sum = self._active_sum
            active_sum.make_associated_data = lambda step, *_: _bind_to_step(  # type: ignore[method-assign]
                contract.session, step
            )

    @property
    def _passive_roles(self) -> dict[str, ApfedPassive]:
        """The passives' roles by name."""
        roles = self.session.helpers.values()
        return {role.name: role for role in roles if isinstance(role, ApfedPassive)}

    @property
    def _active_sum(self) -> ActiveSum:
        """The active's part in the secure sum."""
        return self.active_role.active_sum

    def _get_watched_sum(self, passive: str) -> _WatchedSum:
        """Return a passive's part in the secure sum, which records its contributions."""
        watched = self._passive_roles[passive].passive_sum
        assert isinstance(watched, _WatchedSum)
        return watched

    def hand_over(self, passive: str, strategy: Answering) -> None:
        """Let an adversary answer requests in this passive's place from now on.

        It has the honest passive's keys and shares, and adds none of the agreed noise.

        `strategy`: object that makes the adversary's gradients.
        """
        honest = self._passive_roles[passive]
        passive_sum = self._get_watched_sum(passive)
        passive_sum.enforced_rules = {Rule.BINDING}  # else contributions would not add up
        if passive_sum.noise is not None:
            no_noise = SimpleNamespace(draw=lambda shape, **_: np.zeros(shape, dtype=np.int64))
            passive_sum.noise = no_noise  # type: ignore[assignment]

        def answer_request(message: Envelope) -> tuple[AdmittedRequest, FloatArray]:
            """Return the admitted request, and the adversary's rows (B, D) in place of
            gradients.
            """
            specs = make_representation_specs(honest.terms)
            tensors, _ = unpack_tensors(message.payload, specs, sender=message.sender)
            rows_B = tensors["rows"]
            z_BD = tensors["z"]
            answer_BD = strategy.forge_gradient(message.step, rows_B, z_BD.flatten(1)).to(z_BD)
            return passive_sum.admit_request(message, rows_B), answer_BD.flatten(1).cpu().numpy()

        honest.compute_contribution = answer_request  # type: ignore[method-assign]

    def get_gradient_function(self, passive: str) -> Callable[[int, Tensor, Tensor], Tensor]:
        """Return the function by which an honest passive computes its gradient.

        It takes a step, its rows (B,), and representations z (B, D), and returns the gradient (B,
        D).
        """
        honest = self._passive_roles[passive]
        shape = honest.terms.shape

        def compute_gradient(step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
            """Return the honest gradient, (B, D)."""
            z_B = z_BD.reshape(-1, *shape)
            return honest.compute_gradient(step, rows_B, z_B).flatten(1)

        return compute_gradient

    def has_rows(self, passive: str, positions: Tensor) -> Tensor:
        """Return whether a passive has a row of each of these positions, (N,) bool."""
        return self.alignment[passive][positions] >= 0

    def get_contribution(self, passive: str) -> Tensor:
        """Return a passive's last contribution (B, D) to a sum, clipped.

        A colluding passive would reveal it to the active.
        """
        contribution = self._get_watched_sum(passive).last_contribution
        bound = self.config.secure_sum.clip
        assert contribution is not None
        return torch.from_numpy(contribution if bound is None else clip_rows(contribution, bound))

    def encode_people(self, passive: str, positions: Tensor) -> Tensor:
        """Return the unit representations (N, D) of these people by a passive with a contrastive
        objective.

        They are the truth that attacks are scored by. `positions`: alignment positions (N,).

        Raises AttackError: the passive lacks some of these people, or has another objective.
        """
        if not self.has_rows(passive, positions).all():
            raise AttackError(
                f"{passive} does not hold all of these {len(positions)} people; ask about those "
                "of whom it has a row"
            )
        trainer = self._passive_roles[passive].trainer
        objective = getattr(trainer, "objective", None)  # a black box has none
        if not isinstance(objective, Contrastive):
            raise AttackError(f"{passive} holds no contrasted representations")
        with torch.no_grad():
            z_ND: Tensor = objective.projection(objective.encoder(trainer.features_N[positions]))
        return F.normalize(z_ND.double(), dim=1)

    def find_sent_positions(self, rows_B: Tensor) -> Tensor:
        """Return the alignment positions of a batch: of those of the active's rows (B,) that are
        aligned.

        Only these are sent in a step.
        """
        aligned = self.alignment[self.data.active.name]
        return find_positions(aligned, intersect_rows(rows_B, aligned))

    def request_sum(
        self,
        rows_B: Tensor,
        z_BD: Tensor,
        *,
        instead: Mapping[str, Tensor] | None = None,
        weights: Mapping[str, float] | None = None,
        participants: Collection[str] | None = None,
    ) -> Tensor:
        """Play one step as a malicious active, with chosen representations; return the decrypted
        sum (B, D).

        Args:
            rows_B: alignment positions of the rows.
            z_BD: representations to send for them.
            instead: representations for single passives in place of `z_BD`, by name.
            weights: weight lambda_p that single passives are told to use, by name.
            participants: names of the passives whose contributions are added; None: all.

        Raises:
            RemoteProtocolError: a party refused; the session is over then.
        """
        # All steps of an attack are recorded in one epoch.
        if not self._in_attack_epoch:
            self._begin_epoch()
            self._in_attack_epoch = True
        dtype = make_representation_specs(self.terms)["z"].dtype
        shape = self.terms.shape
        meta = {"weights": dict(weights)} if weights else {}
        participating = [
            name for name in self.passives if participants is None or name in participants
        ]
        if len(participating) < len(self.passives) and Rule.PARTICIPANTS not in self.rules:
            self._replace_sum(participating)
        step = self._next_step()

        def build_payload(z_BD: Tensor) -> bytes:
            """Pack rows and representations as the active's message."""
            return pack_tensors({"rows": rows_B, "z": z_BD.to(dtype).reshape(-1, *shape)}, meta)

        z_by_participant = {name: (instead or {}).get(name, z_BD) for name in participating}
        exchange = self._exchange_sum(
            step,
            rows_B,
            payload_by_participant={
                name: build_payload(sent_BD) for name, sent_BD in z_by_participant.items()
            },
            own_payload=build_payload(z_BD),
            column_count=z_BD.flatten(1).shape[1],
        )
        return self.session.run_step_script(step, exchange)

    async def _exchange_sum(
        self,
        step: int,
        rows_B: Tensor,
        *,
        payload_by_participant: Mapping[str, bytes],
        own_payload: bytes,
        column_count: int,
    ) -> Tensor:
        """Send the request to the participants, and return the decrypted sum, (B, D).

        `rows_B`: alignment positions of the rows. `payload_by_participant`: the request that each
        passive gets. `own_payload`: the request that the active's side of the sum goes by.
        `column_count`: D.
        """
        active_sum = self._active_sum
        links = self.session.links
        for name, payload in payload_by_participant.items():
            links.send(name, Kind.REPRESENTATIONS, step, payload)
        # The active awaits a sum of the participants only, in this step.
        honest_participants = active_sum.present_passives
        active_sum.present_passives = list(payload_by_participant)
        await active_sum.receive_sum(links, step, rows_B, own_payload, column_count)
        active_sum.present_passives = honest_participants
        assert active_sum.decoded_sum is not None
        return active_sum.decoded_sum

    def _replace_sum(self, names: Sequence[str]) -> None:
        """Replace the sum at all parties by a plain one over the passives of these names.

        This is for attacks without the rule PARTICIPANTS.

        Raises LocalProtocolError: the sum is a secure one, which cannot be taken over a subset.
        """
        contract = self.session.contract
        settings = self.config.secure_sum
        if not find_sum_class(settings).unsafe:
            raise LocalProtocolError(
                "only a plain sum can be taken over other participants than agreed; the secure "
                "ones have no such mode"
            )
        plain = PlainSum(
            SumAgreement(
                session=contract.session,
                receiver=contract.active,
                aggregator=AGGREGATOR,
                contributors=tuple(names),
                clip_norm=settings.clip or 1.0,
                bits=settings.bits or USUAL_BITS,
                allow_single=True,
            ),
            clip=settings.clip is not None,
        )
        agreed = {name: contract.passives[name] for name in names}
        aggregator = ContributionAggregator(
            contract.model_copy(update={"passives": agreed}), plain.make_aggregator(), rounds=1
        )
        network = self.session.network
        script = aggregator.run_session(network.links[AGGREGATOR], lambda step: b"")
        network.replace_script(AGGREGATOR, script)
        self._active_sum.receiver = plain.make_receiver()
        for name in names:
            self._passive_roles[name].passive_sum.contributor = plain.make_contributor(name)


class JointRun(LiveSession[TvflActive]):
    """A session of TVFL whose active an adversary can replace towards one passive."""

    role_type = TvflActive

    def hand_over(self, passive: str, strategy: Answering) -> None:
        """Let an adversary send this passive gradients in the active's place from now on.

        The other passives get honest gradients. `strategy`: object that makes the adversary's
        gradients.
        """
        honest = self.active_role.train_on_parts

        def forge_gradients(
            step: int, rows_B: Tensor, representation_by_sender: Mapping[str, Tensor]
        ) -> tuple[StepLoss, dict[str, bytes]]:
            """Return the honest loss and gradients, with a forged one for the attacked passive.

            `representation_by_sender`: representations (B, ...) of each passive, by name.
            """
            h_BD = representation_by_sender[passive].clone()
            # A gradient of the mean loss over B rows is 1 / B of one row's.
            forged_BD = strategy.forge_gradient(step, rows_B, h_BD.flatten(1)) / len(rows_B)
            loss, gradients = honest(step, rows_B, representation_by_sender)
            gradients[passive] = pack_tensors({"gradient": forged_BD.reshape(h_BD.shape).to(h_BD)})
            return loss, gradients

        self.active_role.train_on_parts = forge_gradients  # type: ignore[method-assign]


class SummedRun(LiveSession[SummedSplitNnActive]):
    """A session of a split network over a sum of representations, one of whose passives can be
    replaced.
    """

    role_type = SummedSplitNnActive

    def hand_over(self, passive: str, forge: Callable[[int, Tensor, Tensor, bool], Tensor]) -> None:
        """Let an adversary send representations in this passive's place from now on.

        Args:
            passive: name of the passive.
            forge: function of (step, rows (B,), honest z (B, D), whether the active learns) that
                returns the representations to send. They must be in the autograd graph of z, since
                a gradient on them comes back.
        """
        role = self.session.helpers[passive]
        assert isinstance(role, SummedPassive)
        honest = role.encode_rows

        def encode_rows(step: int, rows_B: Tensor, *, is_training: bool) -> Tensor:
            """Return the forged representations of these rows, in the shape of the honest ones."""
            z_BD = honest(step, rows_B, is_training=is_training)
            return forge(step, rows_B, z_BD.flatten(1), is_training).reshape(z_BD.shape)

        role.encode_rows = encode_rows  # type: ignore[method-assign]

    def predict_jointly(self, positions: Tensor) -> Tensor:
        """Return the class scores (N, K) of all parties together for these alignment positions
        (N,).
        """
        scores = []
        with self.active_role.trainer.evaluation_mode():
            for rows_B in self.active_role.split_into_batches(positions):
                step = self._next_step()
                script = self.active_role.predict_jointly(self.session.links, step, rows_B)
                scores.append(self.session.run_script(script).scores.detach())
        return torch.cat(scores)


class VotesRun(LiveSession[VotesActive]):
    """A session of votes: class scores that each passive gives rows by its labeller
    (semi-supervised rule).

    An attack chooses the rows and labels that an active sends, or replaces a passive's labeller.
    """

    # The base class of all ways to reveal votes.
    role_type = VotesActive

    @property
    def ballot(self) -> Ballot:
        """Return the request for votes that an honest active sends."""
        return self.active_role.ballot

    @property
    def voters(self) -> tuple[str, ...]:
        """The names of the passives."""
        return tuple(self.session.contract.passives)

    def request_votes(
        self, rows_U: Tensor | None = None, labels: Mapping[int, int] | None = None
    ) -> tuple[Ballot, Floats]:
        """Request votes as the active; return the request, and the votes that were revealed, (U,
        K).

        `rows_U`: alignment positions to vote on; None: the honest ones. `labels`: label to send for
        each of some positions, by position; None: an honest request, whatever the rows.

        Raises RemoteProtocolError: a party refused.
        """
        honest = self.ballot
        if labels is not None:
            rows_U = honest.rows if rows_U is None else rows_U
            index_by_position = {position: index for index, position in enumerate(rows_U.tolist())}
            self.active_role.ballot = Ballot.from_rows(
                rows_U,
                Tensor([index_by_position[position] for position in labels]).long(),
                Tensor(list(labels.values())).long(),
                block_rows=honest.block_rows,
                shows_labels=describe_exchange(self.config).labels == "shown",
            )
        if not self._step:
            self.session.transcript.begin_epoch(0)
        # Not a subclass of Links, but it has the methods that a request for votes uses.
        links = cast(Links, _FixedStepLinks(self.session.links, self._next_step()))
        try:
            votes = self.session.run_script(self.active_role.gather_votes(links))
        finally:
            request = self.ballot
            self.active_role.ballot = honest  # for later requests
        return request, votes

    def get_voter(self, passive: str) -> VotesPassive:
        """Return the role of a passive: for the true votes that attacks are scored by, or to
        replace its labeller.
        """
        role = self.session.helpers[passive]
        assert isinstance(role, VotesPassive)
        return role

    def learn_from_votes(self) -> None:
        """Make the honest request for votes, and train the active on them."""
        _, votes = self.request_votes()
        self.active_role.learn_from_votes(votes)


class _FixedStepLinks:
    """The links of an active whose request for votes has a step number of its own.

    The real links send every request with the same number, so that a second request in one session
    would be taken for a repetition of the first.
    """

    def __init__(self, links: Links, step: int) -> None:
        """Wrap the real links; `step`: step number of the request and its votes."""
        self._links = links
        self._step = step

    def send(self, receiver: str, kind: Kind, step: int, payload: bytes = b"") -> None:
        """Send a message as `Links.send` does, a request for votes with the other step number."""
        step = self._step if kind is Kind.LABELS else step
        self._links.send(receiver, kind, step, payload)

    async def receive(self, senders: Any, *kinds: Kind, **others: Any) -> Envelope:
        """Receive a message as `Links.receive` does, votes with the other step number."""
        if Kind.VOTES in kinds:
            others["step"] = self._step
        return await self._links.receive(senders, *kinds, **others)


def choose_backdoored_people(features_UF: Features) -> NDArray[np.bool_]:
    """Return a mask (U,) of the people for whom a backdoor is.

    They are the tenth of the U rows with the largest sum of features.
    """
    total_U = np.asarray(features_UF).reshape(len(features_UF), -1).sum(axis=1)
    return np.asarray(total_U >= np.quantile(total_U, 1 - _BACKDOORED_SHARE))


@dataclass(frozen=True, kw_only=True)
class PoisonedVotes(Labeller):
    """A labeller (rule by which a passive votes) that falsifies the votes of an `honest` one.

    Its votes are hard (one-hot), which weigh most, and keep to every rule. Integrity, not privacy:
    there is nothing to guess, so this is no `Attack`; compare the active's accuracy with that of an
    honest run.

    Attributes:
        honest: the labeller whose votes are falsified.
        way: "random" and "constant" ignore it, "rotate" names the next class. "flip" names the
            second class where the honest one is the first, and is honest elsewhere. "backdoor"
            names the first class for the people of `choose_backdoored_people`, and is honest
            elsewhere.
        seed: seed of random votes.
    """

    name: ClassVar[str] = "poisoned"
    title: ClassVar[str] = "votes that serve the voter"
    inductive: ClassVar[bool] = False

    honest: Labeller
    way: Poison
    seed: int = 0

    def label_rows(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return poisoned votes, (U, K), for a passive that has labels of its own or not.

        The arguments are explained in `label_without_own`.
        """
        return self.label_without_own(features_UF, labelled_n, labels_n, classes)

    def label_without_own(
        self, features_UF: Features, labelled_n: Integers, labels_n: Integers, classes: int
    ) -> Floats:
        """Return poisoned votes, (U, K), one-hot.

        `features_UF`: features of U rows. `labelled_n`: positions of the n labelled ones.
        `labels_n`: their classes. `classes`: K.
        """
        honest_UK = harden_votes(
            self.honest.label_without_own(features_UF, labelled_n, labels_n, classes)
        )
        honest_U = honest_UK.argmax(axis=1)
        draw = np.random.default_rng(derive_seed(self.seed, "poisoned votes"))
        votes_U = {
            "random": draw.integers(classes, size=len(honest_U)),
            "constant": np.zeros_like(honest_U),
            "flip": np.where(honest_U == 0, 1, honest_U),
            "rotate": (honest_U + 1) % classes,
            "backdoor": np.where(choose_backdoored_people(features_UF), 0, honest_U),
        }[self.way]
        return np.asarray(np.eye(classes)[votes_U])

    def describe_labelling(self) -> str:
        """Return a title of this labeller, for people."""
        return self.title


def mount_live_attack(
    run: LiveRun, attack: ActiveAttack, victim: str, *, seed: int
) -> AttackResult:
    """Run the attack in place of the active in a session that is training, and return its result.

    If a party refuses a request, the attack does not apply, for that reason. `victim`: the attacked
    passive.
    """
    trial = Trial(attack, run.recording, (run.data.active.name,), victim, seed=seed)
    try:
        knowledge, _ = trial.reveal_knowledge()
        notes = attack.run_live(run, knowledge, seed)
    except RemoteProtocolError as refusal:
        reason = f"the protocol refused: {refusal}"
        return make_inapplicable_result(
            attack, trial.build_view(trial.make_empty_knowledge()), reason, seed
        )
    return replace(trial, deviation=PlayedAttack(attack.name, notes)).compute_result()


def mount_answering_attack(
    attack: AnsweringAttack,
    config: Config,
    passive: str,
    *,
    data: VerticalData | None = None,
    seed: int = 0,
) -> AttackResult:
    """Train a run in which an adversary forges gradients; return the attack's result.

    By the attack's role the adversary is this passive (in APFed), or the active, which forges this
    passive's gradients (in TVFL).

    Args:
        attack: the attack.
        config: settings of the run.
        passive: name of the adversary, or of its victim.
        data: the tables of all parties; None: loaded as the settings say.
        seed: seed of the attack.
    """
    is_passive = "passive" in attack.roles
    run = LiveRun(config, data) if is_passive else JointRun(config, data)
    active = run.data.active.name
    adversary, victim = (passive, active) if is_passive else (active, passive)
    trial = Trial(attack, run.recording, (adversary,), victim, seed=seed)
    knowledge, truth = trial.reveal_knowledge()
    # The active's labels, one for each alignment position, give the number of these.
    own_AF = select_own_columns(trial.build_view(knowledge), torch.arange(len(truth.labels)))
    terms = run.session.contract.passives[passive].representation
    strategy = attack.start_answering(terms, knowledge, own_AF, seed)
    run.hand_over(passive, strategy)
    run.train_epochs(config.train.epochs)
    return replace(
        trial, deviation=PlayedAttack(attack.name, strategy.collect_notes())
    ).compute_result()
