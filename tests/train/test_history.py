"""`fit(history=...)`: the history of all steps, thinned in plain NumPy, is the reference."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train.compiled._windows import Windows
from eqx_ensemble.train.data import _sources as _arrays
from eqx_ensemble.train.host._record import Record

from ..factories import grouped

KEY = jax.random.key(0)
ROWS, BATCH, EPOCHS = 23, 5, 7  # five steps an epoch, the last one of three rows
STEPS = EPOCHS * 5
X = jax.random.normal(KEY, (ROWS, 2))
DATA = X, X.sum(axis=1, keepdims=True)
SGD = optax.sgd(0.1)
SLOW = pytest.mark.slow


def loss(model, batch, key):
    x, y = batch
    value = jnp.mean((jax.vmap(model)(x) - y) ** 2)
    return value, {"twice": 2 * value, "rows": jnp.int32(len(x))}


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(2, 1, key=key), 4, key=KEY)


def fit(ensemble, optimiser=SGD, data=DATA, **options):
    length = {} if "steps" in options else {"epochs": EPOCHS}
    sizes = {"batch_size": BATCH} if data is DATA else {}
    return ee.fit(ensemble, loss, optimiser, data, has_aux=True, key=KEY, **length, **sizes, **grouped(options))


def windows(every, steps, begun=0):
    """The steps `(begun, steps]` in windows of `every`, as pairs of the first and the last."""
    ends = sorted({*range(-(-(begun + 1) // every) * every, steps, every), steps})
    return [(max(begun, (end - 1) // every * every) + 1, end) for end in ends]


def thinned(curves, loss, pairs):
    """Of each window, each member's outputs at its last step with a finite loss; where there is none, blank."""
    out = []
    for first, last in pairs:
        column = np.full_like(curves[:, 0], 0 if curves.dtype.kind == "i" else np.nan)
        for step in range(first, last + 1):
            good = np.isfinite(loss[:, step - 1])
            column[good] = curves[good, step - 1]
        out.append(column)
    return np.stack(out, axis=1)


def assert_thinned(history, full, every):
    # where all fail, the whole history ends with the losses that are not finite, the thinned one before them
    pairs = windows(every, int(np.flatnonzero(np.isfinite(full.loss).any(axis=0)).max()) + 1)
    np.testing.assert_array_equal(history.step, [last for _, last in pairs])
    for name, got in (("loss", history.loss), *history.aux.items()):
        expected = full.loss if name == "loss" else full.aux[name]
        np.testing.assert_array_equal(got, thinned(expected, full.loss, pairs), err_msg=name)


def assert_same_members(run, full):
    assert eqx.tree_equal(run.ensemble, full.ensemble)
    assert eqx.tree_equal(run.train_state, full.train_state)
    for name in ("status", "stopped_at", "fault"):
        np.testing.assert_array_equal(getattr(run, name), getattr(full, name))


@pytest.fixture(scope="module")
def full(ensemble):
    return fit(ensemble)


@pytest.mark.parametrize(
    "history", [3, "last", *(pytest.param(every, marks=SLOW) for every in (1, 5, STEPS - 1, 10**6))]
)
def test_thins_the_history_and_changes_nothing_else(ensemble, full, history):
    run = fit(ensemble, history=history)
    assert_thinned(run.history, full.history, 10**9 if history == "last" else int(history))
    assert_same_members(run, full)
    recorded = run.history.step > STEPS - run.epoch
    np.testing.assert_allclose(run.table()["loss"], run.history.loss[:, recorded].mean(axis=1), rtol=1e-6)
    if history != 1:
        assert run.history.loss.size < full.history.loss.size


def test_of_all_steps_by_default(full):
    np.testing.assert_array_equal(full.history.step, np.arange(1, STEPS + 1))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validation": DATA}, id="validation", marks=SLOW),
        pytest.param({"validation": DATA, "scan": False}, id="calls", marks=SLOW),
        pytest.param({"plan": ee.plan.Sequential()}, id="one by one", marks=SLOW),
        pytest.param({"plan": ee.plan.Sequential(), "scan": False}, id="calls of one", marks=SLOW),
        pytest.param({"callbacks": ee.train.every(3, lambda progress: None)}, id="cut", marks=SLOW),
        pytest.param({"stop": ee.train.Stopping(steps=np.array([2, 9, 35, 17]))}, id="limits", marks=SLOW),
        pytest.param({"stop": ee.train.Stopping(steps=np.array([2, 9, 11, 10]))}, id="none to the end", marks=SLOW),
        pytest.param({"steps": 1}, id="one step", marks=SLOW),
        pytest.param({"steps": 22, "shuffle": False}, id="within an epoch", marks=SLOW),
    ],
)
@pytest.mark.parametrize("history", [4, pytest.param("last", marks=SLOW)])
def test_with_other_options(ensemble, options, history):
    full, run = fit(ensemble, **options), fit(ensemble, history=history, **options)
    assert_thinned(run.history, full.history, 10**9 if history == "last" else history)
    assert_same_members(run, full)
    if "validation" in options:
        np.testing.assert_array_equal(run.history.validation, full.history.validation)
        np.testing.assert_array_equal(run.history.validation_step, full.history.validation_step)


@pytest.mark.parametrize("history", [3, pytest.param("last", marks=SLOW)])
def test_of_an_iterable(ensemble, history):
    batches = [(DATA[0][i : i + 5], DATA[1][i : i + 5]) for i in range(0, 20, 5)]
    options = {"data": batches, "stop": ee.train.Stopping(steps=np.array([28, 28, 7, 2]))}
    full, run = fit(ensemble, **options), fit(ensemble, history=history, **options)
    assert_thinned(run.history, full.history, 10**9 if history == "last" else history)
    assert_same_members(run, full)


@SLOW
def test_on_a_mesh(ensemble):
    mesh = ee.make_mesh(members=4)
    full, run = fit(ensemble, mesh=mesh), fit(ensemble, mesh=mesh, history=3)
    assert_thinned(run.history, full.history, 3)
    assert_same_members(run, full)


def failing(model, batch, key, hyper):
    """Member 1 has a loss that is NaN for one step, with finite weights; member 2 weights that are not finite."""
    value, aux = loss(model, batch, key)
    count = jax.lax.stop_gradient(model.count)
    nan = jnp.where(count == hyper["nan"], jnp.nan, 0.0)
    return value + jax.lax.stop_gradient(nan) + model.count * jnp.where(count == hyper["inf"], jnp.inf, -10.0), aux


class Counting(eqx.Module):
    """A linear model with a weight that counts steps: its gradient is -10, the learning rate 0.1."""

    model: eqx.nn.Linear
    count: jax.Array

    def __call__(self, x):
        return self.model(x)


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_all_members_fail_between_recorded_steps(value):
    """By a loss that is not finite, which is not recorded, or by weights, at a step whose loss is."""
    ensemble = ee.build(lambda key: Counting(eqx.nn.Linear(2, 1, key=key), jnp.zeros(())), 2, key=KEY)
    hyper = {"nan": np.array([99.0, 99]), "inf": np.array([99.0, 99])} | {value: np.array([5.0, 10])}
    options = {"hyper": hyper, "epochs": EPOCHS, "batch_size": BATCH, "has_aux": True, "key": KEY}
    full, run = (ee.fit(ensemble, failing, SGD, DATA, history=history, **options) for history in ("all", 8))
    assert full.stopped_at.tolist() == [5, 10]
    # What members reported when they failed is not finite: it is there, in no window, and the step is not done.
    assert full.history.step.tolist() == [*range(1, 11), 10]
    assert np.isnan(full.history.loss[1, 10]) == (value == "nan")
    assert full.history.aux["rows"][:, 10].tolist() == [0, 5]
    assert_thinned(run.history, full.history, 8)
    assert_same_members(run, full)


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize("plan", [ee.plan.Vmap(), ee.plan.Chunked(2)])
@SLOW
def test_faults_between_recorded_steps_are_found_at_their_step(plan):
    make = lambda key: Counting(eqx.nn.Linear(2, 1, key=key), jnp.zeros(()))
    hyper = {"nan": np.array([99.0, 13, 99, 99]), "inf": np.array([99.0, 99, 22, 99])}
    options = {"hyper": hyper, "epochs": EPOCHS, "batch_size": BATCH, "has_aux": True, "plan": plan, "key": KEY}
    ensemble = ee.build(make, 4, key=KEY)
    runs = [ee.fit(ensemble, failing, SGD, DATA, history=history, **options) for history in ("all", 8, "last")]
    assert runs[0].stopped_at.tolist() == [-1, 13, 22, -1]
    for run, every in zip(runs[1:], (8, 10**9), strict=True):
        assert_same_members(run, runs[0])
        assert_thinned(run.history, runs[0].history, every)
        assert np.isfinite(run.table()["loss"]).all()  # each member's last loss before it failed


def test_callbacks_see_each_column_once_and_the_latest_losses(ensemble, full):
    seen, latest = [], []

    def look(progress):
        seen.append(progress.history)
        latest.append((progress.step, progress.loss.copy()))

    run = fit(ensemble, history=3, callbacks=ee.train.every(4, look))
    np.testing.assert_array_equal(np.concatenate([part.loss for part in seen], axis=1), run.history.loss)
    np.testing.assert_array_equal(np.concatenate([part.step for part in seen]), run.history.step)
    assert [step for step, _ in latest] == [*range(4, 33, 4), 35]
    for step, losses in latest:
        np.testing.assert_array_equal(losses, full.history.loss[:, step - 1])


def test_callbacks_see_a_validation_after_the_last_column_alone(ensemble):
    """A run that ends within an epoch and a window is validated after the last step's call."""
    seen = []
    look = lambda progress: seen.append(progress.history)
    run = fit(ensemble, steps=4, history="last", validation=DATA, callbacks=ee.train.every(2, look))
    assert [part.step.tolist() for part in seen] == [[], [4], []]
    assert [part.validation_step.tolist() for part in seen] == [[], [], [4]]
    np.testing.assert_array_equal(np.concatenate([part.loss for part in seen], axis=1), run.history.loss)


@SLOW
def test_callbacks_see_the_last_column_of_a_run_that_they_end(ensemble, full):
    seen = []
    end = lambda progress: seen.append(progress.history) or progress.step >= 12
    run = fit(ensemble, history=8, callbacks=ee.train.every(6, end))
    assert run.history.step.tolist() == [8, 12]
    np.testing.assert_array_equal(np.concatenate([part.loss for part in seen], axis=1), run.history.loss)
    np.testing.assert_array_equal(run.history.loss, full.history.loss[:, [7, 11]])


@pytest.mark.parametrize("history", [3, pytest.param("last", marks=SLOW)])
def test_a_run_that_is_resumed_has_the_history_of_the_whole(ensemble, full, tmp_path, history):
    options = {"history": history, "checkpoint": ee.train.Checkpoint(tmp_path / "a", every=5)}
    fit(ensemble, steps=11, **options)  # within a window
    run = fit(ensemble, **options)
    assert_thinned(run.history, full.history, 10**9 if history == "last" else history)
    assert_same_members(run, full)
    again = fit(ensemble, **options)
    np.testing.assert_array_equal(again.history.loss, run.history.loss)
    np.testing.assert_array_equal(again.history.step, run.history.step)
    with pytest.raises(ValueError, match=r"`history`"):
        fit(ensemble, checkpoint=tmp_path / "a")


@SLOW
def test_continuing_a_run_keeps_its_columns(ensemble, full):
    first = fit(ensemble, steps=11, history=4)
    run = fit(first, steps=STEPS - 11, history=10)
    assert run.history.step.tolist() == [4, 8, 11, 20, 30, 35]
    np.testing.assert_array_equal(run.history.loss, full.history.loss[:, run.history.step - 1])
    assert fit(first.train_state, steps=9, history="last").history.step.tolist() == [20]


def test_what_is_not_recorded_stays_on_the_device(ensemble, monkeypatch):
    sizes, unpack = [], _arrays.ChunkWork.unpack

    def sized(self, results, carry):
        sizes.append(results[3][0].shape[1])
        return unpack(self, results, carry)

    monkeypatch.setattr(_arrays.ChunkWork, "unpack", sized)
    for history in ("all", 3, "last"):
        fit(ensemble, history=history)
    in_all, of_some, at_last = sorted(set(sizes), reverse=True)
    assert in_all >= 32
    assert of_some <= in_all // 3 + 2
    assert at_last == 1


@pytest.mark.parametrize("every", [1, 2, 5, None])
def test_windows_in_numbers(every):
    found = Windows(every)
    for first in range(12):
        for count in range(1, 12):
            pairs = windows(every or 10**9, first + count, first)
            assert found.ends(first, count).tolist() == [last for _, last in pairs]
            assert len(pairs) <= found.most(count)
            part = found.part(first, first, count)
            assert part == slice(0, len(pairs))
            assert found.index(first, first + count - 1) == len(pairs) - 1
        assert bool(found.continues(first)) == (every is None or first % every > 0)


def test_a_record_takes_any_cuts():
    losses = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    losses[7:, 1] = np.nan
    for cuts in ([20], [3, 20], [1, 2, 5, 6, 17, 20], range(1, 21)):
        record, before = Record(windows=Windows(6)), 0
        for cut in cuts:
            pairs = windows(6, cut, before)
            record.add_steps((thinned(losses.T, losses.T, pairs).T, None), cut - before)
            before = cut
        history = record.history()
        assert history.step.tolist() == [6, 12, 18, 20]
        np.testing.assert_array_equal(history.loss, thinned(losses.T, losses.T, windows(6, 20)))


@pytest.mark.parametrize(
    ("history", "error", "text"),
    [
        ("first", ValueError, "`fit` needs `history` to be 'all', 'last' or a number of steps, got 'first'."),
        (None, ValueError, "`fit` needs `history` to be 'all', 'last' or a number of steps, got None."),
        (0, ValueError, "`fit` needs `history` of at least 1, got 0."),
        (2.0, TypeError, "`fit` needs an integer `history`, got 2.0."),
        (True, TypeError, "`fit` needs an integer `history`, got True."),
    ],
)
def test_message(unhooked, ensemble, history, error, text):
    with pytest.raises(error) as raised:
        fit(ensemble, history=history)
    assert str(raised.value).startswith(text)
