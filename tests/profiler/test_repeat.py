"""Python state outside tensors: what a graph would hold as it was once is refused by name, never silently different."""

import contextlib
import functools
import random
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerSequence
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.reference import run_layers

Between = Callable[["Body", Tensor], Tensor]

COUNTER = [0]
TEMPERATURE = 1.0
settings = SimpleNamespace(calls=0, scale=1.0)


class Body(nn.Module):
    """Two linear layers with something of the test's own in between."""

    steps = 0

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.between, self.calls, self.first = between, 0, True
        self.seen: list[Any] = []
        self.memory: dict[str, Tensor] = {}
        self.state = torch.zeros(16)
        self.mask: Tensor | None = None
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.c(self.between(self, self.a(x)))
        return output


def batch(samples: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 8, generator=generator), torch.arange(samples) % 5


def layers_of(between: Between, **given: Any) -> LayerSequence:
    return decompose(Body(between), batch(), functional.cross_entropy, **given)


def in_a_global(model: Body, h: Tensor) -> Tensor:
    COUNTER[0] += 1
    return h * COUNTER[0]


def in_a_closure() -> Between:
    n = 0

    def between(model: Body, h: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return h * n

    return between


def in_an_attribute(model: Body, h: Tensor) -> Tensor:
    model.calls += 1
    return h * model.calls


def in_a_class(model: Body, h: Tensor) -> Tensor:
    type(model).steps += 1
    return h + type(model).steps


def in_an_object(model: Body, h: Tensor) -> Tensor:
    settings.calls += 1
    return h * settings.calls


def every_other_layer(model: Body, h: Tensor) -> Tensor:
    COUNTER[0] += 1
    return model.b(h) if COUNTER[0] % 2 else model.b(h.relu())  # type: ignore[no-any-return]


def every_other_value(model: Body, h: Tensor) -> Tensor:
    COUNTER[0] += 1
    a, b = h.sin(), h.cos()
    return a + (b if COUNTER[0] % 2 else a)


def every_third_time(model: Body, h: Tensor) -> Tensor:
    COUNTER[0] += 1
    return h * 2 if COUNTER[0] % 3 == 0 else h


def by_the_clock(model: Body, h: Tensor) -> Tensor:
    return h * (time.perf_counter() % 1)


def through_numpy(model: Body, h: Tensor) -> Tensor:
    COUNTER[0] += 1
    return h * torch.from_numpy(np.full(1, COUNTER[0], dtype=np.float32))


def with_memory(model: Body, h: Tensor) -> Tensor:
    if "last" in model.memory:
        h = h + model.memory["last"]
    model.memory["last"] = h.detach().mean(0)
    return h


def with_a_tensor(model: Body, h: Tensor) -> Tensor:
    h = h + model.state
    model.state = h.detach().mean(0)
    return h


def with_a_mask_and_a_counter(model: Body, h: Tensor) -> Tensor:
    model.calls += 1
    return with_a_mask_made_once(model, h) * model.calls


def with_memory_of_weights(model: Body, h: Tensor) -> Tensor:
    if "bias" not in model.memory:
        model.memory["bias"] = model.b.bias.detach() * 2
    return h + model.memory["bias"]


def with_memory_of_chance(model: Body, h: Tensor) -> Tensor:
    if "noise" not in model.memory:
        model.memory["noise"] = torch.rand(16)
    return h + model.memory["noise"]


def with_a_growing_list(model: Body, h: Tensor) -> Tensor:
    model.seen.append(1)
    return h * len(model.seen)


CHANGING: dict[str, Callable[[], Between]] = {
    "global": lambda: in_a_global,
    "closure": in_a_closure,
    "attribute": lambda: in_an_attribute,
    "class": lambda: in_a_class,
    "object": lambda: in_an_object,
    "other layer": lambda: every_other_layer,
    "other value": lambda: every_other_value,
    "third time": lambda: every_third_time,
    "clock": lambda: by_the_clock,
    "numpy": lambda: through_numpy,
    "memory": lambda: with_memory,
    "tensor": lambda: with_a_tensor,
    "mask and counter": lambda: with_a_mask_and_a_counter,
    "memory of weights": lambda: with_memory_of_weights,
    "memory of chance": lambda: with_memory_of_chance,
    "list": lambda: with_a_growing_list,
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_forward_that_does_something_else_each_time_is_refused_with_its_line(name: str, start: int) -> None:
    COUNTER[0] = start
    with pytest.raises(DecomposeError, match=r"(?s)does something else each time.*test_repeat\.py.*register_buffer"):
        layers_of(CHANGING[name]())


@pytest.mark.parametrize(
    ("name", "shown"),
    [("global", r"COUNTER\[0\]"), ("closure", ": n"), ("attribute", ": calls"), ("object", r"settings\.calls")],
)
def test_what_it_changes_is_named(name: str, shown: str) -> None:
    with pytest.raises(DecomposeError, match=f"keeps in Python{shown}|keeps in Python: {shown}"):
        layers_of(CHANGING[name]())


def counting_for_itself(model: Body, h: Tensor) -> Tensor:
    model.calls += 1
    settings.calls += 1
    model.seen.append(h.detach())
    return h


def rarely(model: Body, h: Tensor) -> Tensor:
    COUNTER[0] += 1
    return h * 2 if COUNTER[0] % 1000 == 0 else h


@pytest.mark.parametrize(("between", "shown"), [(counting_for_itself, "settings.calls"), (rarely, "COUNTER")])
def test_what_changes_without_a_visible_effect_is_pointed_out(between: Between, shown: str) -> None:
    COUNTER[0] = 1
    with pytest.warns(UserWarning, match=f"changes in Python: .*{shown}"):
        layers_of(between)


def test_the_models_attributes_stay_as_they_were() -> None:
    model = Body(counting_for_itself)
    seen = model.seen
    with pytest.warns(UserWarning, match="changes in Python"):
        decompose(model, batch(), functional.cross_entropy)
    assert model.calls == 0
    assert model.seen is seen
    assert seen == []


def once(model: Body, h: Tensor) -> Tensor:
    if model.first:
        model.first = False
        h = h * 2
    return h


def test_what_only_the_first_call_does_is_refused() -> None:
    with pytest.raises(DecomposeError, match="something else each time"):
        layers_of(once)


@functools.cache
def cached_mask(length: int) -> Tensor:
    return torch.ones(length).cumsum(0)


def with_a_full_cache(model: Body, h: Tensor) -> Tensor:
    return h * cached_mask(16)


def by_training_flag(model: Body, h: Tensor) -> Tensor:
    return h * 3 if model.training else h


def with_a_constant_table(model: Body, h: Tensor) -> Tensor:
    return h + torch.from_numpy(np.arange(16, dtype=np.float32)) + model.state


def with_a_collected_loss(model: Body, h: Tensor) -> Tensor:
    model.seen.clear()
    for _ in range(2):
        model.seen.append(h.relu())
    return h + sum(model.seen)


def looping_over_sets(model: Body, h: Tensor) -> Tensor:
    for scale in {1.5, 2.5, 3.5}:
        h = h * scale
    return functional.dropout(h.to(torch.float32).contiguous(), 0.1)


def with_a_mask_made_once(model: Body, h: Tensor) -> Tensor:
    if model.mask is None or model.length != h.shape[-1]:
        model.mask = torch.ones(h.shape[-1]).cumsum(0)
        model.length = h.shape[-1]
    return h * model.mask


def with_a_table_of_masks(model: Body, h: Tensor) -> Tensor:
    key = "mask"
    if key not in model.memory:
        model.memory[key] = torch.arange(16.0)
        model.memory[key][3] = 0
    return h * model.memory[key]


class MadeOnDemand(dict[str, Any]):
    """Makes what it is asked for, as tables of activation functions do."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)(8, 8)


TABLE = MadeOnDemand(linear=nn.Linear)


def with_a_table_that_runs_code(model: Body, h: Tensor) -> Tensor:
    return h if "linear" in TABLE else h * 2


@pytest.mark.parametrize(
    "between",
    [
        with_a_table_that_runs_code,
        with_a_full_cache,
        by_training_flag,
        with_a_constant_table,
        with_a_collected_loss,
        looping_over_sets,
    ],
)
def test_what_is_the_same_each_time_is_let_through_without_a_word(between: Between) -> None:
    cached_mask(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(layers_of(between)) >= 2


def annealed(model: Body, h: Tensor) -> Tensor:
    return h * TEMPERATURE * settings.scale


def test_what_the_forward_sets_by_itself_may_change_after_capture() -> None:
    layers = layers_of(with_a_mask_made_once)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = run_layers(layers, batch(3))
        layers.model(batch(3)[0])  # plain: now the mask is there
        torch.testing.assert_close(run_layers(layers, batch(3)), before)


def test_a_number_that_changes_after_capture_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(annealed)
    run_layers(layers, batch(3))
    monkeypatch.setattr(settings, "scale", 0.5)
    with pytest.raises(DecomposeError, match=r"settings\.scale was 1\.0 and is 0\.5.*decompose again"):
        run_layers(layers, batch(3))
    monkeypatch.setattr(settings, "scale", 1.0)
    run_layers(layers, batch(3))
    monkeypatch.setitem(globals(), "TEMPERATURE", 0.9)
    with pytest.raises(DecomposeError, match=r"TEMPERATURE was 1\.0 and is 0\.9"):
        run_layers(layers, batch(3))


def test_numbers_that_the_forward_does_not_ask_for_may_change() -> None:
    layers = layers_of(annealed)
    layers.model.epoch, layers.model.calls = 3, 7
    run_layers(layers, batch(3))


def test_a_loss_function_is_looked_at_as_the_model_is() -> None:
    weight = [1.0]

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        weight[0] *= 0.9
        return functional.cross_entropy(output, targets) * weight[0]

    with pytest.raises(DecomposeError, match=r"something else each time.*keeps in Python: weight\[0\]"):
        decompose(Body(lambda model, h: h), batch(), loss_fn)


class Changing(nn.Module):
    """A module with something of the test's own after a linear layer."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.linear, self.between, self.calls = nn.Linear(8, 8), between, 0
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, self.linear(x))  # type: ignore[arg-type]


def by_chance(model: Body, h: Tensor) -> Tensor:
    return h * random.random()


def modules_with(between: Between) -> nn.Sequential:
    return nn.Sequential(Changing(lambda model, h: h), Changing(between), nn.Linear(8, 5))


@pytest.mark.parametrize("name", ["global", "closure", "attribute", "object", "clock", "numpy", "list"])
def test_modules_that_do_something_else_each_time_are_refused_by_name(name: str) -> None:
    model = modules_with(CHANGING[name]())
    with pytest.raises(DecomposeError, match=r"forward of 1 does something else each time.*recompute"):
        decompose(model, batch(), functional.cross_entropy, layers=list(model))


def test_modules_that_draw_from_pythons_chance_are_refused() -> None:
    model = modules_with(by_chance)
    with pytest.raises(DecomposeError, match="random numbers from Python"):
        decompose(model, batch(), functional.cross_entropy, layers=list(model))


def test_modules_that_count_for_themselves_are_pointed_out() -> None:
    model = modules_with(counting_for_itself)
    with pytest.warns(UserWarning, match=r"changes in Python: .*1\.calls"):
        decompose(model, batch(), functional.cross_entropy, layers=list(model))


def test_a_profiler_that_watches_goes_on_watching() -> None:
    import cProfile
    import pstats

    watching = cProfile.Profile()
    watching.enable()
    layers_of(annealed)
    test_numbers_that_the_forward_does_not_ask_for_may_change()
    watching.disable()
    names = {name for _, _, name in pstats.Stats(watching).stats}  # type: ignore[attr-defined] # made at run time
    assert "test_numbers_that_the_forward_does_not_ask_for_may_change" in names


def test_a_cache_outside_the_model_that_is_empty_is_refused_with_the_cure() -> None:
    cached_mask.cache_clear()
    with pytest.raises(DecomposeError, match=r"captured once and not again.*Run the model once"):
        layers_of(with_a_full_cache)
    cached_mask.cache_clear()


STORE: dict[int, Any] = {}
SEEN: list[Tensor] = []
NOTES = SimpleNamespace(mask=None)


@functools.lru_cache(maxsize=2)
def bounded_mask(width: int) -> tuple[Tensor, int]:
    return torch.arange(width) % 2, width


def kept_in_a_dictionary(model: Body, h: Tensor) -> Tensor:
    if 16 not in STORE:
        STORE[16] = (torch.arange(16) % 2, 16)
    mask: Tensor = STORE[16][0]
    return h * mask


def kept_by_functools(model: Body, h: Tensor) -> Tensor:
    return h * cached_mask(16)


def kept_by_a_bounded_cache(model: Body, h: Tensor) -> Tensor:
    return h * bounded_mask(16)[0]


def kept_in_a_list(model: Body, h: Tensor) -> Tensor:
    SEEN.append(h)
    return h


@pytest.mark.parametrize("between", [kept_in_a_dictionary, kept_by_functools, kept_by_a_bounded_cache, kept_in_a_list])
def test_caches_outside_the_model_keep_no_tensors_without_data(between: Between) -> None:
    """Whether it is refused or not, the user's next step computes with numbers."""
    cached_mask.cache_clear()
    bounded_mask.cache_clear()
    STORE.clear()
    SEEN.clear()
    with contextlib.suppress(DecomposeError):
        layers_of(between)
    inputs, targets = batch()
    loss = functional.cross_entropy(Body(between)(inputs), targets)
    assert loss.isfinite().item()
    assert all(type(tensor) is Tensor for tensor in SEEN)
    cached_mask.cache_clear()
    bounded_mask.cache_clear()


def kept_in_an_attribute(model: Body, h: Tensor) -> Tensor:
    if NOTES.mask is None:
        NOTES.mask = torch.arange(16) % 2  # type: ignore[assignment]
    return h * NOTES.mask


def test_a_variable_outside_the_model_that_holds_a_tensor_without_data_is_named() -> None:
    with pytest.warns(UserWarning, match=r"SimpleNamespace\.mask: set that back"), pytest.raises(DecomposeError):
        layers_of(kept_in_an_attribute)
    NOTES.mask = None


def interrupted(after: int) -> Between:
    def between(model: Body, h: Tensor) -> Tensor:
        model.calls += 1
        model.mask = h
        model.memory["last"] = h
        if model.calls == after:
            raise KeyboardInterrupt
        return h

    return between


@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupt_leaves_the_model_as_it_was(after: int) -> None:
    """In the run that is captured, and in one that repeats it."""
    model = Body(interrupted(after))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    with warnings.catch_warnings(action="error"), pytest.raises(KeyboardInterrupt):
        decompose(model, batch(), functional.cross_entropy)
    assert (model.calls, model.mask, model.memory) == (0, None, {})
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.between = lambda _, h: h
    inputs, targets = batch()
    functional.cross_entropy(model(inputs), targets).backward()
    assert model.a.weight.grad is not None


def test_a_number_of_the_class_that_a_model_is_given_its_own_of_is_noticed() -> None:
    class Scaled(nn.Module):
        beta = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(inputs) * self.beta

    model, batch = Scaled(), (torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
    layers = decompose(model, batch, nn.CrossEntropyLoss())
    layers.flatten_batch(batch)
    model.beta = 0.0
    with pytest.raises(DecomposeError, match=r"beta was 1\.0 and is 0\.0"):
        layers.flatten_batch(batch)
