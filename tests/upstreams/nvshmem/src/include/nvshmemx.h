/* NVSHMEM, CPU stand-in: start, end, and the one collective that the stand-in DeepEP needs. */
#ifndef STANDIN_NVSHMEMX_H
#define STANDIN_NVSHMEMX_H

#include "nvshmem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where rank 0 listens. */
typedef struct {
    char host[240];
    int port;
} nvshmemx_uniqueid_t;

typedef struct {
    int rank;
    int ranks;
    int timeout_ms; /* of the start and of every collective */
    nvshmemx_uniqueid_t id;
} nvshmemx_init_attr_t;

/* All functions that return int: 0, or -1 with the reason in nvshmemx_standin_error(). */
int nvshmemx_get_uniqueid(const char *host, int port, nvshmemx_uniqueid_t *id);
int nvshmemx_set_attr_uniqueid_args(int rank, int ranks, const nvshmemx_uniqueid_t *id, nvshmemx_init_attr_t *attr);
int nvshmemid_hostlib_init_attr(const nvshmemx_init_attr_t *attr, int major, int minor, int patch);
void nvshmemid_hostlib_finalize(void);
const char *nvshmemx_standin_error(void);

/* Sends send_bytes[r] bytes at send[r] to every rank r, in pieces of at most `chunk` bytes (0: no limit). recv[r] is what came from
 * rank r: recv_bytes[r] bytes in memory of nvshmem_malloc, which the caller frees. */
int nvshmemx_standin_alltoallv(const void *const *send, const size_t *send_bytes, void **recv, size_t *recv_bytes, size_t chunk);

/* Starts the library; refuses one of another version than these headers. */
static inline int nvshmemx_init_attr(const nvshmemx_init_attr_t *attr)
{
    return nvshmemid_hostlib_init_attr(attr, NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION);
}

#ifdef __cplusplus
}
#endif
#endif
