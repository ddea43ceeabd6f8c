"""Patience and best weights by smoothed scores. A member's only weight counts its steps, so that scores are tables."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_same

KEY = jax.random.key(0)
MEMBERS, EPOCHS, PATIENCE = 4, 24, 4
ROWS = jnp.zeros((2, 1))
SGD = optax.sgd(1.0)
LUCKY = [6, 6, 3, 6, 5, 4, 4, 3.5]


class Counter(eqx.Module):
    steps: jax.Array

    def __init__(self, key):
        self.steps = jnp.zeros(())


def loss(model, batch, key):
    return -model.steps


def negative(model, batch, key):
    return -table_score(model, batch, key)


def table_score(model, table, key):
    return table[model.steps.astype(int)]


def fitted(tables, begun=None, *, smooth, mode="min", patience=PATIENCE, min_delta=0.0, batch_size=2, **options):
    """A run whose members have the scores of `tables` `(members, epochs)`, or of every step."""
    tables = np.asarray(tables, np.float32)
    padded = ee.Each(np.pad(tables, [(0, 0), (1, 0)], constant_values=7))
    score = table_score if mode == "min" else negative
    validation = ee.train.Validation(padded, score=score, mode=mode, min_delta=min_delta, smooth=smooth)
    begun = ee.build(Counter, len(tables), key=KEY) if begun is None else begun
    length = {} if "steps" in options else {"epochs": tables.shape[1]}
    options = {"batch_size": batch_size, "progress": False, "key": KEY} | length | options
    return ee.fit(begun, loss, SGD, ROWS, validation=validation, patience=patience, **options)


def smoothed(curve, decay):
    """The smoothed scores of one member, each from all scores before it."""
    found = []
    for n in range(1, len(curve) + 1):
        known = np.asarray([x for x in curve[:n] if np.isfinite(x)], np.float64)
        weights = decay ** np.arange(len(known) - 1.0, -1, -1)
        found.append(np.average(known, weights=weights) if np.isfinite(curve[n - 1]) else curve[n - 1])
    return found


def expected(curve, decay, *, min_delta):
    """When patience ends one member, the epoch of its best weights, and their score."""
    best, best_epoch, waited = np.inf, -1, 0
    for epoch, score in enumerate(smoothed(curve, decay), start=1):
        best, best_epoch, waited = (score, epoch, 0) if score < best - min_delta else (best, best_epoch, waited + 1)
        if waited == PATIENCE:
            return epoch, best_epoch, curve[best_epoch - 1]
    return -1, best_epoch, curve[best_epoch - 1]


def noisy_tables(seed):
    """Curves that improve under noise; one is constant, of one some scores are undefined."""
    rng = np.random.default_rng(seed)
    tables = 3 * np.exp(-np.arange(EPOCHS) / 6) + rng.normal(size=(MEMBERS, EPOCHS))
    tables[0] = 0.1
    tables[1, [0, 3, 4, 9]] = np.nan, np.inf, np.nan, np.inf
    return tables.astype(np.float32)


def test_a_lucky_score_worked_by_hand():
    """The score of epoch 3 is the lowest; smoothed by 1/2, it is above those of epochs 7 and 8."""
    raw, smooth = fitted([LUCKY], smooth=0.0), fitted([LUCKY], smooth=0.5)
    assert (raw.best_step.item(), raw.best_score.item(), raw.stopped_at.item()) == (3, 3, 7)
    assert (smooth.best_step.item(), smooth.best_score.item(), smooth.stopped_at.item()) == (8, 3.5, -1)
    assert (raw.ensemble.stacked.steps.item(), smooth.ensemble.stacked.steps.item()) == (3, 8)
    # (6/128 + 6/64 + 3/32 + 6/16 + 5/8 + 4/4 + 4/2 + 3.5) / (255/128)
    np.testing.assert_allclose(smooth.selection.average, (6 + 12 + 12 + 48 + 80 + 128 + 256 + 448) / 255, rtol=1e-6)
    assert smooth.history.validation.tolist() == [LUCKY]
    assert smooth.table()["validation"].tolist() == [3.5]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.filterwarnings("ignore:.*that are NaN", "ignore:`patience` stopped no member")
def test_members_are_those_of_a_loop(mode):
    stops = []
    for seed in range(4):
        tables = noisy_tables(seed)
        for decay in (0.0, 0.5, 0.9):
            for min_delta in (0.0, 0.05):
                run = fitted(tables, smooth=decay, mode=mode, min_delta=min_delta)
                found = zip(run.stopped_at, run.best_step, run.best_score * (1 if mode == "min" else -1), strict=True)
                wanted = [expected(curve, decay, min_delta=min_delta) for curve in tables]
                assert [tuple(x.item() for x in one) for one in found] == wanted
                assert run.stopped_at[0] == PATIENCE + 1  # rounding improves no constant score
                stops.append(run.stopped_at.tolist())
                if decay == 0:
                    np.testing.assert_array_equal(run.selection.best, run.best_score)
    assert len({tuple(x) for x in stops}) > 12


def test_the_average_is_that_of_pandas():
    pandas = pytest.importorskip("pandas")
    tables = noisy_tables(7)
    tables[1] = tables[2][::-1]
    run = fitted(tables, smooth=0.8, patience=EPOCHS)
    for average, curve in zip(run.selection.average, run.history.validation, strict=True):
        frame = pandas.Series(curve.astype(np.float64)).ewm(alpha=0.2, adjust=True).mean()
        np.testing.assert_allclose(average, frame.iloc[-1], rtol=2e-6)


@pytest.mark.filterwarnings("ignore:.*that are NaN")
def test_an_undefined_score_is_forgotten():
    tables = np.array([[np.nan, 4, np.nan, 2, 3], [np.inf, 4, -np.inf, 2, 3], [np.nan] * 5])
    run = fitted(tables, smooth=0.5)
    np.testing.assert_allclose(run.selection.average, [(4 + 4 + 12) / 7] * 2 + [0], rtol=1e-6)
    assert run.selection.weight.tolist() == [0.875, 0.875, 0]
    assert run.best_step.tolist() == [4, 3, -1]  # as without smoothing, nothing is better than minus infinity
    assert run.stopped_at.tolist() == [-1, -1, 4]


def test_decays_close_to_one_are_means():
    run = fitted([[3, 1, 2, 4], [1, 2, 3, 5]], smooth=1 - 1e-12)
    np.testing.assert_allclose(run.selection.average, [2.5, 2.75], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:`patience` stopped no member")
def test_runs_that_are_cut_or_resumed_are_the_whole(tmp_path):
    """Validations at cuts within an epoch are not part of the average."""
    tables = np.repeat(noisy_tables(3), 2, axis=1)
    tables[1] = tables[2] + 1
    tables[:, ::2] += 100  # after half an epoch
    whole = fitted(tables, smooth=0.7, batch_size=1, steps=2 * EPOCHS)
    assert len(set(whole.stopped_at.tolist())) > 2
    cut = None
    for steps in (3, 2, 6, 5, 2 * EPOCHS - 16):
        cut = fitted(tables, cut, smooth=0.7, batch_size=1, steps=steps)
    state = lambda run: (run.train_state, run.selection, run.best_step, run.best_score)
    names = ("average", "weight", "bar", "waited", "best", "step")
    assert_same([getattr(cut.selection, name) for name in names], [getattr(whole.selection, name) for name in names])
    saved = {"checkpoint": ee.train.Checkpoint(tmp_path / "a", every=3), "smooth": 0.7, "batch_size": 1}
    for steps in (2, 7, 12, 2 * EPOCHS):
        resumed = fitted(tables, steps=steps, **saved)
    assert_same(state(resumed), state(whole))
    with pytest.raises(ValueError, match=r"this call differs from the one that wrote it(.|\n)*`smooth`: "):
        fitted(tables, steps=2 * EPOCHS, **(saved | {"smooth": 0.6}))
    other = fitted(tables, fitted(tables, smooth=0.7, batch_size=1, steps=4), smooth=0.0, batch_size=1, steps=2)
    np.testing.assert_array_equal(other.selection.average, tables[:, 5])  # a run may continue with another


def test_last_weights_are_averaged_with_the_scores_before():
    tables = np.array([[9, 6, 9, 1], [9, 6, 9, 5]])  # after the second epoch's first step too
    run = fitted(tables, smooth=0.5, batch_size=1, steps=3)
    assert run.best_step.tolist() == [2, 2]  # (6 + 9 * 2) / 3 is more than 6
    run = fitted([[9, 6, 3, 1], [9, 6, 6, 5]], smooth=0.5, batch_size=1, steps=3)
    assert (run.best_step.tolist(), run.best_score.tolist()) == ([3, 2], [3, 6])
    np.testing.assert_array_equal(run.selection.best, [4, 6])
    np.testing.assert_array_equal(run.selection.average, [6, 6])


def test_other_validation_data_begin_anew():
    run = fitted([LUCKY[:4]] * 2, smooth=0.5, patience=3)
    other = np.array([[50.0] * 8, [1] * 8])
    other[:, 6] = 40, 2
    again = fitted(other, run, smooth=0.5, patience=3, steps=4)
    assert run.best_step.tolist() == [3, 3]
    np.testing.assert_allclose(again.selection.average[0], (50 * 3 + 40 * 4 + 50 * 8) / 15, rtol=1e-6)
    assert again.best_step.tolist() == [7, 3]
    assert again.best_score.tolist() == [40, 1]
    assert again.stopped_at.tolist() == [-1, 7]


def test_one_member_alone():
    tables = noisy_tables(5)
    tables[1] = tables[3][::-1]
    whole = fitted(tables, smooth=0.5)
    alone = fitted(tables[3:4], ee.build(Counter, ids=[3], key=KEY), smooth=0.5)
    assert alone.best_step.tolist() == whole.best_step[3:4].tolist()
    assert alone.status.tolist() == whole.status[3:4].tolist()
