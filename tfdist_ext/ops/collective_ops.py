# SPDX-License-Identifier: Apache-2.0
"""Collectives of a process group as differentiable ops."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdist_ext.ops.checkpoint_ops import Grouped
from tfdist_ext.ops.library import library
from tfdist_ext.type_names import Keywords


class Group(Protocol):
    """The attributes of a process group that the ops need."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def handle(self) -> int: ...


class Ops(Protocol):
    """The exchanges of `collective_ops`, over any transport."""

    def all_to_all(
        self,
        group: Group,
        x: tf.Tensor,
        send_splits: tf.Tensor,
        *,
        tag: int,
        label: str = "",
    ) -> tuple[tf.Tensor, tf.Tensor]: ...

    def all_gather(
        self,
        group: Group,
        x: tf.Tensor,
        *,
        tag: int,
        label: str = "",
    ) -> tuple[tf.Tensor, tf.Tensor]: ...

    def all_reduce(
        self,
        group: Group,
        tensors: Sequence[tf.Tensor],
        *,
        tag: int,
        label: str = "",
        weight: tf.Tensor | float | None = None,
        unweighted: int = 0,
    ) -> list[tf.Tensor]: ...


def all_to_all(
    group: Group,
    x: tf.Tensor,
    send_splits: tf.Tensor,
    *,
    tag: int,
    label: str = "",
    generation: int = -1,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends rows to each rank and receives rows from each rank.

    For example, with two ranks, rank 0 has the rows [a b c] and the splits
    [1, 2], and rank 1 has the rows [d e] and the splits [2, 0]:

        rank 0 gets [a d e], recv_splits [1, 2]
        rank 1 gets [b c],   recv_splits [2, 0]

    Args:
        group: the process group.
        x: `[n, ...]`, uint8, int32, int64 or floating: the rows for rank 0,
            then the rows for rank 1, and so on.
        send_splits: int64 `[world_size]`, the number of rows for each rank.
        tag: an even number that identifies this op.
        label: the label for errors and statistics.
        generation: the only generation of the group in which the op may run,
            for threads beside the program; -1 for any.

    Returns:
        The rows from rank 0, then the rows from rank 1, and so on, `[m, ...]`,
        differentiable with respect to `x`, and the number of rows from each
        rank, int64 `[world_size]`.
    """
    x = tf.convert_to_tensor(x)
    send_splits = tf.cast(send_splits, tf.int64)
    if group.world_size == 1:
        return x, send_splits
    result = library().tfdist_all_to_all(
        input=x,
        send_splits=send_splits,
        generation=generation,
        **_attributes(group, tag, label),
    )
    _run_independently(result.output)
    return result.output, result.recv_splits


def assign_piece(
    group: Group,
    variable: tf.Variable,
    found: Grouped,
    rows: np.ndarray,
    error: str,
    *,
    tag: int,
    label: str = "",
) -> None:
    """Assigns a piece of a table that all ranks have read, without copies.

    Args:
        group: the process group.
        variable: this rank's shard, float32 or bfloat16, in host memory.
        found: what this rank has read.
        rows: int64 `[world_size, 2]`, where the rows go that each rank has
            read: the first row of the variable, and how many rows may be
            assigned from there on.
        error: why this rank could not read its part, or empty.
        tag: an even number that identifies this op.
        label: the label for errors and statistics.

    Raises:
        tf.errors.InvalidArgumentError: a rank has an error. Nothing is
            assigned on any rank.
    """
    library().tfdist_assign_piece(
        variable=variable.handle,
        own=found.own,
        others=found.others,
        splits=found.splits,
        rows=rows,
        error=error,
        **_attributes(group, tag, label),
    )


def all_gather(
    group: Group, x: tf.Tensor, *, tag: int, label: str = ""
) -> tuple[tf.Tensor, tf.Tensor]:
    """Concatenates the rows of all ranks.

    Args:
        group: the process group.
        x: `[n, ...]`; `n` may differ between ranks.
        tag: an even number that identifies this op.
        label: the label for errors and statistics.

    Returns:
        The rows `[sum of n, ...]`, equal on all ranks and differentiable, and
        the number of rows of each rank, int64 `[world_size]`.
    """
    x = tf.convert_to_tensor(x)
    if group.world_size == 1:
        return x, tf.shape(x, tf.int64)[:1]
    result = library().tfdist_all_gather(
        input=x, **_attributes(group, tag, label)
    )
    _run_independently(result.output)
    return result.output, tf.ensure_shape(result.splits, [group.world_size])


def all_reduce(
    group: Group,
    tensors: Sequence[tf.Tensor],
    *,
    tag: int,
    label: str = "",
    weight: tf.Tensor | float | None = None,
    unweighted: int = 0,
) -> list[tf.Tensor]:
    """Sums tensors over the ranks, all in one exchange.

    Args:
        group: the process group.
        tensors: tensors of one dtype (int32, int64 or floating), with equal
            shapes on all ranks.
        tag: an even number that identifies this op.
        label: the label for errors and statistics.
        weight: None for a plain sum. A float32 scalar w gives
            `world_size * sum(w * x) / sum(w)` over the ranks, or zeros if all
            weights are 0. Tensors of a rank with weight 0 are ignored, even
            if they contain NaN.
        unweighted: number of the last tensors that are summed without weights.

    Returns:
        The sums, bitwise equal on all ranks. Plain sums are differentiable.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    if group.world_size == 1:
        weighted = len(tensors) - unweighted
        return [
            _without_weightless(tensor, weight) if i < weighted else tensor
            for i, tensor in enumerate(tensors)
        ]
    outputs: list[tf.Tensor] = library().tfdist_all_reduce(
        inputs=tensors,
        weight=1.0 if weight is None else tf.cast(weight, tf.float32),
        weighted=weight is not None,
        unweighted=unweighted,
        **_attributes(group, tag, label),
    )
    _run_independently(outputs[0])
    return outputs


def broadcast(
    group: Group, x: tf.Tensor, *, root: int = 0, tag: int, label: str = ""
) -> tf.Tensor:
    """Sends the tensor of rank `root` to all ranks.

    Args:
        group: the process group.
        x: the tensor on `root`; on other ranks any tensor of its dtype.
        root: the rank that sends.
        tag: an even number that identifies this op.
        label: the label for errors and statistics.

    Returns:
        The tensor of `root`.
    """
    x = tf.convert_to_tensor(x)
    if group.world_size == 1:
        return x
    output = library().tfdist_broadcast(
        input=x, root=root, **_attributes(group, tag, label)
    )
    _run_independently(output)
    return output


def barrier(group: Group, *, tag: int, label: str = "") -> tf.Operation:
    """Waits until all ranks have called this op.

    Args:
        group: the process group.
        tag: an even number that identifies this op.
        label: the label for errors and statistics.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    if group.world_size == 1:
        return tf.no_op()
    return library().tfdist_barrier(**_attributes(group, tag, label))


def _attributes(group: Group, tag: int, label: str) -> Keywords:
    return {"group": group.handle, "tag": tag, "label": label}


def _run_independently(output: tf.Tensor) -> None:
    """Removes an op from the program order of a function's stateful ops.

    In that order, exchanges would wait for each other, and ranks that trace
    them in different orders would deadlock. The op still always runs.
    """
    if tf.executing_eagerly():
        return
    order = getattr(output.graph, "experimental_acd_manager", None)
    if order is not None:
        order.run_independently(output.op)


# By graph, and by the tag of an op, the name of its last gradient's exchange.
_last_gradients: weakref.WeakKeyDictionary[tf.Graph, dict[int, str]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def after_other_gradients(
    tag: int,
) -> Iterator[Callable[[tf.Tensor], None]]:
    """Orders exchanges of several gradients of one exchange: they share a tag.

    A persistent tape can compute them. Otherwise, a rank could receive one
    gradient of another rank in place of the other one.

    Args:
        tag: tag of the exchange whose gradient is computed.

    Yields:
        A function to be called with an output of the gradient's exchange.
    """
    if tf.executing_eagerly():
        yield lambda _: None
        return
    graph = tf.compat.v1.get_default_graph()
    known = _last_gradients.setdefault(graph, {})
    last = [graph.get_operation_by_name(known[tag])] if tag in known else []

    def note(output: tf.Tensor) -> None:
        known[tag] = output.op.name

    with tf.control_dependencies(last):
        yield note


def _without_weightless(
    tensor: tf.Tensor, weight: tf.Tensor | float | None
) -> tf.Tensor:
    if weight is None:
        return tensor
    counts = tf.cast(weight, tf.float32) > 0
    return tf.where(counts, tensor, tf.zeros_like(tensor))


@tf.RegisterGradient("Tfdist>AllToAll")
def _all_to_all_gradient(
    op: tf.Operation, gradient: tf.Tensor, _: tf.Tensor
) -> list[tf.Tensor | None]:
    # Each row is sent back to the rank that it came from.
    with after_other_gradients(op.get_attr("tag")) as note:
        result = library().tfdist_all_to_all(
            input=gradient,
            send_splits=op.outputs[1],
            **_gradient_attributes(op),
        )
        _run_independently(result.output)
        note(result.output)
    return [tf.reshape(result.output, tf.shape(op.inputs[0])), None]


@tf.RegisterGradient("Tfdist>AllGather")
def _all_gather_gradient(
    op: tf.Operation, gradient: tf.Tensor, _: tf.Tensor
) -> tf.Tensor:
    # Each rank sends back the gradient of every rank's rows. They are summed.
    with after_other_gradients(op.get_attr("tag")) as note:
        result = library().tfdist_all_to_all(
            input=gradient,
            send_splits=op.outputs[1],
            **_gradient_attributes(op),
        )
        _run_independently(result.output)
        note(result.output)
    world_size = tf.size(op.outputs[1])
    shape = tf.concat([[world_size], tf.shape(op.inputs[0])], axis=0)
    return tf.reduce_sum(tf.reshape(result.output, shape), axis=0)


@tf.RegisterGradient("Tfdist>AllReduce")
def _all_reduce_gradient(
    op: tf.Operation, *gradients: tf.Tensor
) -> list[tf.Tensor | None]:
    if op.get_attr("weighted"):
        raise NotImplementedError(
            "A weighted all_reduce has no gradient (op "
            f"{op.get_attr('label')!r}); use a plain sum."
        )
    with after_other_gradients(op.get_attr("tag")) as note:
        sums = library().tfdist_all_reduce(
            inputs=list(gradients), weight=1.0, **_gradient_attributes(op)
        )
        _run_independently(sums[0])
        note(sums[0])
    return [*sums, None]


def _gradient_attributes(op: tf.Operation) -> Keywords:
    label = op.get_attr("label").decode()
    return {
        "group": op.get_attr("group"),
        "tag": op.get_attr("tag") + 1,
        "label": f"{label}/gradient",
    }


tf.no_gradient("Tfdist>Broadcast")
tf.no_gradient("Tfdist>Barrier")


DENSE, SPARSE = 0, -1


def slice_of_rank(
    parts: Sequence[tf.Tensor],
    kinds: Sequence[int],
    rank: int,
    world_size: int,
    rows: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Copies samples of values: those in `rows`, or equally many for each rank.

    Args:
        parts: the tensors of all values, concatenated.
        kinds: the kind of every value. `DENSE` is one tensor `[n, ...]`.
            `SPARSE` is the three tensors of a SparseTensor. k > 0 is the flat
            values of a RaggedTensor and its k row splits, the outermost first.
        rank: the rank whose samples `[rank * n // W, (rank + 1) * n // W)` are
            copied, without `rows`.
        world_size: W.
        rows: int64 `[2]`, the first sample to copy and the one after the last.

    Returns:
        The same tensors of these samples, in new memory. The batch size of a
        dense value is known if its full batch size is known and not 0, and
        `rows` is None.

    Raises:
        tf.errors.InvalidArgumentError: if a tensor has no samples, row splits
            are malformed, parts are not a SparseTensor, or the samples do not
            exist.
    """
    if rows is None:
        rows = tf.zeros([0], tf.int64)
    return list(
        library().tfdist_slice_of_rank(
            parts,
            rows=rows,
            kinds=list(kinds),
            rank=rank,
            world_size=world_size,
        )
    )
