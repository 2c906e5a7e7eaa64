/* The product of rows and a matrix of weights, float32, row-major; weights are [outputs, inputs].

   Few rows are multiplied here, many by a BLAS library. */

#include <stdint.h>

#include "few_rows.h"
#include "sgemm.h"

/* The outputs from `first` up to `last` of y = x w^T + beta y, on one thread. `packed` may hold the rows
   of x from a call before. */
static void part_of_product(sgemm_t *sgemm, int64_t rows, int64_t outputs, int64_t inputs,
                            const float *x, const float *w, float *y, float beta, int64_t first,
                            int64_t last, packed_t *packed) {
    if (last <= first || rows == 0) return;
    if (takes_few_rows(rows, last - first))
        few_rows(rows, outputs, inputs, x, w, y, beta, first, last, packed);
    else
        multiply(sgemm, rows, last - first, inputs, 1.0f, x, inputs, 0, w + first * inputs, inputs,
                 1, beta, y + first, outputs);
}

/* y = x w^T + beta y; each thread computes some of the outputs, whole cache lines of a row. */
static void product(sgemm_t *sgemm, int threads, int64_t rows, int64_t outputs, int64_t inputs,
                    const float *x, const float *w, float *y, float beta) {
    const int64_t lines = (outputs + LINE - 1) / LINE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const int64_t first = lines * part / threads * LINE;
        const int64_t next = lines * (part + 1) / threads * LINE;
        packed_t packed;
        packed.x = 0;
        part_of_product(sgemm, rows, outputs, inputs, x, w, y, beta, first,
                        next < outputs ? next : outputs, &packed);
    }
}
