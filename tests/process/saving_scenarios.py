# SPDX-License-Identifier: Apache-2.0
"""The ways to save and restore checkpoints, on two ranks."""

import numpy as np
import tensorflow as tf
from saving_models import Model
from saving_models import filled
from saving_models import state
from saving_models import tables_in
from saving_models import unlike

from tfdist_ext.keras_internals import value_of

keras = tf.keras


def _equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def documented(strategy, folder):
    """The program of docs/checkpoints.md, the optimizer built outside."""
    with strategy.scope():
        model = Model()
    if hasattr(keras, "ops"):
        model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(
        checkpoint, str(folder / "documented"), max_to_keep=3
    )
    expected = state(strategy, filled(strategy, model))
    for _ in range(5):
        manager.save()
    filled(strategy, model, seed=1)
    checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    _equal(state(strategy, model), expected)


def sums(strategy, folder):
    """What is reduced over the ranks when read is saved reduced, at once."""

    def on_read(aggregation, value=0.0):
        return tf.Variable(
            value,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=aggregation,
        )

    def exchanges():
        labels = strategy.statistics()["labels"]
        names = ("reduce", "checkpoint/sums")
        return np.array([labels.get(name, (0, 0))[0] for name in names])

    kinds = tf.VariableAggregation
    with strategy.scope():
        total = on_read(kinds.SUM)
        count = on_read(kinds.SUM, np.int64(0))
        mean = on_read(kinds.MEAN)
        step = tf.Variable(7.0)
    rank = strategy.rank

    def assign(total_value, count_value, mean_value):
        total.assign(total_value)
        count.assign(count_value)
        mean.assign(mean_value)

    strategy.run(assign, args=(rank + 1.0, np.int64(10), float(rank)))
    expected = sum(range(1, strategy.world_size + 1))
    saver = tf.train.Checkpoint(total=total, count=count, mean=mean, step=step)
    before = exchanges()
    path = saver.write(str(folder / "sums"))
    # Sums in one exchange for all of them of a dtype; a mean is read alone.
    assert (exchanges() - before).tolist() == [1, 2]
    strategy.run(assign, args=(0.0, np.int64(0), 0.0))
    saver.read(path).assert_consumed()
    assert total.read_value().numpy() == expected
    assert count.read_value().numpy() == 10 * strategy.world_size
    assert mean.read_value().numpy() == (strategy.world_size - 1) / 2


def metrics(strategy, folder):
    """A model's metric, which tf_keras saves and Keras 3 does not."""
    model = filled(strategy, Model.of(strategy))
    rank = tf.constant(float(strategy.rank))
    strategy.run(lambda: model.tracker.update_state(rank + 1))
    path = str(folder / "metrics")
    model.save_weights(path)
    other = Model.of(strategy)
    other.load_weights(path)
    expected = np.mean(np.arange(strategy.world_size) + 1.0)
    np.testing.assert_allclose(float(other.tracker.result()), expected)


def callbacks(strategy, folder):
    """tf_keras's callbacks with a model that holds a metric."""
    model = Model.of(strategy)
    ids = np.arange(32).reshape(8, 4) % 40
    path = str(folder / "callbacks")
    model.fit(
        tf.data.Dataset.from_tensor_slices((ids, ids[:, :1])).batch(4),
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
            keras.callbacks.BackupAndRestore(str(folder / "backup")),
        ],
    )
    other = Model.of(strategy)
    other.load_weights(path)
    expected = state(strategy, model)
    np.testing.assert_array_equal(
        state(strategy, other)["kernel"], expected["kernel"]
    )


def path_of_rank_0(strategy, folder):
    """Ranks agree though no table is partitioned; local things stay local."""
    with strategy.scope():
        dense = keras.layers.Dense(2)
        dense.build([None, 3])
    saver = tf.train.Checkpoint(dense=dense)
    saver.write(str(folder / f"dense-{strategy.rank}"))
    assert len(list(folder.glob("dense-*.index"))) == 1
    assert not list(folder.glob("*_ranks"))
    saver.read(str(folder / "dense-0")).assert_consumed()
    if strategy.rank == 1:
        step = tf.train.Checkpoint(step=tf.Variable(5))
        path = step.write(str(folder / "alone"))
        step.step.assign(0)
        step.read(path)
        assert int(step.step) == 5


def options(strategy, folder):
    """Every checkpoint option; twice to one path, with other files."""
    model = filled(strategy, Model.of(strategy))
    expected = state(strategy, model)
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    written = []
    every = [
        {"experimental_enable_async_checkpoint": True},
        {"experimental_io_device": "/cpu:0"},
        {
            "experimental_sharding_callback": (
                tf.train.experimental.MaxShardSizePolicy(8)
            )
        },
        {"experimental_write_callbacks": [written.append]},
        {"experimental_write_callbacks": [lambda: written.append("")]},
    ]
    for number, each in enumerate(every):
        given = tf.train.CheckpointOptions(**each)
        path = saver.save(str(folder / "options"), options=given)
        assert path == str(folder / f"options-{number + 1}")
        saver.sync()
        assert tf.train.latest_checkpoint(str(folder)) == path
        tables_in(path, expected)
        unlike(strategy, model, expected)
        saver.restore(path, options=given).assert_consumed()
        _equal(state(strategy, model), expected)
        assert not list(folder.glob("*_ranks"))
        strategy.collectives.barrier("files seen")
    assert written == [str(folder / "options-4"), ""]
    names = [p.name for p in folder.glob("options-3.data*")]
    assert len(names) > 3, names
    without = tf.train.CheckpointOptions(experimental_skip_slot_variables=True)
    saver.restore(path, options=without).expect_partial()
    _equal(state(strategy, model), expected)


def one_path(strategy, folder):
    """A path written again and again holds the last, and nothing else."""
    model = filled(strategy, Model.of(strategy))
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = str(folder / "again")
    for seed in range(3):
        expected = state(strategy, filled(strategy, model, seed))
        saver.write(file_prefix=path)
        files = sorted(p.name for p in folder.glob("again*"))
        count = 2 + seed % 2
        assert files == [
            *(f"again.data-{i:05d}-of-{count:05d}" for i in range(count)),
            "again.index",
        ], files
        strategy.collectives.barrier("files seen")
        tables_in(path, expected)
        unlike(strategy, model, expected)
        saver.read(path).assert_existing_objects_matched()
        _equal(state(strategy, model), expected)


class OneTensorPerFile(tf.train.experimental.ShardingCallback):
    @property
    def description(self):
        return "one tensor per file"

    def __call__(self, tensors):
        return [
            {each.checkpoint_key: {each.slice_spec: each.tensor}}
            for each in tensors
        ]


def one_path_of_small_files(strategy, folder):
    """So does one whose files cannot be made smaller."""
    model = filled(strategy, Model.of(strategy))
    # With its slot the table would make a file of two.
    saver = tf.train.Checkpoint(sparse=model.sparse, dense=model.dense)
    path = str(folder / "again")
    given = tf.train.CheckpointOptions(
        experimental_sharding_callback=OneTensorPerFile()
    )
    counts = []
    for seed in range(3):
        filled(strategy, model, seed)
        expected = _weights(strategy, model)
        saver.write(path, options=given)
        counts.append(len(list(folder.glob("again.data*"))))
        strategy.collectives.barrier("files seen")
        filled(strategy, model, 99)
        saver.read(path, options=given).assert_consumed()
        _equal(_weights(strategy, model), expected)
    assert counts[0] == counts[2] == counts[1] + 1, counts


def _weights(strategy, model):
    layers = (model.sparse, model.dense)
    weights = [weight for layer in layers for weight in layer.weights]
    return {str(i): strategy.gather_table(w) for i, w in enumerate(weights)}


def manager(strategy, folder):
    """Rank 0 decides what is kept, at its times and in its folder."""
    model = filled(strategy, Model.of(strategy))
    with strategy.scope():
        step = tf.Variable(0, dtype=tf.int64)
    saver = tf.train.Checkpoint(model=model, step=step)
    place = folder / "managed"
    begun = []

    def make():
        return tf.train.CheckpointManager(
            saver,
            place,
            max_to_keep=2,
            keep_checkpoint_every_n_hours=1.0,
            step_counter=step,
            checkpoint_interval=2,
            init_fn=lambda: begun.append(True),
        )

    manager = make()
    assert manager.restore_or_initialize() is None
    assert begun == [True]
    # Rank 1's clock says that everything may go.
    if strategy.rank == 0:
        manager._last_preserved_timestamp -= 3601
    for now in range(10):
        step.assign(now)
        assert (manager.save() is None) == (now % 2 == 1)
    strategy.collectives.barrier("saved")
    kept = sorted(p.stem for p in place.glob("*.index"))
    assert kept == ["ckpt-1", "ckpt-4", "ckpt-5"], kept
    assert [path[-1] for path in manager.checkpoints] == ["4", "5"]
    expected = state(strategy, model)
    unlike(strategy, model, expected)
    again = make()
    assert again.restore_or_initialize() == str(place / "ckpt-5")
    assert int(step.numpy()) == 8 and begun == [True]
    np.testing.assert_array_equal(
        state(strategy, model)["kernel"], expected["kernel"]
    )


def refusals(strategy, folder):
    """What cannot be saved rightly is refused, and writes nothing."""
    model = filled(strategy, Model.of(strategy))
    kernel = model.sparse.kernel
    kernel = value_of(kernel)
    saver = tf.train.Checkpoint(model=model)
    path = str(folder / "refused")
    attempts = [
        tf.function(lambda: saver.write(path)),
        lambda: tf.compat.v1.train.Saver([kernel]).save(None, path),
        lambda: tf.compat.v1.train.Saver([kernel]).restore(None, path),
    ]
    for number, attempt in enumerate(attempts):
        try:
            attempt()
        except ValueError as error:
            message = str(error)
            assert "tf.train.Checkpoint" in message or (
                "tf.function" in message
            ), message
        else:
            raise AssertionError(f"attempt {number} was not refused")
    assert not list(folder.glob("refused*.index"))


def iterators(strategy, folder):
    """Every rank goes on at its own place of its own dataset."""
    data = tf.data.Dataset.range(100).shuffle(50, seed=3)
    shared = strategy.experimental_distribute_dataset(data.batch(4))
    with strategy.scope():
        step = tf.Variable(0)
    for number, dataset in enumerate((data, shared)):
        iterator = iter(dataset)
        saver = tf.train.Checkpoint(iterator=iterator, step=step)
        for _ in range(3 + (strategy.rank if dataset is data else 0)):
            next(iterator)
        path = saver.write(str(folder / f"{number}"))
        expected = [next(iterator).numpy().tolist() for _ in range(5)]
        saver.read(path).assert_consumed()
        found = [next(iterator).numpy().tolist() for _ in range(5)]
        assert found == expected, (found, expected)
