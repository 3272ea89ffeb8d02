"""A job of NVFlare's that runs the parties of a run, and startup kits that allow it.

Run by: the submitter of the job, to any environment of NVFlare's (`SimEnv`, `PocEnv`, `ProdEnv`). A
job holds names of sites and classes and nothing else: no code, no data, no settings of a run, no
path. Each site alone decides which party it runs, and with which files; see docs/nvflare.md.

Example: a submission in production, where `kits/lead@bank.example` is a startup kit of NVFlare's.

    recipe = PartyRecipe(["bank", "shop", "clinic", "aggregator"])
    recipe.run(ProdEnv("kits/lead@bank.example", username="lead@bank.example"))

A startup kit of `PartyKits` allows such jobs and lets none bring code: NVFlare's provisioning
writes it, where `project.yml` names the builder here. What it allows, its owner may change in its
`local/` before it starts.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apfed_protocols.installing import install_extra
from secure_apfed.base.names import check_name
from secure_apfed.errors import ConfigError
from secure_apfed.organisations.engines import PARTY_FILE_VARIABLE
from secure_apfed.organisations.nvflare_site import NVFLARE_SERVER, Server, Site

try:
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
    from nvflare.collab.runtime.controller import CollabController
    from nvflare.collab.runtime.executor import CollabExecutor
    from nvflare.job_config.api import FedJob
    from nvflare.lighter.spec import Builder
    from nvflare.recipe.sim_env import SimEnv
    from nvflare.recipe.spec import Recipe
except ImportError as error:
    raise ConfigError(
        "jobs and startup kits of NVFlare's need nvflare 2.9 or later, of which something is "
        f"missing ({error}); run: {install_extra('nvflare')}"
    ) from error

ALLOWED_CLASSES = (
    "nvflare.collab.runtime.",
    "secure_apfed.organisations.nvflare_site.",
    "secure_apfed.commands.nvflare_check.",
)
"""Prefixes of classes that `class_allow_list` must contain at every site and at the server."""

_ALLOW_LIST_KEY = "class_allow_list"
_DEFAULT_JOB_NAME = "secure-apfed"


class PartyRecipe(Recipe):  # type: ignore[misc]  # nvflare ships no annotations
    """A recipe of an NVFlare job that runs all parties of a run, each at its site.

    Args:
        sites: names of the sites, which are equal to the parties' names; with the aggregator and
            the dealer, if the run has them.
        name: name of the job.
        resume: whether the parties continue from the checkpoints in their folders.
    """

    def __init__(
        self, sites: Sequence[str], *, name: str = _DEFAULT_JOB_NAME, resume: bool = False
    ) -> None:
        """Check the sites' names, and build the job. Raises ConfigError: a name is not allowed."""
        if len(sites) < 2 or len(set(sites)) < len(sites):
            raise ConfigError(f"a job needs two sites or more, each once; got {', '.join(sites)}")
        try:
            site_object_by_name = {check_name(site): Site(resume=resume) for site in sites}
        except ValueError as error:
            raise ConfigError(f"sites: {error}") from None
        if names_with_dots := [site for site in sites if "." in site]:
            raise ConfigError(
                f"NVFlare takes no dots in names of sites; rename {names_with_dots[0]}"
            )
        if NVFLARE_SERVER in sites:
            raise ConfigError(f"{NVFLARE_SERVER} is the name of NVFlare's own; rename that party")
        super().__init__(make_job(name, site_object_by_name))


def make_job(name: str, site_object_by_name: Mapping[str, Site]) -> FedJob:
    """Return an NVFlare job that runs each party at its site, and ends if a site disappears.

    `name`: name of the job. `site_object_by_name`: by site, the object that runs the party there.
    """
    job = FedJob(name, len(site_object_by_name), list(site_object_by_name), fail_fast=True)
    job.set_app_packages(["secure_apfed"])
    server = job.to_server(Server(), id="server")
    job.to_server(CollabController(server_obj_id=server), id="controller")
    for site, party in site_object_by_name.items():
        party_id = job.to(party, site, id="party")
        job.to(CollabExecutor(client_obj_id=party_id), site, id="executor", tasks=["*"])
    return job


def simulate_job(
    settings_file_by_party: Mapping[str, Path],
    workspace: Path,
    *,
    resume: bool = False,
    name: str = _DEFAULT_JOB_NAME,
) -> None:
    """Run the parties of this machine as a job in NVFlare's simulator, each in its own process.

    Args:
        settings_file_by_party: by party, its settings file, as `prepare_parties` of
            `organisations/local.py` makes it for "nvflare".
        workspace: NVFlare's folder; NVFlare removes files of a former job in it.
        resume: whether the parties continue from the checkpoints in their folders.
        name: name of the job.
    """
    local_folder = workspace / name / "local"
    local_folder.mkdir(parents=True, exist_ok=True)
    allow_classes(local_folder / "resources.json")
    first_file = next(
        iter(settings_file_by_party.values())
    )  # all are FOLDER/PARTY/NAME with the same FOLDER, NAME
    previous_variable = os.environ.get(PARTY_FILE_VARIABLE)
    # The simulator's processes inherit it; each site puts its own name in place of {site}.
    os.environ[PARTY_FILE_VARIABLE] = str(first_file.parent.parent / "{site}" / first_file.name)
    try:
        environment = SimEnv(clients=list(settings_file_by_party), workspace_root=str(workspace))
        PartyRecipe(list(settings_file_by_party), name=name, resume=resume).run(environment)
    finally:
        del os.environ[PARTY_FILE_VARIABLE]
        if previous_variable is not None:
            os.environ[PARTY_FILE_VARIABLE] = previous_variable


class PartyKits(Builder):  # type: ignore[misc]  # nvflare ships no annotations
    """A builder, for NVFlare's provisioning, of startup kits that allow jobs of this library.

    Among the builders of `project.yml` it comes after NVFlare's `StaticFileBuilder`, whose files it
    changes.
    """

    def build(self, project: Any, ctx: Any) -> None:
        """Change the settings in the startup kits of server and sites.

        They allow the classes of this library's jobs, keep the jobs' logs at the sites, and forbid
        jobs that bring code.

        `project`, `ctx`: NVFlare's objects of the project that is provisioned.
        """
        for owner in (project.get_server(), *project.get_clients()):
            local_folder = Path(ctx.get_local_dir(owner))
            resources_path = local_folder / "resources.json.default"
            rights_path = local_folder / "authorization.json.default"
            allow_classes(resources_path)
            _write_json(resources_path, _load_json(resources_path) | {"allow_log_streaming": False})
            _write_json(rights_path, _deny_code(_load_json(rights_path)))


def allow_classes(resources_path: Path, classes: Sequence[str] = ALLOWED_CLASSES) -> None:
    """Allow an NVFlare site, or the server, to load the classes of this library's jobs.

    Classes that are allowed already stay allowed.

    Args:
        resources_path: path of `local/resources.json`; created from `resources.json.default` if
            missing.
        classes: names of classes, or prefixes of names that end in a dot.
    """
    default_path = resources_path.with_name(f"{resources_path.name}.default")
    source_path = next((file for file in (resources_path, default_path) if file.exists()), None)
    content = _load_json(source_path) if source_path is not None else {"format_version": 2}
    allowed_classes = content.get(_ALLOW_LIST_KEY, DEFAULT_CLASS_ALLOW_LIST)
    _write_json(
        resources_path, content | {_ALLOW_LIST_KEY: [*dict.fromkeys([*allowed_classes, *classes])]}
    )


def _deny_code(content: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of NVFlare's authorization settings in which no role may submit code.

    The right to submit code is "byoc" ("bring your own code").

    `content`: the settings. Their "permissions" have, for each role, a mapping from right to who
    has it, or one text for all rights.
    """
    roles: dict[str, Any] = content["permissions"]
    all_rights = {
        right for rights in roles.values() if isinstance(rights, dict) for right in rights
    }
    permissions = {}
    for role, rights in roles.items():
        explicit_rights = rights if isinstance(rights, dict) else dict.fromkeys(all_rights, rights)
        permissions[role] = explicit_rights | {"byoc": "none"}
    return content | {"permissions": permissions}


def _load_json(path: Path) -> dict[str, Any]:
    """Return the content of NVFlare's own JSON file, which is trusted."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, indented for people."""
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
