"""Settings of a party's networks."""

from typing import Annotated, Literal

from pydantic import Field

from secure_apfed.settings import Settings

__all__ = ["ModelSettings"]


Width = Annotated[int, Field(ge=1, le=65536)]


class ModelSettings(Settings):
    """Which family of networks a party uses, and its sizes.

    Attributes:
        network: a key of `NETWORKS`, or "auto": the paper's convolutions for images that
            of at least 7 (grey) or 8 (colour) rows and columns, an MLP for everything else.
        hidden: widths of the hidden layers (mlp, selu and enriched only).
        representation: numbers of the encoder's output (mlp, selu and linear), of the part of it
            that is not the row itself (enriched), or of one direction of one view (gru).
        projection: numbers of the linear projection that is sent to the passives; "none"
            sends the encoder's output as it is; "auto" is 64, except for a plain
            (unprotected) APFed-R, which sends the whole output as the authors' release does.
        sequences: [steps, channels] of each view (gru only); a view has 1 + steps * channels
            columns, of which the first says how many steps are in use.
        random_features: beside the row itself (random_features only).
        dropout: of the head, between its two layers (release: 0.5).
        head: widths of its hidden layers (selu only); none: one linear layer.
    """

    network: Literal[
        "auto",
        "conv_mnist",
        "conv_cifar",
        "mlp",
        "selu",
        "enriched",
        "linear",
        "random_features",
        "identity",
        "gru",
    ] = "auto"
    hidden: Annotated[tuple[Width, ...], Field(max_length=64)] = (64,)
    representation: Width = 32
    projection: Width | Literal["auto", "none"] = "auto"
    sequences: Annotated[tuple[tuple[Width, Width], ...], Field(max_length=64)] = ()
    random_features: Width = 300
    dropout: float = Field(0.5, ge=0, lt=1)
    head: Annotated[tuple[Width, ...], Field(max_length=64)] = ()
