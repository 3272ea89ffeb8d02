"""Opening a file that a run goes on writing: this very file, and no other behind a link; and
replacing one in a single step.

Run by: whoever keeps an account over sessions. A symbolic link in its place would have the next
session cut or extend a file of somebody else's choice; a pipe would have it wait for ever.
"""

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from secure_apfed.errors import CheckpointError

__all__ = ["open_regular", "write_atomically"]


def open_regular(path: Path, *, create: bool) -> int:
    """Return a descriptor that reads anywhere and writes at the end; the caller closes it.

    Args:
        path: of the file; folders above it may be links.
        create: make the file where it is missing, for its owner alone.

    Raises:
        CheckpointError: a link, a folder, a pipe or a device; or the file is gone.
        OSError: it may not be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is gone, and this session wrote to it; restore it from a copy"
        ) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path} is a symbolic link, which is not followed; put the file itself there"
            ) from None
        if error.errno in (errno.EISDIR, errno.ENXIO):
            raise _irregular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return descriptor


def _irregular(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is not a regular file; remove what stands in its place")


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace `path` in one step; `private` files are readable by their owner only."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o600 if private else 0o644)
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:  # such as on a full disk
            error.filename = str(path)
        raise
