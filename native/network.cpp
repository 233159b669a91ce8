// The network simulator's entry from Python.
#include "network.h"

#include <nanobind/stl/string.h>

namespace stretto {
namespace {

nb::object simulate(In<bool> reduce, In<double> bytes, In<int64_t> after_ptr, In<int32_t> after,
                    In<int64_t> gate_ptr, In<int32_t> gate, In<bool> gate_reads, In<int32_t> connection, In<int32_t> route,
                    In<int64_t> route_ptr, In<int32_t> route_links, In<double> alpha_us, In<double> bytes_per_us,
                    In<double> flow_cap, In<int32_t> incast, In<int64_t> curve_ptr, In<int32_t> curve_flows,
                    In<double> curve_share, double reduce_us_per_byte, bool alpha_blocks, bool fair) {
  Transfers t{(int32_t)bytes.shape(0), route.data(), connection.data(), reduce.data(), bytes.data(),
              {after_ptr.data(), after.data()}, {gate_ptr.data(), gate.data()}, gate_reads.data(), reduce_us_per_byte};
  Network net{{route_ptr.data(), route_links.data()}, alpha_us.data(), bytes_per_us.data(), flow_cap.data(),
              incast.data(), {curve_ptr.data(), curve_flows.data()}, curve_share.data(), alpha_blocks};
  Run run;
  {
    nb::gil_scoped_release release;
    run = fair ? simulate_fair(t, net, (int64_t)alpha_us.shape(0)) : simulate_fifo(t, net, (int64_t)alpha_us.shape(0));
  }
  return nb::make_tuple(to_numpy(std::move(run.start)), to_numpy(std::move(run.end)), to_numpy(std::move(run.critical_path)),
                        to_numpy(std::move(run.link_busy)), to_numpy(std::move(run.link_bytes)), run.events);
}

}  // namespace

void bind_network(nb::module_& m) {
  m.def("simulate", &simulate, nb::arg("reduce"), nb::arg("bytes"), nb::arg("after_ptr"), nb::arg("after"),
        nb::arg("gate_ptr"), nb::arg("gate"), nb::arg("gate_reads"), nb::arg("connection"), nb::arg("route"),
        nb::arg("route_ptr"), nb::arg("route_links"), nb::arg("alpha_us"), nb::arg("bytes_per_us"),
        nb::arg("flow_cap"), nb::arg("incast"), nb::arg("curve_ptr"), nb::arg("curve_flows"), nb::arg("curve_share"),
        nb::arg("reduce_us_per_byte"), nb::arg("alpha_blocks"), nb::arg("fair"));
}
}  // namespace stretto
