"""Joint prediction as a service: the active requests predictions of the joint model for people by
their IDs.

Run by: the active, and each passive and the aggregator as servers, in sessions of their own after a
training that returned gradients (`tvfl`, `split_nn`, `split_nn_sum`, a joint teacher's model),
under a contract with the settings of that run and the digest of it (`predicts`). Each party loads
its stored network. A session: agree, set the sum up, then

1. passive -> active: its IDs blinded, in a random order (see `apfed_protocols.psi.lookup`);
2. active -> passive: blinded IDs of a block of rows; passive -> active: their tags, and the places
   of people about whom it answers no more, as far as it has not named them yet. A passive does
   not learn which people it does not know;
3. active -> passives: places of the people about whom all answer; each counts them against its
   limits, charges where noise was agreed, and answers: its representations, behind its guard, or
   its part of the secure sum, of which the active reads the sum alone. Parts are bound to the
   people by a salted digest, so that an active that asks one passive about another person than the
   next opens nothing, and the aggregator does not read who they are.

Letters: B rows of a block, D numbers of a representation, K classes.
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
from secure_apfed.methods.sum_end import SessionSum

_UNKNOWN = -1
_REFUSED = -2
_PLACES = np.dtype("<i8")


class ServingLimits(Protocol):
    """A passive's own limits on its answers; a request beyond one raises LimitReachedError and is
    not counted.
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
        """Return the indices of these people whose limit is reached: no more answers about them."""


class LimitReachedError(PartyLeftError):
    """A passive's limit of answers is reached, so it answers no more; the reason goes to all
    parties.
    """


def joint_method(method: Method) -> Tvfl:
    """Return the method if its parties can predict together; otherwise raise ModelError."""
    if not isinstance(method, Tvfl):
        raise ModelError(
            f"{method.public_facts.title} trains no model that parties predict with together; "
            "tvfl, split_nn, split_nn_sum and joint_teacher_sum do"
        )
    return method


def _session_key(contract: Contract, passive: str) -> bytes:
    """Return the session identifier of one passive's ID lookup, 32 bytes, bound to
    this contract.
    """
    return hashlib.blake2b(contract.digest + passive.encode(), digest_size=32).digest()


def collect_network_states(role: Role) -> dict[str, Tensor]:
    """Return the trained tensors that a role keeps for joint prediction after training."""
    return {
        key: value
        for name, network in role.predicts_with.items()
        for key, value in add_prefix(name, network.state_dict()).items()
    }


def load_network_states(
    networks: Mapping[str, nn.Module], states: Mapping[str, Tensor], party: str
) -> None:
    """Load tensors from `collect_network_states`. Raises ModelError: they fit other networks.

    `states`: tensors by name.
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
    """Run a passive's whole prediction session: answer until the active ends it.

    Args:
        party: the party; its table has the people that may be asked about.
        states: the network tensors that it stored after training.

    Raises ModelError: the tensors are of another model; LimitReachedError: see `ServingLimits`.
    """
    require_overlaps_shown(party.config.alignment, party.name)
    contract = (await enter_session(party, links, method)).contract
    ids = canonical_ids(party.name, party.data.table.ids, party.config.alignment)
    holder = Holder(ids, session=_session_key(contract, party.name))
    helper = method.build_passive(party, contract, torch.from_numpy(holder.order))
    assert isinstance(helper, EncodingPassive)
    load_network_states(helper.predicts_with, states, party.name)
    ledger = helper.ledgers.get(party.name)
    cost = ledger.would_cost if ledger else None
    exhausted = limits.list_exhausted_people([ids[row] for row in holder.order], cost)
    await helper.set_up(links)
    await meet_active(links, party.active)
    links.send(party.active, Kind.LOOKUP, BEFORE_TRAINING, holder.published)
    while True:
        message = await links.receive(
            party.active, Kind.LOOKUP, Kind.REQUEST, Kind.END, patience=FOR_THE_ACTIVE
        )
        if message.kind is Kind.END:
            return
        if message.kind is Kind.LOOKUP:
            tags = holder.answer(message.payload, sender=party.active, maximum=contract.batch_size)
            limits.count_lookups(len(tags) // TAG_BYTES)
            new_exhausted = np.array(exhausted, _PLACES).tobytes()
            exhausted = []
            links.send(party.active, Kind.LOOKUP, message.step, tags + new_exhausted)
        else:
            places_B, salt = _parse_request(message, len(ids))
            people = [ids[row] for row in holder.order[places_B.numpy()]]
            limits.count_answers(people, cost)
            await helper.predict(links, message, _hash_people(people, salt))
            exhausted += places_B[limits.list_exhausted_people(people, cost)].tolist()


def _pack_request(places_B: Tensor, salt: bytes) -> bytes:
    """Encode a prediction request: positions in the passive's list, (B,), and a salt."""
    return pack_tensors({"rows": places_B}, {"learn": False, "salt": salt})


def _parse_request(message: Envelope, aligned: int) -> tuple[Tensor, bytes]:
    """Return the requested positions, and the salt for the digest of their people.

    `aligned`: number of alignment positions.

    Raises RemoteProtocolError: the request breaks a rule.
    """
    expected = {"rows": TensorSpec(torch.int64, (None,))}
    tensors, meta = unpack_tensors(message.payload, expected, sender=message.sender)
    check_rows(tensors["rows"], aligned=aligned, minimum=1, sender=message.sender)
    salt = meta.get("salt")
    if type(salt) is not bytes or len(salt) != KEY_BYTES:
        raise RemoteProtocolError(f"{message.sender} sent a request without a salt of 32 bytes")
    return tensors["rows"], salt


def _parse_places(message: bytes, size: int, *, sender: str) -> NDArray[np.int64]:
    """Return positions in a list of this size. Raises RemoteProtocolError: the bytes encode no such
    positions.
    """
    parsed_bytes = len(message) // _PLACES.itemsize * _PLACES.itemsize
    places = np.frombuffer(message[:parsed_bytes], _PLACES)
    if parsed_bytes < len(message) or ((places < 0) | (places >= size)).any():
        raise RemoteProtocolError(
            f"{sender} named people about whom it answers no more, of whom not all are among its "
            f"{size}"
        )
    return places


def _hash_people(people: Sequence[bytes], salt: bytes) -> bytes:
    """Return a salted digest of these people; without the salt it does not reveal who they are."""
    content = hashlib.blake2b(key=salt, digest_size=32)
    for person in people:
        content.update(len(person).to_bytes(4, "big") + person)
    return content.digest()


async def add_up(party: PartyContext, links: Links, method: Tvfl) -> None:
    """Run the aggregator's whole prediction session."""
    contract = (await enter_session(party, links, method)).contract
    helper = method.build_aggregator(party, contract)
    await helper.set_up(links)
    await meet_active(links, party.active)
    await helper.run_session(links, lambda step: b"")


class JointPredictor:
    """The active's end of a session; see `start_session`.

    Attributes:
        contract: of the session.
        ended: the reason if the others answer no more.
        refused: rows of people whom all parties know, but about whom one answers no more.
    """

    def __init__(
        self, party: PartyContext, links: Links, contract: Contract, trainer: HeadTrainer
    ) -> None:
        """Prepare one party's side before the IDs are exchanged; `start_session` completes it."""
        self.ended: RemoteProtocolError | None = None
        self.refused = 0
        self.contract = contract
        self._party = party
        self._links = links
        self._trainer = trainer
        self._sum = (
            SessionSum.from_contract(party, contract).make_active_end()
            if contract.secure_sum
            else None
        )
        self._step = 0
        self._askers: dict[str, Asker] = {}
        self._exhausted: dict[str, NDArray[np.bool_]] = {}

    @classmethod
    async def start_session(
        cls, party: PartyContext, links: Links, method: Tvfl, states: Mapping[str, Tensor]
    ) -> "JointPredictor":
        """Agree on a contract, set up the sum, and receive each passive's blinded IDs.

        Args:
            party: the active; its table is of no person: one row as the model reads them.
            states: the network tensors that it stored after training.
        """
        require_overlaps_shown(party.config.alignment, party.name)
        contract = (await enter_session(party, links, method, session=new_session())).contract
        trainer = method.make_head_trainer(party, contract)
        load_network_states({"encoder": trainer.encoder, "head": trainer.head}, states, party.name)
        trainer.set_training(False)
        self = cls(party, links, contract, trainer)
        if self._sum is not None:
            await self._sum.set_up(links)
        await meet_all(links, self._helpers)
        for name in contract.passives:
            message = await links.receive(name, Kind.LOOKUP, step=BEFORE_TRAINING)
            self._askers[name] = Asker(
                message.payload,
                holder=name,
                session=_session_key(contract, name),
                maximum=party.config.alignment.maximum_ids,
            )
            # The last entry is for unknown people.
            self._exhausted[name] = np.zeros(self._askers[name].size + 1, dtype=bool)
        return self

    @property
    def _helpers(self) -> list[str]:
        return [*self.contract.passives, *self.contract.list_names("aggregator")]

    def end_session(self) -> None:
        end_all(self._links, self._helpers, self._step)

    async def predict(
        self, ids: Sequence[bytes], features_BF: Tensor
    ) -> tuple[NDArray[np.bool_], Tensor]:
        """Return a mask of people about whom all passives answer, (B,), and their scores, (n, K).

        A person who stands in several rows is requested once. If answers end midway, the scores so
        far are returned, `ended` gives the reason, and the other people are masked out. Raises as
        `serve_predictions`, and PartyLeftError: a party left, or a limit is reached.

        `features_BF`: the active's rows.
        """
        people, row_of_B = np.unique(np.array(ids, dtype=object), return_inverse=True)
        known_P = np.zeros(len(people), dtype=bool)
        answers = list[dict[str, Tensor]]()
        refused_P = known_P.copy()
        for start in range(0, len(people), self.contract.batch_size):
            block = slice(start, start + self.contract.batch_size)
            try:
                places = await self._request_positions([*people[block]])
                is_known = places.min(axis=0) >= 0
                refused_P[block] = (places != _UNKNOWN).all(axis=0) & ~is_known
                if is_known.any():
                    answers.append(
                        await self._request_parts([*people[block][is_known]], places[:, is_known])
                    )
            except RemoteProtocolError as error:
                if not answers:
                    raise
                self.ended = error
                break
            known_P[block] = is_known
        known_B = known_P[row_of_B]
        self.refused += int(refused_P[row_of_B].sum())
        if not answers:
            return known_B, torch.empty(0, 0)
        position_P = np.cumsum(known_P) - 1
        rows_n = torch.from_numpy(position_P[row_of_B[known_B]])
        parts = {
            name: torch.cat([answer[name] for answer in answers])[rows_n] for name in answers[0]
        }
        trainer = self._trainer
        with torch.no_grad(), trainer.compute.prepare_forward(0, "together"):
            own_nD = trainer.encoder(
                trainer.compute.move_tensor(features_BF[torch.from_numpy(known_B)])
            )
            return known_B, trainer.compute_scores(own_nD, parts).double().cpu()

    async def _request_positions(self, ids: Sequence[bytes]) -> NDArray[np.int64]:
        """Return each person's position in each passive's list, (M, B), or a negative code of why
        none.
        """
        for name, asker in self._askers.items():
            self._links.send(name, Kind.LOOKUP, self._step, asker.ask(ids))
        all_positions = []
        end = len(ids) * TAG_BYTES
        for name, asker in self._askers.items():
            answer = (await self._links.receive(name, Kind.LOOKUP, step=self._step)).payload
            positions = asker.parse_answer(answer[:end], len(ids))
            exhausted = self._exhausted[name]
            exhausted[_parse_places(answer[end:], asker.size, sender=name)] = True
            all_positions.append(np.where(exhausted[positions], _REFUSED, positions))
        return np.stack(all_positions)

    async def _request_parts(
        self, people: Sequence[bytes], places_MB: NDArray[np.int64]
    ) -> dict[str, Tensor]:
        """Return the head's inputs from the other parties for these people, by part.

        `places_MB`: positions of the people in each passive's list.
        """
        step = self._step
        links = self._links
        trainer = self._trainer
        salt = fresh_key()
        places = dict(zip(self._askers, torch.from_numpy(places_MB), strict=True))
        for name, places_B in places.items():
            links.send(name, Kind.REQUEST, step, _pack_request(places_B, salt))
        self._step += 1
        terms = {name: passive.representation for name, passive in self.contract.passives.items()}
        if self._sum is not None:
            rows_B = torch.arange(places_MB.shape[1])
            representation = next(iter(terms.values()))
            numbers = math.prod(representation.shape)
            return {
                SUM: trainer.compute.move_tensor(
                    await self._sum.receive_sum(
                        links, step, rows_B, _hash_people(people, salt), numbers
                    )
                )
            }
        read = {}
        for name, places_B in places.items():
            answer = await links.receive(name, Kind.REPRESENTATIONS, step=step)
            answered_B, h_BD = parse_representations(
                answer, terms[name], aligned=self._askers[name].size, minimum=1
            )
            if not torch.equal(answered_B, places_B):
                raise RemoteProtocolError(f"{name} answered for other people than asked")
            read[name] = trainer.compute.move_tensor(h_BD)
        return read
