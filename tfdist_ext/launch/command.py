# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist-run`: starts the ranks of one host, and restarts them."""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import secrets
import signal
import sys
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.comm import addresses as addresses_lib
from tfdist_ext.comm import handshake as secret_lib
from tfdist_ext.comm import hosts
from tfdist_ext.comm import listener
from tfdist_ext.comm.listener import Listening
from tfdist_ext.launch import launch_options
from tfdist_ext.launch import local_ranks
from tfdist_ext.launch import ssh_hosts
from tfdist_ext.launch.local_ranks import Ended

# Tells ranks the number of restarts; 0 for the first start.
RESTARTS_VARIABLE = "TFDIST_RESTART"

Attempt = Callable[[argparse.Namespace], Ended]


def run_with_restarts(options: argparse.Namespace, attempt: Attempt) -> int:
    """Runs a job until it has succeeded, was stopped, or fails too often.

    Args:
        options: options of the command line.
        attempt: runs all ranks of this host once, with options like these.

    Returns:
        The exit code of the last run.
    """
    restarts = 0
    while True:
        ended = attempt(_options_of(options, restarts))
        if (
            ended.code == 0
            or ended.by_signal
            or restarts >= options.max_restarts
        ):
            return ended.code
        restarts += 1
        print(
            f"tfdist-run: starts again ({restarts} of {options.max_restarts} "
            "restarts)",
            file=sys.stderr,
            flush=True,
        )


def _options_of(
    options: argparse.Namespace, restarts: int
) -> argparse.Namespace:
    """The options of one start: with its number, and logs of its own."""
    own = copy.copy(options)
    own.restarts = restarts
    own.env = [(RESTARTS_VARIABLE, str(restarts)), *options.env]
    if restarts:
        # Hosts connect when their ranks have ended. Host 0 waits for them. They
        # wait for host 0 and for the hosts that it waits for.
        waits = options.restart_timeout + options.grace
        own.start_timeout = waits if options.node_rank == 0 else 2 * waits
        if options.hosts:  # the connections have ended
            own.start_timeout = options.restart_timeout
        if options.log_dir is not None:
            own.log_dir = pathlib.Path(options.log_dir, f"restart-{restarts}")
    return own


LOOPBACK = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `tfdist-run`.

    Args:
        arguments: the command line without the program's name; `sys.argv` by
            default.

    Returns:
        0 if every rank succeeded, else the exit code of the first rank that
        failed, or 128 + signal.
    """
    options = launch_options.parse(arguments)
    return explained(options, lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if options.hosts:
        return run_with_restarts(options, _run_by_ssh)
    if "TF_CONFIG" in os.environ or options.launched is not None:
        return _run_ranks([_rank_under_manager(options)], options).code
    if options.nnodes == 1:
        return run_with_restarts(options, _run_on_this_host)
    return run_with_restarts(options, _run_on_several_hosts)


def _run_by_ssh(options: argparse.Namespace) -> local_ranks.Ended:
    return ssh_hosts.run(options.hosts, options, os.environ)


def _run_ranks(
    ranks: Sequence[local_ranks.Rank],
    options: argparse.Namespace,
    nodes: local_ranks.Nodes | None = None,
) -> local_ranks.Ended:
    return local_ranks.run(
        ranks,
        grace=options.grace,
        log_dir=options.log_dir,
        nodes=nodes,
        stats=options.stats,
        stats_json=options.stats_json,
    )


def _run_on_this_host(options: argparse.Namespace) -> local_ranks.Ended:
    with listener.reserve_ports(
        options.n, LOOPBACK, own_ports(options)
    ) as reserved:
        workers = [f"{LOOPBACK}:{port}" for port in reserved]
        secret = "" if _secret() else secrets.token_hex(32)
        return _run_ranks(ranks_of_host(options, workers, 0, secret), options)


def explained(options: argparse.Namespace, run: Callable[[], int]) -> int:
    """Runs a function; prints an error as one line, without a traceback.

    Args:
        options: options of the command line.
        run: returns an exit code.

    Returns:
        That exit code, or another one that is not 0.
    """
    try:
        return run()
    except hosts.RendezvousError as error:
        print(f"tfdist-run: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # too many ports or processes, no log folder
        print(
            f"tfdist-run: cannot start {options.n} ranks: {error}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:  # before the first rank was started
        return 128 + signal.SIGINT


def _run_on_several_hosts(options: argparse.Namespace) -> local_ranks.Ended:
    secret = _secret()
    where = addresses_lib.of_this_user(*options.master)
    if not (secret or options.allow_unauthenticated or isinstance(where, str)):
        raise hosts.RendezvousError(
            "this job has no secret, so anybody who reaches --master "
            f"{addresses_lib.join(*options.master)} could join it. Set the "
            f"same {secret_lib.SECRET} on all hosts, or "
            f"{secret_lib.SECRET_FILE} to the path of a file that only you "
            "can read, with the output of `openssl rand -hex 32`. In a "
            "network that you trust, pass --allow-unauthenticated instead"
        )
    # It is not loopback: other hosts may connect to any interface.
    with listener.reserve_ports(options.n, "", own_ports(options)) as reserved:
        rendezvous = hosts.exchange_addresses(
            master=options.master,
            node_rank=options.node_rank,
            nnodes=options.nnodes,
            host=options.host,
            ports=reserved,
            timeout=options.start_timeout,
            secret=secret,
            min_ranks=options.min_ranks if options.restarts else None,
            allow_unauthenticated=options.allow_unauthenticated,
        )
        with rendezvous:
            ranks = ranks_of_host(
                options,
                rendezvous.workers,
                rendezvous.first_rank,
                rendezvous.secret,
            )
            return _run_ranks(ranks, options, rendezvous)


def own_ports(options: argparse.Namespace) -> range:
    """The range of ports that the user allows; rank 0 gets one of them."""
    try:
        return Listening.of({**os.environ, **dict(options.env)}).ports
    except ValueError as error:
        raise hosts.RendezvousError(str(error)) from error


def _secret() -> bytes:
    """The secret that the user has set, which ranks also find."""
    try:
        return secret_lib.find_secret(os.environ)
    except ValueError as error:
        raise hosts.RendezvousError(str(error)) from error


def ranks_of_host(
    options: argparse.Namespace,
    workers: Sequence[str],
    first_rank: int,
    secret: str,
) -> list[local_ranks.Rank]:
    """Describes the ranks of this host, one per local rank.

    Args:
        options: options of the command line.
        workers: addresses of all ranks.
        first_rank: first rank of this host.
        secret: secret for the ranks, empty if they find one by themselves.
    """
    ranks = []
    for local_rank in range(options.n):
        rank = first_rank + local_rank
        config = {
            "cluster": {"worker": list(workers)},
            "task": {"type": "worker", "index": rank},
        }
        environment = {
            **({secret_lib.SECRET: secret} if secret else {}),
            **_defaults(os.environ, rank, options.n),
            **_gpu(os.environ, local_rank, options.n),
            **dict(options.env),
            "TF_CONFIG": json.dumps(config),
        }
        ranks.append(
            local_ranks.Rank(
                rank, workers[rank], _command(options), environment
            )
        )
    return ranks


def _rank_under_manager(options: argparse.Namespace) -> local_ranks.Rank:
    """Describes the one rank that another launcher has placed."""
    own = dict(options.env)
    if (launched := options.launched) is not None:
        where = f"started by {launched.launcher}"
        return local_ranks.Rank(launched.rank, where, _command(options), own)
    try:
        config = json.loads(os.environ["TF_CONFIG"])
        rank = int(config["task"]["index"])
    except (
        LookupError,
        TypeError,
        ArithmeticError,
        ValueError,
        RecursionError,
    ):
        rank = 0  # the program reports the error itself
    return local_ranks.Rank(
        rank, "address in TF_CONFIG", _command(options), own
    )


def _command(options: argparse.Namespace) -> list[str]:
    module = ["-m"] if options.module else []
    return [sys.executable, *module, options.script, *options.arguments]


def _defaults(
    environment: Mapping[str, str], rank: int, ranks: int
) -> dict[str, str]:
    """Variables that a rank gets unless the user's environment has them."""
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // ranks))
    defaults = {
        # Ranks of one host share its cores.
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        # Rank 0 may bind the port that this launcher has reserved for it.
        listener.HELD_VARIABLE: "1",
    }
    if rank != 0:
        # Output to a pipe is then written at once, so a crash does not lose it.
        defaults["PYTHONUNBUFFERED"] = "1"
    return {k: v for k, v in defaults.items() if k not in environment}


def _gpu(
    environment: Mapping[str, str], local_rank: int, ranks: int
) -> dict[str, str]:
    """Selects one GPU per rank if the host has enough, else none."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu]
    else:
        driver = pathlib.Path("/proc/driver/nvidia/gpus")
        count = len(list(driver.iterdir())) if driver.is_dir() else 0
        gpus = [str(index) for index in range(count)]
    if ranks == 1 or len(gpus) < ranks:
        return {}
    return {"CUDA_VISIBLE_DEVICES": gpus[local_rank]}
