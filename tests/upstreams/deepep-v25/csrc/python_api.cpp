// deep_ep._C, CPU stand-in: the NCCL that V2.5 stands on, and no more.
#include <Python.h>

#include <string>

#include <deep_jit/runtime.hpp>
#include <nccl.h>

namespace {

PyObject *nccl_version(PyObject *, PyObject *) {
    int number = 0;
    if (ncclGetVersion(&number) != 0) return PyErr_Format(PyExc_RuntimeError, "NCCL does not say its version");
    return PyUnicode_FromString(deep_jit::dotted(number / 10000, number / 100 % 100, number % 100).c_str());
}

PyMethodDef functions[] = {
    {"nccl_version", nccl_version, METH_NOARGS, "version of the NCCL that is really loaded"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "deep_ep._C", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
    PyObject *made = PyModule_Create(&definition);
    const std::string built = deep_jit::dotted(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    if (made == nullptr || PyModule_AddStringConstant(made, "NCCL_VERSION", built.c_str()) != 0) return nullptr;
    return made;
}
