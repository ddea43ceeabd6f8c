"""Draws `front.png`: the training of sixteen networks, and their predictions."""

import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import eqx_ensemble as ee

EPOCHS, SCALE = 100, 4.0
INK, BLUE = "#22262e", "#3d4fc4"


def loss(model, batch, key):
    """Gaussian negative log-likelihood of one member."""
    x, y = batch
    mean, raw = jax.vmap(model)(SCALE * x).T
    return ee.scores.nll_gaussian(mean, jax.nn.softplus(raw) + 1e-3, y)


rng = np.random.default_rng(0)
x = np.concatenate([rng.uniform(-1.0, -0.45, 60), rng.uniform(0.25, 0.75, 60)])
y = np.sin(5 * x) + 0.12 * rng.normal(size=len(x))
data = jnp.asarray(x, jnp.float32)[:, None], jnp.asarray(y, jnp.float32)

make = lambda key: eqx.nn.MLP(1, 2, 50, 2, key=key)
ensemble = ee.build(make, 16, key=jax.random.key(0))
options = dict(epochs=EPOCHS, batch_size=30, key=jax.random.key(1))
run = ee.fit(ensemble, loss, optax.adam(3e-3), data, **options)

grid = np.linspace(-1.5, 1.3, 400, dtype=np.float32)
mean, raw = np.moveaxis(run.predict(SCALE * grid[:, None]), -1, 0)
variance = np.asarray(jax.nn.softplus(raw)) + 1e-3
mixture = ee.combine.gaussian(mean, variance)

plt.rcParams |= {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
figure, (left, right) = plt.subplots(
    1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=[1, 1.7]
)
smooth = run.history.loss.reshape(16, EPOCHS, -1).mean(-1)
left.plot(np.arange(1, EPOCHS + 1), smooth.T, color=BLUE, alpha=0.5, lw=0.9)
left.set(
    xlabel="epoch", ylabel="loss (NLL, nats)", title="Sixteen networks, one program"
)

band = ee.uncertainty.gaussian_interval(*mixture, level=0.9)
right.fill_between(grid, band.lower, band.upper, color=BLUE, alpha=0.22, lw=0)
right.plot(grid, mean.T, color=BLUE, alpha=0.5, lw=0.8)
right.plot(grid, mixture.mean, color=INK, lw=1.7)
right.plot(x, y, "o", color=INK, ms=2.8)
right.set(xlim=(-1.5, 1.3), ylim=(-3.3, 3.3), xlabel="x", ylabel="y")
right.set_title("Their 90 % band opens where the data end")
for ax in (left, right):
    ax.title.set(fontsize=11.5, fontweight="bold")

figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=110, facecolor="white")
