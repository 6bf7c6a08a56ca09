# SPDX-License-Identifier: Apache-2.0
"""What the command lines of the examples have in common."""

import argparse

SHARDINGS = ("auto", "row_wise", "column_wise", "data_parallel")
WIRE_DTYPES = ("float32", "bfloat16", "float16")


class _HelpFormatter(
    argparse.ArgumentDefaultsHelpFormatter,
    argparse.RawDescriptionHelpFormatter,
):
    """Shows the defaults, and keeps the commands of the description."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, []):
            return action.help
        return super()._get_help_string(action)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help starts with the description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=_HelpFormatter
    )
