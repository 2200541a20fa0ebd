// Helpers wait blocked, never spinning, and each is pinned to its core: a woken thread that may
// run anywhere tends to land on the caller's core and to wait there for a tick, which makes two
// threads slower than one. A caller wakes helpers of other cores than the one it is running on.

#include "pool.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace kvservice {
namespace {

using Work = std::function<void(int64_t)>;

// One call's items. `helpers` is how many threads are at it beside the caller; under Pool::mutex.
struct Job {
  const Work* work;
  int64_t num_items;
  std::atomic<int64_t> next{0};
  int helpers = 0;
  std::condition_variable left;

  void run() {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < num_items;)
      (*work)(item);
  }
};

struct Helper {
  int core;
  Job* job = nullptr;  // to begin with; taken back by its caller if it never got to run
  std::condition_variable wake;
};

int current_core() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Helper>> helpers;  // made at first use; they live forever

  void start() {  // under mutex
    if (!helpers.empty()) return;
#ifdef __linux__
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int core = 0; core < CPU_SETSIZE; core++)
      if (CPU_ISSET(core, &allowed)) add(core);
#else
    for (unsigned core = 0; core < std::thread::hardware_concurrency(); core++) add(int(core));
#endif
  }

  void add(int core) {
    helpers.push_back(std::make_unique<Helper>());
    Helper* helper = helpers.back().get();
    helper->core = core;
    std::thread thread([this, helper] { serve(helper); });
#ifdef __linux__
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);  // if it fails: unpinned
#endif
    thread.detach();
  }

  void serve(Helper* helper) {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      helper->wake.wait(lock, [&] { return helper->job != nullptr; });
      Job* job = helper->job;
      helper->job = nullptr;
      job->helpers++;
      lock.unlock();
      job->run();
      lock.lock();
      // Notified under the mutex: the job is the caller's, and gone once it has seen this.
      if (--job->helpers == 0) job->left.notify_one();
    }
  }

  void run(Job* job, int64_t num_helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      start();
      const int core = current_core();
      for (auto& helper : helpers) {
        if (num_helpers == 0) break;
        if (helper->core == core || helper->job != nullptr) continue;
        helper->job = job;
        helper->wake.notify_one();
        num_helpers--;
      }
    }
    job->run();
    std::unique_lock<std::mutex> lock(mutex);
    for (auto& helper : helpers)
      if (helper->job == job) helper->job = nullptr;  // never got to run: do not wait for it
    job->left.wait(lock, [&] { return job->helpers == 0; });
  }
};

// A forked child has none of its parent's threads, and perhaps a mutex that one of them held.
alignas(Pool) char storage[sizeof(Pool)];
Pool* pool() {
  static Pool* const first = [] {
    pthread_atfork(nullptr, nullptr, [] { new (storage) Pool; });
    return new (storage) Pool;
  }();
  return first;
}

}  // namespace

void run_in_parallel(int64_t num_items, int64_t num_threads, const Work& work) {
  Job job;
  job.work = &work;
  job.num_items = num_items;
  if (num_threads <= 1 || num_items <= 1) {
    job.run();
    return;
  }
  pool()->run(&job, std::min(num_threads, num_items) - 1);
}

}  // namespace kvservice
