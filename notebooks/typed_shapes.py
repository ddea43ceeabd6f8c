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
# # Shape checks: silent broadcasting found in a notebook
#
# A column of predictions and a row of targets broadcast to all pairs, and the loss is finite and wrong. Two lines at
# the top of a notebook check the annotated shapes of every call: this page makes four such mistakes, and explains the
# errors.
#
# In the notebook the checks are on. In the program, `python notebooks/typed_shapes.py`, the two lines are comments, and
# the same calls run without checks:
#
# ```text
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
# ```

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype

# %% fold="Imports"
import pathlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from jaxtyping import Array, Float, Int, Key, TypeCheckError
from sklearn.datasets import load_digits

import eqx_ensemble as ee

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
# ## The silent mistake in a picture
#
# The difference of a column and a row has all pairs. Only the diagonal holds the errors of the predictions:

# %% fold="Code of the figure" alt="Six errors of predictions, and the 36 differences of a column and a row"
predicted, target = jnp.arange(6.0), jnp.array([0.4, 0.8, 2.5, 2.7, 4.4, 4.6])
intended = jnp.where(jnp.eye(6, dtype=bool), jnp.abs(predicted - target), jnp.nan)
figure, axes = plt.subplots(1, 2, figsize=(6.4, 3.9), layout="constrained")
for ax, differences, title in [
    (axes[0], intended, "(6,) - (6,): 6 errors"),
    (axes[1], jnp.abs(predicted[:, None] - target), "(6, 1) - (6,): 36 pairs"),
]:
    ax.imshow(differences, cmap="Blues", vmin=0, vmax=6)
    for i in range(6):
        for j in range(6):
            if jnp.isfinite(differences[i, j]):
                value = float(differences[i, j])
                ax.text(j, i, f"{value:.1f}", ha="center", va="center", color="white" if value > 3 else "black")
    loss_of_all = float(jnp.nanmean(differences**2))
    ax.set(
        title=f"{title}\nmean squared error {loss_of_all:.2f}",
        xlabel="index of the target",
        ylabel="index of the prediction",
    )
figures = pathlib.Path(globals().get("__file__", "")).parent / "figures"
figures.mkdir(exist_ok=True)
figure.savefig(figures / "typed_shapes.png", dpi=200)
print("refused:", *(name for name, value in refused.items() if value), sep=" | ")
# %% [markdown]
# ## In your own package
#
# The two lines check notebooks. For a package, let pytest install the checks for the tests, without a cost for users:
# `addopts = "--jaxtyping-packages=your_package,beartype.beartype"` in `pyproject.toml`. In a program,
# `jaxtyping.install_import_hook("your_package", "beartype.beartype")` before the import does the same.
