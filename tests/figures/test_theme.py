"""Colours: one per kind, apart for every eye, visible on white and on black."""

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from harmony_lab.figures.theme import (
    MODE_COLOURS,
    OP_COLOURS,
    SEQUENTIAL,
    TENSOR_COLOURS,
    ink_on,
    label,
    sequential,
)
from harmony_lab.plan import Mode
from harmony_lab.program import OpKind, Stream, TensorKind

# Linear RGB as seen without medium- or without long-wavelength cones (Machado et al., 2009, severity 1).
SIGHTS = {
    "full": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(np.maximum(XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089]), 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def drawn(colours: dict) -> list[str]:
    return [colour for kind, colour in colours.items() if kind is not OpKind.FREE]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("colours", [OP_COLOURS, TENSOR_COLOURS, MODE_COLOURS], ids=["ops", "tensors", "modes"])
def test_kinds_of_one_figure_look_different(colours: dict, sight: str) -> None:
    seen = [lab(SIGHTS[sight] @ linear(colour)) for colour in drawn(colours)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 20


@pytest.mark.parametrize("colours", [OP_COLOURS, TENSOR_COLOURS], ids=["ops", "tensors"])
def test_kinds_stand_out_from_white_and_from_black(colours: dict) -> None:
    for colour in drawn(colours):
        luminance = float(XYZ[1] @ linear(colour))
        assert 1.05 / (luminance + 0.05) > 1.35, colour
        assert (luminance + 0.05) / 0.05 > 2.3, colour


def test_every_kind_has_a_colour_and_a_name() -> None:
    assert set(OP_COLOURS) == set(OpKind)
    assert set(TENSOR_COLOURS) == set(TensorKind)
    assert label(OpKind.SWAP_IN) == "swap in"
    assert label(TensorKind.ACTIVATION_GRADIENT) == "activation gradients"
    names = [label(kind) for enum in (OpKind, TensorKind, Mode, Stream) for kind in enum]
    assert not any("_" in name for name in names)


def test_pictures_without_plotly_load_no_plotly() -> None:
    modules = "harmony_lab.figures.svg, harmony_lab.figures.report"
    code = f"import sys, {modules}; print([name for name in ('plotly', 'torch', 'ipywidgets') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_numbers_in_cells_can_be_read_on_every_colour_of_the_scale() -> None:
    luminance = {colour: XYZ[1] @ linear(colour) for colour in ("#000000", "#FFFFFF")}
    for share in np.linspace(0, 1, 101):
        colour = sequential(share)
        below, ink = XYZ[1] @ linear(colour), luminance[ink_on(colour)]
        assert (max(below, ink) + 0.05) / (min(below, ink) + 0.05) >= 4.5
    assert [sequential(share) for share in (0, 0.2, 1)] == [SEQUENTIAL[0], SEQUENTIAL[1], SEQUENTIAL[-1]]
