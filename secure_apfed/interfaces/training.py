"""Secure training with your own networks, losses and data: one call, all parties in this process.

`train` makes a run of what it is given, the same run that a YAML file describes: alignment, secure
sum, guard, accounting and report are those of every run. It returns your own modules, trained.
Part of the composition root: `secure_apfed` gives its names to others, no module imports it.

Letters: N rows, B batch, D numbers of a representation, K classes.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from itertools import combinations
from numbers import Number
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apfed_protocols.errors import UnsafeChoiceWarning
from apfed_protocols.ids import id_texts
from apfed_protocols.psi import IntersectionName
from secure_apfed.base.files import PathLike
from secure_apfed.base.seeds import isolate_torch_modes
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.data.encoding import ArrayEncoding, FeatureEncoding, fit_columns
from secure_apfed.data.labels import UNLABELLED
from secure_apfed.data.lazy_rows import is_lazy, is_sampled
from secure_apfed.data.partition import choose_labelled_rows, split_rows
from secure_apfed.data.records import PartyTable, VerticalData
from secure_apfed.data.row_sources import load_array, make_features
from secure_apfed.errors import ConfigError, DataError, ModelError, NoHelpWarning
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
from secure_apfed.methods import METHODS
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import Recording, RunResult, load_recording
from secure_apfed.runs.run import run_in_memory
from secure_apfed.settings.data import TABLES
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
    """A guard that draws fresh noise for every release of a row; see `guard` of a run's YAML file.

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
    """A guard that draws each row's noise once: many epochs show no more than its first release.

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
        name: of the party.
        ids: of its rows, N texts or numbers, distinct.
        rows: array or tensor (N, *shape), a frame of N rows, a file of an array (.npy, .npz,
            .safetensors), or a map-style data set of N items, as `ImageFiles`; a party with a
            `gradient` may leave them out.
        loss: `Reconstruction()`, `Contrastive()`, or any (z, own rows) -> scalar, as a module or a
            function. Gradients through z are what it contributes.
        weight: lambda of Eq. (8).
        row_wise: for its own loss: whether a row's gradient depends on that row alone.
        encoder: own rows -> the representation that it sends, where a method sums or concatenates
            representations (TVFL, split networks).
        gradient: in place of a loss, a black-box function of any framework, (step, rows, z) ->
            gradient (`secure_apfed.learning.black_box`). `rows` are positions in `ids`, (B,) int64;
            z is an array (B, *shape); it returns an array or a tensor of that shape, of each row
            the gradient of that row's own loss.
        optimizer: as `torch.optim.AdamW`; None: that of `train`.
        scheduler: of its optimizer, as `train` takes it; None: that of `train`.
        workers: threads that read a data set.

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
        name, ids, rows, optimizer, scheduler, workers: as a `Passive`'s.
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


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of `train`: trained networks, measures and comparisons.

    Attributes:
        networks: rows -> class scores (B, K), the active's own modules; None: every party is needed
            to predict.
        classes: the labels in the order of the scores.
        run: measures, bytes, privacy and promises, as `secure_apfed.run` returns them.
        alone: the headline measure of the active's own network, trained alone in the same way, on
            the same test rows; None: not measured.
        best_local, best_local_name: that of the best local model by validation; None: not tried.
        not_tried: the local models that were not tried, with the reason.
        attacks: results of the requested attacks.
        test_rows: positions of the active's test rows, int64.
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

    @property
    def model(self) -> nn.Sequential:
        """The network that was measured, rows -> class scores (B, K).

        Its two parts are the active's own modules, unless `model_is` says otherwise: where a
        student learns from votes, validation may choose a local model, or an average with copies
        of the modules.

        Raises ModelError: every party is needed to predict.
        """
        if self.networks is None:
            raise ModelError(
                f"method {self.run.method} needs every party to predict, so the active keeps no "
                "model of its own; train with apfed, apfed_r or apfed_c"
            )
        return self.networks

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
        """The epsilon spent, by what it protects; infinite: no guarantee."""
        return list_epsilons(self.run.promises)

    @property
    def report(self) -> str:
        """The lines of a text report: what was measured, spent, and not tried."""
        lines = [f"{self.run.measure}: {self.score:.3f} on {len(self.test_rows)} test rows"]
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
        lines += [
            f"{title}: epsilon {value:g}" if math.isfinite(value) else f"{title}: no guarantee"
            for title, value in self.epsilon.items()
        ]
        lines += describe_black_boxes(self.black_boxes)
        lines += self._describe_attacks()
        lines.append(f"bytes sent: {self.run.wire_bytes:,}")
        return "\n".join(lines)

    def _describe_attacks(self) -> list[str]:
        """Return the result of attacks by direction, or that none was configured."""
        if not self.attacks:
            return ["attacks: none was asked for, so nothing is known of what can be read"]
        from apfed_attacks.headlines import headlines_by_direction

        headlines = headlines_by_direction(self.attacks, self.run.recording.config)
        return [f"{headline.direction.title}: {headline.text}" for headline in headlines]


class PredictingNetwork(nn.Sequential):
    """An encoder and a head, which take rows of any precision."""

    def forward(self, rows_B: Tensor) -> Tensor:
        """Return class scores (B, K); rows are first converted to the networks' precision."""
        tensors = [*self.parameters(), *self.buffers()]
        dtypes = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
        dtype = next(dtypes, rows_B.dtype)
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


@isolate_torch_modes()
def train(
    active: Active,
    passives: Sequence[Passive] = (),
    *,
    method: str | Mapping[str, Any] = "apfed",
    alignment: IntersectionName | Mapping[str, Any] = "auto",
    secure_sum: SchemeName | Mapping[str, Any] = "ckks",
    guard: Gaussian | Mapping[str, Any] | None = None,
    epochs: int = 20,
    batch_size: int = 128,
    optimizer: MakeOptimizer | Literal["sgd", "adam", "adamw"] = "sgd",
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
        optimizer: of every party without its own: sgd, adam, adamw, or a function of the list of
            parameters. One with an argument `modules` takes the party's modules by name (encoder,
            head and projection, or objective), for groups.
        scheduler: of every party without its own: a function of the optimizer that makes a
            `torch.optim.lr_scheduler.LRScheduler`.
        scheduler_every: "epoch", as most loops have it, or after how many of a party's own steps
            its scheduler takes one. `ReduceLROnPlateau` reads the party's mean loss of an epoch.
        labelled: how many training rows keep their label, or which share; None: all that have one.
        test_fraction: of the active's rows with a label, which measure alone.
        seed: of the split, the initial weights that are made here, and the order of batches.
        folder: of the run, for its checkpoints and reports; None: nothing is written.
        resume: go on from the newest checkpoint in `folder`, with the same arguments; the modules
            take its weights.
        baselines: whether to train the active's own network alone, and local models.
        attacks: to mount on what all parties sent, as the section `attacks`: names, "all", or
            {"name": ..., "options": {...}}. They hold the aligned rows of data sets in memory.
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
    parties: list[Active | Passive] = [active, *passives]
    shared = OwnSteps(
        optimizer=None if isinstance(optimizer, str) else optimizer,
        scheduler=scheduler,
        every=scheduler_every,
    )
    code = {party.name: _make_code(party, shared) for party in parties}
    refuse_shared_parameters(code)
    data, classes = _make_data(
        active, passives, labelled=labelled, test_fraction=test_fraction, seed=seed
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
        train={
            "epochs": epochs,
            "batch_size": batch_size,
            "evaluate_every": epochs,
            **({"optimizer": optimizer} if isinstance(optimizer, str) else {}),
            **settings.pop("train", {}),
        },
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
        test_rows=data.test_rows,
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

    Raises DataError: they have other rows. Others as `load_recording`.
    """
    config = RunFolder(Path(folder)).load_config()
    data, _ = _make_data(
        active,
        passives,
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


def _make_code(party: Active | Passive, shared: OwnSteps) -> OwnCode:
    """Return a party's own networks, loss, optimizer and scheduler.

    `shared`: the optimizer and scheduler of parties without their own.

    Raises ConfigError: a part is neither a module nor a function; names the party.
    """
    parts: dict[str, Any] = {
        "encoder": party.encoder,
        "optimizer": party.optimizer or shared.optimizer,
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
    """Raise ConfigError if a setting of the section `train` or `model` is given as an argument.

    The error names the section. Other unknown names are reported by `Config`.

    `settings`: the further keyword arguments of `train`, by name.
    """
    for name, value in settings.items():
        if name in Config.model_fields:
            continue
        key = "learning_rate" if name == "lr" else name
        for section, kind in (("train", TrainSettings), ("model", ModelSettings)):
            if key in kind.model_fields:
                raise ConfigError(
                    f"train: {name} is no argument; say {section}={{{key!r}: {value!r}}}"
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
    settings_of_run |= settings
    model = dict(settings.get("model", {}))
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
    return load_config_text(json.dumps(settings_of_run, default=str), source="train", own=True)


def _require_used(
    passives: Sequence[Passive], settings: type[MethodSettings], *, title: str
) -> None:
    """Raise ConfigError if a passive brings an encoder or a loss that the method does not use.

    `settings`: the method's settings class, with its facts. `title`: its name, for the error.
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

    Raises ConfigError: it brings a gradient, and passives have no losses.
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
    *,
    labelled: float | None,
    test_fraction: float,
    seed: int,
) -> tuple[VerticalData, tuple[Any, ...]]:
    """Return all parties' tables with the active's split, and the classes in order.

    For the arguments see `train`.
    """
    labels_N, classes = _read_labels(active)
    known = np.flatnonzero(labels_N.numpy() != UNLABELLED)
    _, test_positions = split_rows(labels_N.numpy()[known], test_fraction, seed=seed)
    test_rows = known[test_positions]
    train_rows = np.setdiff1d(np.arange(len(labels_N)), test_rows)
    chosen = choose_labelled_rows(labels_N.numpy()[train_rows], labelled, seed=seed)
    data = VerticalData(
        table=_make_table(active, labels=labels_N, fitted_rows=train_rows),
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(test_rows),
        classes=tuple(str(name) for name in classes),
        labelled=None if chosen is None else torch.from_numpy(np.sort(train_rows[chosen])),
        passives=tuple(_make_table(party, labels=None) for party in passives),
    )
    return data, classes


def _read_labels(active: Active) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the class index of each row (N,), `UNLABELLED` without a label, and the classes.

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
    classes = sorted(known.unique().tolist(), key=lambda value: (str(type(value)), value))
    if len(classes) < 2:
        raise DataError(
            f"{active.name}: its labels are of {len(classes)} class(es), two are needed"
        )
    spellings = [str(value) for value in classes]
    if alike := sorted({text for text in spellings if spellings.count(text) > 1}):
        raise DataError(
            f"{active.name}: its labels write {', '.join(alike)} both as a number and as a text; "
            "give all in one way, as labels.astype(str)"
        )
    index_of_class = {value: index for index, value in enumerate(classes)}
    cells = column.where(column.notna(), None)
    indices = [index_of_class.get(value, UNLABELLED) for value in cells]
    return torch.tensor(indices, dtype=torch.int64), tuple(classes)


def _make_table(
    party: Active | Passive,
    *,
    labels: Tensor | None,
    fitted_rows: NDArray[np.int64] | None = None,
) -> PartyTable:
    """Return a party's rows with their IDs as texts.

    `labels`: class indices (N,); None: the party has none. `fitted_rows`: positions of the rows
    whose statistics the columns' encoding uses; None: all.

    Raises DataError: IDs or rows do not fit.
    """
    if isinstance(party.ids, AbstractSet):
        raise DataError(
            f"{party.name}: its IDs are a {type(party.ids).__name__}, which has no order; give the "
            "list or column whose k-th ID belongs to the k-th row"
        )
    own_ids: object = party.ids
    if isinstance(own_ids, pd.DataFrame):
        raise DataError(
            f"{party.name}: its IDs are a DataFrame; expected one ID a row: give its column, as "
            f"frame[{str(next(iter(own_ids.columns), 'id'))!r}]"
        )
    ids = tuple(id_texts(party.ids, party=party.name, subject="its IDs", strip=True, key="ids"))
    _require_one_order(party)
    if isinstance(party.rows, pd.DataFrame):
        _require_rows(party, len(ids), party.rows)
        _refuse_ids_among_columns(party, ids, party.rows)
    features, encoding = _read_rows(party, fitted_rows)
    _require_rows(party, len(ids), features)
    return PartyTable(party.name, ids, features, labels, encoding)


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
        text_columns = [
            name for name in rows.columns if not pd.api.types.is_numeric_dtype(rows[name])
        ]
        fitted = rows if fitted_rows is None else rows.iloc[fitted_rows]
        encoding = fit_columns(fitted, categorical=text_columns, source=party.name)
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
    for name in rows.select_dtypes(object).columns:
        for cell in rows[name]:
            if not isinstance(cell, plain):
                raise DataError(
                    f"{party.name}: column {name} of its frame holds a {type(cell).__name__}; "
                    "expected numbers or texts: of cells that hold rows of numbers give "
                    f"np.stack(frame[{name!r}]) as rows"
                )


def _compare_locally(
    result: TrainingResult, config: Config, data: VerticalData, fresh: Mapping[str, OwnCode]
) -> TrainingResult:
    """Return the result with the measures of what the active achieves without passives: by its own
    network, and by local models.

    Args:
        result: of the run with passives.
        config: that run's settings.
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
