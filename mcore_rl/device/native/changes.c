/* Finds the 16-bit elements in which a message differs from the one before, and applies them.

   mark_changes   one pass over both messages: a bit per element, and `before` becomes `now`
   gaps_of        the same places as distances of a byte, with the values there
   values_of      the values at the bits

   Bit i of word w is element 64 * w + i. Places and values come from another machine, so whatever
   leads beyond the message is refused. Values need no alignment. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define WORD 64
#define LONGEST 255 /* elements that stay before one that is sent */

static uint64_t mask_of(const uint16_t *before, const uint16_t *now, int64_t count) {
    uint64_t mask = 0;
    for (int64_t i = 0; i < count; i++) mask |= (uint64_t)(before[i] != now[i]) << i;
    return mask;
}

static inline uint64_t mask_of_word(const uint16_t *before, const uint16_t *now) {
#ifdef __AVX512BW__
    uint64_t mask = 0;
    for (int half = 0; half < 2; half++, before += 32, now += 32)
        mask |= (uint64_t)_mm512_cmpneq_epi16_mask(_mm512_loadu_si512(before),
                                                   _mm512_loadu_si512(now)) << (32 * half);
    return mask;
#elif defined(__AVX2__)
    uint64_t mask = 0;
    for (int half = 0; half < 2; half++) {
        __m256i same[2];
        for (int i = 0; i < 2; i++) {
            const int64_t at = 32 * half + 16 * i;
            same[i] = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(before + at)),
                                         _mm256_loadu_si256((const __m256i *)(now + at)));
        }
        /* Packing works in each half of the registers, so the quarters are put back in order. */
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(same[0], same[1]), 0xD8);
        mask |= (uint64_t)(uint32_t)~_mm256_movemask_epi8(bytes) << (32 * half);
    }
    return mask;
#else
    return memcmp(before, now, 2 * WORD) ? mask_of(before, now, WORD) : 0;
#endif
}

/* Writes a bit per element into `bits`, whole words of them; returns how many are set. */
int64_t mark_changes(uint16_t *before, const uint16_t *now, int64_t count, uint64_t *bits) {
    int64_t changed = 0;
    for (; count > 0; before += WORD, now += WORD, count -= WORD) {
        const int64_t here = count < WORD ? count : WORD;
        const uint64_t mask = here == WORD ? mask_of_word(before, now) : mask_of(before, now, here);
        if (mask) memcpy(before, now, 2 * here);
        changed += __builtin_popcountll(mask);
        *bits++ = mask;
    }
    return changed;
}

/* Writes gaps, and the values they lead to; returns how many. An element that stays is sent after
   LONGEST others that do, so there is room for count / (LONGEST + 1) more than are set. */
int64_t gaps_of(const uint64_t *bits, int64_t count, const uint16_t *now, uint8_t *gaps,
                uint16_t *values) {
    int64_t sent = 0, next = 0; /* the first element after the last one that was sent */
    for (int64_t first = 0; first < count; first += WORD) {
        for (uint64_t mask = *bits++; mask; mask &= mask - 1) {
            const int64_t at = first + __builtin_ctzll(mask);
            for (; at - next > LONGEST; next += LONGEST + 1) {
                gaps[sent] = LONGEST;
                values[sent++] = now[next + LONGEST];
            }
            gaps[sent] = (uint8_t)(at - next);
            values[sent++] = now[at];
            next = at + 1;
        }
    }
    return sent;
}

void values_of(const uint64_t *bits, int64_t count, const uint16_t *now, uint16_t *values) {
    for (int64_t first = 0; first < count; first += WORD)
        for (uint64_t mask = *bits++; mask; mask &= mask - 1)
            *values++ = now[first + __builtin_ctzll(mask)];
}

/* Returns 0, or -1 if a place lies beyond the `count` elements of `to`. */
int apply_gaps(const uint8_t *gaps, const char *values, int64_t sent, uint16_t *to, int64_t count) {
    int64_t at = -1;
    for (int64_t i = 0; i < sent; i++) {
        at += gaps[i] + 1;
        if (at >= count) return -1;
        memcpy(to + at, values + 2 * i, 2);
    }
    return 0;
}

/* `bits` has as many bytes as hold `count` bits. Returns 0, or -1 unless `sent` of them are set. */
int apply_bits(const uint8_t *bits, const char *values, int64_t sent, uint16_t *to, int64_t count) {
    int64_t taken = 0;
    for (int64_t first = 0; first < count; first += WORD, bits += 8) {
        const int64_t here = count - first < WORD ? count - first : WORD;
        uint64_t mask = 0;
        memcpy(&mask, bits, (here + 7) / 8); /* of a little-endian machine, as all that have GPUs */
        if (here < WORD) mask &= ((uint64_t)1 << here) - 1;
        if (taken + __builtin_popcountll(mask) > sent) return -1;
        for (; mask; mask &= mask - 1, taken++)
            memcpy(to + first + __builtin_ctzll(mask), values + 2 * taken, 2);
    }
    return taken == sent ? 0 : -1;
}
