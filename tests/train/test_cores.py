"""Blocks of members on several cores train as in one call, whatever happens in one of them."""

import os
import signal
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import _cores
from eqx_ensemble.plan import Cores, Sequential, Vmap
from eqx_ensemble.plan import _cores as _plan
from eqx_ensemble.plan._memory import Cost
from eqx_ensemble.plan._plans import Work
from eqx_ensemble.train.compiled import _stepwise

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (22, 3))
Y = jnp.sin(X[:, 0])
HELD_OUT = (X[:8], Y[:8] + 0.1)
ADAM = optax.adam(0.03)
TWO = Cores(Vmap(), block=4, count=2)
PLANS = {"one core": Cores(Vmap(), block=4, count=1), "two": TWO, "three": Cores(Vmap(), block=4, count=3)}


def loss(model, batch, key, hyper):
    x, y = batch
    error = jnp.mean((jax.vmap(model)(x) - y) ** 2)
    return error * jnp.where(error < hyper["fails_below"], jnp.nan, 1.0)


ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, "scalar", 4, 1, key=key), 10, key=KEY)
AT_ONCE, SOON, LATER, NEVER = 99.0, 0.06, 0.02, 0.0


def fails_below(*values):
    return {"fails_below": jnp.array([*values, *[NEVER] * (10 - len(values))])}


def assert_no_threads():
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("eqx_ensemble-core")]


def fitted(plan, *, begun=ENSEMBLE, epochs=12, fails=(), **more):
    options = {"batch_size": 4, "validation": HELD_OUT, "progress": False, "key": KEY}
    hyper = {} if isinstance(begun, ee.Run) else {"hyper": fails_below(*fails)}
    return ee.fit(begun, loss, ADAM, (X, Y), epochs=epochs, plan=plan, **options | hyper | more)


def assert_same(run, other):
    names = "ensemble history train_state status best_step best_score stopped_at".split()
    parts = lambda run: eqx.filter([getattr(run, name) for name in names], eqx.is_array)
    for one, two in zip(jax.tree.leaves(parts(run)), jax.tree.leaves(parts(other)), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        np.testing.assert_array_equal(one, two)


OPTIONS = {
    "plain": {},
    "shared": {"shuffle": "shared", "history": 3},
    "own rows": {"rows": ee.resample.bootstrap(22, 10, key=KEY)},
    "patience": {"patience": 2},
    "limits": {"stop": ee.train.Stopping(steps=np.arange(3, 43, 4))},
    "faults": {"fails": (NEVER, SOON, NEVER, NEVER, NEVER, LATER, NEVER, AT_ONCE, NEVER, LATER)},
    "revival": {"fails": (NEVER, NEVER, NEVER, NEVER, NEVER, SOON), "on_diverge": "revive"},
}


@pytest.mark.filterwarnings("ignore:.*diverged", "ignore:.*revived")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_blocks_train_as_one_call_bit_for_bit(options):
    whole = fitted(Vmap(), **options)
    for plan in PLANS.values():
        assert_same(fitted(plan, **options), whole)


def test_a_run_goes_on_with_another_number_of_cores(tmp_path):
    whole = fitted(Vmap(), epochs=12)
    folder = {"checkpoint": tmp_path / "run"}
    fitted(PLANS["two"], epochs=5, **folder)
    assert_same(fitted(PLANS["three"], epochs=12, **folder), whole)


def test_members_that_take_turns_are_divided_too():
    assert_same(fitted(Cores(Sequential(), block=3, count=2)), fitted(Sequential()))


def test_one_block_of_members_that_take_turns_is_a_call_for_each(monkeypatch):
    calls, of_one = [], _stepwise._compiled_part
    monkeypatch.setattr(_stepwise, "_compiled_part", lambda *args: calls.append(1) or of_one(*args))
    fitted(Cores(Sequential(scan=False), block=10), steps=2, epochs=None, validation=None)
    assert len(calls) == 20


def test_the_inner_plan_tells_whether_steps_are_a_loop():
    plan = Cores(Vmap(scan=False), block=4)
    assert plan.scan is False
    assert eval(repr(plan), {"Cores": Cores, "Vmap": Vmap}) == plan
    assert Cores(Vmap(scan=False), scan=True).scan is True


def test_one_program_divides_the_inputs_of_all_blocks(compiled):
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, "scalar", 4, 1, key=key), 13, key=KEY)
    with compiled() as names:
        fitted(TWO, begun=ensemble, epochs=1, hyper={"fails_below": jnp.full(13, NEVER)})
    assert sum("_take_inputs" in name for name in names) == 1


def test_threads_end_with_the_call():
    fitted(TWO, epochs=1)
    assert_no_threads()


def test_an_interrupted_run_keeps_all_blocks_at_one_step(interruptible):
    def interrupt(progress):
        if progress.step >= 12:
            os.kill(os.getpid(), signal.SIGINT)

    run = fitted(TWO, callbacks=ee.train.every(6, interrupt))
    assert run.interrupted
    np.testing.assert_array_equal(run.history.loss, fitted(Vmap()).history.loss[:, : run.history.loss.shape[1]])


@pytest.fixture
def chosen(monkeypatch):
    """The plans that `Cores` has chosen."""
    plans, begin = [], Cores.begin
    monkeypatch.setattr(Cores, "begin", lambda self, work: plans.append(begin(self, work)) or plans[-1])
    return plans


def test_the_default_divides_long_runs_of_many_members(chosen):
    plan = Cores(count=2)
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, "scalar", 4, 1, key=key), 512, key=KEY)
    run = ee.fit(ensemble, lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2), ADAM,
                 (X, Y), steps=400, batch_size=4, plan=plan, progress=False, key=KEY)  # fmt: skip
    assert run.plan == plan
    assert len(chosen[-1].blocks(512).members) > 1
    assert chosen[-1].blocks(512).cores == 2


def test_members_are_one_call_if_copies_of_their_data_would_not_fit(monkeypatch):
    monkeypatch.setattr(_plan, "free_bytes", lambda: 2**22)
    cost = Cost(flops=10**6, bytes=4, convolutions=0, batched_products=0, loops=0, callbacks=0)
    for data, divides in ((jnp.zeros((512, 2**10)), True), (ee.Each(jnp.zeros((512, 2**10))), False)):
        work = Work(print, (data,), 512, steps=400)
        assert _plan._is_worth_dividing(cost, work) is divides


def test_members_under_a_mesh_of_the_caller_are_one_call():
    with jax.set_mesh(jax.make_mesh((1,), ("rows",), devices=jax.devices()[:1])):
        run = fitted(TWO, epochs=2, validation=None)
    assert_same(run, fitted(Vmap(), epochs=2, validation=None))


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch, key: eqx.error_if(jnp.mean(jax.vmap(model)(batch[0])), jnp.array(False), "no"),
        lambda model, batch, key: jnp.linalg.norm(jnp.eye(2) + jnp.mean(jax.vmap(model)(batch[0])), 2),
    ],
)
def test_programs_that_must_run_alone_stay_in_one_call(loss, chosen):
    """Those that call Python, and those of singular values, which would wait for each other's threads."""
    plan = Cores(Vmap(), block=4, count=2)
    ee.fit(ENSEMBLE, loss, ADAM, (X, Y), steps=2, plan=plan, progress=False, key=KEY)
    assert len(chosen[-1].blocks(ENSEMBLE.num_members).members) == 1


def test_linear_algebra_is_divided(chosen):
    solving = lambda model, batch, key: jnp.sum(jnp.linalg.solve(jnp.eye(2) + jax.vmap(model)(batch[0])[0] ** 2, Y[:2]))
    plan = Cores(Vmap(), block=4, count=2)
    ee.fit(ENSEMBLE, solving, ADAM, (X, Y), steps=2, plan=plan, progress=False, key=KEY)
    assert chosen[-1] == plan


# The cores themselves


def test_work_is_done_on_at_most_the_cores_of_the_process():
    running, most, lock = 0, 0, threading.Lock()

    def work(item):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        nested = _cores.on_cores(lambda i: (item, i), range(3), cores=2)
        with lock:
            running -= 1
        return nested

    found = _cores.on_cores(work, range(8), cores=2)
    assert found == [[(item, i) for i in range(3)] for item in range(8)]
    assert most <= 2


def test_the_first_error_is_raised_when_all_that_runs_has_ended():
    ended = []

    def work(item):
        try:
            if item in (1, 2):
                raise ValueError(item)
        finally:
            ended.append(item)

    with pytest.raises(ValueError, match="1"):
        _cores.on_cores(work, range(50), cores=3)
    assert len(ended) < 50
    assert_no_threads()


def test_the_calling_thread_works_alone_if_no_other_can_start(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert _cores.on_cores(str, range(3), cores=2) == ["0", "1", "2"]


def test_threads_compute_as_the_calling_thread_does():
    both = threading.Barrier(2, timeout=60)

    def work(size):
        both.wait()  # passed only by two threads
        return str(jnp.ones(size).dtype)

    with jax.enable_x64(True), jax.transfer_guard("disallow"), jax.transfer_guard_host_to_device("allow"):
        assert _cores.on_cores(work, range(1, 5), cores=2) == ["float64"] * 4


LIMITS = [("OMP_NUM_THREADS", "1", 1), ("OMP_NUM_THREADS", "3,2", 3), ("OMP_NUM_THREADS", "no", 4)]
LIMITS += [("PYTEST_XDIST_WORKER_COUNT", "2", 2)]


@pytest.mark.parametrize(("variable", "value", "cores"), LIMITS)
def test_the_number_of_cores_follows_the_environment(monkeypatch, variable, value, cores):
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(_cores, "_quota", lambda: [])
    assert _cores.num_cores() == 4
    monkeypatch.setenv(variable, value)
    assert _cores.num_cores() == cores


OLD = {"own": "5:cpu,cpuacct:/c\n1:memory:/c", "cpu/c/cpu.cfs_period_us": "100000"}
QUOTAS = [
    ({"own": "0::/a/b", "a/cpu.max": "250000 100000", "a/b/cpu.max": "max 100000"}, [2]),
    ({"own": "0::/", "cpu.max": "50000 100000"}, [1]),
    (OLD | {"cpu/c/cpu.cfs_quota_us": "300000"}, [3]),
    (OLD | {"cpu/c/cpu.cfs_quota_us": "-1"}, []),
    ({}, []),
]


@pytest.mark.parametrize(("files", "cores"), QUOTAS)
def test_quotas_of_containers_are_limits(monkeypatch, tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(_cores, "_GROUPS", tmp_path)
    monkeypatch.setattr(_cores, "_OWN_GROUP", tmp_path / "own")
    assert _cores._quota.__wrapped__() == cores
