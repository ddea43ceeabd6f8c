"""The record of a run, of numbers by hand."""

import numpy as np
import pytest

from eqx_ensemble.train.host._record import History, Record, Taken, curves_since

NAN = np.nan


def steps(*losses):
    """Steps of two members without auxiliary outputs."""
    return np.array(losses, np.float32), None


@pytest.mark.parametrize(("mode", "best"), [("min", [1.0, 2.0]), ("max", [3.0, 4.0])])
def test_latest_numbers(mode, best):
    record = Record()
    for losses, scores in (([9.0, 8.0], [1.0, NAN]), ([8.0, 6.0], [3.0, 4.0]), ([7.0, NAN], [NAN, 2.0])):
        record.add_steps(steps(losses))
        record.add_scores(np.array(scores))
    losses, scores = record.latest(mode)
    assert losses.tolist() == [7.0, 6.0]
    assert scores.tolist() == best


def test_history_ends_with_the_last_step_of_any_member():
    record = Record(first_step=10)
    record.add_steps(steps([1.0, 2.0], [NAN, 2.0]))
    record.add_scores(np.array([NAN, NAN]))  # at the last step: it took place, whatever it found
    record.add_steps(steps([NAN, NAN], [NAN, NAN]))
    record.add_scores(np.array([NAN, NAN]))  # after it, of no member
    history = record.history()
    assert history.loss.shape == (2, 2)
    assert history.validation_step.tolist() == [12]
    assert history.validation.shape == (2, 1)
    record.add_scores(np.array([NAN, 0.5]), of_all=False)  # of the weights at which a member stopped
    assert record.history().validation_step.tolist() == [12, 12]


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_history_without_a_validation(num_steps):
    """As of members that all failed before their first."""
    losses = np.full((2, num_steps), NAN, np.float32)
    record = Record(history=History(losses, None, np.zeros((2, 0)), np.zeros(0, np.int64), np.arange(num_steps)))
    assert record.latest_score is None
    np.testing.assert_array_equal(record.latest_loss, [NAN, NAN])
    assert record.latest("min")[1] is None


def test_columns_are_appended_in_place():
    """Adding the thousandth column copies none of those before; curves that are read late are those of their time."""
    record, arrays = Record(), []
    for i in range(1000):
        record.add_steps(steps([i, -i]))
        arrays.append(record.columns._ended[0])
        if i == 2:
            read = curves_since(record, Taken(steps=1, windows=1))
    assert len(set(map(id, arrays))) <= 10
    np.testing.assert_array_equal(record.curves().loss, [np.arange(1000), -np.arange(1000)])
    assert read().loss.tolist() == [[1, 2], [-1, -2]]
    assert read().step.tolist() == [2, 3]


def test_columns_of_two_precisions():
    """As of a run that another one continues in float64."""
    record = Record()
    record.add_steps((np.array([[0.1, 0.2]], np.float32), None))
    record.add_steps((np.array([[0.1, 0.2]]), None))
    assert record.curves().loss.T.tolist() == [[np.float32(0.1), np.float32(0.2)], [0.1, 0.2]]
