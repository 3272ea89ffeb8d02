"""Joint prediction between organisations: the passives serve, the active sends requests.

Run by: each passive and the aggregator, which serve session after session (`serve_party`), and the
active, which asks about the people of a file (`predict_jointly`). The active falls back to its solo
model if a passive does not know a person, has left, or has reached a limit, for the person or in
all. Protects a passive from: an active that sends too many requests. Its book counts in all
sessions, on the disk, before an answer leaves.
"""

import datetime as dt
import hashlib
import itertools
import math
import os
import sqlite3
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from apfed_protocols.ids import encode_pieces
from apfed_protocols.randomness import fresh_key
from apfed_protocols.seal import Identity
from secure_apfed.alignment import require_overlaps_shown
from secure_apfed.alignment.ids import IdFile, make_id_rules
from secure_apfed.base.files import PathLike, load_json, open_regular, refuse_replacing_input
from secure_apfed.base.formats import CONTRACT
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.contract import Contract
from secure_apfed.data import OwnData, PartyTable, load_blocks
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.exchange import Links, StatusTracker, Transcript, Transport, run_role
from secure_apfed.exchange.resumable_link import Missed, Refusal
from secure_apfed.learning.own_code import OwnCode
from secure_apfed.methods import METHODS, PartyContext, fresh_secrets
from secure_apfed.methods.alignment import DEALER
from secure_apfed.methods.joint import Tvfl
from secure_apfed.methods.serving import (
    JointPredictor,
    LimitReachedError,
    require_joint_method,
    serve_predictions,
    serve_sums,
)
from secure_apfed.organisations.counters import ANSWER_BOOK
from secure_apfed.organisations.party import (
    Connect,
    PartyFile,
    ServeSettings,
    connect_peers,
    connect_with_audit,
    load_party_data,
    require_own_limits,
)
from secure_apfed.organisations.revocation import FilesReplacedError, RevocationWatch, SessionFiles
from secure_apfed.runs.folder import (
    PROJECT_ENDED,
    PartyFolder,
    load_ending,
    require_open_project,
)
from secure_apfed.runs.keeper import JointNetworkCard, load_joint_network
from secure_apfed.runs.solo import (
    Predictions,
    RowComparison,
    SoloModel,
    load_model,
    row_writer,
)
from secure_apfed.settings.promises import NOTHING_SENT, Promise, promise_of_party
from secure_apfed.settings.run import TranscriptSettings

__all__ = ["AnswerBook", "JointPredictionCounts", "predict_jointly", "serve_party"]

_JOINTLY = "jointly"
_ALONE = "alone"
_REFUSED_S = 10.0  # how long an active waits for a refused peer: others retry every second


def _read_run_name(folder: PartyFolder) -> str:
    """Return the run's name from the contract in a party's folder.

    Raises CheckpointError: the folder has no contract, or a damaged one.
    """
    try:
        document = load_json(folder.contract, dict[str, Any])["document"]
        # Raises CheckpointError if the contract has a format that this version cannot read.
        CONTRACT.parse_format_number(folder.contract, document)
        return Contract.model_validate(document).run
    except (KeyError, ValidationError) as error:
        raise CheckpointError(f"{folder.contract} holds no contract of a run: {error}") from error


class AnswerBook:
    """A passive's record of the predictions that it helped to make in all sessions; it stores keyed
    hashes of people's IDs.

    Args:
        path: a file on this machine's disk that only its owner can read.
        me: the passive.
        limits: those of its file.
        people: number of people who may be asked about; limits that are not set follow from it.
        budget: the epsilon that all predictions of one person may cost; None: only the limits bound
            it.
        run: name of the run whose model predicts.
        today: returns the day (UTC) for which predictions are counted.

    Raises:
        CheckpointError: the file is no record of predictions, or one of another party or run.
    """

    def __init__(
        self,
        path: Path,
        me: str,
        limits: ServeSettings,
        *,
        people: int,
        budget: float | None = None,
        run: str = "",
        today: Callable[[], str] = lambda: f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
    ) -> None:
        """Open the SQLite file, or create it for this party and run; see the class."""
        self._me = me
        self._limits = limits.limits_for(people)
        self._today = today
        self._budget = budget
        os.close(open_regular(path, create=True))
        self._book = sqlite3.connect(path, isolation_level=None)
        try:
            self._book.execute("PRAGMA synchronous = FULL")
            self._book.execute("CREATE TABLE IF NOT EXISTS hashed (at PRIMARY KEY, under BLOB)")
            self._book.execute("INSERT OR IGNORE INTO hashed VALUES (0, ?)", (fresh_key(),))
            self._book.execute("CREATE TABLE IF NOT EXISTS counted (what PRIMARY KEY, times)")
            # How often anything was counted, which the audit log records of this book.
            self._book.execute("CREATE TABLE IF NOT EXISTS running (at PRIMARY KEY, changes)")
            self._book.execute("INSERT OR IGNORE INTO running VALUES (0, 0)")
            self._book.execute("CREATE TABLE IF NOT EXISTS whose (at PRIMARY KEY, party, run)")
            self._book.execute("INSERT OR IGNORE INTO whose VALUES (0, ?, ?)", (me, run))
            (self._key,) = self._book.execute("SELECT under FROM hashed").fetchone()
            owner = self._book.execute("SELECT party, run FROM whose").fetchone()
        except (sqlite3.Error, TypeError) as error:
            self._book.close()
            raise CheckpointError(
                f"{path} is no book of answers ({error}); put it back from a copy: without it "
                "nobody knows what was answered"
            ) from error
        if owner != (me, run):
            self._book.close()
            raise CheckpointError(
                f"{path} is the book of answers of {owner[0]!s:.80} in another run or of another "
                f"party, this is {me}; put back the book of this run"
            )

    def close(self) -> None:
        self._book.close()

    def count_lookups(self, count: int) -> None:
        """Count this number of looked-up IDs against the day's limit. Raises LimitReachedError."""
        with self._open_transaction():
            self._count_use("lookups_a_day", self._today(), count)

    def count_answers(
        self, people: Sequence[bytes], would_cost: Callable[[int], float] | None
    ) -> None:
        """Count one prediction of each of these people. Raises LimitReachedError; then none counts.

        `people`: IDs of these people. `would_cost`: returns the epsilon of a number of predictions
        of one person; None: there is no noise.
        """
        with self._open_transaction():
            most_answers = max(
                self._count_use("a_person", self._hash_person(person)) for person in people
            )
            if would_cost is not None and self._budget is not None:
                self._require_limit("epsilon", would_cost(most_answers), self._budget)
            self._count_use("a_day", self._today(), len(people))
            self._count_use("in_all", "", len(people))

    def list_exhausted_people(
        self, people: Sequence[bytes], cost: Callable[[int], float] | None
    ) -> list[int]:
        """Return the indices of those people of whom no more predictions are allowed.

        `people`: IDs of these people. `cost`: returns the epsilon of a number of predictions of one
        person; None: there is no noise.
        """
        limit = self._limits.a_person
        if cost is not None and self._budget is not None:
            # The largest number of predictions whose epsilon is within the budget.
            limit = bisect_right(range(1, limit + 1), self._budget, key=cost)
        return [index for index, person in enumerate(people) if self._count_times(person) >= limit]

    def _count_times(self, person: bytes) -> int:
        """Return how many predictions of this person the passive took part in."""
        key = f"a_person {self._hash_person(person)}"
        row = self._book.execute("SELECT times FROM counted WHERE what = ?", (key,)).fetchone()
        return row[0] if row else 0

    def _hash_person(self, person: bytes) -> str:
        """Return the keyed hash under which predictions of a person are counted."""
        return hashlib.blake2b(person, key=self._key, digest_size=16).hexdigest()

    def _count_use(self, limit: str, subject: str, count: int = 1) -> int:
        """Add to a counter of one limit; return its new value. Raises LimitReachedError.

        `limit`: key of `ServeSettings`. `subject`: which of its counters: a hashed person, a day,
        or "" for the only one.
        """
        times: int
        (times,) = self._book.execute(
            "INSERT INTO counted VALUES (?, ?) ON CONFLICT (what) DO UPDATE "
            "SET times = times + excluded.times RETURNING times",
            (f"{limit} {subject}", count),
        ).fetchone()
        self._require_limit(limit, times, getattr(self._limits, limit))
        return times

    def _require_limit(self, limit: str, value: float, maximum: float) -> None:
        """Raise LimitReachedError if a value exceeds the maximum of this limit.

        `limit`: key of `ServeSettings`, for the error.
        """
        if value > maximum:
            raise LimitReachedError(
                f"{self._me} answers no more: the limit serve.{limit} of its file is {maximum:g}, "
                f"and this would be {value:.4g}"
            )

    @contextmanager
    def _open_transaction(self) -> Iterator[None]:
        """Run the `with` block as one transaction on the disk; an error undoes what it counted."""
        self._book.execute("BEGIN IMMEDIATE")
        with self._book:  # commits at the end, or rolls back
            self._book.execute("UPDATE running SET changes = changes + 1")
            yield


class _ServeMeter:
    """The privacy guarantee of a party that serves joint predictions, for all predictions of one
    person.

    Without noise there is none; with noise it is the budget at which `AnswerBook` ends them.
    """

    charges = 0

    def __init__(self, config: Config, file: PartyFile) -> None:
        """Compute the privacy guarantee from the run's settings and the party's file."""
        if file.party not in file.passives:
            reason = "a prediction asks it for nothing of its rows"
            self.promise = Promise(figure=config.method.figure, epsilon=None, why=reason)
            return
        self.promise = promise_of_party(config, "passive", ())
        if self.promise.state == NOTHING_SENT:  # nothing was sent yet, and noise is agreed
            budget = _compute_budget(config, file.serve)
            reason = ""
            if budget is None:
                reason = "no budget ends the answers about one person; give serve.epsilon"
            epsilon = math.inf if budget is None else budget
            self.promise = replace(self.promise, epsilon=epsilon, delta=config.delta, why=reason)


@dataclass(frozen=True)
class _JointParty:
    """A party that takes part in joint prediction.

    Attributes:
        file: the party's file, without the dealer among its peers.
        config: the run's settings.
        method: the run's method.
        folder: the party's folder.
        run: the run's name in the contract.
        card: card of the party's network; None: it has none, as an aggregator.
        tensors: the network's tensors, by name.
        code: the party's user-defined networks.
    """

    file: PartyFile
    config: Config
    method: Tvfl
    folder: PartyFolder
    run: str
    card: JointNetworkCard | None
    tensors: Mapping[str, Tensor]
    code: OwnCode

    @classmethod
    def from_file(cls, path: Path) -> "_JointParty":
        """Load a party's settings, run and network, and check that it may predict jointly.

        Raises ConfigError, CheckpointError: it may not, or a file is missing or damaged.
        """
        file = PartyFile.from_file(path)
        require_open_project(file.folder)
        config = load_config(file.config)
        folder = PartyFolder(file.folder)
        require_own_limits(file, config)
        method = require_joint_method(METHODS[config.method.name])
        require_overlaps_shown(config.alignment, file.party)
        peers = {name: peer for name, peer in file.peers.items() if name != DEALER}
        card = None
        tensors = dict[str, Tensor]()
        if file.party == file.active or file.party in file.passives:
            card, tensors = load_joint_network(folder, file.party)
        file = file.model_copy(update={"peers": peers})
        code = OwnCode.from_settings(file.code, code_folder=file.code_folder)
        return cls(file, config, method, folder, _read_run_name(folder), card, tensors, code)

    def load_local_model(self) -> SoloModel:
        """Load the model that predicts without the others; its code is what the party's file names.

        Raises ModelError: the stored model does not fit.
        """
        # Without a model of its own, a method leaves one whose head is of this library.
        head = self.code.head if self.method.settings.predicts_alone else None
        return load_model(self.folder.path, encoder=self.code.encoder, head=head)

    @contextmanager
    def open_links(
        self, data: OwnData | None, connect: Connect, status: StatusTracker
    ) -> Iterator[tuple[PartyContext, Links, Any]]:
        """Connect to the peers; yield this party's context, links and transport.

        `data`: the party's data; None: an aggregator. `connect`: connects to the peers. `status`:
        records the state of all links.
        """
        file = self.file
        identity = self.folder.load_identity()
        meter = _ServeMeter(self.config, file)
        with connect_with_audit(file, identity, meter, status, connect) as (
            identities,
            audit,
            transport,
        ):
            record = Transcript(TranscriptSettings(keep="none")).record_envelope
            links = Links(
                file.party,
                list(file.peers),
                transport.send_frame,
                record,
                observers=(RevocationWatch(file), audit, status),
            )
            context = PartyContext(
                config=self.config,
                name=file.party,
                active=file.active,
                passives=file.passives,
                secrets=fresh_secrets(self.config, file.party, identity=identity),
                known=identities,
                data_or_none=data,
                predicts=self.run,
                code=self.code,
            )
            yield context, links, transport


@isolate_torch_modes()
def serve_party(
    path: PathLike,
    *,
    sessions: int | None = None,
    connect: Connect = connect_peers,
    status: StatusTracker | None = None,
    on_session: Callable[[str], None] = lambda how: None,
) -> None:
    """Serve joint predictions by a party's file, session after session.

    Args:
        path: the party's file.
        sessions: the number of sessions after which it ends; None: it runs until the process ends.
        connect: connects to the peers.
        status: records the state of all links; None: nobody reads it.
        on_session: called with how each session ended, and when one restarts because the party's
            file, its certificate or its revocation list was replaced in between.

    Raises ConfigError, DataError, ModelError: the file, the table or the stored model does not fit.

    Examples:
        In the folder of a run that a bank trained with two passives and an aggregator. Each party
        calls this in its own process, here in a thread.

        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from secure_apfed import predict_jointly, serve_party
        >>> with ThreadPoolExecutor() as pool:
        ...     for party in ("shop", "clinic", "aggregator"):
        ...         served = pool.submit(serve_party, f"parties/{party}/party.yaml", sessions=1)
        ...     counts = predict_jointly("parties/bank/party.yaml", "new.csv", "served.csv")
        >>> served.exception(), counts.jointly + counts.alone
        (None, 40)
    """
    path = Path(path)
    party = _JointParty.from_file(path)
    status = status or StatusTracker()
    file = party.file
    if file.party == file.active:
        raise ConfigError(
            f"{file.party} is the active, which asks: secure-apfed predict --jointly {path}"
        )
    data = None
    served = 0
    if party.card is not None:
        data = _load_served_table(party, party.card)
    with party.folder.lock_exclusively(), status:
        while sessions is None or served < sessions:
            if load_ending(party.folder.path) is not None:
                on_session(
                    f"the project of {file.party} was ended in its folder: it serves no more"
                )
                break
            session_files = SessionFiles(path, file, file.folder / PROJECT_ENDED, say=on_session)
            limits = PartyFile.from_file(
                path
            ).serve  # which may have changed since the last session
            party = replace(party, file=party.file.model_copy(update={"serve": limits}))
            try:
                with ExitStack() as stack:
                    meet_checked = _require_while_meeting(connect, session_files.require_same)
                    context, links, transport = stack.enter_context(
                        party.open_links(data, meet_checked, status)
                    )
                    if data is None:
                        script = serve_sums(context, links, party.method)
                    else:
                        new_book = _open_book(party, people=len(data.table.ids))
                        book = stack.enter_context(closing(new_book))
                        script = serve_predictions(
                            context, links, party.method, party.tensors, book
                        )
                    run_role(script, links, transport, timeout_s=file.timeout_s, observer=status)
                on_session("a session ended")
            except FilesReplacedError as replaced:
                on_session(str(replaced))
                continue
            except (RemoteProtocolError, ConnectionError) as error:
                on_session(f"a session broke off: {error}")
            served += 1


def _require_while_meeting(connect: Connect, require: Missed) -> Connect:
    """Return a function that connects as `connect` does, and calls `require` while it waits.

    `require`: called with the missing peers; it may raise to end the wait.
    """

    def meet_and_check(
        file: PartyFile,
        identity: Identity,
        identities: Mapping[str, bytes],
        report_missing: Missed = lambda missing: None,
    ) -> Transport:
        """Connect to the peers; report missing ones, and raise what `require` raises.

        `file`: the party's file. `identity`: its key pair. `identities`: public identities of all
        parties. `report_missing`: called with the peers that have not come, and the reasons.
        """

        def check_missing(missing: Mapping[str, str]) -> None:
            """Report the missing peers, then call `require`."""
            report_missing(missing)
            require(missing)

        return connect(file, identity, identities, check_missing)

    return meet_and_check


class _Refusals:
    """A record of the refusals that an active meets while it connects.

    Unlike silence, a refusal does not end by itself: a party that is still refused after
    `_REFUSED_S`, in which others retry every second, has to act first, for example to renew a
    revoked certificate.
    """

    def __init__(self, me: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without refusals; `me`: the active. `clock`: returns seconds."""
        self._me = me
        self._clock = clock
        self._refused_since: dict[str, float] = {}

    def require_bearable(self, missing: Mapping[str, str]) -> None:
        """Raise PartyLeftError if a party was refused, or refused this one, for `_REFUSED_S`.

        `missing`: missing party -> the reason, which is a `Refusal` or another text.
        """
        now = self._clock()
        refused = {name: cause for name, cause in missing.items() if isinstance(cause, Refusal)}
        self._refused_since = {name: self._refused_since.get(name, now) for name in refused}
        if not refused or now - min(self._refused_since.values()) < _REFUSED_S:
            return
        names = " and ".join(refused)
        causes = "; ".join(dict.fromkeys(refused.values()))
        raise PartyLeftError(
            f"prediction: {self._me} has no link to {names}: {causes}; ask again once that is done",
            left=tuple(refused),
        )


def _open_book(party: _JointParty, *, people: int) -> AnswerBook:
    """Open the party's record of predictions, with its limits and budget."""
    path = party.folder.path / ANSWER_BOOK
    limits = party.file.serve
    budget = _compute_budget(party.config, limits)
    return AnswerBook(path, party.file.party, limits, people=people, budget=budget, run=party.run)


def _compute_budget(config: Config, limits: ServeSettings) -> float | None:
    """Return the epsilon that all predictions of one person may cost.

    It is that of the party's file, of the run's guard, or of the noise under sums; None: there is
    none of these.
    """
    noise = config.method.find_noise(config)
    return limits.epsilon or config.guard.epsilon or (noise.epsilon if noise else None)


def _load_served_table(party: _JointParty, card: JointNetworkCard) -> OwnData:
    """Return the table of the people who may be asked about, encoded for this passive's network.

    `card`: what is stored beside the network, with the encoding of its columns.

    Raises DataError: the table does not have the columns of the training.
    """
    file = party.file
    config = party.config
    if file.serve.table is None:
        data = load_party_data(file, config, "passive")
        assert data is not None
        if data.table.encoding != card.encoding:
            raise DataError(
                f"{file.party}: its table is no longer the one of the training, whose columns were "
                "read otherwise; name the table of who may be asked about as serve.table"
            )
        return data
    columns = _find_id_columns(config, file.party)
    blocks = load_blocks(file.serve.table, card.encoding, id_columns=columns)
    features_NF = torch.cat([features for _, features in blocks])
    ids = [
        person
        for piece in IdFile(file.party, file.serve.table, columns).pieces()
        for person in piece
    ]
    table = PartyTable(file.party, tuple(ids), features_NF, None, card.encoding)
    return OwnData(table=table)


def _find_id_columns(config: Config, party: str) -> tuple[str, ...]:
    """Return the ID columns of a party's table. Raises ConfigError: the data are a built-in set."""
    if config.data.parties is None:
        raise ConfigError(
            f"{party}: people are asked about by the IDs of own tables; data.parties names none"
        )
    return config.data.id_columns(party)


@dataclass(frozen=True, kw_only=True)
class JointPredictionCounts:
    """Counts of rows predicted jointly and locally.

    Attributes:
        alone: rows predicted locally, by the active's local model.
        refused: those of them whose person has reached a limit at a passive.
        seconds: how long the prediction took.
        why: the reason if joint prediction ended early.
    """

    jointly: int
    alone: int
    refused: int
    seconds: float
    why: str = ""

    @property
    def is_failure(self) -> bool:
        """True if it ended early, or if all rows that passives know were refused."""
        return bool(self.why or (self.refused and not self.jointly))


@dataclass(frozen=True)
class _Block:
    """Rows of the file that are predicted together.

    Attributes:
        names: IDs of the rows as in the file.
        ids: the same IDs, normalised and encoded.
        features: (B, *shape).
    """

    names: tuple[str, ...]
    ids: list[bytes]
    features: Tensor


@isolate_torch_modes()
def predict_jointly(
    path: PathLike,
    data: PathLike,
    output: PathLike | None = None,
    *,
    connect: Connect = connect_peers,
    status: StatusTracker | None = None,
    write: Callable[[pd.DataFrame], None] | None = None,
) -> JointPredictionCounts:
    """Predict the rows of a file with the model of all parties, or locally where that is
    impossible.

    Args:
        path: the active's file.
        data: CSV or Parquet with its columns and IDs.
        output: .csv, .parquet or .json, which appears when it is complete; None: `write` receives
            the rows block by block.
        connect: connects to the peers.
        status: records the state of all links; None: nobody reads it.
        write: called with a frame of each block of predictions, if there is no `output`.

    Raises ConfigError, DataError, ModelError: the file, the rows or the stored model does not fit.

    Examples:
        In the folder of a run that a bank trained with two passives and an aggregator, which serve
        in their own processes, here in threads.

        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from secure_apfed import predict_jointly, serve_party
        >>> with ThreadPoolExecutor() as pool:
        ...     for party in ("shop", "clinic", "aggregator"):
        ...         served = pool.submit(serve_party, f"parties/{party}/party.yaml", sessions=1)
        ...     counts = predict_jointly("parties/bank/party.yaml", "new.csv", "predicted.csv")
        >>> counts.jointly, counts.alone  # alone: people whom a passive does not know
        (35, 5)
    """
    path = Path(path)
    data = Path(data)
    if output is not None:
        output = Path(output)
        refuse_replacing_input(output, "--output", data, path, PartyFile.from_file(path).folder)
        with row_writer(output) as written:
            return predict_jointly(path, data, connect=connect, status=status, write=written)
    assert write is not None
    party = _JointParty.from_file(path)
    status = status or StatusTracker()
    if party.card is None or party.file.party != party.file.active:
        raise ConfigError(f"{party.file.party} is not the active, which alone predicts")
    asking = _JointPrediction(party, party.card, _iterate_blocks(party, party.card, data), write)
    with party.folder.lock_exclusively(), status:
        try:
            meet_checked = _require_while_meeting(
                connect, _Refusals(party.file.party).require_bearable
            )
            with party.open_links(_make_dummy_data(party.card), meet_checked, status) as (
                context,
                links,
                transport,
            ):
                script = asking.predict_blocks(context, links)
                run_role(script, links, transport, timeout_s=party.file.timeout_s, observer=status)
        except (RemoteProtocolError, ConnectionError) as error:
            asking.why = str(error)
        asking.predict_rest()
    return asking.count_predictions()


class _JointPrediction:
    """The joint prediction of a file's rows, with the local model as fallback."""

    def __init__(
        self,
        party: _JointParty,
        card: JointNetworkCard,
        blocks: Iterator[_Block],
        write: Callable[[pd.DataFrame], None],
    ) -> None:
        """Load the local model, for people who cannot be predicted jointly.

        `party`: the active. `card`: card of its joint network. `blocks`: the rows. `write`: called
        with a frame of each block of predictions.
        """
        self._party = party
        self._blocks = blocks
        self._write = write
        self._solo = party.load_local_model()
        self._classes = card.classes
        self._pending: _Block | None = None
        self._counts = Counter[str]()
        self._start_time = time.monotonic()
        self.why = ""
        self._refused = 0

    async def predict_blocks(self, context: PartyContext, links: Links) -> None:
        """Predict block after block with the other parties; raise why they stopped answering.

        `context`: the party in the session. `links`: links to the other parties.
        """
        predictor = await JointPredictor.start_session(
            context, links, self._party.method, self._party.tensors
        )
        for block in self._blocks:
            self._pending = block
            known_B, scores_nK = await predictor.predict(block.ids, block.features)
            self._write_block(block, known_B, scores_nK)
            self._pending = None
            self._refused = predictor.refused
            if predictor.ended is not None:
                raise predictor.ended
        predictor.end_session()

    def predict_rest(self) -> None:
        """Predict the remaining rows with the local model."""
        pending = [self._pending] if self._pending is not None else []
        for block in itertools.chain(pending, self._blocks):
            self._write_block(block, np.zeros(len(block.ids), dtype=bool), torch.empty(0, 0))

    def count_predictions(self) -> JointPredictionCounts:
        """Return how many rows were predicted jointly and locally, and refused."""
        return JointPredictionCounts(
            jointly=self._counts[_JOINTLY],
            alone=self._counts[_ALONE],
            refused=self._refused,
            seconds=time.monotonic() - self._start_time,
            why=self.why,
        )

    def _write_block(self, block: _Block, known_B: NDArray[np.bool_], scores_nK: Tensor) -> None:
        """Write one block: joint predictions of known rows, local ones of the others.

        `known_B`: which rows the other parties know. `scores_nK`: joint scores of these rows, in
        their order.
        """
        jointly_B = torch.from_numpy(known_B)
        task = self._solo.task
        shape = (len(jointly_B), len(self._classes)) if self._classes else (len(jointly_B),)
        outputs_B = torch.empty(shape, dtype=torch.float64)
        if known_B.any():
            outputs_B[jointly_B] = task.decode_outputs(scores_nK).double()
        if not known_B.all():
            outputs_B[~jointly_B] = self._solo.predict(block.features[~jointly_B]).double()
        predicted_by = np.where(known_B, _JOINTLY, _ALONE)
        self._counts.update(predicted_by.tolist())
        predicted = Predictions(
            ids=block.names,
            outputs=outputs_B,
            what=task.tells,
            classes=self._classes,
            decided=self._solo.decide_classes(outputs_B) if self._classes else None,
            compared=RowComparison(rows=len(block.ids)),
        )
        self._write(predicted.to_frame().assign(by=predicted_by))


def _iterate_blocks(
    joint_party: _JointParty, card: JointNetworkCard, data: Path
) -> Iterator[_Block]:
    """Yield the rows of a file in blocks, encoded as the joint network's card says."""
    party = joint_party.file.party
    columns = _find_id_columns(joint_party.config, joint_party.file.party)
    pieces = encode_pieces(
        party, IdFile(party, data, columns), make_id_rules(joint_party.config.alignment)
    )
    ids = itertools.chain.from_iterable(pieces)
    for names, features in load_blocks(data, card.encoding, id_columns=columns):
        yield _Block(names, [*itertools.islice(ids, len(names))], features)


def _make_dummy_data(card: JointNetworkCard) -> OwnData:
    """Return one row of no person, from whose shape the active's networks are built."""
    features = torch.zeros(1, *card.encoding.shape)
    labels = torch.zeros(1) if card.targets else torch.zeros(1).long()
    table = PartyTable("active", ("nobody",), features, labels, card.encoding)
    return OwnData(table=table, classes=card.classes, targets=card.targets)
