"""APFed-R under intersection, guard and sum: python docs/examples/apfed_secure.py.

Three parties hold strips of the same people's digits; the active alone has labels, and predicts
alone. In each step it sends h of a batch; each passive rebuilds its own strip out of h (arXiv
2409.04111, Eq. 12) and answers with the gradient of its loss, which the active adds to its own.
"""

import time

import apfed_plain
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from apfed_attacks import evaluate
from secure_apfed import PrivateRelease, align, secure_sum

EPOCHS, BATCH, TRADE_OFF = 20, 64, 1.0
digits = load_digits()
strips = torch.tensor(digits.images / 16, dtype=torch.float32).split(3, dim=1)
strips = dict(zip(("active", "east", "west"), (strip.flatten(1) for strip in strips), strict=True))
draw = torch.Generator().manual_seed(0)
known = {name: torch.randperm(1400, generator=draw)[:1200] for name in strips}  # of the first 1400
ids = {name: [f"person {number}" for number in known[name].tolist()] for name in strips}
found = align(ids, hub="active")  # all three know who is common, so each sorts by its own IDs
rows = {name: sorted(found[name], key=ids[name].__getitem__) for name in ids}
tables = {name: strips[name][known[name]][rows[name]] for name in strips}
labels = torch.tensor(digits.target)[known["active"]][rows["active"]]


class Passive:
    def __init__(self, table):
        self.table, width = table, table.shape[1]
        self.decoder = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, width))
        self.optimiser = torch.optim.SGD(self.decoder.parameters(), lr=0.1, momentum=0.9)

    def answer(self, h, batch):
        """Take a step of its own; return the gradient of each row's loss with respect to h."""
        h = h.detach().requires_grad_()
        self.optimiser.zero_grad()
        F.mse_loss(self.decoder(h), self.table[batch]).backward()
        self.optimiser.step()
        return h.grad * len(batch)


def train(guard=lambda h, rows: h, record=lambda sent: None):
    """Return the active's weights, its accuracy on test rows, and milliseconds a step."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 32))
    head = nn.Sequential(nn.Tanh(), nn.Linear(32, 10))
    model = nn.Sequential(encoder, head)
    passives = {name: Passive(tables[name]) for name in ("east", "west")}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    add = secure_sum("masked", passives, to="active", clip=4.0, bits=24)
    batches = [b for _ in range(EPOCHS) for b in torch.randperm(len(labels)).split(BATCH)]
    began = time.perf_counter()
    for batch in batches:
        h = encoder(tables["active"][batch])
        z = guard(h, rows=batch)
        answers = {name: passive.answer(z, batch) for name, passive in passives.items()}
        total = add(answers)
        record((batch, z.detach()))
        task = F.cross_entropy(head(h), labels[batch])
        optimiser.zero_grad()
        (task + TRADE_OFF * (z * total).sum() / len(batch)).backward()  # Eq. 9
        optimiser.step()
    ms = (time.perf_counter() - began) / len(batches) * 1000
    right = model(strips["active"][1400:]).argmax(1) == torch.tensor(digits.target[1400:])
    return nn.utils.parameters_to_vector(model.parameters()), right.float().mean().item(), ms


if __name__ == "__main__":
    weights, accuracy, ms = train()
    print(f"accuracy {accuracy:.3f}  {ms:.2f} ms a step")
    plain, _, of_plain = apfed_plain.train()
    print(f"sum: weights differ {abs(weights - plain).max():.1e}  {ms - of_plain:.2f} ms added")
    guard = PrivateRelease(clip=4, epsilon=8, delta=1e-5, epochs=EPOCHS, rows=len(labels))
    sent = []
    accuracy = train(guard, sent.append)[1]
    print(f"guarded: accuracy {accuracy:.3f}  {guard.report()}")
    print(evaluate(h=sent[-len(sent) // EPOCHS :], labels=labels, features=tables["active"]))
