"""Programs with the types and the errors that pyright (strict) and mypy (strict) find in them, and the score of types.

A comment `# is TYPE` follows `reveal_type`, and `# error` what must be refused. `# error of pyright`: mypy accepts any
arguments of dataclasses whose bases have no types, such as those of scikit-learn; Python refuses them when it runs.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = sorted(pathlib.Path(__file__).with_name("programs").glob("*.py"))
LEAST_SCORE = 0.98  # of `pyright --verifytypes`


def run(module, *arguments):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: `pip install -e '.[dev]'`")
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # With `--verifytypes`, pyright asks the `python` on PATH, whatever its options say.
        env=os.environ
        | {"MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
        | {"PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def expected(path, checker):
    error = "  # error" if checker is seen_by_mypy else ("  # error", "  # error of pyright")
    lines = path.read_text().splitlines()
    types = {i: line.partition("  # is ")[2] for i, line in enumerate(lines, 1) if "  # is " in line}
    return types, {i for i, line in enumerate(lines, 1) if line.endswith(error)}


def seen_by_pyright(paths, folder):
    del folder
    out = json.loads(run("pyright", "--pythonpath", sys.executable, "--outputjson", *paths))
    for item in out["generalDiagnostics"]:
        path, line = pathlib.Path(item["file"]), item["range"]["start"]["line"] + 1
        found = re.search(r'^Type of ".*" is "(.*)"$', item["message"], flags=re.DOTALL)
        yield path, line, found[1] if found and item["severity"] == "information" else None


def seen_by_mypy(paths, folder):
    # What optax and the library itself leave untyped is not what a user's program is judged by.
    options = ["--strict", "--ignore-missing-imports", "--follow-imports=silent", f"--cache-dir={folder}"]
    for line in run("mypy", *options, *paths).splitlines():
        place = re.match(r"(.*\.py):(\d+): (error|note): (.*)", line)
        if place is None or (place[3] == "note" and not place[4].startswith("Revealed type")):
            continue
        found = re.search(r'^Revealed type is "(.*)"$', place[4])
        # Of a named tuple mypy shows the fields.
        name = found and re.sub(r"tuple\[.*, fallback=(.*)\]", r"\1", found[1])
        yield (ROOT / place[1]).resolve(), int(place[2]), name and re.sub(r"\b(\w+\.)+", "", name)


@pytest.mark.slow
@pytest.mark.parametrize("checker", [seen_by_pyright, seen_by_mypy])
def test_programs(checker, tmp_path):
    assert len(PROGRAMS) > 3
    types, errors = {path: {} for path in PROGRAMS}, {path: set() for path in PROGRAMS}
    for path, line, found in checker(PROGRAMS, tmp_path):
        if found is None:
            errors[path].add(line)
        else:
            types[path][line] = found
    for path in PROGRAMS:
        right_types, wrong_lines = expected(path, checker)
        assert right_types
        assert wrong_lines
        assert types[path] == right_types
        assert errors[path] == wrong_lines


@pytest.mark.slow
def test_types_of_public_names():
    options = ["--pythonpath", sys.executable, "--ignoreexternal", "--outputjson"]
    found = json.loads(run("pyright", "--verifytypes", "eqx_ensemble", *options))
    found = found["typeCompleteness"]
    unknown = [symbol["name"] for symbol in found["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]]
    assert sum(found["exportedSymbolCounts"].values()) > 200
    assert not [name for name in unknown if not name.startswith("eqx_ensemble.sklearn.")]  # its bases have no types
    assert found["completenessScore"] >= LEAST_SCORE
