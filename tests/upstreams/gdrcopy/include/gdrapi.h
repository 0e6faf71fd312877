/* GDRCopy, CPU stand-in: the version, and a handle that can never be opened. */
#ifndef STANDIN_GDRAPI_H
#define STANDIN_GDRAPI_H

#define GDR_API_MAJOR_VERSION 2
#define GDR_API_MINOR_VERSION 5

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library that is really loaded. */
void gdr_runtime_get_version(int *major, int *minor);

/* Always NULL: there is no driver and no GPU behind the stand-in. */
void *gdr_standin_open(void);

#ifdef __cplusplus
}
#endif
#endif
