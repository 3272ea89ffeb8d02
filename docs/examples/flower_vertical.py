"""Vertical parties as Flower clients under a masked sum: python docs/examples/flower_vertical.py.

Three hosts hold ten columns each of the same patients; the server has the diagnoses. In each step a
host sends its scores under masks, and the server reads their sum and sends the residual back. The
keys from which hosts make masks pass through the server, which is taken to follow the protocol:
one that swaps them reads single scores.
"""

import time
from collections import deque

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

from apfed_protocols import LocalProtocolError, MaskedSum, StepBinding, SumAgreement

HOSTS, STEPS, RATE = ("clinic", "laboratory", "pharmacy"), 40, 0.5
X, y = load_breast_cancer(return_X_y=True)
COLUMNS = dict(zip(HOSTS, np.split(scale(X), 3, axis=1), strict=True))
LABELS = y[:, None].astype(float)


def sum_of(run):
    names = {"receiver": "server", "combiner": "adder", "contributors": HOSTS}
    return MaskedSum(SumAgreement(session=f"flower {run}", clip_norm=100.0, bits=24, **names))


def bound(run, step, residual):
    return StepBinding.of(f"flower {run}", step, rows=b"all", message=residual.tobytes())


host = ClientApp()
roles = {}  # of this process: a role has keys, and is never written down


def role_of(context):
    """Return a host's name and its end of the sum, which only the process has that began it."""
    me = HOSTS[context.node_config["partition-id"]]
    if (context.run_id, me) not in roles:
        raise LocalProtocolError(
            f"{me}: this process holds no keys of run {context.run_id}; Flower's messages to one "
            "host must reach one process, see `backend_config` below"
        )
    return me, roles[context.run_id, me]


def mail(me, outgoing):
    """Messages of a role's set-up as a record of Flower's."""
    found = list(outgoing)
    to, body = [out.receiver for out in found], [out.body for out in found]
    return RecordDict({"mail": ConfigRecord({"from": me, "to": to, "body": body})})


def letters(message):
    """What `mail` wrote: who sent what to whom."""
    found = message.content["mail"]
    return [(found["from"], *pair) for pair in zip(found["to"], found["body"], strict=True)]


@host.query("start")
def start(message: Message, context: Context) -> Message:
    me = HOSTS[context.node_config["partition-id"]]
    roles[context.run_id, me] = sum_of(context.run_id).contributor(me)
    return Message(mail(me, roles[context.run_id, me].start()), reply_to=message)


@host.query("receive")
def receive(message: Message, context: Context) -> Message:
    me, role = role_of(context)
    letter = message.content["letter"]
    return Message(mail(me, role.receive(letter["from"], letter["body"])), reply_to=message)


@host.train()
def train(message: Message, context: Context) -> Message:
    me, role = role_of(context)
    residual, step = message.content["asked"]["residual"].numpy(), message.content["step"]["step"]
    model = context.state.setdefault("model", ArrayRecord({"w": Array(np.zeros((10, 1)))}))
    w = model["w"].numpy() + RATE * COLUMNS[me].T @ residual / len(residual)
    model["w"] = Array(w)
    began = time.perf_counter()
    body = role.contribute(COLUMNS[me] @ w, bound(context.run_id, step, residual))
    took = MetricRecord({"ms": (time.perf_counter() - began) * 1000})
    answer = RecordDict({"sum": ConfigRecord({"body": body}), "took": took})
    return Message(answer, reply_to=message)


server = ServerApp()


def ask(grid, kind, asked):
    """Send records by node, return the answers. Raises RuntimeError: a host has none."""
    sent = [Message(record, node, kind) for node, record in asked]
    answers = list(grid.send_and_receive(sent, timeout=60))
    failed = [str(one.error) for one in answers if one.has_error()]
    if failed or len(answers) < len(sent):
        raise RuntimeError(f"{kind}: {len(answers)} of {len(sent)} hosts answered; {failed}")
    return answers


def set_up(grid, active):
    """Carry the set-up between hosts and server; return the names of the nodes."""
    while len(nodes := list(grid.get_node_ids())) < len(HOSTS):
        time.sleep(0.1)
    hello = ask(grid, "query.start", [(node, RecordDict()) for node in nodes])
    name_of = {one.metadata.src_node_id: one.content["mail"]["from"] for one in hello}
    if sorted(name_of.values()) != sorted(HOSTS):
        raise RuntimeError(f"hosts are {HOSTS}, got {sorted(name_of.values())}")
    node_of = {name: node for node, name in name_of.items()}
    waiting = deque(letter for one in hello for letter in letters(one))
    waiting.extend(("server", out.receiver, out.body) for out in active.start())
    while waiting:
        sender, to, body = waiting.popleft()
        if to == "server":
            new = [("server", out.receiver, out.body) for out in active.receive(sender, body)]
        else:
            letter = RecordDict({"letter": ConfigRecord({"from": sender, "body": body})})
            new = letters(*ask(grid, "query.receive", [(node_of[to], letter)]))
        waiting.extend(new)
    return name_of


@server.main()
def main(grid: Grid, context: Context) -> None:
    masked = sum_of(context.run_id)
    active, adder = masked.receiver(), masked.combiner()  # masks protect from one who is both
    name_of = set_up(grid, active)
    residual, of_sum, began = np.zeros_like(LABELS), 0.0, time.perf_counter()
    for step in range(STEPS):
        asked = ArrayRecord({"residual": Array(residual)})
        record = RecordDict({"asked": asked, "step": ConfigRecord({"step": step})})
        answers = ask(grid, "train", [(node, record) for node in name_of])
        opening = time.perf_counter()
        sent = {name_of[one.metadata.src_node_id]: one.content["sum"]["body"] for one in answers}
        answered = bound(context.run_id, step, residual)
        scores = active.decode(adder.combine(sent), LABELS.shape, answered)
        of_sum += (time.perf_counter() - opening) * 1000
        of_sum += sum(one.content["took"]["ms"] for one in answers)
        residual = LABELS - 1 / (1 + np.exp(-scores))
    whole = (time.perf_counter() - began) * 1000
    print(f"accuracy {((scores > 0) == LABELS).mean():.3f}  scores differ {far(scores):.1e}")
    print(f"of {whole / STEPS:.0f} ms a step the sum took {of_sum / STEPS:.2f} ms")


def far(scores):
    """How far they are from those of the same loop over all columns in one process."""
    together, w = np.hstack(list(COLUMNS.values())), np.zeros((30, 1))
    residual = np.zeros_like(LABELS)
    for _ in range(STEPS):
        w += RATE * together.T @ residual / len(residual)
        residual = LABELS - 1 / (1 + np.exp(-together @ w))
    return abs(scores - together @ w).max()


if __name__ == "__main__":
    import flower_vertical as app  # by its name, so that Flower's one worker keeps `roles`

    one_process = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1}}
    run_simulation(app.server, app.host, num_supernodes=len(HOSTS), backend_config=one_process)
