"""A9, membership: who trained the active's model (LiRA), or at another party of FedMV.

Run by: whoever may query the finished model and holds candidate rows with their labels (a
customer of the prediction service, a former employee). For each candidate it compares the
model's confidence with that of shadow models that did, and did not, train on this row: the
likelihood ratio attack of Carlini et al. (2022), Membership Inference Attacks From First
Principles, online. They train as the active would alone; the passives' help is unknown to it.

Letters: S shadow models, N candidates, K classes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from apfed_attacks.interface import Attack, FloatArray, Guess, Prediction
from apfed_attacks.view import AdversaryView, AttackError
from secure_apfed.base.seeds import derive_seed, seed_draws, shuffle_rows
from secure_apfed.networks.models import make_encoder_and_head
from secure_apfed.settings import ModelSettings

if TYPE_CHECKING:
    from secure_apfed.settings import TrainSettings

Strangers: TypeAlias = Literal["outside", "elsewhere"]
"""People who did not train at a party: of no party's training, or of another passive's."""
_MIN_DEVIATION = 1e-12
_SCORED_AT_ONCE = 32_768  # rows times models of a forward pass
_State = Mapping[str, Tensor]  # parameters by name


def compute_logit_confidence(scores_NK: Tensor, labels_N: Tensor) -> FloatArray:
    """Return a model's confidence in each true class: log(p / (1 - p)), (..., N).

    p is the true class's probability (Carlini et al. 2022, Section IV). `scores_NK`: class scores
    or log-probabilities (..., N, K); leading axes may be models. `labels_N`: the true classes.
    """
    logp_NK = scores_NK.double().log_softmax(-1)
    true_N1 = labels_N.to(logp_NK.device)[:, None].expand(*logp_NK.shape[:-1], 1)
    others_NK = logp_NK.scatter(-1, true_N1, -torch.inf)
    logit_N = logp_NK.gather(-1, true_N1)[..., 0] - others_NK.logsumexp(-1)
    return np.asarray(logit_N.numpy(force=True))


def compute_likelihood_ratio(
    confidence_N: FloatArray,
    shadow_confidence_SN: FloatArray,
    is_trained_SN: NDArray[np.bool_],
    *,
    has_own_variances: bool = False,
) -> FloatArray:
    """Return for each of N candidates how much more its confidence fits models that trained on it.

    This is the log-likelihood of the confidence under the shadow models that trained on the
    candidate, minus that under those that did not, (N,). Both are normal distributions with the
    candidate's own mean. S is the number of shadow models.

    Args:
        confidence_N: the attacked model's logit confidences.
        shadow_confidence_SN: those of the shadow models.
        is_trained_SN: which shadow model trained on which candidate; for each at least one did, and
            one did not.
        has_own_variances: whether each candidate has its own variances, for which the paper asks 64
            models or more; else there is one variance for inside and one for outside.
    """

    def compute_log_likelihood(selected_SN: NDArray[np.bool_]) -> FloatArray:
        """Return log N(phi; mean, deviation), (N,), of the selected shadow models."""
        count_N = selected_SN.sum(axis=0)
        mean_N = np.where(selected_SN, shadow_confidence_SN, 0).sum(axis=0) / count_N
        square_SN = np.where(selected_SN, np.square(shadow_confidence_SN - mean_N), 0)
        axis = 0 if has_own_variances else None  # over the models, or over all
        deviation = np.sqrt(square_SN.sum(axis=axis) / selected_SN.sum(axis=axis))
        return np.asarray(
            scipy.stats.norm.logpdf(confidence_N, mean_N, np.maximum(deviation, _MIN_DEVIATION))
        )

    return compute_log_likelihood(is_trained_SN) - compute_log_likelihood(~is_trained_SN)


class Membership(Attack):
    """The attack LiRA on who trained the model, and two thresholds on the confidence alone.

    It compares the attacked model's confidence in a row's label with that of shadow models: models
    that the adversary trains with and without the row.

    Attacks: the likelihood ratio, with one variance or with each candidate's own; the confidence
    compared with that of the shadow models that did not train on the row (offline); the confidence
    as it is (Yeom et al., 2018). Baseline: the mean confidence of the shadow models, that is, how
    easy a row is. Decoys: each candidate's predictions are another's.

    Attributes:
        shadow_models: S, even; 16 to 64 are usual.
        epochs: training epochs of the shadow models; null: as many as the run's.
    """

    name = "membership"
    target = "membership"
    roles = ("outsider",)

    shadow_models: int = Field(32, ge=4, multiple_of=2)
    candidates: int = Field(4_000, ge=4)
    epochs: int | None = Field(None, ge=1)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why there is no model to query, or no candidate; None: there is."""
        if view.answers is None:
            return f"{view.description}: no party has a model that an outsider could query alone"
        if view.knowledge.candidates is None:
            return "the querier holds no candidate rows"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Train shadow models on halves of the candidates, and compare the model's confidence with
        theirs.

        Letters: S shadow models, H candidates in a half, N candidates, K classes.
        """
        candidates = view.knowledge.candidates
        knowledge = view.knowledge
        assert candidates is not None
        assert view.answers is not None
        train = candidates.train
        if self.epochs is not None:
            train = train.model_copy(update={"epochs": self.epochs})
        shape = tuple(candidates.features.shape[1:])
        rows_SH = draw_halves(self.shadow_models, len(candidates), seed)

        def make_usual_network() -> nn.Module:
            """Return a network of the library's default architecture; used where the victim's is
            unknown.
            """
            return nn.Sequential(*make_encoder_and_head(ModelSettings(), shape, knowledge.classes))

        make_network = knowledge.architecture or make_usual_network
        shadows = ShadowModels(make_network, train, seed, view.device)
        scores_SNK = shadows.train_and_score(candidates.features, candidates.labels, rows_SH)
        shadow_SN = compute_logit_confidence(scores_SNK, candidates.labels)
        is_trained_SN = np.zeros(shadow_SN.shape, dtype=bool)
        np.put_along_axis(is_trained_SN, rows_SH.numpy(), values=True, axis=1)
        answers_NK = view.answers(candidates.features)
        confidence_N = compute_logit_confidence(answers_NK, candidates.labels)
        # The decoy: each candidate is scored by the model's confidence in another one.
        others_N = shuffle_rows(torch.arange(len(confidence_N)), seed, "attacks", "decoy").numpy()
        attacks = _score_candidates(confidence_N, shadow_SN, is_trained_SN)
        decoys = _score_candidates(confidence_N[others_N], shadow_SN, is_trained_SN)
        baselines = {"shadow models' confidence": shadow_SN.mean(axis=0)}
        return _make_guess(attacks, baselines, decoys)


def _score_candidates(
    confidence_N: FloatArray, shadow_confidence_SN: FloatArray, is_trained_SN: NDArray[np.bool_]
) -> dict[str, FloatArray]:
    """Return each variant's score of all N candidates; a large one says that the row trained.

    The arguments are those of `compute_likelihood_ratio`.
    """
    compute_ratio = partial(
        compute_likelihood_ratio, confidence_N, shadow_confidence_SN, is_trained_SN
    )
    # Mean confidence of the shadow models that did not train on the row.
    outside_sum_N = np.where(is_trained_SN, 0, shadow_confidence_SN).sum(axis=0)
    outside_mean_N = outside_sum_N / (~is_trained_SN).sum(axis=0)
    return {
        "likelihood ratio": compute_ratio(),
        "likelihood ratio, own variances": compute_ratio(has_own_variances=True),
        "above models without the row": confidence_N - outside_mean_N,
        "confidence": confidence_N,
    }


def draw_halves(models: int, rows: int, seed: int) -> Tensor:
    """Return the training rows of each shadow model, (S, N // 2), sorted: S `models`, N `rows`.

    Models come in pairs with complementary halves, so that each row is in half of the models if
    their number is even.
    """
    draw = torch.Generator().manual_seed(derive_seed(seed, "shadows", "halves"))
    half = rows // 2
    orders = (torch.randperm(rows, generator=draw) for _ in range((models + 1) // 2))
    chosen = [part for order in orders for part in (order[:half], order[-half:])]
    return torch.stack(chosen[:models]).sort(dim=1).values


@dataclass(frozen=True)
class ShadowModels:
    """The shadow models: networks like the victim's, each trained on a part of the candidates.

    All train at once: their parameters are stacked, one batched pass serves all of them, several
    times faster than one after another.

    Attributes:
        make_network: function that returns one network, from rows to class scores (B, K), without
            buffers.
        train: the victim's training settings, as far as they are known.
        seed: seed of weights, halves, batches and dropout.
        device: where they train.
    """

    make_network: Callable[[], nn.Module]
    train: "TrainSettings"
    seed: int
    device: torch.device

    def train_and_score(self, features_N: Tensor, labels_N: Tensor, rows_SH: Tensor) -> Tensor:
        """Train model s on the H rows rows_SH[s], all at once; return the scores of all rows, (S,
        N, K).

        `features_N`, `labels_N`: features and labels of all N candidates.

        Raises AttackError: networks have buffers, which differ between models.
        """
        networks = self._make_networks(len(rows_SH))
        base = networks[0]
        if any(isinstance(layer, nn.RNNBase) for layer in base.modules()):
            # Sequences of different lengths are packed, which cannot be stacked.
            return self.score_one_by_one(features_N, labels_N, rows_SH)
        parameters, buffers = stack_module_state(networks)
        if buffers:
            raise AttackError(
                f"shadow models are networks without buffers, got {', '.join(buffers)}"
            )
        score_rows = _build_stacked_forward(base)
        features_N = features_N.to(self.device)
        labels_N = labels_N.to(self.device)
        optimiser = self._make_optimiser(list(parameters.values()))
        with seed_draws(self.seed, "shadows", "dropout"):
            for index_SB in self._iter_batches(rows_SH):
                scores_SBK = score_rows(parameters, features_N[index_SB])
                # The sum over models of their mean losses: each model gets its own gradient.
                loss = F.cross_entropy(scores_SBK.flatten(0, 1), labels_N[index_SB].flatten())
                optimiser.zero_grad()
                (loss * len(rows_SH)).backward()
                _clip_gradients(parameters, self.train.max_gradient_norm)
                optimiser.step()
        base.eval()
        return self._score_models(
            lambda rows: score_rows(parameters, rows), features_N, len(rows_SH)
        )

    def score_one_by_one(self, features_N: Tensor, labels_N: Tensor, rows_SH: Tensor) -> Tensor:
        """Train model s on rows_SH[s], one model after another; return the scores of all rows, (S,
        N, K).

        `features_N`, `labels_N`: features and labels of all candidates.
        """
        features_N = features_N.to(self.device)
        labels_N = labels_N.to(self.device)
        batches = list(self._iter_batches(rows_SH))
        bound = self.train.max_gradient_norm
        scores = []
        for number, network in enumerate(self._make_networks(len(rows_SH))):
            optimiser = self._make_optimiser(list(network.parameters()))
            with seed_draws(self.seed, "shadows", "dropout", number):
                for rows_B in (index_SB[number] for index_SB in batches):
                    loss = F.cross_entropy(network(features_N[rows_B]), labels_N[rows_B])
                    optimiser.zero_grad()
                    loss.backward()
                    if bound is not None:
                        nn.utils.clip_grad_norm_(network.parameters(), bound)
                    optimiser.step()
            network.eval()
            scores.append(self._score_models(lambda rows: network(rows[0])[None], features_N, 1))  # noqa: B023
        return torch.cat(scores)

    def _make_networks(self, models: int) -> list[nn.Module]:
        """Return S networks with weights drawn by the seed."""
        with seed_draws(self.seed, "shadows", "weights"):
            return [self.make_network().to(self.device) for _ in range(models)]

    def _make_optimiser(self, parameters: list[Tensor]) -> torch.optim.SGD:
        """Return SGD with the victim's settings of training."""
        train = self.train
        return torch.optim.SGD(
            parameters,
            lr=train.learning_rate,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
        )

    def _iter_batches(self, rows_SH: Tensor) -> Iterator[Tensor]:
        """Yield every batch of every epoch: row indices (S, B). Each of S models shuffles its own H
        rows.
        """
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "shadows", "batches"))
        for _ in range(self.train.epochs):
            order_SH = torch.rand(rows_SH.shape, generator=draw).argsort(dim=1)
            yield from (
                rows_SH.gather(1, order_SH).to(self.device).split(self.train.batch_size, dim=1)
            )

    @torch.no_grad()
    def _score_models(
        self, call: Callable[[Tensor], Tensor], features_N: Tensor, models: int
    ) -> Tensor:
        """Return the scores of all candidates' rows by all models, (S, N, K), computed in parts.

        `call`: function from rows (S, B, ...) to scores (S, B, K) of all models. `models`: S.
        """
        parts = features_N.split(max(1, _SCORED_AT_ONCE // models))
        return torch.cat([call(rows.expand(models, *rows.shape)).cpu() for rows in parts], dim=1)


def _build_stacked_forward(base: nn.Module) -> Callable[[_State, Tensor], Tensor]:
    """Return a function that applies S models with stacked parameters to rows.

    It takes the parameters and rows (S, B, ...), and returns scores (S, B, K). All models have the
    architecture of `base`. A chain of linear layers with biases needs no vmap: one fused product
    and sum a layer is faster.
    """
    layers = [(name, layer) for name, layer in base.named_modules() if not list(layer.children())]
    simple_layers = (nn.Linear, nn.ReLU, nn.Flatten, nn.Dropout)
    # `bias` of a linear layer without one is None; other layers have no such attribute.
    is_simple_chain = all(
        isinstance(layer, simple_layers) and getattr(layer, "bias", "no attribute") is not None
        for _, layer in layers
    )
    if not is_simple_chain:
        return torch.vmap(
            lambda state, rows: functional_call(base, state, (rows,)), randomness="different"
        )

    def apply_layers(state: _State, rows_SBF: Tensor) -> Tensor:
        """Apply a chain of layers to rows (S, B, F), each model with its own weights."""
        values = rows_SBF.flatten(2)
        for name, layer in layers:
            if isinstance(layer, nn.Linear):
                bias_S1D = state[f"{name}.bias"][:, None]
                weight_SDF = state[f"{name}.weight"]
                values = torch.baddbmm(bias_S1D, values, weight_SDF.transpose(1, 2))
            elif not isinstance(layer, nn.Flatten):
                values = layer(values)
        return values

    return apply_layers


def _clip_gradients(parameters: _State, bound: float | None) -> None:
    """Scale each model's gradient to the norm `bound`, in place, if it is longer; None: no bound.

    `parameters`: stacked parameters by name; the first axis is that of the models.
    """
    if bound is None:
        return
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    norm_S = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    scale_S = (bound / (norm_S + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale_S.reshape(-1, *(1,) * (gradient.dim() - 1)))


class AveragedMembership(Attack):
    """A party of FedMV asks the average of weights who trained at another party.

    Run by: the active or a passive of H-FedMV or S-FedMV, each trained on people of its own; it
    holds people with their labels. Models fit the rows that they were trained on better than others
    (Yeom et al., 2018, Privacy Risk in Machine Learning, Section 3): FedMV fits scores to one-hot
    labels by least squares, so the squared error is the signal. How hard a person is to fit anyway
    is measured by a model that the adversary trains on people of its own in the same way, and
    subtracted (difficulty calibration: Watson et al., 2022, On the Importance of Difficulty
    Calibration in Membership Inference Attacks, Section 3).

    The secure sum hides which party a person trained at: `strangers: elsewhere`, where the others
    are people of other passives, asks what is left of that. It does not hide that somebody trained
    (`outside`), and with one passive it hides nothing. A passive reads the average of the round
    before the last.

    Baseline: the own model's squared error alone. Decoys: the attacks where each person's error
    under the average is another's, of about the same error under the own model.
    """

    name = "averaged_membership"
    target = "membership"
    roles = ("active", "passive")
    suite = ({"strangers": "outside"}, {"strangers": "elsewhere"})

    candidates: int = Field(4_000, ge=4)
    strangers: Strangers = "outside"

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why there is nobody to guess about; None: there is somebody.

        There is no average of weights, there are no candidates, or the adversary has no labelled
        people of its own.
        """
        if view.description.opens != "weights":
            return f"{view.description}: no weights are averaged"
        if view.parties[0] not in view.networks:
            return f"the recording holds no average of {view.description}"
        if view.knowledge.candidates is None or view.knowledge.alike is None:
            return f"{view.name} holds no people to ask about, or does not know how to train"
        if view.parties[0] not in view.labels or view.parties[0] not in view.features:
            return f"{view.name} has no labelled people of its own"
        return None

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Score candidates by how well the averaged model fits them, and by how much better than an
        own model.

        n is the number of candidates.
        """
        candidates = view.knowledge.candidates
        train = view.knowledge.alike
        assert candidates is not None
        assert train is not None
        adversary = view.parties[0]
        labels_A = view.labels[adversary]  # the adversary's labels by alignment position
        has_label = labels_A >= 0
        own_model = train(view.features[adversary][has_label], labels_A[has_label])
        average = view.networks[adversary]
        rows_n = candidates.features.to(next(average.parameters()).dtype)
        with torch.no_grad():
            fit_n = _compute_fit(average(rows_n), candidates.labels)
        easy_n = _compute_fit(own_model(candidates.features), candidates.labels)
        # A decoy gives each person the averaged model's fit of another one: of the next in the
        # order of the own model's fits. The two fits then stay about as close as they were.
        order_n = np.argsort(easy_n)
        others_n = np.empty_like(order_n)
        others_n[order_n] = np.roll(order_n, 1)

        def score_candidates(fit_n: FloatArray) -> dict[str, FloatArray]:
            """Return the two scores of all candidates, (n,), from their fits."""
            return {"fit": fit_n, "fit less that of an own model": fit_n - easy_n}

        return _make_guess(
            score_candidates(fit_n),
            {"fit of an own model": easy_n},
            score_candidates(fit_n[others_n]),
        )


def _make_guess(*scores: Mapping[str, FloatArray]) -> Guess:
    """Return the guess of an attack on membership.

    `scores`: scores (n,) of the candidates by variant, of attacks, of baselines and of decoys, in
    this order.
    """
    attacks, baselines, decoys = (
        {name: Prediction(values_n[:, None]) for name, values_n in scores_by_variant.items()}
        for scores_by_variant in scores
    )
    all_candidates = torch.arange(len(next(iter(scores[0].values()))))
    return Guess(positions=all_candidates, attacks=attacks, baselines=baselines, decoys=decoys)


def _compute_fit(scores_nK: Tensor, labels_n: Tensor) -> FloatArray:
    """Return minus the squared distance (n,) of the scores from one-hot labels."""
    truth_nK = F.one_hot(labels_n, scores_nK.shape[1]).to(scores_nK.device)
    fit_n: FloatArray = -(scores_nK.double() - truth_nK).square().sum(dim=1).numpy(force=True)
    return fit_n
