// SPDX-License-Identifier: Apache-2.0
#if TFDIST_CUDA
#include "custom_ops/gpu/nccl_library.h"

#include <dlfcn.h>

#include <memory>

#include "custom_ops/common/message.h"

namespace tfdist {

namespace {

template <typename Function>
bool Find(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  return *function != nullptr;
}

bool FindAll(void* handle, NcclLibrary* nccl) {
  return Find(handle, "ncclGetVersion", &nccl->GetVersion) &&
         Find(handle, "ncclGetUniqueId", &nccl->GetUniqueId) &&
         Find(handle, "ncclCommInitRankConfig", &nccl->CommInitRankConfig) &&
         Find(handle, "ncclCommGetAsyncError", &nccl->CommGetAsyncError) &&
         Find(handle, "ncclCommAbort", &nccl->CommAbort) &&
         Find(handle, "ncclGroupStart", &nccl->GroupStart) &&
         Find(handle, "ncclGroupEnd", &nccl->GroupEnd) &&
         Find(handle, "ncclSend", &nccl->Send) &&
         Find(handle, "ncclRecv", &nccl->Recv) &&
         Find(handle, "ncclAllReduce", &nccl->AllReduce) &&
         Find(handle, "ncclRedOpCreatePreMulSum",
              &nccl->RedOpCreatePreMulSum) &&
         Find(handle, "ncclRedOpDestroy", &nccl->RedOpDestroy) &&
         Find(handle, "ncclGetErrorString", &nccl->GetErrorString) &&
         Find(handle, "ncclGetLastError", &nccl->GetLastError);
}

}  // namespace

// The library is never unloaded, because its threads may run until the process
// ends.
const NcclLibrary* NcclLibrary::Load(const std::vector<std::string>& files,
                                     std::string* error) {
  error->clear();
  for (const std::string& file : files) {
    void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* why = dlerror();
      *error += Message(error->empty() ? "" : "; ", why ? why : file);
      continue;
    }
    auto nccl = std::make_unique<NcclLibrary>();
    const bool complete = FindAll(handle, nccl.get());
    if (nccl->GetVersion != nullptr) (void)nccl->GetVersion(&nccl->version);
    if (complete && nccl->version >= kOldest) return nccl.release();
    *error =
        Message(file, " is NCCL ", nccl->Version(), ", expected 2.14 or later");
    return nullptr;
  }
  return nullptr;
}

std::string NcclLibrary::Version() const {
  return Message(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace tfdist
#endif  // TFDIST_CUDA
