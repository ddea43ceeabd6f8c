"""What the random runs of `test_fit` train: one small model, its losses, optimisers and data."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

KEY, OTHER_KEY = jax.random.key(5), jax.random.key(6)
ROWS, FEATURES = 12, 3


class Net(eqx.Module):
    """One unit with dropout; if it has a state, inputs are centred by their running mean."""

    weight: jax.Array
    bias: jax.Array
    gain: jax.Array
    mean: eqx.nn.StateIndex | None
    inference: bool

    def __init__(self, key, *, stateful):
        self.weight = jax.random.normal(key, (FEATURES,))
        self.bias, self.gain = jnp.zeros(()), jnp.ones(())
        self.mean = eqx.nn.StateIndex(jnp.zeros(FEATURES)) if stateful else None
        self.inference = False

    def __call__(self, x, state, key):
        if self.mean is not None:
            mean = state.get(self.mean)
            if not self.inference:
                mean = 0.5 * mean + 0.5 * jnp.mean(x, axis=0)
                state = state.set(self.mean, mean)
            x = x - mean[None]
        if not self.inference:
            x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
        return self.gain * jnp.tanh(x @ self.weight + self.bias), state


@ft.cache
def make_of(*, stateful):
    """A constructor of one member, with its state if it has one."""
    make = ft.partial(Net, stateful=stateful)
    return eqx.nn.make_with_state(make) if stateful else make


@ft.cache
def fresh_of(*, stateful):
    """A constructor that ignores its key, so that a fresh member is known."""
    return lambda key: make_of(stateful=stateful)(OTHER_KEY)


def squared_error(model, state, batch, key):
    x, y, row = batch
    predicted, state = model(x, state, key)
    noise = 0.1 * jax.random.normal(key, y.shape)  # in validation too
    return jnp.mean((predicted - y - noise) ** 2), state


@ft.cache
def loss_of(*, stateful, has_aux, hyper):
    """The loss; with `hyper`, it fails in the batch with the row `hyper["fault"]`, or its gradient of the weights does.

    The auxiliary outputs are the sum of the batch's rows, an integer, and the mean of its targets.
    """

    def full(model, state, batch, key, hyper=None):
        value, state = squared_error(model, state, batch, key)
        if hyper is not None:
            fails = jnp.any(batch[2] == hyper["fault"])
            value = jnp.where(fails & (hyper["scale"] == 0), jnp.nan, value)
            # Zero, with an infinite gradient.
            shift = jnp.sum(model.weight - jax.lax.stop_gradient(model.weight))
            value += shift * jnp.where(fails, hyper["scale"], 0) * hyper["scale"]
        more = ((state,) if stateful else ()) + (((jnp.sum(batch[2]), jnp.mean(batch[1])),) if has_aux else ())
        return (value, *more) if more else value

    return _with_arguments(full, stateful=stateful, hyper=hyper)


@ft.cache
def score_of(mode, *, stateful):
    """The error, or its negative with `mode="max"`."""

    def full(model, state, batch, key, hyper=None):
        value, state = squared_error(model, state, batch, key)
        value = jnp.sqrt(value) if mode == "min" else -jnp.sqrt(value)
        return (value, state) if stateful else value

    return _with_arguments(full, stateful=stateful, hyper=False)


def _with_arguments(full, *, stateful, hyper):
    if stateful and hyper:
        return lambda model, state, batch, key, hyper: full(model, state, batch, key, hyper)
    if stateful:
        return lambda model, state, batch, key: full(model, state, batch, key)
    if hyper:
        return lambda model, batch, key, hyper: full(model, None, batch, key, hyper)
    return lambda model, batch, key: full(model, None, batch, key)


PLAIN = {
    "momentum": optax.sgd(0.1, momentum=0.5),
    "adam": optax.adam(0.05, eps=1e-3),
    "clip": optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.05, eps=1e-3, weight_decay=0.1)),
    "schedule": optax.sgd(optax.piecewise_constant_schedule(0.3, {3: 0.5, 7: 0.5})),
    "every second": optax.MultiSteps(optax.sgd(0.3), 2).gradient_transformation(),
}
OF_HYPER = {
    "momentum": lambda hyper: optax.sgd(hyper["lr"], momentum=0.5),
    "adam": lambda hyper: optax.adam(hyper["lr"], eps=1e-3),
    "clip": lambda hyper: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(hyper["lr"], eps=1e-3)),
    "injected": lambda hyper: optax.inject_hyperparams(optax.sgd)(learning_rate=hyper["lr"], momentum=0.9),
}


def halve_rate(hyper, key):
    return hyper | {"lr": hyper["lr"] * 0.5, "fault": jnp.full_like(hyper["fault"], -1)}


def arrays(seed, num_rows, num_members, *, each):
    """Inputs, targets `(rows,)` or of each member `(members, rows)`, and the rows' numbers."""
    rng = np.random.default_rng([seed, num_rows])
    x = rng.normal(size=(num_rows, FEATURES)).astype(np.float32)
    shape = (num_members, num_rows) if each else (num_rows,)
    y = np.sin(x[:, 0]) + 0.3 * rng.normal(size=shape)
    return x, y.astype(np.float32), np.arange(num_rows, dtype=np.int32)


class Resumable:
    """An iterator over batches that reports its position by its own live state."""

    def __init__(self, batches):
        self._batches, self._state = batches, {"next": 0}

    def __iter__(self):
        return Resumable(self._batches)

    def __length_hint__(self):
        return len(self._batches)

    def __next__(self):
        if self._state["next"] == len(self._batches):
            raise StopIteration
        self._state["next"] += 1
        return self._batches[self._state["next"] - 1]

    def get_state(self):
        return self._state

    def set_state(self, state):
        self._state = state


def source_of(kind, data, batch_size, *, each):
    """The data as an argument of `fit`."""
    mark = ee.Each if each else lambda y: y
    x, y, row = data
    if kind == "arrays":
        return jnp.asarray(x), mark(jnp.asarray(y)), jnp.asarray(row)
    if kind == "numpy":
        return x, mark(y), row
    if kind == "reader":
        return ee.train.RowReader(data)
    if kind == "reading":
        return ee.train.RowReader(lambda rows: tuple(part[rows] for part in data), num_rows=len(x), threads=2)
    parts = [slice(start, start + batch_size) for start in range(0, len(x), batch_size)]
    batches = [(x[part], mark(y[..., part]), row[part]) for part in parts]
    return {"list": batches, "generator": (batch for batch in batches), "resumable": Resumable(batches)}[kind]
