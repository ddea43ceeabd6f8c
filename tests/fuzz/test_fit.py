"""Random calls of `fit`, beside a plain loop of Equinox and optax over single members."""

import collections
import gc
import re
import tempfile
import warnings

import jax
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.train import Status

from ..factories import assert_same, numbers
from .calls import draw
from .reference import Reference
from .seeds import seeds

RTOL = 1e-5  # the rounding of another program, as documented for `Vmap`
ATOL = 1e-5  # weights are about one; a bias, a moment or a score may be near zero
SURE = 1e-4  # a score this close to a threshold may fall on either side
EXPECTED_WARNINGS = "diverged|do not divide|identical members"


class Ended(Exception):
    """Raised by a callback."""


def stopper(call, told=None):
    """A callback that stops members as drawn, and notes what it saw."""

    def stopping(progress):
        if told is not None:
            told.append(progress.history)
        return np.isin(np.arange(call.num_members), call.stopping_at(progress.step))

    return stopping


def run_call(call, folder):
    """The run of a call, cut and continued as drawn, and the reference."""
    begun = call.ensemble()
    told = []

    def ending(progress):
        if progress.step == call.ends_at and call.how == "error":
            raise Ended
        return progress.step == call.ends_at

    callbacks = [stopper(call, told)] if call.callback_every else []
    if call.how in ("continue", "state"):
        return continue_run(call, begun, callbacks)
    saving = {} if call.how == "whole" else {"checkpoint": ee.train.Checkpoint(folder, every=call.checkpoint_every)}
    if call.how == "checkpoint":
        for step in np.cumsum(call.lengths).tolist():
            run = call.fit(begun, length=step, callbacks=callbacks, **saving)
        return run, referenced(call, begun, [sum(call.lengths)], run)
    (length,) = call.lengths
    ends = [*callbacks, ending] if call.ends_at else callbacks
    try:
        run = call.fit(begun, length=length, callbacks=ends, **saving)
    except ee.train.DivergedError as error:
        run = error.run
        assert call.on_diverge == "raise"
        assert any(run.status == Status.DIVERGED)
        return run, referenced(call, begun, [int(run.train_state.step)], run, ends_early=True)
    except Ended as error:
        run = error.run
    if call.how == "whole":
        if told:
            assert_same_history(told, run.history)
        stop = min(length, call.ends_at or length)
        return run, referenced(call, begun, [stop], run, ends_early=run.interrupted)
    run = call.fit(begun, length=length, callbacks=callbacks, **saving)
    return run, referenced(call, begun, [length], run)


def continue_run(call, begun, callbacks):
    """A run of several calls, until no member trains."""
    run, stop, stops, revived = begun, 0, [], []
    for length in call.lengths:
        again = run.train_state if call.how == "state" and run is not begun else run
        run, stop = call.fit(again, length=length, callbacks=callbacks), stop + length
        stops.append(stop)
        revived += run.revived
        if not (run.status == Status.OK).any():
            break
    return run, referenced(call, begun, stops, run, revived=revived)


def referenced(call, begun, stops, run, *, revived=None, **options):
    revived = run.revived if revived is None else revived
    reference = Reference(call, *begun, revived=revived, timed_out=call.timed_out(run))
    for stop in stops:
        if call.how == "state" and stop != stops[0]:
            reference.forget_records()
        reference.run(stop, **options)
    return reference


def assert_cuts_change_no_bit(call, run, folder):
    """A run that was cut is the uncut one; one that was resumed from checkpoints, with its validations too."""
    if call.how in ("whole", "state"):
        return
    saved = call.how != "continue"
    saving = {"checkpoint": f"{folder}-whole"} if saved else {}
    told = [stopper(call)] if call.callback_every else []
    whole = call.fit(call.ensemble(), length=sum(call.lengths), callbacks=told, **saving)
    assert_same(run.train_state, whole.train_state)
    if saved:
        assert_same((run.selection, run.history), (whole.selection, whole.history))


def assert_same_history(parts, whole):
    """The histories that callbacks saw are together that of the run."""
    join = lambda name: np.concatenate([getattr(part, name) for part in parts if getattr(part, name) is not None], -1)
    for name in ("loss", "step", "validation_step"):
        np.testing.assert_array_equal(join(name), getattr(whole, name), err_msg=name)
    if whole.validation is not None:
        np.testing.assert_array_equal(join("validation"), whole.validation)


def assert_near(got, expected):
    got, expected = numbers(got), numbers(expected)
    assert list(got) == list(expected)
    for path, x in got.items():
        assert x.dtype == expected[path].dtype
        np.testing.assert_allclose(x, expected[path], RTOL, ATOL, err_msg=path)


def compare(call, run, reference):
    members = reference.members
    assert run.status.tolist() == [member.status for member in members]
    assert run.stopped_at.tolist() == [member.stopped_at for member in members]
    assert run.fault.tolist() == [member.fault for member in members]
    assert [tuple(event) for event in run.revived] == reference.revived
    assert int(run.train_state.step) == reference.last_step
    moving, found = run.train_state.moving, zip(members, run.ensemble.unstack(), strict=True)
    for i, (member, kept) in enumerate(found):
        take = lambda tree, i=i: ee.tree.take(tree, i)
        assert_near(take(moving.params), member.params)
        assert_near(take(moving.opt_state), member.opt_state)
        params, state = member.best or (member.params, member.state)
        assert_near(reference.partition(kept)[0], params)
        if call.stateful:
            assert_near(take(moving.model_state), member.state)
            assert_near(take(run.state), state)
        if call.hyper_used:
            assert_same(take(run.train_state.hyper), member.hyper)
    compare_losses(call, run.history, reference)
    compare_scores(call, run, members)


def compare_losses(call, history, reference):
    got = {int(step): history.loss[:, k] for k, step in enumerate(history.step)}
    assert len(got) == len(history.step)
    got = {step: column for step, column in got.items() if np.isfinite(column).any()}
    columns = reference.columns()
    assert list(got) == list(columns)
    for step, sources in columns.items():
        expected = [member.losses.get(at, np.nan) for member, at in zip(reference.members, sources, strict=True)]
        np.testing.assert_allclose(got[step], expected, RTOL, ATOL, err_msg=f"step {step}")
        if call.has_aux:
            k = history.step.tolist().index(step)
            for i, (member, at) in enumerate(zip(reference.members, sources, strict=True)):
                if at in member.aux:
                    aux = [x[i, k] for x in history.aux]
                    np.testing.assert_allclose(aux, member.aux[at], RTOL, ATOL)


def compare_scores(call, run, members):
    if call.validation is None:
        assert run.history.validation is None
        assert run.best_step is None
        return
    sign = -1 if call.mode == "max" else 1
    assert run.best_step.tolist() == [member.best_step for member in members]
    np.testing.assert_allclose(sign * run.best_score, [member.best_score for member in members], RTOL, ATOL)
    history = run.history
    if history.validation is None:  # the run ended before the first validation
        assert not any(member.scores for member in members)
        return
    for member, scores in zip(members, history.validation, strict=True):
        seen = np.isfinite(scores)
        np.testing.assert_allclose(scores[seen], [score for _, score, _ in member.scores], RTOL, ATOL)
        for step, (at, _, trained) in zip(history.validation_step[seen], member.scores, strict=True):
            # One that stopped is scored with the others, when the epoch ends.
            assert step == at if trained else step >= at


def check(seed):
    call = draw(seed)
    try:
        with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("always")
            run, reference = run_call(call, f"{folder}/run")
            assert_cuts_change_no_bit(call, run, f"{folder}/run")
        unexpected = [str(w.message) for w in caught if not re.search(EXPECTED_WARNINGS, str(w.message))]
        assert not unexpected, unexpected
        if reference.margin < SURE:
            return call, "too close"
        compare(call, run, reference)
    except BaseException as error:
        error.add_note(f"EQX_ENSEMBLE_FUZZ_SEED={seed}: {call}")
        raise
    return call, "same"


@pytest.mark.usefixtures("unhooked")
def test_members_are_as_alone():
    outcomes = collections.Counter()
    for count, seed in enumerate(seeds(default=2), 1):
        _, outcome = check(seed)
        outcomes[outcome] += 1
        if count % 20 == 0:  # a process may have so many compiled programs
            jax.clear_caches()
            gc.collect()
    assert outcomes["too close"] <= max(1, outcomes.total() // 20), outcomes
