// SPDX-License-Identifier: Apache-2.0
#if defined(STRETTO_X86_KERNELS)
#include <cpuid.h>
#endif

#include "kernels.inl"

const Kernels& kernels_base() {
  static const Kernels k = make();
  return k;
}

#if defined(STRETTO_X86_KERNELS)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

// Asked of the processor itself: `__builtin_cpu_supports` needs a variable of libgcc that zig's runtime does not have.
static const Kernels& kernels_of_processor() {
  constexpr unsigned kXsave = 1u << 27, kAvx2 = 1u << 5, kBmi2 = 1u << 8;
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kXsave)) return kernels_base();
  unsigned saved = 0, upper = 0;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return kernels_base();
  // The system must save the registers, too: of SSE and AVX, and for AVX-512 its masks and both halves of the rest.
  if ((saved & 0xe6) == 0xe6 && (b & kAvx512) == kAvx512) return kernels_avx512();
  if ((saved & 0x6) == 0x6 && (b & kAvx2) && (b & kBmi2)) return kernels_avx2();
  return kernels_base();
}
#endif

const Kernels& kernels() {
#if defined(STRETTO_X86_KERNELS)
  static const Kernels& chosen = kernels_of_processor();
  return chosen;
#else
  return kernels_base();
#endif
}
}  // namespace stretto::executor
