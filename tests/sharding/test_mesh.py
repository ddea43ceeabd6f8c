"""Members and rows sharded over devices: the results of one device, without unnecessary communication."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble.train import _loop
from eqx_ensemble.train._blocks import train_block

from ..collectives import collectives, text_of
from ..factories import CASES, assert_close, assert_same_where_optimised, data
from ..marking import slow_but

KEY = jax.random.key(0)
MESHES = {"4x1": {"members": 4}, "2x2": {"members": 2, "data": 2}, "1x4": {"members": 1, "data": 4}}
OPTIMISER = optax.sgd(0.1)
X, Y = map(np.asarray, data(36))
VALIDATION = X[:16] + np.float32(0.1), Y[:16]

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
on_meshes = pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)


def make(key):
    return eqx.nn.MLP(25, 2, 8, 2, key=key)


def loss(model, batch, key):
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fitted(num_members, shape=None, data=(X, Y), **options):
    options = {"validation": VALIDATION, "epochs": 4, "patience": 3} | options
    if isinstance(data, tuple):
        options = {"batch_size": 8} | options
    mesh = None if shape is None else ee.make_mesh(**shape)
    ensemble = ee.build(make, num_members, mesh=mesh, key=KEY)
    return ee.fit(ensemble, loss, OPTIMISER, data, mesh=mesh, key=KEY, **options)


@ft.cache
def on_one_device(num_members):
    return fitted(num_members)


def known(tree):
    """The arrays of a tree, with zeros for what is not known yet."""
    return jax.tree.map(lambda x: jnp.nan_to_num(x) if eqx.is_inexact_array(x) else x, tree)


def same_run(got, expected, rtol=1e-5):
    of = lambda run: known((run.ensemble, run.train_state))
    assert_close(of(got), of(expected), rtol)
    np.testing.assert_allclose(got.history.loss, expected.history.loss, rtol=rtol)
    assert got.status.tolist() == expected.status.tolist()
    assert got.stopped_at.tolist() == expected.stopped_at.tolist()


class TestMakeMesh:
    def test_axes(self):
        mesh = ee.make_mesh(data=2)
        assert dict(mesh.shape) == {"members": 2, "data": 2}
        assert set(mesh.axis_types) == {AxisType.Auto}
        assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3]

    def test_of_some_devices(self):
        mesh = ee.make_mesh(members=2, devices=jax.devices()[2:])
        assert [device.id for device in mesh.devices.flat] == [2, 3]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"members": 3, "data": 2}, r"members x data = 3 x 2 = 6 devices, got 4"),
            ({"data": 8}, r"members x data = 1 x 8 = 8 devices, got 4"),
            ({"members": 0}, "members"),
            ({"data": 1.5}, "data"),
        ],
    )
    def test_too_much(self, options, message):
        with pytest.raises((ValueError, TypeError), match=message):
            ee.make_mesh(**options)

    @pytest.mark.usefixtures("unhooked")
    @pytest.mark.parametrize(
        "mesh",
        [lambda: jax.make_mesh((4,), ("members",)), lambda: Mesh(np.array(jax.devices()), ("batch",)), lambda: 4],
    )
    @pytest.mark.parametrize("name", ["build", "fit", "predict"])
    def test_other_meshes(self, mesh, name):
        ensemble = ee.build(make, 4, key=KEY)
        calls = {
            "build": lambda mesh: ee.build(make, 4, mesh=mesh, key=KEY),
            "fit": lambda mesh: ee.fit(ensemble, loss, OPTIMISER, (X, Y), epochs=1, mesh=mesh, key=KEY),
            "predict": lambda mesh: ee.predict(ensemble, X, mesh=mesh),
        }
        with pytest.raises(TypeError, match=rf"`{name}` needs a mesh with the axis `members`, and"):
            calls[name](mesh())

    def test_a_mesh_of_another_kind_is_left_alone(self):
        """An ensemble that the user has placed on other devices is used there."""
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("members", "mine"))
        ensemble, there = ee.build(make, 4, key=KEY), NamedSharding(mesh, PartitionSpec("members"))
        spread = jax.tree.map(lambda x: jax.device_put(x, there) if eqx.is_array(x) else x, ensemble)
        assert_close(ee.predict(spread, X), ee.predict(ensemble, X), 1e-5)

    @pytest.mark.slow
    def test_a_mesh_of_your_own(self):
        mesh = Mesh(np.array(jax.devices()), ("members",))
        assert_same_where_optimised(ee.build(make, 4, mesh=mesh, key=KEY), ee.build(make, 4, key=KEY))


class TestBuild:
    @pytest.mark.parametrize("num_members", [5, 8])
    def test_members_are_those_of_one_device(self, num_members):
        assert_same_where_optimised(
            ee.build(make, num_members, mesh=ee.make_mesh(), key=KEY), ee.build(make, num_members, key=KEY)
        )

    def test_each_on_its_device(self):
        built = ee.build(make, 8, mesh=ee.make_mesh(), key=KEY)
        for x in jax.tree.leaves(eqx.filter(built, eqx.is_array)):
            assert [shard.data.shape[0] for shard in x.addressable_shards] == [2] * 4

    def test_with_state_and_arguments(self):
        case = CASES["conv and batch norm"]
        _, state = ee.build(case.make, 4, mesh=ee.make_mesh(), key=KEY)
        assert all(x.sharding.spec[0] == "members" for x in jax.tree.leaves(state))


class TestFit:
    @on_meshes
    @pytest.mark.parametrize("num_members", slow_but([5], [5, 8]))
    def test_as_on_one_device(self, shape, num_members):
        same_run(fitted(num_members, shape), on_one_device(num_members))

    def test_members_stay_on_their_devices(self):
        run = fitted(8, MESHES["4x1"])
        for x in jax.tree.leaves(eqx.filter((run.ensemble, run.train_state), eqx.is_array)):
            assert [shard.data.shape[0] for shard in x.addressable_shards] == [2] * 4

    @pytest.mark.slow
    def test_the_mesh_of_the_ensemble(self):
        """Without `mesh`, it is that on which the members are."""
        ensemble = ee.build(make, 8, mesh=ee.make_mesh(), key=KEY)
        run = ee.fit(ensemble, loss, OPTIMISER, (X, Y), batch_size=8, epochs=2, key=KEY)
        weight = run.ensemble.stacked.layers[0].weight
        assert weight.sharding.spec[0] == "members"
        more = ee.fit(run, loss, OPTIMISER, (X, Y), batch_size=8, epochs=2)
        same_run(more, fitted(8, validation=None, patience=None))

    @pytest.mark.slow
    @on_meshes
    def test_batches_of_an_iterable(self, shape):
        batches = [(X[i : i + 12], Y[i : i + 12]) for i in range(0, 36, 12)]
        same_run(fitted(5, shape, batches), fitted(5, None, batches))

    @pytest.mark.slow
    def test_whatever_is_per_member(self):
        rows = np.stack([np.random.default_rng(i).permutation(36)[:20] for i in range(6)])
        options = {
            "data": (X, ee.Each(np.stack([Y + np.float32(i) for i in range(6)]))), "rows": rows,
            "stop": ee.train.Stopping(steps=[2, 5, 99, 99, 7, 3]), "key": ee.member_keys(KEY, 9)[3:],
        }  # fmt: skip
        for options["plan"] in (None, ee.plan.Blocks(1)):
            one, many = (
                ee.fit(
                    ee.build(make, 6, key=KEY), loss, OPTIMISER, epochs=4, batch_size=8, mesh=mesh,
                    **options,
                )
                for mesh in (None, ee.make_mesh())
            )  # fmt: skip
            same_run(many, one)

    @pytest.mark.slow
    def test_a_member_that_diverges(self):
        spoilt = np.stack([Y] * 4)
        spoilt[1] = np.nan
        options = {"data": (X, ee.Each(spoilt)), "validation": None, "patience": None}
        with pytest.warns(UserWarning, match="diverged"):
            one, many = fitted(4, None, **options), fitted(4, MESHES["4x1"], **options)
        same_run(many, one)

    @pytest.mark.slow
    def test_statistics_of_the_whole_batch(self):
        """BatchNorm sees all rows of a batch, on whichever devices they are."""
        case = CASES["conv and batch norm"]

        def run(mesh):
            ensemble, state = ee.build(case.make, 2, mesh=mesh, key=KEY)
            return ee.fit(
                ensemble, case.loss, OPTIMISER, data(16), state=state, batch_size=8, epochs=1, mesh=mesh, key=KEY
            )

        trained = lambda run: (run.ensemble, run.state, run.train_state.opt_state, run.train_state.loss)
        assert_close(trained(run(ee.make_mesh(2, 2))), trained(run(None)), 1e-4)

    @pytest.mark.slow
    def test_continued_on_other_devices(self, tmp_path):
        checkpoint = ee.train.Checkpoint(tmp_path / "run", every=1)
        fitted(5, MESHES["4x1"], epochs=2, checkpoint=checkpoint)
        same_run(fitted(5, MESHES["2x2"], checkpoint=checkpoint), on_one_device(5))


class TestAlong:
    @pytest.mark.slow
    @on_meshes
    def test_your_own_loop(self, shape):
        def trained(mesh):
            state = ee.train.init(ee.build(make, 8, mesh=mesh, key=KEY), OPTIMISER, key=KEY)
            step = ee.train.make_step(loss, OPTIMISER, mesh=mesh)
            for i in range(3):
                state, metrics = step(state, (X[i * 8 : i * 8 + 8], Y[i * 8 : i * 8 + 8]))
            return state, metrics

        assert_close(known(trained(ee.make_mesh(**shape))), known(trained(None)), 1e-5)

    def test_predict(self):
        ensemble, mesh = ee.build(make, 5, key=KEY), ee.make_mesh()
        for options in ({}, {"combine": ee.combine.mean}):
            got = ee.predict(ensemble, X, mesh=mesh, batch_size=16, **options)
            np.testing.assert_allclose(got, ee.predict(ensemble, X, **options), rtol=1e-5, atol=1e-6)


def fit_text(monkeypatch, mesh):
    """The compiled program of the first call of a `fit`."""
    texts = []

    def keep(*args):
        texts.append(train_block.lower(*args).compile().compiled.as_text())
        return train_block(*args)

    monkeypatch.setattr(_loop, "train_block", keep)
    ensemble = ee.build(make, 8, mesh=mesh, key=KEY)
    ee.fit(ensemble, loss, OPTIMISER, (X, Y), batch_size=12, epochs=1, mesh=mesh, key=KEY)
    return texts[0]


class TestWhatIsSent:
    @pytest.mark.slow
    def test_nothing_where_members_are_apart(self, monkeypatch):
        text = fit_text(monkeypatch, ee.make_mesh())
        assert collectives(text) == []
        assert "f32[2,8,8]" in text
        assert "f32[8,8,8]" not in text

    def test_gradients_where_rows_are_split(self, monkeypatch):
        found = collectives(fit_text(monkeypatch, ee.make_mesh(2, 2)))
        assert {kind for kind, _ in found} == {"all-reduce"}
        weights = sum(x.size for x in jax.tree.leaves(eqx.filter(make(KEY), eqx.is_array)))
        assert sum(size for _, size in found) <= 4 * 4 * weights + 64
        assert len(found) == 1

    @pytest.mark.slow
    def test_another_loss_would_show(self):
        """A loss over all members together sends something: the tests above can fail."""
        ensemble = ee.build(make, 8, mesh=ee.make_mesh(), key=KEY)
        total = lambda ensemble, x: jnp.sum(ee.map_members(lambda model, x: model(x))(ensemble, x))
        assert [kind for kind, _ in collectives(text_of(total, ensemble, X[0]))] == ["all-reduce"]
