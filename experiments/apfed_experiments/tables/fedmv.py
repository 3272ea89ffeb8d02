"""FedMV's tables and figures, on Handwritten and on synthetic sessions of typing.

Tables 1 to 3 of the paper (views that are shared, people that are shared, and sequences) and its
Figure 6 (how much the weights of the objective matter). The paper's sessions are not public, so
that ours are synthetic, and its figures stand beside them as a guide to the order of methods alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.manifold import TSNE
from sklearn.metrics import accuracy_score, precision_recall_fscore_support, silhouette_score
from torch import nn

from apfed_experiments.drawing import ATTACK, OURS, drawing
from apfed_experiments.tables.table import Figures, Job, Line, PaperTable, Printed, Size
from secure_apfed.data import VerticalData, load_data
from secure_apfed.learning.descent import Compute
from secure_apfed.methods.averaging import LinearViews, SequenceViews
from secure_apfed.methods.multiview import Floats, Pull, ViewModel, joint_scores, weights_of
from secure_apfed.models import SequenceEncoder
from secure_apfed.seeds import seeded
from secure_apfed.settings.data import DataSettings
from secure_apfed.settings.training import TrainSettings

_Rows = NDArray[np.int64]
_BETA, _WEIGHT = 4.0, 8.0
_METRICS = ("accuracy", "precision", "recall", "F1")
# Tables 1 to 3 of the paper, on BiAffect: accuracy, precision, recall, F1, mean and deviation.
_PRINTED: Mapping[str, tuple[float, ...]] = {
    "V-FedMV": (88.76, 0.74, 90.89, 0.83, 87.09, 1.89, 88.93, 0.84),
    "V w/o special": (88.30, 0.64, 89.54, 0.69, 87.72, 1.47, 88.61, 0.70),
    "V w/o accel": (84.92, 0.50, 89.00, 1.34, 81.01, 2.00, 84.79, 0.67),
    "V w/o alphanum": (78.71, 0.74, 79.63, 1.59, 79.42, 3.34, 79.45, 1.11),
    "alphanum w/o FL": (84.53, 0.68, 87.58, 0.88, 81.81, 1.40, 84.59, 0.75),
    "accel w/o FL": (76.94, 0.91, 75.51, 1.03, 82.32, 2.73, 78.73, 1.13),
    "special w/o FL": (62.30, 0.64, 70.19, 1.81, 47.83, 3.09, 56.79, 1.87),
    "H-FedMV": (88.98, 0.52, 91.01, 0.80, 87.42, 1.33, 89.17, 0.57),
    "MV w/o FL": (87.92, 0.51, 90.21, 1.53, 86.15, 2.58, 88.09, 0.72),
    "H w/o special": (88.28, 0.65, 89.67, 0.69, 87.52, 1.54, 88.57, 0.72),
    "H w/o accel": (84.72, 1.01, 89.06, 1.10, 80.47, 2.40, 84.52, 1.23),
    "H w/o alphanum": (78.77, 0.72, 79.70, 1.60, 79.45, 3.17, 79.51, 0.99),
    "alphanum FL": (84.57, 0.65, 87.53, 0.79, 81.97, 1.44, 84.65, 0.73),
    "accel FL": (76.96, 0.91, 75.51, 1.07, 82.39, 2.60, 78.77, 1.09),
    "special FL": (62.26, 0.58, 70.20, 1.81, 47.65, 3.02, 56.67, 1.81),
    "S-FedMV": (88.90, 0.53, 89.93, 0.82, 88.54, 1.16, 89.22, 0.55),
    "Local sequential H-FedMV": (68.31, 5.58, 74.77, 5.39, 58.10, 9.06, 65.24, 7.82),
    "Local sequential LocalMV": (82.27, 0.91, 84.87, 1.50, 80.34, 0.44, 82.44, 0.77),
}
_PANELS = {"Table 1": 7, "Table 2": 8, "Table 3": 3}
_SHARED = 0.25  # a quarter tests: `apfed_experiments.summary.shared_share`
_SIZE = {"rows": 1200, "units": 12, "epochs": 30}
_READING = (
    "SYNTHETIC sessions of typing (`synthetic_keystrokes`), 1,200 of them, a quarter to test: the "
    "paper's 14,971 sessions of BiAffect are not public, so that only the order of methods can be "
    "compared. Four clients; GRUs of 12 units a direction, 30 epochs, or 20 rounds of 3 epochs "
    "(paper: 500 epochs, or 150 rounds of 10 to 15); beta 4, all other weights 8."
)


# What FedMV's tables measure: methods on views that clients hold, and on sequences.
#
# Everything is computed at once, in the order in which parties would: that runs of theirs give the
# same is tested (`tests/secure_apfed/test_methods_views.py`).
# Letters: N rows, F features of a view, C classes.


@dataclass(frozen=True, eq=False)
class _Clients:
    """Views of each client's training rows, by client and view, (N, F), their labels (N,), and the
    same of the test rows.
    """

    train: Sequence[Sequence[Floats]]
    truth: Sequence[_Rows]
    test: Sequence[Floats]
    wanted: _Rows

    @property
    def pooled(self) -> "_Clients":
        views = [np.concatenate(parts) for parts in zip(*self.train, strict=True)]
        return _Clients([views], [np.concatenate(list(self.truth))], self.test, self.wanted)

    def only(self, views: Sequence[int]) -> "_Clients":
        train = [[client[at] for at in views] for client in self.train]
        return _Clients(train, self.truth, [self.test[at] for at in views], self.wanted)

    def alone(self, client: int) -> "_Clients":
        return _Clients([self.train[client]], [self.truth[client]], self.test, self.wanted)


def _parts(
    data: VerticalData,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, _Rows]:
    """Training rows of each client with their labels, and the test rows and theirs."""
    labels_N, features_NF = data.active.labels, data.active.features
    assert labels_N is not None
    parts = [(features_NF[data.train_rows], labels_N[data.train_rows])]
    parts += [(of.features, of.labels) for of in data.passives if of.labels is not None]
    return parts, features_NF[data.test_rows], labels_N[data.test_rows].numpy()


def _h_fedmv(clients: _Clients, **options: Any) -> Floats:
    """Algorithm 3, or with one client multi-view learning; the scores of the test rows."""
    return joint_scores(_views_of(clients, **options), np.arange(len(clients.wanted)))


def _views_of(
    clients: _Clients, *, seed: int, rounds: int = 20, zetas: Sequence[float] = (),
    eta: float = _WEIGHT,
) -> Sequence[ViewModel]:  # fmt: skip
    """Algorithm 3; return the views with their average weights, and with the test rows.

    `zetas` are of each view (empty: 8 for all), `eta` of the labels; `seed` is of starts.
    """
    classes = int(max(labels.max() for labels in clients.truth)) + 1
    each = list(zetas) or [_WEIGHT] * len(clients.test)
    models = []
    for at, (views, truth_N) in enumerate(zip(clients.train, clients.truth, strict=True)):
        rng = np.random.default_rng((seed, at))
        pull = Pull(np.eye(classes)[truth_N], np.full((len(truth_N), 1), eta))
        held = [
            ViewModel.begin(x_NF, classes, rng, beta=_BETA, zeta=zeta, tolerance=1e-6,
                            most_rounds=50)
            for x_NF, zeta in zip(views, each, strict=True)
        ]  # fmt: skip
        models.append(LinearViews(held, pull, tolerance=1e-4, rounds=30))
    rows = np.array([len(truth) for truth in clients.truth])
    average = models[0].weights
    for step in range(rounds):
        for model in models:
            model.load(average)
            model.train(step)
        weights = [model.weights for model in models]
        average = np.tensordot(rows / rows.sum(), weights, 1)
    models[0].load(average)
    for view, x_NF in zip(models[0].views, clients.test, strict=True):
        view.x_NF = x_NF
    return models[0].views


def _multi_view(clients: _Clients, *, seed: int, **weights: Any) -> Floats:
    """V-FedMV, which is multi-view learning on the pooled rows.

    With one view it is Eq. (20) at another beta, (1 + 1 / zeta + 1 / eta) times its own: what the
    pseudo-labels may differ by is minimised over, too. `_single_view` is Eq. (20) itself.
    """
    return _h_fedmv(clients.pooled, seed=seed, rounds=3, **weights)


def _single_view(clients: _Clients) -> Floats:
    """Eq. (20): |X W - Y|^2 + beta |W|_21 of one view, the weights averaged over the clients.

    Every client's minimum is its own whatever it begins with, so that one round is all (section
    8.3, Single View FL); of pooled rows it is the view without federated learning.
    """
    classes = int(max(labels.max() for labels in clients.truth)) + 1
    rows = np.array([len(truth) for truth in clients.truth])
    weights = []
    for (x_NF,), truth_N in zip(clients.train, clients.truth, strict=True):
        begin = np.ones((x_NF.shape[1], classes))
        weights.append(weights_of(x_NF, np.eye(classes)[truth_N], _BETA, begin))
    (test_NF,) = clients.test
    return np.asarray(test_NF @ np.tensordot(rows / rows.sum(), weights, 1))


def _scored(name: str, scores_NC: Floats, clients: _Clients) -> dict[str, float]:
    """Accuracy, and precision, recall and F1 of the second class, per cent, by name and metric."""
    guessed_N, wanted_N = scores_NC.argmax(1), clients.wanted
    found = precision_recall_fscore_support(
        wanted_N, guessed_N, labels=[1], average="macro", zero_division=0.0
    )
    values = (accuracy_score(wanted_N, guessed_N), *found[:3])
    return {
        f"{name} {metric}": 100 * float(of) for metric, of in zip(_METRICS, values, strict=True)
    }


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([of[name] for of in found])) for name in found[0]}


@dataclass(frozen=True, eq=False)
class _Sessions:
    """Sequences of every client and of the test rows, flat, and how they fold."""

    parts: Sequence[tuple[torch.Tensor, torch.Tensor]]
    test: torch.Tensor
    wanted: _Rows
    sequences: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, data: VerticalData) -> "_Sessions":
        """Of a horizontal partition whose views are sequences."""
        sequences = [view.sequence for view in data.active.views.values() if view.sequence]
        return cls(*_parts(data), sequences)

    @property
    def pooled(self) -> "_Sessions":
        features, labels = zip(*self.parts, strict=True)
        parts = [(torch.cat(features), torch.cat(labels))]
        return _Sessions(parts, self.test, self.wanted, self.sequences)

    def encoded(self, encoders: Sequence[SequenceEncoder], *, by: int = 0) -> _Clients:
        """The states of each client's GRUs, and of the test rows by those of client `by`."""

        def states(encoder: SequenceEncoder, features_NF: torch.Tensor) -> list[Floats]:
            with torch.no_grad():
                return [part.double().numpy() for part in encoder.parts(features_NF)]

        pairs = zip(encoders, self.parts, strict=True)
        train = [states(encoder, features) for encoder, (features, _) in pairs]
        truth = [labels.numpy() for _, labels in self.parts]
        return _Clients(train, truth, states(encoders[by], self.test), self.wanted)


def _trained(
    sessions: _Sessions, *, seed: int, units: int, rounds: int, epochs: int, average: bool
) -> list[SequenceEncoder]:
    """Algorithm 4: each client's GRUs, averaged after every round of epochs, or never."""
    models = []
    for at, (features, labels) in enumerate(sessions.parts):
        with seeded(seed, "start"):
            encoder = SequenceEncoder(sessions.sequences, units)
            heads = nn.ModuleList(nn.Linear(2 * units, 2, bias=False) for _ in sessions.sequences)
        models.append(
            SequenceViews(
                f"client {at}", encoder=encoder, heads=heads, features_N=features,
                labels_N=labels, local_epochs=epochs, batch_size=64,
                compute=Compute.of(TrainSettings(device="cpu")), seed=seed,
            )
        )  # fmt: skip
    rows = np.array([len(labels) for _, labels in sessions.parts])
    for step in range(rounds):
        for model in models:
            model.train(step)
        if average:
            weights = np.tensordot(rows / rows.sum(), [model.weights for model in models], 1)
            for model in models:
                model.load(weights)
    return [model.encoder for model in models]


def _centrally(sessions: _Sessions, *, seed: int, units: int, epochs: int) -> _Clients:
    """All clients' states by GRUs that were trained on the rows of all."""
    (central,) = _trained(
        sessions.pooled, seed=seed, units=units, rounds=1, epochs=epochs, average=False
    )
    return sessions.encoded([central] * len(sessions.parts))


def _sessions(seed: int, rows: int) -> _Sessions:
    settings = DataSettings(
        dataset="synthetic_keystrokes", partition="horizontal", clients=4, rows=rows
    )
    return _Sessions.of(load_data(settings, seed=seed))


_VIEWS = ("alphanum", "special", "accel")


def _measure_sessions(
    *, seed: int, rows: int, units: int, epochs: int, rounds: int, local_epochs: int
) -> Figures:
    """Tables 1 to 3: by method and metric.

    GRUs of so many units a direction train for `epochs`, or where they are averaged for `rounds` of
    `local_epochs`; `rows` are sessions in all.
    """
    sessions = _sessions(seed, rows)
    clients = _centrally(sessions, seed=seed, units=units, epochs=epochs)
    shared = sessions.encoded(
        _trained(sessions, seed=seed, units=units, rounds=rounds, epochs=local_epochs, average=True)
    )
    local = _trained(sessions, seed=seed, units=units, rounds=1, epochs=epochs, average=False)
    found = {**_tables_of(clients, seed), **_scored("S-FedMV", _h_fedmv(shared, seed=seed), shared)}
    own = [sessions.encoded(local, by=at) for at in range(len(local))]
    name = "Local sequential"
    found |= _mean([_scored(f"{name} H-FedMV", _h_fedmv(of, seed=seed), of) for of in own])
    return found | _mean([
        _scored(f"{name} LocalMV", _multi_view(of.alone(at), seed=seed), of)
        for at, of in enumerate(own)
    ])  # fmt: skip


def _tables_of(clients: _Clients, seed: int) -> dict[str, float]:
    """Tables 1 and 2, whose views were made by one GRU a view for all clients."""
    found = _scored("V-FedMV", _multi_view(clients, seed=seed), clients)
    found |= _scored("H-FedMV", _h_fedmv(clients, seed=seed), clients)
    found |= _mean([
        _scored("MV w/o FL", _multi_view(clients.alone(at), seed=seed), clients)
        for at in range(len(clients.train))
    ])  # fmt: skip
    for kept in combinations(range(len(_VIEWS)), 2):
        (gone,) = set(range(len(_VIEWS))) - set(kept)
        both = clients.only(kept)
        found |= _scored(f"V w/o {_VIEWS[gone]}", _multi_view(both, seed=seed), both)
        found |= _scored(f"H w/o {_VIEWS[gone]}", _h_fedmv(both, seed=seed), both)
    for at, view in enumerate(_VIEWS):
        alone = clients.only([at])
        found |= _scored(f"{view} w/o FL", _single_view(alone.pooled), alone)
        found |= _scored(f"{view} FL", _single_view(alone), alone)
    return found


def _measure_weights(
    *, seed: int, rows: int, units: int, epochs: int, values: Sequence[float]
) -> Figures:
    """Figure 6: accuracy where one weight of the objective differs from 8."""
    sessions = _sessions(seed, rows)
    clients = _centrally(sessions, seed=seed, units=units, epochs=epochs)
    found: dict[str, float] = {}
    for value in values:
        for at, view in enumerate(_VIEWS):
            zetas = [value if at == other else _WEIGHT for other in range(len(_VIEWS))]
            found |= _both(clients, f"zeta of {view} {value:g}", seed=seed, zetas=zetas)
        found |= _both(clients, f"eta {value:g}", seed=seed, eta=value)
    return found


def _both(clients: _Clients, name: str, *, seed: int, **weights: Any) -> dict[str, float]:
    return {
        f"{title} {name}": _scored("", of(clients, seed=seed, **weights), clients)[" accuracy"]
        for title, of in (("V-FedMV", _multi_view), ("H-FedMV", _h_fedmv))
    }


def _measure_handwritten(*, seed: int) -> Figures:
    """Accuracy on Handwritten by the number of views, in the order of the paper's Table 1."""
    order = ("zer", "fou", "kar", "pix", "fac")
    settings = DataSettings(dataset="handwritten", partition="horizontal", clients=4, views=order)
    data = load_data(settings, seed=seed)
    parts, test_NF, wanted_N = _parts(data)

    def views(features_NF: torch.Tensor) -> list[Floats]:
        return [
            features_NF[:, view.columns].double().numpy() for view in data.active.views.values()
        ]

    train, truth = [views(of) for of, _ in parts], [labels.numpy() for _, labels in parts]
    clients, found = _Clients(train, truth, views(test_NF), wanted_N), dict[str, float]()
    for many in range(1, len(order) + 1):
        some = clients.only(range(many))
        found |= _both(some, f"{many}", seed=seed)
        local = [_multi_view(some.alone(at), seed=seed).argmax(1) for at in range(len(some.train))]
        found[f"MV w/o FL {many}"] = 100 * float(
            np.mean([guessed == some.wanted for guessed in local])
        )
    return found


def _measure_spaces(**size: int) -> Figures:
    """How far the classes lie apart in each of `_spaces`: the silhouette, -1 to 1."""
    found, wanted_N = _spaces(**size)
    return {name: float(silhouette_score(of, wanted_N)) for name, of in found.items()}


def _spaces(*, seed: int, rows: int, units: int, epochs: int) -> tuple[dict[str, Floats], _Rows]:
    """Figure 5: the test rows as GRUs give them, as views score them, and as Z, both methods; and
    their labels.
    """
    sessions = _sessions(seed, rows)
    clients = _centrally(sessions, seed=seed, units=units, epochs=epochs)
    every = np.arange(len(sessions.wanted))
    found = {f"before: {view}": of for view, of in zip(_VIEWS, clients.test, strict=True)}
    for method, views in (
        ("V-FedMV", _views_of(clients.pooled, seed=seed, rounds=3)),
        ("H-FedMV", _views_of(clients, seed=seed)),
    ):
        for name, view in zip(_VIEWS, views, strict=True):
            found[f"{method}: {name}"] = view.scores(every)
        found[f"{method}: Z"] = joint_scores(views, every)
    return found, sessions.wanted


def _keystrokes(full: bool) -> Size:
    job = Job(
        label="sessions", measure=_measure_sessions,
        settings={**_SIZE, "rounds": 20, "local_epochs": 3},
    )  # fmt: skip
    panels = [name for name, many in _PANELS.items() for _ in range(many)]
    lines = [
        Line(
            cells={"table": panel, "method": method, "metric": metric},
            job=job, figure=f"{method} {metric}",
            paper=Printed(mean=printed[2 * at], sd=printed[2 * at + 1]), panels=(panel,),
            series=method if metric == "accuracy" else "",
        )
        for panel, (method, printed) in zip(panels, _PRINTED.items(), strict=True)
        for at, metric in enumerate(_METRICS)
    ]  # fmt: skip
    return Size(lines, 10 if full else 3)


_VALUES = tuple(2.0**power for power in range(6))


def _weights(full: bool) -> Size:
    settings = {**_SIZE, "values": list(_VALUES)}
    job = Job(label="weights", measure=_measure_weights, settings=settings)
    lines = [
        Line(
            cells={"weight": weight, "method": method, "value": f"{value:g}"},
            job=job, figure=f"{method} {weight} {value:g}", panels=(weight,), series=method,
            at=np.log2(value),
        )
        for weight in (*(f"zeta of {view}" for view in _VIEWS), "eta")
        for method in ("V-FedMV", "H-FedMV")
        for value in _VALUES
    ]  # fmt: skip
    return Size(lines, 10 if full else 3)


def _by_views(full: bool) -> Size:
    job = Job(label="handwritten", measure=_measure_handwritten)
    lines = [
        Line(
            cells={"method": method, "views": str(many)}, job=job, figure=f"{method} {many}",
            series=method, at=many,
        )
        for method in ("V-FedMV", "H-FedMV", "MV w/o FL")
        for many in range(1, 6)
    ]  # fmt: skip
    return Size(lines, 10 if full else 5)


def _silhouettes(full: bool) -> Size:
    job = Job(label="spaces", measure=_measure_spaces, settings=_SIZE)
    names = [f"before: {view}" for view in _VIEWS]
    names += [f"{method}: {of}" for method in ("V-FedMV", "H-FedMV") for of in (*_VIEWS, "Z")]
    lines = [Line(cells={"space": name}, job=job, figure=name, series=name) for name in names]
    return Size(lines, 10 if full else 3)


def _draw_spaces(path: Path) -> None:
    """t-SNE of the first seed's test rows in every space, a colour a class."""
    found, wanted_N = _spaces(seed=0, **_SIZE)
    with drawing(path, (12.0, 9.0)) as figure:
        grid = figure.subplots(3, 4)
        places = [at for at in range(12) if at != 3]
        grid.flat[3].remove()
        for at, (name, of_NF) in zip(places, found.items(), strict=True):
            flat_N2 = TSNE(init="pca", random_state=0).fit_transform(of_NF)
            for label, colour in enumerate((OURS, ATTACK)):
                kept = wanted_N == label
                grid.flat[at].scatter(*flat_N2[kept].T, s=6, color=colour, label=f"class {label}")
            grid.flat[at].set(title=name, xticks=[], yticks=[])
        figure.suptitle("synthetic sessions of typing: test rows, t-SNE")
        figure.legend(
            *grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
        )


_table = partial(PaperTable, leaves_out="seven of ten seeds", shared=_SHARED)
TABLES: tuple[PaperTable, ...] = (
    _table(
        name="fedmv-spaces", source="FedMV, Figure 5", unit="silhouette of the classes", hours=0.5,
        title="Where people of the two classes lie before and after FedMV, synthetic sessions",
        reading=f"{_READING} Test rows; the picture is t-SNE of the first seed's.",
        size=_silhouettes, picture=_draw_spaces,
    ),
    _table(
        name="fedmv-keystrokes", source="FedMV, Tables 1 to 3", unit="%", hours=1.0, form=".1f",
        title="FedMV on synthetic sessions of typing", reading=_READING, size=_keystrokes,
    ),
    _table(
        name="fedmv-weights", source="FedMV, Figure 6", unit="accuracy, %", hours=0.5, form=".1f",
        title="FedMV by the weights of its objective, on synthetic sessions of typing",
        reading=f"{_READING} One weight differs from 8.", size=_weights, axis="log2 of the weight",
    ),
    _table(
        name="fedmv-handwritten", source="FedMV, sections 8.3 and 8.4, on other data",
        title="FedMV on Handwritten by the number of views", unit="accuracy, %",
        reading="Views in the order zer, fou, kar, pix, fac; four clients, equally many rows of "
        "each class; beta 4, all other weights 8. The paper does not use this set.",
        leaves_out="five of ten seeds", hours=0.2, size=_by_views, axis="views", form=".1f",
    ),
)  # fmt: skip
