// SPDX-License-Identifier: Apache-2.0
#include "kernels.inl"

const Kernels& kernels_avx2() {
  static const Kernels k = make();
  return k;
}
}  // namespace stretto::executor
