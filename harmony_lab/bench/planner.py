"""The planner benchmark: our search against the published reference scheduler, on its profiles and settings.

Both plans are simulated under the reference's cost model (``bench.reference``): same mode, nothing prefetched, nothing
kept on the devices.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harmony_lab.bench.reference import ReferenceRow, load_reference
from harmony_lab.costs import Profile
from harmony_lab.errors import PlanDoesNotFitError
from harmony_lab.planner.lower import lower
from harmony_lab.planner.published import load_profile
from harmony_lab.planner.search import SearchResult, Switches, search
from harmony_lab.simulator.engine import makespan_s

__all__ = ["bench_planner", "summary", "to_json"]

Progress = Callable[[int, int, str], None]
_REFERENCE = "reference_plans.json"
_LIKE_REFERENCE = Switches(prefetch=(0,), peer_transfers=(True,), staying=False)
_FREE = Switches(prefetch=(0, 1), peer_transfers=(True, False))
_SHOWN = 2  # plans simulated per search
_RUNS = 3  # of what is timed, of which the median counts


def bench_planner(folder: str | Path, *, progress: Progress | None = None) -> list[dict[str, Any]]:
    """A row per setting of the folder's reference plans.

    ``search_s`` (wall clock, median of three; machine code is made before), ``reference_search_s`` as the file says;
    ``makespan_s`` of our plan and ``reference_plan_makespan_s`` of the reference's; ``lower_bound_s`` of the same
    switches; ``makespan_all_switches_s`` and ``all_switches_plan`` with mode and every switch free; the four-tuple of
    our plan, packs as half-open ranges of layers; ``simulation_s_per_10k_ops``: of our plan's program, the median of
    three.  ``reference_fits``: whether the reference's plan keeps within the
    devices' memory with all that our programs count.

    Raises ``HarmonyError`` where the folder does not hold what is needed.
    """
    rows = load_reference(Path(folder) / _REFERENCE)
    profiles = {name: load_profile(Path(folder) / f"{name}.json") for name in dict.fromkeys(row.model for row in rows)}
    _like_reference(rows[0], profiles[rows[0].model])  # makes machine code
    found = []
    for done, row in enumerate(rows):
        if progress is not None:
            progress(done, len(rows), f"{row.model}, {row.plan.mode} on {row.plan.num_devices}")
        found.append(_row(row, profiles[row.model]))
    if progress is not None:
        progress(len(rows), len(rows), "planner")
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows come to: ``total_search_s``, the median of ``simulation_s_per_10k_ops``, mean gains (0.05: the
    reference takes 5 % longer), and the least speedup where the reference takes more than a second."""
    gains = [row["reference_plan_makespan_s"] / row["makespan_s"] - 1 for row in rows]
    free = [row["reference_plan_makespan_s"] / row["makespan_all_switches_s"] - 1 for row in rows]
    possible = [row["reference_plan_makespan_s"] / row["lower_bound_s"] - 1 for row in rows]
    improvable = [gain for gain, most in zip(gains, possible, strict=True) if most >= 0.05]
    slow = [row for row in rows if row["reference_search_s"] > 1]
    return {
        "total_search_s": sum(row["search_s"] for row in rows),
        "mean_gain": statistics.mean(gains),
        "worst_gain": min(gains),
        "mean_gain_where_5_percent_is_possible": statistics.mean(improvable) if improvable else None,
        "mean_gain_all_switches": statistics.mean(free),
        "simulation_s_per_10k_ops": statistics.median(row["simulation_s_per_10k_ops"] for row in rows),
        "worst_speedup": min((row["reference_search_s"] / row["search_s"] for row in slow), default=None),
        "slowest_of_the_others_s": max(
            (row["search_s"] for row in rows if row["reference_search_s"] <= 1), default=None
        ),
    }


def to_json(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Write ``{"rows": [...], "total_search_s": ..., ...}``."""
    Path(path).write_text(json.dumps({"rows": rows, **summary(rows)}, indent=1) + "\n")


def _row(row: ReferenceRow, profile: Profile) -> dict[str, Any]:
    machine = row.machine
    program = lower(row.plan, profile, machine, allow_overrun=True)
    search_s = _seconds(lambda: _like_reference(row, profile))
    result = _like_reference(row, profile)
    ours = result.best
    free = search(profile, machine, row.plan.minibatch_size, switches=_FREE, shown=4)
    made = lower(ours, profile, machine)
    return {
        "model": row.model,
        "mode": str(row.plan.mode),
        "minibatch_size": row.plan.minibatch_size,
        "num_devices": row.plan.num_devices,
        "search_s": search_s,
        "reference_search_s": row.search_s,
        "makespan_s": result.candidates[0].step_s,
        "reference_plan_makespan_s": makespan_s(program, profile, machine),
        "reference_estimate_s": row.estimated_step_s,
        "reference_fits": _fits(row, profile),
        "lower_bound_s": result.lower_bound_s,
        "makespan_all_switches_s": free.candidates[0].step_s,
        "all_switches_plan": str(free.best),
        "simulation_s_per_10k_ops": _seconds(lambda: makespan_s(made, profile, machine)) * 1e4 / len(made.ops),
        "forward_microbatch_size": ours.forward_microbatch_size,
        "forward_packs": [list(pack) for pack in ours.forward_packs],
        "backward_microbatch_size": ours.backward_microbatch_size,
        "backward_packs": [list(pack) for pack in ours.backward_packs],
    }


def _seconds(work: Callable[[], object]) -> float:
    """Wall clock of one call, the median of a few."""
    seconds = []
    for _ in range(_RUNS):
        gc.collect()
        before_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - before_s)
    return statistics.median(seconds)


def _like_reference(row: ReferenceRow, profile: Profile) -> SearchResult:
    modes = (row.plan.mode,)
    size = row.plan.minibatch_size
    return search(profile, row.machine, size, modes=modes, switches=_LIKE_REFERENCE, shown=_SHOWN)


def _fits(row: ReferenceRow, profile: Profile) -> bool:
    try:
        lower(row.plan, profile, row.machine)
    except PlanDoesNotFitError:
        return False
    return True
