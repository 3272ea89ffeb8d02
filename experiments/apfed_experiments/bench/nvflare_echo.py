"""Two sites of a job of NVFlare's that send messages to each other, for its bench; needs nvflare.

Run by: `experiments/apfed_experiments/bench/nvflare.py`, and by NVFlare's processes, which load the
class from here.
"""

import json
import tempfile
from pathlib import Path

from nvflare.recipe.sim_env import SimEnv
from nvflare.recipe.spec import Recipe

from apfed_experiments.bench.local import sealed
from apfed_experiments.bench.talk import echo, seconds_of
from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.exchange import Kind, Links, drive
from secure_apfed.runs.connecting import Connect
from secure_apfed.runs.nvflare_job import job_of
from secure_apfed.runs.nvflare_kits import ALLOWED_CLASSES, allow_classes
from secure_apfed.runs.nvflare_site import Site
from secure_apfed.runs.party import PartyFile, Peer

__all__ = ["EchoSite", "play"]

_PATIENCE_S = 60.0


class EchoSite(Site):
    """One of two sites, "here" and "there".

    Args:
        folder: where the keys of both lie, and the seconds go.
        sizes: of payloads.
    """

    def __init__(self, folder: str, sizes: list[int]) -> None:
        super().__init__()
        self._folder, self._sizes = folder, sizes

    def _play(self, site: str, meet: Connect) -> None:
        folder = Path(self._folder)
        keys = json.loads((folder / "keys.json").read_bytes())
        identities = {name: Identity.restored(bytes.fromhex(key)) for name, key in keys.items()}
        known = {name: one.public for name, one in identities.items()}
        (peer,) = set(keys) - {site}
        told = PartyFile(
            party=site, active="here", passives=("there",), config=Path("none"), link="nvflare",
            peers={peer: Peer(identity=known[peer].hex())},
        )  # fmt: skip
        transport = meet(told, identities[site], known)
        links = Links(site, [peer], transport.post)
        drive(sealed(links, peer), transport, timeout_s=_PATIENCE_S)
        if site == "there":
            drive(echo(links), transport, timeout_s=_PATIENCE_S)
        else:
            found = seconds_of(
                links, lambda script: drive(script, transport, timeout_s=_PATIENCE_S), self._sizes
            )
            links.send("there", Kind.END, 0)
            (folder / "seconds.json").write_text(json.dumps(found))
        transport.close()


def play(folder: str, sizes: list[int]) -> None:
    """Play the job in NVFlare's simulator, with payloads of these sizes; `folder` gets seconds."""
    secrets = {name: fresh_identity().secret_bytes().hex() for name in ("here", "there")}
    (Path(folder) / "keys.json").write_text(json.dumps(secrets))
    with tempfile.TemporaryDirectory() as workspace:
        local = Path(workspace) / "echo" / "local"
        local.mkdir(parents=True)
        allow_classes(local / "resources.json", [*ALLOWED_CLASSES, f"{__name__}."])
        job = job_of(
            "echo",
            {name: EchoSite(folder, sizes) for name in secrets},
            packages=["apfed_experiments"],
        )
        Recipe(job).run(SimEnv(clients=[*secrets], workspace_root=workspace))
