"""Two parties with sealed links and audit logs, one frame at a time, for tests."""

from collections.abc import Sequence
from pathlib import Path

from apfed_protocols.seal import SealedLink, fresh_identity, fresh_run_key
from secure_apfed.audit_log import AuditLog
from secure_apfed.exchange import Envelope, Kind, Links
from secure_apfed.names import ReleaseFigure

__all__ = ["FakeMeter", "Pair"]


class FakeMeter:
    """What releases cost, as a test says."""

    figure: ReleaseFigure = "epsilon_x"

    def __init__(self) -> None:
        self.charges, self.epsilon = 0, 0.0

    def charge(self, epsilon: float) -> None:
        self.charges, self.epsilon = self.charges + 1, epsilon


_ENDS = (("ann", "bob"), ("bob", "ann"))


class Pair:
    """Ann and Bob, who keep their identities over sessions.

    Attributes:
        logs: by party, open; paths: of their files; meter: of Ann's releases.
        on_the_way: frames that were sent and not taken, by sender.
    """

    def __init__(self, folder: Path) -> None:
        self.identities = {name: fresh_identity() for name in ("ann", "bob")}
        self.paths = {name: folder / name / "audit.log" for name in self.identities}
        for path in self.paths.values():
            path.parent.mkdir(exist_ok=True)
        self.meter = FakeMeter()
        self.logs: dict[str, AuditLog] = {}
        self.begin()

    def begin(self) -> None:
        """A new session, in the same logs."""
        self.on_the_way: dict[str, list[bytes]] = {"ann": [], "bob": []}
        self.logs = {
            me: AuditLog(
                self.paths[me], me, self.identities[me], {peer: self.identities[peer].public},
                self.meter if me == "ann" else FakeMeter(),
            )
            for me, peer in _ENDS
        }  # fmt: skip
        self.links = {me: self._links(me, peer) for me, peer in _ENDS}
        keys = {name: fresh_run_key() for name in self.links}
        seals = {
            me: SealedLink(me=me, peer=peer, run_key=keys[me], contract_hash=bytes(32))
            for me, peer in _ENDS
        }
        for me, peer in _ENDS:
            seals[me].agree(keys[peer].public, seals[peer].hello)
            self.links[me].seal("session", {peer: seals[me]})

    def _links(self, me: str, peer: str) -> Links:
        sent = self.on_the_way[me]
        return Links(
            me, [peer], lambda receiver, frame: sent.append(frame), observers=(self.logs[me],)
        )

    def send(self, sender: str, *steps: int, payload: bytes = b"z", arrive: bool = True) -> None:
        """One message a step, which the other takes unless it never arrives."""
        receiver = "bob" if sender == "ann" else "ann"
        for step in steps:
            self.links[sender].send(receiver, Kind.REPRESENTATIONS, step, payload)
            if arrive:
                self.take(receiver, self.on_the_way[sender].pop(0))

    def take(self, receiver: str, frame: bytes) -> Envelope:
        """Let a party read a frame on its link.

        Raises: as `Links.receive`.
        """
        sender = "bob" if receiver == "ann" else "ann"
        script = self.links[receiver].receive(sender, Kind.REPRESENTATIONS)
        script.send(None)
        try:
            script.send((sender, frame))
        except StopIteration as end:
            taken: Envelope = end.value
            return taken
        raise AssertionError("it waits on")

    def close(self, names: Sequence[str] = ("ann", "bob")) -> None:
        """Sign the logs, as at the end of a run."""
        for name in names:
            self.logs[name].close()
