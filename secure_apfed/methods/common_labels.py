"""The labels of common people, looked at once the parties know whom they have in common.

Run by: the active, before anything is trained; the planner asks the same of tables at hand. A table
may hold several classes of which the people that others know, too, have one, or none: a model of
these is a constant, and its accuracy says nothing. Others hear that the active stops, and not why.
"""

import warnings
from collections import Counter

import torch
from torch import Tensor

from secure_apfed.data import UNLABELLED, OwnData
from secure_apfed.errors import DataError, FewRowsWarning
from secure_apfed.intervals import FEWEST_ROWS
from secure_apfed.methods.method import Method
from secure_apfed.settings.run import RunSettings
from secure_apfed.tasks import Anomaly, Regression

__all__ = ["require_labels"]

_MORE = "give common people of each class a label, or align tables that share more people"
_TEST = "take another seed, raise data.test_fraction, or align tables that share more people"


def require_labels(method: Method, config: RunSettings, held: OwnData, aligned: Tensor) -> None:
    """Refuse a run that would learn from labels of one class, or be measured on rows of one.

    Args:
        method: that is played.
        config: of the run.
        held: the active's.
        aligned: its row at each position of the alignment; means nothing where nothing is aligned.

    Warns:
        FewRowsWarning: one of two classes has fewer than `FEWEST_ROWS` test rows; one of several
            has none, or no label among common people; or no test row is of common people where
            all parties predict.

    Raises:
        DataError: says how many rows have a label, and what to do.
    """
    owner, common = held.table.name, f"the {len(aligned)} common people"
    every = held.labelled_rows
    learnt = method.labels_learnt(config, held, aligned)
    left_out = f" (of {len(every)}; the others are not among {common})"
    among = left_out if method.declared.aligns else ""
    taught = _counts(held, learnt)
    # Passives with labels of their own may know other classes; of anomalies no label is learnt.
    if not config.data.labels_at and config.task != Anomaly.name:
        if not taught:
            raise DataError(
                f"{owner}: none of its {len(every)} labelled training rows is among {common}, so "
                f"there is nothing to learn; {_MORE}"
            )
        if len(taught) < 2:
            raise DataError(
                f"{owner}: the {len(learnt)} labelled training rows that {method.settings.title} "
                f"learns from{among} are all {_name(held, taught)}, so there is nothing to learn; "
                f"{_MORE}"
            )
        lost = set(_counts(held, every)) - set(taught)
        if lost and config.task != Regression.name:
            few = ", ".join(held.classes[int(one)] for one in sorted(lost))
            warnings.warn(
                f"{owner}: {method.settings.title} learns nothing of class {few}: none of its "
                f"labelled training rows is among {common}; {_MORE}",
                FewRowsWarning,
                stacklevel=2,
            )
    tested = method.rows_tested(held, aligned)
    if not len(held.test_rows):
        return
    asked = 1 if method.settings.predicts_alone else config.rules.minimum_batch
    if len(tested) < asked:
        warnings.warn(
            f"{owner}: {len(tested)} of its {len(held.test_rows)} test rows are among {common}, "
            f"and passives answer {asked} at least, so nothing measures {method.settings.title} "
            f"with all parties; {_TEST}",
            FewRowsWarning,
            stacklevel=2,
        )
        return
    counts = _counts(held, tested)
    if config.task == Regression.name:
        return
    if len(counts) < 2:
        raise DataError(
            f"{owner}: the {len(tested)} rows that {method.settings.title} is tested on are all "
            f"{_name(held, counts)}: whoever always says so is always right; {_TEST}"
        )
    rarest, rows = min((dict.fromkeys(taught, 0) | counts).items(), key=lambda one: one[1])
    if rows < (FEWEST_ROWS if len(held.classes) == 2 else 1):
        few = (
            f"{rows} are {_name(held, [rarest])}, fewer than {FEWEST_ROWS}: its measures say "
            "little, and their intervals are widened; raise data.test_fraction, or add rows"
        )
        none = f"none is {_name(held, [rarest])}, so nothing tells how well it is found; {_TEST}"
        warnings.warn(
            f"{owner}: of the {len(tested)} rows that {method.settings.title} is tested on "
            f"{few if rows else none}",
            FewRowsWarning,
            stacklevel=2,
        )


def _counts(held: OwnData, rows: Tensor) -> Counter[float]:
    """How many of these rows have each label."""
    labels_N = held.table.labels
    assert labels_N is not None
    known = labels_N[rows]
    return Counter(known[known != UNLABELLED].tolist())


def _name(held: OwnData, counts: "Counter[float] | list[float]") -> str:
    """The first of these labels, as people know it."""
    one = next(iter(counts))
    if held.targets is None:
        return f"of class {held.classes[int(one)]}"
    return f"{float(held.targets.decode(torch.tensor(one))):g}"
