# SPDX-License-Identifier: Apache-2.0
"""Iterators of Python that can return and restore their state."""

from __future__ import annotations

import base64
import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.feeds import Feed
from tfdist_ext.type_names import Nest

_METHODS = ("__next__", "get_state", "set_state")


def has_state(value: Any) -> bool:
    """Whether a value is an iterator that can return and restore its state."""
    return all(hasattr(value, name) for name in _METHODS)


class GeneratorSource:
    """An iterator with a state, whose batches all ranks read.

    Args:
        generator: the iterator.
        output_signature: nest of specs of a batch; None to read it off the
            first batch.

    Raises:
        ValueError: the iterator lacks a method, or has no batch to read the
            specs off.
    """

    kind = "generator"

    def __init__(self, generator: Any, output_signature: Nest) -> None:
        if not has_state(generator):
            missing = [n for n in _METHODS if not hasattr(generator, n)]
            raise ValueError(
                "Argument `generator` of from_generator needs the methods "
                "`__next__`, `get_state` and `set_state`, as iterators of "
                "Grain have them. Write a class with these methods. Received: "
                f"{type(generator).__name__} without {', '.join(missing)}."
            )
        self.generator = generator
        # Iterators of a dataset share the generator.
        self.lock = threading.Lock()
        self._spec = output_signature

    @property
    def spec(self) -> Any:
        """Nest of specs of a batch."""
        if self._spec is None:
            before = self.generator.get_state()
            first = next(self.generator, None)
            self.generator.set_state(before)
            if first is None:
                raise ValueError(
                    "The generator has no batch, which would tell the dtypes "
                    "and shapes. Pass `output_signature`."
                )
            self._spec = tf.nest.map_structure(_spec_of, first)
        return self._spec

    def initial(self) -> Any:
        """The state of the generator."""
        return self.generator.get_state()

    def to_json(self, state: Any) -> Any:
        """A state as JSON values.

        Args:
            state: JSON values, or bytes.
        """
        if isinstance(state, bytes):
            return {"bytes": base64.b64encode(state).decode()}
        return {"state": state}

    def from_json(self, value: Any) -> Any:
        """The state that `to_json` was called with."""
        if "bytes" in value:
            return base64.b64decode(value["bytes"])
        return value["state"]

    def feed(self, stream: Any, batch_size: Any, **_: float) -> Feed:
        """The feed of a stream of this generator.

        Args:
            stream: the `PositionedDataset`.
            batch_size: None, since the generator makes the batches.

        Raises:
            ValueError: `batch_size` is not None.
        """
        if batch_size is not None:
            raise ValueError(
                "The generator makes the batches, so `batches()` of its stream "
                f"takes no size. Received: batch_size={batch_size}"
            )
        return _GeneratorFeed(stream, self)


class _GeneratorFeed(Feed):
    """Batches of a generator.

    Args:
        stream: the `PositionedDataset`.
        source: has the generator.
    """

    def __init__(self, stream: Any, source: GeneratorSource) -> None:
        super().__init__(stream)
        self._source = source

    def _batches(self) -> Iterator[Any]:
        stream, generator = self.stream, self._source.generator
        reading = stream.invited()
        with self._source.lock:
            state = stream.offsets
            generator.set_state(state)
        while True:
            with self._source.lock:
                if reading is not None and not stream.is_current(reading):
                    return
                if reading is None:  # another iterator may have moved it
                    generator.set_state(state)
                try:
                    batch = next(generator)
                except StopIteration:
                    return
                state = generator.get_state()
                if reading is not None:
                    move = functools.partial(stream.move_to, state)
                    reading.to_train.append(move)
            yield batch


def _spec_of(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(value)
    value = np.asarray(value)
    # The number of samples may differ between batches.
    shape = [None, *value.shape[1:]] if value.ndim else []
    is_text = value.dtype.kind in "OSU"
    dtype = tf.string if is_text else tf.as_dtype(value.dtype)
    return tf.TensorSpec(shape, dtype)
