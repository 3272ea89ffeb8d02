"""How much memory something takes at the most, of what Python and NumPy allocate."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def trace_memory() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the most bytes held at once since the block began."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
