"""A plan of the user's own works like the library's: nothing depends on its class."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.plan import Chunked, Sequential, Unrolled, Vmap

from ..factories import assert_close, assert_same, grouped

KEY, MEMBERS = jax.random.key(0), 5
ADAM = optax.adam(1e-2)


class Strided(ee.plan.AbstractPlan):
    """Every `step`-th member at a time."""

    step: int = eqx.field(static=True)
    named: str = eqx.field(static=True, default="", kw_only=True)

    def run(self, fn, arrays):
        count = jax.tree.leaves(arrays)[0].shape[0]
        order = np.concatenate([np.arange(count)[start :: self.step] for start in range(self.step)])
        parts = [
            jax.vmap(fn)(jax.tree.map(lambda x, start=start: x[start :: self.step], arrays))
            for start in range(min(self.step, count))
        ]
        return jax.tree.map(lambda *xs: jnp.concatenate(xs)[np.argsort(order)], *parts)

    def width(self, num_members):
        return -(-num_members // self.step)


class Plain(ee.plan.AbstractPlan):
    """No more than has to be defined."""

    def run(self, fn, arrays):
        return jax.vmap(fn)(arrays)


class Wide(Plain):
    """Names a width of its own however few members there are."""

    def width(self, num_members):
        return 8


class OneByOne(ee.plan.AbstractPlan):
    """As `Sequential`, in `fit` too."""

    def run(self, fn, arrays):
        return jax.lax.map(fn, arrays)

    def width(self, num_members):
        return 1

    @property
    def one_by_one(self):
        return True


OWN = [Strided(2), Plain(), OneByOne()]
FIXED = (ee.plan.AbstractPlan, ee.plan.Chunked, Vmap, Sequential, Unrolled)  # tested by name elsewhere
OTHERS = [
    kind()
    for kind in vars(ee.plan).values()
    if isinstance(kind, type) and issubclass(kind, ee.plan.AbstractPlan) and kind not in FIXED
]
DATA = jax.random.normal(KEY, (40, 3)), jax.random.normal(jax.random.key(1), (40, 1))


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fitted(ensemble, plan, **options):
    options = {"steps": 12, "batch_size": 8} | options
    return ee.fit(ensemble, loss, ADAM, DATA, progress=False, key=KEY, **grouped(options | {"plan": plan}))


def test_as_they_are_written():
    assert [repr(plan) for plan in (Strided(2), Strided(3, named="x"), Plain())] == [
        "Strided(2)", "Strided(3, named='x')", "Plain()",
    ]  # fmt: skip
    assert [repr(plan) for plan in (Vmap(), Chunked(4), Sequential(), Unrolled())] == [
        "Vmap()", "Chunked(4)", "Sequential()", "Unrolled()",
    ]  # fmt: skip


def test_sizes():
    assert [plan.width(9) for plan in (*OWN, Vmap(), Chunked(4), Chunked(100), Sequential(), Unrolled())] == [
        5, 9, 1, 9, 4, 9, 1, 9,
    ]  # fmt: skip
    assert [plan.smaller(9) for plan in OWN] == [Chunked(2), Chunked(4), None]
    assert Wide().smaller(4) == Chunked(2)  # not the half of eight, which would be all four again


@pytest.mark.parametrize("plan", OWN + OTHERS, ids=repr)
@pytest.mark.parametrize("scan", [None, True, False])
def test_in_fit(ensemble, plan, scan):
    assert_close(fitted(ensemble, plan, scan=scan).ensemble, fitted(ensemble, None).ensemble, 1e-5)


def test_one_by_one_is_sequential_bit_for_bit(ensemble):
    for scan in (None, False):
        runs = [fitted(ensemble, plan, scan=scan) for plan in (OneByOne(), Sequential())]
        assert_same(runs[0].ensemble, runs[1].ensemble)


@pytest.mark.parametrize("plan", OWN + OTHERS, ids=repr)
def test_in_prediction_and_maps(ensemble, plan):
    want = ee.predict(ensemble, DATA[0])
    for options in ({"batch_size": 7}, {"mesh": ee.make_mesh(members=2)}):
        np.testing.assert_allclose(ee.predict(ensemble, DATA[0], plan=plan, **options), want, rtol=1e-5, atol=1e-6)
    mapped = ee.map_members(lambda model, x: jax.vmap(model)(x), plan=plan)
    np.testing.assert_allclose(mapped(ensemble, DATA[0]), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", OWN + OTHERS, ids=repr)
def test_on_a_mesh(ensemble, plan):
    mesh, four = ee.make_mesh(members=2), ensemble[:4]
    assert_close(fitted(four, plan, mesh=mesh).ensemble, fitted(four, None).ensemble, 1e-5)
    mapped = ee.map_members(lambda model, x: jax.vmap(model)(x), plan=plan, mesh=mesh)
    np.testing.assert_allclose(mapped(ensemble, DATA[0]), ee.predict(ensemble, DATA[0]), rtol=1e-5, atol=1e-6)


def test_in_a_loop_of_ones_own(ensemble):
    state = other = ee.train.init(ensemble, ADAM, key=KEY)
    step, reference = ee.train.make_step(loss, ADAM, plan=Strided(2)), ee.train.make_step(loss, ADAM)
    for _ in range(5):
        state, _ = step(state, DATA)
        other, _ = reference(other, DATA)
    assert_close(state.ensemble, other.ensemble, 1e-5)


def test_in_a_checkpoint(ensemble, tmp_path):
    """The plan is no part of what a run computes: a run that is saved under one continues under another."""
    whole = fitted(ensemble, Strided(2))
    fitted(ensemble, Strided(2), steps=6, checkpoint=tmp_path / "same")
    assert_same(fitted(ensemble, Strided(2), checkpoint=tmp_path / "same").ensemble, whole.ensemble)
    fitted(ensemble, Vmap(), steps=6, checkpoint=tmp_path / "other")
    assert_close(fitted(ensemble, Strided(2), checkpoint=tmp_path / "other").ensemble, whole.ensemble, 1e-5)


def test_in_the_messages(ensemble, monkeypatch):
    """Out of memory: the message names the plan as it is written, and the one that takes half as many members."""
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    def fail(*args):
        raise error

    monkeypatch.setattr("eqx_ensemble._predict._predict.predict_batch", fail)
    with pytest.raises(MemoryError, match=r"with 5 members under `Strided\(2\)`") as caught:
        ee.predict(ensemble, DATA[0], plan=Strided(2))
    assert "Try `plan=Sequential()`" in str(caught.value)
    monkeypatch.undo()
    assert "plan     Strided(2)" in str(fitted(ensemble, Strided(2)))
