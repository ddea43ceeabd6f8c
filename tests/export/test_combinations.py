"""Every combination that treats rows independently is exported with open numbers of rows and of members."""

import dataclasses
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
ROWS = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
OTHERS = {"variance": jnp.exp, "levels": lambda out: jnp.array([0.1, 0.5]), "num_samples": lambda out: 5}
# These return a number for all rows, compare with targets, need zeros and ones, or say how another one runs.
NOT_OF_ROWS = {
    "streaming", "entropy", "error_correlation", "pairwise_disagreement", "q_statistic", "decompose_nll",
    "decompose_squared_error",
}  # fmt: skip


def combinations():
    for module in (ee.combine, ee.uncertainty):
        for name in dir(module):
            fn = getattr(module, name)
            if not name.startswith("_") and inspect.isfunction(fn) and name not in NOT_OF_ROWS:
                quick = name in ("gaussian", "median")
                yield pytest.param(fn, id=name, marks=() if quick else pytest.mark.slow)


def ensemble_of(num_members):
    return ee.build(lambda key: eqx.nn.Linear(3, 2, key=key), num_members, key=KEY)


def with_needed(fn):
    """The combination with the arguments that it needs, and their names."""
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]

    def combine(out):
        others = {name: KEY if name == "key" else OTHERS[name](out) for name in needed}
        return jax.tree.map(jnp.asarray, tuple(jax.tree.leaves(fn(out, **others))))

    return combine, needed


@pytest.mark.parametrize("fn", combinations())
def test_with_open_rows(fn):
    ensemble, (combine, needed) = ensemble_of(4), with_needed(fn)
    artefact = ee.export(ensemble, shapes=(3,), combine=combine)
    for count in (7, 1):
        want = combine(ee.predict(ensemble, ROWS[:count]))
        for got, expected in zip(artefact(ROWS[:count]), want, strict=True):
            if "key" not in needed:  # draws depend on the number of rows that are drawn at once
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)  # of two compilations


STREAMING = [pytest.param(ee.combine.streaming(ee.combine.mixture), id="streaming")]


@pytest.mark.parametrize("fn", [*combinations(), *STREAMING])
def test_with_open_members(fn):
    (combine, needed), form = with_needed(fn), {"leaves": "beside", "symbolic_members": True}
    artefact = ee.export(ensemble_of(4), shapes=(3,), combine=combine, **form)
    for num_members in (3, 4):
        ensemble = ensemble_of(num_members)
        leaves = {f"model.{name}": np.asarray(getattr(ensemble.stacked, name)) for name in ("weight", "bias")}
        assert leaves.keys() == artefact.leaves.keys()
        got = dataclasses.replace(artefact, leaves=leaves)(ROWS)
        for one, expected in zip(got, combine(ee.predict(ensemble, ROWS)), strict=True):
            if "key" not in needed:
                np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)


def test_a_sketch_needs_a_known_number_of_members():
    form = {"leaves": "beside", "symbolic_members": True, "combine": ee.combine.QuantileSketch([0.5])}
    with pytest.raises(TypeError, match="QuantileSketch` needs a known number of members.\n  got any number"):
        ee.export(ensemble_of(4), shapes=(3,), **form)
