"""Measured profiles: bytes against shapes worked out by hand, and what profiling must leave as it was."""

import gc
import json
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_layers import build, layer, mlp, samples
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harmony_lab.costs import Profile
from harmony_lab.errors import HarmonyError, OutOfRangeError, PlanDoesNotFitError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.profiler.gauges import Target
from harmony_lab.profiler.measure import profile
from harmony_lab.profiler.steps import Steps
from harmony_lab.profiler.updates import UpdateCosts, spread_of
from harmony_lab.runtime.execution import run_backward, run_with_gradient

MACHINE = Machine.emulated(2, memory="8MiB")


def adamw(layers: LayerSequence) -> torch.optim.Optimizer:
    return torch.optim.AdamW([t for n, t in layers.tensors.items() if n in layers.state], lr=1e-3)


def parameters(layers: LayerSequence) -> list[Tensor]:
    return [layers.tensors[name] for name in layers.state]


def plain_linear(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
    return (nn.functional.linear((*inputs, *batch)[0], parameters[0]),)


def squares(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
    return ((inputs[0] ** 2).mean(),)


def two_linears(width: int = 16, num_samples: int = 4, **tensors: Any) -> LayerSequence:
    torch.manual_seed(0)
    given = {"a": torch.randn(width, width, requires_grad=True), "b": torch.randn(width, width, requires_grad=True)}
    return build(
        [
            layer("first", plain_linear, kind=0, parameters=("a",), batch_inputs=("x",), outputs=("v",)),
            layer("second", plain_linear, kind=1, parameters=("b",), inputs=("v",), outputs=("w",)),
            layer("loss", squares, kind=2, inputs=("w",), outputs=("loss",)),
        ],
        {**given, **tensors},
        {"x": torch.randn(num_samples, width)},
    )


def test_bytes_of_a_linear_layer_are_those_of_its_shapes() -> None:
    measured = profile(two_linears(), MACHINE, microbatch_sizes=[1, 4], trials=1)
    for size in (1, 4):
        value, weight = size * 16 * 4, 16 * 16 * 4
        cost = measured.cost(1, size)
        assert cost.forward_peak_bytes == value
        assert cost.saved_bytes == value  # the output; the input and the weight are there anyway
        assert cost.recompute_peak_bytes == value
        # Output, its gradient, the input's gradient and the weight's, before that is added to the preset one.
        assert cost.backward_peak_bytes == 3 * value + weight
        first = measured.cost(0, size)
        assert first.backward_peak_bytes == 2 * value + weight  # the batch gets no gradient


@pytest.mark.parametrize("depth", [2, 5])
def test_bytes_of_single_layers_add_up_to_those_of_a_pack(depth: int) -> None:
    layers = mlp(depth=depth, width=32)
    size, count = 4, depth + 1
    measured = profile(layers, MACHINE, microbatch_sizes=[size], trials=1)
    costs = [measured.cost(index, size) for index in range(count)]
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in layers.tensors.items()}
    for tensor in state.values():
        tensor.grad = torch.zeros_like(tensor)
    batch, call = samples(layers.example_batch, 0, size)
    gauge = Target.of(MACHINE.devices[0]).gauge()
    with gauge:
        _, saved = run_with_gradient(layers, 0, count, state, {}, {}, batch, call, [])
        assert gauge.alive_bytes == sum(cost.saved_bytes for cost in costs)
        gauge.restart_peak()
        run_backward(layers, 0, count, saved, {}, seed_gradient=1.0)
        below = [sum(cost.saved_bytes for cost in costs[:index]) for index in range(count)]
        assert gauge.peak_bytes == max(
            before + cost.backward_peak_bytes for before, cost in zip(below, costs, strict=True)
        )


def test_state_is_counted_as_laid_out_in_a_block() -> None:
    layers = mlp(depth=2, width=6)
    measured = profile(layers, MACHINE, adamw(layers), microbatch_sizes=[1], trials=1)
    first = measured.layers[0]
    weight, bias = 6 * 6 * 4, 6 * 4
    assert first.parameter_bytes == first.gradient_bytes == 192 + 64  # 144 and 24, padded to multiples of 64
    assert first.optimizer_state_bytes == 2 * (weight + bias) + 2 * 4  # two moments each, and a step
    assert first.update_s > 0
    assert measured.layers[-1].parameter_bytes == 0
    assert measured.layers[-1].optimizer_state_bytes == 0
    assert measured.layers[-1].update_s == 0


def test_without_an_optimizer_updates_cost_nothing() -> None:
    measured = profile(mlp(), MACHINE, microbatch_sizes=[1], trials=1)
    assert {(item.optimizer_state_bytes, item.update_s) for item in measured.layers} == {(0, 0.0)}


def test_frozen_layers_cost_no_gradient_and_no_update() -> None:
    layers = two_linears(a=torch.randn(16, 16))
    measured = profile(layers, MACHINE, torch.optim.SGD([layers.tensors["b"]], lr=0.1), microbatch_sizes=[2], trials=1)
    first, second, _ = measured.layers
    assert (first.gradient_bytes, first.optimizer_state_bytes, first.update_s) == (0, 0, 0.0)
    assert first.parameter_bytes == second.gradient_bytes == 1024
    # Nothing before it is trained: no gradient of its input.
    assert measured.cost(1, 2).backward_peak_bytes == 2 * (2 * 16 * 4) + 1024


def test_layers_of_one_kind_that_train_different_parts_are_told_apart() -> None:
    def with_kind(kind: int) -> LayerSequence:
        torch.manual_seed(0)
        return build(
            [
                layer("0", plain_linear, kind=0, parameters=("a",), batch_inputs=("x",), outputs=("v0",)),
                layer("1", plain_linear, kind=kind, parameters=("b",), inputs=("v0",), outputs=("v1",)),
                layer("2", plain_linear, kind=kind, parameters=("c",), inputs=("v1",), outputs=("v2",)),
                layer("loss", squares, kind=2, inputs=("v2",), outputs=("loss",)),
            ],
            {n: torch.randn(8, 8).requires_grad_(n != "c") for n in "abc"},
            {"x": torch.randn(4, 8)},
        )

    measured = profile(with_kind(1), MACHINE, microbatch_sizes=[2], trials=1)
    value = 2 * 8 * 4
    assert measured.layers[1].kind != measured.layers[2].kind
    assert measured.cost(1, 2).backward_peak_bytes == 3 * value + 256
    assert measured.cost(2, 2).backward_peak_bytes == 3 * value


def test_a_shared_parameter_is_updated_with_its_first_layer() -> None:
    torch.manual_seed(0)
    tied = torch.randn(16, 16, requires_grad=True)
    layers = build(
        [
            layer("embed", plain_linear, kind=0, parameters=("tied",), batch_inputs=("x",), outputs=("v",)),
            layer("head", plain_linear, kind=1, parameters=("tied",), inputs=("v",), outputs=("w",)),
            layer("loss", squares, kind=2, inputs=("w",), outputs=("loss",)),
        ],
        {"tied": tied},
        {"x": torch.randn(4, 16)},
    )
    measured = profile(layers, MACHINE, torch.optim.Adam([tied]), microbatch_sizes=[1], trials=1)
    assert measured.layers[0].optimizer_state_bytes == 2 * 1024 + 4
    assert measured.layers[1].optimizer_state_bytes == 0
    assert measured.weight_bytes(0, 3) == 1024
    assert measured.gradient_bytes(0, 3) == 1024
    (shared,) = measured.shared
    assert (shared.name, shared.layers, shared.num_bytes, shared.gradient_bytes) == ("tied", (0, 1), 1024, 1024)


def counting(layers: LayerSequence, calls: Counter[str]) -> LayerSequence:
    """The same layers, counting how often each one's function runs."""

    def counted(item: Any) -> Any:
        def function(*args: Any) -> Any:
            calls[item.name] += 1
            return item.function(*args)

        return replace(item, function=function)

    return replace(layers, layers=tuple(counted(item) for item in layers.layers))


def test_layers_of_one_kind_are_measured_once() -> None:
    calls: Counter[str] = Counter()
    measured = profile(counting(mlp(depth=12), calls), MACHINE, microbatch_sizes=[1, 2], trials=2)
    assert set(calls) == {"0", "1", "loss"}
    assert calls["1"] == 2 * (2 + 2 * 2)  # per size: to weigh once, to time twice; each with and without gradient
    assert len({item.costs for item in measured.layers[1:12]}) == 1
    assert len(measured) == 13


def test_the_users_state_stays_as_it_was() -> None:
    def noisy_norm(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        value = torch.batch_norm(batch[0], parameters[0], None, *buffers, True, 0.1, 1e-5, False)
        return (value + torch.rand_like(value),)

    torch.manual_seed(0)
    tensors = {
        "scale": torch.randn(8, requires_grad=True),
        "frozen": torch.randn(8, 8),
        "mean": torch.zeros(8),
        "variance": torch.ones(8),
    }
    names = ("mean", "variance")
    layers = build(
        [
            layer(
                "norm",
                noisy_norm,
                parameters=("scale",),
                buffers=names,
                updated_buffers=names,
                batch_inputs=("x",),
                outputs=("v",),
            ),
            layer("b", plain_linear, kind=1, parameters=("frozen",), inputs=("v",), outputs=("w",)),
            layer("loss", squares, kind=2, inputs=("w",), outputs=("loss",)),
        ],
        tensors,
        {"x": torch.randn(4, 8)},
        buffer_decay={"mean": 0.9, "variance": None},
        couples_samples=("norm",),
    )
    tensors["scale"].grad = torch.full((8,), 3.0)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    optimizer = torch.optim.AdamW([tensors["scale"]])
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    measured = profile(layers, MACHINE, optimizer, trials=1)
    for name, tensor in before.items():
        assert torch.equal(tensors[name], tensor), name
        assert layers.tensors[name] is tensors[name]
    assert tensors["scale"].requires_grad
    assert torch.equal(tensors["scale"].grad, torch.full((8,), 3.0))
    assert tensors["frozen"].grad is None
    assert not tensors["frozen"].requires_grad
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads
    assert measured.layers[0].updated_buffer_bytes == measured.layers[0].buffer_bytes == 128
    assert measured.serial_buffers == ("variance",)
    assert measured.couples_samples == ("norm",)


def test_default_sizes_reach_the_minibatch_and_are_six_at_most() -> None:
    def sizes(**given: Any) -> tuple[int, ...]:
        return profile(mlp(), MACHINE, trials=1, **given).microbatch_sizes

    assert sizes() == (1, 2, 4, 6)  # the example batch has 6 samples
    assert sizes(minibatch_size=1) == (1,)
    assert sizes(minibatch_size=32) == (1, 2, 4, 8, 16, 32)
    many = sizes(minibatch_size=200)
    assert (many[0], many[-1], len(many)) == (1, 200, 6)
    assert sizes(microbatch_sizes=[4, 2, 4]) == (2, 4)


@pytest.mark.parametrize(
    "given", [{"microbatch_sizes": []}, {"microbatch_sizes": [0, 1]}, {"minibatch_size": 0}, {"trials": 0}]
)
def test_impossible_sizes_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(HarmonyError, match=f"{next(iter(given))} must be"):
        profile(mlp(), MACHINE, **given)


def test_sizes_between_are_interpolated_and_beyond_refused() -> None:
    measured = profile(two_linears(), MACHINE, microbatch_sizes=[2, 6], trials=1)
    low, middle, high = (measured.cost(1, size) for size in (2, 4, 6))
    assert middle.saved_bytes == 4 * 16 * 4
    assert middle.forward_s == pytest.approx((low.forward_s + high.forward_s) / 2)
    for size in (1, 7):
        with pytest.raises(OutOfRangeError, match=f"{size} was asked for"):
            measured.cost(1, size)


def test_sizes_end_where_a_layer_no_longer_fits() -> None:
    # The second layer needs its weights, gradients and a new gradient, 1 KiB each, its input and three values more.
    machine = Machine.emulated(1, memory=3 * 1024 + 4 * 64 * 11)
    assert profile(two_linears(), machine, minibatch_size=32, trials=1).microbatch_sizes == (1, 2, 4, 8, 11)
    given = profile(two_linears(), machine, microbatch_sizes=[1, 8, 16], trials=1)
    assert given.microbatch_sizes == (1, 8)


def test_a_model_larger_than_the_device_is_profiled_in_place() -> None:
    layers = mlp(depth=40, width=64)
    machine = Machine.emulated(1, memory="128KiB")
    measured = profile(layers, machine, microbatch_sizes=[1], trials=1)
    assert measured.weight_bytes(0, 41) > 4 * machine.budgets[0]


def test_sizes_start_where_every_layer_runs() -> None:
    def norm(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        return (nn.functional.batch_norm(batch[0] * parameters[0], None, None, training=True),)

    layers = build(
        [
            layer("norm", norm, kind=0, parameters=("a",), batch_inputs=("x",), outputs=("v",)),
            layer("loss", squares, kind=1, inputs=("v",), outputs=("loss",)),
        ],
        {"a": torch.ones(8, requires_grad=True)},
        {"x": torch.randn(4, 8)},
        smallest=2,
    )
    assert profile(layers, MACHINE, trials=1).microbatch_sizes == (2, 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        profile(layers, MACHINE, microbatch_sizes=[1, 2], trials=1)


def test_a_layer_that_never_fits_is_named_with_its_bytes() -> None:
    machine = Machine.emulated(2, memory="3KiB")
    threads = torch.get_num_threads()
    with pytest.raises(
        PlanDoesNotFitError, match="layer first does not fit into emu0: with a microbatch of 1"
    ) as caught:
        profile(two_linears(), machine)
    assert caught.value.budget_bytes == 3 * 1024
    assert caught.value.needed_bytes == 2 * 1024 + 64 + 2 * 64 + 1024
    assert "gradients 1.00 KiB" in str(caught.value)
    assert torch.get_num_threads() == threads


def test_what_comes_from_the_batch_is_the_example_batch() -> None:
    def embed(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        assert batch[0].shape[0] == call.samples[1] == call.sizes["batch"]
        seen.extend(batch[0].flatten().tolist())
        return nn.functional.embedding(batch[0], parameters[0]), batch[0] > 3

    def masked(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        masks.append(inputs[1])
        return ((inputs[0] * inputs[1].unsqueeze(-1)).sum(),)

    seen: list[int] = []
    masks: list[Tensor] = []
    layers = build(
        [
            layer("embed", embed, kind=0, parameters=("table",), batch_inputs=("ids",), outputs=("v", "mask")),
            layer("loss", masked, kind=1, inputs=("v", "mask"), outputs=("loss",)),
        ],
        {"table": torch.randn(7, 4, requires_grad=True)},
        {"ids": torch.tensor([[1, 4], [5, 6], [2, 4]])},
    )
    seen.clear()
    masks.clear()
    profile(layers, MACHINE, microbatch_sizes=[5], trials=1)
    assert seen[:10] == [1, 4, 5, 6, 2, 4, 1, 4, 5, 6]
    assert all(mask.shape == (5, 2) and bool(mask.all()) for mask in masks)  # hides nothing


def test_parameters_without_data_are_measured_by_shape() -> None:
    layers = two_linears()
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in layers.tensors.items()}
    real = profile(layers, MACHINE, microbatch_sizes=[4], trials=1)
    bare = profile(replace(layers, tensors=meta), MACHINE, microbatch_sizes=[4], trials=1)
    for with_data, without in zip(real.layers, bare.layers, strict=True):
        assert with_data.costs[0][3:] == without.costs[0][3:]  # all but the seconds


def test_json_holds_all_of_a_measured_profile(tmp_path: Any) -> None:
    layers = mlp()
    measured = profile(layers, MACHINE, adamw(layers), trials=1)
    measured.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == measured
    assert json.loads((tmp_path / "profile.json").read_text())["fingerprint"] == "small"


def test_several_trials_tell_how_far_they_are_apart() -> None:
    layers = mlp()
    measured = profile(layers, MACHINE, adamw(layers), microbatch_sizes=[1, 4], trials=4)
    spreads = [cost.spread for item in measured.layers for cost in item.costs]
    assert all(spread is not None and spread >= 0 for spread in spreads)
    assert measured.cost(0, 2).spread == max(cost.spread for cost in measured.layers[0].costs)
    assert measured.layers[0].update_spread is not None
    assert measured.layers[-1].update_spread is None  # updates nothing


def test_a_disturbed_measurement_is_readable_and_says_what_to_do() -> None:
    layers = mlp()
    measured = profile(layers, MACHINE, adamw(layers), microbatch_sizes=[1, 4], trials=1)
    steady = tuple(replace(layer, update_spread=0.1) for layer in measured.layers)
    measured = replace(measured, layers=steady)
    assert measured.unsteady == ""
    first = replace(measured.layers[0], update_spread=100.63)
    disturbed = replace(measured, layers=(first, *measured.layers[1:]))
    assert f"1 of {len(measured)} layers" in disturbed.unsteady
    assert "measure(cache=False)" in disturbed._repr_html_()
    assert "<td>over 100%</td>" in disturbed._repr_html_()
    assert Profile.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    assert "<td>10%</td>" in measured._repr_html_()


def test_the_spread_is_half_the_range_over_the_median() -> None:
    assert spread_of([1.0, 2.0, 4.0]) == 0.75
    assert spread_of([1.0]) is None


def test_the_frame_has_a_row_per_layer_and_size() -> None:
    measured = profile(mlp(depth=3), MACHINE, microbatch_sizes=[1, 3], trials=1)
    frame = measured.to_frame()
    assert len(frame) == 4 * 2
    assert frame["name"].tolist()[::2] == ["0", "1", "2", "loss"]
    assert frame["spread"].isna().all()  # a single trial tells nothing
    assert (frame["forward_s"] > 0).all()
    assert measured.device == f"emulated cpu, {MACHINE.devices[0].compute_threads} thread" + (
        "s" if MACHINE.devices[0].compute_threads > 1 else ""
    )


def test_a_failing_layer_leaves_nothing_behind() -> None:
    def fail(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        if not broken:
            return ((inputs[0] ** 2).mean(),)
        raise RuntimeError("no such luck")

    broken: list[int] = []
    layers = build(
        [
            layer("a", plain_linear, kind=0, parameters=("a",), batch_inputs=("x",), outputs=("v",)),
            layer("loss", fail, kind=1, inputs=("v",), outputs=("loss",)),
        ],
        {"a": torch.randn(8, 8, requires_grad=True)},
        {"x": torch.randn(4, 8)},
    )
    broken.append(1)
    threads = torch.get_num_threads()
    gc.collect()
    tensors = sum(type(item) is Tensor for item in gc.get_objects())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no such luck"):
            profile(layers, MACHINE, trials=1)
    assert torch.get_num_threads() == threads
    gc.collect()
    assert sum(type(item) is Tensor for item in gc.get_objects()) <= tensors
    broken.clear()
    assert len(profile(layers, MACHINE, trials=1)) == 2


def alive_bytes() -> int:
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is Tensor
    }
    return sum(storages.values())


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_that_is_kept_keeps_no_tensors(kind: type[BaseException]) -> None:
    def fail(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        value = inputs[0] ** 2
        if broken:
            raise kind("in the middle")
        return (value.mean(),)

    broken: list[int] = []
    layers = build(
        [
            layer("a", plain_linear, kind=0, parameters=("a",), batch_inputs=("x",), outputs=("v",)),
            layer("loss", fail, kind=1, inputs=("v",), outputs=("loss",)),
        ],
        {"a": torch.randn(256, 256, requires_grad=True)},
        {"x": torch.randn(4, 256)},
    )
    broken.append(1)
    before = alive_bytes()
    kept = []
    for _ in range(5):
        with pytest.raises(kind) as caught:
            profile(layers, MACHINE, microbatch_sizes=[64], trials=1)
        kept.append(caught.value)
    assert kept[0].__traceback__ is not None
    assert alive_bytes() <= before


def test_what_the_progress_callback_raises_ends_profiling() -> None:
    def stop(done: int, total: int, what: str) -> None:
        seen.append(what)
        if len(seen) == 3:
            raise KeyboardInterrupt

    seen: list[str] = []
    layers = mlp(width=128)
    before, threads = alive_bytes(), torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt) as caught:
        profile(layers, MACHINE, trials=1, progress=stop)
    assert len(seen) == 3
    assert caught.value.__traceback__ is not None
    assert alive_bytes() <= before
    assert torch.get_num_threads() == threads


def test_progress_tells_the_layer_and_the_time_left() -> None:
    now = iter([0.0, 2.0, 3.0, 9.0])
    seen: list[tuple[int, int, str]] = []
    steps = Steps(lambda *step: seen.append(step), 4, 10.0, lambda: next(now))
    steps.begin("a", 1)
    steps.begin("b", 4)  # 1 of 10 took 2 s
    steps.begin("c", 4)  # 5 of 10 took 3 s
    steps.only(1, 2)
    steps.begin("d", 1)  # 9 took 9 s, 2 are left
    steps.end()
    assert seen == [
        (0, 4, "a"),
        (1, 4, "b; about 18.0 s left"),
        (2, 4, "c; about 3.00 s left"),
        (3, 4, "d; about 2.00 s left"),
        (4, 4, "profile"),
    ]


def test_progress_counts_up_to_its_total() -> None:
    seen: list[tuple[int, int, str]] = []
    layers = mlp()
    profile(layers, MACHINE, adamw(layers), microbatch_sizes=[1, 2], trials=1, progress=lambda *step: seen.append(step))
    totals = {total for _, total, _ in seen}
    assert totals == {seen[-1][0]}
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    assert any("loss" in what for _, _, what in seen)


@pytest.mark.parametrize(
    ("build_optimizer", "states_per_element"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.Adam([{"params": p, "amsgrad": True}]), 3),
        (lambda p: torch.optim.AdamW(p, fused=True), 2),
        (lambda p: torch.optim.RMSprop(p), 1),
        (lambda p: torch.optim.Adagrad(p), 1),
        (lambda p: torch.optim.Adafactor(p), 0),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
    ],
)
def test_state_bytes_are_those_of_the_users_optimizer(build_optimizer: Any, states_per_element: int) -> None:
    layers = two_linears()
    optimizer = build_optimizer(parameters(layers))
    measured = profile(layers, MACHINE, optimizer, microbatch_sizes=[1], trials=1)
    for tensor in parameters(layers):
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    real = {
        index: sum(t.numel() * t.element_size() for t in optimizer.state[tensor].values() if isinstance(t, Tensor))
        for index, tensor in enumerate(parameters(layers))
    }
    assert [item.optimizer_state_bytes for item in measured.layers] == [real[0], real[1], 0]
    assert real[0] // 1024 == states_per_element


def test_large_parameters_are_scaled_up_from_smaller_stand_ins() -> None:
    torch.manual_seed(0)
    layers = build(
        [
            layer("a", plain_linear, kind=0, parameters=("a",), batch_inputs=("x",), outputs=("v",)),
            layer("loss", squares, kind=1, inputs=("v",), outputs=("loss",)),
        ],
        {"a": torch.randn(3000, 2000, requires_grad=True)},
        {"x": torch.randn(2, 2000)},
    )
    machine = Machine.emulated(1, memory="256MiB")
    measured = profile(layers, machine, adamw(layers), microbatch_sizes=[1], trials=1)
    assert measured.layers[0].optimizer_state_bytes == pytest.approx(2 * 24_000_000 + 4, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "build_optimizer",
    [
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
)
@pytest.mark.parametrize("shape", [(5000, 1200), (6_000_000,), (300, 100, 200)])
def test_state_bytes_of_large_parameters_are_exact(
    shape: tuple[int, ...], build_optimizer: Any, dtype: torch.dtype
) -> None:
    """Larger than a stand-in: the state's bytes follow from how they grow, factored states included."""
    large = torch.zeros(shape, dtype=dtype, requires_grad=True)
    small = torch.zeros(7, dtype=dtype, requires_grad=True)
    layers = build(
        [
            layer("a", lambda p, *_: ((p[0].sum() + p[1].sum()),), kind=0, parameters=("a", "b"), outputs=("loss",)),
        ],
        {"a": large, "b": small},
        {"x": torch.randn(2, 3)},
    )
    optimizer = build_optimizer([large, small])
    costs = UpdateCosts(layers, optimizer, Untimed())
    asked = costs.of(costs.updated_by(0)).state_bytes
    for tensor in (large, small):
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    real = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    assert asked == real


class Untimed:
    largest_stand_in_bytes = 2**20

    def __call__(self, step: Any) -> tuple[float, float | None]:
        return 1.0, None


class PeakOfPlainRun(TorchDispatchMode):
    """Bytes of all storages that ops made and that are alive, after each op."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[Any, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        alive = sum(num_bytes for reference, num_bytes in self.storages.values() if reference() is not None)
        self.peak_bytes = max(self.peak_bytes, alive)
        return result


def test_the_peak_of_a_head_over_a_large_vocabulary_is_that_of_a_plain_run() -> None:
    vocabulary, width, tokens = 128_256, 48, 24
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, width, requires_grad=True)

    def head(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        logits = nn.functional.linear(inputs[0], parameters[0]).float()
        return (nn.functional.cross_entropy(logits.flatten(0, 1), batch[0].flatten()),)

    layers = build(
        [
            layer("a", plain_linear, kind=0, parameters=("a",), batch_inputs=("x",), outputs=("v",)),
            layer("head", head, kind=1, parameters=("w",), inputs=("v",), batch_inputs=("labels",), outputs=("loss",)),
        ],
        {"a": torch.randn(width, width, requires_grad=True), "w": weight},
        {"x": torch.randn(2, tokens, width), "labels": torch.randint(0, vocabulary, (2, tokens))},
    )
    machine = Machine.emulated(1, memory="1GiB")
    cost = profile(layers, machine, microbatch_sizes=[2], trials=1).cost(1, 2)
    hidden = torch.randn(2, tokens, width, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    with PeakOfPlainRun() as plain:
        head([weight], [], [hidden], [layers.example_batch["labels"]], None)[0].backward()
    predicted = max(cost.recompute_peak_bytes, cost.backward_peak_bytes)
    assert plain.peak_bytes <= predicted <= 1.05 * plain.peak_bytes
    assert predicted > 2 * tokens * vocabulary * 4  # more than the logits


class Stubborn(torch.optim.SGD):
    """Cannot be built from its defaults."""

    def __init__(self, params: Any, secret: int) -> None:
        assert secret == 42
        super().__init__(params, lr=0.1)


def test_an_optimizer_that_cannot_be_rebuilt_is_refused_by_name() -> None:
    layers = mlp()
    with pytest.raises(HarmonyError, match="Stubborn"):
        profile(layers, MACHINE, Stubborn(parameters(layers), 42), microbatch_sizes=[1], trials=1)


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    layers = mlp()
    with pytest.raises(HarmonyError, match="LBFGS"):
        profile(layers, MACHINE, torch.optim.LBFGS(parameters(layers)))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True, "maximize": True}])
def test_temporaries_of_updates_are_those_of_a_step(options: dict[str, bool]) -> None:
    """Of one parameter after the other, or of all together, as GPUs step them unless told otherwise."""
    layers = mlp(depth=1, width=40)
    parameters = [layers.tensors[name].requires_grad_() for name in ("0.weight", "0.bias")]
    for on_gpu in (False, True):
        costs = UpdateCosts(layers, torch.optim.AdamW(parameters, **options), Untimed(), on_gpu=on_gpu)
        together = {"foreach": True} if on_gpu and "fused" not in options else {}
        plain = torch.optim.AdamW([parameter.detach().clone() for parameter in parameters], **{**together, **options})
        for parameter in plain.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        plain.step()  # makes the state
        with PeakOfPlainRun() as real:
            plain.step()
        assert costs.of(costs.updated_by(0)).workspace_bytes == real.peak_bytes
