import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.sweep import AbstractRange, Choice, LogUniform, Uniform, draw, grid

KEY = jax.random.key(0)


def test_a_grid_is_the_product():
    values = {"lr": [0.1, 0.2], "wd": [0.0, 1.0, 2.0], "depth": [3]}
    hyper = grid(values)
    rows = list(zip(*(hyper[name].tolist() for name in values), strict=True))
    np.testing.assert_allclose(rows, list(itertools.product(*values.values())), rtol=1e-7)
    assert hyper["depth"].dtype == jnp.int32


def test_a_grid_of_vectors():
    assert grid({"betas": [[0.9, 0.99], [0.8, 0.9]], "lr": [1.0, 2.0, 3.0]})["betas"].shape == (6, 2)


RANGES = {"lr": LogUniform(1e-4, 1e-1), "momentum": Uniform(0.5, 1.0), "units": Choice([16, 32, 64])}


def test_draws_follow_their_laws():
    """Kolmogorov's distance of 4,000 draws is above 0.042 with probability below 1e-6."""
    hyper = draw(RANGES, 4000, key=KEY)
    uniform = {
        "lr": np.log(np.asarray(hyper["lr"]) / 1e-4) / np.log(1e3),
        "momentum": (np.asarray(hyper["momentum"]) - 0.5) / 0.5,
    }
    for values in uniform.values():
        distance = np.abs(np.sort(values) - (np.arange(4000) + 0.5) / 4000).max()
        assert distance < 0.042
        assert np.abs(np.sort(values**1.2) - (np.arange(4000) + 0.5) / 4000).max() > 0.042  # it could have failed
    counts = np.array([(np.asarray(hyper["units"]) == units).sum() for units in (16, 32, 64)])
    assert np.abs(counts - 4000 / 3).max() < 150  # five standard deviations
    assert abs(np.corrcoef(*uniform.values())[0, 1]) < 0.08  # names are independent: five standard deviations


class Normal(AbstractRange):
    def draw(self, generator):
        return generator.normal()

    def rescale(self, value, factor):
        return value * factor


def test_a_range_of_the_users_own():
    values = np.sort(draw({"shift": Normal()}, 4000, key=KEY)["shift"])
    distance = np.abs(jax.scipy.stats.norm.cdf(values) - (np.arange(4000) + 0.5) / 4000).max()
    assert distance < 0.042  # as above
    explore = ee.methods.population.perturb_hyper({"shift": Normal()}, resample=0.0, factors=(2.0, 2.0))
    assert explore({"shift": jnp.array(-1.5)}, KEY) == {"shift": -3.0}


def test_more_members_and_more_names_change_nothing():
    few, many = draw({"lr": RANGES["lr"]}, 5, key=KEY), draw(RANGES, 50, key=KEY)
    np.testing.assert_array_equal(few["lr"], many["lr"][:5])
    assert len(np.unique(many["lr"])) == 50


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grid([1, 2]), "`sweep.grid` needs a dict from name to values, got"),
        (lambda: grid({}), "`sweep.grid` needs at least one name with values, got none."),
        (lambda: grid({"lr": 0.1}), "`sweep.grid` needs a list of values in `lr`, got 0.1."),
        (lambda: grid({"lr": []}), "`sweep.grid` needs a list of values in `lr`, got []."),
        (lambda: grid({"act": [jax.nn.relu]}), "`sweep.grid` needs numbers in `act`, because members of one ensemble"),
        (lambda: LogUniform(0.0, 1.0), "`sweep.LogUniform` needs positive ends, because zero has no logarithm"),
        (lambda: Uniform(2, 1), "`sweep.Uniform` needs `low` below `high`, got 2 and 1."),
        (lambda: Uniform("a", 1), "`sweep.Uniform` needs `low` to be a number, got 'a'."),
        (lambda: draw({"lr": (1e-4, 1e-1)}, 3, key=KEY), "`sweep.draw` needs a range in `lr`, such as"),
        (lambda: draw(RANGES, 0, key=KEY), "needs `num_members` of at least 1, got 0."),
        (lambda: draw(RANGES, 3, key=0), "`sweep.draw`"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


class TestBestOfARun:
    def run(self, **options):
        ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 6, key=KEY)
        x = jax.random.normal(KEY, (32, 3))
        data = x, x.sum(1, keepdims=True)
        loss = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
        hyper = {"lr": jnp.array([1e-3, 1e-1, jnp.inf, 1e-2, 1e-4, 3e-2]), "betas": np.full((6, 2), 0.9)}
        optimiser = lambda h: optax.sgd(h["lr"], momentum=h["betas"][0])
        with pytest.warns(UserWarning, match="diverged"):
            return ee.fit(ensemble, loss, optimiser, data, epochs=2, hyper=hyper, progress=False, key=KEY, **options)

    def test_the_best_come_first_and_diverged_members_never(self):
        x = jax.random.normal(KEY, (32, 3))
        run = self.run(validation=(x, x.sum(1, keepdims=True)))
        best = run.best(5)
        order = [i for i in np.argsort(run.best_score).tolist() if i != 2]
        np.testing.assert_array_equal(best.stacked.weight, run.ensemble.stacked.weight[jnp.array(order)])
        with pytest.raises(ValueError, match="`count` of at most 5, the number of healthy members with a score; got 6"):
            run.best(6)

    def test_by_scores_of_ones_own(self):
        run = self.run()
        best = run.best(2, by=[5, 4, 0, np.nan, 2, 1], mode="min")
        np.testing.assert_array_equal(best.stacked.weight, run.ensemble.stacked.weight[jnp.array([5, 4])])
        with pytest.raises(TypeError, match="train with `validation=` data, or pass `by="):
            run.best()
        with pytest.raises(ValueError, match=re.escape("expected (6,), got (2,)")):
            run.best(by=[1, 2], mode="min")

    def test_as_a_frame(self):
        pandas = pytest.importorskip("pandas")
        frame = self.run().table(as_frame=True)
        assert isinstance(frame, pandas.DataFrame)
        assert list(frame.columns) == ["member", "betas[0]", "betas[1]", "lr", "loss", "status", "stopped_at"]
        assert frame.loc[2, "status"] == "diverged"
