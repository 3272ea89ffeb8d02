"""Bytes that a run sends for its method, beside the formulas of APC-VFL's Appendix E.

Cases: breast cancer between two parties, five columns at the active (Appendix A) and the other 25
at the passive, the widths of Table 3. Ours: what messages with rows, codes, masks, tables and
gradients hold, and `bytes` the same on the wire, with headers and seals. Peer: the formula, of the
rows that were asked for: the evaluation at the end asks for those of tests, too. Set-up, alignment
and the end of a session are left out on both sides.
"""

import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from apfed_experiments.bench.rows import Bench, Group, Row, single
from apfed_experiments.footprint import (
    apc_vfl_bytes,
    split_nn_backward_bytes,
    split_nn_forward_bytes,
    vfedtrans_bytes,
)
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.exchange import Kind
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run

__all__ = ["BENCH"]

_ACTIVE = (
    "worst compactness", "concave points error", "smoothness error", "mean texture",
    "worst fractal dimension",
)  # fmt: skip
_COUNTED = (
    Kind.REQUEST, Kind.REPRESENTATIONS, Kind.GRADIENTS, Kind.DEALT, Kind.CONTRIBUTION,
    Kind.SINGULAR_VECTORS,
)  # fmt: skip
_WIDTHS = {"network": "selu", "hidden": (64,), "representation": 128}
_PASSIVE = {"network": "selu", "hidden": (128,), "representation": 256}
_BRIEF: Mapping[str, Any] = {
    "train": {"epochs": 1, "device": "cpu"},
}


def _groups(quick: bool) -> Sequence[Group]:
    epochs = 2 if quick else 20
    return [
        single("apc_vfl", _distilled),
        *(
            single(
                case := f"split_nn/b{batch_size}/e{epochs}",
                partial(_split, case, batch_size, epochs),
            )
            for batch_size in (128, 8)
        ),
        Group(("vfedtrans", "vfedtrans, P not counted"), _decomposed),
    ]


BENCH = Bench(
    groups=_groups,
    ratio="bytes that messages hold over the formula's",
    fields=("payload", "formula", "rows"),
)


def _distilled() -> Row:
    model = {"network": "selu", "hidden": (256,), "representation": 256}
    sent = _sent({"name": "apc_vfl", "epochs": 1}, model=model, **_BRIEF)
    rows = sum(_rows(sent))
    return _row("apc_vfl", sent, rows, apc_vfl_bytes(rows))


def _split(case: str, batch_size: int, epochs: int) -> Row:
    sent = _sent(
        "split_nn", model=_WIDTHS, passives={"default": {"model": _PASSIVE}},
        train={"epochs": epochs, "batch_size": batch_size, "device": "cpu"},
    )  # fmt: skip
    train, test = _rows(sent)
    formula = split_nn_forward_bytes(train, epochs=epochs) + apc_vfl_bytes(test)
    formula += split_nn_backward_bytes(train, epochs=epochs, batch_size=batch_size)
    return _row(case, sent, epochs * train + test, formula)


def _decomposed(_: Collection[str]) -> Iterator[Row]:
    """Two formulas beside the same run."""
    enriched = {"network": "enriched", "hidden": (256,), "representation": 30}
    sent = _sent({"name": "vfedtrans", "epochs": 1}, model=enriched, **_BRIEF)
    train, _test = _rows(sent)
    whole = vfedtrans_bytes(train, (5, 25))
    yield _row("vfedtrans", sent, train, whole)
    yield _row("vfedtrans, P not counted", sent, train, whole - 4 * 2 * train * train)


@dataclass(frozen=True)
class _Sent:
    """A run, and its seconds."""

    result: RunResult
    seconds: float


def _sent(method: str | Mapping[str, Any], **changes: Any) -> _Sent:
    settings: Mapping[str, Any] = {
        "name": "footprint",
        "method": method,
        "data": {"dataset": "breast_cancer", "overlap": 0.6, "columns": _columns()},
        "guard": {"mechanism": "none"},
        "transcript": {"keep": "none"},
    }
    config, began = Config.model_validate({**settings, **changes}), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        result = run(config, None)
    return _Sent(result, time.perf_counter() - began)


def _columns() -> dict[str, tuple[str, ...]]:
    measures = (
        "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity",
        "concave points", "symmetry", "fractal dimension",
    )  # fmt: skip
    names = [f"mean {one}" for one in measures] + [f"{one} error" for one in measures]
    names += [f"worst {one}" for one in measures]
    return {
        "active": _ACTIVE,
        "passive-1": tuple(name for name in names if name not in _ACTIVE),
    }


def _rows(sent: _Sent) -> tuple[int, int]:
    """Aligned training rows, and aligned test rows."""
    recording = sent.result.recording
    aligned = set(recording.alignment["active"].tolist())
    train, test = recording.data.train_rows.tolist(), recording.data.test_rows.tolist()
    return len(aligned.intersection(train)), len(aligned.intersection(test))


def _row(case: str, sent: _Sent, rows: int, formula: int) -> Row:
    flows = [flow for flow in sent.result.recording.transcript.flows if flow.kind in _COUNTED]
    payload = sum(flow.payload_bytes for flow in flows)
    return Row(
        case=case,
        seconds=sent.seconds,
        peer="Appendix E",
        ratio=payload / formula,
        bytes=sum(flow.wire_bytes for flow in flows),
        more={"payload": payload, "formula": formula, "rows": rows},
    )
