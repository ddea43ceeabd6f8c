import abc
import dataclasses
import functools as ft
import os
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx

from .. import tree
from .._check import check_number, check_positive_int, check_word
from .._ensemble import Ensemble
from .._pytree import PyTree
from . import efficient
from ._protocol import AbstractMethod, Posterior, as_loss, check_maker, load_posterior, train
from .efficient._packed import check_sizes

mean_loss = ft.lru_cache(maxsize=64)(efficient.mean_loss)
"""The same loss for the same arguments, so that calls of `fit` share a program."""


class MakeJoint(eqx.Module):
    """The function that makes one joint ensemble from a key; equal ones are one function."""

    method: "AbstractJointMethod"
    make: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, key: Any) -> Any:
        made = self.make(key)
        model, *state = made if isinstance(made, tuple) else (made,)
        joint = self.method.convert(model, key)
        if not state:
            return joint
        each = state[0] if isinstance(self.method, MIMO) else tree.stack([state[0]] * joint.num_submembers)
        return joint, each


class AbstractJointMethod(AbstractMethod):
    """A method whose members are joint ensembles of sub-members."""

    num_submembers: eqx.AbstractVar[int]
    num_members: eqx.AbstractVar[int]
    rows: eqx.AbstractClassVar[Literal["same", "split", "shuffle"]]

    @abc.abstractmethod
    def convert(self, model: Any, key: Any) -> efficient.JointEnsemble[Any]:
        """Converts one ordinary model."""

    def fit(
        self,
        make: Callable[..., Any] | Ensemble[Any],
        loss: Callable[..., Any] | str,
        optimiser: Any,
        data: PyTree,
        *,
        key: Any,
        **options: Any,
    ) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.fit`][]."""
        repeats = {}
        if isinstance(self, MIMO):
            repeats = {"repetitions": self.repetitions, "same_inputs": self.same_inputs}
        own = mean_loss(as_loss(loss), rows=self.rows, **repeats)
        run, healthy = train(MakeJoint(self, check_maker(make)), self.num_members, own, optimiser, data, options, key)
        return Posterior(healthy.ensemble, healthy.state, run, combine=efficient.as_members)

    def load(self, path: str | os.PathLike[str], make: Callable[..., Any], data: PyTree = None) -> Posterior[Any]:
        """As [`eqx_ensemble.methods.AbstractMethod.load`][]."""
        del data
        return load_posterior(path, MakeJoint(self, check_maker(make)), combine=efficient.as_members)


def check_counts(method: Any) -> None:
    """Raises unless the numbers of sub-members and members are positive integers."""
    check_positive_int(method.num_submembers, "num_submembers")
    check_positive_int(method.num_members, "num_members")


class BatchEnsemble(AbstractJointMethod):
    """BatchEnsemble: sub-members of one model that differ by rank-one factors.

    **Arguments:**

    - `num_submembers`: the number of sub-members of each joint ensemble.
    - `num_members`: the number of independent joint ensembles.
    - `where`, `factors`, `std`: as for [`eqx_ensemble.methods.efficient.batch_ensemble`][].

    ```python
    ee.methods.BatchEnsemble(4, std=0.1)
    ```

    ??? cite
        [Wen et al. 2020](https://arxiv.org/abs/2002.06715)
    """

    num_submembers: int
    _: dataclasses.KW_ONLY
    num_members: int = 1
    where: Any = None
    factors: Literal["normal", "signs", "ones"] = "normal"
    std: float | int = 0.5
    rows: ClassVar[Literal["same", "split", "shuffle"]] = "same"

    def __check_init__(self) -> None:
        check_counts(self)
        check_word(self.factors, "factors", ("normal", "signs", "ones"))
        check_number(self.std, "std", least=0)

    def convert(self, model: Any, key: Any) -> efficient.JointEnsemble[Any]:
        """Converts one ordinary model."""
        options = {"where": self.where, "factors": self.factors, "std": self.std}
        return efficient.batch_ensemble(model, self.num_submembers, key=key, **options)


class TabM(AbstractJointMethod):
    """TabM: rank-one factors, of which only the first are random, and a head of each sub-member.

    **Arguments:**

    - `num_submembers`, `num_members`: as for [`eqx_ensemble.methods.BatchEnsemble`][].
    - `where`, `factors`: as for [`eqx_ensemble.methods.efficient.tabm`][].

    ```python
    ee.methods.TabM(32)
    ```

    ??? cite
        [Gorishniy et al. 2025](https://arxiv.org/abs/2410.24210)
    """

    num_submembers: int = 32
    _: dataclasses.KW_ONLY
    num_members: int = 1
    where: Any = None
    factors: Literal["signs", "normal"] = "signs"
    rows: ClassVar[Literal["same", "split", "shuffle"]] = "same"

    def __check_init__(self) -> None:
        check_counts(self)
        check_word(self.factors, "factors", ("signs", "normal"))

    def convert(self, model: Any, key: Any) -> efficient.JointEnsemble[Any]:
        """Converts one ordinary model."""
        return efficient.tabm(model, self.num_submembers, where=self.where, factors=self.factors, key=key)


class MIMO(AbstractJointMethod):
    """MIMO: one network with several inputs and outputs, trained on different rows each.

    **Arguments:**

    - `num_submembers`, `num_members`: as for [`eqx_ensemble.methods.BatchEnsemble`][].
    - `where`: as for [`eqx_ensemble.methods.efficient.mimo`][].
    - `repetitions`, `same_inputs`: as for [`eqx_ensemble.methods.efficient.mean_loss`][].

    ```python
    ee.methods.MIMO(3, repetitions=4)
    ```

    ??? cite
        [Havasi et al. 2021](https://arxiv.org/abs/2010.06610)
    """

    num_submembers: int = 3
    _: dataclasses.KW_ONLY
    num_members: int = 1
    where: Any = None
    repetitions: int = 1
    same_inputs: float | int = 0.0
    rows: ClassVar[Literal["same", "split", "shuffle"]] = "shuffle"

    def __check_init__(self) -> None:
        check_counts(self)
        check_positive_int(self.repetitions, "repetitions")
        check_number(self.same_inputs, "same_inputs", least=0, most=1)

    def convert(self, model: Any, key: Any) -> efficient.JointEnsemble[Any]:
        """Converts one ordinary model."""
        return efficient.mimo(model, self.num_submembers, where=self.where, key=key)


class Packed(AbstractJointMethod):
    """Packed ensemble: narrow sub-members that together are about as large as one model.

    **Arguments:**

    - `num_submembers`, `num_members`: as for [`eqx_ensemble.methods.BatchEnsemble`][].
    - `alpha`, `gamma`, `where`: as for [`eqx_ensemble.methods.efficient.packed_ensemble`][].

    ```python
    ee.methods.Packed(4, alpha=2.0)
    ```

    ??? cite
        [Laurent et al. 2023](https://arxiv.org/abs/2210.09184)
    """

    num_submembers: int
    _: dataclasses.KW_ONLY
    num_members: int = 1
    alpha: float | int = 2.0
    gamma: int = 1
    where: Any = None
    rows: ClassVar[Literal["same", "split", "shuffle"]] = "same"

    def __check_init__(self) -> None:
        check_counts(self)
        check_sizes(self.alpha, self.gamma)

    def convert(self, model: Any, key: Any) -> efficient.JointEnsemble[Any]:
        """Converts one ordinary model."""
        options = {"alpha": self.alpha, "gamma": self.gamma, "where": self.where}
        return efficient.packed_ensemble(model, self.num_submembers, key=key, **options)


class Masksembles(AbstractJointMethod):
    """Masksembles: each sub-member uses a fixed subset of the hidden features, and a part of each batch.

    **Arguments:**

    - `num_submembers`, `num_members`: as for [`eqx_ensemble.methods.BatchEnsemble`][].
    - `scale`, `where`: as for [`eqx_ensemble.methods.efficient.masksembles`][].

    ```python
    ee.methods.Masksembles(4, scale=2.0)
    ```

    ??? cite
        [Durasov et al. 2021](https://arxiv.org/abs/2012.08334)
    """

    num_submembers: int = 4
    _: dataclasses.KW_ONLY
    num_members: int = 1
    scale: float | int = 2.0
    where: Any = None
    rows: ClassVar[Literal["same", "split", "shuffle"]] = "split"

    def __check_init__(self) -> None:
        check_counts(self)
        check_number(self.scale, "scale", least=1)

    def convert(self, model: Any, key: Any) -> efficient.JointEnsemble[Any]:
        """Converts one ordinary model."""
        return efficient.masksembles(model, self.num_submembers, scale=self.scale, where=self.where, key=key)
