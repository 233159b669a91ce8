// SPDX-License-Identifier: Apache-2.0
// Chunks travelling through the dimensions of a network: one representative device stands for all.
//
// A chunk is a chain of operations, each on one dimension. A dimension has a number of slots; an operation takes one,
// sends its bytes at the dimension's rate, waits for its latency, and gives the slot back. Which operation gets the
// next slot is the queue discipline, or a turn that was fixed before. Those in flight share the rate: `ordered`, the
// first by the discipline that has bytes left gets all of it (the others use the time in which it only waits), or
// equally.
//
// Chunks belong to jobs (collectives, or compute on a dimension of its own), and jobs wait for jobs.
#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <string>
#include <tuple>

#include "arrays.h"

namespace stretto {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kMoment = 1e-12;  // of the time: events closer than this are simultaneous

struct Flight {
  double left;  // bytes
  int64_t priority;
  double key;
  int64_t tie;
  int64_t op;
  int64_t turn;  // where turns are enforced, else 0
  bool before(const Flight& o) const {
    return std::tie(priority, key, tie) < std::tie(o.priority, o.key, o.tie);
  }
};

struct Later {
  bool operator()(const Flight& a, const Flight& b) const { return a.turn != b.turn ? a.turn > b.turn : b.before(a); }
};

struct Timer {
  double time;
  int64_t op;
  bool begins;  // the operation may begin, or else it is over
  bool operator>(const Timer& o) const { return time != o.time ? time > o.time : op > o.op; }
};

struct Dimension {
  double rate, busy = 0;
  int64_t slots, turn = 0;
  std::vector<Flight> flying;  // those with bytes left, in the order of the discipline
  std::priority_queue<Flight, std::vector<Flight>, Later> waiting;
};

struct Case {
  Rows<int32_t> ops;  // of each chunk
  int64_t chunks;
  const double *bytes, *latency, *key, *release;
  const int32_t* job;  // of each chunk
  int64_t jobs;
  Rows<int32_t> after;  // of each job
  const int64_t* priority;
  const bool* fifo;  // the key of a job's operations is when they came, not `key`
  const int64_t* turn;  // of each operation in its dimension; null: the discipline alone decides
  int64_t in_flight;
  bool ordered;
};

class Simulation {
 public:
  std::vector<double> start, end, busy;

  Simulation(In<double> rate, const Case& c) : c_(c), chunk_of_(c.ops.ptr[c.chunks]), open_(c.jobs), needs_(c.jobs) {
    for (size_t d = 0; d < rate.shape(0); d++) {
      Dimension dim;
      dim.rate = rate.data()[d], dim.slots = c.in_flight;
      dims_.push_back(std::move(dim));
    }
    start.assign(chunk_of_.size(), -1), end.assign(chunk_of_.size(), -1);
    chunks_of_.resize(c.jobs), next_.resize(c.jobs);
    for (int64_t k = 0; k < c.chunks; k++) {
      for (int64_t op = c.ops.ptr[k]; op < c.ops.ptr[k + 1]; op++) chunk_of_[op] = k;
      if (c.ops.size(k)) chunks_of_[c.job[k]].push_back(k), open_[c.job[k]]++;
    }
    for (int64_t j = 0; j < c.jobs; j++) {
      needs_[j] = c.after.size(j);
      for (int64_t at = c.after.ptr[j]; at < c.after.ptr[j + 1]; at++) next_[c.after.values[at]].push_back(j);
    }
    for (int64_t j = 0; j < c.jobs; j++)
      if (c.after.size(j) == 0) begin(j, 0);
    run();
    for (Dimension& dim : dims_) busy.push_back(dim.busy);
  }

 private:
  void run() {
    double now = 0;
    while (true) {
      for (Dimension& dim : dims_) admit(dim, now);
      double next = timers_.empty() ? kNever : timers_.top().time;
      for (Dimension& dim : dims_)
        if (!dim.flying.empty()) next = std::min(next, now + first_done(dim));
      if (next == kNever) return;
      for (Dimension& dim : dims_) progress(dim, now, next);
      now = next;
      double until = now + kMoment * std::max(1.0, now);
      while (!timers_.empty() && timers_.top().time <= until) {
        Timer timer = timers_.top();
        timers_.pop();
        timer.begins ? arrive(timer.op) : finish(timer.op, now);
      }
    }
  }

  void begin(int64_t first, double now) {
    std::vector<int64_t> ready{first};
    while (!ready.empty()) {
      int64_t job = ready.back();
      ready.pop_back();
      for (int64_t k : chunks_of_[job]) timers_.push({now + c_.release[k], c_.ops.ptr[k], true});
      if (open_[job]) continue;
      for (int64_t j : next_[job])
        if (--needs_[j] == 0) ready.push_back(j);
    }
  }

  void arrive(int64_t op) {
    int64_t job = c_.job[chunk_of_[op]];
    double key = c_.fifo[job] ? (double)arrivals_++ : c_.key[op];
    int64_t turn = c_.turn ? c_.turn[op] : 0;
    dims_[c_.ops.values[op]].waiting.push({c_.bytes[op], c_.priority[job], key, chunk_of_[op], op, turn});
  }

  void finish(int64_t op, double now) {
    end[op] = now;
    dims_[c_.ops.values[op]].slots++;
    int64_t chunk = chunk_of_[op], job = c_.job[chunk];
    if (op + 1 < c_.ops.ptr[chunk + 1]) {
      arrive(op + 1);
    } else if (--open_[job] == 0) {
      for (int64_t j : next_[job])
        if (--needs_[j] == 0) begin(j, now);
    }
  }

  void admit(Dimension& dim, double now) {
    while (dim.slots > 0 && !dim.waiting.empty()) {
      Flight flight = dim.waiting.top();
      if (c_.turn && flight.turn != dim.turn) return;  // not its turn yet
      dim.waiting.pop();
      dim.turn++, dim.slots--;
      start[flight.op] = now;
      if (flight.left <= 0) {
        timers_.push({now + c_.latency[flight.op], flight.op, false});
        continue;
      }
      auto at = std::upper_bound(dim.flying.begin(), dim.flying.end(), flight,
                                 [](const Flight& a, const Flight& b) { return a.before(b); });
      dim.flying.insert(at, flight);
    }
  }

  double first_done(const Dimension& dim) const {
    if (c_.ordered) return dim.flying.front().left / dim.rate;
    double least = kNever;
    for (const Flight& f : dim.flying) least = std::min(least, f.left);
    return least * (double)dim.flying.size() / dim.rate;
  }

  void progress(Dimension& dim, double now, double next) {
    if (dim.flying.empty()) return;
    dim.busy += next - now;
    double sent = (next - now) * dim.rate;
    if (c_.ordered) {
      dim.flying.front().left -= sent;
    } else {
      for (Flight& f : dim.flying) f.left -= sent / (double)dim.flying.size();
    }
    // What takes less time than the clock can tell is over; waiting for it would never end.
    double least = dim.rate * kMoment * std::max(1.0, next);
    auto done = [&](const Flight& f) {
      if (f.left > 1e-9 * c_.bytes[f.op] && f.left > least) return false;
      timers_.push({next + c_.latency[f.op], f.op, false});
      return true;
    };
    dim.flying.erase(std::remove_if(dim.flying.begin(), dim.flying.end(), done), dim.flying.end());
  }

  const Case& c_;
  int64_t arrivals_ = 0;
  std::vector<int64_t> chunk_of_, open_, needs_;  // chunks that a job still has, jobs that it still waits for
  std::vector<std::vector<int64_t>> chunks_of_, next_;
  std::vector<Dimension> dims_;
  std::priority_queue<Timer, std::vector<Timer>, std::greater<Timer>> timers_;
};

// What is not a number compares as false with everything, and a clock that meets it never gets on.
void require_numbers(const char* name, In<double> values, double least) {
  for (size_t i = 0; i < values.shape(0); i++)
    if (!(values.data()[i] >= least && values.data()[i] < kNever))
      throw nb::value_error((std::string(name) + ": must be finite numbers" + (least < 0 ? "" : ", not negative")).c_str());
}

nb::object simulate(In<double> rate, In<int64_t> chunk_ptr, In<int32_t> dim, In<double> bytes, In<double> latency,
                    In<double> key, In<double> release, In<int32_t> job, In<int64_t> after_ptr, In<int32_t> after,
                    In<int64_t> priority, In<bool> fifo, In<int64_t> turn, int64_t in_flight, bool ordered) {
  require_numbers("rate", rate, std::numeric_limits<double>::min());
  require_numbers("bytes", bytes, 0), require_numbers("latency", latency, 0), require_numbers("release", release, 0);
  require_numbers("key", key, std::numeric_limits<double>::lowest());
  std::vector<double> start, end, busy;
  {
    nb::gil_scoped_release release_gil;
    Case all{{chunk_ptr.data(), dim.data()}, (int64_t)chunk_ptr.shape(0) - 1, bytes.data(), latency.data(), key.data(),
             release.data(), job.data(), (int64_t)after_ptr.shape(0) - 1, {after_ptr.data(), after.data()},
             priority.data(), fifo.data(), turn.shape(0) ? turn.data() : nullptr, in_flight, ordered};
    Simulation run(rate, all);
    start = std::move(run.start), end = std::move(run.end), busy = std::move(run.busy);
  }
  return nb::make_tuple(to_numpy(std::move(start)), to_numpy(std::move(end)), to_numpy(std::move(busy)));
}

}  // namespace

void bind_dimensions(nb::module_& m) {
  m.def("simulate_dimensions", &simulate, nb::arg("rate"), nb::arg("chunk_ptr"), nb::arg("dim"), nb::arg("bytes"),
        nb::arg("latency"), nb::arg("key"), nb::arg("release"), nb::arg("job"), nb::arg("after_ptr"),
        nb::arg("after"), nb::arg("priority"), nb::arg("fifo"), nb::arg("turn"), nb::arg("in_flight"),
        nb::arg("ordered"));
}
}  // namespace stretto
