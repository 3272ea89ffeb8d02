"""Misuses of `train`, as a stranger makes them: each has one sentence that names who and what.

What looks like a misuse and is none simply works.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.prune import l1_unstructured
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset

from secure_apfed import Contrastive, FrozenGaussian, Reconstruction
from secure_apfed.errors import ConfigError, DataError, ModelError, PromiseError
from secure_apfed.interfaces.training import train
from tests.secure_apfed.test_training import (
    IDS,
    LABELS,
    QUICK,
    ROWS,
    LastState,
    N,
    Rows,
    agree,
    make_active,
    make_passive,
    parameters_of,
)


def make_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


class Pair(nn.Module):
    """An encoder that returns two things."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), None


class Whole(Pair):
    """An encoder that returns one row for the whole batch."""

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).mean()


def change_in_place(z: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        z.add_(1)
    return z.square().mean()


class Broken(Rows):
    """A data set with a row that cannot be read."""

    def __init__(self) -> None:
        super().__init__(ROWS[:, 4:])

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("no disk")
        return super().__getitem__(index)


class Net(nn.Module):
    """An encoder with one layer, which others of this file change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class NeedsMask(Net):
    def forward(self, x: Tensor, *, mask: Tensor) -> Any:  # type: ignore[override]
        return self.layer(x) * mask


class Rounded(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).long()


class Complex(Net):
    def forward(self, x: Tensor) -> Any:
        return torch.complex(self.layer(x), self.layer(x))


class NotANumber(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * math.nan


class Named(Net):
    def forward(self, x: Tensor) -> Any:
        return {"h": self.layer(x)}


class Silent(Net):
    def forward(self, x: Tensor) -> Any:
        self.layer(x)


class Detached(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).detach()


class InferenceOnly(Net):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class FirstHalf(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x[: len(x) // 2])


class Failing(Net):
    def forward(self, x: Tensor) -> Any:
        raise KeyError("weights")


class WiderInTraining(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Any:
        return self.other(x) if self.training else self.layer(x)


class BuffersOnly(nn.Module):
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(4))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight


class NotCountable(Rows):
    def __len__(self) -> Any:
        return "120"


class Shrinking(Rows):
    """A data set that has fewer items when it is asked again, and may have no others (`gone`)."""

    def __init__(self, *, gone: bool) -> None:
        super().__init__(ROWS[:, 4:])
        self.gone = gone
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return N if self.asked < 2 else 50

    def __getitem__(self, index: int) -> Any:
        if self.gone and index >= 50:
            raise IndexError(index)
        return super().__getitem__(index)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(ROWS[:, 4:])


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def make_hooked_layer() -> nn.Module:
    layer = nn.Linear(4, 6)
    layer.register_forward_hook(lambda module, inputs, result: result * 2)
    return layer


def call_backward(z: Tensor, x: Tensor) -> Tensor:
    z.square().mean().backward()
    return z.square().mean()


def change_rows(z: Tensor, x: Tensor) -> Tensor:
    return x.zero_().mean() + z.square().mean()


def frame_of(*names: str) -> pd.DataFrame:
    return pd.DataFrame(ROWS[:, 4:].numpy(), columns=[*names])


class OfWeights(nn.Module):
    """A loss of its weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, z: Tensor, x: Tensor) -> Any:
        return self.layer(x).square().mean()


class ListOut(Net):
    def forward(self, x: Tensor) -> Any:
        return [self.layer(x)]


class ArrayOut(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).detach().numpy()


class HalfOut(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x).half()


class TwoInputs(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return self.layer(x) * mask


class ScalesRows(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x.mul_(2))


class PackedMask(Net):
    """An encoder of two inputs that stand side by side in a row."""

    def forward(self, x: Tensor) -> Any:
        values, mask = x.chunk(2, dim=1)
        return self.layer(torch.cat([values, values * mask], dim=1))


class NoBase(nn.Module):
    def __init__(self) -> None:  # without super().__init__()
        pass


class Centred(nn.Module):
    """A loss with a running mean of what it saw."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, z: Tensor, x: Tensor) -> Any:
        self.centre = 0.9 * self.centre + 0.1 * z.detach().mean(0)
        return (z - self.centre).square().mean()


class Items(Rows):
    """A data set whose items are made of rows by a function."""

    def __init__(self, make: Any) -> None:
        self.make = make
        super().__init__(ROWS[:, 4:])

    def __getitem__(self, index: int) -> Any:
        return self.make(self.rows[index])


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (-x.square()).log()


def triplet(z: Tensor, x: Tensor) -> Tensor:
    """Return a triplet loss: near own rows shall have near z, far ones far."""
    apart_BB = torch.cdist(x, x).fill_diagonal_(math.inf)
    near = z[apart_BB.argmin(1)]
    far = z[apart_BB.fill_diagonal_(0).argmax(1)]
    loss: Tensor = F.triplet_margin_loss(z, near, far)
    return loss


def make_read_only(rows: Tensor) -> "np.ndarray[Any, Any]":
    array: np.ndarray[Any, Any] = rows.numpy().copy()
    array.setflags(write=False)
    return array


HOLED = ROWS[:, 4:].clone()
HOLED[3, 2] = math.nan
SHARED = nn.Linear(4, 6)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.script(nn.Linear(4, 6))
    QUANTISED = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 6)), {nn.Linear})
MISUSES: Mapping[
    str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], type[Exception], str]
] = {
    # what the active, the passive and the call have, and how it is refused
    "encoder is text": (
        {"encoder": "resnet"},
        {},
        {},
        ConfigError,
        "a function, got str",
    ),
    "encoder is made by a text": (
        {"encoder": lambda: "x"},
        {},
        {},
        ModelError,
        "makes a str",
    ),
    "encoder of other rows": ({"encoder": nn.Linear(9, 6)}, {}, {}, ModelError, r"shape \(4,\)"),
    "encoder returns a tuple": ({"encoder": Pair()}, {}, {}, ModelError, "made tuple"),
    "encoder returns one row": ({"encoder": Whole()}, {}, {}, ModelError, r"made \(\)"),
    "encoder without numbers": (
        {"encoder": nn.Linear(4, 6, device="meta")},
        {},
        {},
        ConfigError,
        "without numbers",
    ),
    "head of other classes": (
        {"head": nn.Linear(6, 3)},
        {},
        {},
        ModelError,
        r"\(3,\) of a row",
    ),
    "head of another width": (
        {"head": nn.Linear(5, 2)},
        {},
        {},
        ModelError,
        r"shape \(6,\)",
    ),
    "nothing to train": (
        {"encoder": nn.Flatten(), "head": nn.Identity(), "rows": ROWS[:, :2]},
        {},
        {"model": {"projection": "none"}},
        ModelError,
        "no weights that gradients reach",
    ),
    "BatchNorm under a guard": (
        {"encoder": make_batch_norm()},
        {},
        {"guard": FrozenGaussian(epsilon=8)},
        PromiseError,
        "BatchNorm1d",
    ),
    "loss ignores z": ({}, {"loss": lambda z, x: x.mean()}, {}, ModelError, "does not depend on z"),
    "loss is of weights alone": (
        {},
        {"loss": OfWeights()},
        {},
        ModelError,
        "no gradient of its loss reaches z",
    ),
    "loss reads weights of nobody": (
        {},
        {"loss": lambda z, x: SHARED.weight.square().mean() + z.mean()},
        {},
        ModelError,
        "lab: its code reads 1 weights that are no part of what it hands in",
    ),
    "loss is no scalar": (
        {},
        {"loss": lambda z, x: z.square().sum(1)},
        {},
        ModelError,
        r"returns one number, .*got \(\d+,\); end it with .mean\(\)",
    ),
    "loss is a float": ({}, {"loss": lambda z, x: 1.0}, {}, ModelError, "got float"),
    "loss detaches z": (
        {},
        {"loss": lambda z, x: z.detach().square().mean()},
        {},
        ModelError,
        "detaches it",
    ),
    "loss changes z": ({}, {"loss": change_in_place}, {}, ModelError, "changes z in place"),
    "loss is NaN": (
        {},
        {"loss": lambda z, x: (z * math.nan).mean()},
        {},
        Exception,
        "lab: its loss is nan",
    ),
    "loss is a text": ({}, {"loss": "mse"}, {}, ConfigError, "nn.Module or a function, got str"),
    "two parties, one module": (
        {"encoder": SHARED, "head": nn.Linear(6, 2)},
        {"loss": Contrastive(encoder=SHARED)},
        {},
        ConfigError,
        "clinic and lab hand in modules that share parameters",
    ),
    "optimizer of others": (
        {"optimizer": lambda parameters: torch.optim.SGD(SHARED.parameters(), lr=0.1)},
        {},
        {},
        ConfigError,
        "clinic: its optimizer holds other parameters",
    ),
    "optimizer is none": (
        {"optimizer": lambda parameters: None},
        {},
        {},
        ConfigError,
        "makes a torch.optim.Optimizer",
    ),
    "optimizer is made already": (
        {"optimizer": torch.optim.SGD(SHARED.parameters(), lr=0.1)},
        {},
        {},
        ConfigError,
        "clinic: optimizer: .*a function of the parameters, .*got SGD",
    ),
    "fewer rows than IDs": ({}, {"rows": ROWS[:9, 4:]}, {}, DataError, "lab: 120 IDs, but 9 rows"),
    "a data set shorter than IDs": (
        {},
        {"rows": Rows(ROWS[:9, 4:])},
        {},
        DataError,
        "lab: 120 IDs, but 9 rows",
    ),
    "one-hot labels": (
        {"labels": F.one_hot(LABELS)},
        {},
        {},
        DataError,
        r"expected one class a row, \(N,\): of one-hot labels give labels.argmax\(1\)",
    ),
    "numbers for labels": (
        {"labels": ROWS[:, 0]},
        {},
        {},
        DataError,
        "clinic: its labels are numbers with fractions",
    ),
    "a guard by its name": ({}, {}, {"guard": "frozen_gaussian"}, ConfigError, "expected FrozenG"),
    "an unreadable row": ({}, {"rows": Broken()}, {}, DataError, "lab: item 7 .* OSError: no disk"),
    "a loss that fails": (
        {},
        {"loss": lambda z, x: (z - x).square().mean()},
        {},
        ModelError,
        "lab: its loss failed on z of shape .* model=.'projection': .* says",
    ),
    "IDs twice": ({}, {"ids": [IDS[0], *IDS[:-1]]}, {}, DataError, "occur more than once"),
    "no rows": ({}, {"rows": ROWS[:0, 4:], "ids": []}, {}, DataError, "lab: "),
    "an empty data set": ({}, {"rows": Rows(ROWS[:0]), "ids": []}, {}, DataError, "lab: "),
    "one axis": ({}, {"rows": ROWS[:, 4]}, {}, DataError, r"give one column as rows\[:, None\]"),
    "a list of numbers": ({}, {"rows": [1.0] * N}, {}, DataError, "item 0 .* is a single number"),
    "a list of texts": ({}, {"rows": ["x"] * N}, {}, DataError, "item 0 .* is a str"),
    "an iterator": ({}, {"rows": iter([1])}, {}, DataError, "map-style data set"),
    "NaN": ({}, {"rows": torch.full((N, 4), math.nan)}, {}, DataError, "lab: 480 features are NaN"),
    "rows of several sizes": (
        {},
        {"rows": [*ROWS[:60, 4:], *ROWS[60:, 5:]]},
        {},
        DataError,
        "make all rows of one size",
    ),
    "fewer labels": ({"labels": LABELS[:9]}, {}, {}, DataError, "120 IDs, but 9 labels"),
    "labels of one class": ({"labels": [1] * N}, {}, {}, DataError, "of 1 class"),
    "one name": ({"name": "lab"}, {}, {}, DataError, "two parties have one name"),
    "no such sum": ({}, {}, {"secure_sum": "magic"}, ConfigError, "expected ckks, bfv, masked"),
    "no such method": ({}, {}, {"method": "apfedd"}, ConfigError, "did you mean 'apfed'"),
    "no people in common": (
        {},
        {"ids": [f"other-{number}" for number in range(N)]},
        {},
        Exception,
        "common|match|minimum",
    ),
    "forward needs more": (
        {"encoder": NeedsMask()},
        {},
        {},
        ModelError,
        "clinic: its encoder: NeedsMask .*'mask'",
    ),
    "encoder returns whole numbers": (
        {"encoder": Rounded()},
        {},
        {},
        ModelError,
        "Rounded made torch.int64: leave out what",
    ),
    "encoder returns complex numbers": (
        {"encoder": Complex()},
        {},
        {},
        ModelError,
        "Complex made torch.complex64",
    ),
    "encoder returns NaN": (
        {"encoder": NotANumber()},
        {},
        {},
        ModelError,
        "clinic: its networks give NaN or inf",
    ),
    "encoder returns NaN under a guard": (
        {"encoder": NotANumber()},
        {},
        {"guard": FrozenGaussian(epsilon=8)},
        ModelError,
        "clinic: its networks? .*NaN",
    ),
    "head returns NaN": (
        {"head": nn.Sequential(nn.Linear(6, 2), Logarithm())},
        {},
        {},
        ModelError,
        "clinic: its networks give NaN or infinite numbers on the first batch",
    ),
    "encoder returns a dictionary": (
        {"encoder": Named()},
        {},
        {},
        ModelError,
        "clinic: its encoder: .*Named made dict",
    ),
    "encoder returns nothing": (
        {"encoder": Silent()},
        {},
        {},
        ModelError,
        "clinic: its encoder: .*Silent made NoneType",
    ),
    "encoder detaches": (
        {"encoder": Detached()},
        {},
        {},
        ModelError,
        "clinic: no gradient reaches the weights of its encoder; .*without .detach",
    ),
    "encoder infers": (
        {"encoder": InferenceOnly()},
        {},
        {},
        ModelError,
        "clinic: its network on rows .*Inference",
    ),
    "encoder of half the rows": (
        {"encoder": FirstHalf()},
        {},
        {},
        ModelError,
        r"of two rows .* FirstHalf made \(1, 6\)",
    ),
    "encoder fails": (
        {"encoder": Failing()},
        {},
        {},
        ModelError,
        "clinic: its encoder: Failing .*KeyError: 'weig",
    ),
    "encoder of another width in training": (
        {"encoder": WiderInTraining()},
        {},
        {},
        ModelError,
        r"shape \(40, 4\) in training mode failed",
    ),
    "encoder of two precisions": (
        {"encoder": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6).double())},
        {},
        {},
        ModelError,
        r"its parameters are float32 and float64: convert it, as with .float\(\)",
    ),
    "encoder is a class that needs arguments": (
        {"encoder": nn.Linear},
        {},
        {},
        ModelError,
        "Linear cannot be made: TypeError: .*in_features",
    ),
    "encoder is compiled by torch.jit": (
        {"encoder": SCRIPTED},
        {},
        {},
        ConfigError,
        "clinic: encoder: .*compiled by torch.jit",
    ),
    "all weights are frozen": (
        {"encoder": freeze(nn.Linear(4, 6)), "head": freeze(nn.Linear(6, 2))},
        {},
        {"model": {"projection": "none"}},
        ModelError,
        "clinic: .*no weights .*requires_grad=True",
    ),
    "head of one output": (
        {"head": nn.Linear(6, 1)},
        {},
        {},
        ModelError,
        r"clinic: its head: it makes \(1,\) of a row",
    ),
    "head of classes that no row has": (
        {"labels": LABELS * 2, "head": nn.Linear(6, 3)},
        {},
        {},
        ModelError,
        r"it makes \(3,\) of a row, expected \(2,\)",
    ),
    "loss takes more": (
        {},
        {"loss": lambda z, x, y: z.mean()},
        {},
        ModelError,
        r"lab: its loss failed .*'y'.*loss\(z, ",
    ),
    "loss takes less": (
        {},
        {"loss": lambda z: z.mean()},
        {},
        ModelError,
        r"lab: its loss failed .*called as loss\(z, ",
    ),
    "loss is a network of one argument": (
        {},
        {"loss": LastState},
        {},
        ModelError,
        r"lab: its loss failed .*called as loss\(z, own rows",
    ),
    "loss fails with a key": (
        {},
        {"loss": lambda z, x: {"b": z}["a"]},
        {},
        ModelError,
        "lab: its loss failed .*KeyError: 'a'",
    ),
    "loss is complex": (
        {},
        {"loss": lambda z, x: (z + 0j).mean()},
        {},
        ModelError,
        "lab: its loss is a complex num",
    ),
    "loss goes backward": (
        {},
        {"loss": call_backward},
        {},
        ModelError,
        r"lab: its loss calls backward\(\) itself",
    ),
    "loss has no finite gradient": (
        {},
        {"loss": lambda z, x: (z * 0).sqrt().mean()},
        {},
        ModelError,
        "lab: the gradient of its loss by z is NaN",
    ),
    "loss is missing": ({}, {"loss": None}, {}, ConfigError, "lab brought no loss; hand one in"),
    "contrastive encoder of other rows": (
        {},
        {"loss": Contrastive(encoder=nn.Linear(9, 2))},
        {},
        ModelError,
        r"lab: its objective: Linear does not take rows of shape \(4,\)",
    ),
    "decoder of other rows": (
        {},
        {"loss": Reconstruction(decoder=nn.Linear(2, 3))},
        {},
        ModelError,
        r"lab: its objective: the decoder turns .* into \(3,\)",
    ),
    "encoder that a loss does not read": (
        {},
        {"encoder": nn.Linear(4, 6)},
        {},
        ConfigError,
        r"lab: it brought an encoder, .*loss=Contrastive\(encoder=...\)",
    ),
    "loss that a method does not read": (
        {"head": nn.Linear(70, 2)},
        {"loss": agree},
        {"method": "split_nn", "model": {}},
        ConfigError,
        "lab: it brought a loss, .*method split_nn",
    ),
    "optimizer without a rate that it takes": (
        {"optimizer": partial(torch.optim.SGD, lr=-1)},
        {},
        {},
        ConfigError,
        "clinic: its optimizer cannot be made .*Invalid learning rate: -1",
    ),
    "optimizer of some": (
        {"optimizer": lambda weights: torch.optim.SGD(weights[:1], lr=0.1)},
        {},
        {},
        ConfigError,
        "clinic: its optimizer leaves out encoder.0.bias, .*of the 8 parameters",
    ),
    "optimizer of modules that are not there": (
        {"optimizer": lambda modules: torch.optim.SGD(modules["backbone"].parameters())},
        {},
        {},
        ConfigError,
        "KeyError: 'backbone'.*there are encoder, head, projection",
    ),
    "optimizer with a closure": (
        {"optimizer": torch.optim.LBFGS},
        {},
        {},
        ConfigError,
        "clinic: LBFGS computes a step's loss",
    ),
    "optimizer of sparse gradients": (
        {"optimizer": torch.optim.SparseAdam},
        {},
        {},
        ModelError,
        "its optimizer in its step 1 failed",
    ),
    "scheduler in place of an optimizer": (
        {"optimizer": lambda weights: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(weights), 1)},
        {},
        {},
        ConfigError,
        "makes a torch.optim.Optimizer, .*got StepLR",
    ),
    "a data set that cannot be counted": (
        {},
        {"rows": NotCountable(ROWS[:, 4:])},
        {},
        DataError,
        r"lab: len\(\) of its data set",
    ),
    "a data set that shrinks": (
        {},
        {"rows": Shrinking(gone=True)},
        {},
        DataError,
        "lab: item .* cannot be read: IndexError",
    ),
    "a data set with NaN": (
        {},
        {"rows": Rows(HOLED)},
        {},
        DataError,
        "lab: item 3 of its data set is",
    ),
    "a stream": ({}, {"rows": Stream()}, {}, DataError, "lab: its rows are a Stream; .*map-style"),
    "a generator": (
        {},
        {"rows": (row for row in ROWS)},
        {},
        DataError,
        "lab: its rows are a generator; expected",
    ),
    "a loader": (
        {},
        {"rows": DataLoader(TensorDataset(ROWS))},
        {},
        DataError,
        "lab: its rows are a DataLoader",
    ),
    "a sampler": (
        {},
        {"rows": RandomSampler(ROWS)},
        {},
        DataError,
        "lab: its rows are a RandomSampler",
    ),
    "rows are objects": (
        {},
        {"rows": ROWS[:, 4:].numpy().astype(object)},
        {},
        DataError,
        "lab: .* array of object",
    ),
    "rows are complex": (
        {},
        {"rows": ROWS[:, 4:].to(torch.complex64)},
        {},
        DataError,
        "lab: .*complex numbers",
    ),
    "rows are sparse": (
        {},
        {"rows": ROWS[:, 4:].to_sparse()},
        {},
        DataError,
        r"lab: .*give rows.to_dense\(\)",
    ),
    "rows are without numbers": (
        {},
        {"rows": ROWS[:, 4:].to("meta")},
        {},
        DataError,
        "lab: .*on torch's meta device",
    ),
    "rows have no columns": (
        {},
        {"rows": ROWS[:, :0]},
        {},
        DataError,
        r"lab: .*shape \(120, 0\), so a row has no numbers",
    ),
    "rows are one column": (
        {},
        {"rows": frame_of(*"abcd")["a"]},
        {},
        DataError,
        r"lab: .*Series; .*rows.to_frame\(\)",
    ),
    "rows are a dictionary": (
        {},
        {"rows": {"a": ROWS[:, 4]}},
        {},
        DataError,
        r"lab: .*dict; .*pandas.DataFrame\(rows\)",
    ),
    "a frame with empty cells": (
        {},
        {"rows": frame_of(*"abcd").where(frame_of(*"abcd") < 1)},
        {},
        DataError,
        "lab: empty cells in",
    ),
    "columns of one name": (
        {},
        {"rows": frame_of(*"aabc")},
        {},
        DataError,
        "lab: its frame has several columns called a",
    ),
    "cells that hold arrays": (
        {},
        {"rows": pd.DataFrame({"scan": [*ROWS[:, 4:].numpy()]})},
        {},
        DataError,
        "lab: column scan of its frame holds a ndarray; .*np.stack",
    ),
    "an index in another order": (
        {},
        {"ids": pd.Series(IDS), "rows": frame_of(*"abcd").sample(frac=1, random_state=0)},
        {},
        DataError,
        r"lab: its IDs and its rows have the same index in .*rows.loc\[ids.index\]",
    ),
    "labels in another order": (
        {
            "rows": pd.DataFrame(ROWS[:, :4].numpy()),
            "labels": pd.Series(LABELS.numpy()).sample(frac=1, random_state=0),
        },
        {},
        {},
        DataError,
        r"clinic: its rows and its labels have the same index .*labels.loc\[rows.index\]",
    ),
    "IDs without an order": ({}, {"ids": set(IDS)}, {}, DataError, "lab: its IDs are a set, which"),
    "no IDs": ({}, {"ids": None}, {}, DataError, "lab: its IDs is of type NoneType"),
    "one text as IDs": ({}, {"ids": "id"}, {}, DataError, "lab: its IDs are the text 'id'"),
    "an empty ID": (
        {},
        {"ids": [None, *IDS[1:]]},
        {},
        DataError,
        "lab: its IDs is empty in 1 rows",
    ),
    "no labels": (
        {"labels": None},
        {},
        {},
        DataError,
        "clinic: its labels are a NoneType; expected",
    ),
    "the labels' name": ({"labels": "label"}, {}, {}, DataError, r"clinic: .*as frame\['label'\]"),
    "labels of a frame": (
        {"labels": pd.DataFrame(LABELS.numpy())},
        {},
        {},
        DataError,
        "clinic: .*of a frame its column",
    ),
    "ragged labels": (
        {"labels": [[1], [1, 2]] * 60},
        {},
        {},
        DataError,
        "clinic: 120 of its labels are lists",
    ),
    "labels by ID": (
        {"labels": dict.fromkeys(IDS, 1)},
        {},
        {},
        DataError,
        "clinic: its labels are a dict; expected",
    ),
    "labels as numbers and texts": (
        {"labels": [1, "1"] * 60},
        {},
        {},
        DataError,
        "clinic: its labels write 1 both as a number and",
    ),
    "labels are all unknown": (
        {"labels": [None] * N},
        {},
        {},
        DataError,
        "clinic: its labels are of 0 class",
    ),
    "a name that is no text": (
        {"name": 3},
        {},
        {},
        ConfigError,
        "a party's name is a text.* got int",
    ),
    "a rate beside the sections": (
        {},
        {},
        {"lr": 0.1},
        ConfigError,
        r"lr is no argument; say train=\{'learning_rate': 0.1\}",
    ),
    "a projection beside the sections": (
        {},
        {},
        {"hidden": [3]},
        ConfigError,
        r"hidden is no argument; say model=\{'hidden': \[3\]\}",
    ),
    "batches of one": (
        {},
        {},
        {"batch_size": 1},
        ConfigError,
        "batch_size=1: expected a number >= 2",
    ),
    "half a pass": ({}, {}, {"epochs": 1.5}, ConfigError, "epochs=1.5: expected a whole number"),
    "encoder returns a list": (
        {"encoder": ListOut()},
        {},
        {},
        ModelError,
        "clinic: its encoder: .*ListOut made list",
    ),
    "encoder returns an array": (
        {"encoder": ArrayOut()},
        {},
        {},
        ModelError,
        "clinic: its encoder: .*ArrayOut made ndarray",
    ),
    "encoder returns half precision": (
        {"encoder": HalfOut()},
        {},
        {},
        ModelError,
        "clinic: its network on rows .*but got Half and Float",
    ),
    "encoder of two inputs": (
        {"encoder": TwoInputs()},
        {},
        {},
        ModelError,
        "clinic: its encoder: TwoInputs .*'mask'.*forward takes them alone",
    ),
    "encoder of complex weights": (
        {"encoder": nn.Linear(4, 6, dtype=torch.complex64)},
        {},
        {},
        ModelError,
        "clinic: its encoder: .*Linear made torch.complex64",
    ),
    "encoder is a list of layers": (
        {"encoder": nn.ModuleList([nn.Linear(4, 6)])},
        {},
        {},
        ModelError,
        'clinic: its encoder: ModuleList .*"forward"',
    ),
    "encoder is a list of weights": (
        {"encoder": nn.ParameterList([nn.Parameter(torch.ones(4, 6))])},
        {},
        {},
        ModelError,
        "clinic: its encoder: ParameterList .*should not be called",
    ),
    "encoder of words": (
        {"encoder": nn.Embedding(10, 6)},
        {},
        {},
        ModelError,
        "clinic: its encoder: Embedding .*Long, Int; but got torch.FloatTensor",
    ),
    "encoder is an LSTM": (
        {"encoder": nn.LSTM(4, 6)},
        {},
        {},
        ModelError,
        "clinic: its encoder: .*LSTM made tuple",
    ),
    "encoder without its base": (
        {"encoder": NoBase},
        {},
        {},
        ModelError,
        r"NoBase makes a module whose __init__ does not begin with super\(\).__init__\(\)",
    ),
    "encoder with pruned weights": (
        {"encoder": l1_unstructured(nn.Linear(4, 6), "weight", 0.5)},
        {},
        {},
        ConfigError,
        "encoder and head: no copy can be made .*torch.nn.utils.prune.remove",
    ),
    "encoder is quantised": (
        {"encoder": QUANTISED},
        {},
        {},
        ConfigError,
        "clinic: encoder: state_dict.. of Sequential has 0._packed_params.dtype, a dtype",
    ),
    "loss returns a tuple": (
        {},
        {"loss": lambda z, x: (z.mean(), {})},
        {},
        ModelError,
        "lab: its loss returns a tuple of 2; expected one number, .*return the loss alone",
    ),
    "loss returns a dictionary": (
        {},
        {"loss": lambda z, x: {"loss": z.mean()}},
        {},
        ModelError,
        "lab: its loss returns a dict of 1; expected one number",
    ),
    "loss changes z by an operation in place": (
        {},
        {"loss": lambda z, x: z.relu_().mean()},
        {},
        ModelError,
        r"lab: its loss changes z in place; take z.clone\(\)",
    ),
    "loss of numpy": (
        {},
        {"loss": lambda z, x: torch.tensor(z.detach().numpy().mean())},
        {},
        ModelError,
        "lab: its loss does not depend on z, or detaches it",
    ),
    "loss of three": (
        {},
        {"loss": nn.TripletMarginLoss()},
        {},
        ModelError,
        r"lab: its loss failed .*'negative'; it is called as loss\(z, own rows\)",
    ),
    "a data set of dictionaries": (
        {},
        {"rows": Items(lambda row: {"x": row, "mask": row > 0})},
        {},
        DataError,
        r"lab: item 0 of its data set is a dict with x, mask; .*torch.cat\(\[item\['x'\]",
    ),
    "a data set of texts": (
        {},
        {"rows": Items(lambda row: "a note")},
        {},
        DataError,
        "lab: item 0 of its data set is a str; .*numbers of its tokens",
    ),
    "a sparse matrix of scipy": (
        {},
        {"rows": csr_matrix(ROWS[:, 4:].numpy())},
        {},
        DataError,
        r"lab: its rows are a sparse csr_matrix; .*rows.toarray\(\)",
    ),
    "a masked array": (
        {},
        {"rows": np.ma.masked_less(ROWS[:, 4:].numpy(), -1)},
        {},
        DataError,
        r"lab: its rows are a masked array with \d+ hidden cells; fill them",
    ),
    "an array of records": (
        {},
        {"rows": frame_of(*"abcd").to_records(index=False)},
        {},
        DataError,
        r"lab: its rows are an array of records \(a, b, c, d\); .*pandas.DataFrame\(rows\)",
    ),
    "a table of Arrow": (
        {},
        {"rows": pyarrow.Table.from_pandas(frame_of(*"abcd"))},
        {},
        DataError,
        r"lab: its rows are a Table of pyarrow; .*rows.to_pandas\(\)",
    ),
    "a nullable column with a hole": (
        {},
        {"rows": frame_of(*"abcd").mask(frame_of(*"abcd") > 2).convert_dtypes()},
        {},
        DataError,
        "lab: empty cells in",
    ),
    "IDs among the columns": (
        {},
        {"rows": frame_of(*"abcd").assign(person=IDS)},
        {},
        DataError,
        r"lab: column person of its frame holds its IDs, .*rows.drop\(columns='person'\)",
    ),
    "IDs are a frame": (
        {},
        {"ids": pd.DataFrame({"person": IDS})},
        {},
        DataError,
        r"lab: its IDs are a DataFrame; .*frame\['person'\]",
    ),
    "IDs of two axes": (
        {},
        {"ids": np.array(IDS)[:, None]},
        {},
        DataError,
        "lab: its IDs holds lists or records in 120 rows",
    ),
    "IDs as truth values": (
        {},
        {"ids": [True, False] * 60},
        {},
        DataError,
        "lab: its IDs holds truth values",
    ),
    "IDs once as a number and once as a text": (
        {},
        {"ids": [1, "1", *IDS[2:]]},
        {},
        DataError,
        "lab: 1 IDs occur more than once",
    ),
    "IDs with NaN": (
        {},
        {"ids": [math.nan, *IDS[1:]]},
        {},
        DataError,
        "lab: its IDs is empty in 1 rows, .*NaN",
    ),
    "labels are empty texts": (
        {"labels": ["", "ill"] * 60},
        {},
        {},
        DataError,
        "clinic: 60 of its labels are empty texts; give None",
    ),
    "a guard by its epsilon": ({}, {}, {"guard": 8}, ConfigError, "guard: expected FrozenGau.*8"),
    "a weight that is NaN": (
        {},
        {"weight": math.nan},
        {},
        ConfigError,
        r"Passive\('lab', weight=nan\): expected a number",
    ),
    "a precision of half": (
        {},
        {},
        {"train": {"precision": "float16"}},
        ConfigError,
        r"train=\{'precision': 'float16'\}: expected one of",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_does_not_fit_is_refused_by_name(misuse: str) -> None:
    active, passive, call, error, advice = MISUSES[misuse]
    with pytest.raises(error, match=advice):
        train(
            make_active(**active), [make_passive(**passive), make_passive("b")], **{**QUICK, **call}
        )


def test_what_is_no_party_is_refused() -> None:
    lab = make_passive()
    with pytest.raises(
        ConfigError, match=r"passives: expected a list .*; write \[passive\] for one"
    ):
        train(make_active(), lab, **QUICK)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"passives\[1\]: expected .*Passive.* got Active"):
        train(make_active(), [lab, make_active()], **QUICK)
    with pytest.raises(ConfigError, match=r"active: expected .*Active.* got Passive"):
        train(lab, [lab], **QUICK)  # type: ignore[arg-type]


WORKS: Mapping[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "encoder in evaluation mode": ({"encoder": nn.Linear(4, 6).eval()}, {}, {}),
    "dropout under a guard": (
        {"encoder": nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))},
        {},
        {"guard": FrozenGaussian(epsilon=8)},
    ),
    "a hook": ({"encoder": make_hooked_layer()}, {}, {}),
    "a lazy encoder": ({"encoder": nn.LazyLinear(6)}, {}, {}),
    "a lazy head": ({"head": nn.LazyLinear(2)}, {}, {}),
    "a lazy encoder of a loss": ({}, {"loss": Contrastive(encoder=nn.LazyLinear(5))}, {}),
    "a data-parallel wrapper": ({"encoder": nn.DataParallel(nn.Linear(4, 6))}, {}, {}),
    "buffers alone": ({"encoder": BuffersOnly(), "head": nn.Linear(4, 2)}, {}, {}),
    "weights in double precision": ({"encoder": nn.Linear(4, 6).double()}, {}, {}),
    "normed weights": (
        {"encoder": nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))},
        {},
        {},
    ),
    "encoder by a function": ({"encoder": lambda features: nn.Linear(features[0], 6)}, {}, {}),
    "a loss by its class": ({}, {"loss": Reconstruction}, {}),
    "a loss of torch": ({}, {"loss": nn.MSELoss(), "rows": ROWS[:, 4:6]}, {}),
    "a loss that changes the rows it is given": ({}, {"loss": change_rows}, {}),
    "an optimizer's class": ({}, {}, {"optimizer": torch.optim.AdamW}),
    "an optimizer with its rate": ({}, {}, {"optimizer": partial(torch.optim.SGD, lr=0.1)}),
    "a data set whose length changes": ({}, {"rows": Shrinking(gone=False)}, {}),
    "a part of a data set": ({}, {"rows": Subset(TensorDataset(ROWS[:, 4:]), [*range(N)])}, {}),
    "whole numbers": ({}, {"rows": (ROWS[:, 4:] * 10).long()}, {}),
    "rows with gradients": ({}, {"rows": ROWS[:, 4:].clone().requires_grad_()}, {}),
    "labels as whole floats": ({"labels": LABELS.double().numpy()}, {}, {}),
    "labels as booleans": ({"labels": LABELS.bool()}, {}, {}),
    "labels that skip a number": ({"labels": LABELS * 2}, {}, {}),
    "IDs with another index": ({}, {"ids": pd.Series(IDS, index=range(7, 7 + N))}, {}),
    "a frame with another index": ({}, {"rows": frame_of(*"abcd").set_index(np.arange(N) + 9)}, {}),
    "IDs as bytes": ({}, {"ids": [name.encode() for name in IDS]}, {}),
    "an encoder that changes its batch": ({"encoder": ScalesRows()}, {}, {}),
    "an encoder of two inputs side by side": ({"encoder": PackedMask()}, {}, {}),
    "a spectral norm": (
        {"encoder": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))},
        {},
        {},
    ),
    "orthogonal weights": (
        {"encoder": nn.utils.parametrizations.orthogonal(nn.Linear(4, 6))},
        {},
        {},
    ),
    "weights in half precision": ({"encoder": nn.Linear(4, 6).half()}, {}, {}),
    "a loss with a buffer": ({}, {"loss": Centred()}, {}),
    "a loss in half precision": ({}, {"loss": lambda z, x: z.square().mean().half()}, {}),
    "a triplet loss": ({}, {"loss": triplet}, {}),
    "a read-only array": ({}, {"rows": make_read_only(ROWS[:, 4:])}, {}),
    "rows of another byte order": ({}, {"rows": ROWS[:, 4:].numpy().astype(">f8")}, {}),
    "nullable columns": ({}, {"rows": frame_of(*"abcd").convert_dtypes()}, {}),
    "a column of categories": (
        {},
        {"rows": frame_of(*"abcd").assign(kind=pd.Categorical(["u", "v"] * 60))},
        {},
    ),
    "a column of dates": (
        {},
        {"rows": frame_of(*"abcd").assign(since=pd.date_range("2020", periods=N))},
        {},
    ),
    "IDs as categories": ({}, {"ids": pd.Categorical(IDS)}, {}),
    "IDs as numbers and as texts": (
        {"ids": [*range(N)]},
        {"ids": [str(number) for number in range(N)]},
        {},
    ),
    "labels with holes as nullable numbers": (
        {"labels": pd.array([None, *LABELS.tolist()[1:]], dtype="Int64")},
        {},
        {},
    ),
    "labels as categories, one of them unused": (
        {
            "labels": pd.Categorical(
                ["u" if label else "v" for label in LABELS], categories=[*"uvw"]
            )
        },
        {},
        {},
    ),
    "BatchNorm without a guard": ({"encoder": make_batch_norm()}, {}, {}),
    "LayerNorm under a guard": (
        {"encoder": nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))},
        {},
        {"guard": FrozenGaussian(epsilon=8)},
    ),
}


@pytest.mark.parametrize("use", WORKS)
def test_what_looks_like_a_misuse_and_is_none_works(use: str) -> None:
    active, passive, call = WORKS[use]
    others = {"ids": passive["ids"]} if "ids" in active else {}
    passives = [make_passive(**passive), make_passive("b", **others)]
    result = train(make_active(**active), passives, **{**QUICK, **call})
    assert 0 <= result.score <= 1
    assert parameters_of(result.model).isfinite().all()


def test_a_loss_changes_no_rows_of_its_party() -> None:
    rows = ROWS[:, 4:].clone()
    train(make_active(), [make_passive(rows=rows, loss=change_rows), make_passive("b")], **QUICK)
    assert torch.equal(rows, ROWS[:, 4:])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_network_trains_in_place(backend: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    before = parameters_of(inner)
    encoder = torch.compile(inner, backend=backend)
    passives = [make_passive(), make_passive("b")]
    result = train(make_active(encoder=encoder), passives, **{**QUICK, "baselines": True})
    assert not torch.equal(before, parameters_of(inner))
    assert result.alone is not None
