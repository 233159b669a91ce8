// SPDX-License-Identifier: Apache-2.0
// The network simulator's entry from Python.
#include "network.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <map>
#include <tuple>
#include <unordered_map>

namespace stretto {

Casts::Casts(const Transfers& t, const Rows<int32_t>& routes) {
  if (!t.cast) return;
  leader_.resize(t.count), next_.assign(t.count, kNobody), size_.assign(t.count, 1), guide_.assign(t.count, kNobody);
  parts_.assign(t.count, 0), first_.assign(t.count, kNobody), other_.assign(t.count, kNobody);
  std::unordered_map<int32_t, std::pair<int32_t, int32_t>> ends;  // of each cast: its first member, and the last so far
  for (int32_t x = 0; x < t.count; x++) {
    leader_[x] = x;
    if (t.cast[x] < 0) continue;
    auto [at, fresh] = ends.try_emplace(t.cast[x], x, x);
    if (!fresh) next_[at->second.second] = x, at->second.second = x, leader_[x] = at->second.first, size_[leader_[x]]++;
  }
  // The links travelled by a cast: who owns the step from one place on the way (its owner, its hop) to the next.
  std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> step;
  for (int32_t x = 0; x < t.count; x++) {
    if (leader_[x] != x || size_[x] == 1) continue;
    step.clear();
    each_member(x, [&](int32_t m) {
      const int32_t* route = routes.begin(t.route[m]);
      auto hops = (int32_t)routes.size(t.route[m]);
      int32_t on = x, hop = 0;
      for (; m != x && hop < hops; hop++) {
        auto found = step.find({on, hop, route[hop]});
        if (found == step.end()) break;
        on = found->second;
      }
      if (m != x) guide_[m] = on, parts_[m] = hop, other_[m] = first_[on], first_[on] = m;
      for (; hop < hops; hop++, on = m) step[{on, hop, route[hop]}] = m;
    });
  }
}

namespace {

// For each transfer that follows another the link behind which they part; -1 where it follows none, -2: at its source.
nb::object cast_forks(In<int32_t> cast, In<int32_t> route, In<int64_t> route_ptr, In<int32_t> route_links) {
  Transfers t{};
  t.count = (int32_t)cast.shape(0), t.route = route.data(), t.cast = cast.data();
  Rows<int32_t> routes{route_ptr.data(), route_links.data()};
  std::vector<int32_t> fork(t.count, -1);
  {
    nb::gil_scoped_release release;
    Casts casts(t, routes);
    for (int32_t x = 0; x < t.count; x++)
      if (casts.follows(x)) fork[x] = casts.parts(x) ? routes.begin(t.route[x])[casts.parts(x) - 1] : -2;
  }
  return to_numpy(std::move(fork));
}

nb::object simulate(In<bool> reduce, In<double> bytes, In<int64_t> after_ptr, In<int32_t> after,
                    In<int64_t> gate_ptr, In<int32_t> gate, In<bool> gate_reads, In<int32_t> connection, In<int32_t> route,
                    In<int64_t> route_ptr, In<int32_t> route_links, In<double> alpha_us, In<double> bytes_per_us,
                    In<double> flow_cap, In<int32_t> incast, In<int64_t> curve_ptr, In<int32_t> curve_flows,
                    In<double> curve_share, double reduce_us_per_byte, bool alpha_blocks, bool fair,
                    std::optional<In<double>> delay_us, std::optional<In<int32_t>> cast, int32_t load_slots) {
  Transfers t{(int32_t)bytes.shape(0), route.data(), connection.data(), reduce.data(), bytes.data(),
              {after_ptr.data(), after.data()}, {gate_ptr.data(), gate.data()}, gate_reads.data(), reduce_us_per_byte,
              delay_us ? delay_us->data() : nullptr, cast ? cast->data() : nullptr};
  Network net{{route_ptr.data(), route_links.data()}, alpha_us.data(), bytes_per_us.data(), flow_cap.data(),
              incast.data(), {curve_ptr.data(), curve_flows.data()}, curve_share.data(), alpha_blocks};
  Run run;
  {
    nb::gil_scoped_release release;
    auto once = [&] {
      auto num_links = (int64_t)alpha_us.shape(0);
      return fair ? simulate_fair(t, net, num_links) : simulate_fifo(t, net, num_links);
    };
    run = once();
    double total = run.end.empty() ? 0 : *std::max_element(run.end.begin(), run.end.end());
    // How long a slot is, is known once all have ended: so the same happens again.
    if (load_slots > 0 && total > 0) net.load_slots = load_slots, net.slot_us = total / load_slots, run = once();
  }
  return nb::make_tuple(to_numpy(std::move(run.start)), to_numpy(std::move(run.end)), to_numpy(std::move(run.critical_path)),
                        to_numpy(std::move(run.link_busy)), to_numpy(std::move(run.link_bytes)), run.events,
                        to_numpy(std::move(run.link_load)));
}

}  // namespace

void bind_network(nb::module_& m) {
  m.def("simulate", &simulate, nb::arg("reduce"), nb::arg("bytes"), nb::arg("after_ptr"), nb::arg("after"),
        nb::arg("gate_ptr"), nb::arg("gate"), nb::arg("gate_reads"), nb::arg("connection"), nb::arg("route"),
        nb::arg("route_ptr"), nb::arg("route_links"), nb::arg("alpha_us"), nb::arg("bytes_per_us"),
        nb::arg("flow_cap"), nb::arg("incast"), nb::arg("curve_ptr"), nb::arg("curve_flows"), nb::arg("curve_share"),
        nb::arg("reduce_us_per_byte"), nb::arg("alpha_blocks"), nb::arg("fair"),
        nb::arg("delay_us") = nb::none(), nb::arg("cast") = nb::none(), nb::arg("load_slots") = 0);
  m.def("cast_forks", &cast_forks, nb::arg("cast"), nb::arg("route"), nb::arg("route_ptr"), nb::arg("route_links"));
}
}  // namespace stretto
