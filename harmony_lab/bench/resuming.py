"""How long a step takes after training was resumed, next to training that went on."""

import io
from contextlib import ExitStack
from typing import Any

import torch

from harmony_lab.bench.decoder import Shape
from harmony_lab.bench.training import Subject, adamw, alternating, emulated, layerwise_plan
from harmony_lab.plan import Mode
from harmony_lab.trainer import Trainer

__all__ = ["resume_step_ratio"]

_STEPS_BEFORE = 3


def resume_step_ratio(shape: Shape, minibatch_size: int, microbatch_size: int, rounds: int) -> float:
    """Of a Trainer over a model and an optimizer that were loaded from another's, through ``state_dict`` and a file,
    over that of the other, which goes on."""
    subjects = [Subject(shape, minibatch_size, microbatch_size) for _ in range(2)]
    optimizers = [adamw(subject.model) for subject in subjects]
    machine = emulated(1)
    plan, costs = layerwise_plan(subjects[0], Mode.DP, 1), subjects[0].profile(machine)
    with ExitStack() as stack:
        first = stack.enter_context(Trainer(subjects[0].layers, optimizers[0], plan, machine, profile=costs))
        for _ in range(_STEPS_BEFORE):
            first.step(subjects[0].batch)
        subjects[1].model.load_state_dict(_saved(subjects[0].model.state_dict()))
        optimizers[1].load_state_dict(_saved(optimizers[0].state_dict()))
        resumed = Trainer(subjects[1].layers, optimizers[1], plan, machine, profile=costs, first_step=_STEPS_BEFORE)
        second = stack.enter_context(resumed)
        return alternating(lambda: first.step(subjects[0].batch), lambda: second.step(subjects[1].batch), rounds)


def _saved(state: Any) -> Any:
    """What comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
