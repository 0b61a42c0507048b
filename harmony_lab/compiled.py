"""compiled: runs loops over numbers as machine code where numba is installed, as plain Python where it is not.

Functions marked ``@compiled`` keep to numbers, arrays and named tuples of arrays.  Machine code is made at the first
call and kept on disk, ``$XDG_CACHE_HOME/harmony_lab`` (``~/.cache/harmony_lab``), in a folder per version of this
package's source: so that it is made once per installation, and never runs with what a function it calls used to be.
Folders of other versions that nobody has used for a month are removed when a new one is made.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

try:
    import numba
except ImportError:  # planning works without it, about twenty times slower
    numba = None  # type: ignore[assignment] # mypy takes the import for granted

__all__ = [
    "Bool",
    "Float",
    "Floats",
    "Int",
    "Ints",
    "compile_elsewhere",
    "compile_now",
    "compiled",
    "folder",
    "is_ready",
    "say_so",
    "wait_for_compiling",
]

Int = Any  # int, np.int64 or what numba makes of it: what compiled functions pass to each other
Bool = Any
Float = Any
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

F = TypeVar("F", bound=Callable[..., Any])

_BUILTINS = {"max": max, "min": min}
_COMPILED_IN = ("*.py", "planner/*.py", "simulator/*.py")
_READY = "ready"  # a file that says that all machine code has been made
_elsewhere: list[threading.Thread] = []  # that wait for the process, one at most
_starting = threading.Lock()
_PATIENCE_S = 1.0
_UNUSED_S = 30 * 24 * 3600.0


def compiled(function: F) -> F:
    """That function as machine code, where that is possible."""
    if numba is None:
        return function
    for name in ("max", "min"):  # torch.export replaces the builtins for a while, and numba would take what is there
        function.__globals__.setdefault(name, _BUILTINS[name])
    config: Any = numba.config
    given = config.CACHE_DIR
    config.CACHE_DIR = given or str(_used_folder())  # read while a function is being marked
    try:
        made: Any = numba.njit(cache=True, nogil=True)(function)
    finally:
        config.CACHE_DIR = given
    return cast(F, made)


@cache
def folder() -> Path:
    """Where the machine code of this source is kept."""
    here = Path(__file__).parent
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(path for pattern in _COMPILED_IN for path in here.glob(pattern)):
        text = path.read_bytes()
        if b"compiled import" in text or path.name == "program.py":  # whose codes are constants of machine code
            digest.update(text)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "harmony_lab" / f"compiled-{digest.hexdigest()[:16]}"


@cache
def _used_folder() -> Path:
    """The folder, which tells by its time that it is in use."""
    with contextlib.suppress(OSError):  # it is not there yet
        os.utime(folder())
    return folder()


def _remove_unused() -> None:
    """Remove what other versions have left.

    Another process may do the same, or still run such a version: that makes its machine code again.
    """
    before_s = time.time() - _UNUSED_S
    for other in folder().parent.glob("compiled-*"):
        with contextlib.suppress(OSError):
            if other != folder() and other.stat().st_mtime < before_s:
                shutil.rmtree(other, ignore_errors=True)


def is_ready() -> bool:
    """Whether nothing needs to be compiled any more."""
    if numba is None:
        return True
    config: Any = numba.config
    return bool(config.DISABLE_JIT) or (folder() / _READY).exists()


def compile_now(use: Callable[[], object]) -> None:
    """Call ``use``, which makes all machine code, unless it has been made before."""
    if not is_ready():
        use()
        folder().mkdir(parents=True, exist_ok=True)
        (folder() / _READY).touch()
        _remove_unused()


def compile_elsewhere(module: str) -> None:
    """Run that module, which calls ``compile_now``, in a process of its own, unless machine code has been made before.

    Not on a thread: while torch.export traces a model it replaces builtins that numba's compiler needs.
    """
    with _starting:
        if not _elsewhere and not is_ready():
            thread = threading.Thread(target=_run, args=(module,), name="harmony-compile", daemon=True)
            _elsewhere.append(thread)
            thread.start()


def wait_for_compiling(late: Callable[[], None] | None = None) -> None:
    """Until the process that ``compile_elsewhere`` has started, if it has, is done.  ``late`` is called where that
    takes over a second."""
    for thread in _elsewhere:
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            if late is not None:
                late()
            thread.join()


def say_so() -> None:
    """That one waits, and for what, on stderr: for whoever sees no progress."""
    print("harmony_lab: the planner is being compiled, once; a minute or more", file=sys.stderr, flush=True)


def _run(module: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    quiet = subprocess.DEVNULL
    with contextlib.suppress(OSError):  # what could not be made there is made where it is used
        subprocess.run(
            [sys.executable, "-m", module],
            env={**os.environ, "PYTHONPATH": path},
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
            check=False,
        )
