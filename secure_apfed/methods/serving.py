"""Joint prediction as a service: the active requests predictions of the joint model for people by
their IDs.

Run by: the active, and each passive and the aggregator as servers, in sessions of their own after a
training that returned gradients (`tvfl`, `split_nn`, `split_nn_sum`, a joint teacher's model),
under a contract with the settings of that run and its digest (`predicts`). Each party loads its
stored network. A session: agree, set the sum up, then

1. passive -> active: its IDs blinded, in a random order, which is the list that positions below
   refer to (see `apfed_protocols.psi.lookup`);
2. active -> passive: blinded IDs of a block of rows; passive -> active: their tags, and the
   positions of people about whom it answers no more, as far as it has not named them yet. A passive
   does not learn which people it does not know;
3. active -> passives: positions of the people about whom all answer; each passive counts them
   against its limits, charges its ledger where noise was agreed, and answers: its representations,
   after its guard, or its contribution to the secure sum, of which the active reads the sum alone.
   Contributions are bound to the people by a salted digest. So an active that asks one passive
   about another person than the next decodes nothing, and the aggregator does not read who they
   are.

Letters: M passives, P different people, B rows of a block, n rows that are answered about, D
numbers of a representation, K classes.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from apfed_protocols.psi.ecdh import TAG_BYTES
from apfed_protocols.psi.lookup import Asker, Holder
from apfed_protocols.randomness import KEY_BYTES, fresh_key
from secure_apfed.alignment import canonical_ids, require_overlaps_shown
from secure_apfed.contract import Contract
from secure_apfed.errors import ModelError
from secure_apfed.exchange import (
    BEFORE_TRAINING,
    Envelope,
    Kind,
    Links,
    TensorSpec,
    pack_tensors,
    unpack_tensors,
)
from secure_apfed.learning.descent import add_prefix, remove_prefix
from secure_apfed.learning.release import check_rows, parse_representations
from secure_apfed.learning.trainers import HeadTrainer
from secure_apfed.methods.joint import EncodingPassive, Tvfl
from secure_apfed.methods.joint_sum import SUM
from secure_apfed.methods.method import FOR_THE_ACTIVE, Method, end_all, meet_active, meet_all
from secure_apfed.methods.party import PartyContext, Role
from secure_apfed.methods.session import enter_session, new_session
from secure_apfed.methods.session_sum import SessionSum

_UNKNOWN = -1
"""The position of a person that a passive does not know."""
_REFUSED = -2
"""The position of a person about whom a passive's limit allows no more answers."""
_POSITION_DTYPE = np.dtype("<i8")


class ServingLimits(Protocol):
    """A passive's own limits on its answers.

    A request beyond a limit raises LimitReachedError, and is not counted.
    """

    def count_lookups(self, count: int) -> None:
        """Count `count` looked-up IDs against the limit."""

    def count_answers(
        self, people: Sequence[bytes], would_cost: Callable[[int], float] | None
    ) -> None:
        """Count one answer about each of these people.

        `would_cost`: the epsilon of a given number of answers about one person; None: answers have
        no noise.
        """

    def list_exhausted_people(
        self, people: Sequence[bytes], cost: Callable[[int], float] | None
    ) -> list[int]:
        """Return the indices of these people whose limit is reached: no more answers about them.

        `cost`: the epsilon of a given number of answers about one person; None: answers have no
        noise.
        """


class LimitReachedError(PartyLeftError):
    """A passive reached a limit of its answers, and leaves; all parties get the reason."""


def require_joint_method(method: Method) -> Tvfl:
    """Return the method if its parties can predict together; otherwise raise ModelError."""
    if not isinstance(method, Tvfl):
        raise ModelError(
            f"{method.public_facts.title} trains no model that parties predict with together; "
            "tvfl, split_nn, split_nn_sum and joint_teacher_sum do"
        )
    return method


def _session_key(contract: Contract, passive: str) -> bytes:
    """Return 32 bytes that identify one passive's ID lookup in this session."""
    return hashlib.blake2b(contract.digest + passive.encode(), digest_size=32).digest()


def collect_network_states(role: Role) -> dict[str, Tensor]:
    """Return the tensors of the networks that a role needs for joint prediction after training.

    A tensor's name begins with the name of its network.
    """
    states: dict[str, Tensor] = {}
    for name, network in role.prediction_networks.items():
        states |= add_prefix(name, network.state_dict())
    return states


def load_network_states(
    networks: Mapping[str, nn.Module], states: Mapping[str, Tensor], party: str
) -> None:
    """Load tensors that `collect_network_states` returned into these networks.

    `networks`: the networks to load, by name. `party`: name of the party, for the error. Raises
    ModelError: a tensor is missing, or has another shape than its network.
    """
    try:
        for name, network in networks.items():
            network.load_state_dict(remove_prefix(name, states))
    except RuntimeError as error:
        raise ModelError(
            f"{party}: the networks that it kept are not those of these settings; predict with the "
            "run.yaml and table layout of the training"
        ) from error


async def serve_predictions(
    party: PartyContext,
    links: Links,
    method: Tvfl,
    states: Mapping[str, Tensor],
    limits: ServingLimits,
) -> None:
    """Run a passive's whole prediction session: answer lookups and requests until the active ends.

    A lookup asks at which position of the passive's list a person is. A request asks for the inputs
    of the joint prediction for some positions.

    Args:
        party: the passive; its table has the people that may be asked about.
        links: its connections to the other parties.
        method: the method of the training, whose model predicts.
        states: the network tensors that it stored after training.
        limits: the passive's own limits on how often it answers.

    Raises ModelError: the tensors belong to another model; LimitReachedError: a limit of this
    passive is reached.
    """
    require_overlaps_shown(party.config.alignment, party.name)
    contract = (await enter_session(party, links, method)).contract
    ids = canonical_ids(party.name, party.data.table.ids, party.config.alignment)
    holder = Holder(ids, session=_session_key(contract, party.name))
    helper = method.build_passive(party, contract, torch.from_numpy(holder.published_rows))
    assert isinstance(helper, EncodingPassive)
    load_network_states(helper.prediction_networks, states, party.name)
    ledger = helper.ledgers.get(party.name)
    compute_cost = ledger.would_cost if ledger else None
    people_in_order = [ids[row] for row in holder.published_rows]
    # Positions whose limit is reached, which the next answer to a lookup reports.
    unreported = limits.list_exhausted_people(people_in_order, compute_cost)
    await helper.set_up(links)
    await meet_active(links, party.active)
    links.send(party.active, Kind.LOOKUP, BEFORE_TRAINING, holder.blinded_ids)
    while True:
        message = await links.receive(
            party.active, Kind.LOOKUP, Kind.REQUEST, Kind.END, patience=FOR_THE_ACTIVE
        )
        if message.kind is Kind.END:
            return
        if message.kind is Kind.LOOKUP:
            tags = holder.answer(message.payload, sender=party.active, max_ids=contract.batch_size)
            limits.count_lookups(len(tags) // TAG_BYTES)
            exhausted_positions = np.array(unreported, _POSITION_DTYPE).tobytes()
            unreported = []
            links.send(party.active, Kind.LOOKUP, message.step, tags + exhausted_positions)
        else:
            position_B, salt = _parse_request(message, len(ids))
            people = [people_in_order[position] for position in position_B.tolist()]
            limits.count_answers(people, compute_cost)
            await helper.predict(links, message, _hash_people(people, salt))
            exhausted = limits.list_exhausted_people(people, compute_cost)
            unreported += position_B[exhausted].tolist()


def _pack_request(position_B: Tensor, salt: bytes) -> bytes:
    """Encode a prediction request: positions in the passive's list, (B,), and a salt.

    The salt enters the digest of the people to which a contribution is bound.
    """
    return pack_tensors({"rows": position_B}, {"learn": False, "salt": salt})


def _parse_request(message: Envelope, size: int) -> tuple[Tensor, bytes]:
    """Return the requested positions (B,), and the salt for the digest of their people.

    `size`: length of the passive's list. Raises RemoteProtocolError: the request breaks a rule.
    """
    expected = {"rows": TensorSpec(torch.int64, (None,))}
    tensors, meta = unpack_tensors(message.payload, expected, sender=message.sender)
    check_rows(tensors["rows"], alignment_size=size, min_rows=1, sender=message.sender)
    salt = meta.get("salt")
    if type(salt) is not bytes or len(salt) != KEY_BYTES:
        raise RemoteProtocolError(f"{message.sender} sent a request without a salt of 32 bytes")
    return tensors["rows"], salt


def _parse_positions(encoded: bytes, size: int, *, sender: str) -> NDArray[np.int64]:
    """Decode the positions that the passive `sender` reports as exhausted.

    `size`: length of the passive's list. Raises RemoteProtocolError: the bytes are no positions in
    that list.
    """
    whole_bytes = len(encoded) // _POSITION_DTYPE.itemsize * _POSITION_DTYPE.itemsize
    positions = np.frombuffer(encoded[:whole_bytes], _POSITION_DTYPE)
    if whole_bytes < len(encoded) or ((positions < 0) | (positions >= size)).any():
        raise RemoteProtocolError(
            f"{sender} named people about whom it answers no more, but not all of them are among "
            f"its {size} people"
        )
    return positions


def _hash_people(people: Sequence[bytes], salt: bytes) -> bytes:
    """Return a digest of these people's IDs, in order.

    Whoever does not know the salt, as the aggregator, cannot guess the people from the digest.
    """
    digest = hashlib.blake2b(key=salt, digest_size=32)
    for person in people:
        digest.update(len(person).to_bytes(4, "big") + person)
    return digest.digest()


async def serve_sums(party: PartyContext, links: Links, method: Tvfl) -> None:
    """Run the aggregator's whole prediction session: add contributions until the active ends it."""
    contract = (await enter_session(party, links, method)).contract
    helper = method.build_aggregator(party, contract)
    await helper.set_up(links)
    await meet_active(links, party.active)
    # A prediction session has no checkpoints, so there is no state to save.
    await helper.run_session(links, lambda step: b"")


class JointPredictor:
    """The active's side of a prediction session; made by `start_session`.

    Attributes:
        contract: the session's contract.
        ended: the error that ended the session; None: the other parties still answer.
        refused: number of rows so far whose people all parties know, but about whom a passive's
            limit allows no more answers.
    """

    def __init__(
        self, party: PartyContext, links: Links, contract: Contract, trainer: HeadTrainer
    ) -> None:
        """Prepare the active's side before the IDs are exchanged; `start_session` completes it.

        `trainer`: the active's encoder and head.
        """
        self.ended: RemoteProtocolError | None = None
        self.refused = 0
        self.contract = contract
        self._party = party
        self._links = links
        self._trainer = trainer
        self._sum = None
        if contract.secure_sum:
            self._sum = SessionSum.from_contract(party, contract).make_active_sum()
        self._step = 0
        self._askers: dict[str, Asker] = {}
        # For each passive: whether its limit is reached, by position in its list. One entry more,
        # the last, serves people that the passive does not know.
        self._is_exhausted: dict[str, NDArray[np.bool_]] = {}

    @classmethod
    async def start_session(
        cls, party: PartyContext, links: Links, method: Tvfl, states: Mapping[str, Tensor]
    ) -> "JointPredictor":
        """Agree on a contract, set up the sum, and receive each passive's blinded IDs.

        Args:
            party: the active; its table is one placeholder row, which shows the features' shape.
            links: its connections to the other parties.
            method: the method of the training, whose model predicts.
            states: the network tensors that it stored after training.

        Raises ModelError: the tensors belong to another model.
        """
        require_overlaps_shown(party.config.alignment, party.name)
        contract = (await enter_session(party, links, method, session=new_session())).contract
        trainer = method.make_head_trainer(party, contract)
        load_network_states({"encoder": trainer.encoder, "head": trainer.head}, states, party.name)
        trainer.set_training(False)
        predictor = cls(party, links, contract, trainer)
        if predictor._sum is not None:
            await predictor._sum.set_up(links)
        await meet_all(links, predictor._helpers)
        for name in contract.passives:
            message = await links.receive(name, Kind.LOOKUP, step=BEFORE_TRAINING)
            asker = Asker(
                message.payload,
                holder=name,
                session=_session_key(contract, name),
                max_ids=party.config.alignment.maximum_ids,
            )
            predictor._askers[name] = asker
            # One entry more, for people that the passive does not know.
            predictor._is_exhausted[name] = np.zeros(asker.holder_size + 1, dtype=bool)
        return predictor

    @property
    def _helpers(self) -> list[str]:
        """The names of the passives, and of the aggregator if there is one."""
        return [*self.contract.passives, *self.contract.list_names("aggregator")]

    def end_session(self) -> None:
        """Tell the other parties that the session is over."""
        end_all(self._links, self._helpers, self._step)

    async def predict(
        self, ids: Sequence[bytes], features_BF: Tensor
    ) -> tuple[NDArray[np.bool_], Tensor]:
        """Request joint predictions for the people of some rows.

        A person in several rows is requested once. If a passive stops answering midway, the scores
        so far are returned, `ended` gives the reason, and the other people are masked out.

        `ids`: the person of each of the B rows. `features_BF`: the active's F features of these
        rows.

        Returns a mask of the n rows about whose people all passives answered, (B,), and the scores
        of these rows, (n, K) for K classes. Raises RemoteProtocolError, PartyLeftError: the first
        request failed.
        """
        # The distinct people, and for each row the index of its person.
        people, person_of_row_B = np.unique(np.array(ids, dtype=object), return_inverse=True)
        is_answered_P, answers = await self._request_people(people, person_of_row_B)
        is_answered_B = is_answered_P[person_of_row_B]
        if not answers:
            return is_answered_B, torch.empty(0, 0)
        # Answers are in the order of the answered people: each one's index is the number before it.
        answer_of_person_P = np.cumsum(is_answered_P) - 1
        person_of_row_n = person_of_row_B[is_answered_B]
        answer_of_row_n = torch.from_numpy(answer_of_person_P[person_of_row_n])
        inputs_by_sender = {
            name: torch.cat([answer[name] for answer in answers])[answer_of_row_n]
            for name in answers[0]
        }
        trainer = self._trainer
        own_n = trainer.compute.move_tensor(features_BF[torch.from_numpy(is_answered_B)])
        # A fixed seed, so that equal requests give equal scores.
        with torch.no_grad(), trainer.compute.prepare_forward(0, "together"):
            own_nD = trainer.encoder(own_n)
            return is_answered_B, trainer.compute_scores(own_nD, inputs_by_sender).double().cpu()

    async def _request_people(
        self, people: NDArray[np.object_], person_of_row_B: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], list[dict[str, Tensor]]]:
        """Request the head's inputs for distinct people, block by block.

        It also counts the rows of refused people in `refused`. A later request that fails ends the
        session: its error goes to `ended`.

        `people`: P distinct people. `person_of_row_B`: index of each row's person among them.
        Returns whether all passives answered about a person, (P,), and the answers of each block.
        """
        is_answered_P = np.zeros(len(people), dtype=bool)
        is_refused_P = is_answered_P.copy()
        answers = list[dict[str, Tensor]]()
        for start in range(0, len(people), self.contract.batch_size):
            block = slice(start, start + self.contract.batch_size)
            try:
                positions_MB = await self._request_positions([*people[block]])
                # Negative positions mark unknown and refused people.
                all_answer_B = positions_MB.min(axis=0) >= 0
                all_know_B = (positions_MB != _UNKNOWN).all(axis=0)
                is_refused_P[block] = all_know_B & ~all_answer_B
                if all_answer_B.any():
                    answered_people = [*people[block][all_answer_B]]
                    answers.append(
                        await self._request_inputs(answered_people, positions_MB[:, all_answer_B])
                    )
            except RemoteProtocolError as error:
                if not answers:
                    raise
                self.ended = error
                break
            is_answered_P[block] = all_answer_B
        self.refused += int(is_refused_P[person_of_row_B].sum())
        return is_answered_P, answers

    async def _request_positions(self, ids: Sequence[bytes]) -> NDArray[np.int64]:
        """Look these B people up at each of the M passives, by their blinded IDs.

        Returns each person's position in each passive's list, (M, B). The position is `_UNKNOWN`
        if the passive does not know the person, `_REFUSED` if its limit allows no more answers.
        """
        for name, asker in self._askers.items():
            self._links.send(name, Kind.LOOKUP, self._step, asker.ask(ids))
        positions_by_passive = []
        # An answer has a tag (a shortened doubly blinded ID) of each person, and then the positions
        # whose limit has been reached since the last answer.
        tags_end = len(ids) * TAG_BYTES
        for name, asker in self._askers.items():
            answer = (await self._links.receive(name, Kind.LOOKUP, step=self._step)).payload
            position_B = asker.parse_answer(answer[:tags_end], len(ids))
            newly_exhausted = _parse_positions(answer[tags_end:], asker.holder_size, sender=name)
            is_exhausted = self._is_exhausted[name]
            is_exhausted[newly_exhausted] = True
            # Position -1 of an unknown person reads the last entry, which is always False.
            positions_by_passive.append(np.where(is_exhausted[position_B], _REFUSED, position_B))
        return np.stack(positions_by_passive)

    async def _request_inputs(
        self, people: Sequence[bytes], positions_MB: NDArray[np.int64]
    ) -> dict[str, Tensor]:
        """Request the inputs that the head gets from the other parties for these people.

        `positions_MB`: positions of the B people in the lists of the M passives. Returns
        representations (B, D) by passive name, or the secure sum of them under the name `SUM`.
        """
        step = self._step
        links = self._links
        trainer = self._trainer
        salt = fresh_key()
        position_by_passive = dict(zip(self._askers, torch.from_numpy(positions_MB), strict=True))
        for name, position_B in position_by_passive.items():
            links.send(name, Kind.REQUEST, step, _pack_request(position_B, salt))
        self._step += 1
        bounds_by_passive = {
            name: passive.representation for name, passive in self.contract.passives.items()
        }
        if self._sum is not None:
            rows_B = torch.arange(positions_MB.shape[1])
            any_bounds = next(
                iter(bounds_by_passive.values())
            )  # summed representations have one shape
            row_size = math.prod(any_bounds.shape)
            # Every passive binds its contribution to this digest, so only a sum over these people
            # decodes.
            digest = _hash_people(people, salt)
            sum_BD = await self._sum.receive_sum(links, step, rows_B, digest, row_size)
            return {SUM: trainer.compute.move_tensor(sum_BD)}
        h_by_passive = {}
        for name, position_B in position_by_passive.items():
            answer = await links.receive(name, Kind.REPRESENTATIONS, step=step)
            answered_B, h_BD = parse_representations(
                answer,
                bounds_by_passive[name],
                alignment_size=self._askers[name].holder_size,
                min_rows=1,
            )
            if not torch.equal(answered_B, position_B):
                raise RemoteProtocolError(f"{name} answered for other people than asked")
            h_by_passive[name] = trainer.compute.move_tensor(h_BD)
        return h_by_passive
