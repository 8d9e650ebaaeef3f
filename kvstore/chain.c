/* The chain of block hashes: each is SHA-256 over the canonical CBOR of [hash before, [token, ...], extra keys].

   chain.py says what that means and has the same in Python. Numbers are written in CBOR's shortest form. SHA's own
   instructions are used where the CPU has them, found out when it runs. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines"
#endif

#define HASH_BYTES 32
#define SHA_BLOCK 64

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

static void compress_portable(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    for (; blocks; blocks--, data += SHA_BLOCK) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++) {
            memcpy(&w[i], data + 4 * i, 4);
            w[i] = __builtin_bswap32(w[i]);
        }
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7]
                 + (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
        }
        memcpy(s, state, sizeof s);
        for (int i = 0; i < 64; i++) {
            uint32_t one = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25))
                         + ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[i] + w[i];
            uint32_t two = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22))
                         + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof s[0]);
            s[4] += one;
            s[0] = one + two;
        }
        for (int i = 0; i < 8; i++)
            state[i] += s[i];
    }
}

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("sha,ssse3,sse4.1")))
static void compress_sha_ni(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    /* The instructions keep the eight words as ABEF and CDGH. */
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
    for (; blocks; blocks--, data += SHA_BLOCK) {
        __m128i abef_before = abef, cdgh_before = cdgh, w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data + i), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i sum = _mm_add_epi32(w[i % 4], _mm_load_si128((const __m128i *)K + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (i < 12) {
                __m128i last = w[(i + 3) % 4];
                __m128i next = _mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]);
                next = _mm_add_epi32(next, _mm_alignr_epi8(last, w[(i + 2) % 4], 4));
                w[i % 4] = _mm_sha256msg2_epu32(next, last);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1b);
    high = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(low, high, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(high, low, 8));
}

static int has_sha_ni(void)
{
    unsigned a, b, c, d, basic;
    if (!__get_cpuid(1, &a, &b, &basic, &d) || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return b & 1u << 29 && basic & bit_SSSE3 && basic & bit_SSE4_1;
}
#else
#define compress_sha_ni compress_portable
static int has_sha_ni(void) { return 0; }
#endif

static uint8_t *put_head(uint8_t *out, uint8_t major, uint32_t value)
{
    if (value >= 0x10000) {
        value = __builtin_bswap32(value);
        *out = major | 26;
        memcpy(out + 1, &value, 4);
        return out + 5;
    }
    if (value >= 0x100) {
        out[0] = major | 25, out[1] = value >> 8, out[2] = value;
        return out + 3;
    }
    if (value >= 24) {
        out[0] = major | 24, out[1] = value;
        return out + 2;
    }
    *out = major | value;
    return out + 1;
}

/* Which of two or four bytes a token takes is as good as random, so that is no branch. Writes up to 8 bytes. */
static uint8_t *put_token(uint8_t *out, uint32_t token)
{
    if (token < 0x100)
        return put_head(out, 0, token);
    uint64_t wide = token >= 0x10000, bytes = __builtin_bswap32(token) >> (wide ? 0 : 16), item = 25 + wide;
    item |= bytes << 8;
    memcpy(out, &item, 8);
    return out + 3 + 2 * wide;
}

/* hashes: room for 1 + blocks hashes; the first is the one before the first block, the others are written.
   tokens: blocks * block_tokens of them. extra: the extra keys of every one of these blocks, as CBOR.
   portable: not 0 leaves the CPU's own instructions alone. Returns 0, or -1 without memory. */
int deepinfer_chain(const uint32_t *tokens, size_t blocks, size_t block_tokens, const uint8_t *extra,
                    size_t extra_bytes, uint8_t *hashes, int portable)
{
    void (*compress)(uint32_t *, const uint8_t *, size_t) =
        !portable && has_sha_ni() ? compress_sha_ni : compress_portable;
    uint8_t *message = malloc(3 + HASH_BYTES + 5 + 5 * block_tokens + extra_bytes + 2 * SHA_BLOCK);
    if (!message)
        return -1;
    memcpy(message, "\x83\x58\x20", 3);
    for (; blocks; blocks--, hashes += HASH_BYTES) {
        memcpy(message + 3, hashes, HASH_BYTES);
        uint8_t *end = put_head(message + 3 + HASH_BYTES, 0x80, block_tokens);
        for (size_t i = 0; i < block_tokens; i++)
            end = put_token(end, *tokens++);
        memcpy(end, extra, extra_bytes);
        end += extra_bytes;
        uint64_t bytes = end - message, padded = (bytes + 9 + SHA_BLOCK - 1) / SHA_BLOCK * SHA_BLOCK;
        uint64_t bits = __builtin_bswap64(8 * bytes);
        memset(end, 0, padded - bytes);
        *end = 0x80;
        memcpy(message + padded - 8, &bits, 8);
        uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
        compress(state, message, padded / SHA_BLOCK);
        for (int i = 0; i < 8; i++) {
            uint32_t word = __builtin_bswap32(state[i]);
            memcpy(hashes + HASH_BYTES + 4 * i, &word, 4);
        }
    }
    free(message);
    return 0;
}
