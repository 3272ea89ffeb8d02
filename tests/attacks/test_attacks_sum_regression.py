"""Features out of sums that hold something of each row: representations, or pseudo-labels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_attacks.run import mount
from secure_apfed.config import AttackChoice
from secure_apfed.runs.outcome import Recording
from secure_apfed.runs.run import run
from tests.attacks.requested import ask
from tests.attacks.test_attacks_null import why_not_zero
from tests.secure_apfed.small_runs import small_config

SPLIT = "split_nn_sum"


def attack(recording: Recording, seed: int = 0, **options: Any) -> Any:
    choice = AttackChoice(name="sum_regression", options={"iterations": 20, **options})
    return mount(recording, [choice], seed=seed)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(recording: Recording) -> Tensor:
    """All passives' features side by side, by position."""
    tables = recording.data.passives
    return torch.hstack([one.features[recording.alignment[one.name]] for one in tables]).double()


@pytest.mark.planted("sum_regression")
def test_a_sum_of_linear_representations_gives_every_passive_away(make_recording: Any) -> None:
    empty = make_recording("nothing", epochs=0)
    opened = whole(empty) @ drawn(6, 8, seed=0)
    for result in attack(ask(empty, SPLIT, opened=[opened]), shadow_rows=40):
        assert result.score["r2"] > 0.999
        assert result.advantage > 0.2


def test_rounds_of_few_columns_add_up_beneath_the_pseudo_labels_sent(make_recording: Any) -> None:
    """Six features, three columns a round: two rounds tell what one does not."""
    empty = make_recording("nothing", epochs=0)
    rows = len(empty.alignment["active"])
    sent = [drawn(rows, 3, seed=epoch) for epoch in range(2)]
    opened = [z + whole(empty) @ drawn(6, 3, seed=7 + epoch) / 100 for epoch, z in enumerate(sent)]
    recording = ask(empty, "mmvfl", z=sent, opened=opened)
    for result in attack(recording, shadow_rows=40):
        reached = {name: figures["r2"] for name, figures in result.variants.items()}
        assert reached["ridge on all epochs"] > 0.95
        assert reached["ridge on rest of the sums"] < 0.9
        assert reached["ridge on sums"] < 0.5


@pytest.mark.null("sum_regression")
@pytest.mark.parametrize("method", [SPLIT, "mmvfl"])
def test_sums_of_something_else_tell_nothing(make_recording: Any, method: str) -> None:
    advantages = []
    for seed in range(8):
        empty = make_recording("nothing", epochs=0, seed=seed)
        rows = len(empty.alignment["active"])
        opened = [drawn(rows, 3, seed=9 + seed), drawn(rows, 3, seed=99 + seed)]
        sent = [drawn(rows, 3, seed=199 + seed)] * 2 if method == "mmvfl" else ()
        result = attack(ask(empty, method, z=sent, opened=opened), seed, shadow_rows=60)[0]
        advantages.append(result.advantage)
    assert why_not_zero(advantages) is None


def test_own_labels_are_no_news(make_recording: Any) -> None:
    """A sum that tells the active's labels again tells features that depend on them, too."""
    empty = make_recording("nothing", epochs=0)
    labels_N = empty.data.active.labels[empty.alignment["active"]]
    opened = torch.nn.functional.one_hot(labels_N, 3).double()
    result = attack(ask(empty, SPLIT, opened=[opened]), shadow_rows=60)[0]
    assert result.variants["ridge on sums"]["r2"] > result.baselines["ridge on x"]["r2"] > 0
    assert result.advantage < 0.02


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_real_sum_of_representations_is_read() -> None:
    for result in attack(run(small_config(SPLIT), None).recording, shadow_rows=100):
        assert (result.role, result.method) == ("active", SPLIT)
        assert result.advantage > 0


def test_where_no_such_sum_is_opened_or_kept_it_says_so(make_recording: Any) -> None:
    (first, *_) = attack(make_recording("labels"))
    assert first.reason == "apfed_c: no sum of representations or pseudo-labels is opened"
    (first, *_) = attack(ask(make_recording("nothing", epochs=0), SPLIT))
    assert "set transcript.keep" in (first.reason or "")
