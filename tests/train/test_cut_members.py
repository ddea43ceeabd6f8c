"""Some members of a run or of a training state: as if only they had been trained, and put together again."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import MemberMismatchError
from eqx_ensemble.train import Revival, Status

KEY = jax.random.key(0)
MEMBERS, ROWS, BATCH = 4, 12, 4
INDICES = ([2, 0], np.array([False, True, True, True]), slice(None, None, -2), [-1, 1])
CASES = [{"validation", "hyper", "rows", "state"}, {"revival", "hyper", "each"}]  # each option once, at the least
ADAM = optax.adam(1e-2)
OPTIONS = ("validation", "revival", "hyper", "rows", "each", "state")
pytestmark = pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")


class Net(eqx.Module):
    linear: eqx.nn.Linear
    calls: eqx.nn.StateIndex | None

    def __init__(self, *, counts, key):
        self.linear = eqx.nn.Linear(2, 1, key=key)
        self.calls = eqx.nn.StateIndex(jnp.array(0.0)) if counts else None

    def __call__(self, x, state=None):
        y = self.linear(x)[0]
        if self.calls is None:
            return y
        return y, state.set(self.calls, state.get(self.calls) + jnp.abs(y))


def fresh(key):
    return Net(counts=False, key=key)


def counting(key):
    return eqx.nn.make_with_state(Net)(counts=True, key=key)


def value_of(model, batch, key):
    """With noise from the member's stream; not finite for rows that are marked, while a weight is positive."""
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    value = jnp.mean((jax.vmap(model.linear)(jnp.where(keep, x, 0.0))[:, 0] - y) ** 2)
    return jnp.where(jnp.any(y > 5) & (model.linear.weight[0, 0] > 0), jnp.nan, value)


def plain_loss(model, batch, key):
    return value_of(model, batch, key), {"size": jnp.mean(batch[0])}


def stateful_loss(model, state, batch, key):
    _, state = model(batch[0][0], state)
    return value_of(model, batch, key), state, {"size": jnp.mean(batch[0])}


def stateful_score(model, state, batch, key):
    return value_of(model, batch, key), state


def of_rate(hyper):
    return optax.adam(hyper["lr"])


def several(value, index):
    return jax.tree.map(lambda x: x[index], value)


def fitted(options, index=None, begun=None, **changed):
    """A run of all members, or of those at `index` alone, each with its own data and options."""
    chosen = np.arange(MEMBERS) if index is None else np.arange(MEMBERS)[index]
    x = jax.random.normal(KEY, (MEMBERS, ROWS, 2))
    y = jnp.sin(x[..., 0]).at[:, 7].set(9.0 if "revival" in options else 0.0)
    data = ee.Each(several((x, y), chosen)) if "each" in options else (x[0], y[0])
    optimiser = of_rate if "hyper" in options else ADAM
    given = {"epochs": 2, "batch_size": BATCH, "plan": ee.plan.Sequential(), "progress": False, "key": KEY}
    state, own_loss, own_score = None, plain_loss, value_of
    if "state" in options:
        own_loss, own_score = stateful_loss, stateful_score
    if begun is None:
        begun = ee.build(counting if "state" in options else fresh, MEMBERS, key=KEY)
        begun, state = begun if isinstance(begun, tuple) else (begun, None)
        begun = begun[chosen]
        given["state"] = None if state is None else several(state, chosen)
        given["hyper"] = {"lr": jnp.linspace(1e-3, 1e-1, MEMBERS)[chosen]} if "hyper" in options else None
    if "validation" in options:
        given |= {"validation": ee.train.Validation((x[1, :5], jnp.cos(x[1, :5, 0])), score=own_score, mode="min")}
    if "rows" in options:
        given["rows"] = np.asarray(ee.resample.bootstrap(ROWS, MEMBERS, key=KEY))[chosen]
    if "revival" in options:
        given["on_diverge"] = ee.train.Revive(counting if "state" in options else fresh, most=2)
    return ee.fit(begun, own_loss, optimiser, data, has_aux=True, **given | changed)


def on_host(x):
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_same_run(got, expected):
    """Every leaf and every field but the duration, bit for bit, and of the same kind."""
    assert got.revived == expected.revived
    assert repr(got.plan) == repr(expected.plan)
    assert got.interrupted == expected.interrupted
    strip = lambda run: dataclasses.replace(run, seconds=0.0, revived=[], plan=ee.plan.Vmap())
    got, expected = strip(got), strip(expected)
    found, wanted = (jax.tree_util.tree_leaves_with_path(run) for run in (got, expected))
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, x), (_, y) in zip(found, wanted, strict=True):
        name = jax.tree_util.keystr(path)
        assert isinstance(x, np.ndarray) == isinstance(y, np.ndarray), name
        np.testing.assert_array_equal(on_host(x), on_host(y), err_msg=name)
        assert on_host(x).dtype.kind == on_host(y).dtype.kind, name
    for name, column in expected.table().items():
        np.testing.assert_array_equal(got.table()[name], column, err_msg=name)


def check_case(options, index, split):
    whole = fitted(options)
    some = whole[index]
    assert bool(some.revived) == ("revival" in options)
    assert_same_run(some, fitted(options, index))
    went_on = fitted(options, begun=whole)
    assert_same_run(fitted(options, index, begun=some), went_on[index])
    assert_same_run(ee.concatenate([went_on[:split], went_on[split:]]), went_on)


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(sorted(options)))
def test_as_if_only_they_had_been_trained(options):
    check_case(options, INDICES[0], 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_pairs(seed):
    rng = np.random.default_rng(seed)
    check_case(set(rng.choice(OPTIONS, 2, replace=False)), INDICES[seed % len(INDICES)], int(rng.integers(1, MEMBERS)))


@pytest.fixture(scope="module")
def run():
    return fitted({"validation", "hyper"})


@pytest.fixture(scope="module")
def revived():
    return fitted({"revival", "hyper"})


class TestIndex:
    @pytest.mark.parametrize("index", INDICES, ids=str)
    def test_it_is_that_of_an_ensemble(self, run, index):
        expected = np.asarray(run.ensemble[index].ids)
        assert run[index].ensemble.ids.tolist() == expected.tolist()
        assert run[index].train_state.ids.tolist() == expected.tolist()
        assert run.train_state[index].ids.tolist() == expected.tolist()
        np.testing.assert_array_equal(run[index].history.loss, run.history.loss[expected])
        np.testing.assert_array_equal(run[index].status, run.status[expected])

    @pytest.mark.parametrize(("index", "error"), [([4], IndexError), ([True], IndexError), ([], ValueError)])
    def test_wrong_ones_are_refused_alike(self, run, index, error):
        with pytest.raises(error) as of_ensemble:
            run.ensemble[index]
        for value, name in ((run, "Run"), (run.train_state, "train.TrainState")):
            with pytest.raises(error) as found:
                value[index]
            assert str(found.value) == str(of_ensemble.value).replace("`Ensemble.", f"`{name}.")

    def test_a_member_twice(self, run):
        for value in (run, run.train_state):
            with pytest.raises(ValueError, match=r"different ids.*repeated: \[1\]"):
                value[[1, 1]]

    @pytest.mark.parametrize("index", [0, -1, np.int32(1), jnp.array(2)])
    def test_one_member_alone(self, run, index):
        with pytest.raises(TypeError, match=r"`Run.__getitem__` takes several members.*\n.*`run\[i:i\+1\]`"):
            run[index]
        with pytest.raises(TypeError, match=r"several members.*\n.*`state\[i:i\+1\]`"):
            run.train_state[index]

    def test_inside_a_compiled_program(self, run):
        state = jax.jit(lambda state, index: state[index].params.linear.weight)(run.train_state, jnp.array([3, 1]))
        np.testing.assert_array_equal(state, run.train_state.params.linear.weight[jnp.array([3, 1])])
        with pytest.raises(TypeError, match="concrete index, because a run holds results on the host"):
            jax.jit(lambda index: run[index].train_state.step)(jnp.array([0]))

    def test_what_is_not_an_array_follows(self):
        with pytest.warns(UserWarning, match="diverged"):
            run = fitted({"revival", "hyper"}, on_diverge="freeze")
        lost = run.status == Status.DIVERGED
        assert lost.any()
        assert not lost.all()
        assert (run[lost].fault != "").all()
        assert run[::-1].fault.tolist() == run.fault[::-1].tolist() != run.fault.tolist()
        assert (run[~lost].fault == "").all()
        assert run[~lost].predict(jnp.ones((3, 2))).shape[0] == (~lost).sum()

    def test_revivals_follow_their_members(self, revived):
        members = [event.member for event in revived.revived]
        assert len(set(members)) > 1
        one = members[0]
        assert revived[[one]].revived == [event for event in revived.revived if event.member == one]
        backwards = revived[::-1]
        assert [event.step for event in backwards.revived] == sorted(event.step for event in revived.revived)
        first = [event.member for event in backwards.revived if event.step == revived.revived[0].step]
        assert first == sorted(first, reverse=True)


class TestConcatenate:
    def test_in_another_order_and_whole_again(self, run):
        parts = [run[[3]], run[[1, 0]], run[2:3]]
        assert_same_run(ee.concatenate(parts), run[[3, 1, 0, 2]])
        assert_same_run(ee.concatenate([run[:]]), run)

    def test_states(self, run):
        state = run.train_state
        joined = ee.concatenate([state[:1], state[1:]])
        for x, y in zip(jax.tree.leaves(joined), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(on_host(x), on_host(y))

    def test_separate_runs(self, run):
        some = [fitted({"validation", "hyper"}, index) for index in ([0, 3], [1, 2])]
        joined = ee.concatenate(some)
        assert_same_run(joined, run[[0, 3, 1, 2]])
        assert joined.seconds == max(own.seconds for own in some)
        assert ee.concatenate([some[0], dataclasses.replace(some[1], interrupted=True)]).interrupted

    def test_new_ids(self, run, revived):
        twice = ee.concatenate([run, run], renumber=True)
        assert twice.ensemble.ids.tolist() == twice.train_state.ids.tolist() == [*range(2 * MEMBERS)]
        assert ee.concatenate([run.train_state[2:], run.train_state], renumber=True).ids.tolist() == [*range(6)]
        events = [Revival(3, 2, None), Revival(1, 4, 3)]
        some = dataclasses.replace(run, revived=events)[[1, 3]]
        joined = ee.concatenate([run, some], renumber=True)
        assert joined.revived == [Revival(5, 2, None), Revival(4, 4, 5)]
        with pytest.raises(ValueError, match="cannot renumber member 1, revived as a copy of member 3"):
            ee.concatenate([some[:1]], renumber=True)

    def test_inside_a_compiled_program(self, run):
        for value in (run.ensemble, run.train_state):
            joined = eqx.filter_jit(lambda x: ee.concatenate([x[2:], x], renumber=True))(value)
            assert joined.ids.tolist() == [*range(6)]

    def test_equal_ids(self, run):
        for value in (run, run.train_state):
            with pytest.raises(ValueError, match=r"repeated: \[1\].*\n.*renumber=True"):
                ee.concatenate([value[:2], value[1:]])

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda run: eqx.tree_at(lambda run: run.train_state.step, run, jnp.int32(7)), "step.*expected 6, got 7"),
            (lambda run: dataclasses.replace(run, epoch=5), r"`\.epoch`: expected 3, got 5"),
            (lambda run: dataclasses.replace(run, plan=ee.plan.Vmap()), r"`\.plan`: expected Sequential\(\), got Vmap"),
            (lambda run: dataclasses.replace(run, data_state={"row": 4}), r"`\.data_state`"),
            (lambda run: dataclasses.replace(run, rows=np.zeros((2, 3), np.int32)), r"`\.rows`"),
            (lambda run: eqx.tree_at(lambda run: run.history.step, run, run.history.step + 1), r"`\.history\.step`"),
            (
                lambda run: dataclasses.replace(run, history=shorter(run.history)),
                r"`\.history\.step`: expected .*\[6\], got .*\[5\]",
            ),
            (lambda run: dataclasses.replace(run, selection=None), r"`\.selection`: expected Selection, got None"),
            (
                lambda run: dataclasses.replace(run, selection=dataclasses.replace(run.selection, mode="max")),
                r"`\.selection\.mode`: expected 'min', got 'max'",
            ),
            (
                lambda run: eqx.tree_at(lambda run: run.train_state.moving.opt_state, run, ()),
                r"`\.train_state\.moving\.opt_state`",
            ),
        ],
    )
    def test_what_differs_is_named(self, run, change, named, monkeypatch):
        first, other = run[:2], change(run[2:])
        monkeypatch.setattr(jnp, "concatenate", lambda *_: pytest.fail("an array was touched"))
        with pytest.raises(MemberMismatchError, match=named):
            ee.concatenate([first, other])

    def test_other_kinds(self, run):
        for other in (run.ensemble, run.train_state, None):
            with pytest.raises(TypeError, match=r"`concatenate` needs `Run` only, got .* at position 1"):
                ee.concatenate([run, other])
        with pytest.raises(TypeError, match="`concatenate` needs ensembles, got .*History"):
            ee.concatenate([run.history])


def shorter(history):
    loss, aux = jax.tree.map(lambda x: x[:, :-1], (history.loss, history.aux))
    return dataclasses.replace(history, loss=loss, aux=aux, step=history.step[:-1])
