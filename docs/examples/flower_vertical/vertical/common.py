"""What the hosts and the server have agreed on, and what each party keeps on its own disk."""

import json
from pathlib import Path
from typing import Any

from apfed_protocols import secure_sum
from apfed_protocols.seal import Identity

HOSTS, RATE = ("clinic", "laboratory", "pharmacy"), 0.5


def describe_sum(session: str) -> Any:
    """Return the sum of one session; another session has other masks."""
    return secure_sum("masked", HOSTS, to="server", clip=100.0, bits=24, session=session)


def load_identity(disk: Path) -> dict[str, Any]:
    """Return this party's key pair and the public keys of all, from its folder."""
    known = json.loads((disk / "known.json").read_text())
    return {
        "identity": Identity.from_secret_bytes((disk / "identity").read_bytes()),
        "peers": {name: bytes.fromhex(key) for name, key in known.items()},
    }
