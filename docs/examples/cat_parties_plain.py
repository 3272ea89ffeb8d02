"""Parties that send representations to a server: python docs/examples/cat_parties_plain.py."""

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch import nn
from torch.nn import functional as F

NAMES = ("clinic", "laboratory", "radiology")
X, y = load_breast_cancer(return_X_y=True)
strips = torch.tensor(scale(X), dtype=torch.float32).split(10, dim=1)
labels = torch.tensor(y)


class Party:
    def __init__(self, columns):
        self.columns = columns
        self.network = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))
        self.optimiser = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)

    def answer(self, batch):
        self.z = self.network(self.columns[batch])
        return self.z.detach()

    def learn(self, gradient):
        self.optimiser.zero_grad()
        self.z.backward(gradient)
        self.optimiser.step()


def train():
    """Return accuracy on the last 169 people, and all weights."""
    torch.manual_seed(0)
    parties = {name: Party(strip) for name, strip in zip(NAMES, strips, strict=True)}
    head = nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 2))
    optimiser = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)

    def merge(batch):
        answers = {name: party.answer(batch) for name, party in parties.items()}
        return torch.cat([*answers.values()], dim=1)

    for _ in range(10):
        for batch in torch.randperm(400).split(50):
            merged = merge(batch).requires_grad_()
            optimiser.zero_grad()
            F.cross_entropy(head(merged), labels[batch]).backward()
            optimiser.step()
            for party, gradient in zip(parties.values(), merged.grad.split(4, dim=1), strict=True):
                party.learn(gradient)
    right = head(merge(torch.arange(400, len(labels)))).argmax(1) == labels[400:]
    weights = [*(party.network for party in parties.values()), head]
    return right.float().mean().item(), [p for part in weights for p in part.parameters()]


if __name__ == "__main__":
    print(f"accuracy {train()[0]:.3f}")
