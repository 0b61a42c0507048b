"""Presets: GPUs and machines by name, from the vendors' data sheets, to plan for what is not at hand."""

import re
from dataclasses import dataclass

from harmony_lab.errors import HarmonyError
from harmony_lab.hardware import pairs_joined
from harmony_lab.machine import Backend, Device, Host, Link, Machine, margin_bytes
from harmony_lab.units import format_bytes, parse_bytes, parse_rate

__all__ = ["GPU", "GPUS", "gpu", "memory_rate", "preset_machine"]

_GIB = 2**30
_CONTEXT_BYTES = 512 * 2**20
"""What the driver and a CUDA context with torch's kernels take of a card before the first tensor."""
_PCIE_X16_BYTES_PER_S = {3: 12e9, 4: 24e9, 5: 48e9}
"""What copies of pinned memory reach, per direction: 76 % of the 15.75, 31.5 and 63 GB/s of the links."""
_LATENCY_S = 1e-5
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


def gpu(name: str) -> GPU:
    """A preset by any usual name: ``"4090"``, ``"RTX 4090"``, ``"NVIDIA GeForce RTX 4090"``, ``"A100-SXM4-40GB"``.

    Raises ``HarmonyError`` for one that is not there.
    """
    names = {_bare(short): short for short in GPUS} | {_bare(other): short for other, short in _SAME_AS.items()}
    short = names.get(_bare(name))
    if short is None:
        raise HarmonyError(
            f"there is no preset for a GPU called {name!r}; there are {', '.join(GPUS)}. For another one make a "
            "harmony_lab.presets.GPU of its data sheet"
        )
    return GPUS[short]


def memory_rate(name: str) -> float | None:
    """Bytes per second of the memory of the GPU with that name; None where there is no preset for it."""
    try:
        return gpu(name).bytes_per_s
    except HarmonyError:
        return None


def _bare(name: str) -> str:
    """``"NVIDIA A100-SXM4-40GB"`` and ``"a100 40"`` are both ``"a10040"``."""
    bare = _DECORATION.sub("", name.lower())
    return bare[:-2] if bare.endswith("gb") else bare


# -- machines -----------------------------------------------------------------------------------------------------

_COUNT = re.compile(r"(\d+)\s*[x×]\s*(.+)", re.IGNORECASE)
_CLAUSE_TEXTS = {
    "pcie": r"pcie\s*(\d)(?:\.0)?(?:\s*x\s*(\d+))?",
    "switches": r"behind\s+(?:(\d+)\s+|a\s+)switch(?:es)?",
    "nvlink": r"(no\s+)?nvlink",
    "peers": r"(no\s+)?peers",
    "memory_rate": r"host\s+([\d.]+\s*[kmgt]i?b/s)",
    "memory": r"host\s+([\d.]+\s*[kmgt]i?b)(?!/)",
    "cores": r"(\d+)\s+cores?",
}
_CLAUSES = {name: re.compile(clause, re.IGNORECASE) for name, clause in _CLAUSE_TEXTS.items()}
_HOST_BYTES = 256 * _GIB
_CORES_PER_DEVICE = 4


def preset_machine(text: str) -> Machine:
    """A machine of equal GPUs, from text such as ``"4x1080ti"`` or ``"8x4090, pcie4 x8 behind 2 switches"``.

    After the number and the GPU, in any order, parted by commas or blanks:

    ``pcie3``, ``pcie4 x8``      each GPU's link to the host; by default the card's own generation, 16 lanes
    ``behind 2 switches``        GPUs share the switches' links to the host, 16 lanes each; by default each has its own
    ``nvlink``, ``no nvlink``    a fabric between the GPUs, by default where the card has one and there are several; for
                                 cards that take bridges, one between the first two, one between the next two and so on
    ``peers``, ``no peers``      whether GPUs copy to each other over PCIe; by default as their driver allows
    ``host 512GiB``, ``32 cores``  by default 256 GiB, and 4 cores per GPU
    ``host 40GB/s``              what all transfers get of the host's memory together; by default it is no limit

    Memory is what plans may use, see ``GPU.usable_bytes``.  Raises ``HarmonyError`` for what cannot be read.
    """
    head, found = _read(text)
    match = _COUNT.fullmatch(head.strip())
    count, card = (int(match[1]), gpu(match[2])) if match else (1, gpu(head.strip()))
    generation, lanes = _pcie(found, card)
    num_switches = int(found["switches"][1] or 1) if "switches" in found else 0
    if count < 1 or num_switches > count:
        raise HarmonyError(f"{text!r}: {count} GPUs behind {num_switches} switches is no machine")
    fabric, bridge = _nvlink(text, found, card) if count > 1 else (None, None)
    peers = found["peers"][1] is None if "peers" in found else card.peer_copies or fabric is not None
    per_lane = _PCIE_X16_BYTES_PER_S[generation] / 16
    parents = [f"switch{i * num_switches // count}" if num_switches else "host" for i in range(count)]
    devices = tuple(
        Device(
            name=f"gpu{i}",
            memory_bytes=card.usable_bytes,
            parent=parent,
            backend=Backend.CUDA,
            ordinal=i,
            model=card.name,
            memory_bytes_per_s=card.bytes_per_s,
        )
        for i, parent in enumerate(parents)
    )
    uplinks = [
        Link(child=f"switch{i}", parent="host", bytes_per_s=per_lane * 16, latency_s=_LATENCY_S)
        for i in range(num_switches)
    ]
    own = [Link(child=d.name, parent=d.parent, bytes_per_s=per_lane * lanes, latency_s=_LATENCY_S) for d in devices]
    return Machine(
        name=text.strip(),
        devices=devices,
        host=Host(
            memory_bytes=parse_bytes(found["memory"][1]) if "memory" in found else _HOST_BYTES,
            num_cores=int(found["cores"][1]) if "cores" in found else _CORES_PER_DEVICE * count,
            memory_bytes_per_s=parse_rate(found["memory_rate"][1]) if "memory_rate" in found else None,
        ),
        links=(*uplinks, *own),
        peer_transfers=peers and count > 1,
        fabric_bytes_per_s=fabric,
        bridges=() if bridge is None else pairs_joined(devices, bridge),
    )


def _read(text: str) -> tuple[str, dict[str, re.Match[str]]]:
    """The number and the GPU, and the clauses by name."""
    rest, found = text, {}
    for name, clause in _CLAUSES.items():
        match = clause.search(rest)
        if match is not None:
            found[name] = match
            rest = f"{rest[: match.start()]},{rest[match.end() :]}"
    head, *other = [part.strip() for part in rest.split(",") if part.strip()] or [""]
    if other or not head:
        raise HarmonyError(
            f"{text!r} is no machine: {', '.join(map(repr, other)) or 'a GPU'} "
            f"{'cannot be read' if other else 'is missing'}; expected is a text like '4x1080ti' or "
            "'8x4090, pcie4 x8 behind 2 switches, host 512GiB, 32 cores'"
        )
    return head, found


def _nvlink(text: str, found: dict[str, re.Match[str]], card: GPU) -> tuple[float | None, float | None]:
    """Rates of a fabric between all GPUs, and of bridges between pairs; one of them at most, as asked for."""
    asked = found.get("nvlink")
    if asked is None:
        return card.nvlink_bytes_per_s, None
    if asked[1] is not None:
        return None, None
    if card.nvlink_bytes_per_s is None and card.bridge_bytes_per_s is None:
        bridged = ", ".join(short for short, other in GPUS.items() if other.bridge_bytes_per_s is not None)
        joined = ", ".join(short for short, other in GPUS.items() if other.nvlink_bytes_per_s is not None)
        raise HarmonyError(
            f"{text!r}: {card.name} has no NVLink; leave 'nvlink' out, or write 'peers' if the driver lets these cards "
            f"copy to each other over PCIe. NVLink is there for {bridged} (a bridge for two) and {joined} (all joined)"
        )
    return card.nvlink_bytes_per_s, card.bridge_bytes_per_s


def _pcie(found: dict[str, re.Match[str]], card: GPU) -> tuple[int, int]:
    """(generation, lanes): no faster than the card."""
    if "pcie" not in found:
        return card.pcie_generation, 16
    generation, lanes = int(found["pcie"][1]), int(found["pcie"][2] or 16)
    if generation not in _PCIE_X16_BYTES_PER_S or lanes not in (1, 2, 4, 8, 16):
        raise HarmonyError(
            f"{found['pcie'][0]!r}: expected pcie{', pcie'.join(map(str, _PCIE_X16_BYTES_PER_S))} and x1 to x16"
        )
    return min(generation, card.pcie_generation), lanes
