"""Notebooks of composition show what their texts claim: an ensemble as a part of other programs."""

import json
import math
import re

import pytest

from .notebook_runs import NOTEBOOKS, assert_page_shows, executed, printed, table


def claims_of_mixture_of_experts(text):
    nll = table(text, "NEGATIVE LOG-LIKELIHOOD")  # parameters, mean of seeds, standard error, worst
    mixture, combined = nll["mixture of four experts"], nll["five mixtures, combined"]
    for smaller in ("one expert", "one network, as many parameters"):
        assert mixture[3] < nll[smaller][1] - 0.3
    assert nll["the density of the data"][1] < combined[1] < mixture[1]
    assert abs(mixture[0] - nll["one network, as many parameters"][0]) < 10
    (difference,) = re.findall(r"by `fit`: (\S+)", text)
    assert 0 <= float(difference) < 1e-4


def claims_of_actor_critic(text):
    returns = table(text, "RETURN")  # mean of seeds, standard error, worst
    untrained = returns.pop("an untrained actor")
    assert untrained[0] < -100
    assert all(mean > -30 and worst > -60 for mean, _, worst in returns.values())
    errors = table(text, "ERROR OF THE VALUES")  # mean, standard error
    assert errors["minimum of a random pair"][0] < errors["one random critic"][0] + 0.5
    assert all(abs(mean) < 10 for mean, _ in errors.values())


def claims_of_planning(text):
    costs = table(text, "COST OF AN EPISODE")  # mean, worst, surprise
    still = costs["hanging still"][0]
    true, five = costs["the true dynamics"], costs["five members, mean"]
    assert true[0] - 5 < five[0] < costs["a member, mean of eight"][0] + 3
    assert costs["best member"][0] < costs["worst member"][0] < 0.75 * still
    assert costs["five members, careful"][0] < 0.75 * still
    assert costs["five members, careful"][2] < five[2] + 3
    assert abs(true[2]) < 1e-3
    stopped = [int(step) for step in re.findall(r"best after (\d+) steps", text)]
    assert len(set(stopped)) > 1


def claims_of_neural_ode(text):
    within, later, outside = (table(text, title) for title in ("AS IN TRAINING", "LATER", "FROM OUTSIDE"))
    for found in (within, later, outside):  # error, spread, coverage, CRPS; calibrated ones have no spread
        assert found["seeds"][1] < 0.5 * found["seeds"][0]
        assert found["seeds"][1] < found["bootstraps"][1]
        assert 0.85 < found["scaled, there"][1] < 0.96
        assert found["scaled, there"][2] < found["bootstraps"][3] + 0.001
    assert within["seeds"][0] < 0.03
    assert within["bootstraps"][1] > 0.6 * within["bootstraps"][0]
    assert 0.85 < within["scaled, as in training"][1] < 0.95
    assert later["seeds"][2] < 0.85
    for name in ("seeds", "bootstraps", "and priors"):
        assert outside[name][2] < 0.5
    assert outside["scaled, as in training"][1] < 0.6
    whole = table(text, "WHOLE TRAJECTORIES")  # calibrated as in training, there, deviation over splits, width
    for _, there, deviation, _ in whole.values():
        assert 0.88 < there < 0.93
        assert deviation < 0.07
    assert whole["From outside"][0] < 0.1 < whole["Later"][0] < 0.85
    assert whole["From outside"][3] > 2 * whole["As in training"][3]


def claims_of_dynamics(text):
    within, beyond = (table(text, title) for title in ("RANDOM TORQUES", "THE CONTROLLER"))
    five, more = "five members, TS-infinity", "two episodes more"  # coverage by steps ahead, CRPS
    assert max(within["means only"][:5]) < 0.5
    for name in ("one member", five, more):
        assert min(within[name][:5]) > 0.75
    assert 0.85 < sum(within[five][:5]) / 5 < 0.97
    assert 0.6 < beyond[five][0] < 0.85
    assert beyond["one member"][0] < beyond[five][0] < beyond[more][0]
    assert beyond[more][5] < 0.9 * beyond[five][5]
    low, high = (re.findall(rf"{name} standard deviation, by member: (.*)", text)[0] for name in ("lowest", "highest"))
    assert max(map(float, low.split())) < 0.05 < 0.5 < min(map(float, high.split()))


def claims_of_pinn(text):
    population = table(f"\n{text}", "POPULATION")
    mean = population.pop("mean of the four")  # bound, error
    for *_, bound, error in population.values():  # scale, rate, weight, bound, error
        assert error < bound
    assert population["best"][4] < 0.05 < 0.2 < population["middle"][4]
    assert mean[1] < mean[0] < population["fourth"][3]
    assert "errors below their bound: 1.00" in text
    seeds = table(text, "SEEDS")  # spread, error, bound, share
    assert all(error < bound for _, error, bound, _ in seeds.values())
    assert min(error for _, error, *_ in seeds.values()) < 0.1
    for scale in ("scale 8.48", "scale 16.38", "scale 31.62"):
        assert seeds[scale][1] > 4 * seeds[scale][0]
        assert seeds[scale][3] < 0.2


def claims_of_density(text):
    divergence = table(text, "DIVERGENCE FROM THE TRUTH")  # negative log-likelihood, divergence, standard error
    assert divergence["mixture"][1] < divergence["mean flow"][1]  # a theorem
    assert divergence["mixture"][1] < 0.3 < divergence["one Gaussian"][1]
    truth = divergence.pop("the density of the data")
    assert truth[1] == 0
    assert all(gap > -2 * error for _, gap, error in divergence.values())
    (entropy,) = map(float, re.findall(r"entropy in closed form: (\S+)", text))
    assert abs(entropy - math.log(2 * math.pi * math.e * 0.5)) < 1e-4
    assert abs(truth[0] - entropy) < 0.08
    masses = {name: row[0] for name, row in table(text, "MASS").items()}
    assert 0.98 < masses["members, least"] <= masses["mixture"] <= masses["members, most"] < 1.02
    assert masses["mean of logarithms"] < masses["mixture"] - 0.005
    by_density = table(text, "BY TRUE DENSITY")  # disagreement, error
    assert by_density["lowest tenth"][0] > by_density["highest tenth"][0]
    assert by_density["lowest tenth"][1] > by_density["highest tenth"][1]


def claims_of_active_learning(text):
    curves = table(text, "ACCURACY")
    assert len({curves[name][0] for name in ("random", "entropy", "BALD")}) == 1  # the same first labels
    for name in ("entropy", "BALD"):
        gain, error = curves[f"{name} minus random"], curves[f"standard error, {name}"]
        assert curves[name][-1] > curves["random"][-1]
        assert gain[1] < 0 < gain[-1]
        assert gain[-1] > 2 * error[-1]
    needed = table(text, "LABELS")  # mean, standard error, seeds
    assert all(mean + error < 190 for mean, error, _ in needed.values())


def claims_of_adapters(text):
    found = table(text, "FINE-TUNING")  # kB, NLL, NLL alone, ECE, accuracy, AUROC
    assert len(found) == 7
    size, nll, alone, _, _, auroc = ({name: numbers[i] for name, numbers in found.items()} for i in range(6))
    frozen, whole, ranks = (
        nll.pop("the frozen base"),
        nll.pop("whole copies"),
        [f"low_rank, rank {r}" for r in (1, 4, 16)],
    )
    assert frozen > 2
    assert whole - 0.02 < nll[ranks[2]] < alone["whole copies"] + 0.03
    assert max(nll[ranks[1]], nll[ranks[2]]) + 0.1 < nll[ranks[0]]
    assert nll[ranks[0]] + 0.04 < min(nll["bias_only"], nll["layers_only, the last"])
    assert all(alone[name] > nll[name] + 0.1 for name in ranks)
    assert abs(alone["bias_only"] - nll["bias_only"]) < 0.02
    assert size[ranks[1]] < size["whole copies"] / 4 < size[ranks[2]] < size["whole copies"] / 2
    assert auroc["whole copies"] > auroc["the frozen base"] + 0.05


def claims_of_bayesian_optimisation(text):
    table_of, hartmann = (table(text, f"REGRET, {title}") for title in ("Hyper-parameters", "Hartmann-6"))
    for found in (table_of, hartmann):  # regret and its error after 12, 20, 32 and 52 evaluations
        found.pop("evaluations")
        assert len({tuple(numbers[:2]) for numbers in found.values()}) == 1  # the same first points
    process = hartmann["Gaussian process"][6]
    assert process < 0.5
    for name in ("Gaussian process", "deep ensemble", "ensemble with priors"):
        assert hartmann[name][6] < hartmann["random search"][6] - 0.3
        assert process - 0.2 < hartmann[name][6]
        assert table_of[name][6] < min(table_of["random search"][6], 0.025)


def claims_of_bandit(text):
    regret = {name: numbers[-2] for name, numbers in table(text, "REGRET: wrong").items()}
    seeds, priors = regret["Thompson, seeds alone"], regret["Thompson, with priors"]
    assert priors + 60 < regret["epsilon-greedy"] < regret["uniform"] - 200
    assert priors - 10 < seeds < regret["greedy"] - 30 < regret["uniform"] - 200
    last = table(text, "THE LAST 200 IMAGES")  # accuracy, error, classes, error
    assert last["Thompson, with priors"][2] > last["greedy"][2] + 1
    more = table(text, "REGRET MINUS THAT")["greedy"]  # mean, standard error, seeds
    assert more[0] > 3 * more[1]
    assert more[2] >= 8


CLAIMS = {
    "adapters": (claims_of_adapters, "whole copies", "bias_only"),
    "mixture_of_experts": (claims_of_mixture_of_experts, "one expert", "mixture of four experts"),
    "actor_critic": (claims_of_actor_critic, "an untrained actor", "minimum of a random pair"),
    "planning": (claims_of_planning, "hanging still", "five members, mean"),
    "neural_ode": (claims_of_neural_ode, "AS IN TRAINING", "FROM OUTSIDE"),
    "dynamics": (claims_of_dynamics, "RANDOM TORQUES", "THE CONTROLLER"),
    "pinn": (claims_of_pinn, "best  ", "middle  "),
    "density": (claims_of_density, "mean flow", "mixture   "),
    "active_learning": (claims_of_active_learning, "\nrandom  ", "\nBALD  "),
    "bayesian_optimisation": (claims_of_bayesian_optimisation, "\nrandom search  ", "\nGaussian process  "),
    "bandit": (claims_of_bandit, "\ngreedy  ", "\nThompson, with priors  "),
}
NEEDED = {"neural_ode": "diffrax", "density": "flowjax"}

# Appended to a notebook: the call fails in its shapes alone, and without the hook of the first cell otherwise or not.
CONTROL = """
import jaxtyping

try:
    {call}
except jaxtyping.TypeCheckError:
    print("the hook is on")
"""
WRONG_CALLS = {
    "adapters": "flat(np.zeros((2, 2)))",
    "mixture_of_experts": "effect(1.0)",
    "actor_critic": "advance(jnp.zeros(3), jnp.zeros(1))",
    "planning": "advance(jnp.zeros(3), jnp.zeros(()))",
    "neural_ode": "solution(jnp.ones(3), seen_times)",
    "dynamics": "advance(jnp.zeros(3), jnp.zeros(()), jnp.zeros(()))",
    "pinn": "residuals(exact, jnp.ones((2, 2)))",
    "density": "true_log_density(jnp.ones((3, 1)))",
    "active_learning": "scores_of('entropy', jnp.zeros((2, 3)), 0)",
    "bayesian_optimisation": "regret_of(PROBLEMS['Hartmann-6'], np.zeros(3))",
    "bandit": "mean_and_error(jnp.zeros((2, 3)))",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param("script", marks=pytest.mark.slow), pytest.param("notebook", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CLAIMS)
def test_claims(name, way, tmp_path):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=f"{NEEDED[name]} is not installed")
    if way == "script":
        text, figures = printed(name, tmp_path)
        assert_page_shows(name, text)
    else:
        text, figures = executed(name, tmp_path, CONTROL.format(call=WRONG_CALLS[name]))
        assert text.endswith("the hook is on\n")
    claims, one, other = CLAIMS[name]
    claims(text)
    exchanged = text.replace(one, "THE OTHER").replace(other, one).replace("THE OTHER", other)
    with pytest.raises(AssertionError):
        claims(exchanged)
    picture = (figures / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_the_page_quotes_the_benchmark_with_twenty_seeds():
    path = max((NOTEBOOKS.parent / "benchmarks" / "results").glob("*-acquisition.json"))
    facts = json.loads(path.read_text())["results"]["facts"]
    page = (NOTEBOOKS / "bayesian_optimisation.py").read_text()
    rows = re.findall(r"^# \| (\w.*) \| (\d.*) \| (\d.*) \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for name, *quoted in rows:
        for title, value in zip(("Hyper-parameters", "Hartmann-6"), quoted, strict=True):
            mean, error = value.split(" ± ")
            found = facts[f"{title}: {name}, regret after 52"]
            assert found == f"{mean} (standard error {error}, 20 seeds)"


ATTEMPTS = [
    "1. A column of predictions",
    "2. One model's logits",
    "3. One weight for four members",
    "4. Members and rows exchanged, both four",
    "5. The same, three and five",
]


@pytest.mark.slow
def test_shape_errors_are_shown_in_the_notebook_and_missing_in_the_script(tmp_path):
    script, _ = printed("typed_shapes", tmp_path)
    folder = tmp_path / "notebook"
    folder.mkdir()
    notebook, _ = executed("typed_shapes", folder)
    assert_page_shows("typed_shapes", notebook)
    for text in (script, notebook):
        assert float(re.findall(r"accuracy of four members: (\S+)", text)[0]) > 0.9
        for attempt in ATTEMPTS:
            assert f"\n{attempt}: " in text
        assert "needs one weight per member" in text  # the library's own check
    for attempt in ATTEMPTS[:3]:
        assert f"{attempt}: NO ERROR" in script
    assert "REFUSED" not in script
    for attempt in (*ATTEMPTS[:3], ATTEMPTS[4]):
        assert f"{attempt}: REFUSED" in notebook
    assert f"{ATTEMPTS[3]}: NO ERROR" in notebook
    refusals = notebook.split("REFUSED")
    assert "predicted" in refusals[1]
    assert "f32[6,1]" in refusals[1]
    assert "f32[797,10]" in refusals[2]
    assert "members" in refusals[3]
