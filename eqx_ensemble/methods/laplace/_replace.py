from typing import Any, TypeVar

from ..._check import kind_text
from ._check import check_per_member, check_some_value
from ._laplace import Laplace, with_values

M = TypeVar("M")


def replace(posterior: Laplace[M], *, prior_precision: Any = None, noise: Any = None) -> Laplace[M]:
    """Replaces the prior precision or the noise of posteriors, without access to the data.

    The result equals a fit with these values, because the stored curvatures depend on neither. A prior precision can
    thus be selected on held-out rows with one pass over the training data. As with
    [`eqx_ensemble.methods.laplace.Laplace.optimise_prior`][], the weights do not change.

    **Arguments:**

    - `posterior`: the result of [`eqx_ensemble.methods.laplace.fit`][].
    - `prior_precision`, `noise`: as for `fit`, one number or `(members,)` each; unchanged by default.

    **Returns:** [`eqx_ensemble.methods.laplace.Laplace`][].

    **Raises:** `TypeError` or `ValueError` for other types of `posterior`, values that are not above zero, `noise` with
    classes, and if neither is given.

    ```python
    laplace = ee.methods.laplace
    ensemble = ee.build(lambda key: eqx.nn.MLP(2, 3, 8, 1, key=key), 4, key=key)
    x, labels = jax.random.normal(key, (60, 2)), jnp.arange(60) % 3
    posterior = laplace.fit(
        ensemble,
        (x[:40], labels[:40]),
        likelihood="classification",
        where=lambda model: model.layers[-1],
    )


    def held_out(precision):
        chosen = laplace.replace(posterior, prior_precision=precision)
        logits = chosen.predict(x[40:], combine=ee.combine.mixture)
        return ee.scores.nll(logits[None], labels[40:])


    best = min([0.1, 1.0, 10.0], key=held_out)
    posterior = laplace.replace(posterior, prior_precision=best)
    ```
    """
    name = "methods.laplace.replace"
    if not isinstance(posterior, Laplace):
        raise TypeError(f"`{name}` needs what `methods.laplace.fit` returned, got {kind_text(posterior)}.")
    check_some_value(prior_precision, noise, name=name)
    precision = check_per_member(name, "prior_precision", prior_precision, posterior.prior_precision)
    return with_values(posterior, precision, check_per_member(name, "noise", noise, posterior.noise))
