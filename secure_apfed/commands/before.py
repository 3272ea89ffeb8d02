"""The commands before a run, `plan` and `data check-encoder`; nothing is sent.

Part of the composition root: `secure_apfed.cli` registers them, nothing else imports this.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from secure_apfed.commands import AsJson, ConfigFile, Overrides
from secure_apfed.console import terminal

if TYPE_CHECKING:
    from secure_apfed.config import Config
    from secure_apfed.learning.autoencoder import EncoderQuality
    from secure_apfed.settings.data import TableShape

# For noise without a run's file.
_GUARD_MECHANISMS = ("gaussian", "frozen_gaussian")
_DEFAULT_EPOCHS = 50
_DEFAULT_DELTA = 1e-5
_DEFAULT_CLIP = 1.0


def plan(
    config_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", help="YAML file of the run; not needed to calibrate noise."
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Find the noise whose releases cost this epsilon_x (privacy of the active's rows)."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of epochs; default: of CONFIG, else 50.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="delta of the guarantee; default: of CONFIG, else 1e-5.")
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="Show the traffic of each link instead of the total.")
    ] = False,
    party_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="PARTY.yaml",
            help="Instead of CONFIG: plan from this party's table and what the others declared.",
        ),
    ] = None,
    rehearsal_epsilon: Annotated[
        float | None,
        typer.Option(
            "--with-peers",
            metavar="EPSILON",
            help="Rehearse votes with the real passives: each reveals one number at this epsilon.",
        ),
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Also forecast how long local models take, by training them on two samples.",
        ),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Forecast time, traffic and privacy cost of a run, or find the noise for an epsilon."""
    forecast_fields: dict[str, Any] = {}
    shape_by_party = None  # all tables lie here and are read
    if party_file is not None and config_file is not None:
        raise typer.BadParameter("give CONFIG, or --config, not both")
    if baselines and (party_file is not None or config_file is None):
        raise typer.BadParameter("--baselines takes CONFIG, whose tables all lie here")
    if party_file is not None:
        shape_by_party, config_file = _load_table_shapes(party_file)
    if config_file is None:
        if epsilon is None or overrides or rehearsal_epsilon is not None:
            raise typer.BadParameter("give CONFIG, or --epsilon without --set, or both")
        calibrations = [
            _calibrate_noise(
                mechanism,
                epsilon,
                delta=_DEFAULT_DELTA if delta is None else delta,
                epochs=epochs or _DEFAULT_EPOCHS,
                clip=_DEFAULT_CLIP,
            )
            for mechanism in _GUARD_MECHANISMS
        ]
    else:
        config = _load_changed_config(
            config_file, overrides or (), epsilon=epsilon, epochs=epochs, delta=delta
        )
        forecast_fields = _forecast_run(
            config,
            shape_by_party,
            is_quiet=as_json,
            shows_links=links,
            includes_baselines=baselines,
        )
        if rehearsal_epsilon is not None:
            rehearsal = _rehearse_votes(config, rehearsal_epsilon, is_quiet=as_json)
            forecast_fields["rehearsal"] = rehearsal
        guard = config.guard
        calibrations = []
        # Only representations get the guard's noise.
        if guard.epsilon is not None and "representations are sent" in config.method.exchange_facts:
            calibrations.append(
                _calibrate_noise(
                    guard.mechanism,
                    guard.epsilon,
                    delta=config.delta,
                    epochs=config.train.epochs,
                    clip=guard.clip,
                )
            )
    if as_json:
        terminal.print_json({**forecast_fields, "calibration": calibrations})
        return
    if calibrations:
        _show_noise(calibrations)


def _load_changed_config(
    path: Path,
    overrides: Sequence[str],
    *,
    epsilon: float | None,
    epochs: int | None,
    delta: float | None,
) -> "Config":
    """Return the settings of the run in a file, changed as the command's options say.

    Args:
        path: path of the run's file.
        overrides: changed settings, such as train.epochs=3.
        epsilon: new epsilon of the guard (the mechanism that clips and perturbs representations),
            which becomes gaussian if the file has none; None: unchanged.
        epochs: new number of epochs; None: unchanged.
        delta: new delta of every (epsilon, delta); None: unchanged.
    """
    from secure_apfed.config.file import load_config

    config = load_config(path, overrides=overrides, own=True)
    changes = list(overrides)
    if epochs is not None:
        changes.append(f"train.epochs={epochs}")
    if delta is not None:
        changes.append(f"delta={delta!r}")
    if epsilon is not None:
        mechanism = config.guard.mechanism
        changes += [
            f"guard.mechanism={'gaussian' if mechanism == 'none' else mechanism}",
            "guard.sigma=null",  # a guard has sigma or epsilon, not both
            f"guard.epsilon={epsilon!r}",
        ]
    return load_config(path, overrides=changes, own=True) if changes else config


def _load_table_shapes(path: Path) -> tuple[Mapping[str, "TableShape"], Path]:
    """Return the shapes (numbers of rows and columns) of all parties' tables, the active's first,
    and the path of the run's file.

    This party's own table is read; the others' shapes are those that they declared in the sealed
    project. A party that declared none is assumed to have a table like this one, and a note says
    so. Another note names each organisation that runs several parties.

    `path`: path of a party's file.
    """
    from secure_apfed.config.file import load_config
    from secure_apfed.organisations.party import (
        PartyFile,
        describe_table,
        determine_role,
        load_party_data,
    )
    from secure_apfed.runs.folder import SEALED_PROJECT
    from secure_apfed.settings.data import TableShape

    file = PartyFile.from_file(path)
    config = load_config(file.config)
    sealed_path = file.folder / SEALED_PROJECT
    data = load_party_data(file, config, determine_role(file, config))
    own_shape = TableShape() if data is None else describe_table(data, shows_column_names=False)
    known_shape_by_party = _load_declared_shapes(sealed_path) if sealed_path.exists() else {}
    known_shape_by_party[file.party] = own_shape
    names = (file.active, *file.passives)
    if undeclared := [name for name in names if name not in known_shape_by_party]:
        terminal.show_note(
            f"note: {', '.join(undeclared)} declared no table: planned as {own_shape.rows:,} rows "
            f"of {own_shape.features} features"
        )
    return {name: known_shape_by_party.get(name, own_shape) for name in names}, file.config


def _load_declared_shapes(path: Path) -> dict[str, "TableShape"]:
    """Return the shapes of the tables that parties declared in a sealed project, by party.

    A note is shown for each organisation that runs several parties.

    `path`: path of the sealed project.
    """
    from secure_apfed.organisations.project import SealedProject, SignedFile

    project = SignedFile.from_file(path).open_document(SealedProject, path)
    for organisation, conflict in project.proposal_document.conflicts:
        terminal.show_note(
            f"note: {organisation} runs {' and '.join(conflict.party_names)}, which was "
            f"allowed by name: together they {conflict.gained_ability}"
        )
    return {
        name: answer.table
        for name, answer in project.answer_documents.items()
        if answer.table is not None
    }


def _forecast_run(
    config: "Config",
    shape_by_party: "Mapping[str, TableShape] | None",
    *,
    is_quiet: bool,
    shows_links: bool,
    includes_baselines: bool,
) -> dict[str, Any]:
    """Forecast time, traffic and privacy costs of a run; print the forecast unless `is_quiet`.

    Args:
        config: settings of the run.
        shape_by_party: shapes (numbers of rows and columns) of all parties' tables; None: all
            tables are here and are read.
        is_quiet: print nothing.
        shows_links: show the traffic of each link instead of the total.
        includes_baselines: also forecast the time of local models, by training them on two samples.

    Returns:
        The forecast as plain values, with the settings that protect less than by default under
        "departures".
    """
    from secure_apfed.planning.forecast import forecast
    from secure_apfed.settings.protection import find_weakened_settings

    if includes_baselines:
        from apfed_experiments.baselines import estimate_baseline_seconds

        run_forecast = forecast(
            config, shape_by_party, time_baselines=partial(estimate_baseline_seconds, config)
        )
    else:
        run_forecast = forecast(config, shape_by_party)
    departures = find_weakened_settings(config)
    if not is_quiet:
        terminal.show_forecast(config.name, run_forecast, links=shows_links)
        terminal.show_departures(departures)
        for warning in run_forecast.warnings:
            terminal.show_note(f"note: {warning}")
    return {
        **asdict(run_forecast),
        "promises": [promise.as_json() for promise in run_forecast.promises],
        "departures": [asdict(departure) for departure in departures],
    }


def _rehearse_votes(config: "Config", epsilon: float, *, is_quiet: bool) -> dict[str, Any]:
    """Estimate how often each passive's votes (labels that it assigns to rows) would be right.

    A run of the method votes_rehearsal is simulated: each passive reveals, with noise, on how many
    labelled rows its vote equals the label. The vote on a row is fitted without the row's label.
    All tables are read here; parties that have only their own table run votes_rehearsal together
    instead.

    Args:
        config: settings of the run with votes.
        epsilon: privacy cost of the one number that each passive reveals.
        is_quiet: print nothing.

    Returns:
        For each party the share of labelled rows on which its votes are right, and the standard
        deviation of that share's noise, as plain values.

    Raises ConfigError: the run's method has no votes, or the epsilon is out of range.
    """
    from secure_apfed.runs.folder import RunFolder
    from secure_apfed.runs.outcome import load_outcome
    from secure_apfed.runs.run import run

    rehearsal_config = _configure_rehearsal(config, epsilon)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rehearsal"
        run(rehearsal_config, path)
        agreement_by_party = load_outcome(RunFolder(path)).agreement
    if not is_quiet:
        rows = [
            (party, f"{agreement.labels:.2f}", f"{agreement.labels_noise:.2f}")
            for party, agreement in agreement_by_party.items()
        ]
        title = f"\nVotes on labelled rows, one number of epsilon {epsilon:g} a passive"
        terminal.show_rows(title, ("party", "share that is right", "deviation of its noise"), rows)
    return {party: asdict(agreement) for party, agreement in agreement_by_party.items()}


def _configure_rehearsal(config: "Config", epsilon: float) -> "Config":
    """Return the settings of a run in which passives reveal only how many of their votes are right.

    `config`: settings of the run with votes. `epsilon`: privacy cost of each passive's number.

    Raises ConfigError: the run's method has no votes, or the epsilon is out of range.
    """
    from secure_apfed.errors import ConfigError
    from secure_apfed.methods import METHODS
    from secure_apfed.methods.votes import VoteSettings

    if not isinstance(config.method, VoteSettings):
        raise ConfigError(f"--with-peers: nobody votes in method {config.method.name}")
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"--with-peers: an epsilon is above 0 and finite, got {epsilon:g}")
    rehearsal_method = next(
        name for name, method in METHODS.items() if method.settings.vote_protocol == "count"
    )
    vote_settings = config.method.model_dump(include=set(VoteSettings.model_fields) - {"name"})
    changes = {
        "method": {**vote_settings, "name": rehearsal_method, "epsilon": epsilon},
        "attacks": [],
        # Each number has noise of its own, and no secure sum is used.
        "colluders": 0,
        "secure_sum": {**config.secure_sum.model_dump(), "noise": None},
    }
    return type(config).model_validate({**config.model_dump(), **changes})


def _calibrate_noise(
    mechanism: str, epsilon: float, *, delta: float, epochs: int, clip: float
) -> dict[str, Any]:
    """Return the noise with which all releases of one row are (epsilon, delta)-DP, as plain values.

    A row's representation is released once in every epoch, or once in all for `frozen_gaussian`.
    Adjacency is replace-one. There is no amplification by subsampling, since passives know who is
    in a batch.

    Args:
        mechanism: mechanism of the guard, which clips representations and adds noise.
        epsilon, delta: the guarantee.
        epochs: number of training epochs.
        clip: C, the L2 bound of a representation.

    Returns:
        The arguments, and releases: how often a row is released; sigma: the standard deviation of
        the noise on each number; noise_multiplier: sigma / (2C), where 2C is the sensitivity; mu:
        the mu of Gaussian differential privacy that equals (epsilon, delta).
    """
    from secure_apfed.privacy.accountants import calibrate_sigma, gdp_mu

    releases = min(epochs, 1) if mechanism == "frozen_gaussian" else epochs
    sigma = calibrate_sigma(epsilon, delta, releases, clip)
    return {
        "mechanism": mechanism,
        "epsilon": epsilon,
        "delta": delta,
        "epochs": epochs,
        "releases": releases,
        "clip": clip,
        "sigma": sigma,
        "noise_multiplier": sigma / (2 * clip),
        "mu": gdp_mu(epsilon, delta),
    }


def _show_noise(calibrations: Sequence[Mapping[str, Any]]) -> None:
    """Print calibrated noise as a table.

    `calibrations`: the rows, as `_calibrate_noise` returns them; all for one epsilon and delta.
    """
    columns = ("guard", "releases of a row", "sigma", "sigma / (2C)", "clip C", "mu")
    rows = [
        (
            str(calibration["mechanism"]),
            f"{calibration['releases']:,}",
            f"{calibration['sigma']:.4g}",
            f"{calibration['noise_multiplier']:.4g}",
            f"{calibration['clip']:g}",
            f"{calibration['mu']:.4g}",
        )
        for calibration in calibrations
    ]
    title = "\nNoise for epsilon_x {epsilon:g} at delta {delta:g}, {epochs:,} epochs"
    terminal.show_rows(title.format(**calibrations[0]), columns, rows)
    typer.echo("Covers one row's releases with the encoder held fixed; no label.")


def check_encoder(
    config_file: ConfigFile,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Loss of accuracy that you accept.")
    ] = 0.02,
    folds: Annotated[
        int, typer.Option(min=2, help="Number of folds of the cross-validation.")
    ] = 10,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Test an encoder: compare a classifier on the columns with one on the encoder's output.

    The encoder is the run's `model`, trained without labels on the active's training rows as
    `method` says of autoencoders (APC-VFL, Appendix F); nobody else takes part.
    """
    import torch

    from secure_apfed.config.file import load_config
    from secure_apfed.data import UNLABELLED, load_data
    from secure_apfed.errors import ConfigError
    from secure_apfed.learning.autoencoder import DistillationSettings, measure_encoder_quality
    from secure_apfed.learning.descent import Compute

    config = load_config(config_file, overrides=overrides or (), own=True)
    if config.are_labels_private:
        raise ConfigError(
            "data check-encoder fits classifiers to the true training labels, which labels and "
            "dp_sgd keep private; leave both out here, and show its figures to nobody who may not "
            "know these labels"
        )
    data = load_data(config.data, seed=config.seed)
    assert data.active.labels is not None
    # Labels of other rows are hidden, as from training. N rows of the active.
    labels_N = torch.full_like(data.active.labels, UNLABELLED)
    labels_N[data.labelled_rows] = data.active.labels[data.labelled_rows]
    quality = measure_encoder_quality(
        data.active.features[data.train_rows],
        labels_N[data.train_rows],
        model=config.model,
        settings=DistillationSettings.from_settings(config.method),
        owner=data.active.name,
        seed=config.seed,
        compute=Compute.from_settings(config.train),
        threshold=threshold,
        folds=folds,
    )
    if as_json:
        terminal.print_json(
            {
                "columns": quality.column_scores.tolist(),
                "code": quality.code_scores.tolist(),
                "difference": quality.score_difference,
                "threshold": threshold,
                "epochs": quality.epoch_count,
                "good_enough": quality.is_good_enough,
            }
        )
        return
    _show_quality(quality, title=f"Encoder of {data.active.name} ({config.model.network})")


def _show_quality(quality: "EncoderQuality", *, title: str) -> None:
    """Print a classifier's accuracy on the encoder's output (its code), and on the raw columns.

    `title`: title of the table.
    """
    threshold_text = f"{100 * quality.threshold:g} fewer are borne"
    rows = [
        (
            f"columns, {len(quality.column_scores)} folds",
            f"{100 * quality.column_scores.mean():.2f} %",
        ),
        ("their code", f"{100 * quality.code_scores.mean():.2f} %"),
        ("difference", f"{100 * quality.score_difference:+.2f} points; {threshold_text}"),
        ("epochs of the autoencoder", str(quality.epoch_count)),
        ("the encoder is", "good enough" if quality.is_good_enough else "not good enough"),
    ]
    terminal.show_rows(title, ("", "accuracy"), rows)
