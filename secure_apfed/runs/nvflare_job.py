"""A job of NVFlare's that plays the parties of a project, one at each of its sites.

Run by: whoever submits it, with any environment of NVFlare's (`SimEnv`, `PocEnv`, `ProdEnv`). The
job holds names of sites and classes and nothing else: no code, no data, no settings of a run, no
path. What a site plays and with what is said by that site alone; see docs/nvflare.md.

Example:
    recipe = PartyRecipe(["bank", "shop", "clinic", "aggregator"])
    recipe.execute(ProdEnv(startup_kit_location="kits/admin@bank.example"))
"""

import json
from collections.abc import Sequence
from pathlib import Path

from secure_apfed.errors import ConfigError
from secure_apfed.names import check_name
from secure_apfed.runs.nvflare_site import Server, Site

from nvflare.collab.runtime.controller import CollabController
from nvflare.collab.runtime.executor import CollabExecutor
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

__all__ = ["ALLOWED_CLASSES", "PartyRecipe", "allow_classes"]

ALLOWED_CLASSES = ("nvflare.collab.runtime.", "secure_apfed.runs.nvflare_site.")
"""What the list `class_allow_list` of every site and of the server has to hold."""

_PACKAGE = "secure_apfed"


class PartyRecipe(Recipe):  # type: ignore[misc]  # nvflare ships no annotations
    """The job.

    Args:
        sites: the parties of the run, which are named as their sites; also aggregator and dealer,
            where the run has them.
        name: of the job.
        resume: go on from the checkpoints in the parties' folders.

    Raises:
        ConfigError: too few sites, or names that no party has.
    """

    def __init__(
        self, sites: Sequence[str], *, name: str = "secure-apfed", resume: bool = False
    ) -> None:
        if len(set(sites)) != len(sites) or len(sites) < 2:
            raise ConfigError(f"a job needs two sites or more, each once; got {', '.join(sites)}")
        job = FedJob(name, len(sites), [check_name(site) for site in sites], fail_fast=True)
        job.set_app_packages([_PACKAGE])  # installed at each site; nothing of it travels
        server = job.to_server(Server(), id="server")
        job.to_server(CollabController(server_obj_id=server), id="controller")
        for site in sites:
            party = job.to(Site(resume=resume), site, id="party")
            job.to(CollabExecutor(client_obj_id=party), site, id="executor", tasks=["*"])
        super().__init__(job)


def allow_classes(resources: Path) -> None:
    """Let a site load the classes of such jobs, beside those that it allows already.

    Args:
        resources: its `local/resources.json`; begun from `resources.json.default` beside it where
            there is none.
    """
    default = resources.with_name(f"{resources.name}.default")
    source = next((one for one in (resources, default) if one.exists()), None)
    told = json.loads(source.read_text(encoding="utf-8")) if source else {"format_version": 2}
    allowed = told.get("class_allow_list")
    if allowed is None:
        from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

        allowed = [*DEFAULT_CLASS_ALLOW_LIST]
    told["class_allow_list"] = [*dict.fromkeys([*allowed, *ALLOWED_CLASSES])]
    resources.write_text(json.dumps(told, indent=2), encoding="utf-8")
