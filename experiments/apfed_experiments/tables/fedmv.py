"""FedMV's Tables 1 to 3 on views that are public: who gains by whom, on handwritten numerals.

The paper's own rows are sessions of typing that nobody else has. Here five views of 2,000 numerals
take their place, as they are (Tables 1 and 2, and MMVFL beside them) and cut into steps (Table 3).
Everything is computed at once, by the parts that parties compute by, in the order in which they
would: that their runs give the same is tested (`tests/secure_apfed/test_methods_views.py`).
Letters: N rows, F features of a view, C classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from apfed_experiments.tables.mmvfl import align_views
from apfed_experiments.tables.table import Figures, Job, Line, PaperTable, Size
from secure_apfed.data import load_data
from secure_apfed.learning.descent import Compute
from secure_apfed.learning.recurrent import RecurrentTraining, SequenceViews
from secure_apfed.methods.averaging import LinearViews
from secure_apfed.methods.multiview import (
    Floats,
    Pull,
    ViewModel,
    average_views,
    draw_orthonormal,
    run_iteration,
    weights_of,
)
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.training import ModelSettings

Rows: TypeAlias = NDArray[np.int64]
Weights: TypeAlias = Sequence[Floats]
"""Weights of each view, (F, C)."""

_VIEWS = ("fou", "fac", "kar", "pix", "zer")
_SEQUENCES = {"fou": (19, 4), "fac": (18, 12), "kar": (16, 4), "pix": (16, 15), "zer": (12, 4)}
"""Steps and channels: pix are its 16 rows of 15 pixels, the others consecutive numbers."""
_CLASSES = 10
_TEST = 400
_HELD_OUT = 0.2
_CLIENTS = 4
_ITERATIONS = 10
_ROUNDS = 5
_INNER_ROUNDS = 5
_TOLERANCE = 1e-6
_REWEIGHTINGS = 10
_BETAS = (0.1, 1.0, 4.0)
_PULL = 8.0
"""zeta = eta of FedMV, whose paper tries 1 to 32 around it."""
_MMVFL_PULL = 1000.0
_RATES = (0.001, 0.005)
_SIZE = 12
_EPOCHS = 10
_DROPOUT = 0.1


@dataclass(frozen=True, eq=False)
class Numerals:
    """All views of the numerals (N, F) and their classes (N,)."""

    views: Sequence[Floats]
    labels_N: Rows  # noqa: N815

    def encode_labels(self, rows_B: Rows) -> Floats:
        """Return the labels of these rows one-hot, (B, C)."""
        return np.asarray(np.eye(_CLASSES)[self.labels_N[rows_B]])


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings among which held-out rows choose."""

    beta: float
    pull: float = 0.0


_FEDMV = tuple(Choice(beta=beta, pull=_PULL) for beta in _BETAS)
_MMVFL = tuple(Choice(beta=beta, pull=_MMVFL_PULL) for beta in _BETAS)
_SUPERVISED = tuple(Choice(beta=beta) for beta in _BETAS)

Fit: TypeAlias = Callable[[Numerals, Sequence[int], Rows, Choice, int], Weights]
"""Function that fits the weights of views, from data, views' places, rows, choice and seed."""


def measure_accuracy(
    numerals: Numerals, positions: Sequence[int], rows: Rows, weights: Weights
) -> float:
    """Return the accuracy in per cent on rows outside the training.

    Z is the limit of Eqs. (12), (13); all zeta_k are equal.

    `positions`: indices of the views.
    """
    parts = [
        numerals.views[view][rows] @ weights_FC
        for view, weights_FC in zip(positions, weights, strict=True)
    ]
    scores_BC = np.mean(parts, axis=0)
    return 100 * float((scores_BC.argmax(1) == numerals.labels_N[rows]).mean())


def start_view(x_NF: Floats, choice: Choice, rng: np.random.Generator) -> ViewModel:
    """Return a view of some rows at its start."""
    return ViewModel.from_features(
        x_NF,
        _CLASSES,
        rng,
        beta=choice.beta,
        zeta=choice.pull,
        tolerance=_TOLERANCE,
        max_rounds=_REWEIGHTINGS,
    )


def fit_vertical(
    numerals: Numerals,
    positions: Sequence[int],
    rows: Rows,
    choice: Choice,
    seed: int,
    *,
    own: bool,
) -> Weights:
    """Fit V-FedMV (Algorithm 2), or MMVFL (Algorithm 1; `own`), to parties with a view each.

    `positions`: indices of the views.
    """
    rng = np.random.default_rng(seed)
    models = [start_view(numerals.views[view][rows], choice, rng) for view in positions]
    pull = Pull(numerals.encode_labels(rows), np.full((len(rows), 1), choice.pull), own=own)
    common_NC = draw_orthonormal(len(rows), _CLASSES, rng)
    for _ in range(_ITERATIONS):
        common_NC = run_iteration(models, common_NC, pull)
    return [model.weights_FC for model in models]


def fit_by_labels(
    numerals: Numerals, positions: Sequence[int], rows: Rows, choice: Choice, seed: int
) -> Weights:
    """Fit each view by itself to the labels: Eq. (20).

    `positions`: indices of the views.
    """
    rng = np.random.default_rng(seed)
    truth_NC = numerals.encode_labels(rows)
    weights_by_place = []
    for view in positions:
        x_NF = numerals.views[view][rows]
        first_FC = rng.standard_normal((x_NF.shape[1], _CLASSES))
        weights_FC = weights_of(
            x_NF,
            truth_NC,
            choice.beta,
            first_FC,
            tolerance=_TOLERANCE,
            max_rounds=_REWEIGHTINGS,
        )
        weights_by_place.append(weights_FC)
    return weights_by_place


def make_client(
    views: Sequence[Floats], truth_NC: Floats, choice: Choice, rng: np.random.Generator
) -> LinearViews:
    """Return one client of H-FedMV at its start."""
    models = [start_view(x_NF, choice, rng) for x_NF in views]
    pull = Pull(truth_NC, np.full((len(truth_NC), 1), choice.pull))
    return LinearViews(models, pull, tolerance=1e-4, rounds=_INNER_ROUNDS)


def average_clients(clients: Sequence[LinearViews], shares: Sequence[float]) -> None:
    """Run H-FedMV's rounds (Algorithm 3): all clients hold the average then.

    `shares`: weight of each client.
    """
    average_FC = clients[0].weights
    for step in range(_ROUNDS):
        for client in clients:
            client.load(average_FC)
            client.train(step)
        average_FC = np.asarray(
            sum(share * client.weights for share, client in zip(shares, clients, strict=True))
        )
    for client in clients:
        client.load(average_FC)


def weights_by_view(model: LinearViews) -> Weights:
    """Return the weights of each view of a client."""
    return [view.weights_FC for view in model.views]


def split_clients(rows: Rows) -> list[Rows]:
    """Return the rows of each client, in a random order."""
    return list(np.array_split(rows, _CLIENTS))


def clients_of(
    numerals: Numerals, positions: Sequence[int], rows: Rows, choice: Choice, seed: int
) -> list[LinearViews]:
    """Return all clients of H-FedMV at their start, each with its own rows.

    `positions`: indices of the views.
    """
    rng = np.random.default_rng(seed)
    return [
        make_client(
            [numerals.views[view][client_rows] for view in positions],
            numerals.encode_labels(client_rows),
            choice,
            rng,
        )
        for client_rows in split_clients(rows)
    ]


def fit_horizontal(
    numerals: Numerals, positions: Sequence[int], rows: Rows, choice: Choice, seed: int
) -> Weights:
    """Fit H-FedMV to clients with equally many rows.

    `positions`: indices of the views.
    """
    clients = clients_of(numerals, positions, rows, choice, seed)
    shares = [len(client_rows) / len(rows) for client_rows in split_clients(rows)]
    average_clients(clients, shares)
    return weights_by_view(clients[0])


def train_alone(model: LinearViews) -> None:
    """Train a client by itself as often as in all rounds of H-FedMV: MV w/o FL."""
    for step in range(_ROUNDS):
        model.train(step)


def fit_alone(
    numerals: Numerals, positions: Sequence[int], rows: Rows, choice: Choice, seed: int
) -> Weights:
    """Fit one client by itself on all of these rows.

    `positions`: indices of the views.
    """
    rng = np.random.default_rng(seed)
    client = make_client(
        [numerals.views[view][rows] for view in positions],
        numerals.encode_labels(rows),
        choice,
        rng,
    )
    train_alone(client)
    return weights_by_view(client)


def fit_best_choice(
    fit: Fit,
    numerals: Numerals,
    positions: Sequence[int],
    rows: Rows,
    choices: Sequence[Choice],
    seed: int,
) -> Weights:
    """Fit by the choice that predicts held-out training rows best, on all training rows.

    `positions`: indices of the views.
    """
    held_out, others = hold_out(rows)
    accuracies = []
    for choice in choices:
        weights = fit(numerals, positions, others, choice, seed)
        accuracies.append(measure_accuracy(numerals, positions, held_out, weights))
    best = choices[int(np.argmax(accuracies))]
    return fit(numerals, positions, rows, best, seed)


def hold_out(rows: Rows) -> tuple[Rows, Rows]:
    """Return the rows that choose, and those that train."""
    count = round(_HELD_OUT * len(rows))
    return rows[:count], rows[count:]


def cut_numerals(seed: int) -> tuple[Numerals, Rows, Rows]:
    """Return the numerals, and their test and training rows by this seed."""
    data = load_data(DataSettings(dataset="handwritten", views=_VIEWS), seed=0)
    numerals = Numerals(*align_views(data))
    order = np.random.default_rng(seed).permutation(len(numerals.labels_N))
    return numerals, order[:_TEST], order[_TEST:]


def measure_views(*, seed: int) -> Figures:
    """Measure Tables 1 and 2, and MMVFL, on one cut into training and test rows."""
    numerals, test, train = cut_numerals(seed)
    all_views = tuple(range(len(_VIEWS)))
    sets = [all_views, *combinations(all_views, 2)]
    methods: Mapping[str, tuple[Fit, Sequence[Choice]]] = {
        "V-FedMV": (partial(fit_vertical, own=False), _FEDMV),
        "MMVFL": (partial(fit_vertical, own=True), _MMVFL),
        "H-FedMV": (fit_horizontal, _FEDMV),
    }
    figures: dict[str, float] = {}
    for method, (fit, choices) in methods.items():
        for places in sets:
            weights = fit_best_choice(fit, numerals, places, train, choices, seed)
            figures[f"{method} {name_places(places)}"] = measure_accuracy(
                numerals, places, test, weights
            )
            if places == all_views and method in ("V-FedMV", "MMVFL"):
                for view in all_views:
                    figures[f"{method} party {_VIEWS[view]}"] = measure_accuracy(
                        numerals, [view], test, [weights[view]]
                    )
    for view in all_views:
        for method, fit, rows in (
            ("alone", fit_by_labels, train),
            ("single view FL", fit_horizontal, train),
        ):
            choices = _SUPERVISED if method == "alone" else _FEDMV
            weights = fit_best_choice(fit, numerals, [view], rows, choices, seed)
            figures[f"{method} {_VIEWS[view]}"] = measure_accuracy(numerals, [view], test, weights)
    side_by_side = Numerals([np.concatenate(numerals.views, axis=1)], numerals.labels_N)
    weights = fit_best_choice(fit_by_labels, side_by_side, [0], train, _SUPERVISED, seed)
    return figures | {"one table": measure_accuracy(side_by_side, [0], test, weights)}


def measure_clients(*, seed: int) -> Figures:
    """Measure Table 2's clients without the others, of the same cut: the mean of the four."""
    numerals, test, train = cut_numerals(seed)
    all_views = tuple(range(len(_VIEWS)))
    accuracies = []
    for client_rows in split_clients(train):
        weights = fit_best_choice(fit_alone, numerals, all_views, client_rows, _FEDMV, seed)
        accuracies.append(measure_accuracy(numerals, all_views, test, weights))
    return {"MV w/o FL": float(np.mean(accuracies))}


def name_places(positions: Sequence[int]) -> str:
    """Return the names of these views, or "all"."""
    return "all" if len(positions) == len(_VIEWS) else "+".join(_VIEWS[view] for view in positions)


def cut_into_steps(view_NF: Floats, sequence: tuple[int, int]) -> torch.Tensor:
    """Lay columns out as a sequence (T, C): all T steps are in use, zeros fill the last.

    `view_NF`: the columns.
    """
    steps, channels = sequence
    rows, columns = view_NF.shape
    flat = np.zeros((rows, 1 + steps * channels), dtype=np.float32)
    flat[:, 0] = steps
    flat[:, 1 : 1 + columns] = view_NF
    return torch.from_numpy(flat)


@dataclass(frozen=True, eq=False)
class Sequences:
    """The numerals' views as sequences, flat, and how GRUs learn."""

    views: Sequence[torch.Tensor]
    labels_N: Rows  # noqa: N815
    training: RecurrentTraining
    seed: int

    @property
    def features_N(self) -> torch.Tensor:  # noqa: N802
        return torch.cat(tuple(self.views), dim=1)

    def make_grus(
        self, owner: str, positions: Sequence[int], rows: Rows | None, training: RecurrentTraining
    ) -> SequenceViews:
        """Return GRUs of these views, which may learn from the labels of `rows` (None: none).

        `owner`: name of the party. `positions`: indices of the views.
        """
        features_N = torch.cat([self.views[view] for view in positions], dim=1)
        labels_N = torch.from_numpy(self.labels_N)
        return SequenceViews.begin(
            owner,
            ModelSettings(
                network="gru",
                sequences=tuple(_SEQUENCES[_VIEWS[view]] for view in positions),
                representation=_SIZE,
            ),
            features_N=features_N if rows is None else features_N[rows],
            labels_N=None if rows is None else labels_N[rows],
            classes=_CLASSES,
            training=training,
            compute=Compute(torch.device("cpu")),
            seed=self.seed,
        )

    def compute_states(self, grus: SequenceViews, positions: Sequence[int]) -> Numerals:
        """Return all rows as GRUs represent them."""
        features_N = torch.cat([self.views[view] for view in positions], dim=1)
        parts = [part.double().numpy() for part in grus.compute_states(features_N)]
        return Numerals(parts, self.labels_N)


def limit_epochs(training: RecurrentTraining) -> RecurrentTraining:
    """Return the same, of one epoch each time."""
    return replace(training, epochs=1)


def fit_v_fedmv(sequences: Sequences, rows: Rows, choice: Choice) -> tuple[Numerals, Weights]:
    """Fit V-FedMV to parties with a sequence each, of which the first has labels; see
    `secure_apfed.methods.multiview`. A GRU learns an epoch in each of the steps 1 to `_EPOCHS`.
    """
    all_views = range(len(_VIEWS))
    rng = np.random.default_rng(sequences.seed)
    grus = [
        sequences.make_grus(
            _VIEWS[view], [view], None if view else rows, limit_epochs(sequences.training)
        )
        for view in all_views
    ]
    states = [sequences.compute_states(gru, [view]).views[0] for view, gru in enumerate(grus)]
    models = [start_view(states_NF[rows], choice, rng) for states_NF in states]
    truth_NC = np.eye(_CLASSES)[sequences.labels_N[rows]]
    pull = Pull(truth_NC, np.full((len(rows), 1), choice.pull))
    common_NC = draw_orthonormal(len(rows), _CLASSES, rng)
    positions = np.arange(len(rows))
    for step in range(_EPOCHS + _ITERATIONS):
        for view in all_views:
            if 0 < step <= _EPOCHS:
                if view:
                    shares_NC = torch.from_numpy(common_NC).clamp(min=0)
                    grus[view].learn_from(sequences.views[view][rows], shares_NC)
                grus[view].train(step)
                states[view] = sequences.compute_states(grus[view], [view]).views[0]
                models[view].replace_features(states[view][rows])
            models[view].update_model(positions, common_NC)
        common_NC = average_views(models, pull)
    return Numerals(states, sequences.labels_N), [model.weights_FC for model in models]


def measure_sequences(*, seed: int) -> Figures:
    """Measure Table 3, and V-FedMV, on one cut. Each line uses the learning rate that is best on
    held-out training rows, from which no model learns.
    """
    numerals, test, train = cut_numerals(seed)
    held_out_rows, rows = hold_out(train)
    cut = [
        cut_into_steps(x, _SEQUENCES[name]) for x, name in zip(numerals.views, _VIEWS, strict=True)
    ]
    best: dict[str, tuple[float, float]] = {}
    for rate in _RATES:
        training = RecurrentTraining(epochs=_EPOCHS, learning_rate=rate, dropout=_DROPOUT)
        sequences = Sequences(cut, numerals.labels_N, training, seed)
        for name, held_out, tested in _lines_of(sequences, rows, held_out_rows, test):
            # Ties keep the first rate: test rows choose nothing.
            if name not in best or held_out > best[name][0]:
                best[name] = held_out, tested
    return {name: tested for name, (_, tested) in best.items()}


def _lines_of(
    sequences: Sequences, rows: Rows, held_out_rows: Rows, test: Rows
) -> Iterator[tuple[str, float, float]]:
    """Yield each line's name and accuracy on held-out and on test rows.

    `sequences`: trained GRUs.
    """
    choice = Choice(beta=0.1, pull=_PULL)
    all_views = tuple(range(len(_VIEWS)))

    def measure_both(name: str, *models: tuple[Numerals, Weights]) -> tuple[str, float, float]:
        """Return a line's name and its mean accuracy over models, on held-out and on test rows."""
        held_out, tested = (
            float(
                np.mean(
                    [
                        measure_accuracy(numerals, range(len(numerals.views)), rows_judged, weights)
                        for numerals, weights in models
                    ]
                )
            )
            for rows_judged in (held_out_rows, test)
        )
        return name, held_out, tested

    yield measure_both("V-FedMV", fit_v_fedmv(sequences, rows, choice))

    central = sequences.make_grus("central", all_views, rows, sequences.training)
    central.train(0)
    states = sequences.compute_states(central, all_views)
    yield measure_both(
        "central", (states, fit_horizontal(states, all_views, rows, choice, sequences.seed))
    )
    for view in all_views:
        view_states = Numerals([states.views[view]], states.labels_N)
        yield measure_both(
            f"alone {_VIEWS[view]}",
            (view_states, fit_by_labels(view_states, [0], rows, choice, sequences.seed)),
        )

    client_rows = split_clients(rows)
    clients = [
        sequences.make_grus(
            f"client {client}", all_views, rows_of_client, limit_epochs(sequences.training)
        )
        for client, rows_of_client in enumerate(client_rows)
    ]
    average_RW = clients[0].weights
    for step in range(_EPOCHS):
        for client in clients:
            client.load(average_RW)
            client.train(step)
        average_RW = np.asarray(
            sum(
                len(rows_of_client) / len(rows) * client.weights
                for rows_of_client, client in zip(client_rows, clients, strict=True)
            )
        )
    clients[0].load(average_RW)
    states = sequences.compute_states(clients[0], all_views)
    yield measure_both(
        "S-FedMV", (states, fit_horizontal(states, all_views, rows, choice, sequences.seed))
    )

    local_states: list[Numerals] = []
    linear: list[LinearViews] = []
    for view, dealt_rows in enumerate(client_rows):
        local = sequences.make_grus(f"client {view}", all_views, dealt_rows, sequences.training)
        local.train(0)
        local_states.append(sequences.compute_states(local, all_views))
        rng = np.random.default_rng([sequences.seed, view])
        parts = [view_NF[dealt_rows] for view_NF in local_states[view].views]
        linear.append(make_client(parts, local_states[view].encode_labels(dealt_rows), choice, rng))
    for model in linear:
        train_alone(model)
    local_models = zip(local_states, [weights_by_view(model) for model in linear], strict=True)
    yield measure_both("local sequential, local MV", *local_models)
    average_clients(linear, [len(dealt_rows) / len(rows) for dealt_rows in client_rows])
    together = zip(local_states, [weights_by_view(model) for model in linear], strict=True)
    yield measure_both("local sequential, H-FedMV", *together)


_VIEWS_JOB = Job(label="views", measure=measure_views)
_CLIENTS_JOB = Job(label="clients", measure=measure_clients)
_SEQUENCES_JOB = Job(label="sequences", measure=measure_sequences)
_PAIRS = tuple(combinations(range(len(_VIEWS)), 2))


def _make_line(job: Job, setting: str, method: str, views: str, figure: str, panel: str) -> Line:
    """Return one line that a job's figure fills.

    `setting`: and `views`: cells of the line. `panel`: of the picture.
    """
    return Line(
        cells={"setting": setting, "method": method, "views": views},
        job=job,
        figure=figure,
        panels=(panel,),
        series=f"{method}, {views}",
    )


def _average_lines(lines: Sequence[Line], method: str, views: str) -> Line:
    """Return the line of the mean of these lines.

    `views`: cell of the mean's line.
    """
    first = lines[0]
    return Line(
        cells={**first.cells, "method": method, "views": views},
        combines=[(1 / len(lines), line) for line in lines],
        panels=first.panels,
        series=f"{method}, {views}",
    )


def _make_views_table(full: bool) -> Size:
    """Return the lines and seeds of Tables 1 and 2.

    `full`: whether all of the paper's table is measured, or a default part.
    """
    lines: list[Line] = []
    for setting, methods in (
        ("a view each", ("V-FedMV", "MMVFL")),
        ("all views, people apart", ("H-FedMV",)),
    ):
        make = partial(_make_line, _VIEWS_JOB, setting, panel=setting)
        for method in methods:
            lines.append(make(method, "all five", f"{method} all"))
            pairs = [
                make(f"{method}, pairwise", name_places(pair), f"{method} {name_places(pair)}")
                for pair in _PAIRS
            ]
            lines.append(_average_lines(pairs, f"{method}, pairwise", "mean of ten pairs"))
            lines += pairs
    vertical = partial(_make_line, _VIEWS_JOB, "a view each", panel="a view each")
    people_apart = "all views, people apart"
    horizontal = partial(_make_line, _VIEWS_JOB, people_apart, panel=people_apart)
    for method in ("V-FedMV", "MMVFL"):
        lines += [
            vertical(f"{method}, one party predicts", view, f"{method} party {view}")
            for view in _VIEWS
        ]
    lines += [vertical("without FL, Eq. (20)", view, f"alone {view}") for view in _VIEWS]
    lines.append(vertical("all columns in one table, Eq. (20)", "all five", "one table"))
    lines.append(
        _make_line(
            _CLIENTS_JOB,
            people_apart,
            "without FL, mean of clients",
            "all five",
            "MV w/o FL",
            people_apart,
        )
    )
    lines += [horizontal("H-FedMV, single view", view, f"single view FL {view}") for view in _VIEWS]
    return Size(lines, 5 if full else 3)


def _make_sequences_table(full: bool) -> Size:
    """Return the lines and seeds of Table 3.

    `full`: whether all of the paper's table is measured, or a default part.
    """
    make = partial(_make_line, _SEQUENCES_JOB)
    vertical = "a sequence each"
    setting = "all sequences, people apart"
    lines = [
        make(vertical, "V-FedMV", "all five", "V-FedMV", vertical),
        *(
            make(vertical, "without FL, Eq. (20)", view, f"alone {view}", vertical)
            for view in _VIEWS
        ),
        make(setting, "S-FedMV", "all five", "S-FedMV", setting),
        make(setting, "local GRUs, H-FedMV", "all five", "local sequential, H-FedMV", setting),
        make(setting, "local GRUs, without FL", "all five", "local sequential, local MV", setting),
        make(setting, "GRUs of all rows, H-FedMV", "all five", "central", setting),
    ]
    return Size(lines, 5 if full else 3)


_READING = (
    "The paper's rows are not public; these are 2,000 numerals, of which 400 are tested by each "
    "seed. "
)
TABLES: tuple[PaperTable, ...] = (
    PaperTable(
        name="fedmv-views",
        source="FedMV, Tables 1 and 2, on other rows",
        title="FedMV and MMVFL on five views of handwritten numerals",
        unit="accuracy, %",
        form=".1f",
        reading=_READING
        + "All 1,600 others have labels; people apart: 400 at each of four clients. For every line "
        "by itself beta is the one of 0.1, 1 and 4 that predicts a fifth of the training rows "
        "best when the others train; then all train. zeta = eta = 8, of MMVFL its paper's 1,000: "
        "ten iterations, or five rounds.",
        leaves_out="two of five seeds",
        hours=0.3,
        size=_make_views_table,
    ),
    PaperTable(
        name="fedmv-sequences",
        source="FedMV, Table 3, on other rows",
        title="FedMV on handwritten numerals as five sequences",
        unit="accuracy, %",
        form=".1f",
        reading=_READING
        + "pix are 16 rows of 15 pixels; the numbers of the other views are cut into steps, which "
        "are no sequence by nature. 1,280 rows train, and 320 choose for every line by itself the "
        "learning rate (0.001 or 0.005). GRUs of 12 numbers a direction, 10 epochs, dropout 0.1, "
        "beta 0.1, zeta = eta = 8.",
        leaves_out="two of five seeds",
        hours=0.2,
        size=_make_sequences_table,
    ),
)
