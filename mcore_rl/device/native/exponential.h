#include <math.h>
#include <stdint.h>

/* e^x for x <= 88 within 2e-7 of it, by a polynomial, so that compilers vectorize its loops. */
static inline float exponential(float x) {
    union { int32_t i; float f; } power;
    x = x < -87.0f ? -87.0f : x;
    const float n = floorf(x * 1.44269504f + 0.5f);
    /* fmaf is not reordered, as the compiler may do with sums: ln 2 comes in two parts. */
    const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    power.i = ((int32_t)n + 127) << 23;
    return (p * r * r + r + 1.0f) * power.f;
}
