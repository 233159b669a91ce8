// SPDX-License-Identifier: Apache-2.0
/* The same collectives in OpenMPI: prints "collective nbytes median_us" as rank 0 sees it. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  const char* names[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"};
  for (int a = 1; a + 1 < argc; a += 2) {
    const size_t bytes = strtoull(argv[a], NULL, 10);
    const int times = atoi(argv[a + 1]);
    const int count = (int)(bytes / sizeof(float)), part = count / world;
    float* in = malloc(bytes);
    float* out = malloc(bytes);
    double* taken = malloc(sizeof(double) * (size_t)times);
    for (int i = 0; i < count; ++i) in[i] = (float)(i % 7 + rank), out[i] = 0;
    for (int kind = 0; kind < 5; ++kind) {
      for (int i = -2; i < times; ++i) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double begin = MPI_Wtime();
        if (kind == 0) MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (kind == 1) MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
        if (kind == 2) MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (kind == 3) MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
        if (kind == 4) MPI_Bcast(out, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
        double mine = (MPI_Wtime() - begin) * 1e6, slowest;
        MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (i >= 0) taken[i] = slowest;
      }
      if (rank == 0) {
        qsort(taken, (size_t)times, sizeof(double), ascending);
        printf("%s %zu %.3f\n", names[kind], bytes, taken[times / 2]);
      }
    }
    free(in), free(out), free(taken);
  }
  MPI_Finalize();
  return 0;
}
