"""Decoder: a GPT-2-shaped language model in plain torch, for benchmarks that need nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["Decoder", "Shape", "decoder_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Decoder."""

    name: str
    num_blocks: int
    width: int
    num_heads: int
    length: int
    vocabulary: int = 256


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:  # (batch, length, width)
        heads = self.project(self.before_attention(hidden)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (batch, heads, length, width / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        narrowed: Tensor = self.narrow(functional.gelu(self.widen(self.before_mlp(hidden)), approximate="tanh"))
        return hidden + narrowed


class Decoder(nn.Module):
    """Returns the loss of predicting each next token.  ``checkpointed``: each block's forward is run again in backward
    (``torch.utils.checkpoint``), which is what plans do by default."""

    def __init__(self, shape: Shape, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Parameter(torch.randn(shape.length, shape.width) * 0.02)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.num_blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) each
        hidden = self.tokens(tokens) + self.places
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


def decoder_batch(shape: Shape, num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(shape.vocabulary, (num_samples, shape.length + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
