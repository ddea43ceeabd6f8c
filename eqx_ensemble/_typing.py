import functools as ft
import re
from collections.abc import Iterator
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, no_type_check

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import Shaped

from ._ensemble import Ensemble
from ._leaf_text import leaf_text
from ._leaves import is_member_array, path_text
from ._pytree import PyTree

_USE = '`Stacked` is for annotations and `isinstance`: `Stacked[Model, "members"]`, with the names of leading axes.'
_MOST = 4


class _StackedMeta(type):
    model: Any = None
    axes: str = ""
    num_axes: int = 0
    sizes: Any = None

    def __getitem__(cls, item: Any) -> type:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[1], str):
            raise TypeError(_USE)
        model, axes = item
        if any(name == "..." or name.lstrip("#?_").startswith("*") for name in axes.split()):
            raise ValueError(f"`Stacked` needs a fixed number of leading axes, got {axes!r}.")
        if isinstance(model, _StackedMeta) and model.num_axes:  # the inner axes follow, as in `Float[Float[...], ...]`
            model, axes = model.model, f"{axes} {model.axes}"
        return _subscript(cls, model, " ".join(axes.split()))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_USE)

    def __repr__(cls) -> str:
        return cls.__name__ if cls.num_axes else type.__repr__(cls)

    # Not for jaxtyping's import hook: a decorated check would bind the axes in a separate scope.
    @no_type_check
    def __instancecheck__(cls, obj):
        return cls.__instancecheck_str__(obj) == ""

    @no_type_check
    def __instancecheck_str__(cls, obj):
        """The reason why `obj` is no instance, for beartype's message; empty if it is one."""
        if not cls.num_axes:
            raise TypeError(_USE)
        reason = ""
        for tree in _readings(obj, cls.model):
            sizes: dict[tuple[int, ...], str] = {}
            for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
                if is_member_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
                    sizes.setdefault(leaf.shape[: cls.num_axes], f"{leaf_text(leaf)} at `{path_text(path)}`")
            if len(sizes) != 1:
                found = ", ".join(list(sizes.values())[:_MOST]) or "no array"
                reason = f"its arrays have no common size of leading axes: {found}"
            else:  # checked for all arrays at once, so that a rejected object binds no axis
                misfit = cls.sizes.__instancecheck_str__(jax.ShapeDtypeStruct(*sizes, bool))
                if not misfit:
                    return ""
                misfit = misfit.removeprefix("this array has ")
                reason = f'its arrays have leading axes {next(iter(sizes))}, which do not fit "{cls.axes}": {misfit}'
        return reason or f"this `{kind_of_members(obj)}` is no `{cls!r}`"


@ft.cache
def _subscript(cls: _StackedMeta, model: Any, axes: str) -> _StackedMeta:
    _is_a(None, model)  # raises for what `isinstance` cannot check
    described = re.sub(r"\b(\w+\.)+", "", eqx.tree_pformat(model, width=1000))
    name = f'{cls.__name__}[{described}, "{axes}"]'
    sizes = Shaped[jax.ShapeDtypeStruct, axes]
    fields = {"model": model, "axes": axes, "num_axes": len(axes.split()), "sizes": sizes, "__doc__": None}
    # Another module would show in the `repr` of a union but not in ours, which beartype rejects.
    return _StackedMeta(name, (cls,), fields | {"__module__": "builtins"})


def _readings(obj: Any, model: Any) -> Iterator[PyTree]:
    """The tree whose arrays have the axes: of a stacked `model`, or of an ensemble whose members are `model`s."""
    if not isinstance(obj, Ensemble):
        if _is_a(obj, model):
            yield obj
    elif _is_a(obj, model) or _is_a(obj.stacked, model):
        leaves, treedef = jax.tree.flatten(obj.stacked, is_leaf=lambda x: x is None)
        own = zip(leaves, obj.axes, strict=True)  # not those which members share
        yield jax.tree.unflatten(treedef, [x if axis == 0 else None for x, axis in own])


def _is_a(obj: Any, model: Any) -> bool:
    """`isinstance`, also for annotations without a run-time class."""
    if model is Any:
        return True
    if isinstance(model, TypeVar):
        choices = (model.__bound__,) if model.__bound__ is not None else model.__constraints__ or (Any,)
        return any(_is_a(obj, choice) for choice in choices)
    origin, args = get_origin(model), get_args(model)
    if origin is None:
        return isinstance(obj, model)
    if origin is Annotated:
        return _is_a(obj, args[0])
    if origin in (Union, UnionType):
        return any(_is_a(obj, choice) for choice in args)
    if isinstance(obj, origin) and isinstance(obj, Ensemble) and len(args) == 1:
        return _is_a(obj.stacked, args[0])
    return isinstance(obj, origin)  # the arguments of other generic classes cannot be checked


def kind_of_members(obj: Any) -> str:
    """The type of a tree in words: `Ensemble[MLP]` for an ensemble."""
    name = type(obj).__name__
    return f"{name}[{kind_of_members(obj.stacked)}]" if isinstance(obj, Ensemble) else name


if TYPE_CHECKING:
    from typing import Annotated as Stacked
else:

    class Stacked(metaclass=_StackedMeta):
        """The type of stacked models, to annotate with: `Stacked[Model, "members"]`.

        It accepts an [`eqx_ensemble.Ensemble`][] of `Model`s, and a `Model` whose arrays all have the leading axes,
        such as `equinox.filter_vmap(make)(keys)`. Under `jaxtyping.jaxtyped` or its import hook, axis names are bound
        together with those of the other annotations.

        Members are checked by `isinstance`, and only their arrays have the axes; shared leaves of an `Ensemble` do not.
        A single model whose arrays happen to agree on their first axis passes as a stacked one.

        Type checkers read `Stacked[Model, "members"]` as `Model`; for the attributes of an `Ensemble`, write
        `Stacked[Ensemble[Model], "members"]`.

        **Arguments:**

        - `Model`: the type of one member: a class, a runtime-checkable protocol, `Callable`, `Any`, a type variable,
            `Ensemble[...]`, or a union of these.
        - the axes, in the syntax of jaxtyping: names (`"populations members"`), sizes (`"4"`), expressions
            (`"2*members"`), but no `...` and no `*name`.

        **Raises:** `TypeError` for a wrong argument; jaxtyping's errors for wrong axes.

        ```python
        from beartype import beartype
        from jaxtyping import Array, Float, jaxtyped


        @jaxtyped(typechecker=beartype)
        def disagreement(
            ensemble: ee.Stacked[eqx.nn.MLP, "members"], w: Float[Array, " members"]
        ) -> Float[Array, ""]:
            outputs = ee.map_members(lambda model: model(jnp.ones(2)))(ensemble)
            return w @ (outputs - w @ outputs) ** 2


        ensemble = ee.build(lambda key: eqx.nn.MLP(2, "scalar", 8, 1, key=key), 5, key=key)
        # seven weights, or a single model, raise an error
        disagreement(ensemble, jnp.full(5, 0.2))
        ```
        """
