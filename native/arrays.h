// SPDX-License-Identifier: Apache-2.0
// NumPy arrays in and out of C++.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace stretto {
namespace nb = nanobind;

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Hands a vector's memory to NumPy without a copy.
template <class T>
nb::object to_numpy(std::vector<T>&& values) {
  auto* owner = new std::vector<T>(std::move(values));
  nb::capsule deleter(owner, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owner->data(), {owner->size()}, deleter));
}

// Rows of variable length, as in scipy's CSR.
template <class T>
struct Rows {
  const int64_t* ptr;
  const T* values;
  const T* begin(int64_t row) const { return values + ptr[row]; }
  const T* end(int64_t row) const { return values + ptr[row + 1]; }
  int64_t size(int64_t row) const { return ptr[row + 1] - ptr[row]; }
};

void bind_depend(nb::module_& m);
void bind_router(nb::module_& m);
void bind_check(nb::module_& m);
void bind_network(nb::module_& m);
void bind_maxflow(nb::module_& m);
void bind_forest(nb::module_& m);
void bind_flow(nb::module_& m);
void bind_greedy(nb::module_& m);
void bind_tree_pairs(nb::module_& m);
void bind_schedule(nb::module_& m);
void bind_search(nb::module_& m);
void bind_dimensions(nb::module_& m);
}  // namespace stretto
