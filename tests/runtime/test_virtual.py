"""Virtual time: the trace of a step that really ran is the simulator's, where ops take what the profile says."""

import copy
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from plain_training import breaking
from torch import Tensor, nn

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, StepCancelledError, TrainingError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Backend, Machine
from harmony_lab.plan import Plan
from harmony_lab.planner.baseline_programs import Iteration, runnable_program
from harmony_lab.planner.baseline_tables import LayerTables
from harmony_lab.planner.lower import lower
from harmony_lab.planner.pack import PackCosts
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.program import Program, TensorKind
from harmony_lab.roles import Role
from harmony_lab.runtime.runner import Runner
from harmony_lab.simulator.engine import run
from harmony_lab.simulator.work import work_of
from harmony_lab.trace import Trace
from harmony_lab.trainer import Trainer

MINIBATCH = 12
INSIDE = [TensorKind.SAVED, TensorKind.WORKSPACE]  # of ops: a program knows the most of them
PACKS = "minibatch=12 forward=3[0:1,1:3] backward=2[0:1,1:3,3:5]"


class Case(NamedTuple):
    plan: str
    devices: int = 2
    machine: Mapping[str, Any] = {}
    latency_s: float = 0.0


CASES = {
    "gradients reduced": Case(f"dp {PACKS} devices=0,1,2 prefetch=2", 3),
    "through the host": Case(f"dp {PACKS} devices=0,1 peer=off", 2, {"host_memory_rate": "5MB/s"}, 1e-4),
    "pipeline": Case(f"pp {PACKS} devices=0,1", 2, {}, 3e-5),
    "mirrored": Case(f"pp {PACKS.replace('=3', '=2')} devices=0,1 mirrored=on stash=1 resident=1:3 kept=1:3"),
    "bridge": Case(f"pp {PACKS} devices=0,2,1 prefetch=0", 3, {"bridge": "9MB/s", "peer_transfers": False}),
    "updates on devices": Case(f"pp {PACKS} devices=0,1 optimizer=0:1,3:5"),
    "updates at the end": Case(f"dp {PACKS} devices=0,1 update=end"),
    "updates in the next step": Case(f"pp {PACKS} devices=0,1 update=next", 2, {}, 1e-4),
    "demand paging": Case("", 2, {"memory": "12KiB"}),
}


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(MINIBATCH, 16, generator=generator), torch.randn(MINIBATCH, 16, generator=generator)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


@cache
def subject() -> tuple[LayerSequence, Profile]:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*parts, nn.Linear(16, 16))
    layers = decompose(model, batch(), nn.MSELoss(), cut=[name for name, _ in model.named_children()])
    devices = Machine.emulated(1, virtual_time=True)
    return layers, profile(layers, devices, adam(layers.model), microbatch_sizes=(1, 2, 3, 4), trials=1)


def machine(case: Case) -> Machine:
    """Whose host has fewer cores than updates take threads."""
    found = Machine.emulated(case.devices, link="10MB/s", peer_link="8MB/s", virtual_time=True, **case.machine)
    links = tuple(replace(link, latency_s=case.latency_s) for link in found.links)
    return replace(found, links=links, host=replace(found.host, num_cores=1, update_threads=2))


def programs(case: Case, costs: Profile, devices: Machine) -> tuple[Program, Program]:
    """Of a step that makes its own updates, and of one that leaves them."""
    if not case.plan:
        tables = LayerTables(costs, PackCosts(costs))
        layerwise = Iteration(tables=tables, machine=devices, minibatch_size=MINIBATCH, size=2, recomputes=True)
        paged = runnable_program(layerwise, on_demand=True)
        assert isinstance(paged, Program)
        return paged, paged
    plan = Plan.parse(case.plan)
    own = lower(plan.with_(overlapped_update=False), costs, devices)
    return own, lower(plan, costs, devices) if plan.overlapped_update else own


def seconds(costs: Profile, devices: Machine) -> Callable[[Program, int, float], float]:
    """The clock on which ops take what the simulator says."""
    known: dict[int, list[float]] = {}

    def of(program: Program, index: int, wall_s: float) -> float:
        if id(program) not in known:
            known[id(program)] = work_of(program, costs, devices).graph.seconds.tolist()
        return known[id(program)][index]

    return of


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_in_virtual_time_is_what_the_simulator_says_of_its_program(case: Case) -> None:
    layers, costs = subject()
    devices = machine(case)
    own, leaving = programs(case, costs, devices)
    predicted = run(leaving, costs, devices)
    start = copy.deepcopy(layers.model.state_dict())
    also: dict[str, Any] = {} if leaving is own else {"lower_as": {Role.LEAVING: lambda size: leaving}}
    clock, optimizer = seconds(costs, devices), adam(layers.model)
    try:
        with Runner(layers, optimizer, devices, lambda size: own, op_seconds=clock, **also) as runner:
            for step in range(3):
                runner.step(batch(step), leave_updates=True)
                if step:  # the first makes the optimizer's state
                    assert runner.last_trace is not None
                    assert_same(runner.last_trace, predicted)
    finally:
        layers.model.load_state_dict(start)


def assert_same(measured: Trace, predicted: Trace) -> None:
    assert measured.machine == predicted.machine
    np.testing.assert_allclose(measured.start_s, predicted.start_s, rtol=1e-12)
    np.testing.assert_allclose(measured.end_s, predicted.end_s, rtol=1e-12)
    assert measured.moved_bytes == predicted.moved_bytes
    events = np.unique([*predicted.start_s, *predicted.end_s])
    between = (events[1:] + events[:-1])[np.diff(events) > 1e-9 * predicted.makespan_s] / 2
    for here, there in zip(bytes_at(measured, between), bytes_at(predicted, between), strict=True):
        for kind in TensorKind:
            if kind not in INSIDE:
                np.testing.assert_array_equal(here[kind], there[kind], err_msg=kind)
        assert (sum(here[kind] for kind in INSIDE) <= sum(there[kind] for kind in INSIDE)).all()


def bytes_at(trace: Trace, times_s: NDArray[np.float64]) -> list[dict[TensorKind, NDArray[np.int64]]]:
    """Of each device, by kind, alive at these times."""
    rows = [line.num_bytes[np.searchsorted(line.times_s, times_s, side="right") - 1] for line in trace.memory]
    return [dict(zip(line.kinds, row.T, strict=True)) for line, row in zip(trace.memory, rows, strict=True)]


def training(text: str = f"pp {PACKS} devices=0,1 update=next", **options: Any) -> tuple[Trainer, nn.Module]:
    """With a profile made for real time; and a copy to be trained plainly."""
    layers, costs = subject()
    before = options.pop("before", None)
    if before is not None:
        layers = breaking(layers, 1, before)
    plain = copy.deepcopy(layers.model)
    devices = Machine.emulated(2, link="10MB/s")
    return Trainer(layers, adam(layers.model), text, devices, profile=costs, virtual_time=True, **options), plain


def plain_step(plain: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> float:
    optimizer.zero_grad()
    losses = [nn.functional.mse_loss(plain(inputs), targets) / len(batches) for inputs, targets in batches]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return sum(loss.item() for loss in losses)


def assert_trained_like(trainer: Trainer, plain: nn.Module) -> None:
    for ours, theirs in zip(trainer.layers.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_training_in_virtual_time_is_plain_training_on_one_thread() -> None:
    num_threads, threads = torch.get_num_threads(), set(threading.enumerate())
    trainer, plain = training(accumulate=2)
    optimizer = adam(plain)
    with trainer:
        assert trainer.predicted.machine == trainer.machine == replace(trainer.machine, virtual_time=True)
        for step in range(3):
            loss = trainer.step(batch(step), leave_updates=step < 2)
            assert loss == pytest.approx(plain_step(plain, optimizer, [batch(step)]), rel=1e-4)
            assert trainer.last_trace is not None
            assert trainer.last_trace.link_bytes == trainer.predicted.link_bytes
            moved_s = sum(trainer.last_trace.moved_bytes.values()) / 10e6  # each byte crosses a link at most this fast
            assert trainer.last_trace.makespan_s > moved_s / 4
        loss = trainer.accumulate([batch(3), batch(4)])
        assert loss == pytest.approx(plain_step(plain, optimizer, [batch(3), batch(4)]), rel=1e-4)
        inputs, targets = batch(5)
        assert trainer.evaluate((inputs, targets)) == pytest.approx(
            nn.functional.mse_loss(plain(inputs), targets).item()
        )
        assert_trained_like(trainer, plain)
        assert len(set(threading.enumerate()) - threads) == 1
    assert set(threading.enumerate()) == threads
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), None])
def test_a_step_in_virtual_time_that_is_broken_off_leaves_all_as_it_was(error: BaseException | None) -> None:
    calls: list[int] = []

    def before() -> None:
        calls.append(1)
        if len(calls) == 2 and isinstance(error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # to whoever waits for this op to be done
            job = trainer._runner._executor._job
            assert job is not None
            assert job._aborted.wait(10)
        elif len(calls) == 2 and error is not None:
            raise error
        elif len(calls) == 2:
            assert trainer.cancel()

    num_threads = torch.get_num_threads()
    trainer, plain = training(f"dp {PACKS} devices=0,1 update=end", before=before, stop_on_nan=True)
    expected = {ValueError: TrainingError, KeyboardInterrupt: KeyboardInterrupt}.get(type(error), StepCancelledError)
    with trainer:
        with pytest.raises(expected, match="op .*forward.*ValueError" if expected is TrainingError else None):
            trainer.step(batch())
        assert len(calls) == 2
        assert not any(trainer._runner.device_bytes)
        assert torch.get_num_threads() == num_threads
        with pytest.raises(TrainingError, match="nan"):
            trainer.step((batch()[0] * float("nan"), batch()[1]))
        assert_trained_like(trainer, plain)
        trainer.step(batch())
        plain_step(plain, adam(plain), [batch()])
        assert_trained_like(trainer, plain)


class Failing(torch.optim.AdamW):
    """From that step on: a pack at a time."""

    steps_left = 4

    def step(self, closure: Any = None) -> Any:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise ValueError("no")
        return super().step(closure)


def test_an_update_left_over_that_fails_in_virtual_time_blocks_no_swap_that_waits_for_it() -> None:
    layers, _ = subject()
    devices = Machine.emulated(2, link="10MB/s", virtual_time=True)
    sizes = {"microbatch_sizes": (1, 2, 3), "precision": "bf16", "trials": 1}
    costs = profile(
        layers, devices, adam(layers.model), **sizes
    )  # 16 bits: weights are fetched once they are converted
    optimizer = Failing(layers.model.parameters(), lr=0.01)
    plan = f"pp {PACKS} devices=0,1 update=next precision=bf16"
    with Trainer(layers, optimizer, plan, devices, profile=costs) as trainer:
        trainer.step(batch(), leave_updates=True)
        trainer.step(batch(1), leave_updates=True)
        with pytest.raises(TrainingError, match="ValueError: no"):
            trainer.step(batch(2), leave_updates=True)


def test_virtual_time_is_refused_on_real_devices_and_with_delays_at_random() -> None:
    layers, costs = subject()
    devices = Machine.emulated(1, virtual_time=True)
    assert Machine.from_json(devices.to_json()) == devices
    real = replace(devices.devices[0], backend=Backend.CUDA)
    plan, optimizer = f"dp {PACKS} devices=0", adam(layers.model)
    with pytest.raises(HarmonyError, match=r"virtual_time is for emulated devices, emu0 are real"):
        Trainer(layers, optimizer, plan, replace(devices, devices=(real,), virtual_time=False), virtual_time=True)
    with pytest.raises(HarmonyError, match="chaos_seed=1 delays ops at random"):
        Trainer(layers, optimizer, plan, devices, profile=costs, chaos_seed=1)
    with pytest.raises(HarmonyError, match="choose one"):
        Runner(layers, optimizer, devices, lambda size: lower(Plan.parse(plan), costs, devices), interleaves=True)
