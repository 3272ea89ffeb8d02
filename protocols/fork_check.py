"""Whether the code runs in the process that made an object, or in a forked copy of it.

Run by: whatever holds keys, nonces, masks or triples that are used once. Protects from: a fork
(`os.fork`, `multiprocessing` where it forks), whose copy would use them a second time without
knowing of the first. Not from copies that keep the number of the process: a machine restored
from a snapshot.
"""

import os

from protocols.errors import LocalProtocolError

__all__ = ["ForkCheck"]


class ForkCheck:
    """Remembers the process that made it.

    Args:
        owner: what is checked, as the subject of a sentence.
    """

    def __init__(self, owner: str) -> None:
        self._owner, self._process = owner, os.getpid()

    def require(self) -> None:
        """Raise LocalProtocolError in any other process."""
        if os.getpid() != self._process:
            raise LocalProtocolError(
                f"{self._owner} belongs to the process that made it; a copy would use its keys, "
                "numbers and masks a second time. Make it in the process that uses it"
            )
