# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's own handler: one rank is told to end, all save and end.

Usage: preemption_program.py FOLDER
"""

import os
import signal
import sys

import tensorflow as tf

import tfdist_ext


def main():
    (folder,) = sys.argv[1:]
    strategy = tfdist_ext.HybridParallelStrategy()
    with strategy.scope():
        steps = tf.Variable(0, dtype=tf.int64)
    ended = []

    def leave():
        ended.append(int(steps.numpy()))
        raise SystemExit(0)

    handler = tf.distribute.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        tf.train.Checkpoint(steps=steps),
        os.path.join(folder, "checkpoints"),
        tf.distribute.experimental.TerminationConfig(exit_fn=leave),
    )

    def step():
        steps.assign_add(1)
        strategy.collectives.barrier("step")

    try:
        for i in range(1000):
            if i == 5 and strategy.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            handler.run(step)
    except SystemExit:
        pass
    else:
        raise AssertionError("nobody has ended")
    # All in the same step, which is what they have saved.
    every = strategy.gather(tf.constant(ended, tf.int64), axis=0).numpy()
    assert len(every) == strategy.world_size and len(set(every)) == 1, every
    found = tf.train.latest_checkpoint(os.path.join(folder, "checkpoints"))
    saved = tf.train.load_checkpoint(found)
    assert saved.get_tensor("steps/.ATTRIBUTES/VARIABLE_VALUE") == ended[0]


if __name__ == "__main__":
    main()
