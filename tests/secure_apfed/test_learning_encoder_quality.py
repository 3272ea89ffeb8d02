"""Encoders judged by what a classifier reads out of their code (APC-VFL, Appendix F)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from secure_apfed.cli import execute
from secure_apfed.data import UNLABELLED
from secure_apfed.errors import DataError
from secure_apfed.learning.autoencoder import DistillationSettings
from secure_apfed.learning.compute import Compute
from secure_apfed.learning.encoder_quality import (
    EncoderQuality,
    cross_validated,
    encoder_quality,
)
from secure_apfed.settings.training import ModelSettings

CPU = Compute(torch.device("cpu"))
SETTINGS = DistillationSettings(epochs=40, batch_size=16, learning_rate=3e-3)


def rows(count: int = 160) -> tuple[Tensor, Tensor]:
    """Four independent columns, of which two tell the class."""
    torch.manual_seed(0)
    x_NF = torch.randn(count, 4)
    return x_NF, (x_NF[:, 0] + x_NF[:, 1] > 0).long()


def quality(representation: int, labels_N: Tensor | None = None) -> EncoderQuality:
    x_NF, known_N = rows()
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
    x_NF, labels_N = rows()
    found = cross_validated(x_NF, labels_N, folds=4, seed=7)["accuracy"]
    x, y = x_NF.double().numpy(), labels_N.numpy()
    expected = []
    for train, test in StratifiedKFold(4, shuffle=True, random_state=7).split(x, y):
        fitted = LogisticRegression(max_iter=5000).fit(x[train], y[train])
        expected.append((fitted.predict(x[test]) == y[test]).mean())
    assert found.tolist() == expected
    assert cross_validated(x_NF, labels_N, folds=4, seed=8)["accuracy"].tolist() != expected


def test_rows_without_a_label_train_the_encoder_and_score_nothing() -> None:
    x_NF, labels_N = rows()
    few_N = labels_N.clone()
    few_N[80:] = UNLABELLED
    found = quality(12, few_N)
    assert np.array_equal(
        found.columns, cross_validated(x_NF[:80], labels_N[:80], folds=5, seed=3)["accuracy"]
    )
    assert found.epochs == quality(12).epochs


def test_too_few_rows_of_a_class_are_named() -> None:
    x_NF, labels_N = rows(20)
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
