from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Int, PyTree

from . import _axes, _check, _keys
from . import tree as _tree
from ._typing import kind_of_members
from .plan import AbstractPlan, map_members
from .tree._check import check_trees
from .tree._compare import Rules, compare_trees

M = TypeVar("M")

Where = Callable[[Any], Any]
"""Selects nodes of a model, as in `equinox.tree_at`."""

_Path = tuple[Any, ...]


class Ensemble(_axes.AbstractPerMember, Generic[M]):
    """Many models of one architecture, held as one Module whose arrays carry a leading `members` axis.

    Made by [`eqx_ensemble.build`][], [`eqx_ensemble.stack`][] or [`eqx_ensemble.from_stacked`][]. An `Ensemble` is
    a PyTree like any other: a field of a bigger Module, an argument of `filter_jit`, `filter_grad` and
    `filter_vmap`, or the member of another ensemble.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key), 8, key=key)
    ensemble(jnp.ones(13)).shape  # (8, 1): every member sees the same input
    ensemble(ee.Each(jnp.ones((8, 13)))).shape  # (8, 1): one input per member
    ensemble(ee.Batch(jnp.ones((32, 13)))).shape  # (8, 32, 1): members, batch, out
    ensemble[3]  # an ordinary eqx.nn.MLP
    ensemble[[0, 5]], ensemble[2:]  # smaller ensembles
    ```

    **Attributes:**

    - `stacked`: the model with the leaves that differ between members, each `(members, ...)`; `None` elsewhere, but
        for the flags `inference` of layers such as dropout. They stand in `shared` and here, so that
        `equinox.nn.inference_mode(ensemble)` sets both.
    - `shared`: the model with the leaves that all members use: activation functions and the like, and what
        `shared=` of the constructors selected; `None` elsewhere. Shared arrays are constants in
        [`eqx_ensemble.fit`][] and [`eqx_ensemble.train.make_step`][]: a trunk trained by all its members would couple
        them. `equinox.filter_grad` of a function of the ensemble does give them gradients, the sum over the members:
        [both ways](../how-it-runs.md#shared-arrays). A zero marks an array of `stacked` that holds Python floats
        (a dropout rate for each member): a single member has its float again, and training leaves it alone.
    - `ids`: the members' stable ids `(members,)`, from which their random streams follow. They travel with the
        members through indexing and concatenation. They are an integer array among the leaves: code that
        calculates with all arrays changes them, and the next use of the ensemble is then a `TypeError`. Select
        weights with `equinox.is_inexact_array`, not `equinox.is_array`.
    """

    stacked: M
    shared: M
    ids: Int[Array, " members"]

    def __init__(self, stacked: M, shared: M, ids: Int[Array, " members"]):
        self.stacked = _with_flags(stacked, shared)
        self.shared = shared
        self.ids = ids

    def __check_init__(self):
        _check.ids(self.ids)
        _check.stacked_leaves(self.stacked, self.ids)

    def per_member(self) -> PyTree:
        """The leaves that differ between members, and the members' ids."""
        _check.integer_ids(self.ids)
        return self.arrays, self.ids

    def one(self, part: PyTree) -> M:
        """The model of one member, given its part of `per_member()`."""
        stacked, _ = part
        return eqx.combine(stacked, self.shared)

    @property
    def arrays(self) -> M:
        """`stacked` without the flags that `shared` holds too: arrays alone, each `(members, ...)`."""
        return _without_flags(self.stacked, self.shared)

    @property
    def num_members(self) -> int:
        """The number of members."""
        if self.ids is None:  # gradients, or what `equinox.filter` left
            return _check.per_member_leaves(self.stacked, axis=0, name="Ensemble")
        _check.integer_ids(self.ids)
        return self.ids.shape[0]

    if not TYPE_CHECKING:  # a type checker knows by itself what there is

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(_check.no_attribute(name))

    def __pdoc__(self, **_: Any) -> Any:
        """The short form in `repr`, `equinox.tree_pformat` and run-time type errors: print `stacked` for all of it."""
        sizes = {x.shape[:1] for x in jax.tree.leaves((self.stacked, self.ids)) if _axes.is_array(x)}
        count = f"num_members={sizes.pop()[0]}" if len(sizes) == 1 and sizes != {()} else "..."
        from wadler_lindig import TextDoc  # only that package calls this method

        return TextDoc(f"{kind_of_members(self)}({count})")

    def __len__(self) -> int:
        return self.num_members

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Calls every member: `(…)` in, `(members, …)` out.

        Inputs are shared by all members unless marked [`eqx_ensemble.Each`][]; a member sees one example unless the
        input is marked [`eqx_ensemble.Batch`][]. An `equinox.nn.State` always belongs to its member.
        """
        _check.callable_members(self.stacked)

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, Ensemble):
                return model(*args, **kwargs)
            return _axes.over_batch(model, *args, **kwargs)

        with _check.explained_call():
            return map_members(call)(self, *args, **kwargs)

    @overload
    def __getitem__(self, index: int | np.integer) -> M: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | Sequence[bool] | np.ndarray) -> "Ensemble[M]": ...
    @overload
    def __getitem__(self, index: jax.Array) -> Any: ...
    def __getitem__(self, index: Any) -> "M | Ensemble[M]":
        """One member for an integer; a smaller ensemble for a slice, a list of integers or a mask."""
        _check.no_second_index(index)
        if self.ids is None:  # as above
            return self.one((_tree.take(self.arrays, _check.one_member(index)), None))
        stacked, ids = _tree.take(self.per_member(), index)
        if ids.ndim < self.ids.ndim:
            return _one_alone(stacked, self.shared)
        return Ensemble(stacked, self.shared, ids)

    def __iter__(self) -> Iterator[M]:
        return iter(self.unstack())

    def unstack(self) -> list[M]:
        """The members as a list of ordinary models."""
        parts = _tree.unstack(self.per_member())
        return [_one_alone(stacked, self.shared) for stacked, _ in parts]

    def map(self, fn: Callable[..., Any], *args: Any, plan: AbstractPlan | None = None, **kwargs: Any) -> PyTree:
        """`fn(model, *args, **kwargs)` of every member, as [`eqx_ensemble.map_members`][] does it."""
        return map_members(fn, plan=plan)(self, *args, **kwargs)

    def keys(self, key: Any, *, purpose: str = "call") -> _axes.Each:
        """One key per member from one key, ready to be passed to a call: `ensemble(x, key=ensemble.keys(key))`.

        The plain `key` would give all members the same dropout mask. Members that are ensembles themselves get a key
        for each of theirs.
        """
        keys = _keys.member_keys(key, self.ids, purpose=purpose)
        if isinstance(self.stacked, Ensemble):
            keys = eqx.filter_vmap(lambda inner, key: inner.keys(key, purpose=purpose))(self.stacked, keys)
        return _axes.Each(keys)


def from_stacked(model: M, *, ids: Any = None, shared: Where | None = None) -> Ensemble[M]:
    """An [`eqx_ensemble.Ensemble`][] around a Module that is stacked already, as by `eqx.filter_vmap(make)(keys)`.

    ```python
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 3, key=key))(jax.random.split(key, 4))
    ensemble = ee.from_stacked(stacked)  # four members
    ```

    **Arguments:**

    - `model`: a model whose array leaves all carry the leading `members` axis.
    - `ids`: the members' ids `(members,)`; `0, 1, 2, ...` if not given.
    - `shared`: selects the nodes that all members use, as in `equinox.tree_at`: `lambda model: model.trunk`. Their
        arrays must not carry the axis.

    **Raises:** `MemberMismatchError` when array leaves disagree on the number of members.
    """
    _check.no_text_arrays(model, name="from_stacked")
    stacked, rest = eqx.partition(_axes.strongly_typed(model), _axes_mask(model, shared))
    num_members = _check.per_member_leaves(stacked, axis=0, name="from_stacked")
    return Ensemble(stacked, rest, _keys.member_ids(num_members if ids is None else ids))


def stack(
    models: Iterable[M], *, ids: Any = None, shared: Where | None = None, promote_scalars: bool = False
) -> Ensemble[M]:
    """A list of models as one [`eqx_ensemble.Ensemble`][].

    ```python
    models = [eqx.nn.MLP(2, 1, 8, 1, key=k) for k in jax.random.split(key, 3)]
    ensemble = ee.stack(models)
    ```

    **Arguments:**

    - `models`: models that differ only in the values of their arrays.
    - `ids`: the members' ids `(members,)`; `0, 1, 2, ...` if not given.
    - `shared`: selects the nodes that all members use, as in `equinox.tree_at`: `lambda model: model.trunk`. They
        must be equal in all models, and are kept once.
    - `promote_scalars`: stack Python floats that differ into an array instead of refusing them. They stay constants
        in training, unless `trainable` of [`eqx_ensemble.fit`][] asks for them.

    **Raises:** `MemberMismatchError` when the models differ in anything but array values, naming leaf, members and
    both values; `TypeError` for NumPy arrays of strings or objects, which jax cannot hold.
    """
    models = check_trees(models, name="stack")
    _check.check_flag(promote_scalars, "promote_scalars", name="stack")
    rules = Rules(scalars="floats" if promote_scalars else "equal")
    compare_trees(models, name="stack", rules=rules)
    for model in models:
        _check.no_text_arrays(model, name="stack")
    stacked = _axes.strongly_typed(_tree.stack(models, promote_scalars=promote_scalars))
    numbers = jax.tree.map(lambda x, y: _axes.is_array(x) and type(y) is float, stacked, models[0])
    stacked, rest = eqx.partition(stacked, _axes_mask(stacked, shared))
    if shared is not None:
        unstacked = [eqx.filter(model, _axes_mask(model, shared), inverse=True) for model in models]
        rules = Rules(needs="models whose shared nodes are equal", noun="model")
        compare_trees(unstacked, name="stack", rules=rules)
        _check.equal_shared(unstacked, name="stack")
        rest = _axes.strongly_typed(unstacked[0])
    rest = mark_numbers(stacked, rest, numbers)
    return Ensemble(stacked, rest, _keys.member_ids(len(models) if ids is None else ids))


def concatenate(ensembles: Iterable[Ensemble[M]], *, renumber: bool = False) -> Ensemble[M]:
    """Several ensembles of one architecture as one, their members in the order given.

    ```python
    make = lambda key: eqx.nn.Linear(2, 1, key=key)
    old = ee.build(make, 4, key=key)
    new = ee.build(make, ids=[4, 5], key=key)
    ee.concatenate([old, new])  # the same members as ee.build(make, 6, key=key)
    ```

    **Arguments:**

    - `ensembles`: the ensembles. What their members share must be equal.
    - `renumber`: give the members the ids `0, 1, 2, ...` instead of keeping theirs.

    **Raises:** `ValueError` when two members have the same id and `renumber` is not set; `MemberMismatchError` when
    the ensembles do not fit together.
    """
    ensembles = _check.ensembles(ensembles, Ensemble, name="concatenate")
    stacked, ids = _tree.concatenate([ensemble.per_member() for ensemble in ensembles])
    shared = [ensemble.shared for ensemble in ensembles]
    rules = Rules(needs="ensembles whose members share the same", noun="ensemble")
    compare_trees(shared, name="concatenate", rules=rules)
    _check.equal_shared(shared, name="concatenate")
    if _check.check_flag(renumber, "renumber", name="concatenate"):
        ids = _keys.member_ids(ids.shape[0])
    else:
        _check.distinct_ids(ids, "Build new members with `build(make, ids=..., key=key)`, or pass `renumber=True`.")
    return Ensemble(stacked, shared[0], ids)


def average(ensemble: Ensemble[M], weights: Any = None) -> M:
    """One model whose weights are the weighted mean of the members' (a model soup).

    Floating-point arrays are averaged in at least float32; other arrays must be equal in all members.

    **Arguments:**

    - `ensemble`: the ensemble.
    - `weights`: `(members,)`, normalised by their sum; uniform if not given.

    **Returns:** one ordinary model.

    **Raises:** `ValueError` for weights of the wrong number; `MemberMismatchError` for an integer leaf that differs.

    ??? cite
        [Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing inference
        time](https://arxiv.org/abs/2203.05482), Wortsman et al., 2022.
    """
    _check.check_ensemble(ensemble, Ensemble, name="average")
    _check.one_weight_each(weights, ensemble.num_members, name="average")
    inexact, exact = eqx.partition(ensemble.arrays, eqx.is_inexact_array)
    _check.equal_members(exact, name="average")
    kept, _ = _tree.take((exact, ensemble.ids), 0)
    members = [part for part, _ in _tree.unstack((inexact, ensemble.ids))]
    return _one_alone(eqx.combine(_tree.weighted_mean(members, weights), kept), ensemble.shared)


def mark_numbers(stacked: PyTree, shared: PyTree, numbers: PyTree[bool]) -> PyTree:
    """The shared part of a model, with zeros where the stacked part holds what is a Python float in one member."""
    mark = lambda x, y, is_number: 0.0 if is_number and x is not None else y
    return jax.tree.map(mark, stacked, shared, numbers, is_leaf=lambda x: x is None)


def number_flags(stacked: PyTree, shared: PyTree) -> list[bool]:
    """For every leaf of `stacked`, also inside ensembles of ensembles, whether `shared` marks it as Python floats."""
    is_node = lambda x: x is None or isinstance(x, Ensemble)
    flags = []
    for x, y in zip(jax.tree.leaves(stacked, is_leaf=is_node), jax.tree.leaves(shared, is_leaf=is_node), strict=True):
        if isinstance(x, Ensemble) and isinstance(y, Ensemble):
            flags += number_flags(x.stacked, y.shared)
            flags += [False] * len(jax.tree.leaves((x.shared, x.ids)))
        elif x is not None:
            flags.append(type(y) is float)
    return flags


def _one_alone(stacked: PyTree, shared: PyTree) -> Any:
    """The model of one member, with the Python floats that it has alone, unless they are traced."""

    def number(x: Any, y: Any) -> Any:
        if x is None or type(y) is not float or not _check.is_at_hand(x):
            return x
        # Of all floats that round to this one the one of fewest digits: 0.1, as it was given, and not 0.10000000149.
        return float(str(np.asarray(x)[()]))

    return eqx.combine(jax.tree.map(number, stacked, shared, is_leaf=lambda x: x is None), shared)


def _with_flags(stacked: PyTree, shared: PyTree) -> PyTree:
    """The stacked part of a model, with the flags `inference` of its layers, which the shared part holds.

    `equinox.nn.inference_mode` sets every attribute of that name, and can set none that is `None`.
    """

    def put(path: _Path, x: Any, y: Any) -> Any:
        if not _is_inference(path) or y is None or _axes.is_array(y):
            return x
        _check.one_mode(x, y, jtu.keystr(path))
        return y if x is None else x

    if not any(type(y) is bool for y in jax.tree.leaves(shared)):  # flattens in C++, as most models have no flag
        return stacked
    return jtu.tree_map_with_path(put, stacked, shared, is_leaf=lambda x: x is None)


def _without_flags(stacked: PyTree, shared: PyTree) -> PyTree:
    """The stacked part of a model without what `_with_flags` put there."""

    def cut(path: _Path, x: Any, y: Any) -> Any:
        if not _is_inference(path) or x is None or y is None:
            return x
        _check.one_mode(x, y, jtu.keystr(path))
        return None

    # Within `jax.jit` a flag is a traced scalar, whereas what carries members has an axis.
    if all(_axes.is_array(x) and x.ndim > 0 for x in jax.tree.leaves(stacked)):
        return stacked
    return jtu.tree_map_with_path(cut, stacked, shared, is_leaf=lambda x: x is None)


def _is_inference(path: _Path) -> bool:
    return path[-1:] == (jtu.GetAttrKey("inference"),)


def _axes_mask(model: PyTree, shared: Where | None) -> PyTree[bool]:
    mask = jax.tree.map(_axes.is_array, model)
    if shared is None:
        return mask
    return _check.selected(lambda tree: eqx.tree_at(shared, tree, replace_fn=_all_false), mask)


def _all_false(node: PyTree) -> PyTree:
    return jax.tree.map(lambda _: False, node)
