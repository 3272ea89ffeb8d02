"""Settings of the transcript."""

from typing import Literal

from secure_apfed.settings import Settings

__all__ = ["TranscriptSettings"]


class TranscriptSettings(Settings):
    """Which payloads are kept for attacks; flows are always counted.

    Attributes:
        keep: payloads of no epoch, of the first and the last one, or of all.
    """

    keep: Literal["none", "first_and_last", "all"] = "first_and_last"
