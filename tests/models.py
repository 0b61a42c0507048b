"""Small models with random weights that the tests share."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "MLP",
    "ConvNet",
    "dropout_mlp",
    "gpt2",
    "gpt2_batch",
    "gradients",
    "llama",
    "mlp_batch",
    "sequential",
]


def gpt2(
    *, layers: int = 4, dropout: float = 0.1, width: int = 32, length: int = 16, vocabulary: int = 64
) -> nn.Module:
    """A Hugging Face GPT-2 in train mode; embedding and head are one parameter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def gpt2_batch(samples: int, *, length: int = 16, vocabulary: int = 64, seed: int = 1) -> dict[str, torch.Tensor]:
    """Tokens, and labels that differ from them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (samples, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.flip(1)}


def llama(*, layers: int = 3, width: int = 32, vocabulary: int = 64) -> nn.Module:
    """A Hugging Face Llama in train mode: rotary positions, grouped-query attention, no dropout, head not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).train()


class MLP(nn.Module):
    """Linear layers of its own, batch norm and an in-place ReLU between them; returns logits."""

    def __init__(self, *, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.first(x)))
        return self.head(x + torch.tanh(self.second(x)))


class ConvNet(nn.Module):
    """Convolutions with skip connections; the loss is part of the model."""

    def __init__(self, *, channels: int = 4, blocks: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = skip = self.stem(images)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        logits = self.head((x + skip).mean((2, 3)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def sequential(*, classes: int = 5) -> nn.Sequential:
    """Linear, batch norm, in-place ReLU, dropout and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, classes),
    )


def dropout_mlp(*, p: float = 0.5, width: int = 16, blocks: int = 3) -> nn.Sequential:
    """Equal blocks of Linear and Dropout."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(p)) for _ in range(blocks)))


def mlp_batch(samples: int, *, features: int = 8, classes: int = 5, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, features, generator=generator), torch.randint(
        0, classes, (samples,), generator=generator
    )


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    """Gradients of the trainable parameters by name; ``.grad`` stays untouched."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))
