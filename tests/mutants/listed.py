"""Faults put into the library by hand: a file, text that it holds once, what to write instead, tests to run first."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """`path` and `tests`, files or tests in them, are relative to `eqx_ensemble` and `tests`."""

    path: str
    old: str
    new: str
    tests: str


def of(path, tests, *pairs):
    return [Mutant(path, old, new, tests) for old, new in pairs]


MUTANTS = [
    *of(
        "_keys.py",
        "test_keys.py",
        ("jax.random.fold_in(key, tag), jax.numpy.arange(n)", "key, jax.numpy.arange(n)"),
        ("jax.numpy.arange(n)", "jax.numpy.arange(1, n + 1)"),
    ),
    *of(
        "_ensemble.py",
        "test_ensemble.py::test_concatenate_refuses_what_does_not_fit",
        ("check_equal_shared(parts[0][1], rest)", "check_equal_shared(rest, rest)"),
    ),
    *of(
        "_ensemble.py",
        "test_ensemble.py::test_shared_leaves_are_kept_once_and_un_stacked",
        ("None if x is None else axis for x, axis", "None if x is None else 0 for x, axis"),
    ),
    *of(
        "_map.py",
        "plan/test_map.py::test_what_members_share_stays_shared_until_it_is_changed",
        ("None if is_plain else shared.get(id(x))", "None"),
    ),
    *of(
        "plan.py",
        "plan/test_map.py",
        ("x.reshape(width, *x.shape[2:])[:count]", "x.reshape(width, *x.shape[2:])"),
        ("np.minimum(np.arange(width), count - 1)", "np.maximum(np.arange(width) - 1, 0)"),
    ),
    *of(
        "_predict.py",
        "predict/test_rows.py predict/test_predict.py",
        ("1 << (num_rows - 1).bit_length()", "1 << num_rows.bit_length()"),
        ('{"key": jax.random.fold_in(key, row)}', '{"key": key}'),
        ("True if inference is None else inference", "bool(inference)"),
        ("output.write(out, int(rows[0])) if combine is None", "output.write(out, int(rows[-1])) if combine is None"),
    ),
    *of(
        "train/_order.py",
        "train/test_orders.py",
        ("epoch + place // length", "epoch + 0 * place"),
        ("epoch * surplus + first + jnp.arange", "epoch * surplus + first + 1 + jnp.arange"),
        ("range(1, permutations)", "range(2, permutations)"),
    ),
    *of(
        "train/_member.py",
        "train/test_fit.py::test_weights_that_are_not_finite_count_though_the_loss_is "
        "train/test_fit.py::test_a_diverged_member_gets_back_what_it_had_at_the_start_of_the_epoch",
        ("choose_trained(trains & finite, trained,", "choose_trained(trains, trained,"),
        ("jnp.where(chosen, a, b)", "jnp.where(chosen, b, a)"),
        ("finite = all_finite((trained.own, trained.common)) & jnp.all(", "finite = jnp.all("),
        ("& jnp.all(jnp.isfinite(values) | ~used)", ""),
        ("jnp.where(trains & finite, before.step + count", "jnp.where(trains, before.step + count"),
    ),
    *of(
        "train/_member.py",
        "train/test_fit.py::test_epochs_of_full_batches",
        ("jax.random.fold_in(key, before.step + j)", "key"),
        ("jax.random.fold_in(key, before.step + j)", "jax.random.fold_in(key, before.step)"),
    ),
    *of(
        "train/_member.py",
        "train/test_fit.py::test_best_weights_and_patience train/test_fit.py::test_higher_scores_are_better",
        ("best=choose(better, (weights.own, state.model_state), state.best)", "best=state.best"),
        ("best_score=jnp.where(better,", "best_score=jnp.where(trains,"),
        ("(waited >= (", "(waited > ("),
        ("jnp.where(better, 0, state.waited", "jnp.where(better, 1, state.waited"),
        ("state.best_score - task.min_delta", "state.best_score + task.min_delta"),
        ('sign = 1 if task.mode == "min" else -1', "sign = 1"),
    ),
    *of(
        "train/_member.py",
        "train/test_fit.py::test_targets_and_limits",
        ("sign * score <= sign * target", "sign * score >= sign * target"),
        ("(state.step >= limit)", "(state.step > limit)"),
    ),
    *of(
        "train/_member.py",
        "train/test_fit.py::test_steps_end_within_an_epoch train/test_fit.py::test_a_long_epoch_is_kept_in_parts",
        ("left = task.epoch - done % task.epoch", "left = task.epoch"),
        ("(count == left) | (done + count == self.end)", "count == left"),
        ("jax.lax.cond(ends, judged", "jax.lax.cond(count > 0, judged"),
    ),
    *of(
        "train/_member.py",
        "train/test_fit.py::test_rows_in_their_order train/test_fit.py::test_rows_of_their_own",
        ("surplus = task.epoch * task.batch_size - task.num_rows", "surplus = 0"),
        ("rows if own_rows is None else own_rows[rows]", "rows"),
    ),
    *of(
        "train/_member.py",
        "train/test_step.py::TestTogether",
        ("chosen = (state.status == Status.OK) & all_finite", "chosen = (state.status == state.status) & all_finite"),
        ("chosen = (state.status == Status.OK) & all_finite(common_grads)", "chosen = state.status == Status.OK"),
        ("jnp.maximum(count, 1).astype(x.real.dtype)", "jnp.minimum(count, 1).astype(x.real.dtype)"),
        ("score = mean_of_members(score, trains & jnp.isfinite(score))", "pass"),
    ),
    *of(
        "train/_blocks.py",
        "train/test_fit.py::test_epochs_of_full_batches train/test_fit.py::TestGoingOn",
        ("    all[members] = np.asarray(x)", "    all[np.arange(len(members))] = np.asarray(x)"),
        ("words[members] = ", "words[members - 1] = "),
        ("training[first : first + self.size]", "training[first : first + self.size - 1]"),
    ),
    *of(
        "train/_blocks.py",
        "train/test_batches.py",
        ('tag("loss")), state.step + index)', 'tag("loss")), state.step)'),
    ),
    *of(
        "train/_blocks.py",
        "sharding/test_mesh.py",
        ("x[: self.num_members], whole)", "x[-self.num_members :], whole)"),
    ),
    *of(
        "train/_loop.py",
        "train/test_callbacks.py train/test_batches.py",
        ("at_end = self.done == self.end or not crew.trains", "at_end = self.done == self.end"),
        ("if ends and self._is_due(epoch)", "if ends and self._is_due(epoch - 1)"),
        ("out[block.members] = rows", "out[np.arange(len(block.members))] = rows"),
    ),
    *of(
        "train/_optimiser.py",
        "train/test_optax_census.py::test_members_draw_their_own_noise",
        ("own = jax.random.fold_in(jax.random.fold_in(x, words[0]), words[1])", "own = x"),
    ),
    *of(
        "train/_step.py",
        "train/test_step.py",
        ("choose_trained(trains & finite, new,", "choose_trained(trains, new,"),
        ("jnp.where(trains, value, jnp.nan)", "value"),
        ('before.keys, tag("loss")), before.step)', 'before.keys, tag("loss")), 0)'),
    ),
    *of(
        "train/_revive.py",
        "train/test_callbacks.py methods/test_population.py::test_what_is_copied_and_what_stays",
        ("keys=state.keys, step=state.step", "step=state.step"),
        ("np.flatnonzero(status == Status.OK)", "np.flatnonzero(status != Status.OK)"),
        ("old if is_noise(path, old) else new", "new"),
    ),
    *of(
        "train/_state.py",
        "train/test_fit.py::test_higher_scores_are_better train/test_callbacks.py",
        ('np.inf if mode == "min" else -np.inf', "np.inf"),
    ),
    *of(
        "train/_state.py",
        "train/test_step.py::test_a_member_that_fails_keeps_what_it_had",
        ("where & (self.status == Status.OK)", "where"),
    ),
    *of(
        "train/_history.py",
        "train/test_fit.py::TestGoingOn",
        ("[part.validation_step for part in parts]", "[parts[0].validation_step for part in parts]"),
    ),
    *of(
        "_weighting.py",
        "combine/test_combine.py uncertainty/test_uncertainty.py scores/test_classes.py "
        "test_boundary.py fuzz/test_arrays.py::test_every_function",
        ("as_column(weights, values.ndim) == 0, fill, values", "as_column(weights, values.ndim) != 0, fill, values"),
        ("known_mean(variance, weights) + between", "known_mean(variance, weights)"),
        ("(labels >= 0) & (labels < num_classes)", "(labels >= 0) & (labels <= num_classes)"),
        ("1 / num_members, logs.dtype", "1.0, logs.dtype"),
        ("0.5 * low + 0.5 * high", "low"),
        ("return share / share[-1:]", "return share"),
    ),
    *of(
        "combine/_combine.py",
        "combine/test_combine.py fuzz/test_arrays.py::test_every_function",
        ("least / total / power", "least / total"),
    ),
    *of(
        "scores/_distributions.py",
        "scores/test_numbers.py",
        ("(samples.shape[0] - 1)", "samples.shape[0]"),
        ("(1 - below) ** 2", "(1 - below)"),
    ),
    *of(
        "_boundary/_weights.py",
        "combine/test_combine.py test_boundary.py",
        ("weights = xp.ldexp(given, 1 - xp.frexp(largest)[1]).astype(dtype)", "weights = given.astype(dtype)"),
        ("(host >= 0)) & known", "(host >= 0))"),
        ("return jnp.asarray(exact / exact.sum(axis=0), dtype)", "return jnp.asarray(exact, dtype)"),
    ),
    *of(
        "_boundary/_rows.py",
        "scores/test_numbers.py scores/test_classes.py test_boundary.py",
        ("/ jnp.sum(row_weights).astype(values.dtype)", "/ values.size"),
        ("values if row_weights.dtype == bool else values * row_weights, 0)", "values, 0)"),
    ),
    *of(
        "scores/_regression.py",
        "scores/test_numbers.py fuzz/test_arrays.py::test_every_function",
        (
            "root(mean_of_rows(error_of_mean(predictions, targets, weights) ** 2",
            "root(mean_of_rows(error_of_mean(predictions, targets, weights) ** 4",
        ),
    ),
    *of(
        "scores/_binning.py",
        "scores/test_classes.py",
        ("uncertainty=overall * (1 - overall)", "uncertainty=overall**2"),
        ("(bins.frequency - overall) ** 2", "(bins.probability - overall) ** 2"),
    ),
    *of(
        "scores/_binning.py",
        "scores/test_classes.py test_boundary.py fuzz/test_arrays.py::test_every_function",
        ("errors = 2 * errors -", "errors = errors -"),
        ("[1:-1], dtype)", "[1:], dtype)"),
        ("count**2 / jnp.where(count == 0, 1, total(own)) if is_weighted else count", "count"),
        ("at_most[-1] - at_most[-1] / jnp.sum(row_weights != 0).astype(at_most.dtype)", "0.7 * at_most[-1]"),
    ),
    *of(
        "scores/_ranking.py",
        "scores/test_rows.py fuzz/test_arrays.py::test_every_function",
        ("hits, false = total[0][last], total[1][last]", "hits, false = total"),
        ("jnp.nan, ranked.precision), ranked.positive)", "jnp.nan, ranked.precision), ranked.negative)"),
    ),
    *of(
        "scores/_distributions.py",
        "scores/test_numbers.py fuzz/test_arrays.py::test_every_function",
        ("jnp.log(variance) + (targets", "2 * jnp.log(variance) + (targets"),
    ),
    *of(
        "scores/_pit.py",
        "scores/test_figures.py",
        ("jnp.sqrt(variance)), weights)", "variance), weights)"),
    ),
    *of(
        "scores/_ranking.py",
        "scores/test_rows.py test_boundary.py fuzz/test_arrays.py::test_every_function",
        ("(found, steps), order = _points(uncertainty", "(found, steps), order = _points(-uncertainty"),
        ("jnp.where(first == last, weights, ", "jnp.where(first <= last, weights, "),
    ),
    *of(
        "uncertainty/_entropy.py",
        "uncertainty/test_uncertainty.py fuzz/test_arrays.py::test_every_function",
        ("probabilities * -jnp.where(logs", "probabilities * jnp.where(logs"),
    ),
    *of(
        "uncertainty/_variance.py",
        "uncertainty/test_uncertainty.py fuzz/test_arrays.py::test_every_function",
        ("moments(mean, weights)[1]", "moments(mean, None)[1]"),
    ),
    *of(
        "conformal/_quantile.py",
        "conformal/test_conformal.py fuzz/test_arrays.py::test_every_function",
        ("fraction(level), np.arange(1, num_rows + 2)", "fraction(level), np.arange(num_rows + 1)"),
        ("jnp.where(few, jnp.inf, ", "jnp.where(False, jnp.inf, "),
    ),
    *of(
        "calibrate/_numbers.py",
        "calibrate/test_calibrate.py fuzz/test_arrays.py::test_every_function",
        ("mean_of_rows(of_group, row_weights)", "jnp.sum(of_group)"),
    ),
    *of(
        "resample.py",
        "test_resample.py",
        ("num_rows * (gap / gap.sum())", "gap / gap.sum()"),
        (".at[own].add(1)", ".at[own].set(1)"),
        ("(np.setdiff1d(order, part), part)", "(np.sort(order)[1:], part)"),
        ("np.arange(longest) < np.array", "np.arange(longest) <= np.array"),
        ("share / jnp.where(total == 0, 1, total)[None]", "share"),
    ),
    *of(
        "combine/_weights.py",
        "combine/test_weights.py",
        ("jnp.arange(num_steps) >= num_initial - 1", "jnp.arange(num_steps) >= 0"),
        ("number < num_initial", "number <= num_initial"),
        ("jnp.arange(num_steps) <= best", "jnp.arange(num_steps) < num_steps"),
        ("jnp.where(jnp.all(logs == -jnp.inf, axis=0)[None], 0, logs)", "logs"),
        ("width = min(512, num_rows)", "width = num_rows"),
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
        "sweep.py",
        "test_sweep.py",
        (
            "math.exp(generator.uniform(math.log(self.low), math.log(self.high)))",
            "generator.uniform(self.low, self.high)",
        ),
    ),
    *of(
        "methods/population.py",
        "methods/test_population.py",
        ("min(len(order) - most, able.sum())", "len(order) - most"),
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
        "acquire/_values.py",
        "acquire/test_acquire.py",
        ("terms = 16 if", "terms = 5 if"),
        ("else 80", "else 20"),
        ("jnp.where(is_far, 1 / _mills_rest(x)", "jnp.where(is_far, _mills_rest(x)"),
        ("pdf(near) + near * ndtr(near))\n\n\n@_excess", "pdf(near) - near * ndtr(near))\n\n\n@_excess"),
        ("worse = better <= 0", "worse = better < 0"),
        ("jnp.sqrt(beta) *", "beta *"),
        ("sign_of(mode) * (mean - against(best, mean))", "(mean - against(best, mean))"),
        ("jnp.where(row_weights, values, -jnp.inf)", "jnp.where(row_weights, values, 0)"),
        ("jnp.log(sigma) + _log_excess(z)", "_log_excess(z)"),
    ),
    *of(
        "acquire/_batch.py",
        "acquire/test_acquire.py",
        ("each - reached[:, None]", "each - 0 * reached[:, None]"),
        ("jnp.where((taken < 0)[None], 0, each[:, taken])", "0 * each[:, taken]"),
    ),
    *of(
        "acquire/_values.py",
        "acquire/test_acquire.py",
        ("(num_picks,), p=weights", "(num_picks,)"),
        ("sign_of(mode) * predictions[member]", "predictions[member]"),
    ),
    *of(
        "acquire/_information.py",
        "acquire/test_acquire.py",
        ("self.scores - shared", "self.scores"),
        ("logs[members]", "logs[jax.random.permutation(key, members)]"),
        ("likelihood * self.weights[:, None]", "likelihood / joint.shape[0]"),
        ("evidence == -jnp.inf, 0, evidence", "evidence == jnp.inf, 0, evidence"),
        ("power * jnp.log", "jnp.log"),
        ("jnp.where(index < 0, certain[None], self.logs[:, index])", "self.logs[:, index]"),
    ),
    *of(
        "acquire/_values.py",
        "acquire/test_acquire.py",
        ("jax.lax.cummin(lost", "jax.lax.cummax(lost"),
    ),
    *of(
        "scores/_classification.py",
        "scores/test_classes.py",
        ("0, num_anchors)", "0, 1)"),
        ("p=share", "p=None"),
        ("axis=-1), weights)", "axis=-1), None)"),
    ),
]
