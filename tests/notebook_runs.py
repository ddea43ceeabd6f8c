"""Runs notebooks and their scripts as users do, and reads the tables that they print."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import nbformat

from .pages import difference

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("[!_]*.py"))


def import_pages():
    """The program that writes the pages of the examples."""
    spec = importlib.util.spec_from_file_location("notebook_pages", NOTEBOOKS / "_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_page_shows(name, text):
    """The page of an example shows what its notebook printed, but for numbers, which the claims of its test bound.

    Training amplifies the rounding of another processor.
    """
    shown = "".join(output or "" for _, output in import_pages().read_page(name))
    printed, shown = (re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?", "0", x) for x in (re.sub(r"figure: .*", "", text), shown))
    message = difference(printed, shown)
    assert message is None, f"{message}: run `python notebooks/_pages.py --run {name}`"


LEFT_OUT = ("JAXTYPING_", "PYTEST_", "XLA_FLAGS")


def run(command, folder):
    """Run `command` as a user does: with the library's defaults, and nothing written outside of `folder`."""
    fresh = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    # On a bare machine the folders of Jupyter and Matplotlib do not exist either.
    fresh |= {"HOME": str(folder), "JAX_PLATFORMS": "cpu"}
    fresh |= {f"{script.stem.upper()}_FIGURES": str(folder / "figures") for script in SCRIPTS}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=fresh)


def printed(name, folder):
    """What a script prints, and the folder where it draws."""
    done = run(["-W", "error", str(NOTEBOOKS / f"{name}.py")], folder)
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


def table(text, title):
    """The rows of a table whose first line begins with `title`: the name of each, and its numbers."""
    lines = [line.strip() for line in text[text.index(f"\n{title}") + 1 :].split("\n\n")[0].splitlines()[1:]]
    found = {}
    for line in lines:
        name = re.split(r" {2,}", line)[0]
        found[name] = [float(number) for number in re.findall(r"-?\d+\.?\d*", line[len(name) :])]
    return {name: numbers for name, numbers in found.items() if numbers}
