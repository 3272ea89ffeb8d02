"""Bytes that a run sends for its method, beside the formulas of APC-VFL's Appendix E.

Cases: breast cancer between two parties, five columns at the active (Appendix A) and the other 25
at the passive, the widths of Table 3. Ours: what messages with rows, codes, masks, tables and
gradients hold, and `bytes` the same on the wire, with headers and seals. Peer: the formula, of the
rows that were asked for: the evaluation at the end asks for those of tests, too. Set-up, alignment
and the end of a session are left out on both sides.

Numbers weigh 4 bytes in the formulas (float32), nothing frames or seals them, and requests are not
counted. The paper's own figures of APC-VFL (Table 2: 9.73 MB for 10,000 aligned rows, of which 500
test) are Eq. (6) at MB of 10^6. Where a formula is not legible in the text, it is written from the
exchanges that the appendix lists.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from sklearn.datasets import load_breast_cancer

from apfed_bench.rows import Bench, Row, row, single
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.exchange import Kind
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
_COUNTED = (
    Kind.REQUEST, Kind.REPRESENTATIONS, Kind.GRADIENTS, Kind.DEALT, Kind.CONTRIBUTION,
    Kind.SINGULAR_VECTORS,
)  # fmt: skip


def apc_vfl_bytes(rows: int, *, numbers: int = 256) -> int:
    """Eq. (6): one passive's codes of N aligned rows, of so many numbers (Table 3), once."""
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


BENCH = Bench(
    groups=lambda quick: [
        single("apc_vfl", _distilled),
        *(
            single(f"split_nn/b{batch_size}/e{epochs}", _split, batch_size, epochs)
            for epochs in (2 if quick else 20,)
            for batch_size in (128, 8)
        ),
        single("vfedtrans", _decomposed),
    ],
    ratio="bytes that messages hold over the formula's", fields=("payload", "formula", "rows"),
)  # fmt: skip


def _distilled(case: str) -> Row:
    model = {"network": "selu", "hidden": (256,), "representation": 256}
    sent = _Sent({"name": "apc_vfl", "epochs": 1}, model)
    rows = sent.train + sent.test
    return sent.row(case, rows, apc_vfl_bytes(rows))


def _split(case: str, batch_size: int, epochs: int) -> Row:
    passive = {"network": "selu", "hidden": (128,), "representation": 256}
    sent = _Sent(
        "split_nn", {"network": "selu", "hidden": (64,), "representation": 128},
        passives={"default": {"model": passive}},
        train={"epochs": epochs, "batch_size": batch_size, "device": "cpu"},
    )  # fmt: skip
    formula = split_nn_forward_bytes(sent.train, epochs=epochs) + apc_vfl_bytes(sent.test)
    formula += split_nn_backward_bytes(sent.train, epochs=epochs, batch_size=batch_size)
    return sent.row(case, epochs * sent.train + sent.test, formula)


def _decomposed(case: str) -> Row:
    model = {"network": "enriched", "hidden": (256,), "representation": 30}
    sent = _Sent({"name": "vfedtrans", "epochs": 1}, model)
    return sent.row(case, sent.train, vfedtrans_bytes(sent.train, (5, 25)))


class _Sent:
    """What a run sent, and its aligned training and test rows."""

    def __init__(
        self, method: str | Mapping[str, Any], model: Mapping[str, Any], **changes: Any
    ) -> None:
        names = map(str, load_breast_cancer().feature_names)
        config = Config.model_validate({
            "name": "footprint", "method": method, "model": model, "guard": {"mechanism": "none"},
            "data": {
                "dataset": "breast_cancer", "overlap": 0.6,
                "columns": {"active": _ACTIVE, "passive-1": sorted({*names} - {*_ACTIVE})},
            },
            "train": {"epochs": 1, "device": "cpu"}, "transcript": {"keep": "none"}, **changes,
        })  # fmt: skip
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            recording = run(config, None).recording
        self._seconds = time.perf_counter() - began
        self._flows = [flow for flow in recording.transcript.flows if flow.kind in _COUNTED]
        aligned, data = set(recording.alignment["active"].tolist()), recording.data
        self.train = len(aligned.intersection(data.train_rows.tolist()))
        self.test = len(aligned.intersection(data.test_rows.tolist()))

    def row(self, case: str, rows: int, formula: int) -> Row:
        payload = sum(flow.payload_bytes for flow in self._flows)
        return row(
            case, self._seconds, peer="Appendix E", ratio=payload / formula, payload=payload,
            sent=sum(flow.wire_bytes for flow in self._flows), formula=formula, rows=rows,
        )  # fmt: skip
