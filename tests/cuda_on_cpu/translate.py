# SPDX-License-Identifier: Apache-2.0
"""CUDA sources as C++: launches and dynamic shared memory are rewritten.

All else stays as it is; `cuda_runtime.h` beside this file gives it a meaning.
"""

from __future__ import annotations

import re

LAUNCH = "cuda_on_cpu::LaunchChecked"
DYNAMIC = re.compile(r"extern __shared__ ([\w ]+?) (\w+)\[\];")


def translate(text: str) -> str:
    """Rewrites every `kernel<<<grid, block, ...>>>(arguments)`."""
    while (at := text.find("<<<")) >= 0:
        start = start_of_name(text, at)
        end = text.index(">>>", at)
        opened = text.index("(", end)
        closed = end_of_call(text, opened)
        kernel = text[start:at].strip()
        text = (
            f"{text[:start]}{LAUNCH}([&] {{ {kernel}"
            f"{text[opened : closed + 1]}; }}, {text[at + 3 : end]})"
            f"{text[closed + 1 :]}"
        )
    return DYNAMIC.sub(
        r"\1* const \2 = cuda_on_cpu::DynamicShared<\1>();", text
    )


def start_of_name(text: str, end: int) -> int:
    """Finds where a name with template arguments begins that ends at `end`."""
    depth = 0
    end = len(text[:end].rstrip())
    while end > 0:
        letter = text[end - 1]
        depth += (letter == ">") - (letter == "<")
        if depth == 0 and not (letter.isalnum() or letter in "_:<>"):
            return end
        end -= 1
    return end


def end_of_call(text: str, opened: int) -> int:
    depth = 0
    for at in range(opened, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise ValueError(f"No end of this call: {text[opened : opened + 80]}")
