# SPDX-License-Identifier: Apache-2.0
"""Whether variables that are to be equal on all ranks still are.

A program that treats one rank differently (it assigns a weight there, or
reads a file of another content) makes the ranks train different models, each
well by itself. So the ranks compare 8 bytes of every replicated variable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.checking import state
from tfdist_ext.collectives.collectives import Collectives

_LOG = logging.getLogger("tfdist_ext")
_DIGEST_BYTES = 8
_MOST_LINES = 20
# Bytes of variables that are compared after an epoch: some milliseconds.
_BYTES_OF_AN_EPOCH = 32 << 20
# Elements of a variable for which ranks also say how far they are apart.
_MOST_ELEMENTS = 1 << 22


def compare_replicas(
    variables: Iterable[Any],
    collectives: Collectives,
    when: str,
    epoch: int | None = None,
) -> None:
    """Says which variables differ between the ranks; all ranks must call.

    Tables and slots in parts, metrics and random generators are left out:
    each rank has its own.

    Args:
        variables: of Keras or TensorFlow, the same on all ranks.
        collectives: of the strategy.
        when: for the message.
        epoch: compares those whose turn it is, where they are many; None
            compares all.

    Raises:
        ValueError: on all ranks, where they differ and `check="error"`.
    """
    replicas = _replicas_of(variables)
    if epoch is not None:
        groups = _groups_of(replicas)
        replicas = groups[epoch % len(groups)] if groups else []
    if collectives.check == "off" or not replicas:
        return
    digests = _digests_of_ranks(replicas, collectives)
    differ = [
        i
        for i in range(len(replicas))
        if (digests[:, i] != digests[0, i]).any()
    ]
    new = [i for i in differ if replicas[i][0] not in collectives.drifted]
    if not new:
        return
    lines = [
        f"The ranks have different values {when} of variables that are to be "
        "equal on all of them:",
        *(
            _line(*replicas[i], digests[:, i], collectives)
            for i in new[:_MOST_LINES]
        ),
    ]
    if len(new) > _MOST_LINES:
        lines.append(f"  and {len(new) - _MOST_LINES} more")
    lines.append(
        "Every rank trains its own model from here on. Assign variables on "
        "all ranks alike, from what all ranks know."
    )
    if collectives.check == "error":
        raise ValueError("\n".join(lines))
    collectives.drifted.update(replicas[i][0] for i in new)
    if collectives.group.rank == 0:
        _LOG.warning("%s", "\n".join(lines))


def variables_of(model: Any) -> list[Any]:
    """The variables of a model and its optimizers."""
    return [*model.variables, *state.slots_of(model)]


def _replicas_of(variables: Iterable[Any]) -> list[tuple[str, tf.Variable]]:
    """Names and values of the variables that are equal by design."""
    found: dict[int, tuple[str, tf.Variable]] = {}
    for variable in variables:
        native = keras_internals.value_of(variable)
        name = state.label_of(variable)
        if isinstance(native, internals.MirroredVariable) and not (
            state.is_random(name) or native.dtype == tf.string
        ):
            found.setdefault(id(native), (name, native.values[0]))
    return list(found.values())


def _groups_of(
    replicas: Sequence[tuple[str, tf.Variable]],
) -> list[list[tuple[str, tf.Variable]]]:
    """Variables in groups that are read fast."""
    groups: list[list[tuple[str, tf.Variable]]] = []
    left = 0
    for name, variable in replicas:
        size = (variable.shape.num_elements() or 0) * variable.dtype.size
        if not groups or size > left:
            groups.append([])
            left = _BYTES_OF_AN_EPOCH
        groups[-1].append((name, variable))
        left -= size
    return groups


def _digests_of_ranks(
    replicas: Sequence[tuple[str, tf.Variable]], collectives: Collectives
) -> np.ndarray:
    """A number of 8 bytes for every rank and variable, in one exchange."""
    with tf.device("CPU:0"):
        own = tf.concat([_digest(variable) for _, variable in replicas], axis=0)
    gathered, rows = collectives.all_gather_parts(own, "check/replicas")
    counts = rows.numpy().tolist()
    if len(set(counts)) > 1:
        raise ValueError(
            "The ranks have different numbers of variables: "
            f"{', '.join(map(str, counts))}, by rank. All ranks train one "
            "model: build it alike on each."
        )
    flat = np.ascontiguousarray(gathered.numpy())
    return flat.view(np.uint64).reshape(len(counts), len(replicas))


def _digest(variable: tf.Variable) -> tf.Tensor:
    flat = tf.reshape(variable.read_value(), [1, -1])
    if flat.dtype in (tf.bfloat16, tf.float16):
        flat = tf.bitcast(flat, tf.uint16)
    return tf.fingerprint(flat)


def _line(
    name: str,
    variable: tf.Variable,
    digests: np.ndarray,
    collectives: Collectives,
) -> str:
    groups: dict[int, list[int]] = {}
    for rank, digest in enumerate(digests.tolist()):
        groups.setdefault(digest, []).append(rank)
    largest = max(groups.values(), key=len)
    others = [r for ranks in groups.values() if ranks != largest for r in ranks]
    line = f"  {name} {variable.shape}: ranks {_listed(others)} differ from "
    line += f"ranks {_listed(largest)}"
    elements = variable.shape.num_elements()
    if elements and elements <= _MOST_ELEMENTS:
        line += f", by up to {_apart(variable, collectives):.1e}"
    return line


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (", ..." if len(ranks) > 8 else "")


def _apart(variable: tf.Variable, collectives: Collectives) -> float:
    """Largest distance of an element from the ranks' mean."""
    value = tf.cast(variable.read_value(), tf.float64)
    (total,) = collectives.all_reduce([value], "check/replicas/values")
    mean = total / collectives.group.world_size
    own = tf.reduce_max(tf.abs(value - mean))
    everyone = collectives.all_gather(own[tf.newaxis], "check/replicas/apart")
    return float(np.max(everyone.numpy()))
