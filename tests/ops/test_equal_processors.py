# SPDX-License-Identifier: Apache-2.0
"""Lookups and updates give the same bits on every kind of x86-64 processor.

Ranks may have processors of different kinds, and each updates its copy of the
rows that all ranks hold.
"""

from __future__ import annotations

import hashlib
import pathlib
import subprocess

import pytest

from build_ops import library

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [
    "lookup/lookup_functor.cc",
    "lookup/lookup_grad_functor.cc",
    "optimizer/row_update_functor.cc",
]
# As in TFDIST_CLONES, with a flag of /proc/cpuinfo that a processor must have.
KINDS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
PROGRAM = """
#include <cstdio>
#include <vector>

#include "custom_ops/lookup/lookup_functor.h"
#include "custom_ops/lookup/lookup_grad_functor.h"
#include "custom_ops/optimizer/row_update_functor.h"

namespace tfdist {
uint32_t state = 1;
std::vector<float> Random(int64_t size) {
  std::vector<float> values(size);
  for (float& value : values) {
    state = state * 1664525 + 1013904223;
    value = static_cast<float>(state >> 8) / (1 << 23) - 1;
  }
  return values;
}
void Show(const std::vector<float>& values) {
  fwrite(values.data(), sizeof(float), values.size(), stdout);
}
template <typename Rule>
void Update(const Rule& rule, int64_t dim, int64_t slot_dim) {
  constexpr int64_t kRows = 40;
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < 20; ++i) rows.push_back(2 * i);
  const std::vector<float> grads = Random(rows.size() * dim);
  std::vector<float> table = Random(kRows * dim);
  std::vector<float> slots[3];
  RowBuffers buffers = {table.data(), {}, nullptr, {}};
  for (int k = 0; k < 3; ++k) {
    slots[k] = Random(kRows * slot_dim);
    for (float& value : slots[k]) value = value * value + 0.1f;
    buffers.slots[k] = slots[k].data();
  }
  const int64_t size = rows.size();
  rule.Apply({rows.data(), grads.data(), size, dim}, buffers, 0, size);
  Show(table);
  for (const auto& slot : slots) Show(slot);
}
void Run(int64_t dim) {
  const std::vector<float> table = Random(50 * dim);
  const std::vector<float> weights = Random(200);
  std::vector<int64_t> rows, splits = {0};
  std::vector<uint64_t> entries;
  for (int64_t i = 0; i < 200; ++i) {
    rows.push_back(i * 7 % 50);
    const bool first = i % 5 == 0;
    entries.push_back(2 * (i * 11 % 50 * dim) + first);
    if (i % 5 == 4) splits.push_back(i + 1);
  }
  std::vector<float> out(40 * dim);
  for (const float* each : {weights.data(), (const float*)nullptr}) {
    SegmentSumCpu({table.data(), dim, splits.data(), rows.data(), each,
                   out.data()}, 0, 40);
    Show(out);
    RowGradSumCpu({table.data(), dim, splits.data(), entries.data(), each,
                   out.data()}, 0, 40);
    Show(out);
  }
  Update(SgdRule{0.1f}, dim, dim);
  Update(MomentumRule{0.1f, 0.9f, true}, dim, dim);
  Update(AdagradRule{0.1f, 1e-7f}, dim, dim);
  Update(RowWiseAdagradRule{0.1f, 1e-7f, nullptr}, dim, 1);
  Update(AdamRule{0.1f, 0.1f, 0.001f, 1e-7f, true}, dim, dim);
  Update(FtrlRule{10, 0.5f, 0.1f, 0.2f, 0.1f}, dim, dim);
}
}  // namespace tfdist

int main() {
  for (int64_t dim : {1, 3, 5, 8, 16, 31, 58, 128, 300}) tfdist::Run(dim);
}
"""


def output(kind: str, folder: pathlib.Path) -> bytes:
    """What the kernels compute if they are compiled for a processor."""
    main = folder / "main.cc"
    main.write_text(PROGRAM)
    sources = [main, *(ROOT / "custom_ops" / each for each in SOURCES)]
    program = folder / kind
    command = ["g++", "-std=c++17", *library.OPTIMIZE, f"-march={kind}"]
    command += [f"-I{ROOT}", "-DTFDIST_NO_CLONES", "-Wno-psabi"]
    subprocess.run(
        [*command, *map(str, sources), "-o", str(program)],
        check=True,
        timeout=300,
    )
    return subprocess.run(
        [program], check=True, timeout=60, capture_output=True
    ).stdout


def test_the_same_bits_on_all_processors(tmp_path: pathlib.Path) -> None:
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    kinds = [kind for kind, flag in KINDS.items() if flag in flags]
    if len(kinds) < 2:
        pytest.skip("This processor runs kernels of one kind only.")
    results = {kind: output(kind, tmp_path) for kind in kinds}
    assert len(results["x86-64"]) > 100_000
    digests = {hashlib.sha256(each).hexdigest() for each in results.values()}
    assert len(digests) == 1, "another result on another processor"
