"""Chaos: random plans for random models run in random orders; each must train as plain PyTorch does, within its memory.

Most run op by op in orders that the program's edges allow; some in threads, with every op delayed at random.
"""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from harmony_lab.bench.random_models import NUM_SUBJECTS, OPTIMIZERS, Batch, Subject, batch_of, subject, train_plainly
from harmony_lab.costs import Profile
from harmony_lab.errors import PlanError
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Pack, Plan
from harmony_lab.planner.check import check, peak_bytes
from harmony_lab.planner.compose import updatable
from harmony_lab.planner.lower import lower
from harmony_lab.profiler.measure import profile
from harmony_lab.program import Program
from harmony_lab.roles import Role
from harmony_lab.runtime.ordering import updating_after
from harmony_lab.runtime.runner import Runner
from harmony_lab.training_plan import deferred, sizes_to_run

__all__ = ["failures", "run_plan"]

_TOLERANCE = 1e-9  # in float64: only the order of sums differs
_SIZES = (1, 2, 3, 4)
_LIMIT = 0.05  # of the norm of all gradients, which is mostly larger
_IN_THREADS_EVERY = 10
_PATIENCE_S = 60.0  # without any op ending: then threads wait for each other


class _Work(NamedTuple):
    """What is trained and how, but for the schedule.  ``counts``: minibatches of each step."""

    number: int
    subject: Subject
    optimizer: str
    max_grad_norm: float | None
    counts: tuple[int, ...]


class _Setting(NamedTuple):
    """``program``: of a step's first minibatch.  ``adding``: of those that are added to it."""

    plan: Plan
    machine: Machine
    program: Program
    adding: Program


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


def run_plan(seed: int, changed: Callable[[Program], Program] = lambda program: program) -> str | None:
    """Train two steps under the plan of that seed; what went wrong, if anything did.

    ``changed``: what is run in place of a program of the plan; if that lacks a wait, something should go wrong.
    """
    rng = random.Random(seed)
    work = _work(rng)
    model = work.subject.model
    start = copy.deepcopy(model.state_dict())
    plan = _plan(rng, work)
    try:
        setting = _setting(rng, work, plan)
        setting = setting._replace(program=changed(setting.program), adding=changed(setting.adding))
        generator = torch.Generator().manual_seed(seed)
        steps = [[batch_of(plan.minibatch_size, generator) for _ in range(count)] for count in work.counts]
        expected = train_plainly(work.subject, work.optimizer, plan, steps, work.max_grad_norm)
        found, held, left = _train(work, setting, steps, seed)
        torch.testing.assert_close(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
        if held != _state_bytes(setting.program if work.counts[-1] == 1 else setting.adding):
            return f"{setting.plan}: {held} bytes are held on the devices between steps"
        return f"{setting.plan}: {left} bytes are left on the devices" if any(left) else None
    except Exception as error:  # whatever it is, it comes with its seed
        return f"model {work.number}, {work.optimizer}, {plan}: {type(error).__name__}: {error}"
    finally:
        model.load_state_dict(start)


def _train(
    work: _Work, setting: _Setting, steps: list[list[Batch]], seed: int
) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """What ``train_plainly`` returns, and the bytes that are held on each device after the last step and in the end."""
    model = work.subject.model
    optimizer = OPTIMIZERS[work.optimizer](model.parameters())
    leaves = setting.plan.overlapped_update
    losses, norms = [], []
    with Runner(
        work.subject.layers,
        optimizer,
        setting.machine,
        lambda _: setting.program,
        lower_as={
            Role.ADDING: lambda _: setting.adding,
            Role.LAST: lambda _: setting.adding,
            **({Role.LEAVING: lambda _: setting.program} if leaves else {}),
        },
        max_grad_norm=work.max_grad_norm,
        chaos_seed=seed,
        interleaves=seed % _IN_THREADS_EVERY != 0,
        patience_s=_PATIENCE_S,
    ) as runner:
        for batches in steps:
            losses.append(runner.accumulate(batches, leave_updates=leaves))
            norms += [] if runner.last_norm is None else [runner.last_norm]
        held = runner.device_bytes
    found = {
        "losses": losses,
        "norms": norms,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
    }
    return found, held, runner.device_bytes


def _state_bytes(program: Program) -> tuple[int, ...]:
    """Per device, what stays there from step to step."""
    stays = [program.blocks[index] for index in program.resident]
    devices = range(program.num_devices)
    return tuple(sum(block.num_bytes for block in stays if block.device == device) for device in devices)


# -- random plans -----------------------------------------------------------------------------------------------------


def _work(rng: random.Random) -> _Work:
    number = rng.randrange(NUM_SUBJECTS)
    return _Work(
        number,
        subject(number),
        rng.choice(list(OPTIMIZERS)),
        max_grad_norm=_LIMIT if rng.random() < 0.25 else None,
        counts=(1, 2) if rng.random() < 0.25 else (1, 1),
    )


@cache
def _costs(number: int, optimizer: str) -> Profile:
    known = subject(number)
    stepping = OPTIMIZERS[optimizer](known.model.parameters())
    sizes = _SIZES[1:] if known.has_batch_norm else _SIZES
    return profile(known.layers, Machine.emulated(1, memory="1MiB"), stepping, microbatch_sizes=sizes, trials=1)


def _setting(rng: random.Random, work: _Work, plan: Plan) -> _Setting:
    """The plan, with some updates on devices, and devices that have just the memory it needs."""
    costs = _costs(work.number, work.optimizer)
    peers = rng.random() < 0.8
    machine = Machine.emulated(3, memory="64MiB", link=1e12, peer_transfers=peers, bridge=None if peers else 1e12)
    share = rng.choice((0.0, 0.5, 1.0))
    on_host = plan.with_(overlapped_update=False)
    plan = plan.with_(device_updates=[pack for pack in updatable(plan, costs, machine) if rng.random() < share])
    plans = [plan, on_host] if max(work.counts) > 1 else [plan]
    needed = map(max, zip(*(peak_bytes(lower(each, costs, machine)) for each in plans), strict=True))
    tight = (replace(d, memory_bytes=max(1, size)) for d, size in zip(machine.devices, needed, strict=True))
    machine = replace(machine, devices=tuple(tight))
    programs = []
    for each in plans:
        program = lower(each, costs, machine)
        clipped = work.max_grad_norm is not None and not each.overlapped_update
        programs.append(updating_after(program, all_gradients=clipped))
        check(programs[-1])
    return _Setting(plan, machine, programs[0], programs[-1])


def _plan(rng: random.Random, work: _Work) -> Plan:
    """Any that the model can train with."""
    normed = work.subject.has_batch_norm
    while True:
        plan = _any_plan(rng, len(work.subject.layers), alike=normed)
        if not normed or min(sizes_to_run(plan)) > 1:
            return plan if work.max_grad_norm is None else deferred(plan, rng.random() < 0.5)


def _any_plan(rng: random.Random, num_layers: int, *, alike: bool) -> Plan:
    """``alike``: the microbatches of forward and backward."""
    minibatch = rng.randint(3, 9)
    backward = _packs(rng, num_layers)
    fused = backward[-1].start
    same = alike or rng.random() < 0.5
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
