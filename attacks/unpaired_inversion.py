"""A3, inverse network, unpaired: rebuilds features with no pair of row and representation.

Run by: whoever receives a victim's representations h. It has rows of the victim's kind of features
and does not know whose they are. A simulator f~ stands for the victim's encoder: a discriminator
keeps f~ of these rows like h, a decoder d keeps them decodable, and a second discriminator keeps
d(h) like them. Then d decodes h (Zhu et al., 2023, Passive Inference Attacks on Split Learning via
Adversarial Regularization, SDAR). There a task head ties f~ to the victim's; without labels of the
rows, f~(d(h)) must come back to h here (Zhu et al., 2017, CycleGAN, Eq. (2)), and of several
starts that one is taken whose rows and representations look most like those seen. Where mirrored
or exchanged features look the same, it finds either: a failure proves nothing.

Deviations from that paper: these, perceptrons, standardised columns, fewer iterations.

Letters: N observed rows, B batch, P public rows, D numbers of h, F the victim's features.
"""

from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from attacks.completion import chosen_positions, own_columns, standardised, why_nothing_of_victim
from attacks.feature_space import energy_distance, layers, slope_penalty
from attacks.interface import Attack, AttackError, Guess, Prediction, Target
from attacks.reading import collect, representations
from attacks.view import AdversaryView, Role
from secure_apfed.seeds import derive_seed, seeded, shuffled

__all__ = ["Simulation", "UnpairedInversion"]

FloatArray: TypeAlias = NDArray[np.floating[Any]]

_SEEN = 1_000  # rows that the choice among starts compares


class UnpairedInversion(Attack):
    """Simulate the victim's encoder on public rows; decode what it released.

    Baselines, with the same rows: their mean, and the same computation on the own features x in
    place of h.

    Attributes:
        shadow_rows: rows of the victim's features that the adversary has; whose they are is not
            used, and these people are not guessed.
        iterations: of the networks, in each start; the paper takes 20,000.
        starts: how often it begins anew.
        rate, judge_rate: of Adam, for f~ and d, and for the discriminators.
        likeness: weight of f~(x) looking like h (lambda_1; the paper's .02 beside a task loss).
        decoded_likeness: weight of d(h) looking like rows (lambda_2).
        return_weight: of f~(d(h)) coming back to h.
        penalty: of the discriminators' slopes.
        batch: rows in a step; hidden: width of every hidden layer.
        most_rows: of more observed rows a random part is used.
        components: wider columns of h or x are reduced to this many principal components.
    """

    name: ClassVar[str] = "unpaired_inversion"
    target: ClassVar[Target] = "features"
    roles: ClassVar[tuple[Role, ...]] = ("passive", "active")

    shadow_rows: int = Field(200, ge=2)
    iterations: int = Field(800, ge=1)
    starts: int = Field(4, ge=1)
    rate: float = Field(1e-3, gt=0)
    judge_rate: float = Field(2e-3, gt=0)
    likeness: float = Field(0.1, ge=0)
    decoded_likeness: float = Field(0.1, ge=0)
    return_weight: float = Field(3.0, ge=0)
    penalty: float = Field(10.0, ge=0)
    batch: int = Field(128, ge=2)
    hidden: int = Field(128, ge=1)
    most_rows: int = Field(5_000, ge=2)
    components: int = Field(64, ge=2)

    def applicable(self, view: AdversaryView) -> str | None:
        """The adversary needs representations that the victim released to it."""
        return why_nothing_of_victim(self, view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Guess the victim's features of the observed rows whose features it does not have."""
        shadow = view.knowledge.shadow
        if len(shadow) < 2:
            raise AttackError(f"{view.name} has {len(shadow)} public rows; raise shadow_rows")
        read = partial(representations, view, sender=view.knowledge.victim)
        seen = collect(read, reversed(view.epochs))
        positions = chosen_positions(view, seen.positions, self.most_rows, seed)
        # Positions of the known rows serve to leave these people out, and for nothing else.
        positions = positions[~torch.isin(positions, shadow.positions)]
        public_PF = shuffled(shadow.values, seed, "attacks", "unpaired").flatten(1).float()
        columns = {"h": seen.at(positions), "x": own_columns(view, positions)}
        found = {
            name: Prediction(self._decode(view, values, public_PF, seed))
            for name, values in columns.items()
        }
        mean_F = public_PF.double().mean(dim=0).numpy()
        return Guess(
            positions=positions,
            attacks={"decoded h": found["h"]},
            baselines={
                "mean of the public rows": Prediction(np.tile(mean_F, (len(positions), 1))),
                "decoded x": found["x"],
            },
        )

    def _decode(
        self, view: AdversaryView, columns_NC: Tensor, public_PF: Tensor, seed: int
    ) -> FloatArray:
        scaled_NC = standardised(columns_NC, components=self.components, seed=seed)
        seen_NC = torch.from_numpy(scaled_NC).float()
        device = torch.device(view.budget.device)
        best: tuple[float, FloatArray] | None = None
        for start in range(self.starts):
            own_seed = derive_seed(seed, self.name, start)
            simulation = Simulation(self, seen_NC, public_PF, own_seed, device)
            simulation.fit(view.budget.iterations)
            difference = simulation.difference()
            if best is None or difference < best[0]:
                best = difference, simulation.decoded()
        assert best is not None
        return best[1]


class Simulation:
    """One training of f~, d and two discriminators on standardised rows.

    Args:
        attack: settings.
        h_ND: standardised representations.
        public_PF: rows of the victim's kind of features.
        seed: of weights and batches; device: where it trains.
    """

    def __init__(
        self,
        attack: UnpairedInversion,
        h_ND: Tensor,
        public_PF: Tensor,
        seed: int,
        device: torch.device,
    ) -> None:
        self._attack, self._seed, self._device = attack, seed, device
        self._h_ND = h_ND.to(device)
        self._centre_F, self._scale = public_PF.mean(dim=0), float(public_PF.std()) or 1.0
        self._public_PF = ((public_PF - self._centre_F) / self._scale).to(device)
        size, features, hidden = h_ND.shape[1], public_PF.shape[1], attack.hidden
        with seeded(seed, "networks"):
            self._simulator = layers(features, hidden, hidden, size).to(device)
            self._decoder = layers(size, hidden, hidden, features).to(device)
            self._judge_h = layers(size, hidden, hidden, 1).to(device)
            self._judge_x = layers(features, hidden, hidden, 1).to(device)
        self._pair = torch.optim.Adam(
            [*self._simulator.parameters(), *self._decoder.parameters()],
            lr=attack.rate, betas=(0.5, 0.9),
        )  # fmt: skip
        self._judges = torch.optim.Adam(
            [*self._judge_h.parameters(), *self._judge_x.parameters()],
            lr=attack.judge_rate, betas=(0.5, 0.9),
        )  # fmt: skip

    def fit(self, iterations: int) -> None:
        """Train."""
        with seeded(self._seed, "fit"):
            for _ in range(iterations):
                h_BD = self._h_ND[torch.randint(len(self._h_ND), (self._attack.batch,))]
                rows = torch.randint(len(self._public_PF), (self._attack.batch,))
                self._train_judges(h_BD, self._public_PF[rows])
                self._train_pair(h_BD, self._public_PF[rows])

    def _train_judges(self, h_BD: Tensor, public_BF: Tensor) -> None:
        """High for what is real, h and public rows; low for f~(x) and d(h)."""
        with torch.no_grad():
            simulated_BD, decoded_BF = self._simulator(public_BF), self._decoder(h_BD)
        loss = torch.zeros((), device=self._device)
        for judge, real, made in (
            (self._judge_h, h_BD, simulated_BD), (self._judge_x, public_BF, decoded_BF)
        ):  # fmt: skip
            loss = loss + F.softplus(-judge(real)).mean() + F.softplus(judge(made)).mean()
            loss = loss + self._attack.penalty * slope_penalty(judge, real, made)
        self._judges.zero_grad()
        loss.backward()
        self._judges.step()

    def _train_pair(self, h_BD: Tensor, public_BF: Tensor) -> None:
        attack = self._attack
        simulated_BD = self._simulator(public_BF)
        loss = F.mse_loss(self._decoder(simulated_BD), public_BF)
        loss = loss + attack.likeness * F.softplus(-self._judge_h(simulated_BD)).mean()
        decoded_BF = self._decoder(h_BD)
        loss = loss + attack.decoded_likeness * F.softplus(-self._judge_x(decoded_BF)).mean()
        loss = loss + attack.return_weight * F.mse_loss(self._simulator(decoded_BF), h_BD)
        self._pair.zero_grad()
        loss.backward()
        self._pair.step()

    @torch.no_grad()
    def difference(self) -> float:
        """How unlike f~(x) and h are, and d(h) and x: what the adversary itself can see."""
        h_SD = self._h_ND[:_SEEN]
        simulated_PD, decoded_SF = self._simulator(self._public_PF), self._decoder(h_SD)
        return energy_distance(simulated_PD, h_SD) + energy_distance(decoded_SF, self._public_PF)

    @torch.no_grad()
    def decoded(self) -> FloatArray:
        """Return d(h), (N, F), in the public rows' units."""
        decoded_NF: Tensor = self._decoder(self._h_ND).cpu() * self._scale + self._centre_F
        return decoded_NF.double().numpy()
