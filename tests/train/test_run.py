"""The best members of a run, and its table."""

import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._table import table_of

from ..factories import mse

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (32, 3))
DATA = X, X.sum(1, keepdims=True)


def swept(**options):
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 6, key=KEY)
    hyper = {"lr": jnp.array([1e-3, 1e-1, jnp.inf, 1e-2, 1e-4, 3e-2]), "betas": np.full((6, 2), 0.9)}
    optimiser = lambda h: optax.sgd(h["lr"], momentum=h["betas"][0])
    with pytest.warns(UserWarning, match="diverged"):
        return ee.fit(ensemble, mse, optimiser, DATA, epochs=2, hyper=hyper, progress=False, key=KEY, **options)


def test_the_best_come_first_and_diverged_members_never():
    run = swept(validation=DATA)
    order = [i for i in np.argsort(run.best_score).tolist() if i != 2]
    np.testing.assert_array_equal(run.best(5).stacked.weight, run.ensemble.stacked.weight[jnp.array(order)])
    with pytest.raises(ValueError, match="`count` of at most 5, the number of healthy members with a score; got 6"):
        run.best(6)


def test_by_scores_of_ones_own():
    run = swept()
    best = run.best(2, by=[5, 4, 0, np.nan, 2, 1], mode="min")
    np.testing.assert_array_equal(best.stacked.weight, run.ensemble.stacked.weight[jnp.array([5, 4])])
    with pytest.raises(TypeError, match="train with `validation=` data, or pass `by="):
        run.best()
    with pytest.raises(ValueError, match=re.escape("expected (6,), got (2,)")):
        run.best(by=[1, 2], mode="min")


NAMES = ["member", "betas[0]", "betas[1]", "lr", "loss", "status", "stopped_at"]


def test_a_table_with_pandas_and_without(monkeypatch):
    pandas, run = pytest.importorskip("pandas"), swept()
    frame = run.table()
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = run.table()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame) == list(table) == NAMES
    for name in NAMES:
        np.testing.assert_array_equal(np.asarray(frame[name]), table[name])
    first, *lines = repr(table).splitlines()
    assert first.split() == NAMES
    assert lines[2].split() == ["2", "0.9", "0.9", "inf", "4.897", "diverged", "0"]
    assert {len(line) for line in lines} == {len(first)}
    assert "<tr><th>member</th><th>betas[0]</th>" in table._repr_html_()
    assert len(repr(table_of({"x": np.arange(50)})).splitlines()) == 22  # with the names and an ellipsis
