"""Feature-space hijacking: a malicious party pulls a victim's encoder into its own feature space.

Run by: a party whose answers train the victim's encoder (Pasquini et al., 2021, Unleashing the
Tiger: Inference Attacks on Split Learning, FSHA). It knows some outsiders wholly. From these it
trains a simulator f and a decoder d with d(f(x)) near x, and a discriminator between f(x) and the
representations that it receives; its answer pulls those towards f's space. Then d decodes them.

`hijack` is played by an active of TVFL: it returns to one passive the gradient that pulls in place
of that of the task, and the passive cannot tell one from the other. In APFed no party returns such
a gradient. `reversed_hijack` (A4) is played by a passive of APFed, through a sum with other
passives' gradients, against the active's own loss, and with rows no longer than the sum's clip.

Deviations from that paper: f and d are trained before the first answer and stay as they are, so
that what the victim is pulled to does not move; the loss is the non-saturating one with a penalty
on slopes, since under their Wasserstein loss the victim's scale kept swinging here; the
discriminator is a perceptron, and f and d are ones where the victim sends no maps.

Letters: B batch, N rows, P outsiders, D numbers of a representation, F features of the victim.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from apfed_attacks.columns import select_own_columns
from apfed_attacks.features.feature_space import (
    build_decoder,
    build_layers,
    build_simulator,
    compute_slope_penalty,
)
from apfed_attacks.features.regression import predict_by_ridge
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.live.strategy import AnsweringAttack, read_notes
from apfed_attacks.view import AdversaryView, AttackError, Knowledge, collect_releases
from secure_apfed.base.seeds import derive_seed, seed_draws
from secure_apfed.networks.models import Shape

if TYPE_CHECKING:
    from secure_apfed.contract import RepresentationBounds

_SOFTPLUS_SHIFT = 2.0  # moves simulated numbers away from 0, where gradients vanish
_BETAS = 0.5, 0.999  # of Adam: with two opposed learners little momentum is better
_ROWS_AT_ONCE = 500  # that are encoded or decoded together


class HijackAttack(AnsweringAttack):
    """An attack that pulls a victim's encoder into a feature space that the adversary can decode.

    It decodes the representations of the last epoch. The adversary knows outsiders: people outside
    the training, with all their features. Baselines, with the same outsiders: their mean, and ridge
    regression from the own features.

    Attributes:
        strength: kappa, the factor on the gradient that the adversary sends back as its answer.
        penalty: weight of the discriminator's slopes (FSHA's notebook: 500).
        ahead: training steps of simulator and decoder before the first forged gradient.
        batch: number of outsiders in each of these steps.
        rounds: training rounds of the discriminator for each step that it takes part in.
        learning_rate, judge_rate: of simulator and decoder, and of the discriminator (Adam).
        conditioned: whether the discriminator reads the adversary's own features of the same
            people, which say which outsiders a person resembles. The paper's server has none.
        channels: numbers of channels of convolutions (see `apfed_attacks.features.feature_space`).
    """

    strength: float = Field(1.0, gt=0)
    penalty: float = Field(1.0, ge=0)
    ahead: int = Field(600, ge=1)
    rounds: int = Field(1, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    judge_rate: float = Field(1e-3, gt=0)
    conditioned: bool = True
    batch: int = Field(64, ge=2)
    channels: int = Field(16, ge=1)

    keeps = ("shape",)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why the attack does not apply; None: it applies.

        Either the view is not of a live run of it, or the adversary knows no outsiders (people
        outside the training) with the victim's features.
        """
        reason = super().explain_missing_input(view)
        victim = view.knowledge.victim
        if reason is None and victim not in view.knowledge.public:
            return f"{view.name} knows no outsiders with features of {victim}"
        return reason

    def start_answering(
        self, terms: "RepresentationBounds", knowledge: Knowledge, own_AF: Tensor, seed: int
    ) -> "HijackAdversary":
        """Return the adversary that forges each step's gradient; it trains on the outsiders'
        features.

        `terms`: what the contract says about representations. `own_AF`: the adversary's features at
        each of the A alignment positions. P is the number of outsiders.
        """
        assert knowledge.victim is not None
        outsiders = knowledge.public[knowledge.victim].float()
        own_rows = [rows for name, rows in knowledge.public.items() if name != knowledge.victim]
        known_PF = outsiders.new_empty(len(outsiders), 0)
        if own_rows and self.conditioned:
            known_PF = _fit_to_columns(own_rows[0], own_AF.flatten(1).shape[1])
        return HijackAdversary(
            self, terms.shape, outsiders, own_AF, known_PF, derive_seed(seed, self.name)
        )

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Decode the victim's recorded releases by the decoder that the adversary trained in the
        live run.

        Baselines, from the P outsiders: their mean, and ridge regression from the C own columns.
        """
        notes = read_notes(self, view)
        victim = view.knowledge.victim
        assert victim is not None
        releases = collect_releases(view, victim)
        positions = releases["h"].positions
        outsiders = view.knowledge.public[victim].float()
        space = FeatureSpace(self, tuple(notes["shape"].tolist()), outsiders)
        space.decoder.load_state_dict({key: notes[key] for key in space.decoder.state_dict()})
        attacks = {
            f"decoded {name}": Prediction(
                _to_float64(space.decode_rows(observed.select_positions(positions).float()))
            )
            for name, observed in releases.items()
        }
        public_PF = _to_float64(outsiders.flatten(1))
        mean_NF = np.tile(public_PF.mean(axis=0), (len(positions), 1))
        baselines = {"mean of the outsiders": Prediction(mean_NF)}
        own_rows = view.knowledge.public.get(view.parties[0])
        if own_rows is not None:
            own_NC = _to_float64(select_own_columns(view, positions))
            own_PC = _to_float64(_fit_to_columns(own_rows, own_NC.shape[1]))
            baselines["ridge on x"] = predict_by_ridge(own_PC, public_PF, own_NC)
        return Guess(positions=positions, attacks=attacks, baselines=baselines)


class FeatureSpaceHijack(HijackAttack):
    """The attack FSHA: a malicious active of TVFL rebuilds a passive's features."""

    name = "hijack"
    roles = ("active",)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no active can mount FSHA here; None: it can.

        It returns no gradient, or it reads sums only.
        """
        exchange = view.description
        if not exchange.returns_gradients:
            return f"{exchange}: the active returns no gradient that trains a passive's encoder"
        if exchange.opens == "representations":
            return f"{exchange}: the active reads a sum of representations, and no passive's own"
        return super().explain_missing_input(view)


class ReversedHijack(HijackAttack):
    """The attack A4: a malicious passive of APFed rebuilds the active's features."""

    name = "reversed_hijack"
    roles = ("passive",)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why no passive can mount the attack here; None: it can.

        Only in APFed do a passive's gradients train the active's encoder.
        """
        if view.description.opens != "gradients":
            return f"{view.description}: no answer of a passive trains the active's encoder"
        return super().explain_missing_input(view)


def _to_float64(rows_NF: Tensor) -> FloatArray:
    """Return rows as an array of float64 on the CPU."""
    return np.asarray(rows_NF.double().numpy(force=True))


def _fit_to_columns(known_P: Tensor, columns: int) -> Tensor:
    """Return rows (P, ...) flattened, with as many columns as `select_own_columns` gives, (P, F).

    Where that has one column more, which marks missing rows, it is 0 here.

    Raises AttackError: the number of columns differs.
    """
    known_PF = known_P.flatten(1)
    missing = columns - known_PF.shape[1]
    if missing not in (0, 1):
        raise AttackError(
            f"rows of {known_PF.shape[1]} features cannot stand beside {columns} own columns; "
            "give rows of the same party"
        )
    return F.pad(known_PF, (0, missing))


class FeatureSpace:
    """The feature space of the attack: simulator f, decoder d, and the standardised outsiders.

    Args:
        attack: the attack, whose widths and channels the networks take.
        sent: shape of a release of one row.
        outsiders: (P, ...) features of people outside the training.

    Attributes:
        is_reachable_D: mask of the D components of a representation that are above 0 for some row,
            of a victim whose encoder ends in a ReLU; None: it does not.
    """

    def __init__(self, attack: HijackAttack, release_shape: Shape, outsiders: Tensor) -> None:
        """Build simulator and decoder, and standardise the outsiders.

        Each feature has a mean of its own, and all have one scale. P is the number of outsiders, D
        the size of a representation.
        """
        self.outsiders_PF = rows_PF = outsiders.flatten(1)
        self.is_reachable_D: Tensor | None = None
        self._least_value = rows_PF.min()
        self._greatest_value = rows_PF.max()
        self._centre_F = rows_PF.mean(dim=0)
        self._scale = float(rows_PF.std()) or 1.0
        self.scaled_outsiders_PF = (rows_PF - self._centre_F) / self._scale
        widths = tuple(outsiders.shape[1:]), release_shape, attack.hidden, attack.channels
        self.simulator = build_simulator(*widths).to(outsiders.device)
        self.decoder = build_decoder(*widths).to(outsiders.device)

    def simulate_batch(self, scaled_BF: Tensor) -> Tensor:
        """Return simulated representations (B, D) of standardised features.

        If the victim's encoder ends in a ReLU, they are 0 or above: above 0 in the components where
        it can be.
        """
        simulated_BD: Tensor = self.simulator(scaled_BF)
        if self.is_reachable_D is None:
            return simulated_BD
        # softplus is a smooth ReLU; the shift keeps its gradient from vanishing.
        return F.softplus(simulated_BD + _SOFTPLUS_SHIFT) * self.is_reachable_D

    @torch.no_grad()
    def simulate_rows(self, features_NF: Tensor) -> Tensor:
        """Return simulated representations f(x), (N, D), of features in the outsiders' units."""
        scaled_NF = (features_NF.flatten(1) - self._centre_F) / self._scale
        return torch.cat(
            [self.simulate_batch(scaled_BF) for scaled_BF in scaled_NF.split(_ROWS_AT_ONCE)]
        )

    @torch.no_grad()
    def decode_rows(self, z_ND: Tensor) -> Tensor:
        """Return decoded features d(z), (N, F), in the outsiders' units and range."""
        decoded_NF = torch.cat([self.decoder(z_BD) for z_BD in z_ND.split(_ROWS_AT_ONCE)])
        return (decoded_NF * self._scale + self._centre_F).clamp(
            self._least_value, self._greatest_value
        )


class HijackAdversary:
    """The adversary's networks, which train with each step for which it forges a gradient.

    Args:
        attack: the attack, whose options the training follows.
        sent: shape of a release of one row.
        outsiders: (P, ...) the victim's features of people outside the training.
        own_AF: the adversary's own features by alignment position.
        own_PF: its own features of the outsiders, which the discriminator reads; (P, 0): it reads
            none.
        seed: seed of initial weights and batches.
    """

    def __init__(
        self,
        attack: HijackAttack,
        release_shape: Shape,
        outsiders: Tensor,
        own_AF: Tensor,
        own_PF: Tensor,
        seed: int,
    ) -> None:
        """Standardise the own features of A aligned people and P outsiders, and build the
        networks.
        """
        self._attack = attack
        self._release_shape = release_shape
        self._seed = seed
        own_features = own_PF.shape[1]
        own_PF = own_PF.float()
        own_AF = own_AF.flatten(1).float()
        centre_F = own_PF.mean(dim=0)
        scale = 1.0
        if own_features:
            scale = float(own_PF.std()) or 1.0
        else:
            # The discriminator reads no own features.
            own_AF = own_AF[:, :0]
        self._own_AF = (own_AF - centre_F) / scale
        self._own_PF = (own_PF - centre_F) / scale
        with seed_draws(seed, "networks"):
            self.space = FeatureSpace(attack, release_shape, outsiders)
            inputs = math.prod(release_shape) + own_features
            self._discriminator = build_layers(inputs, attack.hidden, attack.hidden, 1)
        self._discriminator.to(outsiders.device)
        self._discriminator_optimizer = torch.optim.Adam(
            self._discriminator.parameters(), attack.judge_rate, betas=_BETAS, fused=True
        )
        self._simulated_PD: Tensor | None = None  # f of the outsiders, from the first step on

    def forge_gradient(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        """Train the discriminator on this batch, and return a forged gradient (B, D).

        Descending along it makes the victim's representations z look like simulated ones, f(x).

        `step`: number of the step. `rows_B`: alignment positions. `z_BD`: the victim's
        representations.
        """
        z_BD = z_BD.detach().to(self.space.outsiders_PF.device, torch.float32)
        if self._simulated_PD is None:
            self._simulated_PD = self._train_simulator(z_BD)
        own_BF = self._own_AF[rows_B]
        # What the discriminator reads: a representation, beside own features of the same person.
        victims_BC = torch.cat([z_BD, own_BF], dim=1)
        with seed_draws(self._seed, step):
            for _ in range(self._attack.rounds):
                outsiders_B = torch.randint(len(self._simulated_PD), (len(victims_BC),))
                simulated_BC = torch.cat(
                    [self._simulated_PD[outsiders_B], self._own_PF[outsiders_B]], dim=1
                )
                # Logistic loss: simulated rows should score high, the victim's low.
                loss = F.softplus(-self._discriminator(simulated_BC)).mean()
                loss = loss + F.softplus(self._discriminator(victims_BC)).mean()
                penalty = compute_slope_penalty(self._discriminator, victims_BC, simulated_BC)
                self._discriminator_optimizer.zero_grad()
                (loss + self._attack.penalty * penalty).backward()
                self._discriminator_optimizer.step()
        # The gradient of the loss that is small where z passes for simulated.
        h_BD = z_BD.clone().requires_grad_()
        scores_B = self._discriminator(torch.cat([h_BD, own_BF], dim=1))
        (gradient_BD,) = torch.autograd.grad(F.softplus(-scores_B).sum(), h_BD)
        return gradient_BD * self._attack.strength

    def _train_simulator(self, z_BD: Tensor) -> Tensor:
        """Train simulator f and decoder to be inverse to each other on the outsiders; return f of
        these, (P, D).

        `z_BD`: the victim's first batch, which shows whether its encoder ends in a ReLU.
        """
        space = self.space
        attack = self._attack
        ends_in_relu = bool((z_BD >= 0).all())
        space.is_reachable_D = (z_BD > 0).any(dim=0) if ends_in_relu else None
        parameters = [*space.simulator.parameters(), *space.decoder.parameters()]
        adam = torch.optim.Adam(parameters, attack.learning_rate, fused=True)
        with seed_draws(self._seed, "ahead"):
            for _ in range(attack.ahead):
                rows_B = torch.randint(len(space.scaled_outsiders_PF), (attack.batch,))
                public_BF = space.scaled_outsiders_PF[rows_B]
                adam.zero_grad()
                F.mse_loss(space.decoder(space.simulate_batch(public_BF)), public_BF).backward()
                adam.step()
        return space.simulate_rows(space.outsiders_PF)

    def collect_notes(self) -> Mapping[str, Tensor]:
        """Return the decoder's weights and the shape of a release, for `HijackAttack.run`."""
        return {**self.space.decoder.state_dict(), "shape": torch.tensor(self._release_shape)}
