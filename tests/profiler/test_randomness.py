"""Random masks are a function of (seed, sample, op): not of the split, the order, or who runs them."""

from collections.abc import Callable

import pytest
import torch
from models import dropout_mlp, gpt2, gpt2_batch, gradients
from torch import nn
from torch.nn import functional

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerCall, LayerSequence
from harmony_lab.profiler import randomness
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.randomness import BatchDim, reproducible_randomness, sample_seed
from harmony_lab.profiler.reference import run_layers


def call(samples: tuple[int, int], seed: int = 0, first: int = 0) -> LayerCall:
    size = samples[1] - samples[0]
    return LayerCall(
        samples=samples, sizes={"batch": size}, seed=seed, device=torch.device("cpu"), first_random_op=first
    )


def mask(samples: tuple[int, int] = (0, 4), seed: int = 0, op: int = 0, first: int = 0) -> torch.Tensor:
    ones = torch.ones(samples[1] - samples[0], 50)
    return randomness.dropout(call(samples, seed, first), op, BatchDim(0, 1), ones, 0.5)


def test_equal_seed_sample_and_op_give_equal_masks() -> None:
    assert torch.equal(mask(), mask())
    assert torch.equal(mask(op=3), mask(op=1, first=2))


def test_masks_differ_between_seeds_samples_and_ops() -> None:
    assert not torch.equal(mask(), mask(seed=1))
    assert not torch.equal(mask(), mask(op=1))
    rows = mask((0, 20))
    assert len({tuple(row.tolist()) for row in rows}) == 20


def test_masks_do_not_depend_on_the_split() -> None:
    assert torch.equal(mask((0, 8)), torch.cat([mask((0, 3)), mask((3, 4)), mask((4, 8))]))


def test_several_rows_of_one_sample_stay_together() -> None:
    ones = torch.ones(12, 50)
    whole = randomness.dropout(call((0, 4)), 0, BatchDim(0, 3), ones, 0.5)
    last = randomness.dropout(call((3, 4)), 0, BatchDim(0, 3), ones[:3], 0.5)
    assert torch.equal(whole[9:], last)
    assert not torch.equal(whole[0], whole[1])


def test_dropout_keeps_the_expected_share_and_scales_it() -> None:
    kept = randomness.dropout(call((0, 100)), 0, BatchDim(0, 1), torch.ones(100, 1000), 0.3)
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert kept.ne(0).float().mean().item() == pytest.approx(0.7, abs=0.01)
    assert torch.equal(randomness.dropout(call((0, 2)), 0, BatchDim(0, 1), torch.ones(2, 3), 1.0), torch.zeros(2, 3))


def test_drawing_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    mask()
    assert torch.equal(torch.rand(3), expected)


def test_seeds_are_spread() -> None:
    low = {sample_seed(seed, sample, op) & 0xFFFFFFFF for seed in range(10) for sample in range(10) for op in range(10)}
    assert len(low) == 1000


@pytest.mark.parametrize(("masked", "causal"), [("none", False), ("none", True), ("bool", False), ("float", False)])
def test_attention_without_dropout_equals_torch(masked: str, causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    hidden = torch.rand(2, 1, 5, 6) < 0.4
    hidden[0, 0, 2] = True  # a row that sees nothing
    options: dict[str, torch.Tensor | None] = {"none": None, "bool": ~hidden, "float": hidden.float() * -3.0}
    arguments = {"attn_mask": options[masked], "is_causal": causal, "scale": 0.3, "enable_gqa": True}
    expected = functional.scaled_dot_product_attention(query, key, value, **arguments)
    found = randomness.attention(call((0, 2)), 0, BatchDim(0, 1), query, key, value, dropout_p=0.0, **arguments)
    torch.testing.assert_close(found, expected)


@pytest.fixture(scope="module")
def gpt2_layers() -> LayerSequence:
    return decompose(gpt2(layers=2), gpt2_batch(4))


def test_equal_layers_draw_different_masks(gpt2_layers: LayerSequence) -> None:
    ranges = [(layer.first_random_op, layer.num_random_ops) for layer in gpt2_layers.layers]
    assert ranges == [(0, 1), (1, 3), (4, 3), (0, 0)]
    assert gpt2_layers.random_ops == ((0, 1, 1),) * 7


def test_loss_repeats_with_the_seed_and_changes_with_it(gpt2_layers: LayerSequence) -> None:
    batch = gpt2_batch(4)
    first, again, other = (run_layers(gpt2_layers, batch, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, run_layers(gpt2_layers, batch, seed=3, samples=(4, 8)))


def test_minibatch_in_parts_equals_the_plain_model_on_all_of_it(gpt2_layers: LayerSequence) -> None:
    batch = gpt2_batch(5)
    with reproducible_randomness(gpt2_layers, 9, (0, 5)):
        expected = gpt2_layers.model(**batch).loss
    parts = [(0, 2), (2, 5)]
    losses = [
        run_layers(gpt2_layers, {name: tensor[a:b] for name, tensor in batch.items()}, seed=9, samples=(a, b))
        * (b - a)
        / 5
        for a, b in parts
    ]
    torch.testing.assert_close(sum(losses), expected)


def test_wrong_sample_range_is_refused(gpt2_layers: LayerSequence) -> None:
    with pytest.raises(DecomposeError, match="samples="), reproducible_randomness(gpt2_layers, 9, (0, 4)):
        gpt2_layers.model(**gpt2_batch(5))


class Noisy(nn.Module):
    """A body of random ops between two linear layers."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.body(self.first(x))).square().mean()


BODIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout in place": lambda x: functional.dropout(x * 1, 0.4, inplace=True),
    "dropout of channels": lambda x: functional.dropout1d(x[:, :, None], 0.4)[:, :, 0],
    "dropout that is off, then on": lambda x: functional.dropout(functional.dropout(x, 0.4, training=False), 0.4),
    "dropped result, then used": lambda x: (
        x + 0 * functional.dropout(x.detach(), 0.5).sum() + functional.dropout(x, 0.4)
    ),
    "stochastic depth": lambda x: x * x.new_empty(x.shape[0], 1).bernoulli_(0.6) / 0.6,
    "depth from rand": lambda x: x * (0.6 + torch.rand(x.shape[0], 1)).floor(),
    "noise": lambda x: x + torch.randn_like(x) * 0.1,
    "bernoulli of probabilities": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
    "batch in dimension 1": lambda x: functional.dropout(x.t().contiguous(), 0.4).t(),
    "rows of a sample": lambda x: functional.dropout(x.reshape(-1, 4), 0.4).reshape(-1, 8),
}


@pytest.mark.parametrize("name", BODIES)
def test_plain_model_and_layers_draw_alike_and_independently_of_the_split(name: str) -> None:
    torch.manual_seed(0)
    model = Noisy(BODIES[name])
    x = torch.randn(6, 8)
    layers = decompose(model, {"x": x})
    with reproducible_randomness(layers, 2, (0, 6)):
        expected = model(x)
    whole = run_layers(layers, {"x": x}, seed=2)
    parts = sum(run_layers(layers, {"x": x[a:b]}, seed=2, samples=(a, b)) * (b - a) / 6 for a, b in [(0, 1), (1, 6)])
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(parts, expected)
    assert not torch.equal(whole, run_layers(layers, {"x": x}, seed=3))
    theirs = gradients(model, expected)
    for key, gradient in gradients(model, whole).items():
        torch.testing.assert_close(gradient, theirs[key])


def test_transformer_encoder_layer_draws_alike() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x).square().mean((1, 2)).mean()

    model, x = Model(), torch.randn(5, 3, 8)
    layers = decompose(model, {"x": x})
    assert len(layers.random_ops) == 8
    with reproducible_randomness(layers, 2, (0, 5)):
        expected = model(x)
    torch.testing.assert_close(run_layers(layers, {"x": x}, seed=2), expected)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("aten.multinomial", lambda x: x * torch.multinomial(torch.ones(8), 8)),
        ("aten.alpha_dropout", lambda x: functional.alpha_dropout(x, 0.2, training=True)),
        ("aten.rrelu", lambda x: functional.rrelu(x, training=True)),
    ],
)
def test_unsupported_random_op_is_refused_by_name(name: str, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(DecomposeError, match=name):
        decompose(Noisy(body), {"x": torch.randn(4, 8)})


def test_random_op_inside_no_grad_is_refused_by_name() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            noise = functional.dropout(torch.ones_like(x), 0.5)
        return x * noise

    with pytest.raises(DecomposeError, match=r"aten.dropout.default"):
        decompose(Noisy(body), {"x": torch.randn(4, 8)})


def test_dropout_in_eval_mode_draws_nothing() -> None:
    model = dropout_mlp().eval()
    layers = decompose(model, (torch.randn(4, 16), torch.randn(4, 16)), functional.mse_loss)
    assert layers.random_ops == ()
    assert len({layer.kind for layer in layers.layers[:-1]}) <= 2
