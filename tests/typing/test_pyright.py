"""A type checker accepts correct user code, and rejects wrong code."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

USER_CODE = pathlib.Path(__file__).with_name("user_code.py")
IGNORE = re.compile(r"  # pyright: ignore\[(.*)\]")


def checked(*files):
    """What pyright reports, as pairs of line and rule, for each file."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed: `pip install eqx_ensemble[dev]`")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=USER_CODE.parents[2])
    assert done.returncode in (0, 1), done.stdout + done.stderr
    reports = {file: [] for file in files}
    for item in json.loads(done.stdout)["generalDiagnostics"]:
        reports[pathlib.Path(item["file"])].append((item["range"]["start"]["line"], item.get("rule", item["message"])))
    return reports


@pytest.mark.slow
def test_user_code(tmp_path):
    lines = USER_CODE.read_text().splitlines()
    wrong = {i: IGNORE.search(line)[1].split(", ") for i, line in enumerate(lines) if IGNORE.search(line)}
    assert len(wrong) > 20

    # The same with every error shown, with an ignore comment too many, and with a wrong type asserted.
    bare = tmp_path / "bare.py"
    bare.write_text("\n".join(IGNORE.sub("", line) for line in lines))
    broken = tmp_path / "broken.py"
    useless, false = lines.index("    assert_type(ensemble[0], MLP)"), lines.index("    assert_type(ensemble[-1], MLP)")
    lines[useless] += "  # pyright: ignore[reportArgumentType]"
    lines[false] = lines[false].replace("MLP", "int")
    broken.write_text("\n".join(lines))

    reports = checked(USER_CODE, bare, broken)
    assert reports[USER_CODE] == []
    assert sorted({line for line, _ in reports[bare]}) == sorted(wrong)
    assert all(rule in wrong[line] for line, rule in reports[bare])
    assert reports[broken] == [
        (useless, "reportUnnecessaryTypeIgnoreComment"),
        (false, "reportAssertTypeFailure"),
    ]
