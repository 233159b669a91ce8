// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set (kernels_*.cpp); plain loops that the compiler turns into vector code.
// Everything is in an unnamed namespace, so that no function built for one instruction set is linked into another.
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace stretto::executor {
namespace {

inline float half_to_float(uint16_t h) {
  // The exponent is moved by a multiplication, which also makes subnormals normal.
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(rest) * std::bit_cast<float>(0x77800000u);  // 2^112
  const uint32_t bits = (h & 0x7c00u) == 0x7c00u ? (rest | 0x7f800000u) : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(bits | sign);
}

inline uint16_t float_to_half(float value) {
  const uint32_t whole = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (whole >> 16) & 0x8000u;
  const uint32_t bits = whole & 0x7fffffffu;
  // Subnormal halves: adding 0.5 leaves the rounded mantissa in the low bits of the sum.
  const float small = std::bit_cast<float>(bits) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(small) - 0x3f000000u;
  const uint32_t odd = (bits >> 13) & 1u;
  const uint32_t normal = (bits - 0x38000000u + 0xfffu + odd) >> 13;
  uint32_t result = bits < 0x38800000u ? subnormal : normal;
  result = bits >= 0x47800000u ? 0x7c00u : result;
  result = bits > 0x7f800000u ? 0x7e00u : result;
  return static_cast<uint16_t>(result | sign);
}

inline float brain_to_float(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

inline uint16_t float_to_brain(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

template <Op op, class T, class Bits>
inline T combine_float(T a, T b) {
  if constexpr (op == Op::sum) {
    return a + b;
  } else if constexpr (op == Op::prod) {
    return a * b;
  } else {
    // A NaN wins. Of +0 and -0 the larger is +0, whichever comes first: ranks that hold them the other way round agree.
    const Bits x = std::bit_cast<Bits>(a), y = std::bit_cast<Bits>(b);
    const T tie = std::bit_cast<T>(op == Op::max ? static_cast<Bits>(x & y) : static_cast<Bits>(x | y));
    const bool first = op == Op::max ? a > b : a < b;
    const bool second = op == Op::max ? b > a : b < a;
    T result = first ? a : (second ? b : tie);
    result = b != b ? b : result;
    return a != a ? a : result;
  }
}

template <Op op, class T>
inline T combine_whole(T a, T b) {
  using U = std::make_unsigned_t<T>;
  if constexpr (op == Op::sum) return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  if constexpr (op == Op::prod) return static_cast<T>(static_cast<U>(1u * static_cast<U>(a) * static_cast<U>(b)));
  if constexpr (op == Op::min) return a < b ? a : b;
  if constexpr (op == Op::max) return a > b ? a : b;
  if constexpr (op == Op::band) return static_cast<T>(a & b);
  if constexpr (op == Op::bor) return static_cast<T>(a | b);
  if constexpr (op == Op::bxor) return static_cast<T>(a ^ b);
}

template <class T, class F>
inline void each(void* out, const void* a, const void* b, size_t n, F f) {
  T* o = static_cast<T*>(out);
  const T* x = static_cast<const T*>(a);
  const T* y = static_cast<const T*>(b);
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) o[i] = f(x[i], y[i]);
}

template <Op op, class T, class Bits>
void reduce_float(void* out, const void* a, const void* b, size_t n) {
  each<T>(out, a, b, n, [](T x, T y) { return combine_float<op, T, Bits>(x, y); });
}
template <Op op>
void reduce_half(void* out, const void* a, const void* b, size_t n) {
  each<uint16_t>(out, a, b, n, [](uint16_t x, uint16_t y) {
    return float_to_half(combine_float<op, float, uint32_t>(half_to_float(x), half_to_float(y)));
  });
}
template <Op op>
void reduce_brain(void* out, const void* a, const void* b, size_t n) {
  each<uint16_t>(out, a, b, n, [](uint16_t x, uint16_t y) {
    return float_to_brain(combine_float<op, float, uint32_t>(brain_to_float(x), brain_to_float(y)));
  });
}
template <Op op, class T>
void reduce_whole(void* out, const void* a, const void* b, size_t n) {
  each<T>(out, a, b, n, [](T x, T y) { return combine_whole<op, T>(x, y); });
}

template <class T>
void scale_float(void* data, size_t n, double factor) {
  T* x = static_cast<T*>(data);
  const T f = static_cast<T>(factor);
  for (size_t i = 0; i < n; ++i) x[i] *= f;
}
void scale_half(void* data, size_t n, double factor) {
  auto* x = static_cast<uint16_t*>(data);
  const float f = static_cast<float>(factor);
  for (size_t i = 0; i < n; ++i) x[i] = float_to_half(half_to_float(x[i]) * f);
}
void scale_brain(void* data, size_t n, double factor) {
  auto* x = static_cast<uint16_t*>(data);
  const float f = static_cast<float>(factor);
  for (size_t i = 0; i < n; ++i) x[i] = float_to_brain(brain_to_float(x[i]) * f);
}

void stream_copy(void* to, const void* from, size_t bytes) {
#if defined(__AVX2__)
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  const size_t head = (64 - (reinterpret_cast<uintptr_t>(out) & 63)) & 63;
  if (bytes < 1024 + head) {
    memcpy(to, from, bytes);
    return;
  }
  memcpy(out, in, head);
  out += head, in += head, bytes -= head;
  for (; bytes >= 64; out += 64, in += 64, bytes -= 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_loadu_si512(in));
#else
    const auto* source = reinterpret_cast<const __m256i*>(in);
    auto* target = reinterpret_cast<__m256i*>(out);
    const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
#endif
  }
  memcpy(out, in, bytes);
  _mm_sfence();
#else
  memcpy(to, from, bytes);
#endif
}

template <class T>
void fill_whole(Reduce* row) {
  row[0] = reduce_whole<Op::sum, T>;
  row[1] = reduce_whole<Op::prod, T>;
  row[2] = reduce_whole<Op::min, T>;
  row[3] = reduce_whole<Op::max, T>;
  row[4] = reduce_whole<Op::band, T>;
  row[5] = reduce_whole<Op::bor, T>;
  row[6] = reduce_whole<Op::bxor, T>;
}

Kernels make() {
  Kernels k{};
  const auto row = [&](Type t) { return k.reduce[static_cast<int>(t)]; };
  const auto floats = [](Reduce* r, Reduce sum, Reduce prod, Reduce min, Reduce max) {
    r[0] = sum, r[1] = prod, r[2] = min, r[3] = max, r[7] = sum;
  };
  floats(row(Type::f16), reduce_half<Op::sum>, reduce_half<Op::prod>, reduce_half<Op::min>, reduce_half<Op::max>);
  floats(row(Type::bf16), reduce_brain<Op::sum>, reduce_brain<Op::prod>, reduce_brain<Op::min>, reduce_brain<Op::max>);
  floats(row(Type::f32), reduce_float<Op::sum, float, uint32_t>, reduce_float<Op::prod, float, uint32_t>,
         reduce_float<Op::min, float, uint32_t>, reduce_float<Op::max, float, uint32_t>);
  floats(row(Type::f64), reduce_float<Op::sum, double, uint64_t>, reduce_float<Op::prod, double, uint64_t>,
         reduce_float<Op::min, double, uint64_t>, reduce_float<Op::max, double, uint64_t>);
  fill_whole<int8_t>(row(Type::i8));
  fill_whole<int16_t>(row(Type::i16));
  fill_whole<int32_t>(row(Type::i32));
  fill_whole<int64_t>(row(Type::i64));
  fill_whole<uint8_t>(row(Type::u8));
  // Truth values are bytes 0 and 1: adding is "or", multiplying is "and".
  Reduce* truth = row(Type::boolean);
  truth[0] = truth[3] = truth[5] = reduce_whole<Op::bor, uint8_t>;
  truth[1] = truth[2] = truth[4] = reduce_whole<Op::band, uint8_t>;
  truth[6] = reduce_whole<Op::bxor, uint8_t>;
  k.stream = stream_copy;
  k.scale[static_cast<int>(Type::f16)] = scale_half;
  k.scale[static_cast<int>(Type::bf16)] = scale_brain;
  k.scale[static_cast<int>(Type::f32)] = scale_float<float>;
  k.scale[static_cast<int>(Type::f64)] = scale_float<double>;
  return k;
}
}  // namespace
