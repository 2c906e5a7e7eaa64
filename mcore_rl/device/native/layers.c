/* Parts of a layer in float32, forward and backward, each in one pass over memory: RMSNorm, rotary
   embedding, SwiGLU, and rows sent to experts and back.

   Axes: T tokens, H hidden, h heads, d head dimension, I intermediate size. Row-major. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"

/* y [T, H] = x / rms(x) * weight; scale [T] = 1 / rms(x). */
void rms_norm(int64_t rows, int64_t size, const float *x, const float *weight, float eps, float *y,
              float *scale) {
    for (int64_t r = 0; r < rows; r++, x += size, y += size) {
        float sum = 0.0f;
        for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
        const float s = scale[r] = 1.0f / sqrtf(sum / (float)size + eps);
        for (int64_t i = 0; i < size; i++) y[i] = x[i] * s * weight[i];
    }
}

/* dx [T, H]; dweight [H] is added to. */
void rms_norm_backward(int64_t rows, int64_t size, const float *dy, const float *x,
                       const float *weight, const float *scale, float *dx, float *dweight) {
    for (int64_t r = 0; r < rows; r++, x += size, dy += size, dx += size) {
        const float s = scale[r];
        float dot = 0.0f;
        for (int64_t i = 0; i < size; i++) dot += dy[i] * weight[i] * x[i];
        const float along = dot * s * s / (float)size;
        for (int64_t i = 0; i < size; i++) {
            dweight[i] += dy[i] * x[i] * s;
            dx[i] = s * (dy[i] * weight[i] - along * x[i]);
        }
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
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosines + positions[t] * half, *s = sines + positions[t] * half;
        for (int64_t h = 0; h < heads; h++, y += dim) {
            const float *in = x + t * token_stride + h * head_stride;
            for (int64_t i = 0; i < half; i++) {
                const float a = in[i], b = in[i + half], sine = direction * s[i];
                y[i] = a * c[i] - b * sine;
                y[i + half] = b * c[i] + a * sine;
            }
            for (int64_t i = turned; i < dim; i++) y[i] = in[i];
        }
    }
}

/* y [T, I] = silu(gate) * up * weight of the row; x [T, 2 I] has gate, then up. */
void swiglu(int64_t rows, int64_t size, const float *x, const float *weights, float *y) {
    for (int64_t r = 0; r < rows; r++, x += 2 * size, y += size) {
        const float weight = weights ? weights[r] : 1.0f, *up = x + size;
        for (int64_t i = 0; i < size; i++) {
            const float gate = x[i] > -80.0f ? x[i] : -80.0f;
            y[i] = x[i] / (1.0f + exponential(-gate)) * up[i] * weight;
        }
    }
}

/* dx [T, 2 I] and, with weights, dweights [T]. */
void swiglu_backward(int64_t rows, int64_t size, const float *dy, const float *x,
                     const float *weights, float *dx, float *dweights) {
    for (int64_t r = 0; r < rows; r++, x += 2 * size, dx += 2 * size, dy += size) {
        const float weight = weights ? weights[r] : 1.0f, *up = x + size;
        float dot = 0.0f;
        for (int64_t i = 0; i < size; i++) {
            const float gate = x[i] > -80.0f ? x[i] : -80.0f;
            const float sigmoid = 1.0f / (1.0f + exponential(-gate)), silu = x[i] * sigmoid;
            dot += dy[i] * silu * up[i];
            dx[i] = dy[i] * weight * up[i] * (sigmoid + silu * (1.0f - sigmoid));
            dx[i + size] = dy[i] * weight * silu;
        }
        if (dweights) dweights[r] = dot;
    }
}

/* y[i] = x[index[i]], rows of `size`. */
void take_rows(int64_t rows, int64_t size, const int64_t *index, const float *x, float *y) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(y + r * size, x + index[r] * size, sizeof(float) * size);
}

/* y[index[i]] += x[i], rows of `size`; y is set to zero first. */
void add_rows(int64_t rows, int64_t size, const int64_t *index, const float *x, int64_t out_rows,
              float *y) {
    memset(y, 0, sizeof(float) * out_rows * size);
    for (int64_t r = 0; r < rows; r++, x += size) {
        float *to = y + index[r] * size;
        for (int64_t i = 0; i < size; i++) to[i] += x[i];
    }
}
