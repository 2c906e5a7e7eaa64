/* Writes W0 + s B A to a matrix, to the bits that mcore_rl/weights/lora/product.py defines:

   W = round(W0 + s (((b_0 a_0) + b_1 a_1) + b_2 a_2 + ...))     each operation rounded to float32

   A sum of 0 leaves W0 as it is, -0 too. Products are added one by one, in the order of the rank,
   and neither joined with the sums (fused multiply-add) nor reordered, which the pragma says
   against the flags of the package. ROWS rows and BLOCK columns are summed side by side. */

#pragma GCC optimize("no-associative-math", "signed-zeros", "fp-contract=off")
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#include <stdint.h>
#include <string.h>

#define LANES 16
#define GROUPS 4
#define BLOCK (LANES * GROUPS)
#ifdef __AVX512F__
#define ROWS 4
#else
#define ROWS 2
#endif

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline float from_bf16(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* Rounds to the nearest, and to an even last bit where two are equally near, as torch does. */
static inline uint16_t to_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if (number != number) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* Any number plus -0 is the number itself, while -0 plus 0 is 0. */
static inline float add_unless_zero(float added, float base) {
    return (added == 0.0f ? -0.0f : added) + base;
}

static inline void finish(char *weight, const char *base, int is_bf16, int64_t count,
                          const float *sums, float scale) {
    if (is_bf16) {
        uint16_t *to = (uint16_t *)weight;
        const uint16_t *from = (const uint16_t *)base;
        for (int64_t j = 0; j < count; j++)
            to[j] = to_bf16(add_unless_zero(sums[j] * scale, from_bf16(from[j])));
    } else {
        float *to = (float *)weight;
        const float *from = (const float *)base;
        for (int64_t j = 0; j < count; j++) to[j] = add_unless_zero(sums[j] * scale, from[j]);
    }
}

static inline void sum_rows(const int num_rows, lanes sums[ROWS][GROUPS], const float *a,
                            const float *b, int64_t rank) {
    for (int row = 0; row < num_rows; row++)
        for (int g = 0; g < GROUPS; g++)
            sums[row][g] = *(const lanes *)(a + LANES * g) * b[row * rank];
    for (int64_t k = 1; k < rank; k++)
        for (int g = 0; g < GROUPS; g++) {
            const lanes value = *(const lanes *)(a + k * BLOCK + LANES * g);
            for (int row = 0; row < num_rows; row++)
                sums[row][g] = sums[row][g] + value * b[row * rank + k];
        }
}

/* weight, base   rows of float32 or bfloat16 so many bytes apart, each without gaps; may be one
   a              [blocks, rank, BLOCK] float32: the columns in blocks, the last one padded
   b              [rows, rank] float32 */
void add_low_rank(char *weight, int64_t weight_row, const char *base, int64_t base_row,
                  int64_t is_bf16, const float *a, const float *b, int64_t num_rows,
                  int64_t columns, int64_t rank, float scale) {
    const int64_t bytes = is_bf16 ? 2 : 4;
#pragma omp parallel for if (num_rows * columns > 1 << 16)
    for (int64_t i = 0; i < num_rows; i += ROWS) {
        const int here = num_rows - i < ROWS ? (int)(num_rows - i) : ROWS;
        for (int64_t first = 0; first < columns; first += BLOCK) {
            lanes sums[ROWS][GROUPS];
            if (here == ROWS)
                sum_rows(ROWS, sums, a + first * rank, b + i * rank, rank);
            else
                sum_rows(here, sums, a + first * rank, b + i * rank, rank);
            const int64_t count = columns - first < BLOCK ? columns - first : BLOCK;
            for (int row = 0; row < here; row++) {
                float flat[BLOCK];
                memcpy(flat, sums[row], sizeof(flat));
                finish(weight + (i + row) * weight_row + first * bytes,
                       base + (i + row) * base_row + first * bytes, (int)is_bf16, count, flat,
                       scale);
            }
        }
    }
}

int64_t block_columns(void) { return BLOCK; }
