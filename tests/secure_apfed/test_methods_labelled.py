"""Few labels: what a label that is hidden says reaches nothing that trains."""

from dataclasses import replace

import pytest
import torch

from secure_apfed.config import Config
from secure_apfed.data import UNLABELLED, VerticalData, load_data
from secure_apfed.methods import METHODS
from secure_apfed.runs.run import run
from secure_apfed.tasks import Classification
from tests.secure_apfed.small_runs import small_config


def few_labels(method: str) -> Config:
    config = small_config(method)
    data = config.data.model_copy(update={"labelled": 20})
    return config.model_copy(update={"data": data, "party_seeds": "shared_for_comparison"})


def with_other_hidden_labels(data: VerticalData) -> VerticalData:
    labels = data.active.labels
    assert labels is not None
    hidden = data.train_rows[~torch.isin(data.train_rows, data.labelled_rows)]
    other = labels.clone()
    other[hidden] = len(data.classes) - 1 - labels[hidden]
    return replace(data, table=replace(data.active, labels=other))


@pytest.mark.parametrize("method", METHODS)
def test_no_hidden_label_reaches_training(method: str) -> None:
    config = few_labels(method)
    data = load_data(config.data, seed=config.seed)
    found = [run(config, None, data=one) for one in (data, with_other_hidden_labels(data))]
    assert found[0].accuracy == found[1].accuracy
    assert found[0].wire_bytes > 0 or not config.method.has_passives


def test_a_loss_counts_labelled_rows_alone() -> None:
    scores = torch.randn(4, 3, requires_grad=True)
    labels = torch.tensor([0, UNLABELLED, 2, UNLABELLED])
    loss = Classification().loss
    known = loss(scores[[0, 2]], labels[[0, 2]], scores)
    assert torch.allclose(loss(scores, labels, scores), known)
    nothing = loss(scores, torch.full((4,), UNLABELLED), scores)
    nothing.backward()
    assert nothing.item() == 0.0
    assert scores.grad is not None
    assert not scores.grad.any()
