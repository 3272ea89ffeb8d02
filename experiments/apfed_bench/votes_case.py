"""One sum of products, run as a script in an interpreter of its own by `apfed_bench.apart`.

Takes people, labels, columns and passives; prints one JSON object: seconds of the active, one
passive and the aggregator, the same with labels that the passives see (`clear_*`: the product in
numpy, then the masked sum), bytes to and from one passive, and the peak memory of all parties in
one process. The rows of a block are the same in every block: no time depends on them.
"""

import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from apfed_bench.psi_case import peak_memory
from apfed_protocols.conversation import converse
from apfed_protocols.products import ProductAgreement, SumOfProducts
from apfed_protocols.sums import MaskedSum, StepBinding

__all__ = ["main"]

Matrix = NDArray[np.float64]
Given = ParamSpec("Given")
Result = TypeVar("Result")
_LONG_ENOUGH_S = 0.2


class _Clock:
    """Seconds by who spent them."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def of(
        self, who: str, call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        began = time.perf_counter()
        result = call(*args, **kwargs)
        self.spent[who] += time.perf_counter() - began
        return result


def _encrypted(
    described: SumOfProducts, labels: Matrix, rows: Mapping[str, Matrix]
) -> tuple[_Clock, int, int]:
    """Who spent how long, bytes to one passive and from it; checks every sum."""
    clock, agreed, down = _Clock(), described.products, 0
    receiver = clock.of("active", described.receiver, labels)
    combiner = described.combiner()
    passives = {name: described.contributor(name) for name in agreed.contributors}
    converse(passives)
    first = agreed.contributors[0]
    request = receiver.request()
    for name, role in passives.items():
        clock.of(name, role.accept, request)
    levels = described.fixed_point.levels
    expected = sum(np.rint(A * levels) for A in rows.values()) @ labels
    for block in range(described.blocks):
        people = len(described.people_of(block))
        answers = {
            name: clock.of(name, role.answer, block, rows[name][:people])
            for name, role in passives.items()
        }
        down += len(answers[first])
        combined = clock.of("aggregator", combiner.combine, block, answers)
        opened = clock.of("active", receiver.open, block, combined)
        if not np.array_equal(np.rint(opened * levels), expected[:people]):
            raise RuntimeError(f"block {block} opened to another sum than the matrices have")
    return clock, len(request), down


def _clear(
    described: SumOfProducts, labels: Matrix, rows: Mapping[str, Matrix]
) -> Mapping[str, float]:
    """The same sums where the passives see the labels and only mask their products."""
    agreed, step = described.products, itertools.count()
    masked = MaskedSum(agreed.blocks_sum)
    receiver, combiner = masked.receiver(), masked.combiner()
    passives = {name: masked.contributor(name) for name in agreed.contributors}
    converse({agreed.receiver: receiver, agreed.combiner: combiner, **passives})
    sizes = [len(described.people_of(block)) for block in range(described.blocks)]

    def multiply(clock: _Clock) -> None:
        for people in sizes:
            for matrix in rows.values():
                clock.of("product", np.matmul, matrix[:people], labels)

    def add(clock: _Clock) -> None:
        for people in sizes:
            bound = StepBinding.of(agreed.session, next(step), rows=b"all", message=b"labels")
            products = np.zeros((people, agreed.columns))
            answers = {
                name: clock.of("masks", role.contribute, products, bound)
                for name, role in passives.items()
            }
            combined = clock.of("others", combiner.combine, answers)
            clock.of("others", receiver.decode, combined, products.shape, bound)

    return _mean(multiply) | _mean(add)


def _mean(turn: Callable[[_Clock], None]) -> dict[str, float]:
    """Seconds of one turn, by who spent them; of many, where a coarse clock would stand still."""
    clock, turns, began = _Clock(), 0, time.perf_counter()
    while not turns or time.perf_counter() - began < _LONG_ENOUGH_S:
        turn(clock)
        turns += 1
    return {who: seconds / turns for who, seconds in clock.spent.items()}


def _measure(people: int, labelled: int, columns: int, passives: int) -> dict[str, Any]:
    agreed = ProductAgreement(
        session="bench", receiver="active", combiner="aggregator", people=people, columns=columns,
        contributors=tuple(f"passive_{k}" for k in range(1, passives + 1)), labelled=labelled,
    )  # fmt: skip
    described, rng = SumOfProducts(agreed), np.random.default_rng(0)
    labels = np.eye(columns)[rng.integers(columns, size=labelled)]
    some = min(people, described.block_rows)
    rows = {name: rng.dirichlet(np.ones(labelled), some) for name in agreed.contributors}
    clock, up, down = _encrypted(described, labels, rows)
    peak = peak_memory()
    clear = _clear(described, labels, rows)
    first = agreed.contributors[0]
    return {
        "passive_seconds": clock.spent[first],
        "active_seconds": clock.spent["active"],
        "aggregator_seconds": clock.spent["aggregator"],
        "clear_product_seconds": clear["product"] / passives,
        "clear_seconds": (clear["product"] + clear["masks"]) / passives + clear["others"],
        "bytes_up": up,
        "bytes_down": down,
        "peak_memory": peak,
        "parameters": dict(described.parameters()),
    }


def main() -> None:
    print(json.dumps(_measure(*map(int, sys.argv[1:]))))


if __name__ == "__main__":
    main()
