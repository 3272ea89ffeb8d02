"""A host: every message is answered by a new process, which finds all that it needs on its disk.

The state is one file that is replaced in one step. It has the last packet's answer, so a packet
that comes again gets the same bytes again, and no step is computed twice.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from apfed_protocols import answer_hub, suspend_role
from vertical.common import RATE, describe_sum, load_identity

host = ClientApp()


@host.query("name")
def tell_name(message: Message, context: Context) -> Message:
    name = str(context.node_config["host"])
    return Message(RecordDict({"name": ConfigRecord({"is": name})}), reply_to=message)


@host.train()
def answer_packet(message: Message, context: Context) -> Message:
    me, disk = str(context.node_config["host"]), Path(str(context.node_config["disk"]))
    asked = message.content["hub"]
    answer = answer_once(me, disk, str(asked["session"]), bytes(asked["packet"]))
    return Message(RecordDict({"hub": ConfigRecord({"packet": answer})}), reply_to=message)


def answer_once(me: str, disk: Path, session: str, packet: bytes) -> bytes:
    """Return the answer to a packet: the stored one if this packet was the last."""
    file = disk / "state.json"
    state = {"step": -1, "w": [[0.0]] * 10, "session": "", "packet": ""}
    state |= json.loads(file.read_text()) if file.exists() else {}
    packet_digest = hashlib.sha256(session.encode() + packet).hexdigest()
    if state["packet"] == packet_digest:
        return bytes.fromhex(state["answer"])
    total, key = describe_sum(session), (disk / "key").read_bytes()
    role_log = disk / f"role-log-{hashlib.sha256(session.encode()).hexdigest()[:16]}"
    if state["session"] == session:
        role = total.resume_role(me, bytes.fromhex(state["role"]), key, role_log=role_log)
    else:  # the server began another session, whose masks are new
        role = total.make_contributor(me)

    def scores(step_and_residual: bytes) -> np.ndarray:
        step, columns = int.from_bytes(step_and_residual[:8], "big"), np.load(disk / "table.npy")
        w = np.array(state["w"])
        if step > state["step"]:  # after a lost session a step comes again, and trains once
            residual = np.frombuffer(step_and_residual[8:]).reshape(-1, 1)
            w = w + RATE * columns.T @ residual / len(residual)
            state.update(step=step, w=w.tolist())
        return columns @ w

    answer = answer_hub(role, packet, scores, **load_identity(disk))
    sealed = suspend_role(role, key, role_log=role_log)
    state.update(session=session, packet=packet_digest, answer=answer.hex(), role=sealed.hex())
    fresh = disk / "state.new"
    fresh.write_text(json.dumps(state))
    fresh.replace(file)
    return answer
