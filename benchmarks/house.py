"""What a reader of the library meets: how many files and lines, and what the lines are.

Lines are code without documentation, comments and blank lines. A line is a check if it raises, or belongs to a function
that only checks or words a message; else part of an import, a signature or a body.
"""

import ast
import collections
import pathlib
import statistics

from _measure import Report, Row, script

import eqx_ensemble as ee

ROOT = pathlib.Path(ee.__file__).parent
CHECKS, TEXTS = ("check_", "explain_", "warn_"), ("_message", "_text", "_hint")


def measure(quick: bool) -> Report:
    paths = sorted(ROOT.rglob("*.py"))
    lines = [len(path.read_text().splitlines()) for path in paths]
    counts = sum((kinds(path) for path in paths), collections.Counter())
    code = sum(counts[kind] for kind in ("import", "signature", "check", "body"))
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
    ]
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


if __name__ == "__main__":
    script(measure)
