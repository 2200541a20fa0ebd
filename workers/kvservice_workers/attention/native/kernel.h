// Attention over pages in place, for a whole ragged batch in one call. See kernel.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace kvservice {

// Which positions a query sees; the words of AttentionParams.
enum class Mask : int64_t { kFull = 0, kCausal = 1 };

enum class Element : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// One call. Names and meanings are those of PagedBatch and AttentionParams; the caller has
// validated them. Nothing here is written except `out` and `lse`.
struct Call {
  const void* q;        // T[num_queries, num_q_heads, k_dim], T by `element`
  const void* k_pages;  // T[num_pages, num_kv_heads, page_size, k_dim]
  const void* v_pages;  // T[num_pages, num_kv_heads, page_size, v_dim]
  float* out;           // [num_queries, num_q_heads, v_dim]
  float* lse;           // [num_queries, num_q_heads]
  Element element;
  int64_t num_pages, num_kv_heads, group_size, page_size, k_dim, v_dim;
  int64_t k_page_stride, v_page_stride;  // elements from a page to the next

  const int64_t* rows;  // the rows to do, or null: all
  int64_t num_rows;     // how many these are
  const int32_t* page_tables;
  int64_t max_pages;
  const int64_t* kv_starts;
  const int64_t* kv_stops;
  const int64_t* q_starts;
  const int64_t* q_positions;
  const int64_t* chunk_origins;
  const uint8_t* const* padding;  // per row of the batch, or null; each may be null
  const uint8_t* query_padding;   // or null

  float scale;
  float softcap;  // 0: none
  Mask mask;
  int64_t window;      // 0: none
  int64_t chunk;       // 0: none
  const float* sinks;  // [num_q_heads], or null
  int64_t num_threads;
  int64_t instruction_set;  // index into instruction_sets()
};

// The names of those instruction sets that there are loops for and that this machine has, best
// first.
std::vector<const char*> instruction_sets();


// Attends. Returns -1, or the row whose page table holds an id that does not exist where a stored
// position needs one; `out` and `lse` are then unspecified.
int64_t attend(const Call& call);

}  // namespace kvservice
