"""What follows a finished run on the command line: baselines, attacks, report, and the result.

Part of the composition root, for `run` and for `party` at the active.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_apfed import terminal
from secure_apfed.commands import leakage

if TYPE_CHECKING:
    from apfed_attacks.interface import AttackResult
    from apfed_experiments.solo import SoloRecord
    from secure_apfed.config import Config
    from secure_apfed.runs.outcome import RunResult

__all__ = ["alone", "tell"]


def tell(config: "Config", result: "RunResult", *, baselines: bool, quiet: bool) -> None:
    """Measure and write what belongs beside a finished run, and print all of it."""
    solo = alone(config, result, quiet=quiet) if baselines else None
    results, page = _finish(config, result, quiet=quiet)
    if not quiet:
        _show_result(config, result, results, solo, page)
    assert result.folder is not None
    board = leakage.study_of_run(config, result.folder / "tradeoff", quiet=quiet)
    if quiet:
        points = None if board is None else board.as_json()
        terminal.print_json({**_as_json(result, results, solo, page), "tradeoff": points})


def alone(config: "Config", result: "RunResult", *, quiet: bool) -> "SoloRecord | None":
    """What the active would do without anybody, from the same rows and labels."""
    from apfed_experiments.solo import LEFT_OUT, beside_run

    assert result.folder is not None
    if not quiet and config.dp_sgd is not None:
        terminal.show_note(LEFT_OUT)
    elif not quiet and result.trained is not None:
        terminal.show_note("measuring what the active would do alone")
    return beside_run(config, result.folder, result.trained)


def _finish(
    config: "Config", result: "RunResult", *, quiet: bool
) -> "tuple[tuple[AttackResult, ...], Path | None]":
    """Mount the attacks and write the report; pictures need an extra, which may be absent."""
    from apfed_experiments.finish import mount_attacks

    folder = result.folder
    assert folder is not None
    if result.recorded is None:
        if config.attacks and not quiet:
            terminal.show_note(
                "no attacks are mounted: each party ran in a process of its own, and nobody holds "
                "what all of them sent; run it with --transport memory to measure leakage"
            )
        return (), leakage.report_if_possible(folder)
    if config.attacks and not quiet:
        names = ", ".join(dict.fromkeys(choice.name for choice in config.attacks))
        terminal.show_note(f"mounting attacks: {names}")
    return mount_attacks(folder), leakage.report_if_possible(folder)


def _as_json(
    result: "RunResult", results: "Sequence[AttackResult]", solo: "SoloRecord | None",
    page: Path | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "method": result.method, "accuracy": dict(result.accuracy),
        "measure": result.measure, "measures": {
            name: dict(values) for name, values in result.measures.items()
        }, "threshold": result.threshold, "undefined": result.undefined,
        "wire_bytes": result.wire_bytes, "privacy": asdict(result.privacy),
        "attacks": [attack.as_json() for attack in results],
        "contributions": {name: dict(one) for name, one in result.contributions.items()},
        "solo": None if solo is None else solo.model_dump(mode="json"),
        "folder": result.folder, "report": page,
    }  # fmt: skip


def _reached(result: "RunResult") -> list[tuple[str, str]]:
    from secure_apfed.measures import ACCURACY, MEASURES
    from secure_apfed.runs.outcome import measure_text

    measure = MEASURES[result.measure]
    rows = [
        (f"accuracy, {name}", f"{100 * value:.2f} %")
        for name, value in result.accuracy.items() if not math.isnan(value)
    ]  # fmt: skip
    told = [
        (f"{measure.title}, {name}", measure_text(measure, name, value, result.undefined))
        for name, value in result.scores.items() if measure is not ACCURACY or math.isnan(value)
    ]  # fmt: skip
    rows = [*told, *rows]
    if result.threshold is not None:
        rows.append(("threshold of the second class", f"{result.threshold:.3f}"))
    return rows


def _show_result(
    config: "Config", result: "RunResult", results: "Sequence[AttackResult]",
    solo: "SoloRecord | None", page: Path | None,
) -> None:  # fmt: skip
    from apfed_attacks.run import headlines
    from secure_apfed.privacy_rows import cross_check_rows, epsilon_text, figure_title, privacy_rows
    from secure_apfed.runs.spending import figure_of

    rows = _reached(result)
    if solo is not None:
        alone = solo.best
        rows += [
            (f"best alone, {alone.title}", solo.judged_by.text(alone.test)),
            ("help", solo.sentence(next(iter(result.scores.values())))),
        ]
    rows.append(("sent", f"{result.wire_bytes / 1e6:.1f} MB"))
    figure = figure_of(config)
    rows += privacy_rows(result.privacy, figure=figure, counted=bool(result.contributions))
    rows += cross_check_rows(result.privacy) if figure == "epsilon_x" else []
    rows += [
        (figure_title(one["figure"], of=name),
         epsilon_text(one["epsilon"], delta=one["delta"], releases=one["releases"]))
        for name, one in result.contributions.items()
    ]  # fmt: skip
    rows += [
        (f"attack {worst.attack}", "not applicable" if worst.advantage is None
         else f"advantage {worst.advantage:+.3f} in {worst.metric} by {worst.adversary}")
        for worst in headlines(results)
    ]  # fmt: skip
    rows.append(("run folder", str(result.folder)))
    if page is not None:
        rows.append(("report", str(page)))
    terminal.show_rows("Result", ("", ""), rows)
