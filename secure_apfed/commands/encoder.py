"""The command `secure-apfed check-encoder`: is the active's encoder worth training others for?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secure_apfed import terminal
from secure_apfed.commands import AsJson, Overrides

if TYPE_CHECKING:
    from secure_apfed.learning.autoencoder import EncoderQuality

__all__ = ["check_encoder"]


def check_encoder(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Loss of accuracy that is not worth mending.")
    ] = 0.02,
    folds: Annotated[int, typer.Option(min=2, help="Of the cross-validation.")] = 10,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare a classifier on the active's columns with one on its encoder's code of them.

    The encoder is the run's `model`, trained without labels on the active's training rows as
    `method` says of autoencoders (APC-VFL, Appendix F); nobody else takes part.
    """
    import torch

    from secure_apfed.config.file import load_config
    from secure_apfed.data import UNLABELLED, load_data
    from secure_apfed.errors import ConfigError
    from secure_apfed.learning.autoencoder import DistillationSettings, encoder_quality
    from secure_apfed.learning.descent import Compute

    config = load_config(config_file, overrides=overrides or ())
    if config.labels_are_private:
        raise ConfigError(
            "check-encoder fits classifiers to the true training labels, which labels and dp_sgd "
            "keep private; leave both out here, and show its figures to nobody who may not know "
            "these labels"
        )
    data = load_data(config.data, seed=config.seed)
    assert data.active.labels is not None
    labels_N = torch.full_like(data.active.labels, UNLABELLED)
    labels_N[data.labelled_rows] = data.active.labels[data.labelled_rows]
    found = encoder_quality(
        data.active.features[data.train_rows], labels_N[data.train_rows], model=config.model,
        settings=DistillationSettings.among(config.method), owner=data.active.name,
        seed=config.seed,
        compute=Compute.of(config.train), threshold=threshold, folds=folds,
    )  # fmt: skip
    if as_json:
        terminal.print_json({
            "columns": found.columns.tolist(), "code": found.codes.tolist(),
            "difference": found.difference, "threshold": threshold, "epochs": found.epochs,
            "good_enough": found.good_enough,
        })  # fmt: skip
        return
    _show(found, title=f"Encoder of {data.active.name} ({config.model.network})")


def _show(found: "EncoderQuality", *, title: str) -> None:
    borne = f"{100 * found.threshold:g} fewer are borne"
    rows = [
        (f"columns, {len(found.columns)} folds", f"{100 * found.columns.mean():.2f} %"),
        ("their code", f"{100 * found.codes.mean():.2f} %"),
        ("difference", f"{100 * found.difference:+.2f} points; {borne}"),
        ("epochs of the autoencoder", str(found.epochs)),
        ("the encoder is", "good enough" if found.good_enough else "not good enough"),
    ]
    terminal.show_rows(title, ("", "accuracy"), rows)
