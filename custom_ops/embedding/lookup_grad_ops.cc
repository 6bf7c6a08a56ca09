// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
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

// The entries of the rows in one range, ascending by row, within a row by
// position: what one thread sorts.
class SortedEntries {
 public:
  // Takes the entries with rows in [low, high). `position_bits` bits hold a
  // position.
  void Build(const int64_t* rows, int64_t count, int64_t low, int64_t high,
             int position_bits) {
    position_bits_ = position_bits;
    low_ = low;
    int64_t selected = 0;
    for (int64_t i = 0; i < count; ++i) {
      selected += rows[i] >= low && rows[i] < high;
    }
    memory_.reset(new uint64_t[2 * selected]);
    sort_.keys = memory_.get();
    sort_.spare_keys = sort_.keys + selected;
    for (int64_t i = 0; i < count && size_ < selected; ++i) {
      if (rows[i] >= low && rows[i] < high) {
        sort_.keys[size_++] =
            static_cast<uint64_t>(rows[i] - low) << position_bits | i;
      }
    }
    const int row_bits = BitWidth(high - low - 1);
    RadixSort(size_, position_bits, position_bits + row_bits, &sort_);
    for (int64_t i = 0; i < size_; ++i) {
      distinct_ += i == 0 || Row(i) != Row(i - 1);
    }
  }

  int64_t size() const { return size_; }
  int64_t distinct() const { return distinct_; }
  int64_t Row(int64_t i) const {
    return low_ + static_cast<int64_t>(sort_.keys[i] >> position_bits_);
  }
  int64_t Position(int64_t i) const {
    return sort_.keys[i] & ((uint64_t{1} << position_bits_) - 1);
  }

 private:
  int position_bits_ = 0;
  int64_t low_ = 0;
  int64_t size_ = 0;
  int64_t distinct_ = 0;
  std::unique_ptr<uint64_t[]> memory_;
  SortBuffers sort_{};
};

// The transposed lookup: for every distinct row the samples it went to.
struct Transposed {
  int64_t distinct = 0;
  std::unique_ptr<int64_t[]> row_splits;  // [distinct + 1]
  std::unique_ptr<int64_t[]> samples;     // [entries]
  std::unique_ptr<float[]> weights;       // [entries] or nullptr
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
    auto* pool = ctx->device()->tensorflow_cpu_worker_threads()->workers;
    std::vector<SortedEntries> parts;
    OP_REQUIRES_OK(ctx, Sort(pool, rows, &parts));
    Transposed transposed;
    for (const auto& part : parts) transposed.distinct += part.distinct();
    Tensor* unique_rows = nullptr;
    Tensor* row_grads = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({transposed.distinct}),
                                        &unique_rows));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(
                       1, TensorShape({transposed.distinct, grad.dim_size(1)}),
                       &row_grads));
    Transpose(pool, row_splits, weights, rows.NumElements(), parts,
              static_cast<int64_t*>(unique_rows->data()), &transposed);
    const SegmentSum args = {static_cast<const float*>(grad.data()),
                             grad.dim_size(1),
                             transposed.row_splits.get(),
                             transposed.samples.get(),
                             transposed.weights.get(),
                             static_cast<float*>(row_grads->data())};
    ParallelSegmentSum(pool, args, transposed.distinct);
  }

 private:
  static constexpr int64_t kEntriesPerTask = 16384;
  static constexpr int64_t kNanosecondsPerEntry = 10;

  // Sorts the entries by row; every part is one range of rows.
  static absl::Status Sort(tensorflow::thread::ThreadPool* pool,
                           const Tensor& rows_in,
                           std::vector<SortedEntries>* parts) {
    const auto* rows = static_cast<const int64_t*>(rows_in.data());
    const int64_t count = rows_in.NumElements();
    if (count == 0) return absl::OkStatus();
    uint64_t highest = 0;
    for (int64_t i = 0; i < count; ++i) {
      highest = std::max(highest, static_cast<uint64_t>(rows[i]));
    }
    const int position_bits = BitWidth(count - 1);
    if (BitWidth(highest) + position_bits > 63) {
      return InvalidArgument("rows must be in [0, 2^", 63 - position_bits,
                             "). Received: ", static_cast<int64_t>(highest));
    }
    const int64_t limit = static_cast<int64_t>(highest) + 1;
    const int64_t size = std::max<int64_t>(
        1, std::min<int64_t>(pool->NumThreads(), count / kEntriesPerTask));
    parts->resize(size);
    pool->ParallelFor(size, kNanosecondsPerEntry * (count / size),
                      [&](int64_t first, int64_t last) {
                        for (int64_t i = first; i < last; ++i) {
                          (*parts)[i].Build(rows, count, Cut(limit, i, size),
                                            Cut(limit, i + 1, size),
                                            position_bits);
                        }
                      });
    return absl::OkStatus();
  }

  // Bound i of `size` equal ranges of [0, limit), without overflow.
  static int64_t Cut(int64_t limit, int64_t i, int64_t size) {
    return limit / size * i + limit % size * i / size;
  }

  static void Transpose(tensorflow::thread::ThreadPool* pool,
                        const Tensor& row_splits, const Tensor& weights,
                        int64_t entries,
                        const std::vector<SortedEntries>& parts,
                        int64_t* unique_rows, Transposed* out) {
    const auto* splits = static_cast<const int64_t*>(row_splits.data());
    std::unique_ptr<int32_t[]> sample_of(new int32_t[entries]);
    for (int64_t sample = 0; sample + 1 < row_splits.NumElements(); ++sample) {
      std::fill(sample_of.get() + splits[sample],
                sample_of.get() + splits[sample + 1],
                static_cast<int32_t>(sample));
    }
    const bool weighted = weights.NumElements() > 0;
    const auto* weights_in = static_cast<const float*>(weights.data());
    out->row_splits.reset(new int64_t[out->distinct + 1]);
    out->samples.reset(new int64_t[entries]);
    if (weighted) out->weights.reset(new float[entries]);
    std::vector<int64_t> first_entry(parts.size() + 1, 0);
    std::vector<int64_t> first_row(parts.size() + 1, 0);
    for (size_t p = 0; p < parts.size(); ++p) {
      first_entry[p + 1] = first_entry[p] + parts[p].size();
      first_row[p + 1] = first_row[p] + parts[p].distinct();
    }
    const auto write_part = [&](int64_t p) {
      const SortedEntries& part = parts[p];
      int64_t row = first_row[p];
      for (int64_t i = 0; i < part.size(); ++i) {
        const int64_t to = first_entry[p] + i;
        if (i == 0 || part.Row(i) != part.Row(i - 1)) {
          unique_rows[row] = part.Row(i);
          out->row_splits[row++] = to;
        }
        out->samples[to] = sample_of[part.Position(i)];
        if (weighted) out->weights[to] = weights_in[part.Position(i)];
      }
    };
    pool->ParallelFor(parts.size(),
                      kNanosecondsPerEntry * (entries / (parts.size() + 1) + 1),
                      [&](int64_t first, int64_t last) {
                        for (; first < last; ++first) write_part(first);
                      });
    out->row_splits[out->distinct] = entries;
  }
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>LookupGrad")
                            .Device(tensorflow::DEVICE_CPU)
                            .TypeConstraint<float>("T"),
                        LookupGradOp);

}  // namespace
}  // namespace tfdist
