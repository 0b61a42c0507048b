"""Plan and run the training of models that are larger than the GPUs at hand.

The public names load on first use, so ``import harmony_lab`` is cheap: no torch, no plotly, no widgets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Ablation": "planner.explain",
    "Baseline": "planner.baselines",
    "Certificate": "certificate",
    "Cost": "costs",
    "DecomposeError": "errors",
    "DeviceMemoryError": "errors",
    "Forecast": "forecast",
    "HarmonyError": "errors",
    "HostMemoryError": "errors",
    "Lab": "lab",
    "LayerSequence": "layers",
    "Limits": "planner.limits",
    "Machine": "machine",
    "Mode": "plan",
    "OutOfRangeError": "errors",
    "Pack": "plan",
    "Plan": "plan",
    "PlanDoesNotFitError": "errors",
    "PlanError": "errors",
    "Precision": "precision",
    "Profile": "costs",
    "Program": "program",
    "ProgramError": "errors",
    "SearchResult": "planner.search",
    "StepCancelledError": "errors",
    "Switches": "planner.search",
    "Trace": "trace",
    "Trainer": "trainer",
    "TrainingError": "errors",
    "ablation": "planner.explain",
    "baselines": "planner.baselines",
    "check": "planner.check",
    "compile_layers": "profiler.compiling",
    "decompose": "profiler.decompose",
    "difference": "plan",
    "estimate": "profiler.estimate",
    "in_precision": "profiler.precision",
    "load_profile": "planner.published",
    "limits": "planner.limits",
    "lower": "planner.lower",
    "probe_links": "profiler.links",
    "profile": "profiler.measure",
    "reproducible_randomness": "profiler.randomness",
    "search": "planner.search",
    "searching": "planner.search",
    "simulate": "trainer",
    "step_seed": "runtime.runner",
}

_PACKAGES = ("figures",)

__all__ = [*sorted(_HOMES), "load_ipython_extension", "unload_ipython_extension"]

if TYPE_CHECKING:
    from harmony_lab.certificate import Certificate
    from harmony_lab.costs import Cost, Profile
    from harmony_lab.errors import (
        DecomposeError,
        DeviceMemoryError,
        HarmonyError,
        HostMemoryError,
        OutOfRangeError,
        PlanDoesNotFitError,
        PlanError,
        ProgramError,
        StepCancelledError,
        TrainingError,
    )
    from harmony_lab.forecast import Forecast
    from harmony_lab.lab import Lab
    from harmony_lab.layers import LayerSequence
    from harmony_lab.machine import Machine
    from harmony_lab.plan import Mode, Pack, Plan, difference
    from harmony_lab.planner.baselines import Baseline, baselines
    from harmony_lab.planner.check import check
    from harmony_lab.planner.explain import Ablation, ablation
    from harmony_lab.planner.limits import Limits, limits
    from harmony_lab.planner.lower import lower
    from harmony_lab.planner.published import load_profile
    from harmony_lab.planner.search import SearchResult, Switches, search, searching
    from harmony_lab.precision import Precision
    from harmony_lab.profiler.compiling import compile_layers
    from harmony_lab.profiler.decompose import decompose
    from harmony_lab.profiler.estimate import estimate
    from harmony_lab.profiler.links import probe_links
    from harmony_lab.profiler.measure import profile
    from harmony_lab.profiler.precision import in_precision
    from harmony_lab.profiler.randomness import reproducible_randomness
    from harmony_lab.program import Program
    from harmony_lab.runtime.runner import step_seed
    from harmony_lab.trace import Trace
    from harmony_lab.trainer import Trainer, simulate


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if name in _PACKAGES:
        return import_module(f"harmony_lab.{name}")
    if home is None:
        raise AttributeError(f"module 'harmony_lab' has no attribute {name!r}")
    value = getattr(import_module(f"harmony_lab.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *__all__, *_PACKAGES})


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext harmony_lab``: register the magics and show a Lab as its dashboard."""
    import_module("harmony_lab.notebook.magics").load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext harmony_lab``: take the magics away again; running Labs are closed."""
    import_module("harmony_lab.notebook.magics").unload(ipython)
