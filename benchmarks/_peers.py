"""The same training in other libraries, which may be absent: the caller reports `import` errors."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from _by_hand import Train
from _problems import Problem, mean_squared_error


def torch_func(problem: Problem, *, fused: bool) -> Train:
    """`torch.func.stack_module_state` and `vmap(grad)` on one thread, on a GPU where jax uses one.

    Adam by hand on the stacked parameters, or torch's own fused one: Adam works element by element, so on stacked
    parameters it is every member's own.
    """
    import torch

    torch.set_num_threads(1)
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    module, first = _torch_members(problem, torch, device)
    x, y = (torch.from_numpy(a).to(device) for a in (problem.x, problem.y))
    y = y if y.is_floating_point() else y.long()

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        out = torch.func.functional_call(module, params, (x,))
        if problem.loss is mean_squared_error:
            loss = torch.mean((out[:, 0] - y) ** 2)
        else:
            loss = torch.nn.functional.cross_entropy(out, y)
        return loss, loss.detach()

    gradients = torch.func.vmap(torch.func.grad(loss_of, has_aux=True))

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        params = {name: p.detach().clone() for name, p in first.items()}
        update = _torch_adam(torch, params, problem.learning_rate, fused=fused)
        losses = []
        for rows in rows_of_epochs:
            for own in torch.from_numpy(rows).to(device).long():
                grads, loss = gradients(params, x[own], y[own])
                update(grads)
                losses.append(loss)
        return [loss.cpu().numpy() for loss in losses]

    return train


def _torch_members(problem: Problem, torch: Any, device: str) -> tuple[Any, dict[str, Any]]:
    """One module without weights, and the members' weights stacked: the same as ours."""

    def make() -> Any:
        layers = []
        for inputs, out in problem.layers:
            layers += [torch.nn.Linear(inputs, out), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

    params, _ = torch.func.stack_module_state([make() for _ in range(problem.num_members)])
    layers = problem.ensemble().stacked.layers
    ours = [np.array(a) for layer in layers for a in (layer.weight, layer.bias)]
    params = {name: torch.from_numpy(a).to(device) for name, a in zip(params, ours, strict=True)}
    return make().to("meta"), params


def _torch_adam(torch: Any, params: dict[str, Any], learning_rate: float, *, fused: bool) -> Callable[[Any], None]:
    if fused:
        optimiser = torch.optim.Adam(params.values(), lr=learning_rate, fused=True)

        def update_fused(grads: dict[str, Any]) -> None:
            for name, p in params.items():
                p.grad = grads[name]
            optimiser.step()

        return update_fused

    first, second = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2))
    step = 0

    def update(grads: dict[str, Any]) -> None:
        nonlocal step
        step += 1
        for name, g in grads.items():
            m = first[name].mul_(0.9).add_(g, alpha=0.1)
            v = second[name].mul_(0.999).addcmul_(g, g, value=0.001)
            scale = (v / (1 - 0.999**step)).sqrt_().add_(1e-8)
            params[name].addcdiv_(m, scale, value=-learning_rate / (1 - 0.9**step))

    return update


def nnx_vmap(problem: Problem) -> Train:
    """Flax NNX: a jitted step mapped by `nnx.vmap`, one call per batch made on the host."""
    import optax
    from flax import nnx

    transformation = optax.adam(problem.learning_rate)  # one object: a new one would compile again in every run

    class MLP(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(inputs, out, rngs=rngs) for inputs, out in problem.layers])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    def loss_of(model: MLP, x: Any, y: Any) -> Any:
        if problem.loss is mean_squared_error:
            return ((model(x)[:, 0] - y) ** 2).mean()
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    @nnx.split_rngs(splits=problem.num_members)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Any:
        model = MLP(rngs)
        return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit
    @nnx.vmap
    def step(model: MLP, optimiser: nnx.Optimizer, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
        optimiser.update(model, grads)
        return loss

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        model, optimiser = make(nnx.Rngs(0))
        return [step(model, optimiser, problem.x[own], problem.y[own]) for rows in rows_of_epochs for own in rows]

    return train


def sklearn_bagging(problem: Problem) -> Train:
    """scikit-learn's bagging of `MLPRegressor`s, one after another on one thread; it draws its own rows."""
    from sklearn.ensemble import BaggingRegressor
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor
    from threadpoolctl import threadpool_limits

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        epochs = sum(1 for _ in rows_of_epochs)
        member = MLPRegressor(
            hidden_layer_sizes=problem.sizes[1:-1],
            learning_rate_init=problem.learning_rate,
            batch_size=problem.batch_size,
            max_iter=epochs,
            n_iter_no_change=epochs,
        )
        with warnings.catch_warnings(), threadpool_limits(1):
            warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is fixed here
            members = BaggingRegressor(member, problem.num_members).fit(problem.x, problem.y).estimators_
        return [np.asarray(one.loss_) for one in members]

    return train
