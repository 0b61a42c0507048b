"""What autograd saved may leave its device: nothing stays behind, and backward finds it, and the weights, elsewhere."""

import gc

import pytest
import torch
from plain_training import PlainTraining, planned
from small_layers import build, layer, samples
from torch import Tensor, nn

from harmony_lab.errors import DeviceMemoryError
from harmony_lab.layers import LayerSequence
from harmony_lab.machine import Machine
from harmony_lab.program import Op, OpKind, Stream
from harmony_lab.runtime.compute_memory import ComputeMemory
from harmony_lab.runtime.execution import run_backward, run_forward
from harmony_lab.runtime.kept import run_keeping
from harmony_lab.runtime.ledger import Ledger
from harmony_lab.runtime.loose import loose_blocks
from harmony_lab.runtime.memory import MemoryTracker
from harmony_lab.runtime.runner import Runner


def attending(parameters, buffers, inputs, batch, call) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """Saves inputs, weights as they are and transposed, parts of one storage, a mask and its own output."""
    (x,) = batch
    query, key, value = nn.functional.linear(x, parameters[0]).unflatten(1, (3, -1)).unbind(1)
    mixed = torch.softmax(query @ key.T, dim=1) @ value * (value > 0)
    return torch.tanh(mixed @ parameters[1]), torch.sum(mixed.detach())


def loss(parameters, buffers, inputs, batch, call) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    return (inputs[0].pow(2).mean() + inputs[1],)


@pytest.fixture
def layers() -> LayerSequence:
    generator = torch.Generator().manual_seed(0)
    tensors = {"in": torch.randn(12, 4, generator=generator), "out": torch.randn(4, 4, generator=generator)}
    made = [
        layer("attend", attending, parameters=("in", "out"), batch_inputs=("x",), outputs=("v", "w")),
        layer("loss", loss, kind=1, inputs=("v", "w"), outputs=("loss",)),
    ]
    batch = {"x": torch.randn(6, 4, generator=generator)}
    return build(made, {name: tensor.requires_grad_() for name, tensor in tensors.items()}, batch)


def test_all_that_was_saved_leaves_and_backward_works_with_copies(layers: LayerSequence) -> None:
    plain = PlainTraining(layers, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    plain.step(layers.example_batch)
    batch, call = samples(layers.example_batch, 0, 6)
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in layers.tensors.items()}
    given = {**state, "x": batch["x"]}
    alive = [0]

    def count(change: int) -> None:
        alive[0] += change

    tracker = MemoryTracker(count, lambda num_bytes: count(-num_bytes))
    with tracker:
        _, saved, kept = run_keeping(given, layers, 0, 2, state, {}, {}, batch, call, ())
    kept.settle(saved)
    assert kept.num_bytes == alive[0] > 0
    copies = [slot.flat.clone() for slot in kept.slots if slot.flat is not None]
    for slot in kept.slots:
        assert slot.flat is not None
        slot.flat.fill_(255)
    kept.leave()
    assert alive[0] == 0
    kept.come_back(torch.device("cpu"))
    for slot, copy in zip(kept.slots, copies, strict=True):
        assert slot.flat is not None
        slot.flat.copy_(copy)
    elsewhere = {name: tensor.detach().clone() for name, tensor in given.items()}
    for tensor in state.values():
        tensor.detach().fill_(torch.nan)
    del given, copies
    kept.release(elsewhere)
    run_backward(layers, 0, 2, saved, {}, seed_gradient=1.0)
    for name, leaf in kept.parameters.items():
        torch.testing.assert_close(leaf.grad, plain.tensors[name].grad)


def test_what_nothing_needs_any_more_is_not_kept(layers: LayerSequence) -> None:
    """The second output has no gradient: what it was computed from is not saved."""
    batch, call = samples(layers.example_batch, 0, 6)
    state = dict(layers.tensors)
    _, saved, kept = run_keeping({**state, **batch}, layers, 0, 2, state, {}, {}, batch, call, ())
    kept.settle(saved)
    saved.clear()
    kept.release({})
    assert not kept.slots
    assert run_forward(layers, 0, 2, state, {}, {}, batch, call, [2])[2]["loss"].isfinite()


def scaled(parameters, buffers, inputs, batch, call) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """Backward needs the buffer."""
    return (nn.functional.linear(*inputs, *batch, parameters[0]).tanh() * buffers[0],)


def total(parameters, buffers, inputs, batch, call) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    return (inputs[0].pow(2).mean(),)


def test_buffers_that_leave_before_backward_are_read_where_they_come_back() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors, made = {}, []
    for i in range(3):
        tensors |= {f"w{i}": torch.randn(4, 4, generator=generator).requires_grad_()}
        tensors |= {f"b{i}": torch.randn(4, generator=generator)}
        reads = {"inputs": (f"v{i - 1}",)} if i else {"batch_inputs": ("x",)}
        made.append(layer(f"{i}", scaled, parameters=(f"w{i}",), buffers=(f"b{i}",), outputs=(f"v{i}",), **reads))
    made.append(layer("loss", total, kind=1, inputs=("v2",), outputs=("loss",)))
    layers = build(made, tensors, {"x": torch.randn(6, 4, generator=generator)})
    machine = Machine.emulated(1, memory="64KiB", link="1e12")
    plain = PlainTraining(layers, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    program = planned(
        layers,
        machine,
        "dp minibatch=6 forward=2[0:2] backward=2[0:2,2:4] devices=0 resident=0:2 kept=0:2",
    )
    assert loose_blocks(program(6))
    optimizer = torch.optim.SGD([tensors[f"w{i}"] for i in range(3)], lr=0.1)
    with Runner(layers, optimizer, machine, program, chaos_seed=1, interleaves=True) as runner:  # freed memory is NaN
        for _ in range(3):
            assert runner.step(layers.example_batch) == pytest.approx(plain.step(layers.example_batch), rel=1e-5)
    plain.assert_equal()


def test_a_device_without_room_for_what_comes_back_counts_none_of_it() -> None:
    ledger, op = Ledger("d0", 128), Op(OpKind.SWAP_IN, 0, Stream.SWAP_IN, (0, 1), (0, 1))
    parts = [torch.empty(64, dtype=torch.uint8), torch.empty(65, dtype=torch.uint8)]
    with pytest.raises(DeviceMemoryError):
        ComputeMemory(ledger, op).again(op, parts)
    gc.collect()  # nobody waits any more for these to be freed
    del parts
    assert ledger.alive_bytes == 0
