"""Iterables of batches: prefetched, and resumed at their position."""

import os
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train.host._loop import Recording

from ..factories import assert_same

KEY = jax.random.key(0)
MEMBERS = 3
SGD = optax.sgd(0.05, momentum=0.9)
X = np.asarray(jax.random.normal(KEY, (40, 3)))
Y = np.sin(X[:, :1])


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), MEMBERS, key=KEY)


def fitted(begun, batches, **options):
    return ee.fit(begun, loss, SGD, batches, progress=False, key=KEY, **options)


class Batches:
    """Eight batches a pass; counts what was drawn."""

    def __init__(self):
        self.drawn = 0

    def __iter__(self):
        for i in range(0, 40, 5):
            self.drawn += 1
            yield X[i : i + 5], Y[i : i + 5]


class Resumable:
    """As grain's iterators and torchdata's loaders: they report their position, and can be set to it."""

    def __init__(self, get="get_state", put="set_state"):
        self.place = 0
        setattr(self, get, lambda: {"place": self.place})
        setattr(self, put, lambda state: setattr(self, "place", state["place"]))

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == 8:
            raise StopIteration
        self.place += 1
        return X[5 * self.place - 5 : 5 * self.place], Y[5 * self.place - 5 : 5 * self.place]


class Loader:
    """A new iterator for each pass."""

    def __iter__(self):
        return Resumable()


class Loading:
    """As torchdata's loader with workers: what it is set to counts for the next iterator that it makes."""

    def __init__(self):
        self._start = self._place = 0

    def state_dict(self):
        return {"place": self._place}

    def load_state_dict(self, state):
        self._start = state["place"]

    def __iter__(self):
        start, self._start = self._start, 0
        for self._place in range(start + 1, 9):
            yield X[5 * self._place - 5 : 5 * self._place], Y[5 * self._place - 5 : 5 * self._place]


def test_no_more_are_drawn_than_used(ensemble):
    for steps in (1, 7, 8, 11):
        batches = Batches()
        fitted(ensemble, batches, steps=steps)
        assert batches.drawn == steps


def test_a_generator_can_be_shared_by_runs(ensemble):
    source = iter(Batches())
    first = fitted(ensemble, source, steps=3)
    second = fitted(first, source, steps=5)
    assert_same(second.ensemble, fitted(ensemble, Batches(), epochs=1).ensemble)


def test_the_next_is_drawn_while_the_device_works(ensemble, monkeypatch):
    """Before the host waits for a step's results, it has asked for the next batch."""
    events, waits = [], Recording.add

    def batches():
        for i in range(3):
            events.append(f"draw {i}")
            yield X[:5], Y[:5]

    monkeypatch.setattr(Recording, "add", lambda *args: (events.append("wait"), waits(*args))[1])
    monkeypatch.setattr("eqx_ensemble.train.host._callbacks._SECONDS", 1e3)
    fitted(ensemble, batches(), epochs=1)
    assert events == ["draw 0", "draw 1", "draw 2", "wait"]
    events.clear()
    fitted(ensemble, batches(), epochs=1, on_diverge="raise")
    assert events == ["draw 0", "draw 1", "wait", "draw 2", "wait", "wait"]


@pytest.mark.parametrize("names", [("get_state", "set_state"), ("state_dict", "load_state_dict")])
@pytest.mark.parametrize("cut", [1, 5, 7])
def test_resumes_at_the_position_of_the_iterator(ensemble, names, cut):
    whole = fitted(ensemble, Resumable(*names), epochs=1)
    first = fitted(ensemble, Resumable(*names), steps=cut)
    assert first.data_state == {"place": cut}
    second = fitted(first, Resumable(*names), epochs=1)
    assert_same(second.ensemble, whole.ensemble)
    assert_same(second.history, whole.history)
    assert second.data_state is None


@pytest.mark.parametrize("cut", [1, 5])
def test_a_loader_that_is_set_itself(ensemble, cut):
    whole = fitted(ensemble, Loading(), epochs=1)
    second = fitted(fitted(ensemble, Loading(), steps=cut), Loading(), steps=8 - cut)
    assert_same(second.ensemble, whole.ensemble)


def test_an_epoch_that_was_over_is_not_validated_twice(ensemble):
    first = fitted(ensemble, Loader(), steps=8, validation=(X, Y))
    second = fitted(first, Loader(), epochs=1, validation=(X, Y))
    assert second.history.validation_step.tolist() == [8, 16]


@pytest.mark.parametrize("cut", [3, 8, 11, 16])
def test_in_any_epoch(ensemble, cut):
    whole = fitted(ensemble, Loader(), epochs=3)
    first = fitted(ensemble, Loader(), steps=cut)
    assert first.train_state.step == cut
    second = fitted(first, Loader(), steps=24 - cut)
    assert_same(second.ensemble.stacked, whole.train_state.ensemble.stacked)


def test_batches_that_cannot_be_set(ensemble):
    first = fitted(ensemble, Loader(), steps=3)
    with pytest.raises(TypeError, match="set_state"):
        fitted(first, Batches(), steps=3)
    assert fitted(first.train_state, Batches(), steps=3).train_state.step == 6


def test_arrays_have_no_place(ensemble):
    assert fitted(ensemble, (X, Y), steps=3).data_state is None
    assert fitted(ensemble, Batches(), steps=3).data_state is None


def test_a_torch_loader(ensemble):
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    run = fitted(ensemble, torch.utils.data.DataLoader(rows, batch_size=5), epochs=2)
    assert_same(run.ensemble, fitted(ensemble, Batches(), epochs=2).ensemble)


def test_memory_stays_flat(ensemble):
    """Batches of 8 MiB, of which a few are there at a time; all of them would take 480 MiB."""
    pages = pathlib.Path("/proc/self/statm")
    if not pages.exists():
        pytest.skip("only Linux reports the memory of a process")
    resident, size = [], 2**20 * 8 // 12

    def batches():
        generator = np.random.default_rng(0)
        for _ in range(60):
            resident.append(int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            x = generator.standard_normal((size, 3), np.float32)
            yield x, np.ones((size, 1), np.float32)

    fitted(ensemble, batches(), epochs=1)
    assert max(resident[20:]) - resident[10] < 150 * 2**20


def test_the_last_epoch_counts_for_patience():
    """As with arrays, if `steps` end where an epoch ends."""
    x, y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)
    loss = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=jax.random.key(0))
    options = {
        "validation": ee.train.Validation((x, y + 1), score=lambda *_: jnp.float32(1), mode="min"),
        "patience": 2,
        "steps": 6,
    }
    call = lambda data, **others: ee.fit(
        ensemble, loss, optax.sgd(0.1), data, key=jax.random.key(0), **options, **others
    )
    expected = call((x, y), batch_size=4, shuffle=False)
    run = call([(x[:4], y[:4]), (x[4:], y[4:])])
    assert run.status.tolist() == expected.status.tolist() == [ee.train.Status.STOPPED] * 2
    np.testing.assert_array_equal(run.stopped_at, expected.stopped_at)
