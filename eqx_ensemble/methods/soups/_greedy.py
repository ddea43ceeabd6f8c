from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float

from ..._check import check_function, check_word
from ..._ensemble import Ensemble, average
from ..._ensemble._check import check_ensemble
from ._check import check_some_scores, check_value

_NAME = "methods.soups.greedy"


class Soup(NamedTuple):
    """What [`eqx_ensemble.methods.soups.greedy`][] returns.

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


def greedy(ensemble: Ensemble[Any], score: Callable[[Any], Any], *, mode: Literal["min", "max"]) -> Soup:
    """Averages the weights of those members that improve a held-out score: a greedy soup.

    Members are sorted by their own scores. Starting from the best, each is added if the average of the weights of all
    chosen members with it scores no worse than without it. The result costs as much as one member in prediction, and
    on the held-out rows it is never worse than the best member.

    Members have to come from a common start, such as fine-tuning of one pretrained model: the average of networks that
    were trained from different initialisations is no good network, and the soup is then the best member alone. All
    members, or weights of your own, are averaged by [`eqx_ensemble.average`][]. Arrays that are not floating-point
    must be equal in all members. An `equinox.nn.State`, such as running statistics of BatchNorm, does not belong to
    the averaged weights: re-estimate it inside `score`.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `score`: `score(model)` of one model in inference mode on held-out rows: one number. It is called twice for each
        member, less one, outside of any transformation; compile it with `equinox.filter_jit`.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher. Where members tie, the first one comes first; a
        member or an average whose score is NaN is not chosen.

    **Returns:** [`eqx_ensemble.methods.soups.Soup`][]: model, weights and scores.

    **Raises:** `TypeError` for a score that is not a function, or not of one number; `ValueError` for another mode, and
    if all members' scores are NaN; `MemberMismatchError` for an integer leaf that differs.

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
        [Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing inference
        time](https://arxiv.org/abs/2203.05482), Wortsman et al., 2022.
    """
    check_ensemble(ensemble, name=_NAME)
    check_function(score, "score", name=_NAME, example="lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2)")
    check_word(mode, "mode", ("min", "max"), name=_NAME)
    sign = 1.0 if mode == "min" else -1.0
    cost = lambda model: sign * check_value(score(eqx.nn.inference_mode(model)))
    costs = np.array([cost(model) for model in ensemble.unstack()])
    check_some_scores(costs)
    order = np.argsort(costs, kind="stable")  # NaN is sorted last
    chosen, best = [order[0]], costs[order[0]]
    soup = ensemble[int(order[0])]
    for member in order[1:]:
        if np.isnan(costs[member]):
            break
        candidate = average(ensemble, _equal_weights([*chosen, member], len(costs)))
        found = cost(candidate)
        if found <= best:
            chosen, best, soup = [*chosen, member], found, candidate
    return Soup(soup, _equal_weights(chosen, len(costs)), sign * float(best), sign * costs)


def _equal_weights(chosen: list[Any], num_members: int) -> Float[np.ndarray, " members"]:
    weights = np.zeros(num_members)
    weights[chosen] = 1 / len(chosen)
    return weights
