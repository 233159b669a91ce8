// SPDX-License-Identifier: Apache-2.0
// Reductions and scaling over element types, picked once for the machine's instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace stretto::executor {

enum class Type : uint8_t { f16, bf16, f32, f64, i8, i16, i32, i64, u8, boolean };
enum class Op : uint8_t { sum, prod, min, max, band, bor, bxor, avg };
constexpr int kTypes = 10;
constexpr int kOps = 8;

// out[i] = a[i] op b[i]; out may be a or b itself.
using Reduce = void (*)(void* out, const void* a, const void* b, size_t n);
// Copies without pulling the target into the cache: for results that nobody reads soon.
using Copy = void (*)(void* to, const void* from, size_t bytes);
using Scale = void (*)(void* data, size_t n, double factor);

struct Kernels {
  Reduce reduce[kTypes][kOps];  // null where the operation has no meaning for the type
  Scale scale[kTypes];          // null for whole numbers
  Copy stream;
};

const Kernels& kernels();
inline size_t type_bytes(Type t) {
  constexpr size_t sizes[kTypes] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 1};
  return sizes[static_cast<int>(t)];
}
}  // namespace stretto::executor
