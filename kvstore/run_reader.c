/* Reads neighbouring slots into the buffers of their blocks and checks each: what load_run.py does, without the interpreter's
   lock. header.py says what a header is; nothing here decides why a block is not whole. */

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines"
#endif

#define PAGE_BYTES 4096
#define CALL_SLOTS 512 /* two buffers each, of the 1024 that Linux takes at once */

typedef struct { uint64_t low, high; } hash128;
typedef hash128 (*hash_function)(const void *, size_t);

/* What all slots of a store have in common. */
struct shape {
    uint64_t slot_bytes, header_bytes, call_slots;
    uint64_t prefix_bytes; /* of a header, the same in all of a namespace */
    uint64_t key_bytes;
    const uint8_t *prefix;
    hash_function hash;
};

static int same(const struct shape *shape, const uint8_t *header, const uint8_t *key, uint64_t generation,
                const uint8_t *payload, uint32_t length)
{
    if (memcmp(header, shape->prefix, shape->prefix_bytes))
        return 0;
    header += shape->prefix_bytes;
    if (memcmp(header, key, shape->key_bytes))
        return 0;
    header += shape->key_bytes;
    if (memcmp(header, &generation, sizeof generation) || memcmp(header + 8, &length, sizeof length))
        return 0;
    hash128 found = shape->hash(payload, length);
    uint64_t high = __builtin_bswap64(found.high), low = __builtin_bswap64(found.low);
    return !memcmp(header + 12, &high, 8) && !memcmp(header + 20, &low, 8);
}

/* Blocks whose slots have been read: payloads up to their last whole page, and in bounce, slot after slot, what is left of
   each and the page of its header. good[i] says whether block i is whole; the rest of its payload joins it. */
void deepinfer_check_run(const struct shape *shape, uint64_t slots, uint8_t *const *payloads, const uint32_t *lengths,
                         const uint8_t *keys, const uint64_t *generations, const uint8_t *bounce, uint8_t *good)
{
    for (uint64_t i = 0; i < slots; i++) {
        uint64_t whole = lengths[i] & -(uint64_t)PAGE_BYTES;
        memcpy(payloads[i] + whole, bounce, lengths[i] - whole);
        bounce += shape->slot_bytes - whole;
        good[i] = same(shape, bounce - shape->header_bytes, keys + i * shape->key_bytes, generations[i], payloads[i],
                       lengths[i]);
    }
}

/* 0, or the errno of a read; -1 where one brought less than asked for. bounce has room for the slots of a call. */
int deepinfer_read_run(const struct shape *shape, int fd, uint64_t first_slot, uint64_t slots, uint8_t *const *payloads,
                       const uint32_t *lengths, const uint8_t *keys, const uint64_t *generations, uint8_t *bounce,
                       uint8_t *good)
{
    for (uint64_t begin = 0; begin < slots; begin += shape->call_slots) {
        uint64_t end = begin + shape->call_slots < slots ? begin + shape->call_slots : slots;
        struct iovec pieces[2 * CALL_SLOTS];
        uint8_t *rest = bounce;
        int count = 0;
        for (uint64_t i = begin; i < end; i++) {
            uint64_t whole = lengths[i] & -(uint64_t)PAGE_BYTES;
            if (whole)
                pieces[count++] = (struct iovec){payloads[i], whole};
            pieces[count++] = (struct iovec){rest, shape->slot_bytes - whole};
            rest += shape->slot_bytes - whole;
        }
        ssize_t moved = preadv(fd, pieces, count, (off_t)((first_slot + begin) * shape->slot_bytes));
        if (moved < 0)
            return errno;
        if ((uint64_t)moved != (end - begin) * shape->slot_bytes)
            return -1;
        deepinfer_check_run(shape, end - begin, payloads + begin, lengths + begin, keys + begin * shape->key_bytes,
                            generations + begin, bounce, good + begin);
    }
    return 0;
}
