"""What a curious active rebuilds of a passive's features, and who rebuilds by hijacking encoders.

Digits in strips of two rows, MNIST in halves, images as numbers between 0 and 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attacks.features.hijack import FeatureSpaceHijack, ReversedHijack
from attacks.interface import AttackResult
from attacks.live.play import play_active, play_passive
from attacks.run import mount
from experiments.leaks.sessions import VICTIM, Row, live_config, over_seeds
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.runs import run

__all__ = [
    "Reversed",
    "curious",
    "hijacked",
    "hijacking",
    "joint_inversion",
    "reversed_hijacked",
    "reversed_hijacking",
]

_SEEDS = range(5)
_FEWER_SEEDS = range(3)  # of MNIST and of APFed-C, where a run takes several times as long
_EPOCHS = 300
_RATE = 0.03
_HIDDEN = 128
_CURIOUS = ("inverse_network", "representation_network", "unpaired_inversion")


@dataclass(frozen=True, kw_only=True)
class Reversed:
    """One setting: strength of the answers, clip of the sum, noise of the guard (0: none)."""

    strength: float
    clip: float
    sigma: float = 0.0


_REVERSED = (
    Reversed(strength=1.0, clip=1.0),
    Reversed(strength=5.0, clip=1.0),
    Reversed(strength=5.0, clip=0.1),
    Reversed(strength=5.0, clip=1.0, sigma=0.1),
)


def joint_inversion() -> Iterator[Row]:
    """Pairs, public rows without pairs, or the encoder itself: curious actives."""
    for name in _CURIOUS:
        yield over_seeds([curious(name, seed=seed) for seed in _SEEDS], same=("attack",))


def curious(name: str, *, seed: int = 0) -> Row:
    """One of them, where the victim is the only passive."""
    config = live_config("digits", "tvfl", seed=seed)
    data = load_data(config.data, seed=seed)
    recording = run(config, None, data=replace(data, passives=data.passives[:1])).recording
    results = mount(recording, [AttackChoice(name=name)], seed=seed)
    return _row(name, next(one for one in results if one.victim == VICTIM))


def hijacking() -> Iterator[Row]:
    """FSHA against real passives: told one's own features of the same people, and not."""
    cases = (
        ("digits", True, _EPOCHS, _SEEDS),
        ("digits", False, _EPOCHS, _SEEDS),
        ("mnist-in-2", True, 100, _FEWER_SEEDS),
        ("mnist-in-2", True, _EPOCHS, _FEWER_SEEDS),
    )
    for name, conditioned, epochs, seeds in cases:
        yield over_seeds(
            [hijacked(name, conditioned=conditioned, epochs=epochs, seed=one) for one in seeds],
            same=("data", "told x", "epochs", "attack"),
        )


def hijacked(name: str, *, conditioned: bool, epochs: int = _EPOCHS, seed: int = 0) -> Row:
    """The victim is the only passive."""
    config, data = _long(live_config(name, "tvfl", seed=seed), epochs)
    attack = FeatureSpaceHijack(hidden=_HIDDEN, conditioned=conditioned)
    result = play_active(attack, config, VICTIM, data=data, seed=seed)
    return {
        "data": name,
        "told x": "yes" if conditioned else "no",
        "epochs": config.train.epochs,
        **_row("hijack", result),
    }


def reversed_hijacking() -> Iterator[Row]:
    """A4 on digits: the only passive, against the active's own loss, clip and guard."""
    for case in _REVERSED:
        yield over_seeds(
            [reversed_hijacked(case, seed=seed) for seed in _FEWER_SEEDS],
            same=("kappa", "clip", "sigma", "epochs", "attack"),
        )


def reversed_hijacked(case: Reversed, *, seed: int = 0) -> Row:
    """A session of APFed-C; the adversary's answers are as long as `strength` makes them."""
    config = live_config("digits", "apfed_c", masks="none", clip=case.clip, seed=seed)
    if case.sigma:
        guard = {"mechanism": "gaussian", "clip": 1.0, "sigma": case.sigma}
        config = Config.model_validate({**config.model_dump(), "guard": guard})
    config, data = _long(config)
    attack = ReversedHijack(hidden=_HIDDEN, strength=case.strength)
    result = play_passive(attack, config, VICTIM, data=data, seed=seed)
    return {
        "kappa": case.strength,
        "clip": case.clip,
        "sigma": case.sigma or "none",
        "epochs": config.train.epochs,
        **_row("reversed_hijack", result),
    }


def _long(config: Config, epochs: int = _EPOCHS) -> tuple[Config, VerticalData]:
    """So many epochs at a rate under which the pull is steady, with one passive."""
    train = config.train.model_copy(update={"epochs": epochs, "learning_rate": _RATE})
    data = load_data(config.data, seed=config.seed)
    return config.model_copy(update={"train": train}), replace(data, passives=data.passives[:1])


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
