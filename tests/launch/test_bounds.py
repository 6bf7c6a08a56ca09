# SPDX-License-Identifier: Apache-2.0
"""What traces say, of events that are made up."""

import pytest

from tfdist_ext.launch import trace
from tfdist_ext.launch.trace import EXCHANGE
from tfdist_ext.launch.trace import KERNEL
from tfdist_ext.launch.trace import STEP
from tfdist_ext.launch.trace import Event


def call(step):
    return {"call": f"2/{step}"}


def events(late=0.0, lookup=1000.0):
    """Two steps of 10 ms of two ranks; rank 1 reads its input so much later."""
    found = []
    for step in range(2):
        for rank in range(2):
            begin = 20000.0 * step
            first = begin + 100 + late * rank
            last = begin + late + 3100 + lookup
            found += [
                Event(rank, STEP, f"step {step}", begin, last + 500),
                Event(rank, KERNEL, "IteratorGetNext", begin, first),
                Event(rank, KERNEL, "Tfdist>Lookup", first, first + lookup),
                Event(rank, EXCHANGE, "ids", first + lookup, last, call(step)),
                Event(rank, KERNEL, "Tfdist>ApplyRowSgd", last, last + 400),
            ]
    for event in found:
        waited = trace.waits(found).get(id(event))
        if waited is not None:
            event.more["waited_us"] = waited[0]
    return found


def test_the_rank_that_the_others_wait_for_is_named(tmp_path, capsys):
    trace.write(tmp_path / "trace.json", events(late=5000.0), [0.0, 3.0])
    assert trace.main(["trace", str(tmp_path / "trace.json")]) == 0
    *_, first, second, verdict = capsys.readouterr().out.splitlines()
    # step, input, lookup, update, other work, callbacks, link, waiting, late
    assert first.split() == [
        "0",
        "9.60",
        "0.10",
        "1.00",
        "0.40",
        "0.00",
        "0.00",
        "3.00",
        "5.00",
        "0.00",
    ]
    assert second.split() == [
        "1",
        "9.60",
        "5.10",
        "1.00",
        "0.40",
        "0.00",
        "0.00",
        "3.00",
        "0.00",
        "5.00",
    ]
    assert verdict.startswith("Bound by rank 1: the others wait for it 5.00")
    assert verdict.endswith("more time than they do in: input.")


@pytest.mark.parametrize("at_end", [False, True])
def test_time_in_callbacks_is_no_input(at_end):
    """Of 5 ms of callbacks on rank 1, at the begin or the end of its steps."""
    found = events(late=0.0 if at_end else 5000.0)
    for step in range(2):
        begin = 20000.0 * step
        start, end = begin, begin + 5000.0
        if at_end:
            start, end = begin + 4500.0, begin + 9500.0
        found.append(Event(1, trace.CALLBACK, "callbacks", start, end))
    *_, first, second, verdict = trace.report(found).splitlines()
    columns = first.split(), second.split()
    assert [column[6] for column in columns] == ["0.00", "5.00"]
    assert [column[2] for column in columns] == ["0.10", "0.10"]
    if not at_end:
        assert verdict.endswith("more time than they do in: callbacks."), (
            verdict
        )


def test_without_a_late_rank_the_kind_of_work_is_named():
    assert "Bound by link: 3.00 ms of 4.60" in trace.report(events())
    assert "Bound by lookup: 9.00 ms" in trace.report(events(lookup=9000.0))
    assert trace.report([]) == "The trace has no steps."


def test_exchanges_are_told_apart_by_their_calls():
    """One was under way when the trace began, and had ended on rank 0."""
    whole = events(late=5000.0)
    early = Event(1, EXCHANGE, "ids", -900.0, -800.0, {"call": "2/-1"})
    assert (
        trace.report([early, *whole]).splitlines()[2:3]
        == (trace.report(whole).splitlines()[2:3])
    )
    found = trace.waits([early, *whole])
    assert id(early) not in found
    assert {last for _, last in found.values()} == {1}


def test_what_is_no_trace_is_said(tmp_path, capsys):
    (tmp_path / "other.json").write_text("[1]")
    for path in (tmp_path / "other.json", tmp_path / "none.json"):
        assert trace.main(["trace", str(path)]) == 1
        assert str(path) in capsys.readouterr().err


def test_clocks_are_as_far_apart_as_messages_say():
    # The clock of rank 1 is 990 ahead; a message takes from 5 to 30.
    sent = [[0, 990], [100, 1090]]
    received = [[30, 995], [105, 1120]]
    (own, other) = trace.clock_offsets(sent, received)
    assert own == (0.0, 0.0)
    assert other[0] == pytest.approx(990, abs=other[1])
    assert other[1] <= 5
