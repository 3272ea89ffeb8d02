"""A split network that merges by torch.cat: python docs/examples/cat_loop_plain.py."""

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch import nn
from torch.nn import functional as F

NAMES = ("clinic", "laboratory", "radiology")
X, y = load_breast_cancer(return_X_y=True)
strips = torch.tensor(scale(X), dtype=torch.float32).split(10, dim=1)
columns = dict(zip(NAMES, strips, strict=True))
labels = torch.tensor(y)


def train():
    """Return encoders and head after ten epochs on the first 400 people."""
    torch.manual_seed(0)
    encoders = nn.ModuleDict(
        {name: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)) for name in NAMES}
    )
    head = nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 2))
    parameters = [*encoders.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for _ in range(10):
        for batch in torch.randperm(400).split(50):
            z = {name: encoders[name](columns[name][batch]) for name in NAMES}
            scores = head(torch.cat([*z.values()], dim=1))
            optimiser.zero_grad()
            F.cross_entropy(scores, labels[batch]).backward()
            optimiser.step()
    return encoders, head


if __name__ == "__main__":
    encoders, head = train()
    z = [encoders[name](columns[name][400:]) for name in NAMES]
    right = head(torch.cat(z, dim=1)).argmax(1) == labels[400:]
    print(f"accuracy {right.float().mean():.3f}")
