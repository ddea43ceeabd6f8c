import dataclasses
import os
from collections.abc import Callable
from typing import Any, Literal

import jax

from .. import resample
from .._axes import Each
from .._caller import caller
from .._check import check_function, check_optional_function, check_positive_int, check_word
from .._ensemble import Ensemble
from .._files import load
from .._pytree import PyTree
from . import laplace
from ._protocol import AbstractMethod, Posterior, as_loss, begin, train
from .laplace._check import check_link
from .laplace._member import LIKELIHOODS, Predict
from .laplace._selection import CURVATURES

Make = Callable[..., Any] | Ensemble[Any]
LossLike = Callable[..., Any] | str


class Laplace(AbstractMethod):
    """Laplace approximation: Gaussian posteriors over some weights of trained members.

    Predictions are those of [`eqx_ensemble.methods.laplace.Laplace.predict`][]: log-probabilities for classes, and
    means and variances for regression.

    **Arguments:**

    - `num_members`: the number of members.
    - `where`, `structure`, `noise`, `fn`: as for [`eqx_ensemble.methods.laplace.fit`][].
    - `likelihood`: as there; by default the word that is given as loss.
    - `prior_precision`: as there; by default that of the largest marginal likelihood.
    - `link`: as for [`eqx_ensemble.methods.laplace.Laplace.predict`][], without `"mc"`.

    ```python
    ee.methods.Laplace(4, where=lambda model: model.layers[-1], likelihood="classification")
    ```

    ??? cite
        [Daxberger et al. 2021](https://arxiv.org/abs/2106.14806)
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any]
    likelihood: Literal["regression", "binary", "classification"] | None = None
    structure: Literal["full", "kron", "diag"] = "full"
    prior_precision: float | None = None
    noise: float | None = None
    link: Literal["probit", "bridge", "bridge_norm"] | None = None
    fn: Callable[..., Any] | None = None

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")
        check_function(self.where, "where", example="lambda model: model.layers[-1]")
        check_word(self.structure, "structure", tuple(CURVATURES))
        check_optional_function(self.fn, "fn", example="lambda model, x: model(x)[0]")
        if self.likelihood is not None:
            check_word(self.likelihood, "likelihood", tuple(LIKELIHOODS))
            check_link(self.link, self.likelihood)

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]."""
        likelihood = self._likelihood(loss)
        run, healthy = train(make, self.num_members, as_loss(loss), optimiser, data, options, key)
        rows = options.get("rows")
        weights = None if rows is None else Each(resample.counts(healthy.rows, len(jax.tree.leaves(data)[0])))
        given = {name: options.get(name) for name in ("plan", "mesh")}
        fitted = self._posterior(healthy, data, likelihood, row_weights=weights, **given)
        return self._read(fitted, likelihood, run)

    def load(self, path: str | os.PathLike[str], make: Callable[..., Any], data: PyTree = None) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.load`][]."""
        if data is None or self.likelihood is None:
            raise TypeError(
                f"`{caller()}` needs `data`, a few rows as for `fit`, and a method with `likelihood=`: the shapes of a "
                "posterior depend on both."
            )
        few = jax.tree.map(lambda x: x[:2], data)
        ensemble, options = begin(make, self.num_members, {}, jax.random.key(0))
        like = self._posterior(ensemble, few, self.likelihood, state=options.get("state"))
        found = load(path, like.members if like.state is None else (like.members, like.state))
        members, state = found if isinstance(found, tuple) else (found, None)
        return self._read(laplace.Laplace(members, state), self.likelihood, None)

    def _likelihood(self, loss: Any) -> str:
        found = loss if isinstance(loss, str) else self.likelihood
        if found is None or self.likelihood not in (None, found):
            got = "neither" if found is None else f"{self.likelihood!r} and {found!r}"
            raise TypeError(
                f"`{caller()}` needs one likelihood: `likelihood=` of the method, or a word as the loss; got {got}."
            )
        return found

    def _posterior(self, members: Any, data: Any, likelihood: Any, **options: Any) -> laplace.Laplace[Any]:
        precision = 1.0 if self.prior_precision is None else self.prior_precision
        fitted = laplace.fit(
            members, data, likelihood=likelihood, where=self.where, structure=self.structure, fn=self.fn,
            noise=self.noise, prior_precision=precision, **options,
        )  # fmt: skip
        if self.prior_precision is not None:
            return fitted
        return fitted.optimise_prior(fit_noise=likelihood == "regression" and self.noise is None)

    def _read(self, fitted: Any, likelihood: str, run: Any) -> Posterior[Any]:
        link = check_link(self.link, likelihood)
        return Posterior(fitted.members, fitted.state, run, fn=Predict(link or "probit", 0))
