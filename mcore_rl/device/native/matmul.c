/* Products of large matrices, cut by rows for the threads, each of which calls a BLAS library. */

#include "parallel.h"
#include "sgemm.h"

/* Row-major c [m, n] = a b, where a is [m, k], or [k, m] if turned, b likewise. */
void matmul(sgemm_t *sgemm, int64_t threads, int64_t m, int64_t n, int64_t k, const float *a,
            int64_t a_turned, const float *b, int64_t b_turned, float *c) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < threads; part++) {
        const int64_t first = m * part / threads, rows = m * (part + 1) / threads - first;
        if (rows)
            multiply(sgemm, rows, n, k, 1.0f, a + first * (a_turned ? 1 : k), a_turned ? m : k,
                     (int)a_turned, b, b_turned ? k : n, (int)b_turned, 0.0f, c + first * n, n);
    }
}
