"""Between machines: who is killed or frozen is named, all end, and resuming changes nothing."""

import signal
from pathlib import Path

import pytest

from secure_apfed.exchange import Kind
from secure_apfed.runs.local import Way
from tests.local.processes import (
    Harm,
    Impatient,
    hidden_files,
    model_digests,
    nobody_failed,
    the_others_say_who_and_when,
)
from tests.local.test_local_harm import SENT, config_of, whole

__all__ = ["whole"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

# A role in each phase; every message of every role is harmed in `tests/local`, over the same links.
DIRECT = [
    ("passive-1", Kind.CONTRIBUTION), ("active", Kind.SIGNATURE), ("dealer", Kind.ALIGNMENT),
    ("aggregator", Kind.READY), ("active", Kind.CHECKPOINT),
]  # fmt: skip
RELAYED = [("active", Kind.REPRESENTATIONS), ("aggregator", Kind.SUM)]
QUICK = (*DIRECT[0], "grpc", signal.SIGKILL)
CASES = [
    pytest.param(*case, marks=[] if case == QUICK else pytest.mark.slow)
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for over, harmed in (("grpc", DIRECT), ("relay", RELAYED))
    for name, kind in harmed
    for case in [(name, kind, over, number)]
]


def harmed_and_resumed(harm: Harm, name: str, over: Way, whole: Path, folder: Path) -> None:
    patience_s = 2.0 if harm.signal == signal.SIGSTOP else 20.0
    parties = Impatient(config_of(), folder, over=over, timeout_s=patience_s)
    said = parties.play({name: harm})
    assert said["passive-2"]["kind"]
    the_others_say_who_and_when(said, name)
    parties = Impatient(config_of(), folder, over=over)
    nobody_failed(parties.play(resume=True))
    assert model_digests(folder) == model_digests(whole)
    assert not hidden_files(folder)


@pytest.mark.parametrize(("name", "kind", "over", "number"), CASES)
def test_who_is_killed_or_frozen_is_named_and_the_run_resumes_the_same(
    name: str, kind: Kind, over: Way, number: int, whole: Path, tmp_path: Path
) -> None:
    harm = Harm(kind, SENT[name, kind], signal=number)
    harmed_and_resumed(harm, name, over, whole, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("over", ["grpc", "relay"])
@pytest.mark.parametrize("name", ["active", "passive-1"])
def test_who_is_killed_while_it_writes_a_checkpoint_leaves_nothing_torn(
    name: str, over: Way, whole: Path, tmp_path: Path
) -> None:
    harm = Harm(None, writing="checkpoint-6.bin")
    harmed_and_resumed(harm, name, over, whole, tmp_path / "run")
