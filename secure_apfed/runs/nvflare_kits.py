"""Startup kits of NVFlare's that let jobs play parties, and let no job bring code.

Run by: NVFlare's provisioning, where `project.yml` names the builder here, and by each site for
itself. What a kit allows, its owner may change in the kit's `local/` before it starts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secure_apfed.errors import ConfigError

try:
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
    from nvflare.lighter.spec import Builder
except ImportError as error:
    raise ConfigError(
        "startup kits of NVFlare's need nvflare 2.9 or later, of which something is missing "
        f"({error}); install it with pip install 'secure-apfed[nvflare]'"
    ) from error

__all__ = ["ALLOWED_CLASSES", "PartyKits", "allow_classes"]

ALLOWED_CLASSES = ("nvflare.collab.runtime.", "secure_apfed.contrib.nvflare_site.")
"""What `class_allow_list` has to hold at every site and at the server."""

_LIST = "class_allow_list"


class PartyKits(Builder):  # type: ignore[misc]  # nvflare ships no annotations
    """Writes into the kits of all sites and of the server what jobs of parties need.

    Among the builders of `project.yml` it stands after NVFlare's `StaticFileBuilder`.
    """

    def build(self, project: Any, ctx: Any) -> None:
        """Allow the classes of such jobs, keep their logs at the sites, and deny code."""
        for owner in (project.get_server(), *project.get_clients()):
            local = Path(ctx.get_local_dir(owner))
            resources, rights = (
                local / f"{name}.json.default" for name in ("resources", "authorization")
            )
            allow_classes(resources)
            _write(resources, _read(resources) | {"allow_log_streaming": False})
            _write(rights, _without_code(_read(rights)))


def allow_classes(resources: Path, classes: Sequence[str] = ALLOWED_CLASSES) -> None:
    """Let a site, or the server, load the classes of such jobs besides those that it allows.

    Args:
        resources: its `local/resources.json`; made from `resources.json.default` beside it where
            there is none.
        classes: names, or their beginnings with a dot behind.
    """
    default = resources.with_name(f"{resources.name}.default")
    source = next((one for one in (resources, default) if one.exists()), None)
    told = _read(source) if source is not None else {"format_version": 2}
    allowed = told.get(_LIST, DEFAULT_CLASS_ALLOW_LIST)
    _write(resources, told | {_LIST: [*dict.fromkeys([*allowed, *classes])]})


def _without_code(told: dict[str, Any]) -> dict[str, Any]:
    """The same rights by role, but none that submits code of its own."""
    roles: dict[str, Any] = told["permissions"]
    named = {right for rights in roles.values() if isinstance(rights, dict) for right in rights}
    every = {role: rights for role, rights in roles.items() if not isinstance(rights, dict)}
    spelled_out = roles | {role: dict.fromkeys(named, rights) for role, rights in every.items()}
    denied = {role: rights | {"byoc": "none"} for role, rights in spelled_out.items()}
    return told | {"permissions": denied}


def _read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return told


def _write(path: Path, told: dict[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=2), encoding="utf-8")
