// kvservice_workers._native: the CPython side. Knows pointers and arrays, no tensor library.
//
// `attend` takes raw addresses for tensors and NumPy arrays (any C-contiguous buffers) for the
// batch, all positional, in the order of kFields; `native.py` is its only caller and checks them.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "kernel.h"
#include "message.h"
#include "step.h"

namespace {

// Buffers that are held while the kernel runs.
class Buffers {
 public:
  ~Buffers() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }
  // The buffer's address; null for None. On error sets an exception and `failed`.
  template <class T>
  const T* get(PyObject* object, Py_ssize_t min_items) {
    if (failed || object == Py_None) return nullptr;
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS) != 0) {
      failed = true;
      return nullptr;
    }
    views_.push_back(view);
    if (view.len < min_items * Py_ssize_t{sizeof(T)}) {
      PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes where %zd items of %zd are needed",
                   view.len, min_items, Py_ssize_t{sizeof(T)});
      failed = true;
      return nullptr;
    }
    return static_cast<const T*>(view.buf);
  }
  bool failed = false;

 private:
  std::vector<Py_buffer> views_;
};

template <class T>
T address(PyObject* object) {
  return static_cast<T>(PyLong_AsVoidPtr(object));
}

enum Field {
  kQ, kK, kV, kOut, kLse, kElement,
  kNumPages, kNumKvHeads, kGroupSize, kPageSize, kKDim, kVDim, kKPageStride, kVPageStride,
  kRows, kPageTables, kMaxPages, kKvStarts, kKvStops, kQStarts, kQPositions, kChunkOrigins,
  kPadding, kQueryPadding,
  kScale, kSoftcap, kMask, kWindow, kChunk, kSinks, kNumThreads, kInstructionSet,
  kNumFields
};

PyObject* attend(PyObject*, PyObject* const* fields, Py_ssize_t num_fields) {
  if (num_fields != kNumFields)
    return PyErr_Format(PyExc_TypeError, "attend takes %d arguments, got %zd", int{kNumFields},
                        num_fields);
  const auto integer = [&](Field field) { return int64_t{PyLong_AsLongLong(fields[field])}; };
  Buffers buffers;
  kvservice::Call call = {};
  call.q = address<const void*>(fields[kQ]);
  call.k_pages = address<const void*>(fields[kK]);
  call.v_pages = address<const void*>(fields[kV]);
  call.out = address<float*>(fields[kOut]);
  call.lse = address<float*>(fields[kLse]);
  call.element = static_cast<kvservice::Element>(integer(kElement));
  call.num_pages = integer(kNumPages), call.num_kv_heads = integer(kNumKvHeads);
  call.group_size = integer(kGroupSize), call.page_size = integer(kPageSize);
  call.k_dim = integer(kKDim), call.v_dim = integer(kVDim);
  call.k_page_stride = integer(kKPageStride), call.v_page_stride = integer(kVPageStride);
  call.max_pages = integer(kMaxPages);
  call.scale = static_cast<float>(PyFloat_AsDouble(fields[kScale]));
  call.softcap = static_cast<float>(PyFloat_AsDouble(fields[kSoftcap]));
  call.mask = static_cast<kvservice::Mask>(integer(kMask));
  call.window = integer(kWindow), call.chunk = integer(kChunk);
  call.num_threads = integer(kNumThreads);
  call.instruction_set = integer(kInstructionSet);
  if (PyErr_Occurred()) return nullptr;
  const Py_ssize_t num_rows = PyObject_Length(fields[kKvStarts]);
  call.num_rows = fields[kRows] == Py_None ? num_rows : PyObject_Length(fields[kRows]);
  if (PyErr_Occurred()) return nullptr;
  call.rows = buffers.get<int64_t>(fields[kRows], call.num_rows);
  call.page_tables = buffers.get<int32_t>(fields[kPageTables], num_rows * call.max_pages);
  call.kv_starts = buffers.get<int64_t>(fields[kKvStarts], num_rows);
  call.kv_stops = buffers.get<int64_t>(fields[kKvStops], num_rows);
  call.q_starts = buffers.get<int64_t>(fields[kQStarts], num_rows + 1);
  call.q_positions = buffers.get<int64_t>(fields[kQPositions], num_rows);
  call.chunk_origins = buffers.get<int64_t>(fields[kChunkOrigins], num_rows);
  call.sinks = buffers.get<float>(fields[kSinks], call.num_kv_heads * call.group_size);
  if (buffers.failed) return nullptr;
  call.query_padding = buffers.get<uint8_t>(fields[kQueryPadding], call.q_starts[num_rows]);
  std::vector<const uint8_t*> padding(num_rows);
  if (fields[kPadding] != Py_None && PyTuple_GET_SIZE(fields[kPadding]) == num_rows) {
    for (Py_ssize_t row = 0; row < num_rows; row++) {
      PyObject* of_row = PyTuple_GET_ITEM(fields[kPadding], row);
      padding[row] = buffers.get<uint8_t>(of_row, call.kv_stops[row]);
    }
    call.padding = padding.data();
  }
  if (buffers.failed) return nullptr;

  int64_t bad_row;
  Py_BEGIN_ALLOW_THREADS
  bad_row = kvservice::attend(call);
  Py_END_ALLOW_THREADS
  if (bad_row >= 0)
    return PyErr_Format(PyExc_IndexError,
                        "the page table of row %lld names a page that does not exist",
                        static_cast<long long>(bad_row));
  Py_RETURN_NONE;
}

PyObject* instruction_sets(PyObject*, PyObject*) {
  const std::vector<const char*> names = kvservice::instruction_sets();
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(names.size()));
  for (size_t i = 0; tuple && i < names.size(); i++) {
    PyObject* name = PyUnicode_FromString(names[i]);
    if (!name) Py_CLEAR(tuple);
    else PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), name);
  }
  return tuple;
}

PyMethodDef methods[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL,
     "Attend over pages in place. See kernel.h; `native.py` is its only caller."},
    {"instruction_sets", instruction_sets, METH_NOARGS,
     "Names of those that there are loops for and that this machine has, best first."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvservice_workers._native", nullptr, 0, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject* created = PyModule_Create(&module);
  if (created && (kvservice::add_call_type(created) != 0 || kvservice::add_step_type(created) != 0))
    Py_CLEAR(created);
  return created;
}
