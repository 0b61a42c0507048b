"""Losses that are no mean over samples are refused with their line and a cure; what no sample enters adds up."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerSequence
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.reference import run_flat
from harmony_lab.runtime.moves import batch_slice

Loss = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)
        self.uncertainty = nn.Parameter(torch.tensor(0.3))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, self.second(torch.tanh(self.first(x))), labels)


def batch(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    labels = torch.arange(samples) % 5
    labels[:2] = -100
    return {"x": torch.randn(samples, 8, generator=generator), "labels": labels}


def squares(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


REFUSED: dict[str, tuple[Loss, str]] = {
    "variance over samples": (
        lambda m, y, t: y.square().mean() + y.var(0).mean(),
        "samples of a batch meet in aten.var.*looks at each sample alone",
    ),
    "root of the mean": (
        lambda m, y, t: torch.sqrt(y.square().mean()),
        "aten.sqrt.*no mean of sqrt.*Train on what is inside",
    ),
    "exponential": (lambda m, y, t: functional.cross_entropy(y, t).exp(), "aten.exp.*no mean of exp"),
    "norm of everything": (lambda m, y, t: y.norm(), "samples of a batch meet in aten.linalg_vector_norm"),
    "the worst sample": (lambda m, y, t: y.square().max(), "samples of a batch meet in aten.max"),
    "product of means": (lambda m, y, t: y.square().mean() * y.abs().mean(), "aten.mul.*product.*before the mean"),
    "ratio of sums": (lambda m, y, t: y.square().sum() / y.abs().sum(), "aten.div.*ratio.*before the mean"),
    "a penalty over the samples": (lambda m, y, t: (y.square().sum() + squares(m)) / y.shape[0], "aten.div"),
    "as many times as samples": (lambda m, y, t: y.square().mean() * y.shape[0], "scaled by the number of samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_do_not_add_up_are_refused_with_line_and_cure(name: str) -> None:
    loss, message = REFUSED[name]
    with pytest.raises(DecomposeError, match=f"(?s){message}.*one microbatch") as refused:
        decompose(Net(loss), batch(6))
    assert "test_loss_refusals.py" in str(refused.value)
    assert "<lambda>" in str(refused.value)


def test_a_refused_loss_may_be_trained_on_within_microbatches() -> None:
    net = Net(REFUSED["root of the mean"][0])
    layers = decompose(net, batch(6), loss_reduction="mean")
    torch.testing.assert_close(_in_microbatches(layers, batch(6), [0, 6]), net(**batch(6)))


def test_a_length_that_makes_the_number_of_samples_a_constant_is_named() -> None:
    net = Net(lambda m, y, t: y.square().sum() / len(y))
    with pytest.raises(DecomposeError, match=r"test_loss_refusals\.py.*len\(y\).*write x\.shape\[0\]"):
        decompose(net, batch(6))


ADDING_UP: dict[str, Loss] = {
    "penalty on weights": lambda m, y, t: functional.cross_entropy(y, t) + 0.1 * squares(m.second),
    "penalty beside a sum": lambda m, y, t: y.square().sum() + 0.1 * squares(m.second),
    "penalty beside two terms": lambda m, y, t: functional.cross_entropy(y, t) + y.abs().sum() + squares(m.second),
    "a number beside a sum": lambda m, y, t: y.square().sum() + 3.0,
    "learned weights of terms": lambda m, y, t: (
        functional.cross_entropy(y, t) * torch.exp(-m.uncertainty) + m.uncertainty
    ),
    "learned scale": lambda m, y, t: y.square().mean() / (1 + m.uncertainty.square()),
    "subtracted from one": lambda m, y, t: 1 - torch.cos(y).mean(),
}


@pytest.mark.parametrize("name", ADDING_UP)
@pytest.mark.filterwarnings("ignore:the loss reads parameters")
def test_what_no_sample_enters_adds_up(name: str) -> None:
    torch.manual_seed(0)
    net = Net(ADDING_UP[name])
    layers = decompose(net, batch(6))
    expected = net(**batch(9))
    found = _in_microbatches(layers, batch(9), [0, 2, 3, 9])  # no label counts in the first
    torch.testing.assert_close(found, expected)
    ours, theirs = (
        torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True)
        for loss in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_penalty_on_all_weights_is_said_to_gather_them() -> None:
    deep = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    with pytest.warns(UserWarning, match=r"needs them all on the device.*weight_decay"):
        decompose(deep, (torch.randn(4, 8), torch.randn(4, 8)), lambda y, t: (y - t).square().mean() + squares(deep))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_samples_that_meet_in_a_module_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 8))
    given = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(DecomposeError, match=r"samples of a batch meet in layer 1.*one microbatch"):
        decompose(model, given, functional.mse_loss, layers=list(model))
    assert len(decompose(model, given, functional.mse_loss, layers=list(model), loss_reduction="mean")) == 3


def _in_microbatches(layers: LayerSequence, whole: dict[str, Tensor], edges: list[int]) -> Tensor:
    tensors, _ = layers.flatten_batch(whole)
    names = [spec.name for spec in layers.batch]
    losses, weights = [], []
    for start, stop in pairwise(edges):
        part = batch_slice(layers, names, tensors, (start, stop), edges[-1])
        losses.append(run_flat(layers, part, seed=0, samples=(start, stop)))
        weights.append(layers.loss_weight(part))
    total = sum(weights) if layers.loss_reduction == "mean" else 1.0
    return torch.stack([loss * weight / total for loss, weight in zip(losses, weights, strict=True)]).sum()


@pytest.mark.parametrize(
    ("inputs", "targets", "loss_fn", "said"),
    [
        ((16, 9), (16, 4), nn.MSELoss(), "(inputs: 16x9, targets: 16x4)"),
        ((16, 8), (9, 4), nn.MSELoss(), "(inputs: 16x8, targets: 9x4)"),
        ((16, 8), (16, 4), lambda output, targets: (output - targets).square().mean(1), "return the mean or sum"),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_a_batch_that_the_model_or_the_loss_does_not_take_is_named(
    inputs: tuple[int, ...],
    targets: tuple[int, ...],
    loss_fn: Callable[..., Tensor],
    said: str,
    captured: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(DecomposeError) as refused:
        decompose(_Wrapped(model) if captured else model, (torch.zeros(inputs), torch.zeros(targets)), loss_fn)
    assert said in str(refused.value)
    shown = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not shown, "torch shows a hundred lines of its own calls"


class _Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        return output
