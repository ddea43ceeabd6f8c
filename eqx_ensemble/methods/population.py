"""Decisions between epochs, as functions of a training state: for callbacks of `fit` and for loops of your own."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Key

from .._caller import caller
from .._ensemble import M
from .._keys import generators, tag
from .._pytree import PyTree
from ..distributed import to_host
from ..sweep import AbstractRange
from ..train import Status, TrainState, perturb
from ..train._member import choose
from ..train._revive import change_hyper, copy_members
from ..train._state import weights_of

__all__ = ["copy_members", "exploit", "keep_best", "perturb_hyper", "rank", "truncation"]

Mode = Literal["min", "max"]


def rank(state: TrainState[Any], *, mode: Mode = "min") -> Int[np.ndarray, " members"]:
    """The members by their last validation score, the best first.

    **Arguments:**

    - `state`: the training state. In a loop of your own, put scores into `state.score` first.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher.

    **Returns:** the positions of the members `(members,)`. Ties keep their order; those that do not train, or have a
    NaN score, come last.

    **Raises:** `ValueError` if members train and all their scores are NaN.
    """
    return _order(*_scores(state), mode=mode)


def _scores(state: TrainState[Any]) -> tuple[np.ndarray, Bool[np.ndarray, " members"]]:
    """The scores, and whether each is of a member that trains, and is defined."""
    scores, trains = to_host(state.score), to_host(state.status) == Status.OK
    able = trains & ~np.isnan(scores)
    if trains.any() and not able.any():
        raise ValueError(
            f"`{caller()}` cannot compare members: the scores of all {int(trains.sum())} that train are NaN.\n"
            "Pass `validation=` data, and a score that is defined for them."
        )
    return scores, able


def _order(scores: np.ndarray, able: np.ndarray, *, mode: Mode) -> np.ndarray:
    return np.lexsort((scores if mode == "min" else -scores, ~able))


def keep_best(state: TrainState[M], count: int, *, mode: Mode = "min") -> TrainState[M]:
    """Stops all training members except the `count` best by their last validation score.

    ```python
    elites = lambda state: ee.methods.population.keep_best(state, 4)
    callback = ee.train.every(10, elites)  # fit(..., validation=data, callbacks=callback)
    ```
    """
    return state.stop(~np.isin(np.arange(state.num_members), rank(state, mode=mode)[:count]))


def truncation(
    state: TrainState[Any], *, fraction: float | int = 0.2, mode: Mode = "min"
) -> Int[np.ndarray, " members"]:
    """Chooses donors by truncation selection: each of the worst members is assigned one of the best at random.

    **Arguments:**

    - `state`, `mode`: as for [`eqx_ensemble.methods.population.rank`][]. Members that do not train, or have a NaN
        score, are all replaced. A member's donor is drawn by its key and the step.
    - `fraction`: of members to replace, and to choose donors from, rounded up; at most a half.

    **Returns:** the position of a donor for each member `(members,)`, its own for those that stay; for
    [`eqx_ensemble.methods.population.copy_members`][].

    ??? cite
        [Jaderberg et al. 2017](https://arxiv.org/abs/1711.09846)
    """
    return donors_of(*_scores(state), decision_keys(state.keys, state.step.max()), fraction=fraction, mode=mode)


def decision_keys(keys: Any, step: Any) -> Any:
    """The members' keys for a decision after a step, also of diverged members, which took fewer steps."""
    return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, tag("population")), step))(keys)


def donors_of(scores: np.ndarray, able: np.ndarray, keys: Any, *, fraction: float | int, mode: Mode) -> np.ndarray:
    """The donors of `truncation`."""
    donors, order = np.arange(len(scores)), _order(scores, able, mode=mode)
    most = math.ceil(fraction * len(scores) - 1e-9)
    best = order[: min(most, able.sum())]
    lost = order[max(len(best), min(len(order) - most, able.sum())) :]
    if len(best) and len(lost):
        drawn = jax.vmap(lambda key: jax.random.randint(key, (), 0, len(best)))(keys[lost])
        donors[lost] = best[np.asarray(drawn)]
    return donors


def exploit(
    state: TrainState[M],
    *,
    fraction: float | int = 0.2,
    explore: Callable[[PyTree, Key[Any, ""]], PyTree] | None = perturb,
    mode: Mode = "min",
) -> TrainState[M] | None:
    """Replaces the worst members, and those that diverged, by copies of the best, with perturbed hyperparameters.

    A copy begins a new search for its best weights, and goes on at the step of the others, with rows and noise of its
    own.

    **Arguments:**

    - `state`, `fraction`, `mode`: as for [`eqx_ensemble.methods.population.truncation`][].
    - `explore`: `explore(hyper, key) -> hyper` perturbs one copy, such as
        [`eqx_ensemble.methods.population.perturb_hyper`][], which respects ranges; `None` keeps the donor's.

    **Returns:** the new state; `None` if no member is replaced.

    ```python
    callback = ee.train.every(2, ee.methods.population.exploit, at_end=False)  # fit(..., callbacks=callback)
    ```
    """
    keys = decision_keys(state.keys, state.step.max())
    donors = donors_of(*_scores(state), keys, fraction=fraction, mode=mode)
    copied = donors != np.arange(len(donors))
    if not copied.any():
        return None
    new = copy_members(state, donors)
    own, _, _ = weights_of(new)
    reset = lambda value, x: jnp.where(copied, jnp.asarray(value, x.dtype), x)
    fresh = jax.vmap(choose)(copied, (own, new.model_state), new.best) if new.best is not None else None
    return dataclasses.replace(
        new,
        hyper=explore_copies(new.hyper, donors, explore, keys),
        step=reset(new.step.max(), new.step),
        best=fresh,
        best_score=reset(jnp.inf if mode == "min" else -jnp.inf, new.best_score),
        best_step=reset(-1, new.best_step),
        waited=reset(0, new.waited),
    )


def explore_copies(hyper: PyTree, donors: np.ndarray, explore: Any, keys: Any) -> PyTree:
    """The hyperparameters, perturbed for members that are copies."""
    copied = np.flatnonzero(donors != np.arange(len(donors)))
    if explore is None or hyper is None or not len(copied):
        return hyper
    return change_hyper(hyper, copied, explore, jax.vmap(jax.random.fold_in, (0, None))(keys[copied], 1))


def perturb_hyper(
    ranges: Mapping[str, AbstractRange], *, resample: float | int = 0.25, factors: Sequence[float | int] = (0.8, 1.2)
) -> Callable[[PyTree, Key[Any, ""]], PyTree]:
    """Makes a function that perturbs hyperparameters: each is multiplied by one of `factors` or resampled.

    **Arguments:**

    - `ranges`: the range of each hyperparameter to perturb, as for [`eqx_ensemble.sweep.draw`][]. New values are
        clipped to it; of an [`eqx_ensemble.sweep.Choice`][] the next value is used. Others are unchanged.
    - `resample`: the probability that a value is redrawn from its range instead.
    - `factors`: the factors to choose from, with equal probability.

    **Returns:** `explore(hyper, key) -> hyper` for one member.

    ```python
    explore = ee.methods.population.perturb_hyper({"lr": ee.sweep.LogUniform(1e-4, 1e-1)})
    explore({"lr": jnp.array(0.09), "weight": jnp.array(1.0)}, key)  # the same `weight`
    ```
    """

    def explore(hyper: PyTree, key: Key[Any, ""]) -> PyTree:
        (generator,) = generators(key, 1, purpose="explore")
        new = dict(hyper)
        for name, one in ranges.items():
            factor, anew = generator.choice(factors), generator.random() < resample
            new[name] = one.draw(generator) if anew else one.rescale(float(hyper[name]), factor)
        return new

    return explore
