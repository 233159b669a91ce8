// SPDX-License-Identifier: Apache-2.0
// Starting works, giving them memory, and ending them.
#include "engine.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace stretto::executor {
namespace {

constexpr int64_t kParting = 60'000'000'000, kBroken = 2'000'000'000;  // how long to part may take, and after a failure
constexpr size_t kLinger = 4, kLingerBytes = 256 << 10;  // works, and their staging, that wait to be cleared away

void watch(int poll, int fd, int what) {
  epoll_event e{};
  e.events = EPOLLIN;
  e.data.fd = what;
  if (epoll_ctl(poll, EPOLL_CTL_ADD, fd, &e) != 0)
    throw std::runtime_error(std::string("descriptors: could not watch one: ") + strerror(errno));
}

uint64_t mix(uint64_t a, uint64_t b) {
  a ^= b + 0x9e3779b97f4a7c15 + (a << 6) + (a >> 2);
  a *= 0xff51afd7ed558ccd;
  return a ^ (a >> 32);
}
}  // namespace

Engine::Engine(Settings settings) : set_(std::move(settings)) {
  local_index_.assign(static_cast<size_t>(set_.world), -1);
  gone_.resize(static_cast<size_t>(set_.world));
  gone_at_.resize(static_cast<size_t>(set_.world));
  left_.resize(static_cast<size_t>(set_.world));
  cause_.resize(static_cast<size_t>(set_.world));
  inbox_.resize(static_cast<size_t>(set_.world));
  segment_.resize(set_.local.size());
  pace_.resize(set_.local.size());
  for (size_t i = 0; i < set_.local.size(); ++i) {
    local_index_[static_cast<size_t>(set_.local[i])] = static_cast<int>(i);
    const bool own = set_.local[i] == set_.rank;
    segment_[i] = Segment(set_.segments[i], false, 0);
    if (!own) continue;
    own_ = &segment_[i];
    own_local_ = static_cast<int>(i);
    own_bell_ = set_.bells[i];
    const size_t begin = (sizeof(SegmentHeader) + 4095) / 4096 * 4096;
    arena_ = Arena(set_.segments[i], begin, own_->size());
  }
  kick_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  data_poll_ = epoll_create1(EPOLL_CLOEXEC);
  all_poll_ = epoll_create1(EPOLL_CLOEXEC);
  if (kick_ < 0 || data_poll_ < 0 || all_poll_ < 0)
    throw std::runtime_error(std::string("descriptors: could not make one: ") + strerror(errno));
  watch(data_poll_, own_bell_, kData);
  watch(all_poll_, data_poll_, kData);
  watch(all_poll_, kick_, kKick);
  for (int peer = 0; peer < set_.world; ++peer)
    if (set_.control[static_cast<size_t>(peer)] >= 0) watch(all_poll_, set_.control[static_cast<size_t>(peer)], peer);
  // With a core for each rank of the host a short spin beats any sleep; else whoever spins keeps others from running.
  const bool crowded = static_cast<long>(set_.local.size()) > sysconf(_SC_NPROCESSORS_ONLN);
  spins_ = crowded ? 0 : 200;
  yields_ = crowded ? 20 : 50;
}

Engine::~Engine() {
  close();
  if (getpid() == process_) return;
  // In a child of the process that made it: the thread is not here, and what UCX has is the parent's.
  if (thread_.joinable()) thread_.detach();
  for (auto& n : networks_) (void)n.release();
}

void Engine::add_channel(const std::string& transports, const std::string& devices) {
  const auto heard = [this](const Announcement& a) {
    for (auto& w : active_)
      if (static_cast<uint32_t>(w->program->comm) == a.comm && w->number == a.number) {
        if (w->signature != a.signature && !w->done) mismatch(*w, static_cast<int>(a.source), a.total, a.facts);
        return;
      }
    // It has not begun here: kept until it does. (Peers are at most a board's depth ahead of one another.)
    if (heard_.size() < 65536) heard_[{a.comm, a.number, a.source}] = a;
  };
  const auto lost = [this](int peer, const std::string& why) { lost_.emplace_back(peer, why); };
  networks_.push_back(std::make_unique<Network>(transports, devices, set_.job, set_.rank, set_.world, heard, lost));
  watch(data_poll_, networks_.back()->event_fd(), kData);
}

std::vector<std::string> Engine::addresses() const {
  std::vector<std::string> all;
  for (const auto& n : networks_) all.push_back(n->address());
  return all;
}

void Engine::connect(int peer, const std::vector<std::string>& addresses) {
  for (size_t i = 0; i < networks_.size(); ++i) networks_[i]->connect(peer, addresses.at(i));
}

void Engine::run() {
  thread_ = std::thread([this] { progress_loop(); });
}

std::shared_ptr<Work> Engine::start(const std::shared_ptr<Loaded>& program, char* input, char* output, int64_t total,
                                    Type type, Op op, double timeout_s, bool traced, bool blocking, bool notify) {
  auto w = std::make_shared<Work>();
  const size_t element = type_bytes(type);
  const Loaded& p = *program;
  if (p.by_call) throw std::invalid_argument("count: " + p.name + " was loaded for sizes by call; use start_pieces");
  w->program = program;
  w->input = input;
  w->output = output;
  w->type = type;
  w->op = op;
  w->traced = traced;
  w->notify = notify;
  if (p.combining) {
    w->reduce = kernels().reduce[static_cast<int>(type)][static_cast<int>(op)];
    if (op == Op::avg) {
      w->scale = kernels().scale[static_cast<int>(type)];
      w->factor = 1.0 / p.parts;
    }
  }
  const auto lock = entered();
  w->layout = program->layout(total, element);
  w->facts = static_cast<uint32_t>(type) | static_cast<uint32_t>(op) << 8 | p.kind << 16;
  if (!p.combining) w->facts &= ~0xff00u;
  w->signature = mix(mix(p.signature, static_cast<uint64_t>(total)), p.combining ? w->facts : element);
  const auto near = [&](int r) { return local_index_[static_cast<size_t>(r)] >= 0; };
  w->meeting = total == 0 && p.all_with_all() && std::all_of(p.ranks.begin(), p.ranks.end(), near);
  return begin(w, timeout_s, blocking);
}

// An all-to-all with pieces of any sizes: what ranks must agree on is only what each sends to each, which messages show.
std::shared_ptr<Work> Engine::start_pieces(const std::shared_ptr<Loaded>& program, std::vector<Extent> gives,
                                           std::vector<Extent> takes, double timeout_s, bool traced, bool blocking,
                                           bool notify) {
  if (!program->by_call) throw std::invalid_argument("pieces: " + program->name + " was not loaded for sizes by call");
  auto w = std::make_shared<Work>();
  w->program = program;
  w->type = Type::u8;
  w->traced = traced;
  w->notify = notify;
  const auto lock = entered();
  w->layout = program->layout(gives, takes);
  w->gives = std::move(gives);
  w->takes = std::move(takes);
  w->facts = static_cast<uint32_t>(w->type) | program->kind << 16;
  w->signature = mix(program->signature, 1);
  return begin(w, timeout_s, blocking);
}

std::unique_lock<std::mutex> Engine::entered() {
  ++contenders_;
  std::unique_lock lock(mutex_);
  --contenders_;
  if (closed_) throw std::runtime_error("the executor is closed");
  return lock;
}

// Gives a work its number and lets it go. Called with the lock.
std::shared_ptr<Work> Engine::begin(const std::shared_ptr<Work>& w, double timeout_s, bool blocking) {
  const Loaded& p = *w->program;
  w->started_ns = now_ns();
  w->deadline_ns = w->started_ns + static_cast<int64_t>((timeout_s > 0 ? timeout_s : set_.timeout_s) * 1e9);
  Comm& comm = comms_[p.comm];
  comm.ranks = p.ranks;
  comm.next = std::max(comm.next, p.first);
  w->number = comm.next++;
  w->id = started_++;
  if (w->number >= comm.failed_from) {
    w->failure = comm.failure;
    w->lost_rank = comm.lost_rank;
    w->why = comm.why;
    over(*w);
    return w;
  }
  for (int r : p.ranks)
    if (!gone_[static_cast<size_t>(r)].empty() && !may_still_come(r) && !began(*w, r)) {
      queued_.push_back(w);
      const Cause found = culprit(r, p.ranks);
      fail(*w, Failure::peer_lost, found.lost, found.why, true);
      return w;
    }
  queued_.push_back(w);
  admit();
  if (!driven_) {
    if (blocking) return w;
    while (pass() && !w->done) {
    }
    if (!w->done) leave();  // unless somebody waits before anybody rings
  } else {
    // The one who drives may be asleep: it has to look at the new work.
    Bell& bell = own_->header()->bell;
    uint32_t how = bell.asleep.exchange(0);
    if (how) wake(bell, how, own_bell_);
  }
  return w;
}

// Gives queued works their memory, in the order of each communicator: then the oldest one always has its own. One
// communicator does not wait for another, since ranks need not agree on the order between them.
bool Engine::admit() {
  bool any = false;
  std::vector<int> blocked;
  for (size_t i = 0; i < queued_.size();) {
    const std::shared_ptr<Work> w = queued_[i];
    const int comm = w->program->comm;
    if (std::find(blocked.begin(), blocked.end(), comm) != blocked.end() || !activate(w)) {
      blocked.push_back(comm);
      ++i;
      continue;
    }
    any = true;
    // It has left the queue if it failed; then others of its communicator have, too.
    if (i < queued_.size() && queued_[i] == w)
      queued_.erase(queued_.begin() + static_cast<std::ptrdiff_t>(i));
    else
      i = 0;
  }
  return any;
}

bool Engine::activate(const std::shared_ptr<Work>& w) {
  const Loaded& p = *w->program;
  const Layout& l = *w->layout;
  // Looking whether peers have taken everything is a cache miss for each: several works at once cost no more than one.
  Entry* entry = &own_->header()->board[p.comm][w->number % kBoardDepth];
  const auto in_use = [&] {
    const auto holds = [&](const auto& other) { return other->entry == entry; };
    return std::any_of(active_.begin(), active_.end(), holds) || std::any_of(lingering_.begin(), lingering_.end(), holds);
  };
  // What peers have written comes from their caches: ask for all of it at once, and early.
  for (int r : p.ranks)
    if (const int local = local_index_[static_cast<size_t>(r)]; local >= 0) __builtin_prefetch(&entry_of(*w, local));
  if (lingering_.size() >= kLinger || arena_.used() > kLingerBytes || in_use()) sweep();
  if (in_use()) return false;
  if (w->meeting) {
    w->unfinished = 1;
    announce(*w, entry);
    for (int r : p.ranks)
      if (r != set_.rank) to_ring_ |= uint64_t{1} << local_index_[static_cast<size_t>(r)];
    active_.push_back(w);
    return true;
  }
  w->out.resize(p.out.size());
  w->in.resize(p.in.size());
  w->cast.resize(p.cast.size());
  const auto lines = [](size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; };
  size_t bytes = 0, transfers = 0;
  for (size_t i = 0; i < p.out.size(); ++i) {
    if (p.out[i].channel < 0)
      bytes += sizeof(Ring) + kSlots * lines(l.out_bytes[i]);
    else
      transfers += kSlots;
  }
  for (size_t c : l.cast_bytes) bytes += kSlots * lines(c);
  for (const Connection& c : p.in) transfers += c.channel < 0 ? 0 : kSlots;
  if (bytes) {
    std::string error;
    w->area = arena_.take(bytes, &error);
    if (!w->area && error.empty() && !lingering_.empty()) {
      sweep();
      w->area = arena_.take(bytes, &error);
    }
    if (!w->area) {
      if (error.empty() && bytes > arena_.capacity())
        error = "shared memory: " + p.name + " needs " + std::to_string(bytes) + " bytes of staging but segment_bytes leaves " +
                std::to_string(arena_.capacity());
      if (error.empty()) return false;
      fail(*w, Failure::memory, set_.rank, describe(*w) + ": " + error + " (on rank " + std::to_string(set_.rank) + ")", true);
      return true;
    }
  }
  std::fill_n(std::begin(entry->rings), set_.local.size(), 0u);
  char* at = own_->base() + w->area;
  for (size_t i = 0; i < p.out.size(); ++i) {
    if (p.out[i].channel >= 0) continue;
    auto* r = new (at) Ring{};
    at += sizeof(Ring);
    w->out[i].ring = r;
    uint32_t& first = entry->rings[local_index_[static_cast<size_t>(p.out[i].peer)]];
    if (!first) first = own_->line_of(r);
  }
  for (size_t i = 0; i < p.out.size(); ++i) {
    if (p.out[i].channel >= 0) continue;
    w->out[i].slots = at;
    w->out[i].slot_bytes = lines(l.out_bytes[i]);
    at += kSlots * w->out[i].slot_bytes;
  }
  for (size_t i = 0; i < p.cast.size(); ++i) {
    w->cast[i].slots = at;
    w->cast[i].slot_bytes = lines(l.cast_bytes[i]);
    at += kSlots * w->cast[i].slot_bytes;
  }
  for (size_t i = 0; i < p.in.size(); ++i)
    w->in[i].total = l.in_messages[i];
  w->block.resize(p.block.size());
  w->unfinished = 0;
  for (size_t i = 0; i < p.block.size(); ++i) {
    if (p.block[i].first == p.block[i].last)
      w->block[i].slice = l.block_slices[i];
    else
      ++w->unfinished;
  }
  if (p.scratch) {
    const auto window = static_cast<size_t>(std::min<int64_t>(p.window, l.slices));
    w->scratch_bytes = static_cast<size_t>(p.scratch) * window * l.scratch_slice_bytes;
    for (auto it = spare_.begin(); it != spare_.end(); ++it)
      if (it->first == w->scratch_bytes) {
        w->scratch = std::move(it->second);
        spare_.erase(it);
        break;
      }
    if (!w->scratch) w->scratch = std::make_unique_for_overwrite<char[]>(w->scratch_bytes);
  }
  announce(*w, entry);
  active_.push_back(w);
  for (size_t i = 0; i < p.in.size() && !w->done; ++i)
    if (p.in[i].channel < 0 && find(*w, static_cast<int>(i))) __builtin_prefetch(w->in[i].ring);
  if (transfers && !w->done) open_transfers(*w, transfers);
  return true;
}

void Engine::announce(Work& w, Entry* entry) {
  w.entry = entry;
  entry->number.store(0, std::memory_order_relaxed);  // who looks meanwhile sees that it changes
  std::atomic_thread_fence(std::memory_order_release);
  entry->signature = w.signature;
  entry->total = static_cast<uint64_t>(w.layout->total);
  entry->facts = w.facts;
  entry->number.store(w.number + 1, std::memory_order_release);
}

void Engine::open_transfers(Work& w, size_t count) {
  const Loaded& p = *w.program;
  w.transfers = std::make_unique<Transfer[]>(count);
  Transfer* next = w.transfers.get();
  const auto slots = [&](size_t bytes) {
    Transfer* first = next;
    for (int k = 0; k < kSlots; ++k) (next++)->bytes = std::make_unique_for_overwrite<char[]>(bytes);
    return first;
  };
  std::vector<int> told;
  for (size_t i = 0; i < p.out.size(); ++i)
    if (p.out[i].channel >= 0) {
      w.out[i].transfers = slots(w.layout->out_bytes[i]);
      told.push_back(p.out[i].peer);
    }
  for (size_t i = 0; i < p.in.size(); ++i)
    if (p.in[i].channel >= 0) {
      w.in[i].transfers = slots(w.layout->in_bytes[i]);
      told.push_back(p.in[i].peer);
    }
  std::sort(told.begin(), told.end());
  told.erase(std::unique(told.begin(), told.end()), told.end());
  const Announcement a{set_.job, static_cast<uint32_t>(p.comm), static_cast<uint32_t>(set_.rank), w.number, w.signature,
                       static_cast<uint64_t>(w.layout->total), w.facts, 0};
  for (int peer : told) {
    networks_[0]->announce(peer, a);
    const auto found = heard_.find({a.comm, a.number, static_cast<uint32_t>(peer)});
    if (found == heard_.end()) continue;
    const Announcement theirs = found->second;
    heard_.erase(found);
    if (theirs.signature != w.signature) {
      mismatch(w, peer, theirs.total, theirs.facts);
      return;
    }
  }
  for (size_t i = 0; i < p.in.size(); ++i)
    if (p.in[i].channel >= 0)
      for (uint64_t k = 0; k < kSlots && k < w.in[i].total; ++k) post(w, static_cast<int>(i), k);
}

bool Engine::pass() {
  bool any = !networks_.empty() && progress();
  if (!queued_.empty()) any |= admit();
  for (size_t i = 0; i < active_.size();) {
    const std::shared_ptr<Work> w = active_[i];
    if (w->meeting) any |= meet(*w);
    for (size_t b = 0; b < w->block.size() && !w->done; ++b) any |= advance(*w, static_cast<int>(b));
    ring();
    if (!w->done && w->unfinished == 0) {
      finish(*w);
      any = true;
    }
    if (i < active_.size() && active_[i] == w) ++i;
  }
  if (!lingering_.empty() && !networks_.empty()) sweep();
  return any;
}

bool Engine::drained(Work& w) {
  const Loaded& p = *w.program;
  for (size_t i = 0; i < w.out.size(); ++i) {
    const OutState& s = w.out[i];
    if (s.ring) {
      const uint64_t all = w.layout->out_messages[i];
      if (s.ring->tail.load(std::memory_order_acquire) < all && gone_[static_cast<size_t>(p.out[i].peer)].empty()) return false;
    }
  }
  if (w.transfers)
    for (size_t side = 0; side < 2; ++side) {
      const size_t count = side ? w.in.size() : w.out.size();
      for (size_t i = 0; i < count; ++i) {
        const Transfer* t = side ? w.in[i].transfers : w.out[i].transfers;
        for (int k = 0; t && k < kSlots; ++k)
          if (t[k].busy) return false;
      }
    }
  return true;
}

// Memory of works that are over here comes back once nobody needs it any more.
void Engine::sweep() {
  for (size_t i = 0; i < lingering_.size();) {
    Work& w = *lingering_[i];
    if (!drained(w)) {
      ++i;
      continue;
    }
    for (OutState& s : w.out)
      for (size_t k = 0; k < kSlots; ++k) learn(s, k);
    if (w.area) arena_.give(w.area);
    w.area = 0;
    w.entry = nullptr;
    w.transfers.reset();
    lingering_.erase(lingering_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Engine::finish(Work& w) {
  for (size_t i = 0; i < active_.size(); ++i)
    if (active_[i].get() == &w) {
      lingering_.push_back(active_[i]);
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
  if (w.scratch && spare_.size() < 8) spare_.emplace_back(w.scratch_bytes, std::move(w.scratch));
  w.ended_ns = now_ns();
  over(w);
  handover_.notify_all();
}

void Engine::over(Work& w) {
  w.done.store(true, std::memory_order_release);
  if (!w.notify) return;
  {
    std::lock_guard lock(news_mutex_);
    ended_.push_back(w.id);
  }
  news_.notify_one();
}

// Drives nothing: whoever waits for a work does that, or else the progress thread.
std::vector<int64_t> Engine::wait_any(double seconds) {
  std::unique_lock lock(news_mutex_);
  news_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return !ended_.empty() || stop_; });
  return std::exchange(ended_, {});
}

std::vector<double> Engine::repeat(const std::shared_ptr<Loaded>& program, char* input, char* output, int64_t total,
                                   Type type, Op op, int times,
                                   const std::shared_ptr<Loaded>& fence) {
  std::vector<double> taken;
  for (int i = 0; i < times; ++i) {
    if (fence) {
      auto w = start(fence, nullptr, nullptr, 0, Type::u8, Op::bor, 0, false, true, false);
      while (!wait(*w, 1.0)) {
      }
    }
    const int64_t begin = now_ns();
    auto w = start(program, input, output, total, type, op, 0, false, true, false);
    while (!wait(*w, 1.0)) {
    }
    taken.push_back(static_cast<double>(now_ns() - begin) / 1e3);
    if (w->failure != Failure::none) throw std::runtime_error(w->why);
  }
  return taken;
}

std::map<std::string, int64_t> Engine::counters() {
  std::unique_lock lock(mutex_);
  sweep();
  return {{"started", started_},
          {"active", static_cast<int64_t>(active_.size() + queued_.size())},
          {"lingering", static_cast<int64_t>(lingering_.size())},
          {"staging_bytes", static_cast<int64_t>(arena_.used())},
          {"sleeps", sleeps_},
          {"rings", rings_}};
}

// What is still in the hands of UCX has to arrive, also at peers that come to it late. (Shared memory outlives its owner by
// itself.) Where something has failed already nobody counts on it.
void Engine::part(std::unique_lock<std::mutex>& lock) {
  const bool well = std::all_of(comms_.begin(), comms_.end(), [](const auto& c) { return c.second.failure == Failure::none; });
  const int64_t limit = now_ns() + (well ? std::min(static_cast<int64_t>(set_.timeout_s * 1e9), kParting) : kBroken);
  const auto over = [&] {
    bool all = true;
    for (auto& n : networks_)
      for (int peer = 0; peer < set_.world; ++peer)
        if (gone_[static_cast<size_t>(peer)].empty()) all &= well ? n->received(peer) : n->sent(peer);
    return all;
  };
  while (!over() && now_ns() < limit) {
    const bool any = progress();
    lock.unlock();
    usleep(any ? 0 : 200);
    lock.lock();
  }
}

// A child that was forked holds copies of every descriptor. As long as it lives, peers would not notice that the rank has
// ended. Nothing else is touched: other threads may have held any lock at the fork.
void Engine::abandon() {
  if (closed_) return;
  std::vector<int> open{kick_, data_poll_, all_poll_};
  for (const auto* some : {&set_.segments, &set_.bells, &set_.control}) open.insert(open.end(), some->begin(), some->end());
  for (int fd : open)
    if (fd >= 0) ::close(fd);
}

void Engine::close() {
  if (getpid() != process_) return;
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    while (!queued_.empty()) fail(*queued_.front(), Failure::closed, set_.rank, "the executor was closed", true);
    while (!active_.empty()) fail(*active_.front(), Failure::closed, set_.rank, "the executor was closed", true);
    while (driven_) {  // by somebody whose work has failed just now, and who may be asleep
      Bell& bell = own_->header()->bell;
      const uint32_t how = bell.asleep.exchange(0);
      if (how) wake(bell, how, own_bell_);
      handover_.wait_for(lock, std::chrono::milliseconds(20));
    }
    part(lock);
    stop_ = true;
    {
      std::lock_guard news(news_mutex_);  // so that nobody misses it between looking and sleeping
    }
    news_.notify_all();
    // Who leaves because of a lost rank says so first, or it would itself be taken for the lost one.
    for (const auto& [id, comm] : comms_)
      if (comm.failed_from != UINT64_MAX) tell(id, comm.failed_from, comm.failure, comm.lost_rank, comm.why);
    tell(-1, 0, Failure::closed, set_.rank, "has closed its executor");
  }
  const uint64_t one = 1;
  (void)!write(kick_, &one, sizeof one);
  if (thread_.joinable()) thread_.join();
  std::unique_lock lock(mutex_);
  networks_.clear();
  lingering_.clear();
  std::vector<int> open{kick_, data_poll_, all_poll_};
  for (const auto* some : {&set_.segments, &set_.bells, &set_.control}) open.insert(open.end(), some->begin(), some->end());
  for (int fd : open)
    if (fd >= 0) ::close(fd);
  set_.control.assign(set_.control.size(), -1);
}
}  // namespace stretto::executor
