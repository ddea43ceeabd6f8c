"""Plots that are legible in greyscale: each draws on the given Axes, and returns them."""

from ._bands import prediction_bands as prediction_bands
from ._bands import risk_coverage as risk_coverage
from ._bands import uncertainty_histogram as uncertainty_histogram
from ._calibration import rank_histogram as rank_histogram
from ._calibration import reliability_diagram as reliability_diagram
from ._training import training_curves as training_curves
