// SPDX-License-Identifier: Apache-2.0
// UCX: one context and worker per channel, tag-matched messages between staging slots.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace stretto::executor {

struct Announcement {
  uint64_t job;
  uint32_t comm, source;
  uint64_t number, signature, total;
  uint32_t facts, what;
};

// One message under way. Lives in its work until UCX is done with it.
struct Transfer {
  std::unique_ptr<char[]> bytes;
  void* request = nullptr;
  bool busy = false;
  bool done = false;
  bool failed = false;
  uint64_t length = 0;
};

class Network {
 public:
  using Heard = std::function<void(const Announcement&)>;
  using Lost = std::function<void(int peer, const std::string& why)>;
  Network(const std::string& transports, const std::string& devices, uint64_t job, int rank, int world, Heard heard,
          Lost lost);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  const std::string& address() const { return address_; }
  void connect(int peer, const std::string& address);
  bool progress();
  // False: something has already happened, make progress first.
  bool arm();
  int event_fd() const { return event_fd_; }
  void send(Transfer& t, size_t bytes, int peer, uint64_t tag);
  void receive(Transfer& t, size_t bytes, uint64_t tag);
  void cancel(Transfer& t);
  void announce(int peer, const Announcement& a);
  // Whether UCX is done with all that was sent to a peer.
  bool sent(int peer) const;
  // Whether a peer has it all; it is asked once the last message is out. Closing before that could take it back.
  bool received(int peer);

 private:
  struct Inner;
  std::unique_ptr<Inner> inner_;
  std::string address_;
  int event_fd_ = -1;
};
}  // namespace stretto::executor
