"""What random calls of `fit` train: a small network, with a loss that is NaN at random for members of high `risk`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

KEY = jax.random.key(11)


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.Dropout
    out: eqx.nn.Linear
    seen: eqx.nn.StateIndex | None

    def __init__(self, key, stateful=False):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 4, key=k1)
        self.norm = eqx.nn.Dropout(0.2)
        self.out = eqx.nn.Linear(4, 1, key=k2)
        self.seen = eqx.nn.StateIndex(jnp.zeros(3)) if stateful else None

    def __call__(self, x, key):
        return self.out(self.norm(jnp.tanh(self.first(x)), key=key))[0]


def loss_of(*, stateful, has_aux, hyper):
    """A loss of the kind that the options ask for."""

    def value_of(model, batch, key, risk):
        x, y, row = batch
        k1, k2 = jax.random.split(key)
        out = jax.vmap(model)(x, jax.random.split(k1, len(x)))
        value = jnp.mean((out - y) ** 2)
        value = jnp.where(jax.random.uniform(k2) < risk, jnp.nan, value)
        return value, {"row": row[0], "mean": jnp.mean(out)}

    def result(value, aux, *state):
        return (value, *state, *([aux] if has_aux else [])) if state or has_aux else value

    def stateless(model, batch, key, hyper=None):
        return result(*value_of(model, batch, key, 0.0 if hyper is None else hyper["risk"]))

    def with_state(model, state, batch, key, hyper=None):
        value, aux = value_of(model, batch, key, 0.0 if hyper is None else hyper["risk"])
        state = state.set(model.seen, 0.9 * state.get(model.seen) + jnp.mean(batch[0], axis=0))
        return result(value, aux, state)

    if hyper:
        return with_state if stateful else stateless
    if stateful:
        return lambda model, state, batch, key: with_state(model, state, batch, key)
    return lambda model, batch, key: stateless(model, batch, key)


def score_of(*, stateful):
    """A score to be maximised."""

    def score(model, *rest):
        x, y, _ = rest[-2]
        out = jax.vmap(lambda x: model(x, None))(x)
        value = -jnp.mean(jnp.abs(out - y))
        return (value + jnp.mean(rest[0].get(model.seen)), rest[0]) if stateful else value

    return score


OPTIMISERS = {
    "sgd": lambda rate: optax.sgd(rate),
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": lambda rate: optax.adam(rate),
}


def data_of(num_rows, num_members, rng, *, each):
    """Inputs, targets (one row per member with `each`) and numbers of rows."""
    x = rng.normal(size=(num_rows, 3)).astype(np.float32)
    y = np.sin(x[:, 0]) + rng.normal(size=(num_members, num_rows) if each else num_rows).astype(np.float32)
    return x, y.astype(np.float32), np.arange(num_rows, dtype=np.int32)
