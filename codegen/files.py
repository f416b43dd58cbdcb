"""Output files that appear whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def check_writable(path: Path) -> None:
    """Raises OSError where `write_whole` could not put a file: no such folder, or something there that is no regular file."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise OSError(errno.EEXIST, "exists and is not a regular file", str(path))
    if not target.parent.is_dir():
        raise OSError(errno.ENOENT, "no such folder", str(path))


def write_whole(path: Path, data: bytes) -> None:
    """Writes a temporary file beside `path` and renames it; a symbolic link is written through. Raises OSError naming `path`."""
    check_writable(path)
    target = path.resolve()
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp's files are private; this one is as readable as any other that the user makes.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a compressed .npz archive; equal arrays give equal bytes."""
    buffer = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(buffer, **named)
    return buffer.getvalue()
