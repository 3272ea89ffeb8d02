"""Joint training: what its active rebuilds of a passive's features, curious or malicious.

Digits in strips of two rows, images as numbers between 0 and 1.
"""

from collections.abc import Iterator
from dataclasses import replace

from attacks.hijack import FeatureSpaceHijack
from attacks.interface import AttackResult
from attacks.play import play_active
from attacks.run import mount
from experiments.leaks.sessions import VICTIM, Row, live_config
from secure_apfed.config import AttackChoice
from secure_apfed.data import load_data
from secure_apfed.runs.session import run

__all__ = ["curious", "hijacked", "hijacking", "joint_inversion"]

_PUBLISHED = 0.0193
_EPOCHS = 20
_CURIOUS = ("inverse_network", "representation_network", "unpaired_inversion")


def joint_inversion() -> Iterator[Row]:
    """Pairs, public rows without pairs, or the encoder itself: curious actives."""
    for name in _CURIOUS:
        yield curious(name)


def curious(name: str) -> Row:
    """One of them, where the victim is the only passive."""
    config = live_config("digits", "tvfl")
    data = load_data(config.data, seed=0)
    recording = run(config, None, data=replace(data, passives=data.passives[:1])).recording
    results = mount(recording, [AttackChoice(name=name)], seed=0)
    return _row(name, next(one for one in results if one.victim == VICTIM))


def hijacking() -> Iterator[Row]:
    """FSHA against real passives, on digits and on MNIST in two halves."""
    for data in ("digits", "mnist in 2"):
        yield hijacked(data)


def hijacked(name: str) -> Row:
    """The victim is the only passive."""
    config = live_config(name, "tvfl")
    settings = {"train": config.train.model_copy(update={"epochs": _EPOCHS})}
    data = load_data(config.data, seed=0)
    data = replace(data, passives=data.passives[:1])
    config = config.model_copy(update=settings)
    result = play_active(FeatureSpaceHijack(), config, VICTIM, data=data)
    # The published images lie between -1 and 1, where errors are 4 times as large.
    scaled = 4 * float(result.score["mse"] or 0)
    return {
        **_row(name, result),
        "mse in [-1, 1]": scaled,
        "over the published": scaled / _PUBLISHED,
    }


def _row(name: str, result: AttackResult) -> Row:
    floor = result.baselines[result.baseline or ""]
    return {
        "attack": name,
        "variant": result.variant,
        **{key: result.score.get(key) for key in ("r2", "mse", "psnr", "ssim")},
        "baseline": result.baseline,
        "baseline r2": floor["r2"],
        "advantage": result.advantage,
    }
