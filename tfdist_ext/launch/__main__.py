# SPDX-License-Identifier: Apache-2.0
"""`python -m tfdist_ext.launch`, the same as the command `tfdist-run`."""

from tfdist_ext.launch.command import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
