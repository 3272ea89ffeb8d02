"""A file for SEAL's own interface, which saves to and loads from paths only.

Run by: every role of a homomorphic sum. The path names memory of this process, or a private
temporary file where the system has no such memory; only public keys and ciphertexts pass
through it.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["ScratchFile", "scratch_file"]


@dataclass(frozen=True)
class ScratchFile:
    """An open file and its path, which SEAL opens a second time for each object."""

    handle: int
    path: str

    def save(self, thing: Any) -> bytes:
        thing.save(self.path)
        return os.pread(self.handle, os.fstat(self.handle).st_size, 0)

    def load(self, target: Any, context: Any, blob: bytes) -> None:
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, blob, 0)
        target.load(context, self.path)


@contextmanager
def scratch_file() -> Iterator[ScratchFile]:
    """A file that only this process and user can open."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("seal")
        try:
            yield ScratchFile(handle, f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
    else:
        with tempfile.NamedTemporaryFile() as file:
            yield ScratchFile(file.fileno(), file.name)
