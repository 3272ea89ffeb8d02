"""The model that the active keeps: predicts from its own features with no other party present.

Two files: parameters as safetensors, and a JSON card that says what they are, how
features are encoded, and what the run promised about privacy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from secure_apfed.data import FeatureEncoding, TargetScale
from secure_apfed.data.inputs import Extremes
from secure_apfed.errors import DataError, ModelError
from secure_apfed.files import read_bytes, read_json
from secure_apfed.measures import ScoreRanges
from secure_apfed.models import encoder_and_head
from secure_apfed.runs.folder import RunFolder
from secure_apfed.seeds import undisturbed
from secure_apfed.settings.training import ModelSettings
from secure_apfed.tasks import TASKS, Classification, Task

__all__ = ["SoloModel", "load_model"]


class _Parts(BaseModel):
    """What a card says of the network; the rest of it is for people."""

    encoding: FeatureEncoding
    model: ModelSettings
    task: str = Classification.name
    classes: tuple[str, ...]
    targets: TargetScale | None = None
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    scores_in_training: ScoreRanges | None = None
    columns_in_training: dict[str, Extremes] = Field({})


@dataclass(frozen=True)
class SoloModel:
    """Encoder and head, ready to predict.

    Attributes:
        classes: names in the order of the outputs; empty of a regression.
        encoding: turns the active's raw features into the encoder's input.
        card: everything that is known about the model, JSON-able.
        threshold: of two classes, the probability of the second from which on it is decided for;
            None: the likeliest class is.
        ranges: how its scores of labelled training rows were spread; None: nobody kept it.
        task: what it learnt, and what it therefore tells.
        extremes: by column of numbers, between which the training rows lay; none: nobody kept it.
    """

    network: nn.Module = field(repr=False)
    classes: tuple[str, ...]
    encoding: FeatureEncoding = field(repr=False)
    card: dict[str, Any] = field(repr=False)
    threshold: float | None = None
    ranges: ScoreRanges | None = field(default=None, repr=False)
    task: Task = field(default_factory=Classification)
    extremes: Mapping[str, Extremes] = field(default_factory=dict, repr=False)

    def decide(self, probabilities_NK: Tensor) -> Tensor:
        """The places (N,) in `classes` that these probabilities decide for."""
        if self.threshold is None:
            return probabilities_NK.argmax(1)
        return (probabilities_NK[:, 1] >= self.threshold).long()

    @undisturbed()
    @torch.no_grad()
    def predict(self, features: Tensor) -> Tensor:
        """What the task tells of encoded features (N, *shape), such as probabilities (N, K).

        Raises:
            ModelError: rows of another shape.
        """
        if tuple(features.shape[1:]) != self.encoding.shape:
            raise ModelError(
                f"this model reads rows of shape {self.encoding.shape}, "
                f"got {tuple(features.shape[1:])}"
            )
        dtype = next(self.network.parameters()).dtype
        scores_NK: Tensor = self.network(features.to(dtype))
        return self.task.told(scores_NK, features)


@undisturbed()
def load_model(path: Path) -> SoloModel:
    """Load the model of a finished run folder.

    Raises:
        CheckpointError: no finished run there, or its files were altered since.
        ModelError: the method has no model of its own, or the files do not fit together.
    """
    folder = RunFolder(path)
    folder.check(folder.config, folder.card, folder.model)
    card = read_json(folder.card, dict[str, Any])
    if not card.get("predicts_alone"):
        raise ModelError(
            f"{path} holds a run of {card.get('method')}, whose model needs every party to "
            "predict; docs/which-method.md says which predict alone"
        )
    parts = read_json(folder.card, _Parts)
    if not folder.model.exists():
        raise ModelError(f"{folder.model} is missing; the run did not finish")
    stored, task = read_bytes(folder.model), _task(parts, folder.card)
    outputs = task.outputs(len(parts.classes), parts.encoding.shape)
    try:
        network = _network(parts, load(stored), outputs)
    except (ModelError, OverflowError, RuntimeError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"{folder.model} and {folder.card.name} do not make a model: {error}"
        ) from error
    if parts.threshold is not None and len(parts.classes) != 2:
        raise ModelError(
            f"{folder.card} has a threshold between {len(parts.classes)} classes; it decides "
            "between two: restore the file from a copy"
        )
    return SoloModel(
        network, parts.classes, parts.encoding, card, parts.threshold, parts.scores_in_training,
        task, parts.columns_in_training,
    )  # fmt: skip


def _task(parts: _Parts, card: Path) -> Task:
    """What the card says that the model learnt.

    Raises:
        ModelError: no task of ours, or one that the rest of the card does not fit.
    """
    if parts.task not in TASKS or (parts.targets is None) is not bool(parts.classes):
        raise ModelError(
            f"{card} tells of task {parts.task!r:.40}, {len(parts.classes)} classes and "
            f"{'no' if parts.targets is None else 'a'} scale of targets, which is no model of this "
            f"version; tasks are {', '.join(TASKS)}: restore the file from a copy"
        )
    try:
        return TASKS[parts.task].of(parts.targets)
    except DataError as error:
        raise ModelError(f"{card}: {error}") from error


def _network(parts: _Parts, tensors: Mapping[str, Tensor], outputs: int) -> nn.Module:
    """Encoder and head; takes no more memory than the tensors, whatever the card asks for."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if dtypes not in ({torch.float32}, {torch.float64}):
        raise ModelError(
            f"parameters are all float32 or all float64, got {sorted(map(str, dtypes))}"
        )
    with torch.device("meta"):
        encoder, head = encoder_and_head(parts.model, parts.encoding.shape, outputs)
    nn.ModuleDict({"encoder": encoder, "head": head}).load_state_dict(tensors, assign=True)
    return nn.Sequential(encoder, head).eval()
