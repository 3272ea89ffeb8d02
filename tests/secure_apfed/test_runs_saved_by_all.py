"""Every party of every method saves what it is on the active's word, before the active does."""

from pathlib import Path

import pytest

from secure_apfed.methods import METHODS, PartyState
from secure_apfed.runs.keeper import PartyKeeper
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    pytest.mark.filterwarnings("ignore::secure_apfed.errors.NoHelpWarning"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(every=3)
def test_whatever_step_the_active_saves_all_others_saved_before(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[str, int]] = []

    def save(keeper: PartyKeeper, state: PartyState) -> None:
        kept(keeper, state)
        saved.append((keeper._name, state.step))

    kept = PartyKeeper.save
    monkeypatch.setattr(PartyKeeper, "save", save)
    config = small_config(method)
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"epochs": 2, "batch_size": 128})}
    )
    run(config, tmp_path / "run")
    others = {path.name for path in (tmp_path / "run/parties").iterdir()} - {"active", "dealer"}
    assert bool(others) is METHODS[method].settings.has_passives
    of_active = [place for place, (name, _) in enumerate(saved) if name == "active"]
    assert len({saved[place][1] for place in of_active}) >= 2
    before = 0
    for place in of_active:
        step = saved[place][1]
        assert {(name, step) for name in others} <= {*saved[before:place]}, (method, step)
        before = place + 1
