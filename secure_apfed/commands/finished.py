"""The commands on finished runs, `runs`, `attack`, `predict`, `data columns` and `export`,
and the steps after a run.

Part of the composition root: baselines, attacks, report and result follow `run`, and `party` at the
active.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apfed_protocols.installing import install_extra
from secure_apfed.base.phases import Phases, begin_phase
from secure_apfed.commands import AsJson, RunFolder
from secure_apfed.console import progress, terminal

if TYPE_CHECKING:
    import pandas as pd

    from apfed_attacks.headlines import Headline
    from apfed_attacks.interface import AttackResult
    from apfed_experiments.finished import FinishedRun
    from apfed_experiments.runner import Answer, Study
    from apfed_experiments.solo import BaselinesRecord
    from secure_apfed.config import AttackChoice, Config
    from secure_apfed.organisations.own_record import OwnRecord
    from secure_apfed.runs.folder import RunFolder as Files
    from secure_apfed.runs.outcome import RunResult, Written
    from secure_apfed.runs.worth import WhoHelped


OwnEncoder = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME", help="If the encoder is your own code: where it is defined."
    ),
]
OwnHead = Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="The same for the head.")]


def _import_networks(encoder: str | None, head: str | None) -> dict[str, Any]:
    """Import the user's own networks; return them as keyword arguments of `load_model`.

    Only the command's options name them: a run's folder never says which code to import.

    `encoder`, `head`: MODULE:NAME of the code; None: the run's network is one of ours.
    """
    from secure_apfed.settings.plugins import import_code

    names = {"encoder": encoder, "head": head}
    return {
        part: import_code(name, key=f"--{part}") for part, name in names.items() if name is not None
    }


def _import_passive_networks(named: Sequence[str]) -> dict[str, Any]:
    """Import the passives' own networks; return the imported code by name of the passive.

    `named`: texts PASSIVE=MODULE:NAME, such as lab=my_nets:encode.

    Raises ConfigError: a text has another form.
    """
    from secure_apfed.errors import ConfigError
    from secure_apfed.settings.plugins import import_code

    networks = {}
    for text in named:
        passive, equals, name = text.partition("=")
        if not equals or not passive:
            raise ConfigError(f"--passive-encoder: expected PASSIVE=MODULE:NAME, got {text!r}")
        networks[passive] = import_code(name, key=f"--passive-encoder {passive}")
    return networks


def finish_run(
    config: "Config",
    result: "RunResult",
    *,
    baselines: bool,
    quiet: bool,
    contributions: bool = False,
    phases: Phases | None = None,
    json_events: bool = False,
) -> None:
    """Do the steps after a run: local models, attacks, report, trade-off study; print the result.

    Args:
        config: settings of the run.
        result: result of the run, with its folder, where everything is stored.
        baselines: whether local models are measured.
        quiet: print the result as JSON, and nothing else.
        contributions: whether the loss of the measure without each passive is measured.
        phases: measured phases of the run, whose costs are printed; None: not measured.
        json_events: print progress as JSON lines.
    """
    from apfed_experiments.finished import mount_attacks

    folder = result.folder
    assert folder is not None
    begin_phase("baselines")
    options: dict[str, Any] = {"as_json": quiet and not json_events, "json_events": json_events}
    with progress.show_work(config.data.active_name if json_events else "", **options):
        solo = measure_local_models(config, result, quiet=quiet) if baselines else None
    who_helped = _measure_passives_worth(result, quiet=quiet) if contributions else None
    begin_phase("attacks")
    if config.attacks and not quiet:
        names = ", ".join(dict.fromkeys(choice.name for choice in config.attacks))
        note = f"mounting attacks: {names}"
        if result.recorded is None:
            note = (
                "each party ran in a process of its own, and nobody holds what all of them sent: "
                "attacks are those of each party on what it let out itself; run it with "
                "--transport memory for those that read more"
            )
        terminal.show_note(note)
    if result.recorded is None:
        results = _merge_attacks(folder)
    else:
        with progress.show_work(**options):
            results = mount_attacks(folder, recording=result.recorded)
    begin_phase("report")
    page = report_if_possible(folder)
    if page is not None and result.recorded is None:
        for party in _open_folder(folder).list_ended_parties():
            report_if_possible(party)
    if not quiet:
        _show_result(config, result, results, solo, page)
    tradeoff = run_own_tradeoff(config, folder / "tradeoff", quiet=quiet)
    if phases is not None:
        phases.end_phase()
    if quiet:
        figures = _collect_figures(config, result, results, solo)
        outputs = {
            "who_helped": _dump_record(who_helped),
            "report": page,
            "tradeoff": None if tradeoff is None else tradeoff.tables[0].export_rows(),
            "phases": phases and {name: asdict(phase) for name, phase in phases.items()},
        }
        terminal.print_json(figures | outputs)
    elif phases is not None:
        terminal.show_phases(phases)


def _collect_figures(
    config: "Config",
    result: "RunResult",
    results: "Sequence[AttackResult]",
    solo: "BaselinesRecord | None",
) -> dict[str, Any]:
    """Return a finished run's metrics and privacy costs as `--json` prints them.

    `results`: results of attacks. `solo`: the local models; None: not measured.
    """
    from apfed_attacks.headlines import headlines_by_direction
    from apfed_experiments.finished import load_finished_run
    from apfed_experiments.verdict import describe_run
    from secure_apfed.runs.departures import describe_departures, describe_shared_organisations

    folder = result.folder
    assert folder is not None
    return {
        "method": result.method,
        "accuracy": result.accuracy,
        "measure": result.measure,
        "measures": result.measures,
        "threshold": result.threshold,
        "undefined": result.undefined,
        "wire_bytes": result.wire_bytes,
        "sessions": result.sessions,
        "steps": result.steps,
        "calibration": _dump_record(result.calibration),
        "ranking": _dump_record(result.ranking),
        "never_predicted": dict(result.never_predicted),
        "privacy": asdict(result.privacy),
        "promises": [promise.as_json() for promise in result.promises],
        "attacks": [attack.as_json() for attack in results],
        "directions": [headline.as_json() for headline in headlines_by_direction(results, config)],
        "contributions": result.contributions,
        "stated": result.stated,
        "less_protected": describe_departures(config),
        "shared_organisations": describe_shared_organisations(folder),
        "solo": None if solo is None else solo.model_dump(mode="json"),
        "verdict": dict(describe_run(load_finished_run(folder))),
        "folder": folder,
    }


def _measure_passives_worth(result: "RunResult", *, quiet: bool) -> "WhoHelped":
    """Train again without each passive, store what each contributes in the run's folder, return it.

    `quiet`: show no progress.
    """
    from secure_apfed.runs.worth import measure_worth

    assert result.folder is not None
    with progress.show_count("trainings without a passive", quiet=quiet) as on_done:
        worth = measure_worth(result, on_done=on_done)
    files = _open_folder(result.folder)
    files.write_json(files.who_helped, worth.model_dump(mode="json"))
    return worth


def _dump_record(written: "Written | None") -> "dict[str, Any] | None":
    """Return a record as plain values; None stays None."""
    return None if written is None else written.model_dump(mode="json")


def _open_folder(folder: Path) -> "Files":
    """Return the run's folder; its module is imported only when a command needs it."""
    from secure_apfed.runs.folder import RunFolder as Files

    return Files(folder)


def _merge_attacks(folder: Path) -> "tuple[AttackResult, ...]":
    """Return the attack results of parties in processes of their own, merged in `attacks.json`.

    `folder`: folder of the run. If it is the active's own folder, only the active's results are
    read.
    """
    from apfed_attacks.interface import AttackResult
    from secure_apfed.base.files import load_json

    run = _open_folder(folder)
    paths = [path / "attacks.json" for path in run.list_ended_parties() or (folder,)]
    results = tuple(
        result
        for path in paths
        if path.is_file()
        for result in load_json(path, tuple[AttackResult, ...])
    )
    if results:
        run.write_json(folder / "attacks.json", [result.as_json() for result in results])
    return results


def attack_own_messages(record: "OwnRecord", folder: Path, *, quiet: bool) -> None:
    """Attack what a party sent, if its settings say so, and store the results in its folder.

    `record`: what the party sent, and its own table, which is the ground truth. `quiet`: print
    nothing.
    """
    if not record.config.attacks or record.data is None:
        return
    from apfed_attacks.own import measure_own

    if not quiet:
        terminal.show_note(f"attacking what {record.me} let out")
    results = measure_own(record, record.config.attacks, seed=record.config.seed)
    _open_folder(folder).write_json(
        folder / "attacks.json", [result.as_json() for result in results]
    )


def report_passive(folder: Path, *, quiet: bool) -> None:
    """Make the report of a passive in its folder and print its path, as JSON if `quiet`."""
    page = report_if_possible(folder)
    if quiet:
        terminal.print_json({"folder": folder, "report": page})
    elif page is not None:
        typer.echo(page)


def measure_local_models(
    config: "Config", result: "RunResult", *, quiet: bool
) -> "BaselinesRecord | None":
    """Measure the local models of a run's active on the same rows and labels, and return them.

    None where they cannot be measured; a note says why unless `quiet`.
    """
    from apfed_experiments.solo import (
        LEFT_OUT,
        NOT_IN_MEMORY,
        has_baselines,
        measure_run_baselines,
    )

    assert result.folder is not None
    if not quiet and config.dp_sgd is not None:
        terminal.show_note(LEFT_OUT)
    elif not quiet and result.trained is not None and not has_baselines(result.trained):
        terminal.show_note(NOT_IN_MEMORY)
    elif not quiet and result.trained is not None:
        terminal.show_note("measuring what the active would do alone")
    return measure_run_baselines(config, result.folder, result.trained)


def _show_result(
    config: "Config",
    result: "RunResult",
    results: "Sequence[AttackResult]",
    solo: "BaselinesRecord | None",
    page: Path | None,
) -> None:
    """Print a finished run's table (scores, people, gain, privacy, attacks) and its verdict.

    `results`: results of attacks. `solo`: the local models; None: not measured. `page`: path of the
    report; None: none was written.
    """
    from apfed_attacks.headlines import headlines_by_direction
    from apfed_experiments.finished import load_finished_run
    from apfed_experiments.verdict import describe_run
    from secure_apfed.runs.outcome import load_common_people

    assert result.folder is not None
    finished = load_finished_run(result.folder)
    several = f" in {result.sessions} sessions" if result.sessions > 1 else ""
    rows = [
        *_list_score_rows(config, result, finished),
        *_list_ranking_rows(result),
        *(
            (f"people of {people.party}", people.sentence)
            for people in load_common_people(_open_folder(result.folder))
        ),
        *_list_class_rows(config, result),
        *_list_gain_rows(result, finished, solo),
        ("sent", f"{result.wire_bytes / 1e6:.1f} MB{several}"),
        *_list_privacy_rows(config, result),
        *(
            (headline.direction.title, headline.text)
            for headline in headlines_by_direction(results, config)
        ),
        *_list_departure_rows(config, result.folder),
        ("run folder", str(result.folder)),
    ]
    if page is not None:
        rows.append(("report", str(page)))
    terminal.show_rows("Result", ("", ""), rows)
    terminal.show_rows("\nVerdict", ("", ""), describe_run(finished))


def _list_score_rows(
    config: "Config", result: "RunResult", finished: "FinishedRun"
) -> Iterator[tuple[str, str]]:
    """Yield title and text of the run's measure by way of inference, then of the accuracies.

    `finished`: the run as its folder stores it.
    """
    from apfed_experiments.variants import describe_tested_rows, title_variant
    from secure_apfed.measures.table import ACCURACY, MEASURES
    from secure_apfed.runs.outcome import measure_text

    measure = MEASURES[result.measure]
    titles = {name: title_variant(config.method, name) for name in result.accuracy}
    tested = {
        name: describe_tested_rows(config, finished.outcome, name) for name in result.accuracy
    }
    for name, value in result.scores.items():
        if measure is not ACCURACY or math.isnan(value):
            text = measure_text(measure, name, value, result.undefined)
            yield f"{measure.title}, {titles[name]}", f"{text} {tested[name]}"
    for name, value in result.accuracy.items():
        if not math.isnan(value):
            yield f"accuracy, {titles[name]}", f"{100 * value:.2f} % {tested[name]}"


def _list_ranking_rows(result: "RunResult") -> Iterator[tuple[str, str]]:
    """Yield title and text of the prevalence of the positive class, and of ranking measures with
    their intervals.
    """
    from secure_apfed.measures.table import MEASURES

    ranking = result.ranking
    if ranking is None:
        return
    prevalence = (
        f"{ranking.positives} of {ranking.rows} test rows, {100 * ranking.rate.value:.2f} %; "
        f"predicted {100 * ranking.predicted:.2f} %"
    )
    unmet = "" if ranking.is_met else ", which is not met"
    yield f"positive class {ranking.class_name}", prevalence + unmet
    for name, interval in ranking.intervals.items():
        yield MEASURES[name].title, interval.format_interval(MEASURES[name])


def _list_class_rows(config: "Config", result: "RunResult") -> Iterator[tuple[str, str]]:
    """Yield title and text of coefficients, of the threshold of the positive class, and of classes
    that are never predicted.
    """
    from secure_apfed.runs.outcome import describe_unpredicted_classes

    for table in result.coefficients:
        yield f"coefficients of {table.party}", table.describe_largest()
    if result.threshold is not None:
        yield "threshold of the positive class", f"{result.threshold:.3f}"
    missing = describe_unpredicted_classes(config, result.never_predicted)
    if missing is not None:
        yield "never predicted", missing


def _list_gain_rows(
    result: "RunResult", finished: "FinishedRun", solo: "BaselinesRecord | None"
) -> Iterator[tuple[str, str]]:
    """Yield title and text of the best local model, the gain over it, each passive's worth, and the
    use of votes.

    `finished`: the run as its folder has it. `solo`: the local models; None: not measured.
    """
    from apfed_experiments.worth import AROUND_ZERO, DEPENDS, list_worth_rows

    if solo is not None:
        yield "best local model", solo.describe_best()
        yield "gain", solo.describe_gain(finished.gain)
    if finished.who_helped is not None:
        for passive, _, worth, shows, _ in list_worth_rows(finished.who_helped):
            yield f"worth of {passive}", f"{worth}: {shows}" if shows else worth
        yield "how to read a worth", f"{DEPENDS} {AROUND_ZERO}"
    if result.help is not None:
        yield "votes", str(result.help)


def _list_privacy_rows(config: "Config", result: "RunResult") -> Iterator[tuple[str, str]]:
    """Yield title and text of each epsilon, of epsilon_x (representations) by other accountants,
    and of the epsilons that passives state for their own messages.
    """
    from secure_apfed.settings.promises import NO_ACCOUNT, promise_of_account

    for promise in result.promises:
        yield promise.format_title(), promise.sentence
    if config.method.figure == "epsilon_x":
        for name, value in result.privacy.accountants.items():
            yield f"epsilon_x by {name}", value if isinstance(value, str) else f"{value:.4g}"
    for name, statement in result.stated.items():
        accounts = ", ".join(
            f"{account['figure']} {promise_of_account(account).text}"
            for account in statement["accounts"]
        )
        how = "signed" if statement["step"] is not None else "it never said"
        yield f"stated by {name}", f"{accounts or NO_ACCOUNT}, {how}"


def _list_departure_rows(config: "Config", folder: Path) -> Iterator[tuple[str, str]]:
    """Yield title and text of settings that protect less than by default, and of organisations that
    run several parties.
    """
    from secure_apfed.runs.departures import describe_departures, describe_shared_organisations

    for title, sentences in (
        ("protects less than by default", describe_departures(config)),
        ("run by one organisation", describe_shared_organisations(folder)),
    ):
        if sentences:
            yield title, "; ".join(sentences)


def attack(
    folder: RunFolder,
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attacks", help="Names of attacks, repeated or separated by commas; default: all."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="ATTACK.KEY=VALUE",
            help="Run this attack once, with these options instead of its defaults.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the attacks; default: the run's.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda, or one GPU such as cuda:1; default: as in the run."),
    ] = None,
    encoder: OwnEncoder = None,
    head: OwnHead = None,
    passive_encoders: Annotated[
        list[str] | None,
        typer.Option(
            "--passive-encoder",
            metavar="PASSIVE=MODULE:NAME",
            help="If a passive's network is your own code: where it is defined.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack a finished run, show what was read, and update its report."""
    from apfed_attacks.headlines import headlines_by_direction
    from apfed_experiments.finished import mount_attacks
    from secure_apfed.learning.descent import find_device
    from secure_apfed.runs.outcome import load_recording

    chosen = _choose_attacks(attacks or [], options or [])
    if not as_json:
        terminal.show_note(f"mounting {', '.join(dict.fromkeys(choice.name for choice in chosen))}")
    target_device = None if device is None else find_device(device)
    with progress.show_work(as_json=as_json):
        recording = load_recording(
            folder,
            **_import_networks(encoder, head),
            encoders=_import_passive_networks(passive_encoders or []),
        )
        results = mount_attacks(
            folder, chosen, seed=seed, device=target_device, recording=recording
        )
    page = report_if_possible(folder)
    headlines = headlines_by_direction(results, _open_folder(folder).load_config())
    if as_json:
        attack_rows = [result.as_json() for result in results]
        directions = [headline.as_json() for headline in headlines]
        terminal.print_json(
            {"attacks": attack_rows, "directions": directions, "folder": folder, "report": page}
        )
        return
    _show_attacks(results, headlines)
    if _open_folder(folder).load_config().effective_transcript.keep == "none":
        terminal.show_note(
            "note: nothing that was sent is kept, since the run's file names no attacks; name "
            "them, or set transcript.keep, and play the run anew for those that read it"
        )
    if page is not None:
        typer.echo(page)


def report_if_possible(folder: Path) -> Path | None:
    """Make a run's report; without the extra that draws it, print a note and return None."""
    try:
        from apfed_experiments.report import write_report

        return write_report(folder)
    except ModuleNotFoundError as error:
        if error.name not in terminal.RESEARCH_MODULES:
            raise
        terminal.show_note(
            f"no report: {error.name} is not installed; run: {install_extra('experiments')}, "
            f"then secure-apfed report {folder}"
        )
        return None


def _show_attacks(results: "Sequence[AttackResult]", headlines: "Sequence[Headline]") -> None:
    """Print the best adversary's result of each attack, and a summary by direction.

    `headlines`: one for each direction (who reads whose what).
    """
    from apfed_attacks.interface import select_headlines

    worst_results = select_headlines(results)
    rows: list[tuple[str, ...]] = [
        (
            result.attack,
            f"{result.target} of {result.victim}" if result.victim else result.target,
            result.adversary,
            f"{result.advantage:+.3f}",
            str(result.metric),
            str(result.variant),
            str(result.baseline),
        )
        for result in worst_results
        if result.advantage is not None
    ]
    columns = ("attack", "target", "by", "advantage", "in", "best variant", "over")
    terminal.show_rows("Attacks, the worst adversary of each", columns, rows)
    for result in worst_results:
        if result.advantage is None:
            terminal.show_note(f"{result.attack} declined: {result.reason}")
    direction_rows = [
        (headline.direction.title, headline.short, headline.note) for headline in headlines
    ]
    terminal.show_rows("\nWho reads whose what", ("direction", "", ""), direction_rows)
    terminal.show_note(
        "An advantage is over the best baseline with the same knowledge. One near 0, on either "
        "side, proves nothing; the worst of several adversaries is above 0 by chance alone."
    )


def _choose_attacks(names: Sequence[str], options: Sequence[str]) -> "tuple[AttackChoice, ...]":
    """Return the attacks to run: those with options once with these, others with their full suites.

    `names`: names of attacks, or "all"; a text may hold several, separated by commas. `options`:
    texts ATTACK.KEY=VALUE. Without either, all attacks are run.

    Raises ConfigError: a name or an option is unknown or malformed.
    """
    from apfed_attacks import ATTACKS
    from apfed_attacks.table import ALL, full_suite, prepare_attack
    from secure_apfed.config import AttackChoice
    from secure_apfed.errors import ConfigError

    parts = [part.strip() for text in names for part in text.split(",")]
    requested = [part for part in parts if part]
    if names and not requested:
        raise ConfigError("--attacks: no name is given; leave it out for all attacks")
    options_by_attack = _parse_attack_options(options)
    if ALL in requested or not (requested or options_by_attack):
        requested = list(ATTACKS)
    named = list(dict.fromkeys([*requested, *options_by_attack]))
    chosen: list[AttackChoice] = []
    for name in named:
        if name in options_by_attack:
            chosen.append(AttackChoice(name=name, options=options_by_attack[name]))
            prepare_attack(chosen[-1])
        else:
            chosen += full_suite([name])
    return tuple(chosen)


def _parse_attack_options(options: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return the options in texts ATTACK.KEY=VALUE, by attack and key.

    Raises ConfigError: a text is malformed.
    """
    from secure_apfed.config.plain_yaml import parse_yaml_value
    from secure_apfed.errors import ConfigError

    options_by_attack: dict[str, dict[str, object]] = {}
    for option in options:
        path, equals, text = option.partition("=")
        name, dot, key = path.strip().partition(".")
        if not (equals and dot and name and key):
            raise ConfigError(
                f"--option {option}: expected ATTACK.KEY=VALUE, as in "
                "model_completion.labels_per_class=4"
            )
        options_by_attack.setdefault(name, {})[key] = parse_yaml_value(
            text, given=f"--option {option}"
        )
    return options_by_attack


def run_study(study: "Study[Any]", jobs: int, *, quiet: bool) -> "Answer":
    """Run what a study lacks, and return its result.

    Unless `quiet`, print a first result as soon as possible, and at the end the tables and how to
    read them. `jobs`: number of runs at a time.
    """
    from apfed_experiments import runner

    if study.measure_first is not None and not quiet:
        with progress.show_count(f"{study.title}: first line", quiet=quiet) as on_done:
            sentences = study.measure_first(jobs=jobs, on_done=on_done)
        for sentence in sentences:
            terminal.show_note(sentence)
    with progress.show_count(f"{study.title}: {study.unit}", quiet=quiet) as on_done:
        answer = runner.run_study(study, jobs=jobs, on_done=on_done)
    if quiet:
        return answer
    for part in answer.parts:
        table = part.brief or part.table
        terminal.show_rows(table.title, table.header, table.cells)
        for note in part.notes:
            terminal.show_note(note)
        if part.lines:
            terminal.show_rows(f"\nVerdict on {part.table.title}", ("", ""), part.lines)
    for note in (study.reading, *runner.list_failures(answer.failures)):
        if note:
            terminal.show_note(note)
    if answer.page is not None:
        typer.echo(answer.page)
    return answer


def run_own_tradeoff(config: "Config", folder: Path, *, quiet: bool) -> "Answer | None":
    """Run the trade-off study in a run's configuration, and return its result.

    `folder`: folder of the study. Returns None if the configuration holds no study.
    """
    if not config.tradeoff:
        return None
    from apfed_experiments.tradeoff import declare_study, make_tradeoff

    return run_study(declare_study(make_tradeoff(config), folder), 2, quiet=quiet)


def runs(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder that contains run folders, at any depth."),
    ] = Path("runs"),
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write an HTML page to filter, sort and compare the runs."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List run folders, the newest first: method, data, gain, epsilon, worst attacks, date."""
    from apfed_experiments.run_list import HEADER, list_runs

    listed = list_runs(folder)
    page = None
    if html is not None:
        from apfed_experiments.report.page import write_runs_page

        page = write_runs_page(listed, html, title=f"Runs below {folder}")
    if as_json:
        rows = [run.as_json() for run in listed]
        terminal.print_json({"folder": folder, "runs": rows, "page": page})
        return
    if listed:
        terminal.show_rows(f"Runs below {folder}", HEADER, [run.list_cells() for run in listed])
        terminal.show_note(
            "The gain of one run shows no help, only several seeds do (secure-apfed run CONFIG "
            "--seeds 5). The worst of several attacks is above 0 by chance alone; where none was "
            "mounted, nothing is known."
        )
    else:
        terminal.show_note(f"{folder}: no run folder lies below it; secure-apfed run makes one")
    if page is not None:
        typer.echo(page)


def predict(
    model: Annotated[Path, typer.Option(metavar="RUN", help="Folder of a finished run.")],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="The rows: CSV, Parquet, .npy or IDX.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Write the predictions to a .csv, .parquet or .json file.")
    ] = None,
    id_column: Annotated[
        list[str] | None, typer.Option(help="Column of IDs; default: as in training.")
    ] = None,
    jointly: Annotated[
        Path | None,
        typer.Option(
            metavar="PARTY.yaml",
            help="Predict jointly with the passives, which must be running `secure-apfed serve`.",
        ),
    ] = None,
    encoder: OwnEncoder = None,
    head: OwnHead = None,
    as_json: AsJson = False,
) -> None:
    """Predict with the active's model, locally or jointly with all parties."""
    from secure_apfed.runs.solo import predict_file, predict_into

    if jointly is not None:
        _predict_jointly(model, data, output, jointly, id_column, as_json=as_json)
        return

    networks = _import_networks(encoder, head)
    if output is None:
        predictions = predict_file(model, data, id_columns=id_column, **networks)
        compared = predictions.compared
        record = predictions.as_json()
    else:
        predictions = None
        compared = predict_into(model, data, output, id_columns=id_column, **networks)
        record = {"rows": compared.rows, **compared.as_json()}
    if as_json:
        terminal.print_json({**record, "output": output})
    elif predictions is None:
        terminal.show_note(f"{compared.rows} rows written to {output}")
    else:
        _show_predictions(predictions.to_frame())
    if as_json:
        return
    for column in compared.drift:
        if column.notable:
            terminal.show_note(f"column {column.name!r}: {column.notable}")


def _show_predictions(frame: "pd.DataFrame") -> None:
    """Print predictions as a table."""
    rows = [
        tuple(cell if isinstance(cell, str) else f"{cell:.4f}" for cell in row)
        for row in frame.itertuples(index=False, name=None)
    ]
    terminal.show_rows("Predictions", [*frame.columns], rows)


def _predict_jointly(
    model: Path,
    data: Path,
    output: Path | None,
    party: Path,
    id_columns: Sequence[str] | None,
    *,
    as_json: bool,
) -> None:
    """Predict rows together with the passives that serve, and print or write the predictions.

    Args:
        model: folder of the run.
        data: file of the rows.
        output: file for the predictions; None: they are printed.
        party: settings file of the active.
        id_columns: value of --id-column, which must not be given here.
        as_json: print JSON.

    Raises ConfigError: options do not fit together. Ends the process with code 4 if a party left or
    refused; all rows are predicted and written first.
    """
    from secure_apfed.errors import ConfigError
    from secure_apfed.exchange import StatusTracker
    from secure_apfed.organisations.party import PartyFile
    from secure_apfed.organisations.served import predict_jointly

    if id_columns:
        raise ConfigError(
            "--id-column: with --jointly people are asked about by the ID columns of the training "
            "(data.id_column); leave it out"
        )
    if not PartyFile.from_file(party).folder.samefile(model):
        raise ConfigError(
            f"--jointly {party}: its folder is not {model}; give the run of that file"
        )
    status = StatusTracker()
    frames = list["pd.DataFrame"]()
    board = progress.Board(lambda: (status.build_status(),))
    with progress.show_board(board, as_json=as_json):
        counts = predict_jointly(
            party, data, output, status=status, write=None if output else frames.append
        )
    if as_json:
        rows = [row for frame in frames for row in frame.to_dict("records")]
        terminal.print_json({**asdict(counts), "predictions": rows, "output": output})
    else:
        for frame in frames:
            _show_predictions(frame)
        note = f"{counts.jointly} rows predicted jointly, {counts.alone} by the active alone"
        if counts.refused:
            note += (
                f" ({counts.refused} of people who were asked about as often as a passive allows)"
            )
        if counts.why:
            note += f", since {counts.why}"
        terminal.show_note(note)
    if counts.is_failure:
        raise typer.Exit(4)


def columns(
    folder: RunFolder,
    keep: Annotated[
        float | None,
        typer.Option(help="Columns to keep at each party: a number, or below 1 a share."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Write the settings of a run on these columns."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank each party's columns by a finished run of mmvfl or v_fedmv, and keep the best."""
    from secure_apfed.base.files import refuse_replacing_input, write_atomically
    from secure_apfed.config.file import dump_settings
    from secure_apfed.errors import ConfigError
    from secure_apfed.runs.columns import load_column_scores, pick_columns, restrict_columns

    scores = load_column_scores(folder)
    kept_columns = {} if keep is None else pick_columns(scores, keep)
    if output is not None:
        if keep is None:
            raise ConfigError("--output: say how many columns stay, as --keep 10 or --keep 0.3")
        refuse_replacing_input(output, "--output", folder)
        config = restrict_columns(_open_folder(folder).load_config(), scores, kept_columns)
        write_atomically(output, dump_settings(config).encode())
    if as_json:
        terminal.print_json({"scores": scores, "kept": kept_columns, "config": output})
        return
    rows = [
        (
            party,
            str(rank),
            name,
            f"{score:.4g}",
            "yes" if name in kept_columns.get(party, party_scores) else "",
        )
        for party, party_scores in scores.items()
        for rank, (name, score) in enumerate(party_scores.items(), 1)
    ]
    terminal.show_rows("Columns by score", ("party", "rank", "column", "score", "stays"), rows)
    if output is not None:
        terminal.show_note(f"{output} trains on what stays: secure-apfed run {output}")


def export(
    folder: RunFolder,
    onnx: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The ONNX file to write; an existing one is replaced."),
    ],
    encoder: OwnEncoder = None,
    head: OwnHead = None,
    as_json: AsJson = False,
) -> None:
    """Export the active's model as ONNX, to predict without this library."""
    from secure_apfed.base.files import refuse_replacing_input
    from secure_apfed.runs.onnx_file import write_onnx
    from secure_apfed.runs.solo import load_model

    refuse_replacing_input(onnx, "--onnx", folder)
    write_onnx(load_model(folder, **_import_networks(encoder, head)), onnx)
    if as_json:
        terminal.print_json({"onnx": onnx, "bytes": onnx.stat().st_size})
    else:
        terminal.show_note(f"{onnx} holds the model; see docs/python.md for its inputs and outputs")
