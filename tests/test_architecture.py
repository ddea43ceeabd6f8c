"""The rules of CONTRIBUTING.md that no linter knows. Each list names what does not keep a rule yet: it only shrinks."""

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import eqx_ensemble

ROOT = Path(eqx_ensemble.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

LONGEST_FILE = 450
MOST_METHODS = 9


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def functions(file: str) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef))


def docstrings(file: str) -> set[int]:
    """The positions of strings that stand by themselves."""
    return {id(node.value) for node in ast.walk(parsed(file)) if isinstance(node, ast.Expr)}


def assert_listed(found: set[str], listed: set[str], rule: str):
    assert not found - listed, f"{rule}: {sorted(found - listed)}"
    assert not listed - found, f"mended, so take them off the list: {sorted(listed - found)}"


# Names of checks.

HELPERS = {"array_leaves", "as_column", "concrete", "first_rows", "member_dtype", "promote", "standard_promotion"}
"""What several checks calculate with."""

UNRULY_CHECKS: set[str] = set()


def is_check_module(file: str) -> bool:
    return any(part in ("_check", "_check.py") or part.startswith("_check_") for part in file.split("/"))


def keeps_naming_rule(function: ast.FunctionDef) -> bool:
    """What a function of a check module is called says what it does: raise, give a text or an error, explain, ..."""
    name = function.name
    returns = "" if function.returns is None else ast.unparse(function.returns)
    if name.startswith("check_"):
        raises = any(isinstance(node, ast.Raise) for node in ast.walk(function))
        return raises or returns not in ("bool", "str")
    if name.startswith("explain_"):
        return any(ast.unparse(decorator).endswith("contextmanager") for decorator in function.decorator_list)
    if name.endswith(("_message", "_text")):
        return returns == "str"
    if name.endswith("_error"):
        return returns.endswith("Error")
    if name.startswith("warn_"):
        return returns == "None"
    if name.startswith(("is_", "has_", "can_")):
        return returns == "bool" or returns.startswith("TypeGuard")
    return name in HELPERS


def unruly_checks(tree: ast.Module) -> set[str]:
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not keeps_naming_rule(node)
    }


@pytest.mark.slow
def test_checks_are_named_for_what_they_do():
    found = {name for file in FILES if is_check_module(file) for name in unruly_checks(parsed(file))}
    assert_listed(found, UNRULY_CHECKS, "check_x raises, x_message is a text, explain_x a context, warn_x, is_x")


@pytest.mark.parametrize(
    "source",
    [
        "def valid(x): ...",
        "def check_it(x) -> bool: ...",
        "def check_it(x) -> str: ...",
        "def it_message(x): ...",
        "def it_error(x) -> str: ...",
        "def explain_it(x): ...",
        "def is_it(x) -> str: ...",
    ],
)
def test_an_unruly_check_is_found(source):
    assert unruly_checks(ast.parse(source))


# What `python -O` leaves out is not needed.


def asserted_checks(tree: ast.AST) -> Iterator[str]:
    """Assertions that say more than `x is not None`, which tells type checkers what is known."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            names = [x for x in ast.walk(node.test) if not isinstance(x, ast.expr_context | ast.cmpop | ast.Name)]
            plain = all(isinstance(x, ast.Compare | ast.Attribute | ast.Subscript | ast.Constant) for x in names)
            if not (plain and ast.unparse(node.test).endswith(" is not None")):
                yield ast.unparse(node.test)


@pytest.mark.slow
def test_no_check_is_an_assertion():
    found = {f"{file}: {text}" for file in FILES for text in asserted_checks(parsed(file))}
    assert_listed(found, set(), "`python -O` leaves assertions out: raise")


@pytest.mark.parametrize("source", ["assert x > 0, 'x'", "assert f(x) is not None", "assert a and b is not None"])
def test_an_asserted_check_is_found(source):
    assert list(asserted_checks(ast.parse(source)))


# Classes are compared as classes.

COMPARED_BY_NAME: set[str] = set()


def class_names_compared(tree: ast.AST) -> Iterator[str]:
    """Comparisons of `__name__` with a text, and look-ups of it among texts."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        names = [x for x in sides if isinstance(x, ast.Attribute) and x.attr in ("__name__", "__qualname__")]
        texts = [x for side in sides for x in ast.walk(side) if isinstance(x, ast.Constant) and type(x.value) is str]
        if names and texts and all("__name__" != text.value for text in texts):
            yield ast.unparse(node)


@pytest.mark.slow
def test_no_class_is_compared_by_its_name():
    found = {f"{file}: {text}" for file in FILES for text in class_names_compared(parsed(file))}
    assert_listed(found, COMPARED_BY_NAME, "import the class and use isinstance")


@pytest.mark.parametrize("source", ['type(x).__name__ == "Revive"', 'kind.__name__ in ("Run", "Folds")'])
def test_a_class_compared_by_its_name_is_found(source):
    assert list(class_names_compared(ast.parse(source)))


# One concept, one name, one home.

TWO_HOMES: set[str] = set()


def exported(module: str) -> dict[str, object]:
    """The names that a package re-exports, with what they are; when they are imported does not matter."""
    loaded = importlib.import_module(module)
    tree = ast.parse(Path(str(loaded.__file__)).read_text())
    names = [
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and not alias.asname.startswith("_")
    ]
    return {name: getattr(loaded, name) for name in names}


def public_packages(package: str = "eqx_ensemble") -> Iterator[str]:
    yield package
    for name, value in exported(package).items():
        if getattr(value, "__name__", None) == f"{package}.{name}" and hasattr(value, "__path__"):
            yield from public_packages(f"{package}.{name}")


def homes(packages: list[str]) -> dict[int, set[str]]:
    places: dict[int, set[str]] = {}
    for package in packages:
        for name, value in exported(package).items():
            if not hasattr(value, "__path__"):
                places.setdefault(id(value), set()).add(f"{package}.{name}".removeprefix("eqx_ensemble."))
    return places


def test_every_public_name_has_one_home():
    found = {", ".join(sorted(names)) for names in homes(list(public_packages())).values() if len(names) > 1}
    assert_listed(found, TWO_HOMES, "exported twice")


# Small classes, short files.

LARGE_CLASSES: set[str] = {"Crew", "Loop", "Run"}
LONG_FILES: set[str] = set()


def large_classes(tree: ast.AST) -> set[str]:
    """Classes with too many methods, dunders and properties included; overloads count once."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and len({method.name for method in ast.walk(node) if isinstance(method, FUNCTIONS) and method in node.body})
        > MOST_METHODS
    }


def test_classes_are_small():
    found = {name for file in FILES for name in large_classes(parsed(file))}
    assert_listed(found, LARGE_CLASSES, f"more than {MOST_METHODS} methods")


def test_a_large_class_is_found():
    body = "".join(f"\n    def f{i}(self): ..." for i in range(MOST_METHODS + 1))
    assert large_classes(ast.parse(f"class Large:{body}")) == {"Large"}


def test_files_are_short():
    found = {file for file in FILES if len((ROOT / file).read_text().splitlines()) > LONGEST_FILE}
    assert_listed(found, LONG_FILES, f"more than {LONGEST_FILE} lines")


# A private module has a public name, or two modules that import it.

ONE_CUSTOMER: set[str] = {  # which would be too long with it
    "_boundary/_checks.py",
    "train/_convolutions.py",
    "train/_order.py",
    "train/_ranking.py",
    "train/_saver.py",
}


@cache
def importers() -> dict[str, set[str]]:
    """The files that import each file, by package path."""
    found: dict[str, set[str]] = {file: set() for file in FILES}
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = file.split("/")[: -node.level]
                inner = [*package, *(node.module or "").split(".")] if node.module else package
                for path in ["/".join(inner), *("/".join([*inner, alias.name]) for alias in node.names)]:
                    if f"{path}.py" in found:
                        found[f"{path}.py"].add(file)
    return found


def test_no_private_module_serves_one_other():
    faces = ("__init__.py", "_engine.py")
    private = {file: by for file, by in importers().items() if Path(file).name.startswith("_")}
    private = {file: by for file, by in private.items() if not file.endswith(faces)}
    found = {file for file, by in private.items() if len(by) == 1 and not next(iter(by)).endswith(faces)}
    assert_listed(found, ONE_CUSTOMER, "put it into the module that imports it")


def test_importers_are_found():
    assert {"train/_fit.py", "train/__init__.py"} & importers()["train/_run.py"]


# A package reaches the private modules of another through its `_engine`; those of the core are imported where they are.

CORE = "train"

PRIVATE_IMPORTS: set[str] = set()


def private_imports(file: str, tree: ast.AST) -> Iterator[str]:
    """The private modules of other packages, but for `_engine`, that a file imports from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            path = [*file.split("/")[: -node.level], *node.module.split(".")]
            is_private = any(x.startswith("_") and x != "_engine" for x in path[1:])
            if is_private and path[0] not in (CORE, file.split("/")[0]):
                yield ".".join(path)


def test_private_modules_are_reached_through_one():
    found = {f"{file}: {path}" for file in FILES for path in private_imports(file, parsed(file))}
    assert_listed(found, PRIVATE_IMPORTS, "import it from the `_engine` of its package")


def test_an_engine_holds_what_others_use():
    taken: dict[str, set[str]] = {file: set() for file in FILES if file.endswith("_engine.py")}
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and node.level and (node.module or "").endswith("_engine"):
                path = "/".join([*file.split("/")[: -node.level], *str(node.module).split(".")])
                taken[f"{path}.py"] |= {alias.name for alias in node.names}
    given = {file: {x.name for node in parsed(file).body[1:] for x in node.names} for file in taken}
    assert_listed({f"{file}: {name}" for file in taken for name in given[file] - taken[file]}, set(), "unused")


def test_a_private_import_is_found():
    found = lambda file, source: [*private_imports(file, ast.parse(source))]
    assert found("acquire/_pool.py", "from ..tree._sum import x") == ["tree._sum"]
    assert found("plot.py", "from .scores._binning import x") == ["scores._binning"]
    assert not found("plot.py", "from .scores._engine import x")


# Messages name a function by its dotted path, without the package.

PREFIXED: set[str] = set()


def prefixed(tree: ast.AST, apart: set[int]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is str and id(node) not in apart:
            if "`eqx_ensemble." in node.value:
                yield node.value.partition("`eqx_ensemble.")[2].partition("`")[0]


def test_messages_name_functions_without_the_package():
    found = {text for file in FILES for text in prefixed(parsed(file), docstrings(file))}
    assert_listed(found, PREFIXED, "write `stack`, not `eqx_ensemble.stack`")


def test_a_prefix_is_found():
    assert list(prefixed(ast.parse('f"`eqx_ensemble.{name}` needs"'), set()))


# Functions are verbs or nouns.

PARTICIPLES: set[str] = set()
IRREGULAR = set(
    "begun born bought bound brought built caught chosen come cut done drawn driven fallen felt forgotten found frozen "
    "given gone grown held hidden kept known laid led left lent lost made meant met paid put read risen run said seen "
    "sent set shown shrunk spent split spread stood sworn taken taught thought thrown told torn understood woken won "
    "worn written".split()
)
VERBS = {
    "cut",
    "found",
    "lead",
    "need",
    "put",
    "read",
    "run",
    "seed",
    "set",
    "shard",
    "shed",
    "speed",
    "split",
    "spread",
}


def participles(tree: ast.AST) -> set[str]:
    names = {node.name for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}
    return {
        name
        for name in names
        if (word := name.strip("_")) not in VERBS and (word in IRREGULAR or word.endswith("ed")) and "_" not in word
    }


def test_no_function_is_a_past_participle():
    public = {name.rpartition(".")[2] for names in homes(list(public_packages())).values() for name in names}
    found = {name for file in FILES for name in participles(parsed(file)) - public}
    assert_listed(found, PARTICIPLES, "name it by a verb or a noun")


@pytest.mark.parametrize("name", ["joined", "_made", "held"])
def test_a_past_participle_is_found(name):
    assert participles(ast.parse(f"def {name}(): ...")) == {name}
