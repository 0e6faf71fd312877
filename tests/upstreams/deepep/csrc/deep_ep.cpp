// deep_ep_cpp, CPU stand-in: NVSHMEM's host library for Python.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cuda/std/tuple>
#include <vector>

#include "nvshmem.h"
#include "nvshmemx.h"

namespace {

PyObject *raise_last_error() {
    PyErr_SetString(PyExc_RuntimeError, nvshmemx_standin_error());
    return nullptr;
}

PyObject *init(PyObject *, PyObject *args) {
    int rank = 0, ranks = 0, port = 0, timeout_ms = 0;
    const char *host = nullptr;
    if (!PyArg_ParseTuple(args, "iisii", &rank, &ranks, &host, &port, &timeout_ms)) return nullptr;
    nvshmemx_uniqueid_t id;
    nvshmemx_init_attr_t attr;
    int code = nvshmemx_get_uniqueid(host, port, &id);
    if (code == 0) code = nvshmemx_set_attr_uniqueid_args(rank, ranks, &id, &attr);
    if (code != 0) return raise_last_error();
    attr.timeout_ms = timeout_ms;
    Py_BEGIN_ALLOW_THREADS
    code = nvshmemx_init_attr(&attr);
    Py_END_ALLOW_THREADS
    if (code != 0) return raise_last_error();
    Py_RETURN_NONE;
}

PyObject *finalize(PyObject *, PyObject *) {
    nvshmemid_hostlib_finalize();
    Py_RETURN_NONE;
}

PyObject *my_pe(PyObject *, PyObject *) { return PyLong_FromLong(nvshmem_my_pe()); }

PyObject *n_pes(PyObject *, PyObject *) { return PyLong_FromLong(nvshmem_n_pes()); }

PyObject *barrier(PyObject *, PyObject *) {
    Py_BEGIN_ALLOW_THREADS
    nvshmem_barrier_all();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *nvshmem_version(PyObject *, PyObject *) {
    cuda::std::tuple<int, int, int> version;
    using cuda::std::get;
    nvshmemx_vendor_get_version_info(&get<0>(version), &get<1>(version), &get<2>(version));
    return PyUnicode_FromFormat("%d.%d.%d", get<0>(version), get<1>(version), get<2>(version));
}

// What one exchange needs, freed on every way out.
struct Exchange {
    explicit Exchange(std::size_t ranks) : views(ranks), send(ranks), sizes(ranks), recv(ranks), recv_sizes(ranks) {}
    Exchange(const Exchange &) = delete;
    Exchange &operator=(const Exchange &) = delete;
    ~Exchange() {
        for (Py_buffer &view : views)
            if (view.obj != nullptr) PyBuffer_Release(&view);
        for (void *pointer : recv) nvshmem_free(pointer);
    }

    std::vector<Py_buffer> views;
    std::vector<const void *> send;
    std::vector<std::size_t> sizes;
    std::vector<void *> recv;
    std::vector<std::size_t> recv_sizes;
};

bool borrow(PyObject *messages, Exchange &exchange) {
    for (std::size_t rank = 0; rank < exchange.views.size(); ++rank) {
        Py_buffer &view = exchange.views[rank];
        if (PyObject_GetBuffer(PyList_GET_ITEM(messages, static_cast<Py_ssize_t>(rank)), &view, PyBUF_SIMPLE) != 0) return false;
        exchange.send[rank] = view.buf;
        exchange.sizes[rank] = static_cast<std::size_t>(view.len);
    }
    return true;
}

PyObject *alltoallv(PyObject *, PyObject *args) {
    PyObject *messages = nullptr;
    Py_ssize_t chunk = 0;
    if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &messages, &chunk)) return nullptr;
    if (PyList_GET_SIZE(messages) != nvshmem_n_pes()) {
        PyErr_Format(PyExc_ValueError, "%zd messages for %d ranks", PyList_GET_SIZE(messages), nvshmem_n_pes());
        return nullptr;
    }
    Exchange exchange(static_cast<std::size_t>(nvshmem_n_pes()));
    if (!borrow(messages, exchange)) return nullptr;
    int code = 0;
    Py_BEGIN_ALLOW_THREADS
    code = nvshmemx_standin_alltoallv(exchange.send.data(), exchange.sizes.data(), exchange.recv.data(), exchange.recv_sizes.data(),
                                      static_cast<std::size_t>(chunk));
    Py_END_ALLOW_THREADS
    if (code != 0) return raise_last_error();
    PyObject *result = PyList_New(static_cast<Py_ssize_t>(exchange.recv.size()));
    for (std::size_t rank = 0; result != nullptr && rank < exchange.recv.size(); ++rank) {
        auto *text = static_cast<const char *>(exchange.recv[rank]);
        PyObject *bytes = PyBytes_FromStringAndSize(text, static_cast<Py_ssize_t>(exchange.recv_sizes[rank]));
        if (bytes == nullptr) Py_CLEAR(result);
        else PyList_SET_ITEM(result, static_cast<Py_ssize_t>(rank), bytes);
    }
    return result;
}

PyMethodDef methods[] = {
    {"init", init, METH_VARARGS, "init(rank, ranks, host, port, timeout_ms): connect all ranks"},
    {"finalize", finalize, METH_NOARGS, "close all connections"},
    {"my_pe", my_pe, METH_NOARGS, "this rank"},
    {"n_pes", n_pes, METH_NOARGS, "number of ranks"},
    {"barrier", barrier, METH_NOARGS, "wait for all ranks"},
    {"nvshmem_version", nvshmem_version, METH_NOARGS, "version of the NVSHMEM library that is really loaded"},
    {"alltoallv", alltoallv, METH_VARARGS, "alltoallv(messages, chunk): one message to each rank, one from each"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "deep_ep_cpp", "CPU stand-in of DeepEP's extension", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_deep_ep_cpp() { return PyModule_Create(&module); }
