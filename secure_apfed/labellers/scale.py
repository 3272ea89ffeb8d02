"""The scale of features as the labelled rows show it: no other row has a say."""

import numpy as np

from secure_apfed.labellers.interface import Floats

__all__ = ["scale_of"]


def scale_of(x_nF: Floats) -> tuple[Floats, float]:
    """Return the rows' mean, and their root mean square distance from it; 1 where it is 0.

    One number for all columns: tables come standardised, and pixels have one unit.
    """
    mean_F = np.asarray(x_nF.mean(axis=0))
    size = float(np.sqrt(((x_nF - mean_F) ** 2).sum(axis=1).mean()))
    tiny = 1e-12 * float(np.abs(x_nF).max(initial=0.0))
    return mean_F, size if size > tiny else 1.0
