import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from ._errors import MemberMismatchError
from ._leaves import is_key, is_member_array, is_traced, kind_text, path_text
from ._marks import array_leaves, per_member_leaves
from ._options import check_sequence

T = TypeVar("T")


def maker(make: Any) -> None:
    """A function that makes one member."""
    if isinstance(make, eqx.Module):
        raise TypeError(
            f"`build` needs a function that makes one member from a key, got {kind_text(make)} made already.\n"
            "Write `build(lambda key: Model(..., key=key), num_members, key=key)`; a list of models goes to `stack`."
        )
    if isinstance(make, list | tuple):
        raise TypeError("`build` makes members from a function; a list of models is stacked by `stack(models)`.")
    if not callable(make):
        raise TypeError(f"`build` needs a function that makes one member from a key, got {make!r}.")


def maker_of_key(make: Callable[..., Any], *, name: str) -> None:
    """The function can be called with a key alone: of numbers of the members, the file has the values."""
    try:
        inspect.signature(make, follow_wrapped=False).bind(None)
    except ValueError:
        return
    except TypeError as error:
        raise TypeError(
            f"`{name}` calls the function that makes one member with a key alone, which it does not take: {error}.\n"
            "Give what `build` got from `zip` or `product` any value: `lambda key: make(key, rate=0.0)`."
        ) from None


def maker_signature(make: Callable[..., Any], arguments: Iterable[str]) -> None:
    """The function can be called with a key and the per-member arguments."""
    try:
        # Of decorated functions the outermost counts: the one inside may be called in another way.
        signature = inspect.signature(make, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    named = dict.fromkeys(arguments)
    try:
        signature.bind(None, **named)
    except TypeError as error:
        called = ", ".join(["key", *(f"{name}={name}" for name in named)])
        inner = getattr(make, "func", make)
        word = getattr(inner, "__name__", type(inner).__name__)
        raise TypeError(
            f"`build` makes a member as `make({called})`, with the key in the first place; `{word}` cannot be "
            f"called so: {error}.\n"
            f"Write a function: `lambda {', '.join(['key', *named])}: {word}(..., key=key)`."
        ) from None


def one_count(**counts: int | None) -> int:
    """The number of members on which all given sources agree."""
    given = {name: count for name, count in counts.items() if count is not None}
    if not given:
        raise TypeError(
            "`build` needs to know how many members to make: pass `num_members`, `ids`, `keys`, `zip` or `product`."
        )
    for count in given.values():
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            raise TypeError(f"`build` needs an integer number of members, got {count!r}.")
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in given.items())
        raise ValueError(f"`build` was told different numbers of members: {listed}.")
    count = int(next(iter(given.values())))
    if count < 1:
        raise ValueError(f"`build` makes at least one member, got `{next(iter(given))}` of {count}.")
    return count


def no_second_key(key: Any) -> None:
    """Keys were given one per member, so there is no root key."""
    if key is not None:
        raise TypeError("`build` takes `keys` (one per member) or `key` (one for all), not both.")


def per_member_arguments(zip: Mapping[str, Any] | None, product: Mapping[str, Any] | None) -> dict[str, Any]:
    """The per-member arguments: names with array-like values that have a leading axis."""
    if zip is not None and product is not None:
        raise TypeError("`build` takes `zip` (one value per member) or `product` (all combinations), not both.")
    chosen = zip if product is None else product
    if chosen is None:
        return {}
    option = "zip" if product is None else "product"
    if not isinstance(chosen, Mapping):
        raise TypeError(f"`build` needs `{option}` as a dict from name to values, got {kind_text(chosen)}.")
    for name, values in chosen.items():
        array = np.asarray(values) if not isinstance(values, jax.Array) else values
        if array.dtype.kind in "OUS":
            raise TypeError(
                f"`build` needs `{option}[{name!r}]` to hold numbers, because members of one ensemble differ only in "
                f"arrays; got {values!r}.\nBuild one ensemble per choice."
            )
        if array.ndim == 0:
            raise ValueError(
                f"`build` needs one value per member in `{option}[{name!r}]`, got the single value {values!r}."
            )
    return dict(chosen)


def no_text_arrays(tree: Any, *, name: str) -> None:
    """No leaf is a NumPy array that jax cannot hold: it would fail in whatever is compiled first."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, np.ndarray) and not is_member_array(leaf):
            raise TypeError(
                f"`{name}` makes ensembles of models whose arrays jax can hold; at `{path_text(path)}`: a NumPy array "
                f"of dtype {leaf.dtype}, shape {leaf.shape}.\nKeep it out of jax's sight: as a tuple in a field of "
                "`equinox.field(static=True)`."
            )


_ALL_AT_ONCE = (
    "`build` runs the constructor for all members at once, so arrays that depend on the key or on "
    "per-member arguments have no concrete value in it."
)


@contextlib.contextmanager
def explained_constructor() -> Iterator[None]:
    """Adds the way round to errors of constructors that need concrete values."""
    try:
        yield
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        error.add_note(f"{_ALL_AT_ONCE}\nBuild the members one by one instead: `stack([make(key) for key in keys])`.")
        raise
    except TypeError as error:
        if "concrete values of integer type" in str(error):
            error.add_note(
                f"{_ALL_AT_ONCE}\nA number that decides a shape, such as a width, makes another architecture: build "
                "one ensemble for each."
            )
        raise


@contextlib.contextmanager
def explained_call() -> Iterator[None]:
    """Adds to a member's own errors what an ensemble's call hands it: most often it was given a batch."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not isinstance(error, MemberMismatchError):
            error.add_note(
                "An ensemble calls every member with one example. For a batch pass `Batch(x)`, for one "
                "input per member `Each(x)`."
            )
        raise


def no_attribute(name: str) -> str:
    """Where to look for what an ensemble does not have itself."""
    return (
        f"An `Ensemble` has no attribute `{name}`. What its members hold is in `ensemble.stacked`, with the leading "
        "members axis, or in a single member, `ensemble[0]`."
    )


def selected(select: Callable[[Any], T], tree: Any) -> T:
    """The result of a `shared=` selection."""
    try:
        return select(tree)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            "`shared` must select nodes of one member as `equinox.tree_at` does, for example "
            f"`lambda model: model.trunk`; it raised {type(error).__name__}: {error}"
        ) from error


def stacked_leaves(stacked: Any, ids: Any) -> None:
    """Every array leaf of an ensemble has the members axis of its ids."""
    if not array_leaves(stacked):
        return
    found = per_member_leaves(stacked, axis=0, name="Ensemble")
    if found != ids.shape[0]:
        raise MemberMismatchError(f"`Ensemble` needs one id per member: {found} members, {ids.shape[0]} ids.")


def one_mode(stacked: Any, shared: Any, path: str) -> None:
    """A layer's flag `inference` has one value for all members, wherever it stands."""
    if type(stacked) is bool and type(shared) is bool and stacked is not shared:
        raise ValueError(
            "An `Ensemble` needs one value of each layer's `inference`, which all members share.\n"
            f"  at `{path}`: expected {shared}, as in `shared`, got {stacked} in `stacked`\n"
            "Set both by `equinox.nn.inference_mode(ensemble, value=...)`."
        )


def no_second_index(index: Any) -> None:
    """An index of members, not one that reaches into their arrays."""
    if isinstance(index, tuple):
        raise TypeError(
            f"An ensemble is indexed along its members only, got {index!r}.\n"
            "Write `ensemble[[0, 1]]` for two members, `ensemble[0][1]` for a member of a nested ensemble."
        )


def one_member(index: Any) -> Any:
    """The index of one member of a tree whose ids were filtered out."""
    if isinstance(index, slice | list | tuple) or getattr(index, "ndim", 0) > 0:
        raise TypeError(
            "This `Ensemble` holds no member ids, as gradients and filtered trees do not: index it with one integer, "
            "or take several members with `tree.take(tree, index)`."
        )
    return index


def callable_members(model: Any) -> None:
    """The members are models that can be called."""
    if not callable(model):
        raise TypeError(f"The members of this ensemble are of type {type(model).__name__} and cannot be called.")


def ensembles(values: Any, kind: type[T], *, name: str) -> list[T]:
    """At least one ensemble, and nothing else."""
    values = [values] if isinstance(values, kind) else check_sequence(values, "ensembles", name=name, of="ensembles")
    if not values:
        raise ValueError(f"`{name}` needs at least one ensemble, got none.")
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise TypeError(
                f"`{name}` needs ensembles, got {kind_text(value)} at position {i}.\n"
                "Make an ensemble of models with `stack([model, ...])`."
            )
    return values


def equal_shared(trees: list[Any], *, name: str) -> None:
    """What the members share is equal in all trees, arrays by value."""
    first = dict(array_leaves(trees[0]))
    for i, tree in enumerate(trees[1:], start=1):
        for path, x in array_leaves(tree):
            y = first.get(path)
            if is_traced(x) or is_traced(y):
                continue
            if y is None or not _same_array(x, y):
                raise MemberMismatchError(
                    f"`{name}` keeps one copy of what members share; the shared array at `{path}` of number {i} "
                    "differs from that of number 0.\nLeave it out of `shared` if members have values of their own."
                )


def equal_members(tree: Any, *, name: str) -> None:
    """Arrays that cannot be averaged have the same value in all members."""
    for path, x in array_leaves(tree):
        if is_traced(x):
            continue
        raw = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        if (raw != raw[:1]).any():
            raise MemberMismatchError(
                f"`{name}` averages floating-point arrays; the {x.dtype} array at `{path}` differs between members and "
                "has no mean of its own kind.\nReplace it first, or average with `tree.weighted_mean`."
            )


def _same_array(x: Any, y: Any) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if is_key(x):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    return np.array_equal(np.asarray(x), np.asarray(y), equal_nan=np.issubdtype(np.asarray(x).dtype, np.inexact))
