"""warm: a search so small that it takes no time, which makes the planner's machine code."""

from harmony_lab.compiled import compile_elsewhere, compile_now
from harmony_lab.costs import Cost, LayerCost, Profile
from harmony_lab.layers import TensorSpec
from harmony_lab.machine import Backend, Device, Host, Link, Machine
from harmony_lab.planner.check import check
from harmony_lab.planner.lower import lower
from harmony_lab.planner.search import Switches, search

__all__ = ["warm_up"]


def warm_up(*, wait: bool = False) -> None:
    """Make the planner's machine code, once per installation: in a process of its own, so that nobody waits for it, or
    with ``wait`` now."""
    if wait:
        compile_now(_plan_something)
    else:
        compile_elsewhere(__name__)


def _plan_something() -> None:
    profile, machine = _profile(), _machine()
    result = search(profile, machine, 4, switches=Switches(prefetch=(0, 1)), shown=2)
    check(lower(result.best, profile, machine))
    assert result.best_trace.makespan_s > 0


def _profile() -> Profile:
    cost = Cost(
        forward_s=1.0,
        recompute_s=1.0,
        backward_s=2.0,
        forward_peak_bytes=8,
        saved_bytes=8,
        recompute_peak_bytes=8,
        backward_peak_bytes=8,
    )
    layer = LayerCost(
        name="layer",
        kind=0,
        parameter_bytes=64,
        gradient_bytes=64,
        buffer_bytes=0,
        updated_buffer_bytes=0,
        optimizer_state_bytes=128,
        update_s=1.0,
        batch_inputs=("x",),
        costs=(cost, cost),
    )
    value = TensorSpec(name="x", shape=(1,), dtype="float32", item_bytes=4, batch_dim=0, requires_grad=True)
    loss = TensorSpec(name="loss", shape=(), dtype="float32", item_bytes=4, batch_dim=None, requires_grad=True)
    return Profile(
        model="warm",
        fingerprint="warm",
        device="none",
        microbatch_sizes=(1, 2),
        layers=(layer,) * 4,
        boundaries=((), (value,), (value,), (value,), (loss,)),
        batch=(value,),
    )


def _machine() -> Machine:
    devices = tuple(Device(name=f"gpu{i}", memory_bytes=600, backend=Backend.CUDA, ordinal=i) for i in range(2))
    links = tuple(Link(child=device.name, parent="host", bytes_per_s=1e3) for device in devices)
    return Machine(name="warm", devices=devices, host=Host(memory_bytes=2**20, num_cores=2), links=links)


if __name__ == "__main__":
    warm_up(wait=True)
