// SPDX-License-Identifier: Apache-2.0
// What both contention models of the network simulator share: the program as a graph, and the record of a run.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "arrays.h"

namespace stretto {

constexpr int64_t kNothing = -1;
constexpr int32_t kNobody = -1;

struct Network {
  Rows<int32_t> routes;
  const double *alpha, *rate, *flow_cap;  // per link: us, bytes per us, bytes per us
  const int32_t* incast;                  // per link: a curve, or -1
  Rows<int32_t> curve_flows;
  const double* curve_share;  // beside curve_flows.values
  bool alpha_blocks;
  int32_t load_slots = 0;  // the load of links is recorded in so many slots of time, if any,
  double slot_us = 0;      // each so long
};

struct Transfers {
  int32_t count;
  const int32_t *route, *connection;  // on one connection transfers start, and finish, in order
  const bool* reduce;
  const double* bytes;
  Rows<int32_t> after, gate;
  const bool* gate_reads;  // beside gate.values: that transfer must have been read, not have been written
  double reduce_us_per_byte;
  const double* delay_us = nullptr;  // how long each waits once it may start, if any does
  const int32_t* cast = nullptr;     // the multicast message that each belongs to, or -1, if there are any
};

struct Run {
  std::vector<double> start, end, link_busy, link_bytes;
  std::vector<double> link_load;  // if it is recorded: for each link the share of each slot that it was busy
  std::vector<int32_t> critical_path;  // transfers, each held up by the one before it
  int64_t events = 0;
};

// Multicast messages: members travel as one over the links that their routes begin with in common. Of those on a link
// the first is the one that is served; the others follow it up to where they part from it.
class Casts {
 public:
  Casts(const Transfers& t, const Rows<int32_t>& routes);

  bool any() const { return !leader_.empty(); }
  bool follows(int32_t x) const { return any() && leader_[x] != x; }
  int32_t leader(int32_t x) const { return any() ? leader_[x] : x; }
  // All that x leads, itself included.
  template <class Visit>
  void each_member(int32_t x, Visit&& visit) const {
    if (!any() || size_[x] == 1) return visit(x);
    for (int32_t m = x; m != kNobody; m = next_[m]) visit(m);
  }
  int32_t size(int32_t x) const { return any() ? size_[x] : 1; }
  int32_t parts(int32_t x) const { return any() ? parts_[x] : 0; }  // the first hop that is its own
  // Those that part from x in front of this hop.
  template <class Visit>
  void each_follower(int32_t x, int32_t hop, Visit&& visit) const {
    if (!any()) return;
    for (int32_t f = first_[x]; f != kNobody; f = other_[f])
      if (parts_[f] == hop) visit(f);
  }
  // Those that travel as one with x, which is served for them at this hop.
  template <class Visit>
  void each_together(int32_t x, int32_t hop, Visit&& visit) const {
    visit(x);
    if (!any()) return;
    for (int32_t f = first_[x]; f != kNobody; f = other_[f])
      if (parts_[f] > hop) each_together(f, hop, visit);
  }
  // Who is served on x's behalf.
  int32_t owner(int32_t x, int32_t hop) const {
    while (hop < parts(x)) x = guide_[x];
    return x;
  }

 private:
  std::vector<int32_t> leader_, next_, size_, guide_, parts_;
  std::vector<int32_t> first_, other_;  // the followers of each, as a list
};

// Reverse of Rows: who waits for each transfer.
class Waiters {
 public:
  // With `flags`, only the entries whose flag is `wanted` count.
  Waiters(int32_t count, const Rows<int32_t>& rows, const bool* flags = nullptr, bool wanted = true)
      : ptr_(count + 1, 0) {
    auto counts = [&](int64_t i) { return !flags || flags[i] == wanted; };
    for (int64_t i = 0; i < rows.ptr[count]; i++) ptr_[rows.values[i] + 1] += counts(i);
    for (int32_t t = 0; t < count; t++) ptr_[t + 1] += ptr_[t];
    list_.resize(ptr_[count]);
    std::vector<int64_t> at(ptr_.begin(), ptr_.end() - 1);
    for (int32_t t = 0; t < count; t++)
      for (int64_t i = rows.ptr[t]; i < rows.ptr[t + 1]; i++)
        if (counts(i)) list_[at[rows.values[i]]++] = t;
  }
  const int32_t* begin(int32_t t) const { return list_.data() + ptr_[t]; }
  const int32_t* end(int32_t t) const { return list_.data() + ptr_[t + 1]; }

 private:
  std::vector<int64_t> ptr_;
  std::vector<int32_t> list_;
};

// Events of one moment are handled together, in order of transfer number: determinism, and program order is priority.
inline double same_moment(double t) { return t + 1e-12 * std::max(1.0, t); }

struct Event {
  double time;
  int32_t transfer;
  int32_t kind;
  bool operator>(const Event& o) const { return time != o.time ? time > o.time : transfer > o.transfer; }
};
using Queue = std::priority_queue<Event, std::vector<Event>, std::greater<Event>>;

enum Kind : int32_t { kHop, kReadDone, kArrive, kFinish, kDelayed, kPass, kDrain };

// The dependency side of a run: who may start, who may write. The contention model is the derived class, which
// implements begin(t, now): transfer t may start, and with it all that it leads; handle(event); settle(now): all of
// this moment is known.
template <class Model>
class Driver {
 public:
  // Every hop of a transfer, and at last its writing, is a stage that something held up; `hops` counts the hops.
  template <class Hops>
  Driver(const Transfers& t, const Network& net, int64_t num_links, Hops&& hops)
      : t_(t), net_(net), casts_(t, net.routes), waits_(t.count, t.after), read_gated_(t.count, t.gate, t.gate_reads, true),
        write_gated_(t.count, t.gate, t.gate_reads, false), after_left_(t.count), gate_left_(t.count),
        members_left_(casts_.any() ? t.count : 0) {
    run.start.assign(t.count, -1), run.end.assign(t.count, -1);
    first_stage_.assign(t.count + 1, 0);
    for (int32_t x = 0; x < t.count; x++) first_stage_[x + 1] = first_stage_[x] + std::max<int64_t>(1, hops(x)) + 1;
    cause_.assign(first_stage_[t.count], kNothing);
    run.link_busy.assign(num_links, 0), run.link_bytes.assign(num_links, 0);
    run.link_load.assign(num_links * net.load_slots, 0);
    next_.assign(t.count, kNobody);
    for (size_t x = 0; x < members_left_.size(); x++) members_left_[x] = casts_.size((int32_t)x);
    std::vector<int32_t> last;
    for (int32_t x = 0; x < t.count; x++) {
      after_left_[x] = (int32_t)t.after.size(x), gate_left_[x] = (int32_t)t.gate.size(x);
      size_t c = (size_t)t.connection[x];
      if (c >= last.size()) last.resize(c + 1, kNobody);
      if (last[c] != kNobody) next_[last[c]] = x, after_left_[x]++, gate_left_[x]++;  // it must also wait its turn
      last[c] = x;
      if (!after_left_[x]) free(x, 0);
    }
  }

  Run run;

 protected:
  void simulate() {
    start_ready(0);
    while (!queue_.empty()) {
      double now = queue_.top().time, until = same_moment(now);
      while (!queue_.empty() && queue_.top().time <= until) {
        Event e = queue_.top();
        queue_.pop();
        run.events++;
        now = now_ = e.time;
        switch (e.kind) {
          case kDelayed: ready(e.transfer); break;
          case kPass: pass(e.transfer, now); break;
          default: static_cast<Model*>(this)->handle(e);
        }
        for (; !opened_.empty(); opened_.pop()) write(opened_.front(), now);
      }
      start_ready(now);
    }
    trace_back();
  }

  int64_t stage(int32_t x, int64_t hop) const { return first_stage_[x] + hop; }
  int64_t last_stage(int32_t x) const { return first_stage_[x + 1] - 1; }
  void blame(int64_t stage, int64_t cause) { cause_[stage] = cause; }

  bool records_load() const { return net_.slot_us > 0; }

  // A link carries this share of what it can.
  void record_load(int32_t link, double begin, double end, double share) {
    double* load = run.link_load.data() + (int64_t)link * net_.load_slots;
    auto first = std::clamp((int64_t)(begin / net_.slot_us), (int64_t)0, (int64_t)net_.load_slots - 1);
    for (int64_t slot = first; slot < net_.load_slots && slot * net_.slot_us < end; slot++) {
      double inside = std::min(end, (slot + 1) * net_.slot_us) - std::max(begin, slot * net_.slot_us);
      load[slot] += share * std::max(0.0, inside) / net_.slot_us;
    }
  }

  bool has_read_gates(int32_t x) const { return read_gated_.begin(x) != read_gated_.end(x); }

  void read_done(int32_t x) {  // the source may be overwritten
    for (const int32_t* w = read_gated_.begin(x); w != read_gated_.end(x); w++) open_gate(*w, stage(x, 0));
  }

  void arrived(int32_t x, int64_t cause, double now) {
    blame(last_stage(x), cause);
    if (gate_left_[x] > 0)
      gate_left_[x] += kHeld;  // remember that it waits at the gate
    else
      write(x, now);
  }

  void finish(int32_t x, double now) {
    run.end[x] = now;
    for (const int32_t* w = waits_.begin(x); w != waits_.end(x); w++)
      release(*w, last_stage(x));
    for (const int32_t* w = write_gated_.begin(x); w != write_gated_.end(x); w++) open_gate(*w, last_stage(x));
    if (next_[x] != kNobody) open_gate(next_[x], last_stage(x));
  }

  bool has_links(int32_t x) const { return net_.routes.size(t_.route[x]) > 0; }

  // The one behind x on its connection that takes links, if any.
  int32_t next_message(int32_t x) const {
    do x = next_[x];
    while (x != kNobody && !has_links(x));
    return x;
  }

  const Transfers& t_;
  const Network& net_;
  const Casts casts_;
  Queue queue_;

 private:
  static constexpr int32_t kHeld = 1 << 30;

  // A transfer without links stands for work on its rank: its delay is all there is to it.
  void pass(int32_t x, double now) {
    read_done(x);
    arrived(x, stage(x, 0), now);
  }

  void open_gate(int32_t x, int64_t opener) {
    if (--gate_left_[x] == kHeld) {
      blame(last_stage(x), opener);
      opened_.push(x);  // not written here: thousands may stand behind one another
    }
  }

  void write(int32_t x, double now) {
    double cost = t_.reduce[x] ? t_.reduce_us_per_byte * t_.bytes[x] : 0;
    if (cost > 0)
      queue_.push({now + cost, x, kFinish});
    else
      finish(x, now);
  }

  void release(int32_t x, int64_t cause) {
    if (--after_left_[x] == 0) {
      blame(stage(x, 0), cause);
      free(x, now_);
    }
  }

  void free(int32_t x, double now) {
    if (!has_links(x)) run.start[x] = now;
    if (t_.delay_us && t_.delay_us[x] > 0)
      queue_.push({now + t_.delay_us[x], x, kDelayed});
    else
      ready(x);
  }

  void ready(int32_t x) {
    int32_t first = casts_.leader(x);
    if (casts_.any() && --members_left_[first] > 0) return;
    if (first != x) blame(stage(first, 0), cause_[stage(x, 0)]);
    ready_.push_back(first);
  }

  // Starting one may give the next on its connection its turn, in the same moment.
  void start_ready(double now) {
    now_ = now;
    while (!ready_.empty()) {
      batch_.swap(ready_);
      std::sort(batch_.begin(), batch_.end());
      for (int32_t x : batch_) {
        if (has_links(x))
          static_cast<Model*>(this)->begin(x, now);
        else
          queue_.push({now, x, kPass});
        casts_.each_member(x, [&](int32_t m) {
          if (m != x) blame(stage(m, 0), stage(x, 0));
          if (next_[m] != kNobody) release(next_[m], stage(m, 0));
        });
      }
      batch_.clear();
    }
    static_cast<Model*>(this)->settle(now);
  }

  // Back from the last transfer over whatever held up each stage; time never grows on the way.
  void trace_back() {
    if (!t_.count) return;
    int32_t last = (int32_t)(std::max_element(run.end.begin(), run.end.end()) - run.end.begin());
    // Of what starts in one moment each may seem to have held up the other; no stage is visited twice.
    for (int64_t s = last_stage(last); s >= 0; s = std::exchange(cause_[s], kNothing)) {
      auto x = (int32_t)(std::upper_bound(first_stage_.begin(), first_stage_.end(), s) - first_stage_.begin() - 1);
      if (run.critical_path.empty() || run.critical_path.back() != x) run.critical_path.push_back(x);
    }
    std::reverse(run.critical_path.begin(), run.critical_path.end());
  }

  std::vector<int64_t> first_stage_, cause_;
  Waiters waits_, read_gated_, write_gated_;
  std::vector<int32_t> after_left_, gate_left_, members_left_, ready_, batch_, next_;
  double now_ = 0;
  std::queue<int32_t> opened_;  // have arrived, and wait for nothing any more
};

Run simulate_fifo(const Transfers& t, const Network& net, int64_t num_links);
Run simulate_fair(const Transfers& t, const Network& net, int64_t num_links);
}  // namespace stretto
