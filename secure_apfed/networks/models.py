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
from secure_apfed.settings import ModelSettings
from secure_apfed.settings.training import MAX_PARAMETERS

Shape = tuple[int, ...]
_CONVOLUTION_PADDING = 1
_DISTANCE_SAMPLE_ROWS = 300
"""Rows whose distances determine a kernel's width."""
_MIN_SCALE = 1e-6
"""Smallest standard deviation of a column that counts as varying."""
_WORK_PER_THREAD = 200_000_000
"""Multiplications of a step for which one more thread pays off: about ten milliseconds."""
_CONVOLUTIONS_BY_CHANNELS: Mapping[int, tuple[str, int]] = {
    1: ("conv_mnist", 7),
    3: ("conv_cifar", 8),
}
"""Automatic networks by channels of an image: a network's name, and the smallest side, in pixels,
of which its convolutions leave a map (three rows for MNIST's two layers, one for CIFAR's three)."""


def _make_linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer; raise ModelError if it would have more than `MAX_PARAMETERS`."""
    check_layer_size(inputs, outputs)
    return nn.Linear(inputs, outputs, bias=bias)


def check_layer_size(inputs: int, outputs: int) -> None:
    """Raise ModelError if a layer would have more parameters than `MAX_PARAMETERS`.

    It is called before memory is allocated for the layer. `inputs`, `outputs`: width of the layer's
    input and output.
    """
    if inputs * outputs > MAX_PARAMETERS:
        raise ModelError(
            f"a layer from {inputs:,} to {outputs:,} numbers has {inputs * outputs:,} parameters, "
            f"expected {MAX_PARAMETERS:,} at most; take narrower layers in model, or fewer "
            "columns or classes"
        )


class NetworkFamily(Protocol):
    """A family of networks that fit together: encoder, head and decoder.

    All shapes are shapes of one row, without the batch axis.
    """

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return a network from features to a representation."""

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return a network from a flattened representation of `size` numbers to class scores."""

    def make_decoder(
        self, representation: Shape, features: Shape, settings: ModelSettings
    ) -> nn.Module:
        """Return a network from a representation to the features of another party.

        Its layers mirror the encoder's.
        """


def output_shape(module: nn.Module, features: Shape) -> Shape:
    """Return the shape of a network's output for one row, by calling it with two rows of zeros.

    The call initialises lazy modules, whose parameters wait for a first batch. Training mode and
    evaluation mode stay as they were. `features`: the shape of one row.

    Raises ModelError: the network does not take such rows, or does not return one row of floats for
    each of them.
    """
    class_name = type(module).__name__
    mode_by_part = {part: part.training for part in module.modules()}
    module.eval()
    parameters: Iterator[Any] = module.parameters()
    initialised = (weight for weight in parameters if not is_lazy(weight))
    reference = next(initialised, torch.empty(0))  # the rows get its type and device
    try:
        with torch.no_grad():
            output = module(reference.new_zeros((2, *features)))
    except (ApfedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{class_name} does not take rows of shape {features}: {type(error).__name__}: {error}"
            f"{_name_dtypes(module)}; choose another model.network or another partition, or hand "
            "in a network of such rows, whose forward takes them alone"
        ) from error
    finally:
        for part, mode in mode_by_part.items():
            part.training = mode
    if not isinstance(output, Tensor) or output.ndim < 2 or len(output) != 2:
        output_kind = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"a network makes one tensor (B, ...) of rows (B, ...), with one row for each; of two "
            f"rows of shape {features} {class_name} made {output_kind}"
        )
    if not output.is_floating_point():
        raise ModelError(
            f"a network makes floating-point numbers, which have gradients; {class_name} made "
            f"{output.dtype}: leave out what rounds, counts or makes complex numbers"
        )
    shape: Shape = tuple(output.shape[1:])
    return shape


def _name_dtypes(module: nn.Module) -> str:
    """Return the part of an error that names the types of a network's parameters.

    It is empty if all have one type; several types are a likely cause of the error.
    """
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in module.parameters()})
    if len(dtypes) < 2:
        return ""
    return f" (its parameters are {' and '.join(dtypes)}: convert it, as with .float())"


def require_scores(
    head: nn.Module, representation: Shape, outputs: int, *, classes: Sequence[str] = ()
) -> None:
    """Refuse a head that does not return `outputs` numbers for a row.

    `representation`: shape of the head's input for one row. `classes`: names of the classes, for
    the error; empty: they are not known. Raises ModelError: its text names both shapes.
    """
    shape = output_shape(head, representation)
    if shape != (outputs,):
        expected = f"a score for each of the classes {', '.join(classes)}"
        if not classes:
            expected = "a score for each class or the number to predict"
        raise ModelError(
            f"it makes {shape} of a row, expected ({outputs},), {expected}; end it with a layer of "
            "that width, or mend labels that are no classes"
        )


def make_projection(size: int, representation: Shape) -> nn.Module:
    """Return a linear layer from an encoder's output to `size` numbers for each row.

    `representation`: the shape of the encoder's output for one row.
    """
    return nn.Sequential(nn.Flatten(), _make_linear(math.prod(representation), size))


def make_two_layer_head(size: int, hidden_width: int, classes: int, dropout: float) -> nn.Module:
    """Return a head of two linear layers with ReLU and dropout between (APFed, Tables 3 and 4).

    `size`: numbers that the head reads. `hidden_width`: width of its hidden layer. `dropout`:
    probability.
    """
    layers = (
        _make_linear(size, hidden_width),
        nn.ReLU(),
        nn.Dropout(dropout),
        _make_linear(hidden_width, classes),
    )
    return nn.Sequential(nn.Flatten(), *layers)


@dataclass(frozen=True, kw_only=True)
class Convolutional:
    """The papers' networks for images: convolutions with a ReLU after each, without pooling.

    Source: APFed, Table 3 (MNIST, FMNIST) and Table 4 (CIFAR). Deviations from the printed tables
    follow the authors' release: Table 3's "31" is 32; padding is 1; stride is 1, except for the
    second CIFAR layer (2). A decoder mirrors the encoder. If the representation is a projection, a
    linear layer first restores the encoder's feature map.

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
            layers += [nn.Conv2d(inputs, outputs, kernel, stride, _CONVOLUTION_PADDING), nn.ReLU()]
        return nn.Sequential(*layers)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return a head of two linear layers, with `head_width` hidden units."""
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
            layers += [
                nn.ConvTranspose2d(outputs, inputs, kernel, stride, _CONVOLUTION_PADDING),
                nn.ReLU(),
            ]
        return nn.Sequential(*(layers if self.last_relu else layers[:-1]))

    def _check_image(self, features: Shape) -> None:
        """Raise ModelError unless rows are images with the family's number of channels."""
        if len(features) != 3 or features[0] != self.channels[0]:
            raise ModelError(
                f"these convolutions read images of {self.channels[0]} channel(s), (channels, "
                f"height, width), got rows of shape {features}; choose another model.network"
            )


class Perceptron:
    """A family of fully connected layers with ReLU, for tables and very small images.

    The papers test images only; these networks are ours, in the same scheme.
    """

    activation: ClassVar[type[nn.Module]] = nn.ReLU

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return fully connected layers from features to `settings.representation_size` numbers."""
        widths = (math.prod(features), *settings.hidden, settings.representation_size)
        return nn.Sequential(
            nn.Flatten(), *_stack_layers(widths, self.activation), self.activation()
        )

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return a head of two linear layers, as wide as the encoder's first hidden layer."""
        width = settings.hidden[0] if settings.hidden else settings.representation_size
        return make_two_layer_head(size, width, classes, settings.dropout)

    def make_decoder(
        self, representation: Shape, features: Shape, settings: ModelSettings
    ) -> nn.Module:
        """Return layers of the encoder's widths in reverse order.

        There is no activation at the end, since features may be negative.
        """
        widths = (math.prod(representation), *reversed(settings.hidden), math.prod(features))
        return nn.Sequential(
            nn.Flatten(), *_stack_layers(widths, self.activation), nn.Unflatten(1, features)
        )


def _stack_layers(widths: tuple[int, ...], activation: type[nn.Module]) -> list[nn.Module]:
    """Return linear layers with an activation between each two.

    `widths`: width of the first layer's input, then of each layer's output.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [_make_linear(inputs, outputs), activation()]
    return layers[:-1]


class Linear(Perceptron):
    """A family of a linear encoder and a linear head, one layer each, with a perceptron's decoder.

    It suits few labels, for which deeper networks have too many weights. Together the parties'
    layers are a regularised softmax regression on all features.
    """

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return one linear layer from the flattened features to the representation."""
        return nn.Sequential(
            nn.Flatten(), _make_linear(math.prod(features), settings.representation_size)
        )

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return one linear layer from the representation to class scores."""
        return nn.Sequential(nn.Flatten(), _make_linear(size, classes))


@draws_nothing
class Intercept(nn.Module):
    """The head of a generalised linear model: it adds an intercept to the linear predictor."""

    def __init__(self, size: int, outputs: int) -> None:
        """Set the intercepts to 0.

        Args:
            size: how many numbers the linear predictor of a row has (D).
            outputs: how many scores are returned: D, or D + 1, where the first class is the
                reference with score 0.
        """
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))
        self._has_reference = outputs == size + 1

    def forward(self, eta_BD: Tensor) -> Tensor:
        """Return the scores of B rows; `eta_BD`: their linear predictors."""
        scores_BD = eta_BD.flatten(1) + self.bias
        return F.pad(scores_BD, (1, 0)) if self._has_reference else scores_BD


@draws_nothing
class LinearPredictor(nn.Sequential):
    """The encoder of a generalised linear model: a row times coefficients, without an intercept."""

    def __init__(self, features: int, size: int) -> None:
        """Set the coefficients to 0.

        Args:
            features: F, numbers of a flattened row.
            size: D, numbers of a row's linear predictor.
        """
        layer = _make_linear(features, size, bias=False)
        nn.init.zeros_(layer.weight)
        super().__init__(nn.Flatten(), layer)

    @property
    def coefficients(self) -> Tensor:
        """The coefficients of the F features for each of the D numbers, (D, F)."""
        layer = self[1]
        assert isinstance(layer, nn.Linear)
        return layer.weight


class GeneralisedLinear(Perceptron):
    """The family of generalised linear models: columns times coefficients, and an intercept.

    The representation is the linear predictor itself. It has one number for two classes, a numeric
    label or a count, and K numbers for K > 2 classes. Weights start at 0. The L2 penalty leaves the
    intercept out.
    """

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return the network from features to the linear predictor."""
        return LinearPredictor(math.prod(features), settings.representation_size)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return the head that adds intercepts.

        Raises ModelError: `size` is not the size of a linear predictor for so many classes.
        """
        required = 1 if classes <= 2 else classes
        if size != required:
            raise ModelError(
                f"model.representation: network glm sends the linear predictor of a row, here "
                f"{required} number(s) for {classes} output(s), and {size} are configured; say "
                f"model.representation: {required}"
            )
        return Intercept(size, classes)


class Identity(Perceptron):
    """A family for methods that solve for weights: flattened features, and one linear layer."""

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return a module that only flattens the features."""
        return nn.Flatten()

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return one linear layer without a bias."""
        return _make_linear(size, classes, bias=False)


class Standardised(nn.Module):
    """The base of networks that read standardised rows, z = (x - centre) / scale.

    Here z is not a representation that is sent. `_fit_scale` computes centre (the mean) and scale
    (the standard deviation) from a party's own rows.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, features: int, dtype: torch.dtype = torch.float32) -> None:
        """Register a centre of 0 and a scale of 1, which leave rows unchanged until fitted."""
        super().__init__()
        self.register_buffer("centre", torch.zeros(features, dtype=dtype))
        self.register_buffer("scale", torch.ones(features, dtype=dtype))

    def _fit_scale(self, rows_NF: Tensor) -> None:
        """Set centre and scale by these N rows; a constant column becomes 0 in every row."""
        self.centre = rows_NF.mean(0)
        scale = rows_NF.std(0, correction=0)
        # A constant column has no information; the infinite scale keeps z at 0 even if it varies
        # in later rows.
        self.scale = torch.where(scale < _MIN_SCALE, math.inf, scale)

    def standardise_rows(self, features_B: Tensor) -> Tensor:
        """Return these rows flattened and standardised, (B, F)."""
        return (features_B.flatten(1) - self.centre) / self.scale


@draws_nothing
class RandomFeatures(Standardised):
    """A map from a row to a constant, its features and random cosines of them.

    The output is (1, z / sqrt F, sqrt(2 / D) cos(z W / width + b)), with z the standardised row.
    The cosines are random Fourier features of a Gaussian kernel (Rahimi and Recht 2007, Random
    Features for Large-Scale Kernel Machines, Section 3). W and b come from torch's generator.

    Nothing is trained. `fit` takes centre, scale and width from a party's own rows. Without it, z
    is the row, and the width is the expected distance of two rows of standard normal numbers.
    """

    width: Tensor
    directions: Tensor
    phases: Tensor

    def __init__(self, features: int, size: int) -> None:
        """Draw directions and phases of the cosines.

        Args:
            features: F, numbers of a flattened row.
            size: D, number of cosines.
        """
        check_layer_size(features, size)
        super().__init__(features)
        self.register_buffer("width", torch.tensor(math.sqrt(2 * features)))
        self.register_buffer("directions", torch.randn(features, size))
        self.register_buffer("phases", 2 * math.pi * torch.rand(size))

    def fit(self, features_NF: Tensor) -> None:
        """Set centre, scale and kernel width by these N rows.

        The width is the median distance between about `_DISTANCE_SAMPLE_ROWS` of them.
        """
        rows_NF = features_NF.flatten(1).to(self.centre)
        self._fit_scale(rows_NF)
        row_stride = max(1, len(rows_NF) // _DISTANCE_SAMPLE_ROWS)
        sample_NF = (rows_NF[::row_stride] - self.centre) / self.scale
        distances = torch.pdist(sample_NF)
        distances = distances[distances > 0]
        if len(distances):
            self.width = distances.median()

    def forward(self, features_B: Tensor) -> Tensor:
        """Return a constant, F scaled features and D cosines of each of B rows, (B, 1 + F + D)."""
        z_BF = self.standardise_rows(features_B)
        size = len(self.phases)
        cosines_BD = torch.cos(z_BF @ self.directions / self.width + self.phases)
        ones_B1 = torch.ones_like(z_BF[:, :1])
        scaled_BF = z_BF / math.sqrt(z_BF.shape[1])
        return torch.cat([ones_B1, scaled_BF, math.sqrt(2 / size) * cosines_BD], dim=1)


class RandomFeatureFamily(Perceptron):
    """A family of random features of the rows, and one linear layer.

    The constant among the random features serves as the layer's bias.
    """

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return `RandomFeatures` with `settings.random_features` cosines."""
        return RandomFeatures(math.prod(features), settings.random_features)

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return one linear layer without a bias."""
        return nn.Sequential(nn.Flatten(), _make_linear(size, classes, bias=False))


@draws_nothing
class Projection(Standardised):
    """A random linear projection of standardised rows to D numbers, float64.

    A row of F features becomes z W / sqrt(F D), z being the standardised row. Its norm is then
    about 1 (Johnson and Lindenstrauss 1984, Extensions of Lipschitz mappings into a Hilbert space).
    Nothing is trained; W comes from torch's generator. If D is at least the rank of the columns, D
    numbers determine the row, so `fit` refuses a D above half of the rank.
    """

    directions: Tensor

    def __init__(self, features: int, size: int, *, allow_reading_all: bool = False) -> None:
        """Draw the random directions W / sqrt(F D).

        Args:
            features: F, numbers of a flattened row.
            size: D, numbers of the projection.
            allow_reading_all: whether `fit` accepts any D.
        """
        check_layer_size(features, size)
        super().__init__(features, torch.float64)
        self._allow_reading_all = allow_reading_all
        directions = torch.randn(features, size, dtype=torch.float64)
        self.register_buffer("directions", directions / math.sqrt(features * size))

    def fit(self, features_NF: Tensor) -> None:
        """Set centre and scale by these N rows.

        Raises ModelError: D exceeds half of the number of distinct columns, unless
        `allow_reading_all`.
        """
        rows_NF = features_NF.flatten(1).to(self.centre)
        size = self.directions.shape[1]
        distinct_columns = count_columns(rows_NF)
        max_size = compute_number_limit(distinct_columns)
        if size > max_size and not self._allow_reading_all:
            raise ModelError(
                f"a projection to {size} numbers of {distinct_columns} columns that differ is "
                "refused, since whoever knows some people reads the others' columns from it; take "
                f"{max_size} numbers or fewer, or more columns"
            )
        self._fit_scale(rows_NF)

    def forward(self, features_B: Tensor) -> Tensor:
        """Return the projections of B rows, (B, D)."""
        projected_BD: Tensor = self.standardise_rows(features_B.to(self.centre)) @ self.directions
        return projected_BD

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load a state; its size D replaces the configured one.

        The parties agree on D in their contract, so settings may leave it open. The arguments are
        torch's, from `Module._load_from_state_dict`.
        """
        stored = state_dict.get(f"{prefix}directions")
        if stored is not None and stored.dim() == 2 and len(stored) == len(self.directions):
            self.directions = torch.empty_like(stored)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@draws_nothing
class CrossView(RandomFeatures):
    """A map from a row x to random features of (x, h), where h predicts what other parties know.

    h is a prediction of the sum of all passives' random projections of this person's columns. It is
    linear in random features of x. Both maps are fitted in closed form (`methods.apfed_code`).

    Attributes:
        own: random features of x.
        predictor: the linear layer from these to h.
    """

    def __init__(self, features: int, h_size: int, size: int) -> None:
        """Build both maps of random features, and the linear layer between them.

        Args:
            features: F, numbers of a flattened row x.
            h_size: D, numbers of h.
            size: number of random cosines, both of x and of (x, h).
        """
        super().__init__(features + h_size, size)
        self.own = RandomFeatures(features, size)
        self.predictor = _make_linear(1 + features + size, h_size, bias=False)

    def fit(self, features_NF: Tensor) -> None:
        """Fit centre, scale and kernel width to these N rows, with a prediction h of zero."""
        self.own.fit(features_NF)
        self.reset_prediction(features_NF)

    def reset_prediction(self, features_NF: Tensor) -> None:
        """Set the prediction h to zero, and fit the scale again, so that only x differs in rows."""
        nn.init.zeros_(self.predictor.weight)
        self.fit_pairs(features_NF, self.predict_representation(features_NF))

    def fit_pairs(self, features_NF: Tensor, h_ND: Tensor) -> None:
        """Fit scale and kernel width to N rows x and their h together.

        Both get equal weight, so that neither alone decides which rows are near each other.
        """
        with torch.no_grad():
            super().fit(self._append_h(features_NF, h_ND))

    def _fit_scale(self, rows_NF: Tensor) -> None:
        """Set centre and scale by pairs (x, h), each part scaled to the same total variance.

        `rows_NF`: the pairs; here F counts the columns of both.
        """
        super()._fit_scale(rows_NF)
        h_size = self.predictor.out_features
        column_count = len(self.scale)
        weighted_scales = []
        for scale in self.scale.split((column_count - h_size, h_size)):
            varying_columns = scale.isfinite().sum().clamp(min=1)  # constant ones have scale inf
            weighted_scales.append(scale * (varying_columns / column_count).sqrt())
        self.scale = torch.cat(weighted_scales)

    def _append_h(self, features_B: Tensor, h_BD: Tensor) -> Tensor:
        """Return the flattened rows with their h appended, (B, F + D)."""
        return torch.cat([features_B.flatten(1), h_BD.to(features_B)], dim=1)

    def predict_representation(self, features_B: Tensor) -> Tensor:
        """Return the prediction h for B rows, (B, D)."""
        h_BD: Tensor = self.predictor(self.own(features_B))
        return h_BD

    def forward(self, features_B: Tensor, h_BD: Tensor | None = None) -> Tensor:
        """Return random features of (x, h) for B rows.

        `h_BD`: h of these rows; None: it is predicted from x.
        """
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
    """A map from sequences to the last states of a bidirectional GRU for each view, side by side.

    Source: FedMV, sections 6 and 8.2. A row is flat: for each view it has the number of steps in
    use, and then the steps one after another, as `secure_apfed.data.encoding` lays them out.
    """

    def __init__(self, sequences: Sequence[tuple[int, int]], size: int) -> None:
        """Build one bidirectional GRU for each view.

        Args:
            sequences: for each view, the number of steps (T) and of channels (C).
            size: D, units of the GRU in one direction.
        """
        super().__init__()
        self.sequences = tuple(sequences)
        self.views = nn.ModuleList(
            nn.GRU(channels, size, batch_first=True, bidirectional=True)
            for _, channels in self.sequences
        )

    def encode_views(self, features_B: Tensor) -> list[Tensor]:
        """Return the last states of B rows in both directions, (B, 2 D) for each view."""
        widths = [1 + steps * channels for steps, channels in self.sequences]
        columns_by_view = features_B.flatten(1).split(widths, dim=1)
        states = []
        for gru, columns_BF, sequence in zip(
            self.views, columns_by_view, self.sequences, strict=True
        ):
            used_steps_B = columns_BF[:, 0]
            steps_BTC = columns_BF[:, 1:].unflatten(1, sequence)
            states.append(_gather_last_states(gru, used_steps_B, steps_BTC))
        return states

    def forward(self, features_B: Tensor) -> Tensor:
        """Return the last states of all views side by side for B rows."""
        return torch.cat(self.encode_views(features_B), dim=1)


def _gather_last_states(gru: nn.Module, used_steps_B: Tensor, steps_BTC: Tensor) -> Tensor:
    """Return the last states of a GRU in both directions, (B, 2 D).

    Args:
        gru: the GRU of one view, with D units in each direction.
        used_steps_B: number of steps in use of each of B sequences; 0 counts as 1.
        steps_BTC: the sequences, T steps of C channels each.
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
        """Return one linear layer without a bias."""
        return _make_linear(size, classes, bias=False)


class Selu(Perceptron):
    """A family of fully connected layers with SELU, and a linear classifier.

    A SELU follows each layer, except a decoder's last.

    Source: APC-VFL, Table 3 (layers [a, 64, 128] and so on, SELU; symmetric autoencoders) and
    section 5 (logistic regression).
    """

    activation: ClassVar[type[nn.Module]] = nn.SELU

    def make_head(self, size: int, classes: int, settings: ModelSettings) -> nn.Module:
        """Return fully connected layers of the widths `settings.head`, and one to class scores.

        Without `settings.head` it is one linear layer: with cross-entropy, logistic regression.
        """
        widths = (size, *settings.head, classes)
        return nn.Sequential(nn.Flatten(), *_stack_layers(widths, self.activation))


class Enriched(nn.Module):
    """A map from a row to the row and its code, side by side, flattened."""

    def __init__(self, code: nn.Module) -> None:
        """Register the network that makes the code.

        Args:
            code: the network from the row to the code, which is trained.
        """
        super().__init__()
        self.code = code

    def forward(self, features_B: Tensor) -> Tensor:
        """Return the flattened rows with their codes appended."""
        return torch.cat([features_B.flatten(1), self.code(features_B)], dim=1)


class WithFeatures(nn.Module):
    """A map from a row to the row and its representation, side by side, flattened.

    Local models after an exchange read its output (`secure_apfed.methods.local_models`). The
    encoder was trained before, in contrast to `Enriched`, which is trained as a whole.
    """

    def __init__(self, represented: nn.Module) -> None:
        """Register the encoder.

        Args:
            represented: the encoder that makes the representation.
        """
        super().__init__()
        self.represented = represented

    def forward(self, features_B: Tensor) -> Tensor:
        """Return the flattened rows with their representations appended."""
        h_B = self.represented(features_B)
        return torch.cat([features_B.flatten(1), h_B.flatten(1)], dim=1)


class EnrichedFamily(Selu):
    """A family whose encoder returns a row beside its code.

    The code is made by fully connected layers with SELU between them.

    Source: Huang et al. 2023 (VFedTrans), whose task party classifies its own features concatenated
    with the distilled ones. Hidden layers have SELU as in APC-VFL's networks, not the release's
    sigmoids. The last layer is linear, since singular vectors, which the code resembles, have both
    signs.
    """

    def make_encoder(self, features: Shape, settings: ModelSettings) -> nn.Module:
        """Return a network from features to these and a code.

        The code has `settings.representation_size` numbers.
        """
        layers = list(super().make_encoder(features, settings).children())
        without_last_activation = layers[:-1]
        return Enriched(nn.Sequential(*without_last_activation))


def family_for(settings: ModelSettings, features: Shape) -> NetworkFamily:
    """Return the network family that settings name.

    For "auto" it depends on the shape of one row, `features`: convolutions for images that are
    large enough, otherwise a perceptron. Raises ModelError: the settings name a party's own code,
    which is not available here.
    """
    if settings.network != "auto":
        if settings.is_user_defined:
            raise ModelError(
                f"model.network: {settings.network} is code of a party's own, which is not here; "
                "methods that train it are APFed, TVFL, split networks and the joint teacher, from "
                "secure_apfed.train or in the party's own file; a stored model takes it by "
                "load_model(folder, encoder=...), or a command's --encoder module:Name"
            )
        return NETWORKS[settings.network]
    if len(features) == 3 and features[0] in _CONVOLUTIONS_BY_CHANNELS:
        name, min_side = _CONVOLUTIONS_BY_CHANNELS[features[0]]
        if min(features[1:]) >= min_side:
            return NETWORKS[name]
    return NETWORKS["mlp"]


def make_encoder_and_head(
    settings: ModelSettings,
    features: Shape,
    classes: int,
    *,
    family: NetworkFamily | None = None,
) -> tuple[nn.Module, nn.Module]:
    """Return encoder and head of a model that predicts alone, from features to class scores.

    Their weights are drawn from torch's generator, the encoder's first.

    Args:
        settings: settings of the networks.
        features: shape of one row.
        classes: number of scores.
        family: builds a party's own networks; None: the networks that the settings name.

    Raises ModelError: the network cannot take such rows.
    """
    family = family or family_for(settings, features)
    encoder = family.make_encoder(features, settings)
    size = math.prod(output_shape(encoder, features))
    return encoder, family.make_head(size, classes, settings)


@contextmanager
def limit_threads_for(
    settings: ModelSettings, batch_size: int, row_shapes: Iterable[Shape]
) -> Iterator[None]:
    """Limit torch's threads in the `with` block to as many as speed up the steps of a training.

    For a small matrix product, waiting for another thread takes longer than its work. Convolutions
    are never small, and the size of a party's own network is unknown, so these use all threads.

    Args:
        settings: settings of the networks.
        batch_size: number of rows in a step.
        row_shapes: shape of one row of each party's table; the largest one decides.
    """
    available_threads = torch.get_num_threads()
    threads = 1
    for shape in row_shapes:
        widths = (math.prod(shape), *settings.hidden, settings.representation_size)
        multiplications = batch_size * sum(inputs * outputs for inputs, outputs in pairwise(widths))
        is_large = settings.is_user_defined or isinstance(
            family_for(settings, shape), Convolutional
        )
        useful_threads = (
            available_threads
            if is_large
            else min(available_threads, multiplications // _WORK_PER_THREAD)
        )
        threads = max(threads, useful_threads)
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
