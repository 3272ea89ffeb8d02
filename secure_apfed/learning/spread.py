"""Spreading the active's labels over its own representations h, once training is over.

Run by: the active, alone; nothing is sent. What passives taught the encoder says which rows are
alike; the last layer of the head is fitted to all training rows then, by ridge regression, where
descent saw the labelled ones alone. Letters: U training rows, n labelled rows, K classes.
"""

import numpy as np
import torch
from torch import Tensor, nn

from secure_apfed.data import UNLABELLED
from secure_apfed.labellers import Labeller
from secure_apfed.learning.apfed import ActiveTrainer
from secure_apfed.learning.votes import fit_linear, last_layer

__all__ = ["spread_labels"]


def spread_labels(trainer: ActiveTrainer, rows_U: Tensor, labeller: Labeller) -> None:
    """Label these rows of the table over h, and fit the last layer of the head to the labels.

    Labelled rows keep their labels, and rows that no label reaches are left out.
    """
    networks, here_U = trainer.networks, rows_U.to(trainer.compute.device)
    linear = last_layer(networks)
    trainer.set_training(False)
    try:
        with torch.no_grad(), trainer.forward_pass("spread"):
            h_UD = networks.encoder(trainer.features_N[here_U])
            read_UD = _read_by(networks.head, linear, h_UD)
    finally:
        trainer.set_training(True)
    labels_U = trainer.labels_N[here_U].cpu().numpy()
    labelled_n = np.flatnonzero(labels_U != UNLABELLED)
    labels_n, classes = labels_U[labelled_n], linear.out_features
    targets_UK = labeller.label(h_UD.flatten(1).double(), labelled_n, labels_n, classes)
    targets_UK[labelled_n] = np.eye(classes)[labels_n]
    said_V = np.flatnonzero(targets_UK.any(axis=1))
    # Ridge knows rows that are about 1 long, and a bias is a column of 1.
    read_UD = read_UD.double().cpu()
    size = float(read_UD.square().sum(1).mean().sqrt()) or 1.0
    constant_U1 = torch.full_like(read_UD[:, :1], linear.bias is not None)
    phi_UD = torch.cat([read_UD / size, constant_U1], dim=1)
    fitted = nn.Linear(phi_UD.shape[1], classes, bias=False, dtype=torch.float64)
    fit_linear(
        fitted, phi_UD[torch.from_numpy(said_V)].numpy(), targets_UK[said_V],
        labelled_n=np.searchsorted(said_V, labelled_n),
    )  # fmt: skip
    with torch.no_grad():
        linear.weight.copy_(fitted.weight[:, :-1] / size)
        if linear.bias is not None:
            linear.bias.copy_(fitted.weight[:, -1])


def _read_by(head: nn.Module, linear: nn.Linear, h_UD: Tensor) -> Tensor:
    """What the head hands to its last layer."""
    read: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    try:
        head(h_UD)
    finally:
        hook.remove()
    return read[0]
