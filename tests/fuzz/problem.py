"""What the random runs train: one small model, its losses, its optimisers and data."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

from ..factories import relaxed

KEY, FEATURES = jax.random.key(5), 3
MOST = 7  # members


class Net(eqx.Module):
    """Two layers with dropout between them, and batch normalisation if it has a state."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm | None
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key, *, stateful):
        first, out = jax.random.split(key)
        self.first, self.out = eqx.nn.Linear(FEATURES, 4, key=first), eqx.nn.Linear(4, "scalar", key=out)
        self.norm = eqx.nn.BatchNorm(4, axis_name="rows", mode="batch") if stateful else None
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x, state, key):
        x = jnp.tanh(self.first(x))
        if self.norm is not None:
            with relaxed():
                x, state = self.norm(x, state)
        return self.out(self.dropout(x, key=key)), state


@ft.cache
def ensemble(*, stateful, shared):
    """All members and their state."""
    make = ft.partial(Net, stateful=stateful)
    where = (lambda model: model.first) if shared else None
    made = ee.build(eqx.nn.make_with_state(make) if stateful else make, MOST, shared=where, key=KEY)
    return made if stateful else (made, None)


@ft.cache
def loss_of(*, stateful, has_aux, hyper):
    """The loss of one member; its parameters follow the variant."""

    def outputs(model, state, batch, key):
        x, y = batch
        keys = jax.random.split(key, len(x))
        call = lambda x, key: model(x, state, key)
        out, state = jax.vmap(call, axis_name="rows", out_axes=(0, None))(x, keys)
        return jnp.mean((out - y) ** 2), out, state

    def value(model, state, batch, key, hyper):
        value, out, state = outputs(model, state, batch, key)
        if hyper is not None:
            value = value + hyper["decay"] * jnp.sum(model.out.weight**2)
        aux = {"out": jnp.stack([out[0], jnp.mean(out)]), "rows": len(out)}
        more = ((state,) if stateful else ()) + ((aux,) if has_aux else ())
        return (value, *more) if more else value

    if stateful and hyper:
        return lambda model, state, batch, key, hyper: value(model, state, batch, key, hyper)
    if stateful:
        return lambda model, state, batch, key: value(model, state, batch, key, None)
    if hyper:
        return lambda model, batch, key, hyper: value(model, None, batch, key, hyper)
    return lambda model, batch, key: value(model, None, batch, key, None)


@ft.cache
def score_of(mode, *, stateful):
    """A validation score of one member."""
    sign = -1 if mode == "max" else 1

    def value(model, state, batch, key):
        x, y = batch
        call = lambda x: model(x, state, key)[0]
        return sign * jnp.mean(jnp.abs(jax.vmap(call, axis_name="rows")(x) - y))

    return value if stateful else lambda model, batch, key: value(model, None, batch, key)


def _of_rate(name):
    if name == "momentum":
        return lambda hyper: optax.sgd(hyper["lr"], momentum=0.9)
    return lambda hyper: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(hyper["lr"], eps=1e-4))


OF_HYPER = {name: _of_rate(name) for name in ("momentum", "adam")}
PLAIN = {name: make({"lr": 0.05}) for name, make in OF_HYPER.items()}


@ft.cache
def arrays(seed, rows, *, own):
    """Inputs and targets, of each member if `own`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = np.sin(x[:, 0]).astype(np.float32)
    return x, y + rng.normal(size=(MOST, rows)).astype(np.float32) / 5 if own else y


class Loader:
    """An iterable of batches that fills the same arrays again and again, as loaders do."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for batch in self.batches:
            given = jax.tree.map(np.copy, batch)
            yield given
            for x in jax.tree.leaves(given):
                x[:] = np.nan
