import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import resample
from .._caller import caller
from .._check import check_function, check_number, check_optional_function, check_word, kind_text
from .._marks import Each
from ..combine import Gaussian
from . import distillation, laplace, sngp
from ._paths import own_rows, wrap_optimiser
from ._protocol import (
    OF_SECOND_RUN,
    AbstractMethod,
    AbstractOwnMethod,
    MakeMember,
    Posterior,
    Task,
    add_to_loss,
    as_loss,
    as_made,
    check_above_zero,
    check_counts,
    check_maker,
    loss_of_outputs,
)
from .laplace._fit import STRUCTURES
from .laplace._likelihood import LIKELIHOODS
from .laplace._member import Predict

Likelihood = Literal["regression", "binary", "classification"]
T = TypeVar("T", bound="Laplace | SNGP")


def _with_likelihood(method: T, loss: Any) -> T:
    """The method with the likelihood that is its option, or the word that is the loss."""
    found = loss if isinstance(loss, str) else method.likelihood
    if found is None or method.likelihood not in (None, found):
        got = "neither" if found is None else f"{method.likelihood!r} and {found!r}"
        raise TypeError(
            f"`{caller()}` needs one likelihood: `likelihood=` of the method, or a word as the loss; got {got}."
        )
    return dataclasses.replace(method, likelihood=found)


class Laplace(AbstractOwnMethod):
    """Laplace approximation: Gaussian posteriors over some weights of trained members.

    Predictions are those of [`eqx_ensemble.methods.laplace.Laplace.predict`][]: log-probabilities for classes, means
    and variances for regression. `ee.methods.laplace.Laplace(posterior.ensemble, posterior.state)` has the rest.

    **Arguments:**

    - `num_members`: the number of members.
    - `where`, `structure`, `noise`, `fn`: as for [`eqx_ensemble.methods.laplace.fit`][].
    - `likelihood`: as there; by default the word that is given as loss, which is not saved: give it
        here too if you will load.
    - `prior_precision`: as there; by default that of the largest marginal likelihood.

    ```python
    ee.methods.Laplace(4, where=lambda model: model.layers[-1], likelihood="classification")
    ```
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any]
    likelihood: Likelihood | None = None
    structure: Literal["full", "diag"] = "full"
    prior_precision: float | int | None = None
    noise: float | int | None = None
    fn: Callable[..., Any] | None = None

    def __check_init__(self) -> None:
        check_counts(self)
        check_function(self.where, "where", example="lambda model: model.layers[-1]")
        check_word(self.structure, "structure", STRUCTURES)
        check_above_zero(self, "prior_precision", "noise")
        check_optional_function(self.fn, "fn", example="lambda model, x: model(x)[0]")
        if self.likelihood is not None:
            check_word(self.likelihood, "likelihood", tuple(LIKELIHOODS))

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        own = _with_likelihood(self, None)
        if data is None:
            raise TypeError(
                f"`{caller()}` needs `data`, a few rows as for `fit`: the shapes of a posterior depend on it."
            )
        few = jax.tree.map(lambda x: x[:2], data)
        ensemble, options = Task(make, None, None, None, {}, jax.random.key(0)).build(1, make)
        fitted = own._posterior(ensemble, few, state=options.get("state"))
        return (fitted.members if fitted.state is None else (fitted.members, fitted.state)), own._reading()

    def train(self, task: Task) -> Posterior[Any]:
        own = _with_likelihood(self, task.loss)
        reading = own._reading()
        run, healthy = task.run(self, task.make)
        rows = healthy.rows
        weights = None if rows is None else Each(resample.counts(rows, task._replace(options={}).num_rows()))
        fitted = own._posterior(healthy, task.of_healthy(run).data, row_weights=weights)
        return Posterior(fitted.members, fitted.state, run, **reading)

    def _reading(self) -> dict[str, Any]:
        return {"fn": Predict()}

    def _posterior(self, members: Any, data: Any, **options: Any) -> laplace.Laplace[Any]:
        assert self.likelihood is not None
        precision = 1.0 if self.prior_precision is None else self.prior_precision
        options |= {"where": self.where, "structure": self.structure, "fn": self.fn, "noise": self.noise}
        fitted = laplace.fit(members, data, likelihood=self.likelihood, prior_precision=precision, **options)
        if self.prior_precision is not None:
            return fitted
        return fitted.optimise_prior(fit_noise=self.likelihood == "regression" and self.noise is None)


class ReadSNGP(eqx.Module):
    """Logits of mean probabilities, or Gaussians with noise, from the predictions of all members."""

    likelihood: str = eqx.field(static=True)
    noise: float | int = eqx.field(static=True)
    factor: float | int = eqx.field(static=True)

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


_OF_SNGP: dict[Any, Any] = {"regression": "gaussian", "binary": "bernoulli", "classification": "categorical"}


def _with_process(make: Callable[..., Any], key: Any, where: Callable[..., Any], *options: Any) -> Any:
    own, head = jax.random.split(key)
    made = make(own)
    model, *state = made if isinstance(made, tuple) else (made,)
    layer = where(model)
    sizes = (layer.in_features, layer.out_features) if isinstance(layer, eqx.nn.Linear) else ("", "")
    if isinstance(sizes[0], str) or isinstance(sizes[1], str):
        raise TypeError(
            f"`{caller()}` needs `where` to select the last `equinox.nn.Linear`, got {kind_text(layer)}.\n"
            "A Gaussian process replaces it."
        )
    network = eqx.tree_at(where, model, eqx.nn.Identity())
    member = sngp.SNGP(network, sizes[0], sizes[1], key=head, **dict(options))
    return (member, *state) if state else member


class SNGP(AbstractOwnMethod):
    """Members with bounded weights and a Gaussian process as their last layer, which the loss sees by its mean.

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
    """

    num_members: int = 1
    _: dataclasses.KW_ONLY
    where: Callable[[Any], Any]
    likelihood: Likelihood | None = None
    bound: float | int | None = 0.95
    num_features: int = 1024
    length_scale: float | int = 1.0
    ridge: float | int = 1.0
    noise: float | int = 1.0
    factor: float | int = math.pi / 8

    def __check_init__(self) -> None:
        check_counts(self, "num_features")
        check_function(self.where, "where", example="lambda model: model.layers[-1]")
        check_above_zero(self, "length_scale", "ridge", "noise", "bound")
        check_number(self.factor, "factor", least=0)
        if self.likelihood is not None:
            check_word(self.likelihood, "likelihood", tuple(_OF_SNGP))

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        own = _with_likelihood(self, None)
        options = {name: getattr(self, name) for name in ("num_features", "length_scale", "ridge")}
        options |= {"likelihood": _OF_SNGP[own.likelihood], "noise_variance": self.noise**2}
        made = MakeMember(check_maker(make), _with_process, (self.where, *options.items()))
        return made, {"combine": ReadSNGP(str(own.likelihood), self.noise, self.factor)}

    def train(self, task: Task) -> Posterior[Any]:
        own = _with_likelihood(self, task.loss)
        task.pair()
        optimiser = task.optimiser
        if self.bound is not None:
            optimiser = wrap_optimiser(sngp.bound_spectral_norm, optimiser, bound=self.bound)
        loss = _loss_of_mean(as_loss(task.loss, noise=self.noise), task.num_rows())
        run, healthy = task.run(own, loss=loss, optimiser=optimiser)
        x, _ = task.of_healthy(run).pair()
        x = x if healthy.rows is None else own_rows(x, healthy.rows)
        ensemble = sngp.update_covariance(healthy.ensemble, x, state=healthy.state)
        return Posterior(ensemble, healthy.state, run, **own.template(task.make, None)[1])


class Distilled(AbstractOwnMethod):
    """Students that learn what the members or draws of another method predict for the training rows.

    The options of `fit` are those of the teachers; students are trained for as long, on batches as large.

    **Arguments:**

    - `teacher`: the other method.
    - `num_members`: the number of students, each of all teachers.
    - `target`: what a student learns: the `"mixture"` of classifiers, as logits; their `"distribution"`, as logits of
        a Dirichlet distribution; or the mixture of `"gaussian"` predictions, as a mean and a variance.

    ```python
    ee.methods.Distilled(ee.methods.Seeds(8))
    ```
    """

    teacher: AbstractMethod
    num_members: int = 1
    _: dataclasses.KW_ONLY
    target: Literal["mixture", "distribution", "gaussian"] = "mixture"
    template = as_made

    def __check_init__(self) -> None:
        if not isinstance(self.teacher, AbstractMethod):
            got = kind_text(self.teacher)
            raise TypeError(f"`{caller()}` needs a method as `teacher`, such as `methods.Seeds(8)`; got {got}.")
        check_counts(self)
        check_word(self.target, "target", tuple(_TARGETS))

    def train(self, task: Task) -> Posterior[Any]:
        (x, _), make = task.pair(), check_maker(task.make)
        _check_target(self.target, task.loss)
        teacher = self.teacher.fit(make, task.loss, task.optimiser, task.data, key=task.key, **task.options)
        targets = jax.tree.map(lambda found: jnp.moveaxis(found, 0, 1), teacher.predict(x, key=task.key))
        options = {name: value for name, value in task.options.items() if name in OF_SECOND_RUN}
        key = jax.random.fold_in(task.key, 1)  # students begin elsewhere than teachers
        of_students = task._replace(loss=StudentLoss(self.target), data=(x, targets), options=options, key=key)
        return of_students.posterior(self)

    def cost(self, steps: int, per_epoch: int) -> int:
        return self.teacher.cost(steps, per_epoch) + steps * self.num_members


def _check_target(target: str, loss: Any) -> None:
    """Raises if a word as loss says that the teachers do not predict what the students learn."""
    fitting = {"regression": ("gaussian",), "classification": ("mixture", "distribution"), "binary": ()}
    if isinstance(loss, str) and target not in fitting.get(loss, (target,)):
        fits = " or ".join(f'`target="{own}"`' for own in fitting[loss]) or "logits of two classes"
        raise ValueError(
            f"`{caller()}` needs {fits} for teachers with the loss {loss!r}, got `target={target!r}`.\nA Gaussian "
            "target needs members that return a mean and a variance."
        )


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
