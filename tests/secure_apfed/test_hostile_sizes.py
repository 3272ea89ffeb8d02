"""Sizes that somebody else chose are refused by arithmetic, before memory is taken for them."""

import itertools
import json
import os
import resource
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from apfed_protocols.errors import ApfedError, RemoteProtocolError
from apfed_protocols.products import SumOfProducts
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.psi.interface import ResumableIntersection
from secure_apfed import planning
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.data.encoding import ImageEncoding
from secure_apfed.errors import ConfigError, DataError, ModelError
from secure_apfed.exchange import Kind
from secure_apfed.exchange.agreement import Greeting
from secure_apfed.exchange.codec import TensorSpec, unpack_tensors
from secure_apfed.exchange.envelope import Envelope
from secure_apfed.learning import release
from secure_apfed.methods import METHODS, votes_encrypted
from secure_apfed.networks.models import NETWORKS, Projection
from secure_apfed.networks.objectives import Clustering, contrastive_loss
from secure_apfed.planning.forecast import forecast
from secure_apfed.settings import (
    EACH_ALONE,
    ClusteringSettings,
    ModelSettings,
    RunSettings,
    Settings,
)
from secure_apfed.settings.data import TableShape
from secure_apfed.settings.training import MAX_PARAMETERS
from tests.contracts.product_parties import agreement
from tests.memory import trace_memory
from tests.secure_apfed.small_runs import small_config

RUN = (
    "{name: late, method: apfed_r, data: {dataset: tables, active: bank, parties: "
    "{bank: {}, shop: {}, clinic: {}}}, guard: {mechanism: none}, secure_sum: {scheme: plain, "
    "masks: pairwise}, train: {epochs: 2, batch_size: 32}}"
)
WIDE = 65_536
# What a proposal says, and a word of the sentence that refuses it.
REFUSED: dict[str, tuple[str, str]] = {
    "64 wide layers": (f"model.hidden={[WIDE] * 64}", "parameters, expected"),
    "a wide head": (f"model.head={[WIDE] * 64}", "parameters, expected"),
    "too many layers": (f"model.hidden={[1] * 65}", "at most 64 entries"),
    "a wider layer": (f"model.hidden=[{WIDE + 1}]", "<= 65536"),
    "a wide passive": (f"passives={{default: {{model: {{hidden: {[WIDE] * 9}}}}}}}", "parameters"),
    "long sequences": (f"model.sequences={[[WIDE, WIDE]] * 64}", "parameters, expected"),
    "many waves": (
        f"model={{network: cross_view, random_features: {WIDE}, representation: {WIDE}}}",
        "parameters, expected",
    ),
    "many clients": ("data={dataset: digits, partition: horizontal, clients: 1000000000}", "1024"),
    "many views": ("data={dataset: digits, views: 1000000000}", "1024"),
    "many joint layers": (f"method={{name: apc_vfl, joint: {[WIDE + 1]}}}", "<= 65536"),
    "a wide teacher": (
        f"method={{name: joint_teacher_sum, model: {{hidden: {[WIDE] * 9}}}}}",
        "parameters",
    ),
    "large blocks": ("method={name: vfedtrans, mask_rows: 1000000}", "<= 8192"),
    "many candidates": ("method={name: votes_encrypted, candidates: 1000000}", "<= 1024"),
    "many clusters": (
        "passives={default: {objective: {name: clustering, clusters: 1000000}}}",
        "<= 4096",
    ),
    "many restarts": ("rules.restarts=1000000", "<= 10000"),
    "many bits": ("secure_sum.bits=64", "<= 24"),
    "many IDs": ("alignment.maximum_ids=4294967296", "< 4.29497e+09"),
    **{
        f"many IDs by {name}": (
            f"alignment={{protocol: {name}, maximum_ids: 4294967295}}",
            "more than 16 GiB; say",
        )
        for name, kind in SET_INTERSECTIONS.items()
        if not issubclass(kind, ResumableIntersection)
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_size_is_refused_where_settings_are_read(case: str) -> None:
    override, why = REFUSED[case]
    with pytest.raises(ConfigError) as raised:
        load_config_text(RUN, overrides=[override])
    assert why in str(raised.value)


@pytest.mark.parametrize("network", ["mlp", "selu", "enriched", "linear", "random_features"])
def test_no_encoder_is_built_for_columns_beyond_the_bound(network: str) -> None:
    settings = ModelSettings.model_validate(
        {"network": network, "hidden": (512,), "random_features": 512}
    )
    with pytest.raises(ModelError, match="parameters, expected"):
        NETWORKS[network].make_encoder((MAX_PARAMETERS // 16,), settings)


@pytest.mark.parametrize("network", ["mlp", "selu", "enriched", "linear", "identity"])
def test_no_head_or_decoder_is_built_beyond_the_bound(network: str) -> None:
    settings = ModelSettings.model_validate({"network": network, "hidden": (512,)})
    with pytest.raises(ModelError, match="parameters, expected"):
        NETWORKS[network].make_decoder((2**24,), (2**10,), settings)
    with pytest.raises(ModelError, match="parameters, expected"):
        NETWORKS[network].make_head(2**24, 2**16, settings)


def test_no_code_is_built_beyond_the_bound() -> None:
    with pytest.raises(ModelError, match="parameters, expected"):
        Projection(2**20, 2**10)


SHAPES: dict[str, dict[str, int]] = {
    "columns": {"rows": 1000, "features": 2**20},
    "rows": {"rows": 2**32, "features": 10},
    "both": {"rows": 2**32, "features": 2**20},
    "classes": {"rows": 3 * 10**7, "features": 10**4, "labelled": 1000, "classes": 2**16},
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("method", ["apfed_r", "votes", "split_nn"])
def test_a_declared_table_is_refused_before_it_is_made(method: str, case: str) -> None:
    config = load_config_text(RUN, overrides=[f"method={method}"])
    shapes = {"bank": TableShape(rows=100, features=2, labelled=50, classes=2)}
    shapes |= {
        "shop": TableShape.model_validate(SHAPES[case]),
        "clinic": TableShape(rows=100, features=2),
    }
    if case == "classes":
        shapes["bank"] = shapes.pop("shop")
    with pytest.raises(DataError, match=r"shop declared most|bank declared most"):
        forecast(config, dict(sorted(shapes.items())))


# Every number that a proposal carries, generated from the declarations of the settings.
HOSTILE = (2**16, 2**20, 2**31, 10**9)
LONGEST = 65
MiB = 2**20


@dataclass(frozen=True, kw_only=True)
class NumericKey:
    """A key of numbers, with what its section must say beside it.

    Attributes:
        path: names and places, from the top; beside: constants of the sections that it lies in.
        values: hostile ones.
    """

    path: tuple[str | int, ...]
    beside: tuple[tuple[tuple[str | int, ...], str], ...]
    values: tuple[Any, ...]

    @property
    def method(self) -> str:
        return next((value for path, value in self.beside if path[0] == "method"), "apfed_r")

    @property
    def title(self) -> str:
        names = [str(name) for name in self.path]
        return f"{'.'.join(names)} of {'/'.join(value for _, value in self.beside) or 'a run'}"


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value may have."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from alternatives(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from alternatives(part)
    else:
        yield annotation


def is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def hostile_values(kind: Any) -> Iterator[Any]:
    """Yield hostile values of a number, or of a tuple of numbers."""
    if kind in (int, float):
        yield from HOSTILE
    if typing.get_origin(kind) is not tuple:
        return
    first, *rest = typing.get_args(kind)
    for part in alternatives(first):
        for value in hostile_values(part):
            if Ellipsis in rest:
                yield from ([value], [value] * (LONGEST - 1), [value] * LONGEST)
            else:
                yield [value] * (1 + len(rest))


def sections_in(kind: Any, name: str) -> Iterator[tuple[Any, tuple[str | int, ...]]]:
    """Yield the settings that a type holds, and their place below it."""
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if is_settings(kind):
        yield kind, ()
    elif origin is dict:
        place = "default" if name == "passives" else "bank"
        yield from ((part, (place,)) for part in alternatives(parts[1]) if is_settings(part))
    elif origin is tuple:
        found = [part for one in parts for part in alternatives(one)]
        yield from ((part, (0,)) for part in found if is_settings(part))


def numeric_keys(
    kind: type[Settings], path: tuple[str | int, ...] = (), beside: Any = ()
) -> Iterator[NumericKey]:
    """Yield every key of numbers that all parties would hold."""
    fields = kind.model_fields
    alone = {
        name: typing.get_args(field.annotation)
        for name, field in fields.items()
        if typing.get_origin(field.annotation) is typing.Literal
    }
    constants = [((*path, name), value[0]) for name, value in alone.items() if len(value) == 1]
    beside = (*beside, *(each for each in constants if isinstance(each[1], str)))
    for name, field in fields.items():
        if EACH_ALONE in field.metadata and name not in ("dealer", "pairwise_overlaps"):
            continue
        here = (*path, name)
        if here == ("method",):
            for called, method in METHODS.items():
                chosen = (((*here, "name"), called),)
                yield from numeric_keys(method.settings, here, (*beside, *chosen))
            continue
        for part in alternatives(field.annotation):
            below = list(sections_in(part, name))
            for section, place in below:
                yield from numeric_keys(section, (*here, *place), beside)
            if not below and (values := tuple(hostile_values(part))):
                yield NumericKey(path=here, beside=tuple(dict.fromkeys(beside)), values=values)


KEYS = {key.title: key for key in numeric_keys(RunSettings)}


def base_of(method: str) -> dict[str, Any]:
    """Return settings of a small run of three own tables by this method."""
    settings = small_config(method).model_dump(mode="json", exclude_unset=True)
    parties: dict[str, Any] = {"bank": {}, "shop": {}, "clinic": {}}
    data: dict[str, Any] = {"dataset": "tables", "active": "bank", "parties": parties}
    if (
        METHODS[method].public_facts.has_passives
        and not METHODS[method].public_facts.needs_alignment
    ):
        data |= {"partition": "horizontal", "classes": ["no", "yes"]}
    settings["data"] = data
    if settings["model"].get("network") == "gru":
        settings["model"]["sequences"] = [[2, 3]]
    return settings


def set_key(settings: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set one key, and make the sections above it."""
    for name, after in pairwise(path):
        if isinstance(name, int):
            settings = settings[name]
            continue
        if not isinstance(settings.get(name), dict | list):
            settings[name] = [{}] if isinstance(after, int) else {}
        settings = settings[name]
    settings[path[-1]] = value


def settings_with(*chosen: tuple[NumericKey, Any]) -> dict[str, Any]:
    """Return a run of which these keys have these values."""
    settings = base_of(chosen[0][0].method)
    for key, value in chosen:
        for path, constant in key.beside:
            set_key(settings, path, constant)
        set_key(settings, key.path, value)
    return settings


def load_or_refuse(*chosen: tuple[NumericKey, Any]) -> Config | None:
    """Read a run, or None: it was refused, by a sentence that names one of the keys."""
    settings = settings_with(*chosen)
    why = ""
    config: Config | None = None
    try:
        config = Config.model_validate(json.loads(json.dumps(settings)), strict=False)
        config.collect_terms()
    except (ApfedError, ValidationError, ValueError) as error:
        why = str(error)
    if not why:
        return config
    names = [str(name) for key, _ in chosen for name in key.path if name not in (0, "default")]
    assert any(name in why for name in names), why
    return None


def run_in_child(work: Callable[[], Any], *, most_bytes: int = 3 * 2**30) -> tuple[Any, int]:
    """Return what a forked process gives that may take so much memory more, and what it took.

    Anything but an error of ours comes back as its name; a process that was killed as "killed".
    """
    torch.set_num_threads(1)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + most_bytes, taken + most_bytes))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            gave = work()
        except ApfedError as error:
            gave = f"refused: {error}"
        except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
            gave = f"{type(error).__name__}: {error}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writing, json.dumps([gave, 1024 * peak]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as lines:
        content = lines.read()
    os.waitpid(child, 0)
    gave, peak = json.loads(content) if content else ("killed", 0)
    return gave, int(peak)


def walk_reading(titles: Sequence[str]) -> dict[str, str]:
    """Read every hostile value of these keys; return what went wrong, by key and value."""
    wrong = {}
    for title in titles:
        for value in KEYS[title].values:
            try:
                load_or_refuse((KEYS[title], value))
            except Exception as error:  # noqa: BLE001 - named, and asserted to be none
                wrong[f"{title} = {str(value)[:40]}"] = f"{type(error).__name__}: {error}"[:200]
    return wrong


def test_the_walk_finds_the_keys_that_made_bombs() -> None:
    found = {".".join(map(str, key.path)) for key in KEYS.values()}
    assert found >= {
        "model.hidden",
        "model.sequences",
        "passives.default.model.hidden",
        "method.model.hidden",
        "passives.default.objective.clusters",
        "data.views",
        "train.batch_size",
        "method.mask_rows",
        "alignment.maximum_ids",
        "secure_sum.bits",
        "rules.spare_answers",
        "defences.0.keep",
    }
    assert len(KEYS) > 100


SAMPLED = [*KEYS][::7]


def test_reading_hostile_sizes_takes_no_memory() -> None:
    wrong, peak = run_in_child(lambda: walk_reading(SAMPLED))
    assert wrong == {}
    assert peak < 200 * MiB


@pytest.mark.slow
def test_reading_any_hostile_size_takes_no_memory() -> None:
    wrong, peak = run_in_child(lambda: walk_reading([*KEYS]))
    assert wrong == {}
    assert peak < 300 * MiB


def forecast_of(config: Config, **sizes: int) -> str:
    shapes = dict.fromkeys(("bank", "shop", "clinic"), TableShape(rows=200, features=6))
    shapes["bank"] = TableShape(rows=200, features=6, labelled=100, classes=2)
    if sizes:
        declared: dict[str, Any] = {"rows": 200, "features": 6, **sizes}
        shapes["shop"] = TableShape(**declared)
    forecast(config, shapes)
    return "forecast"


MAX_PEAK = 2**31
WIDTHS = (
    "model.hidden",
    "model.representation",
    "model.projection",
    "model.head",
    "model.random_features",
)
CODE = ((("method", "name"), "apfed_code"),)
PAIRS = [*itertools.combinations(WIDTHS, 2), *((each, "train.batch_size") for each in WIDTHS)]


def walk_pair(one: str, other: str) -> str:
    """Read a pair of which one multiplies the other, and forecast it if it is taken."""
    first, second = (
        next(key for key in KEYS.values() if ".".join(map(str, key.path)) == name)
        for name in (one, other)
    )
    largest = [2**16, [2**16]]
    chosen = [
        (key, largest[isinstance(key.values[0], list)] if key.path[0] == "model" else 10**9)
        for key in (first, second)
    ]
    if "model.random_features" in (one, other):
        chosen = [(replace(key, beside=CODE), value) for key, value in chosen]
    config = load_or_refuse(*chosen)
    return "not read" if config is None else forecast_of(config)


@pytest.mark.parametrize("pair", [WIDTHS[:2], (WIDTHS[1], WIDTHS[4])], ids=":".join)
def test_a_pair_that_multiplies_is_refused_or_small(pair: tuple[str, str]) -> None:
    gave, peak = run_in_child(lambda: walk_pair(*pair))
    assert gave == "not read" or gave.startswith("refused: "), gave
    assert peak < 200 * MiB


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=":".join)
def test_every_pair_that_multiplies_is_refused_or_small(pair: tuple[str, str]) -> None:
    gave, peak = run_in_child(lambda: walk_pair(*pair))
    assert gave in ("not read", "forecast") or gave.startswith("refused: "), gave
    assert peak < MAX_PEAK


@pytest.mark.slow
@pytest.mark.parametrize("title", KEYS)
def test_what_is_read_is_forecast_within_memory_or_refused(title: str) -> None:
    key = KEYS[title]
    configs = [config for value in key.values if (config := load_or_refuse((key, value)))]
    if not configs:
        return
    gave, peak = run_in_child(lambda: forecast_of(configs[-1]))
    assert gave == "forecast" or gave.startswith("refused: "), gave
    assert peak < MAX_PEAK


def test_networks_of_all_parties_are_counted_before_any_is_built() -> None:
    config = load_config_text(RUN, overrides=[f"model.hidden=[{WIDE}, 4000]"])
    gave, peak = run_in_child(lambda: forecast_of(config))
    assert "take narrower layers in model" in gave
    assert peak < 100 * MiB


def declare(rows: int, labelled: int = 100) -> dict[str, TableShape]:
    """Return shapes of three narrow tables with so many rows each."""
    shapes = {name: TableShape(rows=rows, features=6) for name in ("shop", "clinic")}
    bank = TableShape(rows=rows, features=6, labelled=labelled, classes=2)
    return {"bank": bank, **shapes}


@pytest.mark.parametrize("method", ["apfed_c", "{name: apfed}"])
def test_pairs_of_a_batch_are_counted_before_any_is_compared(method: str) -> None:
    contrasting = "passives={default: {objective: {name: contrastive}}}"
    overrides = [f"method={method}", *([contrasting] if "{" in method else [])]
    config = load_config_text(RUN, overrides=[*overrides, "train.batch_size=10000"])
    with pytest.raises(DataError, match=r"all 10,000 rows of a batch .* about 5\.2 GiB"):
        forecast(config, declare(10_000))


def test_a_forecast_tries_each_protocol_whatever_largest_set_is_agreed() -> None:
    config = load_config_text(RUN, overrides=["alignment.maximum_ids=4294967295"])
    tried = {cost.protocol for cost in forecast(config, declare(60, labelled=40)).intersections}
    assert tried >= {"ecdh", "ot", "vole", "opprf", "circuit"}


def compare_pairs(rows: int) -> str:
    """Take one step of a contrastive objective with its loss in the graph."""
    views = [torch.randn(rows, 4, requires_grad=True) for _ in range(2)]
    contrastive_loss(*views).backward()
    return "compared"


def test_what_pairs_of_a_batch_take_was_counted() -> None:
    gave, peak = run_in_child(lambda: compare_pairs(2000))
    assert gave == "compared"
    assert peak < planning.forecast._ROW_PAIR_BYTES * 2000**2


def test_the_spread_of_a_large_batch_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    z_BD = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    z_BD[7] = 0
    whole = release.compute_spread(z_BD)
    gave, peak = run_in_child(lambda: release.compute_spread(torch.ones(8_000, 2)))
    assert gave < 1e-6
    # Pages of PyTorch's library that the child is the first to touch count, too: up to 220 MB.
    assert peak < 500 * MiB, "all pairs take 770 MB"
    monkeypatch.setattr(release, "_MAX_PAIRS", 130)
    assert release.compute_spread(z_BD) == pytest.approx(whole, rel=1e-6)


def test_a_rehearsal_holds_no_more_encrypted_labels_than_fit() -> None:
    config = load_config_text(RUN, overrides=["method={name: votes_encrypted}"])
    known = {"classes": 2, "passives": 2}
    few, many = (
        planning.forecast._count_rehearsed_labels(
            config, labelled_count=labelled, class_count=2, passive_count=2
        )
        for labelled in (50, 4000)
    )
    each = config.method.count_label_bytes(config, labelled=4000, **known)
    assert few == 50
    assert 100 < many < 4000
    assert many * each <= 2**30
    assert load_config_text(RUN).method.count_label_bytes(config, labelled=9, **known) == 0


def test_a_passive_refuses_more_encrypted_labels_than_it_could_hold() -> None:
    agreed = agreement(people=5000, columns=64, labelled=4096, bits=24, candidates=20)
    with pytest.raises(RemoteProtocolError, match=r"bank asks about 4,096 .* fewer secure_sum"):
        votes_encrypted._require_memory("shop", "bank", SumOfProducts(agreed))
    votes_encrypted._require_memory("shop", "bank", SumOfProducts(agreement(labelled=4)))


def test_an_objective_holds_no_centres_beyond_the_bound() -> None:
    settings = ClusteringSettings(clusters=4096)
    with pytest.raises(ModelError, match="parameters, expected"):
        Clustering(settings, representation=(4,), features=(2**20,), model=ModelSettings())


# What a file or a message declares, beside what it holds.
DECLARED: dict[str, Callable[[], object]] = {
    "an image": lambda: ImageEncoding(channels=1, height=2**16, width=2**16, end_row=2**16),
    "a strip of an image": lambda: ImageEncoding(channels=2**31, height=1, width=1, end_row=1),
    "a tensor of a payload": lambda: unpack_tensors(
        b"\0\0\0\1\x80" + tensors_of({"x": declare_tensor([2**40], 2**42)}),
        {"x": TensorSpec(torch.float32, (None,))},
        sender="shop",
    ),
    "a tensor without numbers": lambda: unpack_tensors(
        b"\0\0\0\1\x80" + tensors_of({"x": declare_tensor([2**40, 0], 0)}),
        {"x": TensorSpec(torch.float32, (None,))},
        sender="shop",
    ),
    "metadata of a payload": lambda: unpack_tensors(b"\xff\xff\xff\xff\x80", {}, sender="shop"),
    "a list in metadata": lambda: unpack_tensors(
        b"\0\0\0\5\xdd\xff\xff\xff\xff", {}, sender="shop"
    ),
    "an envelope's header": lambda: Envelope.parse_header(b"\xdd\xff\xff\xff\xff"),
    "a greeting": lambda: Greeting.from_message(message(b"\xdd\xff\xff\xff\xff"), bytes(32)),
    "a greeting's text": lambda: Greeting.from_message(
        message(b"\x92\xdb\xff\xff\xff\xff"), bytes(32)
    ),
}


def declare_tensor(shape: list[int], end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}


def tensors_of(header: dict[str, Any]) -> bytes:
    """Return a safetensors file of a header alone."""
    told = json.dumps(header).encode()
    return len(told).to_bytes(8, "little") + told


def message(payload: bytes) -> Envelope:
    return Envelope(
        session="s",
        step=-1,
        kind=Kind.GREETING,
        sender="shop",
        receiver="bank",
        sequence=0,
        payload=payload,
    )


@pytest.mark.parametrize("case", DECLARED)
def test_what_is_declared_and_not_there_takes_no_memory(case: str) -> None:
    with (
        trace_memory() as peak,
        pytest.raises((RemoteProtocolError, ValidationError)) as raised,
    ):
        DECLARED[case]()
    assert peak() < MiB
    assert str(raised.value).isprintable() or isinstance(raised.value, ValidationError)
