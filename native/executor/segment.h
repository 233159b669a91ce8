// SPDX-License-Identifier: Apache-2.0
// One shared segment per rank: a doorbell, a board that says which work the rank is at, and staging memory.
// The owner alone allocates; peers on the host map it and read messages where they lie.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stretto::executor {

constexpr int kMaxComms = 256;
constexpr int kBoardDepth = 16;  // works of one communicator that may be unfinished anywhere on the host
constexpr int kMaxLocal = 64;
constexpr int kSlots = 4;  // messages that may wait on one connection
constexpr size_t kLine = 64;
constexpr uint64_t kMagic = 0x5374726574746f31;

struct alignas(64) Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> asleep;  // 0: awake, 1: a waiter in a futex, 2: the progress thread in epoll
};

// One direction of one connection, in the sender's segment.
struct alignas(64) Ring {
  std::atomic<uint64_t> head;  // messages published
  struct {
    uint32_t at;  // in lines from the start of the segment
    uint32_t nbytes;
  } message[kSlots];
  alignas(64) std::atomic<uint64_t> tail;  // messages consumed; written by the receiver
  std::atomic<uint32_t> wants_room;
  uint32_t took[kSlots];  // how long reading what was there took, in ns per KiB; 0: not measured
};

struct alignas(64) Entry {
  std::atomic<uint64_t> number;  // sequence number + 1 of the announced work; 0: none yet
  uint64_t signature;
  uint64_t total;
  uint32_t facts;  // type, operation, collective
  uint32_t rings[kMaxLocal];  // per rank of the host: where its rings begin, in lines
};

struct SegmentHeader {
  uint64_t magic;
  uint64_t size;
  alignas(64) Bell bell;
  Entry board[kMaxComms][kBoardDepth];
};

// A mapped segment, own or foreign.
class Segment {
 public:
  Segment() = default;
  Segment(int fd, bool own, size_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  Segment(Segment&& o) noexcept { *this = std::move(o); }
  Segment& operator=(Segment&& o) noexcept;

  SegmentHeader* header() const { return reinterpret_cast<SegmentHeader*>(base_); }
  char* line(uint32_t at) const { return base_ + size_t{at} * kLine; }
  uint32_t line_of(const void* p) const { return static_cast<uint32_t>((static_cast<const char*>(p) - base_) / kLine); }
  char* base() const { return base_; }
  size_t size() const { return size_; }
  explicit operator bool() const { return base_ != nullptr; }

 private:
  char* base_ = nullptr;
  size_t size_ = 0;
};

// First fit from the front: what was used last is still in the cache. Returns 0 when there is no room now.
class Arena {
 public:
  Arena() = default;
  Arena(int fd, size_t begin, size_t end) : fd_(fd), begin_(begin), end_(end), reserved_(begin) {}
  size_t take(size_t bytes, std::string* error);
  void give(size_t at);
  size_t capacity() const { return end_ - begin_; }
  size_t used() const { return used_; }

 private:
  struct Block {
    size_t at, bytes;
  };
  int fd_ = -1;
  size_t begin_ = 0, end_ = 0, reserved_ = 0, used_ = 0;
  std::vector<Block> taken_;  // sorted
};

void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, int64_t limit_ns);
void futex_wake(std::atomic<uint32_t>& word);
}  // namespace stretto::executor
