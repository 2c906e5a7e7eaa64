/* OpenBLAS with 64-bit integers, called as a library with 32-bit integers is. */

#include <stdint.h>

typedef void wide_sgemm_t(const char *, const char *, const int64_t *, const int64_t *,
                          const int64_t *, const float *, const float *, const int64_t *,
                          const float *, const int64_t *, const float *, float *, const int64_t *);

static wide_sgemm_t *wide;

void take(wide_sgemm_t *sgemm) { wide = sgemm; }

void sgemm(const char *a_form, const char *b_form, const int *m, const int *n, const int *k,
           const float *alpha, const float *a, const int *lda, const float *b, const int *ldb,
           const float *beta, float *c, const int *ldc) {
    const int64_t sizes[] = {*m, *n, *k}, strides[] = {*lda, *ldb, *ldc};
    wide(a_form, b_form, sizes, sizes + 1, sizes + 2, alpha, a, strides, b, strides + 1, beta, c,
         strides + 2);
}
