"""`plan="auto"`: what it analyses, what it tries, and that it changes only time and memory."""

import subprocess
import sys
import textwrap
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.plan import Auto, Chunked, Sequential, Unrolled, Vmap
from eqx_ensemble.plan import _auto as pilot_module
from eqx_ensemble.plan._auto import reason
from eqx_ensemble.plan._memory import Cost, Peak, cost_of
from eqx_ensemble.plan._search import Search, SearchCache, Trial, candidates

from ..factories import assert_close, assert_same, grouped

KEY = jax.random.key(0)
MEMBERS = 5
ADAM = optax.adam(1e-2)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), MEMBERS, key=KEY)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def data(rows=64):
    kx, ky = jax.random.split(KEY)
    return jax.random.normal(kx, (rows, 3)), jax.random.normal(ky, (rows, 1))


def fitted(ensemble, plan, loss=loss, **options):
    options = {"epochs": 3, "batch_size": 8} | options
    return ee.fit(ensemble, loss, ADAM, data(), progress=False, key=KEY, **grouped(options | {"plan": plan}))


class TestLook:
    def test_operations_of_a_dense_model_by_hand(self):
        ensemble = ee.build(lambda key: eqx.nn.MLP(7, 2, 16, 1, key=key), 3, key=KEY)
        forward = lambda plan, ensemble, x: ee.map_members(lambda m, x: jax.vmap(m)(x), plan=plan)(ensemble, x)
        cost = cost_of(forward, ensemble, jnp.ones((10, 7)))
        assert cost.flops == 2 * 10 * (7 * 16 + 16 * 2)
        assert (cost.convolutions, cost.batched_products, cost.loops) == (0, 0, 0)
        assert cost.bytes >= 4 * 10 * (16 + 2)

    def test_convolutions_attention_and_loops_are_seen(self):
        call = lambda model, x: ee.map_members(lambda m, x: jax.vmap(m)(x), plan=model[0])(model[1], x)
        look = lambda make, x: cost_of(lambda plan, e, x: call((plan, e), x), ee.build(make, 2, key=KEY), x)
        conv = look(lambda key: eqx.nn.Conv2d(1, 4, 3, key=key), jnp.ones((5, 1, 8, 8)))
        assert conv.convolutions == 1
        assert conv.flops == 2 * 5 * 4 * 6 * 6 * 9

        class Block(eqx.Module):
            attention: eqx.nn.MultiheadAttention

            def __init__(self, key):
                self.attention = eqx.nn.MultiheadAttention(2, 8, key=key)

            def __call__(self, x):
                return self.attention(x, x, x)

        assert look(Block, jnp.ones((5, 6, 8))).batched_products == 2

        class Recurrent(eqx.Module):
            cell: eqx.nn.GRUCell

            def __init__(self, key):
                self.cell = eqx.nn.GRUCell(4, 8, key=key)

            def __call__(self, x):
                return jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(8), x)[0]

        recurrent = look(Recurrent, jnp.ones((5, 6, 4)))
        assert recurrent.loops == 1
        assert recurrent.flops == 6 * 2 * 5 * (24 * 4 + 24 * 8)  # the loop's body six times

    def test_what_is_worth_trying(self):
        tiny, busy = Cost(10**5, 0, 0, 0, 0, 0), Cost(10**8, 0, 0, 0, 0, 0)
        assert candidates(tiny, 64, steps_inside=True) == [Vmap(), Sequential(), Chunked(8)]
        assert candidates(busy, 64, steps_inside=True) == [Sequential(), Vmap(), Chunked(8)]
        assert candidates(busy, 64, steps_inside=False) == [Vmap(), Sequential(), Chunked(8)]
        convolutions = Cost(10**5, 0, 2, 0, 0, 0)
        assert candidates(convolutions, 16, steps_inside=True) == [Sequential(), Vmap(), Unrolled()]
        assert candidates(convolutions, 16, steps_inside=False) == [Vmap(), Unrolled()]
        assert candidates(tiny, 1, steps_inside=True, scan=False) == [Vmap()]
        assert candidates(convolutions, 16, steps_inside=True, scan=True) == [Vmap(), Unrolled()]

    def test_what_needs_less_memory(self):
        assert [plan.smaller(9) for plan in (Vmap(), Unrolled(), Chunked(4), Chunked(100))] == [
            Chunked(4), Chunked(4), Chunked(2), Chunked(4),
        ]  # fmt: skip
        assert Chunked(2).smaller(9) == Sequential()
        assert Sequential().smaller(9) is None


class World:
    """A machine on which a step under each plan takes a given time and memory, and compiling a second."""

    def __init__(self, seconds, peaks=None, *, max_overhead=0.05, memory=None, width=1, compiling=1.0):
        self.seconds, self.peaks, self.compiling = seconds, peaks or {}, compiling
        cache = SearchCache(Cost(0, width, 0, 0, 0, 0), 8, [Trial(plan) for plan in seconds], "step")
        self.search = Search(cache, max_overhead=max_overhead, memory=memory)
        self.used = []

    def run(self, stretches, *, seconds_left, slow=lambda i: 1.0):
        for i in range(stretches):
            plan = self.search.plan
            took = 0.1 * slow(i) + self.compiling * (plan not in self.used)
            self.used.append(plan)
            peak = Peak()
            peak.bytes = self.peaks.get(plan)
            units = max(1, round(0.1 / self.seconds.get(plan, 1e-3)))
            self.search.note(units, took, peak, seconds_left=seconds_left)
        return self.search.plan


class TestSearch:
    def test_the_fastest_is_found_and_kept(self):
        world = World({Vmap(): 2e-3, Sequential(): 1e-3, Chunked(4): 3e-3})
        assert world.run(30, seconds_left=1e3) == Sequential()
        assert set(world.used[-5:]) == {Sequential()}
        assert not world.search.watching

    def test_a_short_run_tries_nothing(self):
        world = World({Vmap(): 2e-3, Sequential(): 1e-3})
        assert world.run(20, seconds_left=10.0) == Vmap()
        assert set(world.used) == {Vmap()}
        assert "compiling it was expected to take" in reason(world.search, world.search.cache.trials[1])

    @pytest.mark.parametrize("steps", [8, 16, 64, 256, 1024])
    @pytest.mark.parametrize("step", [2e-3, 0.02, 0.1])
    @pytest.mark.parametrize("slower", [1.2, 2.0])
    def test_a_run_of_any_length_takes_little_longer_than_under_the_best_plan(self, steps, step, slower, monkeypatch):
        """All plans have been compiled before, so that trials seem to cost nothing; each costs its slower steps."""
        now = [0.0]
        monkeypatch.setattr("eqx_ensemble.plan._search.time.perf_counter", lambda: now[0])
        seconds = {Sequential(): step, Vmap(): slower * step, Unrolled(): slower * step}
        search = World(seconds).search
        left = steps
        while left:
            units = min(left, max(1, round(0.1 / seconds[search.plan])))
            took = units * seconds[search.plan]
            now[0], left = now[0] + took, left - units
            search.note(units, took, None, seconds_left=left * seconds[search.plan])
        assert now[0] <= 1.05 * steps * step
        assert steps * step < 20 or len(search._compiled_here) == 3

    def test_a_run_of_unknown_length_waits_until_a_trial_is_worth_it(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr("eqx_ensemble.plan._search.time.perf_counter", lambda: now[0])
        world = World({Vmap(): 2e-3, Sequential(): 1e-3})
        world.run(10, seconds_left=None)
        assert set(world.used) == {Vmap()}
        now[0] = 30.0
        assert world.run(20, seconds_left=None) == Sequential()

    def test_what_was_spent_is_what_others_took_longer(self):
        world = World({Vmap(): 1e-3, Sequential(): 2e-3})
        world.run(30, seconds_left=1e3)
        assert world.search.plan == Vmap()
        first, others = 1.0 + 0.05, 0.05 * 6  # a compilation, and six stretches at half the speed in two rounds
        np.testing.assert_allclose(world.search.spent, first + others, rtol=0.01)

    def test_a_slow_moment_is_looked_at_again(self):
        """The best plan is tried while something else is running; the second round puts it right."""
        world = World({Vmap(): 1.5e-3, Sequential(): 1e-3})
        assert world.run(30, seconds_left=1e3, slow=lambda i: 3.0 if 4 <= i < 8 else 1.0) == Sequential()

    def test_the_second_round_is_what_puts_it_right(self, monkeypatch):
        monkeypatch.setattr("eqx_ensemble.plan._search._ROUNDS", 1)
        world = World({Vmap(): 1.5e-3, Sequential(): 1e-3})
        assert world.run(30, seconds_left=1e3, slow=lambda i: 3.0 if 4 <= i < 8 else 1.0) == Vmap()

    def test_memory_is_foretold_from_fewer_members(self):
        seconds = {Vmap(): 1e-3, Sequential(): 4e-3, Chunked(4): 2e-3}
        peaks = {Sequential(): 100, Chunked(4): 400, Vmap(): 800}
        world = World(seconds, peaks, memory=500, width=1000)
        assert world.run(40, seconds_left=1e3) == Chunked(4)
        assert Vmap() not in world.used
        assert world.used[0] == Sequential()  # the smallest first, because memory was unknown
        assert World(seconds, peaks, memory=900, width=1000).run(40, seconds_left=1e3) == Vmap()

    def test_a_plan_that_turns_out_too_big_is_left(self):
        world = World({Vmap(): 1e-3, Sequential(): 2e-3}, {Vmap(): 800, Sequential(): 10}, memory=500)
        assert world.run(20, seconds_left=1e3) == Sequential()

    def test_out_of_memory_goes_down_to_one_member(self):
        world = World({Vmap(): 1e-3, Sequential(): 2e-3})
        downs = [world.search.out_of_memory() for _ in range(4)]
        assert downs == [Chunked(4), Chunked(2), Sequential(), None]


@pytest.fixture
def eager(monkeypatch):
    """Trials as if compiling took no time, and short ones: how many are made does not depend on the machine."""
    monkeypatch.setattr("eqx_ensemble.plan._search._ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr("eqx_ensemble.plan._search._SECONDS_PER_CALL", 0.0)
    monkeypatch.setattr("eqx_ensemble.train.host._loop._SECONDS_PER_TRIAL", 1e-3)
    monkeypatch.setattr(SearchCache, "seconds_to_compile", lambda self, trial: 0.0)


class TestUse:
    def test_results_are_those_of_any_plan(self, ensemble):
        reference = fitted(ensemble, Vmap())
        run = fitted(ensemble, "auto")
        assert_close(run.ensemble, reference.ensemble, 1e-5)
        assert run.history.loss.shape == reference.history.loss.shape

    @pytest.mark.usefixtures("eager")
    def test_trials_are_part_of_the_work(self, ensemble):
        """Nothing is lost or done twice when the plan changes on the way, with and without validation."""
        own = lambda model, batch, key: loss(model, batch, key)
        plan = Auto(max_overhead=1.0)
        options = {"epochs": 100, "validation": data(16), "loss": own}
        run, reference = fitted(ensemble, plan, **options), fitted(ensemble, Vmap(), **options)
        assert len(plan.notes.found["fit"]._compiled_here) == 3
        assert_close(run.history.loss, reference.history.loss, 1e-3)  # 800 Adam steps of rounding
        assert run.history.validation.shape == reference.history.validation.shape == (MEMBERS, 100)

    @pytest.mark.usefixtures("eager")
    def test_the_next_run_starts_with_what_was_found(self, ensemble):
        own = lambda model, batch, key: loss(model, batch, key)
        first = Auto(max_overhead=1.0)
        fitted(ensemble, first, loss=own, epochs=100)
        known = first.notes.found["fit"].cache
        second = Auto()
        run = fitted(ensemble, second, loss=own, epochs=2)
        assert run.plan is second
        assert second.notes.found["fit"].cache is known
        assert second.notes.found["fit"].cache.best(None).plan == second.choice

    @pytest.mark.usefixtures("eager")
    def test_own_loop(self, ensemble):
        state = ee.train.init(ensemble, ADAM, key=KEY)
        plain = state
        step, reference = ee.train.make_step(loss, ADAM, plan=Auto(max_overhead=1.0)), ee.train.make_step(loss, ADAM)
        for _ in range(60):
            state, metrics = step(state, data(8))
            plain, _ = reference(plain, data(8))
        assert_close(state.ensemble, plain.ensemble, 1e-4)
        assert metrics.status.tolist() == [0] * MEMBERS
        assert "train.make_step" in step.plan.explain()
        assert len(step.plan.notes.found["train.make_step"]._compiled_here) == 3

    def test_batches(self, ensemble):
        batches = [data(8)] * 4
        run = ee.fit(ensemble, loss, ADAM, batches, epochs=3, plan="auto", progress=False, key=KEY)
        reference = ee.fit(ensemble, loss, ADAM, batches, epochs=3, progress=False, key=KEY)
        assert_close(run.ensemble, reference.ensemble, 1e-5)

    @pytest.mark.usefixtures("eager")
    def test_prediction(self, ensemble):
        x, _ = data(100)
        plan = Auto(max_overhead=1.0)
        out = ee.predict(ensemble, x, batch_size=7, plan=plan)
        np.testing.assert_allclose(out, ee.predict(ensemble, x), rtol=1e-5, atol=1e-6)
        assert "`predict` runs 5 members" in plan.explain()
        fitted(ensemble, plan)
        ee.predict(ensemble, x, batch_size=7, plan=plan)
        assert list(plan.notes.found) == ["fit", "predict"]  # `choice` is that of the latest

    def test_a_function_of_a_member(self, ensemble):
        x, y = data(8)
        mse = lambda model, x, y: loss(model, (x, y), None)
        out = ee.map_members(mse, plan="auto")(ensemble, x, y)
        np.testing.assert_allclose(out, ee.map_members(mse)(ensemble, x, y), rtol=1e-6)
        np.testing.assert_allclose(
            jax.jit(lambda x: ee.map_members(mse, plan="auto")(ensemble, x, y))(x), out, rtol=1e-6
        )

    def test_scanned_or_called_step_by_step_is_the_same(self, ensemble):
        for plan in (Vmap, Sequential):
            runs = [fitted(ensemble, plan(), scan=scan) for scan in (True, False)]
            assert_close(runs[0].ensemble, runs[1].ensemble, 1e-6)

    def test_explained_in_words_and_numbers(self, ensemble):
        plan = Auto()
        assert plan.explain() == "No search has been run with this plan yet."
        assert plan.choice is None
        fitted(ensemble, plan)
        words = plan.explain()
        assert words.startswith("`fit` runs 5 members on cpu under Vmap().\nOne member's step: 0.00")
        assert "no convolutions, no batched products as in attention, no loops" in words
        assert "<- in use" in words
        assert "Sequential()" in words

    @pytest.mark.parametrize("wrong", [{"memory": 0}, {"memory": 1.5}, {"max_overhead": 2.0}, {"max_overhead": "5 %"}])
    def test_wrong_options(self, wrong):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            Auto(**wrong)


class TestOutOfMemory:
    def test_auto_continues_under_a_smaller_plan(self, ensemble, monkeypatch):
        """The first call under `Vmap` fails as XLA fails, after it has taken the donated state with it."""
        own = lambda model, batch, key: loss(model, batch, key)
        waiting = pilot_module.jax.block_until_ready
        failed = []

        def block_until_ready(x):
            if not failed:
                failed.append(True)
                for leaf in jax.tree.leaves(eqx.filter(x, eqx.is_array)):
                    leaf.delete()
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")
            return waiting(x)

        monkeypatch.setattr(pilot_module.jax, "block_until_ready", block_until_ready)
        plan = Auto()
        with pytest.warns(UserWarning, match=r"ran out of memory under `Vmap\(\)` and continues under `Chunked\(2\)`"):
            run = fitted(ensemble, plan, loss=own)
        assert_close(run.ensemble, fitted(ensemble, Vmap(), loss=own).ensemble, 1e-5)
        assert plan.choice == Chunked(2)
        assert "ran out of memory" in plan.explain()

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space as Linux does")
    def test_a_real_one_suggests_a_plan(self):
        program = textwrap.dedent("""
            import re, resource
            import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
            import eqx_ensemble as ee

            ensemble = ee.build(lambda key: eqx.nn.MLP(64, 1, 64, 2, key=key), 32, key=jax.random.key(0))
            x = np.ones((16384, 64), np.float32)
            loss = lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2)
            options = dict(steps=2, batch_size=16384, progress=False, key=jax.random.key(0))
            optimiser = optax.sgd(1e-2)
            ee.fit(ensemble, loss, optimiser, x, plan=ee.plan.Sequential(), **options)
            used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
            resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, -1))
            try:
                ee.fit(ensemble, loss, optimiser, x, plan=ee.plan.Vmap(), **options)
            except MemoryError as error:
                print(error)
        """)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        assert "`fit` ran out of memory with 32 members under `Vmap()`: RESOURCE_EXHAUSTED" in done.stdout, done.stderr
        assert 'Try `plan=Chunked(16)`, or `plan="auto"`' in done.stdout

    def test_other_errors_pass(self, ensemble):
        def broken(model, batch, key):
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            fitted(ensemble, "auto", loss=broken)


def test_one_after_another_in_stretches_is_alone_bit_for_bit(ensemble):
    """Members outside and steps inside: what the others do between a member's stretches cannot be seen."""
    run = fitted(ensemble, Sequential())
    for i in range(MEMBERS):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            alone = fitted(ensemble[[i]], Sequential())
        assert_same(run.ensemble[[i]], alone.ensemble)
