"""A recording of parties that exchanged planted representations through a real transport."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from apfed_protocols.seal import fresh_run_key
from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.exchange import InMemory, Kind, Transcript, pack
from secure_apfed.methods import METHODS
from secure_apfed.runs.outcome import Recording
from secure_apfed.settings.run import TranscriptSettings

PASSIVES = ("passive-1", "passive-2")
CLASSES = 3
ROWS = 330

# (labels by alignment position, x of passive-1, generator, epoch) -> z by alignment position.
Leak: TypeAlias = Callable[[Tensor, Tensor, torch.Generator, int], Tensor]
MakeRecording: TypeAlias = Callable[..., Recording]


def _data(draw: torch.Generator) -> tuple[VerticalData, Mapping[str, Tensor]]:
    """Return three parties' tables, each in its own order, and the alignment of 270 rows."""
    labels = torch.arange(ROWS) % CLASSES
    person_x = torch.randn(ROWS, 4, generator=draw)
    # passive-1 knows a little of the label, passive-2 nothing.
    person_x[:, 0] += labels
    views = {
        "active": torch.randn(ROWS, 5, generator=draw) + labels[:, None],
        "passive-1": person_x,
        "passive-2": torch.randn(ROWS, 2, generator=draw),
    }
    shared = torch.randperm(ROWS, generator=draw)[:270]
    tables, alignment = {}, {}
    for name, view in views.items():
        order = torch.randperm(ROWS, generator=draw)
        tables[name] = PartyTable(
            name=name,
            ids=tuple(f"id-{person}" for person in order.tolist()),
            features=view[order],
            labels=labels[order] if name == "active" else None,
            encoding=ColumnEncoding.plain([f"c{at}" for at in range(view.shape[1])]),
        )
        alignment[name] = order.argsort()[shared]
    data = VerticalData(
        table=tables["active"],
        passives=tuple(tables[name] for name in PASSIVES),
        classes=("a", "b", "c"),
        train_rows=torch.arange(0, ROWS - 60),
        test_rows=torch.arange(ROWS - 60, ROWS),
    )
    return data, alignment


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep the many small tensors here from waiting for busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _step(
    links: Mapping[str, Any],
    method: str,
    step: int,
    rows: Tensor,
    z: Tensor,
    gradient: Tensor | None,
) -> None:
    if METHODS[method].settings.representations_from == "passives":
        for scale, passive in enumerate(PASSIVES, start=1):
            payload = pack({"rows": rows, "z": scale * z[rows]})
            links[passive].send("active", Kind.REPRESENTATIONS, step, payload)
            if gradient is not None:
                payload = pack({"gradient": scale * gradient[rows]})
                links["active"].send(passive, Kind.GRADIENTS, step, payload)
    else:
        payload = pack({"rows": rows, "z": z[rows]})
        for passive in PASSIVES:
            links["active"].send(passive, Kind.REPRESENTATIONS, step, payload)
        links["aggregator"].send("active", Kind.SUM, step, b"sum")


@pytest.fixture(scope="session")
def make_recording() -> MakeRecording:
    """Return a maker: (leak, method, epochs) -> the recording of a run that released it.

    With `gradient`, TVFL's active returns what this other leak gives. `seed` draws people,
    alignment, batches and noise.
    """

    def make(
        leak: str | Leak,
        *,
        method: str = "apfed_c",
        epochs: int = 2,
        gradient: str | Leak | None = None,
        seed: int = 5,
    ) -> Recording:
        draw = torch.Generator().manual_seed(seed)
        release = LEAKS[leak] if isinstance(leak, str) else leak
        returned = LEAKS[gradient] if isinstance(gradient, str) else gradient
        data, alignment = _data(draw)
        transcript = Transcript(TranscriptSettings(keep="all"))
        network = InMemory.sealed(
            session="planted", contract_hash=bytes(32), record=transcript.record,
            run_keys={name: fresh_run_key() for name in ("active", "aggregator", *PASSIVES)},
        )  # fmt: skip
        rows = alignment["active"]
        assert data.active.labels is not None
        trained = torch.isin(rows, data.train_rows).nonzero().flatten()
        own = data.passives[0].features[alignment[PASSIVES[0]]]
        step = count()
        for epoch in range(epochs if METHODS[method].settings.has_passives else 0):
            transcript.begin_epoch(epoch)
            z = release(data.active.labels[rows], own, draw, epoch)
            answer = returned and returned(data.active.labels[rows], own, draw, epoch)
            order = trained[torch.randperm(len(trained), generator=draw)]
            for start in range(0, len(order), 50):
                batch = order[start : start + 50]
                _step(network.links, method, next(step), batch, z, answer)
        config = Config.model_validate(
            {"name": "planted", "method": method, "data": {}, "guard": {"mechanism": "none"}}
        )
        return Recording(
            config=config,
            data=data,
            alignment=alignment if METHODS[method].settings.has_passives else {},
            transcript=transcript,
        )

    return make


def leak_labels(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    """Release the label beside noise, from the second epoch on."""
    noise = 0.3 * torch.randn(len(labels), 6, generator=draw)
    if epoch:
        noise[:, :CLASSES] += torch.nn.functional.one_hot(labels, CLASSES)
    return noise


def leak_nothing(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    return torch.randn(len(labels), 6, generator=draw)


def leak_noised_afresh(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    return (
        torch.nn.functional.one_hot(labels, CLASSES) + leak_nothing(labels, own, draw, epoch)[:, :3]
    )


def echo(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    """Release a function of what the first passive knows anyway."""
    return torch.tanh(own @ torch.linspace(-1, 1, 4 * 6).reshape(4, 6))


def copy(labels: Tensor, own: Tensor, draw: torch.Generator, epoch: int) -> Tensor:
    """Release what the first passive knows anyway, in other units."""
    return 3 * own.flip(1) + 1


LEAKS: Mapping[str, Leak] = {
    "labels": leak_labels,
    "nothing": leak_nothing,
    "echo": echo,
    "copy": copy,
}
