"""The conversion of labels in files, frames and arguments to classes or numbers.

Run by: each party with labels, for itself. Labels are compared as texts without surrounding blanks.
Different spellings of one label ("1" and "1.0", "Yes" and "yes") would silently become different
classes, so they are refused unless all of them are listed as classes.

Labels of a regression are standardised by the active. Mean and scale are of its labelled training
rows, and so reveal something of their labels; they are stored in its model card, so that
predictions are in the unit of the labels.
"""

import math
import re
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from apfed_protocols.ids import EMPTY_CELL_TEXTS
from secure_apfed.base.faults import Fault, Remedy, SettingLine, TableError, describe_remedies
from secure_apfed.errors import DataError, SuspectColumnWarning

UNLABELLED = -100
"""Value in place of a label that is unknown, or that training may not use."""
# A number as Python reads it, but without underscores and digits of other scripts.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
# Standard deviations of the farthest target, below the absolute value of UNLABELLED.
_MAX_DEVIATIONS = 99.0
_MAX_SHOWN_LABELS = 5  # labels in an error
_MAX_LABEL_CHARACTERS = 40  # characters of a label in an error
_MAX_PROPOSED = 20  # classes in a proposed setting
# Signs that look like others, and what they are read as.
_PLAIN_SIGN_BY_LOOKALIKE = {
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-"),
    ord("\u2044"): "/",
    ord("\u2019"): "'",
}
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:([ ,'])[0-9]{3})(?:\1[0-9]{3})*")
_BETWEEN_NUMBERS = re.compile(r"(?<=[0-9])[\s_-]+(?=[0-9])")
_BETWEEN_WORDS = re.compile(r"(?<=\w)[\s_-]+(?=\w)|\s+(?=%)")
# Spellings of truth values; a single letter counts only if the column has its word, too.
_DIGIT_BY_TRUTH_WORD = {"true": "1", "yes": "1", "false": "0", "no": "0"}
_TRUTH_WORD_BY_LETTER = {"t": "true", "y": "yes", "f": "false", "n": "no"}


class TargetScale(BaseModel):
    """The mean and scale that standardise targets; both in the targets' unit."""

    model_config = ConfigDict(frozen=True)

    mean: float = Field(allow_inf_nan=False)
    scale: float = Field(gt=0, allow_inf_nan=False)

    @classmethod
    def from_targets(cls, targets_n: NDArray[Any], *, party: str) -> Self:
        """Return the scale with the mean and standard deviation of these labels.

        `targets_n`: the labels of the n labelled training rows, (n,). `party`: name for the error.

        Raises DataError: all labels are equal, or the deviation is not a finite number.
        """
        mean = float(np.mean(targets_n))
        scale = float(np.std(targets_n))
        if not (math.isfinite(scale) and scale > 1e-12 * abs(mean)):
            raise DataError(
                f"{party}: the labels of its {len(targets_n)} labelled training rows are all "
                f"{mean:g}, or too large to tell apart, so there is nothing to learn; take rows "
                "with other labels"
            )
        return cls(mean=mean, scale=scale)

    def encode(self, targets_N: NDArray[Any], *, party: str) -> Tensor:
        """Return standardised targets, float32 (N,), `UNLABELLED` where a target is NaN (missing).

        Raises DataError: a target is too far from the mean.
        """
        z_N = (targets_N - self.mean) / self.scale
        # A farther target could equal UNLABELLED, and would then count as a missing label.
        extremes = np.flatnonzero(np.abs(z_N) > _MAX_DEVIATIONS)
        if extremes.size:
            row = extremes[0]
            raise DataError(
                f"{party}: the label of row {row} (from 0), {targets_N[row]:g}, "
                f"lies {abs(z_N[row]):.0f} standard deviations from the mean of the "
                f"labelled training rows; at most {_MAX_DEVIATIONS:g} are taken: mend it, or "
                "predict its logarithm"
            )
        return torch.from_numpy(np.where(np.isnan(z_N), UNLABELLED, z_N).astype(np.float32))

    def decode(self, z_B: Tensor) -> Tensor:
        """Return standardised predictions (B,) in the unit of the labels, float64."""
        return z_B.double() * self.scale + self.mean


def parse_numbers(texts: Sequence[str | None], *, party: str, column: str) -> NDArray[np.float64]:
    """Return labels as numbers (N,); NaN where the cell is empty.

    `texts`: one label a row; None: no label. `party`, `column`: names for errors.

    Raises DataError: a label is no number.
    """
    targets_N = np.full(len(texts), np.nan)
    for row, text in enumerate(texts):
        if text is None:
            continue
        is_number = _NUMBER.fullmatch(text) is not None
        if is_number:
            targets_N[row] = float(text)
        if not is_number or not math.isfinite(targets_N[row]):
            raise DataError(
                f"{party}: column {column!r} holds numbers to predict, and row {row} (from 0) has "
                f"{text!r:.40}; mend it, empty the cell, or leave task: regression out if these "
                "are classes"
            )
    return targets_N


def require_one_spelling(
    labels: Iterable[str | None],
    *,
    where: str,
    remedy: str = "list all under data.classes",
    listed: Sequence[str] = (),
    only_groups_with: Collection[str] | None = None,
    remedies: Sequence[Remedy] = (),
) -> None:
    """Raise TableError if labels differ only in spelling: silently they would be different classes.

    Ignored differences are case, Unicode composition and width, blanks, forms of one number ("1",
    "1.0", "1,0", "01", "+1", "1e0", "1,000" beside "1000"), truth words ("True", "T", "1"), quotes
    around a word, and blanks and dashes within ("class 1", "class1").

    Args:
        labels: one a row; None: no label.
        where: the owner of the labels, such as party and column, for the error.
        remedy: the advice of the error for labels that are different classes.
        listed: labels that the settings name; they are compared even if no row has them.
        only_groups_with: only groups of spellings that contain one of these labels are reported;
            None: all.
        remedies: settings that accept the spellings as different classes; named in place of
            `remedy`.
    """
    row_count_by_label = Counter(label for label in labels if label is not None)
    text_by_label = {label: _normalise_label(label) for label in (*row_count_by_label, *listed)}
    label_texts = set(text_by_label.values())
    spellings_by_meaning = defaultdict[object, list[str]](list)
    for label, text in text_by_label.items():
        spellings_by_meaning[_parse_meaning(text, label_texts)].append(label)
    group_texts = list[str]()
    for spellings in spellings_by_meaning.values():
        is_reported = only_groups_with is None or not set(only_groups_with).isdisjoint(spellings)
        if len(spellings) > 1 and is_reported:
            shown_spellings = spellings[:_MAX_SHOWN_LABELS]
            group_texts.append(
                " and ".join(
                    f"{_shorten_label(label)} ({row_count_by_label[label]} rows)"
                    for label in shown_spellings
                )
            )
    if not group_texts:
        return
    further_text = (
        f", and {len(group_texts) - _MAX_SHOWN_LABELS} labels more"
        if len(group_texts) > _MAX_SHOWN_LABELS
        else ""
    )
    remedy = f"say {describe_remedies(remedies)}" if remedies else remedy
    message = (
        f"{where} spells one label in several ways, each of which would be a class of its own: "
        f"{'; '.join(group_texts[:_MAX_SHOWN_LABELS])}{further_text}; write each label in one way, "
        f"or {remedy} if they are different classes"
    )
    # The first remedy is empty: it stands for correcting the table, which no setting can do.
    raise TableError([Fault(message, ((), *remedies))])


def warn_of_empty_words(
    labels: Sequence[str | None],
    *,
    party: str,
    column: str,
    are_empty: bool,
    listed_classes: Sequence[str] = (),
) -> frozenset[str]:
    """Warn of labels that are "NA", "None" or similar, and so may stand for a missing label.

    Args:
        labels: one a row; None: no label.
        party, column: names for the warning.
        are_empty: whether the caller treats such words as missing labels.
        listed_classes: words that the settings list as classes; they are never missing labels.

    Returns:
        The words that count as missing labels; none unless `are_empty`.
    """
    empty_words = EMPTY_CELL_TEXTS.difference(listed_classes)
    found_words = [text for text in sorted(empty_words.intersection(labels)) if text]
    if found_words:
        counts_text = ", ".join(f"{text!r} ({labels.count(text)})" for text in found_words)
        treatment_text = (
            "count as empty" if are_empty else "are a class each, and do not count as empty"
        )
        classes = (label for label in labels if label)
        remedies = _propose_classes(tuple(dict.fromkeys((*listed_classes, *_sort_labels(classes)))))
        remedy = (
            f"say {describe_remedies(remedies)}" if remedies else "list them under data.classes"
        )
        warnings.warn(
            f"{party}: labels {counts_text} of column {column!r} {treatment_text}; {remedy} if "
            "they are classes, else leave their cells empty",
            SuspectColumnWarning,
            stacklevel=3,
        )
    return empty_words if are_empty else frozenset()


def _shorten_label(label: str) -> str:
    """Return a label in quotes for a message, shortened; look-alike letters are escaped."""
    text = ascii(label) if not unicodedata.is_normalized("NFKC", label) else repr(label)
    return (
        text
        if len(text) <= _MAX_LABEL_CHARACTERS
        else f"{text[:_MAX_LABEL_CHARACTERS]}... ({len(label)} characters)"
    )


def _normalise_label(label: str) -> str:
    """Return a label without the differences that a reader overlooks.

    These are case, surrounding quotes and blanks, invisible characters, and Unicode forms.
    """
    text = unicodedata.normalize("NFKC", label).translate(_PLAIN_SIGN_BY_LOOKALIKE)
    # Invisible format characters ("Cf") go, and digits of other scripts become ASCII digits.
    text = "".join(
        str(unicodedata.decimal(sign, sign)) for sign in text if unicodedata.category(sign) != "Cf"
    )
    return unicodedata.normalize("NFKC", text.casefold()).strip().strip("\"'").strip()


def _parse_meaning(text: str, label_texts: set[str]) -> object:
    """Return a key that is equal for different spellings of one label.

    `text`: the normalised label. `label_texts`: all normalised labels of the column. A letter such
    as "t" means "true" only if `label_texts` contains "true". "1,000" means 1000 only if
    `label_texts` contains "1000", since it may also mean 1.
    """
    word = _TRUTH_WORD_BY_LETTER.get(text, text)
    text = word if word in label_texts else text
    text = _DIGIT_BY_TRUTH_WORD.get(text, text)
    digits = re.sub("[ ,']", "", text)
    if _THOUSANDS.fullmatch(text) and ("," not in text or digits in label_texts):
        text = digits
    has_decimal_comma = text.count(",") == 1 and "." not in text
    number_text = text.replace(",", ".") if has_decimal_comma else text
    if _NUMBER.fullmatch(number_text):
        try:
            return Decimal(number_text)
        except InvalidOperation:  # its exponent is out of range
            return text
    # Between two numbers a separator stays, so that "1 2" differs from "12"; all are written alike.
    unified_text = _BETWEEN_NUMBERS.sub("\0", text)
    return _BETWEEN_WORDS.sub("", unified_text)


def encode_class_labels(
    labels: Sequence[str | None], listed_classes: tuple[str, ...] | None, *, party: str, column: str
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return each row's class index (N,), and the names of the classes.

    A row without a label gets `UNLABELLED`.

    Args:
        labels: one a row; None: no label.
        listed_classes: classes that the settings name, in order; None: the distinct labels, sorted.
        party, column: names for errors.

    Raises TableError: a label is not among the listed classes, or spelt in several ways.
    """
    where = f"{party}: column {column!r}"
    present_labels = _sort_labels(labels)
    all_classes = tuple(dict.fromkeys((*(listed_classes or ()), *present_labels)))
    remedies = _propose_classes(all_classes)
    if listed_classes is None:
        require_one_spelling(labels, where=where, remedies=remedies)
    classes = present_labels if listed_classes is None else listed_classes
    index_by_class: dict[str | None, int] = {label: index for index, label in enumerate(classes)}
    count_by_unlisted_label = Counter(
        label for label in labels if label is not None and label not in index_by_class
    )
    if count_by_unlisted_label:
        require_one_spelling(
            labels,
            where=where,
            listed=classes,
            only_groups_with=count_by_unlisted_label,
            remedies=remedies,
        )
        raise _make_unlisted_error(count_by_unlisted_label, classes, remedies, party=party)
    indices = [index_by_class.get(label, UNLABELLED) for label in labels]
    return np.array(indices, np.int64), classes


def _make_unlisted_error(
    count_by_unlisted_label: Counter[str],
    classes: Sequence[str],
    remedies: Sequence[Remedy],
    *,
    party: str,
) -> TableError:
    """Return the error for labels that are not among the classes.

    `count_by_unlisted_label`: number of rows with each such label. `remedies`: settings that would
    list them. `party`: the party's name.
    """
    shown_classes = ", ".join(map(_cut_label, classes))
    first_labels = sorted(count_by_unlisted_label)[:_MAX_SHOWN_LABELS]
    shown_labels = ", ".join(map(_cut_label, first_labels))
    advice = f"say {describe_remedies(remedies)}" if remedies else "add the class"
    message = (
        f"{party}: {count_by_unlisted_label.total()} labels lie outside the classes "
        f"{shown_classes}, such as {shown_labels}; mend them, or {advice}"
    )
    mend_labels: Remedy = ()  # mended labels need no change of the settings
    return TableError([Fault(message, (mend_labels, *remedies))])


def _propose_classes(classes: Sequence[str]) -> tuple[Remedy, ...]:
    """Return the advice to list these classes in the settings, for an error.

    It is empty if the list, or a class's name, is too long to be read in an error.
    """
    if len(classes) > _MAX_PROPOSED or max(map(len, classes), default=0) > _MAX_LABEL_CHARACTERS:
        return ()
    return ((SettingLine(("data", "classes"), tuple(classes)),),)


def choose_positive(labels_N: NDArray[np.int64], classes: Sequence[str]) -> str:
    """Return the rarer one of two classes, by their labels; the second if both are equally rare.

    `labels_N`: class indices, `UNLABELLED` for a row without a label. `classes`: the two names.
    """
    counts_K = np.bincount(labels_N[labels_N >= 0], minlength=len(classes))
    return classes[0] if counts_K[0] < counts_K[1] else classes[1]


def move_positive_last(
    labels_N: NDArray[np.int64], classes: tuple[str, ...], positive: str | None, *, where: str
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return labels (N,) and class names so renumbered that the positive one of two is class 1.

    Args:
        labels_N: class indices, or `UNLABELLED`.
        classes: names of the classes, in the order of the indices.
        positive: name of the positive class; None: labels and names are returned unchanged.
        where: the setting that names the positive class, for the error.

    Raises DataError: there are not two classes, or neither has this name.
    """
    if positive is None:
        return labels_N, classes
    if len(classes) != 2 or positive not in classes:
        raise DataError(
            f"{where}: expected one of two classes, got {positive!r:.40} of "
            f"{', '.join(map(_cut_label, classes[:_MAX_SHOWN_LABELS])) or 'numbers'}; correct "
            "data.positive, or leave it out"
        )
    if classes[1] == positive:
        return labels_N, classes
    return np.where(labels_N >= 0, 1 - labels_N, labels_N), classes[::-1]


def _cut_label(label: str) -> str:
    """Return a label for a message: unchanged if it is short, else in quotes and shortened."""
    return label if len(label) <= _MAX_LABEL_CHARACTERS else _shorten_label(label)


def _sort_labels(labels: Iterable[str | None]) -> tuple[str, ...]:
    """Return the distinct labels in order: by value if all are whole numbers, else as texts."""
    distinct_labels = {label for label in labels if label is not None}
    are_integers = all(map(_WHOLE_NUMBER.fullmatch, distinct_labels))
    return (
        tuple(sorted(distinct_labels, key=Decimal))
        if are_integers
        else tuple(sorted(distinct_labels))
    )
