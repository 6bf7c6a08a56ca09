# SPDX-License-Identifier: Apache-2.0
"""Exchanges between GPUs, with stand-ins for CUDA and NCCL.

Ranks are threads. Every result is that of the ops for CPUs.
"""

import ctypes
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.bare_peer import Rank
from tests.bare_peer import gather_header
from tests.bare_peer import pack
from tests.fake_gpu import emulation
from tests.fake_gpu.emulation import on_gpu
from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm import gpus
from tfdist_ext.ops import collective_ops
from tfdist_ext.ops import group_ops

# And how far sums may be off: in 16 bits they are rounded after each rank, as
# weights are.
DTYPES = {"float32": 1e-5, "float64": 1e-5, "float16": 0.05, "bfloat16": 0.3}
DEVICE_FLAG = 4  # kDeviceFlag of custom_ops/comm/wire.h


@pytest.fixture(scope="module")
def emulated(emulated_ops):
    return emulation.load(emulated_ops)


@pytest.fixture
def connect(emulated, emulated_ops, monkeypatch):
    """Gives a group its ranks' GPUs, by NCCL if nothing else is said."""
    monkeypatch.setattr(group_ops, "library", lambda: emulated)

    def connect(group, nccl=emulated_ops, **how):
        return emulation.connect(group, nccl, **how)

    yield connect
    count = ctypes.CDLL(emulated_ops).fake_gpu_open_count
    # A thread may still let the last one go.
    deadline = time.monotonic() + 10
    while count() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() == 0, "streams, events, memory or communicators are left"


def texts_of(world_size, function, **how):
    """The errors of all ranks."""

    def run(group):
        with pytest.raises(tf.errors.OpError) as caught:
            function(group)
        return type(caught.value), caught.value.message

    return run_on_ranks(world_size, run, **how)


def numbers(rank, shape, dtype):
    generator = np.random.default_rng([rank, *shape])
    return tf.cast(generator.integers(-8, 8, shape), dtype)


def exchange_all(group, dtype, weight):
    """Every op, all at once: nothing orders them but their turns."""
    rank, world = group.rank, group.world_size
    splits = [(rank * 3 + peer * 5) % 4 for peer in range(world)]
    rows = numbers(rank, (sum(splits), 3), dtype)
    large = numbers(rank, (40_000 + rank, 5), dtype)
    own = numbers(rank, (world,), dtype)
    bucket = [numbers(rank, shape, dtype) for shape in [(700, 9), (0, 4), ()]]
    if weight == 0:
        bucket = [tensor * np.nan for tensor in bucket]
    return [
        *collective_ops.all_to_all(group, rows, splits, tag=2),
        *collective_ops.all_gather(group, large, tag=4),
        *collective_ops.all_gather(group, rows[:0], tag=6),
        *collective_ops.all_reduce(group, [own], tag=8),
        *collective_ops.all_reduce(group, bucket, tag=10, weight=weight),
        *collective_ops.all_reduce(group, [own], tag=12, weight=2.0),
        *collective_ops.all_reduce(group, [own * np.inf], tag=14, weight=0.0),
        *collective_ops.all_reduce(
            group, [*bucket, own], tag=20, weight=weight, unweighted=1
        ),
        *collective_ops.all_reduce(
            group, [bucket[0], own], tag=22, weight=2.0, unweighted=1
        ),
        collective_ops.broadcast(group, own, root=world - 1, tag=16),
        collective_ops.broadcast(group, rows[:0], root=0, tag=18),
    ]


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_results_are_those_of_a_cpu(connect, world_size, nccl):
    dtypes = DTYPES if world_size == 2 else ["float32"]

    def run(group):
        reason = connect(group, **({} if nccl else {"nccl": 0}))
        assert reason == ("" if nccl else "rank 0: TFDIST_NCCL=0")
        pairs = []
        for dtype in dtypes:
            weight = float(group.rank)  # that of rank 0 does not count
            expected = exchange_all(group, dtype, weight)
            step = on_gpu(lambda d=dtype, w=weight: exchange_all(group, d, w))
            pairs += [(dtype, step(), expected) for _ in range(2)]
        return pairs

    for rank in run_on_ranks(world_size, run):
        for dtype, got, expected in rank:
            for one, other in zip(got, expected, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_allclose(
                    np.asarray(one, np.float64),
                    np.asarray(other, np.float64),
                    rtol=1e-6,
                    atol=DTYPES[dtype],
                )


def test_turns_whatever_order_ranks_begin_in(connect):
    """Ranks begin the same exchanges in opposite orders, one after another."""

    def run(group):
        connect(group)
        tags = range(2, 22, 2)
        order = tags if group.rank == 0 else reversed(tags)

        def step():
            return {
                tag: collective_ops.all_reduce(
                    group, [tf.fill([50], float(tag))], tag=tag
                )[0][0]
                for tag in order
            }

        return on_gpu(step)()

    for sums in run_on_ranks(2, run):
        assert {tag: float(sum) for tag, sum in sums.items()} == {
            tag: 2.0 * tag for tag in range(2, 22, 2)
        }


def test_what_tensorflow_still_computes_is_awaited(connect, monkeypatch):
    """Inputs get their values late, in TensorFlow's stream."""
    monkeypatch.setenv("FAKE_GPU_LATE", "1")

    def run(group, nccl):
        connect(group, **nccl)

        def step(x):
            rows, _ = collective_ops.all_to_all(group, x + 1, [1, 2], tag=2)
            (sums,) = collective_ops.all_reduce(group, [x + 2], tag=4)
            return rows, sums

        return on_gpu(step)(tf.ones([3, 2]))

    for nccl in ({}, {"nccl": 0}):
        for rows, sums in run_on_ranks(2, lambda group, n=nccl: run(group, n)):
            assert np.all(rows == 2.0)
            assert np.all(sums == 6.0)


def test_gradients_take_the_same_way(connect):
    def run(group):
        connect(group)
        x = tf.fill([4, 2], float(group.rank + 1))

        def step():
            with tf.GradientTape() as tape:
                tape.watch(x)
                rows, _ = collective_ops.all_to_all(
                    group, x, [1, 3], tag=2, label="rows"
                )
                loss = tf.reduce_sum(rows) * (group.rank + 1.0)
            return tape.gradient(loss, x)

        return on_gpu(step)()

    for gradient in run_on_ranks(2, run):
        np.testing.assert_array_equal(gradient[:, 0], [1, 2, 2, 2])


def test_an_error_of_one_rank_is_that_of_all_and_they_go_on(connect):
    def run(group):
        connect(group)
        bad = [1, 1] if group.rank else [5, 5]
        send = on_gpu(
            lambda splits: collective_ops.all_to_all(
                group, tf.zeros([2]), splits, tag=2, label="ids"
            )
        )
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            send(tf.constant(bad, tf.int64))
        assert "rank 0: send_splits[0] is 5 where 2" in caught.value.message
        with pytest.raises(tf.errors.InvalidArgumentError, match="weight must"):
            on_gpu(
                lambda: collective_ops.all_reduce(
                    group, [tf.zeros([2])], tag=4, weight=-1.0 * group.rank
                )
            )()
        rows, _ = send(tf.constant([1, 1], tf.int64))
        return rows.shape[0]

    assert run_on_ranks(2, run) == [2, 2]


def test_a_rank_that_uses_its_cpu_is_named(connect):
    def run(group):
        connect(group)
        step = on_gpu if group.rank else tf.function
        step(
            lambda: collective_ops.all_reduce(
                group, [tf.zeros([2])], tag=2, label="dense"
            )
        )()

    for kind, text in texts_of(2, run):
        assert kind is tf.errors.InvalidArgumentError
        assert "rank 1 (127.0.0.1:7001) runs all_reduce 'dense'" in text
        assert text.count("between GPUs") == 1


def sum_three_times(connect):
    def run(group):
        connect(group)
        step = on_gpu(
            lambda: collective_ops.all_reduce(
                group, [tf.ones([100])], tag=2, label="dense"
            )
        )
        for _ in range(3):
            step()

    return run


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_error_of_nccl_ends_all_ranks(connect, monkeypatch, world_size):
    monkeypatch.setenv("FAKE_NCCL_ERROR", "1@3")
    for rank, (kind, text) in enumerate(
        texts_of(world_size, sum_three_times(connect))
    ):
        assert kind is tf.errors.UnavailableError
        assert f"rank {rank}: all_reduce 'dense' (tag 2, stage " in text
        assert "rank 1 (127.0.0.1:7001): all_reduce 'dense': NCCL" in text
        assert "unhandled system error, a cable was pulled" in text
        assert "TFDIST_NCCL=0" in text


@pytest.mark.parametrize(
    ("wish", "stage"), [("HANG", "exchange"), ("ABSENT", "connect")]
)
def test_who_never_comes_is_waited_for_until_the_deadline(
    connect, monkeypatch, wish, stage
):
    monkeypatch.setenv(
        f"FAKE_NCCL_{wish}", "1@0" if wish == "ABSENT" else "1@2"
    )
    for kind, text in texts_of(2, sum_three_times(connect), timeout=1.0):
        assert kind is tf.errors.UnavailableError
        assert f"stage {stage} over NCCL) failed: rank" in text
        assert "did not finish within" in text
        assert "NCCL_DEBUG=INFO" in text


def test_pinned_memory_may_be_missing(connect, monkeypatch):
    monkeypatch.setenv("FAKE_GPU_NO_MEMORY", "1")

    def run(group):
        connect(group, nccl=0)
        on_gpu(lambda: collective_ops.broadcast(group, tf.zeros([2]), tag=2))()

    for kind, text in texts_of(2, run):
        assert kind is tf.errors.UnavailableError
        assert "rank 0 (127.0.0.1:7000): broadcast 'tag 2': " in text
        assert "cudaHostAlloc: out of memory (CUDA error 2)" in text


def test_who_exchanges_through_the_hosts_and_why(connect, monkeypatch, caplog):
    def reasons(**how):
        def run(group):
            return connect(group, **how)

        both = run_on_ranks(2, run)
        assert both[0] == both[1]
        return both[0]

    assert "libnone.so: cannot open" in reasons(nccl="libnone.so")
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_NCCL_VERSION", "21200")
        assert "is NCCL 2.12.0, expected 2.14 or later" in reasons()
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_GPU_SHARED", "1")
        assert reasons() == "ranks 0 and 1 share a GPU"
    assert reasons(device=None) == "rank 0: TensorFlow sees no GPU"
    assert "rank 0: GPU 9: cudaSetDevice" in reasons(device=9)
    with caplog.at_level("INFO"):
        assert reasons() == ""
    assert caplog.messages == ["tfdist_ext: GPUs exchange by NCCL"]


def test_what_tables_may_have_of_gpus(connect, emulated_ops, monkeypatch):
    """Half of each rank's share of the smallest, the same on all ranks."""

    def tables(**how):
        def run(group):
            device = how.get("device", -1)
            if group.rank == 0 and device != -1:
                device = 0
            return emulation.tables_of(group, emulated_ops, device)

        both = run_on_ranks(2, run)
        assert both[0] == both[1]
        return both[0]

    assert tables() == gpus.TableGpus(memory=0.5 * 2**34)
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_GPU_SHARED", "1")
        assert tables().memory == 0.25 * 2**34
    without = tables(device=None)
    assert without.memory is None
    assert without.reason == f"rank 1: {gpus.NO_GPU}"
    given = gpus.TableGpus(memory=10.0)
    for left in (6.0, 2.0, 0.0):
        given.reserve(4.0)
        assert given.memory == left


def test_a_group_without_gpus_says_so(emulated):
    def run(group):
        on_gpu(lambda: collective_ops.all_gather(group, tf.zeros([1]), tag=2))()

    for _, text in texts_of(2, run):
        assert "opened without a GPU; run the op on the CPU" in text


def test_a_payload_beside_rows_between_gpus_is_named(emulated_ops, connect):
    """Over NCCL a message has the number of rows, and nothing else."""
    nccl = [str(emulated_ops)]
    name = group_ops.gpu_offer(0, nccl, make_id=True).id
    with Rank() as rank:
        group_ops.group_gpus(rank.group.handle, 0, nccl, name)
        header = gather_header(2) | {"flags": DEVICE_FLAG}
        rank.peer[0].sendall(pack(header) + bytes(header["bytes"]))
        with pytest.raises(tf.errors.InternalError) as raised:
            on_gpu(rank.gather)()
    assert "rank 1 (b:1) sent 20 bytes and 5 as the" in raised.value.message
    assert (
        "between GPUs), expected a number of rows, and no bytes: the rows "
        "themselves go between GPUs. Use the same version"
    ) in raised.value.message
