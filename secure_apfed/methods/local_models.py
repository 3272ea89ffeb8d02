"""The last step: local models over the active's features, a representation of them, and both.

Run by: the active, alone, after an exchange that left it a representation h of its features. APFed
without labels in the exchange leaves one (`train.labels: after`), a public code does, and so does
APC-VFL. Nothing is sent: the labels meet the representation here for the first time.

The local models are those that a run is compared with (`secure_apfed.solo`), each fitted to the
features x, to h, and to both beside each other. Models of x alone are the very fits of the
baselines. All are averaged, or the best three by held-out labels, or the best one is kept
(`train.combine`). A model that has collapsed is left out. Since no label touched the
exchange, held-out labels are as good as new ones, and no further test decides whether help is used.

Letters: U training rows, n of them with labels, B rows, F features, D numbers of h, K classes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from secure_apfed.data import PartyTable
from secure_apfed.errors import ModelError
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.votes import BLOCK
from secure_apfed.measures import ACCURACY, Measure
from secure_apfed.models import WithFeatures
from secure_apfed.seeds import one_thread
from secure_apfed.solo import (
    Baseline,
    SoloTask,
    has_collapsed,
    keep_fitted,
    list_local_models,
    rank_held_out,
)
from secure_apfed.solo.fitted import Fitted, View, average_of
from secure_apfed.solo.interface import FloatArray, fit_once, fits_kept_meanwhile

Combine: TypeAlias = Literal["mean", "mean_of_three", "best"]
_MOST: Mapping[Combine, int | None] = MappingProxyType(
    {"mean": None, "mean_of_three": 3, "best": 1}
)
"""How many models are averaged, the best by held-out labels; None: all."""
Input: TypeAlias = Literal["x", "h", "x and h"]


@dataclass(frozen=True, kw_only=True)
class LocalModels:
    """What the last step made.

    Attributes:
        networks: predict from the features alone, K log-probabilities a row, in float64.
        used: the models that are averaged, or the one that is kept, such as "mixmatch of x and h".
        left_out: models that collapsed, or that the rows could not be fitted by.
    """

    networks: ActiveNetworks = field(repr=False)
    used: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def score_rows_of(self, table: PartyTable) -> Callable[[Tensor], Tensor]:
        """Return what scores rows of this table, positions (B,) -> log-probabilities (B, K)."""

        @torch.no_grad()
        def score(rows_B: Tensor) -> Tensor:
            scores_BK: Tensor = self.networks(table.features[rows_B].double(), None)[0]
            return scores_BK

        return score

    def as_json(self) -> dict[str, list[str]]:
        return {"used": list(self.used), "left_out": list(self.left_out)}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """A local model of one input: what it is fitted to, and where it stands in a row (x, h)."""

    baseline: Baseline
    task: SoloTask
    view: View
    input: Input

    @property
    def name(self) -> str:
        return f"{self.baseline.name} of {self.input}"

    def fit(self) -> Fitted:
        return keep_fitted(fit_once(self.baseline, self.task))

    def has_collapsed(self) -> bool:
        return has_collapsed(self.baseline, self.task)

    def rank(self, measure: Measure) -> tuple[float, float]:
        return rank_held_out(self.baseline, self.task, measure)


def fit_local_models(
    encoder: nn.Module, task: SoloTask, *, combine: Combine, measure: Measure = ACCURACY
) -> LocalModels:
    """Fit local models over x, h and both, and make one model of them.

    Args:
        encoder: rows (B, *shape) -> h (B, *any shape); it is copied, and not trained.
        task: the active's training rows and labels, as its baselines have them.
        combine: "mean" of the probabilities of all, "mean_of_three" of the best three by the
            held-out labels, or the "best" one.
        measure: by which the best are chosen.

    Raises:
        ModelError: no local model can be fitted to these rows.
    """
    encoder = copy.deepcopy(encoder).cpu().double().requires_grad_(False).eval()
    task = task.few
    with one_thread(), fits_kept_meanwhile():
        candidates = _list_candidates(encoder, task)
        standing, left_out = _part_collapsed(candidates)
        most = _MOST[combine]
        if most is not None:
            standing.sort(key=lambda candidate: candidate.rank(measure), reverse=True)
            standing = standing[:most]
        fitted = [(candidate.view, candidate.fit()) for candidate in standing]
    networks = ActiveNetworks(WithFeatures(encoder), average_of(fitted).as_head())
    return LocalModels(
        networks=networks.requires_grad_(False).eval(),
        used=tuple(candidate.name for candidate in standing),
        left_out=tuple(left_out),
    )


def _list_candidates(encoder: nn.Module, task: SoloTask) -> list[_Candidate]:
    """Return every local model of every input, not fitted yet."""
    h_UD = represent(encoder, task)
    rows_UC = np.concatenate([task.features, h_UD], axis=1)
    features, width = task.features.shape[1], rows_UC.shape[1]
    whole: View = View.standardised(rows_UC, first=0, end=width)
    code: View = View.standardised(rows_UC, first=features, end=width)
    inputs: Sequence[tuple[Input, View, SoloTask]] = (
        ("x", View.unchanged(features), task),
        ("h", code, _read_through(code, rows_UC, task)),
        ("x and h", whole, _read_through(whole, rows_UC, task)),
    )
    return [
        _Candidate(baseline=baseline, task=of_input, view=view, input=name)
        for name, view, of_input in inputs
        for baseline in list_local_models()
    ]


def represent(encoder: nn.Module, task: SoloTask) -> FloatArray:
    """Return h of a task's rows, flattened, (U, D)."""
    rows_U = torch.from_numpy(task.features).reshape(len(task.features), *task.shape)
    with torch.no_grad():
        parts: list[Tensor] = [
            encoder(rows_B).flatten(1).double() for rows_B in rows_U.split(BLOCK)
        ]
    h_UD = torch.cat(parts).numpy()
    if not np.isfinite(h_UD).all():
        raise ModelError(
            "the representations that the exchange left are not finite: the training diverged; "
            "lower train.learning_rate, or set train.max_gradient_norm"
        )
    return np.asarray(h_UD, dtype=np.float64)


def _read_through(view: View, rows_UC: FloatArray, task: SoloTask) -> SoloTask:
    """Return the same task of the columns that a view reads."""
    read_UF = view.read(rows_UC)
    return replace(task, features=read_UF, shape=read_UF.shape[1:])


def _part_collapsed(candidates: Sequence[_Candidate]) -> tuple[list[_Candidate], list[str]]:
    """Return the candidates to use, and the names of those that are left out.

    Where all have collapsed all are used: then the labels' shares are no guide.
    """
    fitting: list[_Candidate] = []
    left_out: list[str] = []
    for candidate in candidates:
        try:
            candidate.fit()
        except ModelError:
            left_out.append(f"{candidate.name}: it cannot be fitted")
        else:
            fitting.append(candidate)
    if not fitting:
        raise ModelError("no local model can be fitted to the representations of this run")
    standing = [candidate for candidate in fitting if not candidate.has_collapsed()]
    if not standing:
        return fitting, left_out
    collapsed = [candidate.name for candidate in fitting if candidate not in standing]
    return standing, [*left_out, *(f"{name}: it collapsed" for name in collapsed)]
