"""Temperature and power, where a driver tells."""

from types import SimpleNamespace

import pytest

from harmony_lab.machine import Machine
from harmony_lab.notebook.sensors import Reading, readings, readings_text


def fake_torch(monkeypatch: pytest.MonkeyPatch, **cuda: object) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, **cuda))
    )


def test_devices_that_tell_are_read(monkeypatch):
    fake_torch(monkeypatch, temperature=lambda i: 60 + i, power_draw=lambda i: 214_400)
    found = readings(Machine.preset("2x4090"))
    assert found == [Reading("gpu0", 60.0, 214.4), Reading("gpu1", 61.0, 214.4)]
    assert readings_text(found) == "gpu0: 60 °C, 214 W; gpu1: 61 °C, 214 W"


def test_what_is_not_told_is_left_out(monkeypatch):
    def missing(_: int) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    fake_torch(monkeypatch, temperature=missing, power_draw=lambda i: 90_000)
    assert readings_text(readings(Machine.preset("4090"))) == "gpu0: 90 W"
    fake_torch(monkeypatch, temperature=missing, power_draw=missing)
    assert readings(Machine.preset("4090")) == []


def test_emulated_devices_have_no_sensors(monkeypatch):
    fake_torch(monkeypatch, temperature=lambda i: 60, power_draw=lambda i: 1)
    assert readings(Machine.emulated(2)) == []
