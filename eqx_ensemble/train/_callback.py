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
    """What a callback of [`eqx_ensemble.fit`][] sees of the run: read-only, on the host.

    **Attributes:**

    - `step`: the number of steps done, those of earlier runs that this one continues included.
    - `last_step`: the step at which the run ends; `None` if that is not known, as for epochs of an iterable.
    - `epoch`: the number of epochs of this run that have ended.
    - `seconds`: since the call of `fit` began; for a resumed run, those of its earlier processes included.
    - `ids`: `(members,)`, the members' ids.
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    - `loss`: `(members,)`, each member's latest finite training loss; NaN if it has none.
    - `score`: `(members,)`, each member's latest finite validation score; `None` before the first validation.
    - `history`: the curves since the previous call: [`eqx_ensemble.train.History`][]. Those of all calls, one after
        another, are the history of the run.

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
    _snapshots: list[Callable[[], TrainState[Any]]]  # one, and none once the callback has returned

    def __repr__(self) -> str:
        end = "" if self.last_step is None else f" of {self.last_step}"
        return f"Progress(step {self.step}{end}, epoch {self.epoch}, {self.seconds:.3g} s)"

    @property
    def train_state(self) -> TrainState[Any]:
        """A copy of the training state, with all members' present weights.

        It is copied when it is read, which has to be before the callback returns. On several processes all of them
        have to read it.
        """
        if not self._snapshots:
            raise RuntimeError(outdated_message())
        return self._snapshots[0]()

    @property
    def ensemble(self) -> Ensemble[Any]:
        """A copy of the ensemble with its present weights, as of `train_state`."""
        return self.train_state.ensemble


@runtime_checkable
class Callback(Protocol):
    """What [`eqx_ensemble.fit`][] calls between chunks of steps: any function of one [`eqx_ensemble.train.Progress`][].

    It returns `None` or `False` to continue; `True` to end the run as Ctrl-C does; or booleans `(members,)` to stop
    these members.

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
        """Looks at the run, and returns whether it ends, or which members stop."""
        ...
