# SPDX-License-Identifier: Apache-2.0
"""Candidates of all ranks: gathered for a loss, and searched."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import ShardedTopK
from tfdist_ext.layers import TableConfig
from tfdist_ext.layers import candidate_rows
from tfdist_ext.losses import Retrieval
from tfdist_ext.losses import gather_candidates
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
ROWS, DIM = 23, 5
DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int8"]
DTYPES += ["int16", "int32", "int64", "uint64", "bool", "string"]


def of_rank(rank):
    """Rows of which the ranks have different numbers, the first one none."""
    return np.arange(rank * 4).reshape([rank * 2, 2]) + 100 * rank


def as_dtype(values, dtype):
    if dtype == "string":
        texts = [[f"é{v}" * (v % 3) for v in r] for r in values]
        return tf.constant(texts, tf.string)
    return tf.cast(values, dtype)


def gathers_every_dtype(strategy, folder):
    """This rank's rows come first, then those of the next; also no rows."""
    rank, ranks = strategy.rank, strategy.world_size
    own = of_rank(rank)
    order = [of_rank(each) for each in range(ranks)]
    expected = np.concatenate(order[rank:] + order[:rank])

    mine = {
        dtype: tf.reshape(as_dtype(own, dtype), [-1, 2]) for dtype in DTYPES
    }

    @tf.function
    def gather(values):
        return strategy.run(
            lambda x: tf.nest.map_structure(gather_candidates, x), (values,)
        )

    for dtype, found in gather(mine).items():
        assert found.dtype == mine[dtype].dtype
        np.testing.assert_array_equal(found, as_dtype(expected, dtype), dtype)
    mine = tf.constant(own)
    np.testing.assert_array_equal(gather_candidates(mine), own)  # in no step
    for wrong, error in (
        (tf.ragged.constant([[1], []]), TypeError),
        (tf.constant(1j), TypeError),
        (tf.constant(1.0), ValueError),
    ):
        with pytest.raises(error, match="gather_candidates takes"):
            gather_candidates(wrong)


def gradients_are_sums_over_the_ranks(strategy, folder):
    """In a loop of one's own, where losses of the ranks are added up."""
    rank, ranks = strategy.rank, strategy.world_size
    total = sum(len(of_rank(each)) for each in range(ranks))
    weights = np.random.default_rng(1).normal(size=[ranks, total, 2])

    @tf.function
    def gradient(x, weights):
        def step(x, weights):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(gather_candidates(x) * weights)
            return tape.gradient(loss, x)

        return strategy.run(step, (x, weights))

    found = gradient(tf.constant(of_rank(rank), tf.float64), weights[rank])
    # What every rank's loss gives to the rows of this one.
    first = np.cumsum([0] + [len(of_rank(each)) for each in range(ranks)])
    expected = sum(
        np.roll(weights[each], first[each], axis=0) for each in range(ranks)
    )
    np.testing.assert_allclose(found, expected[first[rank] : first[rank + 1]])


OPTIONS = {
    "sum": {},
    "mean": {"loss": "mean"},
    "hard": {"num_hard_negatives": 3, "temperature": 0.5},
    "all are hard": {"num_hard_negatives": 0},
    "hits": {"remove_accidental_hits": True},
}
GIVEN = {
    "weights": ["sample_weight"],
    "chances": ["candidate_sampling_probability"],
    "mask": ["score_mask"],
}


def losses(task, queries, candidates, inputs):
    """The sum of what a task gives, and its gradients."""
    with tf.GradientTape() as tape:
        tape.watch([queries, candidates])
        value = tf.reduce_sum(task(queries, candidates, **inputs))
    return value, tape.gradient(value, [queries, candidates])


def tasks_are_those_of_one_process(strategy, folder):
    """Losses add up and gradients agree, for each option; ties go alike."""
    rank, ranks = strategy.rank, strategy.world_size
    sizes = [3 * (each + 1) for each in range(ranks)]
    total, mine = sum(sizes), slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    queries, candidates = whole_numbers(1, total, 4), whole_numbers(2, total, 4)
    rng = np.random.default_rng(3)
    whole = {
        "sample_weight": rng.random(total, np.float32),
        "candidate_sampling_probability": rng.random(total, np.float32),
        "candidate_ids": np.array([f"id {i % 5}" for i in range(total)]),
        "score_mask": rng.random([total, total]) < 0.7,
    }
    own = {name: value[mine] for name, value in whole.items()}
    own["score_mask"] = np.roll(own["score_mask"], -mine.start, axis=1)
    each = keras.losses.CategoricalCrossentropy(True, reduction="none")
    cases = [(name, [], queries) for name in OPTIONS]
    cases += [("sum", given, queries) for given in GIVEN.values()]
    heads = whole_numbers(4, total, 2, 4)
    for name, given, asked in [*cases, ("sum", [], heads)]:
        options = dict(OPTIONS[name])
        if options.pop("loss", None):
            options["loss"] = each
        if "remove_accidental_hits" in options:
            given = ["candidate_ids"]
        task = Retrieval(**options)
        expected, gradients = losses(
            task,
            *map(tf.constant, (asked, candidates)),
            {key: whole[key] for key in given},
        )
        found, parts = strategy.run(
            losses,
            (
                task,
                *(tf.constant(x[mine]) for x in (asked, candidates)),
                {key: own[key] for key in given},
            ),
        )
        assert np.isfinite(found)
        everyone = strategy.collectives.all_reduce([found], "losses")
        np.testing.assert_allclose(everyone[0], expected, 1e-5, err_msg=name)
        for part, gradient in zip(parts, gradients, strict=True):
            np.testing.assert_allclose(
                part, gradient[mine], 1e-4, 1e-5, err_msg=name
            )
    with pytest.raises(ValueError, match="needs `candidate_ids`"):
        Retrieval(remove_accidental_hits=True)(queries, candidates)


def whole_numbers(seed, *shape):
    """Few, so that many scores are equal, and sums of them exact."""
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    return values.astype(np.float32)


def expected(queries, table, k):
    """Of equal scores the first: scores and positions."""
    scores = queries @ table.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), order


def check(found, queries, table, k, ids=None):
    scores, positions = expected(queries, table, k)
    np.testing.assert_array_equal(found[0], scores)
    ids = np.arange(len(table)) if ids is None else ids
    np.testing.assert_array_equal(found[1], ids[positions])


def queries_of(strategy):
    """Of which the first rank has none."""
    return whole_numbers(strategy.rank, 3 * strategy.rank, DIM)


def start(seed):
    return keras.initializers.Constant(whole_numbers(seed, ROWS, DIM))


def finds_in_every_placement(strategy, folder):
    """Wherever the table lies, for k beyond a shard, in blocks of rows."""
    ranks = strategy.world_size
    places = {
        "rows": TablePlacement.row_wise(ranks),
        "columns": TablePlacement.column_wise(ranks),
        "one": TablePlacement.table_wise(ranks - 1),
        "copied": "data_parallel",
    }
    if ranks == 4:
        places["both"] = TablePlacement(2, 2, (3, 0, 1, 2))
    queries, table = queries_of(strategy), whole_numbers(7, ROWS, DIM)
    chosen = np.array([4, 22, 0, 9, 9, 13, 1, 17])
    names = np.array([f"title {i}".encode() for i in range(len(chosen))])
    for name, place in places.items():
        with strategy.scope():
            layer = Embedding(ROWS, DIM, start(7), sharding=place, name=name)
            index = ShardedTopK(k=3, name=f"find_{name}").index(layer)
            some = ShardedTopK(k=len(chosen), name=f"some_{name}")
            some.index(layer, names, rows=chosen)
            layer.build(None)
        check(index(queries), queries, table, 3)
        check(index(queries, k=ROWS), queries, table, ROWS)
        check(some(queries), queries, table[chosen], len(chosen), names)
        if name == "rows":  # what is found changes with the table
            layer.set_weights([table + 1])
            check(index(queries), queries, table + 1, 3)
            layer.set_weights([table])
        cells, candidate_rows.CELLS = candidate_rows.CELLS, 12 * ranks
        check(index(queries), queries, table, 3)
        candidate_rows.CELLS = cells
    ids, rows = some.gather()
    np.testing.assert_array_equal(ids, names)
    np.testing.assert_array_equal(rows, table[chosen])


def finds_in_other_layers(strategy, folder):
    """Kernels, tables of a DistributedEmbedding by name; errors say which."""
    queries, table = queries_of(strategy), whole_numbers(7, ROWS, DIM)
    with strategy.scope():
        kernel = FullSparse(DIM, ROWS, kernel_initializer=start(7))
        features = {
            name: FeatureConfig(
                name,
                TableConfig(name, ROWS, DIM, start(seed), placement="row_wise"),
                (None,),
                (None, DIM),
            )
            for name, seed in (("a", 6), ("b", 7))
        }
        tables = DistributedEmbedding(features)
        index = ShardedTopK(k=4)
        with pytest.raises(ValueError, match="call its `index`"):
            index(queries)
        with pytest.raises(ValueError, match="is not built"):
            index.index(tables)(queries)
        kernel.build((None, 1))
        tables.build()
    check(index.index(kernel)(queries), queries, table, 4)
    check(index.index(kernel.kernel)(queries), queries, table, 4)
    check(index.index(tables, table="b")(queries), queries, table, 4)
    for wrong, message in (
        (lambda: index.index(tables)(queries), r"\['a', 'b'\]"),
        (lambda: index.index(kernel)(queries, k=24), "23 candidates .* k=24"),
        (lambda: index.index(kernel)(queries[:, 1:]), "5 columns"),
        (lambda: index.index(kernel, ["x"])(queries), "each of the 23"),
        (lambda: index.index(kernel, rows=[23])(queries), r"in \[0, 23\)"),
        (lambda: index.index(table, rows=[1]), "`rows`"),
        (lambda: index.index(table[0]), r"rows \[n, dim\]"),
        (lambda: ShardedTopK(k=0), "k=0"),
        (lambda: ShardedTopK(candidate_ids=[1]), "candidate_embeddings"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def finds_what_towers_compute(strategy, folder):
    """Rows given by all, and computed by each rank of its part; taken anew."""
    queries, table = queries_of(strategy), whole_numbers(7, ROWS, DIM)
    ids = np.arange(ROWS) * 10
    with strategy.scope():
        embedding = Embedding(ROWS, DIM, start(7), sharding="row_wise")
        double = keras.layers.Dense(
            DIM,
            use_bias=False,
            kernel_initializer=keras.initializers.Identity(2),
        )
        tower = keras.Sequential([embedding, double])
        index = ShardedTopK(k=6)
        given = ShardedTopK(table, ids, k=6)
        assert not index.weights
    check(given(queries), queries, table, 6, ids)
    candidates = tf.data.Dataset.from_tensor_slices((ids, np.arange(ROWS)))
    batches = candidates.batch(8)
    index.index_from_dataset(batches, tower)

    @tf.function
    def in_step(queries):
        return strategy.run(lambda q: index(q), (queries,))

    check(in_step(queries), queries, 2 * table, 6, ids)
    embedding.set_weights([table[::-1]])
    index.index_from_dataset(batches.map(lambda i, rows: (i, tower(rows))))
    check(in_step(queries), queries, 2 * table[::-1], 6, ids)
    np.testing.assert_array_equal(index.gather()[1], 2 * table[::-1])
    # All parts leave, with the ids.
    tf.saved_model.save(index, str(folder / "index"))
    served = tf.saved_model.load(str(folder / "index"))
    check(served(queries), queries, 2 * table[::-1], 6, ids)
    module = tf.Module()
    module.index = index
    with pytest.raises(ValueError, match="each of which has a part"):
        tf.saved_model.save(module, str(folder / "module"))
    # Exclusions: the best are left out, or all but some.
    best = expected(queries, 2 * table[::-1], ROWS)[1]
    scores, found = index.query_with_exclusions(queries, ids[best[:, :4]], k=3)
    np.testing.assert_array_equal(found, ids[best[:, 4:7]])
    scores, _ = index.query_with_exclusions(queries, ids[best[:, 2:]], k=3)
    assert np.all(np.isfinite(scores) == [True, True, False])


def leaves_as_plain_ops(strategy, folder):
    """An index of a table and one of rows, in a model that is exported."""
    table = whole_numbers(7, ROWS, DIM)
    names = np.array([f"title {i}" for i in range(ROWS)])
    with strategy.scope():
        users = Embedding(ROWS, DIM, start(8), sharding="row_wise")
        movies = Embedding(ROWS, DIM, start(7), sharding="row_wise")
        movies.build(None)
        first = ShardedTopK(k=4).index(movies, names)
        second = ShardedTopK(table[::-1].copy(), k=4)
        ids = keras.Input([], dtype="int64")
        queries = users(ids)
        model = keras.Model(ids, {"a": first(queries), "b": second(queries)})
    tfdist_ext.export(model, folder / "served")
    if strategy.rank > 0:
        return
    served = tf.saved_model.load(str(folder / "served"))
    assert len(served.tables) == 2
    found = served.serve(tf.constant([3, 5, 5], tf.int64))
    asked = whole_numbers(8, ROWS, DIM)[[3, 5, 5]]
    check(found["a"], asked, table, 4, names.astype("S"))
    check(found["b"], asked, table[::-1], 4)
