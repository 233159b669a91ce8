// SPDX-License-Identifier: Apache-2.0
// The Python face of the executor; see src/stretto/runtime/executor/executor.py for what it means.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "../arrays.h"
#include "carrier.h"
#include "engine.h"

namespace nb = nanobind;
using namespace stretto::executor;
using stretto::In;

namespace {

template <class T>
std::vector<T> list(const nb::dict& d, const char* key) {
  return nb::cast<std::vector<T>>(d[key]);
}

template <class T>
In<T> array(const nb::dict& d, const char* key) {
  return nb::cast<In<T>>(d[key]);
}

std::shared_ptr<Loaded> load(const nb::dict& d) {
  auto p = std::make_shared<Loaded>();
  p->comm = nb::cast<int>(d["comm"]);
  p->ranks = list<int>(d, "ranks");
  p->signature = nb::cast<uint64_t>(d["signature"]);
  p->first = nb::cast<uint64_t>(d["first"]);
  p->kind = nb::cast<uint32_t>(d["kind"]);
  p->name = nb::cast<std::string>(d["name"]);
  p->chunks_per_shard = nb::cast<int>(d["chunks_per_shard"]);
  p->num_chunks = nb::cast<int>(d["num_chunks"]);
  p->scratch = nb::cast<int>(d["scratch"]);
  p->max_count = nb::cast<int>(d["max_count"]);
  p->message_bytes = nb::cast<size_t>(d["message_bytes"]);
  p->in_place = nb::cast<bool>(d["in_place"]);
  p->combining = nb::cast<bool>(d["combining"]);
  p->place = nb::cast<int64_t>(d["place"]);
  p->parts = nb::cast<int>(d["parts"]);
  p->by_call = nb::cast<bool>(d["by_call"]);
  p->in_chunk = list<int32_t>(d, "in_chunk");
  p->out_chunk = list<int32_t>(d, "out_chunk");
  p->shard_share = list<double>(d, "shard_share");
  // Rows of numbers, one kind of thing per table.
  const auto blocks = array<int32_t>(d, "blocks");          // out, in, first, last
  const auto code = array<int32_t>(d, "code");              // code, complete, dep_block, dep_step, cast, first, last
  const auto pieces = array<int32_t>(d, "pieces");          // src_buf, src_at, dst_buf, dst_at, chunk
  const auto connections = array<int32_t>(d, "connections");  // sends?, peer, channel, ring, messages
  const auto casts = array<int32_t>(d, "casts");            // cast, out, order
  for (size_t i = 0; i + 4 <= blocks.size(); i += 4) {
    const int32_t* v = blocks.data() + i;
    p->block.push_back({v[0], v[1], v[2], v[3]});
  }
  for (size_t i = 0; i + 7 <= code.size(); i += 7) {
    const int32_t* v = code.data() + i;
    p->code.push_back({static_cast<Code>(v[0]), v[1] != 0, v[2], v[3], v[4], v[5], v[6]});
  }
  for (size_t i = 0; i + 5 <= pieces.size(); i += 5) {
    const int32_t* v = pieces.data() + i;
    p->piece.push_back({static_cast<int8_t>(v[0]), static_cast<int8_t>(v[2]), v[1], v[3], v[4]});
  }
  for (size_t i = 0; i + 5 <= connections.size(); i += 5) {
    const int32_t* v = connections.data() + i;
    (v[0] ? p->out : p->in).push_back({v[1], v[2], v[3], v[4]});
    p->uses_network |= v[2] >= 0;
  }
  for (size_t i = 0; i + 3 <= casts.size(); i += 3) {
    const int32_t* v = casts.data() + i;
    if (p->cast.size() <= static_cast<size_t>(v[0])) p->cast.resize(static_cast<size_t>(v[0]) + 1);
    p->cast[static_cast<size_t>(v[0])].push_back({v[1], v[2]});
  }
  return p;
}

nb::tuple trace(const Work& w) {
  std::vector<int32_t> block, step;
  std::vector<int64_t> slice, begin, end;
  for (const TraceRecord& t : w.trace) {
    block.push_back(t.block);
    step.push_back(t.step);
    slice.push_back(t.slice);
    begin.push_back(t.begin_ns);
    end.push_back(t.end_ns);
  }
  return nb::make_tuple(stretto::to_numpy(std::move(block)), stretto::to_numpy(std::move(step)),
                        stretto::to_numpy(std::move(slice)), stretto::to_numpy(std::move(begin)),
                        stretto::to_numpy(std::move(end)));
}

using Pairs = std::vector<std::pair<int64_t, int64_t>>;

std::vector<Extent> extents(const Pairs& pairs) {
  std::vector<Extent> result;
  for (const auto& [address, bytes] : pairs) result.push_back({reinterpret_cast<char*>(address), bytes});
  return result;
}

std::vector<std::string> strings(const nb::list& all) {
  std::vector<std::string> result;
  for (nb::handle h : all) {
    const auto b = nb::cast<nb::bytes>(h);
    result.emplace_back(b.c_str(), b.size());
  }
  return result;
}
}  // namespace

NB_MODULE(_executor, m) {
  // Scripts keep groups and enforcers in globals until the interpreter ends: that is no leak to report.
  nb::set_leak_warnings(false);
  m.def("prepare_segment", [](int fd, size_t bytes) { Segment(fd, true, bytes); });
  m.attr("header_bytes") = sizeof(SegmentHeader);
  m.attr("max_communicators") = kMaxComms;
  m.attr("max_local") = kMaxLocal;

  nb::class_<Loaded>(m, "Loaded")
      .def_ro("name", &Loaded::name)
      .def_ro("parts", &Loaded::parts)
      .def("place_elements", [](Loaded& p, int64_t total) { return p.ends(total).place; })
      .def("buffer_elements", [](Loaded& p, int64_t total) {
        const Ends& e = p.ends(total);
        return std::make_pair(e.inputs, e.outputs);
      });
  m.def("load", &load);

  nb::class_<Work>(m, "Work")
      .def_prop_ro("done", [](const Work& w) { return w.done.load(std::memory_order_acquire); })
      .def_prop_ro("failure", [](const Work& w) { return static_cast<int>(w.failure); })
      .def_ro("lost_rank", &Work::lost_rank)
      .def_ro("why", &Work::why)
      .def_ro("number", &Work::number)
      .def_ro("id", &Work::id)
      .def_prop_ro("elapsed_us", [](const Work& w) { return static_cast<double>(w.ended_ns - w.started_ns) / 1e3; })
      .def("trace", &trace);

  nb::class_<Engine>(m, "Engine")
      .def("__init__",
           [](Engine* self, const nb::dict& d) {
             Settings s;
             s.rank = nb::cast<int>(d["rank"]);
             s.world = nb::cast<int>(d["world"]);
             s.job = nb::cast<uint64_t>(d["job"]);
             s.local = list<int>(d, "local");
             s.segments = list<int>(d, "segments");
             s.bells = list<int>(d, "bells");
             s.control = list<int>(d, "control");
             s.timeout_s = nb::cast<double>(d["timeout_s"]);
             new (self) Engine(std::move(s));
           })
      .def("add_channel", &Engine::add_channel)
      .def("addresses",
           [](const Engine& e) {
             nb::list all;
             for (const std::string& a : e.addresses()) all.append(nb::bytes(a.data(), a.size()));
             return all;
           })
      .def("connect", [](Engine& e, int peer, const nb::list& addresses) { e.connect(peer, strings(addresses)); })
      .def("run", &Engine::run)
      .def("start",
           [](Engine& e, const std::shared_ptr<Loaded>& p, uintptr_t input, uintptr_t output, int64_t total, int type, int op,
              double timeout_s, bool traced, bool blocking, bool notify) {
             return e.start(p, reinterpret_cast<char*>(input), reinterpret_cast<char*>(output), total,
                            static_cast<Type>(type), static_cast<Op>(op), timeout_s, traced, blocking, notify);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("start_pieces",
           [](Engine& e, const std::shared_ptr<Loaded>& p, const Pairs& gives, const Pairs& takes, double timeout_s, bool traced,
              bool blocking, bool notify) {
             return e.start_pieces(p, extents(gives), extents(takes), timeout_s, traced, blocking, notify);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("wait", [](Engine& e, const std::shared_ptr<Work>& w, double seconds) { return e.wait(*w, seconds); },
           nb::call_guard<nb::gil_scoped_release>())
      .def("wait_any", &Engine::wait_any, nb::call_guard<nb::gil_scoped_release>())
      .def("repeat",
           [](Engine& e, const std::shared_ptr<Loaded>& p, uintptr_t input, uintptr_t output, int64_t total, int type, int op,
              int times, const std::shared_ptr<Loaded>& fence) {
             return e.repeat(p, reinterpret_cast<char*>(input), reinterpret_cast<char*>(output), total,
                             static_cast<Type>(type), static_cast<Op>(op), times, fence);
           },
           nb::arg("loaded"), nb::arg("input"), nb::arg("output"), nb::arg("total"), nb::arg("type"), nb::arg("op"),
           nb::arg("times"), nb::arg("fence").none(), nb::call_guard<nb::gil_scoped_release>())
      .def("retired", &Engine::retired, nb::call_guard<nb::gil_scoped_release>())
      .def("renumber", &Engine::renumber, nb::call_guard<nb::gil_scoped_release>())
      .def("counters", &Engine::counters, nb::call_guard<nb::gil_scoped_release>())
      .def("count_delegated", &Engine::count_delegated)
      .def("ask_delegated", &Engine::ask_delegated, nb::call_guard<nb::gil_scoped_release>())
      .def("find_culprit", &Engine::find_culprit, nb::call_guard<nb::gil_scoped_release>())
      .def("blame", &Engine::blame, nb::call_guard<nb::gil_scoped_release>())
      .def("abandon",
           [](Engine& e) {
             nb::set_leak_warnings(false);
             e.abandon();
           })
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Carrier>(m, "Carrier")
      .def(
          "__init__",
          [](Carrier* self, Engine* engine, uintptr_t released, uintptr_t copied, uintptr_t board, int me, int size) {
            new (self) Carrier(engine, {reinterpret_cast<uint32_t*>(released), reinterpret_cast<const uint32_t*>(copied),
                                        reinterpret_cast<int64_t*>(board), me, size});
          },
          nb::arg("engine").none(), nb::arg("released"), nb::arg("copied"), nb::arg("board"), nb::arg("me"), nb::arg("size"),
          nb::keep_alive<1, 2>())
      .def(
          "post",
          [](Carrier& c, uint32_t mark, const std::shared_ptr<Loaded>& p, uintptr_t input, uintptr_t output, int64_t total,
             int type, int op, double timeout_s) {
            Slice s;
            s.mark = mark;
            s.program = p;
            s.input = reinterpret_cast<char*>(input);
            s.output = reinterpret_cast<char*>(output);
            s.total = total;
            s.type = static_cast<Type>(type);
            s.op = static_cast<Op>(op);
            s.timeout_s = timeout_s;
            return c.post(std::move(s));
          },
          nb::arg("mark"), nb::arg("loaded").none(), nb::arg("input"), nb::arg("output"), nb::arg("total"), nb::arg("type"),
          nb::arg("op"), nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
      .def("wait_for_room", &Carrier::wait_for_room, nb::call_guard<nb::gil_scoped_release>())
      .def("wait_failure", &Carrier::wait_failure, nb::call_guard<nb::gil_scoped_release>())
      .def("abort", &Carrier::abort, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Carrier::close, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "state",
          [](Carrier& c) {
            const CarrierState s = c.state();
            return std::map<std::string, int64_t>{{"posted", s.posted},   {"waiting", s.waiting}, {"copied", s.copied},
                                                  {"running", s.running}, {"through", s.through}, {"lowest", s.lowest},
                                                  {"released", s.released}};
          },
          nb::call_guard<nb::gil_scoped_release>());
}
