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

#define MAX_SHARDS 32
#define GROUP_SLOTS 8
#define SHARD_MAGIC 0x31434544 /* "DEC1" */

/* Slots of which each root has a shard: shards.py says how. */
struct stripes {
    uint64_t data, shard_bytes, stored_bytes, set;
    uint64_t group_slots; /* read at once: the checksum then finds them in the CPU's cache */
};

struct trailer {
    uint32_t magic, index;
    uint64_t slot, set, write[2], hash;
};

/* The pieces of shard j of one slot: in the payload's whole pages, in rest, and what is not the slot's; their number. */
static int cut(const struct shape *shape, const struct stripes *stripes, uint64_t j, uint8_t *payload, uint64_t whole,
               uint8_t *rest, struct trailer *trailer, uint8_t *junk, struct iovec *pieces)
{
    uint64_t at = j * stripes->shard_bytes, end = at + stripes->shard_bytes;
    uint64_t last = end < shape->slot_bytes ? end : shape->slot_bytes;
    int count = 0;
    if (at < whole)
        pieces[count++] = (struct iovec){payload + at, (last < whole ? last : whole) - at};
    if (last > whole && last > at) {
        uint64_t from = at > whole ? at : whole;
        pieces[count++] = (struct iovec){rest + (from - whole), last - from};
    }
    if (end > last)
        pieces[count++] = (struct iovec){junk, end - (last > at ? last : at)};
    pieces[count++] = (struct iovec){trailer, sizeof *trailer};
    if (stripes->stored_bytes > stripes->shard_bytes + sizeof *trailer)
        pieces[count++] = (struct iovec){junk, stripes->stored_bytes - stripes->shard_bytes - sizeof *trailer};
    return count;
}

/* deepinfer_read_run from the page caches of the data shards' roots, with junk of stored_bytes; -1 also where not all of it
   is there, or a slot's shards are not of one write. Shards' own hashes are not looked at: the block's is. */
int deepinfer_read_shards(const struct shape *shape, const struct stripes *stripes, const int *fds, uint8_t *junk,
                          uint64_t first_slot, uint64_t slots, uint8_t *const *payloads, const uint32_t *lengths,
                          const uint8_t *keys, const uint64_t *generations, uint8_t *bounce, uint8_t *good)
{
    if (stripes->data > MAX_SHARDS || stripes->group_slots > GROUP_SLOTS)
        return -1;
    for (uint64_t begin = 0; begin < slots; begin += stripes->group_slots) {
        uint64_t end = begin + stripes->group_slots < slots ? begin + stripes->group_slots : slots;
        struct trailer trailers[GROUP_SLOTS], firsts[GROUP_SLOTS];
        for (uint64_t j = 0; j < stripes->data; j++) {
            struct iovec pieces[5 * GROUP_SLOTS];
            uint8_t *rest = bounce;
            int count = 0;
            for (uint64_t i = begin; i < end; i++) {
                uint64_t whole = lengths[i] & -(uint64_t)PAGE_BYTES;
                count += cut(shape, stripes, j, payloads[i], whole, rest, &trailers[i - begin], junk, pieces + count);
                rest += shape->slot_bytes - whole;
            }
            off_t offset = (off_t)((first_slot + begin) * stripes->stored_bytes);
            ssize_t moved = preadv2(fds[j], pieces, count, offset, RWF_NOWAIT);
            if (moved < 0 || (uint64_t)moved != (end - begin) * stripes->stored_bytes)
                return -1;
            if (!j)
                memcpy(firsts, trailers, sizeof firsts);
            for (uint64_t i = 0; i < end - begin; i++) {
                const struct trailer *of = &trailers[i];
                if (of->magic != SHARD_MAGIC || of->index != j || of->set != stripes->set ||
                    of->slot != first_slot + begin + i || memcmp(of->write, firsts[i].write, sizeof of->write))
                    return -1;
            }
        }
        deepinfer_check_run(shape, end - begin, payloads + begin, lengths + begin, keys + begin * shape->key_bytes,
                            generations + begin, bounce, good + begin);
    }
    return 0;
}
