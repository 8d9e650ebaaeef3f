/* A step's decision about its drafts: `spec_decode/decision.py` says what is computed, and its Python twin in which order.
   To the same bits: products and sums are not contracted, and nothing is summed in another order. */

#include <string.h>

#define BITS 10
#define BUCKETS (1 << BITS)

/* alive [R, S]: chances [R, S] up to scheduled [R], multiplied along S if they are of each draft alone; best [R * S]: the same, the highest
   first. They lie in 0..1, so that their bits are whole numbers below 2^30 in the same order. keys: room for 2 R * S. */
void survivals(const float *chances, const long *scheduled, float *alive, float *best, unsigned *keys, long requests,
               long positions, long multiplied)
{
    long total = requests * positions, at = 0;
    unsigned counts[3][BUCKETS];
    memset(counts, 0, sizeof counts);
    for (long r = 0; r < requests; r++) {
        float before = 1;
        for (long s = 0; s < positions; s++, at++) {
            float chance = chances[at] > 0 ? chances[at] : 0;
            chance = s < scheduled[r] ? (chance < 1 ? chance : 1) : 0;
            before = multiplied ? before * chance : chance;
            alive[at] = before;
            unsigned key;
            memcpy(&key, &before, sizeof key);
            keys[at] = key = ((unsigned)1 << 3 * BITS) - 1 - key; /* the highest first */
            for (int digit = 0; digit < 3; digit++)
                counts[digit][key >> digit * BITS & (BUCKETS - 1)]++;
        }
    }
    unsigned *from = keys, *to = keys + total;
    for (int digit = 0; digit < 3; digit++) {
        unsigned sum = 0;
        for (int bucket = 0; bucket < BUCKETS; bucket++) {
            unsigned count = counts[digit][bucket];
            counts[digit][bucket] = sum;
            sum += count;
        }
        for (long i = 0; i < total; i++)
            to[counts[digit][from[i] >> digit * BITS & (BUCKETS - 1)]++] = from[i];
        unsigned *swap = from;
        from = to, to = swap;
    }
    for (long i = 0; i < total; i++) {
        unsigned key = ((unsigned)1 << 3 * BITS) - 1 - from[i];
        memcpy(best + i, &key, sizeof key);
    }
}

/* budget.convex_floor of seconds [n], in place; xs and ys: room for n each. */
static void make_convex(double *seconds, long n, double *xs, double *ys)
{
    long bent = 0, corners = 1;
    for (long i = 0; i + 2 < n && !bent; i++) {
        double rise = seconds[i + 1] - seconds[i], next = seconds[i + 2] - seconds[i + 1];
        bent = next - rise * (1.0 + 1e-9) < -2e-9 * rise;
    }
    if (!bent)
        return;
    xs[0] = 0, ys[0] = seconds[0];
    for (long x = 1; x < n; x++) {
        if (x < n - 1) {
            double rise = seconds[x] - seconds[x - 1], next = seconds[x + 1] - seconds[x];
            if (!(next - rise * (1.0 + 1e-9) > 0.0))
                continue;
        }
        double y = seconds[x];
        while (corners > 1 && (ys[corners - 1] - ys[corners - 2]) * (x - xs[corners - 1]) >=
                                  (y - ys[corners - 1]) * (xs[corners - 1] - xs[corners - 2]))
            corners--;
        xs[corners] = x, ys[corners++] = y;
    }
    for (long corner = 0; corner + 1 < corners; corner++) {
        double slope = (ys[corner + 1] - ys[corner]) / (xs[corner + 1] - xs[corner]);
        for (long x = (long)xs[corner]; x < xs[corner + 1]; x++)
            seconds[x] = ys[corner] + slope * (x - xs[corner]);
    }
    seconds[n - 1] = ys[corners - 1];
}

/* budget.allot: drafts [R] of alive [R, S], of which best [R * S] is the order. */
static void allot(const float *alive, const float *best, long budget, long *drafts, long requests, long positions)
{
    long total = requests * positions, taken = 0;
    float least = budget > 0 && budget < total ? best[budget - 1] : 0;
    for (long r = 0; r < requests; r++) {
        drafts[r] = 0;
        for (long s = 0; budget > 0 && s < positions; s++)
            drafts[r] += least > 0 ? alive[r * positions + s] >= least : alive[r * positions + s] > 0;
        taken += drafts[r];
    }
    for (long s = positions; s-- > 0 && least > 0;)
        for (long r = requests; r-- > 0 && taken > budget;)
            if (alive[r * positions + s] == least)
                drafts[r]--, taken--;
}

/* The budget, and drafts [R] that it goes to. verify [limit + 1]: seconds with so many drafts; expected [R * S]: what it is chosen by, NULL for
   best; room: for 3 (limit + 1). */
long decide(const float *alive, const float *best, const double *expected, const double *verify, double *room,
            long *drafts, long requests, long positions, long limit, double sampling, double draft_s, double price,
            long delayed, long least)
{
    long budget = 0, most = limit < requests * positions ? limit : requests * positions;
    double *seconds = room, first = verify[0] + draft_s, tokens = sampling, highest;
    for (long i = 0; i <= limit; i++)
        seconds[i] = first + price * ((verify[i] + draft_s) - first);
    make_convex(seconds, limit + 1, room + limit + 1, room + 2 * (limit + 1));
    highest = tokens / seconds[0];
    for (long i = 1; i <= most; i++) {
        tokens += expected ? expected[i - 1] : best[i - 1];
        double rate = tokens / seconds[i];
        if (rate > highest)
            highest = rate, budget = i;
        else if (!delayed)
            break;
    }
    long low = 0, high = limit + 1; /* the last that takes no longer */
    while (low < high) {
        long middle = low + (high - low) / 2;
        if (verify[middle] <= verify[budget])
            low = middle + 1;
        else
            high = middle;
    }
    budget = low - 1 > least ? low - 1 : least;
    allot(alive, best, budget, drafts, requests, positions);
    return budget;
}
