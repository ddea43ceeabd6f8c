import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._axes import check_rows_of_data, is_array
from .._caller import caller
from .._check import check_function, check_key, check_path, check_positive_int, kind_text
from .._foreign import from_foreign_tree
from .._load import contents
from .._progress import progress_line
from .._pytree import PyTree
from .._save import save
from ..resample import Folds
from ..resample._engine import check_folds
from ..train import DivergedError
from ..train._engine import (
    array_texts,
    check_rows_of_folds,
    check_same_call,
    decode,
    encode,
    function_text,
    is_batches,
    option_text,
    repr_text,
    versions_text,
)
from ._check import check_length, check_options
from ._comparison import SUFFIXES, Comparison, Row
from ._protocol import AbstractMethod, LossLike

Score = Callable[[Any, Any], Any]


def compare(
    methods: Mapping[str, AbstractMethod] | Sequence[AbstractMethod],
    make: Any,
    data: PyTree,
    scores: Mapping[str, Score],
    *,
    loss: LossLike,
    optimiser: Any,
    folds: Folds | None = None,
    test: PyTree = None,
    seeds: int = 1,
    budget: int | None = None,
    executor: Executor | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    key: Any,
    **options: Any,
) -> Comparison:
    """Compares methods on held-out rows: every method in every fold, or on one split, and with every seed.

    In one fold and with one seed all methods have the same rows and the same key.

    **Arguments:**

    - `methods`: methods by name, or a list of methods of different classes, named by these.
    - `make`, `loss`, `optimiser`, `options`: as for [`eqx_ensemble.methods.AbstractMethod.fit`][].
    - `data`: arrays `(x, y)`.
    - `scores`: functions of `posterior.predict(x)` and `y` by name, each of which returns a number.
    - `folds`: from [`eqx_ensemble.resample.folds`][] or [`eqx_ensemble.resample.from_splits`][]: methods are trained on
        `folds.train` and scored on `folds.test`.
    - `test`: in place of `folds`, other rows `(x, y)`; all of `data` is to train.
    - `seeds`: how often to repeat everything.
    - `budget`: in place of `epochs` or `steps`, the gradient steps of one network that each fit may take in all
        ([`eqx_ensemble.methods.AbstractMethod.cost`][]): eight members are trained for an eighth of the steps of one.
        Sub-members of BatchEnsemble and TabM count as members, and students, teachers and the steps of chains count;
        what takes no gradient does not.
    - `executor`: a `concurrent.futures.Executor` to run the fits, here or elsewhere: `ThreadPoolExecutor(2)`, or one
        that pickles functions by value, such as loky's or Dask's `client.get_executor(pure=False)`. Workers have
        their own settings of JAX.
    - `folder`: saves the predictions of each finished fit there in a file. Rerunning the call, also with other scores
        or methods or more seeds, runs only the fits that are missing. Functions that cannot be traced by themselves
        are compared by name.
    - `progress`: as for [`eqx_ensemble.fit`][].
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Comparison`][]. A fit that fails, such as by members that diverge, is a row with
    its error; in `folder` it is kept if members diverged, and tried again otherwise.

    **Raises:** `ValueError` if all fits failed, and if `folder` is of a call with other data, functions or options,
    which it lists.

    ```python
    import functools as ft

    x = jax.random.normal(key, (60, 3))
    y = x[:, 0] * x[:, 1]
    comparison = ee.methods.compare(
        [ee.methods.Seeds(4), ee.methods.SWAG(num_samples=10)],
        lambda key: eqx.nn.MLP(3, "scalar", 16, 1, key=key),
        (x, y),
        {"rmse": ee.scores.rmse, "crps": ee.scores.crps},
        loss="regression",
        optimiser=optax.adam(1e-2),
        folds=ee.resample.folds(len(x), 3, key=key),
        budget=80,
        key=key,
    )
    print(comparison)
    comparison.summary()["crps_difference"]
    ```
    """
    call = _Call(_check_methods(methods), make, data, scores, loss, optimiser, folds, test, budget, options, key)
    call = call._replace(data=_check_pair(data, "data"), test=None if test is None else _check_pair(test, "test"))
    call.check()
    check_positive_int(seeds, "seeds")
    _check_executor(executor)
    num_folds = 1 if folds is None else len(folds.train)
    cells = [(name, fold, seed) for name in call.methods for seed in range(seeds) for fold in range(num_folds)]
    if folder is not None:
        check_path(folder, "folder")
    rows = {}
    with progress_line(show=progress, description="compare", unit=" fits", total=len(cells)) as bar:
        for cell, fit in _all_fits(call, cells, executor, folder):
            rows[cell] = call.score(cell, fit)
            bar.update()
    failed = [row for row in rows.values() if row.error]
    if len(failed) == len(cells):
        raise ValueError(f"`{caller()}`: all {len(cells)} fits failed; that of {failed[0].method} by {failed[0].error}")
    ratio = 0.0 if folds is None else float(np.mean(np.sum(folds.valid, axis=1))) / folds.train.shape[1]
    return Comparison(tuple(rows[cell] for cell in cells), tuple(call.scores), ratio)


class _Call(NamedTuple):
    """The arguments of `compare`."""

    methods: dict[str, AbstractMethod]
    make: Any
    data: Any
    scores: Mapping[str, Score]
    loss: Any
    optimiser: Any
    folds: Folds | None
    test: Any
    budget: int | None
    options: dict[str, Any]
    key: Any

    def check(self) -> None:
        """Raises for arguments that would fail every fit."""
        check_key(self.key)
        check_function(self.make, "make", example="lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key)")
        if not isinstance(self.scores, Mapping) or not self.scores:
            got = kind_text(self.scores)
            raise TypeError(f"`{caller()}` needs `scores` by name, such as `{{'nll': ee.scores.nll}}`; got {got}.")
        for name, score in self.scores.items():
            check_function(score, f"scores[{name!r}]", example="ee.scores.nll")
        reserved = {*Row._fields, *(other + end for other in self.scores for end in SUFFIXES[1:])} & {*self.scores}
        if reserved:
            raise ValueError(f"`{caller()}` needs other names of scores than those of columns; got {sorted(reserved)}.")
        if (self.folds is None) == (self.test is None):
            got = "neither" if self.folds is None else "both"
            raise TypeError(f"`{caller()}` needs either `folds`, or `test=(x, y)`; got {got}.")
        if self.folds is not None:
            check_folds(self.folds)
            check_rows_of_folds(len(jax.tree.leaves(self.data)[0]), self.folds, None)
        check_options(self.options, ("rows", "state", "hyper", "checkpoint"), "they are of one fit")
        check_length(**{name: self.options.get(name) for name in ("epochs", "steps")}, budget=self.budget)
        for name in self.methods:
            self.length(name)

    def length(self, name: str) -> dict[str, Any]:
        """The length of the training, as an option of `fit`."""
        if self.budget is None:
            return {}
        num_rows = len(jax.tree.leaves(self.data)[0]) if self.folds is None else self.folds.train.shape[1]
        per_epoch = -(-num_rows // (self.options.get("batch_size") or 32))
        fixed, first = (self.methods[name].cost(steps, per_epoch) for steps in (0, 1))
        steps = (self.budget - fixed) // (first - fixed)
        if steps < 1:
            raise ValueError(
                f"`{caller()}` needs `budget` of at least {first} for {name}: one step of all its members costs that; "
                f"got {self.budget}."
            )
        return {"steps": steps}

    def split(self, fold: int) -> tuple[Any, Any]:
        """The rows to train on and those to predict."""
        if self.folds is None:
            return self.data, self.test
        rows = np.asarray(self.folds.train[fold]), np.asarray(self.folds.test[fold])[np.asarray(self.folds.valid[fold])]
        train, test = (jax.tree.map(lambda x, own=own: x[own], self.data) for own in rows)
        return train, test

    def run(self, name: str, fold: int, seed: int) -> "_Fit":
        """One fit."""
        train, test = self.split(fold)
        own, of_prediction = jax.random.split(jax.random.fold_in(jax.random.fold_in(self.key, seed), fold))
        options = self.options | self.length(name) | {"progress": False, "key": own}
        start = time.perf_counter()
        try:
            posterior = self.methods[name].fit(self.make, self.loss, self.optimiser, train, **options)
            seconds = time.perf_counter() - start
            if getattr(getattr(posterior, "run", None), "interrupted", False):
                raise KeyboardInterrupt
            return _Fit(jax.tree.map(_on_host, posterior.predict(test[0], key=of_prediction)), seconds, "", keep=True)
        except Exception as error:
            return _Fit(None, time.perf_counter() - start, _error_text(error), keep=isinstance(error, DivergedError))

    def score(self, cell: tuple[str, int, int], fit: "_Fit") -> Row:
        """The scores of one fit."""
        found, error = {}, fit.error
        try:
            if not error:
                y = self.split(cell[1])[1][1]
                found = {name: _number(fn(fit.predictions, y), name) for name, fn in self.scores.items()}
        except Exception as raised:
            found, error = {}, _error_text(raised)
        return Row(*cell, found, fit.seconds, error)

    def texts(self, name: str) -> dict[str, str]:
        """What identifies the fits of a method."""
        key = jax.random.key(0)
        batch = jax.tree.map(lambda x: x[:1], self.data)
        model = lambda key: made[0] if isinstance(made := self.make(key), tuple) else made
        update = lambda key: self.optimiser.update(
            params := eqx.filter(model(key), eqx.is_inexact_array), self.optimiser.init(params), params
        )
        texts = {"method": repr_text(self.methods[name]), "key": option_text(self.key), "versions": versions_text()}
        texts["make"] = function_text(self.make, self.make, key)
        texts["loss"] = function_text(self.loss, lambda key: self.loss(model(key), batch, key), key)
        texts["optimiser"] = function_text(self.optimiser, update, key)
        texts |= {name: repr_text(x) for name, x in self.options.items() if name not in ("plan", "mesh")}
        for word in ("data", "folds", "test"):
            texts |= array_texts(eqx.filter(getattr(self, word), is_array), word)
        return texts | {"budget": repr(self.budget)}


class _Fit(NamedTuple):
    """The predictions of one fit, the seconds that it took, why it failed, and whether another try would give it."""

    predictions: Any
    seconds: float
    error: str
    keep: bool


def _all_fits(
    call: _Call, cells: list[tuple[str, int, int]], executor: Executor | None, folder: Any
) -> Iterator[tuple[tuple[str, int, int], _Fit]]:
    """The fits as they finish, first those of a folder; new ones are saved there."""
    texts = {} if folder is None else {name: call.texts(name) for name in call.methods}
    missing = []
    for cell in cells:
        path = None if folder is None else _file(folder, cell)
        if path is None or not path.exists():
            missing.append(cell)
            continue
        saved = contents(path).meta
        check_same_call(saved["call"], texts[cell[0]], path)
        yield cell, _Fit(decode(saved["predictions"]), saved["seconds"], saved["error"], keep=False)
    futures = {} if executor is None else {executor.submit(call.run, *cell): cell for cell in missing}
    done = ((cell, call.run(*cell)) for cell in missing) if executor is None else None
    try:
        for cell, fit in done or ((futures[future], future.result()) for future in as_completed(futures)):
            if folder is not None and fit.keep:
                meta = {"call": texts[cell[0]], "predictions": encode(fit.predictions)}
                save(_file(folder, cell), {}, meta=meta | {"seconds": fit.seconds, "error": fit.error})
            yield cell, fit
    finally:
        for future in futures:
            future.cancel()


def _file(folder: Any, cell: tuple[str, int, int]) -> Path:
    name, fold, seed = cell
    return Path(folder) / f"fit-{hashlib.sha256(name.encode()).hexdigest()[:16]}-{seed:06d}-{fold:06d}.eqx"


def _on_host(x: Any) -> Any:
    """An array of NumPy; of a dtype that files hold."""
    x = np.asarray(x)
    return x if x.dtype.kind in "biufc" else x.astype(np.float32)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _number(value: Any, name: str) -> float:
    found = np.asarray(value)
    if found.shape != () or found.dtype.kind not in "fiub":
        raise TypeError(f"`scores[{name!r}]` must return one number, got {kind_text(value)} of shape {found.shape}.")
    return float(found)


def _check_methods(methods: Any) -> dict[str, AbstractMethod]:
    """Raises unless `methods` are methods with different names. Returns them by name."""
    if not isinstance(methods, Mapping | list | tuple) or not methods:
        raise TypeError(f"`{caller()}` needs `methods`: a dict from names, or a list; got {kind_text(methods)}.")
    pairs = methods.items() if isinstance(methods, Mapping) else [(type(method).__name__, method) for method in methods]
    for name, method in pairs:
        if not isinstance(method, AbstractMethod) or not isinstance(name, str):
            raise TypeError(
                f"`{caller()}` needs methods, such as `methods.Seeds(8)`; got {kind_text(method)} ({name})."
            )
    if len(dict(pairs)) < len(methods):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"`{caller()}` needs a dict from names to methods: some of the list are of one class: {names}."
        )
    return dict(pairs)


def _check_pair(data: Any, argument: str) -> tuple[Any, Any]:
    """Raises unless `data` is `(x, y)` in arrays of as many rows. Returns them."""
    if not isinstance(data, tuple | list) or len(data) != 2 or is_batches(data):
        raise TypeError(f"`{caller()}` needs `{argument}` to be arrays `(x, y)`, got {kind_text(data)}.")
    pair = from_foreign_tree(tuple(data), argument)
    check_rows_of_data(pair, 1, argument=argument, finite=False)
    return pair


def _check_executor(executor: Any) -> None:
    if executor is not None and not isinstance(executor, Executor) or isinstance(executor, ProcessPoolExecutor):
        raise TypeError(
            f"`{caller()}` needs an executor that can take functions: a `ThreadPoolExecutor`, loky's, or Dask's "
            f"`client.get_executor(pure=False)`; got {kind_text(executor)}."
        )
