import abc
import functools as ft
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._axes import Each, is_array
from .._build import build
from .._caller import caller
from .._check import check_function, check_key, check_number, check_word, kind_text
from .._ensemble import Ensemble
from .._files import load, save
from .._foreign import as_hashable, from_foreign_tree
from .._predict import predict
from .._pytree import PyTree
from ..scores import nll_gaussian
from ..train import DivergedError, Status
from ..train._engine import RowReader, Run, excluded_message, fit, is_batches
from ._check import check_length, check_options
from .laplace._member import LIKELIHOODS
from .priors import gaussian_penalty

M = TypeVar("M")


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
        refused = ("fn", "state", "combine", "weights", "inference", "memory")
        check_options(options, refused, "it returns what every member predicts; combine that")
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
    def fit(
        self,
        make: Callable[..., Any] | Ensemble[Any],
        loss: Callable[..., Any] | str,
        optimiser: Any,
        data: PyTree,
        *,
        key: Any,
        **options: Any,
    ) -> Any:
        """Trains on the data.

        **Arguments:**

        - `make`: the function that makes one ordinary member from a key, as for [`eqx_ensemble.build`][], also one of
            a member and its state. Methods that do not convert members also take an ensemble.
        - `loss`: the loss of ONE ordinary member, as for [`eqx_ensemble.fit`][], a mean over rows; or `"regression"`,
            `"binary"` or `"classification"`, the mean negative log-likelihood in nats.
        - `optimiser`, `data`: as for [`eqx_ensemble.fit`][].
        - `key`: the root key, for members, training and draws.
        - `options`: those of [`eqx_ensemble.fit`][].

        **Returns:** [`eqx_ensemble.methods.Posterior`][], or an object with the same `predict`.
        """

    def load(self, path: str | os.PathLike[str], make: Callable[..., Any], data: PyTree = None) -> Any:
        """Loads what `save` of a posterior wrote.

        **Arguments:**

        - `path`: the folder.
        - `make`: as for `fit`.
        - `data`: a few rows as for `fit`, which only [`eqx_ensemble.methods.Laplace`][] needs.

        **Returns:** the posterior, without its run.
        """
        del data
        return load_posterior(path, make)


def load_posterior(path: Any, make: Any, **reading: Any) -> Posterior[Any]:
    """The saved members that `make` makes, and how they predict."""
    found = load(path, (lambda key: make(key)) if isinstance(make, eqx.Module) else make)  # Modules are trees
    ensemble, state = found if isinstance(found, tuple) else (found, None)
    return Posterior(ensemble, state, **reading)


def check_maker(make: Any) -> Callable[..., Any]:
    """Raises unless `make` is a function: the method converts what it makes. Returns it, with a hash."""
    if isinstance(make, Ensemble):
        raise TypeError(
            f"`{caller()}` converts models before they are trained, got an `Ensemble`.\nPass the function that makes "
            "one ordinary member from a key."
        )
    check_function(make, "make", example="lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key)")
    return as_hashable(make)


def check_pair(data: Any) -> tuple[Any, Any]:
    """Raises unless `data` are inputs and targets. Returns them."""
    if not isinstance(data, tuple | list) or len(data) != 2 or is_batches(data):
        raise TypeError(f"`{caller()}` needs `data` to be arrays `(x, y)`, got {kind_text(data)}.")
    return data[0], data[1]


def check_noise(noise: Any) -> None:
    """Raises unless `noise` is `None` or a number above 0."""
    if noise is not None and check_number(noise, "noise", least=0) == 0:
        raise ValueError(f"`{caller()}` needs `noise` above 0, got 0: a standard deviation in the unit of the targets.")


def check_prior_std(std: Any) -> None:
    """Raises unless a number is above 0; a function, or a tree, is checked when it meets the weights."""
    if isinstance(std, int | float) and check_number(std, "prior_std", least=0) == 0:
        raise ValueError(f"`{caller()}` needs `prior_std` above 0, got {std!r}: the prior must be proper.")


def begin(make: Any, num_members: int, options: dict[str, Any], key: Any) -> tuple[Ensemble[Any], dict[str, Any]]:
    """The members to train, and the options of `fit` with their state."""
    if isinstance(make, Ensemble):
        if len(make) != num_members:
            raise ValueError(
                f"`{caller()}` needs as many members as the method has; expected {num_members}, got {len(make)}.\n"
                "Pass the function that makes one member, or another number."
            )
        return make, options
    built = build(make, num_members, mesh=options.get("mesh"), key=key)
    if not isinstance(built, tuple):
        return built, options
    check_options(options, ("state",), "`make` returns one")
    return built[0], options | {"state": built[1]}


def train(
    make: Any, num_members: int, loss: Any, optimiser: Any, data: Any, options: dict[str, Any], key: Any
) -> tuple[Run[Any], Run[Any]]:
    """Builds and trains members. Returns the run of all, and that of those that did not diverge."""
    ensemble, options = begin(make, num_members, options, key)
    run = fit(ensemble, loss, optimiser, data, key=key, **options)
    return run, healthy_part(run)


OF_SECOND_RUN = ("batch_size", "shuffle", "trainable", "plan", "mesh", "progress", "epochs", "steps")
"""The options of `fit` that apply to another run after the first."""


def healthy_part(run: Run[Any]) -> Run[Any]:
    """The run of the members that did not diverge; `fit` has warned of the others."""
    healthy = run.status != Status.DIVERGED
    if healthy.all():
        return run
    if not healthy.any():
        raise DivergedError(excluded_message(np.asarray(run.ensemble.ids), healthy), run)
    return run[healthy]


def epoch_lengths(data: Any, options: Mapping[str, Any], *, instead: str) -> tuple[int, int]:
    """The number of steps of a run, and of one of its epochs."""
    unit, length = check_length(epochs=options.get("epochs"), steps=options.get("steps"))
    batch_size = options.get("batch_size")
    per_epoch = -(-num_rows_of(data, options, instead=instead) // (32 if batch_size is None else batch_size))
    return (length * per_epoch if unit == "epochs" else length), per_epoch


def num_rows_of(data: Any, options: Mapping[str, Any], *, instead: str) -> int:
    """The number of rows that each member is trained on."""
    if options.get("rows") is not None:
        rows = options["rows"]
        return np.shape(rows.value if isinstance(rows, Each) else rows)[1]
    if isinstance(data, RowReader):
        return data.num_rows
    if is_batches(data):
        raise TypeError(f"`{caller()}` cannot count the rows of an iterable of batches.\n{instead}")
    nodes = jax.tree.leaves(from_foreign_tree(data, "data"), is_leaf=lambda x: isinstance(x, Each))
    shapes = [np.shape(x.value)[1:] if isinstance(x, Each) else np.shape(x) for x in nodes if _has_rows(x)]
    if not shapes:
        raise TypeError(f"`{caller()}` needs `data`: arrays `(rows, ...)`, got {kind_text(data)}.")
    return shapes[0][0]


def _has_rows(x: Any) -> bool:
    return isinstance(x, Each) or (is_array(x) and np.ndim(x) > 0)


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
            return jnp.sum(nll_gaussian(*outputs, y, reduction="none")) / num_rows
        total = jnp.sum(jax.vmap(LIKELIHOODS[self.likelihood].loss)(outputs, y))
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
def penalised(loss: Callable[..., Any], prior_std: Any, num_rows: int) -> Callable[..., Any]:
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
