"""Every key that parties agree on says whom it protects; less is shown, and refused by limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.contract import Contract
from secure_apfed.errors import ConfigError
from secure_apfed.organisations.party import OwnLimits, list_protections
from secure_apfed.settings import FollowsFrom, ModelSettings, Protection, Settings, protects
from secure_apfed.settings.protection import find_weakened_settings, list_key_protections

SHOP = Path("shop/party.yaml")
MARKS = list_protections()
OF_CONTRACT = dict(list_key_protections(Contract))
PROTECTIVE = {path: mark for path, mark in MARKS.items() if isinstance(mark, Protection)}
FOLLOWING = {path: mark for path, mark in OF_CONTRACT.items() if isinstance(mark, FollowsFrom)}


@pytest.mark.parametrize("path", [*MARKS, *(f"contract: {path}" for path in OF_CONTRACT)])
def test_every_key_says_whom_it_protects(path: str) -> None:
    found = OF_CONTRACT if path.startswith("contract: ") else MARKS
    assert found[path.removeprefix("contract: ")] is not None, f"{path} says nothing"


@pytest.mark.parametrize("path", FOLLOWING)
def test_what_follows_names_settings_that_there_are(path: str) -> None:
    assert all(name in MARKS for name in FOLLOWING[path].settings if name != "*")


class Planted(Settings):
    quiet: int = 1


class Outer(Settings):
    inner: Planted = Planted()


def test_a_key_that_says_nothing_is_found_and_counts_as_less() -> None:
    assert dict(list_key_protections(Outer)) == {"inner.quiet": None}
    assert find_weakened_settings(Outer()) == ()
    (found,) = find_weakened_settings(Outer(inner=Planted(quiet=2)))
    assert (found.setting, found.whom) == ("inner.quiet", "not known")


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("secure_sum.scheme", SECURE_SUMS),
        ("model.network", get_args(get_args(ModelSettings.model_fields["network"].annotation)[0])),
    ],
    ids=["sums", "networks"],
)
def test_the_orders_of_sums_and_networks_are_whole(path: str, names: Any) -> None:
    assert sorted(name for group in PROTECTIVE[path].names_by_strength for name in group) == sorted(
        names
    )


def test_numbers_and_choices_are_compared() -> None:
    number = protects("everybody", lower="little", null=3.0)
    assert isinstance(number, Protection)
    assert number.is_weaker(2, 3)
    assert not number.is_weaker(None, 3)
    assert number.is_weaker(float("nan"), 3)
    choice = protects("everybody", other="little", order=(("a", "b"), "c"))
    assert isinstance(choice, Protection)
    assert not choice.is_weaker("a", "b")
    assert choice.is_weaker("c", "b")
    assert choice.is_weaker("unheard of", "c")


@dataclass(frozen=True)
class Case:
    """A weakened run.

    Attributes:
        said: what the run says beside what it needs, as overrides.
        limit: of a party, which the run goes below.
        shown: whether it is less than the default; else it is what there is by default.
        path: of the setting, where it is not the key itself.
        method: in YAML.
    """

    said: tuple[str, ...]
    limit: Any
    shown: bool = True
    path: str = ""
    method: str = "apfed_r"


NOISE = "secure_sum.noise"
LABELS = ("labels.mechanism=randomised_response",)
GAUSSIAN = ("guard.mechanism=gaussian",)
TEACHER = "{name: joint_teacher_sum, labels: head}"
TRANS = "vfedtrans"
WEAKENED: dict[str, Case] = {
    "alignment.dealer": Case(("alignment.dealer=true",), False),
    "alignment.maximum_ids": Case(("alignment.maximum_ids=4000000000",), 10_000_000),
    "alignment.minimum_rows": Case(("alignment.minimum_rows=1",), 2),
    "alignment.mode": Case(
        ("alignment.mode=pairwise", "secure_sum.allow_single_passive=true"), "all"
    ),
    "alignment.pairwise_overlaps": Case((), "hidden", shown=False),
    "alignment.protocol": Case((), "opprf", shown=False),
    "colluders": Case((), 1, shown=False),
    "data.labels_at": Case(("data.labels_at=[passive-1]",), 0, method="mmvfl"),
    "defences": Case((), 1, shown=False),
    "delta": Case(("delta=0.1",), 1e-5),
    "dp_sgd.clip": Case(("dp_sgd={epsilon: 8, clip: 9.0}", *GAUSSIAN, "guard.epsilon=8"), 1.0),
    "dp_sgd.epsilon": Case((), 8.0, shown=False),
    "dp_sgd.noise_multiplier": Case((), 1.0, shown=False),
    "guard.clip": Case((*GAUSSIAN, "guard.sigma=1", "guard.clip=9"), 1.0),
    "guard.epsilon": Case((*GAUSSIAN, "guard.epsilon=100"), 8.0, shown=False),
    "guard.mechanism": Case((), "gaussian"),
    "guard.noise": Case(("guard.noise=reproducible_insecure",), "secret"),
    "guard.sigma": Case((*GAUSSIAN, "guard.sigma=0.01"), 1.0, shown=False),
    "labels.epsilon": Case((*LABELS, "labels.epsilon=30"), 4.0, shown=False),
    "labels.mechanism": Case((), "lp_mst", shown=False),
    "method.candidates": Case((), 20, shown=False, method="votes_encrypted"),
    "method.epsilon": Case((), 8.0, shown=False, method="votes"),
    "method.form": Case((), "hard", shown=False, method="votes"),
    "method.mask_rows": Case(("method.mask_rows=8",), 1024, method=TRANS),
    "method.model.network": Case(("method.model.network=identity",), "linear", method=TEACHER),
    "method.model.projection": Case(("method.model.projection=none",), 64, method=TEACHER),
    "method.model.representation": Case(("method.model.representation=99",), 16, method=TEACHER),
    "method.own.network": Case(("method.own.network=enriched",), "selu", method="apc_vfl"),
    "method.own.projection": Case(("method.own.projection=65",), 64, method="apc_vfl"),
    "method.own.representation": Case(("method.own.representation=999",), 128, method="apc_vfl"),
    "method.passive.network": Case(("method.passive.network=linear",), "selu", method="apc_vfl"),
    "method.passive.projection": Case(("method.passive.projection=65",), 64, method="apc_vfl"),
    "method.passive.representation": Case(
        ("method.passive.representation=999",), 256, method="apc_vfl"
    ),
    "method.weights_epsilon": Case(
        (),
        4.0,
        shown=False,
        method="{name: votes, labeller: private_logistic, weights_epsilon: 9}",
    ),
    "model.network": Case(("model.network=identity",), "mlp"),
    "model.projection": Case(("model.projection=none",), 64),
    "model.representation": Case(("model.representation=33",), 32),
    "party_seeds": Case(("party_seeds=shared_for_comparison",), "secret"),
    "passives.*.allow_reading_all": Case(
        ("passives.default.allow_reading_all=true",),
        False,
        path="passives.default.allow_reading_all",
        method="apfed_code",
    ),
    "passives.*.model.network": Case(
        ("passives={default: {model: {network: linear}}}",),
        "mlp",
        path="passives.default.model.network",
    ),
    "passives.*.model.projection": Case(
        ("passives={default: {model: {projection: 65}}}",),
        64,
        path="passives.default.model.projection",
    ),
    "passives.*.model.representation": Case(
        ("passives={default: {model: {representation: 33}}}",),
        32,
        path="passives.default.model.representation",
    ),
    "passives.*.objective.row_wise": Case(
        ("passives={default: {objective: {name: own, row_wise: true}}}",),
        False,
        path="passives.default.objective.row_wise",
        method="apfed",
    ),
    "passives.*.weight": Case(
        ("passives={default: {weight: 1}, passive-1: {weight: 0}}",),
        True,
        path="passives.passive-1.weight",
    ),
    "rules.minimum_batch": Case((), 20, shown=False),
    "rules.minimum_spread": Case(("rules.minimum_spread=0",), 0.0005),
    "rules.refused_sums": Case(("rules.refused_sums=1",), 0),
    "rules.restarts": Case(("rules={silent_passive: wait, patience_s: 9, restarts: 1}",), 0),
    "rules.silent_passive": Case(
        (
            "rules.silent_passive=recover",
            "secure_sum={scheme: plain, masks: recoverable, threshold: 2}",
        ),
        "stop",
    ),
    "rules.spare_answers": Case(("rules.spare_answers=1000000",), 2),
    "secure_sum.allow_single_passive": Case(("secure_sum.allow_single_passive=true",), False),
    "secure_sum.bits": Case(("secure_sum.bits=24",), 16),
    "secure_sum.clip": Case(("secure_sum.clip=99",), 1.0),
    "secure_sum.noise.epsilon": Case((f"{NOISE}={{epsilon: 99}}",), 8.0, shown=False),
    "secure_sum.noise.sigma": Case((f"{NOISE}={{sigma: 0.1}}",), 1.0, shown=False),
    "secure_sum.scheme": Case(("secure_sum.scheme=plain",), "ckks"),
    "secure_sum.threshold": Case(
        ("secure_sum={scheme: plain, masks: recoverable, threshold: 2}",), 3
    ),
    "train.labels": Case((), "after", shown=False),
    "train.epochs": Case(("train.epochs=301",), 300),
}
BASE = "{{name: late, method: {method}, data: {data}, guard: {{mechanism: none}}, model: {model}}}"


def run_of(case: Case) -> Config:
    data = "{dataset: digits, views: 4}"
    model = "{network: enriched}" if case.method == TRANS else "{}"
    model = "{network: selu}" if case.method == "apc_vfl" else model
    model = "{network: cross_view}" if case.method == "apfed_code" else model
    model = "{network: identity}" if case.method == "mmvfl" else model
    text = BASE.format(method=case.method, data=data, model=model)
    return load_config_text(text, overrides=case.said)


@pytest.mark.parametrize("path", sorted({*PROTECTIVE, *WEAKENED}))
def test_a_weakened_setting_is_shown_and_refused_by_a_party(path: str) -> None:
    case = WEAKENED[path]
    mark = PROTECTIVE[path]
    config = run_of(case)
    shown = {each.setting: each for each in find_weakened_settings(config)}
    assert ((case.path or path) in shown) == case.shown, shown
    if case.shown:
        assert (shown[case.path or path].whom, shown[case.path or path].means) == (
            mark.protected_parties,
            mark.consequence,
        )
    side = "maxima" if mark.weaker_values == "higher" else "minima"
    told = rf"shop: {case.path or path} is .*, and {side}.*of shop/party.yaml asks for .*ask bank"
    limits = OwnLimits(**{side: {path: case.limit}})
    with pytest.raises(ConfigError, match=told.replace("*.", r"\*.", 1) if "*." in path else told):
        limits.require_protection(config, party="shop", path=SHOP, settings_owner="bank")


# By default they say no value, or have no default.
SAYS_NOTHING = (
    "rules.minimum_spread",
    "secure_sum.threshold",
    "secure_sum.bits",
    "guard.mechanism",
    "dp_sgd.clip",
    "passives.*.objective.row_wise",
)
USUAL = [
    path
    for path, case in WEAKENED.items()
    if case.shown and path not in SAYS_NOTHING and "passives.*.model" not in path
]


@pytest.mark.parametrize("path", USUAL)
def test_the_usual_value_is_within_a_limit_of_it(path: str) -> None:
    case = WEAKENED[path]
    mark = PROTECTIVE[path]
    side = "maxima" if mark.weaker_values == "higher" else "minima"
    config = run_of(Case((), case.limit, method=case.method))
    OwnLimits(**{side: {path: case.limit}}).require_protection(
        config, party="shop", path=SHOP, settings_owner="bank"
    )


WRONG_LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"minima": {"rules.minimum_row": 2}}, "no setting has that name; did you mean"),
    ({"minima": {"train.batch_size": 2}}, "this setting protects nobody; leave it out"),
    ({"minima": {"rules.spare_answers": 2}}, "more of it protects less; say it under maxima"),
    ({"maxima": {"alignment.minimum_rows": 2}}, "less of it protects less; say it under minima"),
    ({"maxima": {"party_seeds": "secret"}}, "say it under minima"),
    ({"minima": {"party_seeds": "sekret"}}, "expected one of secret, shared_for_comparison"),
    ({"minima": {"alignment.minimum_rows": "many"}}, "expected a number, got many"),
    ({"minima": {"alignment.minimum_rows": True}}, "expected a number, got true"),
    ({"maxima": {"secure_sum.noise.epsilon": 8}}, "is not set in this run"),
    ({"minima": {"method.candidates": 8}}, "is not set in this run"),
]


@pytest.mark.parametrize(("said", "why"), WRONG_LIMITS)
def test_limits_that_cannot_hold_are_told(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        OwnLimits(**said).require_protection(
            run_of(Case((), 0)), party="shop", path=SHOP, settings_owner="bank"
        )


def test_all_that_goes_below_is_told_at_once() -> None:
    limits = OwnLimits(minima={"alignment.minimum_rows": 20}, maxima={"secure_sum.bits": 8})
    with pytest.raises(ConfigError) as raised:
        limits.require_protection(
            run_of(Case((), 0)), party="shop", path=SHOP, settings_owner="bank"
        )
    assert str(raised.value).count("\n") == 1
