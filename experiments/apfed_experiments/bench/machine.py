"""What seconds were measured on, and what else the machine did meanwhile."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["clock_step", "machine", "stolen_since"]

_LOOKS = 5


def machine() -> dict[str, Any]:
    """What seconds were measured on; the same from one bench to the next."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _processor() -> str | None:
    """Its model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor()) or None


def clock_step() -> float:
    """Seconds by which the clock moves at least: many milliseconds on some virtual machines."""
    steps = []
    for _ in range(_LOOKS):
        began = now = time.perf_counter()
        while now == began:
            now = time.perf_counter()
        steps.append(now - began)
    return min(steps)


def stolen_since(before: tuple[int, int] | None = None) -> tuple[tuple[int, int] | None, float]:
    """Processor time that the host gave to others: ticks stolen and in all, and the share since.

    Where the system does not tell, None and 0.
    """
    try:
        first = Path("/proc/stat").read_text("ascii").splitlines()[0].split()
        ticks = [int(each) for each in first[1:9]]
    except (OSError, ValueError, IndexError):
        return None, 0.0
    now = (ticks[-1], sum(ticks))
    passed = now[1] - before[1] if before else 0
    return now, (now[0] - before[0]) / passed if before and passed else 0.0
