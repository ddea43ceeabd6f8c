"""What counts as a function among callable PyTrees."""

import functools as ft
from typing import Any

import equinox as eqx
import jax


def is_wrapper(fn: Any) -> bool:
    """Whether a callable PyTree stands for a function: a method of a Module, a partial, a transformed function."""
    is_module = isinstance(fn, eqx.Module) and (isinstance(fn, eqx.Partial) or hasattr(type(fn), "__wrapped__"))
    return callable(fn) and (is_module or isinstance(fn, ft.partial))


def is_data_function(source: Any) -> bool:
    """Whether a worker calls this to make its data; a Module with arrays is data itself, its methods are functions."""
    return callable(source) and (is_wrapper(source) or not any(map(eqx.is_array, jax.tree.leaves(source))))
