// SPDX-License-Identifier: Apache-2.0
//
// The update rules on a GPU: C entry points without TensorFlow. All pointers
// are device memory; rows must be unique and inside the table. Each call
// enqueues one kernel on the stream (a cudaStream_t) and returns the
// cudaError_t of the launch, 0 if it went well.
#ifndef TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_CU_H_
#define TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_CU_H_

#include "custom_ops/optimizer/row_update_functor.h"

extern "C" {

int TfdistGpuApplySgd(const tfdist::RowBatch* batch,
                      const tfdist::RowBuffers* buffers,
                      const tfdist::SgdRule* rule, void* stream);
int TfdistGpuApplyMomentum(const tfdist::RowBatch* batch,
                           const tfdist::RowBuffers* buffers,
                           const tfdist::MomentumRule* rule, void* stream);
int TfdistGpuApplyAdagrad(const tfdist::RowBatch* batch,
                          const tfdist::RowBuffers* buffers,
                          const tfdist::AdagradRule* rule, void* stream);
int TfdistGpuApplyRowWiseAdagrad(const tfdist::RowBatch* batch,
                                 const tfdist::RowBuffers* buffers,
                                 const tfdist::RowWiseAdagradRule* rule,
                                 void* stream);
int TfdistGpuApplyAdam(const tfdist::RowBatch* batch,
                       const tfdist::RowBuffers* buffers,
                       const tfdist::AdamRule* rule, void* stream);

}  // extern "C"

#endif  // TFDIST_CUSTOM_OPS_OPTIMIZER_ROW_UPDATE_FUNCTOR_CU_H_
