"""What holds for the package as a whole: its import, its metadata, and what its source may not contain."""

import ast
import importlib
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib
import warnings

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError
from packaging.requirements import Requirement

import eqx_ensemble
from eqx_ensemble import _jaxlib, combine

ROOT = pathlib.Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted((ROOT / "eqx_ensemble").rglob("*.py"))

HEAVY = ("matplotlib", "sklearn", "pandas", "scoringrules", "flax", "torch", "IPython", "ipywidgets", "optuna")
HEAVY += ("tensorstore", "distributed")
HEAVY += ("tqdm.auto", "tqdm.autonotebook", "tqdm.notebook", "tqdm.rich", "tqdm.contrib")


def run_python(code):
    """Run `code` in a fresh interpreter, without the import hook of this one."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def assert_runs(code):
    done = run_python(code)
    assert done.returncode == 0, done.stderr


# The number of CPU devices can be set only as long as no backend has been started.
STARTS_NO_BACKEND = """
import jax
{statement}
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""


@pytest.mark.slow
def test_import_starts_no_backend():
    assert_runs(STARTS_NO_BACKEND.format(statement="from eqx_ensemble import *"))


@pytest.mark.slow
def test_a_started_backend_would_be_noticed():
    done = run_python(STARTS_NO_BACKEND.format(statement="jax.numpy.zeros(2)"))
    assert done.returncode != 0
    assert "jax_num_cpu_devices" in done.stderr


@pytest.mark.slow
def test_import_changes_no_setting():
    # Equinox and optax are imported first: what they change is not attributed to us.
    assert_runs("""
        import os, random, warnings
        import equinox, jax, numpy, optax

        def settings():
            return (
                dict(jax.config.values), dict(os.environ), list(warnings.filters), numpy.geterr(),
                random.getstate(), numpy.random.get_state()[1].tolist(),
            )

        before = settings()
        from eqx_ensemble import *
        for old, new in zip(before, settings(), strict=True):
            assert old == new, (old, new)
    """)


@pytest.mark.slow
def test_import_loads_nothing_heavy():
    assert_runs(f"""
        import sys
        from eqx_ensemble import *
        loaded = [name for name in {HEAVY!r} if name in sys.modules]
        assert not loaded, loaded
    """)


@pytest.mark.slow
def test_rooms_are_imported_when_they_are_used():
    assert_runs("""
        import sys
        import eqx_ensemble as ee

        loaded = lambda: {name for name in sys.modules if name.startswith("eqx_ensemble.")}
        assert "train" in dir(ee) and "fit" in dir(ee)
        assert dir(ee) == ee.__all__
        first = {"_jaxlib", "_lazy", "_version", "_warnings"}
        assert loaded() <= {f"eqx_ensemble.{name}" for name in first}, loaded()
        ee.combine.mixture
        assert "eqx_ensemble.combine" in loaded() and "eqx_ensemble.train" not in loaded()
    """)


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "from eqx_ensemble import combine; combine.mixture",
        "import eqx_ensemble.train._fit; import eqx_ensemble; eqx_ensemble.train.init",
        "from eqx_ensemble import *; fit, Ensemble, combine.mixture",
    ],
)
def test_every_way_to_import(statement):
    assert_runs(statement)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="module 'eqx_ensemble' has no attribute 'nothing'"):
        getattr(eqx_ensemble, "nothing")  # noqa: B009
    assert "Did you mean: 'Ensemble'?" in run_python("import eqx_ensemble; eqx_ensemble.Ensembel").stderr
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from eqx_ensemble import nothing")


def test_what_type_checkers_see_is_what_is_imported():
    """Each name that is imported for type checkers is found when it is used, in the same module, and no other."""
    tree = ast.parse((ROOT / "eqx_ensemble/__init__.py").read_text())
    seen = {
        alias.name: importlib.import_module(f"eqx_ensemble.{node.module or alias.name}")
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == eqx_ensemble.__all__
    for name, module in seen.items():
        assert getattr(eqx_ensemble, name) is getattr(module, name, module)


def test_version_is_the_one_of_the_metadata():
    assert importlib.metadata.version("eqx_ensemble") == PYPROJECT["project"]["version"]


def test_changelog_starts_with_this_version():
    versions = re.findall(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == PYPROJECT["project"]["version"]


def test_dependencies_are_few():
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in PYPROJECT["project"]["dependencies"]}
    assert names == {"jax", "jaxlib", "equinox", "optax", "jaxtyping", "beartype", "safetensors", "tqdm"}


def imported(path):
    """The packages that a file imports at its top level."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_dependencies_are_imported_at_the_top_level(path):
    allowed = {"jax", "equinox", "optax", "jaxtyping", "beartype", "safetensors", "tqdm", "numpy"}  # NumPy is JAX's
    if path.parent.name == "sklearn":  # whose classes inherit from scikit-learn's; the room is imported when it is used
        allowed.add("sklearn")
    assert set(imported(path)) <= allowed | set(sys.stdlib_module_names)


def test_dependencies_have_lower_bounds_only():
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *(r for rs in extras.values() for r in rs)]:
        assert re.fullmatch(r"eqx_ensemble\[\w+\]|[\w-]+(\[\w+\])?>=[\d.]+(,!=[\d.]+\*?)*", requirement), requirement


def lower_bound(name):
    (requirement,) = [r for r in PYPROJECT["project"]["dependencies"] if re.match(rf"{name}\b", r)]
    return re.search(r">=([\d.]+)", requirement)[1]


def test_versions_agree_wherever_they_are_stated():
    python = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    stated = f"Python {python}, JAX {lower_bound('jax')} and Equinox {lower_bound('equinox')}, or newer, are needed"
    readme = (ROOT / "README.md").read_text()
    assert stated in readme
    (jax,) = [r for r in PYPROJECT["project"]["dependencies"] if re.match(r"jax\b", r)]
    *most, last = re.findall(r"!=([0-9.*]+)", jax)
    assert f"except for JAX {', '.join(most)} and {last}, " in " ".join(readme.split())
    assert f"Python {python} is the floor." in (ROOT / "CONTRIBUTING.md").read_text()
    assert lower_bound("jax") == lower_bound("jaxlib")
    found = re.findall(r"Python :: (\d\.\d+)", " ".join(PYPROJECT["project"]["classifiers"]))
    assert min(found, key=lambda version: int(version.partition(".")[2])) == python
    assert PYPROJECT["tool"]["pyright"]["pythonVersion"] == python
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + python.replace(".", "")


def test_lower_bounds_as_constraints():
    command = [sys.executable, ".ci/lower_bounds.py", "sklearn", "pandas"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    assert len(lines) == len(PYPROJECT["project"]["dependencies"]) + 2
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines)
    assert {f"{name}=={lower_bound(name)}" for name in ("jax", "tqdm")} < set(lines)
    assert lines[-2].startswith("scikit-learn==")


@pytest.mark.skipif(os.environ.get("JAXTYPING_DISABLE", "0") != "0", reason="JAXTYPING_DISABLE takes the net away")
def test_import_hook_is_on():
    with pytest.raises(TypeCheckError):
        combine.mean(jnp.zeros((2, 3)), weights="equal")


PICKLERS_ONLY = {"dumps", "PicklingError"}  # which read nothing
BETWEEN_PROCESSES = {"eqx_ensemble/fleet.py"}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def unsafe_lines(source):
    """Lines that import something able to unpickle, or run text as code."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                unsafe = any(name.name.split(".")[0] in UNPICKLERS for name in names)
            case ast.ImportFrom(module="pickle", names=names):
                unsafe = any(name.name not in PICKLERS_ONLY for name in names)
            case ast.ImportFrom(module=str(module)):
                unsafe = module.split(".")[0] in UNPICKLERS
            case ast.Call(func=ast.Name(id=name)):
                unsafe = name in {"eval", "exec", "compile", "__import__"}
            case ast.keyword(arg="allow_pickle", value=value):
                unsafe = not (isinstance(value, ast.Constant) and value.value is False)
            case _:
                unsafe = False
        if unsafe:
            lines.append(getattr(node, "lineno", 0))
    return lines


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path):
    assert bool(unsafe_lines(path.read_text())) == (str(path.relative_to(ROOT)) in BETWEEN_PROCESSES)


def test_what_travels_between_processes_is_no_file():
    """Workers unpickle what their caller sent, and nothing is sent back."""
    for path in BETWEEN_PROCESSES:
        text = (ROOT / path).read_text()
        assert not re.search(r"\bopen\(|fromfile|pickle\.load\b", text)
        assert "read_bytes" not in text
        assert set(re.findall(r"loads\((\w+)\)", text)) == {"own"}
    assert [path.name for path in SOURCES if re.search(r"import [^\n]*\bloads\b", path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, cloudpickle.compat as c",
        "from pickle import load",
        "from pickle import dumps, Unpickler",
        "def f():\n    import dill",
        "eval('1')",
        "x = [exec(y) for y in z]",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_unpickling_and_evaluating_would_be_noticed(source):
    assert unsafe_lines(source)


def test_harmless_source_is_let_through():
    assert not unsafe_lines("jax.jit(f).lower(x).compile()\neqx.filter_eval_shape(f)\nnp.load(p, allow_pickle=False)")


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.9.2", None),
        ("0.10.1", "can hang in linear algebra"),
        ("0.10.2", "silently computes some sums wrongly"),
        ("0.11.0", "ends Python with a segmentation fault"),
        ("0.11.2", None),
    ],
)
def test_a_jaxlib_to_avoid(monkeypatch, version, text):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _jaxlib.warn_of_jaxlib()
    assert len(caught) == (text is not None)
    assert all(text in str(warning.message) for warning in caught)


def test_what_is_warned_of_does_not_install():
    limits = (ROOT / "docs/how-a-fit-runs.md").read_text()
    for package in ("jax", "jaxlib"):
        (requirement,) = [r for r in PYPROJECT["project"]["dependencies"] if r.startswith(f"{package}>")]
        allowed = Requirement(requirement).specifier
        assert not [release for release in _jaxlib._FAULTS if release in allowed]
        assert all(release in allowed for release in ("0.9.2", "0.11.2", "0.12.0"))
    assert all(release in limits for release in _jaxlib._FAULTS)
