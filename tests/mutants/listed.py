"""Faults put into the library by hand: a file, text that it holds once, what to write instead, tests to run first."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """`path` and `tests` are relative to `eqx_ensemble` and `tests`."""

    path: str
    old: str
    new: str
    tests: str


def of(path, tests, *pairs):
    return [Mutant(path, old, new, tests) for old, new in pairs]


MUTANTS = [
    *of(
        "train/_together.py",
        "train/test_together.py",
        ("/ jnp.maximum(count, 1)", "/ jnp.minimum(count, 1)"),
        ("jnp.where(chosen, x, 0), axes)", "jnp.where(x == x, x, 0), axes)"),
    ),
    *of(
        "train/compiled/_select.py",
        "train/test_together.py",
        ("mean_of_members(sign * (smoothed - best), scored, axes)", "sign * (smoothed - best)"),
    ),
    *of(
        "_keys.py",
        "test_keys.py test_ensemble.py",
        ("jax.random.fold_in(key, tag), ids)", "key, ids)"),
        ("(counts > 1).any()", "(counts > 2).any()"),
        ("np.arange(ids, dtype=np.int32)", "np.arange(1, ids + 1, dtype=np.int32)"),
    ),
    *of(
        "_weighting.py",
        "combine/test_mean.py combine/test_gaussian.py combine/test_robust.py uncertainty/test_quantile.py "
        "scores/test_classification.py scores/test_intervals.py scores/test_transforms.py",
        ("as_column(weights, values.ndim) == 0, fill, values", "as_column(weights, values.ndim) != 0, fill, values"),
        ("known_mean(variance, weights) + between", "known_mean(variance, weights)"),
        ("(labels >= 0) & (labels < num_classes)", "(labels >= 0) & (labels <= num_classes)"),
        ("1 / num_members, logs.dtype", "1.0, logs.dtype"),
        ("0.5 * low + 0.5 * high", "low"),
        ("return share / share[-1:]", "return share"),
    ),
    *of(
        "combine/_moments.py",
        "combine/test_gaussian.py",
        ("least / total / power", "least / total"),
    ),
    *of(
        "combine/weights/_greedy.py",
        "combine/weights/test_greedy.py",
        ("jnp.arange(num_steps) <= best", "jnp.arange(num_steps) < best"),
        ("number < num_initial", "number <= num_initial"),
    ),
    *of(
        "scores/_crps.py",
        "scores/test_crps.py",
        ("(errors.shape[0] - 1)", "errors.shape[0]"),
        ("(1 - below) ** 2", "(1 - below)"),
    ),
    *of(
        "_check/_rows.py",
        "scores/test_intervals.py scores/test_transforms.py scores/test_row_weights.py",
        ("jnp.reshape(self.counted, shape), values, fill)", "jnp.reshape(self.counted, shape), fill, values)"),
        ("wrong := is_wrong(host) & rows.known)", "wrong := is_wrong(host))"),
        ("np.ldexp(exact, 1 - np.frexp(exact.max(initial=0))[1])", "exact"),
        ("weights = jnp.ldexp(converted, 1 - exponent)", "weights = converted"),
    ),
    *of(
        "scores/_reduce.py",
        "scores/test_regression.py scores/test_brier.py scores/test_row_weights.py",
        ("/ total_weight(row_weights, rows.dtype)", "/ rows.size"),
        ("rows if row_weights.dtype == bool else rows * row_weights, 0)", "rows, 0)"),
    ),
    *of(
        "scores/_regression.py",
        "scores/test_regression.py",
        ("root(mean_of_rows(error**2, row_weights))", "root(mean_of_rows(jnp.abs(error), row_weights))"),
    ),
    *of(
        "scores/_brier.py",
        "scores/test_brier.py",
        ("uncertainty=overall * (1 - overall)", "uncertainty=overall**2"),
        ("(bins.frequency - overall) ** 2", "(bins.probability - overall) ** 2"),
    ),
    *of(
        "scores/_binning.py",
        "scores/test_calibration.py scores/test_row_weights.py",
        ("errors = 2 * errors -", "errors = errors -"),
        ("[1:-1], dtype)", "[1:], dtype)"),
        ("count**2 / jnp.where(count == 0, 1, total(own)) if is_weighted else count", "count"),
        ("at_most[-1] - at_most[-1] / jnp.sum(row_weights != 0).astype(at_most.dtype)", "0.7 * at_most[-1]"),
    ),
    *of(
        "scores/_ranking.py",
        "scores/test_ranking.py",
        ("hits, false = total[0][last], total[1][last]", "hits, false = total"),
        ("jnp.nan, precision), ranked.positive)", "jnp.nan, precision), ranked.negative)"),
    ),
    *of(
        "scores/_gaussian.py",
        "scores/test_gaussian.py",
        ("jnp.log(variance) + (targets", "2 * jnp.log(variance) + (targets"),
    ),
    *of(
        "scores/_pit.py",
        "scores/test_pit.py",
        ("jnp.sqrt(variance)), weights)", "variance), weights)"),
    ),
    *of(
        "scores/_selective.py",
        "scores/test_selective.py scores/test_row_weights.py",
        ("sort_rows(_blank(uncertainty, row_weights)", "sort_rows(_blank(-uncertainty, row_weights)"),
        ("jnp.where(first == last, weights, ", "jnp.where(first <= last, weights, "),
    ),
    *of(
        "uncertainty/_entropy.py",
        "uncertainty/test_entropy.py",
        ("probabilities * -jnp.where(logs", "probabilities * jnp.where(logs"),
    ),
    *of(
        "uncertainty/_variance.py",
        "uncertainty/test_variance.py",
        ("moments(blank_unweighted(mean, weights), weights)[1]", "moments(mean, weights)[1]"),
    ),
    *of(
        "conformal/_quantile.py",
        "conformal/test_quantile.py conformal/test_intervals.py",
        ("-(-(num_rows + 1) * level.numerator", "-(-num_rows * level.numerator"),
        ("jnp.where(rank > count, jnp.inf, found)", "found"),
    ),
    *of(
        "calibrate/_temperature.py",
        "calibrate/test_variance.py",
        ('reduce(of_group, "mean", row_weights)', "jnp.sum(of_group)"),
    ),
    *of(
        "resample/_weights.py",
        "resample/test_weights.py",
        ("num_rows * (gap / gap.sum())", "gap / gap.sum()"),
        (".at[own].add(1)", ".at[own].set(1)"),
    ),
    *of(
        "resample/_folds.py",
        "resample/test_folds.py",
        (
            "np.flatnonzero(fold_of != i), np.flatnonzero(fold_of == i)",
            "np.arange(num_rows), np.flatnonzero(fold_of == i)",
        ),
        ("np.arange(longest) < len(part)", "np.arange(longest) <= len(part)"),
    ),
    *of(
        "tree/_sum.py",
        "tree/test_polyak.py",
        ("[1 - float(tau), float(tau)]", "[float(tau), 1 - float(tau)]"),
    ),
    *of(
        "tree/_index.py",
        "tree/test_roundtrip.py tree/test_statics.py",
        ("_unstack(member, treedef, sizes[1:])", "_unstack(member, treedef, sizes[:1])"),
    ),
    *of(
        "tree/_sum.py",
        "tree/test_sum.py",
        ("_sum_column(leaves, weights) / math.fsum(weights)", "_sum_column(leaves, weights) / len(weights)"),
    ),
    *of(
        "_ensemble/_cut.py",
        "train/test_cut_members.py",
        ("x[rows] if _is_text(x) else x", "x"),
        ("if y is None or not _same_array(x, y):", "if y is None:"),
    ),
    *of(
        "_axes/_map.py",
        "test_axes.py test_ensemble.py",
        ("if node.axis == 0:", "if True:"),
    ),
    *of(
        "_axes/_map.py",
        "train/test_health.py",
        ("x.ndim), x, y)", "x.ndim), y, x)"),
    ),
    *of(
        "sweep/_ranges.py",
        "sweep/test_sweep.py",
        (
            "math.exp(generator.uniform(math.log(self.low), math.log(self.high)))",
            "generator.uniform(self.low, self.high)",
        ),
    ),
    *of(
        "methods/population/_decisions.py",
        "methods/test_population.py",
        ("min(len(order) - most, able.sum())", "len(order) - most"),
    ),
    *of(
        "_predict/_batch.py",
        "predict/test_rows.py",
        ("1 << (num_rows - 1).bit_length()", "1 << num_rows.bit_length()"),
    ),
    *of(
        "train/compiled/_program.py",
        "train/test_fit.py",
        ("jax.random.fold_in(fixed.key, step)", "fixed.key"),
    ),
    *of(
        "train/compiled/_program.py",
        "train/test_fit.py train/test_cuts.py",
        ("(state[0] < length) & ~state[1]", "(state[0] <= length) & ~state[1]"),
    ),
    *of(
        "train/compiled/_select.py",
        "train/test_judging.py train/test_selection.py train/test_limits.py train/test_fit.py",
        ("waited >= patience", "waited > patience"),
        ("sign * reached <= sign * target", "sign * reached >= sign * target"),
        ('sign = 1 if selection.mode == "min" else -1', "sign = 1"),
    ),
    *of(
        "train/compiled/_select.py",
        "train/test_smooth.py",
        ("judged & gain(selection.best)", "judged & gain(selection.score)"),
        ("jnp.where(counts, average, selection.average)", "jnp.where(judged, average, selection.average)"),
        ("jnp.where(counts, weight, selection.weight)", "weight"),
    ),
    *of(
        "train/compiled/_selection.py",
        "train/test_smooth.py",
        ("selection.weight + newest * (1 - selection.weight)", "newest + 0 * selection.weight"),
        ("known = jnp.isfinite(average)", "known = ~jnp.isnan(average)"),
        ("newest == 1", "newest == 2"),
        ('"average": 0, "weight": 0', '"average": 0'),
    ),
    *of(
        "train/compiled/_health.py",
        "train/test_health.py train/test_fault_census.py",
        ("(status == Status.OK) & (first < 0) & good", "(first < 0) & good"),
        ("jnp.where(diverged, step, before.stopped_at)", "before.stopped_at"),
        ("(num_steps > 1) & jnp.any(lost)", "(num_steps > 1) & jnp.all(lost)"),
    ),
    *of(
        "train/compiled/_stepwise.py",
        "train/test_cores.py",
        ("least = min(good)", "least = max(good)"),
        ("num_pieces=jnp.int32(least)", "num_pieces=chunk.num_pieces"),
    ),
    *of(
        "train/compiled/_selection.py",
        "train/test_limits.py",
        ("limits.steps <= step", "limits.steps < step"),
        ('side="right") :][:1]', 'side="left") :][:1]'),
    ),
    *of(
        "train/compiled/_stepwise.py",
        "train/test_stepwise.py",
        ("jax.lax.dynamic_update_slice_in_dim(x, y, member, 0)", "jax.lax.dynamic_update_slice_in_dim(x, y, 0, 0)"),
    ),
    *of(
        "train/host/_record.py",
        "train/test_record.py train/test_fit.py train/test_going_on.py",
        ("np.fmin if mode", "np.fmax if mode"),
        ("history.validation_step <= end", "history.validation_step < end"),
    ),
    *of(
        "train/host/_active.py",
        "train/test_roster.py",
        ("np.argsort(status != Status.OK", "np.argsort(status == Status.OK"),
    ),
    *of(
        "_save.py",
        "test_save.py",
        ("if fields or end != whole", "if fields and end != whole"),
    ),
    *of(
        "_load.py",
        "test_save.py",
        ("header.starts[name] + row * size", "header.starts[name] + i * size"),
        ("!= saved[32 * row : 32 * row + 32]", "!= found[32 * i : 32 * i + 32]"),
    ),
    *of(
        "_sharding.py",
        "sharding/test_mesh.py",
        ("return -(-num_members // self.members)", "return num_members // self.members"),
    ),
    *of(
        "plan/_plans.py",
        "plan/test_map.py plan/test_own_plan.py",
        ("min(self.width(num_members), num_members) // 2", "self.width(num_members) // 2"),
    ),
    *of(
        "acquire/_improvement.py",
        "acquire/test_improvement.py",
        ("terms = 16 if", "terms = 5 if"),
        ("else 80", "else 20"),
        ("jnp.where(is_far, 1 / _mills_rest(x)", "jnp.where(is_far, _mills_rest(x)"),
        ("pdf(near) + near * ndtr(near))\n\n\n@_excess", "pdf(near) - near * ndtr(near))\n\n\n@_excess"),
        ("worse = better <= 0", "worse = better < 0"),
        ("jnp.sqrt(beta) *", "beta *"),
        ("check_best(best, means)), before=1)", "check_best(best, means)), before=0)"),
        ("convex, kind), fill=-jnp.inf)", "convex, kind), fill=0)"),
        ("jnp.log(sigma) + _log_excess(z)", "_log_excess(z)"),
    ),
    *of(
        "acquire/_batch.py",
        "acquire/test_batch.py",
        ("each - reached[:, None]", "each - 0 * reached[:, None]"),
        ("jnp.where((chosen < 0)[None], 0, each[:, chosen])", "0 * each[:, chosen]"),
    ),
    *of(
        "acquire/_greedy.py",
        "acquire/test_batch.py",
        ("(1 + 16 * jnp.finfo(gains.dtype).eps)", "1"),
        ("gains / self.costs", "gains"),
        ("_replace(spent=self.spent + cost)", "_replace(spent=self.spent)"),
    ),
    *of(
        "acquire/_thompson.py",
        "acquire/test_batch.py",
        ("(num_picks,), p=weights", "(num_picks,)"),
        ("sign * values", "values"),
    ),
    *of(
        "acquire/_information.py",
        "acquire/test_information.py",
        ("self.scores - shared", "self.scores"),
        ("logs[members]", "logs[jax.random.permutation(key, members)]"),
        ("likelihood * self.weights[:, None]", "likelihood / joint.shape[0]"),
        ("evidence == -jnp.inf, 0, evidence", "evidence == jnp.inf, 0, evidence"),
        ("power * jnp.log", "jnp.log"),
        ("jnp.where(index < 0, certain[None], self.logs[:, index])", "self.logs[:, index]"),
    ),
    *of(
        "acquire/_regret.py",
        "acquire/test_regret.py",
        ("jax.lax.cummin(lost", "jax.lax.cummax(lost"),
    ),
    *of(
        "scores/_joint.py",
        "scores/test_joint.py",
        ("0, num_anchors)", "0, 1)"),
        ("p=None if own is None else own / own.sum()", "p=None"),
        ("log_mixture(each, weights)", "log_mixture(each, None)"),
    ),
]
