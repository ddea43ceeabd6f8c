"""The report of `plan.Auto.explain`."""

import jax

from ._cost import Cost
from ._search import Search
from ._trials import Trial

_SEEN_BYTES = 2**25  # the process reuses smaller blocks, which are therefore not measured


def search_report(name: str, search: Search) -> str:
    """The report on the search for the program of the function `name`: analysis, trials and choice."""
    cache = search.cache
    spent = f"cost {search.spent:.2f} s of {search.seconds:.2f}" if search.spent else "had no overhead"
    return (
        f"`{name}` runs {cache.num_members} members on {jax.default_backend()} under {search.plan!r}.\n"
        f"One member's {cache.unit}: {_cost_text(cache.cost)}.\n{_table(search)}\nThe search {spent}."
    )


def reason(search: Search, trial: Trial) -> str:
    """Why a plan was not tried."""
    if trial.refused:
        return trial.refused
    if search.cache.exceeds(trial.plan, search.budget):
        expected = (search.cache.expected_peak(trial.plan) or 0) / 2**20
        return f"not tried: expected to need {expected:.0f} MiB of a budget of {(search.budget or 0) / 2**20:.0f}"
    seconds = search.cache.seconds_to_compile(trial)
    most = f"{search.max_overhead:.0%} of the time"
    return f"not tried: compiling it was expected to take {seconds:.1f} s, more than {most}"


def _table(search: Search) -> str:
    """A line for each plan, the fastest first."""
    cache = search.cache
    lines = []
    best = min((t.per_unit for t in cache.trials if t.per_unit is not None), default=None)
    for trial in sorted(cache.trials, key=lambda t: (t.per_unit is None, t.per_unit or 0.0)):
        cells = [f"  {trial.plan!r:14}"]
        if trial.per_unit is not None and best is not None:
            cells.append(f"{trial.per_unit * 1e3:.3g} ms a {cache.unit} ({trial.per_unit / best:.2f}x)")
            cells.append(f"compiled in {trial.compiling or 0:.1f} s")
            if trial.peak is not None and trial.peak > _SEEN_BYTES:
                cells.append(f"at most {trial.peak / 2**20:.0f} MiB more than before")
        if trial.per_unit is None and trial.first_call is not None and not trial.refused:
            cells.append("too few calls to measure its speed")
        elif trial.per_unit is None or trial.refused:
            cells.append(reason(search, trial))
        if trial.plan == search.plan:
            cells.append("<- in use")
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _cost_text(cost: Cost) -> str:
    counts = {
        "convolutions": cost.convolutions,
        "batched products as in attention": cost.batched_products,
        "loops": cost.loops,
    }
    parts = [f"{count} {what}" if count else f"no {what}" for what, count in counts.items()]
    size = f"at most {cost.bytes / 2**20:.3g} MiB of intermediate arrays"
    return f"{cost.flops / 1e6:.3g} MFLOP in products, {', '.join(parts)}, {size}"
