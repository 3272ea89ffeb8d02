"""Planning: bytes, time, noise and accuracy, before anything real is sent.

Here is how much noise a promise needs: from epsilon and epochs to sigma, exactly, without any data.
Each row is released once an epoch under `gaussian`, and once in all under `frozen_gaussian`;
adjacency is replace-one, and nothing is gained by subsampling, since passives know who is in a
batch.
"""

from dataclasses import dataclass

from secure_apfed.privacy.accountants import calibrate_sigma, gdp_mu

__all__ = ["Calibration", "calibrate"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What keeps one row's releases within (epsilon, delta), encoder held fixed.

    Attributes:
        mechanism: of the guard; epochs: planned; releases: T of one row.
        clip: C; sigma: of the noise on each number, in the unit of the representation.
        noise_multiplier: sigma / (2C), which is all that epsilon depends on.
        mu: of Gaussian DP of the T releases together.
    """

    mechanism: str
    epsilon: float
    delta: float
    epochs: int
    releases: int
    clip: float
    sigma: float
    noise_multiplier: float
    mu: float


def calibrate(
    epsilon: float, *, epochs: int, delta: float, clip: float, mechanism: str
) -> Calibration:
    """Return the noise of one guard.

    Raises:
        ConfigError: a number out of range.
    """
    releases = min(epochs, 1) if mechanism == "frozen_gaussian" else epochs
    sigma = calibrate_sigma(epsilon, delta, releases, clip)
    return Calibration(
        mechanism=mechanism,
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        releases=releases,
        clip=clip,
        sigma=sigma,
        noise_multiplier=sigma / (2 * clip),
        mu=gdp_mu(epsilon, delta),
    )
