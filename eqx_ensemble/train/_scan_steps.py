import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypedDict, TypeVar, runtime_checkable

import equinox as eqx
import jax

from .._caller import caller
from .._check import (
    check_flag,
    check_function,
    check_integers_fit,
    check_positive_int,
    is_inside_transformation,
    is_member_array,
    kind_text,
)
from .._compiled import CompiledCall
from .._foreign import as_hashable_leaf, take_in
from .._ids import open_ids
from .._leaf_text import leaf_text
from .._predict import PredictOptions
from .._pytree import PyTree
from ..tree._engine import LOOP_RULES, compare_trees
from ._hyper import follow_hyper
from ._options import Stopping
from ._state import check_train_state
from ._step import LoopStep, Step
from ._trainable import Trainable
from .compiled._health import nan_is_data
from .data._rows import Shuffle

E = TypeVar("E", covariant=True)


class RunWithCombine(PredictOptions, total=False):
    """The options of `Run.predict` with `combine` that do not change the type of its result."""

    fn: Callable[..., Any] | None
    strict: bool


class RunWithoutCombine(PredictOptions, total=False):
    """The options of `Run.predict` without `combine`, or with `combine=None`."""

    combine: None
    strict: bool


@runtime_checkable
class RunOf(Protocol[E]):
    """A `Run` of an ensemble `E`."""

    @property
    def ensemble(self) -> E:
        """The trained ensemble."""
        ...


class CommonFitOptions(TypedDict, total=False):
    """The options of `fit` that depend neither on other members nor on the devices."""

    epochs: int | None
    steps: int | None
    batch_size: int | None
    validation: PyTree
    patience: int | None
    stop: Stopping | None
    state: eqx.nn.State | None
    hyper: PyTree
    rows: Any
    shuffle: Shuffle
    has_aux: bool
    history: Literal["all", "last"] | int
    trainable: Trainable


_STACK = "Stack a list of batches by `jax.tree.map(lambda *xs: jnp.stack(xs), *batches)`."


@contextlib.contextmanager
def explain_list(batches: Any) -> Iterator[None]:
    """Adds to an error of a step that it got a list of batches, if it did."""
    try:
        yield
    except Exception as error:
        if isinstance(batches, list) and batches and all(isinstance(item, tuple | list | dict) for item in batches):
            error.add_note(f"`batches` is a list, and each step got one row of every array in it. {_STACK}")
        raise


def check_batches(batches: PyTree, length: Any) -> int:
    """Raises for invalid batches. Returns the number of steps: their leading axis, or `length` without batches."""
    if length is not None:
        check_positive_int(length, "length")
    sizes: dict[int, str] = {}
    for path, leaf in _leaves(batches):
        where = f"`batches{jax.tree_util.keystr(path)}`"
        if not is_member_array(leaf):
            raise TypeError(
                f"`{caller()}` needs `batches` to be arrays with a leading axis of steps; {where} is "
                f"{kind_text(leaf)}.\n" + _STACK
            )
        if leaf.ndim == 0:
            raise ValueError(
                f"`{caller()}` needs `batches` to be arrays with a leading axis of steps; {where} is "
                f"{leaf_text(leaf)}.\nRepeat what is the same in every step, or let the step close over it."
            )
        sizes.setdefault(leaf.shape[0], f"  at {where}: {leaf.shape[0]} ({leaf_text(leaf)})")
    if not sizes and length is None:
        raise ValueError(f"`{caller()}` needs `batches`, or `length` for steps without a batch; got neither.")
    if len(sizes) > 1:
        listed = "\n".join(sizes.values())
        raise ValueError(
            f"`{caller()}` needs batches with one number of steps; their leading axes differ.\n{listed}\n{_STACK}"
        )
    count = next(iter(sizes)) if sizes else int(length or 0)
    if count == 0:
        raise ValueError(f"`{caller()}` needs at least one step; the leading axis of `batches` is 0.")
    if length is not None and count != length:
        raise ValueError(
            f"`{caller()}` needs `length` to be the number of batches; expected {count}, got {length}.\n"
            "Leave `length` out where there are batches."
        )
    return count


def _leaves(batches: Any) -> list[tuple[tuple, Any]]:
    if isinstance(batches, Iterator):  # JAX warns of flattening one
        return [((), batches)]
    return jax.tree_util.tree_flatten_with_path(batches)[0]


T = TypeVar("T")


def scan_steps(
    step: Callable[[T, Any], tuple[T, Any]],
    state: T,
    batches: PyTree = None,
    *,
    length: int | None = None,
    donate: bool = False,
) -> tuple[T, PyTree]:
    """Runs many steps in one compiled loop: `jax.lax.scan` for states that hold more than arrays.

    Equal, within float rounding, to `for batch in batches: state, metrics = step(state, batch)`. Outside `jax.jit` it
    is compiled once for each `step` and each shape of its arguments: define `step` once. On a CPU, XLA's convolutions
    are several times slower in a loop: there, use a Python loop.

    **Arguments:**

    - `step`: a step of [`eqx_ensemble.train.make_step`][], or any `step(state, batch) -> (state, outputs)`.
    - `state`: the state before the first step: any PyTree that holds ensembles or training states.
    - `batches`: a PyTree of arrays `(steps, ...)`. In parts marked [`eqx_ensemble.Each`][], `steps` comes before
        `members`.
    - `length`: the number of steps, required without batches.
    - `donate`: whether the memory of `state` is reused for the result; its arrays can then no longer be used.

    **Returns:** the last state, and the outputs of all steps, each array `(steps, ...)`.

    **Raises:** `TypeError` or `ValueError` for a step that changes the structure, a shape, a dtype, or a leaf that is
    not an array.

    ```python
    ensemble, optimiser = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key), optax.adam(1e-2)
    step = ee.train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    state = ee.train.init(ensemble, optimiser, key=key)
    state, metrics = ee.train.scan_steps(step, state, jnp.ones((100, 32, 3)))  # 100 batches of 32 rows
    metrics.loss.shape  # (100, 4)
    ```
    """
    check_function(step, "step", example="train.make_step(loss, optimiser)")
    check_flag(donate, "donate")
    batches = take_in(batches, "batches")
    count = check_batches(batches, length)
    check_integers_fit(batches, argument="batches")
    own, nan = _in_loop(step, state)
    state = follow_hyper(state, step.optimiser) if isinstance(step, Step) else state
    scan = _scan if is_inside_transformation() else _donating_scan if donate else _compiled_scan
    state = _copy_duplicates(state) if scan is _donating_scan else state
    with nan, explain_list(batches):
        if not isinstance(step, Step):
            return scan((own, batches, count), state)
        known: Any = state
        after, outputs = scan((own, batches, count), open_ids(known))  # one program for all members
        return dataclasses.replace(after, ids=known.ids), outputs


def _in_loop(step: Callable[..., Any], state: Any) -> tuple[Callable[..., Any], contextlib.AbstractContextManager]:
    """The step as it runs in a loop, and the context to run it in."""
    if not isinstance(step, Step):
        return as_hashable_leaf(step), contextlib.nullcontext()
    check_train_state(state)
    return LoopStep(step), nan_is_data()


def _copy_duplicates(state: T) -> T:
    """Copies repeated arrays of the state, because JAX can donate an array only once."""
    seen: set[int] = set()

    def copy_duplicate(x: Any) -> Any:
        if not isinstance(x, jax.Array) or id(x) not in seen:
            seen.add(id(x))
            return x
        return x.copy()

    return jax.tree.map(copy_duplicate, state)


def _scan(read: tuple[Callable[..., Any], PyTree, int], state: PyTree) -> tuple[PyTree, PyTree]:
    step, batches, count = read
    leaves, treedef = jax.tree.flatten(state)
    are_arrays = list(map(is_member_array, leaves))
    constants = [None if is_array else leaf for is_array, leaf in zip(are_arrays, leaves, strict=True)]
    kept = []

    def rebuild(arrays: list[Any]) -> PyTree:
        left = iter(arrays)
        both = zip(are_arrays, constants, strict=True)
        return jax.tree.unflatten(treedef, [next(left) if is_array else constant for is_array, constant in both])

    def body(arrays: list[Any], batch: PyTree) -> tuple[list[Any], PyTree]:
        stepped = step(rebuild(arrays), batch)
        if not (isinstance(stepped, tuple) and len(stepped) == 2):
            got = f"a tuple of {len(stepped)}" if isinstance(stepped, tuple) else kind_text(stepped)
            raise TypeError(
                f"`{caller()}` needs `step` to return `(state, outputs)`, got {got}.\nWithout outputs: `(state, None)`."
            )
        after, outputs = stepped
        pairs = compare_trees([rebuild(arrays), after], rules=LOOP_RULES).leaves
        numbers, rest = eqx.partition(outputs, eqx.is_array_like)
        kept[:] = [rest]
        return [new for old, new in pairs if is_member_array(old)], numbers

    arrays = [leaf for is_array, leaf in zip(are_arrays, leaves, strict=True) if is_array]
    arrays, numbers = jax.lax.scan(body, arrays, batches, length=count)
    return rebuild(arrays), eqx.combine(numbers, kept[0])


_compiled_scan = CompiledCall(_scan)
_donating_scan = CompiledCall(_scan, donate=True)
