// SPDX-License-Identifier: Apache-2.0
// ScheduleProblem: from NumPy arrays to a compiled problem, and its schedules back.
#include <algorithm>
#include <bit>
#include <map>
#include <stdexcept>
#include <utility>

#include "arrays.h"
#include "schedule_object.h"

namespace stretto {
namespace {
using sched::Discipline;
using sched::Edge;
using sched::Evaluator;
using sched::Problem;

template <class T>
std::vector<T> copy(In<T> values) {
  return {values.data(), values.data() + values.shape(0)};
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// An op waits for the one before it on each of its streams, the first for the last of the iteration before.
void add_streams(Problem& p, const Rows<int32_t>& streams, int32_t num_streams, std::vector<std::vector<Edge>>& need) {
  std::vector<int32_t> first(num_streams, -1), last(num_streams, -1);
  std::vector<double> load(num_streams, 0);
  auto add = [&](int32_t op, Edge edge) {
    for (const Edge& e : need[op])
      if (e.node == edge.node && e.lag <= edge.lag) return;
    need[op].push_back(edge);
  };
  for (int32_t op = 0; op < p.num_ops; op++)
    for (const int32_t* s = streams.begin(op); s != streams.end(op); s++) {
      if (first[*s] < 0) first[*s] = op;
      else add(op, {last[*s], 0, 0});
      last[*s] = op, load[*s] += p.duration[op];
    }
  for (int32_t s = 0; s < num_streams; s++)
    if (first[s] >= 0) add(first[s], {last[s], 1, 0}), p.stream_load = std::max(p.stream_load, load[s]);
}

// The first of the program that can come next, always: program order, where that is possible.
void sort_ops(Problem& p, const std::vector<std::vector<Edge>>& need) {
  std::vector<std::vector<int32_t>> next(p.num_ops);
  std::vector<int32_t> left(p.num_ops, 0), open;
  for (int32_t op = 0; op < p.num_ops; op++)
    for (const Edge& e : need[op])
      if (e.lag == 0) next[e.node].push_back(op), left[op]++;
  auto later = std::greater<int32_t>();
  for (int32_t op = 0; op < p.num_ops; op++)
    if (!left[op]) open.push_back(op);
  while (!open.empty()) {
    std::pop_heap(open.begin(), open.end(), later);
    int32_t op = open.back();
    open.pop_back();
    p.topological.push_back(op);
    for (int32_t to : next[op])
      if (--left[to] == 0) open.push_back(to), std::push_heap(open.begin(), open.end(), later);
  }
  if ((int32_t)p.topological.size() != p.num_ops) throw std::invalid_argument("ops wait for each other in a circle");
}

// Resources that exactly the same tasks hold for the same times (one channel at many places) are one bit of the masks.
// `held_us` is how long a task holds each of its resources; those of `serial` it holds until it ends.
void make_masks(Problem& p, const Rows<int32_t>& held, const double* held_us, const Rows<int32_t>& serial,
                int32_t num_resources) {
  const int64_t tasks = (int64_t)p.task_us.size();
  std::vector<std::pair<uint64_t, uint64_t>> sign(num_resources, {0, 0});
  auto each_task = [&](auto&& visit) {
    for (int32_t set = 0; set + 1 < (int32_t)p.option_ptr.size(); set++)
      for (int64_t t = p.task_ptr[p.option_ptr[set]]; t < p.task_ptr[p.option_ptr[set + 1]]; t++) visit(set, t);
  };
  auto us_of = [&](const int32_t* r, int64_t t) { return std::min(held_us[r - held.begin(0)], p.task_us[t]); };
  auto add = [&](int32_t r, int64_t t, double us) {
    uint64_t key = mix((uint64_t)t) ^ std::bit_cast<uint64_t>(us);
    sign[r].first += mix(key), sign[r].second += mix(~key * 3);
  };
  each_task([&](int32_t set, int64_t t) {
    for (const int32_t* r = held.begin(t); r != held.end(t); r++) add(*r, t, us_of(r, t));
    for (const int32_t* r = serial.begin(set); r != serial.end(set); r++) add(*r, t, p.task_us[t]);
  });
  std::map<std::pair<uint64_t, uint64_t>, int32_t> classes;
  std::vector<int32_t> bit(num_resources);
  for (int32_t r = 0; r < num_resources; r++)
    bit[r] = classes.try_emplace(sign[r], (int32_t)classes.size()).first->second;
  p.num_words = std::max<int32_t>(1, ((int32_t)classes.size() + 63) / 64);
  for (int32_t serial_too : {0, 1}) {
    p.mask[serial_too].assign((size_t)tasks * p.num_words, 0);
    p.whole[serial_too].assign((size_t)tasks * p.num_words, 0);
  }
  p.part_ptr.assign(1, 0);
  each_task([&](int32_t of, int64_t t) {
    auto set = [&](std::vector<uint64_t>& mask, int32_t r) {
      mask[(size_t)t * p.num_words + bit[r] / 64] |= 1ull << (bit[r] % 64);
    };
    std::map<int32_t, double> parts;
    for (const int32_t* r = held.begin(t); r != held.end(t); r++) {
      set(p.mask[0], *r), set(p.mask[1], *r);
      if (us_of(r, t) < p.task_us[t]) parts[bit[*r]] = us_of(r, t);
      else set(p.whole[0], *r), set(p.whole[1], *r);
    }
    for (const int32_t* r = serial.begin(of); r != serial.end(of); r++) set(p.mask[1], *r), set(p.whole[1], *r);
    for (auto [part_bit, us] : parts) p.part.push_back({part_bit, us});
    p.part_ptr.push_back((int64_t)p.part.size());
  });
}

Problem compile(In<uint8_t> comm, In<double> duration_us, In<int64_t> stream_ptr, In<int32_t> stream,
                int32_t num_streams, In<int64_t> dep_ptr, In<int32_t> dep_op, In<int32_t> dep_lag,
                In<int32_t> set, In<int32_t> line, In<int64_t> option_ptr, In<int64_t> task_ptr, In<double> task_us, In<int64_t> inner_ptr,
                In<int32_t> inner, In<int64_t> held_ptr, In<int32_t> held, In<double> held_us, In<int64_t> serial_ptr,
                In<int32_t> serial, int32_t num_resources, int32_t anchor) {
  if (held_us.shape(0) != held.shape(0)) throw std::invalid_argument("held_us: one for each of held");
  Problem p;
  p.num_ops = (int32_t)comm.shape(0), p.anchor = anchor;
  p.comm = copy(comm), p.duration = copy(duration_us);
  p.set = copy(set), p.line = copy(line);
  for (int32_t line_of_op : p.line) p.num_lines = std::max(p.num_lines, line_of_op + 1);
  p.option_ptr = copy(option_ptr), p.task_ptr = copy(task_ptr), p.task_us = copy(task_us);
  p.inner_ptr = copy(inner_ptr), p.inner = copy(inner);
  p.sink.assign(p.task_us.size(), 1);
  for (size_t option = 0; option + 1 < p.task_ptr.size(); option++)
    for (int64_t t = p.task_ptr[option]; t < p.task_ptr[option + 1]; t++)
      for (int64_t e = p.inner_ptr[t]; e < p.inner_ptr[t + 1]; e++) p.sink[p.task_ptr[option] + p.inner[e]] = 0;
  std::vector<std::vector<Edge>> need(p.num_ops);
  for (int32_t op = 0; op < p.num_ops; op++)
    for (int64_t e = dep_ptr.data()[op]; e < dep_ptr.data()[op + 1]; e++)
      need[op].push_back({dep_op.data()[e], dep_lag.data()[e], 0});
  add_streams(p, {stream_ptr.data(), stream.data()}, num_streams, need);
  sort_ops(p, need);
  p.need_ptr.assign(1, 0), p.slot_ptr.assign(1, 0);
  for (int32_t op = 0; op < p.num_ops; op++) {
    p.need.insert(p.need.end(), need[op].begin(), need[op].end());
    p.need_ptr.push_back((int64_t)p.need.size());
    int32_t room = 0;
    for (int32_t option = 0; option < p.options(op); option++) room = std::max(room, p.tasks(op, option));
    p.slot_ptr.push_back(p.slot_ptr.back() + room);
  }
  make_masks(p, {held_ptr.data(), held.data()}, held_us.data(), {serial_ptr.data(), serial.data()}, num_resources);
  return p;
}

// Tasks of a choice are numbered op by op in program order; the evaluator numbers nodes its own way.
std::vector<int32_t> choose(ScheduleObject& self, In<int32_t> choice, bool serial) {
  const Problem& p = self.problem;
  if ((int32_t)choice.shape(0) != p.num_ops) throw std::invalid_argument("choice: one per op");
  for (int32_t op = 0; op < p.num_ops; op++)
    if (p.comm[op] && (choice.data()[op] < 0 || choice.data()[op] >= p.options(op)))
      throw std::invalid_argument("choice: no such option");
  self.scratch.choose(choice.data(), serial);
  std::vector<int32_t> node;
  for (int32_t op = 0; op < p.num_ops; op++)
    for (int32_t t = 0; p.comm[op] && t < p.tasks(op, choice.data()[op]); t++)
      node.push_back(self.scratch.node_of(op, t));
  return node;
}

void list(ScheduleObject& self, const std::vector<int32_t>& node, int32_t discipline, In<double> priority,
          double step, int32_t iterations) {
  Evaluator& e = self.scratch;
  if (iterations < 2 || iterations > 64) throw std::invalid_argument("iterations: 2..64");
  if (discipline == (int32_t)Discipline::fifo) {
    e.fifo(iterations);
    return;
  }
  std::vector<double> key(e.nodes(), 0);
  if (discipline == (int32_t)Discipline::priority) {
    if (priority.shape(0) != node.size()) throw std::invalid_argument("priority: one per task");
    for (size_t t = 0; t < node.size(); t++) key[node[t]] = priority.data()[t];
  }
  e.evaluate(iterations, (Discipline)discipline, key.data(), step);
}

double evaluate(ScheduleObject& self, In<int32_t> choice, int32_t discipline, In<double> priority, double step,
                bool serial, int32_t iterations) {
  std::vector<int32_t> node = choose(self, choice, serial);
  list(self, node, discipline, priority, step, iterations);
  return self.scratch.value;
}

nb::object schedule(ScheduleObject& self, In<int32_t> choice, int32_t discipline, In<double> priority, double step,
                    bool serial, int32_t iterations) {
  std::vector<int32_t> node = choose(self, choice, serial), flat(self.scratch.nodes(), -1), order, shift;
  list(self, node, discipline, priority, step, iterations);
  for (size_t t = 0; t < node.size(); t++) flat[node[t]] = (int32_t)t, shift.push_back(self.scratch.shift[node[t]]);
  for (int32_t v : self.scratch.sequence) order.push_back(flat[v]);
  return nb::make_tuple(self.scratch.value, to_numpy(std::move(order)), to_numpy(std::move(shift)));
}

// Starts of the dynamic list schedule itself: per iteration the ops (compute-ops only have one) and tasks.
nb::object unrolled(ScheduleObject& self, In<int32_t> choice, int32_t discipline, In<double> priority, double step,
                    bool serial, int32_t iterations) {
  std::vector<int32_t> node = choose(self, choice, serial);
  if (discipline == (int32_t)Discipline::fifo) self.scratch.list(iterations, Discipline::fifo, nullptr, 0);
  else   list(self, node, discipline, priority, step, iterations);
  std::vector<double> op_start, task_start;
  for (int32_t i = 0; i < iterations; i++) {
    for (int32_t op = 0; op < self.problem.num_ops; op++)
      op_start.push_back(self.problem.comm[op] ? -1.0 : self.scratch.listed_start(i, self.scratch.node_of(op, 0)));
    for (int32_t v : node) task_start.push_back(self.scratch.listed_start(i, v));
  }
  return nb::make_tuple(to_numpy(std::move(op_start)), to_numpy(std::move(task_start)));
}

nb::object replay(ScheduleObject& self, In<int32_t> choice, In<int32_t> order, In<int32_t> shift, bool serial,
                  int32_t iterations) {
  std::vector<int32_t> node = choose(self, choice, serial);
  Evaluator& e = self.scratch;
  if (order.shape(0) != node.size() || shift.shape(0) != node.size())
    throw std::invalid_argument("order, shift: one per task");
  std::vector<uint8_t> seen(node.size(), 0);
  e.program_order();
  for (size_t k = 0; k < node.size(); k++) {
    int32_t t = order.data()[k];
    if (t < 0 || (size_t)t >= node.size() || seen[t]++) throw std::invalid_argument("order: each task once");
    e.sequence[k] = node[t];
    e.shift[node[k]] = shift.data()[k];
  }
  e.walk_by_waits();
  std::vector<int32_t> circle = e.deadlock(), circle_op, circle_behind;
  for (size_t k = 0; k < circle.size(); k++) {
    circle_op.push_back(e.op[circle[k]]);
    circle_behind.push_back(e.ordered_after(circle[k], circle[(k + 1) % circle.size()]));
  }
  std::vector<double> op_start, task_start, ends;
  std::vector<int32_t> critical_op, critical_task;
  if (circle.empty()) {
    e.period();
    if (iterations > 0) ends = e.cold(iterations);
    for (int32_t op = 0; op < self.problem.num_ops; op++)
      op_start.push_back(self.problem.comm[op] ? 0.0 : e.time[e.node_of(op, 0)]);
    for (int32_t v : node) task_start.push_back(e.time[v]);
    for (size_t k = e.critical.size(); k-- > 0;)
      if (e.local[e.critical[k]] >= -1) critical_op.push_back(e.op[e.critical[k]]), critical_task.push_back(e.local[e.critical[k]]);
  }
  return nb::make_tuple(e.value, to_numpy(std::move(op_start)), to_numpy(std::move(task_start)),
                        to_numpy(std::move(ends)), to_numpy(std::move(critical_op)),
                        to_numpy(std::move(critical_task)), to_numpy(std::move(circle_op)),
                        to_numpy(std::move(circle_behind)));
}

nb::object waiting_circle(int32_t num_nodes, In<int32_t> node, In<int32_t> waits_for, In<int32_t> lag) {
  std::vector<int64_t> ptr(num_nodes + 1, 0), fill;
  std::vector<Edge> in(node.shape(0));
  for (size_t e = 0; e < in.size(); e++) ptr[node.data()[e] + 1]++;
  for (int32_t v = 0; v < num_nodes; v++) ptr[v + 1] += ptr[v];
  fill.assign(ptr.begin(), ptr.end() - 1);
  for (size_t e = 0; e < in.size(); e++) in[fill[node.data()[e]]++] = {waits_for.data()[e], lag.data()[e], 0};
  return to_numpy(sched::find_deadlock(num_nodes, ptr, in, nullptr));
}
}  // namespace

void bind_schedule(nb::module_& m) {
  nb::class_<ScheduleObject>(m, "ScheduleProblem")
      .def("__init__",
           [](ScheduleObject* self, In<uint8_t> comm, In<double> duration_us, In<int64_t> stream_ptr,
              In<int32_t> stream, int32_t num_streams, In<int64_t> dep_ptr, In<int32_t> dep_op, In<int32_t> dep_lag,
              In<int32_t> set, In<int32_t> line, In<int64_t> option_ptr, In<int64_t> task_ptr, In<double> task_us, In<int64_t> inner_ptr,
              In<int32_t> inner, In<int64_t> held_ptr, In<int32_t> held, In<double> held_us, In<int64_t> serial_ptr,
              In<int32_t> serial, int32_t num_resources, int32_t anchor) {
             new (self) ScheduleObject(compile(comm, duration_us, stream_ptr, stream, num_streams, dep_ptr, dep_op,
                                               dep_lag, set, line, option_ptr, task_ptr, task_us, inner_ptr, inner, held_ptr,
                                               held, held_us, serial_ptr, serial, num_resources, anchor));
           },
           nb::arg("comm"), nb::arg("duration_us"), nb::arg("stream_ptr"), nb::arg("stream"), nb::arg("num_streams"),
           nb::arg("dep_ptr"), nb::arg("dep_op"), nb::arg("dep_lag"), nb::arg("set"), nb::arg("line"), nb::arg("option_ptr"), nb::arg("task_ptr"),
           nb::arg("task_us"), nb::arg("inner_ptr"), nb::arg("inner"), nb::arg("held_ptr"), nb::arg("held"), nb::arg("held_us"),
           nb::arg("serial_ptr"), nb::arg("serial"), nb::arg("num_resources"), nb::arg("anchor"))
      .def("evaluate", &evaluate, nb::arg("choice"), nb::arg("discipline"), nb::arg("priority"), nb::arg("step"),
           nb::arg("serial"), nb::arg("iterations"))
      .def("schedule", &schedule, nb::arg("choice"), nb::arg("discipline"), nb::arg("priority"), nb::arg("step"),
           nb::arg("serial"), nb::arg("iterations"))
      .def("unrolled", &unrolled, nb::arg("choice"), nb::arg("discipline"), nb::arg("priority"), nb::arg("step"),
           nb::arg("serial"), nb::arg("iterations"))
      .def("replay", &replay, nb::arg("choice"), nb::arg("order"), nb::arg("shift"), nb::arg("serial"),
           nb::arg("iterations"));
  m.def("waiting_circle", &waiting_circle, nb::arg("num_nodes"), nb::arg("node"), nb::arg("waits_for"), nb::arg("lag"));
}
}  // namespace stretto
