from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.export import symbolic_shape

from .. import _axes, _keys
from .._caller import caller
from .._check import check_optional_function, check_positive_int, is_key, is_member_array, is_traced, member_dtype
from .._combination import of_predictions
from .._ensemble import Ensemble, check_ensemble, check_model_state, check_model_state_given
from .._predict import MemberCall, PredictionInputs, predict_batch
from .._pytree import PyTree
from ..plan import AbstractPlan
from ..plan._engine import as_plan
from ..train._engine import check_run_weights
from ._check import check_output, check_row_shapes, check_string_keys


class Parts(NamedTuple):
    """The arguments of a program in addition to its input."""

    ensemble: Ensemble[Any]
    state: PyTree
    weights: jax.Array | None
    keys: jax.Array | None


class Packed(NamedTuple):
    """The arrays of some parts by name.

    **Attributes:**

    - `arrays`: `model.layers.0.weight` and the like. Typed keys are replaced by their data, which files can hold.
    - `stacked`: the names of the arrays that carry the members axis.
    - `unpack`: rebuilds the parts from these arrays, or from others with the same names.
    """

    arrays: dict[str, jax.Array | np.ndarray]
    stacked: frozenset[str]
    unpack: Callable[[dict[str, Any]], Parts]


def pack(parts: Parts) -> Packed:
    """Separates the arrays of some parts; `unpack` keeps everything else."""
    own = {"model": parts.ensemble.stacked, "state": parts.state, "weights": parts.weights, "keys": parts.keys}
    keyed, treedef = jtu.tree_flatten_with_path((own, {"model": parts.ensemble.shared}))
    leaves = [leaf for _, leaf in keyed]
    arrays, positions, stacked = {}, {}, set()
    for position, (path, leaf) in enumerate(keyed):
        if is_member_array(leaf):
            text = _distinct(jtu.keystr(path[1:], simple=True, separator="."), arrays)
            if is_traced(leaf):
                raise TypeError(
                    f"`{caller()}` needs numbers, and the leaf `{text}` is traced: export outside `jax.jit`."
                )
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                raise NotImplementedError(
                    f"`{caller()}` needs all numbers in one process, and the leaf `{text}` is sharded over "
                    "several.\nGather it first: `distributed.to_host(tree)`."
                )
            generator = str(jax.random.key_impl(leaf)) if is_key(leaf) else None
            arrays[text] = _plain(leaf) if generator is None else jax.random.key_data(leaf)
            positions[text] = position, generator
            if path[0] == jtu.SequenceKey(0):
                stacked.add(text)

    def unpack(arrays: dict[str, Any]) -> Parts:
        filled = list(leaves)
        for text, (position, generator) in positions.items():
            x = jnp.asarray(arrays[text])
            filled[position] = x if generator is None else jax.random.wrap_key_data(x, impl=generator)
        own, shared = jtu.tree_unflatten(treedef, filled)
        count = next(arrays[text].shape[0] for text in arrays if text in stacked)
        # Ids select random streams, and `keys` are drawn already.
        ensemble = Ensemble(own["model"], shared["model"], jnp.arange(count, dtype=jnp.int32))
        return Parts(ensemble, own["state"], own["weights"], own["keys"])

    return Packed(arrays, frozenset(stacked), unpack)


def _plain(leaf: Any) -> jax.Array | np.ndarray:
    """A leaf with the dtype that it has in a program."""
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype=member_dtype(leaf))


def _distinct(text: str, taken: dict[str, Any]) -> str:
    """A name that is not taken: a custom node may give two children the same name."""
    number = next(number for number in range(len(taken) + 1) if _with_number(text, number) not in taken)
    return _with_number(text, number)


def _with_number(text: str, number: int) -> str:
    return text if number == 0 else f"{text}#{number}"


def plain(tree: PyTree, *, path: str = "") -> PyTree:
    """Converts a tree to dicts, lists and tuples, which need no class; named tuples become dicts of their fields."""
    if tree is None:
        return None
    if isinstance(tree, tuple) and type(tree) is not tuple and (fields := getattr(tree, "_fields", None)):
        tree = dict(zip(fields, tree, strict=True))
    if type(tree) is dict:
        check_string_keys(tree, path)
        return {key: plain(value, path=f"{path}[{key!r}]") for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(plain(value, path=f"{path}[{i}]") for i, value in enumerate(tree))
    if not _axes.is_array(tree):
        check_output(tree, path)
    return jnp.asarray(tree)


class ExportJob(NamedTuple):
    """A prediction to export.

    **Attributes:**

    - `run`: the prediction of all members for a batch, combined, in plain containers.
    - `packed`: the arrays in the first argument of `run`.
    - `row`: shapes and dtypes of one row of the input.
    """

    run: Callable[[Parts, PyTree], PyTree]
    packed: Packed
    row: PyTree


def prepare_export(
    ensemble: Ensemble[Any],
    call: MemberCall,
    *,
    shapes: PyTree,
    combine: Callable[..., Any] | None,
    weights: Any,
    state: Any,
    plan: AbstractPlan | None = None,
    key: Any = None,
) -> ExportJob:
    """Checks the arguments of an export, and makes its job."""
    check_ensemble(ensemble)
    check_optional_function(call.fn, "fn", example="lambda model, x: model(x)")
    check_optional_function(combine, "combine", example="combine.mean")
    row = check_row_shapes(shapes)
    check_model_state_given(ensemble.stacked, state)
    check_model_state(state, ensemble.num_members)
    convex = check_run_weights(weights, np.ones(ensemble.num_members, bool), combine)
    keys = None if key is None else _keys.member_keys(_keys.root(key), ensemble.ids, purpose="predict")
    plan = as_plan(plan)
    if plan.choice is not plan:
        raise TypeError(
            f'`{caller()}` needs a concrete plan, got `plan="auto"`: what is fastest can be tried only where the '
            "program runs.\nPass `Vmap()`, or what `predict` chose with `plan=Auto()`: `plan.choice`."
        )

    def run(parts: Parts, x: PyTree) -> PyTree:
        rows = jnp.arange(jax.tree.leaves(x)[0].shape[0])
        keys = None if parts.keys is None else _axes.Each(parts.keys)
        out = predict_batch(plan, call, PredictionInputs(parts.ensemble, x, parts.state, keys), rows)
        if combine is not None:
            fn = of_predictions(combine)
            out = fn(out) if parts.weights is None else fn(out, weights=parts.weights)
        return plain(out)

    convex = None if convex is None else jnp.asarray(convex)
    return ExportJob(run, pack(Parts(ensemble, state, convex, keys)), row)


def with_constants(job: ExportJob) -> Callable[[PyTree], PyTree]:
    """The prediction for a batch, with all arrays as constants."""
    return lambda x: job.run(job.packed.unpack(job.packed.arrays), x)


def batches(row: PyTree, batch_size: int | None) -> tuple[PyTree, Any]:
    """The shapes of a batch, with a symbolic number of rows if `batch_size` is `None`; and a symbol for the members."""
    batch, members = symbolic_shape("batch, members")
    if batch_size is not None:
        batch = check_positive_int(batch_size, "batch_size")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), row), members
