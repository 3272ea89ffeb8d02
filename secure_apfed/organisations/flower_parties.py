"""Start of a project's parties by Flower's processes; no module of Flower's is imported here.

Run by: at a site, whoever starts its party by the site's own command; at the SuperLink, who asks
each site for that start, and again where a SuperNode came back. The latter has no key and no data.
Frames do not pass here: parties meet by their own links, whose ends prove who they are. Protects
from: a site in another party's name, or of another project, which is left out or waits.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from secure_apfed.base.peer_text import quote_text
from secure_apfed.errors import ConfigError
from secure_apfed.organisations.engines import LOG_FILE_VARIABLE, PARTY_FILE_VARIABLE

__all__ = [
    "COMMAND_VARIABLE",
    "EXIT_CODE_KEY",
    "IDENTITY_QUERY",
    "IDLE_QUERY",
    "RUN_REQUEST",
    "Mail",
    "Reply",
    "RunLeader",
    "run_own_party",
]

COMMAND_VARIABLE = "SECURE_APFED_COMMAND"
"""Variable of a site's environment: the words before `--config`, unless `secure-apfed party`."""

IDENTITY_QUERY = "query.who"
"""Which party and project does the site run?"""

IDLE_QUERY = "query.awake"
"""Does the site answer? It does only while it runs no party."""

RUN_REQUEST = "train"
"""Run the party to its end, and answer with its exit code."""

EXIT_CODE_KEY = "code"
_POLL_INTERVAL_S = 1.0
_ASK_AGAIN_S = 15.0  # between questions whether a party's SuperNode still runs it
# Flower's error codes for: no such message, no such reply, no such node, process of the app ended.
_UNANSWERED_ERROR_CODES = frozenset({3, 4, 5, 8})
_MISSING_EXIT_CODE = 1  # the exit code of a party whose reply has none
_MEANING_BY_EXIT_CODE = {
    2: "a setting is wrong",
    3: "a folder, file or table does not fit",
    4: "another party left, or something was refused",
    5: "the privacy budget is exhausted",
}


@dataclass(frozen=True)
class Reply:
    """A SuperNode's reply to a question.

    Attributes:
        question_id: ID of the question, from `Mail.ask`.
        values: content of the reply, untrusted.
        error_code: Flower's error code; None: there is no error.
    """

    question_id: str
    values: Mapping[str, Any]
    error_code: int | None = None


class Mail(Protocol):
    """A carrier of questions to SuperNodes, and of their replies."""

    def list_nodes(self) -> Iterable[int]:
        """Return the numbers of the SuperNodes that are online."""

    def ask(self, node: int, question: str) -> str:
        """Send a question to a SuperNode; return the question's ID.

        `question`: `IDENTITY_QUERY`, `IDLE_QUERY` or `RUN_REQUEST`.
        """

    def read_replies(self, question_ids: Sequence[str]) -> Iterable[Reply]:
        """Return the replies that have come so far to the questions with these IDs."""


def run_own_party(environment: Mapping[str, str]) -> int:
    """Run the party of this Flower site in a process of its own; return its exit code.

    The process ends if this one ends, since its standard input is closed then.

    `environment`: the site's environment variables, by name.

    Raises ConfigError: the variables name no party, or a log that cannot be written.
    """
    if not (path := environment.get(PARTY_FILE_VARIABLE)):
        raise ConfigError(
            f"start this SuperNode with {PARTY_FILE_VARIABLE} in its environment: the path of its "
            "party's file; flower/site.env of the party's folder sets it"
        )
    command = [sys.executable, "-m", "secure_apfed.cli", "party"]
    if own_command := environment.get(COMMAND_VARIABLE):
        command = shlex.split(own_command)
    with _open_log(environment.get(LOG_FILE_VARIABLE)) as log:
        process = subprocess.Popen(  # noqa: S603 - the site's own command
            [*command, "--config", path, "--end-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        with process:
            try:
                return process.wait()
            finally:
                # A party of another user (sudo) cannot be signalled; it ends with its input.
                with contextlib.suppress(PermissionError):
                    process.terminate()


@contextlib.contextmanager
def _open_log(path: str | None) -> Iterator[int]:
    """Open the file to which a party's output is appended; yield its descriptor.

    `path`: path of the file; None: the output is dropped.

    Raises ConfigError: the user of this SuperNode cannot write there.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600) if path else os.open(os.devnull, os.O_WRONLY)
    except OSError as error:
        raise ConfigError(
            f"the party's messages cannot be written to {path} ({error.strerror}): set "
            f"{LOG_FILE_VARIABLE} in the SuperNode's environment to a file that its user may "
            "write, or leave it empty"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass
class _PartyNode:
    """A SuperNode (Flower's process at a site) that named its party.

    Attributes:
        node: Flower's number of the SuperNode.
        run_request_id: ID of the unanswered request to run the party; "": there is none.
        idle_query_id: ID of the unanswered question whether it runs no party; "": there is none.
        last_question_time: when the last question was sent, seconds of the leader's clock.
    """

    node: int
    run_request_id: str = ""
    idle_query_id: str = ""
    last_question_time: float = 0.0


class RunLeader:
    """The server's side of a run over Flower: it finds the parties' SuperNodes and starts them.

    A SuperNode is Flower's process at a site, which runs the site's party when it is asked to.

    Args:
        names: names of all parties of the run.
        project: digest (hex) of the project that all signed; a site of another project is refused.
        mail: carries questions to the SuperNodes.
        restarts: how often a party is started again after its SuperNode was gone.
        show: receives each line for the log of the run.
        now: returns the time in seconds.
        wait: waits for this number of seconds.
    """

    def __init__(
        self,
        party_names: Sequence[str],
        project_digest: str,
        mail: Mail,
        *,
        max_restarts: int,
        log_line: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start without any known SuperNode; the class describes the arguments."""
        self._party_names = list(party_names)
        self._project_digest = project_digest
        self._mail = mail
        self._max_restarts = max_restarts
        self._log_line = log_line
        self._clock = clock
        self._sleep = sleep
        self._node_by_party: dict[str, _PartyNode] = {}
        self._party_by_node: dict[int, str] = {}  # "": no party of this run
        self._node_by_identity_query: dict[str, int] = {}  # by the query's ID
        self._start_count_by_party = dict.fromkeys(party_names, 0)
        self._lost_parties: set[str] = set()  # started parties whose SuperNode is gone
        # SuperNodes that name a party which another SuperNode runs.
        self._duplicate_nodes: set[int] = set()
        self._exit_code_by_party: dict[str, int] = {}  # of ended parties

    def run(self) -> None:
        """Start all parties, and wait until each has ended or is lost.

        Raises:
            RuntimeError: a party ended with an error, or its SuperNode did not come back.
        """
        while not self._is_over():
            online_nodes = set(self._mail.list_nodes())
            self._forget_gone(online_nodes)
            self._ask_new_nodes(online_nodes)
            self._read_replies()
            self._start_parties()
            self._sleep(_POLL_INTERVAL_S)
        exit_code_by_failed_party = {
            name: code for name, code in self._exit_code_by_party.items() if code
        }
        parties_without_end = [
            name for name in self._party_names if name not in self._exit_code_by_party
        ]
        if exit_code_by_failed_party or parties_without_end:
            reasons = [
                f"{name}: {_describe_code(code)}"
                for name, code in exit_code_by_failed_party.items()
            ]
            reasons += [f"{name}: its SuperNode is gone" for name in parties_without_end]
            raise RuntimeError("; ".join(reasons))

    def _is_over(self) -> bool:
        """Return whether every party has ended or is lost.

        While no party has ended, lost parties may come back and are awaited.
        """
        unfinished_parties = set(self._party_names) - set(self._exit_code_by_party)
        return not unfinished_parties or (
            bool(self._exit_code_by_party) and unfinished_parties <= self._lost_parties
        )

    def _forget_gone(self, online_nodes: set[int]) -> None:
        """Forget the SuperNodes that went offline; their parties may come back with new ones."""
        for node in [node for node in self._party_by_node if node not in online_nodes]:
            name = self._party_by_node.pop(node)
            party_node = self._node_by_party.get(name)
            if party_node is not None and party_node.node == node:
                self._lose_site(name)

    def _lose_site(self, name: str) -> None:
        """Forget a party's SuperNode that is gone; if the party was started, it is lost."""
        del self._node_by_party[name]
        if name not in self._exit_code_by_party and self._start_count_by_party[name]:
            self._lost_parties.add(name)
            self._log_line(f"{name}: its SuperNode is gone")

    def _ask_new_nodes(self, online_nodes: set[int]) -> None:
        """Ask SuperNodes that are new for their party."""
        asked_nodes = {*self._party_by_node, *self._node_by_identity_query.values()}
        for node in online_nodes - asked_nodes:
            self._node_by_identity_query[self._mail.ask(node, IDENTITY_QUERY)] = node

    def _read_replies(self) -> None:
        """Process the replies to all open questions; replies are untrusted."""
        question_ids = [*self._node_by_identity_query]
        for party_node in self._node_by_party.values():
            question_ids += [
                question
                for question in (party_node.run_request_id, party_node.idle_query_id)
                if question
            ]
        for reply in self._mail.read_replies(question_ids) if question_ids else ():
            self._read_reply(reply)

    def _read_reply(self, reply: Reply) -> None:
        """Process a reply: a SuperNode's party, how the party ended, or that it runs no party."""
        question_id = reply.question_id
        if question_id in self._node_by_identity_query:
            self._register_site(self._node_by_identity_query.pop(question_id), reply)
            return
        for name, party_node in list(self._node_by_party.items()):
            if question_id == party_node.run_request_id:
                self._end_party(name, party_node, reply)
            elif question_id == party_node.idle_query_id:
                party_node.idle_query_id = ""
                is_idle = reply.error_code is None  # it answers only while it runs no party
                if is_idle and party_node.run_request_id:
                    # It was asked to run its party, so it restarted meanwhile. Without a request
                    # `_start_parties` asks it again.
                    party_node.run_request_id = ""
                    self._log_line(f"{name}: its SuperNode began anew")

    def _register_site(self, node: int, reply: Reply) -> None:
        """Record which party a SuperNode can run.

        It is left out if its party or project is not of this run. While another SuperNode has the
        same party, it is asked again later.

        `node`: Flower's number of the SuperNode. `reply`: names its party and project, untrusted.
        """
        values = reply.values
        name = str(values.get("party", ""))
        if not values:
            return  # it left before it answered, and is asked again when it is back
        if name not in self._party_names:
            self._party_by_node[node] = ""
            self._log_line(
                f"a SuperNode names the party {quote_text(name)}, which is not in this run"
            )
        elif values.get("project") != self._project_digest:
            self._party_by_node[node] = ""
            self._log_line(
                f"{name}: its SuperNode is of another project: let it use its own site.env"
            )
        elif (
            name in self._node_by_party
        ):  # not recorded, and so asked again until the first one is gone
            if node not in self._duplicate_nodes:
                self._log_line(
                    f"{name}: another SuperNode in its name waits until the first is gone"
                )
            self._duplicate_nodes.add(node)
        else:
            self._party_by_node[node] = name
            self._node_by_party[name] = _PartyNode(node)
            self._log_line(f"{name}: its SuperNode is here")

    def _start_parties(self) -> None:
        """Start each party that does not run, once the SuperNodes of all parties are here.

        A SuperNode whose party should run is asked from time to time whether it runs none: it would
        answer after a restart, which Flower does not report.
        """
        missing_parties = (
            set(self._party_names)
            - set(self._node_by_party)
            - set(self._exit_code_by_party)
            - self._lost_parties
        )
        has_started_any = any(self._start_count_by_party.values())
        if missing_parties and not has_started_any:
            return
        for name, party_node in self._node_by_party.items():
            if name in self._exit_code_by_party:
                continue
            should_run_already = bool(party_node.run_request_id)
            if should_run_already:
                is_due = self._clock() > party_node.last_question_time + _ASK_AGAIN_S
                if is_due and not party_node.idle_query_id:
                    party_node.idle_query_id = self._mail.ask(party_node.node, IDLE_QUERY)
                    party_node.last_question_time = self._clock()
            elif self._start_count_by_party[name] > self._max_restarts:
                self._lost_parties.add(name)  # it was restarted as often as is allowed
            else:
                self._lost_parties.discard(name)
                self._start_count_by_party[name] += 1
                party_node.run_request_id = self._mail.ask(party_node.node, RUN_REQUEST)
                party_node.last_question_time = self._clock()
                self._log_line(f"{name}: its party begins")

    def _end_party(self, name: str, party_node: _PartyNode, reply: Reply) -> None:
        """Record the exit code of a party that has ended.

        If Flower reports that the SuperNode did not answer, the party may be started again.

        `reply`: the reply to the request to run the party, untrusted.
        """
        exit_code = reply.values.get(EXIT_CODE_KEY)
        party_node.run_request_id = ""
        if reply.error_code in _UNANSWERED_ERROR_CODES:
            self._log_line(f"{name}: its SuperNode does not answer")
            return
        if type(exit_code) is int and 0 <= exit_code < 256:
            self._exit_code_by_party[name] = exit_code
        else:
            self._exit_code_by_party[name] = _MISSING_EXIT_CODE
        self._log_line(f"{name}: {_describe_code(self._exit_code_by_party[name])}")


def _describe_code(exit_code: int) -> str:
    """Return in words how a party ended, by the exit code of its process."""
    if exit_code == 0:
        return "its party has ended"
    meaning = _MEANING_BY_EXIT_CODE.get(exit_code, "its own log says more")
    return f"its party ended with {exit_code}: {meaning}"
