"""verify: steps of training under a plan beside the same steps in plain PyTorch, both on copies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harmony_lab.certificate import Certificate, Difference
from harmony_lab.copies import copied, copied_layers
from harmony_lab.errors import HarmonyError, HostMemoryError
from harmony_lab.layers import LOSS_TOTALS, LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Plan, microbatches
from harmony_lab.precision import Precision
from harmony_lab.profiler.compiling import is_compiled
from harmony_lab.profiler.precision import plain_precision
from harmony_lab.program import Program
from harmony_lab.runtime.host_memory import available_bytes
from harmony_lab.runtime.losses import weight_of
from harmony_lab.runtime.moves import batch_slice
from harmony_lab.runtime.runner import Runner, step_seed
from harmony_lab.units import format_bytes

__all__ = ["Subject", "require_memory", "verify"]

_TOLERANCE = 1e-4
_LOW_PRECISION_TOLERANCE = 5e-2  # of types of 16 bits and less
# Under a bf16 plan a captured graph may round in other places than the model's Python code does: single gradients, sums
# over many tokens that cancel, show that most.
_BF16_TOLERANCES = {"loss": 1e-2, "gradients": 0.2, "buffers": 1e-2}
_COMPARED = ("loss", "gradients", "parameters", "optimizer state", "buffers")
_SMALLEST_SCALE = 1e-4  # of a gradient, relative to the model's largest: what is smaller is rounding
_SMALLEST_SCALE_ROUNDED = 1e-2  # under bf16, and where the order of operations is another


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is verified: a Trainer's parts and settings.  ``lower``: programs by minibatch size."""

    model: str
    layers: LayerSequence
    optimizer: torch.optim.Optimizer
    plan: Plan
    machine: Machine
    lower: Callable[[int], Program]
    seed: int
    first_step: int
    max_grad_norm: float | None
    step_bytes: int  # of the host's memory, beside both copies: what a step takes here, and plain activations
    optimizer_state_bytes: int  # once there is all of it
    shortened_from: int | None = None  # layers that the model has


def verify(subject: Subject, batches: Sequence[Any], tolerance: float | None = None) -> Certificate:
    """Train one step on each batch, both ways, from the present state, and compare.

    Copies are trained: model, optimizer, buffers and random state stay as they are.  Plain PyTorch runs the user's own
    model and loss with the plan's microbatches and dropout masks, in the plan's precision (``plain_precision``).  After
    its gradients have been compared, its optimizer steps all parameters at once with the gradients found here: an
    optimizer such as Adam makes a full step of the rounding in a gradient that is zero, and that would say nothing.  So
    parameters and optimizer state show what updating pack by pack does, and every step starts from the same parameters.

    Of a shortened model the layers are run one after the other, by plain autograd, for there is no module of them.

    Raises ``HostMemoryError`` where the host has no room for the copies.
    """
    if not batches:
        raise HarmonyError("nothing to verify with: give at least one batch")
    require_memory(subject)
    with torch.random.fork_rng(devices=()):
        return _Comparison(subject, tolerance).run(batches)


class _Comparison:
    """Both copies, and the largest differences so far."""

    def __init__(self, subject: Subject, tolerance: float | None) -> None:
        self._subject = subject
        make = copied if subject.shortened_from is None else copied_layers
        ours, theirs = (make(subject.layers, subject.optimizer) for _ in range(2))
        self._layers, self._optimizer = ours.layers, ours.optimizer
        self._plain, self._plain_optimizer, self._plain_loss = theirs.layers, theirs.optimizer, theirs.loss
        self._names = [name for name, spec in subject.layers.state.items() if spec.trainable]
        tolerances = _tolerances(subject) if tolerance is None else dict.fromkeys(_COMPARED, tolerance)
        self._found = {
            kind: Difference(what=kind, largest=0.0, where="", tolerance=allowed)
            for kind, allowed in tolerances.items()
        }
        self._seen: dict[str, Tensor] = {}

    def run(self, batches: Sequence[Any]) -> Certificate:
        subject, losses = self._subject, []
        with Runner(
            self._layers,
            self._optimizer,
            subject.machine,
            subject.lower,
            seed=subject.seed,
            first_step=subject.first_step,
            max_grad_norm=subject.max_grad_norm,
            observe=self._observe,
        ) as runner:
            for number, batch in enumerate(batches):
                where = f"step {number + 1}"
                ours = runner.step(batch)
                theirs = self._plain_step(batch, subject.first_step + number, where)
                losses.append((ours, theirs))
                self._note("loss", where, torch.tensor(ours), torch.tensor(theirs))
                self._compare_state(where)
        return Certificate(
            model=subject.model,
            plan=str(subject.plan),
            steps=len(batches),
            differences=tuple(self._found.values()),
            losses=tuple(losses),
            num_layers=len(subject.layers),
            shortened_from=subject.shortened_from,
        )

    def _observe(self, gradients: Mapping[str, Tensor]) -> None:
        self._seen.update((name, gradient.clone()) for name, gradient in gradients.items())

    def _plain_step(self, batch: Any, step: int, where: str) -> float:
        """Compares gradients; the update that follows is made with those seen here."""
        self._plain_optimizer.zero_grad(set_to_none=True)
        total = 0.0
        masters = [self._plain.tensors[name] for name in self._plain.state]
        with plain_precision(self._subject.plan.precision, masters) as computing:
            for weight, samples, part in self._microbatches(batch):
                seed = step_seed(self._subject.seed, step)
                with computing():
                    loss = self._plain_loss(part, samples, seed) * weight
                if weight:  # where nothing counts plain PyTorch's loss is 0 / 0
                    loss.backward()  # type: ignore[no-untyped-call] # torch's has no types
                    total += loss.item()
        parameters = [self._plain.tensors[name] for name in self._names]
        if self._subject.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._subject.max_grad_norm)
        theirs = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in zip(self._names, parameters, strict=True)
        }
        is_exact = self._subject.plan.precision is Precision.FP32 and not is_compiled(self._layers)
        share = _SMALLEST_SCALE if is_exact else _SMALLEST_SCALE_ROUNDED
        smallest = share * max((_size(gradient) for gradient in theirs.values()), default=0.0)
        for name, parameter in zip(self._names, parameters, strict=True):
            self._note("gradients", f"{name}, {where}", self._seen[name], theirs[name], smallest)
            parameter.grad = self._seen.pop(name)
        self._plain_optimizer.step()
        self._plain_optimizer.zero_grad(set_to_none=True)
        return total

    def _microbatches(self, batch: Any) -> Iterator[tuple[float, tuple[int, int], dict[str, Tensor]]]:
        """(weight, samples, tensors) of what plain PyTorch runs: the plan's microbatches of the backward.

        A loss of several terms that count different things has no weight per microbatch: it is run in one go.
        """
        layers = self._subject.layers
        tensors, sizes = layers.flatten_batch(batch)
        size, plan = sizes["batch"], self._subject.plan.for_minibatch(sizes["batch"])
        shares = [plan.share(position) for position in range(plan.num_devices if plan.mode is Mode.DP else 1)]
        parts = [part for share in shares for part in microbatches(*share, plan.backward_microbatch_size)]
        if LOSS_TOTALS in layers.batch_by_name and not layers.couples_samples:
            parts = [(0, size)]
        names = [spec.name for spec in layers.batch]
        cut = [batch_slice(layers, names, tensors, samples, size) for samples in parts]
        weights = [weight_of(layers, part) for part in cut]
        total = sum(weights) if layers.loss_reduction == "mean" else 1.0
        for samples, weight, part in zip(parts, weights, cut, strict=True):
            yield weight / total, samples, part

    def _compare_state(self, where: str) -> None:
        for kind, names in (("parameters", self._subject.layers.state), ("buffers", self._subject.layers.buffer_state)):
            for name in names:
                ours, theirs = self._layers.tensors[name], self._plain.tensors[name]
                self._note(kind, f"{name}, {where}", ours.detach(), theirs.detach())
        for name in self._names:
            ours_of = self._optimizer.state.get(self._layers.tensors[name], {})
            theirs_of = self._plain_optimizer.state.get(self._plain.tensors[name], {})
            for key in sorted({*ours_of, *theirs_of}, key=str):
                self._note_state(f"{key} of {name}, {where}", ours_of.get(key), theirs_of.get(key))

    def _note_state(self, where: str, ours: Any, theirs: Any) -> None:
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            self._note("optimizer state", where, ours.to("cpu"), theirs)
        elif isinstance(ours, float | int) and isinstance(theirs, float | int):
            self._note("optimizer state", where, torch.tensor(float(ours)), torch.tensor(float(theirs)))
        elif type(ours) is not type(theirs):
            self._enter("optimizer state", where, float("inf"))

    def _note(self, kind: str, where: str, ours: Tensor, theirs: Tensor, smallest_scale: float = 0.0) -> None:
        if ours.shape != theirs.shape:
            self._enter(kind, where, float("inf"))
        elif not _same(ours, theirs):
            size = max(_size(theirs), smallest_scale)
            self._enter(kind, where, _size(ours.double() - theirs.double()) / size if size else float("inf"))

    def _enter(self, kind: str, where: str, difference: float) -> None:
        found = self._found[kind]
        if not difference <= found.largest:  # NaN stays
            self._found[kind] = replace(found, largest=difference, where=where)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """To the bit; NaN is NaN."""
    return torch.equal(ours, theirs) or bool(torch.allclose(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True))


def _size(tensor: Tensor) -> float:
    """The largest absolute element; NaN where there is one."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _tolerances(subject: Subject) -> dict[str, float]:
    """By what is compared.  Parameters and optimizer state are made from the same gradients, in any precision."""
    low = any(subject.layers.tensors[name].dtype.itemsize < 4 for name in subject.layers.state)
    tolerances = dict.fromkeys(_COMPARED, _LOW_PRECISION_TOLERANCE if low else _TOLERANCE)
    return tolerances | (_BF16_TOLERANCES if subject.plan.precision is Precision.BF16 else {})


def require_memory(subject: Subject) -> None:
    layers = subject.layers
    model = sum(tensor.nbytes for tensor in layers.tensors.values())
    shadowed = [spec for spec in layers.state.values() if spec.shadow]
    shadows = sum(spec.device_bytes + spec.num_bytes for spec in shadowed)  # here in bf16, there rounded
    needed = 2 * (model + subject.optimizer_state_bytes + layers.trainable_bytes) + shadows + subject.step_bytes
    available = min(available_bytes(), subject.machine.host.memory_bytes)
    if needed > available:
        raise HostMemoryError(
            f"verifying takes {format_bytes(needed)} of the host's memory for two copies of the model, its gradients "
            f"and its optimizer's state, but {format_bytes(available)} are available. Verify the same kind of model "
            "with fewer layers, or on a host with more memory",
            needed_bytes=needed,
            available_bytes=available,
        )
