// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "custom_ops/common/parallel_tasks.h"
#include "custom_ops/lookup/combine_kernel.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>Combine")
    .Input("parts: float")
    .Input("sample_ids: int32")
    .Input("sample_splits: int64")
    .Input("samples: int64")
    .Input("gradient_scale: float")
    .Output("results: F * float")
    .Attr("F: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("features: list(string)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("dims: list(int)")
    .Attr("row_parts: list(int)")
    .Attr("column_parts: list(int)")
    .Attr("ranks: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      if (static_cast<int>(dims.size()) != c->num_outputs()) {
        return InvalidArgument("dims must have one element per feature. ",
                               "Received: ", dims.size(), " for ",
                               c->num_outputs(), " results");
      }
      for (size_t f = 0; f < dims.size(); ++f) {
        c->set_output(f, c->Matrix(InferenceContext::kUnknownDim, dims[f]));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Combines the pooled results of all owners, the last stage of a lookup.

Row parts of a table are summed in order, and column parts are concatenated.

parts: values of Lookup that this rank has received, ordered by sender, feature
  and sample.
sample_ids: sample of each received vector, ascending for each sender and
  feature.
sample_splits: [world_size, F], number of samples of each sender and feature.
samples: [F], number of samples of each feature in the batch of this rank.
gradient_scale: scalar, factor of the gradient.
results: [samples, dim] for each feature, zeros for samples without ids.
features, vocabulary_sizes, dims, row_parts, column_parts, ranks: as for
  EncodeIds.
)doc");

REGISTER_OP("Tfdist>CombineGrad")
    .Input("grads: F * float")
    .Input("sample_ids: int32")
    .Input("sample_splits: int64")
    .Input("gradient_scale: float")
    .Output("values: float")
    .Attr("F: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("features: list(string)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("dims: list(int)")
    .Attr("row_parts: list(int)")
    .Attr("column_parts: list(int)")
    .Attr("ranks: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Computes the gradient of Combine with respect to its parts.

grads: gradients of the results of Combine.
sample_ids, sample_splits: as for Combine.
features, vocabulary_sizes, dims, row_parts, column_parts, ranks: as for
  EncodeIds.
gradient_scale: scalar, factor of the gradient. If it is 0, the result is 0 even
  if `grads` contain NaN.
values: gradients of the parts, in the same order.
)doc");

// Returns the approximate time for a row: about a nanosecond for four numbers.
int64_t Nanoseconds(int64_t width) { return width / 4 + 4; }

struct OnCpu {
  static absl::Status Combine(OpKernelContext* ctx,
                              const std::vector<CombineColumns>& columns,
                              const float* parts,
                              const std::vector<CombineResult>& results) {
    std::vector<Task> tasks;
    for (const CombineColumns& each : columns) {
      tasks.push_back({results[each.feature].samples,
                       Nanoseconds(each.width) *
                           static_cast<int64_t>(each.sections.size())});
    }
    ParallelTasks(ctx->device()->tensorflow_cpu_worker_threads()->workers,
                  tasks, [&](size_t i, int64_t begin, int64_t end) {
                    const CombineResult& to = results[columns[i].feature];
                    CombineCpu(columns[i], parts, to.dim, begin, end, to.out);
                  });
    return absl::OkStatus();
  }

  static absl::Status CombineGrad(OpKernelContext* ctx,
                                  const std::vector<CombineColumns>& columns,
                                  const std::vector<CombineGradient>& grads,
                                  float scale, float* values) {
    struct Part {
      const CombineColumns* columns;
      const CombineSection* section;
    };
    std::vector<Part> parts;
    std::vector<Task> tasks;
    for (const CombineColumns& each : columns) {
      for (const CombineSection& section : each.sections) {
        parts.push_back({&each, &section});
        tasks.push_back({section.samples, Nanoseconds(each.width)});
      }
    }
    ParallelTasks(
        ctx->device()->tensorflow_cpu_worker_threads()->workers, tasks,
        [&](size_t i, int64_t begin, int64_t end) {
          const CombineGradient& from = grads[parts[i].columns->feature];
          CombineGradCpu(*parts[i].columns, *parts[i].section, from.grad,
                         from.dim, scale, begin, end, values);
        });
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>Combine").Device(tensorflow::DEVICE_CPU),
                        CombineKernel<OnCpu>);
REGISTER_KERNEL_BUILDER(
    Name("Tfdist>CombineGrad").Device(tensorflow::DEVICE_CPU),
    CombineGradKernel<OnCpu>);

}  // namespace
}  // namespace tfdist
