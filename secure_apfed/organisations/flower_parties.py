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
from secure_apfed.organisations.engines import LOG, PARTY_FILE

__all__ = [
    "AWAKE",
    "CODE",
    "COMMAND",
    "PLAY",
    "WHO",
    "Lead",
    "Mail",
    "Reply",
    "run_own_party",
]

COMMAND = "SECURE_APFED_COMMAND"
"""Variable of a site's environment: the words before `--config`, unless `secure-apfed party`."""

WHO = "query.who"
"""Which party and project does the site run?"""

AWAKE = "query.awake"
"""Does the site answer? It does only while it runs no party."""

PLAY = "train"
"""Run the party to its end, and answer with its exit code."""

CODE = "code"
_LOOK_S = 1.0
_ASK_AGAIN_S = 15.0  # between questions whether a party's SuperNode still runs it
# Flower's error codes for: no such message, no such reply, no such node, process of the app ended.
_UNANSWERED = frozenset({3, 4, 5, 8})
_NO_ANSWER = 1  # the exit code of a party whose reply has none
_WORDS_OF_CODES = {
    2: "a setting is wrong",
    3: "a folder, file or table does not fit",
    4: "another party left, or something was refused",
    5: "the privacy budget is exhausted",
}


@dataclass(frozen=True)
class Reply:
    """A SuperNode's reply to a question.

    Attributes:
        asked: ID of the question, from `Mail.ask`.
        values: content of the reply, untrusted.
        error: Flower's error code; None: there is no error.
    """

    asked: str
    values: Mapping[str, Any]
    error: int | None = None


class Mail(Protocol):
    """A carrier of questions to SuperNodes, and of their replies."""

    def list_nodes(self) -> Iterable[int]:
        """Return the numbers of the SuperNodes that are online."""

    def ask(self, node: int, question: str) -> str:
        """Send a question (`WHO`, `AWAKE` or `PLAY`) to a SuperNode; return the question's ID."""

    def read_replies(self, asked: Sequence[str]) -> Iterable[Reply]:
        """Return the replies that have come so far to the questions with these IDs."""


def run_own_party(environment: Mapping[str, str]) -> int:
    """Run the party of this Flower site in a process of its own; return its exit code.

    The process ends if this one ends, since its standard input is closed then.

    `environment`: the site's environment variables, by name.

    Raises ConfigError: the variables name no party, or a log that cannot be written.
    """
    if not (path := environment.get(PARTY_FILE)):
        raise ConfigError(
            f"start this SuperNode with {PARTY_FILE} in its environment: the path of its party's "
            "file; flower/site.env of the party's folder sets it"
        )
    command = [sys.executable, "-m", "secure_apfed.cli", "party"]
    if own_command := environment.get(COMMAND):
        command = shlex.split(own_command)
    with _open_log(environment.get(LOG)) as log:
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
            f"the party's messages cannot be written to {path} ({error.strerror}): set {LOG} in "
            "the SuperNode's environment to a file that its user may write, or leave it empty"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass
class _Site:
    """A SuperNode (Flower's process at a site) that named its party.

    Attributes:
        node: Flower's number of the SuperNode.
        start_request: ID of the unanswered request to run the party; "": there is none.
        probe: ID of the unanswered question whether it runs no party; "": there is none.
        asked_at: when the last question was sent, seconds of the leader's clock.
    """

    node: int
    start_request: str = ""
    probe: str = ""
    asked_at: float = 0.0


class Lead:
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
        names: Sequence[str],
        project: str,
        mail: Mail,
        *,
        restarts: int,
        show: Callable[[str], None] = print,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start without any known SuperNode; the class describes the arguments."""
        self._names = list(names)
        self._project = project
        self._mail = mail
        self._restarts = restarts
        self._show = show
        self._now = now
        self._wait = wait
        self._sites: dict[str, _Site] = {}  # by party
        self._nodes: dict[int, str] = {}  # party by SuperNode; "": no party of this run
        self._identity_questions: dict[str, int] = {}  # SuperNode by the ID of a `WHO` question
        self._starts = dict.fromkeys(names, 0)  # by party: how often it was started
        self._lost: set[str] = set()  # started parties whose SuperNode is gone
        # SuperNodes that name a party which another SuperNode runs.
        self._duplicate_nodes: set[int] = set()
        self._exit_codes: dict[str, int] = {}  # by ended party

    def run(self) -> None:
        """Start all parties, and wait until each has ended or is lost.

        Raises:
            RuntimeError: a party ended with an error, or its SuperNode did not come back.
        """
        while not self._is_over():
            online = set(self._mail.list_nodes())
            self._forget_gone(online)
            self._ask_new_nodes(online)
            self._read_replies()
            self._start_parties()
            self._wait(_LOOK_S)
        failed = {name: code for name, code in self._exit_codes.items() if code}
        gone = [name for name in self._names if name not in self._exit_codes]
        if failed or gone:
            reasons = [f"{name}: {_describe_code(code)}" for name, code in failed.items()]
            reasons += [f"{name}: its SuperNode is gone" for name in gone]
            raise RuntimeError("; ".join(reasons))

    def _is_over(self) -> bool:
        """Return whether every party has ended or is lost.

        While no party has ended, lost parties may come back and are awaited.
        """
        open_parties = set(self._names) - set(self._exit_codes)
        return not open_parties or (bool(self._exit_codes) and open_parties <= self._lost)

    def _forget_gone(self, online: set[int]) -> None:
        """Forget the SuperNodes that went offline; their parties may come back with new ones."""
        for node in [node for node in self._nodes if node not in online]:
            name = self._nodes.pop(node)
            site = self._sites.get(name)
            if site is not None and site.node == node:
                self._lose_site(name)

    def _lose_site(self, name: str) -> None:
        """Forget a party's SuperNode that is gone; if the party was started, it is lost."""
        del self._sites[name]
        if name not in self._exit_codes and self._starts[name]:
            self._lost.add(name)
            self._show(f"{name}: its SuperNode is gone")

    def _ask_new_nodes(self, online: set[int]) -> None:
        """Ask SuperNodes that are new for their party."""
        asked_nodes = {*self._nodes, *self._identity_questions.values()}
        for node in online - asked_nodes:
            self._identity_questions[self._mail.ask(node, WHO)] = node

    def _read_replies(self) -> None:
        """Process the replies to all open questions; replies are untrusted."""
        questions = [*self._identity_questions]
        for site in self._sites.values():
            questions += [question for question in (site.start_request, site.probe) if question]
        for reply in self._mail.read_replies(questions) if questions else ():
            self._read_reply(reply)

    def _read_reply(self, reply: Reply) -> None:
        """Process a reply: a SuperNode's party, how the party ended, or that it runs no party."""
        question = reply.asked
        if question in self._identity_questions:
            self._register_site(self._identity_questions.pop(question), reply)
            return
        for name, site in list(self._sites.items()):
            if question == site.start_request:
                self._end_party(name, site, reply)
            elif question == site.probe:
                site.probe = ""
                if site.start_request and reply.error is None:
                    # It runs no party although it was asked to: it restarted meanwhile.
                    site.start_request = ""
                    self._show(f"{name}: its SuperNode began anew")

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
        if name not in self._names:
            self._nodes[node] = ""
            self._show(f"a SuperNode names the party {quote_text(name)}, which is not in this run")
        elif values.get("project") != self._project:
            self._nodes[node] = ""
            self._show(f"{name}: its SuperNode is of another project: let it use its own site.env")
        elif name in self._sites:  # not recorded, and so asked again until the first one is gone
            if node not in self._duplicate_nodes:
                self._show(f"{name}: another SuperNode in its name waits until the first is gone")
            self._duplicate_nodes.add(node)
        else:
            self._nodes[node] = name
            self._sites[name] = _Site(node)
            self._show(f"{name}: its SuperNode is here")

    def _start_parties(self) -> None:
        """Start each party that does not run, once the SuperNodes of all parties are here.

        A SuperNode whose party should run is asked from time to time whether it runs none: it would
        answer after a restart, which Flower does not report.
        """
        missing = set(self._names) - set(self._sites) - set(self._exit_codes) - self._lost
        if missing and not any(self._starts.values()):
            return
        for name, site in self._sites.items():
            if name in self._exit_codes:
                continue
            if not site.start_request and self._starts[name] <= self._restarts:
                self._lost.discard(name)
                self._starts[name] += 1
                site.start_request = self._mail.ask(site.node, PLAY)
                site.asked_at = self._now()
                self._show(f"{name}: its party begins")
            elif not site.start_request:
                self._lost.add(name)  # it was restarted as often as is allowed
            elif not site.probe and self._now() > site.asked_at + _ASK_AGAIN_S:
                site.probe = self._mail.ask(site.node, AWAKE)
                site.asked_at = self._now()

    def _end_party(self, name: str, site: _Site, reply: Reply) -> None:
        """Record the exit code of a party that has ended.

        If Flower reports that the SuperNode did not answer, the party may be started again.

        `reply`: the reply to the request to run the party, untrusted.
        """
        exit_code = reply.values.get(CODE)
        site.start_request = ""
        if reply.error in _UNANSWERED:
            self._show(f"{name}: its SuperNode does not answer")
            return
        if type(exit_code) is int and 0 <= exit_code < 256:
            self._exit_codes[name] = exit_code
        else:
            self._exit_codes[name] = _NO_ANSWER
        self._show(f"{name}: {_describe_code(self._exit_codes[name])}")


def _describe_code(exit_code: int) -> str:
    """Return in words how a party ended, by the exit code of its process."""
    if exit_code == 0:
        return "its party has ended"
    meaning = _WORDS_OF_CODES.get(exit_code, "its own log says more")
    return f"its party ended with {exit_code}: {meaning}"
