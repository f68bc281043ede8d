// A small pool of threads. Not OpenMP: PyTorch brings its own copy of that runtime, and two of them fight over the cores.
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
        } catch (const std::system_error&) {  // the system gives no more threads: go on with those we have
          threads = worker;
          break;
        }
        workers_.back().detach();
      }
      tasks_ = tasks, body_ = body, context_ = context;
      next_ = 0, wanted_ = running_ = threads - 1;
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

  void work(int worker) {
    for (int64_t task; (task = next_.fetch_add(1)) < tasks_;) body_(context_, task, worker);
  }

  std::mutex entry_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  std::atomic<int64_t> next_{0};
  int64_t tasks_ = 0;
  void (*body_)(void*, int64_t, int) = nullptr;
  void* context_ = nullptr;
  int wanted_ = 0, running_ = 0;
  uint64_t generation_ = 0;
};

// Threads do not survive a fork (a data loader's workers): the child starts its own pool. Pools are never destroyed,
// so that no thread is joined while the interpreter shuts down.
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
