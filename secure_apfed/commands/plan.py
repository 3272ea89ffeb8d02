"""The command `secure-apfed plan`: what a run would take, and what a promise would cost.

Part of the composition root: `secure_apfed.cli` registers it, nothing else imports this.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secure_apfed import terminal
from secure_apfed.commands import AsJson, Overrides

if TYPE_CHECKING:
    from secure_apfed.config import Config
    from secure_apfed.planning import Calibration

__all__ = ["plan"]

_GUARDS = ("gaussian", "frozen_gaussian")
_EPOCHS, _DELTA, _CLIP = 50, 1e-5, 1.0
_NEARLY_ALL = 0.9  # of the training rows: then it is a case where all have a label


def plan(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file of the run, if any.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Calibrate the guard to this epsilon_x.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="The config's, or 50, unless given.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="The config's, or 1e-5, unless given.")
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="Tell what is sent on each link, not their sum.")
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Forecast a run before anything is sent, or calibrate noise to epsilon, or both."""
    if config_file is None:
        if epsilon is None or overrides:
            raise typer.BadParameter("give CONFIG, or --epsilon without --set, or both")
        calibrations = _calibrations(
            epsilon, epochs or _EPOCHS, _DELTA if delta is None else delta, _CLIP
        )
        expected = _expected(epsilon)
        planned: dict[str, Any] = {}
    else:
        config = _config(config_file, overrides or (), epsilon=epsilon, epochs=epochs, delta=delta)
        calibrations, expected, planned = _forecast(config, quiet=as_json, links=links)
        planned["help"] = _help_of(config, planned)
    if as_json:
        noise = [asdict(calibration) for calibration in calibrations]
        terminal.print_json({**planned, "calibration": noise, "expected": expected})
        return
    _show(calibrations, expected)
    for line in planned.get("help", ()):
        typer.echo(f"\nHelp, from the nearest stored case: {line}")


def _config(
    path: Path, overrides: Sequence[str], *, epsilon: float | None, epochs: int | None,
    delta: float | None,
) -> "Config":  # fmt: skip
    """The run of the file with what the options change; a missing guard becomes gaussian."""
    from secure_apfed.config.file import load_config

    config = load_config(path, overrides=overrides)
    more = list(overrides)
    if epochs is not None:
        more.append(f"train.epochs={epochs}")
    if delta is not None:
        more.append(f"delta={delta!r}")
    if epsilon is not None:
        mechanism = config.guard.mechanism
        more += [
            f"guard.mechanism={'gaussian' if mechanism == 'none' else mechanism}",
            "guard.sigma=null",
            f"guard.epsilon={epsilon!r}",
        ]
    return load_config(path, overrides=more) if more else config


def _forecast(
    config: "Config", *, quiet: bool, links: bool
) -> tuple[list["Calibration"], list[str], dict[str, Any]]:
    from secure_apfed.planning import calibrate
    from secure_apfed.planning.forecast import forecast

    planned = forecast(config)
    if not quiet:
        terminal.show_forecast(config.name, planned, links=links)
        for warning in planned.warnings:
            terminal.show_note(f"note: {warning}")
    guard = config.guard
    calibrations = []
    sent = "representations are sent" in config.method.happens
    if guard.epsilon is not None and sent:
        calibrations.append(
            calibrate(
                guard.epsilon, epochs=config.train.epochs, delta=config.delta, clip=guard.clip,
                mechanism=guard.mechanism,
            )
        )  # fmt: skip
    return calibrations, _expected_of(config, planned.epsilon_x, sent=sent), asdict(planned)


def _calibrations(epsilon: float, epochs: int, delta: float, clip: float) -> list["Calibration"]:
    from secure_apfed.planning import calibrate

    return [
        calibrate(epsilon, epochs=epochs, delta=delta, clip=clip, mechanism=mechanism)
        for mechanism in _GUARDS
    ]


def _expected(epsilon: float) -> list[str]:
    """What every stored sweep says of this epsilon_x."""
    from secure_apfed.planning.stored import load_sweeps, nearest, sentence

    found = nearest(load_sweeps(), epsilon=epsilon, guards=_GUARDS)
    return [sentence(sweep, point) for sweep, point in found]


def _expected_of(config: "Config", epsilon_x: float, *, sent: bool) -> list[str]:
    """What stored sweeps of the same data and method say; guard and label mechanism apart."""
    from secure_apfed.planning.stored import load_sweeps, nearest, sentence

    sweeps, found = load_sweeps(), []
    dataset, method = config.data.dataset, config.method.name
    if config.guard.mechanism != "none" and sent:
        found += nearest(
            sweeps, epsilon=config.guard.epsilon or epsilon_x, dataset=dataset, method=method,
            guards=(config.guard.mechanism,),
        )  # fmt: skip
    if config.labels.epsilon is not None:
        found += nearest(
            sweeps, epsilon=config.labels.epsilon, dataset=dataset, method=method,
            labels=config.labels.mechanism,
        )  # fmt: skip
    return [sentence(sweep, point) for sweep, point in found]


def _help_of(config: "Config", planned: Mapping[str, Any]) -> list[str]:
    """What help was worth in the nearest stored case of this method."""
    from secure_apfed.planning.stored import load_gains, nearest_gain

    labelled, rows = planned["labelled_rows"], planned["teaching_rows"]
    every = labelled >= _NEARLY_ALL * rows
    found = nearest_gain(config, load_gains(), labelled=math.inf if every else labelled)
    if found is None:
        return []
    return [f"{found.sentence}. Here {labelled:,} of {rows:,} training rows have a label"]


def _show(calibrations: Sequence["Calibration"], expected: Sequence[str]) -> None:
    columns = ("guard", "releases of a row", "sigma", "sigma / (2C)", "clip C", "mu")
    rows = [
        (each.mechanism, f"{each.releases:,}", f"{each.sigma:.4g}",
         f"{each.noise_multiplier:.4g}", f"{each.clip:g}", f"{each.mu:.4g}")
        for each in calibrations
    ]  # fmt: skip
    if calibrations:
        first = calibrations[0]
        title = f"\nNoise for epsilon_x {first.epsilon:g} at delta {first.delta:g}"
        terminal.show_rows(f"{title}, {first.epochs:,} epochs", columns, rows)
        typer.echo("Covers one row's releases with the encoder held fixed; no label.")
    typer.echo("\nExpected loss of accuracy, from stored sweeps:")
    for loss in expected:
        typer.echo(f"- {loss}")
    if not expected:
        typer.echo("- no stored sweep fits; measure it with secure-apfed study sweep")
