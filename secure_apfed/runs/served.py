"""Joint prediction between organisations: what a training leaves for it, who serves, who asks.

Run by: each passive and the aggregator, which serve session after session (`serve_party`), and the
active, which asks about the people of a file (`predict_jointly`), and falls back to its solo model
where a passive does not know a person or answers no more about it, has left, or has a limit for
all people that is reached. Protects a passive from: an active that asks too much. Its book counts
in all sessions, on the disk, before an answer leaves.
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
from secure_apfed.alignment.ids import IdFile, id_rules
from secure_apfed.config import Config
from secure_apfed.config.file import load_config
from secure_apfed.contract import Contract
from secure_apfed.counters import ANSWER_BOOK
from secure_apfed.data import OwnData, PartyTable, load_blocks
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.exchange import Links, StatusTracker, Transcript, Transport, run_role
from secure_apfed.exchange.resumable_link import Missed, Refusal
from secure_apfed.files import PathLike, load_json, open_regular, refuse_replacing_input
from secure_apfed.formats import CONTRACT
from secure_apfed.methods import METHODS, PartyContext, fresh_secrets
from secure_apfed.methods.alignment import DEALER
from secure_apfed.methods.joint import Tvfl
from secure_apfed.methods.serving import (
    JointPredictor,
    LimitReachedError,
    add_up,
    joint_method,
    serve_predictions,
)
from secure_apfed.promises import NOTHING_SENT, Promise, promise_of_party
from secure_apfed.runs.folder import (
    PROJECT_ENDED,
    PartyFolder,
    load_ending,
    require_open_project,
)
from secure_apfed.runs.keeper import JointNetworkCard, load_joint_network
from secure_apfed.runs.party import (
    Connect,
    PartyFile,
    ServeSettings,
    connect_peers,
    connect_with_audit,
    own_data,
    require_own_limits,
)
from secure_apfed.runs.revocation import FilesReplacedError, RevocationWatch, SessionFiles
from secure_apfed.runs.solo import Predictions, RowComparison, load_model, row_writer
from secure_apfed.seeds import isolate_torch_modes
from secure_apfed.settings.run import TranscriptSettings

__all__ = ["AnswerBook", "JointPredictionCounts", "predict_jointly", "serve_party"]

_JOINTLY = "jointly"
_ALONE = "alone"
_REFUSED_S = 10.0  # that an active waits for who is refused: others try again every second


def _run_of(folder: PartyFolder) -> str:
    """Return the run of the folder. Raises CheckpointError: nothing was agreed there."""
    try:
        document = load_json(folder.contract, dict[str, Any])["document"]
        CONTRACT.parse_format_number(folder.contract, document)
        return Contract.model_validate(document).run
    except (KeyError, ValidationError) as error:
        raise CheckpointError(f"{folder.contract} holds no contract of a run: {error}") from error


class AnswerBook:
    """A passive's record of its answers, in all sessions; people stand in it under a hash with its
    own key.

    Args:
        path: a file on this machine's disk, its owner's alone.
        people: how many may be asked about, from whom limits follow that are not set.
        budget: what all answers about one person may cost; None: whatever the limits allow.
        run: of which run the model is that answers.
        today: the day that answers count for.

    Raises:
        CheckpointError: another file lies there, or the book of another party or run.
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
            # How often anything was counted: what the audit log notes of this book.
            self._book.execute("CREATE TABLE IF NOT EXISTS running (at PRIMARY KEY, changes)")
            self._book.execute("INSERT OR IGNORE INTO running VALUES (0, 0)")
            self._book.execute("CREATE TABLE IF NOT EXISTS whose (at PRIMARY KEY, party, run)")
            self._book.execute("INSERT OR IGNORE INTO whose VALUES (0, ?, ?)", (me, run))
            (self._key,) = self._book.execute("SELECT under FROM hashed").fetchone()
            whose = self._book.execute("SELECT party, run FROM whose").fetchone()
        except (sqlite3.Error, TypeError) as error:
            self._book.close()
            raise CheckpointError(
                f"{path} is no book of answers ({error}); put it back from a copy: without it "
                "nobody knows what was answered"
            ) from error
        if whose != (me, run):
            self._book.close()
            raise CheckpointError(
                f"{path} is the book of answers of {whose[0]!s:.80} in another run or of another "
                f"party, this is {me}; put back the book of this run"
            )

    def close(self) -> None:
        self._book.close()

    def count_lookups(self, count: int) -> None:
        """See `secure_apfed.methods.serving.Take`."""
        with self._open_transaction():
            self._count_use("lookups_a_day", self._today(), count)

    def count_answers(
        self, people: Sequence[bytes], would_cost: Callable[[int], float] | None
    ) -> None:
        """See `secure_apfed.methods.serving.Take`."""
        with self._open_transaction():
            most = max(self._count_use("a_person", self._hash_person(person)) for person in people)
            if would_cost is not None and self._budget is not None:
                self._require_limit("epsilon", would_cost(most), self._budget)
            self._count_use("a_day", self._today(), len(people))
            self._count_use("in_all", "", len(people))

    def list_exhausted_people(
        self, people: Sequence[bytes], cost: Callable[[int], float] | None
    ) -> list[int]:
        """See `secure_apfed.methods.serving.Take`."""
        most = self._limits.a_person
        if cost is not None and self._budget is not None:
            most = bisect_right(range(1, most + 1), self._budget, key=cost)
        return [at for at, person in enumerate(people) if self._count_times(person) >= most]

    def _count_times(self, person: bytes) -> int:
        what = f"a_person {self._hash_person(person)}"
        found = self._book.execute("SELECT times FROM counted WHERE what = ?", (what,)).fetchone()
        return found[0] if found else 0

    def _hash_person(self, person: bytes) -> str:
        return hashlib.blake2b(person, key=self._key, digest_size=16).hexdigest()

    def _count_use(self, limit: str, of: str, count: int = 1) -> int:
        times: int
        (times,) = self._book.execute(
            "INSERT INTO counted VALUES (?, ?) ON CONFLICT (what) DO UPDATE "
            "SET times = times + excluded.times RETURNING times",
            (f"{limit} {of}", count),
        ).fetchone()
        self._require_limit(limit, times, getattr(self._limits, limit))
        return times

    def _require_limit(self, limit: str, value: float, most: float) -> None:
        if value > most:
            raise LimitReachedError(
                f"{self._me} answers no more: the limit serve.{limit} of its file is {most:g}, and "
                f"this would be {value:.4g}"
            )

    @contextmanager
    def _open_transaction(self) -> Iterator[None]:
        self._book.execute("BEGIN IMMEDIATE")
        with self._book:  # which commits, or takes back what was counted
            self._book.execute("UPDATE running SET changes = changes + 1")
            yield


class _ServeMeter:
    """The promise of a party that serves joint predictions, for all answers about one person.

    Without noise that is nothing; with noise the budget at which `AnswerBook` ends them.
    """

    charges = 0

    def __init__(self, config: Config, file: PartyFile) -> None:
        if file.party not in file.passives:
            why = "a prediction asks it for nothing of its rows"
            self.promise = Promise(figure=config.method.figure, epsilon=None, why=why)
            return
        self.promise = promise_of_party(config, "passive", ())
        if self.promise.state == NOTHING_SENT:  # yet: noise is agreed
            budget = _budget_of(config, file.serve)
            why = ""
            if budget is None:
                why = "no budget ends the answers about one person; give serve.epsilon"
            epsilon = math.inf if budget is None else budget
            self.promise = replace(self.promise, epsilon=epsilon, delta=config.delta, why=why)


@dataclass(frozen=True)
class _JointParty:
    file: PartyFile
    config: Config
    method: Tvfl
    folder: PartyFolder
    run: str
    kept: JointNetworkCard | None
    tensors: Mapping[str, Tensor]

    @classmethod
    def from_file(cls, path: Path) -> "_JointParty":
        file = PartyFile.from_file(path)
        require_open_project(file.folder)
        config = load_config(file.config)
        folder = PartyFolder(file.folder)
        require_own_limits(file, config)
        method = joint_method(METHODS[config.method.name])
        require_overlaps_shown(config.alignment, file.party)
        peers = {name: peer for name, peer in file.peers.items() if name != DEALER}
        kept = None
        tensors = dict[str, Tensor]()
        if file.party == file.active or file.party in file.passives:
            kept, tensors = load_joint_network(folder, file.party)
        file = file.model_copy(update={"peers": peers})
        return cls(file, config, method, folder, _run_of(folder), kept, tensors)

    @contextmanager
    def open_links(
        self, held: OwnData | None, meet: Connect, status: StatusTracker
    ) -> Iterator[tuple[PartyContext, Links, Any]]:
        """Connect to the others, and yield this party's inputs; the folder is its own."""
        file = self.file
        identity = self.folder.load_identity()
        meter = _ServeMeter(self.config, file)
        with connect_with_audit(file, identity, meter, status, meet) as (known, audit, transport):
            record = Transcript(TranscriptSettings(keep="none")).record_envelope
            links = Links(
                file.party,
                list(file.peers),
                transport.send_frame,
                record,
                observers=(RevocationWatch(file), audit, status),
            )
            own = PartyContext(
                config=self.config,
                name=file.party,
                active=file.active,
                passives=file.passives,
                secrets=fresh_secrets(self.config, file.party, identity=identity),
                known=known,
                held=held,
                predicts=self.run,
            )
            yield own, links, transport


@isolate_torch_modes()
def serve_party(
    path: PathLike,
    *,
    sessions: int | None = None,
    meet: Connect = connect_peers,
    status: StatusTracker | None = None,
    on_session: Callable[[str], None] = lambda how: None,
) -> None:
    """Serve joint predictions by a party's file, session after session.

    Args:
        sessions: end after so many; None: when the process is ended.
        on_session: is told how each session ended, and where one begins anew, since the party's
            file, its certificate or its list of what is revoked was replaced while nobody asked.

    Raises:
        ConfigError, DataError, ModelError: file, table or kept model that do not fit.
    """
    path = Path(path)
    here = _JointParty.from_file(path)
    status = status or StatusTracker()
    file = here.file
    if file.party == file.active:
        raise ConfigError(
            f"{file.party} is the active, which asks: secure-apfed predict --jointly {path}"
        )
    held = None
    played = 0
    if here.kept is not None:
        held = _load_served_table(here, here.kept)
    with here.folder.lock_exclusively(), status:
        while sessions is None or played < sessions:
            if load_ending(here.folder.path) is not None:
                on_session(
                    f"the project of {file.party} was ended in its folder: it serves no more"
                )
                break
            begun_with = SessionFiles(path, file, file.folder / PROJECT_ENDED, say=on_session)
            limits = PartyFile.from_file(path).serve  # as they are now
            here = replace(here, file=here.file.model_copy(update={"serve": limits}))
            try:
                with ExitStack() as stack:
                    watched = _meet_while(meet, begun_with.require_same)
                    own, links, transport = stack.enter_context(
                        here.open_links(held, watched, status)
                    )
                    if held is None:
                        script = add_up(own, links, here.method)
                    else:
                        opened = _open_book(here, people=len(held.table.ids))
                        book = stack.enter_context(closing(opened))
                        script = serve_predictions(own, links, here.method, here.tensors, book)
                    run_role(script, links, transport, timeout_s=file.timeout_s, observer=status)
                on_session("a session ended")
            except FilesReplacedError as replaced:
                on_session(str(replaced))
                continue
            except (RemoteProtocolError, ConnectionError) as error:
                on_session(f"a session broke off: {error}")
            played += 1


def _meet_while(meet: Connect, require: Missed) -> Connect:
    """Return what meets the others as `meet` does, and ends by what `require` raises meanwhile."""

    def meet_and_check(
        file: PartyFile,
        identity: Identity,
        known: Mapping[str, bytes],
        told: Missed = lambda missing: None,
    ) -> Transport:
        def check_missing(missing: Mapping[str, str]) -> None:
            told(missing)
            require(missing)

        return meet(file, identity, known, check_missing)

    return meet_and_check


class _Refusals:
    """The refusals that an active learns of; a refusal is no silence that ends by itself.

    All others serve already, and try again every second. Whoever is refused all the same after
    `_REFUSED_S` has to do something first, such as renewing a certificate that was revoked.
    """

    def __init__(self, me: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._me = me
        self._clock = clock
        self._since: dict[str, float] = {}

    def require_bearable(self, missing: Mapping[str, str]) -> None:
        """Raise PartyLeftError where somebody is refused, or refuses this party, for too long."""
        now = self._clock()
        refused = {name: why for name, why in missing.items() if isinstance(why, Refusal)}
        self._since = {name: self._since.get(name, now) for name in refused}
        if not refused or now - min(self._since.values()) < _REFUSED_S:
            return
        names = " and ".join(refused)
        causes = "; ".join(dict.fromkeys(refused.values()))
        raise PartyLeftError(
            f"prediction: {self._me} has no link to {names}: {causes}; ask again once that is done",
            left=tuple(refused),
        )


def _open_book(here: _JointParty, *, people: int) -> AnswerBook:
    path = here.folder.path / ANSWER_BOOK
    limits = here.file.serve
    budget = _budget_of(here.config, limits)
    return AnswerBook(path, here.file.party, limits, people=people, budget=budget, run=here.run)


def _budget_of(config: Config, limits: ServeSettings) -> float | None:
    """Return what all answers about one person may cost, where noise was agreed."""
    noise = config.method.find_noise(config)
    return limits.epsilon or config.guard.epsilon or (noise.epsilon if noise else None)


def _load_served_table(here: _JointParty, kept: JointNetworkCard) -> OwnData:
    """Return the people whom this passive may be asked about, as its network reads them."""
    file = here.file
    config = here.config
    if file.serve.table is None:
        held = own_data(file, config, "passive")
        assert held is not None
        if held.table.encoding != kept.encoding:
            raise DataError(
                f"{file.party}: its table is no longer the one of the training, whose columns were "
                "read otherwise; name the table of who may be asked about as serve.table"
            )
        return held
    columns = _id_columns(config, file.party)
    blocks = load_blocks(file.serve.table, kept.encoding, id_columns=columns)
    features_NF = torch.cat([features for _, features in blocks])
    ids = [one for piece in IdFile(file.party, file.serve.table, columns).pieces() for one in piece]
    table = PartyTable(file.party, tuple(ids), features_NF, None, kept.encoding)
    return OwnData(table=table)


def _id_columns(config: Config, party: str) -> tuple[str, ...]:
    if config.data.parties is None:
        raise ConfigError(
            f"{party}: people are asked about by the IDs of own tables; data.parties names none"
        )
    return config.data.id_columns(party)


@dataclass(frozen=True, kw_only=True)
class JointPredictionCounts:
    """The numbers of rows predicted jointly and alone.

    Attributes:
        refused: of those predicted alone, of people about whom a passive answers no more.
        why: what ended joint prediction before its end.
    """

    jointly: int
    alone: int
    refused: int
    seconds: float
    why: str = ""

    @property
    def is_failure(self) -> bool:
        """True if it ended early, or not one row was predicted jointly of those that could be."""
        return bool(self.why or (self.refused and not self.jointly))


@dataclass(frozen=True)
class _Block:
    names: tuple[str, ...]
    ids: list[bytes]
    features: Tensor


@isolate_torch_modes()
def predict_jointly(
    path: PathLike,
    data: PathLike,
    output: PathLike | None = None,
    *,
    meet: Connect = connect_peers,
    status: StatusTracker | None = None,
    write: Callable[[pd.DataFrame], None] | None = None,
) -> JointPredictionCounts:
    """Predict the rows of a file by the model of all parties, and alone where that cannot be.

    Args:
        path: the active's file; data: CSV or Parquet with its columns and IDs.
        output: .csv, .parquet or .json, which appears when it is complete; None: `write` takes
            the rows, block by block.

    Raises:
        ConfigError, DataError, ModelError: file, rows or kept model that do not fit.
    """
    path = Path(path)
    data = Path(data)
    if output is not None:
        output = Path(output)
        refuse_replacing_input(output, "--output", data, path, PartyFile.from_file(path).folder)
        with row_writer(output) as written:
            return predict_jointly(path, data, meet=meet, status=status, write=written)
    assert write is not None
    here = _JointParty.from_file(path)
    status = status or StatusTracker()
    if here.kept is None or here.file.party != here.file.active:
        raise ConfigError(f"{here.file.party} is not the active, which alone predicts")
    asking = _JointPrediction(here, here.kept, _iterate_blocks(here, here.kept, data), write)
    with here.folder.lock_exclusively(), status:
        try:
            met = _meet_while(meet, _Refusals(here.file.party).require_bearable)
            with here.open_links(_make_dummy_data(here.kept), met, status) as (
                own,
                links,
                transport,
            ):
                script = asking.predict_blocks(own, links)
                run_role(script, links, transport, timeout_s=here.file.timeout_s, observer=status)
        except (RemoteProtocolError, ConnectionError) as error:
            asking.why = str(error)
        asking.predict_rest()
    return asking.count_predictions()


class _JointPrediction:
    """The rows of a file on their way to their predictions, whoever predicts."""

    def __init__(
        self,
        here: _JointParty,
        kept: JointNetworkCard,
        blocks: Iterator[_Block],
        write: Callable[[pd.DataFrame], None],
    ) -> None:
        self._here = here
        self._blocks = blocks
        self._write = write
        self._solo = load_model(here.folder.path)
        self._classes = kept.classes
        self._pending: _Block | None = None
        self._counts = Counter[str]()
        self._began = time.monotonic()
        self.why = ""
        self._refused = 0

    async def predict_blocks(self, own: PartyContext, links: Links) -> None:
        predictor = await JointPredictor.start_session(
            own, links, self._here.method, self._here.tensors
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
        """Predict by the solo model what joint prediction has left."""
        pending = [self._pending] if self._pending is not None else []
        for block in itertools.chain(pending, self._blocks):
            self._write_block(block, np.zeros(len(block.ids), dtype=bool), torch.empty(0, 0))

    def count_predictions(self) -> JointPredictionCounts:
        return JointPredictionCounts(
            jointly=self._counts[_JOINTLY],
            alone=self._counts[_ALONE],
            refused=self._refused,
            seconds=time.monotonic() - self._began,
            why=self.why,
        )

    def _write_block(self, block: _Block, known_B: NDArray[np.bool_], scores_nK: Tensor) -> None:
        jointly_B = torch.from_numpy(known_B)
        probabilities_BK = torch.empty(len(jointly_B), len(self._classes), dtype=torch.float64)
        if known_B.any():
            probabilities_BK[jointly_B] = scores_nK.softmax(1).double()
        if not known_B.all():
            probabilities_BK[~jointly_B] = self._solo.predict(block.features[~jointly_B]).double()
        by = np.where(known_B, _JOINTLY, _ALONE)
        self._counts.update(by.tolist())
        predicted = Predictions(
            ids=block.names,
            outputs=probabilities_BK,
            what="",
            classes=self._classes,
            decided=self._solo.decide_classes(probabilities_BK),
            compared=RowComparison(rows=len(block.ids)),
        )
        self._write(predicted.to_frame().assign(by=by))


def _iterate_blocks(here: _JointParty, kept: JointNetworkCard, data: Path) -> Iterator[_Block]:
    party = here.file.party
    columns = _id_columns(here.config, here.file.party)
    pieces = encode_pieces(party, IdFile(party, data, columns), id_rules(here.config.alignment))
    ids = itertools.chain.from_iterable(pieces)
    for names, features in load_blocks(data, kept.encoding, id_columns=columns):
        yield _Block(names, [*itertools.islice(ids, len(names))], features)


def _make_dummy_data(kept: JointNetworkCard) -> OwnData:
    """Return data to build the active's networks from: a row of no person."""
    features = torch.zeros(1, *kept.encoding.shape)
    table = PartyTable("active", ("nobody",), features, torch.zeros(1).long(), kept.encoding)
    return OwnData(table=table, classes=kept.classes)
