// SPDX-License-Identifier: Apache-2.0
// Derives the least dependencies that keep the meaning of synchronous steps.
//
// Each (rank, chunk) slot lives through versions. A copy begins a version; so does the first reduction after
// somebody has read. Reductions inside a version commute, so they only wait for what began it.
#include <algorithm>

#include "arrays.h"
#include "lists.h"

namespace stretto {
namespace {

struct Slot {
  int32_t began = -1;    // list: gates of every reduction of this version (readers or writers)
  int32_t writers = -1;  // list: what a reader waits for
  int32_t readers = -1;  // list
  bool began_read = false;
  bool reduced = false;  // writers are reductions (they commute with the next one)
};

struct Edges {
  std::vector<int64_t> ptr{0};
  std::vector<int32_t> list;
  void close_row() {
    std::sort(list.begin() + ptr.back(), list.end());
    list.erase(std::unique(list.begin() + ptr.back(), list.end()), list.end());
    ptr.push_back((int64_t)list.size());
  }
};

nb::object derive(int64_t num_slots, In<bool> reduce, In<int64_t> chunk_ptr, In<int32_t> src_slot,
                  In<int32_t> dst_slot, In<int64_t> step) {
  int32_t count = (int32_t)reduce.shape(0);
  Edges after, gate;  // while they are collected, a gate is written 2 * transfer + (it reads there)
  std::vector<uint8_t> gate_reads;
  {
    nb::gil_scoped_release release;
    std::vector<Slot> slots(num_slots);
    Lists lists;
    Rows<int32_t> reads{chunk_ptr.data(), src_slot.data()}, writes{chunk_ptr.data(), dst_slot.data()};
    for (int32_t begin = 0, end = 0; begin < count; begin = end) {
      while (end < count && step.data()[end] == step.data()[begin]) end++;
      for (int32_t t = begin; t < end; t++) {
        for (const int32_t* at = reads.begin(t); at != reads.end(t); at++) {
          Slot& s = slots[*at];
          lists.each(s.writers, [&](int32_t w) { after.list.push_back(w); });
          lists.push(s.readers, t);
        }
        after.close_row();
      }
      for (int32_t t = begin; t < end; t++) {
        for (const int32_t* at = writes.begin(t); at != writes.end(t); at++) {
          Slot& s = slots[*at];
          auto gates = [&](int32_t list, bool read) {
            lists.each(list, [&](int32_t x) { gate.list.push_back(2 * x + read); });
          };
          if (!reduce.data()[t]) {
            s.readers >= 0 ? gates(s.readers, true) : gates(s.writers, false);
            lists.clear(s.began), lists.clear(s.writers), lists.clear(s.readers);
            s.reduced = false;
          } else {
            if (s.readers >= 0) {
              lists.clear(s.began), lists.clear(s.writers);
              s.began = s.readers, s.readers = -1, s.began_read = true;
            } else if (!s.reduced) {
              s.began = s.writers, s.writers = -1, s.began_read = false;
            }
            gates(s.began, s.began_read);
            s.reduced = true;
          }
          lists.push(s.writers, t);
        }
        gate.close_row();
      }
    }
    gate_reads.reserve(gate.list.size());
    for (int32_t& x : gate.list) gate_reads.push_back(x & 1), x >>= 1;
  }
  return nb::make_tuple(to_numpy(std::move(after.ptr)), to_numpy(std::move(after.list)),
                        to_numpy(std::move(gate.ptr)), to_numpy(std::move(gate.list)), to_numpy(std::move(gate_reads)));
}

}  // namespace

void bind_depend(nb::module_& m) {
  m.def("derive_dependencies", &derive, nb::arg("num_slots"), nb::arg("reduce"), nb::arg("chunk_ptr"),
        nb::arg("src_slot"), nb::arg("dst_slot"), nb::arg("step"));
}
}  // namespace stretto
