# SPDX-License-Identifier: Apache-2.0
"""The command `tfdist-report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tfdist_ext.tracing import bounds
from tfdist_ext.tracing import trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `tfdist-report`.

    Args:
        arguments: the command line without the program's name; `sys.argv` by
            default.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="tfdist-report", description="Says what a run has been like."
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    of_trace = kinds.add_parser(
        "trace", help="what bounds the steps of a trace of callbacks.Timeline"
    )
    of_trace.add_argument("file")
    options = parser.parse_args(arguments)
    try:
        print(bounds.report(trace.read(options.file)))
    except (OSError, ValueError, KeyError) as error:
        print(f"tfdist-report: {error}", file=sys.stderr)
        return 1
    return 0
