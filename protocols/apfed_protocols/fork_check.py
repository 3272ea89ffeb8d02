"""Whether the code runs in the process that made an object, or in a forked copy of it.

Run by: whatever holds keys, nonces, masks or triples that are used once. Protects from: a fork
(`os.fork`, `multiprocessing` where it forks), whose copy would use them a second time without
knowing of the first. Forks are counted as well, since in another process namespace a copy may
have the number of the original. Not from what Python does not see: a machine restored from a
snapshot, or a fork by foreign code that gets the same number.
"""

import os

from apfed_protocols.errors import LocalProtocolError

__all__ = ["ForkCheck"]


_generation = 0


def _after_fork() -> None:
    global _generation
    _generation += 1


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_after_fork)


class ForkCheck:
    """Remembers the process that made it.

    Args:
        owner: what is checked, as the subject of a sentence.
    """

    def __init__(self, owner: str) -> None:
        self._owner, self._process = owner, (os.getpid(), _generation)

    def require(self) -> None:
        """Raise LocalProtocolError in any other process."""
        if (os.getpid(), _generation) != self._process:
            raise LocalProtocolError(
                f"{self._owner} belongs to the process that made it; a copy would use its keys, "
                "numbers and masks a second time. Make it in the process that uses it"
            )
