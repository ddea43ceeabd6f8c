from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from ... import _check
from ..._ensemble import M
from ...distributed import to_host
from ...train import TrainState
from ...train._state import OK
from ...train.compiled._limits import stopped
from ...train.host._revive import copies, gathered


def rank(scores: Any, *, healthy: Any = None, mode: Literal["min", "max"] = "min") -> Int[np.ndarray, " members"]:
    """The members' places in order, the best first.

    ```python
    ee.methods.population.rank([0.3, 0.1, 0.2])  # [1, 2, 0]
    ```

    **Arguments:**

    - `scores`: one per member `(members,)`. NaN is worse than any number.
    - `healthy`: `(members,)`, who may be ranked by its score; the others come last.
    - `mode`: `"min"` where lower scores are better, `"max"` where higher ones are.

    **Returns:** places `(members,)`, int64. Equal scores stay in order.
    """
    _check.check_mode(mode, name="population.rank")
    scores = _check.member_scores(scores, name="population.rank")
    bad = np.isnan(scores) | ~_check.who_is_healthy(healthy, len(scores), name="population.rank")
    return np.lexsort((scores if mode == "min" else -scores, bad))


def select(state: TrainState[M], members: Any) -> TrainState[M]:
    """The training state of some members only, in the order given.

    A member keeps its id and with it its row order and random streams: it trains on as it would have beside the others.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    state = ee.train.init(ensemble, optax.adam(1e-2), key=key)
    ee.methods.population.select(state, [5, 0, 2]).ids  # [5, 0, 2]
    ```

    **Arguments:**

    - `state`: a training state, such as `run.train_state`.
    - `members`: places among the members, each at most once.

    **Returns:** the training state of these members.
    """
    _check.train_state(state, TrainState)
    members = _check.places(members, state.num_members, name="population.select", once=True)
    moving, fixed, ids = gathered((state.moving, state.fixed, state.ids), members)
    return TrainState(moving, fixed, state.shared, ids, state.step)


def clone(state: TrainState[M], donors: Any) -> TrainState[M]:
    """Members as copies of others: weights, optimiser state, model state, and hyper-parameters.

    A copy keeps its own id, row order and random streams, and so goes a way of its own. It trains, whatever became of
    the member in whose place it is.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    state = ee.train.init(ensemble, optax.adam(1e-2), key=key)
    state = ee.methods.population.clone(state, [0, 1, 0, 1])  # members 2 and 3 go on as copies of 0 and 1
    ```

    **Arguments:**

    - `state`: a training state, such as `run.train_state`.
    - `donors`: for each member the place of the one that it becomes a copy of `(members,)`; its own to stay.

    **Returns:** the new training state.

    **Raises:** ValueError for a donor that has diverged or stopped.
    """
    _check.train_state(state, TrainState)
    count, moving, fixed = state.num_members, state.moving, state.fixed
    donors = _check.places(donors, count, name="population.clone")
    _check.one_donor_each(donors, to_host(moving.status) == OK, np.asarray(state.ids))
    moving, fixed = copies(moving, fixed, donors)
    return TrainState(moving, fixed, state.shared, state.ids, state.step)


def stop(state: TrainState[M], members: Any) -> TrainState[M]:
    """Members that train no more, and stay in their places with the weights that they have.

    **Arguments:**

    - `state`: a training state, such as `run.train_state`.
    - `members`: their places.

    **Returns:** the new training state; `fit` takes those that stopped out of its compiled arrays when that pays.
    """
    _check.train_state(state, TrainState)
    members, moving = _check.places(members, state.num_members, name="population.stop"), state.moving
    chosen = np.isin(np.arange(state.num_members), members)
    moving = stopped(moving, chosen, state.step)
    return TrainState(moving, state.fixed, state.shared, state.ids, state.step)
