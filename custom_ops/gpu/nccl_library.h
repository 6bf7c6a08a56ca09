// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_GPU_NCCL_LIBRARY_H_
#define TFDIST_CUSTOM_OPS_GPU_NCCL_LIBRARY_H_

#include <cstddef>
#include <string>
#include <vector>

struct CUstream_st;

namespace tfdist {

// The part of NCCL's interface that this package uses, for NCCL 2.14 and later.
// It is declared here because the build has neither NCCL's header nor its
// library.
struct ncclComm;
struct NcclId {
  char bytes[128];
};
enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclInProgress = 7,
};
enum NcclType : int {
  kNcclInt8 = 0,
  kNcclHalf = 6,
  kNcclFloat = 7,
  kNcclDouble = 8,
  kNcclBfloat16 = 9,
};
// The configuration struct of NCCL 2.14. Later versions fill in the fields that
// it lacks.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

struct NcclLibrary {
  static constexpr int kOldest = 21400;

  // Loads the first of `files` that exists. Returns null, and sets `error`, if
  // none exists or the version is too old.
  static const NcclLibrary* Load(const std::vector<std::string>& files,
                                 std::string* error);

  // Returns, for example, "2.27.7".
  std::string Version() const;

  int version = 0;
  NcclResult (*GetVersion)(int*) = nullptr;
  NcclResult (*GetUniqueId)(NcclId*) = nullptr;
  NcclResult (*CommInitRankConfig)(ncclComm**, int ranks, NcclId, int rank,
                                   NcclConfig*) = nullptr;
  NcclResult (*CommGetAsyncError)(ncclComm*, NcclResult*) = nullptr;
  NcclResult (*CommAbort)(ncclComm*) = nullptr;
  NcclResult (*GroupStart)() = nullptr;
  NcclResult (*GroupEnd)() = nullptr;
  NcclResult (*Send)(const void*, size_t, NcclType, int peer, ncclComm*,
                     CUstream_st*) = nullptr;
  NcclResult (*Recv)(void*, size_t, NcclType, int peer, ncclComm*,
                     CUstream_st*) = nullptr;
  NcclResult (*AllReduce)(const void*, void*, size_t, NcclType, int op,
                          ncclComm*, CUstream_st*) = nullptr;
  NcclResult (*RedOpCreatePreMulSum)(int* op, void* scalar, NcclType,
                                     int residence, ncclComm*) = nullptr;
  NcclResult (*RedOpDestroy)(int op, ncclComm*) = nullptr;
  const char* (*GetErrorString)(NcclResult) = nullptr;
  const char* (*GetLastError)(ncclComm*) = nullptr;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_GPU_NCCL_LIBRARY_H_
