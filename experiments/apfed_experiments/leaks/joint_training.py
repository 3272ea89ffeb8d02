"""What a curious active rebuilds of a passive's features, and who rebuilds by hijacking encoders.

Digits in strips of two rows, MNIST in halves, images as numbers between 0 and 1.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from apfed_attacks.features.hijack import FeatureSpaceHijack, ReversedHijack
from apfed_attacks.interface import AttackResult
from apfed_attacks.live.runs import play_answers
from apfed_attacks.run import mount
from apfed_experiments.leaks.sessions import VICTIM, live_config
from apfed_experiments.summary import Row, Setting
from secure_apfed.config import AttackChoice, Config
from secure_apfed.data import VerticalData, load_data
from secure_apfed.runs.run import run

__all__ = ["hijacking", "joint_inversion", "reversed_hijacking"]

_SEEDS = range(5)
_FEWER_SEEDS = range(3)  # of MNIST and of APFed-C, where a run takes several times as long
_EPOCHS = 300
_RATE = 0.03
_HIDDEN = 128
_CURIOUS = ("inverse_network", "representation_network", "unpaired_inversion")


_REVERSED = (
    # strength of the answers, clip of the sum, noise of the guard (0: none)
    (1.0, 1.0, 0.0),
    (5.0, 1.0, 0.0),
    (5.0, 0.1, 0.0),
    (5.0, 1.0, 0.1),
)


def joint_inversion() -> Iterator[Setting]:
    """Pairs, public rows without pairs, or the encoder itself: curious actives."""
    for name in _CURIOUS:
        yield Setting(columns={"attack": name}, measure=partial(_curious, name), seeds=_SEEDS)


def _curious(name: str, seed: int) -> Row:
    config, data = _with_one_passive(live_config("digits", "tvfl", seed=seed))
    results = mount(run(config, None, data=data).recording, [AttackChoice(name=name)], seed=seed)
    return _figures(next(one for one in results if one.victim == VICTIM))


def hijacking() -> Iterator[Setting]:
    """FSHA against real passives: told one's own features of the same people, and not."""
    cases = (
        ("digits", True, _EPOCHS, _SEEDS),
        ("digits", False, _EPOCHS, _SEEDS),
        ("mnist-in-2", True, 100, _FEWER_SEEDS),
        ("mnist-in-2", True, _EPOCHS, _FEWER_SEEDS),
    )
    for name, told, epochs, seeds in cases:
        columns = {
            "data": name, "told x": "yes" if told else "no", "epochs": epochs, "attack": "hijack",
        }  # fmt: skip
        measure = partial(_hijacked, name, told, epochs)
        yield Setting(columns=columns, measure=measure, seeds=seeds)


def _hijacked(name: str, conditioned: bool, epochs: int, seed: int) -> Row:
    config, data = _with_one_passive(_long(live_config(name, "tvfl", seed=seed), epochs))
    attack = FeatureSpaceHijack(hidden=_HIDDEN, conditioned=conditioned)
    return _figures(play_answers(attack, config, VICTIM, data=data, seed=seed))


def reversed_hijacking() -> Iterator[Setting]:
    """A4 on digits: the only passive, against the active's own loss, clip and guard."""
    for strength, clip, sigma in _REVERSED:
        columns = {
            "kappa": strength, "clip": clip, "sigma": sigma or "none", "epochs": _EPOCHS,
            "attack": "reversed_hijack",
        }  # fmt: skip
        measure = partial(_reversed_hijacked, strength, clip, sigma)
        yield Setting(columns=columns, measure=measure, seeds=_FEWER_SEEDS)


def _reversed_hijacked(strength: float, clip: float, sigma: float, seed: int) -> Row:
    """A session of APFed-C; the adversary's answers are as long as `strength` makes them."""
    config = live_config("digits", "apfed_c", masks="none", clip=clip, seed=seed)
    if sigma:
        guard = {"mechanism": "gaussian", "clip": 1.0, "sigma": sigma}
        config = Config.model_validate({**config.model_dump(), "guard": guard})
    config, data = _with_one_passive(_long(config, _EPOCHS))
    attack = ReversedHijack(hidden=_HIDDEN, strength=strength)
    return _figures(play_answers(attack, config, VICTIM, data=data, seed=seed))


def _long(config: Config, epochs: int) -> Config:
    """So many epochs at a rate under which the pull is steady."""
    train = config.train.model_copy(update={"epochs": epochs, "learning_rate": _RATE})
    return config.model_copy(update={"train": train})


def _with_one_passive(config: Config) -> tuple[Config, VerticalData]:
    data = load_data(config.data, seed=config.seed)
    return config, replace(data, passives=data.passives[:1])


def _figures(result: AttackResult) -> Row:
    floor = result.baselines[result.baseline or ""]
    return {
        "variant": result.variant,
        **{key: result.score.get(key) for key in ("r2", "mse", "psnr", "ssim")},
        "baseline": result.baseline,
        "baseline r2": floor["r2"],
        "advantage": result.advantage,
    }
