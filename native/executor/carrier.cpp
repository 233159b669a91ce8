// SPDX-License-Identifier: Apache-2.0
#include "carrier.h"

#include <chrono>
#include <utility>

namespace stretto::executor {

namespace {
constexpr double kDriveS = 1e-4;   // how long the network alone is driven before the GPU and neighbours are looked at
constexpr auto kPause = std::chrono::microseconds(10);
constexpr auto kRest = std::chrono::milliseconds(500);
// Whoever is told of a failure lets the streams go on, after it has marked their calls as failed; but it may itself wait
// for a stream, and so does not wait for ever.
constexpr int64_t kGraceNs = 20'000'000'000;
}  // namespace

Carrier::Carrier(Engine* engine, CarrierWords words) : engine_(engine), words_(words) {
  thread_ = std::thread([this] { run(); });
}

Carrier::~Carrier() {
  if (getpid() != process_) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  close();
}

int64_t Carrier::post(Slice slice) {
  std::lock_guard lock(mutex_);
  slice.number = ++posted_;
  if (over_)
    release(posted_);
  else
    waiting_.push_back(std::move(slice));
  wake_.notify_all();
  return posted_;
}

bool Carrier::wait_for_room(int64_t most, double seconds) {
  std::unique_lock lock(mutex_);
  return news_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return over_ || posted_ - released_ < most; });
}

std::pair<int, std::string> Carrier::wait_failure(double seconds) {
  std::unique_lock lock(mutex_);
  news_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return ended_ || over_ || failure_; });
  return {failure_, why_};
}

void Carrier::abort() {
  std::lock_guard lock(mutex_);
  over_ = true;
  waiting_.clear();
  release(posted_);
  wake_.notify_all();
  news_.notify_all();
}

int64_t Carrier::close() {
  abort();
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    wake_.notify_all();
    news_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  int64_t left = 0;
  for (const Slice& s : running_) left += s.work && !s.work->done;
  return left;
}

CarrierState Carrier::state() {
  std::lock_guard lock(mutex_);
  int64_t ready = 0;
  for (const Slice& s : waiting_) ready += copied(s);
  return {posted_, static_cast<int64_t>(waiting_.size()), ready, static_cast<int64_t>(running_.size()), through_, lowest(),
          released_};
}

void Carrier::run() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (ended_) return;
      if (failure_ && !over_ && now_ns() - failed_ns_ > kGraceNs) {
        over_ = true;
        waiting_.clear();
        release(posted_);
        news_.notify_all();
      }
      if (over_ || failure_ || released_ == posted_) {
        wake_.wait_for(lock, kRest);
        continue;
      }
    }
    try {
      const bool moved = start_next() | end_first() | let_go();
      if (!moved) pause();
    } catch (const std::exception& error) {
      fail(static_cast<int>(Failure::closed), error.what());
    }
  }
}

// The oldest slice that the GPU has copied goes onto the network, in the order that all ranks have.
bool Carrier::start_next() {
  Slice next;
  {
    std::lock_guard lock(mutex_);
    if (waiting_.empty() || !copied(waiting_.front())) return false;
    next = std::move(waiting_.front());
    waiting_.pop_front();
  }
  if (next.program)
    next.work = engine_->start(next.program, next.input, next.output, next.total, next.type, next.op, next.timeout_s, false,
                               false, false);
  std::lock_guard lock(mutex_);
  running_.push_back(std::move(next));
  return true;
}

bool Carrier::end_first() {
  std::unique_lock lock(mutex_);
  if (running_.empty()) return false;
  const std::shared_ptr<Work> work = running_.front().work;
  if (work && !work->done.load(std::memory_order_acquire)) return false;
  if (work && work->failure != Failure::none) {
    lock.unlock();
    fail(static_cast<int>(work->failure), work->why);
    return true;
  }
  through_ = running_.front().number;
  running_.pop_front();
  __atomic_store_n(words_.board + words_.me, through_, __ATOMIC_RELEASE);
  return true;
}

// Once all ranks of the host have a slice: no kernel starts that would wait for a slower neighbour's network.
bool Carrier::let_go() {
  std::lock_guard lock(mutex_);
  const int64_t all = std::min(lowest(), through_);
  if (all <= released_ || over_) return false;
  release(all);
  news_.notify_all();
  return true;
}

void Carrier::pause() {
  std::shared_ptr<Work> work;
  {
    std::lock_guard lock(mutex_);
    if (!running_.empty()) work = running_.front().work;
  }
  if (work)
    engine_->wait(*work, kDriveS);
  else
    std::this_thread::sleep_for(kPause);
}

void Carrier::fail(int kind, const std::string& why) {
  std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = kind;
  why_ = why;
  failed_ns_ = now_ns();
  news_.notify_all();
}

void Carrier::release(int64_t number) {
  released_ = std::max(released_, number);
  __atomic_store_n(words_.released, static_cast<uint32_t>(released_), __ATOMIC_RELEASE);
}

int64_t Carrier::lowest() const {
  int64_t least = INT64_MAX;
  for (int r = 0; r < words_.size; ++r) least = std::min(least, __atomic_load_n(words_.board + r, __ATOMIC_ACQUIRE));
  return least;
}

bool Carrier::copied(const Slice& s) const {
  return static_cast<int32_t>(__atomic_load_n(words_.copied, __ATOMIC_ACQUIRE) - s.mark) >= 0;
}
}  // namespace stretto::executor
