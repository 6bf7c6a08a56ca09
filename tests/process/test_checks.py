# SPDX-License-Identifier: Apache-2.0
"""The check of a first step, of a custom step, and of replicas."""

import pytest

pytestmark = pytest.mark.process

BOTH = pytest.mark.parametrize(("ranks", "keras"), [(3, 3), (2, 2)])
RIGHT = ("Right", "Table", "Grows", "Drops", "Normalizes")
# What the table says of a wrong model.
WRONG = {
    "Alone": ("BatchNormalization", "synchronized=True"),
    "Einsum": ("gradient", "a sum over the samples", "batch_sum"),
    "TableSum": ("gradient", "a sum over the samples", "batch_sum"),
    "Root": ("jointly", "gather_batch"),
    "Clips": ("gradient", "jointly", "gather_batch"),
    "Remembers": ("state", "largest", "aggregation="),
}


@BOTH
@pytest.mark.parametrize("name", RIGHT)
def test_right_models_equal_one_process(run_scenario, ranks, keras, name):
    fit = "check_scenarios.fitted"
    checked = run_scenario(fit, name, "auto", ranks=ranks, keras=keras)
    plain = run_scenario(fit, name, "off", ranks=ranks, keras=keras)
    (level, text), *others = checked[0][0]
    assert level == "INFO" and not others
    assert f"`{name}` on {ranks} ranks equals one process" in text
    assert not any(said for said, *_ in [*checked[1:], *plain])
    if (name, keras) == ("Drops", 2):
        return  # tf_keras counts its seeds up in each trace
    for (_, *with_check), (_, *without) in zip(checked, plain, strict=True):
        assert with_check == without  # nothing was applied


@BOTH
@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_models_are_reported(run_scenario, ranks, keras, name):
    found, *others = run_scenario(
        "check_scenarios.fitted", name, "auto", False, ranks=ranks, keras=keras
    )
    # How state is averaged is said besides.
    (text,) = (text for level, text in found[0] if level == "WARNING")
    assert f"on {ranks} ranks is not what one process computes" in text
    for part in WRONG[name]:
        assert part in text
    assert not any(
        level == "WARNING" for said, *_ in others for level, _ in said
    )


@BOTH
def test_error_raises_on_all_ranks(run_scenario, ranks, keras):
    messages = run_scenario(
        "check_scenarios.raises", "Einsum", ranks=ranks, keras=keras
    )
    assert len(set(messages)) == 1
    assert "is not what one process computes" in messages[0]


@BOTH
def test_a_step_that_cannot_be_compared(run_scenario, ranks, keras):
    scenario = "check_scenarios.cannot_compare"
    (said, error), *others = run_scenario(
        scenario, "auto", ranks=ranks, keras=keras
    )
    assert not error and not any(said or error for said, error in others)
    assert "not checked" in said[0][1] and "element 0" in said[0][1]
    found = run_scenario(scenario, "error", ranks=ranks, keras=keras)
    assert all("element 0 cannot be gathered" in error for _, error in found)


@BOTH
def test_little_memory_on_one_rank(run_scenario, ranks, keras):
    scenario = "check_scenarios.short_of_memory"
    (said, *first), *others = run_scenario(
        scenario, "auto", ranks=ranks, keras=keras
    )
    ((level, text),) = said
    assert level == "INFO" and "not checked" in text
    assert "check='always'" in text and "quarter of the free memory" in text
    plain = run_scenario(scenario, "off", ranks=ranks, keras=keras)
    found = [first, *(rest for _, *rest in others)]
    assert found == [rest for _, *rest in plain]
    forced = run_scenario(scenario, "always", ranks=ranks, keras=keras)
    assert "equals one process" in forced[0][0][0][1]


@BOTH
def test_plain_models_are_checked_where_asked(run_scenario, ranks, keras):
    fit = "check_scenarios.fitted"
    found = run_scenario(fit, "plain", "auto", ranks=ranks, keras=keras)
    assert not any(said for said, *_ in found)
    found = run_scenario(fit, "plain", "always", ranks=ranks, keras=keras)
    assert "equals one process" in found[0][0][0][1]


@BOTH
@pytest.mark.parametrize(
    "options",
    [{"steps_per_execution": 2}, {"run_eagerly": True}, {"drop": True}],
    ids=lambda options: next(iter(options)),
)
def test_how_steps_are_run(run_scenario, ranks, keras, options):
    arguments = ("check_scenarios.fitted", "Right")
    where = {"ranks": ranks, "keras": keras}
    checked = run_scenario(*arguments, "auto", True, options, **where)
    plain = run_scenario(*arguments, "off", True, options, **where)
    assert "equals one process" in checked[0][0][0][1]
    for (_, *with_check), (_, *without) in zip(checked, plain, strict=True):
        assert with_check == without


@BOTH
def test_generators_give_each_batch_once(run_scenario, ranks, keras):
    fit = "check_scenarios.from_a_generator"
    checked = run_scenario(fit, "auto", ranks=ranks, keras=keras)
    plain = run_scenario(fit, "off", ranks=ranks, keras=keras)
    assert [bool(said) for said, *_ in checked] == [True] + [False] * (
        ranks - 1
    )
    for (_, *with_check), (_, *without) in zip(checked, plain, strict=True):
        assert with_check == without


@BOTH
@pytest.mark.parametrize("wrong", [False, True])
def test_custom_steps(run_scenario, ranks, keras, wrong):
    found = run_scenario(
        "check_scenarios.in_a_loop", wrong, ranks=ranks, keras=keras
    )
    said, ok, lines, steps = found[0]
    assert ok != wrong and steps == 0
    assert said == [("WARNING" if wrong else "INFO", "\n".join(lines))]
    assert len({each[2] for each in found}) == 1
    if wrong:
        assert "num_replicas_in_sync" in said[0][1]


@BOTH
def test_replicas_that_drift_are_named(run_scenario, ranks, keras):
    drifts = "check_scenarios.drifts"
    found = run_scenario(drifts, "auto", ranks=ranks, keras=keras)
    (said, error), *others = found
    warnings = [text for level, text in said if level == "WARNING"]
    assert len(warnings) == 1 and not error
    assert "after epoch 2" in warnings[0] and "ranks 1 differ" in warnings[0]
    assert "dense_1/kernel" in warnings[0]
    assert not any(said for said, _ in others)
    found = run_scenario(drifts, "error", ranks=ranks, keras=keras)
    assert all("after epoch 2" in error for _, error in found)
    found = run_scenario(drifts, "off", ranks=ranks, keras=keras)
    assert not any(error or said for said, error in found)


@BOTH
@pytest.mark.parametrize("how", ["weights", "checkpoint"])
def test_replicas_are_compared_before_a_save(run_scenario, ranks, keras, how):
    found = run_scenario(
        "check_scenarios.drifts_before_a_save", how, ranks=ranks, keras=keras
    )
    assert [level for level, _ in found[0]] == ["WARNING"]
    assert "saved" in found[0][0][1] and "ranks 1 differ" in found[0][0][1]


def test_batches_are_gathered(run_scenario):
    first, second = run_scenario(
        "check_scenarios.in_sparse_batches", ranks=2, keras=3
    )
    assert first == second
    texts, ragged, sparse, flags = first
    assert texts == [[b"a", b"bc"], [b"rank 0", b""], [b"a", b"bc"]]
    assert ragged == [[[1], [2, 3]], [[]], [[4]], [[]], [[4]]]
    assert sparse == [[0, 1], [5, 0], [0, 2], [5, 0]]
    assert flags == [True, True, True, False]
