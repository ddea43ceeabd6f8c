import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_close

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (16, 3))
Y = jnp.sin(X[:, 0])
STEPS = 6


class Bounded(eqx.Module):
    """A head of its own, on a trunk and a lower bound of the log-variance that are shared."""

    trunk: eqx.nn.Linear
    head: eqx.nn.Linear
    lower: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key)
        self.trunk, self.head = eqx.nn.Linear(3, 4, key=keys[0]), eqx.nn.Linear(4, 2, key=keys[1])
        self.lower = jnp.array(-1.0)

    def __call__(self, x):
        mean, log_var = self.head(jnp.tanh(self.trunk(x)))
        return mean, self.lower + jax.nn.softplus(log_var - self.lower)


def nll(model, batch, key=None):
    x, y = batch
    mean, log_var = jax.vmap(model)(x)
    return jnp.mean((mean - y) ** 2 * jnp.exp(-log_var) + log_var) - 0.01 * model.lower


OWN, SHARED = optax.adam(1e-2), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(3e-2))
TOGETHER = ee.train.Together(OWN, shared=SHARED)
OPTIONS = {"steps": STEPS, "batch_size": 8, "shuffle": False, "key": KEY, "progress": False}


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(Bounded, 3, shared=lambda model: (model.trunk, model.lower), key=KEY)


@jax.numpy_dtype_promotion("standard")  # which optax needs
def by_hand(ensemble, ys, *, steps=STEPS, optimiser=SHARED):
    """Single members in a loop; a member whose loss is not finite leaves for good."""
    optimiser = optax.with_extra_args_support(optimiser)
    heads = [eqx.filter(model.head, eqx.is_array) for model in ensemble]
    static = eqx.filter(ensemble[0].head, eqx.is_array, inverse=True)
    shared = ensemble.shared.trunk.weight, ensemble.shared.trunk.bias, ensemble.shared.lower
    states, of_shared = [OWN.init(head) for head in heads], optimiser.init(shared)

    @jax.jit
    def gradients(head, shared, batch):
        def loss(head, shared):
            where = lambda model: (model.head, model.trunk.weight, model.trunk.bias, model.lower)
            return nll(eqx.tree_at(where, ensemble[0], (eqx.combine(head, static), *shared)), batch)

        return jax.value_and_grad(loss, argnums=(0, 1))(head, shared)

    training = [True] * len(heads)
    for step in range(steps):
        rows, grads, values = slice(step % 2 * 8, step % 2 * 8 + 8), [], []
        for i, y in enumerate(ys):
            value, (own, common) = gradients(heads[i], shared, (X[rows], y[rows]))
            training[i] &= bool(jnp.isfinite(value))
            if training[i]:
                grads.append(common)
                values.append(value)
                updates, states[i] = OWN.update(own, states[i])
                heads[i] = optax.apply_updates(heads[i], updates)
        mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *grads)
        updates, of_shared = optimiser.update(mean, of_shared, shared, value=sum(values) / len(values))
        shared = optax.apply_updates(shared, updates)
    return heads, shared


def assert_same(ensemble, heads, shared):
    # Sums over members and rows in another order, through six steps of Adam.
    assert_close([eqx.filter(model.head, eqx.is_array) for model in ensemble], heads, 1e-5)
    found = ensemble.shared
    assert_close((found.trunk.weight, found.trunk.bias, found.lower), shared, 1e-5)


def run_steps(ensemble, data, *, scanned):
    state, step = ee.train.init(ensemble, TOGETHER, key=KEY), ee.train.make_step(nll, TOGETHER)
    batches = [jax.tree.map(lambda x, i=i: x[i % 2 * 8 : i % 2 * 8 + 8], data) for i in range(STEPS)]
    if scanned:
        return ee.train.scan_steps(step, state, jax.tree.map(lambda *xs: jnp.stack(xs), *batches))[0].ensemble
    for batch in batches:
        state, _ = step(state, batch)
    return state.ensemble


WAYS = {
    "fit": lambda ensemble, data: ee.fit(ensemble, nll, TOGETHER, data, **OPTIONS).ensemble,
    "a padded mesh": lambda ensemble, data: (
        ee.fit(ensemble, nll, TOGETHER, data, mesh=ee.make_mesh(devices=jax.devices()[:2]), **OPTIONS).ensemble
    ),
    "make_step": lambda ensemble, data: run_steps(ensemble, data, scanned=False),
    "scan_steps": lambda ensemble, data: run_steps(ensemble, data, scanned=True),
}


@pytest.mark.filterwarnings("ignore:.*do not divide evenly")
@pytest.mark.parametrize("way", WAYS)
def test_is_a_loop_over_single_members_with_a_mean_gradient(ensemble, way):
    assert_same(WAYS[way](ensemble, (X, Y)), *by_hand(ensemble, [Y] * 3))


@pytest.mark.filterwarnings("ignore:.*diverged")
def test_a_member_that_diverges_leaves_the_mean(ensemble):
    """At its second step, within the compiled loop."""
    ys = jnp.stack([Y, Y.at[12].set(jnp.nan), Y + 1])
    run = ee.fit(ensemble, nll, TOGETHER, (X, ee.Each(ys)), **OPTIONS)
    heads, shared = by_hand(ensemble, ys)
    assert run.stopped_at.tolist() == [-1, 1, -1]
    assert_same(run.ensemble, heads, shared)


@jax.custom_vjp
def with_gradient(x, more):
    """`x`, with `more` added to its gradient."""
    return x


with_gradient.defvjp(lambda x, more: (x, more), lambda more, cotangent: (cotangent + more, None))


@pytest.mark.parametrize(
    "where", [lambda m: m.lower, lambda m: m.head.bias], ids=["of shared leaves", "of its own leaves"]
)
def test_a_gradient_that_is_not_finite_ends_only_its_member(ensemble, where):
    def loss(model, batch, key):
        x, (y, more) = batch
        return nll(eqx.tree_at(where, model, with_gradient(where(model), more.sum())), (x, y))

    ys, more = jnp.stack([Y, Y + 2, Y]), ee.Each(jnp.zeros((3, 16)).at[1, 12].set(jnp.nan))
    with pytest.warns(UserWarning, match=r"1 at step 1 \(`\.(lower|head\.bias)`\)"):
        run = ee.fit(ensemble, loss, TOGETHER, (X, (ee.Each(ys), more)), **OPTIONS)
    assert_same(run.ensemble, *by_hand(ensemble, ys.at[1, 12].set(jnp.nan)))


@pytest.mark.parametrize("name", ["noise", "polyak"])
def test_an_optimiser_of_shared_leaves_has_one_noise_and_the_mean_loss(ensemble, name):
    optimisers = {
        "noise": lambda: optax.chain(optax.add_noise(0.1, 0.55, key=3), optax.adam(1e-2)),
        "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    }
    shared, ys = optimisers[name](), jnp.stack([Y, 5 * Y, Y + 3])
    run = ee.fit(ensemble, nll, ee.train.Together(OWN, shared=shared), (X, ee.Each(ys)), **OPTIONS)
    assert_same(run.ensemble, *by_hand(ensemble, ys, optimiser=shared))
    for copies in jax.tree.leaves(run.train_state.opt_state.shared):
        assert (copies == copies[:1]).all()


def test_shared_weights_that_are_not_finite_end_all_members_at_their_last_finite_ones(ensemble):
    together = ee.train.Together(OWN, shared=optax.chain(optax.sgd(1e38), optax.scale(1e38)))
    with pytest.warns(UserWarning, match="diverged"):
        run = ee.fit(ensemble, nll, together, (X, Y), **OPTIONS)
    assert run.status.tolist() == [2, 2, 2]
    assert eqx.tree_equal(run.ensemble, ensemble)


def test_best_weights_and_patience_follow_the_mean_score(ensemble):
    """Each member alone would stop at another step: their targets in validation differ."""
    targets = ee.Each(jnp.stack([Y, 1 - Y, 2 * Y]))
    together = ee.train.Together(optax.adam(0.1), shared=optax.adam(0.1))
    options = OPTIONS | {"steps": 80, "validation": (X, targets), "patience": 4}
    run = ee.fit(ensemble, nll, together, (X, Y), **options)
    scores, steps = np.asarray(run.history.validation), run.history.validation_step
    best = scores.mean(0).argmin()
    assert len(set(scores.argmin(1))) > 1
    assert run.best_step.tolist() == [steps[best]] * 3
    assert run.best_score.tolist() == scores[:, best].tolist()
    assert run.stopped_at.tolist() == [steps[best] + 4 * 2] * 3
    again = ee.fit(ensemble, nll, together, (X, Y), **OPTIONS | {"steps": int(steps[best])})
    assert_close(run.ensemble, again.ensemble, 1e-6)  # a program compiled for another length


def test_best_weights_and_patience_compare_the_same_members(ensemble):
    """The best member leaves; the others improve, though their mean stays above that of all."""
    ys = jnp.stack([Y, 5 * Y, Y + 3])
    stop = ee.train.Stopping(steps=jnp.array([3, 8, 8]))
    options = OPTIONS | {"steps": 8, "validation": (X, ee.Each(ys)), "stop": stop, "patience": 2}
    run = ee.fit(ensemble, nll, TOGETHER, (X, ee.Each(ys)), **options)
    assert run.best_step.tolist() == [3, 8, 8]
    assert run.ensemble.shared.lower == run.train_state.params.lower[1]


def test_a_member_that_trains_again_takes_the_shared_leaves_of_the_others(ensemble):
    run = ee.fit(ensemble, nll, TOGETHER, (X, Y), stop=ee.train.Stopping(steps=jnp.array([2, 6, 6])), **OPTIONS)
    start = eqx.tree_at(lambda state: state.moving.status, run.train_state, jnp.zeros(3, jnp.int8))
    assert start.ensemble.shared.lower == run.ensemble.shared.lower != start.params.lower[0]
    again = ee.fit(start, nll, TOGETHER, (X, Y), **OPTIONS | {"steps": 2}).train_state
    one = ee.fit(start[1:], nll, TOGETHER, (X, Y), **OPTIONS | {"steps": 2}).train_state
    for copies in (again.params.lower, *jax.tree.leaves(again.opt_state.shared)):
        assert (copies == copies[:1]).all()
    assert_close(again.params.lower[0], one.params.lower[0], 0.1)


def test_resumes_and_continues_bit_for_bit(ensemble, tmp_path):
    whole = ee.fit(ensemble, nll, TOGETHER, (X, Y), **OPTIONS)
    half = ee.fit(ensemble, nll, TOGETHER, (X, Y), checkpoint=tmp_path / "a", **OPTIONS | {"steps": 4})
    resumed = ee.fit(ensemble, nll, TOGETHER, (X, Y), checkpoint=tmp_path / "a", **OPTIONS)
    continued = ee.fit(half, nll, TOGETHER, (X, Y), **OPTIONS | {"steps": 2})
    assert eqx.tree_equal(resumed.train_state, whole.train_state)
    assert eqx.tree_equal(continued.train_state, whole.train_state)
    validated = OPTIONS | {"validation": (X, ee.Each(jnp.stack([Y, 1 - Y, 2 * Y]))), "patience": 3}
    whole = ee.fit(ensemble, nll, TOGETHER, (X, Y), **validated)
    half = ee.fit(ensemble, nll, TOGETHER, (X, Y), **validated | {"steps": 4})
    continued = ee.fit(half, nll, TOGETHER, (X, Y), **validated | {"steps": 2})
    assert eqx.tree_equal(continued.selection, whole.selection)


@pytest.mark.parametrize("make", [None, Bounded])
def test_a_revived_member_takes_the_shared_leaves_of_the_others(ensemble, make):
    weight = ensemble.stacked.head.weight
    broken = eqx.tree_at(lambda e: e.stacked.head.weight, ensemble, weight.at[0].set(jnp.nan))
    run = ee.fit(broken, nll, TOGETHER, (X, Y), on_diverge=ee.train.Revive(make), **OPTIONS)
    assert [revival.member for revival in run.revived] == [0]
    params = run.train_state.params
    for copies in (params.lower, params.trunk.weight, *jax.tree.leaves(run.train_state.opt_state.shared)):
        assert (copies == copies[:1]).all()
    assert_close(run.ensemble.shared.lower, by_hand(broken, [Y] * 3)[1][2], 0.05)  # which has two members


def test_own_optimisers_may_have_hyper_parameters_or_search_lines(ensemble):
    hyper = {"rate": jnp.array([0.0, 0.01, 0.1])}
    together = ee.train.Together(lambda hyper: optax.sgd(hyper["rate"]), shared=optax.sgd(0.01))
    run = ee.fit(ensemble, nll, together, (X, Y), hyper=hyper, **OPTIONS)
    moved = jnp.abs(run.ensemble.stacked.head.weight - ensemble.stacked.head.weight).max((1, 2))
    assert (moved[0] == 0) & (moved[1] > 0) & (moved[2] > moved[1])
    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3))
    run = ee.fit(ensemble, nll, ee.train.Together(search, shared=optax.sgd(0.01)), (X, Y), **OPTIONS)
    assert (run.history.loss[:, -2:].mean(1) < run.history.loss[:, :2].mean(1)).all()


def test_what_is_frozen_stays_shared(ensemble):
    trainable = eqx.tree_at(lambda m: m.lower, jax.tree.map(lambda _: True, ensemble[0]), replace=False)
    run = ee.fit(ensemble, nll, TOGETHER, (X, Y), trainable=trainable, **OPTIONS)
    assert run.ensemble.shared.lower == ensemble.shared.lower
    assert run.train_state.params.lower is None
    assert (run.ensemble.shared.trunk.weight != ensemble.shared.trunk.weight).all()


def test_members_are_taken_with_what_they_share(ensemble):
    state = ee.train.init(ensemble, TOGETHER, key=KEY)
    assert eqx.tree_equal(state.ensemble, ensemble)
    assert eqx.tree_equal(state[1:].ensemble, ensemble[1:])
    assert eqx.tree_equal(ee.concatenate([state[:1], state[1:]]), state)
    other = eqx.tree_at(lambda state: state.moving.params.lower, state, state.params.lower + 1)
    with pytest.raises(ee.MemberMismatchError, match=r"shared array at `\.lower`"):
        ee.concatenate([state[:1], other[1:]])


INDEPENDENT = {
    "check": lambda: ee.testing.check_independent(Bounded, nll, TOGETHER, (X, Y), key=KEY),
    "average": lambda: ee.methods.trajectory.average(
        ee.train.init(ee.build(Bounded, 2, shared=lambda m: m.lower, key=KEY), TOGETHER, key=KEY)
    ),
    "particles": lambda: ee.methods.particles.make_step(nll, TOGETHER, num_rows=8),
    "fleet": lambda: ee.fleet.fit(
        None, ee.build(Bounded, 2, key=KEY), nll, TOGETHER, (X, Y), folder="x", shards=1, steps=1, key=KEY
    ),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("name", INDEPENDENT)
def test_functions_of_independent_members_refuse_it(name):
    with pytest.raises(TypeError, match="independent"):
        INDEPENDENT[name]()


@pytest.mark.usefixtures("unhooked")
def test_wrong_calls(ensemble):
    fit = lambda together=TOGETHER, start=ensemble, **options: ee.fit(start, nll, together, (X, Y), **OPTIONS | options)
    with pytest.raises(ValueError, match=r"`fit` needs the plan `Vmap\(\)`.*got Chunked"):
        fit(plan=ee.plan.Chunked(2))
    with pytest.raises(ValueError, match=r"`train.make_step` needs the plan"):
        ee.train.make_step(nll, TOGETHER, plan=ee.plan.Sequential())
    with pytest.raises(ValueError, match=r"needs shared floating-point arrays.*it has none"):
        fit(start=ee.build(Bounded, 3, key=KEY))
    with pytest.raises(ValueError, match=r"none of its shared arrays is: `\.trunk\.weight`"):
        fit(trainable=eqx.tree_at(lambda m: m.head, jax.tree.map(lambda _: False, ensemble[0]), replace=True))
    with pytest.raises(TypeError, match=r"Pass the optimiser of `train.init`"):
        fit(OWN, start=ee.train.init(ensemble, TOGETHER, key=KEY))
    with pytest.raises(TypeError, match=r"`shared` to be an optax optimiser, got a function"):
        fit(ee.train.Together(OWN, shared=lambda hyper: OWN))
    with pytest.raises(TypeError, match="does not evaluate the loss"):
        fit(ee.train.Together(OWN, shared=optax.lbfgs()))
