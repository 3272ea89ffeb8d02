"""What is a party's own is nowhere else: not in another's folder, memory at start, or messages."""

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
from safetensors.torch import load

from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.exchange import Kind, Links, Transport
from secure_apfed.runs.folder import PartyFolder, load_with_checksum
from secure_apfed.runs.outcome import Progress
from secure_apfed.runs.run import run
from tests.local.processes import Harm, Parties
from tests.secure_apfed.small_runs import small_config
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

NAMES = ("active", "passive-1", "passive-2")


def config_of(method: str) -> Config:
    train = {"epochs": 3, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"}
    return small_config(
        method, party_seeds="secret", train=train, guard={"mechanism": "gaussian", "sigma": 1.0}
    )


def rename_ids(config: Config) -> VerticalData:
    """Return the run's data with long, unique IDs, which can be searched for."""
    data = load_data(config.data, seed=0)
    common = set(data.active.ids).intersection(*(one.ids for one in data.passives))

    def rename_table(table: PartyTable) -> PartyTable:
        ids = tuple(
            f"everybody-knows-{one}" if one in common else f"only-{table.name}-knows-{one}"
            for one in table.ids
        )
        return replace(table, ids=ids)

    return replace(
        data, table=rename_table(data.active), passives=tuple(map(rename_table, data.passives))
    )


def list_secrets(parties: Parties, data: VerticalData, name: str) -> dict[str, bytes]:
    """List what the party alone may hold, as bytes that can be searched for."""
    folder = parties.run.get_party_path(name)
    pem = (folder / "identity.pem").read_bytes()
    identity = PartyFolder(folder).load_identity()
    found = {"identity": identity.secret_bytes(), "identity in PEM": pem.splitlines()[1]}
    if (table := next((one for one in data.tables if one.name == name), None)) is not None:
        found["an ID"] = f"only-{name}-knows".encode()
        found["features"] = table.features[7].numpy().tobytes()
        found["features in float64"] = table.features[7].double().numpy().tobytes()
        if table.labels is not None:
            found["labels"] = table.labels[:40].numpy().tobytes()
        for path in folder.glob("checkpoint-*"):
            content = msgpack.unpackb(load_with_checksum(path), strict_map_key=False)
            found["noise key"] = content["noise_key"]
            found["seed"] = msgpack.packb(content["seed"])
            found["parameters"] = max(
                (one.numpy().tobytes() for one in tensors_in(content["tensors"])), key=len
            )[:64]
    return found


def tensors_in(body: bytes) -> Iterator[torch.Tensor]:
    for name, tensor in load(body).items():
        if name.endswith("weight") and tensor.numel() >= 16:
            yield tensor


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", ["apfed_c", "tvfl"])
def test_no_folder_holds_what_is_anothers(method: str, tmp_path: Path) -> None:
    """In the middle of a run, when checkpoints hold all that a party is."""
    config = config_of(method)
    data = rename_ids(config)
    parties = Parties(config, tmp_path / "run", data=data)
    kind = Kind.REPRESENTATIONS if method == "apfed_c" else Kind.REQUEST
    parties.play({"active": Harm(kind, 25)})
    names = [path.name for path in parties.run.parties.iterdir()]
    every = {name: list_secrets(parties, data, name) for name in names}
    assert all(len(every[name]) >= 8 for name in NAMES)
    for name in names:
        files = [path for path in parties.run.get_party_path(name).rglob("*") if path.is_file()]
        written = {path: path.read_bytes() for path in files}
        for other, secrets in every.items():
            for what, secret in secrets.items():
                holders = [path.name for path, content in written.items() if secret in content]
                assert bool(holders) is (other == name) or (
                    # Written in another form, if at all: then at least not at anybody else's.
                    other == name and what in ("features in float64", "identity", "labels")
                ), (name, other, what, holders)


def read_memory(pid: int) -> bytes:
    """Read what a process of ours holds now that comes from no file."""
    parts = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, access, _, _, inode, *_ = line.split()
            if access.startswith("rw") and inode == "0":
                begin, end = place.split("-")
                memory.seek(int(begin, 16))
                parts.append(memory.read(int(end, 16) - int(begin, 16)))
    return b"".join(parts)


class Patient(Parties):
    """All are stopped for longer than a process of this machine may be silent."""

    gone_after_s = 60.0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="reads memory as Linux shows it")
def test_no_party_begins_with_what_is_anothers_in_memory(tmp_path: Path) -> None:
    """Each process, its rows loaded and its links open, just before its script begins."""
    config = config_of("apfed_c")
    data = rename_ids(config)
    parties = Patient(config, tmp_path / "run", data=data)
    harms = {name: Harm(None, 0, signal.SIGSTOP) for name in (*NAMES, "aggregator")}
    with parties.start(harms):
        pids = {name: one.pid or 0 for name, one in parties.processes.items()}
        stats = [Path(f"/proc/{pid}/stat") for pid in pids.values()]
        wait_until(lambda: all(" T " in stat.read_text() for stat in stats), "that all stopped")
        every = {name: list_secrets(parties, data, name) for name in parties.processes}
        for name, pid in pids.items():
            held = read_memory(pid)
            for other, secrets in every.items():
                for what in ("identity", "an ID", "features", "labels"):
                    if what in secrets and (other != name or what == "an ID"):
                        assert (secrets[what] in held) is (other == name), (name, other, what)
            os.kill(pid, signal.SIGCONT)
        for name, process in parties.processes.items():
            process.join(LONG_S)
            said = json.loads((parties.run.get_party_path(name) / "said.json").read_bytes())
            assert said["kind"] is None, said


class Overheard(Harm):
    """What befalls this party is that all that it says is written down, too."""

    def strike(self, folder: Path, transport: Transport | None = None) -> None:
        genuine = Links.send

        def log_message(self: Links, to: str, kind: Kind, step: int, payload: bytes = b"") -> None:
            with (folder / "told").open("ab") as file:
                file.write(msgpack.packb((to, kind, step, payload)))
            genuine(self, to, kind, step, payload)

        Links.send = log_message  # type: ignore[assignment,method-assign]  # own process


@pytest.mark.slow
def test_between_machines_too_an_active_by_code_says_the_same_whatever_it_holds(
    tmp_path: Path,
) -> None:
    """But for what is random by itself: blinded IDs, and fresh keys and names of the session."""
    config = small_config("apfed_code", data={"dataset": "breast_cancer", "labelled": 40})
    data = load_data(config.data, seed=0)
    said = []
    assert data.active.labels is not None
    other = replace(
        data.active, features=data.active.features.flip(0) * 3 + 1, labels=1 - data.active.labels
    )
    for name, of in {"one": data, "other": replace(data, table=other)}.items():
        parties = Parties(config, tmp_path / name, data=of, way="grpc")
        with parties.start({"active": Overheard(None)}):
            ended = parties.watch(list(parties.processes))
        assert {one["kind"] for one in ended.values()} == {None}, ended
        written = io.BytesIO((parties.run.get_party_path("active") / "told").read_bytes())
        told = [(to, Kind(kind), *more) for to, kind, *more in msgpack.Unpacker(written)]
        said.append(
            [
                (
                    to,
                    kind,
                    step,
                    b"" if kind.phase in ("agreement", "alignment", "set-up") else payload,
                )
                for to, kind, step, payload in told
            ]
        )
    assert said[0] == said[1]
    assert Kind.REQUEST in {kind for _, kind, _, payload in said[0] if payload}


# Who is common is known by how its ID is written, on purpose.
@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore::secure_apfed.errors.UnmatchedIdsWarning")
@pytest.mark.parametrize("method", ["apfed_c", "tvfl"])
def test_no_message_holds_what_is_its_senders_alone(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its receiver reads it, once the seal is off."""
    config, sent = config_of(method), list[tuple[str, Kind, bytes]]()
    data = rename_ids(config)
    genuine = Links.send

    def log_message(
        self: Links, receiver: str, kind: Kind, step: int, payload: bytes = b""
    ) -> None:
        sent.append((self.me, kind, payload))
        genuine(self, receiver, kind, step, payload)

    monkeypatch.setattr(Links, "send", log_message)
    found: dict[str, dict[str, bytes]] = {}

    def look(progress: Progress) -> None:
        if progress.step == 10:
            parties = Parties(config, tmp_path / "run", data=data)
            found.update({name: list_secrets(parties, data, name) for name in NAMES})

    run(config, tmp_path / "run", data=data, on_progress=look)
    assert all(len(found[name]) >= 8 for name in NAMES)
    assert {kind for _, kind, _ in sent} >= {Kind.GREETING, Kind.ALIGNMENT, Kind.REPRESENTATIONS}
    for sender, kind, payload in sent:
        for name, secrets in found.items():
            for what, secret in secrets.items():
                assert secret not in payload, (sender, kind, name, what)
