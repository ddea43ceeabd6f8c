"""One small call of every public function of arrays, with all of its arguments: the input of the censuses."""

import jax
import numpy as np

from eqx_ensemble import acquire, calibrate, combine, conformal, resample, scores, tree, uncertainty
from eqx_ensemble.methods import density, distillation, heads

_RNG = np.random.default_rng(0)
_KEY = jax.random.key(0)
_LABELS = np.array([0, 1, 2, 0, 1, 2])
_LOGITS = (_RNG.normal(size=(3, 6, 3)) + np.eye(3)[(_LABELS + (np.arange(6) == 5)) % 3]).astype(np.float32)
_MEAN, _TARGETS = _RNG.normal(size=(3, 6)).astype(np.float32), _RNG.normal(size=6).astype(np.float32)
_VARIANCE = np.exp(_RNG.normal(size=(3, 6))).astype(np.float32)
_WEIGHTS, _ROW_WEIGHTS = np.array([0.5, 0.2, 0.3]), np.array([1.0, 2.0, 0.0, 0.5, 1.0, 1.0])
_MASK = np.array([True, True, False, True, True, True])
_DRAWN = np.array([[0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5], [0, 2, 4, 0, 2, 4]])
_UNSEEN_ONCE = np.asarray(resample.folds(6, 3).in_test)
_UNSEEN = np.asarray(resample.out_of_bag(_DRAWN, 6))

_CLASSES = {"logits": _LOGITS, "labels": _LABELS, "weights": _WEIGHTS, "row_weights": _MASK}
_ROWS = {"row_weights": _ROW_WEIGHTS}
_POINTS = {"samples": _MEAN, "targets": _TARGETS, "weights": _WEIGHTS, "row_weights": _MASK}
_MOMENTS = {"mean": _MEAN, "variance": _VARIANCE, "weights": _WEIGHTS}
_ENDS = {"lower": _MEAN[0], "upper": _MEAN[0] + 1, "targets": _TARGETS, "row_weights": _MASK}
_ONE = {"mean": _MEAN[0], "variance": _VARIANCE[0], "targets": _TARGETS, "reduction": "mean"} | _ROWS
_MEAN_OR_NONE = {"reduction": "mean"}
_BINS = {"num_bins": 2, "binning": "width"}
_RANKED = {"scores": _TARGETS, "positives": np.arange(6) % 2 == 0} | _ROWS
_SELECTED = {"uncertainty": _TARGETS, "losses": _MEAN[0]}
_LOGITS_AND_WEIGHTS = {"logits": _LOGITS, "weights": _WEIGHTS}
_CONCENTRATION, _LEVELS = np.exp(_LOGITS[0]) + 1, np.array([0.1, 0.5, 0.9])
_EVIDENTIAL = {"mean": _MEAN[0], "nu": _VARIANCE[0], "alpha": _VARIANCE[1] + 1, "beta": _VARIANCE[2]}
_DENSITY = {"logits": _LOGITS, "mean": _LOGITS, "variance": np.exp(_LOGITS)}
_DENSITY_OF_ONE = {"logits": _LOGITS[0], "mean": _LOGITS[1], "variance": np.exp(_LOGITS[2])}
_TEACHER = {"logits": _LOGITS[0], "teacher": np.moveaxis(_LOGITS, 0, 1), "temperature": 2.0}
_TEACHERS = {"teacher_mean": _MEAN.T, "teacher_variance": _VARIANCE.T}
_MODEL = {"weight": np.ones((3, 2), np.float32)}

_CANDIDATES = {"weights": _WEIGHTS, "row_weights": _MASK}
_BATCH = _CANDIDATES | {"size": 2, "chosen": np.array([0])}
_IMPROVEMENT = {"best": 0.1, "mode": "max"}

CALLS = {
    acquire: {
        **{
            name: _MOMENTS | _CANDIDATES | _IMPROVEMENT
            for name in ("expected_improvement", "log_expected_improvement", "probability_of_improvement")
        },
        "confidence_bound": _MOMENTS | _CANDIDATES | {"beta": 2.0, "mode": "min"},
        **{
            name: {"predictions": _MEAN} | _BATCH | _IMPROVEMENT
            for name in ("batch_expected_improvement", "batch_probability_of_improvement")
        },
        "thompson": {"predictions": _MEAN, "num_picks": 2, "mode": "max", "replace": False, "key": _KEY} | _CANDIDATES,
        "bald": {"logits": _LOGITS} | _CANDIDATES,
        "batch_bald": {"logits": _LOGITS, "max_outcomes": 9, "num_samples": 5, "key": _KEY} | _BATCH,
        "power_bald": {"logits": _LOGITS, "size": 2, "power": 1.0, "key": _KEY} | _CANDIDATES,
        "regret": {"values": _MEAN, "optimum": 3.0, "mode": "max"},
    },
    combine: {
        **{name: _LOGITS_AND_WEIGHTS for name in ("mean_logits", "mixture", "vote")},
        "gaussian": _MOMENTS,
        "product_gaussian": _MOMENTS | {"power": 2.0},
        **{name: {"values": _MEAN, "weights": _WEIGHTS} for name in ("mean", "moments", "median")},
        "log_mixture": {"log_densities": _MEAN, "weights": _WEIGHTS},
        "trimmed_mean": {"values": _MEAN, "cut": 0.1, "weights": _WEIGHTS},
        "stacking": {"log_scores": _MEAN, "row_weights": _MASK, "tolerance": 1.0},
    },
    scores: {
        "joint_nll": {"log_scores": -_VARIANCE, "size": 3, "num_anchors": 2, "num_sets": 5, "key": _KEY}
        | {"weights": _WEIGHTS}
        | _ROWS
        | _MEAN_OR_NONE,
        "bootstrap": {"values": _MEAN, "statistic": None, "row_weights": _ROW_WEIGHTS, "level": 0.9}
        | {"num_draws": 5, "key": _KEY},
        **{name: _CLASSES | _ROWS | _MEAN_OR_NONE for name in ("brier", "accuracy", "mean_member_accuracy", "nll")},
        "ranked_probability": _CLASSES | _ROWS | _MEAN_OR_NONE,
        "decompose_brier": _CLASSES | _ROWS | _BINS,
        **{name: _CLASSES | _ROWS | _BINS | {"debiased": False} for name in ("classwise_ece", "ece")},
        "squared_calibration_error": _CLASSES | _ROWS | _BINS | {"debiased": True},
        "mce": _CLASSES | _ROWS | _BINS,
        "balanced_accuracy": _CLASSES | _ROWS,
        "top_k_accuracy": _CLASSES | _ROWS | _MEAN_OR_NONE | {"k": 2},
        "threshold_weighted_crps": _POINTS | _ROWS | _MEAN_OR_NONE | {"estimator": "nrg", "lower": -1.0, "upper": 1.0},
        "ence": {name: _ONE[name] for name in ("mean", "variance", "targets")} | _ROWS | {"num_bins": 2},
        "sharpness": {"variance": _VARIANCE[0]} | _ROWS,
        "quantile_calibration_error": {"values": np.abs(_TARGETS) / 3, "num_levels": 9, "kind": "squared"} | _ROWS,
        "crps": _POINTS | _ROWS | _MEAN_OR_NONE | {"estimator": "nrg", "alpha": 1.0},
        "crps_gaussian": _ONE,
        "crps_gaussian_mixture": _MOMENTS | _ROWS | {"targets": _TARGETS, "reduction": "mean"},
        "nll_gaussian": _ONE,
        "nll_gaussian_mixture": _MOMENTS | _ROWS | {"targets": _TARGETS, "reduction": "mean"},
        "coverage": _ENDS | _ROWS | _MEAN_OR_NONE,
        "set_coverage": {"sets": _LOGITS[0] > 0, "labels": _LABELS, "reduction": "mean"} | _ROWS,
        "set_size": {"sets": _LOGITS[0] > 0, "reduction": "mean"} | _ROWS,
        "by_group": {"values": _TARGETS, "groups": _LABELS % 2, "num_groups": 2} | _ROWS,
        **{
            name: {"sets": _LOGITS[0] > 0, "labels": _LABELS} | _ROWS
            for name in ("class_conditional_coverage", "size_stratified_coverage")
        },
        "width": {name: _ENDS[name] for name in ("lower", "upper")} | _ROWS | _MEAN_OR_NONE,
        "pit": _POINTS | {"key": _KEY},
        "pit_gaussian_mixture": _MOMENTS | {"targets": _TARGETS, "row_weights": _MASK},
        "pit_histogram": {"values": np.abs(_TARGETS) / 3, "num_bins": 2, "row_weights": _MASK},
        "rank_histogram": {"samples": _MEAN, "targets": _TARGETS, "row_weights": _MASK, "key": _KEY},
        **{
            name: {"predictions": _MEAN, "targets": _TARGETS, "weights": _WEIGHTS} | _ROWS
            for name in ("rmse", "mean_member_rmse", "r2")
        },
        "mae": {"predictions": _MEAN, "targets": _TARGETS, "weights": _WEIGHTS} | _ROWS | _MEAN_OR_NONE,
        "dawid_sebastiani": {"samples": _MEAN, "targets": _TARGETS, "reduction": "mean"} | _ROWS,
        "energy_score": _POINTS
        | _ROWS
        | {"samples": _MEAN[..., None], "targets": _TARGETS[..., None], "estimator": "nrg"}
        | _MEAN_OR_NONE,
        "variogram_score": _POINTS
        | _ROWS
        | {"samples": _MEAN[..., None] * np.float32([1, 2]), "targets": _TARGETS[..., None] * np.ones(2, np.float32)}
        | {"order": 0.5, "pair_weights": np.ones((2, 2), np.float32), "estimator": "nrg", "reduction": "mean"},
        "interval_score": _ENDS | _ROWS | {"level": 0.8, "reduction": "mean"},
        "pinball": {"quantiles": _MEAN[0], "targets": _TARGETS, "level": 0.8, "reduction": "mean"} | _ROWS,
        **{name: _RANKED for name in ("aupr", "auroc", "roc_curve", "precision_recall_curve")},
        "fpr_at_tpr": _RANKED | {"level": 0.9},
        **{name: _SELECTED | _ROWS for name in ("aurc", "risk_coverage")},
        "excess_aurc": _SELECTED | {"row_weights": _MASK},
    },
    uncertainty: {
        "decompose_nll": {"logits": _LOGITS, "labels": _LABELS, "weights": _WEIGHTS},
        "decompose_squared_error": {"predictions": _MEAN, "targets": _TARGETS, "weights": _WEIGHTS},
        **{name: _LOGITS_AND_WEIGHTS for name in ("jensen_shannon", "pairwise_kl", "decompose_entropy")},
        **{name: _LOGITS_AND_WEIGHTS for name in ("least_confidence", "disagreement", "variation_ratio")},
        "entropy": {"logits": _LOGITS[0]},
        "gaussian_interval": {"mean": _MEAN[0], "variance": _VARIANCE[0], "level": 0.9},
        "gaussian_mixture_interval": _MOMENTS | {"level": 0.9},
        "gaussian_mixture_quantile": _MOMENTS | {"levels": np.array([0.2, 0.5])},
        "free_energy": _LOGITS_AND_WEIGHTS | {"temperature": 2.0},
        "error_correlation": {"errors": _MEAN, "row_weights": _MASK},
        "pairwise_disagreement": {"logits": _LOGITS, "row_weights": _MASK},
        "q_statistic": {"correct": (_MEAN > 0).astype(np.float32), "row_weights": _MASK},
        "interval": {"values": _MEAN, "level": 0.9, "weights": _WEIGHTS},
        "quantile": {"values": _MEAN, "levels": np.array([0.2, 0.5]), "weights": _WEIGHTS},
        "sample_class_mixture": _LOGITS_AND_WEIGHTS | {"num_samples": 2, "joint": False, "key": _KEY},
        "sample_gaussian_mixture": _MOMENTS | {"num_samples": 2, "joint": False, "key": _KEY},
        "decompose_variance": _MOMENTS,
    },
    calibrate: {
        "matrix": _CLASSES | {"pool": "mixture", "off_diagonal_penalty": 0.1, "bias_penalty": 0.1},
        **{name: _CLASSES | {"pool": "mixture"} for name in ("vector", "isotonic", "temperature", "platt")},
        "beta": _CLASSES | {"logits": -_LOGITS, "pool": "mixture"},
        "variance": _MOMENTS | {"targets": _TARGETS, "pool": "mixture", "row_weights": _MASK},
    },
    conformal: {
        "sets": {"logits": _LOGITS[0], "labels": _LABELS, "level": 0.5, "score": "aps", "penalty": 0.1, "num_free": 1}
        | {"by_class": False, "groups": _LABELS % 2, "num_groups": 2, "row_weights": _MASK},
        "cross_conformal": {"logits": _LOGITS[0], "labels": _LABELS, "unseen": _UNSEEN_ONCE, "level": 0.5}
        | {"score": "aps", "row_weights": _MASK},
        "cqr": {"low": _ENDS["lower"], "high": _ENDS["upper"], "targets": _TARGETS, "level": 0.5, "ends": "together"},
        "jackknife_plus": {"held_out": _MEAN[0], "targets": _TARGETS, "unseen": _UNSEEN, "level": 0.5}
        | {"weights": _WEIGHTS, "row_weights": _MASK},
        "enbpi": {"held_out": _MEAN[0], "targets": _TARGETS, "unseen": _UNSEEN, "level": 0.5}
        | {"window": 4, "weights": _WEIGHTS},
        "aci": {"level": 0.9, "rate": 0.05},
        "risk_control": {"losses": np.tile(np.float32([1, 0.5, 0]), (6, 1)), "thresholds": np.float32([0, 1, 2])}
        | {"risk": 0.5, "bound": 1.0, "row_weights": _MASK},
        "quantile": {"scores": _TARGETS, "level": 0.5, "row_weights": _MASK},
        "weighted_quantile": {"scores": _TARGETS, "ratios": _ROW_WEIGHTS, "new_ratios": np.ones(2), "level": 0.5},
        "split": {"predictions": _MEAN[0], "targets": _TARGETS, "level": 0.5, "scale": _VARIANCE[0]}
        | {"row_weights": _MASK},
    },
    density: {
        name: {"features": _LOGITS, "labels": np.arange(6) % 2, "num_classes": 2, "ridge": 0.1, "row_weights": _MASK}
        for name in ("gaussian_discriminant", "mahalanobis")
    },
    distillation: {
        "mixture_loss": _TEACHER | {"row_weights": _MASK} | _MEAN_OR_NONE,
        "distribution_loss": _TEACHER | {"smoothing": 0.1, "row_weights": _MASK} | _MEAN_OR_NONE,
        "gaussian_loss": {"mean": _MEAN[0], "variance": _VARIANCE[0], "row_weights": _MASK} | _TEACHERS | _MEAN_OR_NONE,
    },
    heads: {
        "normal_inverse_gamma": {"raw": np.ones((6, 4), np.float32), "floor": 0.1},
        "decompose_evidential": _EVIDENTIAL,
        "evidential_loss": _EVIDENTIAL
        | {"targets": _TARGETS, "coefficient": 0.1, "row_weights": _MASK, "reduction": "mean"},
        "dirichlet": {"logits": _LOGITS[0]},
        "vacuity": {"concentration": _CONCENTRATION},
        "decompose_dirichlet": {"concentration": _CONCENTRATION},
        "dirichlet_loss": {"concentration": _CONCENTRATION, "labels": _LABELS, "kl_weight": 0.5, "risk": "squared"}
        | {"row_weights": _MASK, "reduction": "mean"},
        "pinball_loss": {"quantiles": _LOGITS[0], "targets": _TARGETS, "levels": _LEVELS, "row_weights": _MASK}
        | _MEAN_OR_NONE,
        "sort_quantiles": {"quantiles": _LOGITS[0]},
        "mixture_density": {"raw": np.ones((6, 6), np.float32), "floor": 0.1},
        "mixture_density_loss": _DENSITY_OF_ONE | {"targets": _TARGETS, "row_weights": _MASK} | _MEAN_OR_NONE,
        "mixture_density_moments": _DENSITY_OF_ONE,
        "mixture_components": _DENSITY | {"weights": _WEIGHTS},
    },
    resample: {
        "folds": {"num_rows": 6, "num_folds": 3, "key": _KEY},
        "out_of_bag": {"rows": _DRAWN, "num_rows": 6},
        "held_out_mean": {"predictions": _MEAN, "unseen": _UNSEEN, "weights": _WEIGHTS},
        "bootstrap": {"num_rows": 6, "num_members": 3, "size": 4, "key": _KEY},
        "subsets": {"num_rows": 6, "num_members": 3, "size": 4, "key": _KEY},
        "bayesian_weights": {"num_rows": 6, "num_members": 3, "key": _KEY},
        "counts": {"rows": _DRAWN, "num_rows": 6},
    },
    tree: {
        "num_members": {"tree": _MODEL},
        "take": {"tree": _MODEL, "index": 1},
        "unstack": {"tree": _MODEL, "num_axes": 1},
        "replace": {"tree": _MODEL, "index": 1, "value": {"weight": np.ones(2, np.float32)}},
        "concatenate": {"trees": [_MODEL, _MODEL]},
        "stack": {"trees": [_MODEL, _MODEL], "promote_scalars": False},
        "weighted_mean": {"trees": [_MODEL, _MODEL], "weights": np.array([1.0, 2.0])},
        "weighted_sum": {"trees": [_MODEL, _MODEL], "weights": np.array([1.0, 2.0])},
    },
}

NAMES = [f"{room.__name__.removeprefix('eqx_ensemble.')}.{name}" for room, calls in CALLS.items() for name in calls]


def function_of(name: str):
    """The function of that name."""
    room, _, own = name.rpartition(".")
    return next(getattr(module, own) for module in CALLS if module.__name__ == f"eqx_ensemble.{room}")


def arguments_of(name: str) -> dict:
    """The arguments of the call of that name."""
    room, _, own = name.rpartition(".")
    return next(calls[own] for module, calls in CALLS.items() if module.__name__ == f"eqx_ensemble.{room}")


def call(name: str, **changed):
    """The call of that name, with some arguments changed."""
    return function_of(name)(**arguments_of(name) | changed)
