"""A3, inverse network, unpaired: rebuilds features with no pair of row and representation.

Run by: whoever receives a victim's representations h. It has rows of the victim's kind of features
of people whose h it never saw. A simulator f~ stands for the victim's encoder: a discriminator
keeps f~ of these rows like h, a decoder d keeps them decodable, and a second discriminator keeps
d(h) like them. Then d decodes h (Zhu et al., 2023, Passive Inference Attacks on Split Learning via
Adversarial Regularization, SDAR). Where mirrored or exchanged features look the same, it finds
either.

Deviations from that paper: in place of a task head, without labels of the rows, f~(d(h)) must come
back to h (Zhu et al., 2017, CycleGAN, Eq. (2)), and of several starts that one is taken whose rows
and representations look most like those seen; discriminators are told the adversary's own features
of the same people (`conditioned`), not labels; perceptrons, standardised columns, fewer iterations.

Letters: N observed rows, B batch, P public rows, D numbers of h, F the victim's features.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from apfed_attacks.columns import select_own_columns
from apfed_attacks.features.feature_space import (
    build_layers,
    compute_energy_distance,
    compute_slope_penalty,
)
from apfed_attacks.features.regression import FeatureAttack, predict_by_ridge
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.view import AdversaryView, AttackError, collect_releases
from secure_apfed.base.seeds import derive_seed, seed_draws, shuffle_rows

_BETAS = 0.5, 0.9  # of Adam
_COMPARED_ROWS = 1_000  # by which the best of several starts is chosen


class UnpairedInversion(FeatureAttack):
    """An attack that simulates the victim's encoder on public rows, and decodes its releases h.

    Public rows are features of people whose releases are not used. Baselines, with the same rows:
    their mean, the same computation on the own features x in place of h, and, where it knows whose
    rows it has, ridge regression from x.

    Letters: h releases, f~ the simulator, d the decoder.

    Attributes:
        shadow_rows: number of public rows; these people are not guessed.
        conditioned: whether the adversary knows whose rows these are.
        iterations: training steps after each of `starts` initialisations; the paper takes 20,000.
        rate, judge_rate: learning rates (Adam) of f~ and d, and of the discriminators.
        likeness: weight of f~(x) looking like h (lambda_1; the paper's .02 beside a task loss).
        decoded_likeness: weight of d(h) looking like rows (lambda_2).
        return_weight: weight of the distance of f~(d(h)) from h.
        penalty: weight of the gradient penalty on the discriminators.
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

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Train on public rows and decode each kind of release.

        Of several starts the one is used whose results look most like the data. P public people and
        N attacked ones have C own columns.
        """
        shadow = view.knowledge.shadow
        if len(shadow) < 2:
            raise AttackError(f"{view.name} has {len(shadow)} public rows; raise shadow_rows")
        releases = collect_releases(view, view.knowledge.victim)
        positions = self.choose_rows(view, releases["h"].positions, seed)
        # Where the known rows are is used only to leave these people out and to find their x.
        positions = positions[~torch.isin(positions, shadow.positions)]
        if not len(positions):
            raise AttackError(f"{view.name} knows the features of every observed row")
        order = shuffle_rows(torch.arange(len(shadow)), seed, "attacks", "unpaired")
        public_PF = shadow.values[order].flatten(1).float()
        x_NC = select_own_columns(view, positions)
        x_PC = select_own_columns(view, shadow.positions[order])
        joined = torch.cat([x_NC, x_PC])
        if self.conditioned:
            joined = torch.from_numpy(self.scale_columns(joined, seed))
        else:
            joined = joined[:, :0]  # the discriminators see no own features
        own_NC, own_PC = joined.float().split([len(x_NC), len(x_PC)])
        decode_columns = partial(
            _decode_with_best_start,
            self,
            view,
            public_PF=public_PF,
            x_NC=own_NC,
            x_PC=own_PC,
            seed=seed,
        )
        attacks = {
            f"decoded {name}": decode_columns(h.select_positions(positions))
            for name, h in releases.items()
        }
        mean_F = public_PF.double().mean(dim=0).numpy(force=True)
        baselines = {"mean of the public rows": Prediction(np.tile(mean_F, (len(positions), 1)))}
        if not view.is_decoy:  # a decoy's baselines are not used
            baselines["decoded x"] = decode_columns(x_NC)
            if self.conditioned:
                baselines["ridge on x"] = predict_by_ridge(
                    x_PC.double().numpy(force=True),
                    public_PF.double().numpy(force=True),
                    x_NC.double().numpy(force=True),
                )
        return Guess(positions=positions, attacks=attacks, baselines=baselines)


def _decode_with_best_start(
    attack: UnpairedInversion,
    view: AdversaryView,
    columns_NC: Tensor,
    *,
    public_PF: Tensor,
    x_NC: Tensor,
    x_PC: Tensor,
    seed: int,
) -> Prediction:
    """Return features decoded from columns, (N, F), by the networks of the best of all starts.

    That is the start with the smallest distance of decoded and simulated rows from real ones.

    `columns_NC`: releases, or own features as a baseline. The other arguments are those of
    `_train_inversion`; each start has a seed that is derived from `seed`.
    """
    h_ND = torch.from_numpy(attack.scale_columns(columns_NC, seed)).float()
    distances_and_features = [
        _train_inversion(
            attack, view, h_ND, public_PF, x_NC, x_PC, derive_seed(seed, attack.name, start)
        )
        for start in range(attack.starts)
    ]
    _, decoded_NF = min(distances_and_features, key=lambda pair: pair[0])
    return Prediction(decoded_NF)


class _InversionNetworks:
    """The simulator f~, the decoder d, and two discriminators, which also see own features.

    One discriminator compares releases h with f~(public rows), the other public rows with d(h).
    """

    def __init__(
        self,
        attack: UnpairedInversion,
        *,
        sizes: tuple[int, int, int],
        seed: int,
        device: torch.device,
    ) -> None:
        """Draw the initial weights.

        Args:
            attack: the attack, for its options.
            sizes: numbers of columns of h, of the victim's features, and of own features.
            seed: seed of the weights.
            device: device of the networks.
        """
        self.attack = attack
        release_size, features, own_features = sizes
        inputs_and_outputs = (
            (features, release_size),
            (release_size, features),
            (release_size + own_features, 1),
            (features + own_features, 1),
        )
        with seed_draws(seed, "networks"):
            self.simulator, self.decoder, self.discriminator_h, self.discriminator_x = (
                build_layers(inputs, attack.hidden, attack.hidden, outputs).to(device)
                for inputs, outputs in inputs_and_outputs
            )
        self.simulator_and_decoder = nn.ModuleList([self.simulator, self.decoder])
        self.discriminators = nn.ModuleList([self.discriminator_h, self.discriminator_x])

    def compute_discriminator_loss(
        self, h_BD: Tensor, rows_BF: Tensor, observed_BC: Tensor, public_BC: Tensor
    ) -> Tensor:
        """Return the loss of the discriminators: of h against f~(rows), and of rows against d(h).

        `h_BD`: releases. `rows_BF`: standardised rows of public people. `observed_BC`, `public_BC`:
        own features of the people of h, and of the public ones.
        """
        with torch.no_grad():
            simulated_BD = self.simulator(rows_BF)
            decoded_BF = self.decoder(h_BD)
        loss = torch.zeros((), device=h_BD.device)
        for judge, real, simulated in (
            (self.discriminator_h, (h_BD, observed_BC), (simulated_BD, public_BC)),
            (self.discriminator_x, (rows_BF, public_BC), (decoded_BF, observed_BC)),
        ):
            real_B = torch.hstack(real)
            simulated_B = torch.hstack(simulated)
            loss = loss + F.softplus(-judge(real_B)).mean() + F.softplus(judge(simulated_B)).mean()
            loss = loss + self.attack.penalty * compute_slope_penalty(judge, real_B, simulated_B)
        return loss

    def compute_inverse_loss(
        self, h_BD: Tensor, rows_BF: Tensor, observed_BC: Tensor, public_BC: Tensor
    ) -> Tensor:
        """Return the loss of f~ and d.

        They should be inverse to each other, and their results look real to the discriminators.

        `h_BD`: releases. `rows_BF`: standardised rows of public people. `observed_BC`, `public_BC`:
        own features of the people of h, and of the public ones.
        """
        attack = self.attack
        simulated_BD = self.simulator(rows_BF)
        loss = F.mse_loss(self.decoder(simulated_BD), rows_BF)
        judged_B = self.discriminator_h(torch.hstack([simulated_BD, public_BC]))
        loss = loss + attack.likeness * F.softplus(-judged_B).mean()
        decoded_BF = self.decoder(h_BD)
        judged_B = self.discriminator_x(torch.hstack([decoded_BF, observed_BC]))
        loss = loss + attack.decoded_likeness * F.softplus(-judged_B).mean()
        return loss + attack.return_weight * F.mse_loss(self.simulator(decoded_BF), h_BD)

    def train(
        self, h_ND: Tensor, rows_PF: Tensor, x_NC: Tensor, x_PC: Tensor, *, steps: int, seed: int
    ) -> None:
        """Train the discriminators and the pair f~ and d in turn on random batches.

        Args:
            h_ND: standardised releases.
            rows_PF: standardised rows of public people.
            x_NC, x_PC: own features of the people of h, and of the public ones.
            steps: number of training steps.
            seed: seed of the batches.
        """
        attack = self.attack
        pair_adam = torch.optim.Adam(
            self.simulator_and_decoder.parameters(), lr=attack.rate, betas=_BETAS
        )
        judge_adam = torch.optim.Adam(
            self.discriminators.parameters(), lr=attack.judge_rate, betas=_BETAS
        )
        with seed_draws(seed, "fit"):
            for _ in range(steps):
                observed_B = torch.randint(len(h_ND), (attack.batch,))
                public_B = torch.randint(len(rows_PF), (attack.batch,))
                batch = h_ND[observed_B], rows_PF[public_B], x_NC[observed_B], x_PC[public_B]
                _take_step(judge_adam, self.compute_discriminator_loss(*batch))
                # The pair's step needs no gradients of the discriminators' weights.
                self.discriminators.requires_grad_(False)
                _take_step(pair_adam, self.compute_inverse_loss(*batch))
                self.discriminators.requires_grad_(True)

    @torch.no_grad()
    def measure_distance(self, h_ND: Tensor, rows_PF: Tensor, x_NC: Tensor, x_PC: Tensor) -> float:
        """Return two energy distances, added; they are small where the compared values look alike.

        They are the distance of f~(public rows) from h, and that of d(h) from the public rows, each
        beside own features. Of h the first S rows are used, since all pairs are compared.

        Args:
            h_ND: standardised releases.
            rows_PF: standardised rows of public people.
            x_NC, x_PC: own features of the people of h, and of the public ones.
        """
        h_SD = h_ND[:_COMPARED_ROWS]
        x_SC = x_NC[:_COMPARED_ROWS]
        simulated = torch.hstack([self.simulator(rows_PF), x_PC])
        decoded = torch.hstack([self.decoder(h_SD), x_SC])
        distance = compute_energy_distance(simulated, torch.hstack([h_SD, x_SC]))
        return distance + compute_energy_distance(decoded, torch.hstack([rows_PF, x_PC]))


def _take_step(adam: torch.optim.Adam, loss: Tensor) -> None:
    """Take one step of this optimiser on the loss."""
    adam.zero_grad()
    loss.backward()
    adam.step()


def _train_inversion(
    attack: UnpairedInversion,
    view: AdversaryView,
    h_ND: Tensor,
    public_PF: Tensor,
    x_NC: Tensor,
    x_PC: Tensor,
    seed: int,
) -> tuple[float, FloatArray]:
    """Train the simulator f~ and the decoder d once, and decode h.

    Args:
        attack: the attack, for its options.
        view: view that is attacked, for its device and number of iterations.
        h_ND: standardised releases, D numbers each.
        public_PF: features of the P public people.
        x_NC, x_PC: C own features of the N people of the releases, and of the public ones.
        seed: seed of initial weights and batches.

    Returns:
        Two energy distances, added: of f~(public rows) from h and of d(h) from the public rows,
        small where they look alike; and d(h), (N, F), in the features' units.
    """
    device = view.device
    centre_F = public_PF.mean(dim=0)
    scale = float(public_PF.std()) or 1.0
    rows_PF = ((public_PF - centre_F) / scale).to(device)
    h_ND, x_NC, x_PC = (columns.to(device) for columns in (h_ND, x_NC, x_PC))
    sizes = h_ND.shape[1], public_PF.shape[1], x_PC.shape[1]
    networks = _InversionNetworks(attack, sizes=sizes, seed=seed, device=device)
    networks.train(h_ND, rows_PF, x_NC, x_PC, steps=view.iterations, seed=seed)
    distance = networks.measure_distance(h_ND, rows_PF, x_NC, x_PC)
    with torch.no_grad():
        decoded_NF: Tensor = networks.decoder(h_ND) * scale + centre_F
    return distance, decoded_NF.double().numpy(force=True)
