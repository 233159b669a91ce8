// SPDX-License-Identifier: Apache-2.0
// ScheduleSearch: several chains of different temperatures, run in slices.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <thread>

#include "arrays.h"
#include "schedule_object.h"
#include "search.h"

namespace stretto {
namespace {
using namespace sched;

class Search {
 public:
  Search(ScheduleObject& object, bool joint, int32_t discipline, bool serial, int32_t iterations, int32_t chains,
         double beta, uint64_t seed, int32_t threads)
      : p_(object.problem), random_(seed ^ 0x5851f42d4c957f2dull), threads_(std::max(1, threads)) {
    if (iterations < 2 || iterations > 64) throw std::invalid_argument("iterations: 2..64");
    s_.joint = joint, s_.discipline = discipline, s_.serial = serial, s_.iterations = iterations, s_.beta = beta;
    for (int32_t c = 0; c < (joint ? std::max(chains, 1) : 1); c++)
      chains_.push_back(std::make_unique<Chain>(p_, s_, seed * 1000003 + c, beta * std::pow(s_.ladder, c)));
  }

  Search(const Search&) = delete;

  // A list schedule of a choice becomes a start.
  double start_listed(In<int32_t> choice, int32_t discipline) {
    State state;
    state.choice.assign(choice.data(), choice.data() + choice.shape(0));
    chains_[0]->listed(state, discipline);
    return add(state);
  }

  // So does a periodic order, tasks numbered op by op.
  double start_ordered(In<int32_t> choice, In<int32_t> order, In<int32_t> shift) {
    State state;
    state.choice.assign(choice.data(), choice.data() + choice.shape(0));
    Evaluator& e = chains_[0]->evaluator();
    e.choose(state.choice.data(), s_.serial);
    std::vector<int32_t> node = nodes(e, state.choice), sequence, shifts;
    if (order.shape(0) != node.size() || shift.shape(0) != node.size()) throw std::invalid_argument("order, shift: one per task");
    for (size_t k = 0; k < node.size(); k++) {
      sequence.push_back(node.at(order.data()[k])), shifts.push_back(shift.data()[order.data()[k]]);
      s_.max_shift = std::max(s_.max_shift, std::abs(shifts.back()));
    }
    if (!chains_[0]->settle(state, sequence, shifts)) throw std::invalid_argument("order: cannot be carried out");
    return add(state);
  }

  // Rounds of so many steps in every chain, then neighbours in temperature may change places.
  double run(int32_t rounds, int32_t steps) {
    nb::gil_scoped_release release;
    if (starts_.empty()) throw std::invalid_argument("no start");
    if (!begun_) begin();
    for (int32_t r = 0; r < rounds; r++) {
      auto work = [&](size_t from, size_t by) {
        for (size_t c = from; c < chains_.size(); c += by) chains_[c]->steps(steps, scale_);
      };
      size_t threads = std::min<size_t>(threads_, chains_.size());
      std::vector<std::thread> others;
      for (size_t t = 1; t < threads; t++) others.emplace_back(work, t, threads);
      work(0, threads);
      for (std::thread& other : others) other.join();
      exchange();
    }
    return best().cost;
  }

  // The best plan of one chain; of all for -1.
  nb::object plan(int32_t chain) {
    if (chain >= (int32_t)chains_.size()) throw std::invalid_argument("chain: no such one");
    const State& found = !begun_ ? starts_.at(0) : chain < 0 ? best() : chains_[chain]->best_;
    Evaluator& e = chains_[0]->evaluator();
    e.choose(found.choice.data(), s_.serial);
    std::vector<int32_t> node = nodes(e, found.choice), flat(e.nodes(), -1), choice = found.choice, order, shift;
    for (size_t t = 0; t < node.size(); t++) flat[node[t]] = (int32_t)t, shift.push_back(found.shift[node[t]]);
    for (int32_t v : found.sequence) order.push_back(flat[v]);
    return nb::make_tuple(found.cost, to_numpy(std::move(choice)), to_numpy(std::move(order)), to_numpy(std::move(shift)));
  }

  nb::object counts() const {
    int64_t evaluations = 0, proposed = 0, accepted = 0;
    for (const auto& c : chains_) evaluations += c->evaluations, proposed += c->proposed, accepted += c->accepted;
    return nb::make_tuple(evaluations, proposed, accepted);
  }

 private:
  static std::vector<int32_t> nodes(Evaluator& e, const std::vector<int32_t>& choice) {
    const Problem& p = e.problem();
    std::vector<int32_t> node;
    for (int32_t op = 0; op < p.num_ops; op++)
      for (int32_t t = 0; p.comm[op] && t < p.tasks(op, choice[op]); t++) node.push_back(e.node_of(op, t));
    return node;
  }

  double add(const State& state) {
    starts_.push_back(state);
    std::stable_sort(starts_.begin(), starts_.end(), [](const State& a, const State& b) { return a.cost < b.cost; });
    return state.cost;
  }

  void begin() {
    begun_ = true;
    scale_ = std::max(starts_[0].cost, 1e-300);
    const int64_t most_tasks = (int64_t)(kMorePieces * (double)starts_[0].tasks);
    if (p_.num_ops >= kLargeStep) std::erase_if(starts_, [&](const State& s) { return s.tasks > most_tasks; });
    for (size_t c = 0; c < chains_.size(); c++) chains_[c]->start(starts_[c % starts_.size()], most_tasks);
  }

  const State& best() const {
    const State* found = &chains_[0]->best_;
    for (const auto& c : chains_)
      if (c->best_.cost < found->cost) found = &c->best_;
    return *found;
  }

  void exchange() {
    round_++;
    for (size_t c = chains_.size(); c-- > 1;) {
      Chain &cold = *chains_[c - 1], &hot = *chains_[c];
      double gain = (cold.beta_ - hot.beta_) * (cold.now_.cost - hot.now_.cost) / scale_;
      if (random_.unit() < std::exp(std::min(gain, 0.0))) std::swap(cold.now_, hot.now_), cold.changed(), hot.changed();
    }
    // Now and then one chain goes on from the best plan.
    if (!s_.joint || round_ % 32) return;
    Chain& chain = *chains_[random_.below((int64_t)chains_.size())];
    chain.now_ = State(best()), chain.changed();
  }

  const Problem& p_;
  Settings s_;
  Random random_;
  int32_t threads_;
  std::vector<std::unique_ptr<Chain>> chains_;
  std::vector<State> starts_;
  bool begun_ = false;
  double scale_ = 1;
  int64_t round_ = 0;
};
}  // namespace

void bind_search(nb::module_& m) {
  nb::class_<Search>(m, "ScheduleSearch")
      .def(nb::init<ScheduleObject&, bool, int32_t, bool, int32_t, int32_t, double, uint64_t, int32_t>(),
           nb::keep_alive<1, 2>(), nb::arg("problem"), nb::arg("joint"), nb::arg("discipline"), nb::arg("serial"),
           nb::arg("iterations"), nb::arg("chains"), nb::arg("beta"), nb::arg("seed"), nb::arg("threads"))
      .def("start_listed", &Search::start_listed, nb::arg("choice"), nb::arg("discipline"))
      .def("start_ordered", &Search::start_ordered, nb::arg("choice"), nb::arg("order"), nb::arg("shift"))
      .def("run", &Search::run, nb::arg("rounds"), nb::arg("steps"))
      .def("plan", &Search::plan, nb::arg("chain") = -1)
      .def("counts", &Search::counts);
}
}  // namespace stretto
