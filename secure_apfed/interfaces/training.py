"""Secure training with your own networks, losses and data: one call, all parties in this process.

`train` makes a run of what it is given, the same run that a YAML file describes: alignment, secure
sum, guard, accounting and report are those of every run. It returns your own modules, trained.
Part of the composition root: `secure_apfed` gives its names to others, no module imports it.

Letters: N rows, B batch, D numbers of a representation, K classes.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from difflib import get_close_matches
from functools import partial
from itertools import combinations
from numbers import Number
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.ids import EMPTY, id_texts
from apfed_protocols.psi import IntersectionName
from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.base.faults import Advice
from secure_apfed.base.files import PathLike
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_values
from secure_apfed.config.plain_yaml import KeyPath
from secure_apfed.data.encoding import (
    ArrayEncoding,
    FeatureEncoding,
    fit_columns,
    refuse_empty_cells,
)
from secure_apfed.data.frames import BLANK, format_cell, is_empty
from secure_apfed.data.labels import UNLABELLED, require_one_spelling, warn_of_empty_words
from secure_apfed.data.lazy_rows import is_lazy, is_sampled
from secure_apfed.data.partition import choose_labelled_rows, split_rows
from secure_apfed.data.records import PartyTable, VerticalData
from secure_apfed.data.row_sources import load_array, make_features
from secure_apfed.data.tables import warn_of_labels
from secure_apfed.errors import (
    ConfigError,
    DataError,
    FewRowsWarning,
    ModelError,
    NoHelpWarning,
    SuspectColumnWarning,
)
from secure_apfed.interfaces.arguments import (
    TRAIN_ARGUMENTS,
    describe_argument,
    name_arguments,
)
from secure_apfed.learning.black_box import GradientSource, describe_black_boxes
from secure_apfed.learning.descent import (
    EPOCH,
    ActiveNetworks,
    MakeOptimizer,
    MakeScheduler,
    OwnSteps,
    StepsOrEpoch,
)
from secure_apfed.learning.own_code import (
    LossSource,
    ModuleSource,
    OwnCode,
    refuse_shared_parameters,
)
from secure_apfed.measures.table import MEASURES
from secure_apfed.measures.tasks import TASKS
from secure_apfed.methods import METHODS
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import Recording, RunResult, load_recording
from secure_apfed.runs.run import run_in_memory
from secure_apfed.runs.solo import SoloModel
from secure_apfed.settings import Settings, did_you_mean
from secure_apfed.settings.data import TABLES, DataSettings, Missing
from secure_apfed.settings.method import MethodSettings
from secure_apfed.settings.promises import list_epsilons
from secure_apfed.settings.training import ModelSettings, TrainSettings
from secure_apfed.solo.fitted import STUDENT_HEAD, FittedModel

if TYPE_CHECKING:
    from apfed_attacks.interface import AttackResult

SchemeName: TypeAlias = Literal[
    "ckks", "bfv", "masked bfv", "masked", "recoverable", "crypten", "plain"
]
_SUMS: Mapping[SchemeName, Mapping[str, str]] = {
    "ckks": {"scheme": "ckks"},
    "bfv": {"scheme": "bfv"},
    "masked bfv": {"scheme": "bfv", "masks": "pairwise"},
    "masked": {"scheme": "plain", "masks": "pairwise"},
    "recoverable": {"scheme": "plain", "masks": "recoverable"},
    "crypten": {"scheme": "crypten"},
    "plain": {"scheme": "plain"},
}
"""Everyday names of secure sums, those of `secure_apfed.secure_sum`; a mapping says more
(`secure_sum` of a run's YAML file)."""


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """A guard that clips representations and draws fresh noise for every release of a row; see
    `guard` of a run's YAML file.

    Attributes:
        epsilon, delta: of all releases of one row; or sigma, the deviation of the noise.
        clip: L2 bound of a row before the noise.

    Examples:
        >>> from secure_apfed import Gaussian
        >>> guard = Gaussian(epsilon=8, clip=2)  # train(..., guard=guard)
        >>> guard.epsilon, guard.delta, guard.clip
        (8, 1e-05, 2)
    """

    epsilon: float | None = None
    delta: float = 1e-5
    sigma: float | None = None
    clip: float = 1.0

    mechanism = "gaussian"

    def as_settings(self) -> dict[str, Any]:
        """Return the settings of a run's guard."""
        return {
            "mechanism": self.mechanism,
            "epsilon": self.epsilon,
            "sigma": self.sigma,
            "clip": self.clip,
        }


@dataclass(frozen=True, kw_only=True)
class FrozenGaussian(Gaussian):
    """A guard that clips representations and draws each row's noise once: many epochs show no more
    than its first release.

    Examples:
        >>> from secure_apfed import FrozenGaussian
        >>> guard = FrozenGaussian(epsilon=4)  # train(..., guard=guard, epochs=200)
        >>> guard.as_settings()
        {'mechanism': 'frozen_gaussian', 'epsilon': 4, 'sigma': None, 'clip': 1.0}
    """

    mechanism = "frozen_gaussian"


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """The loss of APFed-R, Eq. (12): the passive reconstructs its own rows from z.

    Attributes:
        decoder: z (B, D) -> own rows; None: a perceptron.

    Examples:
        >>> from torch import nn, zeros
        >>> from secure_apfed import Passive, Reconstruction
        >>> loss = Reconstruction(decoder=nn.Linear(16, 3))  # from z of 16 numbers to 3 columns
        >>> Passive("lab", ["ann", "bob"], zeros(2, 3), loss=loss).loss.decoder
        Linear(in_features=16, out_features=3, bias=True)
    """

    decoder: ModuleSource | None = None


@dataclass(frozen=True, kw_only=True)
class Contrastive:
    """The loss of APFed-C, Eqs. (14) to (16): own rows and z of one person agree.

    Attributes:
        encoder: own rows -> (B, any size); None: a perceptron, or convolutions for images.
        temperature: tau > 0.

    Examples:
        >>> from torch import nn, zeros
        >>> from secure_apfed import Contrastive, Passive
        >>> loss = Contrastive(encoder=nn.Linear(3, 8), temperature=0.5)
        >>> Passive("lab", ["ann", "bob"], zeros(2, 3), loss=loss).loss.temperature
        0.5
    """

    encoder: ModuleSource | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class Passive:
    """A party that helps during training only.

    Attributes:
        name: name of the party.
        ids: IDs of its rows, N texts or numbers, distinct.
        rows: array or tensor (N, *shape), a frame of N rows, a file of an array (.npy, .npz,
            .safetensors), or a map-style data set of N items, as `ImageFiles`; a party with a
            `gradient` may leave them out.
        loss: `Reconstruction()`, `Contrastive()`, or any (z, own rows) -> scalar, as a module or a
            function. Gradients through z are what it contributes.
        weight: lambda of Eq. (8).
        row_wise: with a loss of the user's: whether a row's gradient depends on that row alone.
        encoder: own rows -> the representation that it sends, where a method sums or concatenates
            representations (TVFL, split networks).
        gradient: a black-box function of any framework that replaces a loss, (step, rows, z) ->
            gradient (`secure_apfed.learning.black_box`). `rows` are positions in `ids`, (B,) int64;
            z is an array (B, *shape); it returns an array or a tensor of that shape, of each row
            the gradient of that row's own loss.
        optimizer: function that makes it, such as `torch.optim.AdamW`; None: that of `train`.
        scheduler: function that makes its optimizer's scheduler, in the form that `train` takes;
            None: that of `train`.
        workers: threads that read a data set.
        missing: what to do with empty cells of a frame: "error" refuses them, "mean" replaces them
            by the column's mean or by no category, "drop" leaves the row out.

    Raises:
        ConfigError: a `gradient` together with a loss, an encoder, an optimizer or a scheduler,
            which it replaces; or neither rows nor a `gradient`.

    Examples:
        >>> from torch import zeros
        >>> from secure_apfed import Contrastive, Passive
        >>> lab = Passive("lab", ["ann", "bob"], zeros(2, 3), loss=Contrastive(), weight=0.5)
        >>> registry = Passive("registry", ["ann"], gradient=lambda step, rows, z: 0 * z)
        >>> Passive("shop", ["ann", "bob"])
        Traceback (most recent call last):
        secure_apfed.errors.ConfigError: shop: it has neither rows nor a gradient; ...
    """

    name: str
    ids: Sequence[Any] = field(repr=False)
    rows: Any = field(default=None, repr=False)
    loss: "Reconstruction | Contrastive | LossSource" = field(default_factory=Reconstruction)
    weight: float = 1.0
    row_wise: bool = False
    encoder: ModuleSource | None = field(default=None, kw_only=True)
    gradient: GradientSource | None = field(default=None, kw_only=True)
    optimizer: MakeOptimizer | None = field(default=None, kw_only=True)
    scheduler: MakeScheduler | None = field(default=None, kw_only=True)
    workers: int = field(default=4, kw_only=True)
    missing: Missing = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        """Raise ConfigError unless it has either rows, or a gradient function without other code.

        A loss class is replaced by an object with its defaults.
        """
        if self.loss in (Reconstruction, Contrastive):
            object.__setattr__(self, "loss", self.loss())
        if self.gradient is None:
            if self.rows is None:
                raise ConfigError(
                    f"{self.name}: it has neither rows nor a gradient; give rows=..., or "
                    "gradient=... of a party that computes it out of sight"
                )
            return
        replaced = {
            "loss": self.loss != Reconstruction(),
            "encoder": self.encoder is not None,
            "optimizer": self.optimizer is not None,
            "scheduler": self.scheduler is not None,
        }
        replaced_names = [name for name, is_given in replaced.items() if is_given]
        if replaced_names:
            raise ConfigError(
                f"{self.name}: gradient is given beside {' and '.join(replaced_names)}; what "
                "computes its own gradient trains itself: leave one of the two out"
            )


@dataclass(frozen=True)
class Active:
    """The party that has the labels, and the model afterwards.

    Attributes:
        name, ids, rows, optimizer, scheduler, workers, missing: as a `Passive`'s.
        labels: N classes (numbers or texts); None or NaN where one is not known.
        encoder: own rows -> representation, trained in place; None: a built-in network.
        head: representation -> K class scores, trained in place; None: one linear layer.
        projection: representation -> the `model={"projection": D}` numbers that are sent, trained
            in place; None: one linear layer.

    Examples:
        >>> from torch import nn, zeros
        >>> from secure_apfed import Active
        >>> labels = ["ill", None, "well"]  # None: not known
        >>> ids = ["ann", "bob", "eve"]
        >>> clinic = Active("clinic", ids, zeros(3, 5), labels, encoder=nn.Linear(5, 8))
        >>> clinic.encoder
        Linear(in_features=5, out_features=8, bias=True)
    """

    name: str
    ids: Sequence[Any] = field(repr=False)
    rows: Any = field(repr=False)
    labels: Any = field(repr=False)
    encoder: ModuleSource | None = field(default=None, kw_only=True)
    head: ModuleSource | None = field(default=None, kw_only=True)
    projection: ModuleSource | None = field(default=None, kw_only=True)
    optimizer: MakeOptimizer | None = field(default=None, kw_only=True)
    scheduler: MakeScheduler | None = field(default=None, kw_only=True)
    workers: int = field(default=4, kw_only=True)
    missing: Missing = field(default="error", kw_only=True)


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


def _describe_model(networks: ActiveNetworks | None, active: Active) -> str:
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


Arguments = ParamSpec("Arguments")


def _explain_calls(
    function: Callable[Arguments, TrainingResult],
) -> Callable[Arguments, TrainingResult]:
    """Return a function whose passives, given twice, are refused in words."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **settings: Arguments.kwargs) -> TrainingResult:
        if len(args) > 1 and "passives" in settings:
            raise ConfigError(
                "passives: the list of parties is given, and passives=... beside it; what a "
                "passive has is said by the passive itself, as Passive('lab', ids, rows, "
                "weight=0.5)"
            )
        return function(*args, **settings)

    return call


@_explain_calls
@isolate_torch_modes()
@name_arguments(TRAIN_ARGUMENTS)
def train(
    active: Active,
    passives: Sequence[Passive] = (),
    *,
    method: str | Mapping[str, Any] = "apfed",
    alignment: IntersectionName | Mapping[str, Any] = "auto",
    secure_sum: SchemeName | Mapping[str, Any] = "ckks",
    guard: Gaussian | Mapping[str, Any] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    optimizer: MakeOptimizer | Literal["sgd", "adam", "adamw"] | None = None,
    scheduler: MakeScheduler | None = None,
    scheduler_every: StepsOrEpoch = EPOCH,
    labelled: int | float | None = None,
    test_fraction: float = 0.25,
    seed: int = 0,
    folder: PathLike | None = None,
    resume: bool = False,
    baselines: bool = True,
    attacks: str | Sequence[str | Mapping[str, Any]] = (),
    on_progress: Callable[[Any], None] = lambda progress: None,
    **settings: Any,
) -> TrainingResult:
    """Train the active's networks with the passives' help, and measure.

    Args:
        on_progress: called with each `Progress`.
        method: a key of `secure_apfed.methods.METHODS` that trains networks by steps.
        alignment: the protocol that finds the common people, or the section `alignment`.
        secure_sum: ckks, bfv, masked bfv, masked, recoverable, crypten or plain, each the sum that
            the function `secure_apfed.secure_sum` makes by this name; or the section `secure_sum`.
        guard: `FrozenGaussian`, `Gaussian`, or the section `guard`; None: no guarantee for what the
            active sends.
        epochs: passes over the training rows; None: 20.
        batch_size: rows of one step, at least 2; None: 128. More than there are: all of them.
        optimizer: optimizer of every party without its own: sgd, adam, adamw, or a function of the
            list of parameters; None: sgd. One with an argument `modules` takes the party's modules
            by name (encoder, head and projection, or objective), for groups. A function takes `lr`
            where train={"learning_rate": ...} is given, and else keeps its own rate.
        scheduler: scheduler of every party without its own: a function of the optimizer that makes
            a `torch.optim.lr_scheduler.LRScheduler`.
        scheduler_every: "epoch", as most loops have it, or after how many of a party's own steps
            its scheduler takes one. `ReduceLROnPlateau` reads the party's mean loss of an epoch.
        labelled: how many training rows keep their label, or which share; None: all that have one.
        test_fraction: share of the active's labelled rows that are only used to measure; drawn
            before `labelled`.
        seed: seed of the split, the initial weights that are made here, and the order of batches.
        folder: folder of the run, for its checkpoints and reports; None: nothing is written.
        resume: go on from the newest checkpoint in `folder`, with the same arguments; the modules
            take its weights.
        baselines: whether to train the active's own network alone, and local models.
        attacks: attacks to mount on what all parties sent, as the section `attacks`: names, "all",
            or {"name": ..., "options": {...}}. They hold the aligned rows of data sets in memory.
        settings: further sections of a run's YAML file, as train={"learning_rate": 0.05} or
            model={"projection": 16}.

    Raises:
        DataError: rows, IDs or labels do not fit; names the party.
        ConfigError: a setting or a module does not fit. Others as `secure_apfed.run`.

    Examples:
        >>> import torch
        >>> from secure_apfed import Active, Passive, train
        >>> rows = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
        >>> ids = [f"person-{number}" for number in range(80)]
        >>> labels = (rows[:, 0] + rows[:, 3] > 0).long()
        >>> active = Active("clinic", ids, rows[:, :3], labels, encoder=torch.nn.Linear(3, 4))
        >>> passives = [Passive("lab", ids, rows[:, 3:]), Passive("registry", ids, rows[:, 1:4])]
        >>> result = train(active, passives, epochs=1, secure_sum="masked", baselines=False)
        >>> result.model(rows[:5, :3]).shape  # of the active alone
        torch.Size([5, 2])
    """
    _require_parties(active, passives)
    _refuse_misplaced_settings(settings)
    train_settings = _read_section(settings, "train")
    given = {"epochs": epochs, "batch_size": batch_size, "optimizer": optimizer}
    name = method if isinstance(method, str) else str(method.get("name"))
    kind = METHODS.get(name) if passives else None
    sums_gradients = kind is not None and kind.settings.sums_gradients
    _refuse_contradictions(active, passives, given, guard, settings, sums_gradients=sums_gradients)
    parties: list[Active | Passive] = [active, *passives]
    rates = {key: train_settings[key] for key in _RATES if key in train_settings}
    shared = OwnSteps(
        optimizer=None if isinstance(optimizer, str) else _set_rates(optimizer, rates),
        scheduler=scheduler,
        every=scheduler_every,
    )
    code = {party.name: _make_code(party, shared, rates) for party in parties}
    refuse_shared_parameters(code)
    choice = _read_data_settings(settings)
    data, classes, kept_rows = _make_data(
        active, passives, choice, labelled=labelled, test_fraction=test_fraction, seed=seed
    )
    fresh = {active.name: code[active.name].copy_fresh()}
    config = _make_config(
        active,
        passives,
        classes,
        method=method,
        alignment=alignment,
        secure_sum=secure_sum,
        guard=guard,
        choice=choice,
        train=_complete_train_settings(train_settings, given),
        seed=seed,
        labelled=labelled,
        test_fraction=test_fraction,
        attacks=attacks,
        settings=settings,
    )
    run_folder = None if folder is None else Path(folder)
    if config.attacks:
        from apfed_attacks.run import expand_choices

        expand_choices(config.attacks)  # a wrong name is refused before the training
    common = _count_common(data, config) if passives else None
    with warnings.catch_warnings():
        # This process has all tables, so an unsafe sum reveals nothing new to it.
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        result = run_in_memory(
            config, run_folder, data=data, code=code, resume=resume, on_progress=on_progress
        )
    networks = result.own_networks
    model = None
    if networks is not None:
        model = PredictingNetwork(networks.encoder, networks.head).eval()
    trained = TrainingResult(
        networks=model,
        classes=classes,
        run=result,
        attacks=_run_attacks(config, run_folder, result),
        test_rows=torch.from_numpy(kept_rows)[data.test_rows],
        common=common,
        own_people=len(data.table.ids),
        _solo=_make_solo(model, data, result, config),
        black_boxes=tuple(party.name for party in passives if party.gradient is not None),
        model_is=_describe_model(networks, active),
    )
    return _compare_locally(trained, config, data, fresh) if baselines else trained


def _run_attacks(
    config: Config, folder: Path | None, result: RunResult
) -> "tuple[AttackResult, ...]":
    """Run the configured attacks, and return their results; if the run has a folder, write them to
    it, too.
    """
    if not config.attacks:
        return ()
    if folder is None:
        from apfed_attacks.run import run_attacks

        return run_attacks(result.recording, config.attacks, seed=config.seed)
    from apfed_experiments.finished import mount_attacks

    return mount_attacks(folder, recording=result.recorded)


def load_training_recording(
    folder: PathLike, active: Active, passives: Sequence[Passive]
) -> Recording:
    """Load the record of a finished `train(..., folder=...)`, as `load_recording` does.

    Args:
        active, passives: as given to `train`: rows and labels, and what makes the networks. Given
            modules receive the weights of the run.

    Raises DataError: the parties have other rows. Others as `load_recording`.
    """
    config = RunFolder(Path(folder)).load_config()
    choice = _DataChoice(
        classes=config.data.explicit_classes,
        positive=config.data.positive,
        split=config.data.split,
    )
    data, _, _ = _make_data(
        active,
        passives,
        choice,
        labelled=config.data.labelled,
        test_fraction=config.data.test_fraction,
        seed=config.seed,
    )
    return load_recording(
        folder,
        data=data,
        encoder=active.encoder,
        head=active.head,
        encoders={party.name: party.encoder for party in passives if party.encoder is not None},
    )


_RATES: Mapping[str, str] = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
"""Arguments of torch's optimizers by the setting of `train` that they stand for."""


def _set_rates(
    make: MakeOptimizer | None, rates: Mapping[str, float], *, party: str = ""
) -> MakeOptimizer | None:
    """Return an optimizer's function with the rates that `train` sets.

    `party`: name of the party whose own optimizer it is, which keeps rates that its function does
    not take; empty: the optimizer of all parties. `make`: the optimizer's function; None: the
    default optimizer.

    Raises:
        ConfigError: the function of all takes no such rate, or has one; names both.
    """
    if make is None or not rates or not callable(make):
        return make
    try:
        takes = set(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # of a builtin: it names none
        takes = set()
    if isinstance(make, functools.partial):
        takes -= make.keywords.keys()
    taken = {_RATES[key]: rate for key, rate in rates.items() if _RATES[key] in takes}
    for key in rates:
        if _RATES[key] not in taken and not party:
            rate = rates.get("learning_rate", 0.001)
            raise ConfigError(
                f"optimizer= is code of your own that has its own {_RATES[key]}, or takes none, "
                f"and train={{{key!r}: {rates[key]}}} would be ignored; leave one out, or say "
                f"optimizer=functools.partial(torch.optim.AdamW, lr={rate})"
            )
    bound: MakeOptimizer = functools.partial(make, **taken) if taken else make
    return bound


def _read_section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the settings. Raises ConfigError: the section is no mapping."""
    section = settings.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{name}: expected a mapping of settings, as {name}={{...}}; got {section!r}"
        )
    return dict(section)


def _complete_train_settings(
    section: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the section `train` with the arguments that stand for its keys.

    `given`: those arguments by name; None: not given.
    """
    arguments = {
        name: value
        for name, value in given.items()
        if value is not None and (name != "optimizer" or isinstance(value, str))
    }
    complete = {"epochs": 20, "batch_size": 128, **arguments, **section}
    if isinstance(complete["epochs"], int) and complete["epochs"] > 0:
        complete.setdefault("evaluate_every", complete["epochs"])
    return complete


def _refuse_contradictions(
    active: Active,
    passives: Sequence[Passive],
    given: Mapping[str, Any],
    guard: Gaussian | Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    *,
    sums_gradients: bool,
) -> None:
    """Refuse settings that are given in two ways, of which one would be ignored.

    `given`: arguments that stand for keys of `train`; None: not given. `sums_gradients`: whether
    the method adds up the passives' gradients.

    Raises:
        ConfigError: names both.
    """
    train_settings = _read_section(settings, "train")
    for name, value in given.items():
        if value is not None and name in train_settings:
            raise ConfigError(
                f"{name}={value!r} and train={{{name!r}: {train_settings[name]!r}}} are both "
                "given; leave one out"
            )
    if isinstance(guard, Gaussian) and "delta" in settings and guard.delta != settings["delta"]:
        raise ConfigError(
            f"delta={settings['delta']!r} and guard={type(guard).__name__}(delta={guard.delta!r}) "
            f"differ; say {type(guard).__name__}(..., delta={settings['delta']!r}) alone"
        )
    builds_encoder = any(
        isinstance(party.loss, Contrastive) and not (party.loss.encoder or party.encoder)
        for party in passives
        if party.gradient is None
    )
    builds_decoder = any(
        isinstance(party.loss, Reconstruction) and party.loss.decoder is None
        for party in passives
        if party.gradient is None
    )
    ignored = list[str]()
    if active.encoder is not None:
        ignored.append("network")
        ignored += [] if builds_encoder else ["random_features", "sequences"]
        if not builds_encoder and sums_gradients:  # other methods agree on its width
            ignored.append("representation")
        ignored += [] if builds_encoder or builds_decoder or active.head is None else ["hidden"]
    if active.head is not None:
        ignored += ["dropout", "head"]
    for key, value in _read_section(settings, "model").items():
        if key in ignored:
            part = "head" if key in ("dropout", "head") else "encoder"
            raise ConfigError(
                f"model={{{key!r}: {value!r}}} is of a built-in network, and {active.name} brings "
                f"its own {part}={type(getattr(active, part)).__name__}; leave one out"
            )


def _make_code(party: Active | Passive, shared: OwnSteps, rates: Mapping[str, float]) -> OwnCode:
    """Return what a party brings of its own.

    `shared`: optimizer and scheduler of parties without their own. `rates`: those that `train`
    sets, which a party's own optimizer takes if it can.

    Raises ConfigError: a part is neither a module nor a function; names the party.
    """
    parts: dict[str, Any] = {
        "encoder": party.encoder,
        "optimizer": _set_rates(party.optimizer, rates, party=party.name) or shared.optimizer,
        "scheduler": party.scheduler or shared.scheduler,
        "scheduler_every": shared.every,
    }
    if isinstance(party, Active):
        parts |= {"head": party.head, "projection": party.projection}
    elif party.gradient is not None:
        parts = {"gradient": party.gradient}
    elif isinstance(party.loss, Reconstruction):
        parts["decoder"] = party.loss.decoder
    elif isinstance(party.loss, Contrastive):
        parts["encoder"] = party.loss.encoder or party.encoder
    else:
        parts["objective"] = party.loss
    try:
        return OwnCode(**parts)
    except ConfigError as error:
        raise ConfigError(f"{party.name}: {error}") from error


def _require_parties(active: Active, passives: Sequence[Passive]) -> None:
    """Raise ConfigError unless the arguments are an `Active` and a list of `Passive`s, with texts
    as names.
    """
    if not isinstance(active, Active):
        raise ConfigError(
            f"active: expected secure_apfed.Active(name, ids, rows, labels, ...), got "
            f"{type(active).__name__}"
        )
    if isinstance(passives, Passive) or not isinstance(passives, Sequence):
        raise ConfigError(
            "passives: expected a list of secure_apfed.Passive(name, ids, rows, ...), got "
            f"{type(passives).__name__}; write [passive] for one"
        )
    for position, passive in enumerate(passives):
        if not isinstance(passive, Passive):
            raise ConfigError(
                f"passives[{position}]: expected secure_apfed.Passive(name, ids, rows, ...), got "
                f"{type(passive).__name__}"
            )
    parties: list[Any] = [active, *passives]
    for party in parties:
        if not isinstance(party.name, str):
            raise ConfigError(
                f"a party's name is a text, as 'clinic'; got {type(party.name).__name__}"
            )


def _refuse_misplaced_settings(settings: Mapping[str, Any]) -> None:
    """Refuse a name that is neither an argument nor a section, or a key given as an argument.

    Raises:
        ConfigError: names the section that it belongs in, or the nearest name.
    """
    sections: Mapping[str, type[Settings]] = {"train": TrainSettings, "model": ModelSettings}
    for name, value in settings.items():
        if name in Config.model_fields and not (name == "labels" and isinstance(value, str)):
            continue
        key = "learning_rate" if name == "lr" else name
        for section, kind in sections.items():
            if key in kind.model_fields:
                raise ConfigError(
                    f"train: {name} is no argument; say {section}={{{key!r}: {value!r}}}"
                )
        arguments = [*inspect.signature(train).parameters, *Config.model_fields]
        ways = {argument: f"{argument}=..." for argument in arguments}
        for section, kind in sections.items():
            for inner in kind.model_fields:
                ways.setdefault(inner, f"{section}={{{inner!r}: ...}}")
        nearest = get_close_matches(name, list(ways), n=1, cutoff=0.6)
        guess = f"did you mean {ways[nearest[0]]}?" if nearest else "leave it out"
        raise ConfigError(
            f"train: {name}={value!r:.60} is neither an argument nor a section of settings; {guess}"
        )


@dataclass(frozen=True, kw_only=True)
class _DataChoice:
    """The settings of `data` that apply to rows handed in.

    Attributes:
        classes: the labels in the order of the scores; empty: in order.
        positive: the positive one of two classes, which is put last; None: the last one.
        split: how test rows and labelled rows are drawn.
    """

    classes: tuple[str, ...] = ()
    positive: str | None = None
    split: Literal["by_class", "at_random"] = "by_class"


_OF_FILES = "it is of rows that a run's file names; leave it out, or use secure_apfed.run"
_FEWER = "hand in these rows and IDs alone"
_BY_PARTY = "say missing='mean' or missing='drop' of that Active or Passive"
_INSTEAD: Mapping[str, str] = {
    "labelled": "say labelled=",
    "test_fraction": "say test_fraction=",
    **dict.fromkeys(("limit", "rows", "rows_per_class"), _FEWER),
    **dict.fromkeys(
        ("overlap", "aligned"), "parties share the people whose IDs they hand in: change the IDs"
    ),
    **dict.fromkeys(("missing", "parties"), _BY_PARTY),
    "active": "its name is the first argument of Active(...)",
    "id_column": "hand in the column as ids of Active and Passive",
    "label_column": "hand in the column as labels of Active",
    "columns": "hand in frames of these columns alone",
    "date_formats": "convert the column first, as pandas.to_datetime(column, format=...)",
}
"""What to do in place of a setting of `data` that does not apply to rows handed in."""


def _read_data_settings(settings: Mapping[str, Any]) -> _DataChoice:
    """Return the settings of `data`.

    Raises:
        ConfigError: one does not apply to rows handed in; names what does.
    """
    section = _read_section(settings, "data")
    known = list(DataSettings.model_fields)
    for key, value in section.items():
        if key in _DataChoice.__dataclass_fields__:
            continue
        if key in known:
            advice = _INSTEAD.get(key, _OF_FILES)
        else:
            nearest = did_you_mean(key, known)
            advice = f"{nearest or 'leave it out;'} known here: classes, positive, split"
        raise ConfigError(
            f"data={{{key!r}: {value!r:.60}}} does not apply to rows that are handed in; {advice}"
        )
    split = section.get("split", "by_class")
    classes = section.get("classes") or ()
    if split not in ("by_class", "at_random"):
        raise ConfigError(f"data={{'split': {split!r}}}: expected 'by_class' or 'at_random'")
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise ConfigError(
            f"data={{'classes': {classes!r}}}: expected the list of all classes, in order"
        )
    positive = section.get("positive")
    return _DataChoice(
        classes=tuple(str(name) for name in classes),
        positive=None if positive is None else str(positive),
        split=split,
    )


def _describe_loss(party: Passive) -> dict[str, Any]:
    """Return the settings of a passive's objective."""
    loss = party.loss
    if party.gradient is not None:
        return {"name": "black_box"}
    if isinstance(loss, Reconstruction):
        return {"name": "reconstruction"}
    if isinstance(loss, Contrastive):
        return {"name": "contrastive", "temperature": loss.temperature}
    return {"name": "own", "row_wise": party.row_wise}


def _make_config(
    active: Active,
    passives: Sequence[Passive],
    classes: Sequence[Any],
    *,
    method: str | Mapping[str, Any],
    alignment: str | Mapping[str, Any],
    secure_sum: SchemeName | Mapping[str, Any],
    guard: Gaussian | Mapping[str, Any] | None,
    choice: _DataChoice,
    train: Mapping[str, Any],
    seed: int,
    labelled: float | None,
    test_fraction: float,
    attacks: str | Sequence[str | Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Config:
    """Return the settings of the run, as its YAML file would state them.

    Args:
        classes: the labels in the order of the scores.
        train: the section of this name.
        settings: further sections.
        method, alignment, secure_sum, guard, labelled, test_fraction, seed, attacks: as of the
            function `train`.

    Raises ConfigError: a setting is wrong, or a party brought code that the method does not use.
    """
    names = [active.name, *(party.name for party in passives)]
    if not passives:
        method = find_method_alone()
    _refuse_attack_classes(attacks)
    settings_of_run: dict[str, Any] = {
        "name": "training",
        "seed": seed,
        "method": {"name": method} if isinstance(method, str) else dict(method),
        "data": {
            "dataset": TABLES,
            "active": active.name,
            "parties": {name: {} for name in names},
            "classes": [str(name) for name in classes],
            "labelled": labelled,
            "test_fraction": test_fraction,
            **({"split": choice.split} if choice.split != "by_class" else {}),
            **({"positive": choice.positive} if choice.positive is not None else {}),
        },
        "train": dict(train),
        "secure_sum": _read_sum(secure_sum),
        "alignment": {"protocol": alignment} if isinstance(alignment, str) else dict(alignment),
        "guard": _read_guard(guard),
        "attacks": attacks if isinstance(attacks, str) else [*attacks],
    }
    if isinstance(guard, Gaussian):
        settings_of_run["delta"] = guard.delta
    if alignment == "auto":
        del settings_of_run["alignment"]
    settings_of_run |= {
        name: value for name, value in settings.items() if name not in ("data", "train")
    }
    model = _read_section(settings, "model")
    own = "auto" if active.encoder is None else "own"
    settings_of_run["model"] = {"network": own, **model}
    if active.head is not None:
        settings_of_run["model"]["head_network"] = "own"
    method_name = settings_of_run["method"]["name"]
    method_class = METHODS.get(method_name)
    has_losses = method_class is not None and method_class.settings.sums_gradients
    if active.projection is not None and passives and not has_losses:
        raise ConfigError(
            f"{active.name}: it brought a projection, which method {method_name} does "
            "not send; leave it out, or train with apfed, apfed_r or apfed_c"
        )
    if method_class is not None:
        _require_used(passives, method_class.settings, title=method_name)
    settings_of_run["passives"] = {
        party.name: _describe_passive(party, model, has_losses=has_losses) for party in passives
    }
    describe = partial(_describe_setting, settings_of_run, guard=guard, passives=passives)
    return load_config_values(settings_of_run, describe_place=describe)


def _refuse_attack_classes(attacks: object) -> None:
    """Refuse an attack's class where its name is expected. Raises ConfigError: says the name."""
    if isinstance(attacks, str) or not isinstance(attacks, Sequence):
        attacks = [attacks]
    for choice in attacks:
        attack = choice.get("name") if isinstance(choice, Mapping) else choice
        if not isinstance(attack, str):
            kind = attack if isinstance(attack, type) else type(attack)
            raise ConfigError(
                f"attacks: expected the names of attacks, got {kind.__name__} itself; name it as "
                f"attacks=['{kind.__module__}:{kind.__qualname__}']"
            )


def _describe_setting(
    settings: Mapping[str, Any],
    path: KeyPath,
    *,
    guard: Gaussian | Mapping[str, Any] | None,
    passives: Sequence[Passive],
) -> str | None:
    """Return how the caller gave a setting, as FrozenGaussian(epsilon=0); "" where the sentence
    stands for itself, None where another place is named already.

    `settings`: all settings of the run.
    """
    if not path:
        return ""
    section = settings.get(str(path[0]))
    value = section.get(path[1]) if len(path) == 2 and isinstance(section, Mapping) else None
    if (argument := TRAIN_ARGUMENTS.get(path)) is not None:
        return f"{argument}={value!r}"
    if isinstance(guard, Gaussian) and path[0] in ("guard", "delta"):
        name = type(guard).__name__
        key = str(path[-1])
        if not hasattr(guard, key):
            return f"guard={name}(...)"
        return f"guard={name}({key}={getattr(guard, key)!r})"
    if path[0] == "passives" and len(path) > 2:
        if path[2] == "model":
            return None
        party = next((party for party in passives if party.name == path[1]), None)
        key = str(path[-1])
        if key == "temperature" and party is not None:
            loss = f"loss=Contrastive(temperature={getattr(party.loss, key, None)!r})"
            return f"Passive({path[1]!r}, {loss})"
        return f"Passive({path[1]!r}, {key}={getattr(party, key, '...')!r})"
    if path[0] in ("method", "alignment") and len(path) == 1 and isinstance(section, Mapping):
        key = "name" if path[0] == "method" else "protocol"
        return f"{path[0]}={section.get(key)!r}"
    return describe_argument(path, section)


def _require_used(
    passives: Sequence[Passive], settings: type[MethodSettings], *, title: str
) -> None:
    """Raise ConfigError if a passive brings an encoder or a loss that the method does not use.

    `settings`: the method's settings class, with its facts. `title`: name of the method, for the
    error.
    """
    sends = settings.representations_from == "passives" or settings.sums_representations
    for party in passives:
        reads_encoder = sends or isinstance(party.loss, Contrastive)
        if party.encoder is not None and not reads_encoder:
            raise ConfigError(
                f"{party.name}: it brought an encoder, and under method {title} passives send no "
                "output of one; hand it to the loss, as loss=Contrastive(encoder=...) or an "
                "nn.Module that holds it, or leave it out"
            )
        if settings.sums_gradients or party.gradient is not None:
            continue
        if party.loss != Reconstruction() or party.weight != 1.0 or party.row_wise:
            raise ConfigError(
                f"{party.name}: it brought a loss, its weight or row_wise, and under method "
                f"{title} passives train on none; leave them out, or take method apfed"
            )


def _describe_passive(
    party: Passive, model: Mapping[str, Any], *, has_losses: bool
) -> dict[str, Any]:
    """Return a passive's settings; networks that it does not bring are built-in ones.

    `model`: the run's section of this name. `has_losses`: whether passives have losses under the
    run's method.

    Raises ConfigError: the passive brings a gradient, and passives have no losses.
    """
    if party.gradient is not None and not has_losses:
        raise ConfigError(
            f"{party.name}: it brings a gradient, and this method sums none of passives; take "
            "method apfed, or leave it out"
        )
    network = "auto" if party.encoder is None else "own"
    description: dict[str, Any] = {"model": {**model, "network": network}}
    if has_losses:
        description |= {"objective": _describe_loss(party), "weight": party.weight}
    return description


def find_method_alone() -> str:
    """Return the method in which the active trains alone."""
    return next(name for name, method in METHODS.items() if not method.settings.has_passives)


def _read_sum(secure_sum: SchemeName | Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum's settings from a short name or a section. Raises ConfigError."""
    if isinstance(secure_sum, Mapping):
        return dict(secure_sum)
    if secure_sum not in _SUMS:
        raise ConfigError(
            f"secure_sum: expected {', '.join(_SUMS)}, or the section of a run's YAML file as a "
            f"mapping; got {secure_sum!r}"
        )
    return dict(_SUMS[secure_sum])


def _read_guard(guard: Gaussian | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the guard's settings from an object or a section. Raises ConfigError."""
    if guard is None:
        return {"mechanism": "none"}
    if isinstance(guard, Gaussian):
        return guard.as_settings()
    if not isinstance(guard, Mapping):
        raise ConfigError(
            "guard: expected FrozenGaussian(epsilon=...), Gaussian(...), None, or the section of a "
            f"run's YAML file as a mapping; got {guard!r}"
        )
    return dict(guard)


def _make_data(
    active: Active,
    passives: Sequence[Passive],
    choice: _DataChoice = _DataChoice(),
    *,
    labelled: float | None,
    test_fraction: float,
    seed: int,
) -> tuple[VerticalData, tuple[Any, ...], NDArray[np.int64]]:
    """Return all parties' tables with the active's split, the classes in order, and the positions
    of the active's rows among those handed in.

    `choice`: how labels are read and split. `labelled`: how many training rows keep their label, or
    which share; None: all. `test_fraction`: share of the labelled rows that are test rows. `seed`:
    seed of the split.
    """
    if labelled is not None and labelled <= 0:
        raise ConfigError(
            f"labelled={labelled!r}: expected how many training rows keep their label, 2 or more, "
            "or which share of them, below 1"
        )
    own_ids = _read_ids(active)
    labels_N, classes = _read_labels(active, choice)
    kept_rows = _find_kept_rows(active)
    labels_N = labels_N[kept_rows]
    known = np.flatnonzero(labels_N.numpy() != UNLABELLED)
    _, tested = split_rows(labels_N.numpy()[known], test_fraction, seed=seed, split=choice.split)
    test_rows = known[tested]
    train_rows = np.setdiff1d(np.arange(len(labels_N)), test_rows)
    chosen = choose_labelled_rows(
        labels_N.numpy()[train_rows], labelled, seed=seed, choice=choice.split
    )
    data = VerticalData(
        table=_make_table(active, own_ids, kept_rows, labels=labels_N, fitted=train_rows),
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(test_rows),
        classes=tuple(str(name) for name in classes),
        labelled=None if chosen is None else torch.from_numpy(np.sort(train_rows[chosen])),
        passives=tuple(
            _make_table(party, _read_ids(party), _find_kept_rows(party), labels=None)
            for party in passives
        ),
    )
    return data, classes, kept_rows


def _find_kept_rows(party: Active | Passive) -> NDArray[np.int64]:
    """Return the positions of a party's rows without those that `missing` drops.

    Raises:
        ConfigError: `missing` is no known way, or its rows have no columns that it is of.
    """
    ways = get_args(Missing)
    if party.missing not in ways:
        raise ConfigError(
            f"{party.name}: missing={party.missing!r}: expected one of {', '.join(ways)}"
        )
    rows = party.rows
    if not isinstance(rows, pd.DataFrame):
        if party.missing != "error":
            raise ConfigError(
                f"{party.name}: missing={party.missing!r} is of a frame's columns, and its rows "
                f"are a {type(rows).__name__}, taken as they are; fill them first, as "
                "numpy.nan_to_num(rows), or leave these rows and their IDs out"
            )
        return np.arange(len(party.ids))
    if party.missing != "drop":
        return np.arange(len(rows))
    words = _list_texts(rows)
    is_kept_N = np.ones(len(rows), dtype=bool)
    for name in rows.columns:
        is_kept_N &= ~is_empty(rows[name], BLANK if name in words else EMPTY)
    return np.flatnonzero(is_kept_N)


def _list_texts(rows: pd.DataFrame) -> list[Any]:
    """Return the columns of a frame that are no numbers."""
    return [name for name in rows.columns if not pd.api.types.is_numeric_dtype(rows[name])]


def _read_labels(active: Active, choice: _DataChoice) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the class of each row, `UNLABELLED` where there is none, and the classes.

    `choice`: how labels are read and split.

    Raises DataError: the labels are not one class a row, of two classes or more.
    """
    labels = active.labels
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu().numpy()
    if labels is None or isinstance(labels, str | bytes | Mapping | AbstractSet):
        raise DataError(
            f"{active.name}: its labels are a {type(labels).__name__}; expected a list, an array "
            "or a column of one class a row, as frame['label']"
        )
    if isinstance(labels, pd.DataFrame) or getattr(labels, "ndim", 1) > 1:
        raise DataError(
            f"{active.name}: its labels have the shape {np.shape(labels)}; expected one class a "
            "row, (N,): of one-hot labels give labels.argmax(1), of a frame its column"
        )
    column = pd.Series([*labels], dtype=object)
    lists = [value for value in column if isinstance(value, list | tuple | np.ndarray | Tensor)]
    if lists and not all(isinstance(value, Tensor) and not value.ndim for value in lists):
        raise DataError(
            f"{active.name}: {len(lists)} of its labels are lists; expected one class a row, (N,): "
            "of one-hot labels give labels.argmax(1)"
        )
    if len(column) != len(active.ids):
        raise DataError(
            f"{active.name}: {len(active.ids)} IDs, but {len(column)} labels; give one a row, None "
            "where it is not known"
        )
    blank = [value for value in column if isinstance(value, str) and not value.strip()]
    if blank:
        raise DataError(
            f"{active.name}: {len(blank)} of its labels are empty texts; give None where a label "
            "is not known, or name this class"
        )
    known = column.dropna()
    fractions = [
        value for value in known if isinstance(value, float | np.floating) and value % 1 != 0
    ]
    if fractions:
        raise DataError(
            f"{active.name}: its labels are numbers with fractions; `train` learns classes: give "
            "ranges of them, or use run with task: regression"
        )
    classes = _sort_classes(known, active.name, choice)
    places = {value: place for place, value in enumerate(classes)}
    codes = [places.get(value, UNLABELLED) for value in column.where(column.notna(), None)]
    return torch.tensor(codes, dtype=torch.int64), classes


_MARKERS = frozenset({"-1", "-99", "-100", "-999"})
"""Numbers that other libraries and tables write where a label is not known."""


def _sort_classes(known: "pd.Series", party: str, choice: _DataChoice) -> tuple[Any, ...]:
    """Return the classes of the known labels in order; the settings may list them.

    `choice`: how labels are read and split.

    Raises:
        DataError: there is one class alone, or one in several spellings. Warns
            SuspectColumnWarning: a class may stand for labels that are not known.
    """
    counts = known.value_counts()
    classes = sorted(counts.index.tolist(), key=lambda value: (str(type(value)), value))
    if len(classes) < 2:
        raise DataError(f"{party}: its labels are of {len(classes)} class(es), two are needed")
    if choice.classes:
        classes = _order_classes(classes, party, choice.classes)
    else:
        _require_clear_classes(counts, party)
    if choice.positive is None:
        return tuple(classes)
    first = [value for value in classes if choice.positive not in _spell_label(value)]
    if len(classes) != 2 or len(first) != 1:
        raise DataError(
            f"data={{'positive': {choice.positive!r}}}: expected one of two classes; the labels of "
            f"{party} are {', '.join(map(str, classes))}"
        )
    return (*first, *(value for value in classes if value not in first))


def _spell_label(value: Any) -> tuple[str, str]:
    """Return how a label may be written in the settings, such as 1.0 as "1.0" and "1"."""
    return str(value), format_cell(value)


def _order_classes(classes: Sequence[Any], party: str, listed: Sequence[str]) -> list[Any]:
    """Return the classes in the order of the list; listed ones without a row are kept as texts.

    Raises:
        DataError: labels lie outside the list.
    """
    outside = [str(value) for value in classes if not set(_spell_label(value)).intersection(listed)]
    if outside:
        raise DataError(
            f"{party}: its labels {', '.join(outside)} lie outside data={{'classes': "
            f"{[*listed]!r}}}; list all, or leave it out"
        )
    places = {text: value for value in classes for text in _spell_label(value)}
    return [places.get(name, name) for name in listed]


def _require_clear_classes(counts: "pd.Series", party: str) -> None:
    """Refuse classes in several spellings, as texts and numbers, and warn of words for nothing.

    `counts`: rows of each label. Raises DataError. Warns SuspectColumnWarning.
    """
    classes = counts.index.tolist()
    spellings = [str(value) for value in classes]
    if alike := sorted({text for text in spellings if spellings.count(text) > 1}):
        raise DataError(
            f"{party}: its labels write {', '.join(alike)} both as a number and as a text; "
            "give all in one way, as labels.astype(str)"
        )
    found = ", ".join(f"{value!s} ({count} rows)" for value, count in counts.items())
    if len({isinstance(value, str) for value in classes}) > 1:
        raise DataError(
            f"{party}: its labels are texts and numbers: {found}; give None where a label is not "
            "known, or all classes as texts, as [str(label) for label in labels]"
        )
    cells = [text for text, count in zip(spellings, counts, strict=True) for _ in range(count)]
    require_one_spelling(
        cells,
        where=f"{party}: the column of labels",
        remedy=f"say data={{'classes': {sorted(spellings)!r}}}",
    )
    warn_of_empty_words(cells, party=party, column="labels", are_empty=False)
    if len(classes) > 2 and (marks := sorted(_MARKERS.intersection(map(format_cell, classes)))):
        warnings.warn(
            f"{party}: its labels are of {len(classes)} classes, {found}; if {', '.join(marks)} "
            "stands where a label is not known, give None there, as "
            f"[None if label == {marks[0]} else label for label in labels]",
            SuspectColumnWarning,
            stacklevel=2,
        )


def _read_ids(party: Active | Passive) -> tuple[str, ...]:
    """Return a party's IDs as texts. Raises DataError: not a column of one ID a row."""
    own_ids: object = party.ids
    if isinstance(own_ids, AbstractSet):
        raise DataError(
            f"{party.name}: its IDs are a {type(party.ids).__name__}, which has no order; give the "
            "list or column whose k-th ID belongs to the k-th row"
        )
    if isinstance(own_ids, str):
        raise DataError(
            f"{party.name}: its IDs are the text {own_ids!r:.40}; expected one ID a row, as "
            f"frame[{own_ids!r:.40}]"
        )
    if isinstance(own_ids, pd.DataFrame):
        raise DataError(
            f"{party.name}: its IDs are a DataFrame; expected one ID a row: give its column, as "
            f"frame[{str(next(iter(own_ids.columns), 'id'))!r}]"
        )
    return tuple(id_texts(party.ids, party=party.name, subject="its IDs", strip=True, key="ids"))


def _make_table(
    party: Active | Passive,
    ids: tuple[str, ...],
    kept_rows: NDArray[np.int64],
    *,
    labels: Tensor | None,
    fitted: NDArray[np.int64] | None = None,
) -> PartyTable:
    """Return a party's rows with their IDs as texts, `ids`.

    `kept_rows`: positions of the rows that it trains with, (N,). `fitted`: those of these rows to
    which columns are fitted; None: all. `labels`: (N,), or None.
    """
    _require_one_order(party)
    _require_order_of_ids(party, ids)
    if isinstance(party.rows, pd.DataFrame):
        _require_rows(party, len(ids), party.rows)
        _refuse_ids_among_columns(party, ids, party.rows)
        ids = tuple(ids[row] for row in kept_rows)
        party = replace(party, rows=party.rows.iloc[kept_rows])
        if labels is not None:
            texts = [None if code == UNLABELLED else str(code) for code in labels.tolist()]
            warn_of_labels(party.rows, texts, source=party.name, label="labels")
    features, encoding = _read_rows(party, fitted)
    _require_rows(party, len(ids), features)
    return PartyTable(party.name, ids, features, labels, encoding)


def _require_order_of_ids(party: Active | Passive, ids: Sequence[str]) -> None:
    """Refuse rows or labels of pandas whose index holds the IDs in another order than `ids`.

    An index of numbers counts only where it has exactly the numbers of the IDs, since rows are
    counted by numbers, too.

    Raises:
        DataError: names the column.
    """
    labels = getattr(party, "labels", None)
    for what, column in (("rows", party.rows), ("labels", labels)):
        if not isinstance(column, pd.Series | pd.DataFrame) or len(column) != len(ids):
            continue
        index = column.index
        if isinstance(index, pd.RangeIndex | pd.MultiIndex) or _has_index(party.ids, index):
            continue
        names = [str(name).strip() for name in index]
        common = set(names).intersection(ids)
        counts = pd.api.types.is_numeric_dtype(index)
        is_of_ids = len(common) == len(set(ids)) if counts else bool(common)
        if is_of_ids and any(name != own for name, own in zip(names, ids, strict=True)):
            raise DataError(
                f"{party.name}: the index of its {what} holds {len(common)} of its IDs, in another "
                f"order than ids, and row k is joined to ID k; give ids={what}.index, or "
                f"{what}.loc[ids], or {what}.reset_index(drop=True) if the index is no ID"
            )


def _has_index(ids: Any, index: "pd.Index[Any]") -> bool:
    """Return whether the IDs are a column beside this index, so that one frame has both."""
    return isinstance(ids, pd.Series) and ids.index.equals(index)


def _require_one_order(party: Active | Passive) -> None:
    """Raise DataError if two of IDs, rows and labels have the same pandas index in other orders.

    They belong together by position; different indices are ignored.
    """
    columns = {"IDs": party.ids, "rows": party.rows, "labels": getattr(party, "labels", None)}
    indices = {
        name: column.index
        for name, column in columns.items()
        if isinstance(column, pd.Series | pd.DataFrame) and column.index.is_unique
    }
    for (first, index), (second, other_index) in combinations(indices.items(), 2):
        if len(index) == len(other_index) and not index.equals(other_index):
            if not index.difference(other_index).empty:
                continue  # not the same names, so rows are taken by position
            raise DataError(
                f"{party.name}: its {first} and its {second} have the same index in different "
                f"orders, and rows belong together by their places; give the {second} as "
                f"{second.lower()}.loc[{first.lower()}.index]"
            )


def _refuse_ids_among_columns(
    party: Active | Passive, ids: Sequence[str], rows: pd.DataFrame
) -> None:
    """Raise DataError if a column of a frame holds the IDs, which would be learnt as a feature."""
    for position, name in enumerate(rows.columns):
        pairs = zip(rows.iloc[:, position], ids, strict=True)
        if len(ids) > 1 and all(str(cell).strip() == own_id for cell, own_id in pairs):
            raise DataError(
                f"{party.name}: column {name} of its frame holds its IDs, from which nothing can "
                f"be learnt; leave it out, as rows.drop(columns={name!r})"
            )


def _require_rows(party: Active | Passive, ids: int, rows: Sized) -> None:
    """Raise DataError unless there are as many rows as IDs."""
    if len(rows) != ids:
        raise DataError(
            f"{party.name}: {ids} IDs, but {len(rows)} rows; give one ID a row, in their order"
        )


def _read_rows(
    party: Active | Passive, fitted_rows: NDArray[np.int64] | None
) -> tuple[Any, FeatureEncoding]:
    """Return a party's rows as features (N, *shape), and their encoding.

    `fitted_rows`: positions of the rows whose statistics a frame's encoding uses; None: all.
    """
    rows = party.rows
    if isinstance(party, Passive) and rows is None:
        # A black-box passive shows no rows; this column is a placeholder that nothing reads.
        return torch.zeros((len(party.ids), 1)), ArrayEncoding(row_shape=(1,))
    if isinstance(rows, pd.DataFrame):
        _require_columns(party, rows)
        words = _list_texts(rows)
        if party.missing == "error":  # of all rows, and not alone of those that it is fitted to
            refuse_empty_cells(rows, categorical=words, advice=Advice(party.name))
        known = rows if fitted_rows is None else rows.iloc[fitted_rows]
        encoding = fit_columns(known, categorical=words, missing=party.missing, source=party.name)
        return encoding.encode(rows, source=party.name), encoding
    if isinstance(rows, str | PurePath):
        rows = load_array(Path(rows), party=party.name)
    features = make_features(rows, party=party.name, workers=party.workers)
    return features, ArrayEncoding(row_shape=tuple(features.shape[1:]))


def _require_columns(party: Active | Passive, rows: pd.DataFrame) -> None:
    """Raise DataError if two columns of a frame have one name, or cells hold lists or objects."""
    if not rows.columns.is_unique:
        twice = rows.columns[rows.columns.duplicated()].unique().tolist()
        raise DataError(
            f"{party.name}: its frame has several columns called {', '.join(map(str, twice))}; "
            "give each a name of its own"
        )
    plain = (str, bytes, Number, np.generic, date, time, timedelta, type(None), type(pd.NA))
    for name in [name for name in rows.columns if pd.api.types.is_object_dtype(rows[name])]:
        for cell in rows[name]:
            if not isinstance(cell, plain):
                raise DataError(
                    f"{party.name}: column {name} of its frame holds a {type(cell).__name__}; "
                    "expected numbers or texts: of cells that hold rows of numbers give "
                    f"np.stack(frame[{name!r}]) as rows"
                )


_SMALL_OVERLAP = 0.1
_FEW_PEOPLE = 20


def _count_common(data: VerticalData, config: Config) -> int:
    """Return how many of the active's people all passives know, or one of them under pairwise
    alignment.

    Warns FewRowsWarning: these are few.
    """
    normalise = make_id_rules(config.alignment).normalise_text
    own_ids = set(map(normalise, data.table.ids))
    shared = [own_ids.intersection(map(normalise, table.ids)) for table in data.passives]
    is_pairwise = config.alignment.mode == "pairwise"
    common = set.union(*shared) if is_pairwise else set.intersection(*shared)
    own = len(data.table.ids)
    if 0 < len(common) < max(_FEW_PEOPLE, _SMALL_OVERLAP * own):
        who = "at least one passive" if is_pairwise else "all passives"
        parts = ", ".join(
            f"{table.name} {len(ids)}" for table, ids in zip(data.passives, shared, strict=True)
        )
        warnings.warn(
            f"{data.table.name}: {len(common)} of its {own} people are known to {who} ({parts}), "
            "so help comes from these alone, and can hardly be measured; check that all parties "
            "write IDs in one way, or hand in passives that know more of these people",
            FewRowsWarning,
            stacklevel=2,
        )
    return len(common)


def _make_solo(
    network: nn.Sequential | None, data: VerticalData, result: RunResult, config: Config
) -> SoloModel | None:
    """Return the active's model with the encoding of its rows; None: it has no model of its own."""
    if network is None:
        return None
    return SoloModel(
        network=network,
        classes=data.classes,
        encoding=data.table.encoding,
        card={},
        threshold=result.threshold,
        task=TASKS[config.task].from_targets(data.targets),
    )


def _compare_locally(
    result: TrainingResult, config: Config, data: VerticalData, fresh: Mapping[str, OwnCode]
) -> TrainingResult:
    """Return the result with the measures of what the active achieves without passives: by its own
    network, and by local models.

    Args:
        result: result of the run with passives.
        config: settings of that run.
        data: all parties' tables.
        fresh: the active's code with untrained copies of its networks, by the active's name.
    """
    single = replace(data, passives=())
    local_settings = config.model_dump(mode="json", exclude_defaults=True)
    local_settings = {
        key: local_settings[key]
        for key in ("name", "seed", "data", "train", "model")
        if key in local_settings
    }
    local_settings |= {"method": {"name": find_method_alone()}, "guard": {"mechanism": "none"}}
    local_settings["secure_sum"] = {"scheme": "plain"}
    local_settings["train"] = {**local_settings.get("train", {}), "labels": "joint"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoHelpWarning)
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        local_result = run_in_memory(
            Config.model_validate(local_settings), None, data=single, code=dict(fresh)
        )
    score = next(iter(local_result.measures.values()))[local_result.measure]
    result = replace(result, alone=score)
    is_lazily_read = is_lazy(data.table.features) and not is_sampled(data.table.features)
    if is_lazily_read or len(data.table.shape) > 1:
        reason = "the local models, which read flat rows of numbers in memory"
        return replace(result, not_tried=reason)
    from apfed_experiments.solo import find_best_local

    ours = config.model_copy(update={"model": ModelSettings()})
    name, value = find_best_local(ours, data)
    return replace(result, best_local=value, best_local_name=name)
