"""Chaos: random plans run in random orders; each must train as plain PyTorch does, within its memory.

Most run op by op in orders that the program's edges allow; some in threads, with every op delayed at random.
"""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.lower import lower
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.program import Program
from harmony_lab.runtime.runner import Runner

__all__ = ["failures", "run_plan"]

_WIDTH = 4
_STEPS = 2
_TOLERANCE = 1e-9  # in float64: only the order of sums differs
_SIZES = (1, 2, 3, 4)
_IN_THREADS_EVERY = 10
_PATIENCE_S = 60.0  # without any op ending: then threads wait for each other


class _Setting(NamedTuple):
    plan: Plan
    machine: Machine
    program: Program


def failures(
    num_plans: int, progress: Callable[[int, int, str], None] = lambda done, total, text: None
) -> dict[int, str]:
    """What went wrong, by the seed that shows it again (``run_plan(seed)``)."""
    found = {}
    for seed in range(num_plans):
        if (problem := run_plan(seed)) is not None:
            found[seed] = problem
        progress(seed + 1, num_plans, f"{len(found)} failed")
    return found


def run_plan(seed: int) -> str | None:
    """Train two steps under the plan of that seed; what went wrong, if anything did."""
    rng = random.Random(seed)
    layers, costs = _model(rng.randint(3, 12))
    model = layers.model
    start = copy.deepcopy(model.state_dict())
    plan = _plan(rng, len(layers))
    try:
        setting = _setting(rng, plan, costs)
        generator = torch.Generator().manual_seed(seed)
        batches = [_batch(setting.plan.minibatch_size, generator) for _ in range(_STEPS)]
        expected = _plain(model, batches)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        in_threads = seed % _IN_THREADS_EVERY == 0
        with Runner(
            layers,
            optimizer,
            setting.machine,
            lambda _: setting.program,
            lower_leaving=(lambda _: setting.program) if plan.overlapped_update else None,
            chaos_seed=seed,
            interleaves=not in_threads,
            patience_s=_PATIENCE_S,
        ) as runner:
            for batch in batches:
                runner.step(batch, leave_updates=plan.overlapped_update)
            held = runner.device_bytes
        left = runner.device_bytes
        apart = max((a - b).abs().max().item() for a, b in zip(model.parameters(), expected, strict=True))
        if not apart <= _TOLERANCE:
            return f"{setting.plan}: parameters differ by {apart}"
        if held != _state_bytes(setting.program):
            return f"{setting.plan}: {held} bytes are held on the devices between steps"
        return f"{setting.plan}: {left} bytes are left on the devices" if any(left) else None
    except Exception as error:  # whatever it is, it comes with its seed
        return f"{plan}: {type(error).__name__}: {error}"
    finally:
        model.load_state_dict(start)


def _state_bytes(program: Program) -> tuple[int, ...]:
    """Per device, what stays there from step to step."""
    stays = [program.blocks[index] for index in program.resident]
    devices = range(program.num_devices)
    return tuple(sum(block.num_bytes for block in stays if block.device == device) for device in devices)


@cache
def _model(num_layers: int) -> tuple[LayerSequence, Profile]:
    torch.manual_seed(num_layers)
    parts = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(num_layers - 1)]
    model = nn.Sequential(*parts).double()
    layers = decompose(model, _batch(2, torch.Generator()), nn.MSELoss())
    machine = Machine.emulated(1, memory="1MiB")
    costs = profile(layers, machine, torch.optim.SGD(model.parameters(), momentum=0.9), microbatch_sizes=_SIZES)
    return layers, costs


def _batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randn(2, size, _WIDTH, dtype=torch.float64, generator=generator)
    return inputs, targets


def _plain(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(copied(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call] # torch's has no types
        optimizer.step()
    return list(copied.parameters())


# -- random plans -----------------------------------------------------------------------------------------------------


def _setting(rng: random.Random, plan: Plan, costs: Profile) -> _Setting:
    """The plan, with some updates on devices, and devices that have just the memory it needs."""
    peers = rng.random() < 0.8
    machine = Machine.emulated(3, memory="64MiB", link=1e12, peer_transfers=peers, bridge=None if peers else 1e12)
    share = rng.choice((0.0, 0.5, 1.0))
    plan = plan.with_(device_updates=[pack for pack in updatable(plan, costs, machine) if rng.random() < share])
    needed = peak_bytes(lower(plan, costs, machine))
    tight = (replace(d, memory_bytes=max(1, size)) for d, size in zip(machine.devices, needed, strict=True))
    machine = replace(machine, devices=tuple(tight))
    program = lower(plan, costs, machine)
    check(program)
    return _Setting(plan, machine, program)


def _plan(rng: random.Random, num_layers: int) -> Plan:
    minibatch = rng.randint(3, 9)
    backward = _packs(rng, num_layers)
    fused = backward[-1].start
    same = rng.random() < 0.5
    size = rng.randint(1, min(minibatch, max(_SIZES)))
    plan = Plan(
        mode=rng.choice(list(Mode)),
        minibatch_size=minibatch,
        forward_microbatch_size=size if same else rng.randint(1, min(minibatch, max(_SIZES))),
        forward_packs=backward[:-1] if rng.random() < 0.5 else _packs(rng, fused) if fused else (),
        backward_microbatch_size=size,
        backward_packs=backward,
        devices=tuple(rng.sample(range(3), rng.randint(1, 3))),
        prefetch=rng.choice((0, 1, 1, 2)),
        peer_transfers=rng.random() < 0.7,
        just_in_time_update=rng.random() < 0.8,
    )
    for change in _staying(rng, plan):
        try:
            plan = plan.with_(**change)
        except PlanError:
            continue
    overlaps = not plan.just_in_time_update and rng.random() < 0.5
    return plan.with_(overlapped_update=overlaps)


def _packs(rng: random.Random, stop: int) -> tuple[Pack, ...]:
    cuts = sorted(rng.sample(range(1, stop), rng.randint(0, stop - 1))) if stop > 1 else []
    return tuple(Pack(first, last) for first, last in zip([0, *cuts], [*cuts, stop], strict=True))


def _staying(rng: random.Random, plan: Plan) -> Iterator[dict[str, object]]:
    """What may stay on devices; not all of it suits the plan."""
    if rng.random() < 0.5:
        yield {"mirrored": True}
    both = [pack for pack in plan.forward_packs if pack in plan.backward_packs]
    resident = tuple(pack for pack in both if rng.random() < 0.4)
    yield {"resident_packs": resident}
    yield {"kept_packs": tuple(pack for pack in resident if rng.random() < 0.5)}
    yield {"device_stash": tuple(pack.start for pack in plan.backward_packs[1:] if rng.random() < 0.4)}
