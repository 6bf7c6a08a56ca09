# SPDX-License-Identifier: Apache-2.0
"""Collectives whose tensors Horovod sends.

Each collective first exchanges a few bytes in this package's own group, under
the same tag. This exchange detects and names ranks that are dead, make another
call, or give up. Horovod gets the tensors only after all ranks have arrived, so
it never waits for a missing rank. Horovod identifies an operation by its name,
which contains the tag.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from types import ModuleType

import tensorflow as tf

from tfdist_ext.ops import collective_ops
from tfdist_ext.ops.collective_ops import Group
from tfdist_ext.type_names import WithGradient

# Horovod sums 16-bit floats in 16 bits or not at all, so sum them as float32.
_SUMMED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}
# Dtypes that Horovod does not support are sent as another dtype of that size.
_SENT_AS = {tf.bfloat16: tf.uint16}


class HorovodOps:
    """The collectives of `collective_ops`, with the same arguments."""

    def __init__(self, hvd: ModuleType) -> None:
        """Takes the module `horovod.tensorflow`, which must be initialized.

        Args:
            hvd: the module.
        """
        self._hvd = hvd
        self._functions: dict[tuple[object, ...], Callable[..., tf.Tensor]] = {}

    def all_to_all(
        self,
        group: Group,
        x: tf.Tensor,
        send_splits: tf.Tensor,
        *,
        tag: int,
        label: str = "",
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends rows to each rank and receives rows from each rank."""

        @tf.custom_gradient
        def exchange(x: tf.Tensor) -> WithGradient:
            output, recv_splits = self._all_to_all(
                group, x, send_splits, tag, label
            )

            def gradient(
                of_output: tf.Tensor, _: tf.Tensor | None = None
            ) -> tf.Tensor:
                # Each row is sent back to the rank that it came from.
                with collective_ops.after_other_gradients(tag) as note:
                    back, _ = self._all_to_all(
                        *(group, of_output, recv_splits),
                        *(tag + 1, f"{label}/gradient"),
                    )
                    note(back)
                return tf.reshape(back, tf.shape(x))

            return (output, recv_splits), gradient

        return exchange(tf.convert_to_tensor(x))

    def all_gather(
        self, group: Group, x: tf.Tensor, *, tag: int, label: str = ""
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Concatenates the rows of all ranks."""

        @tf.custom_gradient
        def exchange(x: tf.Tensor) -> WithGradient:
            rows = tf.shape(x, tf.int64)[:1]
            splits, _ = collective_ops.all_gather(
                group, rows, tag=tag, label=label
            )
            splits = tf.ensure_shape(splits, [group.world_size])
            output = self._named("all_gather", tag, splits, x)

            def gradient(
                of_output: tf.Tensor, _: tf.Tensor | None = None
            ) -> tf.Tensor:
                # Each rank sends back the gradient of every rank's rows.
                with collective_ops.after_other_gradients(tag) as note:
                    back, _ = self._all_to_all(
                        *(group, of_output, splits),
                        *(tag + 1, f"{label}/gradient"),
                    )
                    note(back)
                shape = tf.concat([[group.world_size], tf.shape(x)], axis=0)
                return tf.reduce_sum(tf.reshape(back, shape), axis=0)

            return (output, splits), gradient

        return exchange(tf.convert_to_tensor(x))

    def all_reduce(
        self,
        group: Group,
        tensors: Sequence[tf.Tensor],
        *,
        tag: int,
        label: str = "",
        weight: tf.Tensor | float | None = None,
        unweighted: int = 0,
    ) -> list[tf.Tensor]:
        """Sums tensors over the ranks, or takes their weighted mean."""
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not tensors:
            return []

        @tf.custom_gradient
        def exchange(*parts: tf.Tensor) -> WithGradient:
            sums = self._all_reduce(
                group, parts, tag, label, weight, unweighted
            )

            def gradient(*of_sums: tf.Tensor) -> list[tf.Tensor]:
                if weight is not None:
                    raise NotImplementedError(
                        "A weighted all_reduce has no gradient (op "
                        f"{label!r}); use a plain sum."
                    )
                name = f"{label}/gradient"
                with collective_ops.after_other_gradients(tag) as note:
                    parts = self._all_reduce(
                        group, of_sums, tag + 1, name, None
                    )
                    note(parts[0])
                return parts

            return sums, gradient

        return list(exchange(*tensors))

    def _all_to_all(
        self,
        group: Group,
        x: tf.Tensor,
        send_splits: tf.Tensor,
        tag: int,
        label: str,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        ones = tf.ones([group.world_size], tf.int64)
        # Each rank learns how many rows it will receive from every rank.
        recv_splits, _ = collective_ops.all_to_all(
            group, tf.cast(send_splits, tf.int64), ones, tag=tag, label=label
        )
        recv_splits = tf.ensure_shape(recv_splits, [group.world_size])
        splits = tf.cast(send_splits, tf.int32)
        output = self._named("all_to_all", tag, recv_splits, x, splits)
        return output, recv_splits

    def _all_reduce(
        self,
        group: Group,
        tensors: Sequence[tf.Tensor],
        tag: int,
        label: str,
        weight: tf.Tensor | float | None,
        unweighted: int = 0,
    ) -> list[tf.Tensor]:
        own = tf.cast(1.0 if weight is None else weight, tf.float32)
        weights, _ = collective_ops.all_gather(
            group, tf.reshape(own, [1]), tag=tag, label=label
        )
        parts = [tf.cast(x, _SUMMED_AS.get(x.dtype, x.dtype)) for x in tensors]
        if weight is not None:
            scale = tf.math.divide_no_nan(
                own * group.world_size, tf.reduce_sum(weights)
            )
            # Tensors of a rank with weight 0 may contain NaN.
            for i, part in enumerate(parts[: len(parts) - unweighted]):
                scaled = part * tf.cast(scale, part.dtype)
                parts[i] = tf.where(own > 0, scaled, 0)
        # One operation, because several with an empty tensor may hang.
        flat = [tf.reshape(part, [-1]) for part in parts]
        whole = flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)
        total = self._named("all_reduce", tag, weights, whole)
        sums = tf.split(total, [tf.size(part) for part in parts])
        return [
            tf.ensure_shape(
                tf.cast(tf.reshape(value, tf.shape(tensor)), tensor.dtype),
                tensor.shape,
            )
            for value, tensor in zip(sums, tensors, strict=True)
        ]

    def _named(
        self,
        kind: str,
        tag: int,
        arrived: tf.Tensor,
        x: tf.Tensor,
        *splits: tf.Tensor,
    ) -> tf.Tensor:
        """Runs an operation of Horovod under a name that all ranks share.

        Args:
            kind: the kind of the operation.
            tag: the tag, which is part of its name.
            arrived: see `_after`.
            x: the tensor to send.
            *splits: the splits of x, for "all_to_all".
        """
        kinds: dict[str, Callable[..., tf.Tensor]] = {
            "all_to_all": self._send_rows,
            "all_gather": self._gather,
            "all_reduce": self._sum,
        }
        call = kinds[kind]

        def operation(x: tf.Tensor, *splits: tf.Tensor) -> tf.Tensor:
            return call(f"tfdist_{kind}_{tag}", x, *splits)

        # Nothing may be computed from `x` between this and the operation.
        arguments = (_after(arrived, x), *splits)
        if not tf.executing_eagerly():
            return operation(*arguments)
        # Eagerly, all operations of a kind would have the same name. The number
        # of rows may differ between calls.
        specs = tuple(
            tf.TensorSpec([None, *each.shape[1:]], each.dtype)
            for each in arguments
        )
        key = (kind, tag, specs)
        if key not in self._functions:
            self._functions[key] = tf.function(
                operation, input_signature=specs, autograph=False
            )
        return self._functions[key](*arguments)

    def _send_rows(
        self, name: str, x: tf.Tensor, splits: tf.Tensor
    ) -> tf.Tensor:
        output, _ = self._hvd.alltoall(
            _disguised(x), splits, name=name, ignore_name_scope=True
        )
        return _restored(output, x)

    def _gather(self, name: str, x: tf.Tensor) -> tf.Tensor:
        output = self._hvd.allgather(
            _disguised(x), name=name, ignore_name_scope=True
        )
        return _restored(output, x)

    def _sum(self, name: str, x: tf.Tensor) -> tf.Tensor:
        return self._hvd.allreduce(
            x, name=name, op=self._hvd.Sum, ignore_name_scope=True
        )


def _disguised(x: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(x, _SENT_AS[x.dtype]) if x.dtype in _SENT_AS else x


def _restored(output: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns the received rows in the dtype of `x`."""
    if x.dtype in _SENT_AS:
        output = tf.bitcast(output, x.dtype)
    return tf.ensure_shape(output, [None, *x.shape[1:]])


def _after(arrived: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns `x`, which is available only after all ranks have arrived.

    TensorFlow treats Horovod's operations as pure computation. It would run an
    operation on constants during graph optimization, despite control
    dependencies. Therefore `x` is sliced from a row that is computed from the
    exchanged values, and that is always 0.

    Args:
        arrived: `[world_size]`, nonnegative values of an exchange of the group.
        x: any tensor.
    """
    if x.shape.rank == 0:
        return tf.reshape(_after(arrived, x[None]), [])
    first = tf.minimum(tf.cast(arrived[0], tf.int32), 0)
    begin = first * tf.constant([1] + [0] * (x.shape.rank - 1))
    return tf.ensure_shape(tf.slice(x, begin, [-1] * x.shape.rank), x.shape)
