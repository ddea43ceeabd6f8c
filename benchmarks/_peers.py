"""The same training in other libraries, which may be absent: the caller reports `import` errors."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from _by_hand import Train
from _models import CNN, Block
from _problems import Problem, mean_squared_error


def torch_func(problem: Problem, *, fused: bool, threads: int = 1) -> Train:
    """`torch.func.stack_module_state` and `vmap(grad)`, on a GPU where jax uses one.

    Adam by hand on the stacked parameters, or torch's own fused one: Adam works element by element, so on stacked
    parameters it is every member's own.
    """
    import torch

    torch.set_num_threads(threads)
    device = _torch_device(torch)
    module, first = _torch_members(problem, torch, device)
    x, y = _torch_data(problem, torch, device)

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        loss = _torch_loss(problem, torch, torch.func.functional_call(module, params, (x,)), y)
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


def torch_loop(problem: Problem, *, threads: int = 1) -> Train:
    """A Python loop over members, each with a fused Adam of its own; a member trains for an epoch at a time."""
    import torch

    torch.set_num_threads(threads)
    device = _torch_device(torch)
    _, first = _torch_members(problem, torch, device)
    x, y = _torch_data(problem, torch, device)
    members = [_torch_module(problem, torch, is_mapped=False).to(device) for _ in range(problem.num_members)]

    def train(rows_of_epochs: Iterable[np.ndarray]) -> Any:
        optimisers = []
        for i, member in enumerate(members):
            member.load_state_dict({name: p[i] for name, p in first.items()})
            optimisers.append(torch.optim.Adam(member.parameters(), lr=problem.learning_rate, fused=True))
        losses = []
        for rows in rows_of_epochs:
            steps = torch.from_numpy(rows).to(device).long()
            for i, (member, optimiser) in enumerate(zip(members, optimisers, strict=True)):
                for own in steps[:, i]:
                    loss = _torch_loss(problem, torch, member(x[own]), y[own])
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    losses.append(loss.detach())
        found = np.array([loss.cpu().numpy() for loss in losses])
        return [found.reshape(-1, problem.num_members, problem.steps_per_epoch).swapaxes(1, 2)]

    return train


def _torch_device(torch: Any) -> str:
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def _torch_data(problem: Problem, torch: Any, device: str) -> tuple[Any, Any]:
    x, y = (torch.from_numpy(a).to(device) for a in (problem.x, problem.y))
    return x, y if y.is_floating_point() else y.long()


def _torch_loss(problem: Problem, torch: Any, out: Any, y: Any) -> Any:
    if problem.loss is mean_squared_error:
        return torch.mean((out[:, 0] - y) ** 2)
    return torch.nn.functional.cross_entropy(out, y)


def _torch_members(problem: Problem, torch: Any, device: str) -> tuple[Any, dict[str, Any]]:
    """One module without weights, and the members' weights stacked: the same as ours."""
    module = _torch_module(problem, torch, is_mapped=True)
    ours = [np.array(a) for a in jax.tree.leaves(eqx.filter(problem.ensemble().stacked, eqx.is_inexact_array))]
    params = {
        name: torch.from_numpy(a.reshape(problem.num_members, *p.shape)).to(device)
        for (name, p), a in zip(module.named_parameters(), ours, strict=True)
    }
    return module.to("meta"), params


def _torch_module(problem: Problem, torch: Any, *, is_mapped: bool) -> Any:
    """The model of one member in torch, its parameters in the order of ours."""
    nn, model = torch.nn, problem.ensemble().stacked
    if isinstance(model, CNN):
        channels = model.layers[0].out_channels
        convolution = lambda inputs, out: (nn.Conv2d(inputs, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        layers = [*convolution(1, channels), *convolution(channels, 2 * channels), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(2 * channels * 7 * 7, 10))
    if isinstance(model, Block):
        return _torch_block(torch, model.head.in_features, model.attention.num_heads, is_mapped=is_mapped)
    layers = [layer for inputs, out in problem.layers for layer in (nn.Linear(inputs, out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _torch_block(torch: Any, width: int, num_heads: int, *, is_mapped: bool) -> Any:
    nn = torch.nn

    def attend(query: Any, key: Any, value: Any) -> Any:
        if not is_mapped:  # on a CPU, torch maps its fused attention over members one after another
            return nn.functional.scaled_dot_product_attention(query, key, value)
        return (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value

    class TorchBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
            gelu = nn.GELU(approximate="tanh")
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
            self.head = nn.Linear(width, 10)

        def forward(self, x: Any) -> Any:
            y = self.norms[0](x)
            split = lambda a: a.unflatten(-1, (num_heads, -1)).transpose(-2, -3)
            query, key, value = (split(project(y)) for project in self.projections[:3])
            y = attend(query, key, value)
            x = x + self.projections[3](y.transpose(-2, -3).flatten(-2))
            x = x + self.mlp(self.norms[1](x))
            return self.head(x.mean(-2))

    return TorchBlock()


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
