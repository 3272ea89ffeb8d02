"""An app of Flower's that starts the parties of a project at their SuperNodes and waits for them.

Run by: Flower's processes, which take `host` at each site and `server` at the SuperLink; what these
do stands in `flower_parties.py`. The code of an app comes with each run, so a site that trusts its
submitter less than its own machine sets `SECURE_APFED_COMMAND`; see docs/flower.md.
"""

import os
from collections.abc import Iterable, Sequence

from apfed_protocols.installing import install_extra
from secure_apfed.base.names import check_name
from secure_apfed.errors import ConfigError
from secure_apfed.organisations.flower_parties import (
    EXIT_CODE_KEY,
    RUN_REQUEST,
    Reply,
    RunLeader,
    run_own_party,
)

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise ConfigError(
        "an app of Flower's needs flwr 1.42 or later, of which something is missing "
        f"({error}); in an environment of its own run: {install_extra('flwr')}"
    ) from error

_RECORD_KEY = "party"
_QUESTION_LIFETIME_S = 60.0  # after which a question is dropped
_MAX_RUN_S = 30 * 86_400.0  # of a run

host = ClientApp()
server = ServerApp()


@host.query("who")  # type: ignore[untyped-decorator]  # flwr is not always installed
def tell_party(message: Message, context: Context) -> Message:
    """Reply with the party and the project that the SuperNode's own configuration names."""
    values = {key: str(context.node_config.get(key, "")) for key in ("party", "project")}
    return Message(RecordDict({_RECORD_KEY: ConfigRecord(values)}), reply_to=message)


@host.query("awake")  # type: ignore[untyped-decorator]  # flwr is not always installed
def tell_awake(message: Message, context: Context) -> Message:
    """Reply without content; a SuperNode answers this only while it runs no party."""
    return Message(RecordDict(), reply_to=message)


@host.train()  # type: ignore[untyped-decorator]  # flwr is not always installed
def play_party(message: Message, context: Context) -> Message:
    """Run the party of this site to its end; reply with its exit code and nothing else."""
    exit_code = run_own_party(os.environ)
    return Message(
        RecordDict({_RECORD_KEY: ConfigRecord({EXIT_CODE_KEY: exit_code})}), reply_to=message
    )


@server.main()  # type: ignore[untyped-decorator]  # flwr is not always installed
def lead_run(grid: Grid, context: Context) -> None:
    """Start all parties of a run at their SuperNodes, and wait until they have ended.

    Raises RuntimeError: a party failed, so that Flower's run fails, too.
    """
    config = context.run_config
    names = [check_name(name) for name in str(config["parties"]).split(",")]
    lead = RunLeader(
        names, str(config["project"]), _GridMail(grid), max_restarts=int(config["restarts"])
    )
    lead.run()


class _GridMail:
    """A carrier of questions to SuperNodes, and of their replies, by Flower's messages."""

    def __init__(self, grid: Grid) -> None:
        """Use Flower's connection to the SuperNodes, `grid`."""
        self._grid = grid

    def list_nodes(self) -> Iterable[int]:
        """Return the numbers of the SuperNodes that are online."""
        nodes: Iterable[int] = self._grid.get_node_ids()
        return nodes

    def ask(self, node: int, question: str) -> str:
        """Send a question to a SuperNode; return the message's ID, by which its reply is found.

        The request to run a party is answered when the party has ended, maybe after days.
        """
        lifetime_s = _MAX_RUN_S if question == RUN_REQUEST else _QUESTION_LIFETIME_S
        message = Message(RecordDict(), node, question, ttl=lifetime_s)
        message_id: str
        (message_id,) = self._grid.push_messages([message])
        return message_id

    def read_replies(self, question_ids: Sequence[str]) -> Iterable[Reply]:
        """Yield the replies that have come so far to the messages with these IDs."""
        for reply in self._grid.pull_messages(question_ids):
            message_id = reply.metadata.reply_to_message_id
            if reply.has_error():
                yield Reply(message_id, {}, error_code=reply.error.code)
            else:
                yield Reply(message_id, dict(reply.content.config_records.get(_RECORD_KEY, {})))
