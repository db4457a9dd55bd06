// What is behind run_cuda. No CUDA header is needed to include it.
#pragma once

#include "cuda.h"

namespace fused_act {

// A kernel's first launch makes the driver decompress and load the object that it is in: 1 ms for half a megabyte of code. So
// what there are many of is compiled in parts of about that size, and for each size of an element. setup.py and CMakeLists.txt
// read here how many: those of compiled.cu, decoded.cu (one for each number of bits that a code has) and framed.cu.
constexpr int kCompiledParts = 3, kDecodedParts = 2, kFramedParts = 12;

// run_cuda for an operator of that part and elements of that size.
template <int bytes, int part>
const char* run_compiled_part(int op, const Request&, const Geometry&, const Cuda&);

// The same of what reads codes of part + 1 bits, whichever operator wrote them.
template <int bytes, int part>
const char* run_decoded_part(const Request&, const Geometry&, const Cuda&);

// The same of the Request's program.
const char* run_cuda_program_16(const Request&, const Geometry&, const Cuda&);
const char* run_cuda_program_32(const Request&, const Geometry&, const Cuda&);
const char* run_cuda_program_64(const Request&, const Geometry&, const Cuda&);

}  // namespace fused_act
