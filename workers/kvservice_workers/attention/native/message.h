// Attend's messages as bytes: a call read where it lies, and an answer written in one piece.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

#include "kernel.h"

namespace kvservice {

// A tensor of a message: its bytes. Shape and dtype are in `Message::same`.
struct Bytes {
  const uint8_t* data;
  Py_ssize_t size;
};

// An AttendCall, taken apart in two: what may differ between the layers of a step, and all the
// rest, which is the same if and only if `same` is.
struct Message {
  static constexpr size_t kMaxSame = 4096;

  int64_t call_id, layer;
  double scale;
  Bytes session_id, capability, q, k, v;
  bool has_header, has_trace, has_scale, has_q, has_k, has_v;
  size_t num_same;
  uint8_t same[kMaxSame];
};

// Reads a serialized AttendCall, or (`framed`) an AttendRequest with a whole one. Returns false if
// it is none, or one that is unusual in any way: those are for protobuf to read.
bool read_message(const uint8_t* data, size_t size, bool framed, Message* message);

// What an answer holds, in the order in which it travels.
struct Answer {
  int64_t call_id;
  Element element;  // of `out`
  int64_t num_queries, num_q_heads, v_dim;
  bool has_lse;
};

// Returns an AttendResponse, as protobuf would serialize it, with room for the tensors' bytes at
// `out` and `lse`; null with an exception set if there is no memory.
PyObject* new_answer(const Answer& answer, uint8_t** out, uint8_t** lse);

// The type `_native.Call`: a message, and what it was read from. Adds it to the module, with the
// function that reads one. Returns 0, or -1 with an exception set.
int add_call_type(PyObject* module);

// Returns the message of a `_native.Call`; null with an exception set if it is something else.
const Message* message_of(PyObject* call);

}  // namespace kvservice
