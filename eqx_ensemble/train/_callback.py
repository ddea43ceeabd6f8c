import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, Int8

from .._ensemble import Ensemble
from ._check_callbacks import outdated_message
from ._state import TrainState
from .host._record import History


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Progress:
    """A read-only view of a run, on the host, that [`eqx_ensemble.fit`][] passes to its callbacks.

    **Attributes:**

    - `step`: the number of steps done, including earlier runs that this one continues.
    - `last_step`: the step at which the run ends; `None` if unknown, as for epochs of an iterable.
    - `epoch`: the number of completed epochs of this run.
    - `seconds`: the time since `fit` was called; for a resumed run, including the time of earlier processes.
    - `ids`: `(members,)`, the members' ids.
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    - `loss`: `(members,)`, each member's latest finite training loss; NaN if it has none.
    - `score`: `(members,)`, each member's latest finite validation score; `None` before the first validation.
    - `history`: the curves since the previous call: [`eqx_ensemble.train.History`][]. Concatenated over all calls, they
        are the history of the run.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    rows = []


    def record(progress):
        rows.append((progress.step, progress.loss.mean()))


    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    data = (jnp.ones((64, 3)), jnp.zeros((64, 1)))
    ee.fit(ensemble, loss, optax.sgd(0.1), data, epochs=10, callbacks=record, key=key)
    ```
    """

    step: int
    last_step: int | None
    epoch: int
    seconds: float
    ids: Int[np.ndarray, " members"]
    status: Int8[np.ndarray, " members"]
    loss: Float[np.ndarray, " members"]
    score: Float[np.ndarray, " members"] | None
    history: History
    _snapshots: list[Callable[[], TrainState[Any]]]  # one element; empty once the callback has returned

    def __repr__(self) -> str:
        end = "" if self.last_step is None else f" of {self.last_step}"
        return f"Progress(step {self.step}{end}, epoch {self.epoch}, {self.seconds:.3g} s)"

    @property
    def train_state(self) -> TrainState[Any]:
        """A copy of the training state with the current weights of all members.

        The copy is made on access. With several processes, all of them must access it.

        **Raises:** `RuntimeError` once the callback has returned.
        """
        if not self._snapshots:
            raise RuntimeError(outdated_message())
        return self._snapshots[0]()

    @property
    def ensemble(self) -> Ensemble[Any]:
        """A copy of the ensemble with its current weights, from `train_state`."""
        return self.train_state.ensemble


@runtime_checkable
class Callback(Protocol):
    """A function of one [`eqx_ensemble.train.Progress`][] that [`eqx_ensemble.fit`][] calls between chunks of steps.

    It returns `None` or `False` to continue; `True` to end the run, like Ctrl-C; or booleans `(members,)` to stop these
    members.

    ```python
    def stop_at(threshold):
        return lambda progress: progress.loss < threshold  # (members,): these members stop


    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    data = (jnp.ones((64, 3)), jnp.zeros((64, 1)))
    run = ee.fit(
        ensemble, loss, optax.sgd(0.1), data, epochs=50, callbacks=stop_at(1e-6), callback_every=10, key=key
    )
    run.stopped_at  # (4,), multiples of ten, or -1
    ```
    """

    def __call__(self, progress: Progress, /) -> Any:
        """Inspects the run. Returns whether to end it, or which members to stop."""
        ...
