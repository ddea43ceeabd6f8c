"""Notebooks and pages are in step with their scripts, run from top to bottom, and give the same numbers both ways."""

import math
import re

import jupytext
import nbformat
import pytest

from .notebook_runs import NOTEBOOKS, SCRIPTS, assert_page_shows, executed, import_pages, printed, table

HOOK = "%load_ext jaxtyping\n%jaxtyping.typechecker beartype.beartype"

# Appended to the notebook: without the hook of its first cell, the wrong call goes through.
NEGATIVE_CONTROL = """
import jaxtyping

try:
    split_by_shape = auroc(jnp.zeros((2, 2)), jnp.zeros((2, 2)))
except jaxtyping.TypeCheckError:
    print("the hook is on")
"""

# The same for the studies: each call goes wrong in its shapes alone, and has another error without the hook.
WRONG_CALLS = {
    "unseen_classes": "standard_error(jnp.zeros(3), jnp.zeros((2, 2), bool))",
    "conformal_regression": "conformalise(jnp.zeros((4, 2)), jnp.zeros(4), jnp.zeros((1, 3)))",
    "time_series": "scale_windows(np.zeros((2, 2), bool))",
    "which_ensemble": "scale(income.reshape(5, 47))",
}

HEADINGS = {
    "DIGITS": [
        "accuracy",
        "negative log-likelihood",
        "Brier score",
        "calibration error (ECE)",
        "AUROC, by entropy",
        "AUROC, by disagreement",
    ],
    "DIABETES": ["root mean squared error", "negative log-likelihood", "CRPS", "coverage of 90 % interval"],
}


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.fixture(scope="module")
def as_script(tmp_path_factory):
    """What the script of the quickstart prints, and the folder where it draws."""
    return printed("quickstart", tmp_path_factory.mktemp("script"))


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


@pytest.fixture
def pages():
    return import_pages()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_page_is_that_of_the_script(script, pages):
    name = script.stem
    hint = f"run `python notebooks/_pages.py {name}`"
    assert pages.page_of(name).exists(), hint
    assert pages.is_run(name), hint
    assert pages.page_of(name).read_text() == pages.render(name, pages.read_page(name)), hint


@pytest.mark.parametrize(
    ("old", "new", "runs", "same"),
    [
        ("", "", True, True),
        ("ee.build(make, 16, key=build_key)", "ee.build(make, 16,\n    key=build_key)", True, True),
        ("# The loss is that", "# This loss is that", True, False),
        ("ee.build(make, 16", "ee.build(make, 8", False, None),
        ("  # every member sees the image", "", False, None),
    ],
)
def test_a_page_that_is_not_current_would_be_noticed(old, new, runs, same, pages, tmp_path, monkeypatch):
    text = (NOTEBOOKS / "quickstart.py").read_text()
    assert old in text
    (tmp_path / "quickstart.py").write_text(text.replace(old, new) if old else text)
    monkeypatch.setattr(pages, "NOTEBOOKS", tmp_path)
    assert pages.is_run("quickstart") == runs
    if runs:
        page = pages.page_of("quickstart").read_text()
        assert (page == pages.render("quickstart", pages.read_page("quickstart"))) == same


def test_the_gallery_shows_every_example(pages):
    gallery = (pages.EXAMPLES / "index.md").read_text()
    assert gallery == pages.gallery(), "run `python notebooks/_pages.py`"
    names = re.findall(r'<a href="(\w+)/">', gallery)
    assert sorted(names) == [script.stem for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_begins_with_two_sentences_and_a_figure(script, pages):
    page = pages.page_of(script.stem).read_text()
    title, sentences, figure = page.split("---\n")[2].strip().split("\n\n")[:3]
    assert title.startswith("# ")
    assert len(re.findall(r"[.?!](?=\s|$)", sentences)) <= 3
    alt, file = re.match(r'!\[(.*)\]\(images/(\S+\.png)\)\{ width="\d+" height="\d+" \}$', figure).groups()
    assert file == f"{script.stem}.png"
    assert len(alt) > 20
    for picture in (pages.EXAMPLES / "images").glob(f"{script.stem}*.png"):
        assert picture.stat().st_size <= pages.BYTES


@pytest.mark.slow
@pytest.mark.parametrize("way", ["as_script", "as_notebook"])
def test_the_table_is_complete(way, request):
    text, _ = request.getfixturevalue(way)
    for title, names in HEADINGS.items():
        table = rows(text, title)
        assert list(table) == names
        for name, values in table.items():
            # One member has no disagreement, and digits have no Gaussians; the level 0.9 is among the numbers.
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
    assert float(digits["AUROC, by disagreement"][-1]) > 0.85
    assert float(diabetes["root mean squared error"][-1]) < 65  # the standard deviation of the target is 77
    assert 0.75 < float(diabetes["coverage of 90 % interval"][-1]) < 0.99
    # Theorems, on any data: the mixture's logarithmic and Brier scores are no worse than the members' mean.
    for name in ("negative log-likelihood", "Brier score"):
        mean_member, *_, mixture = map(float, digits[name])
        assert mixture <= mean_member


@pytest.mark.slow
def test_script_and_notebook_give_the_same_numbers(as_script, as_notebook):
    script, notebook = (re.sub(r"figure: .*", "", text) for text, _ in (as_script, as_notebook))
    assert notebook.removesuffix("the hook is on\n") == script
    assert_page_shows("quickstart", script)


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
    assert_page_shows("population", text)
    table = text[text.index("THE DECISION") :].splitlines()[1:6]
    found = [[float(number) for number in re.findall(r"\d\.\d{4}", line)] for line in table]
    validation, nll, accuracy = zip(*found, strict=True)
    (chosen,) = [i for i, line in enumerate(table) if line.endswith("<- chosen")]
    assert validation[chosen] == min(validation)
    assert max(nll) < 0.2
    assert min(accuracy) > 0.95
    assert "descends from" in text
    assert (figures / "population.png").read_bytes().startswith(b"\x89PNG")


def claims_of_unseen_classes(text):
    scores = table(text, "UNSEEN DIGITS, by score")  # AUROC, its error, AUPR, FPR95
    votes = scores.pop("share of other votes")
    guessing = scores.pop("guessing")
    assert votes[-1] == 1
    for auroc, error, aupr, fpr95 in scores.values():
        assert votes[0] + 0.05 < auroc < 1
        assert 0.003 < error < 0.02
        assert aupr > guessing[1] + 0.2
        assert 0.2 < fpr95 < 0.6
    assert max(scores, key=lambda name: scores[name][0]) == "energy of the logits"
    pairs = table(text, "AUROC, by pair left out")  # total, aleatoric, epistemic, energy
    assert all(numbers[2] > numbers[0] - 0.005 for numbers in pairs.values())
    assert min(pairs["2 and 3"]) == pairs["2 and 3"][3]
    assert min(pairs["4 and 5"]) == pairs["4 and 5"][3]
    by_number = table(text, "AUROC, by number of members")
    assert 0 < by_number["entropy, total"][-1] - by_number["entropy, total"][0] < 0.02
    assert by_number["energy of the logits"][7] < by_number["energy of the logits"][1]
    selection = table(text, "SELECTION, AURC")  # mean member, their range, ensemble
    assert all(selection[name][3] < selection[name][0] for name in ("digits 0 to 7", "all images"))
    calibration = table(text, "CALIBRATION")  # accuracy, NLL, ECE, confidence in unseen digits, AUROC
    nll = {name: numbers[1] for name, numbers in calibration.items()}
    assert nll["not calibrated"] < nll["mean member, not calibrated"]  # a theorem
    assert nll["combined, then the mixture"] < nll["not calibrated"]
    assert 0.65 < calibration["combined, then the mixture"][3] < calibration["not calibrated"][3]


def claims_of_conformal_regression(text):
    found = table(
        text, "COVERAGE AT 0.9"
    )  # mean, std, lowest, width, splits that are narrower; low, middle, high third
    law = found.pop("the law of split and CQR")
    assert found["quantiles as predicted"][0] < 0.85
    assert found["split, on training patients"][0] < 0.85
    for name in ("split", "CQR", "CV+, 10 folds", "jackknife+, 25 bootstraps"):
        assert 0.87 < found[name][0] < 0.95
        assert law[1] / 2 < found[name][1] < law[1] * 1.5
    assert found["CV+, 10 folds"][1] < found["split"][1]
    assert found["CQR"][3] < found["split"][3]
    assert found["CQR"][4] > 8
    assert found["split"][5] > 0.92 > 0.89 > found["split"][7]
    assert found["CQR"][5] - found["CQR"][7] < found["split"][5] - found["split"][7]
    law = table(text, "THE LAW OF THE COVERAGE")
    divisions, exact, fixed = law.values()
    assert abs(divisions[0] - exact[0]) < 5 * exact[1] / math.sqrt(4000)
    assert exact[2] > 1e-3
    assert fixed[2] == 0
    assert [row[1] for row in table(text, "PATIENTS TO CALIBRATE ON").values()] == [0.7839, 0.8482, 0.8773, 0.89]


def claims_of_time_series(text):
    crps = table(text, "CRPS, ppm, by weeks ahead")
    for others in ("seasonal persistence", "mean member"):
        assert all(a <= b for a, b in zip(crps["mixture, as it is"][:5], crps[others][:5], strict=True))
    assert crps["mixture, as it is"][4] < 0.8 * crps["seasonal persistence"][4]
    coverage = {name: row[4] for name, row in table(text, "COVERAGE AT 0.9, by weeks ahead").items()}
    assert 0.75 < coverage["mixture, as it is"] < 0.83 < coverage["one factor"] < 0.9
    assert abs(coverage["one factor"] - coverage["a factor for each horizon"]) < 0.01
    by_year = table(text, "COVERAGE AT 0.9, by year")
    coverage, growth = by_year["one factor"], by_year["growth, ppm a year"]
    assert len(coverage) == 12
    assert coverage.index(min(coverage)) == growth.index(max(growth)) == 1998 - 1990
    claimed = table(text, "ESTIMATED, AND FOUND")  # CRPS, coverage
    assert claimed["shuffled: windows left out"][1] > claimed["shuffled: 1990 to 2001"][1] + 0.03
    assert claimed["shuffled: windows left out"][1] > claimed["in time: 1985 to 1989"][1]


def claims_of_which_ensemble(text):
    found = table(text, "WHICH ENSEMBLE")  # NLL, CRPS, coverage, standard deviation far away, kB, components
    assert len(found) == 8
    nll = {name: numbers[0] for name, numbers in found.items()}
    assert nll.pop("Laplace") > max(nll.values()) + 0.1
    crps, far, size = ({name: numbers[i] for name, numbers in found.items()} for i in (1, 3, 4))
    assert all(0.165 < value < 0.185 for value in crps.values())
    for name in ("bootstraps", "chains of SGHMC"):
        assert far[name] > 3 * far["seeds"]
    for name in ("prior functions", "repulsion of outputs", "TabM", "Laplace"):
        assert far["seeds"] < far[name] < far["chains of SGHMC"]
    assert far["SWAG"] < 0.25
    assert size["TabM"] < 3 / 8 * size["seeds"]
    assert found["chains of SGHMC"][5] == 40


CLAIMS = {
    "unseen_classes": (claims_of_unseen_classes, "least confidence", "share of other votes"),
    "conformal_regression": (claims_of_conformal_regression, "split, on training patients", "CV+, 10 folds"),
    "time_series": (claims_of_time_series, "seasonal persistence", "mixture, as it is"),
    "which_ensemble": (claims_of_which_ensemble, "seeds", "bootstraps"),
}


@pytest.fixture(scope="module", params=CLAIMS)
def study(request, tmp_path_factory):
    """One of the studies: its name, and what its script and its notebook print and where they draw."""
    name = request.param
    control = NEGATIVE_CONTROL.replace(
        "split_by_shape = auroc(jnp.zeros((2, 2)), jnp.zeros((2, 2)))", WRONG_CALLS[name]
    )
    assert WRONG_CALLS[name] in control
    return (
        name,
        printed(name, tmp_path_factory.mktemp("script")),
        executed(name, tmp_path_factory.mktemp("notebook"), control),
    )


@pytest.mark.slow
def test_a_study_shows_what_its_text_claims(study):
    name, (text, _), _ = study
    assert_page_shows(name, text)
    claims, one, other = CLAIMS[name]
    claims(text)
    exchanged = text.replace(one, "THE OTHER").replace(other, one).replace("THE OTHER", other)
    with pytest.raises(AssertionError):
        claims(exchanged)


@pytest.mark.slow
def test_a_study_is_the_same_as_script_and_as_notebook(study):
    name, *ways = study
    script, notebook = (re.sub(r"figure: .*", "", text) for text, _ in ways)
    assert notebook.endswith("the hook is on\n")
    assert notebook.removesuffix("the hook is on\n") == script
    for _, figures in ways:
        picture = (figures / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 50_000
