"""Hijacking: what the attacks share that pull a victim's encoder into their own feature space.

Run by: a party whose answers train the victim's encoder (Pasquini et al., 2021, Unleashing the
Tiger: Inference Attacks on Split Learning, FSHA). It knows some outsiders wholly, the victim's
features included. From these it trains a simulator f and a decoder d with d(f(x)) near x, and a
discriminator between f(x) and the representations that it receives; its answer pulls those
towards f's space. Then d decodes them.

Deviations from that paper: perceptrons for convolutions and, unless "wasserstein" is chosen, the
non-saturating loss.

Letters: B batch, N rows, P outsiders, D numbers of a representation, F features of the victim.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn

from attacks.completion import own_columns
from attacks.feature_space import layers, slope_penalty
from attacks.interface import Guess, Prediction
from attacks.reading import collect, representations
from attacks.strategy import AnsweringAttack, notes_of, why_not_played
from attacks.view import AdversaryView, Knowledge
from secure_apfed.contract import RepresentationTerms
from secure_apfed.seeds import derive_seed, seeded

__all__ = ["Hijack", "HijackAttack"]

_AWAY_FROM_ZERO = 2.0


class HijackAttack(AnsweringAttack):
    """Hijack while training; decode the representations of the last epoch.

    Baselines, with the same outsiders: their mean, and ridge regression from the own features.

    Attributes:
        strength: kappa, by which the answer is multiplied.
        loss: of discriminator and answer; FSHA's notebook takes the Wasserstein one.
        penalty: weight of the discriminator's gradient penalty.
        rounds: training rounds of its networks for each step that it answers.
        learning_rate, judge_rate: of simulator and decoder, and of the discriminator (Adam).
    """

    strength: float = Field(1.0, gt=0)
    loss: Literal["logistic", "wasserstein"] = "logistic"
    penalty: float = Field(10.0, ge=0)
    rounds: int = Field(2, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    judge_rate: float = Field(1e-3, gt=0)

    def applicable(self, view: AdversaryView) -> str | None:
        """It needs to have been played by the adversary of this view."""
        return why_not_played(self, view)

    def begin(self, terms: RepresentationTerms, knowledge: Knowledge, seed: int) -> "Hijack":
        """Start with fresh networks."""
        assert knowledge.victim is not None
        public_PF = knowledge.public[knowledge.victim].flatten(1).float()
        return Hijack(self, int(np.prod(terms.shape)), public_PF, derive_seed(seed, self.name))

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Decode what was received of every row."""
        notes, victim = notes_of(self, view), view.knowledge.victim
        assert victim is not None
        read = partial(representations, view, sender=victim)
        seen = collect(read, reversed(view.epochs))
        decoder = _networks(seen.z.shape[1], int(notes["size"]), self.hidden)["decoder"]
        decoder.load_state_dict({key: value for key, value in notes.items() if key != "size"})
        with torch.no_grad():
            decoded_NF = decoder(seen.z.float()).double().numpy()
        public_PF = view.knowledge.public[victim].flatten(1).double().numpy()
        own_PF = view.knowledge.public[view.parties[0]].flatten(1).double().numpy()
        ridge = RidgeCV(np.logspace(-2, 4, 13)).fit(own_PF, public_PF)
        own_NF = own_columns(view, seen.positions).double().numpy()
        return Guess(
            positions=seen.positions,
            attacks={"decoded representations": Prediction(decoded_NF)},
            baselines={
                "mean of the outsiders": Prediction(
                    np.tile(public_PF.mean(axis=0), (len(seen.positions), 1))
                ),
                "ridge on x": Prediction(ridge.predict(own_NF).reshape(decoded_NF.shape)),
            },
        )


class Hijack:
    """The adversary's networks and how it answers a step."""

    def __init__(self, attack: HijackAttack, size: int, public_PF: Tensor, seed: int) -> None:
        self._attack, self._public_PF, self._seed = attack, public_PF, seed
        self._reach_D: Tensor | None = None
        with seeded(seed, "networks"):
            self._networks = _networks(size, public_PF.shape[1], attack.hidden)
        pair = ("simulator", "decoder")
        parameters = [one for name in pair for one in self._networks[name].parameters()]
        self._autoencoding = torch.optim.Adam(parameters, attack.learning_rate)
        self._judging = torch.optim.Adam(
            self._networks["discriminator"].parameters(), attack.judge_rate
        )

    def answer(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        """Train on this batch; return the gradient, row by row, that makes z look like f(x)."""
        z_BD = z_BD.detach().float()
        if self._reach_D is None:
            # What the first batch shows of a victim behind a ReLU: numbers that stay 0.
            self._reach_D = (z_BD > 0).any(dim=0) if bool((z_BD >= 0).all()) else torch.empty(0)
        with seeded(self._seed, step):
            for _ in range(self._attack.rounds):
                self._train(z_BD)
        wanted_BD = z_BD.clone().requires_grad_()
        judged_B = self._networks["discriminator"](wanted_BD)
        logistic = self._attack.loss == "logistic"
        loss = F.softplus(-judged_B).sum() if logistic else -judged_B.sum()
        (gradient_BD,) = torch.autograd.grad(loss, wanted_BD)
        return gradient_BD * self._attack.strength

    def _train(self, z_BD: Tensor) -> None:
        simulator, decoder, judge = (
            self._networks[name] for name in ("simulator", "decoder", "discriminator")
        )
        public_BF = self._public_PF[torch.randint(len(self._public_PF), (len(z_BD),))]
        simulated_BD = self._within_reach(simulator(public_BF))
        self._autoencoding.zero_grad()
        F.mse_loss(decoder(simulated_BD), public_BF).backward()
        self._autoencoding.step()
        simulated_BD = simulated_BD.detach()
        mine_B, theirs_B = judge(simulated_BD), judge(z_BD)
        if self._attack.loss == "logistic":
            loss = F.softplus(-mine_B).mean() + F.softplus(theirs_B).mean()
        else:
            loss = theirs_B.mean() - mine_B.mean()
        loss = loss + self._attack.penalty * slope_penalty(judge, z_BD, simulated_BD)
        self._judging.zero_grad()
        loss.backward()
        self._judging.step()

    def _within_reach(self, simulated_BD: Tensor) -> Tensor:
        """Keep the space where a ReLU lets the victim go, and far enough from 0 to learn."""
        if self._reach_D is None or not len(self._reach_D):
            return simulated_BD
        return F.softplus(simulated_BD + _AWAY_FROM_ZERO) * self._reach_D

    @property
    def decoder(self) -> nn.Module:
        """d, from representations to features."""
        return self._networks["decoder"]

    def notes(self) -> Mapping[str, Tensor]:
        """The decoder's state."""
        size = torch.tensor(self._public_PF.shape[1])
        return {**self.decoder.state_dict(), "size": size}


def _networks(size: int, features: int, hidden: int) -> dict[str, nn.Module]:
    """Simulator (F -> D), decoder (D -> F) and discriminator (D -> 1)."""
    return {
        "simulator": layers(features, hidden, hidden, size),
        "decoder": layers(size, hidden, hidden, features),
        "discriminator": layers(size, hidden, hidden, 1),
    }
