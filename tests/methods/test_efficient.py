"""Joint ensembles: against their sub-members as ordinary models, formulas in NumPy, and training alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import efficient
from eqx_ensemble.methods.efficient import batch_ensemble, masksembles, mean_loss, members, mimo, packed_ensemble, tabm

from ..factories import CASES, Alone, assert_close, assert_same, data, distance, in_order, mse, relaxed, step_key
from ..marking import slow_but

KEY = jax.random.key(3)
X = np.asarray(jax.random.normal(jax.random.key(4), (7, 12)))
MLP = eqx.nn.MLP(12, 2, 8, 2, key=jax.random.key(5))
KINDS = {
    "batch_ensemble": batch_ensemble,
    "signs": lambda model, k, **options: batch_ensemble(model, k, factors="signs", **options),
    "tabm": tabm,
    "mimo": mimo,
    "masksembles": masksembles,
    "packed": packed_ensemble,
    "grouped": lambda model, k, **options: packed_ensemble(model, k, gamma=2, **options),
}
CONVOLUTIONS = eqx.nn.Sequential([
    eqx.nn.Lambda(lambda x: x.reshape(1, 3, 4)), eqx.nn.Conv2d(1, 6, 2, key=KEY), eqx.nn.Lambda(jnp.tanh),
    eqx.nn.Conv2d(6, 6, 2, padding="SAME", use_bias=False, key=KEY), eqx.nn.Lambda(jnp.tanh),
    eqx.nn.Conv2d(6, 4, (1, 2), key=KEY), eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(16, 2, key=KEY),
])  # fmt: skip


@pytest.mark.parametrize("name", slow_but(["batch_ensemble", "mimo"], KINDS))
@pytest.mark.parametrize("model", slow_but(["mlp"], ["mlp", "convolutions"]))
def test_a_joint_ensemble_is_its_members_taken_out(model, name):
    model = {"mlp": MLP, "convolutions": CONVOLUTIONS}[model]

    @eqx.filter_jit
    def both(key):
        joint = KINDS[name](model, 3, key=key)
        dense = members(joint)
        return jax.vmap(joint)(X), jnp.stack([jax.vmap(member)(X) for member in dense]), dense

    got, expected, dense = both(KEY)
    got = np.moveaxis(np.asarray(got), 1, 0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)  # other orders of sums
    for other in range(1, 3):
        assert np.abs(got - np.roll(expected, other, axis=0)).max() > 1e-2, "sub-members are alike"
    if name not in ("packed", "grouped"):
        assert jax.tree.structure(dense[0]) == jax.tree.structure(model)
    half = eqx.nn.MLP(4, 2, 6, 2, dtype=jnp.bfloat16, key=KEY)
    joint = eqx.filter_eval_shape(lambda: KINDS[name](half, 2, key=KEY)(jnp.ones(4, jnp.bfloat16)))
    assert joint.dtype == jnp.bfloat16


@pytest.mark.slow
def test_numbers_of_weights():
    """Those of the papers' formulas for 10-64-64-3 and four sub-members."""
    model = eqx.nn.MLP(10, 3, 64, 2, key=KEY)
    inexact = lambda tree: eqx.filter(tree, lambda x: jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact))
    weights = lambda tree: sum(x.size for x in jax.tree.leaves(inexact(tree)))
    count = lambda convert: weights(eqx.filter_eval_shape(lambda: convert(model, 4, key=KEY)))
    assert weights(model) == count(masksembles) == 5059
    assert count(batch_ensemble) == 5059 - 131 + 4 * (138 + 2 * 131)
    assert count(mimo) == 7564
    assert count(tabm) == 4736 + 4 * (74 + 2 * 128) + 4 * 195
    assert count(packed_ensemble) == 4 * (11 * 32 + 33 * 32 + 33 * 3)
    blocks = np.asarray(members(packed_ensemble(MLP, 2, gamma=4, key=KEY))[0].layers[1].weight).reshape(4, 2, 4, 2)
    assert all((np.abs(blocks[i, :, j]).max() > 0) == (i == j) for i in range(4) for j in range(4))


@pytest.mark.slow
def test_factors_of_the_papers():
    """Their formulas and laws; factors of one are the model."""
    joint = batch_ensemble(MLP, 3, key=KEY)
    for i, got in enumerate(np.moveaxis(np.asarray(jax.vmap(joint)(X)), 1, 0)):
        h = X.astype(np.float64)
        for j, (plain, layer) in enumerate(zip(MLP.layers, joint.model.layers, strict=True)):
            w, r, s = (np.asarray(x, np.float64) for x in (plain.weight, layer.in_factors[i], layer.out_factors[i]))
            h = (h * r) @ w.T * s + np.asarray(plain.bias)
            h = np.maximum(h, 0) if j < 2 else h
        np.testing.assert_allclose(got, h, rtol=1e-4, atol=1e-6)
    with pytest.warns(UserWarning, match="stay alike"):
        joint = batch_ensemble(MLP, 3, factors="ones", key=KEY)
    assert_close(members(joint)[2], MLP, 0.0)

    wide = eqx.nn.Linear(500, 400, key=KEY)
    convert = eqx.filter_jit(lambda k, factors: batch_ensemble(wide, k, factors=factors, key=KEY).model)
    normal, fewer = convert(4, "normal"), convert(2, "normal")
    np.testing.assert_array_equal(fewer.in_factors, normal.in_factors[:2])
    scaled = (np.concatenate([normal.in_factors, normal.out_factors], axis=1) - 1) / 0.5
    np.testing.assert_allclose(np.cov(scaled), np.eye(4), atol=5.5 * np.sqrt(2 / 900))
    assert set(np.unique(convert(4, "signs").in_factors)) == {-1.0, 1.0}
    first, second, head = tabm(MLP, 16, key=KEY).model.layers
    assert set(np.unique(first.in_factors)) == {-1.0, 1.0}
    assert all((np.asarray(ones) == 1).all() for ones in (first.out_factors, second.in_factors, second.out_factors))
    assert len(np.unique(head.layer.weight)) == 16 * 2 * 8


@pytest.mark.slow
def test_mimo_is_one_network_with_all_inputs_and_outputs():
    joint, inputs = mimo(MLP, 3, key=KEY), jax.random.normal(jax.random.key(1), (3, 12))
    first, middle, last = joint.model.layers
    expected = last.layer(jax.nn.relu(middle(jax.nn.relu(first.layer(inputs.reshape(-1)))))).reshape(3, 2)
    call = jax.jit(lambda inputs: joint(ee.Each(inputs)))
    np.testing.assert_allclose(call(inputs), expected, rtol=1e-5, atol=1e-6)
    meets = jax.jacobian(call)(inputs)
    assert all(np.abs(meets[i, :, j]).max() > 1e-3 for i in range(3) for j in range(3))


@pytest.mark.parametrize(("count", "scale"), [(4, 2.0)])
def test_masks_keep_the_widths_and_overlaps_of_the_paper(count, scale):
    """c = m s (1 - (1 - 1/s)^n), every feature kept, and intersection over union 1 / (2s - 1)."""
    width, model = 240, eqx.nn.Linear(240, 1, key=KEY)
    masks = np.asarray(masksembles(model, count, scale=scale, where=eqx.nn.Linear, key=KEY).model.mask)
    assert masks.any(axis=0).all()
    (kept,) = set(masks.sum(axis=1))
    assert abs(kept * scale * (1 - (1 - 1 / scale) ** count) - width) <= max(scale * count / 2, 1)
    overlap = np.mean([(a & b).sum() / (a | b).sum() for i, a in enumerate(masks) for b in masks[:i]])
    assert abs(overlap - 1 / (2 * scale - 1)) < 0.04


@pytest.mark.slow
def test_inputs_keys_and_predictions_of_submembers():
    model = eqx.nn.Sequential([eqx.nn.Linear(12, 30, key=KEY), eqx.nn.Dropout(0.5)])
    joint = batch_ensemble(model, 3, key=KEY)
    dropped = np.asarray(joint(X[0], key=KEY)) == 0
    assert all((dropped[i] != dropped[j]).any() for i in range(3) for j in range(i))
    np.testing.assert_allclose(batch_ensemble(model, 2, key=KEY)(X[0], key=KEY), joint(X[0], key=KEY)[:2], rtol=1e-6)
    joint = batch_ensemble(MLP, 3, key=KEY)
    got = jax.vmap(lambda xs: joint(ee.Each(xs)))(jnp.stack([X, 2 * X, -X], axis=1))
    each = np.stack([jax.vmap(joint)(x)[:, i] for i, x in enumerate((X, 2 * X, -X))], axis=1)
    np.testing.assert_allclose(got, each, rtol=1e-5, atol=1e-6)
    ensemble = ee.build(lambda key: tabm(eqx.nn.MLP(12, 2, 8, 1, key=key), 3, key=key), 2, key=KEY)[[1, 0]]
    flat = efficient.as_members(ee.predict(ensemble, X))
    np.testing.assert_allclose(flat, ee.predict(members(ensemble), X), rtol=1e-4, atol=1e-6)


LINEAR = eqx.nn.Linear(2, 2, key=KEY)


def test_bad_arguments(unhooked):
    with pytest.raises((TypeError, ValueError), match="a weight of 2 axes"):
        batch_ensemble(ee.stack([LINEAR] * 3), 2, key=KEY)
    with pytest.raises((TypeError, ValueError), match="weights are their own"):
        batch_ensemble(eqx.nn.Sequential([LINEAR, LINEAR]), 2, key=KEY)
    grouped = eqx.nn.Sequential([eqx.nn.Conv1d(4, 4, 3, groups=2, key=KEY), eqx.nn.Conv1d(4, 4, 3, key=KEY)])
    for convert in (mimo, packed_ensemble):
        with pytest.raises(ValueError, match=f"`methods.efficient.{convert.__name__}` needs layers without groups"):
            convert(grouped, 2, key=KEY)
    with pytest.raises((TypeError, ValueError), match="different rows for the sub-members of `mimo`"):
        mean_loss(mse)(mimo(MLP, key=KEY), data(), KEY)


ADAM, LOSS = optax.adam(1e-2), mean_loss(mse)


def make(key, kind=batch_ensemble):
    return kind(eqx.nn.MLP(25, 2, 6, 1, key=key), 3, key=key)


@pytest.mark.slow
def test_gradients_and_the_mean_of_losses():
    """dL/dW is the mean of dL_i/dW_i * s_i r_i'."""
    joint, (x, y) = make(KEY), data()
    value, grads = eqx.filter_value_and_grad(LOSS)(joint, (x, y), KEY)
    np.testing.assert_allclose(value, np.mean([mse(member, (x, y), KEY) for member in members(joint)]), rtol=1e-5)
    dense = [eqx.filter_grad(mse)(member, (x, y), KEY) for member in members(joint)]
    for j, layer in enumerate(joint.model.layers):
        own = layer.out_factors[:, :, None] * layer.in_factors[:, None, :]
        expected = np.mean(own * np.stack([g.layers[j].weight for g in dense]), axis=0)
        np.testing.assert_allclose(grads.model.layers[j].layer.weight, expected, rtol=1e-4, atol=1e-6)
        biases = np.stack([g.layers[j].bias for g in dense]) / 3
        np.testing.assert_allclose(grads.model.layers[j].bias, biases, rtol=1e-4, atol=1e-6)
    with pytest.warns(UserWarning, match="rows='split'"):  # which never part with the same rows
        alike = batch_ensemble(eqx.nn.MLP(25, 2, 6, 1, key=KEY), 3, std=0.0, key=KEY)
    spread = lambda loss: np.ptp(eqx.filter_grad(loss)(alike, (x, y), KEY).model.layers[0].in_factors, axis=0).max()
    assert spread(LOSS) == 0.0
    assert spread(mean_loss(mse, rows="split")) > 1e-3


def test_rows_of_the_submembers():
    def seen(rows, num_rows, **options):
        look = lambda model, batch, key: (jnp.float32(0), batch)
        joint, values = batch_ensemble(LINEAR, 3, key=KEY), jnp.arange(num_rows)
        _, (first, second) = mean_loss(look, rows=rows, **options)(joint, (values, {"a": -values}), KEY)
        np.testing.assert_array_equal(first, -second["a"])
        return np.asarray(first)

    np.testing.assert_array_equal(seen("same", 4), [[0, 1, 2, 3]] * 3)
    np.testing.assert_array_equal(seen("split", 7), [[0, 1, 2], [3, 4, 5], [6, 0, 1]])
    shuffled = seen("shuffle", 50)
    np.testing.assert_array_equal(np.sort(shuffled), [np.arange(50)] * 3)
    assert all((shuffled[i] == shuffled[j]).mean() < 0.3 for i in range(3) for j in range(i))
    repeated = seen("shuffle", 20, repetitions=4, same_inputs=0.25)
    assert [np.bincount(own).tolist() for own in repeated] == [[4] * 20] * 3
    np.testing.assert_array_equal(repeated[:, 60:], np.broadcast_to(repeated[0, 60:], (3, 20)))
    assert all((repeated[i] != repeated[j])[:60].mean() > 0.5 for i in range(3) for j in range(i))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows"), [(batch_ensemble, "same"), pytest.param(mimo, "shuffle", marks=pytest.mark.slow)]
)
def test_trained_as_each_alone_saved_and_resumed(kind, rows, tmp_path):
    ensemble, loss = ee.build(lambda key: make(key, kind), 2, key=KEY), mean_loss(mse, rows=rows)
    options = dict(batch_size=8, shuffle=False, key=KEY)
    fit = lambda steps=4, **more: ee.fit(ensemble, loss, ADAM, data(), steps=steps, **options, **more)
    run, keys = fit(), [step_key(KEY, 1, step) for step in range(4)]
    assert_close(run.ensemble[1], Alone(loss, ADAM)(ensemble[1], in_order(data(), 8, 4), keys)[0], 1e-5)
    fit(2, checkpoint=tmp_path / "run")
    assert_same(fit(checkpoint=tmp_path / "run").ensemble, run.ensemble)
    ee.save(tmp_path / "joint", run.ensemble)
    assert_same(ee.load(tmp_path / "joint", lambda key: make(key, kind)), run.ensemble)


@pytest.mark.slow
def test_fast_weights_have_their_own_optimiser_and_hyper_parameters():
    ensemble, scaled = ee.build(make, 2, key=KEY), lambda model, batch, key, hyper: hyper * mse(model, batch, key)
    optimiser = optax.multi_transform({"fast": optax.set_to_zero(), "slow": optax.sgd(0.1)}, efficient.weight_labels)
    options = dict(hyper=jnp.array([1.0, 0.0]), steps=2, batch_size=20, key=KEY)
    run = ee.fit(ensemble, mean_loss(scaled), optimiser, data(), **options)
    for old, new in zip(ensemble.stacked.model.layers, run.ensemble.stacked.model.layers, strict=True):
        assert_same((new.in_factors, new.out_factors), (old.in_factors, old.out_factors))
        assert distance((new.layer.weight, new.bias), (old.layer.weight, old.bias)) > 1e-4
    assert_close(run.ensemble[1], ensemble[1], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [batch_ensemble, mimo])
def test_states_of_submembers(kind):
    """One for each, but one for all that share a forward pass."""

    def made(key):
        model, state = CASES["conv and batch norm"].make(key)
        return kind(model, 3, key=key), state if kind is mimo else ee.tree.stack([state] * 3)

    (ensemble, state), x = ee.build(made, 2, key=KEY), data()[0]
    loss = mean_loss(CASES["conv and batch norm"].loss, rows="shuffle" if kind is mimo else "same")
    run = ee.fit(ensemble, loss, optax.adam(1e-2, eps=1e-3), data(), state=state, steps=4, batch_size=10, key=KEY)
    flat = lambda x: jnp.repeat(x, 3, axis=0) if kind is mimo else x.reshape((-1, *x.shape[2:]))
    with relaxed():  # BatchNorm's counter
        expected = ee.predict(members(run.ensemble), x, state=jax.tree.map(flat, run.state))
        np.testing.assert_allclose(efficient.as_members(run.predict(x)), expected, rtol=1e-4, atol=1e-5)
