"""Estimators with a method in place of a deep ensemble: its `fit` and `predict`, for standardised features."""

import dataclasses
import functools
import inspect
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, Float
from sklearn.base import RegressorMixin

from .._caller import caller
from .._check import kind_text
from ..methods import AbstractMethod, Distilled
from ..methods._engine import loss_of_outputs
from ..train import Validation
from ._base import AbstractEstimator
from ._member import AbstractHead, Classes, Gaussian, Point


class _HeadLoss(eqx.Module):
    """The mean loss of a batch, in the reading of a head."""

    head: AbstractHead

    def __call__(self, model: Any, *inputs: Any) -> Any:
        return loss_of_outputs(self._mean, model, *inputs)

    def _mean(self, outputs: Float[Array, "batch out"], y: Array) -> Float[Array, ""]:
        return jax.vmap(self.head.loss)(outputs, y).mean()


def check_method(estimator: AbstractEstimator, sample_weight: Any) -> None:
    """Raises unless `method` is a method, and the parameters that it replaces have their defaults."""
    method = estimator.method
    if not isinstance(method, AbstractMethod):
        raise TypeError(
            f"`{caller()}` needs `method` to be `None` or one such as `methods.SWAG(4)`; got {kind_text(method)}."
        )
    if isinstance(method, Distilled) and isinstance(estimator, RegressorMixin):
        raise TypeError(
            f"`{caller()}` does not take `methods.Distilled`: its students are classifiers, or return pairs."
        )
    defaults = inspect.signature(type(estimator)).parameters
    names = [name for name in ("num_members", "bootstrap", "warm_start", "class_weight") if name in defaults]
    given = [f"`{name}`" for name in names if getattr(estimator, name) != defaults[name].default]
    given += [] if sample_weight is None else ["`sample_weight`"]
    if given:
        raise TypeError(
            f"`{caller()}` does not take {', '.join(given)} with `method`, which decides on members and rows itself: "
            "`method=ee.methods.Seeds(8)`, `method=ee.methods.Bootstraps(8)`."
        )


def fit_method(estimator: AbstractEstimator, data: tuple[Any, Any], validation: tuple[Any, Any] | None) -> Any:
    """The posterior of standardised rows."""
    head, options = estimator._maker.head, {}
    if validation is not None:
        patience = estimator.n_iter_no_change if estimator.n_iter_no_change < estimator.max_iter else None
        options = {"validation": Validation(validation, min_delta=estimator.tol), "patience": patience}
    loss: Any = {Classes: "classification", Gaussian: _HeadLoss(head)}.get(type(head), "regression")
    method = estimator.method
    if isinstance(loss, str) and getattr(method, "likelihood", loss) is None:  # which loading needs
        method = dataclasses.replace(method, likelihood=loss)
    estimator._method = method
    optimiser = estimator.optimiser
    if not isinstance(optimiser, optax.GradientTransformation):
        optimiser = _optimiser(optimiser, estimator.learning_rate, estimator.weight_decay)
    return method.fit(
        estimator._maker.networks(), loss, optimiser, data, epochs=estimator.max_iter,
        batch_size=min(estimator.batch_size, len(data[0])), progress=bool(estimator.verbose),
        key=jax.random.key(estimator._seed), **options,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _optimiser(make: Any, learning_rate: float, weight_decay: float) -> optax.GradientTransformation:
    """The same one for the same parameters, so that fits share a program."""
    return optax.adamw(learning_rate, weight_decay=weight_decay) if make is None else make(learning_rate)


def predict_method(estimator: AbstractEstimator, x: np.ndarray) -> Any:
    """What members or draws predict for standardised features, in the reading of the head."""
    found = estimator.posterior_.predict(x, key=jax.random.key(estimator._seed), progress=False)
    head = estimator._maker.head
    if isinstance(head, Classes):
        return found
    if isinstance(found, tuple) and isinstance(head, Point):  # of methods that predict a Gaussian themselves
        return type(found)(*(part.reshape((*part.shape[:2], *head.shape)) for part in found))
    read: Any = jax.vmap(jax.vmap(head.read))
    return read(found)
