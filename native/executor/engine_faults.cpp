// SPDX-License-Identifier: Apache-2.0
// Lost peers, mismatches, timeouts: each ends in an error that names the rank.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>

#include "engine.h"

namespace stretto::executor {
namespace {

struct Record {
  uint32_t magic;
  int32_t comm;
  uint64_t number;
  int32_t failure, lost;
  char why[232];
};
constexpr uint32_t kRecord = 0x53545231;
constexpr int64_t kOnTheWire = 1'000'000'000;
// Instead of a failure a record may ask whether a work has begun, or answer that (in `lost`); or the same of a collective that
// another backend runs.
constexpr int32_t kAsk = 100, kAnswer = 101, kAskDelegated = 102, kAnswerDelegated = 103;
constexpr int kLeaves = -1, kGivesUp = -2;  // records of no communicator: a rank leaves; it gives up since another is lost
constexpr int64_t kAnswerTime = 2'000'000'000, kAskAgain = 100'000'000;
constexpr uint64_t kShown = UINT32_MAX;  // above that it says how often the communicator was used anew

const char* const kTypeNames[kTypes] = {"float16", "bfloat16", "float32", "float64", "int8",
                                        "int16",   "int32",    "int64",   "uint8",   "bool"};
const char* const kOpNames[kOps] = {"sum", "prod", "min", "max", "band", "bor", "bxor", "avg"};
const char* const kKindNames[] = {"a collective", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_to_all_v",
                                  "broadcast",    "reduce",     "gather",         "scatter",    "permute"};

std::string told(uint64_t total, uint32_t facts) {
  const uint32_t kind = std::min<uint32_t>(facts >> 16, std::size(kKindNames) - 1);
  const uint32_t type = std::min<uint32_t>(facts & 0xff, kTypes - 1), op = std::min<uint32_t>((facts >> 8) & 0xff, kOps - 1);
  const bool reduces = kind == 2 || kind == 3 || kind == 7;
  return std::string(kKindNames[kind]) + (reduces ? std::string(" (") + kOpNames[op] + ")" : "") + " of " +
         std::to_string(total) + " x " + kTypeNames[type];
}
}  // namespace

std::string Engine::describe(const Work& w) const {
  return told(static_cast<uint64_t>(w.layout->total), w.facts) + " (" + w.program->name + "), number " +
         std::to_string(w.number & kShown) + " of communicator " + std::to_string(w.program->comm);
}

void Engine::mismatch(Work& w, int peer, uint64_t total, uint32_t facts) {
  const std::string mine = told(static_cast<uint64_t>(w.layout->total), w.facts), theirs = told(total, facts);
  const std::string differ = mine == theirs ? "another program for it" : theirs;
  fail(w, Failure::mismatch, peer,
       "number " + std::to_string(w.number & kShown) + " of communicator " + std::to_string(w.program->comm) + ": rank " +
           std::to_string(set_.rank) + " runs " + mine + " but rank " + std::to_string(peer) + " runs " + differ,
       true);
}

std::string Engine::wrong_length(const Work& w, int peer, int64_t slice, uint64_t got, size_t expected) const {
  const std::string sender = "rank " + std::to_string(peer);
  if (!w.program->by_call)
    return describe(w) + ": " + sender + " sent " + std::to_string(got) + " bytes where " + std::to_string(expected) +
           " were expected";
  const auto full = static_cast<uint64_t>(w.layout->slice), before = static_cast<uint64_t>(slice) * full;
  const std::string given = got < full ? std::to_string(before + got) : "at least " + std::to_string(before + std::min(got, full));
  int64_t wanted = 0;
  for (const Block& b : w.program->block)
    for (int32_t k = b.first; k < b.last; ++k)
      if (const Instruction& x = w.program->code[static_cast<size_t>(k)];
          receives(x.code) && w.program->in[static_cast<size_t>(b.in)].peer == peer)
        wanted = w.layout->chunk[static_cast<size_t>(w.program->piece[static_cast<size_t>(x.first)].chunk)];
  const std::string receiver = "rank " + std::to_string(set_.rank);
  return describe(w) + ": " + sender + " sends " + given + " bytes to " + receiver + ", which expects " + std::to_string(wanted);
}

void Engine::fail(Work& w, Failure f, int lost, const std::string& why, bool tell_others) {
  if (w.done) return;
  fail_comm(w.program->comm, w.number, f, lost, why, tell_others);
}

// Everything of a communicator from `number` on has failed: its ranks no longer agree on what comes next.
void Engine::fail_comm(int id, uint64_t number, Failure f, int lost, const std::string& why, bool tell_others) {
  Comm& comm = comms_[id];
  if (number < comm.failed_from) {
    comm.failed_from = number;
    comm.failure = f;
    comm.lost_rank = lost;
    comm.why = why;
  }
  for (auto* list : {&queued_, &active_})
    for (size_t i = 0; i < list->size();) {
      const std::shared_ptr<Work> w = (*list)[i];
      if (w->program->comm != id || w->number < number) {
        ++i;
        continue;
      }
      list->erase(list->begin() + static_cast<std::ptrdiff_t>(i));
      for (InState& s : w->in) {
        // More than a sender can have: it may count on another size than this rank does.
        if (s.ring) s.ring->tail.store(UINT64_MAX / 2, std::memory_order_release);
        for (int k = 0; s.transfers && k < kSlots; ++k)
          if (s.transfers[k].busy)
            networks_[static_cast<size_t>(w->program->in[static_cast<size_t>(&s - w->in.data())].channel)]->cancel(s.transfers[k]);
      }
      if (w->entry) lingering_.push_back(w);
      w->failure = f;
      w->lost_rank = lost;
      w->why = why;
      over(*w);
    }
  handover_.notify_all();
  if (tell_others) tell(id, number, f, lost, why);
  if (f == Failure::peer_lost) say_cause(lost, why);
}

// The rank to name where `peer`, one of these ranks, is gone: the one because of which it has left; where it has closed its
// executor without saying why, another of these ranks that has ended without a word; else itself.
Engine::Cause Engine::culprit(int peer, const std::vector<int>& ranks) {
  const auto at = static_cast<size_t>(peer);
  const std::string name = "rank " + std::to_string(peer);
  if (cause_[at].lost >= 0) return {cause_[at].lost, cause_[at].why + "; " + name + " has left because of that"};
  const std::string itself = name + " " + gone_[at];
  if (!left_[at]) return {peer, itself};
  for (int r : ranks) {
    const auto other = static_cast<size_t>(r);
    if (r == set_.rank || r == peer) continue;
    if (gone_[other].empty()) read_control(r);  // its end may be here, and not read yet
    if (!gone_[other].empty() && !left_[other] && cause_[other].lost < 0)
      return {r, "rank " + std::to_string(r) + " " + gone_[other] + "; " + itself};
  }
  return {peer, itself};
}

// Also to ranks that have nothing to do with what has failed: they may wait for this one elsewhere.
void Engine::say_cause(int lost, const std::string& why) {
  Cause& own = cause_[static_cast<size_t>(set_.rank)];
  if (own.lost >= 0 || lost < 0) return;
  own = {lost, why};
  tell(kGivesUp, 0, Failure::peer_lost, lost, why);
}

// What another backend has found out.
void Engine::blame(int lost, const std::string& why) {
  std::unique_lock lock(mutex_);
  if (!closed_ && lost < set_.world) say_cause(lost, why);
}

// The rank to name, and why, where something fails among these ranks: one that has ended without a word; else the one because
// of which another has given up; else one that has left.
std::optional<std::pair<int, std::string>> Engine::find_culprit(const std::vector<int>& ranks) {
  std::unique_lock lock(mutex_);
  const auto gave_up = [&](size_t r) { return cause_[r].lost >= 0; };
  const auto ended = [&](size_t r) { return !gone_[r].empty() && !left_[r] && !gave_up(r); };
  const auto left = [&](size_t r) { return !gone_[r].empty(); };
  const auto first = [&](const auto& is) -> std::optional<std::pair<int, std::string>> {
    for (int r : ranks)
      if (r != set_.rank && is(static_cast<size_t>(r))) {
        const Cause found = culprit(r, ranks);
        return std::make_pair(found.lost, found.why);
      }
    return {};
  };
  auto found = first(ended);
  if (!found) found = first(gave_up);
  return found ? found : first(left);
}

// The number of a collective that another backend is about to run, for `ask_delegated`.
uint64_t Engine::count_delegated(int comm) { return delegated_.at(static_cast<size_t>(comm)).fetch_add(1); }

// Whether ranks have come to such a collective. Who is not in the answer has not answered.
std::map<int, bool> Engine::ask_delegated(int comm, uint64_t number, const std::vector<int>& ranks, double seconds) {
  std::unique_lock lock(mutex_);
  if (closed_ || comm < 0 || comm >= kMaxComms) return {};
  Inquiry inquiry{comm, number, {}};
  inquiries_.push_back(&inquiry);
  const Record question{kRecord, comm, number, kAskDelegated, -1, {}};
  for (int peer : ranks) {
    const int fd = set_.control.at(static_cast<size_t>(peer));
    if (fd >= 0) (void)!::send(fd, &question, sizeof question, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  const auto answered = [&](int peer) {
    return peer == set_.rank || !gone_[static_cast<size_t>(peer)].empty() || inquiry.answers.count(peer) > 0;
  };
  handover_.wait_for(lock, std::chrono::duration<double>(seconds),
                     [&] { return closed_ || std::all_of(ranks.begin(), ranks.end(), answered); });
  inquiries_.erase(std::find(inquiries_.begin(), inquiries_.end(), &inquiry));
  return inquiry.answers;
}

void Engine::tell(int comm, uint64_t number, Failure f, int lost, const std::string& why) {
  Record r{kRecord, comm, number, static_cast<int32_t>(f), lost, {}};
  strncpy(r.why, why.c_str(), sizeof r.why - 1);
  for (int peer = 0; peer < set_.world; ++peer) {
    const int fd = set_.control[static_cast<size_t>(peer)];
    if (fd < 0 || !gone_[static_cast<size_t>(peer)].empty()) continue;
    if (comm >= 0) {
      const auto& ranks = comms_[comm].ranks;
      if (std::find(ranks.begin(), ranks.end(), peer) == ranks.end()) continue;
    }
    (void)!::send(fd, &r, sizeof r, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

void Engine::read_control(int peer) {
  auto& inbox = inbox_[static_cast<size_t>(peer)];
  const int fd = set_.control[static_cast<size_t>(peer)];
  char buffer[sizeof(Record)];
  while (fd >= 0) {
    const ssize_t got = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      const bool silent = got < 0 && errno != ECONNRESET && errno != EPIPE;
      peer_gone(peer, silent ? std::string("is gone (its host does not answer: ") + strerror(errno) + ")"
                             : "is gone (its process has ended)");
      hang_up(peer);
      return;
    }
    inbox.insert(inbox.end(), buffer, buffer + got);
    while (inbox.size() >= sizeof(Record)) {
      Record r;
      memcpy(&r, inbox.data(), sizeof r);
      inbox.erase(inbox.begin(), inbox.begin() + sizeof(Record));
      r.why[sizeof r.why - 1] = 0;
      if (r.magic != kRecord) {
        peer_gone(peer, "sent something that is not ours over its control connection");
        hang_up(peer);
        return;
      }
      if (r.comm == kGivesUp) {
        Cause& said = cause_[static_cast<size_t>(peer)];
        if (r.lost >= 0 && r.lost < set_.world && said.lost < 0) said = {r.lost, r.why};
        continue;
      }
      if (r.comm < 0) {
        left_[static_cast<size_t>(peer)] = true;
        peer_gone(peer, r.why);
        hang_up(peer);
        return;
      }
      if (r.comm >= kMaxComms) continue;
      if (r.failure == kAsk) {
        const Record answer{kRecord, r.comm, r.number, kAnswer, r.number < comms_[r.comm].next, {}};
        (void)!::send(fd, &answer, sizeof answer, MSG_DONTWAIT | MSG_NOSIGNAL);
      } else if (r.failure == kAnswer) {
        for (auto& w : active_)
          if (w->program->comm == r.comm && w->number == r.number) w->answered[peer] = r.lost != 0;
      } else if (r.failure == kAskDelegated) {
        const bool begun = delegated_[static_cast<size_t>(r.comm)] > r.number;
        const Record answer{kRecord, r.comm, r.number, kAnswerDelegated, begun, {}};
        (void)!::send(fd, &answer, sizeof answer, MSG_DONTWAIT | MSG_NOSIGNAL);
      } else if (r.failure == kAnswerDelegated) {
        for (Inquiry* q : inquiries_)
          if (q->comm == r.comm && q->number == r.number) q->answers[peer] = r.lost != 0;
        handover_.notify_all();
      } else {  // also before this rank has come that far
        fail_comm(r.comm, r.number, static_cast<Failure>(r.failure), r.lost, r.why, false);
        const uint32_t how = own_->header()->bell.asleep.exchange(0);
        if (how) wake(own_->header()->bell, how, own_bell_);
      }
    }
  }
}

// A rank is gone. What it has already sent still counts; works that need more of it fail when they stall.
void Engine::peer_gone(int peer, const std::string& why) {
  auto& known = gone_[static_cast<size_t>(peer)];
  if (!known.empty()) return;
  known = why;
  gone_at_[static_cast<size_t>(peer)] = now_ns();
  const uint32_t how = own_->header()->bell.asleep.exchange(0);
  if (how) wake(own_->header()->bell, how, own_bell_);
}

void Engine::hang_up(int peer) {
  int& fd = set_.control[static_cast<size_t>(peer)];
  if (fd < 0) return;
  epoll_ctl(all_poll_, EPOLL_CTL_DEL, fd, nullptr);  // closing is not enough: a child that was forked has it open, too
  ::close(std::exchange(fd, -1));
}

// What a rank of another host has sent before it went may be on the wire for a while: nothing tells when it is all here.
bool Engine::may_still_come(int peer) const {
  return local_index_[static_cast<size_t>(peer)] < 0 && now_ns() - gone_at_[static_cast<size_t>(peer)] < kOnTheWire;
}

// Whether a rank that is gone had come as far as this work: then everything it owes may already be here.
bool Engine::began(const Work& w, int peer) const {
  const Loaded& p = *w.program;
  const int local = local_index_[static_cast<size_t>(peer)];
  if (local >= 0) {
    for (const Entry& e : segment_[static_cast<size_t>(local)].header()->board[p.comm])
      if (e.number.load(std::memory_order_acquire) > w.number) return true;
    return false;
  }
  const auto met = [&](const Connection& c) { return c.peer == peer; };
  if (std::none_of(p.in.begin(), p.in.end(), met) && std::none_of(p.out.begin(), p.out.end(), met)) return true;
  return heard_.count({static_cast<uint32_t>(p.comm), w.number, static_cast<uint32_t>(peer)}) > 0;
}

void Engine::stalled() {
  const bool someone_gone = std::any_of(gone_.begin(), gone_.end(), [](const std::string& s) { return !s.empty(); });
  for (size_t i = 0; i < active_.size(); ++i) {
    const std::shared_ptr<Work> w = active_[i];
    check_boards(*w);
    if (w->done) return;
    if (!someone_gone) continue;
    const Loaded& p = *w->program;
    if (w->meeting) {
      const auto missing = std::find_if(p.ranks.begin(), p.ranks.end(),
                                        [&](int r) { return !gone_[static_cast<size_t>(r)].empty() && !began(*w, r); });
      if (missing == p.ranks.end()) continue;
      const Cause found = culprit(*missing, p.ranks);
      fail(*w, Failure::peer_lost, found.lost, found.why + " during " + describe(*w), true);
      return;
    }
    for (size_t b = 0; b < p.block.size(); ++b) {
      const BlockState& at = w->block[b];
      if (at.slice == w->layout->block_slices[b]) continue;
      const Instruction& x = p.code[static_cast<size_t>(p.block[b].first + at.step)];
      int peer = -1;
      if (receives(x.code) && !gone_[static_cast<size_t>(p.in[static_cast<size_t>(p.block[b].in)].peer)].empty()) {
        peer = p.in[static_cast<size_t>(p.block[b].in)].peer;
        if (peek(*w, p.block[b].in, x, at.slice)) peer = -1;
      }
      if (peer < 0 && sends(x.code) && !gone_[static_cast<size_t>(p.out[static_cast<size_t>(p.block[b].out)].peer)].empty()) {
        const OutState& s = w->out[static_cast<size_t>(p.block[b].out)];
        const bool full = s.ring ? s.ring->tail.load() + kSlots <= s.sent : s.transfers[s.sent % kSlots].busy;
        if (full) peer = p.out[static_cast<size_t>(p.block[b].out)].peer;
      }
      if (peer < 0 || w->done || may_still_come(peer)) continue;
      const Cause found = culprit(peer, p.ranks);
      fail(*w, Failure::peer_lost, found.lost, found.why + " during " + describe(*w), true);
      return;
    }
  }
}

// A rank of the host that is at the same number with something else is wrong even if it owes us nothing.
void Engine::check_boards(Work& w) {
  for (int peer : w.program->ranks) {
    const int local = local_index_[static_cast<size_t>(peer)];
    if (local < 0 || peer == set_.rank) continue;
    const Entry& e = entry_of(w, local);
    if (e.number.load(std::memory_order_acquire) != w.number + 1 || e.signature == w.signature) continue;
    const uint64_t total = e.total;
    const uint32_t facts = e.facts;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (e.number.load(std::memory_order_relaxed) != w.number + 1) continue;  // it went on while we looked
    mismatch(w, peer, total, facts);
    return;
  }
}

// Whether a communicator is out of use here: nothing of it is under way, peers have taken everything, and it has not failed.
bool Engine::retired(int id) {
  std::unique_lock lock(mutex_);
  sweep();
  const auto found = comms_.find(id);
  if (found != comms_.end() && found->second.failure != Failure::none) return false;
  const auto of_it = [&](const auto& w) { return w->program->comm == id; };
  return std::none_of(queued_.begin(), queued_.end(), of_it) && std::none_of(active_.begin(), active_.end(), of_it) &&
         std::none_of(lingering_.begin(), lingering_.end(), of_it);
}

void Engine::renumber(int id, uint64_t first) {
  std::unique_lock lock(mutex_);
  Comm& comm = comms_[id];
  comm.next = std::max(comm.next, first);
  delegated_.at(static_cast<size_t>(id)) = 0;
}

// At a timeout ranks ask each other who is there: who waits may itself be waited for, and the one to name may be far.
bool Engine::all_answered(Work& w, int64_t now) {
  if (!w.asked_ns) {
    w.asked_ns = now;
    // Ranks outside of the communicator, too: one of its ranks may wait for them, and so not have come to this work.
    const Record question{kRecord, w.program->comm, w.number, kAsk, -1, {}};
    const auto& ranks = w.program->ranks;
    for (int peer = 0; peer < set_.world; ++peer) {
      const int fd = set_.control[static_cast<size_t>(peer)];
      if (fd >= 0 && std::find(ranks.begin(), ranks.end(), peer) == ranks.end())
        (void)!::send(fd, &question, sizeof question, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
  }
  if (now >= w.again_ns) {  // who has not begun may do so while others still think
    w.again_ns = now + kAskAgain;
    tell(w.program->comm, w.number, static_cast<Failure>(kAsk), -1, "");
  }
  if (now > w.asked_ns + kAnswerTime) return true;
  for (int peer = 0; peer < set_.world; ++peer)
    if (peer != set_.rank && gone_[static_cast<size_t>(peer)].empty() && !w.answered.count(peer)) return false;
  return true;
}

void Engine::check_deadlines(int64_t now) {
  for (size_t i = 0; i < active_.size(); ++i) {
    const std::shared_ptr<Work> w = active_[i];
    if (now < w->deadline_ns || !all_answered(*w, now)) continue;
    const Loaded& p = *w->program;
    std::set<std::string> waits;
    int first = -1;
    const auto waits_for = [&](int peer, const std::string& what) {
      waits.insert("rank " + std::to_string(peer) + " (" + what + ")");
      if (first < 0) first = peer;
    };
    const auto silent = [&](int peer) {
      return peer != set_.rank && gone_[static_cast<size_t>(peer)].empty() && !w->answered.count(peer);
    };
    for (int peer : p.ranks)
      if (!gone_[static_cast<size_t>(peer)].empty() && !began(*w, peer)) waits_for(culprit(peer, p.ranks).lost, "it is gone");
    for (int peer : p.ranks)
      if (silent(peer)) waits_for(peer, "it does not answer");
    const bool behind = std::any_of(p.ranks.begin(), p.ranks.end(), [&](int peer) {
      const auto said = w->answered.find(peer);
      return said != w->answered.end() && !said->second;
    });
    for (int peer = 0; peer < set_.world && behind; ++peer)  // it may be why a rank has not started
      if (silent(peer)) waits_for(peer, "it does not answer");
    for (int peer : p.ranks) {
      const auto said = w->answered.find(peer);
      if (said == w->answered.end() || said->second) continue;
      const int lost = cause_[static_cast<size_t>(peer)].lost;
      if (lost < 0)
        waits_for(peer, "it has not started");
      else
        waits_for(lost, "rank " + std::to_string(peer) + " has given up because of it");
    }
    if (w->meeting && first < 0 && w->met < p.ranks.size()) waits_for(p.ranks[w->met], "it has not come");
    const bool known = first >= 0;
    for (size_t b = 0; !known && b < w->block.size(); ++b) {
      const BlockState& at = w->block[b];
      if (at.slice == w->layout->block_slices[b]) continue;
      const Instruction& x = p.code[static_cast<size_t>(p.block[b].first + at.step)];
      if (receives(x.code)) {
        const InState& s = w->in[static_cast<size_t>(p.block[b].in)];
        if (s.taken < s.total)
          waits_for(p.in[static_cast<size_t>(p.block[b].in)].peer,
                    "message " + std::to_string(s.taken + 1) + " of " + std::to_string(s.total));
      } else if (sends(x.code)) {
        waits_for(p.out[static_cast<size_t>(p.block[b].out)].peer, "to take what was sent");
      }
    }
    std::string list;
    for (const std::string& s : waits) list += (list.empty() ? "" : ", ") + s;
    fail(*w, Failure::peer_lost, first,
         "timed out after " + std::to_string((now - w->started_ns) / 1'000'000) + " ms waiting for " + list + " in " + describe(*w),
         true);
    return;
  }
}
}  // namespace stretto::executor
