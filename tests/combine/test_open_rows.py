"""Every combination that treats rows independently is a program of `jax.export` for any number of rows."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import eqx_ensemble as ee

KEY = jax.random.key(0)
PREDICTIONS = np.random.default_rng(0).normal(size=(4, 7, 2)).astype(np.float32)
OTHERS = {"variance": jnp.exp, "levels": lambda out: jnp.array([0.1, 0.5]), "num_samples": lambda out: 5}
# These return a number for all rows, compare with targets, or need zeros and ones.
NOT_OF_ROWS = {
    "entropy", "error_correlation", "pairwise_disagreement", "q_statistic", "decompose_nll",
    "decompose_squared_error",
}  # fmt: skip


def combinations():
    for module in (ee.combine, ee.uncertainty):
        for name in dir(module):
            fn = getattr(module, name)
            if not name.startswith("_") and inspect.isfunction(fn) and name not in NOT_OF_ROWS:
                quick = name in ("gaussian", "median")
                yield pytest.param(fn, id=name, marks=() if quick else pytest.mark.slow)


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
    combine, needed = with_needed(fn)
    (rows,) = export.symbolic_shape("rows")
    program = export.export(jax.jit(combine))(jax.ShapeDtypeStruct((4, rows, 2), np.float32))
    for count in (7, 1):
        predictions = PREDICTIONS[:, :count]
        for got, expected in zip(program.call(predictions), combine(predictions), strict=True):
            if "key" not in needed:  # draws depend on the number of rows that are drawn at once
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)  # of two compilations
