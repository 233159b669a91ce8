// SPDX-License-Identifier: Apache-2.0
// Runs loaded programs: threadblocks as state machines, driven by whoever waits or else by one progress thread.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "network.h"
#include "program.h"
#include "segment.h"

namespace stretto::executor {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

enum class Failure : int { none = 0, peer_lost = 1, mismatch = 2, memory = 3, closed = 4 };

struct TraceRecord {
  int32_t block, step;
  int64_t slice;
  int64_t begin_ns, end_ns;
};

// Which of two ways to write a message costs less at present, writer and reader together: through the cache, or past it.
// Cores that share a cache hand over what is in it; between others a line costs more than memory does, and only measuring
// tells who runs where.
class Pace {
 public:
  bool past() {
    const bool better = wrote_[1] + read_[1] < 0.85 * (wrote_[0] + read_[0]);  // not for noise
    return ++turn_ % 64 == 0 ? !better : better;
  }
  void wrote(bool past, double ns_per_kib) { learn(wrote_[past], ns_per_kib); }
  void read(bool past, double ns_per_kib) { learn(read_[past], ns_per_kib); }

 private:
  // Who was interrupted took long, but not because of this: no more than twice what was known counts.
  static void learn(double& cost, double now) { cost = cost > 0 ? cost + (std::min(now, 2 * cost) - cost) / 4 : now; }
  double wrote_[2] = {0, 0}, read_[2] = {0, 0};
  uint32_t turn_ = 0;
};

struct OutState {
  Ring* ring = nullptr;
  char* slots = nullptr;
  size_t slot_bytes = 0;
  uint64_t sent = 0;
  Pace* pace[kSlots] = {};  // of the messages there whose cost is not yet known
  bool past[kSlots] = {};
  Transfer* transfers = nullptr;  // kSlots of them, on a network
};

struct InState {
  Ring* ring = nullptr;
  uint64_t taken = 0;
  uint64_t total = 0;
  Transfer* transfers = nullptr;
  uint64_t posted = 0;
};

struct BlockState {
  int64_t slice = 0;
  int32_t step = 0;
  uint64_t done = 0;  // instructions over all slices
};

struct CastState {
  char* slots = nullptr;
  size_t slot_bytes = 0;
  int64_t filled = 0;  // slices copied so far
};

struct Work {
  std::shared_ptr<Loaded> program;
  std::shared_ptr<const Layout> layout;
  uint64_t number = 0;  // of its communicator
  int64_t id = 0;       // of the engine
  bool notify = false;
  char* input = nullptr;
  char* output = nullptr;
  std::vector<Extent> gives, takes;  // instead of both, where sizes come with the call
  Type type = Type::f32;
  Op op = Op::sum;
  Reduce reduce = nullptr;
  Scale scale = nullptr;
  double factor = 1;

  std::vector<BlockState> block;
  std::vector<OutState> out;
  std::vector<InState> in;
  std::vector<CastState> cast;
  std::unique_ptr<Transfer[]> transfers;
  std::unique_ptr<char[]> scratch;
  size_t scratch_bytes = 0;
  uint64_t signature = 0;
  uint32_t facts = 0;
  size_t area = 0;  // in the own segment; 0: none
  Entry* entry = nullptr;
  size_t unfinished = 0;
  bool meeting = false;  // nothing to move, inside one host: over when every rank has announced it
  size_t met = 0;        // how many of the ranks have
  int64_t oldest_slice = 0;
  int64_t started_ns = 0, deadline_ns = 0, ended_ns = 0;
  int64_t asked_ns = 0;           // when peers were asked, after a timeout, whether they have begun
  int64_t again_ns = 0;           // when they are to be asked again
  std::map<int, bool> answered;   // and what they said
  bool traced = false;
  std::vector<TraceRecord> trace;

  std::atomic<bool> done{false};
  Failure failure = Failure::none;
  int lost_rank = -1;
  std::string why;
};

struct Settings {
  int rank = 0, world = 1;
  uint64_t job = 0;
  std::vector<int> local;     // ranks that share this host's memory, this one included, in order
  std::vector<int> segments;  // file descriptors, beside `local`
  std::vector<int> bells;     // event descriptors, beside `local`
  std::vector<int> control;   // a connected socket to each rank of the job, or -1
  size_t segment_bytes = 0;
  double timeout_s = 300;
};

// What epoll says of a descriptor that is no connection: news of data, or a kick.
constexpr int kData = -1, kKick = -2;

class Engine {
 public:
  explicit Engine(Settings settings);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void add_channel(const std::string& transports, const std::string& devices);
  std::vector<std::string> addresses() const;
  void connect(int peer, const std::vector<std::string>& addresses);
  void run();  // starts the progress thread, once everything is connected
  std::shared_ptr<Work> start(const std::shared_ptr<Loaded>& program, char* input, char* output, int64_t total, Type type,
                              Op op, double timeout_s, bool traced, bool blocking, bool notify);
  std::shared_ptr<Work> start_pieces(const std::shared_ptr<Loaded>& program, std::vector<Extent> gives,
                                     std::vector<Extent> takes, double timeout_s, bool traced, bool blocking, bool notify);
  bool wait(Work& work, double seconds);
  std::vector<int64_t> wait_any(double seconds);
  std::vector<double> repeat(const std::shared_ptr<Loaded>& program, char* input, char* output, int64_t total, Type type,
                             Op op, int times, const std::shared_ptr<Loaded>& fence);
  bool retired(int comm);
  void renumber(int comm, uint64_t first);
  uint64_t count_delegated(int comm);
  std::map<int, bool> ask_delegated(int comm, uint64_t number, const std::vector<int>& ranks, double seconds);
  std::optional<std::pair<int, std::string>> find_culprit(const std::vector<int>& ranks);
  void blame(int lost, const std::string& why);
  void close();
  void abandon();  // in a forked child, right after the fork
  std::map<std::string, int64_t> counters();

 private:
  struct Comm {
    uint64_t next = 0;
    Failure failure = Failure::none;
    int lost_rank = -1;
    std::string why;
    uint64_t failed_from = UINT64_MAX;
    std::vector<int> ranks;
  };

  // Why a rank gives up: another is lost. It tells so before it leaves, or it would itself be taken for the lost one.
  struct Cause {
    int lost = -1;
    std::string why;
  };

  // A question to other ranks about a call that is not the executor's, while somebody waits for the answers.
  struct Inquiry {
    int comm;
    uint64_t number;
    std::map<int, bool> answers;
  };

  std::unique_lock<std::mutex> entered();
  std::shared_ptr<Work> begin(const std::shared_ptr<Work>& w, double timeout_s, bool blocking);
  bool activate(const std::shared_ptr<Work>& w);
  void announce(Work& w, Entry* entry);
  void open_transfers(Work& w, size_t count);
  bool admit();
  bool pass();
  bool advance(Work& w, int block);
  bool meet(Work& w);
  const Entry& entry_of(const Work& w, int local) const;
  void execute(Work& w, const Instruction& x, int64_t slice, const char* received, char* slot, bool past);
  bool find(Work& w, int conn);
  const char* peek(Work& w, int conn, const Instruction& x, int64_t slice);
  void release(Work& w, int conn, uint32_t took);
  void post(Work& w, int conn, uint64_t slot);
  static void wake(Bell& bell, uint32_t how, int event);
  char* room(Work& w, const Block& b, const Instruction& x, int64_t slice, bool* fill);
  Pace* put(Work& w, const Block& b, const Instruction& x, int64_t slice, char* slot, size_t bytes, bool* past);
  static void learn(OutState& s, size_t slot);
  void publish(Work& w, const Block& b, const Instruction& x, char* slot, size_t bytes, Pace* pace, bool past);
  bool drained(Work& w);
  void sweep();
  void ring();
  void finish(Work& w);
  void over(Work& w);
  void fail(Work& w, Failure f, int lost, const std::string& why, bool tell);
  void fail_comm(int comm, uint64_t number, Failure f, int lost, const std::string& why, bool tell);
  void stalled();
  void check_deadlines(int64_t now);
  bool all_answered(Work& w, int64_t now);
  void check_boards(Work& w);
  bool began(const Work& w, int peer) const;
  bool may_still_come(int peer) const;
  std::string describe(const Work& w) const;
  void mismatch(Work& w, int peer, uint64_t total, uint32_t facts);
  Cause culprit(int peer, const std::vector<int>& ranks);
  void say_cause(int lost, const std::string& why);
  std::string wrong_length(const Work& w, int peer, int64_t slice, uint64_t got, size_t expected) const;
  void peer_gone(int peer, const std::string& why);
  void hang_up(int peer);
  void read_control(int peer);
  void tell(int comm, uint64_t number, Failure f, int lost, const std::string& why);
  bool progress();
  void part(std::unique_lock<std::mutex>& lock);
  void progress_loop();
  void doze(std::unique_lock<std::mutex>& lock, int64_t limit_ns);
  void leave();
  bool arm_network();
  size_t message_bytes(const Work& w, const Instruction& x, int64_t slice) const;

  Settings set_;
  std::vector<int> local_index_;  // per rank of the job: its place in `local`, or -1
  std::vector<Segment> segment_;
  Segment* own_ = nullptr;
  int own_local_ = 0;
  Arena arena_;
  std::vector<std::unique_ptr<Network>> networks_;
  std::map<std::tuple<uint32_t, uint64_t, uint32_t>, Announcement> heard_;

  std::mutex mutex_;
  std::condition_variable handover_;
  std::atomic<bool> driven_{false};  // a waiter drives
  std::atomic<bool> stop_{false};
  bool closed_ = false;
  std::vector<std::shared_ptr<Work>> queued_, active_, lingering_;
  std::map<int, Comm> comms_;
  std::vector<std::string> gone_;  // per rank: why it is gone; empty: it is there
  std::vector<int64_t> gone_at_;   // and since when
  std::vector<bool> left_;         // and whether it has closed its executor, instead of ending without a word
  std::vector<Cause> cause_;       // per rank: why it has given up, if it has said so; the own place: what this one said
  std::vector<Inquiry*> inquiries_;
  std::array<std::atomic<uint64_t>, kMaxComms> delegated_{};  // collectives that another backend runs, per communicator
  std::vector<std::pair<int, std::string>> lost_;  // whom UCX has lost, and why: not yet looked into
  std::vector<std::vector<char>> inbox_;
  int own_bell_ = -1, kick_ = -1, data_poll_ = -1, all_poll_ = -1;
  std::thread thread_;
  const pid_t process_ = getpid();
  std::atomic<int> contenders_{0};
  int spins_ = 0, yields_ = 0;
  uint64_t to_ring_ = 0;    // ranks of the host that have to be told of what was published or consumed
  std::vector<Pace> pace_;  // per rank of the host; the own place: for what several read
  std::vector<std::pair<size_t, std::unique_ptr<char[]>>> spare_;  // scratch of finished works
  std::mutex news_mutex_;  // of its own: who waits for news must not hold up who drives
  std::condition_variable news_;
  std::vector<int64_t> ended_;  // works that asked for it, since the last `wait_any`
  int64_t started_ = 0, sleeps_ = 0, rings_ = 0;
};
}  // namespace stretto::executor
