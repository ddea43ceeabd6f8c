from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from ..._ensemble import M
from ...distributed import to_host
from ...train import TrainState
from ...train._check import check_mode
from ...train._check_state import check_state_arrays
from ...train._revive import copy_donors, take_members
from ...train._state import check_train_state
from ...train._status import Status
from ...train.compiled._limits import stop_members
from .._check import check_donors, check_healthy, check_indices, check_member_scores


def rank(scores: Any, *, healthy: Any = None, mode: Literal["min", "max"] = "min") -> Int[np.ndarray, " members"]:
    """Ranks members by their scores.

    **Arguments:**

    - `scores`: one per member `(members,)`. NaN ranks below any number.
    - `healthy`: booleans `(members,)`; members where it is `False` come last.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher.

    **Returns:** the indices of the members `(members,)`, int64, the best first. Ties keep their order.

    ```python
    ee.methods.population.rank([0.3, 0.1, 0.2])  # [1, 2, 0]
    ```
    """
    name = "methods.population.rank"
    check_mode(mode, name=name)
    scores = check_member_scores(scores, name=name)
    bad = np.isnan(scores) | ~check_healthy(healthy, len(scores), name=name)
    return np.lexsort((scores if mode == "min" else -scores, bad))


def select(state: TrainState[M], members: Any) -> TrainState[M]:
    """Selects some members of a training state, in the order given.

    A member keeps its id, row order and random streams, so it continues training as it would have with all members.

    **Arguments:**

    - `state`: a training state, such as `run.train_state`.
    - `members`: the indices of the members, each at most once.

    **Returns:** the training state of these members.

    **Raises:** `TypeError` for anything but integers; `ValueError` for an index that is repeated or out of range.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    state = ee.train.init(ensemble, optax.adam(1e-2), key=key)
    ee.methods.population.select(state, [5, 0, 2]).ids  # [5, 0, 2]
    ```
    """
    check_train_state(state)
    check_state_arrays(state, name="methods.population.select")
    members = check_indices(members, state.num_members, name="methods.population.select", unique=True)
    moving, fixed, ids = take_members((state.moving, state.fixed, state.ids), members)
    return TrainState(moving, fixed, state.shared, ids, state.step)


def clone(state: TrainState[M], donors: Any) -> TrainState[M]:
    """Replaces members by copies of others: weights, optimiser state, model state and hyper-parameters.

    A copy keeps its own id, row order and random streams, so its training differs from that of its donor. Its status is
    `OK`, even if the member that it replaces had stopped or diverged.

    **Arguments:**

    - `state`: a training state, such as `run.train_state`.
    - `donors`: the index of a donor for each member `(members,)`; its own index to leave a member unchanged.

    **Returns:** the new training state.

    **Raises:** `ValueError` for a donor that has diverged or stopped, or is out of range, and for another number of
    donors.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    state = ee.train.init(ensemble, optax.adam(1e-2), key=key)
    # members 2 and 3 become copies of 0 and 1
    state = ee.methods.population.clone(state, [0, 1, 0, 1])
    ```
    """
    check_train_state(state)
    check_state_arrays(state, name="methods.population.clone")
    count, moving, fixed = state.num_members, state.moving, state.fixed
    donors = check_indices(donors, count, name="methods.population.clone")
    check_donors(donors, to_host(moving.status) == Status.OK, np.asarray(state.ids))
    moving, fixed = copy_donors(moving, fixed, donors)
    return TrainState(moving, fixed, state.shared, state.ids, state.step)


def stop(state: TrainState[M], members: Any) -> TrainState[M]:
    """Stops members, which remain in the training state with their current weights.

    **Arguments:**

    - `state`: a training state, such as `run.train_state`.
    - `members`: the indices of the members.

    **Returns:** the new training state. `fit` removes stopped members from its compiled arrays if that saves time.

    **Raises:** `TypeError` for anything but integers; `ValueError` for an index out of range.
    """
    check_train_state(state)
    check_state_arrays(state, name="methods.population.stop")
    members, moving = check_indices(members, state.num_members, name="methods.population.stop"), state.moving
    chosen = np.isin(np.arange(state.num_members), members)
    moving = stop_members(moving, chosen, state.step)
    return TrainState(moving, state.fixed, state.shared, state.ids, state.step)
