"""Samples: where they lie in tensors that cross between layers, and losses in which they meet."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import gradients
from torch import Tensor, nn
from torch.nn import functional

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerSequence
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.profiler.reference import run_flat, run_layers
from harmony_lab.runtime.moves import batch_slice


class Blocks(nn.Module):
    """Linear blocks amid ways to lay out samples: ``arrange`` makes rows of (samples, 2, 8), ``collect`` undoes it."""

    def __init__(self, arrange: Callable[[Tensor], Tensor], collect: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3))
        self.head = nn.Linear(16, 1)
        self.arrange, self.collect = arrange, collect

    def forward(self, x: Tensor) -> Tensor:
        x = self.arrange(self.stem(x).view(-1, 2, 8))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.collect(x)).square().mean()


ARRANGEMENTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], tuple[int, int, int]]] = {
    "rows of a sample together": (lambda x: x.reshape(-1, 8), lambda x: x.reshape(-1, 16), (0, 2, 1)),
    "concatenated and cut in chunks": (
        lambda x: torch.cat([x[:, 0], x[:, 1]]),
        lambda x: torch.cat(x.chunk(2), -1),
        (0, 2, 2),
    ),
    "concatenated and split": (
        lambda x: torch.cat([x[:, 0], x[:, 1]]),
        lambda x: torch.cat(torch.split(x, x.shape[0] // 2), -1),
        (0, 2, 2),
    ),
    "time first": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1).flatten(1), (1, 1, 1)),
    "time first, flattened": (
        lambda x: x.transpose(0, 1).reshape(-1, 8),
        lambda x: x.view(2, -1, 8).transpose(0, 1).flatten(1),
        (0, 2, 2),
    ),
    "repeated": (
        lambda x: x.reshape(-1, 8).repeat(3, 1),
        lambda x: x.view(3, -1, 2, 8).sum(0).flatten(1),
        (0, 6, 3),
    ),
}


@pytest.fixture(params=ARRANGEMENTS)
def arranged(request: pytest.FixtureRequest) -> tuple[LayerSequence, tuple[int, int, int]]:
    arrange, collect, place = ARRANGEMENTS[request.param]
    torch.manual_seed(0)
    return decompose(Blocks(arrange, collect), {"x": torch.randn(4, 16)}), place


def test_rows_of_a_sample_are_found(arranged: tuple[LayerSequence, tuple[int, int, int]]) -> None:
    layers, place = arranged
    assert layers.random_ops == (place,) * 3
    (value,) = layers.boundaries[2]
    assert (value.batch_dim, value.shape[place[0]]) == place[:2]


def test_a_range_of_rows_is_a_range_of_samples(arranged: tuple[LayerSequence, tuple[int, int, int]]) -> None:
    """What a forward pass over all samples leaves at a boundary can be cut for a backward pass over some of them."""
    layers, _ = arranged
    tensors, _ = layers.flatten_batch({"x": torch.randn(5, 16)})
    middle = len(layers) // 2
    whole = _values_at(layers, middle, tensors, (0, 5))
    part = _values_at(layers, middle, batch_slice(layers, ["x"], tensors, (2, 4), 5), (2, 4))
    for spec in layers.boundaries[middle]:
        assert spec.batch_dim is not None
        rows = spec.shape[spec.batch_dim]
        torch.testing.assert_close(whole[spec.name].narrow(spec.batch_dim, 2 * rows, 2 * rows), part[spec.name])


def test_masks_do_not_depend_on_how_samples_are_laid_out(arranged: tuple[LayerSequence, tuple[int, int, int]]) -> None:
    layers, _ = arranged
    x = torch.randn(6, 16)
    with reproducible_randomness(layers, 4, (0, 6)):
        expected = layers.model(x)
    torch.testing.assert_close(run_layers(layers, {"x": x}, seed=4), expected)
    parts = [run_layers(layers, {"x": x[a:b]}, seed=4, samples=(a, b)) * (b - a) / 6 for a, b in [(0, 1), (1, 6)]]
    torch.testing.assert_close(sum(parts), expected)


def _values_at(
    layers: LayerSequence, boundary: int, tensors: dict[str, Tensor], samples: tuple[int, int]
) -> dict[str, Tensor]:
    from harmony_lab.layers import LayerCall
    from harmony_lab.runtime.execution import run_forward

    call = LayerCall(samples=samples, sizes={"batch": samples[1] - samples[0]}, seed=1, device=torch.device("cpu"))
    return run_forward(layers, 0, boundary, layers.tensors, {}, {}, tensors, call, [boundary])[boundary]


# -- samples that meet ------------------------------------------------------------------------------------------------


class Meeting(nn.Module):
    """``how(hidden)`` is where samples may meet."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.how = how

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.how(self.second(torch.tanh(self.first(x))))), labels)


def _batch(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 8), "labels": torch.arange(samples) % 5}


def _attention_over_samples(x: Tensor) -> Tensor:
    sequence = x[None, None]  # (1, 1, samples, 8): a batch taken for a sequence
    return functional.scaled_dot_product_attention(sequence, sequence, sequence)[0, 0]


MEETINGS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mean over samples": (lambda x: x - x.mean(0), "aten.mean.dim"),
    "softmax over samples": (lambda x: x.softmax(0), "aten.softmax.int"),
    "running sum": (lambda x: x.cumsum(0), "aten.cumsum"),
    "shifted": (lambda x: x + x.roll(1, 0), "aten.roll"),
    "reversed": (lambda x: x + x.flip(0), "aten.flip"),
    "attention over samples": (_attention_over_samples, "aten.scaled_dot_product_attention"),
    "products of pairs": (lambda x: (x @ x.T).softmax(-1) @ x, "aten.matmul"),
    "first sample": (lambda x: x - x[0], "aten.select"),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_samples_that_meet_are_refused_by_name(name: str) -> None:
    how, op = MEETINGS[name]
    with pytest.raises(DecomposeError, match=rf"samples of a batch meet in {op}.*test_samples.py.*loss_reduction"):
        decompose(Meeting(how), _batch(4))


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted and put back": lambda x: x[x[:, 0].argsort()][x[:, 0].argsort().argsort()],
    "picked by number": lambda x: x[torch.arange(x.shape[0])],
    "softmax of each": lambda x: x.softmax(-1),
    "shifted within each": lambda x: x.roll(1, 1),
    "norm of each": lambda x: x / x.norm(dim=-1, keepdim=True),
    "maximum of each": lambda x: x - x.max(-1, keepdim=True).values,
}


@pytest.mark.parametrize("name", APART)
def test_samples_that_only_seem_to_meet_are_let_through(name: str) -> None:
    torch.manual_seed(0)
    layers = decompose(Meeting(APART[name]), _batch(4))
    assert layers.couples_samples == ()
    batch = _batch(3)
    expected = layers.model(**batch)
    found = run_layers(layers, batch)
    torch.testing.assert_close(found, expected)
    theirs = gradients(layers.model, expected)
    for key, gradient in gradients(layers.model, found).items():
        torch.testing.assert_close(gradient, theirs[key])


class Pairs(nn.Module):
    """A contrastive loss: every sample against every other."""

    def __init__(self, count: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        similar = self.first(x) @ self.second(x).T
        return functional.cross_entropy(similar, torch.arange(self.count(x)))


@pytest.mark.parametrize("count", [lambda x: x.shape[0], len], ids=["shape", "len"])
def test_a_contrastive_loss_is_refused_with_the_cure(count: Callable[[Tensor], int]) -> None:
    with pytest.raises(DecomposeError, match=r"samples of a batch meet in aten.matmul.*Pass .*loss_fn"):
        decompose(Pairs(count), {"x": torch.randn(4, 8)})


def test_a_contrastive_loss_may_be_trained_on_within_microbatches() -> None:
    layers = decompose(Pairs(lambda x: x.shape[0]), {"x": torch.randn(4, 8)}, loss_reduction="mean")
    assert layers.couples_samples == (layers.layers[-1].name,)
    x = torch.randn(3, 8)
    torch.testing.assert_close(run_layers(layers, {"x": x}), layers.model(x))


def test_samples_that_meet_without_data_to_try_are_reported() -> None:
    with torch.device("meta"):
        model = Pairs(lambda x: x.shape[0])
    layers = decompose(model, {"x": torch.randn(4, 8)})
    assert layers.couples_samples == (layers.layers[-1].name,)


# -- losses of several terms ------------------------------------------------------------------------------------------


class Terms(nn.Module):
    def __init__(self, combine: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 5), nn.Linear(8, 5)
        self.combine = combine

    def forward(self, x: Tensor, start: Tensor, end: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        return self.combine(self.left(hidden), self.right(hidden), start, end)


_cross_entropy = functional.cross_entropy
class_weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])

TERMS: dict[str, Callable[..., Tensor]] = {
    "two with labels of their own": lambda a, b, s, e: (_cross_entropy(a, s) + _cross_entropy(b, e)) / 2,
    "labels and all samples": lambda a, b, s, e: _cross_entropy(a, s) + 0.1 * b.square().mean(),
    "a mean and a sum": lambda a, b, s, e: b.square().sum() - 2 * _cross_entropy(a, s),
    "weights of classes": lambda a, b, s, e: (
        _cross_entropy(a, s, weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])) + _cross_entropy(b, e)
    ),
    "python's sum": lambda a, b, s, e: sum([_cross_entropy(a, s), _cross_entropy(b, e), a.abs().mean()]),
    "stacked": lambda a, b, s, e: torch.stack([_cross_entropy(a, s), _cross_entropy(b, e)]).mean(),
    "a count of its own": lambda a, b, s, e: (
        _cross_entropy(a, s) + (b.square().sum(1) * (e > 2)).sum() / (e > 2).sum().clamp(min=1)
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_that_count_different_things_add_up(name: str) -> None:
    torch.manual_seed(0)
    model = Terms(TERMS[name])
    start, end = torch.arange(9) % 5, (torch.arange(9) + 2) % 5
    start[[0, 1, 2, 4]] = -100  # the second microbatch has no label
    end[[6]] = -100
    batch = {"x": torch.randn(9, 8), "start": start, "end": end}
    layers = decompose(model, batch)
    expected = model(**batch)
    found = _in_microbatches(layers, batch, [0, 4, 5, 9])
    torch.testing.assert_close(found, expected)
    theirs = gradients(model, expected)
    for key, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(run_layers(layers, batch), expected)


def _in_microbatches(layers: LayerSequence, batch: dict[str, Any], edges: list[int]) -> Tensor:
    """As a runner does it: the minibatch is taken apart once, then cut."""
    tensors, _ = layers.flatten_batch(batch)
    names = [spec.name for spec in layers.batch]
    losses, weights = [], []
    for start, stop in pairwise(edges):
        part = batch_slice(layers, names, tensors, (start, stop), edges[-1])
        losses.append(run_flat(layers, part, seed=0, samples=(start, stop)))
        weights.append(layers.loss_weight(part))
    return torch.stack([loss * weight / sum(weights) for loss, weight in zip(losses, weights, strict=True)]).sum()


# -- what depends on the data, and caches -----------------------------------------------------------------------------


def test_a_loss_over_chosen_positions_is_refused_with_the_cure() -> None:
    model = Terms(lambda a, b, s, e: _cross_entropy(a[s > 1], s[s > 1]) + b.mean())
    batch = {"x": torch.randn(4, 8), "start": torch.arange(4), "end": torch.arange(4)}
    with pytest.raises(DecomposeError, match=r"aten.index.Tensor.*test_samples.py.*depends on the data.*ignore_index"):
        decompose(model, batch)


class Cached(nn.Module):
    """Keeps what it has seen in a buffer, and attends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.cache.add_(hidden.detach().mean(0))
        return (hidden * self.cache).mean()


def test_a_cache_that_the_output_depends_on_is_refused_by_name() -> None:
    with pytest.raises(DecomposeError, match="depends on buffer cache"):
        decompose(Cached(), {"x": torch.randn(4, 8)})


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: (
            0.7 * functional.cross_entropy(output, target) + 0.3 * functional.cross_entropy(output, target.flip(0))
        ),
        lambda output, target: functional.cross_entropy(output.roll(1, 0), target),
        lambda output, target: functional.cross_entropy(output[torch.arange(output.shape[0]).flip(0)], target),
    ],
    ids=["flipped targets", "rolled outputs", "reversed outputs"],
)
def test_samples_that_trade_places_are_refused_though_the_first_two_have_one_label(loss: Any) -> None:
    torch.manual_seed(0)
    model, inputs, targets = (
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)),
        torch.randn(6, 4),
        [1, 1, 0, 2, 1, 0],
    )
    with pytest.raises(DecomposeError, match="samples of a batch meet"):
        decompose(model, (inputs, torch.tensor(targets)), loss)


def test_a_metric_in_the_place_of_the_loss_is_refused() -> None:
    class MetricFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = self.head(inputs)
            return (outputs.argmax(1) == targets).float().mean(), functional.cross_entropy(outputs, targets)

    with pytest.raises(DecomposeError, match="no trainable parameter"):
        decompose(MetricFirst(), (torch.randn(4, 4), torch.tensor([0, 1, 2, 0])))


def test_layers_that_leave_a_part_of_the_model_out_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    batch = (torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(DecomposeError, match=r"2\.weight, 2\.bias would not be trained"):
        decompose(model, batch, nn.CrossEntropyLoss(), layers=list(model)[:2])
