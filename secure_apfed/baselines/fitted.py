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

MIN_PROBABILITY = 1e-12
"""Probability of a class that a model never saw."""
UNSEEN_CLASS_SCORE = -40.0
"""Score before a softmax of a class that a model never saw."""
_MAX_DEPTH = 4096
"""Largest depth of a tree in a file."""
_MAX_MEMBERS = 256
"""Largest number of models that an average in a file has."""
_MIN_DEVIATION = 1e-9
"""Standard deviation below which a column counts as constant."""


class ModelKind(nn.Module, ABC):
    """The base of the kinds of fitted models, which compute class shares from rows."""

    @abstractmethod
    def get_shape(self) -> tuple[int, int]:
        """Return the number of columns of a row (F), and the number of classes (K)."""

    @abstractmethod
    def forward(self, x_BF: Tensor) -> Tensor:
        """Return the class shares of B rows, (B, K), at least 0; zeros mean no prediction."""


class TensorModel(ModelKind):
    """The base of fitted models that consist of named tensors only."""

    names: tuple[str, ...]

    def __init__(self, tensors: Mapping[str, ArrayLike | Tensor]) -> None:
        """Register the named tensors, which must be complete, finite and of fitting shapes.

        Args:
            tensors: the tensors by name; a subclass lists the names in `names`.
        """
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
        """Raise ModelError if the tensors do not fit together."""


class Layers(TensorModel):
    """A stack of linear layers with ReLU between them, and a softmax at the end.

    It stores regressions and small networks.
    """

    def __init__(self, tensors: Mapping[str, ArrayLike | Tensor]) -> None:
        """Name the tensors w0, b0, w1, b1 and so on, as many as there are."""
        self.names = tuple(
            f"{letter}{layer_number}"
            for layer_number in range(len(tensors) // 2)
            for letter in ("w", "b")
        )
        super().__init__(tensors)

    @classmethod
    def from_weights(cls, layers: Sequence[tuple[ArrayLike, ArrayLike]]) -> "Layers":
        """Build layers from the weights (outputs, inputs) and biases (outputs,) of each."""
        return cls(
            {
                f"{letter}{layer_number}": values
                for layer_number, layer in enumerate(layers)
                for letter, values in zip("wb", layer, strict=True)
            }
        )

    def _check_tensors(self) -> None:
        """Raise ModelError unless each layer's input size is the former one's output size."""
        shapes = [tuple(buffer.shape) for buffer in self.buffers()]
        weight_shapes = shapes[::2]  # (outputs, inputs) of each layer
        bias_shapes = shapes[1::2]  # (outputs,) of each layer
        are_fitting = bool(weight_shapes)
        former_outputs: int | None = None  # the first layer reads rows of any width
        for weight_shape, bias_shape in zip(weight_shapes, bias_shapes, strict=True):
            if len(weight_shape) != 2 or bias_shape != weight_shape[:1]:
                are_fitting = False
                break
            output_count, input_count = weight_shape
            are_fitting = are_fitting and former_outputs in (None, input_count)
            former_outputs = output_count
        if not are_fitting:
            raise ModelError(f"layers of shapes {shapes} do not follow each other")

    def get_shape(self) -> tuple[int, int]:
        """Return the number of columns of a row, and the number of classes."""
        tensors = list(self.buffers())
        return tensors[0].shape[1], len(tensors[-1])

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return probabilities of K classes for B rows, (B, K)."""
        tensors = list(self.buffers())  # weight and bias of each layer by turns
        for index in range(0, len(tensors), 2):
            if index:
                x_BF = x_BF.relu()
            x_BF = nn.functional.linear(x_BF, tensors[index], tensors[index + 1])
        return x_BF.softmax(1)


class Cosines(TensorModel):
    """A linear layer on a row and cosines of it, whose scores below 0 count as 0.

    Attributes:
        directions, phases: (F, C) and (C,); a row x has the cosines cos(x directions + phases).
        linear: weights of the row's F features, (F, K).
        waves: weights of its C cosines, (C, K).
        bias: (K,), added to the scores of the K classes.
    """

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
        """Return the number of columns of a row, and the number of classes."""
        return len(self.directions), len(self.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return scores of K classes for B rows, (B, K); negative ones are set to 0."""
        # (B, C): the C random cosines of each row.
        waves_BC = torch.cos(x_BF @ self.directions + self.phases)
        return (x_BF @ self.linear + waves_BC @ self.waves + self.bias).relu()


class Nearest(TensorModel):
    """A nearest-neighbour model, which predicts the mean class shares of the nearest stored rows.

    So it contains rows of people.

    Attributes:
        rows: the stored rows, (R, F).
        shares: their class shares, (R, K).
        neighbours: how many of the nearest rows are averaged, (1,).
    """

    names = ("rows", "shares", "neighbours")
    rows: Tensor
    shares: Tensor
    neighbours: Tensor

    def _check_tensors(self) -> None:
        """Raise ModelError unless rows, shares and the number of neighbours fit together."""
        row_count = len(self.rows)
        fits = self.rows.ndim == self.shares.ndim == 2 and len(self.shares) == row_count
        if not fits or self.neighbours.numel() != 1 or not 1 <= float(self.neighbours) <= row_count:
            raise ModelError("remembered rows and their shares do not belong together")
        self._neighbours = int(self.neighbours)

    def get_shape(self) -> tuple[int, int]:
        """Return the number of columns of a row, and the number of classes."""
        return self.rows.shape[1], self.shares.shape[1]

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return the mean shares of the C stored rows nearest to each of B rows, (B, K)."""
        if torch.compiler.is_exporting():
            # ONNX has no cdist. These are squared distances minus |x|^2, which order the R stored
            # rows in the same way, except for ties.
            distance_BR = self.rows.square().sum(1) - 2 * x_BF @ self.rows.T
        else:
            distance_BR = torch.cdist(x_BF, self.rows, compute_mode="donot_use_mm_for_euclid_dist")
        nearest_BC = distance_BR.topk(self._neighbours, dim=1, largest=False).indices
        return self.shares[nearest_BC].mean(1)


class Trees(TensorModel):
    """A sum of decision trees' outputs: class shares, or scores before a softmax.

    Attributes:
        feature, threshold: the feature that each of the V nodes of all trees compares, and with
            what; a row goes left if the feature is at most the threshold.
        left, right: the children of each node, (V,); a leaf is its own child.
        values: output of each node, (V, K) for K classes.
        roots: the first node of each of the T trees.
        bias: added to the sum of the trees' outputs, (K,).
        levels: the largest number of steps from a root to a leaf.
        raw: 1 if the sum goes through a softmax; 0 if it already is class shares.
        single: 1 if rows are compared in float32, as when the trees were grown; otherwise 0.
        centre, scale: mean and deviation by which the F features are standardised first.
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
        """Raise ModelError unless shapes fit, and nodes refer to nodes and features that exist."""
        has_existing_indices = (
            _are_indices(self.feature, len(self.centre))
            and _are_indices(self.left, len(self.feature))
            and _are_indices(self.right, len(self.feature))
            and _are_indices(self.roots, len(self.feature))
        )
        if (
            not self._has_fitting_shapes()
            or not has_existing_indices
            or not 0 <= float(self.levels) <= _MAX_DEPTH
        ):
            raise ModelError("these tensors make no trees")
        self._levels = int(self.levels)
        self._raw = int(self.raw)
        self._single = int(self.single)

    def _has_fitting_shapes(self) -> bool:
        """Return whether the tensors' shapes are those that the class describes."""
        node_shape = (len(self.feature),)
        return (
            self.threshold.shape == self.left.shape == self.right.shape == node_shape
            and self.values.shape == (*node_shape, *self.bias.shape)
            and self.roots.ndim == 1
            and len(self.roots) > 0
            and self.scale.shape == (len(self.centre),)
            and self.levels.numel() == self.raw.numel() == self.single.numel() == 1
        )

    def get_shape(self) -> tuple[int, int]:
        """Return the number of columns of a row, and the number of classes."""
        return len(self.centre), len(self.bias)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Walk all trees from their roots to the leaves; return their summed values, (B, K).

        There are T trees with V nodes together, B rows and K classes.
        """
        x_BF = (x_BF - self.centre) / self.scale
        if self._single:
            # scikit-learn compares float32 features with float64 thresholds.
            x_BF = x_BF.float().double()
        feature_V = self.feature.long()
        left_V = self.left.long()
        right_V = self.right.long()
        # Every row starts at every root.
        node_BT = self.roots.long()[None] + torch.zeros_like(x_BF[:, :1], dtype=torch.int64)
        for _ in range(self._levels):
            is_left_BT = x_BF.gather(1, feature_V[node_BT]) <= self.threshold[node_BT]
            node_BT = torch.where(is_left_BT, left_V[node_BT], right_V[node_BT])
        scores_BK = self.values[node_BT].sum(1) + self.bias
        return scores_BK.softmax(1) if self._raw else scores_BK


def normalise_shares(shares_BK: Tensor) -> Tensor:
    """Return class shares (B, K) divided by their sum in each row; uniform for a row of zeros."""
    total_B1 = shares_BK.sum(1, keepdim=True)
    uniform_BK = torch.full_like(shares_BK, 1 / shares_BK.shape[1])
    return torch.where(total_B1 > 0, shares_BK / total_B1.clamp(min=MIN_PROBABILITY), uniform_BK)


class Member(nn.Module):
    """A member of an average of models: a model, and the columns of a row that it reads.

    Attributes:
        columns: the first column that it reads, and the one behind the last, (2,).
        centre, scale: mean and deviation by which these columns are standardised.
        weight: weight of its probabilities in the average, (1,), above 0; 1 if a state has none.

    Raises:
        ModelError: the tensors are not those of a member.
    """

    columns: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Check and register the columns, their scaling, the weight, and the model.

        Args:
            tensors: the member's state by name.
        """
        super().__init__()
        own_tensors = {name: tensor for name, tensor in tensors.items() if "." not in name}
        kinds = {name.partition(".")[0] for name in tensors if "." in name}
        required_names = set(own_tensors) - {"weight"}
        has_one_kind = len(kinds) == 1 and kinds <= set(TENSOR_MODELS)
        if required_names != {"columns", "centre", "scale"} or not has_one_kind:
            raise ModelError(
                "a model that is averaged with others holds columns, centre, scale and one of "
                f"{', '.join(TENSOR_MODELS)}"
            )
        for name, tensor in own_tensors.items():
            # A copy, since a file is written from tensors that share no memory.
            self.register_buffer(name, torch.as_tensor(tensor, dtype=torch.float64).clone())
        if not all(bool(tensor.isfinite().all()) for tensor in self.buffers()):
            raise ModelError("a model that is averaged with others holds what is not finite")
        (self.kind,) = kinds
        self.add_module(self.kind, TENSOR_MODELS[self.kind](remove_prefix(self.kind, tensors)))
        feature_count, self.classes = self.model.get_shape()
        if self.columns.shape != (2,) or bool((self.columns < 0).any()):
            raise ModelError("a model that is averaged with others reads no columns")
        weight = dict(self.named_buffers(recurse=False)).get("weight", torch.ones(1))
        if weight.shape != (1,) or not bool((weight > 0).all()):
            raise ModelError("a model that is averaged with others has a weight above 0")
        self.averaging_weight = float(weight)
        self.first_column, self.end_column = (int(column) for column in self.columns)
        if {(feature_count,)} != {
            self.centre.shape,
            self.scale.shape,
            (self.end_column - self.first_column,),
        }:
            raise ModelError(
                "a model that is averaged with others reads other columns than it says"
            )

    @property
    def model(self) -> TensorModel:
        """The model that reads the standardised columns."""
        kind = self.get_submodule(self.kind)
        assert isinstance(kind, TensorModel)
        return kind

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return the model's class probabilities from its standardised columns, (B, K)."""
        read_BF = (x_BF[:, self.first_column : self.end_column] - self.centre) / self.scale
        return normalise_shares(self.model(read_BF))


class Average(ModelKind):
    """The weighted mean of several models' probabilities.

    Each model reads columns of its own of a row.

    Raises:
        ModelError: there is no member, there are too many, or their numbers of classes differ.
    """

    def __init__(self, tensors: Mapping[str, ArrayLike | Tensor]) -> None:
        """Build the averaged models, in the order of their numbers.

        Args:
            tensors: states of all `Member`s, as "0.columns", "0.layers.w0", "1.columns" and so on.
        """
        super().__init__()
        tensor_by_name = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
        found_numbers = {name.partition(".")[0] for name in tensor_by_name}
        expected_numbers = [str(number) for number in range(len(found_numbers))]
        if (
            not tensor_by_name
            or found_numbers != set(expected_numbers)
            or len(expected_numbers) > _MAX_MEMBERS
        ):
            raise ModelError(f"an average is of 1 to {_MAX_MEMBERS} models, numbered from 0")
        for number in expected_numbers:
            self.add_module(number, Member(remove_prefix(number, tensor_by_name)))
        if len({member.classes for member in self.list_members()}) != 1:
            raise ModelError("models that are averaged tell different classes")

    def list_members(self) -> list[Member]:
        """Return the averaged models in the order of their numbers."""
        return [member for member in self.children() if isinstance(member, Member)]

    def get_shape(self) -> tuple[int, int]:
        """Return how many columns of a row any model reads, and the number of classes."""
        members = self.list_members()
        return max(member.end_column for member in members), members[0].classes

    def forward(self, x_BF: Tensor) -> Tensor:
        """Return the weighted mean of the M models' probabilities of K classes, (B, K)."""
        members = self.list_members()
        scores_MBK = torch.stack([member(x_BF) for member in members])
        weights = [member.averaging_weight for member in members]
        if len(set(weights)) == 1:  # a plain mean, with its own rounding
            return scores_MBK.mean(0)
        weights_M = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        return (scores_MBK * weights_M[:, None, None]).sum(0)


# Names of these kinds begin the names of tensors in files.
TENSOR_MODELS: Mapping[str, type[TensorModel]] = {
    "layers": Layers,
    "cosines": Cosines,
    "nearest": Nearest,
    "trees": Trees,
}
KINDS: Mapping[str, type[TensorModel] | type[Average]] = {**TENSOR_MODELS, "average": Average}


@dataclass(frozen=True, kw_only=True)
class ColumnView:
    """The columns of a row that a model reads, and how they are standardised.

    Attributes:
        first_column, end_column: the first column, and the one behind the last.
        centre, scale: mean and deviation of each of these columns.
    """

    first_column: int
    end_column: int
    centre: np.ndarray
    scale: np.ndarray

    @classmethod
    def for_whole_row(cls, features: int) -> "ColumnView":
        """Return the view of a whole row, without scaling."""
        return cls(
            first_column=0, end_column=features, centre=np.zeros(features), scale=np.ones(features)
        )

    @classmethod
    def from_rows(cls, rows_NF: np.ndarray, *, first_column: int, end_column: int) -> "ColumnView":
        """Return the view of columns `first_column` to `end_column` - 1, standardised over these N
        rows.

        A constant column is centred only.
        """
        columns_NF = rows_NF[:, first_column:end_column]
        deviation = columns_NF.std(axis=0)
        is_constant = deviation < _MIN_DEVIATION
        return cls(
            first_column=first_column,
            end_column=end_column,
            centre=columns_NF.mean(axis=0),
            scale=np.where(is_constant, 1.0, deviation),
        )

    def standardise_columns(self, rows_NF: np.ndarray) -> np.ndarray:
        """Return the view's columns of these rows, standardised, (N, end_column - first_column)."""
        columns_NF: np.ndarray = rows_NF[:, self.first_column : self.end_column]
        return np.asarray((columns_NF - self.centre) / self.scale)


def average_models(models: Sequence[tuple[ColumnView, "FittedModel"]]) -> "FittedModel":
    """Return the average of fitted models as one model.

    `models`: each model with its view, the columns of a row that it reads.
    """
    tensors: dict[str, ArrayLike | Tensor] = {}
    for position, (view, model) in enumerate(models):
        tensors[f"{position}.columns"] = np.array(
            [view.first_column, view.end_column], dtype=np.float64
        )
        tensors[f"{position}.centre"] = view.centre
        tensors[f"{position}.scale"] = view.scale
        for name, tensor in model.state_dict().items():
            tensors[f"{position}.{name}"] = tensor
    return FittedModel(Average(tensors))


def blend_models(view: ColumnView, model: "FittedModel", averaged: "FittedModel") -> "FittedModel":
    """Return the average of a model and of an average of others, each with half of the weight.

    Args:
        view: the columns that `model` reads.
        model: a single model.
        averaged: an average; its members read the same columns as before.

    Raises ModelError: `averaged` is not an average of equal weights, or `model` is an average.
    """
    average = averaged.get_submodule(averaged.kind)
    if not isinstance(average, Average) or any(
        member.averaging_weight != 1.0 for member in average.list_members()
    ):
        raise ModelError("only an average of equal weights is averaged with one more model")
    # The model becomes one more part of the average, weighted as all others together.
    member_count = len(average.list_members())
    model_state = average_models([(view, model)]).state_dict()
    tensors: dict[str, ArrayLike | Tensor] = dict(average.state_dict())
    for name, tensor in remove_prefix("average.0", model_state).items():
        tensors[f"{member_count}.{name}"] = tensor
    tensors[f"{member_count}.weight"] = np.array([float(member_count)])
    return FittedModel(Average(tensors))


def make_score_reader(
    columns_before: int, classes: int, *, are_shares: bool
) -> tuple[ColumnView, "FittedModel"]:
    """Return the view of class scores that stand behind a row, and a model that reads them.

    The model makes probabilities of the scores. So the scores of a network can enter an average of
    fitted models.

    Args:
        columns_before: how many columns precede the scores.
        classes: number of classes, and of scores.
        are_shares: whether scores are class shares, of which negative ones count as 0; False: they
            go through a softmax.
    """
    end = columns_before + classes
    view = ColumnView(
        first_column=columns_before,
        end_column=end,
        centre=np.zeros(classes),
        scale=np.ones(classes),
    )
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
    """Return whether these tensors look like this kind of fitted model, even if some are missing.

    It tells a fitted model from a user's own network, which may have a part of the same name, such
    as `layers`. `tensors`: the state by name, without the prefix `kind`.
    """
    if kind == "average":
        return any(_MEMBER.fullmatch(name) for name in tensors)
    if kind == "layers":
        return any(_LAYER.fullmatch(name) for name in tensors)
    # Half of the names show the kind, since some may be missing.
    names = TENSOR_MODELS[kind].names
    return 2 * len(set(names) & tensors.keys()) >= len(names)


class FittedModel(nn.Module):
    """A fitted model: rows (B, *shape) of any float dtype -> log-probabilities (B, K), float64.

    B rows, K classes. Its state consists of buffers only, so that a file identifies the model.
    """

    def __init__(self, kind: ModelKind) -> None:
        """Register the model under the name of its kind, which begins its tensors' names."""
        super().__init__()
        self.kind = next(name for name, model_class in KINDS.items() if type(kind) is model_class)
        self.add_module(self.kind, kind)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "FittedModel | None":
        """Return the fitted model with this state; None: the state belongs to another network.

        `tensors`: the state by name. Raises ModelError: the state is damaged.
        """
        first_names = {kind_name.partition(".")[0] for kind_name in tensors}
        kinds = {
            kind
            for kind in first_names & set(KINDS)
            if _is_state_of(kind, remove_prefix(kind, tensors))
        }
        if not kinds:
            return None
        kind_name = kinds.pop()
        if kinds or any(not key.startswith(f"{kind_name}.") for key in tensors):
            raise ModelError("the tensors of a fitted model are of several models")
        try:
            return cls(KINDS[kind_name](remove_prefix(kind_name, tensors)))
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise ModelError(
                f"the tensors of a fitted model do not fit together: {error}"
            ) from error

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self._shape[1]

    @property
    def _shape(self) -> tuple[int, int]:
        """The number of columns of a row, and the number of classes."""
        return self.get_submodule(self.kind).get_shape()  # type: ignore[operator, no-any-return]  # torch types submodules as tensors

    def require_shape(self, features: int, classes: int) -> None:
        """Raise ModelError unless it reads so many features, and predicts so many classes."""
        if self._shape != (features, classes):
            raise ModelError(
                f"a model of {self._shape[0]} numbers a row and {self._shape[1]} classes; expected "
                f"{features} and {classes}"
            )

    def make_identity_head(self) -> nn.Linear:
        """Return a linear layer on class scores that is the identity until it is calibrated."""
        head = nn.Linear(self.classes, self.classes, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(torch.eye(self.classes))
            head.bias.zero_()
        return head

    def as_head(self) -> nn.Sequential:
        """Return this model as a head: followed by a linear layer, which is the identity."""
        return nn.Sequential(self, self.make_identity_head())

    def forward(self, features_B: Tensor) -> Tensor:
        """Return log-probabilities of K classes for B rows, (B, K), float64."""
        buffer = next(self.buffers())  # shows the device and dtype
        shares_BK = self.get_submodule(self.kind)(features_B.flatten(1).to(buffer))
        return normalise_shares(shares_BK).clamp(min=MIN_PROBABILITY).log()


STUDENT_ENCODER = "student_encoder"
STUDENT_HEAD = "student_head"
"""Names of the two halves of a network whose scores stand beside the row."""


def join_scores_to_row(encoder: nn.Module, head: nn.Module) -> WithFeatures:
    """Return an encoder that outputs the row, followed by a network's class scores.

    `encoder`, `head`: the two halves of the network.
    """
    halves = OrderedDict({STUDENT_ENCODER: encoder, STUDENT_HEAD: head})
    return WithFeatures(nn.Sequential(halves))


def rebuild_modules(
    tensors: Mapping[str, Tensor],
    make_modules: Callable[[Mapping[str, Tensor]], tuple[nn.Module, nn.Module]],
) -> tuple[nn.Module, nn.Module]:
    """Build the encoder and head that a stored state belongs to.

    A state may contain a fitted model in four places: as encoder and head together; as the head
    after an encoder; as the head after the row beside an encoder's output (`WithFeatures`); or as
    the head after the row beside a whole network's scores (`join_scores_to_row`).

    Args:
        tensors: the state by name.
        make_modules: makes encoder and head of networks other than fitted models, from their state.

    Raises:
        ModelError: a fitted model in the state is damaged.
    """
    fitted_model = FittedModel.from_tensors(remove_prefix("encoder", tensors))
    if fitted_model is not None:
        return fitted_model, fitted_model.make_identity_head()
    encoder: nn.Module
    head: nn.Module
    inner_state = remove_prefix("encoder.represented", tensors)
    if any(name.startswith(f"{STUDENT_HEAD}.") for name in inner_state):
        encoder = _load_scores_beside_row(inner_state, make_modules)
        head = nn.Module()  # a fitted model, which is read below
    elif inner_state:
        inner_encoder, head = make_modules(add_prefix("encoder", inner_state))
        encoder = WithFeatures(inner_encoder)
    else:
        encoder, head = make_modules(tensors)
    fitted_model = FittedModel.from_tensors(remove_prefix("head.0", tensors))
    return encoder, head if fitted_model is None else fitted_model.as_head()


def _load_scores_beside_row(
    represented: Mapping[str, Tensor],
    make_modules: Callable[[Mapping[str, Tensor]], tuple[nn.Module, nn.Module]],
) -> nn.Module:
    """Return the encoder that `join_scores_to_row` made: the row beside a network's scores.

    `represented`: the state of that network, by name. `make_modules`: makes an untrained encoder
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
    scaler: Any,
    coefficients: ArrayLike,
    biases: ArrayLike,
    seen_classes: ArrayLike,
    classes: int,
    layers_before: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> Layers:
    """Return scikit-learn's softmax regression as linear layers on unscaled rows.

    Args:
        scaler: the fitted scaler of the rows that the regression reads.
        coefficients, biases: a row of weights (F,) and a number for each seen class; with two
            classes scikit-learn has only those of the second.
        seen_classes: the classes that occurred among the labels.
        classes: K, number of all classes.
        layers_before: weights and biases of layers before the regression.
    """
    weight = np.atleast_2d(np.asarray(coefficients))
    bias = np.atleast_1d(np.asarray(biases))
    if len(weight) == 1:  # two classes: the first one gets the score 0
        weight = np.vstack([np.zeros_like(weight), weight])
        bias = np.append(0.0, bias)
    weight, bias = unscale_layer(scaler, weight, bias)
    weight_KF = np.zeros((classes, weight.shape[1]))
    bias_K = np.full(classes, UNSEEN_CLASS_SCORE)
    weight_KF[np.asarray(seen_classes)] = weight
    bias_K[np.asarray(seen_classes)] = bias
    return Layers.from_weights([*layers_before, (weight_KF, bias_K)])


def extract_layers(network: nn.Module, scaler: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return weights and biases of a network's linear layers, for unscaled rows.

    The first layer is changed so that it does the scaling. `scaler`: the fitted scaler of the rows
    that the network reads.
    """
    layers = [
        (layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy())
        for layer in network.modules()
        if isinstance(layer, nn.Linear)
    ]
    return [unscale_layer(scaler, *layers[0]), *layers[1:]]


def unscale_layer(
    scaler: Any, weight: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight and bias of a layer on unscaled rows that equals one on scaled rows.

    `scaler`: the fitted scaler. `weight`: (outputs, features). `bias`: (outputs,).
    """
    weight = weight / scaler.scale_
    return weight, bias - weight @ scaler.mean_


def assemble_trees(
    trees: Sequence[Mapping[str, np.ndarray]],
    *,
    bias: np.ndarray,
    needs_softmax: bool,
    is_float32: bool,
    feature_count: int,
    scaler: Any = None,
) -> Trees:
    """Build one model from several trees.

    Args:
        trees: arrays of each tree by name, with one entry for each of its V nodes: `feature`,
            `threshold`, `left`, `right`, and `values` (V, K) for K classes. The children of a leaf
            are -1.
        bias: added to the sum of the trees' outputs, (K,).
        needs_softmax: whether this sum goes through a softmax.
        is_float32: whether rows are compared in float32, as when the trees were grown.
        feature_count: number of columns of a row.
        scaler: the fitted scaler of the rows; None: rows are not scaled.
    """
    node_counts = [len(tree["feature"]) for tree in trees]
    # The trees' nodes are numbered one tree after the other.
    first_nodes = np.cumsum([0, *node_counts[:-1]])
    renumbered_trees = [
        _renumber_nodes(tree, int(first_node))
        for first_node, tree in zip(first_nodes, trees, strict=True)
    ]
    nodes_by_name = {
        name: np.concatenate([tree[name] for tree in renumbered_trees]).astype(np.float64)
        for name in ("feature", "threshold", "left", "right", "values")
    }
    return Trees(
        {
            **nodes_by_name,
            "roots": first_nodes.astype(np.float64),
            "bias": bias,
            "levels": [max(_compute_depth(tree) for tree in trees)],
            "raw": [needs_softmax],
            "single": [is_float32],
            "centre": np.zeros(feature_count) if scaler is None else scaler.mean_,
            "scale": np.ones(feature_count) if scaler is None else scaler.scale_,
        }
    )


def _renumber_nodes(tree: Mapping[str, np.ndarray], first_node: int) -> dict[str, np.ndarray]:
    """Return a tree's arrays of nodes for a model in which its nodes start at `first_node`.

    There a leaf is its own child, where `tree` has -1.
    """
    node_range = np.arange(len(tree["feature"]))
    is_leaf = tree["left"] < 0
    return {
        "feature": np.where(is_leaf, 0, tree["feature"]),
        "threshold": np.where(is_leaf, 0.0, tree["threshold"]),
        "left": np.where(is_leaf, node_range, tree["left"]) + first_node,
        "right": np.where(is_leaf, node_range, tree["right"]) + first_node,
        "values": tree["values"],
    }


def _are_indices(values: Tensor, limit: int) -> bool:
    """Return whether all values lie in 0..limit - 1."""
    return bool(((values >= 0) & (values < limit)).all())


def _compute_depth(tree: Mapping[str, np.ndarray]) -> int:
    """Return the number of nodes below the root on the longest path, counted level by level.

    `tree`: arrays of one tree's nodes by name, as `assemble_trees` takes them.
    """
    depth = 0
    level_nodes = np.zeros(1, dtype=np.int64)  # the root
    while True:
        inner_nodes = level_nodes[tree["left"][level_nodes] >= 0]
        if not len(inner_nodes):
            return depth
        level_nodes = np.concatenate([tree["left"][inner_nodes], tree["right"][inner_nodes]])
        depth += 1


def convert_forest(
    trees: Sequence[Any], shares_by_tree: Sequence[np.ndarray], classes: int, scaler: Any = None
) -> Trees:
    """Return scikit-learn's trees as one model that predicts their mean.

    Args:
        trees: scikit-learn's low-level trees.
        shares_by_tree: for each tree the class shares of its nodes, (nodes, classes).
        classes: number of classes.
        scaler: the fitted scaler of the rows; None: rows are not scaled.
    """
    arrays_by_tree = [
        {
            "feature": tree.feature,
            "threshold": tree.threshold,
            "left": tree.children_left,
            "right": tree.children_right,
            "values": shares / len(trees),
        }
        for tree, shares in zip(trees, shares_by_tree, strict=True)
    ]
    return assemble_trees(
        arrays_by_tree,
        bias=np.zeros(classes),
        needs_softmax=False,
        is_float32=True,
        feature_count=trees[0].n_features,
        scaler=scaler,
    )
