"""One run, over whatever its parties are joined by."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from secure_apfed.config import Config
from secure_apfed.data import VerticalData
from secure_apfed.errors import ConfigError
from secure_apfed.runs.local import WAYS, run_locally
from secure_apfed.runs.outcome import Progress, RunResult
from secure_apfed.runs.run import run_in_memory
from secure_apfed.seeds import undisturbed
from secure_apfed.settings import unknown_name

__all__ = ["TRANSPORTS", "run"]

TRANSPORTS: Mapping[str, Callable[..., RunResult]] = {
    "memory": run_in_memory,
    **{name: partial(run_locally, over=way) for name, way in WAYS.items()},
}


@undisturbed()
def run(
    config: Config,
    folder: Path | None,
    *,
    data: VerticalData | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    transport: str = "memory",
    **options: Any,
) -> RunResult:
    """Train, evaluate and write one run.

    Args:
        config: of the run.
        folder: of the run; made where missing. None: write nothing.
        data: of the run, where it is loaded already.
        resume: go on from the checkpoints in `folder`.
        on_progress: called after every step, and again after an evaluation; after every epoch
            where parties run apart.
        transport: a key of `TRANSPORTS`: "memory", one process plays all; "local", one process a
            party, over loopback; "grpc", the same as between machines; "relay", through a relay.
        options: of the transport: `timeout_s`, seconds of patience with a silent party.

    Raises:
        ConfigError, DataError, ModelError: what does not fit, before anything is sent.
        CheckpointError: nothing to resume, the folder holds a run already, or the active refused
            more sums of it than `rules.refused_sums`.
        BudgetExhaustedError: the privacy budget is spent; the checkpoints stay.
        ProtocolError: a party broke the protocol; the run stops for all.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport: {unknown_name(transport, TRANSPORTS)}")
    play = TRANSPORTS[transport]
    return play(config, folder, data=data, resume=resume, on_progress=on_progress, **options)
