"""Sensors: temperature and power of real devices, where the driver tells."""

import sys
from collections.abc import Callable
from typing import NamedTuple

from harmony_lab.machine import Backend, Machine

__all__ = ["Reading", "readings", "readings_text"]


class Reading(NamedTuple):
    """One device; None for what the driver does not tell."""

    device: str
    celsius: float | None
    watts: float | None


def readings(machine: Machine) -> list[Reading]:
    """One per device of which anything is known; none for emulated devices and where NVIDIA's management library is
    missing.
    """
    torch = sys.modules.get("torch")  # a machine at work has it loaded
    if torch is None or not torch.cuda.is_available():
        return []
    found = []
    for device in machine.devices:
        if device.backend is Backend.CUDA:
            celsius = _told(torch.cuda.temperature, device.ordinal)
            milliwatts = _told(torch.cuda.power_draw, device.ordinal)
            if celsius is not None or milliwatts is not None:
                found.append(Reading(device.name, celsius, None if milliwatts is None else milliwatts / 1e3))
    return found


def _told(ask: Callable[[int], int], ordinal: int) -> float | None:
    """What torch's query of the driver answers; it raises where the library, or the device's sensor, is missing."""
    try:
        return float(ask(ordinal))
    except (ImportError, RuntimeError, OSError):
        return None
    except Exception as error:
        if type(error).__module__ == "pynvml":  # NVMLError, which is no RuntimeError
            return None
        raise


def readings_text(found: list[Reading]) -> str:
    """``"gpu0: 61 °C, 214 W"``."""
    parts = []
    for device, celsius, watts in found:
        told = [(celsius, "°C"), (watts, "W")]
        parts.append(f"{device}: " + ", ".join(f"{value:.0f} {unit}" for value, unit in told if value is not None))
    return "; ".join(parts)
