// Threads. The kernels run on PyTorch's own OpenMP threads: those wait for work in a loop for some milliseconds after
// each operation of PyTorch, and threads of ours would compete with them for the cores. The runtime is found among the
// loaded libraries and not linked, because a second copy would have threads of its own. Without it, and in forked
// processes, where its threads do not exist, there is a pool of our own.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "native/native.h"

namespace trimtab {
namespace {

// The tasks of one call. A thread first takes a share of its own, so that neighbouring tasks, which lie side by side in
// memory, run on the same core: taking them in turns costs a fifth of the bandwidth. Then what is left of the others'.
class Shares {
 public:
  Shares(int64_t tasks, int threads) : shares_(threads) {
    for (int i = 0; i < threads; i++) shares_[i].next = tasks * i / threads, shares_[i].end = tasks * (i + 1) / threads;
  }

  void work(int worker, void (*body)(void*, int64_t, int), void* context) {
    const int count = (int)shares_.size();
    for (int i = 0; i < count; i++) {
      Share& share = shares_[(worker + i) % count];
      for (int64_t task; (task = share.next.fetch_add(1)) < share.end;) body(context, task, worker);
    }
  }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  std::vector<Share> shares_;
};

class Pool {
 public:
  void run(int64_t tasks, int threads, void (*body)(void*, int64_t, int), void* context) {
    std::lock_guard one_caller_at_a_time(entry_);
    {
      std::lock_guard lock(mutex_);
      while ((int)workers_.size() < threads - 1) {
        int worker = (int)workers_.size() + 1;
        try {
          workers_.emplace_back([this, worker] { serve(worker); });
        } catch (const std::system_error&) {  // no more threads available: continue with the existing ones
          threads = worker;
          break;
        }
        workers_.back().detach();
      }
      body_ = body, context_ = context;
      shares_ = Shares(tasks, threads);
      wanted_ = running_ = threads - 1;
      generation_++;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void serve(int worker) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (worker > wanted_) continue;
      lock.unlock();
      work(worker);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  void work(int worker) { shares_.work(worker, body_, context_); }

  std::mutex entry_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Shares shares_{0, 0};
  void (*body_)(void*, int64_t, int) = nullptr;
  void* context_ = nullptr;
  int wanted_ = 0, running_ = 0;
  uint64_t generation_ = 0;
};

// Threads do not exist after a fork (a data loader's workers), so the child starts its own pool. Pools are never
// destroyed, so that no thread is joined during the interpreter's shutdown.
Pool& pool() {
  static std::mutex mutex;
  static Pool* current = nullptr;
  static pid_t owner = 0;
  std::lock_guard lock(mutex);
  if (owner != getpid()) current = new Pool, owner = getpid();
  return *current;
}

// --- OpenMP, by the functions that compilers call for a parallel region

struct OpenMP {
  void (*parallel)(void (*body)(void*), void* context, unsigned threads, unsigned flags);
  int (*thread_num)();
  int (*in_parallel)();
  pid_t owner = getpid();

  OpenMP() {
    find(parallel, "GOMP_parallel"), find(thread_num, "omp_get_thread_num"), find(in_parallel, "omp_in_parallel");
  }

  template <class F>
  static void find(F& function, const char* name) {
    function = (F)dlsym(RTLD_DEFAULT, name);
  }

  bool usable() const {
    return parallel && thread_num && in_parallel && owner == getpid() && !in_parallel();
  }
};

bool openmp_allowed = true;

const OpenMP& openmp() {
  static const OpenMP found;
  return found;
}

void run_openmp(const OpenMP& openmp, int64_t tasks, int threads, void (*body)(void*, int64_t, int), void* context) {
  Shares shares(tasks, threads);
  auto region = [&] { shares.work(openmp.thread_num(), body, context); };
  openmp.parallel([](void* f) { (*(decltype(region)*)f)(); }, &region, threads, 0);
}

}  // namespace

bool share_threads(bool allowed) {
  openmp_allowed = allowed;
  return allowed && openmp().usable();
}

void run_tasks(int64_t tasks, int threads, void (*body)(void*, int64_t, int), void* context) {
  if (tasks > 1 && threads > 1) {
    if (openmp_allowed && openmp().usable()) return run_openmp(openmp(), tasks, threads, body, context);
    return pool().run(tasks, threads > tasks ? (int)tasks : threads, body, context);
  }
  for (int64_t task = 0; task < tasks; task++) body(context, task, 0);
}

}  // namespace trimtab
