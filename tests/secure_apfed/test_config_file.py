"""A run's YAML file becomes one frozen config, or an error that a person can act on."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config, load_config_text
from secure_apfed.config.plain_yaml import MAX_BYTES
from secure_apfed.errors import ConfigError
from secure_apfed.methods import method_settings
from secure_apfed.settings import suggest_name

GOOD = """\
name: small
method: apfed
data: {dataset: digits, views: 4}
guard: {mechanism: none}
passives:
  default: {objective: {name: contrastive, temperature: 1e-1}}
train:
  learning_rate: 1e-3
  epochs: 2
"""
LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 7)
)


def problems_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, source="run.yaml", overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize("more", ["", "attacks: all\n", "tradeoff: {set: {seed: 1}, seeds: 2}\n"])
def test_what_is_dumped_is_complete_and_loads_back(more: str) -> None:
    config = load_config_text(GOOD + more)
    text = dump_settings(config)
    assert load_config_text(text) == config
    assert all(f"{key}:" in text for key in Config.model_fields)


@pytest.mark.parametrize("text", ["1e-3", "yes", "null", "2024-01-01", "a: b", "3", "Zoë", "- x"])
def test_a_text_that_yaml_takes_for_something_else_loads_back(text: str) -> None:
    config = load_config_text(GOOD)
    data = config.data.model_copy(update={"label_column": text})
    dumped = dump_settings(config.model_copy(update={"data": data}))
    assert load_config_text(dumped).data.label_column == text


@pytest.mark.parametrize(
    ("more", "keeps"),
    [
        ("", "none"),
        ("attacks: all\n", "first_and_last"),
        ("tradeoff: {set: {seed: 1}, seeds: 2}\n", "first_and_last"),
        ("transcript: {keep: all}\n", "all"),
        ("attacks: all\ntranscript: {keep: none}\n", "none"),
    ],
)
def test_payloads_are_kept_where_attacks_will_read_them(more: str, keeps: str) -> None:
    assert load_config_text(GOOD + more).effective_transcript.keep == keeps


PATIENT = "  epochs: 2\n  patience: 3\ndp_sgd: {epsilon: 1}"
NAMED = "bank: {file: b.csv}, x/../../victim: {file: c.csv}"
NON = "one of 'auto', 'none', got 'non'; did you mean 'none'?"
OTHER = (
    "expected one of 'reconstruction', 'contrastive', 'clustering', 'own', "
    "'black_box', got 'contrastve'; did you mean 'contrastive'?"
)
REFUSED: tuple[tuple[str, str], ...] = (
    (GOOD + "trian: {}", "10: trian: is an unknown key; did you mean 'train'?"),
    (GOOD + "  epoch: 3", "10: train.epoch: is an unknown key; did you mean 'epochs'?"),
    (
        GOOD.replace("temperature", "temprature"),
        "6: passives.default.objective.temprature: is an unknown key; did you mean 'temperature'",
    ),
    (
        GOOD.replace("method: apfed", "method:\n  name: votes\n  epsilom: 4"),
        "4: method.epsilom: is an unknown key; did you mean 'epsilon'? Known here: e",
    ),
    (
        GOOD + "attacks:\n- {name: a, option: 1}",
        "11: attacks.0.option: is an unknown key; did you mean 'options'?",
    ),
    (GOOD + "'2024-01-01': 1\n", "10: 2024-01-01: is an unknown key"),
    *(
        (f"{GOOD}  {text}", f"10: train.{message}")
        for text, message in (
            ("batch_size: many", "batch_size: expected a whole number, got 'many'"),
            ("batch_size: true", "batch_size: expected a whole number, got true"),
            ("batch_size: 8.5", "batch_size: expected a whole number, got 8.5"),
            ("batch_size: 1", "batch_size: expected a number >= 2, got 1"),
            ("momentum: 1", "momentum: expected a number < 1, got 1"),
            ("momentum: .nan", "momentum: expected a finite number, got nan"),
            ("weight_decay: -1e-4", "weight_decay: expected a number >= 0, got -0.0001"),
            ("use_unaligned: 'yes'", "use_unaligned: expected true or false, got 'yes'"),
            ("device: cdua", "device: expected auto, cpu, cuda or one GPU, as cuda:1; got"),
        )
    ),
    (GOOD + "model: {projection: non}", f"10: model.projection: expected a whole number or {NON}"),
    (GOOD.replace("contrastive", "contrastve"), f"6: passives.default.objective.name: {OTHER}"),
    (GOOD.replace("  epochs: 2", PATIENT), "10: train.patience: when training ends would tell"),
    (
        GOOD.replace("data: {dataset: digits, views: 4}", "data:\n  views: 9\n  labelled: 20"),
        "4: data.views: an image of digits has 8 rows, fewer than 9 views",
    ),
    (
        GOOD.replace("data: {dataset: digits, views: 4}", f"data:\n  parties: {{{NAMED}}}"),
        "4: data.parties: expected a name of 1 to 64 letters",
    ),
    ("", " is empty"),
    ("# nothing\n", " is empty"),
    ("- a\n- b", " expected settings as 'key: value' lines, got a list"),
    ("hello", " expected settings as 'key: value' lines, got the value 'hello'"),
    ("name: x\na: [", "2: is not YAML"),
    ("name: \x00", " is not YAML"),
    ("name: !!python/object/apply:os.getcwd []", "1: the tag tag:yaml.org,2002:python/"),
    ("a: &a [*a]", "1: aliases, as *a, are not read"),
    ("data: {views: 2,\n views: 3}", "2: data.views: is given twice, first in line 1"),
)


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_problem_is_told_by_its_line_and_key(text: str, message: str) -> None:
    assert problems_of(text).startswith(f"run.yaml:{message}")


@pytest.mark.parametrize("key", ["name", "method", "data", "guard"])
def test_a_key_without_a_default_must_be_there(key: str) -> None:
    rest = "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(key))
    assert problems_of(rest) == f"run.yaml: {key}: is missing; it has no default"


def test_all_problems_are_told_in_the_order_of_the_file() -> None:
    told = problems_of(GOOD.replace("epochs: 2", "epochs: 0").replace("views: 4", "views: one"))
    assert [line.split(": ")[1] for line in told.splitlines()] == ["data.views", "train.epochs"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "image.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"not text in UTF-8 \(byte 6\)"):
        load_config(tmp_path / "image.yaml")
    large = tmp_path / "run.yaml"
    large.write_text(GOOD + "#" * MAX_BYTES)
    with pytest.raises(ConfigError, match=rf"{large}: is larger than .* bytes; expected"):
        load_config(large)
    with pytest.raises(ConfigError, match=r"/dev/zero: is larger than .* bytes; expected"):
        load_config(Path("/dev/zero"))


def test_overrides_replace_add_and_reach_into_lists() -> None:
    text = GOOD + "attacks: [{name: first}]"
    overrides = ["train.epochs=3", "passives.shop.weight=.5", "attacks.0.name=second", "seed=7"]
    config = load_config_text(text, overrides=overrides)
    assert config.train.epochs == 3
    assert config.train.learning_rate == 0.001
    assert config.passives["shop"].weight == 0.5
    assert config.attacks[0].name == "second"
    assert config.seed == 7
    voting = load_config_text(text.replace("apfed", "votes"), overrides=["method.epsilon=4"])
    assert voting.method == method_settings({"name": "votes", "epsilon": 4.0})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs", "--set train.epochs: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("train..epochs=3", "--set train..epochs=3: expected key=value"),
        ("train.epochs=[", "--set train.epochs=[: the value '[' is not YAML"),
        ("train.epochs=few", "--set: train.epochs: expected a whole number, got 'few'"),
        ("train={epochs: few}", "--set: train.epochs: expected a whole number, got 'few'"),
        ("trian.epochs=3", "--set: trian: is an unknown key; did you mean 'train'?"),
        ("method.epsilon=3", "--set: method.epsilon: is an unknown key. Known here: name"),
        ("name.first=3", "--set name.first=3: there is no 'first' to set in 'small'"),
    ],
)
def test_a_wrong_override_says_so(override: str, message: str) -> None:
    assert problems_of(GOOD, override).startswith(message)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (LAUGHS, "run.yaml:2"),
        (GOOD + "defences: &d [*d]\n", "run.yaml:10"),
        (GOOD + "base: &b {x: 1}\nmore: {<<: *b}\n", "run.yaml:11"),
    ],
    ids=["laughs", "a list of itself", "a merge"],
)
def test_aliases_are_refused(text: str, place: str) -> None:
    assert problems_of(text).startswith(f"{place}: aliases")


def test_aliases_of_an_override_are_refused() -> None:
    assert "aliases" in problems_of(GOOD, "data=[&a [x], *a]")


@pytest.mark.parametrize(
    "key", ["2024-01-01", "!!binary aGk=", "1.5", "yes", "~", "<<", "? [a, b]\n"]
)
def test_a_key_that_is_no_text_is_refused(key: str) -> None:
    told = problems_of(GOOD + f"{key}: {{}}\n")
    assert told.startswith("run.yaml:10: ")
    assert "keys are texts" in told
    assert "quotes" in told


@pytest.mark.parametrize(
    "number",
    ["9" * 200_000, "0x" + "f" * 200_000, "1" + ":1" * 100_000 + ".5"],
    ids=["decimal", "hexadecimal", "sexagesimal"],
)
def test_a_number_too_long_to_read_is_refused(number: str) -> None:
    assert "run.yaml:2: a number of" in problems_of(f"name: x\nseed: {number}\n")


def test_a_date_and_no_number_are_no_seed() -> None:
    assert "seed" in problems_of(GOOD + "seed: 2024-01-01\n")
    assert problems_of(GOOD + "seed: .nan\n").startswith("run.yaml:10: seed: ")


@pytest.mark.parametrize(
    "tag", ["!!binary aGk=", "!!set {a, b}", "!!omap [a: b]", "!mine x", "!!python/name:os.x"]
)
def test_a_tag_is_refused(tag: str) -> None:
    assert "run.yaml:10: the tag " in problems_of(GOOD + f"seed: {tag}\n")


@pytest.mark.parametrize("text", ["[", "a: ", "- ", "{a: "])
def test_deep_nesting_is_refused(text: str) -> None:
    assert "is not YAML" in problems_of(text * 5_000)


def test_a_file_of_unknown_keys_is_refused_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(f"k{number}: 1" for number in range(5_000))
    look_for = Mock(wraps=suggest_name)
    monkeypatch.setattr("secure_apfed.config.file.suggest_name", look_for)
    lines = problems_of(text).splitlines()
    assert 0 < look_for.call_count <= 100
    assert len(lines) == 101
    assert "k0: is an unknown key" in "".join(lines)
    assert lines[-1] == "run.yaml: has more problems than these 100; mend them first"
