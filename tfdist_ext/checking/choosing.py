# SPDX-License-Identifier: Apache-2.0
"""Which models are checked, and what is known of them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.checking.skipping import CannotCheck
from tfdist_ext.checking.state import Held
from tfdist_ext.collectives.collectives import Collectives

keras = tf.keras

# Packages whose layers are known.
_KNOWN = ("keras", "tf_keras", "tensorflow", "tfdist_ext")
_OWN_STEPS = ("train_step", "compute_loss")
_MEMORY_PART = 4
_TOLERANCE = {tf.float32: 1e-4, tf.float16: 5e-3, tf.bfloat16: 4e-2}


def needs_check(model: Any) -> bool:
    """Whether a model has something whose meaning nobody knows.

    A step or loss of the user's, or a layer of the user's with state of its
    own. All ranks find the same.

    Args:
        model: of Keras, built.
    """
    for name in _OWN_STEPS:
        step = getattr(type(model), name)
        # What this package has put around Keras's own is of Keras.
        if _package(getattr(step, "python_function", step)) not in _KNOWN:
            return True
    return any(map(_has_own_state, keras_internals.layers_of(model)))


def _package(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _has_own_state(layer: Any) -> bool:
    if _package(type(layer)) in _KNOWN or isinstance(layer, keras.Model):
        return False
    inner = keras_internals.inner_layers(layer)
    theirs = {id(w) for each in inner for w in each.non_trainable_weights}
    return any(id(w) not in theirs for w in layer.non_trainable_weights)


def unsynchronized(model: Any) -> list[str]:
    """Names of trained layers that normalize by the samples of their rank."""
    kind = keras.layers.BatchNormalization
    return [
        layer.name
        for layer in keras_internals.layers_of(model)
        if isinstance(layer, kind)
        and layer.trainable
        and not getattr(layer, "synchronized", True)
    ]


def tolerance_of(model: Any, collectives: Collectives) -> float:
    """How far numbers may be apart, relative, for the dtypes they have."""
    dtypes = {collectives.gradient_dtype, tf.float32}
    for layer in keras_internals.layers_of(model) if model is not None else ():
        names = (
            getattr(layer, "compute_dtype", None),
            getattr(getattr(layer, "wire", None), "dtype", None),
        )
        dtypes |= {tf.as_dtype(name) for name in names if name}
    return max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def require_memory(
    held: Sequence[Held], collectives: Collectives, how: str
) -> None:
    """Refuses to copy more than a part of the memory that is available.

    Args:
        held: what is to be copied, on this rank.
        collectives: of the strategy; all ranks must call.
        how: to check all the same.

    Raises:
        CannotCheck: on all ranks, if one of them has too little memory.
    """
    bytes_ = sum(each.bytes for each in held)
    fits = bytes_ * _MEMORY_PART <= available_bytes()
    (missing,) = collectives.all_reduce(
        [tf.constant([0 if fits else 1], tf.int32)], "check/memory"
    )
    if int(missing[0]):
        raise CannotCheck(
            f"a copy of its tables and slots ({bytes_ / 2**20:.0f} MiB) "
            f"would take more than a quarter of the free memory. {how}"
        )


def available_bytes() -> int:
    """Bytes of memory that can be used."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 1 << 62
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 1 << 62
