"""Generalised linear models of three parties: python docs/examples/vertical_glm.py [SUM].

In each step every passive adds its part of the linear predictor, eta_k = X_k w_k, to a secure sum
(CKKS, unless another is named). The active decrypts the total, adds its own part and the intercept,
and returns the gradient of the loss by eta: one number a row, the weighted residual. Each party
keeps its coefficients. The last lines compare with scikit-learn on one table of all columns.
"""

import sys
import time

import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge
from torch import nn
from torch.nn import functional as F

from secure_apfed import secure_sum
from secure_apfed.exchange import converse

SCHEME = sys.argv[1] if len(sys.argv) > 1 else "ckks"
PASSIVES = ("laboratory", "radiology")


def logistic(eta, y, weight):
    return F.binary_cross_entropy_with_logits(eta, y, weight=weight)


def squared(eta, y, weight):
    return (weight * (eta - y) ** 2).mean() / 2


def poisson(eta, y, weight):
    return (weight * (eta.exp() - y * eta)).mean()


class Party:
    """A party with columns of its own. Its coefficients are of columns with deviation 1."""

    def __init__(self, columns, rate, l2):
        self.columns = columns
        scaled = (columns - columns.mean()) / columns.std(ddof=0)
        self.x = torch.tensor(scaled.to_numpy())
        self.w = nn.Parameter(torch.zeros(self.x.shape[1], 1, dtype=torch.float64))
        settings = {"lr": rate, "momentum": 0.95, "nesterov": True, "weight_decay": l2}
        self.optimiser = torch.optim.SGD([self.w], **settings)

    def predict(self):
        self.eta = self.x @ self.w
        return self.eta.detach()

    def learn(self, gradient):
        self.optimiser.zero_grad()
        self.eta.backward(gradient)
        self.optimiser.step()

    def coefficients(self):
        return pd.Series(self.w.detach()[:, 0].numpy(), index=self.columns.columns)


class Active(Party):
    """The party with labels, and the intercept, which has no L2 term."""

    def __init__(self, columns, y, rate, l2, start, weight):
        super().__init__(columns, rate, l2)
        self.y = torch.tensor(y, dtype=torch.float64)[:, None]
        self.weight = weight(self.y)
        self.intercept = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        own = {"params": [self.intercept], "weight_decay": 0.0}
        self.optimiser.add_param_group(own)

    def descend(self, others, loss):
        """Take one step; return the gradient of the loss by each row's linear predictor."""
        others = others.requires_grad_()
        self.optimiser.zero_grad()
        loss(self.x @ self.w + others + self.intercept, self.y, self.weight).backward()
        self.optimiser.step()
        return others.grad


def balance(y):
    """Return weights of rows with which both classes count alike."""
    return torch.where(y == 1, 0.5 / y.mean(), 0.5 / (1 - y.mean()))


def fit(tables, y, loss, *, rate, l2, steps, start=0.0, weight=torch.ones_like, clip):
    """Return all coefficients by name, the intercept, and milliseconds a step."""
    active = Active(tables["clinic"], y, rate, l2, start, weight)
    passives = {name: Party(tables[name], rate, l2) for name in PASSIVES}
    by = None if SCHEME == "masked" else "notary"
    add = secure_sum(SCHEME, PASSIVES, to="clinic", by=by, clip=clip, bits=24, session="glm")
    roles = {name: add.make_contributor(name) for name in PASSIVES}
    reader = add.make_receiver()
    aggregator = add.make_aggregator() if by else reader
    converse({**roles, "clinic": reader, **({by: aggregator} if by else {})})
    began = time.perf_counter()
    for _ in range(steps):
        sent = {name: roles[name].contribute(passives[name].predict()) for name in PASSIVES}
        others = reader.decode(aggregator.combine(sent), active.y)
        gradient = active.descend(others, loss)
        for passive in passives.values():
            passive.learn(gradient)
    milliseconds = (time.perf_counter() - began) / steps * 1000
    parties = {"clinic": active, **passives}
    found = pd.concat({name: party.coefficients() for name, party in parties.items()})
    return found, active.intercept.item(), milliseconds


def split(frame):
    """Return the columns of each party."""
    names = [frame.columns[place::3] for place in range(3)]
    return dict(zip(("clinic", *PASSIVES), (frame[part] for part in names), strict=True))


def compare(title, frame, y, pooled, loss, **settings):
    """Fit both; print the largest difference of a coefficient, and the coefficients."""
    tables = split(frame)
    found, intercept, milliseconds = fit(tables, y, loss, **settings)
    columns = pd.concat(tables.values(), axis=1)
    pooled.fit((columns - columns.mean()) / columns.std(ddof=0), y)
    expected = pooled.coef_.ravel()
    off = abs(found.to_numpy() - expected).max() / abs(expected).max()
    off_intercept = abs(intercept - pooled.intercept_.item()) / abs(pooled.intercept_.item())
    print(
        f"{title}: {len(y)} rows, {settings['steps']} steps, off {off:.1e}, "
        f"intercept off {off_intercept:.1e}, {milliseconds:.1f} ms a step"
    )
    return found, intercept


if __name__ == "__main__":
    frame, diagnosis = load_breast_cancer(return_X_y=True, as_frame=True)
    y = diagnosis.to_numpy()
    for title, name, weight in (
        ("logistic", None, torch.ones_like),
        ("logistic, balanced", "balanced", balance),
    ):
        pooled = LogisticRegression(C=1 / (0.01 * len(y)), class_weight=name, tol=1e-10)
        settings = {"rate": 0.2, "l2": 0.01, "steps": 400, "weight": weight, "clip": 64}
        compare(title, frame, y, pooled, logistic, **settings)
    frame, target = load_diabetes(return_X_y=True, as_frame=True)
    y = target.to_numpy()
    pooled = Ridge(alpha=0.01 * len(y), tol=1e-12)
    found, intercept = compare(
        "squared", frame, y, pooled, squared, rate=0.2, l2=0.01, steps=400, clip=1024
    )
    counts = (y / 10).round()
    pooled = PoissonRegressor(alpha=0.1, tol=1e-10, max_iter=1000)
    compare(
        "Poisson",
        frame,
        counts,
        pooled,
        poisson,
        rate=0.01,
        l2=0.1,
        steps=400,
        start=float(torch.tensor(counts).mean().log()),
        clip=64,
    )
    print(found.round(2).to_string())
    print(f"intercept {intercept:.2f}")
