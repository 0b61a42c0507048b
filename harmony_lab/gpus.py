"""GPUs by name, from the vendors' data sheets, to plan for what is not at hand."""

import re
from dataclasses import dataclass

from harmony_lab.errors import HarmonyError
from harmony_lab.hardware import margin_bytes
from harmony_lab.units import format_bytes

__all__ = ["GPU", "GPUS", "find", "gpu", "memory_rate"]

_GIB = 2**30
_CONTEXT_BYTES = 512 * 2**20
"""What the driver and a CUDA context with torch's kernels take of a card before the first tensor."""
_GA102_BRIDGE_BYTES_PER_S = 56.25e9
"""Four NVLinks of 14.0625 GB/s per direction, 112.5 GB/s both ways: NVIDIA, Ampere GA102 GPU Architecture (white
paper), "Third-Generation NVLink"; the RTX A6000 data sheet says the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One model of GPU.

    Rates are peaks for dense matrices, as torch multiplies them: half precision with sums in fp32, where the card has
    tensor cores for it, else what the fp32 units do.  ``tf32_flops``: for fp32 where TF32 is allowed (convolutions, by
    torch's default).  ``launch_s``: what each op takes beside its work, as torch's eager mode issues it.
    ``peer_copies``: over PCIe, as the driver allows them.  ``nvlink_bytes_per_s``: all links of one card together, per
    direction.  ``bridge_bytes_per_s``: of an NVLink bridge between two such cards, which is sold apart, per direction.
    """

    name: str
    memory_bytes: int
    fp32_flops: float
    fp16_flops: float
    bf16_flops: float
    tf32_flops: float
    bytes_per_s: float
    pcie_generation: int
    peer_copies: bool
    nvlink_bytes_per_s: float | None = None
    bridge_bytes_per_s: float | None = None
    launch_s: float = 5e-6
    source: str = ""

    @property
    def usable_bytes(self) -> int:
        """What plans may use: memory less the context (512 MiB) and less a tenth for the allocator's margin."""
        free = self.memory_bytes - _CONTEXT_BYTES
        return free - margin_bytes(free)

    def flops(self, dtype: str, *, tf32: bool = False) -> float:
        """Peak rate of multiplying matrices of that type, such as ``"float32"``; other types count as fp32."""
        rates = {"float16": self.fp16_flops, "bfloat16": self.bf16_flops}
        return rates.get(dtype, self.tf32_flops if tf32 and dtype == "float32" else self.fp32_flops)

    def __str__(self) -> str:
        return (
            f"{self.name}: {format_bytes(self.memory_bytes)} ({format_bytes(self.usable_bytes)} for plans), "
            f"{self.fp32_flops / 1e12:.3g} TFLOPS in fp32, {self.bf16_flops / 1e12:.3g} in bf16, "
            f"{self.bytes_per_s / 1e9:.4g} GB/s"
        )


GPUS: dict[str, GPU] = {
    "1080ti": GPU(
        name="NVIDIA GeForce GTX 1080 Ti",
        memory_bytes=11 * _GIB,
        fp32_flops=11.3e12,
        fp16_flops=11.3e12,
        bf16_flops=11.3e12,
        tf32_flops=11.3e12,
        bytes_per_s=484e9,
        pcie_generation=3,
        peer_copies=True,
        source="NVIDIA, GeForce GTX 1080 Ti specifications: 3584 cores at 1582 MHz; no tensor cores",
    ),
    "3060": GPU(
        name="NVIDIA GeForce RTX 3060",
        memory_bytes=12 * _GIB,
        fp32_flops=12.7e12,
        fp16_flops=25.5e12,
        bf16_flops=25.5e12,
        tf32_flops=12.7e12,
        bytes_per_s=360e9,
        pcie_generation=4,
        peer_copies=False,
        source="NVIDIA, GeForce RTX 3060 specifications, 12 GB: 3584 cores at 1.78 GHz, 192 bits at 15 Gbit/s; tensor "
        "cores as in the Ampere GA102 white paper, half precision with fp32 accumulate",
    ),
    "3080": GPU(
        name="NVIDIA GeForce RTX 3080",
        memory_bytes=10 * _GIB,
        fp32_flops=29.8e12,
        fp16_flops=59.5e12,
        bf16_flops=59.5e12,
        tf32_flops=29.8e12,
        bytes_per_s=760e9,
        pcie_generation=4,
        peer_copies=False,
        source="NVIDIA, Ampere GA102 GPU Architecture (white paper), table of the RTX 3080, 10 GB; half precision with "
        "fp32 accumulate",
    ),
    "3080ti": GPU(
        name="NVIDIA GeForce RTX 3080 Ti",
        memory_bytes=12 * _GIB,
        fp32_flops=34.1e12,
        fp16_flops=68.2e12,
        bf16_flops=68.2e12,
        tf32_flops=34.1e12,
        bytes_per_s=912e9,
        pcie_generation=4,
        peer_copies=False,
        source="NVIDIA, GeForce RTX 3080 Ti specifications: 10240 cores at 1.665 GHz, 384 bits at 19 Gbit/s; tensor "
        "cores as in the Ampere GA102 white paper, half precision with fp32 accumulate",
    ),
    "3090": GPU(
        name="NVIDIA GeForce RTX 3090",
        memory_bytes=24 * _GIB,
        fp32_flops=35.6e12,
        fp16_flops=71e12,
        bf16_flops=71e12,
        tf32_flops=35.6e12,
        bytes_per_s=936e9,
        pcie_generation=4,
        peer_copies=False,
        bridge_bytes_per_s=_GA102_BRIDGE_BYTES_PER_S,
        source="NVIDIA, Ampere GA102 GPU Architecture (white paper), table 9; half precision with fp32 accumulate",
    ),
    "4070": GPU(
        name="NVIDIA GeForce RTX 4070",
        memory_bytes=12 * _GIB,
        fp32_flops=29.1e12,
        fp16_flops=58.3e12,
        bf16_flops=58.3e12,
        tf32_flops=29.1e12,
        bytes_per_s=504e9,
        pcie_generation=4,
        peer_copies=False,
        source="NVIDIA, GeForce RTX 4070 specifications: 5888 cores at 2.475 GHz, 192 bits at 21 Gbit/s; tensor cores "
        "as in the Ada white paper, half precision with fp32 accumulate",
    ),
    "4080": GPU(
        name="NVIDIA GeForce RTX 4080",
        memory_bytes=16 * _GIB,
        fp32_flops=48.7e12,
        fp16_flops=97.5e12,
        bf16_flops=97.5e12,
        tf32_flops=48.7e12,
        bytes_per_s=716.8e9,
        pcie_generation=4,
        peer_copies=False,
        source="NVIDIA, Ada GPU Architecture (white paper), table of the RTX 4080; half precision with fp32 accumulate",
    ),
    "4090": GPU(
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=24 * _GIB,
        fp32_flops=82.6e12,
        fp16_flops=165.2e12,
        bf16_flops=165.2e12,
        tf32_flops=82.6e12,
        bytes_per_s=1008e9,
        pcie_generation=4,
        peer_copies=False,
        source="NVIDIA, Ada GPU Architecture (white paper), table 2; half precision with fp32 accumulate",
    ),
    "5080": GPU(
        name="NVIDIA GeForce RTX 5080",
        memory_bytes=16 * _GIB,
        fp32_flops=56.3e12,
        fp16_flops=112.6e12,
        bf16_flops=112.6e12,
        tf32_flops=56.3e12,
        bytes_per_s=960e9,
        pcie_generation=5,
        peer_copies=False,
        source="NVIDIA, RTX Blackwell GPU Architecture (white paper), table of the RTX 5080; half precision with fp32 "
        "accumulate",
    ),
    "5090": GPU(
        name="NVIDIA GeForce RTX 5090",
        memory_bytes=32 * _GIB,
        fp32_flops=104.8e12,
        fp16_flops=209.5e12,
        bf16_flops=209.5e12,
        tf32_flops=104.8e12,
        bytes_per_s=1792e9,
        pcie_generation=5,
        peer_copies=False,
        source="NVIDIA, RTX Blackwell GPU Architecture (white paper); half precision with fp32 accumulate",
    ),
    "a6000": GPU(
        name="NVIDIA RTX A6000",
        memory_bytes=48 * _GIB,
        fp32_flops=38.7e12,
        fp16_flops=154.8e12,
        bf16_flops=154.8e12,
        tf32_flops=77.4e12,
        bytes_per_s=768e9,
        pcie_generation=4,
        peer_copies=True,
        bridge_bytes_per_s=_GA102_BRIDGE_BYTES_PER_S,
        source="NVIDIA, RTX A6000 data sheet and Ampere GA102 white paper, dense",
    ),
    "v100": GPU(
        name="Tesla V100-SXM2-16GB",
        memory_bytes=16 * _GIB,
        fp32_flops=15.7e12,
        fp16_flops=125e12,
        bf16_flops=15.7e12,
        tf32_flops=15.7e12,
        bytes_per_s=900e9,
        pcie_generation=3,
        peer_copies=True,
        nvlink_bytes_per_s=150e9,
        source="NVIDIA, V100 data sheet, SXM2; tensor cores for fp16 only; NVLink 300 GB/s both ways",
    ),
    "v100-32gb": GPU(
        name="Tesla V100-SXM2-32GB",
        memory_bytes=32 * _GIB,
        fp32_flops=15.7e12,
        fp16_flops=125e12,
        bf16_flops=15.7e12,
        tf32_flops=15.7e12,
        bytes_per_s=900e9,
        pcie_generation=3,
        peer_copies=True,
        nvlink_bytes_per_s=150e9,
        source="NVIDIA, V100 data sheet, SXM2; tensor cores for fp16 only; NVLink 300 GB/s both ways",
    ),
    "t4": GPU(
        name="Tesla T4",
        memory_bytes=15 * _GIB,
        fp32_flops=8.1e12,
        fp16_flops=65e12,
        bf16_flops=8.1e12,
        tf32_flops=8.1e12,
        bytes_per_s=320e9,
        pcie_generation=3,
        peer_copies=True,
        source="NVIDIA, T4 data sheet; error correction takes 1 of the 16 GB; tensor cores for fp16 only",
    ),
    "a100-40gb": GPU(
        name="NVIDIA A100-SXM4-40GB",
        memory_bytes=40 * _GIB,
        fp32_flops=19.5e12,
        fp16_flops=312e12,
        bf16_flops=312e12,
        tf32_flops=156e12,
        bytes_per_s=1555e9,
        pcie_generation=4,
        peer_copies=True,
        nvlink_bytes_per_s=300e9,
        source="NVIDIA, A100 data sheet, SXM, dense; NVLink 600 GB/s both ways",
    ),
    "a100-80gb": GPU(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=80 * _GIB,
        fp32_flops=19.5e12,
        fp16_flops=312e12,
        bf16_flops=312e12,
        tf32_flops=156e12,
        bytes_per_s=2039e9,
        pcie_generation=4,
        peer_copies=True,
        nvlink_bytes_per_s=300e9,
        source="NVIDIA, A100 data sheet, SXM, dense; NVLink 600 GB/s both ways",
    ),
    "h100": GPU(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * _GIB,
        fp32_flops=67e12,
        fp16_flops=989e12,
        bf16_flops=989e12,
        tf32_flops=494e12,
        bytes_per_s=3350e9,
        pcie_generation=5,
        peer_copies=True,
        nvlink_bytes_per_s=450e9,
        source="NVIDIA, H100 data sheet, SXM, half of the rates with sparsity; NVLink 900 GB/s both ways",
    ),
    "h200": GPU(
        name="NVIDIA H200",
        memory_bytes=141 * 10**9,
        fp32_flops=67e12,
        fp16_flops=989e12,
        bf16_flops=989e12,
        tf32_flops=494e12,
        bytes_per_s=4800e9,
        pcie_generation=5,
        peer_copies=True,
        nvlink_bytes_per_s=450e9,
        source="NVIDIA, H200 data sheet, SXM, half of the rates with sparsity; NVLink 900 GB/s both ways",
    ),
}
"""By short name."""

_DECORATION = re.compile(r"nvidia|geforce|tesla|quadro|rtx|gtx|sxm\d?|pcie|hbm\d?e?|[^a-z0-9]")
_SAME_AS = {"a100": "a100-80gb", "v100-16gb": "v100", "h100-80gb": "h100", "h200-141gb": "h200"}


def find(name: str) -> GPU | None:
    """A preset by any usual name: ``"4090"``, ``"RTX 4090"``, ``"NVIDIA GeForce RTX 4090"``, ``"A100-SXM4-40GB"``."""
    names = {_bare(short): short for short in GPUS} | {_bare(other): short for other, short in _SAME_AS.items()}
    short = names.get(_bare(name))
    return None if short is None else GPUS[short]


def gpu(name: str) -> GPU:
    """As ``find``; raises ``HarmonyError`` for one that is not there."""
    found = find(name)
    if found is None:
        raise HarmonyError(
            f"there is no preset for a GPU called {name!r}; there are {', '.join(GPUS)}. For another one make a "
            "harmony_lab.presets.GPU of its data sheet"
        )
    return found


def memory_rate(name: str) -> float | None:
    """Bytes per second of the memory of the GPU with that name; None where there is no preset for it."""
    found = find(name)
    return None if found is None else found.bytes_per_s


def _bare(name: str) -> str:
    """``"NVIDIA A100-SXM4-40GB"`` and ``"a100 40"`` are both ``"a10040"``."""
    bare = _DECORATION.sub("", name.lower())
    return bare[:-2] if bare.endswith("gb") else bare
