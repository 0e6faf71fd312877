#include "gdrapi.h"

#include <stddef.h>

void gdr_runtime_get_version(int *major, int *minor)
{
    *major = GDR_API_MAJOR_VERSION;
    *minor = GDR_API_MINOR_VERSION;
}

void *gdr_standin_open(void)
{
    return NULL;
}
