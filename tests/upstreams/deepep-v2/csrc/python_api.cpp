// deep_ep._C, CPU stand-in: what V1's extension does, over NVSHMEM, and the NCCL that V2 stands on.
#define PyInit_deep_ep_cpp make_legacy
#include "legacy/deep_ep.cpp"

#include <fmt/format.h>
#include <nccl.h>

namespace {

PyObject *nccl_version(PyObject *, PyObject *) {
    int number = 0;
    if (ncclGetVersion(&number) != 0) return PyErr_Format(PyExc_RuntimeError, "NCCL does not say its version");
    return PyUnicode_FromString(fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100).c_str());
}

PyMethodDef more[] = {
    {"nccl_version", nccl_version, METH_NOARGS, "version of the NCCL that is really loaded"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
    module.m_name = "deep_ep._C";
    PyObject *made = make_legacy();
    if (made == nullptr || PyModule_AddFunctions(made, more) != 0) return nullptr;
    const std::string built = fmt::format("{}.{}.{}", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    if (PyModule_AddStringConstant(made, "NCCL_VERSION", built.c_str()) != 0) return nullptr;
    return made;
}
