/* The matrix product of a BLAS library, as Fortran has it. */

#ifndef SGEMM_H
#define SGEMM_H

#include <stdint.h>

typedef void sgemm_t(const char *, const char *, const int *, const int *, const int *,
                     const float *, const float *, const int *, const float *, const int *,
                     const float *, float *, const int *);

/* Row-major c [m, n] = alpha a b + beta c, where a is [m, k], or [k, m] if turned, b likewise. */
static inline void multiply(sgemm_t *sgemm, int64_t m, int64_t n, int64_t k, float alpha,
                            const float *a, int64_t a_stride, int a_turned, const float *b,
                            int64_t b_stride, int b_turned, float beta, float *c,
                            int64_t c_stride) {
    const int rows = (int)n, columns = (int)m, inner = (int)k;
    const int lda = (int)b_stride, ldb = (int)a_stride, ldc = (int)c_stride;
    sgemm(b_turned ? "T" : "N", a_turned ? "T" : "N", &rows, &columns, &inner, &alpha, b, &lda, a,
          &ldb, &beta, c, &ldc);
}

#endif
