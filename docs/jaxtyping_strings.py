"""Shapes of jaxtyping are strings, which griffe would show as Python expressions."""

import ast
from typing import Any

import griffe


class JaxtypingStrings(griffe.Extension):
    """Signatures show `Float[Array, "..."]` as written, not `Float[Array, ...]`."""

    def on_function_instance(
        self, *, node: Any, func: griffe.Function, **_: Any
    ) -> None:
        """The annotations of a function."""
        if not isinstance(node, ast.AST):
            return
        own = node.args
        for part in (*own.posonlyargs, *own.args, *own.kwonlyargs):
            if _has_shape(part.annotation):
                func.parameters[part.arg].annotation = _as_written(
                    part.annotation, func
                )
        if _has_shape(node.returns):
            func.returns = _as_written(node.returns, func)

    def on_attribute_instance(
        self, *, node: Any, attr: griffe.Attribute, **_: Any
    ) -> None:
        """The annotation of a field."""
        if isinstance(node, ast.AnnAssign) and _has_shape(node.annotation):
            attr.annotation = _as_written(node.annotation, attr)


def _has_shape(node: ast.AST | None) -> bool:
    """Whether an annotation holds a shape; other strings are names defined later."""
    return node is not None and any(
        _is_string(x.slice.elts[-1]) for x in ast.walk(node) if _is_of_several(x)
    )


def _is_of_several(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and len(node.slice.elts) > 1
    )


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _as_written(node: Any, owner: Any) -> Any:
    return griffe.get_expression(node, parent=owner.parent, parse_strings=False)
