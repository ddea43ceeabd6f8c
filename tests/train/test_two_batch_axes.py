"""`(n, 1)` against `(n,)` in a loss gives a warning, and nothing else does."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status
from eqx_ensemble.train._state import MemberConstants
from eqx_ensemble.train.compiled._loss import as_loss

ROWS = 8  # also the width of the model below, so that a batch's length alone is not enough
KEY = jax.random.key(0)
MODEL = eqx.nn.MLP(3, 1, ROWS, 1, key=KEY)
SCALAR = eqx.nn.MLP(3, "scalar", ROWS, 1, key=KEY)
X = jnp.ones((ROWS, 3))
COLUMN, FLAT = jnp.ones((ROWS, 1)), jnp.ones(ROWS)


class OwnAxis(eqx.Module):
    """Makes its last axis itself, for every example."""

    net: eqx.nn.MLP

    def __call__(self, x):
        return jnp.concatenate([self.net(x)[None]]) * jnp.ones(1)


class Expands(eqx.Module):
    net: eqx.nn.MLP

    def __call__(self, x):
        return self.net(x)[None]


def predict(model, x):
    return jax.vmap(model)(x)


def normal(x, mean, scale):
    return -jnp.mean(jax.scipy.stats.norm.logpdf(x, mean, scale))


@eqx.filter_jit
def compiled_mse(predictions, targets):
    return jnp.mean((predictions - targets) ** 2)


def recurrent(model, x, y):
    def step(hidden, column):
        prediction = jax.vmap(lambda h: model(jnp.stack([h, h, h])))(hidden)
        return hidden, jnp.mean((prediction - y) ** 2)

    return jnp.mean(jax.lax.scan(step, jnp.zeros(len(x)), x.T)[1])


# What compares a column of predictions with a row of targets: model, targets, loss of both.
WRONG = {
    "squares": (MODEL, FLAT, lambda m, x, y: jnp.mean((predict(m, x) - y) ** 2)),
    "squares, the other way": (MODEL, FLAT, lambda m, x, y: jnp.mean((y - predict(m, x)) ** 2)),
    "targets in a column": (SCALAR, COLUMN, lambda m, x, y: jnp.mean((predict(m, x) - y) ** 2)),
    "absolute values": (MODEL, FLAT, lambda m, x, y: jnp.mean(jnp.abs(predict(m, x) - y))),
    "no operator": (MODEL, FLAT, lambda m, x, y: jnp.mean(jnp.square(jnp.subtract(predict(m, x), y)))),
    "a product": (MODEL, FLAT, lambda m, x, y: -jnp.mean(y * jax.nn.log_sigmoid(predict(m, x)))),
    "weights": (MODEL, FLAT, lambda m, x, y: jnp.mean(y * (predict(m, x) - 1.0) ** 2)),
    "a mask": (MODEL, FLAT, lambda m, x, y: jnp.mean(jnp.where(y > 0, predict(m, x), 0.0))),
    "a normal density": (MODEL, FLAT, lambda m, x, y: normal(y, predict(m, x), 1.0)),
    "a normal density in columns": (SCALAR, COLUMN, lambda m, x, y: normal(y, predict(m, x), jnp.ones(()))),
    "optax": (MODEL, FLAT, lambda m, x, y: jnp.mean(optax.huber_loss(predict(m, x) * 1.0, y + 0.0))),
    "compiled": (MODEL, FLAT, lambda m, x, y: compiled_mse(predict(m, x), y)),
    "in a scan": (MODEL, FLAT, recurrent),
    "a model that makes its axis": (Expands(SCALAR), FLAT, lambda m, x, y: jnp.mean((predict(m, x) - y) ** 2)),
    "an axis by concatenation": (OwnAxis(SCALAR), FLAT, lambda m, x, y: jnp.mean((predict(m, x) - y) ** 2)),
    "a slice": (MODEL, FLAT, lambda m, x, y: jnp.mean((predict(m, x)[:, :1] - y) ** 2)),
    "a learned scale": (MODEL, FLAT, lambda m, x, y: jnp.mean((predict(m, x) * m.layers[1].bias - y) ** 2)),
    "after a checkpoint": (MODEL, FLAT, lambda m, x, y: jnp.mean((eqx.filter_checkpoint(predict)(m, x) - y) ** 2)),
    "a comparison": (MODEL, FLAT, lambda m, x, y: jnp.mean(jnp.where(predict(m, x) > y, 1.0, 2.0))),
    "noise": (MODEL, FLAT, lambda m, x, y: jnp.mean(predict(m, x)) + jnp.mean(jax.random.normal(KEY, (len(x), 1)) + y)),
}


def attention(m, x, y):
    scores = x @ x.T
    scores = jnp.where(jnp.tril(jnp.ones((len(x), len(x)), bool)), scores, -1e9)
    weights = jax.nn.softmax(scores + y, axis=-1)
    return jnp.mean((weights @ x).sum(-1) + predict(m, x)[:, 0])


def info_nce(m, x, y):
    z = predict(m, x)
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(x))))


def supervised_contrastive(m, x, y):
    similarities = predict(m, x) @ predict(m, x).T
    same = y[:, None] == y
    return -jnp.mean(jnp.where(same, jax.nn.log_softmax(similarities), 0.0)) - jnp.mean(y.reshape(-1, 1) == y)


def distances(m, x, y):
    z = predict(m, x)
    squares = jnp.sum(z**2, axis=1, keepdims=True) + jnp.sum(z**2, axis=1) - 2 * z @ z.T
    other = jnp.sum(z**2, axis=1)[:, None] + jnp.sum(x**2, axis=1)[None, :]
    return jnp.mean(squares) + jnp.mean(other)


def maximum_mean_discrepancy(m, x, y):
    a = predict(m, x)[:, 0]
    kernel = lambda a, b: jnp.exp(-((a[:, None] - b) ** 2))
    return jnp.mean(kernel(a, a)) - 2 * jnp.mean(kernel(a, y)) + jnp.mean(kernel(y, y))


def cox(m, x, y):
    risk = predict(m, x)
    at_risk = y <= y[:, None]
    return -jnp.mean(risk[:, 0] - jnp.log(jnp.sum(at_risk * jnp.exp(risk[:, 0]), axis=1)))


def ranking(m, x, y):
    score = predict(m, x)
    return jnp.mean(jax.nn.relu(score - score[:, 0]) * jnp.expand_dims(y, 1)) + jnp.mean(score - score.squeeze())


def pairs_by_vmap(m, x, y):
    z = predict(m, x)[:, 0]
    all_pairs = jax.vmap(lambda a: jax.vmap(lambda b: a - b)(y))(z)
    return jnp.mean(jax.vmap(lambda a: (a[None] - y) ** 2)(z)) + jnp.mean(all_pairs)


def radial_features(m, x, y):
    """The centres are as many as the rows, by chance."""
    centres = jnp.linspace(0.0, 1.0, ROWS)
    return jnp.mean(predict(m, x)) + jnp.mean(jnp.exp(-((x[:, :1] - centres) ** 2)))


def bias_of_the_batch_size(m, x, y):
    """A layer as wide as the batch, without `vmap`."""
    hidden = x[:, :1] * m.layers[0].weight[:, 0] + m.layers[0].bias
    return jnp.mean(hidden) + jnp.mean(predict(m, x)[:, 0] - y)


def layer_norm(m, x, y):
    mean, deviation = jnp.mean(x, axis=1, keepdims=True), jnp.std(x, axis=1, keepdims=True)
    return jnp.mean((x - mean) / deviation * jnp.ones(3) + jnp.zeros(3)) + jnp.mean(predict(m, x)[:, 0] - y)


def one_hot(m, x, y):
    return jnp.mean(jax.nn.one_hot(y.astype(int), ROWS) * predict(m, x)) - jnp.mean(jnp.outer(y, y))


def gaussian_process(m, x, y):
    gram = jnp.exp(-((x[:, :1] - x[:, :1].T) ** 2)) + jnp.eye(len(x)) * m.layers[1].bias
    factor = jnp.linalg.cholesky(gram)
    return jnp.sum(jax.scipy.linalg.cho_solve((factor, True), y)) + jnp.mean(jnp.diag(factor))


def columns(m, x, y):
    return jnp.mean((predict(m, x) - y[:, None]) ** 2) + jnp.mean((predict(m, x) - y.reshape(-1, 1)) ** 2)


def in_the_model(m, x, y):
    """One example at a time, where `(1,)` meets a scalar."""
    return jnp.mean(jax.vmap(lambda x, y: jnp.sum((m(x) - y) ** 2))(x, y))


def mixup(m, x, y):
    share = jax.random.beta(KEY, 1.0, 1.0, (len(x), 1))
    mixed = share * x + (1 - share) * x[::-1]
    return jnp.mean((predict(m, mixed)[:, 0] - share[:, 0] * y) ** 2)


def gradient_penalty(m, x, y):
    slopes = jax.vmap(jax.grad(lambda x: m(x)[0]))(x)
    return jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2) + jnp.mean((slopes - jnp.mean(slopes, axis=0)) ** 2)


def heteroscedastic(m, x, y):
    out = jnp.concatenate([predict(m, x), predict(m, x)], axis=1)
    mean, log_scale = out[:, 0], out[:, 1]
    return normal(y, mean, jnp.exp(log_scale))


def library(m, x, y):
    """Functions of jax that compare all pairs internally, on a column that the user did not write."""
    column, knots = x[:, :1] * m.layers[1].bias, jnp.sort(y)
    found = [
        jnp.interp(column, knots, y),
        jnp.searchsorted(knots, column),
        jnp.digitize(column, knots),
        jnp.isin(column, y),
        jax.ops.segment_sum(column, y.astype(int), len(x)),
        jnp.take_along_axis(x, y.astype(int)[:, None], axis=1),
        jnp.quantile(column, jnp.clip(1.0 * y, 0, 1), axis=0),
        jnp.polyval(y, column),
        jnp.histogram(column, knots)[0],
        jnp.cov(column, rowvar=False),
        jnp.einsum("ij,k->ik", column, y),
        jnp.tensordot(column, y, 0),
        jnp.kron(column, y[None]),
        jnp.convolve(column[:, 0], y),
        column @ y[None],
        column.T @ y,
        jnp.linalg.lstsq(jnp.concatenate([column, jnp.ones_like(column)], axis=1), y)[0],
        jax.nn.dot_product_attention(*[column[None, :, None]] * 3),
    ]
    return sum(jnp.mean(value.astype(jnp.float32)) for value in found) + jnp.mean(predict(m, x))


def written_for_one_size(m, x, y):
    assert len(x) == ROWS
    return jnp.mean((predict(m, x)[:, 0] - y) ** 2) + jnp.mean(x[:, :1] * np.arange(float(ROWS), dtype=np.float32))


RIGHT = [
    attention, info_nce, supervised_contrastive, distances, maximum_mean_discrepancy, cox, ranking, pairs_by_vmap,
    radial_features, bias_of_the_batch_size, layer_norm, one_hot, gaussian_process, columns, in_the_model, mixup,
    gradient_penalty, heteroscedastic, library, written_for_one_size,
]  # fmt: skip


def shapes_of(model, x, y, value):
    """The loss as it is traced for one member, of which nothing runs."""
    loss = as_loss(lambda model, batch, key: value(model, *batch), stateful=False, has_aux=False, hyper=None)
    params, static = eqx.partition(model, eqx.is_array)
    fixed = MemberConstants(static, KEY, None)
    one = lambda params, batch, key: loss(params, None, fixed, static, batch, key)[0]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.eval_shape(jax.grad(one), params, (x, y), KEY)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_warned_of(name):
    model, targets, value = WRONG[name]
    with pytest.warns(UserWarning, match="broadcasts the batch axis against itself") as caught:
        shapes_of(model, X, targets, value)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    source = inspect.getsource(inspect.getmodule(shapes_of)).splitlines()[caught[0].lineno - 1]
    assert "predict" in source or "logpdf" in source, "the line is the user's"
    message = str(caught[0].message)
    assert f"line {caught[0].lineno} of {__file__}" in message
    assert f"({ROWS}, 1)" in message
    assert f"({ROWS},)" in message


@pytest.mark.parametrize("value", RIGHT, ids=lambda value: value.__name__)
@pytest.mark.parametrize("targets", ["floats", "integers"])
def test_a_right_loss_is_not(value, targets):
    shapes_of(MODEL, X, FLAT if targets == "floats" else FLAT.astype(int), value)


@pytest.mark.parametrize("rows", [1, 2, 5, ROWS])
def test_every_batch_size_but_one(rows):
    def value(model, x, y):
        return jnp.mean((predict(model, x) - y) ** 2)

    if rows > 1:
        with pytest.warns(UserWarning, match=f"every row is combined with all {rows} rows"):
            shapes_of(MODEL, X[:rows], FLAT[:rows], value)
    else:
        shapes_of(MODEL, X[:rows], FLAT[:rows], value)


def squares(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def test_fit_warns_once_and_trains_on():
    """The last batch of an epoch is smaller, and the validation data are of yet another size."""
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
    data = (X, FLAT)
    options = {"epochs": 2, "batch_size": 3, "validation": (X[:5], FLAT[:5]), "key": KEY}
    with jax.numpy_rank_promotion("allow"), pytest.warns(UserWarning, match="`squares` broadcasts the batch") as caught:
        run = ee.fit(ensemble, squares, optax.sgd(0.1), data, **options)
    assert len(caught) == 1
    assert run.status.tolist() == [Status.OK, Status.OK]


def test_a_step_of_a_wrong_loss_is_warned_of(unhooked):
    """With a state, hyper-parameters and auxiliary outputs, and without run-time type checks."""

    class Normalised(eqx.Module):
        norm: eqx.nn.BatchNorm
        out: eqx.nn.Linear

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
            self.out = eqx.nn.Linear(3, 1, key=key)

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return self.out(x), state

    def loss(model, state, batch, key, hyper):
        x, y = batch
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return hyper["scale"] * jnp.mean((out - y) ** 2), state, {"mean": jnp.mean(out)}

    ensemble, state = ee.build(eqx.nn.make_with_state(Normalised), 2, key=KEY)
    hyper = {"scale": np.ones(2, np.float32)}
    first = ee.train.init(ensemble, optax.sgd(0.1), state=state, hyper=hyper, key=KEY)
    step = ee.train.make_step(loss, optax.sgd(0.1), has_aux=True)
    with jax.numpy_rank_promotion("allow"), pytest.warns(UserWarning, match="`loss` broadcasts the batch") as caught:
        step(first, (X, FLAT))
    assert len(caught) == 1
