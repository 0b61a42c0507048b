"""Language models of Hugging Face transformers, two or three blocks each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from harmony_lab.bench.zoo import LENGTH, VOCABULARY, WIDTH, Specimen, ZooModel, fresh, padded_tokens, tokens

__all__ = ["LANGUAGE_MODELS"]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROTARY: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
}
_BERT: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 2 * LENGTH}


def _model(kind: type[nn.Module], config: type, **settings: Any) -> Specimen:
    return Specimen(fresh(lambda: kind(config(**settings))))


def _entry(
    name: str,
    kind: type[nn.Module],
    config: type,
    settings: dict[str, Any],
    note: str,
    batch: Callable[[int, int], Any] = tokens,
) -> ZooModel:
    return ZooModel(name=name, make=partial(_model, kind, config, **settings), batch=batch, note=note)


def classified(num_samples: int, seed: int) -> dict[str, Any]:
    batch = padded_tokens(num_samples, seed)
    return {**batch, "labels": torch.arange(num_samples) % 3}


def speech(num_samples: int, seed: int) -> dict[str, Any]:
    """A spectrogram of 16 bands, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(num_samples, 16, 2 * LENGTH, generator=generator)
    return {"input_features": frames, "labels": tokens(num_samples, seed)["labels"].clamp(min=3)}


def without_labels(num_samples: int, seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    batch = tokens(num_samples, seed)
    return {"input_ids": batch["input_ids"]}, batch["labels"]


def _logits_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss a user writes for a model that returns logits; labels are shifted already."""
    return functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def _gpt2_with_own_loss() -> Specimen:
    return Specimen(_gpt2(hf.GPT2LMHeadModel).model, _logits_loss)


def _gpt2(kind: type[nn.Module]) -> Specimen:
    return _model(kind, hf.GPT2Config, **_GPT2)


_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LANGUAGE_MODELS: tuple[ZooModel, ...] = (
    _entry("GPT-2", hf.GPT2LMHeadModel, hf.GPT2Config, _GPT2, "tied embedding and head, dropout"),
    ZooModel(
        name="GPT-2 with loss_fn",
        make=_gpt2_with_own_loss,
        batch=without_labels,
        note="the loss is the user's own function of the logits",
    ),
    _entry(
        "GPT-NeoX",
        hf.GPTNeoXForCausalLM,
        hf.GPTNeoXConfig,
        {**_BERT, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        "attention and MLP in parallel, part of each head rotary",
        padded_tokens,
    ),
    _entry(
        "OPT",
        hf.OPTForCausalLM,
        hf.OPTConfig,
        {**_SIZES, "ffn_dim": 48, "max_position_embeddings": 2 * LENGTH, "word_embed_proj_dim": 16},
        "learned positions from the mask, projected embedding",
        padded_tokens,
    ),
    _entry(
        "BLOOM",
        hf.BloomForCausalLM,
        hf.BloomConfig,
        {**_SIZES, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        "ALiBi positions",
        padded_tokens,
    ),
    _entry("Llama", hf.LlamaForCausalLM, hf.LlamaConfig, _ROTARY, "grouped-query attention, rotary positions"),
    _entry(
        "Mistral",
        hf.MistralForCausalLM,
        hf.MistralConfig,
        {**_ROTARY, "sliding_window": 5},
        "sliding window",
        padded_tokens,
    ),
    _entry(
        "Mixtral",
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        {**_ROTARY, "num_local_experts": 4},
        "mixture of experts, every expert over all tokens",
    ),
    _entry("Qwen3", hf.Qwen3ForCausalLM, hf.Qwen3Config, {**_ROTARY, "head_dim": 8}, "normalised queries and keys"),
    _entry(
        "Gemma 2",
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {**_ROTARY, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
        "tied and scaled embedding, soft caps, window in every other block",
    ),
    _entry("Phi", hf.PhiForCausalLM, hf.PhiConfig, {**_ROTARY, "resid_pdrop": 0.1}, "biases, part of each head rotary"),
    _entry(
        "BERT, masked language",
        hf.BertForMaskedLM,
        hf.BertConfig,
        _BERT,
        "tied head with a bias of its own",
        padded_tokens,
    ),
    _entry(
        "BERT, classification",
        hf.BertForSequenceClassification,
        hf.BertConfig,
        {**_BERT, "num_labels": 3},
        "pooler, labels per sample",
        classified,
    ),
    _entry(
        "RoBERTa",
        hf.RobertaForMaskedLM,
        hf.RobertaConfig,
        {**_BERT, "type_vocab_size": 1},
        "positions counted from the padding",
        padded_tokens,
    ),
    _entry(
        "DistilBERT",
        hf.DistilBertForMaskedLM,
        hf.DistilBertConfig,
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 2 * LENGTH,
            "pad_token_id": 0,
        },
        "masked language model",
        padded_tokens,
    ),
    _entry(
        "T5",
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        "encoder and decoder, one table of relative positions for all blocks",
        padded_tokens,
    ),
    _entry(
        "Whisper",
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig,
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_source_positions": LENGTH,
            "max_target_positions": LENGTH,
            "dropout": 0.1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "speech to text: convolutions, encoder, decoder",
        speech,
    ),
    _entry(
        "Mamba",
        hf.MambaForCausalLM,
        hf.MambaConfig,
        {**{k: v for k, v in _SIZES.items() if k != "num_attention_heads"}, "num_hidden_layers": 2, "state_size": 4},
        "state space: a scan over time",
    ),
)
