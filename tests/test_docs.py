"""The documented names are the public names, and every example in the documentation runs."""

import importlib.util
import inspect
import pathlib
import pkgutil
import re
import textwrap
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))

HAS_ORBAX = importlib.util.find_spec("orbax") is not None
DIRECTIVE = re.compile(r"^::: (\S+)(?:\n(?:    .*)?)*", re.MULTILINE)
MEMBERS = re.compile(r"^ +members: \[(.*)\]$", re.MULTILINE)
EXAMPLE = re.compile(r"^([ \t]*)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def public_names(module):
    """Every name that `module` and its public subpackages export, by its path."""
    names = {}
    for name in getattr(module, "__all__", None) or list(vars(module)):  # the first, where names are imported when used
        if name.startswith("_"):
            continue
        path, value = f"{module.__name__}.{name}", getattr(module, name)
        if not isinstance(value, types.ModuleType):
            names[path] = value
        elif value.__name__ == path and path != "eqx_ensemble.launch":  # a program, there once a test has imported it
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
        and (callable(method) or isinstance(method, property | classmethod | staticmethod))
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


def examples(text):
    return [textwrap.dedent(match[2]) for match in EXAMPLE.finditer(text)]


def run(blocks, filename):
    """Run code blocks one after another in one fresh namespace."""
    namespace = {"jax": jax, "jnp": jnp, "eqx": eqx, "optax": optax, "ee": eqx_ensemble, "np": np}
    namespace |= {"key": jax.random.key(0), "__name__": "example"}
    for number, block in enumerate(blocks):
        if 'format="orbax"' in block and not HAS_ORBAX:
            continue
        exec(compile(block, f"<{filename}, example {number}>", "exec"), namespace)


@pytest.mark.parametrize("path", PUBLIC)
def test_public_name_is_documented(path):
    assert any(resolve(other) is PUBLIC[path] for other in DOCUMENTED), f"no page of docs/api has `::: {path}`"


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_name_is_public(path):
    assert any(resolve(path) is value for value in PUBLIC.values())


@pytest.mark.parametrize("path", [path for path in DOCUMENTED if is_own_class(resolve(path))])
def test_methods_of_public_classes_are_documented(path):
    assert set(DOCUMENTED[path]) == set(public_methods(resolve(path)))


def test_nothing_is_documented_twice():
    paths = [match[1] for page in PAGES for match in DIRECTIVE.finditer(page.read_text())]
    assert len(paths) == len({id(resolve(path)) for path in paths})


@pytest.mark.parametrize("path", DOCSTRINGS)
def test_public_object_has_a_docstring(path):
    assert DOCSTRINGS[path]


def test_every_page_is_in_the_navigation():
    named = re.findall(r"- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


@pytest.mark.parametrize("path", [path for path, text in DOCSTRINGS.items() if examples(text)])
def test_docstring_example_runs(path):
    run(examples(DOCSTRINGS[path]), path)


@pytest.mark.parametrize(
    "page",
    [page for page in [ROOT / "README.md", *PAGES] if examples(page.read_text())],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_examples_run_in_order(page):
    run(examples(page.read_text()), page.name)


def test_a_broken_example_would_be_noticed():
    text = "Text.\n\n    ```python\n    x = 1\n    ```\n\n```python\nassert x == 2\n```\n\n```bash\nls\n```\n"
    blocks = examples(text)
    assert blocks == ["x = 1\n", "assert x == 2\n"]
    run(blocks[:1], "text")
    with pytest.raises(AssertionError):
        run(blocks, "text")
