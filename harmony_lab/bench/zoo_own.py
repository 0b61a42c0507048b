"""Models of our own: each has one trait that offloading and pipelining tools trip over."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from harmony_lab.bench.zoo import LENGTH, VOCABULARY, WIDTH, Specimen, ZooModel, fresh, tokens

__all__ = ["OWN_MODELS"]

_FEATURES = 8
_CLASSES = 5


def _vectors(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, _FEATURES, generator=generator)
    return x, torch.randint(0, _CLASSES, (num_samples,), generator=generator)


def _classifier(build: Any, *args: Any, **settings: Any) -> Specimen:
    return Specimen(fresh(build, *args, **settings), nn.CrossEntropyLoss())


def _blocks(count: int = 3, width: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))


# -- recurrence, one module called twice, batch statistics ------------------------------------------------------------


class LSTMLanguageModel(nn.Module):
    """Two recurrent layers in one call, embedding and head tied, dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Siamese(nn.Module):
    """One tower called twice, once for each input of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(_FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head((self.tower(left) - self.tower(right)).abs()).squeeze(-1)  # type: ignore[no-any-return]


class JoinedSiamese(Siamese):
    """Both inputs of each pair go through the tower as one tensor of twice as many rows."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.tower(torch.cat([left, right])).chunk(2)
        return self.head((a - b).abs()).squeeze(-1)  # type: ignore[no-any-return]


def _pairs(num_samples: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    left, target = _vectors(num_samples, seed)
    return {"left": left, "right": _vectors(num_samples, seed + 1)[0]}, (target % 2).float()


def _siamese(kind: type[nn.Module]) -> Specimen:
    return Specimen(fresh(kind), nn.BCEWithLogitsLoss())


def _batch_norm_mlp() -> nn.Module:
    parts: list[nn.Module] = []
    for inputs, outputs in ((_FEATURES, WIDTH), (WIDTH, WIDTH)):
        parts += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.Linear(WIDTH, _CLASSES))


# -- parts that are not trained ---------------------------------------------------------------------------------------


class FrozenTrunk(nn.Module):
    """A trunk without gradient and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, WIDTH)
        self.blocks = _blocks()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, _CLASSES))
        for part in (self.stem, self.blocks):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _lora() -> Specimen:
    """A Llama with adapters in its attention: the rest is frozen."""
    import peft

    def build() -> nn.Module:
        settings: dict[str, Any] = {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        }
        config = hf.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **settings)
        adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(hf.LlamaForCausalLM(config), adapters)

    return Specimen(fresh(build))


# -- sizes, inputs and outputs ----------------------------------------------------------------------------------------


_LARGE_VOCABULARY = 128 * 1024


def _large_head() -> Specimen:
    settings: dict[str, Any] = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    return Specimen(fresh(hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=_LARGE_VOCABULARY, **settings)))


@dataclass
class Context:
    """What a user passes along with the inputs."""

    mask: Tensor
    bias: Tensor | None
    scale: float


class KeywordInputs(nn.Module):
    """Takes a dataclass with None in it, a nested dictionary, a flag and a table that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, WIDTH)
        self.blocks = _blocks()
        self.head = nn.Linear(WIDTH, _CLASSES)

    def forward(
        self,
        x: Tensor,
        context: Context,
        extra: dict[str, Any],
        *,
        labels: Tensor,
        table: Tensor,
        normalise: bool = False,
        unused: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = self.stem(x) + table
        for block in self.blocks:
            x = block(x * context.scale) * context.mask + extra["inner"][0]
        if context.bias is not None:
            x = x + context.bias
        if normalise:
            x = functional.normalize(x, dim=-1)
        return {"loss": functional.cross_entropy(self.head(x), labels)}


def _keywords(num_samples: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, labels = _vectors(num_samples, seed)
    mask = torch.rand(num_samples, WIDTH, generator=generator) < 0.8
    return {
        "labels": labels,
        "x": x,
        "normalise": True,
        "unused": None,
        "context": Context(mask=mask, bias=None, scale=0.5),
        "extra": {"inner": [torch.randn(num_samples, 1, generator=generator), "a note"]},
        "table": torch.randn(WIDTH, generator=torch.Generator().manual_seed(7)),
    }


class SeveralLosses(nn.Module):
    """Returns its loss, the terms the loss is made of, and a metric that training does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, WIDTH)
        self.blocks = _blocks()
        self.classes = nn.Linear(WIDTH, _CLASSES)
        self.back = nn.Linear(WIDTH, _FEATURES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.classes(hidden)
        classified = functional.cross_entropy(logits, labels)
        rebuilt = functional.mse_loss(self.back(hidden), x)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        terms = {"classified": classified, "rebuilt": rebuilt}
        return {"loss": classified + 0.5 * rebuilt, "terms": terms, "accuracy": accuracy, "logits": logits.detach()}


def _labelled(num_samples: int, seed: int) -> dict[str, Tensor]:
    x, labels = _vectors(num_samples, seed)
    return {"x": x, "labels": labels}


class WeightedTokens(nn.Module):
    """A weight for each token: the loss is the weighted mean over all tokens of the minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = _blocks()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum(), logits


def _weighted(num_samples: int, seed: int) -> dict[str, Tensor]:
    batch = tokens(num_samples, seed)
    weights = torch.rand(num_samples, LENGTH, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": batch["input_ids"], "labels": batch["labels"].clamp(min=0), "weights": weights}


# -- what cannot be split ---------------------------------------------------------------------------------------------


class RoutedExperts(nn.Module):
    """Each expert gets the tokens that were routed to it: as many as the data say."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.head = nn.Linear(WIDTH, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        choice = self.router(x).softmax(-1)
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice.argmax(-1) == index).nonzero().squeeze(-1)
            total = total.index_add(0, rows, expert(x[rows]) * choice[rows, index, None])
        return self.head(total)  # type: ignore[no-any-return]


def _cached_gpt2() -> Specimen:
    settings: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 2 * LENGTH}
    return Specimen(fresh(hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=VOCABULARY, **settings)))


def _with_cache(num_samples: int, seed: int) -> dict[str, Any]:
    return {**tokens(num_samples, seed), "past_key_values": hf.DynamicCache()}


OWN_MODELS: tuple[ZooModel, ...] = (
    ZooModel(
        name="LSTM language model",
        make=lambda: Specimen(fresh(LSTMLanguageModel)),
        batch=tokens,
        note="recurrence, tied embedding and head",
    ),
    ZooModel(name="Siamese", make=partial(_siamese, Siamese), batch=_pairs, note="one module called twice"),
    ZooModel(
        name="Siamese, joined",
        make=partial(_siamese, JoinedSiamese),
        batch=_pairs,
        note="two rows per sample, in two halves of a tensor",
    ),
    ZooModel(
        name="MLP with BatchNorm",
        make=partial(_classifier, _batch_norm_mlp),
        batch=_vectors,
        note="statistics move once per microbatch",
        couples=True,
    ),
    ZooModel(
        name="Frozen trunk",
        make=partial(_classifier, FrozenTrunk),
        batch=_vectors,
        note="backward stops above the trunk",
    ),
    ZooModel(name="LoRA (peft)", make=_lora, batch=tokens, note="adapters in a frozen Llama"),
    ZooModel(
        name="128k vocabulary",
        make=_large_head,
        batch=partial(tokens, vocabulary=_LARGE_VOCABULARY),
        note="logits dwarf everything else",
    ),
    ZooModel(
        name="Keyword inputs",
        make=lambda: Specimen(fresh(KeywordInputs)),
        batch=_keywords,
        note="None, flag, dictionary, dataclass, keywords",
    ),
    ZooModel(
        name="Several losses",
        make=lambda: Specimen(fresh(SeveralLosses)),
        batch=_labelled,
        note="terms and a metric returned beside the loss",
    ),
    ZooModel(
        name="Weighted tokens",
        make=lambda: Specimen(fresh(WeightedTokens)),
        batch=_weighted,
        note="a weight for each token",
    ),
    ZooModel(
        name="Routed experts",
        make=partial(_classifier, RoutedExperts),
        batch=_vectors,
        note="experts get as many tokens as the data say",
        refused="nonzero",
    ),
    ZooModel(
        name="GPT-2 with a cache",
        make=_cached_gpt2,
        batch=_with_cache,
        note="keys and values kept across calls",
        refused="use_cache=False",
    ),
)
