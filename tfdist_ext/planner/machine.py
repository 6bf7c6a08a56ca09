# SPDX-License-Identifier: Apache-2.0
"""What the ranks' machines can do, as plain numbers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds that a plan is made for, see `tfdist_ext.measure_machine`.

        plan(tables, features, world_size, **machine.speeds())

    Attributes:
        link_bytes_per_second: that a rank sends, and receives at once, while
            all ranks do.
        read_bytes_per_second: of rows of a table that a rank reads at random,
            while all ranks do.
        cores: processor cores that a rank has for itself; plans do not use
            it.
    """

    link_bytes_per_second: float
    read_bytes_per_second: float
    cores: float

    def speeds(self) -> dict[str, float]:
        """The arguments of `plan` that say the same."""
        return {
            "link_bytes_per_second": self.link_bytes_per_second,
            "read_bytes_per_second": self.read_bytes_per_second,
        }

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"link {self.link_bytes_per_second / 1e6:.0f} MB/s, rows read at "
            f"{self.read_bytes_per_second / 1e9:.2f} GB/s, "
            f"{self.cores:g} cores per rank"
        )
