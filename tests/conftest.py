"""What all tests share."""

import os

import hypothesis
import pytest

from harmony_lab.compiled import folder
from harmony_lab.planner.warm import warm_up

hypothesis.settings.register_profile("untimed", deadline=None)  # how long an example takes is no test
hypothesis.settings.load_profile("untimed")

_LONG = (
    "test_zoo",
    "test_browser",
    "test_notebooks",
    "test_equality_matrix",
    "test_equality",
    "test_cli",
    "test_decompose",
)
"""Files that take longest: in parallel they begin first, so that none is left for the end."""

_num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _num_workers > 1:  # before torch is loaded: workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _num_workers)))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, before workers start
        warm_up(wait=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _num_workers > 1:
        rank = {name: number for number, name in enumerate(_LONG)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> "object":
    """Costs measured in tests stay out of the user's cache; machine code is the same wherever it was made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(folder()))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
