"""Whatever takes arrays takes frames by their labels, or refuses them; arrays go by place.

One table of functions, one of what happens to a frame's labels; every pair is a case. Right is the
result of the frame in its first order, or a sentence.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from apfed_attacks import AttackError, Recorder, evaluate, foreign
from apfed_protocols import (
    DataError,
    IdNormalisation,
    LocalProtocolError,
    RemoteProtocolError,
    SumName,
    UnsafeChoiceWarning,
    align,
    encode_ids,
    secure_sum,
)
from apfed_protocols.svd import SvdAgreement, SvdDealer, SvdOwner
from secure_apfed import PrivateContributions, PrivateLabels, PrivateRelease, VerticalClassifier
from secure_apfed.errors import ConfigError
from secure_apfed.interfaces.frames import check_frames

ROWS = 24
REFUSALS = (LocalProtocolError, DataError, AttackError, ConfigError, ValueError)
WORDS = r"label|index|order|column|array|tensor|occur|names|axis"
SHUFFLED = np.random.default_rng(0).permutation(ROWS)
TABLE = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)
CLASSES = np.arange(ROWS) % 2
TABLE[:, 0] += 4 * CLASSES
BUDGET: dict[str, Any] = {"epsilon": 8, "delta": 1e-5, "epochs": 2, "rows": ROWS}


def frame(labels: Any = None) -> pd.DataFrame:
    return pd.DataFrame(TABLE, index=labels, columns=["age", "income", "rent"])


PEOPLE = [f"p{place:02}" for place in range(ROWS)]
PAIRS = pd.MultiIndex.from_arrays([[k // 6 for k in range(ROWS)], [k % 6 for k in range(ROWS)]])
CHANGES: Mapping[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "as it was": lambda one: one,
    "rows in another order": lambda one: one.iloc[SHUFFLED],
    "columns in another order": lambda one: one[list(one.columns[::-1])],
    "both in another order": lambda one: one.iloc[SHUFFLED][list(one.columns[::-1])],
}
BROKEN: Mapping[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "other people": lambda one: one.set_axis([f"q{place}" for place in range(ROWS)]),
    "some other people": lambda one: one.set_axis(["q", *PEOPLE[1:]]),
    "people twice": lambda one: one.set_axis([PEOPLE[0], PEOPLE[0], *PEOPLE[2:]]),
}
INDEXES: Mapping[str, Any] = {
    "positions": None,
    "positions that are objects": pd.Index(range(ROWS), dtype=object),
    "floats": pd.Index(np.arange(ROWS) * 1.0),
    "texts": PEOPLE,
    "two levels": PAIRS,
    "moments": pd.date_range("2026-01-01", periods=ROWS),
}


def places(two: Any) -> Any:
    """Return each row's place in the first frame: a Series with the labels of the frame."""
    place = {age: at for at, age in enumerate(TABLE[:, 0].tolist())}
    return two["age"].map(lambda age: place[age]).rename("place")


def add(kind: SumName) -> Callable[[Any, Any], Any]:
    def add_two(one: Any, two: Any) -> Any:
        session = secure_sum(kind, ["a", "b"], to="x", by="y", clip=99)
        return np.asarray(session({"a": one, "b": two}))

    return add_two


def add_leaves(one: Any, two: Any) -> Any:
    given = {"a": {"w": [one]}, "b": {"w": [two]}}
    return np.asarray(secure_sum("masked", ["a", "b"], to="x", clip=99)(given)["w"][0])


def add_as_roles(one: Any, two: Any) -> Any:
    """Contributors that know nothing of each other's labels: their bindings tell."""
    from apfed_protocols import converse

    session = secure_sum("masked", ["a", "b"], to="x", clip=99, session="s")
    roles: dict[str, Any] = {name: session.make_contributor(name) for name in "ab"}
    receiver: Any = session.make_receiver()
    converse({**roles, "x": receiver})
    bodies = {"a": roles["a"].contribute(one), "b": roles["b"].contribute(two)}
    try:
        combined = receiver.combine(bodies)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"other labels: {error}") from error
    return np.asarray(receiver.decode(combined, one))


def record_evaluation(**given: Any) -> Any:
    """Record all that `evaluate` makes of its arrays, in place of the attacks' work on it."""
    read: list[Any] = []

    def note_known_rows(attack: Any, truth: Any, at: Any, anyway: Any, seed: int) -> Any:
        del attack, seed
        features = [one.tolist() for one in truth.features.values()]
        read.append((truth.labels.tolist(), features, None if at is None else at.tolist()))
        return anyway

    def guesses(attack: Any, view: Any, *_: Any) -> Any:
        del attack
        payloads = [one.payload for step in view.envelopes.values() for one in step]
        read.append(([one.tolist() for one in view.features.values()], payloads))
        raise AttackError("not mounted here")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(foreign, "_add_known_rows", note_known_rows)
        patched.setattr(foreign, "compute_guesses", guesses)
        answered = given.get("gradients") is not None
        evaluate(**given, attacks=["norm" if answered else "model_completion"], exchanges=2)
    assert read
    return read


def evaluate_argument(name: str) -> Callable[[Any, Any], Any]:
    def call(one: Any, two: Any) -> Any:
        del one
        given: dict[str, Any] = {"h": [TABLE], "labels": CLASSES, "steps": [np.arange(ROWS)]}
        wide = two if name in ("h", "gradients", "features", "own") else places(two)
        given[name] = {"labels": wide % 2, "known": wide % 3 == 0}.get(name, wide)
        if name in ("h", "gradients") or name == "steps":
            given[name] = [given[name]]
        return record_evaluation(**given)

    return call


def evaluate_array_and_frame(one: Any, two: Any) -> Any:
    return record_evaluation(h=[one.to_numpy(), two], steps=[range(ROWS)] * 2, labels=CLASSES)


def evaluate_two_frames(one: Any, two: Any) -> Any:
    return record_evaluation(h=[one, two], steps=[range(ROWS)] * 2, labels=CLASSES)


def charge_rows(one: Any, two: Any) -> Any:
    guard = PrivateRelease(clip=1, **BUDGET)
    del one
    guard(TABLE, rows=places(two))
    return guard.get_extra_state()[0, -ROWS:].tolist()


def charge_contribution(one: Any, two: Any) -> Any:
    del one
    account = PrivateContributions(**BUDGET, numbers=3, moved=1, honest=2)
    account.draw_noise((ROWS, 3), rows=places(two))
    return account._ledger._release_counts.releases_N.tolist()


def release_frame(one: Any, two: Any) -> Any:
    del one
    return PrivateRelease(clip=1, **BUDGET)(two, rows=range(ROWS)).shape


def answer_labels(one: Any, two: Any) -> Any:
    del one
    return PrivateLabels(epsilon=40, classes=2)((two["age"] > 2).astype(int)).tolist()


def ids_of(two: Any) -> Any:
    return two["age"].map("{:.6f}".format)


def align_ids(one: Any, two: Any) -> Any:
    own = ids_of(one)
    other = ids_of(two)
    rows = align({"a": own.tolist(), "b": other}, hub="a")
    common = zip(own.iloc[rows["a"]], other.iloc[rows["b"]], strict=True)
    return sorted(map(tuple, common))


def align_columns(one: Any, two: Any) -> Any:
    plain = one.map("{:.6f}".format).reset_index(drop=True)
    rows = align({"a": plain, "b": two.map("{:.6f}".format)}, hub="a")
    common = zip(one["age"].iloc[rows["a"]], two["age"].iloc[rows["b"]], strict=True)
    return sorted(map(tuple, common))


def encode_people(one: Any, two: Any) -> Any:
    del one
    return sorted(encode_ids("a", ids_of(two), IdNormalisation()))


def mask_frame(one: Any, two: Any) -> Any:
    del one
    agreed = SvdAgreement(
        session="s",
        receiver="a",
        server="x",
        dealer="d",
        owners=("a", "b"),
        features=(3, 3),
        vectors=2,
        mask_rows=8,
        max_rows=ROWS,
    )
    owner = SvdOwner(agreed, "b")
    dealt = {out.receiver: out.body for out in SvdDealer(agreed).deal_masks()}
    owner.take_masks(dealt["b"])
    return owner.mask_table(two, bytes([1] * 32))


def fit_estimator(one: Any, two: Any) -> Any:
    model = VerticalClassifier(settings={"train": {"epochs": 1}}).fit(one, two["age"] > 2)
    return model.predict_proba(one).round(5).tolist()


def predict_frame(one: Any, two: Any) -> Any:
    model = VerticalClassifier(settings={"train": {"epochs": 1}}).fit(one, CLASSES)
    told = pd.Series(model.predict_proba(two)[:, 0].round(5), index=two.index)
    return told[one.index].tolist() if two.index.is_unique else told.tolist()


def check_passive_frame(one: Any, two: Any) -> Any:
    people = {"id": PEOPLE}
    active = one.assign(**people, label=CLASSES)
    named = dict(zip(one["age"], PEOPLE, strict=True))
    passive = two.assign(id=[named[age] for age in two["age"]])
    read = check_frames(
        active, {"b": passive}, active_name="a", id_column="id", label_column="label"
    )
    return read["b"].set_index("id").loc[PEOPLE, ["age", "income", "rent"]].to_numpy().tolist()


def record_step(one: Any, two: Any) -> Any:
    del one
    bottom = torch.nn.Linear(3, 2)
    record = Recorder()
    with record.watch(bottom):
        record.step(places(two))
        bottom(torch.zeros(ROWS, 3))
    return record.to_arrays()["steps"][0].tolist()


FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{f"secure_sum({kind!r})": add(kind) for kind in ("masked", "recoverable", "plain")},
    "secure_sum of a tree": add_leaves,
    "contributors apart": add_as_roles,
    **{
        f"evaluate({name}=)": evaluate_argument(name)
        for name in ("h", "features", "own", "gradients", "labels", "known", "steps")
    },
    "evaluate of an array and a frame": evaluate_array_and_frame,
    "evaluate of two frames": evaluate_two_frames,
    "Recorder.step": record_step,
    "PrivateRelease(rows=)": charge_rows,
    "PrivateRelease(h)": release_frame,
    "PrivateContributions.draw": charge_contribution,
    "PrivateLabels": answer_labels,
    "align": align_ids,
    "align by several columns": align_columns,
    "encode_ids": encode_people,
    "SvdOwner.mask": mask_frame,
    "VerticalClassifier.fit": fit_estimator,
    "VerticalClassifier.predict_proba": predict_frame,
    "run_frames": check_passive_frame,
}
SUMS = [name for name in FUNCTIONS if "sum" in name or "contributors" in name]
# Where there is one frame only, its order of columns is its own.
OWN_COLUMNS = {f"evaluate({name}=)" for name in ("h", "features", "own", "gradients")}
OWN_COLUMNS |= {"evaluate of an array and a frame", "align", "encode_ids"}
ACCEPTED = {"secure_sum('masked')", "VerticalClassifier.fit", "run_frames", "evaluate(labels=)"}


def outcome(name: str, one: Any, two: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        return FUNCTIONS[name](one, two)


def require_right_or_refused(name: str, one: pd.DataFrame, two: pd.DataFrame) -> None:
    refused: str = ""
    found: Any = None
    try:
        found = outcome(name, one, two)
    except REFUSALS as error:
        refused = str(error)
    if refused:
        assert re.search(WORDS, refused)
        return
    right = outcome(name, one, one)
    if name in SUMS:
        np.testing.assert_allclose(found, right, atol=1e-2)
    else:
        assert found == right


def cases() -> Iterator[tuple[str, str, str]]:
    for name in FUNCTIONS:
        cheap = name in SUMS
        for index in INDEXES if cheap else ("positions", "texts"):
            for change in CHANGES:
                if ("columns" not in change and "both" not in change) or name not in OWN_COLUMNS:
                    yield name, change, index


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("name", "change", "index"), list(cases()))
def test_frames_go_by_label_or_are_refused(name: str, change: str, index: str) -> None:
    one = frame(INDEXES[index])
    require_right_or_refused(name, one, CHANGES[change](one))


@pytest.mark.parametrize("change", BROKEN)
@pytest.mark.parametrize("name", [name for name in SUMS if name in FUNCTIONS])
def test_sums_of_other_labels_are_refused(name: str, change: str) -> None:
    one = frame(PEOPLE)
    with pytest.raises(LocalProtocolError, match="label"):
        outcome(name, one, BROKEN[change](one))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in SUMS])
def test_labels_of_people_twice_are_refused_or_nobody_goes_by_them(name: str) -> None:
    one = frame(PEOPLE)
    require_right_or_refused(name, one, BROKEN["people twice"](one))


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_frames_without_labels_of_their_own_are_taken(name: str) -> None:
    """Take what is right: what refused everything would pass above."""
    one = frame()
    outcome(name, one, one)


def test_a_sum_of_frames_is_a_frame_in_the_order_of_the_first() -> None:
    one = frame(PEOPLE)
    session = secure_sum("masked", ["a", "b"], to="x", clip=99)
    total = session({"a": one, "b": one.iloc[SHUFFLED]})
    pd.testing.assert_frame_equal(total, 2 * one, atol=1e-2)
    series = session({"a": one["age"], "b": one["age"].iloc[SHUFFLED]})
    pd.testing.assert_series_equal(series, 2 * one["age"], atol=1e-2)
    shuffled = pd.DataFrame(TABLE).iloc[
        SHUFFLED
    ]  # labelled by positions: the same as an array's rows
    mixed: dict[str, Any] = {"a": TABLE, "b": shuffled}
    assert np.allclose(session(mixed), 2 * TABLE, atol=1e-2)


@pytest.mark.parametrize("made", [pl.DataFrame, pa.table])
def test_frames_of_other_libraries_are_refused_with_what_to_give_instead(made: Any) -> None:
    given = made({"age": [1.0, 2.0], "rent": [3.0, 4.0]})
    session = secure_sum("masked", ["a", "b"], to="x", clip=99)
    with pytest.raises(LocalProtocolError, match=r"whose columns have names \(age, rent\); give a"):
        session({"a": given, "b": given})
    names = given.columns if made is pl.DataFrame else given.column_names
    columns = {name: given[name].to_numpy() for name in names}
    assert np.allclose(session({"a": columns, "b": columns})["rent"], [6, 8], atol=1e-2)


class Coordinates:
    """An array of xarray, which is no dependency, as far as it is looked at."""

    dims = ("row",)

    def __init__(self, labels: list[int]) -> None:
        self.indexes = {"row": labels} if labels else {}

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.ones(2, dtype)


def test_arrays_with_coordinates_are_refused_and_those_without_are_arrays() -> None:
    session = secure_sum("masked", ["a", "b"], to="x", clip=99)
    with pytest.raises(LocalProtocolError, match="a Coordinates with coordinates"):
        session({"a": Coordinates([1, 0]), "b": Coordinates([0, 1])})
    assert np.allclose(session({"a": Coordinates([]), "b": Coordinates([])}), 2, atol=1e-2)
