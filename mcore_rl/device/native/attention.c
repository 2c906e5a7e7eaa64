/* Causal attention over packed sequences in float32, forward and backward, by blocks of queries.

   The last query of a sequence sees its last key; there may be more keys than queries. A block of
   queries sees the keys up to its last query, so that the upper triangle costs nothing but the
   corners of its blocks. Scores of one block and head are all that is kept at a time.

   Axes: N sequences, T tokens, h query heads, g KV heads, d head dimension. Row-major. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"
#include "parallel.h"
#include "sgemm.h"

#define BLOCK 64 /* queries */

typedef struct {
    int64_t sequences, heads, kv_heads, dim;
    const int64_t *starts, *key_starts; /* [N + 1] */
    float scale;
    /* Strides between tokens, then between heads, in floats. */
    int64_t q_stride, q_head, k_stride, k_head, v_stride, v_head;
} packed_t;

/* Turns the scores of a block into probabilities, zero beyond each query's own position. */
static void softmax_rows(float *scores, int64_t rows, int64_t keys, int64_t first, float *lse,
                         int64_t lse_stride) {
    for (int64_t i = 0; i < rows; i++) {
        float *row = scores + i * keys, most = row[0], sum = 0.0f;
        const int64_t seen = first + i + 1;
        for (int64_t j = 1; j < seen; j++) most = row[j] > most ? row[j] : most;
        for (int64_t j = 0; j < seen; j++) {
            row[j] = exponential(row[j] - most);
            sum += row[j];
        }
        const float inverse = 1.0f / sum;
        for (int64_t j = 0; j < seen; j++) row[j] *= inverse;
        memset(row + seen, 0, sizeof(float) * (keys - seen));
        lse[i * lse_stride] = most + logf(sum);
    }
}

/* The queries of a block: where they lie, and the keys that the first and the last of them see. */
typedef struct {
    int64_t at, rows, key_at, first, keys;
} block_t;

static int next_block(const packed_t *p, int64_t n, block_t *b) {
    const int64_t left = p->starts[n + 1] - b->at;
    b->rows = left < BLOCK ? left : BLOCK;
    b->key_at = p->key_starts[n];
    b->first = p->key_starts[n + 1] - b->key_at - left;
    b->keys = b->first + b->rows;
    return left > 0;
}

/* One head of sequence n. */
static void attend(sgemm_t *sgemm, const packed_t *p, int64_t n, int64_t h, const float *q,
                   const float *k, const float *v, float *scores, float *out, float *lse) {
    const int64_t d = p->dim, group = p->heads / p->kv_heads, width = p->heads * d;
    for (block_t b = {p->starts[n], 0, 0, 0, 0}; next_block(p, n, &b); b.at += BLOCK) {
        const int64_t at = b.at, rows = b.rows, keys = b.keys;
        const float *keys_at = k + b.key_at * p->k_stride + h / group * p->k_head;
        const float *values_at = v + b.key_at * p->v_stride + h / group * p->v_head;
        multiply(sgemm, rows, keys, d, p->scale, q + at * p->q_stride + h * p->q_head, p->q_stride,
                 0, keys_at, p->k_stride, 1, 0.0f, scores, keys);
        softmax_rows(scores, rows, keys, b.first, lse + at * p->heads + h, p->heads);
        multiply(sgemm, rows, d, keys, 1.0f, scores, keys, 0, values_at, p->v_stride, 0, 0.0f,
                 out + at * width + h * d, width);
    }
}

/* out [T, h, d], lse [T, h]; scores is room for BLOCK times the longest sequence, `room` floats, on
   each thread. */
void attention(sgemm_t *sgemm, const packed_t *p, const float *q, const float *k, const float *v,
               float *scores, int64_t room, float *out, float *lse) {
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t n = 0; n < p->sequences; n++)
        for (int64_t h = 0; h < p->heads; h++)
            attend(sgemm, p, n, h, q, k, v, scores + thread_number() * room, out, lse);
}

/* Probabilities and gradients of scores of a block, from scores and products of dout and values. */
static void block_gradient(float *scores, float *dscores, int64_t rows, int64_t keys, int64_t first,
                           const float *out, const float *dout, int64_t width, int64_t d,
                           const float *lse, int64_t lse_stride, float scale) {
    for (int64_t i = 0; i < rows; i++) {
        float *p = scores + i * keys, *ds = dscores + i * keys, dot = 0.0f;
        const float *o = out + i * width, *g = dout + i * width, top = lse[i * lse_stride];
        const int64_t seen = first + i + 1;
        for (int64_t c = 0; c < d; c++) dot += o[c] * g[c];
        for (int64_t j = 0; j < seen; j++) {
            p[j] = exponential(p[j] - top);
            ds[j] = p[j] * (ds[j] - dot) * scale;
        }
        memset(p + seen, 0, sizeof(float) * (keys - seen));
        memset(ds + seen, 0, sizeof(float) * (keys - seen));
    }
}

typedef struct {
    const float *q, *k, *v, *out, *lse, *dout;
    float *dq, *dk, *dv;
} gradient_t;

/* One head of sequence n. */
static void attend_backward(sgemm_t *sgemm, const packed_t *p, int64_t n, int64_t h,
                            const gradient_t *x, float *scores, float *dscores) {
    const int64_t d = p->dim, g = h / (p->heads / p->kv_heads);
    const int64_t width = p->heads * d, kv_width = p->kv_heads * d;
    for (block_t b = {p->starts[n], 0, 0, 0, 0}; next_block(p, n, &b); b.at += BLOCK) {
        const int64_t at = b.at, rows = b.rows, keys = b.keys, start = b.key_at;
        const float *queries_at = x->q + at * p->q_stride + h * p->q_head;
        const float *keys_at = x->k + start * p->k_stride + g * p->k_head;
        const float *values_at = x->v + start * p->v_stride + g * p->v_head;
        const float *out_at = x->out + at * width + h * d, *dout_at = x->dout + at * width + h * d;
        float *dk_at = x->dk + start * kv_width + g * d, *dv_at = x->dv + start * kv_width + g * d;
        multiply(sgemm, rows, keys, d, p->scale, queries_at, p->q_stride, 0, keys_at, p->k_stride,
                 1, 0.0f, scores, keys);
        multiply(sgemm, rows, keys, d, 1.0f, dout_at, width, 0, values_at, p->v_stride, 1, 0.0f,
                 dscores, keys);
        block_gradient(scores, dscores, rows, keys, b.first, out_at, dout_at, width, d,
                       x->lse + at * p->heads + h, p->heads, p->scale);
        multiply(sgemm, keys, d, rows, 1.0f, scores, keys, 1, dout_at, width, 0, 1.0f, dv_at,
                 kv_width);
        multiply(sgemm, rows, d, keys, 1.0f, dscores, keys, 0, keys_at, p->k_stride, 0, 0.0f,
                 x->dq + at * width + h * d, width);
        multiply(sgemm, keys, d, rows, 1.0f, dscores, keys, 1, queries_at, p->q_stride, 0, 1.0f,
                 dk_at, kv_width);
    }
}

/* dq [T, h, d]; dk and dv [keys, g, d] are added to. Scores and their gradients take `room` floats
   on each thread. The heads that add to the same keys run on one thread, in their order. */
void attention_backward(sgemm_t *sgemm, const packed_t *p, const gradient_t *x, float *scores,
                        int64_t room) {
    const int64_t group = p->heads / p->kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t n = 0; n < p->sequences; n++)
        for (int64_t g = 0; g < p->kv_heads; g++) {
            float *own = scores + thread_number() * room;
            for (int64_t h = g * group; h < (g + 1) * group; h++)
                attend_backward(sgemm, p, n, h, x, own, own + room / 2);
        }
}
