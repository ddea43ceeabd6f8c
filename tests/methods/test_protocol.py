"""Every method equals what its functions give by hand, bit for bit, and comes back from its files."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (20, 3))
Y = (X[:, 0] > 0).astype(jnp.int32)
DATA = X, Y
SGD = optax.sgd(0.1)
LENGTH = {"epochs": 4, "batch_size": 10, "key": KEY}
methods, trajectory, efficient = ee.methods, ee.methods.trajectory, ee.methods.efficient


def make(key):
    return eqx.nn.MLP(3, 2, 4, 1, key=key)


class Noisy(eqx.Module):
    """A network with dropout."""

    layers: list
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.layers = list(make(key).layers)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        return self.layers[1](self.dropout(jax.nn.relu(self.layers[0](x)), key=key))


def loss(model, batch, key):
    x, y = batch
    keys = jax.random.split(key, len(x))
    outputs = jax.vmap(lambda row, key: model(row, key=key))(x, keys)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def last_layer(model):
    return model.layers[-1]


def by_hand(optimiser=SGD, loss=loss, make=make, members=2, **options):
    return ee.fit(ee.build(make, members, key=KEY), loss, optimiser, DATA, **LENGTH, **options)


def seeds():
    return by_hand().ensemble


def bootstraps():
    return by_hand(rows=ee.resample.bootstrap(20, 2, key=KEY)).ensemble


def dropout():
    ensemble = by_hand(make=Noisy).ensemble
    passes = [ee.predict(ensemble, X, inference=False, key=key) for key in jax.random.split(KEY, 3)]
    return ensemble, np.concatenate([np.stack(passes, 1)[i] for i in range(2)])


def swag():
    run = by_hand(trajectory.swag(SGD, rank=2, start=6, every=2))
    return trajectory.sample(run, 3, key=KEY)


def snapshots():
    schedule = trajectory.snapshot_schedule(0.1, 4)
    return trajectory.snapshot_ensemble(by_hand(trajectory.snapshots(optax.sgd(schedule), 2, every=4)))


def laplace():
    posterior = methods.laplace.fit(by_hand(), DATA, likelihood="classification", where=last_layer).optimise_prior()
    return posterior.members, posterior.predict(X)


def joint(convert, **rows):
    ensemble = by_hand(loss=efficient.mean_loss(loss, **rows), make=convert, members=1).ensemble
    return ensemble, efficient.as_members(ee.predict(ensemble, X))


def batch_ensemble():
    return joint(lambda key: efficient.batch_ensemble(make(key), 2, factors="signs", key=key))


def tabm():
    return joint(lambda key: efficient.tabm(make(key), 2, factors="normal", key=key))


def mimo():
    return joint(lambda key: efficient.mimo(make(key), 2, key=key), rows="shuffle", repetitions=2, same_inputs=0.5)


def packed():
    return joint(lambda key: efficient.packed_ensemble(make(key), 2, alpha=1.0, gamma=2, key=key))


def masksembles():
    return joint(lambda key: efficient.masksembles(make(key), 2, scale=1.5, key=key), rows="split")


def randomised_priors():
    def with_prior(key):
        return methods.priors.RandomisedPrior(*map(make, jax.random.split(key)), scale=2.0)

    return by_hand(make=with_prior).ensemble


def anchors():
    def anchored(model, batch, key, hyper):
        return loss(model, batch, key) + hyper["anchor"].penalty(model, num_rows=20)

    drawn = methods.priors.draw_anchors(ee.build(make, 2, key=KEY), 0.5, key=KEY)
    return by_hand(loss=anchored, hyper={"anchor": drawn}).ensemble


def with_prior(model, batch, key):
    return loss(model, batch, key) + methods.priors.gaussian_penalty(model, 1.0, num_rows=20)


def chains(sampler):
    trained = by_hand(loss=with_prior)
    samples = trajectory.snapshots(sampler, 2, start=4, every=2)
    options = {"steps": 6, "batch_size": 10, "key": jax.random.fold_in(KEY, 1)}
    return trajectory.snapshot_ensemble(ee.fit(trained.ensemble, with_prior, samples, DATA, **options))


def sgld():
    return chains(methods.sampling.sgld(1e-2, 20, temperature=0.5, key=KEY))


def sghmc():
    return chains(methods.sampling.sghmc(1e-2, 20, friction=0.2, key=KEY))


def svgd():
    step = methods.particles.make_step(with_prior, SGD, num_rows=20, method="wgd")
    state = ee.train.init(ee.build(make, 2, key=KEY), SGD, key=KEY)
    for epoch in range(4):
        rows = jax.random.permutation(jax.random.fold_in(KEY, epoch), 20).reshape(2, 10)
        state, _ = ee.train.scan_steps(step, state, (X[rows], Y[rows]))
    return state.ensemble


def sngp():
    module = methods.sngp

    def with_process(key):
        own, head = jax.random.split(key)
        hidden = eqx.tree_at(last_layer, make(own), eqx.nn.Identity())
        return module.SNGP(hidden, 4, 2, num_features=8, likelihood="categorical", key=head)

    def of_mean(model, batch, key):
        x, y = batch
        nll = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x).mean, y).mean()
        return nll + model.ridge / 40 * jnp.sum(model.weight**2)

    run = by_hand(module.bound_spectral_norm(SGD, 0.95), loss=of_mean, make=with_process)
    ensemble = module.update_covariance(run.ensemble, X)
    out = ee.predict(ensemble, X)
    return ensemble, module.mean_field(out.mean, out.variance)


def distilled():
    def student(model, batch, key):
        x, targets = batch
        return methods.distillation.mixture_loss(jax.vmap(model)(x), targets)

    targets, key = methods.distillation.targets(seeds(), X), jax.random.fold_in(KEY, 1)
    students = ee.build(make, 2, key=key)
    return ee.fit(students, student, SGD, (X, targets), **LENGTH | {"key": key}).ensemble


CASES = {
    randomised_priors: methods.RandomisedPriors(2, scale=2.0),
    anchors: methods.Anchors(2, prior_std=0.5),
    sgld: methods.SGLD(2, num_samples=2, learning_rate=1e-2, temperature=0.5),
    sghmc: methods.SGHMC(2, num_samples=2, learning_rate=1e-2, friction=0.2),
    svgd: methods.SVGD(2, method="wgd"),
    sngp: methods.SNGP(2, where=last_layer, likelihood="classification", num_features=8),
    distilled: methods.Distilled(methods.Seeds(2), 2),
    seeds: methods.Seeds(2),
    bootstraps: methods.Bootstraps(2),
    dropout: methods.Dropout(2, num_passes=3),
    swag: methods.SWAG(2, num_samples=3, rank=2),
    snapshots: methods.Snapshots(2, num_snapshots=2),
    laplace: methods.Laplace(2, where=last_layer, likelihood="classification"),
    batch_ensemble: methods.BatchEnsemble(2, factors="signs"),
    tabm: methods.TabM(2, factors="normal"),
    mimo: methods.MIMO(2, repetitions=2, same_inputs=0.5),
    packed: methods.Packed(2, alpha=1.0, gamma=2),
    masksembles: methods.Masksembles(2, scale=1.5),
}


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_method_equals_its_functions(case, tmp_path):
    method, of_member = CASES[case], Noisy if case is dropout else make
    posterior = method.fit(of_member, loss, SGD, DATA, **LENGTH)
    expected = case()
    expected, predictions = expected if isinstance(expected, tuple) else (expected, ee.predict(expected, X))
    arrays = lambda ensemble: eqx.filter(ensemble, eqx.is_array)
    assert_same_bits(jax.tree.leaves(arrays(posterior.ensemble)), jax.tree.leaves(arrays(expected)))
    found = posterior.predict(X, key=KEY)
    assert_same_bits(found, predictions)

    posterior.save(tmp_path / "posterior")
    loaded = method.load(tmp_path / "posterior", of_member, DATA)
    assert loaded.run is None
    assert_same_bits(arrays(loaded.ensemble), arrays(posterior.ensemble))
    assert_same_bits(loaded.predict(X, key=KEY), found)
