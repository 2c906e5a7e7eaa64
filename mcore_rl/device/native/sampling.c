/* SGLang's sampling of one token per row, in one pass.

   With seeds it is the argmax of log-prob + Gumbel noise of a hash. The noise of hash u in (0, 1) is -log(-log u) <= -log(1 - u). So a token cannot win against the
   best value B so far unless its probability exceeds e^B (1 - u), and few need a logarithm. */

#include <math.h>
#include <stdint.h>

#include "exponential.h"

#define BLOCK 64
#define MARGIN 1.0001f /* for the rounding of e^x; a token that passes is computed exactly */

static inline uint32_t mix(uint32_t hash, uint32_t key) {
    key *= 0xCC9E2D51u;
    key = (key << 15 | key >> 17) * 0x1B873593u;
    hash ^= key;
    return (hash << 13 | hash >> 19) * 5u + 0xE6546B64u;
}

/* MurmurHash3 of 16 bytes, of which `hash` covers the first 12. */
static inline uint32_t finish(uint32_t hash, uint32_t column) {
    hash = mix(hash, column) ^ 16u;
    hash = (hash ^ hash >> 16) * 0x85EBCA6Bu;
    hash = (hash ^ hash >> 13) * 0xC2B2AE35u;
    return hash ^ hash >> 16;
}

static double value(float logprob, uint32_t hash) {
    double x = log((double)hash / 4294967295.0);
    x = x < -1.7976931348623157e308 ? -1.7976931348623157e308 : x;
    x = x > -0x1p-32 ? -0x1p-32 : x;
    return (double)logprob - log(-x);
}

static int64_t best_column(const float *logprob, int64_t columns, uint32_t hash) {
    double best = -INFINITY;
    float power = 0.0f; /* e^best */
    int64_t winner = 0;
    for (int64_t start = 0; start < columns; start += BLOCK) {
        const int64_t size = columns - start < BLOCK ? columns - start : BLOCK;
        uint32_t hashes[BLOCK];
        int32_t passing = 0;
        for (int64_t i = 0; i < size; i++) {
            hashes[i] = finish(hash, (uint32_t)(start + i));
            const float complement = (float)~hashes[i] * (1.0f / 4294967295.0f);
            passing |= exponential(logprob[start + i]) * MARGIN >= power * complement;
        }
        for (int64_t i = 0; passing && i < size; i++) {
            const float complement = (float)~hashes[i] * (1.0f / 4294967295.0f);
            if (exponential(logprob[start + i]) * MARGIN < power * complement) continue;
            const double candidate = value(logprob[start + i], hashes[i]);
            if (candidate <= best) continue;
            best = candidate;
            winner = start + i;
            power = (float)exp(best < 80.0 ? best : 80.0);
        }
    }
    return winner;
}

/* logprobs: [rows, columns]; columns_out: [rows]. */
void sample_seeded(const float *logprobs, const int64_t *seeds, const int64_t *positions,
                   int64_t rows, int64_t columns, int64_t *columns_out) {
    for (int64_t row = 0; row < rows; row++) {
        uint32_t hash = mix(0u, (uint32_t)seeds[row]);
        hash = mix(hash, (uint32_t)((uint64_t)seeds[row] >> 32));
        hash = mix(hash, (uint32_t)positions[row]);
        columns_out[row] = best_column(logprobs + row * columns, columns, hash);
    }
}

/* The column at which the sum of probabilities exceeds `left`; sums are those of blocks of columns. */
static int64_t column_at(const float *probs, const double *sums, int64_t columns, double left) {
    int64_t column = 0;
    for (; column + BLOCK < columns && left >= *sums; column += BLOCK) left -= *sums++;
    const int64_t end = column + BLOCK < columns ? column + BLOCK : columns;
    for (; column + 1 < end && left >= probs[column]; column++) left -= probs[column];
    while (column > 0 && probs[column] == 0.0f) column--; /* rounding had left something over */
    return column;
}

/* Without seeds: the column at which the sum of a row's probabilities exceeds shares[row], in [0, 1), of
   their total. probs: [rows, columns]; sums: [columns], for use here. Returns how many rows have an
   element below 0 or no finite total above 0. */
int64_t sample_by_share(const float *probs, const double *shares, int64_t rows, int64_t columns,
                        double *sums, int64_t *columns_out) {
    int64_t refused = 0;
    for (int64_t row = 0; row < rows; row++, probs += columns) {
        double total = 0.0;
        float least = 0.0f;
        for (int64_t start = 0; start < columns; start += BLOCK) {
            const int64_t size = columns - start < BLOCK ? columns - start : BLOCK;
            float sum = 0.0f;
            for (int64_t i = start; i < start + size; i++) {
                sum += probs[i];
                least = probs[i] < least ? probs[i] : least;
            }
            sums[start / BLOCK] = sum;
            total += sum;
        }
        const int is_distribution = total > 0.0 && total < INFINITY && least >= 0.0f;
        refused += !is_distribution;
        columns_out[row] =
            is_distribution ? column_at(probs, sums, columns, shares[row] * total) : 0;
    }
    return refused;
}
