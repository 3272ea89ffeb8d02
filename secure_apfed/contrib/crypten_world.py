"""A CrypTen world: parties in processes of their own, which talk through gloo.

Run by: each party, once a process. Gives: CrypTen's tensors and protocols among the parties,
with a limit on every wait, and nothing written to the environment or to the default process
group of torch. Adds and opens; multiplies nothing. Does not give: privacy or authenticity on the
way. gloo neither encrypts nor authenticates, and whoever reads all links reads all shares, so the
world is of one machine. Semi-honest parties only; gloo ends the process of a party whose peer sends
a longer message than expected.

`crypten.init` is not called: it waits without end, needs and writes RANK, WORLD_SIZE and
RENDEZVOUS, sends seeds in the clear, and fails beside another process group.

Example, in process `rank` of three::

    with crypten_world(rank, 3, port=29500) as world:
        total = sum_at_first(world, numbers)  # apfed_protocols.crypten
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from apfed_protocols.crypten import Seat, load_crypten, seated
from apfed_protocols.crypten.tensors import Communicator
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["GlooCommunicator", "crypten_world"]

_LOOPBACK = "127.0.0.1"
_ATTEMPT_S = 0.05
_LONGEST_S = 24 * 3600


@contextmanager
def crypten_world(
    rank: int, size: int, *, port: int, timeout_s: float = 30.0
) -> Iterator["GlooCommunicator"]:
    """Meet the other parties, be one of them in this process, and leave.

    Args:
        rank: of this party, of `size`; that of rank 0 listens at `port` for the others to meet.
        timeout_s: the limit of the meeting and of every later wait, in seconds.

    Raises:
        LocalProtocolError: CrypTen is missing, a second world in this process, or a port that
            cannot be used.
        RemoteProtocolError: a party did not come, fell silent or went away.
    """
    crypten = load_crypten()
    communicator = GlooCommunicator(rank, size, _meet(rank, size, port, timeout_s))
    generators = crypten.generators
    try:
        with seated(Seat(communicator), whole_process=True):
            crypten.generators = _NoGenerators()
            yield communicator
            communicator.barrier()
    finally:
        crypten.generators = generators
        communicator.close()


class GlooCommunicator(Communicator):
    """The other parties over gloo; every wait has the limit that the group was made with."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        super().__init__(rank, size)
        self._group = group

    def scatter(
        self,
        scatter_list: Sequence[torch.Tensor] | None,
        src: int,
        size: Any = None,
        device: Any = None,
    ) -> torch.Tensor:
        del device
        listed = list(scatter_list or ())
        options = dist.ScatterOptions()
        options.rootRank = src
        shape = listed[self._rank].size() if size is None else size
        result = torch.empty(shape, dtype=torch.int64)
        sent = [listed] if src == self._rank else []
        self._wait("scatter", lambda group: group.scatter([result], sent, options))
        return result

    def gather(self, tensor: torch.Tensor, dst: int) -> list[Any]:
        options = dist.GatherOptions()
        options.rootRank = dst
        result = self._room(tensor) if dst == self._rank else []
        sent = [tensor.contiguous()]
        self._wait("gather", lambda group: group.gather(result, sent, options))
        return result[0] if result else [None]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        result = self._room(tensor)
        sent = [tensor.contiguous()]
        self._wait("all_gather", lambda group: group.allgather(result, sent))
        return result[0]

    def barrier(self) -> None:
        self._wait("barrier", lambda group: group.barrier())

    def close(self) -> None:
        self._group = None

    def _room(self, tensor: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[torch.empty_like(tensor) for _ in range(self._size)]]

    def _wait(self, what: str, begin: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise LocalProtocolError(f"this CrypTen world is closed; open another one to {what}")
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            raise RemoteProtocolError(
                f"{what} at party {self._rank} of {self._size}: another party fell silent or went "
                f"away ({_first_line(error)}); open a new world with all parties"
            ) from error


def _meet(rank: int, size: int, port: int, timeout_s: float) -> Any:
    """Return the group of all parties."""
    if not 0 <= rank < size or not 0 < timeout_s <= _LONGEST_S:
        raise LocalProtocolError(
            f"a world has ranks 0 to size - 1 and a timeout_s above 0 and up to {_LONGEST_S}, got "
            f"rank {rank} of {size} and {timeout_s} s"
        )
    if not 0 < port < 2**16:
        raise LocalProtocolError(f"a world meets at a port from 1 to 65535, got {port}")
    place, limit = (_LOOPBACK, port), timedelta(seconds=timeout_s)
    try:
        descriptor = None
        if rank == 0:
            descriptor = _listen(place)
        else:
            _await_listener(place, timeout_s)
        store = TCPStore(*place, size, rank == 0, limit, master_listen_fd=descriptor)
        # torch's annotations know neither the options of gloo nor the constructor that takes them
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = limit
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        return gloo(PrefixStore("crypten", store), rank, size, options)
    except RuntimeError as error:
        raise RemoteProtocolError(
            f"party {rank}: the {size} parties of a CrypTen world did not meet at "
            f"{_LOOPBACK}:{port} within {timeout_s:g} s ({_first_line(error)}); start all of them "
            "with the same size and port"
        ) from error


def _listen(place: tuple[str, int]) -> int:
    """Listen at one address; torch by itself would listen at all of them."""
    try:
        return socket.create_server(place).detach()
    except OSError as error:
        raise LocalProtocolError(
            f"party 0 cannot listen at {place[0]}:{place[1]}: {error}; choose another port"
        ) from error


def _await_listener(place: tuple[str, int], timeout_s: float) -> None:
    """Wait until party 0 listens; torch waits too, but logs pages while it does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection(place, timeout=timeout_s).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"party 0 does not listen: {error}") from error
            time.sleep(_ATTEMPT_S)


class _NoGenerators:
    """Stands where CrypTen keeps its generators: torch.Generator under seeds sent in the clear."""

    def __getitem__(self, name: str) -> Any:
        raise LocalProtocolError(
            f"CrypTen asks for its generator {name!r}, which is no cryptographic one; make shares "
            "by apfed_protocols.crypten and give them to from_shares"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]
