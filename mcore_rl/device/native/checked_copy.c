/* Copies the slices of a bucket in or out and takes their checksums in the same pass over memory.

   A slice is copied chunk by chunk, and a chunk is summed while it is in the nearest cache:

   pack    own memory --copy--> bucket --sum-->
   place   bucket --sum-->, then bucket --copy, past the cache--> own memory
   write   own memory --sum-->, then own memory --copy, past the cache--> another rank's memory

   The checksum is XXH3 (64 bits, seed 0, its usual secret) of the slice padded with zeros, as the
   xxhash library computes it: 8 lanes take in stripes of 64 bytes and are scrambled every 16. Only
   inputs of more than 240 bytes are summed this way, and slices are longer. */

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define STRIPE 64 /* bytes, as all sizes here */
#define BLOCK 1024
#define PACKED BLOCK       /* in a chunk that is packed */
#define PLACED (16 * BLOCK) /* in a chunk that is placed: long runs suit writes past the cache */
#define AHEAD 2048         /* how far ahead of a copy own memory is asked for */
#define STREAMED 2048      /* shorter runs are written through the cache */
#define PRIME32 0x9E3779B1u

typedef uint64_t lanes_t __attribute__((vector_size(STRIPE)));

typedef struct {
    int64_t first, bytes, padded; /* in the bucket */
    int64_t moves;                /* of the slice, one after another in the list of moves */
} slice_t;

typedef struct {
    char *own;
    int64_t own_stride; /* bytes between rows */
    int64_t at;         /* bytes from the start of the bucket */
    int64_t stride, rows, row_bytes;
} move_t;

static const uint64_t SECRET[24] = {
    0xBE4BA423396CFEB8u, 0x1CAD21F72C81017Cu, 0xDB979083E96DD4DEu, 0x1F67B3B7A4A44072u,
    0x78E5C0CC4EE679CBu, 0x2172FFCC7DD05A82u, 0x8E2443F7744608B8u, 0x4C263A81E69035E0u,
    0xCB00C391BB52283Cu, 0xA32E531B8B65D088u, 0x4EF90DA297486471u, 0xD8ACDEA946EF1938u,
    0x3F349CE33F76FAA8u, 0x1D4F0BC7C7BBDCF9u, 0x3159B4CD4BE0518Au, 0x647378D9C97E9FC8u,
    0xC3EBD33483ACC5EAu, 0xEB6313FAFFA081C5u, 0x49DAF0B751DD0D17u, 0x9E68D429265516D3u,
    0xFCA1477D58BE162Bu, 0xCE31D07AD1B8F88Fu, 0x280416958F3ACB45u, 0x7E404BBBCAFBD7AFu,
};

static inline lanes_t load(const char *from) {
    lanes_t lanes;
    memcpy(&lanes, from, STRIPE);
    return lanes;
}

static inline lanes_t secret(int64_t at) { return load((const char *)SECRET + at); }

/* The product of the two halves of each lane. */
static inline lanes_t half_products(lanes_t key) {
#ifdef __AVX512F__
    return (lanes_t)_mm512_mul_epu32((__m512i)key, (__m512i)(key >> 32));
#elif defined(__AVX2__)
    lanes_t high = key >> 32, out;
    const __m256i *a = (const __m256i *)&key, *b = (const __m256i *)&high;
    __m256i *product = (__m256i *)&out;
    product[0] = _mm256_mul_epu32(a[0], b[0]);
    product[1] = _mm256_mul_epu32(a[1], b[1]);
    return out;
#else
    return (key & 0xFFFFFFFFu) * (key >> 32);
#endif
}

static inline lanes_t swap_pairs(lanes_t data) {
#ifdef __clang__
    return __builtin_shufflevector(data, data, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    return __builtin_shuffle(data, (lanes_t){1, 0, 3, 2, 5, 4, 7, 6});
#endif
}

static inline lanes_t take(lanes_t sum, const char *stripe, int64_t secret_at) {
    const lanes_t data = load(stripe);
    return sum + swap_pairs(data) + half_products(data ^ secret(secret_at));
}

static lanes_t take_stripes(lanes_t sum, const char *from, int64_t stripes) {
    for (int64_t i = 0; i < stripes; i++) sum = take(sum, from + i * STRIPE, i * 8);
    return sum;
}

static lanes_t take_blocks(lanes_t sum, const char *from, int64_t blocks) {
    for (int64_t i = 0; i < blocks; i++) {
        sum = take_stripes(sum, from + i * BLOCK, BLOCK / STRIPE);
        sum = (sum ^ sum >> 47 ^ secret(128)) * PRIME32;
    }
    return sum;
}

static const lanes_t START = {
    0xC2B2AE3Du, 0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
    0x85EBCA77C2B2AE63u, 0x85EBCA77u, 0x27D4EB2F165667C5u, PRIME32,
};

/* Takes in the `left` bytes at `rest` that follow whole blocks, and returns the checksum of all. */
static uint64_t finish(lanes_t sum, const char *rest, int64_t left, int64_t bytes) {
    sum = take_stripes(sum, rest, (left - 1) / STRIPE);
    sum = take(sum, rest + left - STRIPE, 121);
    uint64_t hash = (uint64_t)bytes * 0x9E3779B185EBCA87u;
    for (int i = 0; i < 4; i++) {
        uint64_t key[2];
        memcpy(key, (const char *)SECRET + 11 + 16 * i, sizeof key);
        const unsigned __int128 product =
            (unsigned __int128)(sum[2 * i] ^ key[0]) * (sum[2 * i + 1] ^ key[1]);
        hash += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9u;
    return hash ^ hash >> 32;
}

/* Asks for memory ahead, because the processor itself does so only within a page. */
static void copy_ahead(char *to, const char *from, int64_t bytes) {
    for (; bytes >= STRIPE; to += STRIPE, from += STRIPE, bytes -= STRIPE) {
        __builtin_prefetch(from + AHEAD);
        const lanes_t lanes = load(from);
        memcpy(to, &lanes, STRIPE);
    }
    memcpy(to, from, bytes);
}

/* Writes past the cache: the target is not read first, and does not displace what is in use. */
static void stream(char *to, const char *from, int64_t bytes) {
#ifdef __SSE2__
    if (bytes >= STREAMED) {
        const int64_t head = -(intptr_t)to & (STRIPE - 1);
        memcpy(to, from, head);
        for (to += head, from += head, bytes -= head; bytes >= STRIPE;
             to += STRIPE, from += STRIPE, bytes -= STRIPE) {
            const lanes_t lanes = load(from);
#ifdef __AVX512F__
            _mm512_stream_si512((__m512i *)to, (__m512i)lanes);
#else
            const __m128i *part = (const __m128i *)&lanes;
            for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)to + i, part[i]);
#endif
        }
    }
#endif
    memcpy(to, from, bytes);
}

/* Sums a slice in the bucket and moves it, all of it in one piece, to or from `own`. */
static uint64_t one_pass(char *slice, char *own, int64_t bytes, int64_t padded, int placing) {
    const int64_t whole = (padded - 1) / BLOCK * BLOCK;
    lanes_t sum = START;
    const int64_t chunk = placing ? PLACED : PACKED;
    for (int64_t at = 0; at < padded; at += chunk) {
        const int64_t moved = bytes - at < chunk ? bytes - at : chunk;
        const int64_t summed = whole - at < chunk ? whole - at : chunk;
        if (!placing && moved > 0) copy_ahead(slice + at, own + at, moved);
        if (summed > 0) sum = take_blocks(sum, slice + at, summed / BLOCK);
        if (placing && moved > 0) stream(own + at, slice + at, moved);
    }
    return finish(sum, slice + whole, padded - whole, padded);
}

static uint64_t checksum(const char *from, int64_t bytes) {
    const int64_t whole = (bytes - 1) / BLOCK * BLOCK;
    return finish(take_blocks(START, from, whole / BLOCK), from + whole, bytes - whole, bytes);
}

/* Sums a slice where it lies in one piece, and copies it to `to` unless that is NULL. */
static uint64_t sum_through(char *to, const char *own, int64_t bytes, int64_t padded) {
    const int64_t last = (padded - 1) / BLOCK * BLOCK;
    const int64_t whole = bytes / BLOCK * BLOCK < last ? bytes / BLOCK * BLOCK : last;
    lanes_t sum = START;
    for (int64_t at = 0; at < whole; at += PLACED) {
        const int64_t taken = whole - at < PLACED ? whole - at : PLACED;
        sum = take_blocks(sum, own + at, taken / BLOCK);
        if (to) stream(to + at, own + at, taken);
    }
    char rest[2 * BLOCK] = {0}; /* less than a block of bytes and a row of padding, or a block */
    memcpy(rest, own + whole, bytes - whole);
    if (to) memcpy(to + whole, own + whole, bytes - whole);
    const int64_t in_rest = last - whole;
    sum = take_blocks(sum, rest, in_rest / BLOCK);
    return finish(sum, rest + in_rest, padded - last, padded);
}

static void move(const move_t *m, char *bucket, int placing) {
    char *in_bucket = bucket + m->at, *own = m->own;
    for (int64_t i = 0; i < m->rows; i++, in_bucket += m->stride, own += m->own_stride) {
        if (placing)
            stream(own, in_bucket, m->row_bytes);
        else
            copy_ahead(in_bucket, own, m->row_bytes);
    }
}

static int in_one_piece(int64_t count, const move_t *moves, int64_t bytes) {
    return count == 1 && moves->rows == 1 && moves->row_bytes == bytes;
}

/* Moves slices between `bucket` and the memory that their moves name, and writes their checksums.

   sums   one for each slice; NULL if they are not wanted
   Bytes of a slice that no move names are in the bucket already, or are moved elsewhere. */
void move_slices(char *bucket, int64_t slices, const slice_t *slice, const move_t *moves,
                 int placing, uint64_t *sums) {
    for (int64_t i = 0; i < slices; i++, slice++) {
        char *first = bucket + slice->first;
        const int is_whole = in_one_piece(slice->moves, moves, slice->bytes);
        if (!placing) memset(first + slice->bytes, 0, slice->padded - slice->bytes);
        if (is_whole && sums) {
            sums[i] = one_pass(first, moves->own, slice->bytes, slice->padded, placing);
        } else {
            if (placing && sums) sums[i] = checksum(first, slice->padded);
            for (int64_t j = 0; j < slice->moves; j++) move(moves + j, bucket, placing);
            if (!placing && sums) sums[i] = checksum(first, slice->padded);
        }
        moves += slice->moves;
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* Sums slices and, if there are `targets`, copies them to the memory that those name.

   scratch    of the size of a bucket: slices that own memory holds in parts are joined there
   moves      where slices lie in own memory; bytes that no move names are in `scratch` already
   targets    where they go, targets_of[i] of them for slice i; NULL to sum own memory alone */
void write_slices(char *scratch, int64_t slices, const slice_t *slice, const move_t *moves,
                  const int64_t *targets_of, const move_t *targets, uint64_t *sums) {
    for (int64_t i = 0; i < slices; i++, slice++) {
        char *first = scratch + slice->first;
        const char *from = first;
        if (in_one_piece(slice->moves, moves, slice->bytes)) {
            from = moves->own;
        } else {
            for (int64_t j = 0; j < slice->moves; j++) move(moves + j, scratch, 0);
        }
        moves += slice->moves;
        const int64_t count = targets ? targets_of[i] : 0;
        const int goes_whole = count && in_one_piece(count, targets, slice->bytes);
        char *to = goes_whole ? targets->own : NULL;
        sums[i] = sum_through(to, from, slice->bytes, slice->padded);
        char *bucket = (char *)from - slice->first;
        for (int64_t j = 0; j < count && !goes_whole; j++) move(targets + j, bucket, 1);
        targets += count;
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
}
