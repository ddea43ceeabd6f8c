import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

from .._check import check_flag, check_function, check_integers_fit, is_inside_transformation, is_member_array
from .._compiled import filter_jit
from .._foreign import as_hashable_leaf, take_in
from .._pytree import PyTree
from ..tree._compare import LOOP_RULES, compare_trees
from ._check_scan import check_batches, check_stepped, explain_list
from ._opt_hyper import follow_hyper
from ._state import check_train_state
from ._step import Step, step_in_loop
from .compiled._health import nan_is_data

T = TypeVar("T")
_NAME = "train.scan_steps"


def scan_steps(
    step: Callable[[T, Any], tuple[T, Any]],
    state: T,
    batches: PyTree = None,
    *,
    length: int | None = None,
    donate: bool = False,
) -> tuple[T, PyTree]:
    """Runs many steps in one compiled loop: `jax.lax.scan` for states that hold more than arrays.

    Equal, within float rounding, to `for batch in batches: state, metrics = step(state, batch)`. `jax.lax.scan` rejects
    ensembles and training states, because functions such as activations are among their leaves; here only arrays are
    carried, and everything else must stay unchanged. It may be called inside `jax.jit`, `jax.vmap` and
    [`eqx_ensemble.map_members`][]. Outside of them it is compiled, once for each `step` and each shape of its
    arguments: define `step` once.

    **Arguments:**

    - `step`: a step of [`eqx_ensemble.train.make_step`][], or a function `step(state, batch) -> (state, outputs)` of
        your own, which may call one.
    - `state`: the state before the first step: a training state, or any PyTree that holds ensembles or training states.
    - `batches`: the batches of all steps, a PyTree of arrays `(steps, ...)`. In parts marked
        [`eqx_ensemble.Each`][], `steps` comes before `members`. `None`, with `length`, for steps without a batch.
    - `length`: the number of steps, required without batches.
    - `donate`: whether the memory of `state` is reused for the result; `state`, and other trees that share arrays with
        it, can then no longer be used. It has no effect inside `jax.jit`.

    **Returns:** the last state, and the outputs of all steps, each array `(steps, ...)`: the `loss` of
    [`eqx_ensemble.train.Metrics`][] is `(steps, members)`. Outputs that are not numbers are returned once.

    **Raises:** `TypeError` or `ValueError` for batches with different numbers of steps or none; and for a step that
    does not return a pair, or that changes the structure, a shape, a dtype, or a leaf that is not an array.

    On a CPU, XLA's convolutions are several times slower in a loop: call the step in a Python loop instead.

    ```python
    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    optimiser = optax.adam(1e-2)
    state = ee.train.init(ensemble, optimiser, key=key)
    step = ee.train.make_step(mse, optimiser)
    batches = jnp.ones((100, 32, 3)), jnp.zeros((100, 32, 1))  # 100 batches of 32 rows
    state, metrics = ee.train.scan_steps(step, state, batches)
    metrics.loss.shape  # (100, 4)
    ```
    """
    check_function(step, "step", name=_NAME, example="train.make_step(loss, optimiser)")
    check_flag(donate, "donate", name=_NAME)
    batches = take_in(batches, "batches", name=_NAME)
    count = check_batches(batches, length, name=_NAME)
    check_integers_fit(batches, argument="batches", name=_NAME)
    own, nan = _in_loop(step, state)
    state = follow_hyper(state, step.optimiser, name=_NAME) if isinstance(step, Step) else state
    scan = _scan if is_inside_transformation() else _donating_scan if donate else _compiled_scan
    state = _copy_duplicates(state) if scan is _donating_scan else state
    with nan, explain_list(batches):
        return scan((own, batches, count), state)


def _in_loop(step: Callable[..., Any], state: Any) -> tuple[Callable[..., Any], contextlib.AbstractContextManager]:
    """The step as it runs in a loop, and the context to run it in."""
    if not isinstance(step, Step):
        return as_hashable_leaf(step), contextlib.nullcontext()
    check_train_state(state)
    return step_in_loop(step, state), nan_is_data()


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
        check_stepped(stepped, name=_NAME)
        after, outputs = stepped
        pairs = compare_trees([rebuild(arrays), after], name=_NAME, rules=LOOP_RULES).leaves
        numbers, rest = eqx.partition(outputs, eqx.is_array_like)
        kept[:] = [rest]
        return [new for old, new in pairs if is_member_array(old)], numbers

    arrays = [leaf for is_array, leaf in zip(are_arrays, leaves, strict=True) if is_array]
    arrays, numbers = jax.lax.scan(body, arrays, batches, length=count)
    return rebuild(arrays), eqx.combine(numbers, kept[0])


_compiled_scan = filter_jit(_scan)
_donating_scan = filter_jit(_scan, donate="all-except-first")
