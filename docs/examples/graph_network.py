"""A graph convolutional network at the active, in plain torch: its people know each other.

    python docs/examples/graph_network.py

The graph is the active's own and never leaves it. A row is the number of a person in the graph; the
network holds all features and edges, and returns the representations of those who are asked for
(Kipf and Welling, 2017, Eq. 2). No row of a batch moves another one's representation, so a guard
takes it. But a person's representation holds neighbours' features, too: an epsilon is of the
releases of one row, and what they tell of a neighbour's features is not counted.

Letters: N people, F features, B rows of a batch.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from secure_apfed import Active, FrozenGaussian, Passive, train

N = 200


class Gcn(nn.Module):
    """Two graph convolutions: A relu(A X W) V, at the rows that are asked for, (B, D)."""

    def __init__(self, features_NF, edges_NN, numbers=16):
        super().__init__()
        with_self_NN = edges_NN + torch.eye(len(edges_NN))
        degree_N = with_self_NN.sum(1)
        normalised_NN = with_self_NN / (degree_N[:, None] * degree_N[None, :]).sqrt()
        self.register_buffer("edges", normalised_NN, persistent=False)
        self.register_buffer("features", features_NF, persistent=False)
        self.first = nn.Linear(features_NF.shape[1], numbers)
        self.second = nn.Linear(numbers, numbers)

    def forward(self, rows_B1):
        people_B = rows_B1[:, 0].long()
        h_NF = F.relu(self.edges @ self.first(self.features))
        return self.edges[people_B] @ self.second(h_NF)


draw = torch.Generator().manual_seed(0)
labels = torch.randint(0, 2, (N,), generator=draw)
is_same = labels[:, None] == labels[None, :]
chances = torch.where(is_same, 0.06, 0.02)
upper = (torch.rand(N, N, generator=draw) < chances).float().triu(1)
edges = upper + upper.T
features = labels[:, None] + 2 * torch.randn(N, 5, generator=draw)
table = labels[:, None] + 2 * torch.randn(N, 8, generator=draw)
ids = [f"person-{number}" for number in range(N)]
rows = torch.arange(N, dtype=torch.float32)[:, None]

result = train(
    Active("club", ids, rows, labels, encoder=Gcn(features, edges)),
    [Passive("shop", ids, table), Passive("bank", ids, table.square())],
    guard=FrozenGaussian(epsilon=8),
    secure_sum="masked",
    epochs=20,
    batch_size=50,
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
    model={"projection": 4},
    labelled=60,
    baselines=False,
)
print(result.report)
print(f"edges between classes: {(edges.bool() & ~is_same).sum() / edges.sum():.2f} of all")
