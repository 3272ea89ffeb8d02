"""The files by which an engine starts the parties of a sealed project: NVFlare's or Flower's.

Run by: each party, when it takes over a sealed project. The organiser's folder also gets what is
made once: a project and jobs of NVFlare's, or an app of Flower's. The files hold names, addresses,
paths and digests, and no secret. Protects from: names and addresses of other parties that would
become part of a command, or another value of a file. Each is checked for its form when the proposal
is read, and is written as a quoted word of the shell, or as a value of YAML, JSON or TOML.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from secure_apfed.base.files import write_atomically
from secure_apfed.config.plain_yaml import format_yaml
from secure_apfed.exchange.sockets import Address, parse_address, spell_address
from secure_apfed.settings import describe_unknown_name

__all__ = [
    "ENGINES",
    "LOG_FILE_VARIABLE",
    "PARTY_FILE_VARIABLE",
    "SERVER_NAME",
    "EngineName",
    "EnginePlan",
    "check_engine",
    "find_engine",
    "write_engine_files",
]

EngineName: TypeAlias = Literal["grpc", "nvflare", "flower"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
TITLE_BY_ENGINE: Mapping[EngineName, str] = {
    "grpc": "the parties' own links",
    "nvflare": "NVFlare",
    "flower": "Flower",
}
SERVER_NAME = "server"
"""Whom `run_by` of a proposal names for the engine's server; no party is called so over NVFlare."""

PARTY_FILE_VARIABLE = "SECURE_APFED_PARTY"
"""Variable of a site's environment: the path of its party's file; over NVFlare `{site}` stands for
the site's name."""

LOG_FILE_VARIABLE = "SECURE_APFED_LOG"
"""Variable of a SuperNode's environment: the file to which the party's messages are appended."""

_CommandWords: TypeAlias = Sequence[str | Path]
_PARTY_FILE_NAME = "party.yaml"
_LOG_FILE_NAME = "log.txt"
_SITE_MODULE = "secure_apfed.organisations.nvflare_site"
_NVFLARE_RUNTIME = "nvflare.collab.runtime"
_COLLAB_ARGUMENTS = {
    "collab_obj_ids": [],
    "max_inbound_call_threads": 100,
    "max_outbound_call_threads": 100,
}
_NO_FILTERS: Mapping[str, Any] = {"task_data_filters": [], "task_result_filters": []}
_NVFLARE_BUILDERS = "nvflare.lighter.impl"
_HOST_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_CERTIFIED_HOST = re.compile(rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*")
_APP_PACKAGE = "apfed_run"
_CONNECTION_NAME = "apfed"


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The values from which a party's files for an engine are made.

    An engine is a framework, NVFlare or Flower, that starts the parties of a project.

    Attributes:
        party: the party whose folder gets the files.
        organiser: the party that proposed the project.
        parties: names of all parties of the run, the active first.
        server: address of NVFlare's server or Flower's SuperLink.
        server_organisation: the organisation that runs the server, in the organiser's words.
        organisation_by_party: by party, the organisation that runs it, if its name differs from the
            party's.
        project_digest: SHA-256 (hex) of the project that all parties have signed.
        max_restarts: how often a party restarts by itself.
        folder: the party's own folder, an absolute path.
    """

    party: str
    organiser: str
    parties: tuple[str, ...]
    server: Address
    server_organisation: str
    organisation_by_party: Mapping[str, str]
    project_digest: str
    max_restarts: int
    folder: Path

    @property
    def title(self) -> str:
        """The project's name at NVFlare or Flower; it contains no text that a party chose."""
        return f"apfed-{self.project_digest[:12]}"


def find_engine(text: str) -> EngineName:
    """Return the framework (engine) that a text names in upper or lower case, such as "NVFlare".

    Raises ValueError: no engine has this name.
    """
    for name in ENGINES:
        if text.casefold() == name:
            return name
    raise ValueError(f"engine {describe_unknown_name(text, ENGINES)}")


def check_engine(
    engine: EngineName,
    *,
    parties: Iterable[str],
    server: str | None,
    has_server_organisation: bool,
    has_addresses: bool,
) -> None:
    """Check a proposed project's settings of the framework (engine) that starts its parties.

    Args:
        engine: name of the framework; "grpc": none, parties are started by hand.
        parties: names of the run's parties.
        server: "host:port" of the engine's server; None: the proposal names none.
        has_server_organisation: whether the proposal says which organisation runs that server.
        has_addresses: whether parties or a relay have addresses of their own.

    Raises ValueError: the server is not named, or is named without an engine; or the engine cannot
        take the host's or a party's name, or addresses of parties.
    """
    title = TITLE_BY_ENGINE[engine]
    if engine == "grpc":
        if server is not None or has_server_organisation:
            raise ValueError(
                "a server is of an engine: leave --server and --run-by server=... out, or say "
                f"--over {' or '.join(ENGINES[1:])}"
            )
        return
    if server is None:
        raise ValueError(
            f"over {title} all sites dial one server; say where: --server host.example:8002"
        )
    if not has_server_organisation:
        raise ValueError(
            f"it is not said who runs the server of {title}, who sees who takes part, when and how "
            f"much; say --run-by {SERVER_NAME}=ORGANISATION"
        )
    host, _ = parse_address(server)
    if not _CERTIFIED_HOST.fullmatch(host):
        raise ValueError(
            f"a certificate of {title} is for a host of letters, digits, '-' and '.': name the "
            f"server so, not {host}"
        )
    if engine == "nvflare":
        _check_sites(parties, has_addresses=has_addresses)


def _check_sites(parties: Iterable[str], *, has_addresses: bool) -> None:
    """Raise ValueError if parties cannot be sites of NVFlare, since a name is not allowed there.

    It is raised, too, if parties or a relay have addresses: NVFlare's server carries the messages.
    """
    for name in parties:
        if "." in name:
            raise ValueError(f"NVFlare takes no dots in names of sites; rename {name}")
        if name.casefold() == SERVER_NAME:
            raise ValueError(f"{name} is the name of NVFlare's own server; rename that party")
    if has_addresses:
        raise ValueError(
            "over NVFlare its server carries the frames, so parties and relays have no addresses: "
            "leave --at and --relay out"
        )


def write_engine_files(engine: EngineName, plan: EnginePlan) -> Path | None:
    """Write a party's files for a framework (engine); return the path of its page of instructions.

    The files stand in a subfolder of the party's folder. Files of the same names are replaced. For
    "grpc", which is no framework, nothing is written and None returned.

    `plan`: the values in the files.
    """
    make_texts = _FILE_MAKER_BY_ENGINE.get(engine)
    if make_texts is None:
        return None
    engine_folder = plan.folder / engine
    for name, text in make_texts(plan, engine_folder).items():
        path = engine_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    return engine_folder / "README.md"


def _make_nvflare_files(plan: EnginePlan, folder: Path) -> dict[str, str]:
    """Return the texts of a party's files for NVFlare, by their names below `folder`.

    The organiser's files include the project to provision and the jobs to submit.
    """
    text_by_file = {
        "site.env": _make_environment({PARTY_FILE_VARIABLE: plan.folder / _PARTY_FILE_NAME})
    }
    if plan.party == plan.organiser:
        text_by_file["project.yml"] = format_yaml(_build_nvflare_project(plan))
        for job, (site_class, options) in _SITE_CLASS_AND_OPTIONS_BY_JOB.items():
            text_by_file |= _make_job(plan, job, site_class, options)
    text_by_file["README.md"] = _make_nvflare_page(plan, folder)
    return text_by_file


_SITE_CLASS_AND_OPTIONS_BY_JOB: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "job-check": ("secure_apfed.commands.nvflare_check.CheckSite", {}),
    "job": (f"{_SITE_MODULE}.Site", {}),
    "job-resume": (f"{_SITE_MODULE}.Site", {"resume": True}),
}
"""Folders of jobs, and the class and options of each site in them."""


def _build_nvflare_project(plan: EnginePlan) -> dict[str, Any]:
    """Return the content of the project file for `nvflare provision`, as plain values."""
    host, port = plan.server
    server = {
        "name": host,
        "type": "server",
        "org": _spell_organisation(plan.server_organisation),
        "fed_learn_port": port,
        "admin_port": port,
    }
    clients = [
        {
            "name": name,
            "type": "client",
            "org": _spell_organisation(plan.organisation_by_party.get(name, name)),
        }
        for name in plan.parties
    ]
    lead = {
        "name": _name_lead(plan),
        "type": "admin",
        "org": _spell_organisation(plan.organisation_by_party.get(plan.organiser, plan.organiser)),
        "role": "lead",
    }
    workspace = {"template_file": ["master_template.yml"]}
    return {
        "api_version": 3,
        "name": plan.title,
        "description": "Secure APFed between organisations",
        "participants": [server, *clients, lead],
        "builders": [
            {"path": f"{_NVFLARE_BUILDERS}.workspace.WorkspaceBuilder", "args": workspace},
            {
                "path": f"{_NVFLARE_BUILDERS}.static_file.StaticFileBuilder",
                "args": {"config_folder": "config"},
            },
            {"path": "secure_apfed.organisations.nvflare_job.PartyKits"},
            {"path": f"{_NVFLARE_BUILDERS}.cert.CertBuilder"},
            {"path": f"{_NVFLARE_BUILDERS}.signature.SignatureBuilder"},
        ],
    }


def _name_lead(plan: EnginePlan) -> str:
    """Return the name of the startup kit that submits jobs; NVFlare requires an e-mail address."""
    return f"lead@{plan.organiser.replace('_', '-')}.example"


def _spell_organisation(text: str) -> str:
    """Return an organisation's name in the characters that NVFlare allows."""
    return re.sub("[^A-Za-z0-9]+", "_", text).strip("_") or "unnamed"


def _make_job(
    plan: EnginePlan, job: str, site_class: str, options: Mapping[str, bool]
) -> dict[str, str]:
    """Return the texts of the files of an NVFlare job, by their paths.

    They are equal to those that `PartyRecipe` of `nvflare_job.py` exports, but need no NVFlare.

    Args:
        plan: names the project and its parties.
        job: the folder of the job.
        site_class: dotted path of the class that runs a site's party.
        options: keyword arguments of that class.
    """
    server_config = {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": f"{_NVFLARE_RUNTIME}.controller.CollabController",
                "args": {"server_obj_id": "server", **_COLLAB_ARGUMENTS},
            }
        ],
        "components": [{"id": "server", "path": f"{_SITE_MODULE}.Server", "args": {}}],
        **_NO_FILTERS,
        "dead_client_grace_period": 0,
    }
    client_config = {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["*"],
                "executor": {
                    "path": f"{_NVFLARE_RUNTIME}.executor.CollabExecutor",
                    "args": {"client_obj_id": "party", **_COLLAB_ARGUMENTS},
                },
            }
        ],
        "components": [{"id": "party", "path": site_class, "args": dict(options)}],
        **_NO_FILTERS,
    }
    job_description = {
        "name": plan.title,
        "resource_spec": {},
        "min_clients": len(plan.parties),
        "deploy_map": {
            "app_server": ["server"],
            **{f"app_{name}": [name] for name in plan.parties},
        },
        "mandatory_clients": list(plan.parties),
    }
    content_by_file = {
        "meta.json": job_description,
        "app_server/config/config_fed_server.json": server_config,
        **{f"app_{name}/config/config_fed_client.json": client_config for name in plan.parties},
    }
    return {
        f"{job}/{name}": json.dumps(content, indent=2) for name, content in content_by_file.items()
    }


def _make_nvflare_page(plan: EnginePlan, folder: Path) -> str:
    """Return a page in Markdown with the commands that the party runs for NVFlare.

    `folder`: the folder of the party's files for NVFlare.
    """
    kits = folder / "kits" / plan.title / "prod_00"
    host, _ = plan.server
    submit_command: _CommandWords = [
        "nvflare",
        "job",
        "submit",
        "--startup-kit",
        kits / _name_lead(plan),
        "-j",
    ]
    start_command: _CommandWords = ["bash", "kit/startup/start.sh"]
    make_kits_step = _InstructionStep(
        f"Make the startup kits. The kit `{host}` is for who runs the server; every other kit is "
        "for the party of its name alone",
        [["nvflare", "provision", "-p", folder / "project.yml", "-w", folder / "kits"]],
    )
    start_server_step = _InstructionStep(
        "Who runs the server starts it, `kit` being the folder of its kit", [start_command]
    )
    start_site_step = _InstructionStep(
        f"Start the site, `kit` being the folder of the kit `{plan.party}`",
        [_read_variables(folder / "site.env"), start_command],
    )
    submission_purposes = (
        "Once all sites are up, let the parties meet and compare",
        "Run",
        "Resume after a stop",
    )
    submission_steps = [
        _InstructionStep(text, [[*submit_command, folder / job]])
        for text, job in zip(submission_purposes, _SITE_CLASS_AND_OPTIONS_BY_JOB, strict=True)
    ]
    steps = [start_site_step]
    if plan.party == plan.organiser:
        steps = [make_kits_step, start_server_step, start_site_step, *submission_steps]
    return _make_page(plan, "NVFlare", steps)


def _make_flower_files(plan: EnginePlan, folder: Path) -> dict[str, str]:
    """Return the texts of a party's files for Flower, by their names below `folder`.

    The organiser's files include the Flower app, which only imports its code from the library.
    """
    environment = {
        PARTY_FILE_VARIABLE: plan.folder / _PARTY_FILE_NAME,
        LOG_FILE_VARIABLE: plan.folder / _LOG_FILE_NAME,
    }
    text_by_file = {"site.env": _make_environment(environment)}
    if plan.party == plan.organiser:
        app_tables: dict[str, dict[str, Any]] = {
            "project": {
                "name": plan.title,
                "version": "1.0.0",
                "description": "The parties of one project of Secure APFed",
                "license": "Apache-2.0",
                "dependencies": [],
            },
            "tool.flwr.app": {"publisher": "secure-apfed"},
            "tool.flwr.app.components": {
                "serverapp": f"{_APP_PACKAGE}.app:server",
                "clientapp": f"{_APP_PACKAGE}.app:host",
            },
            "tool.flwr.app.config": {
                "parties": ",".join(plan.parties),
                "project": plan.project_digest,
                "restarts": plan.max_restarts,
            },
        }
        connection: dict[str, Any] = {
            "address": spell_address(plan.server),
            "root-certificates": str(folder / "superlink.pem"),
        }
        text_by_file["app/pyproject.toml"] = _as_toml(app_tables)
        text_by_file[f"app/{_APP_PACKAGE}/__init__.py"] = '"""The app of one project."""\n'
        text_by_file[f"app/{_APP_PACKAGE}/app.py"] = (
            '"""Both parts are of the library, as each site has it installed."""\n\n'
            "from secure_apfed.organisations.flower_app import host, server\n\n"
            '__all__ = ["host", "server"]\n'
        )
        text_by_file["config.toml"] = _as_toml(
            {
                "superlink": {"default": _CONNECTION_NAME},
                f"superlink.{_CONNECTION_NAME}": connection,
            }
        )
    text_by_file["README.md"] = _make_flower_page(plan, folder)
    return text_by_file


def _make_flower_page(plan: EnginePlan, folder: Path) -> str:
    """Return a page in Markdown with the commands that the party runs for Flower.

    `folder`: the folder of the party's files for Flower.
    """
    key_path = folder / "supernode-key"
    certificate_path = folder / "superlink.pem"
    make_key_step = _InstructionStep(
        "Make the key of the SuperNode, and send `supernode-key.pub` to the organiser",
        [["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key_path]],
    )
    start_node_command: _CommandWords = [
        "flower-supernode",
        *("--superlink", spell_address(plan.server)),
        *("--root-certificates", certificate_path),
        *("--auth-supernode-private-key", key_path),
        *("--node-config", f'party="{plan.party}" project="{plan.project_digest}"'),
    ]
    start_node_step = _InstructionStep(
        f"Put the SuperLink's `superlink.pem` into `{folder.name}`, and start the SuperNode",
        [_read_variables(folder / "site.env"), start_node_command],
    )
    steps = [make_key_step, start_node_step]
    if plan.party == plan.organiser:
        flwr_command: _CommandWords = ["env", f"FLWR_HOME={folder}", "flwr"]
        register_step = _InstructionStep(
            "Register each SuperNode, by the key that its party sent",
            [
                [*flwr_command, "supernode", "register", f"{name}.pub", _CONNECTION_NAME]
                for name in plan.parties
            ],
        )
        run_step = _InstructionStep(
            "Run once all SuperNodes are up",
            [[*flwr_command, "run", folder / "app", _CONNECTION_NAME, "--stream"]],
        )
        steps = [
            make_key_step,
            _make_superlink_step(plan),
            register_step,
            start_node_step,
            run_step,
        ]
    return _make_page(plan, "Flower", steps)


def _make_superlink_step(plan: EnginePlan) -> "_InstructionStep":
    """Return the commands that make the SuperLink's certificate and start it."""
    host, port = plan.server
    key = "superlink.key"
    certificate = "superlink.pem"
    name_type = "IP" if re.fullmatch("[0-9.]+", host) else "DNS"
    make_certificate = [
        *("openssl", "req", "-x509", "-newkey", "rsa:3072", "-nodes", "-days", "365"),
        *("-keyout", key, "-out", certificate),
        *("-subj", f"/CN={host}", "-addext", f"subjectAltName={name_type}:{host}"),
    ]
    start_superlink = [
        *("flower-superlink", "--host", "0.0.0.0", "--port", str(port)),  # noqa: S104 - for all sites
        *("--ssl-ca-certfile", certificate, "--ssl-certfile", certificate, "--ssl-keyfile", key),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]
    return _InstructionStep(
        f"Who runs the SuperLink makes `{certificate}`, sends it to all, and starts it",
        [make_certificate, start_superlink],
    )


@dataclass(frozen=True)
class _InstructionStep:
    """A step of a page of instructions.

    Attributes:
        purpose: what the step is for.
        commands: each is a list of words, which are quoted for a shell, or a finished shell line.
    """

    purpose: str
    commands: Sequence[_CommandWords | str]

    def to_markdown(self, number: int) -> str:
        """Return the step as an item of a numbered list in Markdown."""
        lines = [
            command if isinstance(command, str) else shlex.join(map(str, command))
            for command in self.commands
        ]
        return "\n".join(
            [f"{number}. {self.purpose}:", "", *(f"       {line}" for line in lines), ""]
        )


def _read_variables(path: Path) -> str:
    """Return a shell line that exports the variables in a file that `_make_environment` made."""
    return f"set -a; . {shlex.quote(str(path))}; set +a"


def _make_page(plan: EnginePlan, title: str, steps: Sequence[_InstructionStep]) -> str:
    """Return a page of instructions for a party in Markdown, as numbered steps.

    `title`: the framework's name. `steps`: the steps in the order in which the party runs them.
    """
    heading = (
        f"# {title} at {plan.party}\n\n"
        f"What {plan.party} runs, in this order. Nothing here is secret.\n"
    )
    return "\n".join([heading, *(step.to_markdown(number) for number, step in enumerate(steps, 1))])


def _make_environment(path_by_variable: Mapping[str, Path]) -> str:
    """Return the text of a file that a shell reads with `.`, and systemd as an EnvironmentFile.

    `path_by_variable`: name of each variable -> its value.
    """
    return "".join(f"{name}={shlex.quote(str(path))}\n" for name, path in path_by_variable.items())


def _as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of texts, whole numbers and lists of texts as TOML."""
    lines: list[str] = []
    for name, values in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_spell_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _spell_toml(value: object) -> str:
    """Return a text, a whole number or a list of these as a value of TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(_spell_toml, value))}]"
    if isinstance(value, str):
        return '"' + "".join(map(_escape_in_toml, value)) + '"'
    return str(value)


def _escape_in_toml(character: str) -> str:
    """Return one character as it is written in a TOML string between double quotes."""
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08X}"


_FILE_MAKER_BY_ENGINE: Mapping[EngineName, Callable[[EnginePlan, Path], dict[str, str]]] = {
    "nvflare": _make_nvflare_files,
    "flower": _make_flower_files,
}
