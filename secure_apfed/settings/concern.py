"""Whom a setting concerns: what all parties sign, and what one of them decides alone.

Every setting stands in the contract but those that are named here: a new one concerns all until
somebody says otherwise. Parties whose settings differ in what all sign do not begin (see
`secure_apfed.exchange.agreement`).
"""

from collections.abc import Iterable
from typing import Any

from secure_apfed.settings.run import RunSettings

__all__ = ["DECIDED_ALONE", "shared_settings"]

_ACTIVES = (
    "task", "measure", "threshold", "dp_sgd", "labels", "votes.prior", "imputed.labels",
    "imputed.labels_from", "distilled.own", "distilled.joint", "distilled.loss",
    "distilled.weight", "rules.refused_sums", "checkpoint_every", "train.use_unaligned",
    "train.spread_labels", "train.evaluate_every", "train.patience", "train.keep_best",
    "train.held_out", "train.class_weights", "train.loss",
)  # fmt: skip
_OF_EACH = (
    "name", "data", "transcript", "attacks", "tradeoff", "train.device", "secure_sum.zero_pool",
    "secure_sum.worker", "alignment",
)  # fmt: skip
DECIDED_ALONE = (*_ACTIVES, *_OF_EACH)
"""Settings, by dotted name, that the active or each party for itself decides; of `data` and
`alignment` some concern all (see `shared_settings`)."""


def shared_settings(config: RunSettings) -> dict[str, Any]:
    """The settings that concern all parties, as the contract holds them.

    Of `alignment` its terms; of `data` who holds labels and, where several do, how they number
    the classes.
    """
    shared = config.model_dump(mode="json", exclude=_nested(DECIDED_ALONE))
    data = {"partition", "labels_at"}
    if config.data.horizontal or config.data.labels_at:
        data |= {"classes", "anomaly"}
    shared["data"] = config.data.model_dump(mode="json", include=data)
    return shared | {"alignment": config.alignment.terms()}


def _nested(keys: Iterable[str]) -> dict[str, Any]:
    """Dotted names as pydantic takes them."""
    tree: dict[str, Any] = {}
    for key in keys:
        section, _, rest = key.partition(".")
        if rest:
            tree.setdefault(section, {})[rest] = True
        else:
            tree[section] = True
    return tree
