// SPDX-License-Identifier: Apache-2.0
// Maximum flow and shortest path lengths: what lower bounds are made of.
#include "maxflow.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>

#include "arrays.h"

namespace stretto {

MaxFlow::MaxFlow(int32_t num_nodes, const int32_t* src, const int32_t* dst, int64_t num_arcs)
    : n_(num_nodes),
      head_(2 * num_arcs),
      ptr_(num_nodes + 1, 0),
      adjacent_(2 * num_arcs),
      capacity_(num_arcs, 0),
      residual_(2 * num_arcs, 0),
      supply_(num_nodes, 0),
      demand_(num_nodes, 0),
      stamp_(num_nodes, -1),
      next_(num_nodes, 0),
      level_(num_nodes, 0),
      is_touched_(num_arcs, false) {
  for (int64_t a = 0; a < num_arcs; a++) {
    head_[2 * a] = dst[a], head_[2 * a + 1] = src[a];
    ptr_[src[a] + 1]++, ptr_[dst[a] + 1]++;
  }
  for (int32_t v = 0; v < n_; v++) ptr_[v + 1] += ptr_[v];
  std::vector<int64_t> at(ptr_.begin(), ptr_.end() - 1);
  for (int64_t a = 0; a < 2 * num_arcs; a++) adjacent_[at[tail(a)]++] = a;
}

int64_t MaxFlow::run(const int32_t* sources, const int64_t* supply, int64_t num_sources, const int32_t* sinks,
                     const int64_t* demand, int64_t num_sinks) {
  undo();
  int64_t supply_total = 0, demand_total = 0, total = 0;
  auto add = [](int64_t sum, int64_t more) { return std::min(kUnlimited, sum + more); };
  for (int64_t i = 0; i < num_sources; i++) {
    if (supply[i] <= 0) continue;
    if (!supply_[sources[i]]) sources_.push_back(sources[i]), live_.push_back(sources[i]);
    supply_[sources[i]] = add(supply_[sources[i]], supply[i]);
    supply_total = add(supply_total, supply[i]);
  }
  for (int64_t i = 0; i < num_sinks; i++) {
    if (demand[i] <= 0) continue;
    if (!demand_[sinks[i]]) sinks_.push_back(sinks[i]);
    demand_[sinks[i]] = add(demand_[sinks[i]], demand[i]);
    demand_total = add(demand_total, demand[i]);
    if (demand_[sinks[i]] == kUnlimited && supply_[sinks[i]] == kUnlimited)
      throw std::invalid_argument("a node has unlimited supply and unlimited demand");
  }
  while (total < supply_total && total < demand_total && label()) {
    for (int32_t v : live_)
      if (labelled(v)) total += push_from(v);
    std::erase_if(live_, [&](int32_t v) { return supply_[v] == 0; });
  }
  return total;
}

// Distances to the nearest sink, breadth first, until every source that still has supply is reached.
bool MaxFlow::label() {
  phase_++;
  queue_.clear();
  size_t missing = live_.size();
  auto reach = [&](int32_t v, int32_t level) {
    stamp_[v] = phase_, level_[v] = level, next_[v] = ptr_[v];
    if (supply_[v] > 0) missing--;
    queue_.push_back(v);
  };
  for (int32_t t : sinks_)
    if (demand_[t] > 0) reach(t, 0);
  for (size_t i = 0; i < queue_.size() && missing > 0; i++) {
    int32_t v = queue_[i];
    for (int64_t k = ptr_[v]; k < ptr_[v + 1]; k++) {
      int64_t back = adjacent_[k];
      if (residual_[back ^ 1] > 0 && !labelled(head_[back])) reach(head_[back], level_[v] + 1);
    }
  }
  return missing < live_.size();
}

// Augments along downhill paths from one source until it is empty or none is left.
int64_t MaxFlow::push_from(int32_t source) {
  int64_t pushed = 0;
  path_.clear();
  for (int32_t v = source; supply_[source] > 0;) {
    if (level_[v] == 0 && demand_[v] > 0) {
      int64_t amount = std::min(supply_[source], demand_[v]);
      for (int64_t a : path_) amount = std::min(amount, residual_[a]);
      if (supply_[source] < kUnlimited) supply_[source] -= amount;
      if (demand_[v] < kUnlimited) demand_[v] -= amount;
      pushed += amount;
      size_t keep = path_.size();
      for (size_t i = path_.size(); i-- > 0;) {
        int64_t a = path_[i];
        residual_[a] -= amount, residual_[a ^ 1] += amount;
        if (!is_touched_[a >> 1]) is_touched_[a >> 1] = true, touched_.push_back(a >> 1);
        if (residual_[a] == 0) keep = i;
      }
      if (keep < path_.size()) v = tail(path_[keep]);
      path_.resize(keep);
      continue;
    }
    bool stepped = false;
    for (; level_[v] > 0 && next_[v] < ptr_[v + 1]; next_[v]++) {
      int64_t a = adjacent_[next_[v]];
      int32_t w = head_[a];
      if (residual_[a] > 0 && labelled(w) && level_[w] == level_[v] - 1) {
        path_.push_back(a);
        v = w;
        stepped = true;
        break;
      }
    }
    if (stepped) continue;
    if (v == source) break;
    v = tail(path_.back());
    path_.pop_back();
    next_[v]++;
  }
  return pushed;
}

std::vector<bool> MaxFlow::sink_side() const {
  std::vector<bool> side(n_);
  std::vector<int32_t> queue;
  for (int32_t t : sinks_)
    if (demand_[t] > 0) side[t] = true, queue.push_back(t);
  for (size_t i = 0; i < queue.size(); i++)
    for (int64_t k = ptr_[queue[i]]; k < ptr_[queue[i] + 1]; k++) {
      int64_t back = adjacent_[k];
      if (residual_[back ^ 1] > 0 && !side[head_[back]]) side[head_[back]] = true, queue.push_back(head_[back]);
    }
  return side;
}

void MaxFlow::undo() {
  for (int64_t a : touched_) {
    residual_[2 * a] = capacity_[a], residual_[2 * a + 1] = 0;
    is_touched_[a] = false;
  }
  for (int32_t v : sources_) supply_[v] = 0;
  for (int32_t v : sinks_) demand_[v] = 0;
  touched_.clear(), sources_.clear(), sinks_.clear(), live_.clear();
}

namespace {

// The flow of real numbers: everything is measured in units small enough that rounding does not matter.
class Flow {
 public:
  Flow(int32_t num_nodes, In<int32_t> src, In<int32_t> dst)
      : flow_(num_nodes, src.data(), dst.data(), (int64_t)src.shape(0)) {}

  void set_capacity(In<double> capacity, double unit) {
    unit_ = unit;
    for (int64_t a = 0; a < flow_.num_arcs(); a++) flow_.set_capacity(a, in_units(capacity.data()[a]));
  }

  double run(In<int32_t> sources, In<double> supply, In<int32_t> sinks, In<double> demand) {
    auto integers = [&](In<double> amounts) {
      std::vector<int64_t> result(amounts.shape(0));
      for (size_t i = 0; i < result.size(); i++) result[i] = in_units(amounts.data()[i]);
      return result;
    };
    std::vector<int64_t> give = integers(supply), take = integers(demand);
    nb::gil_scoped_release release;
    int64_t total = flow_.run(sources.data(), give.data(), (int64_t)give.size(), sinks.data(), take.data(),
                              (int64_t)take.size());
    return (double)total * unit_;
  }

  nb::object sink_side() const {
    std::vector<bool> side = flow_.sink_side();
    return to_numpy(std::vector<uint8_t>(side.begin(), side.end()));
  }

 private:
  int64_t in_units(double amount) const {
    double units = amount / unit_;
    return units < (double)(MaxFlow::kUnlimited >> 1) ? (int64_t)std::llround(units) : MaxFlow::kUnlimited;
  }

  MaxFlow flow_;
  double unit_ = 1;
};

// Dijkstra from each source; rows of the result are sources, columns nodes; infinity where there is no path.
constexpr double kFar = std::numeric_limits<double>::infinity();

class Paths {
 public:
  Paths(int32_t num_nodes, const int32_t* src, const int32_t* dst, const double* length, int64_t num_arcs)
      : n_(num_nodes), ptr_(num_nodes + 1, 0), out_(num_arcs), via_(num_nodes, -1) {
    for (int64_t a = 0; a < num_arcs; a++) ptr_[src[a] + 1]++;
    for (int32_t v = 0; v < n_; v++) ptr_[v + 1] += ptr_[v];
    std::vector<int64_t> at(ptr_.begin(), ptr_.end() - 1);
    for (int64_t a = 0; a < num_arcs; a++) {
      out_[at[src[a]]++] = {dst[a], a, length[a]};
      shortest_ = std::min(shortest_, length[a]);
    }
  }

  void from(int32_t source, double* far) {  // far: infinities, to be lowered
    int64_t unseen = n_ - 1, checked_at = 0;
    settled_.clear(), pending_.clear();
    via_[source] = -1;
    heap_.assign(1, {0.0, source});
    far[source] = 0;
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      auto [d, v] = heap_.back();
      heap_.pop_back();
      if (d > far[v]) continue;
      // In dense graphs nothing gets shorter long before every arc has been looked at.
      if (unseen == 0 && (int64_t)settled_.size() > checked_at) {
        checked_at = 2 * (int64_t)settled_.size();
        if (d + shortest_ >= *std::max_element(far, far + n_)) {
          pending_.push_back(v);
          for (auto [_, w] : heap_) pending_.push_back(w);
          break;
        }
      }
      settled_.push_back(v);
      for (int64_t k = ptr_[v]; k < ptr_[v + 1]; k++) {
        int32_t w = out_[k].node;
        if (d + out_[k].length < far[w]) {
          unseen -= far[w] == kFar;
          far[w] = d + out_[k].length;
          via_[w] = out_[k].number;
          heap_.push_back({far[w], w});
          std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
        }
      }
    }
  }

  // Sends what each node needs back along the paths of the last source, adding it to every arc it takes.
  void carry(std::vector<double>& need, const int32_t* tail, std::vector<double>& load) const {
    auto up = [&](int32_t v) {
      if (via_[v] < 0 || need[v] == 0) return;
      load[via_[v]] += need[v];
      need[tail[via_[v]]] += need[v];
      need[v] = 0;
    };
    for (int32_t v : pending_) up(v);
    for (size_t i = settled_.size(); i-- > 0;) up(settled_[i]);
  }

 private:
  struct Arc {
    int32_t node;
    int64_t number;
    double length;
  };
  int32_t n_;
  double shortest_ = kFar;
  std::vector<int64_t> ptr_;
  std::vector<Arc> out_;
  std::vector<int64_t> via_;                 // the arc by which each node was reached
  std::vector<int32_t> settled_, pending_;  // nodes whose arcs were followed, nearest first; reached, but not followed
  std::vector<std::pair<double, int32_t>> heap_;
};

nb::object path_lengths(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<double> length, In<int32_t> sources) {
  int64_t rows = (int64_t)sources.shape(0);
  std::vector<double> far(rows * num_nodes, kFar);
  {
    nb::gil_scoped_release release;
    Paths paths(num_nodes, src.data(), dst.data(), length.data(), (int64_t)src.shape(0));
    for (int64_t row = 0; row < rows; row++) paths.from(sources.data()[row], far.data() + row * num_nodes);
  }
  return to_numpy(std::move(far));
}

// Lengths of arcs that make the demands' shortest paths long for what the arcs can carry: in every round all demands
// take their shortest paths, and the arcs on which they crowd become longer. Returns the best lengths of all rounds.
nb::object crowded_lengths(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<double> rate, In<int32_t> sources,
                           In<int64_t> need_ptr, In<int32_t> sinks, In<double> amounts, int32_t rounds) {
  int64_t arcs = (int64_t)src.shape(0);
  std::vector<double> length(arcs), best, crowd(arcs), far(num_nodes), need(num_nodes);
  {
    nb::gil_scoped_release release;
    double best_ratio = 0;
    for (int64_t a = 0; a < arcs; a++) length[a] = 1 / rate.data()[a];
    for (int32_t round = 0; round < rounds; round++) {
      Paths paths(num_nodes, src.data(), dst.data(), length.data(), arcs);
      std::fill(crowd.begin(), crowd.end(), 0.0);
      double needed = 0, offered = 0, most = 0;
      for (size_t i = 0; i < sources.shape(0); i++) {
        std::fill(far.begin(), far.end(), kFar);
        paths.from(sources.data()[i], far.data());
        std::fill(need.begin(), need.end(), 0.0);
        for (int64_t k = need_ptr.data()[i]; k < need_ptr.data()[i + 1]; k++) {
          need[sinks.data()[k]] += amounts.data()[k];
          needed += amounts.data()[k] * far[sinks.data()[k]];
        }
        paths.carry(need, src.data(), crowd);
      }
      for (int64_t a = 0; a < arcs; a++) {
        if (length[a] > 0) offered += length[a] * rate.data()[a];
        crowd[a] /= rate.data()[a];
        most = std::max(most, crowd[a]);
      }
      if (needed > best_ratio * offered) best_ratio = needed / offered, best = length;
      if (most <= 0) break;
      double longest = 0;
      for (int64_t a = 0; a < arcs; a++) {
        length[a] *= std::exp(2 / std::sqrt(round + 1.0) * crowd[a] / most);
        longest = std::max(longest, length[a]);
      }
      for (double& each : length) each /= longest;
    }
  }
  return to_numpy(std::move(best));
}

// Cheapest flows from one device to another, path by path (successive shortest paths): the rate of each path and the
// latency of the whole way. In a time T no more than the sum of rate x (T - latency) can get there.
class CheapestFlows {
 public:
  CheapestFlows(int32_t num_nodes, const int32_t* src, const int32_t* dst, const double* length, const double* rate,
                int64_t arcs)
      : n_(num_nodes), out_(num_nodes), rate_(rate, rate + arcs) {
    for (int64_t a = 0; a < arcs; a++) {
      out_[src[a]].push_back((int32_t)arcs_.size());
      arcs_.push_back({dst[a], length[a]});
      out_[dst[a]].push_back((int32_t)arcs_.size());
      arcs_.push_back({src[a], -length[a]});
    }
  }

  void between(int32_t source, int32_t sink, int32_t most, std::vector<double>& rates, std::vector<double>& lengths) {
    left_.assign(arcs_.size(), 0.0);
    double all = 0;
    for (size_t a = 0; a < rate_.size(); a++) left_[2 * a] = rate_[a], all += rate_[a];
    std::vector<double> potential(n_, 0.0), far(n_);
    std::vector<int32_t> via(n_);
    for (int32_t path = 0; path < most; path++) {
      search(source, all * 1e-13, potential, far, via);
      if (far[sink] == kFar) return;
      // What is not reached now is never reached again, so that its potential no longer matters.
      for (int32_t v = 0; v < n_; v++) potential[v] += far[v] == kFar ? 0.0 : far[v];
      double room = kFar;
      for (int32_t v = sink; v != source; v = arcs_[via[v] ^ 1].node) room = std::min(room, left_[via[v]]);
      for (int32_t v = sink; v != source; v = arcs_[via[v] ^ 1].node) left_[via[v]] -= room, left_[via[v] ^ 1] += room;
      if (path + 1 == most) room = all;  // whatever is left takes at least as long as this path
      rates.push_back(room);
      lengths.push_back(potential[sink] - potential[source]);
    }
  }

 private:
  struct Arc {
    int32_t node;
    double length;
  };

  void search(int32_t source, double least, const std::vector<double>& potential, std::vector<double>& far,
              std::vector<int32_t>& via) {
    std::fill(far.begin(), far.end(), kFar);
    far[source] = 0;
    std::vector<std::pair<double, int32_t>> heap{{0.0, source}};
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      auto [d, v] = heap.back();
      heap.pop_back();
      if (d > far[v]) continue;
      for (int32_t a : out_[v]) {
        if (left_[a] <= least) continue;
        int32_t w = arcs_[a].node;
        double reached = d + std::max(0.0, arcs_[a].length + potential[v] - potential[w]);
        if (reached < far[w]) {
          far[w] = reached;
          via[w] = a;
          heap.push_back({reached, w});
          std::push_heap(heap.begin(), heap.end(), std::greater<>());
        }
      }
    }
  }

  int32_t n_;
  std::vector<std::vector<int32_t>> out_;
  std::vector<double> rate_, left_;
  std::vector<Arc> arcs_;
};

nb::object cheapest_flows(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<double> length, In<double> rate,
                          In<int32_t> sources, In<int32_t> sinks, int32_t most) {
  std::vector<int64_t> ptr{0};
  std::vector<double> rates, lengths;
  {
    nb::gil_scoped_release release;
    CheapestFlows flows(num_nodes, src.data(), dst.data(), length.data(), rate.data(), (int64_t)src.shape(0));
    for (size_t i = 0; i < sources.shape(0); i++) {
      flows.between(sources.data()[i], sinks.data()[i], most, rates, lengths);
      ptr.push_back((int64_t)rates.size());
    }
  }
  return nb::make_tuple(to_numpy(std::move(ptr)), to_numpy(std::move(rates)), to_numpy(std::move(lengths)));
}

}  // namespace

void bind_maxflow(nb::module_& m) {
  nb::class_<Flow>(m, "MaxFlow")
      .def(nb::init<int32_t, In<int32_t>, In<int32_t>>(), nb::arg("num_nodes"), nb::arg("src"), nb::arg("dst"))
      .def("set_capacity", &Flow::set_capacity, nb::arg("capacity"), nb::arg("unit"))
      .def("run", &Flow::run, nb::arg("sources"), nb::arg("supply"), nb::arg("sinks"), nb::arg("demand"))
      .def("sink_side", &Flow::sink_side);
  m.def("path_lengths", &path_lengths, nb::arg("num_nodes"), nb::arg("src"), nb::arg("dst"), nb::arg("length"),
        nb::arg("sources"));
  m.def("cheapest_flows", &cheapest_flows, nb::arg("num_nodes"), nb::arg("src"), nb::arg("dst"), nb::arg("length"),
        nb::arg("rate"), nb::arg("sources"), nb::arg("sinks"), nb::arg("most"));
  m.def("crowded_lengths", &crowded_lengths, nb::arg("num_nodes"), nb::arg("src"), nb::arg("dst"), nb::arg("rate"),
        nb::arg("sources"), nb::arg("need_ptr"), nb::arg("sinks"), nb::arg("amounts"), nb::arg("rounds"));
}
}  // namespace stretto
