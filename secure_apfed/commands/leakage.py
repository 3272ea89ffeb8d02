"""The commands of `secure-apfed` that measure leakage: `attack` and `tradeoff`.

Part of the composition root: `secure_apfed.cli` registers them, nothing else imports this.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from secure_apfed import progress_bars, terminal
from secure_apfed.commands import AsJson, Jobs, RunFolder

if TYPE_CHECKING:
    from apfed_attacks.interface import AttackResult
    from apfed_experiments.tradeoff import Board, TradeOff
    from secure_apfed.config import AttackChoice, Config

__all__ = ["Backend", "attack", "report_if_possible", "study_of_run", "tradeoff"]


def attack(
    folder: RunFolder,
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attacks", help="Names, apart or with commas; all that exist unless given."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="ATTACK.KEY=VALUE",
            help="Mount this attack once with these options instead of its usual settings.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The run's unless given.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where: auto, cpu, cuda or one of several, as cuda:1; else as the run."),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Mount attacks on a finished run, show them, and renew its report."""
    from apfed_experiments.finished import mount_attacks
    from secure_apfed.learning.compute import find_device

    chosen = _chosen(attacks or [], options or [])
    if not as_json:
        terminal.show_note(f"mounting {', '.join(dict.fromkeys(choice.name for choice in chosen))}")
    where = None if device is None else find_device(device)
    results = mount_attacks(folder, chosen, seed=seed, device=where)
    page = report_if_possible(folder)
    if as_json:
        found = [result.as_json() for result in results]
        terminal.print_json({"attacks": found, "folder": folder, "report": page})
        return
    _show_attacks(results)
    if page is not None:
        typer.echo(page)


def report_if_possible(folder: Path) -> Path | None:
    """Make a run's report; without the extra that draws it, say so and return None."""
    try:
        from apfed_experiments.report import write_report
    except ModuleNotFoundError as error:
        if error.name not in terminal.RESEARCH_MODULES:
            raise
        terminal.show_note(
            f"no report: {error.name} is not installed; "
            f"pip install 'secure-apfed[experiments]', then secure-apfed report {folder}"
        )
        return None
    return write_report(folder)


def _show_attacks(results: "Sequence[AttackResult]") -> None:
    """Print the worst adversary of each attack, and why others said nothing."""
    from apfed_attacks.run import headlines

    worst = headlines(results)
    rows: list[tuple[str, ...]] = [
        (each.attack, f"{each.target} of {each.victim}" if each.victim else each.target,
         each.adversary, f"{each.advantage:+.3f}", str(each.metric), str(each.variant),
         str(each.baseline))
        for each in worst if each.advantage is not None
    ]  # fmt: skip
    columns = ("attack", "target", "by", "advantage", "in", "best variant", "over")
    terminal.show_rows("Attacks, the worst adversary of each", columns, rows)
    for each in worst:
        if each.advantage is None:
            terminal.show_note(f"{each.attack} is not applicable: {each.reason}")
    terminal.show_note(
        "An advantage is over the best baseline with the same knowledge. One near 0, on either "
        "side, proves nothing; the worst of several adversaries is above 0 by chance alone."
    )


def _chosen(names: Sequence[str], options: Sequence[str]) -> "tuple[AttackChoice, ...]":
    """Return what to mount: the attacks with options given once each, the others' full suites."""
    from apfed_attacks import ATTACKS
    from apfed_attacks.run import ALL, full_suite, prepare
    from secure_apfed.config import AttackChoice
    from secure_apfed.errors import ConfigError

    wanted = [part.strip() for text in names for part in text.split(",") if part.strip()]
    if names and not wanted:
        raise ConfigError("--attacks: no name is given; leave it out for all attacks")
    given = _options_by_attack(options)
    if ALL in wanted or not (wanted or given):
        wanted = list(ATTACKS)
    named = list(dict.fromkeys([*wanted, *given]))
    chosen: list[AttackChoice] = []
    for name in named:
        if name in given:
            chosen.append(AttackChoice(name=name, options=given[name]))
            prepare(chosen[-1])
        else:
            chosen += full_suite([name])
    return tuple(chosen)


def _options_by_attack(options: Sequence[str]) -> dict[str, dict[str, object]]:
    from secure_apfed.config.plain_yaml import yaml_value
    from secure_apfed.errors import ConfigError

    given: dict[str, dict[str, object]] = {}
    for option in options:
        path, equals, text = option.partition("=")
        name, dot, key = path.strip().partition(".")
        if not (equals and dot and name and key):
            raise ConfigError(
                f"--option {option}: expected ATTACK.KEY=VALUE, as in "
                "model_completion.labels_per_class=4"
            )
        given.setdefault(name, {})[key] = yaml_value(text, given=f"--option {option}")
    return given


class Backend(StrEnum):
    """Where the processes of a study run."""

    loky = "loky"
    ray = "ray"


def tradeoff(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY", help="YAML file of the study.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder; runs/NAME unless given. A stopped study goes on.")
    ] = None,
    jobs: Jobs = 2,
    backend: Annotated[
        Backend, typer.Option(help="Where processes run; ray: on a Ray cluster.")
    ] = Backend.loky,
    as_json: AsJson = False,
) -> None:
    """Sweep defences and their strengths: accuracy against leakage, with pictures and a table."""
    from apfed_experiments.tradeoff import load_tradeoff

    study = load_tradeoff(study_file)
    folder = output or Path("runs", study.name)
    board = _played(study, folder, jobs, backend.value, quiet=as_json)
    if as_json:
        failures = {failure.trial: failure.message for failure in board.failures}
        points = board.table.plain()
        terminal.print_json({
            "study": study.name, "points": points, "failures": failures, "folder": folder,
        })  # fmt: skip
    if board.failures:
        raise typer.Exit(3)  # as for data or files; the same command tries them again


def study_of_run(config: "Config", folder: Path, *, quiet: bool) -> "Board | None":
    """Play the study that the settings of a run ask for, if they do."""
    if not config.tradeoff:
        return None
    from apfed_experiments.tradeoff import tradeoff_of

    return _played(tradeoff_of(config), folder, 2, "loky", quiet=quiet)


def _played(
    study: "TradeOff", folder: Path, jobs: int, backend: Literal["loky", "ray"], *, quiet: bool
) -> "Board":
    """Run a study and show its board."""
    from apfed_experiments.tradeoff import run_tradeoff

    with progress_bars.counting(f"{study.name}: trials", quiet=quiet) as on_done:
        board = run_tradeoff(study, folder, jobs=jobs, backend=backend, on_done=on_done)
    if not quiet:
        title = f"Trade-off {study.name}: accuracy, and the worst attack's advantage"
        terminal.show_rows(title, board.summary.header, board.summary.cells)
        for failure in board.failures:
            terminal.show_note(f"failed, its point left out: {failure.trial}: {failure.message}")
        typer.echo(folder / "index.html")
    return board
