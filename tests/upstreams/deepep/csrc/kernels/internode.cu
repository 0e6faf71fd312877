// DeepEP, CPU stand-in: a kernel that calls into the NVSHMEM device library, so that the device link has something to resolve.
extern "C" __device__ int nvshmem_standin_device_version(void);

extern "C" __global__ void standin_internode(int *version)
{
    *version = nvshmem_standin_device_version();
}
