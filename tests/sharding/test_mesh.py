"""Members and rows sharded over devices: the results of one device, without unnecessary communication."""

import functools as ft
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble._sharding import Layout, shard_members
from eqx_ensemble.train.host import _loop as _pacing
from eqx_ensemble.train.host._active import ActiveMembers

from ..collectives import collectives, text_of
from ..factories import CASES, assert_close, assert_same, assert_same_where_optimised, data, grouped

KEY = jax.random.key(0)
MESHES = {"4x1": {"members": 4}, "2x2": {"members": 2, "data": 2}, "1x4": {"members": 1, "data": 4}}
OPTIMISERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-2)}
X, Y = data(36)
VALIDATION = X[:16] + 0.1, Y[:16]

uneven = pytest.mark.filterwarnings("ignore:.*do not divide:UserWarning")
pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def make(key):
    return eqx.nn.MLP(25, 2, 8, 2, key=key)


def loss(model, batch, key):
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fitted(num_members, optimiser="sgd", mesh=None, **options):
    options = {"validation": VALIDATION, "batch_size": 8, "epochs": 4, "patience": 3} | options
    mesh = None if mesh is None else ee.make_mesh(**mesh)
    ensemble = ee.build(make, num_members, mesh=mesh, key=KEY)
    return ee.fit(ensemble, loss, OPTIMISERS[optimiser], (X, Y), mesh=mesh, key=KEY, **grouped(options))


@ft.cache
def on_one_device(num_members, optimiser="sgd", plan=None):
    return fitted(num_members, optimiser, plan=plan)


def same_run(got, expected, rtol=1e-5):
    of = lambda run: (run.ensemble, run.train_state)
    assert_close(of(got), of(expected), rtol)
    if expected.selection is not None:
        assert_close(got.selection.params, expected.selection.params, rtol)
        np.testing.assert_allclose(got.best_score, expected.best_score, rtol=rtol)
    np.testing.assert_allclose(got.history.loss, expected.history.loss, rtol=rtol)
    assert got.status.tolist() == expected.status.tolist()
    assert got.stopped_at.tolist() == expected.stopped_at.tolist()


def bytes_by_device(tree):
    found = {}
    for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)):
        for shard in x.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return list(found.values())


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
        ("mesh", "error", "message"),
        [
            (lambda: jax.make_mesh((4,), ("members",)), ValueError, r"of the type `Auto`.* got `members` \(Explicit\)"),
            (
                lambda: Mesh(np.array(jax.devices()), ("batch",)),
                ValueError,
                r"axes `members` and, .* got `batch` \(Auto",
            ),
            (lambda: Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "members")), ValueError, "got `data`"),
            (lambda: 4, TypeError, r"needs a `jax.sharding.Mesh` as `mesh`"),
            (lambda: jax.devices(), TypeError, r"make_mesh\(members=4, data=2\)"),
        ],
    )
    @pytest.mark.parametrize("name", ["build", "fit", "predict", "map_members"])
    def test_other_meshes(self, mesh, error, message, name):
        ensemble = ee.build(make, 4, key=KEY)
        calls = {
            "build": lambda mesh: ee.build(make, 4, mesh=mesh, key=KEY),
            "fit": lambda mesh: ee.fit(ensemble, loss, OPTIMISERS["sgd"], (X, Y), epochs=1, mesh=mesh, key=KEY),
            "predict": lambda mesh: ee.predict(ensemble, X, mesh=mesh),
            "map_members": lambda mesh: ee.map_members(lambda model: model(X[0]), mesh=mesh)(ensemble),
        }
        with pytest.raises(error, match=message):
            calls[name](mesh())

    def test_a_mesh_of_another_kind_is_left_alone(self):
        """An ensemble that the user has placed on other devices is used there."""
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("members", "mine"))
        ensemble, there = ee.build(make, 4, key=KEY), NamedSharding(mesh, PartitionSpec("members"))
        spread = jax.tree.map(lambda x: jax.device_put(x, there) if eqx.is_array(x) else x, ensemble)
        assert_close(ee.predict(spread, X), ee.predict(ensemble, X), 1e-5)

    def test_a_mesh_of_your_own(self):
        mesh = Mesh(np.array(jax.devices()), ("members",))
        assert_same(ee.build(make, 4, mesh=mesh, key=KEY), ee.build(make, 4, key=KEY))


class TestBuild:
    @uneven
    @pytest.mark.parametrize("num_members", [3, 5, 8])
    @pytest.mark.parametrize("mesh", ["4x1", "2x2"])
    def test_bits(self, mesh, num_members):
        ensemble = ee.build(make, num_members, mesh=ee.make_mesh(**MESHES[mesh]), key=KEY)
        assert_same(ensemble, ee.build(make, num_members, key=KEY))

    def test_no_device_holds_all(self):
        whole = bytes_by_device(ee.build(make, 8, key=KEY))
        assert len(whole) == 1
        parts = bytes_by_device(ee.build(make, 8, mesh=ee.make_mesh(), key=KEY))
        assert parts == [whole[0] // 4] * 4

    def test_no_device_holds_all_at_birth(self):
        """Not even inside the program that makes them."""
        mesh = ee.make_mesh()
        wide = lambda key: eqx.nn.Linear(64, 64, key=key)
        text = text_of(
            lambda keys: ee.map_members(lambda key: eqx.filter(wide(key), eqx.is_array), mesh=mesh)(ee.Each(keys)),
            ee.member_keys(KEY, 8),
        )
        assert "f32[2,64,64]" in text
        assert "f32[8,64,64]" not in text

    def test_with_state_and_arguments(self):
        def model(key, p):
            return [eqx.nn.BatchNorm(3, "batch", mode="batch"), eqx.nn.Dropout(p)]

        options = {"zip": {"p": jnp.array([0.1, 0.2, 0.3, 0.4])}, "key": KEY}
        got = ee.build(eqx.nn.make_with_state(model), mesh=ee.make_mesh(), **options)
        assert_same(got, ee.build(eqx.nn.make_with_state(model), **options))
        for x in jax.tree.leaves(eqx.filter((got[0].stacked, got[1]), eqx.is_array)):
            assert x.sharding.spec[0] == "members"

    def test_padding_is_reported(self):
        with pytest.warns(UserWarning, match="5 members do not divide evenly over 4 devices: they are padded to 8"):
            ee.build(make, 5, mesh=ee.make_mesh(), key=KEY)

    def test_what_cannot_be_compiled(self):
        """A constructor that uses concrete values is run as without a mesh."""

        def looks(key):
            assert float(jnp.ones(())) == 1.0  # is a tracer where this is compiled, and a number where it is not
            return make(key)

        with pytest.warns(UserWarning, match="cannot compile this constructor"):
            got = ee.build(looks, 4, mesh=ee.make_mesh(), key=KEY)
        assert_same(got, ee.build(make, 4, key=KEY))
        assert len(bytes_by_device(got)) == 4


class TestFit:
    """SGD shows wrong gradients, which Adam hides."""

    @uneven
    @pytest.mark.parametrize("num_members", [3, 5, 8])
    @pytest.mark.parametrize("mesh", MESHES)
    def test_one_device(self, mesh, num_members):
        same_run(fitted(num_members, mesh=MESHES[mesh]), on_one_device(num_members))

    @uneven
    @pytest.mark.slow
    @pytest.mark.parametrize("num_members", [3, 8])
    @pytest.mark.parametrize("mesh", MESHES)
    def test_one_device_with_adam(self, mesh, num_members):
        same_run(fitted(num_members, "adam", mesh=MESHES[mesh]), on_one_device(num_members, "adam"))

    @uneven
    @pytest.mark.parametrize("plan", [ee.plan.Chunked(2), ee.plan.Sequential(), ee.plan.Unrolled(), "auto"], ids=str)
    def test_plans_inside_devices(self, plan):
        same_run(fitted(7, mesh=MESHES["2x2"], plan=plan), on_one_device(7))

    def test_the_mesh_of_the_ensemble(self):
        mesh = ee.make_mesh()
        ensemble = ee.build(make, 4, mesh=mesh, key=KEY)
        run = ee.fit(ensemble, loss, OPTIMISERS["sgd"], (X, Y), epochs=1, key=KEY)
        parts = run.ensemble.stacked.layers[0].bias.addressable_shards
        assert [(part.device.id, part.index[0].start) for part in parts] == [(i, i) for i in range(4)]
        prediction = ee.predict(run.ensemble, X)
        assert prediction.sharding.spec[0] == "members"

    def test_state_is_on_the_devices_of_its_members(self):
        """What was trained, the optimiser's state, the best weights: a quarter of all on each device."""
        mesh = ee.make_mesh()
        state = ee.train.init(ee.build(make, 8, mesh=mesh, key=KEY), OPTIMISERS["adam"], mesh=mesh, key=KEY)
        for x in jax.tree.leaves((state.moving, state.fixed)):
            assert x.sharding.spec[0] == "members"
        run = fitted(8, "adam", mesh=MESHES["4x1"], epochs=1)
        for x in jax.tree.leaves(
            eqx.filter((run.train_state.moving, run.selection, run.ensemble.stacked), eqx.is_array)
        ):
            assert x.sharding.spec[0] == "members"
            assert x.addressable_shards[0].data.shape[0] == 2

    @uneven
    def test_whatever_else_it_takes(self):
        """Own data, own rows, hyper-parameters, stopping at targets of their own."""
        own = ee.Each(jnp.stack([X + 0.01 * i for i in range(5)]))
        rows = np.asarray(ee.resample.bootstrap(len(X), 5, key=KEY))
        options = {
            "hyper": {"rate": jnp.geomspace(0.01, 0.3, 5)},
            "rows": rows,
            "stop": ee.train.Stopping(steps=[3, 100, 7, 100, 9]),
            "batch_size": 8,
            "validation": (ee.Each(own.value[:, :8]), Y[:8]),
            "epochs": 3,
        }
        fit = lambda mesh: ee.fit(
            ee.build(make, 5, key=KEY), loss, lambda h: optax.sgd(h["rate"]), (own, Y), mesh=mesh, key=KEY, **options
        )
        got, expected = fit(ee.make_mesh(members=2, data=2)), fit(None)
        same_run(got, expected)
        assert got.stopped_at.tolist() == [3, -1, 7, -1, 9]
        np.testing.assert_allclose(got.out_of_bag(X).mean, expected.out_of_bag(X).mean, rtol=1e-4, atol=1e-6)

    @uneven
    @pytest.mark.parametrize("own", [False, True])
    def test_iterables(self, own):
        mark = (lambda x: ee.Each(jnp.stack([x + 0.01 * i for i in range(5)]))) if own else lambda x: x
        batches = [(mark(X[i : i + 8]), Y[i : i + 8]) for i in range(0, 36, 8)]
        fit = lambda mesh: ee.fit(
            ee.build(make, 5, key=KEY), loss, OPTIMISERS["sgd"], batches, epochs=2, mesh=mesh, key=KEY
        )
        assert_close(fit(ee.make_mesh(data=2)).ensemble, fit(None).ensemble, 1e-5)

    def test_batches_whose_rows_do_not_divide(self):
        with pytest.warns(UserWarning, match="Batches of 6 rows do not divide over 4 devices"):
            got = fitted(2, mesh=MESHES["1x4"], batch_size=6)
        same_run(got, fitted(2, batch_size=6))

    @uneven
    def test_statistics_of_the_whole_batch(self):
        case = CASES["conv and batch norm"]
        ensemble, state = ee.build(case.make, 3, key=KEY)
        fit = lambda mesh: ee.fit(
            ensemble, case.loss, OPTIMISERS["sgd"], (X, Y), state=state, epochs=2, batch_size=12, mesh=mesh, key=KEY
        )
        got, expected = fit(ee.make_mesh(members=1, data=4)), fit(None)
        assert_close((got.ensemble, got.state), (expected.ensemble, expected.state), case.rtol)
        of_parts = ee.fit(ensemble, case.loss, OPTIMISERS["sgd"], (X, Y), state=state, epochs=2, batch_size=3, key=KEY)
        with pytest.raises(AssertionError):  # statistics of parts would show
            assert_close(of_parts.state, expected.state, 1e-2)

    @uneven
    def test_leaving_the_arrays(self, monkeypatch):
        options = {"stop": ee.train.Stopping(steps=[3] * 4 + [7] * 3 + [100] * 4), "epochs": 6, "patience": None}
        expected = fitted(11, **options)
        widths, shrink = [], ActiveMembers.shrink
        monkeypatch.setattr(_pacing, "_FIRST_STEPS", 1)
        monkeypatch.setattr(_pacing, "_SECONDS_PER_CHUNK", 0.0)
        monkeypatch.setattr(_pacing.Pacing, "pays", lambda self, width, before, steps_left: width < before)
        noted = lambda self, width: widths.append(width) or shrink(self, width)
        monkeypatch.setattr(ActiveMembers, "shrink", noted)
        got = fitted(11, mesh=MESHES["4x1"], **options)
        assert widths == [8, 4]
        same_run(got, expected)

    @uneven
    @pytest.mark.parametrize("revive", [None, ee.train.Revive(perturb=None), ee.train.Revive(make)])
    def test_a_member_that_diverges(self, revive):
        """Healthy and revived members are as on one device."""

        def spoilt(model, batch, key, hyper):
            return loss(model, batch, key) * jnp.where(jnp.isnan(hyper["spoil"]), jnp.nan, 1.0)

        hyper = {"spoil": jnp.array([0.0, jnp.nan, 0.0, 0.0, 0.0])}
        options = {"hyper": hyper, "epochs": 2, "on_diverge": "freeze" if revive is None else revive}
        fit = lambda mesh: ee.fit(
            ee.build(make, 5, key=KEY), spoilt, OPTIMISERS["sgd"], (X, Y), mesh=mesh, key=KEY, **options
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, expected = fit(ee.make_mesh()), fit(None)
        assert got.status.tolist() == expected.status.tolist()
        assert got.revived == expected.revived
        assert_close(got.ensemble, expected.ensemble, 1e-5)

    @uneven
    @pytest.mark.parametrize("mesh", MESHES.values(), ids=str)
    def test_one_compile(self, mesh, compiled):
        """Arrays leave a program with the shardings of its inputs: the next chunk, and the next fit, reuse it."""
        options = {"mesh": mesh, "epochs": 3, "batch_size": 4, "shuffle": False, "num_members": 6}
        with compiled() as programs:
            fitted(**options)
        assert programs.count("run_chunk") == 1
        with compiled() as programs:
            fitted(**options)
        assert "run_chunk" not in programs

    def test_your_own_loop(self):
        mesh = ee.make_mesh(data=2)
        states = {}
        for where in (None, mesh):
            state = ee.train.init(ee.build(make, 4, key=KEY), OPTIMISERS["sgd"], mesh=where, key=KEY)
            step = ee.train.make_step(loss, OPTIMISERS["sgd"], mesh=where)
            for i in range(3):
                state, metrics = step(state, (X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]))
            states[where] = state.moving, metrics
        assert_close(states[mesh], states[None], 1e-5)


class TestGoingOn:
    @uneven
    @pytest.mark.parametrize("num_members", [5, 8])
    def test_bit_for_bit_on_the_same_mesh(self, num_members, tmp_path):
        options = {"mesh": MESHES["2x2"], "batch_size": 12, "checkpoint_every": 3, "validation": None, "patience": None}
        whole = fitted(num_members, epochs=4, **options | {"checkpoint_every": None})
        fitted(num_members, epochs=2, checkpoint=tmp_path / "run", **options)
        resumed = fitted(num_members, epochs=4, checkpoint=tmp_path / "run", **options)
        assert_same_where_optimised(resumed.train_state, whole.train_state)
        np.testing.assert_array_equal(resumed.history.loss[:, :6], whole.history.loss[:, :6])

    @uneven
    @pytest.mark.parametrize(("first", "then"), [("4x1", None), (None, "2x2"), ("2x2", "4x1")])
    def test_on_other_devices(self, first, then, tmp_path):
        mesh = lambda name: None if name is None else MESHES[name]
        fitted(6, epochs=2, checkpoint=tmp_path / "run", mesh=mesh(first))
        same_run(fitted(6, epochs=4, checkpoint=tmp_path / "run", mesh=mesh(then)), on_one_device(6))

    @uneven
    def test_with_data_of_their_own(self, tmp_path):
        """What pads members is no part of what the data are."""
        data = (ee.Each(jnp.stack([X + 0.01 * i for i in range(5)])), Y)
        options = {"batch_size": 8, "checkpoint": tmp_path / "run", "key": KEY, "validation": data}
        ensemble = ee.build(make, 5, key=KEY)
        fit = lambda epochs, mesh: ee.fit(ensemble, loss, OPTIMISERS["sgd"], data, epochs=epochs, mesh=mesh, **options)
        fit(1, ee.make_mesh())
        fit(2, ee.make_mesh(members=2, data=2))
        got = fit(3, None)
        expected = ee.fit(ensemble, loss, OPTIMISERS["sgd"], data, epochs=3, **options | {"checkpoint": None})
        same_run(got, expected)

    def test_a_run_continues(self):
        mesh = ee.make_mesh()
        run = fitted(4, mesh=MESHES["4x1"], epochs=2)
        again = ee.fit(
            run, loss, OPTIMISERS["sgd"], (X, Y), epochs=2, batch_size=8, validation=VALIDATION, patience=3, mesh=mesh,
            key=KEY,
        )  # fmt: skip
        same_run(again, on_one_device(4))

    @uneven
    @pytest.mark.parametrize("num_members", [3, 8])
    def test_save_and_load(self, num_members, tmp_path):
        mesh = ee.make_mesh()
        ensemble = ee.build(make, num_members, mesh=mesh, key=KEY)
        ee.save(tmp_path / "here", ensemble)
        assert_same(ee.load(tmp_path / "here", make), ee.build(make, num_members, key=KEY))
        loaded = ee.load(tmp_path / "here", ee.build(make, num_members, mesh=ee.make_mesh(members=2), key=KEY))
        assert_same(loaded, ensemble)
        assert len(bytes_by_device(loaded)) == 2


class TestAlong:
    """What is built on `fit` and `predict` passes the mesh on."""

    @uneven
    @pytest.mark.parametrize("mesh", MESHES)
    def test_predict(self, mesh):
        ensemble = ee.build(make, 5, key=KEY)
        mesh = ee.make_mesh(**MESHES[mesh])
        expected = ee.predict(ensemble, X)
        assert_close(ee.predict(ensemble, X, batch_size=10, mesh=mesh), expected, 1e-5)
        combined = ee.predict(ensemble, X, batch_size=16, combine=ee.combine.mean, mesh=mesh)
        assert_close(combined, jnp.mean(expected, axis=0), 1e-5)
        got = ee.predict(ensemble, X, batch_size=8, combine=ee.combine.mean, mesh=mesh)
        assert_close(got, jnp.mean(expected, axis=0), 1e-5)

    def test_populations(self):
        options = {"hyper": {"rate": jnp.geomspace(1e-3, 0.3, 8)}, "validation": VALIDATION, "epochs": 1, "key": KEY}
        found = {}
        for mesh in (None, ee.make_mesh()):
            ensemble = ee.build(make, 8, mesh=mesh, key=KEY)
            optimiser = lambda h: optax.sgd(h["rate"])
            found[mesh] = (
                ee.methods.population_based_training(ensemble, loss, optimiser, (X, Y), rounds=3, mesh=mesh, **options),
                ee.methods.successive_halving(ensemble, loss, optimiser, (X, Y), factor=2, mesh=mesh, **options),
            )
        (one_pbt, one_halving), (pbt, halving) = found.values()
        assert pbt.lineage.tolist() == one_pbt.lineage.tolist()
        same_run(pbt.run, one_pbt.run)
        same_run(halving, one_halving)

    @uneven
    def test_cross_fit(self):
        folds = ee.resample.folds(len(X), 3, key=KEY)
        fit = lambda mesh: ee.methods.cross_fit(
            ee.build(make, 3, key=KEY), loss, OPTIMISERS["sgd"], (X, Y), folds, x=X, epochs=2, mesh=mesh, key=KEY
        )
        assert_close(fit(ee.make_mesh(members=2)).held_out.mean, fit(None).held_out.mean, 1e-5)


def step_text(mesh, num_members=8, model=make, optimiser="adam"):
    """The compiled program of one training step, whole."""
    state = ee.train.init(ee.build(model, num_members, mesh=mesh, key=KEY), OPTIMISERS[optimiser], mesh=mesh, key=KEY)
    step = ee.train.make_step(loss, OPTIMISERS[optimiser], mesh=mesh)
    return text_of(step, state, (X[:32], Y[:32]))


class TestWhatIsSent:
    def test_nothing_where_members_are_apart(self):
        text = step_text(ee.make_mesh())
        # In `fit`, devices communicate at the end of a chunk whether a member failed; a single step does not.
        assert collectives(text) == []
        assert "f32[2,8,8]" in text
        assert "f32[8,8,8]" not in text

    @pytest.mark.parametrize("mesh", ["2x2", "1x4"])
    def test_gradients_only_where_rows_are_split(self, mesh):
        found = collectives(step_text(ee.make_mesh(**MESHES[mesh])))
        assert {kind for kind, _ in found} == {"all-reduce"}
        here = 8 // MESHES[mesh]["members"]
        weights = sum(x.size for x in jax.tree.leaves(eqx.filter(make(KEY), eqx.is_array)))
        of_losses = 4 * here
        assert sum(size for _, size in found) <= 4 * here * weights + 2 * of_losses

    def test_another_loss_would_show(self):
        """A loss over all members together sends something: the tests above can fail."""
        mesh = ee.make_mesh()
        ensemble = ee.build(make, 8, mesh=mesh, key=KEY)
        total = lambda ensemble, x: jnp.sum(ee.map_members(lambda model, x: model(x), mesh=mesh)(ensemble, x))
        assert [kind for kind, _ in collectives(text_of(total, ensemble, X[0]))] == ["all-reduce"]

    def test_memory_is_shared(self):
        """The weights of a step are a quarter of all on each device, its temporary arrays too."""
        sizes = []
        for members in (1, 4):
            mesh = ee.make_mesh(members=members)
            state = ee.train.init(ee.build(make, 64, mesh=mesh, key=KEY), OPTIMISERS["adam"], mesh=mesh, key=KEY)
            step = ee.train.make_step(loss, OPTIMISERS["adam"], mesh=mesh)
            arrays, rest = eqx.partition(state, eqx.is_array)
            run = lambda arrays, step=step, rest=rest: eqx.filter(
                step(eqx.combine(arrays, rest), (X, Y))[0], eqx.is_array
            )
            sizes.append(jax.jit(run).lower(arrays).compile().memory_analysis())
        (one, four), small = sizes, 1024  # pointers, and the batch
        assert four.argument_size_in_bytes <= one.argument_size_in_bytes / 4 + small
        assert four.output_size_in_bytes <= one.output_size_in_bytes / 4 + small
        assert four.temp_size_in_bytes <= one.temp_size_in_bytes / 4 * 1.2


def test_members_that_do_not_divide():
    """Between programs they are on all devices."""
    spread = shard_members(jnp.arange(6.0), Layout(ee.make_mesh()))
    assert {shard.data.shape for shard in spread.addressable_shards} == {(6,)}
    assert len(spread.sharding.device_set) == 4
