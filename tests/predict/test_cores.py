"""Batches of rows on several cores: the same bits, in the same order, and no thread is left."""

import functools
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble._predict import _run_work as room
from eqx_ensemble.plan import _plans

KEY, MEMBERS, ROWS = jax.random.key(0), 3, 43
OPTIONS = {"batch_size": 4, "progress": False}  # the last batch has three rows of its own
WEIGHTS = np.array([0.5, 2.0, 1.0])


class Noisy(eqx.Module):
    """A stateful member that draws random numbers."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")

    def __call__(self, x, state, *, key):
        out, state = self.norm(self.linear(x) + jax.random.normal(key, (4,)), state)
        return out, state


def mlp(key, width=8):
    return eqx.nn.MLP(3, 4, width, 1, key=key)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(mlp, MEMBERS, key=KEY)


@pytest.fixture
def on(monkeypatch):
    """Calls a function with so many cores, whatever a batch costs. Returns what it returned, and the threads seen."""

    def call(cores, fn):
        used, predict = set(), room._predict_batch

        def noted(*args, **options):
            used.add(threading.get_ident())
            time.sleep(1e-3)  # in which another thread takes the next batch
            return predict(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(room, "_WORTH_THREADS", 0)
            patched.setattr(_plans, "num_cores", lambda: cores)
            patched.setattr(room, "_predict_batch", noted)
            out = fn()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("eqx_ensemble")]
        return out, used

    return call


def rows(count=ROWS):
    return np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)


def assert_equal(found, want):
    assert jax.tree.structure(found) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, found, want)


CASES = {
    "members": {},
    "array of JAX": {"x": jnp.asarray(rows())},
    "function": {"combine": ee.combine.mixture},
    "weights": {"combine": ee.combine.mean, "weights": WEIGHTS},
    "weights of rows": {"combine": ee.combine.mean, "weights": np.arange(1.0, 1 + MEMBERS * ROWS).reshape(MEMBERS, -1)},
    "streaming": {"combine": ee.combine.streaming(ee.uncertainty.decompose_entropy)},
    "each": {"x": ee.Each(np.stack([rows() + i for i in range(MEMBERS)]))},
}


@pytest.mark.parametrize("case", CASES)
def test_same_bits(ensemble, on, case):
    options = {"x": rows(), **OPTIONS, **CASES[case]}
    predict = functools.partial(ee.predict, ensemble, **options)
    want, used = on(1, predict)
    assert used == {threading.get_ident()}
    for cores in (2, 3):
        found, used = on(cores, predict)
        assert_equal(found, want)
        assert 1 < len(used) <= cores


def test_states_and_keys(on):
    ensemble, state = ee.build(eqx.nn.make_with_state(Noisy), MEMBERS, key=KEY)
    predict = lambda: ee.predict(ensemble, rows(), state=state, key=KEY, inference=True, **OPTIONS)
    assert_equal(on(3, predict)[0], on(1, predict)[0])


def test_combined_in_the_order_of_rows(ensemble, on):
    x = np.arange(ROWS, dtype=np.float32)[:, None]
    seen, running = [], threading.Lock()

    def combine(predictions):
        assert running.acquire(blocking=False)
        seen.append(int(predictions[0, -1, 0]))
        time.sleep(1e-3)
        running.release()
        return predictions[0]

    found, _ = on(3, lambda: ee.predict(ensemble, x, fn=lambda model, x: x, combine=combine, **OPTIONS))
    np.testing.assert_array_equal(found, x)
    assert seen == [*range(3, ROWS - 1, 4), ROWS - 1]


def test_unfinished_batches_are_at_most_two_a_core(ensemble, on):
    started, most = [], []

    def combine(predictions):
        most.append(len(started) - len(most))
        return predictions[0]

    def work():
        predict = room._predict_batch
        room._predict_batch = lambda *args, **options: (started.append(0), predict(*args, **options))[1]
        return ee.predict(ensemble, rows(), combine=combine, **OPTIONS)

    on(3, work)
    assert 1 < max(most) <= 6


@pytest.mark.parametrize("cores", [1, 3])
def test_error_of_one_batch(ensemble, on, cores):
    def combine(predictions):
        if len(seen := [*calls, 0]) > 5:
            raise ValueError(f"batch {len(seen)}")
        calls.append(0)
        return predictions[0]

    calls = []
    with pytest.raises(ValueError, match="batch 6") as caught:
        on(cores, lambda: ee.predict(ensemble, rows(), combine=combine, **OPTIONS))
    assert caught.value.__cause__ is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("eqx_ensemble")]


def test_the_first_of_several_errors(ensemble, on, monkeypatch):
    def failing(work, rows, **options):
        if rows[0] >= 16:
            time.sleep(2e-3 if rows[0] == 16 else 0)  # the first one comes last
            raise ValueError(f"row {rows[0]}")
        return predict(work, rows, **options)

    predict = room._predict_batch
    monkeypatch.setattr(room, "_predict_batch", failing)
    with pytest.raises(ValueError, match="row 16"):
        on(3, lambda: ee.predict(ensemble, rows(), **OPTIONS))


@pytest.mark.parametrize("cores", [1, 2])
def test_messages_name_the_function(ensemble, on, cores):
    shapes = iter(range(100))
    combine = lambda predictions: predictions[0] if next(shapes) < 4 else jnp.zeros(7)
    with pytest.raises(ValueError, match="`predict` needs a `combine`"):
        on(cores, lambda: ee.predict(ensemble, rows(), combine=combine, **OPTIONS))


def test_interrupt(ensemble, on):
    calls = []

    def combine(predictions):
        calls.append(0)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return predictions[0]

    with pytest.raises(KeyboardInterrupt):
        on(2, lambda: ee.predict(ensemble, rows(), combine=combine, **OPTIONS))
    assert len(calls) == 4


def test_programs_that_call_python_run_one_at_a_time(ensemble, on):
    def checked(model, x):
        return eqx.error_if(model(x), jnp.any(x > 1e3), "too large")

    want, _ = on(1, lambda: ee.predict(ensemble, rows(), **OPTIONS))
    found, used = on(3, lambda: ee.predict(ensemble, rows(), fn=checked, **OPTIONS))
    assert_equal(found, want)
    assert used == {threading.get_ident()}
    with pytest.raises(Exception, match="too large"):
        on(3, lambda: ee.predict(ensemble, 1e6 * rows(), fn=checked, **OPTIONS))


def matrix(x):
    return jnp.eye(4) + jnp.sum(x) ** 2


@pytest.mark.parametrize(
    ("fn", "at_once"),
    [
        (lambda model, x: model(x) + jnp.linalg.solve(matrix(x), jnp.ones((4, 1)))[:, 0], True),
        (lambda model, x: model(x) + jnp.abs(jnp.fft.fft2(matrix(x)))[0], True),
        (lambda model, x: model(x) + jnp.linalg.svd(matrix(x), compute_uv=False), False),
    ],
    ids=["solve", "fft2", "svd"],
)
def test_linear_algebra(ensemble, on, fn, at_once):
    """Kernels of singular values would wait for each other's threads in JAX 0.9; all others share them."""
    predict = lambda: ee.predict(ensemble, rows(), fn=fn, **OPTIONS)
    (want, _), (found, used) = on(1, predict), on(3, predict)
    assert_equal(found, want)
    assert (len(used) > 1) is at_once


def test_one_at_a_time_where_memory_is_short(ensemble, on, monkeypatch):
    monkeypatch.setattr(room, "free_bytes", lambda: 100)
    assert on(3, lambda: ee.predict(ensemble, rows(), **OPTIONS))[1] == {threading.get_ident()}


def test_small_batches_start_no_thread(ensemble, monkeypatch):
    monkeypatch.setattr(_plans, "num_cores", lambda: 2)
    monkeypatch.setattr(room, "on_cores", lambda *_, **__: pytest.fail("a thread was started"))
    for _ in range(2):
        ee.predict(ensemble, rows(), **OPTIONS)


def test_several_calling_threads_share_the_cores(ensemble, on):
    running, most, lock = [0], [], threading.Lock()

    def work():
        predict = room._predict_batch

        def counted(*args, **options):
            with lock:
                running[0] += 1
                most.append(running[0])
            try:
                return predict(*args, **options)
            finally:
                with lock:
                    running[0] -= 1

        room._predict_batch = counted
        outs = [None, None]

        def one(i):
            outs[i] = ee.predict(ensemble, rows(), **OPTIONS)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outs

    outs, _ = on(3, work)
    assert_equal(outs[0], outs[1])
    assert 1 < max(most) <= 4  # a helper leaves only after the batch that it began
