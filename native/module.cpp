// SPDX-License-Identifier: Apache-2.0
// The native module stretto._native.
#include "arrays.h"

namespace stretto {
void bind_steiner(nb::module_& m);
void bind_timetable(nb::module_& m);
void bind_soft_timetable(nb::module_& m);
void bind_gpu_streams(nb::module_& m);
}

NB_MODULE(_native, m) {
  // Clusters keep their routers, and caches keep clusters, until the interpreter ends: that is no leak to report.
  nanobind::set_leak_warnings(false);
  stretto::bind_depend(m);
  stretto::bind_router(m);
  stretto::bind_check(m);
  stretto::bind_network(m);
  stretto::bind_maxflow(m);
  stretto::bind_forest(m);
  stretto::bind_flow(m);
  stretto::bind_greedy(m);
  stretto::bind_steiner(m);
  stretto::bind_tree_pairs(m);
  stretto::bind_timetable(m);
  stretto::bind_soft_timetable(m);
  stretto::bind_schedule(m);
  stretto::bind_search(m);
  stretto::bind_dimensions(m);
  stretto::bind_gpu_streams(m);
}
