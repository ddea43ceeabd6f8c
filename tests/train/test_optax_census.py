"""Every public optimiser and transform of optax gives the members what training each of them alone gives."""

import functools
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import distance, relaxed
from ..marking import slow_but
from .optax_cases import ARGUMENTS, COMPLETE, NOT_TRAINED, PUBLIC, RATE, TELLING, TRAINED, measure, optimiser, required

MEMBERS, STEPS = 3, 20


class Net(eqx.Module):
    first: jax.Array
    bias: jax.Array
    second: jax.Array

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.first = jax.random.normal(k1, (4, 6)) / 2
        self.bias = jax.random.normal(k2, (6,)) / 2
        self.second = jax.random.normal(k3, (6, 4)) / 2

    def __call__(self, x):
        return jnp.tanh(x @ self.first + self.bias) @ self.second


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def once_a_precision(make):
    """Makes it once with 32 bits, and once with 64."""
    made = functools.cache(lambda dtype: make())
    return lambda: made(jnp.zeros(()).dtype)


@once_a_precision
def ensemble():
    return ee.build(Net, MEMBERS, key=jax.random.key(0))


@once_a_precision
def batches():
    """`(members, rows, ...)` for every step; the members' targets have scales of their own."""
    kx, ky = jax.random.split(jax.random.key(1))
    x, y = jax.random.normal(kx, (STEPS, MEMBERS, 8, 4)), jax.random.normal(ky, (STEPS, MEMBERS, 8, 4))
    return x, y * jnp.array([0.3, 1.0, 4.0]).reshape(1, MEMBERS, 1, 1)


def _with_own_noise(state, member):
    """As documented: a key in an optimiser's state is folded with that of the member."""
    member_key = jax.random.fold_in(
        ee.member_keys(jax.random.key(2), MEMBERS, purpose="fit")[member], zlib.crc32(b"optimiser")
    )
    words = jax.random.key_data(member_key)

    def own(path, x):
        if getattr(path[-1], "name", None) not in ("key", "rng_key"):
            return x
        key = jax.random.fold_in(jax.random.fold_in(x, words[0]), words[1])
        return key if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.random.key_data(key)

    return jax.tree_util.tree_map_with_path(own, state)


@functools.cache
def alone(name):
    """The members, each trained alone by a Python loop."""
    transform = optax.with_extra_args_support(optimiser(name))

    @jax.jit
    def step(params, state, batch):
        value_fn = lambda params: loss(params, batch, None)
        value, grads = jax.value_and_grad(value_fn)(params)
        with relaxed():
            extra = {} if name == "contrib.sam" else {"value": value, "grad": grads, "value_fn": value_fn}
            extra |= (
                {"obj_fn": value_fn} if name in ("contrib.sophia", "contrib.hutchinson_estimator_diag_hessian") else {}
            )
            updates, state = transform.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

    trained = []
    x, y = batches()
    for member, params in enumerate(ensemble().unstack()):
        with relaxed():
            state = _with_own_noise(jax.jit(transform.init)(params), member)
        for i in range(STEPS):
            params, state = step(params, state, (x[i, member], y[i, member]))
        trained.append(params)
    return trained


def together(name):
    state = ee.train.init(ensemble(), optimiser(name), key=jax.random.key(2))
    step = ee.train.make_step(loss, optimiser(name))
    x, y = batches()
    for i in range(STEPS):
        state, metrics = step(state, (ee.Each(x[i]), ee.Each(y[i])))
    assert not np.asarray(metrics.status).any(), "a member diverged, which compares nothing"
    return state.ensemble


def _unmapped(name):
    """What optax does with stacked parameters without a map over members."""
    transform = optimiser(name)

    @jax.jit
    def step(params, state, batch):
        grads = jax.vmap(jax.grad(lambda params, batch: loss(params, batch, None)))(params, batch)
        with relaxed():
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state

    params = ensemble().stacked
    x, y = batches()
    with relaxed():
        state = transform.init(params)
    for i in range(STEPS):
        params, state = step(params, state, (x[i], y[i]))
    return ee.from_stacked(params)


def _worst(trained, name):
    return max(distance(trained[i], expected) for i, expected in enumerate(alone(name)))


def _left_alone(name):
    return name in ("set_to_zero",)


@pytest.mark.parametrize("name", slow_but(["clip_by_global_norm", "lamb", "contrib.prodigy"], TRAINED))
def test_members_train_as_if_alone(name):
    # A line search decides by comparing: with float32 one rounding may send it elsewhere.
    with jax.enable_x64("lbfgs" in name):
        moved = [distance(expected, first) for expected, first in zip(alone(name), ensemble().unstack(), strict=True)]
        assert (min(moved) > 1e-4) != _left_alone(name), "the reference has not moved"
        assert _worst(together(name), name) <= 1e-5


@pytest.mark.parametrize("name", ["clip_by_global_norm", "lamb"])
def test_unmapped_optax_mixes_the_members(name):
    assert _worst(_unmapped(name), name) > 1e-3


def test_unmapped_adam_is_no_control():
    assert _worst(_unmapped("adam"), "adam") <= 1e-5


@pytest.mark.parametrize("name", slow_but(["add_noise"], ["add_noise", "contrib.hutchinson_estimator_diag_hessian"]))
def test_members_draw_their_own_noise(name):
    """Members with equal weights on equal data stay equal but for their noise."""
    twins = ee.stack([ensemble()[0]] * 2)
    state = ee.train.init(twins, optimiser(name), key=jax.random.key(2))
    step = ee.train.make_step(loss, optimiser(name))
    x, y = batches()
    for i in range(3):
        state, _ = step(state, (x[i, 0], y[i, 0]))
    assert distance(state.ensemble[0], state.ensemble[1]) > 1e-4


def test_every_public_name_can_be_made():
    """The test of a name needs this of it, and most of those tests are slow."""
    assert len(PUBLIC) > 120
    for name in set(PUBLIC) - set(ARGUMENTS) - set(NOT_TRAINED):
        assert required(PUBLIC[name]) <= {"learning_rate"}, (
            f"optax.{name} is new: say in ARGUMENTS how it is made, or in NOT_TRAINED why it is not"
        )
    assert {"adam", "scale_by_adam", "nadam", "contrib.muon", "contrib.dog", "monitor"} <= set(PUBLIC)
    assert (set(ARGUMENTS) | set(NOT_TRAINED) | set(TELLING) | COMPLETE) <= set(PUBLIC)


@pytest.mark.parametrize(
    ("optimiser", "error", "message"),
    [
        (lambda: optax.lookahead(optax.adam(RATE), 5, 0.5), AttributeError, "fast"),
        (lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, 0), ValueError, "batch dimension"),
        (
            lambda: optax.chain(optax.adam(RATE), optax.monitor({"norm": measure})),
            ValueError,
            "mismatch",  # of the structure of its state
        ),
    ],
    ids=["lookahead", "private", "monitor"],
)
def test_what_is_not_trained_fails_aloud(optimiser, error, message):
    def one_step():
        state = ee.train.init(ensemble(), optimiser(), key=jax.random.key(2))
        x, y = batches()
        return ee.train.make_step(loss, optimiser())(state, (ee.Each(x[0]), ee.Each(y[0])))

    with pytest.raises(error, match=message):
        one_step()
