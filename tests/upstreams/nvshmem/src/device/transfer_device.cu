// NVSHMEM, CPU stand-in: one device function, so that there is a device library to link.
#include "nvshmem_version.h"

extern "C" __device__ int nvshmem_standin_device_version(void)
{
    return NVSHMEM_VENDOR_MAJOR_VERSION * 10000 + NVSHMEM_VENDOR_MINOR_VERSION * 100 + NVSHMEM_VENDOR_PATCH_VERSION;
}
