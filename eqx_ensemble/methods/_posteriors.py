import dataclasses
import functools as ft
import math
import os
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import resample
from .._axes import Each
from .._caller import caller
from .._check import check_function, check_number, check_optional_function, check_positive_int, check_word, kind_text
from .._ensemble import Ensemble
from .._files import load
from .._pytree import PyTree
from ..combine import Gaussian
from . import distillation, laplace, sngp
from ._paths import wrap_optimiser
from ._protocol import (
    OF_SECOND_RUN,
    AbstractMethod,
    Posterior,
    add_to_loss,
    as_loss,
    begin,
    check_maker,
    check_pair,
    load_posterior,
    loss_of_outputs,
    num_rows_of,
    train,
)
from .laplace._check import check_link
from .laplace._member import LIKELIHOODS, Predict
from .laplace._selection import CURVATURES
from .sngp._model import check_positive_number

Make = Callable[..., Any] | Ensemble[Any]
LossLike = Callable[..., Any] | str


def one_likelihood(own: str | None, loss: Any) -> str:
    """The likelihood of a method, or the word that is its loss."""
    found = loss if isinstance(loss, str) else own
    if found is None or own not in (None, found):
        got = "neither" if found is None else f"{own!r} and {found!r}"
        raise TypeError(
            f"`{caller()}` needs one likelihood: `likelihood=` of the method, or a word as the loss; got {got}."
        )
    return found


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
        likelihood = one_likelihood(self.likelihood, loss)
        run, healthy = train(make, self.num_members, as_loss(loss), optimiser, data, options, key)
        rows = healthy.rows
        weights = None if rows is None else Each(resample.counts(rows, len(jax.tree.leaves(data)[0])))
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


class ReadSNGP(eqx.Module):
    """Logits of mean probabilities, or Gaussians with noise, from the predictions of all members."""

    likelihood: str = eqx.field(static=True)
    noise: float = eqx.field(static=True)
    factor: float = eqx.field(static=True)

    def __call__(self, out: sngp.SNGPOutput) -> Any:
        if self.likelihood == "regression":
            return Gaussian(out.mean, out.variance + self.noise**2)
        return sngp.mean_field(out.mean, out.variance, factor=self.factor)


class MeanModel(eqx.Module):
    """A member with a Gaussian process as an ordinary loss sees it: its output is the mean."""

    model: Any

    def __call__(self, *args: Any, **options: Any) -> Any:
        out = self.model(*args, **options)
        return out.mean if isinstance(out, sngp.SNGPOutput) else (out[0].mean, out[1])


@ft.lru_cache(maxsize=64)
def _loss_of_mean(loss: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
    @ft.wraps(loss)
    def total(model: Any, *inputs: Any, **named: Any) -> Any:
        penalty = model.ridge / (2 * num_rows) * jnp.sum(model.weight**2)
        return add_to_loss(loss(MeanModel(model), *inputs, **named), penalty)

    return total


class MakeSNGP(eqx.Module):
    """The function that makes a member with a Gaussian process as last layer; equal ones are one function."""

    method: "SNGP"
    make: Callable[..., Any] = eqx.field(static=True)
    likelihood: str = eqx.field(static=True)

    def __call__(self, key: Any) -> Any:
        own, head = jax.random.split(key)
        made = self.make(own)
        model, *state = made if isinstance(made, tuple) else (made,)
        layer = self.method.where(model)
        if not isinstance(layer, eqx.nn.Linear) or not isinstance(layer.out_features, int):
            raise TypeError(
                f"`{caller()}` needs `where` to select the last `equinox.nn.Linear`, got {kind_text(layer)}.\n"
                "A Gaussian process replaces it."
            )
        network = eqx.tree_at(self.method.where, model, eqx.nn.Identity())
        options = {name: getattr(self.method, name) for name in ("num_features", "length_scale", "ridge")}
        options |= {"likelihood": _OF_SNGP[self.likelihood], "noise_variance": self.method.noise**2}
        member = sngp.SNGP(network, layer.in_features, layer.out_features, key=head, **options)
        return (member, *state) if state else member


_OF_SNGP: dict[str, Any] = {"regression": "gaussian", "binary": "bernoulli", "classification": "categorical"}


class SNGP(AbstractMethod):
    """SNGP: members with bounded weights and a Gaussian process as their last layer.

    **Arguments:**

    - `num_members`: the number of members.
    - `where`: selects the last linear layer, which the process replaces: `lambda model: model.layers[-1]`.
    - `likelihood`: `"regression"`, `"binary"` or `"classification"`; by default the word that is given as loss.
    - `bound`: of the spectral norms, as for [`eqx_ensemble.methods.sngp.bound_spectral_norm`][]; `None` for none.
    - `num_features`, `length_scale`, `ridge`: as for [`eqx_ensemble.methods.sngp.SNGP`][].
    - `noise`: for regression, the standard deviation of the noise in the targets.
    - `factor`: for classes, as for [`eqx_ensemble.methods.sngp.mean_field`][].

    ```python
    ee.methods.SNGP(4, where=lambda model: model.layers[-1], num_features=256)
    ```

    ??? cite
        [Liu et al. 2020](https://arxiv.org/abs/2006.10108)
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any]
    likelihood: Literal["regression", "binary", "classification"] | None = None
    bound: float | None = 0.95
    num_features: int = 1024
    length_scale: float | int = 1.0
    ridge: float | int = 1.0
    noise: float | int = 1.0
    factor: float = math.pi / 8

    def __check_init__(self) -> None:
        check_positive_int(self.num_members, "num_members")
        check_function(self.where, "where", example="lambda model: model.layers[-1]")
        check_positive_int(self.num_features, "num_features")
        for name in ("length_scale", "ridge", "noise") + ("bound",) * (self.bound is not None):
            check_positive_number(getattr(self, name), name)
        check_number(self.factor, "factor", least=0)
        if self.likelihood is not None:
            check_word(self.likelihood, "likelihood", tuple(_OF_SNGP))

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]; the loss sees the means as outputs."""
        likelihood = one_likelihood(self.likelihood, loss)
        x, _ = check_pair(data)
        num_rows = num_rows_of(data, options, instead="Load it as arrays.")
        if self.bound is not None:
            optimiser = wrap_optimiser(sngp.bound_spectral_norm, optimiser, bound=self.bound)
        own = _loss_of_mean(as_loss(loss, noise=self.noise), num_rows)
        made = MakeSNGP(self, check_maker(make), likelihood)
        run, healthy = train(made, self.num_members, own, optimiser, data, options, key)
        x = x if healthy.rows is None else Each(jax.tree.map(lambda x: jnp.asarray(x)[healthy.rows], x))
        ensemble = sngp.update_covariance(healthy.ensemble, x, state=healthy.state, plan=options.get("plan"))
        return Posterior(ensemble, healthy.state, run, combine=ReadSNGP(likelihood, self.noise, self.factor))

    def load(self, path: str | os.PathLike[str], make: Callable[..., Any], data: PyTree = None) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.load`][], of a method with `likelihood=`."""
        del data
        likelihood = one_likelihood(self.likelihood, None)
        made = MakeSNGP(self, check_maker(make), likelihood)
        return load_posterior(path, made, combine=ReadSNGP(likelihood, self.noise, self.factor))


class Distilled(AbstractMethod):
    """Students that learn what the members or draws of another method predict for the training rows.

    **Arguments:**

    - `teacher`: the other method.
    - `num_students`: the number of students, each of all teachers.
    - `target`: what a student learns: the `"mixture"` of classifiers, as logits; their `"distribution"`, as logits of
        a Dirichlet distribution; or the mixture of `"gaussian"` predictions, as a mean and a variance.

    ```python
    ee.methods.Distilled(ee.methods.Seeds(8))
    ```

    ??? cite
        [Hinton et al. 2015](https://arxiv.org/abs/1503.02531); [Malinin et al. 2020](https://arxiv.org/abs/1905.00076)
    """

    teacher: AbstractMethod
    num_students: int = 1
    _: dataclasses.KW_ONLY
    target: Literal["mixture", "distribution", "gaussian"] = "mixture"

    def __check_init__(self) -> None:
        if not isinstance(self.teacher, AbstractMethod):
            raise TypeError(
                f"`{caller()}` needs a method as `teacher`, such as `methods.Seeds(8)`; got {kind_text(self.teacher)}."
            )
        check_positive_int(self.num_students, "num_students")
        check_word(self.target, "target", tuple(_TARGETS))

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]: `options` are those of the teachers.

        Students are trained for as long, on batches as large.
        """
        x, _ = check_pair(data)
        make = check_maker(make)
        posterior = self.teacher.fit(make, loss, optimiser, data, key=key, **options)
        targets = jax.tree.map(lambda found: jnp.moveaxis(found, 0, 1), posterior.predict(x, key=key))
        own_key = jax.random.fold_in(key, 1)  # students begin elsewhere than teachers
        options = {name: value for name, value in options.items() if name in OF_SECOND_RUN}
        student = StudentLoss(self.target)
        run, healthy = train(make, self.num_students, student, optimiser, (x, targets), options, own_key)
        return Posterior(healthy.ensemble, healthy.state, run)


class StudentLoss(eqx.Module):
    """The loss of a student."""

    target: str = eqx.field(static=True)

    def __call__(self, model: Any, *inputs: Any) -> Any:
        return loss_of_outputs(_TARGETS[self.target], model, *inputs)


_TARGETS: dict[str, Callable[..., Any]] = {
    "mixture": distillation.mixture_loss,
    "distribution": distillation.distribution_loss,
    "gaussian": lambda outputs, targets: distillation.gaussian_loss(*outputs, *targets),
}
