"""Presets: machines by name, made of the GPUs there are data sheets of, to plan for what is not at hand."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

from harmony_lab.errors import HarmonyError
from harmony_lab.gpus import GPU, GPUS, find, gpu, memory_rate
from harmony_lab.hardware import MOST_DEVICES, pairs_joined
from harmony_lab.machine import Backend, Device, Host, Link, Machine
from harmony_lab.units import parse_bytes, parse_rate

__all__ = ["GPU", "GPUS", "find", "gpu", "memory_rate", "preset_machine"]

_PCIE_X16_BYTES_PER_S = {3: 12e9, 4: 24e9, 5: 48e9}
"""What copies of pinned memory reach, per direction: 76% of the 15.75, 31.5 and 63 GB/s of the links."""
_LATENCY_S = 1e-5

_COUNT = re.compile(r"(\d+)\s*[x×]\s*(.+)", re.IGNORECASE)
_CLAUSE_TEXTS = {
    "pcie": r"pcie\s*(\d)(?:\.0)?(?:\s*x\s*(\d+))?",
    "switches": r"behind\s+(?:(\d+)\s+|a\s+)switch(?:es)?",
    "nvlink": r"(no\s+)?nvlink",
    "peers": r"(no\s+)?peers",
    "memory_rate": r"host\s*([\d.]+\s*[kmgt]i?b/s)",
    "memory": r"host\s*([\d.]+\s*[kmgt]i?b)(?!/)",
    "cores": r"\b(\d+)\s*cores?",
}
_CLAUSES = {name: re.compile(clause, re.IGNORECASE) for name, clause in _CLAUSE_TEXTS.items()}
_WORDS = ("pcie4", "behind", "switches", "nvlink", "peers", "host", "cores")
_SIZE = re.compile(r"[\d.]+[kmgt]i?b", re.IGNORECASE)
_AND = re.compile(r"[+&;]|\band\b", re.IGNORECASE)
_HOST_BYTES = 256 * 2**30
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
    if not isinstance(text, str):
        raise HarmonyError(f"a machine's name is a text such as '4x1080ti', got a {type(text).__name__}")
    count, card, found = _read(text)
    generation, lanes = _pcie(found, card)
    num_switches = int(found["switches"][1] or 1) if "switches" in found else 0
    if not 1 <= count <= MOST_DEVICES:
        raise HarmonyError(f"{text!r}: {count} GPUs; a machine has 1 to {MOST_DEVICES}")
    if num_switches > count:
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
            assumed="memory" not in found,
        ),
        links=(*uplinks, *own),
        peer_transfers=peers and count > 1,
        fabric_bytes_per_s=fabric,
        bridges=() if bridge is None else pairs_joined(devices, bridge),
    )


def _read(text: str) -> tuple[int, GPU, dict[str, re.Match[str]]]:
    """How many of which GPU, and the clauses by name."""
    rest, found = text, {}
    for name, clause in _CLAUSES.items():
        match = clause.search(rest)
        if match is not None:
            found[name] = match
            rest = f"{rest[: match.start()]},{rest[match.end() :]}"
    head, *other = [part.strip() for part in _AND.sub(",", rest).split(",") if part.strip()] or [""]
    if not head:
        raise HarmonyError(f"{text!r} is no machine: a GPU is missing; {_EXPECTED}")
    match = _COUNT.fullmatch(head)
    count, words = (int(match[1]), match[2].split()) if match else (1, head.split())
    known = next((n for n in range(len(words), 0, -1) if find(" ".join(words[:n])) is not None), len(words))
    card = gpu(" ".join(words[:known]))  # raises for one that there is not
    if other := [" ".join(words[known:])] * (known < len(words)) + other:
        raise _unreadable(text, card, other)
    return count, card, found


_EXPECTED = (
    "expected is a text like '4x1080ti' or '8x4090, pcie4 x8 behind 2 switches, nvlink, peers, host 512GiB, "
    "host 40GB/s, 32 cores'"
)


def _unreadable(text: str, card: GPU, other: Sequence[str]) -> HarmonyError:
    """What is wrong with these parts of it."""
    cards = [card, *(found for part in other if (found := _card(part)) is not None)]
    if len(cards) > 1:
        kinds = " and ".join(dict.fromkeys(each.name for each in cards))
        return HarmonyError(
            f"{text!r}: a machine that is given by name has GPUs of one kind, written once, such as '3x3090'; these "
            f"are {kinds}. Plan with the smallest of them for all, or put their Devices into a harmony_lab.Machine"
        )
    hints = []
    for word in " ".join(other).split():
        close = get_close_matches(word.lower(), _WORDS, n=1)
        if close and close[0] != word.lower():
            hints.append(f"did you mean {close[0]!r}?")
        elif _SIZE.fullmatch(word):
            hints.append(f"the host's memory is 'host {word}', the GPU's is what its data sheet says")
    hint = f" ({'; '.join(hints)})" if hints else ""
    return HarmonyError(f"{text!r} is no machine: {', '.join(map(repr, other))} cannot be read{hint}; {_EXPECTED}")


def _card(part: str) -> GPU | None:
    match = _COUNT.fullmatch(part)
    return find(match[2] if match else part)


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
