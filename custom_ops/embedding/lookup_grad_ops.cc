// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "id_lists.h"
#include "lookup_functor.h"
#include "parallel_segments.h"
#include "radix_sort.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace tfdist {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::InvalidArgument;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("Tfdist>LookupGrad")
    .Input("row_splits: int64")
    .Input("rows: int64")
    .Input("weights: float")
    .Input("grad: T")
    .Output("unique_rows: int64")
    .Output("row_grads: T")
    .Attr("T: {float} = DT_FLOAT")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle grad;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &grad));
      const auto rows = c->UnknownDim();
      c->set_output(0, c->Vector(rows));
      c->set_output(1, c->Matrix(rows, c->Dim(grad, 1)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradient of Lookup with respect to the rows it touched.

A row's summands are added in the order of the samples, so that the bits do not
depend on the number of threads.

row_splits: [S + 1], as given to Lookup.
rows: [n], as given to Lookup.
weights: [n] or [0], as given to Lookup.
grad: [S, d], gradient of Lookup's output.
unique_rows: [u], the distinct rows, ascending.
row_grads: [u, d], the gradient of every one of them.
)doc");

// What Lookup was given: sample s has the entries row_splits[s] ..
// row_splits[s + 1].
struct Entries {
  const int64_t* row_splits;
  const int64_t* rows;
  const float* weights;  // nullptr when all are 1
  int64_t samples;
  int64_t count;
  int sample_bits;  // enough to write a sample's number
};

// The entries of the rows in one range, ascending by row, within a row by
// sample: what one thread sorts. A key is row | sample from the top. The sort
// goes by the row and is stable, and the entries come in order of the samples.
class SortedEntries {
 public:
  // Takes the entries with rows in [low, high).
  void Build(const Entries& entries, int64_t low, int64_t high) {
    sample_bits_ = entries.sample_bits;
    low_ = low;
    const uint64_t range = high - low;
    int64_t selected = 0;
    for (int64_t i = 0; i < entries.count; ++i) {
      selected += static_cast<uint64_t>(entries.rows[i] - low) < range;
    }
    key_memory_.reset(new uint64_t[2 * selected]);
    sort_.keys = key_memory_.get();
    sort_.spare_keys = sort_.keys + selected;
    if (entries.weights != nullptr) {
      weight_memory_.reset(new uint32_t[2 * selected]);
      sort_.values = weight_memory_.get();
      sort_.spare_values = sort_.values + selected;
    }
    for (int64_t sample = 0; sample < entries.samples; ++sample) {
      const int64_t end = entries.row_splits[sample + 1];
      for (int64_t i = entries.row_splits[sample]; i < end; ++i) {
        const uint64_t row = entries.rows[i] - low;
        if (row >= range) continue;
        if (entries.weights != nullptr) {
          std::memcpy(sort_.values + size_, entries.weights + i, sizeof(float));
        }
        sort_.keys[size_++] = row << sample_bits_ | sample;
      }
    }
    RadixSort(size_, sample_bits_, sample_bits_ + BitWidth(range - 1), &sort_);
    for (int64_t i = 0; i < size_; ++i) distinct_ += IsFirst(i);
  }

  // Writes the sorted entries as segments, one per distinct row, that start at
  // entry `first_entry`: rows, the ends of the segments, samples, weights.
  void Write(int64_t first_entry, int64_t* unique_rows, int64_t* row_ends,
             int64_t* samples, float* weights) const {
    const uint64_t sample_mask = (uint64_t{1} << sample_bits_) - 1;
    int64_t row = 0;
    // Written for every entry and kept from a row's last one: which entries
    // those are is unpredictable, and a branch would cost more than a store.
    for (int64_t i = 0; i < size_; ++i) {
      samples[i] = sort_.keys[i] & sample_mask;
      unique_rows[row] = low_ + (sort_.keys[i] >> sample_bits_);
      row_ends[row] = first_entry + i + 1;
      row += i + 1 == size_ || IsFirst(i + 1);
    }
    if (weights != nullptr) {
      std::memcpy(weights, sort_.values, size_ * sizeof(float));
    }
  }

  int64_t size() const { return size_; }
  int64_t distinct() const { return distinct_; }

 private:
  // Whether entry i is the first one of its row.
  bool IsFirst(int64_t i) const {
    return i == 0 || (sort_.keys[i] ^ sort_.keys[i - 1]) >> sample_bits_ != 0;
  }

  int sample_bits_ = 0;
  int64_t low_ = 0;
  int64_t size_ = 0;
  int64_t distinct_ = 0;
  std::unique_ptr<uint64_t[]> key_memory_;
  std::unique_ptr<uint32_t[]> weight_memory_;
  SortBuffers sort_{};
};

class LookupGradOp : public OpKernel {
 public:
  explicit LookupGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    const Tensor& row_splits = ctx->input(0);
    const Tensor& rows = ctx->input(1);
    const Tensor& weights = ctx->input(2);
    const Tensor& grad = ctx->input(3);
    const int64_t samples = row_splits.NumElements() - 1;
    OP_REQUIRES_OK(ctx, CheckIdList(0, rows, row_splits, weights, samples));
    OP_REQUIRES(ctx, grad.dims() == 2 && grad.dim_size(0) == samples,
                InvalidArgument(
                    "grad must have one row for each of the ", samples,
                    " samples. Received shape: ", grad.shape().DebugString()));
    const Entries entries = {static_cast<const int64_t*>(row_splits.data()),
                             static_cast<const int64_t*>(rows.data()),
                             weights.NumElements() == 0
                                 ? nullptr
                                 : static_cast<const float*>(weights.data()),
                             samples,
                             rows.NumElements(),
                             BitWidth(std::max<int64_t>(samples - 1, 0))};
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    std::vector<SortedEntries> parts;
    OP_REQUIRES_OK(ctx, Sort(pool, entries, &parts));
    SumSorted(ctx, pool, entries, parts, grad);
  }

 private:
  static constexpr int64_t kEntriesPerTask = 16384;
  static constexpr int64_t kNanosecondsPerEntry = 10;

  // Sorts the entries by row; every part is one range of rows.
  static absl::Status Sort(tensorflow::thread::ThreadPool* pool,
                           const Entries& entries,
                           std::vector<SortedEntries>* parts) {
    uint64_t highest = 0;  // a negative row becomes the highest
    for (int64_t i = 0; i < entries.count; ++i) {
      highest = std::max(highest, static_cast<uint64_t>(entries.rows[i]));
    }
    if (BitWidth(highest) + entries.sample_bits > 63) {
      return InvalidArgument("rows must be in [0, 2^", 63 - entries.sample_bits,
                             "). Received: ", static_cast<int64_t>(highest));
    }
    const int64_t limit = static_cast<int64_t>(highest) + 1;
    const int64_t size = std::max<int64_t>(
        1,
        std::min<int64_t>(pool->NumThreads(), entries.count / kEntriesPerTask));
    parts->resize(size);
    pool->ParallelFor(size, kNanosecondsPerEntry * (entries.count / size + 1),
                      [&](int64_t first, int64_t last) {
                        for (int64_t i = first; i < last; ++i) {
                          (*parts)[i].Build(entries, Cut(limit, i, size),
                                            Cut(limit, i + 1, size));
                        }
                      });
    return absl::OkStatus();
  }

  // Bound i of `size` equal ranges of [0, limit), without overflow.
  static int64_t Cut(int64_t limit, int64_t i, int64_t size) {
    return limit / size * i + limit % size * i / size;
  }

  // The transposed lookup: sums the gradients of the samples of every row.
  static void SumSorted(OpKernelContext* ctx,
                        tensorflow::thread::ThreadPool* pool,
                        const Entries& entries,
                        const std::vector<SortedEntries>& parts,
                        const Tensor& grad) {
    int64_t distinct = 0;
    for (const auto& part : parts) distinct += part.distinct();
    Tensor* unique_rows = nullptr;
    Tensor* row_grads = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({distinct}), &unique_rows));
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(1, TensorShape({distinct, grad.dim_size(1)}),
                                  &row_grads));
    auto* rows_out = static_cast<int64_t*>(unique_rows->data());
    std::unique_ptr<int64_t[]> row_splits(new int64_t[distinct + 1]);
    row_splits[0] = 0;
    std::unique_ptr<int64_t[]> samples(new int64_t[entries.count]);
    std::unique_ptr<float[]> weights;
    if (entries.weights != nullptr) weights.reset(new float[entries.count]);
    std::vector<int64_t> first_entry(parts.size() + 1, 0);
    std::vector<int64_t> first_row(parts.size() + 1, 0);
    for (size_t i = 0; i < parts.size(); ++i) {
      first_entry[i + 1] = first_entry[i] + parts[i].size();
      first_row[i + 1] = first_row[i] + parts[i].distinct();
    }
    pool->ParallelFor(
        parts.size(), kNanosecondsPerEntry * (entries.count / parts.size() + 1),
        [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            parts[i].Write(first_entry[i], rows_out + first_row[i],
                           row_splits.get() + first_row[i] + 1,
                           samples.get() + first_entry[i],
                           weights ? weights.get() + first_entry[i] : nullptr);
          }
        });
    const SegmentSum args = {static_cast<const float*>(grad.data()),
                             grad.dim_size(1),
                             row_splits.get(),
                             samples.get(),
                             weights.get(),
                             static_cast<float*>(row_grads->data())};
    ParallelSegmentSum(pool, args, distinct);
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>LookupGrad")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        LookupGradOp);

}  // namespace
}  // namespace tfdist
