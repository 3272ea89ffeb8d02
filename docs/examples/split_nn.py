"""A SplitNN in plain PyTorch, without and with a guard: python docs/examples/split_nn.py.

A laboratory holds twenty columns of breast cancer patients and the lower half of a network; a
clinic holds ten other columns, the diagnosis and the upper half. In each step the laboratory sends
h of a batch, and gets back the gradient of the loss. `PrivateRelease` stands before what it sends,
and `evaluate` says what the laboratory finds of the diagnoses in what it gets back.
"""

import warnings
from contextlib import nullcontext

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

from apfed_attacks import evaluate
from secure_apfed import PrivateRelease
from secure_apfed.privacy import check_row_wise

EPOCHS, BATCH = 8, 32
X, y = load_breast_cancer(return_X_y=True)
X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)
scaler = StandardScaler().fit(X)
X, X_test = (torch.tensor(scaler.transform(part), dtype=torch.float32) for part in (X, X_test))
(theirs, own), (theirs_test, own_test) = (
    (torch.cat([part[:, :10], part[:, 20:]], 1), part[:, 10:20]) for part in (X, X_test)
)
y, y_test = torch.tensor(y), torch.tensor(y_test)


def train(seed, send, off=nullcontext, record=lambda step: None):
    """Return the accuracy on test rows; `send` is what h goes through on its way."""
    torch.manual_seed(seed)
    laboratory = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    check_row_wise(laboratory, theirs[:BATCH])  # a bound per row needs rows that stand alone
    clinic = nn.Sequential(nn.Linear(10 + 4, 16), nn.ReLU(), nn.Linear(16, 2))
    lower = torch.optim.Adam(laboratory.parameters(), lr=0.01)
    upper = torch.optim.Adam(clinic.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(y)).split(BATCH):
            h = send(laboratory(theirs[batch]), rows=batch)
            z = h.detach().requires_grad_()  # what the clinic receives
            loss = nn.functional.cross_entropy(clinic(torch.cat([own[batch], z], 1)), y[batch])
            lower.zero_grad(), upper.zero_grad()
            loss.backward()
            h.backward(z.grad)  # what the laboratory receives
            record((batch, z.detach(), z.grad))
            lower.step(), upper.step()
    with torch.no_grad(), off():
        z = send(laboratory(theirs_test), rows=None)
        return (clinic(torch.cat([own_test, z], 1)).argmax(1) == y_test).double().mean().item()


if __name__ == "__main__":
    warnings.filterwarnings(
        "ignore", message="PrivateRelease.disable_noise"
    )  # test rows stay in one process
    for seed in range(5):
        guard = PrivateRelease(clip=1, epsilon=8, delta=1e-5, epochs=EPOCHS, rows=len(y))
        exchanged = []
        alone, plain = train(seed, lambda h, rows: 0 * h), train(seed, lambda h, rows: h)
        private, spent = (
            train(seed, guard, guard.disable_noise, exchanged.append),
            guard.get_privacy_spent().epsilon_x,
        )
        print(f"alone {alone:.3f}  plain {plain:.3f}  private {private:.3f}  epsilon {spent:.4g}")
    print(guard.report())
    rows, sent, returned = zip(*exchanged[-len(y) // BATCH :], strict=True)  # last seed and epoch
    seen = {"h": list(sent), "gradients": list(returned), "steps": list(rows), "own": theirs}
    print(evaluate(**seen, labels=y, attacks=["label_gradients", "gradient_direction"]))
