"""Parties that add for a server in secret: python docs/examples/cat_parties_summed.py."""

import cat_parties_plain
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch import nn
from torch.nn import functional as F

from secure_apfed import SummedLinear, secure_sum
from secure_apfed.exchange import converse

NAMES = ("clinic", "laboratory", "radiology")
X, y = load_breast_cancer(return_X_y=True)
strips = torch.tensor(scale(X), dtype=torch.float32).split(10, dim=1)
labels = torch.tensor(y)
SUM = secure_sum("masked", NAMES, to="server", clip=32, bits=24, session="cat")


class Party:
    def __init__(self, columns, name):
        self.columns = columns
        self.role = SUM.make_contributor(name)
        self.network = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))

    def take_block(self, block):
        self.network.append(block)
        self.optimiser = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)

    def answer(self, batch):
        self.z = self.network(self.columns[batch])
        return self.role.contribute(self.z.detach())

    def learn(self, gradient):
        self.optimiser.zero_grad()
        self.z.backward(gradient)
        self.optimiser.step()


def train():
    """Return accuracy on the last 169 people, and all weights."""
    torch.manual_seed(0)
    parties = {name: Party(strip, name) for name, strip in zip(NAMES, strips, strict=True)}
    head = nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 2))
    first = SummedLinear(head[0], dict.fromkeys(NAMES, 4), SUM)
    for name, party in parties.items():
        party.take_block(first.parts[name])
    role = SUM.make_receiver()
    converse({"server": role, **{name: party.role for name, party in parties.items()}})
    optimiser = torch.optim.SGD([first.bias, *head[1:].parameters()], lr=0.05, momentum=0.9)

    def merge(batch):
        answers = {name: party.answer(batch) for name, party in parties.items()}
        return role.decode(role.combine(answers), torch.empty(len(batch), 3))

    for _ in range(10):
        for batch in torch.randperm(400).split(50):
            merged = merge(batch).requires_grad_()
            optimiser.zero_grad()
            F.cross_entropy(head[1:](merged + first.bias), labels[batch]).backward()
            optimiser.step()
            for party in parties.values():
                party.learn(merged.grad)
    merged = merge(torch.arange(400, len(labels)))
    right = head[1:](merged + first.bias).argmax(1) == labels[400:]
    head[0] = first.to_linear()
    weights = [*(party.network[:3] for party in parties.values()), head]
    return right.float().mean().item(), [p for part in weights for p in part.parameters()]


if __name__ == "__main__":
    accuracy, weights = train()
    print(f"accuracy {accuracy:.3f}")
    plain = nn.utils.parameters_to_vector(cat_parties_plain.train()[1])
    print(f"weights differ {abs(nn.utils.parameters_to_vector(weights) - plain).max():.1e}")
