"""The wheel and the source distribution: their files, their metadata, and that the wheel works alone."""

import base64
import csv
import email
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = {
    path.relative_to(ROOT).as_posix() for kind in ("*.py", "*.pyi") for path in (ROOT / "eqx_ensemble").rglob(kind)
}
FOLDERS = (".ci", "benchmarks", "docs", "eqx_ensemble", "notebooks", "tests")
TEXTS = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "mkdocs.yml")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="building a wheel needs hatchling"
)

# What is run with the wheel.
TESTS = ["test_stacked_type.py", "combine/test_combine.py", "test_keys.py"]


def run(*command, cwd, **env):
    """Runs a command without what this process has on its path, and returns what it printed."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")} | env
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def build_wheel(source, folder):
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The folder that the source distribution unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def contents(wheel):
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    info = f"eqx_ensemble-{PROJECT['version']}.dist-info"
    about = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    assert contents(wheel).keys() == SOURCES | {"eqx_ensemble/py.typed"} | about
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.slow
def test_the_record_of_the_wheel_is_right(wheel):
    files = contents(wheel)
    (record,) = [name for name in files if name.endswith("/RECORD")]
    rows = {name: (digest, size) for name, digest, size in csv.reader(files[record].decode().splitlines())}
    assert rows.pop(record) == ("", "")
    assert rows.keys() == files.keys() - {record}
    for name, (digest, size) in rows.items():
        own = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={own}", len(files[name])), name


@pytest.mark.slow
def test_the_metadata(wheel):
    (text,) = [text for name, text in contents(wheel).items() if name.endswith("/METADATA")]
    metadata = email.message_from_bytes(text)
    plain = {name: metadata[name] for name in ("Name", "Version", "Requires-Python", "License-Expression", "Summary")}
    assert plain == {
        "Name": "eqx_ensemble",
        "Version": PROJECT["version"],
        "Requires-Python": PROJECT["requires-python"],
        "License-Expression": "Apache-2.0",
        "Summary": PROJECT["description"],
    }
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    required = metadata.get_all("Requires-Dist")
    assert len([line for line in required if "extra ==" not in line]) == len(PROJECT["dependencies"])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text().strip()


def test_classifiers_exist():
    known = pytest.importorskip("trove_classifiers").classifiers  # which hatchling brings
    assert set(PROJECT["classifiers"]) <= known


@pytest.mark.slow
def test_the_source_distribution_is_complete(sdist):
    files = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert SOURCES | {*TEXTS, "pyproject.toml", "PKG-INFO", "eqx_ensemble/py.typed"} <= files
    assert {name.partition("/")[0] for name in files if "/" in name} == {*FOLDERS}
    if (ROOT / ".git").exists() and shutil.which("git"):
        tracked = run("git", "ls-files", *FOLDERS, *TEXTS, cwd=ROOT).splitlines()
        assert not {name for name in tracked if (ROOT / name).exists()} - files
    assert not [name for name in files if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(wheel, sdist, tmp_path):
    again = build_wheel(sdist, tmp_path)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the tests alone, and a Python that has the wheel, and no other way to the library."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv/bin/python"
    quiet = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *quiet, wheel, cwd=folder)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    # Dependencies come from this environment; files that end in .pth, such as that of an editable install, count only
    # in the folder of the environment itself.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    shutil.copytree(ROOT / "tests", folder / "work/tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder / "work")
    return folder / "work", python, site


@pytest.mark.slow
def test_the_wheel_is_imported_from_where_it_is_installed(installed):
    work, python, site = installed
    program = (
        "import importlib.metadata as m, eqx_ensemble as ee; ee.fit;"
        "print(ee.__file__, ee.__version__, m.version('eqx_ensemble'), m.files('eqx_ensemble')[0].locate(), sep='\\n')"
    )
    file, version, known, first = run(python, "-W", "error", "-c", program, cwd=work).splitlines()
    assert pathlib.Path(file) == site / "eqx_ensemble/__init__.py"
    assert version == known == PROJECT["version"]
    assert pathlib.Path(first).is_relative_to(site)


@pytest.mark.slow
def test_tests_pass_with_the_wheel(installed):
    work, python, site = installed
    own = f"import eqx_ensemble\n\n\ndef test_where():\n    assert eqx_ensemble.__file__.startswith({str(site)!r})\n"
    (work / "tests/test_where.py").write_text(own)
    paths = ["tests/test_where.py", *(f"tests/{name}" for name in TESTS)]
    out = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, cwd=work)
    assert " passed" in out
