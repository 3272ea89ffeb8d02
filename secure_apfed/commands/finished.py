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
    from apfed_experiments.baselines import BaselinesRecord
    from apfed_experiments.finished import FinishedRun
    from apfed_experiments.runner import Study, StudyResults
    from secure_apfed.config import AttackChoice, Config
    from secure_apfed.organisations.own_record import OwnRecord
    from secure_apfed.runs.folder import RunFolder as Files
    from secure_apfed.runs.outcome import RunResult, StoredResult
    from secure_apfed.runs.worth import WhoHelped


OwnEncoder = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME", help="If the encoder is your own code: where it is defined."
    ),
]
OwnHead = Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="The same for the head.")]

_REFUSED_EXIT_CODE = 4
"""Exit code if another party refused or left."""


def _import_networks(encoder: str | None, head: str | None) -> dict[str, Any]:
    """Import the user's own networks; return them as keyword arguments of `load_model`.

    Only the command's options name code: a run's folder may come from somebody else, and code that
    it named would run here.

    `encoder`, `head`: MODULE:NAME of the code; None: the run's network is a built-in one.
    """
    from secure_apfed.settings.plugins import import_callable

    names = {"encoder": encoder, "head": head}
    return {
        option: import_callable(name, setting=f"--{option}")
        for option, name in names.items()
        if name is not None
    }


def _import_passive_networks(assignments: Sequence[str]) -> dict[str, Any]:
    """Import the passives' own networks; return the imported code by name of the passive.

    `assignments`: texts PASSIVE=MODULE:NAME, such as lab=my_nets:encode.

    Raises ConfigError: a text has another form, or its code cannot be imported.
    """
    from secure_apfed.errors import ConfigError
    from secure_apfed.settings.plugins import import_callable

    network_by_passive = {}
    for text in assignments:
        passive, equals, name = text.partition("=")
        if not equals or not passive:
            raise ConfigError(f"--passive-encoder: expected PASSIVE=MODULE:NAME, got {text!r}")
        network_by_passive[passive] = import_callable(name, setting=f"--passive-encoder {passive}")
    return network_by_passive


def finish_run(
    config: "Config",
    result: "RunResult",
    *,
    baselines: bool,
    is_quiet: bool,
    contributions: bool = False,
    phases: Phases | None = None,
    json_events: bool = False,
) -> None:
    """Do the steps after a run: local models, attacks, report, trade-off study; print the result.

    Args:
        config: settings of the run.
        result: result of the run, with its folder, where everything is stored.
        baselines: whether to train and measure the active's local models.
        is_quiet: print the result as JSON; progress is printed only if `json_events`.
        contributions: whether to train again without each passive, to measure what it adds.
        phases: times of the run's phases, to which those of these steps are added and which are
            printed; None: they are not measured.
        json_events: print progress as JSON lines.
    """
    from apfed_experiments.finished import mount_attacks

    folder = result.folder
    assert folder is not None
    begin_phase("baselines")
    display_options: dict[str, Any] = {
        "as_json": is_quiet and not json_events,
        "json_events": json_events,
    }
    with progress.show_work(config.data.active_name if json_events else "", **display_options):
        local_models = (
            measure_local_models(config, result, is_quiet=is_quiet) if baselines else None
        )
    who_helped = _measure_passives_worth(result, is_quiet=is_quiet) if contributions else None
    begin_phase("attacks")
    if config.attacks and not is_quiet:
        _announce_attacks(config, result)
    if result.recorded is None:
        # Each party has attacked its own messages already.
        attack_results = _merge_attacks(folder)
    else:
        with progress.show_work(**display_options):
            attack_results = mount_attacks(folder, recording=result.recorded)
    begin_phase("report")
    report_path = _write_reports(folder, has_party_folders=result.recorded is None)
    if not is_quiet:
        _show_result(config, result, attack_results, local_models, report_path)
    tradeoff = run_own_tradeoff(config, folder / "tradeoff", is_quiet=is_quiet)
    if phases is not None:
        phases.end_phase()
    if is_quiet:
        json_fields = _collect_json_fields(config, result, attack_results, local_models)
        outputs = {
            "who_helped": _dump_record(who_helped),
            "report": report_path,
            "tradeoff": None if tradeoff is None else tradeoff.tables[0].export_rows(),
            "phases": phases and {name: asdict(phase) for name, phase in phases.items()},
        }
        terminal.print_json(json_fields | outputs)
    elif phases is not None:
        terminal.show_phases(phases)


def _write_reports(folder: Path, *, has_party_folders: bool) -> Path | None:
    """Write the report of a run, and of each party that has a folder of its own.

    Returns the path of the run's report; None if packages to write it are missing.

    `folder`: folder of the run. `has_party_folders`: whether each party ran in a process of its
    own.
    """
    report_path = report_if_possible(folder)
    if report_path is not None and has_party_folders:
        for party_folder in _open_folder(folder).list_ended_parties():
            report_if_possible(party_folder)
    return report_path


def _announce_attacks(config: "Config", result: "RunResult") -> None:
    """Print which attacks are mounted or, without a record of all messages, why each party only
    attacks what it sent itself.

    `config`: settings of the run, which name attacks. `result`: its `recorded` is None if each
    party ran in a process of its own.
    """
    names = ", ".join(dict.fromkeys(choice.name for choice in config.attacks))
    note = f"mounting attacks: {names}"
    if result.recorded is None:
        note = (
            "each party ran in a process of its own, and nobody holds what all of them sent: "
            "attacks are those of each party on what it let out itself; run it with "
            "--transport memory for those that read more"
        )
    terminal.show_note(note)


def _collect_json_fields(
    config: "Config",
    result: "RunResult",
    attack_results: "Sequence[AttackResult]",
    local_models: "BaselinesRecord | None",
) -> dict[str, Any]:
    """Return a finished run's metrics, privacy costs and attack results, as `--json` prints them.

    `local_models`: measures of the active's local models; None: not measured.
    """
    from apfed_attacks.headlines import make_headlines
    from apfed_experiments.finished import load_finished_run
    from apfed_experiments.verdict import describe_run
    from secure_apfed.runs.weakened_settings import (
        describe_shared_organisations,
        describe_weakened_settings,
    )

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
        "attacks": [attack.as_json() for attack in attack_results],
        # The strongest result for each direction: who reads whose data.
        "directions": [headline.as_json() for headline in make_headlines(attack_results, config)],
        "contributions": result.contributions,
        "stated": result.stated,
        "less_protected": describe_weakened_settings(config),
        "shared_organisations": describe_shared_organisations(folder),
        "solo": _dump_record(local_models),
        "verdict": dict(describe_run(load_finished_run(folder))),
        "folder": folder,
    }


def _measure_passives_worth(result: "RunResult", *, is_quiet: bool) -> "WhoHelped":
    """Measure what each passive contributes to the run's measure, by a training without it.

    The record is written to the run's folder and returned. `is_quiet`: show no progress.
    """
    from secure_apfed.runs.worth import measure_worth

    assert result.folder is not None
    with progress.show_count("trainings without a passive", quiet=is_quiet) as on_done:
        who_helped = measure_worth(result, on_done=on_done)
    files = _open_folder(result.folder)
    files.write_json(files.who_helped, who_helped.model_dump(mode="json"))
    return who_helped


def _dump_record(record: "StoredResult | None") -> "dict[str, Any] | None":
    """Return a stored record (a pydantic model) as plain values for JSON; None stays None."""
    return None if record is None else record.model_dump(mode="json")


def _open_folder(folder: Path) -> "Files":
    """Return the object that knows the files in a run's folder.

    Its module is imported only here, so that the command line starts fast.
    """
    from secure_apfed.runs.folder import RunFolder as Files

    return Files(folder)


def _merge_attacks(folder: Path) -> "tuple[AttackResult, ...]":
    """Return the attack results that parties in processes of their own stored.

    Each party attacked its own messages. All results together are also written to `attacks.json`
    of the run's folder, if there are any.

    `folder`: folder of the run, with one folder for each party on this machine. If it is the
    active's own folder, only the active's results are read.
    """
    from apfed_attacks.interface import AttackResult
    from secure_apfed.base.files import load_json

    files = _open_folder(folder)
    party_folders = files.list_ended_parties() or (folder,)
    merged: list[AttackResult] = []
    for party_folder in party_folders:
        path = party_folder / "attacks.json"
        if path.is_file():
            merged += load_json(path, tuple[AttackResult, ...])
    if merged:
        files.write_json(folder / "attacks.json", [result.as_json() for result in merged])
    return tuple(merged)


def attack_own_messages(record: "OwnRecord", folder: Path, *, is_quiet: bool) -> None:
    """Attack what a party sent, if its settings name attacks, and write `attacks.json`.

    Args:
        record: what the party sent, and its own table, with which attacks are scored. A party
            without a table is not attacked.
        folder: the party's folder.
        is_quiet: print nothing.
    """
    if not record.config.attacks or record.data is None:
        return
    from apfed_attacks.own import measure_own

    if not is_quiet:
        terminal.show_note(f"attacking what {record.me} let out")
    results = measure_own(record, record.config.attacks, seed=record.config.seed)
    _open_folder(folder).write_json(
        folder / "attacks.json", [result.as_json() for result in results]
    )


def report_passive(folder: Path, *, is_quiet: bool) -> None:
    """Write the report of a passive to its folder and print its path, as JSON if `is_quiet`.

    Without the extra that draws reports, JSON holds null in place of the path.
    """
    report_path = report_if_possible(folder)
    if is_quiet:
        terminal.print_json({"folder": folder, "report": report_path})
    elif report_path is not None:
        typer.echo(report_path)


def measure_local_models(
    config: "Config", result: "RunResult", *, is_quiet: bool
) -> "BaselinesRecord | None":
    """Return the measures of local models, which learn from the active's columns alone, on the rows
    and labels of a run.

    They are trained and stored in the run's folder, or read from there if the run's rows are not at
    hand (`result.trained` is None). Returns None if there are none: under DP-SGD, or if the rows do
    not fit into memory. A note says why, unless `is_quiet`.
    """
    from apfed_experiments.baselines import (
        OMITTED_FOR_DP_SGD,
        OMITTED_FOR_LAZY_ROWS,
        has_baselines,
        measure_run_baselines,
    )

    assert result.folder is not None
    if not is_quiet and config.dp_sgd is not None:
        terminal.show_note(OMITTED_FOR_DP_SGD)
    elif not is_quiet and result.trained is not None and not has_baselines(result.trained):
        terminal.show_note(OMITTED_FOR_LAZY_ROWS)
    elif not is_quiet and result.trained is not None:
        terminal.show_note("measuring what the active would do alone")
    return measure_run_baselines(config, result.folder, result.trained)


def _show_result(
    config: "Config",
    result: "RunResult",
    attack_results: "Sequence[AttackResult]",
    local_models: "BaselinesRecord | None",
    report_path: Path | None,
) -> None:
    """Print a finished run's table (scores, people, gain, privacy, attacks) and its verdict.

    `local_models`: measures of the active's local models; None: not measured. `report_path`: None
    if no report was written.
    """
    from apfed_attacks.headlines import make_headlines
    from apfed_experiments.finished import load_finished_run
    from apfed_experiments.verdict import describe_run
    from secure_apfed.runs.outcome import load_common_people

    assert result.folder is not None
    finished = load_finished_run(result.folder)
    sessions_text = f" in {result.sessions} sessions" if result.sessions > 1 else ""
    rows = [
        *_list_score_rows(config, result, finished),
        *_list_ranking_rows(result),
        *(
            (f"people of {people.party}", people.sentence)
            for people in load_common_people(_open_folder(result.folder))
        ),
        *_list_class_rows(config, result),
        *_list_gain_rows(result, finished, local_models),
        ("sent", f"{result.wire_bytes / 1e6:.1f} MB{sessions_text}"),
        *_list_privacy_rows(config, result),
        *(
            (headline.direction.title, headline.text)
            for headline in make_headlines(attack_results, config)
        ),
        *_list_departure_rows(config, result.folder),
        ("run folder", str(result.folder)),
    ]
    if report_path is not None:
        rows.append(("report", str(report_path)))
    terminal.show_rows("Result", ("", ""), rows)
    terminal.show_rows("\nVerdict", ("", ""), describe_run(finished))


def _list_score_rows(
    config: "Config", result: "RunResult", finished: "FinishedRun"
) -> Iterator[tuple[str, str]]:
    """Yield title and text of the run's measure, then of its accuracies, by variant of the model.

    Variants are ways to predict, such as locally or jointly. `finished`: the run as its folder
    stores it.
    """
    from apfed_experiments.variants import describe_tested_rows, title_inference
    from secure_apfed.measures.table import ACCURACY, MEASURES
    from secure_apfed.runs.outcome import measure_text

    measure = MEASURES[result.measure]
    title_by_variant = {name: title_inference(config.method, name) for name in result.accuracy}
    rows_text_by_variant = {
        name: describe_tested_rows(config, finished.outcome, name) for name in result.accuracy
    }
    for name, value in result.scores.items():
        # Defined accuracies follow below; an undefined one is listed here, with the reason.
        if measure is not ACCURACY or math.isnan(value):
            text = measure_text(measure, name, value, result.undefined)
            yield (
                f"{measure.title}, {title_by_variant[name]}",
                f"{text} {rows_text_by_variant[name]}",
            )
    for name, value in result.accuracy.items():
        if not math.isnan(value):
            yield (
                f"accuracy, {title_by_variant[name]}",
                f"{100 * value:.2f} % {rows_text_by_variant[name]}",
            )


def _list_ranking_rows(result: "RunResult") -> Iterator[tuple[str, str]]:
    """Yield title and text of the prevalence of the positive class, then of each ranking measure
    (such as AUC) with its interval; nothing if the run has no ranking.
    """
    from secure_apfed.measures.table import MEASURES

    ranking = result.ranking
    if ranking is None:
        return
    prevalence = (
        f"{ranking.positives} of {ranking.rows} test rows, {100 * ranking.rate.value:.2f} %; "
        f"predicted {100 * ranking.predicted:.2f} %"
    )
    unmet_text = "" if ranking.is_met else ", which is not met"
    yield f"positive class {ranking.class_name}", prevalence + unmet_text
    for name, interval in ranking.intervals.items():
        yield MEASURES[name].title, interval.format_interval(MEASURES[name])


def _list_class_rows(config: "Config", result: "RunResult") -> Iterator[tuple[str, str]]:
    """Yield title and text of linear models' coefficients, of the decision threshold, and of
    classes that no test row is predicted to have; each only if there is one.
    """
    from secure_apfed.runs.outcome import describe_unpredicted_classes

    for table in result.coefficients:
        yield f"coefficients of {table.party}", table.describe_largest()
    if result.threshold is not None:
        yield "threshold of the positive class", f"{result.threshold:.3f}"
    unpredicted_text = describe_unpredicted_classes(config, result.never_predicted)
    if unpredicted_text is not None:
        yield "never predicted", unpredicted_text


def _list_gain_rows(
    result: "RunResult", finished: "FinishedRun", local_models: "BaselinesRecord | None"
) -> Iterator[tuple[str, str]]:
    """Yield title and text of the best local model, the gain over it, each passive's worth, and the
    use of votes.

    A passive's worth is what the measure loses in a training without it. `finished`: the run as its
    folder stores it. `local_models`: measures of the active's local models; None: not measured.
    """
    from apfed_experiments.worth import DEPENDENCE_NOTE, ZERO_INTERVAL_NOTE, list_worth_rows

    if local_models is not None:
        yield "best local model", local_models.describe_best()
        yield "gain", local_models.describe_gain(finished.gain)
    if finished.who_helped is not None:
        for passive, _, worth, interpretation, _ in list_worth_rows(finished.who_helped):
            text = f"{worth}: {interpretation}" if interpretation else worth
            yield f"worth of {passive}", text
        yield "how to read a worth", f"{DEPENDENCE_NOTE} {ZERO_INTERVAL_NOTE}"
    if result.help is not None:
        yield "votes", str(result.help)


def _list_privacy_rows(config: "Config", result: "RunResult") -> Iterator[tuple[str, str]]:
    """Yield title and text of each privacy guarantee.

    Then follow epsilon_x (the cost of representations) by other accountants, and the costs that
    passives in processes of their own report for their messages.
    """
    from secure_apfed.settings.promises import NO_PRIVACY_SPENT, derive_guarantee

    for promise in result.promises:
        yield promise.format_title(), promise.sentence
    if config.method.epsilon_name == "epsilon_x":
        for name, value in result.privacy.accountants.items():
            yield f"epsilon_x by {name}", value if isinstance(value, str) else f"{value:.4g}"
    for passive, statement in result.stated.items():
        costs = ", ".join(
            f"{account['figure']} {derive_guarantee(account).text}"
            for account in statement["accounts"]
        )
        has_reported = statement["step"] is not None
        source = "signed" if has_reported else "it never said"
        yield f"stated by {passive}", f"{costs or NO_PRIVACY_SPENT}, {source}"


def _list_departure_rows(config: "Config", folder: Path) -> Iterator[tuple[str, str]]:
    """Yield title and text of settings that protect less than by default, and of organisations that
    run several parties.
    """
    from secure_apfed.runs.weakened_settings import (
        describe_shared_organisations,
        describe_weakened_settings,
    )

    for title, sentences in (
        ("protects less than by default", describe_weakened_settings(config)),
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
    from apfed_attacks.headlines import make_headlines
    from apfed_experiments.finished import mount_attacks
    from secure_apfed.learning.descent import find_device
    from secure_apfed.runs.outcome import load_recording

    choices = _choose_attacks(attacks or [], options or [])
    if not as_json:
        names = ", ".join(dict.fromkeys(choice.name for choice in choices))
        terminal.show_note(f"mounting {names}")
    target_device = None if device is None else find_device(device)
    with progress.show_work(as_json=as_json):
        recording = load_recording(
            folder,
            **_import_networks(encoder, head),
            encoders=_import_passive_networks(passive_encoders or []),
        )
        results = mount_attacks(
            folder, choices, seed=seed, device=target_device, recording=recording
        )
    report_path = report_if_possible(folder)
    config = _open_folder(folder).load_config()
    headlines = make_headlines(results, config)
    if as_json:
        terminal.print_json(
            {
                "attacks": [result.as_json() for result in results],
                "directions": [headline.as_json() for headline in headlines],
                "folder": folder,
                "report": report_path,
            }
        )
        return
    _show_attacks(results, headlines)
    if config.effective_transcript.keep == "none":
        terminal.show_note(
            "note: nothing that was sent is kept, since the run's file names no attacks; name "
            "them, or set transcript.keep, and play the run anew for those that read it"
        )
    if report_path is not None:
        typer.echo(report_path)


def report_if_possible(folder: Path) -> Path | None:
    """Write a run's report and return its path.

    Without the optional packages that draw reports, print how to install them, and return None.
    """
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
    """Print the result of the most successful adversary of each attack, and a summary by direction.

    Attacks without an advantage are listed with their reason for declining.

    `headlines`: the summary, one for each direction: which role reads which data of which other.
    """
    from apfed_attacks.interface import select_headlines

    best_results = select_headlines(results)
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
        for result in best_results
        if result.advantage is not None
    ]
    columns = ("attack", "target", "by", "advantage", "in", "best variant", "over")
    terminal.show_rows("Attacks, the worst adversary of each", columns, rows)
    for result in best_results:
        if result.advantage is None:
            terminal.show_note(f"{result.attack} declined: {result.reason}")
    direction_rows = [
        (headline.direction.title, headline.short_text, headline.note) for headline in headlines
    ]
    terminal.show_rows("\nWho reads whose what", ("direction", "", ""), direction_rows)
    terminal.show_note(
        "An advantage is over the best baseline with the same knowledge. One near 0, on either "
        "side, proves nothing; the worst of several adversaries is above 0 by chance alone."
    )


def _choose_attacks(names: Sequence[str], options: Sequence[str]) -> "tuple[AttackChoice, ...]":
    """Return the attacks to run, with their options.

    An attack with options of the user runs once, with these. Any other runs with every set of
    options that its class proposes (its suite). Without names and options, all attacks are run.

    `names`: names of attacks, or "all"; a text may hold several, separated by commas. `options`:
    texts ATTACK.KEY=VALUE.

    Raises ConfigError: a name or an option is unknown or malformed.
    """
    from apfed_attacks import ATTACKS
    from apfed_attacks.table import ALL, full_suite, prepare_attack
    from secure_apfed.config import AttackChoice
    from secure_apfed.errors import ConfigError

    stripped_names = [name.strip() for text in names for name in text.split(",")]
    requested_names = [name for name in stripped_names if name]
    if names and not requested_names:
        raise ConfigError("--attacks: no name is given; leave it out for all attacks")
    options_by_attack = _parse_attack_options(options)
    if ALL in requested_names or not (requested_names or options_by_attack):
        requested_names = list(ATTACKS)
    choices: list[AttackChoice] = []
    for name in dict.fromkeys([*requested_names, *options_by_attack]):
        if name in options_by_attack:
            choice = AttackChoice(name=name, options=options_by_attack[name])
            prepare_attack(choice)  # only to refuse wrong options before anything runs
            choices.append(choice)
        else:
            choices += full_suite([name])
    return tuple(choices)


def _parse_attack_options(options: Sequence[str]) -> dict[str, dict[str, object]]:
    """Parse texts ATTACK.KEY=VALUE; return for each attack its options by key.

    Values are read as YAML, so that 4 is a number.

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
            text, source=f"--option {option}"
        )
    return options_by_attack


def run_study(study: "Study[Any]", jobs: int, *, is_quiet: bool) -> "StudyResults":
    """Run the parts of a study that its folder does not hold yet, and return its result.

    Unless `is_quiet`, print a first result as soon as possible, if the study has one. At the end
    print its tables, how to read them, its failed runs, and the path of its page.

    `jobs`: number of runs at a time.
    """
    from apfed_experiments import runner

    if study.measure_first is not None and not is_quiet:
        with progress.show_count(f"{study.title}: first line", quiet=is_quiet) as on_done:
            sentences = study.measure_first(jobs=jobs, on_done=on_done)
        for sentence in sentences:
            terminal.show_note(sentence)
    with progress.show_count(f"{study.title}: {study.unit_name}", quiet=is_quiet) as on_done:
        answer = runner.run_study(study, jobs=jobs, on_done=on_done)
    if is_quiet:
        return answer
    for part in answer.parts:
        table = part.narrow_table or part.table
        terminal.show_rows(table.title, table.header, table.cells)
        for note in part.notes:
            terminal.show_note(note)
        if part.verdict_lines:
            terminal.show_rows(f"\nVerdict on {part.table.title}", ("", ""), part.verdict_lines)
    for note in (study.reading_guide, *runner.describe_failures(answer.failures)):
        if note:
            terminal.show_note(note)
    if answer.page is not None:
        typer.echo(answer.page)
    return answer


def run_own_tradeoff(config: "Config", folder: Path, *, is_quiet: bool) -> "StudyResults | None":
    """Run the trade-off study (accuracy against leakage) that a run's `tradeoff` section asks for.

    `folder`: folder of the study. Returns the study's result; None if there is no such section.
    """
    if not config.tradeoff:
        return None
    from apfed_experiments.tradeoff import declare_study, make_tradeoff

    return run_study(declare_study(make_tradeoff(config), folder), jobs=2, is_quiet=is_quiet)


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

    run_entries = list_runs(folder)
    page = None
    if html is not None:
        from apfed_experiments.report.page import write_runs_page

        page = write_runs_page(run_entries, html, title=f"Runs below {folder}")
    if as_json:
        rows = [run.as_json() for run in run_entries]
        terminal.print_json({"folder": folder, "runs": rows, "page": page})
        return
    if run_entries:
        terminal.show_rows(
            f"Runs below {folder}", HEADER, [run.list_cells() for run in run_entries]
        )
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
    from secure_apfed.runs.active_model import predict_file, predict_into

    if jointly is not None:
        _predict_jointly(model, data, output, jointly, id_column, as_json=as_json)
        return

    networks = _import_networks(encoder, head)
    if output is None:
        predictions = predict_file(model, data, id_columns=id_column, **networks)
        comparison = predictions.compared
        record = predictions.as_json()
    else:
        # Rows are written block by block, since all predictions may not fit into memory.
        predictions = None
        comparison = predict_into(model, data, output, id_columns=id_column, **networks)
        record = {"rows": comparison.rows, **comparison.as_json()}
    if as_json:
        terminal.print_json({**record, "output": output})
        return
    if predictions is None:
        terminal.show_note(f"{comparison.rows} rows written to {output}")
    else:
        _show_predictions(predictions.to_frame())
    for column in comparison.drift:  # each column, compared with the training rows
        if column.notable_differences:
            terminal.show_note(f"column {column.name!r}: {column.notable_differences}")


def _show_predictions(frame: "pd.DataFrame") -> None:
    """Print predictions as a table: numbers with four digits, texts (IDs, classes) as they are."""
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
    """Predict rows together with the passives that run `secure-apfed serve`, and print or write the
    predictions.

    Args:
        model: folder of the run.
        data: file of the rows.
        output: file for the predictions; None: they are printed.
        party: settings file of the active.
        id_columns: value of --id-column, which must be empty: people are looked up by the ID
            columns of the training.
        as_json: print JSON.

    Raises:
        ConfigError: options do not fit together.
        typer.Exit: with code 4 if a party left or refused. All rows are predicted first, the
            remaining ones by the active alone.
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
    blocks = list["pd.DataFrame"]()  # of predictions; empty if they are written to a file
    board = progress.Board(lambda: (status.build_status(),))
    with progress.show_board(board, as_json=as_json):
        counts = predict_jointly(
            party, data, output, status=status, write=None if output else blocks.append
        )
    if as_json:
        rows = [row for block in blocks for row in block.to_dict("records")]
        terminal.print_json({**asdict(counts), "predictions": rows, "output": output})
    else:
        for block in blocks:
            _show_predictions(block)
        note = f"{counts.jointly} rows predicted jointly, {counts.alone} by the active alone"
        if counts.refused:
            note += (
                f" ({counts.refused} of people who were asked about as often as a passive allows)"
            )
        if counts.why:
            note += f", since {counts.why}"
        terminal.show_note(note)
    if counts.is_failure:
        raise typer.Exit(_REFUSED_EXIT_CODE)


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
    from secure_apfed.runs.active_model import load_model
    from secure_apfed.runs.onnx_file import write_onnx

    refuse_replacing_input(onnx, "--onnx", folder)
    write_onnx(load_model(folder, **_import_networks(encoder, head)), onnx)
    if as_json:
        terminal.print_json({"onnx": onnx, "bytes": onnx.stat().st_size})
    else:
        terminal.show_note(f"{onnx} holds the model; see docs/python.md for its inputs and outputs")
