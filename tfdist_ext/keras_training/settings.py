# SPDX-License-Identifier: Apache-2.0
"""Ranks that call Keras's loops with different settings are told which.

Another learning rate, loss or number of epochs on one rank would train
wrongly without a word, or hang. So the ranks compare, once per call of
`fit`, `evaluate` and `predict`, what they call it with.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.keras_training import horovod
from tfdist_ext.keras_training import recurrent

keras = tf.keras

_DATA = ("x", "y", "sample_weight", "validation_data")
# What a rank may choose for itself, and what Keras's validation passes on.
_OWN = (
    "self",
    "verbose",
    "callbacks",
    "return_dict",
    "max_queue_size",
    "workers",
    "use_multiprocessing",
    "kwargs",
)
_Policy = tf.data.experimental.AutoShardPolicy


def compare_settings(
    original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    name, strategy = original.__name__, model.distribute_strategy
    collectives = getattr(strategy, "collectives", None)
    if collectives is not None and not kwargs.get(keras_internals.WITHIN_FIT):
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        bound.apply_defaults()
        recurrent.check(model, collectives.group.world_size)
        if name == "fit":
            horovod.check_optimizer(getattr(model, "optimizer", None))
            horovod.check_callbacks(bound.arguments["callbacks"])
        settings = settings_of(model, bound.arguments)
        if name == "fit":
            settings.update(vocabularies_of(model))
        settings["check"] = collectives.check
        compare(collectives, {"method": name, **settings})
    try:
        return original(model, *args, **kwargs)
    except (UnboundLocalError, StopIteration) as error:
        # How Keras 3's `predict`, and tf_keras with a generator, end where
        # there is no batch at all.
        ours = hasattr(strategy, "collectives")
        if not ours or (str(error) and "batch_outputs" not in str(error)):
            raise
        raise ValueError(
            f"`{name}` got no batch: its data is empty."
        ) from error


def compare(collectives: Collectives, settings: Mapping[str, str]) -> None:
    """Raises on all ranks if they do not all give the same settings.

    Args:
        collectives: of the strategy.
        settings: by names.

    Raises:
        ValueError: naming what differs, and its value on every rank.
    """
    own = np.frombuffer(json.dumps(settings).encode() + b"\0", np.uint8)
    gathered = collectives.all_gather(tf.constant(own), "settings")
    texts = gathered.numpy().tobytes().split(b"\0")[:-1]
    if len(set(texts)) == 1:
        return
    ranks = [json.loads(text) for text in texts]
    names = dict.fromkeys(name for each in ranks for name in each)
    lines = [
        f"  {name}: "
        + ", ".join(
            f"{each.get(name, 'none')} (rank {rank})"
            for rank, each in enumerate(ranks)
        )
        for name in names
        if len({each.get(name) for each in ranks}) > 1
    ]
    raise ValueError(
        f"The ranks call `{settings['method']}` with different settings:\n"
        + "\n".join(lines[:20])
        + "\nAll ranks train one model: give them the same settings."
    )


def settings_of(model: Any, arguments: Mapping[str, Any]) -> dict[str, str]:
    """What ranks must have in common, as text.

    Args:
        model: whose method is called.
        arguments: of the method, by names.
    """
    compiled = {
        **keras_internals.compile_config(model),
        "optimizer": getattr(model, "optimizer", None),
    }
    found: dict[str, str] = {}
    for name, value in {**arguments, **compiled}.items():
        if name in _DATA:
            found[name] = _describe_data(value)
        elif name not in _OWN:
            found.update(_flat(name, value))
    if model.built:
        found["trainable variables"] = str(len(model.trainable_variables))
    return found


def vocabularies_of(model: Any) -> dict[str, str]:
    """What the layers that number strings or integers know, as text.

    A vocabulary that comes of a set has another order on every rank.

    Args:
        model: with such layers at any depth, or none.
    """
    found = {}
    for layer in keras_internals.layers_of(model):
        if hasattr(layer, "get_vocabulary"):
            entries = [str(entry) for entry in layer.get_vocabulary()]
            digest = _digest("\0".join(entries).encode())
            found[f"vocabulary of {layer.name}"] = f"{len(entries)} {digest}"
    return found


def _digest(data: bytes) -> str:
    return "#" + hashlib.blake2b(data, digest_size=4).hexdigest()


def _describe_data(value: Any) -> str:
    if isinstance(value, tf.data.Dataset):
        return _describe_dataset(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = getattr(value.dtype, "name", value.dtype)
        return f"{dtype}{list(value.shape)}"
    if isinstance(value, dict):
        items = (f"{k}: {_describe_data(v)}" for k, v in value.items())
        return f"({', '.join(items)})"
    if isinstance(value, tuple | list) and not is_numbers(value):
        return f"({', '.join(map(_describe_data, value))})"
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"


def _describe_dataset(dataset: tf.data.Dataset) -> str:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    own = marks.is_distributed(dataset)
    if own or policy in (_Policy.FILE, _Policy.OFF):
        return "a dataset of the rank's own"
    return str(dataset.element_spec)


def is_numbers(value: Any) -> bool:
    """Whether a list is data, not a list of inputs."""
    return all(isinstance(v, bool | int | float | str | list) for v in value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Names and texts of a setting, and of all that it is made of."""
    if isinstance(value, tf.Variable) or tf.is_tensor(value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0:
        value = value.item()
    if hasattr(value, "get_config") and not inspect.isclass(value):
        yield name, type(value).__name__
        value = _config_of(value)
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _flat(f"{name}[{index}]", part)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)
    elif isinstance(value, np.ndarray):
        yield (
            name,
            f"{value.dtype}{list(value.shape)} {_digest(value.tobytes())}",
        )
    else:
        yield name, getattr(value, "__qualname__", type(value).__name__)


def _config_of(value: Any) -> dict[str, Any]:
    try:
        config = value.get_config()
    except Exception:  # a class of the user's that does not implement it
        return {}
    # Names are numbered by how many objects a rank has made.
    return {key: part for key, part in config.items() if key != "name"}
