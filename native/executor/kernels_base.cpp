// SPDX-License-Identifier: Apache-2.0
#include "kernels.inl"

const Kernels& kernels_base() {
  static const Kernels k = make();
  return k;
}

#if defined(STRETTO_X86_KERNELS)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

const Kernels& kernels() {
#if defined(STRETTO_X86_KERNELS)
  static const Kernels& chosen = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd")
                                     ? kernels_avx512()
                                 : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") ? kernels_avx2()
                                                                                                  : kernels_base();
  return chosen;
#else
  return kernels_base();
#endif
}
}  // namespace stretto::executor
