"""The result of `train`: the trained network, its measures, and a text report.

Letters: N rows, B batch, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from secure_apfed.baselines.fitted import STUDENT_HEAD, FittedModel
from secure_apfed.errors import ModelError
from secure_apfed.interfaces.parties import Active
from secure_apfed.learning.black_box import describe_black_boxes
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.measures.table import MEASURES
from secure_apfed.runs.active_model import ActiveModel
from secure_apfed.runs.outcome import RunResult
from secure_apfed.settings import TrainSettings
from secure_apfed.settings.promises import list_epsilons_by_title

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
        alone: the run's main measure, on the same test rows, of the active's own network when it
            was trained in the same way without passives; None: not measured.
        best_local: the run's main measure of the best local model by validation; None: local models
            were not tried.
        best_local_name: name of that model.
        not_tried: the local models that were not tried, with the reason.
        attacks: results of the requested attacks.
        test_rows: positions of the test rows among the active's rows as passed to `train`, int64.
        common: number of people that all parties know; None: there is no passive.
        own_people: number of people that the active has.
        black_boxes: names of the passives with a black-box gradient.
        model_is: description of `model`: the active's own modules or, if validation chose them,
            local models or an average with local models.

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
    _active_model: ActiveModel | None = field(default=None, repr=False)

    @property
    def model(self) -> nn.Sequential:
        """The network that was measured, rows -> class scores (B, K).

        It consists of the active's own encoder and head, unless `model_is` says otherwise. In
        methods whose student learns from votes (passives' class scores), validation may choose a
        local model, or an average with copies of the modules.

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

        `rows`: a frame with the columns of training, or an array, a tensor or a list, in the form
        that was passed to `train`.

        Raises:
            DataError, ModelError: the rows have other columns or another shape, or every party is
                needed to predict.
        """
        probabilities: NDArray[np.float64] = (
            self._load_active_model().predict(rows).double().cpu().numpy()
        )
        return probabilities

    def predict(self, rows: Any) -> NDArray[Any]:
        """Return the class of each row, (N,), as the labels passed to `train` write it.

        `rows`: a frame with the columns of training, or an array, a tensor or a list, in the form
        that was passed to `train`.

        Raises DataError, ModelError: the errors of `predict_proba`.
        """
        model = self._load_active_model()
        class_indices_N = model.decide_classes(model.predict(rows)).cpu().numpy()
        labels: NDArray[Any] = np.array(self.classes)[class_indices_N]
        return labels

    def _load_active_model(self) -> ActiveModel:
        """Return the active's model with the encoding of its rows.

        Raises ModelError: every party is needed to predict.
        """
        assert self.model is not None  # the property raises the error
        assert self._active_model is not None
        return self._active_model

    @property
    def score(self) -> float:
        """The run's main measure on the test rows."""
        first_variant = next(iter(self.run.measures))  # the way to predict that is reported first
        return self.run.measures[first_variant][self.run.measure]

    @property
    def gain(self) -> float | None:
        """The gain over the better of `alone` and `best_local`; None: neither was measured.

        One run proves no gain: only several seeds do.
        """
        local_scores = [value for value in (self.alone, self.best_local) if value is not None]
        if not local_scores:
            return None
        measure = MEASURES[self.run.measure]
        return min(measure.compute_gain(self.score, value) for value in local_scores)

    @property
    def epsilon(self) -> dict[str, float]:
        """The epsilons of the run by their names, such as epsilon_x; infinite: no guarantee."""
        return list_epsilons_by_title(self.run.promises)

    @property
    def report(self) -> str:
        """A text report of measures, local models, privacy costs and attacks, one fact a line."""
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
        for promise in self.run.promises:
            if promise.epsilon is None:
                continue  # nothing is sent that this epsilon would bound
            is_bounded = promise.state == "bounded"
            guarantee = f"epsilon {promise.text}" if is_bounded else "no guarantee"
            lines.append(f"{promise.format_title()}: {guarantee}")
        lines += describe_black_boxes(self.black_boxes)
        lines += self._describe_attacks()
        lines.append(f"bytes sent: {self.run.wire_bytes:,}")
        return "\n".join(lines)

    def _describe_helpers(self) -> str:
        """Return a line on how many people all parties know, or that there was no passive."""
        if self.common is None:
            return "nobody helped: no passive was handed in, so the active trained alone"
        return f"people that all parties know: {self.common:,} of the active's {self.own_people:,}"

    def _describe_attacks(self) -> list[str]:
        """Return lines on what attacks could read from whom, or that no attack was requested."""
        if not self.attacks:
            return ["attacks: none was asked for, so nothing is known of what can be read"]
        from apfed_attacks.headlines import make_headlines

        headlines = make_headlines(self.attacks, self.run.recording.config)
        return [f"{headline.direction.title}: {headline.text}" for headline in headlines]


class PredictingNetwork(nn.Sequential):
    """An encoder followed by a head, which converts rows of any precision to its own."""

    def forward(self, rows_B: Tensor) -> Tensor:
        """Return class scores (B, K). Raises ModelError: the rows are no tensor."""
        untyped_rows: object = rows_B
        if not isinstance(untyped_rows, Tensor):
            raise ModelError(
                f"a network reads a tensor of rows, got {type(untyped_rows).__name__}; give "
                "torch.as_tensor(rows), or ask result.predict(rows), which takes arrays and frames"
            )
        weights = [*self.parameters(), *self.buffers()]
        float_types = [weight.dtype for weight in weights if weight.is_floating_point()]
        outputs_B = rows_B.to(float_types[0] if float_types else rows_B.dtype)
        for module in self:
            outputs_B = module(outputs_B)
        return outputs_B


def describe_model(networks: ActiveNetworks | None, active: Active) -> str:
    """Return in words which model predicts: the active's network, local models, or an average.

    `networks`: the active's trained networks; None: every party is needed to predict, and "" is
    returned. `active`: the active, as passed to `train`.
    """
    if networks is None:
        return ""
    network_text = "a built-in network" if active.encoder is None else "your own network"
    if isinstance(networks.encoder, FittedModel):
        return f"local models that learnt the labels, in place of {network_text}"
    if not any(isinstance(module, FittedModel) for module in networks.modules()):
        return network_text
    if any(name.endswith(STUDENT_HEAD) for name, _ in networks.named_modules()):
        return f"the average of {network_text} (a copy) and the best local models"
    return f"local models of the rows, or of what {network_text} makes of them"


def _describe_local_models(used_models: Sequence[str], settings: TrainSettings) -> str:
    """Return a line on the local models that learnt the labels at the end of training.

    It says whether they use the passives' help: then they read h (the representation that was
    trained with the passives), and not only x (the active's own features).

    `used_models`: names of the local models, such as "mixmatch of x and h". `settings`: section
    `train`.
    """
    names = f"{', '.join(used_models)} (x: own features; h: what the exchange trained)"
    if any(not name.endswith(" of x") for name in used_models):
        return f"help is in the model: the labels were learnt by {names}"
    if set(settings.local_models) == {"x"}:
        return f"help is not in the model: train asks for models of own features alone: {names}"
    return (
        "help is not in the model: models of own features replaced those with help, which are "
        f"surely worse on held-out labels: {names}"
    )
