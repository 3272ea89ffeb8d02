"""What a relay sees of a run under CKKS: sealed frames, and nothing of anybody's data."""

import contextlib
import re
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from secure_apfed.between.certificates import Credentials
from secure_apfed.between.grpc_link import GrpcConnection
from secure_apfed.between.relay import Relay
from secure_apfed.data import load_data, pack_own
from tests.links.test_links_equal import config_of
from tests.local.processes import Parties

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


class Watched(Parties):
    """Parties whose relay is in this process, where all that it reads is kept."""

    relay: Relay

    def prepared(self, files: Mapping[str, Path]) -> None:
        folder = self.run.path / "relay"
        pem = [(folder / f"{name}.pem").read_bytes() for name in ("ca", "certificate", "key")]
        self.relay = Relay(("127.0.0.1", 0), Credentials(*pem))
        for file in files.values():
            text = file.read_text()
            file.write_text(re.sub(r"(?m)^relay: .*$", f"relay: 127.0.0.1:{self.relay.port}", text))


@pytest.mark.slow
def test_a_relay_reads_nothing_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, lock = list[bytes](), threading.Lock()
    receive = GrpcConnection.recv_bytes

    def recorded(connection: GrpcConnection) -> bytes:
        frame = receive(connection)
        with lock:
            seen.append(frame)
        return frame

    monkeypatch.setattr(GrpcConnection, "recv_bytes", recorded)
    monkeypatch.setattr("tests.local.processes.relaying", lambda files: contextlib.nullcontext())
    parties = Watched(config_of("ckks"), tmp_path / "run", over="relay")
    said = parties.play()
    parties.relay.close()
    assert not {name: one for name, one in said.items() if one["kind"]}
    frames = b"".join(seen)
    assert len(frames) > 1_000_000
    data = load_data(parties.config.data, seed=parties.config.seed)
    for name in (data.active.name, *(table.name for table in data.passives)):
        held = data.own(name)
        assert held is not None
        table, packed = held.table, pack_own(held)
        rows = [np.asarray(row).tobytes() for row in table.features]
        assert sum(row in packed for row in rows) > len(rows) // 2  # this is how they would look
        assert not [row for row in rows if row in frames]
        ids = [str(one).encode() for one in table.ids if len(str(one)) > 3]
        assert sum(frames.count(one) for one in ids) <= len(ids) * len(frames) / 2**32 + 3
    labels = data.active.labels
    assert labels is not None
    assert np.asarray(labels[:40]).tobytes() not in frames
    for word in (b"contribution", b"greeting", b"apfed", b"alignment"):
        assert word not in frames
    # Whatever else has a form (gradients, ciphertexts) would be shorter when compressed; hellos,
    # which are shorter than this, are in the clear.
    sealed = b"".join(frame for frame in seen if len(frame) > 600)
    assert len(zlib.compress(sealed, 6)) > 0.999 * len(sealed) > 0.9 * len(frames)
