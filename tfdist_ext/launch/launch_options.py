# SPDX-License-Identifier: Apache-2.0
"""The command line of `tfdist-run`, and the host file that it names."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import os
import pathlib
import re
import shlex
from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.comm import addresses
from tfdist_ext.launch import launched as launched_lib
from tfdist_ext.launch import live_stats
from tfdist_ext.launch.variables import CHECK_VARIABLE
from tfdist_ext.launch.variables import LaunchError

# Names that ssh takes as a host, and never as an option of its own.
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[\w.-]+)?")
_MOST_SLOTS = 4096


@dataclasses.dataclass(frozen=True)
class Host:
    """A host of the host file.

    Attributes:
        login: argument of ssh: a host, or user@host. An IPv6 address has no
            brackets.
        slots: number of ranks that the host takes.
    """

    login: str
    slots: int

    @property
    def name(self) -> str:
        """Name or address by which other hosts reach it."""
        return self.login.rpartition("@")[2]


def read_hostfile(path: pathlib.Path) -> list[Host]:
    """Reads a host file.

    Args:
        path: path of the file.

    Returns:
        The hosts, in the order in which the file first names them; the slots of
        a host with several lines are added up.

    Raises:
        ValueError: the file cannot be read, a line is invalid, or there is no
            host.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            login, count = _login(words[0]), _slots(words[1:])
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        slots[login] = slots.get(login, 0) + count
    if not slots:
        raise ValueError(f"{path} names no host")
    return [Host(login, count) for login, count in slots.items()]


def first_hosts(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """The first hosts, with as many slots as there are ranks.

    Raises:
        ValueError: there are too few slots.
    """
    total = sum(host.slots for host in hosts)
    if ranks > total:
        raise ValueError(f"{ranks} ranks do not fit into {total} slots")
    taken = []
    for host in hosts:
        if ranks > 0:
            taken.append(Host(host.login, min(host.slots, ranks)))
        ranks -= host.slots
    return taken


def _login(word: str) -> str:
    """The argument of ssh for the first word of a line.

    Raises:
        ValueError: the word is no host.
    """
    user, at, host = word.rpartition("@")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not at or _NAME.fullmatch(user):
        if _IPV6.fullmatch(bare):
            with contextlib.suppress(ValueError):
                return f"{user}{at}{ipaddress.IPv6Address(bare)}"
        if _NAME.fullmatch(host):
            return word
    raise ValueError(
        f"{word!r} is not a name or address of a host, such as node1, "
        "10.0.0.1, [fd00::1] or me@node1; slots=N follows it after a space"
    )


def _slots(words: Sequence[str]) -> int:
    """Number of ranks that a host takes, from the other words of a line.

    Raises:
        ValueError: a word is invalid.
    """
    slots = 1
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("slots", "max_slots", "max-slots"):
            raise ValueError(f"{word!r} is not slots=N")
        if not value.isdecimal() or not 0 < int(value) <= _MOST_SLOTS:
            raise ValueError(
                f"slots must be from 1 to {_MOST_SLOTS}, not {value!r}"
            )
        if name == "slots":
            slots = int(value)
    return slots


DESCRIPTION = """\
Starts the ranks of a distributed TensorFlow program on this host, each as one
process with its TF_CONFIG, and waits for them. The output of rank 0 goes to
the terminal as it is; lines of other ranks carry their rank, without progress
bars. The first rank that fails stops the others, and its exit code becomes
that of tfdist-run (128 + the signal, if a signal ended it).

  tfdist-run -n 4 train.py --epochs 3       4 ranks on this host
  tfdist-run -n 2 -m package.train          a module instead of a file

Several hosts: the same command on each, with its own --node-rank.

  host0$ tfdist-run -n 4 --nnodes 2 --node-rank 0 --master host0:7000 train.py
  host1$ tfdist-run -n 4 --nnodes 2 --node-rank 1 --master host0:7000 train.py

Or once, if ssh reaches all of them without a password. FILE has a line
"host slots=4" for each host.

  $ tfdist-run --hostfile FILE train.py

If a cluster manager has set TF_CONFIG, or srun, mpirun or the like has started
tfdist-run for every rank, it starts one rank, which keeps these variables."""

# Most ranks per host, and most hosts: a message cannot have the addresses of
# more.
_MOST = 4096
_STATS_SECONDS = 10.0
_CHECKS = ("auto", "always", "error", "off")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; ends with a message if it is wrong.

    Args:
        arguments: arguments without the program's name; None for `sys.argv`.

    Returns:
        The options, and as `launched` the rank for which another launcher has
        started this one, or None.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options, os.environ)
    return options


def _check(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> None:
    """Ends with a message if options contradict each other."""
    several = options.nnodes > 1 or options.hostfile is not None
    options.launched = None
    options.hosts = []
    if options.stats_json is not None:
        if options.hostfile is not None:
            parser.error(
                "--stats-json is for the ranks of one host: with --hostfile "
                "each host has a launcher of its own. Leave it out, or start "
                "the hosts with --nnodes"
            )
        if options.stats is None:
            options.stats = _STATS_SECONDS
    if "TF_CONFIG" in environment:
        variable = "TF_CONFIG"
        placed = "TF_CONFIG is set, so a cluster manager has placed this rank"
    elif launched := None if several else _launched(parser, environment):
        options.launched = launched
        variable = launched.variable.partition("=")[0]
        placed = (
            f"{launched.launcher} has started tfdist-run {launched.size} times "
            f"({launched.variable}), once for every rank"
        )
    else:
        variable = placed = ""
    if placed and (options.n not in (None, 1) or several):
        parser.error(
            f"{placed}, but -n {options.n or 1} --nnodes {options.nnodes} asks "
            f"for more ranks. Leave -n, --nnodes and --hostfile out, or unset "
            f"{variable}."
        )
    if placed and options.max_restarts:
        parser.error(
            f"{placed}: --max-restarts is for ranks that tfdist-run -n, "
            "--nnodes or --hostfile starts. Let the launcher that started "
            "these ranks start them again; callbacks.Resume continues then"
        )
    if options.min_ranks is not None and not (options.max_restarts and several):
        parser.error(
            "--min-ranks needs --max-restarts, and --nnodes of at least 2 or "
            "--hostfile: on one host all ranks come back"
        )
    if options.hostfile is not None:
        _read_hosts(parser, options)
        return
    options.n = options.n or 1
    if several and (options.master is None or options.node_rank is None):
        parser.error("--nnodes needs --node-rank and --master HOST:PORT")
    if not several and (options.master or options.node_rank):
        parser.error("--master and --node-rank need --nnodes of at least 2")
    if several and not 0 <= options.node_rank < options.nnodes:
        parser.error(
            f"--node-rank must be in [0, {options.nnodes}). "
            f"Received: {options.node_rank}"
        )


def _read_hosts(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    """Finds the hosts of all ranks, and how many ranks each takes."""
    given = (options.nnodes > 1, options.node_rank, options.master)
    if any(each not in (None, False) for each in (*given, options.host)):
        parser.error(
            "--hostfile starts the ranks of all hosts from here: leave "
            "--nnodes, --node-rank, --master and --host out"
        )
    try:
        hosts = read_hostfile(options.hostfile)
        options.hosts = hosts
        if options.n is not None:
            options.hosts = first_hosts(hosts, options.n)
    except ValueError as error:
        parser.error(f"argument --hostfile: {error}")
    options.n = sum(host.slots for host in options.hosts)
    mixed = {addresses.is_local_name(host.name) for host in options.hosts}
    if len(mixed) > 1:
        parser.error(
            "argument --hostfile: other hosts cannot reach ranks at "
            "localhost; name this host as they do"
        )


def _launched(
    parser: argparse.ArgumentParser, environment: Mapping[str, str]
) -> launched_lib.Launched | None:
    """The rank for which another launcher has started this one."""
    try:
        return launched_lib.read(environment)
    except LaunchError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist-run",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-n",
        type=_positive,
        metavar="RANKS",
        help="ranks to start on this host (default 1), or on all hosts of "
        "--hostfile (default: what fits)",
    )
    add(
        "-m",
        "--module",
        action="store_true",
        help="SCRIPT is the name of a module, as in python -m",
    )
    add(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the ranks; may be repeated",
    )
    add(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="also write all output of rank R, unchanged, to DIR/rank-R.log",
    )
    add(
        "--grace",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="time for a rank that is asked to stop, as by a SIGTERM to "
        "tfdist-run, to save before it is killed (default 30)",
    )
    _add_stats_options(parser)
    _add_restart_options(parser)
    _add_host_options(parser)
    add("script", metavar="SCRIPT", help="the Python program to run")
    add(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help="its arguments, passed on as they are",
    )
    return parser


def _add_stats_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("while ranks run").add_argument
    add(
        "--stats",
        action="store_const",
        const=_STATS_SECONDS,
        help="print a line every 10 seconds: steps and MB sent per second, "
        "the slowest rank, memory; of each host where there are several",
    )
    add(
        "--stats-every",
        dest="stats",
        type=_interval,
        metavar="SECONDS",
        help="the same at another interval, of at least 1",
    )
    add(
        "--stats-json",
        type=pathlib.Path,
        metavar="FILE",
        help="add each of these lines to FILE as JSON too; implies --stats",
    )
    add(
        "--check",
        dest="env",
        type=_check_mode,
        action="append",
        metavar="MODE",
        help="compare the first step of each fit with that of one process: "
        "always, error (raise where they differ) or off; the program's "
        "own argument of its strategy takes precedence",
    )


def _add_restart_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("after a failure").add_argument
    add(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start all ranks again when one has failed, N times at most "
        "(default 0); on several hosts the same for all",
    )
    add(
        "--min-ranks",
        type=_positive,
        metavar="M",
        help="start again without hosts that do not come back, if M ranks are "
        "left (default: all must come back); with --nnodes host 0 must stay",
    )
    add(
        "--restart-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for hosts that have not come back (default 60)",
    )


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("several hosts")
    add = hosts.add_argument
    add(
        "--hostfile",
        type=pathlib.Path,
        metavar="FILE",
        help='lines "HOST slots=N" of all hosts, whose ranks ssh starts; '
        "program, Python and this folder must have the same paths there",
    )
    add(
        "--ssh-options",
        type=_words,
        default=[],
        metavar="OPTIONS",
        help="for --hostfile, as in --ssh-options '-p 2222 -i key'",
    )
    add(
        "--nnodes",
        type=_positive,
        default=1,
        metavar="N",
        help="hosts that run this command (default 1)",
    )
    add(
        "--node-rank",
        type=int,
        metavar="R",
        help="number of this host, 0 to N-1; ranks are numbered in this order",
    )
    add(
        "--master",
        type=_address,
        metavar="HOST:PORT",
        help="address for the start: one of host 0 that the other hosts reach, "
        "and any free port on it. The ranks use other ports, which "
        "tfdist-run chooses",
    )
    add(
        "--host",
        type=_host,
        metavar="HOST",
        help="address of this host for the others (default: the one from which "
        "it connects to the master)",
    )
    add(
        "--start-timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for the other hosts (default 300)",
    )
    add(
        "--allow-unauthenticated",
        action="store_true",
        help="with --nnodes: start without TFDIST_SECRET or "
        "TFDIST_SECRET_FILE, in a network that you trust",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(
            f"must be a number of at least 1 and at most {_MOST}, not {text}"
        )
    return int(text)


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, not {text}")
    return value


def _interval(text: str) -> float:
    value = _seconds(text)
    if value < live_stats.SECONDS:
        raise argparse.ArgumentTypeError(
            f"must be at least {live_stats.SECONDS:g}, since ranks report "
            f"once a second. Received: {text}"
        )
    return value


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text}") from error


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text}")
    if name == "TF_CONFIG":
        raise argparse.ArgumentTypeError(
            "cannot set TF_CONFIG, which every rank gets from tfdist-run"
        )
    return name, value


def _check_mode(text: str) -> tuple[str, str]:
    if text not in _CHECKS:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(_CHECKS)}, not {text}"
        )
    return CHECK_VARIABLE, text


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    bare = ":" in host and not (host[0] == "[" and host[-1] == "]")
    host = host.strip("[]")
    if not host or bare or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(
            f"must be HOST:PORT, and [HOST]:PORT for IPv6, not {text}"
        )
    return host, int(port)


def _host(text: str) -> str:
    host = text.strip("[]")
    try:
        return str(ipaddress.ip_address(host.partition("%")[0])) and host
    except ValueError:
        pass
    if not host or ":" in host:
        raise argparse.ArgumentTypeError(
            f"must be a name or an address without a port, not {text}"
        )
    return host
