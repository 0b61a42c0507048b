"""decompose: layers compute what the plain model computes, and say what crosses between them."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import MLP, ConvNet, dropout_mlp, gpt2, gpt2_batch, gradients, llama, mlp_batch, sequential
from torch import nn
from torch.nn import functional

from harmony_lab.errors import DecomposeError
from harmony_lab.layers import LayerSequence
from harmony_lab.profiler.decompose import decompose
from harmony_lab.profiler.randomness import reproducible_randomness
from harmony_lab.profiler.reference import run_layers


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same_training(
    layers: LayerSequence, model: nn.Module, plain: Callable[[nn.Module, Any], torch.Tensor], batch: Any, samples: int
) -> None:
    """Loss, every gradient and every buffer equal those of a copy of the model run by plain PyTorch."""
    reference = copy.deepcopy(model)
    with reproducible_randomness(layers, 3, (0, samples)):
        expected = plain(reference, batch)
    before = buffers_of(model)
    found = run_layers(layers, batch, seed=3)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    ours, theirs = gradients(model, found), gradients(reference, expected)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-6, atol=1e-7)
        model.get_buffer(name).copy_(before[name])


def by_keyword(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch)["loss"]


def with_cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def gpt2_layers() -> LayerSequence:
    return decompose(gpt2(), gpt2_batch(4))


@pytest.fixture(scope="module")
def llama_layers() -> LayerSequence:
    return decompose(llama(), gpt2_batch(4))


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_gpt2_with_dropout_trains_as_plain(gpt2_layers: LayerSequence, samples: int) -> None:
    batch = gpt2_batch(samples, seed=samples)
    assert_same_training(gpt2_layers, gpt2_layers.model, by_keyword, batch, samples)


@pytest.mark.parametrize("samples", [1, 3])
def test_llama_trains_as_plain(llama_layers: LayerSequence, samples: int) -> None:
    assert_same_training(llama_layers, llama_layers.model, by_keyword, gpt2_batch(samples, seed=samples), samples)


@pytest.mark.parametrize("samples", [2, 9])
def test_plain_module_with_batch_norm_and_in_place_relu_trains_as_plain(samples: int) -> None:
    torch.manual_seed(0)
    model = MLP().double()
    layers = decompose(model, _double(mlp_batch(4)), nn.CrossEntropyLoss())
    assert_same_training(layers, model, with_cross_entropy, _double(mlp_batch(samples)), samples)
    assert len(layers) > 1


@pytest.mark.parametrize("samples", [2, 9])
def test_sequential_trains_as_plain(samples: int) -> None:
    model = sequential().double()
    layers = decompose(model, _double(mlp_batch(4)), functional.cross_entropy)
    assert [layer.name for layer in layers.layers] == ["0", "1", "3", "5"]
    assert_same_training(layers, model, with_cross_entropy, _double(mlp_batch(samples)), samples)


@pytest.mark.parametrize("samples", [1, 6])
def test_skip_connection_around_layers_trains_as_plain(samples: int) -> None:
    torch.manual_seed(0)
    model = ConvNet()

    def batch(count: int) -> dict[str, torch.Tensor]:
        return {"images": torch.randn(count, 1, 6, 6), "labels": torch.arange(count) % 5}

    layers = decompose(model, batch(4))
    assert_same_training(layers, model, by_keyword, batch(samples), samples)


def _double(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0].double(), batch[1]


# -- layers and kinds
# -----------------------------------------------------------------------------------------------------


def test_equal_blocks_share_kind_and_function(gpt2_layers: LayerSequence) -> None:
    blocks = gpt2_layers.layers[1:-1]
    assert [layer.name for layer in blocks] == [f"transformer.h.{i}" for i in range(4)]
    assert len({layer.kind for layer in blocks}) == 1
    assert len({id(layer.function) for layer in blocks}) == 1
    assert len({layer.parameters for layer in blocks}) == 4
    assert gpt2_layers.num_kinds == 3


def test_frozen_block_is_another_kind() -> None:
    model = gpt2(layers=3)
    for parameter in model.transformer.h[1].parameters():
        parameter.requires_grad_(False)
    kinds = [layer.kind for layer in decompose(model, gpt2_batch(4)).layers]
    assert kinds[1] == kinds[3] != kinds[2]


def test_only_hidden_states_cross_between_blocks(llama_layers: LayerSequence) -> None:
    for boundary in llama_layers.boundaries[1:-1]:
        (hidden,) = boundary
        assert (hidden.shape, hidden.batch_dim, hidden.requires_grad) == ((1, 16, 32), 0, True)
        assert hidden.num_bytes(5) == 5 * 16 * 32 * 4
    assert [layer.batch_inputs for layer in llama_layers.layers] == [("input_ids",), (), (), (), ("labels",)]


def test_value_read_later_is_carried_through_the_layers_between() -> None:
    batch = {"images": torch.randn(4, 1, 6, 6), "labels": torch.arange(4)}
    layers = decompose(ConvNet(), batch)
    skip = layers.layers[0].outputs[0]
    assert all(skip in {spec.name for spec in boundary} for boundary in layers.boundaries[1:-1])
    assert skip not in layers.layers[2].inputs
    assert skip in layers.layers[-1].inputs


def test_last_boundary_is_the_loss(gpt2_layers: LayerSequence) -> None:
    (loss,) = gpt2_layers.boundaries[-1]
    assert (loss.shape, loss.batch_dim, loss.requires_grad) == ((), None, True)
    assert gpt2_layers.layers[-1].outputs == (loss.name,)
    assert gpt2_layers.boundaries[0] == ()


def test_values_have_the_shapes_their_specs_say(gpt2_layers: LayerSequence) -> None:
    from harmony_lab.layers import LayerCall

    tensors, sizes = gpt2_layers.flatten_batch(gpt2_batch(3))
    values: dict[str, torch.Tensor] = {}
    for layer, boundary in zip(gpt2_layers.layers, gpt2_layers.boundaries[1:], strict=True):
        call = LayerCall(samples=(0, 3), sizes=sizes, seed=0, device=torch.device("cpu"))
        state = [gpt2_layers.tensors[name] for name in layer.parameters]
        buffers = [gpt2_layers.tensors[name] for name in layer.buffers]
        inputs = [values[name] for name in layer.inputs]
        outputs = layer.function(state, buffers, inputs, [tensors[name] for name in layer.batch_inputs], call)
        values.update(zip(layer.outputs, outputs, strict=True))
        for spec in boundary:
            value = values[spec.name]
            expected = [n * 3 if dim == spec.batch_dim else n for dim, n in enumerate(spec.shape)]
            assert list(value.shape) == expected
            assert value.requires_grad == spec.requires_grad
            assert value.numel() * value.element_size() == spec.num_bytes(3)


def test_tied_embedding_and_head_are_one_parameter(gpt2_layers: LayerSequence) -> None:
    spec = gpt2_layers.state["transformer.wte.weight"]
    assert spec.layers == (0, 5)
    assert "lm_head.weight" not in gpt2_layers.state
    assert gpt2_layers.tensors["transformer.wte.weight"] is gpt2_layers.model.lm_head.weight
    assert set(gpt2_layers.state) == {name for name, _ in gpt2_layers.model.named_parameters()}


def test_frozen_parameters_are_not_trainable_and_values_above_them_need_no_gradient() -> None:
    model = gpt2(layers=3)
    model.transformer.wte.weight.requires_grad_(False)
    model.transformer.wpe.weight.requires_grad_(False)
    layers = decompose(model, gpt2_batch(4))
    assert not layers.state["transformer.wte.weight"].trainable
    assert layers.state["transformer.ln_f.weight"].trainable
    assert [spec.requires_grad for boundary in layers.boundaries[1:] for spec in boundary] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert_same_training(layers, model, by_keyword, gpt2_batch(2), 2)


class SharedBias(nn.Module):
    """Every block adds a bias that is computed once, from a parameter, and is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = functional.dropout(self.table(torch.arange(3)).sum(0), 0.1)
        for block in self.blocks:
            x = torch.tanh(block(x) + bias)
        return x.square().mean()


def test_value_without_samples_crosses_with_its_gradient() -> None:
    torch.manual_seed(0)
    model = SharedBias()
    layers = decompose(model, {"x": torch.randn(4, 8)})
    bias = layers.boundaries[1][0]
    assert (bias.shape, bias.batch_dim, bias.requires_grad, bias.num_bytes(7)) == ((8,), None, True, 32)
    assert all(bias in boundary for boundary in layers.boundaries[1:-1])
    assert_same_training(layers, model, lambda m, b: m(**b), {"x": torch.randn(3, 8)}, 3)


def test_compiled_model_gives_the_plain_models_names() -> None:
    model = MLP()
    layers = decompose(torch.compile(model), mlp_batch(4), functional.cross_entropy)
    assert set(layers.state) == {name for name, _ in model.named_parameters()}
    assert layers.model is model


def test_stages_of_blocks_are_cut_into_their_blocks() -> None:
    class Stage(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)))
            self.grow = nn.Linear(width, 2 * width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.grow(self.blocks(x))

    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([Stage(8), Stage(16), nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self.stages:
                x = stage(x)
            return x.square().mean()

    names = [layer.name for layer in decompose(Staged(), {"x": torch.randn(4, 8)}).layers]
    assert names == ["stages.0", "stages.1", "stages.2.0", "stages.2.1", "stages.2.2", "stages.2.3"]


def test_cut_names_modules() -> None:
    layers = decompose(gpt2(), gpt2_batch(4), cut=["transformer.h.1", "transformer.h.2.mlp"])
    assert [layer.name for layer in layers.layers][1:] == ["transformer.h.1", "transformer.h.2.mlp"]
    assert_same_training(layers, layers.model, by_keyword, gpt2_batch(3), 3)
    with pytest.raises(DecomposeError, match=r"no module 'transformer.h.9'.*transformer.h"):
        decompose(gpt2(), gpt2_batch(4), cut=["transformer.h.9"])


class Flat(nn.Module):
    """Attention blocks whose parameters lie all in one module."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        shapes = {"query": 1, "key": 1, "value": 1, "out": 1}
        for block in range(blocks):
            for name in shapes:
                self.register_parameter(f"{name}_{block}", nn.Parameter(torch.randn(width, width) / width))
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in range(self.blocks):
            query, key, value, out = (self.get_parameter(f"{n}_{block}") for n in ("query", "key", "value", "out"))
            heads = (functional.linear(x, weight) for weight in (query, key, value))
            x = x + functional.linear(functional.scaled_dot_product_attention(*heads), out)
        return x.square().mean()


def test_model_without_modules_is_cut_where_little_crosses() -> None:
    torch.manual_seed(0)
    layers = decompose(Flat(), {"x": torch.randn(4, 5, 8)})
    ends = [layer.parameters[-1] for layer in layers.layers]
    assert {"out_0", "out_1", "out_2"} <= set(ends)  # each block ends a layer: there only x crosses
    assert all(len(boundary) <= 2 for boundary in layers.boundaries)  # never query, key, value and x
    assert_same_training(layers, layers.model, lambda m, b: m(**b), {"x": torch.randn(3, 5, 8)}, 3)


def test_fingerprint_depends_on_the_model_not_on_the_weights_values() -> None:
    def fingerprint(p: float) -> str:
        model = dropout_mlp(p=p)
        with torch.no_grad():
            model[0][0].weight.normal_()
        return decompose(model, (torch.randn(4, 16), torch.randn(4, 16)), functional.mse_loss).fingerprint

    assert fingerprint(0.1) == fingerprint(0.1) != fingerprint(0.2)


def test_model_is_left_as_it_was() -> None:
    model = MLP().train()
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    state = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    decompose(model, mlp_batch(4), functional.cross_entropy)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


# -- batches
# --------------------------------------------------------------------------------------------------------------


def test_labels_given_as_the_same_tensor_stay_an_input_of_their_own() -> None:
    tokens = gpt2_batch(4)["input_ids"]
    layers = decompose(gpt2(layers=2), {"input_ids": tokens, "labels": tokens})
    assert layers.layers[0].batch_inputs == ("input_ids",)
    assert_same_training(layers, layers.model, by_keyword, gpt2_batch(3), 3)


def test_another_sequence_length_is_refused_with_the_cure(gpt2_layers: LayerSequence) -> None:
    with pytest.raises(DecomposeError, match=r"input_ids has length 12 in dimension 1, expected 16.*pad or trim to 16"):
        gpt2_layers.flatten_batch(gpt2_batch(4, length=12))


def test_batches_of_another_structure_are_refused(gpt2_layers: LayerSequence) -> None:
    batch = gpt2_batch(4)
    with pytest.raises(DecomposeError, match=r"expected a mapping of \['input_ids', 'labels'\]"):
        gpt2_layers.flatten_batch({"input_ids": batch["input_ids"]})
    with pytest.raises(DecomposeError, match="labels has 3 samples where another tensor has 4"):
        gpt2_layers.flatten_batch({"input_ids": batch["input_ids"], "labels": batch["labels"][:3]})
    with pytest.raises(DecomposeError, match=r"input_ids is torch.float32, expected torch.int64"):
        gpt2_layers.flatten_batch({**batch, "input_ids": batch["input_ids"].float()})


def test_example_of_one_sample_gives_layers_for_any_number() -> None:
    layers = decompose(gpt2(layers=2), gpt2_batch(1))
    assert layers.example_sizes == {"batch": 1}
    assert_same_training(layers, layers.model, by_keyword, gpt2_batch(5), 5)


def test_sequence_as_long_as_the_batch_is_not_mistaken_for_it() -> None:
    layers = decompose(gpt2(layers=2), gpt2_batch(16))
    assert_same_training(layers, layers.model, by_keyword, gpt2_batch(3), 3)


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None


class Nested(nn.Module):
    """Takes a dataclass, a nested list, a flag, None, and a table shared by all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, pair: Pair, extra: list[Any], table: torch.Tensor, *, square: bool) -> torch.Tensor:
        assert pair.right is None
        hidden = self.first(pair.left) + extra[0]["bias"] + table
        hidden = hidden**2 if square else hidden
        return self.second(hidden).mean()


def test_nested_batches_with_flags_none_and_shared_tensors() -> None:
    def batch(samples: int, *, square: bool = True) -> dict[str, Any]:
        pair = Pair(torch.randn(samples, 8), None)
        return {"table": torch.randn(8), "pair": pair, "extra": [{"bias": torch.randn(samples, 8)}], "square": square}

    layers = decompose(Nested(), batch(4))
    assert {spec.name: spec.batch_dim for spec in layers.batch} == {"pair.left": 0, "extra.0.bias": 0, "table": None}
    assert_same_training(layers, layers.model, lambda model, b: model(**b), batch(3), 3)
    with pytest.raises(DecomposeError, match=r"'square'.* is False, but the model was decomposed with True"):
        layers.flatten_batch(batch(4, square=False))


# -- the loss
# -------------------------------------------------------------------------------------------------------------


def minibatch_loss(layers: LayerSequence, batch: dict[str, torch.Tensor], splits: list[int]) -> torch.Tensor:
    """The minibatch's loss from microbatches."""
    total, weights, start = torch.zeros(()), 0.0, 0
    for size in splits:
        part = {name: tensor[start : start + size] for name, tensor in batch.items()}
        weight = layers.loss_weight(layers.flatten_batch(part)[0])
        total = total + run_layers(layers, part, seed=5, samples=(start, start + size)) * weight
        weights += weight
        start += size
    return total / weights if layers.loss_reduction == "mean" else total


@pytest.mark.parametrize("splits", [[8], [3, 3, 2], [4, 1, 3]])
def test_uneven_counts_of_ignored_labels_give_the_whole_minibatchs_gradients(
    gpt2_layers: LayerSequence, splits: list[int]
) -> None:
    batch = gpt2_batch(8)
    for sample, ignored in enumerate([0, 5, 9, 14, 16, 3, 0, 12]):  # sample 4 has no label at all
        batch["labels"][sample, 16 - ignored :] = -100
    with reproducible_randomness(gpt2_layers, 5, (0, 8)):
        expected = gpt2_layers.model(**batch).loss
    found = minibatch_loss(gpt2_layers, batch, splits)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    theirs = gradients(gpt2_layers.model, expected)
    for name, gradient in gradients(gpt2_layers.model, found).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-7)


class WithLoss(nn.Module):
    """A linear model whose loss is computed by a given function of (prediction, target, mask)."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)
        self.loss = loss

    def forward(self, x: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.loss(self.second(torch.tanh(self.first(x))), target, mask)


class_weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mean squared error": lambda y, t, m: functional.mse_loss(y, functional.one_hot(t, 5).float()),
    "summed": lambda y, t, m: functional.cross_entropy(y, t, reduction="sum"),
    "mean of losses per sample, scaled": lambda y, t, m: (
        3 * functional.cross_entropy(y, t, reduction="none").mean() / 2
    ),
    "sum over samples by their number": lambda y, t, m: y.square().sum() / y.shape[0],
    "sum over a mask by its count": lambda y, t, m: (y.square().sum(1) * m).sum() / m.sum().clamp(min=1),
    "class weights": lambda y, t, m: functional.cross_entropy(y, t, weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])),
    "sum of two means": lambda y, t, m: functional.mse_loss(y, torch.zeros_like(y)) + 0.5 * y.abs().mean(),
    "other ignored label": lambda y, t, m: functional.cross_entropy(y, t, ignore_index=2),
    "probabilities": lambda y, t, m: functional.cross_entropy(y, functional.one_hot(t, 5).float() * 0.9 + 0.02),
    "log likelihood": lambda y, t, m: functional.nll_loss(y.log_softmax(-1), t),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_uneven_microbatches_add_up(name: str) -> None:
    torch.manual_seed(0)
    model = WithLoss(LOSSES[name])
    x, target = mlp_batch(9)
    batch = {"x": x, "target": target, "mask": (torch.arange(9) % 4 != 0).float()}
    layers = decompose(model, batch)
    expected = model(**batch)
    found = minibatch_loss(layers, batch, [4, 1, 4])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    theirs = gradients(model, expected)
    for key, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-4, atol=1e-6)


def test_loss_that_is_no_mean_or_sum_is_refused_unless_declared() -> None:
    model = WithLoss(lambda y, t, m: functional.cross_entropy(y, t).exp())
    x, target = mlp_batch(4)
    batch = {"x": x, "target": target, "mask": torch.ones(4)}
    with pytest.raises(DecomposeError, match=r"aten.exp.default.*loss_reduction"):
        decompose(model, batch)
    assert decompose(model, batch, loss_reduction="mean").loss_weight({**batch}) == 4.0


def test_model_without_a_loss_is_refused_with_the_cure() -> None:
    with pytest.raises(DecomposeError, match=r"no loss in it.*loss_fn"):
        decompose(gpt2(layers=2), {"input_ids": gpt2_batch(4)["input_ids"]})
    with pytest.raises(DecomposeError, match="the model returned a 2-dimensional tensor and no loss in it"):
        decompose(torch.nn.Linear(3, 2), {"input": torch.ones(4, 3)})
    with pytest.raises(DecomposeError, match=r"a batch is \(inputs, targets\)"):
        decompose(MLP(), mlp_batch(4)[0], functional.cross_entropy)


# -- buffers and in-place ops
# -----------------------------------------------------------------------------------------------


def test_batch_norm_is_reported_with_its_decay() -> None:
    layers = decompose(MLP(), mlp_batch(4), functional.cross_entropy)
    assert layers.buffer_decay == {
        "norm.running_mean": pytest.approx(0.9),
        "norm.running_var": pytest.approx(0.9),
        "norm.num_batches_tracked": 1.0,
    }
    (coupled,) = layers.couples_samples
    (layer,) = [layer for layer in layers.layers if layer.name == coupled]
    assert set(layer.updated_buffers) == set(layers.buffer_decay)
    with pytest.warns(UserWarning, match="eval mode"):
        assert decompose(MLP().eval(), mlp_batch(4), functional.cross_entropy).couples_samples == ()


class InPlaceAtCut(nn.Module):
    """The second block changes what the first computed, or a part of it; the head may read the value too."""

    def __init__(self, *, head_reads: bool, part: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head_reads, self.part = head_reads, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](x) + (first[:, :4].relu_().sum() if self.part else first.relu_())
        third = self.blocks[2](second)
        return (third + first if self.head_reads else third).square().mean()


@pytest.mark.parametrize("head_reads", [False, True])
def test_in_place_op_on_a_layers_input_leaves_the_input_as_it_was(head_reads: bool) -> None:
    torch.manual_seed(0)
    model = InPlaceAtCut(head_reads=head_reads)
    batch = {"x": torch.randn(4, 8)}
    layers = decompose(model, batch)
    assert_same_training(layers, model, lambda m, b: m(**b), batch, 4)
    from harmony_lab.layers import LayerCall

    layer = layers.layers[1]
    given = [torch.randn(4, 8) for _ in layer.inputs]
    before = [tensor.clone() for tensor in given]
    call = LayerCall(samples=(0, 4), sizes={"batch": 4}, seed=0, device=torch.device("cpu"))
    layer.function([layers.tensors[name] for name in layer.parameters], [], given, [batch["x"]], call)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_in_place_change_of_a_value_that_a_later_layer_reads_is_refused() -> None:
    with pytest.raises(DecomposeError, match=r"aten.relu_.default.*inplace=False"):
        decompose(InPlaceAtCut(head_reads=True, part=True), {"x": torch.randn(4, 8)})


class Counted(nn.Module):
    """Its output depends on a buffer that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9)
        return (self.linear(x) * self.scale).mean()


def test_output_that_depends_on_an_updated_buffer_is_refused_by_name() -> None:
    with pytest.raises(DecomposeError, match="depends on buffer scale"):
        decompose(Counted(), {"x": torch.randn(4, 8)})


class Masked(nn.Module):
    """Writes constants into slices of a fresh tensor, and a computed value into another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[0], 8)
        mask[:, 2:4] = 0.5
        store = torch.zeros(x.shape[0], 8)
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) * mask
            store[:, index] = x[:, 0]
            mask = mask * 1
        return (x + store).square().mean()


def test_writes_into_slices_reach_every_layer() -> None:
    torch.manual_seed(0)
    model = Masked()
    batch = {"x": torch.randn(4, 8)}
    layers = decompose(model, batch, cut=["blocks.1"])
    assert_same_training(layers, model, lambda m, b: m(**b), {"x": torch.randn(3, 8)}, 3)


def test_factories_follow_the_device_of_the_call(llama_layers: LayerSequence) -> None:
    from harmony_lab.layers import LayerCall

    meta = torch.device("meta")
    tensors, sizes = llama_layers.flatten_batch(gpt2_batch(3))
    values: dict[str, torch.Tensor] = {}
    for layer in llama_layers.layers:
        outputs = layer.function(
            [llama_layers.tensors[name].to(meta) for name in layer.parameters],
            [llama_layers.tensors[name].to(meta) for name in layer.buffers],
            [values[name] for name in layer.inputs],
            [tensors[name].to(meta) for name in layer.batch_inputs],
            LayerCall(samples=(0, 3), sizes=sizes, seed=0, device=meta),
        )
        values.update(zip(layer.outputs, outputs, strict=True))
    assert all(value.device.type == "meta" for value in values.values())


# -- what cannot be captured, and modules in sequence
# -------------------------------------------------------------------------


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_model_that_cannot_be_captured_names_the_line_and_the_cure(capfd: pytest.CaptureFixture[str]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.linear = Branching(), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.inner(x))

    with pytest.raises(DecomposeError, match=r"(?s)x \* 2 if x.sum\(\) > 0 else x.*layers=\[") as caught:
        decompose(Outer(), mlp_batch(4), functional.cross_entropy)
    assert "test_decompose.py" in str(caught.value)
    assert "torch.where" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 4
    assert caught.value.__cause__ is not None  # torch's own words
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("batch", "loss_fn", "message"),
    [
        (mlp_batch(4), None, r"Linear.forward takes \(input\) and is given 2 in their order: too many.*pass loss_fn="),
        ({"input": mlp_batch(4)[0], "y": mlp_batch(4)[1]}, None, r"given input, y by name: got an unexpected.*'y'"),
        ((mlp_batch(4), mlp_batch(4)[1]), functional.cross_entropy, r"is given 2 in their order.*give the inputs"),
        (mlp_batch(4), nn.CrossEntropyLoss, r"loss_fn is the class CrossEntropyLoss, .* make an instance, Cross.*\(\)"),
        (mlp_batch(4), lambda output: output.mean(), r"loss_fn takes \(output\).*is called with \(output, targets\)"),
    ],
)
def test_a_call_that_does_not_fit_is_told_in_one_line(batch: Any, loss_fn: Any, message: str) -> None:
    with pytest.raises(DecomposeError, match=message) as caught:
        decompose(nn.Linear(8, 5), batch, loss_fn)
    assert len(str(caught.value).splitlines()) == 1


def branching_sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        Branching(),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)),
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)),
        nn.Linear(16, 5),
    )


@pytest.mark.parametrize("samples", [2, 9])
def test_sequential_that_cannot_be_captured_runs_module_by_module(samples: int) -> None:
    model = branching_sequential()
    state = copy.deepcopy(model.state_dict())
    layers = decompose(model, mlp_batch(4), functional.cross_entropy)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert [layer.name for layer in layers.layers] == ["0", "1", "4", "5", "6"]
    assert layers.layers[2].function is layers.layers[3].function
    assert layers.couples_samples == ("1",)
    assert set(layers.buffer_decay) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert_same_training(layers, model, with_cross_entropy, mlp_batch(samples), samples)


def test_layers_given_as_modules_of_the_model() -> None:
    model = branching_sequential()
    layers = decompose(model, mlp_batch(4), nn.CrossEntropyLoss(), layers=[model[:4], model[4:]])
    assert len(layers) == 2
    assert layers.state["4.0.weight"].layers == (1,)
    assert_same_training(layers, model, with_cross_entropy, mlp_batch(5), 5)
    with pytest.raises(DecomposeError, match="not part of the model"):
        decompose(model, mlp_batch(4), nn.CrossEntropyLoss(), layers=[nn.Linear(8, 5)])
    with pytest.raises(DecomposeError, match="loss_reduction"):
        decompose(model, mlp_batch(4), lambda y, t: functional.cross_entropy(y, t), layers=[model[:4], model[4:]])


def test_modules_without_data_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(DecomposeError, match="meta device"):
        decompose(model, (torch.randn(2, 4), torch.randn(2, 4)), nn.MSELoss(), layers=list(model))


def test_equal_looking_modules_with_different_settings_do_not_share_a_function() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) * self.scale

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(1.0), Scaled(1.0), Scaled(2.0), nn.Linear(8, 5))
    layers = decompose(model, mlp_batch(4), functional.cross_entropy, layers=list(model))
    assert layers.layers[1].function is not layers.layers[2].function
    assert_same_training(layers, model, with_cross_entropy, mlp_batch(3), 3)


class _Average(nn.Module):
    """Keeps a running average under ``torch.no_grad()``, as teachers and codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return self.b(torch.relu(y))


def test_buffers_written_without_gradient_are_updated() -> None:
    model = _Average()
    plain = copy.deepcopy(model)
    batch = torch.randn(3, 4), torch.randn(3, 4)
    layers = decompose(model, batch, nn.MSELoss())
    assert [layer.updated_buffers for layer in layers.layers] == [("average",), ()]
    for _ in range(2):
        run_layers(layers, batch)
        plain(batch[0])
    torch.testing.assert_close(model.average, plain.average)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class _Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(_Reverse.apply(self.a(x)))


def test_a_custom_backward_is_refused_by_name() -> None:
    with pytest.raises(DecomposeError, match="'_Reverse', whose own backward would be lost"):
        decompose(_Adversary(), (torch.randn(2, 4), torch.randn(2, 4)), nn.MSELoss())


def test_gradient_hooks_on_parameters_are_refused() -> None:
    model = dropout_mlp()
    model[0][0].weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(DecomposeError, match=r"gradient hooks, which would not run: 0\.0\.weight"):
        decompose(model, (torch.randn(2, 16), torch.randn(2, 16)), nn.MSELoss())


def test_a_buffer_that_two_layers_change_is_refused() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))
    with pytest.raises(DecomposeError, match="is changed in forward and used in several layers"):
        decompose(model, (torch.randn(4, 4), torch.randn(4, 4)), nn.MSELoss(), layers=list(model))


def test_a_model_in_eval_mode_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match="is in eval mode"):
        decompose(dropout_mlp().eval(), (torch.randn(2, 16), torch.randn(2, 16)), nn.MSELoss())


def test_the_fingerprint_of_modules_is_the_same_in_every_process() -> None:
    import subprocess
    import sys

    code = (
        "import torch; from torch import nn; import harmony_lab as hl\n"
        "m = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)); x = torch.randn(2, 4)\n"
        "print(hl.decompose(m, (x, x), nn.MSELoss(), layers=list(m)).fingerprint)"
    )
    prints = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in "ab"
    }
    assert len(prints) == 1


def test_only_a_guard_against_zero_may_clamp_a_count() -> None:
    class Masked(nn.Module):
        def __init__(self, least: int) -> None:
            super().__init__()
            self.linear, self.least = nn.Linear(4, 4), least

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.linear(x).square().mean(1) * mask).sum() / mask.sum().clamp(min=self.least)

    batch = torch.randn(3, 4), torch.tensor([1.0, 0.0, 1.0])
    assert decompose(Masked(1), batch).loss_reduction == "mean"
    with pytest.raises(DecomposeError):
        decompose(Masked(100), batch)


def test_one_value_per_channel_is_refused_as_by_the_module() -> None:
    layers = decompose(sequential(), mlp_batch(4), functional.cross_entropy)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run_layers(layers, mlp_batch(1))


class _Two(nn.Module):
    """Two linear layers with something of the test's own in between; returns the loss."""

    def __init__(self, between: Callable[["_Two", torch.Tensor], torch.Tensor], scale: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 5)
        self.between, self.scale, self.calls = between, scale, 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(self.b(self.between(self, self.a(x))), y)
        return self.scale(loss, x)


def _hooked(model: _Two, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * 0.1)
    return x


def _counting(model: _Two, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x * model.calls


def _at_random(model: _Two, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if random.random() < 0.5 else x


@pytest.mark.parametrize(
    ("between", "scale", "message"),
    [
        (_hooked, lambda loss, x: loss, "gradient hook on a tensor"),
        (_counting, lambda loss, x: loss, "keeps in Python: calls"),
        (_at_random, lambda loss, x: loss, "random numbers from Python"),
        (lambda model, x: x * x.shape[0], lambda loss, x: loss, "samples of a batch meet"),
        (lambda model, x: x, lambda loss, x: loss * x.shape[0], "losses combine|losses of microbatches combine"),
        (lambda model, x: x, lambda loss, x: loss * (1 + x.shape[0]), "losses combine|losses of microbatches combine"),
    ],
)
def test_what_a_graph_would_freeze_or_lose_is_refused(
    between: Callable[[_Two, torch.Tensor], torch.Tensor], scale: Callable[..., Any], message: str
) -> None:
    with pytest.raises(DecomposeError, match=message):
        decompose(_Two(between, scale), mlp_batch(4))
