# SPDX-License-Identifier: Apache-2.0
"""`LocalSteps(tables=True)`, at several ranks, against one process."""

import numpy as np
import pytest

pytestmark = pytest.mark.process

K = 3
TABLES = ["LocalSteps", {"k": K, "tables": True}]
BOTH = ((2, 3), (2, 2))


@pytest.mark.parametrize(
    ("ranks", "keras", "optimizer", "of_keras", "in_loop", "options"),
    [
        *(
            (*place, optimizer, of_keras, False, {})
            for place in (*BOTH, (3, 3))
            for optimizer, of_keras in (
                ("Adagrad", False),
                ("Adagrad", True),
            )
        ),
        *(
            (*place, "Adagrad", False, in_loop, options)
            for place in BOTH
            for in_loop, options in (
                (True, {}),
                (False, {"prefetch_ids": True}),
                (False, {"wire_packing": True}),
            )
        ),
    ],
)
def test_rows_are_updated_with_the_sums_of_rounds(
    run_scenario, ranks, keras, optimizer, of_keras, in_loop, options
):
    """With fixed dense layers, as a process with batches of a round."""
    scenario = "deferred_rows_scenarios.fitted"
    keys = {"keys": options.get("keys", True)}
    (expected,) = run_scenario(
        scenario,
        *(4 * K, optimizer, of_keras, False, keys),
        ranks=1,
        keras=keras,
        strategy=False,
    )
    for found in run_scenario(
        scenario,
        *(4, optimizer, of_keras, in_loop, options),
        ranks=ranks,
        keras=keras,
        consistency=TABLES,
    ):
        assert (found["steps"], expected["steps"]) == (22, 8)
        np.testing.assert_allclose(
            found["predictions"], expected["predictions"], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(("ranks", "keras"), BOTH)
def test_bytes_of_rows_fall(run_scenario, ranks, keras):
    """Eight steps repeat ten rows; a round sends each of them once."""
    steps = 8
    scenario = "deferred_rows_scenarios.bytes_sent"
    (of_steps, *_), (of_round, *_) = (
        run_scenario(
            scenario, steps, ranks=ranks, keras=keras, consistency=mode
        )
        for mode in (
            ["BSP", {}],
            ["LocalSteps", {"k": steps, "tables": True}],
        )
    )
    before = of_steps["repeated/results/gradient"]
    after = of_round["consistency/rows"] + of_round["consistency/rows/ids"]
    assert of_round.get("repeated/results/gradient", 0) == 0
    assert of_round["repeated/results"] == of_steps["repeated/results"]
    assert 0 < after < before / 4


def hits_of(ids, ranks, epochs):
    """The rows that a rank asks for, and has, by rank; rounds of `K` steps."""
    found = []
    for rank in range(ranks):
        asked = hits = 0
        for step, start in enumerate(range(0, len(ids), 8)):
            batch = ids[start : start + 8]
            cuts = [r * len(batch) // ranks for r in range(ranks + 1)]
            mine = set(batch[cuts[rank] : cuts[rank + 1], 0])
            if step % K == 0:
                copies = set()  # Those of the first step are kept as well.
            asked += len(mine)
            hits += len(mine & copies)
            copies |= mine
        found.append((epochs * asked, epochs * hits))
    return found


@pytest.mark.parametrize(
    ("ranks", "keras", "sharding", "wire_dtype", "in_loop"),
    [
        (2, 3, "row", "float32", False),
        (2, 3, "column", "bfloat16", False),
        (2, 3, "row", "float32", True),
        (2, 2, "row", "float32", False),
        (3, 3, "row", "float32", False),
        (3, 2, "column", "float32", True),
    ],
)
def test_copies_of_rows_change_bytes_only(
    run_scenario, ranks, keras, sharding, wire_dtype, in_loop
):
    """Of a table whose rows the program assigns after an epoch as well."""
    ids = np.random.default_rng(0).integers(0, 12, [52, 2])
    read, copied = (
        run_scenario(
            "deferred_rows_scenarios.copied",
            *(ids.tolist(), sharding, wire_dtype, in_loop),
            ranks=ranks,
            keras=keras,
            consistency=[
                "LocalSteps",
                {"k": K, "tables": True, "row_cache": row_cache},
            ],
        )
        for row_cache in (False, True)
    )
    hits = hits_of(ids, ranks, 3)
    for rank, (without, found) in enumerate(zip(read, copied, strict=True)):
        np.testing.assert_array_equal(found["tables"], without["tables"])
        assert without["hits"] is None
        asked, kept = hits[rank]
        np.testing.assert_allclose(found["hits"], kept / asked)
        if not in_loop:
            asked, kept = map(sum, zip(*hits, strict=True))
            np.testing.assert_allclose(found["logs"], [kept / asked])
    sent = [sum(each["bytes"] for each in found) for found in (read, copied)]
    assert sent[1] < sent[0]


@pytest.mark.parametrize(("ranks", "keras"), BOTH)
@pytest.mark.parametrize("scenario", ["refused", "in_inner_function"])
def test_errors(run_scenario, ranks, keras, scenario):
    run_scenario(
        f"deferred_rows_scenarios.{scenario}",
        ranks=ranks,
        keras=keras,
        consistency=TABLES,
    )


def simulated(ranks, batches, rate, significance):
    """What `held_back` returns, by rank."""
    direction = np.array([1.0, 2.0, 3.0, 4.0])
    table = np.full([40, 4], 0.5)
    sums = np.zeros([ranks, 40, 4])
    judged, held = np.zeros(ranks), np.zeros(ranks)
    for ids in batches:
        cuts = [rank * len(ids) // ranks for rank in range(ranks + 1)]
        limits = significance * np.linalg.norm(table, axis=1)
        for rank in range(ranks):
            own = ids[cuts[rank] : cuts[rank + 1]]
            for row in own:
                sums[rank, row] += direction / len(ids)
            touched = np.unique(own)
            norms = rate * np.linalg.norm(sums[rank, touched], axis=1)
            sent = touched[norms > limits[touched]]
            judged[rank] += len(touched)
            held[rank] += len(touched) - len(sent)
            table[sent] -= rate * sums[rank, sent]
            sums[rank, sent] = 0
    return table.copy(), table - rate * sums.sum(axis=0), held / judged


@pytest.mark.parametrize(
    ("ranks", "keras", "sharding"),
    [(2, 3, "row"), (2, 2, "row"), (2, 3, "column"), (3, 3, "row")],
)
def test_significant_rows_are_sent(run_scenario, ranks, keras, sharding):
    """As NumPy computes it, and the others when rounds end."""
    batches = np.random.default_rng(0).integers(0, 8, [12, 7]).tolist()
    rate, significance = 0.05, 0.1
    *tables, shares = simulated(ranks, batches, rate, significance)
    assert np.all((shares > 0.2) & (shares < 0.8))
    for rank, (*found, share) in enumerate(
        run_scenario(
            "deferred_rows_scenarios.held_back",
            *(batches, rate, sharding),
            ranks=ranks,
            keras=keras,
            consistency=["ASP", {"significance": significance}],
        )
    ):
        np.testing.assert_allclose(share, shares[rank])
        for one, other in zip(found, tables, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
