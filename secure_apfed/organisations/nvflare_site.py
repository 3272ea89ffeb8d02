"""A job of NVFlare's at each of its sites: the party of that site, and a server that holds nothing.

Run by: NVFlare's job processes, which find these classes by name in the library as it is installed
there; no code travels. Each site runs the party whose file the site itself names, exactly as
`secure-apfed party` does. Calls carry the frames, which are sealed between the two parties from
their first proof on. The server starts the parties and waits for them. Of an error it learns who
left, or only the kind; the rest is in the party's own log. Protects from: other sites of the job,
which start no party, and stop none whose links work.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from apfed_protocols.errors import PartyLeftError
from apfed_protocols.installing import install_extra
from apfed_protocols.seal import Identity
from secure_apfed.base.files import open_regular
from secure_apfed.base.names import check_name
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.exchange import Transport
from secure_apfed.exchange.calls import Calls
from secure_apfed.exchange.envelope import clean_text
from secure_apfed.exchange.resumable_link import LinkTransport, Missed
from secure_apfed.exchange.sealed_connection import LocalEnd
from secure_apfed.organisations.engines import PARTY_FILE_VARIABLE
from secure_apfed.organisations.party import Connect, PartyFile, run_party
from secure_apfed.runs.outcome import Progress

try:
    from nvflare.collab import collab
    from nvflare.collab.api.exceptions import CollabCallError, RunAborted
except ImportError as error:
    raise ConfigError(
        "a job of NVFlare's needs nvflare, which is missing; run: " + install_extra("nvflare")
    ) from error

NVFLARE_SERVER = "server"
"""The name by which NVFlare's calls come from its server, and no site's."""

_CALL_TIMEOUT_S = 15.0
_PART_OVER = "its part is over"
_JOB_ENDED = "NVFlare ended the job: it was aborted, or a site of it is gone"
_MAX_RUN_S = 3e7  # of a run; parties are notified of each other's end much earlier
_POLL_INTERVAL_S = 0.2
# After a party failed, until the others are asked whether they still run.
_ASK_AFTER_FAILURE_S = 30.0
_LOG_FILE_NAME = "log.txt"
_LOGGER = logging.getLogger(__name__)


class Site:
    """A site of an NVFlare job; it runs, once, the party that its own environment names.

    Its published methods are remote calls: by the server (`play`, `playing`) and by the other sites
    (`carry`, `stopped`).
    """

    def __init__(self, resume: bool = False) -> None:
        """Prepare a site whose party has not run yet.

        `resume`: whether the party continues from its checkpoint.
        """
        self._resume = resume  # of this name, since NVFlare writes arguments from attributes
        self._lock = threading.Lock()
        self._has_started = False
        self._is_running = False
        self._job_end_reason = ""  # why NVFlare ended the job
        self._connections: Calls | None = None  # the connections of the present session
        self._end_message_by_peer: dict[str, str] = {}  # by ended peer, its error in one line

    @collab.publish  # type: ignore[untyped-decorator]  # nvflare ships no annotations
    def play(self) -> str:
        """Run the party to its end; return "", or its error in words that all sites may read.

        Called by the server. The other sites are notified of the end.
        """
        site: str = collab.site_name
        self._require_first(site, collab.caller)
        # NVFlare's dispatcher logs every call, and every frame is one.
        logging.getLogger("nvflare.collab.runtime.cell_dispatcher").setLevel(logging.WARNING)
        site_by_peer = {
            client.name: client(timeout=_CALL_TIMEOUT_S) for client in collab.other_clients
        }
        has_ended = threading.Event()
        arguments = (collab.context.abort_signal, has_ended)
        threading.Thread(target=self._watch_abort, args=arguments, daemon=True).start()
        _LOGGER.info("%s: its party begins", site)
        try:
            self.run_party(site, partial(self._open_links, site_by_peer))
        except Exception as error:  # noqa: BLE001 - after any error all sites are notified
            failure = _describe_shareable(error)
            _LOGGER.error("%s: %s", site, failure)
            self._announce_end(site_by_peer, failure)
            return failure
        finally:
            self._is_running = False
            has_ended.set()
        _LOGGER.info("%s: its party has ended", site)
        # A peer that restarts must not wait for this party.
        self._announce_end(site_by_peer, _PART_OVER)
        return ""

    def _require_first(self, site: str, caller: str) -> None:
        """Record that the party starts.

        `site`: this site's name. `caller`: name of the site that calls `play`.

        Raises WrongSiteError: the party has run in this job before, or the caller is not the
            server.
        """
        with self._lock:
            if self._has_started or caller != NVFLARE_SERVER:
                raise WrongSiteError(f"{site}: its party is played once a job, by the server alone")
            self._has_started = True
            self._is_running = True

    @collab.publish  # type: ignore[untyped-decorator]  # nvflare ships no annotations
    def playing(self) -> bool:
        """Return whether the party still runs.

        The server calls this. A call that gets no reply means that the site is gone.
        """
        return self._is_running

    def run_party(self, site: str, connect: Connect) -> None:
        """Run the party by its own settings file, and log progress and errors locally.

        `site`: the site's name. `connect`: connects the party to the others by this job's calls.

        Raises every error of the party, after it was logged, and WrongSiteError: the file is of
            another party.
        """
        folder: Path | None = None
        try:
            file = find_party_file(site)
            settings = PartyFile.from_file(file)
            if settings.party != site:
                raise WrongSiteError(
                    f"{PARTY_FILE_VARIABLE} names the file of {settings.party} here, and this site "
                    f"is {site}: a site is named as its party"
                )
            folder = settings.folder

            last_epoch = 0

            def log_progress(progress: Progress) -> None:
                """Log the number of each epoch once, and nothing else of a progress report.

                NVFlare's log may be read by others.
                """
                nonlocal last_epoch
                if progress.epoch > last_epoch:
                    last_epoch = progress.epoch
                    _LOGGER.info("%s: epoch %d of %d", site, progress.epoch, progress.epochs)

            def log_restart(reason: str) -> None:
                """Log the reason why a new session starts, also in the party's own log."""
                _LOGGER.warning("%s: %s", site, reason)
                _write_log(settings.folder, reason)

            run_party(
                file,
                resume=self._resume,
                connect=connect,
                on_progress=log_progress,
                on_restart=log_restart,
            )
        except Exception as error:
            _write_log(folder, f"{type(error).__name__}: {error}")
            raise

    @collab.publish  # type: ignore[untyped-decorator]  # nvflare ships no annotations
    def carry(self, name: bytes, number: int, frame: bytes) -> bool:
        """Accept one frame of the calling site; return whether it was accepted.

        The arguments are those of `Calls.take_frame`: the connection's name, the frame's number,
        and its bytes.
        """
        calls = self._connections  # another thread may replace it when a new session starts
        return calls is not None and calls.take_frame(collab.caller, name, number, frame)

    @collab.publish  # type: ignore[untyped-decorator]  # nvflare ships no annotations
    def stopped(self, failure: str) -> None:
        """Record that the calling site's party has ended, and will not connect again.

        `failure`: the site's error or message, untrusted.
        """
        reason = _shorten_to_line(failure)
        with self._lock:
            self._end_message_by_peer[collab.caller] = reason
            calls = self._connections
        if calls is not None:
            calls.note_stop(collab.caller, reason)

    def _announce_end(self, site_by_peer: Mapping[str, Any], message: str) -> None:
        """Call all other sites to say that this party has ended.

        A site whose party is not connected would not notice it otherwise.

        `site_by_peer`: NVFlare's object of each other site, by name. `message`: the party's error,
        or that its part is over.
        """

        def announce_to_peer(peer: Any) -> None:
            """Call one site; a site that does not reply is ignored."""
            with contextlib.suppress(CollabCallError, RunAborted):
                peer.stopped(message)

        with ThreadPoolExecutor(max(1, len(site_by_peer))) as pool:
            pool.map(announce_to_peer, site_by_peer.values())

    def _open_links(
        self,
        site_by_peer: Mapping[str, Any],
        settings: PartyFile,
        identity: Identity,
        identities: Mapping[str, bytes],
        report_missing: Missed = lambda missing: None,
    ) -> Transport:
        """Connect the party to all peers by remote calls; end the earlier session's connections.

        Args:
            site_by_peer: NVFlare's object of each other site, by name.
            settings: the content of the party's settings file.
            identity: the party's key pair.
            identities: public identities of all parties, by name.
            report_missing: called with the peers that have not connected yet.

        Raises:
            ConfigError: the file names other peers than the job has sites.
            PartyLeftError: some peers did not connect in time.
        """
        me = LocalEnd(
            name=settings.party,
            identity=identity,
            identity_by_peer={
                name: key for name, key in identities.items() if name != settings.party
            },
        )
        if set(me.identity_by_peer) != set(site_by_peer):
            raise ConfigError(
                f"the file of {settings.party} names the peers "
                f"{', '.join(sorted(me.identity_by_peer))}; the "
                f"job has the sites {', '.join(sorted(site_by_peer))} besides: a site is named as "
                "its party"
            )

        def send_frame(peer: str, name: bytes, number: int, frame: bytes) -> bool:
            """Send one frame by a call to the peer's site; return whether it was accepted there.

            `name`: name of the connection. `number`: number of the frame.

            Raises ConnectionError: the call failed.
            """
            try:
                return site_by_peer[peer].carry(name, number, frame) is True
            except RunAborted as error:
                raise ConnectionAbortedError("NVFlare ended the job") from error
            except CollabCallError as error:
                reason = _shorten_to_line(error.cause)
                raise ConnectionError(f"a call to {peer} failed: {reason}") from error

        connections = self._replace_calls(Calls(me, send_frame))
        return LinkTransport.meet_peers(
            settings.party,
            connections.make_connectors(),
            patience_s=settings.reconnect_s,
            meet_s=settings.meet_s,
            on_missing=report_missing,
        )

    def _replace_calls(self, new_connections: Calls) -> Calls:
        """Replace the former session's connections, which end, by these; return these.

        If peers or the whole job have ended before, the new connections are notified of it.
        """
        with self._lock:
            former_connections = self._connections
            self._connections = new_connections
            end_message_by_peer = dict(self._end_message_by_peer)
            job_end_reason = self._job_end_reason
        if former_connections is not None:
            former_connections.end_connections("its session is over")
        for peer, reason in end_message_by_peer.items():
            new_connections.note_stop(peer, reason)
        if job_end_reason:
            new_connections.end_connections(job_end_reason)
        return new_connections

    def _watch_abort(self, abort_signal: Any, has_ended: threading.Event) -> None:
        """Watch whether NVFlare ends the job while the party runs; if so, end all connections.

        The party then fails, and starts no further session. Runs in a thread of its own.

        `abort_signal`: NVFlare's signal. `has_ended`: set when the party has ended.
        """
        while not has_ended.wait(_POLL_INTERVAL_S):
            if abort_signal.triggered:
                with self._lock:
                    self._job_end_reason = _JOB_ENDED
                    calls = self._connections
                if calls is not None:
                    calls.end_connections(_JOB_ENDED)
                return


class Server:
    """The server's part of an NVFlare job: it starts the parties and waits for their ends.

    It has no key and no data.
    """

    @collab.main  # type: ignore[untyped-decorator]  # nvflare ships no annotations
    def run(self) -> None:
        """Start all parties, and wait until each has ended or is gone.

        After a failure the other sites may be gone as well, which NVFlare would not report: then
        they are asked from time to time whether their parties still run.

        Raises RuntimeError: a party failed or is gone.
        """
        failure_by_party: dict[str, str] = {}  # by ended party; "": it succeeded

        def note_end(call: Any, failure: str) -> str:
            """Store a party's result, the return value of its `play`.

            `call`: NVFlare's object of the call, which names the site.
            """
            site_name, _, _ = call.target_name.partition(".")
            failure_by_party[site_name] = _shorten_to_line(failure)
            return ""

        sites = collab.clients
        lost_sites = set[str]()
        next_question_time = float("inf")
        calls = sites(blocking=False, timeout=_MAX_RUN_S, process_resp_cb=note_end).play()
        while True:
            ended_sites = {*failure_by_party, *lost_sites, *calls.failures}
            running = [site for site in sites if site.name not in ended_sites]
            if not running:
                break
            if collab.is_aborted:
                return
            if time.monotonic() > next_question_time:
                lost_sites |= {site.name for site in running if not _is_running(site)}
                next_question_time = float("inf")
            if calls.failures or any(failure_by_party.values()):
                next_question_time = min(
                    next_question_time, time.monotonic() + _ASK_AFTER_FAILURE_S
                )
            time.sleep(_POLL_INTERVAL_S)
        failures = []
        for site in sites:
            failure = failure_by_party.get(site.name, "it was not heard of any more")
            if failure:
                failures.append(f"{site.name}: {failure}")
        if failures:
            raise RuntimeError("; ".join(failures))


def _is_running(site: Any) -> bool:
    """Ask a site whether its party still runs; return False if it does not reply."""
    try:
        return site(timeout=_CALL_TIMEOUT_S).playing() is True
    except (CollabCallError, RunAborted):
        return False


class WrongSiteError(ConfigError):
    """A site names no party, or another party than its own.

    Its message contains nothing private, so all sites may read it.
    """


def find_party_file(site: str) -> Path:
    """Return the path of the party's settings file that the site's environment names.

    `site`: the site's name, which replaces "{site}" in the path.

    Raises WrongSiteError: the environment names no file.
    """
    if not (path := os.environ.get(PARTY_FILE_VARIABLE)):
        raise WrongSiteError(
            f"{site}: start this site with {PARTY_FILE_VARIABLE} in its environment: the path of "
            "its party's file, such as /srv/apfed/party.yaml"
        )
    return Path(path.replace("{site}", check_name(site)))


def _describe_shareable(error: Exception) -> str:
    """Return an error in words that all sites may read: which party left, or only its type.

    The text of other errors may contain private data; it is written to the party's own log only.
    """
    is_shareable = isinstance(error, PartyLeftError | WrongSiteError)
    failure = str(error) if is_shareable else f"its own {_LOG_FILE_NAME} says more"
    return f"{type(error).__name__}: {failure}"


def _shorten_to_line(text: object) -> str:
    """Return another site's untrusted text as one short line."""
    return clean_text(str(text).encode("utf-8", "replace"))


def _write_log(folder: Path | None, line: str) -> None:
    """Append a line to the log in the party's folder; without a folder write it to stderr.

    A log that cannot be written is ignored, since the party's own error matters more.
    """
    if folder is None:
        sys.stderr.write(f"{line}\n")
        return
    with (
        contextlib.suppress(OSError, CheckpointError),
        os.fdopen(open_regular(folder / _LOG_FILE_NAME, create=True), "a", encoding="utf-8") as log,
    ):
        log.write(f"{line}\n")
