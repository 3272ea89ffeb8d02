"""What `plan` reads of measured sweeps: the shipped file, what fits, and damage."""

import json
from typing import Any

import pytest

from secure_apfed.errors import DataError
from secure_apfed.planning.stored import load_sweeps, nearest, sentence


def point(epsilon: float | str, guard: str = "gaussian", **changes: Any) -> dict[str, Any]:
    span = {"mean": 0.5, "low": 0.4, "high": 0.6}
    return {
        "label": "made up", "method": "apfed_c", "guard": guard, "labels": "none",
        "epsilon": epsilon, "releases": 3, "accuracy": span, "loss": span, **changes,
    }  # fmt: skip


def text_of(*points: dict[str, Any], **changes: Any) -> str:
    alone = point("inf", "none", method="single_view", releases=0)
    sweep = {
        "dataset": "digits",
        "settings": {"train": {"epochs": 3}, "data": {"limit": 1000, "labelled": 50}},
        "delta": 1e-5, "clip": 1.0, "seeds": [0, 1], "points": [alone, *points], **changes,
    }  # fmt: skip
    return json.dumps({"format": 1, "command": "none", "sweeps": [sweep]})


def test_the_shipped_sweeps_are_of_few_labels_and_five_seeds() -> None:
    sweeps = load_sweeps()
    assert {sweep.dataset for sweep in sweeps} == {"digits", "breast_cancer"}
    for sweep in sweeps:
        assert sweep.settings["data"]["labelled"] in (20, 50)
        assert sweep.seeds == (0, 1, 2, 3, 4)
        for guard in ("gaussian", "frozen_gaussian"):
            found = nearest(sweeps, epsilon=4.0, dataset=sweep.dataset, guards=(guard,))
            assert [one.epsilon for _, one in found] == [4.0]
        assert 0.3 < sweep.alone.mean < 1


def test_the_same_epsilon_is_taken_alone_and_others_from_both_sides() -> None:
    sweeps = load_sweeps(text_of(point(1.0), point(4.0), point(8.0)))

    def epsilons(epsilon: float) -> list[float | str]:
        found = nearest(sweeps, epsilon=epsilon, guards=("gaussian",))
        return [one.epsilon for _, one in found]

    assert epsilons(4.0) == [4.0]
    assert epsilons(5.0) == [4.0, 8.0]
    assert epsilons(0.5) == epsilons(9.0) == epsilons(float("inf")) == []


def test_what_does_not_fit_is_not_told() -> None:
    sweeps = load_sweeps(text_of(point(4.0), point(4.0, "none", labels="lp_mst")))
    assert nearest(sweeps, epsilon=4.0, guards=("gaussian",), dataset="mnist") == []
    assert nearest(sweeps, epsilon=4.0, guards=("gaussian",), method="tvfl") == []
    assert nearest(sweeps, epsilon=4.0, guards=("frozen_gaussian",)) == []
    assert nearest(sweeps, epsilon=4.0, labels="randomised_response") == []
    assert len(nearest(sweeps, epsilon=4.0, labels="lp_mst")) == 1


def test_a_sentence_names_data_seeds_epochs_and_the_active_alone() -> None:
    ((sweep, one),) = nearest(load_sweeps(text_of(point(4.0))), epsilon=4, guards=("gaussian",))
    assert sentence(sweep, one) == (
        "made up on digits at epsilon_x 4 (delta 1e-05, T 3) lost 50.0 points of accuracy "
        "[40.0, 60.0] and reached 50.0 %, where the active alone reached 50.0 % (2 seeds, 3 "
        "epochs, 1,000 training rows, 50 of them with a label)"
    )
    nothing = point(4.0, loss={"mean": -1e-4, "low": -0.01, "high": 1e-4})
    ((sweep, one),) = nearest(load_sweeps(text_of(nothing)), epsilon=4, guards=("gaussian",))
    assert "lost 0.0 points of accuracy [-1.0, 0.0]" in sentence(sweep, one)
    labels = load_sweeps(text_of(point(4.0, "none", labels="lp_mst")))
    ((sweep, one),) = nearest(labels, epsilon=4, labels="lp_mst")
    assert "at epsilon_y 4 lost" in sentence(sweep, one)


def test_damage_is_an_error_for_people() -> None:
    for text in (
        "", "{", "[]", "{}", '{"format": 2, "sweeps": []}', '{"format": 1}',
        text_of(point(4.0, more=1)), text_of(point(4.0), seeds=None), text_of(points=[]),
        text_of(point(4.0, accuracy={"mean": 1})),
    ):  # fmt: skip
        with pytest.raises(DataError, match="stored sweeps"):
            load_sweeps(text)
