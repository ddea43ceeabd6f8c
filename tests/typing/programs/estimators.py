"""Estimators and what they learn; `test_programs.py` compares this with two type checkers."""
# pyright: strict
# ruff: noqa: F821

import functools as ft

import equinox as eqx
import numpy as np

import eqx_ensemble as ee

Floats = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def regression(x: Floats, y: Floats) -> None:
    model = ee.sklearn.EnsembleRegressor(num_members=3, head="gaussian", max_iter=20, random_state=0)
    reveal_type(model.fit(x, y))  # is EnsembleRegressor
    reveal_type(model.predict(x))  # is ndarray[tuple[Any, ...], dtype[Any]]
    mean, std = model.predict(x, return_std=True)
    reveal_type(std)  # is ndarray[tuple[Any, ...], dtype[Any]]
    print(mean, std)
    lower, upper = model.predict_interval(x, level=0.9)
    reveal_type(upper)  # is ndarray[tuple[Any, ...], dtype[Any]]
    print(lower, upper)
    reveal_type(model.ensemble_)  # is Ensemble[Member]
    reveal_type(model.ensemble_.num_members)  # is int
    reveal_type(model.n_iter_)  # is int
    reveal_type(ee.predict(model.ensemble_, x, combine=ee.combine.mixture))  # is Any

    ee.sklearn.EnsembleRegressor(num_member=3)  # error of pyright
    ee.sklearn.EnsembleRegressor(None, 3)  # error of pyright
    ee.sklearn.EnsembleRegressor(head="gauss")  # error
    ee.sklearn.EnsembleRegressor(max_iter="20")  # error
    model.predict(x, True)  # error
    model.predict_interval(x, 0.9)  # error
    print(model.predict(x).means)  # error
    model.fit(x)  # error


def classification(x: Floats, y: Floats) -> None:
    make = ft.partial(eqx.nn.MLP, width_size=16, depth=2)
    model = ee.sklearn.EnsembleClassifier(make, bootstrap=True, class_weight="balanced").fit(x, y)
    reveal_type(model)  # is EnsembleClassifier
    reveal_type(model.predict_proba(x))  # is ndarray[tuple[Any, ...], dtype[Any]]
    reveal_type(model.classes_)  # is ndarray[tuple[Any, ...], dtype[Any]]
    reveal_type(model.oob_score_)  # is float

    ee.sklearn.EnsembleClassifier(head="point")  # error of pyright
    model.predict_proba(x, True)  # error
