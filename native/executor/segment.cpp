// SPDX-License-Identifier: Apache-2.0
#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

namespace stretto::executor {
namespace {

// A signal (a profiler's, say) may interrupt it while memory is being found.
bool reserve(int fd, size_t from, size_t upto) {
  int done;
  do done = fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(upto - from));
  while (done != 0 && errno == EINTR);
  return done == 0;
}
}  // namespace

Segment::Segment(int fd, bool own, size_t bytes) {
  if (own) {
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || !reserve(fd, 0, sizeof(SegmentHeader)))
      throw std::runtime_error(std::string("shared memory: could not reserve the segment: ") + strerror(errno));
  } else {
    struct stat about {};
    if (fstat(fd, &about) != 0 || about.st_size < static_cast<off_t>(sizeof(SegmentHeader)))
      throw std::runtime_error("shared memory: a peer's segment is too short");
    bytes = static_cast<size_t>(about.st_size);
  }
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) throw std::runtime_error(std::string("shared memory: could not map a segment: ") + strerror(errno));
  base_ = static_cast<char*>(p);
  size_ = bytes;
  if (own) {
    header()->size = bytes;
    header()->magic = kMagic;
  } else if (header()->magic != kMagic || header()->size != bytes) {
    munmap(p, bytes);
    base_ = nullptr;
    throw std::runtime_error("shared memory: a peer's segment is not one of ours");
  }
}

Segment::~Segment() {
  if (base_) munmap(base_, size_);
}

Segment& Segment::operator=(Segment&& o) noexcept {
  std::swap(base_, o.base_);
  std::swap(size_, o.size_);
  return *this;
}

size_t Arena::take(size_t bytes, std::string* error) {
  bytes = (bytes + 4095) / 4096 * 4096;
  size_t at = begin_, place = 0;
  for (; place < taken_.size(); ++place) {
    if (taken_[place].at - at >= bytes) break;
    at = taken_[place].at + taken_[place].bytes;
  }
  if (at + bytes > end_) return 0;
  if (at + bytes > reserved_) {
    // Reserved before it is touched: a full memory is an error here, not a bus error later.
    const size_t step = 1 << 20;
    const size_t upto = std::min(end_, (at + bytes + step - 1) / step * step);
    if (!reserve(fd_, reserved_, upto)) {
      *error = "shared memory is full: could not reserve " + std::to_string(upto - begin_) +
               " bytes of staging: " + strerror(errno);
      return 0;
    }
    reserved_ = upto;
  }
  taken_.insert(taken_.begin() + static_cast<std::ptrdiff_t>(place), Block{at, bytes});
  used_ += bytes;
  return at;
}

void Arena::give(size_t at) {
  for (auto it = taken_.begin(); it != taken_.end(); ++it)
    if (it->at == at) {
      used_ -= it->bytes;
      taken_.erase(it);
      return;
    }
}

void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, int64_t limit_ns) {
  timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
}  // namespace stretto::executor
