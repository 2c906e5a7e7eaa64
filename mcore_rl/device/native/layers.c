/* Parts of a layer in float32, forward and backward, each in one pass over memory: RMSNorm, rotary
   embedding, SwiGLU, and rows sent to experts and back.

   Axes: T tokens, H hidden, h heads, d head dimension, I intermediate size. Row-major. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"
#include "parallel.h"

#define COLUMNS 64 /* that one thread adds up over all rows */

/* Whether the loops here run on as many threads as the caller's torch. */
int64_t is_parallel(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* y [T, H] = x / rms(x) * weight; scale [T] = 1 / rms(x). */
void rms_norm(int64_t rows, int64_t size, const float *x, const float *weight, float eps, float *y,
              float *scale) {
#pragma omp parallel for if (rows * size > GRAIN)
    for (int64_t r = 0; r < rows; r++) {
        const float *in = x + r * size;
        float *out = y + r * size, sum = 0.0f;
        for (int64_t i = 0; i < size; i++) sum += in[i] * in[i];
        const float s = scale[r] = 1.0f / sqrtf(sum / (float)size + eps);
        for (int64_t i = 0; i < size; i++) out[i] = in[i] * s * weight[i];
    }
}

/* dx [T, H]; dweight [H] is added to, its rows in their order whatever the number of threads. */
void rms_norm_backward(int64_t rows, int64_t size, const float *dy, const float *x,
                       const float *weight, const float *scale, float *dx, float *dweight) {
#pragma omp parallel for if (rows * size > GRAIN)
    for (int64_t r = 0; r < rows; r++) {
        const float *in = x + r * size, *d = dy + r * size, s = scale[r];
        float *out = dx + r * size, dot = 0.0f;
        for (int64_t i = 0; i < size; i++) dot += d[i] * weight[i] * in[i];
        const float along = dot * s * s / (float)size;
        for (int64_t i = 0; i < size; i++) out[i] = s * (d[i] * weight[i] - along * in[i]);
    }
#pragma omp parallel for if (rows * size > GRAIN)
    for (int64_t first = 0; first < size; first += COLUMNS) {
        const int64_t end = first + COLUMNS < size ? first + COLUMNS : size;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = first; i < end; i++)
                dweight[i] += dy[r * size + i] * x[r * size + i] * scale[r];
    }
}

/* y [T, h, d]: the first `rotary` elements of each head turned by the angle of the token's position,
   element i with i + rotary / 2; direction -1 turns back.

   strides      of x, between tokens and between heads
   positions    [T], rows of the angles
   cosines, sines    [positions, rotary / 2] */
void rotary(int64_t tokens, int64_t heads, int64_t dim, int64_t turned, int64_t token_stride,
            int64_t head_stride, const float *x, const int64_t *positions, const float *cosines,
            const float *sines, float direction, float *y) {
    const int64_t half = turned / 2;
#pragma omp parallel for if (tokens * heads * dim > GRAIN)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosines + positions[t] * half, *s = sines + positions[t] * half;
        for (int64_t h = 0; h < heads; h++) {
            const float *in = x + t * token_stride + h * head_stride;
            float *out = y + (t * heads + h) * dim;
            for (int64_t i = 0; i < half; i++) {
                const float a = in[i], b = in[i + half], sine = direction * s[i];
                out[i] = a * c[i] - b * sine;
                out[i + half] = b * c[i] + a * sine;
            }
            for (int64_t i = turned; i < dim; i++) out[i] = in[i];
        }
    }
}

/* y [T, I] = silu(gate) * up * weight of the row; x [T, 2 I] has gate, then up. */
void swiglu(int64_t rows, int64_t size, const float *x, const float *weights, float *y) {
#pragma omp parallel for if (rows * size > GRAIN)
    for (int64_t r = 0; r < rows; r++) {
        const float weight = weights ? weights[r] : 1.0f, *in = x + r * 2 * size, *up = in + size;
        float *out = y + r * size;
        for (int64_t i = 0; i < size; i++) {
            const float gate = in[i] > -80.0f ? in[i] : -80.0f;
            out[i] = in[i] / (1.0f + exponential(-gate)) * up[i] * weight;
        }
    }
}

/* dx [T, 2 I] and, with weights, dweights [T]. */
void swiglu_backward(int64_t rows, int64_t size, const float *dy, const float *x,
                     const float *weights, float *dx, float *dweights) {
#pragma omp parallel for if (rows * size > GRAIN)
    for (int64_t r = 0; r < rows; r++) {
        const float weight = weights ? weights[r] : 1.0f, *in = x + r * 2 * size, *up = in + size;
        const float *d = dy + r * size;
        float *out = dx + r * 2 * size, dot = 0.0f;
        for (int64_t i = 0; i < size; i++) {
            const float gate = in[i] > -80.0f ? in[i] : -80.0f;
            const float sigmoid = 1.0f / (1.0f + exponential(-gate)), silu = in[i] * sigmoid;
            dot += d[i] * silu * up[i];
            out[i] = d[i] * weight * up[i] * (sigmoid + silu * (1.0f - sigmoid));
            out[i + size] = d[i] * weight * silu;
        }
        if (dweights) dweights[r] = dot;
    }
}

/* y[i] = x[index[i]], rows of `size`. */
void take_rows(int64_t rows, int64_t size, const int64_t *index, const float *x, float *y) {
#pragma omp parallel for if (rows * size > GRAIN)
    for (int64_t r = 0; r < rows; r++)
        memcpy(y + r * size, x + index[r] * size, sizeof(float) * size);
}

/* y[index[i]] += x[i], rows of `size`; y is set to zero first. Rows are added in their order. */
void add_rows(int64_t rows, int64_t size, const int64_t *index, const float *x, int64_t out_rows,
              float *y) {
    memset(y, 0, sizeof(float) * out_rows * size);
#pragma omp parallel for if (rows * size > GRAIN)
    for (int64_t first = 0; first < size; first += COLUMNS) {
        const int64_t end = first + COLUMNS < size ? first + COLUMNS : size;
        for (int64_t r = 0; r < rows; r++) {
            float *to = y + index[r] * size;
            for (int64_t i = first; i < end; i++) to[i] += x[r * size + i];
        }
    }
}
