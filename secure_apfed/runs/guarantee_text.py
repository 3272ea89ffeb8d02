"""What a finished run says of its guarantee, from its configuration and the method that was played.

Read by: people, in the result, the model card and the report; `privacy.guarantee` has the words.
"""

from secure_apfed.config import Config
from secure_apfed.defences import statements
from secure_apfed.methods import Method
from secure_apfed.privacy import LabelMechanism
from secure_apfed.privacy.guarantee import contributions_told, guarantee_of

__all__ = ["guarantee_text"]


def guarantee_text(config: Config, method: Method, labels: LabelMechanism) -> str:
    """Return all that was on, with what each part gives, and what none gives."""
    seeded = config.guard.noise != "secret"
    also = statements(config.defences, config.method)
    if method.contributions:
        also.insert(0, contributions_told(config.secure_sum.kind.leaks.single, seeded=seeded))
    return guarantee_of(
        method.guarantee, labels, private_training=method.training is not None, seeded=seeded,
        also=also,
    )  # fmt: skip
