"""Description of the machine that measured times, for readers on other machines."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine as plain values, without anything that changes.

    The processor's model is None if the system does not have it.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": next(models, platform.processor()) or None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
