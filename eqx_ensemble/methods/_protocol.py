import abc
import dataclasses
import functools as ft
import inspect
import os
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._build import build
from .._caller import caller
from .._check import check_function, check_key, check_number, check_positive_int, check_word, kind_text, value_error
from .._data import is_batches
from .._ensemble import Ensemble
from .._foreign import as_hashable, from_foreign_tree
from .._load import load
from .._map import take_marked
from .._marks import Each
from .._predict import predict
from .._pytree import PyTree
from .._save import save
from ..scores import nll_gaussian
from ..train import DivergedError, Status
from ..train._fit import fit
from ..train._run import Run
from ._check import check_length, check_options
from .laplace._likelihood import LIKELIHOODS
from .priors import gaussian_penalty

M = TypeVar("M")

Make = Callable[..., Any] | Ensemble[Any]
LossLike = Callable[..., Any] | str


class Posterior(eqx.Module, Generic[M]):
    """The result of a method: members, or draws of them, and how they predict.

    **Attributes:**

    - `ensemble`: the members or draws. Members that diverged are left out.
    - `state`: their stacked `equinox.nn.State`; `None` for stateless members.
    - `run`: the run of [`eqx_ensemble.fit`][]; `None` after loading, and for methods that do not call it.
    - `fn`: how a member predicts, as for [`eqx_ensemble.predict`][]; `None` for a call of the member.
    - `combine`: a function of the predictions of all members, such as
        [`eqx_ensemble.methods.efficient.as_members`][]; or `None`.
    - `num_passes`: the number of stochastic passes of each member; `None` for one in inference mode.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 2, 16, 2, key=key), 4, key=key)
    posterior = ee.methods.Posterior(ensemble)
    posterior.predict(jnp.ones((10, 3))).shape  # (4, 10, 2)
    ```
    """

    ensemble: Ensemble[M]
    state: eqx.nn.State | None = None
    run: Run[Any] | None = None
    fn: Callable[..., Any] | None = eqx.field(default=None, static=True)
    combine: Callable[..., Any] | None = eqx.field(default=None, static=True)
    num_passes: int | None = eqx.field(default=None, static=True)

    def __repr__(self) -> str:
        return f"Posterior of {self.ensemble!r}"

    def predict(self, x: PyTree, *, key: Any = None, **options: Any) -> PyTree:
        """Predictions of all members or draws, for scores, `combine` and `uncertainty`.

        **Arguments:**

        - `x`: the inputs, arrays `(rows, ...)`.
        - `key`: for methods whose predictions are random, such as dropout; others ignore it.
        - `options`: `batch_size`, `plan`, `mesh` and `progress` of [`eqx_ensemble.predict`][].

        **Returns:** each array `(members, rows, ...)`; draws and passes of one member are adjacent.
        """
        refused = ("fn", "state", "combine", "weights", "inference")
        check_options(options, refused, "combine what it returns, as in `combine.mixture(posterior.predict(x))`")
        options |= {"state": self.state, "fn": self.fn}
        if self.num_passes is None:
            found = predict(self.ensemble, x, **options)
            return found if self.combine is None else self.combine(found)
        if key is None:
            raise TypeError(f"`{caller()}` needs `key`: the predictions of this method are random.")
        check_key(key)
        passes = [
            predict(self.ensemble, x, inference=False, key=own, **options)
            for own in jax.random.split(key, self.num_passes)
        ]
        flatten = lambda *parts: jnp.stack(parts, axis=1).reshape((-1, *parts[0].shape[1:]))
        return jax.tree.map(flatten, *passes)

    def save(self, path: str | os.PathLike[str], *, meta: Any = None) -> None:
        """Saves the members and their state, without the run, as [`eqx_ensemble.save`][] does.

        The method loads them: [`eqx_ensemble.methods.AbstractMethod.load`][].
        """
        save(path, self.ensemble if self.state is None else (self.ensemble, self.state), meta=meta)


class AbstractMethod(eqx.Module):
    """A way to train several models, or draws of models, that can replace another in one line.

    A method of your own is a subclass with `fit`. Fields are its options, checked in `__check_init__`.

    ```python
    class Seeds(ee.methods.AbstractMethod):
        num_members: int

        def fit(self, make, loss, optimiser, data, *, key, **options):
            ensemble = ee.build(make, self.num_members, key=key)
            run = ee.fit(ensemble, loss, optimiser, data, key=key, **options)
            return ee.methods.Posterior(run.ensemble, run=run)
    ```
    """

    @abc.abstractmethod
    def fit(self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any) -> Any:
        """Trains on the data.

        **Arguments:**

        - `make`: the function that makes one ordinary member from a key, as for [`eqx_ensemble.build`][], also one of
            a member and its state. Methods that do not convert members also take an ensemble.
        - `loss`: the loss of ONE ordinary member, as for [`eqx_ensemble.fit`][], a mean over rows; or `"regression"`,
            `"binary"` or `"classification"`: the mean negative log-likelihood of pairs `(x, y)`, in nats.
        - `optimiser`, `data`: as for [`eqx_ensemble.fit`][].
        - `key`: the root key, for members, training and draws.
        - `options`: those of [`eqx_ensemble.fit`][].

        **Returns:** [`eqx_ensemble.methods.Posterior`][], or an object with the same `predict`.
        """

    def cost(self, steps: int, per_epoch: int) -> int:
        """The gradient steps of one network that `fit(steps=steps)` takes in all: `budget` of `compare`.

        **Arguments:**

        - `steps`: the length of the training. The cost is linear in it.
        - `per_epoch`: the steps of an epoch.

        **Returns:** by default `steps` for each of `num_members`.
        """
        return steps * getattr(self, "num_members", 1)

    def load(self, path: str | os.PathLike[str], make: Callable[..., Any], data: PyTree = None) -> Any:
        """Loads what `save` of a posterior wrote.

        **Arguments:**

        - `path`: the file.
        - `make`: as for `fit`: the function, or the ensemble that was adapted.
        - `data`: a few rows as for `fit`, which only [`eqx_ensemble.methods.Laplace`][] needs.

        **Returns:** the posterior, without its run.
        """
        like, reading = self.template(make, data) if isinstance(self, AbstractOwnMethod) else (make, {})
        found = load(path, like, members=slice(None))  # however many were saved
        ensemble, state = found if isinstance(found, tuple) else (found, None)
        return Posterior(ensemble, state, **reading)


@dataclasses.dataclass(frozen=True)
class MakeMember:
    """A function that makes a converted member from a key; equal ones are one function, which shares programs."""

    make: Callable[..., Any]
    convert: Callable[..., Any]
    options: tuple[Any, ...]

    def __call__(self, key: Any) -> Any:
        return self.convert(self.make, key, *self.options)


class Task(NamedTuple):
    """The arguments of `fit`."""

    make: Any
    loss: Any
    optimiser: Any
    data: Any
    options: dict[str, Any]
    key: Any

    def build(self, num_members: int, make: Any) -> tuple[Ensemble[Any], dict[str, Any]]:
        """The members to train, and the options of `fit` with their state."""
        if isinstance(make, Ensemble):
            if len(make) != num_members:
                raise ValueError(
                    f"`{caller()}` needs as many members as the method has; expected {num_members}, got {len(make)}.\n"
                    "Pass the function that makes one member, or another number."
                )
            return make, self.options
        built = build(make, num_members, mesh=self.options.get("mesh"), key=self.key)
        if not isinstance(built, tuple):
            return built, self.options
        check_options(self.options, ("state",), "`make` returns one")
        return built[0], self.options | {"state": built[1]}

    def run(self, method: "AbstractOwnMethod", make: Any = None, **changes: Any) -> tuple[Run[Any], Run[Any]]:
        """Trains members, with some arguments of `fit` changed: the run, and that of members that did not diverge."""
        make = method.template(self.make, self.data)[0] if make is None else make
        ensemble, options = self.build(method.num_members, make)
        arguments = [changes.pop(name, getattr(self, name)) for name in ("loss", "optimiser", "data")]
        run = fit(ensemble, as_loss(arguments[0]), *arguments[1:], **{"key": self.key} | options | changes)
        return run, healthy_part(run)

    def posterior(self, method: "AbstractOwnMethod", make: Any = None, **changes: Any) -> Posterior[Any]:
        """Trains members: the posterior of those that did not diverge."""
        run, healthy = self.run(method, make, **changes)
        return Posterior(healthy.ensemble, healthy.state, run, **method.template(self.make, self.data)[1])

    def of_healthy(self, run: Run[Any]) -> "Task":
        """The task with the data of the members that did not diverge."""
        return self._replace(data=take_marked(self.data, np.flatnonzero(run.status != Status.DIVERGED)))

    def num_rows(self, instead: str = "Load it as arrays.") -> int:
        """The number of rows that each member is trained on."""
        rows = self.options.get("rows")
        if rows is not None:
            return np.shape(rows.value if isinstance(rows, Each) else rows)[1]
        if is_batches(self.data):
            raise TypeError(f"`{caller()}` cannot count the rows of an iterable of batches.\n{instead}")
        nodes = jax.tree.leaves(from_foreign_tree(self.data, "data"), is_leaf=lambda x: isinstance(x, Each))
        if not nodes:
            raise TypeError(f"`{caller()}` needs `data`: arrays `(rows, ...)`, got {kind_text(self.data)}.")
        first = nodes[0]
        return (np.shape(first.value)[1:] if isinstance(first, Each) else np.shape(first))[0]

    def num_steps(self, instead: str = "Load it as arrays.") -> tuple[int, int]:
        """The number of steps of a run, and of one of its epochs."""
        unit, length = check_length(epochs=self.options.get("epochs"), steps=self.options.get("steps"))
        per_epoch = -(-self.num_rows(instead) // (self.options.get("batch_size") or 32))
        return (length * per_epoch if unit == "epochs" else length), per_epoch

    def pair(self) -> tuple[Any, Any]:
        """The inputs and targets."""
        if not isinstance(self.data, tuple | list) or len(self.data) != 2 or is_batches(self.data):
            raise TypeError(f"`{caller()}` needs `data` to be arrays `(x, y)`, got {kind_text(self.data)}.")
        return self.data[0], self.data[1]


def healthy_part(run: Run[Any]) -> Run[Any]:
    """The run of the members that did not diverge; `fit` has warned of the others."""
    healthy = run.status != Status.DIVERGED
    if not healthy.any():
        raise DivergedError(f"`{caller()}`: all {len(healthy)} members diverged.", run)
    return run if healthy.all() else run[healthy]


OF_SECOND_RUN = ("batch_size", "shuffle", "trainable", "plan", "mesh", "progress", "epochs", "steps")
"""The options of `fit` that apply to another run after the first."""


class AbstractOwnMethod(AbstractMethod):
    """A method of this library."""

    num_members: eqx.AbstractVar[int]

    @abc.abstractmethod
    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        """The function that makes one of its members, and how a `Posterior` of them predicts."""

    @abc.abstractmethod
    def train(self, task: Task) -> Posterior[Any]:
        """As `fit`."""

    def fit(
        self, make: Make, loss: LossLike, optimiser: Any, data: PyTree, *, key: Any, **options: Any
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]."""
        task = Task(make, loss, as_hashable(optimiser), data, options, key)
        if isinstance(loss, str) and not is_batches(data):
            task.pair()  # raises
        return self.train(task)


AbstractOwnMethod.fit.__qualname__ = "AbstractMethod.fit"  # Python's own messages name the public class


def as_made(self: AbstractOwnMethod, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
    """The template of members that are not converted."""
    del self, data
    return make, {}


def check_maker(make: Any) -> Callable[..., Any]:
    """Raises unless `make` is a function: the method converts what it makes. Returns it, with a hash."""
    if isinstance(make, Ensemble):
        raise TypeError(
            f"`{caller()}` converts models before they are trained, got an `Ensemble`.\nPass the function that makes "
            "one ordinary member from a key."
        )
    check_function(make, "make", example="lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key)")
    return as_hashable(make)


def check_counts(method: Any, *names: str) -> None:
    """Raises unless `num_members`, and further options that are given, are positive integers."""
    for name in ("num_members", *names):
        if getattr(method, name) is not None:
            check_positive_int(getattr(method, name), name)


def check_above_zero(method: Any, *names: str) -> None:
    """Raises unless options that are given as numbers are above zero."""
    for name in names:
        value = getattr(method, name)
        if value is not None and not callable(value) and check_number(value, name, least=0) == 0:
            raise ValueError(f"`{caller()}` needs `{name}` above 0, got {value!r}.")


class LikelihoodLoss(eqx.Module):
    """The loss that a word names: the mean over rows of negative log-likelihoods, in nats.

    For regression a member returns the mean, with noise of a fixed standard deviation, or a pair of mean and variance.
    """

    likelihood: str = eqx.field(static=True)
    noise: float = eqx.field(static=True)

    def __call__(self, model: Any, *inputs: Any) -> Any:
        return loss_of_outputs(self._mean, model, *inputs)

    def _mean(self, outputs: Any, y: Array) -> Float[Array, ""]:
        num_rows = y.shape[0]
        if self.likelihood == "regression" and isinstance(outputs, tuple):
            mean, variance = outputs
            return jnp.sum(nll_gaussian(mean, variance, y, reduction="none")) / num_rows
        expected = outputs.size // (outputs.shape[-1] if self.likelihood == "classification" else 1)
        if y.size != expected:
            got = f"got outputs {outputs.shape} and targets {y.shape}"
            fix = 'For `"classification"` they are logits of all classes and integer labels; else they have one shape.'
            raise value_error(f"outputs that fit the targets of {self.likelihood!r}", got, fix)
        outputs = outputs if self.likelihood == "classification" else outputs.reshape(num_rows, -1)
        targets = y if self.likelihood == "classification" else y.reshape(outputs.shape)
        total = jnp.sum(jax.vmap(LIKELIHOODS[self.likelihood].loss)(outputs, targets))
        return total / (num_rows * (2 * self.noise**2 if self.likelihood == "regression" else 1))


def loss_of_outputs(mean: Callable[[Any, Any], Array], model: Any, *inputs: Any) -> Any:
    """The loss `mean(outputs, y)` of one member, from the arguments that `fit` gives a loss."""
    *state, batch, key = inputs
    x, y = batch
    takes_key = "key" in inspect.signature(model).parameters
    call = lambda x, key, *state: model(x, *state, **({"key": key} if takes_key else {}))
    keys = jax.random.split(key, jax.tree.leaves(x)[0].shape[0])
    if not state:
        return mean(jax.vmap(call)(x, keys), y)
    mapped = jax.vmap(call, axis_name="batch", in_axes=(0, 0, None), out_axes=(0, None))
    outputs, new = mapped(x, keys, *state)
    return mean(outputs, y), new


def as_loss(loss: Any, *, noise: float | None = None) -> Any:
    """A user's loss, or that of a likelihood."""
    if isinstance(loss, str):
        check_word(loss, "loss", tuple(LIKELIHOODS))
        return LikelihoodLoss(loss, 1.0 if noise is None else float(noise))
    return as_hashable(loss)


@ft.lru_cache(maxsize=64)
def add_prior(loss: Callable[..., Any], prior_std: Any, num_rows: int) -> Callable[..., Any]:
    """The loss with a Gaussian prior over all weights; the same one for the same arguments."""

    @ft.wraps(loss)
    def total(model: Any, *inputs: Any, **named: Any) -> Any:
        found = loss(model, *inputs, **named)
        return add_to_loss(found, gaussian_penalty(model, prior_std, num_rows=num_rows))

    return loss if prior_std is None else total


def add_to_loss(found: Any, penalty: Array) -> Any:
    """Adds to the value of a loss, which may be followed by a state and auxiliary outputs."""
    value, *rest = found if isinstance(found, tuple) else (found,)
    value = value + penalty.astype(value.dtype)
    return (value, *rest) if rest else value
