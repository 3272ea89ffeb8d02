"""A4, reversed hijacking: a malicious passive of APFed rebuilds the active's features.

Run by: a passive that answers every step with a gradient of its own choice. It knows some
outsiders wholly, the active's features included. From these it trains a simulator f and a
decoder d with d(f(x)) near x, and a discriminator between f(x) and the representations that it
receives; its answer pulls those towards f's space. Then d decodes them. In split learning the
server does this to its clients (Pasquini et al., 2021, Unleashing the Tiger); in APFed the
passive has to do it through a sum with other passives' gradients, against the active's own loss,
and with rows no longer than the clip.

Deviations from that paper: perceptrons for convolutions, the non-saturating loss with a
gradient penalty for the Wasserstein one.

Letters: B batch, N rows, P outsiders, D numbers of a representation, F features of the active.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn

from attacks.completion import own_columns
from attacks.interface import Guess, Prediction
from attacks.reading import collect, representations
from attacks.strategy import PassiveAttack, notes_of, why_not_played
from attacks.view import AdversaryView, Knowledge
from secure_apfed.contract import RepresentationTerms
from secure_apfed.seeds import derive_seed, seeded

__all__ = ["Hijack", "ReversedHijack"]


class ReversedHijack(PassiveAttack):
    """Hijack while training; decode the representations of the last epoch.

    Baselines, with the same outsiders: their mean, and ridge regression from the own features.

    Attributes:
        strength: kappa, by which the answer is multiplied; the sum's clip may shorten it.
        penalty: weight of the discriminator's gradient penalty.
        rounds: training rounds of its networks for each step that it answers.
        learning_rate: of its networks (Adam).
    """

    name: ClassVar[str] = "reversed_hijack"

    strength: float = Field(1.0, gt=0)
    penalty: float = Field(10.0, ge=0)
    rounds: int = Field(2, ge=1)
    learning_rate: float = Field(1e-3, gt=0)

    def applicable(self, view: AdversaryView) -> str | None:
        """It needs to have been played by the passive of this view."""
        return why_not_played(self, view)

    def begin(self, terms: RepresentationTerms, knowledge: Knowledge, seed: int) -> "Hijack":
        """Start with fresh networks."""
        assert knowledge.victim is not None
        public_PF = knowledge.public[knowledge.victim].flatten(1).float()
        return Hijack(self, int(np.prod(terms.shape)), public_PF, derive_seed(seed, self.name))

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Decode what was received of every row."""
        notes = notes_of(self, view)
        seen = collect(lambda epoch: representations(view, epoch), reversed(view.epochs))
        decoder = _networks(seen.z.shape[1], int(notes["size"]), self.hidden)["decoder"]
        decoder.load_state_dict({key: value for key, value in notes.items() if key != "size"})
        with torch.no_grad():
            decoded_NF = decoder(seen.z.float()).double().numpy()
        assert view.knowledge.victim is not None
        public_PF = view.knowledge.public[view.knowledge.victim].flatten(1).double().numpy()
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
                "ridge on x": Prediction(ridge.predict(own_NF)),
            },
        )


class Hijack:
    """The adversary's networks and how it answers a step."""

    def __init__(self, attack: ReversedHijack, size: int, public_PF: Tensor, seed: int) -> None:
        self._attack, self._public_PF, self._seed = attack, public_PF, seed
        with seeded(seed, "networks"):
            self._networks = _networks(size, public_PF.shape[1], attack.hidden)
        pair = ("simulator", "decoder")
        parameters = [one for name in pair for one in self._networks[name].parameters()]
        self._autoencoding = torch.optim.Adam(parameters, attack.learning_rate)
        self._judging = torch.optim.Adam(
            self._networks["discriminator"].parameters(), attack.learning_rate
        )

    def answer(self, step: int, rows_B: Tensor, z_BD: Tensor) -> Tensor:
        """Train on this batch; return kappa d[-log D(z)]/dz, which makes z look like f(x)."""
        z_BD = z_BD.detach().float()
        with seeded(self._seed, step):
            for _ in range(self._attack.rounds):
                self._train(z_BD)
        wanted_BD = z_BD.clone().requires_grad_()
        loss = F.softplus(-self._networks["discriminator"](wanted_BD)).sum()
        (gradient_BD,) = torch.autograd.grad(loss, wanted_BD)
        return gradient_BD * self._attack.strength

    def _train(self, z_BD: Tensor) -> None:
        simulator, decoder, judge = (
            self._networks[name] for name in ("simulator", "decoder", "discriminator")
        )
        public_BF = self._public_PF[torch.randint(len(self._public_PF), (len(z_BD),))]
        simulated_BD = simulator(public_BF)
        self._autoencoding.zero_grad()
        F.mse_loss(decoder(simulated_BD), public_BF).backward()
        self._autoencoding.step()
        simulated_BD = simulated_BD.detach()
        mixed_BD = torch.lerp(z_BD, simulated_BD, torch.rand(len(z_BD), 1)).requires_grad_()
        (slope_BD,) = torch.autograd.grad(judge(mixed_BD).sum(), mixed_BD, create_graph=True)
        loss = F.softplus(-judge(simulated_BD)).mean() + F.softplus(judge(z_BD)).mean()
        loss = loss + self._attack.penalty * (slope_BD.norm(dim=1) - 1).square().mean()
        self._judging.zero_grad()
        loss.backward()
        self._judging.step()

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

    def layers(wide: int, narrow: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(wide, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2), nn.Linear(hidden, narrow),
        )  # fmt: skip

    return {
        "simulator": layers(features, size),
        "decoder": layers(size, features),
        "discriminator": layers(size, 1),
    }
