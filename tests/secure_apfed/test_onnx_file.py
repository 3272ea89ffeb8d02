"""The model as ONNX says what `predict` says, of every embedded data set and kind of column."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from secure_apfed.baselines import BaselineTask, convert_predictor, find_baseline
from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding, ImageEncoding, load_data
from secure_apfed.data.encoding import CategoricalColumn, NumericColumn
from secure_apfed.errors import ModelError
from secure_apfed.runs.active_model import ActiveModel, load_model
from secure_apfed.runs.onnx_file import write_onnx
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config

onnxruntime = pytest.importorskip("onnxruntime")

NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"network": "mlp", "hidden": [16], "representation": 8},
    "linear": {"network": "linear"},
    "random features": {"network": "random_features"},
}


def train_model(folder: Path, dataset: str, network: dict[str, Any], precision: str) -> Config:
    method = "votes" if network["network"] == "random_features" else "single_view"
    views = {"views": 2} if dataset == "digits" else {}
    epochs = 1 if method == "votes" else 3
    config = small_config(
        method,
        data={"dataset": dataset, "labelled": 30, **views},
        model=network,
        train={"epochs": epochs, "device": "cpu", "precision": precision},
        secure_sum={"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
    )
    run(config, folder)
    return config


def raw_of(model: ActiveModel, features_N: torch.Tensor) -> NDArray[np.float64]:
    """Values that are encoded to these features."""
    encoding = model.encoding
    if isinstance(encoding, ImageEncoding):
        whole = np.zeros((len(features_N), encoding.channels, encoding.height, encoding.width))
        strip = np.rint(features_N.numpy() * encoding.maximum)
        whole[:, :, encoding.first_row : encoding.end_row] = strip
        return whole
    assert isinstance(encoding, ColumnEncoding)
    columns = [one for one in encoding.columns if isinstance(one, NumericColumn)]
    scale = [one.scale for one in columns]
    mean = [one.mean for one in columns]
    return features_N.double().numpy() * scale + mean


def predict_by_graph(path: Path, model: ActiveModel, raw: Any) -> tuple[Any, Any]:
    session = onnxruntime.InferenceSession(str(path))
    if isinstance(model.encoding, ImageEncoding):
        given = {"images": raw.astype(np.float32)}
    else:
        assert isinstance(model.encoding, ColumnEncoding)
        given = {
            column.name: np.asarray(
                raw[:, [at]], dtype=object if isinstance(column, CategoricalColumn) else np.float64
            )
            for at, column in enumerate(model.encoding.columns)
        }
    label_N, probability_NK = session.run(["output_label", "output_probability"], given)
    return label_N, probability_NK


@pytest.mark.sampled(every=3)
@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize(
    ("dataset", "network"),
    [("digits", "mlp"), ("wine", "linear"), ("breast_cancer", "random features")],
)
def test_it_says_what_predict_says(tmp_path: Path, dataset: str, network: str) -> None:
    precision = "float64" if network == "linear" else "float32"
    config = train_model(tmp_path / "run", dataset, NETWORKS[network], precision)
    model = load_model(tmp_path / "run")
    write_onnx(model, tmp_path / "model.onnx")
    data = load_data(config.data, seed=config.seed)
    raw = raw_of(model, data.active.features)
    expected_NK = model.predict(model.encoding.encode(raw)).numpy()
    label_N, probability_NK = predict_by_graph(tmp_path / "model.onnx", model, raw)
    assert np.abs(probability_NK - expected_NK).max() < 1e-5
    assert list(label_N) == [model.classes[best] for best in probability_NK.argmax(1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["label_spreading", "extra_trees", "gradient_boosting", "mean"])
def test_a_fitted_local_model_says_the_same_in_the_graph(tmp_path: Path, name: str) -> None:
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 3, 120)
    rows = draw.normal(size=(120, 4)) + 2 * np.eye(3, 4)[truth]
    task = BaselineTask.from_arrays(rows, np.arange(30), truth[:30], classes=3)
    fitted = convert_predictor(find_baseline(name).fit(task))
    columns = tuple(NumericColumn(name=f"c{at}", mean=0.0, scale=1.0) for at in range(4))
    encoding = ColumnEncoding(columns=columns, missing="mean")
    model = ActiveModel(fitted.as_head(), ("a", "b", "c"), encoding, {})
    write_onnx(model, tmp_path / "model.onnx")
    expected_NK = model.predict(model.encoding.encode(rows)).numpy()
    _, probability_NK = predict_by_graph(tmp_path / "model.onnx", model, rows)
    np.testing.assert_allclose(probability_NK, expected_NK, atol=1e-5)


def make_mixed_model() -> ActiveModel:
    columns = (
        NumericColumn(name="age", mean=40.0, scale=12.5),
        CategoricalColumn(name="städt", categories=("Köln", "no")),
        CategoricalColumn(name="smoker", categories=("False", "True")),
        NumericColumn(name="debt", mean=1e6, scale=3.0),
        CategoricalColumn(name="way", categories=("by foot", "by ship")),
    )
    encoding = ColumnEncoding(columns=columns, missing="mean")
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(encoding.shape[0], 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    return ActiveModel(network, ("yes", "nø", "maybe"), encoding, {})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    write_onnx(make_mixed_model(), path)
    return path


def test_a_threshold_decides_in_the_graph(tmp_path: Path) -> None:
    # A trained network may tell many rows the same, and then a quantile is a draw.
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 2)).eval()
    model = ActiveModel(network, ("no", "yes"), ColumnEncoding.for_numeric_columns(["a", "b"]), {})
    features = torch.randn(200, 2)
    shares_NK = model.predict(features)
    first = float((shares_NK.argmax(1) == 0).double().mean())
    # A fifth of the rows is decided otherwise, whatever the network came to.
    level = first + (0.2 if first < 0.5 else -0.2)
    model = replace(model, threshold=float(shares_NK[:, 1].quantile(level)))
    write_onnx(model, tmp_path / "model.onnx")
    label_N, _ = predict_by_graph(tmp_path / "model.onnx", model, features.double().numpy())
    decided = [model.classes[at] for at in model.decide_classes(shares_NK).tolist()]
    likeliest = [model.classes[at] for at in shares_NK.argmax(1).tolist()]
    assert np.mean(label_N == np.array(decided)) > 0.99  # a row may lie on the threshold
    assert np.mean(label_N == np.array(likeliest)) < 0.95


@pytest.mark.parametrize("name", ["output_label", "network/classes", "encoding/0"])
def test_a_column_of_the_graph_s_own_names_is_refused(name: str, tmp_path: Path) -> None:
    model = replace(
        make_mixed_model(), encoding=ColumnEncoding(columns=(NumericColumn(name=name),))
    )
    with pytest.raises(ModelError, match="rename it"):
        write_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


_ALONE = """
import sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
given = {"age": [[30.0]], "debt": [[1e6]]}
given = {name: numpy.array(value) for name, value in given.items()}
for name, text in (("städt", "Köln"), ("smoker", "True"), ("way", "by foot")):
    given[name] = numpy.array([[text]])
label, probability = session.run(None, given)
assert not {"torch", "secure_apfed", "onnx"} & set(sys.modules)
print(label[0], abs(float(probability.sum()) - 1) < 1e-6)
"""


def test_it_predicts_where_nothing_of_ours_is_imported(written: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-I", "-X", "utf8", "-c", _ALONE, str(written)],
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.split()[1] == "True"
