"""Baselines that are networks: the run's own, a code of all rows, and MixMatch.

Letters: N training rows, n of them with labels, U others, G parts of one task's labels, B rows of a
batch, M rows that are mixed, A guesses side by side, F features, D numbers of a code, K classes, P
weights of all.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secure_apfed.base.seeds import Draws, seed_draws, shuffle_rows
from secure_apfed.baselines.classical import (
    choose_strength,
    fit_scaler,
    make_logistic_regression,
    predict_all_classes,
)
from secure_apfed.baselines.fitted import (
    FittedModel,
    Layers,
    build_regression_layers,
    extract_layers,
)
from secure_apfed.baselines.interface import (
    Baseline,
    BaselineTask,
    FloatArray,
    Predictor,
    fit_network_once,
)
from secure_apfed.errors import DataError, ModelError
from secure_apfed.learning.descent import Compute, Trainer, make_eager_class
from secure_apfed.learning.votes import ROWS_PER_BLOCK
from secure_apfed.networks.models import Shape, make_encoder_and_head

_ADAM = make_eager_class(torch.optim.Adam)
_ADAMW = make_eager_class(torch.optim.AdamW)
# The run's own network: its largest number of steps, the steps after which its rate is judged, and
# the steps over which losses are averaged.
_MAX_STEPS = 1_000
_STEPS_BEFORE_RATE_CHECK = 300
_STEPS_PER_LOSS_CHECK = 100
# Multiples of the run's rate. The next one is tried if the loss after _STEPS_BEFORE_RATE_CHECK
# steps is above _SLOW_LOSS_SHARE times the loss of a uniform guess.
_RATE_FACTORS = (5, 25)
_SLOW_LOSS_SHARE = 0.8
# Training stops at this mean loss. Labels are too few to hold some out that would show when to
# stop.
_SUFFICIENT_LOSS = 0.02
# The autoencoder.
_CODER_WIDTH = 128
_CODE_SIZE = 64
_CODER_STEPS = 600
_CODER_BATCH_ROWS = 128
_CODER_LEARNING_RATE = 2e-3
_CODER_NOISE_DEVIATION = 0.3  # standard deviation of the noise on the standardised features
# MixMatch.
_HIDDEN_WIDTH = 128
_MIXMATCH_STEPS = 400
_BATCH_ROWS = 64
_LEARNING_RATE = 3e-3
_WEIGHT_DECAY = 2e-3
_NOISE_DEVIATION = 0.2  # standard deviation of the augmentation
_DROP_PROBABILITY = 0.1  # probability that it sets a feature to its mean
_AUGMENTATIONS_PER_GUESS = 2  # augmentations that are averaged
_TEMPERATURE = 0.5
_MIX_ALPHA = 0.75  # alpha of the Beta distribution of the mixing weight
# Of the unlabelled rows' loss, after a ramp over half of the steps; the paper's for CIFAR-10.
_MAX_GUESS_WEIGHT = 75.0
_AVERAGE_DECAY = 0.98  # decay of the moving average of weights


class Network(Baseline):
    """The run's own network, trained on the labelled rows with the run's own optimiser.

    Deviation: a run's learning rate is chosen for many steps on many rows. If it hardly moves the
    loss of the few labelled rows, it is raised; otherwise the baseline would be weak because it is
    slow. Its random numbers, batches included, follow from the task's seed.
    """

    name = "network"
    title = "Own network"
    is_run_network = True

    def fit(self, task: BaselineTask) -> Predictor:
        """Train the network on the labelled rows.

        Raises ModelError: the loss is not finite at the run's learning rate, or the network does
        not accept these rows.
        """
        attempt = _train_until_learning(task)
        attempt.finish_training()
        network = attempt.network.eval()

        @torch.no_grad()
        def score_rows(features_BF: FloatArray) -> FloatArray:
            """Return class probabilities (B, K)."""
            scores_BK: Tensor = network(_place_rows(features_BF, task.shape, attempt.compute))
            return scores_BK.double().softmax(1).cpu().numpy()

        return Predictor(score_rows, lambda: network)


def _train_until_learning(task: BaselineTask) -> "_Attempt":
    """Start training at the run's learning rate, and again at higher ones while the loss stays.

    Returns the first training whose loss falls clearly below that of a uniform guess. If it falls
    at no rate, the last training with a finite loss is returned.
    """
    uniform_loss = math.log(len(np.unique(task.labels)))
    attempt = _Attempt(task, task.train.learning_rate)
    last_finite = attempt
    recent_loss = attempt.train_steps(_STEPS_BEFORE_RATE_CHECK)
    for rate_factor in _RATE_FACTORS:
        if recent_loss < _SLOW_LOSS_SHARE * uniform_loss or not math.isfinite(recent_loss):
            break
        attempt = _Attempt(task, rate_factor * task.train.learning_rate)
        recent_loss = attempt.train_steps(_STEPS_BEFORE_RATE_CHECK)
        if math.isfinite(recent_loss):
            last_finite = attempt
    return last_finite


class _Attempt:
    """A training of the network from fresh weights at one learning rate."""

    def __init__(self, task: BaselineTask, learning_rate: float) -> None:
        """Build a network with fresh weights, and move the labelled rows to its device.

        `learning_rate`: the learning rate.
        """
        train_settings = task.train.model_copy(update={"learning_rate": learning_rate})
        self.compute = Compute.from_settings(train_settings)
        self._seed = task.seed
        with seed_draws(task.seed, "solo", "network"):
            encoder, head = make_encoder_and_head(
                task.model, task.shape, task.classes, family=task.family
            )
        self._trainer = Trainer(
            "the active alone",
            {"encoder": encoder, "head": head},
            train=train_settings,
            seed=task.seed,
        )
        self.network = nn.Sequential(encoder, head)
        rows_nF = _place_rows(task.labelled_features, task.shape, self.compute)
        # An encoder without parameters maps rows alike at every step, so it runs only once here
        # (unless the rows are too many to encode at once).
        is_encoder_in_steps = (
            next(encoder.parameters(), None) is not None or len(rows_nF) > ROWS_PER_BLOCK
        )
        with self._trainer.forward_context("rows"):
            self._x_nF = rows_nF if is_encoder_in_steps else encoder(rows_nF)
        self._learner = self.network if is_encoder_in_steps else head  # what each step runs
        self._y_n = torch.from_numpy(task.labels).to(self.compute.device)
        self._batch_size = min(train_settings.batch_size, len(self._y_n))
        self._queue = torch.empty(0, dtype=torch.int64)  # rows of the next batches
        self._steps = 0

    def finish_training(self) -> None:
        """Train until the loss is small, or the step limit is reached.

        Raises ModelError: training diverged.
        """
        recent_loss = math.inf
        while self._steps < _MAX_STEPS and recent_loss > _SUFFICIENT_LOSS:
            recent_loss = self.train_steps(_STEPS_PER_LOSS_CHECK)
            if not math.isfinite(recent_loss):
                raise ModelError(
                    "local models: the network's training diverged; lower train.learning_rate, or "
                    "set train.max_gradient_norm"
                )

    def train_steps(self, step_count: int) -> float:
        """Take some steps; return the mean loss of the last `_STEPS_PER_LOSS_CHECK` of them."""
        losses = [self._take_step() for _ in range(step_count)]
        recent_losses = losses[-_STEPS_PER_LOSS_CHECK:]
        return sum(recent_losses) / len(recent_losses)

    def _take_step(self) -> float:
        """Take one step on the next batch; return its loss.

        Batches come from a queue of shuffled rows, which is refilled when it is too short.
        """
        if len(self._queue) < self._batch_size:
            all_rows = torch.arange(len(self._y_n))
            self._queue = shuffle_rows(all_rows, self._seed, "solo", "batches", self._steps)
        batch_rows = self._queue[: self._batch_size]
        self._queue = self._queue[self._batch_size :]
        self._trainer.zero_grad()
        with self._trainer.forward_context(self._steps):
            loss = F.cross_entropy(
                self._learner(self._x_nF[batch_rows]).float(), self._y_n[batch_rows]
            )
        loss.backward()
        self._trainer.step()
        self._steps += 1
        return float(loss.detach())


def _place_rows(features_BF: FloatArray, shape: Shape, compute: Compute) -> Tensor:
    """Return flattened rows as a tensor in their original shape, on the compute device."""
    return compute.move_tensor(torch.from_numpy(features_BF).reshape(-1, *shape))


class Autoencoder(Baseline):
    """A denoising autoencoder of all rows, with a logistic regression on its code.

    Source: P. Vincent et al., JMLR 11, 2010.
    """

    name = "autoencoder"
    title = "Autoencoder"

    def fit(self, task: BaselineTask) -> Predictor:
        """Fit an autoencoder to all rows, and logistic regression to the labelled rows' codes."""
        from sklearn.preprocessing import StandardScaler

        scaler = fit_scaler(task)
        scaled_NF = scaler.transform(task.features)

        # The autoencoder reads no labels, so that all folds of the labels share one fit.
        encoder = fit_network_once(
            self.name,
            task,
            make_untrained=lambda: _make_coder(scaled_NF.shape[1]),
            fit=lambda draws: _pretrain_encoder(torch.from_numpy(scaled_NF).float(), draws),
            needs_labels=False,
        )
        codes_ND = _encode_rows(encoder, scaled_NF)
        code_scaler = StandardScaler().fit(codes_ND)
        codes_nD = code_scaler.transform(codes_ND[task.labelled_indices])
        model = make_logistic_regression(choose_strength(codes_nD, task.labels, task.seed))
        model.fit(codes_nD, task.labels)

        def score_rows(features_BF: FloatArray) -> FloatArray:
            """Return class probabilities (B, K)."""
            codes_BD = code_scaler.transform(_encode_rows(encoder, scaler.transform(features_BF)))
            return predict_all_classes(model, codes_BD, task.classes)

        def build_network() -> FittedModel:
            """Return encoder and regression as linear layers on unscaled rows."""
            encoder_layers = extract_layers(encoder, scaler)
            return FittedModel(
                build_regression_layers(
                    code_scaler,
                    model.coef_,
                    model.intercept_,
                    model.classes_,
                    task.classes,
                    encoder_layers,
                )
            )

        return Predictor(score_rows, build_network)


def _make_coder(features: int) -> nn.Module:
    """Return the autoencoder's untrained encoder, for rows with this number of features."""
    return nn.Sequential(
        nn.Linear(features, _CODER_WIDTH), nn.ReLU(), nn.Linear(_CODER_WIDTH, _CODE_SIZE), nn.ReLU()
    )


def _pretrain_encoder(x_NF: Tensor, draws: Draws) -> nn.Module:
    """Train a denoising autoencoder on N standardised rows, and return its encoder.

    `draws`: the random numbers of its weights, batches and noise.
    """
    feature_count = x_NF.shape[1]
    with draws:
        encoder = _make_coder(feature_count)
        decoder = nn.Sequential(
            nn.Linear(_CODE_SIZE, _CODER_WIDTH), nn.ReLU(), nn.Linear(_CODER_WIDTH, feature_count)
        )
    generator = draws.get_generator()
    # All P parameters as one, which is faster.
    weights_P, gradient_P = flatten_parameters([encoder, decoder])
    adam = _ADAM([weights_P], lr=_CODER_LEARNING_RATE)
    for _ in range(_CODER_STEPS):
        x_BF = x_NF[torch.randint(len(x_NF), (_CODER_BATCH_ROWS,), generator=generator)]
        noisy_BF = x_BF + _CODER_NOISE_DEVIATION * torch.randn(x_BF.shape, generator=generator)
        loss = F.mse_loss(decoder(encoder(noisy_BF)), x_BF)
        gradient_P.zero_()
        loss.backward()
        adam.step()
    return separate_parameters(encoder)


@torch.no_grad()
def _encode_rows(encoder: nn.Module, scaled_BF: FloatArray) -> FloatArray:
    """Return the encoder's codes of B standardised rows, D numbers each, (B, D)."""
    codes_BD: Tensor = encoder(torch.from_numpy(scaled_BF).float())
    return codes_BD.double().numpy()


class MixMatch(Baseline):
    """A baseline that guesses and sharpens labels of unlabelled rows, and mixes them with the
    labelled ones.

    Source: D. Berthelot et al., NeurIPS 2019, Algorithm 1 and Eqs. (2) to (5). Deviations: rows of
    features have no crops and flips, so a row is augmented by noise and by features set to their
    mean; guesses are aligned with the labels' frequencies (D. Berthelot et al., ICLR 2020, section
    3.1), since with one label a class all of them soon fell into one; the network is a small MLP;
    batches are drawn with replacement; the ramp and the average of the weights fit a few hundred
    steps. Where every row has a label, the labelled rows are also used as unlabelled ones.
    """

    name = "mixmatch"
    title = "MixMatch"

    def fit(self, task: BaselineTask) -> Predictor:
        """Fit this task alone."""
        return self.fit_together([task])[0]

    def fit_together(self, tasks: Sequence[BaselineTask]) -> list[Predictor]:
        """Fit a network to each task; all are trained at the same time, when one is first needed.

        Raises DataError: the tasks differ in more than which rows have a label.
        """
        if len({(task.features.tobytes(), task.classes, task.seed) for task in tasks}) != 1:
            raise DataError(
                f"local models: {self.title} fits parts of one task's labels together, with its "
                f"rows, classes and seed; got {len(tasks)} tasks that differ in these, or none"
            )
        scaler = fit_scaler(tasks[0])
        x_NF = torch.from_numpy(scaler.transform(tasks[0].features)).float()
        rows = [_Rows.from_task(task, x_NF) for task in tasks]
        trained_networks: list[nn.Module] = []

        def fit_network(draws: Draws, position: int) -> nn.Module:
            """Train the networks of all tasks at the first call; return the one at this index."""
            if not trained_networks:
                trained_networks.extend(_train_networks(rows, draws))
            return trained_networks[position]

        def build_predictor(position: int) -> Predictor:
            """Return the predictor of the task at this index."""
            network = fit_network_once(
                self.name,
                tasks[position],
                make_untrained=lambda: _make_network(x_NF.shape[1], tasks[0].classes),
                fit=lambda draws: fit_network(draws, position),
            )

            @torch.no_grad()
            def score_rows(features_BF: FloatArray) -> FloatArray:
                """Return class probabilities (B, K)."""
                scaled_BF = torch.from_numpy(scaler.transform(features_BF)).float()
                logits_BK: Tensor = network(scaled_BF)
                return logits_BK.double().softmax(1).numpy()

            return Predictor(
                score_rows,
                lambda: FittedModel(Layers.from_weights(extract_layers(network, scaler))),
            )

        return [build_predictor(position) for position in range(len(tasks))]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The scaled rows of one task, F features each.

    Attributes:
        labelled: the n labelled rows, (n, F).
        labels: their labels, one-hot over K classes, (n, K).
        others: the U other rows, (U, F); if every row has a label, the labelled ones again.
    """

    labelled: Tensor
    labels: Tensor
    others: Tensor

    @classmethod
    def from_task(cls, task: BaselineTask, x_NF: Tensor) -> Self:
        """Separate a task's scaled rows into labelled and unlabelled ones.

        If all rows have a label, they serve as unlabelled ones, too.
        """
        is_unlabelled_N = torch.ones(len(x_NF), dtype=torch.bool)
        is_unlabelled_N[task.labelled_indices] = False
        x_nF = x_NF[task.labelled_indices]
        y_nK = torch.from_numpy(task.one_hot_labels).float()
        return cls(x_nF, y_nK, x_NF[is_unlabelled_N] if bool(is_unlabelled_N.any()) else x_nF)


def _make_network(features: int, classes: int) -> nn.Sequential:
    """Return an untrained perceptron of two hidden layers, from features to class logits."""
    return nn.Sequential(
        nn.Linear(features, _HIDDEN_WIDTH),
        nn.ReLU(),
        nn.Linear(_HIDDEN_WIDTH, _HIDDEN_WIDTH),
        nn.ReLU(),
        nn.Linear(_HIDDEN_WIDTH, classes),
    )


class _ParallelNetworks(nn.Module):
    """A set of G copies of one network, which train separately but are computed together.

    It maps B rows for each copy, (G, B, F), to logits (G, B, K).
    """

    def __init__(self, network: nn.Sequential, copies: int) -> None:
        """Stack this number of copies of a network's weights along a first axis."""
        super().__init__()
        layers = [layer for layer in network if isinstance(layer, nn.Linear)]
        self.weights = nn.ParameterList(
            layer.weight.detach().repeat(copies, 1, 1) for layer in layers
        )
        self.biases = nn.ParameterList(layer.bias.detach().repeat(copies, 1) for layer in layers)

    def forward(self, x_GBF: Tensor) -> Tensor:
        """Return the logits (G, B, K): each of the G copies is applied to its own B rows."""
        return self.list_layer_outputs(x_GBF)[-1]

    def list_layer_outputs(self, x_GBF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of the three layers for G times B rows.

        The first two layers have W outputs in each of the G copies; the last has the logits.
        """
        first, middle, last = zip(self.weights, self.biases, strict=True)
        first_GBW = _apply_layers_singly(x_GBF, *first).relu_()
        middle_GBW = torch.baddbmm(middle[1][:, None], first_GBW, middle[0].mT).relu_()
        return first_GBW, middle_GBW, _apply_layers_singly(middle_GBW, *last)

    def set_gradients(
        self, x_GBF: Tensor, outputs: tuple[Tensor, Tensor, Tensor], error_GBK: Tensor
    ) -> None:
        """Set each parameter's gradient by backpropagation through the three layers.

        It computes the products of autograd in the same order, so that results are the same to the
        last digit. Autograd itself would take twice as long for such small layers.

        Args:
            x_GBF: the inputs of the first layer, B rows for each of G copies.
            outputs: outputs of all layers, as `list_layer_outputs` returns them.
            error_GBK: the gradient of the loss by the logits.
        """
        first_GBW, middle_GBW, _ = outputs
        _set_gradients_singly(middle_GBW, error_GBK, self.weights[2], self.biases[2])
        errors_and_weights = zip(error_GBK, self.weights[2], strict=True)
        error_GBW = torch.stack(
            [error_BK.mm(weight_KW) for error_BK, weight_KW in errors_and_weights]
        )
        error_GBW = _pass_positive(error_GBW, middle_GBW)
        _get_gradient(self.weights[1]).copy_(first_GBW.mT.bmm(error_GBW).mT)
        torch.sum(error_GBW, 1, out=_get_gradient(self.biases[1]))
        error_GBW = _pass_positive(error_GBW.bmm(self.weights[1]), first_GBW)
        _set_gradients_singly(x_GBF, error_GBW, self.weights[0], self.biases[0])

    @torch.no_grad()
    def split_networks(self, network: nn.Sequential) -> list[nn.Module]:
        """Return each copy as a network of its own, shaped like this one."""
        networks: list[nn.Module] = []
        for copy_index in range(len(self.weights[0])):
            single_network = copy.deepcopy(network).requires_grad_(False)
            layers = (layer for layer in single_network if isinstance(layer, nn.Linear))
            for layer, weight, bias in zip(layers, self.weights, self.biases, strict=True):
                layer.weight.copy_(weight[copy_index])
                layer.bias.copy_(bias[copy_index])
            networks.append(single_network)
        return networks


def _apply_layers_singly(x_GBF: Tensor, weight_GWF: Tensor, bias_GW: Tensor) -> Tensor:
    """Apply one layer of each of G copies, one copy after the other; return (G, B, W).

    A batched product of such narrow matrices would round gradients differently. `x_GBF`: the
    layer's inputs. `weight_GWF`, `bias_GW`: its parameters, with W outputs.
    """
    layers = zip(x_GBF, weight_GWF, bias_GW, strict=True)
    return torch.stack([F.linear(x_BF, weight, bias) for x_BF, weight, bias in layers])


def _set_gradients_singly(
    x_GBF: Tensor, error_GBW: Tensor, weight_GWF: Tensor, bias_GW: Tensor
) -> None:
    """Set the gradients of one layer of each of G copies, one copy after the other.

    `x_GBF`: the layer's inputs. `error_GBW`: the gradient of the loss by its W outputs.
    `weight_GWF`, `bias_GW`: its parameters, whose gradients are set.
    """
    gradients = zip(_get_gradient(weight_GWF), _get_gradient(bias_GW), strict=True)
    for x_BF, error_BW, (gradient_WF, gradient_W) in zip(x_GBF, error_GBW, gradients, strict=True):
        torch.mm(error_BW.mT, x_BF, out=gradient_WF)
        torch.sum(error_BW, 0, out=gradient_W)


def _get_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter, which `flatten_parameters` made."""
    assert parameter.grad is not None
    return parameter.grad


def _pass_positive(error_GBW: Tensor, output_GBW: Tensor) -> Tensor:
    """Return the gradient by a ReLU's input: the error where its output is above 0, else 0."""
    passed_GBW: Tensor = torch.ops.aten.threshold_backward(error_GBW, output_GBW, 0)
    return passed_GBW


@torch.no_grad()
def _train_networks(task_rows: Sequence[_Rows], draws: Draws) -> list[nn.Module]:
    """Train one MixMatch network for each task in parallel, with the same random numbers.

    Returns the moving averages of their weights as networks. There are G networks with P parameters
    together; a step mixes M rows of each task. `task_rows`: the rows of each task. `draws`: the
    random numbers.
    """
    feature_count = task_rows[0].labelled.shape[1]
    classes = task_rows[0].labels.shape[1]
    with draws:
        network = _make_network(feature_count, classes)
    generator = draws.get_generator()
    networks = _ParallelNetworks(network, len(task_rows))
    weights_P, _ = flatten_parameters([networks])
    average_P = weights_P.detach().clone()
    adam = _ADAMW([weights_P], lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    frequency_G1K = _compute_frequencies([rows.labels for rows in task_rows])
    guessed_frequency_G1K = frequency_G1K.clone()
    for step in range(_MIXMATCH_STEPS):
        drawn_rows = _draw_rows([len(rows.labelled) for rows in task_rows], generator)
        x_GBF = _augment_rows(
            _take_rows([rows.labelled for rows in task_rows], drawn_rows), generator
        )
        y_GBK = _take_rows([rows.labels for rows in task_rows], drawn_rows)
        drawn_rows = _draw_rows([len(rows.others) for rows in task_rows], generator)
        others_GBF = _take_rows([rows.others for rows in task_rows], drawn_rows)
        augmented = [_augment_rows(others_GBF, generator) for _ in range(_AUGMENTATIONS_PER_GUESS)]
        guess_GBK = _guess_labels(networks, augmented)
        guessed_frequency_G1K.lerp_(_compute_frequencies(guess_GBK), 1 - _AVERAGE_DECAY)
        # A class that was never guessed must not divide by 0.
        targets_GBK = _sharpen_guess(
            guess_GBK * frequency_G1K / guessed_frequency_G1K.clamp_min(1e-6)
        )
        x_GMF = torch.cat([x_GBF, *augmented], dim=1)
        y_GMK = torch.cat([y_GBK, *([targets_GBK] * _AUGMENTATIONS_PER_GUESS)], dim=1)
        guess_weight = _MAX_GUESS_WEIGHT * min(1.0, 2 * step / _MIXMATCH_STEPS)
        x_GMF, y_GMK = _mix_pairs(x_GMF, y_GMK, generator)
        outputs = networks.list_layer_outputs(x_GMF)
        error_GMK = _compute_loss_gradient(outputs[-1], y_GMK, guess_weight=guess_weight)
        networks.set_gradients(x_GMF, outputs, error_GMK)
        adam.step()
        # The average forgets its beginning: its weight on the past rises from 0 to _AVERAGE_DECAY.
        average_P.lerp_(weights_P.detach(), 1 - min(_AVERAGE_DECAY, step / (step + 10)))
    weights_P.data.copy_(average_P)
    return networks.split_networks(network)


def _compute_frequencies(labels: Iterable[Tensor]) -> Tensor:
    """Return the class frequencies of each of G tables of labels (B, K), (G, 1, K)."""
    return torch.stack([y_BK.mean(0) for y_BK in labels])[:, None]


def _draw_rows(row_counts: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Draw a batch of row indices for each task, from the same random numbers.

    So a task gets the same batch as if it were trained alone. `row_counts`: number of rows of each
    task.
    """
    state = generator.get_state()
    batches = []
    for row_count in row_counts:
        generator.set_state(state)
        batches.append(torch.randint(row_count, (_BATCH_ROWS,), generator=generator))
    return batches


def _take_rows(tables: Sequence[Tensor], rows_by_table: Sequence[Tensor]) -> Tensor:
    """Return the rows of each of G tables at its B indices, stacked, (G, B, ...)."""
    return torch.stack([table[rows] for table, rows in zip(tables, rows_by_table, strict=True)])


def _augment_rows(x_GBF: Tensor, generator: torch.Generator) -> Tensor:
    """Augment rows: add noise, and set some features to their mean 0.

    All G copies get the same noise. `x_GBF`: B standardised rows for each copy.
    """
    shape = x_GBF.shape[1:]
    noisy_GBF = x_GBF + _NOISE_DEVIATION * torch.randn(shape, generator=generator)
    return noisy_GBF * (torch.rand(shape, generator=generator) >= _DROP_PROBABILITY)


@torch.no_grad()
def _guess_labels(networks: nn.Module, augmented: list[Tensor]) -> Tensor:
    """Guess labels: the mean probabilities over several augmentations of each row (Eq. 6).

    `augmented`: augmentations of B rows for each of G copies, (G, B, F). Returns (G, B, K) for K
    classes.
    """
    # All augmentations of all rows in one pass: A = number of augmentations times B.
    scores_GAK: Tensor = networks(torch.cat(augmented, dim=1)).softmax(-1)
    copies, _, classes = scores_GAK.shape
    return scores_GAK.reshape(copies, len(augmented), -1, classes).mean(1)


def _sharpen_guess(guess_GBK: Tensor) -> Tensor:
    """Make class probabilities more certain by a temperature (MixMatch, Eq. 7), for G copies."""
    sharp_GBK = guess_GBK ** (1 / _TEMPERATURE)
    return sharp_GBK / sharp_GBK.sum(-1, keepdim=True)


def _mix_pairs(x_GMF: Tensor, y_GMK: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mix each of M rows with a random other one (MixUp; MixMatch, Eqs. 8 to 11).

    A mixed row is nearer to the first row of its pair. All G networks get the same pairs and
    shares.

    `x_GMF`: the rows. `y_GMK`: their class probabilities. `generator`: random number generator.
    """
    concentration_M2 = torch.full((x_GMF.shape[1], 2), _MIX_ALPHA)
    # Torch has no seeded Beta distribution. It is the first share of a two-way Dirichlet.
    share_M: Tensor = torch._sample_dirichlet(concentration_M2, generator=generator)[:, 0]
    own_share_M1 = torch.maximum(share_M, 1 - share_M)[:, None]
    partner_rows = torch.randperm(x_GMF.shape[1], generator=generator)
    return (
        own_share_M1 * x_GMF + (1 - own_share_M1) * x_GMF[:, partner_rows],
        own_share_M1 * y_GMK + (1 - own_share_M1) * y_GMK[:, partner_rows],
    )


def _compute_loss_gradient(logits_GMK: Tensor, y_GMK: Tensor, *, guess_weight: float) -> Tensor:
    """Return the gradient of MixMatch's loss by the logits (Eqs. 2 to 5).

    The loss is the cross-entropy of labelled rows plus the squared error of guessed ones. Of the M
    rows of each of G copies, the first `_BATCH_ROWS` are labelled; the L others have guessed
    labels.

    `logits_GMK`: the networks' outputs. `y_GMK`: the labels. `guess_weight`: weight of the squared
    error.
    """
    labelled_log_GBK = logits_GMK[:, :_BATCH_ROWS].log_softmax(-1)
    labelled_error_GBK = y_GMK[:, :_BATCH_ROWS] * (-1 / _BATCH_ROWS)
    guessed_GLK = logits_GMK[:, _BATCH_ROWS:].softmax(-1)
    _, guess_count, classes = guessed_GLK.shape
    guessed_error_GLK = (
        (guessed_GLK - y_GMK[:, _BATCH_ROWS:]) * (2 / (guess_count * classes)) * guess_weight
    )
    # The backward functions of log_softmax and softmax, as autograd calls them.
    aten = torch.ops.aten
    return torch.cat(
        [
            aten._log_softmax_backward_data(
                labelled_error_GBK, labelled_log_GBK, -1, logits_GMK.dtype
            ),
            aten._softmax_backward_data(guessed_error_GLK, guessed_GLK, -1, logits_GMK.dtype),
        ],
        dim=1,
    )


def flatten_parameters(networks: Iterable[nn.Module]) -> tuple[nn.Parameter, Tensor]:
    """Return all P numbers of the networks' parameters as one parameter, and its gradient.

    The networks' parameters and gradients become views of these two. An optimiser then takes much
    less time for few small layers, whose number matters more than their size. Every value still
    changes by its own gradient.

    Before each step the gradient must be set to 0 in place: the views would not follow a new one.
    """
    parameters = [parameter for network in networks for parameter in network.parameters()]
    flat_P = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    gradient_P = torch.zeros_like(flat_P)
    flat_P.grad = gradient_P
    sizes = [parameter.numel() for parameter in parameters]
    slices = zip(parameters, flat_P.data.split(sizes), gradient_P.split(sizes), strict=True)
    for parameter, flat_values, flat_gradient in slices:
        parameter.data = flat_values.view_as(parameter)
        parameter.grad = flat_gradient.view_as(parameter)
    return flat_P, gradient_P


def separate_parameters(network: nn.Module) -> nn.Module:
    """Undo `flatten_parameters`: give each parameter its own memory, and return the network."""
    for weight in network.parameters():
        weight.data = weight.data.clone()
        weight.grad = None
    return network
