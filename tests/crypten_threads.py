"""CrypTen parties as threads of one process, for tests.

CrypTen's own communicator for threads has no exclusive or and no batches, mixes up messages that
arrive out of order, and lets all threads draw from the same generators, which makes shares that
do not cancel. Here each pair of parties has a queue, and each thread its own generators.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from apfed_protocols.crypten import Seat, load_crypten, seated
from apfed_protocols.crypten.tensors import Communicator

__all__ = ["ThreadCommunicator", "as_threads"]

Result = TypeVar("Result")
Queues = Mapping[tuple[int, int], "queue.Queue[torch.Tensor]"]
_PATIENCE_S = 30.0


class ThreadCommunicator(Communicator):
    """One thread's end."""

    def __init__(self, rank: int, size: int, queues: Queues) -> None:
        super().__init__(rank, size)
        self._queues = queues

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        self._queues[self._rank, to].put(tensor.clone())

    def _receive(self, source: int) -> torch.Tensor:
        return self._queues[source, self._rank].get(timeout=_PATIENCE_S)

    def scatter(
        self,
        scatter_list: Sequence[torch.Tensor] | None,
        src: int,
        size: Any = None,
        device: Any = None,
    ) -> torch.Tensor:
        del size, device
        if src == self._rank:
            assert scatter_list is not None
            for to, tensor in enumerate(scatter_list):
                self._send(tensor, to)
        return self._receive(src)

    def gather(self, tensor: torch.Tensor, dst: int) -> list[Any]:
        self._send(tensor, dst)
        if dst != self._rank:
            return [None]
        return [self._receive(source) for source in range(self._size)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        for to in range(self._size):
            self._send(tensor, to)
        return [self._receive(source) for source in range(self._size)]


class _Generators(threading.local):
    """Stands for CrypTen's table of generators, of which every thread sees its own."""

    def __init__(self) -> None:
        self.table: dict[str, dict[torch.device, torch.Generator]] = {}

    def __getitem__(self, name: str) -> dict[torch.device, torch.Generator]:
        return self.table[name]

    def seed(self, rank: int, size: int) -> None:
        """Neighbours in the ring share a seed; nothing here protects anything."""
        seeds = {"prev": rank, "next": (rank + 1) % size, "local": 100 + rank, "global": 200}
        for name, seed in seeds.items():
            generator = torch.Generator()
            generator.manual_seed(seed)
            self.table[name] = {torch.device("cpu"): generator}


def as_threads(
    size: int,
    act: Callable[[ThreadCommunicator], Result],
    *,
    provider: Callable[[int], Any] = lambda rank: None,
) -> list[Result]:
    """Let `size` threads act, each as one CrypTen party; return what each of them returned.

    What one of them raises is raised here.
    """
    crypten = load_crypten()
    queues: Queues = {(one, to): queue.Queue() for one in range(size) for to in range(size)}
    outcomes: dict[int, Result] = {}
    failures: dict[int, BaseException] = {}
    generators, before = _Generators(), crypten.generators

    def run(rank: int) -> None:
        generators.seed(rank, size)
        communicator = ThreadCommunicator(rank, size, queues)
        try:
            with seated(Seat(communicator, provider(rank))):
                outcomes[rank] = act(communicator)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failures[rank] = error

    crypten.generators = generators
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _PATIENCE_S)
    finally:
        crypten.generators = before
    for failure in failures.values():
        raise failure
    assert len(outcomes) == size, "a thread is stuck"
    return [outcomes[rank] for rank in range(size)]
