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
    """A reply to a question.

    Attributes:
        asked: the question's name.
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
        """Send a question (`WHO`, `AWAKE` or `PLAY`) to a SuperNode; return the question's name."""

    def read_replies(self, asked: Sequence[str]) -> Iterable[Reply]:
        """Return the replies that have come to the questions of these names."""


def run_own_party(environment: Mapping[str, str]) -> int:
    """Run the site's party in a process of its own; return its exit code.

    The process ends if this one ends, since its standard input then does.

    `environment`: the site's variables, by name.

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
    """Yield a descriptor for the party's messages; without a path they are dropped.

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
    """A SuperNode that named its party.

    Attributes:
        node: Flower's number of the SuperNode.
        asked: name of the question to run the party; "": it is not asked now.
        probe: name of the question whether it is awake; "": it is not asked now.
        asked_at: when the last question was sent, seconds of the leader's clock.
    """

    node: int
    asked: str = ""
    probe: str = ""
    asked_at: float = 0.0


class Lead:
    """The server's side of one run: it finds the parties' SuperNodes and asks each to start.

    Args:
        names: names of all parties of the run.
        project: the digest of the sealed project in hex; a site of another project is refused.
        mail: reaches the SuperNodes.
        restarts: how often a party is started again after its SuperNode was gone.
        show: receives each line for the log of the run.
        now: the clock, in seconds.
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
        self._names = list(names)
        self._project = project
        self._mail = mail
        self._restarts = restarts
        self._show = show
        self._now = now
        self._wait = wait
        self._sites: dict[str, _Site] = {}  # by party
        self._nodes: dict[int, str] = {}  # party by SuperNode; "": none of this run
        self._greetings: dict[str, int] = {}  # SuperNode by the name of the question who it is
        self._starts = dict.fromkeys(names, 0)  # by party, how often it was started
        self._lost: set[str] = set()  # started parties whose SuperNode is gone
        self._waiting_nodes: set[int] = set()  # in the name of a party that another one runs
        self._codes: dict[str, int] = {}  # exit codes, by ended party

    def run(self) -> None:
        """Run to the end.

        Raises:
            RuntimeError: a party ended with an error, or its SuperNode did not come back.
        """
        while not self._is_over():
            online = set(self._mail.list_nodes())
            self._forget_gone(online)
            self._greet_new(online)
            self._read_replies()
            self._start_parties()
            self._wait(_LOOK_S)
        failed = {name: code for name, code in self._codes.items() if code}
        gone = [name for name in self._names if name not in self._codes]
        if failed or gone:
            reasons = [f"{name}: {_describe_code(code)}" for name, code in failed.items()]
            reasons += [f"{name}: its SuperNode is gone" for name in gone]
            raise RuntimeError("; ".join(reasons))

    def _is_over(self) -> bool:
        """Return whether every party has ended, or is lost while all others have ended."""
        open_parties = set(self._names) - set(self._codes)
        return not open_parties or (bool(self._codes) and open_parties <= self._lost)

    def _forget_gone(self, online: set[int]) -> None:
        """Forget SuperNodes that are not among those online; their parties wait for another one."""
        for node in [node for node in self._nodes if node not in online]:
            name = self._nodes.pop(node)
            site = self._sites.get(name)
            if site is not None and site.node == node:
                self._lose_site(name)

    def _lose_site(self, name: str) -> None:
        """Forget a party's SuperNode that is gone; if the party was started, it is lost."""
        del self._sites[name]
        if name not in self._codes and self._starts[name]:
            self._lost.add(name)
            self._show(f"{name}: its SuperNode is gone")

    def _greet_new(self, online: set[int]) -> None:
        """Ask new SuperNodes for their party."""
        asked = {*self._nodes, *self._greetings.values()}
        for node in online - asked:
            self._greetings[self._mail.ask(node, WHO)] = node

    def _read_replies(self) -> None:
        """Read the SuperNodes' replies, each untrusted."""
        questions = [*self._greetings]
        for site in self._sites.values():
            questions += [question for question in (site.asked, site.probe) if question]
        for reply in self._mail.read_replies(questions) if questions else ():
            self._read_reply(reply)

    def _read_reply(self, reply: Reply) -> None:
        """Process a reply: who a SuperNode is, how its party ended, or that it runs no party."""
        asked = reply.asked
        if asked in self._greetings:
            self._meet_site(self._greetings.pop(asked), reply)
            return
        for name, site in list(self._sites.items()):
            if asked == site.asked:
                self._end_party(name, site, reply)
            elif asked == site.probe:
                site.probe = ""
                if site.asked and reply.error is None:
                    # It is awake while its party should run, so it restarted meanwhile.
                    site.asked = ""
                    self._show(f"{name}: its SuperNode began anew")

    def _meet_site(self, node: int, reply: Reply) -> None:
        """Note which party a SuperNode runs; leave out others and second ones.

        `node`: Flower's number of the SuperNode. `reply`: says its party and project.
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
        elif name in self._sites:  # asked again until the former SuperNode is gone
            if node not in self._waiting_nodes:
                self._show(f"{name}: another SuperNode in its name waits until the first is gone")
            self._waiting_nodes.add(node)
        else:
            self._nodes[node] = name
            self._sites[name] = _Site(node)
            self._show(f"{name}: its SuperNode is here")

    def _start_parties(self) -> None:
        """Start each party that does not run, once the SuperNodes of all parties are here.

        A SuperNode that was asked long ago is asked whether it is awake, as it would be after a
        restart.
        """
        missing = set(self._names) - set(self._sites) - set(self._codes) - self._lost
        if missing and not any(self._starts.values()):
            return
        for name, site in self._sites.items():
            if name in self._codes:
                continue
            if not site.asked and self._starts[name] <= self._restarts:
                self._lost.discard(name)
                self._starts[name] += 1
                site.asked = self._mail.ask(site.node, PLAY)
                site.asked_at = self._now()
                self._show(f"{name}: its party begins")
            elif not site.asked:
                self._lost.add(name)
            elif not site.probe and self._now() > site.asked_at + _ASK_AGAIN_S:
                site.probe = self._mail.ask(site.node, AWAKE)
                site.asked_at = self._now()

    def _end_party(self, name: str, site: _Site, reply: Reply) -> None:
        """Record a party's exit code; without a reply it may be started again."""
        code = reply.values.get(CODE)
        site.asked = ""
        if reply.error in _UNANSWERED:
            self._show(f"{name}: its SuperNode does not answer")
            return
        self._codes[name] = code if type(code) is int and 0 <= code < 256 else _NO_ANSWER
        self._show(f"{name}: {_describe_code(self._codes[name])}")


def _describe_code(code: int) -> str:
    """Return in words what a party's exit code means."""
    if code == 0:
        return "its party has ended"
    return f"its party ended with {code}: {_WORDS_OF_CODES.get(code, 'its own log says more')}"
