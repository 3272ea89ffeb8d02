"""GRUs that make views of sequences, as one party trains them on its own rows.

FedMV, section 6: a GRU a view, bidirectional, by RMSProp; its last states are the view's features.
`secure_apfed.methods.multiview` (one view a party) and `secure_apfed.methods.averaging` (all views
at each party) decide in which steps they learn, and from which labels. Letters: R rows of the
weights' matrix, W numbers in each; N rows of a party, B of them in a batch, K classes, D numbers of
a GRU's state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from secure_apfed.base.seeds import seed_draws
from secure_apfed.data import UNLABELLED
from secure_apfed.errors import DataError
from secure_apfed.learning.descent import Compute, make_eager_class
from secure_apfed.networks.models import SequenceEncoder, check_layer_size, make_encoder_and_head
from secure_apfed.settings import ModelSettings

_Floats = NDArray[np.float64]

_RMSPROP = make_eager_class(torch.optim.RMSprop)
_MATRIX_WIDTH = 64
"""Number of columns (W) of the matrix of all weights, which the parties average."""
_BATCH_SIZE = 128
"""Rows of a step, as in FedMV, section 8.2."""


@dataclass(frozen=True, kw_only=True)
class RecurrentTraining:
    """The settings of one training of a party's GRUs (FedMV, Algorithm 4, LocalTraining).

    Attributes:
        epochs: passes over the party's rows.
        learning_rate: learning rate of RMSProp.
        dropout: probability with which a number of the last states is dropped before it is
            classified.
        batch_size: rows of a step.
    """

    epochs: int
    learning_rate: float
    dropout: float
    batch_size: int = _BATCH_SIZE


class SequenceViews:
    """A party's GRUs, one for each view of its sequences, each with a linear classifier.

    A bidirectional GRU makes 2 D numbers of a sequence, of which its classifier makes K scores.
    """

    def __init__(
        self,
        owner: str,
        *,
        encoder: SequenceEncoder,
        heads: nn.ModuleList,
        features_N: Tensor,
        targets_N: Tensor,
        training: RecurrentTraining,
        compute: Compute,
        seed: int,
    ) -> None:
        """Move the networks to the device, and set the training rows.

        Args:
            owner: name of the party, which enters the seeds.
            encoder: the GRUs.
            heads: the classifiers, in the order of the views.
            features_N: N rows to learn from, each with its sequences in one flat row
                (`secure_apfed.networks.models.SequenceEncoder`).
            targets_N: their classes, int64 (N,); or class shares (N, K), not negative. The sum of a
                row's shares is its weight.
            training: the settings of a training.
            compute: device and precision.
            seed: random seed of batches and dropout.
        """
        self.encoder = encoder
        self.heads = heads
        self._network = nn.ModuleList([encoder, heads]).to(compute.device, compute.dtype)
        self._training = training
        self._compute = compute
        self._owner = owner
        self._seed = seed
        self.set_training_rows(features_N, targets_N)

    @classmethod
    def make_untrained(
        cls,
        owner: str,
        model: ModelSettings,
        *,
        features_N: Tensor,
        labels_N: Tensor | None,
        classes: int,
        training: RecurrentTraining,
        compute: Compute,
        seed: int,
    ) -> Self:
        """Return untrained GRUs, each with a classifier, with seeded weights.

        Args:
            owner: name of the party.
            model: the settings of the networks, which give the shapes of the sequences.
            features_N: all N rows of the party, each with its sequences in one flat row.
            labels_N: their classes, `UNLABELLED` for a row without a label to learn from; None: the
                party has no labels, and sets targets later by `set_training_rows`.
            classes: number of classes.
            training: settings of a training.
            compute: device and precision.
            seed: random seed of weights, batches and dropout.

        Raises:
            ModelError: rows do not match the sequences in `model`.
            DataError: a row contains no valid sequence.
        """
        with seed_draws(seed, owner, "networks"):
            encoder, _ = make_encoder_and_head(model, tuple(features_N.shape[1:]), classes)
            assert isinstance(encoder, SequenceEncoder)
            size = 2 * model.representation_size
            check_layer_size(size * len(encoder.sequences), classes)
            heads = nn.ModuleList(nn.Linear(size, classes, bias=False) for _ in encoder.sequences)
        require_sequences(features_N, encoder.sequences, owner=owner)
        if labels_N is None:
            labels_N = torch.full((len(features_N),), UNLABELLED)
        labelled_N = labels_N != UNLABELLED
        return cls(
            owner,
            encoder=encoder,
            heads=heads,
            features_N=features_N[labelled_N],
            targets_N=labels_N[labelled_N],
            training=training,
            compute=compute,
            seed=seed,
        )

    def set_training_rows(self, features_N: Tensor, targets_N: Tensor) -> None:
        """Replace the N training rows and their targets, which `train` uses from now on.

        `targets_N`: classes, (N,), or class shares, (N, K).
        """
        self._features_N = self._compute.move_tensor(features_N)
        self._targets_N = self._compute.move_tensor(targets_N)

    @torch.no_grad()
    def compute_states(self, features_B: Tensor) -> list[Tensor]:
        """Return the GRUs' last states of B rows: a tensor (B, 2 D) for each view."""
        return self.encoder.encode_views(self._compute.move_tensor(features_B))

    @property
    def weights(self) -> _Floats:
        """All parameters as one matrix, float64, whose last row is padded with zeros."""
        flat_P = parameters_to_vector(self._network.parameters()).detach().cpu().double().numpy()
        padding = -len(flat_P) % _MATRIX_WIDTH  # what is missing to a multiple of the width
        return np.pad(flat_P, (0, padding)).reshape(-1, _MATRIX_WIDTH)

    @property
    def head(self) -> Tensor:
        """The weights of one linear layer that returns the mean of the views' scores.

        They are the classifiers' weights side by side, divided by the number of views: K rows, and
        2 D columns for each view.
        """
        layers = [layer.weight for layer in self.heads if isinstance(layer, nn.Linear)]
        return torch.cat(layers, dim=1).detach() / len(layers)

    def load(self, weights_RW: _Floats) -> None:
        """Set all parameters from a matrix like `weights`; its padding is ignored."""
        reference = next(self._network.parameters())
        size = sum(parameter.numel() for parameter in self._network.parameters())
        flat_P = torch.from_numpy(weights_RW.reshape(-1)[:size]).to(reference)
        vector_to_parameters(flat_P, self._network.parameters())

    def train(self, step: int) -> float:
        """Run the configured epochs of RMSProp; return the mean loss of a batch.

        Without training rows nothing is done, and the loss is 0. The optimiser's moments start anew
        in each call. `step`: number of the step; with the party's seed it determines batches and
        dropout.
        """
        losses = []
        optimiser = _RMSPROP(self._network.parameters(), lr=self._training.learning_rate)
        self._network.train()
        with seed_draws(self._seed, self._owner, "recurrent", step):
            for rows_B in self._draw_batches():
                loss = self._compute_loss(rows_B)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
        self._network.eval()
        return float(np.mean(losses)) if losses else 0.0

    def _draw_batches(self) -> Iterator[Tensor]:
        """Yield shuffled batches of rows for all epochs."""
        rows = len(self._targets_N)
        for _ in range(self._training.epochs if rows else 0):
            yield from torch.randperm(rows).split(self._training.batch_size)

    def _compute_loss(self, rows_B: Tensor) -> Tensor:
        """Return the sum of the views' cross-entropies, each by the view's own classifier.

        `rows_B`: indices of the batch's rows among the training rows.
        """
        targets_B = self._targets_N[rows_B]
        states_by_view = self.encoder.encode_views(self._features_N[rows_B])
        thinned_states = [
            F.dropout(state_BD, self._training.dropout, training=True)
            for state_BD in states_by_view
        ]
        losses = [
            F.cross_entropy(head(state_BD), targets_B)
            for head, state_BD in zip(self.heads, thinned_states, strict=True)
        ]
        return torch.stack(losses).sum()

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters of the GRUs and classifiers, for a checkpoint."""
        return dict(self._network.state_dict())

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the parameters that `tensors` returned."""
        self._network.load_state_dict(tensors)


def require_sequences(
    features_N: Tensor, sequences: tuple[tuple[int, int], ...], *, owner: str
) -> None:
    """Raise DataError unless rows are valid sequences of all views, one after another.

    A view begins with the number of its steps that are in use; then its T steps of C channels
    follow. Numbers in the steps in use must be finite.

    `features_N`: N rows. `sequences`: T and C of each view. `owner`: name of the party, for the
    error.
    """
    widths = [1 + steps * channels for steps, channels in sequences]
    columns_by_view = features_N.detach().flatten(1).cpu().split(widths, dim=1)
    for sequence_number, ((steps, channels), view_NF) in enumerate(
        zip(sequences, columns_by_view, strict=True), 1
    ):
        used_steps_N = view_NF[:, 0]
        is_valid_count_N = (
            (used_steps_N == used_steps_N.round()) & (used_steps_N >= 0) & (used_steps_N <= steps)
        )
        steps_NTC = view_NF[:, 1:].unflatten(1, (steps, channels))
        # Steps behind the last one in use are ignored, so they may have any content.
        in_use_NT = torch.arange(steps) < used_steps_N[:, None]
        is_finite_N = (steps_NTC.isfinite().all(2) | ~in_use_NT).all(1)
        sequence_name = f"{owner}: sequence {sequence_number} of [{steps}, {channels}]"
        if not bool(is_valid_count_N.all()):
            row = int((~is_valid_count_N).nonzero()[0])
            raise DataError(
                f"{sequence_name}: expected in its first column how many of {steps} steps are in "
                f"use, a whole number, got {used_steps_N[row]:g} in row {row + 1}; pad shorter "
                "sequences behind their last step, cut longer ones, and in own tables name the "
                "columns in data.view_columns with their sequence, so that this number is not "
                "standardised"
            )
        if not bool(is_finite_N.all()):
            row = int((~is_finite_N).nonzero()[0])
            raise DataError(
                f"{sequence_name}: expected finite numbers in the steps in use, got others in row "
                f"{row + 1}; fill them, or count fewer steps in the first column"
            )
