"""Regularised softmax regression: its minimiser, found to a tolerance that is proved.

    J(T) = 1/n sum over i of -log softmax(T x_i)[y_i] + Lambda/2 |T|^2

J is Lambda-strongly convex, so that |T - T*| <= |grad J(T)| / Lambda for every T: how far the
minimiser still is can be read from the gradient. The constant is among the features, and
regularised like the others: one class alone has a minimiser, too.
"""

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from secure_apfed.labellers.interface import Floats, Integers

__all__ = ["minimiser", "probabilities", "with_constant"]


def with_constant(x_UF: Floats, constant: float) -> Floats:
    """Return the rows with one more column."""
    return np.hstack([x_UF, np.full((len(x_UF), 1), constant)])


def probabilities(x_UF: Floats, theta_FK: Floats) -> Floats:
    return np.asarray(softmax(x_UF @ theta_FK, axis=1), dtype=np.float64)


def minimiser(
    x_nF: Floats, labels_n: Integers, classes: int, *, strength: float, tolerance: float
) -> Floats:
    """Return theta_FK with |grad J| <= tolerance, Frobenius.

    L-BFGS comes near; gradient steps of length 1 / L, which shrink the distance to the minimiser by
    1 - Lambda / L each, go the rest of the way, however far it is. L = max |x|^2 / 2 + Lambda,
    since the Hessian of -log softmax has no eigenvalue above 1/2.

    Args:
        x_nF: rows, the constant among them.
        labels_n: in 0..K-1.
        classes: K.
        strength: Lambda, positive.
        tolerance: positive, and far above 1e-15 times the longest row.
    """
    target_nK = np.eye(classes)[labels_n]
    shape = (x_nF.shape[1], classes)

    def value_and_gradient(flat: Floats) -> tuple[float, Floats]:
        theta_FK = flat.reshape(shape)
        logits_nK = x_nF @ theta_FK
        loss = -float((target_nK * log_softmax(logits_nK, axis=1)).sum()) / len(x_nF)
        residual_nK = softmax(logits_nK, axis=1) - target_nK
        gradient_FK = x_nF.T @ residual_nK / len(x_nF) + strength * theta_FK
        return loss + strength / 2 * float((flat**2).sum()), gradient_FK.ravel()

    found = minimize(
        value_and_gradient, np.zeros(shape[0] * classes), jac=True, method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 20000, "gtol": tolerance / shape[0] / classes,
                 "ftol": 0.0, "maxcor": 20},
    )  # fmt: skip
    theta = np.asarray(found.x, dtype=np.float64)
    length = 1 / (float((x_nF**2).sum(axis=1).max()) / 2 + strength)
    gradient = value_and_gradient(theta)[1]
    while float(np.linalg.norm(gradient)) > tolerance:
        theta = theta - length * gradient
        gradient = value_and_gradient(theta)[1]
    return theta.reshape(shape)
