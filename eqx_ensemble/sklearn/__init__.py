"""scikit-learn estimators whose models are ensembles (extra `sklearn`)."""

from typing import TYPE_CHECKING

from .._lazy import import_when_used as _import_when_used

if TYPE_CHECKING:
    from ._classifier import EnsembleClassifier as EnsembleClassifier
    from ._regressor import EnsembleRegressor as EnsembleRegressor
else:  # scikit-learn is optional, and `from eqx_ensemble import *` works without it
    __getattr__, __dir__, __all__ = _import_when_used(
        __name__, subpackages=[], names={"_classifier": ["EnsembleClassifier"], "_regressor": ["EnsembleRegressor"]}
    )
