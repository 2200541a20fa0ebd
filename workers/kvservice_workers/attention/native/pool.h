// A small pool of threads, one pinned to each core, that help callers with their items.
#pragma once

#include <cstdint>
#include <functional>

namespace kvservice {

// Calls work(0) to work(num_items - 1), each once, by the caller and at most num_threads - 1
// helpers; returns when all are done. Any number of threads may call at once. `work` must not
// throw.
void run_in_parallel(int64_t num_items, int64_t num_threads,
                     const std::function<void(int64_t)>& work);

}  // namespace kvservice
