// SPDX-License-Identifier: Apache-2.0
// Ops that set up the GPUs of a group, in CUDA builds.
#if TFDIST_CUDA
#include <vector>

#include "custom_ops/comm/collective_op.h"
#include "custom_ops/gpu/gpu_links.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfdist {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;
using tensorflow::shape_inference::InferenceContext;

// A library that emulates GPUs may be loaded in the same process as one for
// GPUs, so its ops need other names.
#ifdef TFDIST_EMULATED
#define TFDIST_GPU_OFFER "TfdistEmulated>GpuOffer"
#define TFDIST_GROUP_GPUS "TfdistEmulated>GroupGpus"
#else
#define TFDIST_GPU_OFFER "Tfdist>GpuOffer"
#define TFDIST_GROUP_GPUS "Tfdist>GroupGpus"
#endif

REGISTER_OP(TFDIST_GPU_OFFER)
    .Output("bus: string")
    .Output("version: string")
    .Output("id: string")
    .Output("reason: string")
    .Output("memory: int64")
    .Attr("device: int >= 0")
    .Attr("files: list(string)")
    .Attr("make_id: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 5; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Describes this rank's GPU and NCCL library, for exchanges between GPUs.

bus: PCI bus id of the GPU; empty if the GPU cannot be used.
version: version of the NCCL library; empty if there is none.
id: id of a new NCCL communicator if `make_id`, otherwise empty.
reason: why there is no GPU or no library; empty if there are both.
memory: total memory of the GPU in bytes.
device: CUDA's number of the GPU.
files: paths at which to look for the NCCL library, in this order.
make_id: whether to create a communicator id.
)doc");

REGISTER_OP(TFDIST_GROUP_GPUS)
    .Input("group: int64")
    .Input("id: string")
    .Attr("device: int >= 0")
    .Attr("files: list(string)")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Connects a process group to this rank's GPU, so that its collectives run there.

group: handle of the group.
id: id of an NCCL communicator, the same on all ranks. If empty, data between
  GPUs is exchanged through host memory.
device: CUDA's number of the GPU.
files: paths at which to look for the NCCL library, in this order.
)doc");

namespace {

class GpuOp : public OpKernel {
 public:
  explicit GpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("device", &device_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("files", &files_));
  }

  void Compute(OpKernelContext* ctx) override {
    try {
      Use(ctx);
    } catch (const std::exception& error) {
      ctx->SetStatus(
          absl::UnavailableError(Message("GPU ", device_, ": ", error.what())));
    }
  }

 protected:
  virtual void Use(OpKernelContext* ctx) = 0;

  int64_t device_ = 0;
  std::vector<std::string> files_;
};

class GpuOfferOp : public GpuOp {
 public:
  explicit GpuOfferOp(OpKernelConstruction* ctx) : GpuOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("make_id", &make_id_));
  }

 private:
  void Use(OpKernelContext* ctx) override {
    Tensor* outputs[5];
    for (int i = 0; i < 5; ++i) {
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, {}, &outputs[i]));
    }
    std::string reason;
    outputs[4]->scalar<int64_t>()() = 0;
    try {
      UseDevice(static_cast<int>(device_));
      outputs[0]->scalar<tstring>()() = BusIdOf(static_cast<int>(device_));
      outputs[4]->scalar<int64_t>()() = MemoryOfDevice();
    } catch (const CudaError& error) {
      outputs[3]->scalar<tstring>()() =
          Message("GPU ", device_, ": ", error.what());
      return;
    }
    const NcclLibrary* nccl = NcclLibrary::Load(files_, &reason);
    outputs[3]->scalar<tstring>()() = reason;
    if (nccl == nullptr) return;
    outputs[1]->scalar<tstring>()() = nccl->Version();
    if (make_id_) {
      outputs[2]->scalar<tstring>()() = NcclCommunicator::NewId(*nccl);
    }
  }

  bool make_id_ = false;
};

class GroupGpusOp : public GpuOp {
 public:
  using GpuOp::GpuOp;

 private:
  void Use(OpKernelContext* ctx) override {
    std::shared_ptr<ProcessGroup> group = GroupOf(ctx);
    if (group == nullptr) return;
    const std::string id = ctx->input(1).scalar<tstring>()();
    std::unique_ptr<NcclCommunicator> nccl;
    if (!id.empty()) {
      std::string reason;
      const NcclLibrary* library = NcclLibrary::Load(files_, &reason);
      if (library == nullptr) throw NcclError(reason);
      nccl = std::make_unique<NcclCommunicator>(*library, group->rank(),
                                                group->world_size(), id);
    }
    group->SetGpuLinks(
        std::make_shared<GpuLinks>(static_cast<int>(device_), std::move(nccl)));
  }
};

REGISTER_KERNEL_BUILDER(Name(TFDIST_GPU_OFFER).Device(tensorflow::DEVICE_CPU),
                        GpuOfferOp);
REGISTER_KERNEL_BUILDER(Name(TFDIST_GROUP_GPUS).Device(tensorflow::DEVICE_CPU),
                        GroupGpusOp);

}  // namespace
}  // namespace tfdist
#endif  // TFDIST_CUDA
