"""Networks of the papers and for tables. A new family is one class and one line in `NETWORKS`.

A family makes three modules that fit together: an encoder (features -> representation),
a head (representation -> class scores) and a decoder (representation -> another party's
features). Run by: the active (encoder, head) and the passives (decoder or encoder).

Letters: B batch, N rows, F features, D numbers of a representation or random features, K classes,
T steps and C channels of a sequence.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import pack_padded_sequence

from secure_apfed.base.seeds import draws_nothing, limit_threads
from secure_apfed.errors import ApfedError, ModelError
from secure_apfed.networks.rank import compute_number_limit, count_columns
from secure_apfed.settings.training import MAX_PARAMETERS, ModelSettings

Shape = tuple[int, ...]
_PADDING = 1
_SAMPLE = 300  # rows whose distances set a kernel's width
_MIN_SCALE = 1e-6  # least deviation of a column that counts as varying
_WORK_PER_THREAD = 200_000_000
"""Multiplications of a step for which one more thread pays off: about ten milliseconds."""
_AUTO: Mapping[int, tuple[str, int]] = {1: ("conv_mnist", 7), 3: ("conv_cifar", 8)}
"""Automatic networks by channels of an image: a network's name, and the smallest side, in pixels,
of which its convolutions leave a map (three rows for MNIST's two layers, one for CIFAR's three)."""


def _make_linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer of at most `MAX_PARAMETERS`. Raises ModelError: more parameters would
    be needed.
    """
    check_layer_size(inputs, outputs)
    return nn.Linear(inputs, outputs, bias=bias)


def check_layer_size(inputs: int, outputs: int) -> None:
    """Raise ModelError if a layer would have more parameters than `MAX_PARAMETERS`.

    Called before memory is allocated for it.

    `inputs`, `outputs`: width of the layer's input and output.
    """
    if inputs * outputs > MAX_PARAMETERS:
        raise ModelError(
            f"a layer from {inputs:,} to {outputs:,} numbers has {inputs * outputs:,} parameters, "
            f"expected {MAX_PARAMETERS:,} at most; take narrower layers in model, or fewer "
            "columns or classes"
        )


class NetworkFamily(Protocol):
    """A family of networks that fit together; shapes are those of one row, without the batch."""

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return the network features -> representation."""

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return the network from a flattened representation of `size` numbers to scores."""

    def make_decoder(
        self, representation: Shape, features: Shape, settings: ModelSettings
    ) -> nn.Module:
        """Return the network representation -> features of another party, the encoder's mirror."""


def output_shape(module: nn.Module, features: Shape) -> Shape:
    """Return the shape of a network's output for one row, found by two rows of zeros.

    Parameters of lazy modules, which wait for a first batch, are initialised by this.

    `features`: the shape of one row.

    Raises ModelError: the network does not take such rows, or returns no row of floats for each.
    """
    kind = type(module).__name__
    modes = {part: part.training for part in module.modules()}
    module.eval()
    weights: Iterator[Any] = module.parameters()
    initialised = (weight for weight in weights if not is_lazy(weight))
    reference = next(initialised, torch.empty(0))  # its type and device are those of the rows
    try:
        with torch.no_grad():
            result = module(reference.new_zeros((2, *features)))
    except (ApfedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{kind} does not take rows of shape {features}: {type(error).__name__}: {error}"
            f"{_name_dtypes(module)}; choose another model.network or another partition, or hand "
            "in a network of such rows, whose forward takes them alone"
        ) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
    if not isinstance(result, Tensor) or result.ndim < 2 or len(result) != 2:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ModelError(
            f"a network makes one tensor (B, ...) of rows (B, ...), with one row for each; of two "
            f"rows of shape {features} {kind} made {got}"
        )
    if not result.is_floating_point():
        raise ModelError(
            f"a network makes floating-point numbers, which have gradients; {kind} made "
            f"{result.dtype}: leave out what rounds, counts or makes complex numbers"
        )
    shape: Shape = tuple(result.shape[1:])
    return shape


def _name_dtypes(module: nn.Module) -> str:
    """Return the part of an error that names the types of the parameters; "" for a single one."""
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in module.parameters()})
    if len(dtypes) < 2:
        return ""
    return f" (its parameters are {' and '.join(dtypes)}: convert it, as with .float())"


def require_scores(
    head: nn.Module, representation: Shape, outputs: int, *, classes: Sequence[str] = ()
) -> None:
    """Refuse a head that does not return `outputs` numbers for a row.

    `representation`: shape of the head's input for one row. `classes`: names of the classes, for
    the error; empty: they are not known.

    Raises ModelError: names both shapes.
    """
    shape = output_shape(head, representation)
    if shape != (outputs,):
        what = f"a score for each of the classes {', '.join(classes)}"
        if not classes:
            what = "a score for each class or the number to predict"
        raise ModelError(
            f"it makes {shape} of a row, expected ({outputs},), {what}; end it with a layer of "
            "that width, or mend labels that are no classes"
        )


def make_projection(size: int, representation: Shape) -> nn.Module:
    """Return a linear projection of an encoder's output, of shape `representation`, to `size`
    numbers.
    """
    return nn.Sequential(nn.Flatten(), _make_linear(math.prod(representation), size))


def make_two_layer_head(size: int, width: int, classes: int, dropout: float) -> nn.Module:
    """Return fc(size, width), ReLU, dropout, fc(width, classes), as in Tables 3 and 4."""
    layers = (
        _make_linear(size, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        _make_linear(width, classes),
    )
    return nn.Sequential(nn.Flatten(), *layers)


@dataclass(frozen=True, kw_only=True)
class Convolutional:
    """The papers' networks: convolutions, a ReLU after each, no pooling; a decoder mirrors them.

    Source: APFed, Table 3 (MNIST, FMNIST) and Table 4 (CIFAR). Deviations from the printed tables
    follow the authors' release: Table 3's "31" is 32; padding is 1 and stride 1 but for the second
    CIFAR layer (2). Where the representation is a projection, a linear layer first restores the
    map.

    Attributes:
        channels: number of channels of the image, then after each layer.
        kernels, strides: kernel size and stride of each layer.
        head_width: width of the head's hidden layer.
        last_relu: whether the decoder ends in a ReLU (release: MNIST yes, CIFAR no).
    """

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    head_width: int
    last_relu: bool

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return the network from an image (channels, height, width) to its feature map."""
        self._check_image(features)
        layers: list[nn.Module] = []
        for (inputs, outputs), kernel, stride in zip(
            pairwise(self.channels), self.kernels, self.strides, strict=True
        ):
            layers += [nn.Conv2d(inputs, outputs, kernel, stride, _PADDING), nn.ReLU()]
        return nn.Sequential(*layers)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return fully connected layers (size, head_width) and (head_width, classes)."""
        return make_two_layer_head(size, self.head_width, classes, settings.dropout)

    def make_decoder(
        self, representation: Shape, features: Shape, settings: ModelSettings
    ) -> nn.Module:
        """Return the encoder's mirror: transposed convolutions from its feature map to the image.

        `representation`: the shape of a feature map, or (D,) of a projection.
        """
        self._check_image(features)
        map_shape = output_shape(self.make_encoder(features, settings), features)
        layers: list[nn.Module] = []
        if len(representation) == 1:  # a projection, from which the map is restored first
            layers += [_make_linear(representation[0], math.prod(map_shape)), nn.ReLU()]
            layers += [nn.Unflatten(1, map_shape)]
        convolutions = list(zip(pairwise(self.channels), self.kernels, self.strides, strict=True))
        for (inputs, outputs), kernel, stride in reversed(convolutions):
            layers += [nn.ConvTranspose2d(outputs, inputs, kernel, stride, _PADDING), nn.ReLU()]
        return nn.Sequential(*(layers if self.last_relu else layers[:-1]))

    def _check_image(self, features: Shape) -> None:
        """Raise ModelError unless rows are images with the family's number of channels."""
        if len(features) != 3 or features[0] != self.channels[0]:
            raise ModelError(
                f"these convolutions read images of {self.channels[0]} channel(s), (channels, "
                f"height, width), got rows of shape {features}; choose another model.network"
            )


class Perceptron:
    """A family of fully connected layers with a ReLU between them, for tables and images too small
    to convolve.

    The papers test images only; these are ours, in the same scheme.
    """

    activation: ClassVar[type[nn.Module]] = nn.ReLU

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return features -> `settings.representation_size` numbers, through fully connected
        layers.
        """
        widths = (math.prod(features), *settings.hidden, settings.representation_size)
        return nn.Sequential(
            nn.Flatten(), *_stack_layers(widths, self.activation), self.activation()
        )

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return fc(size, first hidden width), ReLU, dropout, fc(that width, K)."""
        width = settings.hidden[0] if settings.hidden else settings.representation_size
        return make_two_layer_head(size, width, classes, settings.dropout)

    def make_decoder(
        self, representation: Shape, features: Shape, settings: ModelSettings
    ) -> nn.Module:
        """Return layers of the encoder's widths in reverse order, without a final activation.

        Features may be negative.
        """
        widths = (math.prod(representation), *reversed(settings.hidden), math.prod(features))
        return nn.Sequential(
            nn.Flatten(), *_stack_layers(widths, self.activation), nn.Unflatten(1, features)
        )


def _stack_layers(widths: tuple[int, ...], activation: type[nn.Module]) -> list[nn.Module]:
    """Return linear layers with an activation between each two.

    `widths`: numbers that the first layer reads, then that each layer writes.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [_make_linear(inputs, outputs), activation()]
    return layers[:-1]


class Linear(Perceptron):
    """A linear encoder and a linear head, one layer each, with the perceptron's decoder.

    For few labels, for which deeper networks have too many weights. Together the parties' layers
    are a regularised softmax regression on all features.
    """

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return one linear layer from the flattened features to the representation."""
        return nn.Sequential(
            nn.Flatten(), _make_linear(math.prod(features), settings.representation_size)
        )

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        return nn.Sequential(nn.Flatten(), _make_linear(size, classes))


@draws_nothing
class Intercept(nn.Module):
    """A head that adds an intercept to each number of the linear predictor, and returns scores.

    Args:
        size: D, numbers of the linear predictor of a row.
        outputs: K scores: K = D; or K = D + 1, where the first class is the reference, of score 0.
    """

    def __init__(self, size: int, outputs: int) -> None:
        """Start at an intercept of 0."""
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))
        self._has_reference = outputs == size + 1

    def forward(self, eta_BD: Tensor) -> Tensor:
        scores_BD = eta_BD.flatten(1) + self.bias
        return F.pad(scores_BD, (1, 0)) if self._has_reference else scores_BD


@draws_nothing
class LinearPredictor(nn.Sequential):
    """An encoder x -> eta = x W, without an intercept, whose coefficients W start at 0.

    Args:
        features: F, numbers of a flattened row x.
        size: D, numbers of the linear predictor eta of a row.
    """

    def __init__(self, features: int, size: int) -> None:
        """Start with coefficients of 0."""
        layer = _make_linear(features, size, bias=False)
        nn.init.zeros_(layer.weight)
        super().__init__(nn.Flatten(), layer)

    @property
    def coefficients(self) -> Tensor:
        """The coefficients, (D, F)."""
        layer = self[1]
        assert isinstance(layer, nn.Linear)
        return layer.weight


class GeneralisedLinear(Perceptron):
    """A generalised linear model: each party's columns times coefficients, and an intercept.

    The representation is the linear predictor eta itself: one number for two classes or for a
    numeric label or count, and K numbers for K > 2 classes. Weights start at 0. The L2 term leaves
    the intercept out.
    """

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        return LinearPredictor(math.prod(features), settings.representation_size)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return an `Intercept`. Raises ModelError: `size` is not that of the linear predictor."""
        required = 1 if classes <= 2 else classes
        if size != required:
            raise ModelError(
                f"model.representation: network glm sends the linear predictor of a row, here "
                f"{required} number(s) for {classes} output(s), and {size} are configured; say "
                f"model.representation: {required}"
            )
        return Intercept(size, classes)


class Identity(Perceptron):
    """The features, flattened, and one layer, where a method finds its weights by an equation."""

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        return nn.Flatten()

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        return _make_linear(size, classes, bias=False)


class Standardised(nn.Module):
    """The base of networks that read z = (x - centre) / scale, the standardised rows.

    Here z is not a representation that is sent. `_fit_scale` computes centre (the mean) and scale
    (the standard deviation) from a party's own rows.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, features: int, dtype: torch.dtype = torch.float32) -> None:
        """Register centre and scale, which leave rows unchanged until they are fitted."""
        super().__init__()
        self.register_buffer("centre", torch.zeros(features, dtype=dtype))
        self.register_buffer("scale", torch.ones(features, dtype=dtype))

    def _fit_scale(self, rows_NF: Tensor) -> None:
        """Set centre and scale by these rows; constant columns become 0 in every row."""
        self.centre = rows_NF.mean(0)
        scale = rows_NF.std(0, correction=0)
        # A constant column carries no information, so z stays 0 even if it differs later.
        self.scale = torch.where(scale < _MIN_SCALE, math.inf, scale)

    def standardise_rows(self, features_B: Tensor) -> Tensor:
        return (features_B.flatten(1) - self.centre) / self.scale


@draws_nothing
class RandomFeatures(Standardised):
    """A map x -> (1, z / sqrt F, sqrt(2 / D) cos(z W / width + b)), with z the standardised x.

    The cosines are random Fourier features of a Gaussian kernel (Rahimi and Recht 2007, Random
    Features for Large-Scale Kernel Machines, Section 3); the output also has a constant and the
    features themselves. W and b come from torch's generator.

    Nothing of it is trained. `fit` takes centre, scale and width from a party's own rows; without
    it z is x, and the width the expected distance of two rows of standard normal numbers.

    Args:
        features: F, numbers of a flattened row.
        size: D, number of cosines.
    """

    width: Tensor
    directions: Tensor
    phases: Tensor

    def __init__(self, features: int, size: int) -> None:
        """Draw directions and phases of the cosines."""
        check_layer_size(features, size)
        super().__init__(features)
        self.register_buffer("width", torch.tensor(math.sqrt(2 * features)))
        self.register_buffer("directions", torch.randn(features, size))
        self.register_buffer("phases", 2 * math.pi * torch.rand(size))

    def fit(self, features_NF: Tensor) -> None:
        """Set centre and scale by these rows (N, F), and the kernel width to the median distance
        between about `_SAMPLE` of them.
        """
        rows_NF = features_NF.flatten(1).to(self.centre)
        self._fit_scale(rows_NF)
        step = max(1, len(rows_NF) // _SAMPLE)
        sample_NF = (rows_NF[::step] - self.centre) / self.scale
        distances = torch.pdist(sample_NF)
        distances = distances[distances > 0]
        if len(distances):
            self.width = distances.median()

    def forward(self, features_B: Tensor) -> Tensor:
        """Return (1, z / sqrt F, cosines) of each row, (B, 1 + F + D)."""
        z_BF = self.standardise_rows(features_B)
        size = len(self.phases)
        waves_BD = torch.cos(z_BF @ self.directions / self.width + self.phases)
        ones_B1 = torch.ones_like(z_BF[:, :1])
        scaled_BF = z_BF / math.sqrt(z_BF.shape[1])
        return torch.cat([ones_B1, scaled_BF, math.sqrt(2 / size) * waves_BD], dim=1)


class RandomFeatureFamily(Perceptron):
    """A family of random features of the rows, and one linear layer; the constant is its bias."""

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return `RandomFeatures` with `settings.random_features` cosines."""
        return RandomFeatures(math.prod(features), settings.random_features)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        return nn.Sequential(nn.Flatten(), _make_linear(size, classes, bias=False))


@draws_nothing
class Projection(Standardised):
    """A map x -> z W / sqrt(F D), float64, with z the standardised x: rows are about 1 long.

    Johnson and Lindenstrauss 1984 (Extensions of Lipschitz mappings into a Hilbert space). Nothing
    of it is trained; W comes from torch's generator. It is linear: D numbers at or above the rank
    of x determine x, so `fit` refuses a D above half of the rank.

    Args:
        features: F, numbers of a flattened row.
        numbers: D, numbers of the projection.
        allow_reading_all: whether `fit` accepts any D.
    """

    directions: Tensor

    def __init__(self, features: int, numbers: int, *, allow_reading_all: bool = False) -> None:
        """Draw the random directions W / sqrt(F D)."""
        check_layer_size(features, numbers)
        super().__init__(features, torch.float64)
        self._allow_reading_all = allow_reading_all
        directions = torch.randn(features, numbers, dtype=torch.float64)
        self.register_buffer("directions", directions / math.sqrt(features * numbers))

    def fit(self, features_NF: Tensor) -> None:
        """Set centre and scale by these rows.

        Raises ModelError: D exceeds half of the number of distinct columns, and reading them all
        is not allowed.
        """
        rows_NF = features_NF.flatten(1).to(self.centre)
        numbers = self.directions.shape[1]
        columns = count_columns(rows_NF)
        allowed = compute_number_limit(columns)
        if numbers > allowed and not self._allow_reading_all:
            raise ModelError(
                f"a projection to {numbers} numbers of {columns} columns that differ is refused, "
                "since whoever knows some people reads the others' columns from it; take "
                f"{allowed} numbers or fewer, or more columns"
            )
        self._fit_scale(rows_NF)

    def forward(self, features_B: Tensor) -> Tensor:
        projected_BD: Tensor = self.standardise_rows(features_B.to(self.centre)) @ self.directions
        return projected_BD

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load a state, whose number D of columns replaces the configured one.

        The parties agree on D when they meet, so settings may leave it open. For the arguments see
        torch's `Module._load_from_state_dict`.
        """
        stored = state_dict.get(f"{prefix}directions")
        if stored is not None and stored.dim() == 2 and len(stored) == len(self.directions):
            self.directions = torch.empty_like(stored)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@draws_nothing
class CrossView(RandomFeatures):
    """A map x -> random features of (x, h), with h a prediction of the sum of other parties' codes
    for the person.

    A code is a party's public random projection of its columns. h is linear in random features of
    x. Both are found by equations (`methods.apfed_code`): nothing of it is trained by descent.

    Args:
        features: F, numbers of a flattened row x.
        numbers: D, numbers of h.
        size: number of random cosines, of x for h and of (x, h).

    Attributes:
        own: random features of x.
        predictor: the linear layer from these to h.
    """

    def __init__(self, features: int, numbers: int, size: int) -> None:
        """Build both maps of random features, and the linear layer between them."""
        super().__init__(features + numbers, size)
        self.own = RandomFeatures(features, size)
        self.predictor = _make_linear(1 + features + size, numbers, bias=False)

    def fit(self, features_NF: Tensor) -> None:
        """Fit centre, scale and kernel width to these rows, with a prediction h of zero."""
        self.own.fit(features_NF)
        self.reset_prediction(features_NF)

    def reset_prediction(self, features_NF: Tensor) -> None:
        """Set the prediction h to zero and refit the scale: only x then distinguishes rows."""
        nn.init.zeros_(self.predictor.weight)
        self.fit_pairs(features_NF, self.predict_representation(features_NF))

    def fit_pairs(self, features_NF: Tensor, h_ND: Tensor) -> None:
        """Fit scale and kernel width to rows x and their h together, with equal weight of both.

        So neither alone decides which rows are near each other.
        """
        with torch.no_grad():
            super().fit(self._append_h(features_NF, h_ND))

    def _fit_scale(self, rows_NF: Tensor) -> None:
        """Set centre and scale by pairs (x, h), each part scaled to the same total variance.

        `rows_NF`: the pairs; here F counts the columns of both.
        """
        super()._fit_scale(rows_NF)
        numbers = self.predictor.out_features
        columns = len(self.scale)
        weighted = []
        for scale in self.scale.split((columns - numbers, numbers)):
            varying_columns = scale.isfinite().sum().clamp(min=1)  # constant ones have scale inf
            weighted.append(scale * (varying_columns / columns).sqrt())
        self.scale = torch.cat(weighted)

    def _append_h(self, features_B: Tensor, h_BD: Tensor) -> Tensor:
        return torch.cat([features_B.flatten(1), h_BD.to(features_B)], dim=1)

    def predict_representation(self, features_B: Tensor) -> Tensor:
        """Return the prediction h of these rows, (B, D)."""
        h_BD: Tensor = self.predictor(self.own(features_B))
        return h_BD

    def forward(self, features_B: Tensor, h_BD: Tensor | None = None) -> Tensor:
        """Return random features of (x, h); `h_BD` None: h is predicted from x."""
        if h_BD is None:
            h_BD = self.predict_representation(features_B)
        return super().forward(self._append_h(features_B, h_BD))


class CrossViewFamily(RandomFeatureFamily):
    """A family of `CrossView` encoders and one linear layer."""

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return a `CrossView` whose prediction h has `settings.representation_size` numbers."""
        width = math.prod(features)
        return CrossView(width, settings.representation_size, settings.random_features)


class SequenceEncoder(nn.Module):
    """A map of sequences -> the last states of a bidirectional GRU for each view, side by side.

    FedMV, sections 6 and 8.2. A row is flat: of each view the number of steps in use, then its
    steps one after another, as `secure_apfed.data.encoding` lays them out.

    Args:
        sequences: (T, C) of each view.
        size: D, units of one direction.
    """

    def __init__(self, sequences: Sequence[tuple[int, int]], size: int) -> None:
        """Build one bidirectional GRU for each view."""
        super().__init__()
        self.sequences = tuple(sequences)
        self.views = nn.ModuleList(
            nn.GRU(channels, size, batch_first=True, bidirectional=True)
            for _, channels in self.sequences
        )

    def encode_views(self, features_B: Tensor) -> list[Tensor]:
        """Return the last states of both directions of each view, each (B, 2 D)."""
        widths = [1 + steps * channels for steps, channels in self.sequences]
        columns_of_views = features_B.flatten(1).split(widths, dim=1)
        states = []
        for gru, columns_BF, sequence in zip(
            self.views, columns_of_views, self.sequences, strict=True
        ):
            used_steps_B = columns_BF[:, 0]
            steps_BTC = columns_BF[:, 1:].unflatten(1, sequence)
            states.append(_gather_last_states(gru, used_steps_B, steps_BTC))
        return states

    def forward(self, features_B: Tensor) -> Tensor:
        return torch.cat(self.encode_views(features_B), dim=1)


def _gather_last_states(gru: nn.Module, used_steps_B: Tensor, steps_BTC: Tensor) -> Tensor:
    """Return the last states of both directions of a GRU, (B, 2 D).

    Args:
        gru: the GRU of one view.
        used_steps_B: number of steps in use of each sequence; 0 counts as one step of zeros.
        steps_BTC: the sequences, zeros behind the last step in use.
    """
    if steps_BTC.is_meta:  # a meta tensor has a shape only, so lengths are unknown
        _, last_2BD = gru(steps_BTC)
    else:
        lengths_B = used_steps_B.round().clamp(1, steps_BTC.shape[1]).long().cpu()
        _, last_2BD = gru(
            pack_padded_sequence(steps_BTC, lengths_B, batch_first=True, enforce_sorted=False)
        )
    return torch.cat([last_2BD[0], last_2BD[1]], dim=1)


class Recurrent(Perceptron):
    """A family of one bidirectional GRU for each view, and one linear layer without a bias."""

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return an encoder of rows that `settings.sequences` describes.

        Raises ModelError: rows have another shape.
        """
        width = sum(1 + steps * channels for steps, channels in settings.sequences)
        if not settings.sequences or features != (width,):
            configured = f"of {width} columns" if settings.sequences else "of no sequences"
            raise ModelError(
                f"model.sequences: the network gru was told {configured}, and rows have the shape "
                f"{features}; say [steps, channels] of each view, which takes 1 + steps * channels "
                "columns"
            )
        return SequenceEncoder(settings.sequences, settings.representation_size)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        return _make_linear(size, classes, bias=False)


class Selu(Perceptron):
    """A family of fully connected layers with a SELU behind each but a decoder's last; a linear
    classifier.

    Source: APC-VFL, Table 3 (layers [a, 64, 128] and so on, SELU; symmetric autoencoders) and
    section 5 (logistic regression).
    """

    activation: ClassVar[type[nn.Module]] = nn.SELU

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return fully connected layers of the widths `settings.head`, then one to K scores.

        Without `settings.head`, and with cross-entropy, it is a logistic regression.
        """
        widths = (size, *settings.head, classes)
        return nn.Sequential(nn.Flatten(), *_stack_layers(widths, self.activation))


class Enriched(nn.Module):
    """A map x -> (x, code of x), flattened.

    Args:
        code: the network from x to further numbers.
    """

    def __init__(self, code: nn.Module) -> None:
        super().__init__()
        self.code = code

    def forward(self, features_B: Tensor) -> Tensor:
        return torch.cat([features_B.flatten(1), self.code(features_B)], dim=1)


class WithFeatures(nn.Module):
    """A map x -> (x, h), flattened, with h an encoder's output.

    Local models after an exchange read it (`secure_apfed.methods.local_models`). The encoder was
    trained before; an `Enriched` network is trained as a whole.

    Args:
        represented: the encoder.
    """

    def __init__(self, represented: nn.Module) -> None:
        super().__init__()
        self.represented = represented

    def forward(self, features_B: Tensor) -> Tensor:
        h_B = self.represented(features_B)
        return torch.cat([features_B.flatten(1), h_B.flatten(1)], dim=1)


class EnrichedFamily(Selu):
    """A family whose encoder returns a row concatenated with its code, by fully connected layers
    with SELU between them.

    Source: Huang et al. 2023 (VFedTrans), whose task party classifies its own features concatenated
    with the distilled ones. Hidden layers are those of APC-VFL's networks (SELU), not the release's
    sigmoids; the code is linear, since singular vectors have both signs.
    """

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return the network features -> flattened features and `settings.representation_size`
        numbers.
        """
        layers = list(super().make_encoder(features, settings).children())
        return Enriched(nn.Sequential(*layers[:-1]))


def family_for(settings: ModelSettings, features: Shape) -> NetworkFamily:
    """Return the network family that settings name; for "auto" by the shape of one row.

    Raises ModelError: the settings name a party's own code, which is not available here.
    """
    if settings.network != "auto":
        if settings.is_own:
            raise ModelError(
                f"model.network: {settings.network} is code of a party's own, which is not here; "
                "methods that train it are APFed, TVFL, split networks and the joint teacher, from "
                "secure_apfed.train or in the party's own file; a stored model takes it by "
                "load_model(folder, encoder=...), or a command's --encoder module:Name"
            )
        return NETWORKS[settings.network]
    if len(features) == 3 and features[0] in _AUTO:
        name, minimum = _AUTO[features[0]]
        if min(features[1:]) >= minimum:
            return NETWORKS[name]
    return NETWORKS["mlp"]


def make_encoder_and_head(
    settings: ModelSettings,
    features: Shape,
    classes: int,
    *,
    family: NetworkFamily | None = None,
) -> tuple[nn.Module, nn.Module]:
    """Return encoder and head of a model that predicts locally, features -> h -> class scores.

    Their weights are drawn from torch's generator, the encoder's first.

    Args:
        settings: settings of the networks.
        features: shape of one row.
        classes: number of scores.
        family: a party's own networks; None: those that the settings name.

    Raises ModelError: the network cannot take such rows.
    """
    family = family or family_for(settings, features)
    encoder = family.make_encoder(features, settings)
    size = math.prod(output_shape(encoder, features))
    return encoder, family.make_head(size, classes, settings)


@contextmanager
def limit_threads_for(
    settings: ModelSettings, batch: int, tables: Iterable[Shape]
) -> Iterator[None]:
    """Run the `with` block with as many of torch's threads as pay off for steps of a training.

    For a small matrix product, waiting for another thread takes longer than its work. Convolutions
    are never small, and a party's own network is of unknown size, so these use all threads.

    Args:
        settings: settings of the networks.
        batch: rows of a step.
        tables: shape of one row of each party's table.
    """
    available = torch.get_num_threads()
    threads = 1
    for shape in tables:
        widths = (math.prod(shape), *settings.hidden, settings.representation_size)
        work = batch * sum(inputs * outputs for inputs, outputs in pairwise(widths))
        is_large = settings.is_own or isinstance(family_for(settings, shape), Convolutional)
        useful = available if is_large else min(available, work // _WORK_PER_THREAD)
        threads = max(threads, useful)
    with limit_threads(threads):
        yield


NETWORKS: Mapping[str, NetworkFamily] = {
    "conv_mnist": Convolutional(
        channels=(1, 32, 64), kernels=(5, 5), strides=(1, 1), head_width=256, last_relu=True
    ),
    "conv_cifar": Convolutional(
        channels=(3, 16, 32, 64),
        kernels=(5, 4, 5),
        strides=(1, 2, 1),
        head_width=50,
        last_relu=False,
    ),
    "mlp": Perceptron(),
    "selu": Selu(),
    "enriched": EnrichedFamily(),
    "linear": Linear(),
    "glm": GeneralisedLinear(),
    "random_features": RandomFeatureFamily(),
    "cross_view": CrossViewFamily(),
    "identity": Identity(),
    "gru": Recurrent(),
}
