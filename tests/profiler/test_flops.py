"""FLOPs of layers against those worked out by hand from their shapes."""

import torch
from models import gpt2, gpt2_batch, mlp_batch, sequential
from torch import nn
from torch.nn import functional

from harmony_lab.profiler.decompose import decompose

WIDTH, LENGTH, VOCABULARY = 32, 16, 64


def test_flops_of_a_transformer_block_are_those_of_its_matrix_products() -> None:
    layers = decompose(gpt2(layers=2), gpt2_batch(4))
    projections = (3 + 1 + 4 + 4) * WIDTH * WIDTH * LENGTH  # query, key and value; output; the MLP, up and down
    attention = 2 * LENGTH * LENGTH * WIDTH
    block = 2 * (projections + attention)
    assert [layer.flops_per_sample for layer in layers.layers] == [0, block, block, 2 * WIDTH * VOCABULARY * LENGTH]
    assert [row["flops_per_sample"] for row in layers.rows()][1] == block
    assert "FLOPs" in layers._repr_html_()


def test_flops_need_no_data_and_no_batch_of_one() -> None:
    with torch.device("meta"):
        model = sequential()
    layers = decompose(model, mlp_batch(4), functional.cross_entropy)
    assert [layer.flops_per_sample for layer in layers.layers] == [2 * 8 * 16, 0, 2 * 16 * 16, 2 * 16 * 5]


def test_flops_of_modules_in_sequence() -> None:
    model = sequential()
    layers = decompose(model, mlp_batch(4), nn.CrossEntropyLoss(), layers=[model[:3], model[3:]])
    assert [layer.flops_per_sample for layer in layers.layers] == [2 * 8 * 16, 2 * 16 * 16 + 2 * 16 * 5]
