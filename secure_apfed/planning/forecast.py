"""The forecast of a run: rows, bytes, time and epsilon before anything is sent.

Run by: a person, before parties spend hours or privacy budget. The data are loaded to count rows
and read shapes. Then a rehearsal measures traffic and time: a few steps of the whole protocol, with
keys, alignment and sums, on random numbers of the same shapes. Its costs are scaled up to the run.
No real value enters, so no budget is spent. The cost of each set intersection protocol is measured
on a part of the IDs.

Letters: N rows, B rows of a batch, D numbers of a representation.
"""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.conversation import Conversation, Outgoing, converse
from apfed_protocols.psi import SET_INTERSECTIONS
from secure_apfed.alignment import canonical_ids, make_intersection
from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.base.phases import PhaseName
from secure_apfed.base.transfers import StepLoss
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.data.catalogue import labels_are_numbers
from secure_apfed.data.encoding import ColumnEncoding, View
from secure_apfed.data.labels import TargetScale
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.exchange import Flow, Kind
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.exchange.transcript import MAX_CONTRIBUTION_BYTES, count_free_megabytes
from secure_apfed.learning.black_box import describe_black_boxes
from secure_apfed.learning.own_code import UserFunctions
from secure_apfed.methods import METHODS, Simulation, SimulationInputs, train_epochs
from secure_apfed.methods.alignment import require_labels
from secure_apfed.methods.terms import (
    count_batches,
    count_rehearsed_rows,
    derive_limits,
    estimate_growth,
    find_objective,
    find_training_rows,
    plan_releases,
)
from secure_apfed.networks.models import limit_threads_for
from secure_apfed.networks.rank import count_columns, describe_opened_numbers
from secure_apfed.privacy.accountants import EXACT, GaussianRelease, compose_mu, gdp_epsilon
from secure_apfed.privacy.dp_sgd import calibrate_updates
from secure_apfed.privacy.guard import make_guard
from secure_apfed.privacy.ledger import PrivacyLedger, PrivacySpent
from secure_apfed.privacy.randomised_response import make_label_mechanism
from secure_apfed.settings import (
    BlackBoxSettings,
    ContrastiveSettings,
    ModelSettings,
    Settings,
    TranscriptSettings,
)
from secure_apfed.settings.data import OWN_TABLES, TableShape
from secure_apfed.settings.promises import Promise, list_guarantees

# Warnings are given above these limits.
_MANY_NUMBERS = 1024  # numbers that are sent for a row in each step
_LARGE_EPSILON = 10.0
# Limits on the memory of a forecast, in bytes.
_MAX_FORECAST_BYTES = 2**31  # of declared tables in a rehearsal
_MAX_NETWORK_BYTES = 2**31  # of all parties' networks
_MAX_LABEL_BYTES = 2**30  # of encrypted labels in a rehearsal
# If all declared tables have more rows, fewer rows are planned, and costs are multiplied.
_MAX_PLANNED_ROWS = 10**6
# Messages that do not grow with the number of rows.
_SETUP_KINDS = (Kind.GREETING, Kind.SESSION, Kind.SIGNATURE, Kind.SUM_SETUP, Kind.READY)
# Costs of a memory-mapped table, measured at 10 million rows.
_PROCESS_BYTES = 400 * 2**20  # memory of the process without the table
_MAPPED_ROW_BYTES = 200  # memory of a row, at the peak
_MAPPED_CELL_BYTES = 12  # disk of a number: in its column, and as a feature
_MAPPED_ID_BYTES = 80  # disk of an ID: its text, its digest and its position
_READ_CELL_S = 8e-7  # seconds of reading a cell
# Memory of a rehearsal, in bytes.
_ID_BYTES = 150  # of an ID, in each of two lists
_COLUMN_BYTES = 1500  # of a column's description
_NUMBER_BYTES = 4  # of a value
# Of a parameter: itself, its gradient, the two moments of Adam, and copies of a step and of the
# stored weights; 26 were measured.
_PARAMETER_BYTES = 28
_ROW_PAIR_BYTES = (
    56  # of two rows of a batch in a contrastive loss, in both views; 48 were measured
)
# Copies of a number that is sent: at both ends, masked, and in the record.
_COPIES_SENT = 4
# Messages whose payloads a transcript stores.
_STORED_KINDS = (Kind.REQUEST, Kind.REPRESENTATIONS, Kind.GRADIENTS, Kind.SUM, Kind.CONTRIBUTION)
_DECODED_SUMS = "sums as the active decoded them"
# A fact about a method -> the addend of each passive in its secure sums, for warnings.
_ADDEND_BY_FACT = {
    "gradients are summed": "gradient",
    "representations are summed": "representation",
    "projections are summed": "projection",
    "passives vote": "row of votes",
    "pseudo-labels are averaged": "passive's pseudo-labels",
    "weights are averaged": "passive's weights",
}
STEPS = 5
"""Number of steps of a rehearsal."""
# For methods that send each row only once, a second rehearsal has this many times more rows.
_LONG_REHEARSAL_FACTOR = 8
_TEST_ROWS = 200  # largest number of test rows of a rehearsal
_MIN_ROWS = 4  # smallest number of rows of a group in a rehearsal
_APERIODIC_LABEL_STEP = (
    0.618  # the golden ratio, whose multiples are spread evenly without a period
)
_SAMPLED_IDS = 2000  # IDs of each party in a measured intersection
_SAMPLED_IDS_BY_PROTOCOL = {
    "circuit_ot": 200
}  # the same for protocols that take milliseconds for each ID
_DEALER = "dealer"
_Route: TypeAlias = tuple[str, str]
"""A sender and a receiver."""

# Protocols that need an extra package -> a protocol with the same messages, measured in its place.
_PROTOCOL_OF_SAME_COST = {"circuit_crypten": "circuit"}


@dataclass(frozen=True, kw_only=True)
class TrafficForecast:
    """The approximate messages and bytes of one kind from one party to another in the whole run."""

    sender: str
    receiver: str
    kind: str
    messages: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True)
class TableCost:
    """The approximate memory and disk that a party's mapped table takes, in bytes.

    Attributes:
        party: the party's name.
        rows: rows of its table.
        memory_bytes: upper estimate for the party's process, including pages of the mapped files.
        disk_bytes: upper estimate for temporary files and the alignment, in addition to the table.
    """

    party: str
    rows: int
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected costs of a run; bytes and seconds are estimates.

    Attributes:
        rows: party -> rows of its table.
        aligned_rows: rows of the active's table that are aligned with the passives'.
        train_rows, test_rows: numbers of the active's rows.
        labelled_rows: rows whose labels the active learns from.
        teaching_rows: rows from which it would learn if all had a label.
        steps: number of training steps.
        numbers_per_row: numbers sent for each row in each step.
        wire_bytes: bytes on all links.
        links: messages and bytes by sender, receiver and kind.
        seconds: phase -> time on this machine with all parties in one process; some phases are
            missing.
        seconds_per_step: time of one training step.
        figure: name of the epsilon that covers what leaves the active, a key of
            `promises.MEANING_BY_EPSILON`.
        epsilon_x: epsilon of the representations at the end; infinite without a guard (the
            mechanism that clips them and adds noise), 0 if the active trains alone.
        epsilon_y, epsilon_model: epsilon of one training label, and of one record; infinite without
            a guarantee.
        delta: the probability that epsilon_x does not hold.
        releases: T, the number of times that one row is to be released.
        promises: the privacy guarantees that follow from these epsilons.
        epsilon_passives: passive that adds noise -> the privacy cost of one person there.
        figure_passives: kind of the epsilon that covers the messages to which passives add noise.
        delta_passives: delta of this epsilon; None: passives add no noise.
        releases_passives: the number of times that one person at a passive is to be released; None:
            passives add no noise.
        intersections: costs of each set intersection protocol.
        warnings: sentences for the user.
        tables: costs of memory-mapped tables; empty if all tables are small.
    """

    rows: Mapping[str, int]
    aligned_rows: int
    train_rows: int
    labelled_rows: int
    teaching_rows: int
    test_rows: int
    steps: int
    numbers_per_row: int
    wire_bytes: int
    links: tuple[TrafficForecast, ...]
    seconds: Mapping[PhaseName, float]
    seconds_per_step: float
    figure: str
    epsilon_x: float
    epsilon_y: float
    epsilon_model: float
    delta: float
    releases: int
    promises: tuple[Promise, ...]
    epsilon_passives: Mapping[str, float]
    figure_passives: str
    delta_passives: float | None
    releases_passives: int | None
    intersections: tuple["IntersectionCost", ...]
    warnings: tuple[str, ...]
    tables: tuple[TableCost, ...] = ()


def _find_common_rows(config: Config, data: VerticalData) -> Tensor:
    """Return the active's rows of people that all passives know.

    In pairwise alignment these are the rows of people that at least one passive knows.
    """
    id_hashes_N = _digest_ids(data.active)
    is_known_MN = np.array([np.isin(id_hashes_N, _digest_ids(table)) for table in data.passives])
    is_pairwise = config.alignment.mode == "pairwise"
    is_common_N = is_known_MN.any(axis=0) if is_pairwise else is_known_MN.all(axis=0)
    return torch.from_numpy(np.flatnonzero(is_common_N))


def _digest_ids(table: PartyTable) -> NDArray[np.int64]:
    """Return a hash of 64 bits of each ID, (N,).

    IDs of a table on disk are read one after another, and so are never all in memory.
    """
    return np.fromiter(map(hash, table.ids), np.int64, count=len(table.ids))


def _require_memory(config: Config, shapes: Mapping[str, TableShape]) -> None:
    """Raise DataError if a rehearsal of declared tables would not fit into memory.

    Only numbers are computed, so that another party's declaration cannot exhaust this machine. The
    error names the party that declared most, and what to change.

    `shapes`: shapes of the parties' own tables, the active's first.
    """
    active_row_count = next(iter(shapes.values())).rows
    if config.method.averaged_quantity:
        trained_row_count = active_row_count * STEPS
    else:
        trained_row_count = min(config.train.batch_size, active_row_count) * STEPS
        if config.method.has_single_exchange:
            trained_row_count *= _LONG_REHEARSAL_FACTOR
    rehearsal_row_count = trained_row_count + _TEST_ROWS
    layer_width = max(map(_count_widths, _iter_models(config)))
    bytes_per_column = _COLUMN_BYTES + rehearsal_row_count * _NUMBER_BYTES
    bytes_by_party = {}
    for name, shape in shapes.items():
        column_count = shape.features + (shape.classes or 0) + layer_width
        bytes_by_party[name] = shape.rows * _ID_BYTES + column_count * bytes_per_column
    needed_bytes = sum(bytes_by_party.values())
    if needed_bytes > _MAX_FORECAST_BYTES:
        name = max(bytes_by_party, key=bytes_by_party.__getitem__)
        limit_gib = _MAX_FORECAST_BYTES / 2**30
        shape = shapes[name]
        raise DataError(
            f"a forecast of these tables would take about {needed_bytes / 2**30:,.1f} GiB, "
            f"expected {limit_gib:g} GiB at most; {name} declared most, {shape.rows:,} rows of "
            f"{shape.features:,} features: ask {name} whether that is right, or take smaller "
            "batches (train.batch_size) or networks (model)"
        )
    passives = list(shapes)[1:]
    if _is_contrastive(config, passives):
        _require_pair_memory(min(config.train.batch_size, active_row_count))


def _require_pair_memory(batch_size: int) -> None:
    """Raise DataError if a contrastive loss on this number of rows would not fit into memory."""
    pair_bytes = _ROW_PAIR_BYTES * batch_size**2
    if pair_bytes > _MAX_FORECAST_BYTES:
        raise DataError(
            f"a contrastive objective compares all {batch_size:,} rows of a batch with each other "
            f"and would take about {pair_bytes / 2**30:,.1f} GiB, expected "
            f"{_MAX_FORECAST_BYTES / 2**30:g} GiB at most; take smaller batches (train.batch_size)"
        )


def _is_contrastive(config: Config, passives: Sequence[str]) -> bool:
    """Return whether a passive has a contrastive loss, which compares every two rows of a batch."""
    if not config.method.has_gradient_sum:
        return False
    return any(isinstance(find_objective(config, name), ContrastiveSettings) for name in passives)


def _count_rehearsed_labels(
    config: Config, *, labelled_count: int, class_count: int, passive_count: int
) -> int:
    """Return the number of labelled rows of a rehearsal, so that encrypted labels fit into memory.

    `labelled_count`: labelled rows of the run. `class_count`, `passive_count`: number of classes,
    and of passives.
    """
    bytes_per_label = config.method.count_label_bytes(
        config, labelled=labelled_count, classes=class_count, passives=passive_count
    )
    if not bytes_per_label:
        return labelled_count
    return min(labelled_count, max(_MIN_ROWS, _MAX_LABEL_BYTES // bytes_per_label))


def _iter_models(settings: Settings) -> Iterator[ModelSettings]:
    """Yield the settings of every network that are nested in these settings, at any depth."""
    if isinstance(settings, ModelSettings):
        yield settings
        return
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        inner_values = value.values() if isinstance(value, Mapping) else (value,)
        for inner in inner_values:
            if isinstance(inner, Settings):
                yield from _iter_models(inner)


def _count_widths(model: ModelSettings) -> int:
    """Return the number of values that a network computes for a row, over all layers.

    Values that are sent count once for each of their copies.
    """
    uses_random_features = model.network in ("random_features", "cross_view")
    random_features = model.random_features if uses_random_features else 0
    projection = model.projection if isinstance(model.projection, int) else 0
    layers = sum((*model.hidden, *model.head, random_features, model.representation_size))
    return layers + _COPIES_SENT * projection


def _require_bounded_networks(config: Config, feature_counts: Sequence[int]) -> None:
    """Raise DataError if the networks of all parties would not fit into memory.

    Only numbers are computed, before any network is made. The error names the sizes to change.

    `feature_counts`: number of features of each party; empty if they are not known yet.
    """
    parameter_count = config.method.count_further_parameters(max(1, len(feature_counts) - 1))
    for model in _iter_models(config):
        first_width = (*model.hidden, model.representation_size)[0]
        if model.network in ("random_features", "cross_view"):
            first_width = model.random_features
        later_layers = model.min_parameter_count * max(1, len(feature_counts))
        # Twice: for an encoder, and for a decoder that mirrors it.
        parameter_count += 2 * (later_layers + first_width * sum(feature_counts))
    needed_bytes = parameter_count * _PARAMETER_BYTES
    if needed_bytes > _MAX_NETWORK_BYTES:
        raise DataError(
            f"the networks of all parties would have about {parameter_count:,} parameters, and a "
            f"forecast would take about {needed_bytes / 2**30:,.1f} GiB for them, expected "
            f"{_MAX_NETWORK_BYTES / 2**30:g} GiB at most; take narrower layers in model (hidden, "
            "head, representation, random_features, sequences), also under passives and method"
        )


def _make_empty_data(config: Config, shapes: Mapping[str, TableShape]) -> VerticalData:
    """Return tables of zeros with these shapes.

    All parties have the same people, or different people if the partition is horizontal.

    `shapes`: shapes of the parties' tables, the active's first.
    """
    active_shape = next(iter(shapes.values()))
    class_count = 2 if active_shape.classes is None else active_shape.classes
    active, *passives = (
        _make_empty_table(config, name, shape, class_count) for name, shape in shapes.items()
    )
    # The common people are the first rows. Test rows are spread over all rows, so that some of
    # both kinds are common.
    tests_so_far = (torch.arange(active_shape.rows) * config.data.test_fraction).floor()
    is_test = tests_so_far.diff(prepend=torch.tensor([0.0])) > 0
    train_rows = is_test.logical_not().nonzero().flatten()
    labelled_count = len(train_rows) if active_shape.labelled is None else active_shape.labelled
    return VerticalData(
        table=active,
        passives=tuple(passives),
        classes=tuple(map(str, range(class_count))),
        train_rows=train_rows,
        test_rows=is_test.nonzero().flatten(),
        labelled=train_rows[:labelled_count],
        labels_at=config.data.labels_at,
        is_horizontal=config.data.is_horizontal,
        targets=TargetScale(mean=0.0, scale=1.0) if labels_are_numbers(config.data) else None,
    )


def _make_empty_table(config: Config, name: str, shape: TableShape, class_count: int) -> PartyTable:
    """Return one party's table of zeros, with labels of all classes if it has labels.

    The rows are one expanded row, which takes no memory.

    `name`: the party. `shape`: the declared shape. `class_count`: number of the active's classes.
    """
    is_horizontal = config.data.is_horizontal
    # In a horizontal partition each party has people of its own, and the same columns as all.
    ids = tuple(f"{name} {row}" if is_horizontal else str(row) for row in range(shape.rows))
    view_name = "all" if is_horizontal else name
    labels_N = None
    if config.data.has_labels(name):
        label_dtype = torch.float32 if labels_are_numbers(config.data) else torch.int64
        labels_N = _make_aperiodic_labels(shape.rows, class_count).to(label_dtype)
    return PartyTable(
        name,
        ids,
        torch.zeros(1, shape.features).expand(shape.rows, -1),
        labels_N,
        ColumnEncoding.for_numeric_columns([str(index) for index in range(shape.features)]),
        {view_name: View(0, shape.features)},
    )


def _make_aperiodic_labels(row_count: int, class_count: int) -> Tensor:
    """Return labels (N,) of all classes, int64, without a period.

    So rows at equal distances, such as every tenth row, have labels of all classes, too.
    """
    return (torch.arange(row_count) * _APERIODIC_LABEL_STEP).long() % max(1, class_count)


def forecast(
    config: Config,
    shapes: Mapping[str, TableShape] | None = None,
    *,
    time_baselines: Callable[[VerticalData], float] | None = None,
) -> Forecast:
    """Return the forecast of a run; raise the errors that would stop the run itself.

    If all tables are declared with more than `_MAX_PLANNED_ROWS` rows, a run of fewer rows is
    planned, and its costs are multiplied.

    Args:
        config: settings of the run.
        shapes: declared shapes of the parties' own tables, the active's first; None: the tables are
            read. Tables of a built-in set are always read.
        time_baselines: function from the data to the seconds that local baselines take; None: their
            time is not forecast.
    """
    if shapes is None or config.data.dataset != OWN_TABLES:
        return _forecast_tables(config, None, time_baselines=time_baselines)
    fewest_rows = min(shape.rows for shape in shapes.values())
    row_factor = max(1.0, fewest_rows / _MAX_PLANNED_ROWS)
    smaller_shapes = {name: _shrink_shape(shape, row_factor) for name, shape in shapes.items()}
    forecast_of_smaller = _forecast_tables(config, smaller_shapes, time_baselines=time_baselines)
    return (
        forecast_of_smaller
        if row_factor == 1
        else _multiply_costs(forecast_of_smaller, config, shapes, row_factor)
    )


def _shrink_shape(shape: TableShape, factor: float) -> TableShape:
    """Return a table's shape with the number of rows divided by this factor."""
    if factor == 1:
        return shape
    labelled_count = (
        None if shape.labelled is None else max(_MIN_ROWS, round(shape.labelled / factor))
    )
    row_count = round(shape.rows / factor)
    return shape.model_copy(update={"rows": row_count, "labelled": labelled_count})


def _multiply_costs(
    forecast_of_smaller: Forecast,
    config: Config,
    shapes: Mapping[str, TableShape],
    row_factor: float,
) -> Forecast:
    """Return the forecast of large tables, from a forecast of tables with fewer rows.

    Rows, bytes and times are multiplied. Privacy costs stay: they are of one row.

    Args:
        forecast_of_smaller: the forecast of the tables with fewer rows.
        config: settings of the run.
        shapes: shapes of the real tables, the active's first.
        row_factor: the number by which rows were divided.
    """
    multiply = partial(_multiply_count, factor=row_factor)
    active_shape = next(iter(shapes.values()))
    labelled_count = multiply(forecast_of_smaller.labelled_rows)
    max_labelled_count = (
        active_shape.rows if active_shape.labelled is None else active_shape.labelled
    )
    links = tuple(
        link
        if link.kind in _SETUP_KINDS
        else replace(link, messages=multiply(link.messages), wire_bytes=multiply(link.wire_bytes))
        for link in forecast_of_smaller.links
    )
    seconds = {
        phase: seconds * row_factor for phase, seconds in forecast_of_smaller.seconds.items()
    }
    seconds["read"] = _READ_CELL_S * sum(shape.rows * shape.features for shape in shapes.values())
    return replace(
        forecast_of_smaller,
        rows={name: shape.rows for name, shape in shapes.items()},
        aligned_rows=multiply(forecast_of_smaller.aligned_rows),
        train_rows=multiply(forecast_of_smaller.train_rows),
        labelled_rows=min(labelled_count, max_labelled_count),
        teaching_rows=multiply(forecast_of_smaller.teaching_rows),
        test_rows=multiply(forecast_of_smaller.test_rows),
        steps=multiply(forecast_of_smaller.steps),
        wire_bytes=sum(link.wire_bytes for link in links),
        links=links,
        seconds=seconds,
        intersections=tuple(
            replace(cost, wire_bytes=multiply(cost.wire_bytes), seconds=cost.seconds * row_factor)
            for cost in forecast_of_smaller.intersections
        ),
        warnings=(*forecast_of_smaller.warnings, *_warn_of_id_limit(config, shapes)),
        tables=tuple(_estimate_table(name, shape) for name, shape in shapes.items()),
    )


def _multiply_count(count: float, *, factor: float) -> int:
    """Return a count of rows, steps, messages or bytes times this factor, rounded."""
    return round(count * factor)


def _warn_of_id_limit(config: Config, shapes: Mapping[str, TableShape]) -> Iterator[str]:
    """Yield a warning if parties have more rows than the alignment takes IDs."""
    max_id_count = config.alignment.maximum_ids
    too_large_parties = [name for name, shape in shapes.items() if shape.rows > max_id_count]
    if too_large_parties and config.method.needs_alignment:
        yield (
            f"{', '.join(too_large_parties)}: more rows than alignment.maximum_ids "
            f"({max_id_count:,}); raise it at all parties"
        )


def _estimate_table(name: str, shape: TableShape) -> TableCost:
    """Return the memory and disk that a memory-mapped table takes.

    `name`: the party. `shape`: shape of its table.
    """
    cells = shape.rows * shape.features
    return TableCost(
        party=name,
        rows=shape.rows,
        memory_bytes=_PROCESS_BYTES + shape.rows * _MAPPED_ROW_BYTES,
        disk_bytes=cells * _MAPPED_CELL_BYTES + shape.rows * _MAPPED_ID_BYTES,
    )


def _forecast_tables(
    config: Config,
    shapes: Mapping[str, TableShape] | None,
    *,
    time_baselines: Callable[[VerticalData], float] | None,
) -> Forecast:
    """Return the forecast for tables that are read, or for tables of zeros of declared shapes.

    Args:
        config: settings of the run.
        shapes: declared shapes of the parties' own tables, the active's first; None: the tables are
            read.
        time_baselines: function from the data to the seconds that local baselines take; None: their
            time is not forecast.
    """
    start_time = time.perf_counter()
    data = _load_planned_data(config, shapes)
    read_seconds = time.perf_counter() - start_time
    data.compare_ids(make_id_rules(config.alignment).normalise_text)
    plan = _plan_training(config, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the forecast itself lists unsafe choices
        agreed_config = _apply_agreed_numbers(config, data, shapes)
        scaled_rehearsal = _rehearse_training(config, agreed_config, data, plan)
        privacy = _compute_privacy(config)
    rehearsal = scaled_rehearsal.rehearsal
    do_passives_add_noise = config.method.find_noise(config) is not None
    releases = derive_limits(config).releases
    cost_by_passive = _forecast_passive_costs(config, rehearsal.ledger_by_passive, releases)
    traffic = tuple(
        _scale_traffic(
            scaled_rehearsal, data, fixed_bytes_by_route=_count_fixed_bytes(config, data)
        )
    )
    intersections = _measure_intersection_costs(config, data)
    seconds: dict[PhaseName, float] = {
        "read": read_seconds,
        "align": _find_alignment_seconds(config, intersections),
        "train": plan.steps * scaled_rehearsal.step_seconds
        + _forecast_evaluation_seconds(config, rehearsal, test_row_count=len(data.test_rows)),
    }
    if time_baselines is not None:
        seconds["baselines"] = time_baselines(data)
    black_box_warnings = describe_black_boxes(_list_black_boxes(config, data))
    return Forecast(
        rows={table.name: len(table.ids) for table in data.tables},
        aligned_rows=plan.aligned_rows,
        train_rows=plan.train_rows,
        labelled_rows=plan.labelled_rows,
        teaching_rows=plan.teaching_rows,
        test_rows=len(data.test_rows),
        steps=plan.steps,
        numbers_per_row=rehearsal.numbers_per_row,
        wire_bytes=sum(link.wire_bytes for link in traffic),
        links=traffic,
        seconds=seconds,
        seconds_per_step=scaled_rehearsal.step_seconds,
        figure=config.method.epsilon_name,
        epsilon_x=privacy.epsilon_x,
        epsilon_y=privacy.epsilon_y,
        epsilon_model=privacy.epsilon_model,
        delta=privacy.delta,
        releases=privacy.releases,
        figure_passives=config.method.passives_epsilon_name,
        promises=list_guarantees(config, privacy, spent_by_passive=cost_by_passive),
        epsilon_passives={name: cost["epsilon"] for name, cost in cost_by_passive.items()},
        delta_passives=config.delta if do_passives_add_noise else None,
        releases_passives=releases if do_passives_add_noise else None,
        intersections=intersections,
        warnings=(
            *_find_warnings(config, rehearsal, traffic, privacy.epsilon_x, len(data.passives)),
            *_warn_of_linear_numbers(agreed_config, data, shapes),
            *(f"{description}; its time is not rehearsed" for description in black_box_warnings),
        ),
    )


def _forecast_passive_costs(
    config: Config, ledger_by_passive: Mapping[str, PrivacyLedger], releases: int
) -> dict[str, dict[str, Any]]:
    """Return the privacy cost of one person at each passive that adds noise, by passive.

    `ledger_by_passive`: the passives' ledgers in the rehearsal. `releases`: the number of times
    that one person is to be released.
    """
    return {
        name: {
            "figure": config.method.passives_epsilon_name,
            "epsilon": ledger.would_cost(releases),
            "delta": config.delta,
            "releases": releases,
        }
        for name, ledger in ledger_by_passive.items()
    }


def _find_alignment_seconds(config: Config, intersections: Sequence["IntersectionCost"]) -> float:
    """Return the seconds of the intersection protocol that the settings choose; 0 if none ran."""
    chosen_protocol = config.alignment.selected_protocol
    measured_protocol = _PROTOCOL_OF_SAME_COST.get(chosen_protocol, chosen_protocol)
    return sum(cost.seconds for cost in intersections if cost.protocol == measured_protocol)


def _forecast_evaluation_seconds(
    config: Config, rehearsal: "_Rehearsal", *, test_row_count: int
) -> float:
    """Return the seconds of all evaluations of the run, from one evaluation of the rehearsal.

    `test_row_count`: test rows of the run; the rehearsal has fewer.
    """
    evaluation_count = math.ceil(config.train.epochs / config.train.evaluate_every)
    test_row_factor = test_row_count / len(rehearsal.data.test_rows)
    return evaluation_count * rehearsal.evaluation_seconds * test_row_factor


def _load_planned_data(config: Config, shapes: Mapping[str, TableShape] | None) -> VerticalData:
    """Return the tables of a forecast: read, or of zeros if the shapes of own tables are declared.

    Raises DataError: tables or networks would not fit into memory.
    """
    if shapes is not None and config.data.dataset == OWN_TABLES:
        _require_memory(config, shapes)
        _require_bounded_networks(config, [shape.features for shape in shapes.values()])
        return _make_empty_data(config, shapes)
    _require_bounded_networks(config, [])
    return load_data(config.data, seed=config.seed)


@dataclass(frozen=True, kw_only=True)
class _TrainingPlan:
    """The numbers of rows and steps of a run.

    Attributes:
        train_rows: rows that are trained on.
        aligned_rows: rows of the active's table that are aligned with the passives'.
        aligned_share: share of the training rows that are aligned.
        labelled_rows: rows whose labels the active learns from.
        teaching_rows: rows from which it would learn if all had a label.
        steps: number of training steps.
    """

    train_rows: int
    aligned_rows: int
    aligned_share: float
    labelled_rows: int
    teaching_rows: int
    steps: int


def _plan_training(config: Config, data: VerticalData) -> _TrainingPlan:
    """Return the numbers of rows and steps of a run.

    Raises ConfigError: there are no rows or labels to train on.
    """
    method = METHODS[config.method.name]
    own_data = data.select_party(data.active.name)
    assert own_data is not None  # a simulation has all parties' tables
    common_rows = _find_common_rows(config, data)
    require_labels(method, config, own_data, common_rows)
    labelled_rows = len(method.find_learnt_labels(config, own_data, common_rows))
    teaching_rows = len(
        method.find_learnt_labels(config, replace(own_data, labelled=None), common_rows)
    )
    train_rows, aligned_share, aligned_rows = find_training_rows(config, own_data, common_rows)
    if len(train_rows) < 2:
        raise ConfigError("there is no row to train on: the intersection holds no training row")
    stages = make_label_mechanism(config.labels, classes=len(data.classes)).stages
    return _TrainingPlan(
        train_rows=len(train_rows),
        aligned_rows=aligned_rows,
        aligned_share=aligned_share,
        labelled_rows=labelled_rows,
        teaching_rows=teaching_rows,
        steps=count_batches(config, len(train_rows), stage_count=stages),
    )


@dataclass(frozen=True, kw_only=True)
class _ScaledRehearsal:
    """A rehearsal, with the factors by which the run is larger.

    Attributes:
        rehearsal: the traffic and time of a few steps.
        step_seconds: time of one training step of the run.
        message_factor, byte_factor: factors on the number of training messages, and on their bytes.
        label_byte_factor: further factor on the bytes of encrypted labels.
    """

    rehearsal: "_Rehearsal"
    step_seconds: float
    message_factor: float
    byte_factor: float
    label_byte_factor: float


def _rehearse_training(
    config: Config, agreed_config: Config, data: VerticalData, plan: _TrainingPlan
) -> _ScaledRehearsal:
    """Rehearse a few steps of the run, and return them with the factors by which the run is larger.

    Args:
        config: settings of the run.
        agreed_config: the same with the layer sizes that the parties would agree on.
        data: the real tables, or tables of their shapes.
        plan: numbers of rows and steps of the run.
    """
    batch_size = count_rehearsed_rows(
        config, plan.train_rows, aligned_share=plan.aligned_share, step_count=STEPS
    )
    rehearsed_steps = STEPS
    if not (config.method.has_single_exchange or config.method.averaged_quantity):
        # All steps are alike, so no more are rehearsed than the run has.
        rehearsed_steps = min(STEPS, max(2, plan.steps))
    message_factor, byte_factor = estimate_growth(
        config,
        step_ratio=plan.steps / rehearsed_steps,
        row_ratio=plan.train_rows / (batch_size * rehearsed_steps),
    )
    rehearsed_labels = _count_rehearsed_labels(
        config,
        labelled_count=plan.labelled_rows,
        class_count=len(data.classes),
        passive_count=len(data.passives),
    )
    label_byte_factor = plan.labelled_rows / max(1, rehearsed_labels)
    rehearse = partial(
        _rehearse,
        agreed_config,
        data,
        batch_size=batch_size,
        aligned_share=plan.aligned_share,
        labelled_count=rehearsed_labels,
    )
    rehearsal = rehearse(rehearsed_steps)
    step_seconds = _forecast_step_seconds(config, rehearsal, rehearse, step_count=plan.steps)
    return _ScaledRehearsal(
        rehearsal=rehearsal,
        # Where a rehearsal has fewer encrypted labels than the run, its steps are shorter, too.
        step_seconds=label_byte_factor * step_seconds,
        message_factor=message_factor,
        byte_factor=byte_factor,
        label_byte_factor=label_byte_factor,
    )


def _forecast_step_seconds(
    config: Config,
    rehearsal: "_Rehearsal",
    rehearse: Callable[[int], "_Rehearsal"],
    *,
    step_count: int,
) -> float:
    """Return the seconds of one training step of the run.

    Usually this is the time of a rehearsed step. A method that sends each row only once has costs
    that do not depend on the number of rows. They are found by a second, longer rehearsal, and
    divided by the steps of the run.

    Args:
        config: settings of the run.
        rehearsal: the rehearsal of `STEPS` steps.
        rehearse: function that rehearses a number of steps.
        step_count: number of steps of the run.
    """
    step_seconds = rehearsal.step_seconds
    longer_step_count = _LONG_REHEARSAL_FACTOR * STEPS
    if not config.method.has_single_exchange or step_count <= longer_step_count:
        return step_seconds
    added_seconds = rehearse(longer_step_count).step_seconds - step_seconds
    variable_seconds = max(0.0, added_seconds / (_LONG_REHEARSAL_FACTOR - 1))
    fixed_seconds = step_seconds - variable_seconds
    return variable_seconds + fixed_seconds * STEPS / step_count


def _count_party_columns(
    config: Config, data: VerticalData, shapes: Mapping[str, TableShape] | None
) -> dict[str, int]:
    """Return the number of distinct columns of each party whose columns enter decrypted sums.

    In methods that decompose the joint table these are all parties, else the passives. All columns
    of a declared table count as distinct.

    `shapes`: party -> the declared shape; None: the tables were read.
    """
    tables = data.tables if config.method.has_joint_svd else data.passives
    if shapes is not None and config.data.dataset == OWN_TABLES:
        return {table.name: shapes[table.name].features for table in tables}
    return {table.name: count_columns(table.features) for table in tables}


def _decrypts_linear_numbers(config: Config, data: VerticalData) -> bool:
    """Return whether the active decrypts, for each person, numbers that are linear in columns.

    If there are as many such numbers as columns, they reveal the columns.
    """
    linear_number_count = config.method.bound_linear_combinations(config, len(data.classes))
    return 0 < linear_number_count < math.inf


def _apply_agreed_numbers(
    config: Config, data: VerticalData, shapes: Mapping[str, TableShape] | None
) -> Config:
    """Return the settings with the layer sizes that the parties would agree on.

    These depend on the number of distinct columns, which is counted in the real tables: in the
    random tables of a rehearsal all columns are distinct.

    `shapes`: party -> the declared shape; None: the tables were read.
    """
    if not _decrypts_linear_numbers(config, data):
        return config
    agreed_config = METHODS[config.method.name].resolve_settings(
        config, _count_party_columns(config, data, shapes)
    )
    assert isinstance(agreed_config, Config)
    return agreed_config


def _warn_of_linear_numbers(
    config: Config, data: VerticalData, shapes: Mapping[str, TableShape] | None
) -> Iterator[str]:
    """Yield a warning if the active decrypts linear combinations of columns of each person.

    It says how much they reveal of the columns. `shapes`: party -> the declared shape; None: the
    tables were read.
    """
    if not _decrypts_linear_numbers(config, data):
        return
    column_counts = list(_count_party_columns(config, data, shapes).values())
    description = describe_opened_numbers(config, len(data.classes), column_counts)
    owners = "all parties'" if config.method.has_joint_svd else "the passives'"
    yield (
        f"of each person the active opens numbers that are linear in {owners} columns: "
        f"{description}"
    )


def _scale_traffic(
    scaled_rehearsal: _ScaledRehearsal,
    data: VerticalData,
    *,
    fixed_bytes_by_route: Mapping[_Route, int],
) -> Iterator[TrafficForecast]:
    """Yield the messages and bytes of the run, scaled up from the rehearsal.

    Bytes of the alignment grow with the number of IDs, and bytes of encrypted labels with the
    number of labels. Messages of training grow by the factors of `scaled_rehearsal`. All else
    before training is the same as in the rehearsal.

    Args:
        scaled_rehearsal: the rehearsal, with the factors by which the run is larger.
        data: the real tables, or tables of their shapes.
        fixed_bytes_by_route: bytes of the alignment that do not depend on the number of IDs.
    """
    rehearsal = scaled_rehearsal.rehearsal
    row_count_by_party = {table.name: len(table.ids) for table in data.tables}
    rehearsed_row_count = len(rehearsal.data.active.ids)
    for flow in rehearsal.setup_flows:
        factor = 1.0
        constant_bytes = 0
        if flow.kind == Kind.ENCRYPTED_LABELS:
            factor = scaled_rehearsal.label_byte_factor
        elif flow.kind == Kind.ALIGNMENT:
            fixed_bytes = fixed_bytes_by_route.get((flow.sender, flow.receiver), 0)
            constant_bytes = min(fixed_bytes, flow.wire_bytes)
            factor = _compute_id_factor(flow, row_count_by_party, rehearsed_row_count)
        yield TrafficForecast(
            sender=flow.sender,
            receiver=flow.receiver,
            kind=flow.kind.value,
            messages=flow.messages,
            wire_bytes=round(constant_bytes + (flow.wire_bytes - constant_bytes) * factor),
        )
    for flow in rehearsal.training_flows:
        factor = scaled_rehearsal.byte_factor
        if flow.kind == Kind.ENCRYPTED_LABELS:
            factor *= scaled_rehearsal.label_byte_factor
        yield TrafficForecast(
            sender=flow.sender,
            receiver=flow.receiver,
            kind=flow.kind.value,
            messages=round(flow.messages * scaled_rehearsal.message_factor),
            wire_bytes=round(flow.wire_bytes * factor),
        )


def _compute_id_factor(
    flow: Flow, row_count_by_party: Mapping[str, int], rehearsed_row_count: int
) -> float:
    """Return how many times more IDs an alignment message of the run stands for than in a
    rehearsal: the mean number of IDs of its sender and receiver over the rehearsed number.

    A dealer, which has no IDs, does not count.
    """
    id_counts = [
        row_count_by_party[name]
        for name in (flow.sender, flow.receiver)
        if name in row_count_by_party
    ]
    return sum(id_counts) / (len(id_counts) * rehearsed_row_count)


def _compute_privacy(config: Config) -> PrivacySpent:
    """Return the privacy cost of the whole planned run.

    It covers all releases of representations, private training (DP-SGD), and the label mechanism.
    """
    delta = config.delta
    epochs = config.train.epochs
    # No noise is drawn here, so any key does.
    most_releases = derive_limits(config).releases
    guard = make_guard(config.guard, delta=delta, releases=most_releases, key=bytes(32))
    releases = plan_releases(config, guard)
    mechanism = guard.mechanism()
    epsilon_x = EXACT.get_epsilon(mechanism, releases=releases, delta=delta)
    if (
        "passives take part" in config.method.exchange_facts
        and config.method.epsilon_name != "epsilon_x"
    ):
        epsilon_x = math.inf  # no representation is sent; other messages are not counted here
    epsilon_y = math.inf
    epsilon_model = math.inf
    if config.dp_sgd is not None:
        noise_multiplier = config.dp_sgd.noise_multiplier or calibrate_updates(
            config.dp_sgd.epsilon or math.inf,
            delta,
            release=mechanism,
            releases=releases,
            updates=epochs,
        )
        # Half the noise multiplier: replacing a record changes an update by up to twice the clip.
        updates_mu = compose_mu(GaussianRelease(noise_multiplier=noise_multiplier / 2).mu, epochs)
        sent_mu = compose_mu(mechanism.mu, releases) if releases else 0
        epsilon_y = gdp_epsilon(updates_mu, delta)
        epsilon_model = gdp_epsilon(math.hypot(sent_mu, updates_mu), delta)
    if config.labels.epsilon is not None:
        epsilon_y = min(epsilon_y, config.labels.epsilon)
    return PrivacySpent(
        epsilon_x=epsilon_x,
        epsilon_y=epsilon_y,
        epsilon_model=epsilon_model,
        delta=delta,
        releases=releases,
    )


def _find_warnings(
    config: Config,
    rehearsal: "_Rehearsal",
    traffic: tuple[TrafficForecast, ...],
    epsilon: float,
    passive_count: int,
) -> Iterator[str]:
    """Yield warnings for the user before the run: of weak protection and avoidable traffic.

    Args:
        config: settings of the run.
        rehearsal: traffic and time of a few steps with random data.
        traffic: messages and bytes of the run.
        epsilon: epsilon_x of the run.
        passive_count: number of passives.
    """
    method_facts = config.method.exchange_facts
    sends_representations = "representations are sent" in method_facts
    is_guarded = config.guard.mechanism != "none" and sends_representations
    draws_noise = is_guarded or config.dp_sgd or config.labels.epsilon or config.secure_sum.noise
    if config.guard.noise != "secret" and draws_noise:
        yield "the noise can be taken off by whoever knows the seed (guard.noise)"
    if rehearsal.numbers_per_row > _MANY_NUMBERS:
        yield (
            f"this sends {rehearsal.numbers_per_row:,} numbers a row; with model.projection: 64 it "
            f"would be {rehearsal.numbers_per_row / 64:.0f} times less"
        )
    if sends_representations and not is_guarded:
        yield "there is no guard: representations leave as they are, epsilon is infinite"
    elif sends_representations and epsilon > _LARGE_EPSILON:
        yield f"epsilon {epsilon:.3g} promises little; fewer epochs or more noise would lower it"
    if "gradients are summed" in method_facts and config.guard.mechanism == "gaussian":
        yield (
            "noise that is drawn anew at each step takes off what the active learns (accuracy on "
            "digits, 50 labels: 37 to 39 %, against 47.9 % alone); take frozen_gaussian, or the "
            "method apfed_code, which tells nothing"
        )
    if "tables are decomposed" in method_facts:
        yield "singular vectors of all parties' rows are opened without noise, epsilon is infinite"
    if "contributions are summed" in method_facts:
        addend = next(addend for fact, addend in _ADDEND_BY_FACT.items() if fact in method_facts)
        sum_class = find_sum_class(config.secure_sum)
        if sum_class.unsafe:
            yield f"the sum is {sum_class.name}: the aggregator reads every {addend}"
        if passive_count == 1:
            yield f"with one passive the sum is its {addend}: the active reads it"
    yield from _warn_of_disk(config, traffic)


def _warn_of_disk(config: Config, traffic: tuple[TrafficForecast, ...]) -> Iterator[str]:
    """Yield a warning if the disk is too small for the transcript, which stores messages.

    `traffic`: messages and bytes of the run.
    """
    method_facts = config.method.exchange_facts
    # Stored bytes by "sender kind" and receiver. Representations that go to all passives are stored
    # only once, under the receiver "all".
    stored_bytes: dict[tuple[str, str], int] = {}
    for flow in traffic:
        if flow.kind in _STORED_KINDS:
            is_representations = flow.kind == Kind.REPRESENTATIONS
            is_sent_to_all = (
                is_representations and "the active sends representations" in method_facts
            )
            receiver = "all" if is_sent_to_all else flow.receiver
            stored_bytes[f"{flow.sender} {flow.kind}", receiver] = flow.wire_bytes
            if is_sent_to_all and "gradients are summed" in method_facts:
                # Decoded sums are stored too, and are as large as the representations.
                stored_bytes[_DECODED_SUMS, receiver] = flow.wire_bytes
    epochs = config.train.epochs
    # The transcript stores contributions only up to a limit in each epoch.
    contribution_keys = [key for key in stored_bytes if key[0].endswith(f" {Kind.CONTRIBUTION}")]
    contributed_bytes = sum(stored_bytes.pop(key) for key in contribution_keys)
    if contributed_bytes:
        stored_bytes["contributions", "aggregator"] = min(
            contributed_bytes, epochs * MAX_CONTRIBUTION_BYTES
        )
    stored_epochs = config.effective_transcript.count_stored_epochs(epochs)
    megabytes = sum(stored_bytes.values()) / epochs * stored_epochs / 1e6
    free_megabytes = count_free_megabytes(Path())
    if megabytes > free_megabytes:
        yield (
            f"the transcript would hold about {megabytes:,.0f} MB, and the disk of this folder has "
            f"{free_megabytes:,.0f} MB free; send a smaller representation (model.projection), or "
            "set transcript.keep to none"
        )


@dataclass(frozen=True, kw_only=True)
class _Rehearsal:
    """The traffic and time of a rehearsal: a few steps of the run with random data.

    Attributes:
        data: the random tables.
        setup_flows, training_flows: messages and bytes before the first step, and in the steps.
        step_seconds, evaluation_seconds: time of one step, and of one evaluation.
        numbers_per_row: numbers sent for each row in each step.
        ledger_by_passive: passive that adds noise under the sum -> its privacy ledger.
    """

    data: VerticalData
    setup_flows: tuple[Flow, ...]
    training_flows: tuple[Flow, ...]
    step_seconds: float
    evaluation_seconds: float
    numbers_per_row: int
    ledger_by_passive: Mapping[str, PrivacyLedger]


def _rehearse(
    config: Config,
    template: VerticalData,
    step_count: int,
    *,
    batch_size: int,
    aligned_share: float,
    labelled_count: int,
) -> _Rehearsal:
    """Run some steps of the run on random rows, and return their traffic and time.

    Names, shapes and classes are those of the run.

    Args:
        config: settings of the run.
        template: the real tables, or tables of their shapes.
        step_count: number of steps.
        batch_size: rows of a step.
        aligned_share: share of the rows that all parties have.
        labelled_count: number of rows with a label to learn from.
    """
    row_count = batch_size * step_count
    rehearsed_label_count = row_count
    if config.method.has_single_exchange:
        rehearsed_label_count = min(row_count, labelled_count)
    data = _make_random_data(
        template, row_count, aligned_share, labelled_count=rehearsed_label_count
    )
    # A black box is not called for synthetic people.
    user_functions = {
        name: UserFunctions(gradient=_contribute_zeros)
        for name in _list_black_boxes(config, template)
    }
    with limit_threads_for(config.model, batch_size, [table.shape for table in data.tables]):
        inputs = SimulationInputs(
            config=_make_rehearsal_config(config, step_count),
            data=data,
            code_by_party=user_functions,
        )
        session = Simulation(METHODS[config.method.name], inputs)
        setup_flows = session.transcript.flows
        loop = _RehearsalLoop(session, batch_size)
        session.run_script(train_epochs(session.active_role, session.links, loop))
    get_key = attrgetter("sender", "receiver", "kind")
    setup_keys = set(map(get_key, setup_flows))
    training_flows = tuple(
        flow for flow in session.transcript.flows if get_key(flow) not in setup_keys
    )
    passive_terms = list(session.contract.passives.values())
    return _Rehearsal(
        data=data,
        setup_flows=setup_flows,
        training_flows=training_flows,
        step_seconds=loop.step_seconds,
        evaluation_seconds=loop.evaluation_seconds,
        numbers_per_row=math.prod(passive_terms[0].representation.shape) if passive_terms else 0,
        ledger_by_passive=session.contribution_ledgers,
    )


def _make_rehearsal_config(config: Config, step_count: int) -> Config:
    """Return the run's settings for this number of steps on random data: nothing is stored, and IDs
    need not look like those of the run.
    """
    changes = {
        "transcript": TranscriptSettings(keep="none"),
        "alignment": config.alignment.for_trial_ids(),
        "method": config.method.for_rehearsal(step_count, config.train.epochs),
    }
    return config.model_copy(update=changes)


def _list_black_boxes(config: Config, data: VerticalData) -> list[str]:
    """Return the names of the passives whose gradients come from a user's black-box function."""
    if not config.method.has_gradient_sum:
        return []
    names = [table.name for table in data.passives]
    return [name for name in names if isinstance(find_objective(config, name), BlackBoxSettings)]


def _contribute_zeros(step: int, rows: NDArray[np.int64], z: NDArray[Any]) -> NDArray[Any]:
    """Return zeros in place of a black box's gradients, in the shape of z, (B, D)."""
    return np.zeros_like(z)


class _RehearsalLoop:
    """The training loop of a rehearsal: one epoch of a few steps, whose times it measures.

    It is a `secure_apfed.methods.TrainingLoop`.

    Attributes:
        next_step: number of the next step.
        step_durations: seconds of each step so far.
        evaluation_seconds: seconds of one evaluation.
    """

    def __init__(self, session: Simulation, batch_size: int) -> None:
        """Prepare the epoch; no step was made yet.

        `session`: all parties of the rehearsal, in one process. `batch_size`: rows of a step.
        """
        self._session = session
        self._batch_size = batch_size
        self._start_time = time.perf_counter()
        self.next_step = 0
        self.step_durations: list[float] = []
        self.evaluation_seconds = 0.0

    def iterate_epochs(self) -> Iterator[int]:
        """Yield the only epoch."""
        yield 0

    def is_last(self, epoch: int) -> bool:
        """Return that the only epoch is the last one."""
        return True

    def iterate_batches(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the rows of each step; the step's time begins here."""
        for step, rows_B in enumerate(
            self._session.active_role.training_rows.split(self._batch_size)
        ):
            self._start_time = time.perf_counter()
            yield step, rows_B

    def count_step(self, loss: StepLoss | None) -> None:
        """Store the time of the step that ends here."""
        self.next_step += 1
        self.step_durations.append(time.perf_counter() - self._start_time)

    async def note_held_out_loss(self) -> None:
        """Do nothing: a rehearsal has neither validation rows nor early stopping."""

    @property
    def step_seconds(self) -> float:
        """The time of one step.

        It is the median of all steps but the first, which is slower. A method that does all work in
        a single step does the work of `STEPS` steps in it, so its time is divided.
        """
        first_duration, *later_durations = self.step_durations
        if not later_durations:
            return first_duration / STEPS
        middle = len(later_durations) // 2
        return sorted(later_durations)[middle]

    async def finish_epoch(self, *, is_last: bool) -> None:
        """Measure the time of one evaluation."""
        start_time = time.perf_counter()
        session = self._session
        await session.active_role.evaluate(session.links, next_step=self.next_step, is_final=False)
        self.evaluation_seconds = time.perf_counter() - start_time


def _make_random_data(
    template: VerticalData, train_row_count: int, aligned_share: float, *, labelled_count: int
) -> VerticalData:
    """Return random tables for a rehearsal.

    Args:
        template: the real tables, or tables of their shapes.
        train_row_count: number of training rows.
        aligned_share: share of the active's rows that all parties have.
        labelled_count: number of training rows with a label.
    """
    test_row_count = min(_TEST_ROWS, max(_MIN_ROWS, len(template.test_rows)))
    row_count = train_row_count + test_row_count
    is_shared_N = _spread_shared_rows(row_count, aligned_share)
    active_ids = [f"all {row}" for row in range(row_count)]
    generator = torch.Generator().manual_seed(0)
    # In a horizontal partition no two parties have a person in common.
    has_common_id_N = torch.zeros_like(is_shared_N) if template.is_horizontal else is_shared_N
    # Labels go to shared rows first.
    shared_rows_first = is_shared_N[:train_row_count].argsort(descending=True, stable=True)
    return replace(
        template,
        table=_make_random_table(template, template.active, active_ids, generator),
        passives=tuple(
            _make_random_table(template, table, _make_ids(table.name, has_common_id_N), generator)
            for table in template.passives
        ),
        train_rows=torch.arange(train_row_count),
        test_rows=torch.arange(train_row_count, row_count),
        labelled=shared_rows_first[:labelled_count].sort().values,
    )


def _spread_shared_rows(row_count: int, shared_share: float) -> Tensor:
    """Return which of the active's rows all parties have, (N,), spread evenly over the table,
    as in the batches of a run.

    `shared_share`: the share of the rows that all parties have, from 0 to 1.
    """
    shared_so_far = (torch.arange(row_count) * shared_share).floor()
    is_shared_N = shared_so_far.diff(prepend=torch.tensor([-1.0])) > 0
    if row_count * shared_share < 2 * _MIN_ROWS:
        # Otherwise all shared rows might be of one class, which a run refuses.
        is_shared_N[:_MIN_ROWS] = True
    return is_shared_N


def _make_ids(party: str, has_common_id_N: Tensor) -> list[str]:
    """Return a party's IDs: in rows of the mask (N,) the same as at all parties, else its own."""
    return [
        f"all {row}" if has_common_id else f"{party} {row}"
        for row, has_common_id in enumerate(has_common_id_N.tolist())
    ]


def _make_random_table(
    data: VerticalData, template: PartyTable, ids: Sequence[str], generator: torch.Generator
) -> PartyTable:
    """Return one party's random table, with these IDs and labels of all classes.

    Args:
        data: the real tables of all parties, or tables of their shapes.
        template: the table of this party among them.
        ids: IDs of the rows.
        generator: draws the features.
    """
    # Normal, like standardised columns. From positive features an encoder may make representations
    # without variance, which are not sent.
    features = torch.randn(len(ids), *template.features.shape[1:], generator=generator)
    for view in template.views.values():
        if view.sequence is not None:
            features[:, view.first] = view.sequence[0]  # all steps are in use
    labels_N = None
    if template.labels is not None:
        class_count = len(data.classes) or 2
        labels_N = _make_aperiodic_labels(len(ids), class_count).to(template.labels.dtype)
    return replace(template, ids=tuple(ids), features=features, labels=labels_N)


@dataclass(frozen=True, kw_only=True)
class IntersectionCost:
    """The estimated cost of one set intersection protocol, with all parties in one process.

    Attributes:
        protocol: name of the protocol.
        chosen: whether the run's settings choose it.
        wire_bytes, seconds: its costs for the real number of IDs.
        takes_dealer: whether it needs a dealer: a party without IDs that does not collude.
        pairwise: whether the active learns its overlap with every single passive.
    """

    protocol: str
    chosen: bool
    wire_bytes: int
    seconds: float
    takes_dealer: bool
    pairwise: bool


def _measure_intersection_costs(config: Config, data: VerticalData) -> tuple[IntersectionCost, ...]:
    """Return the cost of every set intersection protocol; empty if the method does not align.

    A protocol that has the same costs as another is left out.
    """
    if not config.method.needs_alignment:
        return ()
    costs = []
    for name, backend in SET_INTERSECTIONS.items():
        if name in _PROTOCOL_OF_SAME_COST:
            continue
        wire_bytes, seconds = _estimate_intersection(config, data, name)
        costs.append(
            IntersectionCost(
                protocol=name,
                chosen=name == config.alignment.selected_protocol,
                wire_bytes=wire_bytes,
                seconds=seconds,
                takes_dealer=backend.needs_dealer,
                pairwise=backend.has_pairwise_leak,
            )
        )
    return tuple(costs)


def _estimate_intersection(config: Config, data: VerticalData, protocol: str) -> tuple[int, float]:
    """Return the bytes and seconds of one set intersection protocol for all IDs of the tables.

    The protocol is run with some thousand IDs of each party. Where a table has more, it is run with
    one ID, too, and costs are extrapolated linearly.
    """
    max_sample = _SAMPLED_IDS_BY_PROTOCOL.get(protocol, _SAMPLED_IDS)
    ids_by_party = _sample_ids(config, data, max_sample)
    bytes_by_route, seconds = _run_intersection(config, data, protocol, ids_by_party)
    sample_bytes = bytes_by_route.total()
    id_count = sum(len(table.ids) for table in data.tables)
    sampled_id_count = sum(map(len, ids_by_party.values()))
    if sampled_id_count >= id_count:
        return sample_bytes, seconds
    single_id_by_party = {party: own_ids[:1] for party, own_ids in ids_by_party.items()}
    fixed_bytes_by_route, fixed_seconds = _run_intersection(
        config, data, protocol, single_id_by_party
    )
    fixed_bytes = fixed_bytes_by_route.total()
    party_count = len(ids_by_party)  # also the number of IDs in the run with one ID each
    added_id_factor = (id_count - party_count) / max(sampled_id_count - party_count, 1)
    added_bytes = added_id_factor * (sample_bytes - fixed_bytes)
    added_seconds = added_id_factor * max(seconds - fixed_seconds, 0.0)
    return round(fixed_bytes + added_bytes), fixed_seconds + added_seconds


def _count_fixed_bytes(config: Config, data: VerticalData) -> Mapping[_Route, int]:
    """Return the alignment's bytes that do not depend on the number of IDs, by sender and receiver.

    They are measured with one ID of each party.
    """
    if not config.method.needs_alignment:
        return {}
    single_ids = _sample_ids(config, data, 1)
    bytes_by_route, _ = _run_intersection(
        config, data, config.alignment.selected_protocol, single_ids
    )
    return bytes_by_route


def _sample_ids(config: Config, data: VerticalData, count: int) -> dict[str, list[bytes]]:
    """Return the first `count` IDs of each party, encoded for the intersection, by party."""
    settings = config.alignment.for_trial_ids()
    return {
        table.name: canonical_ids(table.name, table.ids[:count], settings) for table in data.tables
    }


def _run_intersection(
    config: Config, data: VerticalData, protocol: str, ids_by_party: Mapping[str, list[bytes]]
) -> tuple[Counter[_Route], float]:
    """Run one intersection protocol in this process; return its bytes and its seconds.

    Bytes are by sender and receiver. The active is the hub, with which all other parties align.

    `protocol`: name of the protocol. `ids_by_party`: party -> its IDs.
    """
    # The size limit is that of the sample: some protocols refuse the limit of large runs.
    update = {"protocol": protocol, "maximum_ids": _SAMPLED_IDS}
    settings = config.alignment.for_trial_ids().model_copy(update=update)
    intersection = make_intersection(settings, session=f"plan {protocol}", dealer=_DEALER)
    # The first rows of two tables may have no ID in common, which must not be an error here.
    intersection.agreement = replace(intersection.agreement, minimum_rows=0)
    start_time = time.perf_counter()
    hub = data.active.name
    members = [party for party in ids_by_party if party != hub]
    roles: dict[str, Conversation] = {hub: intersection.make_hub(hub, members, ids_by_party[hub])}
    roles |= {
        member: intersection.make_member(member, hub, ids_by_party[member]) for member in members
    }
    if intersection.needs_dealer:
        roles[_DEALER] = intersection.make_dealer(hub, members)
    bytes_by_route = Counter[_Route]()

    def count_message(sender: str, message: Outgoing) -> None:
        """Add the bytes of one message."""
        bytes_by_route[sender, message.receiver] += len(message.body)

    converse(roles, record=count_message)
    return bytes_by_route, time.perf_counter() - start_time
