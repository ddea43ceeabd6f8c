"""Notebooks are in step with their scripts, run from top to bottom, and give the same numbers both ways."""

import math
import os
import pathlib
import re
import subprocess
import sys

import jupytext
import nbformat
import pytest

pytestmark = pytest.mark.xdist_group("notebooks")  # where groups are asked for, one process runs them once

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))
HOOK = "%load_ext jaxtyping\n%jaxtyping.typechecker beartype.beartype"

# Appended to the notebook: without the hook of its first cell, the wrong call goes through.
NEGATIVE_CONTROL = """
import jaxtyping

try:
    split_by_shape = auroc(jnp.zeros((2, 2)), jnp.zeros((2, 2)))
except jaxtyping.TypeCheckError:
    print("the hook is on")
"""

HEADINGS = {
    "DIGITS": [
        "accuracy",
        "negative log-likelihood, nats",
        "Brier score",
        "calibration error (ECE, 15 bins)",
        "AUROC of nines, by entropy",
        "AUROC of nines, by disagreement",
    ],
    "DIABETES": ["root mean squared error", "negative log-likelihood, nats", "CRPS", "coverage of the 90 % interval"],
}


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def run(command, folder):
    """Run `command` as a user does: with the library's defaults, and nothing written outside of `folder`."""
    fresh = {name: value for name, value in os.environ.items() if not name.startswith(("JAXTYPING_", "PYTEST_"))}
    # On a bare machine the folders of Jupyter and Matplotlib do not exist either.
    fresh |= {"HOME": str(folder), "JAX_PLATFORMS": "cpu", "QUICKSTART_FIGURES": str(folder / "figures")}
    fresh |= {"POPULATION_FIGURES": str(folder / "figures")}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=fresh)


@pytest.fixture(scope="module")
def as_script(tmp_path_factory):
    """What the script prints, and the folder where it draws."""
    folder = tmp_path_factory.mktemp("script")
    done = run(["-W", "error", str(NOTEBOOKS / "quickstart.py")], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "figures"


def executed(name, folder, *more):
    """What a notebook prints, with more cells at its end, and the folder where it draws."""
    copy = folder / f"{name}.ipynb"
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    notebook.cells += map(nbformat.v4.new_code_cell, more)
    nbformat.write(notebook, copy)
    options = ["--nbmake", "--nbmake-timeout=600", "--overwrite", "-p", "no:cacheprovider", "-q"]
    done = run(["-m", "pytest", *options, str(copy)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = [
        output
        for cell in nbformat.read(copy, as_version=4).cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    return text, folder / "figures"


@pytest.fixture(scope="module")
def as_notebook(tmp_path_factory):
    """The same of the notebook."""
    return executed("quickstart", tmp_path_factory.mktemp("notebook"), NEGATIVE_CONTROL)


def rows(text, title):
    """The rows of one table: the name of each, and its numbers."""
    lines = text[text.index(f"{title}, ") :].split("\n\n")[0].splitlines()[1:]
    names = [re.split(r" {2,}", line.strip())[0] for line in lines]
    return {
        name: re.findall(r"\d+\.\d+|nan|inf", line.strip()[len(name) :])
        for name, line in zip(names, lines, strict=True)
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_and_notebook_are_in_step(script):
    paired = script.with_suffix(".ipynb")
    hint = f"run `jupytext --sync {script.relative_to(NOTEBOOKS.parent)}`"
    assert cells(jupytext.read(script)) == cells(nbformat.read(paired, as_version=4)), hint


def test_a_changed_cell_would_be_noticed(tmp_path):
    script = tmp_path / "changed.py"
    script.write_text((NOTEBOOKS / "quickstart.py").read_text().replace("ee.build(make, 16", "ee.build(make, 8"))
    assert cells(jupytext.read(script)) != cells(nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs_and_checks_shapes(script):
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[0].source == HOOK
    assert "".join(f"# {line}\n" for line in HOOK.splitlines()) in script.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["as_script", "as_notebook"])
def test_the_table_is_complete(way, request):
    text, _ = request.getfixturevalue(way)
    for title, names in HEADINGS.items():
        table = rows(text, title)
        assert list(table) == names
        for name, values in table.items():
            # One member has no disagreement, and digits have no Gaussians; the level 0.9 stands among the numbers.
            expected = (
                1 if name.endswith("disagreement") else {"DIGITS": 4, "DIABETES": 5}[title] + name.startswith("cov")
            )
            assert len(values) == expected, (name, values)
            assert all(math.isfinite(float(value)) for value in values), (name, values)


@pytest.mark.slow
def test_the_numbers_are_plausible(as_script):
    text, _ = as_script
    digits, diabetes = rows(text, "DIGITS"), rows(text, "DIABETES")
    assert float(digits["accuracy"][-1]) > 0.95
    assert float(digits["AUROC of nines, by disagreement"][-1]) > 0.85
    assert float(diabetes["root mean squared error"][-1]) < 65  # the standard deviation of the target is 77
    assert 0.75 < float(diabetes["coverage of the 90 % interval"][-1]) < 0.99
    # Theorems, on any data: the mixture's logarithmic and Brier scores are no worse than the members' mean.
    for name in ("negative log-likelihood, nats", "Brier score"):
        mean_member, *_, mixture = map(float, digits[name])
        assert mixture <= mean_member


@pytest.mark.slow
def test_script_and_notebook_give_the_same_numbers(as_script, as_notebook):
    printed = [re.sub(r"figure: .*", "", text) for text, _ in (as_script, as_notebook)]
    assert printed[1].removesuffix("the hook is on\n") == printed[0]


@pytest.mark.slow
def test_the_hook_is_on_in_the_notebook(as_notebook):
    text, _ = as_notebook
    assert text.endswith("the hook is on\n")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["as_script", "as_notebook"])
def test_the_figure_is_drawn(way, request):
    _, figures = request.getfixturevalue(way)
    picture = (figures / "quickstart.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000


@pytest.mark.slow
def test_a_search_ends_with_a_decision(tmp_path):
    text, figures = executed("population", tmp_path)
    table = text[text.index("THE DECISION") :].splitlines()[1:6]
    found = [[float(number) for number in re.findall(r"\d\.\d{4}", line)] for line in table]
    validation, nll, accuracy = zip(*found, strict=True)
    (chosen,) = [i for i, line in enumerate(table) if line.endswith("<- chosen")]
    assert validation[chosen] == min(validation)
    assert max(nll) < 0.2
    assert min(accuracy) > 0.95
    assert "descends from" in text
    assert (figures / "population.png").read_bytes().startswith(b"\x89PNG")
