"""Opacus' DP-SGD beside a secure sum: python docs/examples/opacus_beside_sum.py.

Three hospitals hold rows of one table and train one model. Each clips and noises its own gradient
with Opacus, whose epsilon is of its rows against everybody; of the three gradients a hub reads the
sum alone. What is summed is private already, so the sum changes no epsilon.
"""

import math
import time
import warnings

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import scale
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from apfed_protocols import secure_sum

EPOCHS, BATCH, BOUND, NOISE, DELTA, RATE = 8, 32, 1.0, 1.0, 1e-3, 0.5
X, y = load_breast_cancer(return_X_y=True)
X, X_test, y, y_test = train_test_split(scale(X), y, test_size=0.3, random_state=0, stratify=y)
X, X_test = (torch.tensor(part, dtype=torch.float32) for part in (X, X_test))
y, y_test = torch.tensor(y), torch.tensor(y_test)
PARTS = dict(zip(("north", "south", "west"), torch.arange(len(y)).chunk(3), strict=True))


class Hospital:
    def __init__(self, rows):
        network, self.engine = nn.Linear(30, 2), PrivacyEngine()
        network.load_state_dict({"weight": torch.zeros(2, 30), "bias": torch.zeros(2)})
        self.model, self.optimiser, self.loader = self.engine.make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=RATE),
            data_loader=DataLoader(TensorDataset(X[rows], y[rows]), BATCH),
            noise_multiplier=NOISE,
            max_grad_norm=BOUND,
        )

    def gradient(self, X_B, y_B):
        """Return the noisy gradient of a batch as a vector; Opacus' accountant counts it."""
        self.optimiser.zero_grad()
        nn.functional.cross_entropy(self.model(X_B), y_B).backward()
        self.optimiser.pre_step()
        return parameters_to_vector([p.grad for p in self.model.parameters()])

    def move(self, mean):
        weights = parameters_to_vector(self.model.parameters()).detach() - RATE * mean
        vector_to_parameters(weights, self.model.parameters())


def under_masks(hospitals):
    """Return a sum that clips nothing: a hospital's batch has all of its rows at most, each of norm
    BOUND, and noise of sqrt(D) + 8 deviations, which it exceeds once in 10^13 steps.
    """
    one = max(hospitals.values(), key=lambda hospital: len(hospital.loader.dataset))
    numbers = sum(p.numel() for p in one.model.parameters())
    largest = BOUND * (len(one.loader.dataset) + NOISE * (math.sqrt(numbers) + 8))
    clip = largest / one.optimiser.expected_batch_size
    return secure_sum("masked", hospitals, to="hub", clip=clip, bits=24)


def train(adding):
    """Return weights, accuracy on test rows, epsilon of each hospital, and ms a step of adding."""
    torch.manual_seed(0)  # so that two runs compare: whoever knows the seed knows the noise
    hospitals = {name: Hospital(rows) for name, rows in PARTS.items()}
    add, seconds, step = adding(hospitals), 0.0, 0
    for _ in range(EPOCHS):
        for batches in zip(*(one.loader for one in hospitals.values()), strict=True):
            given = zip(hospitals, batches, strict=True)
            gradients = {name: hospitals[name].gradient(*batch) for name, batch in given}
            began = time.perf_counter()
            mean = add(gradients) / len(hospitals)
            seconds, step = seconds + time.perf_counter() - began, step + 1
            for hospital in hospitals.values():
                hospital.move(mean)
    model = hospitals["north"].model
    right = (model(X_test).argmax(1) == y_test).double().mean().item()
    epsilons = [one.engine.get_epsilon(DELTA) for one in hospitals.values()]
    return parameters_to_vector(model.parameters()), right, epsilons, seconds / step * 1000


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")
    plain, right, epsilons, ms = train(lambda _: lambda gradients: sum(gradients.values()))
    print(f"plain: accuracy {right:.3f}  epsilon {epsilons[0]:.4f}  {ms:.2f} ms a step")
    weights, right, under_sum, ms_sum = train(under_masks)
    print(f"sum:   accuracy {right:.3f}  epsilon {under_sum[0]:.4f}  {ms_sum:.2f} ms a step")
    print(f"weights differ {abs(weights - plain).max():.1e}  same epsilons {epsilons == under_sum}")
