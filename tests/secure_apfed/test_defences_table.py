"""Every defence of the table: refused where it does nothing, trains and resumes where it acts."""

import importlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.defences import (
    DEFENCES,
    Surroundings,
    gradient_defences,
    label_defence,
    representation_chain,
    statements,
    who_applies,
)
from secure_apfed.defences.interface import GradientDefence, LabelDefence
from secure_apfed.defences.interface import RepresentationDefence as Layer
from secure_apfed.errors import ConfigError, ModelError
from secure_apfed.exchange import Kind, TensorSpec, unpack
from secure_apfed.methods import METHODS
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.runs.run import run
from secure_apfed.settings.privacy import DefenceSettings
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

INTERFACES = {
    "representations": Layer, "labels": LabelDefence,
    "contributions": GradientDefence, "returned gradients": GradientDefence,
}  # fmt: skip


def applies(name: str, method: str) -> bool:
    return bool(who_applies(name, METHODS[method].declared))


APPLIES = [
    (name, method) for name in DEFENCES for method in ("apfed_c", "tvfl") if applies(name, method)
]


def strong(name: str) -> dict[str, Any]:
    """Enough to be seen, and no more steps than that takes."""
    more: dict[str, dict[str, Any]] = {
        "nopeek": {"weight": 5.0},
        "mid": {"weight": 0.5},
        "confusional_labels": {"steps": 300},
    }
    return {"kind": name, **more.get(name, {})}


def config_of(method: str, *defences: dict[str, Any], **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "train": {"epochs": 2, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"},
        "guard": {"mechanism": "none", "noise": "reproducible_insecure"},
        "defences": list(defences),
    }
    return small_config(method, **{**usual, **changes})


def around(**changes: Any) -> Surroundings:
    usual: dict[str, Any] = {
        "party": "p", "seed": 0, "noise": NoiseSource(b"k" * 32), "classes": 2, "size": 4,
    }  # fmt: skip
    return Surroundings(**{**usual, **changes})


def released(method: str, *defences: dict[str, Any]) -> torch.Tensor:
    """The representations of the last epoch, which all training before it shaped.

    Row positions are left out: the order of the alignment is never the same.
    """
    kept = run(config_of(method, *defences), None).recording.transcript.kept[1]
    expected = {
        "rows": TensorSpec(torch.int64, (None,)),
        "z": TensorSpec(torch.float32, (None, 4)),
    }
    return torch.cat(
        [
            unpack(one.payload, expected, sender=one.sender)[0]["z"]
            for one in kept
            if one.kind is Kind.REPRESENTATIONS
        ]
    )


def test_table_settings_and_guide_name_the_same_defences() -> None:
    text = Path("docs/extend.md").read_text(encoding="utf-8")
    for name, defence in DEFENCES.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"| {', '.join(defence.protects)} |" in row
        for told, method in zip(
            row.rstrip(" |").split(" | ")[-2:], ("apfed_c", "tvfl"), strict=True
        ):
            run_by = who_applies(name, METHODS[method].declared).removeprefix("the ")
            assert told == run_by or (told.startswith("refused") and not run_by)
    kinds = [cls.model_fields["kind"].default for cls in get_args(get_args(DefenceSettings)[0])]
    assert kinds == list(DEFENCES)


@cache
def bare(method: str) -> torch.Tensor:
    return released(method)


@pytest.mark.parametrize("name", DEFENCES)
def test_every_defence_says_where_it_acts_and_what_it_gives(name: str) -> None:
    defence = DEFENCES[name]
    assert defence.protects
    assert all(INTERFACES[released] in defence.__mro__ for released in defence.protects)
    assert any(applies(name, method) for method in METHODS)
    assert defence.gives
    told = " ".join((importlib.import_module(defence.__module__).__doc__ or "").split())
    assert "no guarantee" in told or "no epsilon" in told


@pytest.mark.parametrize("method", METHODS)
def test_a_defence_that_does_nothing_is_refused_with_the_reason(method: str) -> None:
    text = dump_settings(config_of(method))
    for name in DEFENCES:
        if not applies(name, method):
            with_it = text.replace("defences: []", f"defences: [{{kind: {name}}}]")
            with pytest.raises(ConfigError, match=f"{name} does not apply to method {method}: no "):
                load_config_text(with_it)


def test_wrong_settings_are_refused_with_the_nearest_key() -> None:
    text = dump_settings(config_of("tvfl"))
    for given, said in (
        ("{kind: nopek}", "did you mean 'nopeek'"),
        ("{kind: nopeek, wieght: 1.0}", "did you mean 'weight'"),
        ("{kind: compression, keep: 0}", "number > 0"),
        ("{kind: compression, keep: 1.5}", "number <= 1"),
        ("{kind: marvell, strength: .nan}", "strength"),
        ("{kind: mid, weight: -1.0}", "number >= 0"),
        ("{kind: nopeek}, {kind: nopeek}", "given 2 times"),
        ("{weight: 1.0}", "kind"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config_text(text.replace("defences: []", f"defences: [{given}]"))


def test_marvell_refuses_more_than_two_classes_before_training() -> None:
    config = config_of("tvfl", {"kind": "marvell"}, data={"dataset": "digits"})
    with pytest.raises(ConfigError, match="binary labels, the data have 10 classes"):
        run(config, None)


def test_mid_refuses_rows_that_are_too_wide() -> None:
    (settings,) = config_of("apfed_c", {"kind": "mid"}).defences
    with pytest.raises(ModelError, match="at most 1024 numbers, got 2048"):
        representation_chain([settings], around(size=2048))


def test_what_couples_rows_does_not_go_with_private_training() -> None:
    with pytest.raises(ValidationError, match="cannot be clipped by example"):
        config_of("apfed_c", {"kind": "nopeek"}, dp_sgd={"clip": 1.0, "noise_multiplier": 1.0})


def test_an_empty_list_does_nothing() -> None:
    assert representation_chain([], around()) is None
    assert gradient_defences([], around(), "contributions") == ()
    assert label_defence([], around()) is None


@pytest.mark.parametrize("method", ["apfed_c", "tvfl"])
def test_weight_zero_sends_the_same_representations(method: str) -> None:
    assert torch.equal(bare(method), released(method, {"kind": "nopeek", "weight": 0.0}))


@pytest.mark.parametrize(("name", "method"), APPLIES)
@pytest.mark.sampled(every=3)
def test_training_runs_and_resumes_bit_for_bit(name: str, method: str, tmp_path: Path) -> None:
    config = config_of(method, strong(name))
    whole = run(config, tmp_path / "whole")
    assert all(not math.isnan(value) for value in whole.accuracy.values())

    def stop(progress: Any) -> None:
        if progress.step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "part", on_progress=stop)
    resumed = run(config, tmp_path / "part", resume=True)
    assert resumed.accuracy == whole.accuracy
    if method != "tvfl":
        models = [load_file(tmp_path / part / "model.safetensors") for part in ("whole", "part")]
        for key, value in models[0].items():
            assert torch.equal(value, models[1][key]), key


@pytest.mark.parametrize(("name", "method"), APPLIES)
def test_a_defence_changes_what_is_sent(name: str, method: str) -> None:
    """None is accepted and then forgotten."""
    assert not torch.equal(bare(method), released(method, strong(name)))


def test_a_result_tells_who_ran_a_defence_and_that_it_guarantees_nothing(tmp_path: Path) -> None:
    defences = [{"kind": "nopeek"}, {"kind": "compression"}]
    for method, told in (
        ("apfed_c", "nopeek by the active, compression by every passive"),
        ("tvfl", "nopeek by every passive, compression by the active"),
    ):
        run(config_of(method, *defences), tmp_path / method)
        result = json.loads((tmp_path / method / "result.json").read_bytes())
        assert f"defences without a guarantee: {told}" in result["guarantee"]
    assert statements([], METHODS["tvfl"].declared) == []
