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
from typing import Any

from apfed_bench.rows import Bench, Group, Row, row, single
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.exchange import Kind
from secure_apfed.runs.outcome import RunResult
from secure_apfed.runs.run import run

__all__ = [
    "BENCH", "apc_vfl_bytes", "split_nn_backward_bytes", "split_nn_forward_bytes",
    "vfedtrans_bytes",
]  # fmt: skip

_NUMBER = 4
_ACTIVE = (
    "worst compactness", "concave points error", "smoothness error", "mean texture",
    "worst fractal dimension",
)  # fmt: skip
_MEASURES = (
    "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity",
    "concave points", "symmetry", "fractal dimension",
)  # fmt: skip
_COUNTED = (
    Kind.REQUEST, Kind.REPRESENTATIONS, Kind.GRADIENTS, Kind.DEALT, Kind.CONTRIBUTION,
    Kind.SINGULAR_VECTORS,
)  # fmt: skip
_WIDTHS = {"network": "selu", "hidden": (64,), "representation": 128}
_PASSIVE = {"network": "selu", "hidden": (128,), "representation": 256}
_BRIEF: Mapping[str, Any] = {"train": {"epochs": 1, "device": "cpu"}}


# What APC-VFL, SplitNN and VFedTrans send, by the formulas of APC-VFL's Appendix E.
#
# Run by: whoever compares methods by bytes. Numbers weigh 4 bytes there (float32), nothing frames
# or seals them, and requests are not counted. Its own figures of APC-VFL (Table 2: 9.73 MB for
# 10,000 aligned rows, of which 500 test) are Eq. (6) at MB of 10^6. Where a formula is not legible
# in the text, it is written from the exchanges that the appendix lists; `secure-apfed bench
# footprint` puts what this library sends beside it.


def apc_vfl_bytes(rows: int, *, numbers: int = 256) -> int:
    """Eq. (6): one passive's codes of N aligned rows, of so many numbers (Table 3), once.

    Example:
        >>> apc_vfl_bytes(9500) / 1e6
        9.728
    """
    return _NUMBER * rows * numbers


def split_nn_forward_bytes(rows: int, *, epochs: int, numbers: int = 256) -> int:
    """Eq. (7): the same in each epoch."""
    return epochs * apc_vfl_bytes(rows, numbers=numbers)


def split_nn_backward_bytes(
    rows: int, *, epochs: int, batch_size: int, inputs: int = 128, numbers: int = 256
) -> int:
    """Eq. (8): for each batch as many numbers as the last layer of the passive's encoder has.

    That is the gradient of weights. What the passive needs, and this library's active sends, is the
    gradient on the batch's representations: `batch_size * numbers` instead of `(inputs + 1) *
    numbers`, which is as much at 129 rows a batch and a sixteenth at 8.
    `inputs` and `numbers` are those of that layer (Table 3).
    """
    return _NUMBER * epochs * -(-rows // batch_size) * (inputs + 1) * numbers


def vfedtrans_bytes(rows: int, features: Sequence[int]) -> int:
    """Eq. (10): FedSVD's five exchanges, with the mask of rows as a matrix.

    The key generator sends P (N x N) and Q_i (F_i x F) to each party, each party P X_i Q_i (N x F)
    to the server, the server U' to the active, here N x min(N, F) as in VFedTrans' release.
    `features` are F_i of each party, the active's first; two in the paper.
    """
    parties, total = len(features), sum(features)
    masks = parties * rows * rows + total * total
    return _NUMBER * (masks + parties * rows * total + rows * min(rows, total))


def _groups(quick: bool) -> Sequence[Group]:
    epochs = 2 if quick else 20
    return [
        single("apc_vfl", _distilled),
        *(
            single(f"split_nn/b{batch_size}/e{epochs}", _split, batch_size, epochs)
            for batch_size in (128, 8)
        ),
        Group(("vfedtrans", "vfedtrans, P not counted"), _decomposed),
    ]


BENCH = Bench(
    groups=_groups, ratio="bytes that messages hold over the formula's",
    fields=("payload", "formula", "rows"),
)  # fmt: skip


def _distilled(case: str) -> Row:
    model = {"network": "selu", "hidden": (256,), "representation": 256}
    sent = _sent({"name": "apc_vfl", "epochs": 1}, model=model, **_BRIEF)
    rows = sum(_rows(sent))
    return _row(case, sent, rows, apc_vfl_bytes(rows))


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


def _sent(method: str | Mapping[str, Any], **changes: Any) -> tuple[RunResult, float]:
    columns = [
        *(f"mean {name}" for name in _MEASURES), *(f"{name} error" for name in _MEASURES),
        *(f"worst {name}" for name in _MEASURES),
    ]  # fmt: skip
    others = tuple(name for name in columns if name not in _ACTIVE)
    held = {"active": _ACTIVE, "passive-1": others}
    config = Config.model_validate({
        "name": "footprint", "method": method, "guard": {"mechanism": "none"},
        "data": {"dataset": "breast_cancer", "overlap": 0.6, "columns": held},
        "transcript": {"keep": "none"}, **changes,
    })  # fmt: skip
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        return run(config, None), time.perf_counter() - began


def _rows(sent: tuple[RunResult, float]) -> tuple[int, int]:
    """Aligned training rows, and aligned test rows."""
    recording = sent[0].recording
    aligned = set(recording.alignment["active"].tolist())
    train, test = recording.data.train_rows.tolist(), recording.data.test_rows.tolist()
    return len(aligned.intersection(train)), len(aligned.intersection(test))


def _row(case: str, sent: tuple[RunResult, float], rows: int, formula: int) -> Row:
    result, seconds = sent
    flows = [flow for flow in result.recording.transcript.flows if flow.kind in _COUNTED]
    payload, wire = (
        sum(getattr(flow, counted) for flow in flows) for counted in ("payload_bytes", "wire_bytes")
    )
    return row(
        case, seconds, peer="Appendix E", ratio=payload / formula, sent=wire, payload=payload,
        formula=formula, rows=rows,
    )  # fmt: skip
