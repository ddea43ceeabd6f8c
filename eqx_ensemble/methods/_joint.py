import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, Literal

from .. import tree
from .._check import check_number, check_word
from . import efficient
from ._protocol import AbstractOwnMethod, MakeMember, Posterior, Task, as_loss, check_counts, check_maker
from .efficient._packed import check_sizes

mean_loss = ft.lru_cache(maxsize=64)(efficient.mean_loss)
"""The same loss for the same arguments, so that calls of `fit` share a program."""


def _convert(make: Callable[..., Any], key: Any, conversion: Any, num_submembers: int, *options: Any) -> Any:
    """Makes one joint ensemble, with the state of its sub-members."""
    made = make(key)
    model, *state = made if isinstance(made, tuple) else (made,)
    joint = conversion(model, num_submembers, key=key, **dict(options))
    if not state:
        return joint
    one_pass = conversion is efficient.mimo
    return joint, state[0] if one_pass else tree.stack([state[0]] * num_submembers)


def _template(make: Any, conversion: Any, num_submembers: int, **options: Any) -> tuple[MakeMember, dict[str, Any]]:
    convert = MakeMember(check_maker(make), _convert, (conversion, num_submembers, *options.items()))
    return convert, {"combine": efficient.as_members}


class BatchEnsemble(AbstractOwnMethod):
    """Sub-members of one model that differ by rank-one factors: `batch_ensemble` of every member.

    **Arguments:**

    - `num_submembers`: the number of sub-members of each joint ensemble.
    - `num_members`: the number of independent joint ensembles.
    - `where`, `factors`, `std`: as for [`eqx_ensemble.methods.efficient.batch_ensemble`][].

    ```python
    ee.methods.BatchEnsemble(4, std=0.1)
    ```
    """

    num_submembers: int
    _: dataclasses.KW_ONLY
    num_members: int = 1
    where: Any = None
    factors: Literal["normal", "signs", "ones"] = "normal"
    std: float | int = 0.5

    def __check_init__(self) -> None:
        check_counts(self, "num_submembers")
        check_word(self.factors, "factors", ("normal", "signs", "ones"))
        check_number(self.std, "std", least=0)

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        options = {"where": self.where, "factors": self.factors, "std": self.std}
        return _template(make, efficient.batch_ensemble, self.num_submembers, **options)

    def train(self, task: Task) -> Posterior[Any]:
        return task.posterior(self, loss=mean_loss(as_loss(task.loss)))


class TabM(AbstractOwnMethod):
    """Sub-members with a head each, of whose rank-one factors only the first are random: `tabm` of every member.

    **Arguments:**

    - `num_submembers`, `num_members`: as for [`eqx_ensemble.methods.BatchEnsemble`][].
    - `where`, `factors`: as for [`eqx_ensemble.methods.efficient.tabm`][].

    ```python
    ee.methods.TabM(32)
    ```
    """

    num_submembers: int = 32
    _: dataclasses.KW_ONLY
    num_members: int = 1
    where: Any = None
    factors: Literal["signs", "normal"] = "signs"

    def __check_init__(self) -> None:
        check_counts(self, "num_submembers")
        check_word(self.factors, "factors", ("signs", "normal"))

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        return _template(make, efficient.tabm, self.num_submembers, where=self.where, factors=self.factors)

    def train(self, task: Task) -> Posterior[Any]:
        return task.posterior(self, loss=mean_loss(as_loss(task.loss)))


class MIMO(AbstractOwnMethod):
    """One network with several inputs and outputs, trained on different rows: `mimo` of every member.

    **Arguments:**

    - `num_submembers`, `num_members`: as for [`eqx_ensemble.methods.BatchEnsemble`][].
    - `where`: as for [`eqx_ensemble.methods.efficient.mimo`][].
    - `repetitions`, `same_inputs`: as for [`eqx_ensemble.methods.efficient.mean_loss`][].

    ```python
    ee.methods.MIMO(3, repetitions=4)
    ```
    """

    num_submembers: int = 3
    _: dataclasses.KW_ONLY
    num_members: int = 1
    where: Any = None
    repetitions: int = 1
    same_inputs: float | int = 0.0

    def __check_init__(self) -> None:
        check_counts(self, "num_submembers", "repetitions")
        check_number(self.same_inputs, "same_inputs", least=0, most=1)

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        return _template(make, efficient.mimo, self.num_submembers, where=self.where)

    def train(self, task: Task) -> Posterior[Any]:
        options = {"repetitions": self.repetitions, "same_inputs": self.same_inputs}
        return task.posterior(self, loss=mean_loss(as_loss(task.loss), rows="shuffle", **options))


class Packed(AbstractOwnMethod):
    """Narrow sub-members that together are about as large as one model: `packed_ensemble` of every member.

    **Arguments:**

    - `num_submembers`, `num_members`: as for [`eqx_ensemble.methods.BatchEnsemble`][].
    - `alpha`, `gamma`, `where`: as for [`eqx_ensemble.methods.efficient.packed_ensemble`][].

    ```python
    ee.methods.Packed(4, alpha=2.0)
    ```
    """

    num_submembers: int
    _: dataclasses.KW_ONLY
    num_members: int = 1
    alpha: float | int = 2.0
    gamma: int = 1
    where: Any = None

    def __check_init__(self) -> None:
        check_counts(self, "num_submembers")
        check_sizes(self.alpha, self.gamma)

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        options = {"alpha": self.alpha, "gamma": self.gamma, "where": self.where}
        return _template(make, efficient.packed_ensemble, self.num_submembers, **options)

    def train(self, task: Task) -> Posterior[Any]:
        return task.posterior(self, loss=mean_loss(as_loss(task.loss)))


class Masksembles(AbstractOwnMethod):
    """Sub-members with a fixed subset of the hidden features, and a part of each batch: `masksembles` of every member.

    **Arguments:**

    - `num_submembers`, `num_members`: as for [`eqx_ensemble.methods.BatchEnsemble`][].
    - `scale`, `where`: as for [`eqx_ensemble.methods.efficient.masksembles`][].

    ```python
    ee.methods.Masksembles(4, scale=2.0)
    ```
    """

    num_submembers: int = 4
    _: dataclasses.KW_ONLY
    num_members: int = 1
    scale: float | int = 2.0
    where: Any = None

    def __check_init__(self) -> None:
        check_counts(self, "num_submembers")
        check_number(self.scale, "scale", least=1)

    def template(self, make: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        return _template(make, efficient.masksembles, self.num_submembers, scale=self.scale, where=self.where)

    def train(self, task: Task) -> Posterior[Any]:
        return task.posterior(self, loss=mean_loss(as_loss(task.loss), rows="split"))
