// A step of one layer group, prepared once for all its layers: store a layer's new keys and
// values, attend, and return the answer as it travels. `steady.py` is its only user.

#include "step.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernel.h"
#include "message.h"

namespace kvservice {
namespace {

struct Step {
  PyObject_HEAD
  Call call;                             // all but the tensors' addresses and the scale
  std::vector<Py_buffer>* views;         // of the arrays that `call` and the slots point into
  std::vector<const uint8_t*>* padding;  // per row
  std::vector<float>* sums;              // out, then lse
  std::vector<float>* q;                 // a layer's queries, aligned
  const int64_t *pages, *offsets;        // of each stored token
  const int64_t* tokens;                 // which of the new tokens these are; null: all, in order
  int64_t num_slots, num_tokens, num_queries;
  Py_ssize_t q_bytes, k_bytes, v_bytes;
  bool partial;       // the answer is one: float32, with lse
  std::string* same;  // what a call must keep to be served; see Message
};

size_t element_size(Element element) { return element == Element::kFloat32 ? 4 : 2; }

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// Rounds to nearest, ties to even, as the torch path does.
uint16_t to_float16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (size < 0x38800000u) {  // subnormal: let the adder align and round
    float small;
    memcpy(&small, &size, sizeof small);
    const float magic = 0.5f;
    small += magic;
    uint32_t aligned;
    memcpy(&aligned, &small, sizeof aligned);
    return static_cast<uint16_t>(sign | (aligned - 0x3f000000u));
  }
  const uint32_t rounded = size - 0x38000000u + 0xfffu + (size >> 13 & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

void convert(const float* from, size_t count, Element element, void* to) {
  if (element == Element::kFloat32) {
    memcpy(to, from, count * sizeof(float));
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(to);
  if (element == Element::kBFloat16)
    for (size_t i = 0; i < count; i++) halves[i] = to_bfloat16(from[i]);
  else
    for (size_t i = 0; i < count; i++) halves[i] = to_float16(from[i]);
}

// Copies the new tokens of one of K and V to their slots. Sizes are in bytes.
void store(const Step& step, const char* from, char* arena, int64_t page_stride, int64_t dim) {
  const int64_t heads = step.call.num_kv_heads, row = dim * element_size(step.call.element);
  const int64_t tile = step.call.page_size * row;
  for (int64_t i = 0; i < step.num_slots; i++) {
    const char* token = from + (step.tokens ? step.tokens[i] : i) * heads * row;
    char* slot = arena + step.pages[i] * page_stride * static_cast<int64_t>(element_size(step.call.element)) +
                 step.offsets[i] * row;
    for (int64_t head = 0; head < heads; head++) memcpy(slot + head * tile, token + head * row, row);
  }
}

template <class T>
const T* array(Step* step, PyObject* object, Py_ssize_t min_items) {
  if (object == Py_None) return nullptr;
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS) != 0) return nullptr;
  step->views->push_back(view);
  if (view.len < min_items * static_cast<Py_ssize_t>(sizeof(T))) {
    PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes where %zd items of %zd are needed",
                 view.len, min_items, static_cast<Py_ssize_t>(sizeof(T)));
    return nullptr;
  }
  return static_cast<const T*>(view.buf);
}

void dealloc(PyObject* self) {
  Step* step = reinterpret_cast<Step*>(self);
  if (step->views)
    for (Py_buffer& view : *step->views) PyBuffer_Release(&view);
  delete step->views;
  delete step->padding;
  delete step->sums;
  delete step->q;
  delete step->same;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {
      "element", "num_kv_heads", "group_size", "page_size", "k_dim", "v_dim",
      "page_tables", "max_pages", "kv_starts", "kv_stops", "q_starts", "q_positions",
      "chunk_origins", "padding", "query_padding", "mask", "window", "chunk", "num_threads",
      "pages", "offsets", "tokens", "num_tokens", "partial", "like", nullptr};
  long long element, heads, group, page_size, k_dim, v_dim, max_pages, mask, window, chunk, threads;
  long long num_tokens;
  PyObject *tables, *starts, *stops, *q_starts, *q_positions, *origins, *padding, *query_padding;
  PyObject *pages, *offsets, *tokens, *like;
  int partial;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "LLLLLLOLOOOOOOOLLLLOOOLpO", const_cast<char**>(names), &element, &heads,
          &group, &page_size, &k_dim, &v_dim, &tables, &max_pages, &starts, &stops, &q_starts,
          &q_positions, &origins, &padding, &query_padding, &mask, &window, &chunk, &threads,
          &pages, &offsets, &tokens, &num_tokens, &partial, &like))
    return nullptr;
  const Message* asked = message_of(like);
  if (!asked) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  Step* step = reinterpret_cast<Step*>(self);
  step->views = new std::vector<Py_buffer>();
  step->padding = new std::vector<const uint8_t*>();
  step->sums = new std::vector<float>();
  step->q = new std::vector<float>();
  step->same = new std::string(reinterpret_cast<const char*>(asked->same), asked->num_same);
  step->partial = partial;
  Call& call = step->call = Call{};
  call.element = static_cast<Element>(element);
  call.num_kv_heads = heads, call.group_size = group, call.page_size = page_size;
  call.k_dim = k_dim, call.v_dim = v_dim, call.max_pages = max_pages;
  call.k_page_stride = heads * page_size * k_dim, call.v_page_stride = heads * page_size * v_dim;
  call.mask = static_cast<Mask>(mask), call.window = window, call.chunk = chunk;
  call.num_threads = threads;
  const Py_ssize_t num_rows = PyObject_Length(starts);
  step->num_slots = PyObject_Length(pages);
  if (PyErr_Occurred()) return Py_DECREF(self), nullptr;
  call.num_rows = num_rows;
  call.page_tables = array<int32_t>(step, tables, num_rows * max_pages);
  call.kv_starts = array<int64_t>(step, starts, num_rows);
  call.kv_stops = array<int64_t>(step, stops, num_rows);
  call.q_starts = array<int64_t>(step, q_starts, num_rows + 1);
  call.q_positions = array<int64_t>(step, q_positions, num_rows);
  call.chunk_origins = array<int64_t>(step, origins, num_rows);
  step->pages = array<int64_t>(step, pages, step->num_slots);
  step->offsets = array<int64_t>(step, offsets, step->num_slots);
  step->tokens = array<int64_t>(step, tokens, step->num_slots);
  if (PyErr_Occurred()) return Py_DECREF(self), nullptr;
  step->num_queries = call.q_starts[num_rows], step->num_tokens = num_tokens;
  call.query_padding = array<uint8_t>(step, query_padding, step->num_queries);
  if (padding != Py_None) {
    for (Py_ssize_t row = 0; row < num_rows; row++) {
      PyObject* bits = PyTuple_GetItem(padding, row);
      step->padding->push_back(bits ? array<uint8_t>(step, bits, call.kv_stops[row]) : nullptr);
    }
    call.padding = step->padding->data();
  }
  if (PyErr_Occurred()) return Py_DECREF(self), nullptr;
  const Py_ssize_t size = element_size(call.element);
  step->q_bytes = step->num_queries * heads * group * k_dim * size;
  step->k_bytes = num_tokens * heads * k_dim * size;
  step->v_bytes = num_tokens * heads * v_dim * size;
  step->sums->resize(step->num_queries * heads * group * (v_dim + 1));
  step->q->resize((step->q_bytes + sizeof(float) - 1) / sizeof(float));
  return self;
}

// Whether a call asks what the step was prepared for, of another layer.
bool fits(const Step& step, const Message& message) {
  return message.num_same == step.same->size() &&
         memcmp(message.same, step.same->data(), message.num_same) == 0 && !message.has_header &&
         message.has_scale && std::isfinite(message.scale) && message.q.size == step.q_bytes &&
         message.k.size == step.k_bytes && message.v.size == step.v_bytes;
}

// answer(call, k_address, v_address, num_pages) -> bytes or None
PyObject* answer_call(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  Step* step = reinterpret_cast<Step*>(self);
  if (num_args != 4) return PyErr_Format(PyExc_TypeError, "answer takes 4 arguments, got %zd", num_args);
  const Message* message = message_of(args[0]);
  if (!message) return nullptr;
  if (!fits(*step, *message)) Py_RETURN_NONE;
  Call call = step->call;
  char* k_arena = static_cast<char*>(PyLong_AsVoidPtr(args[1]));
  char* v_arena = static_cast<char*>(PyLong_AsVoidPtr(args[2]));
  call.num_pages = PyLong_AsLongLong(args[3]);
  call.scale = static_cast<float>(message->scale);
  if (PyErr_Occurred()) return nullptr;
  for (int64_t i = 0; i < step->num_slots; i++)
    if (step->pages[i] < 0 || step->pages[i] >= call.num_pages)
      return PyErr_SetString(PyExc_IndexError, "a slot is on a page that does not exist"), nullptr;
  const int64_t num_q_heads = call.num_kv_heads * call.group_size;
  const Answer answer = {message->call_id, step->partial ? Element::kFloat32 : call.element,
                         step->num_queries, num_q_heads, call.v_dim, step->partial};
  uint8_t *out_bytes, *lse_bytes = nullptr;
  PyObject* bytes = new_answer(answer, &out_bytes, &lse_bytes);
  if (!bytes) return nullptr;
  int64_t bad_row;
  float* out = step->sums->data();
  const size_t num_lse = step->num_queries * num_q_heads, num_out = num_lse * call.v_dim;
  Py_BEGIN_ALLOW_THREADS
  memcpy(step->q->data(), message->q.data, step->q_bytes);
  call.q = step->q->data(), call.k_pages = k_arena, call.v_pages = v_arena;
  call.out = out, call.lse = out + num_out;
  store(*step, reinterpret_cast<const char*>(message->k.data), k_arena, call.k_page_stride, call.k_dim);
  store(*step, reinterpret_cast<const char*>(message->v.data), v_arena, call.v_page_stride, call.v_dim);
  bad_row = attend(call);
  convert(out, num_out, answer.element, out_bytes);
  if (lse_bytes) memcpy(lse_bytes, call.lse, num_lse * sizeof(float));
  Py_END_ALLOW_THREADS
  if (bad_row >= 0) {
    Py_DECREF(bytes);
    return PyErr_Format(PyExc_IndexError, "the page table of row %lld names a page that does not exist",
                        static_cast<long long>(bad_row));
  }
  return bytes;
}

PyMethodDef methods[] = {
    {"answer", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(answer_call)),
     METH_FASTCALL, "Store one layer's new keys and values, attend, and return the answer's frame."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"kvservice_workers._native.Step", sizeof(Step), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

int add_step_type(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  return type ? PyModule_AddObject(module, "Step", type) : -1;
}

}  // namespace kvservice
