"""Joint prediction between organisations: the passives serve, the active sends requests.

Run by: each passive and the aggregator, which serve session after session (`serve_party`), and the
active, which asks about the people of a file (`predict_jointly`). The active falls back to its
local model if a passive does not know a person, has left, or has reached a limit, for the person or
in all. Protects a passive from: an active that sends too many requests. Its book counts in all
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
from secure_apfed.learning.own_code import UserFunctions
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
from secure_apfed.organisations.counters import ANSWER_LOG
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
from secure_apfed.runs.active_model import (
    ActiveModel,
    Predictions,
    RowComparison,
    load_model,
    row_writer,
)
from secure_apfed.runs.checkpoint_store import JointNetworkCard, load_joint_network
from secure_apfed.runs.folder import (
    PROJECT_ENDED,
    PartyFolder,
    load_project_end,
    require_open_project,
)
from secure_apfed.settings import TranscriptSettings
from secure_apfed.settings.promises import NOTHING_SENT, Promise, find_party_guarantee

__all__ = ["AnswerLog", "JointPredictionCounts", "predict_jointly", "serve_party"]

_PREDICTED_JOINTLY = "jointly"
_PREDICTED_LOCALLY = "alone"
_MAX_REFUSAL_S = 10.0  # how long an active waits for a refused peer: others retry every second


def _read_run_name(folder: PartyFolder) -> str:
    """Return the identifier of the run (a digest, hex) from the contract in a party's folder.

    Raises CheckpointError: the folder has no contract, or a damaged one.
    """
    try:
        document = load_json(folder.contract, dict[str, Any])["document"]
        # Called for its error: the contract has a format that this version cannot read.
        CONTRACT.parse_format_number(folder.contract, document)
        return Contract.model_validate(document).run
    except (KeyError, ValidationError) as error:
        raise CheckpointError(f"{folder.contract} holds no contract of a run: {error}") from error


class AnswerLog:
    """A passive's counts of the predictions that it helped to make, over all sessions.

    They limit how much an active can ask. The file, an SQLite database, has keyed hashes of
    people's IDs in place of the IDs.

    Args:
        path: a file on this machine's disk that only its owner can read.
        me: the passive.
        limits: the limits in the passive's settings file.
        people: number of people who may be asked about; limits that are not set follow from it.
        budget: the epsilon that all predictions of one person may cost; None: only numbers of
            predictions are limited.
        run: identifier of the run whose model predicts.
        today: returns the day (UTC) for which predictions are counted.

    Raises:
        CheckpointError: the file has no such counts, or those of another party or run.
    """

    def __init__(
        self,
        path: Path,
        me: str,
        limits: ServeSettings,
        *,
        person_count: int,
        epsilon_budget: float | None = None,
        run: str = "",
        get_today: Callable[[], str] = lambda: f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
    ) -> None:
        """Open the SQLite file, or create it for this party and run.

        The class describes the arguments and errors.
        """
        self._me = me
        self._limits = limits.limits_for(person_count)
        self._get_today = get_today
        self._epsilon_budget = epsilon_budget
        os.close(open_regular(path, create=True))  # refuses links, which SQLite would follow
        self._database = sqlite3.connect(path, isolation_level=None)
        try:
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("CREATE TABLE IF NOT EXISTS hashed (at PRIMARY KEY, under BLOB)")
            self._database.execute("INSERT OR IGNORE INTO hashed VALUES (0, ?)", (fresh_key(),))
            self._database.execute("CREATE TABLE IF NOT EXISTS counted (what PRIMARY KEY, times)")
            # How often anything was counted, which the audit log records of this book.
            self._database.execute("CREATE TABLE IF NOT EXISTS running (at PRIMARY KEY, changes)")
            self._database.execute("INSERT OR IGNORE INTO running VALUES (0, 0)")
            self._database.execute("CREATE TABLE IF NOT EXISTS whose (at PRIMARY KEY, party, run)")
            self._database.execute("INSERT OR IGNORE INTO whose VALUES (0, ?, ?)", (me, run))
            (self._hash_key,) = self._database.execute("SELECT under FROM hashed").fetchone()
            owner_and_run = self._database.execute("SELECT party, run FROM whose").fetchone()
        except (sqlite3.Error, TypeError) as error:
            self._database.close()
            raise CheckpointError(
                f"{path} is no book of answers ({error}); put it back from a copy: without it "
                "nobody knows what was answered"
            ) from error
        if owner_and_run != (me, run):
            self._database.close()
            raise CheckpointError(
                f"{path} is the book of answers of {owner_and_run[0]!s:.80} in another run or of "
                f"another party, this is {me}; put back the book of this run"
            )

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def count_lookups(self, count: int) -> None:
        """Count a number of looked-up IDs for today.

        Raises LimitReachedError: they would exceed the limit of a day; none is counted.
        """
        with self._open_transaction():
            self._count_use("lookups_a_day", self._get_today(), count)

    def count_answers(
        self, people: Sequence[bytes], compute_epsilon: Callable[[int], float] | None
    ) -> None:
        """Count one prediction of each of these people.

        `people`: their IDs. `compute_epsilon`: returns the epsilon of a number of predictions of
        one person; None: predictions have no noise, so none is computed.

        Raises LimitReachedError: they would exceed a limit; none is counted.
        """
        with self._open_transaction():
            most_answers = max(
                self._count_use("a_person", self._hash_person(person)) for person in people
            )
            if compute_epsilon is not None and self._epsilon_budget is not None:
                self._require_limit("epsilon", compute_epsilon(most_answers), self._epsilon_budget)
            self._count_use("a_day", self._get_today(), len(people))
            self._count_use("in_all", "", len(people))

    def list_exhausted_people(
        self, people: Sequence[bytes], compute_epsilon: Callable[[int], float] | None
    ) -> list[int]:
        """Return the indices of the people of whom no more predictions are allowed.

        `people`: IDs of the people in question. `compute_epsilon`: returns the epsilon of a number
        of predictions of one person; None: predictions have no noise, so none is computed.
        """
        max_predictions = self._limits.a_person
        if compute_epsilon is not None and self._epsilon_budget is not None:
            # The largest number of predictions whose epsilon is within the budget.
            max_predictions = bisect_right(
                range(1, max_predictions + 1), self._epsilon_budget, key=compute_epsilon
            )
        return [
            index
            for index, person in enumerate(people)
            if self._count_times(person) >= max_predictions
        ]

    def _count_times(self, person: bytes) -> int:
        """Return in how many predictions of this person the passive took part so far."""
        key = f"a_person {self._hash_person(person)}"
        row = self._database.execute("SELECT times FROM counted WHERE what = ?", (key,)).fetchone()
        return row[0] if row else 0

    def _hash_person(self, person: bytes) -> str:
        """Return the keyed hash under which predictions of a person are counted."""
        return hashlib.blake2b(person, key=self._hash_key, digest_size=16).hexdigest()

    def _count_use(self, limit_name: str, subject: str, count: int = 1) -> int:
        """Add `count` to the counter of a limit; return its new value.

        `limit_name`: name of the limit, a key of `ServeSettings`. `subject`: which of the limit's
        counters: a hashed person, a day, or "" for the only one.

        Raises LimitReachedError: the new value exceeds the limit.
        """
        new_value: int
        (new_value,) = self._database.execute(
            "INSERT INTO counted VALUES (?, ?) ON CONFLICT (what) DO UPDATE "
            "SET times = times + excluded.times RETURNING times",
            (f"{limit_name} {subject}", count),
        ).fetchone()
        self._require_limit(limit_name, new_value, getattr(self._limits, limit_name))
        return new_value

    def _require_limit(self, limit_name: str, value: float, maximum: float) -> None:
        """Raise LimitReachedError if a value exceeds the maximum.

        `limit_name`: name of the limit, a key of `ServeSettings`, for the error.
        """
        if value > maximum:
            raise LimitReachedError(
                f"{self._me} answers no more: the limit serve.{limit_name} of its file is "
                f"{maximum:g}, and this would be {value:.4g}"
            )

    @contextmanager
    def _open_transaction(self) -> Iterator[None]:
        """Run the `with` block as one transaction on the disk; an error undoes what it counted."""
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:  # commits at the end, or rolls back
            # The number of changes is recorded in the audit log, so that an older copy is noticed.
            self._database.execute("UPDATE running SET changes = changes + 1")
            yield


class _ServeMeter:
    """A meter with the privacy guarantee of a party that serves joint predictions.

    The guarantee covers all predictions of one person. Without noise there is none. With noise it
    is the budget: an epsilon at which the passive makes no more predictions of the person.
    """

    charges = 0

    def __init__(self, config: Config, file: PartyFile) -> None:
        """Compute the guarantee.

        `config`: the run's settings. `file`: the party's settings file, with its limits.
        """
        if file.party not in file.passives:
            reason = "a prediction asks it for nothing of its rows"
            self.promise = Promise(figure=config.method.epsilon_name, epsilon=None, why=reason)
            return
        self.promise = find_party_guarantee(config, "passive", ())
        # The parties agreed on noise, and nothing was sent yet.
        if self.promise.state == NOTHING_SENT:
            epsilon_budget = _compute_budget(config, file.serve)
            reason = ""
            if epsilon_budget is None:
                reason = "no budget ends the answers about one person; give serve.epsilon"
            epsilon = math.inf if epsilon_budget is None else epsilon_budget
            self.promise = replace(self.promise, epsilon=epsilon, delta=config.delta, why=reason)


@dataclass(frozen=True)
class _JointParty:
    """A party that takes part in joint prediction.

    Attributes:
        settings_file: the party's settings file, without the dealer among its peers, since it takes
            no part.
        config: the run's settings.
        method: the run's method.
        folder: the party's folder.
        run_id: the run's identifier in the contract.
        network_card: description of the party's network, such as the encoding of its columns; None:
            the party has no network, as an aggregator.
        network_tensors: the network's tensors, by name.
        code: the party's user-defined networks.
    """

    settings_file: PartyFile
    config: Config
    method: Tvfl
    folder: PartyFolder
    run_id: str
    network_card: JointNetworkCard | None
    network_tensors: Mapping[str, Tensor]
    code: UserFunctions

    @classmethod
    def from_file(cls, path: Path) -> "_JointParty":
        """Load a party's settings, run and network, and check that it may predict jointly.

        Raises:
            ConfigError: the run or the party's limits do not allow joint prediction.
            CheckpointError: a file is missing or damaged.
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
        code = UserFunctions.from_settings(file.code, code_folder=file.code_folder)
        return cls(file, config, method, folder, _read_run_name(folder), card, tensors, code)

    def load_local_model(self) -> ActiveModel:
        """Load the active's model that predicts without the other parties.

        Its networks may be user-defined, as the party's settings file names them.

        Raises ModelError: the stored model does not fit these networks.
        """
        # If the run's own model cannot predict alone, a local model was stored in addition, whose
        # head is always one of this library.
        head = self.code.head if self.method.settings.can_predict_locally else None
        return load_model(self.folder.path, encoder=self.code.encoder, head=head)

    @contextmanager
    def open_links(
        self, data: OwnData | None, connect: Connect, status: StatusTracker
    ) -> Iterator[tuple[PartyContext, Links, Any]]:
        """Connect to the peers for a `with` block; yield this party's context, links and transport.

        `data`: the party's data; None at an aggregator. `connect`: connects to the peers. `status`:
        records the state of all links.
        """
        file = self.settings_file
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
                identity_by_party=identities,
                data_or_none=data,
                trained_run=self.run_id,
                own_code=self.code,
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
    """Help the active to make joint predictions, session after session; run by all other parties.

    An error of the connection, or one of another party, ends a session and not this function. It
    also ends once the project is ended in the party's folder.

    Args:
        path: the party's settings file.
        sessions: the number of sessions after which it ends; None: it runs until the process ends.
        connect: connects to the peers.
        status: records the state of all links; None: nobody reads it.
        on_session: called with a sentence when a session ends, and when it restarts since the
            party's settings file, certificate or revocation list was replaced meanwhile.

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
    file = party.settings_file
    if file.party == file.active:
        raise ConfigError(
            f"{file.party} is the active, which asks: secure-apfed predict --jointly {path}"
        )
    data = None
    session_count = 0
    if party.network_card is not None:
        data = _load_served_table(party, party.network_card)
    with party.folder.lock_exclusively(), status:
        while sessions is None or session_count < sessions:
            if load_project_end(party.folder.path) is not None:
                on_session(
                    f"the project of {file.party} was ended in its folder: it serves no more"
                )
                break
            session_files = SessionFiles(
                path, file, file.folder / PROJECT_ENDED, show_line=on_session
            )
            # The limits in the file may have changed since the last session.
            limits = PartyFile.from_file(path).serve
            party = replace(
                party, settings_file=party.settings_file.model_copy(update={"serve": limits})
            )
            try:
                _serve_session(party, data, connect, status, session_files)
                on_session("a session ended")
            except FilesReplacedError as replaced:
                on_session(str(replaced))
                continue
            except (RemoteProtocolError, ConnectionError) as error:
                on_session(f"a session broke off: {error}")
            session_count += 1


def _serve_session(
    party: _JointParty,
    data: OwnData | None,
    connect: Connect,
    status: StatusTracker,
    session_files: SessionFiles,
) -> None:
    """Serve one session of joint predictions to its end.

    Args:
        party: the serving party.
        data: the people who may be asked about; None at an aggregator, which only adds.
        connect: connects to the peers.
        status: records the state of all links.
        session_files: the files that the session uses.

    Raises:
        FilesReplacedError: one of these files was replaced while the party waited for its peers.
        RemoteProtocolError, ConnectionError: the session broke off.
    """
    with ExitStack() as stack:
        connect_checked = _check_while_connecting(connect, session_files.require_same)
        context, links, transport = stack.enter_context(
            party.open_links(data, connect_checked, status)
        )
        if data is None:
            script = serve_sums(context, links, party.method)
        else:
            answer_log = stack.enter_context(
                closing(_open_answer_log(party, person_count=len(data.table.ids)))
            )
            script = serve_predictions(
                context, links, party.method, party.network_tensors, answer_log
            )
        run_role(script, links, transport, timeout_s=party.settings_file.timeout_s, observer=status)


def _check_while_connecting(connect: Connect, check: Missed) -> Connect:
    """Return a function that connects as `connect` does, and calls `check` while it waits.

    `check`: called repeatedly with the missing peers; it may raise an error to end the wait.
    """

    def connect_and_check(
        file: PartyFile,
        identity: Identity,
        identities: Mapping[str, bytes],
        report_missing: Missed = lambda missing: None,
    ) -> Transport:
        """Connect to the peers; while some are missing, report them and call `check`.

        `file`: the party's settings file. `identity`: its key pair. `identities`: public identities
        of all parties, by name. `report_missing`: called with the missing peers and the reasons.
        """

        def report_and_check(missing: Mapping[str, str]) -> None:
            """Report the missing peers, then call `check`."""
            report_missing(missing)
            check(missing)

        return connect(file, identity, identities, report_and_check)

    return connect_and_check


class _Refusals:
    """A record of the peers that refuse an active, or are refused by it, while it connects.

    Unlike silence, a refusal does not end by itself: somebody has to act, for example to renew a
    revoked certificate. So the active waits for a refused peer for some seconds only.
    """

    def __init__(self, me: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without refusals; `me`: the active. `clock`: returns the time in seconds."""
        self._me = me
        self._clock = clock
        self._refused_since: dict[str, float] = {}  # by peer

    def require_brief(self, reason_by_missing_peer: Mapping[str, str]) -> None:
        """Raise PartyLeftError if a refusal has lasted for `_MAX_REFUSAL_S` seconds.

        `reason_by_missing_peer`: by missing peer, the reason, which is a `Refusal` or another text.
        """
        now = self._clock()
        cause_by_refused = {
            name: cause
            for name, cause in reason_by_missing_peer.items()
            if isinstance(cause, Refusal)
        }
        self._refused_since = {
            name: self._refused_since.get(name, now) for name in cause_by_refused
        }
        if not cause_by_refused or now - min(self._refused_since.values()) < _MAX_REFUSAL_S:
            return
        names = " and ".join(cause_by_refused)
        causes = "; ".join(dict.fromkeys(cause_by_refused.values()))
        raise PartyLeftError(
            f"prediction: {self._me} has no link to {names}: {causes}; ask again once that is done",
            missing_parties=tuple(cause_by_refused),
        )


def _open_answer_log(party: _JointParty, *, person_count: int) -> AnswerLog:
    """Open a passive's counts of predictions, with its limits and its budget of epsilon.

    `person_count`: how many people may be asked about.
    """
    path = party.folder.path / ANSWER_LOG
    limits = party.settings_file.serve
    epsilon_budget = _compute_budget(party.config, limits)
    return AnswerLog(
        path,
        party.settings_file.party,
        limits,
        person_count=person_count,
        epsilon_budget=epsilon_budget,
        run=party.run_id,
    )


def _compute_budget(config: Config, limits: ServeSettings) -> float | None:
    """Return the epsilon that all predictions of one person may cost at a passive; None: no limit.

    The first of these counts: the limit in the passive's settings file (`limits`), the epsilon of
    the run's guard on representations, and the epsilon of noise that is added to secure sums.
    """
    noise = config.method.find_noise(config)
    return limits.epsilon or config.guard.epsilon or (noise.epsilon if noise else None)


def _load_served_table(party: _JointParty, card: JointNetworkCard) -> OwnData:
    """Load the people who may be asked about, encoded for this passive's network.

    They are in the table that the party's settings file names for this, or else in the table of the
    training.

    `card`: description of the network, with the encoding of the columns.

    Raises DataError: the table does not have the columns of the training.
    """
    file = party.settings_file
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
    """Return the names of the ID columns of a party's table.

    Raises ConfigError: the data are a built-in set, whose people have no IDs of their own.
    """
    if config.data.parties is None:
        raise ConfigError(
            f"{party}: people are asked about by the IDs of own tables; data.parties names none"
        )
    return config.data.find_id_columns(party)


@dataclass(frozen=True, kw_only=True)
class JointPredictionCounts:
    """The numbers of rows that were predicted jointly and locally.

    Attributes:
        jointly: rows predicted by the model of all parties.
        alone: rows predicted by the active's local model.
        refused: rows among these that a passive refused, since a limit of the person was reached.
        seconds: how long the prediction took.
        why: the reason if joint prediction ended early; else "".
    """

    jointly: int
    alone: int
    refused: int
    seconds: float
    why: str = ""

    @property
    def is_failure(self) -> bool:
        """True if joint prediction ended early, or made no row and some were refused."""
        return bool(self.why or (self.refused and not self.jointly))


@dataclass(frozen=True)
class _Block:
    """A block of B rows of a file, which are predicted together.

    Attributes:
        id_texts: IDs of the rows as in the file.
        encoded_ids: the same IDs, normalised and encoded.
        features: encoded features of the rows, (B, *shape of one row).
    """

    id_texts: tuple[str, ...]
    encoded_ids: list[bytes]
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
    """Predict the rows of a file with the model of all parties, and the others locally.

    A row is predicted by the active's local model if a passive does not know its person or refuses
    it, and after an error of the connection.

    Args:
        path: the active's settings file.
        data: CSV or Parquet file with the active's columns and IDs.
        output: .csv, .parquet or .json file, which appears when it is complete; None: `write`
            receives the predictions block by block.
        connect: connects to the peers.
        status: records the state of all links; None: nobody reads it.
        write: called with a data frame of predictions for each block; required without `output`.

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
    if party.network_card is None or party.settings_file.party != party.settings_file.active:
        raise ConfigError(f"{party.settings_file.party} is not the active, which alone predicts")
    blocks = _iterate_blocks(party, party.network_card, data)
    prediction = _JointPrediction(party, party.network_card, blocks, write)
    refusals = _Refusals(party.settings_file.party)
    with party.folder.lock_exclusively(), status:
        try:
            connect_checked = _check_while_connecting(connect, refusals.require_brief)
            dummy_data = _make_dummy_data(party.network_card)
            connection = party.open_links(dummy_data, connect_checked, status)
            with connection as (context, links, transport):
                run_role(
                    prediction.predict_blocks(context, links),
                    links,
                    transport,
                    timeout_s=party.settings_file.timeout_s,
                    observer=status,
                )
        except (RemoteProtocolError, ConnectionError) as error:
            prediction.early_end_reason = str(error)
        prediction.predict_rest()
    return prediction.count_predictions()


class _JointPrediction:
    """The prediction of a file's rows by all parties, with the active's local model as fallback.

    Attributes:
        early_end_reason: the reason if joint prediction ended early; else "".
    """

    def __init__(
        self,
        party: _JointParty,
        card: JointNetworkCard,
        blocks: Iterator[_Block],
        write: Callable[[pd.DataFrame], None],
    ) -> None:
        """Load the local model, for people who cannot be predicted jointly.

        Args:
            party: the active.
            card: description of the active's network of joint prediction.
            blocks: the rows to predict.
            write: called with a data frame of predictions for each block.
        """
        self._party = party
        self._blocks = blocks
        self._write = write
        self._local_model = party.load_local_model()
        self._classes = card.classes
        self._unwritten_block: _Block | None = None  # the block that is being predicted jointly
        self._count_by_predictor = Counter[str]()  # rows by how they were predicted
        self._start_time = time.monotonic()
        self.early_end_reason = ""
        self._refused_count = 0

    async def predict_blocks(self, context: PartyContext, links: Links) -> None:
        """Predict block after block with the other parties, and write the predictions.

        `context`: the party in the session. `links`: links to the other parties.

        Raises RemoteProtocolError: the other parties stopped answering, for the reason in its text.
        """
        predictor = await JointPredictor.start_session(
            context, links, self._party.method, self._party.network_tensors
        )
        for block in self._blocks:
            self._unwritten_block = block
            is_joint_B, scores_nK = await predictor.predict(block.encoded_ids, block.features)
            self._write_block(block, is_joint_B, scores_nK)
            self._unwritten_block = None
            self._refused_count = predictor.refused
            if predictor.ended is not None:
                raise predictor.ended
        predictor.end_session()

    def predict_rest(self) -> None:
        """Predict the rows that were not predicted yet with the local model, and write them."""
        interrupted = [self._unwritten_block] if self._unwritten_block is not None else []
        for block in itertools.chain(interrupted, self._blocks):
            is_joint_B = np.zeros(len(block.encoded_ids), dtype=bool)  # none is predicted jointly
            self._write_block(block, is_joint_B, torch.empty(0, 0))

    def count_predictions(self) -> JointPredictionCounts:
        """Return how many rows were predicted jointly and locally so far, and how many refused."""
        return JointPredictionCounts(
            jointly=self._count_by_predictor[_PREDICTED_JOINTLY],
            alone=self._count_by_predictor[_PREDICTED_LOCALLY],
            refused=self._refused_count,
            seconds=time.monotonic() - self._start_time,
            why=self.early_end_reason,
        )

    def _write_block(self, block: _Block, is_joint_B: NDArray[np.bool_], scores_nK: Tensor) -> None:
        """Write one block: joint predictions of some rows, local predictions of the others.

        `is_joint_B`: for each of the B rows, whether it was predicted jointly. `scores_nK`: joint
        scores of these n rows, in their order, for K classes (or one number for regression).
        """
        joint_mask_B = torch.from_numpy(is_joint_B)
        task = self._local_model.task
        output_shape = (
            (len(joint_mask_B), len(self._classes)) if self._classes else (len(joint_mask_B),)
        )
        outputs = torch.empty(output_shape, dtype=torch.float64)  # (B, K), or (B,) for regression
        if is_joint_B.any():
            outputs[joint_mask_B] = task.decode_outputs(scores_nK).double()
        if not is_joint_B.all():
            outputs[~joint_mask_B] = self._local_model.predict(
                block.features[~joint_mask_B]
            ).double()
        predicted_by = np.where(is_joint_B, _PREDICTED_JOINTLY, _PREDICTED_LOCALLY)
        self._count_by_predictor.update(predicted_by.tolist())
        predictions = Predictions(
            ids=block.id_texts,
            outputs=outputs,
            what=task.tells,
            classes=self._classes,
            decided=self._local_model.decide_classes(outputs) if self._classes else None,
            compared=RowComparison(rows=len(block.encoded_ids)),
        )
        self._write(predictions.to_frame().assign(by=predicted_by))


def _iterate_blocks(
    joint_party: _JointParty, card: JointNetworkCard, data: Path
) -> Iterator[_Block]:
    """Yield the rows of a file in blocks, encoded for the active's network of joint prediction.

    IDs and features are read side by side, and never the whole file at once.

    `card`: description of the network, with the encoding of the columns. `data`: the file.
    """
    party = joint_party.settings_file.party
    columns = _find_id_columns(joint_party.config, party)
    id_rules = make_id_rules(joint_party.config.alignment)
    pieces = encode_pieces(party, IdFile(party, data, columns), id_rules)
    ids = itertools.chain.from_iterable(pieces)
    for names, features in load_blocks(data, card.encoding, id_columns=columns):
        yield _Block(names, [*itertools.islice(ids, len(names))], features)


def _make_dummy_data(card: JointNetworkCard) -> OwnData:
    """Return one row of no person, from whose shape the active's networks are built."""
    features = torch.zeros(1, *card.encoding.shape)
    is_regression = bool(card.targets)
    labels = torch.zeros(1) if is_regression else torch.zeros(1).long()
    table = PartyTable("active", ("nobody",), features, labels, card.encoding)
    return OwnData(table=table, classes=card.classes, targets=card.targets)
