"""The scores of scikit-learn, torchmetrics, scoringrules, scipy and uncertainty-calibration on one data set.

`make_figures.py` has computed and stored it: none of them is needed here.
"""

import json
import pathlib

import jax
import numpy as np
import pytest

from eqx_ensemble import scores

STORED = json.loads(pathlib.Path(__file__).with_name("figures.json").read_text())
DATA = {name: np.asarray(value) for name, value in STORED["data"].items()}
FIGURES = STORED["figures"]

of_classes = ("logits", "labels")
of_values = ("mean", "targets")
of_gaussians = ("mean", "variance", "targets")
ends = lambda mean, variance: (mean - np.sqrt(variance), mean + np.sqrt(variance))
square, widths = scores.squared_calibration_error, {"num_bins": 7, "binning": "width"}

# The score, what it takes, its options.
CASES = {
    "nll": (scores.nll, of_classes, {}),
    "brier": (scores.brier, of_classes, {}),
    "accuracy": (scores.accuracy, of_classes, {}),
    "ranked_probability": (scores.ranked_probability, of_classes, {}),
    "ece": (scores.ece, of_classes, {"num_bins": 7}),
    "ece of equal mass": (scores.ece, of_classes, {"num_bins": 7, "binning": "mass"}),
    "classwise_ece": (scores.classwise_ece, of_classes, {"num_bins": 7}),
    "classwise_ece of equal mass": (scores.classwise_ece, of_classes, {"num_bins": 7, "binning": "mass"}),
    "squared_calibration_error of equal width": (square, of_classes, widths | {"debiased": False}),
    "squared_calibration_error of equal width, debiased": (square, of_classes, widths),
    "squared_calibration_error, debiased": (square, of_classes, {"num_bins": 8}),
    "crps nrg": (scores.crps, of_values, {}),
    "crps fair": (scores.crps, of_values, {"estimator": "fair"}),
    "crps of torchmetrics": (scores.crps, of_values, {}),
    "crps_gaussian": (lambda m, v, y: scores.crps_gaussian(m[0], v[0], y), of_gaussians, {}),
    "crps_gaussian_mixture": (scores.crps_gaussian_mixture, of_gaussians, {}),
    "nll_gaussian": (lambda m, v, y: scores.nll_gaussian(m[0], v[0], y), of_gaussians, {}),
    "nll_gaussian_mixture": (scores.nll_gaussian_mixture, of_gaussians, {}),
    "pit_gaussian_mixture": (lambda *x: scores.pit_gaussian_mixture(*x).mean(), of_gaussians, {}),
    "rmse": (scores.rmse, of_values, {}),
    "interval_score": (lambda m, v, y: scores.interval_score(*ends(m[0], v[0]), y, level=0.8), of_gaussians, {}),
    "pinball": (lambda m, y, **options: scores.pinball(m[0], y, **options), of_values, {"level": 0.3}),
    "dawid_sebastiani": (scores.dawid_sebastiani, of_values, {}),
    "energy nrg": (scores.energy_score, ("vectors", "vector_targets"), {}),
    "energy fair": (scores.energy_score, ("vectors", "vector_targets"), {"estimator": "fair"}),
}


def test_no_figure_is_left_out():
    of_calibration = {name for name in FIGURES if name == "temperature" or name.endswith(": probabilities")}
    assert set(FIGURES) - of_calibration == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_is_the_stored_figure(name):
    score, takes, options = CASES[name]
    if name.startswith(("interval", "pinball", "dawid", "energy")):
        pytest.importorskip("scoringrules")
    with jax.enable_x64(True):
        got = score(*(DATA[part] for part in takes), **options)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, FIGURES[name], rtol=1e-6)
        *first, target = (DATA[part] for part in takes)
        assert not np.allclose(score(*first, np.roll(target, 1, axis=0), **options), FIGURES[name], rtol=1e-4)
    single = (DATA[part].astype(np.int32 if part == "labels" else np.float32) for part in takes)
    # A debiased error is a difference of two larger numbers.
    np.testing.assert_allclose(score(*single, **options), FIGURES[name], rtol=2e-5 if "debiased" in name else 5e-6)
