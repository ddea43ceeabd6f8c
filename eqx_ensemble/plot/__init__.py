"""Plots that are legible in greyscale: each draws on the given Axes, and returns them."""

from ._bands import prediction_bands as prediction_bands
from ._bands import risk_coverage as risk_coverage
from ._bands import uncertainty_histogram as uncertainty_histogram
from ._calibration import precision_recall_curve as precision_recall_curve
from ._calibration import rank_histogram as rank_histogram
from ._calibration import reliability_diagram as reliability_diagram
from ._calibration import roc_curve as roc_curve
from ._coordinates import parallel_coordinates as parallel_coordinates
from ._similarity import connectivity as connectivity
from ._similarity import member_similarity as member_similarity
from ._training import training_curves as training_curves
