"""Arguments of `fit` that belong together."""

import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import numpy as np

from .._check import MemberMismatchError
from .._foreign import as_numpy
from .._marks import Each
from .._pytree import PyTree


class Validation(eqx.Module):
    """Validation data of [`eqx_ensemble.fit`][], with a score of their own.

    **Arguments:**

    - `data`: as `validation` of [`eqx_ensemble.fit`][].
    - `score`: the validation score, called like `loss`; by default the loss.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher, such as for accuracy. Required with `score`.
    - `min_delta`: what an improvement must exceed, for `patience` and for new best weights.

    ```python
    def within_one(model, batch, key):
        x, y = batch
        return jnp.mean(jnp.abs(jax.vmap(model)(x) - y) < 1)


    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    validation = ee.train.Validation(data, score=within_one, mode="max")  # fit(..., validation=validation)
    ```
    """

    data: PyTree
    score: Callable[..., Any] | None = eqx.field(static=True)
    mode: Literal["min", "max"] = eqx.field(static=True)
    min_delta: float = eqx.field(static=True)

    def __init__(
        self,
        data: PyTree,
        *,
        score: Callable[..., Any] | None = None,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        if mode not in (None, "min", "max"):
            raise ValueError(f"`Validation` needs `mode` to be 'min' or 'max', got {mode!r}.")
        if score is not None and mode is None:
            raise TypeError(
                "`Validation` needs `mode` with `score`: a score may be better when it is lower or when it is higher.\n"
                'Pass `mode="min"` for an error, `mode="max"` for an accuracy.'
            )
        if score is None and mode == "max":
            raise TypeError('`Validation` got `mode="max"` without `score`: the loss is minimised.')
        if not float(min_delta) >= 0:
            raise ValueError(f"`Validation` needs `min_delta` to be at least 0, got {min_delta!r}.")
        self.data, self.score, self.mode, self.min_delta = data, score, mode or "min", float(min_delta)


class Stopping(eqx.Module):
    """When members of [`eqx_ensemble.fit`][] stop, at the end of an epoch.

    **Arguments:** each a scalar or one value per member `(members,)`.

    - `target`: a member stops when its validation score is `<= target`, or `>= target` with `mode="max"`.
    - `steps`: a member stops after this many steps, counting all its runs.
    - `seconds`: a member stops after this much time since the call, including the time before it was resumed.

    ```python
    stop = ee.train.Stopping(steps=[100, 100, 200, 400], seconds=60)  # for four members
    ```
    """

    target: Any = None
    steps: Any = None
    seconds: Any = None

    def __check_init__(self) -> None:
        for name, lowest in (("target", -np.inf), ("steps", 0), ("seconds", 0)):
            limit = getattr(self, name)
            if limit is None:
                continue
            numbers = as_numpy(limit.value if isinstance(limit, Each) else limit, name)
            if numbers.dtype.kind in "iuf" and not (numbers >= lowest).all():
                raise ValueError(f"`Stopping` needs `{name}` to be at least {lowest} and not NaN, got {limit!r}.")


def limits_of(stop: Stopping, num_members: int) -> dict[str, Each]:
    """The limits that are given, as arrays `(members,)`."""
    given = {"target": stop.target, "steps": stop.steps, "seconds": stop.seconds}
    return {name: Each(_limit(x, name, num_members)) for name, x in given.items() if x is not None}


def _limit(value: Any, name: str, num_members: int) -> np.ndarray:
    numbers = as_numpy(value.value if isinstance(value, Each) else value, name)
    if numbers.shape not in ((), (num_members,)) or numbers.dtype.kind not in "iuf":
        raise MemberMismatchError(
            f"`Stopping` needs `{name}` to be a number or one per member ({num_members},), got {value!r}."
        )
    dtype = np.int32 if name == "steps" else np.float64
    return np.broadcast_to(numbers.astype(dtype), (num_members,)).copy()


class Checkpoint(NamedTuple):
    """Where [`eqx_ensemble.fit`][] saves a run, and how often.

    **Attributes:**

    - `path`: the file. It holds the whole run, and is replaced by each save.
    - `every`: the number of epochs between two saves; by default about a minute of time. The end is always saved.

    ```python
    checkpoint = ee.train.Checkpoint("run.eqx", every=10)  # fit(..., checkpoint=checkpoint)
    ```
    """

    path: str | os.PathLike[str]
    every: int | None = None


class Every(NamedTuple):
    """A callback, the epochs between its calls, and whether the end of the run is one of them."""

    epochs: int
    callback: Callable[..., Any]
    at_end: bool = True


def every(epochs: int, callback: Callable[..., Any], *, at_end: bool = True) -> Every:
    """A callback that [`eqx_ensemble.fit`][] calls after every `epochs` epochs, and at the end.

    **Arguments:**

    - `epochs`: the number of epochs between two calls.
    - `at_end`: whether it is called at the end of the run.
    - `callback`: a function of a [`eqx_ensemble.train.TrainState`][] that returns another one, or `None` to go on.

    ```python
    ee.train.every(10, lambda state: print(state.step.max(), state.loss))
    ```
    """
    if not isinstance(epochs, int) or epochs < 1 or not callable(callback):
        raise TypeError(f"`every` needs a number of epochs and a function, got {epochs!r} and {callback!r}.")
    return Every(epochs, callback, at_end)


def callbacks_of(callbacks: Any) -> list[Every]:
    """The callbacks with their periods."""
    given = callbacks if isinstance(callbacks, list) else [] if callbacks is None else [callbacks]
    for one in given:
        if not isinstance(one, Every) and not callable(one):
            raise TypeError(f"`fit` needs functions of a training state as `callbacks`, got {one!r}.")
    return [one if isinstance(one, Every) else Every(1, one) for one in given]
