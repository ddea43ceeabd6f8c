import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, overload

import equinox as eqx
import numpy as np

from .._build import build
from .._check import check_positive_int
from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..sweep import AbstractRange, draw
from ..train._fit import fit
from ..train._run import Run
from ..train.compiled._optimiser import Optimiser
from ._check import check_factor, check_options, check_validation_given
from ._check_rounds import check_saving
from ._halving import Rungs, halve
from ._rounds import Rounds

SETS = ("steps", "hyper", "state", "rungs")  # options that are set by the method


@overload
def hyperband(
    make: Callable[..., tuple[M, eqx.nn.State]],
    ranges: Mapping[str, AbstractRange],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int,
    factor: float | int = 3,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: Literal["auto", "must", "never"] = "auto",
    fit: Callable[..., Run[Any]] = fit,
    key: Any,
    **options: Any,
) -> list[Run[M]]: ...
@overload
def hyperband(
    make: Callable[..., M],
    ranges: Mapping[str, AbstractRange],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int,
    factor: float | int = 3,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: Literal["auto", "must", "never"] = "auto",
    fit: Callable[..., Run[Any]] = fit,
    key: Any,
    **options: Any,
) -> list[Run[M]]: ...
def hyperband(
    make: Callable[..., Any],
    ranges: Mapping[str, AbstractRange],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int,
    factor: float | int = 3,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: Literal["auto", "must", "never"] = "auto",
    fit: Callable[..., Run[Any]] = fit,
    key: Any,
    **options: Any,
) -> list[Run[Any]]:
    """Hyperband: brackets of successive halving, from many members trained briefly to a few trained in full.

    It is not known in advance how early poor hyper-parameters can be stopped. The brackets stop them at different
    times, each with about the same budget.

    **Arguments:**

    - `make`: the constructor of one member, as for [`eqx_ensemble.build`][].
    - `ranges`: the ranges of the hyper-parameters, as for [`eqx_ensemble.sweep.draw`][].
    - `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fit`][].
    - `epochs`: the longest training of a member.
    - `factor`: the ratio of members, and of training lengths, between two rungs.
    - `checkpoint`, `checkpoint_every`, `resume`, `fit`: as for [`eqx_ensemble.methods.successive_halving`][]; each
        bracket has its own subfolder of `checkpoint`.
    - `key`: the root key.

    **Returns:** one run per bracket, the largest first; fewer after Ctrl-C. Ids are unique across brackets.

    **Raises:** `TypeError` without validation data, and for options of [`eqx_ensemble.fit`][] that the method sets
    itself; `ValueError` for a factor of at most 1; also as [`eqx_ensemble.fit`][].

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    ranges = {"lr": ee.sweep.LogUniform(1e-4, 1e-1)}
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    held_out = jnp.ones((16, 3)), jnp.zeros((16, 1))
    runs = ee.methods.hyperband(
        make,
        ranges,
        loss,
        lambda hyper: optax.adam(hyper["lr"]),
        data,
        validation=held_out,
        epochs=9,
        key=key,
    )
    winners = ee.concatenate([run.best() for run in runs])  # one of each bracket
    ```

    ??? cite

        Li et al., *Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization*, JMLR 18, 2018.
    """
    name = "methods.hyperband"
    check_positive_int(epochs, "epochs", name=name)
    check_validation_given(validation, name=name)
    check_options(options, SETS, "it sets these itself", name=name)
    check_saving(checkpoint, checkpoint_every, resume, data, name=name)
    factor = check_factor(factor, name=name)
    own = {"epochs": epochs, "factor": factor}
    saved = Rounds(checkpoint, own=own, every=checkpoint_every, resume=resume, name=name, fit=fit)
    runs = []
    with saved.lock():
        for number, bracket in enumerate(brackets(make, ranges, epochs, factor, key=key)):
            inside = saved.inside(f"bracket-{number:02d}", bracket=number)
            start = {"hyper": bracket.hyper, "state": bracket.state}
            runs.append(
                halve(
                    bracket.ensemble,
                    loss,
                    optimiser,
                    data,
                    bracket.ladder,
                    inside,
                    **options,
                    **start,
                    validation=validation,
                    key=key,
                )  # fmt: skip
            )
            if runs[-1].interrupted:
                break
    return runs


class Bracket(NamedTuple):
    """The members of one bracket and its rungs."""

    ensemble: Ensemble[Any]
    state: eqx.nn.State | None
    hyper: dict[str, Any]
    ladder: Rungs


def brackets(
    make: Callable[..., Any], ranges: Mapping[str, AbstractRange], epochs: int, factor: float | int, *, key: Any
) -> Iterator[Bracket]:
    """Yields the brackets; members are built lazily."""
    most = math.floor(math.log(epochs, factor) + 1e-9)
    sizes = [math.ceil((most + 1) / (s + 1) * factor**s - 1e-9) for s in range(most, -1, -1)]
    ends = np.cumsum(sizes).tolist()
    hyper = draw(ranges, ends[-1], key=key)
    for s, size, end in zip(range(most, -1, -1), sizes, ends, strict=True):
        indices = np.arange(end - size, end)
        made = build(make, ids=indices, key=key)
        ensemble, state = made if isinstance(made, tuple) else (made, None)
        totals = [max(1, math.floor(epochs * factor ** (i - s) + 1e-9)) for i in range(s + 1)]
        ladder = Rungs("epochs", sorted(set(totals)), factor, s + 1)
        yield Bracket(ensemble, state, {name: x[indices] for name, x in hyper.items()}, ladder)
