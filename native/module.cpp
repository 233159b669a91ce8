// The native module stretto._native.
#include "arrays.h"

NB_MODULE(_native, m) {
  stretto::bind_depend(m);
  stretto::bind_router(m);
  stretto::bind_check(m);
  stretto::bind_network(m);
  stretto::bind_maxflow(m);
}
