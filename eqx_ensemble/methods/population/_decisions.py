import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int, Key

from ... import _keys
from ..._caller import caller
from ..._check import check_function, check_number, kind_text
from ..._ensemble import M
from ..._pytree import PyTree
from ...distributed import to_host
from ...sweep import AbstractRange
from ...sweep._ranges import check_ranges
from ...train import TrainState
from ...train._engine import (
    Status,
    change_hyper,
    check_mode,
    check_state_arrays,
    check_train_state,
    copy_donors,
    stop_members,
)
from .._check import check_factors, check_fraction, check_healthy, check_indices, check_member_scores


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
    check_mode(mode)
    scores = check_member_scores(scores)
    bad = np.isnan(scores) | ~check_healthy(healthy, len(scores))
    return np.lexsort((scores if mode == "min" else -scores, bad))


def select(state: TrainState[M], members: Any) -> TrainState[M]:
    """Selects some members of a training state, in the order given, each at most once.

    They continue as they would have with all members.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    state = ee.train.init(ensemble, optax.adam(1e-2), key=key)
    ee.methods.population.select(state, [5, 0, 2]).ids  # [5, 0, 2]
    ```
    """
    check_train_state(state)
    check_state_arrays(state)
    return state[check_indices(members, state.num_members, unique=True)]


def clone(state: TrainState[M], donors: Any) -> TrainState[M]:
    """Replaces members by copies of others: weights, optimiser state, model state and hyper-parameters.

    A copy keeps its own id. Its status is `OK`.

    **Arguments:**

    - `donors`: the index of a donor for each member `(members,)`; its own index to leave a member unchanged.

    **Raises:** `ValueError` for a donor that has diverged or stopped.

    `clone(state, [0, 1, 0, 1])` makes members 2 and 3 copies of 0 and 1.
    """
    check_train_state(state)
    check_state_arrays(state)
    count, moving, fixed = state.num_members, state.moving, state.fixed
    donors = check_indices(donors, count)
    training = to_host(moving.status) == Status.OK
    if len(donors) != len(training):
        raise ValueError(f"`{caller()}` needs one donor per member ({len(training)},), got ({len(donors)},).")
    invalid = np.unique(donors[(donors != np.arange(len(training))) & ~training[donors]])
    if len(invalid):
        raise ValueError(
            f"`{caller()}` needs donors that are training; these have diverged or stopped: members "
            f"{', '.join(map(str, np.asarray(state.ids)[invalid].tolist()))}."
        )
    moving, fixed = copy_donors(moving, fixed, donors)
    return TrainState(moving, fixed, state.shared, state.ids, state.step)


def stop(state: TrainState[M], members: Any) -> TrainState[M]:
    """Stops members, which remain in the training state with their current weights."""
    check_train_state(state)
    check_state_arrays(state)
    members, moving = check_indices(members, state.num_members), state.moving
    chosen = np.isin(np.arange(state.num_members), members)
    moving = stop_members(moving, chosen, state.step)
    return TrainState(moving, state.fixed, state.shared, state.ids, state.step)


def truncation(
    scores: Any, healthy: Any = None, *, fraction: float | int = 0.2, mode: Literal["min", "max"] = "min", key: Any
) -> Int[np.ndarray, " members"]:
    """Chooses donors by truncation selection: each of the worst members is assigned one of the best at random.

    **Arguments:**

    - `scores`, `healthy`, `mode`: as for [`eqx_ensemble.methods.population.rank`][]; members that are not healthy, or
        have a NaN score, are all replaced.
    - `fraction`: of members to replace, and to choose donors from, rounded up; at most a half.
    - `key`: the key for drawing the donors.

    **Returns:** the index of a donor for each member `(members,)`, for [`eqx_ensemble.methods.population.clone`][].

    ```python
    ee.methods.population.truncation([0.3, 0.1, 0.5, 0.2], fraction=0.25, key=key)
    # [0, 1, 1, 3]
    ```

    ??? cite
        [Jaderberg et al. 2017](https://arxiv.org/abs/1711.09846)
    """
    scores = check_member_scores(scores)
    check_fraction(fraction)
    count = len(scores)
    able = ~np.isnan(scores) & check_healthy(healthy, count)
    order, donors = rank(scores, healthy=able, mode=mode), np.arange(count)
    most = math.ceil(fraction * count - 1e-9) if count > 1 else 0
    best = order[: min(most, able.sum())]
    if len(best) == 0:
        return donors
    losers = [i for i in order[-most:] if i not in best] + [i for i in order[:-most] if not able[i]]
    drawn = next(_keys.generators(key, 1, purpose="truncation")).integers(len(best), size=count)
    donors[losers] = best[drawn[losers]]
    return donors


def perturb_hyper(
    ranges: Mapping[str, AbstractRange], *, resample: float | int = 0.25, factors: tuple[float, float] = (0.8, 1.2)
) -> Callable[[PyTree, Key[Any, ""]], PyTree]:
    """Makes a function that perturbs hyper-parameters: each is multiplied by one of `factors` or resampled.

    **Arguments:**

    - `ranges`: the range of each hyper-parameter to perturb, as for [`eqx_ensemble.sweep.draw`][]. New values are
        clipped to it; of an [`eqx_ensemble.sweep.Choice`][] the next value is used. Others are unchanged.
    - `resample`: the probability that a value is redrawn from its range instead.
    - `factors`: the factors to choose from, with equal probability.

    **Returns:** `explore(hyper, key) -> hyper` for one member.

    ```python
    explore = ee.methods.population.perturb_hyper({"lr": ee.sweep.LogUniform(1e-4, 1e-1)})
    explore({"lr": jnp.array(0.09), "weight": jnp.array(1.0)}, key)  # the same `weight`
    ```

    ??? cite
        [Jaderberg et al. 2017](https://arxiv.org/abs/1711.09846)
    """
    check_ranges(ranges)
    check_number(resample, "resample", least=0, most=1)
    choices = check_factors(factors)

    def explore(hyper: PyTree, key: Key[Any, ""]) -> PyTree:
        (generator,) = _keys.generators(key, 1, purpose="explore")
        if not isinstance(hyper, dict) or set(ranges) - set(hyper):
            found = f"names {sorted(hyper)}" if isinstance(hyper, dict) else kind_text(hyper)
            raise ValueError(f"`{caller()}` has ranges of {sorted(ranges)}, but the hyper-parameters are {found}.")
        new = dict(hyper)
        for word, one in ranges.items():
            factor, anew = generator.choice(choices), generator.random() < resample
            new[word] = one.draw(generator) if anew else one.rescale(float(hyper[word]), factor)
        return new

    return explore


def set_hyper(
    state: TrainState[M], members: Any, fn: Callable[[PyTree, Key[Any, ""]], PyTree], *, key: Any
) -> TrainState[M]:
    """Sets the hyper-parameters of some members.

    **Arguments:**

    - `fn`: `fn(hyper, key) -> hyper` for one member, such as [`eqx_ensemble.train.perturb`][].
    - `key`: the root key; each member's key is derived from it, the member's id and the step.
    """
    check_train_state(state)
    check_state_arrays(state)
    members = check_indices(members, state.num_members)
    if state.hyper is None:
        raise TypeError(
            f"`{caller()}` needs a training state with hyper-parameters: pass `hyper=` to `fit` or `train.init`."
        )
    check_function(fn, "fn", example="lambda hyper, key: hyper")
    keys = _keys.member_keys(key, state.ids, purpose="population")[members]
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step)
    hyper = change_hyper(state.hyper, fn, members, keys)
    fixed = dataclasses.replace(state.fixed, hyper=hyper)
    return TrainState(state.moving, fixed, state.shared, state.ids, state.step)
