"""Fitted models as networks, so that the active can store any best local model.

Run by: the active, alone. Every model is float64, reads rows (B, F) and gives log-probabilities (B,
K); all of its state are buffers, named by its kind, so that a file of tensors identifies the model.
A new kind is one class and one line in `KINDS`.

Letters: B rows, F features, K classes, R rows that are remembered, V nodes of all trees, T trees,
C cosines, M models that are averaged.
"""

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from secure_apfed.errors import ModelError
from secure_apfed.learning.descent import add_prefix, remove_prefix
from secure_apfed.networks.models import WithFeatures

LEAST = 1e-12
"""Probability of a class that a model never saw."""
UNSEEN = -40.0
"""Score before a softmax of a class that a model never saw."""
_DEEPEST = 4096
_MAX_MEMBERS = 256
_MIN_DEVIATION = 1e-9


class ModelKind(nn.Module, ABC):
    """The base of the kinds."""

    @abstractmethod
    def get_shape(self) -> tuple[int, int]:
        """Return F and K."""

    @abstractmethod
    def forward(self, x_BF: Tensor) -> Tensor:
        """Return class shares (B, K), at least 0; a row of zeros is no prediction."""


class Simple(ModelKind):
    """The base of fitted models that consist of named tensors only; `tensors`: these, by name."""

    names: tuple[str, ...]

    def __init__(self, tensors: Mapping[str, ArrayLike | Tensor]) -> None:
        """Register the named tensors, which must be complete, finite and of fitting shapes."""
        super().__init__()
        if set(tensors) != set(self.names):
            raise ModelError(f"a model of {type(self).__name__} holds {', '.join(self.names)}")
        for name in self.names:
            self.register_buffer(name, torch.as_tensor(tensors[name], dtype=torch.float64))
        if not all(bool(buffer.isfinite().all()) for buffer in self.buffers()):
            raise ModelError(f"a model of {type(self).__name__} holds what is not finite")
        self._check_tensors()

    @abstractmethod
    def _check_tensors(self) -> None:
        """Raise ModelError on tensors that do not fit together."""


class Layers(Simple):
    """A stack of linear layers with ReLU between them, and a softmax: regressions and small
    networks.
    """

    def __init__(self, tensors: Mapping[str, ArrayLike | Tensor]) -> None:
        """Name the tensors w0, b0, w1, b1 and so on, as many as there are."""
        self.names = tuple(
            f"{kind}{index}" for index in range(len(tensors) // 2) for kind in ("w", "b")
        )
        super().__init__(tensors)

    @classmethod
    def from_weights(cls, layers: Sequence[tuple[ArrayLike, ArrayLike]]) -> "Layers":
        """Build layers from weights (out, in) and biases (out,)."""
        return cls(
            {
                f"{name}{index}": array
                for index, layer in enumerate(layers)
                for name, array in zip("wb", layer, strict=True)
            }
        )

    def _check_tensors(self) -> None:
        """Raise ModelError unless each layer's input size is the former one's output size."""
        shapes = [tuple(buffer.shape) for buffer in self.buffers()]
        widths = [shape[0] for shape in shapes[1::2]]
        pairs = list(zip(shapes[::2], shapes[1::2], strict=True))
        input_widths = [0, *widths]
        if not pairs or any(
            len(w) != 2 or b != w[:1] or (index and w[1] != input_widths[index])
            for index, (w, b) in enumerate(pairs)
        ):
            raise ModelError(f"layers of shapes {shapes} do not follow each other")

    def get_shape(self) -> tuple[int, int]:
        parts = list(self.buffers())
        return parts[0].shape[1], len(parts[-1])

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return class probabilities (B, K)."""
        parts = list(self.buffers())
        for index in range(0, len(parts), 2):
            x_BF = nn.functional.linear(
                x_BF.relu() if index else x_BF, parts[index], parts[index + 1]
            )
        return x_BF.softmax(1)


class Cosines(Simple):
    """A linear layer on x and cosines of x, whose scores below 0 count as 0."""

    names = ("directions", "phases", "linear", "waves", "bias")
    directions: Tensor
    phases: Tensor
    linear: Tensor
    waves: Tensor
    bias: Tensor

    def _check_tensors(self) -> None:
        """Raise ModelError unless directions, phases and weights have fitting shapes."""
        (features, cosines), (classes,) = self.directions.shape, self.bias.shape
        if (self.phases.shape, self.linear.shape, self.waves.shape) != (
            (cosines,),
            (features, classes),
            (cosines, classes),
        ):
            raise ModelError("cosines and their weights are of different shapes")

    def get_shape(self) -> tuple[int, int]:
        return len(self.directions), len(self.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        waves_BC = torch.cos(x_BF @ self.directions + self.phases)
        return (x_BF @ self.linear + waves_BC @ self.waves + self.bias).relu()


class Nearest(Simple):
    """A nearest-neighbour model: predicts the mean class shares of the nearest stored rows, so it
    contains rows of people.
    """

    names = ("rows", "shares", "neighbours")
    rows: Tensor
    shares: Tensor
    neighbours: Tensor

    def _check_tensors(self) -> None:
        """Raise ModelError unless rows and shares have fitting shapes and the
        number is in range.
        """
        rows = len(self.rows)
        fits = self.rows.ndim == self.shares.ndim == 2 and len(self.shares) == rows
        if not fits or self.neighbours.numel() != 1 or not 1 <= float(self.neighbours) <= rows:
            raise ModelError("remembered rows and their shares do not belong together")
        self._number = int(self.neighbours)

    def get_shape(self) -> tuple[int, int]:
        return self.rows.shape[1], self.shares.shape[1]

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return the mean shares of each row's nearest stored rows, (B, K)."""
        if torch.compiler.is_exporting():
            # ONNX has no cdist. Squares by a product of matrices, of the same order but for ties.
            distance_BR = self.rows.square().sum(1) - 2 * x_BF @ self.rows.T
        else:
            distance_BR = torch.cdist(x_BF, self.rows, compute_mode="donot_use_mm_for_euclid_dist")
        nearest_BN = distance_BR.topk(self._number, dim=1, largest=False).indices
        return self.shares[nearest_BN].mean(1)


class Trees(Simple):
    """A sum of decision trees' outputs: class shares, or scores before a softmax.

    Attributes:
        feature, threshold, left, right: (V,), of each node; a leaf is its own child.
        values: (V, K); roots: (T,); bias: (K,), added to the sum.
        levels: how many nodes a row passes at most.
        raw: 1 where scores go through a softmax, 0 where they are shares.
        single: 1 where rows are compared in float32, as the trees were grown, 0 else.
        centre, scale: (F,), of the rows before.
    """

    names = (
        "feature",
        "threshold",
        "left",
        "right",
        "values",
        "roots",
        "bias",
        "levels",
        "raw",
        "single",
        "centre",
        "scale",
    )
    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    values: Tensor
    roots: Tensor
    bias: Tensor
    levels: Tensor
    raw: Tensor
    single: Tensor
    centre: Tensor
    scale: Tensor

    def _check_tensors(self) -> None:
        """Raise ModelError unless every node refers to nodes and features that exist."""
        nodes = len(self.feature)
        features = len(self.centre)
        inside = all(
            bool(((buffer >= 0) & (buffer < limit)).all())
            for buffer, limit in (
                (self.feature, features),
                (self.left, nodes),
                (self.right, nodes),
                (self.roots, nodes),
            )
        )
        shapes = {buffer.shape for buffer in (self.threshold, self.left, self.right)}
        fits = shapes == {(nodes,)} and self.values.shape == (nodes, *self.bias.shape)
        flags = (self.levels, self.raw, self.single)
        fits = fits and self.roots.ndim == 1 and len(self.roots) > 0
        fits = (
            fits and self.scale.shape == (features,) and {buffer.numel() for buffer in flags} == {1}
        )
        if not fits or not inside or not 0 <= float(self.levels) <= _DEEPEST:
            raise ModelError("these tensors make no trees")
        self._number, self._raw, self._single = (int(buffer) for buffer in flags)

    def get_shape(self) -> tuple[int, int]:
        return len(self.centre), len(self.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Walk all trees from their roots to the leaves; return their summed values, (B, K)."""
        x_BF = (x_BF - self.centre) / self.scale
        if self._single:
            x_BF = x_BF.float().double()
        feature_V = self.feature.long()
        left_V = self.left.long()
        right_V = self.right.long()
        node_BT = self.roots.long()[None] + torch.zeros_like(x_BF[:, :1], dtype=torch.int64)
        for _ in range(self._number):
            is_left_BT = x_BF.gather(1, feature_V[node_BT]) <= self.threshold[node_BT]
            node_BT = torch.where(is_left_BT, left_V[node_BT], right_V[node_BT])
        scores_BK = self.values[node_BT].sum(1) + self.bias
        return scores_BK.softmax(1) if self._raw else scores_BK


def shares_of_one(shares_BK: Tensor) -> Tensor:
    """Return probabilities (B, K); uniform for a row without a prediction."""
    total_B1 = shares_BK.sum(1, keepdim=True)
    even_BK = torch.full_like(shares_BK, 1 / shares_BK.shape[1])
    return torch.where(total_B1 > 0, shares_BK / total_B1.clamp(min=LEAST), even_BK)


class Member(nn.Module):
    """A member of an average of models, which reads some columns of a row, standardised.

    Attributes:
        columns: (2,), the first column that it reads and the one behind the last.
        centre, scale: (F',), of these columns, before its own model reads them.
        weight: (1,), of its probabilities in the average, above 0; 1 if a state has none.
    """

    columns: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Check and register the columns, their scaling, the weight, and the model. Raises
        ModelError.

        `tensors`: of the state, by name.
        """
        super().__init__()
        own_tensors = {name: tensor for name, tensor in tensors.items() if "." not in name}
        kinds = {name.partition(".")[0] for name in tensors if "." in name}
        named = set(own_tensors) - {"weight"}
        if named != {"columns", "centre", "scale"} or len(kinds) != 1 or kinds - set(SIMPLE):
            raise ModelError(
                "a model that is averaged with others holds columns, centre, scale and one of "
                f"{', '.join(SIMPLE)}"
            )
        for name, tensor in own_tensors.items():
            own_tensor = torch.as_tensor(tensor, dtype=torch.float64).clone()  # a file of its own
            self.register_buffer(name, own_tensor)
        if not all(bool(tensor.isfinite().all()) for tensor in self.buffers()):
            raise ModelError("a model that is averaged with others holds what is not finite")
        (self.kind,) = kinds
        self.add_module(self.kind, SIMPLE[self.kind](remove_prefix(self.kind, tensors)))
        features, self.classes = self.model.get_shape()
        if self.columns.shape != (2,) or bool((self.columns < 0).any()):
            raise ModelError("a model that is averaged with others reads no columns")
        weight = dict(self.named_buffers(recurse=False)).get("weight", torch.ones(1))
        if weight.shape != (1,) or not bool((weight > 0).all()):
            raise ModelError("a model that is averaged with others has a weight above 0")
        self.share = float(weight)
        self.first, self.end = (int(column) for column in self.columns)
        if {(features,)} != {self.centre.shape, self.scale.shape, (self.end - self.first,)}:
            raise ModelError(
                "a model that is averaged with others reads other columns than it says"
            )

    @property
    def model(self) -> Simple:
        """The model that reads the member's columns."""
        kind = self.get_submodule(self.kind)
        assert isinstance(kind, Simple)
        return kind

    def forward(self, x_BF: Tensor) -> Tensor:
        read_BF = (x_BF[:, self.first : self.end] - self.centre) / self.scale
        return shares_of_one(self.model(read_BF))


class Average(ModelKind):
    """The weighted mean of several models' probabilities; each model reads its own columns of a
    row.

    Args:
        tensors: of each `Member`, as "0.columns", "0.layers.w0", "1.columns" and so on.
    """

    def __init__(self, tensors: Mapping[str, ArrayLike | Tensor]) -> None:
        """Build the numbered members. Raises ModelError: none, too many, or of
        different classes.

        `tensors`: of the state, by name.
        """
        super().__init__()
        parts = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
        numbers = {name.partition(".")[0] for name in parts}
        expected = [str(number) for number in range(len(numbers))]
        if not parts or numbers != set(expected) or len(expected) > _MAX_MEMBERS:
            raise ModelError(f"an average is of 1 to {_MAX_MEMBERS} models, numbered from 0")
        for number in expected:
            self.add_module(number, Member(remove_prefix(number, parts)))
        if len({member.classes for member in self.list_members()}) != 1:
            raise ModelError("models that are averaged tell different classes")

    def list_members(self) -> list[Member]:
        return [member for member in self.children() if isinstance(member, Member)]

    def get_shape(self) -> tuple[int, int]:
        members = self.list_members()
        return max(member.end for member in members), members[0].classes

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return the weighted mean of the members' probabilities, (B, K)."""
        members = self.list_members()
        scores_MBK = torch.stack([member(x_BF) for member in members])
        weights = [member.share for member in members]
        if len(set(weights)) == 1:
            return scores_MBK.mean(0)
        weights_M = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        return (scores_MBK * weights_M[:, None, None]).sum(0)


SIMPLE: Mapping[str, type[Simple]] = {
    "layers": Layers,
    "cosines": Cosines,
    "nearest": Nearest,
    "trees": Trees,
}
KINDS: Mapping[str, type[Simple] | type[Average]] = {**SIMPLE, "average": Average}


@dataclass(frozen=True, kw_only=True)
class View:
    """The columns of a row that a model reads, standardised.

    Attributes:
        first, end: the first column, and the one behind the last.
        centre, scale: (end - first,), of these columns.
    """

    first: int
    end: int
    centre: np.ndarray
    scale: np.ndarray

    @classmethod
    def for_whole_row(cls, features: int) -> "View":
        """Return the view of a whole row, without scaling."""
        return cls(first=0, end=features, centre=np.zeros(features), scale=np.ones(features))

    @classmethod
    def from_rows(cls, rows_NF: np.ndarray, *, first: int, end: int) -> "View":
        """Return the view of these columns to mean 0 and deviation 1 over these rows.

        `first`: the first column, and `end`, the one behind the last.
        """
        columns_NF = rows_NF[:, first:end]
        scale = columns_NF.std(axis=0)
        constant = scale < _MIN_DEVIATION
        return cls(
            first=first,
            end=end,
            centre=columns_NF.mean(axis=0),
            scale=np.where(constant, 1.0, scale),
        )

    def standardise_columns(self, rows_NF: np.ndarray) -> np.ndarray:
        """Return these columns of rows (N, F), standardised, (N, end - first)."""
        columns_NF: np.ndarray = rows_NF[:, self.first : self.end]
        return np.asarray((columns_NF - self.centre) / self.scale)


def average_of(models: Sequence[tuple[View, "FittedModel"]]) -> "FittedModel":
    """Return the average of fitted models, each of the columns that it reads."""
    tensors: dict[str, ArrayLike | Tensor] = {}
    for number, (view, model) in enumerate(models):
        tensors[f"{number}.columns"] = np.array([view.first, view.end], dtype=np.float64)
        tensors[f"{number}.centre"] = view.centre
        tensors[f"{number}.scale"] = view.scale
        for name, tensor in model.state_dict().items():
            tensors[f"{number}.{name}"] = tensor
    return FittedModel(Average(tensors))


def blend_models(view: View, model: "FittedModel", others: "FittedModel") -> "FittedModel":
    """Return the average of a model and an average of others, each with half the weight.

    Args:
        view: the columns that `model` reads; `others` keep theirs.

    Raises ModelError: `others` is not an average of equal weights, or `model` is one.
    """
    average = others.get_submodule(others.kind)
    if not isinstance(average, Average) or {member.share for member in average.list_members()} != {
        1.0
    }:
        raise ModelError("only an average of equal weights is averaged with one more model")
    number = len(average.list_members())
    blended = average_of([(view, model)]).state_dict()
    tensors: dict[str, ArrayLike | Tensor] = dict(average.state_dict())
    for name, tensor in remove_prefix("average.0", blended).items():
        tensors[f"{number}.{name}"] = tensor
    tensors[f"{number}.weight"] = np.array([float(number)])
    return FittedModel(Average(tensors))


def scores_of_network(
    columns: int, classes: int, *, are_shares: bool
) -> tuple[View, "FittedModel"]:
    """Return a model that reads a network's class scores (B, K) in a row, and their columns.

    Args:
        columns: how many columns precede them in a row.
        are_shares: negative scores count as 0 and the others are shares; else shares are the
            scores' softmax.
    """
    end = columns + classes
    view = View(first=columns, end=end, centre=np.zeros(classes), scale=np.ones(classes))
    if not are_shares:
        return view, FittedModel(Layers.from_weights([(np.eye(classes), np.zeros(classes))]))
    shares = Cosines(
        {
            "directions": np.zeros((classes, 1)),
            "phases": np.zeros(1),
            "waves": np.zeros((1, classes)),  # no cosine counts
            "linear": np.eye(classes),
            "bias": np.zeros(classes),
        }
    )
    return view, FittedModel(shares)


_LAYER = re.compile(r"[wb]\d+")
_MEMBER = re.compile(r"\d+\.(columns|centre|scale)")


def _is_state_of(kind: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a state is of this kind of fitted model, and may be damaged.

    A network of somebody's own may have a part of the same name, as `layers`.

    `tensors`: of the state, by name.
    """
    if kind == "average":
        return any(_MEMBER.fullmatch(name) for name in tensors)
    if kind == "layers":
        return any(_LAYER.fullmatch(name) for name in tensors)
    names = SIMPLE[kind].names
    return 2 * len(set(names) & tensors.keys()) >= len(names)


class FittedModel(nn.Module):
    """A fitted model: rows (B, *shape) of any float dtype -> log-probabilities (B, K), float64."""

    def __init__(self, kind: ModelKind) -> None:
        """Take a model, and name it by its kind, which its stored tensors state."""
        super().__init__()
        self.kind = next(name for name, model_class in KINDS.items() if type(kind) is model_class)
        self.add_module(self.kind, kind)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "FittedModel | None":
        """Return the model in a state; None: it has none. Raises ModelError: it is damaged.

        `tensors`: of the state, by name.
        """
        first_names = {name.partition(".")[0] for name in tensors}
        kinds = {
            kind
            for kind in first_names & set(KINDS)
            if _is_state_of(kind, remove_prefix(kind, tensors))
        }
        if not kinds:
            return None
        name = kinds.pop()
        if kinds or any(not key.startswith(f"{name}.") for key in tensors):
            raise ModelError("the tensors of a fitted model are of several models")
        try:
            return cls(KINDS[name](remove_prefix(name, tensors)))
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise ModelError(
                f"the tensors of a fitted model do not fit together: {error}"
            ) from error

    @property
    def classes(self) -> int:
        return self._shape[1]

    @property
    def _shape(self) -> tuple[int, int]:
        """F and K."""
        return self.get_submodule(self.kind).get_shape()  # type: ignore[operator, no-any-return]  # torch types submodules as tensors

    def require_shape(self, features: int, classes: int) -> None:
        """Raise ModelError if it reads other rows, or predicts other classes."""
        if self._shape != (features, classes):
            raise ModelError(
                f"a model of {self._shape[0]} numbers a row and {self._shape[1]} classes; expected "
                f"{features} and {classes}"
            )

    def plain_head(self) -> nn.Linear:
        """Return a linear layer on scores (B, K) that is the identity."""
        head = nn.Linear(self.classes, self.classes, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(torch.eye(self.classes))
            head.bias.zero_()
        return head

    def as_head(self) -> nn.Sequential:
        """Return this model followed by `plain_head`."""
        return nn.Sequential(self, self.plain_head())

    def forward(self, features_B: Tensor) -> Tensor:
        """Return log-probabilities (B, K), float64."""
        buffer = next(self.buffers())
        shares_BK = self.get_submodule(self.kind)(features_B.flatten(1).to(buffer))
        return shares_of_one(shares_BK).clamp(min=LEAST).log()


STUDENT_ENCODER = "student_encoder"
STUDENT_HEAD = "student_head"
"""Names of the two halves of a network whose scores stand beside the row."""


def join_scores_to_row(encoder: nn.Module, head: nn.Module) -> WithFeatures:
    """Return an encoder that outputs the row, followed by a network's class scores."""
    halves = OrderedDict({STUDENT_ENCODER: encoder, STUDENT_HEAD: head})
    return WithFeatures(nn.Sequential(halves))


def modules_in(
    tensors: Mapping[str, Tensor],
    make_modules: Callable[[Mapping[str, Tensor]], tuple[nn.Module, nn.Module]],
) -> tuple[nn.Module, nn.Module]:
    """Return the encoder and head of this state.

    A fitted model stands in place of both, or after an encoder, or after the row and an encoder
    (`WithFeatures`), or after the row and the scores of a whole network (`join_scores_to_row`). All
    else is as `make_modules` makes it from the state of encoder and head.

    `tensors`: of the state, by name.

    Raises ModelError: a damaged fitted model.
    """
    fitted = FittedModel.from_tensors(remove_prefix("encoder", tensors))
    if fitted is not None:
        return fitted, fitted.plain_head()
    encoder: nn.Module
    head: nn.Module
    represented = remove_prefix("encoder.represented", tensors)
    if any(name.startswith(f"{STUDENT_HEAD}.") for name in represented):
        encoder = _load_cross_view_networks(represented, make_modules)
        head = nn.Module()  # a fitted model, which is read below
    elif represented:
        within, head = make_modules(add_prefix("encoder", represented))
        encoder = WithFeatures(within)
    else:
        encoder, head = make_modules(tensors)
    fitted = FittedModel.from_tensors(remove_prefix("head.0", tensors))
    return encoder, head if fitted is None else fitted.as_head()


def _load_cross_view_networks(
    represented: Mapping[str, Tensor],
    make_modules: Callable[[Mapping[str, Tensor]], tuple[nn.Module, nn.Module]],
) -> nn.Module:
    """Return an encoder of the row and the scores of a network in this state.

    See `join_scores_to_row`.

    `represented`: tensors of the represented rows' model. `make_modules`: makes untrained encoder
    and head for a state.
    """
    head_state = remove_prefix(STUDENT_HEAD, represented)
    encoder_state = remove_prefix(STUDENT_ENCODER, represented)
    encoder, head = make_modules(
        add_prefix("encoder", encoder_state) | add_prefix("head", head_state)
    )
    head.load_state_dict(head_state, assign=True)
    return join_scores_to_row(encoder, head)


def build_regression_layers(
    scale: Any,
    coefficients: ArrayLike,
    offsets: ArrayLike,
    seen: ArrayLike,
    classes: int,
    below: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> Layers:
    """Return scikit-learn's softmax regression (K', F) on standardised rows, after layers `below`.

    For two classes scikit-learn has one row, of the second.

    `scale`: scikit-learn's fitted scaler; or deviations (F,).
    """
    weight = np.atleast_2d(np.asarray(coefficients))
    bias = np.atleast_1d(np.asarray(offsets))
    if len(weight) == 1:
        weight = np.vstack([np.zeros_like(weight), weight])
        bias = np.append(0.0, bias)
    weight, bias = unscale_layer(scale, weight, bias)
    w_KF = np.zeros((classes, weight.shape[1]))
    b_K = np.full(classes, UNSEEN)
    w_KF[np.asarray(seen)] = weight
    b_K[np.asarray(seen)] = bias
    return Layers.from_weights([*below, (w_KF, b_K)])


def layers_of(network: nn.Module, scale: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the linear layers of a network that reads standardised rows.

    `scale`: scikit-learn's fitted scaler; or deviations (F,).
    """
    layers = [
        (layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy())
        for layer in network.modules()
        if isinstance(layer, nn.Linear)
    ]
    return [unscale_layer(scale, *layers[0]), *layers[1:]]


def unscale_layer(
    scale: Any, weight: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a layer on standardised rows as one on unscaled rows."""
    weight = weight / scale.scale_
    return weight, bias - weight @ scale.mean_


def assemble_trees(
    trees: Sequence[Mapping[str, np.ndarray]],
    *,
    bias: np.ndarray,
    raw: bool,
    single: bool,
    features: int,
    scale: Any = None,
) -> Trees:
    """Build trees from `feature`, `threshold`, `left`, `right` (V,) and `values` (V, K) of each.

    The children of a leaf are -1; no other node comes before its parent.

    `raw`: whether values are raw scores before a softmax. `single`: whether rows are compared in
    float32, as the trees were grown. `scale`: scikit-learn's fitted scaler; or deviations (F,).
    """
    starts = np.cumsum([0, *(len(tree["feature"]) for tree in trees)])
    parts: dict[str, list[np.ndarray]] = {name: [] for name in Trees.names[:5]}
    for start, tree in zip(starts, trees, strict=False):
        positions = np.arange(len(tree["feature"]))
        leaf = tree["left"] < 0
        parts["feature"].append(np.where(leaf, 0, tree["feature"]))
        parts["threshold"].append(np.where(leaf, 0.0, tree["threshold"]))
        parts["left"].append(np.where(leaf, positions, tree["left"]) + start)
        parts["right"].append(np.where(leaf, positions, tree["right"]) + start)
        parts["values"].append(tree["values"])
    return Trees(
        {
            **{name: np.concatenate(arrays).astype(np.float64) for name, arrays in parts.items()},
            "roots": starts[:-1].astype(np.float64),
            "bias": bias,
            "levels": [max(_compute_depth(tree) for tree in trees)],
            "raw": [raw],
            "single": [single],
            "centre": np.zeros(features) if scale is None else scale.mean_,
            "scale": np.ones(features) if scale is None else scale.scale_,
        }
    )


def _compute_depth(tree: Mapping[str, np.ndarray]) -> int:
    """Return the number of nodes below the root on the longest path, counted level by level.

    `tree`: scikit-learn's arrays by name.
    """
    depth = 0
    level = np.zeros(1, dtype=np.int64)  # the root
    while True:
        inner = level[tree["left"][level] >= 0]
        if not len(inner):
            return depth
        level = np.concatenate([tree["left"][inner], tree["right"][inner]])
        depth += 1


def convert_forest(
    trees: Sequence[Any], values: Sequence[np.ndarray], classes: int, scale: Any = None
) -> Trees:
    """Return scikit-learn's trees as one model, their mean; `values` holds each tree's shares
    (V, K) by node.
    """
    nodes = [
        {
            "feature": tree.feature,
            "threshold": tree.threshold,
            "left": tree.children_left,
            "right": tree.children_right,
            "values": shares / len(trees),
        }
        for tree, shares in zip(trees, values, strict=True)
    ]
    return assemble_trees(
        nodes,
        bias=np.zeros(classes),
        raw=False,
        single=True,
        features=trees[0].n_features,
        scale=scale,
    )
