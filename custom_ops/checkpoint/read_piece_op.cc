// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/checkpoint/values_checksum.h"
#include "custom_ops/codec/rotated_mod.h"
#include "custom_ops/common/allocate_output.h"
#include "custom_ops/common/message.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/env.h"

namespace tfdist {
namespace {

namespace tf = ::tensorflow;
using tf::shape_inference::InferenceContext;

REGISTER_OP("Tfdist>ReadPiece")
    .Input("path: string")
    .Input("offset: int64")
    .Input("checksum: int64")
    .Input("shape: int64")
    .Input("first_block: int64")
    .Input("cells: int64")
    .Output("own: dtype")
    .Output("others: dtype")
    .Output("splits: int64")
    .Attr("dtype: {uint8, int32, int64, float, double, bfloat16, half}")
    .Attr("rank: int >= 0")
    .Attr("row_parts: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim,
                                 InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads a piece of a table from a data file of a TensorFlow checkpoint, and groups
its values by the ranks that hold them.

path: of the data file, on any of TensorFlow's file systems.
offset: of the first value, in bytes.
checksum: the CRC-32C of the values, masked as in the checkpoint's index.
shape: [2], rows and columns of the piece. It begins with a block of row_parts
  rows of the table (rotated_mod.h).
first_block: number of this block in the table.
cells: [ranks, 3], of each rank: its row part, or -1 if it has none, its first
  column, and the number of its columns.
own: [n, columns], the values of this rank.
others: [m], the values of the other ranks, in the order of the ranks.
splits: [ranks], number of elements of each rank in `others`.
rank: this rank.
)doc");

constexpr int64_t kMostElements = int64_t{1} << 40;

// The bytes that are read, checked and copied at a time, which a processor's
// cache holds.
constexpr int64_t kCachedBytes = 1 << 19;

// What a rank receives of each row of its row part.
struct Cell {
  int64_t part, offset, bytes;
  char* place;  // of the next row
};

class Piece {
 public:
  absl::Status Read(tf::OpKernelContext* ctx, int64_t row_parts) {
    const tf::Tensor& shape = ctx->input(3);
    const tf::Tensor& cells = ctx->input(5);
    if (shape.NumElements() != 2 || cells.dims() != 2 ||
        cells.dim_size(1) != 3) {
      return absl::InvalidArgumentError("shape must be [2], cells [ranks, 3]");
    }
    rows_ = shape.flat<int64_t>()(0);
    const int64_t columns = shape.flat<int64_t>()(1);
    const int64_t size = tf::DataTypeSize(ctx->expected_output_dtype(0));
    first_block_ = ctx->input(4).scalar<int64_t>()();
    row_parts_ = row_parts;
    row_bytes_ = columns * size;
    if (rows_ < 1 || columns < 1 || columns > kMostElements / rows_ ||
        first_block_ < 0 || first_block_ > RotatedMod::kMaxRows / row_parts) {
      return absl::InvalidArgumentError(
          "shape and first_block must be those of a table");
    }
    const auto matrix = cells.matrix<int64_t>();
    for (int64_t i = 0; i < cells.dim_size(0); ++i) {
      const int64_t part = matrix(i, 0), first = matrix(i, 1);
      const int64_t count = matrix(i, 2);
      if (part >= row_parts || first < 0 || count < 0 || first > columns ||
          count > columns - first) {
        return absl::InvalidArgumentError("cells must be within the table");
      }
      cells_.push_back({part, first * size, count * size, nullptr});
    }
    return absl::OkStatus();
  }

  int64_t bytes() const { return rows_ * row_bytes_; }
  int64_t ranks() const { return cells_.size(); }
  Cell& cell(int64_t rank) { return cells_[rank]; }

  // Rows of the piece that a rank holds: one of each block, except that the
  // last block of a table may be incomplete.
  int64_t RowsOf(const Cell& cell) const {
    if (cell.part < 0) return 0;
    const int64_t last = (rows_ - 1) / row_parts_;
    return last + (Place(RotatedMod(row_parts_), cell, last) < rows_);
  }

  // Bytes of the blocks to copy at a time.
  int64_t StepBytes(int64_t wanted) const {
    const int64_t block_bytes = row_parts_ * row_bytes_;
    return std::max<int64_t>(wanted / block_bytes, 1) * block_bytes;
  }

  // Copies the rows of some blocks to their cells.
  // data, size: bytes of the piece from `begin` on, which begins a block.
  void Group(const char* data, int64_t begin, int64_t size) {
    const int64_t first = begin / row_bytes_, end = first + size / row_bytes_;
    const int64_t last_block = (end + row_parts_ - 1) / row_parts_;
    const RotatedMod placement(row_parts_);
    for (Cell& cell : cells_) {
      if (cell.part < 0) continue;
      for (int64_t block = first / row_parts_; block < last_block; ++block) {
        const int64_t row = Place(placement, cell, block);
        if (row >= end) continue;
        const char* from = data + (row - first) * row_bytes_ + cell.offset;
        if (cell.bytes == sizeof(float)) {  // slots with a value per row
          std::memcpy(cell.place, from, sizeof(float));
        } else {
          std::memcpy(cell.place, from, cell.bytes);
        }
        cell.place += cell.bytes;
      }
    }
  }

 private:
  // The row of the piece that a cell has of a block.
  int64_t Place(const RotatedMod& placement, const Cell& cell,
                int64_t block) const {
    const int64_t id = placement.Id(cell.part, first_block_ + block);
    return id - first_block_ * row_parts_;
  }

  int64_t rows_ = 0, row_bytes_ = 0, row_parts_ = 1, first_block_ = 0;
  std::vector<Cell> cells_;
};

class ReadPieceOp : public tf::OpKernel {
 public:
  explicit ReadPieceOp(tf::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &rank_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("row_parts", &row_parts_));
  }

  void Compute(tf::OpKernelContext* ctx) override {
    Piece piece;
    OP_REQUIRES_OK(ctx, piece.Read(ctx, row_parts_));
    OP_REQUIRES(ctx, rank_ < piece.ranks(),
                absl::InvalidArgumentError("rank must have a cell"));
    OP_REQUIRES_OK(ctx, Allocate(ctx, &piece));
    OP_REQUIRES_OK(ctx, ReadFile(ctx, &piece));
  }

 private:
  absl::Status Allocate(tf::OpKernelContext* ctx, Piece* piece) const {
    tf::Tensor *own = nullptr, *others = nullptr, *splits = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 2, {piece->ranks()}, &splits));
    const int64_t size = tf::DataTypeSize(ctx->expected_output_dtype(0));
    int64_t total = 0;
    for (int64_t rank = 0; rank < piece->ranks(); ++rank) {
      const Cell& cell = piece->cell(rank);
      const int64_t count = piece->RowsOf(cell) * cell.bytes / size;
      splits->flat<int64_t>()(rank) = rank == rank_ ? 0 : count;
      total += rank == rank_ ? 0 : count;
    }
    Cell& mine = piece->cell(rank_);
    TF_RETURN_IF_ERROR(
        AllocateOutput(ctx, 0, {piece->RowsOf(mine), mine.bytes / size}, &own));
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {total}, &others));
    char* place = static_cast<char*>(others->data());
    for (int64_t rank = 0; rank < piece->ranks(); ++rank) {
      piece->cell(rank).place = place;
      place += splits->flat<int64_t>()(rank) * size;
    }
    mine.place = static_cast<char*>(own->data());
    return absl::OkStatus();
  }

  absl::Status ReadFile(tf::OpKernelContext* ctx, Piece* piece) const {
    const std::string path(ctx->input(0).scalar<tf::tstring>()());
    const int64_t offset = ctx->input(1).scalar<int64_t>()();
    const int64_t checksum = ctx->input(2).scalar<int64_t>()();
    std::unique_ptr<tf::RandomAccessFile> file;
    TF_RETURN_IF_ERROR(ctx->env()->NewRandomAccessFile(path, &file));
    // A read of another file system may be a request to a distant server.
    const bool local = path.find("://") == std::string::npos;
    const int64_t step =
        piece->StepBytes(local ? kCachedBytes : piece->bytes());
    std::vector<char> scratch(std::min(step, piece->bytes()));
    ValuesChecksum found_checksum;
    for (int64_t begin = 0; begin < piece->bytes(); begin += step) {
      const int64_t size = std::min(step, piece->bytes() - begin);
      absl::string_view found;
      const absl::Status status =
          file->Read(offset + begin, size, &found, scratch.data());
      if (!status.ok() || static_cast<int64_t>(found.size()) != size) {
        // A file that ends too early is damaged.
        return absl::DataLossError(Message(path, ": ", size, " bytes at ",
                                           offset + begin, ": ",
                                           status.message()));
      }
      found_checksum.Add(found.data(), size);
      piece->Group(found.data(), begin, size);
    }
    if (found_checksum.masked() == checksum) return absl::OkStatus();
    return absl::DataLossError(Message(path, ": Checksum does not match (",
                                       piece->bytes(), " bytes at ", offset,
                                       ")"));
  }

  int64_t rank_, row_parts_;
};

REGISTER_KERNEL_BUILDER(Name("Tfdist>ReadPiece").Device(tf::DEVICE_CPU),
                        ReadPieceOp);

}  // namespace
}  // namespace tfdist
