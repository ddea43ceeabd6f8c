import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int, Key, PyTree

from ... import _check, _keys, _streams
from ..._ensemble import M
from ...sweep._draw import AbstractRange
from ...train import TrainState
from ...train._hyper import changed_hyper
from ...train._state import Fixed
from ._moves import rank


def truncation(
    scores: Any,
    healthy: Any = None,
    *,
    fraction: float | int = 0.2,
    mode: Literal["min", "max"] = "min",
    key: Any,
) -> Int[np.ndarray, " members"]:
    """Donors by truncation: each of the worst members gets one of the best, drawn at random.

    ??? cite

        Jaderberg et al., *Population Based Training of Neural Networks*, arXiv:1711.09846, 2017.

    ```python
    ee.methods.population.truncation([0.3, 0.1, 0.5, 0.2], fraction=0.25, key=key)  # [0, 1, 1, 3]
    ```

    **Arguments:**

    - `scores`: one per member `(members,)`.
    - `healthy`: `(members,)`, who may be a donor. The others, and those with a score of NaN, get a donor in any case.
    - `fraction`: of the members, at each end, rounded up; at most a half.
    - `mode`: `"min"` where lower scores are better, `"max"` where higher ones are.
    - `key`: draws the donors.

    **Returns:** for [`eqx_ensemble.methods.population.clone`][]: a donor's place for each member `(members,)`, its own
    for those that stay.
    """
    scores = _check.member_scores(scores, name="population.truncation")
    _check.part_of_members(fraction, name="population.truncation")
    count = len(scores)
    able = ~np.isnan(scores) & _check.who_is_healthy(healthy, count, name="population.truncation")
    order, donors = rank(scores, healthy=able, mode=mode), np.arange(count)
    most = math.ceil(fraction * count - 1e-9) if count > 1 else 0
    best = order[: min(most, able.sum())]
    if len(best) == 0:
        return donors
    losers = [place for place in order[-most:] if place not in best] + [p for p in order[:-most] if not able[p]]
    drawn = next(_streams.generators(key, 1, purpose="truncation")).integers(len(best), size=count)
    donors[losers] = best[drawn[losers]]
    return donors


def explore(
    ranges: Mapping[str, AbstractRange], *, resample: float | int = 0.25, factors: tuple[float, float] = (0.8, 1.2)
) -> Callable[[PyTree, Key[Any, ""]], PyTree]:
    """A function that changes a copy's hyper-parameters: each is multiplied by one of `factors`, or drawn anew.

    ??? cite

        Jaderberg et al., *Population Based Training of Neural Networks*, arXiv:1711.09846, 2017.

    ```python
    change = ee.methods.population.explore({"lr": ee.sweep.LogUniform(1e-4, 1e-1)})
    change({"lr": jnp.array(0.09), "weight": jnp.array(1.0)}, key)  # another `lr` of at most 0.1, the same `weight`
    ```

    **Arguments:**

    - `ranges`: what to draw from, by name, as for [`eqx_ensemble.sweep.draw`][]. Other names stay as they are, and
        nothing leaves its range; of a choice, the next larger or smaller value is taken.
    - `resample`: the probability that a name is drawn anew.
    - `factors`: one of them, each as likely as the other.

    **Returns:** `explore(hyper, key) -> hyper` of one member; [`eqx_ensemble.train.perturb`][] is a simpler one.
    """
    name = "population.explore"
    _check.ranges(ranges, AbstractRange, name=name)
    _check.check_number(resample, "resample", name=name, least=0, most=1)
    either = _check.positive_factors(factors, name=name)

    def explored(hyper: PyTree, key: Key[Any, ""]) -> PyTree:
        (generator,) = _streams.generators(key, 1, purpose="explore")
        _check.names_in(ranges, hyper, name="population.explore")
        new = dict(hyper)
        for name, one in ranges.items():
            factor, anew = generator.choice(either), generator.random() < resample
            new[name] = one.draw(generator) if anew else one.moved(float(hyper[name]), factor)
        return new

    return explored


def change(
    state: TrainState[M], members: Any, fn: Callable[[PyTree, Key[Any, ""]], PyTree], *, key: Any
) -> TrainState[M]:
    """Other hyper-parameters for some members.

    ```python
    ensemble, hyper = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key), {"lr": jnp.full(4, 0.1)}
    state = ee.train.init(ensemble, lambda h: optax.sgd(h["lr"]), hyper=hyper, key=key)
    state = ee.methods.population.change(state, [3], ee.train.perturb, key=key)
    state.fixed.hyper["lr"]  # [0.1, 0.1, 0.1, 0.08] or [0.1, 0.1, 0.1, 0.12]
    ```

    **Arguments:**

    - `state`: a training state with hyper-parameters.
    - `members`: their places.
    - `fn`: `fn(hyper, key) -> hyper` of one member, such as [`eqx_ensemble.methods.population.explore`][] makes.
    - `key`: a member's own key follows from it, the member's id, and the step.

    **Returns:** the new training state.
    """
    _check.train_state(state, TrainState)
    members = _check.places(members, state.num_members, name="population.change")
    _check.has_hyper(state.fixed.hyper, name="population.change")
    _check.check_function(fn, "fn", name="population.change", example="lambda hyper, key: hyper")
    keys = _keys.member_keys(key, state.ids, purpose="population")[members]
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step)
    hyper = changed_hyper(state.fixed.hyper, fn, members, keys, name="population.change")
    return TrainState(
        state.moving, Fixed(state.fixed.frozen, state.fixed.key, hyper), state.shared, state.ids, state.step
    )
