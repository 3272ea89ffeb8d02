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
from secure_apfed.organisations.flower_parties import CODE, PLAY, Lead, Reply, run_own_party

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise ConfigError(
        "an app of Flower's needs flwr 1.42 or later, of which something is missing "
        f"({error}); in an environment of its own run: {install_extra('flwr')}"
    ) from error

_RECORD = "party"
_QUESTION_S = 60.0  # after which a question is dropped
_LONGEST_S = 30 * 86_400.0  # of a run

host = ClientApp()
server = ServerApp()


@host.query("who")  # type: ignore[untyped-decorator]  # flwr is not always installed
def tell_party(message: Message, context: Context) -> Message:
    """Report the party and the project that the site's own configuration names."""
    values = {key: str(context.node_config.get(key, "")) for key in ("party", "project")}
    return Message(RecordDict({_RECORD: ConfigRecord(values)}), reply_to=message)


@host.query("awake")  # type: ignore[untyped-decorator]  # flwr is not always installed
def tell_awake(message: Message, context: Context) -> Message:
    """Return an empty reply, which shows that the SuperNode runs no party now."""
    return Message(RecordDict(), reply_to=message)


@host.train()  # type: ignore[untyped-decorator]  # flwr is not always installed
def play_party(message: Message, context: Context) -> Message:
    """Run the party of this site to its end; report only its exit code."""
    code = run_own_party(os.environ)
    return Message(RecordDict({_RECORD: ConfigRecord({CODE: code})}), reply_to=message)


@server.main()  # type: ignore[untyped-decorator]  # flwr is not always installed
def lead_run(grid: Grid, context: Context) -> None:
    """Lead one run. Raises RuntimeError: a party failed, so that Flower's run fails, too."""
    config = context.run_config
    names = [check_name(name) for name in str(config["parties"]).split(",")]
    Lead(names, str(config["project"]), _GridMail(grid), restarts=int(config["restarts"])).run()


class _GridMail:
    """A `Mail` of questions and replies by Flower's messages."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def list_nodes(self) -> Iterable[int]:
        nodes: Iterable[int] = self._grid.get_node_ids()
        return nodes

    def ask(self, node: int, question: str) -> str:
        """Send a question to a SuperNode; return the message's ID as the question's name."""
        ttl = _LONGEST_S if question == PLAY else _QUESTION_S
        message_id: str
        (message_id,) = self._grid.push_messages([Message(RecordDict(), node, question, ttl=ttl)])
        return message_id

    def read_replies(self, asked: Sequence[str]) -> Iterable[Reply]:
        """Yield the replies that have come to the messages of these IDs."""
        for reply in self._grid.pull_messages(asked):
            name = reply.metadata.reply_to_message_id
            if reply.has_error():
                yield Reply(name, {}, error=reply.error.code)
            else:
                yield Reply(name, dict(reply.content.config_records.get(_RECORD, {})))
