"""Hijacking a client of whole images: real digits, with a client small enough for a test."""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from apfed_attacks.features.hijack import FeatureSpaceHijack
from apfed_experiments.leaks.hijacking import Case, Outcome, draw_rebuilt, hijack_client


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Twice as large, so that maps have places to tell apart."""
    small = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1
    images = functional.interpolate(small, scale_factor=2)
    return images[:1000], images[1000:]


def _played(iterations: int, ahead: int = 200) -> Outcome:
    attack = FeatureSpaceHijack(conditioned=False, hidden=128, ahead=ahead)
    private, outsiders = _digits()
    case = Case(name="digits", attack=attack, iterations=iterations)
    return hijack_client(case, private, outsiders, seed=0)


def test_whole_digits_are_rebuilt_from_maps() -> None:
    hijacked, quiet = _played(400), _played(1)
    assert hijacked.mse < 0.4 * hijacked.mean
    assert hijacked.own < hijacked.mse
    assert quiet.mse > 0.9 * quiet.mean


def test_one_seed_is_one_result() -> None:
    assert torch.equal(_played(2, ahead=5).rebuilt, _played(2, ahead=5).rebuilt)


def test_the_picture_has_a_row_for_each(tmp_path: Path) -> None:
    images = _digits()[0][:12]
    draw_rebuilt(images, {"rebuilt": -images}, tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
