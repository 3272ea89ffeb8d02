"""What a curious active rebuilds of a passive's features, and who rebuilds by hijacking encoders.

Digits in strips of two rows, MNIST in halves, images as numbers between 0 and 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attacks.features.hijack import FeatureSpaceHijack
from attacks.features.reversed_hijack import ReversedHijack
from attacks.interface import AttackResult
from attacks.live.play import play_active, play_passive
from attacks.run import mount
from experiments.leaks.sessions import VICTIM, Row, live_config
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.runs.session import run

__all__ = [
    "Reversed",
    "curious",
    "hijacked",
    "hijacking",
    "joint_inversion",
    "reversed_hijacked",
    "reversed_hijacking",
]

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
        yield curious(name)


def curious(name: str) -> Row:
    """One of them, where the victim is the only passive."""
    config = live_config("digits", "tvfl")
    data = load_data(config.data, seed=0)
    recording = run(config, None, data=replace(data, passives=data.passives[:1])).recording
    results = mount(recording, [AttackChoice(name=name)], seed=0)
    return _row(name, next(one for one in results if one.victim == VICTIM))


def hijacking() -> Iterator[Row]:
    """FSHA against real passives: told one's own features of the same people, and not."""
    yield hijacked("digits", conditioned=True)
    yield hijacked("digits", conditioned=False)
    for epochs in (100, _EPOCHS):
        yield hijacked("mnist in 2", conditioned=True, epochs=epochs)


def hijacked(name: str, *, conditioned: bool, epochs: int = _EPOCHS) -> Row:
    """The victim is the only passive."""
    config, data = _long(live_config(name, "tvfl"), epochs)
    attack = FeatureSpaceHijack(hidden=_HIDDEN, conditioned=conditioned)
    result = play_active(attack, config, VICTIM, data=data)
    return {
        "data": name,
        "told x": "yes" if conditioned else "no",
        "epochs": config.train.epochs,
        **_row("hijack", result),
    }


def reversed_hijacking() -> Iterator[Row]:
    """A4 on digits: the only passive, against the active's own loss, clip and guard."""
    for case in _REVERSED:
        yield reversed_hijacked(case)


def reversed_hijacked(case: "Reversed") -> Row:
    """A session of APFed-C; the adversary's answers are as long as `strength` makes them."""
    config = live_config("digits", "apfed_c", protocol="plain", clip=case.clip)
    if case.sigma:
        guard = {"mechanism": "gaussian", "clip": 1.0, "sigma": case.sigma}
        config = Config.model_validate({**config.model_dump(), "guard": guard})
    config, data = _long(config)
    attack = ReversedHijack(hidden=_HIDDEN, strength=case.strength)
    result = play_passive(attack, config, VICTIM, data=data)
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
    data = load_data(config.data, seed=0)
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
