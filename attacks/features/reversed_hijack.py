"""A4, reversed hijacking: a malicious passive of APFed rebuilds the active's features.

Run by: a passive that answers every step with a gradient of its own choice. In split learning the
server does this to its clients; in APFed the passive has to do it through a sum with other
passives' gradients, against the active's own loss, and with rows no longer than the sum's clip.
How: see `attacks.features.hijacking`.
"""

from typing import ClassVar

from attacks.features.hijacking import HijackAttack
from attacks.view import Role

__all__ = ["ReversedHijack"]


class ReversedHijack(HijackAttack):
    """Pull the active's encoder into one's own feature space; see `HijackAttack`."""

    name: ClassVar[str] = "reversed_hijack"
    roles: ClassVar[tuple[Role, ...]] = ("passive",)
