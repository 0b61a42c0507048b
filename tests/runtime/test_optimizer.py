"""The user's own optimizer, a part of its parameters at a time."""

import pytest
import torch
from small_layers import mlp
from torch.optim.optimizer import register_optimizer_step_post_hook

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


# -- coupling -----------------------------------------------------------------------------------------------------


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients inside step()."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class ClippingAdam(torch.optim.Adam):
    """The same, where the size of a gradient matters only against that of other steps."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Decaying(torch.optim.Optimizer):
    """Counts calls of step() once for all parameters."""

    def __init__(self, params, lr=0.1):  # type: ignore[no-untyped-def]
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["calls"])


@pytest.mark.parametrize("kind", [Clipping, ClippingAdam, Decaying])
def test_optimizers_that_couple_parameters_in_step_are_refused_by_name(kind: type[torch.optim.Optimizer]) -> None:
    layers = mlp()
    optimizer = kind(list(layers.tensors.values()), lr=1e-3)  # type: ignore[call-arg]
    with pytest.raises(HarmonyError, match=f"{kind.__name__} cannot update .* depends on the others"):
        PackOptimizer(optimizer, layers)


class Noisy(torch.optim.SGD):
    """Treats each parameter by itself, with a random number for each."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter))
        return super().step(closure)


class Named(torch.optim.SGD):
    """Cannot be made of its defaults."""

    def __init__(self, params, *, name, lr):  # type: ignore[no-untyped-def]
        super().__init__(params, lr=lr)
        self.name = name.upper()


def test_trying_an_optimizer_leaves_it_and_the_random_state_as_they_were() -> None:
    layers = mlp()
    optimizer = Noisy(list(layers.tensors.values()), lr=0.1, momentum=0.9)
    before, tensors = torch.get_rng_state(), {name: t.detach().clone() for name, t in layers.tensors.items()}
    PackOptimizer(optimizer, layers)
    assert torch.equal(torch.get_rng_state(), before)
    assert not optimizer.state
    assert all(torch.equal(tensor, layers.tensors[name].detach()) for name, tensor in tensors.items())


def test_an_optimizer_that_cannot_be_tried_is_taken() -> None:
    layers = mlp()
    PackOptimizer(Named(list(layers.tensors.values()), name="mine", lr=0.1), layers)


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
@pytest.mark.parametrize("options", [{}, {"foreach": True}])
def test_torchs_own_optimizers_are_taken(name: str, options: dict[str, bool]) -> None:
    layers = mlp()
    PackOptimizer(getattr(torch.optim, name)(list(layers.tensors.values()), **options), layers)


# -- hooks --------------------------------------------------------------------------------------------------------


def test_step_hooks_are_refused_with_their_name_also_when_they_come_later() -> None:
    layers = mlp()
    optimizer = torch.optim.SGD(list(layers.tensors.values()), lr=0.1)

    def averaging(optimizer, args, kwargs):  # type: ignore[no-untyped-def]
        pass

    packed = PackOptimizer(optimizer, layers)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(averaging)
        for refused in (packed.begin, lambda: PackOptimizer(optimizer, layers)):
            with pytest.raises(HarmonyError, match=r"registered on SGD: .*averaging.*once per pack"):
                refused()
        handle.remove()
        packed.begin()


def test_hooks_on_all_optimizers_are_refused() -> None:
    layers = mlp()
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        with pytest.raises(HarmonyError, match="registered on all optimizers"):
            PackOptimizer(torch.optim.SGD(list(layers.tensors.values()), lr=0.1), layers)
    finally:
        handle.remove()


def test_an_optimizer_over_another_model_is_refused() -> None:
    layers = mlp()
    other = torch.nn.Linear(2, 2)
    with pytest.raises(HarmonyError, match="holds none of the model's"):
        PackOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), layers)
