/* The product of a few rows and a matrix of weights, as in decoding.

   A BLAS library first copies the weights into an order of its own, which pays for many rows only.
   Here they are read once, as they lie, and a block of them serves all rows before the next. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 16 /* floats of a vector register */
#define ROWS 6   /* of a tile: its sums, ROWS * OUTPUTS, stay in registers */
#elif defined(__AVX2__)
#define WIDTH 8
#define ROWS 2
#else
#define WIDTH 4
#define ROWS 4
#endif
#define OUTPUTS 4
#define MOST_ROWS 64 /* with more, a BLAS library is as fast */

typedef float vector_t __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef float four_t __attribute__((vector_size(16), aligned(4)));

/* Returns four sums, each of those elements of x that lie 4, 8, ... apart. */
static inline four_t fold(vector_t x) {
    four_t parts[WIDTH / 4];
    memcpy(parts, &x, sizeof(parts));
    for (int n = WIDTH / 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) parts[i] += parts[i + n];
    return parts[0];
}

/* y = x w^T + beta y for `rows` rows and OUTPUTS outputs; fetches `num_next` rows from `next` on. */
static inline __attribute__((always_inline)) void
tile(const int rows, int64_t inputs, const float *x, const float *w, float *y, int64_t outputs,
     const float beta, const float *next, const int64_t num_next) {
    vector_t sums[ROWS][OUTPUTS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < OUTPUTS; j++) sums[i][j] = (vector_t){0};
    for (int64_t c = 0; c < inputs; c += WIDTH) {
        vector_t weights[OUTPUTS];
        for (int j = 0; j < OUTPUTS; j++)
            weights[j] = *(const vector_t *)(w + j * inputs + c);
        for (int64_t j = 0; j < num_next; j++) __builtin_prefetch(next + j * inputs + c);
        for (int i = 0; i < rows; i++) {
            const vector_t values = *(const vector_t *)(x + i * inputs + c);
            for (int j = 0; j < OUTPUTS; j++) sums[i][j] += values * weights[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < OUTPUTS; j++) {
            const four_t s = fold(sums[i][j]);
            float *out = y + i * outputs + j;
            *out = (s[0] + s[1]) + (s[2] + s[3]) + (beta != 0.0f ? beta * *out : 0.0f);
        }
}

/* Whether few_rows takes a product of this size, of whose outputs it computes `part`. */
static inline int takes_few_rows(int64_t rows, int64_t part, int64_t inputs) {
    return rows <= MOST_ROWS && part % OUTPUTS == 0 && inputs % WIDTH == 0;
}

/* y = x w^T + beta y for the outputs from `first` up to `last`. x [rows, inputs], w [outputs, inputs],
   y [rows, outputs]. */
static void few_rows(int64_t rows, int64_t outputs, int64_t inputs, const float *x, const float *w,
                     float *y, float beta, int64_t first, int64_t last) {
    const int64_t tiles = (rows + ROWS - 1) / ROWS, share = (OUTPUTS + tiles - 1) / tiles;
    for (int64_t o = first; o < last; o += OUTPUTS)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = rows * t / tiles, fetched = t * share;
            const int64_t left = fetched < OUTPUTS ? OUTPUTS - fetched : 0;
            const int64_t num_next = o + OUTPUTS >= last ? 0 : left < share ? left : share;
            const float *tile_x = x + r * inputs, *tile_w = w + o * inputs;
            const float *next = tile_w + (OUTPUTS + fetched) * inputs;
            float *tile_y = y + r * outputs + o;
#define CASE(n)                                                                                    \
    case n: tile(n, inputs, tile_x, tile_w, tile_y, outputs, beta, next, num_next); break
            switch (rows * (t + 1) / tiles - r) {
                CASE(1);
                CASE(2);
#if ROWS > 2
                CASE(3);
                CASE(4);
#endif
#if ROWS > 4
                CASE(5);
                CASE(6);
#endif
            }
#undef CASE
        }
}
