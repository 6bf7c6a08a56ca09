# SPDX-License-Identifier: Apache-2.0
"""Compares what Keras and TensorFlow are before and after.

Usage: hooks_program.py imports|life|stages

`imports` imports all modules of the package, `life` trains a model with a
strategy and closes it, `stages` checks that no call goes through a stage twice.
"""

import gc
import importlib
import pathlib
import pkgutil
import sys
import types

import numpy as np
import tensorflow as tf

keras = tf.keras
ROOTS = ("keras", "tf_keras", "tensorflow")
PACKAGE = str(pathlib.Path(__file__).parents[1] / "tfdist_ext")
FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    staticmethod,
    classmethod,
    property,
    type,
)


def is_of(name):
    return str(name).partition(".")[0] in ROOTS


def attributes():
    """All functions, classes and descriptors, by owner and name."""
    found = {}
    for module in list(sys.modules.values()):
        if module is None or not is_of(getattr(module, "__name__", "")):
            continue
        owners = [module]
        owners += [
            each
            for each in vars(module).values()
            if isinstance(each, type) and is_of(each.__module__)
        ]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                if isinstance(value, FUNCTIONS):
                    found[id(owner), name] = owner, value
    return found


def is_ours(value):
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(PACKAGE)


def changes(before):
    """What is another value now, or a function of this package."""
    after = attributes()
    return [
        f"{owner.__name__}.{key[1]}"
        for key, (owner, value) in after.items()
        if is_ours(value) or (key in before and before[key][1] is not value)
    ] + [
        f"{owner.__name__}.{key[1]} is missing"
        for key, (owner, _) in before.items()
        if key not in after
    ]


def import_all():
    for module in pkgutil.walk_packages(tfdist_ext.__path__, "tfdist_ext."):
        if "_tfdist_ops" not in module.name:  # the library
            importlib.import_module(module.name)


def live():
    """Trains, saves and closes; says what was replaced meanwhile."""
    keras.utils.set_random_seed(1)
    strategy = tfdist_ext.HybridParallelStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                tfdist_ext.layers.FullSparse(4, 100, sharding="row"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(
            tfdist_ext.optimizers.Adagrad(0.1), "mse", metrics=["mae"]
        )
    ids = np.arange(48).reshape(16, 3)
    data = tf.data.Dataset.from_tensor_slices((ids, np.ones([16, 1])))
    model.fit(data.batch(8), verbose=0)
    model.predict(data.batch(8), verbose=0)
    during = changes(BEFORE)
    strategy.close()
    return during


def check_stages():
    """An inherited method may have hooks in the class and in its base."""
    from tfdist_ext.hooks import table

    hooks = table.table()
    for hook in hooks:
        cls = hook.owner
        if not isinstance(cls, type) or hook.name in vars(cls):
            continue
        base = next((b for b in cls.__mro__ if hook.name in vars(b)), None)
        for other in hooks:
            covered = other.owner is base
            if other.subclasses and base is not None:
                covered = issubclass(base, other.owner)
                covered = covered and other.subclasses(base)
            if covered and other.name == hook.name:
                stages = {each.call for each in hook.stages}
                twice = stages.intersection(s.call for s in other.stages)
                assert not twice, (cls, hook.name, base, twice)


# What Keras imports later is imported now.
for module in ("callbacks", "layers", "losses", "metrics", "optimizers"):
    vars(getattr(keras, module))
BEFORE = attributes()
import tfdist_ext  # noqa: E402

if sys.argv[1] == "imports":
    import_all()
elif sys.argv[1] == "stages":
    check_stages()
else:
    during = live()
    for name in ("fit", "compile", "__call__"):
        assert any(each.endswith(f".{name}") for each in during), during
keras.backend.clear_session()
gc.collect()
left = changes(BEFORE)
assert not left, left
