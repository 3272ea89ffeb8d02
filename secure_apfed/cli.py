"""The command line `secure-apfed`: the composition root, which may import every layer.

Nothing imports it. Each command imports what it needs when it runs, so that help is quick.
Exit codes: 0 done, 1 `doctor` found something missing, 2 usage or configuration, 3 data or
files, 4 protocol or security, 5 privacy budget exhausted, 130 interrupted.
"""

import gc
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from apfed_protocols.installing import install_extra
from secure_apfed.base.phases import profile_phases
from secure_apfed.commands import (
    AsJson,
    ConfigFile,
    JsonEvents,
    Overrides,
    RunFolder,
    apart,
    before,
    finished,
    project,
    study,
)
from secure_apfed.console import progress, terminal
from secure_apfed.errors import ApfedError

if TYPE_CHECKING:
    from secure_apfed.config import Config
    from secure_apfed.data import VerticalData
    from secure_apfed.runs.outcome import RunResult

_JSON_OPTIONS = {"--json", "--json-events"}
# The errors of a wrong call; click is a package of its own or, since typer 0.26, part of typer.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


TransportName = StrEnum("TransportName", ["memory", "local", "grpc", "relay"])
"""Names of transports between a run's parties: the keys of `secure_apfed.runs.run.TRANSPORTS`."""

app = typer.Typer(
    name="secure-apfed",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Vertical federated learning in which the active party predicts alone, with set "
    "intersection, secure sums, guarded representations and measured leakage.",
    epilog="Exit codes: 0 done, 1 doctor found something missing, 2 usage or configuration, "
    "3 data or files, 4 protocol or security, 5 privacy budget exhausted, 130 interrupted.",
)
data_app = typer.Typer(
    no_args_is_help=True,
    help="Built-in data sets: list and download. Your columns: rank them, test an encoder.",
)
Transport = Annotated[
    TransportName,
    typer.Option(
        help="memory: one process simulates all parties; local: one process a party; grpc, relay: "
        "as between machines."
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        min=0.1,
        max=86_400,
        help="Seconds that a party may be silent before the run fails; not used with memory.",
    ),
]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Declare the options that every command has.

    Typer must know --debug, but `execute` reads it: it also concerns errors outside of commands.
    """


def run(
    config_file: ConfigFile,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: runs/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    transport: Transport = TransportName.memory,
    timeout: Patience = 60.0,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare",
            help="Only write the parties' folders and files, for `secure-apfed party`; start no "
            "party.",
        ),
    ] = False,
    baselines: Annotated[bool, typer.Option(help="Compare with the active's local models.")] = True,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Run with this number of seeds, from the run's seed on; report means, intervals "
            "and whether help improves accuracy. Parties' own seeds: see `party_seeds`.",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="With --seeds: number of parallel processes.")
    ] = 1,
    contributions: Annotated[
        bool,
        typer.Option(
            "--contributions",
            help="Measure each passive's contribution: train again without it.",
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print seconds and peak memory of each phase.")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
    json_events: JsonEvents = False,
) -> None:
    """Run a whole training on this machine: align, train, measure leakage, and write a report."""
    # The docstring is the command's help, so it does not explain the arguments.
    from secure_apfed.base.files import refuse_replacing_input
    from secure_apfed.baselines.interface import cache_fits
    from secure_apfed.config.file import load_config

    config = load_config(config_file, overrides=overrides or (), own=True)
    folder = output or Path("runs", config.name)
    if prepare:
        _prepare_folders(config, folder, timeout, transport, as_json=as_json)
        return
    if not resume:
        refuse_replacing_input(folder / "config.yaml", "--output", config_file)
    _check_attacks_and_study(config, folder)
    if contributions:
        _refuse_contributions(transport, resume=resume, has_several_seeds=seeds is not None)
    is_in_memory = transport is TransportName.memory
    if seeds is not None:
        _refuse_with_seeds(is_in_memory and not (resume or json_events or profile))
        _run_seeds(config, folder, seeds, jobs, baselines=baselines, as_json=as_json)
        return
    _refuse_output_options(is_in_memory=is_in_memory, profile=profile, json_events=json_events)
    run_options: dict[str, Any] = {
        "resume": resume,
        "transport": transport.value,
        "timeout_s": timeout,
    }
    if not is_in_memory:
        run_options["baselines"] = baselines  # the active's own process measures local models
    if contributions:
        run_options["data"] = _load_several_passives(config)
    # Within this block equal fits of local models are made once.
    with cache_fits(), profile_phases() as phases:
        result = _run_training(
            config, folder, run_options, as_json=as_json, json_events=json_events
        )
        finished.finish_run(
            config,
            result,
            baselines=baselines,
            contributions=contributions,
            is_quiet=as_json or json_events,
            phases=phases if profile else None,
        )


def _refuse_with_seeds(has_only_allowed_options: bool) -> None:
    """Refuse --seeds together with options that concern a single run or another transport.

    `has_only_allowed_options`: whether none of these options is given.
    """
    if not has_only_allowed_options:
        raise typer.BadParameter(
            "--seeds runs in memory, goes on where it was stopped, and prints with --json "
            "alone; leave out --transport, --resume, --profile and --json-events"
        )


def _refuse_output_options(*, is_in_memory: bool, profile: bool, json_events: bool) -> None:
    """Refuse --profile and --json-events with a transport for which they do not work.

    `is_in_memory`: whether one process simulates all parties.
    """
    if profile and not is_in_memory:
        raise typer.BadParameter(
            "--profile measures one run in memory, in the process that plays it"
        )
    if json_events and is_in_memory:
        raise typer.BadParameter("--json-events tells of parties that run apart; use --json here")


def _prepare_folders(
    config: "Config", folder: Path, timeout: float, transport: TransportName, *, as_json: bool
) -> None:
    """Create the parties' folders and files, and print the command that starts each party.

    `timeout`: seconds for which a peer may be silent. `as_json`: whether one JSON object with the
    files' paths is printed instead of commands.
    """
    from secure_apfed.organisations.local import make_relay_command, prepare_parties
    from secure_apfed.runs import folder as run_folder
    from secure_apfed.runs.run import LINK_TYPES

    with run_folder.RunFolder(folder).open_for_run(config, resume=False):
        link_type = LINK_TYPES.get(transport.value, "tcp")
        files = prepare_parties(config, folder, timeout_s=timeout, link_type=link_type)
    relay = make_relay_command(files.values())
    if as_json:
        parties = {name: str(file) for name, file in files.items()}
        terminal.print_json({"parties": parties, "relay": list(relay)})
        return
    if relay:
        typer.echo(shlex.join(["secure-apfed", *relay]))
    for file in files.values():
        typer.echo(shlex.join(["secure-apfed", "party", "--config", str(file)]))


def _refuse_contributions(
    transport: TransportName, *, resume: bool, has_several_seeds: bool
) -> None:
    """Refuse --contributions with options by which passives' contributions cannot be measured.

    They are measured by training again without each passive, and compared with one whole run in
    this process.

    `resume`: whether the run continues an earlier one. `has_several_seeds`: whether it runs under
    several seeds.
    """
    study = "secure-apfed study who-helped CONFIG"
    if transport is not TransportName.memory:
        raise typer.BadParameter(
            "--contributions trains again without each passive, for which one process holds all "
            f"tables; leave out --transport here, or measure it apart with `{study}`"
        )
    if resume:
        raise typer.BadParameter(
            "--contributions compares a run that was played in one session, and a resumed one "
            f"counts what it sent again; resume it without, then measure with `{study}`"
        )
    if has_several_seeds:
        raise typer.BadParameter(
            f"--contributions is of one run; for several seeds take `{study} --seeds N`, with "
            "intervals over them"
        )


def _load_several_passives(config: "Config") -> "VerticalData":
    """Load the run's tables; refuse a run in which no passive can be left out.

    Called before the training, which would be in vain.
    """
    from secure_apfed.data import load_data
    from secure_apfed.runs.worth import check_leaving_out

    data = load_data(config.data, seed=config.seed)
    check_leaving_out(config, [table.name for table in data.passives])
    return data


def _run_seeds(
    config: "Config",
    folder: Path,
    seed_count: int,
    parallel_runs: int,
    *,
    baselines: bool,
    as_json: bool,
) -> None:
    """Run under several seeds, and show means, intervals and whether the passives' help gains.

    Args:
        config: the run's settings.
        folder: the folder for all runs.
        seed_count: how many seeds, from the run's own seed on.
        parallel_runs: how many runs at a time.
        baselines: whether local models are measured.
        as_json: whether one JSON object is printed instead of text.
    """
    from apfed_experiments.several import declare_study

    study = declare_study(config, folder, seed_count=seed_count, should_measure_baselines=baselines)
    answer = finished.run_study(study, parallel_runs, is_quiet=as_json)
    if as_json:
        terminal.print_json(answer.measurements.as_json())


def _check_attacks_and_study(config: "Config", folder: Path) -> None:
    """Check the settings of attacks and of the trade-off study, which run after the training.

    So an error is raised before hours of training, not after them.

    Raises ConfigError: no attack has such a name, or the study cannot be made.
    """
    from secure_apfed.errors import ConfigError

    if config.attacks:
        from apfed_attacks.table import expand_choices  # slow to import

        expand_choices(config.attacks)  # called for its error
    if not config.tradeoff:
        return
    try:
        from apfed_experiments.tradeoff import make_points, make_tradeoff
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tradeoff: {error.name}, which draws it, is not installed; leave it out, or run: "
            f"{install_extra('experiments')}"
        ) from None
    make_points(make_tradeoff(config), folder)  # called for its error


def _run_training(
    config: "Config",
    folder: Path,
    run_options: dict[str, Any],
    *,
    as_json: bool,
    json_events: bool,
) -> "RunResult":
    """Train a run, show its progress, and return its result.

    Args:
        config: the run's settings.
        folder: the run's folder.
        run_options: further arguments of `secure_apfed.run`, such as the transport.
        as_json: whether the command prints JSON only; then no text is shown.
        json_events: whether progress is printed as JSON lines instead of text.

    Raises _InterruptedRun: the user stopped the run; the message says how to continue.
    """
    from secure_apfed.runs.run import run

    try:
        if run_options["transport"] == "memory":
            with progress.show_run(config.name, quiet=as_json) as on_progress:
                return run(config, folder, on_progress=on_progress, **run_options)
        board = progress.Board()
        with progress.show_board(board, as_json=as_json, json_events=json_events):
            return run(
                config,
                folder,
                on_progress=board.update_progress,
                on_status=board.update_status,
                on_work=lambda party, work: board.update_work(work, party),
                **run_options,
            )
    except KeyboardInterrupt:
        # The folder's own config also has the settings that --set changed.
        arguments = ["run", str(folder / "config.yaml"), "--output", str(folder), "--resume"]
        if run_options["transport"] != "memory":
            arguments += ["--transport", run_options["transport"]]
        command = shlex.join(["secure-apfed", *arguments])
        raise _InterruptedRun(f"Interrupted. Continue with: {command}") from None


class _InterruptedRun(Exception):  # noqa: N818 - it is no error
    """The user stopped a run; the message says how to continue."""


def report(folder: RunFolder, as_json: AsJson = False) -> None:
    """Write the pictures and the HTML report of a finished run again."""
    from apfed_experiments.report import write_report

    page = write_report(folder)
    if as_json:
        terminal.print_json({"report": page})
    else:
        typer.echo(page)


@data_app.command("list")
def list_data(as_json: AsJson = False) -> None:
    """List the built-in data sets, and which must be downloaded."""
    from secure_apfed.data import DATASETS, describe_dataset

    entries = [describe_dataset(dataset) for dataset in DATASETS.values()]
    if as_json:
        terminal.print_json({"datasets": entries})
        return
    columns = ("name", "shape", "classes", "views", "licence", "how")
    terminal.show_rows(
        "Data sets", columns, [tuple(entry[column] for column in columns) for entry in entries]
    )


@data_app.command("presets")
def show_presets(
    name: Annotated[
        str | None, typer.Argument(help="Name of a preset to print as YAML; default: list all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the papers' data partitions, or print one as settings."""
    from apfed_experiments.presets import PRESETS, find_preset
    from secure_apfed.config.plain_yaml import format_yaml
    from secure_apfed.settings.data import DataSettings

    if name is not None:
        preset_settings = DataSettings.model_validate(find_preset(name))
        settings = preset_settings.model_dump(mode="json", exclude_unset=True)
        if as_json:
            terminal.print_json({"name": name, "data": settings})
        else:
            typer.echo(format_yaml({"data": settings}), nl=False)
        return
    rows = [
        (key, preset.settings["dataset"], preset.description) for key, preset in PRESETS.items()
    ]
    columns = ("name", "dataset", "about")
    if as_json:
        terminal.print_json({"presets": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        terminal.show_rows("Partitions of the papers", columns, rows)


@data_app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="Name of a data set; see `data list`.")],
    folder: Annotated[
        Path | None, typer.Option(help="Data folder; default: SECURE_APFED_DATA, or the cache.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a data set from its official address and verify checksums."""
    from secure_apfed.data import fetch_dataset

    with progress.show_downloads(quiet=as_json) as on_progress:
        paths = fetch_dataset(name, folder, on_progress)
    if as_json:
        terminal.print_json({"name": name, "files": [str(path) for path in paths]})
        return
    for path in paths:
        typer.echo(path)
    if not paths:
        terminal.show_note(f"{name} ships with a library; there is nothing to fetch")


def doctor(
    load: Annotated[
        bool,
        typer.Option(
            "--load",
            help="Also import packages that take seconds, such as opacus and CrypTen, for errors "
            "that only an import shows.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the installation: what is missing, and how to install it."""
    from secure_apfed.commands.doctor import examine_machine, is_healthy

    findings = examine_machine(load=load)
    if as_json:
        terminal.print_json(
            {
                "healthy": is_healthy(findings),
                "load": load,
                "findings": list(map(asdict, findings)),
            }
        )
    else:
        rows = [
            (finding.state, finding.name, finding.value, finding.remedy) for finding in findings
        ]
        terminal.show_rows("This machine", ("", "what", "found", "to get it"), rows)
        if not load:
            terminal.show_note(
                "note: packages that take seconds to import were looked up only; see --load"
            )
    if not is_healthy(findings):
        raise typer.Exit(1)


_COMMANDS: tuple[Callable[..., None], ...] = (
    run,
    before.plan,
    report,
    finished.runs,
    finished.attack,
    finished.predict,
    finished.export,
    apart.party,
    apart.serve,
    apart.relay,
    doctor,
)


def _describe_plugins() -> str | None:
    """Return the names of plug-ins that installed packages declare, for the help of a command.

    Returns None if there are none, or if no help is asked for.
    """
    if "--help" not in sys.argv:  # reading the declarations takes a while
        return None
    from secure_apfed.settings.plugins import ENTRY_POINT_GROUPS, list_installed_plugins

    names_by_kind = {
        kind: ", ".join(sorted(list_installed_plugins(kind))) for kind in ENTRY_POINT_GROUPS
    }
    listed = "; ".join(f"{kind} {names}" for kind, names in names_by_kind.items() if names)
    return f"Names of installed packages: {listed}." if listed else None


for _command in _COMMANDS:
    app.command(epilog=_describe_plugins())(_command)
data_app.command()(finished.columns)
data_app.command()(before.check_encoder)
app.add_typer(data_app, name="data")
app.add_typer(project.project_app, name="project")
app.add_typer(project.identity_app, name="identity")
app.add_typer(apart.certs_app, name="certs")
app.add_typer(apart.audit_log_app, name="audit-log")
app.add_typer(study.app, name="study", rich_help_panel="Research")

MOVED_COMMANDS: Mapping[str, str] = {
    "join": "secure-apfed project join",
    "check": "secure-apfed project check",
    "columns": "secure-apfed data columns",
    "check-encoder": "secure-apfed data check-encoder",
    "tradeoff": "secure-apfed study tradeoff",
    "table": "secure-apfed study table",
    "audit": "secure-apfed study audit",
    "bench": "python -m apfed_bench",
}
"""The command lines that replace commands of earlier versions."""


def _refuse_moved_command(arguments: Sequence[str]) -> None:
    """Raise a usage error if a command of an earlier version is called; name the new command.

    `arguments`: the words after `secure-apfed`.
    """
    old_name = arguments[0] if arguments else ""
    if old_name not in MOVED_COMMANDS:
        return
    new_command = MOVED_COMMANDS[old_name]
    place_text = (
        "" if new_command.startswith("secure-apfed") else ", from a checkout of the project"
    )
    raise _UsageError(
        f"{old_name} is called {new_command} now: say `{new_command}` in its place{place_text}"
    )


def execute(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code. Errors that are meant for users are printed.

    `arguments`: the words after `secure-apfed`.
    """
    debug = "--debug" in arguments
    as_json = not _JSON_OPTIONS.isdisjoint(arguments)
    command_words = [argument for argument in arguments if argument != "--debug"]
    with warnings.catch_warnings():
        warnings.showwarning = terminal.show_warning
        try:
            _refuse_moved_command(command_words)
            exit_code = app(args=command_words, prog_name="secure-apfed", standalone_mode=False)
        except _UsageError as error:
            if not error.format_message():  # no command was named, and the help was printed
                return error.exit_code
            failure = terminal.Failure(
                code=2, title="Usage", kind="UsageError", message=error.format_message()
            )
        except (KeyboardInterrupt, _InterruptedRun) as stop:
            failure = terminal.Failure(
                code=terminal.INTERRUPTED_EXIT_CODE,
                title="Stopped",
                kind="Interrupted",
                message=str(stop) or "interrupted",
            )
        except ModuleNotFoundError as error:
            if error.name not in terminal.RESEARCH_MODULES:
                raise  # a fault of this program
            failure = terminal.describe_failure(error)
        except (ApfedError, OSError) as error:
            failure = terminal.describe_failure(error)
        else:
            # A command that ends normally returns None.
            return exit_code if isinstance(exit_code, int) else 0
        terminal.show_failure(failure, as_json=as_json, debug=debug)
        return failure.code


def main() -> None:
    """Run the program `secure-apfed` with the command line of this process, and exit.

    It may change settings of the whole process, such as signal handlers.
    """
    # Loading torch makes a million objects that live to the end. Searching them for garbage again
    # and again, and once more at the end, would take a quarter of a short run.
    gc.set_threshold(50_000, 20, 20)
    # A service manager ends a process by SIGTERM: it stops as by Ctrl-C, and prints how to resume.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    exit_code = execute(sys.argv[1:])
    gc.freeze()  # excludes all objects from the search for garbage at the end
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
