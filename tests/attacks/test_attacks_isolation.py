from collections.abc import Collection
from typing import Any

import pytest
from torch import Tensor

from apfed_attacks.features.isolation import Isolation
from apfed_attacks.live.runs import ALL_RULES, LiveRun, Rule, play
from apfed_attacks.recorded import reveal_features
from apfed_attacks.view import Knowledge
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.errors import ConfigError
from tests.attacks.recordings import live_config
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
UNPROTECTED: frozenset[Rule] = frozenset()


class _Remembering(LiveRun):
    truth: Tensor | None = None

    def ask(self, *args: Any, **options: Any) -> Tensor:
        found = super().ask(*args, **options)
        if self.truth is None:
            self.truth = self.contributed("passive-1").double()
        return found


def _error(
    rules: Collection[Rule], *, sums: Any = None, method: str = "apfed_c", **way: Any
) -> float:
    """Relative error of what was isolated from the victim's real contribution."""
    config = live_config(method, secure_sum=sums or {})
    run = _Remembering(config, rules=rules)
    run.train(1)
    shadow = reveal_features(run.recording, "passive-1", 30, 0)
    knowledge = Knowledge(classes=10, victim="passive-1", shadow=shadow)
    found = Isolation(**way).play(run, knowledge, 0)["isolated"]
    assert run.truth is not None
    return float((found - run.truth).norm() / run.truth.norm())


@pytest.mark.planted("isolation")
@pytest.mark.parametrize(
    ("way", "error"), [("weight", 1e-6), ("unequal", 1e-5), ("subset", 0.3), ("collusion", 1e-6)]
)
def test_without_rules_a_passive_is_isolated(way: str, error: float) -> None:
    assert _error(UNPROTECTED, way=way) < error


@pytest.mark.refused("isolation")
@pytest.mark.parametrize("protocol", ["plain", "ckks", "plain + pairwise masks"])
@pytest.mark.parametrize(
    ("way", "refusal"), [("unequal", "norm is not within"), ("subset", "nothing came")]
)
def test_the_protocol_refuses(protocol: str, way: str, refusal: str) -> None:
    with pytest.raises(RemoteProtocolError, match=refusal):
        _error(ALL_RULES, sums={**pair_of(protocol), "clip": 1.0}, way=way)


def test_a_weight_that_the_active_asks_for_changes_nothing() -> None:
    assert _error(ALL_RULES, way="weight") > 0.9


def test_norms_alone_do_not_help_where_their_bound_is_wide() -> None:
    assert _error({Rule.NORMS}, way="unequal", far=9e3) < 1e-2


@pytest.mark.parametrize(
    "protocol", ["plain", "ckks", "plain + pairwise masks", "bfv + pairwise masks"]
)
def test_answers_to_unequal_representations_do_not_add_up(protocol: str) -> None:
    with pytest.raises(
        RemoteProtocolError, match=r"answered another message|lies beyond the range"
    ):
        _error({Rule.BINDING}, sums={**pair_of(protocol), "clip": 1.0}, way="unequal")


def test_collusion_of_all_others_is_conceded_and_of_fewer_is_not_enough() -> None:
    sums = {"scheme": "plain", "masks": "pairwise", "clip": 1.0}
    assert _error(ALL_RULES, sums=sums, way="collusion") < 1e-2
    assert _error(ALL_RULES, sums=sums, way="collusion", colluding=1) > 0.5


def test_a_refusal_is_a_result_with_its_reason() -> None:
    (result,) = play(Isolation(way="unequal"), live_config("apfed_c"), victims=["passive-2"])
    assert not result.applicable
    assert result.reason is not None
    assert result.reason.startswith("the protocol refused: active sent representations whose norm")


def test_what_was_isolated_is_read_like_a_gradient() -> None:
    (result,) = play(
        Isolation(way="collusion", shadow_rows=40), live_config("apfed_r"), victims=["passive-1"]
    )
    assert result.advantage is not None
    assert result.advantage > 0.1


def test_a_single_passive_needs_no_isolation() -> None:
    config = live_config("apfed_c", views=2)
    (result,) = play(Isolation(way="weight"), config)
    assert result.reason is not None
    assert result.reason.startswith("with one passive the sum is its gradient")


def test_secure_sums_offer_no_sum_over_fewer() -> None:
    with pytest.raises(LocalProtocolError, match="only a plain sum"):
        _error(
            UNPROTECTED, sums={"scheme": "plain", "masks": "pairwise", "clip": 1.0}, way="subset"
        )


def test_no_contract_gives_weight_to_one_passive_alone() -> None:
    alone = {"passive-1": {}, "default": {"weight": 0.0}}
    config = live_config("apfed_c", passives=alone, secure_sum={"allow_single_passive": False})
    with pytest.raises(ConfigError, match="one passive alone adds hides nothing"):
        LiveRun(config)
    all_zero = live_config(
        "apfed_c", passives={"default": {"weight": 0.0}}, secure_sum={"allow_single_passive": False}
    )
    assert len(LiveRun(all_zero).passives) == 3
