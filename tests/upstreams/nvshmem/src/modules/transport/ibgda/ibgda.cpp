// NVSHMEM, CPU stand-in: a transport module that looks for its NIC in vain.
#include <cstring>

namespace {

struct standin_ah_attr {
    int port;
    int flags;
};

int create_address_handle(int port) {
    struct standin_ah_attr ah_attr;
    ah_attr.port = port;
    return ah_attr.port;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int nvshmemt_init(void) {
    return create_address_handle(1) == 1 ? -1 : 0;
}
