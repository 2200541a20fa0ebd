// The type `_native.Step`. See step.cpp.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace kvservice {

// Adds the type to the module. Returns 0, or -1 with an exception set.
int add_step_type(PyObject* module);

}  // namespace kvservice
