"""A run from configuration to folder: session, checkpoints, model, recording."""

from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import Progress, RunResult
from secure_apfed.runs.recording import Recording, load_recording
from secure_apfed.runs.session import run
from secure_apfed.runs.solo import SoloModel, load_model

__all__ = [
    "Progress",
    "Recording",
    "RunFolder",
    "RunResult",
    "SoloModel",
    "load_model",
    "load_recording",
    "run",
]
