"""Autoencoders that end early, codes drawn to others, and encoders judged by a classifier."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

from secure_apfed.cli import execute
from secure_apfed.data import UNLABELLED
from secure_apfed.errors import DataError, ModelError
from secure_apfed.learning.autoencoder import (
    Autoencoder,
    DistillationSettings,
    EncoderQuality,
    Resembled,
    cross_validated,
    encoder_quality,
    fit_autoencoder,
)
from secure_apfed.learning.descent import ActiveNetworks, Compute
from secure_apfed.methods.distilled import fit_classifier
from secure_apfed.models import family_for
from secure_apfed.settings.training import ModelSettings

SETTINGS = DistillationSettings(epochs=40, batch_size=16, learning_rate=3e-3)
MODEL = ModelSettings(network="selu", hidden=(16,), representation=8)


def network(features: int = 6, seed: int = 0) -> Autoencoder:
    torch.manual_seed(seed)
    family = family_for(MODEL, (features,))
    return Autoencoder(family.encoder((features,), MODEL), family.decoder((8,), (features,), MODEL))


def rows(count: int = 80, features: int = 6) -> Tensor:
    torch.manual_seed(5)
    hidden = torch.randn(count, 2)
    return hidden @ torch.randn(2, features) + 0.05 * torch.randn(count, features)


def error(fitted: Autoencoder, x_NF: Tensor) -> float:
    with torch.no_grad():
        return float((fitted.decoder(fitted.codes(x_NF)) - x_NF).square().mean())


def test_it_learns_to_rebuild_its_rows_and_repeats_with_its_seed() -> None:
    x_NF = rows()
    before, fitted, again = network(), network(), network()
    epochs = fit_autoencoder(fitted, x_NF, SETTINGS, owner="ann", seed=1)
    assert fit_autoencoder(again, x_NF, SETTINGS, owner="ann", seed=1) == epochs
    assert error(fitted, x_NF) < 0.1 * error(before, x_NF)
    assert torch.equal(fitted.codes(x_NF), again.codes(x_NF))
    other = network()
    fit_autoencoder(other, x_NF, SETTINGS, owner="bob", seed=1)
    assert not torch.equal(fitted.codes(x_NF), other.codes(x_NF))
    assert not any(one.requires_grad for one in fitted.parameters())


def test_it_ends_once_held_out_rows_gain_nothing_and_takes_the_best_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DistillationSettings, "patience", 5)
    x_NF = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    settings = SETTINGS.model_copy(update={"epochs": 500, "learning_rate": 0.05})
    fitted = network()
    epochs = fit_autoencoder(fitted, x_NF, settings, owner="ann", seed=0)
    assert 5 < epochs < 500
    shorter = network()
    monkeypatch.setattr(DistillationSettings, "patience", 500)
    until_best = settings.model_copy(update={"epochs": epochs - 5})
    fit_autoencoder(shorter, x_NF, until_best, owner="ann", seed=0)
    assert torch.equal(fitted.codes(x_NF), shorter.codes(x_NF))


@pytest.mark.parametrize("loss", ["mse", "mae"])
def test_codes_of_some_rows_are_drawn_to_others(loss: str) -> None:
    x_NF, told = rows(), torch.arange(0, 80, 2)
    wanted = torch.tanh(x_NF[told] @ torch.randn(6, 8, generator=torch.Generator().manual_seed(3)))
    apart = []
    for weight in (0.0, 5.0):
        settings = SETTINGS.model_copy(update={"weight": weight, "loss": loss})
        fitted = network()
        fit_autoencoder(
            fitted, x_NF, settings, owner="ann", seed=0,
            resembled=Resembled(rows=told, codes=wanted),
        )  # fmt: skip
        apart.append(float((fitted.codes(x_NF[told]) - wanted).square().mean()))
    assert apart[1] < 0.2 * apart[0]


def test_a_weight_of_nothing_is_no_distillation() -> None:
    """The paper's Ablation."""
    x_NF, told = rows(), torch.arange(40)
    settings = SETTINGS.model_copy(update={"weight": 0.0})
    alone, beside = network(), network()
    fit_autoencoder(alone, x_NF, settings, owner="ann", seed=0)
    fit_autoencoder(
        beside, x_NF, settings, owner="ann", seed=0,
        resembled=Resembled(rows=told, codes=torch.randn(40, 8)),
    )  # fmt: skip
    assert torch.equal(alone.codes(x_NF), beside.codes(x_NF))


def test_what_cannot_be_fitted_is_named() -> None:
    with pytest.raises(ModelError, match="ann: an autoencoder takes two rows"):
        fit_autoencoder(network(), rows(1), SETTINGS, owner="ann", seed=0)
    endless = SETTINGS.model_copy(update={"learning_rate": 1e30})
    with pytest.raises(ModelError, match="ann: training of an autoencoder diverged"):
        fit_autoencoder(network(), rows(), endless, owner="ann", seed=0)


def test_the_classifier_is_that_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    codes_nD = torch.randn(90, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
    labels_n = (codes_nD[:, 0] > 1).long() + (codes_nD[:, 1] > 2).long()
    networks = ActiveNetworks(nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(5, 4))).double()
    fit_classifier(networks, codes_nD, labels_n)
    scaled = StandardScaler().fit_transform(codes_nD.double().numpy())
    theirs = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(scaled, labels_n.numpy())
    ours_nK = networks.head(codes_nD.double()).softmax(1).detach().numpy()
    assert (
        abs(ours_nK[:, :3] - theirs.predict_proba(scaled)).max() < 0.05
    )  # theirs leaves the constant free
    assert ours_nK[:, 3].max() < 0.1  # a class without a label


CPU = Compute(torch.device("cpu"))


def told_rows(count: int = 160) -> tuple[Tensor, Tensor]:
    """Four independent columns, of which two tell the class."""
    torch.manual_seed(0)
    x_NF = torch.randn(count, 4)
    return x_NF, (x_NF[:, 0] + x_NF[:, 1] > 0).long()


def quality(representation: int, labels_N: Tensor | None = None) -> EncoderQuality:
    x_NF, known_N = told_rows()
    model = ModelSettings(network="selu", hidden=(), representation=representation)
    return encoder_quality(
        x_NF, known_N if labels_N is None else labels_N, model=model, settings=SETTINGS,
        owner="ann", seed=3, compute=CPU, threshold=0.05, folds=5,
    )  # fmt: skip


def test_a_code_that_has_no_room_is_not_good_enough() -> None:
    wide, narrow = quality(12), quality(1)
    assert wide.good_enough
    assert not narrow.good_enough
    assert narrow.difference < -0.1
    assert np.array_equal(wide.columns, narrow.columns)
    assert wide.columns.shape == wide.codes.shape == (5,)


def test_the_threshold_is_of_the_difference_of_the_means() -> None:
    columns = np.array([0.9, 0.7])
    worse = EncoderQuality(columns, np.array([0.8, 0.75]), 0.03, epochs=1)
    assert worse.difference == pytest.approx(-0.025)
    assert worse.good_enough
    assert not EncoderQuality(columns, np.array([0.8, 0.74]), 0.03, epochs=1).good_enough
    assert EncoderQuality(columns, np.array([1.0, 1.0]), 0.03, epochs=1).good_enough


def test_folds_are_those_of_the_seed() -> None:
    x_NF, labels_N = told_rows()
    found = cross_validated(x_NF, labels_N, folds=4, seed=7)["accuracy"]
    x, y = x_NF.double().numpy(), labels_N.numpy()
    expected = []
    for train, test in StratifiedKFold(4, shuffle=True, random_state=7).split(x, y):
        fitted = LogisticRegression(max_iter=5000).fit(x[train], y[train])
        expected.append((fitted.predict(x[test]) == y[test]).mean())
    assert found.tolist() == expected
    assert cross_validated(x_NF, labels_N, folds=4, seed=8)["accuracy"].tolist() != expected


def test_rows_without_a_label_train_the_encoder_and_score_nothing() -> None:
    x_NF, labels_N = told_rows()
    few_N = labels_N.clone()
    few_N[80:] = UNLABELLED
    found = quality(12, few_N)
    assert np.array_equal(
        found.columns, cross_validated(x_NF[:80], labels_N[:80], folds=5, seed=3)["accuracy"]
    )
    assert found.epochs == quality(12).epochs


def test_too_few_rows_of_a_class_are_named() -> None:
    x_NF, labels_N = told_rows(20)
    with pytest.raises(DataError, match="30 folds need 30 rows of every class"):
        cross_validated(x_NF, labels_N, folds=30, seed=0)


def test_the_command_judges_the_actives_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: first\ndata: {dataset: wine}\nguard: {mechanism: none}\n"
        "model: {network: selu, hidden: [], representation: 1}\n"
        "method: {name: apc_vfl, epochs: 20, batch_size: 16}\n"
    )
    assert execute(["check-encoder", str(path), "--folds", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["good_enough"] is False
    assert len(told["columns"]) == len(told["code"]) == 5
    assert execute(["check-encoder", str(path), "--threshold", "1", "--json", "--folds", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["good_enough"] is True
    assert execute(["check-encoder", str(path), "--folds", "60"]) == 3
    private = "labels={mechanism: randomised_response, epsilon: 1}"
    assert execute(["check-encoder", str(path), "--set", private]) == 2
    assert "true training labels" in " ".join(capsys.readouterr().err.replace("│", "").split())
