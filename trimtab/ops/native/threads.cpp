// A thread pool. Not OpenMP: PyTorch has its own copy of that runtime, and two of them would compete for the cores.
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
      shares_ = std::vector<Share>(threads);
      for (int i = 0; i < threads; i++) shares_[i].next = tasks * i / threads, shares_[i].end = tasks * (i + 1) / threads;
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

  // First a share of its own, so that neighbouring tasks, which lie side by side in memory, run on the same core: taking
  // them in turns costs a fifth of the bandwidth. Then what is left of the others' shares.
  void work(int worker) {
    const int count = (int)shares_.size();
    for (int i = 0; i < count; i++) {
      Share& share = shares_[(worker + i) % count];
      for (int64_t task; (task = share.next.fetch_add(1)) < share.end;) body_(context_, task, worker);
    }
  }

  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  std::mutex entry_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  std::vector<Share> shares_;
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

}  // namespace

void run_tasks(int64_t tasks, int threads, void (*body)(void*, int64_t, int), void* context) {
  if (threads > tasks) threads = (int)tasks;
  if (threads > 1) return pool().run(tasks, threads, body, context);
  for (int64_t task = 0; task < tasks; task++) body(context, task, 0);
}

}  // namespace trimtab
