"""The server: it sends residuals, reads sums of scores, and asks again where a host is silent."""

import time
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from apfed_protocols import hub_pump
from vertical.common import HOSTS, describe_sum, load_identity

server = ServerApp()
LOOK_S, AGAIN_S, BACK_S = 0.2, 60.0, 5.0
APP_RAISED = 2  # Flower's code of an error in a host's app


class RoleLostError(Exception):
    """A host died between the two files of a step: a new session begins."""


class Hosts:
    """The hosts' SuperNodes, by name; each has one packet at a time."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._node_of: dict[str, int] = {}
        self._asked: dict[str, RecordDict] = {}
        self._since: dict[str, float] = {}
        self._messages: dict[str, str] = {}  # the host of each message that has no answer yet
        self._answers: list[tuple[str, bytes]] = []
        self.session = ""
        self.repeated = 0

    def find_all(self) -> None:
        while len(self._node_of) < len(HOSTS):
            nodes = self._grid.get_node_ids()
            sent = [Message(RecordDict(), node, "query.name", ttl=60) for node in nodes]
            for reply in self._grid.send_and_receive(sent, timeout=30):
                if not reply.has_error():
                    self._node_of[reply.content["name"]["is"]] = reply.metadata.src_node_id

    def send(self, name: str, packet: bytes) -> None:
        content = ConfigRecord({"packet": packet, "session": self.session})
        self._push(name, RecordDict({"hub": content}))

    def _push(self, name: str, record: RecordDict) -> None:
        (message,) = self._grid.push_messages([Message(record, self._node_of[name], "train")])
        self._messages[message] = name
        self._asked[name], self._since[name] = record, time.monotonic()

    def receive(self) -> tuple[str, bytes]:
        """Return who answered, and its packet. A silent host is asked the same again."""
        while not self._answers:
            self._read_replies()
            for name in list(self._asked):
                if time.monotonic() > self._since[name] + AGAIN_S:
                    self._ask_again(name)
            time.sleep(LOOK_S)
        return self._answers.pop()

    def _read_replies(self) -> None:
        for reply in self._grid.pull_messages(list(self._messages)):
            name = self._messages.pop(reply.metadata.reply_to_message_id, "")
            if name not in self._asked:
                continue  # it was asked twice, and both answers came at once
            if not reply.has_error():
                self._forget_packet(name)
                self._answers.append((name, reply.content["hub"]["packet"]))
            elif reply.error.code == APP_RAISED:
                raise RoleLostError(f"{name}: {reply.error.reason}")
            else:  # its SuperNode is gone, and may be back soon
                self._since[name] = time.monotonic() - AGAIN_S + BACK_S

    def _ask_again(self, name: str) -> None:
        self.repeated += 1
        print(f"{name} is asked again", flush=True)
        self._push(name, self._asked[name])

    def _forget_packet(self, name: str) -> None:
        """Wait for no answer to this host's packet any more, however often it was asked."""
        del self._asked[name]
        self._messages = {asked: host for asked, host in self._messages.items() if host != name}

    def forget_all(self) -> None:
        self._asked.clear()
        self._messages.clear()
        self._answers.clear()


@server.main()
def main(grid: Grid, context: Context) -> None:
    steps, disk = int(context.run_config["steps"]), Path(str(context.run_config["disk"]))
    labels = np.load(disk / "table.npy")
    hosts, hub, sessions = Hosts(grid), None, 0
    hosts.find_all()
    every_score, residual = [], np.zeros_like(labels)
    began = time.perf_counter()
    while (step := len(every_score)) < steps:
        try:
            if hub is None:
                sessions += 1
                hosts.session = f"flower {context.run_id} {sessions}"
                ends = {"server": describe_sum(hosts.session).make_receiver()}
                hub = hub_pump(ends, hosts.send, hosts.receive, **load_identity(disk))
            scores = hub.step(step.to_bytes(8, "big") + residual.tobytes(), labels.shape)
        except RoleLostError as error:
            print(f"session {sessions} is lost: {error}", flush=True)
            hosts.forget_all()
            hub = None
            continue
        residual = labels - 1 / (1 + np.exp(-scores))
        every_score.append(scores)
        print(f"step {step + 1} of {steps}", flush=True)
    np.save(disk / "scores.npy", every_score)
    took = (time.perf_counter() - began) / steps
    print(f"accuracy {((scores > 0) == labels).mean():.3f}")
    print(f"asked again {hosts.repeated}, sessions {sessions}, {took:.1f} s a step")
