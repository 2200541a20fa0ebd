// Reading and writing protobuf's wire format, for the two messages of a decoding step: fields of
// worker.proto by their numbers. `native.py` says what of it Python sees.

#include "message.h"

#include <cstddef>
#include <cstring>
#include <initializer_list>

namespace kvservice {
namespace {

enum Wire { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

// Fields of AttendCall, Tensor, AttendResult and the frames around them.
enum CallField { kCallId = 1, kSessionId = 2, kLayer = 6, kHeader = 7, kQ = 8, kK = 9, kV = 10,
                 kScale = 15, kCapability = 21, kTraceParent = 22 };
enum TensorField { kDType = 1, kShape = 2, kData = 3 };
enum ResultField { kResultCallId = 1, kOut = 3, kLse = 4 };

uint8_t dtype_number(Element element) {
  switch (element) {
    case Element::kFloat32: return 1;
    case Element::kFloat16: return 2;
    case Element::kBFloat16: return 3;
  }
  return 0;
}

class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  bool done() const { return at_ == end_; }
  const uint8_t* at() const { return at_; }

  bool varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && at_ < end_; shift += 7) {
      const uint8_t byte = *at_++;
      if (shift == 63 && byte > 1) return false;
      *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (!(byte & 0x80)) return true;
    }
    return false;
  }

  bool bytes(Bytes* bytes) {
    uint64_t size;
    if (!varint(&size) || size > static_cast<uint64_t>(end_ - at_)) return false;
    *bytes = {at_, static_cast<Py_ssize_t>(size)};
    at_ += size;
    return true;
  }

  bool skip(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) return false;
    at_ += size;
    return true;
  }

  // Goes behind the value of a field.
  bool skip_value(uint64_t wire) {
    uint64_t value;
    Bytes ignored;
    switch (wire) {
      case kVarint: return varint(&value);
      case kFixed64: return skip(8);
      case kLength: return bytes(&ignored);
      case kFixed32: return skip(4);
    }
    return false;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

bool keep(Message* message, const uint8_t* from, size_t size) {
  if (size > Message::kMaxSame - message->num_same) return false;
  memcpy(message->same + message->num_same, from, size);
  message->num_same += size;
  return true;
}

// Takes a tensor's bytes apart from its dtype and shape, which are kept with their length: so two
// messages keep the same only where each tensor's are the same.
bool read_tensor(Reader* outer, uint8_t field, bool* has, Bytes* data, Message* message) {
  Bytes whole;
  if (*has || !outer->bytes(&whole)) return false;
  *has = true;
  const size_t begin = message->num_same;
  const uint8_t prefix[2] = {field, 0};
  if (!keep(message, prefix, sizeof prefix)) return false;
  bool has_data = false;
  for (Reader inner(whole.data, whole.size); !inner.done();) {
    const uint8_t* start = inner.at();
    uint64_t tag;
    if (!inner.varint(&tag)) return false;
    if (tag == (kData << 3 | kLength)) {
      if (has_data || !inner.bytes(data)) return false;
      has_data = true;
    } else if (!inner.skip_value(tag & 7) || !keep(message, start, inner.at() - start)) {
      return false;
    }
  }
  const size_t kept = message->num_same - begin - sizeof prefix;
  if (kept > 255) return false;
  message->same[begin + 1] = static_cast<uint8_t>(kept);
  return true;
}

bool read_call(Reader reader, Message* message) {
  uint32_t seen = 0;  // fields that are looked at here may come once
  while (!reader.done()) {
    const uint8_t* start = reader.at();
    uint64_t tag, value;
    if (!reader.varint(&tag)) return false;
    if (tag >> 3 == 0) return false;
    if (tag >> 3 < 32) {
      const uint32_t bit = 1u << (tag >> 3);
      if (seen & bit) return false;
      seen |= bit;
    }
    Bytes ignored;
    switch (tag) {
      case kCallId << 3 | kVarint:
        if (!reader.varint(&value)) return false;
        message->call_id = static_cast<int64_t>(value);
        break;
      case kLayer << 3 | kVarint:
        if (!reader.varint(&value) || value > INT32_MAX) return false;
        message->layer = static_cast<int64_t>(value);
        break;
      case kScale << 3 | kFixed64:
        if (!reader.skip(8)) return false;
        memcpy(&message->scale, reader.at() - 8, 8);
        message->has_scale = true;
        break;
      case kQ << 3 | kLength:
        if (!read_tensor(&reader, kQ, &message->has_q, &message->q, message)) return false;
        break;
      case kK << 3 | kLength:
        if (!read_tensor(&reader, kK, &message->has_k, &message->k, message)) return false;
        break;
      case kV << 3 | kLength:
        if (!read_tensor(&reader, kV, &message->has_v, &message->v, message)) return false;
        break;
      case kHeader << 3 | kLength:
        if (!reader.bytes(&ignored)) return false;
        message->has_header = true;
        break;
      case kTraceParent << 3 | kLength:
        if (!reader.bytes(&ignored)) return false;
        message->has_trace = true;
        break;
      case kCapability << 3 | kLength:
        if (!reader.bytes(&message->capability)) return false;
        break;
      case kSessionId << 3 | kLength:
        if (!reader.bytes(&message->session_id)) return false;
        if (!keep(message, start, reader.at() - start)) return false;
        break;
      default:
        if (!reader.skip_value(tag & 7) || !keep(message, start, reader.at() - start)) return false;
    }
  }
  return true;
}

// The type `_native.Call`

struct Call {
  PyObject_HEAD
  Py_buffer view;
  bool held;
  PyObject* session_id;
  PyObject* capability;
  Message message;
};

Call* as_call(PyObject* self) { return reinterpret_cast<Call*>(self); }

void dealloc(PyObject* self) {
  Call* call = as_call(self);
  if (call->held) PyBuffer_Release(&call->view);
  Py_XDECREF(call->session_id);
  Py_XDECREF(call->capability);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* as_bytes(const Bytes& bytes) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(bytes.data), bytes.size);
}

PyObject* tensors(PyObject* self, PyObject*) {
  const Message& message = as_call(self)->message;
  return Py_BuildValue("NNN", as_bytes(message.q), as_bytes(message.k), as_bytes(message.v));
}

PyObject* get_layer(PyObject* self, void*) {
  return PyLong_FromLongLong(as_call(self)->message.layer);
}

PyObject* get_call_id(PyObject* self, void*) {
  return PyLong_FromLongLong(as_call(self)->message.call_id);
}

PyObject* get_session_id(PyObject* self, void*) { return Py_NewRef(as_call(self)->session_id); }

PyObject* get_capability(PyObject* self, void*) { return Py_NewRef(as_call(self)->capability); }

PyObject* get_stores(PyObject* self, void*) {
  return PyBool_FromLong(as_call(self)->message.has_k);
}

PyObject* get_begins(PyObject* self, void*) {
  return PyBool_FromLong(as_call(self)->message.has_header);
}

PyObject* get_traced(PyObject* self, void*) {
  return PyBool_FromLong(as_call(self)->message.has_trace);
}

PyGetSetDef members[] = {
    {"layer", get_layer, nullptr, "The layer.", nullptr},
    {"call_id", get_call_id, nullptr, "As the client has chosen it.", nullptr},
    {"session_id", get_session_id, nullptr, "The session.", nullptr},
    {"capability", get_capability, nullptr, "What the caller shows; may be empty.", nullptr},
    {"stores", get_stores, nullptr, "Whether it brings keys.", nullptr},
    {"begins", get_begins, nullptr, "Whether it carries a step's header.", nullptr},
    {"traced", get_traced, nullptr, "Whether it belongs to a trace.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef methods[] = {
    {"tensors", tensors, METH_NOARGS, "Return copies of the bytes of q, k and v."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_getset, members},
    {0, nullptr},
};

PyType_Spec spec = {"kvservice_workers._native.Call", sizeof(Call), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyTypeObject* call_type = nullptr;

// Returns a Call, or None.
PyObject* read_from(PyObject* data, bool framed) {
  PyObject* self = call_type->tp_alloc(call_type, 0);
  if (!self) return nullptr;
  Call* call = as_call(self);
  if (PyObject_GetBuffer(data, &call->view, PyBUF_SIMPLE) != 0) return Py_DECREF(self), nullptr;
  call->held = true;
  Message& message = call->message;
  if (!read_message(static_cast<const uint8_t*>(call->view.buf), call->view.len, framed, &message)) {
    Py_DECREF(self);
    Py_RETURN_NONE;
  }
  const char* id = reinterpret_cast<const char*>(message.session_id.data);
  call->session_id = PyUnicode_DecodeUTF8(id ? id : "", message.session_id.size, nullptr);
  if (!call->session_id) {  // not UTF-8: protobuf refuses it in its own words
    PyErr_Clear();
    Py_DECREF(self);
    Py_RETURN_NONE;
  }
  call->capability = as_bytes(message.capability);
  if (!call->capability) return Py_DECREF(self), nullptr;
  return self;
}

PyObject* read_bare(PyObject*, PyObject* data) { return read_from(data, false); }

PyObject* read_framed(PyObject*, PyObject* data) { return read_from(data, true); }

PyMethodDef functions[] = {
    {"read_call", read_bare, METH_O, "Read an AttendCall; None if it is for protobuf to read."},
    {"read_frame", read_framed, METH_O, "Read an AttendRequest; None if it is for protobuf to read."},
    {nullptr, nullptr, 0, nullptr},
};

// Writing

size_t varint_size(uint64_t value) {
  size_t size = 1;
  while (value >= 0x80) value >>= 7, size++;
  return size;
}

uint8_t* put_varint(uint8_t* at, uint64_t value) {
  for (; value >= 0x80; value >>= 7) *at++ = static_cast<uint8_t>(value) | 0x80;
  *at++ = static_cast<uint8_t>(value);
  return at;
}

struct TensorSize {
  TensorSize(std::initializer_list<int64_t> dims, size_t item) : data(item), shape(0) {
    for (int64_t dim : dims) data *= dim, shape += varint_size(dim);
    body = 2 + 1 + varint_size(shape) + shape;
    if (data) body += 1 + varint_size(data) + data;
    field = 1 + varint_size(body) + body;
  }
  size_t data, shape, body, field;
};

// Writes a tensor field up to its bytes.
uint8_t* put_tensor(uint8_t* at, uint8_t number, const TensorSize& size, uint8_t dtype,
                    std::initializer_list<int64_t> dims) {
  *at++ = number << 3 | kLength;
  at = put_varint(at, size.body);
  *at++ = kDType << 3 | kVarint;
  *at++ = dtype;
  *at++ = kShape << 3 | kLength;
  at = put_varint(at, size.shape);
  for (int64_t dim : dims) at = put_varint(at, dim);
  if (size.data) {
    *at++ = kData << 3 | kLength;
    at = put_varint(at, size.data);
  }
  return at;
}

}  // namespace

bool read_message(const uint8_t* data, size_t size, bool framed, Message* message) {
  memset(message, 0, offsetof(Message, same));
  Reader reader(data, size);
  if (!framed) return read_call(reader, message);
  uint64_t tag;
  Bytes call;
  if (!reader.varint(&tag) || tag != (1 << 3 | kLength) || !reader.bytes(&call) || !reader.done())
    return false;
  return read_call(Reader(call.data, call.size), message);
}

PyObject* new_answer(const Answer& answer, uint8_t** out, uint8_t** lse) {
  const int64_t n = answer.num_queries, heads = answer.num_q_heads;
  const size_t item = answer.element == Element::kFloat32 ? 4 : 2;
  const TensorSize of_out({n, heads, answer.v_dim}, item), of_lse({n, heads}, 4);
  size_t body = of_out.field + (answer.has_lse ? of_lse.field : 0);
  const uint64_t id = static_cast<uint64_t>(answer.call_id);
  if (id) body += 1 + varint_size(id);
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, 1 + varint_size(body) + body);
  if (!bytes) return nullptr;
  uint8_t* at = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes));
  *at++ = 1 << 3 | kLength;
  at = put_varint(at, body);
  if (id) {
    *at++ = kResultCallId << 3 | kVarint;
    at = put_varint(at, id);
  }
  at = put_tensor(at, kOut, of_out, dtype_number(answer.element), {n, heads, answer.v_dim});
  *out = at;
  if (answer.has_lse) {
    at = put_tensor(at + of_out.data, kLse, of_lse, dtype_number(Element::kFloat32), {n, heads});
    *lse = at;
  }
  return bytes;
}

int add_call_type(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) return -1;
  call_type = reinterpret_cast<PyTypeObject*>(type);
  if (PyModule_AddFunctions(module, functions) != 0) return -1;
  return PyModule_AddObject(module, "Call", Py_NewRef(type));
}

const Message* message_of(PyObject* call) {
  if (Py_TYPE(call) != call_type) {
    PyErr_Format(PyExc_TypeError, "expected a Call, got %.100s", Py_TYPE(call)->tp_name);
    return nullptr;
  }
  return &as_call(call)->message;
}

}  // namespace kvservice
