"""Two sites of a job of NVFlare's that send messages to each other, for its bench; needs nvflare.

Run by: `experiments/apfed_bench/parties.py`, and by NVFlare's processes, which load the class from
here.
"""

import json
import tempfile
from pathlib import Path

from nvflare.recipe.sim_env import SimEnv
from nvflare.recipe.spec import Recipe

from apfed_bench.parties import echo, over, sealed, seconds_of
from apfed_protocols.seal import Identity, fresh_identity
from secure_apfed.contrib.nvflare_job import ALLOWED_CLASSES, allow_classes, job_of
from secure_apfed.contrib.nvflare_site import Site
from secure_apfed.exchange import Kind, Links
from secure_apfed.runs.party import Connect, PartyFile, Peer

__all__ = ["EchoSite", "play"]


class EchoSite(Site):
    """One of two sites, "here" and "there"; in `folder` the keys of both lie, and seconds go."""

    def __init__(self, folder: str, sizes: list[int]) -> None:
        super().__init__()
        self._folder, self._sizes = folder, sizes

    def _play(self, site: str, meet: Connect) -> None:
        folder = Path(self._folder)
        keys = json.loads((folder / "keys.json").read_bytes())
        identities = {name: Identity.restored(bytes.fromhex(key)) for name, key in keys.items()}
        known = {name: identity.public for name, identity in identities.items()}
        (peer,) = set(keys) - {site}
        file = PartyFile(
            party=site, active="here", passives=("there",), config=Path("none"), link="nvflare",
            peers={peer: Peer(identity=known[peer].hex())},
        )  # fmt: skip
        transport = meet(file, identities[site], known)
        links = Links(site, [peer], transport.post)
        over(transport)(sealed(links, peer))
        if site == "there":
            over(transport)(echo(links))
        else:
            found = seconds_of(links, over(transport), self._sizes)
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
        sites = {name: EchoSite(folder, sizes) for name in secrets}
        job = job_of("echo", sites, packages=["apfed_experiments", "apfed_bench"])
        Recipe(job).run(SimEnv(clients=[*secrets], workspace_root=workspace))
