"""Averages of members chosen by a held-out score; [`eqx_ensemble.average_parameters`][] averages all members."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float

from .._brief import brief_repr
from .._caller import caller
from .._check import check_word
from .._ensemble import Ensemble, check_ensemble
from .._stack import average_parameters, merge_adapters

__all__ = ["Soup", "greedy"]


class Soup(NamedTuple):
    """The result of [`eqx_ensemble.methods.soups.greedy`][].

    **Attributes:**

    - `model`: one model, the average of the chosen members' weights.
    - `weights`: `(members,)`, equal for chosen members and 0 for the others, summing to 1.
    - `score`: the score of `model`.
    - `member_scores`: `(members,)`, the score of each member alone.
    """

    model: Any
    weights: Float[np.ndarray, " members"]
    score: float
    member_scores: Float[np.ndarray, " members"]

    def __repr__(self) -> str:
        return brief_repr(self)


def greedy(ensemble: Ensemble[Any], score: Callable[[Any], Any], *, mode: Literal["min", "max"]) -> Soup:
    """Greedy soup: averages the weights of the members that improve a held-out score.

    Members are added in the order of their own scores, the best first, if the average then scores no worse. Members
    must have a common start, such as one pretrained model: networks from different initialisations do not average well.
    An `equinox.nn.State` is not valid for averaged weights: re-estimate it inside `score`.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `score`: `score(model)` returns one number on held-out rows, for a model in inference mode. It is called up to `2
        * members - 1` times: compile it with `equinox.filter_jit`.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher.

    **Returns:** [`eqx_ensemble.methods.soups.Soup`][].

    **Raises:** `ValueError` if the scores of all members are NaN.

    ```python
    start = eqx.nn.MLP(3, 1, 16, 2, key=key)  # pretrained
    ensemble = ee.stack([start, start, start])  # and fine-tuned
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))


    @eqx.filter_jit
    def score(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    soup = ee.methods.soups.greedy(ensemble, score, mode="min")
    soup.model(x[0]), soup.weights
    ```

    ??? cite
        [Wortsman et al. 2022](https://arxiv.org/abs/2203.05482)
    """
    check_ensemble(ensemble)
    check_word(mode, "mode", ("min", "max"))
    sign = 1.0 if mode == "min" else -1.0
    cost = lambda model: sign * float(score(eqx.nn.inference_mode(model)))
    costs = np.array([cost(model) for model in ensemble.unstack()])
    if np.isnan(costs).all():
        raise ValueError(f"`{caller()}` needs a defined score for at least one member; all are NaN.")
    equal = lambda chosen: np.isin(np.arange(len(costs)), chosen) / len(chosen)
    first, *others = np.argsort(costs, kind="stable")[: np.sum(~np.isnan(costs))].tolist()  # NaN is sorted last
    chosen, best, soup = [first], costs[first], merge_adapters(ensemble[first])
    for member in others:
        candidate = average_parameters(ensemble, equal([*chosen, member]))
        if (found := cost(candidate)) <= best:
            chosen, best, soup = [*chosen, member], found, candidate
    return Soup(soup, equal(chosen), sign * float(best), sign * costs)
