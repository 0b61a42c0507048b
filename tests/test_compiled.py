"""Plans, programs and traces are the same with machine code and without, where numba is missing too."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harmony_lab import compiled as machine_code

HERE = Path(__file__).parent
SEEDS = tuple(range(12))

PLANNING = """
import json, sys
import random_settings, toy_profiles
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.search import search
from harmony_lab.sharing import Flow, fair_rates
from harmony_lab.simulator.engine import run

def outcome(seed):
    plan, profile, machine, program = random_settings.setting(seed)
    check(program)
    trace = run(program, profile, machine)
    return {
        "program": str(program),
        "start_s": trace.start_s.tolist(),
        "end_s": trace.end_s.tolist(),
        "peaks": [peak_bytes(program), trace.peak_bytes],
        "moved": sorted(map(str, trace.moved_bytes.items())),
    }

def found():
    result = search(toy_profiles.profile(4), toy_profiles.gpus(2, memory_bytes=6_000_000), minibatch_size=4)
    return str(result.best)

rates = fair_rates([Flow(("a", "b"), 1.0), Flow(("b",), 1.0, cap=0.2), Flow(("a",), 1.0, weight=3.0)], {"a": 1, "b": 2})
"""
REPORT = f"print(json.dumps([[outcome(seed) for seed in {SEEDS}], found(), rates]))"


def printed(code: str, **environment: str) -> object:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled() -> object:
    return printed(PLANNING + REPORT)


def test_plain_python_gives_the_same_plans_programs_and_traces(compiled: object) -> None:
    assert printed(PLANNING + REPORT, NUMBA_DISABLE_JIT="1") == compiled


def test_so_does_a_machine_without_numba(compiled: object) -> None:
    """An import of numba fails, as where it is not installed."""
    missing = "import sys; sys.modules['numba'] = None"
    unused = "assert not any(name.split('.')[0] in {'numba', 'llvmlite'} and sys.modules[name] for name in sys.modules)"
    assert printed(f"{missing}\n{PLANNING}\n{unused}\n{REPORT}") == compiled


def test_the_tests_above_compare_different_things() -> None:
    """With numba the same functions are machine code."""
    numba = pytest.importorskip("numba")
    from harmony_lab.planner.lowering import lower_units
    from harmony_lab.sharing import fill_rates
    from harmony_lab.simulator.events import follow

    if not numba.config.DISABLE_JIT:
        assert all(hasattr(function, "py_func") for function in (lower_units, fill_rates, follow))
    is_plain = "from harmony_lab.sharing import fill_rates; print(int(not hasattr(fill_rates, 'py_func')))"
    assert printed(is_plain, NUMBA_DISABLE_JIT="1") == 1


def test_machine_code_is_made_once_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    module = "import os\nwith open('made', 'a') as file:\n    file.write(f'{os.getpid()}\\n')\n"
    (tmp_path / "makes_code.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(machine_code, "_elsewhere", [])
    monkeypatch.setattr(machine_code, "folder", lambda: tmp_path / "code")
    for _ in range(2):
        machine_code.compile_elsewhere("makes_code")
    late: list[str] = []
    monkeypatch.setattr(machine_code, "_PATIENCE_S", 0.0)
    machine_code.wait_for_compiling(lambda: late.append("still compiling"))
    assert late == ["still compiling"]  # Python itself takes longer to start
    (made,) = (tmp_path / "made").read_text().split()
    assert int(made) != os.getpid()
    used: list[str] = []
    for _ in range(2):
        machine_code.compile_now(lambda: used.append("here"))
    assert used == ["here"]
    assert machine_code.is_ready()


def test_machine_code_that_nobody_has_used_for_a_month_is_removed_when_new_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    days = {"compiled-new": 40, "compiled-unused": 31, "compiled-used": 29, "compiled-resumed": 40, "costs": 400}
    for name, age in days.items():
        (tmp_path / name / "deeper").mkdir(parents=True)
        (tmp_path / name / "deeper" / "code").write_text("code")
        os.utime(tmp_path / name, (now_s - age * 86400,) * 2)
    for name in ("compiled-resumed", "compiled-new"):  # first as if that version were imported
        monkeypatch.setattr(machine_code, "folder", lambda name=name: tmp_path / name)
        machine_code._used_folder.__wrapped__()
    monkeypatch.setattr(machine_code, "is_ready", lambda: False)
    machine_code.compile_now(lambda: None)
    assert {path.name for path in tmp_path.iterdir()} == {*days} - {"compiled-unused"}
    assert (tmp_path / "compiled-resumed" / "deeper" / "code").exists()
