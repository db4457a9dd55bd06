// The door between the torch side and the CPU kernels, which are built once per SIMD level from cpu.cpp.
#pragma once

#include "../geometry.h"

namespace fused_act {

// Elements [begin, end) of the outputs, in memory order. Any partition of the range gives the same values.
// `sums[k]`, where not null, collects the gradient of operand k over the range: numel values of the compute type,
// zeroed by the caller.
struct CpuRange {
  int64_t begin, end;
  void* sums[kMaxOperands];
};

using CpuKernel = void (*)(int op, const Request&, const Geometry&, const CpuRange&);

void run_cpu_DEFAULT(int op, const Request&, const Geometry&, const CpuRange&);
#if defined(FUSED_ACT_X86_SIMD)
void run_cpu_AVX2(int op, const Request&, const Geometry&, const CpuRange&);
void run_cpu_AVX512(int op, const Request&, const Geometry&, const CpuRange&);
#endif

}  // namespace fused_act
