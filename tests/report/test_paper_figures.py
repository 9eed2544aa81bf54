"""The figures: colours that stay apart for every eye, nothing beyond the edge, every model told by more than colour."""

import itertools

import numpy as np
import pytest
from made_runs import suite

from oqc.experiments.results import results_page
from oqc.report import paper_figures
from oqc.report.figures import COLORS
from oqc.report.paper_figures import MARKERS, SERIES

# Machado, Oliveira and Fernandes 2009, full severity, on linear RGB.
EYES = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(color, eye):
    """CIELAB of a colour as an eye sees it."""
    rgb = np.array([int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(np.array(eye) @ linear, 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", EYES)
def test_colours_stay_apart(eye):
    """By 15 units of CIELAB, where about 2 can just be told apart side by side."""
    for one, other in itertools.combinations(COLORS, 2):
        assert np.linalg.norm(lab(one, EYES[eye]) - lab(other, EYES[eye])) > 15, f"{one} and {other}"


def test_a_series_has_a_marker_of_its_own():
    assert set(MARKERS) == set(SERIES)
    assert len(set(MARKERS.values())) == len(MARKERS)


def test_nothing_is_cut_at_the_edge(monkeypatch):
    drawn = []
    monkeypatch.setattr(paper_figures, "svg", lambda figure: drawn.append(figure) or "<svg/>")
    results_page(suite({}))
    assert len(drawn) == 4
    for figure in drawn:
        figure.draw_without_rendering()
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert box.x0 >= 0 <= box.y0
        assert box.x1 <= width
        assert box.y1 <= height
