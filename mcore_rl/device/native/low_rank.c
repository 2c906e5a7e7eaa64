/* Adds s B A to a matrix, to the bits that mcore_rl/weights/lora/product.py defines:

   W = round(W0 + s (((b_0 a_0) + b_1 a_1) + b_2 a_2 + ...))     each operation rounded to float32

   So products are added one by one, in the order of the rank, and neither joined with the sums
   (fused multiply-add) nor reordered, which the pragma says against the flags of the package.
   Several columns of a row, and two rows, are summed side by side. */

#pragma GCC optimize("no-associative-math", "signed-zeros", "fp-contract=off")
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#include <stdint.h>
#include <string.h>

#define LANES 16
#define GROUPS 4
#define BLOCK (LANES * GROUPS)

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

static void finish(void *row, int is_bf16, int64_t first, int64_t count, const float *sums,
                   float scale) {
    if (is_bf16) {
        uint16_t *to = (uint16_t *)row + first;
        for (int64_t j = 0; j < count; j++) to[j] = to_bf16(sums[j] * scale + from_bf16(to[j]));
    } else {
        float *to = (float *)row + first;
        for (int64_t j = 0; j < count; j++) to[j] = sums[j] * scale + to[j];
    }
}

static void add_block(char *rows[2], int num_rows, int is_bf16, const float *a, int64_t columns,
                      const float *b[2], int64_t rank, int64_t first, float scale) {
    lanes sums[2][GROUPS];
    for (int row = 0; row < num_rows; row++)
        for (int g = 0; g < GROUPS; g++)
            sums[row][g] = *(const lanes *)(a + first + LANES * g) * b[row][0];
    if (num_rows == 2) {
        for (int64_t k = 1; k < rank; k++)
            for (int g = 0; g < GROUPS; g++) {
                const lanes value = *(const lanes *)(a + k * columns + first + LANES * g);
                sums[0][g] = sums[0][g] + value * b[0][k];
                sums[1][g] = sums[1][g] + value * b[1][k];
            }
    } else {
        for (int64_t k = 1; k < rank; k++)
            for (int g = 0; g < GROUPS; g++)
                sums[0][g] = sums[0][g] + *(const lanes *)(a + k * columns + first + LANES * g)
                                              * b[0][k];
    }
    for (int row = 0; row < num_rows; row++) {
        float flat[BLOCK];
        memcpy(flat, sums[row], sizeof(flat));
        finish(rows[row], is_bf16, first, BLOCK, flat, scale);
    }
}

static void add_rest(char *row, int is_bf16, const float *a, int64_t columns, const float *b,
                     int64_t rank, int64_t first, float scale) {
    float sums[BLOCK];
    const int64_t count = columns - first;
    for (int64_t j = 0; j < count; j++) sums[j] = b[0] * a[first + j];
    for (int64_t k = 1; k < rank; k++)
        for (int64_t j = 0; j < count; j++) sums[j] = sums[j] + b[k] * a[k * columns + first + j];
    finish(row, is_bf16, first, count, sums, scale);
}

/* weight   rows of float32 or bfloat16, `row_bytes` apart, each without gaps
   a        [rank, columns], b [rows, rank], both float32 without gaps */
void add_low_rank(char *weight, int64_t row_bytes, int64_t is_bf16, const float *a, const float *b,
                  int64_t num_rows, int64_t columns, int64_t rank, float scale) {
    const int64_t whole = columns - columns % BLOCK;
#pragma omp parallel for if (num_rows * columns > 1 << 16)
    for (int64_t i = 0; i < num_rows; i += 2) {
        const int pair = i + 1 < num_rows ? 2 : 1;
        char *rows[2] = {weight + i * row_bytes, weight + (i + pair - 1) * row_bytes};
        const float *factors[2] = {b + i * rank, b + (i + pair - 1) * rank};
        for (int64_t first = 0; first < whole; first += BLOCK)
            add_block(rows, pair, (int)is_bf16, a, columns, factors, rank, first, scale);
        for (int row = 0; row < pair && whole < columns; row++)
            add_rest(rows[row], (int)is_bf16, a, columns, factors[row], rank, whole, scale);
    }
}
