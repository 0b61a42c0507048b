"""Layers run one at a time against plain autograd over the same functions."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from small_layers import build, layer, mlp, plain_run, samples
from torch import Tensor

from harmony_lab.layers import LayerSequence
from harmony_lab.runtime.execution import (
    clone_updated_buffers,
    own,
    run_backward,
    run_forward,
    run_with_gradient,
    storage_ids,
)
from harmony_lab.runtime.memory import MemoryTracker


def leaves(layers: LayerSequence) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of parameters and buffers, as a device holds them: gradients preset to zero."""
    state = {}
    for name, spec in layers.state.items():
        state[name] = layers.tensors[name].detach().clone().requires_grad_(spec.trainable)
        if spec.trainable:
            state[name].grad = torch.zeros_like(state[name])
    return state, {name: layers.tensors[name].detach().clone() for name in layers.buffer_state}


def plain_gradients(layers: LayerSequence) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and buffers of plain autograd on the whole example batch."""
    state, buffers = leaves(layers)
    batch, call = samples(layers.example_batch, 0, layers.example_sizes["batch"])
    loss = plain_run(layers.layers, {**state, **buffers}, batch, call)["loss"]
    if loss.requires_grad:
        loss.backward()
    gradients = {name: tensor.grad for name, tensor in state.items() if tensor.grad is not None}
    return loss.detach(), gradients, buffers


def packed_gradients(
    layers: LayerSequence, packs: Sequence[tuple[int, int]]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The same, pack by pack: forward keeps each pack's input, backward recomputes from it."""
    state, buffers = leaves(layers)
    batch, call = samples(layers.example_batch, 0, layers.example_sizes["batch"])
    starts = [start for start, _ in packs]
    kept = run_forward(layers, 0, starts[-1], state, buffers, {}, batch, call, starts)
    loss, gradients = torch.tensor(float("nan")), dict[str, Tensor]()
    for start, stop in reversed(packs):
        last = stop == len(layers)
        writable = buffers if last else clone_updated_buffers(layers, start, stop, buffers)
        values = dict(kept[start])
        outputs, saved = run_with_gradient(
            layers, start, stop, state, writable, values, batch, call, [stop] if last else []
        )
        assert not values
        if last:
            loss = outputs[stop]["loss"]
        before = gradients
        gradients = run_backward(layers, start, stop, saved, before, seed_gradient=1.0 if last else None)
        assert not saved
        assert not before
        wanted = {spec.name: spec for spec in layers.boundaries[start] if spec.requires_grad}
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert gradient.untyped_storage().nbytes() == wanted[name].num_bytes(layers.example_sizes["batch"])
    found = {name: tensor.grad for name, tensor in state.items() if tensor.grad is not None}
    return loss, found, buffers


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_like_plain(layers: LayerSequence, packs: Sequence[tuple[int, int]]) -> None:
    loss, gradients, buffers = packed_gradients(layers, packs)
    plain_loss, plain, plain_buffers = plain_gradients(layers)
    assert torch.equal(loss, plain_loss)
    assert_same(gradients, plain)
    assert_same(buffers, plain_buffers)


PACKS_OF_FOUR = [
    [(0, 4)],
    [(0, 2), (2, 4)],
    [(0, 1), (1, 2), (2, 3), (3, 4)],
    [(0, 3), (3, 4)],
    [(0, 1), (1, 4)],
]


def reads(name: str) -> dict[str, tuple[str, ...]]:
    return {"inputs": (name,)}


def matmul(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
    return (torch.tanh((*inputs, *batch)[0] @ parameters[0]),)


def add_skip(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
    return (inputs[0] @ parameters[0] + inputs[1].sin(),)


def squares(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
    return (sum(x**2 for x in inputs).mean(),)


def weights(count: int, *, frozen: Sequence[int] = ()) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {f"w{i}": torch.randn(4, 4).requires_grad_(i not in frozen) for i in range(count)}


BATCH = {"x": torch.linspace(-1, 1, 24).reshape(6, 4)}


@pytest.mark.parametrize("packs", PACKS_OF_FOUR)
def test_gradients_equal_plain_autograd(packs: list[tuple[int, int]]) -> None:
    assert_like_plain(mlp(depth=3), packs)


@pytest.mark.parametrize("packs", PACKS_OF_FOUR)
def test_a_skip_connection_gets_the_gradients_of_all_its_uses(packs: list[tuple[int, int]]) -> None:
    layers = build(
        [
            layer("a", matmul, parameters=("w0",), batch_inputs=("x",), outputs=("a",)),
            layer("b", matmul, parameters=("w1",), outputs=("b",), **reads("a")),
            layer("c", add_skip, parameters=("w2",), inputs=("b", "a"), outputs=("c",)),
            layer("loss", squares, inputs=("c", "a"), outputs=("loss",)),
        ],
        weights(3),
        BATCH,
    )
    assert [spec.name for spec in layers.boundaries[3]] == ["a", "c"]
    assert_like_plain(layers, packs)


@pytest.mark.parametrize("packs", PACKS_OF_FOUR)
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_frozen_layers_get_no_gradient(packs: list[tuple[int, int]], frozen: tuple[int, ...]) -> None:
    layers = build(
        [
            layer("a", matmul, parameters=("w0",), batch_inputs=("x",), outputs=("a",)),
            layer("b", matmul, parameters=("w1",), outputs=("b",), **reads("a")),
            layer("c", matmul, parameters=("w2",), outputs=("c",), **reads("b")),
            layer("loss", squares, inputs=("c",), outputs=("loss",)),
        ],
        weights(3, frozen=frozen),
        BATCH,
    )
    assert_like_plain(layers, packs)


@pytest.mark.parametrize("packs", PACKS_OF_FOUR)
def test_a_shared_parameter_gets_the_sum_of_its_gradients(packs: list[tuple[int, int]]) -> None:
    layers = build(
        [
            layer("a", matmul, parameters=("w0",), batch_inputs=("x",), outputs=("a",)),
            layer("b", matmul, parameters=("w1",), outputs=("b",), **reads("a")),
            layer("c", matmul, parameters=("w0",), outputs=("c",), **reads("b")),
            layer("loss", squares, inputs=("c",), outputs=("loss",)),
        ],
        weights(2),
        BATCH,
    )
    assert_like_plain(layers, packs)


@pytest.mark.parametrize("packs", PACKS_OF_FOUR)
def test_layers_may_return_their_inputs_and_parameters(packs: list[tuple[int, int]]) -> None:
    def pass_on(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        return inputs[0], inputs[0].view(-1, 2, 2), parameters[0]

    def use(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        same, view, weight = inputs
        return (torch.tanh(same @ weight) + view.flatten(1).cos(),)

    layers = build(
        [
            layer("a", matmul, parameters=("w0",), batch_inputs=("x",), outputs=("a",)),
            layer("b", pass_on, parameters=("w1",), outputs=("same", "view", "weight"), **reads("a")),
            layer("c", use, inputs=("same", "view", "weight"), outputs=("c",)),
            layer("loss", squares, inputs=("c",), outputs=("loss",)),
        ],
        weights(2),
        BATCH,
    )
    assert_like_plain(layers, packs)


@pytest.mark.parametrize("packs", PACKS_OF_FOUR)
def test_recompute_leaves_buffers_alone(packs: list[tuple[int, int]]) -> None:
    def norm(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        x = (*inputs, *batch)[0]
        return (torch.batch_norm(x, None, None, *buffers, True, 0.1, 1e-5, False) @ parameters[0],)

    state = {"mean": ("mean", "variance"), "mean2": ("mean2", "variance2")}
    tensors = weights(3)
    for mean, variance in state.values():
        tensors[mean], tensors[variance] = torch.zeros(4), torch.ones(4)
    updated = {key: {"buffers": names, "updated_buffers": names} for key, names in state.items()}
    layers = build(
        [
            layer("a", norm, parameters=("w0",), batch_inputs=("x",), outputs=("a",), **updated["mean"]),
            layer("b", matmul, parameters=("w1",), outputs=("b",), **reads("a")),
            layer("c", norm, parameters=("w2",), outputs=("c",), **updated["mean2"], **reads("b")),
            layer("loss", squares, inputs=("c",), outputs=("loss",)),
        ],
        tensors,
        BATCH,
    )
    assert_like_plain(layers, packs)


def test_values_that_carry_no_gradient_reach_later_layers() -> None:
    def with_mask(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        return batch[0] @ parameters[0], batch[0] > 0, torch.arange(4)

    def use_mask(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        value, mask, order = inputs
        return ((torch.where(mask, value, 0.0) * order).mean(),)

    layers = build(
        [
            layer("a", with_mask, parameters=("w0",), batch_inputs=("x",), outputs=("a", "mask", "order")),
            layer("b", matmul, parameters=("w1",), outputs=("b",), **reads("a")),
            layer("loss", use_mask, inputs=("b", "mask", "order"), outputs=("loss",)),
        ],
        weights(2),
        BATCH,
    )
    assert_like_plain(layers, [(0, 1), (1, 2), (2, 3)])
    assert_like_plain(layers, [(0, 3)])


def test_a_value_without_a_path_to_the_loss_gets_zeros() -> None:
    def ignore(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        return (inputs[0] + inputs[1].detach(),)

    layers = build(
        [
            layer("a", matmul, parameters=("w0",), batch_inputs=("x",), outputs=("a",)),
            layer("b", matmul, parameters=("w1",), outputs=("b",), **reads("a")),
            layer("c", ignore, inputs=("b", "a"), outputs=("c",)),
            layer("loss", squares, inputs=("c",), outputs=("loss",)),
        ],
        weights(2),
        BATCH,
    )
    state, buffers = leaves(layers)
    batch, call = samples(layers.example_batch, 0, 6)
    kept = run_forward(layers, 0, 2, state, buffers, {}, batch, call, [2])
    _, saved = run_with_gradient(layers, 2, 4, state, buffers, kept[2], batch, call, [])
    gradients = run_backward(layers, 2, 4, saved, {}, seed_gradient=1.0)
    assert torch.equal(gradients["a"], torch.zeros(6, 4))
    assert bool(gradients["b"].any())


def test_the_seed_gradient_weights_the_loss() -> None:
    layers = mlp()
    _, plain, _ = plain_gradients(layers)
    state, buffers = leaves(layers)
    batch, call = samples(layers.example_batch, 0, 6)
    _, saved = run_with_gradient(layers, 0, 4, state, buffers, {}, batch, call, [])
    assert run_backward(layers, 0, 4, saved, {}, seed_gradient=0.25) == {}
    for name, gradient in plain.items():
        assert torch.equal(state[name].grad, gradient * 0.25)


def test_kept_boundaries_have_memory_of_their_own() -> None:
    def pieces(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        a, b = torch.cat([inputs[0], inputs[0] + 1], dim=1).chunk(2, dim=1)
        return a, b, inputs[0], parameters[0], batch[0], b.t()

    def first_sum(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        return (inputs[0].sum(),)

    layers = build(
        [
            layer("a", matmul, parameters=("w0",), batch_inputs=("x",), outputs=("a",)),
            layer(
                "b",
                pieces,
                parameters=("w1",),
                batch_inputs=("x",),
                outputs=("p", "q", "in", "w", "x", "t"),
                **reads("a"),
            ),
            layer("loss", first_sum, inputs=("p", "q", "in", "w", "x", "t"), outputs=("loss",)),
        ],
        weights(2),
        BATCH,
    )
    state, buffers = leaves(layers)
    batch, call = samples(layers.example_batch, 0, 6)
    for run in (run_forward, run_with_gradient):
        result = run(layers, 0, 2, state, buffers, {}, batch, call, [1, 2])
        kept = result if run is run_forward else result[0]
        tensors = [*kept[1].values(), *kept[2].values()]
        assert len(tensors) == 7
        assert len(storage_ids(tensors, state.values(), batch.values())) == 7 + 2 + 1
        for boundary, values in kept.items():
            for spec in layers.boundaries[boundary]:
                assert values[spec.name].untyped_storage().nbytes() == spec.num_bytes(6)
                assert values[spec.name].is_contiguous()
                assert not values[spec.name].requires_grad
        assert torch.equal(kept[2]["t"], kept[2]["q"].t())
        assert torch.equal(kept[2]["in"], kept[1]["a"])


def test_own_copies_only_where_memory_is_not_its_own() -> None:
    alone, base = torch.ones(4), torch.arange(6.0)
    foreign = storage_ids([base])
    owned = own({"alone": alone, "view": base[:3], "again": alone}, foreign)
    assert owned["alone"].data_ptr() == alone.data_ptr()
    assert owned["view"].tolist() == [0, 1, 2]
    assert owned["again"].data_ptr() != alone.data_ptr()
    assert storage_ids(owned.values()) <= foreign


def test_values_are_dropped_when_no_later_layer_needs_them() -> None:
    alive: list[bool] = []
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def watch(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        alive.append(any(ref() is not None for ref in seen[:-1]))
        output = (*inputs, *batch)[0] + 1
        seen.append(weakref.ref(output.untyped_storage()))
        return (output,)

    layers = build(
        [
            layer("a", watch, batch_inputs=("x",), outputs=("a",)),
            layer("b", watch, outputs=("b",), **reads("a")),
            layer("c", watch, outputs=("c",), **reads("b")),
            layer("loss", watch, outputs=("loss",), **reads("c")),
        ],
        {},
        BATCH,
    )
    alive.clear()
    seen.clear()
    batch, call = samples(layers.example_batch, 0, 6)
    run_forward(layers, 0, 4, {}, {}, {}, batch, call, [])
    assert alive == [False] * 4
    assert all(ref() is None for ref in seen)


def test_backward_frees_one_layer_before_the_next() -> None:
    layers = mlp(depth=6, width=16)
    state, buffers = leaves(layers)
    batch, call = samples(layers.example_batch, 0, 6)
    alive = peak = 0

    def allocated(num_bytes: int) -> None:
        nonlocal alive, peak
        alive += num_bytes
        peak = max(peak, alive)

    def released(num_bytes: int) -> None:
        nonlocal alive
        alive -= num_bytes

    tracker = MemoryTracker(allocated, released)
    with tracker:
        _, saved = run_with_gradient(layers, 0, 7, state, buffers, {}, batch, call, [])
        after_forward = alive
        peak = 0
        run_backward(layers, 0, 7, saved, {}, seed_gradient=1.0)
    gc.collect()
    value = 6 * 16 * 4
    # Above what forward left: one layer's gradients, not six.
    assert after_forward >= 6 * value
    assert peak <= after_forward + 3 * value + 16 * 16 * 4 + 16 * 4
    assert alive == 0


def test_every_layer_is_called_with_its_own_first_random_op() -> None:
    ops: list[int] = []

    def note(parameters: Any, buffers: Any, inputs: Any, batch: Any, call: Any) -> tuple[Tensor, ...]:
        ops.append(call.first_random_op)
        return ((*inputs, *batch)[0] * 1,)

    layers = build(
        [
            layer("a", note, batch_inputs=("x",), outputs=("a",), num_random_ops=2),
            layer("loss", note, outputs=("loss",), first_random_op=2, **reads("a")),
        ],
        {},
        BATCH,
    )
    batch, call = samples(layers.example_batch, 0, 6)
    ops.clear()
    run_forward(layers, 0, 2, {}, {}, {}, batch, call, [])
    run_with_gradient(layers, 0, 2, {}, {}, {}, batch, call, [])
    assert ops == [0, 2, 0, 2]
