// SPDX-License-Identifier: Apache-2.0
// Short lists of numbers in one pool: most have one entry, and there are millions of them.
#pragma once
#include <cstdint>
#include <vector>

namespace stretto {

class Lists {
 public:
  void push(int32_t& head, int32_t value) {
    int32_t cell;
    if (free_ >= 0) {
      cell = free_;
      free_ = next_[cell];
    } else {
      cell = (int32_t)next_.size();
      next_.push_back(0), value_.push_back(0);
    }
    value_[cell] = value, next_[cell] = head, head = cell;
  }
  void clear(int32_t& head) {
    while (head >= 0) {
      int32_t rest = next_[head];
      next_[head] = free_, free_ = head, head = rest;
    }
  }
  template <class F>
  void each(int32_t head, F&& visit) const {
    for (; head >= 0; head = next_[head]) visit(value_[head]);
  }

 private:
  int32_t free_ = -1;
  std::vector<int32_t> next_, value_;
};
}  // namespace stretto
