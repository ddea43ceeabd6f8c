"""Callbacks of `fit`: what they see, what they can stop, and that looking changes nothing."""

import os
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status
from eqx_ensemble.train.data._read_ahead import PieceQueue
from eqx_ensemble.train.host import _callbacks
from eqx_ensemble.train.host._record import Columns

from ..factories import assert_same, grouped

KEY = jax.random.key(0)
MEMBERS = 5
ADAM = optax.adam(0.02)
X = np.asarray(jax.random.normal(KEY, (38, 3)))
Y = np.sin(X[:, :1]).astype(np.float32)
VALID = (X[:11] + np.float32(0.1), Y[:11])
PER_EPOCH = 5  # steps: four batches of eight rows, and one of six


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def loss_with_aux(model, batch, key):
    value = loss(model, batch, key)
    return value, {"twice": 2 * value}


def explosive(model, batch, key, hyper):
    """Diverges for members with a large `hyper`, when their loss has become small."""
    value = loss(model, batch, key)
    return jnp.where((hyper > 0.5) & (value < 0.6), jnp.nan, value)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), MEMBERS, key=KEY)


def fitted(begun, *, fn=loss, optimiser=ADAM, data=(X, Y), **options):
    options = {"batch_size": 8} | options if isinstance(data, tuple) else options
    return ee.fit(begun, fn, optimiser, data, progress=False, key=KEY, **grouped(options))


class Batches:
    def __iter__(self):
        for i in range(0, 38, 8):
            yield X[i : i + 8], Y[i : i + 8]


class Seen(list):
    """A callback that only looks, at everything."""

    def __call__(self, progress):
        self.append(progress)
        assert progress.ensemble.num_members == MEMBERS
        state = progress.train_state
        assert state.params is not None
        assert (np.asarray(state.status) == progress.status).all()


def drawn_options(rng):
    """A random call of `fit`: options that meet, with a run of at least a few chunks."""
    options: dict = {"data": (X, Y) if rng.random() < 0.6 else Batches()}
    options |= {"epochs": 9} if rng.random() < 0.5 else {"steps": 43}
    if rng.random() < 0.6:
        options |= {"validation": VALID}
        options |= {"patience": int(rng.integers(1, 4))} if rng.random() < 0.5 else {}
        options |= {"target": 0.3} if rng.random() < 0.3 else {}
    options |= {"max_steps": rng.integers(3, 60, MEMBERS)} if rng.random() < 0.4 else {}
    if rng.random() < 0.4:
        options |= {"fn": explosive, "hyper": jnp.asarray([0.0, 1.0, 0.0, 0.0, 1.0])}
        options |= {"optimiser": lambda hyper: ADAM, "on_diverge": str(rng.choice(["freeze", "revive"]))}
        options |= {"score": loss, "mode": "min"} if "validation" in options else {}
    elif rng.random() < 0.3:
        options |= {"fn": loss_with_aux, "has_aux": True}
    if isinstance(options["data"], tuple):
        options |= {"shuffle": (True, "shared")[rng.integers(2)]}
        options |= {"scan": False} if rng.random() < 0.2 else {}
    options |= {"plan": ee.plan.Sequential()} if rng.random() < 0.2 else {}
    return options


def assert_same_runs(got, expected):
    for name in ("ensemble", "status", "stopped_at", "history", "train_state", "selection", "best_score", "best_step"):
        assert_same(getattr(got, name), getattr(expected, name))
    assert got.revived == expected.revived


def joined(parts):
    """The history that consecutive parts make."""
    curves = [part.validation for part in parts if part.validation is not None]
    return ee.train.History(
        np.concatenate([part.loss for part in parts], axis=1),
        jax.tree.map(lambda *x: np.concatenate(x, axis=1), *(part.aux for part in parts)),
        np.concatenate(curves, axis=1) if curves else None,
        np.concatenate([part.validation_step for part in parts]),
        np.concatenate([part.step for part in parts]),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 24))]
)  # fmt: skip
def test_looking_changes_nothing(ensemble, seed):
    rng = np.random.default_rng(seed)
    options = drawn_options(rng)
    every = int(rng.integers(1, 20)) if rng.random() < 0.7 else None
    expected = fitted(ensemble, **options)
    seen = Seen()
    run = fitted(ensemble, **options, callbacks=[seen, lambda progress: False], callback_every=every)
    assert_same_runs(run, expected)
    assert_same(joined([progress.history for progress in seen]), run.history)
    assert seen[-1].step == run.history.loss.shape[1] == max(progress.step for progress in seen)
    assert_same(seen[-1].status, run.status)
    if every is not None and isinstance(options["data"], tuple):
        assert all(progress.step % every == 0 for progress in seen if progress.step < seen[-1].step)


def test_what_a_callback_sees(ensemble):
    seen = Seen()
    run = fitted(ensemble, epochs=4, validation=VALID, callbacks=ee.train.every(3, seen))
    assert [progress.step for progress in seen] == [3, 6, 9, 12, 15, 18, 20]
    assert [progress.epoch for progress in seen] == [0, 1, 1, 2, 3, 3, 4]
    assert {progress.last_step for progress in seen} == {20}
    assert [progress.history.validation_step.tolist() for progress in seen] == [[], [5], [], [10], [15], [], [20]]
    seconds = [progress.seconds for progress in seen]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1] <= run.seconds
    for progress in seen:
        assert_same(progress.ids, np.arange(MEMBERS, dtype=np.int32))
        assert_same(progress.loss, run.history.loss[:, progress.step - 1])
        done = progress.step // PER_EPOCH
        if done:
            assert_same(progress.score, run.history.validation[:, done - 1])
        else:
            assert progress.score is None
    assert repr(seen[0]).startswith("Progress(step 3 of 20, epoch 0, ")


def test_the_weights_are_those_of_a_run_cut_there(ensemble):
    kept = []
    fitted(ensemble, steps=20, callbacks=ee.train.every(7, lambda progress: kept.append(progress.train_state)))
    for state, steps in zip(kept, (7, 14, 20), strict=True):
        assert_same(state, fitted(ensemble, steps=steps).train_state)


def test_weights_are_not_there_later(ensemble, unhooked):
    kept = []
    fitted(ensemble, steps=3, callbacks=kept.append)
    with pytest.raises(RuntimeError, match="until its callback returns"):
        _ = kept[0].ensemble


def test_what_is_seen_cannot_be_changed(ensemble):
    def write(progress):
        for array in (progress.status, progress.loss, progress.ids, progress.history.loss):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
        with pytest.raises(AttributeError):
            progress.step = 0

    fitted(ensemble, steps=3, callbacks=write)


READER = ee.train.RowReader((X, Y))


@pytest.mark.parametrize("data", [(X, Y), Batches(), READER], ids=["arrays", "iterable", "reader"])
def test_an_epoch_is_validated_before_the_call_at_its_end(ensemble, data):
    """Whatever the data; also when that call ends the run, which keeps the weights of that epoch."""
    seen = Seen()
    sizes = {"batch_size": 8} if data is READER else {}
    end = lambda progress: seen(progress) or progress.step == 10
    options = {"validation": VALID, "callbacks": ee.train.every(PER_EPOCH, end), "epochs": 3} | sizes
    run = fitted(ensemble, data=data, **options)
    assert [progress.step for progress in seen] == [5, 10]
    assert [progress.epoch for progress in seen] == [1, 2]
    assert {progress.last_step for progress in seen} == {None if isinstance(data, Batches) else 15}
    assert_same([progress.score for progress in seen], list(run.history.validation.T))
    assert run.best_step.tolist() == [10] * MEMBERS


@pytest.mark.parametrize("data", [(X, Y), Batches()], ids=["arrays", "iterable"])
@pytest.mark.parametrize("step", [1, 4, 5, 13])
def test_a_stop_is_a_cut(ensemble, data, step, tmp_path):
    """The run ends where a shorter one does, and continues as the whole one."""
    options = {"data": data, "validation": VALID}
    stop = lambda progress: progress.step >= step
    whole = fitted(ensemble, steps=20, **options)
    run = fitted(ensemble, steps=20, **options, callbacks=ee.train.every(1, stop), checkpoint=tmp_path / "a")
    assert run.interrupted
    assert not whole.interrupted
    assert (run.status == Status.OK).all()
    assert_same(run.train_state, fitted(ensemble, steps=step, **options).train_state)
    assert_same(run.history.loss, whole.history.loss[:, :step])
    resumed = fitted(ensemble, steps=20, **options, checkpoint=tmp_path / "a")
    assert_same_runs(resumed, whole)
    assert not resumed.interrupted
    if isinstance(data, tuple):
        continued = fitted(run, steps=20 - step, **options)
        assert_same(continued.train_state, whole.train_state)


@pytest.mark.parametrize("data", [(X, Y), Batches()], ids=["arrays", "iterable"])
def test_stopping_members_is_their_max_steps(ensemble, data):
    at = np.array([3, 20, 5, 11, 30])
    options = {"data": data, "steps": 24, "validation": VALID}
    expected = fitted(ensemble, **options, stop=ee.train.Stopping(steps=at))
    run = fitted(ensemble, **options, callbacks=ee.train.every(1, lambda progress: at <= progress.step))
    assert_same(run.status, np.where(at <= 24, Status.STOPPED, Status.OK).astype(np.int8))
    assert_same(run.stopped_at, expected.stopped_at)
    assert_same(run.history.loss, expected.history.loss)
    assert_same(run.train_state.params, expected.train_state.params)
    assert not run.interrupted


def test_members_that_stop_are_validated_and_leave(ensemble):
    at = np.array([2, 2, 2, 2, 7])
    run = fitted(ensemble, steps=400, validation=VALID, callbacks=ee.train.every(1, lambda p: at <= p.step))
    assert run.stopped_at.tolist() == at.tolist()
    assert_same(run.best_step, at.astype(np.int32))
    assert run.history.loss.shape[1] == 7


def test_all_members_stopped_stay_stopped_after_a_restart(ensemble, tmp_path):
    options = {"steps": 20, "checkpoint": ee.train.Checkpoint(tmp_path / "a", every=1)}
    stop = lambda progress: np.full(MEMBERS, progress.step >= 6)
    run = fitted(ensemble, **options, callbacks=ee.train.every(2, stop))
    assert run.stopped_at.tolist() == [6] * MEMBERS
    calls = []
    again = fitted(ensemble, **options, callbacks=calls.append)
    assert_same_runs(again, run)
    assert not calls


def test_answers_of_several_callbacks(ensemble):
    first = lambda progress: np.arange(MEMBERS) == 0
    second = lambda progress: [False, True, False, False, False] if progress.step >= 4 else None
    last = lambda progress: progress.step >= 6
    run = fitted(ensemble, steps=20, callbacks=[ee.train.every(2, each) for each in (first, second, last)])
    assert run.stopped_at.tolist() == [2, 4, -1, -1, -1]
    assert run.interrupted
    assert int(run.train_state.step) == 6


@pytest.mark.parametrize("every", [None, 4])
def test_an_error_keeps_the_run(ensemble, every, tmp_path):
    def fail(progress):
        if progress.step >= 4:
            raise KeyError("no such run")

    options = {"steps": 20, "validation": VALID, "checkpoint": tmp_path / "a"}
    whole = fitted(ensemble, steps=20, validation=VALID)
    with pytest.raises(KeyError) as error:
        fitted(ensemble, **options, callbacks=fail if every is None else ee.train.every(every, fail))
    step = int(error.value.run.train_state.step)
    assert every is None or step == 4
    assert "Rerunning the same call resumes there" in error.value.__notes__[-1]
    assert_same(error.value.run.train_state, fitted(ensemble, steps=step, validation=VALID).train_state)
    assert_same_runs(fitted(ensemble, **options), whole)


def test_an_error_at_the_end_keeps_the_run(ensemble):
    """The last call comes after the validation of weights within an epoch."""

    def fail(progress):
        assert progress.history.loss.shape[1]

    with pytest.raises(AssertionError) as error:
        fitted(ensemble, steps=13, validation=VALID, callbacks=fail)
    assert_same_runs(error.value.run, fitted(ensemble, steps=13, validation=VALID))


def test_control_c_in_a_callback(ensemble, interruptible):
    def press(progress):
        os.kill(os.getpid(), signal.SIGINT)

    run = fitted(ensemble, steps=50, callbacks=ee.train.every(6, press))
    assert run.interrupted
    assert_same(run.train_state, fitted(ensemble, steps=6).train_state)


def test_control_c_and_a_callback(ensemble, interruptible):
    """A batch that is interrupted is still shown."""
    seen = Seen()

    def batches():
        for i, batch in enumerate(Batches()):
            if i == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    run = fitted(ensemble, data=batches(), epochs=1, callbacks=seen)
    assert run.interrupted
    assert seen[-1].step == int(run.train_state.step)


def test_callbacks_do_not_identify_a_run(ensemble, tmp_path):
    options = {"steps": 12, "checkpoint": tmp_path / "a"}
    run = fitted(ensemble, **options, callbacks=ee.train.every(5, Seen()))
    assert_same_runs(fitted(ensemble, **options), run)
    longer = fitted(ensemble, **options | {"steps": 15}, callbacks=[Seen(), Seen()])
    assert int(longer.train_state.step) == 15


def test_a_continued_run(ensemble):
    first = fitted(ensemble, epochs=2, validation=VALID)
    seen = Seen()
    run = fitted(first, epochs=2, validation=VALID, callbacks=ee.train.every(5, seen))
    assert [progress.step for progress in seen] == [15, 20]
    assert [progress.epoch for progress in seen] == [1, 2]
    assert_same(joined([progress.history for progress in seen]).loss, run.history.loss[:, 10:])
    assert [progress.history.validation_step.tolist() for progress in seen] == [[15], [20]]


def test_a_resumed_run_counts_its_epochs(ensemble, tmp_path):
    for data in ((X, Y), Batches()):
        options = {"data": data, "epochs": 4, "checkpoint": tmp_path / type(data).__name__}
        fitted(ensemble, **options, callbacks=ee.train.every(1, lambda p: p.step >= 12))
        seen = Seen()
        fitted(ensemble, **options, callbacks=ee.train.every(1, seen))
        assert [progress.step for progress in seen] == [*range(13, 21)]
        assert seen[0].epoch == 2


def test_nothing_is_done_without_callbacks(ensemble, monkeypatch):
    def fail(*args, **options):
        raise AssertionError

    for name in ("all_gather", "check_answer", "copy_arrays"):
        monkeypatch.setattr(_callbacks, name, fail)
    monkeypatch.setattr(_callbacks.NewRecords, "take", fail)
    fitted(ensemble, steps=20, validation=VALID)


def test_little_is_done_at_a_call(ensemble, monkeypatch):
    """A call after every step transfers nothing anew, and makes no curves that nobody reads."""
    made, make, since = [], PieceQueue._make_chunk, Columns.since

    def counted(*args, **options):
        read = since(*args, **options)
        return lambda: made.append("curves") or read()

    monkeypatch.setattr(PieceQueue, "_make_chunk", lambda *args: made.append("chunk") or make(*args))
    monkeypatch.setattr(Columns, "since", counted)
    fitted(ensemble, steps=20, callbacks=ee.train.every(1, lambda progress: False))
    assert made.count("chunk") == 2  # of a full batch, and of the last of an epoch
    assert made.count("curves") == 1  # of the run
    kept = []
    run = fitted(ensemble, steps=20, callbacks=ee.train.every(1, kept.append))
    np.testing.assert_array_equal(np.concatenate([p.history.loss for p in kept], axis=1), run.history.loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:5 members do not divide evenly")
def test_on_a_mesh(ensemble):
    mesh = ee.make_mesh(members=4)
    seen = []
    options = {"steps": 12, "validation": VALID, "mesh": mesh}
    run = fitted(ensemble, **options, callbacks=ee.train.every(5, lambda p: seen.append(p.train_state)))
    assert_same_runs(run, fitted(ensemble, **options))
    assert_same(seen[0], fitted(ensemble, **options | {"steps": 5}).train_state)
    at = np.array([3, 20, 5, 11, 30])
    stopped = fitted(ensemble, **options, callbacks=ee.train.every(1, lambda p: at <= p.step))
    assert stopped.stopped_at.tolist() == [3, -1, 5, 11, -1]


def test_raise_on_divergence_is_seen_first(ensemble):
    seen = Seen()
    hyper = jnp.asarray([0.0, 1.0, 0.0, 0.0, 1.0])
    options = {"fn": explosive, "optimiser": lambda hyper: ADAM, "hyper": hyper, "on_diverge": "raise", "steps": 60}
    with pytest.raises(ee.train.DivergedError) as error:
        fitted(ensemble, **options, callbacks=seen)
    assert_same(seen[-1].status, error.value.run.status)


@pytest.mark.slow
def test_methods_pass_callbacks_on(ensemble):
    seen = Seen()
    options = {"loss": loss, "data": (X, Y), "batch_size": 8, "progress": False, "key": KEY}
    run = ee.methods.successive_halving(
        ensemble, optimiser=ADAM, validation=VALID, epochs=1, callbacks=ee.train.every(5, seen), **options
    )
    assert seen[-1].step == int(run.train_state.step) == 15
    rates = {"lr": jnp.full(MEMBERS, 0.01)}
    found = ee.methods.population_based_training(
        ensemble,
        optimiser=lambda hyper: optax.sgd(hyper["lr"]),
        hyper=rates,
        validation=VALID,
        rounds=4,
        epochs=1,
        callbacks=ee.train.every(5, lambda progress: progress.step >= 10),
        **options,
    )
    assert found.run.interrupted
    assert len(found.scores) == 2
    folds = ee.resample.folds(len(X), MEMBERS, key=KEY)
    seen = Seen()
    ee.methods.cross_fit(ensemble, optimiser=ADAM, folds=folds, x=X, epochs=1, callbacks=seen, **options)
    assert seen


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (3, "`fit` needs a function of one argument as `callbacks`, or a list of them; got a"),
        ("log", "or a list of them; got"),
        ([print, 3], r"at `callbacks\[1\]`"),
        ([Seen], r"Make one: `Seen\(...\)`"),
    ],
)
def test_wrong_callbacks(ensemble, callbacks, message, unhooked):
    with pytest.raises(TypeError, match=message):
        fitted(ensemble, steps=3, callbacks=callbacks)


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (2.5, TypeError), (True, TypeError), (-1, ValueError)])
def test_wrong_periods(every, error, unhooked):
    with pytest.raises(error, match=r"`train\.every` needs (an integer )?`steps`"):
        ee.train.every(every, print)


@pytest.mark.parametrize("callback", [None, [], Seen])
def test_no_callback_to_call_every(callback, unhooked):
    with pytest.raises(TypeError, match="`train.every` needs a function of one argument, got"):
        ee.train.every(2, callback)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (12, "`answer` returned an"),
        ("stop", "`answer` returned"),
        ([0, 0, 1, 0, 0], "`answer` returned dtype int64"),
        (np.zeros(3, bool), r"returned booleans of shape \(3,\) for 5 members"),
    ],
)
def test_wrong_answers_keep_the_run(ensemble, answer, message, unhooked):
    def answers(progress):
        return answer

    answers.__name__ = "answer"
    with pytest.raises((TypeError, ValueError), match=message) as error:
        fitted(ensemble, steps=8, callbacks=answers)
    assert int(error.value.run.train_state.step) == 8


def test_callbacks_of_several_periods(ensemble):
    """Each sees all steps since its own last call."""
    calls = {every: [] for every in (3, 4, None)}
    see = lambda every: lambda progress: calls[every].append((progress.step, progress.history.step.tolist()))
    fitted(ensemble, steps=14, callbacks=[see(None), ee.train.every(3, see(3)), ee.train.every(4, see(4))])
    for every, seen in calls.items():
        assert sum((steps for _, steps in seen), []) == list(range(1, 15))
        if every is not None:
            assert [step for step, _ in seen] == [*range(every, 15, every), 14]
