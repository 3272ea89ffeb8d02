"""The arguments of `train`: the parties, their losses, and the guard of what the active sends.

Letters: N rows, B batch, D numbers of a representation, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from secure_apfed.errors import ConfigError
from secure_apfed.learning.black_box import GradientFunction
from secure_apfed.learning.descent import MakeOptimizer, MakeScheduler
from secure_apfed.learning.own_code import LossSource, ModuleSource
from secure_apfed.settings.data import Missing


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """A guard that clips representations and draws fresh noise for every release of a row.

    It is the section `guard` of a run's YAML file, as an object.

    Attributes:
        epsilon, delta: differential privacy of all releases of one row together.
        sigma: standard deviation of the noise, in place of epsilon.
        clip: largest L2 norm of a row's representation before the noise.

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
        """Return the section `guard` of a run's settings, which leaves delta to the run."""
        return {
            "mechanism": self.mechanism,
            "epsilon": self.epsilon,
            "sigma": self.sigma,
            "clip": self.clip,
        }


@dataclass(frozen=True, kw_only=True)
class FrozenGaussian(Gaussian):
    """A guard that clips representations and draws each row's noise only once.

    A row is released with the same noise in every epoch, so that many epochs reveal no more than
    the first.

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

    z is the representation of the same people that the active sends.

    Attributes:
        decoder: module or function z (B, D) -> the passive's rows; None: a built-in perceptron.

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
    """The contrastive loss of APFed-C, Eqs. (14) to (16).

    It is low if the passive's encoding of a person is more similar to z of the same person than to
    z of others. z is the representation that the active sends.

    Attributes:
        encoder: module or function from the passive's rows to (B, any size); None: a built-in
            perceptron, or convolutions for images.
        temperature: tau of the paper, above 0, by which similarities are divided.

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
        loss: `Reconstruction()`, `Contrastive()`, or any module or function (z, own rows) ->
            scalar. z is the representation that the active sends; the passive contributes the
            loss's gradient with respect to z.
        weight: lambda of APFed's Eq. (8), by which the contribution is multiplied.
        row_wise: for a user-defined loss: whether a row's gradient depends on that row alone.
        encoder: own rows -> the representation that it sends, for methods that sum or concatenate
            representations (TVFL, split networks).
        gradient: a black-box function of any framework that replaces a loss, (step, rows, z) ->
            gradient (`secure_apfed.learning.black_box`). `rows` are positions in `ids`, (B,) int64;
            z is an array (B, *shape). It returns an array or a tensor of the same shape, with the
            gradient of each row's own loss.
        optimizer: function that makes its optimizer, such as `torch.optim.AdamW`; None: the
            argument `optimizer` of `train`.
        scheduler: function that makes its optimizer's scheduler, in the form that `train` takes;
            None: the argument `scheduler` of `train`.
        workers: threads that read a data set.
        missing: what to do with empty cells of a frame: "error" refuses them, "mean" replaces them
            by the column's mean or by no category, "drop" leaves the row out.

    Raises:
        ConfigError: a `gradient` is given together with a loss, an encoder, an optimizer or a
            scheduler, which it replaces; or neither rows nor a `gradient` are given.

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
    gradient: GradientFunction | None = field(default=None, kw_only=True)
    optimizer: MakeOptimizer | None = field(default=None, kw_only=True)
    scheduler: MakeScheduler | None = field(default=None, kw_only=True)
    workers: int = field(default=4, kw_only=True)
    missing: Missing = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        """Check the combination of rows, gradient and other code.

        If `loss` is a class, it is replaced by an object with its defaults.

        Raises ConfigError: it has neither rows nor a gradient, or a gradient beside other code.
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
        is_given = {
            "loss": self.loss != Reconstruction(),  # another one than the default
            "encoder": self.encoder is not None,
            "optimizer": self.optimizer is not None,
            "scheduler": self.scheduler is not None,
        }
        given_names = [name for name, given in is_given.items() if given]
        if given_names:
            raise ConfigError(
                f"{self.name}: gradient is given beside {' and '.join(given_names)}; what "
                "computes its own gradient trains itself: leave one of the two out"
            )


@dataclass(frozen=True)
class Active:
    """The party that has the labels, and the model afterwards.

    Attributes:
        name, ids, rows, optimizer, scheduler, workers, missing: the same as of a `Passive`.
        labels: N classes (numbers or texts); None or NaN for an unknown label.
        encoder: own rows -> representation, trained in place; None: a built-in network.
        head: representation -> K class scores, trained in place; None: one linear layer.
        projection: representation -> the D numbers that are sent (`model={"projection": D}`),
            trained in place; None: one linear layer.

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
