"""The demo: a GPT-2 that outgrows its devices trains on the standard library's source, then is checked against
PyTorch."""

import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from harmony_lab.errors import HarmonyError
from harmony_lab.lab import Lab
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Mode, Plan, microbatches
from harmony_lab.planner.check import peak_bytes
from harmony_lab.precision import Precision
from harmony_lab.profiler.precision import plain_precision
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.run import Run
from harmony_lab.runtime.runner import step_seed
from harmony_lab.terminal import Check, bar, checks_table, ranking_table
from harmony_lab.units import format_bytes, format_count, format_seconds

__all__ = ["DemoSettings", "Outcome", "run_demo", "source_batches"]

_SEED = 0
_VOCABULARY = 256  # bytes
_LENGTH = 32  # tokens per sample
_MINIBATCH = 32
_FULL_STEPS = 30  # from here on the loss must have fallen by _LOSS_DROP
_LOSS_DROP = 1.5
# Where two runs round a weight to bf16 differently, they are a step of Adam apart at times.
_TOLERANCES = {Precision.FP32: 1e-5, Precision.BF16: 1e-4}
_LEARNING_RATE = 1e-3
# Adam divides each gradient by its own size.  Where that size is about rounding error, the usual epsilon of 1e-8 turns
# the rounding of another order of summation into steps of visible size; 1e-6 does not.  The plain run uses the same.
_ADAM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """``memory_bytes``: per device; None: devices that together hold half of the training state."""

    steps: int = _FULL_STEPS
    num_devices: int = 2
    memory_bytes: int | None = None
    link_bytes_per_s: float = 2e9
    mode: Mode | None = None
    precision: Precision = Precision.FP32
    json_path: Path | None = None
    report_path: Path = Path("harmony-lab-report.html")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo found; every figure of one step is the worst over all steps, ``measured_step_s`` the median."""

    state_bytes: int
    footprint_bytes: int
    device_budget_bytes: list[int]
    plan: str
    initial_loss: float
    final_loss: float
    max_abs_param_diff_vs_torch: float
    predicted_step_s: float
    measured_step_s: float
    swap_bytes_predicted: int
    swap_bytes_measured: int
    peak_bytes_predicted: list[int]
    peak_bytes_measured: list[int]
    lower_bound_step_s: float

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def checks(self, settings: DemoSettings) -> list[Check]:
        budget, drop = sum(self.device_budget_bytes), self.initial_loss - self.final_loss
        measured, predicted = max(self.peak_bytes_measured), max(self.peak_bytes_predicted)
        within = all(
            m <= p <= b
            for m, p, b in zip(
                self.peak_bytes_measured, self.peak_bytes_predicted, self.device_budget_bytes, strict=True
            )
        )
        tolerance = _TOLERANCES[settings.precision]
        checks = [
            Check(
                "parameters equal plain PyTorch's",
                f"largest difference {self.max_abs_param_diff_vs_torch:.1e}, allowed {tolerance:.0e}",
                self.max_abs_param_diff_vs_torch <= tolerance,
            ),
            Check(
                "bytes swapped as predicted",
                f"{format_bytes(self.swap_bytes_measured)} of {format_bytes(self.swap_bytes_predicted)}",
                self.swap_bytes_measured == self.swap_bytes_predicted,
            ),
            Check(
                "peak memory as predicted or less",
                f"{format_bytes(measured)}, predicted {format_bytes(predicted)}",
                within,
            ),
        ]
        if settings.memory_bytes is None:
            found = f"{format_bytes(budget)} of {format_bytes(self.state_bytes)}"
            checks.append(Check("devices hold half the training state", found, 2 * budget <= self.state_bytes))
        if settings.steps >= _FULL_STEPS:
            found = f"{self.initial_loss:.2f} to {self.final_loss:.2f}"
            checks.append(Check(f"loss falls by {_LOSS_DROP} nats", found, drop >= _LOSS_DROP))
        return checks


def run_demo(settings: DemoSettings, console: Console) -> bool:
    """Profile, search, train, compare with plain PyTorch, write the report.  Tells whether every check held."""
    batches = source_batches(settings.steps)
    model = _gpt2()
    state_bytes = 4 * sum(p.numel() * p.element_size() for p in model.parameters())  # weight, gradient, two moments
    memory_bytes = settings.memory_bytes or state_bytes // 2 // settings.num_devices
    machine = Machine.emulated(settings.num_devices, memory=memory_bytes, link=settings.link_bytes_per_s)
    count = format_count(sum(p.numel() for p in model.parameters()))
    console.print(
        f"A GPT-2 of {count} parameters; training state {format_bytes(state_bytes)}.\nMachine: {machine}",
        soft_wrap=True,
    )

    lab = Lab(
        model,
        batches[0],
        _adamw(model),
        minibatch_size=_MINIBATCH,
        machine=machine,
        precision=settings.precision,
        seed=_SEED,
    )
    with bar(console, "profile") as move:
        lab.measure(move)
    with bar(console, "search") as move:
        result = lab.search(move, modes=(settings.mode,) if settings.mode else tuple(Mode))
    console.print(ranking_table(result))
    console.print(result.explain(), soft_wrap=True)
    run = _train(lab, batches, console)
    plain = _train_plain(lab, batches, console)
    outcome = _outcome(lab, run, plain)

    if settings.json_path is not None:
        settings.json_path.write_text(json.dumps(outcome.to_json(), indent=1))
    console.print(f"HTML report: {lab.report(settings.report_path)}", soft_wrap=True)
    checks = outcome.checks(settings)
    console.print(checks_table(checks))
    console.print(
        f"One step: predicted {format_seconds(outcome.predicted_step_s)}, measured "
        f"{format_seconds(outcome.measured_step_s)}; plain PyTorch without a limit {format_seconds(plain.step_s)}.",
        soft_wrap=True,
    )
    lab.close()
    return all(check.holds for check in checks)


# -- model and data -----------------------------------------------------------------------------------------------


def source_batches(num_batches: int) -> list[dict[str, torch.Tensor]]:
    """Minibatches of byte tokens cut at random from the standard library's source: input_ids and labels (32, 32)."""
    folder = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(_SEED)
    starts = torch.randint(len(tokens) - _LENGTH, (num_batches, _MINIBATCH), generator=generator)
    batches = [torch.stack([tokens[s : s + _LENGTH] for s in row.tolist()]) for row in starts]
    return [{"input_ids": batch, "labels": batch.clone()} for batch in batches]


def _gpt2() -> torch.nn.Module:
    """Random weights, the same every time; dropout as GPT-2 has it."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise HarmonyError("the demo needs transformers: pip install 'harmony_lab[demo]'") from None
    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=_LENGTH,
        n_embd=256,
        n_layer=8,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers' default, which it otherwise takes with a warning
    return cast(torch.nn.Module, model.train())


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, eps=_ADAM_EPSILON)


# -- the two runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    """The same steps in plain PyTorch: the model after them and the median step."""

    model: torch.nn.Module
    step_s: float


def _train(lab: Lab, batches: list[dict[str, torch.Tensor]], console: Console) -> Run:
    with bar(console, "train with the plan") as move:
        run = lab.launch(batches, len(batches))
        run.subscribe(lambda _: move(len(run.losses), run.steps, f"loss {run.losses[-1]:.3f}"))
        return run.wait()


def _train_plain(lab: Lab, batches: list[dict[str, torch.Tensor]], console: Console) -> _Plain:
    """From the same start, with the same microbatches and dropout masks, on as many threads as a device has."""
    model = _gpt2()
    optimizer = _adamw(model)
    assert lab.plan is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(lab.machine.devices[0].compute_threads)
    step_s = []
    try:
        with bar(console, "train in plain PyTorch") as move:
            for number, batch in enumerate(batches):
                begin = time.perf_counter()
                loss = _plain_step(model, optimizer, lab.layers, lab.plan, batch, number)
                step_s.append(time.perf_counter() - begin)
                move(number + 1, len(batches), f"loss {loss:.3f}")
    finally:
        torch.set_num_threads(threads)
    return _Plain(model=model, step_s=statistics.median(step_s))


def _plain_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    layers: LayerSequence,
    plan: Plan,
    batch: dict[str, torch.Tensor],
    number: int,
) -> float:
    optimizer.zero_grad()
    total = 0.0
    with plain_precision(plan.precision, model.parameters()) as computing:
        for position in range(plan.num_devices if plan.mode is Mode.DP else 1):
            for start, stop in microbatches(*plan.share(position), plan.backward_microbatch_size):
                part = {name: tensor[start:stop] for name, tensor in batch.items()}
                with computing(), reproducible_randomness(layers, step_seed(_SEED, number), (start, stop)):
                    loss = model(**part).loss * ((stop - start) / plan.minibatch_size)
                loss.backward()
                total += loss.item()
    optimizer.step()
    return total


def _outcome(lab: Lab, run: Run, plain: _Plain) -> Outcome:
    profile, result, chosen = lab.profile, lab.result, lab.chosen
    assert profile is not None
    assert result is not None
    assert chosen is not None
    activations = profile.activation_bytes(chosen.plan.backward_microbatch_size)
    predicted = run.predicted.swap_bytes
    trained = dict(lab.layers.model.named_parameters())
    return Outcome(
        state_bytes=profile.state_bytes,
        footprint_bytes=profile.state_bytes + activations,
        device_budget_bytes=list(lab.machine.budgets),
        plan=str(chosen.plan),
        initial_loss=run.losses[0],
        final_loss=run.losses[-1],
        max_abs_param_diff_vs_torch=max(
            (trained[name] - parameter).abs().max().item() for name, parameter in plain.model.named_parameters()
        ),
        predicted_step_s=run.predicted.makespan_s,
        measured_step_s=statistics.median(run.step_s),
        swap_bytes_predicted=predicted,
        swap_bytes_measured=max(run.swap_bytes, key=lambda measured: abs(measured - predicted)),
        peak_bytes_predicted=list(peak_bytes(chosen.program)),
        peak_bytes_measured=[max(peaks) for peaks in zip(*run.peak_bytes, strict=True)],
        lower_bound_step_s=result.lower_bound_s,
    )
