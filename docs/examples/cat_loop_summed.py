"""A split network that merges by a secure sum: python docs/examples/cat_loop_summed.py."""

import cat_loop_plain
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch import nn
from torch.nn import functional as F

from secure_apfed import SummedLinear, secure_sum

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
    add = secure_sum("masked", NAMES[1:], to="clinic", clip=32, bits=24)
    head[0] = SummedLinear(head[0], dict.fromkeys(NAMES, 4), add)
    parameters = [*encoders.parameters(), *head.parameters()]
    optimiser = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for _ in range(10):
        for batch in torch.randperm(400).split(50):
            z = {name: encoders[name](columns[name][batch]) for name in NAMES}
            scores = head(z)
            optimiser.zero_grad()
            F.cross_entropy(scores, labels[batch]).backward()
            optimiser.step()
    head[0] = head[0].to_linear()
    return encoders, head


if __name__ == "__main__":
    encoders, head = train()
    z = [encoders[name](columns[name][400:]) for name in NAMES]
    right = head(torch.cat(z, dim=1)).argmax(1) == labels[400:]
    print(f"accuracy {right.float().mean():.3f}")
    plain, summed = (
        nn.utils.parameters_to_vector([*bodies.parameters(), *top.parameters()])
        for bodies, top in (cat_loop_plain.train(), (encoders, head))
    )
    print(f"weights differ {abs(plain - summed).max():.1e}")
