"""Figures that scikit-learn lacks or splits: names of clusters, AUC over the classes present, R^2,
PSNR, true positives at a low false positive rate.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata
from sklearn.metrics import confusion_matrix, roc_curve
from torch.nn import functional

__all__ = [
    "explained",
    "macro_auc",
    "mean_recall",
    "name_clusters_by_priors",
    "name_clusters_by_truth",
    "peak_ratio",
    "receiver_curve",
    "structural_similarity",
    "true_positives_at",
]

_WINDOW = 7

FloatArray: TypeAlias = NDArray[np.floating[Any]]
IntArray: TypeAlias = NDArray[np.int64]


def macro_auc(scores_NK: FloatArray, labels_N: IntArray) -> float | None:
    """Return the mean one-vs-rest AUC over the classes that occur; None if only one does.

    By ranks (Mann-Whitney), all classes at once: this runs for every variant of every attack.
    """
    is_class_NK = labels_N[:, None] == np.arange(scores_NK.shape[1])
    inside_K = is_class_NK.sum(axis=0)
    outside_K = len(labels_N) - inside_K
    defined_K = (inside_K > 0) & (outside_K > 0)
    if not defined_K.any():
        return None
    ranks_K = np.where(is_class_NK, rankdata(scores_NK, axis=0), 0).sum(axis=0)
    wins_K = (ranks_K - inside_K * (inside_K + 1) / 2)[defined_K]
    return float((wins_K / (inside_K * outside_K)[defined_K]).mean())


def mean_recall(guessed_N: IntArray, labels_N: IntArray) -> float:
    """Return the mean recall of the classes that occur (balanced accuracy).

    By counts: scikit-learn's checks take longer than all else that is measured of a variant.
    """
    _, class_N, count_K = np.unique(labels_N, return_inverse=True, return_counts=True)
    hits_K = np.bincount(class_N, weights=guessed_N == labels_N)
    return float((hits_K / count_K).mean())


def name_clusters_by_truth(scores_NK: FloatArray, labels_N: IntArray) -> FloatArray:
    """Return the columns in the order of classes that maximises accuracy (clustering accuracy).

    This is the usual convention (Hungarian matching on the confusion matrix; Xie et al.,
    Unsupervised Deep Embedding, 2016). It uses the truth: an upper bound on what an
    adversary reaches that can name its K clusters, for instance by one label each.
    """
    classes = range(scores_NK.shape[1])
    confusion_KK = confusion_matrix(labels_N, scores_NK.argmax(axis=1), labels=list(classes))
    _, cluster_of_class = linear_sum_assignment(-confusion_KK)
    return scores_NK[:, cluster_of_class]


def name_clusters_by_priors(scores_NK: FloatArray, priors_K: FloatArray) -> FloatArray:
    """Return the columns in the order of classes whose shares are nearest to the clusters' sizes.

    Hungarian matching on |size / N - prior|. Says little where the priors are nearly uniform.
    """
    clusters = scores_NK.shape[1]
    sizes_K = np.bincount(scores_NK.argmax(axis=1), minlength=clusters) / len(scores_NK)
    _, cluster_of_class = linear_sum_assignment(np.abs(priors_K[:, None] - sizes_K[None, :]))
    return scores_NK[:, cluster_of_class]


def explained(guess_NF: FloatArray, truth_NF: FloatArray) -> float | None:
    """Return R^2 over all features together: 1 - squared error / squared distance to the mean.

    A feature counts by its variance, so constant features (an image's dark corners) count
    nothing. None where nothing varies.
    """
    spread = float(np.square(truth_NF - truth_NF.mean(axis=0)).sum())
    return 1 - float(np.square(guess_NF - truth_NF).sum()) / spread if spread else None


def peak_ratio(guess_NF: FloatArray, truth_NF: FloatArray) -> float | None:
    """Return the PSNR in decibels for the range of the truth; None where it is unbounded."""
    mse = float(np.square(guess_NF - truth_NF).mean())
    peak = float(truth_NF.max() - truth_NF.min())
    return 10 * math.log10(peak**2 / mse) if mse and peak else None


def structural_similarity(guess_NF: FloatArray, truth_N: FloatArray) -> float | None:
    """Return the mean SSIM of images (N, channels, height, width) over windows of 7 x 7.

    None where the truth is no image, has a side below the window, or does not vary.
    """
    span = float(truth_N.max() - truth_N.min()) if truth_N.size else 0.0
    if truth_N.ndim != 4 or min(truth_N.shape[2:]) < _WINDOW or not span:
        return None
    truth = torch.from_numpy(truth_N)
    guess = torch.from_numpy(guess_NF).reshape(truth.shape).to(truth.dtype)
    mean_g, mean_t, square_g, square_t, product = _window_means(
        guess, truth, guess * guess, truth * truth, guess * truth
    )
    # Wang et al. 2004, Image Quality Assessment, Eq. (13)
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    squares_g, squares_t, both = mean_g.pow(2), mean_t.pow(2), mean_g * mean_t
    varied = (square_g - squares_g).clamp(min=0.0) + (square_t - squares_t).clamp(min=0.0)
    alike = (2 * both + c1) * (2 * (product - both) + c2)
    return float((alike / ((squares_g + squares_t + c1) * (varied + c2))).flatten(1).mean(1).mean())


def _window_means(*images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The mean of the window around each pixel, by channel; edges are reflected."""
    channels, edge = images[0].shape[1], _WINDOW // 2
    padded = functional.pad(torch.cat(images), (edge,) * 4, mode="reflect")
    window = torch.ones((channels, 1, _WINDOW, _WINDOW), dtype=padded.dtype) / _WINDOW**2
    return functional.conv2d(padded, window, groups=channels).chunk(len(images))


def receiver_curve(scores_N: FloatArray, members_N: NDArray[np.bool_]) -> list[tuple[float, float]]:
    """Return the corners (false positive rate, true positive rate) of the ROC, ascending."""
    false, true, _ = roc_curve(members_N, scores_N)
    return list(zip(false.tolist(), true.tolist(), strict=True))


def true_positives_at(curve: Sequence[tuple[float, float]], false_rate: float) -> float:
    """Return the highest true positive rate at a false positive rate of at most `false_rate`."""
    return max(true for false, true in curve if false <= false_rate)
