# SPDX-License-Identifier: Apache-2.0
"""Times the forms of an all_reduce, in turns in the same processes.

Ranks of one host share memory; hosts are network namespaces where --egress says
what they send and receive at most, and else talk over loopback. The result is
checked. Times are medians over turns, of the slowest rank.
"""

import argparse
import contextlib
import ctypes
import multiprocessing
import pathlib
import socket
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe

import tensorflow as tf

from benchmarks import network
from tfdist_ext.comm import connection
from tfdist_ext.comm.connection import Connection
from tfdist_ext.comm.process_group import ALL_REDUCE_FORMS
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops

_CLONE_NEWNET = 0x40000000
_CHOSEN = ""
_FORMS = (*ALL_REDUCE_FORMS, _CHOSEN)

# By form, rank and peer.
Joined = dict[str, list[list[Connection | None]]]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.forms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, help="(4)")
    parser.add_argument(
        "--per-host", type=int, help="ranks of a host (all of them)"
    )
    parser.add_argument(
        "--egress", type=network.check_rate, help="of a host, as 1gbit"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[64, 2**12, 2**15, 2**17, 2**20, 2**24],
        help="bytes (64 to 16 M)",
    )
    parser.add_argument("--turns", type=int, default=5, help="(5)")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="per turn and form (0.3)"
    )
    return parser


def main() -> None:
    """Prints a line for each size."""
    arguments = make_parser().parse_args()
    ranks, per_host = arguments.ranks, arguments.per_host or arguments.ranks
    hosts = [rank // per_host for rank in range(ranks)]
    with contextlib.ExitStack() as stack:
        if arguments.egress:
            made = network.namespaces(hosts[-1] + 1, arguments.egress)
            places = stack.enter_context(made)
        else:
            places = network.loopback(hosts[-1] + 1)
        joined = {form: _join(hosts, places) for form in _FORMS}
        pipes = []
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            # Forked, since it has the connections.
            process = multiprocessing.get_context("fork").Process(
                target=_serve, args=(rank, hosts, joined, theirs), daemon=True
            )
            process.start()
            pipes.append(ours)
        names = "".join(f"{form or 'chosen':>10}" for form in _FORMS)
        print(f"{'bytes':>10}{names}   ms")
        for size in arguments.sizes:
            times = _measure(pipes, size, arguments.turns, arguments.seconds)
            print(
                f"{size:>10}"
                + "".join(f"{1e3 * times[form]:>10.2f}" for form in _FORMS),
                flush=True,
            )


def _measure(
    pipes: list[Pipe], size: int, turns: int, seconds: float
) -> dict[str, float]:
    def run(form: str, steps: int) -> float:
        for pipe in pipes:
            pipe.send((form, size, steps))
        return max(pipe.recv() for pipe in pipes)

    steps = {}
    for form in _FORMS:
        run(form, 2)  # traces it
        steps[form] = min(1000, max(2, int(seconds / run(form, 3))))
    times: dict[str, list[float]] = {form: [] for form in _FORMS}
    for _ in range(turns):
        for form in _FORMS:
            times[form].append(run(form, steps[form]))
    return {form: statistics.median(all_) for form, all_ in times.items()}


def _serve(rank: int, hosts: list[int], joined: Joined, pipe: Pipe) -> None:
    groups = {
        form: ProcessGroup(
            rank,
            len(hosts),
            [f"host{host}:{1 + peer}" for peer, host in enumerate(hosts)],
            lambda form=form: joined[form][rank],
            all_reduce=form,
        )
        for form in _FORMS
    }

    @tf.function
    def total(form: str, x: tf.Tensor) -> tf.Tensor:
        return collective_ops.all_reduce(groups[form], [x], tag=2)[0]

    while True:
        try:
            form, size, steps = pipe.recv()
        except EOFError:
            return
        x = tf.ones([size // 4])
        durations = []
        for _ in range(steps):
            start = time.perf_counter()
            sums = total(form, x)
            durations.append(time.perf_counter() - start)
        assert (sums.numpy() == len(hosts)).all()
        pipe.send(statistics.median(durations))


def _join(
    hosts: list[int], places: network.Network
) -> list[list[Connection | None]]:
    ranks = range(len(hosts))
    table: list[list[Connection | None]] = [
        [None for _ in ranks] for _ in ranks
    ]
    for rank in ranks:
        for peer in range(rank):
            ends = [
                _socket_pair(places, hosts[rank], hosts[peer]) for _ in range(2)
            ]
            here, there = zip(*ends, strict=True)
            shared: tuple[connection.SharedMemory | None, ...] = (None, None)
            if hosts[rank] == hosts[peer]:
                shared = connection.make_pair()
            table[rank][peer] = Connection(*here, shared[0])
            table[peer][rank] = Connection(*there, shared[1])
    return table


def _socket_pair(
    places: network.Network, host: int, other: int
) -> tuple[socket.socket, socket.socket]:
    with _inside(places, host):
        server = socket.create_server((places.hosts[host], 0))
    with server:
        with _inside(places, other):
            there = socket.create_connection(server.getsockname())
        return server.accept()[0], there


@contextlib.contextmanager
def _inside(places: network.Network, host: int) -> Iterator[None]:
    """Makes sockets in the namespace of a host."""
    if not places.prefixes[host]:
        yield
        return
    name = places.prefixes[host][-1]
    with (
        open("/proc/self/ns/net") as home,
        open(pathlib.Path("/run/netns", name)) as there,
    ):
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:  # os.setns of Python 3.12
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


if __name__ == "__main__":
    main()
