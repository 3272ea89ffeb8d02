"""What a user writes, with the types that a checker must find: `tests/test_types_of_users.py`."""

from collections.abc import Mapping
from typing import assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from secure_apfed import (
    Active,
    Config,
    Passive,
    PrivateRelease,
    TrainingResult,
    VerticalClassifier,
    align,
    load_model,
    open_link,
    run,
    secure_sum,
    train,
)
from secure_apfed.attacks import Recorder, evaluate
from secure_apfed.exchange import converse
from secure_apfed.psi import IntersectionName, count_common
from secure_apfed.sums import SumName, SumSession

Floats = NDArray[np.float64]
NAMES = ("bank", "shop")


def make_session(name: SumName = "masked") -> SumSession:
    session = secure_sum(name, NAMES, to="clinic", clip=10)
    assert_type(session, SumSession)
    return session


def add_arrays(array: Floats) -> Floats:
    total = make_session()(dict.fromkeys(NAMES, array))
    assert_type(total, Floats)
    return total


def add_tensors(tensor: Tensor) -> Tensor:
    total = make_session()({"bank": tensor, "shop": tensor})
    assert_type(total, Tensor)
    return total


def add_trees(tensor: Tensor) -> dict[str, Tensor]:
    total = make_session()({name: {"weight": tensor, "bias": tensor} for name in NAMES})
    assert_type(total, dict[str, Tensor])
    return total


def add_nested(tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
    total = make_session()({name: [(tensor, tensor)] for name in NAMES})
    assert_type(total, list[tuple[Tensor, Tensor]])
    return total


def add_numbers() -> list[int]:
    total = make_session()({"bank": [1, 2], "shop": [3, 4]})
    assert_type(total, list[int])
    return total


def add_by_roles(array: Floats) -> Floats:
    session = secure_sum("plain + pairwise masks", NAMES, to="clinic", clip=10, session="march")
    parts = {name: session.make_contributor(name) for name in NAMES}
    receiver = session.make_receiver()
    converse({**parts, "clinic": receiver})
    bodies = {name: part.contribute(array) for name, part in parts.items()}
    assert_type(bodies, dict[str, bytes])
    return array


def find_common(protocol: IntersectionName = "auto") -> int:
    rows = align({"bank": ["ann", "eve"], "shop": ["eve"]}, hub="bank", minimum_rows=1)
    assert_type(rows, Mapping[str, NDArray[np.int64]])
    ids = {"bank": ["ann", "eve"], "shop": ["eve", "ann"]}
    common = count_common(ids, hub="bank", protocol=protocol)
    assert_type(common, int)
    return common + len(rows["bank"])


def release_rows(representation: Tensor) -> Tensor:
    guard = PrivateRelease(clip=1.0, epsilon=8.0, delta=1e-5, epochs=1, rows=len(representation))
    noisy = guard(representation, rows=range(len(representation)))
    assert_type(noisy, Tensor)
    return noisy


def run_from_settings(settings: Mapping[str, object]) -> float:
    config = Config.model_validate(settings)
    result = run(config, None, transport="memory")
    accuracy = result.accuracy
    assert_type(accuracy, Mapping[str, float])
    return next(iter(accuracy.values()))


def train_networks(features: Tensor, labels: Tensor, ids: list[str]) -> TrainingResult:
    active = Active("clinic", ids, features, labels, encoder=torch.nn.Linear(2, 2))
    passives = [Passive("bank", ids, features, encoder=torch.nn.Linear(2, 2))]
    result = train(active, passives, secure_sum="masked", alignment="ecdh", optimizer="adam")
    assert_type(result, TrainingResult)
    return result


def predict_by_estimator(model: VerticalClassifier, features: Floats) -> Floats:
    probabilities = model.predict_proba(features)
    assert_type(probabilities, Floats)
    return probabilities


def attack_loop(features: Floats, labels: NDArray[np.int64]) -> object:
    record = Recorder()
    record.step(range(len(features)))
    return evaluate(**record.to_arrays(), labels=labels, own=features)


def align_over_link() -> bytes:
    with open_link("bank", "shop", dial="shop.example:7000") as link:
        received = link.receive(1.0)
    assert_type(received, bytes)
    return received


def load_stored(folder: str) -> str:
    return load_model(folder).task.name
