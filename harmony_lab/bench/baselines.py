"""The baselines benchmark: what published models would take without a plan, against the plan that the search finds."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harmony_lab.bench.reference import load_reference
from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, PlanDoesNotFitError
from harmony_lab.machine import Machine
from harmony_lab.planner.baselines import BASELINES, Baseline, baselines
from harmony_lab.planner.published import load_profile
from harmony_lab.planner.search import search

__all__ = ["NUM_DEVICES", "bench_baselines", "to_json"]

NUM_DEVICES = (1, 2, 4, 8)
_REFERENCE = "reference_plans.json"
_MINIBATCH_SIZE = 32  # of models that the reference has no plan for

Progress = Callable[[int, int, str], None]


def bench_baselines(
    folder: str | Path,
    *,
    names: Sequence[str] = BASELINES,
    num_devices: Iterable[int] = NUM_DEVICES,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """A row per profile in that folder, number of 1080 Ti and baseline.

    ``model``, ``num_devices``, ``minibatch_size`` (the one that the folder's reference plans use most), ``baseline``,
    ``fits``, ``reason`` (why not), ``microbatch_size``, ``recomputes``, ``step_s``, ``peak_bytes``, ``swap_bytes``,
    ``swap_bytes_by_kind``, ``peer_bytes``; of the best plan ``ours_step_s``, ``ours_swap_bytes`` and ``ours_plan``;
    ``speedup`` (how much longer the baseline's iteration takes) and ``swap_ratio`` (how much more it swaps).  What
    there is not is None.  ``progress(done, total, what)`` is called along the way.

    Raises ``HarmonyError`` where the folder holds no profile, or one that cannot be read.
    """
    profiles = _profiles(Path(folder))
    sizes = _minibatch_sizes(Path(folder))
    settings = [(profile, count) for profile in profiles for count in num_devices]
    rows: list[dict[str, Any]] = []
    for done, (profile, count) in enumerate(settings):
        if progress is not None:
            progress(done, len(settings), f"{profile.model} on {count}")
        rows += _rows(profile, count, sizes.get(profile.model, _MINIBATCH_SIZE), names)
    if progress is not None:
        progress(len(settings), len(settings), "baselines")
    return rows


def to_json(rows: list[dict[str, Any]], measured: list[dict[str, Any]], path: str | Path) -> None:
    """Write ``{"rows": [...], "measured": [...]}``; ``measured``: see ``bench_baseline_steps``."""
    Path(path).write_text(json.dumps({"rows": rows, "measured": measured}, indent=1) + "\n")


def _profiles(folder: Path) -> list[Profile]:
    paths = sorted(path for path in folder.glob("*.json") if path.name != _REFERENCE)
    if not paths:
        raise HarmonyError(f"{folder} holds no profile: a folder of .json files was expected, published tables or ours")
    return [load_profile(path) for path in paths]


def _minibatch_sizes(folder: Path) -> dict[str, int]:
    """By model."""
    if not (folder / _REFERENCE).exists():
        return {}
    used: dict[str, Counter[int]] = {}
    for row in load_reference(folder / _REFERENCE):
        used.setdefault(row.model, Counter())[row.plan.minibatch_size] += 1
    return {model: sizes.most_common(1)[0][0] for model, sizes in used.items()}


def _rows(profile: Profile, count: int, minibatch_size: int, names: Sequence[str]) -> list[dict[str, Any]]:
    machine = Machine.preset(f"{count}x1080ti, host 2TiB")
    ours: dict[str, Any] = {"ours_step_s": None, "ours_swap_bytes": None, "ours_plan": None}
    try:
        best = search(profile, machine, minibatch_size, shown=4).candidates[0]
    except PlanDoesNotFitError:
        pass
    else:
        ours = {"ours_step_s": best.step_s, "ours_swap_bytes": best.swap_bytes, "ours_plan": str(best.plan)}
    setting = {"model": profile.model, "num_devices": count, "minibatch_size": minibatch_size}
    return [
        {**setting, **_row(baseline, ours)} for baseline in baselines(profile, machine, minibatch_size, names=names)
    ]


def _row(baseline: Baseline, ours: dict[str, Any]) -> dict[str, Any]:
    return {
        "baseline": baseline.name,
        "fits": baseline.fits,
        "reason": baseline.reason or None,
        "microbatch_size": baseline.microbatch_size,
        "recomputes": baseline.recomputes,
        "step_s": baseline.step_s,
        "peak_bytes": max(baseline.peak_bytes, default=None),
        "swap_bytes": baseline.swap_bytes,
        "swap_bytes_by_kind": {str(kind): num_bytes for kind, num_bytes in baseline.swap_bytes_by_kind.items()},
        "peer_bytes": baseline.peer_bytes,
        **ours,
        "speedup": _ratio(baseline.step_s, ours["ours_step_s"]),
        "swap_ratio": _ratio(baseline.swap_bytes, ours["ours_swap_bytes"]),
    }


def _ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs is not None and ours else None
