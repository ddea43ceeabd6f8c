"""A run as text: a few lines about its outcome."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

KEY, MEMBERS = jax.random.key(0), 3
X = jax.random.normal(KEY, (16, 2))
DATA = X, jnp.sum(X, axis=1)


def loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0])[:, 0] - batch[1]) ** 2)


@pytest.fixture(scope="module")
def run():
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), ids=[7, 2, 5], key=KEY)
    hyper = {"rate": np.array([0.1, 1e30, 0.2], np.float32)}
    options = {"hyper": hyper, "validation": DATA, "epochs": 2, "batch_size": 8, "progress": False}
    with pytest.warns(UserWarning, match="diverged"):
        return ee.fit(ensemble, loss, lambda h: optax.sgd(h["rate"]), DATA, key=KEY, **options)


def test_summarises_a_run_in_ten_lines(run):
    lines = repr(run).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 100
    best = run.best()
    place = run.ensemble.ids.tolist().index(best.ids[0])
    assert lines[0] == "Run of 3 members, 4 steps"
    assert lines[1] == "  status   2 ok, 1 diverged (id 2)"
    assert f"{run.best_score[place]:.4g} by id {best.ids[0]} after {run.best_step[place]} steps" in repr(run)
    assert f"time     {run.seconds:.3g} s" in repr(run)
    assert "plan     " in lines[-1]
    assert 0 < run.seconds < 1000


def test_many_members_are_few_lines(run):
    many = eqx.tree_at(
        lambda run: (run.status, run.ensemble.ids, run.history.loss),
        eqx.tree_at(lambda run: (run.best_score, run.best_step), run, (None, None)),
        (np.full(500, Status.DIVERGED, np.int8), np.arange(500), np.full((500, 1), np.nan)),
    )
    assert len(repr(many).splitlines()) <= 10
    assert max(map(len, repr(many).splitlines())) <= 100
    assert "500 diverged (id 0, 1, 2, 3, 4, 5, 6, 7, ...)" in repr(many)


def test_in_a_notebook(run):
    text = run._repr_html_()
    assert text.startswith("<pre>Run of 3 members")
    assert len(text.splitlines()) <= 10


def test_inside_a_compiled_program():
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 1, key=KEY)
    run = ee.fit(ensemble, loss, optax.sgd(0.1), DATA, epochs=1, progress=False, key=KEY)
    seen = []
    jax.jit(lambda step: seen.append(repr(eqx.tree_at(lambda run: run.train_state.step, run, step))))(1)
    assert seen == ["Run(...)"]
    assert "best" not in repr(run)
