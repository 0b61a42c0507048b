"""Training equals plain PyTorch in every pair of circumstances: a table in which each two values meet in some row."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise, product
from typing import Any

import models
import pytest
import torch
from torch import nn

from harmony_lab.costs import Profile
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.plan import Plan, microbatches
from harmony_lab.planner.compose import updatable
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.precision import plain_precision
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.runtime.runner import step_seed
from harmony_lab.trainer import Trainer

STEPS = 5
LIMIT = 0.3  # of the norm: below that of most steps
# Of weights that are shared, dropout and batch norm, every two with and without each other.
MODELS = ("tied gpt2 with dropout", "batch norm and dropout", "tied batch norm", "plain")
CIRCUMSTANCES: dict[str, Sequence[Any]] = {
    "model": MODELS,
    "mode": ("pp", "dp"),
    "devices": (1, 2, 3),
    "optimizer": ("AdamW", "fused AdamW", "SGD", "RMSprop", "Adafactor", "of the user's own"),
    "frozen": (False, True),
    "clipped": (False, True),
    "minibatches": (1, 2),
    "sizes": ((2, 2), (4, 3)),
    "prefetch": (0, 1, 2),
    "update": ("jit", "end"),
    "peer": ("on", "off"),
    "precision": ("fp32", "bf16"),
    "stays": ("nothing", "weights", "saved activations", "stash"),
}


class Soft(torch.optim.Optimizer):
    """Momentum, bounded by a tanh: as a third-party optimizer is written."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.sub_(torch.tanh(momentum * 100), alpha=group["lr"])


# What they add to the square root of a second moment is far above the rounding of a gradient that is zero.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-2, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3, eps=(1e-6, 1e-3)),
    "of the user's own": lambda p: Soft(p),
}


def table() -> list[dict[str, Any]]:
    """Rows in which every two values of different circumstances meet, greedily few."""
    names = list(CIRCUMSTANCES)
    left = {((a, x), (b, y)) for a, b in combinations(names, 2) for x, y in product(CIRCUMSTANCES[a], CIRCUMSTANCES[b])}
    rng, rows = random.Random(0), []
    while left:
        tries = [{name: rng.choice(values) for name, values in CIRCUMSTANCES.items()} for _ in range(300)]
        best = max(tries, key=lambda row: len(_pairs(row) & left))
        left -= _pairs(best)
        rows.append(best)
    return rows


def on_devices() -> Iterator[dict[str, Any]]:
    """Rows in which devices update: each optimizer in each mode, with any of what else there is."""
    others = ("model", "devices", "frozen", "sizes", "prefetch", "stays")
    rng = random.Random(1)
    for optimizer, mode in product(OPTIMIZERS, ("pp", "dp")):
        chosen = {name: rng.choice(CIRCUMSTANCES[name]) for name in others}
        fixed = {"clipped": False, "minibatches": 1, "update": "jit", "peer": "on", "precision": "fp32"}
        yield {"mode": mode, "optimizer": optimizer, **chosen, **fixed, "updated on": "devices"}


def _pairs(row: Mapping[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(row.items(), 2))


@cache
def subject(name: str, frozen: bool, precision: str) -> tuple[nn.Module, LayerSequence, Profile]:
    if name == "tied gpt2 with dropout":
        model: nn.Module = models.gpt2(layers=2)
        chosen = model.transformer.h[0].parameters()  # type: ignore[union-attr,index]
    else:
        model = blocks(tied="tied" in name, normed="batch norm" in name, drops="dropout" in name)
        chosen = model[1].parameters()
    if frozen:
        for parameter in chosen:
            parameter.requires_grad_(False)
    layers = decompose(model, batch_of(name, 2), None if "gpt2" in name else nn.MSELoss())
    sizes = (2, 3, 4) if layers.couples_samples else (1, 2, 4)
    costs = profile(
        layers,
        Machine.emulated(1),
        torch.optim.AdamW(trained(model)),
        precision=precision,
        microbatch_sizes=sizes,
        trials=1,
    )
    return model, layers, costs


def blocks(*, tied: bool, normed: bool, drops: bool) -> nn.Sequential:
    """Batch norm in every other block, after a Linear without a bias, whose gradient would be nothing but rounding."""
    torch.manual_seed(0)
    made = []
    for number in range(5):
        norm = normed and number % 2 == 1
        parts = [nn.Linear(8, 8, bias=not norm), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh()]
        made.append(nn.Sequential(*parts, *([nn.Dropout(0.5)] if drops else [])))
    if tied:
        made[-1][0].weight = made[0][0].weight
    return nn.Sequential(*made)


def batch_of(name: str, count: int, seed: int = 1) -> Any:
    if "gpt2" in name:
        return models.gpt2_batch(count, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 8, generator=generator), torch.randn(count, 8, generator=generator)


def loss_of(name: str, model: nn.Module, batch: Any) -> torch.Tensor:
    if "gpt2" in name:
        loss: torch.Tensor = model(**batch, use_cache=False).loss
        return loss
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def to_the_bit(row: Mapping[str, Any], plan: Plan) -> bool:
    """Whether all that is added up is added up in plain PyTorch's order, from microbatches of one size."""
    in_order = row["mode"] == "pp" or row["devices"] == 1
    alike = plan.forward_microbatch_size == plan.backward_microbatch_size
    alone = "tied" not in row["model"] and row["minibatches"] == 1
    return in_order and alike and alone and row["precision"] == "fp32"


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def plan_of(row: Mapping[str, Any], num_layers: int) -> Plan:
    """Batch norm has no statistics of one sample, and needs the forward's microbatches again."""
    edges = sorted({0, *range(1, num_layers, 2), num_layers})
    backward = ",".join(f"{a}:{b}" for a, b in pairwise(edges))
    forward = ",".join(f"{a}:{b}" for a, b in pairwise(edges[:-1]))
    normed = "batch norm" in row["model"]
    alike = normed or row["stays"] in ("saved activations", "stash")
    first, second = (row["sizes"][0],) * 2 if alike else row["sizes"]
    # The last pack takes its values itself, in pp on another device than the pack that made them.
    inner = edges[1:-2] if row["mode"] == "pp" and row["devices"] > 1 else edges[1:-1]
    stays = {
        "nothing": "",
        "weights": f" resident={forward}",
        "saved activations": f" resident={forward} kept={forward}",
        "stash": f" stash={','.join(map(str, inner))}",
    }[row["stays"]]
    if row["mode"] == "pp" and stays:
        stays += " mirrored=on"
    return Plan.parse(
        f"{row['mode']} minibatch={12 if normed else 7} forward={first}[{forward}] backward={second}[{backward}] "
        f"devices={','.join(map(str, range(row['devices'])))} prefetch={row['prefetch']} peer={row['peer']} "
        f"update={row['update']} precision={row['precision']}{stays}"
    )


def parts(row: Mapping[str, Any], plan: Plan, batches: Sequence[Any]) -> Iterator[tuple[tuple[int, int], Any]]:
    """The microbatches that plain PyTorch accumulates over, with their samples in all the minibatches."""
    shares = [plan.share(position) for position in range(plan.num_devices if plan.mode == "dp" else 1)]
    for number, batch in enumerate(batches):
        offset = number * plan.minibatch_size
        for share in shares:
            for start, stop in microbatches(*share, plan.backward_microbatch_size):
                if isinstance(batch, dict):
                    part: Any = {name: value[start:stop] for name, value in batch.items()}
                else:
                    part = tuple(value[start:stop] for value in batch)
                yield (offset + start, offset + stop), part


def shown(row: Mapping[str, Any]) -> str:
    return " ".join(str(value).replace(" ", "_") for value in row.values())


@pytest.mark.parametrize("row", [*table(), *on_devices()], ids=shown)
def test_training_equals_plain_pytorch(row: dict[str, Any]) -> None:
    name = row["model"]
    model, layers, costs = subject(name, row["frozen"], row["precision"])
    start = copy.deepcopy(model.state_dict())
    plain, plan = copy.deepcopy(model), plan_of(row, len(layers))
    if row.get("updated on") == "devices":  # all packs that can be
        plan = plan.with_(device_updates=updatable(plan, costs))
    ours, theirs = (OPTIMIZERS[row["optimizer"]](trained(module)) for module in (model, plain))
    limit = LIMIT if row["clipped"] else None
    machine = Machine.emulated(row["devices"], memory="64MiB", link="1e12")
    try:
        with Trainer(layers, ours, plan, machine, profile=costs, max_grad_norm=limit) as trainer:
            for step in range(STEPS):
                count = row["minibatches"]
                batches = [batch_of(name, plan.minibatch_size, seed=step * count + k) for k in range(count)]
                theirs.zero_grad()
                total = 0.0
                with plain_precision(plan.precision, plain.parameters()) as computing:
                    for samples, part in parts(row, plan, batches):
                        share = (samples[1] - samples[0]) / (plan.minibatch_size * count)
                        with computing(), reproducible_randomness(layers, step_seed(0, step), samples):
                            loss = loss_of(name, plain, part) * share
                        loss.backward()
                        total += loss.item()
                if limit is not None:
                    norm = nn.utils.clip_grad_norm_(trained(plain), limit).item()
                theirs.step()
                assert trainer.accumulate(batches) == pytest.approx(total, rel=1e-5)
                assert limit is None or trainer.last_norm == pytest.approx(norm, rel=1e-4)
        rtol, atol = (0, 0) if to_the_bit(row, plan) else (1e-4, 5e-6)
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=rtol, atol=atol)
        torch.testing.assert_close(
            ours.state_dict()["state"], theirs.state_dict()["state"], rtol=10 * rtol, atol=2 * atol
        )
    finally:
        model.load_state_dict(start)


def test_the_table_has_every_pair_and_rows_that_are_equal_to_the_bit() -> None:
    assert sum(to_the_bit(row, plan_of(row, 6)) for row in [*table(), *on_devices()]) >= 4
    met = set().union(*map(_pairs, table()))
    names = list(CIRCUMSTANCES)
    for a, b in combinations(names, 2):
        for x, y in product(CIRCUMSTANCES[a], CIRCUMSTANCES[b]):
            assert ((a, x), (b, y)) in met
