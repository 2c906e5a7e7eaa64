/* One forward pass of a decoder in float32: token ids in, normalized hidden states out.

   A token of the batch knows its request and its position, so prefill and decoding are the same:
   its keys are those of positions 0 .. its own, at the slots that the request's table names.

   Axes: T tokens, H hidden, h query heads, g KV heads, d head dimension, E experts, K experts of a
   token, I intermediate size. Matrices are row-major; weights are [outputs, inputs]. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"
#include "parallel.h"
#include "product.h"

#define AHEAD 12 /* keys */
#define PIECE 128 /* outputs of an expert that a thread computes at a time */
#define WORTHWHILE 4194304 /* multiplications of a thread in a product, some 0.1 ms */
#define SLOWER 6 /* times as long as in a product does one take in attention */

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, rotary_dim;
    int64_t slot_stride;  /* floats between the slots of a KV cache */
    int64_t table_stride; /* slots between the rows of two requests in the table */
    int64_t threads;      /* at most so many compute */
    float eps, scale;
} shape_t;

typedef struct {
    const float *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out;
    const float *mlp_norm, *router, *gate_up, *down;
    float *k_cache, *v_cache;
    int64_t experts, top_k, normalize, intermediate;
    int32_t *chosen; /* [T, K], the experts of each token; NULL if nobody asks */
} layer_t;

typedef struct {
    int64_t tokens;
    const int64_t *ids, *positions, *slots, *requests;
    const int32_t *table;
    const float *cos_sin; /* [positions, rotary_dim]: cosines, then sines */
} batch_t;

typedef struct {
    float *normed; /* [T, H] */
    float *qkv;    /* [T, (h + 2g) * d] */
    float *mixed;  /* [T, h * d] */
    float *scores; /* [threads, h / g, longest sequence] */
    int64_t scores_size; /* of a thread */
    float *router; /* [T, E] */
    float *weight; /* [T, K] */
    int32_t *expert, *row, *start; /* [T, K], [T * K], [E + 1] */
    float *in, *gate_up, *act, *out; /* [T * K, H], [.., 2I], [.., I], [.., H] */
} space_t;

/* Returns how many threads pay for so many multiplications. */
static int threads_for(const shape_t *s, int64_t work) {
    const int64_t worthwhile = 1 + work / WORTHWHILE;
    return (int)(worthwhile < s->threads ? worthwhile : s->threads);
}

static void rms_norm_row(const float *x, const float *weight, int64_t size, float eps, float *y) {
    float sum = 0.0f;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

static void rms_norm(int64_t rows, const float *x, const float *weight, int64_t size, float eps,
                     float *y) {
    for (int64_t r = 0; r < rows; r++)
        rms_norm_row(x + r * size, weight, size, eps, y + r * size);
}

/* The halves of the first rotary_dim elements form the pairs. */
static void rotate(float *x, const float *cos_sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half], c = cos_sin[i], s = cos_sin[i + half];
        x[i] = a * c - b * s;
        x[i + half] = b * c + a * s;
    }
}

static void softmax(float *x, int64_t size) {
    float most = x[0], sum = 0.0f;
    for (int64_t i = 1; i < size; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < size; i++) {
        x[i] = exponential(x[i] - most);
        sum += x[i];
    }
    for (int64_t i = 0; i < size; i++) x[i] /= sum;
}

/* Attention of the query heads that share one KV head. The keys of a request lie apart from one
   another, so that a processor must be told to fetch the next ones. */
static inline __attribute__((always_inline)) void
attend_sized(const shape_t *s, const float *q, const float *keys, const float *values,
             const int32_t *slots, int64_t num_keys, float *scores, float *out, const int64_t d) {
    const int64_t group = s->heads / s->kv_heads;
    for (int64_t j = 0; j < num_keys; j++) {
        const float *key = keys + slots[j] * s->slot_stride;
        const float *ahead = keys + slots[j + AHEAD < num_keys ? j + AHEAD : j] * s->slot_stride;
        for (int64_t c = 0; c < d; c += LINE) __builtin_prefetch(ahead + c);
        for (int64_t i = 0; i < group; i++) {
            float dot = 0.0f;
            for (int64_t c = 0; c < d; c++) dot += q[i * d + c] * key[c];
            scores[i * num_keys + j] = dot * s->scale;
        }
    }
    for (int64_t i = 0; i < group; i++) softmax(scores + i * num_keys, num_keys);
    memset(out, 0, sizeof(float) * group * d);
    for (int64_t j = 0; j < num_keys; j++) {
        const float *value = values + slots[j] * s->slot_stride;
        const float *ahead = values + slots[j + AHEAD < num_keys ? j + AHEAD : j] * s->slot_stride;
        for (int64_t c = 0; c < d; c += LINE) __builtin_prefetch(ahead + c);
        for (int64_t i = 0; i < group; i++) {
            const float share = scores[i * num_keys + j];
            for (int64_t c = 0; c < d; c++) out[i * d + c] += share * value[c];
        }
    }
}

/* A head size that the compiler knows lets it unroll the inner loops. */
static void attend(const shape_t *s, const float *q, const float *keys, const float *values,
                   const int32_t *slots, int64_t num_keys, float *scores, float *out) {
    switch (s->head_dim) {
    case 32: attend_sized(s, q, keys, values, slots, num_keys, scores, out, 32); break;
    case 64: attend_sized(s, q, keys, values, slots, num_keys, scores, out, 64); break;
    case 128: attend_sized(s, q, keys, values, slots, num_keys, scores, out, 128); break;
    default: attend_sized(s, q, keys, values, slots, num_keys, scores, out, s->head_dim);
    }
}

/* Norms and rotary embedding of one token's queries and keys; its keys and values go to the cache. */
static void keep_token(const shape_t *s, const layer_t *l, const batch_t *b, int64_t t, float *q) {
    const int64_t d = s->head_dim, q_size = s->heads * d, kv_size = s->kv_heads * d;
    const float *cos_sin = b->cos_sin + b->positions[t] * s->rotary_dim, *k = q + q_size;
    if (l->qkv_bias)
        for (int64_t i = 0; i < q_size + 2 * kv_size; i++) q[i] += l->qkv_bias[i];
    for (int64_t i = 0; i < s->heads + s->kv_heads; i++) {
        const float *norm = i < s->heads ? l->q_norm : l->k_norm;
        if (norm) rms_norm_row(q + i * d, norm, d, s->eps, q + i * d);
        rotate(q + i * d, cos_sin, s->rotary_dim);
    }
    memcpy(l->k_cache + b->slots[t] * s->slot_stride, k, sizeof(float) * kv_size);
    memcpy(l->v_cache + b->slots[t] * s->slot_stride, k + kv_size, sizeof(float) * kv_size);
}

static void attention(sgemm_t *sgemm, const shape_t *s, const layer_t *l, const batch_t *b,
                      const space_t *w, float *hidden) {
    const int64_t d = s->head_dim, group = s->heads / s->kv_heads;
    const int64_t q_size = s->heads * d, width = q_size + 2 * s->kv_heads * d;
    int64_t num_keys = 0;
    for (int64_t t = 0; t < b->tokens; t++) num_keys += b->positions[t] + 1;
    rms_norm(b->tokens, hidden, l->attention_norm, s->hidden, s->eps, w->normed);
    product(sgemm, threads_for(s, b->tokens * width * s->hidden), b->tokens, width, s->hidden,
            w->normed, l->qkv, w->qkv, 0.0f);
    for (int64_t t = 0; t < b->tokens; t++) keep_token(s, l, b, t, w->qkv + t * width);
    /* Only now: in prefill a token's keys include those of tokens of this batch. */
    const int threads = threads_for(s, SLOWER * 2 * num_keys * q_size);
#pragma omp parallel for collapse(2) schedule(dynamic, 8) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < b->tokens; t++)
        for (int64_t i = 0; i < s->kv_heads; i++)
            attend(s, w->qkv + t * width + i * group * d, l->k_cache + i * d, l->v_cache + i * d,
                   b->table + b->requests[t] * s->table_stride, b->positions[t] + 1,
                   w->scores + thread_number() * w->scores_size,
                   w->mixed + t * q_size + i * group * d);
    product(sgemm, threads_for(s, b->tokens * q_size * s->hidden), b->tokens, s->hidden, q_size,
            w->mixed, l->out, hidden, 1.0f);
}

/* Writes the experts of each token and their weights. */
static void route(const layer_t *l, int64_t tokens, const space_t *w) {
    for (int64_t t = 0; t < tokens; t++) {
        float *p = w->router + t * l->experts, sum = 0.0f;
        softmax(p, l->experts);
        for (int64_t k = 0; k < l->top_k; k++) {
            int64_t best = 0;
            for (int64_t e = 1; e < l->experts; e++) best = p[e] > p[best] ? e : best;
            w->expert[t * l->top_k + k] = (int32_t)best;
            w->weight[t * l->top_k + k] = p[best];
            sum += p[best];
            p[best] = -1.0f;
        }
        for (int64_t k = 0; l->normalize && k < l->top_k; k++) w->weight[t * l->top_k + k] /= sum;
    }
    if (l->chosen) memcpy(l->chosen, w->expert, sizeof(int32_t) * tokens * l->top_k);
}

/* Sorts (token, expert) by expert: row[i] is the i-th pair, start[e] expert e's first. */
static void sort_by_expert(const layer_t *l, int64_t pairs, const space_t *w) {
    memset(w->start, 0, sizeof(int32_t) * (l->experts + 1));
    for (int64_t i = 0; i < pairs; i++) w->start[w->expert[i] + 1]++;
    for (int64_t e = 0; e < l->experts; e++) w->start[e + 1] += w->start[e];
    for (int64_t i = 0; i < pairs; i++) w->row[w->start[w->expert[i]]++] = (int32_t)i;
    for (int64_t e = l->experts; e > 0; e--) w->start[e] = w->start[e - 1];
    w->start[0] = 0;
}

/* The elements from `first` up to `last` of each row's activation. */
static void activate(const float *gate_up, int64_t rows, int64_t size, int64_t first, int64_t last,
                     float *out) {
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * size, *up = gate + size;
        float *y = out + r * size;
        for (int64_t i = first; i < last; i++) {
            const float x = gate[i] > -80.0f ? gate[i] : -80.0f;
            y[i] = x / (1.0f + exponential(-x)) * up[i];
        }
    }
}

/* Experts get rows of unlike numbers, so each expert's products are cut for the threads, too. */
static void run_experts(sgemm_t *sgemm, int threads, int64_t H, const layer_t *l, int64_t pairs,
                        const space_t *w) {
    const int64_t I = l->intermediate;
    for (int64_t i = 0; i < pairs; i++)
        memcpy(w->in + i * H, w->normed + w->row[i] / l->top_k * H, sizeof(float) * H);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        packed_t packed;
        packed.x = NULL;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t e = 0; e < l->experts; e++)
            for (int64_t first = 0; first < I; first += PIECE) {
                const int64_t start = w->start[e], rows = w->start[e + 1] - start;
                const int64_t last = first + PIECE < I ? first + PIECE : I;
                const float *in = w->in + start * H, *weight = l->gate_up + e * 2 * I * H;
                float *out = w->gate_up + start * 2 * I;
                part_of_product(sgemm, rows, 2 * I, H, in, weight, out, 0.0f, first, last, &packed);
                part_of_product(sgemm, rows, 2 * I, H, in, weight, out, 0.0f, I + first, I + last,
                                &packed);
                activate(out, rows, I, first, last, w->act + start * I);
            }
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t e = 0; e < l->experts; e++)
            for (int64_t first = 0; first < H; first += PIECE) {
                const int64_t start = w->start[e], rows = w->start[e + 1] - start;
                part_of_product(sgemm, rows, H, I, w->act + start * I, l->down + e * H * I,
                                w->out + start * H, 0.0f, first,
                                first + PIECE < H ? first + PIECE : H, &packed);
            }
    }
}

static void mlp(sgemm_t *sgemm, const shape_t *s, const layer_t *l, int64_t tokens,
                const space_t *w, float *hidden) {
    const int64_t H = s->hidden, I = l->intermediate, pairs = tokens * l->top_k;
    const int threads = threads_for(s, (l->router ? pairs : tokens) * 3 * I * H);
    rms_norm(tokens, hidden, l->mlp_norm, H, s->eps, w->normed);
    if (!l->router) {
        product(sgemm, threads, tokens, 2 * I, H, w->normed, l->gate_up, w->gate_up, 0.0f);
        activate(w->gate_up, tokens, I, 0, I, w->act);
        product(sgemm, threads, tokens, H, I, w->act, l->down, hidden, 1.0f);
        return;
    }
    product(sgemm, 1, tokens, l->experts, H, w->normed, l->router, w->router, 0.0f);
    route(l, tokens, w);
    sort_by_expert(l, pairs, w);
    run_experts(sgemm, threads, H, l, pairs, w);
    for (int64_t i = 0; i < pairs; i++) {
        float *y = hidden + w->row[i] / l->top_k * H;
        const float weight = w->weight[w->row[i]], *x = w->out + i * H;
        for (int64_t c = 0; c < H; c++) y[c] += weight * x[c];
    }
}

/* hidden: [T, H], the result, and the residual stream meanwhile. blas_threads sets how many threads a
   matrix product of the caller starts, and returns how many it was; small ones must start none. */
void forward(sgemm_t *sgemm, int (*blas_threads)(int), const shape_t *shape, const layer_t *layers,
             int64_t num_layers, const batch_t *batch, const space_t *space, const float *embedding,
             const float *final_norm, float *hidden) {
    const int64_t H = shape->hidden;
    const int before = blas_threads ? blas_threads(1) : 0;
    for (int64_t t = 0; t < batch->tokens; t++)
        memcpy(hidden + t * H, embedding + batch->ids[t] * H, sizeof(float) * H);
    for (int64_t i = 0; i < num_layers; i++) {
        attention(sgemm, shape, layers + i, batch, space, hidden);
        mlp(sgemm, shape, layers + i, batch->tokens, space, hidden);
    }
    rms_norm(batch->tokens, hidden, final_norm, H, shape->eps, hidden);
    if (blas_threads) blas_threads(before);
}

/* More rows of the output layer are for the caller's library. */
const int64_t most_output_rows = MOST_ROWS;

/* y = x w^T, for the output layer: x [rows, inputs], w [outputs, inputs]. */
void output_layer(sgemm_t *sgemm, const shape_t *shape, int64_t rows, int64_t outputs,
                  int64_t inputs, const float *x, const float *w, float *y) {
    product(sgemm, threads_for(shape, rows * outputs * inputs), rows, outputs, inputs, x, w, y,
            0.0f);
}
