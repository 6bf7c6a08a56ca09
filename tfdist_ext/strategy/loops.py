# SPDX-License-Identifier: Apache-2.0
"""Keras's loops: their start, their settings, and what ranks do in them."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.collectives import Loop
from tfdist_ext.comm.exchanges import sum_over_ranks
from tfdist_ext.strategy import refused

keras = tf.keras
Nest = Any

# Of arrays, if `fit` is not told.
_BATCH_OF_KERAS = 32

Find = Callable[[Any], Sequence[Any]]
Place = Callable[[Any, Collectives], None]


def place_first(find: Find, place: Place) -> Callable[..., Any]:
    """A stage of Keras's loops that places the tables of a model.

    Args:
        find: the layers of a model that have tables, built or not.
        place: moves what can be moved of the tables of a model; all ranks
            call it.
    """

    def stage(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = getattr(self.distribute_strategy, "collectives", None)
        if collectives is None or collectives.loop is not None:
            return original(self, *args, **kwargs)
        layers = find(self)
        if not layers:
            return original(self, *args, **kwargs)
        given = inspect.signature(original).bind(self, *args, **kwargs)
        x, batch_size = map(given.arguments.get, ("x", "batch_size"))
        samples = samples_of(x, batch_size, collectives.group.world_size)
        collectives.loop = Loop(self, _agreed(samples, collectives))
        try:
            with self.distribute_strategy.scope():
                if not all(layer.built for layer in layers):
                    _build(self, x, collectives)
                place(self, collectives)
            return original(self, *args, **kwargs)
        finally:
            collectives.loop = None

    return stage


def place_built(place: Place) -> Callable[..., Any]:
    """A stage of `Optimizer.build`: all layers are built before slots are."""

    def stage(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = collectives_lib.active()
        loop = collectives.loop if collectives else None
        if collectives is not None and loop is not None and not self.built:
            with tf.init_scope():
                place(loop.model, collectives)
        return original(self, *args, **kwargs)

    return stage


def samples_of(x: Any, batch_size: int | None, world_size: int) -> int:
    """Samples of a rank in a step, 0 if nothing tells.

    Args:
        x: what `fit` is given: a dataset, of global batches or distributed,
            arrays, or a generator, of which nothing is known.
        batch_size: of arrays, of all ranks; None for Keras's default.
        world_size: number of ranks.
    """
    if marks.is_distributed(x):
        return marks.samples_of(x)
    if isinstance(x, tf.data.Dataset):
        return max(0, -(-internals.batch_size_of(x) // world_size))
    leaves = tf.nest.flatten(x)
    if x is None or not all(hasattr(leaf, "shape") for leaf in leaves):
        return 0
    rows = [int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)]
    batch = min([batch_size or _BATCH_OF_KERAS, *rows])
    return -(-batch // world_size)


def _agreed(samples: int, collectives: Collectives) -> int | None:
    """The most that a rank knows of, None if no rank knows."""
    everyone = collectives.all_gather(
        tf.constant([samples], tf.int64), "samples of a step"
    )
    return int(np.max(everyone.numpy())) or None


def _build(model: Any, x: Any, collectives: Collectives) -> None:
    """Builds a model of tf_keras in a graph that is never run.

    It would build its layers while it traces its first step, where tables
    cannot be moved any more. Keras 3 does as much by itself.
    """
    inputs = _specs_of(x)
    if keras_internals.KERAS_3 or inputs is None:
        return
    strategy = model.distribute_strategy

    def call(values: Nest) -> Nest:
        # A step of the model's own may call it with less.
        with keras_internals.forgetting_inputs(model):
            return model(values, training=False)

    # Under this name layers know that it is never run, and it is no step.
    def scratch_graph(values: Nest) -> Nest:
        return tf.distribute.Strategy.run(strategy, call, args=(values,))

    try:
        tf.function(scratch_graph, autograph=False).get_concrete_function(
            inputs
        )
    except Exception as error:
        # A model that needs more than that is built by its first step, which
        # says better what is wrong. All ranks do the same.
        collectives.give_up("building the model", error)


def _specs_of(x: Any) -> Nest | None:
    """What a model is called with, None if nothing tells."""
    if isinstance(x, tf.data.Dataset):
        spec = x.element_spec
        if isinstance(spec, tuple):
            spec = keras.utils.unpack_x_y_sample_weight(spec)[0]
        return tf.nest.map_structure(_of_any_batch, spec)
    leaves = tf.nest.flatten(x)
    if x is None or not all(hasattr(leaf, "shape") for leaf in leaves):
        return None
    specs = [_spec_of(leaf) for leaf in leaves]
    if None in specs:
        return None
    return tf.nest.pack_sequence_as(x, [_of_any_batch(each) for each in specs])


def _spec_of(value: Any) -> Any:
    """A type of TensorFlow, without reading what may lie on a disk."""
    if isinstance(value, tf.Tensor | tf.__internal__.CompositeTensor):
        return tf.type_spec_from_value(value)
    try:
        return tf.TensorSpec(value.shape, value.dtype)
    except (AttributeError, TypeError):  # a table of pandas, say
        return None


def _of_any_batch(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def on_all_ranks(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    collectives = collectives_of(model)
    if collectives is None:
        return original(model, *args, **kwargs)
    name = original.__name__
    if name in ("fit", "train_on_batch"):
        _warn_of_eager_steps(model)
    # Nobody goes on from a loop that has failed elsewhere; a batch is too
    # short for that.
    loop = name in keras_internals.LOOPS
    with collectives.together(name, all_end=loop, own_first=True):
        return original(model, *args, **kwargs)


def _warn_of_eager_steps(model: Any) -> None:
    """Says what `whole_batch` cannot tell of a step that has no graph."""
    own = type(model).train_step is not keras.Model.train_step
    if own and model.run_eagerly:
        warnings.warn(
            "With run_eagerly=True ranks cannot tell a sum over the samples "
            "from a mean. A loss that `train_step` sums by hand would train "
            "with too small gradients: use means (tf.reduce_mean, a loss of "
            "Keras), or leave run_eagerly off.",
            stacklevel=4,
        )


def build_on_all_ranks(
    original: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Lets an optimizer be built once all ranks have come to it.

    Keras marks it as built before it has made its slots. Had another rank
    failed before, they would be missing for ever.
    """
    collectives = collectives_lib.active()
    if collectives is not None and not keras_internals.is_built(optimizer):
        with tf.init_scope():
            collectives.barrier("optimizer/build")
    return original(optimizer, *args, **kwargs)


def finite_on_all_ranks(original: Any, optimizer: Any, grads: Any) -> Any:
    """Lets ranks agree whether Keras 3's loss scale skips a step.

    Keras asks before the gradients are summed, so that one rank's may be
    infinite alone.
    """
    finite = original(optimizer, grads)
    return sum_over_ranks(
        tf.cast(tf.logical_not(finite), tf.float32), "gradients/finite"
    ) == tf.constant(0.0)


def average_of_rows(
    original: Any, optimizer: Any, variables: Sequence[Any]
) -> None:
    """Lets Keras 3 average the tables of which this rank has no rows.

    Its `ops.add` takes a tensor without rows for a bias, and fails.
    """
    if not optimizer.use_ema or collectives_lib.active() is None:
        return original(optimizer, variables)
    averages = keras_internals.averages_of(optimizer)
    pairs = zip(variables, averages, strict=True)
    kept = [pair for pair in pairs if 0 not in pair[0].shape]
    state = keras_internals.averages_state(
        optimizer, [average for _, average in kept]
    )
    # Their values: a part of a table is refused where it stands for all.
    read = [keras_internals.value_of(v).read_value() for v, _ in kept]
    return original(state, read)


def collectives_of(model: Any) -> Collectives | None:
    """Those of the strategy of a model; None with a single process."""
    return getattr(model.distribute_strategy, "collectives", None)


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
        refused.check_recurrent(model, collectives.group.world_size)
        if name == "fit":
            refused.check_optimizer(getattr(model, "optimizer", None))
            refused.check_callbacks(bound.arguments["callbacks"])
        settings = settings_of(model, bound.arguments)
        if name == "fit":
            settings.update(vocabularies_of(model))
        settings["check"] = collectives.check
        compare_texts(collectives, {"method": name, **settings})
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


def compare_texts(
    collectives: Collectives, settings: Mapping[str, str]
) -> None:
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
