"""The programs that train, and the blocks of members on which they run."""

import functools as ft
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._cores import num_cores, thread_pool
from .._ensemble import axes_of
from .._keys import tag
from .._leaves import is_key
from .._map import is_per_member, view
from .._marks import Each
from .._mesh import pad_members, replicate, shard_members
from .._pytree import PyTree
from ..distributed import to_host
from ..plan import Blocks
from ._meeting import MEMBERS, check_alike
from ._member import Curves, Task, end_part, flags_of, take_step, train
from ._state import Pieces, Status, Trained, TrainState, pieces_of, trained_of

_own = eqx.if_array(0)


def axes_of_inputs(inputs: PyTree) -> PyTree:
    """The axes of members in data and options, which only marked ones have."""
    none = lambda x: jax.tree.map(lambda _: None, x)
    return jax.tree.map(lambda x: axes_of(x) if is_per_member(x) else none(x), inputs, is_leaf=is_per_member)


def axes_of_batch(task: Task, batch: PyTree) -> PyTree:
    """The axes of members in a batch, which has none if their loss is one."""
    if task.joint:
        check_alike({"batch": batch})
    return axes_of_inputs(batch)


@eqx.filter_jit(donate="all-except-first")
def train_block(read: tuple, moving: PyTree, common: PyTree) -> tuple[PyTree, PyTree, Curves]:
    """Trains the members of a block for some parts of epochs: `train` of one member, mapped over members."""
    task, rest, inputs, clock = read
    member = eqx.filter_vmap(
        ft.partial(train, task=task),
        in_axes=(_own, None, None, axes_of_inputs(inputs), None),
        out_axes=(_own, None, _own),
        axis_name=MEMBERS,
    )
    return member(moving, common, rest, inputs, clock)


@eqx.filter_jit
def copy_of(tree: PyTree) -> PyTree:
    """The arrays of a tree in memory of their own."""
    return jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, tree)


# Batches of an iterable: one program for a step, and one for the end of an epoch or of a part.

_TRAINED = Trained(_own, _own, _own, None, None)


@eqx.filter_jit
def begin_part(read: Pieces) -> Trained:
    """What the steps of a part change, in memory of its own."""
    moving, common, rest = read
    own = lambda moving: trained_of(eqx.combine(moving, common, rest))
    return copy_of(eqx.filter_vmap(own, out_axes=_TRAINED)(moving))


@eqx.filter_jit(donate="all-except-first")
def step_block(read: tuple, now: Trained) -> tuple[Trained, tuple[Any, Any]]:
    """One step of the members of a block on a batch, `index` steps after the part's begin."""
    task, (moving, common, rest), batch, index = read

    def one_step(now: Trained, moving: PyTree, batch: PyTree) -> tuple:
        state = eqx.combine(moving, common, rest)
        key = jax.random.fold_in(jax.random.fold_in(state.keys, tag("loss")), state.step + index)
        return take_step(task, now, state, jax.tree.map(view, batch, is_leaf=is_per_member), key)

    axes = (_TRAINED, _own, axes_of_batch(task, batch))
    return eqx.filter_vmap(one_step, in_axes=axes, out_axes=(_TRAINED, _own), axis_name=MEMBERS)(now, moving, batch)


@eqx.filter_jit
def end_block(read: tuple, now: Trained, losses: Any) -> tuple[PyTree, PyTree]:
    """The members of a block at the end of a part of `count` steps with these losses `(members, steps)`."""
    task, (moving, common, rest), inputs, count, ends = read

    def end(now: Trained, moving: PyTree, losses: Any, inputs: PyTree) -> tuple[PyTree, PyTree]:
        inputs = jax.tree.map(view, inputs, is_leaf=is_per_member)
        after = end_part(task, eqx.combine(moving, common, rest), now, losses, count, ends, inputs)
        return eqx.filter(after, flags_of(moving)), eqx.filter(after, flags_of(common))

    axes = (_TRAINED, _own, _own, axes_of_inputs(inputs))
    return eqx.filter_vmap(end, in_axes=axes, out_axes=(_own, None), axis_name=MEMBERS)(now, moving, losses, inputs)


class Block(NamedTuple):
    """Members that run together: their positions, their arrays, and their parts of what is marked in the inputs.

    The last block is filled with copies that do not train, so that all have one size and one program.
    """

    members: np.ndarray
    padded: np.ndarray | None
    moving: PyTree
    inputs: PyTree

    def cut(self, tree: PyTree) -> PyTree:
        """The block's part of what is marked `Each`."""
        if (index := self.padded) is None:
            return tree
        is_each = lambda x: isinstance(x, Each)
        own = lambda x: Each(jax.tree.map(lambda x: _rows(x, index), x.value)) if is_each(x) else x
        return jax.tree.map(own, tree, is_leaf=is_each)


def _host(x: Any) -> Any:
    return x if is_key(x) else np.asarray(x)


def _rows(x: Any, index: np.ndarray) -> Any:
    """Some members of an array, on the host: compiled slices would take half a second of the first call."""
    if is_key(x):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(jax.random.key_data(x))[index]), impl=jax.random.key_impl(x)
        )
    return np.asarray(x)[index]


_seen: set[Any] = set()  # programs that were called before


class Crew:
    """The blocks of a run: on a CPU several on threads, and elsewhere one.

    **Attributes:**

    - `blocks`: those with members that train. Others are only in `whole`, the arrays of all members.
    """

    def __init__(self, state: TrainState, inputs: dict, task: Task, plan: Any, mesh: Mesh | None) -> None:
        self.mesh, self.num_members = mesh, state.num_members
        self.cores, self.size = 1, state.num_members
        if isinstance(plan, Blocks) and mesh is None and not task.meets:
            changed = (state.params, state.params, state.opt_state)  # the gradients are like the weights
            self.size = plan.size_for(changed, task.bytes_of_step)
            self.cores = plan.cores or num_cores()
        self.on_host = self.size != self.num_members
        self.program = task, self.size, tuple(x.shape for x in jax.tree.leaves(inputs) if eqx.is_array(x))
        self.pool = thread_pool(max(min(self.cores, -(-self.num_members // self.size)), 1))
        self.load(state, inputs)

    def load(self, state: TrainState, inputs: dict | None = None) -> None:
        """Takes in a state, such as that of a callback, and divides its members into blocks."""
        self.whole, self.common, self.rest = pieces_of(state)
        self.inputs = self.inputs if inputs is None else inputs
        if self.mesh is not None:
            self._put_on_mesh()
        if self.on_host:
            self.whole = jax.tree.map(_host, self.whole)
        else:  # the arrays of the caller's state must not be donated
            self.whole, self.common = copy_of((self.whole, self.common))
        self.status = np.array(to_host(state.status))
        self.divide()

    def _put_on_mesh(self) -> None:
        """Puts members on their devices, padded to a multiple of their number by copies that do not train."""
        mesh: Any = self.mesh
        pad = lambda tree: pad_members(tree, self.num_members, mesh)
        self.whole = pad(self.whole)
        width = self.whole.status.shape[0]
        if width > self.num_members:
            idle = jnp.where(np.arange(width) < self.num_members, self.whole.status, jnp.int8(Status.STOPPED))
            self.whole = eqx.tree_at(lambda s: s.status, self.whole, idle)
        self.inputs = self.on_mesh(self.inputs)
        self.whole = shard_members(self.whole, mesh)
        self.common, self.rest = replicate((self.common, self.rest), mesh)

    def on_mesh(self, tree: PyTree) -> PyTree:
        """What is marked `Each` on the devices of its members, filled like them, and all else on every device."""
        mesh, is_each = self.mesh, lambda x: isinstance(x, Each)
        if mesh is None:
            return tree
        each = lambda x: Each(shard_members(pad_members(x.value, self.num_members, mesh), mesh))
        own = lambda x: each(x) if is_each(x) else replicate(x, mesh)
        return jax.tree.map(own, tree, is_leaf=is_each)

    def divide(self) -> None:
        """Divides the members that train into blocks of one size. When some have stopped, there are fewer blocks."""
        if not self.on_host:
            self.blocks = [Block(np.arange(self.num_members), None, self.whole, self.inputs)]
            return
        training = np.flatnonzero(self.status == Status.OK)
        self.blocks = []
        for first in range(0, len(training), self.size):
            members = training[first : first + self.size]
            padded = np.concatenate([members, np.full(self.size - len(members), members[0])])
            moving = jax.tree.map(lambda x, padded=padded: _rows(x, padded), self.whole)
            moving.status[len(members) :] = Status.STOPPED
            block = Block(members, padded, moving, None)
            self.blocks.append(block._replace(inputs=block.cut(self.inputs)))

    @property
    def trains(self) -> bool:
        """Whether any member trains."""
        return bool((self.status == Status.OK).any())

    @property
    def is_lost(self) -> bool:
        """Whether an error of a program, such as one of the loss on the device, took the arrays with it."""
        return any(
            x.is_deleted() for x in jax.tree.leaves([block.moving for block in self.blocks]) if isinstance(x, jax.Array)
        )

    def call(self, fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The results of a program for each item, on the threads.

        The first call of a program runs alone: two threads would compile it twice.
        """
        program = getattr(fn, "func", fn).__code__, self.program
        alone = 0 if program in _seen else 1
        _seen.add(program)
        results = []
        with warnings.catch_warnings():  # programs that donate change its filters, which is not safe on threads
            for some in (items[:alone], items[alone:]):
                results += [future.result() for future in [self.pool.submit(fn, item) for item in some]]
        return jax.block_until_ready(results)

    def update(self, results: list[tuple[PyTree, PyTree]]) -> None:
        """Takes in the arrays of the blocks after a call, and those which all members train together."""
        self.blocks = [block._replace(moving=moving) for block, (moving, _) in zip(self.blocks, results, strict=True)]
        self.common = results[0][1]
        for block in self.blocks:
            self.status[block.members] = to_host(block.moving.status)[: len(block.members)]

    def pack(self) -> None:
        """Packs the members that still train into fewer blocks, if they fit."""
        training = int((self.status == Status.OK).sum())
        if self.on_host and -(-training // self.size) < len(self.blocks):
            self.store()
            self.divide()

    def store(self) -> None:
        """Copies the blocks' arrays into those of all members."""
        if not self.on_host:
            self.whole = self.blocks[0].moving
            return
        for block in self.blocks:
            put_rows = lambda all, x, to=block.members: _put_rows(all, x, to)
            self.whole = jax.tree.map(put_rows, self.whole, block.moving)

    def state(self) -> TrainState:
        """The state of all members, in memory of its own."""
        self.store()
        whole = self.whole
        if self.mesh is not None and whole.status.shape[0] != self.num_members:
            whole = jax.tree.map(lambda x: x[: self.num_members], whole)
        copy = lambda x: jnp.asarray(np.array(x)) if eqx.is_array(x) and not is_key(x) else x
        if self.on_host:
            whole, common = jax.tree.map(copy, whole), self.common
        else:  # which the next call would donate
            whole, common = copy_of((whole, self.common))
        return eqx.combine(whole, common, self.rest)

    def close(self) -> None:
        """Ends the threads."""
        self.pool.shutdown()


def _put_rows(all: Any, x: Any, members: np.ndarray) -> Any:
    if is_key(all):
        words = np.array(jax.random.key_data(all))
        words[members] = np.asarray(jax.random.key_data(x))[: len(members)]
        return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(all))
    all = all if all.flags.writeable else all.copy()
    all[members] = np.asarray(x)[: len(members)]
    return all
