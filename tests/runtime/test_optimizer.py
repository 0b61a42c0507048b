"""The user's own optimizer, a part of its parameters at a time."""

import pytest
import torch
from small_layers import mlp

from harmony_lab.errors import HarmonyError
from harmony_lab.layers import LayerSequence
from harmony_lab.runtime.optimizer import PackOptimizer


def gradients(layers: LayerSequence) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in layers.tensors.items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RMSprop])
def test_stepping_part_after_part_equals_one_step(kind: type[torch.optim.Optimizer]) -> None:
    parts, whole = mlp(), mlp()
    optimizers = [kind(list(layers.tensors.values()), lr=0.1) for layers in (parts, whole)]  # type: ignore[call-arg]
    packed = PackOptimizer(optimizers[0], parts)
    for _ in range(3):
        given = gradients(parts)
        names = list(given)
        packed.begin()
        packed.step({name: given[name] for name in names[3:]})
        packed.step({name: given[name] for name in names[:3]})
        for name, tensor in whole.tensors.items():
            tensor.grad = given[name]
        optimizers[1].step()
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor.detach(), parts.tensors[name].detach())


def test_no_gradient_is_left_behind_and_leftovers_are_not_applied() -> None:
    layers = mlp()
    before = layers.tensors["1.weight"].detach().clone()
    layers.tensors["1.weight"].grad = torch.ones(8, 8)
    packed = PackOptimizer(torch.optim.SGD(list(layers.tensors.values()), lr=1.0), layers)
    packed.begin()
    packed.step({"0.weight": torch.ones(8, 8)})
    assert torch.equal(layers.tensors["1.weight"].detach(), before)
    assert all(tensor.grad is None for tensor in layers.tensors.values())


def test_gradients_are_taken_back_when_the_optimizer_fails() -> None:
    layers = mlp()

    class Failing(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            raise ArithmeticError("no")

    packed = PackOptimizer(Failing(list(layers.tensors.values()), lr=1.0), layers)
    with pytest.raises(ArithmeticError):
        packed.step({"0.weight": torch.ones(8, 8)})
    assert layers.tensors["0.weight"].grad is None


def test_optimizers_that_cannot_step_a_part_are_refused_by_name() -> None:
    layers = mlp()
    tensors = list(layers.tensors.values())

    class Sharp(torch.optim.SGD):
        def step(self, closure):  # type: ignore[no-untyped-def, override]
            return closure()

    for optimizer in (torch.optim.LBFGS(tensors), torch.optim.SparseAdam(tensors), Sharp(tensors, lr=1.0)):
        with pytest.raises(HarmonyError, match=f"{type(optimizer).__name__} cannot update a model pack by pack"):
            PackOptimizer(optimizer, layers)
