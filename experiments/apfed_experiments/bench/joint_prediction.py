"""What a row costs that all parties predict: SplitNN, merged by a sum under each scheme.

Digits in four strips, 16 numbers a representation, the test rows in batches of 64, all parties in
one thread: `seconds` and `bytes` are of one row. `ratio` is the seconds over those of the
concatenating SplitNN, which shows the active every representation.
"""

import statistics
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from apfed_experiments.bench.rows import Bench, Group, Row, interleave, median_ratio
from apfed_protocols.errors import UnsafeChoiceWarning
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.methods import open_session
from secure_apfed.seeds import one_thread

__all__ = ["BENCH"]

_PEER = "concatenated"
_REPETITIONS = 5
_CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    _PEER: ("split_nn", {"scheme": "plain"}),
    "summed/plain": ("split_nn_sum", {"scheme": "plain", "clip": 4.0}),
    "summed/masked": ("split_nn_sum", {"scheme": "plain", "masks": "pairwise", "clip": 4.0}),
    "summed/bfv-masked": ("split_nn_sum", {"scheme": "bfv", "masks": "pairwise", "clip": 4.0}),
    "summed/ckks": ("split_nn_sum", {"scheme": "ckks", "clip": 4.0}),
}


def _groups(quick: bool) -> Sequence[Group]:
    return [Group(tuple(_CASES), partial(_rows, rows=400 if quick else 1600))]


BENCH = Bench(groups=_groups)


def _rows(wanted: Collection[str], *, rows: int) -> Iterator[Row]:
    with one_thread():
        cases = {
            name: _Case(method, secure_sum, rows=rows)
            for name, (method, secure_sum) in _CASES.items()
            if name in {*wanted, _PEER}
        }
        seconds = interleave(
            {name: case.predict for name, case in cases.items()}, repetitions=_REPETITIONS
        )
    for name in wanted:
        yield Row(
            case=name, seconds=statistics.median(seconds[name]) / cases[name].rows, peer=_PEER,
            ratio=median_ratio(seconds[name], seconds[_PEER]),
            bytes=round(cases[name].bytes_of_a_row),
        )  # fmt: skip


class _Case:
    """Parties that predict the test rows, again and again."""

    def __init__(self, method: str, secure_sum: Mapping[str, Any], *, rows: int) -> None:
        config = Config.model_validate({
            "name": "bench", "method": method, "secure_sum": secure_sum,
            "data": {"dataset": "digits", "views": 4, "rows": rows, "test_fraction": 0.5},
            "model": {"network": "mlp", "hidden": [64], "representation": 16},
            "train": {"epochs": _REPETITIONS + 1, "batch_size": 64, "device": "cpu"},
            "guard": {"mechanism": "none"}, "transcript": {"keep": "none"},
        })  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsafeChoiceWarning)
            self._session = open_session(config, load_data(config.data, seed=0))
        self.rows = len(self._session.entered.own.data.test_rows)
        self._step, self._before = 0, self._session.transcript.wire_bytes

    def predict(self) -> None:
        """All test rows once."""
        self._session.evaluate(next_step=self._step, final=True)
        self._step += self.rows  # as many steps as there may be at most

    @property
    def bytes_of_a_row(self) -> float:
        """On all links, of one prediction."""
        sent = self._session.transcript.wire_bytes - self._before
        return sent / self.rows / (self._step / self.rows)
