// SPDX-License-Identifier: Apache-2.0
// all_reduce between GPUs.
#if TFDIST_CUDA
#include <vector>

#include "custom_ops/comm/all_reduce.h"
#include "custom_ops/comm/all_reduce_inputs.h"
#include "custom_ops/gpu/gpu_call.h"

namespace tfdist {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

namespace {

NcclType NcclTypeOf(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_HALF:
      return kNcclHalf;
    case tensorflow::DT_BFLOAT16:
      return kNcclBfloat16;
    case tensorflow::DT_DOUBLE:
      return kNcclDouble;
    default:
      return kNcclFloat;
  }
}

struct AllReduceGpuCall : GpuCall {
  AllReduce::Options options;
  std::string error;
  std::vector<Tensor> inputs;
  std::vector<Tensor*> outputs;
  int unweighted = 0;  // number of the last inputs that have no weight
  std::unique_ptr<AllReduce> on_host;

  void Post() {
    Enter();
    if (over_nccl) {
      exchange->ExpectAll();
      exchange->SendToAll(nullptr, 0);
      return ExpectTurn();
    }
    const std::shared_ptr<uint8_t> host = ToHost(inputs);
    options.input = options.output = host.get();
    on_host = std::make_unique<AllReduce>(*operation, options);
    if (!error.empty()) on_host->SetError(error);
    on_host->Post();
  }

  void Run() {
    Enter();
    if (!over_nccl) {
      on_host->Run();
      return ToDevice(static_cast<const uint8_t*>(options.output), outputs);
    }
    exchange->AwaitHeaders();
    const float factor = Factor();
    // Without different weights, all inputs are summed in one call.
    const size_t weighted = equal_ ? 0 : inputs.size() - unweighted;
    std::vector<NcclCommunicator::Summed> summed[2];  // weighted, plain
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool zero = i < weighted && factor == 0;
      const void* input = zero ? outputs[i]->data() : inputs[i].data();
      summed[i < weighted ? 0 : 1].push_back(
          {input, outputs[i]->data(),
           static_cast<size_t>(inputs[i].NumElements())});
    }
    RunInTurn([&](NcclCommunicator& nccl, const CudaStream& stream) {
      // A rank of weight 0 adds zeros instead of its input, so that its NaNs
      // have no effect.
      for (size_t i = 0; i < weighted && factor == 0; ++i) {
        stream.Zero(outputs[i]->data(), outputs[i]->TotalBytes());
      }
      const NcclType type = NcclTypeOf(inputs[0].dtype());
      if (!summed[0].empty()) {
        nccl.AllReduce(summed[0], type, &factor, stream.get());
      }
      if (!summed[1].empty()) {
        nccl.AllReduce(summed[1], type, nullptr, stream.get());
      }
    });
  }

  Header MakeHeader() const {
    Header header;
    header.dtype = options.dtype;
    header.agreed = options.bytes();
    header.shape_hash = options.shape_hash;
    header.weight = options.weight;
    if (options.weighted) header.flags |= kWeightedFlag;
    SetText(header.shapes, options.shapes.c_str());
    return header;
  }

 private:
  // Returns the factor for this rank's inputs. If all weights are equal, as
  // with full batches on all ranks, a plain sum is enough.
  float Factor() {
    equal_ = true;
    if (!options.weighted) return 1;
    const int world_size = operation->group->world_size();
    double total = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const bool own = rank == operation->group->rank();
      const double weight =
          own ? options.weight : exchange->header(rank).weight;
      total += weight;
      equal_ = equal_ && weight == options.weight;
    }
    if (equal_ && total > 0) return 1;
    equal_ = false;
    return total > 0 ? options.weight * world_size / total : 0;
  }

  bool equal_ = true;  // whether all weights are equal
};

class AllReduceGpuOp : public CollectiveOp {
 public:
  explicit AllReduceGpuOp(tensorflow::OpKernelConstruction* ctx)
      : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("weighted", &weighted_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("unweighted", &unweighted_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto call = std::make_shared<AllReduceGpuCall>();
    if (!call->Prepare(ctx, NewOperation(ctx, Kind::kAllReduce))) return done();
    const int count = ctx->num_inputs() - 1;
    call->outputs.resize(count);
    for (int i = 0; i < count; ++i) {
      // The inputs stay alive, and outputs are separate memory, because a rank
      // of weight 0 writes zeros to its outputs.
      call->inputs.push_back(ctx->input(i));
      OP_REQUIRES_OK_ASYNC(
          ctx,
          ctx->allocate_output(i, ctx->input(i).shape(), &call->outputs[i]),
          done);
      call->operation->Keep(*call->outputs[i]);
    }
    DescribeInputs(ctx, unweighted_, call->options);
    call->unweighted = unweighted_;
    call->options.weighted = weighted_;
    if (weighted_) call->error = ReadWeight(ctx->input(count), call->options);
    call->exchange =
        std::make_unique<Exchange>(*call->operation, call->MakeHeader());
    if (call->over_nccl) {
      call->exchange->SetRowsOnDevice();
      if (!call->error.empty()) call->exchange->SetError(call->error);
    }
    Start(ctx, std::move(call), false, std::move(done));
  }

 private:
  bool weighted_ = false;
  int unweighted_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("Tfdist>AllReduce").TFDIST_ON_GPU.HostMemory("weight"),
    AllReduceGpuOp);

}  // namespace
}  // namespace tfdist
#endif  // TFDIST_CUDA
