"""Arguments of `fit` that belong together. Each is checked where it is made, so that no receiver checks it again."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np

from .._axes import Each
from .._caller import caller
from .._check import (
    MOST_STEPS,
    MemberMismatchError,
    check_counter,
    check_flag,
    check_number,
    check_optional_function,
    check_path,
    check_word,
    kind_text,
)
from .._foreign import as_numpy
from .._pytree import PyTree
from ._check import check_length, check_mode
from ._revive import Revive
from .compiled._selection import Mode
from .compiled._windows import Windows


class Validation(eqx.Module):
    r"""Validation data of [`eqx_ensemble.fit`][], with a score of their own.

    **Arguments:**

    - `data`: as `validation` of [`eqx_ensemble.fit`][].
    - `score`: the validation score, called like `loss`; by default the loss.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher, such as for accuracy. Required with `score`.
    - `min_delta`: what an improvement must exceed, for `patience` and for new best weights.
    - `smooth`: the decay $d$, from 0 to below 1, of an exponential average of each member's scores $s_t$. The smoothed
        score after epoch $n$ is $\sum_{t \le n} d^{\,n-t} s_t\, (1-d) / (1-d^n)$, as `ewm(alpha=1 - smooth).mean()` of
        pandas. It decides `patience` and the best weights; `history`, `best_score` and a target are of the scores
        themselves. Scores that are not finite are excluded from the average.

    ```python
    def within_one(model, batch, key):
        x, y = batch
        return jnp.mean(jnp.abs(jax.vmap(model)(x) - y) < 1)


    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    validation = ee.train.Validation(data, score=within_one, mode="max")  # fit(..., validation=validation)
    ```
    """

    data: PyTree
    score: Callable[..., Any] | None
    mode: Mode
    min_delta: float
    smooth: float

    def __init__(
        self,
        data: PyTree,
        *,
        score: Callable[..., Any] | None = None,
        mode: Mode | None = None,
        min_delta: float = 0.0,
        smooth: float = 0.0,
    ) -> None:
        if data is None or isinstance(data, Validation):
            raise TypeError(f"`{caller()}` needs data to score members on, got {kind_text(data)}.")
        check_optional_function(score, "score", example="lambda model, batch, key: ...")
        if mode is not None:
            check_mode(mode)
        check_number(min_delta, "min_delta", least=0)
        if check_number(smooth, "smooth", least=0, most=1) == 1:
            raise ValueError(f"`{caller()}` needs `smooth` below 1, got 1: the average would never move.")
        if score is not None and mode is None:
            raise TypeError(
                f"`{caller()}` needs `mode` with `score`, because a score may be better when it is lower or when it is "
                "higher.\n"
                'Pass `mode="min"` for an error, `mode="max"` for an accuracy.'
            )
        if score is None and mode == "max":
            raise TypeError(
                f'`{caller()}` got `mode="max"` without `score`: validation scores are then the loss, which training '
                "minimises, and members would keep their worst weights.\n"
                'Pass `score=`, the function to maximise; or leave `mode="max"` out.'
            )
        self.data, self.score, self.mode = data, score, mode or "min"
        self.min_delta, self.smooth = float(min_delta), float(smooth)


class Stopping(eqx.Module):
    """When members of [`eqx_ensemble.fit`][] stop before the end of a run.

    **Arguments:** each a scalar or one value per member `(members,)`.

    - `target`: a member stops at the end of the epoch in which its validation score is `<= target`, or `>= target` with
        `mode="max"`.
    - `steps`: a member stops after this many steps, counting all its runs.
    - `seconds`: a member stops within about a fifth of a second after this much time since the call, including the time
        before it was resumed.

    ```python
    stop = ee.train.Stopping(steps=[100, 100, 200, 400], seconds=60)  # for four members
    ```
    """

    target: Any
    steps: Any
    seconds: Any

    def __init__(self, *, target: Any = None, steps: Any = None, seconds: Any = None) -> None:
        self.target, self.steps, self.seconds = (
            _limit(value, argument) for argument, value in (("target", target), ("steps", steps), ("seconds", seconds))
        )


def _limit(value: Any, argument: str) -> Any:
    """A number, or one per member in `Each`; positive except for `target`."""
    if value is None:
        return None
    whole = argument == "steps"
    numbers = as_numpy(value.per_member() if isinstance(value, Each) else value, argument)
    if numbers.ndim > 1 or numbers.dtype.kind not in ("iu" if whole else "iuf"):
        kind = "an integer" if whole else "a number"
        raise TypeError(f"`{caller()}` needs `{argument}` to be {kind}, or one per member `(members,)`, got {value!r}.")
    if not np.isfinite(numbers).all() or (argument != "target" and (numbers <= 0).any()):
        raise ValueError(
            f"`{caller()}` needs `{argument}` to be {'finite' if argument == 'target' else 'positive'}, got {value!r}."
        )
    if whole and (numbers > MOST_STEPS).any():
        raise ValueError(
            f"`{caller()}` needs `{argument}` of at most {MOST_STEPS}, because compiled programs count in 32 bits; got "
            f"{value!r}."
        )
    return Each(numbers) if numbers.ndim else numbers


def limits_of(stop: Stopping, num_members: int) -> dict[str, np.ndarray | None]:
    """Each limit as an array `(members,)`; raises for another number of values."""
    return {word: _of_members(getattr(stop, word), word, num_members) for word in ("target", "steps", "seconds")}


def _of_members(value: Any, argument: str, num_members: int) -> np.ndarray | None:
    if value is None:
        return None
    numbers = np.asarray(value.per_member() if isinstance(value, Each) else value)
    if numbers.shape not in ((), (num_members,)):
        raise MemberMismatchError(
            f"`{caller()}` needs one `{argument}` per member in `stop`: expected ({num_members},), got {numbers.shape}."
        )
    return np.broadcast_to(numbers, (num_members,))


class Checkpoint(NamedTuple):
    """Where [`eqx_ensemble.fit`][] saves a run, and how often.

    **Attributes:**

    - `path`: the file. It holds the whole run, and is replaced by each save.
    - `every`: the number of steps between two saves; by default about a minute of time. The end is always saved.

    ```python
    checkpoint = ee.train.Checkpoint("run.eqx", every=1000)  # fit(..., checkpoint=checkpoint)
    ```
    """

    path: str | os.PathLike[str]
    every: int | None = None


def as_checkpoint(checkpoint: Any) -> Checkpoint | None:
    """Raises unless `checkpoint` is a path, a `Checkpoint` or `None`. Returns the latter two."""
    if checkpoint is None:
        return None
    given = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    check_path(given.path, "checkpoint")
    if given.every is not None:
        given = given._replace(every=check_counter(given.every, "every"))
    return given


class Options(NamedTuple):
    """The options of a call that need no members, checked."""

    validation: Validation | None
    stop: Stopping
    patience: int | None
    windows: Windows
    on_diverge: Any

    @property
    def scoring(self) -> tuple[Callable[..., Any] | None, Mode]:
        """The score and its mode."""
        return (None, "min") if self.validation is None else (self.validation.score, self.validation.mode)

    @property
    def improving(self) -> dict[str, float]:
        """What counts as an improvement."""
        own = self.validation
        return {"min_delta": 0.0 if own is None else own.min_delta, "smooth": 0.0 if own is None else own.smooth}


def check_shuffle(shuffle: Any) -> None:
    """Raises unless `shuffle` is `True`, `False` or `"shared"`."""
    if not isinstance(shuffle, bool | np.bool_) and not (isinstance(shuffle, str) and shuffle == "shared"):
        got = repr(shuffle) if isinstance(shuffle, str) else kind_text(shuffle)
        raise ValueError(f'`{caller()}` needs `shuffle` to be `True`, `False` or `"shared"`, got {got}.')


def check_options(
    *,
    epochs: Any = None,
    steps: Any = None,
    validation: Any = None,
    patience: Any = None,
    stop: Any = None,
    shuffle: Any = True,
    has_aux: Any = False,
    history: Any = "all",
    on_diverge: Any = "freeze",
) -> Options:
    """Checks the options of `fit` that need no members."""
    check_flag(has_aux, "has_aux")
    check_shuffle(shuffle)
    how = Revive() if isinstance(on_diverge, str) and on_diverge == "revive" else on_diverge
    if not isinstance(how, Revive):
        check_word(how, "on_diverge", ("freeze", "revive", "raise"))
    check_length(epochs, steps)
    if validation is not None and not isinstance(validation, Validation):
        validation = Validation(validation)
    if stop is not None and not isinstance(stop, Stopping):
        hint = (
            "A function is a callback: `callbacks=`." if callable(stop) else "For example `train.Stopping(steps=100)`."
        )
        raise TypeError(f"`{caller()}` needs `stop` to be a `train.Stopping`, got {kind_text(stop)}.\n{hint}")
    stop = Stopping() if stop is None else stop
    if patience is not None:
        patience = check_counter(patience, "patience")
        if validation is None:
            raise TypeError(
                f"`{caller()}` needs `validation=` data with `patience`: members stop by their validation scores."
            )
    if stop.target is not None and validation is None:
        raise TypeError(
            f"`{caller()}` needs `validation=` data with `target`: a member stops when its score reaches it."
        )
    return Options(validation, stop, patience, _windows(history), how)


def _windows(history: Any) -> Windows:
    """The windows of steps whose last outputs are recorded."""
    if isinstance(history, str) and history in ("all", "last"):
        return Windows(1 if history == "all" else None)
    if isinstance(history, str) or history is None:
        raise ValueError(
            f"`{caller()}` needs `history` to be 'all', 'last' or a number of steps, got {history!r}.\n"
            "A number `n` records the losses of every `n`-th step."
        )
    return Windows(check_counter(history, "history"))
