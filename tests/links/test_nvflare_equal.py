"""Jobs of NVFlare's and memory give the same models, for every method and every secure sum.

Each job takes half a minute, of which NVFlare's simulator takes most to start and to end.
"""

import json
from pathlib import Path

import pytest

from secure_apfed.config import Config
from secure_apfed.runs.run import run
from tests.links.jobs import SHORT, Job, needs_nvflare
from tests.local.processes import model_digests
from tests.local.test_local_equal import CASES, OPEN
from tests.local.test_local_methods import HELPED, config_of
from tests.secure_apfed.small_runs import small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
    pytest.mark.filterwarnings("ignore::secure_apfed.errors.NoHelpWarning"),
    pytest.mark.slow,
    needs_nvflare,
]


def configs() -> dict[str, Config]:
    """Those of local processes, and the methods that are not among them; one party is no job."""
    found = {
        case: small_config(method, **{"train": SHORT, "guard": OPEN, **changes})
        for case, (method, changes) in CASES.items()
    }
    played = {config.method.name for config in found.values()}
    found |= {method: config_of(method) for method in HELPED if method not in played}
    return {case: config for case, config in found.items() if config.method.has_passives}


@pytest.mark.parametrize("case", configs())
def test_the_same_models_in_memory_and_in_a_job(case: str, tmp_path: Path) -> None:
    config = configs()[case]
    run(config, tmp_path / "memory")
    job = Job(config, tmp_path)
    assert job.play() == 0
    result, whole = (
        json.loads((folder / "result.json").read_bytes())
        for folder in (job.run / "parties" / config.data.active_name, tmp_path / "memory")
    )
    assert result["accuracy"] == whole["accuracy"]
    assert result["sum"] == whole["sum"]
    # Least squares over rows in the order of the alignment, another one in each run.
    if config.method.averages != "pseudo-labels":
        assert model_digests(job.run) == model_digests(tmp_path / "memory")
