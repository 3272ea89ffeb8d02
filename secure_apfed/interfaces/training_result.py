"""The result of `train`: the trained network, its measures, and a text report.

Letters: N rows, B batch, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_apfed.errors import ModelError
from secure_apfed.interfaces.parties import Active
from secure_apfed.learning.black_box import describe_black_boxes
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.measures.table import MEASURES
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.solo import SoloModel
from secure_apfed.settings.promises import list_epsilons
from secure_apfed.settings.training import TrainSettings
from secure_apfed.solo.fitted import STUDENT_HEAD, FittedModel

if TYPE_CHECKING:
    from apfed_attacks.interface import AttackResult


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of `train`: trained networks, measures and comparisons.

    Attributes:
        networks: rows -> class scores (B, K), the active's own modules; None: every party is needed
            to predict.
        classes: the labels in the order of the scores.
        run: measures, bytes, privacy costs and guarantees, as `secure_apfed.run` returns them.
        alone: the headline measure of the active's own network, trained alone in the same way, on
            the same test rows; None: not measured.
        best_local, best_local_name: that of the best local model by validation; None: not tried.
        not_tried: the local models that were not tried, with the reason.
        attacks: results of the requested attacks.
        test_rows: positions of the active's test rows among those handed in, int64.
        common: how many people all parties know; None: nobody was asked to help.
        own_people: how many people the active has.
        black_boxes: the passives with a black-box gradient.
        model_is: what `model` is, in words: the active's own modules or, where validation chose it,
            local models or an average with them.

    Examples:
        >>> import torch
        >>> from secure_apfed import Active, train
        >>> rows = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
        >>> active = Active("clinic", range(80), rows, (rows[:, 0] > 0).long())
        >>> result = train(active, method="single_view", epochs=1, baselines=False)
        >>> result.run.measure, len(result.test_rows), result.model(rows).shape
        ('accuracy', 20, torch.Size([80, 2]))
    """

    networks: nn.Sequential | None = field(repr=False)
    classes: tuple[Any, ...]
    run: RunResult = field(repr=False)
    alone: float | None = None
    best_local: float | None = None
    best_local_name: str = ""
    not_tried: str = ""
    attacks: "tuple[AttackResult, ...]" = field(default=(), repr=False)
    test_rows: Tensor = field(repr=False)
    black_boxes: tuple[str, ...] = ()
    model_is: str = ""
    common: int | None = None
    own_people: int = 0
    _solo: SoloModel | None = field(default=None, repr=False)

    @property
    def model(self) -> nn.Sequential:
        """The network that was measured, rows -> class scores (B, K).

        Its two parts are the active's own modules, unless `model_is` says otherwise: where a
        student learns from votes (passives' class scores), validation may choose a local model, or
        an average with copies of the modules.

        Raises ModelError: every party is needed to predict.
        """
        if self.networks is None:
            raise ModelError(
                f"method {self.run.method} needs every party to predict, so the active keeps no "
                "model of its own; train with apfed, apfed_r or apfed_c"
            )
        return self.networks

    def predict_proba(self, rows: Any) -> NDArray[np.float64]:
        """Return probabilities (N, K) in the order of `classes`.

        `rows`: a frame of the same columns, an array, a tensor or a list, as handed to `train`.

        Raises:
            DataError, ModelError: they have other columns or another shape, or every party is
                needed to predict.
        """
        probabilities: NDArray[np.float64] = self._get_solo().predict(rows).double().cpu().numpy()
        return probabilities

    def predict(self, rows: Any) -> NDArray[Any]:
        """Return the class of each row, (N,), as the labels handed to `train` write it.

        `rows`: a frame of the same columns, an array, a tensor or a list, as handed to `train`.
        Raises DataError, ModelError: the errors of `predict_proba`.
        """
        solo = self._get_solo()
        places_N = solo.decide_classes(solo.predict(rows)).cpu().numpy()
        labels: NDArray[Any] = np.array(self.classes)[places_N]
        return labels

    def _get_solo(self) -> SoloModel:
        assert self.model is not None  # raises an error where there is none
        assert self._solo is not None
        return self._solo

    @property
    def score(self) -> float:
        """The headline measure on the test rows."""
        return next(iter(self.run.measures.values()))[self.run.measure]

    @property
    def gain(self) -> float | None:
        """The gain over the better of the trained local models; None: no local model was trained.

        One run proves no gain: only several seeds do.
        """
        tried = [value for value in (self.alone, self.best_local) if value is not None]
        if not tried:
            return None
        measure = MEASURES[self.run.measure]
        return min(measure.compute_gain(self.score, value) for value in tried)

    @property
    def epsilon(self) -> dict[str, float]:
        """The epsilon of what was sent, by what it protects; infinite: no guarantee."""
        return list_epsilons(self.run.promises)

    @property
    def report(self) -> str:
        """The lines of a text report: what was measured, its privacy cost, what was not tried."""
        lines = [f"{self.run.measure}: {self.score:.3f} on {len(self.test_rows)} test rows"]
        lines.append(self._describe_helpers())
        if self.alone is not None:
            lines.append(f"the active's own network alone: {self.alone:.3f}")
        if self.best_local is not None:
            lines.append(f"best local model ({self.best_local_name}): {self.best_local:.3f}")
        if self.gain is not None:
            lines.append(f"gain over the better of them: {self.gain:+.3f} (one run shows no gain)")
        if self.not_tried:
            lines.append(f"not tried: {self.not_tried}")
        if self.networks is not None:
            lines.append(f"the model is {self.model_is}")
        if used := self.run.local_models.get("used"):
            lines.append(_describe_local_models(used, self.run.recording.config.train))
        lines += [
            f"{promise.format_title()}: epsilon {promise.text}"
            if promise.state == "bounded"
            else f"{promise.format_title()}: no guarantee"
            for promise in self.run.promises
            if promise.epsilon is not None
        ]
        lines += describe_black_boxes(self.black_boxes)
        lines += self._describe_attacks()
        lines.append(f"bytes sent: {self.run.wire_bytes:,}")
        return "\n".join(lines)

    def _describe_helpers(self) -> str:
        """Return how many people all parties have in common, or that there was no passive."""
        if self.common is None:
            return "nobody helped: no passive was handed in, so the active trained alone"
        return f"people that all parties know: {self.common:,} of the active's {self.own_people:,}"

    def _describe_attacks(self) -> list[str]:
        """Return who could read whose what by attacks, or that none was configured."""
        if not self.attacks:
            return ["attacks: none was asked for, so nothing is known of what can be read"]
        from apfed_attacks.headlines import headlines_by_direction

        headlines = headlines_by_direction(self.attacks, self.run.recording.config)
        return [f"{headline.direction.title}: {headline.text}" for headline in headlines]


class PredictingNetwork(nn.Sequential):
    """An encoder and a head, which take rows of any precision."""

    def forward(self, rows_B: Tensor) -> Tensor:
        """Return class scores (B, K). Raises ModelError: the rows are no tensor."""
        given: object = rows_B
        if not isinstance(given, Tensor):
            raise ModelError(
                f"a network reads a tensor of rows, got {type(given).__name__}; give "
                "torch.as_tensor(rows), or ask result.predict(rows), which takes arrays and frames"
            )
        weights = [*self.parameters(), *self.buffers()]
        dtype = next((one.dtype for one in weights if one.is_floating_point()), rows_B.dtype)
        scores_BK = rows_B.to(dtype)
        for part in self:
            scores_BK = part(scores_BK)
        return scores_BK


def describe_model(networks: ActiveNetworks | None, active: Active) -> str:
    """Return in words which model predicts: the active's network, local models, or an average.

    "" if the active keeps no networks (None).
    """
    if networks is None:
        return ""
    trained = "a built-in network" if active.encoder is None else "your own network"
    if isinstance(networks.encoder, FittedModel):
        return f"local models that learnt the labels, in place of {trained}"
    if not any(isinstance(part, FittedModel) for part in networks.modules()):
        return trained
    if any(name.endswith(STUDENT_HEAD) for name, _ in networks.named_modules()):
        return f"the average of {trained} (a copy) and the best local models"
    return f"local models of the rows, or of what {trained} makes of them"


def _describe_local_models(used: Sequence[str], settings: TrainSettings) -> str:
    """Return which local models learnt the labels at the end, and whether they use help.

    `used`: names of the local models in use, as "mixmatch of x and h".
    """
    names = f"{', '.join(used)} (x: own features; h: what the exchange trained)"
    if any(not name.endswith(" of x") for name in used):
        return f"help is in the model: the labels were learnt by {names}"
    if set(settings.local_models) == {"x"}:
        return f"help is not in the model: train asks for models of own features alone: {names}"
    return (
        "help is not in the model: models of own features replaced those with help, which are "
        f"surely worse on held-out labels: {names}"
    )
