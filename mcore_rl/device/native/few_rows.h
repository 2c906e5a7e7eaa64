/* The product of a few rows and a matrix of weights, as in decoding.

   A BLAS library first copies the weights into an order of its own, which pays for many rows only.
   Here they are read as they lie, and the rows are put into an order of ours: element k of all rows
   side by side. A register holds it for several rows, and meets each output's weight of k.

   Each output is summed over k in one order, however many rows and threads there are. */

#include <stdint.h>

#if defined(__AVX512F__)
#define WIDE 16 /* floats of a vector register */
#define NARROW 8
#define SUMS 24 /* registers that hold sums */
#elif defined(__AVX2__)
#define WIDE 8
#define NARROW 4
#define SUMS 12
#else
#define WIDE 4
#define NARROW 4
#define SUMS 12
#endif
#define GROUP 4 /* outputs; every product has some groups of them */
#define OUTPUTS(vectors) ((vectors) == 1 ? 8 : SUMS / (vectors) / GROUP * GROUP)
#define MOST_VECTORS 3
#define MOST_ROWS 64 /* with more, a BLAS library is as fast */
#define MOST_INPUTS 1024 /* at a time */
#define LINE 16 /* floats of a cache line */

/* sums[outputs][vectors * LANES] = w x for x [inputs][vectors * LANES]; fetches as many outputs' weights
   from `next` on, if that is not NULL. */
#define DEFINE_TILE(name, vector_t, LANES)                                                         \
    typedef float vector_t __attribute__((vector_size(4 * LANES), aligned(4)));                    \
    static inline __attribute__((always_inline)) void name(                                        \
        const int vectors, const int outputs, int64_t inputs, const float *x, const float *w,      \
        int64_t stride, const float *next, float *sums) {                                          \
        vector_t s[SUMS];                                                                          \
        for (int i = 0; i < outputs * vectors; i++) s[i] = (vector_t){0};                          \
        for (int64_t k = 0; k < inputs; k++) {                                                     \
            if (next && k % LINE == 0)                                                             \
                for (int j = 0; j < outputs; j++) __builtin_prefetch(next + j * stride + k, 0, 2); \
            const vector_t *values = (const vector_t *)(x + k * vectors * LANES);                  \
            for (int j = 0; j < outputs; j++)                                                      \
                for (int i = 0; i < vectors; i++)                                                  \
                    s[j * vectors + i] += values[i] * w[j * stride + k];                           \
        }                                                                                          \
        for (int i = 0; i < outputs * vectors; i++) ((vector_t *)sums)[i] = s[i];                  \
    }

DEFINE_TILE(wide_tile, wide_t, WIDE)
DEFINE_TILE(narrow_tile, narrow_t, NARROW)

/* Whether few_rows takes a product of this size, of whose outputs it computes `part`. */
static inline int takes_few_rows(int64_t rows, int64_t part) {
    return rows <= MOST_ROWS && part % GROUP == 0;
}

/* Rows are computed in chunks of as many as have room in registers. */
typedef struct {
    int64_t rows, chunks, chunk_rows;
    int64_t lanes, vectors, width; /* of a register, of a chunk, and their product */
} chunks_t;

static chunks_t chunks_of(int64_t rows) {
    chunks_t c = {.rows = rows};
    c.chunks = (rows + MOST_VECTORS * WIDE - 1) / (MOST_VECTORS * WIDE);
    c.chunk_rows = (rows + c.chunks - 1) / c.chunks;
    /* Narrow registers where they leave fewer lanes empty. */
    const int64_t n = c.chunk_rows;
    c.lanes = n <= NARROW || (n > WIDE && n <= MOST_VECTORS * NARROW) ? NARROW : WIDE;
    c.vectors = (n + c.lanes - 1) / c.lanes;
    c.width = c.vectors * c.lanes;
    return c;
}

/* Returns how many rows chunk number `i` has. */
static int64_t rows_of(const chunks_t *c, int64_t i) {
    const int64_t left = c->rows - i * c->chunk_rows;
    return left < 0 ? 0 : left < c->chunk_rows ? left : c->chunk_rows;
}

/* Rows in the order of ours, for the products that follow with the same rows. */
typedef struct {
    const float *x; /* where these rows came from; NULL at first */
    int64_t rows, inputs;
    float values[2 * MOST_ROWS * MOST_INPUTS] __attribute__((aligned(64)));
} packed_t;

/* packed[chunks][inputs][width]; what is no row is 0. A cache line of each row is read at a time: rows
   often lie a power of two apart, where a cache holds elements of few of them at once. */
static void pack(const chunks_t *c, int64_t inputs, const float *x, int64_t stride, float *packed) {
    const int64_t width = c->width;
    for (int64_t i = 0; i < c->chunks; i++, x += c->chunk_rows * stride, packed += inputs * width) {
        const int64_t rows = rows_of(c, i);
        for (int64_t k = 0; k < inputs; k += LINE) {
            const int64_t left = inputs - k < LINE ? inputs - k : LINE;
            float *to = packed + k * width;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t j = 0; j < left; j++) to[j * width + r] = x[r * stride + k + j];
            for (int64_t r = rows; r < width; r++)
                for (int64_t j = 0; j < left; j++) to[j * width + r] = 0.0f;
        }
    }
}

/* y [rows, stride] = sums [outputs, width] transposed + beta y */
static inline void unpack(int64_t rows, int outputs, const float *sums, int64_t width, float beta,
                          float *y, int64_t stride) {
    for (int64_t r = 0; r < rows; r++, y += stride)
        for (int j = 0; j < outputs; j++)
            y[j] = sums[j * width + r] + (beta != 0.0f ? beta * y[j] : 0.0f);
}

/* few_rows for at most MOST_INPUTS of `stride` inputs. */
static void some_inputs(const chunks_t *c, int64_t outputs, int64_t inputs, int64_t stride,
                        const float *packed, const float *w, float *y, float beta, int64_t first,
                        int64_t last) {
    float sums[SUMS * WIDE] __attribute__((aligned(64)));
    int64_t o = first;
#define ALL(tile, vectors, n)                                                                      \
    for (; o + n <= last; o += n)                                                                  \
        for (int64_t i = 0; i < c->chunks; i++) {                                                  \
            const float *weights = w + o * stride;                                                 \
            const float *next = i == 0 && o + 2 * n <= last ? weights + n * stride : 0;            \
            tile(vectors, n, inputs, packed + i * inputs * c->width, weights, stride, next, sums); \
            unpack(rows_of(c, i), n, sums, c->width, beta, y + i * c->chunk_rows * outputs + o,    \
                   outputs);                                                                       \
        }
#define CASE(tile, vectors)                                                                        \
    case vectors:                                                                                  \
        ALL(tile, vectors, OUTPUTS(vectors))                                                       \
        ALL(tile, vectors, GROUP)                                                                  \
        break;
    if (c->lanes == WIDE)
        switch (c->vectors) { CASE(wide_tile, 1) CASE(wide_tile, 2) CASE(wide_tile, 3) }
    else
        switch (c->vectors) { CASE(narrow_tile, 1) CASE(narrow_tile, 2) CASE(narrow_tile, 3) }
#undef CASE
#undef ALL
}

/* y = x w^T + beta y for the outputs from `first` up to `last`. x [rows, inputs], w [outputs, inputs],
   y [rows, outputs]. `packed` may hold the rows of x from a call before. */
static void few_rows(int64_t rows, int64_t outputs, int64_t inputs, const float *x, const float *w,
                     float *y, float beta, int64_t first, int64_t last, packed_t *packed) {
    const chunks_t c = chunks_of(rows);
    const int64_t parts = (inputs + MOST_INPUTS - 1) / MOST_INPUTS;
    const int is_packed = packed->x == x && packed->rows == rows && packed->inputs == inputs;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = inputs * part / parts, to = inputs * (part + 1) / parts;
        if (!is_packed) pack(&c, to - from, x + from, inputs, packed->values);
        some_inputs(&c, outputs, to - from, inputs, packed->values, w + from, y,
                    part ? 1.0f : beta, first, last);
    }
    packed->x = parts == 1 ? x : 0;
    packed->rows = rows;
    packed->inputs = inputs;
}
