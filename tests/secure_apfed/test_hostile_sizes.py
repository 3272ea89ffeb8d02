"""Sizes that somebody else chose are refused by arithmetic, before memory is taken for them."""

import contextlib
import json
import subprocess
import sys

import pytest

from apfed_protocols.errors import ApfedError
from secure_apfed.config.file import load_config_text
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.models import NETWORKS, Projection
from secure_apfed.planning.forecast import forecast
from secure_apfed.settings.data import TableShape
from secure_apfed.settings.training import MOST_PARAMETERS, ModelSettings

RUN = (
    "{name: late, method: apfed_r, data: {dataset: tables, active: bank, parties: "
    "{bank: {}, shop: {}, clinic: {}}}, guard: {mechanism: none}, secure_sum: {scheme: plain, "
    "masks: pairwise}, train: {epochs: 2, batch_size: 32}}"
)
WIDE = 65_536
# What a proposal says, and a word of the sentence that refuses it.
REFUSED: dict[str, tuple[str, str]] = {
    "64 wide layers": (f"model.hidden={[WIDE] * 64}", "parameters, expected"),
    "a wide head": (f"model.head={[WIDE] * 64}", "parameters, expected"),
    "too many layers": (f"model.hidden={[1] * 65}", "at most 64 entries"),
    "a wider layer": (f"model.hidden=[{WIDE + 1}]", "<= 65536"),
    "a wide passive": (f"passives={{default: {{model: {{hidden: {[WIDE] * 9}}}}}}}", "parameters"),
    "long sequences": (f"model.sequences={[[WIDE, WIDE]] * 64}", "parameters, expected"),
    "many waves": (
        f"model={{network: cross_view, random_features: {WIDE}, representation: {WIDE}}}",
        "parameters, expected",
    ),
    "many clients": ("data={dataset: digits, partition: horizontal, clients: 1000000000}", "1024"),
    "many views": ("data={dataset: digits, views: 1000000000}", "1024"),
    "many joint layers": (f"method={{name: apc_vfl, joint: {[WIDE + 1]}}}", "<= 65536"),
    "a wide teacher": (
        f"method={{name: joint_teacher_sum, model: {{hidden: {[WIDE] * 9}}}}}", "parameters",
    ),
    "large blocks": ("method={name: vfedtrans, mask_rows: 1000000}", "<= 8192"),
    "many candidates": ("method={name: votes_encrypted, candidates: 1000000}", "<= 1024"),
    "many clusters": (
        "passives={default: {objective: {name: clustering, clusters: 1000000}}}", "<= 4096",
    ),
    "many restarts": ("rules.restarts=1000000", "<= 10000"),
    "many bits": ("secure_sum.bits=64", "<= 24"),
    "many IDs": ("alignment.maximum_ids=4294967296", "< 4.29497e+09"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_size_is_refused_where_settings_are_read(case: str) -> None:
    override, why = REFUSED[case]
    with pytest.raises(ConfigError) as raised:
        load_config_text(RUN, overrides=[override])
    assert why in str(raised.value)


@pytest.mark.parametrize("network", ["mlp", "selu", "enriched", "linear", "random_features"])
def test_no_encoder_is_built_for_columns_beyond_the_bound(network: str) -> None:
    settings = ModelSettings.model_validate(
        {"network": network, "hidden": (512,), "random_features": 512}
    )
    with pytest.raises(ModelError, match="parameters, expected"):
        NETWORKS[network].encoder((MOST_PARAMETERS // 16,), settings)


@pytest.mark.parametrize("network", ["mlp", "selu", "enriched", "linear", "identity"])
def test_no_head_or_decoder_is_built_beyond_the_bound(network: str) -> None:
    settings = ModelSettings.model_validate({"network": network, "hidden": (512,)})
    with pytest.raises(ModelError, match="parameters, expected"):
        NETWORKS[network].decoder((2**24,), (2**10,), settings)
    with pytest.raises(ModelError, match="parameters, expected"):
        NETWORKS[network].head(2**24, 2**16, settings)


def test_no_code_is_built_beyond_the_bound() -> None:
    with pytest.raises(ModelError, match="parameters, expected"):
        Projection(2**20, 2**10)


SHAPES: dict[str, dict[str, int]] = {
    "columns": {"rows": 1000, "features": 2**20},
    "rows": {"rows": 2**32, "features": 10},
    "both": {"rows": 2**32, "features": 2**20},
    "classes": {"rows": 3 * 10**7, "features": 10**4, "labelled": 1000, "classes": 2**16},
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("method", ["apfed_r", "votes", "split_nn"])
def test_a_declared_table_is_refused_before_it_is_made(method: str, case: str) -> None:
    config = load_config_text(RUN, overrides=[f"method={method}"])
    shapes = {"bank": TableShape(rows=100, features=2, labelled=50, classes=2)}
    shapes |= {
        "shop": TableShape.model_validate(SHAPES[case]),
        "clinic": TableShape(rows=100, features=2),
    }
    if case == "classes":
        shapes["bank"] = shapes.pop("shop")
    with pytest.raises(DataError, match=r"shop declared most|bank declared most"):
        forecast(config, dict(sorted(shapes.items())))


WALK = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))
from tests.secure_apfed.test_hostile_sizes import walk
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
walk(json.loads(sys.argv[1]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([before, after]))
"""
# Numbers without a bound of their own, and what may be large without taking memory.
LARGE = [
    "seed=99999999999999999999", "train.epochs=1000000000", "train.batch_size=1000000000",
    "rules.spare_answers=1000000000", "rules.minimum_batch=1000000000",
    "alignment.maximum_ids=4000000000", "train.schedule_steps=1000000000", "colluders=1000000000",
    f"model.hidden=[{WIDE}, 4000]", f"model.representation={WIDE}", f"model.projection={WIDE}",
    *(override for override, _ in REFUSED.values()),
]  # fmt: skip


def walk(overrides: list[str]) -> None:
    """Read each run, and refuse it or not; nothing but an error of ours may come of it."""
    for override in overrides:
        try:
            load_config_text(RUN, overrides=[override]).terms()
        except ApfedError:
            continue


def test_reading_hostile_sizes_takes_no_memory() -> None:
    call = [sys.executable, "-c", WALK, json.dumps(LARGE)]
    told = subprocess.run(call, capture_output=True, text=True, check=True)
    before, after = map(int, json.loads(told.stdout.splitlines()[-1]))
    assert after - before < 200 * 1024, "kB"


@pytest.mark.slow
@pytest.mark.parametrize("override", LARGE[:11])
def test_what_is_read_is_forecast_within_memory_or_refused(override: str) -> None:
    shapes = dict.fromkeys(("bank", "shop", "clinic"), TableShape())
    with contextlib.suppress(ApfedError):
        forecast(load_config_text(RUN, overrides=[override]), shapes)
