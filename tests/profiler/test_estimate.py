"""Estimated profiles: exact bytes and operations without data, seconds as the roofline has them."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import MLP, ConvNet, dropout_mlp, gpt2, gpt2_batch, llama, mlp_batch, sequential
from small_layers import build, layer, mlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, PlanDoesNotFitError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.planner.search import search
from harmony_lab.presets import GPU, gpu
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.estimate import estimate
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.roofline import OpCounter, Rates

CARD = GPU(
    name="test card",
    memory_bytes=2**30,
    fp32_flops=1e12,
    fp16_flops=4e12,
    bf16_flops=2e12,
    tf32_flops=3e12,
    bytes_per_s=1e11,
    pcie_generation=3,
    peer_copies=True,
    launch_s=1e-6,
    source="made up",
)

MODELS: dict[str, Callable[[], LayerSequence]] = {
    "gpt2": lambda: decompose(gpt2(), gpt2_batch(4)),
    "gpt2 without dropout": lambda: decompose(gpt2(dropout=0.0), gpt2_batch(4)),
    "llama": lambda: decompose(llama(), gpt2_batch(4)),
    "batch norm": lambda: decompose(MLP(), mlp_batch(4), nn.CrossEntropyLoss()),
    "convolutions": lambda: decompose(
        ConvNet(), {"images": torch.randn(4, 1, 8, 8), "labels": torch.zeros(4, dtype=torch.long)}
    ),
    "dropout": lambda: decompose(dropout_mlp(), mlp_batch(4, features=16), nn.CrossEntropyLoss()),
    "modules": lambda: _of_modules(sequential()),
}


def _of_modules(model: nn.Sequential) -> LayerSequence:
    return decompose(model, mlp_batch(4), nn.CrossEntropyLoss(), layers=list(model))


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_that_are_measured(name: str) -> None:
    layers = MODELS[name]()
    optimizer = torch.optim.AdamW([layers.tensors[name] for name in layers.state], lr=1e-3)
    sizes = [2, 3]
    measured = profile(
        layers, Machine.emulated(1, memory="1GiB"), optimizer, microbatch_sizes=sizes, trials=1, cache=False
    )
    estimated = estimate(layers, "4090", optimizer, microbatch_sizes=sizes)
    for one, other in zip(measured.layers, estimated.layers, strict=True):
        assert [cost[3:7] for cost in one.costs] == [cost[3:7] for cost in other.costs], one.name
        same = {"update_s": 0.0, "update_spread": None, "costs": (), "update_workspace_bytes": None}
        assert replace(one, **same) == replace(other, **same)
    assert measured.boundaries == estimated.boundaries
    assert all(seconds > 0 for item in estimated.layers for cost in item.costs for seconds in cost[:2])


def test_nothing_is_computed_and_nothing_changes() -> None:
    layers = mlp()
    before = {name: tensor.detach().clone() for name, tensor in layers.tensors.items()}
    random_state = torch.get_rng_state()
    estimate(layers, "4090")
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in before.items():
        assert torch.equal(layers.tensors[name], tensor)
        assert layers.tensors[name].grad is None


def test_a_model_without_data_is_estimated_as_one_with() -> None:
    with torch.device("meta"):
        meta = gpt2()
        batch = {name: torch.empty(4, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(meta.parameters())
    real = gpt2()
    estimated = estimate(decompose(meta, batch), "a100", optimizer)
    assert estimated == estimate(decompose(real, gpt2_batch(4)), "a100", torch.optim.AdamW(real.parameters()))
    assert search(estimated, Machine.preset("2xa100"), 8).best.minibatch_size == 8


def test_a_layer_that_looks_at_its_data_is_refused_by_name() -> None:
    def looks(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        scale = float(batch[0].sum().item())
        return ((parameters[0] * batch[0]).sum() * scale,)

    layers = build(
        [layer("curious", looks, parameters=("a",), batch_inputs=("x",), outputs=("loss",))],
        {"a": torch.ones(3, requires_grad=True)},
        {"x": torch.ones(2, 3)},
    )
    with pytest.raises(HarmonyError, match=r"layer curious cannot be estimated: what aten\._local_scalar_dense"):
        estimate(layers, "4090")


# -- seconds ------------------------------------------------------------------------------------------------------


def linear(width: int = 256, dtype: torch.dtype = torch.float32, **tensors: Any) -> LayerSequence:
    def product(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        return ((*inputs, *batch)[0] @ parameters[0],)

    def mean(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        return (inputs[0].mean(),)

    weights = {name: torch.zeros(width, width, dtype=dtype, requires_grad=True) for name in "ab"}
    return build(
        [
            layer("first", product, kind=0, parameters=("a",), batch_inputs=("x",), outputs=("v",)),
            layer("second", product, kind=1, parameters=("b",), inputs=("v",), outputs=("w",)),
            layer("mean", mean, kind=2, inputs=("w",), outputs=("loss",)),
        ],
        {**weights, **tensors},
        {"x": torch.zeros(64, width, dtype=dtype)},
    )


@pytest.mark.parametrize(("dtype", "peak"), [(torch.float32, 1e12), (torch.float16, 4e12), (torch.bfloat16, 2e12)])
def test_what_arithmetic_bounds_takes_its_operations_at_the_peak_rate(dtype: torch.dtype, peak: float) -> None:
    card = replace(CARD, bytes_per_s=1e18)
    size, width, efficiency = 64, 256, 0.5
    cost = estimate(linear(width, dtype), card, microbatch_sizes=[size], efficiency=efficiency).cost(1, size)
    flops = 2 * size * width * width
    assert cost.forward_s == pytest.approx(flops / peak / efficiency + 1e-6)
    assert cost.recompute_s == pytest.approx(flops / peak / efficiency + 1e-6)
    # The gradients of input and weight, and the addition to the gradient that is there.
    assert cost.backward_s == pytest.approx(2 * flops / peak / efficiency + 3e-6)


def test_what_memory_bounds_takes_its_bytes_at_the_memorys_rate() -> None:
    size, width = 4, 256
    card = replace(CARD, fp32_flops=1e18)
    cost = estimate(linear(width), card, microbatch_sizes=[size], efficiency=0.5).cost(1, size)
    value, weight = size * width * 4, width * width * 4
    assert cost.forward_s == pytest.approx((2 * value + weight) / 1e11 / 0.5 + 1e-6)
    backward = 2 * (2 * value + weight) + 3 * weight  # two products; gradient += new gradient
    assert cost.backward_s == pytest.approx(backward / 1e11 / 0.5 + 3e-6)


def work_of(function: Callable[[], Any]) -> Any:
    with FakeTensorMode(), OpCounter(Rates(lambda dtype, convolution: 1e12, 1e12)) as counter:
        function()
    return counter.take()


def test_views_cost_nothing_and_broadcasts_are_read_once() -> None:
    def views() -> None:
        x = torch.empty(4, 6)
        x.view(24).reshape(2, 12).t().unsqueeze(0).expand(3, 12, 2).detach()

    assert work_of(views).num_ops == 0
    added = work_of(lambda: torch.empty(1, 6).expand(1000, 6) + torch.empty(1000, 6))
    assert (added.num_ops, added.num_bytes) == (1, 4 * (6 + 6000 + 6000))


def test_in_place_and_lookups_count_what_they_touch() -> None:
    assert work_of(lambda: torch.empty(10).add_(torch.empty(10))).num_bytes == 4 * 30
    assert work_of(lambda: torch.empty(10).copy_(torch.empty(10))).num_bytes == 4 * 20
    assert work_of(lambda: torch.empty(10).zero_()).num_bytes == 4 * 10
    looked_up = work_of(lambda: nn.functional.embedding(torch.empty(5, dtype=torch.long), torch.empty(50_000, 8)))
    assert looked_up.num_bytes == 5 * 8 + 2 * 4 * 5 * 8


def test_attention_counts_only_what_a_causal_mask_leaves() -> None:
    def attention(causal: bool) -> None:
        q = torch.empty(2, 3, 64, 16, requires_grad=True)
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()

    product = 2 * 2 * 3 * 64 * 64 * 16
    assert work_of(lambda: attention(False)).flops == 7 * product  # two forward; four and a recomputed one backward
    assert work_of(lambda: attention(True)).flops == 7 * product // 2


def test_convolutions_in_fp32_use_tf32_where_torch_allows_it() -> None:
    layers = MODELS["convolutions"]()
    fast = replace(CARD, tf32_flops=1e15, launch_s=0.0)
    slow = replace(fast, tf32_flops=1e9)
    size = [4]
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        assert estimate(layers, slow, microbatch_sizes=size).cost(0, 4) > estimate(
            layers, fast, microbatch_sizes=size
        ).cost(0, 4)
        torch.backends.cudnn.allow_tf32 = False
        assert estimate(layers, slow, microbatch_sizes=size) == estimate(layers, fast, microbatch_sizes=size)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_updates_take_the_bytes_that_the_optimizer_touches() -> None:
    layers = linear(1024)
    optimizer = torch.optim.SGD([layers.tensors[name] for name in "ab"], lr=0.1)
    estimated = estimate(layers, CARD, optimizer, microbatch_sizes=[1], host_bandwidth="10GB/s")
    touched = 3 * 1024 * 1024 * 4  # parameter -= rate × gradient: both read, one written
    assert estimated.layers[0].update_s == pytest.approx(touched / 10e9)
    assert estimated.layers[0].update_spread is None
    momentum = torch.optim.SGD([layers.tensors[name] for name in "ab"], lr=0.1, momentum=0.9)
    assert estimate(layers, CARD, momentum, microbatch_sizes=[1]).layers[0].update_s > 0


# -- efficiency ---------------------------------------------------------------------------------------------------


def of_layer(measured: Profile, index: int) -> Profile:
    """A profile of one layer alone."""
    return replace(
        measured, layers=measured.layers[index : index + 1], boundaries=measured.boundaries[index : index + 2]
    )


def test_the_efficiency_follows_from_one_measured_layer() -> None:
    layers = linear()
    real = estimate(layers, CARD, microbatch_sizes=[16, 64], efficiency=0.37)
    found = estimate(layers, CARD, microbatch_sizes=[1, 32], calibrate=of_layer(real, 1))
    expected = estimate(layers, CARD, microbatch_sizes=[1, 32], efficiency=0.37)
    assert found.device == expected.device == "test card, estimated at 37% of its peak rates"
    for one, other in zip(found.layers, expected.layers, strict=True):
        for cost, wanted in zip(one.costs, other.costs, strict=True):
            assert cost[:7] == pytest.approx(wanted[:7])


def test_layers_too_small_to_calibrate_with_are_refused() -> None:
    layers = linear(8)
    with pytest.raises(HarmonyError, match="too small to tell the efficiency"):
        estimate(layers, CARD, calibrate=estimate(layers, CARD, microbatch_sizes=[1]))


def test_a_profile_of_other_layers_calibrates_nothing() -> None:
    with pytest.raises(HarmonyError, match="none of the 4 layers"):
        estimate(linear(), CARD, calibrate=estimate(mlp(), CARD, microbatch_sizes=[1]))


def test_two_blocks_measured_elsewhere_calibrate_a_deep_model() -> None:
    block = decompose(gpt2(layers=2), gpt2_batch(4))
    measured = replace(profile(block, Machine.emulated(1, memory="4GiB"), trials=1, cache=False), device=CARD.name)
    slow = replace(CARD, launch_s=0.0)
    deep = estimate(decompose(gpt2(layers=3), gpt2_batch(4)), slow, calibrate=measured)
    same = [*deep.layers[:3], deep.layers[-1]]
    ours = sum(sum(layer.costs[-1][:3]) for layer in same)
    assert ours == pytest.approx(sum(sum(layer.costs[-1][:3]) for layer in measured.layers), rel=0.05)


def test_layers_of_another_width_calibrate_nothing() -> None:
    with pytest.raises(HarmonyError, match="the name, the parameters and the inputs"):
        estimate(linear(), CARD, calibrate=estimate(linear(16), CARD, microbatch_sizes=[1]))


def test_emulated_devices_calibrate_no_gpu() -> None:
    layers = linear()
    measured = profile(layers, Machine.emulated(1, memory="4GiB"), microbatch_sizes=[1], trials=1, cache=False)
    with pytest.raises(HarmonyError, match="emulated device"):
        estimate(layers, CARD, calibrate=measured)


@pytest.mark.parametrize("efficiency", [0.0, -1.0, float("nan")])
def test_an_impossible_efficiency_is_refused(efficiency: float) -> None:
    with pytest.raises(HarmonyError, match="efficiency is the share"):
        estimate(linear(), CARD, efficiency=efficiency)
    with pytest.raises(HarmonyError, match="not both"):
        estimate(linear(), CARD, efficiency=0.5, calibrate=estimate(linear(), CARD))


# -- devices ------------------------------------------------------------------------------------------------------


def test_a_machine_of_preset_gpus_is_as_good_as_their_name() -> None:
    layers = linear()
    assert estimate(layers, Machine.preset("4x4090")) == estimate(layers, gpu("4090")) == estimate(layers, "RTX 4090")


def test_a_machine_of_no_known_gpu_is_refused() -> None:
    with pytest.raises(HarmonyError, match="GPUs of one known model; 1 emulated has none"):
        estimate(linear(), Machine.emulated(1))


def test_sizes_reach_the_largest_that_fits() -> None:
    layers = linear()
    card = replace(CARD, memory_bytes=2**30)
    estimated = estimate(layers, card, minibatch_size=10**6)
    largest = estimated.largest_microbatch
    assert len(estimated.microbatch_sizes) <= 6
    assert estimate(layers, card, microbatch_sizes=[largest]).largest_microbatch == largest
    with pytest.raises(PlanDoesNotFitError, match="does not fit into test card"):
        estimate(layers, card, microbatch_sizes=[largest + max(1, largest // 1000)])


def test_a_device_that_is_not_here_is_measured_by_nobody() -> None:
    with pytest.raises(HarmonyError, match=r"use harmony_lab\.estimate"):
        profile(linear(), Machine.preset("64x4090"))


# VmHWM, since ru_maxrss survives exec and would count this process too.
LLAMA_7B = """
import re, torch
from transformers import LlamaConfig, LlamaForCausalLM
import harmony_lab as hl
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(hidden_size=4096, num_hidden_layers=32, intermediate_size=11008)).train()
    batch = {name: torch.empty(2, 1024, dtype=torch.long) for name in ("input_ids", "labels")}
layers = hl.decompose(model, batch)
profile = hl.estimate(layers, "4090", torch.optim.AdamW(model.parameters()), minibatch_size=8)
peak_kib = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)
print(len(profile), profile.state_bytes, int(peak_kib) * 1024)
"""


def test_a_seven_billion_parameter_model_needs_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LLAMA_7B], capture_output=True, text=True, check=True)
    num_layers, state_bytes, resident_bytes = map(int, done.stdout.split())
    assert num_layers == 34
    assert state_bytes > 6.7e9 * 16  # weights, gradients, two moments
    assert resident_bytes < 1.5 * 2**30
