"""Contenders: what plans are compared with: what one would have without them."""

import threading
from typing import TYPE_CHECKING

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError
from harmony_lab.figures.comparison import Side
from harmony_lab.machine import Machine
from harmony_lab.planner.baselines import BASELINES, Baseline, baselines
from harmony_lab.planner.search import SearchResult
from harmony_lab.trainer import simulate

if TYPE_CHECKING:
    import pandas

__all__ = ["Contenders", "contenders_frame"]


class Contenders:
    """Baselines of one model on one machine, each made when it is first asked for; any thread may ask."""

    names = BASELINES

    def __init__(self, machine: Machine, minibatch_size: int) -> None:
        self._machine, self._minibatch_size = machine, minibatch_size
        self._lock = threading.Lock()
        self._profile: Profile | None = None
        self._known: dict[str, Side] = {}

    def side(self, name: str, profile: Profile) -> Side:
        """That baseline as one side of a comparison.  Raises ``HarmonyError`` where it is not possible."""
        with self._lock:
            if profile is not self._profile:
                self._profile, self._known = profile, {}
            if name not in self._known:
                (found,) = baselines(profile, self._machine, self._minibatch_size, names=[name])
                self._known[name] = self._side(found, profile)
            return self._known[name]

    def _side(self, found: Baseline, profile: Profile) -> Side:
        if found.program is None:
            raise HarmonyError(f"{found.name} is not possible here: {found.reason}")
        trace = simulate(found.program, profile, self._machine)
        return Side(found.name, str(found), trace, found.peak_bytes)


def contenders_frame(
    result: SearchResult, profile: Profile, machine: Machine, minibatch_size: int
) -> "pandas.DataFrame":
    """Candidates and baselines, a row each, with how much longer a baseline takes than the best plan, or why there is
    none.
    """
    import pandas

    plans = result.to_frame()
    best_s = float(plans["step_s"].min())
    rows = plans[["step_s", "samples_per_s", "peak_bytes", "swap_bytes", "peer_bytes"]].copy()
    rows.insert(0, "name", [f"candidate {rank}" for rank in plans["rank"]])
    rows["times_the_best"] = rows["step_s"] / best_s
    rows["note"] = plans["plan"]
    others = [
        {
            "name": found.name,
            "step_s": found.step_s,
            "samples_per_s": minibatch_size / found.step_s if found.step_s else None,
            "peak_bytes": max(found.peak_bytes, default=None),
            "swap_bytes": found.swap_bytes,
            "peer_bytes": found.peer_bytes,
            "times_the_best": found.step_s / best_s if found.step_s else None,
            "note": found.reason or str(found),
        }
        for found in baselines(profile, machine, minibatch_size)
    ]
    return pandas.concat([rows, pandas.DataFrame(others)], ignore_index=True)
