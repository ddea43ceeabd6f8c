"""Steps on batches whose results the host looks at late: what a run is does not depend on when it looks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train.compiled import _stepwise
from eqx_ensemble.train.data._batches import Converter
from eqx_ensemble.train.host import _callbacks as _stopping
from eqx_ensemble.train.host import _loop as _pacing
from eqx_ensemble.train.host._loop import Recording
from eqx_ensemble.train.host._saver import Saver

from ..factories import assert_same

KEY = jax.random.key(0)
MEMBERS = 5
ADAM = optax.adam(0.05)
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((66, 3), np.float32), RNG.standard_normal((66, 1), np.float32)
OWN_X, OWN_Y = RNG.standard_normal((MEMBERS, 66, 3), np.float32), RNG.standard_normal((MEMBERS, 66, 1), np.float32)
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), MEMBERS, key=KEY)
HELD_OUT = (X[:7], Y[:7])


def loss(model, batch, key, hyper):
    """Not finite from `hyper["lost"]` of the third column's mean on."""
    x, y = batch
    value = jnp.mean((jax.vmap(model)(x) - y) ** 2) + 1e-3 * jax.random.normal(key)
    return jnp.where(jnp.max(x[:, 2]) > hyper["lost"], jnp.nan, value), {"rows": jnp.float32(len(x)), "mean": x[0]}


class Reused:
    """Gives the same two buffers again and again, with other numbers in them, and reports its position."""

    def __init__(self, size=8):
        self.size, self.place = size, 0
        self._x, self._y = np.empty((size, 3), np.float32), np.empty((size, 1))

    def __iter__(self):
        self.place %= 66 // self.size
        return self

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]

    def __next__(self):
        if self.place == 66 // self.size:
            raise StopIteration
        rows = slice(self.place * self.size, (self.place + 1) * self.size)
        self._x[:], self._y[:] = X[rows], Y[rows]
        self.place += 1
        return self._x, self._y


class Failing(Reused):
    def __next__(self):
        if self.place == 5:
            raise OSError("the disk is gone")
        return super().__next__()


def listed():
    return [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 66, 8)]  # the last one is smaller


def of_each():
    return [(ee.Each(OWN_X[:, i : i + 8]), ee.Each(OWN_Y[:, i : i + 8])) for i in range(0, 64, 8)]


def on_device():
    return [jax.tree.map(jnp.asarray, batch) for batch in listed()]


NEVER, SOME, SOON = [9.0] * 5, [9.0, 1.9, 9.0, 1.7, 9.0], [1.6, 1.9, 1.8, 1.7, 1.6]
EARLY = [1.2, 1.4, 1.3, 1.2, 1.4]
DATA = {"listed": listed, "each": of_each, "device": on_device, "reused": Reused}


def drawn(seed):
    rng = np.random.default_rng(seed)
    chosen = {"data": DATA[list(DATA)[seed % 4]], "lost": [NEVER, SOME, SOON][rng.integers(3)]}
    chosen |= {"epochs": 3} if rng.random() < 0.5 else {"steps": int(rng.integers(5, 30))}
    if rng.random() < 0.4:
        chosen["stop"] = ee.train.Stopping(steps=[[2, 7, 3, 12, 30], [6, 6, 6, 6, 6], 11][rng.integers(3)])
    if rng.random() < 0.5:
        chosen |= {"validation": ee.train.Validation(HELD_OUT, score=score, mode="min"), "patience": 1}
    chosen["on_diverge"] = ["freeze", "freeze", "freeze", ee.train.Revive(perturb=None)][rng.integers(4)]
    return chosen


def score(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


def fitted(data, lost, **options):
    hyper = {"lost": np.asarray(lost, np.float32)}
    return ee.fit(ENSEMBLE, loss, ADAM, data(), hyper=hyper, has_aux=True, progress=False, key=KEY, **options)


def shown(run):
    """All of a run but the time it took."""
    return {name: value for name, value in vars(run).items() if name not in ("seconds", "plan")}


def same_runs(got, expected):
    got, expected = shown(got), shown(expected)
    assert_same(*(eqx.filter(tree, eqx.is_array_like) for tree in (got, expected)))
    for name in ("data_state", "revived", "interrupted"):
        assert got[name] == expected[name]


@pytest.fixture(params=["late", "rarely"])
def late(request, monkeypatch):
    """Looks at the end of an epoch, or after every third step; members leave the arrays when they can."""

    def switch(*, on):
        monkeypatch.setattr(_stopping, "_SECONDS", 1e3 if on else 0.0)
        monkeypatch.setattr(_pacing.Pacing, "pays", lambda self, width, before, steps_left: width < before)
        monkeypatch.setattr(_pacing, "_FIRST_STEPS", 3 if request.param == "rarely" else 32)
        monkeypatch.setattr(_pacing, "_SECONDS_PER_CHUNK", 0.0 if request.param == "rarely" else 1e3)

    return switch


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning", "ignore:.*patience:UserWarning")
@pytest.mark.parametrize("seed", range(8))
def test_runs_are_the_same(seed, late):
    case = drawn(seed)
    late(on=False)
    expected = fitted(**case)
    late(on=True)
    same_runs(fitted(**case), expected)


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
def test_the_host_looks_late(monkeypatch):
    looks, add = [], Recording.add
    monkeypatch.setattr(_stopping, "_SECONDS", 1e3)
    noted = lambda self, outcome, slots: (looks.append(outcome.num_steps), add(self, outcome, slots))[1]
    monkeypatch.setattr(Recording, "add", noted)
    run = fitted(listed, SOON, epochs=9)
    ends = int(run.stopped_at.max()) + 1
    assert ends < 9, "all of them are lost in the first epoch"
    assert looks == [ends]
    assert run.train_state.step == ends - 1, "the last of them is lost in the last step, which is not counted"
    looks.clear()
    fitted(listed, NEVER, epochs=2)
    assert looks == [9, 9]
    looks.clear()
    fitted(listed, NEVER, steps=9, stop=ee.train.Stopping(steps=4))
    assert looks == [4]
    looks.clear()
    fitted(listed, NEVER, epochs=1, on_diverge="revive")
    assert looks == [1] * 9


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
def test_the_position_is_that_of_the_last_step(late):
    runs = []
    for on in (False, True):
        late(on=on)
        runs.append(fitted(Reused, EARLY, epochs=2))
        assert 0 < runs[-1].data_state["place"] < 66 // 8
    same_runs(*runs)


@pytest.mark.parametrize("bad", range(1, 8))
def test_an_error_that_shows_late(bad, monkeypatch, unhooked):
    """The steps before the one that fails count, whichever were called after it."""

    class Batches(list):
        error = None

    def ready(out):
        if out[0] == bad:
            raise RuntimeError("out of something")

    results = lambda read, carry: (carry + 1, (np.int32(carry), None))
    monkeypatch.setattr(_stepwise, "compiled_batch", results)
    monkeypatch.setattr(_stepwise, "_take_back_idle_steps", lambda before, after, results: (after, results))
    monkeypatch.setattr(jax, "block_until_ready", ready)
    batches = Batches(range(8))
    carry, results = _stepwise._run_batches((None, None, batches), 0)
    assert (carry, [int(i) for i, _ in results]) == (bad, list(range(bad)))
    assert str(batches.error) == "out of something"
    with pytest.raises(RuntimeError, match="out of something"):
        _stepwise._run_batches((None, None, batches), bad)


def test_a_buffer_that_is_filled_again():
    """Its copy is used: a program may read the memory of an array after it was called."""
    convert, buffer = Converter(MEMBERS, None), np.zeros((8, 3), np.float32)
    for i in range(3):
        buffer[:] = i
        got = convert({"x": buffer, "y": ee.Each(np.ones((MEMBERS, 8), np.float64))})
        assert not isinstance(got["x"], np.ndarray) or not np.shares_memory(got["x"], buffer)
        assert got["y"].value.dtype == jnp.zeros(()).dtype
        np.testing.assert_array_equal(got["x"], np.full((8, 3), i))


def test_an_iterator_that_fails(late):
    runs = []
    for on in (False, True):
        late(on=on)
        with pytest.raises(OSError, match="the disk is gone") as raised:
            fitted(Failing, NEVER, epochs=1)
        runs.append(raised.value.run)
        assert runs[-1].train_state.step == 5
        assert runs[-1].data_state == {"place": 5}
    same_runs(runs[1], runs[0])


def test_a_loss_that_fails(monkeypatch):
    """Its error comes after the steps before it are recorded, and once."""
    calls = []

    def picky(model, batch, key):
        calls.append(len(batch[0]))
        if len(batch[0]) == 2:
            raise RuntimeError("two rows are too few")
        return score(model, batch, key)

    monkeypatch.setattr(_stopping, "_SECONDS", 1e3)
    with pytest.raises(RuntimeError, match="too few") as raised:
        ee.fit(ENSEMBLE, picky, ADAM, listed(), epochs=1, progress=False, key=KEY)
    assert calls.count(2) == 1
    expected = ee.fit(ENSEMBLE, score, ADAM, listed(), steps=8, progress=False, key=KEY)
    assert_same(raised.value.run.ensemble, expected.ensemble)
    assert_same(raised.value.run.history, expected.history)


@pytest.mark.parametrize("data", [listed, Reused])
def test_checkpoints_are_the_same(data, late, tmp_path, monkeypatch):
    runs, save = [], Saver.save
    for on in (False, True):
        late(on=on)
        saved, folder = [], tmp_path / str(on)

        def noted(self, carry, fixed, record, saved=saved, **options):
            saved.append(record.steps)
            save(self, carry, fixed, record, **options)

        monkeypatch.setattr(Saver, "save", noted)
        checkpoint = ee.train.Checkpoint(folder / "run.eqx", every=5)
        fitted(data, NEVER, steps=13, checkpoint=checkpoint)
        assert saved == [5, 10, 13]
        runs.append(fitted(data, NEVER, steps=13, checkpoint=checkpoint))
    same_runs(*runs)


@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")
def test_batches_are_checked_every_time(late):
    late(on=True)
    message = r"likely cause: in batch 4 of this run, the array at `batch\[0\]` holds 1 NaN .* at index \(1, 2\)"
    for bad in (np.nan, np.inf):
        batches = listed()[:4]
        batches[3] = (np.where(np.arange(24).reshape(8, 3) == 5, np.float32(bad), batches[3][0]), batches[3][1])
        with pytest.warns(UserWarning, match=message):
            assert (fitted(lambda batches=batches: batches, NEVER, epochs=1).stopped_at == 3).all()
    large = [(np.full((8, 3), 2e38, np.float32), np.zeros((8, 1), np.float32))] * 3  # whose sum overflows
    assert (fitted(lambda: large, NEVER, epochs=1).status == ee.train.Status.DIVERGED).all()
    batches = [(x, np.full(len(x), 2**40)) for x, _ in listed()[:3]]
    with pytest.raises(ValueError, match="64 bits"):
        fitted(lambda: batches, NEVER, epochs=1)


def test_outputs_that_change_form_lose_no_step():
    sizes = [6, 6, 2, 6]
    ends = np.cumsum(sizes)
    batches = [(X[end - size : end], Y[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    shapes = lambda model, batch, key: (jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2), batch[1])
    names = lambda model, batch, key: (jnp.mean(jax.vmap(model)(batch[0])), {f"of {len(batch[0])}": jnp.zeros(())})
    options = {"batch_size": None, "epochs": 1, "has_aux": True, "key": KEY}
    for outputs, error, match in ((shapes, ValueError, "one shape"), (names, TypeError, "outputs changed from")):
        expected = ee.fit(ENSEMBLE, outputs, ADAM, batches[:2], **options)
        with pytest.raises(error, match=match) as raised:
            ee.fit(ENSEMBLE, outputs, ADAM, batches, **options)
        assert_same(raised.value.run.ensemble, expected.ensemble)
        assert_same(raised.value.run.history, expected.history)
