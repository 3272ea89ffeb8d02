"""A3, inverse network, unpaired: rebuilds features with no pair of row and representation.

Run by: whoever receives a victim's representations h. It has rows of the victim's kind of features
of people whose h it never saw. A simulator f~ stands for the victim's encoder: a discriminator
keeps f~ of these rows like h, a decoder d keeps them decodable, and a second discriminator keeps
d(h) like them. Then d decodes h (Zhu et al., 2023, Passive Inference Attacks on Split Learning via
Adversarial Regularization, SDAR). There a task head ties f~ to the victim's; without labels of the
rows, f~(d(h)) must come back to h here (Zhu et al., 2017, CycleGAN, Eq. (2)), and of several
starts that one is taken whose rows and representations look most like those seen.

Where mirrored or exchanged features look the same, it finds either. SDAR's discriminators are told
labels, which says more; here they are told the adversary's own features of the same people, unless
it does not know whose rows it has (`conditioned`). A failure proves nothing.

Deviations from that paper: these, perceptrons, standardised columns, fewer iterations.

Letters: N observed rows, B batch, P public rows, D numbers of h, F the victim's features.
"""

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from apfed_attacks.columns import own_columns, why_nothing_of_victim
from apfed_attacks.features.feature_space import energy_distance, layers, slope_penalty
from apfed_attacks.features.regression import FeatureAttack, ridge
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.view import AdversaryView, AttackError, released
from secure_apfed.seeds import derive_seed, seeded, shuffled

__all__ = ["Simulation", "UnpairedInversion"]

_BETAS = 0.5, 0.9
_SEEN = 1_000  # rows that the choice among starts compares


class UnpairedInversion(FeatureAttack):
    """Simulate the victim's encoder on public rows; decode what it released.

    Baselines, with the same rows: their mean, the same computation on the own features x in
    place of h, and, where it knows whose rows it has, ridge regression from x.

    Attributes:
        shadow_rows: as elsewhere; these people's h is not used, and they are not guessed.
        conditioned: whether it knows whose rows these are, so that the discriminators compare
            them together with its own features x of the same people.
        iterations: of the networks, in each start; the paper takes 20,000.
        starts: how often it begins anew.
        rate, judge_rate: of Adam, for f~ and d, and for the discriminators.
        likeness: weight of f~(x) looking like h (lambda_1; the paper's .02 beside a task loss).
        decoded_likeness: weight of d(h) looking like rows (lambda_2).
        return_weight: of f~(d(h)) coming back to h.
        penalty: of the discriminators' slopes.
        batch: rows in a step.
    """

    name = "unpaired_inversion"
    roles = ("passive", "active")
    # Beside all others a fifth of the work, so that a run is attacked within minutes.
    suite = ({"starts": 1, "iterations": 600},)

    shadow_rows: int = Field(200, ge=2)
    conditioned: bool = True
    iterations: int = Field(1_500, ge=1)
    starts: int = Field(2, ge=1)
    rate: float = Field(1e-3, gt=0)
    judge_rate: float = Field(2e-3, gt=0)
    likeness: float = Field(0.5, ge=0)
    decoded_likeness: float = Field(0.5, ge=0)
    return_weight: float = Field(3.0, ge=0)
    penalty: float = Field(1.0, ge=0)
    batch: int = Field(128, ge=2)
    components: int = Field(64, ge=2)

    def applicable(self, view: AdversaryView) -> str | None:
        return why_nothing_of_victim(view)

    def run(self, view: AdversaryView, seed: int) -> Guess:
        shadow = view.knowledge.shadow
        if len(shadow) < 2:
            raise AttackError(f"{view.name} has {len(shadow)} public rows; raise shadow_rows")
        seen = released(view, view.knowledge.victim)
        positions = self.choose(view, seen["h"].positions, seed)
        # Positions of the known rows serve to leave these people out and to find their x.
        positions = positions[~torch.isin(positions, shadow.positions)]
        order = shuffled(torch.arange(len(shadow)), seed, "attacks", "unpaired")
        public_PF = shadow.values[order].flatten(1).float()
        x_NC, x_PC = own_columns(view, positions), own_columns(view, shadow.positions[order])
        beside = self._beside(x_NC, x_PC, seed)
        columns = {name: observed.at(positions) for name, observed in seen.items()}
        if not view.is_decoy:
            columns["x"] = x_NC  # a baseline, of which a decoy reads none
        found = {
            f"decoded {name}": Prediction(self._decode(view, values, public_PF, beside, seed))
            for name, values in columns.items()
        }
        mean_F = public_PF.double().mean(dim=0).numpy(force=True)
        baselines = {"mean of the public rows": Prediction(np.tile(mean_F, (len(positions), 1)))}
        if not view.is_decoy:
            baselines["decoded x"] = found.pop("decoded x")
        if self.conditioned and not view.is_decoy:
            known_PC, known_PF, own_NC = (
                one.double().numpy(force=True) for one in (x_PC, public_PF, x_NC)
            )
            baselines["ridge on x"] = ridge(known_PC, known_PF, own_NC)
        return Guess(positions=positions, attacks=found, baselines=baselines)

    def _beside(self, x_NC: Tensor, x_PC: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Own features of observed and of public rows in one unit; no columns where not told."""
        if not self.conditioned:
            return x_NC[:, :0].float(), x_PC[:, :0].float()
        both = torch.from_numpy(self.scaled(torch.cat([x_NC, x_PC]), seed)).float()
        return both[: len(x_NC)], both[len(x_NC) :]

    def _decode(
        self,
        view: AdversaryView,
        columns_NC: Tensor,
        public_PF: Tensor,
        beside: tuple[Tensor, Tensor],
        seed: int,
    ) -> FloatArray:
        seen_NC = torch.from_numpy(self.scaled(columns_NC, seed)).float()
        found = []
        for start in range(self.starts):
            own_seed = derive_seed(seed, self.name, start)
            found.append(Simulation(self, seen_NC, public_PF, beside, own_seed, view.device))
            found[-1].fit(view.budget.iterations)
        return min(found, key=Simulation.difference).decoded()


class Simulation:
    """One training of f~, d and two discriminators on standardised rows.

    Args:
        attack: settings.
        h_ND: standardised representations.
        public_PF: rows of the victim's kind of features.
        beside: what the discriminators are told of observed (N, C) and public (P, C) rows.
        seed: of weights and batches; device: where it trains.
    """

    def __init__(
        self,
        attack: UnpairedInversion,
        h_ND: Tensor,
        public_PF: Tensor,
        beside: tuple[Tensor, Tensor],
        seed: int,
        device: torch.device,
    ) -> None:
        self._attack, self._seed, self._device = attack, seed, device
        self._h_ND = h_ND.to(device)
        self._x_NC, self._x_PC = (columns.to(device) for columns in beside)
        self._centre_F, self._scale = public_PF.mean(dim=0), float(public_PF.std()) or 1.0
        self._public_PF = ((public_PF - self._centre_F) / self._scale).to(device)
        size, features, hidden = h_ND.shape[1], public_PF.shape[1], attack.hidden
        own = self._x_PC.shape[1]
        with seeded(seed, "networks"):
            self._simulator = layers(features, hidden, hidden, size).to(device)
            self._decoder = layers(size, hidden, hidden, features).to(device)
            self._judge_h = layers(size + own, hidden, hidden, 1).to(device)
            self._judge_x = layers(features + own, hidden, hidden, 1).to(device)
        pair = [*self._simulator.parameters(), *self._decoder.parameters()]
        self._judges = nn.ModuleList([self._judge_h, self._judge_x])
        self._pair_adam = torch.optim.Adam(pair, lr=attack.rate, betas=_BETAS)
        self._judge_adam = torch.optim.Adam(
            self._judges.parameters(), lr=attack.judge_rate, betas=_BETAS
        )

    def fit(self, iterations: int) -> None:
        with seeded(self._seed, "fit"):
            for _ in range(iterations):
                seen_B = torch.randint(len(self._h_ND), (self._attack.batch,))
                public_B = torch.randint(len(self._public_PF), (self._attack.batch,))
                self._train_judges(seen_B, public_B)
                self._train_pair(seen_B, public_B)

    def _train_judges(self, seen_B: Tensor, public_B: Tensor) -> None:
        """High for what is real, h and public rows; low for f~(x) and d(h)."""
        h_BD, public_BF = self._h_ND[seen_B], self._public_PF[public_B]
        with torch.no_grad():
            simulated_BD, decoded_BF = self._simulator(public_BF), self._decoder(h_BD)
        seen_BC, told_BC = self._x_NC[seen_B], self._x_PC[public_B]
        loss = torch.zeros((), device=self._device)
        for judge, real, made in (
            (self._judge_h, (h_BD, seen_BC), (simulated_BD, told_BC)),
            (self._judge_x, (public_BF, told_BC), (decoded_BF, seen_BC)),
        ):
            both = torch.hstack(real), torch.hstack(made)
            loss = loss + F.softplus(-judge(both[0])).mean() + F.softplus(judge(both[1])).mean()
            loss = loss + self._attack.penalty * slope_penalty(judge, *both, slope=0)
        self._judge_adam.zero_grad()
        loss.backward()
        self._judge_adam.step()

    def _train_pair(self, seen_B: Tensor, public_B: Tensor) -> None:
        attack = self._attack
        h_BD, public_BF = self._h_ND[seen_B], self._public_PF[public_B]
        self._judges.requires_grad_(False)
        simulated_BD = self._simulator(public_BF)
        loss = F.mse_loss(self._decoder(simulated_BD), public_BF)
        judged_B = self._judge_h(torch.hstack([simulated_BD, self._x_PC[public_B]]))
        loss = loss + attack.likeness * F.softplus(-judged_B).mean()
        decoded_BF = self._decoder(h_BD)
        judged_B = self._judge_x(torch.hstack([decoded_BF, self._x_NC[seen_B]]))
        loss = loss + attack.decoded_likeness * F.softplus(-judged_B).mean()
        loss = loss + attack.return_weight * F.mse_loss(self._simulator(decoded_BF), h_BD)
        self._pair_adam.zero_grad()
        loss.backward()
        self._pair_adam.step()
        self._judges.requires_grad_(True)

    @torch.no_grad()
    def difference(self) -> float:
        """How unlike f~(x) and h are, and d(h) and x: what the adversary itself can see."""
        h_SD, x_SC = self._h_ND[:_SEEN], self._x_NC[:_SEEN]
        simulated_PD, decoded_SF = self._simulator(self._public_PF), self._decoder(h_SD)
        return energy_distance(
            torch.hstack([simulated_PD, self._x_PC]), torch.hstack([h_SD, x_SC])
        ) + energy_distance(
            torch.hstack([decoded_SF, x_SC]), torch.hstack([self._public_PF, self._x_PC])
        )

    @torch.no_grad()
    def decoded(self) -> FloatArray:
        """Return d(h), (N, F), in the public rows' units."""
        decoded_NF: Tensor = self._decoder(self._h_ND) * self._scale + self._centre_F
        return decoded_NF.double().numpy(force=True)
