// Maximum flow and shortest path lengths: what lower bounds are made of.
#include "maxflow.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

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
  int64_t supply_left = 0, demand_left = 0, total = 0;
  auto add = [](int64_t sum, int64_t more) { return std::min(kUnlimited, sum + more); };
  for (int64_t i = 0; i < num_sources; i++) {
    if (supply[i] <= 0) continue;
    if (!supply_[sources[i]]) sources_.push_back(sources[i]), live_.push_back(sources[i]);
    supply_[sources[i]] = add(supply_[sources[i]], supply[i]);
    supply_left = add(supply_left, supply[i]);
  }
  for (int64_t i = 0; i < num_sinks; i++) {
    if (demand[i] <= 0) continue;
    if (!demand_[sinks[i]]) sinks_.push_back(sinks[i]);
    demand_[sinks[i]] = add(demand_[sinks[i]], demand[i]);
    demand_left = add(demand_left, demand[i]);
  }
  while (total < supply_left && total < demand_left && label()) {
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
      if (supply_[source] >= kUnlimited && path_.empty() && v == source && level_[v] == 0) break;
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
nb::object path_lengths(int32_t num_nodes, In<int32_t> src, In<int32_t> dst, In<double> length, In<int32_t> sources) {
  constexpr double kFar = std::numeric_limits<double>::infinity();
  int64_t arcs = (int64_t)src.shape(0), rows = (int64_t)sources.shape(0);
  std::vector<double> result(rows * num_nodes, kFar);
  nb::gil_scoped_release release;
  std::vector<int64_t> ptr(num_nodes + 1, 0), at;
  std::vector<std::pair<int32_t, double>> out(arcs);
  for (int64_t a = 0; a < arcs; a++) ptr[src.data()[a] + 1]++;
  for (int32_t v = 0; v < num_nodes; v++) ptr[v + 1] += ptr[v];
  at.assign(ptr.begin(), ptr.end() - 1);
  double shortest = kFar;
  for (int64_t a = 0; a < arcs; a++) {
    out[at[src.data()[a]]++] = {dst.data()[a], length.data()[a]};
    shortest = std::min(shortest, length.data()[a]);
  }
  using Entry = std::pair<double, int32_t>;
  std::vector<Entry> heap;
  for (int64_t row = 0; row < rows; row++) {
    double* far = result.data() + row * num_nodes;
    int64_t unseen = num_nodes - 1, settled = 0, look_at = 0;
    heap.assign(1, {0.0, sources.data()[row]});
    far[sources.data()[row]] = 0;
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      auto [d, v] = heap.back();
      heap.pop_back();
      if (d > far[v]) continue;
      // In dense graphs nothing gets shorter long before every arc has been looked at.
      if (unseen == 0 && ++settled > look_at) {
        look_at = 2 * settled;
        if (d + shortest >= *std::max_element(far, far + num_nodes)) break;
      }
      for (int64_t k = ptr[v]; k < ptr[v + 1]; k++) {
        auto [w, step] = out[k];
        if (d + step < far[w]) {
          unseen -= far[w] == kFar;
          far[w] = d + step;
          heap.push_back({far[w], w});
          std::push_heap(heap.begin(), heap.end(), std::greater<>());
        }
      }
    }
  }
  nb::gil_scoped_acquire acquire;
  return to_numpy(std::move(result));
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
}
}  // namespace stretto
