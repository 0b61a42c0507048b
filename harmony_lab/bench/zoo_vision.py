"""Vision models: of Hugging Face transformers, and the convolutional classics written out."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from harmony_lab.bench.zoo import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Specimen,
    ZooModel,
    fresh,
    images,
    inputs_and,
    padded_tokens,
)

__all__ = ["VISION_MODELS"]


def _model(kind: type[nn.Module], config: type, **settings: Any) -> Specimen:
    return Specimen(fresh(lambda: kind(config(**settings, num_labels=5))))


# -- two towers -----------------------------------------------------------------------------------------------------


def _clip() -> Specimen:
    text = hf.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    vision = hf.CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    return Specimen(fresh(hf.CLIPModel, config))


def _agreement(output: Any, wanted: Tensor) -> Tensor:
    """How far each image and its own text agree, against a rating: no sample meets another."""
    return functional.mse_loss((output.image_embeds * output.text_embeds).sum(-1), wanted)


def _rated_clip() -> Specimen:
    return Specimen(_clip().model, _agreement)


def _pairs(num_samples: int, seed: int) -> dict[str, Any]:
    text = padded_tokens(num_samples, seed)
    pixels = images(num_samples, seed, size=16)["pixel_values"]
    return {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"], "pixel_values": pixels}


def _contrasted(num_samples: int, seed: int) -> dict[str, Any]:
    return {**_pairs(num_samples, seed), "return_loss": True}


def _rated(num_samples: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    return _pairs(num_samples, seed), torch.linspace(-1, 1, num_samples)


# -- convolutional classics -------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Down, up, and a skip connection from each level to its counterpart; a map of logits per pixel."""

    def __init__(self, channels: int = 8, levels: int = 3, classes: int = 5) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(_conv_block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_conv_block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(functional.max_pool2d(x, 2))
        for block in reversed(self.up):
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1))
        return self.head(x)  # type: ignore[no-any-return]


def _conv_block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True))


class DenseNet(nn.Module):
    """Every layer of a block reads what all before it computed; in-place ReLUs."""

    def __init__(self, growth: int = 8, depth: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * growth, 3, padding=1)
        self.layers = nn.ModuleList(_dense_layer((2 + index) * growth, growth) for index in range(depth))
        self.norm = nn.BatchNorm2d((2 + depth) * growth)
        self.head = nn.Linear((2 + depth) * growth, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        features = [self.stem(pixel_values)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        x = functional.relu_(self.norm(torch.cat(features, 1)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def _dense_layer(inputs: int, growth: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), nn.Conv2d(inputs, growth, 3, padding=1))


def _vgg(classes: int = 5) -> nn.Module:
    parts: list[nn.Module] = []
    inputs = 3
    for outputs in (8, 16, 32):
        for _ in range(2):
            parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = outputs
        parts.append(nn.MaxPool2d(2))
    parts += [nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, classes)]
    return nn.Sequential(*parts)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.second(functional.relu(self.norm(self.first(x)), inplace=True))  # type: ignore[no-any-return]


def deep_resnet(blocks: int, channels: int = 4, classes: int = 5) -> nn.Module:
    """As deep as a ResNet-1026 with 341 blocks: three layers in each, and narrow."""
    body = (ResidualBlock(channels) for _ in range(blocks))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *body, *head)


def _classic(build: Any, **settings: Any) -> Specimen:
    return Specimen(fresh(build, **settings), nn.CrossEntropyLoss())


def _sized(size: int, num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    batch = images(num_samples, seed, size=size)
    return batch["pixel_values"], batch["labels"]


def _segmented(num_samples: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 5, (num_samples, 16, 16), generator=generator)
    return inputs_and("labels", {**images(num_samples, seed, size=16), "labels": classes})


_VIT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
}

VISION_MODELS: tuple[ZooModel, ...] = (
    ZooModel(
        name="ViT",
        make=partial(_model, hf.ViTForImageClassification, hf.ViTConfig, **_VIT),
        batch=images,
        note="patches, a class token",
    ),
    ZooModel(
        name="Swin",
        make=partial(
            _model,
            hf.SwinForImageClassification,
            hf.SwinConfig,
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.1,
        ),
        batch=images,
        note="shifted windows, stages, whole paths dropped at random",
    ),
    ZooModel(
        name="ConvNeXt",
        make=partial(
            _model,
            hf.ConvNextForImageClassification,
            hf.ConvNextConfig,
            hidden_sizes=[8, 16, 32],
            depths=[1, 2, 1],
            num_stages=3,
            drop_path_rate=0.1,
        ),
        batch=images,
        note="depthwise convolutions, stages, whole paths dropped at random",
    ),
    ZooModel(
        name="ResNet",
        make=partial(
            _model,
            hf.ResNetForImageClassification,
            hf.ResNetConfig,
            embedding_size=8,
            hidden_sizes=[16, 32],
            depths=[2, 2],
            layer_type="bottleneck",
        ),
        batch=images,
        note="batch norm, bottlenecks",
        couples=True,
    ),
    ZooModel(
        name="CLIP",
        make=_rated_clip,
        batch=_rated,
        note="two towers, a loss of each pair alone",
    ),
    ZooModel(
        name="CLIP, contrastive",
        make=_clip,
        batch=_contrasted,
        note="every image against every text of the batch",
        refused="samples of a batch",
    ),
    ZooModel(
        name="U-Net", make=partial(_classic, UNet), batch=_segmented, note="skip connections across the whole depth"
    ),
    ZooModel(
        name="DenseNet",
        make=partial(_classic, DenseNet),
        batch=partial(_sized, 16),
        note="features read by all later layers, batch norm, in-place ReLU",
        couples=True,
    ),
    ZooModel(name="VGG", make=partial(_classic, _vgg), batch=partial(_sized, 32), note="a Sequential, in-place ReLU"),
    ZooModel(
        name="ResNet-1026",
        make=partial(_classic, deep_resnet, blocks=341),
        batch=partial(_sized, 8),
        note="343 layers",
        couples=True,
    ),
)
