# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's tutorials of several workers, on data of their own.

"Multi-worker training with Keras" and "Custom training loop with Keras and
MultiWorkerMirroredStrategy": every worker saves to a path of its own, and all
but the chief remove theirs. Only the strategy and the data are others.
Arguments: the folder.
"""

import os
import sys

import numpy as np
import tensorflow as tf

import tfdist_ext

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
EPOCHS, STEPS, BATCH = 3, 4, 16


def data(batch):
    rng = np.random.default_rng(0)
    x = rng.random((64, 8, 8)).astype(np.float32)
    y = rng.integers(0, 10, 64)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.shuffle(64, seed=1).repeat().batch(batch)


def build_model():
    return keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def _is_chief(task_type, task_id, cluster_spec):
    return (
        task_type is None
        or task_type == "chief"
        or (
            task_type == "worker"
            and task_id == 0
            and "chief" not in cluster_spec.as_dict()
        )
    )


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id, cluster_spec):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id, cluster_spec):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


def custom_model(strategy):
    """Model, step, data and metric of the second tutorial."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = build_model()

        def dataset_fn(context):
            batch = context.get_per_replica_batch_size(BATCH)
            return data(batch).shard(
                context.num_input_pipelines, context.input_pipeline_id
            )

        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        optimizer = keras.optimizers.RMSprop(learning_rate=0.001)
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(
            name="train_accuracy"
        )

    @tf.function
    def train_step(iterator):
        def step_fn(inputs):
            x, y = inputs
            with tf.GradientTape() as tape:
                predictions = model(x, training=True)
                per_example_loss = keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, reduction="none"
                )(y, predictions)
                loss = tf.nn.compute_average_loss(per_example_loss)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(
                zip(grads, model.trainable_variables, strict=True)
            )
            train_accuracy.update_state(y, predictions)
            return loss

        per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
        return strategy.reduce(
            tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None
        )

    return model, train_step, dataset, train_accuracy


def custom_loop(strategy, folder, task, num_epochs):
    """The second tutorial; returns where it began and the losses."""
    checkpoint_dir = os.path.join(folder, "ckpt")
    model, train_step, dataset, train_accuracy = custom_model(strategy)
    epoch = tf.Variable(tf.constant(0, tf.int64), name="epoch")
    step_in_epoch = tf.Variable(tf.constant(0, tf.int64), name="step_in_epoch")
    checkpoint = tf.train.Checkpoint(
        model=model, epoch=epoch, step_in_epoch=step_in_epoch
    )
    write_checkpoint_dir = write_filepath(checkpoint_dir, *task)
    checkpoint_manager = tf.train.CheckpointManager(
        checkpoint, directory=write_checkpoint_dir, max_to_keep=1
    )
    latest_checkpoint = tf.train.latest_checkpoint(checkpoint_dir)
    if latest_checkpoint:
        checkpoint.restore(latest_checkpoint)
    began, losses = int(epoch.numpy()), []
    while epoch.numpy() < num_epochs:
        iterator = iter(dataset)
        total_loss = 0.0
        while step_in_epoch.numpy() < STEPS:
            total_loss += train_step(iterator)
            step_in_epoch.assign_add(1)
        losses.append(float(total_loss / STEPS))
        assert 0 <= float(train_accuracy.result()) <= 1
        train_accuracy.reset_state()
        epoch.assign_add(1)
        step_in_epoch.assign(0)
        checkpoint_manager.save()
        if not _is_chief(*task):
            tf.io.gfile.rmtree(write_checkpoint_dir)
    return began, losses


def with_keras(strategy, folder, task):
    """The first tutorial; then what is loaded from each worker's own path."""
    ending = ".keras" if KERAS_3 else ""
    model_path = os.path.join(folder, f"keras-model{ending}")
    with strategy.scope():
        model = build_model()
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(learning_rate=0.001),
            metrics=["accuracy"],
        )
    model.fit(data(BATCH), epochs=2, steps_per_epoch=STEPS, verbose=0)
    write_model_path = write_filepath(model_path, *task)
    model.save(write_model_path)
    if not _is_chief(*task):
        tf.io.gfile.rmtree(os.path.dirname(write_model_path))
    loaded_model = keras.models.load_model(model_path)
    same(loaded_model, model)
    loaded_model.fit(data(BATCH), epochs=1, steps_per_epoch=2, verbose=0)
    with strategy.scope():
        same(keras.models.load_model(write_model_path), model)
    checkpoints(model, folder, task)


def checkpoints(model, folder, task):
    """The first tutorial's checkpoints, and weights in a file."""
    checkpoint_dir = os.path.join(folder, "keras-ckpt")
    checkpoint = tf.train.Checkpoint(model=model)
    write_checkpoint_dir = write_filepath(checkpoint_dir, *task)
    checkpoint_manager = tf.train.CheckpointManager(
        checkpoint, directory=write_checkpoint_dir, max_to_keep=1
    )
    checkpoint_manager.save()
    weights = write_filepath(os.path.join(folder, "m.weights.h5"), *task)
    model.save_weights(weights)
    mine = checkpoint_manager.latest_checkpoint
    if not _is_chief(*task):
        tf.io.gfile.rmtree(write_checkpoint_dir)
        tf.io.gfile.rmtree(os.path.dirname(weights))
    before = keras.models.clone_model(model)
    before.set_weights(model.get_weights())
    for restore in (
        lambda: checkpoint.restore(tf.train.latest_checkpoint(checkpoint_dir)),
        lambda: checkpoint.restore(mine),
        lambda: model.load_weights(weights),
    ):
        model.fit(data(BATCH), epochs=1, steps_per_epoch=STEPS, verbose=0)
        restore()
        same(model, before)


def same(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)


def main(folder):
    strategy = tfdist_ext.HybridParallelStrategy()
    resolver = strategy.cluster_resolver
    task = (resolver.task_type, resolver.task_id, resolver.cluster_spec())
    assert custom_loop(strategy, folder, task, EPOCHS)[0] == 0
    began, losses = custom_loop(strategy, folder, task, EPOCHS + 1)
    assert began == EPOCHS and len(losses) == 1
    with_keras(strategy, folder, task)
    strategy.collectives.barrier("done")
    left = sorted(os.listdir(folder))
    assert not [name for name in left if name.startswith("worker")], left


if __name__ == "__main__":
    main(sys.argv[1])
