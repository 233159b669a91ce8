// Derives the least dependencies that keep the meaning of synchronous steps.
//
// Each (rank, chunk) slot lives through versions. A copy begins a version; so does the first reduction after
// somebody has read. Reductions inside a version commute, so they only wait for what began it.
#include "arrays.h"

namespace stretto {
namespace {

struct Slot {
  std::vector<int32_t> began;    // gates of every reduction of this version
  std::vector<int32_t> writers;  // what a reader waits for
  std::vector<int32_t> readers;
  bool reduced = false;  // writers are reductions (they commute with the next one)
};

struct Edges {
  std::vector<int64_t> ptr{0};
  std::vector<int32_t> list;
  void add(const std::vector<int32_t>& more) { list.insert(list.end(), more.begin(), more.end()); }
  void close_row(std::vector<int32_t>& seen_at, int32_t row) {  // drops repeats
    int64_t out = ptr.back();
    for (int64_t i = ptr.back(); i < (int64_t)list.size(); i++) {
      int32_t t = list[i];
      if (t == row || seen_at[t] == row) continue;
      seen_at[t] = row;
      list[out++] = t;
    }
    list.resize(out);
    ptr.push_back(out);
  }
};

nb::object derive(int64_t num_slots, In<bool> reduce, In<int64_t> chunk_ptr, In<int32_t> src_slot,
                  In<int32_t> dst_slot, In<int64_t> step) {
  int32_t count = (int32_t)reduce.shape(0);
  Edges after, gate;
  {
    nb::gil_scoped_release release;
    std::vector<Slot> slots(num_slots);
    std::vector<int32_t> seen_after(count, -1), seen_gate(count, -1);
    Rows<int32_t> reads{chunk_ptr.data(), src_slot.data()}, writes{chunk_ptr.data(), dst_slot.data()};
    for (int32_t begin = 0, end = 0; begin < count; begin = end) {
      while (end < count && step.data()[end] == step.data()[begin]) end++;
      for (int32_t t = begin; t < end; t++) {
        for (const int32_t* at = reads.begin(t); at != reads.end(t); at++) {
          Slot& s = slots[*at];
          after.add(s.writers);
          s.readers.push_back(t);
        }
        after.close_row(seen_after, t);
      }
      for (int32_t t = begin; t < end; t++) {
        for (const int32_t* at = writes.begin(t); at != writes.end(t); at++) {
          Slot& s = slots[*at];
          if (!reduce.data()[t]) {
            gate.add(s.readers.empty() ? s.writers : s.readers);
            s.began.assign(1, t);
            s.writers.assign(1, t);
            s.reduced = false;
          } else {
            if (!s.readers.empty()) {
              s.began = s.readers;
              s.writers.clear();
            } else if (!s.reduced) {
              s.writers.clear();
            }
            gate.add(s.began);
            s.writers.push_back(t);
            s.reduced = true;
          }
          s.readers.clear();
        }
        gate.close_row(seen_gate, t);
      }
    }
  }
  return nb::make_tuple(to_numpy(std::move(after.ptr)), to_numpy(std::move(after.list)),
                        to_numpy(std::move(gate.ptr)), to_numpy(std::move(gate.list)));
}

}  // namespace

void bind_depend(nb::module_& m) {
  m.def("derive_dependencies", &derive, nb::arg("num_slots"), nb::arg("reduce"), nb::arg("chunk_ptr"),
        nb::arg("src_slot"), nb::arg("dst_slot"), nb::arg("step"));
}
}  // namespace stretto
