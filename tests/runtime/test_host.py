"""The store over the user's own parameters."""

import io
import mmap
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from plain_training import PlainTraining, planned
from small_layers import build, layer, mlp
from torch import Tensor, nn

from harmony_lab.errors import HarmonyError, TrainingError
from harmony_lab.layers import LayerSequence, padded
from harmony_lab.machine import HOST, Machine
from harmony_lab.profiler.decompose import decompose
from harmony_lab.program import TensorKind
from harmony_lab.runtime.arena import Arena
from harmony_lab.runtime.device_memory import DeviceMemory
from harmony_lab.runtime.emulated import EmulatedBackend
from harmony_lab.runtime.host import HostStore
from harmony_lab.runtime.layout import Layouts
from harmony_lab.runtime.runner import Runner


def opened(layers: LayerSequence) -> tuple[HostStore, Layouts]:
    layouts = Layouts(layers)
    return HostStore(layers, layouts), layouts


def saved_bytes(value: object) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer().nbytes


def read(layers: LayerSequence, store: HostStore, layouts: Layouts, pack: tuple[int, int]) -> dict[str, Tensor]:
    """A pack's parameters by way of its parts."""
    layout = layouts.of(TensorKind.WEIGHT, pack)
    block = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for part, offset in store.reader(layers, layouts).parts_of(pack):
        block[offset : offset + part.nbytes] = part
    return layout.views(block)


def test_opening_keeps_values_and_objects_and_lays_them_side_by_side_in_one_arena() -> None:
    layers = mlp()
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in layers.tensors.items()}
    store, _ = opened(layers)
    for name, (tensor, value) in before.items():
        assert layers.tensors[name] is tensor
        assert torch.equal(tensor.detach(), value)
    starts = [tensor.data_ptr() for tensor in layers.tensors.values()]
    assert starts[0] == store.arena.memory.data_ptr()
    assert [b - a for a, b in pairwise(starts)] == [padded(t.nbytes) for t in layers.tensors.values()][:-1]


class Registering:
    """Stands in for CUDA's runtime."""

    def __init__(self, *, allows: bool) -> None:
        self.allows = allows
        self.registered: dict[int, int] = {}
        """Bytes, by where they start."""

    def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:
        if self.allows:
            self.registered[start] = num_bytes
        return 0 if self.allows else 2

    def cudaHostUnregister(self, start: int) -> None:
        del self.registered[start]


@pytest.mark.parametrize("allows", [True, False])
def test_memory_is_page_locked_until_it_goes_or_a_warning_says_that_it_is_not(
    allows: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Registering(allows=allows)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("harmony_lab.runtime.arena._clear_last_error", lambda: None)
    backend = EmulatedBackend(Machine.emulated(1))
    backend.pins_host_memory = True
    memory = DeviceMemory(backend)
    layers = mlp()
    store = HostStore(layers, Layouts(layers), pin=True)
    for num_bytes in (1000, 3000):
        assert memory.of(HOST, num_bytes).nbytes == num_bytes
        expected = [store.arena.memory.data_ptr(), memory.of(HOST, num_bytes).data_ptr()]
        assert list(runtime.registered) == (expected if allows else [])
    memory.close()
    store.close()
    assert not runtime.registered
    for content in ("parameters", "gradients and activations"):  # of which there were two sizes
        assert caplog.text.count(f"of {content} be page-locked") == (0 if allows else 1)


def test_memory_of_a_store_that_is_forgotten_is_not_left_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would take the pages of whoever has that address next for pinned."""
    runtime = Registering(allows=True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    arena = Arena(1000)
    kept = arena.tensor(0, torch.Size([10]), torch.float32)
    assert arena.pin("parameters")
    assert list(runtime.registered) == [kept.data_ptr()]
    del arena
    assert not runtime.registered


@pytest.mark.parametrize("allows", [True, False])
def test_training_locks_no_more_memory_than_it_needs_and_needs_no_lock(
    allows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updated in the end, all gradients are on the host at once; beside them there is next to nothing."""
    runtime = Registering(allows=allows)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("harmony_lab.runtime.arena._clear_last_error", lambda: None)
    monkeypatch.setattr(EmulatedBackend, "pins_host_memory", True)
    layers = mlp(depth=4, width=128, num_samples=2)
    machine = Machine.emulated(1, memory="64MiB", link=1e12)
    plain = PlainTraining(layers, lambda tensors: torch.optim.SGD(tensors, lr=0.1))
    program = planned(layers, machine, "pp minibatch=2 forward=1[0:2] backward=1[0:2,2:5] devices=0 update=end")
    parameters = list(layers.tensors.values())
    with Runner(layers, torch.optim.SGD(parameters, lr=0.1), machine, program) as runner:
        for _ in range(2):
            assert runner.step(layers.example_batch) == pytest.approx(plain.step(layers.example_batch), rel=1e-4)
        needed = 2 * sum(parameter.nbytes for parameter in parameters)
        assert sum(runtime.registered.values()) <= 1.05 * needed
        assert len(runtime.registered) == (2 if allows else 0)
    assert not runtime.registered
    plain.assert_equal(1e-4)


@pytest.mark.parametrize("names", [("0.weight",), ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")])
def test_what_is_saved_of_an_open_model_is_as_large_as_of_a_plain_one(names: tuple[str, ...]) -> None:
    layers = mlp(width=40)
    plain = saved_bytes({name: layers.tensors[name].detach().clone() for name in names})
    store, _ = opened(layers)
    assert saved_bytes({name: layers.tensors[name].detach() for name in names}) == plain
    store.close()
    assert saved_bytes({name: layers.tensors[name].detach() for name in names}) == plain


def test_what_was_taken_from_an_open_model_stays_whole_when_the_store_is_closed() -> None:
    layers = mlp(width=128)
    store, _ = opened(layers)
    taken = {name: tensor.detach() for name, tensor in layers.tensors.items()}
    array = layers.tensors["1.weight"].detach().numpy()
    values = {name: tensor.clone() for name, tensor in taken.items()}
    store.close()
    assert all(torch.equal(taken[name], value) for name, value in values.items())
    assert torch.equal(torch.from_numpy(array), values["1.weight"])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the whole arena until its last tensor goes")
def test_parts_of_the_arena_go_back_to_the_system_one_by_one() -> None:
    arena = Arena(64 * mmap.PAGESIZE)
    arena.memory.fill_(7)
    arena.give_back(mmap.PAGESIZE // 2, 3 * mmap.PAGESIZE)
    pages = arena.memory.view(64, mmap.PAGESIZE)[:, 0].tolist()
    assert pages == [7, 0, 0, *[7] * 61]  # only whole pages: their ends may hold something else


def test_a_pack_of_consecutive_layers_is_one_part() -> None:
    layers = mlp(depth=4)
    store, layouts = opened(layers)
    for pack in ((0, 4), (1, 3), (2, 5)):
        assert len(store.reader(layers, layouts).parts_of(pack)) == 1
        for name, value in read(layers, store, layouts, pack).items():
            assert torch.equal(value, layers.tensors[name].detach())


def test_a_shared_parameter_lies_once_in_the_arena_and_comes_with_every_pack_that_reads_it() -> None:
    def function(parameters, buffers, inputs, batch, call):  # type: ignore[no-untyped-def]
        (x,) = (*inputs, *batch)
        return (x * parameters[0] + parameters[1],) if call.samples else ()

    tensors = {name: torch.randn(5).requires_grad_() for name in ("shared", "a", "b")}
    layers = build(
        [
            layer("first", function, parameters=("shared", "a"), batch_inputs=("x",), outputs=("v",)),
            layer("last", function, parameters=("b", "shared"), inputs=("v",), outputs=("loss",)),
        ],
        tensors,
        {"x": torch.randn(4, 5)},
    )
    store, layouts = opened(layers)
    assert store.arena.num_bytes == 3 * 64
    assert list(read(layers, store, layouts, (1, 2))) == ["b", "shared"]
    for name, value in read(layers, store, layouts, (1, 2)).items():
        assert torch.equal(value, tensors[name].detach())


def test_closing_gives_every_parameter_its_own_storage_and_keeps_values() -> None:
    layers = mlp()
    store, _ = opened(layers)
    with torch.no_grad():
        layers.tensors["0.weight"].fill_(7.0)
    store.close()
    store.close()
    assert (layers.tensors["0.weight"] == 7).all()
    for tensor in layers.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_parameter_moved_by_somebody_else_is_noticed_and_left_alone_on_closing() -> None:
    layers = mlp()
    first, _ = opened(layers)
    second, _ = opened(layers)
    with pytest.raises(TrainingError, match=r"'0\.weight' has been moved"):
        first.check_in_place()
    second.check_in_place()
    first.close()
    second.check_in_place()


def test_parameters_off_the_host_are_refused_with_the_cure() -> None:
    layers = mlp()
    elsewhere = replace(layers, tensors={**layers.tensors, "1.bias": torch.empty(8, device="meta")})
    with pytest.raises(HarmonyError, match=r"'1\.bias' is on meta: call model\.cpu\(\)"):
        opened(elsewhere)


def test_two_parameters_over_one_memory_are_refused() -> None:
    layers = mlp()
    alias = layers.tensors["0.weight"].detach().requires_grad_()
    with pytest.raises(HarmonyError, match="two Parameter objects over the same memory"):
        opened(replace(layers, tensors={**layers.tensors, "1.weight": alias}))


def test_parameters_frozen_since_decomposition_are_named_with_the_cure() -> None:
    layers = mlp()
    store, _ = opened(layers)
    store.check_in_place()
    layers.tensors["1.weight"].requires_grad_(False)
    layers.tensors["1.bias"].requires_grad_(False)
    message = r"'1\.weight', '1\.bias' frozen\. .*decompose the model again, or make a new Lab"
    with pytest.raises(HarmonyError, match=message):
        store.check_in_place()
    store.close()
    with pytest.raises(HarmonyError, match=message):
        opened(layers)
    assert layers.tensors["0.weight"].untyped_storage().nbytes() == layers.tensors["0.weight"].nbytes


def test_parameters_made_trainable_since_decomposition_are_named() -> None:
    layers = mlp()
    spec = replace(layers.state["0.bias"], trainable=False)
    with pytest.raises(HarmonyError, match=r"'0\.bias' made trainable"):
        opened(replace(layers, state={**layers.state, "0.bias": spec}))


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Identity()])
def test_a_model_in_another_mode_than_it_was_captured_in_is_refused(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), module)
    layers = decompose(model, (torch.randn(4, 8), torch.randn(4, 8)), nn.MSELoss())
    model.eval()
    if isinstance(module, nn.Identity):  # computes the same in both
        opened(layers)[0].close()
        return
    with pytest.raises(HarmonyError, match=r"the model was put into eval mode .* call model.train\(\)"):
        opened(layers)
    model.train()
    opened(layers)[0].close()
    module.eval()
    with pytest.raises(HarmonyError, match=r"\('1'\) were put into eval mode .* put them back into train mode"):
        opened(layers)
