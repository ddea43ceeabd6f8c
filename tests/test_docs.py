"""The documented names are the public names, and every example in the documentation runs."""

import ast
import contextlib
import functools
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import re
import signal
import subprocess
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

import eqx_ensemble

from .marking import slow_but
from .pages import blocks, difference, run_block, undefined_names

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# `test_notebooks` runs the examples and the start page.
RUN = [ROOT / "README.md", *(page for page in PAGES if page.parent.name != "examples" and page.name != "start.md")]
WITH_CODE = {str(page.relative_to(ROOT)): page for page in RUN if blocks(page.read_text())}

DEVELOPERS = "guide/extending.md"  # the one page that is not in the navigation

# What examples need of extras; each is left out where it is not installed.
NEEDED = {"blackjax": "import blackjax", "arviz_stats": "sampling.diagnostics("}
NEEDED |= {"paramax": "import paramax"}
NEEDED |= {"distributed": "from distributed import", "cloudpickle": "ee.fleet."}
MISSING = [mark for package, mark in NEEDED.items() if importlib.util.find_spec(package) is None]
ENGINES = re.compile(r"^(?:import|from) ray\b", re.MULTILINE)  # `test_ray_tune` runs one
CONNECTS = re.compile(r"^jax\.distributed\.initialize\(", re.MULTILINE)  # `distributed/test_pages` runs them
LOGGERS = re.compile(r"^(?:import|from) (?:tensorboardX|wandb|mlflow)\b", re.MULTILINE)  # `test_logging` runs them
DIRECTIVE = re.compile(r"^::: (\S+)(?:\n(?:    .*)?)*", re.MULTILINE)
MEMBERS = re.compile(r"^ +members: \[(.*)\]$", re.MULTILINE)


def public_names(module):
    """Every name that `module` and its public subpackages export, by its path."""
    names = {}
    for name in getattr(module, "__all__", None) or list(vars(module)):  # the first, where names are imported when used
        if name.startswith("_"):
            continue
        path, value = f"{module.__name__}.{name}", getattr(module, name)
        if not isinstance(value, types.ModuleType):
            names[path] = value
        elif value.__name__ == path:
            names |= public_names(value)
    return names


PUBLIC = public_names(eqx_ensemble)


def documented(pages):
    """The paths of all directives of some pages, with the members that each of them lists."""
    return {
        match[1]: [name for members in MEMBERS.findall(match[0]) for name in re.findall(r"\w+", members)]
        for page in pages
        for match in DIRECTIVE.finditer(page.read_text())
    }


DOCUMENTED = documented(PAGES)


def resolve(path):
    """What the documentation shows under a path: a package, where a package and a function have one name."""
    return pkgutil.resolve_name(path)


def public_methods(cls):
    """Methods and properties that a class defines for its users; what a base class declares is documented there."""
    inherited = {name for base in cls.__mro__[1:] if is_own_class(base) for name in vars(base)}
    return {
        name: method
        for name, method in vars(cls).items()
        if (not name.startswith("_") or name in {"__call__", "__getitem__"})
        and name not in inherited
        and (callable(method) or isinstance(method, property | functools.cached_property | classmethod | staticmethod))
        and inspect.getdoc(method)
    }


def is_own_class(value):
    return inspect.isclass(value) and value.__module__.startswith("eqx_ensemble")


def docstrings():
    """The docstring of every public object once, with those of its methods, by path."""
    found = {}
    seen = set()
    for path, value in PUBLIC.items():
        if id(value) in seen or not getattr(value, "__module__", "").startswith("eqx_ensemble"):
            continue
        seen.add(id(value))
        found[path] = inspect.getdoc(value) or ""
        if is_own_class(value):
            found |= {f"{path}.{name}": inspect.getdoc(method) for name, method in public_methods(value).items()}
    return found


DOCSTRINGS = docstrings()


def run(examples, filename, given=()):
    """Run code blocks one after another in one fresh namespace, which has some names already."""
    namespace = {"__name__": "example"} | dict(given)
    for number, (code, shown) in enumerate(examples):
        if any(pattern.search(code) for pattern in (LOGGERS, ENGINES, CONNECTS)):
            continue
        if any(mark in code for mark in MISSING):
            pytest.skip(f"needs one of {', '.join(NEEDED)}")
        run_block(code, shown, f"<{filename}, example {number}>", namespace)


def test_public_names_are_those_that_are_documented():
    public = {id(value): path for path, value in PUBLIC.items()}
    documented = {id(resolve(path)): path for path in DOCUMENTED}
    assert {path for key, path in public.items() if key not in documented} == set(), (
        "no page of docs/api has `::: PATH`"
    )
    assert {path for key, path in documented.items() if key not in public} == set()


def test_methods_of_public_classes_are_documented():
    for path in DOCUMENTED:
        if is_own_class(resolve(path)):
            assert set(DOCUMENTED[path]) == set(public_methods(resolve(path))), path


def test_nothing_is_documented_twice():
    paths = [match[1] for page in PAGES for match in DIRECTIVE.finditer(page.read_text())]
    assert len(paths) == len({id(resolve(path)) for path in paths})


def test_public_objects_have_docstrings():
    assert [path for path, text in DOCSTRINGS.items() if not text] == []


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"- (?:[^:\n]+: )?(\S+\.md)$", text, flags=re.MULTILINE)
    assert re.findall(r"^not_in_nav: \|\n((?:  .+\n)+)", text, flags=re.MULTILINE) == [f"  {DEVELOPERS}\n"]
    assert sorted([*named, DEVELOPERS]) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


# Their examples train, or draw, for seconds.
LONG = tuple(f"eqx_ensemble.{room}." for room in ("fleet", "methods", "plot", "sklearn", "testing"))
EXAMPLES = [path for path, text in DOCSTRINGS.items() if blocks(text)]


@pytest.mark.parametrize("path", slow_but([path for path in EXAMPLES if not path.startswith(LONG)], EXAMPLES))
def test_docstring_example_runs(path):
    given = {"jax": jax, "jnp": jnp, "eqx": eqx, "optax": optax, "ee": eqx_ensemble, "np": np}
    run(blocks(DOCSTRINGS[path]), path, given | {"key": jax.random.key(0)})


def test_pages_can_be_copied():
    for name, page in WITH_CODE.items():
        codes = [code for code, _ in blocks(page.read_text())]
        assert undefined_names(codes) == [], f"a reader who copies {name} gets a `NameError`: import it in the page"


@pytest.mark.parametrize(
    ("codes", "found"),
    [
        (["import numpy as np\n", "np.ones(n)\n"], [(1, ["n"])]),
        (["def f(x):\n    return [g(y) for y in x]\n"], [(0, ["g"])]),
        (["f = lambda x: len(x) + y\n", "y = 1\n"], [(0, ["y"])]),
        (["class A(B):\n    def f(self):\n        return __name__\n"], [(0, ["B"])]),
        (["for i, (a, b) in enumerate([]):\n    print(i, a, b)\n"], []),
    ],
)
def test_an_undefined_name_would_be_noticed(codes, found):
    assert undefined_names(codes) == found


@pytest.mark.parametrize("page", slow_but(["README.md"], WITH_CODE))
def test_page_examples_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / page
    as_users = page.parent.name == "guide" or page.name in ("sampling.md", "priors.md")  # which promote dtypes
    handler = signal.getsignal(signal.SIGTERM)  # a page sets its own
    with as_users_run_it() if as_users else contextlib.nullcontext():
        run(blocks(page.read_text()), page.name)
    signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def as_users_run_it():
    """The guide shows mistakes that the settings of the tests would find, and messages before those of type checks."""
    disabled = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", disabled)


def test_the_page_about_a_fit_shows_the_code():
    text = (ROOT / "docs/how-a-fit-runs.md").read_text()
    shown = "".join(re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    files = [ROOT / "eqx_ensemble/train" / name for name in ("_member.py", "_blocks.py")]
    assert set(functions_of(shown)) == {"train", "train_block"}
    assert functions_of(shown).items() <= functions_of("".join(file.read_text() for file in files)).items()


def functions_of(text):
    """The functions of a program without docstrings and layout."""
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    for node in found.values():
        node.body = node.body[ast.get_docstring(node) is not None :]
    return {name: ast.unparse(node) for name, node in found.items()}


def test_a_broken_example_would_be_noticed():
    text = "Text.\n\n    ```python\n    x = 1\n    ```\n\n```python\nassert x == 2\n```\n\n```bash\nls\n```\n"
    found = blocks(text)
    assert found == [("x = 1\n", None), ("assert x == 2\n", None)]
    run(found[:1], "text")
    with pytest.raises(AssertionError):
        run(found, "text")


@pytest.mark.parametrize(
    ("printed", "shown", "agree"),
    [
        ("a 1.003 [2]\n", "a  1.013 [2]", True),
        ("a 1.303", "a 1.013", False),
        ("0.75", "0.7", False),
        ("0.70", "0.7", False),
        ("[0.5 1.51]", "[0.5 1.5]", True),
        ("[0.5 0.75]", "[0.5 0.7]", False),
        ("0.12345678", "0.1234567", True),
        ("-0.5", "0.5", False),
        ("3 members", "4 members", False),
        ("1.2e-05", "1.2e-05", True),
        ("1.2e-03", "1.2e-05", False),
        ("one two three four", "one ... four", True),
        ("one two three four", "... two ... four ...", True),
        ("one two three four", "one ... three", False),
        ("one two", "one", False),
        ("one", "one two", False),
    ],
)
def test_output_is_compared(printed, shown, agree):
    assert (difference(printed, shown) is None) == agree


def test_an_error_and_a_warning_are_output():
    text = "```python\nimport warnings\nwarnings.warn('low')\n1 / 0\n```\n\n```output\n"
    right = text + "ZeroDivisionError: division by zero\nUserWarning: low\n```\n"
    run(blocks(right), "text")
    for wrong in (right.replace("low\n`", "high\n`"), right.replace("by zero", "by one")):
        with pytest.raises(AssertionError, match="the page shows"):
            run(blocks(wrong), "text")
    with pytest.raises(ZeroDivisionError):
        run(blocks("```python\n1 / 0\n```\n"), "text")


@pytest.mark.slow
def test_ray_tune(tmp_path):
    pytest.importorskip("ray.tune", reason="needs Ray Tune")
    codes = [code for code, _ in blocks((ROOT / "docs" / "recipes" / "search.md").read_text())]
    (file,) = (code for code in codes if ENGINES.search(code))
    (tmp_path / "search.py").write_text(file)
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    width, score = re.search(r"\{'width': (\d+), 'depth': \d\} \S+ (\S+)$", done.stdout.strip()).groups()
    assert int(width) in (8, 16, 32)
    assert float(score) < 0.2  # the variance of the targets is 0.43
