// SPDX-License-Identifier: Apache-2.0
//
// Combine and its gradient on a GPU. The numbers are in device memory, the
// sample_ids in host memory.
#include <algorithm>
#include <vector>

#include "custom_ops/gpu/gpu_work.h"
#include "custom_ops/lookup/combine_functor_gpu.h"
#include "custom_ops/lookup/combine_kernel.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelContext;

// Appends the rows of all samples for a range of columns, one sample after
// another. The rows of a sample are in the order of the sections.
void AddSegments(const CombineColumns& columns, int64_t samples,
                 std::vector<int64_t>* row_splits,
                 std::vector<int64_t>* firsts) {
  const size_t begin = row_splits->size() - 1;
  row_splits->resize(begin + samples + 1, 0);
  int64_t* ends = row_splits->data() + begin + 1;
  for (const CombineSection& section : columns.sections) {
    for (int64_t k = 0; k < section.samples; ++k) ++ends[section.sample_ids[k]];
  }
  std::vector<int64_t> next(samples);
  for (int64_t s = 0; s < samples; ++s) {
    next[s] = ends[s - 1];
    ends[s] += ends[s - 1];
  }
  firsts->resize(row_splits->back());
  for (const CombineSection& section : columns.sections) {
    for (int64_t k = 0; k < section.samples; ++k) {
      (*firsts)[next[section.sample_ids[k]]++] =
          section.first_value + k * columns.width;
    }
  }
}

struct OnGpu {
  static absl::Status Combine(OpKernelContext* ctx,
                              const std::vector<CombineColumns>& columns,
                              const float* parts,
                              const std::vector<CombineResult>& results) {
    std::vector<GpuCombineBlock> blocks;
    std::vector<int64_t> row_splits = {0}, firsts;
    int64_t widest = 0;
    for (const CombineColumns& each : columns) {
      const CombineResult& to = results[each.feature];
      if (to.samples == 0) continue;
      const int64_t segments = row_splits.size() - 1;
      blocks.push_back({segments, each.width, to.dim, to.out + each.column});
      AddSegments(each, to.samples, &row_splits, &firsts);
      widest = std::max(widest, each.width);
    }
    if (blocks.empty()) return absl::OkStatus();
    GpuWork work(ctx);
    Upload upload(&work);
    const size_t blocks_at = upload.Add(blocks);
    const size_t splits_at = upload.Add(row_splits);
    const size_t firsts_at = upload.Add(firsts);
    TF_RETURN_IF_ERROR(upload.Start());
    const GpuCombine args = {upload.At<GpuCombineBlock>(blocks_at),
                             static_cast<int64_t>(blocks.size()),
                             widest,
                             static_cast<int64_t>(row_splits.size()) - 1,
                             upload.At<int64_t>(splits_at),
                             upload.At<int64_t>(firsts_at),
                             parts};
    return work.Launched(CombineGpu(args, work.stream()));
  }

  static absl::Status CombineGrad(OpKernelContext* ctx,
                                  const std::vector<CombineColumns>& columns,
                                  const std::vector<CombineGradient>& grads,
                                  float scale, float* values) {
    std::vector<GpuCombineSection> sections;
    std::vector<int32_t> sample_ids;
    int64_t widest = 0;
    for (const CombineColumns& each : columns) {
      const CombineGradient& from = grads[each.feature];
      for (const CombineSection& section : each.sections) {
        if (section.samples == 0) continue;
        const int64_t entries = sample_ids.size();
        sections.push_back({entries, section.first_value, each.width, from.dim,
                            from.grad + each.column});
        sample_ids.insert(sample_ids.end(), section.sample_ids,
                          section.sample_ids + section.samples);
        widest = std::max(widest, each.width);
      }
    }
    if (sections.empty()) return absl::OkStatus();
    GpuWork work(ctx);
    Upload upload(&work);
    const size_t sections_at = upload.Add(sections);
    const size_t ids_at = upload.Add(sample_ids);
    TF_RETURN_IF_ERROR(upload.Start());
    const GpuCombineGrad args = {upload.At<GpuCombineSection>(sections_at),
                                 static_cast<int64_t>(sections.size()),
                                 widest,
                                 static_cast<int64_t>(sample_ids.size()),
                                 upload.At<int32_t>(ids_at),
                                 scale,
                                 values};
    return work.Launched(CombineGradGpu(args, work.stream()));
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Combine")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("sample_ids")
                            .HostMemory("sample_splits")
                            .HostMemory("samples")
                            .HostMemory("gradient_scale"),
                        CombineKernel<OnGpu>);
REGISTER_KERNEL_BUILDER(Name("Tfdist>CombineGrad")
                            .Device(kGpuDevice)
                            .Label(kGpuLabel)
                            .HostMemory("sample_ids")
                            .HostMemory("sample_splits")
                            .HostMemory("gradient_scale"),
                        CombineGradKernel<OnGpu>);

}  // namespace
}  // namespace tfdist
