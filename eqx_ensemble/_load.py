"""Loading a file of `save`: what it holds is compared with what is wanted, leaf by leaf, and verified."""

import functools
import inspect
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from ._caller import caller
from ._check import CheckpointCorruptError, MemberMismatchError, check_path
from ._ensemble import Ensemble, M
from ._foreign import empty_aligned
from ._keys import own_key
from ._leaves import is_member_array, member_dtype
from ._mesh import put
from ._pytree import PyTree
from ._save import (
    Header,
    PathLike,
    digests_of,
    is_saved,
    is_scalar,
    marked_leaves,
    named_leaves,
    read_header,
    shape_text,
    statics,
)
from .tree._engine import check_distinct, check_index, check_no_tracers

Model = TypeVar("Model", bound=eqx.Module)
Tree = TypeVar("Tree")


class Contents(NamedTuple):
    """What a file of [`eqx_ensemble.save`][] holds.

    **Attributes:**

    - `leaves`: a short text for each array and number by its path, such as `"float32[8,50,13]"`.
    - `meta`: the metadata that were saved with it.
    - `versions`: of the libraries that wrote it.
    """

    leaves: dict[str, str]
    meta: Any
    versions: dict[str, str]


def contents(path: PathLike) -> Contents:
    """What a file of [`eqx_ensemble.save`][] holds, without reading its arrays.

    **Arguments:**

    - `path`: the file.

    **Returns:** [`eqx_ensemble.Contents`][].

    **Raises:** `CheckpointCorruptError` for a damaged or foreign file.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/ensemble.eqx"
    ee.save(path, ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key), meta={"epochs": 40})
    ee.contents(path).meta  # {'epochs': 40}
    ee.contents(path).leaves[".stacked.weight"]  # 'float32[8,1,3]'
    ```
    """
    check_path(path, "path")
    header = read_header(path)
    return Contents(_saved_texts(header), header.meta, header.versions)


@overload
def load(path: PathLike, like: Model, *, members: Any = None) -> Model: ...
@overload
def load(
    path: PathLike, like: Callable[..., tuple[M, eqx.nn.State]], *, members: Any = None
) -> tuple[Ensemble[M], eqx.nn.State]: ...
@overload
def load(path: PathLike, like: Callable[..., M], *, members: Any = None) -> Ensemble[M]: ...
@overload
def load(path: PathLike, like: Tree, *, members: Any = None) -> Tree: ...
def load(path: PathLike, like: Any, *, members: Any = None) -> PyTree:
    """Loads a tree that [`eqx_ensemble.save`][] saved.

    Arrays and numbers, verified, come from the file, in the dtypes that were saved; functions and static fields come
    from `like`. No code is read from the file.

    **Arguments:**

    - `path`: the file.
    - `like`: the function that makes one member from a key, as given to [`eqx_ensemble.build`][]; or a tree like the
        one saved, or its shapes, from `equinox.filter_eval_shape`. Arrays are NumPy arrays, or lie on several devices,
        where those of `like` are and do.
    - `members`: positions of the members to read, as in `ensemble[members]`; `like` may have any number. Only they are
        read, and verified.

    **Returns:** a tree like the one that was saved; an ensemble, if `like` is a function that makes a member.

    **Raises:** `MemberMismatchError` with the leaves that differ; `CheckpointCorruptError` with the damaged file, leaf
    and member; `FileNotFoundError` if there is no file.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/ensemble.eqx"
    make = lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key)
    ee.save(path, ee.build(make, 8, key=key))
    ee.load(path, make, members=[0, 3])
    ```
    """
    check_path(path, "path")
    if like is None:
        raise TypeError(
            f"`{caller()}` needs `like`: the function that makes one member, an ensemble, or its shapes.\n"
            "The file holds the numbers; the model's code is yours."
        )
    header = read_header(path)
    if isinstance(header.meta, dict) and "fit" in header.meta and not isinstance(like, dict):
        raise ValueError(
            f"`{caller()}` needs a file of an ensemble, and `{path}` holds a run of `fit` with its optimiser's state.\n"
            "The same call of `fit` returns the run; keep its ensemble with `save(path, run.ensemble)`."
        )
    if callable(like) and not isinstance(like, eqx.Module | tuple):
        like = _from_maker(like, header)
    rows = None if members is None else _rows(members, header, like, path)
    wanted = named_leaves(like)
    _check_same(path, header, wanted, statics(like), members=rows is not None)
    named = iter(wanted)
    with open(path, "rb") as file, ThreadPoolExecutor() as pool:
        read = functools.partial(_read, file, header, rows=rows)
        arrays = dict(zip(header.leaves, pool.map(read, header.leaves), strict=True))
    value = lambda x: _value(header, next(named), x, arrays)
    return jax.tree.map(lambda x: value(x) if is_saved(x) else x, like)


def _rows(members: Any, header: Header, like: PyTree, path: PathLike) -> list[int]:
    """The positions of members that are to be read."""
    counts = {leaf.shape[0] for leaf in header.leaves.values() if leaf.per_member}
    if not counts:
        raise ValueError(f"`{caller()}` cannot choose members of `{path}`, which was saved without an ensemble.")
    for name in marked_leaves(like):
        if name in header.leaves and not header.leaves[name].per_member:
            raise ValueError(
                f"`{caller()}` cannot choose members of `{path}`: `{name}` has a different number of members.\n"
                "Load all of it, and index each part."
            )
    rows = check_index(list(members) if isinstance(members, range) else members, *counts)
    if isinstance(rows, int):
        raise TypeError(
            f"`{caller()}` needs a list of positions as `members`, got {members!r}.\n"
            f"One model is `load(path, like, members=[{members!r}])[0]`."
        )
    check_distinct(rows)
    return rows.tolist()


def _read(file: BinaryIO, header: Header, name: str, *, rows: list[int] | None) -> np.ndarray:
    """An array, or the chosen members of one, after their digests were compared."""
    leaf, fd = header.leaves[name], file.fileno()
    size, chosen = leaf.nbytes // leaf.num_digests, list(range(leaf.num_digests))
    if rows is not None and leaf.per_member:
        chosen = rows
        data = empty_aligned((size * len(rows),), np.uint8)
        for i, row in enumerate(rows):
            _fill(fd, data[i * size : (i + 1) * size], header.starts[name] + row * size)
    else:
        data = empty_aligned((leaf.nbytes,), np.uint8)
        _fill(fd, data, header.starts[name])
    saved, found = os.pread(fd, 32 * leaf.num_digests, header.digests[name]), digests_of(data, len(chosen))
    for i, row in enumerate(chosen):
        if found[32 * i : 32 * i + 32] != saved[32 * row : 32 * row + 32]:
            member = f", member {row}" if leaf.per_member else ""
            text = f"`{file.name}` is damaged at `{name}`{member}: its SHA-256 is not the one that was saved."
            raise CheckpointCorruptError(text, str(file.name), name, row if leaf.per_member else None)
    shape = (len(chosen), *leaf.shape[1:]) if leaf.per_member else leaf.shape
    return data.view(np.dtype(leaf.dtype)).reshape(shape)


def _fill(fd: int, part: np.ndarray, start: int) -> None:
    """Reads from a place of a file; one call reads 2 GiB at most."""
    done = 0
    while done < len(part) and (more := os.preadv(fd, [part[done:].data], start + done)):
        done += more


def _value(header: Header, name: str, like: Any, arrays: dict[str, np.ndarray]) -> Any:
    """An array or a number of the file, as `like` has it."""
    if is_scalar(like):
        value = header.numbers[name][1]
        return complex(*value) if isinstance(like, complex) else value
    x, generator = arrays[name], header.leaves[name].generator
    if isinstance(like, np.generic):
        return x[()]
    if isinstance(like, np.ndarray):
        return x
    value = jax.device_put(x)
    if value.dtype != x.dtype:
        raise ValueError(f"`{caller()}` needs 64 bits for `{name}`: `jax.config.update('jax_enable_x64', True)`.")
    value = value if generator is None else jax.random.wrap_key_data(value, impl=generator)
    sharding = getattr(like, "sharding", None)
    return value if sharding is None or len(sharding.device_set) == 1 else put(value, sharding)


# What differs between a file and what is wanted.

_MOST_LINES = 8


def _check_same(
    path: PathLike, header: Header, wanted: dict[str, Any], fixed: dict[str, str], *, members: bool
) -> None:
    """Raises, with both sides of each difference, unless a file holds the leaves and the Modules that are wanted."""
    any_count = {name for name, leaf in header.leaves.items() if leaf.per_member} if members else set()
    saved = _saved_texts(header, any_count) | header.fixed
    expected = {name: _wanted_text(x, any_count=name in any_count) for name, x in wanted.items()} | fixed
    differ = [name for name in {**expected, **saved} if saved.get(name) != expected.get(name)]
    if not differ:
        return
    lines = [f"  at `{name}`: saved {saved.get(name)}, expected {expected.get(name)}" for name in differ[:_MOST_LINES]]
    lines += [f"  and at {len(differ) - _MOST_LINES} others"] * (len(differ) > _MOST_LINES)
    raise MemberMismatchError(
        f"`{caller()}` needs a `like` with the leaves of `{path}`.\n" + "\n".join(lines) + "\n"
        "`like` is the function that made one member, or a tree of the same structure as the one that was saved."
    )


def _saved_texts(header: Header, any_count: set[str] | frozenset[str] = frozenset()) -> dict[str, str]:
    cut = lambda name, leaf: leaf._replace(shape=leaf.shape[1:]) if name in any_count else leaf
    arrays = {name: str(cut(name, leaf)) for name, leaf in header.leaves.items()}
    return arrays | {name: kind for name, (kind, _) in header.numbers.items()}


def _wanted_text(x: Any, *, any_count: bool) -> str:
    if is_scalar(x):
        return type(x).__name__
    return shape_text(x.dtype.name, x.shape[any_count:])


# What is wanted, from a function that makes one member.


def _from_maker(make: Callable[..., Any], header: Header) -> Any:
    """The shapes of what was saved, with those of one member: an ensemble, one with its state, or one model."""
    made = evaluate_make(make)
    member, state = made if isinstance(made, tuple) and isinstance(made[-1], eqx.nn.State) else (made, None)
    start = "" if state is None else "[0]"
    if not header.fixed.get(start or "<root>", "").startswith("Ensemble("):
        return made
    count = next((leaf.shape[:1] for leaf in header.leaves.values() if leaf.per_member), (0,))
    leaves, treedef = jtu.tree_flatten_with_path(member, is_leaf=lambda x: x is None)
    is_own = lambda keys: getattr(header.leaves.get(f"{start}.stacked{jtu.keystr(keys)}"), "per_member", True)
    axes = tuple(0 if hasattr(x, "shape") and is_own(keys) else None for keys, x in leaves)
    stacked = [_with_axis(x, count) if axis == 0 else x for (_, x), axis in zip(leaves, axes, strict=True)]
    ensemble = eqx.filter_eval_shape(lambda tree: Ensemble(tree, axes), jtu.tree_unflatten(treedef, stacked))
    return ensemble if state is None else (ensemble, jax.tree.map(lambda x: _with_axis(x, count), state))


def _with_axis(x: Any, count: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*count, *x.shape), member_dtype(x) if is_member_array(x) else x.dtype)


def evaluate_make(make: Any) -> Any:
    """The shapes of the result of `make`; the result itself if `make` cannot be traced or hides arrays."""
    try:
        inspect.signature(make, follow_wrapped=False).bind(None)
    except TypeError as error:
        raise TypeError(
            f"`{caller()}` calls the function that makes one member with a key alone: {error}.\n"
            "Give any value to what `build` took from `zip` or `product`: `lambda key: make(key, rate=0.0)`."
        ) from None
    except ValueError:  # a function without a signature
        pass
    key = own_key()
    try:
        shapes = eqx.filter_eval_shape(make, key)
        check_no_tracers(shapes)
    except (jax.errors.JAXTypeError, MemberMismatchError):
        return make(key)
    return shapes
