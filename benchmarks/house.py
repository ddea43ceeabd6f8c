"""What a reader of the library meets: how many files and lines, what the lines are, and how far a call goes.

Lines are code without documentation, comments and blank lines. A line is a check if it raises, or belongs to a function
that only checks or words a message; else part of an import, a signature or a body.
"""

import ast
import collections
import pathlib
import statistics
import sys
import traceback
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _measure import Report, Row, script

import eqx_ensemble as ee

ROOT = pathlib.Path(ee.__file__).parent
CHECKS, TEXTS = ("check_", "explain_", "warn_"), ("_message", "_text", "_hint")


def measure(quick: bool) -> Report:
    del quick  # there is one size
    paths = sorted(ROOT.rglob("*.py"))
    lines = [len(path.read_text().splitlines()) for path in paths]
    counts = sum((kinds(path) for path in paths), collections.Counter())
    code = sum(counts[kind] for kind in ("import", "signature", "check", "body"))
    nodes = [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    rows = [
        figure("files", len(paths), "<= 170"),
        figure("lines of code", code, "<= 18000"),
        figure("lines of the median file", statistics.median(lines), ">= 160"),
        figure("lines of the longest file", max(lines), "<= 450"),
        figure("percent of the code: bodies", 100 * counts["body"] / code, ">= 60"),
        figure("percent of the code: checks", 100 * counts["check"] / code, "<= 9"),
        figure("percent of the code: signatures", 100 * counts["signature"] / code, "<= 16"),
        figure("percent of the code: imports", 100 * counts["import"] / code, "<= 12"),
        figure("comments", counts["comment"], ">= 600"),
        figure("functions with a parameter `name: str`", sum(map(has_name, (n for _, n in nodes))), "<= 10"),
        figure("imports of another package's private modules", sum(is_private(*pair) for pair in nodes), "<= 120"),
        figure("functions of 12 parameters and more", sum(is_wide(n) for _, n in nodes), "<= 4"),
    ]
    targets = {"frames": 8, "files on the way": 5, "traces of the loss": 2, "files": 22, "functions": 280}
    targets |= {"changes of file": 900}
    found = way_to_loss()
    rows += [figure(f"a plain `fit`: {name}", found[name], f"<= {limit}") for name, limit in targets.items()]
    return Report("House", rows)


def figure(question: str, value: float, target: str) -> Row:
    return Row(question, "count" if "percent" not in question else "share", float(value), None, None, None, target)


def kinds(path: pathlib.Path) -> collections.Counter:
    """How many lines of a file are of each kind."""
    text = path.read_text()
    lines = [line.strip() for line in text.splitlines()]
    kind = ["" if not line else "comment" if line.startswith("#") else "body" for line in lines]
    is_check_file = any(part.startswith(("_check", "_explain")) for part in path.relative_to(ROOT).parts)

    def mark(first: int, last: int, new: str, *old: str) -> None:
        kind[first - 1 : last] = [new if x in old else x for x in kind[first - 1 : last]]

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                mark(node.lineno, node.end_lineno, "documentation", "body", "", "comment", "check")
            case ast.Import() | ast.ImportFrom():
                mark(node.lineno, node.end_lineno, "import", "body")
            case ast.FunctionDef():
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                mark(first, node.body[0].lineno - 1, "signature", "body")
                name = node.name.lstrip("_")
                if name.startswith(CHECKS) or name.endswith(TEXTS):
                    mark(first, node.end_lineno, "check", "body", "signature")
            case ast.Raise():
                mark(node.lineno, node.end_lineno, "check", "body")
    if is_check_file:
        mark(1, len(kind), "check", "body", "signature")
    return collections.Counter(kind)


def parameters(node: ast.AST) -> list[ast.arg]:
    return [*node.args.args, *node.args.kwonlyargs] if isinstance(node, ast.FunctionDef) else []


def has_name(node: ast.AST) -> bool:
    return any(x.arg == "name" and getattr(x.annotation, "id", "") == "str" for x in parameters(node))


def is_wide(node: ast.AST) -> bool:
    public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    return public and len(parameters(node)) >= 12 and bool(ast.get_docstring(node))


def is_private(path: pathlib.Path, node: ast.AST) -> bool:
    """Whether a statement imports from a private module of another package of the library."""
    own = path.relative_to(ROOT).parts
    if not isinstance(node, ast.ImportFrom) or not node.level or node.module is None:
        return False
    target = [*own[: len(own) - node.level], *node.module.split(".")]
    return len(target) > 1 and target[0] != own[0] and any(part.startswith("_") for part in target[1:])


def way_to_loss() -> dict[str, int]:
    """How far it is from `fit` to the loss, and what a call runs that compiles anew."""
    key, data = jax.random.key(0), (jnp.ones((100, 3)), jnp.zeros((100, 1)))
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    ways: list[list[str]] = []

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def watched(model, batch, key):
        ways.append([frame.filename for frame in traceback.extract_stack() if is_own(frame.filename)])
        return mse(model, batch, key)

    ee.fit(ensemble, mse, optax.sgd(1e-3), data, epochs=2, key=key)  # imports what is imported when it is used
    calls = list(calls_of(lambda: ee.fit(ensemble, watched, optax.adam(1e-3), data, epochs=2, key=key)))
    return {
        "frames": max(map(len, ways)),
        "files on the way": max(len(set(way)) for way in ways),
        "traces of the loss": len(ways),
        "files": len({file for file, _ in calls}),
        "functions": len(set(calls)),
        "changes of file": sum(a[0] != b[0] for a, b in zip([("", 0), *calls], calls, strict=False)),
    }


def is_own(file: str) -> bool:
    return file.startswith(str(ROOT))


def calls_of(run) -> Iterator[tuple[str, int]]:
    """The library's functions that run, in order, by file and line."""
    calls: list[tuple[str, int]] = []

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and is_own(code.co_filename):
            calls.append((code.co_filename, code.co_firstlineno))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    yield from calls


if __name__ == "__main__":
    script(measure)
