// SPDX-License-Identifier: Apache-2.0
// Who drives: one waiter, or the progress thread; how they sleep and are woken.
#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine.h"

namespace stretto::executor {
namespace {

constexpr int64_t kTick = 200'000'000;  // how often deadlines are looked at while asleep
constexpr int64_t kPatience = 60'000;

void drain(int event) {
  uint64_t count;
  while (read(event, &count, sizeof count) > 0) {
  }
}
}  // namespace

bool Engine::wait(Work& w, double seconds) {
  if (w.done.load(std::memory_order_acquire)) return true;
  int64_t limit = 0;  // the clock is not looked at before there is time for it
  const auto rest = [&] {
    const int64_t now = now_ns();
    if (!limit) limit = now + static_cast<int64_t>(seconds * 1e9);
    return limit - now;
  };
  ++contenders_;
  std::unique_lock lock(mutex_);
  --contenders_;
  while (!w.done && driven_) {
    const int64_t left = rest();
    if (left <= 0) return false;
    handover_.wait_for(lock, std::chrono::nanoseconds(left));
  }
  if (w.done) return true;
  driven_ = true;
  Bell& bell = own_->header()->bell;
  // Peers look at it with every message: writing what is there anyway would cost each of them a cache miss.
  if (bell.asleep.load(std::memory_order_relaxed)) bell.asleep.store(0, std::memory_order_relaxed);
  if (!networks_.empty()) {
    epoll_event none{};
    none.data.fd = kData;
    epoll_ctl(all_poll_, EPOLL_CTL_MOD, data_poll_, &none);
  }
  int idle = 0;
  int64_t idle_since = 0;
  while (!w.done) {
    if (pass()) {
      idle = 0;
      idle_since = 0;
      if (contenders_.load(std::memory_order_relaxed)) {
        lock.unlock();
        sched_yield();
        lock.lock();
      }
      continue;
    }
    if (w.done) break;
    ++idle;
    const int spins = networks_.empty() ? spins_ : std::max(spins_, 20), yields = networks_.empty() ? yields_ : 0;
    if (idle < spins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    if (idle < spins + yields) {
      // A yield that takes long means that others have real work: then sleeping is better than standing in line.
      if (!idle_since) idle_since = now_ns();
      if (idle > spins && now_ns() - idle_since > kPatience) {
        idle = spins + yields;
        continue;
      }
      lock.unlock();
      sched_yield();
      lock.lock();
      continue;
    }
    const int64_t left = rest();
    stalled();
    check_deadlines(limit - left);
    if (w.done || left <= 0) break;
    doze(lock, std::min(left, kTick));
    idle = 0;
    idle_since = 0;
  }
  driven_ = false;
  if (!networks_.empty()) {
    epoll_event in{};
    in.events = EPOLLIN;
    in.data.fd = kData;
    epoll_ctl(all_poll_, EPOLL_CTL_MOD, data_poll_, &in);
  }
  leave();
  handover_.notify_all();
  return w.done;
}

// The driver has nothing to do: sleep until a peer rings, the network has news, or the time is up.
void Engine::doze(std::unique_lock<std::mutex>& lock, int64_t limit_ns) {
  Bell& bell = own_->header()->bell;
  ++sleeps_;
  if (networks_.empty()) {
    const uint32_t seen = bell.rung.load(std::memory_order_acquire);
    bell.asleep.store(1, std::memory_order_seq_cst);
    if (!pass()) {
      lock.unlock();
      futex_sleep(bell.rung, seen, limit_ns);
      lock.lock();
    }
  } else {
    bell.asleep.store(2, std::memory_order_seq_cst);
    if (!pass() && arm_network()) {
      lock.unlock();
      epoll_event event{};
      epoll_wait(data_poll_, &event, 1, static_cast<int>(limit_ns / 1'000'000) + 1);
      drain(own_bell_);
      lock.lock();
    }
  }
  bell.asleep.store(0, std::memory_order_relaxed);
}

void Engine::wake(Bell& bell, uint32_t how, int event) {
  bell.rung.fetch_add(1, std::memory_order_release);
  if (how == 1) {
    futex_wake(bell.rung);
  } else {
    const uint64_t one = 1;
    (void)!write(event, &one, sizeof one);
  }
}

void Engine::progress_loop() {
  unsigned backoff = 50;
  while (!stop_) {
    // Whoever starts or waits drives, and leaves things so that an event wakes this thread: it only fills the gaps.
    if (!driven_) {
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (!lock) {
        usleep(backoff);
        backoff = std::min(2 * backoff, 1600u);
        continue;
      }
      backoff = 50;
      Bell& bell = own_->header()->bell;
      int idle = 0;
      bool armed = false;
      while (!driven_ && !stop_ && !contenders_.load(std::memory_order_relaxed)) {
        if (pass()) {
          idle = 0;
        } else if (++idle > (active_.empty() || !networks_.empty() ? 0 : yields_)) {
          stalled();
          check_deadlines(now_ns());
          bell.asleep.store(2, std::memory_order_seq_cst);
          armed = !pass() && arm_network();
          if (armed) break;
          bell.asleep.store(0, std::memory_order_relaxed);
          idle = 0;
        }
        lock.unlock();
        if (idle) sched_yield();
        lock.lock();
      }
      handover_.notify_all();
      if (!armed && !driven_ && !stop_) {
        // It gave way to somebody who may find his work done and leave: nothing would wake a sleeper then.
        lock.unlock();
        usleep(backoff);
        continue;
      }
    }
    epoll_event events[16];
    const int count = epoll_wait(all_poll_, events, 16, static_cast<int>(kTick / 1'000'000));
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == kKick) {
        drain(kick_);
      } else if (events[i].data.fd == kData) {
        std::unique_lock lock(mutex_);
        // With networks a waiter sleeps on the same descriptor: what wakes it must be left to it.
        if (!driven_ || networks_.empty()) drain(own_bell_);
      } else {
        std::unique_lock lock(mutex_);
        read_control(events[i].data.fd);
      }
    }
  }
}

// Leaves everything to the progress thread: it sleeps until a peer rings, or UCX's descriptors say that something has come.
void Engine::leave() {
  const bool under_way = !active_.empty() || !queued_.empty();
  if (!under_way && networks_.empty()) return;
  if (under_way) own_->header()->bell.asleep.store(2, std::memory_order_seq_cst);
  for (int i = 0; i < 64; ++i) {
    // What one threadblock did may let another go on, for which nobody rings.
    if (under_way && pass()) continue;
    if (arm_network()) return;
    if (!under_way) pass();
  }
  const uint64_t one = 1;  // busier than that: have it look for itself
  (void)!write(kick_, &one, sizeof one);
}

bool Engine::progress() {
  bool any = false;
  for (const auto& n : networks_) any |= n->progress();
  // Who is lost may have said why before, or that another is: that counts more than a connection that broke.
  for (const auto& [peer, why] : std::exchange(lost_, {})) {
    read_control(peer);
    peer_gone(peer, why);
    hang_up(peer);
  }
  return any;
}

bool Engine::arm_network() {
  for (const auto& n : networks_)
    if (!n->arm()) return false;
  return true;
}
}  // namespace stretto::executor
