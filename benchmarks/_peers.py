"""The same training in other libraries, which may be absent: the caller reports `import` errors."""

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from _by_hand import Train
from _problems import CNN, Problem, mean_squared_error


def torch_func(problem: Problem, *, threads: int = 1) -> Train:
    """`torch.func.stack_module_state` and `vmap(grad)`.

    Adam works element by element, so that torch's own, on stacked parameters, is every member's.
    """
    import torch

    torch.set_num_threads(threads)
    module, first = _torch_members(problem, torch)
    x, y = _torch_data(problem, torch)

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        loss = _torch_loss(problem, torch, torch.func.functional_call(module, params, (x,)), y)
        return loss, loss.detach()

    gradients = torch.func.vmap(torch.func.grad(loss_of, has_aux=True))

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        params = {name: p.detach().clone() for name, p in first.items()}
        optimiser = torch.optim.Adam(params.values(), lr=problem.learning_rate, fused=True)
        losses = []
        for rows in rows_of_epochs:
            for own in torch.from_numpy(rows).long():
                grads, loss = gradients(params, x[own], y[own])
                for name, p in params.items():
                    p.grad = grads[name]
                optimiser.step()
                losses.append(loss)
        return [loss.numpy() for loss in losses]

    return train


def torch_loop(problem: Problem, *, threads: int = 1) -> Train:
    """A Python loop over members, each with a fused Adam of its own; a member trains for an epoch at a time."""
    import torch

    torch.set_num_threads(threads)
    _, first = _torch_members(problem, torch)
    x, y = _torch_data(problem, torch)
    members = [_torch_module(problem, torch) for _ in range(problem.num_members)]

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        optimisers = []
        for i, member in enumerate(members):
            member.load_state_dict({name: p[i] for name, p in first.items()})
            optimisers.append(torch.optim.Adam(member.parameters(), lr=problem.learning_rate, fused=True))
        losses = []
        for rows in rows_of_epochs:
            steps = torch.from_numpy(rows).long()
            for i, (member, optimiser) in enumerate(zip(members, optimisers, strict=True)):
                for own in steps[:, i]:
                    loss = _torch_loss(problem, torch, member(x[own]), y[own])
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    losses.append(loss.detach())
        found = np.array([loss.numpy() for loss in losses])
        return [found.reshape(-1, problem.num_members, problem.steps_per_epoch).swapaxes(1, 2)]

    return train


def _torch_data(problem: Problem, torch: Any) -> tuple[Any, Any]:
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    return x, y if y.is_floating_point() else y.long()


def _torch_loss(problem: Problem, torch: Any, out: Any, y: Any) -> Any:
    if problem.loss is mean_squared_error:
        return torch.mean((out[:, 0] - y) ** 2)
    return torch.nn.functional.cross_entropy(out, y)


def _torch_members(problem: Problem, torch: Any) -> tuple[Any, dict[str, Any]]:
    """One module without weights, and the members' weights stacked: the same as ours."""
    module = _torch_module(problem, torch)
    ours = [np.array(a) for a in jax.tree.leaves(eqx.filter(problem.ensemble().stacked, eqx.is_inexact_array))]
    params = {
        name: torch.from_numpy(a.reshape(problem.num_members, *p.shape))
        for (name, p), a in zip(module.named_parameters(), ours, strict=True)
    }
    return module.to("meta"), params


def _torch_module(problem: Problem, torch: Any) -> Any:
    """The model of one member in torch, its parameters in the order of ours."""
    nn, model = torch.nn, problem.ensemble().stacked
    if isinstance(model, CNN):
        channels = model.layers[0].out_channels
        convolution = lambda inputs, out: (nn.Conv2d(inputs, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        layers = [*convolution(1, channels), *convolution(channels, 2 * channels), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(2 * channels * 7 * 7, 10))
    layers = [
        layer for inputs, out in itertools.pairwise(problem.sizes) for layer in (nn.Linear(inputs, out), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])


def sklearn_bagging(problem: Problem, *, jobs: int = 1) -> Train:
    """scikit-learn's bagging of `MLPRegressor`s, in `jobs` processes of one thread each; it draws its own rows."""
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
            bagging = BaggingRegressor(member, problem.num_members, n_jobs=jobs).fit(problem.x, problem.y)
        return [np.asarray(one.loss_) for one in bagging.estimators_]

    return train
