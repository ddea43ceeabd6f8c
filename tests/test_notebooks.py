"""A page shows its notebook; each notebook runs once, and prints what its page shows and claims."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jupytext
import nbformat
import pytest

from .pages import difference

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"
SCRIPTS = sorted(path.stem for path in NOTEBOOKS.glob("[!_]*.py"))
HOOK = "%load_ext jaxtyping\n%jaxtyping.typechecker beartype.beartype"


@pytest.fixture(scope="module")
def pages():
    """The program that writes the pages."""
    spec = importlib.util.spec_from_file_location("notebook_pages", NOTEBOOKS / "_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("name", SCRIPTS)
def test_notebook_and_page_are_those_of_the_script(name, pages):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert cells(jupytext.read(NOTEBOOKS / f"{name}.py")) == cells(notebook), f"`jupytext --sync notebooks/{name}.py`"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].source == HOOK
    assert not any(cell.outputs for cell in code)
    assert pages.is_run(name), f"run `python notebooks/_pages.py {name}`"
    page = pages.page_of(name).read_text()
    assert page == pages.render(name, pages.read_page(name)), f"run `python notebooks/_pages.py {name}`"
    assert len(page.split()) <= 1900


def test_the_gallery_shows_every_example(pages):
    gallery = (pages.EXAMPLES / "index.md").read_text()
    assert gallery == pages.gallery(), "run `python notebooks/_pages.py`"
    assert sorted([*re.findall(r'<a href="(\w+)/">', gallery), pages.START]) == SCRIPTS


@pytest.mark.parametrize(
    ("old", "new", "runs", "same"),
    [
        ("ee.build(make, 16, key", "ee.build(make, 16,\n    key", True, True),
        ("# The data\n", "# Data\n", True, False),
        ("ee.build(make, 16", "ee.build(make, 8", False, None),
        ("  # reads no others", "", False, None),
    ],
)
def test_a_page_that_is_not_current_would_be_noticed(old, new, runs, same, pages, tmp_path, monkeypatch):
    text = (NOTEBOOKS / "quickstart.py").read_text()
    assert old in text
    (tmp_path / "quickstart.py").write_text(text.replace(old, new))
    monkeypatch.setattr(pages, "NOTEBOOKS", tmp_path)
    assert pages.is_run("quickstart") == runs
    if runs:
        page = pages.page_of("quickstart").read_text()
        assert (page == pages.render("quickstart", pages.read_page("quickstart"))) == same


def table(text, title):
    """The rows of a table whose first line begins with `title`: the name of each, and its numbers."""
    lines = [line.strip() for line in text[text.index(f"\n{title}") + 1 :].split("\n\n")[0].splitlines()[1:]]
    found = {}
    for line in lines:
        name = re.split(r" {2,}", line)[0]
        found[name] = [float(number) for number in re.findall(r"-?\d+\.?\d*", line[len(name) :])]
    return {name: numbers for name, numbers in found.items() if numbers}


def quickstart(text):
    scores = {name: list(map(float, numbers)) for name, *numbers in re.findall(SCORES, text)}
    for name in ("nll", "brier"):  # a theorem: the mixture is no worse than the mean member
        assert scores[name][3] <= scores[name][2]
    assert scores["accuracy"][3] > 0.95
    assert 0.85 < float(re.findall(r"with probability (\S+)", text)[0]) < 1
    coverage = [float(number) for number in re.findall(r"coverage (\d\.\d+)", text)]
    assert coverage[0] < 0.75
    assert all(0.8 < value < 0.98 for value in coverage[1:])
    width = [float(number) for number in re.findall(r"width (\d\.\d+)", text)]
    assert width[5] < width[2]
    assert text.endswith("the same: True\n")


SCORES = r"(\w+) +members (\S+) to (\S+), mean (\S+), mixture (\S+)"


def which_ensemble(text):
    found = table(f"\n{text}", "WHICH ENSEMBLE")  # NLL, CRPS, coverage, std far away, kB, components
    nll, crps, _, far, size, _ = ({name: numbers[i] for name, numbers in found.items()} for i in range(6))
    assert nll.pop("Laplace") > max(nll.values()) + 0.1
    assert all(0.165 < value < 0.185 for value in crps.values())
    assert min(far["bootstraps"], far["chains of SGHMC"]) > 3 * far["seeds"]
    for name in ("prior functions", "repulsion of outputs", "TabM", "Laplace"):
        assert far["seeds"] < far[name] < far["chains of SGHMC"]
    assert far["SWAG"] < 0.25
    assert size["TabM"] < 3 / 8 * size["seeds"]


def population(text):
    found = table(text, "THE DECISION")  # validation NLL, test NLL, test accuracy
    assert re.search(r"population, the best .*<- chosen", text)
    assert all(nll < 0.2 and accuracy > 0.95 for _, nll, accuracy in found.values())
    one, five = found["population, the best"], found["population, the best five"]
    assert five[1] < one[1]
    assert five[2] > one[2]
    assert found["halving, the best"] == found["random search, the best"]


def unseen_classes(text):
    scores = table(text, "UNSEEN DIGITS, by score")  # AUROC, its error, AUPR, FPR95
    votes, guessing = scores.pop("share of other votes"), scores.pop("guessing")
    assert votes[-1] == 1
    for auroc, _, aupr, fpr95 in scores.values():
        assert votes[0] + 0.05 < auroc < 1
        assert aupr > guessing[1] + 0.2
        assert 0.2 < fpr95 < 0.6
    pairs = table(text, "AUROC, by pair left out")  # total, aleatoric, epistemic, energy
    assert all(numbers[2] > numbers[0] - 0.005 for numbers in pairs.values())
    assert max(pairs["8 and 9"]) == pairs["8 and 9"][3]
    assert all(min(pairs[pair]) == pairs[pair][3] for pair in ("2 and 3", "4 and 5"))
    by_number = table(text, "AUROC, by number of members")
    assert 0 < by_number["entropy, total"][-1] - by_number["entropy, total"][0] < 0.02
    selection = table(text, "SELECTION, AURC")  # mean member, their range, ensemble
    assert all(numbers[3] < numbers[0] for numbers in selection.values())


def conformal_regression(text):
    found = table(text, "COVERAGE AT 0.9")  # mean, std, lowest, width, narrower splits; low, middle, high third
    law = found.pop("the law of split and CQR")
    assert max(found["quantiles as predicted"][0], found["split, on training patients"][0]) < 0.85
    for name in ("split", "CQR", "CV+, 10 folds", "jackknife+, 25 bootstraps"):
        assert 0.87 < found[name][0] < 0.95
        assert law[1] / 2 < found[name][1] < law[1] * 1.5
    assert found["CV+, 10 folds"][1] < found["split"][1]
    assert found["CQR"][3] < found["split"][3]
    assert found["CQR"][4] > 8
    assert found["split"][5] > 0.92 > 0.89 > found["split"][7]
    assert [row[1] for row in table(text, "PATIENTS TO CALIBRATE ON").values()] == [0.7839, 0.8482, 0.8773, 0.89]


def time_series(text):
    crps = table(text, "CRPS, ppm, by weeks ahead")
    for others in ("seasonal persistence", "mean member"):
        assert all(a <= b for a, b in zip(crps["mixture, as it is"][:5], crps[others][:5], strict=True))
    coverage = {name: row[4] for name, row in table(text, "COVERAGE AT 0.9, by weeks ahead").items() if len(row) > 4}
    assert 0.75 < coverage["mixture, as it is"] < 0.83 < coverage["one factor"] < 0.9
    assert abs(coverage["one factor"] - coverage["a factor for each horizon"]) < 0.01
    coverage, growth = table(text, "COVERAGE AT 0.9, by year").values()
    assert coverage.index(min(coverage)) == growth.index(max(growth)) == 1998 - 1990


def bayesian_optimisation(text):
    svm, hartmann = (table(f"\n{text}", f"REGRET, {title}") for title in ("Hyperparameters", "Hartmann-6"))
    for found in (svm, hartmann):  # regret and its error after 12, 20, 32 and 52 evaluations
        found.pop("evaluations")
        assert len({tuple(numbers[:2]) for numbers in found.values()}) == 1  # the same first points
    for name in ("Gaussian process", "deep ensemble"):
        assert hartmann[name][6] < hartmann["random search"][6] - 0.3
        assert svm[name][6] < min(svm["random search"][6], 0.025)
    assert hartmann["Gaussian process"][6] < hartmann["deep ensemble"][6]


def neural_ode(text):
    within, later, outside = (table(f"\n{text}", title) for title in ("AS IN TRAINING", "LATER", "FROM OUTSIDE"))
    for found in (within, later, outside):  # error, spread, coverage; scaled ones have no spread
        assert found["seeds"][1] < min(0.6 * found["seeds"][0], found["bootstraps"][1])
        assert 0.85 < found["scaled, there"][1] < 0.96
    assert within["bootstraps"][1] > 0.6 * within["bootstraps"][0]
    assert later["seeds"][2] < 0.85
    assert max(outside["seeds"][2], outside["bootstraps"][2], outside["scaled, as in training"][1]) < 0.6
    whole = table(text, "WHOLE TRAJECTORIES")  # calibrated as in training, there, deviation over splits, width
    assert all(0.88 < there < 0.93 for _, there, *_ in whole.values())
    assert whole["From outside"][0] < 0.1 < whole["Later"][0] < 0.85
    assert whole["From outside"][3] > 2 * whole["As in training"][3]


def pinn(text):
    found = table(f"\n{text}", "POPULATION")
    mean = found.pop("mean of the four")  # bound, error
    assert all(error < bound for *_, bound, error in found.values())  # scale, rate, weight, bound, error
    assert found["best"][4] < 0.05 < 0.2 < found["middle"][4]
    assert mean[1] < mean[0] < found["fourth"][3]
    assert "errors below their bound: 1.00" in text
    seeds = table(text, "SEEDS")  # spread, error, bound, share
    assert min(error for _, error, *_ in seeds.values()) < 0.1
    for scale in ("scale 8.48", "scale 16.38", "scale 31.62"):
        assert seeds[scale][1] > 4 * seeds[scale][0]


def actor_critic(text):
    returns = table(f"\n{text}", "RETURN")  # mean of seeds, standard error, worst
    assert returns.pop("an untrained actor")[0] < -100
    assert all(mean > -30 and worst > -60 for mean, _, worst in returns.values())
    errors = table(text, "ERROR OF THE VALUES")  # mean, standard error
    assert errors["minimum of a random pair"][0] < errors["one random critic"][0] + 0.5


def typed_shapes(text):
    assert "refused: | pairs | axis | weights | order, other sizes" in text
    for shown in ("f32[6,1]", "f32[797,10]", "'members'", "both four: NO ERROR", "needs one weight per member"):
        assert shown in text


CLAIMS = (quickstart, which_ensemble, population, unseen_classes, conformal_regression, time_series)
CLAIMS += (bayesian_optimisation, neural_ode, pinn, actor_critic, typed_shapes)


def test_every_notebook_has_its_claims():
    assert sorted(claims.__name__ for claims in CLAIMS) == SCRIPTS


@pytest.mark.parametrize("claims", CLAIMS, ids=lambda claims: claims.__name__)
def test_outputs_of_a_page_show_what_its_text_claims(claims, pages):
    claims("\n".join(output for _, output in pages.read_page(claims.__name__) if output))


def without_numbers(text):
    """Training amplifies the rounding of another processor: the claims bound the numbers."""
    return re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?", "0", text)


@pytest.mark.slow
@pytest.mark.parametrize("claims", CLAIMS, ids=lambda claims: claims.__name__)
def test_a_notebook_prints_what_its_page_shows(claims, pages, tmp_path, monkeypatch):
    name = claims.__name__
    if name == "neural_ode":
        pytest.importorskip("diffrax")
    monkeypatch.setenv("HOME", str(tmp_path))  # where Jupyter and Matplotlib write
    if name == pages.START:  # the README runs it as a program
        script = tmp_path / f"{name}.py"
        script.write_text((NOTEBOOKS / script.name).read_text())
        environment = {key: value for key, value in os.environ.items() if not key.startswith(pages.LEFT_OUT)}
        command = [sys.executable, "-W", "error", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        text = done.stdout
    else:
        text = "\n".join(output for _, output in pages.run(name, str(tmp_path)) if output)
    shown = "".join(output or "" for _, output in pages.read_page(name))
    message = difference(without_numbers(text), without_numbers(shown))
    assert message is None, f"{message}: run `python notebooks/_pages.py --run {name}`"
    claims(text)
    assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
