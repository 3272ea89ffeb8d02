"""Vertical parties as Flower clients under a masked sum: python docs/examples/flower_vertical.py.

Three hosts hold ten columns each of the same patients; the server has the diagnoses. In each step a
host sends its scores under masks, and the server reads their sum and sends the residual back. A
host keeps no secret in memory between two messages: any process that reaches its folder answers.
"""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

from apfed_protocols import answer_hub, fresh_identity, hub_pump, secure_sum, suspend_role
from apfed_protocols.seal import Identity

HOSTS, STEPS, RATE = ("clinic", "laboratory", "pharmacy"), 40, 0.5
X, y = load_breast_cancer(return_X_y=True)
COLUMNS = dict(zip(HOSTS, np.split(scale(X), 3, axis=1), strict=True))
LABELS = y[:, None].astype(float)


def sum_of(run):
    return secure_sum("masked", HOSTS, to="server", clip=100.0, bits=24, session=f"flower {run}")


def settled(folder):
    """Make what a party keeps on its own disk, and return the key by which others know it."""
    folder.mkdir()
    identity = fresh_identity()
    (folder / "identity").write_bytes(identity.secret_bytes())
    (folder / "key").write_bytes(os.urandom(32))
    return identity.public


def signed_by(me):
    return {
        "identity": Identity.from_secret_bytes((DISK / me / "identity").read_bytes()),
        "peers": KNOWN,
    }


host, server = ClientApp(), ServerApp()


@host.query("name")
def name(message: Message, context: Context) -> Message:
    me = HOSTS[context.node_config["partition-id"]]
    return Message(RecordDict({"name": ConfigRecord({"is": me})}), reply_to=message)


@host.train()
def answer(message: Message, context: Context) -> Message:
    began, me = time.perf_counter(), HOSTS[context.node_config["partition-id"]]
    total, key = sum_of(context.run_id), (DISK / me / "key").read_bytes()
    book = DISK / me / "book"
    if kept := context.state.get("role"):
        role = total.resume_role(me, kept["sealed"], key, book=book)
    else:
        role = total.make_contributor(me)

    def scores(packed):
        residual = np.frombuffer(packed).reshape(LABELS.shape)
        model = context.state.setdefault("model", ArrayRecord({"w": Array(np.zeros((10, 1)))}))
        w = model["w"].numpy() + RATE * COLUMNS[me].T @ residual / len(residual)
        model["w"] = Array(w)
        return COLUMNS[me] @ w

    packet = answer_hub(role, message.content["hub"]["packet"], scores, **signed_by(me))
    context.state["role"] = ConfigRecord({"sealed": suspend_role(role, key, book=book)})
    took = {"ms": (time.perf_counter() - began) * 1000, "process": os.getpid()}
    answered = ConfigRecord({"packet": packet, **took})
    return Message(RecordDict({"hub": answered}), reply_to=message)


def ask(grid, sent):
    """Send messages, return the answers. Raises RuntimeError: a host has none."""
    answers = list(grid.send_and_receive(sent, timeout=60))
    failed = [str(one.error) for one in answers if one.has_error()]
    if failed or len(answers) < len(sent):
        raise RuntimeError(f"{len(answers)} of {len(sent)} hosts answered; {failed}")
    return answers


@server.main()
def main(grid: Grid, context: Context) -> None:
    while len(nodes := list(grid.get_node_ids())) < len(HOSTS):
        time.sleep(0.1)
    hello = ask(grid, [Message(RecordDict(), node, "query.name") for node in nodes])
    name_of = {one.metadata.src_node_id: one.content["name"]["is"] for one in hello}
    node_of = {name: node for node, name in name_of.items()}
    outgoing, answers, took, processes = [], [], [], set()

    def send(to, packet):
        record = RecordDict({"hub": ConfigRecord({"packet": packet})})
        outgoing.append(Message(record, node_of[to], "train"))

    def receive():
        if not answers:
            began = time.perf_counter()
            answers.extend(ask(grid, outgoing))
            took.append((began - time.perf_counter()) * 1000)  # which the sum did not take
            outgoing.clear()
        one = answers.pop()
        sender, told = name_of[one.metadata.src_node_id], one.content["hub"]
        took.append(told["ms"])
        processes.add((sender, told["process"]))
        return sender, told["packet"]

    ends = {"server": sum_of(context.run_id).make_receiver()}
    hub = hub_pump(ends, send, receive, **signed_by("server"))
    took.clear()
    residual, began = np.zeros_like(LABELS), time.perf_counter()
    for _ in range(STEPS):
        scores = hub.step(residual.tobytes(), LABELS.shape)
        residual = LABELS - 1 / (1 + np.exp(-scores))
    whole = (time.perf_counter() - began) * 1000
    print(f"accuracy {((scores > 0) == LABELS).mean():.3f}  scores differ {far(scores):.1e}")
    print(f"of {whole / STEPS:.0f} ms a step the sum took {(whole + sum(took)) / STEPS:.2f} ms")
    print(f"processes that answered as a host {len(processes) / len(HOSTS):.1f}")


def far(scores):
    """How far they are from those of the same loop over all columns in one process."""
    together, w = np.hstack(list(COLUMNS.values())), np.zeros((30, 1))
    residual = np.zeros_like(LABELS)
    for _ in range(STEPS):
        w += RATE * together.T @ residual / len(residual)
        residual = LABELS - 1 / (1 + np.exp(-together @ w))
    return abs(scores - together @ w).max()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:  # in reality a disk at each party, and keys told before
        DISK = Path(folder)
        KNOWN = {name: settled(DISK / name) for name in (*HOSTS, "server")}
        workers = {"init_args": {"num_cpus": 3}, "client_resources": {"num_cpus": 1}}
        run_simulation(server, host, num_supernodes=len(HOSTS), backend_config=workers)
