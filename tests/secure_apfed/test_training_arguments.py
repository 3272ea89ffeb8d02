"""What a caller of `train` gives as arguments: each works or is refused by the argument's name.

Advice in a sentence is followed here: what it says to write instead works.
"""

import functools
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from apfed_attacks.features.gradient_regression import GradientRegression
from apfed_attacks.interface import Guess, Prediction
from apfed_attacks.view import AttackError
from secure_apfed import Contrastive, FrozenGaussian, Reconstruction, load_model
from secure_apfed.config.file import load_config_text
from secure_apfed.errors import (
    ApfedError,
    ConfigError,
    DataError,
    FewRowsWarning,
    ModelError,
    SuspectColumnWarning,
)
from secure_apfed.interfaces.arguments import TRAIN_ARGUMENT_BY_PATH, translate_settings
from secure_apfed.interfaces.training import load_training_recording, train
from secure_apfed.interfaces.training_result import TrainingResult
from secure_apfed.settings.data import DataSettings
from tests.secure_apfed.test_training import (
    IDS,
    LABELS,
    QUICK,
    ROWS,
    N,
    make_active,
    make_passive,
)


def run(active: Any = None, passive: Any = None, **call: Any) -> TrainingResult:
    passives = [passive or make_passive(), make_passive("b")]
    return train(active or make_active(), passives, **{**QUICK, **call})


def frame(rows: Tensor = ROWS[:, 4:], **more: Any) -> pd.DataFrame:
    return pd.DataFrame(rows.numpy(), columns=[*"abcd"]).assign(**more)


VALUES: Mapping[str, Any] = {
    "labelled": 30,
    "test_fraction": 0.5,
    "limit": 20,
    "overlap": 0.5,
    "missing": "mean",
    "parties": {"lab": {"missing": "mean"}},
    "active": "clinic",
    "dataset": "digits",
}
WORKING = {"classes", "positive", "split"}


@pytest.mark.parametrize("key", sorted(set(DataSettings.model_fields) - WORKING))
def test_a_setting_of_data_that_cannot_apply_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"data=\{{'{key}': .*; \w"):
        run(data={key: VALUES.get(key, 3)})


@pytest.mark.parametrize(
    ("advised", "tested", "labelled"),
    [({"test_fraction": 0.5}, 60, 60), ({"labelled": 30}, 30, 30)],
)
def test_the_arguments_named_in_place_of_data_work(
    advised: dict[str, Any], tested: int, labelled: int
) -> None:
    with pytest.raises(ConfigError, match=f"say {next(iter(advised))}="):
        run(data=advised)
    result = run(**advised)
    assert len(result.test_rows) == tested
    assert result.run.trained is not None
    assert len(result.run.trained.labelled_rows) == labelled


def test_settings_of_data_that_apply_work(tmp_path: Any) -> None:
    given = {"classes": [1, 0], "split": "at_random"}
    parties = make_active(), [make_passive(), make_passive("b")]
    result = train(*parties, **QUICK, data=given, folder=tmp_path / "run")
    assert result.classes == (1, 0)
    assert run(data={"positive": 0}).classes == (1, 0)
    recording = load_training_recording(tmp_path / "run", *parties)
    assert recording.data.classes == ("1", "0")
    assert torch.equal(recording.data.test_rows, result.test_rows)
    with pytest.raises(DataError, match="lie outside data="):
        run(data={"classes": ["a", "b"]})


@pytest.mark.filterwarnings("ignore::secure_apfed.errors.SuspectColumnWarning")
def test_a_warning_of_few_test_rows_names_an_argument_that_helps() -> None:
    with pytest.warns(FewRowsWarning, match=r"raise test_fraction=, or"):
        run(test_fraction=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FewRowsWarning)
        run(test_fraction=0.5)


@pytest.mark.parametrize("way", ["mean", "drop"])
@pytest.mark.parametrize("who", ["clinic", "lab"])
def test_empty_cells_are_filled_or_dropped_as_advised(who: str, way: str) -> None:
    rows = frame(ROWS[:, :4] if who == "clinic" else ROWS[:, 4:])
    rows.iloc[3, 2] = math.nan

    def make(**missing: Any) -> dict[str, Any]:
        if who == "clinic":
            return {"active": make_active(rows=rows, **missing)}
        return {"passive": make_passive(rows=rows, **missing)}

    with pytest.raises(
        DataError, match=rf"{who}: empty cells in c \(1\).*missing='{way}' at {who}"
    ):
        run(**make())
    result = run(**make(missing=way))
    common = N - 1 if way == "drop" else N
    assert result.common == common
    assert f"people that all parties know: {common} of the active's " in result.report
    if who == "clinic":
        assert result.own_people == common
        assert (3 in result.test_rows) <= (way == "mean")


def test_missing_is_refused_for_what_has_no_columns() -> None:
    with pytest.raises(ConfigError, match="lab: missing='mean' is of a frame's columns"):
        run(passive=make_passive(missing="mean"))
    with pytest.raises(ConfigError, match="lab: missing='zero': expected one of error, mean, drop"):
        run(passive=make_passive(rows=frame(), missing="zero"))


SHUFFLED = IDS[::-1]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("what", ["rows", "labels"])
def test_an_index_of_ids_in_another_order_is_refused(what: str, half: bool) -> None:
    index = [*SHUFFLED[: N // 2], *(f"other-{n}" for n in range(N // 2))] if half else SHUFFLED
    labels = pd.Series(LABELS.numpy(), index=index)
    rows = frame(ROWS[:, :4]).set_axis(index, axis=0)
    given = {"rows": rows} if what == "rows" else {"labels": labels}
    with pytest.raises(DataError, match=rf"clinic: the index of its {what} .* give ids={what}.ind"):
        run(make_active(**given))
    run(make_active(**{what: given[what].reset_index(drop=True)}))
    if not half:
        run(make_active(**{what: given[what].loc[IDS]}))


def test_an_index_of_numbers_counts_rows_unless_it_has_the_ids() -> None:
    numbers = list(range(5, N + 5))
    others: dict[str, Any] = {"ids": numbers}
    active = make_active(ids=numbers, rows=frame(ROWS[:, :4]))
    train(active, [make_passive(**others), make_passive("b", **others)], **QUICK)
    active = make_active(ids=numbers, rows=frame(ROWS[:, :4]).set_axis(numbers[::-1], axis=0))
    with pytest.raises(DataError, match="clinic: the index of its rows holds 120 of its IDs"):
        train(active, [make_passive(**others), make_passive("b", **others)], **QUICK)


WORDS = ["ill" if label else "well" for label in LABELS]
UNCLEAR: Mapping[str, tuple[list[Any], str]] = {
    "two cases": (["Ill", *WORDS[1:]], "spells one label in several ways"),
    "two kinds": ([-1, *WORDS[1:]], r"texts and numbers: .*-1 \(1 rows\)"),
}


@pytest.mark.parametrize("head", [None, nn.Linear(6, 3)])
@pytest.mark.parametrize("case", UNCLEAR)
def test_labels_in_several_ways_are_refused(case: str, head: Any) -> None:
    labels, message = UNCLEAR[case]
    with pytest.raises(DataError, match=rf"clinic: .*{message}"):
        run(make_active(labels=labels, head=head))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([*["nan"] * 40, *WORDS[40:]], "'nan' .* give None in their place"),
        ([*[-1] * 40, *LABELS[40:].tolist()], r"if -1 stands .*\[None if label == -1 else label"),
    ],
)
def test_labels_that_may_stand_for_none_are_warned_of(labels: list[Any], message: str) -> None:
    with pytest.warns(SuspectColumnWarning, match=message):
        assert len(run(make_active(labels=labels, head=None)).classes) == 3
    mark = labels[0]
    known = [None if label == mark else label for label in labels]
    assert len(run(make_active(labels=known, head=None)).classes) == 2
    with (
        pytest.warns(SuspectColumnWarning),
        pytest.raises(ModelError, match=r"classes .*well|-1, 0"),
    ):
        run(make_active(labels=labels))


@pytest.mark.parametrize("kind", ["numbers", "texts"])
def test_a_column_that_is_the_label_is_warned_of(kind: str) -> None:
    copy = LABELS.numpy() if kind == "numbers" else WORDS
    rows = frame(ROWS[:, :4], outcome=copy)
    with pytest.warns(SuspectColumnWarning, match="column 'outcome' alone tells .*rows.drop"):
        run(make_active(rows=rows, encoder=None, head=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SuspectColumnWarning)
        run(make_active(rows=rows.drop(columns=["outcome"])))


@pytest.mark.parametrize("whose", ["all", "clinic"])
def test_a_rate_reaches_an_optimizer_that_takes_one(whose: str) -> None:
    encoder = nn.Linear(4, 6)
    before = encoder.weight.detach().clone()
    own = {"optimizer": torch.optim.AdamW}
    active = make_active(encoder=encoder, **(own if whose == "clinic" else {}))
    run(active, train={"learning_rate": 0.5}, **(own if whose == "all" else {}))
    assert float((encoder.weight.detach() - before).abs().max()) > 0.3


@pytest.mark.parametrize("key", ["learning_rate", "weight_decay", "momentum"])
@pytest.mark.parametrize("make", ["partial", "function"])
def test_a_rate_that_would_be_ignored_is_refused(make: str, key: str) -> None:
    rates: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.1}
    optimizers: Mapping[str, Any] = {
        "partial": functools.partial(torch.optim.SGD, **rates),
        "function": lambda parameters: torch.optim.SGD(parameters, **rates),
    }
    with pytest.raises(ConfigError, match=rf"optimizer= .*train=\{{'{key}': 0.2\}}.*partial"):
        run(optimizer=optimizers[make], train={key: 0.2})
    run(optimizer=optimizers[make])


TWICE: Mapping[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"train": {"epochs": 3}}, r"epochs=1 and train=\{'epochs': 3\}"),
    "rows of a step": ({"train": {"batch_size": 8}}, r"batch_size=40 and train="),
    "optimizer": ({"optimizer": "sgd", "train": {"optimizer": "adam"}}, "optimizer='sgd' and"),
    "delta": (
        {"guard": FrozenGaussian(epsilon=8, delta=1e-3), "delta": 1e-6},
        r"delta=1e-06 and guard=FrozenGaussian\(delta=0.001\)",
    ),
    "network": ({"model": {"network": "mlp"}}, "clinic brings its own encoder=Sequential"),
    "representation": ({"model": {"representation": 3}}, "clinic brings its own encoder"),
    "dropout": ({"model": {"dropout": 0.1}}, "clinic brings its own head=Linear"),
}


@pytest.mark.parametrize("case", TWICE)
def test_two_ways_of_one_setting_are_refused(case: str) -> None:
    call, message = TWICE[case]
    with pytest.raises(ConfigError, match=message):
        run(**call)


def test_settings_of_built_in_networks_are_refused_where_none_is_left() -> None:
    own = [make_passive(name, loss=Reconstruction(decoder=nn.Linear(2, 4))) for name in "ab"]
    call = {**QUICK, "model": {"projection": 2, "hidden": [9]}}
    with pytest.raises(ConfigError, match=r"model=\{'hidden': \[9\]\} is of a built-in network"):
        train(make_active(), own, **call)
    run(**call)  # the passives' decoders have these layers


def test_a_report_gives_delta_and_counts_of_common_people() -> None:
    guard = FrozenGaussian(epsilon=8, delta=1e-4)
    result = run(guard=guard)
    assert "epsilon_x, one row's releases: epsilon 8 at delta 0.0001" in result.report
    assert result.common == N == len(result.run.recording.alignment["clinic"])


def test_a_small_overlap_is_warned_of() -> None:
    others = [*IDS[:12], *(f"other-{number}" for number in range(N - 12))]
    with pytest.warns(FewRowsWarning, match=r"12 of its 120 people are known to all .*\(lab 12, b"):
        result = run(passive=make_passive(ids=others))
    assert result.common == 12
    assert "people that all parties know: 12 of the active's 120" in result.report


def test_a_report_says_that_nobody_helped() -> None:
    result = train(make_active(), [], **{**QUICK, "method": "apfed"})
    assert "nobody helped: no passive was handed in" in result.report
    assert result.common is None


@pytest.mark.parametrize("inputs", [["x"], ["h"]])
def test_a_report_says_whether_help_is_in_the_model(inputs: list[str]) -> None:
    labels = [label if place < 40 else None for place, label in enumerate(LABELS.tolist())]
    result = run(
        make_active(labels=labels), train={"labels": "after", "local_models": inputs}, epochs=1
    )
    wanted = {"x": "help is not in the model: .* of x", "h": "help is in the model: .* of h"}
    lines = result.report.splitlines()
    assert any(re.match(wanted[inputs[0]], line) for line in lines)


PLACES: Mapping[str, tuple[dict[str, Any], str]] = {
    "of a guard": (
        {"guard": FrozenGaussian(epsilon=0)},
        r"^guard=FrozenGaussian\(epsilon=0\): expected a number > 0, got 0$",
    ),
    "delta of a guard": ({"guard": FrozenGaussian(epsilon=8, delta=0)}, r"^guard=.*\(delta=0\)"),
    "in a section": ({"train": {"momentum": 3}}, r"^train=\{'momentum': 3\}: expected"),
    "deep in a section": (
        {"secure_sum": {"scheme": "plain", "noise": {"epsilon": 0}}},
        r"^secure_sum=\{'noise': \{'epsilon': 0\}\}: expected",
    ),
    "an argument": ({"epochs": 0}, r"^epochs=0: expected a number >= 1, got 0$"),
    "of all parties": ({"model": {"projection": 0}}, r"^model=\{'projection': 0\}: [^\n]*$"),
    "a method": ({"method": "apfedc"}, r"^method='apfedc': 'apfedc' is unknown; did you mean"),
    "an intersection": ({"alignment": "psi"}, "^alignment='psi': "),
    "labelled rows": ({"labelled": -1}, "^labelled=-1: expected"),
    "too few": ({"labelled": 1}, "^labelled=: 1 labelled rows are wanted"),
    "a name beside": ({"optimiser": "adam"}, r"did you mean optimizer=...\?"),
    "another name beside": ({"epoch": 2}, r"did you mean epochs=...\?"),
    "a key beside": ({"weight_decays": 2}, r"did you mean train=\{'weight_decay': ...\}\?"),
    "a section beside": ({"trian": {}}, r"did you mean train=...\?"),
    "labels beside": ({"labels": "after"}, r"say train=\{'labels': 'after'\}"),
    "a class of attacks": ({"attacks": [Reconstruction]}, r"attacks=\['secure_apfed.interfaces.pa"),
    "code of a file": ({"attacks": ["mine.py:Mine"]}, "named without .py: write mine:"),
    "a name of no module": ({"attacks": ["json:Decoder"]}, "has no 'Decoder'; it has .*loads"),
    "a method of one loss": (
        {"method": "apfed_c"},
        r"Passive\('lab', loss=...\): .* or loss=Contrastive\(\) at every passive",
    ),
    "resuming": ({"resume": True, "folder": "no-such-run"}, "without resume=True"),
}


@pytest.mark.parametrize("case", PLACES)
def test_what_is_refused_is_named_as_it_was_given(
    case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, message = PLACES[case]
    with pytest.raises(ApfedError, match=message):
        run(**call)


def test_passives_given_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="what a passive has is said by the passive itself"):
        train(make_active(), [make_passive()], passives={"lab": {"weight": 2}})  # type: ignore[arg-type, misc]


def test_a_key_above_its_section_is_put_right() -> None:
    for text in ("momentum: 0.5", "labels: after"):
        key = text.partition(":")[0]
        line = "name: one\nmethod: apfed_r\ndata: {dataset: digits}\nguard: {mechanism: none}\n"
        with pytest.raises(ConfigError, match=rf"is written train: \{{{text}\}}"):
            load_config_text(f"{line}{text}\n")
        config = load_config_text(f"{line}train: {{{text}}}\nsecure_sum: {{clip: 1.0}}\n")
        assert str(getattr(config.train, key)) in text


SENTENCES: Mapping[str, str] = {
    "raise data.test_fraction, or add rows": "raise test_fraction=, or add rows",
    "lower train.learning_rate.": "lower train={'learning_rate': ...}.",
    "say model.projection: 6, or": "say model={'projection': 6}, or",
    "say data.parties.lab.ignore: [a, b]": "leave it out, as rows.drop(columns=['a', 'b'])",
    "accept by secure_sum: {clip: null}": "accept by secure_sum={'clip': None}",
    "passives.lab.weight": "Passive('lab', weight=...)",
    "there is model.json, and train.py": "there is model.json, and train.py",
}


@pytest.mark.parametrize("text", SENTENCES)
def test_settings_in_sentences_become_arguments(text: str) -> None:
    assert translate_settings(text, TRAIN_ARGUMENT_BY_PATH) == SENTENCES[text]


def test_rows_and_ids_of_other_kinds_are_refused() -> None:
    with pytest.raises(DataError, match=r"clinic: its rows are a list of lists.*numpy.array\(rows"):
        run(make_active(rows=ROWS[:, :4].tolist()))
    with pytest.raises(DataError, match=r"lab: its IDs are the text 'id'; .*frame\['id'\]"):
        run(passive=make_passive(ids="id"))
    with pytest.raises(DataError, match=r"clinic: its IDs are the text 'id'"):
        run(make_active(ids="id"))
    with pytest.raises(DataError, match=r"clinic: its IDs is of type NoneType"):
        run(make_active(ids=None))


class Doubles(nn.Module):
    """A network that computes in double precision whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6).double()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.double())


def test_double_precision_and_rates_that_diverge_are_advised() -> None:
    with pytest.raises(ModelError, match=r"Double.*train=\{'precision': 'float64'\}"):
        run(make_active(encoder=Doubles()))
    run(make_active(encoder=Doubles()), train={"precision": "float64"})
    with pytest.raises(ApfedError, match=r"lower train=\{'learning_rate': ...\}"):
        run(train={"learning_rate": 1e7}, epochs=10)


def test_a_decoder_of_another_width_is_told_its_width() -> None:
    loss = Reconstruction(decoder=nn.Linear(2, 5))
    with pytest.raises(ModelError, match=r"lab: .*end a decoder of your own in 4 numbers"):
        run(passive=make_passive(loss=loss))


def test_predictions_take_rows_as_training_does(tmp_path: Any) -> None:
    rows = frame(ROWS[:, :4], kind=["u", "v"] * (N // 2))
    active = make_active(rows=rows, labels=WORDS, encoder=nn.Linear(6, 6))
    result = run(active, folder=tmp_path / "frame")
    shares = result.predict_proba(rows[:7])
    assert shares.shape == (7, 2)
    assert set(result.predict(rows[:7])) <= {"ill", "well"}
    local_models = load_model(tmp_path / "frame", encoder=nn.Linear(6, 6), head=nn.Linear(6, 2))
    assert np.allclose(local_models.predict(rows[:7]), shares)
    plain = run()
    arrays = plain.predict_proba(ROWS[:7, :4].numpy())
    for same in (ROWS[:7, :4], ROWS[:7, :4].tolist()):
        assert np.allclose(plain.predict_proba(same), arrays)
    assert np.allclose(plain.model(ROWS[:7, :4]).softmax(1).detach(), arrays)
    with pytest.raises(ModelError, match=r"reads rows of shape \(4,\), got \(5,\)"):
        plain.predict(ROWS[:7, :5])
    with pytest.raises(ModelError, match=r"got ndarray; give .* ask result\.predict"):
        plain.model(ROWS[:7, :4].numpy())
    with pytest.raises(DataError, match=r"got a frame; give frame.to_numpy\(\)"):
        plain.predict(rows)
    with pytest.raises(DataError, match=r"rows of numbers of one length; give numpy.array"):
        plain.predict([[1.0], [1.0, 2.0]])


def test_texts_in_a_frame_raise_no_warning_of_pandas() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        run(passive=make_passive(rows=frame(kind=["u", "v"] * (N // 2))))


class Planted(GradientRegression):
    """An attack whose guess is spoilt."""

    def run(self, view: Any, seed: int) -> Any:
        guess = super().run(view, seed)
        spoilt = {
            name: replace(one, values=self.spoil(one.values)) for name, one in guess.attacks.items()
        }
        return replace(guess, attacks=spoilt)

    def spoil(self, values: Any) -> Any:
        return values


class OneColumn(Planted):
    name: ClassVar[str] = "one_column"

    def spoil(self, values: Any) -> Any:
        return values[:, :1]


class NotNumbers(Planted):
    name: ClassVar[str] = "not_numbers"

    def spoil(self, values: Any) -> Any:
        return values * np.nan


class Constant(Planted):
    name: ClassVar[str] = "constant"

    def run(self, view: Any, seed: int) -> Any:
        known = view.knowledge.shadow.positions
        ones = Prediction(np.ones((len(known), 4)))
        return Guess(positions=known, attacks={"a": ones}, baselines={"b": ones})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            OneColumn,
            r"OneColumn: one_column, .*expected values of shape \(\d+, 4\), got \(\d+, 1\)",
        ),
        (NotNumbers, r"NotNumbers: not_numbers, .*\d+ of its values of shape \(\d+, 4\) are NaN"),
        (Constant, r"Constant: constant guesses \d+ rows that the adversary knew"),
    ],
)
def test_a_guess_that_cannot_be_scored_is_an_error_of_its_attack(kind: Any, message: str) -> None:
    with pytest.raises(AttackError, match=f"attacks: {__name__}:{message}"):
        run(attacks=[{"name": f"{__name__}:{kind.__name__}", "options": {"shadow_rows": 30}}])


def test_contrastive_passives_are_taken_by_the_method_of_that_name() -> None:
    passives = [make_passive(loss=Contrastive()), make_passive("b", loss=Contrastive())]
    assert train(make_active(), passives, **QUICK, method="apfed_c").common == N
