# SPDX-License-Identifier: Apache-2.0
"""Jobs of Spark, one after another in the same processes, and what fails."""

import os

from pyspark.sql import SparkSession
from spark_tensorflow_distributor import MirroredStrategyRunner
from spark_train import train

import tfdist_ext.spark


def fail():
    import tfdist_ext

    with tfdist_ext.HybridParallelStrategy() as strategy:
        if strategy.rank == 1:
            raise ValueError("what is wrong with rank 1")
        strategy.collectives.barrier("for rank 1")


def raised(kind, function, *arguments):
    """The text of an error, which must come."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def main():
    no_session = raised(ValueError, tfdist_ext.spark.run, train, 2)
    assert "none is active" in no_session, no_session
    session = SparkSession.builder.master("local[2]").getOrCreate()
    no_ranks = raised(ValueError, tfdist_ext.spark.run, train, 0)
    assert "Received: ranks=0" in no_ranks, no_ranks
    processes = []
    for rows in (100, 200):

        def one(rows=rows):
            return os.getpid(), train(rows)

        results = tfdist_ext.spark.run(one, 2)
        processes.append({process for process, _ in results})
        for _, (rank, ranks, *losses) in results:
            print(f"rows {rows}, rank {rank} of {ranks}: {losses}")
    assert processes[0] == processes[1], "Spark has not reused its processes"
    failure = raised(Exception, tfdist_ext.spark.run, fail, 2)
    assert "what is wrong with rank 1" in failure, failure
    runner = MirroredStrategyRunner(
        num_slots=2, use_gpu=False, use_custom_strategy=True
    )
    rank, ranks, *losses = runner.run(train, rows=100)
    print(f"rows 100, rank {rank} of {ranks}: {losses}")
    session.stop()
    rank, ranks, *losses = train(100)
    print(f"rows 100, rank {rank} of {ranks}: {losses}")


if __name__ == "__main__":
    main()
