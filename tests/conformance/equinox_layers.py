"""Every layer of `equinox.nn`."""

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn

from .cases import Case, values


class Tied(eqx.Module):
    shared: nn.Shared

    def __init__(self, *, key):
        embedding, linear = nn.Embedding(5, 3, key=key), nn.Linear(3, 5, use_bias=False, key=key)
        self.shared = nn.Shared((embedding, linear), where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)

    def __call__(self, token):
        embedding, linear = self.shared()
        return linear(embedding(token))


class Counter(nn.StatefulLayer):
    index: nn.StateIndex
    weight: jax.Array

    def __init__(self, *, key):
        self.index = nn.StateIndex(jnp.zeros(()))
        self.weight = jax.random.normal(key)

    def __call__(self, x, state, *, key=None):
        count = state.get(self.index) + 1
        return self.weight * x * count, state.set(self.index, count)


def over_rows(layer, x, state):
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def stateful(layer, **options):
    return lambda key: nn.make_with_state(layer)(**options, key=key)


def pool(name, dims):
    """A pool has no arrays: it stands behind a convolution, as in a member that is trained."""
    layer = getattr(nn, name)(2)
    return Case(lambda key: nn.Sequential([nn.Conv(dims, 1, 2, 1, key=key), layer]), values(1, *(4,) * dims))


drop_key = jax.random.key(1)

CASES = {
    "Linear": Case(lambda key: nn.Linear(3, 2, key=key), values(3)),
    "MLP": Case(lambda key: nn.MLP(3, 2, 4, 1, key=key), values(3)),
    "Identity": Case(lambda key: nn.Sequential([nn.Linear(3, 2, key=key), nn.Identity()]), values(3)),
    "Lambda": Case(lambda key: nn.Sequential([nn.Linear(3, 2, key=key), nn.Lambda(jax.nn.relu)]), values(3)),
    "Sequential": Case(lambda key: nn.Sequential([nn.Linear(3, 2, key=key), nn.LayerNorm(2)]), values(3)),
    "PReLU": Case(lambda key: nn.PReLU(0.25), values(3)),
    "Dropout": Case(
        lambda key: nn.Sequential([nn.Linear(3, 2, key=key), nn.Dropout(0.5)]),
        values(3),
        lambda model, x: model(x, key=drop_key),
    ),
    "Embedding": Case(lambda key: nn.Embedding(5, 3, key=key), jnp.array(2)),
    "RotaryPositionalEmbedding": Case(
        lambda key: (nn.Linear(4, 4, key=key), nn.RotaryPositionalEmbedding(4)),
        values(3, 4),
        lambda pair, x: pair[1](jax.vmap(pair[0])(x)),
    ),
    "LayerNorm": Case(lambda key: nn.LayerNorm(3), values(3)),
    "RMSNorm": Case(lambda key: nn.RMSNorm(3), values(3)),
    "GroupNorm": Case(lambda key: nn.GroupNorm(2, 4), values(4, 3)),
    "BatchNorm": Case(stateful(lambda key: nn.BatchNorm(3, "batch", mode="ema")), values(5, 3), over_rows),
    "SpectralNorm": Case(
        lambda key: nn.make_with_state(nn.SpectralNorm)(nn.Linear(3, 2, key=key), "weight", key=key),
        values(3),
        rtol=1e-4,  # the power iteration divides by norms
    ),
    "WeightNorm": Case(lambda key: nn.WeightNorm(nn.Linear(3, 2, key=key)), values(3)),
    "Shared": Case(lambda key: Tied(key=key), jnp.array(2)),
    "StatefulLayer": Case(stateful(Counter), values(3)),
    "StateIndex": Case(stateful(Counter), values(3)),
    "State": Case(stateful(Counter), values(3)),
    "GRUCell": Case(lambda key: nn.GRUCell(3, 2, key=key), values(3), lambda cell, x: cell(x, jnp.zeros(2))),
    "LSTMCell": Case(
        lambda key: nn.LSTMCell(3, 2, key=key), values(3), lambda cell, x: cell(x, (jnp.zeros(2), jnp.zeros(2)))
    ),
    "MultiheadAttention": Case(
        lambda key: nn.MultiheadAttention(2, 4, key=key), values(3, 4), lambda layer, x: layer(x, x, x)
    ),
    "Conv": Case(lambda key: nn.Conv(1, 2, 3, 2, key=key), values(2, 5)),
    "ConvTranspose": Case(lambda key: nn.ConvTranspose(1, 2, 3, 2, key=key), values(2, 5)),
    "Pool": Case(
        lambda key: nn.Sequential(
            [nn.Conv1d(1, 2, 1, key=key), nn.Pool(0.0, jax.lax.add, num_spatial_dims=1, kernel_size=2)]
        ),
        values(1, 4),
    ),
    "AdaptivePool": Case(
        lambda key: nn.Sequential(
            [nn.Conv1d(1, 2, 1, key=key), nn.AdaptivePool(2, num_spatial_dims=1, operation=jnp.sum)]
        ),
        values(1, 4),
    ),
}
for dims in (1, 2, 3):
    for kind in ("Conv", "ConvTranspose"):
        layer = getattr(nn, f"{kind}{dims}d")
        CASES[f"{kind}{dims}d"] = Case(lambda key, layer=layer: layer(2, 3, 2, key=key), values(2, *(3,) * dims))
    for name in ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool"):
        CASES[f"{name}{dims}d"] = pool(f"{name}{dims}d", dims)
