// Attention over pages in place, for a whole ragged batch in one call.
//
// Work is cut into items: at most kQueries queries of one row by one chunk of its positions. What
// an item is depends on its row alone, and the items of a task are merged in their order, so a
// row's result is the same to the bit whatever its neighbours and however many threads there are.
// Items are taken from a counter; the thread that completes a task's last item merges the task.

#include "kernel.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "pool.h"

namespace kvservice {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "of two elements, the first is the lower");

constexpr int kTile = 16;  // tokens
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634f;
constexpr int64_t kQueries = 16;         // of a row that are done at a time
constexpr int64_t kChunk = 512;          // positions of an item, at least
constexpr int64_t kMaxChunks = 128;      // of a task; longer rows have longer chunks
constexpr int64_t kListed = 512;         // tokens that are looked up at a time
constexpr int64_t kAhead = 2;            // tiles of prefetching
constexpr int64_t kMaxFloats = 1 << 21;  // of partial sums held at a time, unless a task has more
constexpr int64_t kAlone = 1 << 20;      // multiply-adds that are not worth waking anybody

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
float to_float(float value) { return value; }
float to_float(BFloat16 value) { return from_bits(uint32_t{value.bits} << 16); }
float to_float(Float16 value) {
  const uint32_t size = value.bits & 0x7fffu;
  const float finite = from_bits(size << 13) * 0x1p112f;  // see widen in tile.inc
  uint32_t bits;
  memcpy(&bits, &finite, sizeof bits);
  return from_bits(bits | (size >= 0x7c00u ? 0x7f800000u : 0) | (value.bits & 0x8000u) << 16);
}

// Some queries of one row, and the positions that any of them sees.
struct Task {
  int64_t row;
  int64_t first, last;  // queries of the batch, half-open
  int64_t position;     // of query `first`
  int64_t begin, end;   // positions, half-open
  int64_t chunk;        // positions of an item
  int64_t num_items;
  int64_t floats;       // offset of its items' sums
  std::atomic<int64_t> pending{0};  // items that are not done

  int64_t num_queries() const { return last - first; }
};

struct Item {
  Task* task;
  int64_t index;
};

// The lowest position that the mask lets a query see.
int64_t lowest(const Call& call, int64_t row, int64_t position) {
  if (call.window > 0) return position - call.window + 1;
  if (call.chunk > 0) {
    const int64_t distance = position - call.chunk_origins[row];
    const int64_t within = ((distance % call.chunk) + call.chunk) % call.chunk;
    return position - within;
  }
  return 0;
}

// Running sums of an item: values [num_kv_heads][num_rows][v_dim], then maxima and totals
// [num_kv_heads][num_rows] each. A row here is a query and a head of its group:
// query * group_size + head.
struct Sums {
  float *values, *maxima, *totals;
};

int64_t sums_size(const Call& call, int64_t num_queries) {
  return call.num_kv_heads * call.group_size * num_queries * (call.v_dim + 2);
}

Sums sums_at(const Call& call, int64_t num_queries, float* floats) {
  const int64_t rows = call.num_kv_heads * call.group_size * num_queries;
  return {floats, floats + rows * call.v_dim, floats + rows * (call.v_dim + 1)};
}

// What a thread needs while it does one item.
struct Scratch {
  std::vector<float> q, scores;
  const void* k[kListed + kTile];
  const void* v[kListed + kTile];
  int64_t positions[kListed];
};

// Tokens of an item, looked up: pointers to their rows in KV head 0.
template <class T>
struct Tokens {
  const T* const* k;
  const T* const* v;
  const int64_t* positions;
  int64_t size;
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

void clear(const Call& call, int64_t rows, Sums sums) {
  std::fill_n(sums.values, rows * call.v_dim, 0.0f);
  std::fill_n(sums.maxima, rows, -kInfinity);
  std::fill_n(sums.totals, rows, 0.0f);
}

// Makes a task's queries f32[num_kv_heads][query][head of group][k_dim], times all that scores are
// to be multiplied by.
template <class T>
void load_queries(const Call& call, const Task& task, Scratch& scratch) {
  const int64_t dim = call.k_dim, group = call.group_size, queries = task.num_queries();
  const int64_t heads = call.num_kv_heads * group;
  const float factor = call.softcap > 0 ? call.scale : call.scale * kLog2E;
  scratch.q.resize(heads * queries * dim);
  scratch.scores.resize(group * queries * kTile);
  for (int64_t query = 0; query < queries; query++)
    for (int64_t head = 0; head < heads; head++) {
      const T* from = static_cast<const T*>(call.q) + ((task.first + query) * heads + head) * dim;
      float* to = &scratch.q[((head / group * queries + query) * group + head % group) * dim];
      for (int64_t d = 0; d < dim; d++) to[d] = factor * to_float(from[d]);
    }
}

// Looks up to kListed tokens of [*position, end) up, leaving out padding. False: a bad page id.
template <class T>
bool look_up(const Call& call, int64_t row, int64_t* position, int64_t end, Scratch& scratch,
             Tokens<T>* tokens) {
  const uint8_t* padding = call.padding ? call.padding[row] : nullptr;
  const int32_t* table = call.page_tables + row * call.max_pages;
  const T* k_pages = static_cast<const T*>(call.k_pages);
  const T* v_pages = static_cast<const T*>(call.v_pages);
  const T** k = reinterpret_cast<const T**>(scratch.k);
  const T** v = reinterpret_cast<const T**>(scratch.v);
  int64_t count = 0, at = *position;
  while (at < end && count < kListed) {
    const int64_t page_index = at / call.page_size, page_end = (page_index + 1) * call.page_size;
    const int64_t stop = std::min(std::min(end, page_end), at + kListed - count);
    int64_t page = -1;  // looked at only where a token is no padding: it may be a hole
    for (; at < stop; at++) {
      if (padding && padding[at]) continue;
      if (page < 0) page = page_index < call.max_pages ? table[page_index] : -1;
      if (page < 0 || page >= call.num_pages) return false;
      const int64_t offset = at - page_index * call.page_size;
      k[count] = k_pages + page * call.k_page_stride + offset * call.k_dim;
      v[count] = v_pages + page * call.v_page_stride + offset * call.v_dim;
      scratch.positions[count++] = at;
    }
  }
  // A tile is read in fours: repeat the last token, whose weight there will be 0.
  for (int64_t extra = count; count > 0 && extra < count + kTile; extra++)
    k[extra] = k[count - 1], v[extra] = v[count - 1];
  *position = at;
  *tokens = {k, v, scratch.positions, count};
  return true;
}

// Whether some query of the task does not see some position of [first, last].
bool hides_any(const Call& call, const Task& task, int64_t first, int64_t last) {
  const int64_t newest = task.position + task.num_queries() - 1;
  return first < lowest(call, task.row, newest) ||
         (call.mask != Mask::kFull && last > task.position);
}

// Hides from each query what its mask hides among the tokens of a tile.
void hide(const Call& call, const Task& task, const int64_t* positions, int n, float* scores) {
  for (int64_t query = 0; query < task.num_queries(); query++) {
    const int64_t position = task.position + query, from = lowest(call, task.row, position);
    const int64_t to = call.mask == Mask::kFull ? INT64_MAX : position;
    for (int64_t head = 0; head < call.group_size; head++)
      for (int j = 0; j < n; j++)
        if (positions[j] < from || positions[j] > to)
          scores[(query * call.group_size + head) * kTile + j] = -kInfinity;
  }
}

// The inner loops, for each instruction set that this machine may have.
#if defined(__x86_64__) && defined(__GNUC__)
#define KV_MANY_TARGETS
namespace avx512 {
#define KV_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
constexpr int kLanes = 16, kQ = 4;
#include "tile.inc"
}  // namespace avx512
namespace avx2 {
#define KV_TARGET __attribute__((target("avx2,fma")))
constexpr int kLanes = 8, kQ = 2;
#include "tile.inc"
}  // namespace avx2
#endif
namespace plain {
#define KV_TARGET
constexpr int kLanes = 4, kQ = 2;
#include "tile.inc"
}  // namespace plain

using AttendItem = bool (*)(const Call&, const Item&, float*, Scratch&);
struct Loops {
  const char* name;
  AttendItem attend_item;
};

// The loops that this machine can run, best first.
const std::vector<Loops>& loops() {
  static const std::vector<Loops> all = [] {
    std::vector<Loops> found;
#ifdef KV_MANY_TARGETS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      found.push_back({"avx512", avx512::attend_any});
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      found.push_back({"avx2", avx2::attend_any});
#endif
    found.push_back({"plain", plain::attend_any});
    return found;
  }();
  return all;
}

// Merges one query's and head's sums of all items of a task, in their order.
void merge_items(const Call& call, const Task& task, float* floats, int64_t row, float sink,
                 float* out, float* lse) {
  const int64_t queries = task.num_queries(), size = sums_size(call, queries), dim = call.v_dim;
  float maximum = sink;
  for (int64_t item = 0; item < task.num_items; item++)
    maximum = std::max(maximum, sums_at(call, queries, floats + item * size).maxima[row]);
  const float finite = maximum == -kInfinity ? 0.0f : maximum;  // -inf - -inf would be NaN
  float total = std::exp2(sink - finite);
  for (int64_t item = 0; item < task.num_items; item++) {
    const Sums sums = sums_at(call, queries, floats + item * size);
    if (sums.totals[row] == 0) continue;
    const float factor = std::exp2(sums.maxima[row] - finite);
    const float* values = sums.values + row * dim;
    total += factor * sums.totals[row];
    for (int64_t d = 0; d < dim; d++) out[d] += factor * values[d];
  }
  if (total == 0) return;
  const float share = 1.0f / total;
  for (int64_t d = 0; d < dim; d++) out[d] *= share;
  *lse = static_cast<float>(finite * 0.6931471805599453 + std::log(double{total}));
}

// Merges all items of a task, and writes its queries' outputs.
void finish(const Call& call, const Task& task, float* floats) {
  const int64_t queries = task.num_queries(), group = call.group_size;
  const int64_t heads = call.num_kv_heads * group;
  for (int64_t query = 0; query < queries; query++) {
    const bool is_padding = call.query_padding && call.query_padding[task.first + query];
    for (int64_t head = 0; head < heads; head++) {
      const int64_t at = (task.first + query) * heads + head;
      const int64_t row = (head / group * queries + query) * group + head % group;
      const float sink = call.sinks ? call.sinks[head] * kLog2E : -kInfinity;
      float* out = call.out + at * call.v_dim;
      std::fill_n(out, call.v_dim, 0.0f);
      call.lse[at] = -kInfinity;
      if (!is_padding) merge_items(call, task, floats, row, sink, out, &call.lse[at]);
    }
  }
}

// As much of a call's work as is done at a time.
struct Portion {
  std::vector<std::unique_ptr<Task>> tasks;
  std::vector<Item> items;
  int64_t floats = 0;  // of all items' sums
  int64_t cost = 0;    // multiply-adds
};

std::unique_ptr<Task> make_task(const Call& call, int64_t row, int64_t first_query) {
  auto task = std::make_unique<Task>();
  task->row = row;
  task->first = call.q_starts[row] + first_query;
  task->last = std::min(call.q_starts[row + 1], task->first + kQueries);
  task->position = call.q_positions[row] + first_query;
  task->begin = std::max({int64_t{0}, call.kv_starts[row], lowest(call, row, task->position)});
  task->end = call.kv_stops[row];
  if (call.mask != Mask::kFull)
    task->end = std::min(task->end, task->position + task->num_queries());
  const int64_t span = std::max<int64_t>(0, task->end - task->begin);
  const int64_t most = kChunk * kMaxChunks;
  task->chunk = kChunk * std::max<int64_t>(1, (span + most - 1) / most);
  task->num_items = (span + task->chunk - 1) / task->chunk;
  task->pending = task->num_items;
  return task;
}

// Plans the call's rows from call.rows[*index] on, and in it from *query on, as far as they fit.
Portion plan(const Call& call, int64_t* index, int64_t* query) {
  Portion portion;
  for (; *index < call.num_rows; ++*index, *query = 0) {
    const int64_t row = call.rows ? call.rows[*index] : *index;
    for (; call.q_starts[row] + *query < call.q_starts[row + 1]; *query += kQueries) {
      auto task = make_task(call, row, *query);
      const int64_t needed = task->num_items * sums_size(call, task->num_queries());
      if (portion.floats > 0 && portion.floats + needed > kMaxFloats) return portion;
      task->floats = portion.floats;
      portion.floats += needed;
      if (task->num_items > 0)
        portion.cost += (task->end - task->begin) * task->num_queries() * call.num_kv_heads *
                        call.group_size * (call.k_dim + call.v_dim);
      for (int64_t item = 0; item < task->num_items; item++)
        portion.items.push_back({task.get(), item});
      portion.tasks.push_back(std::move(task));
    }
  }
  return portion;
}

// Returns a row whose page table is wrong, or -1.
int64_t attend_portion(const Call& call, const Portion& portion) {
  const AttendItem attend_item = loops().at(call.instruction_set).attend_item;
  const std::unique_ptr<float[]> floats(new float[portion.floats]);  // not initialised
  std::atomic<int64_t> bad_row{-1};
  for (const auto& task : portion.tasks)
    if (task->num_items == 0) finish(call, *task, nullptr);
  run_in_parallel(
      static_cast<int64_t>(portion.items.size()), portion.cost < kAlone ? 1 : call.num_threads,
      [&](int64_t index) {
        static thread_local Scratch scratch;
        const Item& item = portion.items[index];
        Task& task = *item.task;
        float* sums = floats.get() + task.floats;
        const int64_t offset = item.index * sums_size(call, task.num_queries());
        if (!attend_item(call, item, sums + offset, scratch)) bad_row = task.row;
        if (task.pending.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(call, task, sums);
      });
  return bad_row;
}

}  // namespace

std::vector<const char*> instruction_sets() {
  std::vector<const char*> names;
  for (const Loops& each : loops()) names.push_back(each.name);
  return names;
}

int64_t attend(const Call& call) {
  int64_t bad_row = -1;
  for (int64_t index = 0, query = 0; index < call.num_rows && bad_row < 0;)
    bad_row = attend_portion(call, plan(call, &index, &query));
  return bad_row;
}

}  // namespace kvservice
