/* NVSHMEM, CPU stand-in: processing elements are processes, memory is host memory. */
#ifndef STANDIN_NVSHMEM_H
#define STANDIN_NVSHMEM_H

#include <stddef.h>

#include "nvshmem_version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -1 before the start and after the end. */
int nvshmem_my_pe(void);
int nvshmem_n_pes(void);

void *nvshmem_malloc(size_t size);
void *nvshmem_align(size_t alignment, size_t size);
void nvshmem_free(void *pointer);

/* Ends the process with a message when a rank does not come within the timeout. */
void nvshmem_barrier_all(void);

/* The version of the library that is really loaded. */
void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch);

#ifdef __cplusplus
}
#endif
#endif
