/* Fake CUDA toolkit: device code is host code. nvcc includes this in front of every .cu file. */
#pragma once
#include <stddef.h>
#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
struct dim3 { unsigned x, y, z; };
static const struct dim3 threadIdx = {0, 0, 0}, blockIdx = {0, 0, 0}, blockDim = {1, 1, 1}, gridDim = {1, 1, 1};
