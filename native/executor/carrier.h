// SPDX-License-Identifier: Apache-2.0
// Carries slices of GPU programs between hosts, on a thread that needs neither Python nor CUDA: a call to CUDA may stand
// still with the interpreter's lock until the very slice has come that such a thread would have carried.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine.h"

namespace stretto::executor {

// Where the GPU and the thread find each other's words, and the ranks of a host each other's progress.
struct CarrierWords {
  uint32_t* released = nullptr;      // the GPU's stream goes on with all slices up to this one
  const uint32_t* copied = nullptr;  // the GPU has copied all slices up to this one
  int64_t* board = nullptr;          // per rank of the host: with how many slices it is through
  int me = 0, size = 0;
};

struct Slice {
  int64_t number = 0;
  uint32_t mark = 0;  // what `copied` must have come to
  std::shared_ptr<Loaded> program;  // none: nothing to carry
  char* input = nullptr;
  char* output = nullptr;
  int64_t total = 0;
  Type type = Type::f32;
  Op op = Op::sum;
  double timeout_s = 0;
  std::shared_ptr<Work> work;
};

struct CarrierState {
  int64_t posted, waiting, copied, running, through, lowest, released;
};

class Carrier {
 public:
  Carrier(Engine* engine, CarrierWords words);
  ~Carrier();
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  int64_t post(Slice slice);
  bool wait_for_room(int64_t most, double seconds);
  // Until something has failed, and then at once: its kind and words; `none` where the time is up first.
  std::pair<int, std::string> wait_failure(double seconds);
  void abort();     // lets every stream go on; what is on the network ends by its own limit
  int64_t close();  // ends the thread; how many slices the network still has
  CarrierState state();

 private:
  void run();
  bool start_next();
  bool end_first();
  bool let_go();
  void pause();
  void fail(int kind, const std::string& why);
  void release(int64_t number);
  int64_t lowest() const;
  bool copied(const Slice& s) const;

  Engine* engine_;
  CarrierWords words_;
  std::mutex mutex_;
  std::condition_variable wake_, news_;
  std::deque<Slice> waiting_, running_;
  int64_t posted_ = 0, through_ = 0, released_ = 0;
  bool over_ = false, ended_ = false;
  int failure_ = 0;
  int64_t failed_ns_ = 0;
  std::string why_;
  std::thread thread_;
  const pid_t process_ = getpid();
};
}  // namespace stretto::executor
