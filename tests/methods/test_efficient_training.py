"""Joint ensembles in training: gradients, losses, rows, and what `fit` does with them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods.efficient import (
    as_members,
    batch_ensemble,
    masksembles,
    mean_loss,
    members,
    mimo,
    packed_ensemble,
    tabm,
    weight_labels,
)

from ..factories import (
    CASES,
    Alone,
    assert_close,
    assert_same,
    data,
    distance,
    in_order,
    mse,
    mse_with_state,
    relaxed,
    step_key,
)

KEY = jax.random.key(11)
ADAM = optax.adam(1e-2)
MLP = eqx.nn.MLP(25, 2, 6, 1, key=jax.random.key(12))
LOSS = mean_loss(mse)


def make(key):
    return batch_ensemble(eqx.nn.MLP(25, 2, 6, 1, key=key), 3, key=key)


@pytest.mark.slow
def test_shared_weights_learn_from_all_submembers():
    """dL/dW is the mean over sub-members of dL_i/dW_i * s_i r_i'; without one of them it is another."""
    joint = make(KEY)
    grads = eqx.filter_grad(LOSS)(joint, data(), KEY)
    dense = [eqx.filter_grad(mse)(member, data(), KEY) for member in members(joint)]
    for j, layer in enumerate(joint.model.layers):
        of = [
            np.asarray(g.layers[j].weight) * np.outer(layer.out_factors[i], layer.in_factors[i])
            for i, g in enumerate(dense)
        ]
        shared = np.asarray(grads.model.layers[j].layer.weight)
        np.testing.assert_allclose(shared, np.mean(of, axis=0), rtol=1e-4, atol=1e-6)
        assert np.abs(shared - np.mean(of[:2], axis=0)).max() > 1e-3
        biases = np.stack([g.layers[j].bias for g in dense]) / 3
        np.testing.assert_allclose(grads.model.layers[j].bias, biases, rtol=1e-4, atol=1e-6)


def test_factors_of_one_have_one_gradient():
    """The negative control of everything else: with the same rows such sub-members never part."""
    with pytest.warns(UserWarning, match="rows='split'"):
        joint = batch_ensemble(MLP, 3, std=0.0, key=KEY)
    grads = eqx.filter_jit(lambda loss, joint: eqx.filter_grad(loss)(joint, data(), KEY))
    apart = lambda grads: max(float(np.ptp(layer.in_factors, axis=0).max()) for layer in grads.model.layers)
    assert apart(grads(LOSS, joint)) == 0.0
    assert apart(grads(mean_loss(mse, rows="split"), joint)) > 1e-3
    assert apart(grads(LOSS, batch_ensemble(MLP, 3, key=KEY))) > 1e-3


def test_the_loss_is_the_mean_of_losses_and_not_that_of_the_mean():
    """They differ by the ambiguity."""
    joint, (x, y) = tabm(MLP, 8, key=KEY), data()
    predictions = as_members(ee.predict(ee.stack([joint]), x))
    of_each = lambda joint: jnp.stack([mse(member, (x, y), KEY) for member in members(joint)])
    got, each = eqx.filter_jit(lambda joint: (LOSS(joint, (x, y), KEY), of_each(joint)))(joint)
    np.testing.assert_allclose(got, np.mean(each), rtol=1e-5)
    of_mean = np.mean((np.mean(predictions, axis=0) - np.asarray(y)) ** 2)
    ambiguity = np.mean(np.var(predictions, axis=0))
    np.testing.assert_allclose(got, of_mean + ambiguity, rtol=1e-5)
    assert ambiguity > 1e-3
    parts = ee.uncertainty.decompose_squared_error(predictions, y)
    np.testing.assert_allclose(ambiguity, np.mean(parts.ambiguity), rtol=1e-4)


def seen(rows, num_rows, num_submembers=3, key=KEY, **options):
    """The rows that each sub-member sees, `(submembers, n)`, and that what belongs to a row came along."""
    small = eqx.nn.Linear(2, 1, key=KEY)

    def look(model, batch, key):
        return jnp.float32(0), batch

    @jax.jit
    def call(key):
        joint, values = batch_ensemble(small, num_submembers, key=KEY), jnp.arange(num_rows)
        return mean_loss(look, rows=rows, **options)(joint, (values, {"a": -values}), key)

    _, (first, second) = call(key)
    np.testing.assert_array_equal(first, -second["a"])
    return np.asarray(first)


def test_rows_of_the_submembers():
    np.testing.assert_array_equal(seen("same", 4), [[0, 1, 2, 3]] * 3)
    np.testing.assert_array_equal(seen("split", 6), [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(seen("split", 7), [[0, 1, 2], [3, 4, 5], [6, 0, 1]])
    np.testing.assert_array_equal(seen("split", 1), [[0]] * 3)
    shuffled = seen("shuffle", 50)
    np.testing.assert_array_equal(np.sort(shuffled), [np.arange(50)] * 3)
    assert all((shuffled[i] == shuffled[j]).mean() < 0.3 for i in range(3) for j in range(i))
    assert (seen("shuffle", 50, key=jax.random.key(1)) != shuffled).any()
    repeated = seen("shuffle", 20, repetitions=4, same_inputs=0.25)
    assert [np.bincount(own).tolist() for own in repeated] == [[4] * 20] * 3
    np.testing.assert_array_equal(repeated[:, 60:], np.broadcast_to(repeated[0, 60:], (3, 20)))
    assert all((repeated[i] != repeated[j])[:60].mean() > 0.5 for i in range(3) for j in range(i))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mean_loss(3), TypeError, "`loss` to be a function"),
        (lambda: mean_loss(mse, rows="each"), ValueError, "`rows` to be one of"),
        (lambda: mean_loss(mse, rows="split", repetitions=2), ValueError, "needs `rows='shuffle'`"),
        (lambda: mean_loss(mse, rows="shuffle", same_inputs=2), ValueError, "between 0 and 1"),
        (lambda: LOSS(MLP, data(), KEY), TypeError, "needs a `JointEnsemble`, got a MLP"),
        (lambda: LOSS(ee.stack([make(KEY)]), data(), KEY), TypeError, "got an Ensemble.*\n.*A loss sees one member"),
        (lambda: LOSS(mimo(MLP, key=KEY), data(), KEY), ValueError, "different rows for the sub-members of `mimo`"),
        (
            lambda: mean_loss(mse, rows="split")(make(KEY), (jnp.ones(3), jnp.ones(4)), KEY),
            ValueError,
            r"got \[\(3,\), \(4,\)\]",
        ),
    ],
)
def test_bad_arguments(unhooked, call, error, message):
    with pytest.raises(error, match=message):
        call()


def alone(ensemble, i, loss, steps, optimiser=ADAM):
    keys = [step_key(KEY, i, step) for step in range(steps)]
    return Alone(loss, optimiser)(ensemble[i], in_order(data(), 8, steps), keys)[0]


@pytest.fixture(scope="module")
def trained():
    ensemble = ee.build(make, 3, key=KEY)
    return ensemble, ee.fit(ensemble, LOSS, ADAM, data(), steps=6, batch_size=8, shuffle=False, key=KEY)


def test_joint_ensembles_are_trained_as_each_alone(trained):
    ensemble, run = trained
    assert_close(run.ensemble[1], alone(ensemble, 1, LOSS, 6), 1e-5)


@pytest.mark.slow
def test_joint_ensembles_do_not_depend_on_each_other(trained):
    ensemble, run = trained
    keys = ee.member_keys(KEY, 3, purpose="fit")[np.array([2, 1])]
    with_two = ee.fit(ensemble[[2, 1]], LOSS, ADAM, data(), steps=6, batch_size=8, shuffle=False, key=keys)
    assert_close(with_two.ensemble[1], run.ensemble[1], 1e-6)
    x = data()[0]
    dense = members(run.ensemble)
    np.testing.assert_allclose(as_members(run.predict(x)), ee.predict(dense, x), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["split", "shuffle"])
@pytest.mark.parametrize("kind", [mimo, masksembles, packed_ensemble, tabm])
def test_every_kind_is_trained_as_alone(kind, rows):
    convert = lambda key: kind(eqx.nn.MLP(25, 2, 6, 1, key=key), 3, key=key)
    ensemble = ee.build(convert, 2, key=KEY)
    loss = mean_loss(mse, rows=rows)
    run = ee.fit(ensemble, loss, ADAM, data(), steps=4, batch_size=8, shuffle=False, key=KEY)
    assert_close(run.ensemble[1], alone(ensemble, 1, loss, 4), 1e-5)
    if kind is masksembles:
        np.testing.assert_array_equal(run.ensemble.stacked.model.layers[1].mask, ensemble.stacked.model.layers[1].mask)


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"plan": ee.plan.Blocks(1)}, {"plan": ee.plan.Vmap()}, {"mesh": 3}])
def test_plans_and_devices_change_nothing(trained, option):
    ensemble, run = trained
    option = {"mesh": ee.make_mesh(3, devices=jax.devices()[:3])} if "mesh" in option else option
    other = ee.fit(ensemble, LOSS, ADAM, data(), steps=6, batch_size=8, shuffle=False, key=KEY, **option)
    assert_close(other.ensemble, run.ensemble, 1e-5)


def test_saved_and_loaded(tmp_path, trained):
    _, run = trained
    ee.save(tmp_path / "joint", run.ensemble)
    assert_same(ee.load(tmp_path / "joint", make), run.ensemble)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path):
    def run(folder, epochs):
        ensemble = ee.build(lambda key: mimo(eqx.nn.MLP(25, 2, 6, 1, key=key), key=key), 2, key=KEY)
        loss = mean_loss(mse, rows="shuffle", repetitions=2)
        return ee.fit(ensemble, loss, ADAM, data(), batch_size=8, epochs=epochs, checkpoint=tmp_path / folder, key=KEY)

    whole = run("whole", 4)
    run("parts", 2)
    assert_same(run("parts", 4).ensemble, whole.ensemble)


def test_labels_of_an_ensemble_are_refused():
    ensemble = ee.build(lambda key: tabm(MLP, 2, key=key), 2, key=KEY)
    with pytest.raises(TypeError, match="labels the weights of one joint ensemble, got an `Ensemble`"):
        weight_labels(ensemble)


def test_fast_weights_have_their_own_optimiser():
    ensemble = ee.build(make, 2, key=KEY)
    optimiser = optax.multi_transform({"fast": optax.set_to_zero(), "slow": optax.sgd(0.1)}, weight_labels)
    trained = ee.fit(ensemble, LOSS, optimiser, data(), steps=2, key=KEY).ensemble
    for old, new in zip(ensemble.stacked.model.layers, trained.stacked.model.layers, strict=True):
        assert_same((new.in_factors, new.out_factors), (old.in_factors, old.out_factors))
        assert distance((new.layer.weight, new.bias), (old.layer.weight, old.bias)) > 1e-4
    labels = weight_labels(eqx.filter(tabm(MLP, 2, key=KEY), eqx.is_inexact_array))
    assert [labels.model.layers[0].in_factors, labels.model.layers[0].bias] == ["fast", "slow"]
    assert labels.model.layers[1].layer.weight == "slow"
    counts = lambda tree, label: jax.tree.leaves(tree).count(label)
    assert (counts(labels, "fast"), counts(labels, "slow")) == (2, 4)


@pytest.mark.slow
def test_hyper_parameters_and_auxiliary_outputs():
    def scaled(model, batch, key, hyper):
        value = mse(model, batch, key)
        return hyper["scale"] * value, value

    ensemble, scale = ee.build(make, 2, key=KEY), jnp.array([1.0, 0.0])
    run = ee.fit(
        ensemble, mean_loss(scaled), ADAM, data(), hyper={"scale": scale}, has_aux=True, steps=2, batch_size=20, key=KEY
    )
    assert run.history.aux.shape == (2, 2, 3)
    np.testing.assert_allclose(run.history.loss[0], run.history.aux[0].mean(axis=-1), rtol=1e-6)
    assert_close(run.ensemble[1], ensemble[1], 0.0)


def stateful(convert):
    def make(key):
        model, state = CASES["conv and batch norm"].make(key)
        joint = convert(model, 3, key=key)
        return joint, state if convert is mimo else ee.tree.stack([state] * 3)

    return make


@pytest.mark.slow
def test_batch_normalisation_of_each_submember():
    ensemble, state = ee.build(stateful(batch_ensemble), 2, key=KEY)
    loss = mean_loss(mse_with_state)
    run = ee.fit(ensemble, loss, optax.adam(1e-2, eps=1e-3), data(), state=state, steps=4, batch_size=10, key=KEY)
    assert all(x.shape[:2] == (2, 3) for x in jax.tree.leaves(run.state) if eqx.is_inexact_array(x))
    x, dense = data()[0], members(run.ensemble)
    flat = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), run.state)
    with relaxed():  # BatchNorm's counter
        got, expected = as_members(run.predict(x)), ee.predict(dense, x, state=flat)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    (joint, own), batch = stateful(batch_ensemble)(KEY), data()
    value, _ = loss(joint, own, batch, KEY)
    of_each = [
        mse_with_state(member, ee.tree.take(stateful(batch_ensemble)(KEY)[1], i), batch, KEY)[0]
        for i, member in enumerate(members(joint))
    ]
    np.testing.assert_allclose(value, np.mean(of_each), rtol=1e-5)


@pytest.mark.slow
def test_one_forward_pass_has_one_state():
    ensemble, state = ee.build(stateful(mimo), 2, key=KEY)
    loss = mean_loss(mse_with_state, rows="shuffle")
    run = ee.fit(ensemble, loss, optax.adam(1e-2, eps=1e-3), data(), state=state, steps=2, batch_size=10, key=KEY)
    assert list(map(jnp.shape, jax.tree.leaves(run.state))) == list(map(jnp.shape, jax.tree.leaves(state)))
    x, dense = data()[0], members(run.ensemble)
    own = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), run.state)
    with relaxed():
        got, expected = as_members(run.predict(x)), ee.predict(dense, x, state=own)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
