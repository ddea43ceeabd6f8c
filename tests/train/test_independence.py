"""Member i of an ensemble is the model that one gets by training it alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import CASES, Alone, assert_close, assert_same, data, distance, in_order, mse, step_key

STEPS = 20
BATCH = 8  # 20 rows: the last batch of an epoch has 4
MODEL_KEY, KEY = jax.random.key(3), jax.random.key(11)

OPTIMISERS = {
    "adam": lambda eps: optax.adam(1e-2, eps=eps),
    "clip and adam": lambda eps: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=eps)),
    "adamw": lambda eps: optax.adamw(1e-2, eps=eps, weight_decay=0.1),
    "lamb": lambda eps: optax.lamb(1e-2),
    "muon": lambda eps: optax.contrib.muon(1e-2),
    "adafactor": lambda eps: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lbfgs": lambda eps: optax.lbfgs(),
}


def built(case, num_members):
    """The ensemble and its state, which is `None` for stateless members."""
    made = ee.build(case.make, num_members, key=MODEL_KEY)
    return made if case.stateful else (made, None)


def members(ensemble, state):
    """Each member as an ordinary model, with its id and its own state."""
    states = [None] * len(ensemble) if state is None else ee.tree.unstack(state)
    return zip(ensemble.ids.tolist(), ensemble.unstack(), states, strict=True)


def fitted(case, optimiser, num_members, **options):
    ensemble, state = built(case, num_members)
    options = {"steps": STEPS, "batch_size": BATCH, "order": "given", "state": state, "key": KEY} | options
    return ensemble, state, ee.fit(ensemble, case.loss, optimiser, data(), **options)


def assert_alone(case, optimiser, ensemble, state, run):
    alone = Alone(case.loss, optimiser, stateful=case.stateful)
    batches = in_order(data(), BATCH, STEPS)
    for i, (member, model, own_state) in enumerate(members(ensemble, state)):
        keys = [step_key(KEY, member, step) for step in range(STEPS)]
        expected, expected_state, losses = alone(model, batches, keys, state=own_state)
        assert distance(expected, model) > 1e-2, "the reference has not moved"
        assert_close(run.ensemble[i], expected, case.rtol)
        np.testing.assert_allclose(run.history.loss[i], losses, rtol=case.rtol)
        if case.stateful:
            assert_close(ee.tree.take(run.state, i), expected_state, case.rtol)


@pytest.mark.parametrize("num_members", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_every_model_with_adam(name, num_members):
    case = CASES[name]
    optimiser = OPTIMISERS["adam"](case.eps)
    assert_alone(case, optimiser, *fitted(case, optimiser, num_members))


@pytest.mark.parametrize("name", CASES)
def test_every_model_with_a_clipped_gradient(name):
    case = CASES[name]
    optimiser = OPTIMISERS["clip and adam"](case.eps)
    assert_alone(case, optimiser, *fitted(case, optimiser, 5))


@pytest.mark.parametrize("num_members", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_with_an_mlp(name, num_members):
    optimiser = OPTIMISERS[name](1e-8)
    assert_alone(CASES["mlp"], optimiser, *fitted(CASES["mlp"], optimiser, num_members))
