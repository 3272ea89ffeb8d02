"""A recording of parties that exchanged planted representations."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from secure_apfed.config import Config
from secure_apfed.data import ColumnEncoding, PartyTable, VerticalData
from secure_apfed.exchange import Envelope, Kind, Transcript, pack_tensors
from secure_apfed.methods import METHODS
from secure_apfed.runs.outcome import Recording
from secure_apfed.settings import TranscriptSettings

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
    tables = {}
    alignment = {}
    for name, view in views.items():
        order = torch.randperm(ROWS, generator=draw)
        tables[name] = PartyTable(
            name=name,
            ids=tuple(f"id-{person}" for person in order.tolist()),
            features=view[order],
            labels=labels[order] if name == "active" else None,
            encoding=ColumnEncoding.for_numeric_columns([f"c{at}" for at in range(view.shape[1])]),
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


def note(
    transcript: Transcript, kind: Kind, sender: str, receiver: str, step: int, **tensors: Tensor
) -> None:
    """Put a message into a transcript."""
    note_payload(transcript, kind, sender, receiver, step, pack_tensors(tensors))


def note_payload(
    transcript: Transcript, kind: Kind, sender: str, receiver: str, step: int, payload: bytes
) -> None:
    """Put a message of these bytes into a transcript."""
    envelope = Envelope(
        session="planted",
        step=step,
        kind=kind,
        sender=sender,
        receiver=receiver,
        sequence=step,
        payload=payload,
    )
    transcript.record_envelope(envelope, 0)


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
        settings = METHODS[method].settings
        rows = alignment["active"]
        step = count()
        assert data.active.labels is not None
        trained = torch.isin(rows, data.train_rows).nonzero().flatten()
        own = data.passives[0].features[alignment[PASSIVES[0]]]
        for epoch in range(epochs if settings.has_passives else 0):
            transcript.begin_epoch(epoch)
            z = release(data.active.labels[rows], own, draw, epoch)
            answer = returned and returned(data.active.labels[rows], own, draw, epoch)
            for batch in trained[torch.randperm(len(trained), generator=draw)].split(50):
                at = next(step)
                released = {"rows": batch, "z": z[batch]}
                if settings.representation_sender == "passives":
                    for scale, passive in enumerate(PASSIVES, start=1):
                        released["z"] = scale * z[batch]
                        note(transcript, Kind.REPRESENTATIONS, passive, "active", at, **released)
                        if answer is not None:
                            gradient_BD = scale * answer[batch]
                            note(
                                transcript,
                                Kind.GRADIENTS,
                                "active",
                                passive,
                                at,
                                gradient=gradient_BD,
                            )
                else:
                    for passive in PASSIVES:
                        note(transcript, Kind.REPRESENTATIONS, "active", passive, at, **released)
                    note(transcript, Kind.SUM, "aggregator", "active", at)
        config = Config.model_validate(
            {"name": "planted", "method": method, "data": {}, "guard": {"mechanism": "none"}}
        )
        aligned = alignment if settings.has_passives else {}
        return Recording(config=config, data=data, alignment=aligned, transcript=transcript)

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
    noise = leak_nothing(labels, own, draw, epoch)[:, :CLASSES]
    return torch.nn.functional.one_hot(labels, CLASSES) + noise


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
