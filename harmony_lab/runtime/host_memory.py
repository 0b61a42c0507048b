"""How much more memory the host can give: what the system has free, within the limits of the control groups."""

from collections.abc import Iterator
from pathlib import Path

from harmony_lab.hardware import free_host_bytes

__all__ = ["available_bytes"]

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Of the whole system, or of this process's control group or one above it, whichever has least left.

    A container's limit is a control group's; beyond it the process is killed without a word.  Files that the group has
    cached and does not use count as free.
    """
    free = [free_host_bytes()]
    for folder, (limit, usage, cached) in _groups(root, membership):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            free.append(max(0, most - used + _entry(folder / "memory.stat", cached)))
    return min(free)


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of this process's groups and those above, with the names of their files."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = root, _V2
        elif "memory" in controllers.split(","):
            top, names = root / "memory", _V1
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top.parent:
            yield folder, names
            folder = folder.parent


def _number(file: Path) -> int | None:
    """None where there is no such file, or no limit in it."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _entry(file: Path, name: str) -> int:
    try:
        rows = (line.split() for line in file.read_text().splitlines())
        return next((int(row[1]) for row in rows if row[0] == name), 0)
    except OSError:
        return 0
