// DeepEP, CPU stand-in: a kernel that is compiled for every architecture and never launched.
extern "C" __global__ void standin_intranode(int *value)
{
    *value = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}
