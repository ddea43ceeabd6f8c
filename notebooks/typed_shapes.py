# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Shape checks in interactive work
#
# Most mistakes with many models are shape mistakes, and many of them are silent: arrays broadcast, an axis of members
# is used as an axis of rows, five weights are passed for four members. Two lines at the top of a notebook check the
# annotations of every function that the notebook defines. This page makes four such mistakes, and explains the errors.
#
# It is a notebook and a program. In the notebook the checks are on. In the program, `python notebooks/typed_shapes.py`,
# the two lines are comments, and the same calls run without checks. It needs `pip install 'eqx_ensemble[examples]'`, no
# network, and less than a minute on one core.

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype

# %%
import os
import pathlib
import sys
import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import optax
from jaxtyping import Array, Float, Int, Key, TypeCheckError
from sklearn.datasets import load_digits

import eqx_ensemble as ee

in_notebook = "ipykernel" in sys.modules
if not in_notebook:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt

here = pathlib.Path.cwd() if in_notebook else pathlib.Path(__file__).parent
figures = pathlib.Path(os.environ.get("TYPED_SHAPES_FIGURES", here / "figures"))

# %% [markdown]
# ## Annotations of one member, and of all members
#
# A model, its fields and its loss have the shapes of ONE member, as in `ee.build` and `ee.fit`. Predictions have a
# `members` axis. A function of the ensemble itself is annotated with `ee.Stacked[Classifier, "members"]`, which binds
# the size of that axis for the other arguments of the call.

# %%
key = jax.random.key(0)
pixels, digits = load_digits(return_X_y=True)
pixels, digits = jnp.asarray(pixels / 16, jnp.float32), jnp.asarray(digits)
train, test = (pixels[:1000], digits[:1000]), (pixels[1000:], digits[1000:])


class Classifier(eqx.Module):
    mean: Float[Array, "64"]
    mlp: eqx.nn.MLP

    def __init__(self, *, key: Key[Array, ""]):
        self.mean = jnp.mean(train[0], axis=0)
        self.mlp = eqx.nn.MLP(64, 10, 32, 1, key=key)

    def __call__(self, x: Float[Array, "64"]) -> Float[Array, "10"]:
        return self.mlp(x - self.mean)


def loss(
    model: Classifier, batch: tuple[Float[Array, "rows 64"], Int[Array, " rows"]], key: Key[Array, ""]
) -> Float[Array, ""]:
    x, y = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


def squared_error(predicted: Float[Array, " rows"], target: Float[Array, " rows"]) -> Float[Array, ""]:
    return jnp.mean((predicted - target) ** 2)


def accuracy(logits: Float[Array, "members rows classes"], labels: Int[Array, " rows"]) -> Float[Array, ""]:
    """Accuracy of the mixture."""
    return jnp.mean(jnp.argmax(jnp.mean(jax.nn.softmax(logits), axis=0), axis=-1) == labels)


def weighted_logits(
    ensemble: ee.Stacked[Classifier, " members"],
    weights: Float[Array, " members"],
    x: Float[Array, "64"],
) -> Float[Array, "10"]:
    return jnp.sum(weights[:, None] * ensemble(x), axis=0)


# %% [markdown]
# Correct calls pass, and training runs at its usual speed: in a compiled program the checks run once, at trace time.

# %%
ensemble = ee.build(lambda key: Classifier(key=key), 4, key=key)
run = ee.fit(ensemble, loss, optax.adam(3e-3), train, epochs=10, key=key)
ensemble = run.ensemble
logits = ee.predict(ensemble, test[0])
print(f"accuracy of four members: {accuracy(logits, test[1]):.4f}")

# %% [markdown]
# ## Four mistakes
#
# `attempt` makes a call, and prints its error, or otherwise the shape of the result.


# %%
def attempt(title: str, call: Callable[[], Array]) -> bool:
    """Whether the call raised an error."""
    try:
        result = call()
    except TypeCheckError as error:
        lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
        print(f"\n{title}: REFUSED", *lines, sep="\n    ")
        return True
    except (TypeError, ValueError) as error:
        print(f"\n{title}: ANOTHER ERROR, from within", *str(error).splitlines()[:1], sep="\n    ")
        return False
    print(f"\n{title}: NO ERROR, a result of shape {result.shape}", end="")
    print(f", {float(result):.4f}" if result.ndim == 0 else "")
    return False


refused = {}

# %% [markdown]
# **Predictions `(rows, 1)` and targets `(rows,)`.** They broadcast to all pairs `(rows, rows)`, and the loss is finite
# and wrong. The error names the parameter (`predicted`), the shape passed (`f32[6,1]`) and the annotation.

# %%
column = jnp.arange(6.0)[:, None]
refused["pairs"] = attempt("1. A column of predictions", lambda: squared_error(column, jnp.arange(6.0)))

# %% [markdown]
# **One model's logits instead of those of all members.** `(rows, classes)` lacks an axis. Without a check the mean is
# over rows, and the result is a plausible accuracy.

# %%
one = jax.vmap(ensemble[0])(test[0])
refused["axis"] = attempt("2. One model's logits", lambda: accuracy(one, test[1]))

# %% [markdown]
# **Five weights for four members.** No annotation contains the sizes. `members` is bound by the first argument that has
# it, and the second must agree: the last lines of the message list the names bound so far. Without the check there may
# be an error from deep inside the call, or none.

# %%
refused["weights"] = attempt(
    "3. One weight for four members", lambda: weighted_logits(ensemble, jnp.ones(1), pixels[0])
)

# %% [markdown]
# **Swapped axes.** Both axes may have any length, and no library can infer their order. The annotation states it.

# %%
transposed = jnp.moveaxis(logits[:, :4], 0, 1)  # (rows, members, classes), where both are four
refused["order"] = attempt("4. Members and rows exchanged, both four", lambda: accuracy(transposed, test[1][:4]))

# %% [markdown]
# The last one passes, with and without checks, because the sizes agree. **Annotations compare sizes, not meanings.** In
# a test choose different sizes: three members, five rows. The call then raises an error:

# %%
exchanged = jnp.moveaxis(logits[:3, :5], 0, 1)
refused["order, other sizes"] = attempt("5. The same, three and five", lambda: accuracy(exchanged, test[1][:5]))

# %% [markdown]
# ## Checks of the library
#
# The library itself checks, also without the two lines, everything that needs no annotations: the `members` axes of its
# functions' arguments.

# %%
for title, call in {
    "five weights for four members": lambda: ee.combine.mean(logits, weights=jnp.ones(5)),
    "a list of models": lambda: ee.predict(ensemble.unstack(), test[0]),
}.items():
    try:
        call()
    except (TypeError, ValueError) as error:
        print(f"\n{title}:", *str(error).splitlines()[:3], sep="\n    ")

# %% [markdown]
# ## Costs
#
# Outside `jit` a checked call takes some tens of microseconds longer. Inside, checks cost nothing after the first call.

# %%
ones = jnp.ones(6)
compiled = eqx.filter_jit(squared_error)
seconds = {}
for name, fn in {"not compiled": squared_error, "compiled": compiled}.items():
    jax.block_until_ready(fn(ones, ones))
    begin = time.perf_counter()
    for _ in range(200):
        jax.block_until_ready(fn(ones, ones))
    seconds[name] = (time.perf_counter() - begin) / 200
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.bar(list(seconds), [1e6 * value for value in seconds.values()])
ax.set(
    ylabel="microseconds a call", title="A function of two vectors, " + ("checked" if in_notebook else "not checked")
)
figures.mkdir(parents=True, exist_ok=True)
figure.savefig(figures / "typed_shapes.png", dpi=150)
print(f"\nfigure: {figures / 'typed_shapes.png'}")
print("refused:", *(name for name, value in refused.items() if value), sep=" | ")

# %% [markdown]
# ## In your own package
#
# The two lines check notebooks. For a package, let pytest install the checks for the tests, without a cost for users:
# `addopts = "--jaxtyping-packages=your_package,beartype.beartype"` in `pyproject.toml`. In a program,
# `jaxtyping.install_import_hook("your_package", "beartype.beartype")` before the import does the same.
