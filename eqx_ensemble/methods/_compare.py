import contextlib
import hashlib
import json
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
from .._progress import progress_line
from .._pytree import PyTree
from ..checkpoint._engine import (
    CallRecord,
    absolute,
    as_path,
    check_fields,
    check_run_folder,
    check_same_call,
    check_valid,
    conditions,
    explain_record,
    has_call,
    is_on_disk,
    is_record,
    is_seconds,
    is_string,
    lock_folder,
    read_call,
    write_call,
    write_file,
)
from ..resample import Folds
from ..resample._engine import check_folds
from ..train import DivergedError
from ..train._engine import array_texts, check_rows_of_folds, code_text, is_batches, option_text
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
    - `folder`: saves each finished fit there as JSON. Rerunning the call, also with other methods or more seeds, runs
        only the fits that are missing.
    - `progress`: as for [`eqx_ensemble.fit`][].
    - `key`: the root key.

    **Returns:** [`eqx_ensemble.methods.Comparison`][]. A fit that fails, such as by members that diverge, is a row with
    its error; in `folder` it is kept if members diverged, and tried again otherwise.

    **Raises:** `ValueError` if all fits failed, and if `folder` is of a call with other data, scores or options, which
    it lists.

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
    path = None if folder is None else _check_folder(folder)
    with lock_folder(path):
        rows = {} if path is None else _read_rows(path, call, cells)
        missing = [cell for cell in cells if cell not in rows]
        with progress_line(show=progress, description="compare", unit=" fits", total=len(cells)) as bar:
            bar.update(len(rows))
            for row, keep in _run_all(call, missing, executor):
                rows[row[:3]] = row
                if path is not None and keep:
                    write_file(_file(path, row[:3]), json.dumps(row._asdict()).encode())
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

    def run(self, name: str, fold: int, seed: int) -> tuple[Row, bool]:
        """One fit, and whether another attempt would give the same."""
        train, test, folds = self.data, self.test, self.folds
        if folds is not None:
            rows = np.asarray(folds.train[fold]), np.asarray(folds.test[fold])[np.asarray(folds.valid[fold])]
            train, test = (jax.tree.map(lambda x, own=own: x[own], self.data) for own in rows)
        own, of_prediction = jax.random.split(jax.random.fold_in(jax.random.fold_in(self.key, seed), fold))
        options = self.options | self.length(name) | {"progress": False, "key": own}
        start = time.perf_counter()
        try:
            posterior = self.methods[name].fit(self.make, self.loss, self.optimiser, train, **options)
            seconds = time.perf_counter() - start
            if getattr(getattr(posterior, "run", None), "interrupted", False):
                raise KeyboardInterrupt
            predictions = posterior.predict(test[0], key=of_prediction)
            found = {score: _number(fn(predictions, test[1]), score) for score, fn in self.scores.items()}
            return Row(name, fold, seed, found, seconds, ""), True
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return Row(name, fold, seed, {}, time.perf_counter() - start, text), isinstance(error, DivergedError)

    def record(self) -> CallRecord:
        """The identity of the call, without the number of seeds."""
        functions = {"make": self.make, "loss": self.loss, "optimiser": self.optimiser}
        functions |= {f"score {name}": fn for name, fn in self.scores.items()}
        functions |= {_METHOD + name: method for name, method in self.methods.items()}
        texts = {"key": option_text(self.key)}
        for name, value in {"budget": self.budget, **self.options}.items():
            if isinstance(value, bool | int | float | str):
                texts[name] = repr(value)
            elif value is not None and name not in ("plan", "mesh"):  # of time and memory, not of results
                functions[name] = value
        for name in ("data", "folds", "test"):
            texts |= array_texts(eqx.filter(getattr(self, name), is_array), name)
        code = {name: code_text(value) for name, value in functions.items()}
        return CallRecord(code | texts, tuple(code), conditions())


_METHOD = "method "


def _run_all(call: _Call, cells: list[tuple[str, int, int]], executor: Executor | None) -> Iterator[tuple[Row, bool]]:
    """The fits as they finish."""
    if executor is None:
        yield from (call.run(*cell) for cell in cells)
        return
    futures = [executor.submit(call.run, *cell) for cell in cells]
    try:
        yield from (future.result() for future in as_completed(futures))
    finally:
        for future in futures:
            future.cancel()


def _read_rows(folder: Path, call: _Call, cells: list[tuple[str, int, int]]) -> dict[tuple[str, int, int], Row]:
    """The fits of a folder, which is of the same call but for methods and seeds."""
    record = call.record()
    if has_call(folder):
        saved, _ = read_call(folder)
        of_both = lambda own, other: own._replace(
            texts={name: x for name, x in own.texts.items() if name in other.texts or not name.startswith(_METHOD)}
        )
        effect = "new fits may differ from the saved ones in their last bits"
        check_same_call(of_both(saved, record), of_both(record, saved), folder, effect=effect)
        record = saved._replace(
            texts=record.texts | saved.texts, code=tuple({**dict.fromkeys(saved.code + record.code)})
        )
    write_call(folder, record, {})
    found = {}
    for cell in cells:
        with contextlib.suppress(FileNotFoundError):
            found[cell] = _read_row(_file(folder, cell), cell, call)
    return found


_FIELDS = {"scores": is_record, "seconds": is_seconds, "error": is_string}


def _read_row(path: Path, cell: tuple[str, int, int], call: _Call) -> Row:
    text = path.read_bytes()
    with explain_record(path):
        try:
            fields = check_fields(json.loads(text), _FIELDS, "row")
        except (ValueError, RecursionError):
            fields = None
        check_valid("it is not JSON", holds=fields is not None)
        assert fields is not None
        scores = {name: fields["scores"].get(name) for name in call.scores}
        known = fields["error"] or all(type(x) in (int, float) for x in scores.values())
        check_valid("its scores are not numbers", holds=bool(known))
    return Row(*cell, {} if fields["error"] else scores, fields["seconds"], fields["error"])


def _file(folder: Path, cell: tuple[str, int, int]) -> Path:
    name, fold, seed = cell
    return folder / f"fit-{hashlib.sha256(name.encode()).hexdigest()[:16]}-{seed:06d}-{fold:06d}.json"


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


def _check_folder(folder: Any) -> Path:
    check_path(folder, "folder")
    path = as_path(folder)
    if not is_on_disk(path):
        raise TypeError(f"`{caller()}` needs `folder` on a file system, got `{folder}`.")
    path = absolute(path)
    check_run_folder(path)
    return path
