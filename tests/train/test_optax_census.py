"""Every public optimiser and transform of optax gives the members what training each of them alone gives."""

import functools
import inspect
import types
import warnings
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import eqx_ensemble as ee

from ..factories import distance, relaxed

MEMBERS, STEPS, RATE = 3, 20, 1e-2

NOT_TRAINED = {
    "lookahead": "trains pairs of weights, `LookaheadParams`, which are no model",
    "contrib.differentially_private_aggregate": "needs gradients per example, which a mean over the batch has lost",
    "contrib.dpsgd": "needs gradients per example, which a mean over the batch has lost",
    "monitor": "changes the structure of its state at the first step, which no compiled loop can follow",
    "measure_with_ema": "gives measurements in place of updates, for `monitor`",
}


def _only_matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _only_vectors(params):
    return jax.tree.map(lambda x: x.ndim == 1, params)


def _muon_numbers(params):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


def _labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def _measure(updates, **_):
    return optax.tree.norm(updates)


def _even(step, **_):
    return step % 2 == 0


def _adam():
    return optax.adam(RATE)


# What the members would share if they could: the norm of their gradients is theirs, so that is what is made visible.
ARGUMENTS = {
    "adaptive_grad_clip": lambda make: make(0.05),
    "add_noise": lambda make: make(0.1, 0.55, 0),
    "apply_if_finite": lambda make: make(_adam(), 3),
    "chain": lambda make: make(optax.clip_by_global_norm(0.1), optax.trace(0.9)),
    "clip": lambda make: make(0.01),
    "clip_by_block_rms": lambda make: make(0.01),
    "clip_by_global_norm": lambda make: make(0.1),
    "conditionally_mask": lambda make: make(optax.normalize_by_update_norm(), _even),
    "conditionally_transform": lambda make: make(optax.normalize_by_update_norm(), _even),
    "ema": lambda make: make(0.9),
    "flatten": lambda make: make(optax.normalize_by_update_norm()),
    "freeze": lambda make: make(_only_vectors),
    "inject_hyperparams": lambda make: make(optax.lamb)(learning_rate=optax.linear_schedule(RATE, 0.0, STEPS)),
    "inject_stateful_hyperparams": lambda make: make(optax.lamb)(learning_rate=RATE),
    "masked": lambda make: make(optax.normalize_by_update_norm(), _only_matrices),
    "multi_transform": lambda make: make({"matrix": optax.lamb(RATE), "vector": optax.sgd(RATE)}, _labels),
    "named_chain": lambda make: make(("clip", optax.clip_by_global_norm(0.1)), ("adam", optax.scale_by_adam())),
    "noisy_sgd": lambda make: make(RATE, eta=0.1, key=0),
    "partition": lambda make: make({"matrix": optax.lamb(RATE), "vector": optax.sgd(RATE)}, _labels),
    "scale": lambda make: make(0.5),
    "scale_by_backtracking_linesearch": lambda make: optax.chain(optax.sgd(1.0), make(10, store_grad=True)),
    "scale_by_schedule": lambda make: make(lambda count: 1 / (1 + count)),
    "scale_by_zoom_linesearch": lambda make: optax.chain(optax.sgd(1.0), make(10)),
    "selective_transform": lambda make: make(optax.lamb(RATE), freeze_mask=_only_vectors(ensemble()[0])),
    "scale_by_distance_over_gradients": lambda make: optax.chain(make(reps_rel=0.05), optax.scale(-1.0)),
    "contrib.scale_by_muon": lambda make: optax.masked(make(weight_dimension_numbers=_muon_numbers), _only_matrices),
    "snapshot": lambda make: make("norm", _measure),
    "stateless": lambda make: make(
        lambda updates, params: jax.tree.map(lambda g: g / optax.tree.norm(updates), updates)
    ),
    "stateless_with_tree_map": lambda make: make(lambda g, p: g / jnp.linalg.norm(p)),
    "trace": lambda make: make(0.9),
    "with_extra_args_support": lambda make: make(optax.normalize_by_update_norm()),
    "contrib.galore": lambda make: make(RATE, rank=2, update_proj_gap=5),
    "contrib.dadapt_adamw": lambda make: make(estim_lr0=1e-2),
    "contrib.dog": lambda make: make(init_step=("heuristic", 1e-2)),
    "contrib.dowg": lambda make: make(init_estim_sq_dist=1e-2),
    "contrib.mechanize": lambda make: make(optax.sgd(RATE), s_init=0.1),
    "contrib.prodigy": lambda make: make(estim_lr0=1e-2),
    "contrib.reduce_on_plateau": lambda make: make(patience=2, rtol=0.2),
    "contrib.sam": lambda make: make(optax.sgd(RATE), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))),
    "contrib.scale_by_galore": lambda make: make(rank=2, update_proj_gap=5),
    "contrib.schedule_free": lambda make: make(_adam(), RATE),
    "contrib.split_real_and_imaginary": lambda make: make(optax.normalize_by_update_norm()),
    "adafactor": lambda make: make(RATE, min_dim_size_to_factor=4),
    "scale_by_factored_rms": lambda make: make(min_dim_size_to_factor=4),
    "multi steps": lambda make: optax.MultiSteps(
        optax.lamb(RATE), 3, should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=30.0)
    ).gradient_transformation(),
}

# Complete optimisers; what is not one and has no learning rate is followed by a step against the gradient.
COMPLETE = {
    "adadelta", "contrib.cocob", "contrib.dadapt_adamw", "contrib.dog", "contrib.dowg", "contrib.mechanize",
    "contrib.momo", "contrib.momo_adam", "contrib.prodigy", "contrib.sam", "contrib.schedule_free_adamw",
    "contrib.schedule_free_sgd", "inject_hyperparams", "inject_stateful_hyperparams", "keep_params_nonnegative",
    "lbfgs", "multi steps", "multi_transform", "partition", "polyak_sgd", "scale_by_backtracking_linesearch",
    "scale_by_distance_over_gradients", "scale_by_zoom_linesearch", "selective_transform",
}  # fmt: skip

# Reductions over all parameters, over a leaf, over an axis, and noise: where members would mix if they could.
TELLING = [
    "adafactor", "adaptive_grad_clip", "adam", "add_noise", "apply_if_finite", "clip_by_block_rms",
    "clip_by_global_norm", "lamb", "normalize_by_update_norm", "polyak_sgd", "sm3", "multi_transform", "multi steps",
    "inject_hyperparams", "contrib.dog", "contrib.mechanize", "contrib.momo", "contrib.muon", "contrib.prodigy",
    "contrib.reduce_on_plateau", "contrib.sam", "contrib.sophia",
]  # fmt: skip


def _required(fn):
    required = [p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]
    return {p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _with_defaults(fn):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return fn(**dict.fromkeys(_required(fn), RATE))


def _returns_transform(fn):
    returned = inspect.signature(fn).return_annotation
    if returned is inspect.Signature.empty:  # some are not annotated
        return "GradientTransformation" in inspect.getsource(fn)
    return "GradientTransformation" in str(returned)


def _public():
    found = {"multi steps": None}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, fn in vars(module).items():
            if name.startswith("_") or not isinstance(fn, types.FunctionType | functools.partial):
                continue
            if prefix + name in ARGUMENTS or _returns_transform(fn):
                found[prefix + name] = fn
    return found


PUBLIC = _public()


def _transform(name):
    if name in ARGUMENTS:
        return ARGUMENTS[name](PUBLIC[name])
    return _with_defaults(PUBLIC[name])


@functools.cache
def optimiser(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # optax's own, at some aliases
        made = _transform(name)
    assert isinstance(made, optax.GradientTransformation)
    takes_rate = PUBLIC[name] is not None and "learning_rate" in inspect.signature(PUBLIC[name]).parameters
    return made if takes_rate or name in COMPLETE else optax.chain(made, optax.scale(-RATE))


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


@functools.cache
def ensemble():
    return ee.build(Net, MEMBERS, key=jax.random.key(0))


@functools.cache
def batches():
    """`(members, rows, ...)` for every step; the members' targets have scales of their own."""
    kx, ky = jax.random.split(jax.random.key(1))
    x, y = jax.random.normal(kx, (STEPS, MEMBERS, 8, 4)), jax.random.normal(ky, (STEPS, MEMBERS, 8, 4))
    return x, y * jnp.array([0.3, 1.0, 4.0]).reshape(1, MEMBERS, 1, 1)


def _with_own_noise(state, member):
    """As the library says: a key in an optimiser's state is folded with the purpose and the member's id."""

    def own(path, x):
        if getattr(path[-1], "name", None) not in ("key", "rng_key"):
            return x
        key = jax.random.fold_in(jax.random.fold_in(x, zlib.crc32(b"optimiser")), member)
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
    """What optax does with stacked parameters when nobody maps it."""
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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in TELLING else pytest.mark.slow) for n in PUBLIC if n not in NOT_TRAINED]
)
def test_members_train_as_if_alone(name):
    moved = [distance(expected, first) for expected, first in zip(alone(name), ensemble().unstack(), strict=True)]
    assert (min(moved) > 1e-4) != _left_alone(name), "the reference has not moved"
    assert _worst(together(name), name) <= 1e-5


@pytest.mark.parametrize("name", ["clip_by_global_norm", "lamb", "adafactor", "contrib.muon"])
def test_unmapped_optax_mixes_the_members(name):
    assert _worst(_unmapped(name), name) > 1e-3


def test_unmapped_adam_is_no_control():
    assert _worst(_unmapped("adam"), "adam") <= 1e-5


@pytest.mark.parametrize("name", ["add_noise", "contrib.hutchinson_estimator_diag_hessian"])
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
        assert _required(PUBLIC[name]) <= {"learning_rate"}, (
            f"optax.{name} is new: say in ARGUMENTS how it is made, or in NOT_TRAINED why it is not"
        )
    assert {"adam", "scale_by_adam", "nadam", "contrib.muon", "contrib.dog", "monitor"} <= set(PUBLIC)
    assert (set(ARGUMENTS) | set(NOT_TRAINED) | set(TELLING) | COMPLETE) <= set(PUBLIC)


@pytest.mark.parametrize(
    ("optimiser", "error", "message"),
    [
        (lambda: optax.lookahead(_adam(), 5, 0.5), AttributeError, "fast"),
        (lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, 0), ValueError, "batch dimension"),
        (
            lambda: optax.chain(_adam(), optax.monitor({"norm": _measure})),
            TypeError,
            "changed the structure of the optim",
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
