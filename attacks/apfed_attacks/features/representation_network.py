"""GRN, generative regression: an active that knows a passive's encoder turns it around.

Run by: the active of TVFL, or whoever else receives a victim's representations h and knows the
network that made them. A generator G(x, noise), from the own features x, learns to make rows whose
representations are those received (Luo et al., 2021, Feature Inference Attack on Model Predictions
in Vertical Federated Learning, Section V). It needs no pair: some rows of the victim's features
give the mean and scale of what G makes, as that paper takes the features' ranges to be known.

Deviations from that paper: what is matched is h, not the prediction; rows are standardised.

Letters: N observed rows, B batch, D numbers of h, F the victim's features, C own columns.
"""

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from apfed_attacks.features.regression import FeatureAttack, Regression
from apfed_attacks.interface import FloatArray, Guess, Prediction
from apfed_attacks.view import AdversaryView, collect_releases
from secure_apfed.base.seeds import seed_draws

_DRAWS = 8  # of the noise, over which generated rows are averaged


class RepresentationNetwork(FeatureAttack):
    """A generator of the victim's features, trained through the victim's encoder, which is known.

    It reads the own features x and noise, or x and a release. Baselines: the mean of the shadow
    rows (rows whose features the adversary knows), and regression from x with these rows as pairs.
    The attack itself takes only mean and variance from them.

    Attributes:
        iterations: number of batches; the paper's 15 to 60 epochs are 350 to 1,400 of them on
            digits.
        rate: learning rate of Adam; the paper takes 1e-4 to 5e-3.
        noise: number of random numbers that the generator reads beside x.
        variance_weight: weight of the penalty on generated features that vary more than known ones.
    """

    name = "representation_network"
    roles = ("active",)
    white_box = True

    shadow_rows: int = Field(20, ge=2)
    iterations: int = Field(1_400, ge=1)
    rate: float = Field(3e-3, gt=0)
    batch: int = Field(64, ge=1)
    noise: int = Field(8, ge=0)
    hidden: int = Field(256, ge=1)
    variance_weight: float = Field(1.0, ge=0)

    def explain_missing_input(self, view: AdversaryView) -> str | None:
        """Return why there is nothing to invert; None: there is something.

        There are no releases, or the recording does not hold the victim's encoder.
        """
        reason = super().explain_missing_input(view)
        if reason is None and view.knowledge.encoder is None:
            victim = view.knowledge.victim
            return f"{view.name} is not told the encoder of {victim}: the recording holds none"
        return reason

    def run(self, view: AdversaryView, seed: int) -> Guess:
        """Train generators, and return the rows that they generate for each person.

        One generator reads noise, and one each kind of release.
        """
        releases = collect_releases(view, view.knowledge.victim)
        positions = self.choose_rows(view, releases["h"].positions, seed)
        x_NC = self.scale_own_columns(view, positions, seed)
        regress = Regression.from_view(view, positions, hidden=self.hidden, seed=seed)
        columns = {
            name: observed.select_positions(positions) for name, observed in releases.items()
        }
        generated = {
            "noise": self._generate_rows(
                view, x_NC, columns["h"], noise_count=self.noise, seed=seed
            )
        }
        for name, h_ND in columns.items():
            columns_NC = np.hstack([x_NC, self.scale_columns(h_ND, seed)])
            generated[name] = self._generate_rows(view, columns_NC, h_ND, noise_count=0, seed=seed)
        attacks = {
            f"G(x, {name})": Prediction(generated_NF[regress.is_guessed].numpy(force=True))
            for name, generated_NF in generated.items()
        }
        return regress.make_guess(attacks, {"x": x_NC})

    def _generate_rows(
        self,
        view: AdversaryView,
        columns_NC: FloatArray,
        h_ND: Tensor,
        *,
        noise_count: int,
        seed: int,
    ) -> Tensor:
        """Train a generator so that the victim's encoder maps its rows to h; return its rows (N,
        F).

        `columns_NC`: the C columns that it reads. `h_ND`: the releases. `noise_count`: number Z of
        random numbers that it reads besides.
        """
        own_NC = torch.from_numpy(columns_NC).float().to(view.device)
        with seed_draws(seed, "attacks", self.name):
            generator = _RowGenerator(
                view.knowledge.shadow.values.float(),
                column_count=own_NC.shape[1],
                noise_count=noise_count,
                hidden=self.hidden,
            ).to(view.device)
            self._train_generator(generator, view, own_NC, h_ND.float())
            draw_count = _DRAWS if noise_count else 1  # without noise all draws are equal
            with torch.no_grad():
                draws = torch.stack([generator(own_NC) for _ in range(draw_count)])
        return draws.mean(dim=0).flatten(1).double()

    def _train_generator(
        self, generator: "_RowGenerator", view: AdversaryView, own_NC: Tensor, h_ND: Tensor
    ) -> None:
        """Train the generator: the victim's encoder should map the row made from own_NC[i] to
        h_ND[i].

        Generated features that vary more than known ones are penalised.
        """
        encoder = view.knowledge.encoder
        assert encoder is not None
        # Errors are measured in units of the deviation of each component of h.
        deviation_D = h_ND.std(dim=0)
        weight_D = 1 / torch.where(deviation_D > 0, deviation_D, 1)
        adam = torch.optim.Adam(generator.parameters(), lr=self.rate)
        for _ in range(view.iterations):
            rows_B = torch.randint(len(h_ND), (self.batch,))
            generated_BF = generator(own_NC[rows_B])
            error_BD = (encoder(generated_BF).float() - h_ND[rows_B]) * weight_D
            excess_F = generator.compute_excess_variances(generated_BF)
            loss = error_BD.square().mean() + self.variance_weight * excess_F.mean()
            adam.zero_grad()
            loss.backward()
            adam.step()


class _RowGenerator(nn.Module):
    """The generator G, from C columns and fresh noise to the victim's features, in their units."""

    def __init__(
        self, known_SF: Tensor, *, column_count: int, noise_count: int, hidden: int
    ) -> None:
        """Draw the weights.

        `known_SF`: features of the S shadow rows, which give the features' mean and variance.
        `column_count`: C. `noise_count`: number Z of random numbers that it reads beside the
        columns. `hidden`: width of both hidden layers.
        """
        super().__init__()
        self.noise_count = noise_count
        self.mean_F = known_SF.mean(dim=0)
        # One scale for all features: single ones may be constant in a few rows.
        self.scale = float(known_SF.std()) or 1.0
        self.known_variance_F = known_SF.var(dim=0).flatten()
        self.layers = nn.Sequential(
            nn.Linear(column_count + noise_count, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, self.mean_F.numel()),
        )

    def forward(self, columns_BC: Tensor) -> Tensor:
        """Return one generated row (...) for each row of columns, (B, ...)."""
        noise_BZ = torch.randn(len(columns_BC), self.noise_count).to(columns_BC.device)
        standardised_BF = self.layers(torch.cat([columns_BC, noise_BZ], dim=1))
        rows: Tensor = standardised_BF.reshape(-1, *self.mean_F.shape) * self.scale + self.mean_F
        return rows

    def compute_excess_variances(self, generated_BF: Tensor) -> Tensor:
        """Return by how much each generated feature varies more than the known one, (F,), at least
        0.

        Variances are in units of the squared scale of all features.
        """
        variance_F = generated_BF.flatten(1).var(dim=0)
        return F.relu(variance_F - self.known_variance_F) / self.scale**2
