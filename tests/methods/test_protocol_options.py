"""Options, state, likelihoods and wrong use of the methods of the protocol."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .test_protocol import (
    CASES,
    DATA,
    KEY,
    LENGTH,
    SGD,
    X,
    Y,
    assert_same_bits,
    laplace,
    last_layer,
    loss,
    make,
    sgld,
    sngp,
)

methods = ee.methods
SEEDS = methods.Seeds(2)


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def test_options_of_fit_reach_it(tmp_path):
    """Validation, patience, rows, mesh, plan, checkpoint, callbacks and hyper-parameters."""
    seen = []

    def options(folder):
        return LENGTH | {
            "validation": (X[:5], Y[:5]),
            "patience": 1,
            "rows": np.stack([np.arange(12), np.arange(8, 20)]),
            "plan": ee.plan.Vmap(),
            "mesh": ee.make_mesh(2),
            "checkpoint": tmp_path / folder,
            "callbacks": lambda state: seen.append(int(state.step.max())),
            "hyper": {"rate": np.array([0.1, 0.5], np.float32)},
        }

    of_rate = lambda hyper: optax.sgd(hyper["rate"])
    posterior = SEEDS.fit(make, loss, of_rate, DATA, **options("method"))
    run = ee.fit(ee.build(make, 2, key=KEY), loss, of_rate, DATA, **options("hand"))
    assert_same_bits(arrays(posterior.ensemble), arrays(run.ensemble))
    np.testing.assert_array_equal(posterior.run.best_score, run.best_score)
    assert posterior.run.ensemble.stacked.layers[0].weight.sharding.num_devices == 2
    assert (tmp_path / "method").exists()
    assert len(seen) >= 2
    again = SEEDS.fit(make, loss, of_rate, DATA, **options("method"))  # resumes where the run ended
    assert_same_bits(arrays(again.ensemble), arrays(posterior.ensemble))


def test_a_wrapped_optimiser_takes_hyper_parameters():
    of_rate, hyper = lambda hyper: optax.sgd(hyper["rate"]), {"rate": np.array([0.1, 0.5], np.float32)}
    method = methods.SWAG(2, num_samples=2, rank=0, start=2, every=1)
    posterior = method.fit(make, loss, of_rate, DATA, hyper=hyper, **LENGTH)
    wrapped = lambda hyper: methods.trajectory.swag(optax.sgd(hyper["rate"]), rank=0, start=2, every=1)
    run = ee.fit(ee.build(make, 2, key=KEY), loss, wrapped, DATA, hyper=hyper, **LENGTH)
    assert_same_bits(arrays(posterior.ensemble), arrays(methods.trajectory.sample(run, 2, key=KEY)))


def test_an_ensemble_is_trained_further():
    ensemble = ee.build(make, 2, key=jax.random.key(3))
    posterior = SEEDS.fit(ensemble, loss, SGD, DATA, **LENGTH)
    assert_same_bits(arrays(posterior.ensemble), arrays(ee.fit(ensemble, loss, SGD, DATA, **LENGTH).ensemble))


def test_members_that_diverge_are_left_out():
    x = jnp.stack([X, X * jnp.nan])
    with pytest.warns(UserWarning, match="diverged"):
        posterior = SEEDS.fit(make, loss, SGD, (ee.Each(x), Y), **LENGTH)
    assert posterior.predict(X).shape == (1, 20, 2)
    with pytest.warns(UserWarning, match="diverged"), pytest.raises(ee.train.DivergedError, match="all 2 members"):
        SEEDS.fit(make, loss, SGD, (X * jnp.nan, Y), **LENGTH)


@pytest.mark.parametrize("case", [laplace, sgld, sngp], ids=lambda case: case.__name__)
def test_members_with_data_of_their_own_that_diverge(case, tmp_path):
    """Steps after training get the data of the others; rows that are given are those of each member."""
    method, rows = CASES[case], np.stack([np.arange(12), np.arange(8, 20)])
    data, options = (ee.Each(jnp.stack([X * jnp.nan, X])), Y), LENGTH | {"rows": rows}
    with pytest.warns(UserWarning, match="diverged"):
        posterior = method.fit(make, loss, SGD, data, **options)
    posterior.save(tmp_path / "posterior")
    loaded = method.load(tmp_path / "posterior", make, DATA)
    assert len(loaded.ensemble) == (2 if case is sgld else 1)
    assert_same_bits(loaded.predict(X), posterior.predict(X))
    assert np.isfinite(posterior.predict(X)).all()
    other = ee.build(make, key=ee.member_keys(KEY, 2)[1:])
    if case is laplace:
        run = ee.fit(
            other, loss, SGD, (X, Y), **options | {"rows": rows[1:], "key": ee.member_keys(KEY, 2, purpose="fit")[1:]}
        )
        weights = ee.Each(ee.resample.counts(rows[1:], 20))
        fitted = methods.laplace.fit(run, DATA, likelihood="classification", where=last_layer, row_weights=weights)
        expected = fitted.optimise_prior().predict(X)
        np.testing.assert_allclose(posterior.predict(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_methods_are_values(case):
    method = CASES[case]
    same = type(method)(**{name: getattr(method, name) for name in method.__dataclass_fields__})
    assert method == same
    assert hash(method) == hash(same)
    assert method != methods.Seeds(3)
    assert repr(method).startswith(type(method).__name__ + "(")


def test_a_second_fit_compiles_nothing(compiled):
    for method in (methods.SWAG(2, num_samples=2, rank=2), methods.BatchEnsemble(2)):
        method.fit(make, loss, SGD, DATA, **LENGTH)
        with compiled() as names:
            method.fit(make, loss, SGD, DATA, **LENGTH)
        assert not names


# Losses of likelihoods.


def of_word(word, model, targets, **options):
    method_loss = ee.methods._protocol.as_loss(word, **options)
    return method_loss(model, (X, targets), KEY)


def test_losses_of_likelihoods():
    model = make(KEY)
    outputs = jax.vmap(model)(X)
    expected = optax.softmax_cross_entropy_with_integer_labels(outputs, Y).mean()
    np.testing.assert_allclose(of_word("classification", model, Y), expected, rtol=1e-6)
    one = lambda x: model(x)[:1]
    expected = optax.sigmoid_binary_cross_entropy(outputs[:, 0], Y.astype(jnp.float32)).mean()
    np.testing.assert_allclose(of_word("binary", one, Y), expected, rtol=1e-6)
    soft = jax.nn.sigmoid(X[:, 0])
    expected = optax.sigmoid_binary_cross_entropy(outputs[:, 0], soft).mean()
    np.testing.assert_allclose(of_word("binary", one, soft), expected, rtol=1e-6)
    for wrong in (-1, 2):
        assert np.isnan(of_word("binary", one, Y.at[3].set(wrong)))
        assert np.isnan(of_word("classification", model, Y.at[3].set(wrong)))
    squares = np.sum((np.asarray(outputs) - np.asarray(X[:, :2])) ** 2, axis=1)
    np.testing.assert_allclose(of_word("regression", model, X[:, :2], noise=0.5), np.mean(squares) / 0.5, rtol=1e-6)
    pair = lambda x: (model(x)[0], jnp.exp(model(x)[1]))
    logs = outputs[:, 1]
    expected = jnp.mean(0.5 * (jnp.log(2 * jnp.pi) + logs + (X[:, 0] - outputs[:, 0]) ** 2 / jnp.exp(logs)))
    np.testing.assert_allclose(of_word("regression", pair, X[:, 0]), expected, rtol=1e-6)


# Members with state.


class Normed(eqx.Module):
    """A network with batch normalisation."""

    layers: list
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.layers = list(make(key).layers)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")

    def __call__(self, x, state):
        hidden, state = self.norm(self.layers[0](x), state)
        return self.layers[1](jax.nn.relu(hidden)), state


make_normed = eqx.nn.make_with_state(Normed)
STATEFUL = {
    name: pytest.param(method, marks=() if name == "swag" else pytest.mark.slow)
    for name, method in ((case.__name__, method) for case, method in CASES.items())
    if name not in ("dropout", "packed", "randomised_priors")
}


@pytest.mark.parametrize("method", STATEFUL.values(), ids=STATEFUL)
def test_members_with_state(method, tmp_path):
    with jax.numpy_dtype_promotion("standard"):
        posterior = method.fit(make_normed, "classification", SGD, DATA, **LENGTH)
        found = posterior.predict(X, key=KEY)
        posterior.save(tmp_path / "posterior")
        loaded = method.load(tmp_path / "posterior", make_normed, DATA)
        assert_same_bits(loaded.predict(X, key=KEY), found)
    assert np.isfinite(found).all()
    assert found.shape[1:] == (20, 2)


def test_the_statistics_of_draws_are_their_own():
    method = methods.SWAG(2, num_samples=2, rank=2)
    with jax.numpy_dtype_promotion("standard"):
        posterior = method.fit(make_normed, "classification", SGD, DATA, **LENGTH)
        state = ee.tree.take(posterior.run.state, np.array([0, 0, 1, 1]))
        fn = ee.methods._protocol.as_loss("classification")
        options = {"batch_size": 10, "key": KEY}
        expected = methods.trajectory.update_batch_norm(posterior.ensemble, state, fn, DATA, **options)
    assert_same_bits(arrays(posterior.state), arrays(expected))


def test_the_statistics_of_draws_are_of_the_rows_of_their_member():
    """Rows by index and the same rows as data of each member."""
    method, rows = methods.SWAG(2, num_samples=2, rank=2), np.arange(20).reshape(2, 10)
    each = tuple(ee.Each(jnp.asarray(part)[rows]) for part in (X.at[10:].add(100), Y))
    with jax.numpy_dtype_promotion("standard"):
        by_index = method.fit(make_normed, "classification", SGD, (X.at[10:].add(100), Y), rows=rows, **LENGTH)
        by_member = method.fit(make_normed, "classification", SGD, each, **LENGTH)
    assert_same_bits(arrays(by_index.ensemble), arrays(by_member.ensemble))
    assert_same_bits(arrays(by_index.state), arrays(by_member.state))


class Offset(eqx.Module):
    """A network with a state that differs between members and never changes."""

    mlp: eqx.nn.MLP
    offset: eqx.nn.StateIndex

    def __init__(self, key):
        self.mlp = make(key)
        self.offset = eqx.nn.StateIndex(jax.random.normal(key))

    def __call__(self, x, state):
        return self.mlp(x) + state.get(self.offset), state


def test_draws_have_the_state_of_their_member():
    """Of three members the second diverges."""
    make_offset = eqx.nn.make_with_state(Offset)
    x = jnp.stack([X, X * jnp.nan, X])
    with pytest.warns(UserWarning, match="diverged"):
        posterior = methods.Snapshots(3, num_snapshots=2).fit(
            make_offset, "classification", SGD, (ee.Each(x), Y), **LENGTH
        )
    ensemble, state = ee.build(make_offset, 3, key=KEY)
    (known,) = jax.tree.leaves(state)
    np.testing.assert_array_equal(jax.tree.leaves(posterior.state)[0], known[jnp.array([0, 0, 2, 2])])


# Wrong use.

MISTAKES = {
    "no members": (lambda: methods.Seeds(0), ValueError, "`methods.Seeds` needs .*`num_members`"),
    "half a member": (lambda: methods.Seeds(2.5), TypeError, "`num_members`"),
    "an ensemble of another size": (
        lambda: methods.Seeds(3).fit(ee.build(make, 2, key=KEY), loss, SGD, DATA, **LENGTH),
        ValueError,
        "`methods.Seeds.fit` needs as many members as the method has; expected 3, got 2",
    ),
    "a model": (lambda: SEEDS.fit(make(KEY), loss, SGD, DATA, **LENGTH), TypeError, "a function that makes one member"),
    "another word": (lambda: SEEDS.fit(make, "mse", SGD, DATA, **LENGTH), ValueError, "`loss`.*'classification'"),
    "an unknown option": (
        lambda: SEEDS.fit(make, loss, SGD, DATA, epoch=2, key=KEY),
        TypeError,
        "unexpected keyword argument 'epoch'",
    ),
    "no key": (lambda: SEEDS.fit(make, loss, SGD, DATA, epochs=2), TypeError, "required keyword-only argument: 'key'"),
    "targets of another shape": (
        lambda: SEEDS.fit(make, "regression", SGD, (X, X), **LENGTH),
        ValueError,
        r"outputs \(10, 2\) and targets \(10, 3\)",
    ),
    "rows of bootstraps": (
        lambda: methods.Bootstraps(2).fit(make, loss, SGD, DATA, rows=np.zeros((2, 4), int), **LENGTH),
        TypeError,
        "does not take `rows`: the method draws them",
    ),
    "bootstraps of batches": (
        lambda: methods.Bootstraps(2).fit(make, loss, SGD, [DATA], **LENGTH),
        TypeError,
        "cannot count the rows of an iterable",
    ),
    "no rows": (lambda: methods.Bootstraps(2, size=0), ValueError, "`size` above 0"),
    "a column alone": (lambda: methods.SWAG(rank=1), ValueError, "`methods.SWAG` needs `rank`"),
    "no length": (
        lambda: methods.SWAG(2).fit(make, loss, SGD, DATA, key=KEY),
        TypeError,
        "either `epochs` or `steps`, got neither",
    ),
    "no draws": (lambda: methods.SWAG(num_samples=0), ValueError, "`num_samples`"),
    "passes without a key": (
        lambda: methods.Posterior(ee.build(make, 2, key=KEY), num_passes=2).predict(X),
        TypeError,
        "`methods.Posterior.predict` needs `key`",
    ),
    "a combination in predict": (
        lambda: methods.Posterior(ee.build(make, 2, key=KEY)).predict(X, combine=ee.combine.mixture),
        TypeError,
        "does not take `combine`",
    ),
    "no likelihood": (
        lambda: methods.Laplace(where=last_layer).fit(make, loss, SGD, DATA, **LENGTH),
        TypeError,
        "`methods.Laplace.fit` needs one likelihood.*got neither",
    ),
    "two likelihoods": (
        lambda: methods.Laplace(where=last_layer, likelihood="binary").fit(make, "regression", SGD, DATA, **LENGTH),
        TypeError,
        "got 'binary' and 'regression'",
    ),
    "an unknown structure": (lambda: methods.Laplace(where=last_layer, structure="kron"), ValueError, "'diag'"),
    "loading without rows": (
        lambda: methods.Laplace(where=last_layer, likelihood="binary").load("nowhere", make),
        TypeError,
        "`methods.Laplace.load` needs `data`",
    ),
    "converting an ensemble": (
        lambda: methods.BatchEnsemble(2).fit(ee.build(make, 1, key=KEY), loss, SGD, DATA, **LENGTH),
        TypeError,
        "`methods.BatchEnsemble.fit` converts models before they are trained, got an `Ensemble`",
    ),
    "unknown factors": (lambda: methods.TabM(2, factors="ones"), ValueError, "`factors`"),
    "no scale": (lambda: methods.Masksembles(scale=0.5), ValueError, "`scale`"),
    "state and prior functions": (
        lambda: methods.RandomisedPriors(2).fit(make_normed, "classification", SGD, DATA, **LENGTH),
        TypeError,
        "needs members without state",
    ),
    "hyper-parameters of anchors": (
        lambda: methods.Anchors(2).fit(make, loss, SGD, DATA, hyper={"rate": np.ones(2)}, **LENGTH),
        TypeError,
        "does not take `hyper`",
    ),
    "an improper prior": (lambda: methods.SVGD(2, prior_std=0), ValueError, "`prior_std` above 0"),
    "no learning rate": (lambda: methods.SGLD(2), TypeError, "learning_rate"),
    "particles with rows of their own": (
        lambda: methods.SVGD(2).fit(make, loss, SGD, (ee.Each(jnp.stack([X, X])), Y), **LENGTH),
        TypeError,
        "needs one batch for all members, got data marked `Each`",
    ),
    "inputs without targets": (
        lambda: SEEDS.fit(make, "classification", SGD, X, **LENGTH),
        TypeError,
        r"needs `data` to be arrays `\(x, y\)`",
    ),
    "patience of particles": (
        lambda: methods.SVGD(2).fit(make, loss, SGD, DATA, patience=3, **LENGTH),
        TypeError,
        "does not take `patience`: members meet in every step",
    ),
    "too much friction": (lambda: methods.SGHMC(learning_rate=0.1, friction=2), ValueError, "`friction`"),
    "a head that is not linear": (
        lambda: methods.SNGP(where=lambda model: model.layers).fit(make, "classification", SGD, DATA, **LENGTH),
        TypeError,
        "`where` to select the last",
    ),
    "logits of a regression": (
        lambda: methods.Distilled(methods.Seeds(2)).fit(make, "regression", SGD, DATA, **LENGTH),
        ValueError,
        'needs `target="gaussian"` for teachers with the loss .regression.',
    ),
    "a teacher without options": (lambda: methods.Distilled(methods.Seeds), TypeError, "needs a method as `teacher`"),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake):
    call, kind, text = MISTAKES[mistake]
    with pytest.raises(kind, match=text):
        call()


def test_members_without_dropout_are_noticed():
    with pytest.warns(UserWarning, match="found no `eqx.nn.Dropout`"):
        methods.Dropout(2).fit(make, loss, SGD, DATA, **LENGTH)


def test_a_base_may_be_given_instead_of_a_function(tmp_path):
    base, method = make(KEY), methods.LowRank(2, rank=2)
    found = method.fit(base, "classification", SGD, DATA, **LENGTH)
    other = method.fit(lambda key: base, "classification", SGD, DATA, **LENGTH)
    np.testing.assert_array_equal(found.predict(X), other.predict(X))
    np.testing.assert_array_equal(found.ensemble.stacked.layers[0].layer.weight, base.layers[0].weight)
    found.save(tmp_path / "members")
    for given in (base, make):
        np.testing.assert_array_equal(method.load(tmp_path / "members", given).predict(X), found.predict(X))
